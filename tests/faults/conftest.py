"""A tiny model on the NVMe tier, every chunk of which goes through the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import OffloadError
from offload.planner import least_cpu_memory
from tests.support.disks import on_disk
from tests.support.faulty_engine import FaultyEngine

SMALL = Tuning(chunk="4KiB", threads=1)


class Tiny(nn.Module):
    """Five chunks of 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 96)
        self.middle = nn.Linear(96, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out


def batch(seed: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int = 0) -> None:
    model(batch(seed)).square().mean().backward()


def one_step(model: nn.Module, optimizer: OffloadZero, seed: int = 0) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def bits(model: nn.Module, optimizer: OffloadZero | None = None) -> dict[str, Tensor]:
    """Everything that training changes."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        for name, param in model.named_parameters():
            for kind, state in optimizer.state_of(param).items():
                found[f"{name}.{kind}"] = torch.as_tensor(state).clone()
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype is other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def model() -> Tiny:
    return Tiny()


Make = Callable[..., OffloadZero]


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    """OffloadZero on the NVMe tier with the least memory; closed at the end."""
    made: list[OffloadZero] = []

    def call(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> OffloadZero:
        options = {"path": path, "tuning": SMALL} | options
        if "cpu_memory" not in options:
            given = {"accumulation": options.get("accumulation", 1), "states": options.get("states", "fp32")}
            options["cpu_memory"] = least_cpu_memory(model, optimizer, tuning=SMALL, **given)
        made.append(OffloadZero(model, optimizer, **options))
        return made[-1]

    yield call
    for optimizer in made:
        with suppress(OffloadError):  # what a test has broken
            optimizer.close()


@pytest.fixture
def disk() -> Iterator[FaultyEngine]:
    """The disk under the next OffloadZero."""
    engine = FaultyEngine(delay_s=0.0005)
    with on_disk(engine=engine):
        yield engine
