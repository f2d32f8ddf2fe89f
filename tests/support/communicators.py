"""Communicators for tests, around another one: a slow link, and one that does everything at the last moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from offload.devices.copies import Copy
from offload.errors import RankError
from offload.profiling import COLLECTIVES, Timeline
from offload.ranks.communicator import Communicator, Work


class _Around(Communicator):
    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.size, inner.local_rank, inner.ranks_on_node)
        self.user_ranks = inner.user_ranks
        self._inner = inner
        self._shard_group = self if inner.shard_group is inner else self._like(inner.shard_group)
        self._replicate_group = (
            inner.replicate_group if inner.replicate_group.size == 1 else self._like(inner.replicate_group)
        )
        self._side_group: Communicator | None = None

    def _like(self, inner: Communicator) -> Communicator:
        return type(self)(inner)

    @property
    def shard_group(self) -> Communicator:
        return self._shard_group

    @property
    def replicate_group(self) -> Communicator:
        return self._replicate_group

    @property
    def side_group(self) -> Communicator:
        if self._side_group is None:
            self._side_group = self._like(self._inner.side_group)
        return self._side_group

    @property
    def tensor_parallel(self) -> Communicator:
        return self._inner.tensor_parallel

    @property
    def everyone(self) -> Communicator:
        return self if self._inner.everyone is self._inner else self._inner.everyone

    def in_order(self, user_ranks: Sequence[int]) -> Communicator | None:
        made = self._inner.in_order(user_ranks)
        return None if made is None else self._like(made)

    def exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> None:
        self._inner.exchange(sent, target, received, source)

    def stats(self) -> dict[str, int]:
        return self._inner.stats()

    def check(self) -> None:
        self._inner.check()

    def close(self) -> bool:
        return self._inner.close()


class _DelayedWork(Work):
    def __init__(self, inner: Work, arrives: float) -> None:
        self._inner = inner
        self._arrives = arrives

    def done(self) -> bool:
        return time.monotonic() >= self._arrives and self._inner.done()

    def wait(self) -> None:
        time.sleep(max(self._arrives - time.monotonic(), 0))
        self._inner.wait()


class _Link:
    """One transfer at a time."""

    def __init__(self) -> None:
        self.free = 0.0
        self.busy_s = 0.0


class Delayed(_Around):
    """Each collective takes `delay_s` seconds longer, one after the other: a link, which needs no core meanwhile.

    Args: timeline: gets the link's events; link: of the group that this one is a part of.
    """

    def __init__(
        self, inner: Communicator, delay_s: float, timeline: Timeline | None = None, link: _Link | None = None
    ) -> None:
        self._delay_s = delay_s
        self._timeline = timeline or Timeline()
        self._link = link or _Link()
        super().__init__(inner)

    def _like(self, inner: Communicator) -> Communicator:
        return type(self)(inner, self._delay_s, self._timeline, self._link)

    @property
    def busy_s(self) -> float:
        """Seconds in which the link was used."""
        return self._link.busy_s

    def _arrival(self, name: str) -> float:
        now, link = time.monotonic(), self._link
        link.free = max(link.free, now) + self._delay_s
        link.busy_s += self._delay_s
        if (event := self._timeline.begin(COLLECTIVES, name)) is not None:
            threading.Timer(link.free - now, Timeline.end, [event]).start()
        return link.free

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        arrives = self._arrival("reduce_scatter")
        return _DelayedWork(self._inner.reduce_scatter(full, out, scratch=scratch), arrives)

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        arrives = self._arrival("all_gather")
        return _DelayedWork(self._inner.all_gather_into_tensor(shard, out), arrives)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        time.sleep(max(self._arrival("broadcast") - time.monotonic(), 0))
        self._inner.broadcast(tensor, source)

    def all_gather(self, values: Tensor) -> Tensor:
        time.sleep(max(self._arrival("gather") - time.monotonic(), 0))
        return self._inner.all_gather(values)


class Waiting(Delayed):
    """Without overlap: each collective is waited for at once."""

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        work = super().reduce_scatter(full, out, scratch=scratch)
        work.wait()
        return work

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        work = super().all_gather_into_tensor(shard, out)
        work.wait()
        return work


class _LateWork(Work):
    def __init__(self, owner: Late, start: Callable[[], Work]) -> None:
        self._owner = owner
        self._start = start
        self._work: Work | None = None
        self._is_over = False

    def done(self) -> bool:
        return self._is_over

    def launch(self) -> Work:
        if self._work is None:
            self._work = self._start()
        return self._work

    def end(self) -> None:
        self.launch().wait()
        self._is_over = True

    def wait(self) -> None:
        self._owner.launch_until(self)


class Late(_Around):
    """Does each collective at the last moment that the contract allows, so that a missing wait gives wrong bits.

    What is sent is read when the work, or one launched after it, is waited for, or anything in another order (see
    `side_group`), for which another rank may need this first; until then `out` and `scratch` are NaN. The order among
    the ranks stays.
    """

    def __init__(self, inner: Communicator, family: list[Late] | None = None) -> None:
        self._family = [] if family is None else family
        self._family.append(self)
        super().__init__(inner)
        self._waiting: list[_LateWork] = []

    def _like(self, inner: Communicator) -> Communicator:
        return type(self)(inner, self._family)

    def launch_until(self, last: _LateWork | None) -> None:
        """Everything before `last`, and that; None: everything."""
        for other in self._family:
            for work in other._waiting if other is not self else ():
                work.launch()
        while self._waiting and (last is None or not last.done()):
            self._waiting.pop(0).end()

    def _later(self, start: Callable[[], Work], *poisoned: Tensor) -> Work:
        with torch.no_grad():
            for tensor in poisoned:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        work = _LateWork(self, start)
        self._waiting.append(work)
        return work

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        def start() -> Work:
            return self._inner.reduce_scatter(full, out, scratch=scratch)

        return self._later(start, *out) if scratch is None else self._later(start, *out, scratch)

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        def start() -> Work:
            out.fill_(0)
            return self._inner.all_gather_into_tensor(kept, out)

        # `shard` may be a part of `out`: only the rest is not to be read.
        within = out.data_ptr() <= shard.data_ptr() < out.data_ptr() + out.numel() * out.element_size()
        kept = shard.clone() if within else shard
        return self._later(start, out)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.launch_until(None)
        self._inner.broadcast(tensor, source)

    def all_gather(self, values: Tensor) -> Tensor:
        self.launch_until(None)
        return self._inner.all_gather(values)

    def close(self) -> bool:
        for one in (self, self._side_group):
            if isinstance(one, Late):
                one.launch_until(None)
        return super().close()


class DifferentOrderError(AssertionError):
    """The ranks launched their collectives in different orders."""


class Ordered(_Around):
    """Fails at the end if two ranks launched the collectives of all groups together in different orders.

    Each order by itself is enough for gloo. On GPUs the kernels of all groups share the device, and two that wait for
    each other's ranks can wait for ever.
    """

    def __init__(self, inner: Communicator, name: str = "", launched: list[str] | None = None) -> None:
        self._name = name
        self._launched: list[str] = [] if launched is None else launched
        self._parts = 0
        super().__init__(inner)

    def _like(self, inner: Communicator) -> Communicator:
        self._parts += 1
        return type(self)(inner, f"{self._name}.{self._parts}", self._launched)

    def _note(self, what: str, numel: int) -> None:
        self._launched.append(f"{what} of {numel} in group {self._name or 'all'}")

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        self._note("reduce_scatter", full.numel())
        return self._inner.reduce_scatter(full, out, scratch=scratch)

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        self._note("all_gather_into_tensor", out.numel())
        return self._inner.all_gather_into_tensor(shard, out)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._note("broadcast", tensor.numel())
        self._inner.broadcast(tensor, source)

    def all_gather(self, values: Tensor) -> Tensor:
        self._note("all_gather", values.numel())
        return self._inner.all_gather(values)

    def require_one_order(self) -> None:
        """Raises: DifferentOrderError. Every rank has to call it."""
        every: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(every, self._launched)
        for rank, other in enumerate(every):
            for number, (first, second) in enumerate(zip_longest(every[0], other)):
                if first != second:
                    raise DifferentOrderError(f"launch {number}: rank 0 {first}, rank {rank} {second}")


class _NotedWork(Work):
    def __init__(self, inner: Work, under_way: set[Work]) -> None:
        self._inner = inner
        self._under_way = under_way
        under_way.add(self)

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> None:
        self._inner.wait()
        self._under_way.discard(self)

    def wait_on_device(self) -> None:
        self._inner.wait_on_device()


class Awaited(_Around):
    """Knows which works the host has not waited for, as if all tensors were a device's."""

    def __init__(self, inner: Communicator, under_way: set[Work] | None = None) -> None:
        self.under_way: set[Work] = set() if under_way is None else under_way
        super().__init__(inner)

    def _like(self, inner: Communicator) -> Communicator:
        return type(self)(inner, self.under_way)

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        return _NotedWork(self._inner.reduce_scatter(full, out, scratch=scratch), self.under_way)

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        return _NotedWork(self._inner.all_gather_into_tensor(shard, out), self.under_way)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._inner.broadcast(tensor, source)

    def all_gather(self, values: Tensor) -> Tensor:
        return self._inner.all_gather(values)


class GoneWork(Work):
    """What another rank will never send: a device that waits for it does so for ever."""

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise RankError("rank 1 is gone", collective="all_gather", waited_s=1.0)


class PendingWork(Work, Copy):
    """Ends when it is waited for."""

    def __init__(self) -> None:
        self.has_ended = False

    def done(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        self.has_ended = True

    def wait_on_device(self) -> None:
        return None


class _DoneWork(Work):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_DONE = _DoneWork()


class _Clock:
    """Of one rank. Attributes: now: rounds; launched: what was launched, by name, each with the round it began in."""

    def __init__(self) -> None:
        self.now = 0
        self.launched: list[tuple[int, str, int]] = []


class _CountedWork(Work):
    def __init__(self, inner: Work, clock: _Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._arrives = clock.now + 1

    def done(self) -> bool:
        return self._clock.now >= self._arrives and self._inner.done()

    def wait(self) -> None:
        self._inner.wait()
        self._clock.now = max(self._clock.now, self._arrives)


class Counted(_Around):
    """Counts collectives, and how many of them follow one another: rounds.

    A round is what a collective takes on a link that only delays: one that is launched while others are under way ends
    with those of its round. So rounds depend on the order of launches and waits, not on time. Attributes: clock.
    """

    def __init__(self, inner: Communicator, clock: _Clock | None = None) -> None:
        self.clock = _Clock() if clock is None else clock
        super().__init__(inner)

    def _like(self, inner: Communicator) -> Communicator:
        return type(self)(inner, self.clock)

    def _work(self, name: str, inner: Work, numel: int) -> Work:
        self.clock.launched.append((self.clock.now, name, numel))
        return _CountedWork(inner, self.clock)

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        return self._work("reduce_scatter", self._inner.reduce_scatter(full, out, scratch=scratch), full.numel())

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        return self._work("all_gather", self._inner.all_gather_into_tensor(shard, out), out.numel())

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._inner.broadcast(tensor, source)
        self._work("broadcast", _DONE, tensor.numel()).wait()

    def all_gather(self, values: Tensor) -> Tensor:
        found = self._inner.all_gather(values)
        self._work("gather", _DONE, values.numel()).wait()
        return found
