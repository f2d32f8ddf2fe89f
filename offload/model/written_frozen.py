"""Frozen parameters that somebody wrote to: EMA teachers, merged adapters, references that follow.

A commit carries their values, as it does the states of attached objects; all other frozen parameters are what the model
was built with, in a resumed run too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.errors import BudgetError, ConfigError, ResumeError
from offload.layout import ParamSpec
from offload.model.fetch import HeldUnits, StreamedUnits
from offload.model.state_dict import Access
from offload.sizes import format_bytes

NAME = "written frozen parameters"
"""Under which a commit carries them."""
_COPIES = 3
"""Of the values, in RAM: those of the last commit, those captured for the next one, and those being captured."""


class WrittenFrozen:
    """Their state, for `Attached`.

    Args: specs: of all parameters that are held; budget_bytes: RAM that copies may take.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[ParamSpec],
        units: HeldUnits,
        access: Access,
        budget_bytes: int,
    ) -> None:
        self._named = dict(model.named_parameters())
        self._specs = specs
        self._units = units if isinstance(units, StreamedUnits) else None
        self._access = access
        self._budget_bytes = budget_bytes
        self._loaded: set[str] = set()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Copies of their values, by name. Raises: BudgetError."""
        names = sorted(self._loaded | self._written())
        needed = _COPIES * sum(self._named[name].numel() * self._named[name].element_size() for name in names)
        if needed > self._budget_bytes:
            raise BudgetError(
                f"a commit carries the frozen parameters that were written to, {names[0]} among them, which takes "
                f"{format_bytes(needed)} of RAM, and cpu_memory allows {format_bytes(self._budget_bytes)}: give more "
                'cpu_memory, or param_tier="device" and save them yourself',
                needed=needed,
                available=self._budget_bytes,
                option="cpu_memory",
            )
        state = {}
        for name in names:
            param = self._named[name]
            with self._access.gathered(param, writable=False), torch_private.DisableTorchFunctionSubclass():
                state[name] = param.detach().to("cpu", copy=True)
        return state

    def _written(self) -> set[str]:
        if self._units is None:
            return set()
        self._units.write_back()
        return {self._specs[number].name for number in self._units.written_frozen}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Writes values of a commit. Raises: ConfigError if one is not in the model; ResumeError if what has been
        written to since then is not among them."""
        for name, values in state.items():
            param = self._named.get(name)
            if param is None or param.shape != values.shape:
                raise ConfigError(f"{name} of shape {tuple(values.shape)} is committed, and the model has no such one")
            with self._access.gathered(param, writable=False):
                param.copy_(values)
        self._loaded |= state.keys()
        if lost := sorted(self._written() - state.keys()):
            raise ResumeError(
                f"{lost[0]}, which is frozen, was first written to after the last commit, and what it was before is "
                "not known: write its old value to it; all else is as it was committed"
            )
