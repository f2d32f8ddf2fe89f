"""What is on the device when: the use of a parameter fetches its unit, and releases the others.

A unit is entered by the forward of any of its modules, and by their backward, when the gradient of the output arrives.
policy.py says which units are released then, and which are prefetched; transfer.py moves them. Whether a unit is
available is a state, never a count: recomputation in backward runs some hooks twice and some not at all.

Other uses of a parameter (guard.py) fetch its unit for that operation, and again when the gradient of the result
arrives.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.devices.copies import require_not_recorded
from offload.entries import entry
from offload.errors import BudgetError, ConfigError, ReleasedParameterError
from offload.grads.base import GradientBuffer
from offload.interrupts import uninterrupted
from offload.model.backward_order import BackwardOrder
from offload.model.flat_param import FlatParameters
from offload.model.generation import TokenWatch
from offload.model.master_weights import MasterWeights
from offload.model.pending import PendingUpdates
from offload.model.policy import UnitPolicy
from offload.model.running import RunningUnits
from offload.model.scheduling import UnitScheduler
from offload.model.torch_helpers import call_alive, call_hidden, graphs_of, in_backward, tensors_in
from offload.model.transfer import UnitTransfers
from offload.model.unit import Unit
from offload.model.units import ROOT
from offload.run import Owner, Run
from offload.sizes import format_bytes

_NO_CONTEXT = nullcontext()


class HeldUnits:
    """The units of a held model whose parameters are all resident. A use of a unit only applies a pending update.

    Hooks and guards call this class or StreamedUnits. Threads may have passes through resident parameters at the same
    time.

    Attributes:
        entries: the threads in the run.
        running: which units' forwards run.
    """

    def __init__(
        self, run: Run, parameters: FlatParameters, pending: PendingUpdates, masters: MasterWeights, owner: Owner
    ) -> None:
        self._layout = parameters.layout
        self._parameters = parameters
        self._pending = pending
        self._masters = masters
        self._owner = owner
        self._units = parameters.units
        self._root: Unit = self._units[ROOT]
        self.entries = run.entries
        self.running = RunningUnits(parameters, run.entries)
        self._tasks: dict[int, threading.Thread] = {}  # of autograd, that run now, and the thread whose backward it is

    @entry
    def model_begins(self) -> None:
        """Called before a forward of the whole model."""
        if not in_backward():
            self._note_trainer()
        self.forward_begins(self._root)

    def model_ends(self, output: Any) -> None:
        """Called after a forward of the whole model.

        Args:
            output: what it returned; None if it raised.
        """
        self.forward_ends(self._root, output)

    def named(self, name: str) -> Unit:
        """The unit of a name. One that has no parameters is made if there is none."""
        return self._units[name]

    @entry
    def forward_begins(self, unit: Unit) -> None:
        """Called before the forward of a module of `unit`."""
        self._pending.apply(unit)
        self.running.enter(unit)

    @entry
    def forward_ends(self, unit: Unit, output: Any) -> None:
        """Called after the forward of a module of `unit`.

        Args:
            unit: the unit.
            output: what the forward returned; None if it raised.
        """
        self.running.leave(unit)
        self._note_failure(output)

    def _note_failure(self, output: Any) -> None:
        """Tells the owner what a forward raised, if one did.

        Args:
            output: what it returned; None if it raised, or if that is what it returned.
        """
        if output is None:
            self._owner.forward_failed(sys.exception())

    @entry
    def backward_runs(self) -> None:
        """Called while a backward that accumulates gradients runs in this thread."""
        if torch_private.graph_task_id() not in self._tasks:
            self.entries.trains()
        self._note_task()

    def _note_trainer(self) -> None:
        """Makes this thread the one that trains, if a forward of the whole model begins here.

        A forward inside another one does not count.
        """
        if not self.running.units_here:
            self.entries.give_way()
            if torch.is_grad_enabled():
                require_not_recorded(self._parameters.device, "a forward that trains")
                self.entries.trains()

    def _note_task(self) -> None:
        task = torch_private.graph_task_id()
        if task not in self._tasks:
            self._tasks[task] = self.entries.pass_begins()
            torch_private.queue_callback(partial(call_alive, weakref.WeakMethod(self._backward_ends), task))

    @entry
    def _backward_ends(self, task: int) -> None:
        if task in self._tasks:
            self.entries.pass_ends(self._tasks.pop(task))

    def _forget_calls(self) -> None:
        """Forgets calls of this thread that raised, or were interrupted, and so will never end."""
        here = self.entries.here()
        self._tasks = {task: owner for task, owner in self._tasks.items() if owner is not here}
        self.running.reset()
        self.entries.forget()

    @entry
    def apply(self, unit: Unit) -> None:
        """Applies a pending update of a unit."""
        self._pending.apply(unit)

    @entry
    def make_current(self, params: Iterable[Tensor | None]) -> None:
        """Applies pending updates of parameters, wherever these are. Tensors that are not held are passed over."""
        for param in params:
            number = None if param is None else self._parameters.number_of(param)
            if number is not None:
                self._pending.apply(self._parameters.unit_of(number))

    def data_writes(self, params: Iterable[Tensor | None]) -> list[int]:
        """How often `p.data` of each that is held was assigned or written to; see HeldParam."""
        numbers = (None if param is None else self._parameters.number_of(param) for param in params)
        return [self._parameters.held[number].data_writes for number in numbers if number is not None]

    def is_current(self, unit: Unit) -> bool:
        """Whether the current values of a unit are on the device, and no update of it is pending."""
        return not self._pending.is_pending(unit)

    def used(self, units: Sequence[Unit]) -> AbstractContextManager[None]:
        """A context in which the current values of `units` are on the device, for a use outside of their forward."""
        for unit in units:
            self._pending.apply(unit)
        return _NO_CONTEXT

    def expect_tiles(self, tiles: Sequence[Unit]) -> None:
        """Says which tiles of a weight are used next, in this order. The others are not fetched ahead.

        Args:
            tiles: at least one, all of one weight.
        """

    def on_any_rank(self, used: Sequence[bool]) -> list[bool]:
        """Which tiles of a weight some rank uses. The ranks that share it have to call this alike.

        Args:
            used: for each tile, whether this one uses it.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        return list(used)

    def refuse_whole(self, unit: Unit, what: str) -> NoReturn:
        """Refuses an operation that needs all of a tiled weight on the device.

        Args:
            unit: the weight's unit.
            what: the operation's name.

        Raises:
            BudgetError: always.
        """
        raise AssertionError("without streamed parameters there are no tiles")

    def fetch_before(self, node: torch.autograd.graph.Node, units: Sequence[Unit], *, is_used: bool = True) -> None:
        """Makes `units` be fetched again each time that `node` of a graph is about to run.

        Args:
            node: it gives gradients to these units.
            units: the units.
            is_used: whether it needs their values for that; if not, they are not fetched.
        """

    def keep(self, units: Iterable[Unit]) -> None:
        """Keeps units that are available until the next step, because a graph needs them and does not say when."""

    @property
    def is_training(self) -> bool:
        """Whether a pass with gradients of a model that streams is under way, or was the last one."""
        return False

    def visit(self, units: Iterable[Unit]) -> None:
        """Fetches units with their current values for saving or loading. They are released when others are fetched.

        In a thread beside the one that trains this does nothing: each use of a parameter fetches it (guard.py).
        """

    def leave(self, unit: Unit) -> None:
        """Releases a unit unless it is in use."""

    def fetch_all(self) -> None:
        """Fetches all parameters, which stay. No unit may be entered afterwards."""

    def store_outside_writes(self, within: Collection[int] | None = None) -> None:
        """Takes what others wrote to parameters that are available into the store.

        Args:
            within: the parameters to look at, those of whole flat parameters, since these are stored as a whole; None:
                all.
        """

    @contextmanager
    def gathered(self, units: Sequence[Unit], numbers: Sequence[int], *, writable: bool) -> Iterator[None]:
        """A context as `used`, for `OffloadZero.gathered`.

        Args:
            units: the units.
            numbers: the parameters that the user asked for.
            writable: whether these may be written to by other ways than torch's functions.
        """
        for unit in units:
            self.apply(unit)
        yield

    def generate(self, choose: Callable[[], tuple[Collection[str], int]], stack: ExitStack) -> None:
        """Makes more units stay on the device until `stack` is closed; see [Note: units that stay] in policy.py.

        Args:
            choose: returns the names of all units that stay then, and the most bytes that streamed units take at once.
                It is not called inside another such context.
            stack: gets what ends this.
        """

    @property
    def kept(self) -> tuple[int, int]:
        """How many streamed units the last `generate` made stay on the device, and their bytes."""
        return 0, 0

    def step_begins(self) -> None:
        """Called when the last step was applied, and the next one begins."""
        self._forget_calls()
        self._parameters.return_repointed()

    @entry
    def before_loading(self, params: Iterable[nn.Parameter], *_: object) -> None:
        """Called before a state_dict is loaded into a module that has these parameters of its own."""
        self._masters.before_loading(params)

    def take_outside_writes(self, numbers: Collection[int] | None = None) -> None:
        """Takes what others wrote to parameters into their masters.

        Args:
            numbers: the trained parameters to look at; None: all.
        """
        self._parameters.return_repointed(numbers)
        self._masters.take_outside_writes(self._owner.step(), numbers)

    def move(self, device: torch.device) -> None:
        """Moves all parameters to the CPU, or back to the device to train on. Called when nothing is pending."""
        self._forget_calls()
        self._parameters.return_repointed()
        self._parameters.move(device)

    def drain(self) -> None:
        """Waits for copies to the device."""

    def abandon(self) -> None:
        """Drops all that is under way, and all that others wrote to parameters."""

    def close(self) -> None:
        """Waits for what is under way."""


class StreamedUnits(HeldUnits, UnitScheduler):
    """Units whose parameters are on the device only around their use; see the top of this file.

    Args:
        run: what the parts of a run share.
        parameters: the model's.
        transfers: moves units between the store and the device.
        pending: the updates that are not applied yet.
        masters: the master weights.
        owner: the optimizer.
        gradients: is told which units a backward has left, where ranks share the parameters.
    """

    transfers: UnitTransfers

    def __init__(
        self,
        run: Run,
        parameters: FlatParameters,
        transfers: UnitTransfers,
        pending: PendingUpdates,
        masters: MasterWeights,
        owner: Owner,
        gradients: GradientBuffer,
    ) -> None:
        super().__init__(run, parameters, pending, masters, owner)
        self.transfers = transfers
        self._gradients = gradients
        self._backward_order = BackwardOrder.over(run.layout, transfers.units)
        self._policy = UnitPolicy(transfers.ahead)
        self._tokens = TokenWatch(run.timeline)
        self._ranks = run.comm.shard_group
        self._replicas = run.layout.replicas
        self._has_warned = False
        self._generations = 0  # contexts of `generate` that are open
        self._planned: dict[Unit, bool] = {}  # inside: whether each unit stays outside
        self._began_in_pass = False
        self._kept: tuple[int, int] = (0, 0)

    # Forward and backward.

    @entry
    def model_begins(self) -> None:
        """Called before a forward of the whole model.

        Raises:
            ConfigError: if another thread has a pass under way, or the forward is traced, or recorded into a graph.
        """
        if torch_private.tracing_state() is not None:
            # The trace would keep the parameters below Python, where nothing fetches them.
            raise ConfigError(
                "torch.jit.trace of a model with streamed parameters would keep memory that comes and goes: trace a "
                "copy of it, torch.jit.trace(copy.deepcopy(model), ...)"
            )
        call_hidden(self._model_begins)

    def _model_begins(self) -> None:
        is_pass = not in_backward()
        if is_pass:
            require_not_recorded(self._parameters.device, "a forward with streamed parameters")
            self.entries.take_turn(waits=False)
            self._note_trainer()
        self._apply_on_the_way(self._root)
        if is_pass:
            self._forget_calls()
            self._begin_pass()
            self._tokens.pass_begins(keeps_units=bool(self._planned))
        self._forward_begins(self._root)

    @entry
    def model_ends(self, output: Any) -> None:
        if not self.running.runs_here(self._root):
            return  # it was refused
        self.forward_ends(self._root, output)
        if not in_backward() and not any(tensor.requires_grad for tensor in tensors_in(output)):
            self._release_unused()  # no backward will
            self.transfers.expect_same_order()

    @entry
    def forward_begins(self, unit: Unit) -> None:
        call_hidden(self._apply_and_begin, unit)

    def _apply_and_begin(self, unit: Unit) -> None:
        if not in_backward() and not self.running.units_here:
            self.entries.take_turn(waits=False)
        self._apply_on_the_way(unit)
        self._forward_begins(unit)

    def _apply_on_the_way(self, unit: Unit) -> None:
        """Applies a pending update of a unit that is about to be fetched."""
        self._make_way(unit)
        self._pending.apply(unit)

    def _is_pending(self, unit: Unit) -> bool:
        return self._pending.is_pending(unit)

    def _forward_begins(self, unit: Unit) -> None:
        if in_backward():
            # Noted now: a backward inside of this one (reentrant checkpointing) may begin next, and its end must not
            # be taken for the end of this one.
            self._note_task()
        self._enter(unit)
        self._note_uses(unit)
        self.running.enter(unit)

    @entry
    def forward_ends(self, unit: Unit, output: Any) -> None:
        self.running.leave(unit)
        self._note_failure(output)
        begins = partial(call_alive, weakref.WeakMethod(self._backward_begins), (unit, self._position))
        for tensor in tensors_in(output):
            for one in graphs_of(tensor):
                one.register_hook(begins)

    @entry
    def _backward_begins(self, at: tuple[Unit, int]) -> None:
        """Called when the backward of a unit begins.

        Args:
            at: the unit, and the position at the end of its forward.
        """
        unit, position = at
        self._autograd_runs()
        if not unit.is_root:
            self._policy.backward_begins(unit)
        self._backward_reaches(unit, position)
        self._enter(unit)

    def _backward_reaches(self, unit: Unit, position: int) -> None:
        """Sends the gradients that are complete, before the collectives that fetch this unit.

        Args:
            unit: the unit that backward has come to.
            position: the position at the end of the use whose node runs.
        """
        if self._backward_order is not None and not self._policy.makes_graph:
            left = self._backward_order.enter(unit, position, torch_private.graph_task_id())
            is_alone = self._backward_order.is_alone(unit, position)
            self._gradients.backward_enters(unit.name, [one.name for one in left], is_alone=is_alone)

    def _note_uses(self, *units: Unit) -> None:
        """Counts a use of these units, from which gradients will come."""
        if self._backward_order is not None and (torch.is_grad_enabled() or self._policy.order.is_training):
            for unit in units:
                self._backward_order.use(unit)

    @property
    def _position(self) -> int:
        return 0 if self._backward_order is None else self._backward_order.position

    def _autograd_runs(self) -> None:
        """Called when autograd is about to run a node that needs parameters."""
        self._owner.require_usable()
        self._note_task()
        self._policy.makes_graph = self._policy.makes_graph or torch.is_grad_enabled()

    def _note_task(self) -> None:
        if torch_private.graph_task_id() not in self._tasks:
            self.entries.take_turn(waits=True)
        super()._note_task()

    @entry
    def _backward_ends(self, task: int) -> None:
        super()._backward_ends(task)
        if self._backward_order is not None:
            left = self._backward_order.end(task)
            self._gradients.backward_ends([one.name for one in left], is_whole=not self._tasks)
        if not self._tasks:
            self._policy.backward_ends()
            self._release_unused()

    def _begin_pass(self) -> None:
        if order := self._policy.order.begin_pass():
            # Until now the store expected a pass without gradients, which has no backward.
            self.transfers.expect((self._root, *order))

    def _forget_calls(self) -> None:
        super()._forget_calls()
        self._policy.forget_calls()
        if self._backward_order is not None:
            self._backward_order.forget()

    def _forget_graphs(self) -> None:
        """Forgets what stays for graphs, which are not used any more."""
        self._policy.forget_graphs()
        self._forget_calls()

    # Other uses.

    @contextmanager
    def used(self, units: Sequence[Unit]) -> Iterator[None]:
        """A context in which the current values of `units` are on the device, for a use outside of their forward.

        Raises:
            ReleasedParameterError: if fetching needs all ranks, and this one may be alone.
            BudgetError: if the units do not fit on the device beside what is in use.
        """
        is_beside = self.entries.is_beside()
        is_outside = is_beside or (not self.running.units_here and not self._tasks and not in_backward())
        if is_outside:
            self._require_no_ranks(units)
        self._policy.use_begins(units)
        try:
            call_hidden(self._borrow if is_beside else self._fetch_for_use, units)
            if not is_beside:
                self._note_uses(*(unit for unit in units if not self._policy.is_gathered(unit)))
            yield
        finally:
            self._policy.use_ends(units)

    def _require_no_ranks(self, units: Sequence[Unit]) -> None:
        """Requires that the current values of `units` can be had without other ranks.

        Raises:
            ReleasedParameterError: if they cannot.
        """
        if missing := [unit for unit in units if self._needs_all_ranks(unit)]:
            raise ReleasedParameterError(
                f"current values of {missing[0].title} come from all ranks, and this one may be alone: "
                "use them inside `with optimizer.gathered(module_or_params):`, on every rank, in the thread that trains"
            )

    def _needs_all_ranks(self, unit: Unit) -> bool:
        is_sharded = self._layout.shard_group_size > 1 and not unit.is_here
        return is_sharded or (self._replicas > 1 and self._pending.is_pending(unit))

    def _fetch_for_use(self, units: Sequence[Unit]) -> None:
        tiles = [unit for unit in units if unit.weight is not None]
        for unit in tiles:
            self._policy.order.enter(unit)
        guests = [unit for unit in units if not (unit.is_root or self._policy.is_gathered(unit) or unit.forwards)]
        if guests:
            to_come = (one for unit in tiles for one in self._policy.wanted_with(unit))
            self._release_unused(self._root, *guests, *to_come)
        self._require_room(units)
        for unit in units:
            self._pending.apply(unit.home)
            self._fetch(unit)
        for unit in tiles:  # each is used as a unit is: the next time another one may be
            self._prefetch(unit)
        host = (self._root, *self.running.units_here)[-1]
        if not host.is_root:
            host.guests.update(dict.fromkeys(unit for unit in guests if unit.weight is None))

    def refuse_whole(self, unit: Unit, what: str) -> NoReturn:
        nbytes = sum(flat.numel * flat.dtype.itemsize for flat in unit.flats)
        limit = self.transfers.limit or 0
        missing = self.transfers.missing_bytes((self._root,)) + nbytes
        raise BudgetError(
            f"{unit.name} runs in tiles, and {what} needs all of its {format_bytes(nbytes)} on the device beside other "
            "tensors: give more device_memory, use it in one of the ways that run in tiles, or beside tensors on the "
            "CPU, where it is whole",
            needed=limit + missing,
            available=limit,
            option="device_memory",
        )

    def expect_tiles(self, tiles: Sequence[Unit]) -> None:
        if not in_backward() and not self.entries.is_beside():
            self._policy.order.expect_tiles(tiles)

    def on_any_rank(self, used: Sequence[bool]) -> list[bool]:
        rows = call_hidden(self._ranks.all_gather, torch.tensor(used, dtype=torch.uint8, device="cpu"))
        found: list[bool] = rows.any(0).tolist()
        return found

    def _borrow(self, units: Sequence[Unit]) -> None:
        """Fetches units for a thread beside the one that trains.

        Of what that one has fetched, only what is still on its way may go. The rest may be in use by a pass that is
        between two entries.
        """
        if not self._tasks:  # of a backward in this thread, or yet another one
            for unit in self._policy.borrowed:
                if unit not in units:
                    self._release(unit)
        if self.transfers.missing_bytes(units) > 0:
            for unit in self.transfers.with_memory:
                if unit.is_coming and unit not in units:
                    self._release(unit)
        self._require_room(units)
        for unit in units:
            is_there = unit.is_here
            self._pending.apply(unit.home)
            self.transfers.fetch(unit)
            if not is_there and not unit.is_root:
                self._policy.borrow(unit)

    def _fetch(self, unit: Unit) -> None:
        """Fetches a unit for the thread that trains."""
        self._policy.give_back(unit)
        self.transfers.fetch(unit)

    def fetch_before(self, node: torch.autograd.graph.Node, units: Sequence[Unit], *, is_used: bool = True) -> None:
        at = tuple(units), self._position, is_used
        node.register_prehook(partial(call_alive, weakref.WeakMethod(self._node_runs), at))

    @entry
    def _node_runs(self, at: tuple[Sequence[Unit], int, bool]) -> None:
        """Called when a node that used parameters is about to run in a backward.

        Args:
            at: the units, the position at the end of their use, and whether their values are needed again.
        """
        units, position, is_used = at
        self._autograd_runs()
        for unit in units:
            self._backward_reaches(unit, position)
        if not is_used:
            return
        with self.used(units):
            if any(unit.weight is None for unit in units):  # a tile enters as a unit does
                self._release_all_but((*units, self._root))  # whose own nodes may come next

    @property
    def is_training(self) -> bool:
        return self._policy.order.is_training

    def is_current(self, unit: Unit) -> bool:
        return super().is_current(unit) and unit.is_here

    def keep(self, units: Iterable[Unit]) -> None:
        if not self.entries.is_beside():
            self._policy.keep(units)

    def _require_room(self, units: Sequence[Unit]) -> None:
        """Requires that these units fit on the device beside what is in use.

        Raises:
            BudgetError: if they do not.
        """
        self._make_room(units)
        missing, limit = self.transfers.missing_bytes(units), self.transfers.limit
        if limit is not None and missing > 0:
            why = self._policy.why_more_stays or "one operation uses"
            raise BudgetError(
                f"{why} more streamed parameters together than device_memory leaves room for: "
                f"{format_bytes(limit + missing)}, and there are {format_bytes(limit)}; give more "
                "device_memory, or use them one after the other",
                needed=limit + missing,
                available=limit,
                option="device_memory",
            )

    @contextmanager
    def gathered(self, units: Sequence[Unit], numbers: Sequence[int], *, writable: bool) -> Iterator[None]:
        with ExitStack() as stack:  # each is let go of, also if another one fails
            self._gather(units, stack)
            if not writable:
                yield
                return
            for unit in units:
                self.running.enter(unit)
                stack.callback(self.running.leave, unit)
            yield
            self._find_silent_writes(units, numbers)

    @entry
    def _gather(self, units: Sequence[Unit], stack: ExitStack) -> None:
        is_beside = self.entries.is_beside()
        if is_beside:
            self._require_no_ranks(units)
            self._require_room(units)
        else:
            self._make_room(units)
        for unit in units:
            self._pending.apply(unit)
        for unit in units:
            self._policy.gather(unit)
            stack.callback(self._let_go, unit)
            self._fetch(unit)
            self.store_outside_writes()  # what was written before counts as written outside of `gathered`
        # A use inside counts as of now, and fetches and releases nothing: it may be on one rank alone.
        if not is_beside:
            self._note_uses(*units)

    @entry
    def _find_silent_writes(self, units: Sequence[Unit], numbers: Sequence[int]) -> None:
        for unit in units:
            self._pending.apply(unit)
        self.transfers.find_silent_writes(numbers)

    @entry
    def _let_go(self, unit: Unit) -> None:
        self._policy.let_go(unit)
        self.store_outside_writes()
        self.leave(unit)

    @entry
    def generate(self, choose: Callable[[], tuple[Collection[str], int]], stack: ExitStack) -> None:
        if self._parameters.is_parked:
            return
        chosen: tuple[Collection[str], int] = ((), 0)
        if not self._generations:
            chosen = choose()
            self._release_unused()  # what was spare has another size than what comes now
        self._begin_generation(*chosen, stack)

    @property
    def kept(self) -> tuple[int, int]:
        return self._kept

    @uninterrupted
    def _begin_generation(self, names: Collection[str], nbytes: int, stack: ExitStack) -> None:
        stack.callback(self._generation_ends)
        self._generations += 1
        if self._generations > 1:
            return
        self._began_in_pass = bool(self.running.units_here)
        self._planned = {unit: unit.stays for unit in self._units.values()}
        for unit in self._planned:
            unit.stays = unit.is_root or unit.name in names
        kept = [unit.nbytes for unit in self.transfers.units if unit.stays]
        self._kept = len(kept), sum(kept)
        self._parameters.widen(nbytes)

    @entry
    def _generation_ends(self) -> None:
        if not self._end_generation() or self.entries.is_passing():
            return
        if not self._began_in_pass and not in_backward():
            self._forget_calls()  # that began inside and have not ended
        if not self._tasks:  # else the next unit that is entered releases what does not stay
            self._release_unused()

    @uninterrupted
    def _end_generation(self) -> bool:
        self._generations = max(self._generations - 1, 0)
        return not self._generations and self._plan_again()

    @uninterrupted
    def _plan_again(self) -> bool:
        """Makes those units stay that stay outside of `generate`.

        Returns:
            Whether it was under way.
        """
        if not self._planned:
            return False
        for unit, stays in self._planned.items():
            unit.stays = stays
        self._planned = {}
        self._parameters.widen(None)
        return True

    @entry
    def visit(self, units: Iterable[Unit]) -> None:
        if self.entries.is_beside():
            return
        for unit in units:
            self._pending.apply(unit)
        if visited := [unit for unit in units if not unit.is_root and not self._policy.is_gathered(unit)]:
            self._release_unused(self._root, *visited)
        for unit in units:
            self._fetch(unit)

    @entry
    def leave(self, unit: Unit) -> None:
        if not self._tasks and self._policy.unused([unit], ()):
            self._release(unit)

    # Fetching and releasing.

    def _make_room(self, units: Sequence[Unit]) -> None:
        """Makes units that stay leave, if these have no room otherwise. Only the thread that trains may.

        Others do not know what a pass that is between two entries uses.
        """
        if not self.entries.is_beside() and self.transfers.missing_bytes(units) > 0:
            self._release_all_but(units)

    def _release(self, unit: Unit) -> None:
        if unit.is_here:
            self._parameters.return_repointed(unit.streamed)
            if self._parameters.find_outside_writes(unit.streamed):
                self.store_outside_writes()
        self._policy.give_back(unit)
        self.transfers.release(unit)

    # What others wrote.

    def store_outside_writes(self, within: Collection[int] | None = None) -> None:
        numbers = self._parameters.find_outside_writes(within)
        if shared := [number for number in numbers if self._parameters.held[number].is_shared]:
            self._refuse_writes(shared)
        flats = sorted({self._parameters.flat_of(number) for number in numbers})
        for flat in flats:
            self._pending.apply(self._units[self._layout.flats[flat].unit])  # refuses what an update would overwrite
        held = [self._parameters.held[number] for number in numbers]
        merged = next((one for one in held if not one.was_written and one.is_under_adapter), None)
        for one in held:
            one.note_write(self._owner.step())
        if self._masters.takes_writes_late:
            self._masters.note_stored_writes(numbers)
        else:
            self._masters.take_outside_writes(self._owner.step(), within)
        self._parameters.forget_writes(numbers)
        for flat in flats:
            if self._parameters.streams(self._layout.flats[flat].params[0]):
                self.transfers.store_flat(flat)
        if merged is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{merged.spec.name} is frozen, and was written to, as merge_adapter() of peft does: every commit "
                "carries it from now on, and in 16 bits unmerge_adapter() does not bring its bits back; "
                "optimizer.weights(merged=True) hands merged weights over, and leaves it as it is",
                stacklevel=2,
            )

    def _refuse_writes(self, numbers: Sequence[int]) -> None:
        """Takes back what somebody wrote to parameters of a kept base.

        Raises:
            ConfigError: always.
        """
        for flat in sorted({self._parameters.flat_of(number) for number in numbers}):
            self.transfers.take_back_writes(flat)
        self._parameters.forget_writes(numbers)
        raise ConfigError(
            f"{self._parameters.held[numbers[0]].spec.name} was written to, and lies in a kept base, which other runs "
            "may read: it has its values again. For a base that may be written to, give from_pretrained base=False, or "
            "Quantised no settings"
        )

    def take_outside_writes(self, numbers: Collection[int] | None = None) -> None:
        if numbers is not None:
            flats = {self._parameters.flat_of(number) for number in numbers}
            numbers = [number for flat in sorted(flats) for number in self._layout.flats[flat].params]
        self._parameters.return_repointed(numbers)
        self.store_outside_writes(numbers)
        self._masters.take_outside_writes(self._owner.step(), numbers)
        self.drain()  # a commit follows, for which nothing may be leased

    # Steps, and the end.

    def step_begins(self) -> None:
        self._forget_graphs()
        if self._backward_order is not None:
            self._backward_order.begin_anew()
        self._begin_pass()
        unchanged = [unit for unit in self._units.values() if unit.stays and unit.is_frozen]
        self._release_all_but(unchanged)
        self._parameters.arrange(unchanged)
        self.transfers.step_begins()
        self.store_outside_writes()  # to what `gathered` holds: the step is to see it
        self.drain()
        self.transfers.expect_same_order()

    def move(self, device: torch.device) -> None:
        if self._policy.holds_any or self._planned:
            within = "gathered(...)" if self._policy.holds_any else "generating()"
            raise ConfigError(f"the model is moved to {device} inside `with optimizer.{within}`: leave that first")
        self._forget_graphs()
        self._release_all_but()
        self.drain()
        self._parameters.move(device)

    def fetch_all(self) -> None:
        self._forget_graphs()
        self._release_all_but()
        self._parameters.free_spares()  # what stays is to take no more than it needs
        for unit in self.transfers.units:
            if unit.weight is None:
                self.transfers.fetch(unit)

    def drain(self) -> None:
        self.transfers.drain()

    def abandon(self) -> None:
        self._forget_calls()
        self.transfers.abandon()

    def close(self) -> None:
        self._plan_again()
        self.transfers.close()
