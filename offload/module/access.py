"""Access to streamed parameters for whoever is not a forward: `gathered`, saving and loading state_dicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from offload.errors import BudgetError, ConfigError, StaleParameterError
from offload.module.landing import Landing
from offload.module.parameters import Parameters
from offload.module.streaming import Streaming
from offload.sizes import format_bytes

Target = nn.Module | Tensor | Iterable[Tensor]


class Access:
    """Args: units: of every parameter of the model; streaming: None where all parameters are on the device anyway;
    budget_bytes: what the copies in a state_dict may take."""

    def __init__(
        self,
        parameters: Parameters,
        units: Mapping[Tensor, str],
        landing: Landing,
        streaming: Streaming | None,
        budget_bytes: int,
    ) -> None:
        self._parameters = parameters
        self._units = units
        self._landing = landing
        self._streaming = streaming
        self._budget_bytes = budget_bytes

    @contextmanager
    def gathered(self, target: Target, *, writable: bool) -> Iterator[None]:
        """See OffloadZero.gathered."""
        params = list(self._params_of(target))
        units = list(dict.fromkeys(self._units[param] for param in params))
        for unit in units:
            self._landing.unit(unit)
        held: list[str] = []
        try:
            for unit in units:
                if self._streaming is not None:
                    self._streaming.hold(unit)
                    held.append(unit)
            yield
            if not writable:
                self._require_unwritten(units)
        finally:
            for unit in held:
                assert self._streaming is not None
                self._streaming.let_go(unit)

    def hooks_of(self, module: nn.Module, unit: str) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """The registration and the hook of all that saves or loads `module`'s own parameters, which are of `unit`."""
        streaming = self._streaming
        if streaming is None:
            return
        names = [name for name, _ in module.named_parameters(recurse=False)]

        def before(*_: Any) -> None:
            streaming.hold(unit)

        def before_saving(*_: Any) -> None:
            self._require_room(module)
            streaming.hold(unit)

        def saved(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            for name in names:
                if prefix + name in state_dict:
                    # Of its own: the parameter's memory goes.
                    state_dict[prefix + name] = state_dict[prefix + name].detach().clone()
            streaming.let_go(unit)

        def loaded(*_: Any) -> None:
            streaming.let_go(unit)

        yield module.register_state_dict_pre_hook, before_saving
        yield module.register_state_dict_post_hook, saved
        yield module.register_load_state_dict_pre_hook, before
        yield module.register_load_state_dict_post_hook, loaded

    def _require_room(self, module: nn.Module) -> None:
        needed = sum(param.numel() * param.element_size() for param in module.parameters())
        if needed > self._budget_bytes:
            raise BudgetError(
                f"a state_dict of these streamed parameters takes {format_bytes(needed)} of RAM and cpu_memory allows "
                f"{format_bytes(self._budget_bytes)}: use optimizer.gathered(module) and save module by module",
                needed=needed,
                available=self._budget_bytes,
                option="cpu_memory",
            )

    def _require_unwritten(self, units: Collection[str]) -> None:
        if self._streaming is None:
            return
        numbers = [number for number, param in enumerate(self._parameters.params) if self._units[param] in units]
        changed = self._parameters.written_outside(numbers)
        if changed:
            self._parameters.forget_writes(changed)
            raise StaleParameterError(
                f"{len(changed)} parameters were written to inside gathered(), and are as they were before: "
                "use gathered(..., writable=True)"
            )

    def _params_of(self, target: Target) -> Iterator[Tensor]:
        if isinstance(target, nn.Module):
            found: Iterable[Tensor] = target.parameters()
        else:
            found = [target] if isinstance(target, Tensor) else target
        for param in found:
            if param not in self._units:
                raise ConfigError(f"gathered() was given a tensor of shape {tuple(param.shape)} that is no parameter")
            if param in self._parameters.index:
                yield param
