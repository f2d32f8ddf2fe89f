"""JSON from a disk, trusted in nothing: one spelling, bounded sizes, exact types.

A document is read with `load` and looked at through `Node`s, which know their place in it, so that every refusal says
where. Only what `canonical` would have written is taken: that leaves no room for duplicate keys, for numbers that
other readers would read otherwise, or for fields that nobody looks at.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn, TypeAlias

import xxhash

from offload.errors import CorruptionError, ResumeError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_INT = (1 << 63) - 1
MAX_COMMAS = 1 << 23
"""Most values a document holds, roughly: what bounds the memory that reading it takes."""
MAX_TEXT = 4096
"""Characters of a name or another string."""

_HEX = frozenset("0123456789abcdef")
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")


def is_text(value: str) -> bool:
    """Whether it is short enough, and without control characters and halves of characters."""
    return len(value) <= MAX_TEXT and not _CONTROL.search(value)


def canonical(value: Json) -> bytes:
    """The one spelling of `value`: ASCII, keys in the order they have, no blanks, a newline at the end."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def digest(data: bytes | memoryview) -> str:
    """XXH3-128 as 32 hex digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def load(data: bytes, file: str, limit: int) -> Node:
    """The root of the document `data`.

    Args: file: its name, for the errors; limit: most bytes.
    Raises: CorruptionError. Duplicate keys, NaN, numbers out of range and non-ASCII text are refused here.
    """
    if len(data) > limit:
        raise CorruptionError(f"{len(data)} bytes are too many, {limit} are allowed", file=file)
    # Before parsing, which takes some 40 bytes of RAM a value.
    if data.count(b",") > MAX_COMMAS:
        raise CorruptionError(f"holds more than {MAX_COMMAS} values", file=file)
    try:
        value = json.loads(
            data.decode("ascii"),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_refuse,
        )
    except ValueError as error:
        raise CorruptionError(f"is not the JSON that this library writes: {short(error)}", file=file) from error
    except RecursionError:
        raise CorruptionError("is nested too deep", file=file) from None
    return Node(value, "", file)


def require_schema(root: Node, schema: str, version: int) -> None:
    """Raises: ResumeError if it is of a newer or older version of this library, CorruptionError if it is none."""
    found = root.value if isinstance(root.value, dict) else {}
    if found.get("schema") != schema:
        root.refuse(f"is no {schema}")
    number = found.get("version")
    if type(number) is int and number > version:
        raise ResumeError(
            f"{root.file} has version {number} of its format, and this version of offload reads up to {version}: "
            "use the offload that wrote it, or a newer one"
        )
    if type(number) is int and 0 < number < version:
        raise ResumeError(
            f"{root.file} has version {number} of its format, and this version of offload reads {version} only: resume "
            "with the offload that wrote it, or choose another path"
        )
    if type(number) is not int or number != version:
        root.refuse(f"has no version that exists: {short(number)}")


def short(value: object) -> str:
    """`value` for a message, whatever its size."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 120 else text[:120] + "..."


class Node:
    """A value of a document and its place. Every method raises CorruptionError, naming both, if the value is another.

    Attributes: value, place (such as "flats[2].offsets"), file.
    """

    __slots__ = ("file", "place", "value")

    def __init__(self, value: Json, place: str, file: str) -> None:
        self.value = value
        self.place = place
        self.file = file

    def refuse(self, problem: str) -> NoReturn:
        raise CorruptionError(f"{self.place}: {problem}" if self.place else problem, file=self.file)

    def fields(self, *names: str) -> list[Node]:
        """The values of an object with exactly these keys."""
        value = self.value
        if not isinstance(value, dict):
            self.refuse(f"expected an object, found {short(value)}")
        if value.keys() != set(names):
            wrong = sorted(value.keys() ^ set(names))
            self.refuse(f"expected the fields {', '.join(names)}; missing or unknown: {short(', '.join(wrong))}")
        prefix = f"{self.place}." if self.place else ""
        return [Node(value[name], prefix + name, self.file) for name in names]

    def pairs(self) -> list[tuple[str, Node]]:
        """The keys and values of any object."""
        if not isinstance(self.value, dict):
            self.refuse(f"expected an object, found {short(self.value)}")
        return [(key, Node(value, f"{self.place}[{key[:80]!r}]", self.file)) for key, value in self.value.items()]

    def items(self, most: int) -> list[Node]:
        """The elements of a list of at most `most`."""
        values = self.array(most)
        return [Node(value, f"{self.place}[{number}]", self.file) for number, value in enumerate(values)]

    def array(self, most: int) -> list[Json]:
        """The bare elements of a list of at most `most`."""
        if not isinstance(self.value, list):
            self.refuse(f"expected a list, found {short(self.value)}")
        if len(self.value) > most:
            self.refuse(f"{len(self.value)} elements are too many, {most} are allowed")
        return self.value

    def integer(self, most: int = MAX_INT, least: int = 0) -> int:
        """A whole number, not a bool and not a float."""
        value = self.value
        if type(value) is not int or not least <= value <= most:
            self.refuse(f"expected a whole number from {least} to {most}, found {short(value)}")
        return value

    def integers(self, most: int, count: int) -> tuple[int, ...]:
        """A list of at most `count` whole numbers from 0 to `most`."""
        found = []
        for number, value in enumerate(self.array(count)):
            if type(value) is not int or not 0 <= value <= most:
                self.refuse(f"[{number}]: expected a whole number from 0 to {most}, found {short(value)}")
            found.append(value)
        return tuple(found)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse(f"expected true or false, found {short(self.value)}")
        return self.value

    def text(self, most: int = MAX_TEXT) -> str:
        """A string without control characters and halves of characters."""
        value = self.value
        if not isinstance(value, str) or len(value) > most:
            self.refuse(f"expected a string of at most {most} characters, found {short(value)}")
        if _CONTROL.search(value):
            self.refuse(f"{short(value)} holds control characters")
        return value

    def one_of(self, allowed: tuple[str, ...]) -> str:
        if self.value not in allowed or not isinstance(self.value, str):
            self.refuse(f"expected one of {', '.join(allowed)}, found {short(self.value)}")
        return self.value

    def hex(self, digits: int) -> str:
        """A string of `digits` lowercase hex digits."""
        value = self.value
        if not isinstance(value, str) or len(value) != digits or not _HEX.issuperset(value):
            self.refuse(f"expected {digits} hex digits, found {short(value)}")
        return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _integer(text: str) -> int:
    # The length first: Python takes quadratic time over long numbers.
    if len(text) > 20 or not -MAX_INT - 1 <= int(text) <= MAX_INT:
        raise ValueError(f"the number {text[:24]} is out of range")
    return int(text)


def _number(text: str) -> float:
    number = float(text) if len(text) <= 40 else math.inf
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:48]} is out of range")
    return number


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
