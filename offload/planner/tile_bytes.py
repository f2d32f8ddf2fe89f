"""What the tiles of nn.Linear read and write in RAM beside what the weight as a whole would; see model/tiling.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload.layout import Layout


class Given(NamedTuple):
    """What a forward gives to an nn.Linear.

    Attributes:
        vectors: how many, of all of its calls.
        width: the elements of each.
        width_out: the elements of what is made of it.
    """

    vectors: int
    width: int
    width_out: int


@contextmanager
def noting(model: nn.Module) -> Iterator[Mapping[str, Given]]:
    """A context that notes what forwards in it give to each nn.Linear.

    Args:
        model: the model.

    Yields:
        By the name of its weight, which is the first one if several modules share it.
    """
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    found: dict[str, Given] = {}

    def note(name: str, module: nn.Linear, given: tuple[Tensor, ...]) -> None:
        before = found[name].vectors if name in found else 0
        found[name] = Given(before + given[0].numel() // module.in_features, module.in_features, module.out_features)

    handles = [
        module.register_forward_pre_hook(partial(note, names[module.weight]))
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight in names
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def tiled_bytes(held: Layout, given: Mapping[str, Given], dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """What it is for a micro-batch.

    With T vectors of K elements that come in, N that go out, n tiles and b bytes an element:

    - forward: the results of tiles are put together, which reads and writes T N elements: 2 b T N bytes.
    - backward: each tile's gradient of what came in is added in fp32. That of the first tile that comes is converted,
      b + 4 bytes an element. Each other one is added to it in place: b + 8. The sum is rounded: 4 + b; in fp32 it is
      what it is.

    Args:
        held: the layout of all parameters that are trained or stream.
        given: what a forward gives to each nn.Linear, as `noting` has it.
        dtype: the compute dtype.

    Returns:
        By the unit of each weight, bytes in its forward and in its backward; see `Passes.tiled_bytes`.
    """
    b = dtype.itemsize
    found: dict[str, tuple[float, float]] = {}
    for spec in held.specs:
        if not spec.tile or spec.name not in given:
            continue
        one, tiles = given[spec.name], -(-spec.numel // spec.tile)
        forward = 2.0 * b * one.vectors * one.width_out
        rounded = 0.0 if dtype == torch.float32 else 4.0 + b
        backward = one.vectors * one.width * ((b + 4.0) + (tiles - 1) * (b + 8.0) + rounded)
        before = found.get(spec.unit, (0.0, 0.0))
        found[spec.unit] = before[0] + forward, before[1] + backward
    return found
