"""A held model: its parameters are taken, it is hooked, and its units are fetched and updated when they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload.build import Parts
from offload.interrupts import uninterrupted
from offload.model.activations import Activations
from offload.model.dense import flattened
from offload.model.fetch import HeldUnits, StreamedUnits
from offload.model.flat_param import CPU
from offload.model.gradient import Answers
from offload.model.guard import Guards
from offload.model.hooks import Hooks
from offload.model.inner import Inner, bring_along, inner_tensors
from offload.model.meta_init import KeptValues, Source, materialise
from offload.model.original import Original
from offload.model.partition import Partitions
from offload.model.pending import PendingUpdates
from offload.model.policy import Ahead
from offload.model.state_dict import Access
from offload.model.torch_helpers import call_hidden
from offload.model.transfer import StreamedStores, TransferLimits, UnitTransfers
from offload.model.units import compute_dtypes, dtype_of, move_buffers, move_param, units_of
from offload.model.weights import Weights
from offload.model.written_frozen import WrittenFrozen, digest_of, digests_of, require_same
from offload.native.memory import return_freed
from offload.optim.method import MethodCall
from offload.planner.placement import Placement, tiers_of
from offload.ranks.agreement import TOGETHER_BYTES, broadcast_from_first
from offload.ranks.tensor_parallel import shard_dim_of
from offload.run import Owner
from offload.sizes import MIB
from offload.storage.slot_map import ChunkKind
from offload.tiers import DEVICE

FREED_BYTES = 16 * MIB
"""What may lie free in the heap of the values that were taken, before it is given back."""


class Values(NamedTuple):
    """Where the values of a model come from when it is taken.

    Attributes:
        source: gives values to parameters on the meta device.
        check: called before values travel to other ranks. It raises if one of them has failed.
        committed: the names of the parameters whose states come from a commit, so that masters are not made from the
            model's values.
        frozen: what that commit says of frozen parameters; the state of `WrittenFrozen`.
    """

    source: Source
    check: Callable[[], None]
    committed: Collection[str] = ()
    frozen: object = None


def _left_free(nbytes: int) -> int:
    """Gives freed memory back to the system, if `nbytes` that were freed lie in the heap and are at least FREED_BYTES.

    Returns:
        How many bytes lie there afterwards.
    """
    if nbytes < FREED_BYTES:
        return nbytes
    return_freed()
    return 0


class HeldModel:
    """One optimizer's hold on its model.

    Args:
        model: the model.
        parts: what the run is made of.
        placement: what is where.
        values: where the model's values come from.
        owner: the optimizer.
        original: what the model was, and what is needed to give it back.
        undo: gets what lets go of the model.

    Attributes:
        pending: updates that are not in the model yet.
        units: fetches and updates units when they are used.
        answers: makes gradients answer as gradients.
        access: lets users read and write parameters.
        weights: hands parameters over.
        initial_bytes: what was written to swap files before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        placement: Placement,
        values: Values,
        owner: Owner,
        original: Original,
        undo: ExitStack,
    ) -> None:
        self._model = model
        self._parts = parts
        self._owner = owner
        self._original = original
        self._hooks: Hooks | None = None
        self._activations: Activations | None = None
        self._guards: Guards | None = None
        run, choice = parts.run, placement.choice
        self._run, self._choice = run, choice
        parameters = parts.parameters
        transfers = self._new_transfers(placement, owner)
        self.pending = PendingUpdates(run, parts.step, parameters, transfers, owner)
        self.units = HeldUnits(run, parameters, self.pending, parts.masters, owner)
        if parameters.streams_any:
            self.units = StreamedUnits(run, parameters, transfers, self.pending, parts.masters, owner, parts.gradients)
        undo.callback(self.remove)
        self._take_model(values, transfers)
        transfers.expect(())  # training fetches in another order than that in which the model was taken
        self.initial_bytes = run.timeline.counted("nvme_written_bytes")
        parameters.remember(model)
        self.answers = Answers(run.layout, parameters, parts.gradients, parts.scale, self.pending, self.units, owner)
        names = units_of(model, choice.model.units)
        names |= {one.param: one.spec.unit for one in parameters.held}
        unit_of = {param: parameters.units[name] for param, name in names.items()}
        self.access = Access(parameters, unit_of, self.units, placement.budget_bytes, owner)
        self.weights = Weights(model, parameters, unit_of, self.access, owner)
        self._hooks = Hooks(model, choice.model, parameters, unit_of, self.units, self.access, self.answers)
        if choice.activations.tier is not None:
            partitions = Partitions(run.comm, parts.activations) if choice.activations.partitioned else None
            self._activations = Activations(model, choice.activations, self.units, parts.activations, partitions)
        self._guards = Guards(parameters, self.units, self.moves)
        parameters.guard_with(self._guards.class_for)
        numbers = ((alias.tensor, parameters.number_of(alias.param)) for alias in original.aliases)
        self._guards.guard_aliases({tensor: number for tensor, number in numbers if number is not None})
        # An update that waits for nothing but kernels, which write into the model, is applied inside `step()`. Measured
        # 5 to 24 % faster than between layers; from a disk it would cost 16 to 29 %.
        self._applies_in_step = run.memory.copier.direct and not placement.uses_disk
        self._launches_in_step = run.layout.ranks > 1 and parts.params.in_model

    def step_begins(self) -> None:
        """Applies all of the last step, before a step begins."""
        if self._activations is not None:
            self._activations.step_begins()
        self.pending.apply_all()
        self.units.step_begins()

    def step_ends(self) -> None:
        """Applies what applying later would not hide, and sends what other ranks need."""
        if self._launches_in_step:
            self.pending.launch()
        elif self._applies_in_step:
            self.pending.apply_all()

    @property
    def peak_activation_bytes(self) -> int:
        """The most bytes that activations took at once where they wait for their backward."""
        return 0 if self._activations is None else self._activations.peak_bytes

    def take_outside_writes(self, numbers: Collection[int] | None = None) -> None:
        """Takes what others wrote to parameters into the masters, and into the store of streamed parameters.

        Args:
            numbers: the trained parameters to look at; None: all.
        """
        self.units.take_outside_writes(numbers)

    def run(self, call: MethodCall, step: int) -> None:
        """Runs a method of the optimizers over masters and states, and gives the model the new values.

        Nothing may be under way. Over several ranks all have to call it.

        Args:
            call: the method.
            step: the last step.
        """
        call_hidden(self._run_method, call, step)

    def _run_method(self, call: MethodCall, step: int) -> None:
        self._parts.masters.run(call, step)
        self._parts.new_params.all_gather(call.flats, step)
        for flat in call.flats:
            params = self._run.layout.flats[flat].params
            self.pending.replaced(flat, [number for number in params if number in call.keys])

    def synchronize(self) -> None:
        """Waits until nothing is under way on any tier."""
        self.pending.apply_all()
        self.units.drain()
        self._parts.new_params.wait_for_transfers()
        self._parts.gradients.drain()
        for store in self._parts.stores.all:
            store.drain()

    def abandon(self) -> None:
        """Drops all that is under way, failed or not, because the states of a commit are about to come back."""
        self._parts.step.abandon()
        self._parts.gradients.reset()
        self.units.abandon()

    def moves(self, module: nn.Module, device: torch.device) -> bool:
        """Moves the held model, if `module` has it, to the CPU, where it is parked, or home.

        Over several ranks, all have to move it.

        Args:
            module: what is moved.
            device: where it is moved.

        Returns:
            Whether the held model is moved, and so is there now.
        """
        parameters, memory = self._parts.parameters, self._run.memory.device
        if device not in (CPU, parameters.home) or not any(one is self._model for one in module.modules()):
            return False
        self._run.entries.wait_for_turn("the model is moved")
        if device != parameters.device:
            self._owner.require_usable()
            self.pending.apply_all()
            copied = parameters.resident_bytes
            with self._run.timeline.span("park_s"):
                if parameters.is_parked:
                    copied += 0 if memory is None else memory.bring_back()
                else:
                    self.answers.take_changes()
                    self._parts.gradients.drain()
                self.units.take_outside_writes()
                self._move(device)
                if memory is not None and parameters.is_parked:
                    copied += memory.park()
            self._run.timeline.count("parked_bytes", copied)
            if self._parts.activations is not None:
                self._parts.activations.drop_spare()
        return True

    @uninterrupted
    def _move(self, device: torch.device) -> None:
        self.units.move(device)
        self._parts.step.move()
        self._parts.params.move()
        self.answers.move()
        assert self._hooks is not None
        self._hooks.hook_nodes()

    def keep_parameters(self, limit: int | None) -> None:
        """Fetches streamed parameters for good, if they take at most `limit` bytes of the device; None: any number.

        Parameters that ranks share stay released, since another rank may have less room.
        """
        parameters = self._parts.parameters
        if not parameters.streams_any or parameters.layout.shard_group_size > 1:
            return
        if limit is None or sum(flat.numel() * flat.element_size() for flat in parameters.flats) <= limit:
            self.units.fetch_all()
            parameters.stop_guarding()
            parameters.become_resident()

    def written_frozen(self, budget_bytes: int) -> WrittenFrozen:
        """What a commit carries of frozen parameters.

        Args:
            budget_bytes: how much RAM copies may take.
        """
        return WrittenFrozen(self._model, self._parts.parameters.held, self.units, self.access, budget_bytes)

    @property
    def has_cast_inputs(self) -> bool:
        """Whether the model was called with inputs of another dtype than it computes with."""
        return self._hooks is not None and self._hooks.has_cast_inputs

    def remove(self) -> None:
        """Lets go of the model when all that is under way has ended, also if that fails."""
        with ExitStack() as last_first:
            last_first.callback(self._parts.params.let_go)
            if self._guards is not None:
                last_first.callback(self._guards.stop, are_here=not self._parts.parameters.streams_any)
            if self._hooks is not None:
                last_first.callback(self._hooks.remove)
            if self._activations is not None:
                last_first.callback(self._activations.remove)
            last_first.callback(self._parts.parameters.free_spares)
            last_first.callback(self.units.close)

    def _new_transfers(self, placement: Placement, owner: Owner) -> UnitTransfers:
        """What moves the parameters of units that stream."""
        stores, parameters = self._parts.stores, self._parts.parameters
        layout, limit = parameters.layout, placement.device_budget_bytes
        firsts = {ChunkKind.PARAMS: 0, ChunkKind.FROZEN: len(layout.trained.param_chunks)}
        streamed = {kind: first for kind, first in firsts.items() if tiers_of(placement.choice)[kind] > DEVICE}
        buffers = [placement.pools[kind].in_flight for kind in streamed]
        leases = [max(count - 1, 1) for count in buffers if count]
        transfers = UnitTransfers(
            self._run,
            parameters,
            StreamedStores([(stores[kind], first) for kind, first in streamed.items()], self._parts.masters.late),
            owner,
            self._parts.gathers,
            TransferLimits(
                min(leases, default=len(layout.param_chunks)),
                Ahead(self._choice.params.prefetch_units, self._choice.ahead_bytes),
                None if limit is None else limit - placement.device_bytes + placement.streamed_bytes,
            ),
        )
        self._parts.params.chunk_updated = transfers.chunk_updated
        return transfers

    # Taking the model.

    def _take_model(self, values: Values, transfers: UnitTransfers) -> None:
        """Takes the model, a few flat parameters after the others.

        Makes the masters, casts the held parameters, and moves them to the device to train on.
        """
        parts, layout = self._parts, self._parts.parameters.layout
        moves = parts.parameters.params[0].device != parts.parameters.device
        base, kept, source = parts.base, values.source.kept(), values.source
        if base is not None:
            assert kept is not None
            source = KeptValues(source, kept.names, base, frozenset(base.frozen))
        owned: set[Tensor] = set()
        for group in self._complete_groups(source, owned):
            if not layout.flats[group[0]].is_frozen:
                require_same(digests_of(parts.parameters.held), values.frozen)  # now, when nothing is lost yet
            dense: dict[int, list[int]] = {}
            sent: list[tuple[Tensor, int | None]] = []
            for flat in group:
                for number in layout.flats[flat].params:
                    self._original.changes(parts.parameters.params[number])
                dense[flat] = parts.parameters.make_dense(flat)
                if self._has_values(flat, values):
                    specs, locals_ = layout.specs, parts.parameters.locals
                    sent += [
                        (flattened(locals_[number]), specs[number].shard_dim) for number in layout.flats[flat].params
                    ]
            self._broadcast(sent, values.check)
            del sent
            for flat in group:
                has_values = self._has_values(flat, values)
                self._take_flat(flat, [] if moves else dense[flat], owned, transfers, has_values=has_values)
        for one in parts.parameters.held[parts.parameters.trained :]:
            one.is_shared = base is not None
        if not values.committed:
            parts.stores.states.expect(chunk.index for chunk in layout.chunks)
            for store in parts.stores.all:
                store.drain()
        if moves:
            move_buffers(self._model, parts.parameters.device)

    def _take_flat(
        self, flat: int, left: Sequence[int], owned: Container[Tensor], transfers: UnitTransfers, *, has_values: bool
    ) -> None:
        """Makes the masters of a flat parameter, and takes its parameters there.

        Args:
            flat: which one.
            left: those of its parameters that leave memory of their own, on the device to train on.
            owned: the parameters whose memory was made here.
            transfers: takes what streams.
            has_values: whether the model has the values.
        """
        parts, layout = self._parts, self._parts.parameters.layout
        info, base = layout.flats[flat], parts.base
        if has_values:
            parts.masters.make_flat(flat)
        parts.parameters.flatten(flat, with_values=has_values, owned=owned)
        streams = parts.parameters.streams(info.params[0])
        if not streams:
            for number in left:
                master = number if has_values and layout.ranks == 1 else None
                self._original.give_up(parts.parameters.params[number], master=master)
        for alias in self._original.aliases:
            if (number_of := parts.parameters.number_of(alias.param)) in info.params:
                assert number_of is not None
                alias.follow(parts.parameters.data_of(number_of))
        if info.is_frozen and (base is not None or self._choice.commits.every is not None):
            for number in info.params:
                dtype = layout.specs[number].dtype
                named = number - parts.parameters.trained
                found = None if base is None else base.digest_of(base.frozen[named], dtype)
                parts.parameters.held[number].digest = found or digest_of(parts.parameters.locals[number])
        if streams and has_values:
            transfers.store_and_free(flat)
        elif streams:
            parts.parameters.free_flat(flat)

    def take_others(self, check: Callable[[], None]) -> None:
        """Moves parameters that are not held to the device to train on, and casts floating ones to their compute dtype.

        It is the last step of taking the model. What is cast on its own device has no copy to go back to, so nothing
        may fail after it. The largest of these is cast first, so that the others find the memory that it leaves.

        Args:
            check: called before values travel. It raises if another rank has failed.
        """
        left, device = self._others(), self._parts.parameters.device
        for one, dtype in left:
            if one.tensor.device != device and not one.is_table:
                self._move_other(one, dtype)
        bring_along(inner_tensors(self._model.parameters()))
        casts = [(one, dtype) for one, dtype in left if one.tensor.dtype is not dtype]
        self._cast_others(sorted(casts, key=lambda pair: -pair[0].tensor.numel()))
        aliased = {alias.tensor for alias in self._original.aliases}
        buffers = [(buffer, None) for buffer in self._model.buffers() if buffer not in aliased]
        others = ((one.tensor, shard_dim_of(one.param)) for one, _ in self._others())
        self._broadcast(chain(others, buffers), check)

    @uninterrupted
    def _cast_others(self, casts: Iterable[tuple[Inner, torch.dtype]]) -> None:
        for one, dtype in casts:
            self._move_other(one, dtype)
            self._original.give_up(one.used, master=None)
        return_freed()

    def _others(self) -> list[tuple[Inner, torch.dtype]]:
        """What is not held of the parameters, and the dtype that each inner tensor has on the device."""
        held, choice = set(self._parts.parameters.params), self._choice.model
        dtypes = compute_dtypes(self._model, choice.keep_fp32, choice.compute_dtype)
        inners = inner_tensors(self._model.parameters())
        return [(one, dtype_of(one, dtypes[one.param])) for one in inners if one.used not in held]

    def _move_other(self, one: Inner, dtype: torch.dtype) -> None:
        self._original.changes(one.used)
        move_param(one, self._parts.parameters.device, dtype)
        for alias in self._original.aliases:
            if alias.param is one.used:
                alias.follow(one.tensor.data)

    def _broadcast(self, tensors: Iterable[tuple[Tensor, int | None]], check: Callable[[], None]) -> None:
        """Gives tensors the values of the first data-parallel rank.

        A tensor that is not cut along a dimension is the same in every slice, so it gets the values of the first slice.

        Args:
            tensors: each with the dimension along which it is cut, or None.
            check: called before they travel, if there are any.
        """
        comm, tensors = self._run.comm, list(tensors)
        if not tensors:
            return
        check()
        broadcast_from_first(comm.tensor_parallel, [tensor for tensor, shard_dim in tensors if shard_dim is None])
        broadcast_from_first(comm, [tensor for tensor, _ in tensors])

    def _has_values(self, flat: int, values: Values) -> bool:
        """Whether the model has the values of a flat parameter. Those of the others are in a base or a commit."""
        info, specs = self._parts.parameters.layout.flats[flat], self._parts.parameters.layout.specs
        if info.is_frozen:
            return self._parts.base is None
        return not all(specs[number].name in values.committed for number in info.params)

    def _complete_groups(self, source: Source, owned: set[Tensor]) -> Iterator[list[int]]:
        """Flat parameters as `_complete_flats` yields them. Over ranks small ones, whose values travel, are together.

        Those of a group are all frozen or all trained.
        """
        flats, params = self._parts.parameters.layout.flats, self._parts.parameters.params
        comm = self._run.comm
        # Slices of a model have parts of other sizes, and would make other groups.
        most = TOGETHER_BYTES if comm.size > 1 and comm.everyone is comm else 0
        group: list[int] = []
        filled = 0
        for flat in self._complete_flats(source, owned):
            nbytes = sum(params[number].nbytes for number in flats[flat].params)
            if group and (filled + nbytes > most or flats[flat].is_frozen != flats[group[0]].is_frozen):
                yield group
                group, filled = [], 0
            group.append(flat)
            filled += nbytes
            if filled >= most:
                yield group
                group, filled = [], 0
        if group:
            yield group

    def _complete_flats(self, source: Source, owned: set[Tensor]) -> Iterator[int]:
        """Gives values to parameters on the meta device, and yields each flat parameter when all of it has values.

        Memory that was freed meanwhile goes back to the system. Parameters that were on the meta device and are not
        held are cast as they get values, since there are none to go back to.

        Args:
            source: of the values.
            owned: gets the parameters whose memory was made here, and belongs to nobody else.
        """
        layout, params = self._parts.parameters.layout, self._parts.parameters.params
        left = sorted((flat.index for flat in layout.flats), key=lambda flat: not layout.flats[flat].is_frozen)
        unheld: dict[Tensor, list[tuple[Inner, torch.dtype]]] = {}
        for one, dtype in self._others():
            if not one.is_table:
                unheld.setdefault(one.param, []).append((one, dtype))
        freed = 0
        for module, fresh in chain([(None, ())], materialise(self._model, source)):
            owned.update(fresh)
            for flat in list(left):
                if not any(params[number].is_meta for number in layout.flats[flat].params):
                    left.remove(flat)
                    nbytes = sum(params[number].nbytes for number in layout.flats[flat].params)
                    yield flat
                    freed = _left_free(freed + nbytes)
            if module is not None:
                for param in module.parameters(recurse=False):
                    for one, dtype in unheld.pop(param, ()) if not param.is_meta else ():
                        if self._original.was_meta(one.used):
                            nbytes = one.tensor.nbytes
                            self._move_other(one, dtype)
                            freed = _left_free(freed + nbytes)
