"""Other methods of an optimizer's class run on pieces with the bits of plain torch, or are refused with the reason."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import native
from offload.errors import ConfigError
from offload.optim.rule import NEVER, Progress, Scalar, Span
from offload.optim.rules.probe import rule_of
from offload.optim.rules.torch_rule import BLOCK, TorchRule
from tests.optim.test_torch_rules import gradients, parameters, run


class Averaged(torch.optim.Optimizer):
    """Steps at one point and averages at another, as schedule-free SGD does (Defazio et al., 2024)."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before")
            part = 1 / (group["k"] + 1)
            for p in (one for one in group["params"] if one.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.lerp_(z, part)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - part) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["trains"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["trains"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["trains"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["trains"] = True

    def exchange(self) -> None:
        """By their memory, as averages of weights are often put into a model."""
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data, self.state[p]["z"] = self.state[p]["z"], p.data

    def forget(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].pop("z", None)
                if "count" in self.state[p]:
                    self.state[p]["count"] = 0

    @torch.no_grad()
    def damp(self) -> None:
        """`pow` is among the operations whose bits depend on where an element lies in its loop."""
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(p.sign() * p.abs() ** 0.9)


class OnPieces:
    """Parameters with their states in arrays, as a run has them, stepped by plain torch and changed by a method."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[nn.Parameter], rule: TorchRule) -> None:
        self.optimizer, self.params, self.rule = optimizer, params, rule
        states = [optimizer.state.get(p, {}) for p in params]
        self.progress = [Progress(2, scalars(state), ("z",)) if state else NEVER for state in states]
        self.arrays = [
            [array.detach().reshape(-1).clone() for array in (p, state.get("z", torch.zeros(p.shape)))]
            for p, state in zip(params, states, strict=True)
        ]
        self.group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    def call(self, name: str, cut: int, threads: int) -> None:
        method, kernels = self.rule.methods[name], native.load(threads)
        method.try_out(self.group, self.progress)
        changed: dict[str, Any] = {}
        tasks = []
        for number, arrays in enumerate(self.arrays):
            before = self.progress[number]
            self.progress[number], changed = method.advance(self.group, before)
            for low in range(0, len(arrays[0]), cut):
                piece = [array[low : low + cut] for array in arrays]
                tasks.append(method.task(self.group, before, piece, [Span(0, len(piece[0]))]))
        kernels.run(tasks)
        self.group |= changed


def scalars(state: dict[str, Any]) -> tuple[Scalar, ...]:
    return tuple(Scalar(name, value) for name, value in state.items() if not isinstance(value, Tensor))


@pytest.mark.parametrize(("cut", "threads"), [(64, 1), (4096, 2), (1 << 20, 3)])
@pytest.mark.parametrize("names", [("eval", "train"), ("exchange",), ("eval", "forget"), ("damp",)], ids="-".join)
def test_a_method_on_pieces_has_the_bits_of_plain_torch(names: tuple[str, ...], cut: int, threads: int) -> None:
    plain = parameters()
    expected = Averaged(plain)
    for step in range(2):
        for number, (param, grad) in enumerate(zip(plain, gradients(step), strict=True)):
            param.grad = grad if number != 2 else None  # one was never stepped
        expected.step()
    given = Averaged(parameters())
    found = OnPieces(expected, plain, rule_of(given, given.param_groups[0]))
    for name in names:
        getattr(expected, name)()
        found.call(name, cut, threads)
    for number, param in enumerate(plain):
        master, z = found.arrays[number]
        assert torch.equal(master, param.detach().reshape(-1)), number
        state = expected.state[param]
        assert found.progress[number].arrays == (("z",) if "z" in state else ())
        if "z" in state:
            assert torch.equal(z, state["z"].reshape(-1)), number
        assert {one.name: one.value for one in found.progress[number].scalars} == {
            name: value for name, value in state.items() if name != "z"
        }
    assert found.group == {name: value for name, value in expected.param_groups[0].items() if name != "params"}


class Strange(Averaged):
    """One with a method that has to be seen through."""

    kind = ""

    def method(self) -> None:
        for group in self.param_groups:
            norm = sum(float(p.detach().norm()) for p in group["params"])
            for p in group["params"]:
                z = self.state[p].get("z", p.data)
                match self.kind:
                    case "norm":
                        p.data.div_(p.data.norm())
                    case "norm of all":
                        p.data.div_(norm)
                    case "gradients" if p.grad is not None:
                        p.data.add_(p.grad)
                    case "noise":
                        p.data.add_(torch.randn_like(p))
                    case "python's noise":
                        z.mul_(random.random())
                    case "a counter":
                        self.count = getattr(self, "count", 0) + 1
                    case "a new array":
                        self.state[p]["backup"] = p.detach().clone()
                    case "another shape":
                        self.state[p]["row"] = torch.zeros((*p.shape[:1], 2))
                    case "numbers of values":
                        self.state[p]["count"] = float(p.detach().max())
                    case "an option of values":
                        group["lr"] = float(p.detach().max())
                    case "by dimension" if p.dim() > 1:
                        p.data.mul_(2)
                    case "raises":
                        raise ValueError("not now")

    def needs(self, factor: float) -> None:
        """It has an argument."""


REFUSED = {
    "norm": "gets other values than the same elements of the whole",
    "norm of all": "gets other values than the same elements of the whole",
    "gradients": "or at gradients, which only the step sees",
    "noise": "draws random numbers",
    "python's noise": "draws random numbers",
    "a counter": "it changes count of the optimizer itself, which no commit would find",
    "a new array": "it keeps backup, for which nothing was reserved",
    "another shape": "it keeps row, for which nothing was reserved",
    "numbers of values": "the numbers of a state that it makes depend on the values",
    "an option of values": "it makes an option of the group, lr, of the values of a parameter",
    "by dimension": "gets other values than the same elements of the whole",
    "raises": "it raises ValueError: not now",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_method_that_cannot_run_on_pieces_is_refused_with_the_reason(kind: str) -> None:
    optimizer = type("Strange", (Strange,), {"kind": kind})(parameters())
    group, rule = optimizer.param_groups[0], rule_of(optimizer, optimizer.param_groups[0])
    before = dict(group), torch.get_rng_state(), random.getstate()
    with pytest.raises(
        ConfigError, match=rf"^method\(\) of Strange cannot be applied: .*{REFUSED[kind]}.*; nothing was"
    ):
        rule.methods["method"].try_out(group, [NEVER, Progress(3, (), ("z",))])
    assert group == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]


def test_a_method_with_an_argument_is_refused() -> None:
    optimizer = Strange(parameters())
    rule = rule_of(optimizer, optimizer.param_groups[0])
    with pytest.raises(ConfigError, match=r"needs\(\) of Strange cannot be applied: it raises TypeError: .*'factor'"):
        rule.methods["needs"].try_out(optimizer.param_groups[0], [NEVER])


def test_a_method_may_do_what_it_likes_with_the_memory_that_it_sees() -> None:
    """A run's own may be pinned, or known to an I/O engine."""
    optimizer = torch.optim.Adagrad(parameters(), lr=0.1)
    rule = rule_of(optimizer, optimizer.param_groups[0])
    method = rule.methods["share_memory"]  # it moves the storage of all states
    method.try_out(optimizer.param_groups[0], [rule.initial])
    memory = torch.zeros(2, 300)
    native.load(1).run([method.task(optimizer.param_groups[0], rule.initial, [*memory], [Span(0, 300)])])
    assert not memory.untyped_storage().is_shared()
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["sum"].untyped_storage().is_shared() is False


def test_the_copies_that_a_method_works_on_are_counted() -> None:
    """Of masters and of one array, and as much again for what it makes."""
    optimizer = Averaged(parameters())
    rule = rule_of(optimizer, optimizer.param_groups[0])
    rule.block = BLOCK
    assert rule.temporary_bytes(1 << 24, threads=3) == 4 * 4 * 3 * BLOCK
    assert rule.temporary_bytes(100, threads=3) == 4 * 4 * 100


def test_methods_are_those_of_the_class_itself() -> None:
    optimizer = Averaged(parameters())
    rule = rule_of(optimizer, optimizer.param_groups[0])
    assert sorted(rule.methods) == ["damp", "eval", "exchange", "forget", "train"]
    plain = torch.optim.SGD(parameters(), lr=0.1)
    assert not rule_of(plain, plain.param_groups[0]).methods


def test_a_step_that_points_parameters_to_new_memory_is_followed() -> None:
    """`p.data = ...` in place of an operation in place."""

    class Pointed(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in (one for one in group["params"] if one.grad is not None):
                    state = self.state[p]
                    state["before"] = p.data
                    p.data = p.data - group["lr"] * p.grad

    run(lambda params: Pointed(params, {"lr": 0.1}), cut=4096, threads=2)
