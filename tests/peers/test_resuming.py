"""Checkpoints of other people's frameworks: training that was stopped and resumed ends as training that was not.

Each framework saves and loads with its own functions and its defaults. With fp32 parameters the oracle is the same
framework with torch's AdamW, never stopped. With bf16 it is the same framework on a held model, never stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offload import ConfigError, OffloadZero, Tuning
from tests.oracle.models import token_loss
from tests.peers import devices
from tests.peers.devices import ON_CPU, alone
from tests.peers.test_frameworks import SmallLm, adamw, tokens
from tests.peers.test_transformers import gpt2
from tests.support.device import DEVICE
from tests.support.lost import lose

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
safetensors_torch = pytest.importorskip("safetensors.torch")

__all__ = ["alone"]
Hold = Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]
ACCUMULATION = 2
SAVED, STOP = 2, 5
"""Steps: of the checkpoint that is resumed, and at which the process ends, after another checkpoint."""
TOLERANCE = 1e-6


class StoppedError(Exception):
    """The process ends here."""


class Result(NamedTuple):
    """logged: numbers, by step; weights: of the model at the end."""

    logged: dict[int, tuple[float, ...]]
    weights: dict[str, Tensor]


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


class Holds:
    """Makes the optimizers of one run, which goes on from its last commit. Attribute: last, the one that lives."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._options = {"path": path, "resume": "auto", "tuning": Tuning(chunk="16KiB", threads=1), **options}
        self.last: OffloadZero | None = None

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> OffloadZero:
        self.last = OffloadZero(model, optimizer, accumulation=ACCUMULATION, device=DEVICE, **self._options)
        if not ON_CPU:
            self.last.attach(rng=True)  # frameworks save the random numbers of devices that they know by name
        return self.last

    def lose(self) -> None:
        """As when the process is killed: nothing more is committed, and the files are free."""
        assert self.last is not None
        lose(self.last)


@pytest.fixture(autouse=True)
def _quietly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


# transformers. 5 batches an epoch: the last group of each is shorter.

ROWS = [{"input_ids": row, "labels": row} for row in tokens(10)]


def trainer_of(hold: Hold, path: Path, *, callbacks: Any = (), **more: Any) -> Any:
    torch.manual_seed(0)
    model = gpt2(True)()  # with dropout
    arguments: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "logging_steps": 1,
        "save_steps": 2,
        "warmup_steps": 2,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=path, use_cpu=ON_CPU, report_to=[], disable_tqdm=True, **(arguments | more)
        ),
        train_dataset=ROWS,
        eval_dataset=ROWS[:8],
        optimizers=(hold(model, adamw(model)), None),
        callbacks=list(callbacks),
    )


def result_of(trainer: Any) -> Result:
    logged = {
        entry["step"]: (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    }
    return Result(logged, weights(trainer.model))


def with_trainer(hold: Hold, path: Path, *, is_bf16: bool, stop: int = 0, resume: bool = False) -> Result:
    class Stops(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == stop:
                raise StoppedError

    # Trainer refuses autocast on devices that it does not know by name. A held model is in bf16 without it.
    trainer = trainer_of(hold, path, callbacks=[Stops()], bf16=is_bf16 and ON_CPU)
    trainer.train(resume_from_checkpoint=str(path / f"checkpoint-{SAVED}") if resume else None)
    return result_of(trainer)


# accelerate


def with_accelerate(hold: Hold, path: Path, *, is_bf16: bool, stop: int = 0, resume: bool = False) -> Result:
    """Two epochs of 5 batches: the last group of each is shorter. The checkpoint is made after the first."""
    accelerator = accelerate.Accelerator(
        cpu=ON_CPU, gradient_accumulation_steps=ACCUMULATION, mixed_precision="bf16" if is_bf16 else "no"
    )
    accelerate.utils.set_seed(0)
    model = nn.Sequential(SmallLm(), nn.Dropout(0.1))
    optimizer: Any = hold(model, adamw(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(list(zip(tokens(20), tokens(20, seed=2), strict=True)), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    logged: dict[int, tuple[float, ...]] = {}
    done = 0
    if resume:
        accelerator.load_state(path / "saved")
        done = 5
    for _ in range(done // 5, 2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = token_loss(model, inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += 1
            logged[done] = loss.item(), schedule.get_last_lr()[0]
            if done == 5:
                accelerator.save_state(path / "saved")
            if done == 2 * stop - 1:
                raise StoppedError
    accelerator.end_training()
    return Result(logged, weights(accelerator.unwrap_model(model)))


# Lightning


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """Args: stop: the step after which the process ends."""

    def __init__(self, hold: Hold, stop: int) -> None:
        super().__init__()
        self.net = SmallLm()
        self.logged: dict[int, tuple[float, ...]] = {}
        self._hold = [hold]  # no part of the module
        self._stop = stop

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs)
        return out

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = token_loss(self, *batch)
        self.log("loss", loss)
        seen = self.logged.get(self.global_step, ())
        self.logged[self.global_step] = (*seen, loss.item(), self.optimizers().param_groups[0]["lr"])
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self._stop and self.global_step == self._stop:
            raise StoppedError

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("found", token_loss(self, *batch))

    def configure_optimizers(self) -> Any:
        optimizer = self._hold[0](self, adamw(self))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


EPOCH = 3
"""Steps of 5 batches: the last group of each epoch is shorter. Lightning resumes at the start of an epoch."""


class ClipsItself(Lit):
    """Lightning refuses to clip under mixed precision for an optimizer that works with a GradScaler by itself."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, **how: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


def fitting(path: Path, **more: Any) -> Any:
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        path, filename="{step}", every_n_train_steps=EPOCH, save_top_k=-1
    )
    arguments: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": 0.3}
    return lightning.Trainer(
        **devices.for_lightning(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        callbacks=[checkpoints],
        **(arguments | more),
    )


def batches(count: int) -> DataLoader[Any]:
    return DataLoader(list(zip(tokens(4 * count), tokens(4 * count, seed=2), strict=True)), batch_size=4)


def with_lightning(hold: Hold, path: Path, *, is_bf16: bool, stop: int = 0, resume: bool = False) -> Result:
    torch.manual_seed(0)
    model = (ClipsItself if is_bf16 else Lit)(hold, stop)
    trainer = fitting(path, precision="bf16-mixed" if is_bf16 else None)
    trainer.fit(model, batches(5), batches(1), ckpt_path=str(path / f"step={EPOCH}.ckpt") if resume else None)
    return Result(model.logged, weights(model))


FRAMEWORKS: dict[str, Callable[..., Result]] = {
    "trainer": with_trainer,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}

PLACES: dict[str, dict[str, Any]] = {
    "RAM": {"tier": "cpu", "commit_every": 1},
    "NVMe": {"tier": "nvme", "commit_every": 0},
    "streamed": {"tier": "nvme", "param_tier": "cpu", "commit_every": 2},
    "streamed, states in RAM": {"tier": "cpu", "param_tier": "cpu", "commit_every": 0},
}


CASES = [("RAM", False), ("NVMe", True), ("streamed", False), ("streamed, states in RAM", True)]


@pytest.mark.parametrize(("place", "is_bf16"), CASES, ids=[f"{p}-{'bf16' if b else 'fp32'}" for p, b in CASES])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_resumed_training_ends_as_if_it_had_not_stopped(
    framework: str, place: str, is_bf16: bool, tmp_path: Path
) -> None:
    train = FRAMEWORKS[framework]
    options = {**PLACES[place], "compute_dtype": torch.bfloat16 if is_bf16 else torch.float32}
    whole: Hold = Holds(tmp_path / "whole", options) if is_bf16 else plainly
    expected = train(whole, tmp_path / "expected", is_bf16=is_bf16)
    if isinstance(whole, Holds):
        whole.lose()

    hold = Holds(tmp_path / "swap", options)
    with pytest.raises(StoppedError):
        train(hold, tmp_path / "saved", is_bf16=is_bf16, stop=STOP)
    hold.lose()
    found = train(hold, tmp_path / "saved", is_bf16=is_bf16, resume=True)
    hold.lose()

    assert len(found.logged) >= 3
    assert set(found.logged) <= set(expected.logged)
    for step, values in found.logged.items():
        assert values == pytest.approx(expected.logged[step], abs=0 if is_bf16 else TOLERANCE), step
    assert list(found.weights) == list(expected.weights)
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=0 if is_bf16 else TOLERANCE, msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_that_begins_anew_with_the_weights_of_a_commit_is_warned(framework: str, tmp_path: Path) -> None:
    """The argument that was left out is named, once."""
    train = FRAMEWORKS[framework]
    hold = Holds(tmp_path / "swap", {**PLACES["RAM"], "compute_dtype": torch.float32})
    with pytest.raises(StoppedError):
        train(hold, tmp_path / "saved", is_bf16=False, stop=STOP)
    hold.lose()
    named = {"trainer": "resume_from_checkpoint=True", "accelerate": r"load_state\(\)", "lightning": "ckpt_path="}
    with pytest.warns(UserWarning, match=rf"go on from step \d+.*{named[framework]}") as warned:
        train(hold, tmp_path / "again", is_bf16=False)
    assert sum("go on from step" in str(one.message) for one in warned) == 1
    hold.lose()


# What frameworks do beside.

ONCE = {"compute_dtype": torch.float32}


@pytest.mark.parametrize("place", ["RAM", "streamed"])
def test_trainer_takes_the_best_model_and_trains_again(place: str, tmp_path: Path) -> None:
    how = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}

    def twice(hold: Hold, path: Path) -> list[Result]:
        trainer = trainer_of(hold, path, max_steps=4, metric_for_best_model="loss", **how)
        trainer.train()
        best = result_of(trainer)
        assert trainer.state.best_global_step == 2  # it went back
        trainer.train()
        return [best, result_of(trainer)]

    hold = Holds(tmp_path / "swap", PLACES[place] | ONCE)
    found, expected = twice(hold, tmp_path / "held"), twice(plainly, tmp_path / "plain")
    hold.lose()
    for one, other in zip(found, expected, strict=True):
        for step, values in one.logged.items():
            assert values == pytest.approx(other.logged[step], abs=TOLERANCE), step
        for name, value in one.weights.items():
            torch.testing.assert_close(value, other.weights[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("place", ["RAM", "streamed"])
def test_lightning_fits_twice_and_takes_the_best_model(place: str, tmp_path: Path) -> None:
    """With one optimizer for both, made before."""

    class Kept(Lit):
        def __init__(self, hold: Hold) -> None:
            super().__init__(hold, 0)
            self.kept = [hold(self, adamw(self))]

        def configure_optimizers(self) -> Any:
            return self.kept[0]

        def test_step(self, batch: Any, number: int) -> None:
            self.log("tested", token_loss(self, *batch))

    def twice(hold: Hold, path: Path) -> Result:
        torch.manual_seed(0)
        model = Kept(hold)
        fitting(path / "first", max_epochs=1).fit(model, batches(5), batches(1))
        trainer = fitting(path / "second", max_epochs=2)
        trainer.fit(model, batches(5), batches(1))
        trainer.test(model, batches(2), ckpt_path=str(path / "second" / f"step={EPOCH}.ckpt"), verbose=False)
        return Result({0: (trainer.callback_metrics["tested"].item(),), **model.logged}, weights(model))

    hold = Holds(tmp_path / "swap", PLACES[place] | ONCE)
    found, expected = twice(hold, tmp_path / "held"), twice(plainly, tmp_path / "plain")
    hold.lose()
    for step, values in found.logged.items():
        assert values == pytest.approx(expected.logged[step], abs=TOLERANCE), step
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=TOLERANCE, msg=name)


def test_lightning_that_holds_a_held_model_again_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = Lit(Holds(tmp_path / "swap", {}), 0)
    fitting(tmp_path / "first", max_epochs=1).fit(model, batches(2))
    with pytest.raises(ConfigError, match=r"close\(\)"):
        fitting(tmp_path / "second", max_epochs=1).fit(model, batches(2))
    hold = model._hold[0]
    assert isinstance(hold, Holds)
    hold.lose()


@pytest.mark.parametrize("place", ["NVMe", "streamed"])
def test_every_tensor_is_saved(place: str, tmp_path: Path) -> None:
    """Of a model with tied weights, by every function that writes safetensors."""
    hold = Holds(tmp_path / "swap", PLACES[place] | ONCE)
    for way, path in ((hold, tmp_path / "held"), (plainly, tmp_path / "plain")):
        trainer = trainer_of(way, path, max_steps=2, save_strategy="no")
        trainer.train()
        trainer.save_model(path / "saved")
        trainer.accelerator.save_model(trainer.model, path / "accelerate")
        trainer.accelerator.save_state(path / "state")
        safetensors_torch.save_model(trainer.model, str(path / "safetensors"))
    for file in ("saved/model.safetensors", "accelerate/model.safetensors", "state/model.safetensors", "safetensors"):
        mine, theirs = (safetensors_torch.load_file(tmp_path / run / file) for run in ("held", "plain"))
        assert set(mine) == set(theirs)
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=TOLERANCE, msg=name)
    hold.lose()
