"""Plans whose figures are recorded: `python -m tests.planner.recorded` writes them to recorded.json.

A change of how the plan is computed must not change what it says. Where a figure has to change, write the file anew
and say why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from offload.cli.main import app
from tests.support.command import printed

FILE = Path(__file__).with_name("recorded.json")

_7B = ("--layers", "32", "--width", "4096", "--batch", "1", "--seq", "1024", "--gpu-memory", "24GiB")
_SMALL = ("--preset", "5m", "--chunk", "256KiB", "--batch", "1", "--seq", "64")

PLANS: dict[str, tuple[str, ...]] = {
    "all that is left open": ("--preset", "1b", "--param-tier", "auto", "--grad-tier", "auto"),
    "7B on a card of 24 GB": (*_7B, "--param-tier", "auto", "--grad-tier", "auto", "--activation-tier", "cpu"),
    "7B with LoRA on a card of 24 GB": (*_7B, "--param-tier", "auto", "--lora-rank", "16", "--activation-tier", "cpu"),
    "states in RAM, no files": (*_SMALL, "--tier", "cpu", "--no-commits"),
    "states in RAM, committed, on a GPU, summed": (*_SMALL, "--tier", "cpu", "--gpu", "--accumulation", "3"),
    "states on the device, committed": (*_SMALL, "--tier", "device", "--gpu", "--activation-tier", "cpu"),
    "states on the device, frozen blocks on NVMe": (
        *(*_SMALL, "--tier", "device", "--gpu", "--param-tier", "nvme", "--frozen", "4"),
        *("--activation-tier", "device"),
    ),
    "all on NVMe with the least RAM, on a GPU": (
        *(*_SMALL, "--tier", "nvme", "--param-tier", "nvme", "--grad-tier", "nvme", "--gpu", "--cpu-memory", "least"),
        *("--accumulation", "auto", "--activation-tier", "nvme", "--device-memory", "6MiB"),
    ),
    "frozen blocks on NVMe beside cached ones": (
        *(*_SMALL, "--tier", "nvme", "--param-tier", "nvme", "--frozen", "5", "--cpu-memory", "14MiB"),
    ),
    "frozen blocks on NVMe in fewer chunks than buffers": (
        *(*_SMALL, "--tier", "nvme", "--param-tier", "nvme", "--frozen", "2", "--cpu-memory", "least"),
        *("--chunk", "4MiB"),
    ),
    "split masters, committed, some resident": (
        *(*_SMALL, "--split-master", "--param-tier", "device", "--cpu-memory", "40MiB", "--gpu", "--accumulation", "2"),
        *("--activation-tier", "device"),
    ),
    "1 of 4 ranks at stage 1, summed": (*_SMALL, "--ranks", "4", "--stage", "1", "--accumulation", "4", "--gpu"),
    "1 of 4 ranks at stage 2, parameters in RAM": (*_SMALL, "--ranks", "4", "--stage", "2", "--param-tier", "cpu"),
    "1 of 4 ranks at stage 3, all on NVMe": (
        *(*_SMALL, "--ranks", "4", "--stage", "3", "--param-tier", "nvme", "--grad-tier", "nvme", "--gpu"),
        *("--cpu-memory", "12MiB"),
    ),
    "1 of 2 ranks on the device, cut in 2": (
        *(*_SMALL, "--ranks", "2", "--tensor-parallel", "2", "--tier", "device", "--activation-tier", "cpu"),
        "--partition-activations",
    ),
}
"""By name, the options of `offload plan`."""

TOTALS = (
    *("tier", "param_tier", "grad_tier", "frozen_tier", "activation_tier", "stage", "chunks", "kept_chunks", "buffers"),
    *("device_bytes", "device_budget_bytes", "peak_cpu_bytes", "cpu_budget_bytes", "least_cpu_bytes", "disk_bytes"),
    *("read_bytes", "written_bytes", "held_bytes", "sent_elements", "arena_utilisation", "zero_r"),
)


def plan(name: str) -> dict[str, Any]:
    """The figures of one of `PLANS`."""
    found = printed(CliRunner().invoke(app, ["plan", "--json", "--ram", "64GiB", *PLANS[name]]))
    rows = [[row["tier"], row["kind"], row["nbytes"]] for row in found["rows"]]
    budgets = [[one["cpu_bytes"], one["moved_bytes"]] for one in found["budgets"]]
    return {key: found[key] for key in TOTALS if key in found} | {"budgets": budgets, "rows": rows}


def recorded() -> dict[str, Any]:
    """What the file says."""
    return dict(json.loads(FILE.read_text()))


if __name__ == "__main__":
    parts = (
        ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in plan(name).items()) for name in PLANS
    )
    texts = (f"{json.dumps(name)}: {{\n{part}\n}}" for name, part in zip(PLANS, parts, strict=True))
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n")
