"""Trainer, Accelerate and Lightning on two ranks, with a held model, and killed and resumed there.

The oracle is the same framework with its own DistributedDataParallel and AdamW, on the CPU; of a killed run, the one
that was not killed. On the simulated accelerator each rank has a device of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offload import ConfigError, OffloadZero, Tuning
from tests import simulated_device as simulated
from tests.oracle.models import token_loss
from tests.peers import devices
from tests.peers.devices import ON_CPU
from tests.peers.test_frameworks import SmallLm, adamw, tokens
from tests.peers.test_transformers import gpt2
from tests.simulated_device import process_group
from tests.support.ranks import RanksFailedError, World, Worlds

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
accelerate_integration = pytest.importorskip("offload.integrations.accelerate")
lightning_integration = pytest.importorskip("offload.integrations.lightning")
transformers_integration = pytest.importorskip("offload.integrations.transformers")

RANKS = 2
GROUP = 2
"""Micro-batches a step; the last group of an epoch is shorter."""
SAVED, STOP = 2, 5
"""Steps: of the checkpoint that is resumed, and at which the processes are killed."""
TOLERANCE = 1e-6

Result = tuple[dict[int, tuple[float, ...]], dict[str, Tensor]]
"""Numbers by step, and the weights at the end."""


class Job:
    """What a rank is to do.

    Args: options: of OffloadZero; None: the framework's DDP, on the CPU; drops: whether the model has dropout, for
    which devices draw other numbers; without: no integration.
    """

    def __init__(
        self,
        path: Path,
        options: dict[str, Any] | None,
        *,
        is_bf16: bool = False,
        drops: bool = True,
        stop: int = 0,
        resume: bool = False,
        without: bool = False,
    ) -> None:
        self.path = path
        self.options = options
        self.is_bf16 = is_bf16
        self.drops = drops
        self.stop = stop
        self.resume = resume
        self.without = without

    @property
    def integrates(self) -> bool:
        return self.options is not None and not self.without

    @property
    def is_on_cpu(self) -> bool:
        return self.options is None or ON_CPU

    def connect(self) -> None:
        """Connects the ranks as a user of this job's device does, and tells the frameworks about that device."""
        self.path.mkdir(exist_ok=True)
        os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
        backend = "gloo"
        if not self.is_on_cpu:
            process_group.register()
            backend = process_group.BACKEND
            torch.accelerator.set_device_index(dist.get_rank())
            os.environ["ACCELERATE_TORCH_DEVICE"] = str(devices.own(dist.get_rank()))
        if dist.get_backend() != backend:
            rank, ranks = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
            rendezvous = f"file://{self.path}/{'resumes' if self.resume else 'begins'}"
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        if self.options is None:
            return optimizer
        dtype = torch.bfloat16 if self.is_bf16 else torch.float32
        options = {"accumulation": GROUP, "resume": "auto", "commit_every": 0, "path": self.path / "run"}
        options |= {"compute_dtype": dtype, "tuning": Tuning(chunk="16KiB", threads=1)}
        device = {} if ON_CPU else {"device": devices.own(dist.get_rank())}
        self.held = OffloadZero(model, optimizer, **(options | device | self.options))
        return self.held

    def seeded(self) -> None:
        """The framework has set its seeds. It saves the random numbers of devices that it knows by name."""
        if not self.is_on_cpu:
            self.held.attach(rng=True)

    def end(self) -> None:
        if self.options is not None:
            self.held.close()

    def at(self, step: int) -> None:
        """Kills this process at the step that it is to stop at, when the others have come there, too."""
        if self.stop and step == self.stop:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def drop_out(model: nn.Module, job: Job) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not job.drops:
            module.p = 0


# transformers: 5 batches of a rank an epoch.


def with_trainer(job: Job) -> Result:
    class Watches(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            job.at(state.global_step)

    torch.manual_seed(0)
    model = gpt2(True)()
    drop_out(model, job)
    optimizer = job.hold(model, adamw(model))
    callbacks = [Watches()]
    if job.integrates:
        callbacks.append(transformers_integration.Offload(optimizer))
    rows = [{"input_ids": row, "labels": row} for row in tokens(10 * RANKS)]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=job.path / "trainer",
            use_cpu=True,
            ddp_backend="gloo",
            bf16=job.is_bf16,
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=GROUP,
            logging_steps=1,
            save_steps=SAVED,
            warmup_steps=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )
    job.seeded()
    trainer.train(resume_from_checkpoint=str(job.path / "trainer" / f"checkpoint-{2 * SAVED}") if job.resume else None)
    found = {
        entry["step"]: (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    }
    return found, weights(trainer.accelerator.unwrap_model(trainer.model_wrapped))


# accelerate: 2 epochs of 5 batches of a rank. The state is saved after the first.


def with_accelerate(job: Job) -> Result:
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=GROUP,
        mixed_precision="bf16" if job.is_bf16 else "no",
        dataloader_config=accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerate.utils.set_seed(0)
    model: nn.Module = nn.Sequential(SmallLm(), nn.Dropout(0.1))
    drop_out(model, job)
    optimizer = job.hold(model, adamw(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = list(zip(tokens(20 * RANKS), tokens(20 * RANKS, seed=2), strict=True))
    loader: Any = DataLoader(rows, batch_size=4, shuffle=True)
    job.seeded()
    if job.integrates:
        accelerate_integration.register(accelerator, model, optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    logged: dict[int, tuple[float, ...]] = {}
    done = 0
    if job.resume:
        accelerator.load_state(job.path / "saved")
        done = 5
    for epoch in range(done // 5, 2):
        loader.set_epoch(epoch)
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
            logged[done] = accelerator.reduce(loss.detach(), "mean").item(), schedule.get_last_lr()[0]
            if done == 5:
                accelerator.save_state(job.path / "saved")
            job.at((done + 1) // 2)
    return logged, weights(accelerator.unwrap_model(model))


# Lightning: 2 epochs of 5 batches of a rank. It resumes at the start of an epoch.

EPOCH = 3


class Lit(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = SmallLm()
        self.logged: dict[int, tuple[float, ...]] = {}
        self._job = [job]  # no part of the module

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = token_loss(self.net, *batch)
        seen = self.logged.get(self.global_step, ())
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.logged[self.global_step] = (*seen, mean.item(), self.optimizers().param_groups[0]["lr"])
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self._job[0].at(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = self._job[0].hold(self.net, adamw(self.net))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, **how: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)  # which Lightning refuses under mixed precision


def with_lightning(job: Job) -> Result:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = Lit(job)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        job.path / "lightning", filename="{step}", every_n_train_steps=EPOCH, save_top_k=-1
    )
    where: dict[str, Any] = {"accelerator": "cpu", "devices": RANKS}
    strategy = lightning_integration.OffloadStrategy if job.integrates else lightning.pytorch.strategies.DDPStrategy
    if job.is_on_cpu:
        where["strategy"] = strategy()
    else:
        on_devices = {"parallel_devices": list(map(devices.own, range(RANKS))), "process_group_backend": "staged"}
        where = {"strategy": strategy(devices.for_lightning()["strategy"].accelerator, **on_devices)}
    trainer = lightning.Trainer(
        **where,
        precision="bf16-mixed" if job.is_bf16 else None,
        max_epochs=2,
        accumulate_grad_batches=GROUP,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.path,
        callbacks=[saves],
    )
    rows = list(zip(tokens(20 * RANKS), tokens(20 * RANKS, seed=2), strict=True))
    checkpoint = job.path / "lightning" / f"step={EPOCH}.ckpt"
    trainer.fit(model, DataLoader(rows, batch_size=4, shuffle=True), ckpt_path=str(checkpoint) if job.resume else None)
    return model.logged, weights(model)


FRAMEWORKS: dict[str, Callable[[Job], Result]] = {
    "trainer": with_trainer,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}


def _train(framework: str, job: Job) -> Result:
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.connect()
        try:
            found = FRAMEWORKS[framework](job)
            job.end()
        finally:
            accelerate.state.GradientState._reset_state()
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            os.environ.update(environment)  # Lightning takes away what torchrun has set
    races = simulated.races() if simulated.is_wanted() else []
    assert not races, races[:5]
    return found


def assert_alike(found: Result, expected: Result, tolerance: float) -> None:
    assert set(found[0]) <= set(expected[0])
    assert len(found[0]) >= 2
    for step, values in found[0].items():
        assert values == pytest.approx(expected[0][step], abs=tolerance), step
    assert list(found[1]) == list(expected[1])
    for name, value in found[1].items():
        torch.testing.assert_close(value, expected[1][name], rtol=0, atol=tolerance, msg=name)


PLACES: dict[str, dict[str, Any]] = {
    "RAM": {"tier": "cpu"},
    "NVMe": {"tier": "nvme", "accumulation": "auto"},
    "streamed": {"tier": "nvme", "param_tier": "nvme", "stage": 2},
    "sharded": {"tier": "cpu", "param_tier": "cpu", "stage": 3, "accumulation": "auto"},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ranks_train_as_with_ddp(worlds: Worlds, tmp_path: Path, framework: str, place: str) -> None:
    jobs = [Job(tmp_path / name, options, drops=ON_CPU) for name, options in (("plain", None), ("held", PLACES[place]))]
    expected, found = (worlds(RANKS).run(_train, framework, job, timeout_s=150) for job in jobs)
    for mine, theirs in zip(found, expected, strict=True):
        assert_alike(mine, theirs, TOLERANCE)


@pytest.mark.parametrize(("place", "is_bf16"), [("RAM", True), ("NVMe", False), ("streamed", True), ("sharded", False)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_killed_ranks_resume_with_the_same_bits(tmp_path: Path, framework: str, place: str, is_bf16: bool) -> None:
    options = PLACES[place]
    with World(RANKS) as world:
        expected = world.run(_train, framework, Job(tmp_path / "whole", options, is_bf16=is_bf16), timeout_s=150)
        world.start(_train, framework, Job(tmp_path / "killed", options, is_bf16=is_bf16, stop=STOP))
        with pytest.raises(
            RanksFailedError, match=r"rank 0 of 2: died with exit code -9(.|\n)*rank 1 of 2: died .* -9"
        ):
            world.results(150)
    with World(RANKS) as world:
        found = world.run(
            _train, framework, Job(tmp_path / "killed", options, is_bf16=is_bf16, resume=True), timeout_s=150
        )
    for mine, whole in zip(found, expected, strict=True):
        assert_alike(mine, whole, 0)


def _refused(framework: str, job: Job) -> str:
    with pytest.raises(ConfigError) as caught:
        _train(framework, job)
    job.end()
    return str(caught.value)


@pytest.mark.parametrize("place", ["RAM", "streamed"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_the_integration_ddp_is_refused_and_the_way_named(
    worlds: Worlds, tmp_path: Path, framework: str, place: str
) -> None:
    if framework == "lightning" and not ON_CPU:
        pytest.skip("Lightning asks for a stream of CUDA's before it wraps a model")
    for said in worlds(RANKS).run(_refused, framework, Job(tmp_path, PLACES[place], without=True), timeout_s=100):
        assert f"offload.integrations.{framework.replace('trainer', 'transformers')}" in said


def _saves_without_a_commit(path: Path) -> str:
    """Rank 0 alone asks for the state, as where nothing commits over all ranks."""
    torch.manual_seed(0)
    model = SmallLm()
    with OffloadZero(model, adamw(model), path=path / "run") as optimizer:
        token_loss(model, torch.stack(tokens(2)), torch.stack(tokens(2, seed=2))).backward()
        optimizer.step()
        if torch.distributed.get_rank():
            return ""
        with pytest.raises(ConfigError) as caught:
            optimizer.state_dict()
        return str(caught.value)


def test_saving_on_one_rank_without_a_commit_is_an_error_at_once(worlds: Worlds, tmp_path: Path) -> None:
    said, _ = worlds(RANKS).run(_saves_without_a_commit, tmp_path)
    assert "consolidate_state_dict()" in said
