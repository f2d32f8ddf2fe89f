"""How fast a directory's file system reads and writes at once: measured in the moment it takes, or remembered."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

from offload.errors import OffloadError
from offload.io.engine import IOFile, IOFuture
from offload.io.select import AUTO, Settings, nearest_existing, recall, remember
from offload.io.threads import ThreadEngine
from offload.sizes import MIB

PROBE_BYTES = 128 * MIB
TRANSFER_BYTES = 8 * MIB
MUCH_SLOWER = 4
"""A path this many times slower than the fastest is worth a line."""

_log = logging.getLogger("offload")


def weights(paths: Sequence[Path]) -> list[float]:
    """The share that each path should get, as bandwidths in bytes a second; all equal where it cannot be known."""
    if len(paths) == 1:
        return [1.0]
    found = [_bandwidth(path) for path in paths]
    if None in found:
        return [1.0] * len(paths)
    known = [speed for speed in found if speed is not None]
    for path, speed in zip(paths, known, strict=True):
        if MUCH_SLOWER * speed < max(known):
            _log.warning(
                "%s moves %.2f GB/s, the fastest path %.2f: it gets that share of the chunks, and is worth leaving out",
                path,
                speed / 1e9,
                max(known) / 1e9,
            )
    return known


def _bandwidth(path: Path) -> float | None:
    known = recall(path)
    if known is not None and known.mixed_bytes_per_s:
        return known.mixed_bytes_per_s
    try:
        speed = measure_mixed(path)
    except (OSError, OffloadError) as error:
        _log.info("%s: its bandwidth cannot be measured: %s", path, error)
        return None
    with contextlib.suppress(OSError, RuntimeError):  # a read-only cache; no home directory
        remember(path, Settings(AUTO, mixed_bytes_per_s=speed))
    return speed


def measure_mixed(path: Path, size: int = PROBE_BYTES) -> float:
    """Bytes a second, both directions together, of half reading and half writing `size` bytes in transfers of 8 MiB.

    The file has no name and is gone afterwards, whatever happens.
    Raises: OSError where the file system has no nameless files, no O_DIRECT or no room; TierIOError.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
    folder = str(nearest_existing(path))
    engine = ThreadEngine()
    try:
        file = engine.adopt(IOFile(folder, os.open(folder, flags, 0o600), direct=True))
        os.posix_fallocate(file.fd, 0, size)
        into, out = (memoryview(mmap.mmap(-1, TRANSFER_BYTES)) for _ in range(2))
        half = range(0, size // 2, TRANSFER_BYTES)
        # Once without a clock: the first write into reserved space is slower than any later one.
        _wait([engine.write(file, start, out) for start in range(0, size, TRANSFER_BYTES)])
        begun = time.perf_counter()
        reads = [engine.read(file, start, into) for start in half]
        writes = [engine.write(file, size // 2 + start, out) for start in half]
        _wait(reads + writes)
        return 2 * len(half) * TRANSFER_BYTES / (time.perf_counter() - begun)
    finally:
        engine.close()


def _wait(futures: list[IOFuture]) -> None:
    for future in futures:
        future.result()
