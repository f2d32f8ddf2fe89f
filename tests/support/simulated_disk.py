"""A disk with a volatile cache: what was not synced may be lost in a power cut, sector by sector, in any order.

Files are real, so locks, sizes and reservations are too; what is simulated is which writes had reached the platter.
"""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict

from offload.io.engine import IOFile, IOFuture, Request
from offload.io.threads import ThreadEngine

SECTOR_BYTES = 512

Sectors = dict[int, list[bytes]]
"""By number: every content that a sector may have after a crash, the durable one first."""


class SimulatedDisk(ThreadEngine):
    """An engine whose `crash` leaves any mixture of what was written since the last sync, torn at 512 bytes."""

    name = "simulated"

    def __init__(self) -> None:
        super().__init__()
        self._volatile: defaultdict[str, Sectors] = defaultdict(dict)
        self._cache = threading.Lock()

    def unsynced(self) -> int:
        """Sectors that a crash could change."""
        with self._cache:
            return sum(len(sectors) for sectors in self._volatile.values())

    def sync(self, file: IOFile) -> IOFuture:
        # Only what had completed before the sync was submitted is durable after it.
        with self._cache:
            before = {number: len(contents) for number, contents in self._volatile[file.path].items()}
        future = super().sync(file)
        future.add_done_callback(lambda done: self._settle(file.path, before) if not done.exception() else None)
        return future

    def renamed(self, old: str, new: str) -> None:
        """What a crash could change of a file, it now changes under another name."""
        with self._cache:
            self._volatile[new] = self._volatile.pop(old, {})

    def crash(self, seed: int) -> None:
        """Cuts the power: closes everything and leaves the files as they may then be found."""
        self.close()
        chance = random.Random(seed)
        for path, sectors in self._volatile.items():
            if not os.path.exists(path):  # removed meanwhile
                continue
            with open(path, "r+b", buffering=0) as plain:
                size = os.fstat(plain.fileno()).st_size
                for number, contents in sectors.items():
                    plain.seek(number * SECTOR_BYTES)
                    plain.write(chance.choice(contents)[: max(size - number * SECTOR_BYTES, 0)])
        self._volatile.clear()

    def _run(self, request: Request) -> None:
        if request.operation == "write":
            with self._cache:
                self._remember(request)
        super()._run(request)

    def _remember(self, request: Request) -> None:
        sectors = self._volatile[request.file.path]
        first = request.offset // SECTOR_BYTES
        new = bytes(request.view)
        with open(request.file.path, "rb", buffering=0) as plain:
            plain.seek(request.offset)
            old = plain.read(len(new)).ljust(len(new), b"\0")
        for n in range(len(new) // SECTOR_BYTES):
            part = slice(n * SECTOR_BYTES, (n + 1) * SECTOR_BYTES)
            sectors.setdefault(first + n, [old[part]]).append(new[part])

    def _settle(self, path: str, before: dict[int, int]) -> None:
        with self._cache:
            sectors = self._volatile[path]
            for number, count in before.items():
                contents = sectors[number]
                del contents[: count - 1]
                if len(contents) == 1:
                    del sectors[number]
