"""Experts of which one layer is larger than all memory there is: in a memory cgroup, with as little of the device.

The oracle is plain torch, of the experts that get tokens in some step. The others only decay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import BudgetError, OffloadZero, Tuning
from tests import simulated_device
from tests.support.cgroup import memory_cgroup, run_in, was_killed
from tests.support.device import DEVICE, load_simulated

WIDTH, EXPERTS, LAYERS = 1024, 48, 2
MATRIX_BYTES = WIDTH * WIDTH * 4
LAYER_BYTES = 3 * EXPERTS * MATRIX_BYTES
LIMIT = LAYER_BYTES - 4 * MATRIX_BYTES
CPU_BYTES, DEVICE_BYTES = 96 << 20, 24 << 20
ROUTED = [[0, 1], [2], [2, 40], [0], [47, 1], [2, 0]]
"""By step, the experts that all tokens go to, half of them to each."""
USED = sorted({number for step in ROUTED for number in step})
STEPS = len(ROUTED)


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        for name in ("gate", "up", "down"):
            self.register_parameter(name, nn.Parameter(torch.empty(count, WIDTH, WIDTH)))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        """x: (tokens, WIDTH)."""
        made = []
        for number, rows in zip(used, x.chunk(len(used)), strict=True):
            hidden = F.silu(F.linear(rows, self.gate[number])) * F.linear(rows, self.up[number])
            made.append(F.linear(hidden, self.down[number]))
        return x + torch.cat(made)


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(count) for _ in range(LAYERS))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for layer in self.layers:
            x = layer(x, used)
        return x


def values_of(name: str, number: int) -> Tensor:
    """The matrix of an expert."""
    _, layer, kind = name.split(".")
    seed = (int(layer) * 3 + ("gate", "up", "down").index(kind)) * EXPERTS + number
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5


def fill(name: str, tensor: Tensor) -> None:
    for number, matrix in enumerate(tensor):
        matrix.copy_(values_of(name, number))


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 + step))


def expected() -> list[float]:
    """The losses of plain torch."""
    model = Model(len(USED))
    with torch.no_grad():
        for name, param in model.named_parameters():
            for matrix, number in zip(param, USED, strict=True):
                matrix.copy_(values_of(name, number))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, used in enumerate(ROUTED):
        loss = model(batch(step), [USED.index(number) for number in used]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("tier", "param_tier", "grad_tier"), "nvme"),
    "cpu_memory": CPU_BYTES,
    "device_memory": DEVICE_BYTES,
    "device": DEVICE,
    "init": fill,
    "compute_dtype": torch.float32,
    "commit_every": 0,
}


def train(folder: Path, stop: int) -> None:
    """Begins, or resumes, and commits before step `stop`. Prints the losses."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Model(EXPERTS)
    tuning = Tuning(chunk=MATRIX_BYTES, threads=1)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with OffloadZero(model, adamw, path=folder / "run", resume="auto", tuning=tuning, **OPTIONS) as optimizer:
        begun = optimizer.resumed.step if optimizer.resumed else 0
        for step in range(begun, stop):
            loss = model(batch(step).to(DEVICE), ROUTED[step]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.commit()
        stats, planned = optimizer.stats(), optimizer._placement
        assert stats["peak_cpu_bytes"] <= planned.arena_bytes <= CPU_BYTES
        assert stats["peak_device_bytes"] <= planned.device_bytes <= DEVICE_BYTES
    print(json.dumps([begun, losses]))


def plain() -> None:
    """A forward of plain torch, which has all experts of a layer at once."""
    model = Model(EXPERTS)
    with torch.no_grad():
        for name, param in model.named_parameters():
            fill(name, param)
        print(model(batch(0), ROUTED[0]).square().mean().item())


def without_tiles(folder: Path) -> None:
    """Where a layer comes whole there is no room for one."""
    with torch.device("meta"):
        model = Model(EXPERTS)
    with pytest.raises(BudgetError, match="on the device"):
        OffloadZero(model, path=folder / "other", tuning=Tuning(chunk=MATRIX_BYTES, tile=0, threads=1), **OPTIONS)
    assert all(param.is_meta for param in model.parameters())
    assert not (folder / "other").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", simulated_device.NAME])
def test_a_layer_that_is_larger_than_memory_is_made_trained_and_resumed(device: str, tmp_path: Path) -> None:
    """The memory of the simulated device is RAM, too, and counts as such."""
    if device != "cpu":
        if simulated_device.compiler() is None:
            pytest.skip("needs a C++ compiler")
        simulated_device.build()
    with memory_cgroup(LIMIT) as folder, TemporaryDirectory(dir=tmp_path) as run:  # 9 GiB, which pytest would keep
        if folder is None:
            pytest.skip("needs the right to make a memory cgroup")
        module = [sys.executable, "-m", "tests.model.test_experts_in_little_memory", run]
        command = ["env", f"OFFLOAD_TEST_DEVICE={device}", *module]
        ended = [run_in(folder, [*command, str(stop)], timeout=800) for stop in (STEPS // 2, STEPS)]
        assert [one.returncode for one in ended] == [0, 0], [one.stderr[-2000:] for one in ended]
        refused = run_in(folder, [*command, "without tiles"], timeout=400)
        assert refused.returncode == 0, refused.stderr[-2000:]
        assert was_killed(run_in(folder, [*command, "plain"], timeout=400))
    (begun, first), (resumed, second) = (json.loads(one.stdout.splitlines()[-1]) for one in ended)
    assert (begun, resumed) == (0, STEPS // 2)
    torch.testing.assert_close(torch.tensor(first + second), torch.tensor(expected()), rtol=1e-4, atol=0)


if __name__ == "__main__":
    if DEVICE != "cpu":
        load_simulated()
    if sys.argv[2] == "plain":
        plain()
    elif sys.argv[2] == "without tiles":
        without_tiles(Path(sys.argv[1]))
    else:
        train(Path(sys.argv[1]), int(sys.argv[2]))
