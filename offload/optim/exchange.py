"""New parameters between replicas, where each of several groups of ranks keeps all parameters together.

A rank makes the new parameters of its own partition, and keeps those of the ranks at its place in the other groups as
copies (layout.py): these come here, chunk by chunk, and the parameters of a unit are then gathered within each group.
"""

from __future__ import annotations

from torch import Tensor

from offload.collectives import Communicator
from offload.layout import Chunk, Layout
from offload.store.arena import Arena, carved_bytes
from offload.store.store import Store


def arena_bytes(layout: Layout) -> int:
    """What the exchange takes from the arena."""
    return carved_bytes(_buffer_bytes(layout)) if layout.replicas > 1 else 0


def _buffer_bytes(layout: Layout) -> int:
    return max((layout.replicas * _window(layout, f.index) * f.dtype.itemsize for f in layout.flats), default=0)


def _window(layout: Layout, flat: int) -> int:
    """Elements of each partition that travel together: those of a chunk."""
    return min(layout.chunk_numel, layout.part_numel(flat))


class Exchange:
    """Args: store: the 16-bit parameters that this rank keeps; comm: the ranks at its place in all groups."""

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
