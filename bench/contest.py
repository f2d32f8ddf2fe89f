"""What bench/peers.py and bench/hiding.py share: contestants in processes of their own, of which one runs at a time.

Each stays alive and trains some steps when it is its turn (bench/trainer.py). So what changes on the machine changes
for all of them, and the memory and threads of one disturb no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import note
from offload.cli.io_speed import HUGE_PAGES
from offload.demo.gpt import GPT, GPTConfig
from offload.demo.text import load_text

CHILD = Path(__file__).with_name("trainer.py")
LR, SEED = 3e-5, 0
END_S = 30
LAST_LINES = 20
"""Lines of the log of a process that ended."""
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Entry:
    """One contestant. Attributes: python: its interpreter; kind, options: as in a `spec` of bench/trainer.py;
    param_bytes: about how much RAM it takes for each parameter."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    param_bytes: int = 20


@dataclass(frozen=True)
class Block:
    """Some steps in a row, with the seconds of all of them, and of each phase if they were timed by phases.

    Attributes: trained: how many steps there were, with those that were not timed; stats, losses, read_bytes and
    written_bytes (as the kernel counted them for the process) are of all these. forward_bytes: moved on the disk during
    the timed forwards.
    """

    steps: int
    trained: int
    seconds: float
    losses: list[float]
    stats: dict[str, float]
    forward_bytes: float
    read_bytes: int
    written_bytes: int
    peak_rss_bytes: int
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of a step."""
        return statistics.mean(self.forward_s) + statistics.mean(self.backward_s)


class ContestError(RuntimeError):
    """A contestant's process ended, or could not begin."""


class Contestant:
    """A trainer in a process of its own.

    Attributes: name; versions: of the packages it runs on; blocks: all blocks that it has run.
    """

    def __init__(self, entry: Entry, child: subprocess.Popen[str], log: Path) -> None:
        self.name = entry.name
        self.blocks: list[Block] = []
        self._child, self._log = child, log
        self.versions: dict[str, str] = self._answer()["ready"]

    def run(self, steps: int, batch: int, seq: int, **how: Any) -> Block:
        """Times `steps` steps of batch x seq tokens. Args: how: the other orders, see bench/trainer.py.

        Raises: ContestError.
        """
        orders = {"steps": steps, "batch": batch, "seq": seq, **how}
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says that it has ended
            print(json.dumps(orders), file=self._child.stdin, flush=True)
        block = Block(steps, **self._answer())
        self.blocks.append(block)
        return block

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)
            words = self._log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            raise ContestError("\n".join([f"{self.name} ended with {self._child.returncode}; its last lines:", *words]))
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def started(
    entries: Sequence[Entry], model: GPTConfig, shape: tuple[int, int], folder: Path
) -> Iterator[tuple[list[Contestant], list[str]]]:
    """The contestants, built and warmed up one after the other, and why peers are missing. Their processes end with the
    block.

    Args: shape: batch and sequence of the steps that warm up; folder: a scratch folder.
    Raises: ContestError if a contestant of this library cannot start; a peer is only left out.
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
            spec = {
                "kind": entry.kind, "model": sizes, "text": str(text), "path": str(place / "swap"), "lr": LR,
                "seed": SEED, "options": entry.options,
            }  # fmt: skip
            note(f"building {entry.name}")
            with contextlib.ExitStack() as its_own:
                try:
                    child = its_own.enter_context(_child(entry, spec, place / "log"))
                    one = Contestant(entry, child, place / "log")
                    one.run(WARM_UP_STEPS, *shape)
                except ContestError as error:
                    if entry.kind != "deepspeed":
                        raise
                    left_out.append(str(error))
                    continue
                stack.push(its_own.pop_all())
            contestants.append(one)
        yield contestants, left_out


@contextlib.contextmanager
def _child(entry: Entry, spec: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[str]]:
    # DeepSpeed looks for its build tools on the PATH. Huge pages for everyone, as the arena has them.
    path = f"{Path(entry.python).absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | HUGE_PAGES | {"PATH": path, "DS_ACCELERATOR": "cpu"}
    command, pipe = [entry.python, str(CHILD), json.dumps(spec)], subprocess.PIPE
    with (
        open(log, "w") as words,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words, text=True, env=environment) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def turns(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """The contestants in the order of round `number`: each round begins with the next one."""
    shift = number % len(contestants)
    return [*contestants[shift:], *contestants[:shift]]


def parameters(model: GPTConfig) -> int:
    return sum(parameter.numel() for parameter in GPT(model, device="meta").parameters())


def versions_of(contestants: Sequence[Contestant]) -> str:
    found = {f"{what} {version}": None for one in contestants for what, version in one.versions.items()}
    return ", ".join(found)
