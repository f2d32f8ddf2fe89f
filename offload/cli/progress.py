"""Progress of a training run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from offload.sizes import format_bytes

LINES = 20
"""Lines in a run that is not watched on a terminal."""


def moved(stats: Mapping[str, Any]) -> str:
    """Bytes moved so far a tier, both ways together, from the optimizer's `stats()`."""
    tiers = {
        "nvme": stats["nvme_read_bytes"] + stats["nvme_written_bytes"],
        "device": stats["device_to_host_bytes"] + stats["host_to_device_bytes"],
    }
    return ", ".join(f"{tier} {format_bytes(count)}" for tier, count in tiers.items() if count) or "all in RAM"


def status(loss: float, tokens_per_s: float, stats: Mapping[str, Any]) -> str:
    return f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  {moved(stats)}"


class Progress(ABC):
    """A context manager that is told about every step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    def step(self, done: int, loss: float, tokens_per_s: float, stats: Mapping[str, Any]) -> None:
        """Says that `done` steps are done."""


class Bar(Progress):
    """One live line."""

    def __init__(self, console: Console, steps: int) -> None:
        self._progress = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=steps, status="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()  # gives the cursor back, also after Ctrl-C

    def step(self, done: int, loss: float, tokens_per_s: float, stats: Mapping[str, Any]) -> None:
        self._progress.update(self._task, completed=done, status=status(loss, tokens_per_s, stats))


class Lines(Progress):
    """Plain lines: the first step, the last, and about `LINES` between."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._every = max(1, steps // LINES)

    def step(self, done: int, loss: float, tokens_per_s: float, stats: Mapping[str, Any]) -> None:
        if done in (1, self._steps) or done % self._every == 0:
            self._console.print(
                f"step {done}/{self._steps}  {status(loss, tokens_per_s, stats)}",
                soft_wrap=True,
                highlight=False,
            )


def progress(console: Console, steps: int) -> Progress:
    return Bar(console, steps) if console.is_terminal else Lines(console, steps)
