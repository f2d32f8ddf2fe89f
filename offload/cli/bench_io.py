"""`offload bench io`: finds the fastest engine, request size and depth for a drive, for `io_engine="auto"`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli.console import plain_console, print_json, say, show_table
from offload.cli.options import Json


def io(
    paths: Annotated[list[Path], typer.Argument(help="Directories on the drives to measure.")],
    size: Annotated[str | None, typer.Option(help="Bytes of the file measured; by default 1GiB or what fits.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the race of the best settings.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller file and fewer settings: some seconds.")] = False,
    json: Json = False,
) -> None:
    """Measure drives, and remember the best settings for io_engine="auto".

    Our engines are compared with each other and with a plain pool of threads, on the same file and in turns.
    """
    from rich.table import Table

    from offload.cli import io_speed

    stderr, stdout = plain_console(stderr=True), plain_console()
    results = io_speed.measure_all(paths, size, rounds, quick=quick, console=stderr)
    for result in results:
        say(stderr, io_speed.remember_settings(result))
    if json:
        print_json({"drives": [result.as_json() for result in results]})
        return
    for result in results:
        table = Table(*io_speed.HEADINGS, title=f"{result.path.resolve()}: {result.title}", title_justify="left")
        for row in result.rows():
            table.add_row(*row)
        show_table(stdout, table)
        for line in result.remarks():
            say(stdout, line)
