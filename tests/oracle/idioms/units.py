"""What meets units, tiles and recomputation: modules that get one tensor twice, functions that keep weights, several
heads, adapters that come and go, compiled blocks, averages of many weights at once."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.harness import PLACEMENTS, Run, idiom
from tests.oracle.idioms.loops import FIXED
from tests.oracle.models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    TinyLm,
    adamw,
    learn,
    token_batches,
    token_loss,
    train_tokens,
)


class _AttentionLm(TinyLm):
    """The blocks are torch's attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for attention in self.blocks:
            x = x + attention(x, x, x, need_weights=False)[0]
        out: Tensor = self.head(self.norm(x))
        return out


@idiom(
    "blocks are torch's attention, which asks whether query, key and value are one tensor",
    source="pytorch/pytorch torch/nn/modules/activation.py:1459",
)
def attention_is_a_block(run: Run) -> None:
    # The bias of the keys has no gradient but rounding.
    train_tokens(run, _AttentionLm(), eps=1e-4)


class _CrossAttention(nn.Module):
    """Attends to itself with one packed projection if it gets one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.own = nn.Linear(WIDTH, 3 * WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        if context is x:
            query, key, value = self.own(self.norm(x)).chunk(3, -1)
        else:
            query, (key, value) = self.query(self.norm(x)), self.memory(context).chunk(2, -1)
        return x + F.scaled_dot_product_attention(query, key, value)


class _CrossLm(TinyLm):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_CrossAttention() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.embedding(tokens)
        x = first
        for number, block in enumerate(self.blocks):
            x = block(x, first if number == 1 else x)
        out: Tensor = self.head(self.norm(x))
        return out


@idiom(
    "cross-attention becomes self-attention where it gets one tensor twice",
    source="pytorch/pytorch torch/nn/functional.py:6227",
)
def cross_attention_to_itself(run: Run) -> None:
    train_tokens(run, _CrossLm(), eps=1e-4)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        own = grad * weight
        along = (own * x * scale).mean(-1, keepdim=True)
        return scale * (own - x * scale * along), (grad * x * scale).flatten(0, -2).sum(0)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _FusedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(_FusedNorm.apply(x, self.norm.weight))  # type: ignore[no-untyped-call]
        out: Tensor = x + _FusedLinear.apply(F.gelu(up), self.down.weight)  # type: ignore[no-untyped-call]
        return out


class _FusedLm(TinyLm):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_FusedBlock() for _ in range(3))


@idiom(
    "blocks use autograd functions that keep their weights",
    source="linkedin/Liger-Kernel src/liger_kernel/ops/rms_norm.py:657",
)
def functions_in_blocks_keep_weights(run: Run) -> None:
    train_tokens(run, _FusedLm())


class _FusedCrossEntropy(torch.autograd.Function):
    """The head and the loss of its logits, which are made again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        return F.cross_entropy((x @ weight.t()).float(), targets)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, targets = ctx.saved_tensors
        (grad,) = grads
        apart = (x @ weight.t()).float().softmax(-1) - F.one_hot(targets, len(weight))
        of_logits = (grad * apart / len(targets)).to(x.dtype)
        return of_logits @ weight, of_logits.t() @ x, None


class _FusedLossLm(TinyLm):
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        apply: Any = _FusedCrossEntropy.apply
        loss: Tensor = apply(self.norm(x).flatten(0, 1), self.head.weight, targets.flatten())
        return loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(tokens, targets)


@idiom(
    "head and loss are one autograd function, which keeps the head's weight",
    source="linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py:417",
)
def fused_head_and_loss(run: Run) -> None:
    model = _FusedLossLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = model(tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _TwoHeads(TinyLm):
    def __init__(self) -> None:
        super().__init__()
        self.v_head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor, heads: str = "both") -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x).float() if heads != "value" else None
        value = self.v_head(x).squeeze(-1).float() if heads != "logits" else None
        return logits, value


@idiom(
    "a head for tokens and one for values, together and each alone",
    source="huggingface/trl trl/experimental/ppo/modeling_value_head.py:71",
)
def two_heads(run: Run) -> None:
    model = _TwoHeads()
    optimizer = run.hold(model, adamw(model))
    for number, (tokens, targets) in enumerate(token_batches()):
        logits, value = model(tokens, ("both", "logits", "value")[number % 3])
        loss = torch.zeros(())
        if logits is not None:
            loss = loss + F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if value is not None:
            loss = loss + 0.5 * F.mse_loss(value, targets.float() / VOCABULARY)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _Adapter(nn.Module):
    """A frozen layer, and a trained product of small matrices beside it that can be switched off."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)
        self.disabled = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out if self.disabled else out + self.lora_b(self.lora_a(x))


def _adapted_lm() -> TinyLm:
    model = TinyLm().requires_grad_(False)
    for block in model.blocks:
        block.add_module("up", _Adapter(block.up))  # type: ignore[arg-type]
    return model


def _adapters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    adapters = [module for module in model.modules() if isinstance(module, _Adapter)]
    for adapter in adapters:
        adapter.disabled = True
    yield
    for adapter in adapters:
        adapter.disabled = False


def _likelihood(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    found = model(tokens).float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    return found.squeeze(-1).sum(-1)


@idiom(
    "DPO: the model without its adapters is the reference, between the policy's forwards and their backward",
    source="huggingface/trl trl/trainer/utils.py:1228",
)
def reference_without_adapters(run: Run) -> None:
    model = _adapted_lm()
    optimizer = run.hold(model, torch.optim.AdamW(_adapters(model), lr=1e-2))
    for (tokens, chosen), (_, rejected) in zip(token_batches(), token_batches(seed=2), strict=True):
        policy = _likelihood(model, tokens, chosen) - _likelihood(model, tokens, rejected)
        with torch.no_grad(), _without_adapters(model):
            reference = _likelihood(model, tokens, chosen) - _likelihood(model, tokens, rejected)
        loss = -F.logsigmoid(0.1 * (policy - reference)).mean()
        learn(optimizer, loss)
        run.log(loss, reference)
    run.log(model)


class _PromptEncoder(nn.Module):
    def __init__(self, prompts: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(prompts, width)
        self.mlp_head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, indices: Tensor) -> Tensor:
        out: Tensor = self.mlp_head(self.embedding(indices))
        return out


class _Prompted(nn.Module):
    """A frozen base, before whose tokens a trained encoder puts prompts."""

    PROMPTS = 2

    def __init__(self) -> None:
        super().__init__()
        self.base = TinyLm(6).requires_grad_(False)
        self.prompt_encoder = _PromptEncoder(self.PROMPTS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        prompts = self.prompt_encoder(torch.arange(self.PROMPTS, device=tokens.device))
        x = torch.cat([prompts.expand(len(tokens), -1, -1), self.base.embedding(tokens)], dim=1)
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        for block in self.base.blocks:
            x = block(x)
        out: Tensor = self.base.head(self.base.norm(x))[:, self.PROMPTS :]
        return out


@idiom(
    "p-tuning: an encoder of prompts is trained beside a frozen base",
    source="huggingface/peft src/peft/tuners/p_tuning/model.py:26",
)
def prompt_tuning(run: Run) -> None:
    model = _Prompted()
    optimizer = run.hold(model, torch.optim.AdamW(_adapters(model), lr=1e-2))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


def _add_adapters(model: TinyLm) -> list[nn.Parameter]:
    """Replaces the layers `down` of all blocks."""
    added: list[nn.Parameter] = []
    for block in model.blocks:
        torch.manual_seed(len(added))
        adapter = _Adapter(block.get_submodule("down"))  # type: ignore[arg-type]
        adapter.to(next(block.parameters()).dtype)
        block.add_module("down", adapter)
        added += [*adapter.lora_a.parameters(), *adapter.lora_b.parameters()]
    return added


@idiom(
    "adds adapters to a model that trains, and gives them to its optimizer",
    source="huggingface/peft src/peft/peft_model.py:1080",
    refused=dict.fromkeys(PLACEMENTS, FIXED),
)
def adapters_added_to_the_optimizer(run: Run) -> None:
    model = _adapted_lm()
    optimizer = run.hold(model, torch.optim.AdamW(_adapters(model), lr=1e-2))
    for number, (tokens, targets) in enumerate(token_batches()):
        if number == 2:
            optimizer.add_param_group({"params": _add_adapters(model)})
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "adds adapters to a model that trains, and trains them with an optimizer of their own",
    source="huggingface/peft src/peft/peft_model.py:1080",
    bf16=False,
)
def adapters_with_an_optimizer_of_their_own(run: Run) -> None:
    model = _adapted_lm()
    optimizer = run.hold(model, torch.optim.AdamW(_adapters(model), lr=1e-2))
    second: torch.optim.Optimizer | None = None
    for number, (tokens, targets) in enumerate(token_batches()):
        if number == 2:
            second = torch.optim.AdamW(_add_adapters(model), lr=1e-2)
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        if second is not None:
            second.step()
            second.zero_grad()
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "compiles each block, as one graph",
    source="pytorch/torchtitan torchtitan/distributed/compile.py:70",
    bf16=False,
)
def blocks_compiled_as_one_graph(run: Run) -> None:
    torch.compiler.reset()  # there is a limit to what it compiles for one forward
    model = TinyLm()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a plain model, too
        train_tokens(run, model)


class _StudentAndTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = TinyLm(2)
        self.teacher = TinyLm(2).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(tokens).float().softmax(-1)
        return -(wanted * self.student(tokens.flip(1)).float().log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        students, teachers = list(self.student.parameters()), list(self.teacher.parameters())
        torch._foreach_mul_(teachers, momentum)
        torch._foreach_add_(teachers, students, alpha=1 - momentum)


@idiom(
    "a frozen teacher in the model is an average of the student, by operations on lists of their weights",
    source="facebookresearch/dinov2 dinov2/train/ssl_meta_arch.py:364",
    bf16=False,
)
def teacher_averaged_in_lists(run: Run) -> None:
    model = _StudentAndTeacher()
    optimizer = run.hold(model, torch.optim.AdamW(model.student.parameters(), lr=1e-2, eps=1e-4))
    for tokens, _ in token_batches():
        loss = model(tokens)
        learn(optimizer, loss)
        model.update_teacher(0.9)
        run.log(loss)
    run.log(model)


@torch.no_grad()
def _generate(model: nn.Module, tokens: Tensor, more: int) -> Tensor:
    model.eval()
    for _ in range(more):
        logits = model(tokens[:, -LENGTH:])[:, -1].float()
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    model.train()
    return tokens


@idiom(
    "generates inside and outside of a context that has all weights",
    source="huggingface/trl trl/models/utils.py:198",
    bf16=False,
)
def generates_with_gathered_weights(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        with run.gathered(optimizer, model):
            run.log(_generate(model, tokens[:1, :2], 4))
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss, _generate(model, tokens[:1, :2], 4))
    run.log(model)


class _SkippedBlock(Block):
    """Runs by chance, and is louder where it does: stochastic depth with Python's and NumPy's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        out: Tensor = x + np.random.uniform(0.5, 1.5) * (super().forward(x) - x)
        return out


@idiom(
    "blocks are skipped and scaled by Python's and NumPy's random numbers",
    source="takedarts/DenseResNet src/models/modules/stochdepth.py:12",
)
def blocks_skipped_by_chance(run: Run) -> None:
    random.seed(0)
    np.random.seed(0)
    model = TinyLm()
    model.blocks = nn.ModuleList(_SkippedBlock() for _ in range(3))
    train_tokens(run, model)
    run.log(random.random(), np.random.uniform())
