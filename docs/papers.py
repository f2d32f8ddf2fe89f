"""Writes the table of docs/papers.md: `python docs/papers.py`. What ZeRO's configurations C1 to C5 take by our plan.

Every figure is one of `offload plan`: nothing is allocated or measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parent / "papers.md"
BEGINS, ENDS = "<!-- docs/papers.py writes this table -->", "<!-- until here -->"
CARD = 32 * 2**30
"""Of a V100 of 32 GB."""
SHARED, RANKS = 16, 25
"""Ranks that share matrices, and that share states: 400 cards."""
HEAD = """\
| | ZeRO-DP, ZeRO-R | the paper's largest model | it takes by our plan | our largest at that width | difference |
|---|---|---|---:|---:|---:|"""


class Configuration(NamedTuple):
    """A row of the paper's table 3, with the largest model of its figure 6 (shapes: its appendix, batch 16).

    Attributes:
        words: what the paper calls it.
        billions: of parameters, as the paper prints them.
        layers, width: of the model.
        options: of `offload plan`.
        gathers: whether whole gradients are on each rank, which our plan does not count without accumulation.
    """

    words: str
    billions: int
    layers: int
    width: int
    options: tuple[str, ...]
    gathers: bool = False


PARTED = "--partition-activations"
CONFIGURATIONS = {
    "C1": Configuration("P_os; C_B, M_D", 40, 50, 8192, ("--stage", "1", "--activation-tier", "device"), True),
    "C2": Configuration(
        "P_os; C_B, M_D, P_a", 60, 132, 6144, ("--stage", "1", "--activation-tier", "device", PARTED), True
    ),
    "C3": Configuration("P_os+g; C_B, M_D", 50, 62, 8192, ("--stage", "2", "--activation-tier", "device")),
    "C4": Configuration(
        "P_os+g; C_B, M_D, P_a", 140, 175, 8192, ("--stage", "2", "--activation-tier", "device", PARTED)
    ),
    "C5": Configuration(
        "P_os+g; C_B, M_D, P_a+cpu", 150, 187, 8192, ("--stage", "2", "--activation-tier", "cpu", PARTED)
    ),
}


def command(one: Configuration, layers: int) -> list[str]:
    """The arguments of `offload`."""
    shape = ("--layers", str(layers), "--width", str(one.width), "--batch", "16", "--seq", "1024")
    over = ("--tensor-parallel", str(SHARED), "--ranks", str(RANKS), "--tier", "device", "--no-commits")
    return ["plan", *shape, *over, *one.options, "--gpu", "--ram", "90GiB"]


def device_bytes(one: Configuration, layers: int) -> int:
    """What a rank's card holds by our plan, with whole gradients where the configuration has them."""
    run = "from offload.cli.main import run; run()"
    words = [sys.executable, "-c", run, *command(one, layers), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    whole = 2 * found["parameters"] - found["held_bytes"]["grad"] if one.gathers else 0
    return int(found["device_total_bytes"] + whole)


def row(name: str) -> str:
    """A line of the table."""
    one = CONFIGURATIONS[name]
    taken, half = device_bytes(one, one.layers), device_bytes(one, one.layers // 2)
    a_layer = (taken - half) / (one.layers - one.layers // 2)
    largest = one.layers + int((CARD - taken) // a_layer)
    billions = 12 * largest * one.width**2 / 1e9
    shape, more = f"{one.billions}B: {one.layers} x {one.width:,}", billions / one.billions - 1
    ours = f"{billions:.0f}B, {largest} layers"
    return f"| {name} | {one.words} | {shape} | {taken / 1e9:.1f} GB | {ours} | {more:+.0%} |"


def main() -> None:
    """Writes all rows into the page, between its marks."""
    page = PAGE.read_text()
    before, after = page[: page.index(BEGINS)], page[page.index(ENDS) :]
    table = "\n".join([HEAD, *map(row, CONFIGURATIONS)])
    PAGE.write_text(f"{before}{BEGINS}\n{table}\n{after}")


if __name__ == "__main__":
    main()
