"""Accelerate over several ranks: `prepare` does not wrap a held model, and `save_state` commits."""

from __future__ import annotations

from typing import Any

from torch import nn

from offload import OffloadZero


def register(accelerator: Any, model: nn.Module, optimizer: OffloadZero) -> None:
    """Tells an Accelerator that a model is held. Call it before `accelerator.prepare(model, optimizer, ...)`.

        offload.integrations.accelerate.register(accelerator, model, optimizer)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    `prepare` gives the model autocast then, and no DistributedDataParallel: OffloadZero averages over the ranks.
    `save_state` commits on all ranks before it saves. An optimizer with accumulation="auto" gets the Accelerator's
    `gradient_accumulation_steps`, if that is more than 1.

    Args:
        accelerator: an accelerate.Accelerator.
        model: the held model.
        optimizer: its optimizer.

    Raises:
        ConfigError: if the optimizer's `accumulation` is less than `gradient_accumulation_steps`.
    """
    accelerator.prepare_model(model, evaluation_mode=True)  # which wraps nothing; `prepare` then leaves it alone
    if accelerator.gradient_accumulation_steps > 1:  # a loop may accumulate without its help
        optimizer.accumulation = accelerator.gradient_accumulation_steps
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())
