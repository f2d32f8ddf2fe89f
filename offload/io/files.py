"""The file system: every call of it that a run makes is a method of `Files`, but for the transfers of an I/O engine.

A path may lead elsewhere later: a relative one when the working directory changes, any other when a directory is moved
or replaced. So a run has `Files` of its own, which hold its directories open (`hold`): what is in a directory that is
held is reached relative to its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from offload.errors import OffloadError, PathError
from offload.interrupts import is_of_system
from offload.io.engine import O_DIRECT, PRIVATE, IOFile, open_directory, open_follow, open_nofollow, reopened
from offload.sizes import MIB

BUSY = (errno.EWOULDBLOCK, errno.EACCES)
"""What `flock` says where another open file has the lock."""
COPIED_BYTES = 64 * MIB
"""Asked of the kernel at once, so that a copy can be interrupted."""
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NOT_IN_THE_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@contextlib.contextmanager
def unusable(why: str, path: Path | str, but: Container[int] = ()) -> Iterator[None]:
    """A context that turns an OSError of the system into a PathError.

    Args:
        why: "cannot be opened", or what else is the matter.
        path: the file or directory.
        but: the numbers of errors that stay what they are.

    Raises:
        PathError: the operating system refused.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadError) or error.errno in but or not is_of_system(error):
            raise
        raise PathError(error.errno, f"{why}: {error.strerror}", str(path)) from error


class Host(NamedTuple):
    """A machine, for as long as it runs.

    Attributes:
        name: what it is called.
        boot: the id that the kernel has since it started; "" where it tells none.
    """

    name: str
    boot: str


class Files:
    """A file system. The tests have others, one of which loses power.

    Every method raises OSError, unless it says otherwise. No effect is durable before a sync. Links are followed only
    where a method says so. A forked child holds none of its parent's directories.

    Attributes:
        patience_s: for how many seconds `lock` waits for the lock of a process that is gone.
        piece_bytes: how much is copied at once where the kernel does not copy.
    """

    patience_s = 30.0
    piece_bytes = 4 * MIB

    def __init__(self) -> None:
        self._held: dict[Path, IOFile] = {}

    # Directories that are held.

    def hold(self, directory: Path) -> int:
        """Opens the directory, and holds it open; does nothing if it is held already.

        Returns:
            Its descriptor.

        Raises:
            PathError: if it cannot be opened.
        """
        path = directory.absolute()
        if path not in self._held:
            with unusable("cannot be opened", path):
                self._held[path] = open_directory(str(path))
        return self._held[path].fd

    def holds(self, directory: Path) -> bool:
        return directory.absolute() in self._held

    def require_here(self, directory: Path) -> None:
        """Requires that the name of a directory that is held still leads to it.

        Raises:
            PathError: if it was moved or removed.
        """
        path = directory.absolute()
        if not _leads_to(self._held[path], str(path), None, follows=True):
            raise PathError(
                errno.ESTALE,
                "is not the directory that this run opened, which was moved or removed: move it back and commit again; "
                "what was committed is still in it",
                str(path),
            )

    def let_go(self) -> None:
        """Closes the directories that are held. May be called again."""
        for file in self._held.values():
            file.close()
        self._held.clear()

    def _at(self, path: Path) -> tuple[str, int | None]:
        """A name, and the `dir_fd` to which it is relative, as the functions of `os` take them."""
        return self._below(path, itself=False)

    def _in(self, directory: Path) -> tuple[str, int | None]:
        """The same for a directory that is looked into: if it is held itself, its own descriptor is taken."""
        return self._below(directory, itself=True)

    def _below(self, path: Path, *, itself: bool) -> tuple[str, int | None]:
        if self._held:
            whole = path.absolute()
            for directory in (whole, *whole.parents) if itself else whole.parents:
                if directory in self._held:
                    return str(whole.relative_to(directory)), self._held[directory].fd
        return str(path), None

    # Opening.

    def open(self, path: Path, flags: int) -> IOFile:
        """Opens a file that is there. The call never blocks."""
        name, within = self._at(path)
        return open_nofollow(name, flags, dir_fd=within, path=str(path))

    def open_followed(self, path: Path) -> IOFile:
        """Opens a file to read it, or the one that a link leads to. The call never blocks."""
        return open_follow(str(path))

    def open_directory(self, path: Path) -> IOFile:
        """Opens a directory, or the one that a link leads to."""
        name, within = self._in(path)
        return open_directory(name, dir_fd=within)

    def create(self, path: Path, mode: int = PRIVATE) -> IOFile:
        """Makes a file to write to. It is an error if there is one of this name.

        Args:
            path: the file.
            mode: its mode, less what the umask takes.
        """
        name, within = self._at(path)
        return open_nofollow(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=within, path=str(path), mode=mode)

    def open_or_create(self, path: Path) -> IOFile:
        """Opens a file to read and write, and makes it, with mode 0600, if it is not there. The call never blocks."""
        name, within = self._at(path)
        return open_nofollow(name, os.O_RDWR | os.O_CREAT, dir_fd=within, path=str(path))

    def create_nameless(self, directory: Path) -> IOFile:
        """Makes a file without a name, which the system removes when its last descriptor is closed.

        Args:
            directory: where it is made; held from now on.

        Raises:
            PathError: if the directory cannot be opened, or no file be made in it.
        """
        within, path, flags = self.hold(directory), str(directory), os.O_RDWR | O_DIRECT
        with unusable("cannot make a file there", path):
            try:
                return open_nofollow(".", flags | os.O_TMPFILE, dir_fd=within, path=path)
            except (AttributeError, OSError) as error:  # not on this system, or not on this file system
                if isinstance(error, OSError) and not is_of_system(error):
                    raise
                name = f".offload-{os.getpid()}-{secrets.token_hex(8)}"
                file = open_nofollow(name, flags | os.O_CREAT | os.O_EXCL, dir_fd=within, path=path)
                os.unlink(name, dir_fd=within)
                return file

    # An open file.

    def write(self, file: IOFile, data: memoryview) -> None:
        """Appends all of `data`."""
        while data:
            data = data[os.write(file.fd, data) :]

    def set_content(self, file: IOFile, data: bytes) -> None:
        """Makes `data` the content of a file, which is not synced."""
        os.ftruncate(file.fd, 0)
        os.pwrite(file.fd, data, 0)

    def read_at(self, file: IOFile, offset: int, data: memoryview) -> int:
        """Reads into `data` from `offset` on.

        Returns:
            How many bytes were read. There may be fewer than asked for, not only at the file's end.
        """
        return os.preadv(file.fd, [data], offset)

    def stream(self, file: IOFile) -> BinaryIO:
        """A stream that reads a file from its position on. Closing it does not close the file."""
        return open(file.fd, "rb", closefd=False)

    def sync(self, file: IOFile) -> None:
        """Makes the file's content durable. If it fails, the content is lost, even if a second call succeeds."""
        os.fsync(file.fd)

    def close(self, file: IOFile) -> None:
        file.close()

    def size(self, file: IOFile) -> int:
        """The file's size in bytes."""
        return self.stat(file).st_size

    def require_regular(self, file: IOFile) -> int:
        """Requires that a file is a regular one.

        Returns:
            Its size in bytes.

        Raises:
            OSError: if it is anything else.
        """
        info = self.stat(file)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", file.path)
        return info.st_size

    def allocate(self, file: IOFile, offset: int, length: int) -> None:
        """Reserves blocks of the disk for a range of the file. A file that is shorter grows to the range's end."""
        try:
            os.posix_fallocate(file.fd, offset, length)
        except OSError as error:
            if error.errno != errno.EINVAL or not file.direct:
                raise
            # Where the file system cannot, the C library writes a byte to each block, and O_DIRECT takes whole ones.
            with reopened(file) as plain:
                os.posix_fallocate(plain.fd, offset, length)
                os.fsync(plain.fd)  # some give blocks out only now

    def truncate(self, file: IOFile, size: int) -> None:
        os.ftruncate(file.fd, size)

    def make_private(self, file: IOFile) -> None:
        """Lets only the file's owner open it from now on."""
        os.fchmod(file.fd, 0o600)

    def available(self, file: IOFile) -> int:
        """How many bytes are free on the disk of a file or directory."""
        disk = os.fstatvfs(file.fd)
        return disk.f_bavail * disk.f_frsize

    # Locks.

    def lock(self, file: IOFile, *, exclusive: bool) -> None:
        """Takes the lock of a file, and does not wait for a live process.

        A process that was killed may have had transfers under way. io_uring ends them, and lets go of the file, a
        moment after the process. Until then nobody may write there, so the lock is waited for.

        Args:
            file: the file.
            exclusive: whether no other process may hold it, too.

        Raises:
            OSError: of `BUSY` if a live process has it.
        """
        ends, unknown = time.monotonic() + self.patience_s, 0
        while True:
            try:
                return fcntl.flock(file.fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in BUSY or time.monotonic() > ends:
                    raise
                holders = self.holders(file)
                # None is seen in another container, and where it has let go meanwhile.
                unknown += not holders
                if unknown > 2 or any(map(self.lives, holders)):
                    raise
            time.sleep(0.01)

    def host(self) -> Host:
        """This machine."""
        try:
            boot = self.kernel_text(Path("/proc/sys/kernel/random/boot_id")).strip()
        except OSError:
            boot = ""
        return Host(socket.gethostname(), boot)

    def wait_for_lock(self, file: IOFile) -> None:
        """Takes the lock of a file, however long another process has it."""
        fcntl.flock(file.fd, fcntl.LOCK_EX)

    def holders(self, file: IOFile) -> list[int]:
        """The processes that locked a file, as far as the kernel tells."""
        try:
            lines = self.kernel_text(Path("/proc/locks")).splitlines()
        except OSError:
            return []
        info = self.stat(file)
        name = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
        fields = [line.split() for line in lines if " -> " not in line]
        locks = [(int(words[4]), words[5]) for words in fields if words[1] == "FLOCK"]
        exact = [pid for pid, where in locks if where == name]
        # Btrfs tells `stat` the device of the subvolume, and /proc/locks that of the file system.
        return exact or [pid for pid, where in locks if where.rpartition(":")[2] == str(info.st_ino)]

    def lives(self, pid: int) -> bool:
        """Whether a process runs. One that has ended, and whose parent has not asked for its exit status, does not."""
        try:
            state = self.kernel_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    # Names.

    def stat(self, at: Path | IOFile, *, follows: bool = False) -> os.stat_result:
        """What the file system knows of a file.

        Args:
            at: an open file, or a name.
            follows: whether a link is followed.
        """
        if isinstance(at, IOFile):
            return os.fstat(at.fd)
        name, within = self._at(at)
        return os.stat(name, dir_fd=within, follow_symlinks=follows)

    def is_directory(self, path: Path, *, follows: bool = False) -> bool:
        """Whether there is a directory of that name.

        Args:
            path: the name.
            follows: whether a link to a directory counts, too.
        """
        try:
            return stat.S_ISDIR(self.stat(path, follows=follows).st_mode)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise
            return False

    def exists(self, path: Path) -> bool:
        """Whether there is anything of that name. A link counts if there is something that it leads to."""
        try:
            self.stat(path, follows=True)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise
            return False
        return True

    def leads_to(self, path: Path, file: IOFile) -> bool:
        """Whether `path` still is the name of an open file.

        Raises:
            PathError: if the system does not tell.
        """
        return _leads_to(file, *self._at(path), follows=False)

    def real(self, path: Path) -> Path:
        """The same path, with all links followed."""
        return Path(os.path.realpath(path))

    def may_write(self, directory: Path) -> bool:
        """Whether this process may make files in a directory."""
        return os.access(directory, os.W_OK | os.X_OK)

    def names(self, directory: Path) -> list[str]:
        with self.open_directory(directory) as opened:
            return os.listdir(opened.fd)

    def kinds(self, directory: Path) -> dict[str, bool]:
        """The names in a directory, and whether each one is a directory itself."""
        with self.open_directory(directory) as opened, os.scandir(opened.fd) as entries:
            return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}

    def rename(self, old: Path, new: Path) -> None:
        (source, source_fd), (target, target_fd) = self._at(old), self._at(new)
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def link(self, old: Path, new: Path) -> None:
        """Gives a file another name, beside the one that it has."""
        (source, source_fd), (target, target_fd) = self._at(old), self._at(new)
        os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Removes a file or a link, not what the link leads to. Does nothing if there is none."""
        name, within = self._at(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=within)

    def make_directory(self, path: Path, mode: int = 0o700) -> bool:
        """Makes a directory, if nothing has its name.

        Returns:
            Whether it was made.
        """
        name, within = self._at(path)
        try:
            os.mkdir(name, mode, dir_fd=within)
        except FileExistsError:
            return False
        return True

    def remove_directory(self, path: Path) -> None:
        """Removes a directory if it is empty. Does nothing if it is not, or if there is none."""
        name, within = self._at(path)
        try:
            os.rmdir(name, dir_fd=within)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def sync_directory(self, path: Path) -> None:
        """Makes durable what was made, renamed and removed in a directory."""
        with self.open_directory(path) as directory:
            os.fsync(directory.fd)

    # Contents.

    def read(self, path: Path, most: int) -> bytes:
        """The content of a regular file, or the first `most + 1` bytes of it."""
        with self.open(path, os.O_RDONLY) as file:
            return self.read_regular(file, most)

    def read_regular(self, file: IOFile, most: int) -> bytes:
        """The same of an open file, from its position on."""
        size = self.require_regular(file)
        with self.stream(file) as opened:
            return opened.read(min(size, most + 1))

    def copy(self, source: Path, target: IOFile, offset: int, length: int) -> None:
        """Writes a range of the file `source` to the same offset of `target`, whose size is at most `offset`.

        Where the file system can, both files share the blocks until one of them is written to.
        """
        # O_DIRECT or not, what a swap file's engine has written is seen here: it was synced.
        with self.open(source, os.O_RDONLY) as file:
            end = offset + length
            while offset < end:
                done = self._copy_some(file.fd, target.fd, offset, min(end - offset, COPIED_BYTES))
                if not done:
                    raise OSError(errno.EIO, f"{source} ends at {offset}, before what is to be copied does")
                offset += done

    def space(self, path: Path) -> tuple[int, int]:
        """The number of the device that a directory is on, and how many bytes are free there."""
        with self.open_directory(path) as directory:
            return self.stat(directory).st_dev, self.available(directory)

    def kernel_text(self, path: Path) -> str:
        """The text of a file in /proc or /sys, whose size is not known before it is read. A link is followed.

        Names of processes, groups and mount points are in it, and have any bytes.
        """
        with self.open_followed(path) as file, self.stream(file) as lines:
            return os.fsdecode(lines.read())

    def copy_in_kernel(self, source: int, target: int, offset: int, length: int) -> int:
        """Copies a range in the kernel, which may share the blocks instead.

        Args:
            source: the descriptor of the file to read.
            target: the descriptor of the file to write.
            offset: where the range begins in both, in bytes.
            length: of the range, in bytes.

        Returns:
            How many bytes were copied. Some file systems say 0 where they cannot copy.
        """
        return os.copy_file_range(source, target, length, offset, offset)

    def _copy_some(self, source: int, target: int, offset: int, length: int) -> int:
        """Copies the beginning of a range, in the kernel if that can.

        Returns:
            How many bytes were copied; 0 at the end of the source.
        """
        done = 0
        if hasattr(os, "copy_file_range"):
            try:
                done = self.copy_in_kernel(source, target, offset, length)
            except OSError as error:
                if error.errno not in _NOT_IN_THE_KERNEL:
                    raise
        if not done:
            data = os.pread(source, min(length, self.piece_bytes), offset)
            done = os.pwrite(target, data, offset) if data else 0
        if hasattr(os, "posix_fadvise"):
            # It was read once, and pushes nothing else out of the page cache.
            os.posix_fadvise(source, offset, done, os.POSIX_FADV_DONTNEED)
        return done


def _leads_to(file: IOFile, name: str, dir_fd: int | None, *, follows: bool) -> bool:
    """Whether `name` leads to an open file or directory.

    Raises:
        PathError: if the system does not tell.
    """
    try:
        with unusable("cannot be looked at", file.path, but=(errno.ENOENT,)):
            return os.path.samestat(os.stat(name, dir_fd=dir_fd, follow_symlinks=follows), os.fstat(file.fd))
    except FileNotFoundError:
        return False


LOCAL = Files()
"""The files of this machine, for who only looks at them, and holds no directory."""
