"""Where the parameters of a unit are, and which moves are legal; see [Note: residency of a unit] in gathering.py."""

from __future__ import annotations

from enum import Enum

from offload.errors import StateError


class Where(Enum):
    RELEASED = "released"
    COMING = "coming"
    HERE = "here"


_LEGAL = {
    (Where.RELEASED, Where.COMING),
    (Where.COMING, Where.HERE),
    (Where.COMING, Where.RELEASED),
    (Where.HERE, Where.RELEASED),
}


def require_legal(unit: str, now: Where, to: Where) -> None:
    """Raises: StateError unless `unit` may go from `now` to `to`."""
    if (now, to) not in _LEGAL:
        raise StateError(f"unit {unit or 'root'} is {now.value} and cannot become {to.value}")
