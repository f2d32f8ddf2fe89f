"""Random damage to valid documents: an error of this library's, or a document that means what it says."""

from __future__ import annotations

import contextlib
import json

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.checkpoint import extra
from offload.checkpoint.commit import parse_commit
from offload.checkpoint.manifest import canonical, digest, parse, serialise
from offload.errors import OffloadError
from offload.sizes import PAGE_BYTES
from offload.storage.swap_format import HEADER_BYTES, parse_header, parse_superblock
from tests.attacks.corpus import VALID_HEADER, VALID_MANIFEST, VALID_RULES, VALID_SUPERBLOCK
from tests.support.committed import RUN, superblock_of

EXAMPLES = 250
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 5, 6, 7, 8, 300, 384, 999, 1000, 1001, 2100, 2112, 1 << 47, 1 << 48, 1 << 63]
)
SPLICES = st.lists(
    st.tuples(
        st.floats(0, 1), st.integers(0, 20), st.binary(max_size=12) | st.sampled_from([b"[", b"]", b",", b"0", b'"'])
    ),
    min_size=1,
    max_size=4,
)


def spliced(data: bytes, splices: list[tuple[float, int, bytes]]) -> bytes:
    for where, length, piece in splices:
        at = int(where * len(data))
        data = data[:at] + piece + data[at + length :]
    return data


def places_of(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_of(item, (*path, key)))]


def changed(document: object, path: tuple[str | int, ...], value: object) -> object:
    if not path:
        return value
    place = document
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    return document


def check_manifest(data: bytes) -> bool:
    """Whether it was taken; if so it means exactly what its bytes say."""
    try:
        manifest = parse(data)
    except OffloadError:
        return False
    assert serialise(manifest) == data
    assert sum(param.numel for param in manifest.parameters) <= sum(flat.numel for flat in manifest.flats)
    return True


@fuzz
@given(SPLICES)
def test_manifests_with_spliced_bytes(splices: list[tuple[float, int, bytes]]) -> None:
    check_manifest(spliced(VALID_MANIFEST, splices))


@fuzz
@given(st.data())
def test_manifests_with_changed_values(data: st.DataObject) -> None:
    document = json.loads(VALID_MANIFEST)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places_of(document)))
        document = changed(document, path, data.draw(NUMBERS | JSON))
    check_manifest(json.dumps(document, separators=(",", ":")).encode() + b"\n")


def test_some_changes_are_taken() -> None:
    """That the fuzz above is not all refused for one reason."""
    assert check_manifest(VALID_MANIFEST)
    assert check_manifest(VALID_RULES)
    assert check_manifest(VALID_MANIFEST.replace(b'"step":7', b'"step":8'))


@fuzz
@given(SPLICES)
def test_records_of_commits(splices: list[tuple[float, int, bytes]]) -> None:
    fields = {
        "schema": "offload commit",
        "version": 1,
        "run_id": RUN,
        "step": 7,
        "replaces": None,
        "manifests": [[5, "0" * 32]] * 3,
    }
    line = spliced(canonical(fields), splices)  # type: ignore[arg-type]
    for data in (line + digest(line).encode() + b"\n", line):
        try:
            record = parse_commit(data)
        except OffloadError:
            continue
        assert record.manifests


@fuzz
@given(SPLICES)
def test_superblocks(splices: list[tuple[float, int, bytes]]) -> None:
    text = VALID_SUPERBLOCK[32:].rstrip(b"\0")
    for page in (superblock_of(spliced(text, splices)[: PAGE_BYTES - 32]), spliced(VALID_SUPERBLOCK, splices)):
        try:
            block = parse_superblock(page, "swap")
        except OffloadError:
            continue
        assert block.stripe[0] < block.stripe[1]


@fuzz
@given(SPLICES)
def test_slot_headers(splices: list[tuple[float, int, bytes]]) -> None:
    damaged = spliced(VALID_HEADER[:HEADER_BYTES], splices).ljust(PAGE_BYTES, b"\0")
    try:
        parse_header(damaged, "swap", 0, 3)
    except OffloadError:
        return
    assert damaged[:HEADER_BYTES] == VALID_HEADER[:HEADER_BYTES]


EXTRA, EXTRA_TENSORS = extra.encode({"a": [(1, 2.5, float("nan"))], 3: torch.zeros(2), "b": b"xy", None: 1 << 70})


@fuzz
@given(st.data())
def test_extra_structures(data: st.DataObject) -> None:
    document = json.loads(json.dumps(EXTRA))
    path = data.draw(st.sampled_from(places_of(document)))
    kinds = st.sampled_from(
        ["int", "float", "bytes", "tuple", "dict", "Counter", "tensor", "ndarray", "numpy", "object"]
    )
    document = changed(document, path, data.draw(JSON | st.dictionaries(kinds, JSON, min_size=1, max_size=1)))
    tensors = {str(number): tensor for number, tensor in enumerate(EXTRA_TENSORS)}
    with contextlib.suppress(OffloadError):
        extra.decode(document, tensors, "manifest")  # type: ignore[arg-type]
