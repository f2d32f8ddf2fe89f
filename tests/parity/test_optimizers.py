"""Any elementwise optimizer, held, has the bits of plain torch: on every tier, across commits, in another layout."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero, ResumeError, Tuning
from offload.planner import least_cpu_memory
from tests.optim.test_torch_rules import WORKING, Lion, Make
from tests.support.cases import often
from tests.support.device import DEVICE
from tests.support.toy import Net, batch

STEPS = 6
SMALL = Tuning(chunk="4KiB", threads=2)
PLACES: dict[str, dict[str, Any]] = {
    "RAM": {"tier": "cpu"},
    "streamed": {"tier": "cpu", "param_tier": "cpu"},
    "disk": {"tier": "nvme", "cpu_memory": "least"},
    "all on disk": {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
    "device": {"tier": "device"},
}
# Adam and AdamW have kernels of their own: tests/parity/test_against_torch.py.
MAKES: dict[str, Make] = {
    name: make for name, make in WORKING.items() if name not in ("adam", "adamw", "adamw_tensor_lr", "adamw_fused")
}
KINDS = ("sgd_dampening", "adagrad_initial", "nadam", "lion")


def net() -> Net:
    torch.manual_seed(5)
    return Net().to(DEVICE)


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


def clip(model: nn.Module, most: float) -> None:
    """As torch's clip_grad_norm_, of a norm in double precision."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    for grad in grads:
        grad.mul_(min(most / (norm + 1e-6), 1.0))


class Loop:
    """One training loop for a plain and for a held model: clipping, a schedule, and a late first gradient."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.late = model.head.bias  # type: ignore[union-attr]

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for half in (0, 1):
            (self.model(batch(2 * number + half).to(DEVICE)).square().mean() / 2).backward()
        if number < 2 and not self.optimizer.param_groups[0].get("fused"):  # torch's own fused SGD fails there
            self.late.grad = None  # type: ignore[union-attr]
        if isinstance(self.optimizer, OffloadZero):
            self.optimizer.clip_grad_norm_(0.5)
        else:
            clip(self.model, 0.5)
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9


class Apart(Loop):
    """A plain model whose optimizer steps masters on another device: torch's code for a device may round otherwise."""

    def __init__(self, model: nn.Module, name: str, device: str) -> None:
        self.masters = {name: nn.Parameter(value.detach().to(device)) for name, value in model.named_parameters()}
        super().__init__(model, WORKING[name](list(self.masters.values())))
        self.optimizer.register_step_pre_hook(lambda *_: self.take_gradients(device))

    def take_gradients(self, device: str) -> None:
        for name, param in self.model.named_parameters():
            self.masters[name].grad = None if param.grad is None else param.grad.to(device)

    def step(self, number: int) -> None:
        self.model.zero_grad()
        super().step(number)
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self.masters[name])


@cache
def plain(name: str, device: str) -> tuple[dict[str, Tensor], dict[str, Mapping[str, Any]], list[Any]]:
    """Parameters, states and learning rates of plain torch after STEPS steps, with the optimizer on `device`."""
    loop = Apart(net(), name, device)
    for number in range(STEPS):
        loop.step(number)
    states = {name: on_cpu(loop.optimizer.state[param]) for name, param in loop.masters.items()}
    return on_cpu(loop.masters), states, [group["lr"] for group in loop.optimizer.param_groups]


def held(name: str, path: Path, *, resume: bool = False, **options: Any) -> tuple[Net, OffloadZero]:
    model = net()
    given = WORKING[name](list(model.parameters()))
    options = {"tuning": SMALL, "compute_dtype": torch.float32, "accumulation": 2} | options
    if options.get("cpu_memory") == "least":
        least = {key: value for key, value in options.items() if key not in ("tier", "cpu_memory", "commit_every")}
        options["cpu_memory"] = least_cpu_memory(model, given, **least)
    if options["tier"] == "nvme" or "commit_every" in options:
        options["path"] = path
    return model, OffloadZero(model, given, resume=resume, **options)


def assert_as_plain(name: str, model: nn.Module, optimizer: OffloadZero, tier: str = "cpu") -> None:
    params, states, rates = plain(name, DEVICE if tier == "device" else "cpu")
    for key, value in model.state_dict().items():
        assert torch.equal(value.cpu(), params[key]), key
    assert [group["lr"] for group in optimizer.param_groups] == rates
    for key, param in model.named_parameters():
        found, expected = optimizer.state_of(param), states[key]
        for kind, value in expected.items():
            if isinstance(value, Tensor) and value.dim():
                assert torch.equal(found[kind], value), (key, kind)
            elif value is not None:
                assert found[kind] == float(value), (key, kind)
        assert torch.equal(found["master"], params[key])


@pytest.mark.parametrize("place", often(PLACES, "disk", "streamed"))
@pytest.mark.parametrize("name", MAKES)
def test_a_held_optimizer_has_the_bits_of_plain_torch(name: str, place: str, tmp_path: Path) -> None:
    model, optimizer = held(name, tmp_path / "run", **PLACES[place])
    with optimizer:
        loop = Loop(model, optimizer)
        for number in range(STEPS):
            loop.step(number)
        assert_as_plain(name, model, optimizer, PLACES[place]["tier"])


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it was": ({"tier": "nvme"}, {"tier": "nvme"}),
    "in other chunks": ({"tier": "nvme"}, {"tier": "nvme", "tuning": Tuning(chunk="16KiB")}),
    "on another tier": ({"tier": "nvme"}, {"tier": "cpu", "param_tier": "cpu"}),
}


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_optimizer_has_the_bits_of_plain_torch(name: str, way: str, tmp_path: Path) -> None:
    first, then = RESUMED[way]
    model, optimizer = held(name, tmp_path / "run", commit_every=0, **first)
    with optimizer:
        loop = Loop(model, optimizer)
        for number in range(STEPS):
            loop.step(number)
            if number == 2:
                optimizer.commit()
    model, optimizer = held(name, tmp_path / "run", resume=True, commit_every=0, **then)
    with optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == 3
        loop = Loop(model, optimizer)
        for number in range(3, STEPS):
            loop.step(number)
        assert_as_plain(name, model, optimizer)


@pytest.mark.parametrize("name", KINDS)
def test_steps_taken_back_and_taken_again_change_no_bit(name: str, tmp_path: Path) -> None:
    model, optimizer = held(name, tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        loop = Loop(model, optimizer)
        optimizer.commit()
        loop.step(7)
        optimizer.rollback()
        for number in range(STEPS):
            loop.step(number)
            if number in (0, 3):
                optimizer.commit()
                loop.step(8)
                optimizer.rollback()
        assert_as_plain(name, model, optimizer)


@pytest.mark.parametrize("name", KINDS)
def test_the_step_of_a_state_dict_is_gone_back_to(name: str, tmp_path: Path) -> None:
    model, optimizer = held(name, tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        loop = Loop(model, optimizer)
        for number in range(3):
            loop.step(number)
        state = pickle.loads(pickle.dumps(optimizer.state_dict()))
        loop.step(8)
        optimizer.commit()
        optimizer.load_state_dict(state)
        for number in range(3, STEPS):
            loop.step(number)
        assert_as_plain(name, model, optimizer)


def test_states_that_plain_torch_would_show_are_shown(tmp_path: Path) -> None:
    model, optimizer = held("nadam", tmp_path / "run", tier="cpu")
    with optimizer:
        assert not optimizer.state
        Loop(model, optimizer).step(2)
        state = optimizer.state[model.head.weight]
        loop = Apart(net(), "nadam", "cpu")
        loop.step(2)
        expected = loop.optimizer.state[loop.masters["head.weight"]]
        assert set(state) == set(expected)
        for kind, value in expected.items():
            assert torch.equal(torch.as_tensor(state[kind] * 1).cpu(), torch.as_tensor(value)), kind


def test_another_optimizer_is_refused_at_resume(tmp_path: Path) -> None:
    model, optimizer = held("sgd_momentum", tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        Loop(model, optimizer).step(2)
        optimizer.commit()
    for name, why in [
        ("lion", "param group 0 is of Lion, and one of SGD was committed"),
        ("adam_maximize", "param group 0 is of Adam run by torch, and one of SGD was committed"),
        ("sgd", "has master, and master, momentum_buffer was committed"),
    ]:
        with pytest.raises(ResumeError, match=why) as caught:
            held(name, tmp_path / "run", resume=True, commit_every=0, tier="nvme")
        assert 'or resume_states="anew" to keep the weights alone. What differs' in str(caught.value)
    model, optimizer = held("adam_maximize", tmp_path / "other", commit_every=0, tier="nvme")
    with optimizer:
        optimizer.commit()
    with pytest.raises(ResumeError, match="param group 0 is of Adam, and one of Adam run by torch was committed"):
        held("adam", tmp_path / "other", resume=True, commit_every=0, tier="nvme")
    held("sgd_nesterov", tmp_path / "run", resume=True, commit_every=0, tier="nvme")[1].close()


@cache
def changed_over(before: str, after: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Plain torch: three steps of one optimizer, and three of a fresh one on the same parameters."""
    model = net().cpu()
    for name, numbers in ((before, range(3)), (after, range(3, 6))):
        loop = Loop(model, WORKING[name](list(model.parameters())))
        for number in numbers:
            loop.step(number)
    states = {name: on_cpu(loop.optimizer.state[param]) for name, param in model.named_parameters()}
    return {name: value.detach().clone() for name, value in model.named_parameters()}, states


ANEW: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "more arrays": ("sgd", "lion", {"tier": "nvme"}, {"tier": "nvme"}),
    "arrays that do not begin with zeros": ("rmsprop", "adagrad_initial", {"tier": "nvme"}, {"tier": "nvme"}),
    "the same optimizer": ("sgd_dampening", "sgd_dampening", {"tier": "nvme"}, {"tier": "nvme"}),
    "on other tiers": ("adagrad_initial", "nadam", {"tier": "nvme"}, {"tier": "cpu", "param_tier": "cpu"}),
    "in other chunks": ("nadam", "rmsprop_centered", {"tier": "cpu"}, {"tier": "nvme", "tuning": Tuning("16KiB")}),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="plain torch trains on the CPU")
@pytest.mark.parametrize("way", ANEW)
def test_masters_go_on_with_another_optimizer_as_in_plain_torch(
    way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, after, first, then = ANEW[way]
    model, optimizer = held(before, tmp_path / "run", commit_every=0, **first)
    with optimizer:
        loop = Loop(model, optimizer)
        for number in range(3):
            loop.step(number)
        optimizer.commit()
    options = {"commit_every": 0, **then}
    capfd.readouterr()
    model, optimizer = held(after, tmp_path / "run", resume=True, resume_states="anew", **options)
    assert "resumed at step 3, committed" in (told := capfd.readouterr().err)
    assert "the optimizer's states begin anew" in told
    with optimizer:
        assert not optimizer.state
        assert optimizer.stats()["step"] == 3
        loop = Loop(model, optimizer)
        loop.step(3)
        optimizer.commit()
    model, optimizer = held(after, tmp_path / "run", resume=True, **options)  # it is one of the new optimizer now
    with optimizer:
        loop = Loop(model, optimizer)
        for number in (4, 5):
            loop.step(number)
        params, states = changed_over(before, after)
        for name, param in model.named_parameters():
            found = optimizer.state_of(param)
            assert torch.equal(param.detach(), params[name]), name
            assert torch.equal(found["master"], params[name]), name
            assert found["step"] == 3
            for kind, value in states[name].items():
                if value is not None:
                    assert torch.equal(torch.as_tensor(found[kind] * 1.0), torch.as_tensor(value * 1.0)), (name, kind)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("before", ["rmsprop", "adam"])
def test_adam_begins_on_masters_of_another_optimizer(before: str, split: bool, tmp_path: Path) -> None:
    """As on a model that has these masters."""
    bf16: dict[str, Any] = {"compute_dtype": torch.bfloat16, "tier": "nvme"}
    model, optimizer = held(before, tmp_path / "run", commit_every=0, **bf16)
    with optimizer:
        for number in range(2):
            (model(batch(number).to(DEVICE)).float().square().mean()).backward()
            optimizer.step()
        masters = {name: optimizer.state_of(param)["master"] for name, param in model.named_parameters()}
        optimizer.commit()
    runs = []
    tuning = Tuning(chunk="4KiB", split_master=split)
    for path, resume in ((tmp_path / "run", {"resume": True, "resume_states": "anew"}), (tmp_path / "other", {})):
        model = net()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        given = torch.optim.AdamW(model.parameters(), lr=0.01)
        with OffloadZero(model, given, path=path, tuning=tuning, **bf16, **resume) as optimizer:
            for number in (2, 3):
                optimizer.zero_grad()
                (model(batch(number).to(DEVICE)).float().square().mean()).backward()
                optimizer.step()
            runs.append([optimizer.state_of(param) for param in model.parameters()])
    for one, other in zip(*runs, strict=True):
        assert one["step"] == other["step"] == 2
        assert all(torch.equal(one[kind], other[kind]) for kind in ("master", "exp_avg", "exp_avg_sq"))


def test_an_attached_scheduler_goes_on_and_leaves_the_new_options(tmp_path: Path) -> None:
    def scheduler_of(one: OffloadZero) -> torch.optim.lr_scheduler.StepLR:
        scheduler = torch.optim.lr_scheduler.StepLR(one, 2)
        one.attach(scheduler=scheduler)
        return scheduler

    model, optimizer = held("sgd_momentum", tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        scheduler = scheduler_of(optimizer)
        Loop(model, optimizer).step(2)
        scheduler.step()
        optimizer.commit()
    anew: dict[str, Any] = {"resume": True, "resume_states": "anew", "commit_every": 0, "tier": "nvme"}
    model, optimizer = held("lion", tmp_path / "run", **anew)
    with optimizer:
        before = {**optimizer.param_groups[0], "initial_lr": 1e-3}
        assert scheduler_of(optimizer).last_epoch == 1
        assert {**optimizer.param_groups[0]} == before


def test_what_is_not_of_the_optimizer_still_has_to_fit(tmp_path: Path) -> None:
    model, optimizer = held("sgd", tmp_path / "run", commit_every=0, tier="nvme")
    with optimizer:
        state = optimizer.state_dict()
        Loop(model, optimizer).step(2)
        optimizer.commit()
        state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    anew: dict[str, Any] = {"resume": True, "resume_states": "anew", "commit_every": 0, "tier": "nvme"}
    with pytest.raises(ResumeError, match="compute_dtype is bfloat16"):
        held("lion", tmp_path / "run", compute_dtype=torch.bfloat16, **anew)
    with pytest.raises(ConfigError, match='resume_states="anew" needs resume'):
        held("lion", tmp_path / "run", **anew | {"resume": False})
    with pytest.raises(ConfigError, match='resume_states=\'new\': choose "committed", "convert" or "anew"'):
        held("lion", tmp_path / "run", **anew | {"resume_states": "new"})
    model, optimizer = held("lion", tmp_path / "run", **anew)
    with optimizer, pytest.raises(ResumeError, match="the commit of step 1 that this state dict names is gone"):
        optimizer.load_state_dict(state)  # of the optimizer before


def test_options_that_the_class_refuses_change_nothing(tmp_path: Path) -> None:
    model, optimizer = held("sgd", tmp_path / "run", tier="cpu")
    with optimizer:
        loop = Loop(model, optimizer)
        loop.step(2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ConfigError, match="options now with which SGD keeps momentum_buffer"):
            loop.step(3)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        optimizer.param_groups[0]["momentum"] = 0.0
        loop.step(3)


@pytest.mark.parametrize("kind", ["norm of all", "counts"])
def test_what_cannot_be_held_is_refused_and_the_model_is_as_it_was(kind: str, tmp_path: Path) -> None:
    from tests.optim.test_torch_rules import Whole

    model = net()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    given = type("Whole", (Whole,), {"kind": kind})(model.parameters())
    with pytest.raises(ConfigError, match="optimizer is Whole, which cannot be offloaded"):
        OffloadZero(model, given, tier="nvme", path=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert type(model.head.weight) is nn.Parameter


def groups_of(model: Net) -> Iterator[dict[str, Any]]:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    yield {"params": matrices, "lr": 0.01}
    yield {"params": others, "lr": 0.1, "betas": (0.5, 0.9), "decay": 0.0}


def test_groups_of_one_optimizer_have_options_of_their_own(tmp_path: Path) -> None:
    reference, model = net(), net()
    expected = Lion(groups_of(reference))
    options: dict[str, Any] = {"compute_dtype": torch.float32, "tuning": SMALL, "accumulation": 2}
    with OffloadZero(model, Lion(groups_of(model)), tier="nvme", path=tmp_path / "run", **options) as optimizer:
        for number in range(4):
            Loop(reference, expected).step(number)
            Loop(model, optimizer).step(number)
        for (name, one), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("place", ["RAM", "disk"])
def test_bf16_masters_equal_fp32_training_on_the_rounded_gradients(place: str, tmp_path: Path) -> None:
    model, optimizer = held("rmsprop", tmp_path / "run", **PLACES[place] | {"compute_dtype": torch.bfloat16})
    masters = {name: nn.Parameter(value.detach().cpu()) for name, value in net().named_parameters()}
    expected = WORKING["rmsprop"](list(masters.values()))
    with optimizer:
        for number in range(4):
            optimizer.zero_grad()
            model(batch(number).to(DEVICE).bfloat16()).float().square().mean().backward()
            for name, param in model.named_parameters():
                found = optimizer.grad(param)
                assert found is not None
                masters[name].grad = found.cpu().float()
            optimizer.step()
            expected.step()
        for name, param in model.named_parameters():
            assert torch.equal(optimizer.state_of(param)["master"], masters[name]), name
            assert torch.equal(param.cpu(), masters[name].bfloat16()), name


def several(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() < 2]
    return [
        torch.optim.SGD(matrices, lr=0.05, momentum=0.9),
        torch.optim.RMSprop([{"params": others[::2]}, {"params": others[1::2], "lr": 0.001}], lr=0.01),
    ]


@pytest.mark.parametrize("place", ["RAM", "disk"])
def test_several_optimizers_are_one(place: str, tmp_path: Path) -> None:
    """One step, one clip and one commit; a scheduler of either steers its groups."""
    reference, model = net(), net()
    masters = [nn.Parameter(param.detach().cpu()) for param in reference.parameters()]
    expected, given = several(masters), several(list(model.parameters()))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one[0], 0.9) for one in (expected, given)]
    hooked: list[str] = []
    given[1].register_step_pre_hook(lambda *_: hooked.append("before"))
    handle = given[0].register_step_post_hook(lambda *_: hooked.append("after"))
    options: dict[str, Any] = dict(PLACES[place]) | {"compute_dtype": torch.float32, "tuning": SMALL}
    if place == "disk":
        options["cpu_memory"] = least_cpu_memory(model, given, compute_dtype=torch.float32, tuning=SMALL)
    with OffloadZero(model, given, path=tmp_path / "run", commit_every=0, **options) as optimizer:
        assert optimizer.param_groups == given[0].param_groups + given[1].param_groups
        for number in range(5):
            for one in (reference, model):
                one.zero_grad()
                one(batch(number).to(DEVICE)).square().mean().backward()
            clip(reference, 0.5)
            optimizer.clip_grad_norm_(0.5)
            for master, param in zip(masters, reference.parameters(), strict=True):
                master.grad = None if param.grad is None else param.grad.cpu()
            for one in expected:
                one.step()
            with torch.no_grad():
                for master, param in zip(masters, reference.parameters(), strict=True):
                    param.copy_(master)
            optimizer.step()
            for one in schedules:
                one.step()
            if number == 2:
                optimizer.commit()
                handle.remove()
        for (name, found), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            assert torch.equal(found, other), name
        for (name, param), other in zip(model.named_parameters(), masters, strict=True):
            of = next(one for one in expected if other in one.state)
            for kind, value in of.state[other].items():
                assert torch.equal(torch.as_tensor(optimizer.state[param][kind] * 1).cpu(), value), (name, kind)
        assert hooked == ["before", "after"] * 3 + ["before"] * 2
        with pytest.raises(Exception, match="taken over"):
            given[0].step()
    again = net()
    with OffloadZero(
        again, several(list(again.parameters())), path=tmp_path / "run", resume=True, **options
    ) as optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == 3


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    model = net()
    both = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.head.parameters())]
    with pytest.raises(ConfigError, match=r"head\.weight is in SGD and in AdamW: leave it out"):
        OffloadZero(model, both, tier="cpu")
