"""Nothing lost: kills, power cuts, full disks and damage, over whole trainings."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.checkpoint.manifest import committed_slots
from offload.checkpoint.reader import Reader
from offload.errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    InterruptedStepError,
    OffloadError,
    PathInUseError,
    ResumeError,
    TierIOError,
)
from offload.health import State
from offload.io.engine import IOFile, IOFuture
from offload.io.files import Files
from offload.planner import least_cpu_memory
from offload.storage.directories import COMMIT_NAME
from tests.faults.conftest import SMALL, Make, Tiny, assert_same, backward, bits, one_step
from tests.support.cases import often
from tests.support.damage import flip
from tests.support.disks import SwitchedFiles, on_disk
from tests.support.faulty_engine import FaultyEngine
from tests.support.lost import lose
from tests.support.processes import run_killed
from tests.support.run_files import contents, reserved_in, swap_in
from tests.support.simulated_disk import SimulatedDisk
from tests.support.simulated_files import PowerCut, SimulatedFiles


def committed(make: Make, steps: int = 3, **options: Any) -> tuple[Tiny, OffloadZero]:
    """A run that has committed its last step."""
    model = Tiny()
    optimizer = make(model, commit_every=0, **options)
    for step in range(steps):
        one_step(model, optimizer, step)
    optimizer.commit({"seen": steps})
    return model, optimizer


def some_steps(model: Tiny, optimizer: OffloadZero) -> None:
    for step in range(4):
        one_step(model, optimizer, step)
        optimizer.synchronize()


# Kills.


def kill(tmp_path: Path, kills: int, paths: int, seed: int, *, states: str = "fp32", each: str = "") -> None:
    """Args: states, each: as STATES and what follows it in tests/support/killed.py."""
    run_killed("killed", seed, kills, tmp_path, paths, states, *([each] if each else []))


@pytest.mark.parametrize("states", often(["fp32", "bf16", "8bit"], "fp32"))
def test_killed_at_any_instant_it_goes_on_with_the_same_bits(tmp_path: Path, states: str) -> None:
    kill(tmp_path, 2, 2, seed=2, states=states)


@pytest.mark.parametrize(("kills", "states"), [(3, "fp32"), (1, "8bit")])
def test_killed_between_a_backward_that_tries_steps_and_its_step_it_goes_on_with_the_same_bits(
    tmp_path: Path, kills: int, states: str
) -> None:
    """With 8-bit states masters are split, too."""
    kill(tmp_path, kills, 1, seed=5, states=states, each="trials")


@pytest.mark.parametrize("states", ["fp32", pytest.param("8bit", marks=pytest.mark.slow)])
def test_killed_among_steps_that_experts_owe_it_goes_on_with_the_same_bits(tmp_path: Path, states: str) -> None:
    kill(tmp_path, 2, 1, seed=6, states=states, each="experts")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_hundred_kills_of_runs_whose_experts_owe_steps(tmp_path: Path, states: str) -> None:
    kill(tmp_path, 100, 1, seed=300, states=states, each="experts")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("paths", "states"), [(1, "fp32"), (2, "fp32"), (2, "8bit"), (1, "split")])
def test_a_hundred_kills_of_runs_that_try_steps(tmp_path: Path, paths: int, states: str) -> None:
    kill(tmp_path, 100, paths, seed=200 + paths, states=states, each="trials")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("paths", "states"), [(1, "fp32"), (2, "fp32"), (1, "8bit"), (2, "8bit")])
def test_a_hundred_kills_on_each_number_of_paths(tmp_path: Path, paths: int, states: str) -> None:
    kill(tmp_path, 100, paths, seed=100 + paths, states=states)


def kill_loop(tmp_path: Path, kills: int, loader: str) -> None:
    """Args: loader: one of `tests.support.killed_loop.LOADERS`."""
    run_killed("killed_loop", 4, kills, tmp_path, loader)


def test_a_killed_loop_draws_schedules_and_drops_out_as_if_it_had_not_been(tmp_path: Path) -> None:
    kill_loop(tmp_path, 3, "own")


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_loop_that_is_killed_twenty_times(tmp_path: Path) -> None:
    kill_loop(tmp_path, 20, "own")


@pytest.mark.peers
@pytest.mark.timeout(480)
def test_a_loop_with_the_loader_of_torchdata_is_killed_twenty_times(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    kill_loop(tmp_path, 20, "torchdata")


# Power cuts.


class Clock:
    """Cuts the power at one of the moments it is told of."""

    def __init__(self, cut_at: int | None) -> None:
        self._left = cut_at

    def __call__(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise PowerCut


class CutDisk(SimulatedDisk):
    """Its power is cut before or after a sync, too."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def sync(self, file: IOFile) -> IOFuture:
        self._clock()
        future = super().sync(file)
        future.result()
        self._clock()
        return future


def along(step: int) -> dict[str, Any]:
    """What is committed with a step: now larger, now smaller, and not always tensors."""
    numel = 997 * step % 2500
    return {"text": f"{step}," * numel} | ({"values": torch.full((numel,), float(step))} if step % 4 else {})


class TinyExperts(nn.Module):
    """Of the experts one is used, by what the batch is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0].abs().item() * 64) % len(self.experts)
        out: Tensor = self.last(x + torch.tanh(F.linear(x, self.experts[number])))
        return out


class Cuts:
    """A training that loses power, and one that does not, to compare with. Args: build: makes the model."""

    def __init__(self, make: Make, path: Path, build: Callable[[], nn.Module] = Tiny) -> None:
        self._make = make
        self._path = path
        self._build = build
        self.expected: dict[int, dict[str, Tensor]] = {}
        model = build()
        optimizer = make(model, path=path.with_name("alone"))
        for step in range(60):
            self.expected[step] = bits(model, optimizer)
            one_step(model, optimizer, step)
        optimizer.close()
        self.files = SimulatedFiles()
        self.least = 0

    def until_cut(self, chance: random.Random) -> None:
        """Resumes, checks, trains until the power goes."""
        clock = Clock(chance.randrange(40))
        self.files.cut_at = chance.randrange(60) if chance.random() < 0.6 else None
        self.files.operations = 0
        disk = CutDisk(clock)
        model, made = self._build(), []
        try:
            with on_disk(self.files, disk):
                made.append(self._make(model, commit_every=0, **{"resume": "auto"} | self._options(chance)))
            self._go_on(model, made[0], clock, chance)
        except PowerCut:
            pass
        for optimizer in made:
            with suppress(OffloadError, PowerCut):
                lose(optimizer)
        seed = chance.randrange(1 << 30)
        disk.crash(seed)
        self.files = self.files.after_cut(seed)

    def _options(self, chance: random.Random) -> dict[str, Any]:
        """Of the next start."""
        return {}

    def _go_on(self, model: nn.Module, optimizer: OffloadZero, clock: Clock, chance: random.Random) -> None:
        step = 0
        if optimizer.resumed is not None:
            extra: Any
            step, extra = optimizer.resumed
            assert {name: list(value) for name, value in extra.items()} == {
                name: list(value) for name, value in along(step).items()
            }
        assert step >= self.least, "a durable commit is gone"
        assert_same(self.expected[step], bits(model, optimizer))
        for number in range(step, step + 12):
            backward(model, number % 60)
            clock()
            optimizer.step()
            clock()
            optimizer.zero_grad()
            if number + 1 < len(self.expected) and chance.random() < 0.5:
                optimizer.commit(along(number + 1))
                self.least = number + 1
            self._after_step(optimizer, chance)
            if number + 2 >= len(self.expected):
                return

    def _after_step(self, optimizer: OffloadZero, chance: random.Random) -> None:
        pass

    def begin_anew(self) -> None:
        shutil.rmtree(self._path)
        self.files, self.least = SimulatedFiles(), 0


def cut_power(training: Cuts, cuts: int, seed: int) -> None:
    chance = random.Random(seed)
    begun = 0
    for number in range(cuts):
        if training.least >= 50:
            training.begin_anew()
            begun += 1
        training.until_cut(random.Random(chance.random() + number))
    assert begun or training.least, "nothing was ever committed"


@pytest.mark.parametrize("states", often(["fp32", "8bit"], "fp32"))
def test_power_cuts_lose_nothing_that_was_committed(make: Make, path: Path, states: str) -> None:
    cut_power(Cuts(partial(make, states=states), path), 20, seed=1)


@pytest.mark.parametrize("split", [False, True])
def test_power_cuts_lose_nothing_that_was_committed_where_steps_are_tried(make: Make, path: Path, split: bool) -> None:
    tuning = Tuning(chunk="4KiB", threads=1, speculate=True, split_master=split)
    least = least_cpu_memory(Tiny(), tuning=tuning)
    cut_power(Cuts(partial(make, tuning=tuning, cpu_memory=least), path), 20, seed=3)


class ExpertCuts(Cuts):
    """Each start has other tiles, or makes the steps of experts in time."""

    def _options(self, chance: random.Random) -> dict[str, Any]:
        return {"tuning": tiles(chance.choice([1, 1, 1, 2]), late=chance.random() < 0.8)}

    def _go_on(self, model: nn.Module, optimizer: OffloadZero, clock: Clock, chance: random.Random) -> None:
        self._may_owe = self._may_owe or bool(optimizer._parts.masters.late.owed)
        super()._go_on(model, optimizer, clock, chance)

    _may_owe = False


def tiles(experts: int, *, late: bool) -> Tuning:
    return Tuning(chunk="4KiB", threads=1, tile=experts * 16 * 16 * 2, late=late)


def test_power_cuts_lose_nothing_that_was_committed_where_experts_owe_steps(make: Make, path: Path) -> None:
    given = {"param_tier": "nvme", "cpu_memory": "144KiB"}
    training = ExpertCuts(partial(make, tuning=tiles(1, late=False), **given), path, TinyExperts)
    cut_power(training, 20, seed=4)
    assert training._may_owe


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_power_cuts(make: Make, path: Path) -> None:
    cut_power(Cuts(make, path), 2000, seed=2)


# A disk that fails.


def test_full_disk_at_a_commit_keeps_the_last_one(make: Make) -> None:
    class Full(Files):
        def write(self, file: IOFile, data: memoryview) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = SwitchedFiles()
    with on_disk(files):
        model, optimizer = committed(make)
    expected = bits(model, optimizer)
    one_step(model, optimizer, 3)
    with files.switched(Full()), pytest.raises(TierIOError) as caught:
        optimizer.commit()
    assert caught.value.errno == errno.ENOSPC
    optimizer.rollback()
    assert_same(expected, bits(model, optimizer))
    one_step(model, optimizer, 3)
    optimizer.commit({"seen": 4})
    after = bits(model, optimizer)
    optimizer.close()
    again = Tiny()
    resumed = make(again, commit_every=0, resume=True)
    assert resumed.resumed == (4, {"seen": 4})
    assert_same(after, bits(again, resumed))


def test_a_failed_sync_is_final(make: Make, disk: FaultyEngine) -> None:
    model, optimizer = committed(make)
    one_step(model, optimizer)
    disk.fail("sync", errno.EIO)
    with pytest.raises(TierIOError):
        optimizer.commit()
    for call in (optimizer.commit, optimizer.rollback, optimizer.synchronize):
        with pytest.raises(TierIOError):
            call()


def test_rollback_recovers_from_a_failed_write(make: Make, disk: FaultyEngine) -> None:
    model, optimizer = committed(make)
    expected = bits(model, optimizer)
    disk.fail("write", errno.EIO, nth=2)
    with pytest.raises(TierIOError):
        some_steps(model, optimizer)
    optimizer.rollback()
    assert_same(expected, bits(model, optimizer))
    one_step(model, optimizer)
    optimizer.commit()


@pytest.mark.parametrize(
    "tiers",
    [{"param_tier": "nvme", "tuning": SMALL}, {"grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")}],
    ids=["parameters", "gradients"],
)
def test_rollback_recovers_from_a_failed_write_of_what_is_not_committed(
    make: Make, path: Path, disk: FaultyEngine, tiers: dict[str, Any]
) -> None:
    """Parameters and gradients in slots: a commit names neither, and their store has to be as new all the same."""
    model, optimizer = committed(make, cpu_memory=least_cpu_memory(Tiny(), **tiers), **tiers)
    optimizer.synchronize()
    expected = bits(model, optimizer)
    with Reader([path]) as reader:
        committed_chunks = len(reader.manifests[0].chunks)
    with disk.failing("write", errno.EIO, lambda chunk: chunk >= committed_chunks), pytest.raises(TierIOError):
        some_steps(model, optimizer)
    with pytest.raises(TierIOError):
        optimizer.synchronize()
    optimizer.rollback()
    assert_same(expected, bits(model, optimizer))
    one_step(model, optimizer)
    optimizer.commit()


def test_closing_raises_what_failed_behind_the_calls_and_commits_nothing(make: Make, disk: FaultyEngine) -> None:
    """No call has raised it so far, so that nobody would know why the last step is not committed."""
    model = Tiny()
    optimizer = make(model, commit_every=2)
    one_step(model, optimizer, 0)
    optimizer.synchronize()
    one_step(model, optimizer, 1)
    disk.fail("write", errno.ENOSPC, nth=4)  # of the last chunk
    for param in model.parameters():
        param.sum().item()  # applies the update
    health = optimizer._parts.run.health
    while health.state is not State.HURT:
        time.sleep(0.01)
    with pytest.raises(TierIOError) as caught:
        optimizer.close()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ClosedError):
        optimizer.step()
    with on_disk(engine=FaultyEngine()), make(Tiny(), commit_every=2, resume="auto") as again:
        assert again.resumed is None


def test_rollback_recovers_from_an_interrupted_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = committed(make)
    expected = bits(model, optimizer)
    run = optimizer._parts.step._tasks
    calls: list[int] = []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(optimizer._parts.step, "_tasks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        some_steps(model, optimizer)
    with pytest.raises(InterruptedStepError, match=r"call rollback\(\)"):
        optimizer.synchronize()
    optimizer.rollback()
    assert_same(expected, bits(model, optimizer))


@pytest.mark.parametrize("is_committed", [False, True], ids=["nothing committed", "committed"])
def test_what_no_disk_said_while_a_chunk_moved_is_raised_once_and_names_the_way_out(
    make: Make, disk: FaultyEngine, is_committed: bool
) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=0)
    if is_committed:
        one_step(model, optimizer)
        optimizer.commit()
    expected = bits(model, optimizer)
    too_deep = RecursionError("maximum recursion depth exceeded")
    # What a thread of the I/O meets is told by the next call.
    with disk.failing("read", too_deep), pytest.raises((RecursionError, InterruptedStepError)):
        some_steps(model, optimizer)
    way_out = r"call rollback\(\)" if is_committed else "nothing was committed.*new OffloadZero"
    for call in (optimizer.synchronize, optimizer.step, optimizer.commit):
        with pytest.raises(InterruptedStepError, match=way_out) as caught:
            call()
        assert isinstance(caught.value.__cause__, RecursionError | InterruptedStepError)
    if is_committed:
        optimizer.rollback()
        assert_same(expected, bits(model, optimizer))
        one_step(model, optimizer)
        optimizer.commit()


# What lies at the path.


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_corrupt_slot_is_found_at_resume(make: Make, path: Path, chunk: int) -> None:
    _, optimizer = committed(make)
    optimizer.close()
    with Reader([path]) as reader:
        slot = committed_slots(reader.manifests[0])[chunk]
    flip(swap_in(path), slot.offset + 4096 + 5)
    with pytest.raises(CorruptionError) as caught:
        make(Tiny(), commit_every=0, resume=True)
    assert (caught.value.chunk, caught.value.offset) == (chunk, slot.offset)


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("damage", ["cut short", "a flipped bit"])
def test_a_resume_that_is_refused_leaves_the_files_as_they_are(
    make: Make, path: Path, damage: str, is_snapshot: bool
) -> None:
    """A snapshot's file ends with its last slot, and gets a run's size only when a run goes on in it."""
    _, optimizer = committed(make)
    folder = optimizer.snapshot()[0] if is_snapshot else path
    optimizer.close()
    with Reader([folder]) as reader:
        last = max(committed_slots(reader.manifests[0]), key=lambda slot: slot.offset)
    if damage == "cut short":
        os.truncate(swap_in(folder), last.offset + 4096)
    else:
        flip(swap_in(folder), last.offset + 5000)
    before = contents(folder)
    with pytest.raises(CorruptionError) as caught:
        make(Tiny(), path=folder, commit_every=0, resume=True)
    assert (caught.value.chunk, caught.value.offset) == (last.chunk, last.offset)
    assert contents(folder) == before


def test_two_resumes_at_once_are_refused(make: Make) -> None:
    _, optimizer = committed(make)
    optimizer.close()
    first = make(Tiny(), commit_every=0, resume=True)
    with pytest.raises(PathInUseError):
        make(Tiny(), commit_every=0, resume=True)
    first.synchronize()


def test_a_commit_is_never_overwritten_without_being_asked(make: Make, path: Path) -> None:
    model, optimizer = committed(make)
    expected = bits(model, optimizer)
    optimizer.close()
    before = contents(path)
    for options in ({}, {"commit_every": 0}, {"commit_every": 5, "resume": False}):
        with pytest.raises(ResumeError, match=r"resume=True.*offload remove"):
            make(Tiny(), **options)
    assert contents(path) == before
    again = Tiny()
    assert_same(expected, bits(again, make(again, commit_every=0, resume="auto")))


def test_the_second_directory_of_a_commit_is_not_taken_either(make: Make, path: Path, tmp_path: Path) -> None:
    _, optimizer = committed(make, path=[path, tmp_path / "second"])
    optimizer.close()
    with pytest.raises(
        ResumeError, match=r"second belongs to a run whose COMMIT record is not in .*, but in .*run: give all"
    ):
        make(Tiny(), path=tmp_path / "second")
    with pytest.raises(ResumeError, match="whose COMMIT record is not in"):
        make(Tiny(), path=[tmp_path / "third", tmp_path / "second"], commit_every=0, resume="auto")


@pytest.mark.parametrize("resume", [False, "auto"])
def test_a_run_in_two_directories_that_was_cut_off_before_its_first_commit_is_in_nobodys_way(
    make: Make, tmp_path: Path, resume: bool | str
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]

    class CutOff(Files):
        def rename(self, old: Path, new: Path) -> None:
            if new.name == COMMIT_NAME:
                raise KeyboardInterrupt
            super().rename(old, new)

    model = Tiny()
    with on_disk(CutOff()):
        first = make(model, path=places, commit_every=0)
    one_step(model, first)
    with pytest.raises(KeyboardInterrupt):
        first.commit()
    assert all([*place.glob("manifest-*")] for place in places)
    with pytest.raises(PathInUseError):  # it may be about to commit
        make(Tiny(), path=places, commit_every=0, resume=resume)
    first.close()
    places[0].rename(tmp_path / "away")
    with pytest.raises(ResumeError, match=r"b belongs to a run whose COMMIT .*, but in .*a: give all"):
        make(Tiny(), path=places[1], commit_every=0)  # alone it cannot tell
    (tmp_path / "away").rename(places[0])
    model, optimizer = committed(make, path=places[::-1], resume=resume)
    assert_same(bits(model, optimizer), bits(*committed(make)))
    assert len([*tmp_path.glob("?/manifest-*")]) == 2


def test_without_a_commit_the_directory_is_used_again(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=0)
    one_step(model, optimizer)
    optimizer.close()
    assert not (path / COMMIT_NAME).exists()
    assert make(Tiny(), commit_every=0, resume="auto").resumed is None
    with pytest.raises(ResumeError, match="nothing has been committed"):
        make(Tiny(), path=path.with_name("other"), commit_every=0).rollback()
    with pytest.raises(ResumeError, match="no commit to resume from"):
        make(Tiny(), path=path.with_name("third"), commit_every=0, resume=True)


def wider(model: Tiny) -> None:
    model.last = torch.nn.Linear(32, 5)


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (wider, {}, r"last\.weight has the shape \(5, 32\), and \(4, 32\) was committed"),
        (lambda model: None, {"compute_dtype": torch.float32}, "compute_dtype is float32, and bfloat16 was committed"),
    ],
)
def test_another_model_is_refused_with_the_differences(
    make: Make, change: Callable[[Tiny], None], options: dict[str, Any], says: str
) -> None:
    committed(make)[1].close()
    model = Tiny()
    change(model)
    with pytest.raises(ResumeError, match=says):
        make(model, commit_every=0, resume=True, cpu_memory="1GiB", **options)


# The rule, and what is written.


def test_no_committed_slot_is_written_before_the_next_commit(make: Make, path: Path) -> None:
    model, optimizer = committed(make)
    for step in range(3, 9):
        with Reader([path]) as reader:
            slots = committed_slots(reader.manifests[0])
        before = swap_in(path).read_bytes()
        one_step(model, optimizer, step)
        if step % 2:
            optimizer.rollback()
            one_step(model, optimizer, step)
        optimizer.synchronize()
        after = swap_in(path).read_bytes()
        for slot in slots:
            part = slice(slot.offset, slot.offset + slot.size)
            assert before[part] == after[part]
        assert before != after
        optimizer.commit()


@pytest.mark.parametrize(("tier", "split_master"), [*product(["cpu", "nvme"], [False, True]), ("device", False)])
def test_what_only_ram_has_goes_to_the_disk_at_commits_only(
    make: Make, path: Path, tier: str, split_master: bool
) -> None:
    model = Tiny()
    tuning = Tuning(chunk="4KiB", threads=1, split_master=split_master)
    optimizer = make(model, tier=tier, cpu_memory="1GiB", commit_every=2, tuning=tuning)
    reserved, swap = reserved_in(path), swap_in(path).stat().st_size
    written = []
    for step in range(5):
        one_step(model, optimizer, step)
        optimizer.synchronize()
        written.append(optimizer.stats()["nvme_written_bytes"])
    slot_arrays = optimizer._placement.slots.all_arrays
    each = sum(slot.nbytes for slot in slot_arrays)
    assert len(slot_arrays) == len(optimizer._layout.chunks) * (2 if split_master else 1)
    # The second step is known to be committed; what is on the device, and parameters, are brought by the commit itself.
    behind = 0 if tier == "device" else sum(slot.nbytes for slot in slot_arrays[: len(optimizer._layout.chunks)])
    assert written == [0, behind, each, each + behind, 2 * each]
    assert optimizer.stats()["nvme_read_bytes"] == optimizer.stats()["nvme_init_bytes"] == 0
    assert optimizer.stats()["disk_bytes"] == reserved == optimizer._placement.disk_bytes
    assert swap == 4096 + 2 * each


def test_unchanged_chunks_keep_their_slot(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=0)
    one_step(model, optimizer)
    optimizer.commit()
    with Reader([path]) as reader:
        before = reader.manifests[0].chunks
    model.last(torch.randn(4, 32).to(torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.commit()
    with Reader([path]) as reader:
        after = reader.manifests[0].chunks
    kept = [one == other for one, other in zip(before, after, strict=True)]
    assert any(kept)
    assert not all(kept)


def test_commit_every_commits_where_the_next_step_begins(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=2)
    for step in range(3):
        assert not (path / COMMIT_NAME).exists()
        one_step(model, optimizer, step)
    with Reader([path]) as reader:
        assert reader.commit.step == 2
    one_step(model, optimizer, 3)
    optimizer.close()
    with Reader([path]) as reader:
        assert reader.commit.step == 4


def test_a_step_is_committed_once(make: Make) -> None:
    _, optimizer = committed(make)
    optimizer.commit()
    with pytest.raises(ConfigError, match="committed already"):
        optimizer.commit({"more": 1})


def test_commit_without_commit_every_says_what_to_give(make: Make) -> None:
    with pytest.raises(ConfigError, match="commit_every: 0"):
        make(Tiny(), commit_every=None).commit()
    with pytest.raises(ConfigError, match="needs a path"):
        make(Tiny(), tier="cpu", path=None, cpu_memory="1MiB").commit()
