"""Other people's frameworks with their defaults, and models of transformers, trained as with torch's AdamW.

A held model and its optimizer are given to the framework as a model and an optimizer are. The oracle is the same
framework with AdamW. Checkpoints of the frameworks are off. On the simulated accelerator the model is made on the CPU,
and the framework moves the plain one: OffloadZero is told the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offload import OffloadZero
from tests.oracle.harness import TIERS, Idiom, Run, check
from tests.oracle.models import STEPS, TinyLm, token_loss
from tests.peers import devices
from tests.peers.devices import ON_CPU, alone
from tests.peers.test_transformers import llama
from tests.support.device import DEVICE

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
peft = pytest.importorskip("peft")

__all__ = ["alone"]
HELD = [placement for placement in TIERS if placement != "device" or not ON_CPU]
EPS = 1e-5
"""Of AdamW. The gradient of a key's bias is 0 but for rounding, which AdamW's default would blow up to whole steps."""


def assert_as_with_adamw(
    train: Callable[..., None], placement: str, path: Path, *, moves: bool = True, **how: Any
) -> None:
    check(Idiom("framework", "", "", partial(train, path=path, **how), moves=moves), placement, path)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-3, "eps": EPS} | options))


def tokens(count: int, *, vocabulary: int = 64, length: int = 12, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(2, vocabulary, (count, length), generator=generator))


# transformers


def with_trainer(
    run: Run, *, path: Path, kind: str, accumulation: int = 1, adapts: bool = False, **arguments: Any
) -> None:
    model = llama(kind)()
    if adapts:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    few = {} if ON_CPU or not adapts else {"grad_tier": None}  # those stay on a device, and gradients near them
    optimizer = run.hold(model, adamw(model), accumulation=accumulation, device=DEVICE, **few)
    rows = [{"input_ids": row, "labels": row} for row in tokens(4 * STEPS * accumulation)]
    arguments = {"max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1} | arguments
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=path / "trainer",
            use_cpu=ON_CPU,
            save_strategy="no",
            report_to=[],
            gradient_accumulation_steps=accumulation,
            **arguments,
        ),
        train_dataset=rows,
        eval_dataset=rows[:8],
        optimizers=(optimizer, None),
    )
    trainer.train()
    assert {param.device.type for param in model.parameters()} == {trainer.args.device.type} == {DEVICE}
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    for entry in logged:
        run.log({name: entry[name] for name in ("loss", "grad_norm", "learning_rate")})
    run.log(trainer.evaluate()["eval_loss"], model)


TRAINERS: dict[str, dict[str, Any]] = {
    "defaults": {"kind": "Llama"},
    "biases": {"kind": "Qwen2"},
    "adapters": {"kind": "Llama", "adapts": True},
    "accumulating": {"kind": "Llama", "accumulation": 2},
    "without clipping": {"kind": "Llama", "max_grad_norm": 0.0},
    "evaluating": {"kind": "Llama", "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "cosine"},
    "checkpointing activations": {"kind": "Llama", "gradient_checkpointing": True},
    "smoothing labels": {"kind": "Llama", "label_smoothing_factor": 0.1, "warmup_steps": 2},
}


@pytest.mark.parametrize("placement", HELD)
@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_trains_clips_and_logs(name: str, placement: str, tmp_path: Path) -> None:
    assert_as_with_adamw(with_trainer, placement, tmp_path, **TRAINERS[name])


@pytest.mark.filterwarnings("default")
def test_trainer_that_was_not_given_the_optimizer_warns_once(tmp_path: Path) -> None:
    model = llama("Llama")()
    rows = [{"input_ids": row, "labels": row} for row in tokens(4 * STEPS)]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, use_cpu=ON_CPU, save_strategy="no", report_to=[], max_steps=STEPS
    )
    with (
        OffloadZero(model, adamw(model), device=DEVICE),
        pytest.warns(UserWarning, match="another optimizer, AdamW") as caught,
    ):
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert len([one for one in caught if "another optimizer" in str(one.message)]) == 1


# accelerate


def loader_of(*, batches: int = STEPS) -> DataLoader[Any]:
    return DataLoader(list(zip(tokens(4 * batches), tokens(4 * batches, seed=2), strict=True)), batch_size=4)


class SmallLm(TinyLm):
    """With the vocabulary of `tokens`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)


def with_accelerate(run: Run, *, path: Path, accumulation: int = 1, mixed_precision: str = "no") -> None:
    accelerator = accelerate.Accelerator(
        cpu=ON_CPU, gradient_accumulation_steps=accumulation, mixed_precision=mixed_precision
    )
    model = SmallLm()
    optimizer = run.hold(model, adamw(model), accumulation=accumulation, device=DEVICE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = loader_of(batches=STEPS * accumulation)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = token_loss(model, inputs, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                run.log(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        run.log(accelerator.gather(loss.detach()), schedule.get_last_lr()[0])
    assert not optimizer.step_was_skipped
    assert {param.device.type for param in model.parameters()} == {accelerator.device.type} == {DEVICE}
    run.log(accelerator.unwrap_model(model))
    accelerator.end_training()


def with_accelerate_in_fp16(run: Run, *, path: Path) -> None:
    """Accelerate makes a scaler on GPUs only, so here it is given one. The first steps are skipped."""
    accelerator = accelerate.Accelerator(cpu=ON_CPU)
    accelerator.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**22)
    model = SmallLm()
    optimizer = run.hold(model, adamw(model), device=DEVICE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of())
    for inputs, targets in loader:
        with torch.autocast(DEVICE, torch.float16):
            loss = token_loss(model, inputs, targets)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss, accelerator.scaler.get_scale())
        if norm.isfinite():
            run.log(norm)
    assert accelerator.scaler.get_scale() < 2.0**22
    run.log(accelerator.unwrap_model(model))
    accelerator.end_training()


def with_accelerate_preparing_first(run: Run, *, path: Path) -> None:
    """The optimizer is made of what `prepare` returned, model and AdamW."""
    accelerator = accelerate.Accelerator(cpu=ON_CPU)
    model = SmallLm()
    model, prepared, loader = accelerator.prepare(model, adamw(model), loader_of())
    optimizer = run.hold(model, prepared)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = token_loss(model, inputs, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        run.log(loss)
    run.log(accelerator.unwrap_model(model))
    accelerator.end_training()


ACCELERATED: dict[str, Callable[..., None]] = {
    "defaults": with_accelerate,
    "accumulating": partial(with_accelerate, accumulation=2),
    "bf16": partial(with_accelerate, mixed_precision="bf16"),
    "fp16": with_accelerate_in_fp16,
    "prepared first": with_accelerate_preparing_first,
}


@pytest.mark.parametrize("placement", HELD)
@pytest.mark.parametrize("name", ACCELERATED)
def test_accelerate_trains_clips_and_logs(name: str, placement: str, tmp_path: Path) -> None:
    assert_as_with_adamw(ACCELERATED[name], placement, tmp_path)


# Lightning


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """Args: holds_inner: whether the model inside is held, and not this module."""

    def __init__(self, run: Run, *, holds_inner: bool, accumulation: int) -> None:
        super().__init__()
        self.net = SmallLm()
        self._run = [run]  # no part of the module
        self._holds_inner, self._accumulation = holds_inner, accumulation

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs)
        return out

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, targets = batch
        loss = token_loss(self, inputs, targets)
        self.log("loss", loss, prog_bar=True)
        self._run[0].log(loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("found", token_loss(self, *batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = lightning.pytorch.utilities.grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self._run[0].log({name: torch.nan_to_num(norm, -1.0, -1.0) for name, norm in norms.items()})  # fp16 overflows

    def configure_optimizers(self) -> Any:
        model = self.net if self._holds_inner else self
        optimizer = self._run[0].hold(model, adamw(model), accumulation=self._accumulation)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class Manual(Lit):
    """Steps by itself."""

    def __init__(self, run: Run, **how: Any) -> None:
        super().__init__(run, **how)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        loss = token_loss(self, *batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()
        self._run[0].log(loss)


def mixed(precision: str) -> Any:
    """With a loss scale of which the first steps are skipped."""
    from offload.integrations.lightning import OffloadPrecision

    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**22) if precision == "16-mixed" else None
    return OffloadPrecision(precision, DEVICE, scaler)


def with_lightning(
    run: Run,
    *,
    path: Path,
    kind: type[Lit] = Lit,
    holds_inner: bool = False,
    accumulation: int = 1,
    averages: bool = False,
    precision: str | None = None,
    **arguments: Any,
) -> None:
    if precision is not None:
        arguments["plugins"] = [mixed(precision)]
    model = kind(run, holds_inner=holds_inner, accumulation=accumulation)
    callbacks = [lightning.pytorch.callbacks.LearningRateMonitor()]
    if averages:
        callbacks.append(lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.8))
    trainer = lightning.Trainer(
        max_epochs=2,
        **devices.for_lightning(),
        logger=lightning.pytorch.loggers.CSVLogger(path / "lightning"),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accumulate_grad_batches=accumulation,
        default_root_dir=path / "lightning",
        callbacks=callbacks,
        **arguments,
    )
    assert trainer.strategy.root_device.type == DEVICE
    batches = STEPS // 2 * accumulation
    trainer.fit(model, loader_of(batches=batches), loader_of(batches=1))
    run.log(trainer.callback_metrics["found"], model)
    if precision == "16-mixed":
        run.log(trainer.precision_plugin.scaler.get_scale())
        assert trainer.precision_plugin.scaler.get_scale() < 2.0**22


LIGHTNING: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clipping norms": {"gradient_clip_val": 0.3},
    "clipping values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulating": {"accumulation": 2, "gradient_clip_val": 0.3},
    "inner model held": {"holds_inner": True, "gradient_clip_val": 0.3},
    "manual optimization": {"kind": Manual},
    "averaging weights": {"averages": True},
    "detecting anomalies": {"detect_anomaly": True},
    "fp16, clipping norms": {"precision": "16-mixed", "gradient_clip_val": 0.3},
    "bf16, clipping norms": {"precision": "bf16-mixed", "gradient_clip_val": 0.3},
}


@pytest.mark.parametrize("placement", HELD)
@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_trains_clips_and_logs(name: str, placement: str, tmp_path: Path) -> None:
    assert_as_with_adamw(with_lightning, placement, tmp_path, **LIGHTNING[name])


def with_fabric(run: Run, *, path: Path) -> None:
    fabric = lightning.Fabric(**devices.for_lightning("fabric"))
    fabric.launch()
    model = SmallLm()
    optimizer = run.hold(model, adamw(model), device=DEVICE)
    model, optimizer = fabric.setup(model, optimizer)
    for inputs, targets in fabric.setup_dataloaders(loader_of()):
        optimizer.zero_grad()
        loss = token_loss(model, inputs, targets)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.4)
        optimizer.step()
        run.log(loss, norm)
    run.log(model.module)


@pytest.mark.parametrize("placement", HELD)
def test_fabric_trains_and_clips(placement: str, tmp_path: Path) -> None:
    assert_as_with_adamw(with_fabric, placement, tmp_path)


def test_optimizers_that_lightning_has_wrapped_are_unwrapped() -> None:
    for wrap in (lightning.Fabric(**devices.for_lightning("fabric")).setup_optimizers, wrapped_by_trainer):
        model = SmallLm()
        inner = adamw(model)
        with OffloadZero(model, wrap(inner)) as optimizer:
            assert optimizer.param_groups[0] is inner.param_groups[0]


def wrapped_by_trainer(optimizer: torch.optim.Optimizer) -> Any:
    return lightning.pytorch.core.optimizer.LightningOptimizer(optimizer)


# Models of transformers, in a loop of one's own.

VISION: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 3}
SPEECH: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 12,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def beit(**more: Any) -> Any:
    """Position tables for all layers in one, or in each; its windows index them in every forward."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BeitForImageClassification(transformers.BeitConfig(**VISION, **sizes, **more))


def swin() -> Any:
    config = transformers.SwinConfig(**VISION, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2)
    return transformers.SwinForImageClassification(config)


def t5() -> Any:
    """The position table of block 0 serves all blocks."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=3,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def speech(kind: str, *, old_style: bool) -> Any:
    """Its positions are a convolution under weight norm, the parametrization or the old hook on the module."""
    with pytest.MonkeyPatch.context() as patch:
        if old_style:
            patch.delattr(nn.utils.parametrizations, "weight_norm")
        model = getattr(transformers, f"{kind}ForCTC")(getattr(transformers, f"{kind}Config")(**SPEECH))
    names = [name for name, _ in model.named_parameters() if "pos_conv_embed" in name]
    assert any("weight_g" in name for name in names) == old_style, names
    return model


def images(model: Any, count: int) -> Tensor:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(count))
    found: Tensor = model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    return found


def pairs(model: Any, count: int) -> Tensor:
    source, target = torch.stack(tokens(2, seed=count)), torch.stack(tokens(2, seed=count + 50))
    found: Tensor = model(input_ids=source, labels=target).loss
    return found


def waves(model: Any, count: int) -> Tensor:
    samples = torch.randn(2, 400, generator=torch.Generator().manual_seed(count))
    logits = model(input_values=samples).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])  # CTC's gradients are less exact


def texts(model: Any, count: int) -> Tensor:
    rows = torch.stack(tokens(2, seed=count))
    found: Tensor = model(input_ids=rows, labels=rows).loss
    return found


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Tensor]]] = {
    "beit, one table": (partial(beit, use_shared_relative_position_bias=True), images),
    "beit, a table a layer": (partial(beit, use_relative_position_bias=True), images),
    "swin": (swin, images),
    "t5": (t5, pairs),
    "wav2vec2": (partial(speech, "Wav2Vec2", old_style=False), waves),
    "wav2vec2, old weight norm": (partial(speech, "Wav2Vec2", old_style=True), waves),
    "hubert, old weight norm": (partial(speech, "Hubert", old_style=True), waves),
}


def with_own_loop(run: Run, *, path: Path, name: str) -> None:
    build, loss_of = MODELS[name]
    model = build().train().to(DEVICE)  # torch.Tensor(n) in a constructor knows no default device
    optimizer = run.hold(model, adamw(model))
    for count in range(STEPS):
        torch.manual_seed(count)  # dropout
        loss = loss_of(model, count)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss, norm)
        if count % 2:
            with torch.no_grad():
                run.log(loss_of(model.eval(), count + 20))
            model.train()
    run.log(model)


@pytest.mark.parametrize("placement", HELD)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_with_adamw(name: str, placement: str, tmp_path: Path) -> None:
    assert_as_with_adamw(with_own_loop, placement, tmp_path, name=name, moves=False)


def with_average(run: Run, *, path: Path, multi: bool) -> None:
    """torch's AveragedModel, which copies the held model and is updated after each step, evaluates at the end."""
    model = llama("Llama")()
    optimizer = run.hold(model, adamw(model))
    swa = torch.optim.swa_utils
    how = {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.8)} if multi else {"avg_fn": swa.get_ema_avg_fn(0.8)}
    average = swa.AveragedModel(model, **how)
    for count in range(STEPS):
        loss = texts(model, count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        run.log(loss)
    with torch.no_grad():
        run.log(texts(average.module, 30))
    run.log(model, average.module)


@pytest.mark.parametrize("placement", HELD)
@pytest.mark.parametrize("multi", [False, True], ids=["one by one", "all at once"])
def test_average_of_weights_follows(multi: bool, placement: str, tmp_path: Path) -> None:
    assert_as_with_adamw(with_average, placement, tmp_path, multi=multi, moves=False)


def with_penalty(run: Run, *, path: Path, of_parameters: bool) -> None:
    """The loss has the norm of its own gradient in it, for the embedded inputs or for the parameters."""
    model = llama("Llama", attn_implementation="eager")()
    optimizer = run.hold(model, adamw(model))
    for count in range(STEPS):
        rows = torch.stack(tokens(2, seed=count))
        embedded = model.get_input_embeddings()(rows)
        logits = model(inputs_embeds=embedded).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows.flatten())
        of = list(model.model.layers.parameters()) if of_parameters else [embedded]
        penalty = sum(g.float().pow(2).sum() for g in torch.autograd.grad(loss, of, create_graph=True))
        (loss + penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss, penalty)
    run.log(model)


@pytest.mark.parametrize("placement", HELD)
@pytest.mark.parametrize("of_parameters", [False, True], ids=["of inputs", "of parameters"])
def test_gradient_penalty_counts(of_parameters: bool, placement: str, tmp_path: Path) -> None:
    assert_as_with_adamw(with_penalty, placement, tmp_path, of_parameters=of_parameters, moves=False)
