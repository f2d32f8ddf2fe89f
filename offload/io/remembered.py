"""What was measured of this machine, in the user's cache directory: `offload/machine.json`.

It has sections, and each has values by key. They stand there with the identity of the machine, since a home directory
may be shared by machines, and each with a date, since drives change. A damaged or foreign file is as good as none.
"""

from __future__ import annotations

import contextlib
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

VERSION = 1
LONGEST_AGE_S = 90 * 24 * 3600
MOST_CACHE_BYTES = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


class _Remembered(msgspec.Struct, frozen=True):
    """The content of the file.

    Attributes:
        version: of its format.
        machine: what it was measured on.
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
    with contextlib.suppress(OSError, ValueError, RuntimeError, msgspec.MsgspecError):
        remembered = msgspec.convert(read_json(cache_file(), MOST_CACHE_BYTES), _Remembered)
        if key not in remembered.sections.get(section, {}):
            return None
        if remembered.machine != _machine():
            return "is of another machine"
        value = msgspec.convert(remembered.sections[section][key], kind)
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
        OSError: if the cache directory cannot be written.
    """
    sections = _load()
    sections.setdefault(section, {})[key] = msgspec.structs.replace(value, measured_at=time.time())
    cache = cache_file()
    for folder in reversed(cache.parents):
        if not LOCAL.exists(folder):
            LOCAL.make_directory(folder, 0o777)
    temporary = cache.with_suffix(f".{os.getpid()}")
    written = msgspec.json.format(msgspec.json.encode(_Remembered(VERSION, _machine(), sections)))
    LOCAL.remove(temporary)
    with LOCAL.create(temporary) as file:
        LOCAL.write(file, memoryview(written))
    LOCAL.rename(temporary, cache)
    return cache


def cache_file() -> Path:
    """The file: $XDG_CACHE_HOME/offload/machine.json."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload" / "machine.json"


def identity() -> str:
    """What tells this machine from others, for files that leave it. The number of the system itself is not for that."""
    return hashlib.sha256(f"offload {_machine()}".encode()).hexdigest()[:16]


def _load() -> dict[str, dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, RuntimeError, msgspec.MsgspecError):
        remembered = msgspec.convert(read_json(cache_file(), MOST_CACHE_BYTES), _Remembered)
        if (remembered.version, remembered.machine) == (VERSION, _machine()):
            return remembered.sections
    return {}


def _machine() -> str:
    with contextlib.suppress(OSError, ValueError):
        return read_file(Path("/etc/machine-id"), PAGE_BYTES).decode().strip()
    return platform.node()
