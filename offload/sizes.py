"""Byte sizes in and out of words, and alignment."""

from __future__ import annotations

import re

from offload.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

PAGE_BYTES = 4096
"""Alignment of arena buffers, swap-file offsets and request lengths: a page, a multiple of every
logical block size (512 or 4096) that O_DIRECT asks for."""

MASTER_ITEM_BYTES = 4
"""Of an element of the fp32 masters."""
SUM_BLOCK = 65536
"""Elements whose squares are summed together (kernels.h: OFFLOAD_SUM_BLOCK)."""

DITHER_BLOCK = 64
"""Elements of a parameter, counted from its start, whose moments of one or two bytes are rounded and scaled together
(kernels.h: OFFLOAD_DITHER_BLOCK)."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1 << (10 * (i + 1)) for i, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")}
_PATTERN = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: int | str, option: str) -> int:
    """The number of bytes in `value`, an int of bytes or a string such as "48GiB", "512 MiB" or "10GB".

    Args:
        value: the size.
        option: the argument's name, for the error.

    Raises:
        ConfigError: for anything else, a negative size, or a fraction of a byte.
    """
    allowed = 'an int of bytes or a string such as "48GiB", "512MiB" or "10GB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{option}={value!r} is not a size: give {allowed}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{option}={value} is negative: give {allowed}")
        return value
    match = _PATTERN.fullmatch(value)
    unit = None if match is None else _UNITS.get(match[2])
    if match is None or unit is None:
        raise ConfigError(f"{option}={value!r} is not a size: give {allowed}{_hint(match)}")
    whole = float(match[1]) * unit
    if "." not in match[1]:
        return int(match[1]) * unit
    if not whole.is_integer() and unit == 1:
        raise ConfigError(f"{option}={value!r} is a fraction of a byte: give {allowed}")
    return int(whole)


def _hint(match: re.Match[str] | None) -> str:
    """A question about a unit that is misspelt, such as "48gib" or "48 G"."""
    number, unit = ("", "") if match is None else (match[1], match[2].lower())
    near = next((one for one in _UNITS if unit and one.lower() in (unit, f"{unit}ib")), None)
    return "" if near is None else f"; did you mean {number + near!r}?"


def format_bytes(count: float) -> str:
    """`count` bytes for people, in binary units: "1.5 GiB"."""
    sign = "-" if count < 0 else ""
    size = abs(float(count))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.4g} {unit}"
        size /= 1024
    return f"{sign}{size:.4g} TiB"


def round_up(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


def option_bytes(nbytes: int, *, at_most: bool = False) -> str:
    """So many bytes as an option takes them, such as "131.5GiB".

    Args:
        nbytes: the bytes, rounded up by a thousandth or less.
        at_most: whether they are rounded down instead.
    """
    digits = 5 if at_most else 4  # whoever reads it rounds down to a byte once more
    for name, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            scale = 10 ** (digits - len(str(nbytes // size)))
            number = nbytes * scale // size if at_most else -(-nbytes * scale // size)
            return f"{number / scale:g}{name}"
    return str(nbytes)
