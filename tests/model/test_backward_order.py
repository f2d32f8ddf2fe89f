"""When backward has left a unit, according to autograd itself: none of its gradients come later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import torch_private
from offload.layout import build
from offload.model.backward_order import BackwardOrder
from offload.model.unit import Units
from offload.model.units import ROOT


class Blocks(nn.Module):
    """Blocks that are called as `run` says, between two layers of the root."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.blocks[1].append(nn.Sequential(nn.Linear(4, 4)))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.blocks, self.first(x)))


def in_turn(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def twice(blocks: Any, x: Tensor) -> Tensor:
    return blocks[2](in_turn(blocks, in_turn(blocks, x)))


def skipped(blocks: Any, x: Tensor) -> Tensor:
    """A connection that goes round two blocks, and branches beside each other."""
    a = blocks[0](x)
    return blocks[3](blocks[1](a) + blocks[2](a)) * a


def checkpointed(groups: int, reentrant: bool, blocks: Any, x: Tensor) -> Tensor:
    for start in range(0, 4, groups):
        x = checkpoint(in_turn, list(blocks[start : start + groups]), x, use_reentrant=reentrant)
    return x


class Watched:
    """A model whose modules tell a BackwardOrder what they tell StreamedUnits.

    Attributes: left: what it said, in order; late: gradients of units that had been left.
    """

    def __init__(self, model: Blocks) -> None:
        self.order, self.model = BackwardOrder(), model
        self.unit_of = Units(build([], 1024))
        self.left: list[str] = []
        self.came: list[str] = []
        self.late: list[str] = []
        self.alone: str | None = None
        self.early: str | None = None  # a unit that got a gradient when it was alone
        self.units = {"blocks.1.2": model.blocks[1][2]} | {f"blocks.{n}": block for n, block in enumerate(model.blocks)}
        for unit, module in {ROOT: model, **self.units}.items():
            module.register_forward_pre_hook(lambda *_, unit=unit: self.order.use(self.unit_of[unit]))
            module.register_forward_hook(partial(self._ends, unit))
        for name, param in model.named_parameters():
            unit = next((one for one in self.units if name.startswith(f"{one}.")), ROOT)
            param.register_post_accumulate_grad_hook(lambda _, unit=unit: self._comes(unit))
        self.tasks: set[int] = set()

    def _ends(self, unit: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._enters, unit, self.order.position))

    def _enters(self, unit: str, position: int, grad: Tensor) -> None:
        task = torch_private.graph_task_id()
        if task not in self.tasks:
            self.tasks.add(task)
            torch_private.queue_callback(partial(self._ends_task, task))
        left = [one.name for one in self.order.enter(self.unit_of[unit], position, task)]
        assert self.early in (None, unit, *left), "it was alone, and another unit came before it was left"
        self.left += left
        self.early, self.alone = None, unit if self.order.is_alone(self.unit_of[unit], position) else None

    def _ends_task(self, task: int) -> None:
        left = [one.name for one in self.order.end(task)]
        assert self.early in (None, *left)
        self.left += left
        self.early = None

    def _comes(self, unit: str) -> None:
        self.came.append(unit)
        if unit == "blocks.0":
            assert "blocks.3" in self.left, "it is left only when backward ends"
        if unit == self.alone:
            self.early = unit
        if unit in self.left:
            self.late.append(unit)


RUNS = {
    "in turn": in_turn,
    "twice": twice,
    "skipped": skipped,
    "checkpointed": partial(checkpointed, 1, False),
    "checkpointed in pairs": partial(checkpointed, 2, False),
    "reentrant": partial(checkpointed, 1, True),
    "reentrant pairs": partial(checkpointed, 2, True),
}


@pytest.fixture(params=RUNS, ids=list(RUNS))
def watched(request: pytest.FixtureRequest) -> Watched:
    return Watched(Blocks(RUNS[request.param]))


def test_no_gradient_comes_after_its_unit_was_left(watched: Watched) -> None:
    for _ in range(2):
        x = torch.ones(4, requires_grad=True)
        watched.model(x).sum().backward()
        assert {one for one in watched.came if one != ROOT} == set(watched.units)
        assert watched.late == []
        assert sorted(watched.left) == sorted(watched.units), "a unit was not left, or twice"
        watched.left.clear()
        watched.came.clear()


def test_units_are_left_as_backward_goes_and_not_at_its_end() -> None:
    watched = Watched(Blocks(in_turn))
    watched.model(torch.ones(4)).sum().backward()
    first_of_next = [watched.came.index(one) for one in ("blocks.2", "blocks.1.2", "blocks.0")]
    assert first_of_next == sorted(first_of_next)
    assert watched.left == ["blocks.3", "blocks.2", "blocks.1.2", "blocks.1", "blocks.0"]


def test_a_graph_that_is_used_later_keeps_its_units() -> None:
    """Two forwards, and then their backwards: each leaves what it has used, for the next to leave again."""
    watched = Watched(Blocks(in_turn))
    losses = [watched.model(torch.ones(4)).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
        assert sorted(watched.left) == sorted(watched.units)
        assert watched.late == []
        watched.left.clear()


@pytest.mark.parametrize("run", ["in turn", "twice", "skipped"])
def test_a_graph_that_is_kept_is_left_in_the_same_order_again(run: str) -> None:
    watched = Watched(Blocks(RUNS[run]))
    outputs = watched.model(torch.ones(4))
    outputs.sum().backward(retain_graph=True)
    first = [*watched.left]
    for _ in range(2):
        watched.left.clear()
        watched.came.clear()
        outputs.sum().backward(retain_graph=True)
        assert watched.left == first
        assert watched.late == []
    watched.left.clear()
    watched.model(torch.ones(4)).sum().backward()
    assert watched.left == first
