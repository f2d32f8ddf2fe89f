from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.sizes import GIB, KIB, MIB, format_bytes, option_bytes, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4097, 4097),
        ("4097", 4097),
        ("12B", 12),
        ("48GiB", 48 * GIB),
        (" 512 MiB ", 512 * MIB),
        ("1KiB", KIB),
        ("10GB", 10**10),
        ("1.5GiB", 3 * GIB // 2),
        ("0.5kB".replace("k", "K"), 500),
        ("2TB", 2 * 10**12),
        ("9007199254740993", 9007199254740993),
        ("9007199254740993KiB", 9007199254740993 * KIB),
    ],
)
def test_sizes_are_read_exactly(text: int | str, size: int) -> None:
    assert parse_bytes(text, "cpu_memory") == size


@pytest.mark.parametrize(
    "wrong",
    [-1, "-1", "-5GiB", "", " ", "GiB", "48gib", "48 G", "4 8GiB", "1e9", "1.5", "1.5B", "48GiBs", "inf", "nan", "0x10",
     "1,5GiB", "٣GiB", "9" * 5000, "1." + "0" * 400 + "GiB", True, False, None, 1.5, 2.0, b"1GiB", ["1GiB"]],
)  # fmt: skip
def test_what_is_no_size_is_refused_by_name_and_value(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(wrong, "cpu_memory")  # type: ignore[arg-type]
    assert str(caught.value).startswith("cpu_memory=")
    assert repr(wrong) in str(caught.value)
    assert '"48GiB"' in str(caught.value)


@given(st.text())
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_bytes(text, "cpu_memory") >= 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (48 * GIB, "48 GiB"), (5 << 40, "5 TiB"), (-2 * MIB, "-2 MiB")],
)
def test_sizes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_rounding_up_gives_the_least_multiple(count: int, multiple: int) -> None:
    rounded = round_up(count, multiple)
    assert rounded % multiple == 0
    assert count <= rounded < count + multiple


@given(st.integers(0, 1 << 50))
def test_an_option_has_room_for_what_was_asked_and_little_more(size: int) -> None:
    given_bytes = parse_bytes(int(text) if (text := option_bytes(size)).isdecimal() else text, "cpu_memory")
    assert size <= given_bytes <= size + max(size // 1000, 1)
    assert len(text) <= 10


@given(st.integers(0, 1 << 50))
def test_an_option_at_most_takes_no_more_than_there_is_and_little_less(size: int) -> None:
    text = option_bytes(size, at_most=True)
    assert size - max(size // 1000, 1) <= parse_bytes(text, "cpu_memory") <= size
    assert len(text) <= 10


@pytest.mark.parametrize(("text", "near"), [("48gib", "48GiB"), ("1gb", "1GB"), ("48 G", "48GiB"), ("2.5m", "2.5MiB")])
def test_a_unit_that_is_written_otherwise_is_named(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        parse_bytes(text, "cpu_memory")
