"""The picture of `offload bench step`, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from offload.cli.bench_step_report import WHOLE_BYTES, Report, Result, caption, whole


def draw(report: Report, file: Path) -> None:
    """Step time and bytes against the budget, each with its limit."""
    figure = Figure(figsize=(12, 5.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    times, moved = figure.subplots(1, 2)
    lines, split = whole(report.results), [one for one in report.results if one.case.split_master]
    _times(times, lines, split)
    _bytes(moved, lines, split)
    for axes in (times, moved):
        axes.set_xlabel("optimizer states that RAM has room for (%)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    figure.suptitle(f"step() of {report.results[0].case.n:,} parameters on the NVMe tier", fontsize=11)
    figure.supxlabel(caption(report), fontsize=7)
    figure.savefig(file)


def _times(axes: Axes, lines: Sequence[Result], split: Sequence[Result]) -> None:
    shares = [100 * one.case.share for one in lines]
    axes.plot(
        shares, [one.limit_s for one in lines], "--", color="tab:gray", label="limit: the larger of the two below"
    )
    axes.plot(shares, [one.disk_s for one in lines], ":", color="tab:orange", label="the same bytes, the drive alone")
    axes.plot(shares, [one.kernel_s for one in lines], ":", color="tab:green", label="Adam alone, states in RAM")
    _steps(axes, lines, "o-", "tab:blue", "step() and synchronize(), fastest to slowest", (8, 5))
    if split:
        _steps(axes, split, "*", "tab:red", "with a split master", (-30, -3))
        axes.plot([100 * one.case.share for one in split], [one.limit_s for one in split], "_", color="tab:red",
                  markersize=14, label="its limit")  # fmt: skip
    axes.set_ylabel("seconds a step (medians)")
    axes.set_title("Time; the number is x limit", fontsize=10)


def _steps(axes: Axes, results: Sequence[Result], style: str, color: str, label: str, shift: tuple[int, int]) -> None:
    shares = [100 * one.case.share for one in results]
    spread = [
        [one.step_s - min(one.steps) for one in results],
        [max(one.steps) - one.step_s for one in results],
    ]
    axes.errorbar(shares, [one.step_s for one in results], spread, fmt=style, color=color, capsize=3, label=label)
    for share, one in zip(shares, results, strict=True):
        axes.annotate(
            f"{one.x_limit:.2f}", (share, one.step_s), xytext=shift, textcoords="offset points", color=color,
            fontsize=8,
        )  # fmt: skip


def _bytes(axes: Axes, lines: Sequence[Result], split: Sequence[Result]) -> None:
    axes.plot([0, 100], [WHOLE_BYTES, 0], "--", color="tab:gray", label=f"(1 - share) x {WHOLE_BYTES}")
    axes.plot([100 * one.case.share for one in lines], [one.bytes_per_param for one in lines], "o", color="tab:blue",
              label="measured")  # fmt: skip
    if split:
        axes.plot([100 * one.case.share for one in split], [one.bytes_per_param for one in split], "*",
                  color="tab:red", markersize=9, label="with a split master")  # fmt: skip
    for one in [*lines, *split]:
        axes.annotate(
            f"{one.bytes_per_param:.2f}", (100 * one.case.share, one.bytes_per_param), xytext=(6, 4),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
    axes.set_ylabel("bytes read and written, a parameter and step")
    axes.set_title("Bytes", fontsize=10)
