"""A small mixture of experts, whose matrices are used in each way that models of other people use theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from offload import OffloadZero, Tuning
from tests.support.quantised import Matrices, in_blocks, in_fp8, in_int8, in_uint8

WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 16, 6, 40
Use = Callable[["Experts", Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """All experts of a layer, in parameters of three dimensions.

    Args:
        use: how they are applied: takes this module, x of shape (tokens, WIDTH), and the expert of each token.
    """

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        return self.use(self, x, expert)


def indexed(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """As the eager loops of transformers."""
    out = torch.zeros_like(x)
    for number in expert.unique():
        rows = (expert == number).nonzero().view(-1)
        hidden = torch.tanh(F.linear(x[rows], own.up[number], own.bias[number]))
        out = out.index_add(0, rows, hidden @ own.down[number].t())
    return out


def iterated(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """Over all experts, also those without tokens, by numbers of Python's."""
    out = torch.zeros_like(x)
    for number, (up, bias) in enumerate(zip(own.up, own.bias, strict=True)):
        hidden = torch.tanh(F.linear(x, up, bias))
        out = out + F.linear(hidden, own.down.select(0, number)) * (expert == number).unsqueeze(1)
    return out


def gathered(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """Each token's matrices, as `batched_mm` of transformers; some are named from the end."""
    hidden = torch.tanh(torch.bmm(own.up[expert - EXPERTS], x.unsqueeze(-1)).squeeze(-1) + own.bias[expert])
    return torch.bmm(own.down.index_select(0, expert), hidden.unsqueeze(-1)).squeeze(-1)


def _by_expert(own: Experts, x: Tensor, expert: Tensor, product: Callable[..., Tensor]) -> Tensor:
    order = expert.argsort(stable=True)
    offs = torch.bincount(expert, minlength=EXPERTS).cumsum(0).to(torch.int32)
    hidden = torch.tanh(product(x[order], own.up.transpose(-2, -1), offs=offs) + own.bias[expert[order]])
    return torch.empty_like(x).index_copy(0, order, product(hidden, own.down.mT, offs=offs))


def grouped(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """As `grouped_mm` of transformers."""
    return _by_expert(own, x, expert, F.grouped_mm)


def _capacity(x: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
    chosen = F.one_hot(expert, EXPERTS).t().to(x.dtype).unsqueeze(-1)  # (EXPERTS, tokens, 1)
    return chosen * x, chosen


def batched(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """Each expert gets a row for every token, as Llama 4 has it; and a product with the matrices on the left."""
    rows, chosen = _capacity(x, expert)
    hidden = torch.tanh(torch.bmm(rows, own.up.transpose(1, 2)) + own.bias.unsqueeze(1))
    return ((own.down @ hidden.mT).mT * chosen).sum(0)


def summed(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    rows, chosen = _capacity(x, expert)
    hidden = torch.tanh(torch.einsum("etw,ehw->eth", rows, own.up) + own.bias.unsqueeze(1))
    return (torch.einsum("eth,ewh->etw", hidden, own.down) * chosen).sum(0)


USES: dict[str, Use] = {one.__name__: one for one in (indexed, iterated, gathered, grouped, batched, summed)}


class Layer(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(use)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weight, expert = self.router(h).softmax(-1).max(-1)
        return x + self.experts(h, expert) * weight.unsqueeze(-1)


class Mixture(nn.Module):
    """Two layers, each of whose tokens goes to one of EXPERTS experts."""

    def __init__(self, use: Use, words: int = 11) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = words
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer(use) for _ in range(2))
        self.head = nn.Linear(WIDTH, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixture(use: str, **options: Any) -> Callable[[], Mixture]:
    """What builds a model whose experts are used in a way of `USES`."""
    return partial(Mixture, USES[use], **options)


FORMATS: dict[str, Callable[[Tensor], Matrices]] = {
    "fp8": in_fp8,
    "int8": in_int8,
    "uint8": in_uint8,
    "blocks": in_blocks,
}


def quantised(make: Callable[[Tensor], Any], use: str | Use, words: int = 5) -> Mixture:
    """A mixture whose experts are frozen and quantised. All else is trained."""
    model = Mixture(USES[use] if isinstance(use, str) else use, words)
    for layer in model.layers:
        layer.experts.requires_grad_(False)
        for name in ("up", "down"):
            weight = nn.Parameter(make(getattr(layer.experts, name).detach()), requires_grad=False)
            setattr(layer.experts, name, weight)
    return model


def weights_of(model: Mixture) -> list[Any]:
    return [weight for layer in model.layers for weight in (layer.experts.up, layer.experts.down)]


def bytes_of(weight: Any) -> int:
    """Of codes and scales."""
    return sum(getattr(weight, name).nbytes for name in weight.NAMES if name != "table")


def in_tiles(model: Mixture, matrices: int = 2, ahead: int = 1) -> Tuning:
    """Makes so many of a weight's quantised matrices a tile."""
    tile = matrices * bytes_of(weights_of(model)[0]) // EXPERTS
    return Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=ahead, threads=1, tile=tile)


class ParamWrapper(nn.Module):
    """What peft's class of this name does with a parameter of the module inside of it.

    Args:
        inside: the module.
        name: the parameter's name in it.
    """

    def __init__(self, inside: Experts, name: str) -> None:
        super().__init__()
        self.inside, self.name = inside, name
        self.adapter = nn.Parameter(torch.randn(EXPERTS, 1, 1) / 10)

    def get_param(self) -> Tensor:
        found: Tensor = getattr(self.inside, self.name)
        return found

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        proxy = nn.Module()
        proxy.forward = lambda weight: weight + self.adapter  # type: ignore[method-assign]
        parametrize.register_parametrization(self.inside, self.name, proxy)
        try:
            out: Tensor = self.inside(x, expert)
        finally:
            parametrize.remove_parametrizations(self.inside, self.name, leave_parametrized=False)
        return out


ParamWrapper.__module__ = "peft.tuners.lora.layer"


def wrapped() -> Mixture:
    """A frozen mixture with adapters of one of the two parameters of experts in each layer."""
    model = mixture("grouped", words=5)().requires_grad_(False)
    for layer in model.layers:
        layer.experts = ParamWrapper(layer.experts, "up")
    return model


def tokens(step: int, count: int = TOKENS, words: int = 11) -> Tensor:
    """Token ids, shape (count,)."""
    return torch.randint(0, words, (count,), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float(), ids)


def same_steps(
    model: Mixture, plain: Mixture, optimizer: OffloadZero, *, counts: tuple[int, ...] = (40, 3, 40), backwards: int = 1
) -> None:
    """Trains a held model, on `counts` tokens a step. Plain torch from the same values gets the same bits."""
    trained = [
        (own, other) for own, other in zip(plain.parameters(), model.parameters(), strict=True) if own.requires_grad
    ]
    adamw = torch.optim.AdamW([own for own, _ in trained], lr=1e-2)
    for step, count in enumerate(counts):
        for micro_batch in range(backwards):
            ids = tokens(step * backwards + micro_batch, count, model.words).to(model.head.weight.device)
            found, expected = loss_of(model, ids), loss_of(plain, ids)
            assert found.item() == expected.item()
            found.backward()
            expected.backward()
        for own, other in trained:
            grad = optimizer.grad(other)
            assert (grad is None) == (own.grad is None)
            if grad is not None:
                assert torch.equal(grad.reshape(own.shape), own.grad.cpu())
        adamw.step()
        adamw.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for (own, _), value in zip(trained, (other.detach().clone() for _, other in trained), strict=True):
                torch.testing.assert_close(value, own.data, rtol=1e-5, atol=1e-7)
                own.copy_(value)
