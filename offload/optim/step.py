"""The step: every chunk through Adam, and the new parameters back to the model.

Phases, for each chunk in order: lease its states ▶ Adam kernel, a segment at a time ▶ release dirty ▶ new parameters
back. While a chunk is in Adam, those after it are read and those before it are written and copied to the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.copies import Copier, Copy
from offload.layout import Chunk, Layout, Segment, segments
from offload.native import AdamScalars, Kernels
from offload.optim.gradients import GradientSink
from offload.store.arena import Arena, carved_bytes
from offload.store.store import Lease, Store
from offload.timeline import ADAM, TO_DEVICE, WAITS, Event, Timeline

STAGES = 2

StepKey = tuple[int, int]
"""(param group, how often its parameters were stepped, this step included)."""


def _stage_bytes(layout: Layout) -> int:
    return max((layout.flats[c.flat].dtype.itemsize * c.numel for c in layout.chunks), default=0)


def arena_bytes(layout: Layout, *, direct: bool) -> int:
    """What returning parameters takes from the arena."""
    return 0 if direct else STAGES * carved_bytes(_stage_bytes(layout))


class ParameterReturn:
    """Brings new parameters into the model: in place where the device's memory is RAM, else through stages.

    Args: flats: the model's parameters on its device, one tensor a flat of the layout.
    """

    def __init__(
        self, layout: Layout, flats: Sequence[Tensor], arena: Arena, copier: Copier, timeline: Timeline
    ) -> None:
        self._flats = flats
        self._copier = copier
        self._timeline = timeline
        stages = 0 if copier.direct else STAGES
        self._stages = [arena.carve(_stage_bytes(layout)) for _ in range(stages)]
        self._copies: list[list[tuple[Chunk, Copy, Event | None]]] = [[] for _ in range(stages)]
        self._turn = 0

    def target(self, chunk: Chunk) -> Tensor:
        """Where the kernels write the new parameters of `chunk`: shape (chunk.numel,), in the flat's dtype."""
        if self._copier.direct:
            return self._on_device(chunk)
        self._turn = (self._turn + 1) % len(self._stages)
        self._wait(self._turn)
        dtype = self._flats[chunk.flat].dtype
        return self._stages[self._turn][: chunk.numel * dtype.itemsize].view(dtype)

    def send(self, chunk: Chunk, target: Tensor, runs: Sequence[Segment[StepKey]]) -> None:
        """Sends the `runs` of `target`, the last one handed out, on their way."""
        if self._copier.direct:
            return
        on_device = self._on_device(chunk)
        for run in runs:
            part = slice(run.start, run.stop)
            size = (run.stop - run.start) * target.element_size()
            moving = self._timeline.begin(TO_DEVICE, "copy", chunk=chunk.index, size=size, tier="device")
            copy = self._copier.to_device(target[part], on_device[part])
            self._copies[self._turn].append((chunk, copy, moving))
            self._timeline.count("host_to_device_bytes", size)

    def wait(self) -> None:
        """Waits until all that was sent is on the device."""
        for turn in range(len(self._stages)):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        with self._timeline.span("wait_s"):
            for chunk, copy, moving in self._copies[turn]:
                if copy.done():
                    copy.wait()
                else:
                    with self._timeline.event(WAITS, "wait for copy", chunk=chunk.index, tier="device"):
                        copy.wait()
                self._timeline.end(moving)
        self._copies[turn].clear()

    def _on_device(self, chunk: Chunk) -> Tensor:
        return self._flats[chunk.flat][chunk.start : chunk.start + chunk.numel]


class Step:
    """Runs Adam over the chunks of a layout."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        gradients: GradientSink,
        parameters: ParameterReturn,
        kernels: Kernels,
        timeline: Timeline,
    ) -> None:
        self._layout = layout
        self._store = store
        self._gradients = gradients
        self._parameters = parameters
        self._kernels = kernels
        self._timeline = timeline

    def run(self, step: int, keys: Mapping[int, StepKey], groups: Sequence[Mapping[str, Any]], scale: float) -> None:
        """One step. Returns when the new parameters are in the model; writing to the slots may go on.

        Args: step: its number, from 1; keys: of each parameter that has a gradient; groups: the optimizer's
        param_groups; scale: of the gradients (clipping).
        """
        work = self._work(keys)
        scalars = {key: scalars_of(groups[key[0]], key[1], scale) for key in set(keys.values())}
        self._store.expect(chunk.index for chunk, _ in work)
        for chunk, runs in work:
            target = self._parameters.target(chunk)
            with self._store.lease(chunk.index, step=step) as lease:
                lease.dirty = True
                with self._timeline.span("adam_s"), self._timeline.event(ADAM, "Adam", chunk=chunk.index):
                    self._adam(chunk, runs, lease, target, scalars)
            self._parameters.send(chunk, target, runs)
        self._parameters.wait()

    def _work(self, keys: Mapping[int, StepKey]) -> list[tuple[Chunk, list[Segment[StepKey]]]]:
        found = [(chunk, segments(chunk, keys.get)) for chunk in self._layout.chunks]
        return [(chunk, runs) for chunk, runs in found if runs]

    def _adam(
        self,
        chunk: Chunk,
        runs: Sequence[Segment[StepKey]],
        lease: Lease,
        target: Tensor,
        scalars: Mapping[StepKey, AdamScalars],
    ) -> None:
        grads = self._gradients.chunk(chunk.index)
        for run in runs:
            part = slice(run.start, run.stop)
            master, new = lease.master[part], target[part]
            out = None if new.dtype is torch.float32 else new
            self._kernels.adam(master, lease.exp_avg[part], lease.exp_avg_sq[part], grads[part], out, scalars[run.key])
            if out is None:
                self._kernels.cast(master, new)


def scalars_of(group: Mapping[str, Any], step: int, scale: float) -> AdamScalars:
    """The kernel's scalars for a torch param group of Adam or AdamW, whose lr and betas may be tensors."""
    beta1, beta2 = group["betas"]
    return AdamScalars.at(
        step=step,
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        scale=scale,
    )
