"""Which engine, with which request size and depth: probed, or measured by `offload bench io` and remembered."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from offload.errors import ConfigError, OffloadError
from offload.io import io_uring, remembered
from offload.io.engine import DEPTH, O_DIRECT, REQUEST_BYTES, IOEngine, IOFuture, aligned_memory
from offload.io.files import LOCAL
from offload.io.io_uring import UringEngine
from offload.io.portable import PortableEngine
from offload.io.threads import ThreadEngine
from offload.sizes import GIB, MIB, PAGE_BYTES

ENGINES: dict[str, Callable[[int, int], IOEngine]] = {
    "uring": UringEngine,
    "threads": ThreadEngine,
    "portable": PortableEngine,
}
"""By name, fastest first."""

AUTO = "auto"
"""The best that works here. Remembered of a file system whose bandwidth alone was measured."""

SECTION = "file_systems"
"""Of what is remembered; by mount point."""

TOGETHER = "drives_together"
"""Of what is remembered; by mount points."""

_log = logging.getLogger("offload")
_told: set[str] = set()


Speed = Annotated[float, Meta(ge=0, lt=1e15)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to use a file system.

    Attributes:
        engine: the engine's name, or "auto".
        request_bytes: the most that one request moves.
        depth: requests under way for each file.
        mixed_bytes_per_s: what was measured, reading and writing together; 0: not measured.
        read_bytes_per_s, write_bytes_per_s: likewise, each alone.
        measured_at: when, in seconds since 1970.
    """

    engine: Annotated[str, Meta(pattern=r"^(auto|uring|threads|portable)\Z")]
    request_bytes: Annotated[int, Meta(ge=PAGE_BYTES, le=GIB, multiple_of=PAGE_BYTES)] = REQUEST_BYTES
    depth: Annotated[int, Meta(ge=1, le=256)] = DEPTH
    mixed_bytes_per_s: Speed = 0.0
    read_bytes_per_s: Speed = 0.0
    write_bytes_per_s: Speed = 0.0
    measured_at: float = 0.0


class Together(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What several file systems move at once, reading and writing together, in bytes a second.

    Attributes:
        median, lowest, highest: of several measurements.
        measured_at: when, in seconds since 1970.
    """

    median: Speed
    lowest: Speed
    highest: Speed
    measured_at: float = 0.0


def open_engine(name: str, paths: Sequence[Path]) -> IOEngine:
    """Opens an I/O engine.

    With "auto" that is the engine that was measured fastest on the slowest of the paths' file systems. Where nothing
    was measured, it is the first engine that works here; if that is not the first of the list, a line in the log says
    why.

    Args:
        name: of the engine, or "auto".
        paths: where its files will be.

    Raises:
        ConfigError: if an engine that was asked for by name cannot run here.
    """
    known = [settings for settings in map(recall, paths) if settings is not None]
    chosen = min(known, key=lambda settings: settings.mixed_bytes_per_s) if known else Settings(AUTO)
    wanted = chosen.engine if name == AUTO else name
    if wanted == AUTO:
        wanted = next(iter(ENGINES))
    available, reason = io_uring.is_available() if wanted == "uring" else (True, "")
    if not available:
        if name != AUTO:
            raise ConfigError(f'io_engine="uring" cannot run here: {reason}; choose "threads" or "auto"')
        _say_once(f"I/O goes through the thread engine: {reason}")
        wanted = "threads"
    if not hasattr(os, "preadv") and wanted == "threads":
        wanted = "portable"
    return ENGINES[wanted](chosen.request_bytes, chosen.depth)


def recall(path: Path) -> Settings | None:
    """The settings that are remembered for the file system of `path`; None if there are none, or they are too old.

    `path` itself may not exist yet.
    """
    return remembered.recall(SECTION, file_system_of(path), Settings)


def remember(path: Path, settings: Settings) -> Path:
    """Writes down what was measured on the file system of `path`.

    Returns:
        The file in which it stands.

    Raises:
        OSError: if the cache directory cannot be written.
    """
    return remembered.remember(SECTION, file_system_of(path), settings)


def recall_together(systems: Sequence[str]) -> Together | None:
    """What is remembered of several file systems at once; None if there is nothing, or it is too old.

    Args:
        systems: their names, as `file_system_of` has them, in any order.
    """
    return remembered.recall(TOGETHER, _key(systems), Together)


def remember_together(systems: Sequence[str], together: Together) -> Path:
    """Writes down what was measured of several file systems at once.

    Returns:
        The file in which it stands.

    Raises:
        OSError: if the cache directory cannot be written.
    """
    return remembered.remember(TOGETHER, _key(systems), together)


def _key(systems: Sequence[str]) -> str:
    return " + ".join(sorted(systems))


def file_system_of(path: Path) -> str:
    """A name for the file system of `path`: its mount point, since a device's number may change at every start."""
    existing = nearest_existing(path)
    device = _device(existing)
    while existing != existing.parent and _device(existing.parent) == device:
        existing = existing.parent
    return str(existing)


def _device(path: Path) -> int:
    return LOCAL.stat(path, follows=True).st_dev


def nearest_existing(path: Path) -> Path:
    """`path` itself, or the folder that it will be made in."""
    path = path.absolute()
    while not LOCAL.exists(path) and path != path.parent:
        path = path.parent
    return path


def _say_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _log.warning("%s", text)


PROBE_BYTES = 128 * MIB
TRANSFER_BYTES = 8 * MIB
MUCH_SLOWER = 4
"""A path this many times slower than the fastest is worth a line."""


def weights(paths: Sequence[Path]) -> list[float]:
    """The bandwidth of each path in bytes a second, by which they share the chunks; all 1 where one is not known."""
    if len(paths) == 1:
        return [1.0]
    speeds = [_bandwidth(path) for path in paths]
    if None in speeds:
        return [1.0] * len(paths)
    known = [speed for speed in speeds if speed is not None]
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
    with contextlib.suppress(OSError):  # a read-only cache; no home directory
        remember(path, Settings(AUTO, mixed_bytes_per_s=speed))
    return speed


def measure_mixed(path: Path, size: int = PROBE_BYTES) -> float:
    """Measures a file system: half reading and half writing, in transfers of 8 MiB.

    The file has no name and is gone afterwards, whatever happens.

    Args:
        path: a directory on it, which may not exist yet.
        size: of the file, in bytes.

    Returns:
        Bytes a second, both directions together.

    Raises:
        OSError: if the file system has no nameless files, no O_DIRECT or no room.
        TierIOError: if a transfer failed.
    """
    engine = ThreadEngine()
    try:
        file = engine.adopt(LOCAL.open(LOCAL.real(nearest_existing(path)), os.O_TMPFILE | os.O_RDWR | O_DIRECT))
        if not file.direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here", file.path)
        LOCAL.allocate(file, 0, size)
        into, out = (aligned_memory(TRANSFER_BYTES) for _ in range(2))
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
