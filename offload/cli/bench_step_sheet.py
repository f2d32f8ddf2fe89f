"""What the measurements of `offload bench step` show alike: medians over rounds, a table, a page for bench/results."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from rich.table import Table

R = TypeVar("R")
WIDTH = 176
"""Of a table in characters, where no terminal says how wide it is."""


@dataclass(frozen=True)
class Sheet:
    """A table. caption: what its figures were measured on and with."""

    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def table(self) -> Table:
        """For people."""
        shown = Table(title=self.title, caption=self.caption)
        for heading in self.headings:
            shown.add_column(heading, justify="right")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def page(self, name: str, command: str, about: str, remarks: Iterable[str]) -> str:
        """For bench/results. Args: name: of the page; command: that made it; about: what was done, and the columns."""
        lines = [
            f"# {name}",
            "",
            f"{self.caption}.",
            "",
            f"`{command}`",
            "",
            about,
            "",
            "| " + " | ".join(self.headings) + " |",
            "|---" * len(self.headings) + "|",
            *("| " + " | ".join(row) + " |" for row in self.rows),
            "",
            *(f"- {remark}" for remark in remarks),
        ]
        return "\n".join(lines).rstrip() + "\n"


def median(rounds: Iterable[R], of: Callable[[R], float]) -> float:
    """Over the rounds; of ratios, too, whose parts were then measured one right after the other."""
    return statistics.median(of(one) for one in rounds)


def spread(seconds: Sequence[float], digits: int = 3) -> str:
    """The fastest and the slowest."""
    return f"{min(seconds):.{digits}f}-{max(seconds):.{digits}f}"


def hardware(threads: int, kernel: str, disk: str) -> str:
    """Hardware and versions. Args: disk: how it was used, behind a comma."""
    from importlib import metadata

    from offload import native

    return (
        f"{native.cpu_model()[0]}, {threads} threads, kernel {kernel}{disk}; Linux {platform.release()}; "
        f"offload {metadata.version('offload')}, torch {torch.__version__}, Python {platform.python_version()}"
    )
