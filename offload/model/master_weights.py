"""Master weights: made from the model's parameters, read, and made to follow what others write to parameters.

A split master has its low half in the store of the states; its high half is the bf16 parameter. So whoever writes to
the parameter destroys half a master. Such a write is taken over where the value before is known (`before_loading`, or
the store of streamed parameters), and refused elsewhere. A commit holds the parameters beside the low halves.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.choices import StateChoice
from offload.errors import ResumeError, StaleParameterError
from offload.layout import MASTER, CopyRange, Piece, StateKind, is_dithered, of_states, part_of
from offload.model.dense import flattened
from offload.model.flat_param import FlatParameters
from offload.model.held_param import HeldParam
from offload.model.torch_helpers import bits_of, call_hidden
from offload.native import JOIN, SPLIT, codes
from offload.optim.late import LateSteps
from offload.optim.method import MethodCall
from offload.run import Run
from offload.storage.chunk_cache import Lease, Store, Use
from offload.storage.param_store import ParamStore

BLOCK = 1 << 20
"""Elements that are processed at once, so that temporaries stay small."""


class MasterWeights:
    """The states of a model's parameters, by parameter number.

    Args:
        run: what the parts of a run share.
        choice: what was decided for the states.
        parameters: the model's.
        store: of the states.
        params: of the trained parameters.
        late: the steps that chunks owe. Whoever reads states, or makes them follow, settles them first.

    Attributes:
        late: see above.
    """

    def __init__(
        self,
        run: Run,
        choice: StateChoice,
        parameters: FlatParameters,
        store: Store,
        params: ParamStore,
        late: LateSteps,
    ) -> None:
        self.late = late
        self._layout = run.layout
        self._parameters = parameters
        self._store = store
        self._kernels = run.kernels
        self._split_master = choice.split_master
        self._params = params
        self._held = parameters.held

    @property
    def takes_writes_late(self) -> bool:
        """Whether masters may take over what others write as late as at the next step.

        A value that was replaced and then restored keeps its master then, as it does where parameters are resident. A
        split master needs the value from before the write, so it takes writes over at once.
        """
        return not self._params.in_model and not self._split_master

    def note_stored_writes(self, numbers: Iterable[int]) -> None:
        """Records that the store of streamed parameters has new values of these, for the next `take_outside_writes`.

        Those without states have no masters that would follow.
        """
        for number in numbers:
            self._held[number].has_stored_write = number < len(self._layout.specs)

    @torch.no_grad()
    def make_flat(self, flat: int) -> None:
        """Makes the masters from the uncast values of a flat parameter, which are dense. A frozen one has none."""
        for chunk in self._layout.chunks:
            if chunk.flat == flat:
                with self._store.lease(chunk.index, Use.UPDATE, step=0) as lease:
                    for block in _blocks(chunk.pieces):
                        self._put(lease, block, self._of_model(block).to("cpu", torch.float32))
                    states = self._layout.flats[flat].states
                    for state, arrays in zip(states, of_states(states, lease.arrays[1:]), strict=True):
                        if state.starts:  # of an exact form; bytes of 0 are 0 in each
                            arrays[0].fill_(state.starts)

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Gives the model's parameters, wherever they are, the values of a commit.

        With split masters these are the parameters that the commit holds, else the rounded masters.

        Args:
            step: the step of the commit.
        """
        if self._split_master:
            self._params.from_commit(step)
        else:
            self._round_masters(step)
        self._parameters.bump_versions(range(len(self._layout.specs)))
        self._forget_writes(self._held)

    @torch.no_grad()
    def run(self, call: MethodCall, step: int) -> None:
        """Runs a method of the optimizers over masters and states, and rounds the masters into the parameters.

        The parameters are those that this rank keeps, wherever they are: on the device too, if they do not stream.

        Args:
            call: the method.
            step: the last step, whose results masters and states are.
        """
        runs = {chunk: found for chunk in self._layout.chunks if (found := call.runs(chunk))}
        self._store.expect(chunk.index for chunk in runs)
        for chunk, found in runs.items():
            is_whole = all(piece.param in call.keys for piece in chunk.pieces)
            self._settle(chunk.index)
            with (
                self._store.lease(chunk.index, Use.UPDATE, step=step) as lease,
                self._params.lease(chunk.index, Use.OVERWRITE if is_whole else Use.UPDATE, step=step) as values,
            ):
                self._kernels.run(call.task(chunk, run, lease.arrays) for run in found)
                for run in found:
                    values[run.start : run.stop].copy_(lease.master[run.start : run.stop])
                if not self._params.in_model:
                    self._params.chunk_updated(chunk, values)

    def _forget_writes(self, held: Iterable[HeldParam]) -> None:
        """Forgets what was written to parameters, which their masters follow now."""
        for one in held:
            one.value_before, one.has_stored_write = None, False

    def _round_masters(self, step: int) -> None:
        for chunk in self._layout.chunks:
            with (
                self._store.lease(chunk.index, Use.READ, step=step) as lease,
                self._params.lease(chunk.index, Use.OVERWRITE, step=step) as values,
            ):
                values.copy_(lease.master)

    @torch.no_grad()
    def store_parameters(self, steps: Mapping[int, int]) -> None:
        """Brings parameters to where commits are made from; see `ParamStore.to_commit`."""
        self._params.to_commit(steps)

    @torch.no_grad()
    def take_resharded(
        self,
        sources: Iterable[tuple[Sequence[CopyRange], Mapping[str, Tensor]]],
        numels: Mapping[int, int],
        step: int,
        converted: Container[str] = (),
    ) -> None:
        """Copies states and parameters from a commit in another layout, each element once, in any order.

        A chunk stays in RAM until it is complete, unless its buffer is needed for others.

        Args:
            sources: for each committed slot, which of its elements go where (sorted by target), and its whole fp32
                states. Those that are left out begin as if no step had been made.
            numels: how many elements each chunk gets; the others were not committed, and stay.
            step: the step of the commit.
            converted: the names of parameters whose states were committed in another form.

        Raises:
            ResumeError: states are to be rounded that are not finite.
        """
        missing = dict(numels)
        for ranges, states in sources:
            for target, group in groupby(ranges, key=lambda one: one.target):
                copied = list(group)
                missing[target] -= sum(one.numel for one in copied)
                use = Use.FILL if missing[target] else Use.UPDATE
                with (
                    self._store.lease(target, use, step=step) as lease,
                    self._params.lease(target, use, step=step) as values,
                ):
                    for one in copied:
                        self._copy_range(lease, values, one, states, converted)
        assert not any(missing.values())
        self._parameters.bump_versions(range(len(self._layout.specs)))
        self._forget_writes(self._held)

    def require_convertible(
        self, copied: CopyRange, states: Mapping[str, Tensor], converted: Container[str] = ()
    ) -> None:
        """Looks at one range of committed states.

        Args:
            copied: the range.
            states: whole fp32 states of its slot.
            converted: the names of parameters whose states were committed in another form.

        Raises:
            ResumeError: states are to be rounded that are not finite.
        """
        name = self._layout.specs[self._layout.chunks[copied.target].piece_at(copied.target_start).param].name
        if name not in converted:
            return
        elements = _elements(copied, states)
        for state in self._states_of(copied.target):
            is_rounded = state.name in elements and not state.form.is_exact
            if is_rounded and not bool(elements[state.name].isfinite().all()):
                raise ResumeError(
                    f"{state.name} of {name} has NaN or Inf, and would make those around it useless in the form "
                    f'{state.form.name}: resume with the states as they were committed, or with states="fp32"'
                )

    def _copy_range(
        self,
        lease: Lease,
        values: Tensor,
        copied: CopyRange,
        states: Mapping[str, Tensor],
        converted: Container[str],
    ) -> None:
        """Copies one range of committed states, and makes the parameters from it."""
        self.require_convertible(copied, states, converted)
        into = slice(copied.target_start, copied.target_start + copied.numel)
        elements = _elements(copied, states)
        chunk = self._layout.chunks[lease.chunk]
        kinds = self._states_of(lease.chunk)
        piece = chunk.piece_at(copied.target_start)
        offset = piece.param_offset + copied.target_start - piece.chunk_offset
        for block in _blocks([Piece(piece.param, offset, copied.target_start, copied.numel)]):
            at = slice(block.chunk_offset - copied.target_start, block.chunk_offset - copied.target_start + block.numel)
            arrays = of_states(kinds, self._parts(lease, block)[1:])
            for state, of_state in zip(kinds, arrays, strict=True):
                if state.name not in elements:  # it begins; bytes of 0 are 0 in each form
                    for array in of_state:
                        array.fill_(state.starts)
                    continue
                codes.store(state.form, elements[state.name][at], of_state, step=lease.step, first=block.param_offset)
            self._put(lease, block, elements[MASTER][at])
        values[into].copy_(elements[MASTER])

    @torch.no_grad()
    def before_loading(self, params: Iterable[nn.Parameter]) -> None:
        """Keeps the values that split masters of `params` need until `take_outside_writes`."""
        if not self._split_master or not self._params.in_model:
            return
        known = (n for n in map(self._parameters.number_of, params) if n is not None)
        numbers = [n for n in known if n < len(self._layout.specs) and self._held[n].value_before is None]
        self._parameters.return_repointed(numbers)
        written = self._parameters.find_outside_writes(numbers)  # the upper halves of their masters are gone
        for number in numbers:
            param = self._parameters.locals[number]
            if param.dtype is torch.bfloat16 and number not in written:
                self._held[number].value_before = flattened(param.detach()).cpu().clone()

    @torch.no_grad()
    def take_outside_writes(self, step: int, numbers: Collection[int] | None = None) -> None:
        """Makes masters follow what others wrote to parameters (`load_state_dict`, `p.copy_`).

        An element that still equals its rounded master keeps its master.

        Args:
            step: the last step.
            numbers: the parameters to look at; None: all.

        Raises:
            StaleParameterError: with a split master, if the value before the write is not known.
        """
        numbers = range(len(self._layout.specs)) if numbers is None else numbers
        if self.takes_writes_late:
            changed = {number for number in numbers if self._held[number].has_stored_write}
        else:
            changed = set(self._parameters.find_outside_writes(numbers))
        if changed:
            self._require_known(changed)
            for number in changed:
                self._held[number].note_write(step)
            for index in sorted({index for number in changed for index in self._layout.chunks_of[number]}):
                pieces = [piece for piece in self._layout.chunks[index].pieces if piece.param in changed]
                self._settle(index)
                with (
                    self._store.lease(index, Use.UPDATE, step=step) as lease,
                    self._params.lease(index, Use.READ, step=step) as values,
                ):
                    for block in _blocks(pieces):
                        self._take(lease, block, values)
            if not self.takes_writes_late:
                self._parameters.forget_writes(changed)
        self._forget_writes(self._held[number] for number in numbers)

    def states(self, number: int, step: int) -> dict[str, Tensor]:
        """Copies of the states of parameter `number`: fp32, shape (numel,), on the CPU, in the order of its memory."""
        numel = self._layout.specs[number].numel
        kinds = self._layout.flats[self._parameters.flat_of(number)].kinds
        lines = {kind: torch.empty(numel, dtype=torch.float32, device="cpu") for kind in kinds}
        for block, whole in self._wholes(number, step):
            for kind, values in zip(kinds, whole, strict=True):
                lines[kind][block.param_offset : block.param_offset + block.numel] = values
        return lines

    @torch.no_grad()
    def copy_to(self, number: int, into: Tensor) -> None:
        """Copies the master of parameter `number` to `into`, shape (numel,), on any device, in the order of its memory.

        This gives a model that was just taken its values back, in the dtype that they had.
        """
        for block, (master, *_) in self._wholes(number, step=0):
            into[block.param_offset : block.param_offset + block.numel].copy_(master)

    def _settle(self, chunk: int) -> None:
        if chunk in self.late.owed:
            call_hidden(self.late.settle, chunk)

    def _parts(self, lease: Lease, block: Piece) -> list[Tensor]:
        """What all arrays of a chunk's states have of a block."""
        start, stop = block.chunk_offset, block.chunk_offset + block.numel
        blocks = self._layout.flats[self._layout.chunks[lease.chunk].flat].blocks
        return [part_of(array, size, start, stop) for array, size in zip(lease.arrays, blocks, strict=True)]

    def _states_of(self, chunk: int) -> tuple[StateKind, ...]:
        """The kinds of the arrays in a chunk's slot, beside the master."""
        return self._layout.flats[self._layout.chunks[chunk].flat].states

    def _wholes(self, number: int, step: int) -> Iterator[tuple[Piece, Sequence[Tensor]]]:
        """Yields the states of a parameter block by block, while their chunk is leased; see `_whole`."""
        for chunk, piece in self._layout.pieces_of(number):
            self._settle(chunk.index)
            with (
                self._store.lease(chunk.index, Use.READ, step=step) as lease,
                self._params.lease(chunk.index, Use.READ, step=step) as values,
            ):
                for block in _blocks([piece]):
                    copy = self._of_model(block).cpu() if self._params.in_model else _in_chunk(values, block)
                    yield block, self._whole(lease, block, copy)

    def _require_known(self, changed: Collection[int]) -> None:
        for number in sorted(changed):
            spec = self._layout.specs[number]
            is_known = self._held[number].value_before is not None or not self._params.in_model
            if self._split_master and spec.dtype is torch.bfloat16 and not is_known:
                raise StaleParameterError(
                    f"{spec.name} was written to from outside, and with Tuning(split_master=True) the upper half of "
                    "its masters went with the value before: call rollback() to go back to the last commit, and write "
                    "with load_state_dict only, or leave split_master out"
                )

    def _take(self, lease: Lease, block: Piece, values: Tensor) -> None:
        """Makes the master of a block follow what others wrote.

        Args:
            lease: of the chunk's states.
            block: the block.
            values: of the chunk, as `params` has them.
        """
        is_late = self.takes_writes_late
        new = (_in_chunk(values, block) if is_late else self._of_model(block)).to(lease.master.device)
        old = self._held[block.param].value_before
        if old is not None:
            old = old[block.param_offset : block.param_offset + block.numel].to(new.device)
        elif not self._params.in_model and not is_late:
            old = _in_chunk(values, block)
        master = self._whole(lease, block, new if old is None else old)[0]
        kept = master.to(new.dtype) == new if old is None else bits_of(old) == bits_of(new)
        self._put(lease, block, torch.where(kept, master, new.float()))

    def _whole(self, lease: Lease, block: Piece, copy: Tensor) -> Sequence[Tensor]:
        """The master and the states of a block in fp32: views, or joined from split masters.

        Args:
            lease: of the chunk's states.
            block: the block.
            copy: its bf16 parameters, for a split master.
        """
        states = self._layout.flats[self._layout.chunks[lease.chunk].flat].states
        master, *rest = self._parts(lease, block)
        moments = []
        for state, arrays in zip(states, of_states(states, rest), strict=True):
            line = (
                arrays[0]
                if state.form.is_plain
                else torch.empty(block.numel, dtype=torch.float32, device=master.device)
            )
            moments.append(codes.decode_into(state.form, arrays, line))
        if master.dtype is not torch.int16:
            return [master, *moments]
        if is_dithered(states):
            return [
                codes.join_into(copy, master, torch.empty(block.numel, dtype=torch.float32, device="cpu")),
                *moments,
            ]
        exp_avg, exp_avg_sq = moments
        rebuilt, cleared = (torch.empty(block.numel, dtype=torch.float32, device="cpu") for _ in range(2))
        self._kernels.call(JOIN, copy, master, exp_avg_sq, rebuilt, cleared)
        return rebuilt, exp_avg, cleared

    def _put(self, lease: Lease, block: Piece, values: Tensor) -> None:
        """Makes `values`, fp32, the master of a block."""
        master = _in_chunk(lease.master, block)
        flat = self._layout.flats[self._layout.chunks[lease.chunk].flat]
        if is_dithered(flat.states) and flat.dtype is torch.bfloat16:
            values = codes.settle_(values.clone())  # of whole masters, too: both have the same bits
        if master.dtype is not torch.int16:
            master.copy_(values)
            return
        copy = torch.empty(block.numel, dtype=torch.bfloat16, device="cpu")
        if is_dithered(flat.states):
            codes.split(values, master, copy)
            return
        # Its signs hold tie bits of the master before; they are cleared.
        exp_avg_sq = _in_chunk(lease.arrays[2], block).abs_()
        self._kernels.call(SPLIT, values.contiguous(), master, exp_avg_sq, copy)

    @torch_private.goes_past_subclasses
    def _of_model(self, piece: Piece) -> Tensor:
        """A view of the elements of a piece in the model, 1-D."""
        param = flattened(self._parameters.locals[piece.param])
        return param[piece.param_offset : piece.param_offset + piece.numel]


def _elements(copied: CopyRange, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a range takes of the whole states of its slot."""
    at = slice(copied.source_start, copied.source_start + copied.numel)
    return {kind: state[at] for kind, state in states.items()}


def _blocks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces, cut into pieces of at most BLOCK elements."""
    for piece in pieces:
        for start in range(0, piece.numel, BLOCK):
            numel = min(BLOCK, piece.numel - start)
            yield Piece(piece.param, piece.param_offset + start, piece.chunk_offset + start, numel)


def _in_chunk(state: Tensor, piece: Piece) -> Tensor:
    return state[piece.chunk_offset : piece.chunk_offset + piece.numel]
