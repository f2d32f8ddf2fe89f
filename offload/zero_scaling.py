"""The part of OffloadZero that multiplies gradients: torch's GradScaler and clipping.

[Note: a loss scale]
A GradScaler works on an optimizer in two ways, and both come here:

- `scaler.unscale_(optimizer)` calls one torch function on all `p.grad`. The stand-ins there (module/gradient.py) answer
  with `_unscale`: it says whether a gradient is not finite, and notes the inverse of the loss scale. The gradients stay
  as they are held; the step multiplies them, in fp32, as it does with the factor of clipping.
- `scaler.step(optimizer)` calls the same function with an inverse of 1, if nobody called `unscale_`, for the sake of
  its answer. It calls `step()` in any case, as of all optimizers with `_step_supports_amp_scaling`, and meanwhile the
  optimizer has two attributes more: `found_inf`, and the scale as `grad_scale`, None after `unscale_`.

Whether gradients are finite is known from their sums of squares, which are those of all ranks: so ranks skip together,
and their scalers stay alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload.assembly import Parts
from offload.attachment import Attachment
from offload.checkpoint.options import stored
from offload.collectives import Communicator
from offload.config import Config
from offload.errors import ConfigError, NonFiniteGradientError
from offload.layout import Layout
from offload.module.sharing import require_same_step
from offload.optim.adopt import require_sound

CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""
HANDED_OVER = ("grad_scale", "found_inf")
"""Attributes that an optimizer has while a GradScaler calls its step."""


class Scaling:
    """See the top of this file."""

    _config: Config
    _layout: Layout
    _parts: Parts
    _attached: Attachment
    _comm: Communicator
    _skipped: int
    param_groups: list[dict[str, Any]]
    _step_supports_amp_scaling = True  # of torch's GradScaler

    if TYPE_CHECKING:

        def _require_usable(self) -> None: ...

        def _collect(self) -> list[int]: ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients of this step to a 2-norm of `max_norm`, over all parameters together.

        With a GradScaler it comes after `scaler.unscale_(optimizer)`, and is about the unscaled gradients.

        Returns: the norm before clipping, a 0-dim fp32 CPU tensor. Clipping costs no pass over the gradients: the
        factor, torch's `min(1, max_norm / (norm + 1e-6))`, is folded into the step.
        Raises: NonFiniteGradientError with nonfinite="raise", but not of gradients that a GradScaler has met, whose
        step is skipped; ConfigError of fp16 gradients that none has. A gradient that comes after it raises
        AccumulationError.
        """
        self._require_usable()
        if not float(max_norm) >= 0:
            raise ConfigError(f"max_norm={max_norm!r}: give a number, at least 0")
        sink, active = self._parts.sink, self._collect()
        if sink.scale.unscaled is None:
            if active and self._needs_a_scaler:
                raise ConfigError(
                    "clip_grad_norm_() of fp16 gradients that are not unscaled yet: call scaler.unscale_(optimizer) of "
                    "a torch.amp.GradScaler before, on every rank, after a backward of scaler.scale(loss)"
                )
            self._all_finite(active)
        norm = sink.norm(active) * sink.scale.factor
        if sink.factors:
            each = zip(active, sink.norms(active), strict=True)
            norm = math.sqrt(math.fsum((sink.factor_of(number) * one) ** 2 for number, one in each))
        factor = min(1.0, float(max_norm) / (norm + CLIP_EPSILON)) if norm == norm else 1.0
        clip = 1.0 if sink.scale.clip is None else sink.scale.clip
        sink.scale = replace(sink.scale, clip=clip * factor)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    @property
    def _needs_a_scaler(self) -> bool:
        return self._config.compute_dtype is torch.float16

    @property
    def _is_of_scaler(self) -> bool:
        """Whether it is a GradScaler that calls the step."""
        return "found_inf" in vars(self)

    def _unscale(self, found_inf: Tensor, inverse: Tensor) -> None:
        """Answers a GradScaler; see the note at the top. Args: found_inf, inverse: 0-dim fp32; the first is written."""
        self._require_usable()
        factor = _checked(inverse.item())
        sink, active = self._parts.sink, self._collect()
        before = sink.scale
        if factor != 1.0 and before.clip is not None:
            raise _clipped_too_early()
        if factor != 1.0 and before.unscaled not in (None, 1.0):
            raise _unscaled_twice()
        if not math.isfinite(sink.norm(active)):
            found_inf.fill_(1.0)
        sink.scale = replace(before, unscaled=factor * (1.0 if before.unscaled is None else before.unscaled))

    @contextmanager
    def _beside_a_scaler(self) -> Iterator[None]:
        """A GradScaler takes away what it handed over after a step that returns. After one that raises it does not, and
        would multiply the next step's scale with what is left."""
        try:
            yield
        except BaseException:
            handed, sink = [vars(self).pop(name, None) for name in HANDED_OVER], self._parts.sink
            if handed[0] is not None and sink.scale.unscaled == 1.0:
                sink.scale = replace(sink.scale, unscaled=None)  # only asked, for this step
            raise

    def _is_to_step(self, active: Sequence[int]) -> bool:
        """Whether the step under way is not skipped. Raises: NonFiniteGradientError."""
        if self._is_of_scaler:
            return math.isfinite(self._parts.sink.norm(active))
        return self._all_finite(active)

    def _all_finite(self, active: Sequence[int]) -> bool:
        sink = self._parts.sink
        bad = sink.not_finite(active) or [number for number in active if not math.isfinite(sink.factor_of(number))]
        if bad and not self._config.skip_nonfinite:
            name = self._layout.specs[bad[0]].name
            others = f" and in {len(bad) - 1} more parameters" if len(bad) > 1 else ""
            raise NonFiniteGradientError(
                f"NaN or Inf in the gradient of {name}{others}; the optimizer's state is untouched: call zero_grad() "
                'and go on with the next batch, or choose nonfinite="skip"',
                parameter=name,
            )
        return not bad

    def _agreed_factor(self, active: Sequence[int]) -> float | None:
        """By what the step multiplies the gradients held; None: it is skipped, a GradScaler has found an Inf elsewhere.

        Raises: ConfigError on all ranks if one of them cannot step, or they would step differently; RankError.
        """
        factor, fault = math.nan, None
        try:
            require_sound(self.param_groups)
            if self._config.commit_every is not None:
                stored(self.param_groups)  # now, and not when the commit is due
            factor = self._factor(active)
        except ConfigError as error:
            fault = error
        skips = bool(vars(self).get("found_inf", 0.0))
        factor = self._with_factors(active, factor)
        require_same_step(self._comm, self.param_groups, factor, skips=skips, fault=fault)
        return None if skips else factor

    def _with_factors(self, active: Sequence[int], factor: float) -> float:
        """Makes the factors by which users multiplied gradients alike on all ranks: one that has no gradient of a
        parameter takes it from the others. Returns `factor`, with one that all have. Raises: ConfigError on all ranks.
        """
        sink = self._parts.sink
        if self._comm.size == 1:
            return factor
        mine = self._attached.answers.active
        own = [sink.factors.get(number, 1.0) for number in mine]
        row = (1.0, min(own), max(own)) if own else (0.0, 1.0, 1.0)
        told = self._comm.gather(torch.tensor(row, dtype=torch.float64, device="cpu"))
        known = {value for row in told.tolist() if row[0] for value in row[1:]}
        if len(known) > 1:
            self._share_factors(mine)
            return factor
        sink.factors.clear()
        return factor * known.pop() if known else factor

    def _share_factors(self, mine: Sequence[int]) -> None:
        sink = self._parts.sink
        row = torch.full((len(self._layout.specs),), math.nan, dtype=torch.float64, device="cpu")
        for number in mine:
            row[number] = sink.factors.get(number, 1.0)
        for number, column in enumerate(self._comm.gather(row).T.tolist()):
            factors = {value for value in column if value == value}
            if len(factors) > 1:
                raise ConfigError(
                    f"the gradient of {self._layout.specs[number].name} was multiplied by {sorted(factors)} on the "
                    "ranks: multiply it by the same number on each; nothing was changed, call zero_grad()"
                )
            if factors:
                sink.factors[number] = factors.pop()

    def _factor(self, active: Sequence[int]) -> float:
        scale, handed = self._parts.sink.scale, vars(self).get("grad_scale")
        if handed is None:
            if active and scale.unscaled is None and (self._needs_a_scaler or self._is_of_scaler):
                raise _not_unscaled(is_of_scaler=self._is_of_scaler)
            return scale.factor
        # In fp32, as `unscale_` gives it.
        inverse = _checked(handed.double().reciprocal().float().item())
        if inverse != 1.0 and scale.clip is not None:
            raise _clipped_too_early()
        if inverse != 1.0 and scale.unscaled not in (None, 1.0):
            raise _unscaled_twice()
        return scale.factor * inverse

    def _consume(self, used: Sequence[int] | None = None) -> None:
        """The next gradients begin anew. Args: used: of which parameters a step used them; None: they are dropped."""
        if used is None:
            self._attached.answers.dropped()
        else:
            self._attached.answers.consumed(used)
        self._parts.sink.as_held()
        self._parts.sink.forget_all()


def _checked(inverse: float) -> float:
    if not 0 < inverse < math.inf:
        raise ConfigError(
            f"the loss scale of the GradScaler is the inverse of {inverse}: it was halved at every step until nothing "
            "was left, or doubled for ever; look for the NaN or the zeros in the loss, and make a new GradScaler"
        )
    return inverse


def _not_unscaled(*, is_of_scaler: bool) -> ConfigError:
    if is_of_scaler:
        return ConfigError(
            "the gradients of this step are not those that scaler.unscale_(optimizer) has met: call it after the last "
            "backward of a step, on every rank, and scaler.update() before the next; nothing was changed"
        )
    return ConfigError(
        "fp16 gradients need a loss scale: run backward on scaler.scale(loss) of a torch.amp.GradScaler, then "
        "scaler.step(optimizer) and scaler.update(), or choose compute_dtype=torch.bfloat16; where no scale is meant, "
        "GradScaler(device, init_scale=1.0, growth_interval=2**31 - 1) says so; nothing was changed"
    )


def _clipped_too_early() -> ConfigError:
    return ConfigError(
        "clip_grad_norm_() came before the loss scale was divided out, and clipped the gradients of the scaled loss: "
        "call scaler.unscale_(optimizer) before it; nothing was changed, call zero_grad()"
    )


def _unscaled_twice() -> ConfigError:
    return ConfigError(
        "the loss scale would be divided out twice: call scaler.unscale_() once a step, with the optimizer that "
        "scaler.step() is called with; nothing was changed, call zero_grad()"
    )
