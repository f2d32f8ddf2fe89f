"""The measuring of `offload bench io`: which settings are best here, and how they compare with others.

A drive's bandwidth drifts by up to 2 x over minutes. So the sweep visits every setting in each round, in another
order, and a reference and our engine run one right after the other, in turns first, each in a buffer of the same
size: their ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from offload.cli.bench_io_contestants import OPERATIONS, Contestant, LeftOutError, Ours
from offload.sizes import GIB

SEARCH_ROUNDS = 2
"""Of the search for a reference's own best settings."""

AS_GOOD = 0.97
"""Of the best speed: among settings within this, the one with the least CPU time is recommended."""

Tick = Callable[[str], None]


@dataclass
class Point:
    """One of our engines with one request size and depth; GB/s and CPU seconds of each round, by operation."""

    engine: str
    request_bytes: int
    depth: int
    speeds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    cpu_s_per_gib: list[float] = field(default_factory=list)

    def speed(self, operation: str) -> float:
        return statistics.median(self.speeds[operation])

    @property
    def score(self) -> float:
        """GB/s, the geometric mean over the operations."""
        return math.prod(self.speed(operation) for operation in OPERATIONS) ** (1 / len(OPERATIONS))

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s_per_gib)


@dataclass
class Family:
    """A reference with the settings among which its best are looked for."""

    name: str
    candidates: Sequence[Contestant]


@dataclass
class Duel:
    """A reference at its best settings for one operation, and our engine beside it; GB/s of each round."""

    contestant: Contestant
    theirs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Ours by theirs."""
        return statistics.median(mine / other for mine, other in zip(self.ours, self.theirs, strict=True))

    @property
    def speed(self) -> float:
        return statistics.median(self.theirs)

    @property
    def own_speed(self) -> float:
        return statistics.median(self.ours)


@dataclass
class Race:
    """What came out.

    ours: the recommended point, measured again at the full size; duels: by reference and operation; left_out: why
    a reference is missing.
    """

    ours: Point
    duels: dict[str, dict[str, Duel]]
    left_out: list[str]


def sweep(
    points: Sequence[Point], enter: Callable[[Point], Ours], rounds: int, nbytes: int, tick: Tick
) -> Iterator[str]:
    """Measures every point, and drops those that cannot run: yields why."""
    shuffle, alive = random.Random(0), list(points)
    for number in range(rounds):
        shuffle.shuffle(alive)
        for point in list(alive):
            try:
                _measure(point, enter(point), nbytes)
            except OSError as error:
                alive.remove(point)
                point.speeds = {operation: [] for operation in OPERATIONS}
                yield f"{point.engine} {point.request_bytes} x {point.depth}: {error}"
            tick(f"sweep {number + 1}/{rounds}: {point.engine}")


def _measure(point: Point, contestant: Ours, nbytes: int) -> None:
    for operation in OPERATIONS:
        point.speeds[operation].append(nbytes / contestant.run(operation, nbytes) / 1e9)
        point.cpu_s_per_gib.append(contestant.cpu_s / nbytes * GIB)


def recommended(points: Sequence[Point]) -> Point:
    """The fastest, or one as good that costs less CPU time; the fewest bytes under way if that is equal too."""
    best = max(point.score for point in points)
    good = [point for point in points if point.score >= AS_GOOD * best]
    return min(good, key=lambda point: (round(point.cpu, 3), point.request_bytes * point.depth))


def search_steps(families: Sequence[Family]) -> int:
    """How often `race` ticks before its rounds."""
    return SEARCH_ROUNDS * sum(len(family.candidates) for family in families)


def race(
    ours: Callable[[int | None], Ours],
    families: Sequence[Family],
    point: Point,
    rounds: int,
    nbytes: int,
    tick: Tick,
) -> Race:
    """Our engine at its recommended settings against every reference at its own.

    Args: ours: in a buffer of so many bytes at most, or (None) in the one that training would use.
    """
    duels, left_out = _search(families, nbytes // 2, tick)
    again = replace(point, speeds={operation: [] for operation in OPERATIONS}, cpu_s_per_gib=[])
    shuffle = random.Random(1)
    for number in range(rounds):
        _measure(again, ours(None), nbytes)
        tick(f"race {number + 1}/{rounds}: {point.engine}")
        names = list(duels)
        shuffle.shuffle(names)
        for name in names:
            try:
                for duel_at, duel in duels[name].items():
                    _fight(duel, duel_at, ours(duel.contestant.buffer_bytes), nbytes, theirs_first=bool(number % 2))
            except LeftOutError as error:
                left_out.append(f"{name}: {error}")
                del duels[name]
            tick(f"race {number + 1}/{rounds}: {name}")
    return Race(again, duels, left_out)


def _search(families: Sequence[Family], nbytes: int, tick: Tick) -> tuple[dict[str, dict[str, Duel]], list[str]]:
    """For every reference and operation the settings with the best median, found in rounds of their own."""
    found: dict[str, dict[str, Duel]] = {}
    left_out = []
    for family in families:
        times: dict[tuple[int, str], list[float]] = {}
        try:
            for _ in range(SEARCH_ROUNDS):
                for index, contestant in enumerate(family.candidates):
                    for operation in OPERATIONS:
                        times.setdefault((index, operation), []).append(contestant.run(operation, nbytes))
                    tick(f"best settings of {family.name}")
        except LeftOutError as error:
            left_out.append(f"{family.name}: {error}")
            continue
        found[family.name] = {}
        for operation in OPERATIONS:
            medians = [statistics.median(times[index, operation]) for index in range(len(family.candidates))]
            found[family.name][operation] = Duel(family.candidates[medians.index(min(medians))])
    return found, left_out


def _fight(duel: Duel, operation: str, ours: Ours, nbytes: int, theirs_first: bool) -> None:
    order: list[Contestant] = [duel.contestant, ours] if theirs_first else [ours, duel.contestant]
    for contestant in order:
        speed = nbytes / contestant.run(operation, nbytes) / 1e9
        (duel.ours if contestant is ours else duel.theirs).append(speed)
