"""Which chunks stay in RAM: pure functions over ids and sizes, no tensors.

Training visits the chunks in the same order every step. On a cyclic order the best that any cache can do is to keep
a fixed set and stream the rest (Belady 1966: evict what is used furthest ahead, which on a cycle is always the one
just used): a budget that covers a fraction f of the bytes saves exactly f of the traffic.
"""

from __future__ import annotations

from collections.abc import Sequence


def keep_in_ram(order: Sequence[int], sizes: Sequence[int], budget: int) -> frozenset[int]:
    """The chunks to keep.

    Args: order: chunk ids as a step visits them; sizes: bytes of each chunk in RAM, by id; budget: bytes for them.
    The last of the order are kept: then a step begins with reads that can run during the backward before it and
    ends with chunks that need no disk.
    """
    kept: set[int] = set()
    for chunk in reversed(order):
        if sizes[chunk] <= budget:
            kept.add(chunk)
            budget -= sizes[chunk]
    return frozenset(kept)
