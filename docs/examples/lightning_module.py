"""A LightningModule, stopped and resumed: its checkpoints name commits of the optimizer."""

import tempfile
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offload import OffloadZero


class Classifier(LightningModule):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.path = path

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs).float(), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OffloadZero:
        adamw = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        # The module inside, whose forward is called: inputs are cast there. `accumulation` is what
        # `accumulate_grad_batches` says.
        self.held = OffloadZero(self.net, adamw, path=self.path, accumulation=2, resume="auto")
        return self.held

    def on_fit_end(self) -> None:
        self.held.close()


def fit(folder: Path, *, epochs: int, checkpoint: Path | None) -> Path:
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
    trainer.fit(Classifier(folder / "run"), DataLoader(TensorDataset(*examples), batch_size=8), ckpt_path=checkpoint)
    print(f"step {trainer.global_step:2d}  loss {trainer.callback_metrics['loss'].item():.3f}")
    return Path(saves.best_model_path)


with tempfile.TemporaryDirectory() as scratch:
    torch.manual_seed(0)
    saved = fit(Path(scratch), epochs=2, checkpoint=None)
    print("resumed")
    fit(Path(scratch), epochs=4, checkpoint=saved)
