"""Access to streamed parameters for whoever is not a forward: `gathered`, saving and loading state_dicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from offload.errors import BudgetError, ConfigError
from offload.model.fetch import Streaming
from offload.model.flat_param import Parameters
from offload.model.pending import Landing
from offload.model.running import Running
from offload.sizes import format_bytes

Target = nn.Module | Tensor | Iterable[Tensor]


class _Hook:
    """A copy or pickle of the model takes along one that does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class Access:
    """Args: units: of every parameter of the model; streaming: None where all parameters are on the device anyway;
    budget_bytes: what the copies in a state_dict may take."""

    def __init__(
        self,
        parameters: Parameters,
        units: Mapping[Tensor, str],
        landing: Landing,
        streaming: Streaming | None,
        running: Running,
        budget_bytes: int,
    ) -> None:
        self._parameters = parameters
        self._units = units
        self._landing = landing
        self._streaming = streaming
        self._running = running
        self._budget_bytes = budget_bytes
        self._copies: dict[int, weakref.ref[Tensor]] = {}

    @contextmanager
    def gathered(self, target: Target, *, writable: bool) -> Iterator[None]:
        """See OffloadZero.gathered."""
        params = list(dict.fromkeys(self._params_of(target)))
        units = list(dict.fromkeys(self._units[param] for param in params))
        for unit in units:
            self._landing.unit(unit)
        if self._streaming is None:
            yield
            return
        streaming = self._streaming
        with ExitStack() as held:  # one that cannot be let go of keeps no other
            for unit in units:
                streaming.hold(unit)
                held.callback(streaming.let_go, unit)
            if not writable:
                yield
                return
            for unit in units:
                self._running.enter(unit)
                held.callback(self._running.leave, unit)
            yield
            for unit in units:
                self._landing.unit(unit)
            streaming.gathering.find_writes([self._parameters.index[param] for param in params])

    def hooks_of(self, module: nn.Module, *, ends: bool) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """The registration and the hook of all that saves or loads `module`'s own parameters.

        Args: ends: nothing of its units is saved or loaded after it.
        """
        streaming = self._streaming
        if streaming is None:
            return
        own = {name: param for name, param in module.named_parameters(recurse=False) if param in self._parameters.index}
        units = list(dict.fromkeys(self._units[param] for param in own.values()))
        held = {param for param in module.parameters() if param in self._parameters.index}
        inside = list(dict.fromkeys(self._units[param] for param in held)) if ends else []

        def before(*_: Any) -> None:
            for unit in units:
                self._landing.unit(unit)
            if units:
                streaming.visit(units)

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
                streaming.leave(unit)

        yield module.register_state_dict_pre_hook, _Hook(saves)
        yield module.register_state_dict_post_hook, _Hook(saved)
        yield module.register_load_state_dict_pre_hook, _Hook(before)
        yield module.register_load_state_dict_post_hook, _Hook(after)

    def _copy_of(self, param: Tensor, value: Tensor, state_dict: Mapping[str, Any]) -> Tensor:
        """In RAM, for the parameter's memory goes, and the model may be larger than the device's. The names of a tied
        parameter share one, as ever."""
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
            if param not in self._units:
                raise ConfigError(f"gathered() was given a tensor of shape {tuple(param.shape)} that is no parameter")
            if param in self._parameters.index:
                assert isinstance(param, nn.Parameter)
                yield param
