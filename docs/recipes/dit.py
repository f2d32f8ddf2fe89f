"""A diffusion transformer (SD3's) with diffusers, trained by flow matching on latents and texts, as its scripts do."""

from pathlib import Path
from typing import Any

import torch
import twin
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from offload import OffloadZero, Tuning

STEPS = 8


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, texts and pooled texts, which encoders would make beforehand."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(size, generator=generator) for size in ((4, 4, 8, 8), (4, 6, 32), (4, 16)))  # type: ignore[return-value]


def train(folder: Path, *, steps: int) -> None:
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, num_attention_heads=2,
        attention_head_dim=16, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16,
    ).train()  # fmt: skip
    noises = FlowMatchEulerDiscreteScheduler()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not twin.PLAIN:
        options = {"tier": "nvme", "param_tier": "nvme", "commit_every": 4, "resume": "auto"}
        small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
        options |= {"cpu_memory": "2MiB", "compute_dtype": torch.float32, "tuning": small}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)
    rates = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    if not twin.PLAIN:
        optimizer.attach(scheduler=rates)
    losses = {}
    for step in range(twin.first_step(optimizer), steps):
        clean, texts, pooled = batch(step)
        generator = torch.Generator().manual_seed(100 + step)
        noise = torch.randn(clean.shape, generator=generator)
        density = compute_density_for_timestep_sampling("logit_normal", len(clean), 0.0, 1.0, generator=generator)
        indices = (density * noises.config.num_train_timesteps).long()
        sigmas = noises.sigmas[indices].view(-1, 1, 1, 1)
        noisy = (1 - sigmas) * clean + sigmas * noise
        made = model(
            hidden_states=noisy, timestep=noises.timesteps[indices], encoder_hidden_states=texts,
            pooled_projections=pooled, return_dict=False,
        )[0]  # fmt: skip
        weights = compute_loss_weighting_for_sd3("logit_normal", sigmas)
        loss = (weights * (made - (noise - clean)).square()).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    if not twin.PLAIN:
        train(folder, steps=4)  # stopped here, and resumed
    train(folder, steps=STEPS)
