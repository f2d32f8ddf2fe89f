"""Where `offload bench io` measures: what is checked before anything is written, and a file that leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.cli import machine
from offload.errors import BudgetError, ConfigError, PathError
from offload.sizes import GIB, MIB, format_bytes

SMALLEST_BYTES = 16 * MIB
DEFAULT_BYTES = GIB
PART_BYTES = 256 * MIB
"""What one measurement of the sweep moves at most."""

NEARLY_FULL = 0.9
_WARNINGS = {
    ("tmpfs", "ramfs"): "is kept in memory: this measures RAM, not a drive",
    ("btrfs", "zfs", "bcachefs"): "copies on write and may compress: figures change with age and contents",
    ("overlay", "fuse", "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre"): "is no local drive: others share it",
}


@dataclass(frozen=True)
class Plan:
    """A path that can be measured. Attributes: fs ("ext4"), size (of the file, bytes), warnings."""

    path: Path
    fs: str
    size: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The file that is measured; `direct`: whether O_DIRECT is on."""

    path: Path
    fd: int
    size: int
    direct: bool

    @property
    def name(self) -> str:
        """The file, which has no name of its own, for other processes."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"


def check(path: Path, size: int | None) -> Plan:
    """Looks, and writes nothing. Args: size: bytes; None: 1 GiB, or a quarter of the free space if that is less.

    Raises: PathError for what is no writable directory; ConfigError for a size too small to measure; BudgetError for
    one that does not fit.
    """
    if not path.exists():
        raise PathError(errno.ENOENT, "cannot measure here: there is no such directory; make it first", str(path))
    if not path.is_dir():
        raise PathError(errno.ENOTDIR, "cannot measure here: give a directory on the drive, not a file", str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(errno.EACCES, "cannot measure here: you may not write to this directory", str(path))
    usage = shutil.disk_usage(path)
    if size is None:
        size = min(DEFAULT_BYTES, max(usage.free // 4, SMALLEST_BYTES))
    if size < SMALLEST_BYTES:
        least = format_bytes(SMALLEST_BYTES)
        raise ConfigError(f"--size={format_bytes(size)} is too small to measure: give at least {least}")
    size = size // SMALLEST_BYTES * SMALLEST_BYTES
    needed = 2 * size  # the portable engine has a file of its own
    if needed > usage.free:
        raise BudgetError(
            f"{path}: measuring with --size={format_bytes(size)} needs {format_bytes(needed)}, "
            f"{format_bytes(usage.free)} are free: lower --size, or make room",
            needed=needed,
            available=usage.free,
            option="--size",
        )
    system = machine.file_system(path) or "unknown"
    return Plan(path, system, size, tuple(_warnings(path, system, 1 - usage.free / max(usage.total, 1))))


def _warnings(path: Path, system: str, full: float) -> Iterator[str]:
    for systems, what in _WARNINGS.items():
        if system.split(".")[0] in systems:
            yield f"{path}: {system} {what}"
    if full > NEARLY_FULL:
        yield f"{path}: {full:.0%} full: a nearly full drive writes slower"


@contextlib.contextmanager
def opened(plan: Plan) -> Iterator[Place]:
    """A file of the planned size in the path, with room for all of it, that ends with this process, however it ends.

    Raises: PathError where it cannot be made.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    fd = -1
    try:
        try:
            fd = _nameless(plan.path, flags | os.O_DIRECT)
            direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = _nameless(plan.path, flags)
            direct = False
        os.posix_fallocate(fd, 0, plan.size)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise PathError(error.errno, f"cannot make a file to measure with: {error.strerror}", str(plan.path)) from error
    try:
        yield Place(plan.path, fd, plan.size, direct)
    finally:
        os.close(fd)


def _nameless(path: Path, flags: int) -> int:
    """A descriptor of a new file in `path` that has no name. Raises: OSError (EINVAL: no O_DIRECT here)."""
    try:
        return os.open(path, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        # Some say EINVAL to either flag: the next way finds out which.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    with folder(path) as place:
        return os.open(place / "file", flags | os.O_CREAT | os.O_EXCL, 0o600)


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A new directory in `path` that goes with all that is in it."""
    place = Path(tempfile.mkdtemp(prefix=".offload-bench-io-", dir=path))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
