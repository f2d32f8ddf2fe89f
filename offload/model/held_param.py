"""A held parameter: its tensor, where its elements lie, its versions, and the classes that guard it.

A flat parameter holds inner tensors ([Note: inner tensors] in inner.py), and there is a HeldParam for each. It knows
the tensor that others use: the model's parameter, for the elements that are its own, or else the inner tensor itself,
which they can get at as well (`weight.quant_state.absmax`). Both are one object, but for a DTensor.

[Note: sharded parameters]
Of a DTensor the flat parameter holds this rank's part, which is a plain tensor inside of it, its *local* tensor. That
one is pointed into the flat parameter, and autograd, guards and the module go on with the DTensor. Each of the two has
a version of its own, and writes bump the one, the other, or both: their sum tells whether anybody wrote. `p._version`
is the DTensor's own, as in torch, so that it is the same whether the unit runs, where nobody sees that it is asked.

[Note: wrappers]
A wrapper has no memory, and none of its inner tensors is what the module uses. So a HeldWrapper lies beside the
HeldParams of these. Its class changes with their unit, as theirs do. Its version is NO_VERSION while they are released,
since autograd may have saved the wrapper and not what is in it. A write to the wrapper is one to inner tensors, whose
versions stay, as torch does not count inside of a wrapper: `spread_writes` counts there.

[Note: versions]
Autograd raises where a saved tensor has another version than when it was saved. The version of a parameter grows with
each write, the library's own ones too. While a parameter is released it has NO_VERSION, which no graph has saved, and
`version` keeps the one that it gets back. While it is here, `version` is the one up to which all writes are known:
another one tells that somebody else has written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from offload import torch_private
from offload.layout import ParamSpec
from offload.model.dense import flattened, with_strides
from offload.model.inner import Inner, is_wrapper, kind_of
from offload.model.unit import Unit
from offload.optim.rule import NEVER

NO_VERSION = 1 << 31
"""The version of a parameter whose memory is elsewhere. No graph has saved it. So autograd, which knows nothing of
guards, raises before it reads a saved parameter that is not there."""

# As torch has them, without the guards.
DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad


class HeldGrad:
    """What is known of the gradient of one held parameter, beside its values. gradient.py alone changes it.

    Attributes:
        stand_in: what `p.grad` is while the gradient is elsewhere; None for a parameter that is not trained. Each
            gradient that begins anew has one of its own.
        is_shown: whether anybody got the stand-in, and may have kept it.
        has_graph: whether a backward with `create_graph=True` made it: plain torch has a graph there.
        copy: a copy of the values, of which somebody has a view, and its version when it was last written back; None:
            nobody has one.
        is_zeroed: whether it was made zeros, which the gradient buffer does not have yet.
        used_by: the factor by which the last step multiplied it; None: that step did not use it.
        norms: those that are known, in fp64, by their order.
        norms_on: the same as fp32 tensors of shape (), by their order and device.
    """

    __slots__ = ("copy", "has_graph", "is_shown", "is_zeroed", "norms", "norms_on", "stand_in", "used_by")

    def __init__(self) -> None:
        self.stand_in: Tensor | None = None
        self.is_shown = False
        self.has_graph = False
        self.copy: tuple[Tensor, int] | None = None
        self.is_zeroed = False
        self.used_by: float | None = None
        self.norms: dict[float, float] = {}
        self.norms_on: dict[tuple[float, torch.device], Tensor] = {}

    def forget_norms(self) -> None:
        """Forgets the norms, because the gradient changes."""
        self.norms.clear()
        self.norms_on.clear()

    def forget(self) -> None:
        """Forgets the gradient, and keeps what stands for it."""
        self.copy = self.used_by = None
        self.is_zeroed = False
        self.forget_norms()


class HeldParam:
    """What is known of one held parameter.

    Methods that look at the tensor are called with torch's functions of subclasses off. `grad` and `requires_grad` turn
    them off themselves.

    Args:
        number: its place in `Layout.specs`.
        spec: what the layout knows of it.
        inner: the inner tensor that it holds.
        unit: the unit that it belongs to.
        flat: the index of the flat parameter that it lies in.
        offset: the element of that at which it begins.
        streams: whether its memory comes and goes.

    Attributes:
        param: the model's parameter that it belongs to.
        tensor: the tensor that others use, which is a leaf of autograd if it is trained.
        local: the tensor whose memory is in the flat parameter; see [Note: sharded parameters].
        is_sharded: whether `tensor` is a DTensor.
        is_inside: whether a wrapper is made of it.
        strides: those of its elements in the flat parameter, also while it is pointed elsewhere (`p.data = x`).
        version: see [Note: versions].
        gradient: what is known of its gradient.
        progress: what its optimizer knows of it beside its arrays, with how many steps it has taken, also in the runs
            before which this one goes on from. It means nothing if it is frozen.
        value_before: its flattened values, in RAM, from before a state_dict was loaded, until its split master follows;
            None: they are not kept.
        has_stored_write: whether others wrote to it, and its store has what they wrote, which its master does not
            follow yet.
        digest: of its values when the model was taken, if it has no states and commits say so (written_frozen.py).
        was_written: whether others wrote to it since then, as far as that was looked for.
        changed_after: the step after whose end its values changed last; see [Note: changed after] in weights.py.
        is_shared: whether it is in a kept base, which other runs read, so that nobody may write to it.
        pointed: how often it was pointed elsewhere (`p.data = x`), and written to by aliases that are forgotten.
    """

    __slots__ = (
        "_alias",
        "_guarded",
        "_identity",
        "_kind",
        "_pin",
        "_watched",
        "changed_after",
        "digest",
        "flat",
        "gradient",
        "has_stored_write",
        "is_inside",
        "is_sharded",
        "is_shared",
        "local",
        "number",
        "offset",
        "param",
        "pointed",
        "progress",
        "spec",
        "streams",
        "strides",
        "tensor",
        "unit",
        "value_before",
        "version",
        "was_written",
    )

    def __init__(
        self, number: int, spec: ParamSpec, inner: Inner, unit: Unit, flat: int, offset: int, *, streams: bool
    ) -> None:
        self.number = number
        self.spec = spec
        self.param = inner.param
        self.tensor = tensor = inner.used
        self.unit = unit
        self.flat = flat
        self.offset = offset
        self.streams = streams
        self.local: Tensor = inner.tensor
        self.is_sharded = inner.tensor is not tensor
        self.is_inside = inner.key != "" and is_wrapper(kind_of(inner.param))
        # A weak reference makes `torch.utils.swap_tensors` refuse a DTensor: it would take the local tensor away.
        self._pin = weakref.ref(tensor) if self.is_sharded else None
        self.strides: tuple[int, ...] = ()
        self.version = 0
        self.gradient = HeldGrad()
        self.progress = NEVER
        self.value_before: Tensor | None = None
        self.has_stored_write = False
        self.digest: str | None = None
        self.was_written = False
        self.changed_after = -1
        self.is_shared = False
        self.pointed = 0
        self._identity = 0
        self._kind: type[Tensor] = type(tensor)
        self._guarded: type[Tensor] = self._kind
        self._watched: type[Tensor] = self._kind
        # What `p.data` gave, and its version when writes to it were looked for last.
        self._alias: tuple[Tensor, int] | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has memory with its values."""
        return not self.streams or self.unit.is_here

    # What autograd knows of it, also while it is guarded.

    @property
    def grad(self) -> Tensor | None:
        """What `tensor.grad` is: a stand-in, what the user assigned, or None."""
        grad: Tensor | None = torch_private.past_subclasses(_GRAD.__get__, self.tensor)
        return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        torch_private.past_subclasses(_GRAD.__set__, self.tensor, grad)

    @property
    def is_marked(self) -> bool:
        """Whether `tensor.grad` is its own stand-in: it has a gradient that the user did not drop."""
        grad = self.grad
        return grad is not None and grad is self.gradient.stand_in

    @property
    def requires_grad(self) -> bool:
        """Whether autograd makes gradients for it, and the user has not frozen it since the model was taken."""
        return bool(torch_private.past_subclasses(_REQUIRES_GRAD.__get__, self.tensor))

    # Elements.

    def flattened(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor of its shape, in the order of its flat parameter: a view if they are.

        That order stays while the parameter is pointed at memory of other strides (`p.data = x`).
        """
        return flattened(with_strides(tensor, self.strides))

    def shaped(self, values: Tensor) -> Tensor:
        """The inverse of `flattened`: a view of `values`, shape (numel,), with the shape of the parameter."""
        return values.as_strided(self.local.shape, self.strides, values.storage_offset())

    def view_for(self, values: Tensor) -> Tensor:
        """`values`, a range of a flat parameter, in its shape; see [Note: storages] in flat_param.py."""
        if not self.streams:  # a storage of its own over the same memory
            own = torch_private.from_dlpack(torch_private.to_dlpack(values)) if values.numel() else None
            values = torch.empty_like(values) if own is None else own
        return self.shaped(values)

    # Identity.

    def remember(self) -> None:
        """Records which tensor the parameter is now, and how its elements lie."""
        self.strides, self._identity = self.local.stride(), self.tensor._cdata

    @property
    def is_swapped(self) -> bool:
        """Whether `torch.utils.swap_tensors` replaced its tensor. Graphs from before refer to the old one."""
        return self.tensor._cdata != self._identity

    # Guards; see [Note: guarded parameters] in guard.py.

    def guard_with(self, class_for: Callable[..., type[Tensor]]) -> None:
        """Makes its guarded classes, and guards it from now on. Args and result of `class_for` are in guard.py."""
        self._guarded = class_for(self._kind, streams=self.streams, is_inside=self.is_inside)
        self._watched = class_for(self._kind, streams=self.streams, is_inside=self.is_inside, runs=True)
        self.guard()

    def guard(self) -> None:
        """Makes each use of it be seen, because its unit does not run any more."""
        self.tensor.__class__ = self._guarded

    def watch(self) -> None:
        """Makes only `p.data` be seen, because its unit runs."""
        self.tensor.__class__ = self._watched

    # Versions and writes.

    @property
    def version_now(self) -> int:
        """The version of its tensors, which have memory."""
        version = self.tensor._version
        return version + self.local._version if self.is_sharded else version

    @property
    def returned_version(self) -> int:
        """The version of `tensor`, which is released, that it gets back with its memory."""
        # Of a sharded parameter the local tensor has a part of it.
        return self.version - self.local._version if self.is_sharded else self.version

    @property
    def own_version(self) -> int:
        """The version of `tensor` alone, which is known while it is released, too."""
        return self.tensor._version if self.is_here else self.returned_version

    def data(self) -> Tensor:
        """What `p.data` gives: the same memory with another version counter, as in torch. Writes to it are noticed."""
        if self._alias is None:
            alias = DATA.__get__(self.tensor)
            self._alias = alias, alias._version
        return self._alias[0].detach()

    @property
    def data_writes(self) -> int:
        """How often `p.data` was assigned or written to. It is counted while a forward of the unit runs."""
        return self.pointed + (0 if self._alias is None else self._alias[0]._version)

    @property
    def is_under_adapter(self) -> bool:
        """Whether it is a frozen weight to which adapters of peft are merged."""
        return self.spec.is_frozen and ".base_layer." in f".{self.spec.name}"

    def note_write(self, step: int) -> None:
        """Records that others wrote to it after a step."""
        self.was_written = True
        self.changed_after = max(self.changed_after, step)

    def forget_data(self) -> None:
        """Forgets what `p.data` gave: the parameter lies elsewhere from now on."""
        self.pointed, self._alias = self.data_writes, None

    def forget_writes(self) -> None:
        """Forgets what others wrote to it until now."""
        if self._alias is not None:
            alias = self._alias[0]
            self._alias = alias, alias._version
        if self.is_here:
            self.version = self.version_now

    @property
    def is_written(self) -> bool:
        """Whether others wrote to it since `forget_writes`; it is here."""
        alias = self._alias
        return self.version_now != self.version or (alias is not None and alias[0]._version != alias[1])


class HeldBeside:
    """A tensor whose class changes with a unit, beside the unit's HeldParams: a wrapper, or a view that a module has.

    Args:
        tensor: the tensor.
        streams: whether the memory that it shows comes and goes.

    Attributes:
        kind: its own class.
    """

    __slots__ = ("_guarded", "_watched", "kind", "streams", "tensor")

    def __init__(self, tensor: Tensor, *, streams: bool) -> None:
        self.tensor = tensor
        self.streams = streams
        self.kind: type[Tensor] = type(tensor)
        self._guarded = self._watched = self.kind

    def guard_with(self, class_for: Callable[..., type[Tensor]]) -> None:
        """As HeldParam.guard_with."""
        self._guarded = class_for(self.kind, streams=self.streams)
        self._watched = class_for(self.kind, streams=self.streams, runs=True)
        self.guard()

    def guard(self) -> None:
        """Makes each use of it be seen, because its unit does not run any more."""
        self.tensor.__class__ = self._guarded

    def watch(self) -> None:
        """Makes its uses be seen no more, because its unit runs."""
        self.tensor.__class__ = self._watched


class HeldWrapper(HeldBeside):
    """What is known of a parameter that is a wrapper around held inner tensors; see [Note: wrappers].

    Args:
        tensor: the parameter.
        inners: its inner tensors that are held.
        streams: whether their memory comes and goes.

    Attributes:
        tiles: if it is tiled, the wrappers around tiles of its inner tensors.
    """

    __slots__ = ("_inners", "_is_hidden", "_version", "tiles")

    def __init__(self, tensor: Tensor, inners: Sequence[Tensor], *, streams: bool) -> None:
        super().__init__(tensor, streams=streams)
        self._inners = tuple(inners)
        self.tiles: list[Tensor] = []
        self._version: int = tensor._version  # up to which writes are known
        self._is_hidden = False

    @property
    def version(self) -> int:
        """Its version, which is known while its inner tensors are released, too."""
        return self._version if self._is_hidden else self.tensor._version

    def spread_writes(self) -> None:
        """Makes writes to the wrapper count as writes to all of its inner tensors, and to its tiles."""
        if self.version != self._version:
            self._version = self.version
            torch.autograd.graph.increment_version((*self._inners, *self.tiles))

    def hide_version(self) -> None:
        """Gives it NO_VERSION, because its inner tensors are released. Writes to it are known."""
        self._is_hidden = True
        torch_private.set_version_counters((self.tensor,), (NO_VERSION,))

    def return_version(self) -> None:
        """Gives it the version that it had."""
        if self._is_hidden:
            torch_private.set_version_counters((self.tensor,), (self._version,))
            self._is_hidden = False


def set_versions(held: Iterable[HeldParam], version: int | None) -> None:
    """Gives parameters a version.

    Args:
        held: the parameters.
        version: one for all of them; None: the one that each had before.
    """
    params = tuple(held)
    versions = tuple(one.returned_version if version is None else version for one in params)
    torch_private.set_version_counters(tuple(one.tensor for one in params), versions)
