"""Measures what the host takes for tiles, chunks and transfers, as `HostCosts` (planner/simulate/speeds.py) has it.

All but the delay of a transfer are differences: a run of many tiles, or chunks, of few elements, beside one that has
the same elements in one piece, or in RAM. What a forward, a backward or a step takes beside is in both.

Chunks on a drive are pages, since the drive would take more than Python for others. The kernels do a page alone. The
steps of larger chunks wake their other threads, and end when the last of these does: that is measured in RAM.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.devices.copies import HostCopier, accelerator
from offload.io.select import AUTO, open_engine
from offload.planner.explain import plan_of
from offload.sizes import KIB, MASTER_ITEM_BYTES, PAGE_BYTES
from offload.storage.arena import Arena

TILES, TILE_ROWS, WIDTH = 64, 8, 64
"""Of the weight that is cut into tiles: how many these are, and the rows of one; the columns of all weights here."""
CHUNKS, BUFFERS = 128, 16
"""Of the states that are cut into chunks of a page of masters; how many of those on a drive may be in RAM."""
LARGE_CHUNKS, LARGE_BYTES = 64, 512 * KIB
"""Of the states that are cut into chunks which all threads of the kernels step; their bytes of masters."""
PAGES = 64
"""That are read and written one after the other."""
LEAST_S = 1e-9
"""A difference that is no cost, since something else ran beside it, counts as this much."""

Seconds = Callable[[], float]
"""Measures once."""


@contextlib.contextmanager
def tiles(group: object | None = None) -> Iterator[Seconds]:
    """A context that gives what measures the seconds of a tile, forward or backward.

    Args:
        group: a process group that has this rank alone; None: there is one rank.
    """
    nbytes = TILE_ROWS * WIDTH * torch.float32.itemsize
    with contextlib.ExitStack() as stack:
        cut, whole = (
            stack.enter_context(
                _held(
                    TILES * TILE_ROWS,
                    tier="cpu",
                    param_tier="cpu",
                    process_group=group,
                    tuning=Tuning(tile=tile),
                )
            )
            for tile in (nbytes, 0)
        )
        yield lambda: max(cut.passes_s() - whole.passes_s(), LEAST_S * 2 * TILES) / (2 * TILES)


@contextlib.contextmanager
def chunks(path: Path, engine: str = AUTO, group: object | None = None) -> Iterator[Seconds]:
    """A context that gives what measures the seconds of a chunk of states that is read, stepped and written.

    Args:
        path: a directory on the drive. A folder in it is there as long as the context is.
        engine: that moves the bytes.
        group: as for `tiles`.
    """
    with contextlib.ExitStack() as stack:
        cut, whole = (
            stack.enter_context(_on_drive(path, engine, group, nbytes, share=0.0, param_tier="device"))
            for nbytes in (PAGE_BYTES, CHUNKS * PAGE_BYTES)
        )
        pages, large = stack.enter_context(_pages_in_ram(group)), stack.enter_context(resident_chunks(group))

        def measure() -> float:
            threads = max(large() - pages(), 0.0)
            return max(cut.step_s() - whole.step_s(), LEAST_S * CHUNKS) / (CHUNKS - 1) + threads

        yield measure


@contextlib.contextmanager
def resident_chunks(group: object | None = None) -> Iterator[Seconds]:
    """A context that gives what measures the seconds of a chunk of states in RAM that is stepped alone.

    Args:
        group: as for `tiles`.
    """
    with _cut_in_ram(group, LARGE_CHUNKS, LARGE_BYTES) as measure:
        yield measure


@contextlib.contextmanager
def delays(path: Path, engine: str = AUTO) -> Iterator[Seconds]:
    """A context that gives what measures the seconds of a page that is read or written, while nothing else is.

    Args:
        path: as for `chunks`.
        engine: likewise.
    """
    with (
        tempfile.TemporaryDirectory(prefix=".offload-probe-", dir=path) as folder,
        contextlib.closing(open_engine(engine, [path])) as moves,
        contextlib.closing(Arena(PAGE_BYTES, HostCopier())) as arena,
    ):
        file, page = moves.open(str(Path(folder) / "pages"), is_new=True), arena.memory
        moves.register(page)
        for number in range(PAGES):  # the first write into a new file is slower than any later one
            moves.write(file, number * PAGE_BYTES, page).result()

        def measure() -> float:
            start = time.perf_counter()
            for number in range(PAGES):
                moves.read(file, number * PAGE_BYTES, page).result()
                moves.write(file, number * PAGE_BYTES, page).result()
            return (time.perf_counter() - start) / (2 * PAGES)

        yield measure


@contextlib.contextmanager
def moved_chunks(path: Path, engine: str = AUTO, group: object | None = None) -> Iterator[Seconds]:
    """A context that gives what measures the seconds of a chunk of parameters that is read, or written.

    Args:
        path: as for `chunks`.
        engine: likewise.
        group: likewise.
    """
    with contextlib.ExitStack() as stack:
        cut = stack.enter_context(_on_drive(path, engine, group, PAGE_BYTES, share=1.0, param_tier="nvme"))
        there = stack.enter_context(_in_ram(group, CHUNKS, PAGE_BYTES))

        def measure() -> float:
            before = cut.moved_bytes
            seconds = cut.iteration_s() - there.iteration_s()
            read, written = (now - then for now, then in zip(cut.moved_bytes, before, strict=True))
            moved = CHUNKS * (1 + read / written)  # each is written once, and read if it has left RAM
            return max(seconds, LEAST_S * moved) / moved

        yield measure


class _Held:
    """A layer that is held.

    Args:
        model: has the layer.
        optimizer: holds the model.
    """

    def __init__(self, model: nn.Module, optimizer: OffloadZero) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = accelerator() or torch.device("cpu")

    def passes_s(self) -> float:
        """Seconds of a forward and a backward."""
        return self._iteration()[0]

    def step_s(self) -> float:
        """Seconds of a step, until its results are in the model."""
        return self._iteration()[1]

    def iteration_s(self) -> float:
        """Seconds of both."""
        return sum(self._iteration())

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that were read from drives, and written to them."""
        stats = self._optimizer.stats()
        return stats["nvme_read_bytes"], stats["nvme_written_bytes"]

    def _iteration(self) -> tuple[float, float]:
        x = torch.ones(1, WIDTH, device=self._device, requires_grad=True)
        start = time.perf_counter()
        self._model(x).sum().backward()
        middle = time.perf_counter()
        self._optimizer.step()
        self._optimizer.synchronize()
        end = time.perf_counter()
        self._optimizer.zero_grad()
        return middle - start, end - middle


@contextlib.contextmanager
def _cut_in_ram(group: object | None, count: int, chunk: int) -> Iterator[Seconds]:
    """A context that gives what measures the seconds of one of so many chunks in RAM, beside one as large as all.

    Args:
        group: as for `tiles`.
        count: how many.
        chunk: bytes of masters of each.
    """
    with contextlib.ExitStack() as stack:
        cut, whole = (stack.enter_context(_in_ram(group, count, chunk, many)) for many in (1, count))
        yield lambda: max(cut.step_s() - whole.step_s(), LEAST_S * count) / (count - 1)


def _pages_in_ram(group: object | None) -> contextlib.AbstractContextManager[Seconds]:
    """As `_cut_in_ram`, with chunks that one thread steps."""
    return _cut_in_ram(group, CHUNKS, PAGE_BYTES)


def _in_ram(
    group: object | None, count: int, chunk: int, together: int = 1
) -> contextlib.AbstractContextManager[_Held]:
    """A layer whose states and parameters are in RAM.

    Args:
        group: as for `tiles`.
        count: how many times `chunk` it has.
        chunk: bytes of masters.
        together: how many times that one of its chunks has.
    """
    tuning = Tuning(chunk=together * chunk, prefetch_chunks=BUFFERS)
    return _held(_rows(count * chunk), tier="cpu", param_tier="cpu", process_group=group, tuning=tuning)


@contextlib.contextmanager
def _on_drive(
    path: Path, engine: str, group: object | None, chunk: int, *, share: float, param_tier: str
) -> Iterator[_Held]:
    """A layer that has something on a drive.

    Args:
        path: as for `chunks`.
        engine: likewise.
        group: likewise.
        chunk: bytes of masters.
        share: of the states, that is in RAM.
        param_tier: of the parameters.
    """
    tuning = Tuning(chunk=chunk, prefetch_chunks=BUFFERS, io_engine=engine)
    options = {"tier": "nvme", "param_tier": param_tier, "grad_tier": "cpu", "commit_every": None, "tuning": tuning}
    with (
        tempfile.TemporaryDirectory(prefix=".offload-probe-", dir=path) as folder,
        _held(_rows(CHUNKS * PAGE_BYTES), share, path=Path(folder) / "run", process_group=group, **options) as held,
    ):
        yield held


def _rows(nbytes: int) -> int:
    """Of a layer that has so many bytes of masters."""
    return nbytes // (MASTER_ITEM_BYTES * WIDTH)


@contextlib.contextmanager
def _held(rows: int, share: float = 0.0, **options: Any) -> Iterator[_Held]:
    """A layer of so many rows that is held with these options, with such a share of its states in RAM. Nothing is said
    of it."""
    options["compute_dtype"], device = torch.float32, accelerator()
    model = nn.Sequential(nn.Linear(WIDTH, rows, bias=False, device=device))
    if options["tier"] == "nvme":
        planned = plan_of(model, direct=device is None, **options)
        options["cpu_memory"] = planned.cpu_memory_for(share)
    with contextlib.redirect_stderr(io.StringIO()):
        optimizer = OffloadZero(model, **options)
    with optimizer:
        yield _Held(model, optimizer)
