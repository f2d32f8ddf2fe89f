"""Late steps: a tile of experts that did nothing in a step is not moved, and owes the step.

[Note: late steps]
A parameter of three dimensions has a gradient of zeros for each expert that got no token. Adam still decays such an
expert and moves it by its momentum, for which its states have to come from the disk and go back. That step needs
nothing but the states and the options of its param group. So a chunk whose gradient is zeros is left as it is, and owes
the step. Owed steps are made when somebody needs the result: the kernel of every other step runs with a gradient of
zeros, once for each of them, the first one first, while the chunk is in RAM. So the bits are those of steps that were
made in time, and the bytes are moved once.

| what is known              | where                      | in a commit                                               |
|----------------------------|----------------------------|-----------------------------------------------------------|
| which steps were made      | `log`, by parameter        | `late.logs` of the manifest                               |
| how many of them are owed  | `owed`, by chunk           | `late.owed`; its slot keeps the step that it was written  |
| what the states are        | the chunk's slot           | as of the steps that are not owed                         |
| the parameters for compute | the chunk's parameters     | as of those, too: they are its rounded masters            |

What a chunk owes are the last steps of its parameter. A step that is skipped, as its gradients have NaN or Inf, is in
no log, and one in which the parameter has no gradient at all is none of its steps, as in torch.

| who needs the result                     | where it is settled                                                    |
|------------------------------------------|------------------------------------------------------------------------|
| a forward; whoever reads a parameter     | model/transfer.py, before a chunk of parameters is leased              |
| states; what others wrote; other methods | model/master_weights.py, before a chunk of states is leased            |
| a step whose gradient is not zeros       | `Step`, in the lease of that step                                      |
| a resume in another layout, an export or | checkpoint/reader.py, in the copy that was read; the commit stays what |
| whatever else reads a commit             | it is                                                                  |

After `settle` the states stay in RAM, if there is a buffer for them, until the step that follows.

[Note: late steps over ranks]
A rank looks at the averages of its own shards, so it decides for its own chunks alone, and asks nobody. That is right
because each chunk has one owner, and zeros that were averaged are zeros whoever else has others. Ranks then owe
different steps, of parts of one tile, too. The owner makes them when it leases its part for a gather, so they are made
before anybody gets the values. What ranks have to know alike is which tiles they fetch: they agree on those that any
of them has tokens for (model/tiling.py), and what is fetched ahead does not go by what one of them owes
(model/transfer.py).

That holds where each use of a parameter is one of all its owners: at stage 3 without replicas. Where ranks have copies
(stages 1 and 2, and replicas) they use these alone, in orders of their own, and only the owner of the states could make
the steps. There all steps are made in time.

Why the factor of the gradients and the sign of a zero do not count: a product of zero is a zero, and Adam adds it to a
number, or squares it. x + 0 is x for both zeros, but for x = -0; then the kernel's sum is +0 for both. Each factor is
finite, or the step is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.grads.base import GradientBuffer
from offload.layout import Chunk, Layout, part_of
from offload.native import Kernels
from offload.optim.chunk_work import StepKey
from offload.optim.rule import Progress, Rule, SegmentMemory, Span
from offload.profiling import ADAM
from offload.regions import Region
from offload.run import Run
from offload.storage.chunk_cache import Store, Use
from offload.storage.param_store import ParamStore
from offload.tiers import Tier

ZEROS = "zeros for steps that are owed"
ZEROS_NUMEL = 1 << 18
"""The most elements that are stepped at once, so that a gradient of zeros takes 1 MiB."""
MOST_OWED = 64
"""A chunk owes at most so many steps. That bounds the log, and what a reader waits for."""
_SPREAD = 16
"""Chunks that never get a token come to their limits in so many different steps."""


def most_owed(chunk: int) -> int:
    """How many steps a chunk owes at most."""
    return MOST_OWED - chunk % _SPREAD


def regions(layout: Layout, memory: Tier) -> list[Region]:
    """What `LateSteps` reserves.

    Args:
        layout: of the trained parameters.
        memory: the tier in which the states are stepped.
    """
    largest = max((layout.chunks[chunk].numel for chunk in layout.late_chunks), default=0)
    return [Region(memory, ZEROS, torch.float32.itemsize * min(largest, ZEROS_NUMEL))] if largest else []


class Owed:
    """Decides which steps chunks owe, and counts them. It makes none: `LateSteps` does, and planner/simulate in virtual
    time.

    Args:
        counts: how many steps each chunk owes at first.

    Attributes:
        counts: how many steps each chunk owes that owes some.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts = dict(counts or {})

    def begin(self, chunks: Iterable[int], zeros: Iterable[bool]) -> tuple[list[int], dict[int, int]]:
        """A step of chunks begins.

        Args:
            chunks: their numbers.
            zeros: of each, whether its gradient is zeros.

        Returns:
            Those that owe this step, too; and of the others how many steps each has owed that owed some, which are to
            be made with this one.
        """
        waiting: list[int] = []
        due: dict[int, int] = {}
        for chunk, is_zero in zip(chunks, zeros, strict=True):
            count = self.counts.get(chunk, 0)
            if is_zero and count < most_owed(chunk):
                waiting.append(chunk)
            elif count:
                due[chunk] = count
        for chunk in waiting:
            self.counts[chunk] = self.counts.get(chunk, 0) + 1
        for chunk in due:
            del self.counts[chunk]
        return waiting, due

    def settle(self, chunk: int) -> None:
        """What a chunk owed was made."""
        del self.counts[chunk]


class LateStep(NamedTuple):
    """A step of a parameter, as far as chunks that owe it need it.

    Attributes:
        group: the number of its param group.
        options: what the rule needs of the group, as it was.
        before: the progress before the step.
    """

    group: int
    options: Mapping[str, Any]
    before: Progress


def replay(
    kernels: Kernels,
    rule: Rule,
    steps: Sequence[Any],
    arrays: Sequence[Tensor],
    blocks: Sequence[int],
    first: int,
    zeros: Tensor,
    out: Tensor,
    *,
    is_split: bool,
) -> None:
    """Makes steps with a gradient of zeros, in the memory of a chunk that has elements of one parameter.

    Args:
        kernels: those that work there.
        rule: the parameter's.
        steps: what the rule takes in each of them.
        arrays: the master and the states, each with an element for as many of the chunk's as `blocks` says.
        blocks: see `Flat.blocks`.
        first: the element of the parameter at which the chunk begins.
        zeros: zeros, fp32.
        out: gets the parameters for compute, in their dtype: of the whole chunk, or of as many elements as `zeros`,
            where nobody needs them.
        is_split: whether the master has the low halves only. Then `out` has the upper ones, of the whole chunk.
    """
    numel = len(arrays[0])
    for start in range(0, numel, len(zeros)):
        stop = min(start + len(zeros), numel)
        parts = [part_of(array, block, start, stop) for array, block in zip(arrays, blocks, strict=True)]
        values = out[start:stop] if len(out) == numel else out[: stop - start]
        spans = [Span(0, stop - start, None, first + start)]
        bind = rule.bind(
            kernels, SegmentMemory(parts, zeros[: stop - start], values, spans, values if is_split else None)
        )
        for scalars in steps:
            kernels.run((bind(scalars),))


class LateSteps:
    """The steps that chunks of a run owe; see [Note: late steps].

    Args:
        run: what the parts of a run share.
        rules: that of each param group.
        store: the store of the states.
        params: the trained parameters.
    """

    def __init__(self, run: Run, rules: Sequence[Rule], store: Store, params: ParamStore) -> None:
        self._layout = run.layout
        self._kernels_of = run.kernels_of
        self._timeline = run.timeline
        self._health = run.health
        self._rules = rules
        self._store = store
        self._params = params
        self._late = {one.param for one in self._pieces(run.layout)}
        self._zeros = torch.empty(0, dtype=torch.float32, device="cpu")
        for memory in run.memory.take(ZEROS):
            self._zeros = memory.view(torch.float32).zero_()
        self._step = 0
        self._log: dict[int, list[LateStep]] = {}  # by parameter, as many of its last steps as one of its chunks owes
        self._owed = Owed()
        self._settled: set[int] = set()

    @staticmethod
    def _pieces(layout: Layout) -> Iterator[Any]:
        return (layout.chunks[index].pieces[0] for index in layout.late_chunks)

    @property
    def owed(self) -> Mapping[int, int]:
        """How many steps each chunk owes that owes some."""
        return self._owed.counts

    @property
    def log(self) -> Mapping[int, Sequence[LateStep]]:
        """By parameter, its last steps, the last one last; at least as many as one of its chunks owes."""
        return self._log

    @property
    def settled(self) -> frozenset[int]:
        """The chunks that owed steps at the last commit, and none of those any more, though there was no other step."""
        return frozenset(self._settled)

    # A step.

    def begin(
        self, step: int, keys: Mapping[int, StepKey], groups: Sequence[Mapping[str, Any]], gradients: GradientBuffer
    ) -> tuple[set[int], dict[int, list[Any]]]:
        """Notes a step that begins.

        Args:
            step: its number.
            keys: for each parameter that has a gradient, by its number: what its rule needs.
            groups: the optimizer's param_groups.
            gradients: of the step.

        Returns:
            The chunks that owe this step, too; and what the rule takes in each step that others owed, which are to be
            made with this one.
        """
        self._step = step
        self._settled.clear()
        waiting: set[int] = set()
        owed: dict[int, list[Any]] = {}
        for param in self._late & keys.keys():
            group, before, _ = keys[param]
            pieces = [piece for _, piece in self._layout.pieces_of(param)]
            zeros = gradients.are_zeros(param, [(one.param_offset, one.param_offset + one.numel) for one in pieces])
            wait, due = self._owed.begin(self._layout.chunks_of[param], zeros)
            for chunk in wait:
                waiting.add(chunk)
                gradients.discard(chunk)
                self._timeline.count("late_bytes", 0 if self._store.is_resident(chunk) else self._store.nbytes(chunk))
            owed |= {chunk: self._scalars(chunk, count) for chunk, count in due.items()}
            options = self._rules[group].options_of(groups[group])
            self._log.setdefault(param, []).append(LateStep(group, options, before))
            self._shorten(param)
        return waiting, owed

    def _scalars(self, chunk: int, count: int) -> list[Any]:
        """What the rule takes in each of the last steps of a chunk, so many."""
        (piece,) = self._layout.chunks[chunk].pieces
        steps = self._log[piece.param][-count:]
        return [self._rules[one.group].scalars(one.options, one.before, 1.0) for one in steps]

    def _shorten(self, param: int) -> None:
        """Drops the steps of a parameter that none of its chunks owes."""
        most = max((self.owed.get(chunk, 0) for chunk in self._layout.chunks_of[param]), default=0)
        log = self._log[param]
        del log[: len(log) - most]
        if not log:
            del self._log[param]

    # Settling.

    def run(
        self, chunk: Chunk, steps: Sequence[Any], arrays: Sequence[Tensor], target: Tensor, *, is_split: bool
    ) -> None:
        """Makes steps that a chunk owed in its memory.

        Args:
            chunk: the chunk.
            steps: what the rule takes in each of them.
            arrays: its states, leased.
            target: its parameters, which get their new values.
            is_split: whether the masters are split. Then `target` has the parameters of before.
        """
        (piece,), flat = chunk.pieces, self._layout.flats[chunk.flat]
        group = self._layout.specs[piece.param].group
        assert group is not None
        rule, kernels = self._rules[group], self._kernels_of(chunk.flat)
        replay(kernels, rule, steps, arrays, flat.blocks, piece.param_offset, self._zeros, target, is_split=is_split)

    def settle(self, chunk: int) -> None:
        """Makes the steps that a chunk owes, if any. Its new parameters are in their store then.

        Raises:
            OffloadError: what leasing a chunk raises. The run can then go on only after a rollback.
        """
        if chunk not in self.owed:
            return
        one, steps = self._layout.chunks[chunk], self._scalars(chunk, self.owed[chunk])
        try:
            # Whoever asks reads the parameters next, and a step may follow, so neither is written yet.
            with self._store.lease(chunk, Use.FILL, step=self._step) as lease:
                is_split = lease.master.dtype is torch.int16  # then half of each master is in the parameters
                with (
                    self._params.lease(chunk, Use.FILL if is_split else Use.REFILL, step=self._step) as values,
                    self._timeline.span("adam_s"),
                    self._timeline.event(ADAM, "late steps", chunk=chunk),
                ):
                    self.run(one, steps, lease.arrays, values, is_split=is_split)
            self._owed.settle(chunk)
            self._settled.add(chunk)
            self._shorten(one.pieces[0].param)
        except BaseException as error:
            self._health.fail(error)  # it may have a part of these steps
            raise

    # Commits.

    def go_to(self, step: int, owed: Mapping[int, int], log: Mapping[int, Sequence[LateStep]]) -> None:
        """Makes what is owed that of a commit.

        Args:
            step: the step that was committed.
            owed: see the property.
            log: see the property.
        """
        self._step, self._owed = step, Owed(owed)
        self._log = {param: list(steps) for param, steps in log.items()}
        self._settled.clear()

    def committed(self) -> None:
        """Takes note that what is owed now is in a commit."""
        self._settled.clear()
