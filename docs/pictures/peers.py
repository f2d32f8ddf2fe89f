"""Draws peers.svg, the README's chart of a step beside DeepSpeed and torch: `python docs/pictures/peers.py`.

Its figures are those of bench/results/peers.md, as `make bench-peers-step` measured them.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

PICTURE = Path(__file__).with_suffix(".svg")
RESULTS = PICTURE.parents[2] / "bench" / "results" / "peers.md"
COLOURS = {"offload": "#3a8f5c", "DeepSpeed": "#4878a8", "torch": "#9a9a9a"}
MIB = {"MiB": 1, "GiB": 1024}


def tables(page: str) -> dict[str, list[tuple[str, float, float]]]:
    """By the title of each table: contestant, seconds a step, GiB of its peak in the timed steps."""
    found = {}
    for section in page.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
        names, body = rows[0], rows[2:]
        step, peak = names.index("step s"), names.index("peak RSS")
        found[title] = [(row[0], float(row[step]), gib(row[peak])) for row in body]
    return found


def gib(size: str) -> float:
    """Of "970.9 MiB"."""
    number, unit = size.split()
    return float(number) * MIB[unit] / 1024


def bars(axes: Axes, names: list[str], values: list[float], unit: str) -> None:
    """One panel: a bar a contestant, each with its figure."""
    colours = [next(colour for name, colour in COLOURS.items() if one.startswith(name)) for one in names]
    drawn = axes.barh(names, values, color=colours)
    axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=9)
    axes.set_xlabel(unit)
    axes.set_xlim(0, 1.15 * max(values))
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Writes the picture."""
    plt.rcParams.update({"svg.hashsalt": "offload", "svg.fonttype": "none", "font.size": 10})
    found = tables(RESULTS.read_text())
    figure, panels = plt.subplots(len(found), 2, figsize=(9.5, 2.6 * len(found)), sharey="row", layout="constrained")
    for (title, unsorted), (left, right) in zip(found.items(), panels, strict=True):
        # The axis grows upwards: on NVMe above, and ours first.
        rows = sorted(unsorted, key=lambda row: ("NVMe" in row[0], row[0]))
        names = [name for name, _, _ in rows]
        bars(left, names, [step for _, step, _ in rows], "seconds a step")
        bars(right, names, [peak for _, _, peak in rows], "peak memory of the process, GiB")
        numel = re.sub(
            r"GPT of ([\d,]+) parameters.*, ", lambda of: f"{int(of[1].replace(',', '')) / 1e6:.0f}M, ", title
        )
        left.set_title(f"GPT of {numel} a step", loc="left", fontsize=10)
    figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
