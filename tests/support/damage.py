"""Damage to files, as tests do it."""

from __future__ import annotations

from pathlib import Path


def flipped(data: bytes, position: int = 0) -> bytes:
    """`data` with another bit in its byte at `position`."""
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def flip(file: Path, offset: int) -> None:
    """Changes a bit of a file."""
    with open(file, "r+b") as opened:
        opened.seek(offset)
        old = opened.read(1)
        opened.seek(offset)
        opened.write(flipped(old))
