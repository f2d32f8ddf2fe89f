"""The directories of a run: how files are called, and how they are reached.

A path may lead elsewhere later: a relative one when the working directory changes, any other when a directory is moved
or replaced. So a run opens each of its directories once (`Directories`) and reaches what is in them relative to that
descriptor (`Files.within`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import stat
from pathlib import Path
from typing import Any, NamedTuple, Self

from offload.errors import BudgetError, CorruptionError, PathError, ResumeError, missing_parent
from offload.interrupts import is_of_system
from offload.io.engine import IOFile, open_directory, open_nofollow
from offload.io.regular import read_some
from offload.sizes import MIB, PAGE_BYTES, format_bytes
from offload.storage.swap_format import parse_superblock

NEW_SUFFIX = ".new"
"""Ends the temporary name of a swap file that is going to replace another one."""
TEMPORARY = ".offload.new"
"""Ends the name of a file that is being written. Nobody else has files of such names."""
SWAP_NAME = "offload-rank0.swap"
"""Of the first rank, or the only one; `swap_name` of the others."""
COMMIT_NAME = "COMMIT"
RECORD_START = b'{"schema":"offload '
"""How a COMMIT record and a manifest begin."""

_NAME = re.compile(
    r"(?:(?P<kind>manifest|extra)-(?P<run>[0-9a-f]{32})-(?P<step>0|[1-9]\d{0,18})|(?P<swap>offload))"
    r"-rank(?P<rank>0|[1-9]\d{0,4})(?P<type>\.swap|\.json|\.safetensors)(?P<suffix>(?:\.offload)?\.new)?"
)


class FileName(NamedTuple):
    """What the name of a file says. It may be somebody else's: a file is known by its content.

    kind: "swap", "manifest" or "extra"; run_id (32 hex digits) and step: not in the name of a swap file; suffix:
    NEW_SUFFIX, TEMPORARY or "".
    """

    kind: str
    rank: int
    run_id: str
    step: int
    suffix: str


def file_name(name: str) -> FileName | None:
    """What `name` says if files of this library are called so, else None. Not for COMMIT."""
    match = _NAME.fullmatch(name)
    if match is None or (match["type"] == ".swap") != (match["swap"] is not None):
        return None
    suffix = match["suffix"] or ""
    if match["swap"] is None:
        return FileName(match["kind"], int(match["rank"]), match["run"], int(match["step"]), suffix)
    return None if suffix == TEMPORARY else FileName("swap", int(match["rank"]), "", 0, suffix)


def swap_name(rank: int) -> str:
    """The swap file's: each rank has its own, so that a directory can be shared."""
    return f"offload-rank{rank}.swap"


COPIED_BYTES = 64 * MIB
"""Asked of the kernel at once, so that a copy can be interrupted."""
PIECE_BYTES = 4 * MIB
"""Copied at once where the kernel does not."""
_NOT_IN_THE_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def require_file_size(file: str, needed: int, *, option: str = "path", advice: str = "") -> None:
    """Raises: BudgetError if this process may make no file of `needed` bytes.

    Args: option: says where; advice: what helps beside another limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise BudgetError(
            f"{file} needs {format_bytes(needed)}, and the limit of this process is {format_bytes(limit)} a file: "
            f"raise it (ulimit -f){advice and f', or {advice}'}",
            needed=needed,
            available=limit,
            option=option,
        )


def leads_to(file: IOFile, name: str, dir_fd: int | None = None, *, follow_symlinks: bool = False) -> bool:
    """Whether `name` still leads to an open file or directory. Raises: PathError if that cannot be told."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks), os.fstat(file.fd))
    except FileNotFoundError:
        return False
    except OSError as error:
        if not is_of_system(error):
            raise
        raise PathError(error.errno, f"cannot be looked at: {error.strerror}", file.path) from error


class Directories:
    """Directories that are held open; see the top of this file. A forked child holds none of its parent's."""

    def __init__(self) -> None:
        self._held: dict[Path, IOFile] = {}

    def hold(self, path: Path) -> int:
        """Opens the directory, if it is not. Returns its descriptor. Raises: PathError."""
        path = path.absolute()
        if path not in self._held:
            try:
                self._held[path] = open_directory(str(path))
            except OSError as error:
                if not is_of_system(error):
                    raise
                raise PathError(error.errno, f"cannot be opened: {error.strerror}", str(path)) from error
        return self._held[path].fd

    def __contains__(self, path: Path) -> bool:
        return path.absolute() in self._held

    def at(self, path: Path) -> tuple[str, int | None]:
        """The name of `path`, and the `dir_fd` to which it is relative, as the functions of `os` take them."""
        path = path.absolute()
        for directory in (path, *path.parents):
            if directory in self._held:
                return str(path.relative_to(directory)), self._held[directory].fd
        return str(path), None

    def require_here(self, path: Path) -> None:
        """Whether the name of a directory that is held still leads to it. Raises: PathError."""
        path = path.absolute()
        if not leads_to(self._held[path], str(path), follow_symlinks=True):
            raise PathError(
                errno.ESTALE,
                "is not the directory that this run opened, which was moved or removed: move it back and commit again; "
                "what was committed is still in it",
                str(path),
            )

    def close(self) -> None:
        """May be called again."""
        for file in self._held.values():
            file.close()


class Files:
    """What committing asks of a file system. Every method raises OSError; no effect is durable before a sync.

    The tests have others, one of which loses power.
    """

    # What a subclass has besides is shared by all that `within` makes of it.
    __slots__ = ("__dict__", "_held")
    _held: Directories | None

    def __new__(cls, *args: Any, **named: Any) -> Self:
        made = super().__new__(cls)
        made._held = None
        return made

    def within(self, held: Directories) -> Self:
        """The same, with what is in directories that are held reached through these."""
        made = type(self).__new__(type(self))
        made.__dict__ = self.__dict__
        made._held = held
        return made

    def _at(self, path: Path) -> tuple[str, int | None]:
        return (str(path), None) if self._held is None else self._held.at(path)

    def create(self, path: Path) -> IOFile:
        """Makes a file of mode 0600 where there is none, to write to; follows no link."""
        name, within = self._at(path)
        return open_nofollow(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=within, path=str(path))

    def write(self, file: IOFile, data: memoryview) -> None:
        """Appends all of `data`."""
        while data:
            data = data[os.write(file.fd, data) :]

    def sync(self, file: IOFile) -> None:
        """Makes the file's content durable. If it fails, the content is lost, whatever a second call says."""
        os.fsync(file.fd)

    def close(self, file: IOFile) -> None:
        file.close()

    def rename(self, old: Path, new: Path) -> None:
        (source, source_fd), (target, target_fd) = self._at(old), self._at(new)
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def remove(self, path: Path) -> None:
        """Removes a file, not what it links to; one that is not there is fine."""
        name, within = self._at(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=within)

    def copy(self, source: Path, target: IOFile, offset: int, length: int) -> None:
        """Writes a range of the file `source` to the same offset of `target`, which ends before it.

        Where the file system can, both share the blocks until one of them is written to.
        """
        # O_DIRECT or not, what a swap file's engine has written is seen here: it was synced.
        with self.open(source, os.O_RDONLY) as file:
            end = offset + length
            while offset < end:
                done = _copy_some(file.fd, target.fd, offset, min(end - offset, COPIED_BYTES))
                if not done:
                    raise OSError(errno.EIO, f"{source} ends at {offset}, before what is to be copied does")
                offset += done

    def make_directory(self, path: Path) -> None:
        """Of mode 0700; one that is there is fine."""
        name, within = self._at(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=within)

    def remove_directory(self, path: Path) -> None:
        """If nothing is in it; one that is not there, or not empty, is fine."""
        name, within = self._at(path)
        try:
            os.rmdir(name, dir_fd=within)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def sync_directory(self, path: Path) -> None:
        """Makes what was made, renamed and removed in `path` durable."""
        with self._open_directory(path) as directory:
            os.fsync(directory.fd)

    def names(self, directory: Path) -> list[str]:
        with self._open_directory(directory) as opened:
            return os.listdir(opened.fd)

    def is_directory(self, path: Path) -> bool:
        """Whether it is one, and not a link to one."""
        name, within = self._at(path)
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read(self, path: Path, most: int) -> bytes:
        """The content of a regular file, or the first `most + 1` bytes of it; follows no link."""
        with self.open(path, os.O_RDONLY) as opened:
            return read_some(opened, most)

    def open(self, path: Path, flags: int) -> IOFile:
        """Opens a file that is there; follows no link and waits for nobody."""
        name, within = self._at(path)
        return open_nofollow(name, flags, dir_fd=within, path=str(path))

    def space(self, path: Path) -> tuple[int, int]:
        """The device that a directory is on, and bytes that are free there."""
        with self._open_directory(path) as directory:
            disk = os.fstatvfs(directory.fd)
            return os.fstat(directory.fd).st_dev, disk.f_bavail * disk.f_frsize

    def _open_directory(self, path: Path) -> IOFile:
        name, within = self._at(path)
        return open_directory(name, dir_fd=within)


def _copy_some(source: int, target: int, offset: int, length: int) -> int:
    """Copies up to `length` bytes, in the kernel if that can. Returns: how many; 0 at the end of the source."""
    done = 0
    if hasattr(os, "copy_file_range"):
        try:
            done = os.copy_file_range(source, target, length, offset, offset)
        except OSError as error:
            if error.errno not in _NOT_IN_THE_KERNEL:
                raise
    if not done:  # also some file systems' word for "not here"
        data = os.pread(source, min(length, PIECE_BYTES), offset)
        done = os.pwrite(target, data, offset) if data else 0
    if hasattr(os, "posix_fadvise"):
        # It was read once, and pushes nothing else out of the page cache.
        os.posix_fadvise(source, offset, done, os.POSIX_FADV_DONTNEED)
    return done


LOCAL = Files()


def check_directory(path: Path, *, resumes: bool = False) -> None:
    """Checks that `path` is, or can be made, the directory of a run; writes nothing.

    Args: resumes: whether it may hold a commit.

    Raises: PathError, ResumeError.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        parent = path.parent
        if not parent.is_dir():
            raise PathError(errno.ENOENT, missing_parent(path), str(path)) from None
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PathError(errno.EACCES, f"its parent directory {parent} is not writable", str(path)) from None
        return
    except OSError as error:
        if not is_of_system(error):
            raise
        why = f"cannot be looked at: {error.strerror}"
        if isinstance(error, NotADirectoryError):
            file = next(above for above in reversed(path.parents) if not above.is_dir())
            why = f"{file} is a file and no directory: give another path"
        raise PathError(error.errno, why, str(path)) from error
    if stat.S_ISLNK(mode):
        raise PathError(errno.ELOOP, f"is a symlink: give the directory itself, {os.path.realpath(path)}", str(path))
    if not stat.S_ISDIR(mode):
        raise PathError(errno.ENOTDIR, "is not a directory: give a directory for the swap files", str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(errno.EACCES, "is not writable", str(path))
    if not resumes and holds_commit(path):
        _require_own_record(path)
        raise ResumeError(
            f"{path} holds a committed run: give resume=True to continue it, choose another path, or remove it with "
            f"`offload remove {path}`"
        )


def replaceable_in(path: Path) -> Path | None:
    """The directory, `path` or the one that it is in, in which any user of the machine may replace what this run has.

    None if there is none: with the sticky bit, as /tmp has it, only the owner of a file or directory may rename it. A
    directory of this user's own is as its owner wants it.
    """
    for directory in (path, path.parent):
        try:
            info = os.stat(directory)
        except OSError:
            continue
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX and info.st_uid != os.geteuid():
            return directory
    return None


def _require_own_record(path: Path) -> None:
    """Raises: ResumeError if what is called COMMIT there is none, or cannot be read."""
    try:
        is_own = LOCAL.read(path / COMMIT_NAME, len(RECORD_START)).startswith(RECORD_START)
    except FileNotFoundError:
        return
    except OSError:
        is_own = False
    if not is_own:
        raise ResumeError(
            f"{path / COMMIT_NAME} is no record of a commit, or a damaged one: move it away, or choose another path"
        )


def holds_commit(path: Path, files: Files = LOCAL) -> bool:
    """Whether a committed run has, or may have, a file here. Its COMMIT record is in rank 0's first directory only."""
    try:
        names = files.names(path)
    except OSError:
        return False
    if COMMIT_NAME in names:
        return True
    found = {(name.run_id, name.rank) for name in map(file_name, names) if name and name.kind == "manifest"}
    decided_here = _run_and_stripe(path, 0, files)
    own = None if decided_here is None or decided_here[1] else decided_here[0]
    return any(
        run != own and (known := _run_and_stripe(path, rank, files)) is not None and known[0] == run
        for run, rank in found
    )


def _run_and_stripe(path: Path, rank: int, files: Files) -> tuple[str, int] | None:
    """The run and the stripe of a rank's swap file. A damaged one counts, too: this is only used to refuse."""
    try:
        page = files.read(path / swap_name(rank), PAGE_BYTES)[:PAGE_BYTES]
        block = parse_superblock(page, str(path), is_whole=False)
    except (OSError, CorruptionError, ResumeError):
        return None
    return block.run_id, block.stripe[0]
