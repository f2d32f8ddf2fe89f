"""The ZeRO paper's two tables, from the same arithmetic that partitions a model.

Memory a rank for model states (Rajbhandari et al., arXiv:1910.02054, table 1), and the largest model that a GPU's
memory admits (table 2). Sizes there are in GB of 1e9 bytes, and all numbers cut or rounded as printed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from tests.support.zero_stages import STAGES, device_bytes, held_bytes

GB = 10**9
MODELS = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
RANKS = (1, 4, 16, 64, 256, 1024)
GPU_BYTES = 32 * GB
DATA_PARALLEL = 64
"""Data-parallel ranks in the table of largest models, at any degree of model parallelism."""
MODEL_PARALLEL = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class MemoryRow:
    """Bytes a rank: by_stage[model][stage], for stages 1, 2 and 3."""

    ranks: int
    by_stage: dict[str, dict[int, int]]


@dataclass(frozen=True)
class LargestRow:
    """Parameters of the largest model, by stage, 0 being plain data parallelism."""

    model_parallel: int
    gpus: int
    by_stage: dict[int, int]


def rank_bytes(parameters: int, ranks: int, stage: int, offloaded: Collection[str] = ()) -> int:
    """Bytes of model states on one rank's device, without alignment; `offloaded` names the state kinds elsewhere."""
    return device_bytes(held_bytes(parameters, ranks, stage), offloaded)


def memory_rows(ranks: Sequence[int] = RANKS) -> Iterator[MemoryRow]:
    for count in ranks:
        by_stage = {
            name: {stage: rank_bytes(parameters, count, stage) for stage in STAGES[1:]}
            for name, parameters in MODELS.items()
        }
        yield MemoryRow(count, by_stage)


def largest_model(memory_bytes: int, ranks: int, stage: int, offloaded: Collection[str] = ()) -> int:
    """The most parameters whose states fit in `memory_bytes` of each rank's device."""
    # A parameter takes a byte at least on one of the ranks, unless all of it is elsewhere.
    low, high = 0, memory_bytes * ranks + 1
    while high - low > 1:
        middle = (low + high) // 2
        if rank_bytes(middle, ranks, stage, offloaded) <= memory_bytes:
            low = middle
        else:
            high = middle
    return low


def largest_rows(memory_bytes: int = GPU_BYTES) -> Iterator[LargestRow]:
    """With model parallelism each GPU holds 1/M of the model; the paper multiplies what one holds, to 0.1B, by M."""
    tenth = 10**8
    one = {stage: largest_model(memory_bytes, DATA_PARALLEL, stage) // tenth * tenth for stage in STAGES}
    for degree in MODEL_PARALLEL:
        by_stage = {stage: count * degree for stage, count in one.items()}
        yield LargestRow(degree, degree * DATA_PARALLEL, by_stage)


def format_gb(count: int) -> str:
    """Bytes as GB in the paper's way: cut to whole ones from 100 on, one decimal from 10 on, below that two."""
    size = Decimal(count) / GB
    if size >= 100:
        return str(size.quantize(Decimal(1), ROUND_DOWN))
    places = Decimal("0.1") if size >= 10 else Decimal("0.01")
    return _plain(size.quantize(places, ROUND_HALF_UP))


def format_parameters(count: int) -> str:
    """Parameters in the paper's way: "7.6B", and from half a trillion on "0.5T"."""
    if count >= 5 * 10**11:
        return _plain((Decimal(count) / 10**12).quantize(Decimal("0.1"), ROUND_DOWN)) + "T"
    return _plain((Decimal(count) / 10**9).quantize(Decimal("0.1"), ROUND_DOWN)) + "B"


def _plain(number: Decimal) -> str:
    text = str(number)
    return text.rstrip("0").rstrip(".") if "." in text else text
