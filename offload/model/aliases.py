"""Tensors of modules that lie in the memory of a parameter: they follow it into its new memory, or are refused.

A buffer or an attribute of a module may be a view of a parameter (`register_buffer("rows", m.weight.data[:2])`; the
`weight` that torch's spectral_norm leaves until the first forward). In plain torch it always shows the parameter's
values. So it becomes a view of the parameter's new memory, of its dtype and on its device. It is found in buffers, in
attributes of modules and of parameters, and in lists, dicts and dataclasses there; nobody can find it elsewhere.
bitsandbytes has the codes of an 8-bit weight there, `weight.CB`, and from the first forward on `module.state.CB`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.ranks.tensor_parallel import is_dtensor, local_of

_OF_TORCH = frozenset({"_modules"})
"""Attributes of every module whose tensors are found elsewhere."""
_MOST_OFFSETS = 1 << 24
"""Elements of a tensor with unusual strides that are looked at one by one."""


class Alias:
    """A tensor in `table[key]` that is a view of a parameter.

    Attributes:
        param: the parameter.
        tensor: the view that is there now.
    """

    def __init__(self, table: Any, key: Any, tensor: Tensor, param: Tensor) -> None:
        self._table = table
        self._key = key
        self._before: Tensor | None = tensor
        self.tensor = tensor
        self.param = param
        start = tensor.storage_offset() - param.storage_offset()
        if not tensor.is_meta:
            start = (tensor.data_ptr() - param.data_ptr()) // param.element_size()
        self._geometry = tensor.shape, tensor.stride(), start

    def follow(self, data: Tensor) -> None:
        """Makes the tensor a view of `data`, the memory that the parameter has now.

        The parameter's elements have the same order there.
        """
        shape, stride, start = self._geometry
        self.tensor = data.as_strided(shape, stride, data.storage_offset() + start)
        self._table[self._key] = self.tensor

    def go_back(self) -> None:
        """Puts the tensor from before `follow` back."""
        self._table[self._key] = self._before


@torch_private.goes_past_subclasses
def aliases_of(model: nn.Module, moved: Mapping[Tensor, str]) -> list[Alias]:
    """The views that modules have of parameters.

    Args:
        model: the model.
        moved: parameters that get other memory, and their names.

    Raises:
        ConfigError: if a tensor, which it names, shares memory with one of them and cannot follow it.
    """
    return list(_aliases(model, moved))


def _aliases(model: nn.Module, moved: Mapping[Tensor, str]) -> Iterator[Alias]:
    plain = [param for param in moved if _has_memory(local_of(param))]
    spans = sorted(((*_span(local_of(param)), number) for number, param in enumerate(plain)), key=lambda one: one[0])
    starts = [start for start, _, _ in spans]
    buffers = set(model.buffers())
    on_meta = {p.untyped_storage()._cdata: p for p in moved if p.is_meta}
    for name, table, key, tensor in _tensors_of(model):
        if tensor in moved:
            continue
        if tensor.is_meta and tensor.layout is torch.strided:
            if (param := on_meta.get(tensor.untyped_storage()._cdata)) is not None:
                is_plain = type(tensor) is Tensor and tensor.dtype is param.dtype
                if not is_plain or table is None or tensor in buffers:  # a buffer gets values of its own
                    raise _shares(name, moved[param])
                yield Alias(table, key, tensor, param)
            continue
        if not _has_memory(tensor):
            continue
        first, end = _span(tensor)
        at = bisect_right(starts, end - 1)
        for start, stop, number in reversed(spans[:at]):
            if stop <= first:
                break  # parameters do not share memory
            param = plain[number]
            if not _overlap(local_of(param), tensor):
                continue
            is_inside = start <= first and end <= stop and not (first - start) % tensor.element_size()
            is_plain = type(tensor) is Tensor and not tensor.requires_grad and not is_dtensor(param)
            if not is_inside or not is_plain or tensor.dtype is not param.dtype or table is None:
                raise _shares(name, moved[param])
            if stop - start != param.nbytes:  # it has holes
                raise _shares(name, moved[param])
            yield Alias(table, key, tensor, param)
            break


def _shares(name: str, param: str) -> ConfigError:
    return ConfigError(
        f"{name} shares memory with {param}, and cannot follow it to where that is trained: give it memory of its own, "
        ".detach().clone(), or compute it in the forward"
    )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """The tensors in buffers and attributes of modules, and in attributes of parameters.

    Yields:
        The tensor's name, the table and the key where it is, and the tensor. The table is None if it cannot be
        replaced.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key == "_buffers":
                for name, buffer in value.items():
                    if isinstance(buffer, Tensor):
                        yield _join(prefix, name), value, name, buffer
            elif key == "_parameters":
                for name, param in value.items():
                    for attribute, inner in list(vars(param).items()) if param is not None else ():
                        where = _join(prefix, f"{name}.{attribute}")
                        yield from _inside(where, vars(param), attribute, inner, seen)
            elif key not in _OF_TORCH:
                yield from _inside(_join(prefix, key), vars(module), key, value, seen)


def _inside(name: str, table: Any, key: Any, value: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any, Tensor]]:
    if isinstance(value, Tensor):
        yield name, table, key, value
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        seen.add(id(value))
        can_change = isinstance(value, MutableSequence | MutableMapping)
        items: Iterable[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else enumerate(list(value))
        for inner, one in items:
            if isinstance(one, Tensor | list | tuple | dict):
                yield from _inside(f"{name}[{inner!r}]", value if can_change else None, inner, one, seen)
    elif is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))
        for inner, one in list(vars(value).items()):
            if isinstance(one, Tensor | list | tuple | dict):
                yield from _inside(f"{name}.{inner}", vars(value), inner, one, seen)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _has_memory(tensor: Tensor) -> bool:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested or nn.parameter.is_lazy(tensor):
        return False
    return not torch_private.is_wrapper_subclass(tensor) and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and of the byte after its last; gaps are included."""
    start = tensor.data_ptr()
    return start, start + extent_of(tensor) * tensor.element_size()


def extent_of(tensor: Tensor) -> int:
    """The number of elements that a strided tensor spans in memory, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, whose spans overlap, have an element in common."""
    start = min(one.data_ptr(), other.data_ptr())
    item = one.element_size()
    gaps = any(extent_of(tensor) != tensor.numel() for tensor in (one, other))
    offset = abs(one.data_ptr() - other.data_ptr())
    if not gaps or item != other.element_size() or offset % item:
        return True
    starts = [(tensor.data_ptr() - start) // item for tensor in (one, other)]
    extent = max(at + extent_of(tensor) for at, tensor in zip(starts, (one, other), strict=True))
    if extent > _MOST_OFFSETS:
        return True
    used = torch.zeros(extent, dtype=torch.bool, device="cpu")
    used.as_strided(one.shape, one.stride(), starts[0]).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), starts[1]).any())


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor lie at the same place, as those of an expanded one do."""
    extent, is_nested = 1, True
    dimensions = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if not tensor.numel():
        return False
    for stride, size in sorted(dimensions):
        if not stride:
            return True
        is_nested = is_nested and stride >= extent
        extent += (size - 1) * stride
    if is_nested:
        return False
    if extent < tensor.numel() or extent > _MOST_OFFSETS:
        return True
    places = torch.arange(extent, device="cpu").as_strided(tensor.shape, tensor.stride())
    return len(places.unique()) != tensor.numel()
