"""How many bytes of a batch wait between forward and backward, measured on the meta device.

Nothing is allocated or computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload.choices import ActivationChoice
from offload.devices.copies import HostCopier
from offload.model.activations import Activations
from offload.model.token_tiles import tile_tokens, token_sum_bytes
from offload.model.torch_helpers import tensors_in
from offload.model.units import blocks_of
from offload.profiling import Timeline
from offload.storage.activation_store import ActivationStore, Stored
from offload.tiers import CPU

_ENDLESS = 1 << 60
TILE = 2048
"""Tokens that an MLP sees at a time where tiles are counted: enough to keep a GPU busy."""
MLP = "mlp"
"""What transformers calls the MLP of a block, in most of its models."""


@dataclass(frozen=True)
class Waiting:
    """How many bytes of a forward wait for its backward.

    Attributes:
        entering_bytes: what enters units, in whole pages.
        saved_bytes: all that units save with Tuning(recompute=False), as the operations of the meta device do it
            (kernels of another device may save less or more).
        largest_bytes: the largest tensor that enters a unit.
        output_numel: elements of the largest tensor that the model returns, such as the logits.
        entering: the bytes of each tensor that enters a unit, by the unit's name, in their order.
        saved: likewise of each tensor that a unit saves with Tuning(recompute=False), but for the unit that runs last.
    """

    entering_bytes: int
    saved_bytes: int
    largest_bytes: int
    output_numel: int
    entering: Mapping[str, Sequence[int]] = field(default_factory=dict)
    saved: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def of(self, choice: ActivationChoice) -> Mapping[str, Sequence[int]]:
        """The bytes of each tensor that a unit puts into an activation tier, by its name; of no tier, nothing."""
        if choice.tier is None:
            return {}
        return self.entering if choice.recompute else self.saved


class _Attention(torch.autograd.Function):
    """What a fused kernel of attention keeps for its backward.

    That is its arguments, its result, and a logarithm for each query and head, in fp32. Dao et al., FlashAttention,
    arXiv 2205.14135, section 3.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        raise AssertionError("only what waits for the backward is asked for")


class _FusedAttention(TorchFunctionMode):
    """A context in which attention keeps what a fused kernel keeps.

    The meta device has no such kernel, and would keep the scores of all pairs of tokens.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*(given[name] for name in ("query", "key", "value")))  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def measure(
    model: nn.Module,
    dtype: torch.dtype,
    run: Callable[[nn.Module], object],
    *,
    units: tuple[str | type[nn.Module], ...] | None = None,
    fused: bool = False,
) -> Waiting:
    """Measures what one forward puts into an activation tier.

    The forward may raise, as it does where it looks at values.

    Args:
        model: on the meta device; it is not changed.
        dtype: the compute dtype.
        run: runs one forward of a model, with inputs on the meta device.
        units: see `ModelChoice`.
        fused: whether attention is a fused kernel, as on a GPU.
    """
    model = copy.deepcopy(model).to(dtype)
    with _FusedAttention() if fused else nullcontext():
        first, _, entering = _run(model, ActivationChoice(CPU, units=units, recompute=True), run)
        other, output, saved = _run(model, ActivationChoice(CPU, units=units, recompute=False), run)
    return Waiting(first.peak_bytes, other.peak_bytes, first.largest_bytes, output, entering, saved)


@dataclass(frozen=True)
class InTiles:
    """What a forward keeps whose blocks have their MLPs in tiles of `TILE` tokens; see `tile_tokens`.

    Attributes:
        waiting: what waits for the backward.
        sum_bytes: fp32 gradients that a backward adds up at a time.
    """

    waiting: Waiting
    sum_bytes: int


def measure_in_tiles(
    model: nn.Module, dtype: torch.dtype, run: Callable[[nn.Module], object], *, fused: bool = False
) -> InTiles | None:
    """Measures the same with the MLPs of blocks in tiles of tokens.

    The forward may raise, as it does where an MLP takes more than one tensor.

    Returns:
        None if no block has a module that is called `MLP`.
    """
    model = copy.deepcopy(model)
    found = [
        block.get_submodule(MLP) for _, block in blocks_of(model) if isinstance(getattr(block, MLP, None), nn.Module)
    ]
    for one in found:
        tile_tokens(one, TILE)
    return InTiles(measure(model, dtype, run, fused=fused), token_sum_bytes(model)) if found else None


class _Noting(ActivationStore):
    """A store without memory, which notes what it is given.

    Attributes:
        noted: the bytes of each tensor, by the unit that runs.
        activations: knows that unit.
    """

    activations: Activations

    def __init__(self) -> None:
        device = torch.device("meta")
        region = torch.empty(_ENDLESS, dtype=torch.uint8, device=device)
        super().__init__(region, HostCopier(), device, Timeline())
        self.noted: dict[str, list[int]] = {}

    def put(self, data: Tensor) -> Stored:
        if self.activations.running is not None:
            self.noted.setdefault(self.activations.running, []).append(len(data))
        return super().put(data)


def _run(
    model: nn.Module, choice: ActivationChoice, run: Callable[[nn.Module], object]
) -> tuple[_Noting, int, dict[str, list[int]]]:
    """The store after a forward, the elements of the largest result, and what the next forwards put into it."""
    store = _Noting()
    store.activations = activations = Activations(model, choice, None, store)
    try:
        result = run(model)
        output = max((tensor.numel() for tensor in tensors_in(result)), default=0)
        del result
    finally:
        activations.remove()
        store.close()
    stays = None if choice.recompute else activations.running
    return store, output, {unit: sizes for unit, sizes in store.noted.items() if unit != stays}
