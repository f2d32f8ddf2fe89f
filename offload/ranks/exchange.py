"""New parameters between ranks: each rank makes those of its own shards."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from offload.errors import RankError
from offload.layout import Chunk, Layout
from offload.ranks import gathers
from offload.ranks.communicator import Communicator, Work
from offload.ranks.gathers import Gather, Gathers
from offload.regions import Region
from offload.storage.chunk_cache import Use
from offload.storage.param_store import ParamStore
from offload.tiers import Tier

EXCHANGED = "new parameters of replicas"
TOGETHER = "new parameters that travel together"


def regions(layout: Layout, communication: Tier, together_bytes: int | None) -> list[Region]:
    """What the Exchange reserves.

    Args:
        layout: of the parameters.
        communication: the tier whose memory the tensors of collectives are in.
        together_bytes: the most that travel together where parameters stay on the device; None: they do not stay.
    """
    if together_bytes is not None:
        sizes = [layout.padded_numel(flat.index) * flat.dtype.itemsize for flat in layout.flats]
        return gathers.regions(TOGETHER, sizes, together_bytes, communication) if layout.ranks > 1 else []
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

    def send_rest(self) -> None:
        """Sends what `start` has kept back to send it with others. All ranks call it at the same place.

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
    """All-gathers flat parameters that stay on the device, small ones together. Who uses one waits for it.

    Args:
        layout: of the parameters.
        flats: the model's flat parameters. This rank's shard has its new values when `start` is called.
        gathers: of the ranks that share them.
        rank: this one.

    Attributes:
        under_way: by flat parameter, what brings it. It stays until `wait`.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor], gathers: Gathers, rank: int) -> None:
        self._layout = layout
        self._flats = flats
        self._gathers = gathers
        self._rank = rank
        self._kept: list[int] = []  # started, to be sent with others
        self.under_way: dict[int, Work] = {}

    def start(self, flat: int, step: int) -> None:
        if self._layout.shard_numel(flat):
            if sum(map(self._nbytes, self._kept)) + self._nbytes(flat) > self._gathers.room:
                self.send_rest()
            self._kept.append(flat)

    def _nbytes(self, flat: int) -> int:
        return self._flats[flat].numel() * self._flats[flat].element_size()

    def send_rest(self) -> None:
        kept, self._kept = self._kept, []
        for numbers, work in self._gathers.launch([self._shard_of(flat) for flat in kept]):
            self.under_way.update((kept[number], work) for number in numbers)

    def _shard_of(self, flat: int) -> Gather:
        whole, numel = self._flats[flat], self._layout.shard_numel(flat)
        return whole[self._rank * numel : (self._rank + 1) * numel], whole

    def finish(self, flat: int) -> None:
        assert flat not in self._kept
        if flat in self.under_way:
            self.under_way[flat].wait_on_device()

    def wait(self) -> None:
        for flat in list(self.under_way):
            self.under_way[flat].wait()
            del self.under_way[flat]

    def abandon(self) -> None:
        self._kept.clear()
        for work in self.under_way.values():
            with suppress(RankError):
                work.wait()
        self.under_way.clear()


class Windows:
    """Of which elements new values travel together between ranks that keep the same parameters.

    A window is the same elements of all shards of a flat parameter: `chunk_numel` of each, or what is left of a tile.

    Args:
        layout: of the parameters.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._chunks: dict[int, list[Chunk]] = {flat.index: [] for flat in layout.flats}
        for chunk in sorted(layout.param_chunks, key=lambda chunk: chunk.start):
            self._chunks[chunk.flat].append(chunk)

    def is_one(self, chunk: Chunk) -> bool:
        """Whether a window is what a chunk has of its shard: those of whole parameters are of other sizes."""
        return not self._layout.flats[chunk.flat].is_whole

    def numel(self, flat: int, start: int) -> int:
        """The elements of each shard in the window that begins at element `start` of the shards of a flat parameter."""
        numel = min(self._layout.chunk_numel, self._layout.shard_numel(flat) - start)
        if tile := self._layout.tile_of(flat) // self._layout.ranks:
            numel = min(numel, tile - start % tile)
        return numel

    def parts(self, flat: int, rank: int, first: int, numel: int) -> Iterator[tuple[Chunk, int, int, int]]:
        """The chunks that a window touches.

        Args:
            flat: the number of the flat parameter.
            rank: whose shard.
            first: where the window begins in the shard.
            numel: its elements.

        Yields:
            A chunk, where the part begins in it, where in the window, and the elements of the part.
        """
        begin = rank * self._layout.shard_numel(flat) + first
        chunks = self._chunks[flat]
        for chunk in chunks[max(bisect(chunks, begin, key=lambda chunk: chunk.start) - 1, 0) :]:
            low, high = max(chunk.start, begin), min(chunk.start + chunk.numel, begin + numel)
            if chunk.start >= begin + numel:
                return
            if low < high:
                yield chunk, low - chunk.start, low - begin, high - low


class ReplicaExchange(Exchange):
    """Sends new parameters to the ranks that keep the same parameters in their tiers, and receives theirs.

    With replicas, each shard group keeps all parameters, and the ranks at one place in these groups exchange what each
    of them made. At stages 1 and 2 with streamed parameters every rank keeps all of them. What other ranks make arrives
    here as copies (layout.py), one window (`Windows`) at a time, which are a chunk of each shard, while Adam makes this
    rank's next chunk. Chunks of whole parameters are of other sizes: all windows of such a flat are sent when its last
    chunk is made.

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
        self._windows = Windows(layout)
        self._sent = 0  # elements of each shard of the flat that has begun
        self._under_way: tuple[Work, int, int] | None = None

    def begin(self) -> None:
        self._sent = 0

    def send(self, chunk: Chunk, values: Tensor, step: int) -> None:
        if not self._windows.is_one(chunk):
            return
        self._send_up_to(chunk.flat, chunk.start - self._layout.shard_range(chunk.flat)[0], step)
        row = self._next_row(chunk.flat, step)
        row[: chunk.numel] = values
        row[chunk.numel :] = 0
        self._launch(chunk.flat)

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
            row = self._next_row(flat, step)
            row.zero_()  # gaps, and what is behind the end of the last shard
            for chunk, start, at, numel in self._windows.parts(flat, self._layout.rank, self._sent, len(row)):
                with self._params.lease(chunk.index, Use.READ, step=0) as values:
                    row[at : at + numel] = values[start : start + numel]
            self._launch(flat)

    def _next_row(self, flat: int, step: int) -> Tensor:
        """Where this rank's elements of the next window go, when the window before has been received."""
        self._receive(step)
        return self._rows(flat, self._sent)[self._comm.rank]

    def _launch(self, flat: int) -> None:
        """Sends the next window."""
        rows = self._rows(flat, self._sent)
        self._under_way = (self._comm.all_gather_into_tensor(rows[self._comm.rank], rows.view(-1)), flat, self._sent)
        self._sent += rows.shape[1]

    def _receive(self, step: int) -> None:
        """Waits for the collective under way, and writes what it brought to the store."""
        if self._under_way is None:
            return
        work, flat, first = self._under_way
        work.wait()
        self._under_way = None
        for rank, row in zip(self._layout.replicated_shards, self._rows(flat, first), strict=True):
            for chunk, start, at, numel in (
                self._windows.parts(flat, rank, first, len(row)) if rank != self._layout.rank else ()
            ):
                use = Use.OVERWRITE if numel == chunk.numel else Use.UPDATE
                with self._params.lease(chunk.index, use, step=step) as values:
                    values[start : start + numel] = row[at : at + numel]
                    if start + numel == chunk.numel:
                        self._params.chunk_updated(chunk, values)

    def _rows(self, flat: int, start: int) -> Tensor:
        """The part of the buffer for elements of all shards from `start` on, shape (replicas, numel)."""
        layout, dtype, numel = self._layout, self._layout.flats[flat].dtype, self._windows.numel(flat, start)
        return self._buffer[: layout.replicas * numel * dtype.itemsize].view(dtype).view(layout.replicas, numel)
