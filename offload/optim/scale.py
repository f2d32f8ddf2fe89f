"""By what a step multiplies the gradients.

[Note: the factors of a step]
Gradients stay as they were made. What would change all of them, or one as a whole, is a factor here, and the step
multiplies once, in fp32:

    gradient that the step uses = (unscaled * clip) * factor of its parameter * gradient

| factor           | who writes it                                                                      |
|------------------|------------------------------------------------------------------------------------|
| unscaled         | a GradScaler, through `OffloadZero`: the inverse of its loss scale                 |
| clip             | `OffloadZero.clip_grad_norm_`                                                      |
| of one parameter | the stand-ins in `p.grad` (model/gradient.py), for products with a number in place |

`OffloadZero` and the stand-ins read the product, for the step, for norms and for whoever asks for values. All factors
are dropped with the gradients that they are for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from offload.errors import ConfigError
from offload.ranks.communicator import Communicator, digest_of

CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class StepScale:
    """The factors of the next step. See [Note: the factors of a step].

    Attributes:
        unscaled: the inverse of the loss scale; None until a GradScaler has set it.
        clip: the factor of clipping; None if the gradients were not clipped.
        usual: the factor of the last step, but for clipping.
        most_norm: the norm that the last step's gradients were clipped to; inf: they were not.
    """

    def __init__(self) -> None:
        self.unscaled: float | None = None
        self.clip: float | None = None
        self.usual = 1.0
        self.most_norm = math.inf
        # What one parameter's factor is beside the common one, where that is not 1.
        self._relative: dict[int, float] = {}

    # Reading.

    @property
    def common(self) -> float:
        """The factor of all gradients."""
        return self._common(self.unscaled)

    def relative(self, param: int) -> float:
        """The factor of one gradient beside the common one."""
        return self._relative.get(param, 1.0)

    def of(self, param: int) -> float:
        """The number by which the step multiplies the gradient of `param`."""
        return self.common * self._relative.get(param, 1.0)

    @property
    def most_squares(self) -> float:
        """The sum of squares, before unscaling, above which gradients would be clipped as the last ones were."""
        try:
            return (self.most_norm / self.usual) ** 2
        except (OverflowError, ZeroDivisionError):
            return math.inf

    @property
    def is_common(self) -> bool:
        """Whether no gradient has a factor of its own."""
        return not self._relative

    @property
    def is_set(self) -> bool:
        """Whether there is any factor, also one of 1."""
        return self.unscaled is not None or self.clip is not None or bool(self._relative)

    def is_fixed_for(self, param: int) -> bool:
        """Whether a gradient of `param` that comes now would get a factor which was computed without it."""
        return self.unscaled is not None or self.common != 1.0 or param in self._relative

    def common_if_unscaled(self, inverse: float) -> float:
        """The factor of all gradients, if the loss scale is divided out, too. Nothing is changed.

        Args:
            inverse: 1 / loss scale; 1 where the loop has divided it out itself.

        Raises:
            ConfigError: if `inverse` is no positive finite number, or the loss scale was divided out or the gradients
                were clipped before.
        """
        if not 0 < inverse < math.inf:
            raise ConfigError(
                f"the loss scale of the GradScaler is the inverse of {inverse}: it was halved at every step until "
                "nothing was left, or doubled for ever; look for the NaN or the zeros in the loss, and make a new "
                "GradScaler"
            )
        if inverse != 1.0 and self.clip is not None:
            raise ConfigError(
                "clip_grad_norm_() came before the loss scale was divided out, and clipped the gradients of the scaled "
                "loss: call scaler.unscale_(optimizer) before it; nothing was changed, call zero_grad()"
            )
        if inverse != 1.0 and self.unscaled not in (None, 1.0):
            raise ConfigError(
                "the loss scale would be divided out twice: call scaler.unscale_() once a step, with the optimizer "
                "that scaler.step() is called with; nothing was changed, call zero_grad()"
            )
        return self._common(inverse * (1.0 if self.unscaled is None else self.unscaled))

    def _common(self, unscaled: float | None) -> float:
        return (1.0 if unscaled is None else unscaled) * (1.0 if self.clip is None else self.clip)

    # Writing.

    def unscale(self, inverse: float) -> None:
        """Divides the loss scale out.

        Args:
            inverse: as for `common_if_unscaled`.

        Raises:
            ConfigError: as `common_if_unscaled`.
        """
        self.common_if_unscaled(inverse)
        self.unscaled = inverse * (1.0 if self.unscaled is None else self.unscaled)

    def take_back_unit(self) -> None:
        """Forgets a loss scale of 1: a GradScaler only asked whether the gradients are finite, for a step that failed.

        Another loss scale was divided out on purpose, and stays.
        """
        if self.unscaled == 1.0:
            self.unscaled = None

    def clip_to(self, max_norm: float, norm: float) -> None:
        """Clips the gradients as torch.nn.utils.clip_grad_norm_ does, by min(1, max_norm / (norm + 1e-6)).

        Args:
            max_norm: the largest norm that they have afterwards.
            norm: what they have now, all factors included. NaN clips nothing.
        """
        self.most_norm = max_norm
        factor = min(1.0, max_norm / (norm + CLIP_EPSILON)) if norm == norm else 1.0
        self.clip = (1.0 if self.clip is None else self.clip) * factor

    def multiply(self, param: int, by: float) -> None:
        """Multiplies the gradient of one parameter."""
        self._set(param, self.of(param) * by)

    def use_as_is(self, param: int) -> None:
        """Makes the step use the gradient of `param` as it is: its values were written anew, factors included."""
        self._set(param, 1.0)

    def forget(self, param: int) -> None:
        """Drops the factor that one parameter has of its own."""
        self._relative.pop(param, None)

    def _set(self, param: int, factor: float) -> None:
        common = self.common
        relative = factor / common if common else factor
        if relative == 1.0:
            self._relative.pop(param, None)
        else:
            self._relative[param] = relative

    def agree(self, everyone: Communicator, active: Collection[int], names: Sequence[str], text: str) -> bool:
        """Makes the factors of single parameters the same on all ranks. All of them have to call it.

        A rank that has no gradient of a parameter gets the factor that the others have.

        Args:
            everyone: all ranks that train the model.
            active: the parameters that have a gradient on this rank.
            names: of all parameters.
            text: what else has to be the same.

        Returns:
            Whether all ranks gave the same text, which travels along.

        Raises:
            ConfigError: on all ranks, if a gradient was multiplied by different numbers.
            RankError: another rank failed, or cannot be reached.
        """
        own = torch.full((len(names),), math.nan, dtype=torch.float64, device="cpu")
        own[list(active)] = 1.0
        for param, factor in self._relative.items():
            own[param] = factor
        told = everyone.all_gather(torch.cat([own, digest_of(text)]))
        rows, digests = told[:, : len(names)], told[:, len(names) :]
        least = rows.where(~rows.isnan(), math.inf).amin(0)
        most = rows.where(~rows.isnan(), -math.inf).amax(0)
        for param in (least < most).nonzero().flatten().tolist():
            raise ConfigError(
                f"the gradient of {names[param]} was multiplied by {least[param]:g} and by {most[param]:g} on the "
                "ranks: multiply it by the same number on each; nothing was changed, call zero_grad()"
            )
        for param in ((least == most) & (most != 1.0)).nonzero().flatten().tolist():
            self._relative[param] = most[param].item()
        return bool((digests == digests[0]).all())

    def step_begins(self, factor: float) -> None:
        """Takes note of the factor of all gradients in a step."""
        if self.clip is None:
            self.most_norm = math.inf
        if self.clip is None or self.clip == 1.0:
            self.usual = factor
        elif self.unscaled is not None:
            self.usual = self.unscaled

    def reset(self) -> None:
        """Drops all factors: the step takes the gradients as they are."""
        self.unscaled = self.clip = None
        self._relative.clear()
