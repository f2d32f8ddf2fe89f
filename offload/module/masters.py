"""Between the model's parameters and their states in the store: taking masters in, handing copies out."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from offload.layout import Chunk, Layout, Piece
from offload.module.parameters import Parameters, line_of
from offload.store.slots import STATE_KINDS
from offload.store.store import Store


class Masters:
    """The states of a model's parameters, found by parameter number."""

    def __init__(self, layout: Layout, parameters: Parameters, store: Store) -> None:
        self._layout = layout
        self._parameters = parameters
        self._store = store

    @torch.no_grad()
    def take_model(self) -> None:
        """Makes the masters from the parameters' uncast values, flat by flat, and casts each flat after that."""
        self._parameters.make_dense()
        for flat in self._layout.flats:
            for chunk in self._layout.chunks:
                if chunk.flat == flat.index:
                    with self._store.lease(chunk.index, step=0) as lease:
                        lease.dirty = True
                        for piece in chunk.pieces:
                            _in_chunk(lease.master, piece).copy_(self._of_model(piece))
            self._parameters.attach(flat.index)
        self._store.drain()

    @torch.no_grad()
    def take_outside_writes(self, step: int) -> None:
        """Takes over what was written into parameters from outside (`load_state_dict`, `p.copy_`).

        An element whose copy is still what its master rounds to keeps its master.
        """
        changed = set(self._parameters.written_outside())
        if not changed:
            return
        for chunk in self._layout.chunks:
            pieces = [piece for piece in chunk.pieces if piece.param in changed]
            if pieces:
                self._take_pieces(chunk, pieces, step)
        self._parameters.written_here(changed)

    def _take_pieces(self, chunk: Chunk, pieces: Collection[Piece], step: int) -> None:
        with self._store.lease(chunk.index, step=step) as lease:
            lease.dirty = True
            for piece in pieces:
                master, copy = _in_chunk(lease.master, piece), self._of_model(piece).cpu()
                master.copy_(torch.where(master.to(copy.dtype) == copy, master, copy.float()))

    def states(self, number: int, step: int) -> dict[str, Tensor]:
        """Copies of the states of parameter `number`: fp32, of shape (numel,), in the order of its memory."""
        numel = self._layout.specs[number].numel
        lines = {kind: torch.empty(numel, dtype=torch.float32, device="cpu") for kind in STATE_KINDS}
        for index in self._layout.chunks_of[number]:
            with self._store.lease(index, step=step) as lease:
                for piece in self._layout.chunks[index].pieces:
                    if piece.param == number:
                        for kind, state in lease.states().items():
                            lines[kind][piece.param_offset : piece.param_offset + piece.numel] = _in_chunk(state, piece)
        return lines

    def _of_model(self, piece: Piece) -> Tensor:
        return line_of(self._parameters.params[piece.param])[piece.param_offset : piece.param_offset + piece.numel]


def _in_chunk(state: Tensor, piece: Piece) -> Tensor:
    return state[piece.chunk_offset : piece.chunk_offset + piece.numel]
