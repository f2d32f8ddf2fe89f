"""Runs each recipe of docs/recipes beside plain torch, and compares: `make recipes`, `make recipes ARGS="lora sft"`.

A recipe runs twice at once, in two processes: with offload, stopped and resumed where it says so, and with --plain.
Losses and trained weights must be equal, or differ by no more than its bound. With `--write` the figures go into the
pages: those of the toys, and those that `offload plan` has for a model of real size.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from math import inf, isnan
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from offload.cli.main import app
from offload.sizes import format_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "recipes"
RESULT = "result.pt"
VISION = Path(sys.prefix) / "vision"
"""Where `make recipes` has timm and torchvision, of which only scripts that need timm are told: others that find a
torchvision import it, too."""
BEGINS, ENDS = "<!-- bench/recipes.py writes this -->", "<!-- until here -->"
LIMIT_S = 3600
"""Of a script, which takes a minute or two alone, and many of them where it shares the machine."""
COLUMNS = 128

ROUNDED = 1e-4
"""The bound of AdamW: some ulps a step, over eight steps. The largest found is 2e-5."""
CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "llama-7B": ("LlamaConfig", {}),
    "llama-13B": (
        "LlamaConfig",
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    ),
    "llama-70B": (
        "LlamaConfig",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "llama3-8B": ("LlamaConfig", {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "mixtral-8x7B": ("MixtralConfig", {"intermediate_size": 14336}),
}
"""Stand for the `config.json` of downloaded models: the class of transformers, and what differs from its defaults.

They have no cache for generation, as the scripts have none: the plan would count its keys and values.
"""


@dataclass(frozen=True)
class Recipe:
    """A script of docs/recipes.

    Attributes:
        needs: the packages that it imports, beside those that a plain install has.
        real: a model of real size, in words.
        plan: what `offload plan` is given for it. `--config` names one of `CONFIGS`.
        bound: the largest difference that is allowed, of losses and of weights, each by the largest absolute value of
            its tensor; 0: the bits are the same.
        ranks: of torchrun; 0: it is started without it.
    """

    needs: tuple[str, ...]
    real: str
    plan: str
    bound: float = ROUNDED
    ranks: int = 0


RECIPES = {
    "trainer": Recipe(
        ("transformers", "accelerate"),
        "Llama 2 7B, all weights",
        "--config llama-7B --machine rtx4090-64gb --batch 4 --seq 2048 --activation-tier cpu",
    ),
    "sft": Recipe(
        ("transformers", "trl"),
        "Llama 2 13B, all weights",
        "--config llama-13B --machine rtx4090-128gb-4-drives --batch 8 --seq 2048 --activation-tier cpu",
    ),
    "dpo": Recipe(
        ("transformers", "trl", "peft"),
        "Llama 2 13B, LoRA",
        "--config llama-13B --machine rtx4090-64gb --lora-rank 16 --batch 4 --seq 1024 --activation-tier cpu",
    ),
    "grpo": Recipe(
        ("transformers", "trl", "peft"),
        "Llama 2 7B, LoRA",
        "--config llama-7B --machine rtx4090-64gb --lora-rank 16 --batch 8 --seq 1024 --activation-tier cpu",
        bound=0.0,
    ),
    "lora": Recipe(
        ("transformers", "peft"),
        "Llama 2 70B, LoRA",
        "--config llama-70B --machine rtx4090-64gb --lora-rank 16 --batch 4 --seq 2048 --activation-tier cpu",
    ),
    "qlora": Recipe(
        ("transformers", "peft", "bitsandbytes", "accelerate"),
        "Llama 2 70B in NF4, LoRA",
        "--config llama-70B --machine rtx4090-64gb --lora-rank 16 --quantise nf4 --batch 4 --seq 2048 "
        "--activation-tier cpu",
    ),
    "dit": Recipe(
        ("diffusers",),
        "a transformer of 12B parameters, as large as Flux's",
        "--layers 106 --width 3072 --machine rtx4090-64gb --batch 1 --seq 4096 --activation-tier cpu",
    ),
    "unet": Recipe(
        ("diffusers", "accelerate"),
        "a transformer of 2.6B parameters, as many as SDXL's UNet has",
        "--layers 33 --width 2560 --machine rtx4090-64gb --batch 8 --seq 1024 --activation-tier cpu",
        bound=1e-3,  # biases before a normalisation have gradients of rounding only
    ),
    "vit": Recipe(
        ("timm",),
        "a transformer of 1.0B parameters, as large as ViT-g",
        "--layers 40 --width 1408 --machine rtx4090-64gb --batch 32 --seq 257",
    ),
    "pretrain": Recipe(
        (),
        "a GPT of 1.0B parameters on 2 ranks",
        "--preset 1b --machine h100-512gb --ranks 2 --stage 2 --batch 8 --seq 1024",
        ranks=2,
    ),
    "muon": Recipe(
        (),
        "a GPT of 2.0B parameters, Muon for all",
        "--preset 2b --optimizer muon --machine h100-512gb --batch 8 --seq 1024",
        bound=0.0,
    ),
    "experts": Recipe(
        ("transformers",),
        "Mixtral 8x7B, all weights",
        "--config mixtral-8x7B --machine h100-512gb-4-drives --batch 8 --seq 2048 --activation-tier cpu",
    ),
    "long_context": Recipe(
        ("transformers",),
        "Llama 3 8B at 16k tokens",
        "--config llama3-8B --machine h100-512gb-4-drives --batch 1 --seq 16384 --activation-tier cpu",
        bound=1e-3,  # gradients are sums in another order
    ),
    "lightning_module": Recipe(
        ("lightning",), "a GPT of 1.0B parameters", "--preset 1b --machine rtx4090-64gb --batch 8 --seq 1024"
    ),
    "accelerate_loop": Recipe(
        ("accelerate",), "a GPT of 2.0B parameters", "--preset 2b --machine rtx4090-64gb --batch 8 --seq 1024"
    ),
}
"""By the name of the script."""


@dataclass(frozen=True)
class Compared:
    """A recipe beside its twin.

    Attributes:
        difference: the largest one found, of losses or weights, by the largest absolute value of the tensor.
        losses: how many were compared.
        tiers: the bytes of the toy, by tier.
        seconds: what both runs took, with the start of Python.
    """

    difference: float
    losses: int
    tiers: dict[str, int]
    seconds: float


class RecipeError(Exception):
    """A recipe cannot be run, or failed; the message says which one and why."""


def missing(recipe: Recipe) -> str | None:
    """What of a recipe's packages is not there, or, of timm, cannot be imported; None: nothing."""
    for name in recipe.needs:
        if name != "timm":
            if find_spec(name) is None:
                return f"{name} is not installed"
            continue
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(recipe), check=False)
        if done.returncode:
            return f"{name}: {done.stderr.strip().splitlines()[-1]}"
    return None


def environment(recipe: Recipe) -> dict[str, str]:
    """Of a script's process."""
    return os.environ | ({"PYTHONPATH": str(VISION)} if "timm" in recipe.needs else {})


def version_of(package: str) -> str:
    return next(iter(distributions(name=package, path=[*sys.path, str(VISION)]))).version


def result_of(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """What a script leaves in its directory and in those below: of each rank, or of each of its trainings.

    Returns:
        Losses by directory and step, weights by directory and name, the most bytes by tier.

    Raises:
        RecipeError: it failed.
    """
    ranks = RECIPES[name].ranks
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(PAGES / f"{name}.py"), str(folder), *options]
    env = environment(RECIPES[name])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=env, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RecipeError(f"{name} {' '.join(options)}: not done after {LIMIT_S} s") from error
    if done.returncode:
        raise RecipeError(f"{name} {' '.join(options)}: {done.stderr[-8000:]}")
    losses: dict[tuple[str, int], float] = {}
    weights: dict[tuple[str, str], Tensor] = {}
    tiers: dict[str, int] = {}
    for file in sorted(folder.rglob(RESULT)):
        left, where = torch.load(file), str(file.parent.relative_to(folder))
        losses |= {(where, step): loss for step, loss in left["losses"].items()}
        weights |= {(where, key): value for key, value in left["weights"].items()}
        tiers |= {tier: max(size, tiers.get(tier, 0)) for tier, size in left["bytes"].items()}
    return {"losses": losses, "weights": weights, "bytes": tiers}


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest absolute value that is expected; 0.0 only for the same bits.

    It is inf where shapes differ, or a value is NaN.
    """
    if torch.equal(found, expected):
        return 0.0
    if found.shape != expected.shape:
        return inf
    largest = expected.abs().max().item()
    difference = (found.double() - expected.double()).abs().max().item() / (largest or 1.0)
    return inf if isnan(difference) else difference


def compare(name: str) -> Compared:
    """Runs a recipe and its twin.

    Raises:
        RecipeError: one of them failed, or they have other steps or weights than the other, or nothing was trained.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / kind for kind in ("held", "plain")]
        for folder in folders:
            folder.mkdir()
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(result_of, name, folders[0]), pool.submit(result_of, name, folders[1], "--plain")]
            runs = held, plain = [run.result() for run in running]
    for part in ("losses", "weights"):
        if held[part].keys() != plain[part].keys() or not held[part]:
            raise RecipeError(f"{name}: plain torch has the {part} {list(plain[part])}, offload {list(held[part])}")
    if len(set(plain["losses"].values())) == 1:
        raise RecipeError(f"{name}: all losses are {plain['losses']}")
    losses = [torch.tensor([run["losses"][step] for step in sorted(plain["losses"])]).double() for run in runs]
    differences = [apart(*losses), *(apart(held["weights"][one], plain["weights"][one]) for one in plain["weights"])]
    return Compared(max(differences), len(losses[0]), held["bytes"], time.monotonic() - begun)


def command_of(recipe: Recipe) -> str:
    return f"offload plan {recipe.plan}"


def planned(recipe: Recipe) -> dict[str, Any]:
    """What `offload plan --json` prints for a recipe's model of real size."""
    with tempfile.TemporaryDirectory() as scratch:
        given = recipe.plan.split()
        if "--config" in given:
            import transformers

            at = given.index("--config") + 1
            kind, sizes = CONFIGS[given[at]]
            model = kind.replace("Config", "ForCausalLM")
            config = getattr(transformers, kind)(architectures=[model], use_cache=False, **sizes)
            config.save_pretrained(Path(scratch) / given[at])
            given[at] = str(Path(scratch) / given[at])
        done = CliRunner().invoke(app, ["plan", "--json", *given])
    if done.exit_code:
        raise RecipeError(f"{command_of(recipe)}: {done.output[-2000:]} {done.exception}")
    return dict(json.loads(done.stdout))


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def planned_row(recipe: Recipe) -> str:
    plan = planned(recipe)
    sizes = [format_bytes(plan[key]) for key in ("device_total_bytes", "peak_cpu_bytes", "disk_bytes")]
    moved = format_bytes(plan["read_bytes"] + plan["written_bytes"])
    return row((f"{recipe.real}, planned", *sizes, moved, f"{plan['step_seconds']:.3g} s, predicted"))


def measured_row(found: Compared) -> str:
    sizes = [format_bytes(found.tiers[tier]) for tier in ("device", "RAM", "disk")]
    return f"{row(('the script, measured', *sizes))} | |"


def figures(name: str, found: Compared) -> str:
    """The lines of a page that are written."""
    recipe = RECIPES[name]
    used = ", ".join(f"{one} {version_of(one)}" for one in ("torch", *recipe.needs))
    lines = [
        "| | device | RAM | disk | disk moves a step | a step |",
        "|---|---:|---:|---:|---:|---:|",
        planned_row(recipe),
        measured_row(found),
        "",
        textwrap.fill(f"The script was run on a CPU, with {used}. {verdict(recipe, found)}", COLUMNS),
        "",
        "```",
        command_of(recipe),
        "```",
    ]
    return "\n".join(lines)


def verdict(recipe: Recipe, found: Compared) -> str:
    if not recipe.bound:
        return f"The {found.losses} losses and all trained weights have the bits of plain torch."
    return (
        f"The {found.losses} losses and all trained weights are up to about {found.difference:.0e} of the largest "
        f"value of their tensor apart from plain torch's; allowed are {recipe.bound:.0e}."
    )


def written(page: str, figures: str) -> str:
    """The page with these figures."""
    before, _, rest = page.partition(BEGINS)
    return f"{before}{BEGINS}\n{figures}\n{ENDS}{rest.partition(ENDS)[2]}"


def replanned(page: str, recipe: Recipe) -> str:
    """A page that has figures, with those that `offload plan` has today."""
    page = re.sub(r"(?m)^\| [^|]+, planned \|.*$", lambda _: planned_row(recipe), page)
    return re.sub(r"(?m)^offload plan .*$", lambda _: command_of(recipe), page)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Recipes.", show_default="all")] = None,
    *,
    write: Annotated[bool, typer.Option("--write", help="Write the figures into the pages.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Write those of `offload plan` only; nothing runs.")] = False,
) -> None:
    """Runs recipes beside plain torch, and prints how far they are apart."""
    chosen = names or list(RECIPES)
    unknown = [name for name in chosen if name not in RECIPES]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose of {', '.join(RECIPES)}")
    if plan:
        for name in chosen:
            page = PAGES / f"{name}.md"
            page.write_text(replanned(page.read_text(), RECIPES[name]))
        return
    failed = skipped = 0
    print(
        f"{'recipe':18} {'losses':>6} {'apart':>8} {'allowed':>8} {'device':>10} {'RAM':>10} {'disk':>10} {'runs':>7}"
    )
    for name in chosen:
        recipe = RECIPES[name]
        lacks = missing(recipe)
        if lacks:
            skipped += 1
            print(f"{name:18} skipped, {lacks}", flush=True)
            continue
        try:
            found = compare(name)
            right = found.difference <= recipe.bound
            if write and right:
                page = PAGES / f"{name}.md"
                page.write_text(written(page.read_text(), figures(name, found)))
        except RecipeError as error:
            failed += 1
            print(f"{name:18} failed: {error}", flush=True)
            continue
        failed += not right
        sizes = " ".join(f"{format_bytes(found.tiers[tier]):>10}" for tier in ("device", "RAM", "disk"))
        print(
            f"{name:18} {found.losses:6} {found.difference:8.1e} {recipe.bound:8.0e} {sizes} {found.seconds:5.0f} s"
            f"{'' if right else '  FAILED'}",
            flush=True,
        )
    print(f"{len(chosen) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
