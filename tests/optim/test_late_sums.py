"""A sum of squares that is finished late belongs to the gradient it was taken of, and to no other."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from offload import NonFiniteGradientError, OffloadZero
from offload.devices.copies import Copy
from tests.support.late_copier import CopiedBy, LateCopier


class SlowCopier(LateCopier):
    """Every copy takes its time to be waited for, so the worker is behind."""

    def _start(self, *args: Any, **options: Any) -> Copy:
        copy = super()._start(*args, **options)
        wait = copy.wait

        def slowly() -> None:
            time.sleep(0.03)
            wait()

        copy.wait = slowly  # type: ignore[method-assign]
        return copy


def test_nan_after_a_dropped_gradient_does_not_pass(copied_by: CopiedBy) -> None:
    copied_by(lambda: SlowCopier())
    model = nn.Linear(16, 4, bias=False)
    x = torch.ones(2, 16)
    with OffloadZero(model, accumulation=2, cpu_memory="8MiB") as optimizer:
        for _ in range(2):
            model(x).float().square().mean().backward()
        optimizer.zero_grad()
        (model(x).float().square().mean() * float("nan")).backward()
        with pytest.raises(NonFiniteGradientError, match="weight"):
            optimizer.clip_grad_norm_(1.0)


def test_synchronize_waits_for_gradients_too(copied_by: CopiedBy) -> None:
    copied_by(lambda: SlowCopier())
    model = nn.Linear(16, 4, bias=False)
    with OffloadZero(model, cpu_memory="8MiB") as optimizer:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.synchronize()
        assert not optimizer._parts.gradients._under_way
