"""Access to streamed parameters for others than forwards: `gathered`, saving and loading state_dicts.

[Note: one state_dict]
A state_dict is made module by module, and code of the user may run in between. So another thread may make a step
meanwhile. When the outermost module has been saved, whatever was copied at another step is copied again, all of it in
one entry: a state_dict has values of one step.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from offload.entries import entry
from offload.errors import BudgetError, ConfigError
from offload.model.fetch import HeldUnits
from offload.model.flat_param import FlatParameters
from offload.model.inner import is_composite, is_wrapper, kind_of, rebuilt
from offload.model.torch_helpers import Hook
from offload.model.unit import Unit
from offload.ranks.tensor_parallel import is_dtensor
from offload.run import Owner
from offload.sizes import format_bytes

Target = nn.Module | Tensor | Iterable[Tensor]


class _Made(threading.local):
    """The state_dict that a thread is making: the parameters that were copied, their copies, and the steps of these."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, weakref.ref[Tensor], int]] = []


def _is_outermost() -> bool:
    """Whether the hook that calls this belongs to the module whose state_dict the user has asked for."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        calls += frame.f_code is nn.Module.state_dict.__code__
        frame = frame.f_back
    return calls == 1


def _in_ram(value: Tensor) -> Tensor:
    """A copy in RAM. A quantised wrapper may make something else of itself where it is asked to move, or to copy."""
    if is_wrapper(kind_of(value)) and not is_dtensor(value):
        made: Tensor = rebuilt(value, _in_ram)
        return made
    return value.detach().to("cpu", copy=True)


class Access:
    """Gives others than forwards access to parameters.

    Args:
        parameters: those that are held.
        unit_of: the unit of every parameter of the model.
        units: fetches them.
        budget_bytes: how much RAM the copies in a state_dict may take.
        owner: the optimizer.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        unit_of: Mapping[Tensor, Unit],
        units: HeldUnits,
        budget_bytes: int,
        owner: Owner,
    ) -> None:
        self.entries = units.entries
        self._owner = owner
        self._made = _Made()
        self._parameters = parameters
        self._unit_of = unit_of
        self._units = units
        self._budget_bytes = budget_bytes
        self._copies: dict[int, weakref.ref[Tensor]] = {}

    def gathered(self, target: Target, *, writable: bool) -> AbstractContextManager[None]:
        """A context for `OffloadZero.gathered`."""
        params = list(dict.fromkeys(self._params_of(target)))
        units = list(dict.fromkeys(self._unit_of[param] for param in params))
        numbers = [number for param in params for number in self._parameters.numbers_of(param)]
        return self._units.gathered(units, numbers, writable=writable)

    def hooks_of(self, module: nn.Module, *, ends: bool) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Hooks for saving and loading a module's own parameters, if they are streamed.

        Args:
            module: the module.
            ends: whether nothing of the module's units is saved or loaded after it, so that they can be released.

        Yields:
            The method of the module that registers a hook, and the hook.
        """
        if not self._parameters.streams_any:
            return
        own = {name: param for name, param in module.named_parameters(recurse=False) if self._streams(param)}
        units = list(dict.fromkeys(self._unit_of[param] for param in own.values()))
        streamed_params = {param for param in module.parameters() if self._streams(param)}
        inside = list(dict.fromkeys(self._unit_of[param] for param in streamed_params)) if ends else []

        def before(*_: Any) -> None:
            self._units.visit(units)

        def saves(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            self._require_room(streamed_params)
            if _is_outermost():
                self._made.copies = []
            if not keep_vars:
                before()

        def saved(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            saved = {prefix + name: param for name, param in own.items()}
            self._copy({k: param for k, param in saved.items() if state_dict.get(k, param) is not param}, state_dict)
            if any(map(is_composite, own.values())):
                self._copy_inner(units, [key for key in state_dict if key.startswith(prefix)], state_dict)
            after()
            if _is_outermost():
                self._make_alike()

        def after(*_: Any) -> None:
            for unit in inside:
                self._units.leave(unit)

        yield module.register_state_dict_pre_hook, Hook(saves)
        yield module.register_state_dict_post_hook, Hook(saved)
        yield module.register_load_state_dict_pre_hook, Hook(before)
        yield module.register_load_state_dict_post_hook, Hook(after)

    def _streams(self, param: Tensor) -> bool:
        number = self._parameters.number_of(param)
        return number is not None and self._parameters.streams(number)

    @entry
    def _copy(self, params: Mapping[str, nn.Parameter], state_dict: dict[str, Any]) -> None:
        """Puts copies of parameters into a state_dict.

        Args:
            params: by their keys there.
            state_dict: written.
        """
        units = list(dict.fromkeys(self._unit_of[param] for param in params.values()))
        # Where this thread trains they are here already.
        with self._units.used(units if self.entries.is_beside() else ()):
            for key, param in params.items():
                state_dict[key] = self._copy_of(param, state_dict[key], state_dict)

    @entry
    def _copy_inner(self, units: Sequence[Unit], keys: Iterable[str], state_dict: dict[str, Any]) -> None:
        """Puts copies of inner tensors into a state_dict, where a module has saved some under keys of their own.

        Args:
            units: those of the module's parameters.
            keys: the keys to look at.
            state_dict: written.
        """
        with self._units.used(units if self.entries.is_beside() else ()):
            for key in keys:
                value = state_dict[key]
                is_ours = isinstance(value, Tensor) and self._parameters.number_of(value) is None  # else a variable
                if is_ours and self._parameters.lies_in_streamed(value):
                    state_dict[key] = _in_ram(value)

    @entry
    def _make_alike(self) -> None:
        """Copies again what was copied at another step; see [Note: one state_dict]."""
        step = self._owner.step()
        for param, ref, at in self._made.copies:
            copy = ref()
            if copy is not None and at != step:
                with torch.no_grad():
                    copy.copy_(param)
        self._made.copies = []

    def _copy_of(self, param: Tensor, value: Tensor, state_dict: Mapping[str, Any]) -> Tensor:
        """A copy of a parameter in RAM.

        The parameter's own memory is taken away soon, and the device may have no room for the whole model. The names of
        a tied parameter share one copy, as they share a tensor in any state_dict.

        Args:
            param: the parameter.
            value: what the state_dict has of it.
            state_dict: what was made so far.
        """
        number = self._parameters.index[param]
        known = self._copies.get(number, lambda: None)()
        if known is not None and any(other is known for other in state_dict.values()):
            return known
        made = _in_ram(value)
        self._copies[number] = weakref.ref(made)
        self._made.copies.append((param, self._copies[number], self._owner.step()))
        return made

    def _require_room(self, params: Collection[Tensor]) -> None:
        specs = self._parameters.layout.specs
        of_params = [specs[number] for param in params for number in self._parameters.numbers_of(param)]
        needed = sum(spec.numel * spec.dtype.itemsize for spec in of_params)
        if needed > self._budget_bytes:
            raise BudgetError(
                f"a state_dict of these streamed parameters takes {format_bytes(needed)} of RAM and cpu_memory allows "
                f"{format_bytes(self._budget_bytes)}: use optimizer.gathered(module) and save module by module",
                needed=needed,
                available=self._budget_bytes,
                option="cpu_memory",
            )

    def _params_of(self, target: Target) -> Iterator[nn.Parameter]:
        if isinstance(target, nn.Module):
            found: Iterable[Tensor] = target.parameters()
        else:
            found = [target] if isinstance(target, Tensor) else target
        if not isinstance(found, Iterable):
            raise ConfigError(f"gathered({target!r}): give a module, a parameter, or several of these parameters")
        for param in found:
            if not isinstance(param, Tensor):
                raise ConfigError(f"gathered({target!r}): give a module, a parameter, or several of these parameters")
            if param not in self._unit_of:
                raise ConfigError(
                    f"gathered() was given a tensor of shape {tuple(param.shape)} that is no parameter of the model"
                )
            if param in self._parameters.index:
                assert isinstance(param, nn.Parameter)
                yield param
