"""One warning, where another optimizer trains the held model and nobody calls the `step()` of ours.

A framework makes an optimizer of its own if it is not given one. It trains the held model then, as any code may write
to it, and nothing of that is in the tiers or in a commit. Until the first `step()`, each step of another optimizer is
looked at (by torch's hook for the steps of all optimizers). If one stepped a trained parameter that had a gradient, the
next forward warns. Afterwards nothing is looked at any more.

Writes alone tell nothing: averages are swapped in, weights are clamped, and sharpness-aware minimisation goes uphill
and back, all of that before the first `step()` and with gradients there.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from offload.model.torch_helpers import Hook

CALLER = 8
"""Frames from a forward pre-hook up to the line that calls the module: this library's and torch's."""
_lock = threading.Lock()
_is_registered = False
_watches: tuple[weakref.ref[Watch], ...] = ()
"""Replaced, and never changed: steps in other threads go through them."""


class Watch:
    """Watches the steps of all optimizers, from construction to `settle`; see the top of this file.

    Args:
        model: the held model.
        groups: our optimizer's param groups.
        has_gradient: whether a tensor is one of its parameters, with a gradient that no step of ours has used.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[Mapping[str, Any]], has_gradient: Callable[[Tensor], bool]
    ) -> None:
        self._model = model
        self._groups = groups
        self._has_gradient = has_gradient
        self._is_settled = False
        self._other = ""
        self._handle: RemovableHandle | None = None
        _change(add=self)

    def stepped(self, optimizer: Optimizer) -> None:
        """Called when an optimizer, ours or another one, has stepped."""
        groups = optimizer.param_groups
        if self._other or self._is_settled or any(group is ours for group in groups for ours in self._groups):
            return  # ours, or a wrapper of it
        if any(self._has_gradient(param) for group in groups for param in group["params"]):
            self._other = type(optimizer).__name__
            self._handle = self._model.register_forward_pre_hook(Hook(self._warn))

    def _warn(self, *_: object) -> None:
        if not self._is_settled:
            self.settle()
            warnings.warn(
                f"another optimizer, {self._other}, trains the held model, and step() of its OffloadZero was never "
                "called: nothing of this training is in its tiers or commits; give the OffloadZero to what trains, in "
                "transformers as Trainer(..., optimizers=(optimizer, None)), in Accelerate to prepare(), "
                "in Lightning as what configure_optimizers returns, or leave it out",
                stacklevel=CALLER,
            )

    def settle(self) -> None:
        """Ends the watch. May be called again."""
        if not self._is_settled:
            self._is_settled = True
            _change(drop=self)
            if self._handle is not None:
                self._handle.remove()


def _change(add: Watch | None = None, drop: Watch | None = None) -> None:
    global _is_registered, _watches
    with _lock:
        left = tuple(one for one in _watches if one() not in (None, drop))
        _watches = left if add is None else (*left, weakref.ref(add))
        if not _is_registered:
            # Once, for the life of the process: to take it away could disturb a step in another thread.
            _is_registered = True
            register_optimizer_step_post_hook(_after_any_step)


def _after_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for one in _watches:
        if (watch := one()) is not None:
            watch.stepped(optimizer)
