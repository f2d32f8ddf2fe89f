"""What a user commits along with a run: schedulers, RNG states, the position in the data. No pickle.

[Note: extra format]
A value becomes JSON and a list of tensors. null, true, false, strings, finite floats and ints of up to 63 bits are
themselves, a list is a list; everything else is an object of one field that says what it is:

    {"int": "-8f.."}      a larger int, hexadecimal             {"float": "7ff8000000000000"}  NaN, infinities: the bits
    {"bytes": base64}                                          {"tuple": [..]}
    {"dict": [[key, value], ..]}, {"OrderedDict": ..}, {"Counter": ..}: keys are str, int, bool or null
    {"tensor": n}         the n-th tensor, as it is             {"ndarray": n}  the n-th tensor, as an array
    {"numpy": [dtype, base64]}  a NumPy scalar: "float64", and its bytes, little-endian
    {"carried": [extra, {"dict": [[name, state], ..]}, [name, ..], [name, ..], name]}  only as a whole: see `Carried`

What comes back equals what was given, type, bits and order included. A tensor comes back dense, row-major, without
gradient, on the CPU.
"""

from __future__ import annotations

import base64
import math
import random
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from offload.checkpoint.manifest import MAX_OPTIONS, Json, Option, Scalar, is_text
from offload.checkpoint.tensors import DTYPES
from offload.devices.copies import accelerator
from offload.errors import ConfigError, CorruptionError, ResumeError
from offload.storage.swap_format import MAX_INT

MAX_DEPTH = 64
MAX_HEX = 1 << 12
"""The most hexadecimal digits of an int: 16,384 bits."""
MAX_ITEMS = 1 << 22

_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_NUMPY = {
    name: numpy.dtype(name).type
    for name in ("bool", *_INTS, "float16", "float32", "float64", "complex64", "complex128")
}
_KEYS = (str, int, bool, type(None))
_FLOAT = struct.Struct(">d")


class Carried(NamedTuple):
    """What a commit carries.

    Attributes:
        extra: what the user gave along.
        attached: the states of attached objects, by name.
        drawn: the names of those whose state is of one rank only: data loaders and random number generators.
        named: the snapshots that were made because a state dict names them, the oldest first.
        source: what state dicts call the commit that this one is a copy of; "": it is none.
    """

    extra: object = None
    attached: Mapping[str, object] = {}
    drawn: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    source: str = ""

    def for_other_ranks(self) -> Carried:
        """What of it a run on another number of ranks gets."""
        return self._replace(attached={name: state for name, state in self.attached.items() if name not in self.drawn})


def encode(value: object) -> tuple[Json, list[Tensor]]:
    """A value as JSON, and the tensors that the JSON refers to; see [Note: extra format].

    Raises:
        ConfigError: a part cannot be stored. The error names it, such as extra['scheduler']['f'].
    """
    tensors: list[Tensor] = []
    encoder = _Encoder(tensors)
    carried = carried_in(value)
    try:
        if not any(carried[1:]):
            return encoder.encode(carried.extra, "extra", 0), tensors
        parts = [encoder.encode(carried.extra, "extra", 1), encoder.encode(dict(carried.attached), "attached", 1)]
        return {"carried": [*parts, list(carried.drawn), list(carried.named), carried.source]}, tensors
    finally:
        encoder.tensors = []  # it refers to itself, and would keep them until the next garbage collection


def carried_in(extra: object) -> Carried:
    """What was committed along, as a `Carried`, also by a run that attached nothing."""
    return extra if isinstance(extra, Carried) else Carried(extra)


def decode(structure: Json, tensors: Mapping[str, Tensor], file: str) -> object:
    """The inverse of `encode`.

    Args:
        structure: the JSON.
        tensors: the tensors, by their number as a string.
        file: the file of the JSON, for the errors.

    Raises:
        CorruptionError: it is not what `encode` returns.
    """
    decoder = _Decoder(dict(tensors))
    try:
        value = decoder.decode_whole(structure)
        if decoder.tensors:
            raise _DamagedError("does not refer to all of its tensors")
    except (_DamagedError, ValueError, struct.error) as error:  # of hexadecimal digits and base64
        raise CorruptionError(f"extra: {error}", file=file) from error
    return value


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements, row-major. They are copied only if they are elsewhere or lie otherwise."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy().data) if plain.numel() else memoryview(b"")


class _Encoder:
    """Encodes values; see [Note: extra format].

    Attributes:
        tensors: gets the tensors that are met, in that order.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        # By exact type: what derives from these may hold more than would come back.
        self._known: dict[type, Callable[[Any, str, int], Json]] = {
            type(None): _as_it_is,
            bool: _as_it_is,
            int: _int,
            float: _float,
            str: _str,
            bytes: lambda value, name, depth: {"bytes": base64.b64encode(value).decode()},
            list: self._list,
            tuple: lambda value, name, depth: {"tuple": self._list(value, name, depth)},
            Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            numpy.ndarray: self._array,
        }
        self._known |= dict.fromkeys(_DICTS.values(), self._dict)
        self._known |= dict.fromkeys(_NUMPY.values(), _numpy)

    def encode(self, value: object, name: str, depth: int) -> Json:
        kind = type(value)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name[:200]}... is nested deeper than {MAX_DEPTH} levels, or holds itself")
        if kind not in self._known:
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be committed: give None, bool, int, "
                "float, str, bytes, lists, tuples, dicts, tensors, NumPy arrays and numbers; of an object its state"
            )
        return self._known[kind](value, name, depth)

    def _list(self, value: list[object] | tuple[object, ...], name: str, depth: int) -> Json:
        return [self.encode(item, f"{name}[{number}]", depth + 1) for number, item in enumerate(value)]

    def _dict(self, value: dict[object, object], name: str, depth: int) -> Json:
        pairs: list[Json] = []
        for key, item in value.items():
            if type(key) not in _KEYS:
                raise ConfigError(f"{name} has the key {key!r:.100}: keys have to be str, int, bool or None")
            inside = f"{name}[{key!r:.100}]"
            pairs.append([self.encode(key, f"a key of {name}", 0), self.encode(item, inside, depth + 1)])
        return {type(value).__name__: pairs}

    def _tensor(self, value: Tensor, name: str, depth: int) -> Json:
        if value.layout is not torch.strided or value.is_meta or value.dtype not in DTYPES:
            raise ConfigError(
                f"{name} is a tensor of {value.dtype}, {value.layout}, on {value.device}, which cannot be committed: "
                "give a dense one with values and of a common dtype"
            )
        self.tensors.append(value)
        return {"tensor": len(self.tensors) - 1}

    def _array(self, value: numpy.ndarray[Any, Any], name: str, depth: int) -> Json:
        dtype = getattr(torch, value.dtype.name, None)
        if not value.dtype.isnative or dtype not in DTYPES:
            raise ConfigError(f"{name} is an array of {value.dtype}, which cannot be committed: give one of numbers")
        self.tensors.append(torch.from_numpy(numpy.array(value, order="C")))
        return {"ndarray": len(self.tensors) - 1}


def _as_it_is(value: bool | None, name: str, depth: int) -> Json:
    return value


def _int(value: int, name: str, depth: int) -> Json:
    if -MAX_INT - 1 <= value <= MAX_INT:
        return value
    if value.bit_length() > 4 * (MAX_HEX - 1):
        raise ConfigError(f"{name} is an int of {value.bit_length()} bits, which is too large to be committed")
    return {"int": f"{value:x}"}


def _float(value: float, name: str, depth: int) -> Json:
    return value if math.isfinite(value) else {"float": _FLOAT.pack(value).hex()}


def _str(value: str, name: str, depth: int) -> Json:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is a string with half a character in it (a lone surrogate): give bytes") from None
    return value


def _numpy(value: numpy.generic, name: str, depth: int) -> Json:
    little = numpy.asarray(value).astype(value.dtype.newbyteorder("<"))
    return {"numpy": [value.dtype.name, base64.b64encode(little.tobytes()).decode()]}


class _DamagedError(Exception):
    """What is wrong with a structure."""


class _Decoder:
    """Decodes values; see [Note: extra format].

    Attributes:
        tensors: the tensors that nothing has referred to yet, by number.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._known: dict[str, Callable[[Any, int], object]] = {
            "int": lambda value, depth: _to_int(value),
            "float": lambda value, depth: _to_float(value),
            "bytes": lambda value, depth: _to_bytes(value),
            "tuple": lambda value, depth: tuple(self._list(value, depth)),
            "tensor": lambda value, depth: self._tensor(value),
            "ndarray": lambda value, depth: self._array(value),
            "numpy": lambda value, depth: _to_numpy(value),
        }

    def decode_whole(self, value: Any) -> object:
        if not (isinstance(value, dict) and value.keys() == {"carried"}):
            return self.decode(value, 0)
        *parts, source = _items(value["carried"], 5)
        extra, attached = (self.decode(item, 1) for item in parts[:2])
        drawn, named = (_items(item) for item in parts[2:])
        names = [*drawn, *named, source]
        if not isinstance(attached, dict) or not all(isinstance(name, str) for name in [*attached, *names]):
            raise _DamagedError("what is carried has to be a dict by name, lists of names, and a name")
        return Carried(extra, attached, tuple(drawn), tuple(named), source)

    def decode(self, value: Any, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise _DamagedError(f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            return self._list(value, depth)
        if type(value) is int and not -MAX_INT - 1 <= value <= MAX_INT:
            raise _DamagedError("holds a number that is out of range")
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise _DamagedError("an object has to have one field, which says what it is")
        ((kind, inner),) = value.items()
        if kind in _DICTS:
            return self._dict(inner, depth, _DICTS[kind])
        if kind not in self._known:
            raise _DamagedError(f"{kind[:80]!r} is of a kind that does not exist")
        return self._known[kind](inner, depth)

    def _list(self, values: Any, depth: int) -> list[object]:
        return [self.decode(item, depth + 1) for item in _items(values)]

    def _dict(self, values: Any, depth: int, kind: type[dict[Any, Any]]) -> dict[object, object]:
        found: dict[object, object] = kind()
        for item in _items(values):
            written, value = _items(item, 2)
            key = self.decode(written, MAX_DEPTH)
            if type(key) not in _KEYS or key in found:
                raise _DamagedError("a key is of another type than keys have, or stands there twice")
            found[key] = self.decode(value, depth + 1)
        return found

    def _tensor(self, number: Any) -> Tensor:
        tensor = self.tensors.pop(str(number), None) if type(number) is int else None
        if tensor is None:
            raise _DamagedError("there is no such tensor, or something else refers to it")
        return tensor

    def _array(self, number: Any) -> numpy.ndarray[Any, Any]:
        tensor = self._tensor(number)
        if str(tensor.dtype).removeprefix("torch.") not in _NUMPY:
            raise _DamagedError("no array has this dtype")
        return tensor.numpy()


def _items(value: Any, count: int | None = None) -> list[Any]:
    """The elements of a list.

    Args:
        value: has to be a list.
        count: how many elements it has to have; None: at most MAX_ITEMS.
    """
    if not isinstance(value, list) or len(value) > MAX_ITEMS or count not in (None, len(value)):
        raise _DamagedError(f"expected a list{'' if count is None else f' of {count}'}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _DamagedError("expected a string")
    return value


def _to_int(text: Any) -> int:
    value = int(_text(text)[: MAX_HEX + 1], 16)
    if f"{value:x}" != text or -MAX_INT - 1 <= value <= MAX_INT:
        raise _DamagedError("expected a large int in its shortest hexadecimal form")
    return value


def _to_float(text: Any) -> float:
    value = float(_FLOAT.unpack(bytes.fromhex(_text(text)))[0])
    if math.isfinite(value) or _FLOAT.pack(value).hex() != text:
        raise _DamagedError("expected NaN or an infinity")
    return value


def _to_bytes(text: Any) -> bytes:
    data = base64.b64decode(_text(text), validate=True)
    if base64.b64encode(data).decode() != text:
        raise _DamagedError("expected base64 without stray bits")
    return data


def _to_numpy(value: Any) -> numpy.generic:
    name, text = _items(value, 2)
    if _text(name) not in _NUMPY:
        raise _DamagedError("expected a NumPy dtype")
    dtype, data = numpy.dtype(name).newbyteorder("<"), _to_bytes(text)
    if len(data) != dtype.itemsize:
        raise _DamagedError(f"expected {dtype.itemsize} bytes")
    found: numpy.generic = _NUMPY[name](numpy.frombuffer(data, dtype)[0])
    return found


_PARTS = ("python", "numpy", "torch", "accelerator")


def collect_rng() -> dict[str, object]:
    """The states of the global random number generators.

    They are those of Python's random, of NumPy's legacy generator, of torch on the CPU, and of torch on the
    accelerators if these are in use. What this returns can be committed as, or in, `extra`. Generators of one's own
    have states of their own: `generator.get_state()`, or `generator.bit_generator.state`.
    """
    # Without an accelerator in use there is no state of it; asking for one would start it.
    device = accelerator()
    module = None if device is None else torch.get_device_module(device)
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "accelerator": module.get_rng_state_all() if module is not None and module.is_initialized() else [],
    }


def restore_rng(state: object) -> None:
    """Sets all global random number generators to what they were, or none of them.

    Args:
        state: what `collect_rng` returned.

    Raises:
        ConfigError: it is something else.
        ResumeError: it is of more accelerators than there are.
    """
    if isinstance(state, dict) and "cuda" in state:  # as older versions called it
        state = {"accelerator" if name == "cuda" else name: value for name, value in state.items()}
    if not isinstance(state, dict) or state.keys() != set(_PARTS):
        raise ConfigError("this is no state of random number generators: give what collect_rng() returned")
    wanted = len(state["accelerator"])
    here = torch.accelerator.device_count() if wanted else 0
    if wanted > here:
        raise ResumeError(f"the random number generators are of {wanted} accelerators, and here are {here}")
    before = collect_rng()
    try:
        _set(state)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        _set(before)
        raise ConfigError(f"this is no state of random number generators: {error}") from error


def _set(state: dict[str, object]) -> None:
    random.setstate(state["python"])  # type: ignore[arg-type]
    numpy.random.set_state(state["numpy"])  # type: ignore[arg-type]
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
    if state["accelerator"]:
        torch.get_device_module(accelerator()).set_rng_state_all(state["accelerator"])


def stored(groups: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Option], ...]:
    """The groups' options as a commit stores them.

    Raises:
        ConfigError: an option cannot be stored. The error names it.
    """
    for number, group in enumerate(groups):
        if len(group) > MAX_OPTIONS:
            raise ConfigError(f"param group {number} has {len(group)} keys: at most {MAX_OPTIONS} can be stored")
    return tuple(
        {key: _option(number, group, key) for key in group if key != "params"} for number, group in enumerate(groups)
    )


def _option(number: int, group: Mapping[str, Any], key: object) -> Option:
    allowed = "numbers, strings, bools and None, and lists of these, under short names; keep others elsewhere"
    if not (isinstance(key, str) and is_text(key)):
        raise ConfigError(f"param group {number} has the key {key!r}, which a commit cannot store: {allowed}")
    value = group[key]
    items = list(value) if isinstance(value, list | tuple) else [value]
    try:
        found = [_scalar(item) for item in items]
        if len(found) > MAX_OPTIONS:
            raise ValueError(len(found))
    except (TypeError, ValueError, RuntimeError) as error:
        shown = f"{key}={value!r}"
        raise ConfigError(
            f"param group {number} has {shown:.200}, which a commit cannot store: {allowed}; nothing was changed"
        ) from error
    return tuple(found) if isinstance(value, list | tuple) else found[0]


def _scalar(value: Any) -> Scalar:
    """A value as a plain number, string, bool or None. It may be a tensor or a NumPy scalar.

    Raises:
        TypeError: it is something else.
        ValueError: a commit cannot store the number or string.
        RuntimeError: it is a tensor of several elements.
    """
    # Tensors and NumPy's scalars: a learning rate may be either.
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, str) and not is_text(plain):
        raise ValueError(plain)
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(plain)
    if isinstance(plain, int) and not -(1 << 63) <= plain < 1 << 63:
        raise ValueError(plain)
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(type(plain))
