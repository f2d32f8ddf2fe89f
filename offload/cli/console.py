"""What every command shares: errors as one message, Ctrl-C as exit code 130, text as it is, JSON on a clean stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from offload.errors import OffloadError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXIT_CLOSED = 1
"""Whoever reads stdout has closed it: `offload plan | head -1`."""
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count it

_UNBOUNDED = 10_000
"""Columns of a terminal that no line fills."""
_FOLDED = 24
"""To so many columns paths and names are folded, if the terminal is narrow."""


_EMPTY_OPTION = re.compile("--[a-z0-9-]+=")


class Commands(TyperGroup):
    """A group of commands that print errors of this library as one message, without a traceback."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"suggest_commands": False})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Typer's own hint takes `resume` for `remove`.
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            near = get_close_matches(args[0], self.commands, 1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(self.commands)}"
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        # As a path it would be the working directory, which may hold a run to remove.
        if empty := [arg for arg in args if not arg or _EMPTY_OPTION.fullmatch(arg)]:
            ctx.fail(f"{empty[0] or 'an argument'} is empty: is a variable of the shell not set?")
        return super().resolve_command(ctx, args)

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
    """Writes the Python arguments in a message of the library, such as `resume=True`, as options of a command.

    Args:
        message: the message.
        options: the options that the command has. Other arguments stay as they are.
    """

    def shown(found: re.Match[str]) -> str:
        option, value = "--" + found[1].replace("_", "-"), found[2].strip("\"'")
        if option not in options:
            return found[0]
        if value in ("True", "..."):
            return option
        return f"{option} {value}"

    value = r"""("[^"]*"|'[^']*'|\.\.\.|[\w.]+)"""
    message = re.sub(rf"Tuning\((\w+)={value}\)", shown, message)
    message = re.sub(rf"(?:\bTuning\.)?(?<![-\w])([a-z]\w*)={value}", shown, message)
    names = {option[2:].replace("-", "_"): option for option in options}
    return re.sub(r"(?<![-\w])[a-z]+(?:_[a-z]+)+\b", lambda found: names.get(found[0], found[0]), message)


def printable(text: str) -> str:
    """Escapes what a terminal obeys or cannot show, as Python does it. A file's name may have that."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: a path such as "runs/[lr=1e-3]" is no markup of rich's.

    Args:
        stderr: whether it prints on stderr instead of stdout.
    """
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(console: Console, line: str) -> None:
    """Prints a sentence. At a terminal it is wrapped between words, elsewhere it is one line.

    The console is one of `plain_console`.
    """
    console.print(line, soft_wrap=not console.is_terminal)


def show_table(console: Console, table: Table) -> None:
    """Prints a table without cutting words. The console is one of `plain_console`.

    At a terminal that is too narrow for its lines, columns are narrowed to their longest words, the widest first. Paths
    and names are folded, in columns that say so. Elsewhere the title and each row have a line of their own.
    """
    from rich.cells import cell_len
    from rich.measure import Measurement
    from rich.text import Text

    width = Measurement.get(console, console.options.update(width=_UNBOUNDED), table).maximum
    if not console.is_terminal:
        title = str(table.title or "")
        table.title = Text(title, no_wrap=True, overflow="ignore") if title else None
        console.width = max(console.width, width, cell_len(title))
    elif width > console.width:
        _narrow(table, width - console.width)
    console.print(table)


def _narrow(table: Table, excess: int) -> None:
    from rich.cells import cell_len
    from rich.text import Text

    widths, words, folded = [], [], []  # of a column: its longest line, its longest word, the least where it may fold
    for column in table.columns:
        cells = [Text(one) if isinstance(one, str) else one for one in (column.header, *column.cells)]
        texts = [cell for cell in cells if isinstance(cell, Text)]
        widths.append(max((line.cell_len for text in texts for line in text.split()), default=0))
        longest = max((cell_len(word) for text in texts for word in text.plain.split()), default=0)
        words.append(widths[-1] if column.no_wrap else longest)
        folded.append(min(words[-1], _FOLDED) if column.overflow == "fold" else words[-1])
    for least in (folded, [min(width, _FOLDED // 2) for width in words]):
        while excess > 0:
            number = max(range(len(widths)), key=lambda one: (widths[one] > least[one], widths[one]))
            if widths[number] <= least[number]:
                break
            widths[number] -= 1
            excess -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width, column.overflow = width, "fold"


def print_json(values: dict[str, Any]) -> None:
    """Prints one object of JSON on stdout.

    Raises:
        ValueError: there is a NaN or an infinity, which JSON does not have.
    """
    print(json.dumps(values, indent=2, allow_nan=False))
