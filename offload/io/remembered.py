"""What was measured of this machine, in the user's cache directory: `offload/machine-<identity>.json`.

The file has sections, and each has values by key, with a date, since drives change. A home directory may be shared by
machines, so each has a file of its own, named after its identity: none reads or writes another one's. A damaged file is
as good as none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from offload.io.files import LOCAL
from offload.io.regular import read_file, read_json
from offload.sizes import PAGE_BYTES

VERSION = 2
LONGEST_AGE_S = 90 * 24 * 3600
MOST_CACHE_BYTES = 1 << 20
NAME, ENDING = "machine-", ".json"
"""What the names of files begin and end with."""

_MACHINE_ID = Path("/etc/machine-id")

T = TypeVar("T", bound=msgspec.Struct)


class _Remembered(msgspec.Struct, frozen=True):
    """The content of the file.

    Attributes:
        version: of its format.
        machine: the identity of what it was measured on.
        sections: values by section and key. Each is decoded by itself, since one may be damaged.
    """

    version: int
    machine: str
    sections: dict[str, dict[str, Any]]


def recall(section: str, key: str, kind: type[T]) -> T | None:
    """What is remembered under a key; None if there is nothing, or it is too old or makes no sense.

    Args:
        section: of the file.
        key: in the section.
        kind: of the value. It has `measured_at`, in seconds since 1970.
    """
    try:
        found = msgspec.convert(_load().get(section, {}).get(key), kind)
    except msgspec.ValidationError:
        return None
    return found if 0 <= age_s(found) <= LONGEST_AGE_S else None


def why_not(section: str, key: str, kind: type[T]) -> str | None:
    """Why `recall` finds nothing under a key although something stands there; None: nothing does, or it is found.

    Args:
        section: of the file.
        key: in the section.
        kind: of the value.
    """
    own = _load().get(section, {})
    if key not in own:
        others = (_read(file, None).get(section, {}) for file in _files())
        return "is of another machine" if any(key in other for other in others) else None
    with contextlib.suppress(msgspec.ValidationError):
        value = msgspec.convert(own[key], kind)
        if not 0 <= age_s(value) <= LONGEST_AGE_S:
            return f"is {days(age_s(value))} old"
    return None


def days(seconds: float) -> str:
    """An age in words: "3 days"."""
    count = int(seconds // (24 * 3600))
    return "less than a day" if count == 0 else f"{count} day{'' if count == 1 else 's'}"


def age_s(value: msgspec.Struct) -> float:
    """How many seconds ago a value was measured."""
    return time.time() - value.measured_at  # type: ignore[attr-defined, no-any-return]


def remember(section: str, key: str, value: msgspec.Struct) -> Path:
    """Writes a value down, as measured now.

    Returns:
        The file in which it stands.

    Raises:
        OSError: if the cache directory cannot be written, or there is none since there is no home directory.
    """
    cache = cache_file()
    for folder in reversed(cache.parents):
        if not LOCAL.exists(folder):
            LOCAL.make_directory(folder, 0o777)
    with LOCAL.open_directory(cache.parent) as directory:
        with contextlib.suppress(OSError):  # some network mounts lock no directories
            LOCAL.wait_for_lock(directory)  # until this is written down: two processes would lose what one found
        sections = _load()
        sections.setdefault(section, {})[key] = msgspec.structs.replace(value, measured_at=time.time())
        temporary = cache.with_suffix(f".{os.getpid()}")
        written = msgspec.json.format(msgspec.json.encode(_Remembered(VERSION, identity(), sections)))
        LOCAL.remove(temporary)
        with LOCAL.create(temporary) as file:
            LOCAL.write(file, memoryview(written))
        LOCAL.rename(temporary, cache)
    return cache


def cache_file() -> Path:
    """This machine's file.

    Raises:
        OSError: there is no home directory.
    """
    return _folder() / f"{NAME}{identity()}{ENDING}"


def identity() -> str:
    """What tells this machine from others, for files that others read. The system's own number is not for that."""
    return hashlib.sha256(f"offload {_machine()}".encode()).hexdigest()[:16]


def _folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, "there is no home directory: set HOME, or XDG_CACHE_HOME") from error


def _files() -> list[Path]:
    """The files of all machines that share the cache directory."""
    with contextlib.suppress(OSError):
        folder = _folder()
        return [folder / name for name in LOCAL.names(folder) if name.startswith(NAME) and name.endswith(ENDING)]
    return []


def _load() -> dict[str, dict[str, Any]]:
    with contextlib.suppress(OSError):  # no home directory
        return _read(cache_file(), identity())
    return {}


def _read(file: Path, machine: str | None) -> dict[str, dict[str, Any]]:
    """The sections of a file; none, if it is damaged or of another machine.

    Args:
        file: the file.
        machine: the identity that it has to have; None: any.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
        found = msgspec.convert(read_json(file, MOST_CACHE_BYTES), _Remembered)
        if found.version == VERSION and machine in (None, found.machine):
            return found.sections
    return {}


def _machine() -> str:
    with contextlib.suppress(OSError, ValueError):
        found = read_file(_MACHINE_ID, PAGE_BYTES).decode().strip()
        if found not in ("", "uninitialized"):  # as in images of containers: machine-id(5)
            return found
    return platform.node()
