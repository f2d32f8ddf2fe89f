"""What autograd keeps between forward and backward, and where it waits.

[Note: activations]
Each outermost unit is checkpointed in place, by torch.utils.checkpoint: autograd keeps what enters the unit, and the
unit's forward runs again in its backward, with the random numbers (torch's, Python's and NumPy's) and autocast that it
had. What any checkpoint keeps, ours or one in the model's own code, goes through hooks for saved tensors, which lie
around the forward of the whole model. They put it into the store, and take it from there when the backward asks.

| what is saved                           | by whom                     | where it waits                              |
|-----------------------------------------|-----------------------------|---------------------------------------------|
| what enters a unit                      | its checkpoint              | in the store                                |
| what enters a block                     | a checkpoint of the model's | in the store                                |
| what a unit computes on the way         | autograd, recompute=False   | in the store, from LEAST_BYTES on           |
| the same of the unit that runs last     | autograd, recompute=False   | where it is: it is needed first             |
| parameters, buffers, leaves             | anybody                     | where they are                              |
| the rest: of the root unit, for example | autograd                    | where it is                                 |

With tensor parallelism and `partition_activations`, each rank keeps a part of what checkpoints keep: [Note: partitioned
checkpoints] in partition.py.

A unit inside a checkpoint of the model's own, or in one around the whole model, is recomputed by that checkpoint alone.
So is a unit whose forward is such a checkpoint: our recomputation stops as soon as it has again what enters that one. A
recomputation puts nothing into the store. A saved tensor that stays where it is has a version, as in torch: a change in
place is an error, not a wrong number. What went to the store was copied, and the original may be changed.

A recomputation must do what the forward did. So it is refused if parameters, buffers, the mode or a class of the unit
have changed since. Units whose forward changes their buffers (batch norm) are not recomputed, nor are units with
parametrizations inside of `parametrize.cached()`.
"""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from offload import torch_private
from offload.choices import ActivationChoice
from offload.errors import ClosedError, ConfigError, StaleActivationError
from offload.model.compiled import Compiler, Forward, call_uncompiled, forward_of_class, runs_as_it_is
from offload.model.dense import is_dense
from offload.model.fetch import HeldUnits
from offload.model.partition import Partition, Partitions
from offload.model.torch_helpers import call_hidden, in_backward, tensors_in
from offload.model.units import blocks_of, has_statistics, is_called
from offload.ranks.tensor_parallel import like_of, local_of
from offload.storage.activation_store import ActivationStore, Stored

_UNCHANGING = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    torch.dtype,
    torch.device,
    nn.Module,
    FunctionType,
)
LEAST_BYTES = 1024
"""A tensor smaller than this costs more on its way than it takes."""

_CHECKPOINT = torch_checkpoint.__name__


class _InPlace:
    """A saved tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An operation that saves what it returns would make a cycle that no garbage collector sees.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise StaleActivationError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._tensor.shape)} was saved at version {self._version}, and is at version "
                f"{self._tensor._version}"
            )
        return self._tensor


class _Elsewhere:
    """A saved tensor that waits in a store, or of which each rank keeps a part.

    Args:
        store: the store, or the partitions that divide it among ranks.
        stored: what `put` returned.
        tensor: the tensor.
        start: the byte of what was put at which the tensor begins, because several tensors may share a storage.
    """

    __slots__ = ("_dtype", "_geometry", "_store", "_stored")

    def __init__(self, store: ActivationStore | Partitions, stored: Any, tensor: Tensor, start: int = 0) -> None:
        self._store = store
        self._stored = stored
        self._dtype = tensor.dtype
        self._geometry = (tensor.size(), tensor.stride(), start // tensor.element_size())

    def get(self) -> Tensor:
        return call_hidden(self._get)  # type: ignore[no-any-return]

    def _get(self) -> Tensor:
        with torch.no_grad():
            return self._store.get(self._stored).view(self._dtype).as_strided(*self._geometry)


class _Sharded:
    """A saved DTensor, of which only this rank's tensor is packed."""

    __slots__ = ("_like", "_packed")

    def __init__(self, packed: Any, tensor: Tensor) -> None:
        self._packed = packed
        self._like = like_of(tensor)

    def get(self) -> Tensor:
        return self._like(self._packed.get())  # type: ignore[no-any-return]


class _Passed:
    """A saved tensor that went to hooks for saved tensors which the user has set around ours."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, hooks: tuple[Callable[..., Any], Callable[..., Any]], tensor: Tensor) -> None:
        self._packed = hooks[0](tensor)
        self._unpack = hooks[1]

    def get(self) -> Tensor:
        return self._unpack(self._packed)  # type: ignore[no-any-return]


def _unpack(packed: Any) -> Any:
    return call_uncompiled(packed.get)


runs_as_it_is(_unpack)


class _Unit:
    """A unit whose forward this library runs.

    Attributes:
        recomputes: whether its forward runs again in its backward.
        params: its parameters.
    """

    def __init__(self, name: str, module: nn.Module, *, recomputes: bool) -> None:
        self.name = name
        self.recomputes = recomputes
        self._own = module.__dict__.get("forward")
        self._modules = list(module.modules())
        self.params = self._params()

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward of its module, in the place of which this library's is."""
        return forward_of_class(self._modules[0]) if self._own is None else self._own

    def is_whole(self) -> bool:
        """Whether the unit has its own parameters now, and none that torch.func.functional_call has put in."""
        now = self._params()
        return len(now) == len(self.params) and all(one is other for one, other in zip(now, self.params, strict=True))

    def _params(self) -> list[Tensor | None]:
        return [param for module in self._modules for param in module._parameters.values()]

    def uses_cache(self) -> bool:
        """Whether its weights may come from the cache of parametrizations, which is gone when it is recomputed."""
        return torch_private.caches_parametrizations() and any(map(is_parametrized, self._modules))

    def buffers(self) -> list[tuple[Tensor, int]]:
        """The buffers of the unit, each with its version."""
        buffers = [buffer for module in self._modules for buffer in module._buffers.values()]
        return [(buffer, buffer._version) for buffer in buffers if buffer is not None]

    def state(self) -> list[tuple[Any, int]]:
        """What a recomputation depends on beside what enters the unit, each with its version, or with its mode."""
        params = [param for param in self.params if param is not None]
        versions = ((param, param._version) for param in params)
        # Of what was frozen or unfrozen a recomputation would save other tensors.
        trained = ((param, param.requires_grad) for param in params)
        modes = ((None, module.training) for module in self._modules)
        # A forward may give its module another class, and a patch gives the class another forward.
        code = ((one, 0) for module in self._modules for one in (type(module), type(module).forward))
        return [*versions, *trained, *self.buffers(), *modes, *code]


def _is_same(one: Sequence[tuple[Any, int]], other: Sequence[tuple[Any, int]]) -> bool:
    return len(one) == len(other) and all(a is b and m == n for (a, m), (b, n) in zip(one, other, strict=True))


class Activations:
    """Hooks a model so that its activations wait elsewhere, or are recomputed; see [Note: activations].

    Args:
        model: the model.
        choice: what was decided for activations.
        units: None for a model on the meta device, of which only the sizes of what would wait are measured.
        store: where tensors wait; None: where they are made.
        partitions: divides what checkpoints keep among ranks; None: each rank keeps whole tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        choice: ActivationChoice,
        units: HeldUnits | None,
        store: ActivationStore | None,
        partitions: Partitions | None = None,
    ) -> None:
        self._units = units
        self._store = store
        self._partitions = partitions
        device = None if store is None else store.device
        self._buffers = {buffer.untyped_storage()._cdata for buffer in model.buffers() if buffer.device == device}
        # For each tensor that others may be views of: what of it waits already.
        self._shared = WeakTensorKeyDictionary()
        self._divided = WeakTensorKeyDictionary()
        self._last: str | None = None  # the unit that ran last in the last pass
        self._running: str | None = None
        self._hooks = (self._pack_checkpoint, _unpack)
        self._outside: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._forwards = [Forward(model, self._run_model)]
        for name, module in blocks_of(model, choice.units):
            if is_called(module):
                recomputes = choice.recompute and not any(map(has_statistics, module.modules()))
                unit = _Unit(name, module, recomputes=recomputes)
                self._forwards.append(Forward(module, partial(self._run_unit, unit)))

    def remove(self) -> None:
        """Gives the model and its units their own forwards back."""
        for forward in self._forwards:
            forward.remove()

    # Forwards.

    def _run_model(self, compiler: Compiler, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outside = torch_private.saved_tensors_hooks(False)
        if not _is_recorded() or _are_of_checkpoint(outside):
            return compiler.call(forward, args, kwargs)
        self._last, self._running = self._running, None
        before, self._outside = self._outside, outside
        self._pass_begins()
        try:
            with saved_tensors_hooks(*self._hooks):
                return compiler.call(forward, args, kwargs)
        finally:
            self._outside = before
            self._pass_begins()

    def _pass_begins(self) -> None:
        if self._partitions is not None:
            self._partitions.pass_begins()

    def step_begins(self) -> None:
        """Checks what was kept, before gradients are used.

        Raises:
            StaleActivationError: if ranks that divided a tensor had different values of it.
            RankError: another rank failed, or cannot be reached.
        """
        if self._partitions is not None:
            self._partitions.step_begins()

    @property
    def running(self) -> str | None:
        """The unit whose forward runs, or ran last in this pass; None: none has run."""
        return self._running

    @property
    def peak_bytes(self) -> int:
        """The most bytes that waited at once: in the store, or else in partitions."""
        in_store = 0 if self._store is None else self._store.peak_bytes
        return in_store or (0 if self._partitions is None else self._partitions.peak_bytes)

    def _run_unit(self, unit: _Unit, compiler: Compiler, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not _is_recorded() or not unit.is_whole():
            return compiler.call(forward, args, kwargs)
        outside = torch_private.saved_tensors_hooks(False)
        if outside is None:  # the unit was called by itself
            self._pass_begins()
            try:
                with saved_tensors_hooks(*self._hooks):
                    return self._run_unit(unit, compiler, forward, args, kwargs)
            finally:
                self._pass_begins()
        if outside[0] != self._hooks[0]:
            return compiler.call(forward, args, kwargs)  # in a checkpoint, or in another unit
        self._running = unit.name
        if unit.recomputes and not unit.uses_cache():
            return self._run_checkpointed(unit, compiler, forward, args, kwargs)
        if unit.name == self._last:
            return compiler.call(forward, args, kwargs)
        with saved_tensors_hooks(self._pack, _unpack):
            return compiler.call(forward, args, kwargs)

    def _run_checkpointed(
        self, unit: _Unit, compiler: Compiler, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        leaves, tree = torch_private.tree_flatten((args, kwargs), is_leaf=_is_leaf)
        if self._units is not None:
            self._units.make_current(unit.params)  # its tiles too: an update that is applied later moves their versions
        # Each enters once, however often it is given: a forward may ask whether two arguments are one.
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        again = _Again(self, unit, compiler, tree, leaves, tensors)
        first = [(forward, args, kwargs)]

        def run(*entering: Tensor) -> Any:
            if not first:
                return again(entering)
            call, positional, named = first.pop()
            return compiler.call(call, positional, named)

        # A recomputation would change it again.
        buffers, writes = unit.buffers(), self._data_writes(unit)
        result = torch_checkpoint.checkpoint(run, *tensors, use_reentrant=False)
        again.forward_ended()
        if not _is_same(unit.buffers(), buffers):
            raise ConfigError(
                f"the forward of {unit.name} changes a buffer, and would change it again when it is recomputed in the "
                "backward: give Tuning(recompute=False)"
            )
        if self._data_writes(unit) != writes:  # which moves no version
            raise StaleActivationError(
                f"the forward of {unit.name} writes to a parameter by p.data, and would write again when it is "
                "recomputed in the backward: give Tuning(recompute=False)"
            )
        return result

    def _data_writes(self, unit: _Unit) -> list[int]:
        return [] if self._units is None else self._units.data_writes(unit.params)

    def recompute(
        self, unit: _Unit, compiler: Compiler, state: Sequence[tuple[Any, int]], args: Any, kwargs: Any
    ) -> Any:
        """Runs a unit's forward again.

        Args:
            unit: the unit.
            compiler: what compiled the first forward.
            state: what `unit.state()` was in the first forward.
            args: the arguments of that forward.
            kwargs: its keyword arguments.

        Raises:
            StaleActivationError: if parameters, buffers, the mode or a class of the unit have changed since.
        """
        assert self._units is not None
        self._units.forward_begins(self._units.named(unit.name))
        try:
            if not _is_same(unit.state(), state):
                raise StaleActivationError(
                    f"parameters, buffers, the mode or a class of {unit.name} have changed since its forward, so that "
                    "it cannot be recomputed: call backward() before step(), eval() and the like; where what changes "
                    "them leaves their values as they are, give Tuning(recompute=False)"
                )
            return compiler.call(unit.forward, args, kwargs)
        finally:
            self._units.forward_ends(self._units.named(unit.name), None)

    # Hooks for saved tensors. They look at frames, which compiled code cannot.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack_checkpoint(self, tensor: Tensor) -> Any:
        return call_hidden(self._put, tensor, True) if _is_from_checkpoint() else self._leave(tensor)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: Tensor) -> Any:
        is_large = tensor.numel() * tensor.element_size() >= LEAST_BYTES
        is_entering = _is_from_checkpoint()
        return call_hidden(self._put, tensor, is_entering) if is_large or is_entering else self._leave(tensor)

    def _leave(self, tensor: Tensor) -> Any:
        return call_hidden(_InPlace, tensor) if self._outside is None else _Passed(self._outside, tensor)

    @torch.no_grad()
    def _put(self, tensor: Tensor, is_entering: bool) -> Any:
        if type(tensor) is torch_private.dtensor_class():
            packed = self._take(local_of(tensor), is_entering) if not _is_kept(tensor) else None
            return self._leave(tensor) if packed is None else _Sharded(packed, tensor)
        packed = self._take(tensor, is_entering)
        return self._leave(tensor) if packed is None else packed

    def _take(self, tensor: Tensor, is_entering: bool) -> Any:
        """Puts a tensor where it waits, and returns what stands for it; None if it stays where it is.

        Args:
            tensor: the tensor.
            is_entering: whether a checkpoint keeps it.
        """
        if not _can_wait(tensor, self._buffers):
            return None
        partitions = self._partitions if is_entering and is_dense(tensor) else None
        partition = None if partitions is None else self._divide(partitions, tensor)
        if partitions is not None and partition is not None:
            return _Elsewhere(partitions, partition, tensor)
        store = self._store
        if store is None or tensor.device != store.device:
            return None
        source, (start, nbytes) = tensor, _span(tensor)
        if nbytes > tensor.numel() * tensor.element_size() and tensor._base is not None:
            # A view with holes, such as one of the heads of a projection: the whole tensor waits, once for all heads.
            whole, length = _span(tensor._base)
            is_aligned = not (start - whole) % tensor.element_size() and not length % tensor.element_size()
            if whole <= start and start + nbytes <= whole + length and is_aligned:
                source, nbytes = tensor._base, length
        shared: dict[Any, weakref.ref[Stored]] = self._shared.setdefault(_base(tensor), {})
        key = (source.storage_offset(), nbytes, source._version)
        stored = shared[key]() if key in shared else None
        if stored is None:
            stored = store.put(_bytes_of(source, nbytes))
            for old in [old for old, ref in shared.items() if ref() is None]:
                del shared[old]
            shared[key] = weakref.ref(stored)
        return _Elsewhere(store, stored, tensor, start - _span(source)[0])

    def _divide(self, partitions: Partitions, tensor: Tensor) -> Partition | None:
        """Keeps this rank's part of a tensor. A tensor that several units keep, such as a mask, is divided once."""
        shared: dict[Any, weakref.ref[Partition]] = self._divided.setdefault(_base(tensor), {})
        key = (tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        partition = shared[key]() if key in shared else None
        if partition is None:
            partition = partitions.put(_bytes_of(tensor, _span(tensor)[1]), self._running)
            for old in [old for old, ref in shared.items() if ref() is None]:
                del shared[old]
            if partition is not None:
                shared[key] = weakref.ref(partition)
        return partition


class _Again:
    """Runs the forward of a unit again. A graph holds this, so it must not keep an optimizer alive.

    Args:
        activations: the hooks.
        unit: the unit.
        compiler: what compiled the first forward.
        tree: the structure of its arguments.
        leaves: the leaves of that tree.
        tensors: the distinct tensors among them. Calling this takes tensors in their place.
    """

    def __init__(
        self,
        activations: Activations,
        unit: _Unit,
        compiler: Compiler,
        tree: Any,
        leaves: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> None:
        self._activations = weakref.ref(activations)
        self._unit = weakref.ref(unit)
        self._compiler = compiler
        self._tree = tree
        number_of = {id(tensor): number for number, tensor in enumerate(tensors)}
        # Of each leaf: the number of the tensor, None of any other.
        self._numbers = [number_of.get(id(leaf)) for leaf in leaves]
        constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self._constants = _copied(constants)
        # Those of the tensors that objects among the others hold too.
        self._inside = [(number_of[id(one)], one) for one in tensors_in(constants) if id(one) in number_of]
        self._state = unit.state()
        self._random: _RandomState | None = _RandomState()

    def forward_ended(self) -> None:
        """Tells that the first forward has ended.

        If it drew no random numbers, their state need not be restored. So another thread may draw numbers while this
        runs.
        """
        if self._random is not None and self._random.is_same(_RandomState()):
            self._random = None

    def __call__(self, entering: Sequence[Tensor]) -> Any:
        activations, unit = self._activations(), self._unit()
        if activations is None or unit is None:
            raise ClosedError("the optimizer that was to recompute this graph is closed: call backward() first")
        constants = iter(_copied(self._constants, {id(one): entering[number] for number, one in self._inside}))
        leaves = [next(constants) if number is None else entering[number] for number in self._numbers]
        args, kwargs = torch_private.tree_unflatten(leaves, self._tree)
        with nullcontext() if self._random is None else self._random:
            return activations.recompute(unit, self._compiler, self._state, args, kwargs)


class _RandomState:
    """The state of Python's and NumPy's random numbers.

    Inside it as a context, numbers are drawn from that state again. torch.utils.checkpoint does the same for torch's
    own random numbers.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def is_same(self, other: _RandomState) -> bool:
        return self._python == other._python and _are_equal(self._numpy, other._numpy)

    def __enter__(self) -> None:
        self._outside = _RandomState()
        self._set()

    def __exit__(self, *_: object) -> None:
        self._outside._set()

    def _set(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two states of NumPy's random numbers, dicts with arrays in them, are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


def _is_recorded() -> bool:
    """Whether autograd records what runs now, so that hooks for saved tensors see all of it.

    It is False inside a recomputation.
    """
    return (
        torch.is_grad_enabled()
        and not in_backward()
        and torch_private.functorch_level() is None
        and torch_private.tracing_state() is None
        and torch_private.can_hook_saved_tensors()
    )


def _is_from_checkpoint() -> bool:
    """Whether torch.utils.checkpoint saves the tensor that the calling hook got."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is not None:
            if frame.f_globals.get("__name__") == _CHECKPOINT:
                return True
            frame = frame.f_back
    return False


def _are_of_checkpoint(hooks: tuple[Callable[..., Any], Callable[..., Any]] | None) -> bool:
    """Whether hooks for saved tensors are those of torch.utils.checkpoint: it recomputes what runs now."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == _CHECKPOINT


def _can_wait(tensor: Tensor, buffers: Container[int]) -> bool:
    """Whether a tensor may wait elsewhere: it has plain bytes, and nothing else keeps its memory alive.

    Args:
        tensor: the tensor.
        buffers: the storages of the model's buffers.
    """
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return is_plain and not _is_kept(tensor) and tensor.numel() > 0 and tensor.untyped_storage()._cdata not in buffers


def _is_kept(tensor: Tensor) -> bool:
    """Whether a parameter or another leaf keeps the memory of a tensor alive anyway."""
    base = _base(tensor)
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def _is_leaf(node: Any) -> bool:
    """Whether a node of a tree of arguments is a leaf, which is anything but a plain container."""
    return type(node) not in (tuple, list, dict)


def _copied(leaves: Sequence[Any], instead: Mapping[int, Tensor] | None = None) -> list[Any]:
    """Copies of arguments that are no tensors, because a forward may change them, as it does a cache.

    Tensors, and what cannot be copied, are returned as they are.

    Args:
        leaves: the arguments.
        instead: tensors to put in the place of others, by the id of those.
    """
    copies = []
    for leaf in leaves:
        if not isinstance(leaf, _UNCHANGING):
            with suppress(Exception):
                kept = {id(tensor): tensor for tensor in tensors_in(leaf)}
                leaf = copy.deepcopy(leaf, kept | {key: one for key, one in (instead or {}).items() if key in kept})
        copies.append(leaf)
    return copies


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the number of bytes up to its last."""
    item = tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) * item, (reach + 1) * item


def _bytes_of(tensor: Tensor, nbytes: int) -> Tensor:
    """The first `nbytes` bytes of a tensor's memory, uint8, from its first element on."""
    flat = tensor.detach().as_strided((nbytes // tensor.element_size(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
