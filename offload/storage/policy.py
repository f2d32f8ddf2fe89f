"""What stays in RAM and what goes: pure functions over ids and sizes, no tensors.

Training uses chunks in the same order every step, so the future is known, and the best cache can be computed (Belady,
"A study of replacement algorithms for a virtual-storage computer", 1966): drop what is used furthest ahead. Where a
step uses every chunk once, that is always the one just used, so a fixed set stays: `residents`. Where the order comes
back to a chunk sooner, it stays until then if a buffer can wait with it: `stays`. What is read ahead is never paid for
with something that is used before it, so it costs no byte.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence


def residents(order: Sequence[int], sizes: Sequence[int], budget: int) -> frozenset[int]:
    """The chunks that never leave RAM.

    Args: order: ids as a step uses them, each once; sizes: bytes of each in RAM, by id; budget: bytes for them.
    They are spread evenly over the order: then the disk works while the kernels are busy with what is there, and any
    stretch of a step moves the same share of bytes.
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


def stays(order: Sequence[int], waiting: int, fresh: Collection[int] = ()) -> frozenset[int]:
    """The positions of `order` after which a chunk stays in RAM until its next use.

    Args: order: ids as they are used; waiting: how many chunks may wait in RAM beside the one in use; fresh: positions
    of uses that overwrite the chunk, for which nothing has to stay.
    All others are fetched anew at their next use; no other choice fetches fewer.
    """
    following = [len(order) if use in fresh else use for use in _next_uses(order)]
    kept: set[int] = set()
    held: dict[int, int] = {}  # chunk: position after which it stays
    for position, chunk in enumerate(order):
        if chunk in held:
            kept.add(held.pop(chunk))
        while len(held) > waiting:
            del held[max(held, key=lambda other: following[held[other]])]
        if following[position] < len(order):
            held[chunk] = position
    return frozenset(kept)


def fetches(order: Sequence[int], kept: Collection[int], fresh: Collection[int] = ()) -> int:
    """How often something is brought to RAM on `order`, beginning with nothing, if it stays after positions `kept`."""
    return len(order) - len(kept) - len(fresh)


def announced(ahead: Iterable[tuple[int, bool]], in_ram: Container[int]) -> Iterator[tuple[int, bool, int]]:
    """For each use to come: the chunk, whether reading it now is of use, and how many buffers go to those before it.

    Args: ahead: chunks, and whether the use overwrites all of it; in_ram: chunks that have a buffer.
    What is overwritten before it is read is not read, and takes a buffer before what is read after it.
    """
    overwritten: set[int] = set()
    taken = 0
    for chunk, is_fresh in ahead:
        if is_fresh:
            overwritten.add(chunk)
            taken += chunk not in in_ram
        yield chunk, chunk not in overwritten, taken


def victim(candidates: Iterable[int], ahead: Iterable[int]) -> int | None:
    """Whose buffer to take: the candidate that is used furthest ahead, or not at all; None without candidates.

    Args: candidates: chunks whose loss costs no write; ahead: the uses to come.
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
