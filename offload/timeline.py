"""What ran and for how long.

Only totals for now: seconds a kind of work and bytes a direction, cheap enough to be always on. They feed
`OffloadZero.stats()`; a recording of single events belongs here too.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timeline:
    """Totals by name, from any thread. Names end in `_s` for seconds and `_bytes` for bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            with self._lock:
                self._totals[name] += elapsed

    def count(self, name: str, amount: int) -> None:
        """Adds `amount` (bytes, or occurrences) to `name`."""
        with self._lock:
            self._counts[name] += amount

    def seconds(self, name: str) -> float:
        with self._lock:
            return self._totals[name]

    def counted(self, name: str) -> int:
        with self._lock:
            return self._counts[name]
