"""The command line: `offload train`, `offload plan`, `offload doctor`, `offload bench ...`.

Commands import torch when they run, not when they are registered, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

import typer

from offload.cli.bench_adam import adam
from offload.cli.bench_io import io
from offload.cli.bench_step import step
from offload.cli.console import EXIT_INTERRUPTED, Commands
from offload.cli.doctor import doctor
from offload.cli.plan import plan
from offload.cli.train import train

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    help="Train models that do not fit: optimizer states in CPU memory or on NVMe.",
)
app.command()(train)
app.command()(plan)
app.command()(doctor)

bench = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure this machine against its own limits.")
bench.command()(adam)
bench.command()(io)
bench.command()(step)
app.add_typer(bench, name="bench")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def run() -> None:
    """The console script."""
    # Schedulers and `timeout` end a run so: it takes its swap files with it, as after Ctrl-C.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except KeyboardInterrupt:  # before or after a command, which handles its own
        sys.exit(EXIT_INTERRUPTED)
