"""A vision transformer of timm, in the loop of its train.py: label smoothing, averaged weights (EMA), a cosine."""

from pathlib import Path
from typing import Any

import torch
import twin
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad

from offload import OffloadZero, Tuning

STEPS = 8


def train(folder: Path) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8,
        patch_size=2,
        embed_dim=64,
        depth=4,
        num_heads=2,
        num_classes=5,
        qkv_bias=False,
        drop_path_rate=0.2,
    ).train()
    averages = ModelEmaV3(model, decay=0.9)
    optimizer: Any = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.1)
    if not twin.PLAIN:
        options = {"tier": "nvme", "accumulation": 2, "commit_every": 0, "compute_dtype": torch.float32}
        small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
        optimizer = OffloadZero(model, optimizer, path=folder / "run", cpu_memory="4MiB", tuning=small, **options)
    rates = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=1, warmup_lr_init=1e-4, t_in_epochs=False)
    loss_of = LabelSmoothingCrossEntropy(0.1)
    losses = {}
    for step in range(STEPS):
        for half in range(2):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + half))
            loss = loss_of(model(x), torch.arange(len(x)) % 5)
            (loss / 2).backward()
        dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        averages.update(model, step=step)
        rates.step_update(step + 1)
        losses[step + 1] = loss.item()
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    train(folder)
