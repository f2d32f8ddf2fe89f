"""`state_of(p)` and `grad(p)` look at one parameter: what was written to it counts, and the others cost nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from tests.support.toy import Net, squares, take_step

PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"tier": "cpu"},
    "streamed from RAM": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from the disk": {"tier": "nvme", "param_tier": "nvme", "cpu_memory": "2MiB"},
}


@pytest.mark.parametrize("by", ["state_of", "state"])
@pytest.mark.parametrize("split", [False, True], ids=["", "split masters"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_writes_to_two_parameters_of_a_unit_count_if_one_is_asked_first(
    placement: str, split: bool, by: str, tmp_path: Path
) -> None:
    model = Net(blocks=2)
    options = PLACEMENTS[placement] | {"path": tmp_path} | ({"tuning": Tuning(split_master=True)} if split else {})
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with OffloadZero(model, **options) as optimizer:
        first, second, third = model.blocks[1].up.weight, model.blocks[1].down.weight, model.blocks[0].up.weight
        written = model.blocks[1].state_dict()
        for name in ("up.weight", "down.weight"):
            written[name] = written[name].clone()
            written[name][0] = 3.0
        if by == "state":
            take_step(optimizer, squares(model) * 0.0)
        with optimizer.gathered(model.blocks[1]):  # where nothing is released meanwhile
            model.blocks[1].load_state_dict(written)
            for param, name in ((first, "1.up"), (third, "0.up"), (second, "1.down")):
                expected = before[f"blocks.{name}.weight"].clone()
                if by == "state":
                    assert optimizer.state[param]["exp_avg"].count_nonzero() == 0
                    expected *= 1 - 1e-3 * 1e-2  # AdamW's defaults
                if param is not third:
                    expected[0] = 3.0
                torch.testing.assert_close(optimizer.state_of(param)["master"], expected, rtol=1e-6, atol=1e-8)


class Many(nn.Module):
    """Args: count: of parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def calls(function: Callable[[], object]) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def cost(count: int) -> tuple[int, int, int]:
    """Calls for the states, the gradient and the entry in `optimizer.state` of one of `count` parameters."""
    model = Many(count)
    with OffloadZero(model) as optimizer:
        take_step(optimizer, model())
        model().backward()
        part = model.parts[count // 2]
        asked = (lambda: optimizer.state_of(part), lambda: optimizer.grad(part), lambda: optimizer.state[part])
        for ask in asked:
            ask()
        few, gradient, entry = map(calls, asked)
        return few, gradient, entry


def test_asking_one_parameter_costs_the_same_among_many() -> None:
    halvings = 4
    assert all(many <= few + 3 * halvings for few, many in zip(cost(20), cost(20 * 2**halvings), strict=True))
