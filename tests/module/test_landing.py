"""When the new values of a step are in the model, and what happens to who does not wait for them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload import ClosedError, OffloadZero, StaleParameterError, Tuning
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


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name.rpartition(".")[0] for name, now in values(model).items() if not torch.equal(now, before[name])}


ALL = {"embed", "blocks.0.0", "blocks.1.0", "blocks.2.0", "head"}


@pytest.fixture(params=["in place", "late copies"])
def stepped(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Net, OffloadZero, dict[str, Tensor]]]:
    """A model after a step of which nothing has landed, its optimizer, and the values before."""
    if request.param == "late copies":
        monkeypatch.setattr("offload.zero.copier_for", lambda device: LateCopier(1))
    model = Net()
    optimizer = OffloadZero(model, path=tmp_path / "run", tuning=Tuning(chunk="4KiB"))
    before = values(model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    yield model, optimizer, before
    with suppress(StaleParameterError):  # what a test has written to
        optimizer.close()


Stepped = tuple[Net, OffloadZero, dict[str, Tensor]]


def test_a_plain_read_sees_whole_old_values(stepped: Stepped) -> None:
    model, optimizer, before = stepped
    assert not changed(model, before)
    optimizer.synchronize()
    assert changed(model, before) == ALL


def test_the_next_forward_takes_them_unit_by_unit(stepped: Stepped) -> None:
    model, _, before = stepped
    seen: list[set[str]] = []
    for module in (model.embed, *model.blocks):
        module.register_forward_hook(lambda *_: seen.append(changed(model, before)))
    model(X)
    root = {"embed", "head"}
    expected = [root, root | {"blocks.0.0"}, root | {"blocks.0.0", "blocks.1.0"}, ALL]
    assert seen == expected


def test_each_layer_of_the_root_can_be_run_alone(stepped: Stepped) -> None:
    model, _, before = stepped
    model.head(torch.zeros(1, 16, dtype=torch.bfloat16))
    assert changed(model, before) == {"embed", "head"}


def test_a_state_dict_is_of_the_new_values(stepped: Stepped) -> None:
    model, _, before = stepped
    state = model.blocks[1].state_dict()
    assert not torch.equal(state["0.weight"], before["blocks.1.0.weight"])
    assert changed(model, before) == {"blocks.1.0"}
    state = model.state_dict()
    assert all(not torch.equal(state[name], before[name]) for name in before)


def test_what_is_loaded_is_not_overwritten(stepped: Stepped) -> None:
    model, optimizer, before = stepped
    model.load_state_dict(before)
    assert not changed(model, before)
    model(X)
    optimizer.synchronize()
    assert not changed(model, before)
    master = optimizer.state_of(model.head.weight)["master"]
    assert torch.equal(master, before["head.weight"].float())


def test_a_write_in_between_is_refused_and_not_overwritten(stepped: Stepped) -> None:
    model, optimizer, _ = stepped
    with torch.no_grad():
        model.blocks[1][0].weight.fill_(3.0)
    for call in (lambda: model(X), optimizer.synchronize, optimizer.step):
        with pytest.raises(StaleParameterError, match=r"blocks\.1\.0\.weight was written to"):
            call()
    assert bool(model.blocks[1][0].weight.eq(3.0).all())


def test_a_gradient_from_old_values_is_refused(stepped: Stepped) -> None:
    model, _, _ = stepped
    loss = nn.functional.linear(torch.ones(1, 16, dtype=torch.bfloat16), model.head.weight).sum()
    with pytest.raises(StaleParameterError, match=r"head\.weight.*synchronize"):
        loss.backward()


def test_after_synchronize_old_ways_of_use_are_fine(stepped: Stepped) -> None:
    model, optimizer, _ = stepped
    optimizer.synchronize()
    nn.functional.linear(torch.ones(1, 16, dtype=torch.bfloat16), model.head.weight).sum().backward()
    with torch.no_grad():
        model.blocks[1][0].weight.fill_(3.0)
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.state_of(model.head.weight)["step"] == 2


def test_a_unit_left_out_lands_in_the_next_step(stepped: Stepped) -> None:
    model, optimizer, before = stepped
    model.head(model.embed(X.bfloat16())).square().sum().backward()
    assert changed(model, before) == {"embed", "head"}
    optimizer.step()
    assert changed(model, before) == ALL
    assert optimizer.state_of(model.head.weight)["step"] == 2
    assert optimizer.state_of(model.blocks[0][0].weight)["step"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_gets_them_too(stepped: Stepped) -> None:
    model, _, before = stepped
    twin = copy.deepcopy(model)
    torch.compile(model, backend="eager")(X)
    assert changed(model, before) == ALL
    assert not changed(twin, before)  # a copy is of the values that were there, and has no optimizer
    twin(X.bfloat16())


def test_closing_lands_what_is_left(stepped: Stepped) -> None:
    model, optimizer, before = stepped
    optimizer.close()
    assert changed(model, before) == ALL


def test_units_come_in_the_order_of_the_last_forward(tmp_path: Path) -> None:
    class Backwards(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in reversed(self.blocks):
                x = block(x)
            out: Tensor = self.head(x)
            return out

    model = Backwards()
    with OffloadZero(model, path=tmp_path / "run", tuning=Tuning(chunk="4KiB")) as optimizer:
        units = [flat.unit for flat in optimizer._layout.flats]
        for expected in (["", "blocks.0", "blocks.1", "blocks.2"], ["", "blocks.2", "blocks.1", "blocks.0"]):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            assert [units[flat] for flat in optimizer._parts.step.pending] == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_a_model_that_waits_for_its_step(tmp_path: Path) -> None:
    model = Net()
    with OffloadZero(model, path=tmp_path / "run", tuning=Tuning(chunk="4KiB")) as optimizer:
        backward(model)
        optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                model(X)
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        optimizer.synchronize()
