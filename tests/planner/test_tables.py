"""Every number of the ZeRO paper's tables."""

from __future__ import annotations

import pytest

from tests.planner.tables import (
    GB,
    format_gb,
    format_parameters,
    largest_model,
    largest_rows,
    memory_rows,
    rank_bytes,
)
from tests.support.zero_stages import SHARDED, STATE_KINDS

MEMORY = """
1    | 120 / 120 / 120    | 2048 / 2048 / 2048 | 16000 / 16000 / 16000
4    | 52.5 / 41.3 / 30   | 896 / 704 / 512    | 7000 / 5500 / 4000
16   | 35.6 / 21.6 / 7.5  | 608 / 368 / 128    | 4750 / 2875 / 1000
64   | 31.4 / 16.6 / 1.88 | 536 / 284 / 32     | 4187 / 2218 / 250
256  | 30.4 / 15.4 / 0.47 | 518 / 263 / 8      | 4046 / 2054 / 62.5
1024 | 30.1 / 15.1 / 0.12 | 513 / 257 / 2      | 4011 / 2013 / 15.6
"""

LARGEST = """
1  | 64   | 2B  | 7.6B   | 14.4B  | 128B
2  | 128  | 4B  | 15.2B  | 28.8B  | 256B
4  | 256  | 8B  | 30.4B  | 57.6B  | 0.5T
8  | 512  | 16B | 60.8B  | 115.2B | 1T
16 | 1024 | 32B | 121.6B | 230.4B | 2T
"""


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def test_memory_a_rank_is_the_papers() -> None:
    found = [
        [str(row.ranks), *(" / ".join(map(format_gb, sizes.values())) for sizes in row.by_stage.values())]
        for row in memory_rows()
    ]
    assert found == cells(MEMORY)


def test_the_largest_models_are_the_papers() -> None:
    found = [
        [str(row.model_parallel), str(row.gpus), *map(format_parameters, row.by_stage.values())]
        for row in largest_rows()
    ]
    assert found == cells(LARGEST)


def test_70b_on_16_ranks() -> None:
    psi = 70 * GB
    assert [rank_bytes(psi, 16, stage) / GB for stage in (0, 1, 2, 3)] == [1120, 332.5, 201.25, 70]
    assert rank_bytes(psi, 16, 3, offloaded=STATE_KINDS) / GB == 17.5
    assert rank_bytes(psi, 16, 3, offloaded=SHARDED[3]) == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_largest_model_fits_and_one_parameter_more_does_not(stage: int) -> None:
    for memory in (1, 1000, 32 * GB):
        for ranks in (1, 3, 64):
            largest = largest_model(memory, ranks, stage)
            assert rank_bytes(largest, ranks, stage) <= memory < rank_bytes(largest + 1, ranks, stage)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (41.25, "41.3"), (1.875, "1.88"), (9.999, "10"), (99.96, "100"), (4187.5, "4187")]
)
def test_gigabytes_are_written_as_in_the_paper(size: float, text: str) -> None:
    assert format_gb(int(size * GB)) == text
