"""Commits, resuming and going back over ranks: together or not at all, and with the same bits."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from offload import OffloadZero, Tuning
from offload.checkpoint.commit import read_commit
from offload.checkpoint.reader import Reader
from offload.errors import ConfigError, InterruptedStepError, OffloadError, RankError, ResumeError, TierIOError
from offload.io.engine import IOFile
from offload.io.files import Files
from offload.planner import least_cpu_memory
from offload.ranks import torch_distributed as comm
from tests.support import models
from tests.support.disks import on_disk
from tests.support.machines import RUN, on
from tests.support.ranks import World, Worlds
from tests.support.run_files import contents, kinds_in, swap_in
from tests.support.sharded import batches_of, communicators, devices_apart
from tests.support.training import LR, schedule

TIMEOUT_S = 2.0
STEPS, AT, MORE = 5, 2, 1
"""Steps of a training; the one that is committed, and how many follow before it ends without another commit."""
SPLIT = {"split_master": True}
PLACES: list[Any] = [
    pytest.param(2, 1, "late", {"cpu_memory": "least"}, marks=pytest.mark.slow),
    pytest.param(3, 2, "plain", {"tier": "cpu", "accumulation": 2}, marks=pytest.mark.slow),
    pytest.param(2, 2, "late", {"cpu_memory": "least", "tuning": SPLIT}, marks=pytest.mark.slow),
    pytest.param(3, 3, "late", {"param_tier": "cpu", "cpu_memory": "least"}, marks=pytest.mark.slow),
    (2, 1, "plain", {"param_tier": "cpu", "cpu_memory": "least", "mesh": (2, 1)}),
    pytest.param(2, 2, "late", {"param_tier": "nvme", "cpu_memory": "least", "tuning": SPLIT}, marks=pytest.mark.slow),
    (2, 3, "plain", {"param_tier": "nvme", "cpu_memory": "least", "tuning": SPLIT, "accumulation": 2}),
    pytest.param(4, 3, "late", {"tuning": SPLIT}, marks=pytest.mark.slow),
    pytest.param(4, 3, "late", {"mesh": (2, 2)}, marks=pytest.mark.slow),
    pytest.param(2, 3, "plain", {"tier": "device"}, marks=pytest.mark.slow),
    (2, 2, "late", {"tier": "device", "apart": True, "accumulation": 2}),
    pytest.param(2, 2, "late", {"apart": True, "tuning": SPLIT}, marks=pytest.mark.slow),
]
pytestmark = pytest.mark.timeout(120)


class Training:
    """One rank's share of a training whose batches depend on nothing but their number."""

    def __init__(self, path: Any, *, tuning: dict[str, Any] | None = None, accumulation: int = 1, **options: Any):
        self.model = models.build("gpt")
        plain = torch.optim.AdamW(models.groups(self.model), lr=LR)
        self.accumulation = accumulation
        made = Tuning(**{"chunk": "4KiB", "threads": 1} | (tuning or {}))
        if options.get("cpu_memory") == "least":
            asked = {name: options.get(name) for name in ("param_tier", "stage")}
            options["cpu_memory"] = least_cpu_memory(
                self.model, plain, accumulation=accumulation, ranks=dist.get_world_size(), tuning=made,
                commit_every=0, **asked,
            )  # fmt: skip
        options = {"commit_every": 0} | options
        if (mesh := options.pop("mesh", None)) is not None:
            options["process_group"] = init_device_mesh("cpu", mesh)
        self.optimizer = OffloadZero(self.model, plain, path=path, accumulation=accumulation, tuning=made, **options)
        self.batches = batches_of("gpt", self.model, dist.get_rank(), dist.get_world_size())
        self.step = 0
        if self.optimizer.resumed is not None:
            self.step = self.optimizer.resumed.step
            for _ in range(self.step * accumulation):
                next(self.batches)

    def go_to(self, step: int) -> None:
        while self.step < step:
            for group in self.optimizer.param_groups:
                group["lr"] = LR * schedule(self.step)
            for _ in range(self.accumulation):
                (next(self.batches)() / self.accumulation).backward()
            self.optimizer.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def again_from(self, step: int) -> None:
        """The batches come again, too."""
        self.batches = batches_of("gpt", self.model, dist.get_rank(), dist.get_world_size())
        for _ in range(step * self.accumulation):
            next(self.batches)
        self.step = step

    def bits(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            with self.optimizer.gathered(param):
                found[name] = param.detach().clone()
            state = self.optimizer.state_of(param)
            found |= {f"{name}.{kind}": torch.as_tensor(value).clone() for kind, value in state.items()}
        return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _uninterrupted(path: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    training = Training(path, **options | {"commit_every": None, "tier": "nvme"})
    training.go_to(STEPS)
    with training.optimizer:
        return training.bits()


def _interrupted(base: str, options: dict[str, Any], wire: str) -> None:
    common = {name: value for name, value in options.items() if name != "apart"}
    expected = _uninterrupted(f"{base}/alone", common)
    # With several directories each rank has two manifests; the last rank's are its own.
    last = dist.get_rank() == dist.get_world_size() - 1
    paths = [f"{base}/run-{'last' if last else 'all'}{number}" for number in range(2)]
    with communicators(wire), devices_apart(options.pop("apart", False)):
        training = Training(paths, **options)
        training.go_to(AT)
        training.optimizer.commit({"rank": dist.get_rank(), "x": torch.arange(dist.get_rank())})
        training.go_to(AT + 1)
        training.optimizer.rollback()
        training.again_from(AT)
        training.go_to(AT + MORE)
        training.optimizer.close()
        again = Training(paths, **options, resume=True)
        assert again.optimizer.resumed is not None
        step, extra = again.optimizer.resumed
        assert (step, extra["rank"], len(extra["x"])) == (AT, dist.get_rank(), dist.get_rank())  # type: ignore[index]
        again.go_to(STEPS)
        with again.optimizer:
            assert same(again.bits(), expected)


@pytest.mark.parametrize(("ranks", "stage", "wire", "options"), PLACES)
def test_resumed_ranks_have_the_bits_of_ranks_that_never_stopped(
    worlds: Worlds, tmp_path: Path, ranks: int, stage: int, wire: str, options: dict[str, Any]
) -> None:
    worlds(ranks).run(_interrupted, str(tmp_path), options | {"stage": stage}, wire)
    with Reader([path for path in tmp_path.iterdir() if path.name != "alone"]) as reader:
        assert [manifest.rank for manifest in reader.manifests] == list(range(ranks))
        assert all(slot.error is None for slot in reader.verify())


# A rank that fails.


class Failing(Files):
    """Fails, once it is told, at the first operation of a kind on a file in whose name this is."""

    def __init__(self) -> None:
        super().__init__()
        self._operation = self._name = ""

    def fail(self, operation: str, name: str) -> None:
        self._operation, self._name = operation, name

    def _fail(self, operation: str, path: Path) -> None:
        if operation == self._operation and self._name in path.name:
            self._operation = ""
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write(self, file: IOFile, data: memoryview) -> None:
        self._fail("write", Path(file.path))
        super().write(file, data)

    def rename(self, old: Path, new: Path) -> None:
        self._fail("rename", new)
        super().rename(old, new)


def _refused(path: str, rank: int, operation: str, name: str) -> tuple[str, str]:
    """What a commit of step 5 raised, and what the same rank's call after it did."""
    files = Failing()
    with on_disk(files):
        training = Training(path, stage=2)
    training.go_to(AT)
    training.optimizer.commit()
    expected = training.bits()
    training.go_to(AT + MORE)
    if dist.get_rank() == rank:
        files.fail(operation, name)
    said = then = "nothing"
    try:
        training.optimizer.commit()
    except OffloadError as error:
        said = type(error).__name__
    if dist.get_rank() == 0:
        found = read_commit(Path(path))
        assert found is not None
        assert found.step == AT or (operation, name) == ("rename", "COMMIT")
    try:
        training.optimizer.rollback()
        assert same(training.bits(), expected)
        training.again_from(AT)
        training.go_to(AT + MORE)
        training.optimizer.commit()
    except OffloadError as error:
        then = type(error).__name__
    with suppress(OffloadError):
        training.optimizer.close()
    return said, then


FAILURES = [(1, "write", "manifest"), (0, "write", "manifest"), (0, "write", "record")]


@pytest.mark.parametrize(("rank", "operation", "name"), FAILURES)
def test_what_fails_on_one_rank_is_refused_by_all_and_they_go_on_from_the_last_commit(
    worlds: Worlds, tmp_path: Path, rank: int, operation: str, name: str
) -> None:
    found = worlds(3).run(_refused, str(tmp_path / "run"), rank, operation, name)
    assert [said for said, _ in found] == ["TierIOError" if number == rank else "OtherRankError" for number in range(3)]
    assert [then for _, then in found] == ["nothing"] * 3
    with Reader([tmp_path / "run"]) as reader:
        assert reader.commit.step == AT + MORE


def test_where_nobody_knows_whether_it_is_decided_no_rank_goes_on(worlds: Worlds, tmp_path: Path) -> None:
    found = worlds(2).run(_refused, str(tmp_path / "run"), 0, "rename", "COMMIT")
    assert found == [("TierIOError", "TierIOError"), ("OtherRankError", "OtherRankError")]


def _not_restored(path: str) -> tuple[str, str]:
    """What a resume and a way back say where one rank's slots are damaged."""
    training = Training(path, stage=2)
    training.go_to(AT)
    training.optimizer.commit()
    training.optimizer.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        with open(swap_in(Path(path), 1), "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for offset in range(4096, size, 4096):
                file.seek(offset)
                file.write(b"\1" * 8)
    dist.barrier()
    said = []
    for work in (training.optimizer.rollback, lambda: Training(path, stage=2, resume=True)):
        try:
            work()
        except OffloadError as error:
            said.append(type(error).__name__)
        with suppress(OffloadError):
            training.optimizer.close()
    return said[0], said[1]


def test_damage_on_one_rank_is_an_error_on_all(worlds: Worlds, tmp_path: Path) -> None:
    found = worlds(2).run(_not_restored, str(tmp_path / "run"))
    assert found == [("OtherRankError",) * 2, ("CorruptionError",) * 2]


# What lies there.


def _out_of_time(path: str) -> str:
    """The user's timeout comes on rank 0, in a commit of which the others have done nothing yet."""
    training = Training(path, tier="cpu")
    training.go_to(1)
    optimizer = training.optimizer
    optimizer.commit()
    training.go_to(2)
    if dist.get_rank() != 0:
        with patch.object(optimizer._commits, "commit"):
            optimizer.commit()
    else:
        out_of_time = patch.object(optimizer._commits, "commit", side_effect=TimeoutError("out of time"))
        with out_of_time, pytest.raises(TimeoutError):
            optimizer.commit()
        for call in (optimizer.commit, optimizer.rollback):
            with pytest.raises(InterruptedStepError, match="start again on all ranks"):
                call()
    return "said so"


def test_a_handlers_exception_in_a_commit_of_several_ranks_is_final_on_that_rank(
    worlds: Worlds, tmp_path: Path
) -> None:
    """The others may be anywhere else: what this one did next would never meet them."""
    assert worlds(2).run(_out_of_time, str(tmp_path / "run")) == ["said so"] * 2


def _differ(path: str, own: str) -> list[str]:
    said = []
    for options in (
        {"path": f"{path}-other", "commit_every": 5 + dist.get_rank()},
        {"path": own, "resume": "auto"},
        {"path": own},
    ):
        with pytest.raises(OffloadError) as caught:
            Training(**options)  # type: ignore[arg-type]
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def _commit(path: str, steps: int) -> dict[str, Tensor]:
    """Goes on from what is there, by so many steps."""
    training = Training(path, resume="auto")
    training.go_to(training.step + steps)
    training.optimizer.commit()
    with training.optimizer:
        return training.bits()


def _look(path: str) -> dict[str, Tensor]:
    training = Training(path, resume=True)
    with training.optimizer:
        return training.bits()


def test_what_three_ranks_committed_goes_on_at_two_and_then_at_one(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    for ranks, fewer in ((3, 2), (2, 1)):
        committed = worlds(ranks).run(_commit, path, 2)
        assert all(same(bits, committed[0]) for bits in committed + worlds(fewer).run(_look, path))
    with Reader([tmp_path / "run"]) as reader:
        assert (reader.commit.step, len(reader.manifests)) == (4, 1)
    assert kinds_in(tmp_path / "run") == {"COMMIT", "manifest", "swap", "tag"}


def _commit_alone(base: str) -> None:
    _commit(f"{base}/rank{dist.get_rank()}", 1)


def _undecided(base: str, resume: Any) -> None:
    """A commit that is cut off before rank 0 has decided."""
    paths = [f"{base}/rank{dist.get_rank()}-{number}" for number in range(2)]

    def never(*args: Any) -> None:
        raise TierIOError("write", errno.EIO, "COMMIT", 0, 0)

    training = Training(paths, resume=resume)
    assert training.optimizer.resumed is None
    training.go_to(1)
    with patch("offload.checkpoint.committer.write_commit", never), pytest.raises(OffloadError):
        training.optimizer.commit()
    training.optimizer.close()


def _decided(base: str) -> None:
    paths = [f"{base}/rank{dist.get_rank()}-{number}" for number in range(2)]
    training = Training(paths, resume="auto")
    assert training.optimizer.resumed is None
    training.go_to(1)
    training.optimizer.commit()
    training.optimizer.close()
    with pytest.raises((ResumeError, ConfigError)):
        Training(paths)
    again = Training(paths, resume="auto")
    assert again.optimizer.resumed == (1, None)
    again.optimizer.close()


def test_a_run_cut_off_before_its_first_commit_begins_anew(worlds: Worlds, tmp_path: Path) -> None:
    for resume in (False, "auto", "auto"):
        worlds(2).run(_undecided, str(tmp_path), resume)
    worlds(2).run(_decided, str(tmp_path))


def _own(base: str, resume: bool) -> dict[str, Tensor]:
    """A directory for each rank. Returns: the bits that are committed there."""
    training = Training(f"{base}/rank{dist.get_rank()}", stage=2, resume=resume)
    training.go_to(AT)
    training.optimizer.commit() if not resume else None
    with training.optimizer:
        return training.bits()


def _refused_at(base: str) -> str:
    with pytest.raises(OffloadError) as caught:
        Training(f"{base}/rank{dist.get_rank()}", stage=2, resume="auto")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_directories_that_ranks_have_swapped_are_known_and_one_that_is_missing_is_missed(
    worlds: Worlds, tmp_path: Path
) -> None:
    base, away = str(tmp_path), tmp_path / "away"
    expected = worlds(2).run(_own, base, False)
    for missing in (tmp_path / "rank0", tmp_path / "rank1"):
        missing.rename(away)
        missing.mkdir()  # a mount point without its disk
        before = contents(tmp_path)
        assert all(said.startswith("ResumeError") for said in worlds(2).run(_refused_at, base))
        assert contents(tmp_path) == before
        shutil.rmtree(missing)
        away.rename(missing)
    (tmp_path / "rank0").rename(away)
    (tmp_path / "rank1").rename(tmp_path / "rank0")
    away.rename(tmp_path / "rank1")
    for _ in range(2):
        assert all(same(found, expected[0]) for found in worlds(2).run(_own, base, True))


def test_ranks_that_do_not_fit_what_is_there_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds(3).run(_commit_alone, str(tmp_path))
    found = worlds(2).run(_differ_at, str(tmp_path))
    for differ, auto, fresh in found:
        assert "the ranks differ" in differ
        assert "commit_every" in differ
        assert "rank1 belongs to a run whose COMMIT record is not in" in auto
        assert "rank1 belongs to a run whose COMMIT record is not in" in fresh


def _differ_at(base: str) -> list[str]:
    own = f"{base}/rank1" if dist.get_rank() else f"{base}/new"
    return _differ(f"{base}/shared", own)


# Kills.


@contextmanager
def _patient(timeout_s: float) -> Iterator[None]:
    made = comm.connect

    def connect(*args: Any, **options: Any) -> Any:
        return made(*args, **{"timeout_s": timeout_s} | options)

    with patch.object(comm, "connect", connect):
        yield


def _lost_at_a_commit(path: str, moment: str, lost: int) -> tuple[str, str, float]:
    """One rank dies in the middle of a commit: the errors of the others, then and later, and the seconds it took."""
    with _patient(TIMEOUT_S):
        training = Training(path, stage=2)
    training.go_to(AT)
    training.optimizer.commit()
    training.go_to(AT + MORE)

    def die(*args: Any, **options: Any) -> Any:
        os._exit(1)

    began = time.monotonic()
    with suppress(OffloadError), patch(moment, die) if dist.get_rank() == lost else nullcontext():
        training.optimizer.commit()
    said = []
    calls: list[Callable[[], Any]] = [training.optimizer.commit, training.optimizer.rollback]
    for call in calls:
        with pytest.raises(RankError) as caught:
            call()
        said.append(str(caught.value))
    with suppress(RankError):
        training.optimizer.close()
    return said[0], said[1], time.monotonic() - began


def _resumed_at(path: str) -> int:
    training = Training(path, stage=2, resume=True)
    assert training.optimizer.resumed is not None
    step = training.optimizer.resumed.step
    bits = training.bits()
    training.optimizer.close()
    alone = Training(f"{path}-alone", stage=2)
    alone.go_to(step)
    assert same(bits, alone.bits())
    alone.optimizer.close()
    return step


@pytest.mark.parametrize(
    ("moment", "lost", "step"),
    [
        pytest.param("offload.checkpoint.committer.write_files", 2, AT, marks=pytest.mark.slow),
        ("offload.checkpoint.committer.write_commit", 0, AT),
        pytest.param("offload.storage.chunk_cache.Store.set_committed", 0, AT + MORE, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_at_a_commit_leaves_one_of_the_two(
    worlds: Worlds, tmp_path: Path, moment: str, lost: int, step: int
) -> None:
    path = str(tmp_path / "run")
    with patch(moment):  # raises where there is no such function; a rank that raises this is lost, too, but too early
        pass
    with World(4, group_timeout_s=TIMEOUT_S + 2) as world:
        world.start(_lost_at_a_commit, path, moment, lost)
        for first, again, waited_s in world.results(60, ranks=[rank for rank in range(4) if rank != lost]):
            assert "another rank is slow, stuck or dead" in first
            assert again == first
            assert waited_s < TIMEOUT_S + 2
    assert worlds(4).run(_resumed_at, path) == [step] * 4


def _train(path: str, steps: int, own_disks: bool = False) -> dict[str, Tensor]:
    """Commits every second step, by itself or by hand."""
    with on(path, range(dist.get_world_size())) if own_disks else nullcontext():
        return _train_at(RUN if own_disks else path, path, steps)


def _train_at(place: str, path: str, steps: int) -> dict[str, Tensor]:
    with _patient(20.0):
        training = Training(place, stage=2, commit_every=4, resume="auto", cpu_memory="least")
    while training.step < steps:
        training.go_to(training.step + 1)
        Path(f"{path}.step").write_text(f"{training.step:04}")
        if training.step % 4 == 2:
            training.optimizer.commit(training.step)
    with training.optimizer:
        return training.bits()


def kill_all(tmp_path: Path, kills: int, seed: int, *, own_disks: bool = False) -> None:
    """Kills all ranks at random instants, starts them again, and compares with a training that was left alone.

    Args: own_disks: each rank is on a machine of its own.
    """
    chance = random.Random(seed)
    steps, ranks = 24, 2
    with World(ranks) as world:
        expected = world.run(_train, str(tmp_path / "alone"), steps)[0]
    done, decided, least = 0, 0, 0
    path = tmp_path / "run"
    while done < kills:
        with World(ranks) as world:
            last = least + chance.randint(2, 9)
            world.start(_train, str(path), steps, own_disks)
            wait_for(Path(f"{path}.step"), min(last, steps - 1))
            time.sleep(chance.uniform(0, 0.05))
            for rank in chance.sample(range(ranks), ranks):
                world.signal(rank, signal.SIGKILL)
                time.sleep(chance.choice([0, 0, 0.002]))
        done += 1
        home = path / "machine0" / "run" if own_disks else path
        if (found := read_commit(home) if home.exists() else None) is not None:
            assert found.step >= least, "a durable commit is gone"
            least, decided = found.step, decided + 1
            if least >= steps - 2:  # little is left to be killed
                with World(ranks) as world:
                    assert all(same(bits, expected) for bits in world.run(_train, str(path), steps, own_disks))
                path, least = tmp_path / f"run{done}", 0
    with World(ranks) as world:
        assert all(same(bits, expected) for bits in world.run(_train, str(path), steps, own_disks))
    assert decided, "no kill came after a commit"
    print(f"{done} kills, {decided} after a commit")


def wait_for(progress: Path, step: int) -> None:
    end = time.monotonic() + 60
    while not (progress.exists() and int(progress.read_text() or 0) >= step):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_all_ranks_killed_at_any_instant_go_on_with_the_same_bits(tmp_path: Path) -> None:
    kill_all(tmp_path, 1, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_ranks_killed_fifty_times(tmp_path: Path) -> None:
    kill_all(tmp_path, 50, seed=2)


def _write_to_a_frozen_bias(path: str) -> Tensor:
    """It has fewer elements than one rank's part of it may have, so the other rank keeps none of it."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(10))
        model[1].bias.requires_grad_(False)
        return model

    options: dict[str, Any] = {"path": path, "stage": 3, "param_tier": "nvme", "commit_every": 0}
    model, again = made(), made()
    with OffloadZero(model, tuning=Tuning(threads=1), **options) as optimizer:
        with optimizer.gathered(model[1].bias), torch.no_grad():
            model[1].bias += 0.5
        optimizer.commit()
    resumed = OffloadZero(again, tuning=Tuning(threads=1), resume=True, **options)
    with resumed, resumed.gathered(again[1].bias):
        return again[1].bias.detach().clone()


def test_what_is_written_to_a_frozen_parameter_of_which_a_rank_keeps_nothing_is_committed(
    worlds: Worlds, tmp_path: Path
) -> None:
    for bias in worlds(2).run(_write_to_a_frozen_bias, str(tmp_path / "run")):
        assert torch.equal(bias, torch.full((10,), 0.5).bfloat16())
