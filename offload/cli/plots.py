"""Pictures, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def loss_curve(file: Path, title: str, train: Sequence[float], validation: Sequence[tuple[int, float]]) -> None:
    """Write a PNG of a run's loss.

    Args:
        train: the loss of steps 1, 2, ...: of each step's own batch, before its update.
        validation: (steps done, loss on the held-out text).
    """
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(len(train)), train, color="tab:blue", linewidth=0.8, alpha=0.6, label="training batch")
    steps, losses = zip(*validation, strict=True)
    axes.plot(steps, losses, "o-", color="tab:orange", linewidth=1.6, markersize=4, label="held-out text")
    for index, shift, side in ((0, (8, 0), "left"), (-1, (0, 8), "right")):
        point = (steps[index], losses[index])
        text = axes.annotate(f"{losses[index]:.2f}", point, xytext=shift, textcoords="offset points")
        text.set(color="tab:orange", horizontalalignment=side)
    axes.set_title(title)
    axes.set_xlabel("optimizer steps done")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
