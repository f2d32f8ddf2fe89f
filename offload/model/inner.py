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

[Note: rows of inner tensors]
A weight in tiles (tiling.py) is cut between rows, and so is each of its inner tensors, at the same places. A row of the
weight is a run of their own first dimension: one of codes, one or several of scales, of scales of blocks that lie
across rows a part of one. So a weight can be cut at multiples of so many rows that none of these runs is cut. What a
wrapper's inner tensors mean is known to its class alone. So its class is asked: `w[a:b]` has to be a wrapper of just
these runs, as views. It is asked with a *twin* of the wrapper, on the meta device, which has shapes and no values.

A format that is no wrapper subclass needs a row in FORMATS, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd, lcm
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
        shape: the path of the shape of what the parameter stands for; "": it has that shape itself.
        refusal: called with a module that owns such a parameter, and the input of its forward, before each forward:
            why it would give the parameter other inner tensors, and what to do instead; None: it does not.
    """

    tensors: Sequence[str]
    tables: Sequence[str] = ()
    shape: str = ""
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
        shape="quant_state.shape",
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


def twin_of(tensor: Any) -> Any:
    """A tensor of the same form on the meta device: of a wrapper one around inner tensors without values."""
    with torch_private.PastSubclasses():
        return rebuilt(tensor, partial(_without_values, torch.device("meta")))


def in_form_of(form: Any, leaves: Iterable[Tensor]) -> Any:
    """A wrapper of the form of another one, around these tensors, which are in the order of `leaves_of`."""
    left = iter(leaves)
    return rebuilt(form, lambda _: next(left))


def form_of(tensor: Any) -> list[object]:
    """What tells views of one tensor apart: shapes, strides and places, and of a wrapper what its class notes of it."""
    kind = kind_of(tensor)
    with torch_private.PastSubclasses():
        leaves = [(int(leaf.storage_offset()), tuple(leaf.shape), leaf.stride()) for leaf in leaves_of(tensor)]
        context = repr(kind.__tensor_flatten__(tensor)[1]) if is_wrapper(kind) else ""  # type: ignore[attr-defined]
        return [tuple(tensor.shape), tensor.stride(), context, *leaves]


def shape_of(param: Tensor) -> tuple[int, ...]:
    """The shape of what a parameter stands for."""
    known = _format_of(kind_of(param))
    found = _at(param, known.shape) if known is not None and known.shape else None
    with torch_private.PastSubclasses():
        return tuple(param.shape if found is None else found)


def rows_between_cuts(param: Any, parts: Sequence[Inner]) -> tuple[int, str]:
    """At multiples of how many rows a parameter can be cut into tiles; see [Note: rows of inner tensors].

    Args:
        param: the parameter.
        parts: its inner tensors without tables.

    Returns:
        The number of rows, and why it cannot be cut, in words, if that is 0.
    """
    with torch_private.PastSubclasses():
        for one in parts:
            if not one.tensor.is_contiguous() or not one.tensor.numel():
                return 0, f"{one.key or 'it'} is {'empty' if not one.tensor.numel() else 'not contiguous'}"
        if not any(one.is_part for one in parts):
            return 1, ""
        rows = shape_of(param)[0]
        runs = {one.key: len(one.tensor) if one.tensor.dim() else 1 for one in parts}
        together = lcm(*(rows // gcd(rows, length) for length in runs.values()))
        if together >= rows:
            key = max(runs, key=lambda key: rows // gcd(rows, runs[key]))
            shape = next(tuple(one.tensor.shape) for one in parts if one.key == key)
            return 0, f"{key or 'its codes'}, of shape {shape}, cannot be cut where one of its {rows} matrices ends"
    if not is_wrapper(kind_of(param)):
        return together, ""
    kind, twin = kind_of(param).__name__, twin_of(param)
    try:
        piece = twin[together : 2 * together]
        if kind_of(piece) is kind_of(param) and _is_run(param, twin, piece, parts, together):
            return together, ""
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        return 0, f"w[a:b] of a {kind} raises {type(error).__name__} ({str(error).partition(chr(10))[0]})"
    return 0, f"w[a:b] of a {kind} is no view of the same rows of each of its inner tensors"


def _is_run(param: Any, twin: Any, piece: Any, parts: Sequence[Inner], first: int) -> bool:
    """Whether a piece of a twin is as many rows from row `first` on of what is cut, and all of what is not."""
    rows = param.shape[0]
    cut = {one.tensor for one in parts}
    leaves = zip(leaves_of(param), leaves_of(twin), leaves_of(piece), strict=True)
    if piece.shape != (first, *param.shape[1:]):
        return False
    for real, whole, part in leaves:
        start, length = (len(whole) * first // rows,) * 2 if real in cut else (0, len(whole) if whole.dim() else 0)
        with torch_private.PastSubclasses():
            expected = whole[start : start + length] if whole.dim() else whole
            is_same = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
            places = [(one.storage_offset(), one.shape, one.stride()) for one in (part, expected)]
        if not is_same or places[0] != places[1]:
            return False
    return True


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


def bring_along(inners: Sequence[Inner]) -> None:
    """Brings tables to where the rest of their parameters is, and makes wrappers say that they are there.

    A table may be somebody else's, too, so it stays where it is, and is replaced.
    """
    with torch_private.PastSubclasses():
        # Released tensors share a storage, as tables do, in which they have no room.
        released = {one.tensor for one in inners if one.tensor.untyped_storage().nbytes() < one.tensor.nbytes}
    devices = {one.param: one.tensor.device for one in inners if not one.is_table or one.tensor in released}
    moved: dict[tuple[Tensor, torch.device], Tensor] = {}
    for one in inners:
        device = devices.get(one.param, one.tensor.device)
        if one.is_table and one.tensor.device != device:
            if (one.tensor, device) not in moved:
                moved[one.tensor, device] = one.tensor.to(device)
            replace_table(one, moved[one.tensor, device])
    for param in dict.fromkeys(one.param for one in inners if one.key and is_wrapper(kind_of(one.param))):
        if param.device != devices.get(param, param.device):
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
