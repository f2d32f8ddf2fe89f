"""When which unit is on the device: streamed parameters are there only around their use.

See [Note: residency of a unit] in gathering.py: a state, never a count, for recomputation in backward runs some hooks
twice and some not at all. A unit is entered by the forward of any of its modules, and by their backward, when the
gradient of what that forward returned is there. Entering one releases the others but those whose forward is running,
the one whose backward began last (recomputation inside it enters others, and it goes on afterwards), the root and what
`gathered` holds. So the root, the unit in use, the one around it and `depth` to come are on the device at most. Of
nested units the outer ones stay as long as an inner one: they go on after it.

Whoever else uses a parameter (guard.py) has its unit fetched for that operation, and again when the gradient of its
result arrives. A unit that used others remembers them: they are fetched with it from then on. In a backward that makes
a graph (`create_graph`) what was fetched stays until the next step, for the nodes of that graph announce nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from offload.errors import BudgetError, ConfigError, ReleasedParameterError
from offload.model.flat_param import Parameters
from offload.model.gathering import Gathering
from offload.model.graphs import call_alive, in_backward
from offload.model.hiding import unseen
from offload.model.running import Running
from offload.model.tensors import tensors_in
from offload.model.units import ROOT, encloses
from offload.model.where import Where
from offload.sizes import format_bytes
from offload.storage.chunk_cache import Store

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

MOST_REMEMBERED = 1 << 14
"""Units of one pass whose order is remembered."""


class Streaming:
    """See the top of this file.

    Args: store: the 16-bit parameters of all chunks; gathering: what moves them; depth: units brought ahead of the one
    in use; is_pending: whether a unit's new values are still to be made, by name; apply: makes them; take_writes: takes
    over what was written to parameters that are here, calling `gathering.write_back`; limit: bytes that parameters may
    take on the device; needs_all_ranks: whether fetching a unit does, by name.
    """

    def __init__(
        self,
        parameters: Parameters,
        store: Store,
        gathering: Gathering,
        *,
        depth: int,
        is_pending: Callable[[str], bool],
        apply: Callable[[str], None],
        take_writes: Callable[[], None],
        running: Running,
        limit: int | None = None,
        needs_all_ranks: Callable[[str], bool] = lambda unit: False,
    ) -> None:
        self._parameters = parameters
        self._store = store
        self.gathering = gathering
        self._depth = depth
        self._is_pending = is_pending
        self._take_writes = take_writes
        self._apply = apply
        self._limit = limit
        self._needs_all_ranks = needs_all_ranks
        self._held: list[str] = []  # between `hold` and `let_go`
        self._used: list[str] = []  # of operations that run now
        self._running = running
        self._guests: dict[str, dict[str, None]] = {}
        self._makes_graph = False
        self._backward: str | None = None
        self._tasks: set[int] = set()
        self._thread: threading.Thread | None = None
        # What was entered since the pass began, and what the last pass like it entered: with gradients, or without.
        self._entered: deque[str] = deque(maxlen=MOST_REMEMBERED)
        self._is_training = True
        self._orders: dict[bool, Sequence[str]] = {}
        self._ahead: deque[str] = deque()

    # What hooks call.

    def model_begins(self) -> None:
        """Before a forward of the whole model. Raises: ConfigError if it runs in another thread."""
        if not in_backward():
            self._require_one_thread()
            self._forget_calls()
            self._begin_pass()
        self.forward_begins(ROOT)

    def model_ends(self, output: Any) -> None:
        """After it, also if it raised; then there is no output."""
        if not in_backward() and self._thread is not threading.current_thread():
            return  # it was refused
        self.forward_ends(ROOT, output)
        if not in_backward() and not any(tensor.requires_grad for tensor in tensors_in(output)):
            self.release_all()  # no backward will
            self._store.repeat()

    def forward_begins(self, unit: str) -> None:
        """Before the forward of a module of `unit`."""
        if in_backward():
            # Before a backward inside this one (reentrant checkpointing) can begin: it would take its end for the end.
            self._note_task()
        else:
            self._require_one_thread()
        self._enter(unit)
        self._running.enter(unit)

    def _require_one_thread(self) -> None:
        thread = threading.current_thread()
        if self._running.units and self._thread is not None and self._thread is not thread and self._thread.is_alive():
            raise ConfigError(
                f"a forward of the model runs in thread {self._thread.name!r} and another began in {thread.name!r}: "
                "with streamed parameters one thread at a time may run it"
            )
        self._thread = thread

    def forward_ends(self, unit: str, output: Any) -> None:
        """After it, also if it raised; then there is no output."""
        self._running.leave(unit)
        # Graphs outlive optimizers, and what they hold is not found by the collector of garbage.
        begins = partial(call_alive, weakref.WeakMethod(self._backward_begins), unit)
        for tensor in tensors_in(output):
            # A view that is changed in place gets another history, in which only its base has a place.
            for one in (tensor, tensor._base):
                if one is not None and one.grad_fn is not None:
                    one.register_hook(begins)

    def _backward_begins(self, unit: str) -> None:
        self.gathering.require_usable()
        self._note_task()
        self._makes_graph = self._makes_graph or torch.is_grad_enabled()
        if unit != ROOT:
            self._backward = unit
        self._enter(unit)

    def _note_task(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            _queue_callback(partial(call_alive, weakref.WeakMethod(self._backward_ends), task))

    def _backward_ends(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._backward = None
            self.release_all()

    def step_begins(self) -> None:
        """The order of this step is expected to come again."""
        self._makes_graph = False
        self._forget_calls()
        self._begin_pass()
        self.release_all()
        self._take_writes()  # to what `gathered` holds: the step is to see them
        self._store.repeat()

    def _forget_calls(self) -> None:
        """What raised, or was interrupted, never said its end."""
        self._tasks.clear()
        self._used.clear()
        self._running.reset()
        self._backward = None

    def _begin_pass(self) -> None:
        if self._entered:
            self._orders[self._is_training] = tuple(self._entered)
            self._entered.clear()
        was_training, self._is_training = self._is_training, torch.is_grad_enabled()
        order = self._orders.get(self._is_training, ())
        self._ahead = deque(order)
        if self._is_training and not was_training and order:
            # What was announced are the reads of a pass without gradients, and not of any backward.
            self.gathering.expect((ROOT, *order))

    # What guards call.

    @contextmanager
    def used(self, units: Sequence[str]) -> Iterator[None]:
        """The current values of `units` are on the device inside, for whoever uses them outside of their forward.

        Raises: ReleasedParameterError where fetching needs all ranks and this one may be alone; BudgetError.
        """
        is_outside = not self._running.units and not self._tasks and not in_backward()
        if is_outside and (missing := [unit for unit in units if self._needs_all_ranks(unit)]):
            raise ReleasedParameterError(
                f"current values of {missing[0] or 'the root unit'} come from all ranks, and this one may be alone: "
                "use them inside `with optimizer.gathered(module_or_params):`, on every rank"
            )
        self._used.extend(units)  # by one another they are not released
        try:
            unseen(self._fetch, units)
            yield
        finally:
            del self._used[max(0, len(self._used) - len(units)) :]  # uses are nested

    def _fetch(self, units: Sequence[str]) -> None:
        guests = [unit for unit in units if unit != ROOT and not self._running.runs(unit)]
        if guests and not self._makes_graph:
            self._release_others(*guests)
        self._require_room(units)
        for unit in units:
            self._apply(unit)
            self.gathering.bring(unit)
        host = next(reversed(self._running.units), ROOT)
        if host != ROOT:
            self._guests.setdefault(host, {}).update(dict.fromkeys(guests))

    def fetch_before(self, node: torch.autograd.graph.Node, units: Sequence[str]) -> None:
        """Fetches `units` again each time that `node`, of a graph, is about to run."""
        node.register_prehook(partial(call_alive, weakref.WeakMethod(self._node_runs), tuple(units)))

    def _node_runs(self, units: Sequence[str]) -> None:
        self.gathering.require_usable()
        self._note_task()
        self._makes_graph = self._makes_graph or torch.is_grad_enabled()
        with self.used(units):
            pass

    def _missing_room(self, units: Iterable[str]) -> int:
        """Bytes that are missing on the device for `units` beside what is there."""
        together = {*units, *self.gathering.allocated}
        return 0 if self._limit is None else sum(map(self.gathering.bytes_of, together)) - self._limit

    def _require_room(self, units: Sequence[str]) -> None:
        """Raises: BudgetError if these units do not fit beside what is in use."""
        missing = self._missing_room(units)
        if missing > 0:
            assert self._limit is not None
            why = "a backward with create_graph=True keeps" if self._makes_graph else "one operation uses"
            raise BudgetError(
                f"{why} more streamed parameters together than device_memory leaves room for: "
                f"{format_bytes(self._limit + missing)}, and there are {format_bytes(self._limit)}; give more "
                "device_memory, or use them one after the other",
                needed=self._limit + missing,
                available=self._limit,
                option="device_memory",
            )

    # Fetching and releasing.

    def visit(self, units: Iterable[str]) -> None:
        """Brings units for whoever reads or writes them now; they are released when others come."""
        if visited := [unit for unit in units if unit != ROOT]:
            self._release_others(*visited)
        for unit in units:
            self.gathering.bring(unit)

    def leave(self, unit: str) -> None:
        """Ends a visit."""
        if not self._is_in_use(unit) and not self._tasks and not self._makes_graph:
            self._release(unit)

    def hold(self, unit: str) -> None:
        """The unit stays on the device until `let_go`, which is called as often; what was written to it before counts
        as written outside of that."""
        self._held.append(unit)
        try:
            self.gathering.bring(unit)
            self._take_writes()
        except BaseException:
            self._held.remove(unit)
            raise

    def let_go(self, unit: str) -> None:
        self._held.remove(unit)
        self._take_writes()
        self.leave(unit)

    def open(self, unit: str) -> None:
        """Memory for a unit whose new values are about to land, see `Gathering.open`."""
        if self.gathering.can_open(unit):
            if unit != ROOT:
                self._release_others(unit, *self._follow(unit))
            self.gathering.open(unit)

    def release_all(self) -> None:
        """Releases what nobody uses."""
        if self._makes_graph:
            return
        for unit in self.gathering.allocated:
            if not self._is_in_use(unit):
                self._release(unit)

    def abandon(self) -> None:
        """Releases everything, and takes over nothing that was written to it."""
        self._forget_calls()
        self.gathering.abandon()

    def bring_all(self) -> None:
        """All parameters, to stay; nothing may be entered afterwards."""
        self._forget_calls()
        for unit in self.gathering.units:
            if self.gathering.home_of(unit) == unit:
                self.gathering.bring(unit)

    def _is_in_use(self, unit: str) -> bool:
        goes_on = self._backward is not None and encloses(unit, self._backward)
        return goes_on or self._running.runs(unit) or unit in self._held or unit in self._used

    def _follow(self, unit: str) -> list[str]:
        """Notes that a unit is entered; returns those expected next."""
        if not self._entered or self._entered[-1] != unit:
            self._entered.append(unit)
            if unit in self._ahead:
                while self._ahead.popleft() != unit:
                    pass
        return self._following()

    def _following(self) -> list[str]:
        return list(dict.fromkeys(self._ahead))[: self._depth]

    def _enter(self, unit: str) -> None:
        if unit == ROOT or unit not in self.gathering.units:
            self.gathering.bring(unit)
            return
        following = self._follow(unit)
        guests = self._guests.get(unit, ())
        # One that is here already, and not on its way, is not brought ahead: it comes anew.
        self._release_others(unit, *guests, *(one for one in following if self.gathering.is_at(one, Where.COMING)))
        if self._makes_graph:
            self._require_room((unit,))
        self.gathering.bring(unit)
        for guest in guests:
            is_to_come = self.gathering.is_at(guest, Where.RELEASED) and not self._is_pending(guest)
            if is_to_come and self._missing_room((guest,)) <= 0:
                self.gathering.start(guest)
        self.bring_ahead()

    def bring_ahead(self) -> None:
        """Starts what is expected next, unless its new values are still to land."""
        for other in self._following():
            is_to_come = self.gathering.is_at(other, Where.RELEASED) or self.gathering.is_open(other)
            has_room = not self._makes_graph or self._missing_room((other,)) <= 0
            if is_to_come and has_room and not self._is_pending(self.gathering.home_of(other)):
                self.gathering.start(other)

    def _release_others(self, *wanted: str) -> None:
        if self._makes_graph:
            return
        for unit in self.gathering.allocated:
            if unit == ROOT or self._is_in_use(unit):
                continue
            # Brought ahead, and now it comes later than thought, or not at all.
            if unit not in wanted:
                self._release(unit)

    def _release(self, unit: str) -> None:
        if self.gathering.is_at(unit, Where.HERE):
            numbers = self.gathering.params_of(unit)
            self._parameters.take_back(numbers)
            if self._parameters.written_outside(numbers):
                self._take_writes()
        self.gathering.release(unit)
