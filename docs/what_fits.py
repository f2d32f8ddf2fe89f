"""Writes the table of what fits on which card into README.md: `python docs/what_fits.py`.

Every figure is one of `offload plan`, for Llama's sizes: nothing is allocated or measured. Needs transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from offload.sizes import format_bytes

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

CARDS = (24, 48, 80)
"""GB of memory."""
ADAPTED = {"": (), ", LoRA": ("--lora-rank", "16")}
"""What of a model is trained, and the options that say so."""

WORDS = {"device": "device", "cpu": "RAM", "nvme": "NVMe"}
BEGINS, ENDS = "<!-- docs/what_fits.py writes this table -->", "<!-- until here -->"
HEAD = """\
| model | card | parameters, gradients | on the card | RAM | disk | disk moves | a step | drive lasts |
|---|---|---|---:|---:|---:|---:|---:|---:|"""

INTRODUCTION = """\
Row by row; [docs/what_fits.py](docs/what_fits.py) writes such a `config.json` into a directory for each model:"""


def options(card: int, adapted: str) -> list[str]:
    """Of `offload plan`, beside --config."""
    return [
        *("--gpu-memory", f"{card}GiB", "--ram", RAM, "--batch", "1", "--seq", "4096", "--activation-tier", "cpu"),
        *ADAPTED[adapted],
    ]


def planned(directory: Path, given: list[str]) -> dict[str, Any]:
    """What `offload plan --json` prints."""
    run = "from offload.cli.main import run; run()"
    command = [sys.executable, "-c", run, "plan", "--json", "--config", str(directory), *given]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def cells(plan: dict[str, Any]) -> list[str]:
    """What the table says of a plan."""
    param_tier = plan["param_tier"] if plan["frozen_tier"] == "device" else plan["frozen_tier"]
    sizes = (plan["device_total_bytes"], plan["peak_cpu_bytes"], plan["disk_bytes"])
    moved, life = plan["read_bytes"] + plan["written_bytes"], plan["drive_life_steps"]
    return [
        f"{WORDS[param_tier]}, {WORDS[plan['grad_tier']]}",
        *map(format_bytes, sizes),
        format_bytes(moved) if moved else "-",
        f"{plan['step_seconds']:.3g} s",
        "-" if life is None else f"{life:,.0f} steps",
    ]


def table() -> str:
    """All rows; cards for which the plan is the same stand in one."""
    rows: dict[tuple[str, ...], list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, sizes in MODELS.items():
            directory = Path(folder) / model
            LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(directory)
            for adapted in ADAPTED:
                for card in CARDS:
                    plan = planned(directory, options(card, adapted))
                    rows.setdefault((model, adapted, *cells(plan)), []).append(card)
    lines, commands = [], []
    for (model, adapted, *rest), cards in rows.items():
        lines.append(f"| {model}{adapted} | {', '.join(map(str, cards))} GB | {' | '.join(rest)} |")
        commands.append(" ".join(["offload plan --config", f"llama-{model}", *options(cards[0], adapted)]))
    return "\n".join([HEAD, *lines, "", INTRODUCTION, "", "```", *commands, "```"])


def written(page: str, table: str) -> str:
    """The page with that table."""
    before, _, rest = page.partition(BEGINS)
    return f"{before}{BEGINS}\n{table}\n{ENDS}{rest.partition(ENDS)[2]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text(), table()))
