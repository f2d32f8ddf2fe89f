"""The ZeRO paper's arithmetic: what a rank holds at each stage. An oracle for what the plan and a run say."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from offload.dist.partition import Split, splits_of
from offload.errors import ConfigError
from offload.layout import Layout, Piece, pieces_between
from offload.storage.swap_format import STATE_KINDS

KINDS = ("param", "grad", *STATE_KINDS)
"""State kinds: the 16-bit parameter, its gradient, the fp32 master and Adam's moments."""

STAGES = (0, 1, 2, 3)

SHARDED: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset(STATE_KINDS),
    frozenset((*STATE_KINDS, "grad")),
    frozenset(KINDS),
)
"""By stage: the kinds of which a rank holds its own shard only (ZeRO-1, 2 and 3; 0 is plain data parallelism)."""


def partition_of(layout: Layout, flat: int, split: Split, rank: int) -> tuple[Piece, ...]:
    """The pieces of parameters in `rank`'s shard of a flat; `chunk_offset` counts from the shard's start."""
    return tuple(pieces_between(layout.flats[flat], layout.specs, *split.range_of(rank)))


def held_bytes(split: Split, stage: int, *, itemsize: int = 2, accumulated: bool = False) -> dict[str, int]:
    """Bytes by state kind that one rank holds of a flat, padding included, wherever they lie.

    Without padding the sums are those of the ZeRO paper for mixed-precision Adam: 16 bytes a parameter at stage 0,
    4 + 12/N at 1, 2 + 14/N at 2, 16/N at 3 (Rajbhandari et al., arXiv:1910.02054, section 5).

    Args: itemsize: bytes of an element of the compute dtype. accumulated: gradients are summed in fp32.
    Raises: ConfigError for no stage of ZeRO.
    """
    sharded = sharded_at(stage)
    sizes = {"param": itemsize, "grad": 4 if accumulated else itemsize} | dict.fromkeys(STATE_KINDS, 4)
    return {kind: size * (split.shard_numel if kind in sharded else split.padded_numel) for kind, size in sizes.items()}


def total_held(layout: Layout, ranks: int, stage: int, *, accumulated: bool = False) -> dict[str, int]:
    """`held_bytes` of all flats of a model."""
    total = dict.fromkeys(KINDS, 0)
    for flat, cut in zip(layout.flats, splits_of(layout, ranks), strict=True):
        held = held_bytes(cut, stage, itemsize=flat.dtype.itemsize, accumulated=accumulated)
        total = {kind: total[kind] + held[kind] for kind in KINDS}
    return total


def device_bytes(held: Mapping[str, int], offloaded: Collection[str] = (), in_flight: int = 0) -> int:
    """What stays on the device of `held_bytes` when the kinds in `offloaded` live in RAM or on NVMe.

    Offloading all that a stage shards, `sharded_at(stage)`, takes off 12/N, 14/N or 16/N bytes a parameter.
    Args: in_flight: bytes of the units gathered at one time, which stay there.
    """
    return sum(size for kind, size in held.items() if kind not in offloaded) + in_flight


def sharded_at(stage: int) -> frozenset[str]:
    """Raises: ConfigError for no stage of ZeRO."""
    if stage not in STAGES:
        raise ConfigError(f"stage={stage!r}: give 0, 1, 2 or 3")
    return SHARDED[stage]
