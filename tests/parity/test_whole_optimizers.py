"""Optimizers that step whole parameters, held, have the bits of plain torch: on every tier, in chunks of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import ConfigError, OffloadZero, Tuning
from offload.planner import least_cpu_memory
from tests.support.cases import often
from tests.support.device import DEVICE
from tests.support.toy import batch

from .test_optimizers import PLACES, clip

STEPS = 5


class Lamb(torch.optim.Optimizer):
    """A user's own, as the paper has it (You et al., 2020), without correction of bias."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (one for one in group["params"] if one.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "count": 0}
                state["count"] += 1
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].lerp_(p.grad.square(), 1 - beta2)
                update = state["m"] / (state["v"].sqrt() + 1e-6) + group["decay"] * p
                p.add_(update, alpha=-group["lr"] * float(p.norm() / update.norm().clamp(min=1e-6)))


class MatricesDecay(torch.optim.SGD):
    """Only what has two dimensions is decayed."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None and one.dim() > 1):
                p.mul_(1 - group["lr"] * 0.1)
        super().step(closure)


Make = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]


def muon(**options: Any) -> Make:
    def make(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = [one for one in params if one.dim() == 2]
        others = [one for one in params if one.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02, **options), torch.optim.SGD(others, lr=0.05, momentum=0.9)]

    return make


MAKES: dict[str, Make] = {
    "muon": muon(),
    "muon adjusted": muon(adjust_lr_fn="match_rms_adamw", nesterov=False, weight_decay=0.0),
    "lamb": lambda params: [Lamb(params)],
    "decay of matrices": lambda params: [MatricesDecay(params, lr=0.05, momentum=0.9)],
}


class Net(nn.Module):
    """Some matrices are larger than the smallest chunk, which has 1,024 numbers of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 37)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(37), nn.Linear(37, 83), nn.Tanh(), nn.Linear(83, 37)) for _ in range(3)
        )
        self.head = nn.Linear(37, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def net() -> Net:
    torch.manual_seed(5)
    return Net().to(DEVICE)


class Plain:
    """Plain training, with optimizers of masters: torch's code for a device may round otherwise.

    Args: tier: where the run that is compared has its states. Matrices are stepped on the model's device in any case.
    """

    def __init__(self, make: Make, tier: str = "cpu") -> None:
        self.model = net()
        self.masters = [
            nn.Parameter(param.detach().to(DEVICE if tier == "device" or param.dim() > 1 else "cpu"))
            for param in self.model.parameters()
        ]
        self.optimizers = make(self.masters)

    def step(self, number: int) -> None:
        self.model.zero_grad()
        accumulate(self.model, number)
        clip(self.model, 0.5)
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.device)
        for optimizer in self.optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)


def accumulate(model: nn.Module, number: int) -> None:
    """Gradients of two micro-batches; that of one parameter comes late."""
    for half in (0, 1):
        (model(batch(2 * number + half).to(DEVICE)).square().mean() / 2).backward()
    if number < 2:
        model.blocks[1][1].weight.grad = None  # type: ignore[union-attr, index]


def step(model: nn.Module, optimizer: OffloadZero, number: int) -> None:
    optimizer.zero_grad()
    accumulate(model, number)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def held(make: Make, path: Path, *, resume: bool = False, **options: Any) -> tuple[Net, OffloadZero]:
    model = net()
    given = make(list(model.parameters()))
    options = {"tuning": Tuning(chunk="4KiB", threads=2), "compute_dtype": torch.float32, "accumulation": 2} | options
    if options.get("cpu_memory") == "least":
        least = {key: value for key, value in options.items() if key not in ("tier", "cpu_memory", "commit_every")}
        options["cpu_memory"] = least_cpu_memory(model, given, **least)
    if options["tier"] == "nvme" or "commit_every" in options:
        options["path"] = path
    return model, OffloadZero(model, given, resume=resume, **options)


def assert_as_plain(make: Make, model: nn.Module, optimizer: OffloadZero, tier: str = "cpu") -> None:
    plain = Plain(make, tier)
    for number in range(STEPS):
        plain.step(number)
    for (name, param), master in zip(model.named_parameters(), plain.masters, strict=True):
        found = optimizer.state_of(param)
        assert torch.equal(found["master"], master.detach().cpu()), name
        with optimizer.gathered(param):
            assert torch.equal(param.cpu(), master.cpu()), name
        of = next(one for one in plain.optimizers if master in one.state)
        for kind, value in of.state[master].items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert torch.equal(found[kind], value.cpu()), (name, kind)
            elif value is not None:
                assert found[kind] == float(value), (name, kind)


@pytest.mark.parametrize("place", often(PLACES, "disk", "streamed"))
@pytest.mark.parametrize("name", MAKES)
def test_a_held_optimizer_has_the_bits_of_plain_torch(name: str, place: str, tmp_path: Path) -> None:
    model, optimizer = held(MAKES[name], tmp_path / "run", **PLACES[place])
    with optimizer:
        for number in range(STEPS):
            step(model, optimizer, number)
        assert_as_plain(MAKES[name], model, optimizer, PLACES[place]["tier"])


@pytest.mark.parametrize("chunk", ["4KiB", "1MiB"])
def test_chunks_smaller_and_larger_than_a_matrix_have_the_same_bits(chunk: str, tmp_path: Path) -> None:
    options = {"tier": "nvme", "cpu_memory": "least", "tuning": Tuning(chunk=chunk, threads=2)}
    model, optimizer = held(MAKES["muon"], tmp_path / "run", **options)
    with optimizer:
        for number in range(STEPS):
            step(model, optimizer, number)
        assert_as_plain(MAKES["muon"], model, optimizer)


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it was": ({"tier": "nvme"}, {"tier": "nvme"}),
    "in other chunks": ({"tier": "nvme"}, {"tier": "nvme", "tuning": Tuning(chunk="64KiB")}),
    "on another tier": ({"tier": "nvme"}, {"tier": "cpu", "param_tier": "cpu"}),
}


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name: str, way: str, tmp_path: Path) -> None:
    before, after = RESUMED[way]
    model, optimizer = held(MAKES[name], tmp_path / "run", commit_every=0, **before)
    with optimizer:
        for number in range(3):
            step(model, optimizer, number)
        optimizer.commit()
    model, optimizer = held(MAKES[name], tmp_path / "run", commit_every=0, resume=True, **after)
    with optimizer:
        for number in range(3, STEPS):
            step(model, optimizer, number)
        assert_as_plain(MAKES[name], model, optimizer)


def test_a_parameter_that_the_class_refuses_is_refused_when_it_is_added(tmp_path: Path) -> None:
    model, optimizer = held(muon(), tmp_path / "run", tier="cpu")
    with optimizer:
        groups = len(optimizer.param_groups)
        with pytest.raises(ConfigError):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, device=DEVICE))]})
        assert len(optimizer.param_groups) == groups
        step(model, optimizer, 0)


def test_tiles_of_a_matrix_that_is_stepped_as_a_whole_are_refused(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"Tuning\.tile=256: Muon steps .*weight as a whole"):
        OffloadZero(model, muon()(list(model.parameters())), tier="cpu", param_tier="cpu", tuning=Tuning(tile="256B"))
    assert all(param.is_leaf and param.dtype is torch.float32 for param in model.parameters())


@pytest.mark.skipif(DEVICE == "cpu", reason="the model's memory is the host's")
@pytest.mark.parametrize("place", ["RAM", "streamed", "disk"])
def test_matrices_are_stepped_on_the_device(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[tuple[str, int]] = []
    original = torch.optim.Muon.step

    def noted(self: torch.optim.Optimizer, closure: Any = None) -> None:
        stepped.extend((one.device.type, one.dim()) for one in self.param_groups[0]["params"])
        original(self, closure)

    monkeypatch.setattr(torch.optim.Muon, "step", noted)
    model, optimizer = held(muon(), tmp_path / "run", **PLACES[place])
    with optimizer:
        stepped.clear()  # what was tried out
        for number in range(STEPS):
            step(model, optimizer, number)
        optimizer.synchronize()
        on_its_device = [one for one in stepped if one[0] == torch.device(DEVICE).type]
        assert len(on_its_device) >= STEPS * sum(param.dim() == 2 for param in model.parameters()) - 2
        assert {dims for _, dims in on_its_device} == {2}
        assert_as_plain(muon(), model, optimizer)
