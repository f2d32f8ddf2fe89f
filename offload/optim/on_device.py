"""Whole matrices that are stepped on the model's device, while their states wait in RAM or on a disk.

An update of a whole matrix, such as Muon's, multiplies matrices: five rounds of Newton-Schulz take some 300 to 750 ns
an element on a CPU thread, and about 1 ns on a GPU. So with a device that has memory of its own a matrix's master,
states and gradient are copied there, the optimizer's class steps them, and master and states are copied back: one
matrix after the other, in memory that is reserved for the largest. What is no matrix is stepped on the CPU.

Which side computes depends on the rule, the shape and the kind of device alone. So a run has the same bits wherever its
states wait, on any number of ranks, and those are the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.devices.copies import Copier
from offload.layout import ALIGN_BYTES, ALIGN_NUMEL, Layout
from offload.regions import Region
from offload.run import Memory
from offload.sizes import MASTER_ITEM_BYTES, round_up
from offload.tiers import DEVICE

MATRIX = "a matrix that is stepped there"


def is_stepped_there(shape: Sequence[int]) -> bool:
    """Whether a whole parameter of this shape is stepped on a device that has memory of its own."""
    return len(shape) > 1


def regions(layout: Layout) -> list[Region]:
    """What a `MatrixMemory` reserves: master, states and gradient of the largest matrix."""
    arrays = (
        (2 + len(spec.states)) * round_up(spec.numel, ALIGN_NUMEL)
        for spec in layout.specs
        if spec.whole is not None and not spec.is_frozen and is_stepped_there(spec.whole)
    )
    nbytes = MASTER_ITEM_BYTES * max(arrays, default=0)
    return [Region(DEVICE, MATRIX, nbytes)] if nbytes else []


class MatrixMemory:
    """Memory of the device for one matrix with its states.

    Args:
        memory: of the region `MATRIX`, uint8.
        copier: between it and where the states wait.
    """

    def __init__(self, memory: Tensor, copier: Copier) -> None:
        self._memory = memory
        self._copier = copier
        self._is_free = copier.mark()  # of who had this memory before

    @staticmethod
    def of(memory: Memory) -> MatrixMemory | None:
        """That of a run; None: its matrices are stepped where their states are."""
        return next((MatrixMemory(piece, memory.copier) for piece in memory.take(MATRIX)), None)

    @contextmanager
    def copies(self, arrays: Sequence[Tensor], grad: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Copies of a matrix on the device, the current stream of which is its own inside.

        Args:
            arrays: the master and the states, fp32, of the matrix's shape. They are what the copies are at the end.
            grad: the gradient, of the same shape.

        Yields:
            The copies of `arrays`, and that of `grad`.
        """
        with self._copier.apart():
            self._is_free.wait_on_device()
            start, there = 0, []
            for source in (*arrays, grad):
                piece = self._memory[start : start + source.numel() * source.element_size()]
                there.append(piece.view(source.dtype).view(source.shape))
                there[-1].copy_(source, non_blocking=True)
                start = round_up(start + len(piece), ALIGN_BYTES)
            *copies, gradient = there
            yield copies, gradient
            with torch.no_grad():
                for array, copy in zip(arrays, copies, strict=True):
                    array.copy_(copy, non_blocking=True)
            done = self._copier.mark()
        done.wait()
