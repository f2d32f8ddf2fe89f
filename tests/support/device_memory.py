"""How much `device_memory` has room for a share of the states, by the plan."""

from __future__ import annotations

from functools import cache
from typing import Any

from offload.native.torch_kernels import scratch_bytes
from offload.planner.explain import plan_of
from offload.planner.placement import Placement
from tests.support import models


@cache
def _placed(kind: str, ranks: int, memory: int | None, options: tuple[tuple[str, Any], ...]) -> Placement:
    given: dict[str, Any] = {"keep_fp32": models.keep_fp32(kind), "device_memory": memory}
    given |= dict(options) | ({"path": "."} if ("tier", "nvme") in options else {})
    return plan_of(models.build(kind), direct=False, ranks=ranks, **given).place()


def placed(kind: str, memory: int | None, ranks: int = 1, **options: Any) -> Placement:
    """What is on rank 0, which has most, with so much `device_memory`."""
    return _placed(kind, ranks, memory, tuple(options.items()))


def memory_for(kind: str, share: float, ranks: int = 1, **options: Any) -> int:
    """The `device_memory` with room for a share of what would be used of it: states, gradients, units that stay.

    That is beside what the device's kernels take.
    """
    none, everything = (placed(kind, memory, ranks, **options).device_bytes for memory in (None, 1 << 40))
    least = none + scratch_bytes(1)
    return int(least + share * (everything - least))
