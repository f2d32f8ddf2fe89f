"""Models of images, trained as diffusers and timm train them: the bits of the same loop and plain torch's SGD.

The loops are those of diffusers' train_unconditional.py and of timm's train.py, with what these take from the library:
noise schedules, averaged weights, schedules of the learning rate, groups without weight decay, clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import OffloadZero, Tuning

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

STEPS = 4
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"tier": "cpu"},
    "streamed from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from nvme": {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
}
Hold = Callable[[nn.Module, torch.optim.Optimizer], Any]


def images(count: int) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(count))


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
    )


def transformer() -> Any:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.DiTTransformer2DModel(
        sample_size=8, in_channels=3, patch_size=2, num_layers=3, num_attention_heads=2, attention_head_dim=8,
        num_embeds_ada_norm=4,
    )  # fmt: skip


def with_diffusers(build: Callable[[], Any], hold: Hold) -> tuple[list[Any], nn.Module, Any]:
    accelerate = pytest.importorskip("accelerate")
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build().train()
    averages = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)
    noises = DDPMScheduler(num_train_timesteps=50)
    optimizer = hold(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    rates = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    loader = torch.utils.data.DataLoader(list(range(2 * STEPS)))
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    logged: list[Any] = []
    for number in loader:
        clean, count = images(int(number)), int(number)
        generator = torch.Generator().manual_seed(count)
        noise = torch.randn(clean.shape, generator=generator)
        times = torch.randint(0, 50, (len(clean),), generator=generator)
        noisy = noises.add_noise(clean, noise, times)
        with accelerator.accumulate(model):
            classes = {"class_labels": times % 4} if build is transformer else {}
            made = model(noisy, times, **classes).sample
            loss = F.mse_loss(made[:, :3].float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            averages.step(model.parameters())
        logged.append((loss.item(), rates.get_last_lr()[0]))
    model = accelerator.unwrap_model(model)
    averages.store(model.parameters())
    averages.copy_to(model.parameters())
    with torch.no_grad():
        averaged = model(images(0), torch.ones(4, dtype=torch.int64), **classes).sample
    averages.restore(model.parameters())
    accelerator.end_training()
    return [*logged, averaged, *averages.shadow_params], model, optimizer.optimizer


def with_timm(hold: Hold) -> tuple[list[Any], nn.Module, Any]:
    try:
        from timm.loss import LabelSmoothingCrossEntropy
        from timm.models import VisionTransformer
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler
        from timm.utils import ModelEmaV3, dispatch_clip_grad
    except (ImportError, RuntimeError) as error:  # torchvision's operators may be those of another build of torch
        pytest.skip(f"timm: {error}")
    model = VisionTransformer(
        img_size=8, patch_size=2, embed_dim=16, depth=3, num_heads=2, num_classes=5, drop_path_rate=0.2
    ).train()
    averages = ModelEmaV3(model, decay=0.9)
    optimizer = hold(model, create_optimizer_v2(model, opt="momentum", lr=0.05, weight_decay=0.1, momentum=0.9))
    rates = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=1, warmup_lr_init=1e-3, t_in_epochs=False)
    loss_of = LabelSmoothingCrossEntropy(0.1)
    logged: list[Any] = []
    for count in range(STEPS):
        for half in range(2):
            x = images(2 * count + half)
            loss = loss_of(model(x), torch.arange(len(x)) % 5)
            (loss / 2).backward()
            logged.append(loss.item())
        dispatch_clip_grad(model.parameters(), 1e3, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        averages.update(model, step=count)
        rates.step_update(count + 1)
        logged.append(optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        logged += [model.eval()(images(0)), averages(images(0))]
    return logged, model, optimizer


LOOPS: dict[str, Callable[[Hold], tuple[list[Any], nn.Module, Any]]] = {
    "UNet": lambda hold: with_diffusers(unet, hold),
    "DiT": lambda hold: with_diffusers(transformer, hold),
    "ViT": with_timm,
}


def trained(name: str, hold: Hold) -> tuple[list[Any], dict[str, Tensor], Any]:
    torch.manual_seed(0)
    logged, model, optimizer = LOOPS[name](hold)
    return logged, {key: value.clone() for key, value in model.state_dict().items()}, optimizer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_have_the_bits_of_plain_torch(name: str, place: str, tmp_path: Path) -> None:
    def hold(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        about = {"compute_dtype": torch.float32, "accumulation": 2, "path": tmp_path, "commit_every": 0}
        return OffloadZero(model, optimizer, **about, **PLACES[place])

    expected, state, _ = trained(name, lambda _, optimizer: optimizer)
    found, values, optimizer = trained(name, hold)
    assert optimizer.stats()["step"] == STEPS
    optimizer.close()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert [key for key, value in state.items() if not torch.equal(values[key], value)] == []
    assert values.keys() == state.keys()
