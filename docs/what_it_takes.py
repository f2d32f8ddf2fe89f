"""Writes the tables of docs/what-it-takes.md: `python docs/what_it_takes.py [MODEL ...]`. Needs transformers.

Every figure is predicted by the simulation of `offload plan --machine`: nothing is allocated or measured. With names of
models only their tables are written again. All of it takes about a quarter of an hour of one core.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from offload.cli.options import PlanOptions
from offload.cli.plan import (
    beside_of,
    computing_of,
    default_options,
    planned_of,
    predicted_of,
    rates_of,
    resources_beside,
    speeds_for,
    summarise,
    verdict_of,
    waiting_of,
    work_of,
)
from offload.cli.plan_models import sized
from offload.errors import BudgetError
from offload.planner.machine_file import Machine, find
from offload.planner.simulate import NotPredicted
from offload.planner.simulate.sensitivity import CHANGE, DRIVES, LINKS, PRODUCTS, RAM, moved_by
from offload.planner.simulate.what_if import passes_of
from offload.sizes import format_bytes

PAGE = Path(__file__).parent / "what-it-takes.md"
BEGINS, ENDS = "<!-- docs/what_it_takes.py writes these tables -->", "<!-- until here -->"
BATCH, SEQ, CHUNK, ACTIVATIONS = 1, 4096, "256MiB", "cpu"
MACHINES = (
    *("rtx4090-64gb", "rtx4090-128gb-4-drives", "rtxpro5000-256gb", "l40s-256gb-4-drives", "a100-256gb-4-drives"),
    "h100-512gb-4-drives",
)
LLAMA = {
    "7B": {},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 40},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
}  # fmt: skip
"""What differs from transformers' `LlamaConfig`, which is Llama 2's of 7B."""
MIXTURE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936,
}  # fmt: skip
"""Of Qwen3-30B-A3B."""
MODELS = (*LLAMA, "30B-A3B")
WORDS = {"device": "device", "cpu": "RAM", "nvme": "NVMe"}
DAY = 24 * 3600
HEAD = """\
| machine | parameters, gradients | device | RAM | disk | an iteration | tokens/s | waits for | nothing waits from | \
written | drives last | matters most |
|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---|"""


def config_of(model: str) -> PretrainedConfig:
    """The configuration of a model."""
    if model in LLAMA:
        return LlamaConfig(architectures=["LlamaForCausalLM"], **LLAMA[model])
    return Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **MIXTURE)


def options_of(config: Path, machine: Machine) -> PlanOptions:
    """The options of `offload plan`."""
    shape = {"batch": BATCH, "seq": SEQ, "chunk": CHUNK, "activation_tier": ACTIVATIONS}
    return default_options(config=config, machine=machine, gpu=True, **shape)


def command(model: str, machine: str) -> str:
    """The command of a row."""
    shape = f"--batch {BATCH} --seq {SEQ} --activation-tier {ACTIVATIONS} --chunk {CHUNK}"
    return f"offload plan --config {model} --machine {machine} {shape}"


def row(config: Path, machine: str) -> str:
    """A line of a table."""
    there = find(machine)
    options = options_of(config, there)
    model = sized(options)
    waiting = waiting_of(options, model)
    try:
        planned = planned_of(options, model, waiting)
        found = summarise(planned, options)
    except BudgetError as error:
        return f"| {machine} | does not fit: {error} |{' |' * 10}"
    beside = resources_beside(options, model)
    found |= verdict_of(found, options, computing_of(options, model, waiting), beside)
    sizes = [format_bytes(found[name]) for name in ("device_total_bytes", "cpu_total_bytes", "disk_bytes")]
    tiers = f"{WORDS[found['param_tier']]}, {WORDS[found['grad_tier']]}"
    cells = [machine, tiers, *sizes]
    if not found["fits"]:
        cells[1] += "; **does not fit**"
    flops = rates_of(options)[0]["flops"]
    figures = predicted_of(planned, options, model, flops, waiting)
    if figures["predicted"] is None:
        return f"| {' | '.join(cells)} | not predicted: {figures['not_predicted']} |{' |' * 6}"
    most = matters(planned, options, model, flops, waiting)
    return f"| {' | '.join([*cells, *timed(figures['predicted'], there), most])} |"


def timed(predicted: dict[str, Any], machine: Machine) -> Iterator[str]:
    """The cells of what is predicted."""
    yield f"{predicted['seconds']:.3g} s"
    yield f"{predicted['tokens_per_s']:,.0f}"
    yield predicted["waits_for"]
    hides = predicted["hiding_tokens"]
    yield "-" if hides is None else f"{hides:,} tokens"
    written = predicted["written_bytes"]
    yield format_bytes(round(written)) if written else "-"
    endurance = machine.endurance
    if endurance is None or not written:
        yield "-"
    else:
        steps = endurance / written
        yield f"{steps:,.0f} steps, {steps * predicted['seconds'] / DAY:,.0f} days"


def matters(planned: Any, options: PlanOptions, model: Any, flops: float, waiting: Any) -> str:
    """The rate that moves the prediction most, its value, and by how much."""
    speeds = speeds_for(options)
    assert not isinstance(speeds, NotPredicted)
    passes = passes_of(
        planned.layout, work_of(planned, options, model), flops, beside_of(planned, options, model, waiting)
    )
    found = moved_by(planned.layout, planned.place(), passes, speeds)
    assert not isinstance(found, NotPredicted)
    name, moved = next(iter(found.items()))
    values = {
        PRODUCTS: f"{flops / 1e12:.3g} TFLOP/s",
        RAM: f"{speeds.memory / 1e9:.3g} GB/s",
        DRIVES: f"{sum(one.both for one in speeds.drives) / 1e9:.3g} GB/s",
        LINKS: "" if speeds.link is None else f"{speeds.link.up / 1e9:.3g} GB/s",
    }
    return (
        f"{name}, {values[name]}: {CHANGE:.0%} less is {moved.slower:+.0%} time, {CHANGE:.0%} more {moved.faster:+.0%}"
    )


def table(model: str) -> str:
    """The table of a model, under its name."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        config_of(model).save_pretrained(folder)
        for machine in MACHINES:
            print(model, machine, file=sys.stderr, flush=True)
            lines.append(row(Path(folder), machine))
    return "\n".join([f"## {model}", "", f"`{command(model, 'MACHINE')}`", "", HEAD, *lines])


def written(page: str, tables: dict[str, str]) -> str:
    """The page with these tables in place of those of the same models."""
    before, _, rest = page.partition(BEGINS)
    inside, _, after = rest.partition(ENDS)
    parts = {part.partition("\n")[0].strip(): f"## {part}".strip() for part in inside.split("\n## ")[1:]}
    made = [(parts | tables)[model] for model in MODELS if model in parts | tables]
    return "\n\n".join([f"{before}{BEGINS}", *made, f"{ENDS}{after}"])


if __name__ == "__main__":
    for model in sys.argv[1:] or MODELS:  # one after the other: what is made is kept if the next one is not
        PAGE.write_text(written(PAGE.read_text(), {model: table(model)}))
