"""What a parameter consists of: its inner tensors, each plain, with memory, a dtype and a name of its own.

[Note: inner tensors]
| parameter                                | its inner tensors, by key                                    |
|------------------------------------------|--------------------------------------------------------------|
| a plain one                              | "" (its own elements): itself                                |
| a DTensor                                | "": this rank's part of it, its *local* tensor               |
| a wrapper subclass (`__tensor_flatten__`)| "qdata", "scale" ...: what it is made of, by attribute       |
| one of a class in FORMATS                | as the table says: "", "quant_state.absmax" ...              |

A wrapper may be made of wrappers, so this is done again with each of them. The key goes into the name: a commit and an
error speak of `layers.0.weight.quant_state.absmax`.

Flat parameters, chunks, digests, commits and ranks know inner tensors only, and treat all of them alike. The parameter
stays the object that it is, around tensors whose memory comes and goes; nothing takes it apart or puts it together. One
whose elements are its own ("" is among the keys) is what a HeldParam has as its tensor. A wrapper without that lies
beside the HeldParams of its inner tensors: see [Note: wrappers] in held_param.py.

A *table* is an inner tensor that many parameters share, such as the 16 values of a 4-bit code, or a number. It stays on
the device: it has few bytes, and in a flat parameter each of its owners would need one of its own.

A format that is no wrapper subclass needs a row in FORMATS, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.ranks.tensor_parallel import is_dtensor, local_of


class Format(NamedTuple):
    """What parameters of a class consist of, as paths of attributes. Paths that lead to no tensor are passed over.

    Attributes:
        tensors: the paths of inner tensors; "" is the parameter itself.
        tables: the paths of tables.
        refusal: called with a module that owns such a parameter, and the input of its forward, before each forward:
            why it would give the parameter other inner tensors, and what to do instead; None: it does not.
    """

    tensors: Sequence[str]
    tables: Sequence[str] = ()
    refusal: Callable[[Any, Any], str | None] | None = None


def _packs_anew(module: Any, x: Any) -> str | None:
    """Whether a Linear4bit is about to pack its codes in another way, by its own conditions."""
    does = getattr(module, "support_avx512bf16_for_cpu", False) and isinstance(x, Tensor) and x.device.type == "cpu"
    if not does or module.training or x.requires_grad or not hasattr(module.weight, "quant_state"):
        return None
    return (
        "on CPUs with AVX512-BF16 bitsandbytes packs its codes anew in evaluation mode, into other memory than that in "
        "which they are held: leave this layer in training mode (layer.train(), which changes nothing else of it), or "
        "evaluate a copy, copy.deepcopy(model).eval()"
    )


FORMATS: dict[str, Format] = {
    "bitsandbytes.nn.modules.Params4bit": Format(
        ("", "quant_state.absmax", "quant_state.state2.absmax"),
        tables=("quant_state.code", "quant_state.offset", "quant_state.state2.code"),
        refusal=_packs_anew,
    ),
    "bitsandbytes.nn.modules.Int8Params": Format(("", "SCB")),
}
"""By the full name of a class, which also serves its subclasses. A name, so that nobody's library is imported."""


class Inner(NamedTuple):
    """An inner tensor of a parameter.

    Attributes:
        param: the parameter.
        key: its path in the parameter; "": the parameter's own elements.
        tensor: the inner tensor.
        is_part: whether the parameter has others beside it.
        is_table: whether it stays on the device, because others share it.
    """

    param: nn.Parameter
    key: str
    tensor: Tensor
    is_part: bool = False
    is_table: bool = False

    @property
    def used(self) -> Tensor:
        """The tensor that others use: the parameter itself for its own elements, else the inner tensor."""
        return self.tensor if self.key else self.param

    def name_in(self, param_name: str) -> str:
        """Its name in a model that has the parameter under a name."""
        return f"{param_name}.{self.key}" if self.key else param_name


def require_kept(param: Tensor, name: str, module: nn.Module, x: Any) -> None:
    """Requires that a forward leaves what a parameter consists of as it is.

    Args:
        param: the parameter.
        name: its name in the model.
        module: the module that owns it, whose forward begins.
        x: the forward's first argument; None: there is none.

    Raises:
        ConfigError: if it does not.
    """
    known = _format_of(kind_of(param))
    if known is not None and known.refusal is not None and (why := known.refusal(module, x)) is not None:
        raise ConfigError(f"{name} is a {kind_of(param).__name__}: {why}")


def needs_check(param: Tensor) -> bool:
    """Whether `require_kept` may raise for a parameter."""
    known = _format_of(kind_of(param))
    return known is not None and known.refusal is not None


def kind_of(tensor: Tensor) -> type[Tensor]:
    """The own class of a tensor, also while another class guards it (guard.py)."""
    kind: type[Tensor] = getattr(type(tensor), "_kind", type(tensor))
    return kind


def is_wrapper(kind: type[Tensor]) -> bool:
    """Whether tensors of a class are made of other tensors."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def inner_tensors(params: Iterable[nn.Parameter]) -> list[Inner]:
    """The inner tensors of parameters, parameter by parameter, tables included."""
    with torch_private.PastSubclasses():
        found = [one for param in params for one in _inner_of(param)]
        sharers = Counter(one.tensor.untyped_storage()._cdata for one in found if _may_be_shared(one))
        return [
            one._replace(is_table=True)
            if _may_be_shared(one) and sharers[one.tensor.untyped_storage()._cdata] > 1
            else one
            for one in found
        ]


def inner_by_name(model: nn.Module) -> dict[str, Inner]:
    """The inner tensors of all parameters of a model, by their names in it."""
    names = {param: name for name, param in model.named_parameters()}
    return {one.name_in(names[one.param]): one for one in inner_tensors(names)}


def leaves_of(tensor: Any) -> list[Tensor]:
    """The plain tensors that any tensor consists of."""
    if type(tensor) is Tensor:
        return [tensor]
    with torch_private.PastSubclasses():
        return [one.tensor for one in _inner_of(tensor)]


def rebuilt(tensor: Any, use: Callable[[Tensor], Tensor]) -> Any:
    """A wrapper like another one, around what `use` makes of its inner tensors.

    A wrapper's own `clone()` may quantise its values anew.
    """
    kind = kind_of(tensor)
    if not is_wrapper(kind):
        return use(tensor)
    names, context = kind.__tensor_flatten__(tensor)  # type: ignore[attr-defined]
    inner = {name: rebuilt(getattr(tensor, name), use) for name in names}
    with torch_private.PastSubclasses():
        size, stride = tensor.size(), tensor.stride()
    return kind.__tensor_unflatten__(inner, context, size, stride)  # type: ignore[attr-defined]


def require_movable_wrappers(inners: Iterable[Inner], names: Mapping[nn.Parameter, str], device: torch.device) -> None:
    """Requires that wrappers can be on a device, to which what they are made of is going to move.

    A wrapper's own device was fixed when it was made. One of each class is made there, of tensors without values.

    Raises:
        ConfigError: naming one that would still say that it is where it was.
    """
    seen: set[type] = set()
    for one in inners:
        kind = kind_of(one.param)
        if not one.key or not is_wrapper(kind) or one.param.device == device or kind in seen:
            continue
        seen.add(kind)
        made = rebuilt(one.param, partial(_without_values, device))
        if made.device != device:
            raise ConfigError(
                f"{names[one.param]} is a {kind.__name__}, which keeps the device that it was made on, "
                f"{one.param.device}, whatever its inner tensors are on: quantise the model on {device}, or into "
                "another format"
            )


def _without_values(device: torch.device, leaf: Tensor) -> Tensor:
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)


def bring_along(inners: Iterable[Inner], device: torch.device) -> None:
    """Brings tables to a device, and makes wrappers say that they are there. All other inner tensors are there.

    A table may be somebody else's, too, so it stays where it is, and is replaced.
    """
    moved: dict[Tensor, Tensor] = {}
    for one in inners:
        if one.is_table and one.tensor.device != device:
            if one.tensor not in moved:
                moved[one.tensor] = one.tensor.to(device)
            replace_table(one, moved[one.tensor])
    for param in dict.fromkeys(one.param for one in inners if one.key and is_wrapper(kind_of(one.param))):
        if param.device != device:
            made = rebuilt(param, lambda leaf: leaf)
            torch_private.swap_implementations(param, made)
            vars(param).update(vars(made))


def replace_table(one: Inner, table: Tensor) -> None:
    """Gives a parameter another table."""
    path, _, name = one.key.rpartition(".")
    setattr(_at(one.param, path), name, table)


def table_bytes(inners: Iterable[Inner]) -> int:
    """How many bytes the tables among inner tensors take, each once."""
    tables = {one.tensor.untyped_storage()._cdata: one.tensor.nbytes for one in inners if one.is_table}
    return sum(tables.values())


def is_composite(param: Tensor) -> bool:
    """Whether a parameter is more than elements of its own, or of its local tensor."""
    with torch_private.PastSubclasses():
        return any(path for path, _, _ in _parts(param))


def _may_be_shared(one: Inner) -> bool:
    return one.key != "" and not one.is_table and one.tensor.numel() > 0


def _inner_of(param: Any) -> list[Inner]:
    parts = list(_parts(param))
    is_part = any(path for path, _, _ in parts)
    return [Inner(param, path, tensor, is_part, is_table) for path, tensor, is_table in parts]


def _parts(tensor: Any, path: str = "") -> Iterator[tuple[str, Tensor, bool]]:
    """Yields path, tensor, and whether it is a table, of all that a tensor consists of."""
    if is_dtensor(tensor):
        yield from _parts(local_of(tensor), path)
        return
    kind = kind_of(tensor)
    if (known := _format_of(kind)) is not None:
        for end in (*known.tensors, *known.tables):
            found = _at(tensor, end)
            if isinstance(found, Tensor):
                yield _join(path, end), found, end in known.tables
    elif is_wrapper(kind):
        for end in kind.__tensor_flatten__(tensor)[0]:  # type: ignore[attr-defined]
            yield from _parts(getattr(tensor, end), _join(path, end))
    else:
        yield path, tensor, False


def _format_of(kind: type) -> Format | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((FORMATS[name] for name in names if name in FORMATS), None)


def _at(tensor: Any, path: str) -> Any:
    """What is at a path of attributes; None if nothing is."""
    for name in filter(None, path.split(".")):
        tensor = getattr(tensor, name, None)
    return tensor


def _join(path: str, end: str) -> str:
    return ".".join(filter(None, (path, end)))
