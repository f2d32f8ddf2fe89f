"""The ZeRO paper's arithmetic: what a rank holds at each stage. An oracle for what the plan and a run say."""

from __future__ import annotations

from offload.layout import Layout

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
KINDS = ("param", "grad", *STATE_KINDS)
"""State kinds: the 16-bit parameter, its gradient, the fp32 master and Adam's moments."""

SHARDED: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset(STATE_KINDS),
    frozenset((*STATE_KINDS, "grad")),
    frozenset(KINDS),
)
"""By stage: the kinds of which a rank holds its own shard only (ZeRO-1, 2 and 3; 0 is plain data parallelism)."""


def held_bytes(
    numel: int, ranks: int, stage: int, *, align: int = 1, itemsize: int = 2, accumulated: bool = False
) -> dict[str, int]:
    """Bytes by state kind that one rank holds of a flat, padding included, wherever they lie.

    Without padding the sums are those of the ZeRO paper for mixed-precision Adam: 16 bytes a parameter at stage 0,
    4 + 12/N at 1, 2 + 14/N at 2, 16/N at 3 (Rajbhandari et al., arXiv:1910.02054, section 5).

    Args: align: elements of which each shard is a multiple; itemsize: bytes of an element of the compute dtype;
    accumulated: gradients are summed in fp32.
    """
    shard = -(-numel // (ranks * align)) * align
    sizes = {"param": itemsize, "grad": 4 if accumulated else itemsize} | dict.fromkeys(STATE_KINDS, 4)
    return {kind: size * (shard if kind in SHARDED[stage] else ranks * shard) for kind, size in sizes.items()}


def total_held(layout: Layout, ranks: int, stage: int, *, accumulated: bool = False) -> dict[str, int]:
    """`held_bytes` of all flats of a model."""
    total = dict.fromkeys(KINDS, 0)
    for flat in layout.flats:
        kinds = held_bytes(flat.numel, ranks, stage, align=64, itemsize=flat.dtype.itemsize, accumulated=accumulated)
        total = {kind: total[kind] + kinds[kind] for kind in KINDS}
    return total
