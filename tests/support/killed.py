"""Training that is killed again and again, and the same training left alone.

`python -m tests.support.killed SEED KILLS SCRATCH PATHS STATES [layouts|trials|experts]`: forks trainings, kills each
at a random instant, and compares what the one that reaches the end has with an uninterrupted one. With `layouts` each
start is in another layout. With `trials` most try steps in backward, and commit between a backward and its step, too;
three of ten kills wait until they come between a backward that has tried steps and its step. With `experts` the model
has some, most of which do nothing in a step, and each start has other tiles and chunks, or no tiles, or makes their
steps in time. STATES is as OffloadZero has it; where it is not fp32, masters are split, and "split" is fp32 with split
masters. Forked before torch does anything: a start takes milliseconds. With OFFLOAD_TEST_DEVICE=simulated each training
is on that device, which only it has loaded.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offload import BudgetError, OffloadZero, Tuning
from offload.checkpoint.reader import Reader
from offload.planner import least_cpu_memory
from tests.support.device import DEVICE, load_simulated
from tests.support.processes import holds_in_child

STEPS = 24
ACCUMULATION = 2
LR = 1e-2
EVERY = 3
"""Steps between commits."""
AfterStep = Callable[[int, nn.Module, OffloadZero], None]


class Moment(IntEnum):
    """Where a training is."""

    ELSEWHERE = 0
    BACKWARD = 1
    """In the backward of the last micro-batch of a step, which makes trials."""
    BEFORE_STEP = 2
    """Between that and its step, and nothing was tried."""
    TRIED = 3
    """Likewise, and something was."""


_now = mmap.mmap(-1, 1)
"""The moment, which a forked training tells whoever kills it."""


EXPERTS = 6
MATRIX = 32 * 32


class Experts(nn.Module):
    """One of its experts is used, by what the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(EXPERTS, 32, 32) / 32**0.5)

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0].abs().item() * 64) % EXPERTS
        out: Tensor = x + F.linear(torch.tanh(x), self.matrices[number])
        return out


def build(*, has_experts: bool = False) -> nn.Module:
    torch.manual_seed(5)
    if has_experts:
        return nn.Sequential(Experts(), nn.Linear(32, 32), Experts(), nn.LayerNorm(32))
    return nn.Sequential(
        nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 32), nn.LayerNorm(32)
    )


@dataclass
class Layout:
    """chunk: its bytes; states: as STATES above; resume: as OffloadZero has it; speculate: as Tuning; None: no start
    has it; has_experts: whether the model has some; tile, late: as Tuning."""

    paths: list[Path]
    states: str = "fp32"
    chunk: str = "4KiB"
    resume: str | list[Path] = "auto"
    speculate: bool | None = None
    has_experts: bool = False
    tile: int = 0
    late: bool = True


def another(paths: list[Path], chance: random.Random, states: str = "fp32") -> Layout:
    """Other chunks, on some of `paths`, whichever the run lies on."""
    begun = any((path / "COMMIT").exists() for path in paths)
    # Killed just before its first record, a run may have committed as far as some of its directories tell alone.
    is_unclear = not begun and any([*path.glob("manifest-*")] for path in paths)
    chosen = chance.sample(paths, len(paths) if is_unclear else chance.randint(1, len(paths)))
    return Layout(chosen, states, f"{4 * chance.randint(1, 8)}KiB", paths if begun else "auto")


def begin(layout: Layout) -> tuple[nn.Module, OffloadZero]:
    """Resumes or begins."""
    torch.set_num_threads(1)
    if DEVICE != "cpu":
        load_simulated()
    model = build(has_experts=layout.has_experts).to(DEVICE)
    plain = torch.optim.AdamW(model.parameters(), lr=LR)
    options: dict[str, Any] = {"accumulation": ACCUMULATION}
    options["states"] = "fp32" if layout.states == "split" else layout.states
    options["tuning"] = Tuning(chunk=layout.chunk, threads=1, split_master=layout.states != "fp32")
    options["tuning"] = replace(options["tuning"], speculate=bool(layout.speculate))
    if layout.has_experts:
        options["tuning"] = replace(options["tuning"], tile=layout.tile, late=layout.late)
        options["param_tier"] = "nvme"
    budget = int(1.3 * least_cpu_memory(model, plain, **options))
    if layout.has_experts:
        budget += 64 * 1024  # the same, and some of the states
    elif layout.speculate is not None:
        budget = least_cpu_memory(model, plain, **options)  # or nothing would stream
    elif layout.resume != "auto":
        budget += 2 * 3 * (32 + 4) * 1024  # reads slots of the largest chunks
    options |= {"path": layout.paths, "commit_every": 2 * EVERY, "resume": layout.resume}
    try:
        return model, OffloadZero(model, plain, cpu_memory=budget, **options)
    except BudgetError as error:
        if not (layout.has_experts or layout.speculate is not None):
            raise
        return model, OffloadZero(model, plain, cpu_memory=error.needed, **options)  # it reads slots of another layout


def states(model: nn.Module, optimizer: OffloadZero) -> dict[str, Tensor]:
    """Everything that training changes."""
    optimizer.synchronize()
    found: dict[str, Tensor] = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        state = optimizer.state_of(param)
        found |= {f"{name}.{kind}": torch.as_tensor(value).clone() for kind, value in state.items()}
    return found


def train(layout: Layout, result: Path, after_step: AfterStep | None = None) -> None:
    """Writes the states after the last step to `result`. Commits every second time by `commit_every`.

    Args: after_step: called after each step, and the commit made then, with its number from 1 on.
    """
    model, optimizer = begin(layout)
    with optimizer:
        begun = 0 if optimizer.resumed is None else optimizer.resumed.step
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5 * (1 + math.cos(math.pi * at / STEPS)))
        if begun:
            # commit_every carries no extra: the scheduler says all it needs from its step.
            for _ in range(begun):
                scheduler.step()
        generator = torch.Generator()
        tried = 0.0
        for step in range(begun, STEPS):
            for micro in range(ACCUMULATION):
                x = torch.randn(4, 32, generator=generator.manual_seed(ACCUMULATION * step + micro))
                loss = model(x.bfloat16().to(DEVICE)).float().square().mean() / ACCUMULATION
                _now[0] = Moment.BACKWARD if micro == ACCUMULATION - 1 else Moment.ELSEWHERE
                loss.backward()
            is_tried = optimizer.stats()["tried_bytes"] > tried
            _now[0] = Moment.TRIED if is_tried else Moment.BEFORE_STEP
            optimizer.clip_grad_norm_(0.5 if step % 3 == 1 else 1e6)
            if layout.speculate and step % EVERY == 1:
                optimizer.commit()
            _now[0] = Moment.ELSEWHERE
            optimizer.step()
            tried = optimizer.stats()["tried_bytes"]
            scheduler.step()
            optimizer.zero_grad()
            if (step + 1) % (2 * EVERY) == EVERY:
                optimizer.commit({"scheduler": scheduler.state_dict()})
            if after_step is not None:
                after_step(step + 1, model, optimizer)
        found = states(model, optimizer)
        if layout.speculate and not begun:
            assert optimizer.stats()["kept_bytes"]
    save_file(found, str(result))


def fork(work: Callable[[], None]) -> int:
    """A process that does `work`; it ends with 1 if that raises."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2) if os.environ.get("QUIET") else None
        work()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    finally:
        os._exit(code)


def wait_for(moment: Moment, limit_s: float) -> None:
    """Waits until a training is there, for so long at most. Few kills would come in a moment that is short."""
    end = time.monotonic() + limit_s
    while _now[0] != moment and time.monotonic() < end:
        time.sleep(1e-4)


def kill(child: int) -> bool:
    """Kills a training. Returns: whether it had not come to its end."""
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):  # one that crashed was not killed
        raise SystemExit(f"a resumed training failed, with {code}")
    return code != 0


def finish(work: Callable[[], None]) -> float:
    """One training, or what looks after one, left alone; returns the seconds it took."""
    start = time.monotonic()
    _, status = os.waitpid(fork(work), 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("an uninterrupted training failed")
    return time.monotonic() - start


def require_same(result: Path, expected: Path) -> None:
    found, wanted = load_file(str(result)), load_file(str(expected))
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    if found.keys() != wanted.keys() or different:
        raise SystemExit(f"a resumed training has other bits: {different}")


def owes(paths: list[Path]) -> bool:
    """Whether the last commit says that experts owe steps."""
    if not any((path / "COMMIT").exists() for path in paths):
        return False
    with Reader(paths) as reader:
        return any(manifest.owed for manifest in reader.manifests)


def main(seed: int, kills: int, scratch: Path, count: int, states_in: str, each: str) -> None:
    chance = random.Random(seed)

    def next_layout(paths: list[Path]) -> Layout:
        if each == "layouts":
            return another(paths, chance, states_in)
        if each == "experts":
            tile, chunk = 2 * MATRIX * chance.choice([1, 1, 1, 2, 0]), chance.choice(["16KiB", "16KiB", "32KiB"])
            return Layout(paths, states_in, chunk, has_experts=True, tile=tile, late=chance.random() < 0.8)
        return Layout(paths, states_in, speculate=chance.random() < 0.8 if each == "trials" else None)

    expected = scratch / "expected.safetensors"
    alone = scratch / "alone"
    in_time = Layout([alone], states_in, has_experts=each == "experts")
    whole_s = max(finish(lambda: train(in_time, expected)), 0.05)
    done = resumed = owing = rounds = 0
    moments: Counter[Moment] = Counter()
    while done < kills:
        rounds += 1
        paths = [scratch / f"round{rounds}-{number}" for number in range(count)]
        result = scratch / f"round{rounds}.safetensors"
        while done < kills:
            _now[0], layout = Moment.ELSEWHERE, next_layout(paths)
            child = fork(partial(train, layout, result))
            time.sleep(chance.uniform(0, 0.6 * whole_s))
            if layout.speculate and chance.random() < 0.3:
                wait_for(Moment.TRIED, whole_s)
            if not kill(child):
                break
            done += 1
            moments[Moment(_now[0])] += 1
            resumed += any((path / "COMMIT").exists() for path in paths)
            owing += each == "experts" and holds_in_child(partial(owes, paths))
        finish(partial(train, next_layout(paths), result))
        require_same(result, expected)
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    if each == "experts" and kills > 20 and not owing:
        raise SystemExit("experts owed steps at none of the kills")
    if each == "trials" and kills >= 100 and not (moments[Moment.BACKWARD] and moments[Moment.TRIED]):
        raise SystemExit(f"no kill came inside a backward, or between one that tried steps and its step: {moments}")
    print(
        f"{done} kills, {resumed} of them after a commit, {owing} owing, {moments[Moment.BACKWARD]} inside a backward, "
        f"{moments[Moment.TRIED]} between one that tried steps and its step, {moments[Moment.BEFORE_STEP]} between "
        f"another one and its step, {rounds} rounds, {whole_s:.2f} s each"
    )


if __name__ == "__main__":
    seed, kills, scratch, count, states_in = sys.argv[1:6]
    main(int(seed), int(kills), Path(scratch), int(count), states_in, "".join(sys.argv[6:]))
