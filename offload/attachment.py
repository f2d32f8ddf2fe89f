"""What stands between a model and the parts: taking its parameters, hooking it, landing, streaming, access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from offload.config import Config
from offload.dist.agreement import broadcast_from_first
from offload.dist.communicator import Work
from offload.errors import ConfigError, OffloadError
from offload.layout import Layout
from offload.model.fetch import Streaming
from offload.model.flat_param import cast_untrained, line_of
from offload.model.gathering import Gathering
from offload.model.gradient import Answers
from offload.model.guard import Guards
from offload.model.hiding import unseen
from offload.model.hooks import Hooks
from offload.model.meta_init import Source, materialise
from offload.model.pending import Landing
from offload.model.running import Running
from offload.model.state_dict import Access
from offload.model.tiling import Tiling
from offload.model.units import ROOT, compute_dtypes, kept_modules, require_unwrapped, units_of
from offload.model.where import Where
from offload.parts import Parts
from offload.planner.placement import Placement


class Attachment:
    """One optimizer's hold on its model.

    Args: source: of the values of what is on the meta device; resumes: the states are not taken from the model, but
    come from a commit; step: says the number of the last step; usable: raises if the optimizer cannot go on; failed:
    called with what cut a landing off; collects: waits for all gradients; unscales: called with a GradScaler's
    found_inf and inverse scale.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        config: Config,
        layout: Layout,
        placement: Placement,
        source: Source,
        *,
        resumes: bool,
        step: Callable[[], int],
        usable: Callable[[], None],
        failed: Callable[[BaseException], None],
        collects: Callable[[], list[int]],
        unscales: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._model = model
        self._parts = parts
        self._are_here = parts.streamed is None
        self._step = step
        self._layout = layout
        run = (layout, parts.step, parts.parameters, parts.run.timeline)
        self.landing = Landing(*run, usable, failed, self._landed)
        self._running = Running(layout, parts.parameters)
        self.streaming = self._new_streaming(config, placement, usable)
        self._finishes = _finishes(config, placement, direct=parts.run.memory.copier.direct)
        self._launches = layout.ranks > 1 and self.streaming is None
        self._take_model(config, layout, source, resumes=resumes)
        units = units_of(model, config.units)
        units |= {param: spec.unit for param, spec in zip(parts.parameters.params, layout.specs, strict=True)}
        self.access = Access(
            parts.parameters, units, self.landing, self.streaming, self._running, placement.budget_bytes
        )
        parts.parameters.note_all_of(model)
        names = [spec.name for spec in layout.specs]
        self.answers = Answers(
            parts.parameters, names, parts.gradients, self.landing, collects, unscales, ranks=layout.ranks
        )
        self.hooks = Hooks(
            model,
            parts.parameters,
            layout.specs,
            config.compute_dtype,
            kept_modules(model, config.keep_fp32),
            config.units,
            self._running,
            self.landing,
            self.streaming,
            self.access,
            self.answers,
            self._model_begins,
            parts.masters.before_loading,
            casts=config.cast_forward_inputs,
        )
        tiling = self._new_tiling()
        self.guards = Guards(layout, parts.parameters, self._running, self.streaming, tiling, self.landing.unit)
        parts.parameters.guard_with(self.guards.class_for)

    def step_begins(self) -> None:
        """Everything of the last step is applied, and is where it belongs."""
        self.landing.everything()
        if self.streaming is not None:
            self.streaming.step_begins()
        else:
            self._running.reset()
            self._parts.parameters.take_back()

    def step_ends(self) -> None:
        """Applies at once what would not be hidden by being applied later, and sends what other ranks need."""
        if self._launches:
            self.landing.launch()
        elif self._finishes:
            self.landing.everything()

    def take_outside_writes(self) -> None:
        """Takes over what was written into parameters from outside, into the masters and into streamed copies."""
        if self.streaming is None:
            self._parts.parameters.take_back()
            self._parts.masters.take_outside_writes(self._step())
            return
        self._write_back()
        self._parts.masters.take_outside_writes(self._step())

    def _write_back(self) -> None:
        """Takes over what was written to streamed parameters, which are here, into their store."""
        assert self.streaming is not None
        parameters, masters = self._parts.parameters, self._parts.masters
        numbers = parameters.written_outside()
        flats = sorted({parameters.flat_of(number) for number in numbers})
        for flat in flats:
            self.landing.unit(self._layout.flats[flat].unit)  # refuses what a landing would overwrite
        if masters.can_wait:
            parameters.note_writes(numbers)
            masters.owe(numbers)
        else:
            masters.take_outside_writes(self._step())
        for flat in flats:
            self.streaming.gathering.write_back(flat, step=self._step())

    def abandon(self) -> None:
        """Drops all that is under way, whether it failed or not: what was committed is about to come back."""
        self._parts.step.abandon()
        self._parts.gradients.reset()
        if self.streaming is not None:
            self.streaming.abandon()

    def keep_parameters(self, limit: int | None) -> None:
        """Brings streamed parameters onto the device for good, if they take `limit` bytes at most (None: whatever they
        take). Where ranks keep them together others may have less room."""
        if self.streaming is None or self._layout.shard_group_size > 1:
            return
        params = self._parts.parameters
        if limit is None or sum(flat.numel() * flat.element_size() for flat in params.flats) <= limit:
            self.streaming.bring_all()
            params.stop_guarding()
            params.own_storages()
            params.unite()
            self._are_here = True

    def remove(self) -> None:
        """Lets go of the model; what is under way ends first."""
        if self.streaming is not None:
            self.streaming.gathering.close()
        self._parts.parameters.return_spares()
        self.hooks.remove()
        self.guards.stop(are_here=self._are_here)

    def synchronize(self) -> None:
        """Waits until nothing is under way on any tier."""
        self.landing.everything()
        self._parts.gradients.drain()
        for store in self._parts.stores:
            store.drain()

    def _new_streaming(self, config: Config, placement: Placement, usable: Callable[[], None]) -> Streaming | None:
        store, pool = self._parts.streamed, placement.params
        if store is None or pool is None:
            return None
        limit = placement.device_budget_bytes
        gathering = Gathering(
            self._layout,
            self._parts.parameters,
            store,
            self._parts.run.memory.copier,
            self._parts.run.timeline,
            leases=max(pool.in_flight - 1, 1) if pool.in_flight else len(self._layout.param_chunks),
            usable=usable,
            gather=self._gather if self._layout.shard_group_size > 1 else None,
        )
        self._parts.new_params.chunk_updated = gathering.chunk_lands
        return Streaming(
            self._parts.parameters,
            store,
            gathering,
            depth=config.prefetch_units,
            is_pending=self.landing.is_unit_pending,
            apply=self.landing.unit,
            take_writes=self._write_back,
            running=self._running,
            limit=None if limit is None else limit - placement.resident_bytes - placement.slab_bytes,
            needs_all_ranks=self._needs_all_ranks,
        )

    def _needs_all_ranks(self, unit: str) -> bool:
        """Whether the current values of a streamed unit come from other ranks."""
        assert self.streaming is not None
        is_sharded = self._layout.shard_group_size > 1 and not self.streaming.gathering.is_at(unit, Where.HERE)
        return is_sharded or (self._layout.replicas > 1 and self.landing.is_unit_pending(unit))

    def _gather(self, flat: int) -> list[Work]:
        """Puts a flat that is streamed together, from the ranks that keep all of it; what this one keeps is there."""
        memory, layout = self._parts.parameters.flats[flat], self._layout
        if not memory.numel():
            return []
        parts = memory.view(layout.ranks, -1)
        groups = memory.view(layout.replicas, -1)
        within = self._parts.run.comm.shard_group
        return [
            within.all_gather_into_tensor(parts[own], group)
            for own, group in zip(layout.replicated_shards, groups, strict=True)
        ]

    def _take_model(self, config: Config, layout: Layout, source: Source, *, resumes: bool) -> None:
        """Writes the masters, casts the model. A failing disk here leaves it partly cast, and says so."""
        dtypes = compute_dtypes(self._model, config.keep_fp32, config.compute_dtype)
        try:
            for flat in self._complete_flats(layout, source):
                self._parts.parameters.make_dense(flat)
                if resumes:
                    self._take_place_of(flat)
                    continue
                params = self._parts.parameters.params
                broadcast_from_first(self._parts.run.comm, (line_of(params[n]) for n in layout.flats[flat].params))
                self._parts.masters.take_flat(flat)
                if self.streaming is not None:
                    self.streaming.gathering.take(flat)
            if not resumes:
                self._parts.store.expect(chunk.index for chunk in layout.chunks)
                for store in self._parts.stores:
                    store.drain()
        except OffloadError as error:
            error.add_note("some of the model's parameters are already in compute_dtype: build the model again")
            raise
        self.initial_bytes = self._parts.run.timeline.counted("nvme_written_bytes")
        cast_untrained(self._model, self._parts.parameters, dtypes)
        trained = self._parts.parameters.index
        others = chain(self._model.parameters(), self._model.buffers())
        broadcast_from_first(self._parts.run.comm, (tensor for tensor in others if tensor not in trained))

    def _new_tiling(self) -> Tiling | None:
        """What multiplies with weights that have tiles; None: there are none."""
        parameters, parts = self._parts.parameters, self._layout.parts
        tiles: dict[nn.Parameter, list[tuple[str, nn.Parameter]]] = {}
        for index, leaf in parameters.tiles.items():
            weight = parameters.params[self._layout.flats[parts[index].flat].params[0]]
            tiles.setdefault(weight, []).append((parts[index].unit, leaf))
        if self.streaming is None or not tiles:
            return None
        return Tiling(tiles, self.streaming, self._land_weight)

    def _land_weight(self, weight: nn.Parameter) -> None:
        number = self._parts.parameters.index[weight]
        self.landing.unit(self._layout.specs[number].unit)

    def _take_place_of(self, flat: int) -> None:
        """Takes the parameters of a flat, whose values are those of a commit and still to come."""
        self._parts.parameters.attach(flat, with_values=False)
        if self.streaming is not None:
            self._parts.parameters.free(flat)

    def _complete_flats(self, layout: Layout, source: Source) -> Iterator[int]:
        """The flats whose parameters all have values; those on the meta device get them on the way."""
        left = [flat.index for flat in layout.flats]
        params = self._parts.parameters.params
        for _ in chain([None], materialise(self._model, source)):
            for flat in list(left):
                if not any(params[number].is_meta for number in layout.flats[flat].params):
                    left.remove(flat)
                    yield flat

    def _model_begins(self) -> None:
        """Before each forward of the model."""
        require_unwrapped(self._model)
        if self.streaming is None:
            self.landing.unit(ROOT)
            self._running.enter(ROOT)
            return
        self._refuse_trace()
        unseen(self._streamed_model_begins, self.streaming)

    def _refuse_trace(self) -> None:
        """A trace keeps the parameters that it met, below Python, where nothing fetches them."""
        if torch._C._get_tracing_state() is not None:
            raise ConfigError(
                "torch.jit.trace of a model with streamed parameters would keep memory that comes and goes: trace a "
                "copy of it, torch.jit.trace(copy.deepcopy(model), ...)"
            )

    def _streamed_model_begins(self, streaming: Streaming) -> None:
        if self.landing.is_unit_pending(ROOT):
            streaming.open(ROOT)
        self.landing.unit(ROOT)
        streaming.model_begins()

    def _landed(self, flat: int) -> None:
        if self.streaming is not None:
            self.streaming.gathering.landed(flat)


def _finishes(config: Config, placement: Placement, *, direct: bool) -> bool:
    """Whether a step is applied inside `step()`: where nothing has to be waited for but the kernels, which write into
    the model. Measured 5 to 24 % faster than between layers; from a disk it would cost 16 to 29 %."""
    is_in_ram = not placement.streamed_chunks and config.param_tier != "nvme" and config.grad_tier != "nvme"
    return direct and is_in_ram
