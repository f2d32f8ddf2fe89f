"""Which chunks stay in RAM, which leave it, and which are read ahead. Pure functions of the order of uses.

[Note: policy]
Training uses chunks in the same order every step, so the future is known and the best policy can be computed (Belady,
"A study of replacement algorithms for a virtual-storage computer", 1966): evict what is used furthest ahead. Where a
step uses every chunk once, that is always the chunk just used, so a fixed resident set is best: `residents`. Where a
step returns to a chunk sooner, the chunk is retained until then if a buffer can wait with it: `belady`. Reading ahead
never evicts a chunk that is used earlier, so it costs no extra byte.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence


def residents(order: Sequence[int], sizes: Sequence[int], budget: int) -> frozenset[int]:
    """The chunks that never leave RAM.

    They are spread evenly over the order. So the disk works while the kernels are busy with what is in RAM, and any
    stretch of a step moves the same share of bytes.

    Args:
        order: the chunks as a step uses them, each once.
        sizes: the bytes of each chunk in RAM, by chunk.
        budget: the most bytes that they may take.
    """
    total = sum(sizes[chunk] for chunk in order)
    share = min(budget / total, 1.0) if total else 0.0
    chosen: set[int] = set()
    due = 0.0
    for chunk in order:
        due += share * sizes[chunk]
        if due >= sizes[chunk] * (1 - 1e-9) and sizes[chunk] <= budget:
            chosen.add(chunk)
            budget -= sizes[chunk]
            due -= sizes[chunk]
    for chunk in order:
        if chunk not in chosen and sizes[chunk] <= budget:
            chosen.add(chunk)
            budget -= sizes[chunk]
    return frozenset(chosen)


def belady(order: Sequence[int], waiting: int, overwriting: Collection[int] = ()) -> frozenset[int]:
    """The positions of `order` after which a chunk is retained in RAM until its next use.

    A chunk that is not retained is read again at its next use. No other choice reads fewer.

    Args:
        order: the chunks as they are used.
        waiting: how many chunks may wait in RAM beside the one in use.
        overwriting: the positions of uses that overwrite the chunk, for which nothing has to be retained.
    """
    following = [len(order) if use in overwriting else use for use in _next_uses(order)]
    retained: set[int] = set()
    kept: dict[int, int] = {}  # chunk: position after which it stays
    for position, chunk in enumerate(order):
        if chunk in kept:
            retained.add(kept.pop(chunk))
        while len(kept) > waiting:
            del kept[max(kept, key=lambda other: following[kept[other]])]
        if following[position] < len(order):
            kept[chunk] = position
    return frozenset(retained)


def reservations(ahead: Iterable[tuple[int, bool]], in_ram: Container[int]) -> Iterator[tuple[int, bool, int]]:
    """For each use to come: whether the chunk is read ahead, and how many buffers this and earlier uses reserve.

    A chunk that is overwritten before it is read is not read ahead, but reserves a buffer.

    Args:
        ahead: the uses to come, as pairs (chunk, whether the use overwrites all of it).
        in_ram: the chunks that have a buffer.

    Yields:
        (chunk, whether it is read ahead, buffers reserved).
    """
    overwritten: set[int] = set()
    taken = 0
    for chunk, overwrites in ahead:
        if overwrites:
            overwritten.add(chunk)
            taken += chunk not in in_ram
        yield chunk, chunk not in overwritten, taken


def victim(candidates: Iterable[int], ahead: Iterable[int]) -> int | None:
    """Which chunk to evict: the one that is used furthest ahead, or never again; None without candidates.

    Args:
        candidates: the chunks that may be evicted.
        ahead: the chunks of the uses to come, in order.
    """
    left = dict.fromkeys(candidates)
    for chunk in ahead:
        if len(left) <= 1:
            break
        left.pop(chunk, None)
    return next(iter(left), None)


def _next_uses(order: Sequence[int]) -> list[int]:
    """For each position, the position of the next use of the same chunk; len(order) if there is none."""
    following = [len(order)] * len(order)
    seen: dict[int, int] = {}
    for position in range(len(order) - 1, -1, -1):
        following[position] = seen.get(order[position], len(order))
        seen[order[position]] = position
    return following
