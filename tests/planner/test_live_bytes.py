"""The peak of activations and their gradients, as torch's own profiler sees it when a plain model runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.demo.gpt import GPT, GPTConfig
from offload.planner.activations import measure
from offload.planner.live_bytes import peak_of
from offload.planner.verdict import Computing
from tests.support.profiled import peak_by_profiler

CONFIG, BATCH = GPTConfig(layers=3, heads=4, width=64, context=512), 2


def once(model: nn.Module, tokens: Tensor) -> None:
    logits = model(tokens)[0]
    torch.autograd.backward(logits, logits.new_empty(()).expand_as(logits))


def peak_of_torch(model: nn.Module, tokens: Tensor) -> int:
    return peak_by_profiler(model, lambda: once(model, tokens))


def recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_what_a_profiler_of_torch_sees(dtype: torch.dtype) -> None:
    """Within 5 %; logits are there in a part of it. With a tier, what enters blocks is not on the device."""
    tokens = torch.randint(256, (BATCH, CONFIG.context), generator=torch.Generator().manual_seed(0))
    waiting = measure(GPT(CONFIG, device="meta"), dtype, lambda model: model(tokens.to("meta")))
    logits = dtype.itemsize * waiting.output_numel
    whole = peak_of_torch(GPT(CONFIG).to(dtype), tokens)
    assert 0.95 * waiting.peak_bytes <= whole <= 1.05 * (waiting.peak_bytes + logits)
    assert waiting.saved_bytes < 0.95 * waiting.peak_bytes  # else this shows nothing
    model = GPT(CONFIG).to(dtype)
    for block in model.blocks:
        block.forward = recomputing(block.forward)
    recomputed = peak_of_torch(model, tokens) - waiting.entering_bytes
    assert 0.95 * waiting.peak_bytes_with_tier <= recomputed <= 1.05 * (waiting.peak_bytes_with_tier + logits)


class Silent(torch.autograd.Function):
    """Has no backward on the meta device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


def test_what_waits_is_known_where_a_backward_looks_at_values() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()), torch.empty(8, 16)
    waiting = measure(model, torch.float32, lambda one: Silent.apply(one(x)))
    assert (waiting.peak_bytes, waiting.peak_bytes_with_tier) == (None, None)
    computing = Computing.of(waiting, 1, has_tier=False)
    assert (computing.activation_bytes, computing.backward_bytes) == (waiting.saved_bytes, 0)


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.made = nn.Linear(16, 3 * 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.made(x).view(1, -1, 3, 4, 4).permute(2, 0, 3, 1, 4)
        result: Tensor = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        return result


class Asking(nn.Module):
    """Takes another way where a row is not one sequence, as models of transformers do that have no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        is_one = (positions.diff() == 1).all()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x if is_one and torch.all(positions >= 0) else x.repeat(1, 1, 100)


def test_a_model_that_asks_whether_a_batch_is_as_usual_is_measured() -> None:
    with torch.device("meta"):
        model, x = Asking(), torch.empty(2, 64, 16)
    waiting = measure(model, torch.float32, lambda one: one(x))
    assert waiting.output_numel == Asking()(torch.randn(2, 64, 16)).numel()
    assert waiting.peak_bytes is not None


def test_what_is_asked_of_values_otherwise_is_not_answered() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(16, 16), torch.empty(2, 16)
    with pytest.raises(RuntimeError, match="meta"):
        measure(model, torch.float32, lambda one: one(x) if (x > 0).any() else x)


@pytest.mark.parametrize(
    ("dropout", "gpu", "has_scores"), [(0.0, False, False), (0.1, True, False), (0.1, False, True)]
)
def test_attention_keeps_no_scores_where_a_kernel_is_fused(dropout: float, gpu: bool, has_scores: bool) -> None:
    """On the CPU, torch 2.13 has such a kernel without dropout only."""
    with torch.device("meta"):
        model, x = Attention(dropout), torch.empty(1, 1024, 16)
    scores = 4 * 4 * 1024 * 1024
    assert (measure(model, torch.float32, lambda one: one(x), gpu=gpu).peak_bytes > scores) is has_scores
    if not gpu:
        model, inputs, kept = Attention(dropout), torch.randn(1, 1024, 16), []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one.nbytes), one)[1], lambda one: one):
            model(inputs)
        assert (max(kept) >= scores) is has_scores


def test_gradients_of_parameters_and_the_result_are_not_counted() -> None:
    """A layer keeps what enters it, which is there before; of its own it makes the gradient of that alone."""
    with torch.device("meta"):
        model, x = nn.Linear(1000, 10), torch.empty(4, 1000, requires_grad=True)
    assert peak_of(model, lambda one: one(x)) == 4 * 4 * 1000 + 4  # and the number at which the backward begins
    assert all(param.grad is None for param in model.parameters())
    model.requires_grad_(False)
    assert peak_of(model, lambda one: one(x.detach())) == 0  # nothing to go back from
