"""Another method of a held optimizer's class changes what it changes in plain torch, bit for bit, on every tier."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, GradientMovedError, OffloadZero, StaleParameterError, Tuning
from offload.planner import least_cpu_memory
from tests.optim.test_methods import Averaged, Strange
from tests.parity.test_optimizers import PLACES, SMALL, net, on_cpu
from tests.support.device import DEVICE
from tests.support.toy import Net, batch

STEPS = 7
APPLIED: dict[int, Sequence[str]] = {
    1: ("eval", "train"),
    3: ("exchange",),
    4: ("eval", "train", "forget"),
    5: ("eval",),
}
"""After which steps which methods are applied."""
Found = dict[str, Tensor]


class Loop:
    """One loop for a plain and for a held model. The last bias gets its first gradient late; evaluation is recorded.

    Args:
        model: the model.
        optimizer: plain or held.
        evaluated: gets what each evaluation gives.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, evaluated: list[Tensor]) -> None:
        self.model, self.optimizer, self.evaluated = model, optimizer, evaluated

    def step(self, number: int, before: Sequence[str] = ()) -> None:
        """A step, and methods that are applied between its backward and it."""
        self.optimizer.zero_grad()
        self.model(batch(number).to(DEVICE)).square().mean().backward()
        if number < 2:
            self.model.head.bias.grad = None  # type: ignore[union-attr]
        for name in before:
            self.apply(name)
        self.optimizer.step()

    def apply(self, name: str) -> None:
        held = self.optimizer
        held.apply(name) if isinstance(held, OffloadZero) else getattr(held, name)()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.evaluated.append(self.model(batch(99).to(DEVICE)).cpu())

    def run(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)
            for name in APPLIED.get(number, ()):
                self.apply(name)
                self.evaluate()
            if number == 5:
                self.apply("train")


class OnDevice(Loop):
    """A plain model whose optimizer steps masters on another device: a device's code may round otherwise."""

    def __init__(self, model: nn.Module, device: str, evaluated: list[Tensor]) -> None:
        self.masters = {
            name: nn.Parameter(value.detach().clone().to(device)) for name, value in model.named_parameters()
        }
        super().__init__(model, Averaged(list(self.masters.values())), evaluated)
        self.optimizer.register_step_pre_hook(lambda *_: self._take_gradients())

    def _take_gradients(self) -> None:
        for name, param in self.model.named_parameters():
            self.masters[name].grad = None if param.grad is None else param.grad.to(self.masters[name].device)

    @torch.no_grad()
    def _give_values(self) -> None:
        for name, param in self.model.named_parameters():
            param.copy_(self.masters[name])

    def step(self, number: int, before: Sequence[str] = ()) -> None:
        self.model.zero_grad()
        super().step(number, before)
        self._give_values()

    def apply(self, name: str) -> None:
        super().apply(name)
        self._give_values()


@cache
def plain(device: str) -> tuple[list[Tensor], Found, dict[str, dict[str, Any]], dict[str, Any]]:
    """What plain torch evaluates, and its parameters, states and options at the end."""
    loop = OnDevice(net(), device, [])
    loop.run(0, STEPS)
    states = {name: on_cpu(loop.optimizer.state[param]) for name, param in loop.masters.items()}
    options = {key: value for key, value in loop.optimizer.param_groups[0].items() if key != "params"}
    return loop.evaluated, on_cpu(loop.masters), states, options


def held(path: Path, given: type[torch.optim.Optimizer] = Averaged, **options: Any) -> tuple[Net, OffloadZero]:
    model = net()
    optimizer = given(list(model.parameters()))  # type: ignore[arg-type]
    options = {"tuning": SMALL, "compute_dtype": torch.float32} | options
    if options.get("cpu_memory") == "least":
        least = {key: value for key, value in options.items() if key not in ("tier", "cpu_memory", "commit_every")}
        options["cpu_memory"] = least_cpu_memory(model, optimizer, **least)
    if options["tier"] == "nvme" or "commit_every" in options:
        options["path"] = path
    return model, OffloadZero(model, optimizer, **options)


def assert_as_plain(model: nn.Module, optimizer: OffloadZero, evaluated: list[Tensor], tier: str = "cpu") -> None:
    outputs, params, states, options = plain(DEVICE if tier == "device" else "cpu")
    for found, expected in zip(evaluated, outputs[-len(evaluated) :], strict=True):
        assert torch.equal(found, expected)
    for key, value in model.state_dict().items():
        assert torch.equal(value.cpu(), params[key]), key
    for key, param in model.named_parameters():
        state = optimizer.state_of(param)
        assert torch.equal(state["master"], params[key])
        for kind, value in states[key].items():
            assert torch.equal(torch.as_tensor(state[kind]), torch.as_tensor(value)), (key, kind)
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == options


@pytest.mark.parametrize("place", PLACES)
def test_methods_have_the_bits_of_plain_torch(place: str, tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", **PLACES[place])
    with optimizer:
        loop = Loop(model, optimizer, [])
        loop.run(0, STEPS)
        assert_as_plain(model, optimizer, loop.evaluated, PLACES[place]["tier"])


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it was": ({"tier": "nvme"}, {"tier": "nvme"}),
    "in RAM": ({"tier": "cpu"}, {"tier": "cpu"}),
    "in other chunks": ({"tier": "nvme"}, {"tier": "nvme", "tuning": Tuning(chunk="16KiB")}),
    "on another tier": ({"tier": "nvme", "param_tier": "nvme"}, {"tier": "cpu", "param_tier": "cpu"}),
    "on the device": ({"tier": "device"}, {"tier": "cpu"}),
}


@pytest.mark.parametrize("way", RESUMED)
def test_what_is_committed_after_a_method_is_resumed(way: str, tmp_path: Path) -> None:
    """The class does not step then: it has to be told to train first."""
    first, then = RESUMED[way]
    model, optimizer = held(tmp_path / "run", commit_every=0, **first)
    with optimizer:
        Loop(model, optimizer, []).run(0, 5)
        Loop(model, optimizer, []).step(5)
        optimizer.apply("eval")
        optimizer.commit()
    model, optimizer = held(tmp_path / "run", resume=True, commit_every=0, **then)
    with optimizer:
        loop = Loop(model, optimizer, [])
        loop.evaluate()
        with pytest.raises(ConfigError, match="Averaged refuses its options: RuntimeError: call train"):
            loop.step(6)
        optimizer.zero_grad()
        optimizer.apply("train")
        loop.step(6)
        assert_as_plain(model, optimizer, loop.evaluated)


def test_a_rollback_takes_a_method_back(tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        loop = Loop(model, optimizer, [])
        loop.run(0, 3)
        optimizer.commit()
        for name in ("eval", "exchange"):
            optimizer.apply(name)
            optimizer.rollback()
        loop.run(3, STEPS)
        assert_as_plain(model, optimizer, loop.evaluated)


def test_a_state_dict_from_before_a_method_is_gone_back_to(tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        loop = Loop(model, optimizer, [])
        loop.run(0, 3)
        state = pickle.loads(pickle.dumps(optimizer.state_dict()))
        optimizer.apply("eval")
        with pytest.raises(ConfigError, match=r"step 3 is committed already: .* after apply\(\)"):
            optimizer.state_dict()  # it would name states that are no more
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["commit"] == state["commit"]
        loop.run(3, STEPS)
        assert_as_plain(model, optimizer, loop.evaluated)


def test_a_state_dict_from_after_a_method_holds_what_it_made(tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        loop = Loop(model, optimizer, [])
        loop.run(0, 5)
        loop.step(5)
        optimizer.apply("eval")
        state = pickle.loads(pickle.dumps(optimizer.state_dict()))
        optimizer.apply("train")
        loop.step(8)
        optimizer.load_state_dict(state)
        loop.evaluate()
        optimizer.apply("train")
        loop.step(6)
        assert_as_plain(model, optimizer, loop.evaluated)


def test_a_method_before_the_first_step_follows_the_commit_of_step_0(tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        state = pickle.loads(pickle.dumps(optimizer.state_dict()))
        optimizer.apply("damp")
        optimizer.load_state_dict(state)
        loop = Loop(model, optimizer, [])
        loop.run(0, STEPS)
        assert_as_plain(model, optimizer, loop.evaluated)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_wait_for_their_step_meanwhile(place: str, tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", **PLACES[place])
    expected = OnDevice(net(), DEVICE if PLACES[place]["tier"] == "device" else "cpu", [])
    with optimizer:
        for loop in (expected, Loop(model, optimizer, [])):
            loop.optimizer.zero_grad()
            for number in range(3):
                loop.step(number, ("eval", "train"))
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected.model.state_dict()[name]), name


@pytest.mark.parametrize("place", ["RAM", "streamed", "disk"])
def test_bf16_parameters_are_the_rounded_masters(place: str, tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", **PLACES[place] | {"compute_dtype": torch.bfloat16})
    with optimizer:
        for number in range(3):
            optimizer.zero_grad()
            model(batch(number).to(DEVICE).bfloat16()).float().square().mean().backward()
            optimizer.step()
        before = {name: optimizer.state_of(param) for name, param in model.named_parameters()}
        optimizer.apply("eval")
        for name, param in model.named_parameters():
            master = before[name]["master"].lerp(before[name]["z"], 1 - 1 / 0.9)
            assert torch.equal(optimizer.state_of(param)["master"], master), name
            assert torch.equal(optimizer.state_of(param)["z"], before[name]["z"]), name
            assert torch.equal(param.detach().cpu(), master.bfloat16()), name


def test_writes_from_outside_come_first_and_old_graphs_are_refused(tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", tier="cpu")
    with optimizer:
        Loop(model, optimizer, []).step(0)
        weight = model.head.weight
        z = optimizer.state_of(weight)["z"]
        with torch.no_grad():
            weight.fill_(0.5)
        loss = model(batch(1).to(DEVICE)).square().mean()
        optimizer.apply("eval")
        assert torch.equal(weight.detach().cpu(), torch.full(weight.shape, 0.5).lerp(z, 1 - 1 / 0.9))
        with pytest.raises((RuntimeError, StaleParameterError), match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", ["missing", "step", "zero_grad", "_own", "needs", "method"])
def test_what_cannot_be_applied_changes_nothing(name: str, tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", type("Strange", (Strange,), {"kind": "norm"}), tier="cpu")
    with optimizer:
        Loop(model, optimizer, []).step(2)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        options = dict(optimizer.param_groups[0])
        with pytest.raises(
            ConfigError, match=r"nothing was changed|it has damp, eval, exchange, forget, method, needs"
        ):
            optimizer.apply(name)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert optimizer.param_groups[0] == options
        Loop(model, optimizer, []).step(3)


def test_a_method_of_the_optimizer_that_was_given_says_what_to_call(tmp_path: Path) -> None:
    model = net()
    given = Averaged(list(model.parameters()))
    why = r'optimizer\.apply\("eval"\)'
    with OffloadZero(model, given, tier="cpu", tuning=SMALL), pytest.raises(GradientMovedError, match=why):
        given.eval()
    other = net()
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    why = r"has no such method of its own; it has none beside step\(\)"
    with OffloadZero(other, plain, tier="cpu") as optimizer, pytest.raises(ConfigError, match=why):
        optimizer.apply("eval")


class Twin(torch.optim.Optimizer):
    """It keeps what Averaged keeps, so that parameters of both share chunks, and has no other method."""

    step = Averaged.step


@pytest.mark.parametrize("place", ["RAM", "all on disk"])
def test_of_several_optimizers_those_that_have_the_method_run_it(place: str, tmp_path: Path) -> None:
    reference, model = net(), net()

    def several(one: Net) -> list[torch.optim.Optimizer]:
        matrices = [param for param in one.parameters() if param.dim() > 1]
        others = [param for param in one.parameters() if param.dim() < 2]
        twin = Twin(others, {"lr": 0.1, "beta": 0.8, "k": 0, "trains": True})
        return [Averaged(matrices), twin]

    expected = several(reference)
    options: dict[str, Any] = {"compute_dtype": torch.float32, "tuning": SMALL} | PLACES[place]
    if place == "all on disk":
        least = {key: value for key, value in options.items() if key != "tier"}
        options |= {"path": tmp_path / "run", "cpu_memory": least_cpu_memory(model, several(model), **least)}
    with OffloadZero(model, several(model), **options) as optimizer:
        for number in range(4):
            for one, its in ((reference, expected), (model, [optimizer])):
                one.zero_grad()
                one(batch(number).to(DEVICE)).square().mean().backward()
                for part in its:
                    part.step()
            for name in ("eval", "train"):
                getattr(expected[0], name)()
                optimizer.apply(name)
                values = model.state_dict()
                for key, value in reference.state_dict().items():
                    assert DEVICE != "cpu" or torch.equal(values[key], value), key


@pytest.mark.parametrize("place", ["streamed", "all on disk"])
def test_what_is_gathered_has_the_new_values(place: str, tmp_path: Path) -> None:
    model, optimizer = held(tmp_path / "run", **PLACES[place])
    with optimizer:
        Loop(model, optimizer, []).run(2, 4)
        before = {name: optimizer.state_of(param) for name, param in model.named_parameters()}
        assert not torch.equal(before["head.weight"]["master"], before["head.weight"]["z"])
        with optimizer.gathered(model):
            optimizer.apply("exchange")
            for name, param in model.named_parameters():
                assert torch.equal(param.detach().cpu(), before[name]["z"]), name
        for name, param in model.named_parameters():
            assert torch.equal(param.detach().cpu(), before[name]["z"]), name


@pytest.mark.parametrize("way", ["committed", "rolled back"])
def test_a_commit_is_up_to_date_again(way: str, tmp_path: Path) -> None:
    """Then a state dict of it that is loaded changes nothing, and gradients stay."""
    model, optimizer = held(tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        Loop(model, optimizer, []).step(2)
        optimizer.commit()
        state = optimizer.state_dict()
        optimizer.apply("eval")
        if way == "committed":
            optimizer.apply("train")
            Loop(model, optimizer, []).step(3)
            optimizer.commit()
            state = optimizer.state_dict()
        else:
            optimizer.rollback()
        model(batch(4).to(DEVICE)).square().mean().backward()
        optimizer.load_state_dict(state)
        assert optimizer.grad(model.head.weight) is not None
