"""Weights that are handed over, tensor by tensor. The oracle is the state dict of a model with the same values."""

from __future__ import annotations

import copy
import weakref
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ClosedError, ConfigError, OffloadZero, Tuning
from offload.model.unit import Presence
from tests.support.quantised import quantised
from tests.support.toy import Block, take_step

WIDTH = 12
TUNING = Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1)
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"tier": "cpu"},
    "states on nvme": {"tier": "nvme"},
    "streamed from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from nvme": {"tier": "nvme", "param_tier": "nvme"},
    "tiles": {"tier": "cpu", "param_tier": "cpu", "tuning": Tuning(chunk="4KiB", tile="512B")},
}


class Mixed(nn.Module):
    """With tied and frozen parameters, and buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.blocks[1].up.requires_grad_(False)
        self.blocks[2].register_buffer("scale", torch.full((1,), 1.5))
        self.blocks[3].down.weight = self.blocks[0].down.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)


def batch(count: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(count))


def hold(model: nn.Module, place: str, path: Path, **options: Any) -> OffloadZero:
    trained = [param for param in model.parameters() if param.requires_grad]
    given = {"tuning": TUNING, "compute_dtype": torch.float32, "path": path, **PLACES[place]}
    return OffloadZero(model, torch.optim.AdamW(trained, lr=1e-2), **given | options)


def step(model: nn.Module, optimizer: Any, count: int) -> None:
    take_step(optimizer, model(batch(count)).square().mean())


def values_after(steps: int, path: Path, **options: Any) -> dict[str, Tensor]:
    """The state dict of the same model after the same training with everything in RAM, let go of."""
    model = Mixed()
    with hold(model, "resident", path, **options) as optimizer:
        for count in range(steps):
            step(model, optimizer, count)
    return model.state_dict()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype
        assert type(found[name]) is Tensor
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("place", PLACES)
def test_they_are_those_of_the_state_dict_while_an_update_is_pending(place: str, tmp_path: Path) -> None:
    """They are copies: what is kept of them stays what it was while others come, and training goes on."""
    first, second = (values_after(steps, tmp_path / str(steps)) for steps in (1, 2))
    model = Mixed()
    with hold(model, place, tmp_path / "held") as optimizer:
        step(model, optimizer, 0)
        if place == "tiles":  # whose results differ within rounding
            first = copy.deepcopy(model).state_dict()
        found = dict(optimizer.weights())
        assert_same(found, first)
        for _, tensor in optimizer.weights():
            tensor.zero_()  # nobody else's
        step(model, optimizer, 1)
        assert_same(found, first)
        if place == "tiles":
            second = copy.deepcopy(model).state_dict()
        assert_same(dict(optimizer.weights()), second)


@pytest.mark.parametrize("place", ["streamed from cpu", "streamed from nvme"])
def test_one_unit_beside_the_root_is_there_and_one_tensor_is_copied_at_a_time(place: str, tmp_path: Path) -> None:
    model = Mixed()
    with hold(model, place, tmp_path) as optimizer:
        step(model, optimizer, 0)
        optimizer.synchronize()
        units = optimizer._parts.parameters.units
        planned = optimizer.stats()["peak_device_bytes"]
        made: list[weakref.ref[Tensor]] = []
        for _, tensor in optimizer.weights():
            assert not any(ref() is not None for ref in made)
            made.append(weakref.ref(tensor))
            here = [unit.name for unit in units.values() if unit.slices and unit.presence is not Presence.RELEASED]
            assert len([name for name in here if name]) <= 1
            del tensor
        assert optimizer.stats()["peak_device_bytes"] == planned


def test_units_come_in_the_order_of_the_store(tmp_path: Path) -> None:
    model = Mixed()
    with hold(model, "streamed from nvme", tmp_path) as optimizer:
        of_store = list(dict.fromkeys(flat.unit for flat in optimizer._parts.parameters.layout.flats))
        names = [name for name, _ in optimizer.weights()]
    # What is tied belongs to the root.
    units = [".".join(name.split(".")[:2]) if name.startswith("blocks") else "" for name in names if "down" not in name]
    assert [unit for unit, _ in groupby(units)] == of_store


def changed_since(optimizer: OffloadZero, since: int) -> set[str]:
    return {name for name, _ in optimizer.weights(since=since)} - {"blocks.2.scale", *BUFFERS}


BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
FROZEN = {"blocks.1.up.weight", "blocks.1.up.bias"}


@pytest.mark.parametrize("place", ["resident", "streamed from nvme"])
def test_since_a_step_there_is_what_changed_after_it(place: str, tmp_path: Path) -> None:
    model = Mixed()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with hold(model, place, tmp_path, commit_every=0) as optimizer:
        assert changed_since(optimizer, 0) == set()
        step(model, optimizer, 0)
        assert changed_since(optimizer, 0) == names - FROZEN
        assert changed_since(optimizer, 1) == set()
        assert {name for name, _ in optimizer.weights(since=1)} == {"blocks.2.scale", *BUFFERS}
        # One step that reaches two parameters, and writes to a frozen and to a trained one.
        model.embed(batch(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert changed_since(optimizer, 1) == {"embed.weight", "embed.bias"}
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
            model.norm.bias.add_(1)
        assert changed_since(optimizer, 2) == {"blocks.1.up.weight", "norm.bias"}
        assert changed_since(optimizer, 1) == {"embed.weight", "embed.bias", "blocks.1.up.weight", "norm.bias"}
        optimizer.commit()
        for count in (1, 2):
            step(model, optimizer, count)
        assert changed_since(optimizer, 4) == set()
        optimizer.rollback()
        # Whoever has the values of any step so far lacks those that came back.
        assert changed_since(optimizer, 4) >= names - FROZEN
        step(model, optimizer, 3)
        assert changed_since(optimizer, 3) >= names - FROZEN
        expected = copy.deepcopy(model).state_dict()
        found = dict(optimizer.weights(since=2))
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_frozen_parameters_that_are_given_other_memory_have_changed(tmp_path: Path) -> None:
    """`p.data = x` counts no version."""
    model = Mixed()
    frozen = model.blocks[1].up.weight
    with hold(model, "resident", tmp_path) as optimizer:
        step(model, optimizer, 0)
        for count in (1, 2, 1):  # the second may get the memory that the first has left
            assert changed_since(optimizer, optimizer.stats()["step"]) == set()
            for _ in range(count):
                frozen.data = torch.zeros_like(frozen)
            for _ in range(2):
                assert changed_since(optimizer, optimizer.stats()["step"]) == {"blocks.1.up.weight"}
            step(model, optimizer, count)


def test_a_resumed_run_does_not_know_what_changed_before_it(tmp_path: Path) -> None:
    model = Mixed()
    with hold(model, "streamed from nvme", tmp_path) as optimizer:
        step(model, optimizer, 0)
        optimizer.commit()
    model = Mixed()
    with hold(model, "streamed from nvme", tmp_path, resume=True) as optimizer:
        assert changed_since(optimizer, 1) == set()
        assert changed_since(optimizer, 0) == {name for name, _ in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("param_tier", ["cpu", "device"])
def test_quantised_weights_are_what_they_are_in_the_state_dict(param_tier: str) -> None:
    model = quantised()
    trained = [param for param in model.parameters() if param.requires_grad]
    with OffloadZero(model, torch.optim.AdamW(trained), tier="cpu", param_tier=param_tier, tuning=TUNING) as optimizer:
        expected = copy.deepcopy(model).state_dict()
        found = dict(optimizer.weights())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert type(found[name]) is type(value)
            parts = getattr(value, "__tensor_flatten__", lambda: ([], None))()[0]
            for part in parts:
                assert torch.equal(getattr(found[name], part), getattr(value, part)), name
            assert parts or torch.equal(found[name], value), name


def test_what_cannot_be_handed_over_is_refused_before_anything_is_moved(tmp_path: Path) -> None:
    model = Mixed()
    optimizer = hold(model, "streamed from cpu", tmp_path)
    for since in (-1, 1, 0.5, True, "0"):
        with pytest.raises(ConfigError, match="give a step from 0 to 0, the last one, or None"):
            optimizer.weights(since=since)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the model that is held is a Mixed without any: give OffloadZero what"):
        optimizer.weights(merged=True)
    left = optimizer.weights()
    next(left)
    step(model, optimizer, 0)
    with pytest.raises(ConfigError, match="the values of step 0, and step 1 was made before it had ended"):
        next(left)
    left = optimizer.weights()
    next(left)
    model.blocks[3].extra = nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ConfigError, match=r"blocks.3.extra was added .* make a state_dict\(\) of the model"):
        optimizer.weights()
    optimizer.close()
    with pytest.raises(ClosedError):
        next(left)
    with pytest.raises(ClosedError):
        optimizer.weights()


class Adapted(nn.Module):
    """As peft calls what it has put beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.adapter


def test_a_base_that_adapters_are_merged_into_warns_once_and_has_the_values_of_plain_torch(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    plain = copy.deepcopy(model).bfloat16()

    def merge(one: Any, sign: int) -> None:
        for layer in one:
            layer.base_layer.weight.data += sign * layer.adapter.data * 0.3

    def hand_over_as_trl_does(optimizer: OffloadZero) -> None:
        for sign in (1, -1):
            merge(model, sign)
            merge(plain, sign)
            assert_same(dict(optimizer.weights()), plain.state_dict())
        optimizer.commit()

    with hold(model, "streamed from nvme", tmp_path, compute_dtype=torch.bfloat16, commit_every=0) as optimizer:
        with pytest.warns(UserWarning, match=r"optimizer.weights\(merged=True\) hands merged weights over") as caught:
            hand_over_as_trl_does(optimizer)
        assert len(caught) == 1
        assert "0.base_layer.weight is frozen" in str(caught[0].message)
        with torch.no_grad():
            model[0].adapter.add_(1)  # what is trained is written to often
        optimizer.synchronize()
