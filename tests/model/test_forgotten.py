"""Another optimizer trains the held model, because somebody forgot to give it ours: one warning, and no false one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero
from tests.support.toy import Net, batch, squares, take_step

SGD = torch.optim.SGD
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"tier": "cpu"},
    "streamed": {"tier": "cpu", "param_tier": "cpu"},
    "on the disk": {"tier": "nvme", "param_tier": "nvme", "cpu_memory": "2MiB"},
}


@contextmanager
def held(path: Path, placement: str = "resident") -> Iterator[tuple[nn.Module, OffloadZero]]:
    model = Net()
    options = PLACEMENTS[placement]
    with OffloadZero(model, path=path if placement == "on the disk" else None, **options) as optimizer:
        yield model, optimizer


@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_second_forward_warns_once_and_names_the_way_out(
    placement: str, kind: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    with held(tmp_path, placement) as (model, _):
        forgotten = kind(model.parameters(), lr=1e-3)
        take_step(forgotten, squares(model))
        with pytest.warns(UserWarning, match=rf"{kind.__name__}.*step\(\).*optimizers=\(optimizer, None\)") as caught:
            loss = squares(model, batch(1))
        assert len(caught) == 1
        for step in range(2, 5):
            take_step(forgotten, loss)
            loss = squares(model, batch(step))


def test_the_warning_is_told_at_the_line_of_the_forward(tmp_path: Path) -> None:
    with held(tmp_path) as (model, _):
        take_step(SGD(model.parameters(), lr=1e-3), squares(model))
        copied = deepcopy(model)
        copied(batch(0).bfloat16())  # a copy is trained by whom one likes
        with pytest.warns(UserWarning, match="never called") as caught:
            model(batch(0))
        assert caught[0].filename == __file__


def averages(model: nn.Module, optimizer: OffloadZero) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    for param, other in zip(model.parameters(), average.module.parameters(), strict=True):
        with torch.no_grad():
            param.copy_(other)


def clamps(model: nn.Module, optimizer: OffloadZero) -> None:
    squares(model).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.1, 0.1)


def goes_uphill(model: nn.Module, optimizer: OffloadZero) -> None:
    """As sharpness-aware minimisation does."""
    squares(model).backward()
    with torch.no_grad():
        before = [param.clone() for param in model.parameters()]
        for param in model.parameters():
            param.add_(param.grad, alpha=0.1)
    optimizer.zero_grad()
    squares(model).backward()
    with torch.no_grad():
        for param, value in zip(model.parameters(), before, strict=True):
            param.copy_(value)


def loads(model: nn.Module, optimizer: OffloadZero) -> None:
    model.load_state_dict(Net().state_dict())


def schedules(model: nn.Module, optimizer: OffloadZero) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)


def trains_something_else(model: nn.Module, optimizer: OffloadZero) -> None:
    """A head of its own, on features of the held model."""
    head = nn.Linear(3, 1)
    other = SGD(head.parameters(), lr=0.1)
    for step in range(2):
        loss = head(model(batch(step)).float()).sum()
        optimizer.zero_grad()
        take_step(other, loss)


def steps_parameters_without_gradients(model: nn.Module, optimizer: OffloadZero) -> None:
    other = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        other.step()


class Wrapper(torch.optim.Optimizer):
    """Calls the optimizer inside after it has looked at the gradients."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return None


def is_wrapped(model: nn.Module, optimizer: OffloadZero) -> None:
    """By an optimizer that does not call it in its first steps."""
    wrapper = Wrapper(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model)
        loss.backward()
        return loss

    for _ in range(2):
        wrapper.step(closure)


HARMLESS = (
    averages,
    clamps,
    goes_uphill,
    loads,
    schedules,
    trains_something_else,
    steps_parameters_without_gradients,
    is_wrapped,
)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("before", HARMLESS)
def test_what_others_do_before_the_first_step_warns_nobody(
    before: Callable[[nn.Module, OffloadZero], None], tmp_path: Path
) -> None:
    with held(tmp_path) as (model, optimizer), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was never called.*")
        before(model, optimizer)
        for step in range(2):
            model(batch(step))
            optimizer.zero_grad()
            take_step(optimizer, squares(model, batch(step)))


def test_after_our_first_step_another_optimizer_warns_nobody(tmp_path: Path) -> None:
    with held(tmp_path) as (model, optimizer):
        take_step(optimizer, squares(model))
        other = SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            take_step(other, squares(model, batch(step)))


def test_a_closed_model_is_trained_by_whom_one_likes(tmp_path: Path) -> None:
    model = Net()
    OffloadZero(model).close()
    other = SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        take_step(other, squares(model.float(), batch(step)))
