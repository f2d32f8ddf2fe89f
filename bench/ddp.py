"""Loss curves beside torch's DistributedDataParallel, and one step in ulps: `python bench/ddp.py [--save]`.

Two gloo ranks train a GPT, each on its own part of every batch, twice from the same values: with OffloadZero at stage
2, and with DistributedDataParallel over a bf16 model, whose averaged gradients a torch.optim.AdamW takes to fp32
masters. DDP averages in bf16 (each rank's gradient halved, then a ring's sum, rounded); OffloadZero sums in fp32 and
rounds once. torch's AdamW rounds elsewhere, too, so the bits differ from the first step on, and what one step makes of
them is counted in ulps of the masters. From there on both are as far apart as two trainings with other roundings are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import RESULTS, Grid, hardware
from bench.ranked import RANKS, Shape
from offload import OffloadZero, Tuning
from offload.cli.text import Batches, load_text
from tests.support.ranks import World

LR = 1e-3

HEAD = """# Beside DistributedDataParallel

{hardware}; torch {torch}.

`{command}`

{about}

{count:,} parameters, {layers} blocks; {tokens} tokens a rank and step, learning rate {lr}; losses are the ranks' mean.

![ddp.png](ddp.png)

{grid}

After one step, from equal masters and equal batches, the masters differ by these ulps of fp32 (many where a master is
near zero, and an ulp of it far smaller than one of its update):

{ulps}

"""


@dataclass(frozen=True)
class Found:
    """losses: the ranks' mean of each step; masters: after one step, by parameter."""

    losses: list[float]
    masters: dict[str, Tensor]


def batches(shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of each batch."""
    text = load_text(None, shape.seq).train
    whole = Batches(text, RANKS * shape.batch, shape.seq, seed=0, device=torch.device("cpu"))
    rank = dist.get_rank()
    while True:
        inputs, targets = whole()
        yield inputs.chunk(RANKS)[rank].contiguous(), targets.chunk(RANKS)[rank].contiguous()


def mean(loss: Tensor) -> float:
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / RANKS


def offloaded(shape: Shape, steps: int) -> Found:
    model = shape.model()
    losses, masters = [], {}
    plain = torch.optim.AdamW(model.parameters(), lr=LR)
    with OffloadZero(model, plain, stage=2, tuning=Tuning(threads=1)) as optimizer:
        for step, (inputs, targets) in zip(range(steps), batches(shape), strict=False):
            loss = model(inputs, targets)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean(loss))
            if step == 0:
                masters = {name: optimizer.state_of(p)["master"] for name, p in model.named_parameters()}
    return Found(losses, masters)


def data_parallel(shape: Shape, steps: int) -> Found:
    model = shape.model()
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.to(torch.bfloat16)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(masters.values(), lr=LR)
    losses, first = [], {}
    for step, (inputs, targets) in zip(range(steps), batches(shape), strict=False):
        loss = parallel(inputs, targets)[1]
        loss.backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            masters[name].grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
                param.grad = None
        losses.append(mean(loss))
        if step == 0:
            first = {name: master.detach().clone() for name, master in masters.items()}
    return Found(losses, first)


def ulps(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Of every element: how many fp32 numbers lie between the two."""

    def ordered(values: dict[str, Tensor]) -> Tensor:
        bits = torch.cat([values[name].flatten() for name in ours]).view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return (ordered(ours) - ordered(theirs)).abs()


def ulp_grid(found: Tensor) -> Grid:
    shares = [f"{(found == 0).double().mean():.1%}", f"{(found <= 1).double().mean():.1%}"]
    by_rank = found.sort().values
    cells = [str(by_rank[int(share * (len(by_rank) - 1))].item()) for share in (0.5, 0.99, 0.999, 1.0)]
    row: tuple[str, ...] = (*shares, *cells)
    return Grid(("equal", "within 1", "median", "99 %", "99.9 %", "largest"), [row])


def loss_grid(ours: list[float], theirs: list[float]) -> Grid:
    steps = sorted({0, 1, 10, len(ours) // 2, len(ours) - 1} & set(range(len(ours))))
    rows: list[tuple[str, ...]] = [
        (str(step + 1), f"{ours[step]:.4f}", f"{theirs[step]:.4f}", f"{ours[step] - theirs[step]:+.4f}")
        for step in steps
    ]
    last = slice(-len(ours) // 10, None)
    means = [sum(losses[last]) / len(losses[last]) for losses in (ours, theirs)]
    rows.append(("last tenth", f"{means[0]:.4f}", f"{means[1]:.4f}", f"{means[0] - means[1]:+.4f}"))
    return Grid(("step", "OffloadZero", "DDP", "difference"), rows)


def draw(ours: list[float], theirs: list[float], file: Path) -> None:
    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(ours) + 1)
    losses.plot(steps, theirs, color="tab:orange", linewidth=3, alpha=0.6, label="DDP with fp32 masters")
    losses.plot(steps, ours, color="tab:blue", linewidth=1, label=f"OffloadZero, stage 2, {RANKS} ranks")
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    apart.plot(steps, [one - other for one, other in zip(ours, theirs, strict=True)], color="tab:gray", linewidth=1)
    apart.axhline(0, color="black", linewidth=0.5)
    apart.set_ylabel("difference")
    apart.set_xlabel("step")
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main(
    layers: Annotated[int, typer.Option(help="Blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences a rank and step.")] = 8,
    seq: Annotated[int, typer.Option(help="Bytes of each.")] = 128,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 200,
    save: Annotated[bool, typer.Option("--save", help="Write bench/results/ddp.md and ddp.png.")] = False,
) -> None:
    """Train the same with DistributedDataParallel and with OffloadZero, and compare."""
    shape = Shape(layers, width, batch, seq)
    with World(RANKS) as world:
        ours = world.run(offloaded, shape, steps, timeout_s=900)[0]
        theirs = world.run(data_parallel, shape, steps, timeout_s=900)[0]
    grid, apart = loss_grid(ours.losses, theirs.losses), ulp_grid(ulps(ours.masters, theirs.masters))
    console = Console()
    grid.show(console, "Losses")
    apart.show(console, "Masters after one step, in ulps")
    if save:
        draw(ours.losses, theirs.losses, RESULTS / "ddp.png")
        text = HEAD.format(
            hardware=hardware(),
            torch=torch.__version__,
            command=" ".join(["python", "bench/ddp.py", *sys.argv[1:]]),
            about=(__doc__ or "").split("\n\n", 1)[1].strip(),
            count=shape.numel,
            layers=layers,
            tokens=batch * seq,
            lr=LR,
            grid="\n".join(grid.markdown()),
            ulps="\n".join(apart.markdown()),
        )
        (RESULTS / "ddp.md").write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    typer.run(main)
