"""Whole matrices that are stepped on the model's device, while their states wait in RAM or on a disk.

An update of a whole matrix, such as Muon's, multiplies matrices: five rounds of Newton-Schulz take some 300 to 750 ns
an element on a CPU thread, and about 1 ns on a GPU. So with a device that has memory of its own a matrix's master,
states and gradient are copied there, the optimizer's class steps them, and master and states are copied back. Two
matrices are under way at once, in memory that is reserved for two of the largest. They are of one chunk, or of all
chunks of a flat parameter that are in RAM. What is no matrix is stepped on the CPU.

Which side computes depends on the rule, the shape and the kind of device alone. So a run has the same bits wherever its
states wait, on any number of ranks, and those are the device's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.devices.copies import Copier, DeviceEvent
from offload.layout import ALIGN_BYTES, ALIGN_NUMEL, Layout
from offload.regions import Region
from offload.run import Memory
from offload.sizes import MASTER_ITEM_BYTES, round_up
from offload.tiers import DEVICE

MATRIX = "matrices that are stepped there"
AT_ONCE = 2
"""Matrices under way: with two, the link and the device's arithmetic are both busy."""

Step = Callable[[list[Tensor], Tensor], None]
"""Steps a master and its states, with the gradient."""


def is_stepped_there(shape: Sequence[int]) -> bool:
    """Whether a whole parameter of this shape is stepped on a device that has memory of its own."""
    return len(shape) > 1


def regions(layout: Layout) -> list[Region]:
    """What a `MatrixMemory` reserves: master, states and gradient of the largest matrix, twice."""
    arrays = (
        2 * round_up(spec.whole.part_numel, ALIGN_NUMEL)
        + sum(round_up(numel, ALIGN_NUMEL) for numel in spec.whole.part.numels(spec.states))
        for spec in layout.specs
        if spec.whole is not None and not spec.is_frozen and is_stepped_there(spec.whole.shape)
    )
    nbytes = AT_ONCE * MASTER_ITEM_BYTES * max(arrays, default=0)
    return [Region(DEVICE, MATRIX, nbytes)] if nbytes else []


class MatrixMemory:
    """Memory of the device for two matrices with their states.

    Args:
        memory: of the region `MATRIX`, uint8.
        copier: between it and where the states wait.
    """

    def __init__(self, memory: Tensor, copier: Copier) -> None:
        self._memory = memory.chunk(AT_ONCE)
        self._copier = copier
        self._is_free = copier.mark()  # of who had this memory before
        self._under_way: deque[tuple[DeviceEvent, Callable[[], object]]] = deque()
        self._number = 0

    @staticmethod
    def of(memory: Memory) -> MatrixMemory | None:
        """That of a run; None: its matrices are stepped where their states are."""
        return next((MatrixMemory(piece, memory.copier) for piece in memory.take(MATRIX)), None)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """A context in which matrices are stepped, two of which are under way: one is copied while the other computes.

        At the end of the block all have ended. If the block raises, the device is waited for, so nothing is written any
        more.
        """
        try:
            yield
            while self._under_way:
                self._end()
        except BaseException:
            self._under_way.clear()
            for place in range(AT_ONCE):
                with self._copier.apart(place):
                    self._copier.mark().wait()
            raise

    def begin(self, arrays: Sequence[Tensor], grad: Tensor, step: Step, then: Callable[[], object]) -> None:
        """Queues the step of a matrix on the device, on a stream of its own. Called in the context of `steps`.

        Args:
            arrays: the master and the states, fp32, in RAM. They get what `step` makes of their copies.
            grad: the gradient, of the master's shape, in RAM.
            step: gets the copies of `arrays`, and that of `grad`.
            then: called, later, once `arrays` are written.
        """
        if len(self._under_way) == AT_ONCE:
            self._end()
        place = self._number % AT_ONCE
        self._number += 1
        self._under_way.append((self._queue(place, arrays, grad, step), then))

    def _end(self) -> None:
        done, then = self._under_way.popleft()
        done.wait()
        then()

    def _queue(self, place: int, arrays: Sequence[Tensor], grad: Tensor, step: Step) -> DeviceEvent:
        """Queues what `begin` describes, in one of the two places.

        Returns:
            An event after all of it.
        """
        with self._copier.apart(place), torch.no_grad():
            self._is_free.wait_on_device()
            start, there = 0, []
            for source in (*arrays, grad):
                piece = self._memory[place][start : start + source.numel() * source.element_size()]
                there.append(piece.view(source.dtype).as_strided(source.shape, source.stride()))
                there[-1].copy_(source, non_blocking=True)
                start = round_up(start + len(piece), ALIGN_BYTES)
            *copies, gradient = there
            step(copies, gradient)
            for array, copy in zip(arrays, copies, strict=True):
                array.copy_(copy, non_blocking=True)
            return self._copier.mark()
