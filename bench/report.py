"""The report of a benchmark: tables of medians, spreads and ratios, JSON, pictures, and a page of bench/results."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable

from offload import native
from offload.cli.machine import package_version

RESULTS = Path(__file__).parent / "results"
WIDTH = 176
"""Characters of a table where no terminal says how wide it is."""
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")

Rounds = Annotated[int, typer.Option(min=1, help="Rounds, in each of which everything runs once, in turns.")]
Folder = Annotated[Path, typer.Option(help="A folder on the disk to measure.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Save = Annotated[bool, typer.Option("--save", help="Write the page and its pictures to bench/results.")]
Out = Annotated[Path, typer.Option(help="Folder for the pictures.")]

Draw = Callable[[Path], None]


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is a name, the others are numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def shown(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left")
        for column, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if column else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> list[str]:
        lines = [f"## {self.title}", ""] if self.title else []
        lines += ["| " + " | ".join(self.headings) + " |", "|---|" + "---:|" * (len(self.headings) - 1)]
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes: name: of its page and script; title: of the page; about: what was measured, and what the columns mean;
    tables; data: what --json prints; remarks: a line each, such as targets that were missed; setup: what it ran on
    beside the machine; pictures: by file name, what draws them.
    """

    name: str
    title: str
    about: str
    tables: Sequence[Table]
    data: Mapping[str, Any]
    remarks: Sequence[str] = ()
    setup: str = ""
    pictures: Mapping[str, Draw] = field(default_factory=dict)

    @property
    def caption(self) -> str:
        return f"{machine()}{self.setup and f'; {self.setup}'}."

    def publish(self, *, as_json: bool = False, save: bool = False, out: Path = Path("out")) -> None:
        """Prints the tables or JSON, and draws the pictures: in `out`, or with `save` beside the page."""
        if as_json:
            print(json.dumps({"machine": self.caption, **self.data}, indent=2, allow_nan=False))
        else:
            self._show()
        folder = RESULTS if save else out
        for name, draw in self.pictures.items():
            folder.mkdir(parents=True, exist_ok=True)
            draw(folder / name)
        if save:
            (RESULTS / f"{self.name}.md").write_text(self.page())

    def _show(self) -> None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)
        for table in self.tables:
            console.print(table.shown())
        for line in (self.caption, *self.remarks):
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    def page(self) -> str:
        """The page of bench/results, as Markdown."""
        words = ["DIR" if word.startswith("/") else word for word in sys.argv[1:]]
        command = shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *words])
        lines = [f"# {self.title}", "", self.caption, "", f"`{command}`", "", self.about, ""]
        for table in self.tables:
            lines += table.markdown()
        lines += [f"- {remark}" for remark in self.remarks]
        lines += ["", *(f"![{name}]({name})" for name in self.pictures)]
        return "\n".join(lines).rstrip() + "\n"


def machine() -> str:
    """Hardware and versions."""
    name, flags = native.cpu_model()
    vectors = " ".join(flag for flag in VECTOR_FLAGS if flag in flags)
    return (
        f"{name} ({vectors}), {native.usable_cpus()} usable CPUs; Linux {platform.release()}; "
        f"offload {package_version()}, torch {torch.__version__}, Python {platform.python_version()}"
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of the rounds, ours to theirs: what changes between rounds changes for both."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The least and the largest value, in words."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def judged(what: str, reached: float, wanted: float, *, is_least: bool = False) -> str:
    """A remark on whether a target was reached. Args: is_least: whether `wanted` is the least that is good, or the
    most."""
    met = reached >= wanted if is_least else reached <= wanted
    side = "at least" if is_least else "at most"
    return f"{what}: {reached:.3f}, wanted {side} {wanted:g}: {'met' if met else 'NOT met'}"


def note(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A new folder in `path` that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=".offload-bench-", dir=path))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(main: Callable[..., None]) -> None:
    """Runs a script's `main` with the options of the command line; SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    typer.run(main)
