"""The part of OffloadZero that shows what it holds: gradients, states, parameters, counters, what ran when."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.assembly import Parts
from offload.attachment import Attachment
from offload.collectives import Communicator
from offload.config import Config, PathLike
from offload.errors import ConfigError
from offload.layout import Layout
from offload.module.parameters import shaped_like
from offload.module.recording import recorded
from offload.module.sharing import whole_line
from offload.planner.placement import Placement
from offload.timeline import Timeline


class Looking:
    """See the top of this file."""

    _model: nn.Module
    _config: Config
    _layout: Layout
    _placement: Placement
    _parts: Parts
    _attached: Attachment
    _comm: Communicator
    _timeline: Timeline
    _step: int
    _skipped: int
    _ages: list[int]

    if TYPE_CHECKING:

        def _require_usable(self) -> None: ...

        def _collect(self) -> list[int]: ...

    def grad(self, param: Tensor) -> Tensor | None:
        """The gradient of `param` as it is now: summed over micro-batches, and, once they were called, unscaled by a
        GradScaler's `unscale_` and clipped. Before `unscale_` it is that of the scaled loss. None without a gradient.

        Returns: an fp32 CPU tensor of the parameter's shape; a copy.
        """
        self._require_usable()
        number = self._number(param)
        if number not in self._collect():
            return None
        first, last = self._layout.held_of(number)
        line = torch.empty(param.numel(), dtype=torch.float32, device="cpu")
        line[first:last] = self._parts.sink.line(number).float() * self._parts.sink.factor_of(number)
        return shaped_like(param, whole_line(self._comm, self._layout, number, line))

    def gathered(
        self, module_or_params: nn.Module | Tensor | Iterable[Tensor], *, writable: bool = False
    ) -> AbstractContextManager[None]:
        """`with optimizer.gathered(model.head):` the parameters' values are there, the last step's, streamed or not.

        Args: writable: also what is written to them past torch (NumPy) is found at the end; other writes count anyway.
        Raises: ConfigError for a tensor that is no parameter of the model.
        """
        self._require_usable()
        return self._attached.access.gathered(module_or_params, writable=writable)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """{"master", "exp_avg", "exp_avg_sq": fp32 CPU tensors of the parameter's shape, "step": int}; copies."""
        self._require_usable()
        number = self._number(param)
        self._attached.landing.everything()
        self._attached.take_outside_writes()
        lines = self._parts.masters.states(number, self._step)
        whole = {kind: whole_line(self._comm, self._layout, number, line) for kind, line in lines.items()}
        shaped: dict[str, Any] = {kind: shaped_like(param, line) for kind, line in whole.items()}
        return shaped | {"step": self._ages[number]}

    def stats(self) -> dict[str, Any]:
        """Counters since training began. Bytes end in `_bytes`, seconds in `_s`.

        nvme_init_bytes is what was written before the first step; nvme_read_bytes and nvme_written_bytes what moved
        since. step_s is spent in step(), landing_s in waits for its results; adam_s, and where that runs on the CPU the
        waits for tiers wait_nvme_s and wait_device_s, are parts of the two. gradient_s is spent in backward.
        peak_device_bytes: the most that parameters and buffers had on the device at once.
        arena_utilisation: the share of the buffers' bytes that chunks fill.
        """
        return {
            "step": self._step,
            "skipped_steps": self._skipped,
            "parameters": self._layout.numel,
            "param_tier": self._config.param_tier,
            "grad_tier": self._config.grad_tier,
            **self._parts.stats(self._placement, self._attached.initial_bytes),
        }

    def timeline(self, file: PathLike) -> AbstractContextManager[None]:
        """Records every transfer, kernel, wait and hook inside `with optimizer.timeline("t.json"):`.

        The file is in Chrome's trace format, for ui.perfetto.dev or chrome://tracing. It is written at the end, also
        when the body raises. A recording changes no bit, and keeps the first 100,000 events (some 30 MB of RAM).
        Raises: PathError before the body runs, or at its end if the disk fails; ConfigError if one is going on.
        """
        self._require_usable()
        return recorded(self._timeline, file, self._model, self._layout, self._config.units)

    @property
    def files(self) -> tuple[str, ...]:
        """The swap files. They stay after `close()`; without commits there is nothing in them to resume from."""
        return self._parts.files

    def _number(self, param: Tensor) -> int:
        number = self._parts.parameters.index.get(param)  # type: ignore[call-overload]
        if number is None:
            raise ConfigError(f"the tensor of shape {tuple(param.shape)} is no parameter that this optimizer trains")
        return int(number)
