"""Kept bases as files: chunks of any layout are put together from the tensors in one. The oracle is torch's slicing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload import CorruptionError
from offload.io.engine import IOFile, IOFuture, Transfer, aligned_memory
from offload.io.files import Files
from offload.io.threads import ThreadEngine
from offload.profiling import Timeline
from offload.sizes import PAGE_BYTES
from offload.storage import kept_base
from offload.storage.kept_base import BLOCK, BaseChunk, BaseName, BasePart, Contents, KeptBase, verify
from offload.storage.swap_format import SlotArrays
from tests.support.processes import holds_in_child
from tests.support.simulated_disk import SimulatedDisk
from tests.support.simulated_files import PowerCut

KEY = "5" * 32


def _tensors() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(1)
    codes, more = (
        torch.randint(256, (n,), generator=chance).to(torch.uint8) for n in (2 * BLOCK + 3 * PAGE_BYTES, BLOCK + 1000)
    )
    halves = torch.randn(BLOCK + 128, generator=chance).to(torch.bfloat16)
    powers, pairs = (more[:5000].view(dtype) for dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2))
    return {"codes": codes, "more": more, "scales": torch.randn(70_000, generator=chance), "halves": halves} | {
        "none": torch.empty(0),
        "one": torch.tensor([7.0]),
        "powers": powers,
        "pairs": pairs,
    }


class Watched(ThreadEngine):
    """Notes the bytes of each read."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def submit(self, transfer: Transfer) -> Transfer:
        if transfer.operation == "read":
            self.sizes.append(len(transfer.view))
        return super().submit(transfer)


@pytest.fixture
def engine() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def _named(directory: Path, tensors: Mapping[str, Tensor]) -> BaseName:
    return BaseName(directory, KEY, Contents.of((name, one.dtype, one.numel()) for name, one in tensors.items()))


@pytest.fixture
def name(tmp_path: Path, engine: Watched) -> BaseName:
    tensors = _tensors()
    made = _named(tmp_path, tensors)
    assert not kept_base.is_there(made, Files())
    kept_base.make(made, reversed(tensors.items()), Files(), engine)
    assert [*os.listdir(tmp_path)] == [made.path.name]
    return made


def _flat(dtype: torch.dtype, names: list[str]) -> tuple[Tensor, list[BasePart]]:
    """Tensors end to end as in a flat parameter, each at a multiple of 64 elements, and where each of them is."""
    tensors, parts, rows, at = _tensors(), [], [], 0
    for name in names:
        values = tensors[name].to(dtype)
        parts.append(BasePart(name, 0, at, len(values)))
        rows += [values, torch.zeros(-len(values) % 64, dtype=dtype)]
        at += sum(map(len, rows[-2:]))
    return torch.cat(rows), parts


def _cut(dtype: torch.dtype, parts: list[BasePart], start: int, stop: int) -> BaseChunk:
    """What of parts lies in elements `start` to `stop` of their flat."""
    found = []
    for one in parts:
        low, high = max(one.at, start), min(one.at + one.numel, stop)
        if low < high:
            found.append(BasePart(one.name, low - one.at, low - start, high - low))
    return BaseChunk(dtype, found)


@pytest.mark.parametrize(
    ("dtype", "names", "numel"),
    [
        (torch.uint8, ["codes", "more"], 4 * BLOCK),
        (torch.uint8, ["codes", "more"], BLOCK + 4096),
        (torch.uint8, ["more", "codes"], 100_032),
        (torch.float32, ["scales", "none", "one"], 30_016),
        (torch.bfloat16, ["halves", "scales"], 200_000),  # the second is cast
        (torch.float32, ["one", "halves"], 77_777),
    ],
    ids=str,
)
def test_chunks_of_any_layout_are_read(
    dtype: torch.dtype, names: list[str], numel: int, name: BaseName, engine: Watched
) -> None:
    flat, parts = _flat(dtype, names)
    ranges = [(start, min(start + numel, len(flat))) for start in range(0, len(flat), numel)]
    base = KeptBase(engine, name, names, [_cut(dtype, parts, *both) for both in ranges], Files(), Timeline())
    futures = []
    for chunk, (start, stop) in enumerate(ranges):
        arrays = SlotArrays(stop - start, (dtype.itemsize,))
        data = aligned_memory(arrays.nbytes)
        futures.append((base.slots.read(chunk, data, step=7), arrays.views(torch.frombuffer(data, dtype=torch.uint8))))
    for (future, (found,)), (start, stop) in zip(futures, ranges, strict=True):
        assert future.result(60) == PAGE_BYTES + -(-(stop - start) * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        assert torch.equal(found.view(torch.uint8), flat[start:stop].view(torch.uint8))
    if numel == 4 * BLOCK:  # whole blocks, page by page as they lie in the file
        assert 2 * BLOCK + 3 * PAGE_BYTES in engine.sizes
    for one, values in _tensors().items():
        found = base.tensor(one)
        assert found.dtype is values.dtype
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    base.close()


def _damaged(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("at", [0, 5, BLOCK, 2 * BLOCK + 3 * PAGE_BYTES - 1], ids=str)
@pytest.mark.parametrize("numel", [4 * BLOCK, 100_032])
def test_a_flipped_bit_is_found_where_it_is_read(at: int, numel: int, name: BaseName, engine: Watched) -> None:
    one = name.contents.tensors["codes"]
    _damaged(name.path, one.offset + at)
    flat, parts = _flat(torch.uint8, ["codes", "more"])
    starts = range(0, len(flat), numel)
    chunks = [_cut(torch.uint8, parts, start, min(start + numel, len(flat))) for start in starts]
    base = KeptBase(engine, name, ["codes", "more"], chunks, Files(), Timeline())
    for chunk, start in enumerate(starts):
        size = min(numel, len(flat) - start)
        future = base.slots.read(chunk, aligned_memory(SlotArrays(size, (1,)).nbytes), step=0)
        # A block is checked as a whole, whatever part of it is wanted.
        if start // BLOCK <= at // BLOCK <= (min(start + numel, one.numel) - 1) // BLOCK and start < one.numel:
            with pytest.raises(CorruptionError, match="codes: the data does not match its checksum") as caught:
                future.result(60)
            assert caught.value.chunk == chunk
            assert caught.value.file == str(name.path)
            assert caught.value.offset == one.offset + at // BLOCK * BLOCK
            assert any("remove this file" in note for note in caught.value.__notes__)
        else:
            future.result(60)
    base.close()
    assert [error is None for error in verify(name.path)] == [own != "codes" for own in name.contents.tensors]


def test_an_end_that_says_it_is_huge_takes_no_memory(name: BaseName, engine: Watched) -> None:
    """The file has holes, so that it is as long as it says."""
    size = 1 << 40
    os.truncate(name.path, PAGE_BYTES + size)
    with name.path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(kept_base._FOOTER.pack(kept_base._MAGIC, PAGE_BYTES, 5, size, bytes(16)).ljust(PAGE_BYTES, b"\0"))
    with pytest.raises(CorruptionError, match="has no end that this library wrote"):
        KeptBase(engine, name, (), (), Files(), Timeline())


# What interrupts the making of one.


class Moments:
    """Calls `end` at the moment of this number, and at each later one. `number` is of the next moment."""

    def __init__(self, last: int, end: Callable[[], None]) -> None:
        self.number, self._last, self._end = 0, last, end

    def __call__(self) -> None:
        self.number += 1
        if self.number > self._last:
            self._end()


class MomentFiles(Files):
    """A file system with moments around all that changes names. Names that were not synced may be lost with power."""

    def __init__(self, moment: Moments, disk: SimulatedDisk) -> None:
        super().__init__()
        self._moment, self._engine = moment, disk
        self._renamed: list[tuple[Path, Path]] = []

    def rename(self, old: Path, new: Path) -> None:
        self._moment()
        super().rename(old, new)
        self._engine.renamed(str(old), str(new))
        self._renamed.append((old, new))
        self._moment()

    def sync_directory(self, path: Path) -> None:
        self._moment()
        super().sync_directory(path)
        self._renamed.clear()
        self._moment()

    def remove(self, path: Path) -> None:
        self._moment()
        super().remove(path)

    def crash(self, seed: int) -> None:
        for old, new in reversed(self._renamed):
            if seed % 2:
                os.rename(new, old)


class MomentDisk(SimulatedDisk):
    """A disk with a moment before each write, and around each sync."""

    def __init__(self, moment: Moments) -> None:
        super().__init__()
        self._moment = moment

    def submit(self, transfer: Transfer) -> Transfer:
        self._moment()
        super().submit(transfer).exception()
        return transfer

    def sync(self, file: IOFile) -> IOFuture:
        future = super().sync(file)
        self._moment()
        return future


SMALL = {"codes": torch.arange(9000).to(torch.uint8), "scales": torch.linspace(-1, 1, 700), "table": torch.ones(16)}


def _made(name: BaseName, moment: Moments) -> tuple[MomentFiles, MomentDisk]:
    """Makes a base, with what there is to write it."""
    disk = MomentDisk(moment)
    files = MomentFiles(moment, disk)
    kept_base.is_there(name, files)
    with suppress(PowerCut):
        kept_base.make(name, SMALL.items(), files, disk)
    return files, disk


def _require_whole_or_made_again(name: BaseName, engine: ThreadEngine) -> bool:
    """Whether the base was whole. Else it is made again, and nothing else is left."""
    was_there = kept_base.is_there(name, Files())
    if not was_there:
        kept_base.make(name, SMALL.items(), Files(), engine)
    base = KeptBase(engine, name, (), (), Files(), Timeline())
    for own, values in SMALL.items():
        assert torch.equal(base.tensor(own), values)
    base.close()
    assert was_there or os.listdir(name.directory) == [name.path.name]
    return was_there


def test_power_cuts_leave_a_whole_base_or_none(tmp_path: Path, engine: Watched) -> None:
    found = set()
    moment = Moments(1000, lambda: None)
    _made(_named(tmp_path / "all", SMALL), moment)
    for cut in range(moment.number + 1):
        for seed in (0, 1):
            name = _named(tmp_path / f"{cut}-{seed}", SMALL)

            def end() -> None:
                raise PowerCut

            files, disk = _made(name, Moments(cut, end))
            disk.crash(seed)
            files.crash(seed)
            found.add(_require_whole_or_made_again(name, engine))
    assert found == {True, False}


def test_a_process_that_is_killed_leaves_a_whole_base_or_none(tmp_path: Path, engine: Watched) -> None:
    name = _named(tmp_path, SMALL)

    def killed(at: int) -> bool:
        _made(name, Moments(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        return True

    found = []
    for moment in range(100):
        is_done = holds_in_child(partial(killed, moment))
        found.append(_require_whole_or_made_again(name, engine))
        name.path.unlink()
        if is_done:
            break
    assert set(found) == {True, False}
    assert found == sorted(found)  # from some moment on it is whole
