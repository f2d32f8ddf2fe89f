"""A copy or a pickle of a held module is a plain one: what was hooked into the module stays behind.

A module is asked for its state by `copy.deepcopy`, `copy.copy` and `pickle`. While it is held, `PlainState` answers.
Of a class that says itself how it is copied, copies have what was hooked in, but it does nothing there.
Casts of inputs go along where the copy has parameters of another dtype than the model had: its caller knows nothing of
that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from offload.errors import ConfigError


class _NotScriptedError(ConfigError, AttributeError):
    """What torch.jit.script of a held module raises: TorchScript asks for an attribute that functions have."""


class LeftBehind:
    """Base of what a held module has, and a copy of it does not have.

    Attributes:
        instead: what it stands in for; None: nothing.
    """

    instead: Any = None


def left(value: Any) -> Any:
    """What a copy has in place of `value`; None if that is left behind and stands in for nothing."""
    while isinstance(value, LeftBehind):
        value = value.instead
    return value


def refuse_script(fault: str = "the module is held, and TorchScript cannot compile what was hooked into it") -> str:
    """Raises the error for a property that TorchScript asks for."""
    raise _NotScriptedError(
        f"{fault}: script a copy, torch.jit.script(copy.deepcopy(module)), of a model that trains in fp32 "
        "(compute_dtype=torch.float32), or script the model after optimizer.close()"
    )


class PlainState(LeftBehind):
    """Stands in for a module's `__getstate__` from its construction on. Only for a module that it `serves`."""

    NAME = "__getstate__"

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.instead = vars(module).get(self.NAME)
        setattr(module, self.NAME, self)

    def __call__(self) -> Any:
        module = self._module()
        getstate: Callable[[], Any] = self.instead or type(module).__getstate__.__get__(module)
        state = getstate()
        return _plain(state) if isinstance(state, dict) else state

    @staticmethod
    def serves(module: nn.Module) -> bool:
        """Whether copies of a module are made from its state."""
        kind = type(module)
        is_usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
        return is_usual and not hasattr(kind, "__deepcopy__")

    def remove(self) -> None:
        """Gives the module its own `__getstate__` back."""
        module = self._module()
        if module is not None and vars(module).get(self.NAME) is self:
            if self.instead is None:
                delattr(module, self.NAME)
            else:
                setattr(module, self.NAME, self.instead)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    tables = {key: value for key, value in state.items() if key.startswith("_") and isinstance(value, dict)}
    ours = {number for table in tables.values() for number, hook in table.items() if _is_left(hook)}
    made = {}
    for key, value in state.items():
        if key in tables and ours & value.keys():
            made[key] = type(value)((number, hook) for number, hook in value.items() if number not in ours)
        elif not isinstance(value, LeftBehind) or left(value) is not None:
            made[key] = left(value)
    return made


def _is_left(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), LeftBehind)  # torch wraps some of the hooks for loading
