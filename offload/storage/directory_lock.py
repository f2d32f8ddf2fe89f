"""The lock of a directory: the ranks of one start share it, and it keeps all other runs out.

[Note: the lock of a directory]
`offload.lock` is locked with flock by every rank that has the directory, shared, and holds the id of their start,
which all ranks of one start know, and their machines. Whoever finds the lock free takes it alone, writes both, durably,
and then shares it. Whoever finds it taken shares it and reads the id: another start's is a run in use. So of two
simultaneous starts one wins, and a rank that comes late joins its own. Taking the lock alone again after another start
has read the id is left to the kernel: where that loses the lock in between, the other start has written its id, and
wins.

The file stays when the run ends. Who removes it holds it, and whoever has opened it before finds that its name leads
elsewhere, and opens it again.

[Note: locks of other machines]
A file server keeps the lock of a machine that was lost until its lease ends. So where the file names a machine that is
not this one since its last boot, the lock is waited for. And where a file system keeps flock to itself on each machine,
two runs may have one directory. So each start's id is compared before a run writes, and before a file of a commit gets
its name, which the other run may have given to one of its own (`Claims.require_ours`): the first run finds the id of
the second, and ends. What both wrote before that is found by checksums.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from offload.errors import PathInUseError
from offload.io.engine import IOFile
from offload.io.files import BUSY, LOCAL, Files, Host, unusable
from offload.storage.directories import LOCK_NAME, file_name
from offload.storage.swap_file import IN_USE, any_is_held

PATIENCE_S = 60.0
"""For how long the id of whoever has the lock alone is waited for. It writes it at once, but a disk that has much else
to write may take its time to sync it."""
_ID_BYTES = 16
_MAX_BYTES = 1 << 16
_POLL_S, _SAY_S = 0.2, 15.0
"""How often a lock of another machine is tried, and how often is said that it is waited for."""


class Claimant(NamedTuple):
    """Who takes a directory.

    Attributes:
        start: the id of the start, 16 bytes, the same on all of its ranks.
        hosts: the machines of its ranks.
    """

    start: bytes
    hosts: tuple[Host, ...]

    def encode(self) -> bytes:
        return self.start + "".join(f"\n{host.boot} {host.name}" for host in dict.fromkeys(self.hosts)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Claimant:
        """What a lock file says. One of an older version names no machine."""
        lines = content[_ID_BYTES:].decode(errors="replace").split("\n")[1:]
        return cls(content[:_ID_BYTES], tuple(Host(name, boot) for boot, _, name in (s.partition(" ") for s in lines)))


_NOBODY = Claimant(b"", ())


class Claims:
    """The directories that this start has taken.

    Args:
        claimant: this start.
        files: the file system.
        wait_s: for how many seconds a lock that a lost machine may hold is waited for.
        say: told each quarter of a minute what is waited for.
    """

    def __init__(
        self,
        claimant: Claimant = _NOBODY,
        files: Files = LOCAL,
        *,
        wait_s: float = 0.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._claimant = claimant
        self._files = files
        self._wait_s = wait_s
        self._say = say
        self._taken: dict[Path, IOFile] = {}

    @property
    def claimant(self) -> Claimant:
        """This start."""
        return self._claimant

    def take(self, directory: Path) -> Callable[[], None]:
        """Takes the lock of a directory, which is there.

        A run of a version that does not know this lock is seen by the locks of its swap files.

        Returns:
            What gives it back.

        Raises:
            PathInUseError: a live run, or another start, has the directory.
            PathError: the lock cannot be opened, or the file system cannot lock it.
        """
        self._taken[directory] = self._wait_for(directory)
        return lambda: self._taken.pop(directory).close()

    def require_ours(self) -> None:
        """Checks that no other start has written its id into a directory; see [Note: locks of other machines].

        Raises:
            PathInUseError: one has.
            PathError: the lock cannot be read.
        """
        for directory, file in self._taken.items():
            with unusable("cannot be read", file.path):
                found = _read(file, self._files)
            if found.start != self._claimant.start:
                raise PathInUseError(
                    errno.EBUSY,
                    f"was taken by another run{_on(found.hosts)}, because locks do not reach other machines on this "
                    "file system: end one of the two; a resume goes on from the last commit, if that is whole",
                    str(directory),
                )

    def _wait_for(self, directory: Path) -> IOFile:
        begun, said = time.monotonic(), None
        while True:
            try:
                return _claim(directory, self._claimant, self._files)
            except PathInUseError as error:
                hosts, waited = self._lost_hosts(directory), time.monotonic() - begun
                if not hosts or self._wait_s == 0:
                    raise
                if waited > self._wait_s:
                    raise PathInUseError(
                        errno.EBUSY,
                        f"{IN_USE}; it has been locked for {waited:.0f} s{_on(hosts)}, and a lost machine may still "
                        "hold it: give lock_timeout more seconds than the lease of this file system",
                        str(directory),
                    ) from error
            if said is None or waited > said + _SAY_S:
                said = waited
                self._say(
                    f"waiting for the lock of {directory}, taken{_on(hosts)}: {waited:.0f} of {self._wait_s:.0f} s"
                )
            time.sleep(_POLL_S)

    def _lost_hosts(self, directory: Path) -> tuple[Host, ...]:
        """The machines that may have been lost with a directory's lock: none if a process here has it."""
        files = self._files
        with suppress(FileNotFoundError), files.open(directory / LOCK_NAME, os.O_RDONLY) as file:
            if any(map(files.lives, files.holders(file))):
                return ()
            own = files.host()
            return tuple(host for host in _read(file, files).hosts if host.boot != own.boot)
        return ()


def _on(hosts: Sequence[Host]) -> str:
    return f" on {', '.join(dict.fromkeys(host.name for host in hosts))}" if hosts else ""


def _claim(directory: Path, claimant: Claimant, files: Files) -> IOFile:
    """Takes the lock of a directory without waiting for a live process. Closing what is returned gives it back.

    Raises:
        PathInUseError: a live run, or another start, has the directory.
        PathError: the lock cannot be opened, or the file system cannot lock it.
    """
    path, ends = directory / LOCK_NAME, time.monotonic() + PATIENCE_S
    _require_no_older(directory, files)
    while True:
        with unusable("cannot be locked", path):
            file = files.open_or_create(path)
        try:
            with unusable("cannot be locked", path, but=BUSY):
                is_shared = _share(file, claimant, files)
            if is_shared and files.leads_to(path, file):
                if _read(file, files).start != claimant.start:
                    raise PathInUseError(errno.EBUSY, IN_USE, str(directory))
                _require_no_older(directory, files)
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        if not is_shared:  # somebody writes its id now, or has it alone for good
            if time.monotonic() > ends:
                raise PathInUseError(errno.EBUSY, IN_USE, str(directory))
            time.sleep(0.01)


def _require_no_older(directory: Path, files: Files) -> None:
    """Checks that no process holds a file that older versions lock.

    Raises:
        PathInUseError: one does.
        PathError: a file cannot be opened or locked.
    """
    found = ((name, file_name(name)) for name in files.names(directory))
    if any_is_held(directory, [name for name, file in found if file and file.kind == "older"], files):
        raise PathInUseError(errno.EBUSY, IN_USE, str(directory))


def _share(file: IOFile, claimant: Claimant, files: Files) -> bool:
    """Shares the lock, after having taken it alone and written who has it, if that was possible.

    Returns:
        Whether the lock is shared now.

    Raises:
        OSError: the file system cannot lock it.
    """
    try:
        files.lock(file, exclusive=True)
    except OSError as error:
        if error.errno not in BUSY:
            raise
    else:
        files.set_content(file, claimant.encode())
        files.sync(file)
    try:
        files.lock(file, exclusive=False)
    except OSError as error:
        if error.errno not in BUSY:
            raise
        return False
    return True


def _read(file: IOFile, files: Files) -> Claimant:
    found = bytearray(_MAX_BYTES)
    return Claimant.decode(bytes(found[: files.read_at(file, 0, memoryview(found))]))
