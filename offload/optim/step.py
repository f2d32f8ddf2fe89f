"""The step: a rule over every chunk, and the new parameters back into the model.

[Note: a step does not block]
`Step.begin` fixes everything the step depends on (gradients, hyper-parameters, scale) and queues one piece of work for
each chunk: lease its states ▶ its rule, one segment at a time ▶ release dirty. New parameters are written to the
model by `Step.start_apply` and `Step.apply` only, and `apply` ends one flat parameter at a time: a reader in between
sees a parameter's whole old value or its whole new one.

- Where the states are in RAM and the model on a device, one worker runs the queue in order. A new parameter that does
  not stream is kept in the memory of the gradient it was made from, which nobody needs any more, until `start_apply`
  copies it to the device: after the event of the step, not after what was queued since. The next gradient is copied
  there by a device that has waited for that copy. Where the device steps matrices, the chunks of a flat parameter that
  are in RAM are one piece of work, so that the device need not wait at the end of each.
- Chunks whose states are on the device while those of others are not (`Run.device_flats`) are stepped by its own
  kernels, meanwhile. `start_apply` launches them, behind what the device does. They read gradients and write parameters
  where these are, so nothing is copied.
- Elsewhere `start_apply` itself runs the kernels, on all threads, and they write into the model: a memory-bound thread
  beside the matrix products of a forward costs more than it hides. Only I/O overlaps with compute. Chunks that are in
  RAM are given to the threads together, those of several units too: small ones cost no more than a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from offload.choices import StateChoice
from offload.grads.base import GradientBuffer
from offload.interrupts import wait_for_all
from offload.io.threads import Workers
from offload.layout import Chunk, Segment, part_of, segments
from offload.native import CAST, Task
from offload.optim.chunk_work import ChunkWork, StepKey
from offload.optim.late import LateSteps
from offload.optim.new_params import NewParameters
from offload.optim.on_device import MatrixMemory
from offload.optim.rule import Rule, SegmentMemory, Span, spans_of
from offload.optim.trials import Trials
from offload.profiling import ADAM
from offload.run import Run
from offload.sizes import MIB
from offload.storage.chunk_cache import Lease, Store, Use

MOST_TOGETHER = 64 * MIB // 4
"""Elements of chunks whose kernels run together: those of a chunk of the default size. A signal waits for them."""
_Addresses = tuple[int, int, list[tuple[int, int, int]]]


class Step:
    """Runs rules over the chunks of a layout; see [Note: a step does not block].

    Args:
        run: the run.
        choice: what was decided for the states.
        rules: that of each param group.
        store: the store of the states.
        gradients: the gradient buffer.
        params: takes the new parameters.
        late: the steps that chunks owe.

    Attributes:
        trials: steps of chunks that are made in backward; None: none are.
    """

    def __init__(
        self,
        run: Run,
        choice: StateChoice,
        rules: Sequence[Rule],
        store: Store,
        gradients: GradientBuffer,
        params: NewParameters,
        late: LateSteps,
    ) -> None:
        self._layout = run.layout
        self._kernels_of = run.kernels_of
        self._device_flats = run.device_flats
        self._matrices = MatrixMemory.of(run.memory)
        self._timeline = run.timeline
        self._split_master = choice.split_master
        self._rules = rules
        self._store = store
        self._gradients = gradients
        self._params = params
        self._late = late
        self._pending: dict[int, list[ChunkWork]] = {}
        # Of resident chunks: addresses of gradients and new parameters, with the runs, and the kernel of each run.
        self._bound: dict[int, tuple[_Addresses, list[Callable[[Any], Task]]]] = {}
        self._spans: dict[tuple[int, int, int], list[Span]] = {}  # of each run of a chunk, from its first step on
        self._number = 0
        self._started: set[int] = set()
        self._health = run.health
        self._worker = None if params.direct else Workers(1, "offload-step")
        # Parameters and gradients need not be waited for, and no part of a master is in a parameter.
        self.trials: Trials | None = None
        self._trial_worker: Workers | None = None
        if choice.tries_steps:
            self._trial_worker = self._worker or Workers(1, "offload-trials")
            halves = params if choice.split_master else None
            self.trials = Trials(run, rules, store, gradients, halves, self._tasks, self._trial_worker)
        self._is_in_ram = params.is_in_place and gradients.is_in_memory and not self._split_master

    @property
    def pending(self) -> Collection[int]:
        """The flat parameters whose new values are not in the model yet, by number, in the order of the queue."""
        return self._pending.keys()

    def begin(
        self,
        step: int,
        keys: Mapping[int, StepKey],
        groups: Sequence[Mapping[str, Any]],
        scale: float,
        flats: Sequence[int],
    ) -> None:
        """Queues one step. All of the step before it has been applied.

        Args:
            step: its number, from 1.
            keys: for each parameter that has a gradient, by its number: what its rule needs.
            groups: the optimizer's param_groups.
            scale: the factor of all gradients.
            flats: the numbers of all flat parameters, in the order in which they will be needed.
        """
        self._number = step
        scalars = {
            key: self._rules[key.group].scalars(groups[key.group], key.before, scale * key.factor)
            for key in set(keys.values())
        }
        waiting, owed = self._late.begin(step, keys, groups, self._gradients)
        queue: dict[int, list[ChunkWork]] = {flat: [] for flat in flats}
        for chunk in self._layout.chunks:
            runs = segments(chunk, keys.get)
            if runs and chunk.index not in waiting:
                is_whole = all(piece.param in keys for piece in chunk.pieces)
                queue[chunk.flat].append(ChunkWork(step, chunk, is_whole, runs, scalars, owed.get(chunk.index, ())))
        # All ranks apply the same flats, also where a rank's own shard of one does not change.
        changed = {self._layout.locations[param][0] for param in keys if self._layout.specs[param].numel}
        self._pending = {flat: works for flat, works in queue.items() if flat in changed}
        works = [work for works in self._pending.values() for work in works]
        self._params.step_begins()
        if self.trials is not None:
            self.trials.keep(works)
            self.trials.pending = self._pending
        repeats = self.trials is None or not self.trials.is_on
        coming = (work.chunk.index for work in works if work.tried is None)
        self._store.expect(coming, repeats=repeats, once=self._layout.late_chunks)
        self._gradients.expect((work.chunk.index for work in works if work.tried is None), repeats=repeats)
        if self._worker is not None:
            before: Future[None] | None = None
            here = (work for work in works if work.chunk.flat not in self._device_flats)
            for _, group in groupby(here, self._goes_with):
                together = list(group)
                before = self._worker.submit(self._run_after, before, together)
                for work in together:
                    work.done = before

    def together(self, flats: Iterable[int]) -> Iterator[list[int]]:
        """Parts pending flat parameters into groups for `start_apply`.

        A group has more than one only where the kernels write into the model, the gradients are in RAM, and masters are
        not split.

        Args:
            flats: numbers of flat parameters that are pending.
        """
        group: list[int] = []
        size = 0
        for flat in flats:
            numel = sum(work.chunk.numel for work in self._pending[flat])
            if group and not (self._is_in_ram and size + numel <= MOST_TOGETHER):
                yield group
                group, size = [], 0
            group.append(flat)
            size += numel
        if group:
            yield group

    def start_apply(self, flats: Collection[int]) -> None:
        """Makes the new values of flat parameters, or waits for the worker to make them, and sends them to other ranks.

        Args:
            flats: numbers of flat parameters that are pending: one group of `together`. Those that were started before
                are left out.
        """
        flats = [flat for flat in flats if flat not in self._started]
        if not flats:
            return
        works = [work for flat in flats for work in self._pending[flat]]
        self._params.begin()
        try:
            for batch in self._batches(work for work in works if work.done is None):
                self._run_together(batch) if len(batch) > 1 else self._run(batch[0])
        except BaseException as error:
            self._health.fail(error)  # here, where no second interrupt has come yet
            raise
        for work in works:
            if work.done is not None:
                self._wait_for(work.done, work.chunk)
            self._params.upload(work.chunk, work.runs)
        for flat in flats:
            self._params.start_gather(flat, self._number)
            self._started.add(flat)

    def send_rest(self) -> None:
        """Sends to other ranks what `start_apply` has kept back to send it with others."""
        self._params.send_rest()

    def apply(self, flat: int) -> None:
        """Writes the new values of a flat parameter, which is pending, into the model."""
        self.start_apply([flat])
        self._params.finish(flat)
        self._started.discard(flat)
        del self._pending[flat]
        if self.trials is not None and not self._pending:
            self.trials.announce()

    def abandon(self) -> None:
        """Drops the step under way, and waits for the parts of it that have started."""
        if self.trials is not None:
            self.trials.abandon()
        works = [work.done for queued in self._pending.values() for work in queued if work.done is not None]
        for done in works:
            done.cancel()
        wait_for_all(works)
        self._pending = {}
        if self.trials is not None:
            self.trials.pending = self._pending
        self._started.clear()
        self._params.abandon()

    def move(self) -> None:
        """Takes note that the model's parameters have other memory now. None of them is pending."""
        self._bound.clear()

    def close(self) -> None:
        """Ends the workers. What they have not begun is dropped."""
        if self.trials is not None:
            self.trials.close()
            self.trials = None  # which knows this object: they are no cycle
        for worker in (self._worker, self._trial_worker):
            if worker is not None:
                worker.shutdown(wait=True, cancel_futures=True)
        self._bound.clear()
        self._params.close()

    def _wait_for(self, done: Future[None], chunk: Chunk) -> None:
        if not done.done():
            with self._timeline.waiting("wait for Adam", chunk=chunk.index, tier="cpu"):
                wait_for_all([done])
        done.result()

    def _goes_with(self, work: ChunkWork) -> tuple[int, int | None]:
        """What chunks have in common that a worker steps together: see [Note: a step does not block]."""
        chunk = work.chunk
        goes = (
            self._matrices is not None
            and self._layout.flats[chunk.flat].is_whole
            and self._gradients.is_in_memory
            and self._store.is_resident(chunk.index)
            and self._params.lends_several(chunk)
        )
        return chunk.flat, None if goes else chunk.index

    def _run_after(self, before: Future[None] | None, works: Sequence[ChunkWork]) -> None:
        """Steps chunks in the worker, after those before them.

        Args:
            before: the future of the chunks before, which has ended; None: there are none. What it raised is raised
                here, too.
            works: the chunks to step.
        """
        if before is not None:
            before.result()
        self._run_together(works) if len(works) > 1 else self._run(works[0])

    def _run(self, work: ChunkWork) -> None:
        if work.tried is not None:
            with self._params.target(work.chunk, step=work.step, is_whole=work.is_whole) as target:
                for run in work.runs:
                    self._kernels_of(work.chunk.flat).call(
                        CAST, work.tried[run.start : run.stop], target[run.start : run.stop]
                    )
            self._gradients.drop_chunk(work.chunk.index)
            return
        # A split master is half in its lease and half in the parameter, which is read too.
        is_whole = work.is_whole and not self._split_master
        with (
            self._params.target(work.chunk, step=work.step, is_whole=is_whole) as target,
            self._store.lease(work.chunk.index, Use.UPDATE, step=work.step) as lease,
            self._gradients.shard(work.chunk.index) as grads,
        ):
            is_split = lease.master.dtype is torch.int16
            current = self._params.current(work.chunk, target) if is_split else None
            with (
                self._timeline.span("adam_s"),
                self._timeline.event(ADAM, "Adam", chunk=work.chunk.index),
                self._steps_of_matrices(),
            ):
                if work.owed:
                    self._late.run(work.chunk, work.owed, lease.arrays, target, is_split=is_split)
                self._kernels_of(work.chunk.flat).run(self._tasks(work, lease, grads, target, current))

    def _steps_of_matrices(self) -> AbstractContextManager[None]:
        return nullcontext() if self._matrices is None else self._matrices.steps()

    def _batches(self, works: Iterable[ChunkWork]) -> Iterator[list[ChunkWork]]:
        """Parts the queue into batches whose kernels run together.

        Chunks that are in RAM, with all that their kernels need, are in batches of several. A chunk that has to be
        waited for is a batch of its own.
        """
        batch: list[ChunkWork] = []
        size = 0
        for work in works:
            is_ready = self._is_in_ram and self._store.is_ready(work.chunk.index)
            if batch and (not is_ready or size + work.chunk.numel > MOST_TOGETHER):
                yield batch
                batch, size = [], 0
            if is_ready:
                batch.append(work)
                size += work.chunk.numel
            else:
                yield [work]
        if batch:
            yield batch

    def _run_together(self, works: Sequence[ChunkWork]) -> None:
        """Steps several chunks that are in RAM.

        A chunk is leased while the kernels of others run, so no thread waits between two chunks.
        """
        with (
            ExitStack() as leases,
            self._timeline.span("adam_s"),
            self._timeline.event(ADAM, "Adam", chunk=works[0].chunk.index),
            self._steps_of_matrices(),
        ):
            self._kernels_of(works[0].chunk.flat).run(self._drawn(works, leases))

    def _drawn(self, works: Sequence[ChunkWork], leases: ExitStack) -> Iterator[Task]:
        for work in works:
            lease = leases.enter_context(self._store.lease(work.chunk.index, Use.UPDATE, step=work.step))
            target = leases.enter_context(self._params.target(work.chunk, step=work.step, is_whole=work.is_whole))
            grads = self._gradients.chunk_memory(work.chunk.index)
            yield from self._tasks(work, lease, grads, target)

    def _tasks(
        self, work: ChunkWork, lease: Lease, grads: Tensor, target: Tensor, current: Tensor | None = None
    ) -> list[Task]:
        number = work.chunk.index
        if current is not None:
            binds = [self._bind(work.chunk, run, lease, grads, target, current) for run in work.runs]
            return [bind(work.scalars[run.key]) for run, bind in zip(work.runs, binds, strict=True)]
        places = [(run.key.group, run.start, run.stop) for run in work.runs]
        addresses = (grads.data_ptr(), target.data_ptr(), places)
        bound = self._bound.get(number)
        if bound is None or bound[0] != addresses:
            bound = addresses, [self._bind(work.chunk, run, lease, grads, target) for run in work.runs]
            if self._store.is_resident(number):
                self._bound[number] = bound
        return [bind(work.scalars[run.key]) for run, bind in zip(work.runs, bound[1], strict=True)]

    def _bind(
        self,
        chunk: Chunk,
        run: Segment[StepKey],
        lease: Lease,
        grads: Tensor,
        target: Tensor,
        current: Tensor | None = None,
    ) -> Callable[[Any], Task]:
        """What steps one run of a chunk's elements. It still needs the scalars."""
        arrays = list(lease.arrays)
        if (run.start, run.stop) != (0, grads.numel()):
            at = slice(run.start, run.stop)
            blocks = self._layout.flats[chunk.flat].blocks
            arrays = [part_of(array, block, run.start, run.stop) for array, block in zip(arrays, blocks, strict=True)]
            grads, target = grads[at], target[at]
            current = None if current is None else current[at]
        spans = self._spans.get((chunk.index, run.start, run.stop))
        if spans is None:
            spans = self._spans[chunk.index, run.start, run.stop] = spans_of(self._layout, chunk, run.start, run.stop)
        memory = SegmentMemory(arrays, grads, target, spans, current, self._matrices)
        return self._rules[run.key.group].bind(self._kernels_of(chunk.flat), memory)
