"""Small models for idioms, with a root unit and blocks as transformers have them, the batches they learn from, and the
loop in which they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.harness import STEPS, Run

VOCABULARY, WIDTH, LENGTH = 17, 8, 6


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class TinyLm(nn.Module):
    """Embeddings and a head in the root unit, blocks in a ModuleList: a language model without attention."""

    def __init__(self, blocks: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def token_batches(steps: int = STEPS, *, batch: int = 4, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the next ones, shape (batch, LENGTH) each."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, in fp32."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def vector_batches(
    inputs: int, outputs: int, steps: int = STEPS, *, batch: int = 5, seed: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs of shape (batch, inputs) and targets of shape (batch, outputs)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(batch, inputs, generator=generator), torch.randn(batch, outputs, generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def learn(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_tokens(run: Run, model: nn.Module, *, eps: float = 1e-8) -> None:
    """An ordinary loop: what is unusual is in the model. Args: eps: large where a bias has no gradient but rounding."""
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


def held_lm(run: Run, **options: Any) -> tuple[TinyLm, Any]:
    model = TinyLm()
    return model, run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
