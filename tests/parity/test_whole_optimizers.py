"""Optimizers that step whole parameters, held, have the bits of plain torch: on every tier, in chunks of any size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import BudgetError, ConfigError, OffloadZero, Tuning
from offload.planner import least_cpu_memory
from tests.support.cases import each_value_often, products
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


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz over the last two dimensions (Jordan, 2024)."""
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x


class OneClass(torch.optim.Optimizer):
    """As people have it: Muon in groups with use_muon, and SGD with momentum in the others. It has a method, too."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.02, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(orthogonal(buffer) if group["use_muon"] else buffer, alpha=group["lr"])

    @torch.no_grad()
    def damp(self) -> None:
        """Towards zero, and matrices by the norm of each row."""
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(1 + p.norm(dim=-1, keepdim=True) if group["use_muon"] else 1.01)
                if p in self.state:
                    self.state[p]["momentum"].mul_(0.5)


class MatricesDecay(torch.optim.SGD):
    """Only what has two dimensions is decayed."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None and one.dim() > 1):
                p.mul_(1 - group["lr"] * 0.1)
        super().step(closure)


class Factored(torch.optim.Optimizer):
    """Adafactor as transformers has it (Shazeer and Stern, 2018): numbers of rows, of columns, and of the parameter."""

    def __init__(self, params: Any, lr: float | None = None, clip_threshold: float = 1.0, relative_step: bool = True):
        super().__init__(params, {"lr": lr, "clip_threshold": clip_threshold, "relative_step": relative_step})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                state, is_matrix = self.state[p], p.dim() > 1
                if not state:
                    state["step"], state["rms"] = 0, 0
                    shapes = {"row": p.shape[:-1], "col": p.shape[:-2] + p.shape[-1:]} if is_matrix else {"v": p.shape}
                    state |= {name: torch.zeros(shape, device=p.device) for name, shape in shapes.items()}
                state["step"] += 1
                state["rms"] = p.norm() / p.numel() ** 0.5
                rate = min(1e-2, state["step"] ** -0.5) if group["relative_step"] else group["lr"]
                kept, square = 1.0 - state["step"] ** -0.8, p.grad.square() + 1e-30
                if is_matrix:
                    state["row"].mul_(kept).add_(square.mean(-1), alpha=1 - kept)
                    state["col"].mul_(kept).add_(square.mean(-2), alpha=1 - kept)
                    row = (state["row"] / state["row"].mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
                    update = row * state["col"].unsqueeze(-2).rsqrt() * p.grad
                else:
                    update = state["v"].mul_(kept).add_(square, alpha=1 - kept).rsqrt() * p.grad
                update.div_((update.norm() / update.numel() ** 0.5 / group["clip_threshold"]).clamp_(min=1.0))
                p.sub_(update.mul_(rate * state["rms"].clamp(min=1e-3)))


Make = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]


def muon(**options: Any) -> Make:
    def make(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = [one for one in params if one.dim() == 2]
        others = [one for one in params if one.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02, **options), torch.optim.SGD(others, lr=0.05, momentum=0.9)]

    return make


def by_flag(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [one for one in params if one.dim() > 1]
    return [OneClass([{"params": matrices, "use_muon": True}, {"params": [p for p in params if p.dim() < 2]}])]


def muon_and_adamw(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW as torch runs it: amsgrad has no kernel of our own, whose last bits differ from torch's."""
    others = [one for one in params if one.dim() != 2]
    return [*muon()(params)[:1], torch.optim.AdamW(others, lr=0.02, amsgrad=True, foreach=False)]


MAKES: dict[str, Make] = {
    "muon": muon(),
    "muon and adamw": muon_and_adamw,
    "one class with a flag": by_flag,
    "muon adjusted": muon(adjust_lr_fn="match_rms_adamw", nesterov=False, weight_decay=0.0),
    "lamb": lambda params: [Lamb(params)],
    "adafactor": lambda params: [torch.optim.Adafactor(params, lr=0.02, beta2_decay=-0.7, weight_decay=0.1)],
    "factored": lambda params: [Factored(params)],
    "factored with a rate": lambda params: [Factored(params, lr=0.02, clip_threshold=0.5, relative_step=False)],
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
        self.experts = nn.Parameter(torch.randn(3, 37, 64) / 6)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(torch.tanh(h @ self.experts).mean(0))


def net() -> Net:
    torch.manual_seed(5)
    return Net().to(DEVICE)


class Plain:
    """Plain training, with optimizers of masters: torch's code for a device may round otherwise.

    Args: tier: where the run that is compared has its states. What is stepped as a whole and has several dimensions is
    stepped on the model's device in any case: of two optimizers, only what the first one takes.
    """

    def __init__(self, make: Make, tier: str = "cpu") -> None:
        self.model = net()
        params = list(self.model.parameters())
        first, *others = make(params)
        there = [param for group in first.param_groups for param in group["params"]] if others else params
        self.masters = []
        for param in params:
            is_there = tier == "device" or (param.dim() > 1 and any(param is one for one in there))
            self.masters.append(nn.Parameter(param.detach().clone().to(DEVICE if is_there else "cpu")))
        self.optimizers = make(self.masters)

    def step(self, number: int, micros: int = 2) -> None:
        self.model.zero_grad()
        accumulate(self.model, number, micros)
        clip(self.model, 0.5)
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.device)
        for optimizer in self.optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                lower_rate(group)
        self.give_values()

    @torch.no_grad()
    def give_values(self) -> None:
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            param.copy_(master)


def accumulate(model: nn.Module, number: int, micros: int = 2) -> None:
    """Gradients of several micro-batches; that of one parameter comes late."""
    for micro in range(micros):
        (model(batch(micros * number + micro).to(DEVICE)).square().mean() / micros).backward()
    if number < 2:
        model.blocks[1][1].weight.grad = None  # type: ignore[union-attr, index]


def lower_rate(group: dict[str, Any]) -> None:
    if group["lr"] is not None:
        group["lr"] *= 0.9


def step(model: nn.Module, optimizer: OffloadZero, number: int, micros: int = 2) -> None:
    optimizer.zero_grad()
    accumulate(model, number, micros)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    for group in optimizer.param_groups:
        lower_rate(group)


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


def assert_as_plain(
    make: Make, model: nn.Module, optimizer: OffloadZero, tier: str = "cpu", steps: int = STEPS, micros: int = 2
) -> None:
    plain = Plain(make, tier)
    for number in range(steps):
        plain.step(number, micros)
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


WHERE = PLACES | {"commits": {"tier": "nvme", "cpu_memory": "least", "commit_every": 2}}


@pytest.mark.parametrize(("name", "place"), each_value_often((name, place) for name in MAKES for place in WHERE))
def test_a_held_optimizer_has_the_bits_of_plain_torch(name: str, place: str, tmp_path: Path) -> None:
    model, optimizer = held(MAKES[name], tmp_path / "run", **WHERE[place])
    with optimizer:
        for number in range(STEPS):
            step(model, optimizer, number)
        assert_as_plain(MAKES[name], model, optimizer, WHERE[place]["tier"])


MOVED = products(MAKES, [1, 4], often=[("muon adjusted", 4), ("one class with a flag", 1), ("factored", 4)])


@pytest.mark.skipif(DEVICE != "cpu", reason="the states' place decides which device computes what is no matrix")
@pytest.mark.parametrize(("name", "micros"), MOVED)
def test_a_run_that_goes_on_in_one_place_after_the_other_has_the_bits_of_plain_torch(
    name: str, micros: int, tmp_path: Path
) -> None:
    """Resumed after each step: on another tier, in other chunks, with parameters and gradients elsewhere."""
    moves = [*WHERE.values(), {"tier": "cpu", "tuning": Tuning(chunk="1MiB", threads=1)}]
    for number, options in enumerate(moves):
        options = options | {"accumulation": micros, "commit_every": 0, "resume": number > 0}
        try:
            model, optimizer = held(MAKES[name], tmp_path / "run", **options)
        except BudgetError as error:  # a resume in another layout needs more
            options["cpu_memory"] = error.needed
            model, optimizer = held(MAKES[name], tmp_path / "run", **options)
        with optimizer:
            step(model, optimizer, number, micros)
            optimizer.commit()
            if number >= 2:  # the late parameter has states
                assert_as_plain(MAKES[name], model, optimizer, steps=number + 1, micros=micros)


def test_a_rollback_takes_states_of_other_shapes_back(tmp_path: Path) -> None:
    model, optimizer = held(MAKES["factored"], tmp_path / "run", tier="cpu", commit_every=0)
    with optimizer:
        for number in range(3):
            step(model, optimizer, number)
            if number == 1:
                optimizer.commit()
        optimizer.rollback()
        for number in range(2, STEPS):
            step(model, optimizer, number)
        assert_as_plain(MAKES["factored"], model, optimizer)


@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Adafactor])
def test_a_matrix_is_stepped_as_it_is_seen_however_it_lies_in_memory(make: Any) -> None:
    def made() -> nn.Linear:
        torch.manual_seed(2)
        model = nn.Linear(64, 40, bias=False)
        model.weight = nn.Parameter(torch.randn(64, 40).t())
        return model.to(DEVICE)

    reference, model = made(), made()
    plain, given = make([reference.weight], lr=0.02), make([model.weight], lr=0.02)
    with OffloadZero(model, given, tier="cpu", compute_dtype=torch.float32) as optimizer:
        for number in range(STEPS):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE)
            for one, its in ((reference, plain), (model, optimizer)):
                its.zero_grad()
                one(x).square().mean().backward()
                its.step()
        assert model.weight.stride() == reference.weight.stride() == (1, 40)
        found = optimizer.state_of(model.weight)
        for kind, value in plain.state[reference.weight].items():
            assert torch.equal(torch.as_tensor(found[kind]), value.cpu()), kind
        assert torch.equal(found["master"], reference.weight.detach().cpu())


@pytest.mark.parametrize("place", PLACES)
def test_a_method_of_a_class_that_steps_whole_parameters(place: str, tmp_path: Path) -> None:
    model, optimizer = held(by_flag, tmp_path / "run", **PLACES[place])
    plain = Plain(by_flag, PLACES[place]["tier"])
    with optimizer:
        for number in range(3):
            plain.step(number)
            plain.optimizers[0].damp()  # type: ignore[attr-defined]
            plain.give_values()
            step(model, optimizer, number)
            optimizer.apply("damp")
        for (name, param), master in zip(model.named_parameters(), plain.masters, strict=True):
            found = optimizer.state_of(param)
            assert torch.equal(found["master"], master.detach().cpu()), name
            assert torch.equal(found["momentum"], plain.optimizers[0].state[master]["momentum"].cpu()), name
            with optimizer.gathered(param):
                assert torch.equal(param.cpu(), master.cpu()), name


@pytest.mark.parametrize("of", [0, 1])
def test_schedulers_of_one_of_several_optimizers_act(of: int, tmp_path: Path) -> None:
    """Those that were made of a given optimizer before it was taken."""
    plain = Plain(muon_and_adamw)
    scheduler = torch.optim.lr_scheduler.StepLR(plain.optimizers[of], 1, gamma=0.5)
    model = net()
    given = muon_and_adamw(list(model.parameters()))
    of_held = torch.optim.lr_scheduler.StepLR(given[of], 1, gamma=0.5)
    options: dict[str, Any] = {"tuning": Tuning(chunk="4KiB"), "compute_dtype": torch.float32, "accumulation": 2}
    with OffloadZero(model, given, tier="cpu", **options) as optimizer:
        for number in range(3):
            plain.step(number)
            scheduler.step()
            step(model, optimizer, number)
            of_held.step()
        rates = [group["lr"] for one in plain.optimizers for group in one.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == rates
        assert len(set(rates)) == 2
        for param, master in zip(model.parameters(), plain.masters, strict=True):
            assert torch.equal(optimizer.state_of(param)["master"], master.detach().cpu())


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


USUAL = [
    ("muon", "as it was"),
    ("lamb", "on another tier"),
    ("adafactor", "in other chunks"),
    ("factored", "on another tier"),
    ("one class with a flag", "in other chunks"),
]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*one, id="-".join(one), marks=() if one in USUAL else pytest.mark.slow)
        for one in itertools.product(MAKES, RESUMED)
    ],
)
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
        with pytest.raises(ConfigError, match="parameters cannot be added after OffloadZero took the model"):
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
