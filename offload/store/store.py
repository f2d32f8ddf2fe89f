"""The only mover of bytes between RAM and the swap files.

A chunk is used through a lease. Chunks that the plan keeps in RAM have buffers of their own and never move; the
others pass through a few constant-size buffers: announced with `expect`, read ahead while there are free buffers,
leased, released dirty, written behind. Which copies exist is written in residency.py, and nowhere else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from offload.errors import ClosedError
from offload.io.engine import IOFuture
from offload.layout import Chunk
from offload.store.arena import Arena
from offload.store.residency import Residency, ResidencyTable
from offload.store.slots import sections, slot_bytes
from offload.store.stripes import Stripes
from offload.timeline import WAITS, Timeline

_WAITS_FOR = {
    Residency.READING: "wait for read",
    Residency.WRITING: "wait for write",
    Residency.LEASED: "wait for lease",
}
"""By what it finds; otherwise it waits for a buffer, until some other chunk is written."""


@dataclass
class Lease:
    """The right to use one chunk's states: fp32 CPU tensors of shape (chunk.numel,).

    `dirty`: set by whoever writes to them.
    """

    chunk: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    dirty: bool = False

    def states(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class Store:
    """The states of all chunks.

    Args: kept: chunks that stay in RAM; in_flight: buffers for the others; slots: their swap file, None if all
    are kept. The first lease of a chunk finds zeros.
    A failure of the disk is raised by the call that meets it and by every later one.
    """

    def __init__(
        self,
        chunks: Collection[Chunk],
        kept: frozenset[int],
        in_flight: int,
        arena: Arena,
        slots: Stripes | None,
        timeline: Timeline,
    ) -> None:
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._kept = kept
        self._slots = slots
        self._timeline = timeline
        self._table = ResidencyTable(len(self._chunks))
        streamed = [chunk for chunk in chunks if chunk.index not in kept]
        largest = max((slot_bytes(chunk.numel) for chunk in streamed), default=0)
        self._free = [arena.carve(largest) for _ in range(in_flight if streamed else 0)]
        self._buffers = {index: arena.carve(slot_bytes(self._chunks[index].numel)) for index in sorted(kept)}
        self._written_at: dict[int, int] = {}
        self._ahead: deque[int] = deque()
        self._moving: dict[int, None] = {}
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def expect(self, order: Iterable[int]) -> None:
        """Announces the leases to come, in order; reading ahead begins at once."""
        with self._changed:
            self._check()
            self._ahead = deque(chunk for chunk in order if chunk not in self._kept)
            self._read_ahead()

    @contextmanager
    def lease(self, chunk: int, *, step: int) -> Iterator[Lease]:
        """Waits until `chunk` is in RAM and lends it; left dirty, it is written behind.

        Args: step: what a dirty chunk is the result of; goes into its slot's header.
        """
        with self._timeline.span("wait_s"), self._changed:
            self._take(chunk)
            buffer = self._buffers[chunk]
        lease = Lease(chunk, *sections(buffer, self._chunks[chunk].numel))
        try:
            yield lease
        finally:
            with self._changed:
                self._put(lease, step)

    def drain(self) -> None:
        """Waits until nothing is under way."""
        with self._timeline.span("wait_s"), self._changed:
            while self._moving and self._failure is None:
                self._wait_for_transfer(next(iter(self._moving)))
            self._check()

    def check(self) -> None:
        """Raises the failure of a transfer in the background, if there was one."""
        with self._changed:
            self._check()

    def close(self) -> None:
        """Waits for transfers under way, successful or not; every later lease raises ClosedError."""
        with self._changed:
            self._ahead.clear()
            self._changed.wait_for(lambda: not self._moving)
            self._failure = self._failure or ClosedError("the optimizer is closed: make a new one")
            self._changed.notify_all()

    # Everything below is called with the lock held.

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take(self, chunk: int) -> None:
        """Waits until the chunk has a buffer in RAM with its data, and moves it to LEASED."""
        if not self._is_ready(chunk):
            reason = _WAITS_FOR.get(self._table[chunk], "wait for buffer")
            with self._timeline.event(WAITS, reason, chunk=chunk, tier="nvme"):
                self._changed.wait_for(lambda: self._is_ready(chunk))
        self._table.move(chunk, Residency.LEASED)
        if chunk in self._ahead:
            self._ahead.remove(chunk)
        self._read_ahead()

    def _is_ready(self, chunk: int) -> bool:
        """Whether the chunk has a buffer in RAM with its data; does what can be done now to bring it there."""
        self._check()
        state = self._table[chunk]
        if state in (Residency.CLEAN, Residency.DIRTY):
            return True
        if state in (Residency.EMPTY, Residency.STORED) and chunk not in self._buffers and not self._free:
            self._drop_one()
        if state is Residency.EMPTY and (chunk in self._kept or self._free):
            if chunk not in self._kept:
                self._buffers[chunk] = self._free.pop()
                self._buffers[chunk].zero_()
            return True
        if state is Residency.STORED and self._free:
            self._read(chunk)
        return False

    def _wait_for_transfer(self, chunk: int) -> None:
        reason = _WAITS_FOR.get(self._table[chunk], "wait for buffer")
        with self._timeline.event(WAITS, reason, chunk=chunk, tier="nvme"):
            self._changed.wait_for(lambda: self._failure is not None or chunk not in self._moving)

    def _put(self, lease: Lease, step: int) -> None:
        chunk = lease.chunk
        if chunk not in self._kept and not lease.dirty and chunk in self._written_at:
            self._table.move(chunk, Residency.CLEAN)
            self._drop(chunk)
        else:
            self._table.move(chunk, Residency.DIRTY)
            if chunk not in self._kept:
                self._write(chunk, step)
        self._read_ahead()
        self._changed.notify_all()

    def _drop(self, chunk: int) -> None:
        self._table.move(chunk, Residency.STORED)
        self._free.append(self._buffers.pop(chunk))

    def _drop_one(self) -> None:
        """Takes the buffer of a chunk that was read ahead, for one that is needed now."""
        for chunk in reversed(self._buffers):
            if self._table[chunk] is Residency.CLEAN:
                self._drop(chunk)
                self._ahead.appendleft(chunk)
                return

    def _read_ahead(self) -> None:
        """Reads what is expected next, as far as there are free buffers."""
        while self._free and self._ahead and self._failure is None:
            state = self._table[self._ahead[0]]
            if state in (Residency.WRITING, Residency.LEASED):
                # Still busy with the step before. What follows it can wait: it is used later.
                return
            chunk = self._ahead.popleft()
            if state is Residency.STORED:
                self._read(chunk)

    def _read(self, chunk: int) -> None:
        self._table.move(chunk, Residency.READING)
        self._buffers[chunk] = self._free.pop()
        future = self._swap.read(chunk, self._bytes(chunk), step=self._written_at[chunk])
        self._follow(future, chunk, Residency.CLEAN, "nvme_read_bytes")

    def _write(self, chunk: int, step: int) -> None:
        self._table.move(chunk, Residency.WRITING)
        self._written_at[chunk] = step
        future = self._swap.write(chunk, self._bytes(chunk), step=step)
        self._follow(future, chunk, Residency.STORED, "nvme_written_bytes")

    def _follow(self, future: IOFuture, chunk: int, then: Residency, counter: str) -> None:
        self._moving[chunk] = None
        future.add_done_callback(partial(self._moved, chunk, then, counter))

    def _moved(self, chunk: int, then: Residency, counter: str, future: IOFuture) -> None:
        """Called in a thread of the engine when a transfer has ended."""
        with self._changed:
            del self._moving[chunk]
            try:
                self._timeline.count(counter, future.result())
                self._table.move(chunk, then)
                if then is Residency.STORED:
                    self._free.append(self._buffers.pop(chunk))
                self._read_ahead()
            except BaseException as error:
                # A future's callback would swallow it. The first failure is the cause; others follow from it.
                self._failure = self._failure or error
            self._changed.notify_all()

    def _bytes(self, chunk: int) -> Tensor:
        return self._buffers[chunk][: slot_bytes(self._chunks[chunk].numel)]

    @property
    def _swap(self) -> Stripes:
        if self._slots is None:
            raise AssertionError("a chunk is to be streamed, but there is no swap file")
        return self._slots
