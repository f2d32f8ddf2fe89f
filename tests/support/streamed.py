"""The same training with parameters on the device and streamed: everything it computes has to have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import BudgetError
from tests.support.toy import Net, batch, take_step

Body = Callable[[Any, OffloadZero], None]


def finish(optimizer: OffloadZero) -> None:
    optimizer.clip_grad_norm_(0.7)
    take_step(optimizer)


def train(loss_of: Callable[[Any, Tensor, int], Tensor], steps: int = 4, backwards: int = 1) -> Body:
    """Steps, each of `backwards` micro-batches, whose loss is `loss_of(model, x, count)`."""

    def body(model: Any, optimizer: OffloadZero) -> None:
        for count in range(steps * backwards):
            loss = loss_of(model, batch(count), count)
            loss.backward()
            optimizer.losses.append(loss.item())
            if (count + 1) % backwards == 0:
                finish(optimizer)

    return body


class Watched(OffloadZero):
    """Attribute: losses, what the body of the training noted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.losses: list[float] = []
        super().__init__(*args, **options)


class Streams:
    """Runs trainings both ways. Args: path, late: for the swap files, and for a copier, of the streamed one."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path = path
        self._options = options
        self._runs = 0

    def optimizer(self, model: nn.Module, **options: Any) -> Watched:
        self._runs += 1
        chosen = {
            "tuning": Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1),
            "path": self._path / str(self._runs),
            **self._options,
        }
        return Watched(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **chosen | options)

    def run(self, body: Body, build: Callable[[], nn.Module], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(5)
        model = build()
        with self.optimizer(model, **options) as optimizer:
            body(model, optimizer)
            return optimizer.losses, state_of(model, optimizer)

    def assert_same_bits(self, body: Body, build: Callable[[], nn.Module] = Net, **options: Any) -> None:
        losses, expected = self.run(body, build, param_tier="device", **options)
        streamed_losses, streamed = self.run(body, build, **options)
        assert streamed_losses == losses
        assert streamed.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(streamed[name], tensor), name
        assert not any(tensor.isnan().any() for tensor in expected.values())


def state_of(model: nn.Module, optimizer: OffloadZero) -> dict[str, Tensor]:
    """Parameters, masters and moments, and how often each was stepped."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        with optimizer.gathered(param):
            found[name] = param.detach().cpu().clone()
        if param.requires_grad:
            states = optimizer.state_of(param)
            found[f"{name}.step"] = torch.tensor(states.pop("step"))
            found |= {f"{name}.{kind}": value for kind, value in states.items()}
    return found


def in_little_memory(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> OffloadZero:
    """Holds `model` with the least RAM that it takes, so that nothing stays there which can be on the disk."""
    try:
        OffloadZero(model, optimizer, cpu_memory=1, **options)
    except BudgetError as error:
        return OffloadZero(model, optimizer, cpu_memory=error.needed, **options)
    raise AssertionError("it takes no RAM")
