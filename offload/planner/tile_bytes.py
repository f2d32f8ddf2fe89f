"""What the tiles of nn.Linear read and write in RAM beside what the weight as a whole would; see model/tiling.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from offload.layout import Layout


def tiled_bytes(
    model: nn.Module, held: Layout, dtype: torch.dtype, run: Callable[[nn.Module], object]
) -> dict[str, tuple[float, float]]:
    """What it is for a micro-batch.

    With T vectors of K elements that come in, N that go out, n tiles and b bytes an element:

    - forward: the results of tiles are put together, which reads and writes T N elements: 2 b T N bytes.
    - backward: each tile's gradient of what came in is added in fp32. That of the first tile that comes is converted,
      b + 4 bytes an element. Each other one is converted too, and added: b + 4 + 12. The sum is rounded: 4 + b.

    Args:
        model: on the meta device; it is not changed.
        held: the layout of all parameters that are trained or stream.
        dtype: the compute dtype.
        run: runs one forward of the model, with inputs on the meta device.

    Returns:
        By the unit of each weight, bytes in its forward and in its backward; see `Passes.tiled_bytes`.
    """
    tiled = {spec.name: spec for spec in held.specs if spec.tile}
    found: dict[str, tuple[float, float]] = {}
    handles = []

    def note(name: str, module: nn.Linear, given: tuple[Tensor, ...]) -> None:
        spec, b = tiled[name], dtype.itemsize
        vectors, tiles = given[0].numel() // module.in_features, -(-spec.numel // spec.tile)
        forward = 2.0 * b * vectors * module.out_features
        backward = vectors * module.in_features * ((b + 4.0) + (tiles - 1) * (b + 16.0) + (4.0 + b))
        before = found.get(spec.unit, (0.0, 0.0))
        found[spec.unit] = before[0] + forward, before[1] + backward

    for prefix, module in model.named_modules():
        name = f"{prefix}.weight" if prefix else "weight"
        if isinstance(module, nn.Linear) and name in tiled:
            handles.append(module.register_forward_pre_hook(partial(note, name)))
    try:
        with torch.no_grad():
            run(model)
    finally:
        for handle in handles:
            handle.remove()
    return found
