"""What a user commits along with a run: schedulers, RNG states, the position in the data. No pickle.

[Note: extra format]
A value becomes JSON and a list of tensors. null, true, false, strings, finite floats and ints of up to 63 bits are
themselves, a list is a list; everything else is an object of one field that says what it is:

    {"int": "-8f.."}      a larger int, hexadecimal             {"float": "7ff8000000000000"}  NaN, infinities: the bits
    {"bytes": base64}                                          {"tuple": [..]}
    {"dict": [[key, value], ..]}, {"OrderedDict": ..}, {"Counter": ..}: keys are str, int, bool or null
    {"tensor": n}         the n-th tensor, as it is             {"ndarray": n}  the n-th tensor, as an array
    {"numpy": [dtype, base64]}  a NumPy scalar: "float64", and its bytes, little-endian

What comes back equals what was given, type, bits and order included. A tensor comes back dense, row-major, without
gradient, on the CPU.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from offload.checkpoint.strict import MAX_INT, Json, Node
from offload.checkpoint.tensors import DTYPES
from offload.errors import ConfigError

MAX_DEPTH = 64
MAX_HEX = 1 << 12
"""Digits of a large int: 16,384 bits."""
MAX_ITEMS = 1 << 22

_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_NUMPY = {
    name: numpy.dtype(name).type
    for name in ("bool", *_INTS, "float16", "float32", "float64", "complex64", "complex128")
}
_KEYS = (str, int, bool, type(None))
_FLOAT = struct.Struct(">d")


def encode(value: object) -> tuple[Json, list[Tensor]]:
    """`value` as JSON, and the tensors it refers to; see [Note: extra format].

    Raises: ConfigError naming the part that cannot be stored, such as extra['scheduler']['f'].
    """
    encoder = _Encoder()
    return encoder.encode(value, "extra", 0), encoder.tensors


def decode(structure: Json, tensors: Mapping[str, Tensor], file: str) -> object:
    """The inverse of `encode`; `tensors` by their number, as a string.

    Raises: CorruptionError naming `file` and the place in it.
    """
    decoder = _Decoder(dict(tensors))
    root = Node(structure, "extra", file)
    value = decoder.decode(root, 0)
    if decoder.tensors:
        root.refuse("does not refer to all of its tensors")
    return value


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements, row-major; a copy only if they are elsewhere or lie otherwise."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy().data) if plain.numel() else memoryview(b"")


class _Encoder:
    """Attribute: tensors, in the order in which they were met."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        # By exact type: what derives from these may hold more than would come back.
        self._known: dict[type, Callable[[Any, str, int], Json]] = {
            type(None): _as_it_is,
            bool: _as_it_is,
            int: _int,
            float: _float,
            str: _str,
            bytes: lambda value, place, depth: {"bytes": base64.b64encode(value).decode()},
            list: self._list,
            tuple: lambda value, place, depth: {"tuple": self._list(value, place, depth)},
            Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            numpy.ndarray: self._array,
        }
        self._known |= dict.fromkeys(_DICTS.values(), self._dict)
        self._known |= dict.fromkeys(_NUMPY.values(), _numpy)

    def encode(self, value: object, place: str, depth: int) -> Json:
        kind = type(value)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{place[:200]}... is nested deeper than {MAX_DEPTH} levels, or holds itself")
        if kind not in self._known:
            raise ConfigError(
                f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be committed: give None, bool, int, "
                "float, str, bytes, lists, tuples, dicts, tensors, NumPy arrays and numbers; of an object its state"
            )
        return self._known[kind](value, place, depth)

    def _list(self, value: list[object] | tuple[object, ...], place: str, depth: int) -> Json:
        return [self.encode(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(value)]

    def _dict(self, value: dict[object, object], place: str, depth: int) -> Json:
        pairs: list[Json] = []
        for key, item in value.items():
            if type(key) not in _KEYS:
                raise ConfigError(f"{place} has the key {key!r:.100}: keys have to be str, int, bool or None")
            inside = f"{place}[{key!r:.100}]"
            pairs.append([self.encode(key, f"a key of {place}", 0), self.encode(item, inside, depth + 1)])
        return {type(value).__name__: pairs}

    def _tensor(self, value: Tensor, place: str, depth: int) -> Json:
        if value.layout is not torch.strided or value.is_meta or value.dtype not in DTYPES:
            raise ConfigError(
                f"{place} is a tensor of {value.dtype}, {value.layout}, on {value.device}, which cannot be committed: "
                "give a dense one with values and of a common dtype"
            )
        self.tensors.append(value)
        return {"tensor": len(self.tensors) - 1}

    def _array(self, value: numpy.ndarray[Any, Any], place: str, depth: int) -> Json:
        dtype = getattr(torch, value.dtype.name, None)
        if not value.dtype.isnative or dtype not in DTYPES:
            raise ConfigError(f"{place} is an array of {value.dtype}, which cannot be committed: give one of numbers")
        self.tensors.append(torch.from_numpy(numpy.array(value, order="C")))
        return {"ndarray": len(self.tensors) - 1}


def _as_it_is(value: bool | None, place: str, depth: int) -> Json:
    return value


def _int(value: int, place: str, depth: int) -> Json:
    if -MAX_INT - 1 <= value <= MAX_INT:
        return value
    if value.bit_length() > 4 * (MAX_HEX - 1):
        raise ConfigError(f"{place} is an int of {value.bit_length()} bits, which is too large to be committed")
    return {"int": f"{value:x}"}


def _float(value: float, place: str, depth: int) -> Json:
    return value if math.isfinite(value) else {"float": _FLOAT.pack(value).hex()}


def _str(value: str, place: str, depth: int) -> Json:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{place} is a string with half a character in it: give bytes") from None
    return value


def _numpy(value: numpy.generic, place: str, depth: int) -> Json:
    little = numpy.asarray(value).astype(value.dtype.newbyteorder("<"))
    return {"numpy": [value.dtype.name, base64.b64encode(little.tobytes()).decode()]}


class _Decoder:
    """Attribute: tensors, those that nothing has referred to yet."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._known: dict[str, Callable[[Node, int], object]] = {
            "int": _to_int,
            "float": _to_float,
            "bytes": lambda node, depth: _to_bytes(node),
            "tuple": lambda node, depth: tuple(self._list(node, depth)),
            "tensor": lambda node, depth: self._tensor(node),
            "ndarray": lambda node, depth: self._array(node),
            "numpy": _to_numpy,
        }

    def decode(self, node: Node, depth: int) -> object:
        value = node.value
        if depth > MAX_DEPTH:
            node.refuse(f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            return self._list(node, depth)
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            node.refuse("expected one field that says what this is")
        kind, inner = node.pairs()[0]
        if kind in _DICTS:
            return self._dict(inner, depth, _DICTS[kind])
        if kind not in self._known:
            node.refuse("is of a kind that does not exist")
        return self._known[kind](inner, depth)

    def _list(self, node: Node, depth: int) -> list[object]:
        return [self.decode(item, depth + 1) for item in node.items(MAX_ITEMS)]

    def _dict(self, node: Node, depth: int, kind: type[dict[Any, Any]]) -> dict[object, object]:
        found: dict[object, object] = kind()
        for item in node.items(MAX_ITEMS):
            pair = item.items(2)
            if len(pair) != 2:
                item.refuse("expected a key and a value")
            key = self.decode(pair[0], MAX_DEPTH)
            if type(key) not in _KEYS or key in found:
                item.refuse("its key is of another type than keys have, or stands there twice")
            found[key] = self.decode(pair[1], depth + 1)
        return found

    def _tensor(self, node: Node) -> Tensor:
        tensor = self.tensors.pop(str(node.integer(MAX_ITEMS)), None)
        if tensor is None:
            node.refuse("there is no such tensor, or something else refers to it")
        return tensor

    def _array(self, node: Node) -> numpy.ndarray[Any, Any]:
        tensor = self._tensor(node)
        if str(tensor.dtype).removeprefix("torch.") not in _NUMPY:
            node.refuse("no array has this dtype")
        return tensor.numpy()


def _to_int(node: Node, depth: int) -> int:
    text = node.text(MAX_HEX)
    try:
        value = int(text, 16)
    except ValueError:
        node.refuse("expected hexadecimal digits")
    if f"{value:x}" != text or -MAX_INT - 1 <= value <= MAX_INT:
        node.refuse("expected a large int in its shortest form")
    return value


def _to_float(node: Node, depth: int) -> float:
    value = float(_FLOAT.unpack(bytes.fromhex(node.hex(16)))[0])
    if math.isfinite(value):
        node.refuse("expected NaN or an infinity")
    return value


def _to_bytes(node: Node) -> bytes:
    if not isinstance(node.value, str):
        node.refuse("expected base64")
    try:
        data = base64.b64decode(node.value, validate=True)
    except (binascii.Error, ValueError):
        node.refuse("expected base64")
    if base64.b64encode(data).decode() != node.value:
        node.refuse("expected base64 without stray bits")
    return data


def _to_numpy(node: Node, depth: int) -> numpy.generic:
    parts = node.items(2)
    if len(parts) != 2:
        node.refuse("expected dtype and bytes")
    dtype = numpy.dtype(parts[0].one_of(tuple(_NUMPY))).newbyteorder("<")
    data = _to_bytes(parts[1])
    if len(data) != dtype.itemsize:
        parts[1].refuse(f"expected {dtype.itemsize} bytes")
    value: numpy.generic = _NUMPY[dtype.name](numpy.frombuffer(data, dtype)[0])
    return value
