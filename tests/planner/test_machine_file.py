"""Descriptions of machines: those that come with the package, what a file may say, and what is computed of it."""

from __future__ import annotations

import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.planner import machine_file
from offload.planner.machine_file import Device, Drive, Figure, Host, Link, Machine, Size
from offload.planner.measured import speeds_of
from offload.planner.simulate.speeds import HostCosts, Speeds
from offload.sizes import GIB

PCIE_4 = 16 * 16e9 * 128 / 130 / 8
"""Bytes a second of 16 lanes, each way: 16 GT/s a lane, and of 130 bits 128 are data (PCI Express 4.0)."""


def some(**others: Any) -> Machine:
    """A machine of which nothing is left out."""
    rate = Figure(2e9, "a data sheet")
    fields: dict[str, Any] = {
        "about": 'of tests, "quoted"',
        "measured_on": "0123456789abcdef",
        "measured_at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "threads": Size(8, "a data sheet"),
        "memory": Figure(28e9, "measured", True, 27e9, 29e9),
        "steps": {"adamw, fp32, split": rate},
        "products": {"bf16": rate, "fp32": rate},
        "device": Device("a card", Size("24GiB", "its data sheet")),
        "link": Link(rate, rate, rate),
        "drives": (
            Drive("one", Figure(6e9, "x"), Figure(3e9, "x"), None, Size("1TB", "x"), Size("600TB", "x"), 2),
            Drive("other", Figure(1e9, "x"), Figure(1e9, "x"), Figure(2e9, "x"), Size("2TB", "x"), Size("100TB", "x")),
        ),
        "network": rate,
        "host": Host(
            Figure(250e-6, "measured", True, 200e-6, 300e-6), Figure(90e-6, "a guess"), moved=Figure(30e-6, "a guess")
        ),
    }
    return Machine("some", Size("64GiB", "it is installed"), **fields | others)


def figures(value: Any) -> list[Any]:
    """All figures and sizes in a machine."""
    if isinstance(value, Figure | Size):
        return [value]
    if isinstance(value, dict):
        return [one for inner in value.values() for one in figures(inner)]
    if isinstance(value, tuple):
        return [one for inner in value for one in figures(inner)]
    if isinstance(value, msgspec.Struct):
        return [one for name in value.__struct_fields__ for one in figures(getattr(value, name))]
    return []


def test_machines_that_come_with_the_package_are_promises_of_data_sheets() -> None:
    known = machine_file.ready_made()
    assert len(known) >= 6
    for name, machine in known.items():
        assert machine.name == name
        assert machine.measured_at is None
        assert machine.endurance is not None
        assert len(figures(machine)) >= 14
        assert not [one for one in figures(machine) if one.measured or len(one.source) < 5]
        assert {"bf16", "fp16", "fp32"} == set(machine.products)
    cards = {
        (one.device.memory.number // GIB, one.link.up.value > PCIE_4)
        for one in known.values()
        if one.device and one.link
    }
    assert cards == {(size, is_pcie_5) for size in (24, 48, 80) for is_pcie_5 in (False, True)}
    assert {sum(drive.count for drive in one.drives) for one in known.values()} == {1, 4}
    ram = [one.ram.number / GIB for one in known.values()]
    assert min(ram) <= 64 < 256 < max(ram) <= 512


def test_a_file_says_what_was_written_into_it(tmp_path: Path) -> None:
    machine = some()
    file = tmp_path / "machine.toml"
    file.write_text(machine_file.written(machine))
    assert machine_file.load(str(file)) == machine
    written = msgspec.to_builtins(machine, builtin_types=(datetime,))
    assert tomllib.loads(file.read_text()) == written | {"drives": list(written["drives"])}


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_name_is_written_so_that_toml_reads_it(name: str) -> None:
    """Of mount points too, and of steps, which are keys."""
    rate = Figure(1.5, "x")
    machine = Machine(name, Size(1, name), steps={name: rate}, drives=(Drive(name, rate, rate),))
    assert msgspec.toml.decode(machine_file.written(machine), type=Machine) == machine
    assert tomllib.loads(machine_file.written(machine))["steps"] == {name: {"value": 1.5, "source": "x"}}


WRONG = [
    ("name = 1", "name: Expected `str`, got `int`"),
    ('name = "x"', "missing required field `ram`. It has name, ram, and may have about"),
    ("nam = 2", "the file: Object"),
    ('[device]\nname = "x"', "device: Object missing required field `memory`. It has name, memory"),
    ('[device]\nname = "x"\nmemory = { value = "24GiB" }', "device.memory: Object missing required field `source`"),
    (
        '[device]\nname = "x"\nmemory = { value = "24", source = "s", unit = "GB" }',
        "device.memory: Object contains unknown",
    ),
    ('[products]\nbf16 = { value = "fast", source = "x" }', "products[...].value: Expected `float`, got `str`"),
    ('memory = { value = -1.0, source = "x" }', "memory.value: Expected `float` >= 1e-12"),
    ('memory = { value = 1.0, source = "" }', "memory.source: Expected `str` of length >= 1"),
    ('threads = { value = "24gib", source = "x" }', "did you mean '24GiB'"),
    ('threads = { value = 0, source = "x" }', "give a number above 0"),
    ("measured_at = 2026-01-02T03:04:05", "measured_at: Expected `datetime` with a timezone component"),
    (
        "[host]\ntiles = 1",
        "host: Object contains unknown field `tiles`. It has nothing else, and may have tile, chunk, resident, moved, "
        "delay",
    ),
    ("[[drives]]\nname = 'x'\ncount = 0", "drives[0].count: Expected `int` >= 1"),
    ("name = ", "is no TOML"),
    ("name = 'x'\nname = 'y'", "is no TOML"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_in_a_file_is_named_with_its_key(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    whole = 'name = "x"\nram = { value = "1GiB", source = "x" }\n'
    file.write_text(text if "nam" in text.split("\n")[0] else whole + text)
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        machine_file.load(str(file))
    assert str(refused.value).startswith(str(file))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("did you mean rtx4090-64gb?")):
        machine_file.find("rtx4090-64")
    with pytest.raises(ConfigError, match="cannot be read"):
        machine_file.find(str(tmp_path))
    (tmp_path / "latin").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="is no TOML"):
        machine_file.find(str(tmp_path / "latin"))
    (tmp_path / "long").write_bytes(b"#" * (machine_file.MOST_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="longer than"):
        machine_file.find(str(tmp_path / "long"))


def test_drives_share_what_moves_and_what_is_written_by_their_bandwidth() -> None:
    """By hand: 2 x 4 GB/s, which is 2 / (1/6 + 1/3), and 2 GB/s. The last one gets a fifth of the bytes."""
    machine = some()
    assert machine.disk is not None
    assert machine.disk.value == pytest.approx(10e9)
    assert machine.disk_capacity == 4e12
    assert machine.endurance == pytest.approx(min(600e12 / 0.4, 100e12 / 0.2))
    together = some(together=Figure(7e9, "all at once"))
    assert together.disk == Figure(7e9, "all at once")
    unknown = some(drives=(Drive("x", Figure(1e9, "x"), Figure(1e9, "x")),))
    assert (unknown.disk_capacity, unknown.endurance) == (None, None)
    assert some(drives=()).disk is None


def test_a_step_that_nobody_measured_takes_what_ram_takes() -> None:
    machine = some()
    assert machine.elements_per_s("adamw, fp32, split", 26) == Figure(2e9, "a data sheet")
    found = machine.elements_per_s("adamw, fp32", 28)
    assert found is not None
    assert found.value == 1e9
    assert some(memory=None).elements_per_s("adamw, fp32", 28) is None


def test_each_cost_of_the_host_is_that_of_the_simulation() -> None:
    costs = {"tile": 1e-6, "chunk": 2e-6, "resident": 3e-6, "moved": 4e-6, "delay": 5e-6}
    assert costs.keys() == set(Host.__struct_fields__)
    for left_out in (None, *costs):
        given = {name: Figure(value, "x") for name, value in costs.items() if name != left_out}
        found = speeds_of(some(host=Host(**given)), elements_per_s=1e9, disk_bytes_per_s=None)
        assert isinstance(found, Speeds)
        assert found.host == HostCosts(**{f"{name}_s": 0.0 if name == left_out else costs[name] for name in costs})
