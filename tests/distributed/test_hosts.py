"""Hosts that are network namespaces behind a switch, each with a rank: disks of their own, shared ones, hosts that
vanish, a network that is cut. Whatever happens, a run ends with the weights of plain torch, or with a typed error.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_stored import call
from tests.distributed.test_elastic import TOLERANCE, difference, ranks_by_step, trained, wait_for
from tests.support import elastic, nodes, shared_disks
from tests.support.nodes import Host, Network
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOSTS = 3
ENDS_S = 300.0
"""A run, on a machine that does other things too."""
TIMEOUT_S = 20.0
"""Of the process group: see elastic.py."""
_PORTS = count(29600)


class Runs:
    """Runs on hosts. Attributes: network; shared: what they log in, and the shared run is; folder: has all."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def own(self, host: Host) -> Path:
        """A directory on the host's own disk."""
        return self.folder / f"disk{host.number}" / "run"

    def start(
        self,
        hosts: Sequence[Host],
        path: Callable[[Host], Path] | None = None,
        log: Path | None = None,
        *,
        is_far: bool = False,
        **options: Any,
    ) -> list[subprocess.Popen[bytes]]:
        """Starts a rank on each of these hosts, in their order. Args: path: of the run there; None: a shared one;
        is_far: they see no process of other hosts, and were booted another time."""
        log, port = log or self.shared, next(_PORTS)
        apart = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"] if is_far else []
        started = []
        for rank, host in enumerate(hosts):
            place = self.shared / "run" if path is None else path(host)
            place.parent.mkdir(exist_ok=True)
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            script = [sys.executable, str(ROOT / "tests" / "support" / "elastic.py"), str(log)]
            boot = self.folder / f"boot{host.number}"
            boot.write_text(f"{host.number}\n")
            booted = f"mount --bind '{boot}' /proc/sys/kernel/random/boot_id && " if is_far else ""
            started.append(
                host.start(
                    *("unshare", "--uts", *apart),
                    *("sh", "-c", f'{booted}hostname host{host.number} && exec "$@"', "sh"),
                    *(*script, json.dumps({"path": str(place)} | options)),
                    output=self.output(host),
                    MASTER_ADDR=hosts[0].address,
                    MASTER_PORT=str(port),
                    **ranks,
                )
            )
        self._started += started
        return started

    def end(self) -> None:
        """Ends what a test has left."""
        for rank in self._started:
            rank.kill()
            rank.wait()

    def output(self, host: Host) -> Path:
        return self.folder / f"host{host.number}.txt"

    def said(self, *hosts: Host) -> str:
        """What these hosts (none: all of them) said."""
        files = [self.output(host) for host in hosts or self.network.hosts]
        return "\n".join(file.read_text() for file in files if file.exists())

    def stop_at(self, ranks: int, step: int, where: str = "") -> Path:
        """The last of `ranks` will stop there. Returns: the file that tells it to."""
        hold = self.shared / f"hold-{ranks}-{step}{where}"
        hold.touch()
        return hold

    def wait_for_stop(self, hold: Path) -> Path:
        """Waits until a rank has stopped, which nobody does there again. Returns: what lets it go on when removed."""
        held = held_by(hold)
        wait_for(held, timeout_s=ENDS_S)
        hold.unlink()
        return held

    def commit_and_lose_all(self, hosts: Sequence[Host], path: Callable[[Host], Path] | None, step: int) -> None:
        """Trains until before `step`, then all lose power."""
        hold = self.stop_at(len(hosts), step)
        ranks = self.start(hosts, path)
        self.wait_for_stop(hold)
        for host in hosts:
            host.kill()
        assert all(rank.wait(10) for rank in ranks)
        for host in hosts:
            host.connect()

    def require_weights(self, ranks: Sequence[int], log: Path | None = None) -> None:
        """The weights are those of plain torch. Args: ranks: how many there were in each step."""
        log = log or self.shared
        assert ranks_by_step(log / "log") == list(ranks)
        assert difference(torch.load(log / "weights"), trained(list(ranks))) < TOLERANCE


def held_by(hold: Path) -> Path:
    """What says that a rank has stopped."""
    return hold.with_name(hold.name.replace("hold", "held"))


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [rank.wait(ENDS_S) for rank in ranks]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    if reason := nodes.no_network():
        pytest.skip(reason)
    with nodes.network(HOSTS, tmp_path) as network:
        made = Runs(network, tmp_path)
        began = time.monotonic()
        try:
            yield made
        finally:
            made.end()
            print(f"{time.monotonic() - began:.1f} s")
            print(made.said()[-6000:])


@pytest.mark.parametrize(("disk", "stage"), [("own", 3), ("shared", 2)])
def test_hosts_train_and_go_on_after_all_lost_power(runs: Runs, disk: str, stage: int) -> None:
    path = runs.own if disk == "own" else None
    runs.commit_and_lose_all(runs.network.hosts, path, 7)
    assert end(runs.start(runs.network.hosts, path, stage=stage)) == [0] * HOSTS
    runs.require_weights([HOSTS] * elastic.STEPS)
    everywhere = {runs.shared / "run"} if path is None else {path(host) for host in runs.network.hosts}
    assert call("verify", *everywhere).exit_code == 0


@pytest.mark.parametrize("then", [2, 3])
def test_fewer_and_more_hosts_go_on_over_a_shared_disk(runs: Runs, then: int) -> None:
    hosts, first = runs.network.hosts, 5 - then
    runs.commit_and_lose_all(hosts[:first], None, 7)
    assert end(runs.start(hosts[:then])) == [0] * then
    runs.require_weights([first] * 6 + [then] * (elastic.STEPS - 6))


@pytest.mark.parametrize("hosts", [(0, 2, 1), (0, 1), (1, 2), (2, 1, 0)], ids=str)
def test_other_hosts_with_disks_of_their_own_go_on_or_are_told(runs: Runs, hosts: tuple[int, ...]) -> None:
    runs.commit_and_lose_all(runs.network.hosts, runs.own, 7)
    ends = end(runs.start([runs.network.hosts[number] for number in hosts], runs.own))
    if any(ends):
        assert all(ends)
        assert "ResumeError" in runs.said()
        shutil.rmtree(runs.shared / "weights", ignore_errors=True)
        assert end(runs.start(runs.network.hosts, runs.own)) == [0] * HOSTS, "what was refused has changed nothing"
        runs.require_weights([HOSTS] * elastic.STEPS)
    else:
        runs.require_weights([HOSTS] * 6 + [len(hosts)] * (elastic.STEPS - 6))


@pytest.mark.parametrize("how", ["lost", "older", "another host's"])
def test_a_disk_that_is_not_what_it_was_is_named_with_its_host(runs: Runs, how: str) -> None:
    """Named is the host that has it, and nothing is changed: with the right disk the run goes on."""
    hosts = runs.network.hosts
    runs.commit_and_lose_all(hosts, runs.own, 4)
    older = runs.folder / "older"
    shutil.copytree(runs.own(hosts[1]), older)
    runs.commit_and_lose_all(hosts, runs.own, 10)
    right, bad = runs.folder / "right", runs.own(hosts[1])
    bad.rename(right)
    if how == "older":
        older.rename(bad)
    elif how == "another host's":
        shutil.copytree(runs.own(hosts[2]), bad)
    before = len(runs.said())
    assert all(end(runs.start(hosts, runs.own)))
    said = runs.said()[before // 2 :]
    assert "ResumeError" in said or "PathInUseError" in said
    shutil.rmtree(bad, ignore_errors=True)
    right.rename(bad)
    assert end(runs.start(hosts, runs.own)) == [0] * HOSTS
    runs.require_weights([HOSTS] * elastic.STEPS)


@pytest.mark.parametrize("disk", ["own", "shared"])
def test_a_host_that_is_lost_in_a_commit_is_an_error_in_time_and_a_commit_or_none(runs: Runs, disk: str) -> None:
    path = runs.own if disk == "own" else None
    hosts = runs.network.hosts
    hold = runs.stop_at(HOSTS, 6, "-commit")
    ranks = runs.start(hosts, path)
    runs.wait_for_stop(hold)
    hosts[-1].kill()
    began = time.monotonic()
    assert all(end(ranks))
    assert time.monotonic() - began < TIMEOUT_S + 20
    assert "RankError" in runs.said(*hosts[:-1])
    hosts[-1].connect()
    assert end(runs.start(hosts, path)) == [0] * HOSTS
    runs.require_weights([HOSTS] * elastic.STEPS)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_network_that_is_cut_ends_both_sides_and_commits_nothing(runs: Runs, lost: int) -> None:
    """Whoever is cut off may be one or two of three hosts."""
    hosts = runs.network.hosts
    hold = runs.stop_at(HOSTS, 7)
    ranks = runs.start(hosts, runs.own)
    wait_for(held_by(hold), timeout_s=ENDS_S)
    for host in hosts[HOSTS - lost :]:
        host.cut_off()
    began = time.monotonic()
    ends = end(ranks[:-1])
    assert all(ends)
    assert time.monotonic() - began < 2 * TIMEOUT_S + 20
    assert "RankError" in runs.said(*hosts[:-1])
    ranks[-1].kill()  # it sleeps in its loop, as a rank does whose batch takes for ever
    hosts[-1].kill()
    hold.unlink()
    for host in hosts:
        host.connect()
    assert end(runs.start(hosts, runs.own)) == [0] * HOSTS
    runs.require_weights([HOSTS] * elastic.STEPS)


def test_a_second_run_on_another_host_is_refused_and_the_first_goes_on(runs: Runs) -> None:
    hosts = runs.network.hosts
    hold = runs.stop_at(2, 7)
    first = runs.start(hosts[:2])
    wait_for(held_by(hold), timeout_s=ENDS_S)
    other = runs.folder / "other"
    other.mkdir()
    (second,) = runs.start(hosts[2:], log=other, is_far=True, lock_timeout=1)
    assert second.wait(ENDS_S)
    said = runs.said(hosts[2])
    assert "PathInUseError" in said
    assert "host0" in said or "host1" in said, "whose lock it is"
    for rank in first:  # the one that holds goes on with the next start
        rank.kill()
    hold.unlink()
    assert end(runs.start(hosts[:2])) == [0, 0]
    runs.require_weights([2] * elastic.STEPS)


def test_a_lock_that_outlives_its_host_is_waited_for(runs: Runs) -> None:
    """As a file server keeps it until the lease ends: the lost host's process still has it for a while."""
    hosts = runs.network.hosts
    hold = runs.stop_at(2, 7)
    first = runs.start(hosts[:2])
    runs.wait_for_stop(hold)
    for rank, host in zip(first, hosts, strict=False):
        host.cut_off()
        rank.send_signal(signal.SIGSTOP)
    try:
        (second,) = runs.start(hosts[2:], is_far=True, lock_timeout=60)
        wait_for(runs.output(hosts[2]), "lock", timeout_s=ENDS_S)
        assert second.poll() is None
    finally:
        for rank in first:
            rank.kill()
    assert second.wait(ENDS_S) == 0
    runs.require_weights([2] * 6 + [1] * (elastic.STEPS - 6))


@pytest.mark.parametrize("kind", ["sshfs", "glusterfs"])
def test_hosts_train_and_go_on_over_a_file_system_of_the_network(runs: Runs, kind: str) -> None:
    if reason := shared_disks.missing(kind):
        pytest.skip(reason)
    hosts = runs.network.hosts
    with shared_disks.shared(kind, runs.network, runs.folder) as mounted:

        def path(host: Host) -> Path:
            return mounted(host) / "run"

        hold = runs.stop_at(HOSTS, 7)
        ranks = runs.start(hosts, path)
        runs.wait_for_stop(hold)
        for rank in ranks:
            rank.kill()
        assert all(end(ranks))
        assert end(runs.start(hosts[:2], path)) == [0, 0]
        runs.require_weights([HOSTS] * 6 + [2] * (elastic.STEPS - 6))
        assert call("verify", path(hosts[2])).exit_code == 0


@pytest.mark.parametrize(("kind", "step", "where"), [("sshfs", 7, ""), ("sshfs", 6, "-commit"), ("glusterfs", 7, "")])
def test_a_second_run_over_a_file_system_of_the_network_is_never_a_wrong_number(
    runs: Runs, kind: str, step: int, where: str
) -> None:
    """Where flock reaches all hosts the second run is refused. Where it does not, the first one finds it out, before a
    step or in a commit, and leaves alone what the second one has made.
    """
    if reason := shared_disks.missing(kind):
        pytest.skip(reason)
    hosts = runs.network.hosts
    with shared_disks.shared(kind, runs.network, runs.folder) as mounted:

        def path(host: Host) -> Path:
            return mounted(host) / "run"

        hold = runs.stop_at(1, step, where)
        (first,) = runs.start(hosts[:1], path)
        held = runs.wait_for_stop(hold)
        other = runs.folder / "other"
        other.mkdir()
        (second,) = runs.start(hosts[1:2], path, log=other, lock_timeout=1)
        is_refused = kind == "glusterfs"
        assert bool(second.wait(ENDS_S)) == is_refused
        held.unlink()
        assert bool(first.wait(ENDS_S)) != is_refused
        assert "PathInUseError" in runs.said(hosts[int(is_refused)])
        ended = runs.shared if is_refused else other
        assert difference(torch.load(ended / "weights"), trained([1] * elastic.STEPS)) < TOLERANCE
        assert call("verify", path(hosts[2])).exit_code == 0
