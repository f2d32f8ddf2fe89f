"""A commit that is cut off by an exception at any point, and a loop that goes on: nothing committed is overwritten."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import Tensor

from offload import OffloadZero
from offload.checkpoint import atomic_file as atomic
from offload.checkpoint import commit as records
from offload.checkpoint import committer
from offload.checkpoint.reader import Reader
from offload.errors import TierIOError
from offload.io import files as local
from offload.io.engine import IOFile, IOFuture
from offload.io.files import Files
from offload.io.threads import ThreadEngine
from offload.storage import swap_file
from offload.storage.directories import COMMIT_NAME
from tests.faults.conftest import Make, Tiny, assert_same, bits, one_step
from tests.support.disks import SwitchedFiles, on_disk
from tests.support.faulty_engine import resolved

OPERATIONS = ("create", "write", "sync", "close", "rename", "remove", "copy", "sync_directory", "names", "read")
OPERATIONS += ("make_directory", "remove_directory", "is_directory", "open")
TRACED = frozenset(module.__file__ for module in (committer, records, atomic, local))
"""Where a commit is made, beside `Stripes`."""


class Interrupted(Files):
    """Raises KeyboardInterrupt at one call of the file system, before it does anything, or after."""

    def __init__(self, at: int, *, is_done: bool) -> None:
        super().__init__()
        self.left = at
        self._is_done = is_done

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        return self._interrupted(method) if name in OPERATIONS else method

    def _interrupted(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                if self._is_done:
                    method(*args)
                raise KeyboardInterrupt
            return method(*args)

        return call


@contextmanager
def interrupted_at(opcode: int) -> Iterator[list[int]]:
    """Raises KeyboardInterrupt at an opcode of TRACED. Gives: as many elements as there were opcodes, at most."""
    seen: list[int] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        is_striped = code.co_filename == swap_file.__file__ and code.co_qualname.startswith("Stripes.")
        if code.co_filename not in TRACED and not is_striped:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen.append(opcode)
            if len(seen) > opcode:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions if one frame asked before settrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


class Loop:
    """A training in which commits are cut off, and that goes on. Attributes: committed: steps that were found."""

    def __init__(self, make: Make, path: Path) -> None:
        self._path = path
        self.model = Tiny()
        self.files = SwitchedFiles()
        with on_disk(self.files):
            self.optimizer: OffloadZero = make(self.model, commit_every=0)
        self._step = 0
        self._expected: dict[int, dict[str, Tensor]] = {}
        self.committed: list[int] = []
        self.go_on()
        self.optimizer.commit()
        self._last = self._step

    def go_on(self) -> None:
        one_step(self.model, self.optimizer, self._step)
        self._step += 1
        self._expected[self._step] = bits(self.model, self.optimizer)
        self._expected.pop(self._step - 5, None)

    def check(self, *, goes_back: bool) -> None:
        """After a commit of the last step that may have been cut off: whatever is on the disk, it stays whole."""
        self.go_on()
        self.optimizer.synchronize()
        folder = self._path.with_name("copy")
        shutil.copytree(self._path, folder)
        with Reader([folder]) as reader:
            step = reader.commit.step
            assert step in (self._step - 1, self._last)
            self.committed.append(step)
            for row in reader.tensors():
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    name = f"{row.facts.name}.{kind}"
                    assert reader.read(row.facts.name, kind).equal(self._expected[step][name]), name
        shutil.rmtree(folder)
        if goes_back:
            self.optimizer.rollback()
            assert_same(self._expected[step], bits(self.model, self.optimizer))
            self._step = step
            self.go_on()
        # What cut off commits left is cleared away, or the next ones had ever more to do.
        self.optimizer.commit()
        self._last = self._step


@pytest.mark.parametrize("is_done", [pytest.param(False, marks=pytest.mark.slow), True], ids=["before it", "after it"])
def test_interrupted_at_any_call_of_the_file_system_no_commit_is_overwritten(
    make: Make, path: Path, is_done: bool
) -> None:
    loop = Loop(make, path)
    kept = []
    for at in range(200):
        loop.go_on()
        files = Interrupted(at, is_done=is_done)
        with loop.files.switched(files):
            try:
                loop.optimizer.commit()
            except KeyboardInterrupt:
                pass
            else:
                assert files.left >= 0
        step = loop._step
        loop.check(goes_back=at % 3 == 0)
        kept.append(loop.committed[-1] == step)
        if files.left >= 0:
            break
    # Some were cut off before the decision, some between it and the end.
    assert kept[-1]
    assert kept.count(False) > 5
    assert kept.count(True) > 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_done", [False, True], ids=["before it", "after it"])
def test_interrupted_at_any_call_of_the_file_system_what_state_dicts_name_stays(
    make: Make, path: Path, is_done: bool
) -> None:
    model, switched = Tiny(), SwitchedFiles()
    with on_disk(switched):
        optimizer = make(model, commit_every=0)
    named: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
    for at in range(400):
        one_step(model, optimizer, at)
        named.append((copy.deepcopy(optimizer.state_dict()), bits(model, optimizer)))
        one_step(model, optimizer, 1000 + at)
        files = Interrupted(at, is_done=is_done)
        with switched.switched(files), suppress(KeyboardInterrupt):
            optimizer.commit()
        optimizer.commit()
        if at % 3 == 0:
            for saved, expected in named[-2:]:
                optimizer.load_state_dict(saved)
                assert_same(expected, bits(model, optimizer))
        assert len([*path.glob("snapshot-*")]) <= 4
        if files.left >= 0:
            break
    print(at, "calls")
    assert at > 50
    assert len([*path.glob("snapshot-*/COMMIT")]) <= 3


def at_opcodes(loop: Loop, opcodes: range) -> int:
    """How many of them a commit has."""
    for count, opcode in enumerate(opcodes):
        loop.go_on()
        try:
            with interrupted_at(opcode) as seen:
                loop.optimizer.commit()
        except KeyboardInterrupt:
            pass
        loop.check(goes_back=count % 3 == 0)
        if len(seen) <= opcode:
            return opcode
    raise AssertionError("a commit never ended")


def test_interrupted_between_any_two_opcodes_no_commit_is_overwritten(make: Make, path: Path) -> None:
    loop = Loop(make, path)
    assert at_opcodes(loop, range(5, 100_000, 257)) > 1000
    assert len({*loop.committed}) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interrupted_at_every_opcode_no_commit_is_overwritten(make: Make, path: Path) -> None:
    print(at_opcodes(Loop(make, path), range(100_000)), "opcodes")


def test_a_sync_that_failed_while_it_was_interrupted_is_still_final(make: Make) -> None:
    """A disk says once that it lost something."""
    lost = TierIOError("sync", errno.EIO, "swap", 0, 0)

    class Interrupting(IOFuture):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            if interrupts:
                raise interrupts.pop()
            return lost

        def result(self, timeout: float | None = None) -> int:
            raise lost

    interrupts, answers = [KeyboardInterrupt()], [Interrupting()]

    class Lost(ThreadEngine):
        is_lost = False

        def sync(self, file: IOFile) -> IOFuture:
            if not self.is_lost:
                return super().sync(file)
            return answers.pop() if answers else resolved()

    model, engine = Tiny(), Lost()
    with on_disk(engine=engine):
        optimizer = make(model, commit_every=0)
    one_step(model, optimizer)
    engine.is_lost = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.commit()
    for call in (optimizer.commit, optimizer.synchronize):
        with pytest.raises(TierIOError):
            call()


def test_an_interrupt_right_after_a_failed_sync_of_the_directory_is_final(make: Make) -> None:
    model, files = Tiny(), SwitchedFiles()
    with on_disk(files):
        optimizer = make(model, commit_every=0)
    one_step(model, optimizer)
    optimizer.commit()
    one_step(model, optimizer)

    class Failing(Files):
        is_decided = False

        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            self.is_decided = new.name == COMMIT_NAME

        def sync_directory(self, path: Path) -> None:
            if self.is_decided:
                try:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                finally:
                    raise KeyboardInterrupt

    with files.switched(Failing()), pytest.raises(KeyboardInterrupt):
        optimizer.commit()
    for call in (optimizer.commit, optimizer.rollback, optimizer.synchronize):
        with pytest.raises(TierIOError):
            call()
