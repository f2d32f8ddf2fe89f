"""How many bytes of a batch wait between forward and backward, measured on the meta device.

Nothing is allocated or computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from offload.choices import ActivationChoice
from offload.devices.copies import HostCopier
from offload.model.activations import Activations
from offload.model.token_tiles import tile_tokens, token_sum_bytes
from offload.model.torch_helpers import tensors_in
from offload.model.units import blocks_of
from offload.planner.live_bytes import peak_of
from offload.planner.tile_bytes import Given, noting
from offload.profiling import Timeline
from offload.storage.activation_store import ActivationStore, Stored
from offload.tiers import CPU

_ENDLESS = 1 << 60
TILE = 2048
"""Tokens that an MLP sees at a time where tiles are counted: enough to keep a GPU busy."""
MLP = "mlp"
"""What transformers calls the MLP of a block, in most of its models."""
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p")
"""The first arguments of `scaled_dot_product_attention`."""


@dataclass(frozen=True)
class Waiting:
    """How many bytes of a forward wait for its backward.

    Attributes:
        entering_bytes: what enters units, in whole pages.
        saved_bytes: all that units save with Tuning(recompute=False), as the operations of the meta device do it
            (kernels of another device may save less or more).
        largest_bytes: the largest tensor that enters a unit.
        output_numel: elements of the largest tensor that the model returns, such as the logits.
        peak_bytes: the most bytes of activations and of their gradients at once, in forward and backward, but for what
            a loss makes of the logits, gradients of parameters, and fp32 sums of `tile_tokens`. None: the backward does
            not run on the meta device.
        peak_bytes_with_tier: likewise where what enters units waits in an activation tier.
        entering: the bytes of each tensor that enters a unit, by the unit's name, in their order.
        saved: likewise of each tensor that a unit saves with Tuning(recompute=False), but for the unit that runs last.
        linears: what each nn.Linear is given, by the name of its weight.
    """

    entering_bytes: int
    saved_bytes: int
    largest_bytes: int
    output_numel: int
    peak_bytes: int | None
    peak_bytes_with_tier: int | None
    entering: Mapping[str, Sequence[int]] = field(default_factory=dict)
    saved: Mapping[str, Sequence[int]] = field(default_factory=dict)
    linears: Mapping[str, Given] = field(default_factory=dict)

    def of(self, choice: ActivationChoice) -> Mapping[str, Sequence[int]]:
        """The bytes of each tensor that a unit puts into an activation tier, by its name; of no tier, nothing."""
        if choice.tier is None:
            return {}
        return self.entering if choice.recompute else self.saved


class _Attention(torch.autograd.Function):
    """What a fused kernel of attention keeps for its backward.

    That is its arguments, its result, and a logarithm for each query and head, in fp32 (Dao et al., FlashAttention,
    arXiv 2205.14135, section 3). Its backward adds up the gradient of the queries in fp32 (Dao, FlashAttention-2,
    arXiv 2307.08691, section 3.2).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        shape = (*query.shape[:-1], value.shape[-1])
        # Kernels write the heads of a token side by side: what the model makes of that is a view.
        result = query.new_empty(shape if len(shape) < 3 else (*shape[:-3], shape[-2], shape[-3], shape[-1]))
        result = result if len(shape) < 3 else result.transpose(-3, -2)
        logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        added = mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask
        ctx.save_for_backward(query, key, value, result, logarithms, added)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        in_fp32 = torch.empty_like(query, dtype=torch.float32)
        return in_fp32.to(query.dtype, copy=True), torch.empty_like(key), torch.empty_like(value), None


class _FusedAttention(TorchFunctionMode):
    """A context in which attention keeps what a fused kernel keeps.

    The meta device has no such kernel, and would keep the scores of all pairs of tokens.

    Args:
        gpu: whether attention with dropout has such a kernel too. A CPU's has none.
    """

    def __init__(self, *, gpu: bool) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(_ATTENTION, args, strict=False)) | dict(kwargs or {})
            if self._gpu or not given.get("dropout_p"):
                tensors = (given[name] for name in ("query", "key", "value"))
                return _Attention.apply(*tensors, given.get("attn_mask"))  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _AsUsual(TorchFunctionMode):
    """A context in which all elements of a tensor without values are true.

    Models ask so whether a batch is as usual, and take another way where it is not: whether no token is padding, and
    whether each row is one sequence, which transformers asks of its positions where there is no cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0] in self._answers:
            return True
        result = func(*args, **(kwargs or {}))
        if func in (torch.all, Tensor.all) and result.is_meta:
            self._answers[result] = None
        return result


def measure(
    model: nn.Module,
    dtype: torch.dtype,
    run: Callable[[nn.Module], object],
    *,
    units: tuple[str | type[nn.Module], ...] | None = None,
    gpu: bool = False,
) -> Waiting:
    """Measures what one forward puts into an activation tier, and what it takes with its backward.

    The forward may raise, as it does where it looks at values.

    Args:
        model: on the meta device; it is not changed.
        dtype: the compute dtype.
        run: runs one forward of a model, with inputs on the meta device.
        units: see `ModelChoice`.
        gpu: whether it would run on a GPU, and not on a CPU.
    """
    model = copy.deepcopy(model).to(dtype)
    recomputing = ActivationChoice(CPU, units=units, recompute=True)
    with _FusedAttention(gpu=gpu), _AsUsual():
        with noting(model) as linears:
            first, _, entering = _run(model, recomputing, run)
        other, output, saved = _run(model, ActivationChoice(CPU, units=units, recompute=False), run)
        peaks = _peaks(model, recomputing, run, gpu=gpu)
    return Waiting(first.peak_bytes, other.peak_bytes, first.largest_bytes, output, *peaks, entering, saved, linears)


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
    model: nn.Module, dtype: torch.dtype, run: Callable[[nn.Module], object], *, gpu: bool = False
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
    return InTiles(measure(model, dtype, run, gpu=gpu), token_sum_bytes(model)) if found else None


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


class _Recomputing(Activations):
    """Activations of a model on the meta device, whose units are recomputed with the same attention."""

    gpu = False

    def recompute(self, unit: Any, compiler: Any, state: Sequence[tuple[Any, int]], args: Any, kwargs: Any) -> Any:
        # Torch has put modes for functions aside for the time of a backward.
        with _FusedAttention(gpu=self.gpu), _AsUsual():
            return compiler.call(unit.forward, args, kwargs)


def _peaks(
    model: nn.Module, with_tier: ActivationChoice, run: Callable[[nn.Module], object], *, gpu: bool
) -> tuple[int | None, int | None]:
    """The most bytes at once without an activation tier, and with one, but for those in its store.

    None where the backward does not run on the meta device.
    """
    of_tiles = token_sum_bytes(model)  # the plan has these
    try:
        whole = peak_of(model, run)
        store = _Noting()
        activations = _Recomputing(model, with_tier, None, store)
        store.activations, activations.gpu = activations, gpu
        try:
            return whole - of_tiles, peak_of(model, run) - of_tiles
        finally:
            activations.remove()
            store.close()
    except Exception:  # an operation without a meta kernel, a gradient that looks at values: whatever it is
        return None, None


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
