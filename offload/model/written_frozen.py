"""Frozen parameters that somebody wrote to: EMA teachers, merged adapters, references that follow.

A commit carries their values, as it does the states of attached objects. All other frozen parameters have the values
that the model was built with, in a resumed run too. For those that stream, a commit has checksums: a resume with other
values is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from offload import torch_private
from offload.errors import BudgetError, ConfigError, ResumeError
from offload.model.dense import flattened
from offload.model.fetch import HeldUnits
from offload.model.held_param import HeldParam
from offload.model.state_dict import Access
from offload.ranks.tensor_parallel import local_of, repoint
from offload.sizes import format_bytes

NAME = "written frozen parameters"
"""The name under which a commit carries them."""


def digest_of(param: Tensor) -> str:
    """The XXH3-64 of a parameter's elements, in the order of its memory."""
    values = flattened(local_of(param).detach()).cpu()
    return xxhash.xxh3_64_hexdigest(values.view(torch.uint8).numpy().data) if values.numel() else ""


def digests_of(held: Iterable[HeldParam]) -> dict[str, str]:
    """The digests of those parameters that have one, by name."""
    return {one.spec.name: one.digest for one in held if one.digest is not None}


def was_frozen(state: object) -> Container[str]:
    """The names of the parameters that were frozen and streamed in the run that committed `state`."""
    return state["digests"] if isinstance(state, dict) else ()


@torch.no_grad()
def write(model: nn.Module, state: object, keep: Callable[[nn.Parameter], None]) -> None:
    """Gives a model that is not held yet the values that were committed, in memory of their own.

    Args:
        model: the model.
        state: what the commit has.
        keep: called with each parameter before its memory is replaced.
    """
    params = dict(model.named_parameters())
    for name, values in state["values"].items() if isinstance(state, dict) else ():
        param = params.get(name)
        if param is not None and not param.is_meta and local_of(param).shape == values.shape:
            keep(param)
            repoint(param, local_of(param).data.clone().copy_(values))


def require_same(digests: Mapping[str, str], state: object) -> None:
    """Requires that frozen parameters are what they were in the run that committed `state`.

    Args:
        digests: of frozen parameters, by name.
        state: what the commit has.

    Raises:
        ResumeError: if they are not.
    """
    if isinstance(state, Mapping):
        known = (digests.keys() & state["digests"].keys()) - state["values"].keys()
        if changed := sorted(name for name in known if digests[name] != state["digests"][name]):
            raise ResumeError(
                f"{changed[0]} is frozen, and has other values than in the run that was committed ({len(changed)} such "
                "parameters): build the model with the weights that the run began with"
            )


class WrittenFrozen:
    """The frozen parameters that somebody wrote to, as an object with a state that commits carry (`Attached`).

    Args:
        model: the model.
        held: all parameters that are held. Those without states have a digest from before anybody wrote to them.
        units: fetches parameters.
        access: lets their values be written.
        budget_bytes: how much RAM copies may take.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Sequence[HeldParam],
        units: HeldUnits,
        access: Access,
        budget_bytes: int,
    ) -> None:
        self._named = dict(model.named_parameters())
        self._held = held
        self._digests = digests_of(held)
        self._units = units
        self._access = access
        self._budget_bytes = budget_bytes
        self._loaded: set[str] = set()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Copies of the values of the parameters that were written to, by name, and the digests of all.

        Raises:
            BudgetError: if the copies take too much RAM.
        """
        names = sorted(self._loaded | self._written())
        needed = sum(local_of(self._named[name]).nbytes for name in names)
        if needed > self._budget_bytes:
            raise BudgetError(
                f"a commit carries the frozen parameters that were written to, {names[0]} among them, which takes "
                f"{format_bytes(needed)} of RAM, and cpu_memory allows {format_bytes(self._budget_bytes)}: give more "
                'cpu_memory, or param_tier="device" and save them yourself',
                needed=needed,
                available=self._budget_bytes,
                option="cpu_memory",
            )
        values = {}
        for name in names:
            param = self._named[name]
            with self._access.gathered(param, writable=False), torch_private.PastSubclasses():
                values[name] = local_of(param).detach().to("cpu", copy=True)
        return {"values": values, "digests": self._digests}

    def _written(self) -> set[str]:
        self._units.store_outside_writes()
        return {one.spec.name for one in self._held if one.spec.is_frozen and one.was_written}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Writes the values of a commit to parameters.

        Raises:
            ResumeError: if other frozen parameters are not what they were in the run that committed, or were first
                written to since then.
            ConfigError: if one is not in the model.
        """
        require_same(self._digests, state)
        values, digests = state["values"], state["digests"]
        for name, saved in values.items():
            param = self._named.get(name)
            if param is None or local_of(param).shape != saved.shape:
                raise ConfigError(f"the commit has {name} of shape {tuple(saved.shape)}: build a model that has it")
            with self._access.gathered(param, writable=False):
                local_of(param).copy_(saved)
        self._loaded |= values.keys()
        self._digests = {**digests, **self._digests}
        if lost := sorted(self._written() - values.keys()):
            raise ResumeError(
                f"{lost[0]}, which is frozen, was first written to after the last commit, and what it was before is "
                "not known: write its old value to it; all else is as it was committed"
            )
