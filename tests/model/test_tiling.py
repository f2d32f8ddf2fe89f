"""Memory-centric tiling: linear layers that are on the device tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from offload import BudgetError, ConfigError, OffloadZero, Tuning
from offload.model import tiling as tiled
from offload.planner import least_cpu_memory
from offload.planner.explain import plan_of
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.released import has_no_values
from tests.support.streamed import Streams, Watched, finish, state_of, train
from tests.support.toy import WIDTH, Checkpointed, Net, batch, squares

TILE = 300
"""Bytes; the layers of Net have weights of 576, in tiles of 16 and 8 rows."""


def tuning(prefetch: int, tile: int | str = TILE, chunk: str = "4KiB") -> Tuning:
    return Tuning(chunk=chunk, prefetch_chunks=prefetch, prefetch_units=prefetch, threads=1, tile=tile)


BUILDS = {"": Net, "saved": Checkpointed, "reentrant": lambda: Checkpointed(reentrant=True)}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    ("build", "accumulation"),
    [("", 1), ("", 2), *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in BUILDS if kind)]
    + [(kind, 1) for kind in BUILDS if kind],
)
def test_tiled_runs_have_the_same_bits_on_every_tier(
    streams: Streams, build: str, accumulation: int, tmp_path: Path
) -> None:
    body = train(squares, backwards=accumulation)
    (tmp_path / "plain").mkdir()
    plain = Streams(tmp_path / "plain", {"param_tier": "cpu"})
    losses, expected = plain.run(body, BUILDS[build], tuning=tuning(0), accumulation=accumulation)
    for prefetch in (0, 1, 4):
        tiled_losses, tiled = streams.run(body, BUILDS[build], tuning=tuning(prefetch), accumulation=accumulation)
        assert tiled_losses == losses
        assert all(torch.equal(tiled[name], tensor) for name, tensor in expected.items())
    # The same computation, but for the order of a sum.
    losses_of_whole, _ = streams.run(body, BUILDS[build], tuning=tuning(1, tile=0), accumulation=accumulation)
    assert losses == pytest.approx(losses_of_whole, rel=0.05)
    assert losses[0] == pytest.approx(losses_of_whole[0], rel=1e-6)


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("recompute", [True, False])
def test_tiles_of_units_whose_activations_wait_train_as_plain_torch(
    tier: str, recompute: bool, streams: Streams, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for count in range(4):
        loss = squares(model, batch(count), count)
        loss.backward()
        expected.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        plain.step()
        plain.zero_grad()
    chosen = replace(tuning(1), recompute=recompute)
    losses, _ = streams.run(train(squares), Net, tuning=chosen, activation_tier=tier, compute_dtype=torch.float32)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_gradients_in_slots_change_no_bit(streams: Streams, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 301), nn.Linear(301, 1200), nn.Linear(1200, 5))

    found = [
        streams.run(train(squares, steps=3, backwards=2), build, tuning=chosen, grad_tier=tier, accumulation=2)
        for tier in ("cpu", "nvme")
        for chosen in (tuning(1, 200_000, "256KiB"), tuning(0, 200_000, "512KiB"))
    ]
    for losses, tensors in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(tensors[name], tensor) for name, tensor in found[0][1].items())


def test_a_layer_larger_than_the_device_budget_is_tiled_by_itself(
    copied_by: CopiedBy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied_by(lambda: LateCopier(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Linear(64, 3000), nn.Linear(3000, 64), nn.Linear(64, 3))
    before = {name: (type(module), list(module._parameters)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    weight = 2 * 64 * 3000
    memory = weight // 2
    options: dict[str, Any] = {"path": tmp_path / "run", "param_tier": "nvme", "device_memory": memory}
    planned = plan_of(model, direct=False, **options).place()
    with OffloadZero(model, **options) as optimizer:
        assert "run in tiles" in capsys.readouterr().err
        for count in range(3):
            squares(model, batch(count), count).backward()
            finish(optimizer)
        stats = optimizer.stats()
        assert weight / 20 < stats["peak_device_bytes"] <= planned.device_bytes <= memory
        assert {name: (type(module), list(module._parameters)) for name, module in model.named_modules()} == before
        assert list(model.state_dict()) == keys
        assert model.state_dict()["1.weight"].shape == (3000, 64)
        assert [p.shape for p in model[1].parameters()] == [(3000, 64), (3000,)]
        assert optimizer.stats()["peak_device_bytes"] <= memory  # as a whole it is in RAM
    with pytest.raises(BudgetError) as caught:
        OffloadZero(nn.Linear(64, 3000), param_tier="cpu", device_memory=memory, tuning=Tuning(tile=0))
    assert (caught.value.option, caught.value.available) == ("device_memory", memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_tiled_layer_is_within_the_stated_bound_of_a_whole_one(bias: bool, dtype: torch.dtype) -> None:
    """docs/exactness.md"""
    torch.manual_seed(1)
    inputs, outputs, tile = 96, 1000, 40
    x, grad = torch.randn(3, 7, inputs).to(dtype), torch.randn(3, 7, outputs).to(dtype)
    model = nn.Linear(inputs, outputs, bias=bias)
    nbytes = tile * inputs * dtype.itemsize
    options: dict[str, Any] = {"compute_dtype": dtype, "param_tier": "cpu", "tuning": tuning(1, nbytes)}
    layout = plan_of(model, direct=True, **options).layout
    tiles = len(layout.slices) - len(layout.flats)
    assert tiles == outputs // tile
    with OffloadZero(model, **options) as optimizer:
        with optimizer.gathered(model):
            w = model.weight.detach().double().clone()
            b = model.bias.detach().double().clone() if bias else torch.zeros(outputs, dtype=torch.float64)
        x.requires_grad_()
        y = model(x)
        y.backward(grad)
        of_weight = optimizer.grad(model.weight)
    u, v = torch.finfo(dtype).eps / 2, 2.0**-23
    g, z = grad.double(), x.detach().double()

    def near(found: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> None:
        assert ((found.double() - exact).abs() <= u * exact.abs() + terms * v * magnitude).all()

    near(y, z @ w.T + b, z.abs() @ w.abs().T + b.abs(), inputs + 1)
    assert of_weight is not None
    near(of_weight, g.flatten(0, 1).T @ z.flatten(0, 1), g.abs().flatten(0, 1).T @ z.abs().flatten(0, 1), 21)
    parts = [g[..., k : k + tile] @ w[k : k + tile] for k in range(0, outputs, tile)]
    magnitude = g.abs() @ w.abs()
    assert x.grad is not None
    error = (x.grad.double() - g @ w).abs()
    bound = u * (g @ w).abs() + (u + tiles * v) * sum(part.abs() for part in parts) + tile * v * magnitude
    assert (error <= bound).all()


def test_the_gradient_of_the_input_is_summed_in_fp32() -> None:
    """In bf16 each of 512 parts would vanish beside the first."""
    model = nn.Linear(64, 1024, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[:, 0] = 2.0**-9
        model.weight[-1, 0] = 1.0
    with OffloadZero(model, param_tier="cpu", tuning=tuning(0, 2 * 64 * 2)):
        x = torch.randn(1, 64).bfloat16().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x)
        assert grad[0, 0].item() == torch.tensor(1 + 1023 * 2.0**-9).bfloat16().item()
        assert torch.equal(torch.func.grad(lambda x: model(x).sum())(x.detach()), grad)


def test_frozen_layers_stay_and_freezing_later_works(streams: Streams) -> None:
    def build() -> Net:
        model = Net()
        model.blocks[1].up.requires_grad_(False)
        return model

    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        model.blocks[2].requires_grad_(count % 2 == 0)
        return squares(model, x, count)

    def body(model: Net, optimizer: Watched) -> None:
        names = {one.unit for one in optimizer._layout.slices}
        assert "blocks.0.up.weight[0]" in names
        assert not any(name.startswith("blocks.1.up") for name in names)
        train(loss)(model, optimizer)
        model.blocks[2].requires_grad_(True)
        optimizer.ages = [optimizer.state_of(p)["step"] for p in (model.blocks[0].up.weight, model.blocks[2].up.weight)]
        assert optimizer.ages == [4, 2]

    found = [streams.run(body, build, tuning=tuning(prefetch)) for prefetch in (0, 3)]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], tensor) for name, tensor in found[0][1].items())


def test_a_tied_embedding_and_head_are_one_set_of_tiles(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(500, 32)
            self.layer = nn.Linear(32, 500, bias=False)
            self.head = nn.Linear(32, 500, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x)) + self.layer(self.embed(x))

    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"param_tier": "cpu", "tuning": tuning(1, 8192), "compute_dtype": torch.float32}
    layout = plan_of(model, direct=True, **options).layout
    assert [one.unit for one in layout.slices if one.is_tile and one.start == 0] == [
        "embed.weight[0]",
        "layer.weight[0]",
    ]
    ids = torch.tensor([[3, 499, 3], [70, 0, 3]])
    with OffloadZero(model, **options) as optimizer:
        for one in (model, plain):
            one(ids).square().mean().backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            grad = optimizer.grad(other)
            assert grad is not None
            torch.testing.assert_close(grad.reshape(own.shape), own.grad, rtol=1e-4, atol=1e-6)
        finish(optimizer)
    with OffloadZero(Tied(), param_tier="cpu", device_memory=20_000) as optimizer:
        assert optimizer.stats()["peak_device_bytes"] <= 20_000


class Words(nn.Module):
    """An embedding of the root unit, whose batches use few of its rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(600, 16, **options)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h).tanh()
        return h


@pytest.mark.parametrize("options", [{}, {"padding_idx": -3}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("shape", [(40,), (2, 3), (0,)], ids=str)
def test_an_embedding_in_tiles_has_the_bits_of_the_whole_one(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    model, plain = Words(**options), Words(**options)
    ids = torch.randint(0, 600, shape, generator=torch.Generator().manual_seed(1)).masked_fill_(
        torch.rand(shape) < 0.3, 597
    )
    chosen = tuning(1, 64 * 16 * 4)
    with OffloadZero(model, param_tier="cpu", tuning=chosen, compute_dtype=torch.float32) as optimizer:
        assert torch.equal(model(ids), plain(ids))
        for one in (model, plain):
            one(ids).square().sum().backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            grad = optimizer.grad(other)
            assert grad is not None
            assert torch.equal(grad.reshape(own.shape), own.grad)


def test_an_embedding_fetches_the_tiles_of_the_tokens_and_torch_names_ids_that_are_none() -> None:
    model = Words()
    chosen = tuning(0, 64 * 16 * 4)
    with OffloadZero(model, param_tier="cpu", tuning=chosen, compute_dtype=torch.float32) as optimizer, torch.no_grad():
        optimizer.synchronize()
        before = optimizer.stats()["gathered_bytes"]
        model.embed(torch.tensor([5, 130, 6]))  # in the first and the third tile
        assert optimizer.stats()["gathered_bytes"] - before == 2 * 64 * 16 * 4
        with pytest.raises(IndexError):
            model(torch.tensor([600]))


@pytest.mark.parametrize("use", ["step", "clip", "grad"])
def test_a_gradient_of_which_only_some_tiles_have_come_is_not_left_out(use: str) -> None:
    model, plain = Words(), Words()
    ids = torch.tensor([5, 130, 6])  # in the first and the third tile
    chosen = tuning(0, 64 * 16 * 4)
    with OffloadZero(model, param_tier="cpu", tuning=chosen, compute_dtype=torch.float32) as optimizer:
        uses: dict[str, Callable[[], object]] = {
            "step": optimizer.step,
            "clip": lambda: optimizer.clip_grad_norm_(1.0),
            "grad": lambda: optimizer.grad(model.embed.weight),
        }
        out = model(ids)
        out.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(uses[use]))
        with pytest.raises(ConfigError, match=r"embed\.weight runs in tiles.* after backward\(\)"):
            out.square().sum().backward()
        plain(ids).square().sum().backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(optimizer.grad(other), own.grad)
        optimizer.step()


def test_access_to_a_tiled_weight(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model, tuning=tuning(1)) as optimizer:
        train(squares, steps=2)(model, optimizer)
        weight = model.blocks[0].up.weight
        with optimizer.gathered(weight, writable=True):
            old = weight.detach().clone()
        ones = torch.ones(2, 12, dtype=torch.bfloat16)
        assert torch.equal(weight + 1, old + 1)
        assert torch.equal(weight.T, old.T)
        assert torch.equal(nn.functional.linear(weight, ones), nn.functional.linear(old, ones))
        assert torch.equal(weight[1:3].clone(), old[1:3])
        with optimizer.gathered(weight, writable=True), torch.no_grad():
            weight.mul_(2)
        x = torch.ones(1, 12, dtype=torch.bfloat16)
        wanted = nn.functional.linear(x, 2 * old, optimizer_bias(optimizer, model))
        assert torch.allclose(model.blocks[0].up(x), wanted, rtol=2**-7)
        assert torch.equal(model.state_dict()["blocks.0.up.weight"], 2 * old)
        model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
        train(squares, steps=1)(model, optimizer)
        state = state_of(model, optimizer)["blocks.0.up.weight.master"]
        assert ((state - 0.5).abs() < 0.02).all()
        assert not torch.equal(state, torch.full_like(state, 0.5))


def decayed(model: Net, x: Tensor, count: int) -> Tensor:
    """A loss that uses the weights of tiled layers as a whole, too."""
    return squares(model, x, count) + 0.01 * sum(param.square().sum() for param in model.parameters())


@pytest.mark.parametrize("grad_tier", ["cpu", "nvme"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_of_tiles_and_of_their_whole_weight_are_one(backwards: int, grad_tier: str, streams: Streams) -> None:
    chunk = "256KiB" if grad_tier == "nvme" else "4KiB"
    options: dict[str, Any] = {"grad_tier": grad_tier, "accumulation": backwards, "compute_dtype": torch.float32}
    tiled, whole = (
        streams.run(train(decayed, backwards=backwards), Net, tuning=tuning(1, tile, chunk), **options)
        for tile in (TILE, 0)
    )
    assert tiled[0] == pytest.approx(whole[0], rel=1e-5)
    for name, tensor in whole[1].items():
        assert torch.allclose(tiled[1][name], tensor, rtol=1e-4, atol=1e-5), name


def test_autograd_grad_joins_the_gradients_of_tiles(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        weight, other = model.blocks[0].up.weight, model.blocks[1].up.weight
        for use in (squares, decayed):
            loss = use(model, batch(0), 0)
            found = torch.autograd.grad(loss, [weight, model.head.bias, other], create_graph=True)
            assert [grad.shape for grad in found] == [weight.shape, model.head.bias.shape, other.shape]
            (again,) = torch.autograd.grad(found[0].square().sum(), [weight])
            optimizer.losses.extend(grad.square().sum().item() for grad in (*found, again))
        y = model.blocks[0].up(torch.ones(2, 12))
        (batched,) = torch.autograd.grad(
            y.flatten(), [weight], torch.eye(y.numel()), is_grads_batched=True, retain_graph=True
        )
        assert batched.shape == (y.numel(), *weight.shape)
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(y.sum(), [weight, other], retain_graph=True)
        _, unused = torch.autograd.grad(y.sum(), [weight, other], allow_unused=True, retain_graph=True)
        assert unused is None
        _, zeros = torch.autograd.grad(y.sum(), [weight, other], materialize_grads=True)
        assert torch.equal(zeros, torch.zeros(other.shape))
        optimizer.losses.append(batched.sum().item())

    tiled, whole = (streams.run(body, Net, tuning=tuning(1, t), compute_dtype=torch.float32)[0] for t in (TILE, 0))
    assert tiled == pytest.approx(whole, rel=1e-4)


def test_hooks_on_a_tiled_weight_see_its_whole_gradient(streams: Streams) -> None:
    shapes: list[torch.Size] = []

    def body(model: Net, optimizer: Watched) -> None:
        handle = model.blocks[0].up.weight.register_hook(lambda grad: 2 * grad)
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda param: shapes.append(param.grad.shape))
        train(squares, steps=2)(model, optimizer)
        handle.remove()
        train(squares, steps=1)(model, optimizer)

    found = [streams.run(body, Net, tuning=tuning(1, tile), compute_dtype=torch.float32) for tile in (TILE, 0)]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert shapes == [(24, 12)] * 6


def test_a_hook_that_would_not_see_a_gradient_of_tiles_is_refused(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model, tuning=tuning(1)):
        loss = squares(model, batch(0), 0)
        model.blocks[0].up.weight.register_hook(lambda grad: 2 * grad)
        with pytest.raises(
            ConfigError, match=r"blocks\.0\.up\.weight runs in tiles, and got a hook .* after its forward"
        ):
            loss.backward()


def test_a_backward_for_some_tensors_is_refused_where_it_names_a_tiled_weight(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model, tuning=tuning(1), compute_dtype=torch.float32) as optimizer:
        weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
        with pytest.raises(ConfigError, match=r"inputs=\.\.\.\) names blocks\.0\.up\.weight, which runs in tiles"):
            squares(model, batch(0), 0).backward(inputs=[bias, weight])
        optimizer.zero_grad()
        squares(model, batch(0), 0).backward(inputs=[bias])
        assert bias.grad is not None
        assert weight.grad is None


def test_what_was_assigned_to_the_gradient_of_a_tiled_weight_is_added_to(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        for param in model.parameters():
            param.grad = torch.ones(param.shape)
        squares(model, batch(0), 0).backward()
        optimizer.losses.extend(optimizer.grad(param).sum().item() for param in model.parameters())

    tiled, whole = (streams.run(body, Net, tuning=tuning(1, t), compute_dtype=torch.float32)[0] for t in (TILE, 0))
    assert tiled == pytest.approx(whole, rel=1e-5)


def test_the_output_of_a_tiled_layer_may_be_changed_in_place(streams: Streams) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 24), nn.ReLU(inplace=True), nn.Linear(24, 24), nn.ReLU(inplace=True))

    tiled, whole = (streams.run(train(squares), build, tuning=tuning(1, t))[0] for t in (128, 0))
    assert tiled == pytest.approx(whole, rel=1e-2)


def optimizer_bias(optimizer: OffloadZero, model: Net) -> Tensor:
    with optimizer.gathered(model.blocks[0].up.bias):
        return model.blocks[0].up.bias.detach().clone()


def test_a_forward_that_raises_and_one_without_gradients(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        train(squares, steps=1)(model, optimizer)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.blocks[0].up(torch.ones(2, 5, dtype=torch.bfloat16))
        with torch.no_grad():
            optimizer.losses.append(model(batch(7)).float().sum().item())
        with torch.inference_mode():
            optimizer.losses.append(model(batch(8)).float().sum().item())
        loss = squares(model, batch(1), 1)
        (of_input,) = torch.autograd.grad(loss, model.head.bias, retain_graph=True)
        optimizer.losses.append(of_input.float().sum().item())
        loss.backward()
        finish(optimizer)

    found = [streams.run(body, Net, tuning=tuning(prefetch)) for prefetch in (0, 2)]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], tensor) for name, tensor in found[0][1].items())


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_module_that_is_given_another_class_later_runs_the_forward_of_that() -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"param_tier": "cpu", "compute_dtype": torch.float32, "tuning": tuning(0)}
    with OffloadZero(model, **options) as optimizer:
        assert optimizer._parts.parameters.tiles
        before = model(batch(0))
        for one in (model, plain):
            one.blocks[0].up.__class__ = Doubled
            one.blocks[1].__class__ = type(
                "Other", (type(one.blocks[1]),), {"forward": lambda self, x: self.down(x.repeat(1, 2))}
            )
        assert not torch.allclose(before, plain(batch(0)))
        torch.testing.assert_close(model(batch(0)), plain(batch(0)))


def test_a_tiled_layer_that_is_called_twice(streams: Streams) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for block in (*self.blocks, self.blocks[1]):
                h = block(h)
            return self.head(self.norm(h))

    found = [streams.run(train(squares), Twice, tuning=tuning(prefetch)) for prefetch in (0, 2)]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], tensor) for name, tensor in found[0][1].items())


def test_a_model_of_the_meta_device_is_tiled(streams: Streams) -> None:
    def init(name: str, tensor: Tensor) -> None:
        torch.manual_seed(len(name))
        tensor.normal_()

    def whole() -> Net:
        model = Net()
        with torch.no_grad():
            for name, param in model.named_parameters():
                init(name, param)
        return model

    def in_parts() -> Net:
        with torch.device("meta"):
            return Net()

    expected = streams.run(train(squares), whole, tuning=tuning(1))
    least = least_cpu_memory(in_parts(), param_tier="nvme", tuning=tuning(1))
    found = streams.run(train(squares), in_parts, tuning=tuning(1), init=init, param_tier="nvme", cpu_memory=least)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


def test_tiled_runs_are_resumed_and_go_back_with_or_without_tiles(streams: Streams, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path / "run", "commit_every": 2}

    def body(model: Net, optimizer: Watched) -> None:
        train(squares, steps=4)(model, optimizer)

    _, expected = streams.run(body, Net, tuning=tuning(1))
    with streams.optimizer(Net(), tuning=tuning(1), **options) as optimizer:
        train(squares, steps=3)(optimizer._model, optimizer)
        optimizer.commit()
        train(squares, steps=1)(optimizer._model, optimizer)
        optimizer.rollback()
    for tile in (TILE, 0):
        model = Net()
        with streams.optimizer(model, tuning=tuning(1, tile=tile), resume=True, **options) as optimizer:
            assert optimizer.stats()["step"] == 3
            squares(model, batch(3), 3).backward()
            finish(optimizer)
            found = state_of(model, optimizer)
            if tile:
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            else:
                assert all(torch.allclose(found[name], tensor, atol=0.05) for name, tensor in expected.items())
            optimizer.rollback()


@pytest.mark.timeout(60)
def test_a_weight_is_gathered_and_written_while_its_tiles_are_on_their_way(streams: Streams) -> None:
    model = Net()
    x = torch.ones(2, 12, dtype=torch.bfloat16)
    with streams.optimizer(model, tuning=tuning(4)) as optimizer:
        train(squares, steps=2)(model, optimizer)
        optimizer.synchronize()
        transfers, weight = optimizer._held.units.transfers, model.blocks[1].up.weight
        first, second = (optimizer._held.units.named(f"blocks.1.up.weight[{number}]") for number in range(2))
        transfers.prefetch([first])
        with optimizer.gathered(weight, writable=True), torch.no_grad():
            transfers.prefetch([second])
            weight.zero_()
        assert first.is_here
        for leaf in optimizer._parts.parameters.tiles.values():
            assert not leaf.untyped_storage().nbytes() or has_no_values(leaf) or not leaf.any()
        out = model.blocks[1].up(x)
        with optimizer.gathered(model.blocks[1].up.bias):
            assert torch.equal(out, model.blocks[1].up.bias.expand(2, -1))
        train(squares, steps=1)(model, optimizer)


def test_a_wrong_tile_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Tuning\.tile='many'"):
        OffloadZero(Net(), tuning=Tuning(tile="many"))


def _dual(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A gradient of a forward derivative."""
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(leaf, torch.ones_like(x)))).tangent
        return torch.autograd.grad(tangent.square().sum(), leaf)[0]


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).square().sum())(x),
    "grad of grad": lambda call, x: torch.func.grad(lambda x: torch.func.grad(lambda x: call(x).pow(3).sum())(x).sum())(
        x
    ),
    "jacrev": lambda call, x: torch.func.jacrev(lambda x: call(x).sum(0))(x),
    "jacfwd": lambda call, x: torch.func.jacfwd(lambda x: call(x).sum(0))(x),
    "grad of jvp": lambda call, x: torch.func.grad(
        lambda x: torch.func.jvp(call, (x,), (torch.ones_like(x),))[1].square().sum()
    )(x),
    "jacrev of jacfwd": lambda call, x: torch.func.jacrev(torch.func.jacfwd(lambda x: call(x).square().sum()))(x),
    "hessian": lambda call, x: torch.func.hessian(lambda x: call(x).square().sum())(x),
    "vmap": lambda call, x: torch.func.vmap(call)(x),
    "vmap of grad": lambda call, x: torch.func.vmap(torch.func.grad(lambda x: call(x).square().sum()))(x),
    "vjp": lambda call, x: torch.func.vjp(call, x)[1](torch.ones_like(call(x)))[0],
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),))[1],
    "forward derivatives by hand": _dual,
    "functional.jacobian": lambda call, x: torch.autograd.functional.jacobian(lambda x: call(x).sum(0), x),
}


@pytest.mark.parametrize("activation_tier", [None, "cpu"])
@pytest.mark.parametrize("tile", [0, 128])
@pytest.mark.parametrize("of", ["model", "block"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_streamed_models_are_those_of_plain_ones(
    transform: str, of: str, tile: int, activation_tier: str | None
) -> None:
    plain, model = Net(), Net()
    run, x = TRANSFORMS[transform], batch(0)[:2] if of == "model" else torch.randn(2, WIDTH)
    options: Any = {"activation_tier": activation_tier, "compute_dtype": torch.float32}
    with OffloadZero(model, tier="cpu", param_tier="cpu", tuning=Tuning(tile=tile), **options) as optimizer:
        assert any(unit.name.endswith("[1]") for unit in optimizer._held.units.transfers.units) == bool(tile)
        one, other = (model, plain) if of == "model" else (model.blocks[1], plain.blocks[1])
        found, expected = run(one, x), run(other, x)
        # Gradients that enter a layer are sums over its tiles.
        assert torch.allclose(found, expected, atol=1e-5) if tile else torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_an_input_that_tiles_share_are_added_in_place(dtype: torch.dtype) -> None:
    """The bits are those of a sum that is new each time, and what others have is not written to."""
    kept = [torch.randn(3, tiled._ADDED_NUMEL // 2, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    kept = [one.to(dtype) for one in kept]

    class Other(torch.autograd.Function):
        """Its gradient is a tensor that it keeps."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
            ctx.number = number
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return kept[ctx.number], None

    x = torch.zeros(kept[0].shape, dtype=dtype, requires_grad=True)
    before, result = [one.clone() for one in kept], torch.zeros(())
    carry = tiled._Widen.apply(x, False)
    for number in range(3):
        own, carry = tiled._Carry.apply(x.detach(), carry)
        result = result + Other.apply(own, number).float()
    result.backward()
    assert all(map(torch.equal, kept, before))
    wanted = (before[2].float() + before[1].float()) + before[0].float()  # the last one comes first
    assert x.grad is not None
    assert torch.equal(x.grad, wanted.to(dtype))
    with torch.no_grad():
        total = before[2].float()
        assert tiled._added(total, before[1]) is total
        strided = before[1].t()
        assert torch.equal(tiled._added(total.t(), strided), total.t() + strided)
    total = before[2].float()
    assert tiled._added(total, before[1]) is not total  # there may be a graph of it
    assert torch.equal(total, before[2].float())
