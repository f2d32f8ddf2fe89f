"""Pictures, drawn without a display by matplotlib, which is optional: the extra `plots`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "matplotlib is not installed: pip install matplotlib"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """An empty figure.

    Args:
        width: in inches.
        height: in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if not can_draw():
        raise ConfigError(f"pictures cannot be drawn, because {MISSING}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def require_file(file: Path, option: str) -> None:
    """Requires that a picture can be drawn into a file, before anything is computed for it.

    Args:
        file: the picture.
        option: of the command that names it.

    Raises:
        ConfigError: matplotlib is not installed or does not write such a format, or there is no directory for the file
            that can be written to.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(
            f"{option} {file}: give a name that ends in .png, or in another of {', '.join(sorted(known))}"
        )
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a directory: give the name of a file")
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {file}: there is no directory {folder}; make it first")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {file} cannot be written: choose another place")


def write(figure: Figure, file: Path) -> None:
    """Writes a figure into a file, in the format that the file's name says.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


def loss_curve(file: Path, title: str, train: Sequence[float], validation: Sequence[tuple[int, float]]) -> None:
    """Writes a PNG of a run's loss.

    Args:
        file: the PNG.
        title: the title of the picture.
        train: the loss of steps 1, 2, ...: that of each step's own batch, before its update.
        validation: for each validation, how many steps were done and the loss on the held-out text.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    axes.plot(range(len(train)), train, color="tab:blue", linewidth=0.8, alpha=0.6, label="training batch")
    steps, losses = zip(*validation, strict=True)
    axes.plot(steps, losses, "o-", color="tab:orange", linewidth=1.6, markersize=4, label="held-out text")
    for index, shift, side in ((0, (8, 0), "left"), (-1, (0, 8), "right")):
        point = (steps[index], losses[index])
        text = axes.annotate(f"{losses[index]:.2f}", point, xytext=shift, textcoords="offset points")
        text.set(color="tab:orange", horizontalalignment=side)
    axes.set(title=title, xlabel="optimizer steps done", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    write(figure, file)
