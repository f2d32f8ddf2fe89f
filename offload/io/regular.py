"""Files that somebody else wrote: read whole, regular files only, up to a limit; and the JSON in them.

What bears a file's name may be a FIFO that nobody writes to, a link to a device without end, or larger than RAM. JSON
may be nested too deep, or say a thing twice. All of it ends at once, in an OSError or a ValueError, of which the caller
makes an error that names the file. A link to a regular file is one: so caches keep weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from offload.io.files import LOCAL
from offload.sizes import format_bytes

_MOST_DIGITS = 400
"""Of a number: more than any double has."""
_MOST_COMMAS = 1 << 22
"""What bounds the memory that a document takes, some 60 bytes a value."""


def check_file(path: Path) -> None:
    """Requires a regular file, or a link to one, that can be read.

    Raises:
        OSError: if it is none.
    """
    with LOCAL.open_followed(path) as file:
        LOCAL.require_regular(file)


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file, or of the one that a link leads to.

    Args:
        path: the file's path.
        most: how many bytes it may have.

    Raises:
        OSError: the operating system refused, or it is no regular file.
        ValueError: if it is longer.
    """
    with LOCAL.open_followed(path) as file:
        data = LOCAL.read_regular(file, most)
    if len(data) > most:
        raise ValueError(f"it is longer than {format_bytes(most)}")
    return data


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The JSON object in a file; see `parse_json`.

    Args:
        path: the file's path.
        most: how many bytes it may have.

    Raises:
        OSError: the operating system refused, or it is no regular file.
        ValueError: if it is longer, or holds no such object.
    """
    return parse_json(read_file(path, most))


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` spells in UTF-8.

    Raises:
        ValueError: if it spells none, a number is not finite, or an object has a key twice.
    """
    if data.count(b",") > _MOST_COMMAS:
        raise ValueError(f"it holds more than {_MOST_COMMAS} values")
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_whole,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"an object has the key {name!r:.80} twice")
        members[name] = value
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits:.80} is larger than any number")
    return value
