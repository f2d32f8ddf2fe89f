"""New parameters between ranks: each rank makes those of its own shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from offload.errors import RankError
from offload.layout import Chunk, Layout
from offload.ranks.communicator import Communicator, Work
from offload.regions import Region
from offload.storage.chunk_cache import Use
from offload.storage.param_store import ParamStore
from offload.tiers import Tier

EXCHANGED = "new parameters of replicas"


def regions(layout: Layout, communication: Tier) -> list[Region]:
    """What a ReplicaExchange reserves.

    Args:
        layout: of the parameters.
        communication: the tier whose memory the tensors of collectives are in.
    """
    if layout.replicas == 1:
        return []
    return [Region(communication, EXCHANGED, _buffer_bytes(layout), kind="buffers")]


def _buffer_bytes(layout: Layout) -> int:
    windows = ((min(layout.chunk_numel, layout.shard_numel(flat.index)), flat.dtype) for flat in layout.flats)
    return max((layout.replicas * numel * dtype.itemsize for numel, dtype in windows), default=0)


class Exchange:
    """How new parameters get to the other ranks, one flat parameter after the other.

    This class does nothing: it is for one rank alone.
    """

    def begin(self) -> None:
        """Begins a flat parameter, before its first new values are sent."""

    def send(self, chunk: Chunk, values: Tensor, step: int) -> None:
        """Sends a chunk's new values.

        Chunks before it in its flat parameter that were not sent are unchanged; they are sent first.

        Args:
            chunk: one of this rank.
            values: shape (chunk.numel,), in the compute dtype.
            step: the step that made them.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def start(self, flat: int, step: int) -> None:
        """Sends the rest of a flat parameter, and starts to receive what other ranks made of it.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def finish(self, flat: int) -> None:
        """Makes what is queued on the device from now on see all new values of a flat parameter.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def wait(self) -> None:
        """Makes the host wait for what `finish` made only the device wait for.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def abandon(self) -> None:
        """Waits for what is under way, successful or not."""


class FlatGather(Exchange):
    """All-gathers flat parameters that stay on the device, in place. Who uses one waits for it.

    Args:
        layout: of the parameters.
        flats: the model's flat parameters. This rank's shard has its new values when `start` is called.
        comm: the ranks that share them.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor], comm: Communicator) -> None:
        self._layout = layout
        self._flats = flats
        self._comm = comm
        self._works: dict[int, Work] = {}

    def start(self, flat: int, step: int) -> None:
        whole, numel = self._flats[flat], self._layout.shard_numel(flat)
        if numel:
            shard = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
            self._works[flat] = self._comm.all_gather_into_tensor(shard, whole)

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
        params: the 16-bit parameters that this rank keeps.
        buffer: memory of the region `EXCHANGED`.
        comm: the ranks that keep the same parameters.
    """

    def __init__(self, layout: Layout, params: ParamStore, buffer: Tensor, comm: Communicator) -> None:
        self._layout = layout
        self._params = params
        self._comm = comm
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
        """Sends the rest of a flat parameter, and receives all new values of it before it returns.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self._send_up_to(flat, self._layout.shard_numel(flat), step)
        self._receive(step)

    def abandon(self) -> None:
        if self._under_way is not None:
            with suppress(RankError):
                self._under_way[0].wait()
        self._under_way = None

    def _send_up_to(self, flat: int, stop: int, step: int) -> None:
        """Sends this rank's elements up to `stop` in its shard. Their values in the store are current."""
        while self._sent < stop:
            chunk = self._chunks.get((flat, self._layout.rank * self._layout.shard_numel(flat) + self._sent))
            if chunk is None:  # behind the end of the last shard, or nothing but a gap
                self._launch(flat, None, step)
                continue
            with self._params.lease(chunk.index, Use.READ, step=0) as values:
                self._launch(flat, values, step)

    def _launch(self, flat: int, values: Tensor | None, step: int) -> None:
        """Sends `values` for the next elements of this rank's shard; None: zeros."""
        self._receive(step)
        rows = self._rows(flat, self._sent)
        sent = rows[self._comm.rank]
        numel = 0 if values is None else values.numel()
        sent[numel:] = 0
        if values is not None:
            sent[:numel] = values
        self._under_way = (self._comm.all_gather_into_tensor(sent, rows.view(-1)), flat, self._sent)
        self._sent += sent.numel()

    def _receive(self, step: int) -> None:
        """Waits for the collective under way, and writes what it brought to the store."""
        if self._under_way is None:
            return
        work, flat, start = self._under_way
        work.wait()
        self._under_way = None
        numel = self._layout.shard_numel(flat)
        for rank, row in zip(self._layout.replicated_shards, self._rows(flat, start), strict=True):
            chunk = self._chunks.get((flat, rank * numel + start))
            if chunk is not None and rank != self._layout.rank:
                with self._params.lease(chunk.index, Use.OVERWRITE, step=step) as values:
                    values.copy_(row[: chunk.numel])
                    self._params.chunk_updated(chunk, values)

    def _rows(self, flat: int, start: int) -> Tensor:
        """The part of the buffer for elements of all shards from `start` on, shape (replicas, numel)."""
        layout, dtype = self._layout, self._layout.flats[flat].dtype
        numel = min(layout.chunk_numel, layout.shard_numel(flat) - start)
        return self._buffer[: layout.replicas * numel * dtype.itemsize].view(dtype).view(layout.replicas, numel)
