"""What every part of one run shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from offload.choices import CommitChoice
from offload.devices.copies import Copier
from offload.entries import Entries
from offload.errors import CLOSED, ClosedError
from offload.health import Health
from offload.io.engine import IOEngine
from offload.io.files import Files
from offload.io.select import open_engine
from offload.layout import Layout
from offload.native import Kernels
from offload.profiling import Timeline
from offload.ranks.communicator import Communicator
from offload.storage.arena import Arena, Lender, Reserved
from offload.storage.chunk_cache import Store
from offload.storage.directory_lock import Claims
from offload.storage.slot_map import ChunkKind

OpenEngine = Callable[[str, Sequence[Path]], IOEngine]
"""Of `io.select.open_engine`."""


@dataclass(frozen=True)
class Disk:
    """How a run reaches its directories.

    Attributes:
        files: makes the file system of one run, which holds the run's directories open.
        open_engine: makes the I/O engine of one run, from a name that `Tuning.io_engine` takes.
    """

    files: Callable[[], Files] = Files
    open_engine: OpenEngine = open_engine


DISK: ContextVar[Disk] = ContextVar("offload.disk", default=Disk())  # noqa: B039  # frozen
"""The disk of the runs that are made in this thread. OffloadZero asks once. Only the tests have another than this
machine's: `tests.support.disks.on_disk`."""


@dataclass(frozen=True)
class Memory:
    """The buffers of a run.

    Attributes:
        ram: the arena in RAM; also holds the buffers of transfers from and to swap files.
        device: memory of the model's device; None: none is reserved.
        reserved: the pieces of both that the parts of the run get.
        copier: copies between the model and the memory where states and gradients wait for the step.
        param_copier: copies between the model and the memory where parameters that stream wait for their use.
    """

    ram: Arena
    device: Lender | None
    reserved: Reserved
    copier: Copier
    param_copier: Copier

    def take(self, what: str) -> list[Tensor]:
        """The pieces of the regions of a name; see `Reserved`."""
        return self.reserved.take(what)

    @property
    def device_bytes(self) -> int:
        """How many bytes of the device's memory are lent."""
        return 0 if self.device is None else self.device.used


@dataclass(frozen=True)
class Run:
    """What the parts of one run are built from. Each part takes this instead of its pieces.

    Attributes:
        commits: what was decided for commits.
        paths: the directories of its files, in their order.
        layout: of the trained parameters.
        memory: its buffers.
        kernels: those that work where the states are.
        comm: the ranks.
        timeline: counts and records what runs.
        files: the file system.
        claims: the directories, which no other run can take.
        entries: the threads in the run.
        device_flats: the flat parameters whose states and gradients are on the device, if those of others are not.
        device_kernels: those that work there.
    """

    commits: CommitChoice
    paths: tuple[Path, ...]
    layout: Layout
    memory: Memory
    kernels: Kernels
    comm: Communicator
    timeline: Timeline
    files: Files = field(default_factory=Files)
    claims: Claims = field(default_factory=Claims)
    entries: Entries = field(default_factory=Entries)
    health: Health = field(default_factory=Health)
    device_flats: frozenset[int] = frozenset()
    device_kernels: Kernels | None = None

    def kernels_of(self, flat: int) -> Kernels:
        """Those that work where the states and gradients of a flat parameter are."""
        if flat not in self.device_flats:
            return self.kernels
        assert self.device_kernels is not None
        return self.device_kernels

    def reaches(self, flat: int) -> bool:
        """Whether those kernels reach the model's memory, so that nothing is copied for them."""
        return self.memory.copier.direct or flat in self.device_flats


class Stores(dict[ChunkKind, Store]):
    """The chunk caches of a run, by the kind of their chunks. Kinds that are kept elsewhere have none."""

    @property
    def all(self) -> list[Store]:
        return [*self.values()]

    @property
    def states(self) -> Store:
        return self[ChunkKind.STATES]

    @property
    def params(self) -> Store | None:
        """That of the trained 16-bit parameters, if they are streamed or committed."""
        return self.get(ChunkKind.PARAMS)

    @property
    def trained(self) -> list[Store]:
        """Those whose chunks steps change."""
        return [store for kind, store in self.items() if kind is not ChunkKind.FROZEN]


class Expected(NamedTuple):
    """What the optimizer expects of a step whose gradients come.

    Attributes:
        step: its number.
        groups: the param groups.
        factor: that of all gradients.
        key_of: the key of a parameter's elements in the step, by its number.
        most_squares: the sum of the gradients' squares above which they are clipped; inf: it is not known.
    """

    step: int
    groups: Sequence[Mapping[str, Any]]
    factor: float
    key_of: Callable[[int], Any]
    most_squares: float


@dataclass
class Owner:
    """The optimizer, as the parts of a held model call it until it is closed. All calls upwards are here.

    Attributes:
        step: returns the number of the last step.
        require_usable: raises if the run cannot go on.
        collect: waits for all gradients, on all ranks together; returns the numbers of the parameters that have one.
        unscale: called with a GradScaler's found_inf and inverse scale, 0-dim fp32 tensors; writes the first.
        expected: returns what is expected of the step whose first gradient comes.
        forward_failed: called with what a forward raised.
    """

    step: Callable[[], int]
    require_usable: Callable[[], None]
    collect: Callable[[], list[int]]
    unscale: Callable[[Tensor, Tensor], None]
    expected: Callable[[], Expected]
    forward_failed: Callable[[BaseException | None], None]

    def let_go(self) -> None:
        """Drops all references to the optimizer, which is closed.

        So it and its model are no cycle. Both are freed as soon as nobody uses them, not when Python's collector next
        runs.
        """
        self.step = self.require_usable = self.collect = self.unscale = self.expected = _closed
        self.forward_failed = _nobody


def _nobody(*_: object) -> None:
    return


def _closed(*_: object) -> NoReturn:
    raise ClosedError(CLOSED)
