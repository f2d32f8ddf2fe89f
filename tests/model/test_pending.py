"""When the new values of a step are in the model: nobody sees old ones, and each unit is applied when it is used."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from offload import ClosedError, OffloadZero, StaleParameterError, Tuning
from offload.planner import least_cpu_memory
from tests.support.late_copier import LateCopier


class Net(nn.Module):
    """A root with two layers of its own around three blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def backward(model: nn.Module) -> None:
    model(X).square().sum().backward()


def values(model: nn.Module) -> dict[str, Tensor]:
    """A plain read."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def lazy(model: nn.Module, path: Path) -> OffloadZero:
    """States that do not fit into RAM, so that a step is applied where it is used."""
    tuning = Tuning(chunk="4KiB")
    least = least_cpu_memory(model, tuning=tuning)
    return OffloadZero(model, tier="nvme", path=path, cpu_memory=least, tuning=tuning)


def waiting(optimizer: OffloadZero) -> set[str]:
    """The units whose new values are still to be applied; asks no parameter."""
    return {optimizer._layout.flats[flat].unit for flat in optimizer._parts.step.pending}


UNITS = {"", "blocks.0", "blocks.1", "blocks.2"}


class Stepped(NamedTuple):
    """A model after a step of which nothing is applied, its optimizer, and the values before and after."""

    model: Net
    optimizer: OffloadZero
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    views: dict[str, Tensor]
    """`p.data`, taken before the step."""


@pytest.fixture(params=["in place", "late copies"])
def stepped(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepped]:
    twin = Net()
    with OffloadZero(twin, tier="cpu", tuning=Tuning(chunk="4KiB")) as finished:
        backward(twin)
        finished.step()
        assert not waiting(finished)
        after = values(twin)
    if request.param == "late copies":
        monkeypatch.setattr("offload.build.copier_for", lambda device: LateCopier(1))
    model = Net()
    optimizer = lazy(model, tmp_path / "run")
    before, views = values(model), {name: param.data for name, param in model.named_parameters()}
    assert all(not torch.equal(before[name], after[name]) for name in before)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    assert waiting(optimizer) == UNITS
    yield Stepped(model, optimizer, before, after, views)
    with suppress(StaleParameterError):  # what a test has written to
        optimizer.close()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_read_gets_the_new_value_and_applies_no_other_unit(stepped: Stepped) -> None:
    assert torch.equal(stepped.model.blocks[1][0].weight, stepped.after["blocks.1.0.weight"])
    assert waiting(stepped.optimizer) == UNITS - {"blocks.1"}
    assert same(values(stepped.model), stepped.after)
    assert not waiting(stepped.optimizer)


def test_what_asks_for_no_values_applies_nothing(stepped: Stepped) -> None:
    for param in stepped.model.parameters():
        assert (param.shape, param.dtype, param.numel()) == (param.size(), torch.bfloat16, param.nelement())
        assert param.is_leaf
        assert param.requires_grad
        assert param.grad is None
        torch.zeros_like(param)
    assert waiting(stepped.optimizer) == UNITS


@pytest.mark.parametrize(
    "read",
    [
        lambda model: torch.stack([block[0].weight for block in model.blocks]),
        lambda model: torch.stack([model.state_dict()[f"blocks.{n}.0.weight"] for n in range(3)]),
        lambda model: torch.stack([block[0].weight.data for block in model.blocks]),
        lambda model: torch.stack([torch.tensor(block[0].weight.tolist()).bfloat16() for block in model.blocks]),
        lambda model: torch.stack([copy.deepcopy(block)[0].weight for block in model.blocks]),
    ],
    ids=["a list", "a state_dict", "data", "tolist", "deepcopy"],
)
def test_whoever_reads_gets_new_values(stepped: Stepped, read: Callable[[Net], Tensor]) -> None:
    expected = torch.stack([stepped.after[f"blocks.{number}.0.weight"] for number in range(3)])
    assert torch.equal(read(stepped.model), expected)


def test_the_next_forward_takes_them_unit_by_unit(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    seen: list[set[str]] = []
    for module in (model.embed, *model.blocks):
        module.register_forward_hook(lambda *_: seen.append(waiting(optimizer)))
    model(X)
    assert seen == [UNITS - {""}, {"blocks.1", "blocks.2"}, {"blocks.2"}, set()]
    assert same(values(model), stepped.after)


def test_each_layer_of_the_root_can_be_run_alone(stepped: Stepped) -> None:
    out = stepped.model.head(torch.ones(1, 16, dtype=torch.bfloat16))
    expected = nn.functional.linear(
        torch.ones(1, 16, dtype=torch.bfloat16), stepped.after["head.weight"], stepped.after["head.bias"]
    )
    assert torch.equal(out, expected)
    assert waiting(stepped.optimizer) == UNITS - {""}


def test_a_state_dict_is_of_the_new_values(stepped: Stepped) -> None:
    state = stepped.model.blocks[1].state_dict()
    assert torch.equal(state["0.weight"], stepped.after["blocks.1.0.weight"])
    assert waiting(stepped.optimizer) == UNITS - {"blocks.1"}
    assert same(dict(stepped.model.state_dict()), stepped.after)


def test_what_is_loaded_is_not_overwritten(stepped: Stepped) -> None:
    model, optimizer, before = stepped.model, stepped.optimizer, stepped.before
    model.load_state_dict(before)
    assert same(values(model), before)
    model(X)
    optimizer.synchronize()
    assert same(values(model), before)
    master = optimizer.state_of(model.head.weight)["master"]
    assert torch.equal(master, before["head.weight"].float())


def double_data(param: Tensor) -> None:
    param.data.mul_(2)


def double_detached(param: Tensor) -> None:
    param.detach().mul_(2)


@torch.no_grad()
def double(param: Tensor) -> None:
    param.mul_(2)


@pytest.mark.parametrize("write", [double, double_data, double_detached])
def test_a_write_in_between_counts(stepped: Stepped, write: Callable[[Tensor], None]) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    write(model.blocks[1][0].weight)
    expected = stepped.after | {"blocks.1.0.weight": 2 * stepped.after["blocks.1.0.weight"]}
    assert same(values(model), expected)
    model(X)
    assert same(values(model), expected)
    model.blocks[1](torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    master = optimizer.state_of(model.blocks[1][0].weight)["master"]
    assert (master - expected["blocks.1.0.weight"]).abs().max() < 2e-3  # a step of lr=1e-3 from there


def test_a_write_through_a_view_from_before_the_step_is_refused_and_not_overwritten(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    old = stepped.views["blocks.1.0.weight"]
    old.fill_(3.0)
    refused = (lambda: model(X), optimizer.synchronize, optimizer.step, lambda: model.blocks[1][0].weight.sum())
    for call in refused:
        with pytest.raises(StaleParameterError, match=r"blocks\.1\.0\.weight was written to.*through a view"):
            call()
    assert bool(old.eq(3.0).all())
    assert torch.equal(model.blocks[2][0].weight, stepped.after["blocks.2.0.weight"])


def test_a_view_from_before_the_step_shows_new_values_when_they_are_applied(stepped: Stepped) -> None:
    name = "blocks.1.0.weight"
    assert torch.equal(stepped.views[name], stepped.before[name])
    stepped.model.blocks[1][0].weight.sum()
    assert torch.equal(stepped.views[name], stepped.after[name])


def test_a_gradient_of_the_new_values_is_one_for_the_next_step(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    nn.functional.linear(torch.ones(1, 16, dtype=torch.bfloat16), model.head.weight).sum().backward()
    assert torch.equal(optimizer.grad(model.head.weight), torch.ones(4, 16, dtype=torch.bfloat16))
    optimizer.step()
    assert optimizer.state_of(model.head.weight)["step"] == 2
    assert optimizer.state_of(model.blocks[0][0].weight)["step"] == 1


def test_a_gradient_from_a_graph_older_than_the_step_is_refused(tmp_path: Path) -> None:
    model = Net()
    with lazy(model, tmp_path / "run") as optimizer:
        old = nn.functional.linear(torch.ones(1, 16, dtype=torch.bfloat16), model.head.weight).sum()
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(StaleParameterError, match=r"head\.weight that was made from its value before"):
            old.backward()


def test_after_synchronize_nothing_waits(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    optimizer.synchronize()
    assert not waiting(optimizer)
    stepped.views["blocks.1.0.weight"].fill_(3.0)
    nn.functional.linear(torch.ones(1, 16, dtype=torch.bfloat16), model.head.weight).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.state_of(model.head.weight)["step"] == 2
    assert optimizer.state_of(model.blocks[1][0].weight)["master"].eq(3.0).all()


def test_a_unit_left_out_lands_in_the_next_step(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    model.head(model.embed(X.bfloat16())).square().sum().backward()
    assert waiting(optimizer) == UNITS - {""}
    optimizer.step()
    assert waiting(optimizer) == {""}
    name = "blocks.0.0.weight"
    assert torch.equal(model.blocks[0][0].weight, stepped.after[name])
    assert optimizer.state_of(model.head.weight)["step"] == 2
    assert optimizer.state_of(model.blocks[0][0].weight)["step"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_gets_them_too(stepped: Stepped) -> None:
    found = torch.compile(stepped.model, backend="eager")(X)
    assert not waiting(stepped.optimizer)
    assert torch.equal(found, stepped.model(X))
    assert same(values(stepped.model), stepped.after)


def test_a_copy_is_of_the_new_values_and_has_no_optimizer(stepped: Stepped) -> None:
    twin = copy.deepcopy(stepped.model)
    assert same(values(twin), stepped.after)
    assert {type(param) for param in twin.parameters()} == {nn.Parameter}
    backward(stepped.model)
    stepped.optimizer.step()
    assert same(values(twin), stepped.after)
    twin(X.bfloat16()).sum().backward()
    assert {type(param.grad) for param in twin.parameters()} == {Tensor}


def test_closing_lands_what_is_left(stepped: Stepped) -> None:
    stepped.optimizer.close()
    assert same(values(stepped.model), stepped.after)
    assert {type(param) for param in stepped.model.parameters()} == {nn.Parameter}


def test_where_the_states_are_in_ram_and_kernels_write_into_the_model_nothing_waits() -> None:
    model = Net()
    with OffloadZero(model, tier="cpu", tuning=Tuning(chunk="4KiB")) as optimizer:
        views = {name: param.data for name, param in model.named_parameters()}
        backward(model)
        optimizer.step()
        assert not waiting(optimizer)
        assert same(views, values(model))


def test_units_come_in_the_order_of_the_last_forward(tmp_path: Path) -> None:
    class Backwards(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in reversed(self.blocks):
                x = block(x)
            out: Tensor = self.head(x)
            return out

    model = Backwards()
    with lazy(model, tmp_path / "run") as optimizer:
        units = [flat.unit for flat in optimizer._layout.flats]
        for expected in (["", "blocks.0", "blocks.1", "blocks.2"], ["", "blocks.2", "blocks.1", "blocks.0"]):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            assert [units[flat] for flat in optimizer._parts.step.pending] == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_a_model_that_waits_for_its_step(tmp_path: Path) -> None:
    model = Net()
    with lazy(model, tmp_path / "run") as optimizer:
        backward(model)
        optimizer.step()
        child = os.fork()
        if child == 0:
            for use in (lambda: model(X), lambda: model.head.weight.sum()):
                try:
                    use()
                except ClosedError:
                    continue
                os._exit(1)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        optimizer.synchronize()
