"""`offload probe`: how fast this machine is, for `offload plan`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from offload.cli.console import plain_console, print_json, say, show_table
from offload.cli.options import Json
from offload.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from offload.cli.probing import Drive
    from offload.planner.rates import Rate, Rates

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
"""Of units, largest first."""


def probe(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="A directory on each drive to measure.", show_default="the current directory"),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write a description of this machine here, for `offload plan --machine` elsewhere."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine, in about half a minute: drives, RAM, matrix products, steps, Python, the device's link.

    `offload plan` and io_engine="auto" use what was measured, for 90 days.
    """
    from offload.cli import probing
    from offload.cli.progress import progress

    stderr = plain_console(stderr=True)
    directories = paths or [Path()]
    if save is not None:
        _require_new(save)
    sizes = probing.require_drives(directories)
    with progress(stderr, "this machine:", probing.count_of_measurements()) as tell:
        found = probing.measure_rates(tell)
    drives, together = probing.measure_drives(directories, sizes, stderr)
    found = replace(found, host=probing.measure_host(drives[0]))
    try:
        file = probing.remember_all(found, drives, together)
        say(stderr, f'offload plan and io_engine="auto" use this for 90 days ({file})')
    except OSError as error:
        say(stderr, f"cannot write down what was measured: {error}")
    if save is not None:
        probing.save(save, found, drives, together)
        say(stderr, f"offload plan --machine {save} plans for this machine")
    if json:
        print_json(_as_json(found, drives, together))
        return
    _show(plain_console(), found, drives, together)


def _require_new(file: Path) -> None:
    """Requires a name under which there is nothing yet, in a directory that can be written to.

    Raises:
        ConfigError: there is something, or no such directory.
    """
    if file.exists() or file.is_symlink():
        raise ConfigError(f"--save {file}: there is something of that name; give another one")
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--save {file}: there is no directory {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--save {file}: {folder} is not writable; choose another place")


def _as_json(found: Rates, drives: Sequence[Drive], together: Rate | None) -> dict[str, Any]:
    """All rates, in bytes, operations and elements a second, and what Python takes, in seconds."""
    import msgspec

    rates: dict[str, Any] = msgspec.to_builtins(found)
    del rates["measured_at"]
    of_drives = [
        {"path": str(drive.path.resolve()), "engine": drive.settings.engine} | msgspec.to_builtins(dict(drive.rates))
        for drive in drives
    ]
    return rates | {"drives": of_drives, "together": msgspec.to_builtins(together)}


def _rows(found: Rates, drives: Sequence[Drive], together: Rate | None) -> Iterator[tuple[str, Rate, str]]:
    """The rows of the table.

    Yields:
        What was measured, its rate, and the unit.
    """
    for drive in drives:
        where = f"{drive.path.resolve()} ({drive.settings.engine})"
        for operation, rate in drive.rates.items():
            yield f"{where}: {operation}", rate, "B/s"
    if together is not None:
        yield "all drives together: mixed", together, "B/s"
    yield "RAM: a copy, read and written", found.memory, "B/s"
    for dtype, rate in found.products.items():
        yield f"{found.device}: products of matrices, {dtype}", rate, "FLOP/s"
    for name, rate in found.steps.items():
        yield f"step in RAM, {found.threads} threads: {name}", rate, "elements/s"
    if found.link is not None:
        for way, rate in (("to the device", found.link.up), ("to RAM", found.link.down), ("both", found.link.both)):
            yield f"link: {way}", rate, "B/s"
    if found.host is not None:
        yield "Python: a tile, forward or backward", found.host.tile, "s"
        yield "Python: a chunk of states, read, stepped and written", found.host.chunk, "s"
        if found.host.resident is not None:
            yield "Python: a chunk of states in RAM, stepped alone", found.host.resident, "s"
        if found.host.moved is not None:
            yield "Python: a chunk of parameters, read or written", found.host.moved, "s"
        if found.host.delay is not None:
            yield "a page, read or written alone", found.host.delay, "s"


def _show(console: Console, found: Rates, drives: Sequence[Drive], together: Rate | None) -> None:
    from rich.table import Table

    table = Table("", "median", "lowest", "highest", "")
    for what, rate, unit in _rows(found, drives, together):
        scale, prefix = next((one for one in PREFIXES if rate.median >= one[0]), PREFIXES[-1])
        table.add_row(
            what, *(f"{value / scale:.3g}" for value in (rate.median, rate.lowest, rate.highest)), prefix + unit
        )
    show_table(console, table)
