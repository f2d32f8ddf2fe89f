"""The chunks of a run over several directories: each a swap file of its own, each with its share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from offload.interrupts import result_of, uninterrupted
from offload.io.engine import IOEngine, IOFuture
from offload.profiling import Timeline
from offload.storage.directories import check_directory
from offload.storage.files import Directories
from offload.storage.swap_file import Record, SlotFile, new_run_id


def assign(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The path of each chunk, by number: pure, so that a plan and a run agree.

    Args: sizes: bytes of each chunk, in the order of a step; weights: bandwidth of each path, in any unit, positive.
    Each chunk goes to the path that would be done with it first. So every path has its share of any stretch of the
    order, not only of the whole, and all of them work at all times.
    """
    loads = [0.0] * len(weights)
    chosen = []
    for size in sizes:
        path = min(range(len(weights)), key=lambda number: ((loads[number] + size) / weights[number], number))
        loads[path] += size
        chosen.append(path)
    return chosen


class Stripes:
    """The slots of all chunks, found by chunk.

    Args: directories: one or more, all different; weights: their bandwidths; records: what each chunk holds; kept:
    those that seldom move; places, committed: as SlotFile; resumed: the files of this run are there: its id, and the
    path of each committed chunk; rank: whose; is_aside: this run continues another one in files of its own; run_id: 16
    bytes, of one that begins where somebody has looked that no commit is, or that continues another; None: a new one;
    within: as SlotFile.
    Attributes: run_id, 16 bytes; chosen: the number of each chunk's directory; within.
    Raises: as SlotFile, naming the directory; then nothing is left behind in any of them.
    """

    def __init__(
        self,
        engine: IOEngine,
        directories: Sequence[Path],
        weights: Sequence[float],
        records: Sequence[Record],
        timeline: Timeline | None = None,
        kept: Collection[int] = (),
        *,
        places: int = 1,
        committed: int | None = None,
        resumed: tuple[bytes, Sequence[int]] | None = None,
        rank: int = 0,
        is_aside: bool = False,
        run_id: bytes | None = None,
        within: Directories | None = None,
    ) -> None:
        is_known = is_aside or resumed is not None or run_id is not None
        for directory in directories:
            check_directory(directory, resumes=is_known)
        chosen = assign([record.nbytes for record in records], weights)
        if resumed is not None:
            chosen[: len(resumed[1])] = resumed[1]
        self.run_id = (run_id or new_run_id()) if resumed is None else resumed[0]
        self.chosen = tuple(chosen)
        self.within = Directories() if within is None else within
        self._files: list[SlotFile] = []
        self._of: dict[int, SlotFile] = {}
        self._syncs: list[IOFuture] = []
        with ExitStack() as undo:
            for number, directory in enumerate(directories):
                # The chunks that move lie side by side: a drive reads on faster than it skips.
                held = [chunk for chunk, path in enumerate(chosen) if path == number]
                held.sort(key=lambda chunk: chunk in kept)
                stripe = (number, len(directories))
                file = SlotFile(
                    engine,
                    directory,
                    records,
                    places,
                    held=held,
                    run_id=self.run_id,
                    stripe=stripe,
                    committed=committed,
                    resumes=resumed is not None,
                    timeline=timeline,
                    rank=rank,
                    is_aside=is_aside,
                    is_known=is_known,
                    within=self.within,
                )
                undo.callback(file.abandon)
                self._files.append(file)
                self._of |= dict.fromkeys(held, file)
            undo.pop_all()

    @property
    def paths(self) -> tuple[str, ...]:
        """The swap files."""
        return tuple(file.path for file in self._files)

    def write(self, chunk: int, buffer: Tensor, *, step: int, place: int = 0) -> IOFuture:
        """See SlotFile.write."""
        return self._of[chunk].write(chunk, buffer, step=step, place=place)

    def read(self, chunk: int, buffer: Tensor, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        """See SlotFile.read."""
        return self._of[chunk].read(chunk, buffer, step=step, place=place, checksum=checksum)

    def checksum(self, chunk: int) -> int:
        """See SlotFile.checksum."""
        return self._of[chunk].checksum(chunk)

    def sync(self) -> None:
        """Makes durable, in all files, what was written before.

        Raises: TierIOError, also that of an earlier call which was interrupted, for a disk says it once; nothing after
        that is trusted.
        """
        for future in self._syncs:
            result_of(future)
        self._begin_syncs()
        for future in self._syncs:
            result_of(future)

    @uninterrupted
    def _begin_syncs(self) -> None:
        self._syncs = [file.sync() for file in self._files]

    def require_here(self) -> None:
        """See SlotFile.require_here."""
        for file in self._files:
            file.require_here()

    def keep(self) -> None:
        """See SlotFile.keep."""
        for file in self._files:
            file.keep()

    def took_place(self) -> None:
        """See SlotFile.took_place."""
        for file in self._files:
            file.took_place()

    def close(self) -> None:
        for file in self._files:
            file.close()
