"""Configurations of the ZeRO papers (arXiv 1910.02054 and 2104.07857), planned; docs/papers.md has the differences."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from offload import Tuning
from offload.demo.gpt import GPT, GPTConfig
from offload.layout import ParamSpec, build
from offload.options import Options
from offload.planner.activations import measure
from offload.planner.decide import Situation, decide
from offload.planner.explain import Planned, plan_of
from offload.planner.link import link_bytes
from offload.planner.placement import Room, place
from offload.planner.verdict import Work, step_time
from tests.support.processes import ROOT

BATCH, SEQ, WIDTH, LAYERS = 8, 512, 512, 12
TOKENS = BATCH * SEQ
CARD = 32 * 2**30


def model() -> GPT:
    return GPT(GPTConfig(layers=LAYERS, heads=8, width=WIDTH, context=SEQ), device="meta")


def planned(**options: Any) -> Planned:
    """Of that model, with whatever is not said as small as it can be."""
    given = {"direct": False, "tier": "nvme", "path": ".", "commit_every": None, "activation_tier": "cpu"}
    tuning = Tuning(chunk="8MiB")
    found = plan_of(model(), free_cpu_bytes=1 << 40, tuning=tuning, activation_memory="1GiB", **given | options)
    return found.with_memory(found.least())


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """ZeRO-Infinity, section 4: what is achieved of a peak, FLOP/s, at a bandwidth, bytes a second, without overlap."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


@pytest.mark.parametrize(("peak", "bandwidth"), [(70e12, 1.5e12), (1e12, 3e9)])
def test_efficiency_of_states_on_the_disk_is_the_papers_with_the_bytes_that_we_move(
    peak: float, bandwidth: float
) -> None:
    """The paper moves 16 bytes a parameter each way, the gradient in fp32, too, so seq x batch / 4. We move 12."""
    plan = planned()
    numel = plan.layout.trained.numel
    time = step_time(plan, Work(numel, 0, TOKENS, True), flops=peak, disk_bytes_per_s=bandwidth)
    assert time.compute == pytest.approx(8 * TOKENS * numel / peak)  # the paper's FLOP of a step with recomputation
    ours = time.compute / (time.compute + time.disk)
    assert ours == pytest.approx(efficiency(TOKENS / 4 * 16 / 12, bandwidth, peak), rel=0.01)
    assert ours > efficiency(TOKENS / 4, bandwidth, peak)


def test_traffic_of_parameters_and_gradients_is_three_quarters_of_the_papers() -> None:
    """The paper fetches for the forward, the recomputation and the backward, and sends a gradient: 8 bytes a parameter.
    We fetch once for the latter two, for the last block and the root once in a step."""
    plan = planned(param_tier="cpu", device_memory="24MiB")  # of three blocks and the root
    params = {name: 2 * param.numel() for name, param in model().named_parameters()}
    block = sum(size for name, size in params.items() if name.startswith("blocks.0."))
    root = sum(params.values()) - LAYERS * block
    moved = link_bytes(plan.layout, plan.place())
    assert moved is not None
    assert not plan.place().staying
    assert moved.total == 3 * sum(params.values()) - block - root
    numel = plan.layout.trained.numel
    assert moved.total == pytest.approx(0.75 * 8 * numel, rel=0.06)


def test_checkpoints_are_the_papers() -> None:
    """2 x batch x seq x width x layers bytes, and 24 x width operations a byte that is written and read."""
    tokens = torch.empty(BATCH, SEQ, dtype=torch.long, device="meta")
    waiting = measure(model(), torch.bfloat16, lambda module: module(tokens))
    assert waiting.entering_bytes == 2 * TOKENS * WIDTH * LAYERS
    flops = 8 * TOKENS * 12 * LAYERS * WIDTH**2
    assert flops / (2 * waiting.entering_bytes) == 24 * WIDTH


def files_of(numel: int, ranks: int, **options: Any) -> int:
    """Bytes of the files of all ranks at stage 3, with everything on NVMe."""
    tiers = {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "path": "."}
    given = Options(stage=3, tuning=Tuning(chunk="1GiB", bucket="64TiB"), **tiers | options)
    choice = decide(given, Situation(numel, 0, ranks=ranks))
    layout = build([ParamSpec("weight", numel, "", torch.bfloat16, 0)], choice.states.chunk_numel, ranks=ranks)
    room = Room(cpu_memory=1 << 50, free_cpu_bytes=1 << 50)
    least = Planned(layout, choice, True, room).least()
    return ranks * place(layout, choice, direct=True, room=Room(cpu_memory=least, free_cpu_bytes=1 << 50)).disk_bytes


@pytest.mark.parametrize(("numel", "nodes"), [(10**12, 1), (32 * 10**12, 32)])
def test_a_node_has_files_for_as_many_parameters_as_zero_infinity_has_on_one(numel: int, nodes: int) -> None:
    """A DGX-2 has 16 cards and 30 TB of NVMe by its data sheet. Masters, moments, parameters, gradients: 16 bytes."""
    files = files_of(numel, 16 * nodes, commit_every=None)
    assert files == pytest.approx(16 * numel, rel=0.01)
    assert files < nodes * 30e12


CONFIGURATIONS = {
    "C3": (62, 8192, 2, "device", False),
    "C4": (175, 8192, 2, "device", True),
    "C5": (187, 8192, 2, "cpu", True),
}
"""Largest models of ZeRO's figure 6: layers, width, stage, where checkpoints are, and whether they are parted (P_a).

Their shapes are those of the artifact appendix: 400 cards, of which 16 share matrices, and a batch of 16."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_largest_models_of_zero_take_what_its_formulas_say_and_fit(name: str) -> None:
    """Of an analysis by hand: 2 + 14/25 bytes for each of a rank's parameters, and the checkpoints that it keeps."""
    layers, width, stage, where, parted = CONFIGURATIONS[name]
    entering = 2 * 16 * 1024 * width
    found = plan_of(
        GPT(GPTConfig(layers=layers, heads=64, width=width, context=1024), device="meta"),
        direct=False, ranks=25, tensor_parallel=16, stage=stage, tier="device", free_cpu_bytes=1 << 40,
        activation_tier=where, activation_memory=layers * entering // (16 if parted else 1),
        partition_activations=parted,
    ).place()  # fmt: skip
    numel = 12 * layers * width**2 / 16
    kept = layers * entering / (16 if parted else 1) if where == "device" else 0
    assert found.device_bytes == pytest.approx((2 + 14 / 25) * numel + kept, rel=0.02)
    assert found.device_bytes < CARD


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_says_what_the_plan_counts() -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    before = re.findall(r"^\| C\d .*$", page, re.MULTILINE)
    assert len(before) == 5
    done = subprocess.run(
        [sys.executable, "-c", "import papers; print(*map(papers.row, papers.CONFIGURATIONS), sep='\\n')"],
        cwd=ROOT / "docs", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == before
