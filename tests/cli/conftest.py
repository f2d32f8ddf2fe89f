from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from offload.cli import plan
from offload.cli.options import PlanOptions
from offload.cli.plan_models import Sized
from offload.demo.gpt import GPT

MEASURED: dict[Hashable, Any] = {}


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward of a preset keeps is measured once in a process for all plans of equal models: it takes four
    forwards and two backwards on the meta device, which is most of a plan's time."""
    measured = plan._measured

    def once(measure: Callable[..., Any], options: PlanOptions, model: Sized) -> Any:
        if type(model.module) is not GPT:
            return measured(measure, options, model)
        # Tests put other forwards into these classes.
        modules = [(name, type(one), type(one).forward) for name, one in model.module.named_modules()]
        tensors = [*model.module.named_parameters(), *model.module.named_buffers()]
        given = (options.batch, options.seq, options.compute_dtype, options.gpu, options.quantise)
        kept = [(name, one.shape, one.dtype, one.requires_grad) for name, one in tensors]
        key = (measure, model.module.config, *given, tuple(modules), tuple(kept))
        if key not in MEASURED:
            MEASURED[key] = measured(measure, options, model)
        return MEASURED[key]

    monkeypatch.setattr(plan, "_measured", once)
