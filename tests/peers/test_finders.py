"""What trains for a while and goes back to the beginning: Lightning's finders; and what reads gradients after the step:
AdaLoRA. The oracle is the same with torch's AdamW."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offload import GradientMovedError, OffloadZero, Tuning
from tests.oracle.harness import PLACEMENTS
from tests.oracle.models import token_loss
from tests.peers import devices
from tests.peers.devices import ON_CPU, alone
from tests.peers.test_frameworks import SmallLm, adamw, llama, tokens

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
lightning = pytest.importorskip("lightning")
peft = pytest.importorskip("peft")

__all__ = ["alone"]
PLACES = ["cpu", "nvme", "device", "streamed from nvme"]


def hold(model: nn.Module, optimizer: torch.optim.Optimizer, placement: str, path: Path) -> OffloadZero:
    given: dict[str, Any] = {**PLACEMENTS[placement], "path": path}
    if not ON_CPU:
        given.pop("grad_tier", None)
    tuning = Tuning(chunk="256KiB", threads=1)
    return OffloadZero(model, optimizer, compute_dtype=torch.float32, **{**given, "tuning": tuning})


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """Args: placement: None: torch's AdamW trains it."""

    def __init__(self, placement: str | None, path: Path) -> None:
        super().__init__()
        self.net = SmallLm()
        self.lr, self.batch_size = 1e-3, 2
        self.losses: list[float] = []
        self.optimizer: Any = adamw(self)
        if placement is not None:
            self.optimizer = hold(self, self.optimizer, placement, path)

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = token_loss(self.net, *batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        return self.optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        rows = list(zip(tokens(64), tokens(64, seed=2), strict=True))
        return DataLoader(rows, batch_size=self.batch_size)


def found(placement: str | None, path: Path) -> tuple[list[float], Lit]:
    torch.manual_seed(0)
    path.mkdir()
    model = Lit(placement, path / "run")
    trainer = lightning.Trainer(
        max_steps=4,
        **devices.for_lightning(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
    )
    tuner = lightning.pytorch.tuner.Tuner(trainer)
    tuner.scale_batch_size(model, mode="power", max_trials=2, steps_per_trial=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tuner.lr_find(model, num_training=6, update_attr=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trainer.fit(model)
    return [*model.losses, float(model.batch_size), model.lr], model


@pytest.mark.parametrize("placement", PLACES)
def test_lightning_finds_a_batch_size_and_a_learning_rate_and_then_trains(placement: str, tmp_path: Path) -> None:
    expected, plain = found(None, tmp_path / "plain")
    losses, held = found(placement, tmp_path / "held")
    assert losses == pytest.approx(expected, rel=1e-5)
    for one, other in zip(held.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    held.optimizer.close()


def adapted(placement: str | None, path: Path) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=2, deltaT=1, total_step=8, target_modules=["q_proj", "v_proj"]
    )
    model = peft.get_peft_model(llama("Llama")(), config)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    if placement is not None:
        optimizer = hold(model, optimizer, placement, path / "run")
    losses = []
    for number, rows in enumerate(torch.stack(tokens(8 * 4)).split(4)):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(number)
        optimizer.zero_grad()
        losses.append(loss.item())
    values = {name: value.detach().clone() for name, value in model.state_dict().items() if "lora_" in name}
    if placement is not None:
        optimizer.close()
    return losses, values


@pytest.mark.skipif(not ON_CPU, reason="gradients of few trained parameters are written over on a device")
@pytest.mark.parametrize("placement", PLACES)
def test_adalora_allocates_ranks_by_the_gradients_of_the_last_step(placement: str, tmp_path: Path) -> None:
    train = partial(adapted, placement, tmp_path)
    if placement == "nvme":
        with pytest.raises(GradientMovedError, match=r"copy there what is to be read later, .*clone\(\)"):
            train()
        return
    expected, values = adapted(None, tmp_path)
    losses, held = train()
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in values.items():
        torch.testing.assert_close(held[name], value, rtol=1e-3, atol=1e-5)
