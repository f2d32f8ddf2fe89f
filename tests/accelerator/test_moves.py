"""Models that come from the CPU to train on a device, and go back there meanwhile.

The oracle: plain torch on the CPU with the same data; the same run of a model that was on the device before, and stays
there; the device's allocator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, GradientMovedError, OffloadZero, ReleasedParameterError, Tuning
from tests import simulated_device
from tests.support import models
from tests.support.quantised import TABLE, Codes, quantised, weights_of
from tests.support.streamed import state_of
from tests.support.toy import Net, batch, squares, take_step

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = torch.device("simulated:0") if simulated_device.is_wanted() else torch.device("cpu")
CPU = torch.device("cpu")
TUNING = Tuning(chunk="4KiB", prefetch_units=1)
PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"tier": "cpu", "param_tier": "cpu"},
    "disk": {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
    "tiles": {"tier": "cpu", "param_tier": "cpu", "tuning": Tuning(chunk="4KiB", tile="512B")},
    "ram": {"tier": "cpu", "activation_tier": "cpu", "activation_memory": "64KiB"},
    "device": {"tier": "device", "commit_every": 0},
}


class Mixed(Net):
    """With frozen parameters, and buffers of which one is not saved and two modules share one."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.scale = nn.Parameter(torch.full((5,), 1.5), requires_grad=False)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, 5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.norm.register_buffer("shift", self.shift)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * self.scale + self.norm.shift + self.table[1])


def options_of(place: str, path: Path, name: str) -> dict[str, Any]:
    options = {"tuning": TUNING, "compute_dtype": torch.float32, **PLACES[place]}
    return options | ({"path": path / name} if place in ("disk", "device") else {})


def taken(model: nn.Module, options: dict[str, Any], **more: Any) -> OffloadZero:
    trained = [param for param in model.parameters() if param.requires_grad]
    return OffloadZero(model, torch.optim.AdamW(trained, lr=1e-2), **options, **more)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, device: torch.device = DEVICE) -> float:
    loss = model(batch(count).to(device)).float().square().mean()
    take_step(optimizer, loss)
    return loss.item()


def trained(
    place: str, path: Path, *, each: Callable[[nn.Module, OffloadZero], None] | None = None, name: str = "stays"
) -> Any:
    """Losses and states of three steps of a model that is on the device before. Args: each: called between steps."""
    model = Mixed().to(DEVICE)
    with taken(model, options_of(place, path, name)) as optimizer:
        losses = []
        for count in range(3):
            losses.append(step(model, optimizer, count))
            if each is not None:
                each(model, optimizer)
        return losses, {name: value.cpu() for name, value in state_of(model, optimizer).items()}


def assert_alike(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.fixture
def allocated() -> Callable[[str], int]:
    """What tensors have of the device beside those from before the test: "current" bytes, and at "peak"."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    return lambda when: torch.accelerator.memory_stats()[f"allocated_bytes.all.{when}"] - before


@pytest.mark.parametrize("place", PLACES)
def test_a_model_on_the_cpu_trains_on_the_device_with_the_bits_of_one_that_is_there(place: str, tmp_path: Path) -> None:
    expected = trained(place, tmp_path)
    model, plain = Mixed(), Mixed()
    params, shift = list(model.parameters()), model.shift
    adam = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    with taken(model, options_of(place, tmp_path, "comes"), device=DEVICE) as optimizer:
        assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
        here = dict((*model.named_parameters(), *model.named_buffers()))
        assert not {name for name, one in here.items() if one.device != DEVICE}
        assert model.norm.shift is model.shift
        assert model.shift is not shift
        losses = [step(model, optimizer, count) for count in range(3)]
        found = {name: value.cpu() for name, value in state_of(model, optimizer).items()}
    assert_alike((losses, found), expected)
    torch.testing.assert_close(losses, [step(plain, adam, count, CPU) for count in range(3)], rtol=1e-5, atol=1e-6)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-4, atol=1e-5)


class Wide(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("param_tier", ["cpu", "device"])
def test_a_model_from_the_cpu_never_takes_more_of_the_device_than_planned(
    param_tier: str, allocated: Callable[[str], int]
) -> None:
    model = Wide()
    with taken(model, {"tier": "cpu", "tuning": Tuning(chunk="64KiB")}, device=DEVICE, param_tier=param_tier) as one:
        planned = one._placement.device_bytes
        whole = sum(param.numel() * 2 for param in model.parameters())
        assert planned == whole if param_tier == "device" else planned < whole / 3
        assert 0 < allocated("peak") <= planned + 4096  # of scratch memory
        spare = allocated("current")  # buffers stay for the next units
        assert spare == whole if param_tier == "device" else spare <= planned
        with torch.no_grad():
            model(torch.ones(1, 128, device=DEVICE, dtype=torch.bfloat16))
        assert 0 < allocated("peak") <= planned + 4096  # of activations
        assert one.stats()["peak_device_bytes"] <= planned


def test_a_model_that_is_larger_than_the_device_streams_to_it() -> None:
    model = Wide(512)
    torch.accelerator.empty_cache()
    with (
        simulated_device.memory_limit(torch.accelerator.memory_reserved() + (10 << 20)),
        taken(model, {}, device=DEVICE) as it,
    ):
        assert it.stats()["param_tier"] == "cpu"  # 6 MiB, and half of the free memory is less
        first = take_step(it, model(torch.ones(1, 512, device=DEVICE)).square().mean())
    assert first is None


def moves(device: str | torch.device) -> list[Callable[[nn.Module], object]]:
    return [lambda model: model.to(device), lambda model: model.to(device, torch.float32)]


@pytest.mark.parametrize("place", PLACES)
def test_moving_it_to_where_it_trains_does_nothing(place: str, tmp_path: Path) -> None:
    model = Mixed()
    with taken(model, options_of(place, tmp_path, "run"), device=DEVICE) as optimizer:
        step(model, optimizer, 0)
        optimizer.synchronize()
        squares(model, batch(1).to(DEVICE)).backward()
        with optimizer.gathered(model.embed):
            pass
        with simulated_device.counted() as counts:
            for move in moves(DEVICE) + moves("simulated"):
                assert move(model) is model
        assert counts["to_device_bytes"] + counts["to_host_bytes"] + counts["allocations"] == 0
        optimizer.step()


@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_is_parked_frees_the_device_and_goes_on_with_the_same_bits(
    place: str, tmp_path: Path, allocated: Callable[[str], int]
) -> None:
    values: list[Tensor] = []

    def parks(model: nn.Module, optimizer: OffloadZero) -> None:
        with torch.no_grad():
            expected = model(batch(9).to(DEVICE)).cpu()
        assert model.cpu() is model
        gc.collect()
        assert allocated("current") <= 4096  # what the test's own forward and loss keep
        assert all(one.device == CPU for one in (*model.parameters(), *model.buffers()))
        with torch.no_grad():
            values.append(model(batch(9)) - expected)
        assert model.cpu() is model.to("cpu")
        assert model.to(DEVICE) is model
        model.calls -= 2

    moved: list[int] = []

    def counts(model: nn.Module, optimizer: OffloadZero) -> None:
        before = optimizer.stats()
        parks(model, optimizer)
        after = optimizer.stats()
        assert after["park_s"] > before["park_s"]
        moved.append(after["parked_bytes"] - before["parked_bytes"])

    expected = trained(place, tmp_path)
    assert_alike(trained(place, tmp_path, each=counts, name="parked"), expected)
    # There and back; with masters, moments and gradients where these are there, too. Buffers are whole pages.
    params = 2 * sum(param.nbytes for param in Mixed().parameters() if param.requires_grad)
    least = {"ram": params, "device": 5 * params}.get(place, 0)
    assert all(nbytes >= least and (least or nbytes % 4096 == 0) for nbytes in moved)
    for value in values:
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_wait_while_a_model_is_parked(place: str, tmp_path: Path) -> None:
    losses = []
    for parks in (False, True):
        model = Mixed().to(DEVICE)
        with taken(model, options_of(place, tmp_path, str(parks)), accumulation=2) as optimizer:
            step(model, optimizer, 0)
            squares(model, batch(1).to(DEVICE)).backward()
            weight = model.head.weight
            if parks:
                model.cpu()
                assert weight.grad is not None
                assert weight.grad.device == CPU
                for call in (
                    optimizer.step,
                    lambda: optimizer.clip_grad_norm_(1.0),
                    lambda weight=weight: weight.grad.sum(),
                    lambda model=model: squares(model, batch(2)).backward(),
                ):
                    with pytest.raises(ConfigError, match=r"model\.to\('simulated:0'\)"):
                        call()
                model.to(DEVICE)
                assert weight.grad.device == DEVICE
            take_step(optimizer, squares(model, batch(4).to(DEVICE)))
            losses.append([step(model, optimizer, count) for count in range(2, 4)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_written_while_it_is_parked_counts(place: str, tmp_path: Path) -> None:
    """As Lightning ends: a step without zero_grad, `.cpu()`; then a state_dict is loaded."""
    model = Mixed()
    with taken(model, options_of(place, tmp_path, "run"), device=DEVICE) as optimizer:
        squares(model, batch(0).to(DEVICE)).backward()
        optimizer.step()
        with torch.no_grad():
            before = model.head.bias.data.cpu()
            model.head.bias.data.add_(1)
        model.cpu()
        assert torch.equal(optimizer.state_of(model.head.bias)["master"], before + 1)
        with pytest.raises((GradientMovedError, ConfigError)):
            model.head.weight.grad.sum()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(value.device == CPU for value in state.values())
        for name, param in model.named_parameters():
            assert torch.equal(param, state[name])
        model.load_state_dict({name: value * 2 for name, value in state.items()})
        model.to(DEVICE)
        for name, param in model.named_parameters():
            assert torch.equal(param.cpu(), state[name] * 2)
            if param.requires_grad:
                assert torch.equal(optimizer.state_of(param)["master"], state[name] * 2)
        step(model, optimizer, 1)


@pytest.mark.parametrize("place", PLACES)
def test_a_parked_model_commits_and_is_closed_on_the_cpu(place: str, tmp_path: Path) -> None:
    model = Mixed()
    options = options_of(place, tmp_path, "run") | {"path": tmp_path / "run", "commit_every": 0}
    with taken(model, options, device=DEVICE) as optimizer:
        step(model, optimizer, 0)
        model.cpu()
        optimizer.commit()
        masters = {n: optimizer.state_of(p)["master"] for n, p in model.named_parameters() if p.requires_grad}
    assert all(one.device == CPU for one in (*model.parameters(), *model.buffers()))
    for name, master in masters.items():
        assert torch.equal(dict(model.named_parameters())[name], master)
    squares(model, batch(0)).backward()
    again = Mixed()
    with taken(again, options | {"resume": True}, device=DEVICE) as optimizer:
        for name, param in again.named_parameters():
            if param.requires_grad:
                assert param.device == DEVICE
                assert torch.equal(optimizer.state_of(param)["master"], masters[name])


def test_a_view_from_before_it_was_parked_is_refused_and_works_again_at_home(tmp_path: Path) -> None:
    model = Net()
    with taken(model, options_of("streamed", tmp_path, "run"), device=DEVICE):
        view, expected = model.head.weight.t(), model.head.weight.t().cpu()
        model.cpu()
        with pytest.raises(ReleasedParameterError, match="was taken on simulated:0"):
            view.sum()
        model.to(DEVICE)
        assert torch.equal(view.cpu(), expected)


@pytest.mark.parametrize("place", ["ram", "streamed", "device"])
def test_a_device_without_room_for_a_parked_model_leaves_it_parked(place: str, tmp_path: Path) -> None:
    expected = trained(place, tmp_path)
    model = Mixed().to(DEVICE)
    with taken(model, options_of(place, tmp_path, "run")) as optimizer:
        losses = [step(model, optimizer, count) for count in range(2)]
        model.cpu()
        if place != "streamed":  # whose parameters take no memory until they are used
            simulated_device.fail_allocation(1)
            with pytest.raises(torch.OutOfMemoryError):
                model.to(DEVICE)
            assert model.head.weight.device == CPU
        model.cpu().to(DEVICE)
        losses.append(step(model, optimizer, 2))
        found = {name: value.cpu() for name, value in state_of(model, optimizer).items()}
    assert_alike((losses, found), expected)


def test_other_moves_are_refused(tmp_path: Path) -> None:
    model = Net().to(DEVICE)
    with pytest.raises(ConfigError, match="device=cpu but the model is on simulated:0"):
        OffloadZero(model, device="cpu")
    with pytest.raises(ConfigError, match="device=simulated:1 but the model is on simulated:0"):
        OffloadZero(model, device="simulated:1")
    with taken(model, options_of("ram", tmp_path, "run"), device=DEVICE) as optimizer:
        for move in (lambda: model.head.cpu(), lambda: model.to("cpu", torch.float64), model.double):
            with pytest.raises(ConfigError, match="OffloadZero holds the model where it is"):
                move()
        step(model, optimizer, 0)
    model = Net()
    with (
        taken(model, options_of("ram", tmp_path, "cpu")),
        pytest.raises(ConfigError, match=r'or give OffloadZero\(device="simulated:0"\)'),
    ):
        model.to(DEVICE)


def test_a_model_with_parked_parameters_of_an_outer_module_parks_too(tmp_path: Path) -> None:
    """As a LightningModule holds the model that its optimizer trains."""
    model = Net()
    outer = nn.ModuleDict({"other": nn.BatchNorm1d(3), "model": model}).to(CPU)
    with taken(model, options_of("ram", tmp_path, "run"), device=DEVICE) as optimizer:
        outer.to(DEVICE)
        first = step(model, optimizer, 0)
        outer.cpu()
        assert model.head.weight.device == CPU
        outer.to(DEVICE)
        assert step(model, optimizer, 0) < first


def test_a_model_built_on_the_meta_device_takes_its_buffers_along(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with taken(model, options_of("streamed", tmp_path, "run"), device=DEVICE) as optimizer:
        assert model[1].running_mean.device == DEVICE
        take_step(optimizer, model(torch.ones(3, 4, device=DEVICE)).square().mean())


def test_a_meta_model_that_trains_beside_an_unused_accelerator_warns_unless_it_is_told_so() -> None:
    def built() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    with pytest.warns(UserWarning, match='give OffloadZero device="simulated"') as warned:
        OffloadZero(built()).close()
    assert warned[0].filename == __file__
    OffloadZero(built(), device="cpu").close()
    OffloadZero(Net()).close()  # whose device is known


def test_kinds_of_models_come_with_the_same_bits() -> None:
    for kind in models.KINDS:
        losses = []
        for comes in (False, True):
            model = models.build(kind) if comes else models.build(kind).to(DEVICE)
            keep = models.keep_fp32(kind)
            with OffloadZero(model, tier="cpu", param_tier="cpu", keep_fp32=keep, device=DEVICE) as optimizer:
                draws = models.losses(kind, model, str(DEVICE))
                losses.append([])
                for _ in range(2):
                    loss = next(draws)()
                    losses[-1].append(loss.item())
                    take_step(optimizer, loss)
        assert losses[0] == losses[1]


@pytest.mark.slow  # imports transformers
@pytest.mark.filterwarnings("ignore")
def test_a_model_as_transformers_loads_it_trains_on_the_device(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    tokens = torch.arange(24).view(2, 12)
    losses = []
    for device in (CPU, DEVICE):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
        options = {"compute_dtype": torch.float32, "param_tier": "cpu", "device": device}
        with OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options) as optimizer:
            assert model.device == device
            losses.append([])
            for _ in range(3):
                loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
                losses[-1].append(loss.item())
                take_step(optimizer, loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    assert losses[1][2] < losses[1][0]


@pytest.mark.parametrize("param_tier", ["cpu", "nvme", "device"])
def test_a_quantised_base_in_ram_trains_on_the_device(param_tier: str, tmp_path: Path) -> None:
    model, plain = quantised(), quantised()
    on_disk = {"path": tmp_path / "run"} if param_tier == "nvme" else {}
    options = {"tier": "cpu", "param_tier": param_tier, "compute_dtype": torch.float32, "commit_every": None, **on_disk}
    trained, own = ([param for param in one.parameters() if param.requires_grad] for one in (model, plain))
    with OffloadZero(model, torch.optim.AdamW(trained), device=DEVICE, tuning=TUNING, **options) as optimizer:
        weight = weights_of(model)[0]
        assert weight.device == weight.scales.device == weight.table.device == DEVICE
        assert TABLE.device == CPU  # others use it
        for step in range(3):
            with torch.no_grad():
                for mine, other in zip(own, trained, strict=True):
                    mine.copy_(other.cpu())
                    mine.grad = None
            found, expected = squares(model, batch(step).to(DEVICE)), squares(plain, batch(step))
            assert found.item() == expected.item()
            found.backward()
            expected.backward()
            for mine, other in zip(own, trained, strict=True):
                assert torch.equal(optimizer.grad(other).cpu(), mine.grad)
            optimizer.step()
            optimizer.zero_grad()
        if param_tier != "device":
            with pytest.raises(ConfigError, match=r"is a part of a Codes, which stays on simulated:0"):
                model.cpu()


def test_a_wrapper_that_keeps_its_device_is_refused_before_it_is_moved() -> None:
    class Fixed(Codes):
        @classmethod
        def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
            return Codes.of(torch.ones(size))

    model = quantised()
    model.blocks[1].down.weight.__class__ = Fixed  # type: ignore[union-attr]
    trained = [param for param in model.parameters() if param.requires_grad]
    with pytest.raises(ConfigError, match=r"blocks\.1\.down\.weight is a Fixed, which keeps the device"):
        OffloadZero(model, torch.optim.AdamW(trained), device=DEVICE, tuning=TUNING, tier="cpu", param_tier="cpu")
    assert {one.codes.device for one in weights_of(model)} == {CPU}


def test_moving_away_and_back_hands_no_frozen_weight_over_again(tmp_path: Path) -> None:
    """It gets other memory, as by `p.data = x`, which does hand it over."""
    model = Mixed().to(DEVICE)
    with taken(model, options_of("ram", tmp_path, "run")) as optimizer:
        step(model, optimizer, 0)
        assert {"scale", "table"}.isdisjoint(dict(optimizer.weights(since=1)))
        model.cpu()
        model.to(DEVICE)
        assert {"scale", "table"}.isdisjoint(dict(optimizer.weights(since=1)))
        model.scale.data = model.scale.data.clone()
        assert "scale" in dict(optimizer.weights(since=1))
