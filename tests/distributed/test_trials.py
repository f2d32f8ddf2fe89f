"""Steps that several ranks try in backward: the bits of ranks whose states are in RAM, and of the commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from offload import OffloadZero, Tuning
from offload.grads.reduce_scatter import ReducedGradients
from offload.planner import least_cpu_memory
from offload.sizes import KIB
from tests.support import tried
from tests.support.ranks import Worlds

WIDTH, LAYERS = 48, 4


class Seen(NamedTuple):
    """Of a rank's training. Attributes: told: norms, and how many steps were skipped; values: of all parameters and
    their states after the last step; kept: bytes, by step; tried: of all steps."""

    told: list[float]
    values: list[Tensor]
    kept: list[float]
    tried: float


class Layer(nn.Linear):
    """Attribute: trains_bias, whether the bias gets a gradient."""

    trains_bias = True

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.trains_bias else self.bias.detach()
        return torch.tanh(functional.linear(x, self.weight, bias))


Loop = Callable[[nn.Sequential, OffloadZero, int], None]


def backward(model: nn.Module, step: int, *, by: float = 1.0) -> None:
    """Of a batch that each rank has for itself."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = model(torch.randn(4, WIDTH, generator=generator).bfloat16())
    (x.float().square().mean() * by).backward()


def clips(model: nn.Sequential, optimizer: OffloadZero, step: int) -> None:
    backward(model, step)
    optimizer.clip_grad_norm_(1e-3)


def only_some_use_all(model: nn.Sequential, optimizer: OffloadZero, step: int) -> None:
    """One bias has a gradient on rank 0 only, and another one on none."""
    layers: list[Any] = [*model]
    layers[0].trains_bias, layers[1].trains_bias = dist.get_rank() == 0, False
    backward(model, step)
    layers[0].trains_bias = layers[1].trains_bias = True


def one_has_nan(model: nn.Sequential, optimizer: OffloadZero, step: int) -> None:
    backward(model, step, by=float("nan") if dist.get_rank() == 0 else 1.0)


def probes(model: nn.Sequential, optimizer: OffloadZero, step: int) -> None:
    backward(model, step + 50)
    optimizer.zero_grad()
    backward(model, step)


def learns_slower(model: nn.Sequential, optimizer: OffloadZero, step: int) -> None:
    backward(model, step)
    optimizer.param_groups[1]["lr"] /= 2


def commits(model: nn.Sequential, optimizer: OffloadZero, step: int) -> None:
    backward(model, step)
    optimizer.commit()


def plain(model: nn.Sequential, optimizer: OffloadZero, step: int) -> None:
    backward(model, step)


LOOPS: Sequence[Loop] = (
    plain, plain, clips, plain, only_some_use_all, one_has_nan, probes, learns_slower, commits, plain,
)  # fmt: skip


def _trained(path: Path, tier: str, options: dict[str, Any], first: int, stop: int) -> Seen:
    """The steps `first` to `stop` of a run, which is resumed if it is there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))
    biases, matrices = ([p for p in model.parameters() if p.dim() == dims] for dims in (1, 2))
    given = torch.optim.AdamW([{"params": matrices}, {"params": biases, "lr": 1e-3}], lr=1e-2)
    tier, _, without = tier.partition(" ")
    split, chunk = options.get("split", False) and tier == "nvme", options.get("chunk", "4KiB")
    options = {name: value for name, value in options.items() if name not in ("split", "chunk")}
    tries = tier == "nvme" and not without
    tuning = Tuning(chunk=chunk, bucket="8KiB", threads=1, speculate=tries, split_master=split)
    memory = None
    if tier == "nvme":
        asked = ("stage", "param_tier", "grad_tier", "accumulation")
        planned = {name: options[name] for name in options if name in asked}
        memory = least_cpu_memory(model, given, ranks=dist.get_world_size(), tuning=tuning, **planned)
        memory += 32 * KIB if first and without else 0  # the slots are written anew
    else:
        options = {name: value for name, value in options.items() if name not in ("param_tier", "grad_tier")}
    micro_batches = 2 if options.get("accumulation", 1) != 1 else 1
    told: list[float] = []
    kept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        tried.at_once(patch)
        tried.always(patch)
        patch.setattr(ReducedGradients, "_is_done", lambda self, reduction: True)  # who asks waits
        common = {"commit_every": 3, "nonfinite": "skip", "resume": "auto", "tuning": tuning, "cpu_memory": memory}
        with OffloadZero(model, given, tier=tier, path=path, **common, **options) as optimizer:
            for step in range(first, stop):
                for _ in range(micro_batches - 1):
                    backward(model, step + 20)
                LOOPS[step](model, optimizer, step)
                told.append(optimizer.clip_grad_norm_(1e9).nan_to_num(7.0).item())
                before = optimizer.stats()["kept_bytes"]
                optimizer.step()
                optimizer.zero_grad()
                kept.append(optimizer.stats()["kept_bytes"] - before)
            stats = optimizer.stats()
            told.append(stats["skipped_steps"])
            values: list[Tensor] = []
            for param in model.parameters():
                values += [one for one in optimizer.state_of(param).values() if isinstance(one, Tensor)]
                with optimizer.gathered(param):
                    values.append(param.detach().clone())
            optimizer.commit()
    return Seen(told, values, kept, stats["tried_bytes"])


def require_same(one: Seen, other: Seen) -> None:
    assert one.told == other.told
    for found, expected in zip(one.values, other.values, strict=True):
        assert torch.equal(found, expected)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (2, {"stage": 1}),
    "stage 2, two micro-batches": (2, {"stage": 2, "accumulation": 2}),
    "stage 3, all on NVMe": (2, {"stage": 3, "param_tier": "nvme"}),
    "stage 2, split masters and gradients on NVMe": (
        2,
        {"stage": 2, "param_tier": "nvme", "grad_tier": "nvme", "split": True, "chunk": "256KiB"},
    ),
    "stage 3, split masters": (2, {"stage": 3, "param_tier": "cpu", "split": True}),
    "stage 2, two micro-batches on NVMe": (2, {"stage": 2, "accumulation": 2, "grad_tier": "nvme", "chunk": "256KiB"}),
    "stage 1, two micro-batches": (2, {"stage": 1, "accumulation": 2}),
    "stage 2, any number of them": (2, {"stage": 2, "accumulation": "auto"}),
    "stage 2, parameters on NVMe": (2, {"stage": 2, "param_tier": "nvme"}),
    "stage 3, parameters in RAM": (3, {"stage": 3, "param_tier": "cpu"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if number < 4 else pytest.mark.slow) for number, case in enumerate(CASES)]
)
def test_ranks_that_try_steps_have_the_bits_of_those_that_do_not(worlds: Worlds, case: str, tmp_path: Path) -> None:
    ranks, options = CASES[case]
    steps = len(LOOPS)
    expected = worlds(ranks).run(_trained, tmp_path / "plain", "cpu", options, 0, steps)
    found = worlds(ranks).run(_trained, tmp_path / "tried", "nvme", options, 0, steps)
    for one, other in zip(found, expected, strict=True):
        require_same(one, other)
        assert one.tried > sum(one.kept) > 0
    for step in (2, 5):  # clipped, and with a NaN
        assert all(one.kept[step] == 0 for one in found)
    if options.get("accumulation") is None:
        assert all(one.kept[1] > 0 and one.kept[3] > 0 and one.kept[9] > 0 for one in found)


@pytest.mark.parametrize(("first", "then"), [("nvme", "nvme without"), ("nvme", "nvme")])
def test_what_ranks_committed_between_trials_is_the_last_step(
    worlds: Worlds, first: str, then: str, tmp_path: Path
) -> None:
    options = {"stage": 2}
    whole = worlds(2).run(_trained, tmp_path / "plain", "cpu", options, 0, 4)
    worlds(2).run(_trained, tmp_path / "run", first, options, 0, 2)
    again = worlds(2).run(_trained, tmp_path / "run", then, options, 2, 4)
    for one, other in zip(again, whole, strict=True):
        assert one.told[:2] == other.told[2:4]
        for mine, expected in zip(one.values, other.values, strict=True):
            assert torch.equal(mine, expected)
