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
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.toy import WIDTH, Net, batch, squares, take_step


def values(model: nn.Module) -> dict[str, Tensor]:
    """A plain read."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an lr at which every bf16 parameter changes."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def lazy(model: nn.Module, path: Path) -> OffloadZero:
    """States that do not fit into RAM, so that a step is applied where it is used."""
    tuning = Tuning(chunk="4KiB")
    least = least_cpu_memory(model, tuning=tuning)
    return OffloadZero(model, adamw(model), tier="nvme", path=path, cpu_memory=least, tuning=tuning)


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
def stepped(request: pytest.FixtureRequest, tmp_path: Path, copied_by: CopiedBy) -> Iterator[Stepped]:
    twin = Net(3)
    with OffloadZero(twin, adamw(twin), tier="cpu", tuning=Tuning(chunk="4KiB")) as finished:
        squares(twin).backward()
        finished.step()
        assert not waiting(finished)
        after = values(twin)
    if request.param == "late copies":
        copied_by(lambda: LateCopier(1))
    model = Net(3)
    optimizer = lazy(model, tmp_path / "run")
    before, views = values(model), {name: param.data for name, param in model.named_parameters()}
    assert all(not torch.equal(before[name], after[name]) for name in before)
    take_step(optimizer, squares(model))
    assert waiting(optimizer) == UNITS
    yield Stepped(model, optimizer, before, after, views)
    with suppress(StaleParameterError):  # what a test has written to
        optimizer.close()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_read_gets_the_new_value_and_applies_no_other_unit(stepped: Stepped) -> None:
    assert torch.equal(stepped.model.blocks[1].up.weight, stepped.after["blocks.1.up.weight"])
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
        lambda model: torch.stack([block.up.weight for block in model.blocks]),
        lambda model: torch.stack([model.state_dict()[f"blocks.{n}.up.weight"] for n in range(3)]),
        lambda model: torch.stack([block.up.weight.data for block in model.blocks]),
        lambda model: torch.stack([torch.tensor(block.up.weight.tolist()).bfloat16() for block in model.blocks]),
        lambda model: torch.stack([copy.deepcopy(block).up.weight for block in model.blocks]),
    ],
    ids=["a list", "a state_dict", "data", "tolist", "deepcopy"],
)
def test_whoever_reads_gets_new_values(stepped: Stepped, read: Callable[[Net], Tensor]) -> None:
    expected = torch.stack([stepped.after[f"blocks.{number}.up.weight"] for number in range(3)])
    assert torch.equal(read(stepped.model), expected)


def test_the_next_forward_takes_them_unit_by_unit(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    seen: list[set[str]] = []
    for module in (model.embed, *model.blocks):
        module.register_forward_hook(lambda *_: seen.append(waiting(optimizer)))
    model(batch(0))
    assert seen == [UNITS - {""}, {"blocks.1", "blocks.2"}, {"blocks.2"}, set()]
    assert same(values(model), stepped.after)


def test_each_layer_of_the_root_can_be_run_alone(stepped: Stepped) -> None:
    out = stepped.model.head(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    expected = nn.functional.linear(
        torch.ones(1, WIDTH, dtype=torch.bfloat16), stepped.after["head.weight"], stepped.after["head.bias"]
    )
    assert torch.equal(out, expected)
    assert waiting(stepped.optimizer) == UNITS - {""}


def test_a_state_dict_is_of_the_new_values(stepped: Stepped) -> None:
    state = stepped.model.blocks[1].state_dict()
    assert torch.equal(state["up.weight"], stepped.after["blocks.1.up.weight"])
    assert waiting(stepped.optimizer) == UNITS - {"blocks.1"}
    assert same(dict(stepped.model.state_dict()), stepped.after)


def test_what_is_loaded_is_not_overwritten(stepped: Stepped) -> None:
    model, optimizer, before = stepped.model, stepped.optimizer, stepped.before
    model.load_state_dict(before)
    assert same(values(model), before)
    model(batch(0))
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
    write(model.blocks[1].up.weight)
    expected = stepped.after | {"blocks.1.up.weight": 2 * stepped.after["blocks.1.up.weight"]}
    assert same(values(model), expected)
    model(batch(0))
    assert same(values(model), expected)
    model.blocks[1](torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    master = optimizer.state_of(model.blocks[1].up.weight)["master"]
    assert (master - expected["blocks.1.up.weight"]).abs().max() < 2e-2  # a step of lr=1e-2 from there


def test_a_write_through_a_view_from_before_the_step_is_refused_and_not_overwritten(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    old = stepped.views["blocks.1.up.weight"]
    old.fill_(3.0)
    refused = (lambda: model(batch(0)), optimizer.synchronize, optimizer.step, lambda: model.blocks[1].up.weight.sum())
    for call in refused:
        with pytest.raises(StaleParameterError, match=r"blocks\.1\.up\.weight was written to.*through a view"):
            call()
    assert bool(old.eq(3.0).all())
    assert torch.equal(model.blocks[2].up.weight, stepped.after["blocks.2.up.weight"])


def test_a_view_from_before_the_step_shows_new_values_when_they_are_applied(stepped: Stepped) -> None:
    name = "blocks.1.up.weight"
    assert torch.equal(stepped.views[name], stepped.before[name])
    stepped.model.blocks[1].up.weight.sum()
    assert torch.equal(stepped.views[name], stepped.after[name])


def test_a_gradient_of_the_new_values_is_one_for_the_next_step(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    nn.functional.linear(torch.ones(1, WIDTH, dtype=torch.bfloat16), model.head.weight).sum().backward()
    assert torch.equal(optimizer.grad(model.head.weight), torch.ones(3, WIDTH, dtype=torch.bfloat16))
    optimizer.step()
    assert optimizer.state_of(model.head.weight)["step"] == 2
    assert optimizer.state_of(model.blocks[0].up.weight)["step"] == 1


def test_a_gradient_from_a_graph_older_than_the_step_is_refused(tmp_path: Path) -> None:
    model = Net(3)
    with lazy(model, tmp_path / "run") as optimizer:
        old = nn.functional.linear(torch.ones(1, WIDTH, dtype=torch.bfloat16), model.head.weight).sum()
        take_step(optimizer, squares(model))
        with pytest.raises(StaleParameterError, match=r"head\.weight that was made from its value before"):
            old.backward()


def test_after_synchronize_nothing_waits(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    optimizer.synchronize()
    assert not waiting(optimizer)
    stepped.views["blocks.1.up.weight"].fill_(3.0)
    nn.functional.linear(torch.ones(1, WIDTH, dtype=torch.bfloat16), model.head.weight).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.state_of(model.head.weight)["step"] == 2
    assert optimizer.state_of(model.blocks[1].up.weight)["master"].eq(3.0).all()


def test_a_unit_left_out_lands_in_the_next_step(stepped: Stepped) -> None:
    model, optimizer = stepped.model, stepped.optimizer
    model.head(model.embed(batch(0).bfloat16())).square().sum().backward()
    assert waiting(optimizer) == UNITS - {""}
    optimizer.step()
    assert waiting(optimizer) == {""}
    name = "blocks.0.up.weight"
    assert torch.equal(model.blocks[0].up.weight, stepped.after[name])
    assert optimizer.state_of(model.head.weight)["step"] == 2
    assert optimizer.state_of(model.blocks[0].up.weight)["step"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_gets_them_too(stepped: Stepped) -> None:
    found = torch.compile(stepped.model, backend="eager")(batch(0))
    assert not waiting(stepped.optimizer)
    assert torch.equal(found, stepped.model(batch(0)))
    assert same(values(stepped.model), stepped.after)


def test_a_copy_is_of_the_new_values_and_has_no_optimizer(stepped: Stepped) -> None:
    twin = copy.deepcopy(stepped.model)
    assert same(values(twin), stepped.after)
    assert {type(param) for param in twin.parameters()} == {nn.Parameter}
    squares(stepped.model).backward()
    stepped.optimizer.step()
    assert same(values(twin), stepped.after)
    twin(batch(0).bfloat16()).sum().backward()
    assert {type(param.grad) for param in twin.parameters()} == {Tensor}


def test_closing_lands_what_is_left(stepped: Stepped) -> None:
    stepped.optimizer.close()
    assert same(values(stepped.model), stepped.after)
    assert {type(param) for param in stepped.model.parameters()} == {nn.Parameter}


def test_where_the_states_are_in_ram_and_kernels_write_into_the_model_nothing_waits() -> None:
    model = Net(3)
    with OffloadZero(model, tier="cpu", tuning=Tuning(chunk="4KiB")) as optimizer:
        views = {name: param.data for name, param in model.named_parameters()}
        squares(model).backward()
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

    model = Backwards(3)
    with lazy(model, tmp_path / "run") as optimizer:
        units = [flat.unit for flat in optimizer._layout.flats]
        for expected in (["", "blocks.0", "blocks.1", "blocks.2"], ["", "blocks.2", "blocks.1", "blocks.0"]):
            take_step(optimizer, squares(model))
            assert [units[flat] for flat in optimizer._parts.step.pending] == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_a_model_that_waits_for_its_step(tmp_path: Path) -> None:
    model = Net(3)
    with lazy(model, tmp_path / "run") as optimizer:
        squares(model).backward()
        optimizer.step()
        child = os.fork()
        if child == 0:
            for use in (lambda: model(batch(0)), lambda: model.head.weight.sum()):
                try:
                    use()
                except ClosedError:
                    continue
                os._exit(1)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        optimizer.synchronize()
