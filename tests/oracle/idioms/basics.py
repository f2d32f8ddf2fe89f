"""The loops that everybody writes."""

from __future__ import annotations

import torch

from tests.oracle.harness import Run, idiom
from tests.oracle.models import TinyLm, token_batches, token_loss


@idiom("clips by norm with torch's own function", source="karpathy/nanoGPT train.py:306")
def clip_by_norm(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.log(loss, norm)
    run.log(model)


@idiom(
    "averages the weights with AveragedModel after each step",
    source="pytorch/vision references/classification/train.py:46",
)
def average_of_weights(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        run.log(loss)
    run.log(model, average.module)
