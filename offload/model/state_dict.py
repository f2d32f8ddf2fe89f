"""Access to streamed parameters for others than forwards: `gathered`, saving and loading state_dicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from offload.errors import BudgetError, ConfigError
from offload.model.fetch import HeldUnits, StreamedUnits
from offload.model.flat_param import FlatParameters
from offload.model.torch_helpers import Hook
from offload.sizes import format_bytes

Target = nn.Module | Tensor | Iterable[Tensor]


class Access:
    """Gives others than forwards access to parameters.

    Args: names: the unit of every parameter of the model; budget_bytes: RAM that the copies in a state_dict may
    take."""

    def __init__(
        self, parameters: FlatParameters, names: Mapping[Tensor, str], units: HeldUnits, budget_bytes: int
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._units = units
        self._budget_bytes = budget_bytes
        self._copies: dict[int, weakref.ref[Tensor]] = {}

    def gathered(self, target: Target, *, writable: bool) -> AbstractContextManager[None]:
        """See OffloadZero.gathered."""
        params = list(dict.fromkeys(self._params_of(target)))
        units = list(dict.fromkeys(self._names[param] for param in params))
        return self._units.gathered(units, [self._parameters.index[param] for param in params], writable=writable)

    def hooks_of(self, module: nn.Module, *, ends: bool) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Hooks for saving and loading a module's own parameters, if they are streamed: pairs of the method that
        registers a hook, and the hook.

        Args: ends: nothing of the module's units is saved or loaded after it, so that they can be released.
        """
        if not isinstance(self._units, StreamedUnits):
            return
        streamed = self._units
        own = {name: param for name, param in module.named_parameters(recurse=False) if self._streams(param)}
        units = list(dict.fromkeys(self._names[param] for param in own.values()))
        held = {param for param in module.parameters() if self._streams(param)}
        inside = list(dict.fromkeys(self._names[param] for param in held)) if ends else []

        def before(*_: Any) -> None:
            streamed.visit(units)

        def saves(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            self._require_room(held)
            if not keep_vars:
                before()

        def saved(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            for name, param in own.items():
                key = prefix + name
                if key in state_dict and state_dict[key] is not param:
                    state_dict[key] = self._copy_of(param, state_dict[key], state_dict)
            after()

        def after(*_: Any) -> None:
            for unit in inside:
                streamed.leave(unit)

        yield module.register_state_dict_pre_hook, Hook(saves)
        yield module.register_state_dict_post_hook, Hook(saved)
        yield module.register_load_state_dict_pre_hook, Hook(before)
        yield module.register_load_state_dict_post_hook, Hook(after)

    def _streams(self, param: Tensor) -> bool:
        number = self._parameters.number_of(param)
        return number is not None and self._parameters.streams(number)

    def _copy_of(self, param: Tensor, value: Tensor, state_dict: Mapping[str, Any]) -> Tensor:
        """A copy in RAM: the parameter's own memory is taken away soon, and the device may have no room for the whole
        model. The names of a tied parameter share one copy, as they share a tensor in any state_dict."""
        number = self._parameters.index[param]  # type: ignore[index]
        known = self._copies.get(number, lambda: None)()
        if known is not None and any(other is known for other in state_dict.values()):
            return known
        made = value.detach().to("cpu", copy=True)
        self._copies[number] = weakref.ref(made)
        return made

    def _require_room(self, params: Collection[Tensor]) -> None:
        needed = sum(param.numel() * param.element_size() for param in params)
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
        for param in found:
            if param not in self._names:
                raise ConfigError(
                    f"gathered() was given a tensor of shape {tuple(param.shape)} that is no parameter of the model"
                )
            if param in self._parameters.index:
                assert isinstance(param, nn.Parameter)
                yield param
