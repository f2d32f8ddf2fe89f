"""A copier that finishes each copy at the last moment the contract allows: a missing wait gives wrong bits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.devices.copies import COPIER_FOR, DONE, Copier, Copy, DeviceEvent, Part, gather

CopiedBy = Callable[[Callable[[], Copier]], None]
"""The fixture `copied_by`: `copying_by` until the test ends."""


@contextmanager
def copying_by(make: Callable[[], Copier]) -> Iterator[None]:
    """Inside, each OffloadZero gets a copier that `make` makes, whatever its device is."""
    token = COPIER_FOR.set(lambda device: make())
    try:
        yield
    finally:
        COPIER_FOR.reset(token)


class _LateCopy(Copy):
    def __init__(
        self, owner: LateCopier, src: Tensor, dst: Tensor, *, is_kept: bool, parts: Sequence[Part] = ()
    ) -> None:
        self._owner = owner
        self._src, self._dst = src, dst
        self._parts = parts  # of the source, which it gets as late
        self._complete = False
        self.is_kept = is_kept
        self._kept: Tensor | None = None  # the source, while only the device has waited

    def done(self) -> bool:
        with self._owner.lock:  # `wait_on_device` runs it, and keeps the source: nobody sees one without the other
            return self._complete and self._kept is None

    def wait(self) -> None:
        self._owner.hurry(self)
        self.run()
        self.end()

    def wait_on_device(self) -> None:
        """The "device" has it at once. The host does not know, and has to leave the source alone."""
        with self._owner.lock:
            if not self._complete:
                self.run()
                if self.is_kept:
                    self._kept = self._src.clone()
                    self._owner.note(self)

    def end(self) -> None:
        with self._owner.lock:
            if self._kept is not None:
                assert torch.equal(self._kept.view(torch.uint8), self._src.view(torch.uint8)), "written before the end"
                self._kept = None

    def run(self) -> None:
        # Once it is done its owner frees the memory: no other thread may still be copying.
        with self._owner.lock:
            if not self._complete:
                with torch.no_grad():
                    if self._parts:
                        gather(self._parts, self._src)
                    self._dst.copy_(self._src)
                    if self._parts:
                        poison(self._src)  # the memory is another copy's now
                self._complete = True


def poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0xA5)


class LateCopier(Copier):
    """Copies between "host" and "device" memory that are both RAM.

    Until a copy runs, `dst` is poisoned with NaN. A copy runs when it is waited for, or, at random, when another
    one is: in any order, as streams may.
    """

    direct = False

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._late: list[_LateCopy] = []
        self.copies = 0

    def hurry(self, waited: _LateCopy) -> None:
        with self.lock:
            late = [copy for copy in self._late if not copy.done() and copy is not waited]
            self._random.shuffle(late)
            for copy in late:
                if self._random.random() < 0.2:
                    copy.run()
                    copy.end()
            self._late = [copy for copy in late if not copy.done()]

    def note(self, copy: _LateCopy) -> None:
        """It ends later, some time."""
        if copy not in self._late:
            self._late.append(copy)

    def mark(self, stream: object = None) -> DeviceEvent:
        return DONE

    def _start(self, src: Tensor, dst: Tensor, *, is_kept: bool, parts: Sequence[Part] = ()) -> Copy:
        assert src.shape == dst.shape
        assert src.dtype is dst.dtype
        with self.lock, torch.no_grad():
            poison(dst)
            copy = _LateCopy(self, src, dst, is_kept=is_kept, parts=parts)
            self._late.append(copy)
            self.copies += 1
        return copy

    def to_host(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        self._end_late()
        return self._start(src, dst, is_kept=False)

    def gather_to_host(
        self, parts: Sequence[Part], staging: Tensor, dst: Tensor, after: DeviceEvent | None = None
    ) -> Copy:
        self._end_late()
        return self._start(staging, dst, is_kept=False, parts=parts)

    def _end_late(self) -> None:
        """A copy to the host begins after what the device has waited for, and may write over the sources of that."""
        with self.lock:
            for copy in self._late:
                copy.end()

    def to_device(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        return self._start(src, dst, is_kept=True)

    @contextmanager
    def after_uploads(self) -> Iterator[None]:
        with self.lock:
            for copy in [copy for copy in self._late if copy.is_kept]:
                copy.wait_on_device()
        yield

    def pin(self, memory: Tensor) -> None:
        return None

    def unpin(self, memory: Tensor) -> None:
        return None


class HeldCopier(LateCopier):
    """Its copies to the host end in their order, each when its gate is open.

    Attributes: gates: of the copies that were started while `holds`.
    """

    def __init__(self, *, holds: bool = True) -> None:
        super().__init__()
        self.holds = holds
        self.gates: list[threading.Event] = []

    def let_go(self) -> None:
        for gate in self.gates:
            gate.set()

    def hurry(self, waited: _LateCopy) -> None:
        return

    def _start(self, src: Tensor, dst: Tensor, *, is_kept: bool, parts: Sequence[Part] = ()) -> Copy:
        made = super()._start(src, dst, is_kept=is_kept, parts=parts)
        if is_kept or not self.holds:
            return made
        gate = threading.Event()
        self.gates.append(gate)
        wait = made.wait

        def wait_until_let_go() -> None:
            assert gate.wait(60)
            wait()

        made.wait = wait_until_let_go  # type: ignore[method-assign]
        return made
