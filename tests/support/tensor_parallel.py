"""A GPT that torch shards over tensor-parallel ranks, its training here, and the same by torch alone.

Every function here runs on a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from offload import OffloadZero, Tuning

WIDTH, HEADS, BLOCKS, WORDS, BATCH, SEQ = 32, 4, 2, 18, 2, 8
LR = 3e-3
CLIP = 0.5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # Of a rank's own heads, however many these are.
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Names are torch's: `parallelize_module` finds modules by them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(SEQ, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + (self.places if type(x) is Tensor else whole_places(self.places, x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def whole_places(places: Tensor, like: Any) -> Any:
    """What every rank has, as a DTensor that goes with one whose sequence is cut."""
    return DTensor.from_local(places, like.device_mesh, [Replicate()], run_check=False)


PLANS = ("plain", "sequence")


def parallelize(model: GPT, mesh: DeviceMesh, plan: str = "plain") -> None:
    """Args: plan: "plain": norms, embedding and positions are plain tensors; "sequence": between linear layers each
    rank has its part of the sequence, so that norms are replicated DTensors with partial gradients."""
    own: dict[str, ParallelStyle] = {
        f"attention.{name}": ColwiseParallel(use_local_output=True) for name in ("q", "k", "v")
    }
    own |= {"up": ColwiseParallel(), "attention.project": RowwiseParallel(), "down": RowwiseParallel()}
    head: ParallelStyle = ColwiseParallel(output_layouts=Replicate())
    if plan == "sequence":
        cut = Shard(1)
        norm = SequenceParallel(use_local_output=False)
        own |= {"attention.project": RowwiseParallel(output_layouts=cut, use_local_output=False)}
        own |= {"down": RowwiseParallel(output_layouts=cut, use_local_output=False)}
        own |= {"norm_attention": norm, "norm_mlp": norm}
        own["attention"] = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(Replicate(),))
        own["up"] = ColwiseParallel(input_layouts=cut)
        head = ColwiseParallel(input_layouts=cut, output_layouts=Replicate())
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=cut, use_local_output=False)
        parallelize_module(model, mesh, {"embed": embedding, "norm": norm})
    for block in model.blocks:
        parallelize_module(block, mesh, own)
    parallelize_module(model, mesh, {"head": head})


def meshes(ranks: int, parts: int = 2) -> tuple[DeviceMesh | None, DeviceMesh]:
    """Of the data-parallel ranks (None: this one alone), and of the tensor-parallel ones."""
    mesh = init_device_mesh("cpu", (ranks // parts, parts), mesh_dim_names=("dp", "tp"))
    return (mesh["dp"] if ranks > parts else None), mesh["tp"]


def batches(data_rank: int, data_ranks: int, batch: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the ones that follow, the same on tensor-parallel ranks."""
    generator = torch.Generator().manual_seed(5)
    while True:
        drawn = torch.randint(WORDS, (data_ranks, batch, SEQ + 1), generator=generator)[data_rank]
        yield drawn[:, :-1], drawn[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).float().flatten(0, 1), following.flatten())


@dataclass
class Trained:
    """Attributes: losses, norms: of each step; masters: whole, by name; stats."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


def made(plan: str = "plain", parts: int = 2) -> tuple[GPT, DeviceMesh | None, int, int]:
    """The model on this rank, the data-parallel mesh, this rank in it, its size."""
    data, across = meshes(dist.get_world_size(), parts)
    model = GPT()
    parallelize(model, across, plan)
    return model, data, 0 if data is None else data.get_local_rank(), 1 if data is None else data.size()


def train(steps: int, plan: str = "plain", parts: int = 2, batch: int = BATCH, **options: Any) -> Trained:
    """Trains with OffloadZero up to a step, with the next batches if it resumes."""
    model, data, rank, ranks = made(plan, parts)
    found = Trained()
    adamw = torch.optim.AdamW(model.parameters(), lr=LR)
    options = {"tuning": Tuning(chunk=4096, threads=1, bucket=4096)} | options
    with OffloadZero(model, adamw, process_group=data, **options) as optimizer:
        drawn = batches(rank, ranks, batch)
        for step in range(steps):
            pair = next(drawn)
            if optimizer.resumed is None or step >= optimizer.resumed.step:
                run_step(model, optimizer, pair, found)
        found.masters = masters_of(model, optimizer)
        found.stats = optimizer.stats()
    return found


def run_step(model: nn.Module, optimizer: OffloadZero, batch: tuple[Tensor, Tensor], found: Trained) -> None:
    loss = loss_of(model, batch)
    loss.backward()
    found.losses.append(loss.item())
    found.norms.append(optimizer.clip_grad_norm_(CLIP).item())
    optimizer.step()
    optimizer.zero_grad()


def masters_of(model: nn.Module, optimizer: OffloadZero) -> dict[str, Tensor]:
    return {name: optimizer.state_of(param)["master"] for name, param in model.named_parameters()}


def train_by_torch(steps: int, plan: str = "plain") -> Trained:
    """The same with torch alone: AdamW on fp32 masters that are DTensors, a model in bf16, gradients that are averaged
    over the data-parallel ranks in fp32, and torch's own norm."""
    model, data, rank, ranks = made(plan)
    found = Trained()
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    model.to(torch.bfloat16)
    adamw = torch.optim.AdamW(masters.values(), lr=LR)
    drawn = batches(rank, ranks)
    for _ in range(steps):
        loss = loss_of(model, next(drawn))
        loss.backward()
        found.losses.append(loss.item())
        for name, param in model.named_parameters():
            assert param.grad is not None
            masters[name].grad = _averaged(param, param.grad, data)
        found.norms.append(_clip([*masters.values()]))
        adamw.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
                param.grad = None
    found.masters = {name: _whole(master) for name, master in masters.items()}
    return found


def _averaged(param: Tensor, grad: Any, data: DeviceMesh | None) -> Any:
    if isinstance(grad, DTensor):
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    mean = (grad.to_local() if isinstance(grad, DTensor) else grad).float()
    if data is not None:
        dist.all_reduce(mean, group=data.get_group())
        mean /= data.size()
    if isinstance(grad, DTensor):
        return DTensor.from_local(mean, grad.device_mesh, grad.placements, shape=grad.shape, stride=grad.stride())
    return mean


def _clip(params: list[nn.Parameter]) -> float:
    """Torch clips DTensors and plain tensors only apart from each other."""
    sharded = [p.grad for p in params if isinstance(p.grad, DTensor)]
    plain = [p.grad for p in params if not isinstance(p.grad, DTensor)]
    norms = [_whole(torch.nn.utils.get_total_norm(those)).item() for those in (sharded, plain) if those]  # type: ignore[arg-type]
    norm = float(torch.tensor(norms, dtype=torch.float64).norm())
    for grad in (*sharded, *plain):
        assert grad is not None
        grad.mul_(min(1.0, CLIP / (norm + 1e-6)))
    return norm


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def train_with(steps: int, plan: str, options: dict[str, Any]) -> Trained:
    return train(steps, plan, **options)
