"""A training with other threads beside it that read the model, and what they may see.

A reader notes whatever it reads as tensors by name. What it has read has to be, bit for bit, what the model had after
one of its steps: the values that the same training gave without any reader.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import ConfigError, GradientMovedError

WIDTH = 48
STEPS = 5
Values = dict[str, Tensor]
Reader = Callable[[nn.Module, OffloadZero], Values]
TYPED = (ConfigError, GradientMovedError)
"""What a use beside a step may raise: the step is committed already; the gradient was used, or dropped."""

PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"tier": "cpu"},
    "states on nvme": {"tier": "nvme"},
    "streamed from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from nvme": {"tier": "nvme", "param_tier": "nvme"},
    "activations in RAM": {"tier": "cpu", "param_tier": "cpu", "activation_tier": "cpu"},
    "activations on nvme": {"tier": "nvme", "param_tier": "nvme", "activation_tier": "nvme"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> Tensor:
    return torch.randn(16, 7, generator=torch.Generator().manual_seed(step))


@contextlib.contextmanager
def often_switching() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def hold(model: nn.Module, path: Path, lr: float, *, commits: bool = False, **options: Any) -> OffloadZero:
    needs_path = "nvme" in options.values() or commits
    with contextlib.redirect_stderr(io.StringIO()):
        return OffloadZero(
            model,
            torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
            compute_dtype=torch.float32,
            path=path if needs_path else None,
            commit_every=0 if needs_path else None,
            tuning=Tuning(chunk="16KiB", prefetch_chunks=2, prefetch_units=1, threads=1),
            **options,
        )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seen: Callable[[], None] = lambda: None) -> list[float]:
    """Returns: the losses. Args: seen: called before the first step, and after each."""
    losses = []
    seen()
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        seen()
    return losses


class Expected:
    """What a training gives that nobody reads, which is near to what plain torch gives.

    Attributes: losses; values: of all parameters, before the first step and after each.
    """

    def __init__(self, path: Path, lr: float, *, commits: bool, **options: Any) -> None:
        model = Model()
        self.values: list[Values] = []

        def note() -> None:
            self.values.append({name: value.clone() for name, value in model.state_dict().items()})

        with hold(model, path, lr, commits=commits, **options) as optimizer:
            self.losses = train(model, optimizer, note)
        plain = Model()
        losses = train(plain, torch.optim.AdamW(plain.parameters(), lr=lr, weight_decay=0.0))
        assert torch.allclose(torch.tensor(self.losses), torch.tensor(losses), rtol=1e-4)
        for name, value in plain.state_dict().items():
            assert torch.allclose(self.values[-1][name], value, rtol=1e-3, atol=1e-4), name

    def steps_of(self, read: Values) -> set[int]:
        """The steps after which the model had just these values. Norms have names that begin with "norm of "."""
        return {step for step, values in enumerate(self.values) if all(_is_of(values, *one) for one in read.items())}


@functools.cache
def expected_of(lr: float, *, commits: bool, **options: Any) -> Expected:
    """Trained once for all tests of a process."""
    with tempfile.TemporaryDirectory() as path:
        return Expected(Path(path), lr, commits=commits, **options)


def _is_of(values: Values, name: str, tensor: Tensor) -> bool:
    if name.startswith("norm of "):
        return torch.equal(tensor, values[name.removeprefix("norm of ")].norm())
    return torch.equal(tensor, values[name])


class Readers:
    """Threads that read in a loop until the training ends. Attributes: seen: what was read; errors: what was raised."""

    def __init__(self, model: nn.Module, optimizer: OffloadZero, readers: list[Reader]) -> None:
        self.seen: list[Values] = []
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(model, optimizer, one)) for one in readers]

    def _run(self, model: nn.Module, optimizer: OffloadZero, read: Reader) -> None:
        while not self._stop.is_set():
            try:
                self.seen.append(read(model, optimizer))
            except TYPED:
                self.seen.append({})
            except BaseException as error:
                self.errors.append(error)
                return

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
