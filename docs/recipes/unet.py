"""A UNet in the loop of diffusers' train_unconditional.py: Accelerate, noise schedule, averaged weights (EMA)."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import twin
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

from offload import OffloadZero, Tuning

STEPS = 8


def train(folder: Path) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
    ).train()
    averages = EMAModel(net.parameters(), decay=0.9, use_ema_warmup=True)
    noises = DDPMScheduler(num_train_timesteps=50)
    made: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if not twin.PLAIN:
        # `accumulation` is what `gradient_accumulation_steps` says.
        options = {"tier": "nvme", "accumulation": 2, "commit_every": 0, "compute_dtype": torch.float32}
        small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
        made = OffloadZero(net, made, path=folder / "run", cpu_memory="2MiB", tuning=small, **options)
    rates = get_scheduler("cosine", optimizer=made, num_warmup_steps=2, num_training_steps=STEPS)
    loader = torch.utils.data.DataLoader(list(range(2 * STEPS)))
    model, optimizer, loader, rates = accelerator.prepare(net, made, loader, rates)
    losses = {}
    for number in loader:
        generator = torch.Generator().manual_seed(int(number))
        clean, noise = (torch.randn(4, 3, 8, 8, generator=generator) for _ in range(2))
        times = torch.randint(0, 50, (4,), generator=generator)
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(noises.add_noise(clean, noise, times), times).sample, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            averages.step(model.parameters())
            losses[int(number) // 2 + 1] = loss.item()
    averages.copy_to(net.parameters())  # so what is compared is the averages
    twin.leave(folder, net, made, losses)


with twin.directory() as folder:
    train(folder)
