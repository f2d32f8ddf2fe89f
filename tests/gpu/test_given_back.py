"""A construction that fails late gives the model back, on the device that it was on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero
from offload.devices.copies import accelerator
from offload.model.guard import Guards
from offload.planner.placement import Placement
from tests.support.before import Before

DEVICE = str(accelerator())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.device,
    pytest.mark.skipif(accelerator() is None, reason="no accelerator"),
]


@pytest.mark.parametrize("options", [{}, {"param_tier": "cpu"}, {"tier": "device"}])
@pytest.mark.parametrize("culprit", [(Guards, "guard_aliases"), (Placement, "describe")], ids=["hooked", "whole"])
@pytest.mark.parametrize("before_it", ["cpu", DEVICE])
def test_the_model_is_where_and_what_it_was(
    before_it: str, culprit: tuple[type, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    model = nn.Sequential(nn.Linear(6, 8), *blocks, nn.BatchNorm1d(8), nn.Linear(8, 4).requires_grad_(False))
    model.to(before_it)
    model.register_buffer("rows", model[0].weight.data[:2])
    before = Before(model)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(*culprit, fails)
        with pytest.raises(ZeroDivisionError) as caught:
            OffloadZero(model, device=DEVICE, cpu_memory="64MiB", **options)
    assert not hasattr(caught.value, "__notes__")
    before.require_same()
    with OffloadZero(model, device=DEVICE, cpu_memory="64MiB", **options) as optimizer:
        model(torch.ones(4, 6, device=DEVICE)).square().sum().backward()
        optimizer.step()
        assert torch.equal(model.rows.cpu(), model[0].weight[:2].cpu())
