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
from offload.model.inner import inner_by_name
from offload.model.state_dict import Access
from offload.ranks.tensor_parallel import repoint
from offload.sizes import format_bytes

NAME = "written frozen parameters"
"""The name under which a commit carries them."""


def digest_of(local: Tensor) -> str:
    """The XXH3-64 of the elements of an inner tensor, in the order of its memory."""
    values = flattened(local.detach()).cpu()
    return xxhash.xxh3_64_hexdigest(values.view(torch.uint8).numpy().data) if values.numel() else ""


def digests_of(held: Iterable[HeldParam]) -> dict[str, str]:
    """The digests of those parameters that have one, by name."""
    return {one.spec.name: one.digest for one in held if one.digest is not None}


def was_frozen(state: object) -> Container[str]:
    """The names of the parameters that were frozen and streamed in the run that committed `state`."""
    return state["digests"] if isinstance(state, dict) else ()


@torch.no_grad()
def write(model: nn.Module, state: object, keep: Callable[[Tensor], None]) -> None:
    """Gives a model that is not held yet the values that were committed, in memory of their own.

    Args:
        model: the model.
        state: what the commit has.
        keep: called with each parameter, or inner tensor, before its memory is replaced.
    """
    inners = inner_by_name(model)
    for name, values in state["values"].items() if isinstance(state, dict) else ():
        one = inners.get(name)
        if one is not None and not one.tensor.is_meta and one.tensor.shape == values.shape:
            keep(one.used)
            repoint(one.used, one.tensor.data.clone().copy_(values))


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
        self._named = inner_by_name(model)
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
        needed = sum(self._named[name].tensor.nbytes for name in names)
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
            one = self._named[name]
            with self._access.gathered(one.param, writable=False), torch_private.PastSubclasses():
                values[name] = one.tensor.detach().to("cpu", copy=True)
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
            one = self._named.get(name)
            if one is None or one.tensor.shape != saved.shape:
                raise ConfigError(f"the commit has {name} of shape {tuple(saved.shape)}: build a model that has it")
            with self._access.gathered(one.param, writable=False):
                one.tensor.copy_(saved)
        self._loaded |= values.keys()
        self._digests = {**digests, **self._digests}
        if lost := sorted(self._written() - values.keys()):
            raise ResumeError(
                f"{lost[0]}, which is frozen, was first written to after the last commit, and what it was before is "
                "not known: write its old value to it; all else is as it was committed"
            )
