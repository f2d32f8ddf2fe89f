"""Counters, and the timeline: what ran when.

[Note: totals and events]
Totals are always counted, and feed `OffloadZero.stats()`: seconds for each kind of work, bytes for each direction, and
for how long each drive worked.
Events (each transfer, kernel, wait and hook) are kept only inside `Timeline.recorded(file)`, which writes them in
Chrome's trace format, for ui.perfetto.dev and chrome://tracing. Outside of it, nothing is made for an event, so callers
pass only what they have at hand; names are put together when the file is written. While a torch.profiler records,
events that one thread begins and ends are ranges of its trace, named "offload: ...".

A lane is a row of the picture. Transfers, which can overlap with others of their lane, are pairs of async events ("b",
"e"). All other events are complete ones ("X"); a lane in which two threads worked at once gets a second row.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from offload.errors import ConfigError, PathError, explained, missing_parent
from offload.interrupts import is_of_system
from offload.options import absolute
from offload.torch_private import profiler_enabled

MOST_EVENTS = 100_000
"""Events a recording keeps, about 30 MB of RAM; those after it are counted, and the file says how many."""

PHASES = "forward, backward, step"
UNITS = "units, forward"
GRADIENTS = "gradient hooks"
SUMS = "gradient kernels"
ADAM = "Adam"
WAITS = "waits"
TO_HOST = "device to host"
TO_DEVICE = "host to device"
COLLECTIVES = "collectives"
_LANES = (PHASES, UNITS, GRADIENTS, SUMS, ADAM, WAITS, TO_HOST, TO_DEVICE, COLLECTIVES)
"""From the top of the picture; drives follow."""

_SHOWN_AS = {"size": "bytes"}
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def drive_name(number: int) -> str:
    """What the drive of a swap file is called, and its part of a simulation."""
    return f"drive {number}"


def drive_lanes(number: int) -> tuple[str, str, str]:
    """The names of a swap file's lanes: of its reads, its writes and their checksums."""
    name = drive_name(number)
    return f"{name}: reads", f"{name}: writes", f"{name}: checksums"


class Labels(TypedDict, total=False):
    """What an event is about.

    Attributes:
        chunk: the chunk's index.
        unit: the unit's name.
        parameter: the parameter's name.
        size: in bytes.
        tier: where the chunk moves to or from, or what is waited for.
    """

    chunk: int | None
    unit: str | None
    parameter: str | None
    size: int | None
    tier: str | None


@dataclass(slots=True, eq=False)
class Event:
    """Something that began.

    Attributes:
        lane: its row of the picture.
        name: what it is.
        labels: what it is about.
        overlaps: whether others like it may run in its lane at the same time.
        failed: whether it ended with an exception.
        ended: when it ended, on the clock of `time.perf_counter_ns`; None: not yet. Any thread may set it.
        began: when it began, on the same clock.
    """

    lane: str
    name: str
    labels: Labels
    overlaps: bool
    failed: bool = False
    ended: int | None = None
    began: int = field(default_factory=time.perf_counter_ns)

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.failed = kind is not None
        self.ended = time.perf_counter_ns()


class Busy:
    """For how long something was under way: one thing or several at once. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._began = self._ended_s = 0.0

    def begins(self) -> None:
        """One more is under way."""
        with self._lock:
            if not self._under_way:
                self._began = time.perf_counter()
            self._under_way += 1

    def ends(self) -> None:
        """One that was under way is not any more."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._ended_s += time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """The seconds so far in which anything was under way."""
        with self._lock:
            return self._ended_s + (time.perf_counter() - self._began if self._under_way else 0.0)


class Timeline:
    """Totals by name, and events while they are asked for. Any thread may call it. See [Note: totals and events].

    Names of totals end in `_s` for seconds and `_bytes` for bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._busy: defaultdict[str, Busy] = defaultdict(Busy)
        self._recording: _Recording | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            with self._lock:
                self._totals[name] += elapsed

    def count(self, name: str, amount: int) -> None:
        """Adds `amount` (bytes, or occurrences) to `name`."""
        with self._lock:
            self._counts[name] += amount

    def seconds(self, name: str) -> float:
        with self._lock:
            return self._totals[name]

    def counted(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def busy(self, name: str) -> Busy:
        """Counts for how long something of this name is under way."""
        with self._lock:
            return self._busy[name]

    @property
    def busy_s(self) -> dict[str, float]:
        """For how many seconds each thing of which `busy` was asked for was under way, by name."""
        with self._lock:
            found = dict(self._busy)
        return {name: one.seconds for name, one in found.items()}

    def event(self, lane: str, name: str, **labels: Unpack[Labels]) -> AbstractContextManager[None]:
        """Records what runs inside, in a lane where one thing runs at a time.

        It is a range of a torch.profiler, too.
        """
        recording, profiler_range = self._recording, _profiler_range(name)
        if recording is None:
            return profiler_range or _NOTHING
        event = recording.begin(Event(lane, name, labels, overlaps=False)) or _NOTHING
        return event if profiler_range is None else _both(event, profiler_range)

    @contextmanager
    def waiting(
        self, what: str, *, tier: str, chunk: int | None = None, parameter: str | None = None
    ) -> Iterator[None]:
        """Counts the time inside as a wait for a tier, `wait_<tier>_s`, and records it in the lane of waits."""
        with self.span(f"wait_{tier}_s"), self.event(WAITS, what, chunk=chunk, parameter=parameter, tier=tier):
            yield

    def begin(self, lane: str, name: str, *, overlaps: bool = True, **labels: Unpack[Labels]) -> Event | None:
        """Records the beginning of something that ends elsewhere.

        Args:
            lane: its row of the picture.
            name: what it is.
            overlaps: whether others like it may run in its lane at the same time.
            **labels: what it is about.

        Returns:
            The event for `end`; None: nothing is recorded.
        """
        recording = self._recording
        if recording is None:
            return None
        return recording.begin(Event(lane, name, labels, overlaps=overlaps))

    @staticmethod
    def end(event: Event | None, *, failed: bool = False) -> None:
        if event is not None:
            event.failed = failed
            event.ended = time.perf_counter_ns()

    @contextmanager
    def recorded(self, file: str | os.PathLike[str], chunks: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
        """Records events, and writes them to `file` at the end, also when the body raises.

        Args:
            file: the path of the file.
            chunks: what to say of each chunk besides its number.

        Raises:
            PathError: before anything runs, or at the end if the file could not be written.
            ConfigError: if `file` is no path, or a recording is going on.
        """
        path = _checked(file)
        with self._lock:
            if self._recording is not None:
                raise ConfigError("a timeline is being recorded already: leave it before another begins")
            recording = self._recording = _Recording(chunks)
        try:
            yield
        except BaseException as error:
            try:
                self._finish(recording, path)
            except OSError as other:
                error.add_note(f"the timeline could not be written: {other}")
            raise
        self._finish(recording, path)

    def _finish(self, recording: _Recording, path: str) -> None:
        self._recording = None
        if os.getpid() != recording.pid:
            return  # a forked child that left the body, too: the file is its parent's
        recording.close()
        try:
            _write(path, recording.lines())
        except OSError as error:
            if not is_of_system(error):
                raise
            raise PathError(error.errno, f"the timeline cannot be written: {explained(error)}", path) from error


def _profiler_range(name: str) -> AbstractContextManager[None] | None:
    """A range in the trace of the user's torch.profiler; None if none records."""
    return torch.profiler.record_function(f"offload: {name}") if profiler_enabled() else None


@contextmanager
def _both(one: AbstractContextManager[None], other: AbstractContextManager[None]) -> Iterator[None]:
    with one, other:
        yield


class _Recording:
    """The events of one recording."""

    def __init__(self, chunks: Sequence[Mapping[str, Any]]) -> None:
        self.pid = os.getpid()
        self._chunks = chunks
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._left_out = 0
        self._began = time.perf_counter_ns()
        self._ended: int | None = None

    def begin(self, event: Event) -> Event | None:
        with self._lock:
            if self._ended is not None:
                return None
            if len(self._events) >= MOST_EVENTS:
                self._left_out += 1
                return None
            self._events.append(event)
            return event

    def close(self) -> None:
        with self._lock:
            self._ended = time.perf_counter_ns()

    def lines(self) -> Iterator[str]:
        """The text of the file, in parts."""
        about = {
            "events": len(self._events),
            "events_left_out": self._left_out,
            "most_events": MOST_EVENTS,
            "clock": "microseconds since the recording began",
        }
        yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
        between = ""
        for entry in self._entries():
            yield between + json.dumps(entry)
            between = ",\n"
        yield "\n]}\n"

    def _entries(self) -> Iterator[dict[str, Any]]:
        yield self._entry("process_name", "M", 0, 0) | {"args": {"name": "offload"}}
        lanes: dict[str, list[Event]] = defaultdict(list)
        for event in self._events:
            lanes[event.lane].append(event)
        known = [lane for lane in _LANES if lane in lanes]
        row, count = 0, 0
        for lane in known + sorted(lanes.keys() - set(known)):
            for number, events in enumerate(self._rows(lanes[lane])):
                row += 1
                title = lane if not number else f"{lane} ({number + 1})"
                yield self._entry("thread_name", "M", row, 0) | {"args": {"name": title}}
                yield self._entry("thread_sort_index", "M", row, 0) | {"args": {"sort_index": row}}
                for event in events:
                    count += 1
                    yield from self._told(event, row, count)
        if self._left_out:
            name = f"{self._left_out} events after the first {MOST_EVENTS} are left out"
            last = max((event.began for event in self._events), default=self._began)
            yield self._entry(name, "i", 1, last - self._began) | {"s": "g"}

    def _rows(self, events: list[Event]) -> list[list[Event]]:
        """The events of a lane in rows: one, or more where complete events overlap."""
        rows: list[list[Event]] = []
        ends: list[int] = []
        for event in sorted(events, key=lambda event: event.began):
            free = (n for n, end in enumerate(ends) if event.overlaps or end <= event.began)
            row = next(free, len(rows))
            if row == len(rows):
                rows.append([])
                ends.append(0)
            rows[row].append(event)
            ends[row] = self._end_of(event)[0]
        return rows

    def _end_of(self, event: Event) -> tuple[int, bool]:
        """When an event ended, and whether that is only the end of the recording."""
        last, ended = self._ended or 0, event.ended
        return (last, True) if ended is None or ended > last else (ended, False)

    def _told(self, event: Event, row: int, number: int) -> Iterator[dict[str, Any]]:
        ended, is_cut = self._end_of(event)
        args = {_SHOWN_AS.get(key, key): value for key, value in event.labels.items() if value is not None}
        chunk = event.labels.get("chunk")
        if chunk is not None and chunk < len(self._chunks):
            args = dict(self._chunks[chunk]) | args
        if is_cut:
            args["under_way_at_the_end"] = True
        if event.failed:
            args["failed"] = True
        if event.overlaps:
            # Viewers draw async events of one name in one lane: the chunk is in the args.
            shared = {"cat": event.name, "id": number}
            yield self._entry(event.lane, "b", row, event.began - self._began) | shared | {"args": args}
            yield self._entry(event.lane, "e", row, ended - self._began) | shared
            return
        what = event.labels.get("parameter") or event.labels.get("unit")
        detail = what or ("" if chunk is None else f"chunk {chunk}")
        name = f"{event.name} {detail}".rstrip()
        entry = self._entry(name, "X", row, event.began - self._began)
        yield entry | {"cat": event.name, "dur": (ended - event.began) / 1000, "args": args}

    def _entry(self, name: str, phase: str, row: int, at_ns: int) -> dict[str, Any]:
        return {"name": name, "ph": phase, "ts": at_ns / 1000, "pid": self.pid, "tid": row}


def _checked(file: str | os.PathLike[str]) -> str:
    """The absolute path of a file that can be written.

    Raises:
        PathError: if it cannot be written, or is no regular file.
        ConfigError: if `file` is no path.
    """
    if not isinstance(file, str | os.PathLike):
        raise ConfigError(f"timeline({file!r}): give the path of a file to write")
    path = str(absolute(file))
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise PathError(errno.EISDIR, "is no regular file: give the timeline a file of its own", path)
            if not os.access(path, os.W_OK):
                raise PathError(errno.EACCES, "is not writable", path)
        temporary = _temporary_path(path)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        os.unlink(temporary)
    except PathError:
        raise
    except (OSError, ValueError) as error:
        code, why = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.EINVAL, str(error))
        if code == errno.ENOENT:
            why = missing_parent(Path(path))
        raise PathError(code, f"the timeline cannot be written there: {why}", path) from error
    return path


def _temporary_path(path: str) -> str:
    return os.path.join(os.path.dirname(path), f".timeline-{os.getpid()}-{secrets.token_hex(4)}.partial")


def _write(path: str, lines: Iterator[str]) -> None:
    """Writes a temporary file, syncs it and renames it, so that `path` is never half a file."""
    temporary = _temporary_path(path)
    try:
        with open(temporary, "x", encoding="utf-8") as out:
            out.writelines(lines)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
