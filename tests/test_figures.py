"""Figures that pages quote are those of the committed results: each sentence is made from these anew, and looked for.

What a page says of a result is written by hand; then the result is measured again, or only its best column is quoted.
Here a sentence stands as a template, and its figures are read from the page of bench/results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
SHORT = "bench/results/README.md"


@cache
def table(page: str, first: str) -> dict[str, dict[str, str]]:
    """The rows of all tables of a page whose first column is called `first`: by its cells, each by column."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in (RESULTS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif columns[0] == first and not set(line) <= set("|-: "):
            found[cells[0]] = dict(zip(columns, cells, strict=True))
    assert found, (page, first)
    return found


@cache
def on_gpu(case: str, figure: str) -> float:
    """A figure of the report of the GPU's cases."""
    found = re.search(
        rf"^\| {re.escape(case)} \| {re.escape(figure)} \| ([\d.,e+]+) \|",
        (RESULTS / "gpu" / "report.md").read_text(),
        re.MULTILINE,
    )
    assert found, (case, figure)
    return float(found[1].replace(",", ""))


def best_of_peers(page: str) -> dict[tuple[str, str], float]:
    """How many times as much DeepSpeed's better setting takes, by model and by what is compared."""
    rows = re.findall(r"^- (\w+), ([\w ]+), DeepSpeed's best by ours: ([\d.]+)", (RESULTS / page).read_text(), re.M)
    return {(model, what): float(by) for model, what, by in rows}


def to(value: float, digits: int) -> str:
    """A figure with so many digits after the point, halves rounded up as a reader would."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def between(values: list[float], digits: int = 1, unit: str = "") -> str:
    return f"{to(min(values), digits)}{unit} to {to(max(values), digits)}{unit}"


def of_training() -> Iterator[tuple[str, str]]:
    """Steps of a GPT on a GPU."""
    tokens = 4096, 16384, 65536
    streamed = [f"train-streamed-cpu-{number}" for number in tokens]
    speeds = [f"{to(on_gpu(case, 'x torch'), 2)}" for case in streamed]
    at_few, at_some, at_many = (on_gpu(case, "GB of the device") for case in streamed)
    disk = "train-nvme-4096"
    plain = [on_gpu(case, "torch, GB of the device") for case in streamed]
    yield (
        "README.md",
        f"at {speeds[0]}, {speeds[1]} and {speeds[2]} of the speed of plain torch with 4,096, 16,384 and 65,536 tokens "
        f"a step, in {to(at_few, 1)}, {to(at_some, 1)} and {to(at_many, 0)} GB of the device instead of "
        f"{to(plain[0], 0)} to {to(plain[2], 0)}. With states on a disk of 2 GB/s and 4,096 tokens it is "
        f"{to(on_gpu(disk, 'x torch'), 2)} of that speed, {to(on_gpu(disk, 's a step'), 1)} s a step",
    )
    names = {"device": '`tier="device"`', "cpu": "states in RAM", "streamed-cpu": "states and parameters in RAM"}
    for name, words in names.items():
        cases = [f"train-{name}-{number}" for number in tokens]
        by = " | ".join(f"{to(on_gpu(case, 'x torch'), 2)}x" for case in cases)
        first, last = (f"{to(on_gpu(case, 'GB of the device'), 1)} GB" for case in (cases[0], cases[2]))
        yield SHORT, f"| {words} | {by} | {first} | {last} |"
    muon = on_gpu("muon", "offload, s a step") / on_gpu("muon", "torch, s a step")
    yield "docs/optimizers.md", f"a step of 1e9 parameters took {to(muon, 1)} times plain torch's"


def of_steps() -> Iterator[tuple[str, str]]:
    """Steps and iterations beside what bounds them."""
    steps = table("step.md", "states")
    on_disk = [float(row["x limit"]) for name, row in steps.items() if name != "100% in RAM"]
    yield "README.md", f"with nothing computed | {between(on_disk, 2)} times as long |"
    words = {
        "none": "0% in RAM",
        "none, split master": "0% in RAM, split master",
        "a quarter": "25% in RAM",
        "half": "50% in RAM",
        "three quarters": "75% in RAM",
    }
    for share, name in words.items():
        row = steps[name]
        moved, seconds, disk, by = (
            float(row[column]) for column in ("moved a parameter", "seconds", "disk alone", "x limit")
        )
        yield SHORT, f"| {share} | {to(moved, 1)} | {to(seconds, 2)} s | {to(disk, 2)} s (disk) | {to(by, 2)}x |"
    floors = {}
    for page in ("hiding.md", "iterations.md"):
        floors[page] = [float(row["x floor"]) for row in table(page, "tokens").values()]
        least, most = min(floors[page]), max(floors[page])
        yield SHORT, f"]({page})) | {to(least, 2)}x to {to(most, 2)}x |"
        yield "README.md", f"| {to(least, 2)} to {to(most, 2)} times as long ([page](bench/results/{page})) |"
    tried = [f"{to(float(row['x step']), 2)}" for row in table("hiding.md", "tokens").values()]
    yield (
        "docs/options.md",
        f"iterations took {tried[0]}, {tried[1]} and {tried[2]} of those without at 16, 128 and 1,024",
    )


def of_peers() -> Iterator[tuple[str, str]]:
    """Iterations beside DeepSpeed's."""
    states, other, everything = map(best_of_peers, ("peers.md", "peers-46m.md", "peers-params.md"))
    step, phase, memory = "whole step", "optimizer phase", "peak RSS"
    rows = {
        "states | 46M | 1,024": (states, "46M"),
        "states, on an Intel Xeon ([peers-46m.md](peers-46m.md)) | 46M | 1,024": (other, "46M"),
        "states | 368M | 256": (states, "368M"),
        "states, parameters, gradients | 46M | 1,024": (everything, "46M"),
    }
    for words, (page, model) in rows.items():
        by = " | ".join(f"{to(page[model, what], 1)}x" for what in (step, phase, memory))
        yield SHORT, f"| {words} | {by} |"
    steps, peaks = ([states[model, what] for model in ("46M", "368M")] for what in (step, memory))
    yield (
        "README.md",
        f"| {between(steps)} times faster, {between(peaks)} times less memory (46M on an Intel Xeon: "
        f"[{to(other['46M', step], 1)} and {to(other['46M', memory], 1)}]",
    )
    peaks.append(other["46M", memory])
    steps.append(other["46M", step])
    yield (
        "docs/alternatives.md",
        f"states on NVMe: {between(steps)} times the step and {between(peaks)} times the memory of `offload`",
    )
    peaks = [everything[model, memory] for model in ("46M", "368M")]
    yield "README.md", f"(the optimizer phase: {to(everything['368M', phase], 2)} to {to(everything['46M', phase], 1)})"
    yield "README.md", f", {between(peaks)} times less memory |"


def of_parts() -> Iterator[tuple[str, str]]:
    """The kernel, the disk engine, the network, memory."""
    kernels = [
        float(re.findall(rf"^\| mixed, n = 1e\+08, {threads} threads \| {name} \|.*\| ([\d.]+) \|$", page, re.M)[0])
        for page in [(RESULTS / "adam.md").read_text()]
        for name in ("offload avx512", "torch fused")
        for threads in (1, 2)
    ]
    yield "README.md", f"through RAM | {between(kernels[:2], 2)} times as long |"
    yield SHORT, f"| {between(kernels[:2], 2, 'x')} |"
    yield SHORT, f"| torch's fused Adam with its casts | the same | {between(kernels[2:], 1, 'x')} |"
    rates = re.findall(r"^\| (?:preadv|fio|DeepSpeed).*\| ([\d.]+) \|$", (RESULTS / "io.md").read_text(), re.M)
    times = [1 / float(rate) for rate in rates]
    yield "README.md", f"a preadv pool | {between(times, 2)} times as long |"
    depth = [float(row["peak RSS"].split()[0]) for row in table("depth.md", "layers").values()]
    yield "README.md", f"take {to((depth[2] / depth[0] - 1) * 100, 0)} % more memory ([depth.md]"
    delays = {name: row["delays"] for name, row in table("delays.md", "").items()}
    names = "offload, stage 2", "offload, stage 3", "DDP", "FSDP2", "a commit", "a start"
    two, three, plain, other, commit, start = (to(float(delays[name]), 0) for name in names)
    yield (
        "docs/ranks.md",
        f"{two} at stage 2 and {three} at stage 3, where DDP has {plain} (13 in an earlier run) and FSDP2 {other}; "
        f"a commit {commit}, a start {start} ([delays.md]",
    )
    for page, parameters in ("pretrained-full.md", "2.5e9"), ("pretrained-lora.md", "3.0e9"):
        value = {name: row["value"] for name, row in table(page, "what").items()}
        assert f"{int(value['parameters'].replace(',', '')):.1e}" == parameters.replace("e9", "e+09")
        columns = "weights bytes", "planned peak bytes", "peak rss bytes"
        yield (
            "README.md",
            f"([page](bench/results/{page})) | {' | '.join(value[name] for name in columns)} | {value['step s']} s | "
            f"{value['disk alone s']} s |",
        )


QUOTED = [*of_training(), *of_steps(), *of_peers(), *of_parts()]


@pytest.mark.parametrize("page", sorted({page for page, _ in QUOTED}))
def test_quoted_figures_are_those_of_the_committed_results(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert [sentence for name, sentence in QUOTED if name == page and sentence not in text] == []
