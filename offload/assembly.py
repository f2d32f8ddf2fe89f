"""Puts the parts together for one run: arena, files, kernels, gradient sink, store, step. They know nothing of torch's
optimizer interface, which is zero.py's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from offload.config import Config
from offload.copies import Copier
from offload.io.probe import weights
from offload.io.settings import open_engine
from offload.layout import Layout
from offload.module.masters import Masters
from offload.module.parameters import Parameters
from offload.native import Kernels, load
from offload.optim.gradients import GradientSink
from offload.optim.step import ParameterReturn, Step
from offload.planner.placement import Placement
from offload.store.arena import Arena
from offload.store.store import Store
from offload.store.stripes import Stripes
from offload.timeline import Timeline


@dataclass(frozen=True)
class Parts:
    """What a run is made of. files: the swap files; io_engine: its name, None without files."""

    arena: Arena
    kernels: Kernels
    sink: GradientSink
    store: Store
    parameters: Parameters
    masters: Masters
    step: Step
    files: tuple[str, ...]
    io_engine: str | None


def assemble(
    undo: ExitStack,
    config: Config,
    layout: Layout,
    placement: Placement,
    params: Sequence[nn.Parameter],
    copier: Copier,
    timeline: Timeline,
) -> Parts:
    """Reserves memory and opens files; `undo` gets their closing, in reverse order.

    Raises: BudgetError, PathError, PathInUseError, ResumeError, ConfigError; the model is not touched.
    """
    arena = Arena(placement.arena_bytes, copier)
    undo.callback(arena.close)
    slots: Stripes | None = None
    io_engine: str | None = None
    if config.paths:
        engine = open_engine(config.io_engine, config.paths)
        undo.callback(engine.close)
        engine.register(arena.memory)
        numels = [chunk.numel for chunk in layout.chunks]
        slots = Stripes(engine, config.paths, weights(config.paths), numels, timeline)
        undo.callback(slots.close)
        io_engine = engine.name
    kernels = load(config.threads)
    undo.callback(kernels.close)
    sink = GradientSink(layout, config.accumulation, arena, kernels, copier, timeline)
    undo.callback(sink.close)
    store = Store(layout.chunks, placement.kept, placement.in_flight, arena, slots, timeline)
    undo.callback(store.close)
    parameters = Parameters(layout, params)
    returned = ParameterReturn(layout, parameters.flats, arena, copier, timeline)
    return Parts(
        arena=arena,
        kernels=kernels,
        sink=sink,
        store=store,
        parameters=parameters,
        masters=Masters(layout, parameters, store),
        step=Step(layout, store, sink, returned, kernels, timeline),
        files=() if slots is None else slots.paths,
        io_engine=io_engine,
    )
