"""The recording of single events: what is in the file, what it never costs, and what refuses to be one."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload import profiling as timelines
from offload.errors import ClosedError, ConfigError, PathError
from offload.planner import least_cpu_memory
from offload.profiling import ADAM, GRADIENTS, PHASES, SUMS, TO_DEVICE, TO_HOST, WAITS, Timeline
from tests.support import late_copier
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.toy import take_step
from tests.support.training import Run, train

WIDTH = 96
STEPS = 2
NANOSECOND = 2e-3
"""In the file's microseconds: more than the rounding of a sum."""
SLOW_S = 2e-3


class Trace:
    """A timeline file."""

    def __init__(self, file: Path) -> None:
        self.whole: dict[str, Any] = json.loads(file.read_text())
        self.events: list[dict[str, Any]] = self.whole["traceEvents"]
        self.names = {e["tid"]: e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        self.ends = {e["id"]: e["ts"] for e in self.events if e["ph"] == "e"}

    def lane(self, name: str) -> list[dict[str, Any]]:
        """The events of a lane in the order they began, the later rows of it included, each with an `end`."""
        found = [e for e in self.events if e["ph"] in "Xb" and self.names[e["tid"]].split(" (")[0] == name]
        for event in found:
            event["end"] = event["ts"] + event["dur"] if event["ph"] == "X" else self.ends[event["id"]]
        return sorted(found, key=lambda event: event["ts"])

    def drives(self, what: str) -> list[dict[str, Any]]:
        lanes = {name for name in self.names.values() if name.startswith("drive") and name.endswith(what)}
        return [event for lane in sorted(lanes) for event in self.lane(lane)]


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


def open_optimizer(model: nn.Module, tmp_path: Path, drives: int = 1, **options: Any) -> OffloadZero:
    tuning = Tuning(chunk=4 * WIDTH * WIDTH, threads=1)
    options.setdefault(
        "cpu_memory", least_cpu_memory(model, accumulation=options.get("accumulation", 1), tuning=tuning)
    )
    paths = [tmp_path / f"drive{number}" for number in range(drives)]
    return OffloadZero(model, path=paths, tuning=tuning, **options)


def step(model: Callable[[torch.Tensor], torch.Tensor], optimizer: OffloadZero, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        model(torch.ones(2, WIDTH)).float().square().mean().backward()
    take_step(optimizer)
    optimizer.synchronize()


@pytest.fixture
def model() -> nn.Module:
    return build()


@pytest.fixture
def recorded(model: nn.Module, tmp_path: Path) -> tuple[Trace, dict[str, Any]]:
    """Two steps over two drives, drained before and after, and the counters' growth."""
    with open_optimizer(model, tmp_path, drives=2) as optimizer:
        step(model, optimizer)
        optimizer.synchronize()
        before = optimizer.stats()
        with optimizer.timeline(tmp_path / "t.json"):
            for _ in range(STEPS):
                step(model, optimizer)
            optimizer.synchronize()
        after = optimizer.stats()
    moved = {name: after[name] - before[name] for name in after if name.endswith(("_bytes", "_s"))}
    return Trace(tmp_path / "t.json"), after | moved


def test_every_event_has_what_the_format_asks_for(recorded: tuple[Trace, Any]) -> None:
    trace, _ = recorded
    assert trace.whole["otherData"]["events_left_out"] == 0
    for event in trace.events:
        assert event.keys() >= {"name", "ph", "ts", "pid", "tid"}
        assert event["pid"] == os.getpid()
        assert event["ph"] in "MXbe"
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    used = {event["tid"] for event in trace.events if event["ph"] != "M"}
    assert used == set(trace.names)
    assert len(set(trace.names.values())) == len(trace.names)


def test_transfers_begin_and_end_in_pairs(recorded: tuple[Trace, Any]) -> None:
    trace, _ = recorded
    pairs = defaultdict(list)
    for event in trace.events:
        if event["ph"] in "be":
            pairs[event["cat"], event["id"], event["tid"], event["name"]].append((event["ph"], event["ts"]))
    assert pairs
    for (begin, start), (end, stop) in pairs.values():
        assert (begin, end) == ("b", "e")
        assert 0 <= start <= stop


def test_complete_events_of_a_lane_do_not_overlap(recorded: tuple[Trace, Any]) -> None:
    trace, _ = recorded
    rows = defaultdict(list)
    for event in trace.events:
        if event["ph"] == "X":
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert rows
    for spans in rows.values():
        assert all(earlier[1] <= later[0] + NANOSECOND for earlier, later in pairwise(sorted(spans)))


def test_transfers_carry_the_bytes_that_stats_counts(recorded: tuple[Trace, dict[str, Any]]) -> None:
    trace, stats = recorded
    reads, writes = trace.drives("reads"), trace.drives("writes")
    assert len({event["tid"] for event in reads}) == len({event["tid"] for event in writes}) == 2
    assert sum(event["args"]["bytes"] for event in reads) == stats["nvme_read_bytes"] > 0
    assert sum(event["args"]["bytes"] for event in writes) == stats["nvme_written_bytes"] > 0
    assert len(trace.drives("checksums")) == len(reads) + len(writes)


def test_each_chunk_is_read_then_in_adam_then_written(recorded: tuple[Trace, dict[str, Any]]) -> None:
    trace, stats = recorded
    ways = defaultdict(list)
    for kind, events in (("r", trace.drives("reads")), ("a", trace.lane(ADAM)), ("w", trace.drives("writes"))):
        for event in events:
            ways[event["args"]["chunk"]].append((event["ts"], event["end"], kind))
    assert sorted(ways) == list(range(stats["chunks"]))
    for way in ways.values():
        way.sort()
        # What a step begins with is read at the end of the one before.
        kinds = [kind for *_, kind in way]
        assert kinds in (["r", "a", "w"] * STEPS, ["a", "w", "r"] * STEPS)
        assert all(earlier[1] <= later[0] + NANOSECOND for earlier, later in pairwise(way))


def test_phases_follow_each_other_and_the_gradients_come_in_backward(recorded: tuple[Trace, Any]) -> None:
    trace, _ = recorded
    phases = trace.lane(PHASES)
    assert [event["name"] for event in phases] == ["forward", "backward", "step"] * STEPS
    assert all(earlier["end"] <= later["ts"] + NANOSECOND for earlier, later in pairwise(phases))
    gradients = trace.lane(GRADIENTS)
    assert [event["args"]["parameter"] for event in gradients] == [f"{n}.weight" for n in range(5, -1, -1)] * STEPS
    backwards = phases[1::3]
    for number, event in enumerate(gradients):
        backward = backwards[number // 6]
        assert backward["ts"] <= event["ts"] + NANOSECOND
        assert event["end"] <= backward["end"] + NANOSECOND
        assert event["args"]["bytes"] == 2 * WIDTH * WIDTH
    units = [event["name"] for event in trace.lane(timelines.UNITS)]
    assert units == [f"unit {number}" for number in range(6)] * STEPS


def test_chunks_are_told_with_unit_and_parameters(recorded: tuple[Trace, Any]) -> None:
    trace, _ = recorded
    for event in (*trace.lane(ADAM), *trace.drives("reads"), *trace.drives("checksums")):
        chunk = event["args"]["chunk"]
        assert (event["args"]["unit"], event["args"]["parameters"]) == (str(chunk), [f"{chunk}.weight"])


def test_every_wait_says_for_which_chunk_and_tier(recorded: tuple[Trace, dict[str, Any]]) -> None:
    trace, stats = recorded
    waits = trace.lane(WAITS)
    assert waits
    for event in waits:
        assert event["args"].keys() >= {"chunk", "tier", "unit"}
        assert event["args"]["tier"] == "nvme"
        assert event["cat"] in ("wait for read", "wait for write", "wait for buffer")
    # The clock of the totals is around that of the events.
    assert sum(event["dur"] for event in waits) / 1e6 <= stats["wait_nvme_s"]
    assert sum(event["dur"] for event in waits) / 1e6 >= 0.1 * stats["wait_nvme_s"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_copies_between_host_and_device_have_lanes_of_their_own(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied_by: CopiedBy
) -> None:
    finish = late_copier._LateCopy.wait

    def slowly(copied: late_copier._LateCopy) -> None:
        time.sleep(SLOW_S)
        finish(copied)

    monkeypatch.setattr(late_copier._LateCopy, "wait", slowly)
    copied_by(lambda: LateCopier(3))
    model = build()
    with open_optimizer(model, tmp_path, accumulation=accumulation, cpu_memory="64MiB") as optimizer:
        with optimizer.timeline(tmp_path / "t.json"):
            step(model, optimizer, accumulation)
        stats = optimizer.stats()
    trace = Trace(tmp_path / "t.json")
    for lane, counter in ((TO_HOST, "device_to_host_bytes"), (TO_DEVICE, "host_to_device_bytes")):
        copies = trace.lane(lane)
        assert {event["ph"] for event in copies} == {"b"}
        assert all(event["end"] - event["ts"] >= 1e6 * SLOW_S for event in copies)
        assert sum(event["args"]["bytes"] for event in copies) == stats[counter] > 0
        assert not any("under_way_at_the_end" in event["args"] for event in copies)
    adam = {event["args"]["chunk"]: event["end"] for event in trace.lane(ADAM)}
    assert all(event["ts"] >= adam[event["args"]["chunk"]] - NANOSECOND for event in trace.lane(TO_DEVICE))
    landed = {event["args"]["parameter"]: event["end"] for event in trace.lane(TO_HOST)}
    sums = [event for event in trace.lane(SUMS) if event["cat"] == "sum of squares"]
    assert sums
    assert all(event["ts"] >= landed[event["args"]["parameter"]] - NANOSECOND for event in sums)
    for event in trace.lane(WAITS):
        assert event["args"].keys() >= {"chunk", "tier"}


def test_recording_changes_no_bit_and_no_counter(tmp_path: Path) -> None:
    def run(name: str, each_step: Callable[[OffloadZero], None] | None) -> Run:
        tuning = Tuning(chunk="16KiB", threads=1)
        return train("gpt", steps=6, path=tmp_path / name, cpu_memory="least", tuning=tuning, each_step=each_step)

    opened: list[Any] = []

    def record(optimizer: OffloadZero) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)
        opened.append(optimizer.timeline(tmp_path / "t.json"))
        opened[-1].__enter__()

    plain, watched = run("plain", None), run("watched", record)
    opened.pop().__exit__(None, None, None)
    plain.assert_same_bits(watched)
    # Half of what is free on the device differs from run to run.
    counted = [name for name in plain.stats if not name.endswith("_s") and name != "device_budget_bytes"]
    assert {name: plain.stats[name] for name in counted} == {name: watched.stats[name] for name in counted}
    assert Trace(tmp_path / "t.json").events


def test_without_a_recording_no_event_is_made(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("an event, with nobody to ask for it")

    def hooks() -> list[object]:
        return [hook for module in model.modules() for hook in module._forward_hooks.values()]

    with open_optimizer(model, tmp_path) as optimizer:
        before = hooks()
        with optimizer.timeline(tmp_path / "t.json"):
            assert hooks() != before
            step(model, optimizer)
            optimizer.synchronize()
        monkeypatch.setattr(timelines, "Event", never)
        step(model, optimizer)
        optimizer.synchronize()
        assert hooks() == before


def test_without_a_recording_nothing_is_allocated_that_stays() -> None:
    timeline = Timeline()

    def work() -> None:
        for chunk in range(1000):
            with timeline.event(ADAM, "Adam", chunk=chunk):
                timeline.end(timeline.begin(TO_HOST, "copy", chunk=chunk, size=1))

    def peak() -> int:
        tracemalloc.start()
        work()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    work()
    # Bytes, for 2000 events: frames that come and go. Other threads of this process may allocate meanwhile.
    assert min(peak() for _ in range(5)) < 1000


@pytest.mark.parametrize("place", ["missing/t.json", ".", "folder", "pipe", "link", "t" * 300, "a\0b"])
def test_bad_path_is_refused_before_anything_runs(place: str, model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("elsewhere")
    before = sorted(tmp_path.iterdir())
    with open_optimizer(model, tmp_path / "folder") as optimizer:
        with pytest.raises(PathError), optimizer.timeline(tmp_path / place):
            pytest.fail("the body ran")
        with optimizer.timeline(tmp_path / "folder" / "good.json"):
            pass
    assert sorted(tmp_path.iterdir()) == before


def test_folder_that_is_missing_is_named_with_how_to_make_it(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "too" / "t.json"
    with pytest.raises(PathError) as refused, Timeline().recorded(file):
        pytest.fail("the body ran")
    assert f"{tmp_path / 'missing'} does not exist" in str(refused.value)
    command = re.search(r"make it first \((.*)\)", str(refused.value))
    assert command is not None
    subprocess.run(shlex.split(command[1]), check=True)
    with Timeline().recorded(file):
        pass
    assert file.exists()


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *rest: object) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(PathError, match="Permission denied"), Timeline().recorded(tmp_path / "t.json"):
        pytest.fail("the body ran")


def test_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text("mine")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PathError, match="not writable"), Timeline().recorded(tmp_path / "t.json"):
        pytest.fail("the body ran")
    assert (tmp_path / "t.json").read_text() == "mine"


def test_something_that_is_no_path_is_refused(model: nn.Module, tmp_path: Path) -> None:
    with (
        open_optimizer(model, tmp_path) as optimizer,
        pytest.raises(ConfigError, match="path of a file"),
        optimizer.timeline(3),  # type: ignore[arg-type]
    ):
        pytest.fail("the body ran")


def test_recordings_do_not_nest_but_follow_each_other(model: nn.Module, tmp_path: Path) -> None:
    with open_optimizer(model, tmp_path) as optimizer:
        with optimizer.timeline(tmp_path / "outer.json"):
            with pytest.raises(ConfigError, match="recorded already"), optimizer.timeline(tmp_path / "inner.json"):
                pytest.fail("the body ran")
            step(model, optimizer)
        with optimizer.timeline(tmp_path / "next.json"):
            step(model, optimizer)
    assert not (tmp_path / "inner.json").exists()
    assert len(Trace(tmp_path / "outer.json").lane(ADAM)) == len(Trace(tmp_path / "next.json").lane(ADAM)) == 6


def test_file_is_written_when_the_body_raises(model: nn.Module, tmp_path: Path) -> None:
    with open_optimizer(model, tmp_path) as optimizer:
        with pytest.raises(KeyError), optimizer.timeline(tmp_path / "t.json"):
            raise KeyError(step(model, optimizer))
        step(model, optimizer)
    assert len(Trace(tmp_path / "t.json").lane(ADAM)) == 6


def test_failure_to_write_is_raised_but_never_hides_that_of_the_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PathError, match="No space left"), Timeline().recorded(tmp_path / "t.json"):
        pass
    with pytest.raises(KeyError) as raised, Timeline().recorded(tmp_path / "t.json"):
        raise KeyError("mine")
    assert "No space left" in raised.value.__notes__[0]
    assert not list(tmp_path.iterdir())


def test_old_file_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("old" * 100_000)
    with Timeline().recorded(tmp_path / "t.json"):
        assert (tmp_path / "t.json").read_text().startswith("old")
    assert Trace(tmp_path / "t.json").whole["otherData"]["events"] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_events_past_the_most_are_counted_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_EVENTS", 5)
    timeline = Timeline()
    with timeline.recorded(tmp_path / "t.json"):
        for chunk in range(8):
            with timeline.event(ADAM, "Adam", chunk=chunk):
                timeline.end(timeline.begin(TO_HOST, "copy", chunk=chunk))
    trace = Trace(tmp_path / "t.json")
    assert trace.whole["otherData"] | {"clock": 0} == {
        "events": 5, "events_left_out": 11, "most_events": 5, "clock": 0,
    }  # fmt: skip
    assert [event["args"]["chunk"] for event in trace.lane(ADAM)] == [0, 1, 2]
    (said,) = [event["name"] for event in trace.events if event["ph"] == "i"]
    assert said.startswith("11 events")


def test_what_is_under_way_at_exit_ends_there_and_says_so(tmp_path: Path) -> None:
    timeline = Timeline()
    before = timeline.begin(TO_HOST, "copy", chunk=0)
    with timeline.recorded(tmp_path / "t.json"):
        timeline.end(before)
        late = timeline.begin(TO_HOST, "copy", chunk=1)
        timeline.end(timeline.begin(TO_HOST, "copy", chunk=2))
        failed = timeline.begin(TO_HOST, "copy", chunk=3)
        timeline.end(failed, failed=True)
    timeline.end(late)
    timeline.end(timeline.begin(TO_HOST, "copy", chunk=4))
    cut, done, broken = Trace(tmp_path / "t.json").lane(TO_HOST)
    assert cut["args"] == {"chunk": 1, "under_way_at_the_end": True}
    assert cut["end"] >= broken["end"]
    assert done["args"] == {"chunk": 2}
    assert broken["args"] == {"chunk": 3, "failed": True}


def test_what_ends_between_exit_and_writing_ends_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, write = Timeline(), timelines._write

    def write_later(path: str, lines: Iterator[str]) -> None:
        time.sleep(10 * SLOW_S)
        timeline.end(late)
        write(path, lines)

    monkeypatch.setattr(timelines, "_write", write_later)
    with timeline.recorded(tmp_path / "t.json"):
        late = timeline.begin(TO_HOST, "copy", chunk=1)
    (cut,) = Trace(tmp_path / "t.json").lane(TO_HOST)
    assert cut["args"]["under_way_at_the_end"]
    assert cut["end"] - cut["ts"] < 1e6 * 10 * SLOW_S


def test_threads_record_at_once_and_get_rows_of_their_own(tmp_path: Path) -> None:
    timeline = Timeline()
    together = threading.Barrier(4)

    def work(number: int) -> None:
        for chunk in range(200):
            with timeline.event(WAITS, "wait", chunk=1000 * number + chunk):
                if not chunk:
                    together.wait()

    with timeline.recorded(tmp_path / "t.json"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = Trace(tmp_path / "t.json")
    assert len({event["args"]["chunk"] for event in trace.lane(WAITS)}) == 800
    assert set(trace.names.values()) == {"waits", "waits (2)", "waits (3)", "waits (4)"}
    test_complete_events_of_a_lane_do_not_overlap((trace, None))


def test_backward_that_raises_and_forward_without_gradients_are_told_apart(model: nn.Module, tmp_path: Path) -> None:
    def broken(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    with open_optimizer(model, tmp_path) as optimizer, optimizer.timeline(tmp_path / "t.json"):
        handle = next(model.parameters()).register_hook(broken)
        with pytest.raises(ZeroDivisionError):
            step(model, optimizer)
        handle.remove()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        with pytest.raises(RuntimeError):
            model(torch.ones(1, WIDTH + 1))
        step(model, optimizer)
    trace = Trace(tmp_path / "t.json")
    names = [event["name"] for event in trace.lane(PHASES)]
    assert names == ["forward", "backward", "inference", "forward", "forward", "backward", "step"]
    test_complete_events_of_a_lane_do_not_overlap((trace, None))


@pytest.mark.parametrize("of", ["blocks", "root"])
def test_recomputation_in_backward_is_part_of_it(of: str, tmp_path: Path) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.utils.checkpoint.checkpoint(self.blocks, x, use_reentrant=False)
            return found

    model = Recomputed() if of == "blocks" else build()
    called = model if of == "blocks" else partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)
    with open_optimizer(model, tmp_path) as optimizer, optimizer.timeline(tmp_path / "t.json"):
        step(called, optimizer)
    trace = Trace(tmp_path / "t.json")
    assert [event["name"] for event in trace.lane(PHASES)] == ["forward", "backward", "step"]
    assert len(trace.lane(timelines.UNITS)) == 12
    test_complete_events_of_a_lane_do_not_overlap((trace, None))


def test_model_can_be_copied_while_it_is_recorded(model: nn.Module, tmp_path: Path) -> None:
    with open_optimizer(model, tmp_path) as optimizer, optimizer.timeline(tmp_path / "t.json"):
        copy.deepcopy(model)(torch.ones(1, WIDTH))
    assert not Trace(tmp_path / "t.json").lane(PHASES)


def test_closed_optimizer_records_no_more_but_finishes_what_it_began(model: nn.Module, tmp_path: Path) -> None:
    optimizer = open_optimizer(model, tmp_path)
    with optimizer.timeline(tmp_path / "t.json"):
        step(model, optimizer)
        optimizer.close()
    assert Trace(tmp_path / "t.json").lane(ADAM)
    with pytest.raises(ClosedError), optimizer.timeline(tmp_path / "t.json"):
        pytest.fail("the body ran")


def test_forked_child_that_leaves_the_body_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Timeline().recorded(tmp_path / "t.json"):
        monkeypatch.setattr("os.getpid", lambda: 1)
    assert not list(tmp_path.iterdir())


def test_a_torch_profiler_shows_ranges_of_a_step(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with OffloadZero(model, path=tmp_path / "run", commit_every=0) as optimizer:
        with torch.profiler.profile(acc_events=True) as profiler, optimizer.timeline(tmp_path / "trace.json"):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.synchronize()
        optimizer.zero_grad()
    named = {event.name for event in profiler.events() if event.name.startswith("offload: ")}
    assert "offload: step" in named
    assert len(named) > 3


def test_what_is_under_way_at_once_is_busy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 to 4 and from 6 to 7, and from 9 on."""
    now, timeline = [0.0], Timeline()
    monkeypatch.setattr(timelines.time, "perf_counter", lambda: now[0])
    busy = timeline.busy("drive 0")
    for at, call in (
        (1, busy.begins), (2, busy.begins), (3, busy.ends), (4, busy.ends), (6, busy.begins), (7, busy.ends),
        (9, busy.begins),
    ):  # fmt: skip
        now[0] = at
        call()
    now[0] = 11
    assert timeline.busy_s == {"drive 0": 3 + 1 + 2}
    assert timeline.busy("drive 0") is busy
