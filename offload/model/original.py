"""What a model was before it was taken. If taking it fails, or is interrupted, it becomes that again.

[Note: a model that is given back]
Parameters have their class, dtype, device, strides, values and hooks again, buffers and attributes of modules are those
from before, and what was on the meta device is there. Two copies of the values would take more memory than the model
had; so where they come from depends on where a parameter went:

| parameter                                      | its values come from              |
|------------------------------------------------|-----------------------------------|
| on the meta device before                      | there are none                    |
| streams, or trains on another device           | its memory from before, kept      |
| trained, resident on its own device            | its master                        |
| the same, and its states come from a commit    | nowhere                           |
| the same, over several ranks                   | nowhere: masters are sharded      |
| frozen, resident, cast on its own device       | nowhere, but it is cast last      |

A parameter whose values come from nowhere, and one whose master cannot be read because the disk fails, is NaN, and a
note on the error says so. Over several ranks buffers and parameters may keep the values of the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.interrupts import uninterrupted_entry
from offload.model.aliases import Alias
from offload.model.dense import flattened
from offload.model.flat_param import FlatParameters
from offload.model.inner import inner_tensors
from offload.model.master_weights import MasterWeights
from offload.model.meta_init import become
from offload.native.memory import return_freed
from offload.ranks.tensor_parallel import local_of, repoint

_DATA: Any = Tensor.data  # as torch has it, without guards


@dataclass(eq=False)
class _Param:
    """A parameter, an inner tensor of one, or a wrapper, before it was taken.

    Attributes:
        name: its name in the model.
        param: the tensor that others use.
        kind: its class.
        version: its version.
        hooks: its hooks for accumulated gradients.
        dtype: its dtype.
        device: its device.
        strides: its strides.
        data: its memory, while that is kept.
        is_changed: whether it may have other memory now.
        is_to_keep: whether its memory is kept to the end, wherever it goes.
        master: the number under which the masters have its values, once nothing else has them.
    """

    name: str
    param: Tensor
    kind: type[Tensor]
    version: int | None
    hooks: dict[Any, Any] | None
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    data: Tensor | None = None
    is_changed: bool = False
    is_to_keep: bool = False
    master: int | None = None


class _Module:
    """The attributes of a module before the model was taken, and what its tables of buffers and hooks held."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = dict(vars(module))
        self._tables = [(value, dict(value)) for key, value in self._own.items() if _is_table(key, value)]

    def go_back(self) -> None:
        now = vars(self._module)
        for key in now.keys() - self._own.keys():
            del now[key]
        now.update(self._own)
        for table, before in self._tables:
            table.clear()
            table.update(before)


def _is_table(key: str, value: object) -> bool:
    return key.startswith("_") and isinstance(value, dict) and key not in ("_parameters", "_modules")


def _before(name: str, param: Tensor) -> _Param:
    local, hooks = local_of(param), _hooks_of(param)
    return _Param(
        name,
        param,
        kind=type(param),
        version=None if param.is_inference() else param._version,
        hooks=None if hooks is None else dict(hooks),
        dtype=local.dtype,
        device=local.device,
        strides=local.stride() if local.layout is torch.strided else (),
    )


class _Kept:
    """All that is needed to give a model back."""

    def __init__(self, model: nn.Module, aliases: Sequence[Alias]) -> None:
        self.aliases = aliases
        self.modules = [_Module(module) for module in model.modules()]
        names = {param: name for name, param in model.named_parameters()}
        self.params: Mapping[Tensor, _Param] = {param: _before(name, param) for param, name in names.items()}
        inners = [one for one in inner_tensors(names) if one.key]
        self.params |= {one.tensor: _before(one.name_in(names[one.param]), one.tensor) for one in inners}
        for alias in aliases:  # they have the memory anyway
            self.params[alias.param].is_to_keep = True

    @uninterrupted_entry
    def __del__(self) -> None:
        self.params = {}
        return_freed()  # the memory that was kept


def _hooks_of(param: Any) -> dict[Any, Any] | None:
    hooks: dict[Any, Any] | None = param._post_accumulate_grad_hooks
    return hooks


class Original:
    """What a model was, to which a construction that fails sets it back; see [Note: a model that is given back].

    It is undone after everything else but the stores.

    Args:
        model: the model.
        parameters: those that will be held.
        masters: has the values of some of them.
        aliases: views of parameters, which follow them.

    Attributes:
        kept: what is needed to give the model back; None once the model is taken for good.
    """

    def __init__(
        self, model: nn.Module, parameters: FlatParameters, masters: MasterWeights, aliases: Sequence[Alias]
    ) -> None:
        self._parameters = parameters
        self._masters = masters
        with torch_private.PastSubclasses():
            self.kept: _Kept | None = _Kept(model, aliases)

    @property
    def aliases(self) -> Sequence[Alias]:
        """Views of parameters, which modules have; none once the model is taken for good."""
        return () if self.kept is None else self.kept.aliases

    def changes(self, param: Tensor) -> None:
        """Keeps what a parameter, or an inner tensor, has now, before it gets other memory or values."""
        before = self._before(param)
        if not before.is_changed and before.device.type != "meta":
            with torch_private.PastSubclasses():
                before.data = _DATA.__get__(local_of(param))
            before.is_changed = True

    def was_meta(self, param: Tensor) -> bool:
        """Whether a parameter was on the meta device, so that there are no values to give back."""
        return self._before(param).device.type == "meta"

    def keep(self, param: Tensor) -> None:
        """Keeps the memory of a parameter to the end, because nothing else has its values."""
        self.changes(param)
        self._before(param).is_to_keep = True

    def give_up(self, param: Tensor, *, master: int | None) -> None:
        """Drops the memory of a parameter, which has other memory now.

        Args:
            param: the parameter.
            master: its number, if masters have its values.
        """
        before = self._before(param)
        if not before.is_to_keep:
            before.master = master
            before.data = None

    def _before(self, param: Tensor) -> _Param:
        assert self.kept is not None
        return self.kept.params[param]

    def __enter__(self) -> Original:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self.kept is None:
            return
        with torch_private.PastSubclasses(), torch.no_grad():
            for before in self.kept.params.values():
                before.param.__class__ = before.kind
            lost = [before.name for before in self._in_order(self.kept.params) if not self._is_given_back(before)]
        for alias in self.kept.aliases:
            alias.go_back()
        for module in self.kept.modules:
            module.go_back()
        self.kept = None
        if lost:
            more = f" and {len(lost) - 1} others have" if lost[1:] else " has"
            error.add_note(f"{lost[0]}{more} lost the values and become NaN: build the model again")

    def _in_order(self, params: Mapping[Tensor, _Param]) -> Iterator[_Param]:
        """All parameters. The memory of each flat parameter is dropped before the next one begins."""
        parameters = self._parameters
        for flat in parameters.layout.flats:
            yield from (params[parameters.params[number]] for number in flat.params)
            parameters.flats[flat.index] = torch.empty(0, device="cpu")
        taken = set(parameters.params)
        yield from (before for param, before in params.items() if param not in taken)

    def _is_given_back(self, before: _Param) -> bool:
        param, is_meta = before.param, before.device.type == "meta"
        if (hooks := _hooks_of(param)) is not None:
            hooks.clear()
            hooks.update(before.hooks or {})
        try:
            if is_meta and not param.is_meta:
                memory = torch.empty_strided(param.shape, before.strides, dtype=before.dtype, device="meta")
                become(param, memory, before.name)
            elif before.is_changed:
                data, has_values = self._data_of(before)
                repoint(param, data)
                if before.version is not None:
                    torch_private.set_version_counters((param,), (before.version,))
                return has_values
        except Exception:  # what is being told is more important, and has a note then
            with suppress(Exception):
                local_of(param).fill_(torch.nan)
            return False
        return True

    def _data_of(self, before: _Param) -> tuple[Tensor, bool]:
        """Memory as a parameter had it, and whether the parameter's values are in it."""
        if before.data is not None:
            return before.data, True
        shape = local_of(before.param).shape
        made = torch.empty_strided(shape, before.strides, dtype=before.dtype, device=before.device)
        try:
            if before.master is not None:
                self._masters.copy_to(before.master, flattened(made))
                return made, True
        except Exception:  # the disk that has it fails
            pass
        return made.fill_(torch.nan), False
