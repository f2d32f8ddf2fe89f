from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload.checkpoint.commit import read_extra
from offload.checkpoint.extra import MAX_DEPTH, decode, encode
from offload.checkpoint.manifest import canonical, parse
from offload.checkpoint.tensors import DTYPES
from offload.errors import ConfigError, CorruptionError
from tests.support.committed import RUN, manifest_of, write_manifest


def same(one: object, other: object) -> bool:
    """Equal in type and in every bit, order of dicts included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and not isinstance(one, numpy.generic):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict) and isinstance(other, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        raw = [x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x for x in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    if isinstance(one, numpy.ndarray | numpy.generic) and isinstance(other, numpy.ndarray | numpy.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return one == other


def through_json(value: object) -> object:
    structure, tensors = encode(value)
    again = json.loads(canonical(structure))
    return decode(again, {str(number): tensor for number, tensor in enumerate(tensors)}, "extra")


VALUES = [
    None,
    True,
    0,
    -1,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
    -(1 << 63) - 1,
    1 << 1000,
    0.1 + 0.2,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    struct.unpack("d", b"\x01\x02\x03\x04\x05\x06\xf8\xff")[0],
    "",
    "é\0\n\U0001f600",
    b"",
    b"\0\xff",
    [],
    (),
    {},
    ((),),
    [[], ({},)],
    {"b": 1, "a": 2, 3: 4, -1: 0, True: None, None: "x", 1 << 70: 5},
    {"tensor": 0},
    {"dict": [["a", 1]]},
    OrderedDict(b=1, a=2),
    Counter({5: 2, 30: 1}),
    numpy.float64(0.1),
    numpy.float32("nan"),
    numpy.int64(-5),
    numpy.uint64((1 << 64) - 1),
    numpy.bool_(True),
    numpy.complex128(1 + 2j),
    numpy.float16(3),
    numpy.arange(7, dtype="uint16").reshape(1, 7),
    numpy.array(5.0),
    numpy.zeros((0, 3)),
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    torch.arange(6).reshape(2, 3).t(),
    torch.zeros(()),
    torch.zeros(0, 4),
    torch.tensor([float("nan"), -0.0]),
    [torch.ones(2), torch.zeros(3)],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {value!r:.30}")
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert same(through_json(value), value)
    assert same(through_json([{"a": (value,)}]), [{"a": (value,)}])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back_from_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 2 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw.bool() if dtype == torch.bool else raw.view(dtype)
    write_manifest(tmp_path, manifest_of(), {"x": tensor, "y": tensor[:, 0]})
    manifest = parse((tmp_path / f"manifest-{RUN}-7-rank0.json").read_bytes())
    found = read_extra(tmp_path, manifest)
    assert isinstance(found, dict)
    assert same(found, {"x": tensor, "y": tensor[:, 0].contiguous()})


def test_a_conjugated_and_a_trained_tensor_come_back_as_plain_ones() -> None:
    from offload.checkpoint.extra import memory_of

    conjugated = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    assert bytes(memory_of(conjugated)) == struct.pack("2f", 1, -2)
    assert bytes(memory_of(torch.nn.Parameter(torch.ones(1)))) == struct.pack("f", 1)


def test_schedulers_come_back() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    schedules = torch.optim.lr_scheduler
    makers = [
        lambda: schedules.CosineAnnealingLR(optimizer, 10),
        lambda: schedules.OneCycleLR(optimizer, 0.1, total_steps=10),
        lambda: schedules.MultiStepLR(optimizer, [3, 3, 5]),
        lambda: schedules.ReduceLROnPlateau(optimizer),
        lambda: schedules.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda: schedules.CosineAnnealingWarmRestarts(optimizer, 4),
    ]
    for make in makers:
        state = make().state_dict()
        assert same(through_json(state), state), state


def test_generators_of_ones_own_come_back() -> None:
    for kind in (numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64):
        generator = numpy.random.Generator(kind(5))
        generator.random(3)
        state = through_json(generator.bit_generator.state)
        expected = generator.random(5).tolist()
        other = numpy.random.Generator(kind(6))
        other.bit_generator.state = state
        assert other.random(5).tolist() == expected
    own = random.Random(3)
    assert same(through_json(own.getstate()), own.getstate())


Point = namedtuple("Point", "x y")


class Text(str):
    __slots__ = ()


deep: list[object] = []
for _ in range(MAX_DEPTH + 1):
    deep = [deep]
endless: dict[str, object] = {}
endless["me"] = endless

REFUSED: list[tuple[object, str]] = [
    ({"scheduler": {"f": lambda x: x}}, r"extra\['scheduler'\]\['f'\] is a builtins.function"),
    ([1, (2, {3})], r"extra\[1\]\[1\] is a builtins.set"),
    (object(), r"^extra is a builtins.object"),
    (Point(1, 2), "Point"),
    (Text("x"), "Text"),
    (defaultdict(int), "defaultdict"),
    (bytearray(b"x"), "bytearray"),
    (1j, "complex"),
    (torch.float32, "torch.dtype"),
    (torch.device("cpu"), "torch.device"),
    ({(1, 2): 3}, r"extra has the key \(1, 2\)"),
    ({1.5: 3}, "has the key 1.5"),
    ("\ud800", "half a character"),
    ({"a": {"\ud800": 1}}, r"a key of extra\['a'\]"),
    (1 << 20_000, "20001 bits"),
    (deep, "nested deeper than 64"),
    (endless, "holds itself"),
    (torch.zeros(2, device="meta"), "on meta"),
    (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    (torch.zeros(2, dtype=torch.complex128), "complex128"),
    (numpy.array(["a"]), "array of <U1"),
    (numpy.array([object()]), "array of object"),
    (numpy.array([1.0], dtype=">f8"), "array of >f8"),
    (numpy.zeros(1, dtype=[("a", "i4")]), "array of"),
    (numpy.longdouble(1), "longdouble"),
    (numpy.datetime64("2020-01-01"), "datetime64"),
    (numpy.str_("x"), "str_"),
    (numpy.ma.array([1]), "MaskedArray"),
]


@pytest.mark.parametrize(("value", "match"), REFUSED, ids=[match[:30] for _, match in REFUSED])
def test_anything_else_is_refused_by_its_place(value: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        encode(value)
    assert len(str(caught.value)) < 600


DAMAGED = [
    {"tensor": 2},
    {"tensor": True},
    {"tensor": -1},
    [{"tensor": 0}, {"tensor": 0}],
    {"ndarray": 1},
    {"pickle": "x"},
    {"dict": {}},
    {"dict": [["a"]]},
    {"dict": [["a", 1], ["a", 2]]},
    {"dict": [[[1], 2]]},
    {"dict": [[{"tuple": []}, 2]]},
    {"int": "12"},
    {"int": "0x" + "f" * 20},
    {"int": "F" * 20},
    {"int": "f" * 5000},
    {"int": "f_f" * 20},
    {"int": 5},
    {"float": "0" * 16},
    {"float": "zz"},
    {"bytes": "YQ"},
    {"bytes": "YR=="},
    {"bytes": "Y Q=="},
    {"bytes": "é"},
    {"bytes": 1},
    {"numpy": ["object", ""]},
    {"numpy": ["float64", "YQ=="]},
    {"numpy": ["float64"]},
    {"tuple": 1},
    {},
    {"a": 1, "b": 2},
    json.loads("[" * 70 + "]" * 70),
]


@pytest.mark.parametrize("structure", DAMAGED, ids=lambda value: json.dumps(value)[:40])
def test_a_structure_that_makes_no_sense_is_refused(structure: object) -> None:
    tensors = {"0": torch.zeros(2), "1": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(CorruptionError, match="extra") as caught:
        decode(structure, tensors, "culprit")  # type: ignore[arg-type]
    assert caught.value.file == "culprit"
    assert "does not refer" not in str(caught.value)


def test_tensors_that_nothing_refers_to_are_refused() -> None:
    assert decode(None, {}, "culprit") is None
    with pytest.raises(CorruptionError, match="does not refer"):
        decode(None, {"0": torch.zeros(2)}, "culprit")


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=20)
)
KEYS = st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=30,
)


@settings(max_examples=100, deadline=None)
@given(NESTED)
def test_whatever_is_nested_comes_back(value: object) -> None:
    assert same(through_json(value), value)
