"""`offload plan --sweep device_memory`: what a step moves for each of several budgets, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.console import plain_console, print_json, say, show_table
from offload.cli.options import SWEPT, PlanOptions
from offload.cli.plan import link_of, planned_of, speed_of, summarise
from offload.cli.plan_tables import WORDS
from offload.cli.plots import can_draw, new_figure, write
from offload.errors import BudgetError
from offload.sizes import GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from offload.cli.plan_models import Sized
    from offload.planner.activations import Waiting

POINTS = 12
"""How many budgets are tried: equal parts of the one that has room for everything, and those that work are shown."""


def show_sweep(
    options: PlanOptions, model: Sized, waiting: Waiting | None, picture: Path | None, *, json: bool
) -> None:
    """Prints the points of a sweep, and draws them.

    Args:
        options: the options of the command.
        model: the model.
        waiting: what waits of a micro-batch for its backward; None: that is unknown.
        picture: where they are drawn; None: into `device_memory.png`, where matplotlib is installed, for people only.
        json: whether to print one JSON object.

    Raises:
        BudgetError: no `device_memory` helps, since other memory is too small.
        ConfigError: the picture cannot be written.
    """
    console, points = plain_console(), swept(options, model, waiting)
    if json:
        print_json({"sweep": SWEPT, "points": points})
    else:
        _show(console, points, options)
        if picture is None and can_draw():
            picture = Path(f"{SWEPT}.png")
    if picture is not None:
        draw(picture, points)
        if not json:
            say(console, f"Drawn into {picture}.")


def _show(console: Console, points: Sequence[dict[str, Any]], options: PlanOptions) -> None:
    """Prints the points of a sweep as a table."""
    from rich.table import Table

    has_step = points[0]["step_seconds"] is not None
    table = Table(title="What --device-memory would do", title_justify="left")
    for name in ("--device-memory", "parameters", "states there", "over the link", "over the disk", "step, computed"):
        table.add_column(name, justify="right")
    for one in points:
        table.add_row(
            format_bytes(one["device_memory"]),
            one["param_tier"] + (f", {one['staying_units']} units stay" if one["staying_units"] else ""),
            f"{one['device_share']:.0%}",
            format_bytes(one["link_bytes"]) if one["link_bytes"] is not None else "-",
            format_bytes(one["disk_bytes"]),
            f"{one['seconds']:.3g} s",
        )
    show_table(console, table)
    counted = "compute, the disk" if has_step else "the disk"
    up, down, link_from = link_of(options)
    rate = f"{up / 1e9:.3g} GB/s each way" if up == down else f"{up / 1e9:.3g} GB/s up and {down / 1e9:.3g} down"
    say(console, f"Seconds are those of {counted} and a link of {rate} ({WORDS[link_from]}), beside another.")


def swept(options: PlanOptions, model: Sized, waiting: Waiting | None) -> list[dict[str, Any]]:
    """The figures of each budget; see `show_sweep` for arguments and errors."""
    options = replace(options, sweep=None)
    most = planned_of(replace(options, device_memory=f"{1 << 62}"), model, waiting).place().device_bytes
    points = []
    for part in range(1, POINTS + 1):
        try:
            points.append(_point(replace(options, device_memory=f"{-(-most * part // POINTS)}B"), model, waiting))
        except BudgetError as error:
            if error.option != "device_memory":
                raise
    return points


def _point(options: PlanOptions, model: Sized, waiting: Waiting | None) -> dict[str, Any]:
    planned = planned_of(options, model, waiting)
    found, speed = summarise(planned, options), speed_of(planned, options, model)
    states, up, down = planned.place().states, found["link_up_bytes"], found["link_down_bytes"]
    up_rate, down_rate, _ = link_of(options)
    link_seconds = 0.0 if up is None else max(up / up_rate, down / down_rate)
    step_seconds = speed.get("step_seconds")
    return {
        "device_memory": parse_bytes(options.device_memory or 0, "--device-memory"),
        "device_bytes": found["device_bytes"],
        "param_tier": found["param_tier"],
        "staying_units": found["staying_units"],
        "device_share": states.device_bytes / sum(states.sizes),
        "link_bytes": None if up is None else up + down,
        "disk_bytes": found["read_bytes"] + found["written_bytes"],
        "link_seconds": link_seconds,
        "disk_seconds": speed["disk_seconds"],
        "step_seconds": step_seconds,
        "seconds": max(link_seconds, speed["disk_seconds"] if step_seconds is None else step_seconds),
    }


def draw(file: Path, points: Sequence[dict[str, Any]]) -> None:
    """Writes a PNG: bytes over link and disk, and seconds, against `device_memory`.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(8, 6)
    moved, taken = figure.subplots(2, 1, sharex=True)
    budgets = [one["device_memory"] / GIB for one in points]
    for key, name, colour in (("link_bytes", "over the link", "#4c78a8"), ("disk_bytes", "over the disk", "#54a24b")):
        if points[0][key] is not None:
            moved.plot(budgets, [one[key] / GIB for one in points], "o-", color=colour, label=name)
    taken.plot(budgets, [one["seconds"] for one in points], "o-", color="#f58518", label="step")
    taken.plot(budgets, [one["disk_seconds"] for one in points], "--", color="#54a24b", label="the disk alone")
    taken.plot(budgets, [one["link_seconds"] for one in points], "--", color="#4c78a8", label="the link alone")
    moved.set(title="What a step moves and takes, by the memory of the device (computed)", ylabel="GiB a step")
    taken.set(xlabel="device_memory (GiB)", ylabel="seconds")
    for axes in (moved, taken):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    write(figure, file)
