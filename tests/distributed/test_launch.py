from __future__ import annotations

import contextlib
import io
import os

import pytest
from torch import nn

from offload import OffloadZero
from offload.errors import ConfigError, RankError
from offload.ranks import torch_distributed as comm
from offload.ranks.launch import launched, rank_on_node
from tests.support.ranks import World, Worlds


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


def _on_machines_of_their_own() -> str:
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        OffloadZero(nn.Linear(2, 2)).close()
    return said.getvalue()


def _told_in_one_group() -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        OffloadZero(nn.Linear(2, 2)).close()
    return said.getvalue()


def test_with_several_machines_the_start_says_when_a_lost_one_is_found(worlds: Worlds) -> None:
    assert not any("several machines" in said for said in worlds(2).run(_told_in_one_group))
    with World(2, group_timeout_s=77) as world:
        for said in world.run(_on_machines_of_their_own):
            assert "ranks on several machines: one that is lost is found after 77 s" in said


def _advised(address: str, interface: str | None) -> str:
    """What a collective says that nobody else takes part in."""
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    group = comm.connect(timeout_s=0.2)
    if group.rank:
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostbyname", lambda name: address)
        patch.delenv("GLOO_SOCKET_IFNAME")
        if interface is not None:
            patch.setenv("GLOO_SOCKET_IFNAME", interface)
        with pytest.raises(RankError) as caught:
            group.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("address", "interface", "advises"),
    [("127.0.1.1", None, True), ("127.0.1.1", "eth0", False), ("10.0.0.7", None, False)],
)
def test_an_address_that_leads_nowhere_is_named(address: str, interface: str | None, advises: bool) -> None:
    with World(2) as world:
        said, _ = world.run(_advised, address, interface)
        assert ("set GLOO_SOCKET_IFNAME to the network interface" in said) is advises
        world.usable = False
