"""The tensors in whatever a module returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested containers and plain objects (dataclasses, a library's output classes), each once."""
    seen: set[int] = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, Tensor):
            if id(node) not in seen:
                yield node
        elif id(node) not in seen:
            left.extend(_inside(node))
        seen.add(id(node))


def is_where(moved: Tensor, tensor: Tensor, how: Mapping[str, Any]) -> bool:
    """Whether `tensor`, moved and cast, is what it was. Torch copies from "cpu" to "cpu:0", which is no other device.

    Args: how: the keywords of the move.
    """
    if moved is tensor:
        return True
    is_same = moved.dtype is tensor.dtype and moved.is_cpu and tensor.is_cpu and moved.layout is tensor.layout
    return is_same and not how.get("copy", False)


def _inside(node: Any) -> Iterable[Any]:
    if node is None or isinstance(node, str | bytes | int | float | type | nn.Module):
        return
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list | tuple | set | frozenset | deque):
        yield from node
    for kind in type(node).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(node, name, None)
    yield from getattr(node, "__dict__", {}).values()
