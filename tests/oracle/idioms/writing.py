"""Code that writes parameters between steps, or inside a forward, and code that averages them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from tests.oracle.harness import RECOMPUTED, STREAMED, WRITTEN_AGAIN, Run, idiom
from tests.oracle.models import (
    VOCABULARY,
    WIDTH,
    Block,
    TinyLm,
    adamw,
    learn,
    token_batches,
    token_loss,
    vector_batches,
)

REPOINTED = dict.fromkeys(STREAMED, "`.data` is set to another tensor, whose memory a streamed parameter cannot keep")


def each_step(run: Run, model: nn.Module, optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """One step for each batch, which is yielded after it: what is done there is the idiom."""
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        yield tokens, targets


@idiom(
    "decays weights by hand before each step",
    source="huggingface/pytorch-image-models timm/optim/adamw.py:277",
)
def weight_decay_by_hand(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim > 1:
                    param.mul_(1 - 0.05)
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "clamps all weights of the critic after each step",
    source="eriklindernoren/PyTorch-GAN implementations/wgan/wgan.py:141",
)
def clamped_critic(run: Run) -> None:
    critic = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
    optimizer = run.hold(critic, torch.optim.AdamW(critic.parameters(), lr=5e-2))
    for real, fake in vector_batches(6, 6):
        loss = critic(fake).float().mean() - critic(real).float().mean()
        learn(optimizer, loss)
        for param in critic.parameters():
            param.data.clamp_(-0.1, 0.1)
        run.log(loss)
    run.log(critic)


class _ForcedNorm(nn.Linear):
    """Normalizes the stored weight in the training forward, and the used one always."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


class _ForcedNormLm(TinyLm):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.add_module("up", _ForcedNorm(WIDTH, 2 * WIDTH))
        self.head = _ForcedNorm(WIDTH, VOCABULARY)


@idiom(
    "layers write their normalized weight back in their forward",
    source="lucidrains/denoising-diffusion-pytorch denoising_diffusion_pytorch/karras_unet.py:155",
    refused=dict.fromkeys(RECOMPUTED, WRITTEN_AGAIN),
)
def weight_written_in_forward(run: Run) -> None:
    model = _ForcedNormLm()
    optimizer = run.hold(model, adamw(model))
    for _ in each_step(run, model, optimizer):
        run.log(*(param.detach().norm() for param in model.parameters()))
    run.log(model)


class _MaxNormPrototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.ELU(), nn.Linear(12, WIDTH))
        self.prototypes = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        self.prototypes.data = torch.renorm(self.prototypes.data, p=2, dim=0, maxnorm=1)
        return torch.einsum("bd,cd->bc", x, self.prototypes)


@idiom(
    "a forward sets .data to the weight with its rows' norms bounded",
    source="braindecode/braindecode braindecode/models/sstdpn.py:337",
)
def max_norm_in_forward(run: Run) -> None:
    model = _MaxNormPrototypes()
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(6, 3):
        loss = F.mse_loss(model(x).float(), target)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "a callback at the end of a batch bounds the norms of rows",
    source="braindecode/braindecode braindecode/training/callbacks.py:18",
    refused=REPOINTED,
)
def max_norm_after_step(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for _ in each_step(run, model, optimizer):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = torch.renorm(module.weight.data, 2, 0, maxnorm=0.6)
    run.log(model)


@idiom(
    "clamps the temperature under no_grad",
    source="mlfoundations/open_clip src/open_clip/task/image_text_task.py:101",
)
def clamped_temperature(run: Run) -> None:
    model = TinyLm(2)
    model.logit_scale = nn.Parameter(torch.tensor(0.02))
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        logits = model(tokens) * model.logit_scale.exp() * 8
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        learn(optimizer, loss)
        with torch.no_grad():
            model.logit_scale.clamp_(0.015, 0.025)
        run.log(loss, model.logit_scale)
    run.log(model)


@idiom(
    "projects matrices onto the sphere after each step",
    source="lucidrains/nGPT-pytorch nGPT_pytorch/nGPT.py:182",
)
def weights_on_the_sphere(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))

    @torch.no_grad()
    def project() -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(F.normalize(module.weight, dim=-1))

    project()
    for _ in each_step(run, model, optimizer):
        project()
    run.log(model)


@idiom(
    "scales two weights down when activations get large",
    source="lucidrains/x-transformers x_transformers/x_transformers.py:2154",
)
def clipped_by_activations(run: Run) -> None:
    model = TinyLm()
    largest: dict[nn.Module, float] = {}

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        largest[module] = output.detach().abs().max().item()

    for block in model.blocks:
        block.get_submodule("up").register_forward_hook(watch)
    optimizer = run.hold(model, adamw(model))
    for _ in each_step(run, model, optimizer):
        with torch.no_grad():
            for block in model.blocks:
                up, down = block.get_submodule("up"), block.get_submodule("down")
                factor = min(1.0, 1.0 / largest[up]) ** 0.5
                up.get_parameter("weight").mul_(factor)
                down.get_parameter("weight").mul_(factor)
    run.log(model)


class _Binarized(nn.Linear):
    """Uses the signs of its weight, and keeps the weight itself beside the parameter, as an attribute of it."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if not hasattr(weight, "org"):
            weight.org = weight.data.clone()
        weight.data.copy_(weight.org.sign())
        return F.linear(x, weight, self.bias)


@idiom(
    "trains real weights behind binary ones, kept in an attribute of the parameter",
    source="itayhubara/BinaryNet.pytorch main_mnist.py:115",
    refused=dict.fromkeys(RECOMPUTED, WRITTEN_AGAIN),
)
def binary_weights(run: Run) -> None:
    model = nn.Sequential(_Binarized(6, 12), nn.Hardtanh(), _Binarized(12, 12), nn.Hardtanh(), nn.Linear(12, 3))
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(6, 3):
        loss = F.mse_loss(model(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            if hasattr(param, "org"):
                param.data.copy_(param.org)
        optimizer.step()
        for param in model.parameters():
            if hasattr(param, "org"):
                param.org.copy_(param.data.clamp_(-1, 1))
        run.log(loss)
    run.log(model)


@idiom(
    "perturbs a vector of all parameters and sets them from it",
    source="DLR-RM/stable-baselines3 stable_baselines3/common/policies.py:193",
    refused=REPOINTED,
)
def parameters_from_vector(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for _ in each_step(run, model, optimizer):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        vector = vector + 1e-2 * torch.randn(vector.shape).to(vector)
        nn.utils.vector_to_parameters(vector, model.parameters())
    run.log(model)


@idiom("adds noise to all weights every second step", source="hy1224hy/Mut-DQN utils/add_noise.py:7")
def noise_on_weights(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for number, _ in enumerate(each_step(run, model, optimizer)):
        if number % 2:
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(torch.randn(param.size()) * 0.01)
    run.log(model)


@idiom(
    "resets layers by their own reset_parameters in the middle of training",
    source="kolaszko/haptic_transformer utils/model.py:5",
)
def layers_reset(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for number, _ in enumerate(each_step(run, model, optimizer)):
        if number == 2:
            for layer in model.blocks[2].children():
                reset: Any = layer
                reset.reset_parameters()
        if number == 3:
            nn.init.normal_(model.head.weight, std=0.02)
            nn.init.ones_(model.norm.weight)
    run.log(model)


@idiom("draws the weights of dormant neurons anew, by a mask", source="timoklein/redo src/redo.py:23")
def dormant_neurons_reset(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    layers: list[Any] = [layer for layer in model if isinstance(layer, nn.Linear)]
    optimizer = run.hold(model, adamw(model))
    for number, (x, target) in enumerate(vector_batches(6, 3)):
        loss = F.mse_loss(model(x).float(), target)
        learn(optimizer, loss)
        run.log(loss)
        if number % 2 == 0:
            for layer, after in itertools.pairwise(layers):
                mask = layer.weight.detach().norm(dim=1) < layer.weight.detach().norm(dim=1).median()
                layer.weight.data[mask, ...] = torch.empty_like(layer.weight.data[mask, ...]).uniform_(-0.3, 0.3)
                layer.bias.data[mask] = 0.0
                after.weight.data[:, mask] = 0.0
    run.log(model)


@idiom(
    "averages weights and then the statistics of batch normalization",
    source="pytorch/pytorch torch/optim/swa_utils.py:372",
    bf16=False,
)
def stochastic_weight_averaging(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    average = AveragedModel(model)
    batches = list(vector_batches(6, 3))
    for number, (x, target) in enumerate(batches):
        loss = F.mse_loss(model(x), target)
        learn(optimizer, loss)
        if number >= 2:
            average.update_parameters(model)
        run.log(loss)
    update_bn([x for x, _ in batches], average)
    average.eval()
    run.log(model, average, average(batches[0][0]))


@idiom(
    "averages parameters and buffers by a function of its own",
    source="Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/weight_averaging.py:157",
)
def averaged_by_own_function(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    average = AveragedModel(model, avg_fn=lambda mean, new, count: 0.8 * mean + 0.2 * new, use_buffers=True)
    for _ in each_step(run, model, optimizer):
        average.update_parameters(model)
    run.log(model, average.module)


@idiom(
    "swaps model and average for an evaluation, values with values",
    source="Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/weight_averaging.py:348",
)
def average_swapped_in(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    average = AveragedModel(model, avg_fn=lambda mean, new, count: 0.7 * mean + 0.3 * new)

    def swap() -> None:
        for mean, param in zip(average.module.parameters(), model.parameters(), strict=True):
            saved = mean.data.clone()
            mean.data.copy_(param.data)
            param.data.copy_(saved)

    for tokens, targets in each_step(run, model, optimizer):
        average.update_parameters(model)
        swap()
        model.eval()
        with torch.no_grad():
            run.log(token_loss(model, tokens, targets))
        model.train()
        swap()
    run.log(model, average.module)


@idiom(
    "points .data at averaged weights for an evaluation, and back",
    source="salesforce/awd-lstm-lm main.py:245",
    refused=REPOINTED,
)
def average_pointed_at(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    mean = {param: param.data.clone() for param in model.parameters()}
    for tokens, targets in each_step(run, model, optimizer):
        for param in model.parameters():
            mean[param].mul_(0.5).add_(param.data, alpha=0.5)
        saved = {}
        for param in model.parameters():
            saved[param] = param.data
            param.data = mean[param]
        with torch.no_grad():
            run.log(token_loss(model, tokens, targets))
        for param in model.parameters():
            param.data = saved[param]
    run.log(model, *mean.values())


@torch.no_grad()
def move_towards(targets: Iterable[Tensor], sources: Iterable[Tensor], weight: float) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, weight)


@idiom("keeps an average by lerp_ on tensors of its own", source="lucidrains/ema-pytorch ema_pytorch/ema_pytorch.py:42")
def average_by_lerp(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    mean = [param.detach().clone() for param in model.parameters()]
    for _ in each_step(run, model, optimizer):
        move_towards(mean, model.parameters(), 0.3)
    run.log(model, *mean)


@idiom("keeps averages at several rates by detach and add_", source="openai/guided-diffusion guided_diffusion/nn.py:65")
def averages_at_two_rates(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    means = {rate: copy.deepcopy(list(model.parameters())) for rate in (0.5, 0.9)}
    for _ in each_step(run, model, optimizer):
        for rate, mean in means.items():
            for target, source in zip(mean, model.parameters(), strict=True):
                target.detach().mul_(rate).add_(source.detach(), alpha=1 - rate)
    run.log(model, *means[0.5], *means[0.9])


@idiom(
    "keeps an average in a deep copy, by the values of both state dicts",
    source="huggingface/pytorch-image-models timm/utils/model_ema.py:123",
)
def average_in_deep_copy(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    average = copy.deepcopy(model).eval()
    for tokens, targets in each_step(run, model, optimizer):
        with torch.no_grad():
            for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(0.8 * mean + 0.2 * value)
            run.log(token_loss(average, tokens, targets))
    run.log(model, average)


@idiom(
    "keeps an average by one operation over the list of all parameters",
    source="huggingface/pytorch-image-models timm/utils/model_ema.py:228",
)
def average_by_foreach(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    average = copy.deepcopy(model).eval().requires_grad_(False)
    for _ in each_step(run, model, optimizer):
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight=0.2)
    run.log(model, average)


@idiom(
    "keeps an average that starts anew: a lerp from the model to it",
    source="NVlabs/stylegan3 training/training_loop.py:306",
)
def average_from_the_model(run: Run) -> None:
    model = TinyLm()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = run.hold(model, adamw(model))
    for _ in each_step(run, model, optimizer):
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.copy_(param.to(mean.dtype).lerp(mean, 0.6))
    run.log(model, average)


@idiom(
    "keeps an average of whatever floats in the state dict",
    source="ultralytics/yolov5 utils/torch_utils.py:367",
    bf16=False,
)
def average_of_state_dict(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    average = copy.deepcopy(model).eval()
    for x, target in vector_batches(6, 3):
        loss = F.mse_loss(model(x), target)
        learn(optimizer, loss)
        state = model.state_dict()
        with torch.no_grad():
            for name, value in average.state_dict().items():
                if value.dtype.is_floating_point:
                    value *= 0.9
                    value += 0.1 * state[name].detach()
        run.log(loss, average(x))
    run.log(model, average)


class _StoredAverage:
    """Shadow parameters that are copied into the model for an evaluation, and out again."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.shadow = [param.clone().detach() for param in params]
        self.stored: list[Tensor] = []

    @torch.no_grad()
    def step(self, params: Iterable[nn.Parameter]) -> None:
        for shadow, param in zip(self.shadow, params, strict=True):
            shadow.sub_(0.2 * (shadow - param))

    def copy_to(self, params: list[nn.Parameter]) -> None:
        torch._foreach_copy_([param.data for param in params], self.shadow)

    def store(self, params: Iterable[nn.Parameter]) -> None:
        self.stored = [param.detach().cpu().clone() for param in params]

    def restore(self, params: list[nn.Parameter]) -> None:
        torch._foreach_copy_([param.data for param in params], self.stored)

    @contextmanager
    def average(self, params: list[nn.Parameter]) -> Iterator[None]:
        self.store(params)
        self.copy_to(params)
        try:
            yield
        finally:
            self.restore(params)


@idiom(
    "stores parameters, copies the average in for an evaluation, and restores them",
    source="huggingface/diffusers src/diffusers/training_utils.py:907",
)
def average_copied_in(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    average = _StoredAverage(model.parameters())
    for tokens, targets in each_step(run, model, optimizer):
        average.step(model.parameters())
        average.store(model.parameters())
        average.copy_to(list(model.parameters()))
        with torch.no_grad():
            run.log(token_loss(model, tokens, targets))
        average.restore(list(model.parameters()))
    run.log(model, *average.shadow)


@idiom("evaluates the average in a context", source="fadel/pytorch_ema torch_ema/ema.py:207")
def average_in_a_context(run: Run) -> None:
    model = TinyLm()
    params = list(model.parameters())
    optimizer = run.hold(model, adamw(model))
    average = _StoredAverage(params)
    for number, (tokens, targets) in enumerate(each_step(run, model, optimizer)):
        average.step(params)
        if number % 2:
            with average.average(params), torch.inference_mode():
                run.log(token_loss(model, tokens, targets).item())
    run.log(model, *average.shadow)


@idiom(
    "writes a running model from averages and the weights at the start",
    source="huggingface/trl trl/trainer/callbacks.py:732",
)
def bias_corrected_average(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    running = copy.deepcopy(model)
    current = [param for _, param in model.named_parameters()]
    start = [param.detach().clone() for param in current]
    means = [param.detach().clone() for param in current]
    for number, _ in enumerate(each_step(run, model, optimizer)):
        with torch.no_grad():
            for now, first, mean, out in zip(current, start, means, running.parameters(), strict=True):
                value = now.detach().to("cpu")
                mean.mul_(0.6).add_(value, alpha=0.4)
                out.copy_(mean + (value - first) / (number + 1))
    run.log(model, running)


@idiom(
    "the teacher is an average of the student, and the student agrees with it",
    source="CuriousAI/mean-teacher pytorch/main.py:193",
)
def mean_teacher(run: Run) -> None:
    model, teacher = TinyLm(2), TinyLm(2)
    for param in teacher.parameters():
        param.detach_()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        logits = model(tokens).float()
        agreement = F.mse_loss(logits.softmax(-1), teacher(tokens).float().softmax(-1))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 100 * agreement
        learn(optimizer, loss)
        for mean, param in zip(teacher.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.5).add_(param.data, alpha=0.5)
        run.log(loss, agreement)
    run.log(model, teacher)


class _Contrast(nn.Module):
    """A query encoder, a key encoder that follows it inside the forward, and a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.key = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data.copy_(query.data)
            key.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, 10), dim=0))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                key.mul_(0.7).add_(query.mul(0.3))
            k = F.normalize(self.key(other), dim=1)
        queue = self.get_buffer("queue")
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone().detach()], dim=1) / 0.2
        queue.copy_(torch.cat([queue, k.t()], dim=1)[:, -10:])
        return logits


@idiom(
    "a key encoder in the model follows the query encoder inside the forward",
    source="facebookresearch/moco moco/builder.py:73",
    bf16=False,
)
def momentum_contrast(run: Run) -> None:
    model = _Contrast()
    optimizer = run.hold(model, adamw(model))
    for x, _ in vector_batches(6, 1):
        logits = model(x, x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "a target encoder gets new .data, an average of its own and the online weights",
    source="lucidrains/byol-pytorch byol_pytorch/byol_pytorch.py:122",
)
def bootstrap_your_own_latent(run: Run) -> None:
    online: Any = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 6))
    target: Any = None
    optimizer = run.hold(online, adamw(online))
    for x, noise in vector_batches(6, 6):
        if target is None:
            target = copy.deepcopy(online[:3]).requires_grad_(False)
        one, other = (x + 0.1 * noise).to(online[0].weight.dtype), x.to(online[0].weight.dtype)
        with torch.no_grad():
            wanted = target(other)
        loss = (2 - 2 * F.cosine_similarity(online(one).float(), wanted.float(), dim=-1)).mean()
        learn(optimizer, loss)
        for mean, param in zip(target.parameters(), online[:3].parameters(), strict=True):
            mean.data = mean.data * 0.6 + 0.4 * param.data
        run.log(loss)
    run.log(online, target)


@idiom(
    "a target network follows softly, and hard at last",
    source="vwxyzjn/cleanrl cleanrl/dqn.py:217",
)
def target_network(run: Run) -> None:
    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = run.hold(network, adamw(network))
    target: Any = copy.deepcopy(network)
    target.load_state_dict(network.state_dict())
    for number, (now, after) in enumerate(vector_batches(6, 6)):
        actions = torch.randint(3, (len(now), 1))
        with torch.no_grad():
            wanted = now[:, 0] + 0.9 * target(after.to(target[0].weight.dtype)).float().max(1).values
        loss = F.mse_loss(network(now).float().gather(1, actions).squeeze(1), wanted)
        learn(optimizer, loss)
        run.log(loss, wanted.mean())
        if number == 4:
            target.load_state_dict(network.state_dict())
        else:
            for mean, param in zip(target.parameters(), network.parameters(), strict=True):
                mean.data.copy_(0.3 * param.data + 0.7 * mean.data)
    run.log(network, target)


@torch.no_grad()
def climb(model: nn.Module, radius: float) -> dict[nn.Parameter, Tensor]:
    """Adds the scaled gradient to all parameters. Returns: what was added."""
    grads = {param: param.grad for param in model.parameters() if param.grad is not None}
    norm = torch.norm(torch.stack([grad.norm(p=2) for grad in grads.values()]), p=2)
    steps = {param: grad * (radius / (norm + 1e-12)).to(param) for param, grad in grads.items()}
    for param, step in steps.items():
        param.add_(step)
    return steps


@idiom(
    "climbs by the gradient, takes that of the second backward, and subtracts what it added",
    source="csdongxian/AWP AT_AWP/awp.py:55",
)
def climbs_and_subtracts(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        steps = climb(model, 0.05)
        optimizer.zero_grad()
        sharp = token_loss(model, tokens, targets)
        sharp.backward()
        for param, step in steps.items():
            param.data.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss, sharp)
    run.log(model)


@idiom(
    "climbs by the gradient and points .data back at the weights before",
    source="davda54/sam sam.py:34",
    refused=REPOINTED,
)
def climbs_and_points_back(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        before = {param: param.data.clone() for param in model.parameters()}
        climb(model, 0.05)
        optimizer.zero_grad()
        sharp = token_loss(model, tokens, targets)
        sharp.backward()
        for param in model.parameters():
            param.data = before[param]
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss, sharp)
    run.log(model)


@idiom(
    "perturbs weights by gradients of torch.autograd.grad for each step, and restores them",
    source="csdongxian/AWP AT_AWP/awp.py:36",
)
def adversarial_weights(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        before = copy.deepcopy([param.data for param in model.parameters()])
        grads = torch.autograd.grad(token_loss(model, tokens, targets), list(model.parameters()))
        with torch.no_grad():
            for param, grad in zip(model.parameters(), grads, strict=True):
                if param.ndim > 1:
                    param.add_(0.05 * grad * param.norm() / (grad.norm() + 1e-12))
        added = [param.detach() - old for param, old in zip(model.parameters(), before, strict=True)]
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        for param, step in zip(model.parameters(), added, strict=True):
            param.data.sub_(step.data)
        run.log(loss)
    run.log(model)


@idiom("goes back half way to slow weights every second step", source="alphadl/lookahead.pytorch lookahead.py:26")
def lookahead(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    slow: dict[nn.Parameter, Tensor] = {}
    for number, _ in enumerate(each_step(run, model, optimizer)):
        if number % 2:
            for fast in model.parameters():
                if fast not in slow:
                    slow[fast] = torch.zeros_like(fast.data)
                    slow[fast].copy_(fast.data)
                slow[fast] += (fast.data - slow[fast]) * 0.5
                fast.data.copy_(slow[fast])
    run.log(model, *slow.values())


class _Adapted(nn.Module):
    """A frozen linear layer and a low-rank one, merged into it while the module is in eval mode."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))
        self.merged = False

    def train(self, mode: bool = True) -> _Adapted:
        super().train(mode)
        if mode == self.merged:
            delta = (self.up @ self.down) * 2.0
            if mode:
                self.base.weight.data -= delta
            else:
                self.base.weight.data += delta
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out if self.merged else out + F.linear(F.linear(x, self.down), self.up) * 2.0


@idiom("merges low-rank weights for each evaluation", source="microsoft/LoRA loralib/layers.py:141", bf16=False)
def low_rank_weights_merged(run: Run) -> None:
    model = TinyLm()
    model.requires_grad_(False)
    for block in model.blocks:
        block.add_module("up", _Adapted(block.get_submodule("up")))  # type: ignore[arg-type]
    optimizer = run.hold(
        model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    )
    for tokens, targets in each_step(run, model, optimizer):
        model.eval()
        with torch.no_grad():
            run.log(token_loss(model, tokens, targets))
        model.train()
    run.log(model)


@idiom(
    "adds the product of trained matrices to a trained base, and goes on",
    source="huggingface/peft src/peft/tuners/lora/layer.py:969",
)
def merged_and_trained_on(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for number, _ in enumerate(each_step(run, model, optimizer)):
        if number == 2:
            with torch.no_grad():
                for block in model.blocks:
                    up, down = block.get_parameter("up.weight"), block.get_parameter("down.weight")
                    delta = up @ down @ up * 0.1
                    if torch.isfinite(delta).all():
                        up.data += delta
    run.log(model)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.second):
            x = block(x)
        out: Tensor = self.head(x)
        return out


@idiom(
    "copies the first blocks' weights into the second ones, by operations on the list",
    source="timgaripov/swa utils.py:76",
)
def blocks_mixed(run: Run) -> None:
    model = _Blocks()
    optimizer = run.hold(model, adamw(model))
    for number, (x, target) in enumerate(vector_batches(WIDTH, 3)):
        loss = F.mse_loss(model(x).float(), target)
        learn(optimizer, loss)
        run.log(loss)
        if number % 2:
            for one, other in zip(model.first.parameters(), model.second.parameters(), strict=True):
                one.data *= 0.8
                one.data += other.data * 0.2
    run.log(model)
