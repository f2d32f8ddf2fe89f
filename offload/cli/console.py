"""What every command shares: errors as one message, Ctrl-C as exit code 130, JSON on a clean stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
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
            command = self.commands.get(ctx.invoked_subcommand or "")
            options = {name for param in getattr(command, "params", ()) for name in param.opts}
            print(f"{type(error).__name__}: {in_options(str(error), options)}", file=sys.stderr)
            raise typer.Exit(EXIT_ERROR) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from error


def in_options(message: str, options: Collection[str]) -> str:
    """A message of the library with arguments of Python, such as `resume=True`, as options of a command. Args: options:
    that the command has; other arguments stay as they are."""

    def shown(found: re.Match[str]) -> str:
        option, value = "--" + found[1].replace("_", "-"), found[2].strip("\"'")
        if option not in options:
            return found[0]
        if value in ("True", "..."):
            return option
        return f"{option} {value}"

    value = r"""("[^"]*"|'[^']*'|\.\.\.|[\w.]+)"""
    message = re.sub(rf"Tuning\((\w+)={value}\)", shown, message)
    message = re.sub(rf"(?<![-\w])([a-z]\w*)={value}", shown, message)
    names = {option[2:].replace("-", "_"): option for option in options}
    return re.sub(r"(?<![-\w])[a-z]+(?:_[a-z]+)+\b", lambda found: names.get(found[0], found[0]), message)


def printable(text: str) -> str:
    """`text` without what a terminal obeys or cannot show, as a file's name may have it: escaped as in Python."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def print_json(values: dict[str, Any]) -> None:
    """One object on stdout. Raises: ValueError for NaN and infinities, which JSON does not have."""
    print(json.dumps(values, indent=2, allow_nan=False))
