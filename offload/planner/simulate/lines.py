"""What each process of a simulation does at each time, and what it waits for."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque

from offload.planner.simulate.clock import Clock, Moment, Process

COMPUTE, KERNELS, DISK, LINK, NETWORK, MEMORY, COMMIT, PYTHON, NOTHING = (
    "compute", "optimizer's kernels", "disk", "link", "other ranks", "gradients in RAM", "commit", "Python", "nothing",
)  # fmt: skip
"""What a process does, or waits for."""


class Line:
    """What one process does over time: a word, or another line, if it waits for what that does.

    Args:
        clock: the virtual time.
        doing: what it does in the beginning.
    """

    def __init__(self, clock: Clock, doing: str | Line = NOTHING) -> None:
        self._clock = clock
        self._times: list[float] = [0.0]
        self._doing: list[str | Line] = [doing]

    @property
    def doing(self) -> str | Line:
        """What it does now."""
        return self._doing[-1]

    def begins(self, doing: str | Line) -> None:
        """It does something else from now on."""
        if doing is not self._doing[-1]:
            self._times.append(self._clock.now)
            self._doing.append(doing)

    def wait(self, moment: Moment, reason: str | Line) -> Process:
        """A process that waits for a moment."""
        if not moment.is_past:
            before = self.doing
            self.begins(reason)
            yield moment
            self.begins(before)

    def call(self, seconds: float) -> Process:
        """A process in which Python works for so long."""
        if seconds:
            done = Moment()
            self._clock.at(self._clock.now + seconds, done.happen)
            yield from self.wait(done, PYTHON)

    def parts(self, start: float, end: float) -> dict[str, float]:
        """How many seconds between two times it did what."""
        found: defaultdict[str, float] = defaultdict(float)
        self._add_parts(found, start, end, ())
        return dict(found)

    def _add_parts(self, found: defaultdict[str, float], start: float, end: float, within: tuple[Line, ...]) -> None:
        at = bisect_right(self._times, start) - 1
        while start < end:
            until = min(self._times[at + 1], end) if at + 1 < len(self._times) else end
            doing = self._doing[at]
            if until > start:
                if isinstance(doing, str):
                    found[doing] += until - start
                elif doing in within or doing is self:
                    found[NOTHING] += until - start
                else:
                    doing._add_parts(found, start, until, (*within, self))
                start = until
            at += 1


class Worker:
    """Runs processes one after the other, in the order in which they were submitted.

    Args:
        clock: the virtual time.
        line: says what it does.
        idle: what it waits for when it has nothing to do.
    """

    def __init__(self, clock: Clock, line: Line, idle: str | Line) -> None:
        self._clock = clock
        self.line = line
        self._idle = idle
        self._queue: deque[tuple[Process, Moment]] = deque()
        self._is_running = False
        self._last = Moment()  # the end of the process that began last
        self._last.happen()
        line.begins(idle)

    def submit(self, process: Process) -> Moment:
        """Runs a process after those before it.

        Returns:
            When it has ended.
        """
        done = Moment()
        self._queue.append((process, done))
        if not self._is_running:
            self._is_running = True
            self._clock.start(self._run())
        return done

    def cancel(self) -> Moment:
        """Drops the processes that have not begun.

        Returns:
            When the one that runs has ended.
        """
        self._queue.clear()
        return self._last

    def _run(self) -> Process:
        while self._queue:
            process, done = self._queue.popleft()
            self._last = done
            yield from process
            self.line.begins(self._idle)
            done.happen()
        self._is_running = False
