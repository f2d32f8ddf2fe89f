from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.checkpoint.manifest import (
    MAX_BYTES,
    MAX_CHUNKS,
    MAX_COMMAS,
    ROW_BYTES,
    ChunkFacts,
    Digest,
    FlatFacts,
    LateFacts,
    Manifest,
    ParameterFacts,
    parse,
    require_room,
    serialise,
)
from offload.errors import ConfigError, CorruptionError, ResumeError
from offload.layout import ParamSpec, build
from offload.optim.late import MOST_OWED
from offload.storage.swap_format import MAX_NUMEL
from tests.support.committed import GROUPS, RUN, STEP, manifest_of


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("paths", [1, 3])
def test_a_manifest_comes_back_as_it_was(world: int, paths: int) -> None:
    for rank in range(world):
        manifest = manifest_of(rank, world, paths)
        again = parse(serialise(manifest))
        assert again == manifest
        assert serialise(again) == serialise(manifest)


def test_everything_in_it_comes_back() -> None:
    options = {
        "lr": 1e-300,
        "betas": (0.9, 0.1 + 0.2),
        "a": -0.0,
        "b": None,
        "c": True,
        "d": "é\u2028",
        "e": -(1 << 63),
    }
    changes: dict[str, object] = {
        "groups": (options, GROUPS[1]),
        "split_master": True,
        "compute_dtype": "float16",
        "extra": {"dict": [["a", [1.5, "\n\0\U0001f600"]]]},
        "tensors": Digest(5, "0123456789abcdef" * 2),
        "step": (1 << 63) - 1,
    }
    manifest = manifest_of(**changes)  # type: ignore[arg-type]
    again = parse(serialise(manifest))
    assert again == manifest
    assert [repr(value) for value in again.groups[0].values()] == [repr(value) for value in options.values()]
    assert [*again.groups[0]] == [*options]


def test_more_chunks_than_a_manifest_can_name_are_refused_beforehand() -> None:
    largest = ChunkFacts(MAX_CHUNKS, 1 << 40, 1 << 30, 1 << 9, 1, (1 << 63) - 1, "f" * 16)
    one = len(serialise(manifest_of(chunks=(largest,)))) - len(serialise(manifest_of(chunks=())))
    assert one <= ROW_BYTES
    assert MAX_CHUNKS * ROW_BYTES < MAX_BYTES
    require_room(manifest_of(), MAX_CHUNKS)
    for slots in (MAX_CHUNKS + 1, MAX_BYTES // ROW_BYTES + 1):
        with pytest.raises(ConfigError, match="chunk="):
            require_room(manifest_of(), slots)


def test_the_text_is_plain_ascii_in_one_line() -> None:
    text = serialise(manifest_of())
    assert text.isascii()
    assert text.count(b"\n") == 1
    assert text.startswith(b'{"schema":"offload manifest","version":2,"run_id":"')


def test_errors_name_the_file_and_the_place() -> None:
    bad = serialise(manifest_of()).replace(b'"age":5', b'"age":-5')
    with pytest.raises(CorruptionError, match=r"Expected `int` >= 0 - at `\$.parameters\[2\].age`") as caught:
        parse(bad, "/scratch/manifest")
    assert caught.value.file == "/scratch/manifest"
    assert caught.value.chunk is None


TEXT = serialise(manifest_of())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (TEXT.replace(b"offload manifest", b"offload commit"), "is no offload manifest"),
        (TEXT.replace(b'"version":2', b'"version":0'), "version of its format that does not exist: 0"),
        (TEXT.replace(b'"step":', b'"step":7,"step":'), "is not spelled as"),
        (TEXT.replace(b'"step":7', b'"step":' + b"9" * 4200), "Expected `int` <= 9223372036854775807"),
        (TEXT.replace(b'"step":7', b'"step": 7'), "is not spelled as"),
        (TEXT.replace(b'"owned":[0,2112]', b'"owned":[2,1]'), r"flats\[0\]: expected owned to be \[start, stop\]"),
        (TEXT.replace(b"[0,1000,1000,", b"[0,999,1001,"), "of flat 0: one begins at 999, before 1000"),
        (TEXT.replace(b"[0,1000,1000,", b"[0,1001,999,"), "none holds the elements 1000 to 1001"),
        (TEXT.replace(b'"offsets":[0,384,385]', b'"offsets":[0,300,385]'), "parameter 2 begins at 300, before 360"),
        (b" " * (MAX_BYTES + 1), "is longer than the 128 MiB that are allowed"),
        (b"[" + b"0," * (MAX_COMMAS + 1) + b"0]", "more than 8388608 values"),
        (b"[" * 100_000, "is not the JSON that this library writes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(text: bytes, match: str) -> None:
    with pytest.raises(CorruptionError, match=match):
        parse(text)


@pytest.mark.parametrize(
    ("forms", "match"),
    [
        (("fp32", "fp32"), "forms: expected known ones, of which some are not fp32"),
        (("fp8", "bf16"), "forms: expected known ones"),
        (("bf16",), "forms: expected one for each state"),
        (("bf16", "bf16", "bf16"), "forms: expected one for each state"),
        ((), "forms: expected"),
    ],
    ids=str,
)
def test_forms_are_those_of_states(forms: tuple[str, ...], match: str) -> None:
    plain = manifest_of()
    sound = dataclasses.replace(plain, flats=tuple(dataclasses.replace(f, forms=("bf16", "fp32")) for f in plain.flats))
    assert parse(serialise(sound)) == sound
    assert b'"version":4' in serialise(sound)
    flats = (dataclasses.replace(sound.flats[0], forms=forms), *sound.flats[1:])
    with pytest.raises(CorruptionError, match=match):
        parse(serialise(dataclasses.replace(sound, flats=flats)))


SHAPED = (("factor", (3, 1)),)


@pytest.mark.parametrize(
    ("form", "shapes", "match"),
    [
        ("fp32-64", (), "expected some, and each name once"),
        ("fp32-64", (*SHAPED, *SHAPED), "expected some, and each name once"),
        ("fp32-64", (("factor", (34, 1)),), "no room for factor"),  # of 2,100 elements, which have room for 33 there
        ("bf16", SHAPED, "no room for factor"),
        ("fp32-64", (*SHAPED, ("other", ())), "no state other"),
        ("fp32-64", (("other", ()),), "factor has no element for each of its own, and no shape"),
        ("fp32-64", None, "factor has no element for each of its own, and no shape"),
    ],
    ids=str,
)
def test_states_of_other_shapes_have_room(form: str, shapes: Any, match: str) -> None:
    plain = manifest_of()

    def made(form: str, shapes: Any) -> Manifest:
        flats = [dataclasses.replace(flat, states=("factor",), forms=(form,)) for flat in plain.flats]
        smallest = [(min(param.numel, 1),) for param in plain.parameters]
        both = zip(plain.parameters, smallest, strict=True)
        params = [dataclasses.replace(param, shapes=(("factor", shape),)) for param, shape in both]
        params[0] = dataclasses.replace(params[0], shapes=shapes)
        rules = ("Factored",) * len(plain.groups)
        return dataclasses.replace(plain, flats=tuple(flats), parameters=tuple(params), rules=rules)

    assert plain.parameters[0].numel == 2100
    sound = made("fp32-64", (("factor", (33, 1)),))
    assert parse(serialise(sound)) == sound
    assert b'"version":5' in serialise(sound)
    with pytest.raises(CorruptionError, match=match):
        parse(serialise(made(form, shapes)))


def test_a_version_that_its_states_do_not_ask_for_is_not_taken() -> None:
    with pytest.raises(CorruptionError, match="is not spelled"):
        parse(serialise(manifest_of()).replace(b'"version":2', b'"version":4'))


def test_three_slots_a_chunk_have_a_version_of_their_own() -> None:
    three = manifest_of(places=3)
    three = dataclasses.replace(three, chunks=(three.chunks[0]._replace(place=2), *three.chunks[1:]))
    assert b'"version":7' in serialise(three)
    assert parse(serialise(three)) == three
    with pytest.raises(CorruptionError):
        parse(serialise(three).replace(b'"places":3', b'"places":2'))


def test_ranks_with_other_shards_have_a_version_of_their_own() -> None:
    moved = manifest_of(1, world=3, user_ranks=(2, 0, 1))
    assert b'"version":9' in serialise(moved)
    assert parse(serialise(moved)) == moved
    assert moved.user_rank == 0
    assert manifest_of(1, world=3).user_rank == 1
    for wrong in ((0, 1, 2), (2, 1), (0, 0, 1), (1, 2, 3)):
        with pytest.raises(CorruptionError, match="user_ranks: expected each rank once"):
            parse(serialise(dataclasses.replace(moved, user_ranks=wrong)))


OPTIONS = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.1, "decoupled_weight_decay": True}


def late_facts(**changes: Any) -> LateFacts:
    """Chunks 0 and 2, of parameter 0, owe three steps and one."""
    made = LateFacts((OPTIONS, OPTIONS | {"lr": -0.0}), ((0, (0, 1, 1)),), ((0, 3), (2, 1)))
    return dataclasses.replace(made, **changes)


def test_owed_steps_have_a_version_of_their_own() -> None:
    late = manifest_of(late=late_facts())
    assert b'"version":8' in serialise(late)
    again = parse(serialise(late))
    assert again == late
    assert repr(again.late) == repr(late.late)
    assert [step.before.step for step in again.steps_owed_by(0)] == [STEP - 3, STEP - 2, STEP - 1]
    assert [step.options["lr"] for step in again.steps_owed_by(2)] == [-0.0]
    assert again.steps_owed_by(1) == []
    with pytest.raises(CorruptionError):
        parse(serialise(late).replace(b'"version":8', b'"version":2'))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"owed": ()}, "expected some chunks"),
        ({"owed": ((2, 1), (0, 3))}, "each chunk and parameter once, in their order"),
        ({"owed": ((0, 3), (0, 3))}, "each chunk and parameter once, in their order"),
        ({"owed": ((0, 3), (99, 1))}, "there is no chunk 99"),
        ({"owed": ((0, 3), (3, 1))}, "chunk 3 has several parameters, or is not of Adam"),
        ({"owed": ((0, 2),)}, "as many steps of each parameter as one of its chunks owes"),
        ({"owed": ((0, MOST_OWED + 1),)}, "Expected `int` <= 64"),
        ({"logs": ((0, (0, 1, 1)), (0, (0, 1, 1)))}, "each chunk and parameter once"),
        ({"logs": ((0, (0, 1, 1)), (1, (0,)))}, "as many steps of each parameter as one of its chunks owes"),
        ({"logs": ((0, (0, 2, 1)),)}, "expected each that a step took"),
        ({"logs": ((0, (1, 0, 1)),)}, "in the order in which logs name them"),
        ({"logs": ((0, (0,) * 7 + (1,)),), "owed": ((0, 8),)}, "parameter 0 did not take so many steps"),
        ({"options": (OPTIONS | {"lr": -1.0}, OPTIONS)}, r"options\[0\] are none of Adam"),
        ({"options": (OPTIONS, {"lr": 1.0})}, r"options\[1\] are none of Adam"),
        ({"options": (OPTIONS, OPTIONS | {"foreach": True})}, r"options\[1\] are not spelled"),
    ],
    ids=str,
)
def test_owed_steps_that_nobody_took_are_damage(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CorruptionError, match=match):
        parse(serialise(manifest_of(late=late_facts(**changes))))


def test_owed_steps_are_of_adam_alone() -> None:
    for changes in (
        {"rules": ("SGD", "Adam")},
        {"flats": tuple(dataclasses.replace(flat, forms=("bf16", "fp32")) for flat in manifest_of().flats)},
    ):
        with pytest.raises(CorruptionError, match="late: chunk 0 has several parameters, or is not of Adam"):
            parse(serialise(manifest_of(late=late_facts(), **changes)))  # type: ignore[arg-type]


def test_a_newer_version_asks_for_a_newer_offload() -> None:
    newer = serialise(manifest_of()).replace(b'"version":2', b'"version":10').replace(b'"flats"', b'"flat_tables"')
    with pytest.raises(ResumeError, match="version 10 of its format"):
        parse(newer)


def test_an_older_version_asks_for_the_offload_that_wrote_it() -> None:
    older = serialise(manifest_of()).replace(b'"version":2', b'"version":1').replace(b'"copies":[],', b"")
    with pytest.raises(ResumeError, match="version 1 of its format, and this version of offload reads 2 only"):
        parse(older)


def test_copies_are_of_the_chunks_with_a_split_master_and_of_none_without() -> None:
    split = manifest_of(split_master=True)
    assert parse(serialise(split)) == split
    assert split.slots == split.chunks + split.copies
    other = split.copies[1]._replace(start=999)
    path = split.copies[1]._replace(path=1)
    for copies in ((), split.copies[:-1], (split.copies[0], other, *split.copies[2:])):
        with pytest.raises(CorruptionError, match="copies: expected a row for each chunk"):
            parse(serialise(dataclasses.replace(split, copies=copies)))
    with pytest.raises(CorruptionError, match="there is no such flat, path, slot or step"):
        parse(serialise(dataclasses.replace(split, copies=(split.copies[0], path, *split.copies[2:]))))
    with pytest.raises(CorruptionError, match="copies: expected a row for each chunk"):
        parse(serialise(dataclasses.replace(split, split_master=False)))


def test_where_each_parameter_lies() -> None:
    assert manifest_of().homes == {0: (0, 0), 1: (1, 0), 2: (1, 384), 3: (1, 385), 4: (2, 0)}


def test_the_largest_run_is_taken_and_one_element_more_is_not() -> None:
    def run(numel: int) -> bytes:
        param = ParameterFacts("w", (numel,), None, "", "bfloat16", 0, 0)
        chunk = ChunkFacts(0, 0, numel, 0, 0, 0, "f" * 16)
        flat = FlatFacts((0,), (0,), numel, (0, numel))
        return serialise(Manifest(RUN, 0, 0, 1, 1, 1, "bfloat16", False, ({},), (param,), (flat,), (chunk,)))

    assert parse(run(MAX_NUMEL)).parameters[0].numel == MAX_NUMEL
    with pytest.raises(CorruptionError):
        parse(run(MAX_NUMEL + 1))


def test_elements_of_no_parameter_may_lie_in_no_chunk() -> None:
    manifest = manifest_of()
    # The gap behind embed.weight, and the last element of the last flat.
    chunks = tuple(
        chunk._replace(numel=100) if chunk.numel == 112 else
        chunk._replace(numel=9) if chunk.flat == 2 else chunk
        for chunk in manifest.chunks
    )  # fmt: skip
    assert parse(serialise(dataclasses.replace(manifest, chunks=chunks))).chunks == chunks


def test_a_run_without_parameters_is_a_run() -> None:
    empty = manifest_of(parameters=(), flats=(), chunks=())
    assert parse(serialise(empty)) == empty


SPECS = st.lists(
    st.tuples(st.integers(0, 3000), st.sampled_from(["", "a", "b"]), st.sampled_from(["bfloat16", "float32"])),
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(SPECS, st.integers(1, 700), st.integers(1, 4))
def test_every_layout_makes_a_manifest(specs: list[tuple[int, str, str]], chunk_numel: int, world: int) -> None:
    import torch

    layout = build(
        [ParamSpec(f"p{n}", numel, unit, getattr(torch, dtype), 0) for n, (numel, unit, dtype) in enumerate(specs)],
        chunk_numel,
    )
    parameters = tuple(
        ParameterFacts(f"p{n}", (numel,), None, unit, dtype, 0, n % (STEP + 1))
        for n, (numel, unit, dtype) in enumerate(specs)
    )
    for rank in range(world):
        flats, chunks = [], []
        for flat in layout.flats:
            start, stop = flat.numel * rank // world, flat.numel * (rank + 1) // world
            flats.append(FlatFacts(flat.params, flat.offsets, flat.numel, (start, stop)))
            for chunk in layout.chunks:
                first, last = max(start, chunk.start), min(stop, chunk.start + chunk.numel)
                if chunk.flat == flat.index and first < last:
                    chunks.append(ChunkFacts(flat.index, first, last - first, 0, 0, STEP, f"{1:016x}"))
        changes: dict[str, object] = {"parameters": parameters, "flats": tuple(flats), "chunks": tuple(chunks)}
        manifest = manifest_of(rank, world, **changes)  # type: ignore[arg-type]
        assert parse(serialise(manifest)) == manifest


def test_a_kept_base_makes_version_6_and_is_a_name_in_a_directory() -> None:
    named = replace(manifest_of(), base=("/a%20b", f"base-{'0' * 32}-{'a' * 16}"))
    data = serialise(named)
    assert b'"version":6,' in data
    assert parse(data) == named
    for base in (("/a b", named.base[1]), ("/a", "../base"), ("/a", "swap-1")):  # type: ignore[index]
        with pytest.raises(CorruptionError, match="base"):
            parse(serialise(replace(named, base=base)))
