"""Whatever lies on the disk: a typed error, soon, and without much memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from offload.checkpoint.manifest import parse
from offload.errors import OffloadError
from offload.storage.kept_base import parse_end
from offload.storage.swap_format import parse_header, parse_superblock
from tests.attacks import corpus, fuzz
from tests.attacks.corpus import VALID_BASE, VALID_HEADER, VALID_MANIFEST, VALID_SUPERBLOCK, Attack

SOON_S = 20
"""Generous, as machines are shared: what hangs or is quadratic takes minutes."""
LITTLE_BYTES = 64 << 20

Parser = Callable[[bytes], object]


def as_header(data: bytes) -> object:
    return parse_header(data, "culprit", 4096, 3)


def error_of(parser: Parser, data: bytes) -> Exception | None:
    try:
        parser(data)
    except Exception as error:
        return error
    return None


KINDS: dict[str, tuple[Parser, bytes, Callable[[], Iterable[Attack]]]] = {
    "manifest": (lambda data: parse(data, "culprit"), VALID_MANIFEST, corpus.manifests),
    "superblock": (lambda data: parse_superblock(data, "culprit"), VALID_SUPERBLOCK, corpus.superblocks),
    "header": (as_header, VALID_HEADER, corpus.headers),
    "base": (lambda data: parse_end(data, corpus.BASE_START, "culprit"), VALID_BASE, corpus.bases),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_is_a_typed_error_that_names_the_file(kind: str) -> None:
    parser, valid, attacks = KINDS[kind]
    parser(valid)
    count = 0
    for name, data, error in attacks():
        begin = time.monotonic()
        found = error_of(parser, data)
        assert type(found) is error, name
        assert "culprit" in str(found), name
        assert len(str(found)) < 1000, name
        assert time.monotonic() - begin < SOON_S, name
        count += 1
    assert count > 50


def test_no_attack_takes_much_memory() -> None:
    for kind, (parser, _, attacks) in KINDS.items():
        for name, data, error in attacks():
            # Tracing slows parsing down manyfold; it is allocation by a small document that is looked for.
            if len(data) < 1 << 20:
                tracemalloc.start()
                with pytest.raises(error):
                    parser(data)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < LITTLE_BYTES, f"{kind}: {name}"


def test_a_million_values_take_bounded_memory() -> None:
    million = b"[" + b"[]," * 1_000_000 + b"[]]\n"
    tracemalloc.start()
    with pytest.raises(corpus.CorruptionError):
        parse(million, "culprit")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 28


@pytest.mark.parametrize("kind", KINDS)
def test_the_documents_of_others_are_refused(kind: str) -> None:
    parser = KINDS[kind][0]
    for other, (_, valid, _) in KINDS.items():
        if other != kind:
            with pytest.raises(corpus.CorruptionError):
                parser(valid)


@pytest.mark.parametrize("found", sorted(fuzz.FOUND.glob("*-*")), ids=lambda path: path.name)
def test_what_a_fuzzer_found_is_answered_in_order(found: Path) -> None:
    begin = time.monotonic()
    fuzz.try_one(found.name.partition("-")[0], found.read_bytes())
    assert time.monotonic() - begin < SOON_S


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_the_fuzzer_begins_with_documents_that_are_taken(kind: str) -> None:
    assert any(taken(kind, variant) for data in fuzz.seeds(kind) for variant in fuzz.variants(kind, data))


def taken(kind: str, data: bytes) -> bool:
    try:
        fuzz.CHECKS[kind](data)
    except OffloadError:
        return False
    return True
