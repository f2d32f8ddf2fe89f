"""Compiled models: the values of an eager one, and a number of compilations that does not grow with the steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from offload import OffloadZero, Tuning
from tests.oracle.models import TinyLm, token_batches, token_loss
from tests.support.toy import take_step

PLACEMENTS = {
    "resident": {"tier": "cpu"},
    "resident, pending": {"tier": "nvme"},
    "streamed": {"tier": "cpu", "param_tier": "cpu"},
    "streamed, pending": {"tier": "nvme", "param_tier": "nvme"},
}
ACTIVATIONS = {
    "recomputed": {"tier": "cpu", "activation_tier": "cpu"},
    "saved in a tier": {"tier": "nvme", "activation_tier": "nvme", "tuning": Tuning(recompute=False)},
}
WARM_UP = 2


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def train(whole: bool, counter: Any, options: dict[str, Any] | None) -> tuple[list[float], list[int]]:
    """Losses, and how many graphs were compiled after each step."""
    torch.manual_seed(0)
    model = TinyLm()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options is not None:
        optimizer = OffloadZero(model, optimizer, compute_dtype=torch.float32, commit_every=None, **options)
    run: nn.Module = model
    if counter is not None and whole:
        run = torch.compile(model, backend=counter)  # type: ignore[assignment]
    elif counter is not None:
        for block in model.blocks:
            block.compile(backend=counter)
    losses, compiled = [], []
    for tokens, targets in token_batches():
        loss = token_loss(run, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizer)
        losses.append(loss.item())
        compiled.append(0 if counter is None else counter.frame_count)
    if options is not None:
        optimizer.close()
    return losses, compiled


@pytest.mark.parametrize(
    "placement", [*PLACEMENTS, *(pytest.param(name, marks=pytest.mark.slow) for name in ACTIVATIONS)]
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by block"])
@pytest.mark.one_in(2)
def test_a_compiled_model_learns_the_same_and_is_compiled_once(whole: bool, placement: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict((PLACEMENTS | ACTIVATIONS)[placement])
    if options["tier"] == "nvme":
        options["path"] = tmp_path / "run"
    expected, _ = train(whole, None, None)
    losses, compiled = train(whole, CompileCounter(), options)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert compiled[0] > 0
    assert compiled[WARM_UP:] == [compiled[WARM_UP]] * (len(compiled) - WARM_UP)
