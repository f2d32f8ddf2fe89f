"""What bench/peers.py and bench/hiding.py share: contestants in processes of their own, of which one runs at a time.

Each stays alive and trains some steps when it is its turn (bench/trainer.py), so that whatever drifts on the machine
meets all of them, and nobody's memory or threads are in another's way.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.trainer import Orders, Spec
from offload.cli.bench_io_contestants import HUGE_PAGES
from offload.cli.text import load_text
from offload.models.gpt import GPT, GPTConfig

CHILD = Path(__file__).with_name("trainer.py")
RESULTS = Path(__file__).parent / "results"
LR, SEED = 3e-5, 0
END_S = 30
LAST_WORDS = 20
"""Lines of what a process that ended said last."""
WARM_UP_STEPS = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """Who competes. python: its interpreter; kind and options: as `Spec` has them.

    param_bytes: what it takes of RAM for a parameter, roughly.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    param_bytes: int = 20


@dataclass(frozen=True)
class Block:
    """Some steps in a row. Seconds: of all of them, and by phase and step where it was parted into phases.

    trained: steps, those included that were not timed; stats, losses, read_bytes and written_bytes are of all these.
    read_bytes, written_bytes: as the kernel counted them for the process; peak_rss_bytes: since it was last reset.
    """

    steps: int
    trained: int
    seconds: float
    losses: list[float]
    stats: dict[str, float]
    read_bytes: int
    written_bytes: int
    peak_rss_bytes: int
    forward_s: list[float]
    backward_s: list[float]
    optimizer_s: list[float]

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def compute_s(self) -> float:
        """Forward and backward of a step."""
        return statistics.mean(self.forward_s) + statistics.mean(self.backward_s)


class ContestError(RuntimeError):
    """A contestant's process ended, or could not begin."""


class Contestant:
    """A trainer in a process of its own.

    Attributes: name; versions (of what it runs on); blocks: all it has done; most_rss_bytes: its peak from its start.
    """

    def __init__(self, entry: Entry, child: subprocess.Popen[str], log: Path) -> None:
        self.name = entry.name
        self.blocks: list[Block] = []
        self._child, self._log = child, log
        ready = self._answer()
        self.versions: dict[str, str] = ready["ready"]
        self.most_rss_bytes = int(ready["peak_rss_bytes"])

    def run(
        self,
        steps: int,
        batch: int,
        seq: int,
        *,
        phases: bool = False,
        timeline: Path | None = None,
        fresh: bool = False,
    ) -> Block:
        """Times `steps` steps, see [Note: what is timed] in bench/trainer.py; `fresh` forgets the peak RSS so far.

        Raises: ContestError.
        """
        orders: Orders = {
            "steps": steps,
            "batch": batch,
            "seq": seq,
            "phases": phases,
            "timeline": str(timeline) if timeline else None,
            "fresh_peak": fresh,
        }
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says that it has ended
            print(json.dumps(orders), file=self._child.stdin, flush=True)
        answer = self._answer()
        moved = answer.pop("process_bytes")
        times = {name: answer.pop(name, []) for name in ("forward_s", "backward_s", "optimizer_s")}
        block = Block(steps, read_bytes=moved["read_bytes"], written_bytes=moved["write_bytes"], **times, **answer)
        self.blocks.append(block)
        self.most_rss_bytes = max(self.most_rss_bytes, block.peak_rss_bytes)
        return block

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)
            words = self._log.read_text(errors="replace").strip().splitlines()[-LAST_WORDS:]
            raise ContestError("\n".join([f"{self.name} ended with {self._child.returncode}; its last words:", *words]))
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def started(
    entries: Sequence[Entry], model: GPTConfig, shape: tuple[int, int], folder: Path, say: Say
) -> Iterator[tuple[list[Contestant], list[str]]]:
    """The contestants, built and warmed up one after the other, and which peers could not, and why; ended at the end.

    Args: shape: batch and sequence of the steps that warm up; folder: a scratch folder.
    Raises: ContestError for one that is no peer.
    """
    text = folder / "text"
    load_text(None, model.context).train.tofile(text)
    sizes = {name: getattr(model, name) for name in ("layers", "width", "heads", "context")}
    with contextlib.ExitStack() as stack:
        contestants: list[Contestant] = []
        left_out = []
        for number, entry in enumerate(entries):
            place = folder / f"{number}"
            (place / "swap").mkdir(mode=0o700, parents=True)
            spec: Spec = {
                "kind": entry.kind, "model": sizes, "text": str(text), "path": str(place / "swap"), "lr": LR,
                "seed": SEED, "options": entry.options,
            }  # fmt: skip
            say(f"building {entry.name}")
            with contextlib.ExitStack() as its_own:
                its_own.callback(shutil.rmtree, place, ignore_errors=True)
                try:
                    child = its_own.enter_context(_child(entry, spec, place / "log"))
                    one = Contestant(entry, child, place / "log")
                    one.run(WARM_UP_STEPS, *shape)
                except ContestError as error:
                    if entry.kind != "deepspeed":
                        raise
                    left_out.append(str(error))
                    say(f"left out: {error}")
                    continue
                stack.push(its_own.pop_all())
            contestants.append(one)
        yield contestants, left_out


@contextlib.contextmanager
def _child(entry: Entry, spec: Spec, log: Path) -> Iterator[subprocess.Popen[str]]:
    # DeepSpeed looks for its build tools on the PATH. Huge pages for everyone, as the arena has them.
    path = f"{Path(entry.python).absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}"
    more = {"PATH": path, "DS_ACCELERATOR": "cpu"} | HUGE_PAGES
    with (
        open(log, "w") as words,
        subprocess.Popen(
            [entry.python, str(CHILD), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            env=os.environ | more,
        ) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A new folder in `path` that goes at the end."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=path))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def turns(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """The order of a round: everyone is first in turn."""
    shift = number % len(contestants)
    return [*contestants[shift:], *contestants[:shift]]


def parameters(model: GPTConfig) -> int:
    return sum(parameter.numel() for parameter in GPT(model, device="meta").parameters())


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios, theirs by ours."""
    return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))


def hardware() -> str:
    from importlib import metadata

    from offload import native

    name, flags = native.cpu_model()
    vectors = " ".join(flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags)
    return (
        f"{name} ({vectors}), {native.usable_cpus()} usable CPUs; Linux {platform.release()}; "
        f"offload {metadata.version('offload')}, Python {platform.python_version()}"
    )


def versions_of(contestants: Sequence[Contestant]) -> str:
    found = {f"{what} {version}": None for one in contestants for what, version in one.versions.items()}
    return ", ".join(found)


@dataclass(frozen=True)
class Grid:
    """A table, for a terminal and for bench/results."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def show(self, console: Console, title: str) -> None:
        table = Table(title=title, title_justify="left")
        for column, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if column else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> list[str]:
        lines = ["| " + " | ".join(self.headings) + " |", "|---|" + "---:|" * (len(self.headings) - 1)]
        return lines + ["| " + " | ".join(row) + " |" for row in self.rows]
