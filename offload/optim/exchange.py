"""New parameters between ranks, of which each makes those of its own partition."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from offload.collectives import Communicator, Work
from offload.errors import RankError
from offload.layout import Chunk, Layout
from offload.store.arena import Arena, carved_bytes
from offload.store.store import Store


def arena_bytes(layout: Layout) -> int:
    """What an Exchange takes from the arena."""
    return carved_bytes(_buffer_bytes(layout)) if layout.replicas > 1 else 0


def _buffer_bytes(layout: Layout) -> int:
    return max((layout.replicas * _window(layout, f.index) * f.dtype.itemsize for f in layout.flats), default=0)


def _window(layout: Layout, flat: int) -> int:
    """Elements of each partition that travel together: those of a chunk."""
    return min(layout.chunk_numel, layout.part_numel(flat))


def staging_bytes(layout: Layout) -> int:
    """What a Staging takes on the device."""
    return max((layout.padded_numel(flat.index) * flat.dtype.itemsize for flat in layout.flats), default=0)


class Staging:
    """Where a flat that stays on the device is put together, one at a time: all of its old value is in the model until
    all of the new one is here, so that it can travel beside a forward.

    Args: flats: the model's parameters on `device`.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor], comm: Communicator, device: torch.device) -> None:
        self._layout = layout
        self._flats = flats
        self._comm = comm
        self._memory = torch.empty(staging_bytes(layout), dtype=torch.uint8, device=device)
        self._work: Work | None = None

    def begin(self, flat: int) -> None:
        """Before new values of a flat are written here: what does not change is what it was."""
        start, stop = self._layout.part_of(flat)
        self._whole(flat)[start:stop] = self._flats[flat][start:stop]

    def chunk(self, chunk: Chunk) -> Tensor:
        """The place of a chunk."""
        return self._whole(chunk.flat)[chunk.start : chunk.start + chunk.numel]

    def launch(self, flat: int) -> None:
        """Sends this rank's partition, which is here, to the others, and gets theirs. Raises: RankError."""
        whole, numel = self._whole(flat), self._layout.part_numel(flat)
        if numel:
            self._work = self._comm.all_gather(whole[self._comm.rank * numel : (self._comm.rank + 1) * numel], whole)

    def finish(self, flat: int) -> None:
        """Waits for the others' partitions; all of the flat changes. Raises: RankError."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        self._flats[flat].copy_(self._whole(flat))

    def abandon(self) -> None:
        """Waits for what is under way, successful or not."""
        if self._work is not None:
            with suppress(RankError):
                self._work.wait()
        self._work = None

    def _whole(self, flat: int) -> Tensor:
        memory, dtype = self._flats[flat], self._layout.flats[flat].dtype
        return self._memory[: memory.numel() * dtype.itemsize].view(dtype)


class Exchange:
    """New parameters between replicas, where each of several groups of ranks keeps all parameters together.

    A rank keeps those of the ranks at its place in the other groups as copies (layout.py): they come here, chunk by
    chunk, and the parameters of a unit are then gathered within each group.

    Args: store: the 16-bit parameters that this rank keeps; comm: the ranks at its place in all groups."""

    def __init__(self, layout: Layout, store: Store, arena: Arena, comm: Communicator) -> None:
        self._layout = layout
        self._store = store
        self._comm = comm
        self._buffer = arena.carve(_buffer_bytes(layout))
        self._chunks = {(chunk.flat, chunk.start): chunk for chunk in layout.param_chunks}

    def bring(self, flat: int, step: int) -> None:
        """Makes the copies of a flat what the ranks that made them have. Args: step: whose. Raises: RankError."""
        layout = self._layout
        dtype, part = layout.flats[flat].dtype, layout.part_numel(flat)
        for start in range(0, part, layout.chunk_numel):
            numel = min(layout.chunk_numel, part - start)
            rows = self._buffer[: layout.replicas * numel * dtype.itemsize].view(dtype).view(layout.replicas, numel)
            own = rows[self._comm.rank]
            self._fill(own, self._chunks.get((flat, layout.rank * part + start)))
            self._comm.all_gather(own, rows.view(-1)).wait()
            for rank, row in zip(layout.kept_parts, rows, strict=True):
                chunk = self._chunks.get((flat, rank * part + start))
                if chunk is not None and rank != layout.rank:
                    with self._store.lease(chunk.index, step=step, is_fresh=True) as lease:
                        lease.dirty = True
                        lease.arrays[0].view(dtype).copy_(row[: chunk.numel])

    def _fill(self, row: Tensor, chunk: Chunk | None) -> None:
        """Behind the end of the last partition there is nothing, and all of a chunk without parameters is a gap."""
        if chunk is None:
            row.zero_()
            return
        with self._store.lease(chunk.index, step=0) as lease:
            row[: chunk.numel] = lease.arrays[0].view(row.dtype)
        row[chunk.numel :] = 0
