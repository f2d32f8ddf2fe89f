"""Which units run: their parameters go unseen, all others are guarded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.devices.copies import HostCopier
from offload.entries import Entries
from offload.layout import ParamSpec, build
from offload.model.flat_param import FlatParameters
from offload.model.inner import inner_tensors
from offload.model.running import RunningUnits
from offload.model.unit import Unit
from tests.support.toy import Net, batch


class Guarded(nn.Parameter):
    pass


class Unseen(nn.Parameter):
    pass


@pytest.fixture
def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4)) for _ in range(3)]


@pytest.fixture
def running(params: list[nn.Parameter]) -> RunningUnits:
    """Of a root with one parameter and a unit with two."""
    units = ["", "block", "block"]
    specs = [ParamSpec(f"p{n}", 4, unit, torch.float32, 0) for n, unit in enumerate(units)]
    layout = build(specs, 1024)
    parameters = FlatParameters(layout, inner_tensors(params), torch.device("cpu"), HostCopier())
    parameters.guard_with(lambda kind, *, runs=False, **_: Unseen if runs else Guarded)
    return RunningUnits(parameters, Entries())


def unit(running: RunningUnits, name: str) -> Unit:
    return running._parameters.units[name]


def kinds(params: list[nn.Parameter]) -> str:
    return "".join("u" if type(param) is Unseen else "g" for param in params)


def test_a_unit_goes_unseen_from_its_first_module_to_its_last(
    params: list[nn.Parameter], running: RunningUnits
) -> None:
    assert kinds(params) == "ggg"
    running.enter(unit(running, "block"))
    running.enter(unit(running, "block"))
    assert kinds(params) == "guu"
    running.leave(unit(running, "block"))
    assert kinds(params) == "guu"
    assert unit(running, "block").forwards
    running.leave(unit(running, "block"))
    assert kinds(params) == "ggg"
    assert not unit(running, "block").forwards


def test_units_run_beside_one_another_in_the_order_of_their_entry(
    params: list[nn.Parameter], running: RunningUnits
) -> None:
    running.enter(unit(running, ""))
    running.enter(unit(running, "block"))
    running.enter(unit(running, ""))
    assert [one.name for one in running.units] == ["", "block"]
    assert kinds(params) == "uuu"
    assert running.watches(unit(running, "block"), 1)
    running.leave(unit(running, "block"))
    assert [one.name for one in running.units] == [""]
    assert kinds(params) == "ugg"
    assert not running.watches(unit(running, "block"), 1)


def test_what_never_said_its_end_is_forgotten(params: list[nn.Parameter], running: RunningUnits) -> None:
    running.enter(unit(running, ""))
    running.enter(unit(running, "block"))
    running.enter(unit(running, "block"))
    running.reset()
    assert kinds(params) == "ggg"
    assert not running.units
    running.leave(unit(running, "block"))  # comes late
    assert kinds(params) == "ggg"
    running.enter(unit(running, "block"))
    assert kinds(params) == "guu"


def test_a_unit_without_parameters_runs_too(params: list[nn.Parameter], running: RunningUnits) -> None:
    running.enter(unit(running, "elsewhere"))
    assert unit(running, "elsewhere").forwards
    assert kinds(params) == "ggg"
    running.leave(unit(running, "elsewhere"))


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_inside_its_forward_a_parameter_costs_nothing_and_outside_it_is_guarded(tier: str) -> None:
    model = Net()
    with OffloadZero(model, tier="cpu", param_tier=tier, tuning=Tuning(chunk="4KiB", threads=1)) as optimizer:
        seen: list[tuple[str, str]] = []

        def note(*_: object) -> None:
            seen.append((type(model.blocks[0].after).__name__, type(model.blocks[1].after).__name__))

        model.blocks[0].norm.register_forward_hook(note)
        model.blocks[1].norm.register_forward_hook(note)
        model(batch(0)).sum().backward()
        assert seen == [("WatchedParameter", "GuardedParameter"), ("GuardedParameter", "WatchedParameter")]
        assert {type(param).__name__ for param in model.parameters()} == {"GuardedParameter"}
        model.blocks[1].norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(0))
        optimizer.zero_grad()
        assert {type(param).__name__ for param in model.parameters()} == {"GuardedParameter"}
        assert not optimizer._held.units.running.units


def test_a_tiled_weight_is_guarded_always() -> None:
    model = Net()
    tuning = Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1, tile=300)
    with OffloadZero(model, tier="cpu", param_tier="cpu", tuning=tuning) as optimizer:
        weight = model.blocks[0].up.weight
        expected = weight.detach().clone()
        model(batch(0)).sum().backward()
        with optimizer.gathered(weight, writable=True):
            assert torch.equal(weight + 1, expected + 1)
            assert type(weight).__name__ == "GuardedParameter"
        assert type(weight).__name__ == "GuardedParameter"
        assert torch.equal(weight + 1, expected + 1)
