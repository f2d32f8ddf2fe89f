from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import ConfigError
from offload.model.gradient import is_stand_in
from offload.model.hooks import _Casts
from tests.support import toy


class Net(nn.Module):
    """Takes its inputs in every way that a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, more: dict[str, list[Tensor]], ids: Tensor) -> dict[str, Tensor]:
        self.seen = [x.dtype, more["a"][0].dtype, ids.dtype]
        normed = self.norm(self.body(x) + more["a"][0])
        self.seen.append(normed.dtype)
        return {"out": normed[ids]}


def call(model: nn.Module) -> Tensor:
    out: Tensor = model(torch.ones(3, 4), more={"a": [torch.ones(3, 4)]}, ids=torch.tensor([0, 2]))["out"]
    return out


def wrap(model: nn.Module, **options: object) -> OffloadZero:
    return OffloadZero(model, tier="cpu", tuning=Tuning(threads=1), **options)  # type: ignore[arg-type]


def test_floating_inputs_are_cast_wherever_they_are_and_others_are_left() -> None:
    model = Net()
    with wrap(model):
        assert call(model).dtype is torch.bfloat16
        assert model.seen == [torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16]


def test_a_kept_module_computes_in_fp32_between_others_that_do_not() -> None:
    model = Net()
    with wrap(model, keep_fp32=[nn.LayerNorm]):
        dtypes: list[torch.dtype] = []
        model.norm.register_forward_hook(lambda module, args, output: dtypes.append(args[0].dtype))
        call(model)
        assert dtypes == [torch.float32]
        assert model.seen[3] is torch.bfloat16
        assert model.norm.weight.dtype is torch.float32
        assert model.body.weight.dtype is torch.bfloat16


def test_in_fp32_nothing_is_cast() -> None:
    model = Net()
    expected = call(model)
    with wrap(model, compute_dtype=torch.float32):
        assert torch.equal(call(model), expected)


def test_class_names_and_keys_stay() -> None:
    model = Net()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    with wrap(model):
        assert type(model) is Net
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_parameters()] == names
        assert all(one is other for one, other in zip(model.parameters(), params, strict=True))


def test_each_gradient_leaves_a_stand_in_as_soon_as_it_is_made() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with wrap(model) as optimizer:
        early: list[bool] = []
        middle = model[0](torch.ones(1, 4, dtype=torch.bfloat16))
        middle.register_hook(lambda grad: early.append(is_stand_in(model[1].weight.grad)))
        model[1](middle).sum().backward()
        assert early == [True]
        assert all(is_stand_in(param.grad) for param in model.parameters())
        optimizer.step()
    assert all(param.grad is None for param in model.parameters())


def test_a_parameter_used_twice_gives_one_gradient() -> None:
    model = nn.Linear(4, 4)
    with wrap(model) as optimizer:
        model(model(torch.ones(1, 4))).sum().backward()
        assert optimizer.grad(model.weight) is not None
        optimizer.step()


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    model = Net()
    with wrap(model) as optimizer:
        model.body(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        assert optimizer.grad(model.norm.weight) is None
        optimizer.step()
        assert optimizer.state_of(model.norm.weight)["step"] == 0
        assert optimizer.state_of(model.body.weight)["step"] == 1


def test_closing_takes_every_hook_away() -> None:
    model = Net()
    wrap(model, keep_fp32=[nn.LayerNorm]).close()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for param in model.parameters():
        assert not param._backward_hooks
        assert not getattr(param, "_post_accumulate_grad_hooks", None)


def test_a_copy_or_a_saved_model_casts_but_calls_nobody() -> None:
    model = Net()
    with wrap(model, keep_fp32=[nn.LayerNorm]) as optimizer:
        saved = io.BytesIO()
        torch.save(model, saved)
        twins = [copy.deepcopy(model), torch.load(io.BytesIO(saved.getvalue()), weights_only=False)]
        expected = call(model)
        optimizer.close()
    model.double()
    for twin in twins:
        assert torch.equal(call(twin), expected)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"param_tier": "cpu"},
    "recomputed": {"activation_tier": "cpu"},
    "tiles, recomputed": {"param_tier": "cpu", "activation_tier": "cpu", "tuning": Tuning(tile=128, threads=1)},
}


class Custom(toy.Block):
    """Says itself how it is copied, as some modules of other libraries do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Custom:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def unused(*_: object) -> None:
    """A hook of the user."""


def pickled(module: nn.Module) -> nn.Module:
    saved = io.BytesIO()
    torch.save(module, saved)
    made: nn.Module = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    return made


def hooks_in(module: nn.Module) -> list[Any]:
    tables = [value for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)]
    return [hook for table in tables for hook in table.values()]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("of", ["model", "block"])
def test_a_copy_is_a_plain_module(of: str, copied: Callable[[nn.Module], nn.Module], placement: str) -> None:
    plain, model = toy.Net(), toy.Net()
    handles = [one.blocks[0].register_forward_pre_hook(unused) for one in (plain, model)]
    options = {"tier": "cpu", "compute_dtype": torch.float32} | PLACEMENTS[placement]
    with OffloadZero(model, **options):
        x = toy.batch(0) if of == "model" else torch.randn(3, toy.WIDTH)
        one, expected = (model, plain) if of == "model" else (model.blocks[0], plain.blocks[0])
        one(x).sum().backward()
        twin = copied(one)
        for made, module in zip(twin.modules(), expected.modules(), strict=True):
            assert vars(made).keys() == vars(module).keys()
            assert hooks_in(made) == hooks_in(module)
        for param, other in zip(twin.parameters(), expected.parameters(), strict=True):
            assert type(param) is nn.Parameter
            assert torch.equal(param, other)
        twin.zero_grad()
        twin(x).sum().backward()
        expected(x).sum().backward()
        for param, other in zip(twin.parameters(), expected.parameters(), strict=True):
            assert type(param.grad) is Tensor
            assert torch.equal(param.grad, other.grad)  # type: ignore[arg-type]
        for handle in handles:
            handle.remove()
        scripted = torch.jit.script(copied(one))
        assert torch.equal(scripted(x), expected(x))


def test_a_module_that_says_how_it_is_copied_takes_hooks_along_that_do_nothing() -> None:
    model = toy.Net()
    model.blocks[1] = Custom()
    x = torch.randn(3, toy.WIDTH)
    expected = model.blocks[1](x)
    with OffloadZero(model, tier="cpu", param_tier="cpu", compute_dtype=torch.float32):
        twin = copy.deepcopy(model)
        model(toy.batch(0))
        assert torch.equal(twin.blocks[1](x), expected)
        with torch.no_grad():
            twin.blocks[1].after.zero_()
        for made in (copy.deepcopy(twin), pickled(twin)):
            assert torch.equal(made.blocks[1](x), x)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_script_of_a_held_model_names_the_way_out(placement: str) -> None:
    model = toy.Net()
    with OffloadZero(model, **({"tier": "cpu"} | PLACEMENTS[placement])):
        with pytest.raises(ConfigError, match=r"the module is held.*torch\.jit\.script\(copy\.deepcopy\(module\)\)"):
            torch.jit.script(model)
        with pytest.raises(ConfigError, match=r"a copy of a model that trains in 16 bits.*compute_dtype="):
            torch.jit.script(copy.deepcopy(model))
    torch.jit.script(model)


@pytest.mark.parametrize("tree", [[torch.ones(1)], (torch.ones(1), 3, None), {"a": {"b": torch.ones(1)}}, "text", 5])
def test_casting_keeps_the_structure(tree: object) -> None:
    down, up = _Casts(torch.bfloat16), _Casts(torch.float32)
    assert str(up._cast(down._cast(tree))) == str(tree)
