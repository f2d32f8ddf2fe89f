"""The command line: `offload` and its commands.

They are `train`, `plan`, `probe`, `doctor`, `convert`, `list`, `inspect`, `verify`, `export`, `remove` and `bench io`.
They import torch when they run, not when they are registered, so that `--help` is quick.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated

import typer

from offload.cli.bench_io import io
from offload.cli.console import EXIT_CLOSED, EXIT_ERROR, EXIT_INTERRUPTED, Commands
from offload.cli.convert import convert
from offload.cli.doctor import doctor
from offload.cli.plan import plan
from offload.cli.probe import probe
from offload.cli.stored import export, inspect, list_runs, remove, verify
from offload.cli.train import train


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from offload.cli.machine import package_version

        print(f"offload {package_version()}, torch {version('torch')}")
        raise typer.Exit


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False)


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and torch's.")
    ] = False,
) -> None:
    """Train models that do not fit: optimizer states in CPU memory or on NVMe."""


for command in (train, plan, probe, doctor, convert):
    app.command()(command)
app.command("list")(list_runs)
for reader in (inspect, verify, export, remove):
    app.command()(reader)

bench = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure this machine.")
bench.command()(io)
# Without it, typer would make a group of one command that command.
bench.callback()(lambda: None)
app.add_typer(bench, name="bench")


def run() -> None:
    """Runs the command line. It is the console script."""
    # Schedulers and `timeout` send SIGTERM: a run then removes its swap files, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Names of files, and what a model writes, may have what the terminal's encoding has not: that is no end of a run.
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what it does not take is an error here, and not after the end
    except KeyboardInterrupt:  # before or after a command, which handles its own
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:  # of stdout, on a full disk or a closed pipe: commands have errors of their own
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries once more at its end
        if error.errno == errno.EPIPE:
            sys.exit(EXIT_CLOSED)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
