"""Optimizers on pieces of masters have the bits of plain torch, or are refused with the reason, without an engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import layout, native
from offload.errors import ConfigError
from offload.optim.adopt import rules_of
from offload.optim.rule import Progress, SegmentMemory, Span
from offload.optim.rules.probe import rule_of
from offload.optim.rules.torch_rule import BLOCK, LARGE_BLOCK, TorchRule
from tests.support.cases import often

SHAPES = [(3, 67), (70_001,), (65, 129), (1,), (), (2, 3, 5, 7)]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """A user's own class, as the paper has it (Chen et al., 2023)."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (one for one in group["params"] if one.grad is not None):
                p.mul_(1 - group["lr"] * group["decay"])
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_((beta1 * momentum + (1 - beta1) * p.grad).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - beta2)


o = torch.optim
WORKING: dict[str, Make] = {
    "sgd": lambda ps: o.SGD(ps, lr=0.1),
    "sgd_decay": lambda ps: o.SGD(ps, lr=0.1, weight_decay=0.01),
    "sgd_momentum": lambda ps: o.SGD(ps, lr=0.1, momentum=0.9),
    "sgd_nesterov": lambda ps: o.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda ps: o.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd_maximize": lambda ps: o.SGD(ps, lr=0.1, momentum=0.9, maximize=True),
    "sgd_foreach": lambda ps: o.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda ps: o.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda ps: o.Adam(ps, lr=0.01),
    "adamw": lambda ps: o.AdamW(ps, lr=0.01),
    "adamw_tensor_lr": lambda ps: o.AdamW(ps, lr=torch.tensor(0.01)),
    "adamw_fused": lambda ps: o.AdamW(ps, lr=0.01, fused=True),
    "amsgrad": lambda ps: o.AdamW(ps, lr=0.01, amsgrad=True),
    "adam_maximize": lambda ps: o.Adam(ps, lr=0.01, maximize=True),
    "rmsprop": lambda ps: o.RMSprop(ps, lr=0.01),
    "rmsprop_centered": lambda ps: o.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda ps: o.Adagrad(ps, lr=0.01),
    "adagrad_initial": lambda ps: o.Adagrad(ps, lr=0.01, initial_accumulator_value=0.3, lr_decay=0.1),
    "adadelta": lambda ps: o.Adadelta(ps),
    "nadam": lambda ps: o.NAdam(ps, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda ps: o.RAdam(ps),
    "adamax": lambda ps: o.Adamax(ps),
    # On an accelerator torch takes foreach, which calculates a number of ASGD's state in another precision.
    "asgd": lambda ps: o.ASGD(ps, t0=2, foreach=False),
    "rprop": lambda ps: o.Rprop(ps),
    "lion": Lion,
}


def parameters() -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=made)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=made) for shape in SHAPES]


class OnPieces:
    """Parameters in segments of their own, cut at multiples of `cut` elements."""

    def __init__(self, rule: TorchRule, params: list[nn.Parameter], cut: int, threads: int) -> None:
        self.rule, self.kernels = rule, native.load(threads)
        self.params = params
        self.arrays = [
            [param.detach().reshape(-1).clone()] + [torch.full((param.numel(),), kind.starts) for kind in rule.states]
            for param in params
        ]
        self.progress: list[Progress] = [rule.initial] * len(params)
        self.cut = cut

    def step(self, group: dict[str, Any], grads: list[Tensor], scale: float, active: Callable[[int], bool]) -> None:
        changed: dict[str, Any] = {}
        for number, arrays in enumerate(self.arrays):
            if active(number):
                before = self.progress[number]
                self.progress[number], changed = self.rule.advance(group, before)
                scalars = self.rule.scalars(group, before, scale)
                self.kernels.run(self._tasks(arrays, grads[number].reshape(-1), scalars))
        group.update(changed)

    def _tasks(self, arrays: list[Tensor], grad: Tensor, scalars: Any) -> Iterator[native.Task]:
        for low in range(0, len(grad), self.cut):
            piece = [array[low : low + self.cut] for array in arrays]
            memory = SegmentMemory(piece, grad[low : low + self.cut], piece[0], [Span(0, len(piece[0]))])
            yield self.rule.bind(self.kernels, memory)(scalars)


def run(make: Make, *, cut: int, threads: int, scale: float = 1.0) -> None:
    plain = parameters()
    expected, given = make(plain), make(parameters())
    group = {name: value for name, value in given.param_groups[0].items() if name != "params"}
    found = OnPieces(rule_of(given, given.param_groups[0]), parameters(), cut, threads)
    for step in range(5):
        expected.zero_grad()
        grads = gradients(step)
        # One gets its first gradient late, which torch's own fused SGD fails at.
        is_active = [step > 1 or number != 2 or group.get("fused") for number in range(len(SHAPES))]
        for number, param in enumerate(plain):
            param.grad = grads[number] * scale if is_active[number] else None
        expected.step()
        found.step(group, grads, scale, is_active.__getitem__)
        expected.param_groups[0]["lr"] *= 0.9
        group["lr"] = expected.param_groups[0]["lr"]
    for number, param in enumerate(plain):
        master, *states = found.arrays[number]
        assert torch.equal(master.view(torch.int32), param.detach().reshape(-1).view(torch.int32)), number
        shown = expected.state[param]
        for kind, state in zip(found.rule.states, states, strict=True):
            if isinstance(shown.get(kind.name), Tensor):
                assert torch.equal(state, shown[kind.name].reshape(-1)), kind.name
        for scalar in found.progress[number].scalars:
            assert float(shown[scalar.name]) == scalar.value


@pytest.mark.parametrize("name", WORKING)
def test_an_optimizer_on_pieces_has_the_bits_of_plain_torch(name: str) -> None:
    run(WORKING[name], cut=4096, threads=2)


@pytest.mark.parametrize(
    "name", often(["sgd_momentum", "nadam", "asgd", "rprop", "lion"], "sgd_momentum", "nadam", "rprop")
)
def test_bits_do_not_depend_on_threads_or_cuts(name: str) -> None:
    run(WORKING[name], cut=64, threads=1, scale=0.37)
    run(WORKING[name], cut=1 << 20, threads=3, scale=0.37)


class Whole(Lion):
    """One whose step differs in what the probe has to see."""

    kind = ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if self.kind == "None is zero":
                    p.mul_(0.9)
                if p.grad is None:
                    continue
                rate = group["lr"] * {"counts": self.count}.get(self.kind, 1)
                grad = p.grad
                if self.kind == "norm":
                    grad = grad / grad.norm()
                if self.kind == "norm of all":
                    grad = grad / sum(float(q.grad.norm()) for q in group["params"] if q.grad is not None)
                if self.kind == "noise":
                    grad = grad + torch.randn_like(grad)
                if self.kind == "python's noise":
                    rate *= random.random()
                if self.kind == "by dimension" and p.dim() >= 2:
                    grad = grad + 0.1 * p
                if self.kind == "a list":
                    self.state[p]["seen"] = [1]
                if self.kind == "another shape":
                    self.state[p]["row"] = torch.zeros((*p.shape[:1], 2))
                if self.kind == "complex":
                    self.state[p]["phase"] = torch.tensor(1j)
                if self.kind == "half":
                    self.state[p]["half"] = p.half()
                if self.kind == "an option of values":
                    group["largest"] = float(p.max())
                if self.kind == "depends on values":
                    self.state[p]["largest"] = float(p.max())
                p.add_(grad, alpha=-rate)


REFUSED = {
    "counts": "keeps something on the optimizer",
    "norm of all": "looks at several parameters",
    "noise": "draws random numbers",
    "python's noise": "draws random numbers",
    "None is zero": "moves parameters that have no gradient",
    "a list": "its state seen is a list",
    "another shape": "its state row has shape",
    "half": "its state half is torch.float16",
    "complex": "its state phase is a number of torch.complex64",
    "an option of values": "its step makes an option of the group, largest, of the values of a parameter",
    "depends on values": "the numbers of its state depend on the values",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_on_pieces_is_refused_with_the_reason(kind: str) -> None:
    params = parameters()
    optimizer = type("Whole", (Whole,), {"kind": kind})(params)
    generators = torch.get_rng_state(), random.getstate()
    with pytest.raises(ConfigError, match=f"optimizer is Whole, which cannot be offloaded: .*{REFUSED[kind]}"):
        rule_of(optimizer, optimizer.param_groups[0])
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    for param, expected in zip(params, parameters(), strict=True):
        assert torch.equal(param, expected)
        assert param.grad is None
    assert not optimizer.state


def test_classes_of_torch_that_need_more_are_refused() -> None:
    made = o.LBFGS(parameters())
    with pytest.raises(ConfigError, match="closure"):
        rule_of(made, made.param_groups[0])


@pytest.mark.parametrize("lr", [0.1, 0.0])
@pytest.mark.parametrize("kind", ["norm", "by dimension"])
def test_what_looks_at_a_whole_parameter_steps_whole_ones_also_if_nothing_moves_yet(kind: str, lr: float) -> None:
    optimizer = type("Whole", (Whole,), {"kind": kind})(parameters(), lr=lr)
    assert rule_of(optimizer, optimizer.param_groups[0]).is_whole


class OfSlices(o.Optimizer):
    """Divides by norms over `dims`; None: over all."""

    def __init__(self, params: Any, dims: tuple[int, ...] | None, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "dims": dims})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                p.sub_(p.grad / (1 + p.grad.norm(dim=group["dims"], keepdim=True)), alpha=group["lr"])


@pytest.mark.parametrize(("dims", "has_slices"), [((-2, -1), True), ((-1,), True), ((-3,), False), (None, False)])
def test_slices_of_the_first_dimension_are_stepped_alone_if_that_gives_the_same_bits(
    dims: tuple[int, ...] | None, has_slices: bool
) -> None:
    shapes = [(4, 20, 30), (30, 20)] if dims != (-3,) else [(4, 20, 30)]
    given = OfSlices([nn.Parameter(torch.randn(shape)) for shape in shapes], dims)
    rule = rule_of(given, given.param_groups[0])
    assert rule.is_whole
    assert [rule.kept(shape).has_slices for shape in shapes] == [has_slices, False][: len(shapes)]
    with pytest.raises(ConfigError, match="several slices") if has_slices else nullcontext():
        rule.require_sound(0, given.param_groups[0] | {"dims": None})


class BySize(o.Optimizer):
    """Keeps numbers of rows and columns, of parameters that are large enough."""

    def __init__(self, params: Any, least: int, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                shapes = {"row": p.shape[:1], "col": p.shape[1:]}
                if group["least"] == 0:
                    shapes = {"gram": p.shape[:1] * 2}
                elif min(p.shape) < group["least"]:
                    shapes = {"all": p.shape}
                state = self.state[p]
                for name, shape in shapes.items():
                    state[name] = state.get(name, torch.zeros(shape)) + p.grad.sum()
                p.sub_(next(iter(state.values())).mean(), alpha=group["lr"])

    def forget(self) -> None:
        for state in self.state.values():
            for one in state.values():
                one.zero_()


def test_what_is_kept_of_a_parameter_goes_by_its_own_shape() -> None:
    given = BySize([nn.Parameter(torch.randn(shape)) for shape in [(300, 128), (300, 127), (5, 128)]], least=128)
    rule = rule_of(given, given.param_groups[0])
    kept = [rule.kept(shape) for shape in [(300, 128), (300, 127), (5, 128)]]
    assert [[kind.name for kind in one.states] for one in kept] == [["row", "col"], ["all"], ["all"]]
    assert dict(kept[0].small) == {"row": (300,), "col": (128,)}
    assert [kind.form.block for kind in kept[0].states] == [64, 64]


def test_what_was_not_seen_of_a_shape_is_refused_when_it_comes_up() -> None:
    """Stand-ins have at most 138 rows and columns."""
    given = BySize([nn.Parameter(torch.randn(300, 300))], least=200)
    rule = rule_of(given, given.param_groups[0])
    arrays = [torch.zeros(90_000) for _ in range(1 + len(rule.kept((300, 300)).states))]
    memory = SegmentMemory(arrays, torch.ones(90_000), arrays[0], [Span(0, 90_000, layout.Whole((300, 300)))])
    task = rule.bind(native.load(1), memory)(rule.scalars(given.param_groups[0], rule.initial, 1.0))
    with pytest.raises(ConfigError, match="BySize keeps row, for which nothing was reserved"):
        native.load(1).run([task])


class Scaled(OfSlices):
    """Keeps a number that goes by the sizes of a parameter, which it takes from its state later."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                scale = self.state[p].setdefault("scale", max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
                p.sub_(scale * p.grad / p.grad.norm(), alpha=group["lr"])


def test_a_method_is_refused_that_cannot_be_tried_out_with_what_is_kept() -> None:
    """Stand-ins of methods have 99 and 128 rows."""
    for least, is_tried in ((128, True), (130, False)):
        given = BySize([nn.Parameter(torch.randn(300, 300))], least=least)
        rule, group = rule_of(given, given.param_groups[0]), given.param_groups[0]
        after, _ = rule.advance(group, rule.initial, rule.kept((300, 300)).like)
        assert after.arrays == ("row", "col")
        with nullcontext() if is_tried else pytest.raises(ConfigError, match="no stand-in of this trial has them"):
            rule.methods["forget"].try_out(group, [after])


def test_numbers_of_large_sizes_are_refused_and_those_of_small_ones_are_known() -> None:
    small = Scaled([nn.Parameter(torch.randn(120, 30))], None)
    rule = rule_of(small, small.param_groups[0])
    progress, _ = rule.advance(small.param_groups[0], rule.initial, rule.kept((120, 30)).like)
    assert [(one.name, one.value) for one in progress.scalars] == [("scale", 2.0)]
    large = Scaled([nn.Parameter(torch.randn(1200, 300))], None)
    with pytest.raises(ConfigError, match="numbers of its state depend on the values, or sizes"):
        rule_of(large, large.param_groups[0])


def test_a_state_with_more_elements_than_its_parameter_is_refused() -> None:
    given = BySize([nn.Parameter(torch.randn(300, 200))], least=0)
    with pytest.raises(ConfigError, match=r"gram has shape \(300, 300\) .*: more elements"):
        rule_of(given, given.param_groups[0])


def test_muon_is_whole_and_what_is_elementwise_is_not() -> None:
    muon = o.Muon([nn.Parameter(torch.randn(64, 32))])
    rule = rule_of(muon, muon.param_groups[0])
    assert (rule.is_whole, [kind.name for kind in rule.states]) == (True, ["momentum_buffer"])
    assert not any(
        rule_of(one, one.param_groups[0]).is_whole for one in (make(parameters()) for make in WORKING.values())
    )


def test_options_with_which_whole_parameters_are_looked_at_later_are_refused() -> None:
    class Normed(o.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if group["nesterov_norm"] and p.grad is not None:
                        p.grad.div_(p.grad.norm())
            super().step(closure)

    optimizer = Normed(parameters(), lr=0.1)
    optimizer.param_groups[0]["nesterov_norm"] = 0.0
    rule = rule_of(optimizer, optimizer.param_groups[0])
    assert not rule.is_whole
    with pytest.raises(ConfigError, match="param group 2 has options now with which Normed looks at whole parameters"):
        rule.require_sound(2, dict(optimizer.param_groups[0]) | {"nesterov_norm": 1.0})


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    params = parameters()
    optimizer = o.RMSprop(params)
    for param, grad in zip(params, gradients(0), strict=True):
        param.grad = grad
    optimizer.step()
    with pytest.raises(ConfigError, match="has values already"):
        rule_of(optimizer, optimizer.param_groups[0])


def test_options_that_bring_new_arrays_later_are_refused_and_others_are_taken() -> None:
    optimizer = o.SGD(parameters(), lr=0.1)
    rule = rule_of(optimizer, optimizer.param_groups[0])
    group = dict(optimizer.param_groups[0])
    rule.require_sound(0, group | {"lr": 0.5, "weight_decay": 0.1, "maximize": True})
    with pytest.raises(ConfigError, match="param group 3 has options now with which SGD keeps momentum_buffer"):
        rule.require_sound(3, group | {"momentum": 0.9})
    with pytest.raises(ConfigError, match="SGD refuses its options"):
        rule.advance(group | {"lr": "fast"}, rule.initial)
    momentum = o.SGD(parameters(), lr=0.1, momentum=0.9)
    rule_of(momentum, momentum.param_groups[0]).require_sound(0, dict(momentum.param_groups[0]) | {"momentum": 0.0})


def test_a_tensor_among_the_options_may_change_once_the_step_has_begun() -> None:
    """As schedulers change a learning rate, in place."""
    optimizer = o.SGD(parameters(), lr=torch.tensor(0.1), foreach=False)
    rule = rule_of(optimizer, optimizer.param_groups[0])
    scalars = rule.scalars(optimizer.param_groups[0], rule.initial, 1.0)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    master, grad = torch.zeros(3), torch.ones(3)
    with torch.no_grad():
        memory = SegmentMemory([master], grad, master, [Span(0, 3)])
        native.load(1).run([rule.bind(native.load(1), memory)(scalars)])
    assert torch.equal(master, torch.full((3,), -0.1))


def test_defaults_of_torch_change_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            optimizer = o.RMSprop([nn.Parameter(torch.ones(3, dtype=torch.float32))], lr=0.1, momentum=0.9)
        rule = rule_of(optimizer, optimizer.param_groups[0])
        after, _ = rule.advance(optimizer.param_groups[0], rule.initial)
        kernels = native.load(1)
        with torch.device("cpu"):
            arrays = [torch.zeros(3, dtype=torch.float32) for _ in range(3)]
            grad = torch.ones(3, dtype=torch.float32)
        bound = rule.bind(kernels, SegmentMemory(arrays, grad, arrays[0], [Span(0, 3)]))
        kernels.run([bound(rule.scalars(optimizer.param_groups[0], rule.initial, 1.0))])
        kernels.run([bound(rule.scalars(optimizer.param_groups[0], after, 1.0))])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    expected = nn.Parameter(torch.zeros(3))
    plain = o.RMSprop([expected], lr=0.1, momentum=0.9)
    expected.grad = torch.ones(3)
    plain.step()
    plain.step()
    assert torch.equal(arrays[0], expected)


def test_a_scheduler_that_was_made_before_hides_nothing() -> None:
    optimizer = o.SGD(parameters(), lr=0.1)
    o.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rule_of(optimizer, optimizer.param_groups[0])


def test_an_attribute_that_cannot_be_copied_is_refused() -> None:
    optimizer = o.SGD(parameters(), lr=0.1)
    optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="an attribute of it cannot be copied"):
        rule_of(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize("last", [(), (0,)])
def test_states_that_the_constructor_filled_are_known_in_groups_of_any_parameters(last: tuple[int, ...]) -> None:
    """Of no dimension an array looks as a number does, and one without elements has no value."""
    first, second = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(last))
    for params in ([{"params": [first]}, {"params": [second]}], [{"params": [first, second]}]):
        optimizer = o.Adagrad(params, initial_accumulator_value=0.3)
        for group in optimizer.param_groups:
            (kind,) = rule_of(optimizer, group).states
            assert kind.name == "sum"
            assert kind.starts == pytest.approx(0.3 if any(param.numel() for param in group["params"]) else 0.0)


def test_hooks_and_attributes_of_the_optimizer_are_not_called_or_changed_for_pieces() -> None:
    called = []
    optimizer = o.SGD(parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    rule = rule_of(optimizer, optimizer.param_groups[0])
    OnPieces(rule, parameters(), 4096, 2).step(dict(optimizer.param_groups[0]), gradients(0), 1.0, lambda _: True)
    assert not called


def test_torch_shares_large_pieces_where_that_has_the_same_bits() -> None:
    fast = o.SGD(parameters(), lr=0.1, momentum=0.9)
    assert rule_of(fast, fast.param_groups[0]).block == LARGE_BLOCK


class Wasteful(Lion):
    """At once a product, a sum, and its root: two of them at a time, beside momenta that it makes anew."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                twice = p.grad * 2
                total = twice + p
                del twice
                root = total.abs_().sqrt().view(-1)
                self.state[p]["momentum"] = root.view_as(p) + 1
                del total, root
                p.sub_(self.state[p]["momentum"], alpha=group["lr"])


def test_what_a_step_takes_beside_its_arrays_is_counted() -> None:
    """By hand: the gradient's copy, and the total, the root and the new momenta."""
    optimizer = Wasteful(parameters())
    rule = rule_of(optimizer, optimizer.param_groups[0])
    assert rule.block == LARGE_BLOCK
    assert rule.temporary_bytes(1 << 24, threads=2) == 4 * 4 * LARGE_BLOCK
    assert rule.temporary_bytes(1000, threads=2) == 4 * 4 * 1000
    rule.block = BLOCK
    assert rule.temporary_bytes(1 << 24, threads=3) == 4 * 4 * 3 * BLOCK
    normed = type("Whole", (Whole,), {"kind": "norm"})(parameters())
    of_wholes = rule_of(normed, normed.param_groups[0])
    assert of_wholes.is_whole
    # The copy and the quotient; the norm is a number, which counts as one more.
    assert of_wholes.temporary_bytes(1 << 24, threads=2) == 4 * 3 * (1 << 24)
    adam = torch.optim.AdamW(parameters())
    assert rules_of([adam])[0].temporary_bytes(1 << 24, threads=2) == 0


class Runaway(Lion):
    """A number of its state leaves fp64."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["grows"] = self.state[p].get("grows", 1e60) * 1e60


def test_a_number_that_no_commit_can_keep_is_refused_before_anything_changes() -> None:
    optimizer = Runaway(parameters())
    group, rule = optimizer.param_groups[0], rule_of(optimizer, optimizer.param_groups[0])
    progress = rule.initial
    for _ in range(4):
        progress, _ = rule.advance(group, progress)
    assert progress.scalars[0].value == pytest.approx(1e300)
    with pytest.raises(ConfigError, match="grows of Runaway becomes inf, which no commit can keep"):
        rule.advance(group, progress)
