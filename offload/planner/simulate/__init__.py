"""What a step takes, and what it waits for: a run in virtual time.

`simulate` runs some iterations of one rank; see [Note: what is simulated] in rank.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from offload.devices.copies import DOWN, UP
from offload.errors import BudgetError
from offload.layout import Layout
from offload.optim.late import MOST_OWED
from offload.planner.placement import Placement
from offload.planner.simulate.clock import Span
from offload.planner.simulate.lines import NOTHING
from offload.planner.simulate.rank import Rank
from offload.planner.simulate.several import OneOfSeveral, why_not_simulated
from offload.planner.simulate.speeds import Passes, Speeds
from offload.tiers import DEVICE

T = TypeVar("T")
STEADY_AFTER = 2
"""Iterations after which each one is like the one before."""
COMMITTED_BY = 3
"""Iterations that a commit delays: that of the step that it commits, the one in which it is made, and the next one."""
MOST_CHUNKS = 4096
"""Of a rank, that are simulated."""


@dataclass(frozen=True)
class NotPredicted:
    """Why no time can be predicted.

    Attributes:
        reason: in words.
    """

    reason: str


@dataclass(frozen=True)
class Iteration:
    """An iteration, from the end of one step to the end of the next, when each is like the one before.

    Where experts may owe steps, iterations differ: it is the mean of as many as use all of them.

    Attributes:
        seconds: that it takes.
        parts: these seconds, by what the device did or waited for.
        busy_s: for how long each resource worked, by its name.
        read_bytes: read from drives.
        written_bytes: written to drives.
        up_bytes: from RAM to the device.
        down_bytes: from the device to RAM.
        kept_bytes: of states whose steps were tried in backward, and kept.
        sent: to other ranks, by the names that `stats()` has for them: `<collective>_calls`, and `<collective>_bytes`.
        commit_s: seconds that a commit adds.
        commit_bytes: that a commit adds to what is written.
        spans: what the resources did, from the beginning of the iteration on.
        not_counted: what takes time, too, in words.
    """

    seconds: float
    parts: Mapping[str, float]
    busy_s: Mapping[str, float]
    read_bytes: int
    written_bytes: int
    up_bytes: int
    down_bytes: int
    kept_bytes: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)
    commit_s: float = 0.0
    commit_bytes: int = 0
    spans: Sequence[Span] = ()
    not_counted: Sequence[str] = ()

    @property
    def waits_for(self) -> str:
        """What most of its time is spent on, or waited for."""
        return max(self.parts, key=lambda name: self.parts[name], default=NOTHING)


def simulate(held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> Iteration | NotPredicted:
    """Predicts an iteration.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        passes: what a micro-batch computes.
        speeds: of the machine.
    """
    return _with_rank(held, placement, passes, speeds, partial(_simulate, placement))


def seconds_of(held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> float | NotPredicted:
    """Predicts the seconds of an iteration without a commit, and nothing else; see `simulate`."""
    return _with_rank(held, placement, passes, speeds, _seconds)


def _with_rank(
    held: Layout, placement: Placement, passes: Passes, speeds: Speeds, find: Callable[[Rank, int], T]
) -> T | NotPredicted:
    if (reason := _not_simulated(held, placement, passes, speeds)) is not None:
        return NotPredicted(reason)
    try:
        rank = (Rank if held.ranks == 1 else OneOfSeveral)(held, placement, passes, speeds)
        return find(rank, _turn(held, placement, passes))
    except BudgetError as error:  # of activations, whose bytes the plan does not know
        return NotPredicted(str(error))


def _turn(held: Layout, placement: Placement, passes: Passes) -> int:
    """After how many iterations all tiles that may owe steps were used, or have been stepped without that.

    So many iterations are like those before them, and each one is not where it is more than one.
    """
    layout, each = held.trained, placement.choice.grads.micro_batches
    found = 1
    for param, spec in enumerate(layout.specs):
        chosen = passes.tiles.get(spec.unit) if spec.is_late else None
        left = set(range(len(layout.tiles_of(param)))) if chosen else set()
        turn = 0
        while chosen and left and turn < MOST_OWED:
            left.difference_update(*(chosen[(turn * each + number) % len(chosen)] for number in range(each)))
            turn += 1
        found = max(found, turn)
    return found


def _seconds(rank: Rank, turn: int) -> float:
    before, *_, end = _turns(rank, turn)
    return (end.seconds - before.seconds) / turn


def _turns(rank: Rank, turn: int) -> list[_State]:
    """Simulates iterations until they are like those before, and a turn of them.

    Returns:
        The states before each of that turn, and the last one.
    """
    return [_state_after(rank) for _ in range(max(STEADY_AFTER, turn) + turn)][-turn - 1 :]


def _simulate(placement: Placement, rank: Rank, turn: int) -> Iteration:
    before, *others, end = _turns(rank, turn)
    seconds, spans = (end.seconds - before.seconds) / turn, rank.clock.spans[:]
    last = others[-1] if others else before
    rank.clock.run_out()
    idle = _state_of(rank)
    rested_s = [_state_after(rank) for _ in range(turn)][-1].seconds - idle.seconds
    rank.clock.run_out()
    moved = {name: nbytes - idle.moved[name] for name, nbytes in rank.moved.items()}
    sent = {name: (number - idle.sent[name]) // turn for name, number in rank.sent.items()}
    commit_s, commit_bytes = 0.0, 0
    if placement.choice.commits.every:
        turns = -(-COMMITTED_BY // turn)
        plain_s = rested_s + (turns - 1) * turn * seconds
        commit_s, commit_bytes = _commit_of(rank, turns * turn, plain_s, turns * moved["written"])
    read, written, up, down, kept = (round(moved[name] / turn) for name in ("read", "written", UP, DOWN, "kept"))
    parts = rank.device.line.parts(before.seconds, end.seconds)
    return Iteration(
        seconds,
        {name: part / turn for name, part in parts.items()},
        {name: (busy - before.busy_s[name]) / turn for name, busy in end.busy_s.items()},
        read,
        written,
        up,
        down,
        kept,
        sent,
        commit_s,
        commit_bytes,
        [
            span._replace(start_s=span.start_s - last.seconds, end_s=span.end_s - last.seconds)
            for span in spans
            if last.seconds < span.end_s <= end.seconds
        ],
        tuple(_not_counted(placement)),
    )


def _not_counted(placement: Placement) -> Iterator[str]:
    """What takes time in a run, and none in its simulation."""
    if not placement.is_direct and (placement.choice.states.tier == DEVICE or placement.device_flats):
        yield "steps of states on the device, which its memory bounds"
    if placement.choice.commits.every:
        yield "the sync of a commit, and what ranks ask one another for it"


@dataclass(frozen=True)
class _State:
    """How much there was up to the end of an iteration.

    Attributes:
        seconds: that have passed.
        busy_s: for how long each resource worked.
        moved: bytes.
        sent: to other ranks.
    """

    seconds: float
    busy_s: Mapping[str, float]
    moved: Mapping[str, int]
    sent: Counter[str]


def _state_of(rank: Rank) -> _State:
    return _State(rank.clock.now, rank.busy_s, rank.moved, rank.sent.copy())


def _state_after(rank: Rank, *, commits: bool = False) -> _State:
    """Simulates one more iteration."""
    rank.clock.run_until(rank.clock.start(rank.iterate(commits=commits)))
    return _state_of(rank)


def _commit_of(rank: Rank, iterations: int, plain_s: float, written_bytes: int) -> tuple[float, int]:
    """The seconds and written bytes that a commit adds.

    Args:
        rank: simulates it; nothing is under way.
        iterations: that are simulated.
        plain_s: seconds of so many without one, from such a time on.
        written_bytes: what they write.
    """
    start = _state_of(rank)
    rank.expect_commit()
    for number in range(iterations):
        end = _state_after(rank, commits=number == 1)
    rank.clock.run_out()
    added = rank.moved["written"] - start.moved["written"] - written_bytes
    return max(end.seconds - start.seconds - plain_s, 0.0), added


def _not_simulated(held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> str | None:
    """Why a run is not simulated; None: it is."""
    if held.ranks > 1 and speeds.network is None:
        return "the speed of the link between ranks is not known"
    if held.ranks > 1 and (reason := why_not_simulated(held, placement.choice)) is not None:
        return reason
    if not placement.is_direct and speeds.link is None:
        return "the speed of the link to the device is not known"
    if len(placement.choice.commits.paths) and not speeds.drives:
        return "the speed of the drives is not known"
    if len(held.param_chunks) > MOST_CHUNKS:
        return f"{len(held.param_chunks):,} chunks take minutes to simulate: a larger chunk makes fewer"
    if any(flat.is_whole for flat in held.trained.flats) and speeds.matrix_flops is None:
        return "how fast the optimizer steps matrices is not known"
    if held.trained.late_chunks and held.ranks > 1:
        return "experts that may owe steps over several ranks are not simulated yet"
    if placement.activation_bytes and not passes.waiting:
        return "what of a micro-batch waits in the activation tier is not known"
    return None
