"""What every command shares: errors as one message, Ctrl-C as exit code 130, JSON on a clean stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from offload.errors import OffloadError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count it


class Commands(TyperGroup):
    """A group of commands that print errors of this library as one message, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        # Here and not in `run`, so that commands called by a test's runner end the same way.
        try:
            return super().invoke(ctx)
        except OffloadError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_ERROR) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from error


def print_json(values: dict[str, Any]) -> None:
    """One object on stdout. Raises: ValueError for NaN and infinities, which JSON does not have."""
    print(json.dumps(values, indent=2, allow_nan=False))
