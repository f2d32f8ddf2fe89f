"""Between the model's parameters and their states in the store: taking masters in, handing copies out.

With a split master the store has only low halves, and the parameter in the model is the other half. So a write from
outside destroys half a master: it is taken over where the value before it was kept (`before_loading`, or in the store
of streamed parameters), and refused elsewhere. And a commit holds the parameters beside the low halves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from offload.checkpoint.reshard import Move
from offload.errors import StaleParameterError
from offload.layout import Chunk, Layout, Piece
from offload.model.flat_param import Parameters, line_of
from offload.native import Kernels
from offload.storage.chunk_cache import Lease, Store
from offload.storage.swap_format import STATE_KINDS

BLOCK = 1 << 20
"""Elements that are worked on at once, so that temporaries stay small."""


class Masters:
    """The states of a model's parameters, found by parameter number.

    Args: params: the store of the parameters that are streamed, which is `streamed` too, or that are committed.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Parameters,
        store: Store,
        kernels: Kernels,
        *,
        split_master: bool,
        params: Store | None = None,
        streamed: Store | None = None,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._store = store
        self._kernels = kernels
        self._split_master = split_master
        self._params = params
        self._streamed = streamed
        self._before: dict[int, Tensor] = {}
        # Streamed parameters that were written to: their masters are to follow before the next step.
        self._owed: set[int] = set()

    @property
    def can_wait(self) -> bool:
        """Whether masters may follow writes later: those of a split master need the value before at once. Then a value
        that is swapped out and in again keeps its master, as it does where it is resident."""
        return self._streamed is not None and not self._split_master

    def owe(self, numbers: Iterable[int]) -> None:
        """What was written to these parameters is in their store, and the next `take_outside_writes` takes it over."""
        self._owed.update(numbers)

    @torch.no_grad()
    def take_flat(self, flat: int) -> None:
        """Makes the masters from the uncast values of a flat's dense parameters, and casts them after that."""
        for chunk in self._layout.chunks:
            if chunk.flat == flat:
                with self._store.lease(chunk.index, step=0) as lease:
                    lease.dirty = True
                    for block in _blocks(chunk.pieces):
                        self._put(lease, block, self._of_model(block).to("cpu", torch.float32))
        self._parameters.attach(flat)

    @torch.no_grad()
    def give_back(self, step: int) -> None:
        """Makes the model's parameters, wherever they live, what the masters round to, or what was committed."""
        if self._split_master:
            self._fetch_parameters(step)
        else:
            self._round_masters(step)
        self._parameters.written_here(range(len(self._parameters.params)))
        self._before.clear()
        self._owed.clear()

    def _round_masters(self, step: int) -> None:
        for chunk in self._layout.chunks:
            with self._store.lease(chunk.index, step=step) as lease:
                if self._streamed is None:
                    self._on_device(chunk).copy_(lease.master)
                else:
                    with self._streamed.lease(chunk.index, step=step, is_fresh=True) as target:
                        target.dirty = True
                        dtype = self._parameters.flats[chunk.flat].dtype
                        self._kernels.cast(lease.master, target.arrays[0].view(dtype))

    @torch.no_grad()
    def bring_parameters(self, steps: Mapping[int, int]) -> None:
        """Brings the parameters of some chunks into the store they are committed from, if they are not there always.

        Args: steps: by chunk, whose results they are.
        """
        if self._params is None or self._streamed is not None:
            return
        for index, step in steps.items():
            with self._params.lease(index, step=step, is_fresh=True) as lease:
                lease.dirty = True
                on_device = self._on_device(self._layout.chunks[index])
                lease.arrays[0].view(on_device.dtype).copy_(on_device)

    def _fetch_parameters(self, step: int) -> None:
        """The way back. Streamed ones are where they belong."""
        if self._params is None or self._streamed is not None:
            return
        self._params.expect(chunk.index for chunk in self._layout.chunks)
        for chunk in self._layout.chunks:
            with self._params.lease(chunk.index, step=step) as lease:
                on_device = self._on_device(chunk)
                on_device.copy_(lease.arrays[0].view(on_device.dtype))
        self._params.expect(())

    def _on_device(self, chunk: Chunk) -> Tensor:
        return self._parameters.flats[chunk.flat][chunk.start : chunk.start + chunk.numel]

    @torch.no_grad()
    def take_over(self, sources: Iterable[tuple[Sequence[Move], Mapping[str, Tensor]]], step: int) -> None:
        """Makes states and parameters those of a commit in another layout, which come in any order, each element once.

        Args: sources: for each committed slot its states (fp32, whole) and what of them goes where, by target.
        A chunk stays in RAM until it is complete, unless its buffer is needed for others.
        """
        missing = [sum(piece.numel for piece in chunk.pieces) for chunk in self._layout.chunks]
        for moves, states in sources:
            for target, group in groupby(moves, key=lambda move: move.target):
                with ExitStack() as leases:
                    lease = leases.enter_context(self._store.lease(target, step=step))
                    copies = self._own_copies(leases, target, step)
                    held = [lease] if copies is None else [lease, copies]
                    for move in group:
                        self._place(lease, copies, move, states)
                        missing[target] -= move.numel
                    for one in held:
                        one.dirty, one.is_unfinished = True, missing[target] > 0
        assert not any(missing)
        self._parameters.written_here(range(len(self._parameters.params)))
        self._before.clear()
        self._owed.clear()

    def _own_copies(self, leases: ExitStack, chunk: int, step: int) -> Lease | None:
        """The streamed parameters of a chunk; None where they are on the device."""
        if self._streamed is None:
            return None
        return leases.enter_context(self._streamed.lease(chunk, step=step))

    def _place(self, lease: Lease, copies: Lease | None, move: Move, states: Mapping[str, Tensor]) -> None:
        """Copies one stretch of committed states, and makes the parameters of it."""
        chunk = self._layout.chunks[move.target]
        flat = self._parameters.flats[chunk.flat]
        into = slice(move.target_start, move.target_start + move.numel)
        found = {kind: values[move.source_start : move.source_start + move.numel] for kind, values in states.items()}
        for kind, state in lease.states().items():
            if state.dtype is torch.float32:
                state[into].copy_(found[kind])
        if lease.master.dtype is torch.int16:
            whole, low, exp_avg_sq = found["master"], lease.master[into], lease.exp_avg_sq[into]
            for start in range(0, move.numel, BLOCK):
                at = slice(start, min(start + BLOCK, move.numel))
                copy = torch.empty(at.stop - at.start, dtype=torch.bfloat16, device="cpu")
                self._kernels.split(whole[at], low[at], exp_avg_sq[at], copy)
        if copies is not None:
            copies.arrays[0].view(flat.dtype)[into].copy_(found["master"])
        else:
            flat[chunk.start + into.start : chunk.start + into.stop].copy_(found["master"])

    @torch.no_grad()
    def before_loading(self, params: Iterable[nn.Parameter]) -> None:
        """Keeps the values of `params` that a split master needs, until `take_outside_writes`."""
        for param in params if self._split_master and self._streamed is None else ():
            number = self._parameters.index.get(param)
            if number is not None and number not in self._before and param.dtype is torch.bfloat16:
                self._before[number] = line_of(param.detach()).cpu().clone()

    @torch.no_grad()
    def take_outside_writes(self, step: int) -> None:
        """Takes over what was written into parameters from outside (`load_state_dict`, `p.copy_`).

        An element whose copy is still what its master rounds to keeps its master.
        Raises: StaleParameterError with a split master, for a write that was not announced.
        """
        changed = self._owed if self.can_wait else set(self._parameters.written_outside())
        if changed:
            self._require_known(changed)
            for chunk in self._layout.chunks:
                pieces = [piece for piece in chunk.pieces if piece.param in changed]
                if pieces:
                    with self._store.lease(chunk.index, step=step) as lease:
                        lease.dirty = True
                        with self._copies_of(chunk.index) as copies:
                            for block in _blocks(pieces):
                                self._take(lease, block, copies)
            if not self.can_wait:
                self._parameters.note_writes(changed)
        self._owed.clear()
        self._before.clear()

    def states(self, number: int, step: int) -> dict[str, Tensor]:
        """Copies of the states of parameter `number`: fp32, of shape (numel,), in the order of its memory."""
        numel = self._layout.specs[number].numel
        lines = {kind: torch.empty(numel, dtype=torch.float32, device="cpu") for kind in STATE_KINDS}
        for index in self._layout.chunks_of[number]:
            pieces = [piece for piece in self._layout.chunks[index].pieces if piece.param == number]
            with self._store.lease(index, step=step) as lease, self._copies_of(index) as copies:
                for block in _blocks(pieces):
                    copy = _in_chunk(copies, block) if copies is not None else self._of_model(block).cpu()
                    whole = self._whole(lease, block, copy)
                    for kind, values in zip(STATE_KINDS, whole, strict=True):
                        lines[kind][block.param_offset : block.param_offset + block.numel] = values
        return lines

    def _require_known(self, changed: Collection[int]) -> None:
        for number in sorted(changed):
            spec = self._layout.specs[number]
            is_known = number in self._before or self._streamed is not None
            if self._split_master and spec.dtype is torch.bfloat16 and not is_known:
                raise StaleParameterError(
                    f"{spec.name} was written to from outside, and with Tuning(split_master=True) the upper half of "
                    "its masters went with the value before: use load_state_dict, or leave split_master out"
                )

    @contextmanager
    def _copies_of(self, chunk: int) -> Iterator[Tensor | None]:
        """The 16-bit parameters of a chunk as the store has them; None if it has none."""
        if self._streamed is None:
            yield None
            return
        with self._streamed.lease(chunk, step=0) as lease:
            yield lease.arrays[0].view(self._layout.flats[self._layout.chunks[chunk].flat].dtype)

    def _take(self, lease: Lease, block: Piece, copies: Tensor | None) -> None:
        new = _in_chunk(copies, block) if copies is not None and self.can_wait else self._of_model(block).cpu()
        old = self._before.get(block.param)
        if copies is not None and not self.can_wait:
            old = _in_chunk(copies, block)
        elif old is not None:
            old = old[block.param_offset : block.param_offset + block.numel]
        master = self._whole(lease, block, new if old is None else old)[0]
        kept = master.to(new.dtype) == new if old is None else _bits(old) == _bits(new)
        self._put(lease, block, torch.where(kept, master, new.float()))

    def _whole(self, lease: Lease, block: Piece, copy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """master, exp_avg, exp_avg_sq of a block whose 16-bit copy is `copy`: views, or rebuilt."""
        master, exp_avg, exp_avg_sq = (_in_chunk(state, block) for state in lease.states().values())
        if master.dtype is not torch.int16:
            return master, exp_avg, exp_avg_sq
        rebuilt, cleared = (torch.empty(block.numel, dtype=torch.float32, device="cpu") for _ in range(2))
        self._kernels.join(copy, master, exp_avg_sq, rebuilt, cleared)
        return rebuilt, exp_avg, cleared

    def _put(self, lease: Lease, block: Piece, values: Tensor) -> None:
        """Makes `values`, fp32, the master of a block."""
        master = _in_chunk(lease.master, block)
        if master.dtype is not torch.int16:
            master.copy_(values)
            return
        copy = torch.empty(block.numel, dtype=torch.bfloat16, device="cpu")
        # Without the tie bits of the master before.
        exp_avg_sq = _in_chunk(lease.exp_avg_sq, block).abs_()
        self._kernels.split(values.contiguous(), master, exp_avg_sq, copy)

    def _of_model(self, piece: Piece) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self._line_of_model(piece)

    def _line_of_model(self, piece: Piece) -> Tensor:
        return line_of(self._parameters.params[piece.param])[piece.param_offset : piece.param_offset + piece.numel]


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype is torch.float32 else torch.int16)


def _blocks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """`pieces` in parts of at most BLOCK elements."""
    for piece in pieces:
        for start in range(0, piece.numel, BLOCK):
            numel = min(BLOCK, piece.numel - start)
            yield Piece(piece.param, piece.param_offset + start, piece.chunk_offset + start, numel)


def _in_chunk(state: Tensor, piece: Piece) -> Tensor:
    return state[piece.chunk_offset : piece.chunk_offset + piece.numel]
