"""Guards: whoever uses a parameter outside of its unit's forward gets its current value.

[Note: guarded parameters]
Outside of its unit's forward a held parameter has another Python class, whose `__torch_function__` sees each use. A use
applies a pending update, fetches a released unit, and then runs on the parameter, which is *opened* meanwhile: of a
class that sees nothing. So whoever reads a parameter gets its current value. Inside its unit's forward a parameter has
a class that sees nothing but `p.data`, so that operations cost nothing more.

| tensor                                     | outside its unit | inside it | its memory                           |
|--------------------------------------------|------------------|-----------|--------------------------------------|
| a resident parameter                       | guarded          | watched   | always there; a value may be pending |
| a streamed parameter                       | guarded          | watched   | there while its unit is available    |
| an alias of a streamed one (`.t()`, `[0]`) | guarded          | guarded   | the same                             |
| a view that a module has as a buffer       | guarded          | watched   | that of its parameter                |
| an inner tensor of a parameter             | guarded          | watched   | the same                             |
| any of these that is a wrapper (a DTensor) | guarded          | plain     | that of its inner tensors            |
| what such a wrapper is made of             | guarded          | plain     | the same                             |

All that is true of one thread: the one that runs the unit, or that uses the parameter. For other threads a watched or
opened parameter is guarded. So their use is an entry of its own, and waits for the end of this one ([Note: threads] in
entries.py). A class is the same for all threads; what differs is the `__torch_function__` that torch finds there
(`Here`). Only a wrapper, and what it is made of, is plain for all threads inside its unit.

Torch's transformer and attention take a faster path if no tensor has a `__torch_function__`. Where they ask for it,
they find none (`only_asks`); the operation that they call next does.

Torch runs operations of plain DTensors in C++, and of subclasses through Python; and quantised wrappers compute in
their own `__torch_function__`, which another class would have to put off. So a wrapper is plain inside its unit, where
`p.data` of it is not seen. So is what it is made of, whose classes some of them compare. Outside it is opened together
with its inner tensors.

A graph that used a streamed parameter needs it again: the node of each result fetches it when its gradient arrives.
The node of somebody's `autograd.Function` is not seen, and may have saved a parameter that the function was given. So
the unit of that one stays until the next step.
docs/compatibility.md lists what does not pass `__torch_function__`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from offload import torch_private
from offload.entries import entry
from offload.errors import ConfigError, ReleasedParameterError
from offload.interrupts import uninterrupted, uninterrupted_entry
from offload.model.fetch import HeldUnits
from offload.model.flat_param import FlatParameters
from offload.model.held_param import HeldBeside
from offload.model.inner import is_wrapper, leaves_of, rebuilt
from offload.model.inner import kind_of as own_kind_of
from offload.model.loss import cells_of_linear
from offload.model.tiling import SERVED, Tiling
from offload.model.torch_functions import UNCOUNTED, Kind, changed, counting, device_of, kind_of, moved_to, takes_lists
from offload.model.torch_helpers import (
    CHECKPOINT,
    call_eagerly,
    calls_that_save,
    graphs_of,
    instances_in,
    module_on_the_move,
    tensors_in,
)
from offload.model.unit import Unit
from offload.ranks.tensor_parallel import is_dtensor

_DATA: Any = Tensor.data
_VERSION: Any = Tensor._version

_META, _SET, _LIKE, _BACKWARD = Kind.META, Kind.SET, Kind.LIKE, Kind.BACKWARD  # looked up there, a member takes longer

_PARAMETER_NEW = nn.Parameter.__new__.__code__

_PLAIN_HERE = dict.fromkeys(("watched", "opened"), torch_private.disabled_torch_function)
"""Attributes of `Here` in a thread that uses guarded tensors."""


class _GuardsRef:
    """What the guarded classes of one optimizer refer to. It outlives the optimizer.

    Attributes:
        guards: returns the guards of the optimizer; None once that is gone.
        is_elsewhere: whether values may be in a store, and no longer in the parameter.
    """

    def __init__(self, guards: Guards, *, is_elsewhere: bool) -> None:
        self.guards: weakref.ref[Guards] | Callable[[], None] = weakref.ref(guards)
        self.is_elsewhere = is_elsewhere


class _Held:
    """Base of the classes that tensors get in place of their own class, `_kind`."""

    __slots__ = ()
    _kind: type[Tensor]
    _guards_ref: _GuardsRef
    _is_inside: bool

    @classmethod
    def guard(cls, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Called by torch for an operation with a tensor that is guarded in this thread."""
        return call_eagerly(cls._used, func, args, kwargs or {})

    @classmethod
    def _used(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kind = kind_of(func)
        if kind is not _META and kind is not _SET and kind is not _LIKE:
            guards = cls._guards_ref.guards()
            if guards is not None:
                return guards.call(kind, func, args, kwargs)
            if cls._guards_ref.is_elsewhere:
                _refuse(getattr(func, "__name__", str(func)))
        return torch_private.disabled_torch_function(func, (), args, kwargs)

    @property
    def _is_plain(self) -> bool:
        """Whether the tensor is plain for this thread, as one that is not guarded."""
        return self.__torch_function__ is torch_private.disabled_torch_function  # type: ignore[attr-defined]

    def __repr__(self, **options: Any) -> str:
        if self._is_plain and self._kind is nn.Parameter:  # torch prints those of this very class otherwise
            return repr(nn.Parameter(_DATA.__get__(self), self.requires_grad))  # type: ignore[attr-defined]
        if self._is_plain:
            return str(self._kind.__repr__(self, **options))  # type: ignore[arg-type]
        if self._guards_ref.guards() is None and self._guards_ref.is_elsewhere:
            return f"{self._kind.__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, released)"  # type: ignore[attr-defined]
        return str(self._plainly(repr))

    def __format__(self, spec: str) -> str:
        def formatted(tensor: Any) -> str:
            is_number = self._kind is Tensor and not tensor.dim()  # torch asks for this very class
            return format(tensor.item(), spec) if is_number else object.__format__(tensor, spec)

        return str(formatted(self) if self._is_plain else self._plainly(formatted))

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Torch's `set_`, which does not pass `__torch_function__`."""
        set_memory: Any = Tensor.set_
        if self._is_plain:
            return set_memory(self, *args, **kwargs)
        return self.guard(set_memory, (), (self, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copied(self, memo) if self._is_plain else self._plainly(lambda tensor: _copied(tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_plain:
            return self._kind.__reduce_ex__(self, protocol)  # type: ignore[arg-type]
        is_streamed = self._guards_ref.is_elsewhere
        return self._plainly(lambda tensor: (_cloned(tensor) if is_streamed else tensor).__reduce_ex__(protocol))

    def _plainly(self, use: Callable[[Any], Any]) -> Any:
        """Calls `use(self)`, while this tensor is plain and has its current values."""
        guards = self._guards_ref.guards()
        if guards is not None:
            return guards.plainly(self, use)
        if self._guards_ref.is_elsewhere:
            _refuse("a copy")
        self.__class__ = self._kind  # type: ignore[assignment]  # its values are here for good
        return use(self)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._kind(*args, **kwargs)  # `type(p)(x)` is a plain one

    @property
    def _is_param(self) -> bool:
        """What `isinstance(x, nn.Parameter)` asks for."""
        return issubclass(self._kind, nn.Parameter) or bool(self.__dict__.get("_is_param", False))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # nn.Parameter.__new__ ends by setting it. Of a DTensor it is a note, and its class stays.
        if not issubclass(self._kind, nn.Parameter):
            self.__dict__["_is_param"] = value
        self.__class__ = self._kind if self._kind is not Tensor else nn.Parameter  # type: ignore[assignment]


def is_held(tensor: Tensor) -> bool:
    """Whether an optimizer of this library holds a tensor."""
    return isinstance(tensor, _Held) and tensor._guards_ref.guards() is not None


def is_released(tensor: Tensor) -> bool:
    """Whether a tensor is a streamed parameter that was not fetched when its optimizer was closed."""
    return isinstance(tensor, _Held) and tensor._guards_ref.guards() is None and tensor._guards_ref.is_elsewhere


class _Guarded(_Held):
    """Base of the guarded classes: each use of the tensor is seen."""

    __slots__ = ()


class _Opened(_Held):
    """Base of the classes of tensors that are used now. They are plain for the thread that uses them."""

    __slots__ = ()


class _Watched(_Held):
    """Base of the classes of parameters whose unit runs. In the threads that run it, only `p.data` is seen."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        guards = self._guards_ref.guards()
        made: Tensor = _DATA.__get__(self) if guards is None else guards.data_of(self, runs=self._is_plain)
        return made

    @data.setter
    def data(self, value: Tensor) -> None:
        guards = self._guards_ref.guards()
        if guards is None:
            _DATA.__set__(self, value)
        else:
            guards.point_to(self, value)

    def detach(self) -> Tensor:
        made: Tensor = Tensor.detach(self)  # type: ignore[arg-type]
        if self._is_plain and sys._getframe(1).f_code is _PARAMETER_NEW:
            made = made.clone() if self._guards_ref.is_elsewhere else made
            made.__class__ = type(self)  # type: ignore[assignment]
        return made


_ASKED: dict[type[_Held], str] = {_Guarded: "guarded", _Opened: "opened", _Watched: "watched"}
"""By base: the attribute of `Here` with the `__torch_function__` of its classes."""


class _Plain:
    """A context in which guarded tensors are plain in this thread.

    They are guarded again even if a signal interrupts the body.
    """

    def __init__(self, guards: Guards, used: Sequence[Any]) -> None:
        self._guards = guards
        self._here = guards.here
        # What is watched by another thread keeps its class.
        self._guarded: list[tuple[Any, Any]] = [(one, one.__class__) for one in used if isinstance(one, _Guarded)]
        self._before: dict[str, Any] = {}

    @uninterrupted_entry
    def __enter__(self) -> None:
        own = vars(self._here)
        self._before = {name: own[name] for name in _PLAIN_HERE if name in own}
        own.update(_PLAIN_HERE)
        for tensor, guarded in self._guarded:
            tensor.__class__ = self._guards.opened(guarded)

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        for tensor, guarded in self._guarded:
            tensor.__class__ = self._guards.class_now(tensor, guarded)
        own = vars(self._here)
        for name in _PLAIN_HERE:
            del own[name]
        own.update(self._before)


_PAST_TORCH_FUNCTION = ("to_local", "full_tensor", "redistribute")
"""Methods of a DTensor that read its values without `__torch_function__`."""


def _methods_of(kind: type[Tensor]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of a wrapper that read what is in it without `__torch_function__`: all that its class adds."""
    if kind is torch_private.dtensor_class():
        yield from ((name, getattr(kind, name)) for name in _PAST_TORCH_FUNCTION)
        return
    for base in kind.__mro__[: kind.__mro__.index(Tensor)]:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and not name.startswith("__"):
                yield name, getattr(kind, name)


def _seen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of a guarded class count as a use of the tensor, as an operation does."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).guard(method, (), (self, *args), kwargs)

    return call


def _cannot(_: Any) -> NoReturn:
    raise AttributeError("__tensor_flatten__")


def _refuse(what: str) -> NoReturn:
    raise ReleasedParameterError(
        f"{what} needs the values of a streamed parameter, and the optimizer that held them is closed or gone: use it "
        "before optimizer.close(), or leave room for all parameters on the device when you close it"
    )


def _cloned(tensor: Tensor) -> Tensor:
    is_wrapped = is_wrapper(own_kind_of(tensor))
    if is_wrapped and not is_dtensor(tensor):
        made: Tensor = rebuilt(tensor, lambda leaf: leaf.detach().clone())
    else:
        made = tensor.detach().clone()
    if not isinstance(tensor, nn.Parameter):
        return made
    if is_wrapped:  # a parameter is one by a note on it
        return nn.Parameter(made, tensor.requires_grad)
    made = type(tensor)(made, tensor.requires_grad)
    vars(made).update(vars(tensor))  # what it consists of beside its elements
    return made


def _copied(tensor: Any, memo: dict[int, Any]) -> Tensor:
    if isinstance(tensor, nn.Parameter) and not is_wrapper(own_kind_of(tensor)):
        copied: Tensor = own_kind_of(tensor).__deepcopy__(tensor, memo)
        return copied
    made = _cloned(tensor)
    memo[id(tensor)] = made
    return made


class Guards:
    """Makes each use of a held parameter see its current value; see [Note: guarded parameters].

    Args:
        parameters: the held parameters.
        units: applies the pending update of a unit, or fetches it, when a parameter is used.
        moves: called when a module is moved to a device; returns whether that moves the held model, which is there
            then.
    """

    def __init__(
        self, parameters: FlatParameters, units: HeldUnits, moves: Callable[[nn.Module, torch.device], bool]
    ) -> None:
        layout = parameters.layout
        self._unit_of = [parameters.units[spec.unit] for spec in layout.specs]
        self._unit_of_slice = [parameters.units[one.unit] for one in layout.slices]
        self._names = [spec.name for spec in layout.specs]
        self._parameters = parameters
        self._units = units
        self.entries = units.entries
        self.here = units.running.here
        self._moves = weakref.WeakMethod(moves)
        self._tiling = Tiling(layout, parameters, units)
        self._resident_ref, self._streamed_ref = (_GuardsRef(self, is_elsewhere=streams) for streams in (False, True))
        self._classes: dict[tuple[type[_Held], type[Tensor], bool, bool], type[Tensor]] = {}
        self._aliases: Mapping[Tensor, int] = {}

    def guard_aliases(self, aliases: Mapping[Tensor, int]) -> None:
        """Makes each use of a view of a parameter count as a use of the parameter.

        Args:
            aliases: plain views, and the numbers of their parameters.
        """
        self._aliases = aliases
        for tensor, number in aliases.items():
            one = HeldBeside(tensor, streams=self._parameters.streams(number))
            self._parameters.guard_beside(self._unit_of[number], one)
            one.guard_with(self.class_for)

    def class_for(
        self, kind: type[Tensor], *, streams: bool, runs: bool = False, is_inside: bool = False
    ) -> type[Tensor]:
        """The guarded class of tensors whose own class is `kind`.

        Args:
            kind: their own class.
            streams: whether it is for streamed parameters.
            runs: whether it is for parameters whose unit runs.
            is_inside: whether it is for what wrappers are made of.
        """
        return self._class(_Watched if runs else _Guarded, kind, streams, is_inside)

    def opened(self, guarded: type[Any]) -> type[Tensor]:
        """The class that tensors of a guarded class have while they are used."""
        return self._class(_Opened, guarded._kind, guarded._guards_ref is self._streamed_ref, guarded._is_inside)

    def _class(self, base: type[_Held], kind: type[Tensor], streams: bool, is_inside: bool) -> type[Tensor]:
        key = base, kind, streams, is_inside
        if (is_inside or is_wrapper(kind)) and base is not _Guarded:
            return kind
        if key not in self._classes:
            ref = self._streamed_ref if streams else self._resident_ref
            names = {
                "_kind": kind,
                "_guards_ref": ref,
                "_is_inside": is_inside,
                "__module__": __name__,
                "__slots__": (),
            }
            if is_wrapper(kind):
                names |= {name: _seen(method) for name, method in _methods_of(kind)}
                # `module.to()` swaps subclasses that can be taken apart for new tensors; this one has to stay.
                names["__tensor_flatten__"] = property(_cannot)
            # Torch asks the tensor, or its class. A property of a class is found in the class of that.
            asked = property(partial(getattr, self.here, _ASKED[base]))
            names["__torch_function__"] = asked
            meta = type(type(kind).__name__, (type(kind),), {"__torch_function__": asked})
            name = f"{base.__name__[1:]}{kind.__name__}"
            if base is _Opened:  # torch prints the name
                name = "tensor" if kind is Tensor else kind.__name__
            self._classes[key] = meta(name, (base, kind), names)
        return self._classes[key]

    def call(self, kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls `func(*args, **kwargs)`, a function of a kind, where some of the arguments are guarded."""
        if kind is _BACKWARD:  # it waits for threads of autograd, which enter
            return self._dispatch(kind, func, args, kwargs)
        with self.entries.lock:
            result = self._dispatch(kind, func, args, kwargs)
        self.entries.pause()
        return result

    def plainly(self, tensor: Any, use: Callable[[Tensor], Any]) -> Any:
        """Calls `use(tensor)`, while a guarded tensor is plain and has its current values."""
        opened = self._with_inner([tensor])
        with self.entries.lock, self._units.used(self._units_of([tensor])), _Plain(self, opened):
            result = use(tensor)
        self.entries.pause()
        return result

    def stop(self, *, are_here: bool) -> None:
        """Stops guarding, because the optimizer is closing.

        Args:
            are_here: whether all values are in the model for good.
        """
        for ref in (self._resident_ref, self._streamed_ref):
            ref.guards = lambda: None
        self._streamed_ref.is_elsewhere = not are_here
        if are_here:
            self._parameters.stop_guarding()

    def _dispatch(self, kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        answer = _ANSWERS.get(func) or _ANSWERS.get(kind)
        if answer is not None and (result := answer(self, func, args, kwargs)) is not NotImplemented:
            return result
        if self._parameters.tiles:
            self._require_no_tile(changed(func, args, kwargs))
        if self._parameters.streams_any and takes_lists(func):
            return self._piece_by_piece(func, args, kwargs)
        return self._run(func, args, kwargs)

    # Answers that are more than to run a function with current values. Each has the form of `_run`, and returns
    # NotImplemented where the function is run as any other.

    def _data(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.data_of(args[0])

    def _set_data(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.point_to(args[0], args[1])

    def _version(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._version_of(args[0])

    def _grad(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._gradients(*args, **kwargs)  # it may run modules again, so their guards stay

    def _backward(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._accumulate(*args, **kwargs)  # as for `_grad`

    def _detach(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        is_made = self._is_ours(args[0]) and _is_for_a_parameter()
        return self._detached(args[0]) if is_made else NotImplemented

    def _in_tiles(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._parameters.tiles:
            return NotImplemented
        result = self._tiling.answer(func, args, kwargs)
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, Tensor):
                self._guard_alias(one)
        return result

    def _require_no_tile(self, written: Sequence[Any]) -> None:
        """Requires that none of these tensors, to which a call writes, is a view of a tile."""
        for one in self._guarded_in(written):
            if (place := self._place_of(one)) is not None and place[0].weight is not None:
                raise ReleasedParameterError(
                    f"a part of {place[0].home.name}, which runs in tiles, is a view of a tile inside the forward, and "
                    "what is written there would be lost: write into the parameter outside of the forward, or inside "
                    "`with optimizer.gathered(parameter, writable=True):`"
                )

    def _loss(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answers the loss of an output layer, whose backward may need no values."""
        hidden, weight, bias, loss = args
        in_tiles = self._tiling.loss(hidden, weight, bias, loss)
        if in_tiles is not NotImplemented:
            return in_tiles
        return self._run(func, args, kwargs, backward_uses=not loss.made_in_forward)

    def _uncounted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._run(counting(func), args, kwargs)

    def _move(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answers a call that moves or casts. If it moves the whole held model, that is moved first."""
        one = args[0]
        if not self._is_ours(one):
            return NotImplemented
        device = moved_to(func, args, kwargs)
        is_wrapped = is_wrapper(own_kind_of(one))
        module = module_on_the_move() if device is not None or is_wrapped else None
        # A quantised wrapper may answer another call by what it stands for, even if that has its dtype and its device.
        if device == device_of(one) and (module is not None or not is_wrapped or is_dtensor(one)):
            return one
        if module is None:
            return NotImplemented
        moves = self._moves()
        if device is not None and moves is not None and moves(module, device):
            return one
        number = self._parameters.number_of(one) if is_wrapped else None
        if number is None:
            return NotImplemented
        # For other tensors `module.to()` would set `p.data` next; wrappers it would swap for new ones.
        raise moved_elsewhere(self._names[number], one, self._run(func, args, kwargs))

    def _export(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Gives another library copies of streamed parameters, whose memory comes and goes."""
        if not self._has_streamed(args):
            return NotImplemented
        made = func(*(self._copy_of(one) for one in args), **kwargs)
        if isinstance(made, np.ndarray):
            made.flags.writeable = False  # a write would go into the copy, and be lost
        return made

    def _copy_of(self, value: Any) -> Any:
        return self.plainly(value, lambda one: one.detach().clone()) if self._is_ours(value) else value

    def _give_memory(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number = self._parameters.number_of(args[0]) if self._is_ours(args[0]) else None
        if not self._has_streamed(args):
            result = self._run(func, args, kwargs)
            if number is not None:
                self._parameters.held[number].forget_data()
            return result
        if func is Tensor.set_ and number is not None:
            raise ReleasedParameterError(
                f"{self._names[number]} is streamed, and set_(...), by which torch also assigns a parametrized weight, "
                "would point it elsewhere than where it is streamed to: write into it with p.copy_(...) under "
                "torch.no_grad()"
            )
        raise ReleasedParameterError(
            f"{func.__name__} on a streamed parameter would take it from where it is streamed to: use "
            "p.detach().clone(), or the model after optimizer.close()"
        )

    def _gradients(self, outputs: Any, inputs: Sequence[Any], **options: Any) -> tuple[Tensor | None, ...]:
        """Runs `torch.autograd.grad`, which cannot take guarded parameters.

        Autograd gets the gradient edge of the leaf of each one instead, and of its tiles if it has any.
        """
        allows, fills = options.pop("allow_unused", None), options.pop("materialize_grads", False)
        if fills and allows is False:
            raise ValueError("materialize_grads=True with allow_unused=False")  # as torch has it
        leaves = [[one, *self._tiling.leaves_of(one)] for one in inputs]
        edges = _as_edges([leaf for several in leaves for leaf in several])
        is_split = len(edges) > len(leaves)
        found = iter(
            torch.autograd.grad(
                _as_edges(outputs), edges, allow_unused=bool(allows or fills or is_split), **_as_edges(options)
            )
        )
        grads: list[Tensor | None] = []
        for number, (one, *tiles) in enumerate(leaves):
            grad, parts = next(found), [next(found) for _ in tiles]
            if any(part is not None for part in parts):
                joined = self._tiling.joined(one, parts).to(one.device)
                grad = joined if grad is None else grad + joined
            if grad is None and fills:
                grad = torch.zeros_like(one, requires_grad=options.get("create_graph", False))
            if grad is None and not allows:
                raise RuntimeError(
                    f"The differentiated Tensor at index {number} appears to not have been used in the graph. Set "
                    "allow_unused=True if this is the desired behavior."
                )
            grads.append(grad)
        return tuple(grads)

    def _accumulate(self, tensors: Any, grad_tensors: Any = None, *, inputs: Any = None, **options: Any) -> None:
        """Runs `torch.autograd.backward`, which may run units again.

        So nothing is opened meanwhile, and autograd gets gradient edges of guarded tensors, as from `_gradients`.
        """
        if isinstance(grad_tensors, list | tuple):
            grad_tensors = tuple(map(self._copy_of, grad_tensors))
        else:
            grad_tensors = self._copy_of(grad_tensors)
        torch.autograd.backward(_as_edges(tensors), grad_tensors, inputs=_as_edges(inputs), **options)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, backward_uses: bool = True) -> Any:
        used = list(self._guarded_in((args, kwargs)))
        is_saved = self._is_saved(used)
        units = self._units_of(used)
        if self._parameters.tiles:
            self._note_whole_uses(func, used, units, (args, kwargs))
        opened = self._with_inner(used)
        with self._units.used(units), _Plain(self, opened):
            result = func(*args, **kwargs)
        if units:
            self._guard_result(result, units, backward_uses=backward_uses)
            if is_saved:
                self._units.keep(units)
        return result

    def _note_whole_uses(self, func: Any, used: Sequence[Any], units: Sequence[Unit], given: Any) -> None:
        """Looks at the tiled weights that an operation uses as a whole.

        Raises:
            BudgetError: if it has other tensors on the device, where there is no room for one of them.
        """
        for one in used:
            self._tiling.note_whole_use(one)
        home = self._parameters.device
        in_ram = [unit for unit in units if unit.is_in_ram] if home.type != "cpu" else []
        if in_ram and any(one.device == home and one.dim() for one in instances_in(given, Tensor)):
            self._units.refuse_whole(in_ram[0], getattr(func, "__name__", str(func)))

    def _with_inner(self, used: Sequence[Any]) -> Sequence[Any]:
        """These tensors, and what the wrappers among them are made of."""
        if not self._parameters.wrappers:
            return used
        wrappers = [one for one in used if is_wrapper(own_kind_of(one)) and not is_dtensor(one)]
        return [*used, *(leaf for one in wrappers for leaf in leaves_of(one) if self._is_ours(leaf))]

    def _is_saved(self, used: Sequence[Any]) -> bool:
        """Whether an operation is part of a function or a checkpoint that may save these tensors for an unseen node.

        Args:
            used: the tensors that it uses.

        Raises:
            ReleasedParameterError: if a checkpoint has saved one that had no current value then.
        """
        has_node = torch.is_grad_enabled()
        if torch_private.saved_tensors_hooks(False) is None if has_node else not self._parameters.streams_any:
            return False  # there is no checkpoint; a function saves after its last operation
        is_saved = False
        for call, args in calls_that_save(used):
            if call.f_code is not CHECKPOINT:
                others = [one for one in args if isinstance(one, Tensor) and not self._is_ours(one)]
                is_saved = is_saved or self._units.is_training or any(one.requires_grad for one in others)
            elif has_node:
                for one in used:
                    if any(one is arg for arg in args):
                        self._require_current(one)
                is_saved = True
        return is_saved

    def _require_current(self, tensor: Any) -> None:
        place = self._place_of(tensor)
        if place is not None and not self._units.is_current(place[0]):
            number = self._parameters.number_of(tensor)
            what = f"a part of {place[0].title}" if number is None else self._names[number]
            raise ReleasedParameterError(
                f"torch.utils.checkpoint was given {what} as an argument while its current value was not on the "
                "device, and has saved the memory of before: use the parameter inside of the function instead of "
                "giving it as an argument"
            )

    def _piece_by_piece(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operation on lists of tensors, one unit after the other: the device may lack room for all of them."""
        lists = [one for one in (*args, *kwargs.values()) if isinstance(one, list | tuple)]
        length = len(lists[0]) if lists else 0
        if not length or any(len(one) != length for one in lists):
            return self._run(func, args, kwargs)
        units = [self._units_of(self._guarded_in([one[at] for one in lists])) for at in range(length)]
        results: list[Any] = []
        for _, group in groupby(range(length), units.__getitem__):
            first, *others = group
            piece = slice(first, first + 1 + len(others))
            cut = {key: one[piece] if isinstance(one, list | tuple) else one for key, one in kwargs.items()}
            ones = [one[piece] if isinstance(one, list | tuple) else one for one in args]
            results.extend(self._run(func, ones, cut) or ())
        return results or None

    def class_now(self, tensor: Any, guarded: type[Any]) -> type[Tensor]:
        """The class that a tensor gets after a use, if its class was `guarded` before.

        It is another one if the use began or ended a forward of its unit.
        """
        number = self._parameters.number_of(tensor)
        runs = number is not None and self._units.running.watches(self._unit_of[number], number)
        streams = guarded._guards_ref is self._streamed_ref
        if not runs:
            return guarded
        return self.class_for(guarded._kind, streams=streams, runs=True, is_inside=guarded._is_inside)

    def _units_of(self, used: Iterable[Any]) -> list[Unit]:
        """The units that have to be fetched for a use of these tensors.

        A resident tensor needs no fetch: its pending update is applied here.
        """
        found: dict[Unit, None] = {}
        for tensor in used:
            if (place := self._place_of(tensor)) is not None:
                unit, streams = place
                if streams:
                    found[unit] = None
                else:
                    self._units.apply(unit)
        return list(found)

    def _place_of(self, tensor: Any) -> tuple[Unit, bool] | None:
        """The unit of a tensor, and whether it is streamed; None if the tensor is not ours any more."""
        number = self._parameters.number_of(tensor)
        number = self._aliases.get(tensor) if number is None else number
        if number is not None:
            return self._unit_of[number], self._parameters.streams(number)
        slices = (self._parameters.slice_at(leaf) for leaf in leaves_of(tensor))
        found = next((one for one in slices if one is not None), None)
        return None if found is None else (self._unit_of_slice[found], True)

    def _is_ours(self, value: Any) -> bool:
        """Whether a value is a tensor of this optimizer that is guarded in this thread."""
        is_held = isinstance(value, _Held) and value._guards_ref in (self._resident_ref, self._streamed_ref)
        return is_held and (isinstance(value, _Guarded) or not value._is_plain)

    def _has_streamed(self, tree: Any) -> bool:
        ref = self._streamed_ref
        return any(one._guards_ref is ref for one in self._guarded_in(tree))

    def _guarded_in(self, tree: Any) -> Iterator[Any]:
        """The guarded tensors of this optimizer in nested lists, tuples and dicts, each once."""
        seen: set[int] = set()
        for one in instances_in(tree, _Held):
            if id(one) not in seen and self._is_ours(one):
                seen.add(id(one))
                yield one

    def _guard_result(self, result: Any, units: Sequence[Unit], *, backward_uses: bool) -> None:
        """Guards tensors of a result that lie in a streamed parameter, and makes their nodes fetch the units again.

        Args:
            result: of an operation.
            units: whose parameters it used.
            backward_uses: whether the nodes use them, too.
        """
        for tensor in tensors_in(result):
            if self._parameters.number_of(tensor) is not None:
                continue
            kind = type(tensor)
            if kind is Tensor or (is_wrapper(kind) and not issubclass(kind, _Held)):
                self._guard_alias(tensor)
            if not torch.is_grad_enabled():  # asking a view that was written to for its node raises
                continue
            with torch_private.PastSubclasses():
                nodes = [one.grad_fn for one in graphs_of(tensor)]
            for node in nodes:
                assert node is not None
                self._units.fetch_before(node, units, is_used=backward_uses)

    def _guard_alias(self, tensor: Any) -> None:
        """Guards a tensor that lies in a streamed parameter, and what it is made of. Others stay as they are."""
        kind = type(tensor)
        if is_wrapper(kind):
            if not self._parameters.lies_in_streamed(tensor):
                return
            for leaf in () if is_dtensor(tensor) else leaves_of(tensor):
                if type(leaf) is Tensor and self._parameters.slice_at(leaf) is not None:
                    leaf.__class__ = self.class_for(Tensor, streams=True, is_inside=True)
        elif self._parameters.slice_at(tensor) is None:
            return
        tensor.__class__ = self.class_for(kind, streams=True)

    # Uses that need more than current values.

    @entry
    def data_of(self, tensor: Any, *, runs: bool = False) -> Tensor:
        """Answers `p.data`: a tensor of the same memory. Writes to it are noticed.

        Args:
            tensor: the parameter.
            runs: whether its unit runs.
        """
        number = self._parameters.number_of(tensor)
        if number is None or self._parameters.wrapper_of(tensor) is not None:
            alias: Tensor = _DATA.__get__(tensor) if runs else self._run(Tensor.detach, (tensor,), {})
            return alias
        streams = self._parameters.streams(number)
        if not streams:
            self._units.apply(self._unit_of[number])
        made = self._parameters.data_of(number)
        if streams and not runs:
            made.__class__ = self.class_for(type(made), streams=True)
        return made

    @entry
    def point_to(self, tensor: Any, value: Tensor) -> None:
        """Answers `p.data = value`."""
        number = self._parameters.number_of(tensor)
        if number is None:
            self._run(_DATA.__set__, (tensor, value), {})
            return
        if value is tensor:
            return
        name = self._names[number]
        with torch_private.PastSubclasses():
            if (value.shape, value.dtype, value.device) != (tensor.shape, tensor.dtype, tensor.device):
                raise moved_elsewhere(name, tensor, value)
            if is_wrapper(own_kind_of(tensor)):
                pairs = zip(leaves_of(value), leaves_of(tensor), strict=False)
                if all(one.data_ptr() == other.data_ptr() for one, other in pairs):
                    return
                raise ConfigError(
                    f"{name} is a {own_kind_of(tensor).__name__}, of which p.data = ... would move no value: write "
                    "into it with p.copy_(...) under torch.no_grad()"
                )
            if _memory_of(value) == _memory_of(tensor):
                return
        if self._parameters.streams(number) and not self._units.running.runs_here(self._unit_of[number]):
            raise ReleasedParameterError(
                f"{name} is streamed, and p.data = ... would point it elsewhere than where it is streamed to: write "
                "into it with p.copy_(...) under torch.no_grad()"
            )
        self._units.apply(self._unit_of[number])
        self._parameters.repoint(number, value)

    def _version_of(self, tensor: Any) -> int:
        number = self._parameters.number_of(tensor)
        if (wrapper := self._parameters.wrapper_of(tensor)) is not None:
            with torch_private.PastSubclasses():
                return wrapper.version
        if number is not None:
            return self._parameters.version_of(number)
        return int(torch_private.past_subclasses(_VERSION.__get__, tensor))

    def _detached(self, tensor: Any) -> Tensor:
        """Answers `detach()` for nn.Parameter(p), which wants the same class, and sets `_is_param` of the result."""
        streams = tensor._guards_ref is self._streamed_ref
        made: Tensor = self.plainly(tensor, lambda one: one.detach().clone() if streams else one.detach())
        made.__class__ = type(tensor)
        return made


_ANSWERS: dict[Any, Callable[[Guards, Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    _DATA.__get__: Guards._data,
    _DATA.__set__: Guards._set_data,
    _VERSION.__get__: Guards._version,
    torch.autograd.grad: Guards._grad,
    torch.autograd.backward: Guards._backward,
    Tensor.detach: Guards._detach,
    **dict.fromkeys(SERVED, Guards._in_tiles),
    cells_of_linear: Guards._loss,
    **dict.fromkeys(UNCOUNTED, Guards._uncounted),
    Kind.MOVE: Guards._move,
    Kind.EXPORT: Guards._export,
    Kind.REFUSE: Guards._give_memory,
}
"""By function, or by kind of function: what is answered otherwise than by `_run`."""


def _is_for_a_parameter() -> bool:
    """Whether the call comes from nn.Parameter(p).

    The frames in between are those of `__torch_function__`, `guard`, `call_eagerly`, what a compiler adds to it,
    `_used`, `call`, `_dispatch` and `_detach`.
    """
    frame = sys._getframe(1)
    for _ in range(11):
        if frame.f_code is _PARAMETER_NEW:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def moved_elsewhere(name: str, param: Tensor, value: Tensor) -> ConfigError:
    """The error for a call that moves or casts a held model."""
    with torch_private.PastSubclasses():
        was = f"{tuple(param.shape)}, {param.dtype} on {param.device}"
        now = f"{tuple(value.shape)}, {value.dtype} on {value.device}"
    trains = (
        f', or give OffloadZero(device="{value.device}")' if param.device.type == "cpu" != value.device.type else ""
    )
    return ConfigError(
        f"{name} is {was} and would become {now}: OffloadZero holds the model where it is. Leave out the call that "
        "moves or casts it (model.to(), .half(), .cuda(), a trainer's device placement), or make it before OffloadZero"
        + trains
    )


def _memory_of(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.stride()


def _as_edges(tree: Any) -> Any:
    """`tree` (nested lists, tuples, dicts) with the gradient edge of each guarded leaf."""
    if type(tree) is dict:
        return {key: _as_edges(value) for key, value in tree.items()}
    if isinstance(tree, _Held):
        return torch_private.past_subclasses(torch.autograd.graph.get_gradient_edge, tree)
    return tuple(_as_edges(one) for one in tree) if type(tree) in (list, tuple) else tree
