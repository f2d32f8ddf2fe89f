"""The pictures of `offload bench io`, drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from offload.cli.bench_io_contestants import OPERATIONS, size_label
from offload.cli.bench_io_report import Result, caption, label


def draw_all(results: Sequence[Result], out: Path) -> list[Path]:
    """A heat map and a bar chart a path, in the folder `out`; returns them."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = []
    for index, result in enumerate(results):
        suffix = f"-{index + 1}" if len(results) > 1 else ""
        for draw, name in ((heat_map, "heat"), (bars, "bars")):
            picture = out / f"io-{name}{suffix}.png"
            draw(result, picture)
            pictures.append(picture)
    return pictures


def heat_map(result: Result, file: Path) -> None:
    """GB/s by request size and depth: a row of panels an engine, a column an operation."""
    engines = list(dict.fromkeys(point.engine for point in result.points))
    requests = sorted({point.request_bytes for point in result.points})
    depths = sorted({point.depth for point in result.points})
    height = len(engines) * (1.2 + 0.4 * len(depths)) + 0.8
    figure = Figure(figsize=(4 + 1.8 * len(requests), height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(engines), len(OPERATIONS), squeeze=False)
    for column, operation in enumerate(OPERATIONS):
        speeds = {(p.engine, p.depth, p.request_bytes): p.speed(operation) for p in result.points}
        for row, engine in enumerate(engines):
            axes = panels[row][column]
            cells = [[speeds.get((engine, depth, request), math.nan) for request in requests] for depth in depths]
            _heat(axes, cells, max(speeds.values()))
            axes.set_title(f"{engine}, {operation}", fontsize=10)
            axes.set_xticks(range(len(requests)), [size_label(request) for request in requests], fontsize=8)
            axes.set_yticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
            axes.set_xlabel("request", fontsize=8)
            axes.set_ylabel("depth", fontsize=8)
            if engine == result.best.engine:
                _frame(axes, requests.index(result.best.request_bytes), depths.index(result.best.depth))
    figure.suptitle(f"GB/s by request size and depth; framed: recommended ({label(result.best)})", fontsize=11)
    figure.supxlabel(caption(), fontsize=7)
    figure.savefig(file)


def _heat(axes: Axes, cells: list[list[float]], most: float) -> None:
    # From 0, so that equal colours are equal speeds and drift looks as small as it is.
    axes.imshow(cells, vmin=0, vmax=most, cmap="viridis", origin="lower", aspect="auto")
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            if not math.isnan(value):
                color = "black" if value > 0.6 * most else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)


def _frame(axes: Axes, x: int, y: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="tab:red", linewidth=2))


def bars(result: Result, file: Path) -> None:
    """Our engines at their best in the sweep, and each reference with our engine beside it."""
    engines = list(dict.fromkeys(point.engine for point in result.points))
    count = len(engines) + 2 * len(result.race.duels)
    figure = Figure(figsize=(15, 1.4 + 0.42 * count), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(OPERATIONS), sharey=True)
    for axes, operation in zip(panels, OPERATIONS, strict=True):
        names, speeds, colors, texts = [], [], [], []
        for engine in engines:
            best = max((p for p in result.points if p.engine == engine), key=lambda p: p.score)
            names.append(f"{engine} (sweep)")
            speeds.append(best.speed(operation))
            colors.append("tab:blue")
            texts.append(f"{speeds[-1]:.2f}")
        for name, duels in result.race.duels.items():
            duel = duels[operation]
            names += [name, f"{result.best.engine} beside {name}"]
            speeds += [duel.speed, duel.own_speed]
            colors += ["tab:orange", "tab:cyan"]
            texts += [f"{duel.speed:.2f}", f"{duel.own_speed:.2f} (x {duel.ratio:.2f})"]
        drawn = axes.barh(names, speeds, color=colors)
        axes.bar_label(drawn, texts, padding=3, fontsize=8)
        axes.set_title(operation, fontsize=10)
        axes.set_xlabel("GB/s")
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(f"{result.plan.fs}: x = median of paired ratios, ours by the reference's", fontsize=11)
    figure.supxlabel(caption(), fontsize=7)
    figure.savefig(file)
