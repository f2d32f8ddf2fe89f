"""A base that is quantised while it is loaded, in a memory cgroup with room for a quarter of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.integrations.quantised import Quantised
from tests.support.cgroup import memory_cgroup, run_in, was_killed

BLOCKS, WIDTH = 112, 1024
SHARDS = 14
BASE_BYTES = BLOCKS * 2 * 4 * WIDTH * WIDTH * 2
"""Of all matrices in bf16."""


class Coded(nn.Module):
    """A linear layer in 8 bits, with a scale for each row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True).float() / 127
        codes = (layer.weight.detach() / scale).round().to(torch.int8)
        self.codes, self.scale = nn.Parameter(codes, requires_grad=False), nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(x, self.codes, self.scale)  # type: ignore[no-untyped-call]
        return out


class _Linear(torch.autograd.Function):
    """Keeps the codes for its backward, not what they stand for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.weight = codes, scale
        return nn.functional.linear(x, (codes * scale).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        codes, scale = ctx.weight
        return grad @ (codes * scale).to(grad.dtype), None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def quantise(model: nn.Module) -> None:
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, Coded(layer))


def save(folder: Path) -> None:
    """Writes the base, a shard at a time."""
    files: dict[str, str] = {}
    for shard in range(SHARDS):
        values = {}
        for number in range(shard, BLOCKS, SHARDS):
            for name, shape in (("up", (4 * WIDTH, WIDTH)), ("down", (WIDTH, 4 * WIDTH))):
                generator = torch.Generator().manual_seed(2 * number + (name == "up"))
                values[f"blocks.{number}.{name}.weight"] = torch.randn(shape, generator=generator).bfloat16() / WIDTH
        files |= dict.fromkeys(values, f"{shard}.safetensors")
        save_file(values, folder / f"{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def train(folder: Path, how: str) -> None:
    """Quantises the base, while it is loaded or after, and takes two steps of an adapter of one number a feature."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Deep()
    more: dict[str, Any] = {}
    if how == "while loading":
        source = Quantised(folder, quantise, model, settings="8 bits", base=folder / "base")
        more = {"init": source, "param_tier": "nvme", "path": folder / "run", "cpu_memory": "64MiB", "device": "cpu"}
        more["device_memory"] = "64MiB"  # so that `close` leaves the base on its tier
    else:
        from safetensors.torch import load_file

        model.to_empty(device="cpu")
        for shard in range(SHARDS):
            model.load_state_dict(load_file(folder / f"{shard}.safetensors"), strict=False)
        quantise(model)
    model.requires_grad_(False)
    model.adapter = nn.Parameter(torch.ones(WIDTH))
    model.register_forward_pre_hook(lambda module, args: (args[0] * module.adapter,))
    adam = torch.optim.Adam([model.adapter], lr=0.1)
    with OffloadZero(model, adam, commit_every=None, tuning=Tuning(chunk="4MiB", threads=1), **more) as optimizer:
        losses = []
        for _ in range(2):
            loss = model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        stats = optimizer.stats()
        assert stats["peak_cpu_bytes"] <= optimizer._placement.arena_bytes <= 64 << 20
        assert stats["peak_device_bytes"] <= optimizer._placement.device_bytes
    print(json.dumps(losses))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_base_of_four_times_the_memory_is_quantised_and_trained(tmp_path: Path) -> None:
    """And in so much memory it cannot be quantised as a whole. A second run reads the base that was kept."""
    with memory_cgroup(BASE_BYTES // 4) as folder:
        if folder is None:
            pytest.skip("needs the right to make a memory cgroup")
        save(tmp_path)
        command = [sys.executable, "-m", "tests.checkpoint.test_quantised_in_little_memory", str(tmp_path)]
        ended = [run_in(folder, [*command, "while loading"], timeout=400) for _ in range(2)]
        without = run_in(folder, [*command, "after"], timeout=400)
    assert [one.returncode for one in ended] == [0, 0], [one.stderr[-2000:] for one in ended]
    first, second = (json.loads(one.stdout.splitlines()[-1]) for one in ended)
    assert first == second
    assert first[1] < first[0]
    assert was_killed(without), without.stderr[-2000:]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
