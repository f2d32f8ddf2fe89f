"""A mixture of experts (Mixtral's) whose experts stream one by one: a layer's experts do not have to fit together."""

from pathlib import Path
from typing import Any

import torch
import toys
import twin
from transformers import MixtralConfig, MixtralForCausalLM

from offload import OffloadZero, Tuning

rows = torch.randint(2, 32, (64, 16), generator=torch.Generator().manual_seed(0))


def train(folder: Path, *, steps: int) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        **toys.SIZES, num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2, output_router_logits=True
    )
    model = MixtralForCausalLM(config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not twin.PLAIN:
        options = {"tier": "nvme", "param_tier": "nvme", "commit_every": 4, "resume": "auto"}
        # A tile is one expert's matrix, or two; a small model needs small chunks to stream at all.
        small = Tuning(tile="64KiB", chunk="64KiB")
        options |= {"cpu_memory": "8MiB", "compute_dtype": torch.float32, "tuning": small}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)
    losses = {}
    for step in range(twin.first_step(optimizer), steps):
        batch = rows[torch.arange(4 * step, 4 * step + 4) % len(rows)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # with that of the router
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    if not twin.PLAIN:
        train(folder, steps=4)  # stopped here, and resumed
    train(folder, steps=8)
