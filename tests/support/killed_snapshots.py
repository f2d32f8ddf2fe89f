"""Training that takes snapshots and is killed again and again, often in the middle of one.

`python -m tests.support.killed_snapshots SEED KILLS SCRATCH PATHS`: after each kill what says that it is a snapshot has
to be whole, and to go on elsewhere with the bits that a training left alone had at its step; those that were taken are
there; and the next snapshot leaves as many as were to stay, and nothing that was cut off.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from offload import OffloadZero
from offload.checkpoint.reader import Reader
from offload.storage.directories import COMMIT_NAME, LOCK_NAME
from tests.support.killed import EVERY, Layout, begin, finish, fork, kill, require_same, states, train

KEEP = 2
BEGINS = "begins"


class Notes:
    """Lines that a training wrote before it was killed: `BEGINS`, and the name of the snapshot when it is there."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._left = b""
        self.lines: list[str] = []

    def put(self, line: str) -> None:
        os.write(self._write, f"{line}\n".encode())

    def only_read(self) -> None:
        """So that the end of the one that writes is seen."""
        os.close(self._write)

    def until(self, begun: int) -> None:
        """Reads until so many snapshots were begun, or whoever writes has ended."""
        while self.lines.count(BEGINS) < begun and (data := os.read(self._read, 1)):
            self._left += data
            if data == b"\n":
                self.lines.append(self._left.decode().strip())
                self._left = b""

    def close(self) -> None:
        os.close(self._read)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(what)


def snapshots(paths: Sequence[Path]) -> list[str]:
    """Names of those that are decided, the oldest first."""
    found = [one.name for one in paths[0].glob("snapshot-*") if (one / COMMIT_NAME).exists()]
    return sorted(found, key=step_of)


def step_of(name: str) -> int:
    return int(name.split("-")[1])


def require_tidy(paths: Sequence[Path]) -> None:
    """When a snapshot has been taken."""
    decided = snapshots(paths)
    require(len(decided) <= KEEP, f"more than {KEEP} stay: {decided}")
    for path in paths:
        there = sorted((one.name for one in path.glob("snapshot-*")), key=step_of)
        require(there == decided, f"{decided} are snapshots, and in {path.name} there are {there}")
        locks = [str(file.relative_to(path)) for file in path.glob(f"snapshot-*/{LOCK_NAME}")]
        require(not locks, f"{locks} were left")


def take(paths: Sequence[Path], notes: Notes, step: int, model: nn.Module, optimizer: OffloadZero) -> None:
    """After commits by hand at once, after the others a step later."""
    if step % (2 * EVERY) == EVERY or (step % (2 * EVERY) == 1 and step > 1):
        notes.put(BEGINS)
        name = optimizer.snapshot(keep=KEEP)[0].name
        notes.put(name)
        require_tidy(paths)


def save(folder: Path, step: int, model: nn.Module, optimizer: OffloadZero) -> None:
    save_file(states(model, optimizer), str(folder / f"{step}.safetensors"))


def resume(layout: Layout, steps: Path, step: int | None) -> OffloadZero:
    """Args: steps: the folder that `save` filled; step: the only one that is right."""
    model, optimizer = begin(layout)
    require(optimizer.resumed is not None, f"{layout} has no commit")
    assert optimizer.resumed is not None
    require(step in (None, optimizer.resumed.step), f"resumed at {optimizer.resumed.step}, not at {step}")
    found, expected = states(model, optimizer), load_file(str(steps / f"{optimizer.resumed.step}.safetensors"))
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    require(not different, f"{layout} has other bits: {different}")
    return optimizer


def look(paths: Sequence[Path], taken: Sequence[str], steps: Path, scratch: Path) -> None:
    """After a kill; leaves `paths` as they are. Args: taken: the names that were returned, the oldest first."""
    scratch.mkdir()
    decided = snapshots(paths)
    require(len(decided) >= min(KEEP, len(taken)), f"{taken} were taken, and only {decided} are there")
    # Calls that were cut off may have made newer ones.
    is_there = not taken or taken[-1] in decided or step_of(taken[-1]) < step_of(decided[-KEEP:][0])
    require(is_there, f"{taken[-1:]} was taken, and only {decided} are there")
    for name in decided:
        here = [path / name for path in paths]
        with Reader(here) as reader:
            require(reader.commit.is_snapshot, f"{name} does not say that it is a snapshot")
            damaged = [slot for slot in reader.verify() if slot.error is not None]
            require(not damaged, f"{name} is damaged: {damaged}")
        resume(Layout([scratch / name], resume=here), steps, step_of(name)).close()
    if (paths[0] / COMMIT_NAME).exists():
        copies = [scratch / path.name for path in paths]
        for path, copy in zip(paths, copies, strict=True):
            shutil.copytree(path, copy)
        take_next(copies, decided, steps)
    shutil.rmtree(scratch)


def take_next(paths: Sequence[Path], decided: Sequence[str], steps: Path) -> None:
    """Goes on from the last commit, and takes a snapshot."""
    with resume(Layout([*paths]), steps, None) as optimizer:
        assert optimizer.resumed is not None
        require(
            not decided or optimizer.resumed.step >= step_of(decided[-1]), f"{decided} are there, the commit is not"
        )
        optimizer.snapshot(keep=KEEP)
        require_tidy(paths)


def main(seed: int, kills: int, scratch: Path, count: int) -> None:
    chance = random.Random(seed)
    steps, expected = scratch / "steps", scratch / "expected.safetensors"
    steps.mkdir()
    finish(partial(train, Layout([scratch / "alone"]), expected, partial(save, steps)))
    whole_s = finish(partial(train, Layout([scratch / "again"]), expected))
    done = inside = found = rounds = 0
    while done < kills:
        rounds += 1
        paths = [scratch / f"round{rounds}-{number}" for number in range(count)]
        result = scratch / f"round{rounds}.safetensors"
        taken: list[str] = []
        while done < kills:
            notes = Notes()
            child = fork(partial(train, Layout(paths), result, partial(take, paths, notes)))
            notes.only_read()
            if chance.random() < 0.7:
                notes.until(chance.randint(1, 4))
                time.sleep(chance.uniform(0, whole_s / 40))
            else:
                time.sleep(chance.uniform(0, 0.6 * whole_s))
            is_cut_off = kill(child)
            notes.until(1 << 30)
            notes.close()
            taken += [name for name in notes.lines if name != BEGINS and name not in taken]
            finish(partial(look, paths, taken, steps, scratch / "looked"))
            if not is_cut_off:
                break
            done += 1
            inside += notes.lines[-1:] == [BEGINS]
            found += len(snapshots(paths))
        notes = Notes()
        finish(partial(train, Layout(paths), result, partial(take, paths, notes)))
        notes.only_read()
        notes.close()
        require_same(result, expected)
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    print(
        f"{done} kills, {inside} of them in a snapshot, {found} snapshots found, {rounds} rounds, {whole_s:.2f} s each"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
