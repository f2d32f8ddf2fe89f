"""What activations take of RAM: a process of its own trains, and tells its peak, or is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroup import memory_cgroup, run_in, was_killed

MIB, GIB = 1 << 20, 1 << 30
BATCH, ROOM = 4, 3 * GIB // 2
"""Sequences, and what the process may take: all that autograd keeps of them takes several times as much."""

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from offload import OffloadZero, Tuning
from offload.demo.gpt import GPT, GPTConfig, initial_values

def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024

shape, batch, steps, options = json.loads(sys.argv[1])
config = GPTConfig(**shape)
tokens = torch.randint(256, (batch, config.context), generator=torch.Generator().manual_seed(1))
warm = GPT(GPTConfig(1, 8, 2, 4))
warm(tokens[:1, :4], tokens[:1, :4])[1].backward()  # what torch itself needs
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = status("RssAnon")
model = GPT(config, device="meta")
with OffloadZero(
    model, param_tier="nvme", grad_tier="nvme", compute_dtype=torch.float32, init=initial_values(config, 0),
    commit_every=None, tuning=Tuning(chunk="2MiB"), **options
) as optimizer:
    losses = []
    for _ in range(steps):
        loss = model(tokens, tokens)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stats = optimizer.stats()
    peak = status("VmHWM") - status("RssFile") - status("RssShmem") - before  # close() may bring parameters back
print(json.dumps({"peak": peak, "losses": losses} | {k: stats[k] for k in (
    "peak_activation_bytes", "activation_read_bytes", "peak_cpu_bytes")}))
"""


def command(shape: dict[str, int], batch: int, steps: int, options: dict[str, Any]) -> list[str]:
    return [sys.executable, "-c", SCRIPT, json.dumps([shape, batch, steps, options])]


# What torch frees goes back at once: how much of it malloc would keep differs from run to run.
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}


@pytest.mark.slow
def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    """But for the objects that modules are."""
    found, width, seq, batch, depths = [], 128, 64, 32, (12, 24, 48)
    entering = 4 * batch * seq * width
    for layers in depths:
        shape = {"layers": layers, "heads": 4, "width": width, "context": seq}
        options = {"path": str(tmp_path / f"run-{layers}"), "cpu_memory": "32MiB"}
        options |= {"activation_tier": "nvme", "activation_memory": "8MiB"}
        ended = subprocess.run(
            command(shape, batch, 2, options),
            capture_output=True, text=True, timeout=120, check=True, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found.append(json.loads(ended.stdout))
        assert found[-1]["peak_activation_bytes"] == layers * entering
        assert found[-1]["peak_cpu_bytes"] <= 32 * MIB
    peaks = [one["peak"] for one in found]
    assert max(peaks) - min(peaks) <= (depths[-1] - depths[0]) * entering // 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_that_do_not_fit_train_with_activations_on_disk(tmp_path: Path) -> None:
    """A GPT of 1.25e8 parameters in a memory cgroup, in which it is killed without."""
    shape = {"layers": 12, "heads": 12, "width": 768, "context": 1024}
    options: dict[str, Any] = {"path": str(tmp_path / "run"), "cpu_memory": "448MiB"}
    with memory_cgroup(ROOM) as folder:
        if folder is None:
            pytest.skip("needs the right to make a memory cgroup")
        without = run_in(folder, command(shape, BATCH, 1, options), timeout=300)
        assert was_killed(without), without.stderr
        options |= {"activation_tier": "nvme", "activation_memory": f"{BATCH * 6}MiB"}
        ended = run_in(folder, command(shape, BATCH, 1, options), timeout=500)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["peak_activation_bytes"] == 12 * 4 * BATCH * 1024 * 768
    assert found["activation_read_bytes"] > 0
