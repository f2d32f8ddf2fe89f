"""Writes the table of what fits on which card into README.md: `python docs/what_fits.py`.

Every figure is one of `offload plan --config DIR`, for Llama's sizes: nothing is allocated or measured.
Needs transformers and peft.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from offload.cli.plan import summarise
from offload.planner.explain import plan_of
from offload.sizes import format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RAM = "64GiB"

MODELS: dict[str, dict[str, int]] = {
    "7B": {},
    "13B": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""What differs from transformers' `LlamaConfig`, which is Llama 2's of 7B."""

CARDS = {"24": "16GiB", "48": "36GiB", "80": "64GiB"}
"""What of a card's memory parameters may take. The rest is for what a block computes with, and for the logits."""

WORDS = {"device": "device", "cpu": "RAM", "nvme": "NVMe"}
RAM_BYTES = parse_bytes(RAM, "RAM")
BEGINS, ENDS = "<!-- docs/what_fits.py writes this table -->", "<!-- until here -->"
HEAD = """\
| model | card | parameters, gradients | on the device | RAM | disk | over the disk a step | RAM for all states |
|---|---|---|---:|---:|---:|---:|---:|"""


def options(card: str) -> list[str]:
    """Of `offload plan`."""
    return [
        *("--gpu", "--device-memory", CARDS[card], "--ram", RAM),
        *("--param-tier", "auto", "--grad-tier", "auto", "--commit-every", "100"),
        *("--batch", "1", "--seq", "4096", "--activation-tier", "cpu"),
    ]


def trained(directory: Path, card: str) -> list[str]:
    """Cells of training all parameters, from what `offload plan --json` prints."""
    run = "from offload.cli.main import run; run()"
    command = [sys.executable, "-c", run, "plan", "--json", "--config", str(directory), *options(card)]
    plan: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return cells(plan, plan["param_tier"], format_bytes(plan["budgets"][-1]["cpu_bytes"]))


def lora(directory: Path, card: str) -> list[str]:
    """Cells of training adapters of rank 16 on a frozen model, their states in RAM."""
    with warnings.catch_warnings():  # peft asks for an attribute that transformers deprecates
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(
            AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(directory)),
            peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"]),
        )
    blocks, width = model.config.num_hidden_layers, model.config.hidden_size
    planned = plan_of(
        model,
        direct=False,
        free_cpu_bytes=RAM_BYTES,
        tier="cpu",
        path=ROOT,
        device_memory=CARDS[card],
        activation_tier="cpu",
        activation_memory=2 * 4096 * width * blocks,
    )
    planned = planned.with_memory(planned.least())
    return cells(summarise(planned), planned.config.frozen_tier, "states are there")


def cells(plan: dict[str, Any], param_tier: str, all_in_ram: str) -> list[str]:
    """What the table says of a plan."""
    moved = plan["read_bytes"] + plan["written_bytes"]
    sizes = (plan["device_bytes"], plan["peak_cpu_bytes"], plan["disk_bytes"], moved)
    return [f"{WORDS[param_tier]}, {WORDS[plan['grad_tier']]}", *map(format_bytes, sizes), all_in_ram]


def table() -> str:
    """All rows; cards for which the plan is the same stand in one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        for model, sizes in MODELS.items():
            directory = Path(folder) / model
            LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(directory)
            for card in CARDS:
                rows.setdefault((model, *trained(directory, card)), []).append(card)
            for card in CARDS:
                rows.setdefault((f"{model}, LoRA", *lora(directory, card)), []).append(card)
    lines = [f"| {name} | {', '.join(cards)} GB | {' | '.join(rest)} |" for (name, *rest), cards in rows.items()]
    return "\n".join([HEAD, *lines])


def written(page: str, table: str) -> str:
    """The page with that table."""
    before, _, rest = page.partition(BEGINS)
    return f"{before}{BEGINS}\n{table}\n{ENDS}{rest.partition(ENDS)[2]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text(), table()))
