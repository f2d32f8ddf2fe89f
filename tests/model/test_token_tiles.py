"""Modules in tiles of tokens: against the same module without, against sums made by hand, and on every tier."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, StaleActivationError, Tuning, tile_tokens
from offload.planner import activations, verdict
from tests.support.streamed import Streams, finish

WIDTH = 6


class MLP(nn.Module):
    def __init__(self, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x)))
        return out


def gradients(module: nn.Module, inputs: Tensor, of_result: Tensor) -> dict[str, Tensor | None]:
    """What a forward returns, and its gradients."""
    for param in module.parameters():
        param.grad = None
    entering = inputs.detach().requires_grad_(inputs.requires_grad)
    result = module(entering)
    result.backward(of_result)
    return {"result": result, "inputs": entering.grad} | {name: one.grad for name, one in module.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 5, 12, 1000])
@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2), (0,), (1, 13)], ids=str)
def test_values_and_gradients_are_those_without_tiles(tokens: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = MLP().double()
    inputs = torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    of_result = torch.randn(*shape, WIDTH, dtype=torch.float64)
    expected = gradients(module, inputs, of_result)
    found = gradients(tile_tokens(module, tokens), inputs, of_result)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_weights_are_sums_of_those_of_tiles_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = MLP().to(dtype)
    inputs, of_result = (torch.randn(23, WIDTH).to(dtype) for _ in range(2))
    inputs.requires_grad_()
    sums: dict[str, Tensor] = {}
    rows: list[list[Tensor]] = [[], []]
    for start in range(0, 23, 7):
        tile = gradients(module, inputs[start : start + 7], of_result[start : start + 7])
        for name, value in tile.items():
            assert value is not None
            if name in ("result", "inputs"):
                rows[name == "inputs"].append(value.detach())
            else:
                sums[name] = sums[name] + value.float() if name in sums else value.float()
    found = gradients(tile_tokens(module, 7), inputs, of_result)
    expected = {"result": torch.cat(rows[0]), "inputs": torch.cat(rows[1])} | {
        name: value.to(dtype) for name, value in sums.items()
    }
    for name, value in expected.items():
        assert torch.equal(found[name], value), name  # type: ignore[arg-type]


def test_the_backward_draws_the_random_numbers_of_the_forward() -> None:
    torch.manual_seed(0)
    module = tile_tokens(nn.Sequential(nn.Dropout(0.5)), 3)
    inputs = torch.ones(10, 8, requires_grad=True)
    made = module(inputs)
    torch.rand(7)
    state = torch.get_rng_state()
    made.sum().backward()
    assert torch.equal(inputs.grad, made)  # 0 where it dropped, 2 elsewhere
    assert 0 < int(made.count_nonzero()) < made.numel()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_backward_computes_under_the_autocast_of_the_forward() -> None:
    torch.manual_seed(0)
    module, inputs = tile_tokens(MLP(), 4), torch.randn(10, WIDTH, requires_grad=True)
    seen: list[torch.dtype] = []
    module.up.register_forward_hook(lambda _, __, made: seen.append(made.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        made = module(inputs)
    made.float().sum().backward()
    assert seen == [torch.bfloat16] * 6
    with torch.autocast("cpu", torch.bfloat16):
        module(inputs.detach()).float().sum().backward()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_backward_inside_of_autocast_has_all_gradients(is_shared: bool) -> None:
    """Autocast keeps casts of weights: one that is made in tiles, without a graph, must not cut them off."""

    def found(tokens: int | None, *, inside: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        module, inputs = MLP(), torch.randn(10, WIDTH, requires_grad=True)
        if tokens is not None:
            tile_tokens(module, tokens)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(inputs).float().sum()
            if is_shared:
                loss = loss + nn.functional.linear(inputs, module.up.weight).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [one.grad for one in (inputs, *module.parameters())]

    whole, expected, inside = found(None, inside=True), found(10, inside=False), found(10, inside=True)
    for one, other, plain in zip(inside, expected, whole, strict=True):
        assert one is not None
        assert other is not None
        assert plain is not None
        assert torch.equal(one, other)
        torch.testing.assert_close(one, plain, rtol=0.05, atol=0.05)


def test_a_backward_that_makes_a_graph_is_refused() -> None:
    """Its gradients would count as constants, and a penalty of them would train nothing."""
    module, inputs = tile_tokens(MLP(), 4), torch.randn(10, WIDTH, requires_grad=True)
    with pytest.raises(ConfigError, match="create_graph=True, and a module in tiles of tokens gives no gradients of"):
        torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(x))


@pytest.mark.parametrize("build", [Writing, lambda: nn.Sequential(nn.SiLU(inplace=True), nn.Linear(WIDTH, WIDTH))])
@pytest.mark.parametrize("shape", [(10,), (2, 5)])
def test_a_module_that_writes_to_what_enters_is_refused(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """The backward would compute tiles of what it left there."""
    module, inputs = tile_tokens(build(), 4), torch.randn(*shape, WIDTH)
    with pytest.raises(ConfigError, match="writes to what enters, of which its backward computes"):
        module(inputs)
    later = tile_tokens(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True)), 4)
    assert later(inputs).requires_grad


def test_what_a_backward_computes_again_has_to_be_as_it_was() -> None:
    def write(module: MLP) -> None:
        with torch.no_grad():
            module.up.weight.add_(1)

    changes: list[tuple[Callable[[MLP], object], str]] = [
        (write, "parameters or the mode of MLP have changed"),
        (lambda module: module.eval(), "parameters or the mode of MLP have changed"),
    ]
    for change, error in changes:
        module = tile_tokens(MLP(dropout=0.5), 4)
        made = module(torch.randn(10, WIDTH, requires_grad=True))
        change(module)
        with pytest.raises(StaleActivationError, match=error):
            made.sum().backward()


def test_parameters_that_are_others_in_the_backward_are_told() -> None:
    """It would compute with the module's own, and give their gradients to those."""
    module, inputs = tile_tokens(MLP(), 4), torch.randn(10, WIDTH)
    others = {name: (2 * one).detach().requires_grad_() for name, one in module.named_parameters()}
    made = torch.func.functional_call(module, others, (inputs,))
    with pytest.raises(ConfigError, match="its parameters are others than in the forward"):
        made.sum().backward()


class Conditioned(nn.Module):
    """Attributes: by: what its output is multiplied with; beside: a layer that is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.by = torch.ones(WIDTH)
        self.beside: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x) * self.by
        for one in self.beside:
            out = one(out)
        return out


@pytest.mark.parametrize("how", ["a leaf", "computed", "a layer", "detached"])
def test_a_tensor_from_elsewhere_that_would_get_no_gradient_is_refused(how: str) -> None:
    module, leaf = tile_tokens(Conditioned(), 4), torch.ones(WIDTH, requires_grad=True)
    if how == "a layer":
        module.beside.append(nn.Linear(WIDTH, WIDTH))
    else:
        module.by = {"a leaf": leaf, "computed": leaf * 2, "detached": leaf.detach()}[how]
    made = module(torch.randn(10, WIDTH))
    if how == "detached":
        made.sum().backward()
        return
    with pytest.raises(ConfigError, match=r"uses a tensor .* that needs a gradient and is no parameter of it"):
        made.sum().backward()


@pytest.mark.parametrize("what", ["inputs", "weights", "one weight", "nothing"])
def test_what_needs_no_gradient_gets_none(what: str) -> None:
    torch.manual_seed(0)
    module, inputs = MLP().double(), torch.randn(10, WIDTH, dtype=torch.float64, requires_grad=what == "inputs")
    for name, param in module.named_parameters():
        param.requires_grad_(what == "weights" or (what == "one weight" and name == "up.weight"))
    if what == "nothing":
        assert not tile_tokens(module, 4)(inputs).requires_grad
        return
    of_result = torch.randn(10, WIDTH, dtype=torch.float64)
    expected = gradients(module, inputs, of_result)
    found = gradients(tile_tokens(module, 4), inputs, of_result)
    for name, value in expected.items():
        assert (found[name] is None) is (value is None)
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)


def test_nothing_but_what_enters_is_kept_and_no_tensor_has_more_than_a_tile() -> None:
    module, inputs = tile_tokens(MLP(), 4), torch.randn(30, WIDTH, requires_grad=True)
    kept, seen = list[Tensor](), list[int]()
    module.up.register_forward_hook(lambda _, __, made: seen.append(len(made)))

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = module(inputs)
    assert [one.data_ptr() for one in kept] == [inputs.data_ptr()]
    made.sum().backward()
    assert seen == [4] * 7 + [2] + [4] * 7 + [2]


def test_a_copy_and_what_is_pickled_run_in_tiles_of_their_own() -> None:
    torch.manual_seed(0)
    module, inputs = tile_tokens(MLP(), 4), torch.randn(10, WIDTH)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(inputs), module(inputs))
        seen: list[int] = []
        other.up.register_forward_hook(lambda _, args, __, seen=seen: seen.append(len(args[0])))
        with torch.no_grad():
            other.down.bias += 1
        torch.testing.assert_close(other(inputs), module(inputs) + 1)
        assert seen == [4, 4, 2]


def test_tiles_are_those_of_the_last_call() -> None:
    module, seen = tile_tokens(tile_tokens(MLP(), 4), 9), list[int]()
    module.up.register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    module(torch.randn(10, WIDTH))
    assert seen == [9, 1]


class Block(nn.Module):
    def __init__(self, tokens: int | None, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP(dropout=dropout)
        if tokens is not None:
            tile_tokens(self.mlp, tokens)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Net(nn.Module):
    def __init__(self, tokens: int | None = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(tokens, dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def batch(number: int) -> Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def train(accumulation: int = 1) -> Callable[[nn.Module, Any], None]:
    def body(model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            for part in range(accumulation):
                loss = model(batch(step * accumulation + part))
                optimizer.losses.append(loss.item())
                loss.backward()
            finish(optimizer)

    return body


@pytest.mark.parametrize(
    ("options", "recompute", "dropout"),
    [
        ({}, True, 0.3),
        ({"tier": "nvme"}, True, 0.0),
        ({"activation_tier": "cpu"}, True, 0.3),
        ({"activation_tier": "cpu"}, False, 0.0),
        ({"accumulation": 2}, True, 0.0),
    ],
    ids=str,
)
def test_the_same_bits_on_every_tier(
    streams: Streams, options: dict[str, Any], recompute: bool, dropout: float
) -> None:
    tuning = Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1, recompute=recompute)
    body = train(options.get("accumulation", 1))
    streams.assert_same_bits(body, lambda: Net(dropout=dropout), tuning=tuning, **options)


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_gradients_of_a_held_model_are_those_of_the_plain_one(streams: Streams, param_tier: str) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model).to(torch.bfloat16)
    plain(batch(0)).backward()
    with streams.optimizer(model, param_tier=param_tier, tier="cpu"):
        model(batch(0)).backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


def test_weights_that_run_in_tiles_have_the_gradients_of_plain_ones(streams: Streams) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), nn.Linear(16, 1))
    model = copy.deepcopy(plain)
    tile_tokens(model[0], 5)
    tuning = Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1, tile=1)
    options: dict[str, Any] = {"param_tier": "cpu", "compute_dtype": torch.float32, "tuning": tuning}
    with streams.optimizer(model, tier="cpu", **options) as optimizer:
        assert optimizer._parts.parameters.tiles
        for one in (plain, model):
            one(torch.linspace(-1, 1, 12 * 16).view(12, 16)).square().sum().backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(optimizer.grad(param), other.grad)


@pytest.mark.parametrize("has_tier", [False, True])
def test_activations_are_planned_with_the_mlps_of_blocks_in_tiles(
    has_tier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 an MLP keeps gate, its silu, up and their product of all tokens; in tiles those of one.

    Its backward makes at most as much again of what it computes at a time.
    """
    monkeypatch.setattr(activations, "TILE", 256)
    with torch.device("meta"):
        model, inputs = Net(tokens=None), torch.empty(4, 256, WIDTH, dtype=torch.bfloat16)
    of_model = (model, torch.bfloat16, lambda one: one(inputs))
    whole, tiled = activations.measure(*of_model), activations.measure_in_tiles(*of_model)
    assert tiled is not None
    assert tiled.sum_bytes == 4 * sum(param.numel() for param in MLP().parameters())
    units, of_a_token = 1 if has_tier else 3, 2 * 4 * 4 * WIDTH
    before, after = (verdict.Computing.of(one, 3, has_tier=has_tier) for one in (whole, tiled.waiting))
    assert before.activation_bytes - after.activation_bytes == units * 1024 * of_a_token
    assert before.nbytes - after.nbytes >= (units * 1024 - 2 * 256) * of_a_token
    assert activations.measure_in_tiles(nn.Sequential(MLP()), torch.bfloat16, lambda one: one(inputs)) is None


@pytest.mark.parametrize(("tokens", "error"), [(0, "tokens=0"), (True, "tokens=True"), (2.0, "tokens=2.0")], ids=str)
def test_a_number_of_tokens_that_cannot_be_is_refused(tokens: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        tile_tokens(MLP(), tokens)
    with pytest.raises(ConfigError, match="got a function: give a module"):
        tile_tokens(gradients, 4)  # type: ignore[type-var]


class Wrong(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return x.sum(0) if self.how == "shape" else (x, x)


def test_a_module_that_does_not_compute_tokens_one_by_one_is_refused() -> None:
    for how, error in (("shape", r"made \(6,\) of \(4, 6\)"), ("tuple", "made tuple")):
        with pytest.raises(ConfigError, match=error):
            tile_tokens(Wrong(how), 4)(torch.randn(10, WIDTH))
    module = tile_tokens(MLP(), 4)
    for args in ((), (torch.randn(3, WIDTH), 1), (torch.arange(3),)):
        with pytest.raises(ConfigError, match="was not called with one floating tensor"):
            module(*args)
    with pytest.raises(ConfigError, match=r"give \(\.\.\., H\)"):
        module(torch.randn(WIDTH))


def test_weights_frozen_between_forward_and_backward_are_told() -> None:
    module = tile_tokens(MLP(), 4)
    made = module(torch.randn(10, WIDTH, requires_grad=True))
    module.up.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen or released between a forward and its backward"):
        made.sum().backward()
