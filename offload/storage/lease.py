"""What a store lends, and which version of it a slot holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from offload.storage.swap_file import STATE_KINDS


@dataclass
class Lease:
    """The right to use one chunk's arrays: CPU tensors of shape (chunk.numel,), as its record says.

    Set by the holder: dirty, if they were written to; is_unfinished, if more will be, so that they stay in RAM unless
    their buffer is needed; is_spent, if nobody needs them any more: the next lease finds zeros. is_blank: they hold
    nothing of the chunk.
    """

    chunk: int
    arrays: Sequence[Tensor]
    dirty: bool = False
    is_unfinished: bool = False
    is_spent: bool = False
    is_blank: bool = False

    @property
    def master(self) -> Tensor:
        """fp32; with a split master its low halves, int16, and exp_avg_sq carries the tie bits."""
        return self.arrays[0]

    @property
    def exp_avg(self) -> Tensor:
        return self.arrays[1]

    @property
    def exp_avg_sq(self) -> Tensor:
        return self.arrays[2]

    def states(self) -> dict[str, Tensor]:
        return dict(zip(STATE_KINDS, self.arrays, strict=True))


class Version(NamedTuple):
    """Which content of a chunk is in its slot: the step it is the result of, and the slot's place.

    checksum: what a commit says that its data have; None: what its header says.
    """

    step: int
    place: int
    checksum: int | None = None
