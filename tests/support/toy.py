"""The model that most tests train where any would do, and one step of its training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12


class Block(nn.Module):
    """Layers, and parameters of its own that are used before and after them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(width))
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.after = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.up(self.norm(x * self.before))))
        return x + nn.functional.linear(h, self.after)


class Mixed(nn.Module):
    """Units of many sizes, in a list of lists, with frozen parameters beside trained ones."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        stages = ((96, 48), (200, 16, 40), (24,), (200, 72))
        self.stages = nn.ModuleList(self._stage(width, hidden) for hidden in stages)
        self.last = nn.Linear(width, width)

    @staticmethod
    def _stage(width: int, hidden: Sequence[int]) -> nn.ModuleDict:
        made = []
        for number, inner in enumerate(hidden):
            norm, up, down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
            up.requires_grad_(number != 1)
            made.append(nn.Sequential(norm, up, nn.GELU(), down))
        return nn.ModuleDict({"scale": nn.Linear(width, width), "blocks": nn.ModuleList(made)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleDict)
            x = stage["scale"](x)
            for block in cast(nn.ModuleList, stage["blocks"]):
                x = x + block(x).to(x.dtype)
        return cast(Tensor, self.last(x))


class Net(nn.Module):
    """Blocks between layers of the root."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Checkpointed(Net):
    """Args: groups: how many blocks are recomputed together; nested: each block once more on its own."""

    def __init__(self, groups: Sequence[int] = (2, 2), reentrant: bool = False, nested: bool = False) -> None:
        super().__init__(sum(groups))
        self.groups, self.reentrant, self.nested = groups, reentrant, nested

    def group(self, x: Tensor, *blocks: nn.Module) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.nested else block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        h, at = self.embed(x), 0
        for size in self.groups:
            h = checkpoint(self.group, h, *self.blocks[at : at + size], use_reentrant=self.reentrant)
            at += size
        return self.head(self.norm(h))


def batch(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def squares(model: nn.Module, x: Tensor | None = None, count: int = 0) -> Tensor:
    """A loss. Args: x: None: the first batch; count: not used, of loops that number their batches."""
    return model(batch(0) if x is None else x).float().square().mean()


def take_step(optimizer: torch.optim.Optimizer, *losses: Tensor) -> None:
    """One step, with the gradients that are there already and those of `losses`."""
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
