"""A held model: its parameters are taken, it is hooked, and its units are fetched and updated when they are used."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import nn

from offload.build import Parts
from offload.dist.agreement import broadcast_from_first
from offload.errors import OffloadError
from offload.model.fetch import HeldUnits, StreamedUnits
from offload.model.flat_param import flattened
from offload.model.gradient import Answers
from offload.model.guard import Guards
from offload.model.hooks import Hooks
from offload.model.meta_init import Source, materialise
from offload.model.pending import PendingUpdates
from offload.model.state_dict import Access
from offload.model.transfer import UnitTransfers
from offload.model.units import cast_untrained, compute_dtypes, units_of
from offload.planner.placement import Placement
from offload.run import Owner


class HeldModel:
    """One optimizer's hold on its model.

    Args: source: gives values to what is on the meta device; resumes: masters are not made from the model's values,
    because the states come from a commit.
    Attributes: pending, units, answers, access: parts that the optimizer calls too; initial_bytes: what was written to
    swap files before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        placement: Placement,
        source: Source,
        owner: Owner,
        *,
        resumes: bool,
    ) -> None:
        self._model = model
        self._parts = parts
        run = self._run = parts.run
        self._is_resident = parts.streamed is None
        parameters = parts.parameters
        transfers = self._new_transfers(placement, owner)
        self.pending = PendingUpdates(run, parts.step, parameters, transfers, owner)
        if transfers is None:
            self.units = HeldUnits(run, parameters, self.pending, parts.masters, owner)
        else:
            self.units = StreamedUnits(run, parameters, transfers, self.pending, parts.masters, owner)
        self._take_model(source, transfers, resumes=resumes)
        self.initial_bytes = run.timeline.counted("nvme_written_bytes")
        parameters.remember(model)
        self.answers = Answers(run.layout, parameters, parts.gradients, self.pending, owner)
        names = units_of(model, run.config.units)
        names |= {param: spec.unit for param, spec in zip(parameters.params, run.layout.specs, strict=True)}
        self.access = Access(parameters, names, self.units, placement.budget_bytes)
        self._hooks = Hooks(model, run, parameters, names, self.units, self.access, self.answers)
        self._guards = Guards(run.layout, parameters, self.units)
        parameters.guard_with(self._guards.class_for)
        # An update that waits for nothing but kernels, which write into the model, is applied inside `step()`. Measured
        # 5 to 24 % faster than between layers; from a disk it would cost 16 to 29 %.
        uses_disk = placement.streamed_chunks or "nvme" in (run.config.param_tier, run.config.grad_tier)
        self._applies_in_step = run.memory.copier.direct and not uses_disk
        self._launches_in_step = run.layout.ranks > 1 and self._is_resident

    def step_begins(self) -> None:
        """Applies all of the last step."""
        self.pending.apply_all()
        self.units.step_begins()

    def step_ends(self) -> None:
        """Applies what would not be hidden by being applied later, and sends what other ranks need."""
        if self._launches_in_step:
            self.pending.launch()
        elif self._applies_in_step:
            self.pending.apply_all()

    def take_outside_writes(self) -> None:
        """Takes over what others wrote to parameters, into the masters and into the store of streamed parameters."""
        self.units.take_outside_writes()

    def synchronize(self) -> None:
        """Waits until nothing is under way on any tier."""
        self.pending.apply_all()
        self.units.settle()
        self._parts.new_params.settle()
        self._parts.gradients.drain()
        for store in self._parts.stores.all:
            store.drain()

    def abandon(self) -> None:
        """Drops all that is under way, whether it failed or not: the states of a commit are about to come back."""
        self._parts.step.abandon()
        self._parts.gradients.reset()
        self.units.abandon()

    def keep_parameters(self, limit: int | None) -> None:
        """Fetches streamed parameters for good, if they take at most `limit` bytes of the device (None: any number).
        Parameters that ranks share stay released: another rank may have less room."""
        if not isinstance(self.units, StreamedUnits) or self._run.layout.shard_group_size > 1:
            return
        parameters = self._parts.parameters
        if limit is None or sum(flat.numel() * flat.element_size() for flat in parameters.flats) <= limit:
            self.units.fetch_all()
            parameters.stop_guarding()
            parameters.become_resident()
            self._is_resident = True

    def remove(self) -> None:
        """Lets go of the model, after what is under way has ended."""
        self.units.close()
        self._parts.parameters.free_spares()
        self._hooks.remove()
        self._guards.stop(are_here=self._is_resident)

    def _new_transfers(self, placement: Placement, owner: Owner) -> UnitTransfers | None:
        """None where all parameters are resident."""
        store, pool, limit = self._parts.streamed, placement.params, placement.device_budget_bytes
        if store is None or pool is None:
            return None
        transfers = UnitTransfers(
            self._run,
            self._parts.parameters,
            store,
            owner,
            leases=max(pool.in_flight - 1, 1) if pool.in_flight else len(self._run.layout.param_chunks),
            limit=None if limit is None else limit - placement.resident_bytes - placement.slab_bytes,
        )
        self._parts.new_params.chunk_updated = transfers.chunk_updated
        return transfers

    # Taking the model.

    def _take_model(self, source: Source, transfers: UnitTransfers | None, *, resumes: bool) -> None:
        """Makes the masters, casts the model. A disk that fails here leaves the model partly cast, and the error says
        so."""
        parts, config, layout = self._parts, self._run.config, self._run.layout
        dtypes = compute_dtypes(self._model, config.keep_fp32, config.compute_dtype)
        try:
            for flat in self._complete_flats(source):
                parts.parameters.make_dense(flat)
                if resumes:  # their values are still to come
                    parts.parameters.attach(flat, with_values=False)
                    if transfers is not None:
                        parts.parameters.free(flat)
                    continue
                params = parts.parameters.params
                broadcast_from_first(parts.run.comm, (flattened(params[n]) for n in layout.flats[flat].params))
                parts.masters.take_flat(flat)
                if transfers is not None:
                    transfers.store_and_free(flat)
            if not resumes:
                parts.stores.states.expect(chunk.index for chunk in layout.chunks)
                for store in parts.stores.all:
                    store.drain()
        except OffloadError as error:
            error.add_note("some of the model's parameters are already in compute_dtype: build the model again")
            raise
        trained = parts.parameters.index
        cast_untrained(self._model, trained, dtypes)
        others = chain(self._model.parameters(), self._model.buffers())
        broadcast_from_first(parts.run.comm, (tensor for tensor in others if tensor not in trained))

    def _complete_flats(self, source: Source) -> Iterator[int]:
        """The flat parameters whose parameters all have values. Those on the meta device get them on the way."""
        left = [flat.index for flat in self._run.layout.flats]
        params = self._parts.parameters.params
        for _ in chain([None], materialise(self._model, source)):
            for flat in list(left):
                if not any(params[number].is_meta for number in self._run.layout.flats[flat].params):
                    left.remove(flat)
                    yield flat
