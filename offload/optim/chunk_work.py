"""What a step does with one chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from offload.layout import Chunk, Segment
from offload.optim.rule import Progress


class StepKey(NamedTuple):
    """What the parameters of a segment have in common.

    Attributes:
        group: the number of their param group.
        before: their progress before the step.
        factor: that of their gradients, beside the one of all gradients.
    """

    group: int
    before: Progress
    factor: float = 1.0


@dataclass
class ChunkWork:
    """One chunk's part of a step.

    Attributes:
        step: the number of the step.
        chunk: the chunk.
        is_whole: whether all parameters of the chunk are stepped.
        runs: the elements that are stepped, with the key of each.
        scalars: what the rule takes in this step, by key.
        owed: what it takes in steps that the chunk still owes, the first one first; they are made before this one.
        tried: the new parameters, shape (chunk.numel,), if the step of this chunk was tried in backward, and its new
            states are in their slot; None: the rule has to run.
        done: the future of the worker that runs it; None: no worker does.
    """

    step: int
    chunk: Chunk
    is_whole: bool
    runs: Sequence[Segment[StepKey]]
    scalars: Mapping[StepKey, Any]
    owed: Sequence[Any] = ()
    tried: Tensor | None = None
    done: Future[None] | None = None
