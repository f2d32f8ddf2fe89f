"""A LightningModule, stopped and resumed: its checkpoints name commits of the optimizer."""

from pathlib import Path
from typing import Any

import torch
import twin
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offload import OffloadZero, Tuning


class Classifier(LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 128), *(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 4))
        self.folder = folder
        self.losses: dict[int, float] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        if not twin.PLAIN:
            # The module inside, whose forward is called: inputs are cast there. `accumulation` is what
            # `accumulate_grad_batches` says.
            options = {"tier": "nvme", "accumulation": 2, "resume": "auto", "compute_dtype": torch.float32}
            small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
            path = self.folder / "run"
            self.made = OffloadZero(self.net, self.made, path=path, cpu_memory="1MiB", tuning=small, **options)
        return self.made

    def on_fit_end(self) -> None:
        twin.leave(self.folder, self.net, self.made, self.losses)


def fit(folder: Path, *, epochs: int, checkpoint: str | None) -> str:
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(64, 16, generator=generator), torch.randint(4, (64,), generator=generator)
    saves = ModelCheckpoint(folder / "lightning")
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(folder), DataLoader(TensorDataset(*examples), batch_size=8), ckpt_path=checkpoint)
    return saves.best_model_path


with twin.directory() as folder:
    torch.manual_seed(0)
    saved = None if twin.PLAIN else fit(folder, epochs=1, checkpoint=None)  # stopped here, and resumed
    fit(folder, epochs=2, checkpoint=saved)
