"""What `optimizer.state` answers: a mapping as that of a torch optimizer, whose tensors stay in their tiers.

[Note: states as torch names them]
`state[p]` has what the optimizer's class puts there from the first step of `p` on: for Adam `step`, `exp_avg` and
`exp_avg_sq`. The master is no state of torch's, so it is not among them: `state_of(p)` has it. The tensors have no
storage. Each use of one computes with a copy, which is read from the tiers then and freed afterwards. So to go through
all of them takes the memory of one parameter. Over several ranks a use is a collective, as `state_of` is, which all
ranks have to call.

Nothing that is written to a copy would reach a tier. So a call that changes one raises ConfigError, also if it does so
through a view. What was read may be written back: Lightning does, when it moves states to the device that they are on.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from offload import torch_private
from offload.errors import ClosedError, ConfigError
from offload.model.torch_functions import Kind, answer_without_values, changed, kind_of
from offload.model.torch_helpers import bits_of, call_eagerly, instances_in
from offload.ranks.tensor_parallel import local_of

ASKS_FOR_STEPS = "torch.distributed.checkpoint.state_dict"
"""Module whose functions step an optimizer without states with zeros, so that it has some."""
_VERSION: Any = Tensor._version

Read: TypeAlias = "weakref.WeakMethod[Callable[[Tensor], Mapping[str, Any]]]"
Shown: TypeAlias = "weakref.WeakMethod[Callable[[Any], Mapping[str, Any]]]"


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "the states cannot be written to through optimizer.state, which has copies of what is in the tiers: go back to "
        "a commit with rollback() or resume=True, or make a new OffloadZero, whose states begin with zeros"
    )


class States(MutableMapping[Any, Mapping[str, Tensor]]):
    """The value of `optimizer.state`; see [Note: states as torch names them].

    It has the states of the parameters that were stepped. `shown` and `read` are methods of the optimizer, which a
    state that somebody keeps does not keep alive.

    Args:
        groups: the optimizer's param groups.
        shown: gives the states of a parameter by name: a number, a tensor of shape (), or None for an array of the
            parameter's shape, or the torch.Size of an array of another one. Of any other key, and of one that was
            never stepped, nothing.
        read: reads the states of a parameter.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], shown: Shown, read: Read) -> None:
        self._groups = groups
        self._shown = shown
        self._read = read

    def __getitem__(self, param: Any) -> ParamStates:
        if param not in self:
            return ParamStates()  # as a defaultdict of dicts does
        shown = _alive(self._shown)(param)
        return ParamStates(
            {
                kind: StateTensor.of(param, kind, self._shown, self._read)
                if _is_array(value) or isinstance(value, Tensor)
                else value
                for kind, value in shown.items()
            }
        )

    def __contains__(self, param: object) -> bool:
        return bool(_alive(self._shown)(param))

    def get(self, param: Any, default: Any = None) -> Any:
        if param in self:
            return self[param]
        return default

    def __iter__(self) -> Iterator[Any]:
        return (param for group in self._groups for param in group["params"] if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        if sys._getframe(1).f_globals.get("__name__") == ASKS_FOR_STEPS:
            raise ConfigError(
                "torch.distributed.checkpoint cannot get or set the states of this optimizer, which are in the tiers: "
                "call optimizer.commit() to save them, and OffloadZero(..., resume=True) to load them; the functions "
                "of the model alone work (get_model_state_dict, set_model_state_dict); nothing was changed"
            )
        return next(iter(self), None) is not None

    def __setitem__(self, param: Any, states: Mapping[str, Tensor]) -> None:
        here = self[param]
        if not isinstance(states, Mapping) or states.keys() != here.keys():
            _refuse()
        here.update(states)

    def __delitem__(self, param: Any) -> None:
        if param not in self:
            raise KeyError(param)
        _refuse()

    def pop(self, param: Any, *default: Any) -> Any:
        if param not in self and default:
            return default[0]
        return self.__delitem__(param)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "optimizer.state cannot be copied or pickled, which would take the memory of all states: copy those of one "
            "parameter after the other, or call optimizer.commit()"
        )

    def __repr__(self) -> str:
        return f"<the states of {len(self)} parameters: optimizer.state[p] has copies>"


class ParamStates(dict[str, Any]):
    """The states of one parameter, by kind. Only what is in it may be written to it."""

    def __setitem__(self, kind: str, value: Any) -> None:
        if kind not in self or not _is_same(self[kind], value):
            _refuse()

    def update(self, *args: Any, **kwargs: Any) -> None:
        for kind, value in dict(*args, **kwargs).items():
            self[kind] = value

    def __ior__(self, other: Any) -> ParamStates:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, kind: str, *default: Any) -> Any:
        return self[kind] if kind in self else _refuse()

    def pop(self, kind: str, *default: Any) -> Any:
        return default[0] if kind not in self and default else _refuse()

    def clear(self) -> None:
        if self:
            _refuse()

    __delitem__ = popitem = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what is unpickled, is the user's own. torch.load knows this class.
        return OrderedDict, (), None, None, iter(self.items())


class StateTensor(Tensor):
    """A state of a parameter on the CPU, without storage; see [Note: states as torch names them]."""

    source: tuple[Tensor, str, Shown, Read]

    @staticmethod
    def of(param: Tensor, kind: str, shown: Shown, read: Read) -> StateTensor:
        value = _alive(shown)(param)[kind]
        with torch_private.PastSubclasses():
            shape, strides = (param.shape, param.stride()) if value is None else ((), ())
        if isinstance(value, torch.Size):
            shape, strides = value, torch.empty(value, device="meta").stride()
        dtype = torch.float32 if _is_array(value) else value.dtype
        made: StateTensor = Tensor._make_wrapper_subclass(
            StateTensor, shape, strides=strides, dtype=dtype, device=torch.device("cpu")
        )
        made.source = (param, kind, shown, read)
        return made

    def values(self) -> Tensor:
        """A copy of the state, read from its tier.

        Raises:
            OffloadError: as `state_of` does.
            ClosedError: if the optimizer is gone.
        """
        param, kind, shown, read = self.source
        number = _alive(shown)(param)[kind]
        values: Tensor = _alive(read)(param)[kind] if _is_array(number) else number
        return values

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kind_of(func) is Kind.META or func == _VERSION.__get__:
            return torch_private.past_subclasses(func, *args, **kwargs)
        answer = answer_without_values(func, args, kwargs, StateTensor)
        return call_eagerly(_compute, func, args, kwargs) if answer is NotImplemented else answer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


class CopyView(Tensor):
    """A view of a copy of a state."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call_eagerly(_compute, func, args, kwargs or {})


_COPIED = (StateTensor, CopyView)
"""Classes of tensors in whose place a function gets copies, or views of copies."""


def _is_array(shown: object) -> bool:
    """Whether a state, as `shown` of `States` gives it, is in the tiers."""
    return shown is None or isinstance(shown, torch.Size)


def _alive(method: weakref.WeakMethod[Any]) -> Any:
    alive = method()
    if alive is None:
        raise ClosedError("these states went with their optimizer: keep it as long as you use them, or make copies")
    return alive


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls `func` with copies in place of states.

    Raises:
        ConfigError: if it changes one of them. If its name tells so, nothing is read from the tiers.
    """
    if any(isinstance(one, _COPIED) for one in instances_in(changed(func, args, kwargs), Tensor)):
        _refuse()
    # By id: a state, which lives as long as this call, its copy, the copy's version and its storage.
    copies: dict[int, tuple[Tensor, Tensor, int, int]] = {}

    def plain(state: Tensor) -> Tensor:
        if id(state) not in copies:
            with torch_private.PastSubclasses():
                copy = state.values() if isinstance(state, StateTensor) else state.as_subclass(Tensor)
            copies[id(state)] = (state, copy, copy._version, _storage_of(copy))
        return copies[id(state)][1]

    args, kwargs = torch_private.tree_map_only(_COPIED, plain, (args, kwargs))
    result = func(*args, **kwargs)
    if any(copy._version != version or _storage_of(copy) != storage for _, copy, version, storage in copies.values()):
        _refuse()
    storages = {storage for *_, storage in copies.values()}

    def seen(one: Tensor) -> Tensor:
        for state, copy, *_ in copies.values():
            if copy is one:
                return state
        return one.as_subclass(CopyView) if _storage_of(one) in storages else one

    if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
        result.setflags(write=False)
    return torch_private.tree_map_only(Tensor, seen, result)


def _storage_of(tensor: Tensor) -> int:
    tensor = local_of(tensor)
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _is_same(state: Any, value: Any) -> bool:
    """Whether a value is the state, or has its bits."""
    if not isinstance(state, Tensor):
        return type(value) is type(state) and bool(value == state)
    if isinstance(value, StateTensor) and isinstance(state, StateTensor):
        return value.source[0] is state.source[0] and value.source[1:] == state.source[1:]
    if not isinstance(value, Tensor) or value.dtype is not state.dtype or value.shape != state.shape:
        return False
    values = state.values() if isinstance(state, StateTensor) else state
    return torch.equal(bits_of(values.reshape(-1)), bits_of(value.detach().cpu().reshape(-1)))
