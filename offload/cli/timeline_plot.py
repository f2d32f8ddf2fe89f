"""The timeline as a picture: lanes are rows, time runs to the right."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.plots import new_figure, write
from offload.io.regular import read_file
from offload.sizes import GIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "forward": "#4c78a8",
    "inference": "#9ecae9",
    "backward": "#1f4e79",
    "step": "#b0b0b0",
    "unit": "#7fa6cf",
    "gradient": "#72b7b2",
    "sum of squares": "#2f8f83",
    "accumulate": "#59a89c",
    "cast": "#98d0c5",
    "Adam": "#f58518",
    "read": "#54a24b",
    "write": "#b8423f",
    "check": "#8cd17d",
    "seal": "#e79a96",
    "copy": "#8f6bb3",
    "upload": "#9c755f",
    "all_gather": "#e377c2",
    "reduce_scatter": "#bcbd22",
    "wait for read": "#333333",
    "wait for write": "#777777",
    "wait for buffer": "#b5b5b5",
    "other wait": "#c7a76c",
}
"""By kind of event."""
MOST_BYTES = 4 * GIB
"""Of a timeline file."""
THINNEST = 0.0008
"""Of the picture's width: what is shorter is drawn so, or it could not be seen."""


@dataclass(frozen=True)
class Bar:
    """One event of a lane.

    Attributes:
        kind: what it is, a key of COLOURS.
        start: when it began, in ms.
        length: how long it took, in ms.
        size: how many bytes it moved.
    """

    kind: str
    start: float
    length: float
    size: int


def read_lanes(source: Path) -> dict[str, list[Bar]]:
    """Reads the bars of each lane of a timeline file, by the lane's name, from the top lane down."""
    events: list[dict[str, Any]] = json.loads(read_file(source, MOST_BYTES))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    lanes: dict[str, list[Bar]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event["tid"]):
        if event["ph"] not in "Xb":
            continue
        length = event["dur"] if event["ph"] == "X" else ends[event["id"]] - event["ts"]
        is_other = event["cat"].startswith("wait") and event["cat"] not in COLOURS
        kind = "other wait" if is_other else event["cat"]
        bar = Bar(kind, event["ts"] / 1000, length / 1000, event["args"].get("bytes", 0))
        lanes[names[event["tid"]]].append(bar)
    return lanes


def timeline_picture(source: Path, picture: Path, title: str) -> None:
    """Writes a PNG of a timeline file.

    Beside each lane stand the part of the time in which it was busy, and how much its transfers moved.

    Args:
        source: the timeline file.
        picture: the PNG.
        title: the title of the picture.

    Raises:
        ConfigError: matplotlib is not installed, or the picture cannot be written.
    """
    lanes = read_lanes(source)
    ends = [bar.start + bar.length for bars in lanes.values() for bar in bars]
    starts = [bar.start for bars in lanes.values() for bar in bars]
    first, last = min(starts, default=0.0), max(ends, default=1.0)
    figure = new_figure(14, 1.8 + 0.55 * max(len(lanes), 3))
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    for row, bars in enumerate(lanes.values()):
        _draw(axes, row, bars, (last - first) * THINNEST)
        axes.annotate(
            _note(bars, last - first), (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=9
        )
    for bar in next((bars for lane, bars in lanes.items() if "step" in lane), []):
        if bar.kind == "step":
            axes.axvline(bar.start + bar.length, color="#888888", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(first, last)
    axes.set_xlabel("time (ms); dotted: a step() returned. At the right: time with something in the lane, bytes moved")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.25)
    used = [kind for kind in COLOURS if any(bar.kind == kind for bars in lanes.values() for bar in bars)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, min(len(handles), 8)), frameon=False)
    write(figure, picture)


def _draw(axes: Axes, row: int, bars: list[Bar], thinnest: float) -> None:
    """Draws a lane. Bars that overlap share its height."""
    free: list[float] = []
    placed: list[tuple[Bar, int]] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        level = next((n for n, end in enumerate(free) if end <= bar.start), len(free))
        free[level : level + 1] = [bar.start + bar.length]
        placed.append((bar, level))
    height = 0.8 / max(len(free), 1)
    groups: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for bar, level in placed:
        groups[bar.kind, level].append((bar.start, max(bar.length, thinnest)))
    for (kind, level), spans in groups.items():
        bottom = row - 0.4 + level * height
        seam = 0.6 if kind == "unit" else 0  # units touch each other
        colour = COLOURS.get(kind, "#333333")
        axes.broken_barh(spans, (bottom, height * 0.94), facecolors=colour, edgecolors="white", linewidth=seam)


def _note(bars: list[Bar], whole: float) -> str:
    busy, reached = 0.0, float("-inf")
    for bar in sorted(bars, key=lambda bar: bar.start):
        end = bar.start + bar.length
        busy += max(0.0, end - max(bar.start, reached))
        reached = max(reached, end)
    moved = sum(bar.size for bar in bars if bar.kind in ("read", "write", "copy"))
    part = f"{busy / whole:.0%}" if whole else ""
    return f"{part}  {format_bytes(moved)}" if moved else part
