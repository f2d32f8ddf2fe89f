"""New parameters between ranks, of which each makes those of its own partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from offload.dist.communicator import Communicator, Work
from offload.errors import RankError
from offload.layout import Chunk, Layout
from offload.storage.arena import Lender, carved_bytes
from offload.storage.chunk_cache import Store


def arena_bytes(layout: Layout) -> int:
    """What an Exchange takes from the arena."""
    return carved_bytes(_buffer_bytes(layout)) if layout.replicas > 1 else 0


def _buffer_bytes(layout: Layout) -> int:
    return max((layout.replicas * _window(layout, f.index) * f.dtype.itemsize for f in layout.flats), default=0)


def _window(layout: Layout, flat: int) -> int:
    """Elements of each partition that travel together: those of a chunk."""
    return min(layout.chunk_numel, layout.shard_numel(flat))


class Gathers:
    """Puts flats that stay on the device together, each in its place: use waits for it.

    Args: flats: the model's parameters, of which this rank's partitions have their new values when they are launched.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor], comm: Communicator) -> None:
        self._layout = layout
        self._flats = flats
        self._comm = comm
        self._works: dict[int, Work] = {}

    def launch(self, flat: int) -> None:
        """Sends this rank's partition to the others, and gets theirs. Raises: RankError."""
        whole, numel = self._flats[flat], self._layout.shard_numel(flat)
        if numel:
            own = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
            self._works[flat] = self._comm.all_gather_into_tensor(own, whole)

    def finish(self, flat: int) -> None:
        """Waits for the others' partitions. Raises: RankError."""
        if flat in self._works:
            self._works[flat].wait()
            del self._works[flat]

    def abandon(self) -> None:
        """Waits for what is under way, successful or not."""
        for work in self._works.values():
            with suppress(RankError):
                work.wait()
        self._works.clear()


class Exchange:
    """New parameters between ranks that keep the same ones in their tiers.

    With replicas these are those at one place of several groups, each of which keeps all parameters together and
    gathers a unit within itself; at stages 1 and 2 each rank keeps all. What others make comes here as copies
    (layout.py), a chunk of each rank at a time, while Adam makes this one's next.

    Args: store: the 16-bit parameters that this rank keeps; comm: the ranks that keep the same; lands: called with each
    copy and its new values, which are on their way to the store.
    """

    def __init__(
        self, layout: Layout, store: Store, arena: Lender, comm: Communicator, lands: Callable[[Chunk, Tensor], None]
    ) -> None:
        self._layout = layout
        self._store = store
        self._comm = comm
        self._lands = lands
        self._buffer = arena.carve(_buffer_bytes(layout))
        self._chunks = {(chunk.flat, chunk.start): chunk for chunk in layout.param_chunks}
        self._sent = 0  # of each partition of the flat that has begun
        self._travelling: tuple[Work, int, int] | None = None

    def begin(self) -> None:
        """Before new values of a flat are sent."""
        self._sent = 0

    def send(self, chunk: Chunk, values: Tensor, step: int) -> None:
        """Sends a chunk of this rank, after those before it in its flat, which did not change.

        Args: values: its new ones; step: whose. Raises: RankError.
        """
        self._send_up_to(chunk.flat, chunk.start - self._layout.shard_range(chunk.flat)[0], step)
        self._launch(chunk.flat, values, step)

    def finish(self, flat: int, step: int) -> None:
        """Sends what is left of a flat; all copies of it are what the ranks that made them have. Raises: RankError."""
        self._send_up_to(flat, self._layout.shard_numel(flat), step)
        self._arrive(step)

    def abandon(self) -> None:
        """Waits for what is under way, successful or not."""
        if self._travelling is not None:
            with suppress(RankError):
                self._travelling[0].wait()
        self._travelling = None

    def _send_up_to(self, flat: int, stop: int, step: int) -> None:
        """Args: stop: an element of the partitions."""
        while self._sent < stop:
            chunk = self._chunks.get((flat, self._layout.rank * self._layout.shard_numel(flat) + self._sent))
            if chunk is None:  # behind the end of the last partition, or a gap as a whole
                self._launch(flat, None, step)
                continue
            with self._store.lease(chunk.index, step=0) as lease:
                self._launch(flat, lease.arrays[0].view(self._layout.flats[flat].dtype), step)

    def _launch(self, flat: int, values: Tensor | None, step: int) -> None:
        """Sends `values`, or zeros, for the next elements of this rank's partition."""
        self._arrive(step)
        rows = self._rows(flat, self._sent)
        own = rows[self._comm.rank]
        numel = 0 if values is None else values.numel()
        own[numel:] = 0
        if values is not None:
            own[:numel] = values
        self._travelling = (self._comm.all_gather_into_tensor(own, rows.view(-1)), flat, self._sent)
        self._sent += own.numel()

    def _arrive(self, step: int) -> None:
        """Takes in what is under way."""
        if self._travelling is None:
            return
        work, flat, start = self._travelling
        work.wait()
        self._travelling = None
        part = self._layout.shard_numel(flat)
        for rank, row in zip(self._layout.replicated_shards, self._rows(flat, start), strict=True):
            chunk = self._chunks.get((flat, rank * part + start))
            if chunk is not None and rank != self._layout.rank:
                with self._store.lease(chunk.index, step=step, is_fresh=True) as lease:
                    lease.dirty = True
                    values = lease.arrays[0].view(row.dtype)
                    values.copy_(row[: chunk.numel])
                    self._lands(chunk, values)

    def _rows(self, flat: int, start: int) -> Tensor:
        """Where elements of all partitions from `start` on travel, by rank."""
        layout, dtype = self._layout, self._layout.flats[flat].dtype
        numel = min(layout.chunk_numel, layout.shard_numel(flat) - start)
        return self._buffer[: layout.replicas * numel * dtype.itemsize].view(dtype).view(layout.replicas, numel)
