"""Virtual time: processes that wait for moments, and resources that take time.

A process is a generator that yields what it waits for. It goes on at the same virtual time, once that has happened.
Nothing here knows what is simulated.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import count
from math import inf
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

    __slots__ = ("_calls", "is_past")

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
        # Of two calls at the same time the one that was planned first comes first. Those that are planned for the
        # present are therefore behind those that were planned for it before it came.
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._present: deque[Callable[[], None]] = deque()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls `call` at a time; now, behind what is to happen now, if that has passed."""
        if when > self.now:
            heapq.heappush(self._coming, (when, next(self._number), call))
        else:
            self._present.append(call)

    def start(self, process: Process) -> Moment:
        """Starts a process now.

        Returns:
            When it has ended.
        """
        started = _Started(self, process)
        started.wake()
        return started.ended

    def run_until(self, moment: Moment) -> None:
        """Lets time pass until something has happened.

        Raises:
            RuntimeError: nothing is left that could make it happen.
        """
        while not moment.is_past:
            if not self._call_next():
                raise RuntimeError("a simulation waits for what never comes")

    def run_out(self) -> None:
        """Lets time pass until nothing is coming."""
        while self._call_next():
            pass

    def _call_next(self) -> bool:
        """Calls what comes next, and returns whether there was anything."""
        coming, present = self._coming, self._present
        if present and not (coming and coming[0][0] <= self.now):
            present.popleft()()
        elif coming:
            self.now, _, call = heapq.heappop(coming)
            call()
        else:
            return False
        return True


class _Started:
    """A process that has started.

    Args:
        clock: the virtual time.
        process: the process.

    Attributes:
        ended: when it has ended.
    """

    __slots__ = ("_clock", "_process", "ended")

    def __init__(self, clock: Clock, process: Process) -> None:
        self._clock, self._process, self.ended = clock, process, Moment()

    def wake(self) -> None:
        """What it waits for has happened: it goes on at this time, behind what is to happen now."""
        self._clock.at(self._clock.now, self._go_on)

    def _go_on(self) -> None:
        for moment in self._process:
            if not moment.is_past:
                moment.then(self.wake)
                return
        self.ended.happen()


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


class _Transfer:
    """A transfer that was submitted, and has not ended.

    Attributes:
        what: of its span.
        nbytes: see `Channel.submit`.
        start_s: when it began to move, or was submitted.
        done: when it has ended.
    """

    __slots__ = ("done", "nbytes", "start_s", "what")

    def __init__(self, what: str, nbytes: int, start_s: float) -> None:
        self.what, self.nbytes, self.start_s, self.done = what, nbytes, start_s, Moment()


class _Way:
    """One way of a channel.

    Args:
        name: of its spans.
        rate: bytes a second of this way alone.
        is_shared: see `Channel`.

    Attributes:
        name: see above.
        rate: see above.
        transfers: what was submitted and has not ended, in that order.
        left: the bytes of each of them that have not moved.
        speed: bytes a second of each that moves, since the last change.
        busy_s: see `Channel.way_busy_s`.
    """

    __slots__ = ("_is_shared", "busy_s", "left", "name", "rate", "speed", "transfers")

    def __init__(self, name: str, rate: float, *, is_shared: bool) -> None:
        self.name, self.rate, self._is_shared = name, rate, is_shared
        self.transfers: list[_Transfer] = []
        self.left: list[float] = []
        self.speed = self.busy_s = 0.0

    def expect(self, share: float) -> float:
        """Says how fast each transfer moves with this share of the rate, and returns when the first of them ends."""
        left = self.left
        if self._is_shared:
            self.speed = share * self.rate / len(left)
            return min(left) / self.speed
        self.speed = share * self.rate
        return left[0] / self.speed

    def move(self, passed: float) -> None:
        """Lets transfers move for so many seconds."""
        self.busy_s += passed
        left, nbytes = self.left, passed * self.speed
        # Rounded, it may be more than is left.
        if self._is_shared:
            self.left = [one - nbytes if one > nbytes else 0.0 for one in left]
        else:
            left[0] = left[0] - nbytes if left[0] > nbytes else 0.0

    def ending(self, most: float) -> list[int]:
        """The places of the transfers that end in so many seconds at most."""
        speed = self.speed
        moving = self.left if self._is_shared else self.left[:1]
        return [place for place, left in enumerate(moving) if left / speed <= most]

    def take(self, place: int, now: float) -> _Transfer:
        """Takes out a transfer that has ended."""
        del self.left[place]
        one = self.transfers.pop(place)
        if self.transfers and not self._is_shared:
            self.transfers[0].start_s = now
        return one


class Channel:
    """Moves bytes in two ways, which share it.

    Args:
        clock: the virtual time.
        name: what it is called.
        rates: bytes a second of each way alone.
        both: bytes a second of both at once, added; each has the same share of its own rate then.
        is_shared: whether all transfers of a way are under way at once, and share its rate, as on a drive; else they
            come one after the other, as on a stream of copies.
        delay_s: how long a transfer has been submitted before its first byte moves. Transfers wait side by side.

    Attributes:
        name: see above.
        moved: the bytes of each way.
        busy_s: for how many seconds anything was under way, up to the last change.
        way_busy_s: likewise, of each way.
    """

    def __init__(
        self, clock: Clock, name: str, rates: dict[str, float], both: float, *, is_shared: bool, delay_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self.name = name
        self._share = both / sum(rates.values())
        self._ways = {way: _Way(f"{name}: {way}", rate, is_shared=is_shared) for way, rate in rates.items()}
        self._at = 0.0
        self._plan = 0
        self.moved = dict.fromkeys(rates, 0)
        self.busy_s = 0.0

    @property
    def way_busy_s(self) -> dict[str, float]:
        return {name: way.busy_s for name, way in self._ways.items()}

    def submit(self, way: str, nbytes: int, what: str) -> Moment:
        """Moves bytes.

        Returns:
            When they have arrived.
        """
        one = _Transfer(what, nbytes, self._clock.now)
        self.moved[way] += nbytes
        if self._delay_s:
            self._clock.at(self._clock.now + self._delay_s, partial(self._begin, self._ways[way], one))
        else:
            self._begin(self._ways[way], one)
        return one.done

    def _begin(self, way: _Way, one: _Transfer) -> None:
        """From now on bytes of a transfer move, or wait for those before it."""
        self._advance()
        way.transfers.append(one)
        way.left.append(float(one.nbytes))
        self._expect()

    def _advance(self) -> None:
        """Moves what has moved since the last change."""
        now = self._clock.now
        passed, self._at = now - self._at, now
        if not passed:
            return
        is_busy = False
        for way in self._ways.values():
            if way.left:
                is_busy = True
                way.move(passed)
        if is_busy:
            self.busy_s += passed

    def _expect(self) -> None:
        """Says how fast each transfer is from now on, and plans the end of those that end first."""
        self._plan = plan = self._plan + 1
        busy = [way for way in self._ways.values() if way.left]
        if not busy:
            return
        share, soonest = self._share if len(busy) > 1 else 1.0, inf
        for way in busy:
            ends = way.expect(share)
            if ends < soonest:
                soonest = ends
        self._clock.at(self._clock.now + soonest, partial(self._end, plan, soonest))

    def _end(self, plan: int, soonest: float) -> None:
        """Ends the transfers that end in so many seconds from the last change on, if nothing has changed since."""
        if plan != self._plan:
            return
        most, now = soonest * (1 + 1e-12), self._clock.now
        ending = [(way, way.ending(most)) for way in self._ways.values() if way.left]
        self._advance()
        # Behind one that has ended, the others are a place further to the front.
        ended = [(way, way.take(place - before, now)) for way, places in ending for before, place in enumerate(places)]
        for way, one in ended:
            self._clock.spans.append(Span(way.name, one.what, one.start_s, now, one.nbytes))
        self._expect()
        for _, one in ended:
            one.done.happen()
