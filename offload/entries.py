"""Entries: one thread at a time is inside a run, however many use its model.

[Note: threads]
A run is entered by hooks of forward and backward, by uses of guarded parameters and of gradients, and by the methods of
the optimizer. Each entry takes one re-entrant lock, and gives it back when it returns. So a use in another thread waits
for the end of an operation, such as a whole `step()`, and has values of one step. No entry holds the lock while it
waits for a thread that may have to enter: autograd runs backward in threads of its own where there is a device. Nor
while code of the user runs, but for two: the model's `state_dict()` in `export()`, and those of attached objects where
`optimizer.state_dict()` has to commit.

Between two entries a thread computes with memory that it has fetched. That memory must not go:

- A *pass* is a forward, or a backward, that is under way. What is fetched for a pass of one thread is pinned until the
  next entry of that thread. Another thread fetches what it reads beside that, and releases only what it fetched itself,
  and what is still on its way (fetch.py).
- What changes the whole run (a commit, a rollback, `p.grad`, moving the model) waits in another thread until no pass is
  under way. So it meets what it would meet in the thread that trains.
- Where parameters stream, passes of two threads exclude each other. The thread that trains waits. In another thread a
  forward beside a pass is an error, because the pass may be waiting for it.

The thread that *trains* is the one that began the last forward with gradients, or the last backward that accumulates
them, or called `step()` last. Over several
ranks the others may not do what all ranks have to do together: nobody could tell in which order.

A thread that enters beside the one that trains pauses afterwards. Python's locks are not fair, and a loop that reads
would take the lock again before the other thread has woken up.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from offload import torch_private
from offload.errors import ConfigError, DeviceError
from offload.interrupts import LET_IN_S, let_in, uninterrupted

P = ParamSpec("P")
R = TypeVar("R")
Thread = threading.Thread

PAUSE_S = 5e-5
"""For which a thread pauses after an entry beside the thread that trains."""
YIELD_S = 1.0
"""The longest that a pass waits, before it begins, for a thread that has waited until there was none."""
LIMIT_S = 600.0
"""The longest wait for a pass of another thread: that one may be waiting for this thread."""
NOT_COMPILED = "what OffloadZero does is in kernels and files: torch.compile has nothing to gain there"
"""Why methods of the optimizer run as they are in compiled code, which torch says if it may not end its graph there."""

_every: weakref.WeakSet[Entries] = weakref.WeakSet()


class Entries:
    """The threads in one run; see [Note: threads].

    The lock is held by whoever calls these methods, except `is_beside` and `pause`.

    Args:
        ranks: how many ranks train the model together.

    Attributes:
        lock: held inside every entry.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._begin()
        _every.add(self)

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._trainer: Thread | None = None
        self._under_way: dict[Thread, int] = {}  # forwards and backwards
        self._waiting = 0

    def here(self) -> Thread:
        """This thread; in a thread of autograd, the thread that trains."""
        thread = threading.current_thread()
        is_foreign = isinstance(thread, threading._DummyThread)
        return self._trainer if is_foreign and self._trainer is not None else thread

    def is_beside(self) -> bool:
        """Whether another thread, which is alive, trains the model."""
        trainer = self._trainer
        return trainer is not None and trainer.ident != threading.get_ident() and self._is_other(trainer)

    def trains(self) -> None:
        """Makes this thread the one that trains the model."""
        self._trainer = self.here()

    @property
    def has_trained(self) -> bool:
        """Whether a forward with gradients has begun, in any thread."""
        return self._trainer is not None

    def pass_begins(self) -> Thread:
        """Counts a forward or a backward that begins in this thread.

        Returns:
            The thread whose pass it is, for `pass_ends`.
        """
        here = self.here()
        self._under_way[here] = self._under_way.get(here, 0) + 1
        return here

    def pass_ends(self, owner: Thread) -> None:
        """Counts a forward or a backward of `owner` as ended."""
        count = self._under_way.pop(owner, 0)
        if count > 1:
            self._under_way[owner] = count - 1
        self._changed.notify_all()

    def forget(self) -> None:
        """Drops the passes of this thread, which raised or were interrupted, and will never end."""
        self._under_way.pop(self.here(), None)
        self._changed.notify_all()

    def is_passing(self) -> bool:
        """Whether a forward or backward of another thread is under way."""
        return any(map(self._is_other, self._under_way))

    def give_way(self) -> None:
        """Lets in a thread that has waited for the end of the last pass, before a pass of this thread begins."""
        if self._waiting and not self._under_way:
            self._wait(lambda: not self._waiting, YIELD_S)

    def take_turn(self, *, waits: bool) -> None:
        """Requires that no other thread has a pass under way, before one begins here that excludes them.

        Args:
            waits: whether to wait for their end. The thread that trains waits in any case.

        Raises:
            ConfigError: if another thread has a pass under way, and this one does not wait, or has waited too long.
        """
        if self.is_passing():
            if not waits and self._trainer is not self.here():
                raise self._refusal("a forward began")
            self._wait_for_passes("a forward or backward began")

    def wait_for_turn(self, what: str) -> None:
        """Waits until no pass of another thread is under way.

        Args:
            what: what is about to be done, as the error says it.

        Raises:
            ConfigError: if another thread trains and all ranks have to do this together, or it has waited too long.
        """
        if self.is_beside():
            if self._ranks > 1:
                raise ConfigError(
                    f"{what} in thread {threading.current_thread().name!r}, and thread {self._trainer_name!r} trains "
                    "the model: all ranks have to do that at one place of their loops, so do it in the thread that "
                    "trains"
                )
            self._wait_for_passes(what)

    def pause(self) -> None:
        """Pauses after an entry, if another thread trains. Called without the lock."""
        if self.is_beside():
            time.sleep(PAUSE_S)

    def _wait_for_passes(self, what: str) -> None:
        self._waiting += 1
        try:
            if not self._wait(lambda: not self.is_passing(), LIMIT_S):
                raise self._refusal(what)
        finally:
            self._waiting -= 1
            self._changed.notify_all()

    @uninterrupted
    def _wait(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Gives the lock back until `done()`, or until `limit_s` seconds have passed.

        Returns:
            Whether `done()`.
        """
        end = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end:
                return False
            self._changed.wait(LET_IN_S)
            let_in()
        return True

    def _refusal(self, what: str) -> ConfigError:
        owner = next((one.name for one in self._under_way if self._is_other(one)), "")
        return ConfigError(
            f"a forward or backward of the model runs in thread {owner!r}, and {what} in thread "
            f"{threading.current_thread().name!r}: one thread at a time may run a model with streamed parameters; "
            "run them one after the other, or use a copy.deepcopy(model) in the other thread"
        )

    @property
    def _trainer_name(self) -> str:
        return "" if self._trainer is None else self._trainer.name

    def _is_other(self, thread: Thread) -> bool:
        return thread is not self.here() and thread.is_alive()


def _begin_in_child() -> None:
    """Begins anew in a forked child, where the parent's threads are gone. One of them may have held a lock."""
    for entries in list(_every):
        entries._begin()


os.register_at_fork(after_in_child=_begin_in_child)


def _called(method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `method`.

    Raises:
        DeviceError: instead of torch's error for a device that failed.
    """
    try:
        return method(*args, **kwargs)
    except torch.AcceleratorError as error:
        raise DeviceError.of(error) from error


def not_compiled(method: Callable[P, R]) -> Callable[P, R]:
    """Makes code that torch.compile compiles call a method as it is.

    The method has to put aside what compiles frames, `set_frame_callback(None)`, and to put it back: what it calls
    would be compiled frame by frame. A wrapper would do that, too, and add a frame to those that warnings count.
    """
    torch_private.skip_frames(method.__code__)
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    method._torchdynamo_disable_msg = NOT_COMPILED  # type: ignore[attr-defined]
    return method


def entry(method: Callable[P, R]) -> Callable[P, R]:
    """Lets one thread at a time into a method of an object that has `entries`."""

    @wraps(method)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with args[0].entries.lock:  # type: ignore[attr-defined]
            return _called(method, *args, **kwargs)

    return inside


def exclusive_entry(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `entry`, but a thread beside the one that trains waits until no pass is under way.

    Args:
        name: of the method that users call.
    """

    def marked(method: Callable[P, R]) -> Callable[P, R]:
        @not_compiled
        @wraps(method)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            callback = torch_private.set_frame_callback(None)
            try:
                entries: Entries = args[0].entries  # type: ignore[attr-defined]
                with entries.lock:
                    entries.wait_for_turn(f"{name}() was called")
                    return _called(method, *args, **kwargs)
            finally:
                torch_private.set_frame_callback(callback)

        return inside

    return marked


def training_entry(method: Callable[P, R]) -> Callable[P, R]:
    """As `entry`, for a method that trains. It waits until no other thread has a pass under way.

    The thread that calls it is the one that trains from then on.
    """

    @not_compiled
    @wraps(method)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        callback = torch_private.set_frame_callback(None)
        try:
            entries: Entries = args[0].entries  # type: ignore[attr-defined]
            with entries.lock:
                entries.take_turn(waits=True)
                entries.trains()
                return _called(method, *args, **kwargs)
        finally:
            torch_private.set_frame_callback(callback)

    return inside
