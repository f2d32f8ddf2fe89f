"""Use fetches it: what stands before a parameter while its unit does not run.

[Note: guarded parameters]
Outside of its unit's forward a held parameter has another Python class, whose `__torch_function__` sees each use. A use
applies a pending update, fetches a released unit, and then runs on the plain parameter. So whoever reads a parameter
gets its current value. Inside its unit's forward it has a class that sees nothing but `p.data`, and operations cost
nothing more.

| tensor                                     | outside its unit | inside it | its memory                           |
|--------------------------------------------|------------------|-----------|--------------------------------------|
| a resident parameter                       | guarded          | watched   | always there; a value may be pending |
| a streamed parameter                       | guarded          | watched   | there while its unit is resident     |
| an alias of a streamed one (`.t()`, `[0]`) | guarded          | guarded   | the same                             |

A graph that used a streamed parameter needs it again: the node of each result fetches it when its gradient arrives.
What does not come by `__torch_function__` is listed in docs/compatibility.md.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.errors import ConfigError, ReleasedParameterError
from offload.interrupts import uninterrupted, uninterrupted_entry
from offload.layout import Layout
from offload.module.hiding import eagerly
from offload.module.parameters import Parameters
from offload.module.running import Running
from offload.module.streaming import Streaming
from offload.module.tensors import METADATA, MOVES, is_no_move, tensors_in, torch_functions
from offload.module.tiling import Tiling

_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad
_DATA: Any = Tensor.data
_VERSION: Any = Tensor._version

_NEEDS_NO_VALUES = METADATA | {
    *torch_functions("_post_accumulate_grad_hooks _grad", "requires_grad_ register_hook retain_grad"),
    *torch_functions(methods="register_post_accumulate_grad_hook new_empty new_zeros new_ones new_full new_tensor"),
    *(_GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__set__, torch.is_inference, torch.is_signed),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.rand_like, torch.randn_like, torch.full_like),
    torch.result_type,
}

_EXPORTS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, torch._C._to_dlpack})
"""What gives the memory of a tensor to another library."""

_CHANGES_MEMORY = frozenset({Tensor.share_memory_, Tensor.set_, Tensor.resize_, Tensor.resize_as_})

_PARAMETER_NEW = nn.Parameter.__new__.__code__


class _Owner:
    """Who answers for the guarded tensors of one optimizer; it outlives the optimizer.

    Attributes: guards: of an optimizer that lives; is_elsewhere: whether values may be where nobody fetches them.
    """

    def __init__(self, guards: Guards, *, is_elsewhere: bool) -> None:
        self.guards: weakref.ref[Guards] | Callable[[], None] = weakref.ref(guards)
        self.is_elsewhere = is_elsewhere


class _Guarded:
    """The part of a guarded class that is the same in all of them."""

    __slots__ = ()
    _kind: type[Tensor]
    _owner: _Owner

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._kind(*args, **kwargs)  # `type(p)(x)` is a plain one

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NEEDS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        guards = cls._owner.guards()
        if guards is not None:
            return guards.call(func, args, kwargs or {})
        if cls._owner.is_elsewhere:
            _refuse(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **options: Any) -> str:
        if self._owner.guards() is None and self._owner.is_elsewhere:
            return f"{self._kind.__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, released)"  # type: ignore[attr-defined]
        return str(self._plainly(repr))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plainly(lambda tensor: _copied(tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_streamed = self._owner.is_elsewhere
        return self._plainly(lambda tensor: (_cloned(tensor) if is_streamed else tensor).__reduce_ex__(protocol))

    def __dlpack__(self, **options: Any) -> Any:
        is_streamed = self._owner.is_elsewhere
        return self._plainly(lambda t: (_cloned(t.detach()) if is_streamed else t.detach()).__dlpack__(**options))

    def _plainly(self, use: Callable[[Any], Any]) -> Any:
        """What `use` gives for this tensor, plain and with its current values."""
        guards = self._owner.guards()
        if guards is not None:
            return guards.plainly(self, use)
        if self._owner.is_elsewhere:
            _refuse("a copy")
        kind = type(self)
        self.__class__ = self._kind  # type: ignore[assignment]
        try:
            return use(self)
        finally:
            self.__class__ = kind


class _Watched:
    """The part of the class of parameters whose unit runs: `p.data` is seen, operations are not."""

    __slots__ = ()
    _kind: type[Tensor]
    _owner: _Owner

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._kind(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        guards = self._owner.guards()
        made: Tensor = _DATA.__get__(self) if guards is None else guards.data_of(self, runs=True)
        return made

    @data.setter
    def data(self, value: Tensor) -> None:
        guards = self._owner.guards()
        if guards is None:
            _DATA.__set__(self, value)
        else:
            guards.point_to(self, value)

    def detach(self) -> Tensor:
        made: Tensor = Tensor.detach(self)  # type: ignore[arg-type]
        if sys._getframe(1).f_code is _PARAMETER_NEW:
            made = made.clone() if self._owner.is_elsewhere else made
            made.__class__ = type(self)  # type: ignore[assignment]
        return made


class _Plain:
    """Guarded tensors are of their own classes inside. No signal leaves one without its guard."""

    def __init__(self, guards: Guards, used: Sequence[Any]) -> None:
        self._guards = guards
        self._guarded = [(tensor, tensor.__class__) for tensor in used]

    @uninterrupted_entry
    def __enter__(self) -> None:
        for tensor, guarded in self._guarded:
            tensor.__class__ = guarded._kind

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        for tensor, guarded in self._guarded:
            tensor.__class__ = self._guards.class_now(tensor, guarded)


def _refuse(what: str) -> NoReturn:
    raise ReleasedParameterError(
        f"{what} needs the values of a streamed parameter, and the optimizer that held them is closed or gone: use it "
        "before optimizer.close(), or leave room for all parameters on the device when you close it"
    )


def _cloned(tensor: Tensor) -> Tensor:
    made = tensor.detach().clone()
    return type(tensor)(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        made: Tensor = tensor.__deepcopy__(memo)
        return made
    return tensor.detach().clone()


class Guards:
    """See [Note: guarded parameters].

    Args: streaming: None where all parameters are resident; tiling: of weights that never are on the device as a whole;
    apply: called with a unit whose pending update has to be applied.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Parameters,
        running: Running,
        streaming: Streaming | None,
        tiling: Tiling | None,
        apply: Callable[[str], None],
    ) -> None:
        self._units = [spec.unit for spec in layout.specs]
        self._unit_of_flat = [flat.unit for flat in layout.flats]
        self._names = [spec.name for spec in layout.specs]
        self._parameters = parameters
        self._running = running
        self._streaming = streaming
        self._tiling = tiling
        self._apply = apply
        self._owner = _Owner(self, is_elsewhere=streaming is not None)
        self._classes: dict[tuple[type[Tensor], bool], type[Tensor]] = {}

    def class_for(self, kind: type[Tensor], *, runs: bool = False) -> type[Tensor]:
        """The guarded class of tensors that are `kind` otherwise. Args: runs: that of parameters whose unit runs."""
        if (kind, runs) not in self._classes:
            names = {"_kind": kind, "_owner": self._owner, "__module__": __name__, "__slots__": ()}
            name, base = ("Watched", _Watched) if runs else ("Guarded", _Guarded)
            self._classes[kind, runs] = type(f"{name}{kind.__name__}", (base, kind), names)
        return self._classes[kind, runs]

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `func` gives for arguments of which some are guarded."""
        return eagerly(self._dispatch, func, args, kwargs)

    def plainly(self, tensor: Any, use: Callable[[Tensor], Any]) -> Any:
        """What `use` gives for a guarded tensor that is plain meanwhile, with its current values."""
        with self._lent([tensor]):
            return use(tensor)

    def stop(self, *, are_here: bool) -> None:
        """The optimizer is closing. Args: are_here: all values are in the model for good."""
        self._owner.guards = lambda: None
        self._owner.is_elsewhere = not are_here
        if are_here:
            self._parameters.stop_guarding()

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func == _DATA.__get__:
            return self.data_of(args[0])
        if func == _DATA.__set__:
            return self.point_to(args[0], args[1])
        if func == _VERSION.__get__:
            return self._version_of(args[0])
        if func is torch.autograd.grad:  # which may run modules again: their guards stay up
            return func(*_as_edges(args), **{key: _as_edges(value) for key, value in kwargs.items()})
        if func in MOVES and self._is_ours(args[0]) and is_no_move(func, args, kwargs):
            return args[0]
        if func is Tensor.detach and self._is_ours(args[0]) and _is_for_a_parameter():
            return self._detached(args[0])
        if self._streaming is not None:
            if func in _EXPORTS:
                copies = [
                    self.plainly(one, lambda t: t.detach().clone()) if self._is_ours(one) else one for one in args
                ]
                return func(*copies, **kwargs)
            if func in _CHANGES_MEMORY:
                raise ReleasedParameterError(
                    f"{func.__name__} on a streamed parameter would take it from where it is streamed to: use "
                    "p.detach().clone(), or the model after optimizer.close()"
                )
            if self._tiling is not None and func is F.linear:
                given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
                if self._tiling.has(given["weight"]):
                    return self._tiling.linear(given["input"], given["weight"], given.get("bias"))
            if getattr(func, "__name__", "").startswith("_foreach_"):
                return self._piece_by_piece(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        used = list(self._guarded_in((args, kwargs)))
        with self._lent(used) as units:
            result = func(*args, **kwargs)
        if self._streaming is not None:
            self._follow(result, units)
        return result

    def _piece_by_piece(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation on each element of lists, a unit at a time: not all of them are here together."""
        lists = [one for one in (*args, *kwargs.values()) if isinstance(one, list | tuple)]
        length = len(lists[0]) if lists else 0
        if not length or any(len(one) != length for one in lists):
            return self._run(func, args, kwargs)
        units = [tuple(self._units_of(list(self._guarded_in([one[at] for one in lists])))) for at in range(length)]
        results: list[Any] = []
        start = 0
        while start < length:
            stop = start + 1
            while stop < length and units[stop] == units[start]:
                stop += 1

            def part(one: Any, start: int = start, stop: int = stop) -> Any:
                return one[start:stop] if isinstance(one, list | tuple) else one

            result = self._run(func, [part(one) for one in args], {key: part(one) for key, one in kwargs.items()})
            results.extend(result or ())
            start = stop
        return results or None

    @contextmanager
    def _lent(self, used: Sequence[Any]) -> Iterator[list[str]]:
        """Guarded tensors are plain inside, with current values. Yields their units."""
        units = self._units_of(used)
        if self._streaming is None:
            for unit in units:
                self._apply(unit)
            with _Plain(self, used):
                yield units
            return
        with self._streaming.used(units), _Plain(self, used):
            yield units

    def class_now(self, tensor: Any, guarded: type[Any]) -> type[Tensor]:
        """What a tensor that was guarded by a class is to be after a use. Its unit may have been entered or left."""
        number = self._parameters.number_of(tensor)
        runs = number is not None and self._running.watches(self._units[number], number)
        return self.class_for(guarded._kind, runs=True) if runs else guarded

    def _units_of(self, used: Iterable[Any]) -> list[str]:
        found: dict[str, None] = {}
        for tensor in used:
            number = self._parameters.number_of(tensor)
            if number is not None:
                found[self._units[number]] = None
            elif (flat := self._parameters.flat_at(tensor)) is not None:
                found[self._unit_of_flat[flat]] = None
        return list(found)

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, _Guarded) and value._owner is self._owner

    def _guarded_in(self, tree: Any) -> Iterator[Any]:
        """The guarded tensors in nested lists, tuples and dicts, each once."""
        seen: set[int] = set()
        left = [tree]
        while left:
            node = left.pop()
            if isinstance(node, _Guarded):
                if id(node) not in seen and self._is_ours(node):
                    seen.add(id(node))
                    yield node
            elif isinstance(node, list | tuple):
                left.extend(node)
            elif isinstance(node, dict):
                left.extend(node.values())

    def _follow(self, result: Any, units: Sequence[str]) -> None:
        """Guards what of a result lies in a streamed parameter, and lets its node fetch the units again."""
        assert self._streaming is not None
        for tensor in tensors_in(result):
            if self._parameters.is_held(tensor):
                continue
            if type(tensor) is Tensor and self._parameters.flat_at(tensor) is not None:
                tensor.__class__ = self.class_for(Tensor)
            if not units or not torch.is_grad_enabled():  # torch raises for that of a view which was written to
                continue
            with torch._C.DisableTorchFunctionSubclass():
                node = tensor.grad_fn
            if node is not None:
                self._streaming.fetch_before(node, units)

    # What is special about some uses.

    def data_of(self, tensor: Any, *, runs: bool = False) -> Tensor:
        """`p.data`: a tensor of the same memory, writes to which are noticed. Args: runs: whether its unit runs."""
        number = self._parameters.number_of(tensor)
        if number is None:
            alias: Tensor = self._run(Tensor.detach, (tensor,), {})
            return alias
        if self._streaming is None:
            self._apply(self._units[number])
            return self._parameters.data_of(number)
        made = self._parameters.data_of(number)
        if not runs:
            made.__class__ = self.class_for(Tensor)
        return made

    def point_to(self, tensor: Any, value: Tensor) -> None:
        """`p.data = value`."""
        number = self._parameters.number_of(tensor)
        if number is None:
            self._run(_DATA.__set__, (tensor, value), {})
            return
        if value is tensor:
            return
        name = self._names[number]
        with torch._C.DisableTorchFunctionSubclass():
            is_alike = (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device)
            is_same = is_alike and value.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            is_same = (
                is_same and value.storage_offset() == tensor.storage_offset() and value.stride() == tensor.stride()
            )
        if not is_alike:
            raise moved_elsewhere(name, tensor, value)
        if is_same:
            return
        if self._streaming is not None and not self._running.runs(self._units[number]):
            raise ReleasedParameterError(
                f"{name} is streamed, and p.data = ... would point it elsewhere than where it is streamed to: write "
                "into it with p.copy_(...) under torch.no_grad()"
            )
        self._apply(self._units[number])
        self._parameters.repoint(number, value)

    def _version_of(self, tensor: Any) -> int:
        number = self._parameters.number_of(tensor)
        if number is not None:
            return self._parameters.version_of(number)
        with torch._C.DisableTorchFunctionSubclass():
            return int(tensor._version)

    def _detached(self, tensor: Any) -> Tensor:
        """For nn.Parameter(p), which wants the same class, and marks the result: see _becomes_a_parameter."""
        made: Tensor = self.plainly(
            tensor, lambda one: one.detach() if self._streaming is None else one.detach().clone()
        )
        made.__class__ = type(tensor)
        return made


def _is_for_a_parameter() -> bool:
    """Whether nn.Parameter(p) asks. In between are `__torch_function__`, `call`, `eagerly`, what a compiler adds to it,
    and `_dispatch`."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_code is _PARAMETER_NEW:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _becomes_a_parameter(self: Any, _: bool) -> None:
    """nn.Parameter.__new__ ends with `t._is_param = True`."""
    self.__class__ = nn.Parameter


for _base in (_Guarded, _Watched):
    _base._is_param = property(lambda self: issubclass(type(self)._kind, nn.Parameter), _becomes_a_parameter)  # type: ignore[attr-defined]


def moved_elsewhere(name: str, param: Tensor, value: Tensor) -> ConfigError:
    """For who moves or casts a held model."""
    with torch._C.DisableTorchFunctionSubclass():
        was = f"{tuple(param.shape)}, {param.dtype} on {param.device}"
        now = f"{tuple(value.shape)}, {value.dtype} on {value.device}"
    return ConfigError(
        f"{name} is {was} and would become {now}: OffloadZero holds the model where it is. Leave out the call that "
        "moves or casts it (model.to(), .half(), .cuda(), a trainer's device placement), or make it before OffloadZero"
    )


def _as_edges(tree: Any) -> Any:
    """`tree` (nested lists, tuples) with the place in a graph for each guarded leaf."""
    if isinstance(tree, _Guarded):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(tree)  # type: ignore[arg-type]
    return tuple(_as_edges(one) for one in tree) if type(tree) in (list, tuple) else tree
