"""Several directories: each chunk in one of them, each with its share, nothing left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.devices.copies import HostCopier
from offload.errors import BudgetError, PathError, PathInUseError
from offload.io.engine import IOFile
from offload.io.files import Files
from offload.io.threads import ThreadEngine
from offload.sizes import PAGE_BYTES
from offload.storage.arena import Arena
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import RunFiles, Stripes, assign, memory_of
from offload.storage.swap_format import SlotArrays
from tests.support.run_files import swap_in
from tests.support.slot_maps import slots_of

NUMELS = (1024, 700, 1024, 5, 1500, 1024, 1024)


@pytest.fixture
def engine() -> Iterator[ThreadEngine]:
    made = ThreadEngine()
    yield made
    made.close()


@given(
    sizes=st.lists(st.integers(1, 100), max_size=60),
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
)
def test_every_stretch_of_the_order_is_shared_in_proportion(sizes: list[int], weights: list[float]) -> None:
    chosen = assign(sizes, weights)
    assert len(chosen) == len(sizes)
    loads = [0.0] * len(weights)
    for size, path in zip(sizes, chosen, strict=True):
        loads[path] += size
        # No path is further from being done than one chunk more than any other would be.
        soonest = min((load + max(sizes)) / weight for load, weight in zip(loads, weights, strict=True))
        assert max(load / weight for load, weight in zip(loads, weights, strict=True)) <= soonest + 1e-9


def test_one_path_gets_all_and_a_twice_as_fast_one_twice_as_much() -> None:
    assert assign([5, 5, 5], [3.0]) == [0, 0, 0]
    assert sorted(assign([1] * 9, [2.0, 1.0])) == [0] * 6 + [1] * 3


def test_chunks_come_back_from_where_they_went(engine: ThreadEngine, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    stripes = Stripes(engine, paths, [2.0, 1.0], slots_of(NUMELS))
    assert stripes.paths == tuple(str(swap_in(path)) for path in paths)
    arena = Arena(len(NUMELS) * SlotArrays(max(NUMELS)).nbytes, HostCopier())
    buffers = [arena.carve(SlotArrays(numel).nbytes) for numel in NUMELS]
    for chunk, buffer in enumerate(buffers):
        buffer[PAGE_BYTES:] = chunk
    slots = stripes.of(ChunkKind.STATES)
    assert slots is not None
    for future in [slots.write(chunk, memory_of(buffer), step=3) for chunk, buffer in enumerate(buffers)]:
        future.result(30)
    wanted = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.zero_()
    for future in [slots.read(chunk, memory_of(buffer), step=3) for chunk, buffer in enumerate(buffers)]:
        future.result(30)
    assert all(torch.equal(buffer, want) for buffer, want in zip(buffers, wanted, strict=True))
    sizes = [os.stat(path).st_size for path in stripes.paths]
    assert sum(sizes) == 2 * PAGE_BYTES + sum(SlotArrays(numel).nbytes for numel in NUMELS)
    assert min(sizes) > PAGE_BYTES
    stripes.close()


def test_a_locked_path_among_several_is_named_and_the_others_are_left_as_they_were(
    engine: ThreadEngine, tmp_path: Path
) -> None:
    held = Stripes(engine, [tmp_path / "b"], [1.0], slots_of(NUMELS))
    with pytest.raises(PathInUseError) as caught:
        Stripes(engine, [tmp_path / "a", tmp_path / "b"], [1.0, 1.0], slots_of(NUMELS))
    assert str(tmp_path / "b") in str(caught.value)
    assert not (tmp_path / "a").exists()
    held.close()


def test_a_full_path_among_several_is_named_and_nothing_is_left_behind(engine: ThreadEngine, tmp_path: Path) -> None:
    class Full(Files):
        def allocate(self, file: IOFile, offset: int, length: int) -> None:
            if file.path.startswith(str(tmp_path / "b")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().allocate(file, offset, length)

    with pytest.raises(BudgetError) as caught:
        Stripes(engine, [tmp_path / "a", tmp_path / "b"], [1.0, 1.0], slots_of(NUMELS), RunFiles(files=Full()))
    assert str(tmp_path / "b") in str(caught.value)
    assert caught.value.option == "path"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == []


class Modeless(Files):
    """Attributes: code: of the error where a mode is to be set."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def make_private(self, file: IOFile) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_whose_mode_cannot_be_set_is_used_and_that_is_said(
    engine: ThreadEngine, tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a group shares a run, or a disk keeps no modes."""
    stripes = Stripes(engine, [tmp_path], [1.0], slots_of(NUMELS), RunFiles(files=Modeless(code)))
    assert f"{swap_in(tmp_path)}: its mode cannot be set ({os.strerror(code)})" in caplog.text
    stripes.close()


def test_another_error_of_setting_a_mode_is_said_and_nothing_is_left_behind(
    engine: ThreadEngine, tmp_path: Path
) -> None:
    with pytest.raises(PathError, match="cannot be made private") as caught:
        Stripes(engine, [tmp_path / "a"], [1.0], slots_of(NUMELS), RunFiles(files=Modeless(errno.EIO)))
    assert caught.value.errno == errno.EIO
    assert [*tmp_path.iterdir()] == []
