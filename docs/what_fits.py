"""Writes the table of what fits on which card into README.md: `python docs/what_fits.py`.

Every figure is one of `offload plan`, for models of Llama's sizes and for one of experts: nothing is allocated or
measured. Needs transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from offload.cli.main import app
from offload.planner.placement import life_in_words
from offload.sizes import format_bytes

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RAM = "64GiB"


def llama(**sizes: int) -> LlamaConfig:
    return LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)


MODELS: dict[str, PretrainedConfig] = {
    "llama-7B": llama(),
    "llama-13B": llama(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    ),
    "llama-70B": llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "qwen3-30B": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_experts=128,
        num_experts_per_tok=8,
        head_dim=128,
    ),
}
"""What differs from transformers' own sizes: Llama 2's of 7B, and for experts Qwen3's."""

RECIPES: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "8-bit states": ("--states", "8bit"),
    "Muon": ("--optimizer", "muon"),
    "LoRA": ("--lora-rank", "16"),
    "LoRA over NF4": ("--lora-rank", "16", "--quantise", "nf4"),
}
"""What is trained, and how: options of `offload plan`."""

ROWS: tuple[tuple[str, str, int], ...] = (
    *(("llama-7B", recipe, 24) for recipe in ("AdamW", "8-bit states", "Muon", "LoRA")),
    ("llama-7B", "AdamW", 80),
    *(("llama-13B", recipe, 24) for recipe in ("AdamW", "8-bit states", "LoRA", "LoRA over NF4")),
    ("llama-13B", "AdamW", 80),
    *(("llama-70B", recipe, 24) for recipe in ("AdamW", "8-bit states", "LoRA", "LoRA over NF4")),
    *(("llama-70B", recipe, 80) for recipe in ("AdamW", "LoRA")),
    *(("qwen3-30B", recipe, 24) for recipe in ("AdamW", "8-bit states")),
)
"""Model, recipe, and GB of the card."""

WORDS = {"device": "device", "cpu": "RAM", "nvme": "NVMe"}
BEGINS, ENDS = "<!-- docs/what_fits.py writes this table -->", "<!-- until here -->"
HEAD = """\
| model | trained by | card | parameters, gradients | on the card | RAM | disk | disk moves | a step | drive lasts |
|---|---|---|---|---:|---:|---:|---:|---:|---:|"""

INTRODUCTION = """\
Each row plans the `config.json` of its model for its card and its recipe; [docs/what_fits.py](docs/what_fits.py) has
all of them. `llama-7B` stands for the directory with that file. Weights are not read:"""


def options(card: int, recipe: str) -> list[str]:
    """Of `offload plan`, beside --config."""
    return [
        *("--gpu-memory", f"{card}GiB", "--ram", RAM, "--batch", "1", "--seq", "4096", "--activation-tier", "cpu"),
        *RECIPES[recipe],
    ]


def planned(directory: Path, given: list[str]) -> dict[str, Any]:
    """What `offload plan --json` prints.

    Raises:
        RuntimeError: it is refused.
    """
    ended = CliRunner().invoke(app, ["plan", "--json", "--config", str(directory), *given])
    if ended.exit_code:
        raise RuntimeError(ended.output)
    return dict(json.loads(ended.stdout))


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
        life_in_words(life),
    ]


def table() -> str:
    """All rows, and the commands that they are from."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            config.save_pretrained(Path(folder) / name)
        for model, recipe, card in ROWS:
            plan = planned(Path(folder) / model, options(card, recipe))
            lines.append(f"| {model} | {recipe} | {card} GB | {' | '.join(cells(plan))} |")
    common = " ".join(["offload plan --config llama-7B", *options(24, "AdamW")])
    more = [f"    {' '.join(given)}  # {recipe}" for recipe, given in RECIPES.items() if given]
    return "\n".join([HEAD, *lines, "", INTRODUCTION, "", "```", common, *more, "```"])


def written(page: str, table: str) -> str:
    """The page with that table."""
    before, _, rest = page.partition(BEGINS)
    return f"{before}{BEGINS}\n{table}\n{ENDS}{rest.partition(ENDS)[2]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text(), table()))
