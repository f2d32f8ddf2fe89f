"""Trials: the step of a chunk, made in backward as soon as its gradients are there.

[Note: trials]
The step of a chunk is a pure function of its old states, its gradients and the scalars of its rule. A trial evaluates
it early with the scalars that are expected. New states go to a place in the swap file that neither the last commit nor
the last step needs (storage/cached_chunk.py), new parameters to memory of their own, and nothing else changes. `step()`
compares the true inputs with the trial's, bit for bit. If they are equal, the trial is the result. If not, it is
forgotten, and the chunk is stepped as without trials. So no event between backward and `step()` has to be known here,
as long as it shows in an input:

| input               | by what it is compared                                         | noted                   |
|---------------------|----------------------------------------------------------------|-------------------------|
| old states          | the store: whoever else writes to the chunk ends its trial     | by the lease            |
| halves of masters   | numbers of the writes to the chunk's states and parameters     | before they are copied  |
| gradients           | a number for each parameter that changes with its gradient     | before the kernel reads |
| scalars             | the runs of elements, and the bytes that the kernel gets       | at the first gradient   |

A gradient is read only while its sums of squares are current: whoever changes it says so before, and they are current
again when it is whole. So the parameters of a chunk that is tried have been applied: a gradient that was made from an
older value raises. Where masters are split, these are their upper halves: they are copied to where the new ones go.
Gradients in slots are read while they are still in RAM, if there is room; the slot has them for a step that is made
anew. Upper halves are copied before the states are leased, and others write to both, one after the other: so the
numbers of these writes are compared, too. What is expected are the hyper-parameters at the first gradient of a step,
the last loss scale, and that nothing is clipped.

| between backward and step()                     | seen by                            | then                          |
|-------------------------------------------------|------------------------------------|-------------------------------|
| clipped                                         | scalars                            | stepped in the next forward   |
| NaN or Inf; skipped by a GradScaler             | no step is begun                   | dropped                       |
| loss scale changed                              | scalars                            | stepped in the next forward   |
| p.grad read, its norm taken                     | -                                  | kept                          |
| p.grad changed, assigned, zeroed                | number of the gradient             | its chunks are stepped later  |
| p.grad = None                                   | the gradient, which is not there   | its chunks are stepped later  |
| zero_grad(), another backward                   | `begin_anew`, number               | dropped                       |
| lr, betas, weight decay changed                 | scalars                            | those of the group, later     |
| p read, forward in eval mode                    | - (p has its old value)            | kept                          |
| p written; `apply()`                            | the store                          | its chunks are stepped later  |
| state_of, export, commit, snapshot              | -                                  | they see the last step; kept  |
| rollback, load_state_dict, close                | `abandon`                          | dropped                       |

One worker makes trials, beside backward: that of the steps, where there is one. It takes no lock of the run, and has
ended before anything that a trial may not run beside: a step, `apply()`, a commit, a rollback, closing.

Trials that are not kept cost bytes of the disk. So every LEFT_OUT-th chunk is not tried, which leaves the disk
something to do in forward; nothing is tried while the squares of the gradients so far exceed the last `max_norm`, as a
norm only grows; nor before a step has been seen whose trials would have been kept; nor while, of the last steps'
chunks, fewer than LEAST_KEPT would have been.

Where the disk cannot follow the backward, trials wait. No more of them wait than the unit with most of them has. So
what is not tried is of all units alike. If all waited, it would be of those that come last, which the forward needs
first: it would wait for them beside a busy disk, and its end would run beside an idle one.

Over several ranks each makes and judges the trials of its own chunks. What is expected is the same on all of them, but
nobody has to agree: with a trial or without one, a step has the same bits and the same collectives.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from offload.grads.base import GradientBuffer, nobody
from offload.interrupts import uninterrupted, wait_for_all
from offload.io.threads import Workers
from offload.layout import Chunk, Layout, Segment, segments
from offload.native import Task
from offload.optim.chunk_work import ChunkWork, StepKey
from offload.optim.new_params import NewParameters
from offload.optim.rule import Rule
from offload.profiling import ADAM
from offload.regions import Region
from offload.run import Expected, Owner, Run
from offload.storage.chunk_cache import Lease, Store, Use
from offload.storage.swap_format import has_halves
from offload.tiers import Tier

LEFT_OUT = 4
"""Of so many streamed chunks one is not tried: a forward is about a third of a backward."""
LEAST_KEPT = 0.3
"""The share of chunks that has to be kept, on average, for steps to be tried."""
WEIGHT = 1 / 8
"""Of the last step in that average."""
TRIED = "new parameters of trials"


def tried_chunks(layout: Layout, streamed: Iterable[int]) -> list[int]:
    """The chunks whose steps are tried, spread over the order. Those that may owe steps are none of them.

    Args:
        layout: of the trained parameters.
        streamed: the chunks of states that stream, in the order of a step.
    """
    possible = (chunk for chunk in streamed if chunk not in layout.late_chunks)
    return [chunk for number, chunk in enumerate(possible, 1) if number % LEFT_OUT]


def regions(layout: Layout, memory: Tier, streamed: Sequence[int]) -> list[Region]:
    """What `Trials` reserves: memory for the new parameters of each chunk that is tried.

    Args:
        layout: of the trained parameters.
        memory: the tier in which the states are stepped.
        streamed: see `tried_chunks`.
    """
    chunks = (layout.chunks[chunk] for chunk in tried_chunks(layout, streamed))
    return [Region(memory, TRIED, chunk.numel * layout.flats[chunk.flat].dtype.itemsize) for chunk in chunks]


Generations = tuple[int, ...]
"""Numbers of the gradients of a chunk's parameters, each of which changes with its gradient. Of a trial that has read
upper halves of masters, also how often its states and its parameters have been written to."""


class TriedChunks:
    """Which chunks' steps are tried, when, and in which order.

    Args:
        layout: of the trained parameters.
        streamed: see `tried_chunks`.

    Attributes:
        order: the chunks, in the order in which their gradients are complete.
        most_waiting: trials that are under way or wait, so many as one unit has. Where the disk is slower, what is not
            tried is then of all units alike.
    """

    def __init__(self, layout: Layout, streamed: Iterable[int]) -> None:
        chosen = tried_chunks(layout, streamed)
        self.order = chosen[::-1]
        of_units = Counter(layout.flats[layout.chunks[chunk].flat].unit for chunk in chosen)
        self.most_waiting = max(of_units.values(), default=0)
        self._layout = layout
        self._params_of = {c: [*dict.fromkeys(p.param for p in layout.chunks[c].pieces)] for c in chosen}
        self._came: dict[int, Generations] = {}  # in this step

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._params_of

    def params_of(self, chunk: int) -> Sequence[int]:
        """The numbers of a chunk's parameters."""
        return self._params_of[chunk]

    def generations(self, chunk: int, of: Callable[[int], int | None]) -> Generations | None:
        """The numbers of a chunk's gradients; None: one of them is not whole.

        Args:
            chunk: the chunk.
            of: tells that of a parameter's gradient, or None.
        """
        found = []
        for param in self._params_of[chunk]:
            if (generation := of(param)) is None:
                return None
            found.append(generation)
        return tuple(found)

    def complete(self, param: int, of: Callable[[int], int | None]) -> Iterator[int]:
        """The chunks to try now that the gradient of a parameter is whole: those of which all others are, too.

        Args:
            param: the parameter.
            of: see `generations`.
        """
        for chunk in self._layout.chunks_of[param]:
            if chunk not in self:
                continue
            generations = self.generations(chunk, of)
            if generations is not None and self._came.get(chunk) != generations:
                self._came[chunk] = generations
                yield chunk

    def step_begins(self) -> None:
        """The next step's gradients are expected in the order of this one's."""
        self.order = [*self._came, *(chunk for chunk in self.order if chunk not in self._came)]
        self._came = {}

    def forget(self) -> None:
        """The gradients so far are dropped."""
        self._came = {}


class _Trial(NamedTuple):
    """A trial that has been made.

    Attributes:
        generations: of its gradients and halves.
        runs: the elements that were stepped, and the scalars of each run as the kernel got them.
    """

    generations: Generations
    runs: Sequence[Segment[bytes]]


class _Round:
    """What is expected of a step while its gradients come.

    Args:
        expected: see `Owner.expected`.
        rules: that of each param group.
    """

    def __init__(self, expected: Expected, rules: Sequence[Rule]) -> None:
        self.expected = expected
        self._squares = 0.0
        self._squares_of: dict[int, float] = {}
        self._rules = rules
        self._scalars: dict[StepKey, Any] = {}

    @property
    def may_be_made(self) -> bool:
        """Whether the gradients that have come leave it open that the step is made as it is expected."""
        return self._squares <= self.expected.most_squares and math.isfinite(self._squares)

    def add(self, param: int, squares: float) -> None:
        """Counts the squares of a gradient, of which a tile has come, or all of it once more.

        Args:
            param: the parameter's number.
            squares: the sum of those that are there now.
        """
        self._squares += squares - self._squares_of.get(param, 0.0)
        self._squares_of[param] = squares

    def scalars(self, key: StepKey) -> Any:
        """What the rule takes, for parameters with this key."""
        if key not in self._scalars:
            group = self.expected.groups[key.group]
            self._scalars[key] = self._rules[key.group].scalars(group, key.before, self.expected.factor * key.factor)
        return self._scalars[key]


class Trials:
    """Makes trials, and says which of them a step is made of; see [Note: trials].

    Args:
        run: the run.
        rules: that of each param group.
        store: the store of the states.
        gradients: the gradient buffer.
        halves: has the parameters, which are the upper halves of split masters; None: masters are whole.
        tasks: what steps a chunk, given what to do, its states, its gradients, where its new parameters go, and, with a
            split master, the present ones.
        worker: makes the trials. Whoever has made it ends it.

    Attributes:
        owner: the optimizer, which is asked what it expects of a step.
        pending: the flat parameters whose last step is not made yet, by number.
    """

    owner: Owner
    pending: Collection[int] = ()

    def __init__(
        self,
        run: Run,
        rules: Sequence[Rule],
        store: Store,
        gradients: GradientBuffer,
        halves: NewParameters | None,
        tasks: Callable[[ChunkWork, Lease, Tensor, Tensor, Tensor | None], Sequence[Task]],
        worker: Workers,
    ) -> None:
        self._layout = layout = run.layout
        self._kernels = run.kernels
        self._timeline = run.timeline
        self._rules = rules
        self._store = store
        self._gradients = gradients
        self._halves = halves
        self._tasks = tasks
        streamed = [chunk.index for chunk in layout.chunks if not store.is_resident(chunk.index)]
        self._chunks = TriedChunks(layout, streamed)
        chosen = self._chunks.order[::-1]
        dtypes = [layout.flats[layout.chunks[chunk].flat].dtype for chunk in chosen]
        memory = zip(run.memory.take(TRIED), dtypes, strict=True)
        self._new = dict(zip(chosen, (one.view(dtype) for one, dtype in memory), strict=True))
        self._made: dict[int, _Trial] = {}
        self._round: _Round | None = None
        self._queue: deque[Future[None]] = deque()
        self._is_open = True
        self._kept_share: float | None = None  # it is not known before the first step
        self._worker = worker
        self._reserves_once = any(rule.temporary_bytes(1, 1) for rule in rules)
        self._lock = threading.Lock()  # gradients may come in a thread of their own
        gradients.watch(self._gradient_is_whole)

    @property
    def is_on(self) -> bool:
        """Whether steps are tried, and not only judged."""
        return self._kept_share is not None and self._kept_share >= LEAST_KEPT

    # In backward.

    def _gradient_is_whole(self, param: int) -> None:
        """Called when a gradient, or a tile of it, has come as often as is expected, and its squares are summed."""
        with self._lock:
            if self._is_open and self._new:
                self._submit(param)

    def _submit(self, param: int) -> None:
        """Submits trials of the chunks of a parameter whose gradients are all there."""
        if self._round is None:
            self._round = _Round(self.owner.expected(), self._rules)
        self._round.add(param, self._gradients.squares(param))
        if not self.is_on or not self._round.may_be_made:
            return
        if self.pending and self._reserves_once:
            return  # what rules take beside their arrays is there for one step at a time
        for chunk in self._chunks.complete(param, self._gradients.generation):
            while self._queue and self._queue[0].done():
                self._queue.popleft()
            if len(self._queue) < self._chunks.most_waiting:
                # In the queue first: an interrupt may come as soon as the worker has it, and `end` waits for it then.
                future: Future[None] = Future()
                self._queue.append(future)
                self._worker.put(future, self._try, self._layout.chunks[chunk], self._round)
            else:
                self._store.unexpect(chunk)

    def _generations(self, chunk: Chunk) -> Generations | None:
        generations = self._chunks.generations(chunk.index, self._gradients.generation)
        if generations is None or (halves := self._halves_of(chunk)) is None:
            return generations
        return *generations, self._store.writes(chunk.index), halves.writes(chunk)

    def _halves_of(self, chunk: Chunk) -> NewParameters | None:
        """What has the upper halves of a chunk's masters; None: these are whole."""
        return self._halves if has_halves(self._layout.flats[chunk.flat]) else None

    def _try(self, chunk: Chunk, round_: _Round) -> None:
        """Makes the trial of a chunk, in the worker."""
        index, step = chunk.index, round_.expected.step
        generations = self._generations(chunk)  # before anything is read
        if generations is None or not round_.may_be_made:
            return
        keys = {param: round_.expected.key_of(param) for param in self._chunks.params_of(index)}
        runs = segments(chunk, keys.get)
        scalars = {key: round_.scalars(key) for key in set(keys.values())}
        work = ChunkWork(step, chunk, True, runs, scalars)
        self._made.pop(index, None)  # its new parameters are about to be overwritten
        new, present = self._new[index], None
        if (halves := self._halves_of(chunk)) is not None:
            halves.copy_current(chunk, new)
            present = new
        with (
            self._store.lease(index, Use.TRY, step=step) as lease,
            self._gradients.lend(index) as grads,
            self._timeline.event(ADAM, "try", chunk=index),
        ):
            self._kernels.run(self._tasks(work, lease, grads, new, present))
        self._timeline.count("tried_bytes", self._store.nbytes(index))
        self._made[index] = _Trial(generations, self._as_bytes(work))

    # Before a step, and instead of one.

    def end(self) -> None:
        """Ends the worker's trials: those that have not begun are dropped, and no others are made before `begin_anew`.

        What one of them has met with the disk, the store says. Anything else is met again by the step.
        """
        with self._lock:
            self._is_open = False
        for future in self._queue:
            future.cancel()
        wait_for_all(self._queue)  # a call that is interrupted here has to wait again
        self._queue.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no trial is made. Those that have been made stay, and later gradients lead to others."""
        was_open = self._is_open
        try:
            self.end()
            yield
        finally:
            self._is_open = was_open  # not inside a step, which has ended them, too

    def keep(self, works: Iterable[ChunkWork]) -> None:
        """Gives works of a step that begins the results of trials with the same inputs. All trials have ended.

        Args:
            works: the step's.
        """
        self._gradients.read_soon(())
        works = [work for work in works if work.chunk.index in self._new]
        equal = {work.chunk.index for work in works if self._is_equal(work)}
        kept: set[int] = set()
        if works:
            kept = self._store.keep(equal, works[0].step) if equal else kept
            would = [
                work.chunk.index in kept if work.chunk.index in self._made else self._is_as_expected(work)
                for work in works
            ]
            self._judge(sum(would) / len(would))
        for work in works:
            if work.chunk.index in kept:
                work.tried = self._new[work.chunk.index]
                self._timeline.count("kept_bytes", self._store.nbytes(work.chunk.index))
        self._chunks.step_begins()
        self._made.clear()
        self._round = None

    def _is_equal(self, work: ChunkWork) -> bool:
        """Whether a chunk was tried with the inputs that its step has.

        That it is the same step, of the same states, is for the store to say.
        """
        trial = self._made.get(work.chunk.index)
        return (
            trial is not None
            and trial.generations == self._generations(work.chunk)
            and trial.runs == self._as_bytes(work)
        )

    def _is_as_expected(self, work: ChunkWork) -> bool:
        """Whether a chunk that was not tried has the scalars that were expected."""
        if self._round is None:
            return False
        keys = {run.key for run in work.runs}
        rules = self._rules
        return all(
            key.factor == 1.0 and rules[key.group].scalar_bytes(self._round.scalars(key)) == self._bytes_of(work, key)
            for key in keys
        )

    def _as_bytes(self, work: ChunkWork) -> list[Segment[bytes]]:
        """The runs of a work, with the scalars of each as the kernel gets them."""
        return [Segment(self._bytes_of(work, run.key), run.start, run.stop) for run in work.runs]

    def _bytes_of(self, work: ChunkWork, key: StepKey) -> bytes:
        return self._rules[key.group].scalar_bytes(work.scalars[key])

    def _judge(self, share: float) -> None:
        """Counts the share of a step's chunks that was kept, or would have been."""
        before = share if self._kept_share is None else self._kept_share
        self._kept_share = before + WEIGHT * (share - before)

    def announce(self) -> None:
        """Announces the trials to come: the last step has been applied."""
        if self.is_on and self._new:
            self._store.expect(self._chunks.order, repeats=False)
            self._gradients.read_soon(self._new.keys())

    @uninterrupted
    def begin_anew(self) -> None:
        """Forgets the trials that no step has kept: the gradients are dropped."""
        if self._round is not None:  # a backward without a step
            self._judge(0.0)
        self._forget()
        self._is_open = True

    def _forget(self) -> None:
        self._made.clear()
        self._chunks.forget()
        self._round = None

    def abandon(self) -> None:
        """Ends the worker's trials, failed or not, and forgets all."""
        self.end()
        self._forget()

    def close(self) -> None:
        """Ends the worker's trials, and lets go of the gradients."""
        self.end()
        self._gradients.watch(nobody)
