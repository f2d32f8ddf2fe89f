"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from offload.cli.console import say
from offload.sizes import format_bytes

LINES = 20
"""Lines of a run that is not watched on a terminal."""

Tell = Callable[[int, str], None]
"""Takes how many steps are done, and what people should read beside that."""


@contextlib.contextmanager
def progress(console: Console, title: str, steps: int) -> Iterator[Tell]:
    """A context that gives a function to call after each step. The bar ends with the context, also after Ctrl-C.

    Args:
        console: where progress is shown.
        title: what stands before it.
        steps: how many steps there will be.
    """
    if not console.is_terminal:
        every = max(1, steps // LINES)

        def line(done: int, status: str) -> None:
            if done in (1, steps) or done % every == 0:
                say(console, f"{title} {done}/{steps}  {status}")

        yield line
        return
    named, status = (TextColumn(f"{{task.{one}}}", markup=False) for one in ("description", "fields[status]"))
    columns = (named, MofNCompleteColumn(), BarColumn(bar_width=None), status, TimeRemainingColumn())
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task(title, total=steps, status="starting")
        yield lambda done, status: bar.update(task, completed=done, status=status)


def training_status(loss: float, tokens_per_s: float, stats: Mapping[str, Any]) -> str:
    """A line with the loss, the speed, and the bytes moved so far to and from each tier.

    Args:
        loss: in nats a byte.
        tokens_per_s: tokens a second.
        stats: what `OffloadZero.stats` returned.
    """
    ways = {
        "disk": stats["nvme_read_bytes"] + stats["nvme_written_bytes"],
        "device": stats["device_to_host_bytes"] + stats["host_to_device_bytes"],
    }
    moved = ", ".join(f"{format_bytes(count)} ({way})" for way, count in ways.items() if count)
    moved = f"moved {moved}" if moved else "all in RAM"
    return f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  {moved}"
