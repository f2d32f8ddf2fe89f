"""Continued pretraining at a long context: no logits, MLPs in tiles of tokens, activations on NVMe."""

from pathlib import Path
from typing import Any

import torch
import toys
import twin

from offload import OffloadZero, Tuning, tile_tokens
from offload.demo.text import load_text
from offload.integrations.transformers import fuse_loss

LENGTH = 1024
text = torch.from_numpy(load_text(None, LENGTH).train[: 64 * LENGTH].copy()).long().view(-1, LENGTH)


def train(folder: Path, *, steps: int) -> None:
    model = toys.llama(vocab_size=4096, max_position_embeddings=LENGTH)  # what would be downloaded
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not twin.PLAIN:
        fuse_loss(model)  # the loss without its logits
        for block in model.model.layers:
            tile_tokens(block.mlp, 256)
        options = {"tier": "nvme", "param_tier": "nvme", "commit_every": 2, "resume": "auto"}
        # What enters a block waits on NVMe, and blocks are computed again in the backward.
        options |= {"activation_tier": "nvme", "activation_memory": "1MiB"}
        small = Tuning(chunk="256KiB")  # a small model needs small chunks to stream at all
        options |= {"cpu_memory": "16MiB", "compute_dtype": torch.float32, "tuning": small}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)
    losses = {}
    for step in range(twin.first_step(optimizer), steps):
        rows = text[step : step + 1]
        # A cache for generation would keep the keys and values of all blocks on the device.
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    if not twin.PLAIN:
        train(folder, steps=2)  # stopped here, and resumed
    train(folder, steps=4)
