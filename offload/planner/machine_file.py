"""A machine in figures: what a plan asks of the one that it is for.

It is this machine, as far as `offload probe` measured it (rates.py, io/select.py), or one that a TOML file describes.
The files in `machine_files/` come with the package; `offload probe --save` writes one of this machine, for plans
elsewhere. Each figure says where it is from, and whether it was measured.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
import torch
from msgspec import Meta

from offload.devices.copies import accelerator, device_name
from offload.errors import ConfigError
from offload.io import remembered, select
from offload.io.files import LOCAL
from offload.io.regular import read_file
from offload.native.threads import usable_cpus
from offload.planner import machine as this
from offload.planner import rates
from offload.planner.rates import Rate
from offload.sizes import MIB, parse_bytes

READY_MADE = Path(__file__).parent / "machine_files"
"""The files that come with the package."""
MOST_FILE_BYTES = MIB
PROBED = "offload probe"
"""The source of what this library measured."""

Text = Annotated[str, Meta(min_length=1)]
Number = Annotated[float, Meta(ge=1e-12, lt=1e21)]
T = TypeVar("T")


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rate: bytes, operations or elements a second. That of a delay, or of a cost, is its seconds.

    Attributes:
        value: the rate; of several measurements the median.
        source: who says so, or how it was computed.
        measured: whether it was measured on that machine. If not, it is a promise.
        lowest, highest: how far measurements are apart.
    """

    value: Number
    source: Text
    measured: bool = False
    lowest: Number | None = None
    highest: Number | None = None


class Size(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole number: of bytes, as 68719476736 or "64GiB", or of threads.

    Attributes:
        value: the number.
        source: who says so.
        measured: as that of a Figure.
    """

    value: int | str
    source: Text
    measured: bool = False

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"value = {self.value!r}: give a number above 0")

    @property
    def number(self) -> int:
        """The value, as a number."""
        return parse_bytes(self.value, "value")


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A device with memory of its own, that models train on.

    Attributes:
        name: what it is called.
        memory: all that it has.
    """

    name: Text
    memory: Size


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The link between RAM and the device, in bytes a second.

    Attributes:
        up: to the device.
        down: to RAM.
        both: up and down at once, added.
    """

    up: Figure
    down: Figure
    both: Figure


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the host takes in Python, in seconds; None: nothing.

    Attributes:
        tile: for a tile of a weight that runs forward or backward.
        chunk: for a chunk of states that is read, stepped and written.
        resident: for a chunk of states in RAM that is stepped alone.
        moved: for a chunk of parameters or gradients that is read from a drive, or written to it.
        delay: of a transfer of a drive that somebody waits for, beside what its bytes take.
    """

    tile: Figure | None = None
    chunk: Figure | None = None
    resident: Figure | None = None
    moved: Figure | None = None
    delay: Figure | None = None


class Drive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Drives of one kind, in bytes a second of one of them.

    Attributes:
        name: what it is called; of this machine, where it is mounted.
        read, write: each alone.
        mixed: reading and writing at once, added; None: one after the other, half of the bytes each.
        capacity: its bytes; None: unknown.
        endurance: the bytes that may be written under its warranty (TBW); None: unknown.
        count: how many there are.
    """

    name: Text
    read: Figure
    write: Figure
    mixed: Figure | None = None
    capacity: Size | None = None
    endurance: Size | None = None
    count: Annotated[int, Meta(ge=1, le=1024)] = 1

    @property
    def mixed_bytes_per_s(self) -> float:
        """Of one drive, reading and writing the same bytes."""
        if self.mixed is not None:
            return self.mixed.value
        return 2 / (1 / self.read.value + 1 / self.write.value)


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A machine. What it does not say, plans assume as without it.

    Attributes:
        name: what it is called.
        ram: what a run may use of it.
        about: a line for people.
        measured_on: who measured it, as `remembered.identity` calls machines; "": nobody did.
        measured_at: when.
        threads: that its CPUs have.
        memory: bytes of RAM that a copy reads and writes, together.
        steps: elements that an optimizer steps in RAM, by what `rates.step_name` calls it.
        products: operations of products of matrices where models train, by dtype.
        device: that models train on; None: the CPU.
        link: to the device.
        drives: that swap files may be on.
        together: what all drives do at once, reading and writing, added; None: what each does alone, added.
        network: bytes a second that a rank sends to another machine.
        network_delay: seconds that a collective of two machines takes that carries next to nothing; None: none.
        host: what its CPU takes in Python for tiles and chunks; None: nothing.
    """

    name: Text
    ram: Size
    about: str = ""
    measured_on: str = ""
    measured_at: Annotated[datetime, Meta(tz=True)] | None = None
    threads: Size | None = None
    memory: Figure | None = None
    steps: dict[str, Figure] = {}
    products: dict[str, Figure] = {}
    device: Device | None = None
    link: Link | None = None
    drives: tuple[Drive, ...] = ()
    together: Figure | None = None
    network: Figure | None = None
    network_delay: Figure | None = None
    host: Host | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return self.measured_on == remembered.identity()

    @property
    def disk(self) -> Figure | None:
        """What all drives move together, reading and writing; None: that is unknown."""
        if self.together is not None or not self.drives:
            return self.together
        total = sum(drive.count * drive.mixed_bytes_per_s for drive in self.drives)
        measured = all((drive.mixed or drive.read).measured for drive in self.drives)
        return Figure(total, "each drive alone, added", measured)

    @property
    def disk_capacity(self) -> int | None:
        """The bytes of all drives; None: that of one is unknown."""
        known = [drive.count * drive.capacity.number for drive in self.drives if drive.capacity is not None]
        return sum(known) if known and len(known) == len(self.drives) else None

    @property
    def endurance(self) -> float | None:
        """The bytes that may be written before the first drive is past its warranty; None: that is unknown.

        Drives share what is written by their bandwidth, as chunks are laid out over paths.
        """
        total = sum(drive.count * drive.mixed_bytes_per_s for drive in self.drives)
        known = [
            drive.endurance.number * total / drive.mixed_bytes_per_s
            for drive in self.drives
            if drive.endurance is not None
        ]
        return min(known) if known and len(known) == len(self.drives) else None

    def elements_per_s(self, step: str, bytes_an_element: float | None) -> Figure | None:
        """How many elements an optimizer steps in RAM a second.

        Args:
            step: what `rates.step_name` calls the optimizer.
            bytes_an_element: what a kernel reads and writes that steps in one pass. It takes what RAM takes for that,
                if nothing better is known. None: there is no such kernel.

        Returns:
            None if it is unknown.
        """
        if step in self.steps or self.memory is None or bytes_an_element is None:
            return self.steps.get(step)
        found = self.memory
        return Figure(found.value / bytes_an_element, f"{bytes_an_element:g} bytes an element, {found.source}")

    def age_s(self, now: datetime | None = None) -> float | None:
        """How many seconds ago it was measured; None: it was not."""
        if self.measured_at is None:
            return None
        return ((now or datetime.now(UTC)) - self.measured_at).total_seconds()


def ready_made() -> dict[str, Machine]:
    """The machines that come with the package, by the names of their files."""
    return {name: load(str(READY_MADE / f"{name}.toml")) for name in names()}


def names() -> list[str]:
    """The names of the machines that come with the package."""
    return sorted(name.removesuffix(".toml") for name in LOCAL.names(READY_MADE) if name.endswith(".toml"))


def find(wanted: str) -> Machine:
    """The machine that a user means.

    Args:
        wanted: a name of those that come with the package, or a file.

    Raises:
        ConfigError: it is neither, or the file describes no machine.
    """
    known = names()
    if wanted in known:
        return load(str(READY_MADE / f"{wanted}.toml"))
    if LOCAL.exists(Path(wanted)):
        return load(wanted)
    near = difflib.get_close_matches(wanted, known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"machine={wanted!r}: there is no such file. {hint}Machines with a name are {', '.join(known)}")


def load(file: str) -> Machine:
    """Reads the description of a machine.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or has a key that is missing, unknown or of another kind. The
            message names file and key, and what would be right.
    """
    try:
        data = read_file(Path(file), MOST_FILE_BYTES)
        return msgspec.toml.decode(data, type=Machine)
    except OSError as error:
        raise ConfigError(f"machine={file!r} cannot be read: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_explained(error)}") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}") from error


def _explained(error: msgspec.ValidationError) -> str:
    """What is wrong, under which key, and which keys there are beside it."""
    what, _, path = str(error).partition(" - at `$")
    where = path.rstrip("`").lstrip(".") or "the file"
    kind: Any = Machine
    for key in path.rstrip("`").replace("[", ".[").split(".")[1:]:
        kind = _kind_below(kind, key)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        needed = [field.name for field in fields if field.required]
        others = [field.name for field in fields if not field.required]
        return f"{where}: {what}. It has {_listed(needed)}, and may have {_listed(others)}"
    return f"{where}: {what}"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "nothing else"


def _kind_below(kind: Any, key: str) -> Any:
    """The type of what is under a key of a value.

    Args:
        kind: the type of the value.
        key: a field, or what stands for something in a list or a table.
    """
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        found = next((field.type for field in msgspec.structs.fields(kind) if field.name == key), None)
        return found if get_origin(found) in (dict, tuple) else _struct_in(found, *get_args(found))
    return _struct_in(*get_args(kind))


def _struct_in(*kinds: Any) -> Any:
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)), None)


# This machine.


def here(paths: Sequence[Path], device: str | None = None) -> Machine:
    """This machine, with what `offload probe` measured of it, as far as it did.

    Args:
        paths: directories on the drives that a run is to use. They may not exist yet.
        device: that models train on, as `Rates.device`; None: the accelerator, or the CPU if there is none.
    """
    known = rates.recall(device_name(accelerator()) if device is None else device)
    systems = {select.file_system_of(path): path for path in paths}
    settings = {place: select.recall(path) for place, path in systems.items()}
    found = [(place, one) for place, one in settings.items() if one is not None and one.mixed_bytes_per_s]
    drives = tuple(drive(place, one) for place, one in found)
    together = select.recall_together(list(systems)) if len(found) == len(systems) > 1 else None
    measured = {} if known is None else _of_rates(known)
    return Machine(
        "this machine",
        Size(max(this.free_memory(), 1), "free now", measured=True),
        measured_on=remembered.identity(),
        drives=drives,
        together=None if together is None else Figure(together.median, PROBED, True, together.lowest, together.highest),
        **measured,
    )


def unused() -> str | None:
    """Why the rates that are remembered are not used; None: there are none, or they are used."""
    return remembered.why_not(rates.SECTION, device_name(accelerator()), rates.Rates)


def described(found: rates.Rates, drives: Sequence[Drive], together: Rate | None, *, name: str) -> Machine:
    """This machine, for a file that plans elsewhere read.

    Args:
        found: what was measured beside the drives.
        drives: what was measured of them.
        together: what all of them do at once; None: there is one.
        name: of the machine.
    """
    device = accelerator()
    return Machine(
        name,
        Size(max(this.free_memory(), 1), "free when it was measured", measured=True),
        measured_on=remembered.identity(),
        measured_at=datetime.now(UTC).replace(microsecond=0),
        threads=Size(usable_cpus(), "the system", measured=True),
        device=None if device is None else Device(found.device, _memory_of(device)),
        drives=tuple(drives),
        together=None if together is None else of_rate(together),
        **_of_rates(found),
    )


def _memory_of(device: torch.device) -> Size:
    return Size(torch.accelerator.get_memory_info(device)[1], "the driver", measured=True)


def drive(place: str, settings: select.Settings) -> Drive:
    """A drive of this machine, as it is remembered.

    Args:
        place: where it is mounted.
        settings: what is remembered of it, with a bandwidth.
    """
    mixed = settings.mixed_bytes_per_s
    alone = (settings.read_bytes_per_s or mixed, settings.write_bytes_per_s or mixed)
    read, write, both = (Figure(value, PROBED, measured=True) for value in (*alone, mixed))
    return Drive(place, read, write, both)


def of_rate(rate: Rate) -> Figure:
    """What was measured, as a figure."""
    return Figure(rate.median, PROBED, measured=True, lowest=rate.lowest, highest=rate.highest)


def _host_of(found: rates.HostRates) -> Host:
    pairs = ((name, getattr(found, name)) for name in Host.__struct_fields__)
    return Host(**{name: of_rate(rate) for name, rate in pairs if rate is not None})


def _of_rates(found: rates.Rates) -> dict[str, Any]:
    """The fields of a machine that were measured beside its drives."""
    link, host = found.link, found.host
    return {
        "memory": of_rate(found.memory),
        "products": {dtype: of_rate(rate) for dtype, rate in found.products.items()},
        "steps": {name: of_rate(rate) for name, rate in found.steps.items()},
        "link": None if link is None else Link(of_rate(link.up), of_rate(link.down), of_rate(link.both)),
        "host": None if host is None else _host_of(host),
    }


def written(machine: Machine) -> str:
    """The file that describes a machine, as `load` reads it."""
    return "\n".join(_lines(msgspec.to_builtins(machine, builtin_types=(datetime,)), ())).lstrip("\n") + "\n"


def _lines(table: dict[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    """A table of TOML: first its values, with figures on a line each, then the tables in it."""
    inner: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict) and "source" not in value:
            inner += ["", f"[{_path((*above, key))}]", *_lines(value, (*above, key))]
        elif isinstance(value, list | tuple):
            for one in value:
                inner += ["", f"[[{_path((*above, key))}]]", *_lines(one, (*above, key))]
        else:
            yield f"{_key(key)} = {_value(value)}"
    yield from inner


def _path(keys: Iterable[str]) -> str:
    return ".".join(map(_key, keys))


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() and key.isascii() else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, datetime):
        return value.isoformat()
    return (
        _text(value) if isinstance(value, str) else json.dumps(value)
    )  # of numbers and booleans it is TOML's form, too


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
