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

    Args:
        order: ids as a step uses them, each once.
        sizes: bytes of each in RAM, by id.
        budget: bytes for them. They are spread evenly over the order: then the disk works while the kernels are busy
            with what is there, and any stretch of a step moves the same share of bytes.
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


def belady(order: Sequence[int], waiting: int, fresh: Collection[int] = ()) -> frozenset[int]:
    """The positions of `order` after which a chunk is retained in RAM until its next use.

    Args:
        order: chunks as they are used.
        waiting: how many chunks may wait in RAM beside the one in use.
        fresh: positions of uses that overwrite the chunk, for which nothing has to be retained. All others are read
            again at their next use; no other choice reads fewer.
    """
    following = [len(order) if use in fresh else use for use in _next_uses(order)]
    retained: set[int] = set()
    held: dict[int, int] = {}  # chunk: position after which it stays
    for position, chunk in enumerate(order):
        if chunk in held:
            retained.add(held.pop(chunk))
        while len(held) > waiting:
            del held[max(held, key=lambda other: following[held[other]])]
        if following[position] < len(order):
            held[chunk] = position
    return frozenset(retained)


def reservations(ahead: Iterable[tuple[int, bool]], in_ram: Container[int]) -> Iterator[tuple[int, bool, int]]:
    """Yields (chunk, should_prefetch, buffers reserved by earlier uses) for each use to come.

    Args:
        ahead: (chunk, whether the use overwrites all of it).
        in_ram: chunks that have a buffer. A chunk that is overwritten before it is read is not prefetched, but reserves
            a buffer.
    """
    overwritten: set[int] = set()
    taken = 0
    for chunk, is_fresh in ahead:
        if is_fresh:
            overwritten.add(chunk)
            taken += chunk not in in_ram
        yield chunk, chunk not in overwritten, taken


def victim(candidates: Iterable[int], ahead: Iterable[int]) -> int | None:
    """The candidate to evict: it is used furthest ahead, or never again. None without candidates.

    Args:
        candidates: chunks whose eviction costs no write.
        ahead: the uses to come.
    """
    left = dict.fromkeys(candidates)
    for chunk in ahead:
        if len(left) <= 1:
            break
        left.pop(chunk, None)
    return next(iter(left), None)


def _next_uses(order: Sequence[int]) -> list[int]:
    """For each position, that of the next use of the same chunk; len(order) without one."""
    following = [len(order)] * len(order)
    seen: dict[int, int] = {}
    for position in range(len(order) - 1, -1, -1):
        following[position] = seen.get(order[position], len(order))
        seen[order[position]] = position
    return following
