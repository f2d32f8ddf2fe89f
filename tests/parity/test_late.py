"""Experts that did nothing in a step owe it: the bits of steps that are made in time, whoever reads them, and when.

The oracle is another training: plain torch makes the gradients, and the reference in NumPy makes every step at once.
Where states are small or masters split, it is a run of this library without tiles, whose steps have tests of their own.
"""

from __future__ import annotations

import copy
import errno
import io
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from safetensors.torch import load_file
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.checkpoint.export import entries, export
from offload.checkpoint.manifest import VERSION, VERSION_OF_LATE_STEPS, VERSION_OF_TRIALS
from offload.checkpoint.reader import Reader
from offload.errors import (
    BudgetError,
    ConfigError,
    InterruptedStepError,
    NonFiniteGradientError,
    OffloadError,
    TierIOError,
)
from offload.io.engine import Transfer
from offload.io.threads import ThreadEngine
from offload.native import Kernels
from offload.optim import reference
from offload.optim.late import MOST_OWED
from tests.support.cases import often, products
from tests.support.disks import on_disk
from tests.support.faulty_engine import FaultyEngine

WIDTH, HIDDEN, EXPERTS = 8, 16, 4
MATRIX = WIDTH * HIDDEN * 4
ALL = range(EXPERTS)
NOBODY: tuple[int, ...] = ()
Bits = dict[str, Tensor]


class Experts(nn.Module):
    """Two layers in one: matrices of experts, used as the eager loops of transformers do, and a bias for all."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        """x: (tokens, width); used: the experts that all tokens go to."""
        out = x + self.bias
        for number in used:
            out = out + F.linear(torch.tanh(F.linear(x, self.up[number])), self.down[number])
        return out


class Model(nn.Sequential):
    def __init__(self, layers: int = 2, **sizes: int) -> None:
        super().__init__(*(Experts(**sizes) for _ in range(layers)))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for layer in self:
            x = layer(x, used)
        return x


def batch(number: int, width: int = WIDTH) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int, used: Sequence[int], scale: float = 1.0) -> Tensor:
    first = next(model.parameters())
    x = batch(number, first.shape[-1]).to(first.dtype)
    return model(x, used).float().square().mean() * scale


class Plain:
    """The other training. Args: dtype: of the parameters for compute; group: options of Adam."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32, **group: Any) -> None:
        self.model, self.dtype = model, dtype
        self.group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "decoupled": True} | group
        self.states = {}
        for name, param in model.named_parameters():
            line = param.detach().flatten().clone().numpy()
            self.states[name] = (line, line * 0, line * 0, 0)
        model.to(dtype)

    def step(self, scale: float = 1.0) -> None:
        for name, param in self.model.named_parameters():
            master, m, v, count = self.states[name]
            if param.grad is None:
                continue
            grad = param.grad.float().flatten().numpy()
            made = reference.adam(master, m, v, grad, step=count + 1, scale=scale, **self.group)
            self.states[name] = (*made, count + 1)
            param.data = torch.from_numpy(made[0].copy()).view(param.shape).to(self.dtype)
            param.grad = None

    def bits(self) -> Bits:
        found = {}
        for name, param in self.model.named_parameters():
            *arrays, count = self.states[name]
            found[name] = param.detach().clone()
            found[f"{name}.step"] = torch.tensor(count)
            for kind, array in zip(("master", "exp_avg", "exp_avg_sq"), arrays, strict=True):
                found[f"{name}.{kind}"] = torch.from_numpy(array.copy()).view(param.shape)
        return found


def bits_of(model: nn.Module, optimizer: OffloadZero) -> Bits:
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        found |= {f"{name}.{kind}": torch.as_tensor(value) for kind, value in optimizer.state_of(param).items()}
    return found


def assert_same(found: Bits, expected: Bits) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


TUNING = Tuning(chunk="256KiB", prefetch_chunks=2, threads=1, tile=MATRIX)


def held(
    model: nn.Module, path: Path, group: dict[str, Any] | None = None, beside: int = 0, **options: Any
) -> OffloadZero:
    """All of it on NVMe, in the least RAM. Args: group: options of Adam, as `Plain` has them; beside: more bytes."""
    group = {"lr": 1e-2} | (group or {})
    kind = torch.optim.AdamW if group.pop("decoupled", True) else torch.optim.Adam
    group.setdefault("weight_decay", 1e-2)
    tiers = dict.fromkeys(("tier", "param_tier"), "nvme")
    chosen = {"compute_dtype": torch.float32, "commit_every": 0, "tuning": TUNING} | tiers | options
    optimizer = kind(model.parameters(), **group)
    with pytest.raises(BudgetError) as refused:
        OffloadZero(model, optimizer, path=path, cpu_memory=1, **chosen)
    return OffloadZero(model, optimizer, path=path, cpu_memory=refused.value.needed + beside, **chosen)


def owed(optimizer: OffloadZero) -> dict[int, int]:
    return dict(optimizer._parts.masters.late.owed)


def take(model: nn.Module, optimizer: OffloadZero, number: int, used: Sequence[int]) -> None:
    loss_of(model, number, used).backward()
    optimizer.step()
    optimizer.zero_grad()


class Both:
    """The same steps, held and plain."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, group: Any = None, **options: Any) -> None:
        self.plain = Plain(Model(), dtype, **(group or {}))
        self.model = Model()
        self.optimizer = held(self.model, path, group, compute_dtype=dtype, **options)
        self.count = 0

    def step(self, *micro_batches: Iterable[int], clip: float | None = None, **changed: Any) -> None:
        """Args: micro_batches: the experts of each; changed: options of the param group."""
        if changed:
            self.plain.group |= changed
            self.optimizer.param_groups[0].update(changed)
        for number, used in enumerate(micro_batches):
            losses = [loss_of(one, 10 * self.count + number, (*used,)) for one in (self.model, self.plain.model)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
        scale = 1.0
        if clip is not None:
            norm = self.optimizer.clip_grad_norm_(clip)
            torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in self.plain.model.parameters()]))
            scale = self.optimizer._parts.scale.common  # to the last bit
            assert scale == pytest.approx(min(1.0, clip / (norm.item() + 1e-6)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plain.step(scale)
        self.count += 1

    def check(self) -> None:
        assert_same(bits_of(self.model, self.optimizer), self.plain.bits())


@contextmanager
def both(path: Path, *args: Any, **options: Any) -> Iterator[Both]:
    made = Both(path, *args, **options)
    with made.optimizer:
        yield made


# The bits.


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "gradients on NVMe": {"grad_tier": "nvme"},
    "Adam": {"group": {"decoupled": False, "weight_decay": 0.1}},
    "no decay": {"group": {"weight_decay": 0.0}},
}


IDLE = (1, 2, 7, 50)
OFTEN = [("fp32", 1), ("bf16", 2), ("gradients on NVMe", 2), ("Adam", 7), ("fp32", 50)]


@pytest.mark.parametrize(("case", "idle"), products(CASES, IDLE, often=OFTEN))
def test_idle_steps_have_the_bits_of_steps_in_time(case: str, idle: int, tmp_path: Path) -> None:
    with both(tmp_path, **CASES[case]) as run:
        run.step(ALL)
        for number in range(idle):
            run.step([number % 2])
        assert max(owed(run.optimizer).values()) == idle
        run.step([0, 3])
        run.step(ALL)
        assert not owed(run.optimizer)
        run.step([1])
        run.check()
        assert not owed(run.optimizer)
        run.step([2])
        run.check()


def test_weights_that_are_handed_over_are_those_of_steps_in_time(tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL)
        for number in range(3):
            run.step([number % 2])
        assert owed(run.optimizer)
        assert_same(dict(run.optimizer.weights()), dict(run.plain.model.named_parameters()))
        # What owes a step has changed in it. Without a token there is no gradient, and no step.
        assert {name for name, _ in run.optimizer.weights(since=3)} == dict(run.model.named_parameters()).keys()
        run.step(NOBODY)
        assert {name for name, _ in run.optimizer.weights(since=4)} == {"0.bias", "1.bias"}
        run.step([0])
        assert owed(run.optimizer)
        run.check()


def test_a_chunk_owes_no_more_than_the_limit(tmp_path: Path) -> None:
    with both(tmp_path, grad_tier="nvme") as run:
        run.step(ALL)
        most = 0
        for _ in range(MOST_OWED + 20):
            run.step([0])
            most = max(most, *owed(run.optimizer).values())
            assert all(len(log) <= MOST_OWED for log in run.optimizer._parts.masters.late.log.values())
        assert most <= MOST_OWED
        assert len(set(owed(run.optimizer).values())) > 1  # they do not come to it all at once
        run.check()


def test_owed_steps_have_the_options_of_their_time(tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL)
        for number in range(12):
            changed: dict[str, Any] = {"lr": 1e-2 * 0.5 * (1 + math.cos(number / 4))}
            if number == 5:
                changed |= {"betas": (0.8, 0.99), "eps": 1e-6}
            if number == 8:
                changed |= {"weight_decay": 0.3}
            run.step([number % 2], **changed)
        run.check()


def test_clipping_is_nothing_to_a_gradient_of_zeros(tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL, clip=0.05)
        for number in range(6):
            run.step([number % 2], clip=0.05 * (number + 1))
        assert owed(run.optimizer)
        run.check()


def test_an_expert_is_idle_if_it_has_a_token_in_no_micro_batch(tmp_path: Path) -> None:
    with both(tmp_path, accumulation=2) as run:
        run.step(ALL, ALL)
        run.step([0], [1])
        run.step([2], [])
        assert set(owed(run.optimizer).values()) == {2, 1}
        run.check()


def test_a_step_without_any_expert_is_none_of_theirs(tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL)
        run.step([0])
        before = owed(run.optimizer)
        run.step(NOBODY)
        assert owed(run.optimizer) == before  # the parameters have no gradient: as in torch, nothing is made of them
        run.step([0])
        assert {2} == set(owed(run.optimizer).values())
        run.check()


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_that_is_skipped_is_owed_by_nobody(nonfinite: str, tmp_path: Path) -> None:
    with both(tmp_path, nonfinite=nonfinite) as run:
        run.step(ALL)
        run.step([0])
        before = owed(run.optimizer)
        (loss_of(run.model, 5, [1]) * math.inf).backward()
        if nonfinite == "raise":
            with pytest.raises(NonFiniteGradientError):
                run.optimizer.step()
        else:
            run.optimizer.step()
        run.optimizer.zero_grad()
        assert set(owed(run.optimizer)) <= set(before)  # what expert 1 owed was made in its forward
        assert {1} == set(owed(run.optimizer).values())
        run.step([0])
        run.check()


def test_a_loss_scale_that_overflows_skips_a_step(tmp_path: Path) -> None:
    twins = []
    for late in (True, False):
        model = Model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=2)
        tuning = replace(TUNING, late=late)
        with held(model, tmp_path / str(late), compute_dtype=torch.float16, tuning=tuning) as optimizer:
            for number in range(8):
                factor = 1e9 if number == 4 else 1.0
                scaler.scale(loss_of(model, number, ALL if number == 0 else [number % 2], factor)).backward()
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(0.3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert optimizer.stats()["skipped_steps"] >= 1
            assert bool(owed(optimizer)) == late
            twins.append(bits_of(model, optimizer))
    assert_same(*twins)


def written(model: nn.Module) -> None:
    """An expert's gradient that is written by hand, and a small one."""
    model[0].up.grad[2] += 1e-3
    model[0].down.grad[3, 0, 0] = 1e-44  # whose square is no fp32


def zeroed(model: nn.Module) -> None:
    """All experts' gradients are zeros, those with tokens, too; some are -0."""
    model[0].up.grad.zero_()
    model[0].up.grad[1] = -0.0


@pytest.mark.parametrize("change", [written, zeroed])
def test_what_counts_is_the_gradient_that_the_step_takes(change: Callable[[nn.Module], None], tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL)
        run.step([0])
        for one in (run.model, run.plain.model):
            loss_of(one, 7, [0]).backward()
            change(one)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.plain.step()
        run.step([1])
        run.check()


def test_gradients_that_were_dropped_are_no_idle_expert_s(tmp_path: Path) -> None:
    with both(tmp_path, grad_tier="nvme") as run:
        run.step(ALL)
        loss_of(run.model, 5, [2, 3]).backward()
        run.optimizer.zero_grad()
        for one in (run.model, run.plain.model):
            loss_of(one, 6, [0]).backward()
        grad = run.optimizer.grad(run.model[0].up)
        assert grad is not None
        assert torch.equal(grad, run.plain.model[0].up.grad)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.plain.step()
        run.check()


FORMS = [
    {"states": "8bit"},
    {"split": True},
    {"split": True, "states": "bf16", "grad_tier": "nvme"},
    pytest.param({"split": True, "states": "8bit"}, marks=pytest.mark.slow),
    pytest.param({"states": "bf16"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_small_states_and_split_masters(form: dict[str, Any], tmp_path: Path) -> None:
    """Against a run without tiles: its chunks have several parameters, and it is stepped in time."""
    options = dict(form)
    split = options.pop("split", None)
    found = []
    for tile in (MATRIX, 0):
        model = Model()
        tuning = replace(TUNING, tile=tile, split_master=split)
        with held(model, tmp_path / str(tile), compute_dtype=torch.bfloat16, tuning=tuning, **options) as optimizer:
            for number in range(9):
                take(model, optimizer, number, ALL if number == 0 else [number % 2])
            assert bool(owed(optimizer)) == bool(tile)
            optimizer.commit()
            if tile:
                with Reader(optimizer.snapshot()) as reader:
                    assert reader.manifests[0].owed
                    committed = {name: reader.read(name, "exp_avg") for name, _ in model.named_parameters()}
                    masters = {name: reader.read(name, "master") for name, _ in model.named_parameters()}
            found.append(bits_of(model, optimizer))
            take(model, optimizer, 9, ALL)
            found.append(bits_of(model, optimizer))
    assert_same(found[0], found[2])
    assert_same(found[1], found[3])
    for name, value in committed.items():
        assert torch.equal(value, found[0][f"{name}.exp_avg"])
        assert torch.equal(masters[name], found[0][f"{name}.master"])


# Who reads.


def _exported(model: nn.Module, optimizer: OffloadZero, path: Path) -> Bits:
    (file,) = optimizer.export(path / "exported")
    return load_file(file)


def _saved(model: nn.Module, optimizer: OffloadZero, path: Path) -> Bits:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def _one_by_one(model: nn.Module, optimizer: OffloadZero, path: Path) -> Bits:
    with torch.no_grad():
        return {name: torch.stack([row * 1 for row in p]) for name, p in model.named_parameters()}


def _gathered(model: nn.Module, optimizer: OffloadZero, path: Path) -> Bits:
    with optimizer.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _masters(model: nn.Module, optimizer: OffloadZero, path: Path) -> Bits:
    return {name: optimizer.state_of(p)["master"] for name, p in model.named_parameters()}


def _snapshot(model: nn.Module, optimizer: OffloadZero, path: Path) -> Bits:
    optimizer.commit()
    with Reader(optimizer.snapshot()) as reader:
        export(path / "of a snapshot", entries(reader))
    return load_file(path / "of a snapshot" / "model.safetensors")


def _synchronized(model: nn.Module, optimizer: OffloadZero, path: Path) -> Bits:
    optimizer.synchronize()
    return {name: p.data.clone() for name, p in model.named_parameters()}


READERS = {
    "state_dict": lambda model, *_: {name: one.clone() for name, one in model.state_dict().items()},
    "a copy": lambda model, *_: dict(copy.deepcopy(model).named_parameters()),
    "torch.save": _saved,
    "export": _exported,
    "each matrix": _one_by_one,
    "gathered": _gathered,
    "state_of": _masters,
    "a snapshot": _snapshot,
    "data": _synchronized,
}


@pytest.mark.parametrize("reader", often(READERS, "state_dict", "export", "each matrix", "state_of", "a snapshot"))
def test_whoever_reads_gets_the_values_of_steps_in_time(reader: str, tmp_path: Path) -> None:
    with both(tmp_path / "run") as run:
        run.step(ALL)
        for number in range(3):
            run.step([0])
            assert owed(run.optimizer)
            if number != 1:
                tmp_path.joinpath(str(number)).mkdir()
                found = READERS[reader](run.model, run.optimizer, tmp_path / str(number))
                expected = {name: p.detach() for name, p in run.plain.model.named_parameters()}
                assert_same({name: tensor.detach() for name, tensor in found.items()}, expected)
        run.step([1])
        run.check()


def test_a_forward_makes_the_steps_of_the_experts_it_uses_and_no_others(tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL)
        run.step([0])
        chunks = len(owed(run.optimizer))
        with torch.no_grad():
            found, expected = (loss_of(one, 3, [2]) for one in (run.model, run.plain.model))
        assert found.item() == expected.item()
        assert len(owed(run.optimizer)) == chunks * 2 // 3
        run.check()


def test_a_parameter_that_is_held_over_a_step_has_its_values(tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL)
        with run.optimizer.gathered(run.model[0].up):
            run.step([0])
            assert torch.equal(run.model[0].up, run.plain.model[0].up)
            run.step([1])
            assert torch.equal(run.model[0].up, run.plain.model[0].up)
        run.check()


def test_what_others_write_counts(tmp_path: Path) -> None:
    with both(tmp_path) as run:
        run.step(ALL)
        run.step([0])
        for one in (run.model, run.plain.model):
            with torch.no_grad():
                one[0].up[2].fill_(0.5)
                one[1].down.mul_(2)
        for name, value in run.plain.model.named_parameters():
            if name in ("0.up", "1.down"):
                run.plain.states[name] = (value.detach().flatten().clone().numpy(), *run.plain.states[name][1:])
        run.step([0])
        run.step([2])
        run.check()


# What a commit has.


def trained(path: Path, numbers: Iterable[int], model: nn.Module | None = None, **options: Any) -> Any:
    """A held model, after steps of which every sixth is for all experts."""
    model = model or Model()
    optimizer = held(model, path, **options)
    for number in numbers:
        take(model, optimizer, number, ALL if number % 6 == 0 else [number % 2])
    return model, optimizer


def in_time(steps: int) -> Plain:
    """Plain training with the steps of `trained`."""
    plain = Plain(Model())
    for number in range(steps):
        loss_of(plain.model, number, ALL if number % 6 == 0 else [number % 2]).backward()
        plain.step()
    return plain


def test_experts_that_owe_steps_make_them_before_a_text_is_generated_with_them(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "run", range(1, 4))
    plain = Plain(Model())
    for number in range(1, 4):
        loss_of(plain.model, number, [number % 2]).backward()
        plain.step()
    with optimizer:
        with optimizer.generating():
            for token in range(3):  # experts 2 and 3 owe all steps, and 0 its last one
                assert owed(optimizer) or token
                with torch.no_grad():
                    assert torch.equal(model(batch(token), [token, 3]), plain.model(batch(token), [token, 3]))
            loss_of(plain.model, 9, [2]).backward()
            plain.step()
            take(model, optimizer, 9, [2])
            assert owed(optimizer)
            with torch.no_grad():
                assert torch.equal(model(batch(5), ALL), plain.model(batch(5), ALL))
        assert_same(bits_of(model, optimizer), plain.bits())


RESUMED = {
    "as it was": {},
    "in other chunks": {"tuning": replace(TUNING, chunk="260KiB", tile=2 * MATRIX)},
    "in larger tiles": {"tuning": replace(TUNING, tile=2 * MATRIX)},
    "without tiles": {"tuning": replace(TUNING, tile=0)},
    "in time": {"tuning": replace(TUNING, late=False)},
    "in RAM": {"tier": "cpu", "param_tier": "cpu", "grad_tier": "cpu"},
    "as torch": {"param_tier": "device", "grad_tier": "cpu"},
}


@pytest.mark.parametrize("how", often(RESUMED, "as it was", "in larger tiles", "in time", "as torch"))
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(how: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    _, optimizer = trained(path, range(5))
    optimizer.commit()
    before = owed(optimizer)
    optimizer.close()
    model = Model()
    with held(model, path, resume=True, beside=64 << 10, **RESUMED[how]) as optimizer:
        assert owed(optimizer) == (before if how == "as it was" else {})
        assert before
        assert_same({name: p.detach().clone() for name, p in model.named_parameters()}, params_of(in_time(5)))
        for number in range(5, 9):
            take(model, optimizer, number, ALL if number % 6 == 0 else [number % 2])
        assert_same(bits_of(model, optimizer), in_time(9).bits())


def params_of(plain: Plain) -> Bits:
    return {name: p.detach() for name, p in plain.model.named_parameters()}


def test_a_resumed_run_goes_on_owing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for start in (0, 2, 4):
        model, optimizer = Model(), None
        _, optimizer = trained(path, range(start, start + 2), model, resume="auto")
        optimizer.commit()
        assert owed(optimizer)
        optimizer.close()
    with held(model := Model(), path, resume=True) as optimizer:
        assert max(owed(optimizer).values()) == 5
        assert_same(bits_of(model, optimizer), in_time(6).bits())


def test_a_rollback_owes_what_was_committed(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "run", range(4))
    with optimizer:
        optimizer.commit()
        before = owed(optimizer)
        bits_of(model, optimizer)
        assert not owed(optimizer)
        for number in range(4, 8):
            take(model, optimizer, number, [3])
        optimizer.rollback()
        assert owed(optimizer) == before
        take(model, optimizer, 4, [0])
        take(model, optimizer, 5, [1])
        assert_same(bits_of(model, optimizer), in_time(6).bits())


def test_going_back_to_a_state_dict_settles(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "run", range(4))
    with optimizer:
        optimizer.commit()
        state = optimizer.state_dict()
        for number in range(4, 8):
            take(model, optimizer, number, [3])
        optimizer.commit()
        assert owed(optimizer)
        optimizer.load_state_dict(state)
        assert not owed(optimizer)
        assert_same(bits_of(model, optimizer), in_time(4).bits())


def test_a_commit_after_a_reader_is_the_one_before(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "run", range(4))
    with optimizer:
        optimizer.commit()
        bits_of(model, optimizer)
        optimizer.commit()  # of the same values: no error, and no other commit
        optimizer.rollback()
        assert owed(optimizer)
        assert_same(bits_of(model, optimizer), in_time(4).bits())


def test_the_version_of_a_manifest_tells_whether_chunks_owe_steps(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "run", range(2))
    with optimizer:
        optimizer.commit()
        assert version_in(tmp_path / "run") == VERSION_OF_LATE_STEPS
        take(model, optimizer, 6, ALL)
        optimizer.commit()
        assert version_in(tmp_path / "run") == VERSION


def version_in(path: Path) -> int:
    (file,) = path.glob("manifest-*")
    return int(file.read_text().split('"version":')[1].split(",")[0])


def test_tried_steps_are_those_of_other_chunks(tmp_path: Path) -> None:
    tuning = replace(TUNING, speculate=True)
    model, optimizer = trained(tmp_path / "run", range(4), tuning=tuning)
    with optimizer:
        optimizer.commit()
        assert version_in(tmp_path / "run") == VERSION_OF_LATE_STEPS > VERSION_OF_TRIALS
        late, trials = optimizer._parts.run.layout.late_chunks, optimizer._parts.step.trials
        assert late
        assert trials is not None
        assert late.isdisjoint(trials._new)
        take(model, optimizer, 4, [0])
        take(model, optimizer, 5, [1])
        assert_same(bits_of(model, optimizer), in_time(6).bits())


# The bytes.


class Counting(ThreadEngine):
    """Attributes: moved: bytes that were read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def submit(self, transfer: Transfer) -> Transfer:
        self.moved += len(transfer.view)
        return super().submit(transfer)


BUFFERS = 5 * 13 * 64 * 128
"""Bytes of a few buffers, so that what a forward has settled waits for its step."""


def moved_by(path: Path, *, late: bool, grad_tier: str, beside: int) -> tuple[int, int, Bits]:
    """What 16 steps move of a model of eight experts, each of which has tokens in every eighth step.

    Args: beside: RAM beside the least. Returns: as the engine has counted, as `stats()` says, and the bits.
    """
    engine = Counting()
    tuning = replace(TUNING, tile=4 * 64 * 128, late=late, prefetch_chunks=6)
    model = Model(width=64, hidden=128, experts=8)
    with on_disk(None, engine), held(model, path, beside=beside, tuning=tuning, grad_tier=grad_tier) as optimizer:
        assert optimizer.stats()["streamed_chunks"] >= 2 * 2 * 8  # those of experts

        def said() -> int:
            stats = optimizer.stats()
            return int(stats["nvme_read_bytes"] + stats["nvme_written_bytes"])

        for number in range(8):
            take(model, optimizer, number, [number])
        optimizer.synchronize()
        before = engine.moved, said()
        for number in range(16):
            take(model, optimizer, number, [number % 8])
        optimizer.synchronize()
        moved = engine.moved - before[0], said() - before[1]
        return *moved, bits_of(model, optimizer)


@pytest.mark.parametrize(
    ("grad_tier", "beside", "most"),
    [
        pytest.param("cpu", BUFFERS, 0.2, marks=pytest.mark.slow),
        ("nvme", BUFFERS, 0.2),
        pytest.param("cpu", 0, 0.21, marks=pytest.mark.slow),  # two of four tiles leave between forward and step
    ],
)
def test_where_one_of_eight_experts_has_tokens_a_fifth_of_the_bytes_is_moved(
    grad_tier: str, beside: int, most: float, tmp_path: Path
) -> None:
    counted, said, found = moved_by(tmp_path / "late", late=True, grad_tier=grad_tier, beside=beside)
    of_all, _, expected = moved_by(tmp_path / "in time", late=False, grad_tier=grad_tier, beside=beside)
    assert_same(found, expected)
    assert 0 < counted <= most * of_all
    assert said == pytest.approx(counted, rel=0.05)  # of what is under way at an end, one counts more than the other


# Any sequence.

SETS = st.sampled_from([(0,), (1,), (2, 3), (0, 3), (*ALL,), NOBODY])


class Uses(RuleBasedStateMachine):
    """Steps, readers, commits, returns to them and other layouts, in any order, beside plain training."""

    @initialize(folder=st.just(None), grad_tier=st.sampled_from(["cpu", "nvme"]))
    def begin(self, folder: None, grad_tier: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.options: dict[str, Any] = {"grad_tier": grad_tier, "nonfinite": "skip", "beside": 64 << 10}
        self.plain, self.number = Plain(Model()), 0
        self.committed: tuple[Any, ...] | None = None
        self.open()

    def open(self, **options: Any) -> None:
        self.model = Model()
        self.optimizer = held(self.model, self.folder / "run", resume="auto", **self.options | options)

    @rule(used=SETS, lr=st.sampled_from([1e-2, 3e-2]))
    def step(self, used: Sequence[int], lr: float) -> None:
        self.plain.group["lr"] = self.optimizer.param_groups[0]["lr"] = lr
        self.number += 1
        for one in (self.model, self.plain.model):
            loss_of(one, self.number, used).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plain.step()

    @rule(used=SETS)
    def skip(self, used: Sequence[int]) -> None:
        (loss_of(self.model, self.number, used) * math.nan).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @rule(layer=st.integers(0, 1), name=st.sampled_from(["up", "down"]))
    def read_one(self, layer: int, name: str) -> None:
        own, other = (getattr(one[layer], name) for one in (self.model, self.plain.model))
        assert torch.equal(own.detach().clone(), other)

    @rule(used=SETS)
    def evaluate(self, used: Sequence[int]) -> None:
        with torch.no_grad():
            assert loss_of(self.model, 1, used).item() == loss_of(self.plain.model, 1, used).item()

    @rule()
    def read_all(self) -> None:
        assert_same(bits_of(self.model, self.optimizer), self.plain.bits())

    def _now(self) -> tuple[Any, ...]:
        params = [param.detach().clone() for param in self.plain.model.parameters()]
        return dict(self.plain.states), params, dict(self.plain.group), self.number

    def _go_back(self) -> None:
        assert self.committed is not None
        states, params, group, self.number = self.committed
        self.plain.states, self.plain.group = dict(states), dict(group)
        for param, value in zip(self.plain.model.parameters(), params, strict=True):
            param.data = value.clone()
            param.grad = None

    @precondition(lambda self: self.committed is None or self.committed[3] != self.number)
    @rule()
    def commit(self) -> None:
        self.optimizer.commit({"number": self.number})
        self.committed = self._now()

    @precondition(lambda self: self.committed is not None)
    @rule()
    def roll_back(self) -> None:
        self.optimizer.rollback()
        self._go_back()

    @precondition(lambda self: self.committed is not None)
    @rule(how=st.sampled_from([*RESUMED]))
    def start_again(self, how: str) -> None:
        self.optimizer.close()
        self.open(**RESUMED[how])
        self._go_back()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            with suppress(OffloadError):
                self.read_all()
            self.optimizer.close()
            shutil.rmtree(self.folder)


TestUses = Uses.TestCase
TestUses.settings = settings(
    max_examples=8, stateful_step_count=16, deadline=None, suppress_health_check=[*HealthCheck]
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_sequence_of_uses_many_times() -> None:
    run_state_machine_as_test(
        Uses,
        settings=settings(
            max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[*HealthCheck]
        ),
    )


# Failures.


def test_steps_that_a_failing_disk_cut_off_are_not_made_twice(tmp_path: Path) -> None:
    engine = FaultyEngine()
    with on_disk(None, engine):
        model, optimizer = trained(tmp_path / "run", range(5))
    with optimizer:
        optimizer.commit()
        take(model, optimizer, 5, [0])
        optimizer.synchronize()
        engine.fail("read", errno.EIO)
        with pytest.raises(TierIOError):
            bits_of(model, optimizer)
        with pytest.raises(TierIOError):
            optimizer.state_of(model[0].up)
        optimizer.rollback()
        take(model, optimizer, 5, [1])
        assert_same(bits_of(model, optimizer), in_time(6).bits())


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupt_among_owed_steps_asks_for_a_rollback(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(tmp_path / "run", range(5))
    run, count = Kernels.run, iter(range(100))

    def interrupted(self: Kernels, tasks: Any) -> None:
        run(self, tasks)
        if next(count) == after:
            raise KeyboardInterrupt

    with optimizer:
        optimizer.commit()
        with monkeypatch.context() as patch:
            patch.setattr(Kernels, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model[0].up.detach().clone()
        with pytest.raises(InterruptedStepError):
            model[0].up.detach().clone()
        optimizer.rollback()
        assert_same(bits_of(model, optimizer), in_time(5).bits())


def test_a_word_for_late_is_refused() -> None:
    with pytest.raises(ConfigError, match="late='no'"):
        OffloadZero(Model(), tuning=Tuning(late="no"))  # type: ignore[arg-type]
