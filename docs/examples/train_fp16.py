"""fp16 with torch's own GradScaler: an overflow skips a step and halves the scale. The run is committed and resumed."""

import tempfile

import torch
from torch import nn

from offload import OffloadZero, Tuning

torch.manual_seed(0)
inputs, targets = torch.randn(512, 64), torch.randint(10, (512,))


def train(path: str, until: int) -> None:
    """Trains up to batch `until`, from the last commit in `path`."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"compute_dtype": torch.float16, "commit_every": 0, "resume": "auto", "tuning": Tuning(chunk="64KiB")}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=20)
    with OffloadZero(model, adamw, path=path, **options) as optimizer:
        optimizer.attach(scaler=scaler)  # its state is committed along, and comes back when the run is resumed
        done = optimizer.resumed.extra["done"] if optimizer.resumed else 0
        for batch in range(done + 1, until + 1):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # before clipping, which is about the unscaled gradients
            optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if batch % 15 == 0:
                optimizer.commit({"done": batch})
                skipped = optimizer.stats()["skipped_steps"]
                print(f"batch {batch}  loss {loss.item():.3f}  scale {scaler.get_scale():.0f}  {skipped} skipped here")


with tempfile.TemporaryDirectory() as scratch:
    train(scratch, until=30)
    train(scratch, until=60)
