"""Promise 1: interrupted and resumed training gives the same bits as uninterrupted training; so does going back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadZero, Tuning
from tests.support import models, training
from tests.support.cases import often
from tests.support.device import DEVICE
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.training import LR, Run, train

STEPS = 8
HALF = 4
FOUR_KIB = Tuning(chunk="4KiB", threads=1)
SPLIT = Tuning(chunk="4KiB", threads=1, split_master=True)
PLACES: dict[str, dict[str, Any]] = {
    "all through the disk": {"cpu_memory": "least"},
    "all in RAM": {},
    "the CPU tier": {"tier": "cpu"},
    "the device, which is the CPU": {"tier": "device"},
    "a device of its own": {"tier": "device"},
    "parameters in RAM": {"cpu_memory": "least", "param_tier": "cpu"},
    "parameters on disk": {"cpu_memory": "least", "param_tier": "nvme"},
    "split": {"cpu_memory": "least", "tuning": SPLIT},
    "split, all in RAM": {"tuning": SPLIT},
    "split, parameters in RAM": {"cpu_memory": "least", "param_tier": "cpu", "tuning": SPLIT},
    "split, parameters on disk": {"cpu_memory": "least", "param_tier": "nvme", "tuning": SPLIT},
}

OFTEN = ("all through the disk", "parameters on disk", "split, all in RAM", "split, parameters on disk")


@pytest.fixture(autouse=True)
def _a_device_of_its_own(request: pytest.FixtureRequest, copied_by: CopiedBy) -> None:
    if "a device of its own" in request.node.name:
        copied_by(lambda: LateCopier(1))


@cache
def uninterrupted(kind: str, accumulation: int, steps: int = STEPS) -> Run:
    return train(kind, steps=steps, accumulation=accumulation, tier="cpu", tuning=FOUR_KIB)


def commit_at(step: int, optimizer: OffloadZero) -> None:
    if optimizer.stats()["step"] == step:
        optimizer.commit({"rates": [group["lr"] for group in optimizer.param_groups]})


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", often(PLACES, *OFTEN))
@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_resumed_training_has_the_bits_of_training_that_never_stopped(
    kind: str, place: str, accumulation: int, tmp_path: Path
) -> None:
    options = {"path": tmp_path / "run", "commit_every": 0, "tuning": FOUR_KIB, **PLACES[place]}
    if "param_tier" in options and kind != "gpt":
        pytest.skip("one kind of units is enough")
    first = train(kind, steps=HALF + 2, accumulation=accumulation, each_step=partial(commit_at, HALF), **options)
    assert first.losses == uninterrupted(kind, accumulation).losses[: accumulation * (HALF + 2)]
    if options.get("cpu_memory") == "least":
        options["cpu_memory"] = None  # another budget
    assert_goes_on(resume(kind, accumulation, **options), uninterrupted(kind, accumulation), accumulation)


def assert_goes_on(second: Run, whole: Run, accumulation: int) -> None:
    """What was resumed at HALF has the bits of the rest of `whole`."""
    rest = replace(
        whole, losses=whole.losses[accumulation * HALF :], norms=whole.norms[HALF:], scales=whole.scales[HALF:]
    )
    second.assert_same_bits(rest)


def resume(kind: str, accumulation: int, **options: Any) -> Run:
    """The rest of `train`, from the commit at HALF on."""
    model = models.build(kind).to(DEVICE)
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.5)  # what was there before has no part in it
    plain = torch.optim.AdamW(models.groups(model), lr=LR)
    run = Run()
    keep = models.keep_fp32(kind)
    with OffloadZero(model, plain, accumulation=accumulation, keep_fp32=keep, resume=True, **options) as optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == HALF
        batches = models.losses(kind, model, DEVICE)
        for _ in range(accumulation * HALF):
            next(batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, training.schedule)
        scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": HALF, "base_lrs": [LR, LR]})
        rates: list[float] = optimizer.resumed.extra["rates"]  # type: ignore[index]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for _ in range(HALF, STEPS):
            run.step(optimizer, scheduler, (next(batches)() / accumulation for _ in range(accumulation)))
        run.end(model, optimizer)
    return run


@pytest.mark.parametrize("place", often([*PLACES, "gradients on disk"], *OFTEN, "gradients on disk"))
def test_steps_taken_back_and_taken_again_change_no_bit(place: str, tmp_path: Path) -> None:
    """After every third step: two steps of nonsense, and back."""
    options = {"tuning": FOUR_KIB} | PLACES.get(place, {"grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")})
    models_of: list[torch.nn.Module] = []
    taken: list[int] = []

    def nonsense(optimizer: OffloadZero) -> None:
        taken.append(1)
        if len(taken) % 3:
            return
        optimizer.commit()
        for step in range(2):
            tokens = torch.full((1, 16), step, device=DEVICE)
            models_of[0](tokens, tokens)[1].backward()
            optimizer.step()
            if step == 0:
                optimizer.synchronize()
        optimizer.rollback()

    run = train(
        "gpt",
        steps=STEPS,
        prepare=models_of.append,
        each_step=nonsense,
        path=tmp_path / "run",
        commit_every=0,
        **options,
    )
    run.assert_same_bits(uninterrupted("gpt", 1))


def test_a_model_on_the_meta_device_is_resumed_without_its_first_values(tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path / "run", "commit_every": 0, "tuning": FOUR_KIB}
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    with OffloadZero(model, **options) as optimizer:
        model(torch.ones(1, 8).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.commit()
        optimizer.synchronize()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        again = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    with OffloadZero(again, resume=True, device="cpu", **options):  # also where there is an accelerator
        for name, value in again.state_dict().items():
            assert torch.equal(value, expected[name]), name
