"""What a step takes, and what it waits for: a run in virtual time.

`simulate` runs some iterations of one rank; see [Note: what is simulated] in rank.py. `begin` runs the first of them,
after which its seconds are known; who has a faster candidate need not go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offload.devices.copies import DOWN, UP
from offload.errors import BudgetError
from offload.layout import Layout
from offload.optim.late import MOST_OWED
from offload.planner.placement import Placement
from offload.planner.simulate.clock import Span
from offload.planner.simulate.lines import NOTHING
from offload.planner.simulate.rank import Rank
from offload.planner.simulate.several import OneOfSeveral
from offload.planner.simulate.speeds import Passes, Speeds
from offload.tiers import DEVICE

STEADY_AFTER = 2
"""Iterations after which each one is like the one before."""
COMMITTED_BY = 3
"""Iterations that a commit delays: that of the step that it commits, the one in which it is made, and the next one."""
MOST_CHUNKS = 4096
"""Of a rank, that are simulated."""
MOST_USES = 1 << 15
"""Of parameters and chunks in an iteration: in each micro-batch each of them is used."""


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
    found = begin(held, placement, passes, speeds)
    return found if isinstance(found, NotPredicted) else found.predict()


def seconds_of(held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> float | NotPredicted:
    """Predicts the seconds of an iteration without a commit, and nothing else; see `simulate`."""
    found = begin(held, placement, passes, speeds)
    return found if isinstance(found, NotPredicted) else found.seconds


def begin(held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> Begun | NotPredicted:
    """Simulates until iterations are like those before; see `simulate`."""
    if (reason := _not_simulated(held, placement, passes, speeds)) is not None:
        return NotPredicted(reason)
    try:
        rank = (Rank if held.ranks == 1 else OneOfSeveral)(held, placement, passes, speeds)
        return Begun(held, placement, rank, _turn(held, placement, passes))
    except BudgetError as error:  # of activations, whose bytes the plan does not know
        return NotPredicted(str(error))


class Begun:
    """A simulation that has come to iterations like those before. What they move, and a commit, are not known yet.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        rank: is simulated.
        turn: how many iterations are like those before them.

    Attributes:
        seconds: of an iteration without a commit, a mean of a turn.
    """

    def __init__(self, held: Layout, placement: Placement, rank: Rank, turn: int) -> None:
        self._held, self._placement, self._rank, self._turn = held, placement, rank, turn
        states = [_state_after(rank) for _ in range(max(STEADY_AFTER, turn) + turn)]
        self._before, *self._others, self._end = states[-turn - 1 :]
        self.seconds = (self._end.seconds - self._before.seconds) / turn

    def predict(self) -> Iteration:
        """The whole prediction. It is called once."""
        last = self._others[-1] if self._others else self._before
        return _predict(self._held, self._placement, self._rank, self._turn, (self._before, last, self._end))


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


def _predict(
    held: Layout, placement: Placement, rank: Rank, turn: int, states: tuple[_State, _State, _State]
) -> Iteration:
    """What an iteration takes and moves.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        rank: was simulated to the end of a turn.
        turn: how many iterations it has.
        states: before that turn, before its last iteration, and after it.
    """
    before, last, end = states
    seconds, spans = (end.seconds - before.seconds) / turn, rank.clock.spans[:]
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
        tuple(_not_counted(held, placement)),
    )


def _not_counted(held: Layout, placement: Placement) -> Iterator[str]:
    """What takes time in a run, and none in its simulation."""
    if held.ranks > 1 and any(flat.is_whole for flat in held.trained.flats):
        yield "waits for the rank whose matrices take longest"
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
    if not placement.is_direct and speeds.link is None:
        return "the speed of the link to the device is not known"
    if len(placement.choice.commits.paths) and not speeds.drives:
        return "the speed of the drives is not known"
    if len(held.param_chunks) > MOST_CHUNKS:
        return f"{len(held.param_chunks):,} chunks take minutes to simulate: a larger chunk makes fewer"
    micro_batches = placement.choice.grads.micro_batches
    if micro_batches > 1 and micro_batches * (len(held.specs) + len(held.param_chunks)) > MOST_USES:
        return f"{micro_batches:,} micro-batches a step take minutes to simulate: give a smaller accumulation"
    if any(flat.is_whole for flat in held.trained.flats) and speeds.matrix_flops is None:
        return "how fast the optimizer steps matrices is not known"
    if held.trained.late_chunks and held.ranks > 1:
        return "experts that may owe steps over several ranks are not simulated yet"
    if placement.activation_bytes and not passes.waiting:
        return "what of a micro-batch waits in the activation tier is not known"
    return None
