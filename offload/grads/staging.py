"""Gradients that wait on the device until they leave it together.

[Note: gathered gradients]
For each copy from the device the host launches it, makes two events, and wakes a worker. For a small gradient that
takes longer than the copy. So small gradients of a unit wait where autograd made them, and then leave together: those
that lie side by side in RAM take one copy, through a region of the device's memory (`Copier.gather_to_host`). They
leave when all gradients of the unit are there, or the region has no room for another one, or another one is of another
unit, micro-batch or stream, or when somebody needs them in RAM.

A large gradient leaves at once, alone: its copy takes longer than the host, and hides behind what computes the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from offload.layout import ALIGN_BYTES, ALIGN_NUMEL, Layout
from offload.regions import Region
from offload.sizes import MIB, round_up
from offload.tiers import DEVICE

STAGING = "gradients that leave the device together"
STAGED_BYTES = 32 * MIB
"""The most bytes that leave together: a copy that takes many times as long as the host does."""
LARGE_BYTES = 8 * MIB
"""A gradient of more bytes leaves alone. On a link of 55 GB/s its copy takes 0.15 ms, as long as the host spends on a
gradient."""


def regions(layout: Layout, device_flats: Collection[int] = ()) -> list[Region]:
    """What gradients need on a device with memory of its own to leave it together: room for those of each unit.

    A unit that has one small gradient needs none.

    Args:
        layout: of the trained parameters.
        device_flats: see `Run`. Their gradients stay.
    """
    units: dict[str, list[int]] = {}
    for spec, flat in zip(layout.specs, layout.flat_of, strict=True):
        nbytes = spec.numel * spec.dtype.itemsize
        if not spec.tile and nbytes <= LARGE_BYTES and flat not in device_flats:
            units.setdefault(spec.unit, []).append(round_up(nbytes, ALIGN_BYTES))
    nbytes = min(max((sum(sizes) for sizes in units.values() if len(sizes) > 1), default=0), STAGED_BYTES)
    return [Region(DEVICE, STAGING, nbytes, kind="grad")] if nbytes else []


class Share(NamedTuple):
    """A gradient, or a part of it, and where in RAM it goes.

    Attributes:
        within: the index of the flat parameter or of the chunk that it goes to: a copy stays within one.
        start: the element of the flat parameter at which it begins.
        values: shape (n,), on the device.
        param: the parameter's index.
    """

    within: int
    start: int
    values: Tensor
    param: int

    @property
    def stop(self) -> int:
        """The element of the flat parameter after its last one."""
        return self.start + len(self.values)


def side_by_side(shares: Iterable[Share]) -> Iterator[list[Share]]:
    """Parts shares, in the order of their places, into groups that have only gaps for alignment between them."""
    group: list[Share] = []
    for share in sorted(shares, key=lambda one: (one.within, one.start, one.stop)):
        if group and (share.within != group[-1].within or share.start > round_up(group[-1].stop, ALIGN_NUMEL)):
            yield group
            group = []
        group.append(share)
    if group:
        yield group


class Common(NamedTuple):
    """What gradients that leave together have in common.

    Attributes:
        unit: the unit of their parameters.
        number: which micro-batch of the step they are of.
        stream: the stream that made them.
    """

    unit: str
    number: int
    stream: object


class Staging:
    """The gradients of a unit that wait on the device; see [Note: gathered gradients].

    Args:
        layout: of the trained parameters.
        memory: the region, uint8, on the device; none where the device has no memory of its own.
    """

    def __init__(self, layout: Layout, memory: Sequence[Tensor]) -> None:
        self._layout = layout
        self._memory = memory[0] if memory else None
        self._free = self._size = 0 if self._memory is None else self._memory.numel()
        self._common: Common | None = None
        self._gradients: dict[int, Tensor] = {}  # by parameter; a queue: it is empty whenever they have left

    @property
    def common(self) -> Common | None:
        """What the gradients that wait have in common; None: none waits."""
        return self._common if self._gradients else None

    def has_any(self, params: Iterable[int]) -> bool:
        """Whether the gradient of one of these parameters waits."""
        return bool(self._gradients) and any(param in self._gradients for param in params)

    def takes(self, param: int, grad: Tensor) -> bool:
        """Whether a gradient, shape (numel,), may wait: it is small, and leaves the device as it is."""
        if self._memory is None:
            return False
        spec = self._layout.specs[param]
        is_small = grad.nbytes <= min(LARGE_BYTES, self._size) and not spec.tile
        return is_small and grad.dtype is spec.dtype and grad.device == self._memory.device

    def has_room(self, grad: Tensor, common: Common) -> bool:
        """Whether a gradient that may wait can leave with those that do."""
        return self.common in (None, common) and _room_of(grad) <= self._free

    def add(self, param: int, grad: Tensor, common: Common) -> None:
        """Makes a gradient wait, for which there is room."""
        self._common = common
        self._gradients[param] = grad
        self._free -= _room_of(grad)

    def drop(self, param: int) -> None:
        """Forgets the gradient of a parameter, if it waits."""
        grad = self._gradients.pop(param, None)
        if grad is not None:
            self._free += _room_of(grad)

    def take(self) -> dict[int, Tensor]:
        """The gradients that wait, by parameter, in the order in which they came. None waits then."""
        taken, self._gradients, self._free = self._gradients, {}, self._size
        return taken

    def memory_for(self, values: Tensor) -> Tensor:
        """The region, or its beginning, as a tensor of the shape and dtype of `values`, which are all that leave."""
        assert self._memory is not None
        return self._memory[: values.nbytes].view(values.dtype)


def _room_of(grad: Tensor) -> int:
    return round_up(grad.nbytes, ALIGN_BYTES)
