"""New parameters between ranks: each rank makes those of its own shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from offload.errors import RankError
from offload.layout import Chunk, Layout
from offload.ranks.communicator import Communicator, Work
from offload.regions import Region
from offload.storage.chunk_cache import Store
from offload.tiers import Tier

EXCHANGED = "new parameters of replicas"


def regions(layout: Layout, communication: Tier) -> list[Region]:
    """What a ReplicaExchange takes.

    Args:
        communication: in whose memory collectives are.
    """
    if layout.replicas == 1:
        return []
    return [Region(communication, EXCHANGED, _buffer_bytes(layout), kind="buffers")]


def _buffer_bytes(layout: Layout) -> int:
    windows = ((min(layout.chunk_numel, layout.shard_numel(flat.index)), flat.dtype) for flat in layout.flats)
    return max((layout.replicas * numel * dtype.itemsize for numel, dtype in windows), default=0)


class Exchange:
    """How new parameters get to the other ranks, flat after flat; of one rank alone: not at all."""

    def begin(self) -> None:
        """Before the first new values of a flat are sent."""

    def send(self, chunk: Chunk, values: Tensor, step: int) -> None:
        """Sends a chunk of this rank, after those before it in its flat, which did not change.

        Args:
            values: its new ones.
            step: that they are the result of.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def start(self, flat: int, step: int) -> None:
        """Sends the rest of a flat, and starts to receive what others made of it.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def finish(self, flat: int) -> None:
        """What is queued on the device from now on sees all new values of a flat.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def wait(self) -> None:
        """Waits for what was finished on the device only.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def abandon(self) -> None:
        """Waits for what is under way, successful or not."""


class FlatGather(Exchange):
    """All-gathers flat parameters that stay on the device, in place; whoever uses one waits for it.

    Args:
        flats: the model's flat parameters. This rank's shard of one has its new values when it is started.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor], comm: Communicator) -> None:
        self._layout = layout
        self._flats = flats
        self._comm = comm
        self._works: dict[int, Work] = {}

    def start(self, flat: int, step: int) -> None:
        whole, numel = self._flats[flat], self._layout.shard_numel(flat)
        if numel:
            own = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
            self._works[flat] = self._comm.all_gather_into_tensor(own, whole)

    def finish(self, flat: int) -> None:
        if flat in self._works:
            self._works[flat].wait_on_device()

    def wait(self) -> None:
        for flat in list(self._works):
            self._works[flat].wait()
            del self._works[flat]

    def abandon(self) -> None:
        for work in self._works.values():
            with suppress(RankError):
                work.wait()
        self._works.clear()


class ReplicaExchange(Exchange):
    """Sends new parameters to the ranks that keep the same parameters in their tiers, and receives theirs.

    With replicas, each shard group keeps all parameters, and the ranks at one place in these groups exchange what each
    of them made. At stages 1 and 2 with streamed parameters every rank keeps all of them. What other ranks make arrives
    here as copies (layout.py), one chunk of each rank at a time, while Adam makes this rank's next chunk.

    Args:
        store: the 16-bit parameters that this rank keeps.
        buffer: memory of the region `EXCHANGED`.
        comm: the ranks that keep the same parameters.
        chunk_updated: called with each copy and its new values, which are about to be in the store.
    """

    def __init__(
        self,
        layout: Layout,
        store: Store,
        buffer: Tensor,
        comm: Communicator,
        chunk_updated: Callable[[Chunk, Tensor], None],
    ) -> None:
        self._layout = layout
        self._store = store
        self._comm = comm
        self._chunk_updated = chunk_updated
        self._buffer = buffer
        self._chunks = {(chunk.flat, chunk.start): chunk for chunk in layout.param_chunks}
        self._sent = 0  # elements of each shard of the flat that has begun
        self._under_way: tuple[Work, int, int] | None = None

    def begin(self) -> None:
        self._sent = 0

    def send(self, chunk: Chunk, values: Tensor, step: int) -> None:
        self._send_up_to(chunk.flat, chunk.start - self._layout.shard_range(chunk.flat)[0], step)
        self._launch(chunk.flat, values, step)

    def start(self, flat: int, step: int) -> None:
        """When it returns, all copies of the flat have their new values already."""
        self._send_up_to(flat, self._layout.shard_numel(flat), step)
        self._receive(step)

    def abandon(self) -> None:
        if self._under_way is not None:
            with suppress(RankError):
                self._under_way[0].wait()
        self._under_way = None

    def _send_up_to(self, flat: int, stop: int, step: int) -> None:
        """TODO.

        Args:
            stop: an element of the shards.
        """
        while self._sent < stop:
            chunk = self._chunks.get((flat, self._layout.rank * self._layout.shard_numel(flat) + self._sent))
            if chunk is None:  # behind the end of the last shard, or nothing but a gap
                self._launch(flat, None, step)
                continue
            with self._store.lease(chunk.index, step=0) as lease:
                self._launch(flat, lease.arrays[0].view(self._layout.flats[flat].dtype), step)

    def _launch(self, flat: int, values: Tensor | None, step: int) -> None:
        """Sends `values`, or zeros, for the next elements of this rank's shard."""
        self._receive(step)
        rows = self._rows(flat, self._sent)
        own = rows[self._comm.rank]
        numel = 0 if values is None else values.numel()
        own[numel:] = 0
        if values is not None:
            own[:numel] = values
        self._under_way = (self._comm.all_gather_into_tensor(own, rows.view(-1)), flat, self._sent)
        self._sent += own.numel()

    def _receive(self, step: int) -> None:
        """Waits for what is under way, and writes it to the store."""
        if self._under_way is None:
            return
        work, flat, start = self._under_way
        work.wait()
        self._under_way = None
        numel = self._layout.shard_numel(flat)
        for rank, row in zip(self._layout.replicated_shards, self._rows(flat, start), strict=True):
            chunk = self._chunks.get((flat, rank * numel + start))
            if chunk is not None and rank != self._layout.rank:
                with self._store.lease(chunk.index, step=step, is_fresh=True) as lease:
                    lease.dirty = True
                    values = lease.arrays[0].view(row.dtype)
                    values.copy_(row[: chunk.numel])
                    self._chunk_updated(chunk, values)

    def _rows(self, flat: int, start: int) -> Tensor:
        """The buffer for the elements of all shards from `start` on: one row a rank."""
        layout, dtype = self._layout, self._layout.flats[flat].dtype
        numel = min(layout.chunk_numel, layout.shard_numel(flat) - start)
        return self._buffer[: layout.replicas * numel * dtype.itemsize].view(dtype).view(layout.replicas, numel)
