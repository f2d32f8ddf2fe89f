from __future__ import annotations

import pytest

from offload.errors import ConfigError
from offload.ranks.launch import launched, rank_on_node


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (5, 8)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (1, 4)),
        ({"LOCAL_RANK": "1"}, (5, 8)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (0, 2)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2)),
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "4"}, (3, 4)),
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_launchers_tell_a_process_its_place(environ: dict[str, str], place: tuple[int, int]) -> None:
    assert rank_on_node(environ, 5, 8) == place


@pytest.mark.parametrize(("rank", "count"), [("x", "2"), ("0", "0"), ("-1", "2"), ("2", "2"), ("0", "")])
def test_a_place_that_cannot_be_is_refused(rank: str, count: str) -> None:
    with pytest.raises(ConfigError, match="LOCAL_"):
        rank_on_node({"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}, 0, 4)


def test_one_process_is_what_nobody_launched() -> None:
    assert launched({}) == 1
    assert launched({"WORLD_SIZE": "4"}) == 4
    with pytest.raises(ConfigError, match="WORLD_SIZE='0'"):
        launched({"WORLD_SIZE": "0"})
