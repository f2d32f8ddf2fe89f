"""Progress of `offload bench io` on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10


@contextlib.contextmanager
def progress(console: Console, title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A function to call, with what was done, after each of `steps` steps."""
    done = 0
    if not console.is_terminal:
        every = max(1, steps // LINES)

        def line(what: str) -> None:
            nonlocal done
            done += 1
            if done % every == 0 or done == 1:
                console.print(f"{title}: {done}/{steps} {what}", soft_wrap=True, highlight=False)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TimeRemainingColumn())
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda what: bar.update(task, advance=1, description=f"{title}: {what}")
