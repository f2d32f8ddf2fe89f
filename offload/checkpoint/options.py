"""What a commit stores of param groups: hyper-parameters, and whatever else is plain and short."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from offload.checkpoint.manifest import MAX_OPTIONS, Option, Scalar
from offload.checkpoint.strict import is_text
from offload.errors import ConfigError


def stored(groups: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Option], ...]:
    """The groups' options as a commit stores them. Raises: ConfigError naming what cannot be stored."""
    for number, group in enumerate(groups):
        if len(group) > MAX_OPTIONS:
            raise ConfigError(f"param group {number} has {len(group)} keys: at most {MAX_OPTIONS} can be stored")
    return tuple(
        {key: _option(number, group, key) for key in group if key != "params"} for number, group in enumerate(groups)
    )


def _option(number: int, group: Mapping[str, Any], key: object) -> Option:
    allowed = "numbers, strings, bools and None, and lists of these, under short names; keep others elsewhere"
    if not (isinstance(key, str) and is_text(key)):
        raise ConfigError(f"param group {number} has the key {key!r}, which a commit cannot store: {allowed}")
    value = group[key]
    items = list(value) if isinstance(value, list | tuple) else [value]
    try:
        found = [_scalar(item) for item in items]
        if len(found) > MAX_OPTIONS:
            raise ValueError(len(found))
    except (TypeError, ValueError, RuntimeError) as error:
        shown = f"{key}={value!r}"
        raise ConfigError(
            f"param group {number} has {shown:.200}, which a commit cannot store: {allowed}; nothing was changed"
        ) from error
    return tuple(found) if isinstance(value, list | tuple) else found[0]


def _scalar(value: Any) -> Scalar:
    """Raises: TypeError, ValueError, RuntimeError if it is none."""
    # Tensors and NumPy's scalars: a learning rate may be either.
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, str) and not is_text(plain):
        raise ValueError(plain)
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(plain)
    if isinstance(plain, int) and not -(1 << 63) <= plain < 1 << 63:
        raise ValueError(plain)
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(type(plain))
