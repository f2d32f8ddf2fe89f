"""Frozen parameters that were written to are in every later commit. The oracle is a run that is never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import BudgetError, ResumeError
from tests.support.scripts import run_code
from tests.support.streamed import in_little_memory
from tests.support.toy import Net, batch

STEPS = 6


class Taught(nn.Module):
    """A teacher, frozen, follows the student: its blocks inside the forward, its head after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(2), Net(2)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.blocks, self.student.blocks, strict=True):
                    mine.up.weight.mul_(0.8).add_(theirs.up.weight, alpha=0.2)
        with torch.no_grad():
            wanted = self.teacher(x)
        loss: Tensor = (self.student(x) - wanted).square().mean() + self.student(x).square().mean()
        return loss

    def after_step(self) -> None:
        self.teacher.head.weight.data.lerp_(self.student.head.weight.data, 0.3)


def run(model: Taught, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()
        losses.append(loss.item())
    return losses


def hold(model: Taught, path: Path, param_tier: str = "nvme", **more: Any) -> OffloadZero:
    given: dict[str, Any] = {"tier": "cpu", "commit_every": 2, "tuning": Tuning(chunk=4096)} | more
    trained = [param for param in model.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-2)
    given |= {"path": path, "param_tier": param_tier, "compute_dtype": torch.float32}
    return OffloadZero(model, adamw, **given) if "cpu_memory" in given else in_little_memory(model, adamw, **given)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(param_tier: str, tmp_path: Path) -> None:
    whole, plain = Taught(), Taught()
    with hold(whole, tmp_path / "whole", param_tier) as optimizer:
        wanted = run(whole, optimizer, range(STEPS))
        final = values(whole)
    expected = run(plain, torch.optim.AdamW(plain.student.parameters(), lr=1e-2), range(STEPS))
    torch.testing.assert_close(wanted, expected, rtol=1e-5, atol=1e-6)
    first = Taught()
    optimizer = hold(first, tmp_path / "run", param_tier)
    begun = run(first, optimizer, range(5))  # the last commit, of step 4, was made when the fifth step began
    optimizer._undo.close()  # as if it were killed: nothing of step 5 is committed
    again = Taught()
    with hold(again, tmp_path / "run", param_tier, resume=True) as optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == 4
        assert begun[:4] + run(again, optimizer, range(4, STEPS)) == wanted
        assert_same(values(again), final)


def test_a_commit_of_now_is_resumed_with_frozen_parameters_on_the_device_and_back(tmp_path: Path) -> None:
    model = Taught()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        run(model, optimizer, range(3))
        optimizer.commit()
        wanted = values(model)
    for param_tier in ("device", "cpu", "nvme"):
        model = Taught()
        with hold(model, tmp_path / "run", param_tier, commit_every=0, resume=True) as optimizer:
            assert_same(values(model), wanted)
            run(model, optimizer, range(3, 4))
            optimizer.rollback()
            assert_same(values(model), wanted)
            run(model, optimizer, range(3, 4))
            optimizer.commit()
            wanted = values(model)
        with torch.no_grad():
            assert not torch.equal(wanted["teacher.head.weight"], Taught().teacher.head.weight)


def test_rollback_over_the_first_write_says_what_it_cannot_restore(tmp_path: Path) -> None:
    model = Taught().eval()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        optimizer.commit()
        with torch.no_grad():
            model.teacher.norm.bias.add_(1.0)
        model(batch(0)).backward()
        optimizer.step()
        with pytest.raises(ResumeError, match=r"teacher\.norm\.bias, which is frozen, was first written to after"):
            optimizer.rollback()


COPIES = """
import re, sys, torch
from pathlib import Path
from torch import nn
from offload import OffloadZero

def ram(what):
    return int(re.search(rf"(?m)^{what}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

model = nn.Sequential(nn.Linear(8, 8), *(nn.Linear(1024, 1024).requires_grad_(False) for _ in range(8)))
given = {"tier": "cpu", "param_tier": "cpu", "compute_dtype": torch.float32, "commit_every": 2}
with OffloadZero(model, torch.optim.AdamW(model[0].parameters()), path=sys.argv[1], **given) as optimizer:
    for step in range(5):
        with torch.no_grad():
            for layer in model[1:]:
                layer.weight.mul_(0.5)
        model[0](torch.ones(8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            before = ram("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    print((ram("VmHWM") - before) / (8 * 4 * 1024 * 1024))
"""


def test_commits_make_one_copy_at_a_time(tmp_path: Path) -> None:
    done = run_code(COPIES, str(tmp_path / "run"), limit_s=60)
    assert done.returncode == 0, done.stderr
    copies = float(done.stdout)
    assert 0.9 < copies < 1.5


def test_a_commit_that_takes_more_ram_than_allowed_is_refused(tmp_path: Path) -> None:
    model = Taught()
    with hold(model, tmp_path / "run", commit_every=0, cpu_memory="700KiB") as optimizer:
        run(model, optimizer, range(1))
        optimizer._attached._accessors["written frozen parameters"].get()  # it fits
        frozen = optimizer._held.written_frozen(100)
        with pytest.raises(BudgetError, match=r"teacher\.blocks\.0\.up\.weight among them"):
            frozen.state_dict()


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_a_run_is_not_resumed_with_other_frozen_weights(param_tier: str, tmp_path: Path) -> None:
    with hold(Taught(), tmp_path / "run", commit_every=0) as optimizer:
        optimizer.commit()
    other = Taught()
    with torch.no_grad():
        other.teacher.blocks[1].down.bias[3] += 2**-10
    with pytest.raises(ResumeError, match=r"teacher\.blocks\.1\.down\.bias is frozen, and has other values .*\(1 such"):
        hold(other, tmp_path / "run", param_tier, commit_every=0, resume=True)
    hold(Taught(), tmp_path / "run", param_tier, commit_every=0, resume=True).close()


def test_what_nobody_wrote_to_is_in_no_commit(tmp_path: Path) -> None:
    model = Taught().eval()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        model(batch(0)).backward()
        optimizer.step()
        optimizer.commit()
    assert not list((tmp_path / "run").glob("extra-*"))


@pytest.mark.parametrize("param_tier", ["device", "cpu", "nvme"])
def test_a_resumed_run_may_freeze_and_unfreeze(param_tier: str, tmp_path: Path) -> None:
    """As a new optimizer in plain torch that has the old one's states, and begins anew with what was frozen."""

    def of(model: Net) -> list[nn.Parameter]:
        return [param for param in model.parameters() if param.requires_grad]

    def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def options(where: str) -> dict[str, Any]:
        given = {"tier": "cpu", "param_tier": where, "path": tmp_path / "run", "commit_every": 0}
        return {**given, "compute_dtype": torch.float32, "tuning": Tuning(chunk=4096)}

    model, plain = Net(), Net()
    for one in (model, plain):
        one.blocks[:2].requires_grad_(False)
    before = torch.optim.AdamW(of(plain))
    train(plain, before, range(2))
    with OffloadZero(model, torch.optim.AdamW(of(model)), **options("nvme")) as optimizer:
        train(model, optimizer, range(2))
        with torch.no_grad():
            for one in (model, plain):
                one.blocks[1].norm.bias.add_(0.5)
        optimizer.commit()

    model = Net()
    for one in (model, plain):
        one.requires_grad_(True)
        one.blocks[3].requires_grad_(False)
        one.blocks[0].requires_grad_(False)
    after = torch.optim.AdamW(of(plain))
    for param in of(plain):
        if param in before.state:
            after.state[param] = before.state[param]
    train(plain, after, range(2, 4))
    for _ in range(2):
        with OffloadZero(model, torch.optim.AdamW(of(model)), resume=True, **options(param_tier)) as optimizer:
            assert optimizer.resumed is not None
            if optimizer.resumed.step == 2:
                assert optimizer.state_of(model.blocks[1].up.weight)["step"] == 0
                assert optimizer.state_of(model.blocks[2].up.weight)["step"] == 2
                train(model, optimizer, range(2, 4))
                optimizer.commit()
            values = model.state_dict()
            for name, wanted in plain.state_dict().items():
                torch.testing.assert_close(values[name], wanted, rtol=1e-5, atol=1e-6, msg=name)
        model = Net()
        model.blocks[3].requires_grad_(False)
        model.blocks[0].requires_grad_(False)
