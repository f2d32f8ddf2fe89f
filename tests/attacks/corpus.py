"""Hostile documents: each a name, the bytes, and the error that reading it has to end in."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import xxhash

from offload.checkpoint.manifest import MAX_BYTES, ProgressFacts, serialise
from offload.errors import CorruptionError, OffloadError, ResumeError
from offload.sizes import PAGE_BYTES
from offload.storage import swap_format as slots
from offload.storage.swap_format import MAX_NUMEL
from tests.support.committed import RUN, STEP, header, manifest_of, superblock, superblock_of
from tests.support.damage import flipped

Attack = tuple[str, bytes, type[OffloadError]]

VALID_MANIFEST = serialise(
    manifest_of(paths=2, extra={"dict": [["epoch", 3], [5, {"tuple": [1.5]}]]}, split_master=True)
)


def _of_rules() -> bytes:
    """Version 3: SGD and NAdam beside each other, in flats of their own."""
    plain = manifest_of(paths=2)
    progress = {
        "embed.weight": ProgressFacts((), ("momentum_buffer",)),
        "blocks.0.norm": ProgressFacts(
            (("step", 7.0, "float32"), ("mu_product", 0.25, "float32"), ("count", 3, None)), ()
        ),
    }
    return serialise(
        replace(
            plain,
            parameters=tuple(replace(one, progress=progress.get(one.name)) for one in plain.parameters),
            flats=tuple(replace(one, states=("momentum_buffer",)) for one in plain.flats),
            rules=("SGD", "NAdam"),
        )
    )


VALID_RULES = _of_rules()
VALID_SUPERBLOCK = superblock(manifest_of(paths=2), 1)
VALID_HEADER = header(RUN, 3, STEP, 1000, 12345)

HUGE = "1" + "0" * 4000
NUMBERS: list[Any] = [-1, 1 << 63, 1 << 64, 1 << 400, True, False, 1.0, 1.5, -0.0, "1", None, [], [1], {}]
"""For a place where a small whole number is expected."""


def edited(path: tuple[str | int, ...], value: object, valid: bytes = VALID_MANIFEST) -> bytes:
    """The valid manifest with one value replaced."""
    document = json.loads(valid)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def without(path: tuple[str | int, ...], valid: bytes = VALID_MANIFEST) -> bytes:
    document = json.loads(valid)
    place = document
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


WHOLE_NUMBERS: list[tuple[str | int, ...]] = [
    ("step",),
    ("rank",),
    ("world",),
    ("paths",),
    ("places",),
    ("parameters", 0, "shape", 0),
    ("parameters", 1, "order", 0),
    ("parameters", 0, "group"),
    ("parameters", 0, "age"),
    ("flats", 0, "numel"),
    ("flats", 0, "params", 0),
    ("flats", 1, "offsets", 1),
    ("flats", 0, "owned", 1),
    *((name, 1, column) for name in ("chunks", "copies") for column in range(6)),
]
ALL_FIELDS: list[tuple[str | int, ...]] = [
    *((name,) for name in json.loads(VALID_MANIFEST)),
    *(("parameters", 0, name) for name in json.loads(VALID_MANIFEST)["parameters"][0]),
    *(("flats", 0, name) for name in json.loads(VALID_MANIFEST)["flats"][0]),
    *((name, 0, column) for name in ("chunks", "copies") for column in range(7)),
]
NAMES = ["a\0b", "a\nb", "\x7f", "\x9f", "x" * 5000, "\ud800", 5, None, ["a"]]

INCONSISTENT: list[tuple[str, tuple[str | int, ...], object]] = [
    ("a gap between chunks", ("chunks", 1, 1), 1001),
    ("an overlap of chunks", ("chunks", 1, 1), 999),
    ("a chunk that ends early", ("chunks", 0, 2), 999),
    ("a chunk that ends late", ("chunks", 2, 2), 113),
    ("an overlap that leaves no gap", ("chunks", 1), [0, 999, 1001, 1, 1, 6, "0" * 16]),
    ("an empty chunk", ("chunks", 0, 2), 0),
    ("a chunk of no flat", ("chunks", 4, 0), 3),
    ("chunks out of order", ("chunks", 0, 0), 1),
    ("a path that is not there", ("chunks", 0, 3), 2),
    ("a place that is not there", ("chunks", 0, 4), 2),
    ("a chunk of a later step", ("chunks", 0, 5), STEP + 1),
    ("no chunks", ("chunks",), []),
    ("no copies", ("copies",), []),
    ("copies of other chunks", ("copies", 0, 2), 999),
    ("a copy on a path that is not there", ("copies", 0, 3), 2),
    ("a copy in a place that is not there", ("copies", 0, 4), 2),
    ("a copy of a later step", ("copies", 0, 5), STEP + 1),
    ("copies of whole masters", ("split_master",), False),
    ("a checksum too short", ("chunks", 0, 6), "0"),
    ("a checksum in capitals", ("chunks", 0, 6), "000000000000000A"),
    ("a checksum with a sign", ("chunks", 0, 6), "-00000000000000a"),
    ("a parameter past its flat", ("flats", 0, "offsets"), [1000]),
    ("parameters that overlap", ("flats", 1, "offsets"), [0, 359, 360]),
    ("parameters out of order", ("flats", 1, "offsets"), [385, 0, 385]),
    ("too few offsets", ("flats", 1, "offsets"), [0, 384]),
    ("a parameter twice", ("flats", 1, "params"), [1, 1, 3]),
    ("a parameter in no flat", ("flats", 1), {"params": [1, 2], "offsets": [0, 384], "numel": 386, "owned": [0, 386]}),
    ("a parameter that does not exist", ("flats", 0, "params"), [5]),
    ("two dtypes in a flat", ("parameters", 2, "dtype"), "float32"),
    ("two units in a flat", ("parameters", 2, "unit"), "blocks.1"),
    ("two parameters of one name", ("parameters", 1, "name"), "embed.weight"),
    ("owned backwards", ("flats", 0, "owned"), [10, 0]),
    ("owned of three", ("flats", 0, "owned"), [0, 1, 2112]),
    ("a sum too large", ("flats", 2), {"params": [4], "offsets": [0], "numel": MAX_NUMEL, "owned": [0, 10]}),
    ("a product too large", ("parameters", 0, "shape"), [1 << 40, 1 << 40]),
    ("a product that would overflow to zero", ("parameters", 3, "shape"), [1 << 32, 1 << 32]),
    ("too many dimensions", ("parameters", 3, "shape"), [0] * 65),
    ("an order that repeats", ("parameters", 1, "order"), [0, 2, 2, 1]),
    ("an order of too few", ("parameters", 1, "order"), [0, 2, 1]),
    ("an order that is none", ("parameters", 1, "order"), [0, 1, 2, 3]),
    ("a group that does not exist", ("parameters", 0, "group"), 2),
    ("more steps than there were", ("parameters", 0, "age"), STEP + 1),
    ("a rank outside the world", ("rank",), 1),
    ("a world of none", ("world",), 0),
    ("a dtype that does not exist", ("parameters", 0, "dtype"), "float64"),
    ("a compute dtype that does not exist", ("compute_dtype",), "int8"),
    ("a run id in capitals", ("run_id",), RUN.upper()),
    ("a run id that is a path", ("run_id",), "../../../../../../../../etc/passwd"),
    ("a hyper-parameter called params", ("groups", 0, "params"), []),
    ("a nested hyper-parameter", ("groups", 0, "lr"), [[1]]),
    ("an object as hyper-parameter", ("groups", 0, "lr"), {}),
    ("too many hyper-parameters", ("groups", 0), {str(number): 0 for number in range(300)}),
    ("a hyper-parameter with a bad name", ("groups", 0), {"\0": 0}),
    ("a digest of three", ("tensors",), [1, "0" * 32, 1]),
    ("a digest without length", ("tensors",), ["0" * 32]),
    ("a digest of a negative length", ("tensors",), [-1, "0" * 32]),
]


SCALARS = ("parameters", 4, "progress", "scalars")
OF_RULES: list[tuple[str, tuple[str | int, ...], object]] = [
    ("too few rules", ("rules",), ["SGD"]),
    ("no rules", ("rules",), []),
    ("a rule with a bad name", ("rules", 0), "a\0b"),
    ("a rule that is a number", ("rules", 0), 5),
    ("rules in an older version", ("version",), 2),
    ("two states of one name", ("flats", 0, "states"), ["momentum_buffer", "momentum_buffer"]),
    ("a state called as the master", ("flats", 0, "states"), ["master"]),
    ("a state that is not in the slots", ("parameters", 0, "progress", "arrays"), ["exp_avg"]),
    ("a master among the states", ("parameters", 0, "progress", "arrays"), ["master"]),
    ("a state twice", ("parameters", 0, "progress", "arrays"), ["momentum_buffer", "momentum_buffer"]),
    ("states that are a number", ("flats", 0, "states"), 1),
    ("progress of nothing", ("parameters", 0, "progress"), {"scalars": [], "arrays": []}),
    ("progress that is null", ("parameters", 1, "progress"), None),
    ("two numbers of one name", (*SCALARS, 1, 0), "step"),
    ("a number called as an array", ("parameters", 0, "progress", "scalars"), [["momentum_buffer", 1, None]]),
    ("a number without a dtype", (*SCALARS, 0), ["step", 7.0]),
    ("a number that is text", (*SCALARS, 0, 1), "7"),
    ("a dtype that torch does not have", (*SCALARS, 0, 2), "float31"),
    ("a number that its dtype cannot hold", (*SCALARS, 0, 1), 1e300),
    ("a number that its dtype would round", (*SCALARS, 1, 1), 0.1),
    ("a whole number in place of a broken one", (*SCALARS, 0, 1), 7),
    ("a whole number that its dtype cannot hold", (*SCALARS, 2), ["count", 1 << 40, "int32"]),
    ("a number in place of a bool", (*SCALARS, 2), ["count", 1, "bool"]),
]


def manifests() -> Iterator[Attack]:
    for path in WHOLE_NUMBERS:
        for value in NUMBERS:
            if not (value is None and path[-1] == "order"):
                yield f"{path} is {str(value)[:24]}", edited(path, value), CorruptionError
    for path in ALL_FIELDS:
        yield f"without {path}", without(path), CorruptionError
        for value in (float("nan"), float("inf"), [[[[]]]], {"a": {}}):
            if path != ("extra",) or isinstance(value, float):
                yield f"{path} is {value}", edited(path, value), CorruptionError
    for name in NAMES:
        for path in (("parameters", 0, "name"), ("parameters", 0, "unit")):
            yield f"{path} is {str(name)[:24]!r}", edited(path, name), CorruptionError
    for name, path, value in INCONSISTENT:
        yield name, edited(path, value), CorruptionError
    rows = json.loads(VALID_MANIFEST)["chunks"]
    yield "flats in another order", edited(("chunks",), [rows[3], *rows[:3], rows[4]]), CorruptionError
    yield "chunks of a flat in another order", edited(("chunks",), [rows[1], rows[0], *rows[2:]]), CorruptionError
    yield from _spellings()
    yield "an older version", edited(("version",), 1), ResumeError
    yield "the version of rules, and none", edited(("version",), 3), CorruptionError
    yield "the version of forms, and none", edited(("version",), 4), CorruptionError
    yield "the version of shapes, and none", edited(("version",), 5), CorruptionError
    yield "the version of kept bases, and none", edited(("version",), 6), CorruptionError
    yield "the version of three slots a chunk, and two", edited(("version",), 7), CorruptionError
    yield "a newer version", edited(("version",), 8), ResumeError
    yield "a much newer version", edited(("version",), 1 << 62), ResumeError
    for version in (0, -1, True, 2.0, "2", None):
        yield f"version {version!r}", edited(("version",), version), CorruptionError
    yield "another schema", edited(("schema",), "offload commit"), CorruptionError
    yield "an unknown field", edited(("more",), 1), CorruptionError
    yield "an unknown field of a parameter", edited(("parameters", 0, "more"), 1), CorruptionError
    for name, path, value in OF_RULES:
        yield name, edited(path, value, VALID_RULES), CorruptionError
    for path in (
        ("rules",),
        ("version",),
        ("parameters", 0, "progress", "arrays"),
        ("parameters", 4, "progress", "scalars"),
    ):
        yield f"a manifest of rules without {path}", without(path, VALID_RULES), CorruptionError


def _spellings() -> Iterator[Attack]:
    swap: Callable[[bytes, bytes], bytes] = lambda old, new: VALID_MANIFEST.replace(old, new, 1)  # noqa: E731
    texts = {
        "nothing": b"",
        "a newline": b"\n",
        "null": b"null\n",
        "a list": b"[]\n",
        "a number": b"1\n",
        "a string": b'"offload manifest"\n',
        "no JSON": b"\x80\x04\x95.",
        "no text": bytes(range(256)),
        "UTF-16": VALID_MANIFEST.decode().encode("utf-16"),
        "a mark before it": b"\xef\xbb\xbf" + VALID_MANIFEST,
        "a blank after it": VALID_MANIFEST + b" ",
        "no newline at its end": VALID_MANIFEST[:-1],
        "two of them": VALID_MANIFEST * 2,
        "blanks in it": swap(b",", b", "),
        "a key twice": swap(b'"step":', b'"step":7,"step":'),
        "keys in another order": swap(b'"step":7,"rank":0', b'"rank":0,"step":7'),
        "an escaped key": swap(b'"step"', b'"\\u0073tep"'),
        "a number with an exponent": swap(b'"step":7', b'"step":7e0'),
        "a negative zero": swap(b'"rank":0', b'"rank":-0'),
        "a hex number": swap(b'"step":7', b'"step":0x7'),
        "a leading zero": swap(b'"step":7', b'"step":07'),
        "a number of 4,000 digits": swap(b'"step":7', b'"step":' + HUGE.encode()),
        "a float of 4,000 digits": swap(b"0.001", b"0." + HUGE.encode()),
        "an infinite float": swap(b"0.001", b"1e400"),
        "NaN": swap(b"0.001", b"NaN"),
        "minus Infinity": swap(b"0.001", b"-Infinity"),
        "a deep list": b"[" * 500_000,
        "a deep object": b'{"a":' * 100_000,
        "a deep extra": swap(b'"extra":', b'"extra":' + b"[" * 2000 + b"]" * 2000 + b',"x":'),
        "nine million values": b"[" + b"0," * 9_000_000 + b"0]\n",
        "too many bytes": b" " * (MAX_BYTES + 1),
        "a comment": VALID_MANIFEST + b"// x\n",
        "single quotes": VALID_MANIFEST.replace(b'"', b"'"),
    }
    for name, text in texts.items():
        yield name, text, CorruptionError
    for cut in range(0, len(VALID_MANIFEST), 37):
        yield f"cut after {cut}", VALID_MANIFEST[:cut], CorruptionError


def superblocks() -> Iterator[Attack]:
    known = {"run_id": RUN, "places": 2, "stripe": [1, 2], "commits": True}
    chunks = {"held": [1, 3], "numels": [1000] * 4}
    wrong: list[tuple[str, dict[str, object]]] = [
        *((f"places {value!s:.20}", {"places": value}) for value in NUMBERS if value != 1),
        *((f"stripe {value!s:.20}", {"stripe": [value, 2]}) for value in NUMBERS if value not in (0, 1)),
        ("stripe outside", {"stripe": [2, 2]}),
        ("stripe of one", {"stripe": [1]}),
        ("stripe of three", {"stripe": [0, 1, 2]}),
        ("stripe of none", {"stripe": [0, 0]}),
        ("commits 1", {"commits": 1}),
        ("commits null", {"commits": None}),
        ("run id short", {"run_id": RUN[1:]}),
        ("run id a path", {"run_id": "../" * 10 + "xy"}),
        ("held outside", {"chunks": {"held": [4], "numels": [1000] * 4}}),
        ("held negative", {"chunks": {"held": [-1], "numels": [1000] * 4}}),
        ("numels negative", {"chunks": {"held": [0], "numels": [-1]}}),
        ("numels huge", {"chunks": {"held": [0], "numels": [1 << 60]}}),
        ("chunks a list", {"chunks": []}),
        ("chunks null", {"chunks": None}),
        ("a digest short", {"chunks": {"xxh3": "00"}}),
        ("a digest and more", {"chunks": {"xxh3": "0" * 16, "held": []}}),
        ("unknown field", {"more": 1}),
    ]
    for name, changes in wrong:
        yield name, superblock_of(json.dumps({**known, "chunks": chunks, **changes}).encode()), CorruptionError
    texts = (
        b"",
        b"null",
        b"[]",
        b"\xff" * 100,
        b"[" * 4000,
        b'{"run_id":' * 300,
        b'{"a":1,"a":2}',
        HUGE.encode()[:4000],
    )
    for text in texts:
        yield f"text {text[:12]!r}", superblock_of(text), CorruptionError
    yield "nothing", b"", CorruptionError
    yield "half a page", VALID_SUPERBLOCK[: PAGE_BYTES // 2], CorruptionError
    yield "zeros", bytes(PAGE_BYTES), CorruptionError
    yield "a slot header", VALID_HEADER, CorruptionError
    yield "newer", superblock_of(b"anything", slots.FORMAT_OF_TRIALS + 1), ResumeError
    yield "newest", superblock_of(b"anything", (1 << 32) - 1), ResumeError
    yield "older", superblock_of(b"anything", 0), CorruptionError
    for length in (PAGE_BYTES - 31, PAGE_BYTES, (1 << 32) - 1):
        page = bytearray(VALID_SUPERBLOCK)
        page[20:24] = length.to_bytes(4, "little")
        yield f"text of {length} bytes", bytes(page), CorruptionError
    for position in (0, 15, 20, 24, 31, 32, 60, 90):
        yield (
            f"bit {position}",
            flipped(VALID_SUPERBLOCK, position),
            (ResumeError if position == 16 else CorruptionError),
        )


def headers() -> Iterator[Attack]:
    yield "nothing", b"", CorruptionError
    yield "half a header", VALID_HEADER[:40], CorruptionError
    yield "zeros", bytes(PAGE_BYTES), CorruptionError
    yield "ones", b"\xff" * PAGE_BYTES, CorruptionError
    yield "a superblock", VALID_SUPERBLOCK, CorruptionError
    yield "another magic", header(RUN, 3, STEP, 1000, 1, magic=b"off sl0t"), CorruptionError
    yield "newer", header(RUN, 3, STEP, 1000, 1, slots.FORMAT + 1), ResumeError
    yield "older", header(RUN, 3, STEP, 1000, 1, 0), CorruptionError
    most = (1 << 64) - 1
    yield "a huge chunk", header(RUN, most, STEP, 1000, 1), CorruptionError
    yield "a huge step", header(RUN, 3, most, 1000, 1), CorruptionError
    yield "a huge slot", header(RUN, 3, STEP, most, 1), CorruptionError
    for position in range(slots._HEADER.size + slots._CHECKSUM.size):
        yield f"bit {position}", flipped(VALID_HEADER, position), CorruptionError


BASE_START = 3 * PAGE_BYTES
"""Where the tensors of VALID_BASE end."""
BASE_ROWS: list[list[Any]] = [
    ["layers.0.weight", "uint8", 5000, "0123456789abcdef"],
    ["layers.0.weight.absmax", "float32", 0, ""],
]


def base_end(about: object, sums: bytes = bytes(8), start: int = BASE_START, **footer: int) -> bytes:
    """What follows the tensors of a kept base, with the right checksum. Args: footer: "offset", "length", "size"."""
    text = about if isinstance(about, bytes) else json.dumps(about, separators=(",", ":")).encode()
    both = text + sums
    told = {"offset": start, "length": len(text), "size": len(both)} | footer
    end = struct.pack("<16sQQQ16s", b"offload base 2\n\0", *told.values(), xxhash.xxh3_128_digest(both))
    return both.ljust(-(-len(both) // PAGE_BYTES) * PAGE_BYTES, b"\0") + end.ljust(PAGE_BYTES, b"\0")


VALID_BASE = base_end({"tensors": BASE_ROWS})


def bases() -> Iterator[Attack]:
    first, last = BASE_ROWS
    for value in (*NUMBERS, 1 << 48, 5001 << 10):
        yield f"elements {value!s:.20}", base_end({"tensors": [[*first[:2], value, first[3]], last]}), CorruptionError
    for place in (0, 1, 3):
        for value in (None, 7, [], {}, "x" * 2000, "\ud800", "a" * 100_000):
            rows = [[*first[:place], value, *first[place + 1 :]], last]
            if place or not isinstance(value, str) or value == "\ud800":
                yield f"{place} is {value!r:.20}", base_end({"tensors": rows}), CorruptionError
    wrong: list[tuple[str, object]] = [
        ("no rows", {"tensors": []}),
        ("one name twice", {"tensors": [first, [first[0], *last[1:]]]}),
        ("a long name twice", {"tensors": [["x" * 10_000, *first[1:]], ["x" * 10_000, *last[1:]]]}),
        ("a row too long", {"tensors": [[*first, 0], last]}),
        ("a row too short", {"tensors": [first[:3], last]}),
        ("rows in an object", {"tensors": {"0": first}}),
        ("a field more", {"tensors": BASE_ROWS, "more": 1}),
        ("a field less", {}),
        ("wider elements", {"tensors": [[first[0], "float64", *first[2:]], last]}),
        ("a dtype of torch's that is none", {"tensors": [[first[0], "nn", *first[2:]], last]}),
        ("a digest of no digits", {"tensors": [[*first[:3], "0123456789abcdeF"], last]}),
        ("a list", BASE_ROWS),
        ("null", None),
    ]
    for name, about in wrong:
        yield name, base_end(about), CorruptionError
    for text in (b"", b"[" * 100_000, b'{"tensors":' * 10_000, HUGE.encode(), b"\xff" * 100, b'{"tensors": []}'):
        yield f"text {text[:12]!r}", base_end(text), CorruptionError
    known = {"tensors": BASE_ROWS}
    yield "blanks", base_end(json.dumps(known).encode()), CorruptionError
    yield "a field twice", base_end(VALID_BASE[: VALID_BASE.index(b"}")] + b',"tensors":[]}'), CorruptionError
    yield "no sums", base_end(known, b""), CorruptionError
    yield "too few sums", base_end(known, bytes(7)), CorruptionError
    yield "too many sums", base_end(known, bytes(16)), CorruptionError
    for field in ("offset", "length", "size"):
        for number in (0, 1, PAGE_BYTES, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
            yield f"{field} {number}", base_end(known, **{field: number}), CorruptionError
    yield "nothing", b"", CorruptionError
    yield "zeros", bytes(2 * PAGE_BYTES), CorruptionError
    for cut in (1, 100, PAGE_BYTES, PAGE_BYTES + 1, len(VALID_BASE) - 1):
        yield f"cut after {cut}", VALID_BASE[:cut], CorruptionError
    for position in (0, 20, 60, PAGE_BYTES, PAGE_BYTES + 17, PAGE_BYTES + 25, PAGE_BYTES + 33, PAGE_BYTES + 41, -1):
        yield f"bit {position}", flipped(VALID_BASE, position % len(VALID_BASE)), CorruptionError


JSON_OF_OTHERS: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"1",
    "a string": b'"weight_map"',
    "null": b"null",
    "a deep list": b"[" * 100_000,
    "a deep list that ends": b"[" * 100_000 + b"]" * 100_000,
    "a deep object": b'{"a":' * 100_000,
    "no text": bytes(range(256)),
    "bad UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "NaN": b'{"a": NaN}',
    "an infinite number": b'{"a": 1e999}',
    "minus Infinity": b'{"a": -Infinity}',
    "a number of 5,000 digits": b'{"a": ' + b"9" * 5_000 + b"}",
    "a key twice": b'{"a": 1, "a": 2}',
    "a key twice below": b'{"a": {"b": 1, "b": 2}}',
    "a key twice among many": b"{" + b",".join(b'"%d":1' % (n % 199_999) for n in range(200_000)) + b"}",
    "five million values": b'{"a": [' + b"0," * 5_000_000 + b"0]}",
    "half of it": b'{"a": {"b":',
    "two of them": b"{}{}",
}
"""What is no JSON object, or none that says one thing."""
