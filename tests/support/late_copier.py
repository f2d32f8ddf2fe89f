"""A copier that finishes each copy at the last moment the contract allows: a missing wait gives wrong bits."""

from __future__ import annotations

import random
import threading

import torch
from torch import Tensor

from offload.devices.copies import Copier, Copy


class _LateCopy(Copy):
    def __init__(self, owner: LateCopier, src: Tensor, dst: Tensor) -> None:
        self._owner = owner
        self._src, self._dst = src, dst
        self._complete = False

    def done(self) -> bool:
        return self._complete

    def wait(self) -> None:
        self._owner.hurry(self)
        self.run()

    def run(self) -> None:
        # Once it is done its owner frees the memory: no other thread may still be copying.
        with self._owner.lock:
            if not self._complete:
                with torch.no_grad():
                    self._dst.copy_(self._src)
                self._complete = True


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
            self._late = [copy for copy in late if not copy.done()]

    def _start(self, src: Tensor, dst: Tensor) -> Copy:
        assert src.shape == dst.shape
        assert src.dtype is dst.dtype
        with self.lock, torch.no_grad():
            dst.fill_(float("nan") if dst.is_floating_point() else 0xA5)
            copy = _LateCopy(self, src, dst)
            self._late.append(copy)
            self.copies += 1
        return copy

    def to_host(self, src: Tensor, dst: Tensor) -> Copy:
        return self._start(src, dst)

    def to_device(self, src: Tensor, dst: Tensor) -> Copy:
        return self._start(src, dst)

    def pin(self, memory: Tensor) -> None:
        return None

    def unpin(self, memory: Tensor) -> None:
        return None
