"""Virtual time: processes that wait for moments, and resources that take time.

A process is a generator that yields what it waits for. It goes on at the same virtual time, once that has happened.
Nothing here knows what is simulated.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple


class Span(NamedTuple):
    """A time in which a resource did something.

    Attributes:
        resource: its name.
        what: what it did.
        start_s: when it began.
        end_s: when it ended.
        nbytes: how many bytes it moved.
    """

    resource: str
    what: str
    start_s: float
    end_s: float
    nbytes: int


class Moment:
    """Something that happens once. Processes wait for it, and what is called `then`."""

    def __init__(self) -> None:
        self.is_past = False
        self._calls: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Calls `call` when it happens, or now if it has."""
        if self.is_past:
            call()
        else:
            self._calls.append(call)

    def happen(self) -> None:
        """Lets it happen now."""
        self.is_past = True
        calls, self._calls = self._calls, []
        for call in calls:
            call()


Process = Generator[Moment, None, None]


class Clock:
    """The virtual time, and what is to happen in it.

    Attributes:
        now: the present, in seconds.
        spans: what resources did, in the order in which it ended.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()  # of two at the same time the one that was planned first comes first

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls `call` at a time."""
        heapq.heappush(self._coming, (max(when, self.now), next(self._number), call))

    def start(self, process: Process) -> Moment:
        """Starts a process now.

        Returns:
            When it has ended.
        """
        ended = Moment()
        self.at(self.now, lambda: self._go_on(process, ended))
        return ended

    def _go_on(self, process: Process, ended: Moment) -> None:
        for moment in process:
            if not moment.is_past:
                moment.then(lambda: self.at(self.now, lambda: self._go_on(process, ended)))
                return
        ended.happen()

    def run_until(self, moment: Moment) -> None:
        """Lets time pass until something has happened.

        Raises:
            RuntimeError: nothing is left that could make it happen.
        """
        while not moment.is_past:
            if not self._coming:
                raise RuntimeError("a simulation waits for what never comes")
            self.now, _, call = heapq.heappop(self._coming)
            call()

    def run_out(self) -> None:
        """Lets time pass until nothing is coming."""
        while self._coming:
            self.now, _, call = heapq.heappop(self._coming)
            call()


class Changes:
    """Something that changes now and then, which processes wait for."""

    def __init__(self) -> None:
        self._next = Moment()

    @property
    def next(self) -> Moment:
        """The next change."""
        return self._next

    def notify(self) -> None:
        """Something has changed."""
        last, self._next = self._next, Moment()
        last.happen()


def wait_for_all(moments: Iterable[Moment]) -> Process:
    """A process that ends when all of these have happened."""
    yield from moments


class Server:
    """A resource that does one thing after the other, in the order in which they were submitted.

    Args:
        clock: the virtual time.
        name: what it is called.

    Attributes:
        busy_s: for how many seconds it worked, or is going to.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._free_at = 0.0
        self.busy_s = 0.0

    def submit(self, seconds: float, what: str) -> Moment:
        """Does something for so many seconds.

        Returns:
            When it has ended.
        """
        done = Moment()
        start = max(self._clock.now, self._free_at)
        self._free_at = start + seconds
        self.busy_s += seconds

        def end() -> None:
            if seconds:
                self._clock.spans.append(Span(self._name, what, start, start + seconds, 0))
            done.happen()

        self._clock.at(self._free_at, end)
        return done


@dataclass(eq=False)
class _Transfer:
    way: str
    what: str
    nbytes: int
    left: float
    start_s: float
    done: Moment


class Channel:
    """Moves bytes in two ways, which share it.

    Args:
        clock: the virtual time.
        name: what it is called.
        rates: bytes a second of each way alone.
        both: bytes a second of both at once, added; each has the same share of its own rate then.
        is_shared: whether all transfers of a way are under way at once, and share its rate, as on a drive; else they
            come one after the other, as on a stream of copies.

    Attributes:
        name: see above.
        moved: the bytes of each way.
        busy_s: for how many seconds anything was under way, up to the last change.
        way_busy_s: likewise, of each way.
    """

    def __init__(self, clock: Clock, name: str, rates: dict[str, float], both: float, *, is_shared: bool) -> None:
        self._clock = clock
        self.name = name
        self._rates = rates
        self._share = both / sum(rates.values())
        self._is_shared = is_shared
        self._under_way: dict[str, deque[_Transfer]] = {way: deque() for way in rates}
        self._at = 0.0
        self._plan = 0
        self.moved = dict.fromkeys(rates, 0)
        self.busy_s = 0.0
        self.way_busy_s = dict.fromkeys(rates, 0.0)

    def submit(self, way: str, nbytes: int, what: str) -> Moment:
        """Moves bytes.

        Returns:
            When they have arrived.
        """
        self._advance()
        one = _Transfer(way, what, nbytes, float(nbytes), self._clock.now, Moment())
        self._under_way[way].append(one)
        self.moved[way] += nbytes
        self._expect()
        return one.done

    def _speeds(self) -> list[tuple[_Transfer, float]]:
        """Bytes a second of each transfer that moves now."""
        busy = [(queue, self._rates[way]) for way, queue in self._under_way.items() if queue]
        share = self._share if len(busy) > 1 else 1.0
        found = []
        for queue, rate in busy:
            if self._is_shared:
                speed = share * rate / len(queue)
                found += [(one, speed) for one in queue]
            else:
                found.append((queue[0], share * rate))
        return found

    def _advance(self) -> None:
        """Moves what has moved since the last change."""
        passed, self._at = self._clock.now - self._at, self._clock.now
        if not passed:
            return
        speeds = self._speeds()
        if speeds:
            self.busy_s += passed
            for way in {one.way for one, _ in speeds}:
                self.way_busy_s[way] += passed
        for one, speed in speeds:
            one.left = max(one.left - passed * speed, 0.0)  # rounded, it may be less than nothing

    def _expect(self) -> None:
        """Plans the end of the transfer that ends first."""
        self._plan = plan = self._plan + 1
        ends = [(one.left / speed, one) for one, speed in self._speeds()]
        if ends:
            soonest = min(end for end, _ in ends)
            ending = [one for end, one in ends if end <= soonest * (1 + 1e-12)]
            self._clock.at(self._clock.now + soonest, lambda: self._end(plan, ending))

    def _end(self, plan: int, ending: list[_Transfer]) -> None:
        if plan != self._plan:
            return  # something else began or ended meanwhile
        self._advance()
        for one in ending:
            self._under_way[one.way].remove(one)
            name = f"{self.name}: {one.way}"
            self._clock.spans.append(Span(name, one.what, one.start_s, self._clock.now, one.nbytes))
            for behind in () if self._is_shared else list(self._under_way[one.way])[:1]:
                behind.start_s = self._clock.now
        self._expect()
        for one in ending:
            one.done.happen()
