from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.devices.copies import HostCopier
from offload.errors import BudgetError, CorruptionError, PathError, PathInUseError, TierIOError
from offload.io.engine import IOFile
from offload.io.files import LOCAL, Files
from offload.io.threads import ThreadEngine
from offload.sizes import MIB, PAGE_BYTES
from offload.storage.arena import Arena
from offload.storage.directories import check_directory, older_swap_name
from offload.storage.swap_file import RunFiles, SwapFile, memory_of
from offload.storage.swap_format import MAGIC, SlotArrays, Superblock, parse_superblock
from tests.support.damage import flipped
from tests.support.disks import FreeFiles
from tests.support.faulty_engine import FaultyEngine
from tests.support.processes import Forked, open_files
from tests.support.run_files import kinds_in, swap_in
from tests.support.slot_maps import file_bytes, slots_of

NUMELS = (1024, 1, 1500)
WAIT_S = 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def slots(engine: FaultyEngine, path: Path) -> Iterator[SwapFile]:
    made = SwapFile(engine, path, slots_of(NUMELS, 2), RunFiles())
    yield made
    made.close()


def buffer_for(chunk: int) -> Tensor:
    return Arena(SlotArrays(NUMELS[chunk]).nbytes, HostCopier()).carve(SlotArrays(NUMELS[chunk]).nbytes)


def filled(chunk: int, value: float) -> Tensor:
    buffer = buffer_for(chunk)
    for n, state in enumerate(SlotArrays(NUMELS[chunk]).views(buffer)):
        state.copy_(torch.arange(NUMELS[chunk]) + value + 100 * n)
    return buffer


def offset_of(chunk: int, place: int = 0) -> int:
    sizes = [SlotArrays(numel).nbytes for numel in NUMELS]
    return PAGE_BYTES + place * sum(sizes) + sum(sizes[:chunk])


def write(slots: SwapFile, chunk: int, value: float, *, step: int = 1, place: int = 0) -> None:
    slots.write(chunk, memory_of(filled(chunk, value)), step=step, place=place).result(WAIT_S)


def read(slots: SwapFile, chunk: int, *, step: int = 1, place: int = 0) -> float:
    """Reads and checks a slot; the value it was filled with."""
    buffer = buffer_for(chunk)
    slots.read(chunk, memory_of(buffer), step=step, place=place).result(WAIT_S)
    value = SlotArrays(NUMELS[chunk]).views(buffer)[0][0].item()
    for state, expected in zip(
        SlotArrays(NUMELS[chunk]).views(buffer), SlotArrays(NUMELS[chunk]).views(filled(chunk, value)), strict=True
    ):
        assert torch.equal(state, expected)
    return value


def test_every_slot_gives_back_what_was_written_there(slots: SwapFile) -> None:
    for place in (0, 1):
        for chunk in range(3):
            write(slots, chunk, chunk + 10 * place, step=3 + place, place=place)
    for place in (1, 0):
        for chunk in (2, 0, 1):
            assert read(slots, chunk, step=3 + place, place=place) == chunk + 10 * place


def test_the_new_version_of_a_chunk_goes_beside_the_old_one(slots: SwapFile) -> None:
    write(slots, 0, 5, step=1, place=0)
    write(slots, 0, 6, step=2, place=1)
    assert read(slots, 0, step=1, place=0) == 5
    assert read(slots, 0, step=2, place=1) == 6


def test_the_file_has_its_whole_size_from_the_start_and_is_private(slots: SwapFile, path: Path) -> None:
    info = os.stat(swap_in(path))
    assert info.st_size == file_bytes(slots_of(NUMELS, 2))
    assert info.st_blocks * 512 >= info.st_size
    assert info.st_mode & 0o777 == 0o600
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert slots.path == str(swap_in(path))


def test_the_superblock_says_that_nothing_is_committed(slots: SwapFile, path: Path) -> None:
    block = swap_in(path).read_bytes()[:PAGE_BYTES]
    assert block.startswith(b"offload swap\n")
    text = json.loads(block[32 : 32 + int.from_bytes(block[20:24], "little")])
    assert text["commits"] is False
    assert (text["places"], text["chunks"]) == (2, {"held": [0, 1, 2], "numels": list(NUMELS)})


def test_a_superblock_fits_its_page_for_any_number_of_chunks(engine: FaultyEngine, path: Path) -> None:
    slots = SwapFile(engine, path, slots_of([1] * 5000), RunFiles())
    block = swap_in(path).read_bytes()[:PAGE_BYTES]
    slots.close()
    assert "xxh3" in json.loads(block[32 : 32 + int.from_bytes(block[20:24], "little")])["chunks"]


def patch(path: Path, offset: int, change: Callable[[bytes], bytes], length: int = 1) -> None:
    with open(swap_in(path), "r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        file.write(change(old))


@pytest.mark.parametrize("at", [0, 8, 13, 28, 36, 44, 52, 60])
def test_a_damaged_header_is_found(slots: SwapFile, path: Path, at: int) -> None:
    write(slots, 2, 7)
    patch(path, offset_of(2) + at, flipped)
    with pytest.raises(CorruptionError) as caught:
        read(slots, 2)
    assert caught.value.chunk == 2
    assert caught.value.file == str(swap_in(path))
    assert caught.value.offset == offset_of(2)
    assert str(offset_of(2)) in str(caught.value)


@pytest.mark.parametrize("at", [PAGE_BYTES, PAGE_BYTES + 4 * 1500 - 1, -1])
def test_one_flipped_bit_in_the_data_is_found(slots: SwapFile, path: Path, at: int) -> None:
    write(slots, 2, 7)
    patch(path, offset_of(2) + at % SlotArrays(NUMELS[2]).nbytes, flipped)
    with pytest.raises(CorruptionError, match="checksum"):
        read(slots, 2)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_bit_flipped_on_its_way_is_found(slots: SwapFile, engine: FaultyEngine, operation: str) -> None:
    engine.flip(operation, PAGE_BYTES + 5)
    write(slots, 0, 7)
    with pytest.raises(CorruptionError, match="checksum"):
        read(slots, 0)


def test_a_lost_write_is_found_by_the_step_in_the_header(slots: SwapFile, engine: FaultyEngine) -> None:
    write(slots, 0, 1, step=1)
    engine.lose()
    write(slots, 0, 2, step=2)
    with pytest.raises(CorruptionError, match="expected chunk 0 of step 2, found chunk 0 of step 1"):
        read(slots, 0, step=2)


def test_a_lost_write_is_found_though_what_was_there_before_is_of_the_same_step(
    slots: SwapFile, engine: FaultyEngine
) -> None:
    write(slots, 0, 5, step=1, place=1)
    engine.lose()
    write(slots, 0, 6, step=1, place=1)
    with pytest.raises(CorruptionError, match="another version than was written"):
        read(slots, 0, step=1, place=1)


def test_each_place_of_a_chunk_has_a_checksum_of_its_own(slots: SwapFile) -> None:
    write(slots, 0, 5, step=1, place=0)
    first = slots.checksum(0, 0)
    write(slots, 0, 6, step=1, place=1)
    assert slots.checksum(0, 0) == first != slots.checksum(0, 1)
    assert read(slots, 0, step=1, place=0) == 5


def test_a_file_of_three_places_a_chunk_is_refused_by_older_versions(engine: FaultyEngine, path: Path) -> None:
    slots = SwapFile(engine, path, slots_of(NUMELS, 3, is_committed=True), RunFiles())
    block = swap_in(path).read_bytes()[:PAGE_BYTES]
    assert int.from_bytes(block[16:20], "little") == 2  # they read up to 1, and say so
    assert parse_superblock(block, "file").places == 3
    for place in range(3):
        write(slots, 1, place, place=place)
    assert [read(slots, 1, place=place) for place in range(3)] == [0, 1, 2]
    slots.close()
    with pytest.raises(CorruptionError, match="not one that this library writes"):
        parse_superblock(block[:16] + (1).to_bytes(4, "little") + block[20:], "file")


@pytest.mark.parametrize("pages", [1, 2])
def test_a_torn_write_is_found(slots: SwapFile, engine: FaultyEngine, pages: int) -> None:
    write(slots, 0, 1, step=1)
    engine.tear(pages * PAGE_BYTES)
    write(slots, 0, 2, step=2)
    with pytest.raises(CorruptionError, match="checksum"):
        read(slots, 0, step=2)


def test_a_slot_that_was_never_written_is_found(slots: SwapFile) -> None:
    with pytest.raises(CorruptionError):
        read(slots, 1, step=0)


def test_swapped_slots_are_found(engine: FaultyEngine, path: Path) -> None:
    twins = SwapFile(engine, path, slots_of((1024, 1024)), RunFiles())
    size = SlotArrays(1024).nbytes
    write(twins, 0, 1)
    whole = swap_in(path).read_bytes()
    patch(path, PAGE_BYTES + size, lambda _: whole[PAGE_BYTES : PAGE_BYTES + size])
    with pytest.raises(CorruptionError, match="expected chunk 1 of step 1, found chunk 0 of step 1"):
        twins.read(1, memory_of(buffer_for(0)), step=1).result(WAIT_S)
    twins.close()


def test_another_runs_slot_is_found(path: Path) -> None:
    first = ThreadEngine()
    old = SwapFile(first, path, slots_of(NUMELS), RunFiles())
    write(old, 0, 1)
    written = Path(old.path).read_bytes()
    old.close()
    first.close()
    second = ThreadEngine()
    new = SwapFile(second, path, slots_of(NUMELS), RunFiles())
    patch(path, PAGE_BYTES, lambda _: written[PAGE_BYTES:], len(written) - PAGE_BYTES)
    with pytest.raises(CorruptionError, match="not by "):
        read(new, 0)
    new.close()
    second.close()


def test_a_truncated_file_is_an_error_with_its_place(slots: SwapFile, path: Path) -> None:
    write(slots, 2, 1, place=1)
    os.truncate(swap_in(path), offset_of(2, 1) + 2 * PAGE_BYTES)
    with pytest.raises(TierIOError) as caught:
        read(slots, 2, place=1)
    assert caught.value.filename == str(swap_in(path))
    assert caught.value.offset == offset_of(2, 1) + 2 * PAGE_BYTES


def test_an_error_of_the_engine_arrives_unchanged(slots: SwapFile, engine: FaultyEngine) -> None:
    engine.fail("write", errno.ENOSPC)
    with pytest.raises(TierIOError, match="No space left"):
        write(slots, 0, 1)
    engine.fail("read", errno.EIO)
    with pytest.raises(TierIOError) as caught:
        read(slots, 0)
    assert caught.value.errno == errno.EIO


def test_padding_of_a_buffer_that_held_something_else_is_written_as_zeros(slots: SwapFile, path: Path) -> None:
    buffer = buffer_for(1).fill_(255)
    for state in SlotArrays(1).views(buffer):
        state.zero_()
    slots.write(1, memory_of(buffer), step=1).result(WAIT_S)
    data = swap_in(path).read_bytes()[offset_of(1) + PAGE_BYTES : offset_of(2)]
    assert not any(data)


# Whose the path is.


def test_two_runs_of_one_process_cannot_share_a_path(slots: SwapFile, path: Path) -> None:
    write(slots, 0, 1)
    other = ThreadEngine()
    with pytest.raises(PathInUseError) as caught:
        SwapFile(other, path, slots_of(NUMELS), RunFiles())
    assert caught.value.filename == str(path / older_swap_name(0))
    assert open_files().count(str(swap_in(path))) == 1
    other.close()
    assert read(slots, 0) == 1


HOLD = """
import os, sys
from pathlib import Path
from offload.io.threads import ThreadEngine
from offload.storage.swap_file import RunFiles, SwapFile
from tests.support.slot_maps import slots_of
engine = ThreadEngine()
slots = SwapFile(engine, Path(sys.argv[1]), slots_of([1024]), RunFiles())
child = os.fork() if sys.argv[2] == "fork" else None
if child == 0:
    import time
    time.sleep(60)
    os._exit(0)
print(child or 0, flush=True)
sys.stdin.read()
"""


def opens(path: Path, files: Files | None = None) -> bool:
    engine = ThreadEngine()
    try:
        SwapFile(engine, path, slots_of(NUMELS), RunFiles(files=files or Files())).close()
    except PathInUseError:
        return False
    finally:
        engine.close()
    return True


def test_another_process_holds_the_path_until_it_is_killed_even_if_its_child_lives_on(path: Path) -> None:
    with Forked(HOLD, str(path), "fork") as holder:
        child = int(holder.stdout.readline())
        try:
            assert not opens(path)
            holder.kill()
            holder.wait()
            os.kill(child, 0)
            assert opens(path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_that_another_run_removes_meanwhile_is_not_taken(path: Path) -> None:
    class Removed(Files):
        def lock(self, file: IOFile, *, exclusive: bool) -> None:
            super().lock(file, exclusive=exclusive)
            swap_in(path).unlink(missing_ok=True)

    engine = ThreadEngine()
    with pytest.raises(PathInUseError, match="another run has just removed this file"):
        SwapFile(engine, path, slots_of(NUMELS), RunFiles(files=Removed()))
    engine.close()


def test_no_two_runs_have_files_of_one_name(path: Path) -> None:
    engine, run = ThreadEngine(), RunFiles()
    SwapFile(engine, path, slots_of(NUMELS), run).make_permanent()
    engine.close()
    before = swap_in(path).read_bytes()
    assert opens(path)
    engine = ThreadEngine()
    with pytest.raises(PathError, match="no run uses a name again"):
        SwapFile(engine, path, slots_of(NUMELS), run)
    engine.close()
    assert swap_in(path).read_bytes() == before


def test_a_run_that_did_not_begin_leaves_nothing_and_one_that_did_its_files(path: Path) -> None:
    path.mkdir()
    for begins in (False, True):
        engine = ThreadEngine()
        slots = SwapFile(engine, path, slots_of(NUMELS), RunFiles())
        if begins:
            slots.make_permanent()
        assert kinds_in(path) == {"swap"}
        slots.close()
        engine.close()
        assert [file.name[:5] for file in sorted(path.iterdir())] == (["offlo", "swap-"] if begins else [])


def test_what_keeps_older_versions_out_is_a_page_that_they_take_for_a_run(slots: SwapFile, path: Path) -> None:
    place = path / older_swap_name(0)
    assert place.read_bytes() == swap_in(path).read_bytes()[:PAGE_BYTES]
    with open(place, "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_what_keeps_older_versions_out_stays_another_runs_until_this_one_has_begun(path: Path) -> None:
    path.mkdir()
    other = Superblock("a" * 32, 2, (0, 1), True, {"held": [], "numels": []}).encode()
    (path / older_swap_name(0)).write_bytes(other)
    engine = ThreadEngine()
    slots = SwapFile(engine, path, slots_of(NUMELS, 2), RunFiles())
    assert (path / older_swap_name(0)).read_bytes() == other
    slots.shut_out_older()
    assert (path / older_swap_name(0)).read_bytes() == swap_in(path).read_bytes()[:PAGE_BYTES]
    slots.close()
    engine.close()


def test_a_swap_file_of_an_older_version_is_not_changed(path: Path) -> None:
    path.mkdir()
    content = MAGIC + bytes(2 * PAGE_BYTES)
    (path / older_swap_name(0)).write_bytes(content)
    assert opens(path)
    assert (path / older_swap_name(0)).read_bytes() == content


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis" * 1000, bytes(100) + b"my disk image"])
def test_a_foreign_file_in_the_swap_files_place_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.mkdir(mode=0o755)
    place = path / older_swap_name(0)
    place.write_bytes(content)
    os.chmod(place, 0o644)
    with pytest.raises(PathError, match="is no file of this library"):
        opens(path)
    assert place.read_bytes() == content
    assert os.stat(place).st_mode & 0o777 == 0o644
    assert [*path.iterdir()] == [place]
    assert str(place) not in open_files()


def test_other_files_in_the_directory_are_left_alone(path: Path) -> None:
    path.mkdir(mode=0o750)
    (path / "notes.txt").write_text("mine")
    assert opens(path)
    assert (path / "notes.txt").read_text() == "mine"
    assert os.stat(path).st_mode & 0o777 == 0o750


@pytest.mark.parametrize("kind", ["fifo", "directory", "symlink", "device"])
def test_what_is_no_regular_file_in_the_swap_files_place_is_refused(path: Path, kind: str) -> None:
    path.mkdir()
    place = path / older_swap_name(0)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "device":
        if os.geteuid():
            pytest.skip("needs root")
        os.mknod(place, 0o20666, os.makedev(1, 5))
    else:
        place.symlink_to(path / "elsewhere")
    before = os.lstat(place)
    with pytest.raises(PathError):
        opens(path)
    assert os.lstat(place) == before
    assert list(path.iterdir()) == [place]


# Directories that cannot be it.


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("file", errno.ENOTDIR),
        ("symlink", errno.ELOOP),
        ("dangling symlink", errno.ELOOP),
        ("no parent", errno.ENOENT),
        ("below a file", errno.ENOTDIR),
        ("too long", errno.ENAMETOOLONG),
    ],
)
def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path, kind: str, code: int) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("mine")
    elif kind == "symlink":
        (tmp_path / "real").mkdir()
        path.symlink_to(tmp_path / "real")
    elif kind == "dangling symlink":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "no parent":
        path = path / "deeper"
    elif kind == "below a file":
        path.write_text("mine")
        path = path / "deeper"
    else:
        path = tmp_path / ("x" * 300)
    before = sorted(tmp_path.iterdir())
    for refuse in (lambda: check_directory(path, LOCAL), lambda: opens(path)):
        with pytest.raises(PathError) as caught:
            refuse()
        assert caught.value.errno == code
        assert caught.value.filename == str(path)
    assert sorted(tmp_path.iterdir()) == before


def test_the_first_directory_that_is_missing_is_named_and_how_to_make_all(tmp_path: Path) -> None:
    path = tmp_path / "scratch" / "my runs" / "run1"
    for refuse in (lambda: check_directory(path, LOCAL), lambda: opens(path)):
        with pytest.raises(PathError, match=rf"{tmp_path / 'scratch'} does not exist: make it first") as caught:
            refuse()
    command = re.search(r"\((mkdir -p .*?)\)", str(caught.value))
    assert command
    subprocess.run(["sh", "-c", command[1]], check=True)
    check_directory(path, LOCAL)


def read_only(path: Path) -> Iterator[Path]:
    """`path` mounted read-only: for root, file modes forbid nothing."""
    path.mkdir()
    for command in (["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(path)],):
        if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
            path.chmod(0o500)
            yield path
            return
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    yield from read_only(tmp_path / "forbidden")


def test_a_directory_that_cannot_be_written_is_refused(forbidden: Path) -> None:
    for path, named in ((forbidden, ""), (forbidden / "run", f"{forbidden} ")):
        with pytest.raises(PathError, match=f"{named}is not writable"):
            check_directory(path, LOCAL)
        with pytest.raises(PathError, match=f"{named}is not writable"):
            opens(path)


def test_a_directory_that_the_kernel_refuses_to_make_is_a_path_error() -> None:
    with pytest.raises(PathError) as caught:
        opens(Path("/proc/offload-run"))
    assert caught.value.filename == "/proc/offload-run"


def test_the_current_directory_can_be_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert opens(Path("."))
    assert opens(Path("run"))


# Too little disk.


def test_a_disk_that_is_too_small_is_a_budget_error_and_nothing_is_left(small_disk: Path) -> None:
    engine, run = ThreadEngine(), RunFiles()
    with pytest.raises(BudgetError) as caught:
        SwapFile(engine, small_disk / "run", slots_of([MIB]), run)
    run.files.let_go()
    assert caught.value.needed == file_bytes(slots_of([MIB]))
    assert 0 < caught.value.available <= MIB
    assert caught.value.option == "path"
    assert list(small_disk.iterdir()) == []
    assert not [name for name in open_files() if name.startswith(str(small_disk))]
    engine.close()


def test_a_disk_that_fills_up_meanwhile_is_a_budget_error_and_nothing_is_left(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    engine = ThreadEngine()
    with pytest.raises(BudgetError) as caught:
        SwapFile(engine, small_disk / "run", slots_of([MIB]), RunFiles(files=FreeFiles(1 << 42)))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert list((small_disk / "run").iterdir()) == []
    assert os.statvfs(small_disk).f_bfree > os.statvfs(small_disk).f_blocks - 4
    engine.close()


def test_what_a_file_grew_by_before_the_disk_was_full_goes_back(path: Path) -> None:
    class Half(Files):
        def allocate(self, file: IOFile, offset: int, length: int) -> None:
            # As file systems do that allocate extent by extent.
            self.truncate(file, length // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine, run = ThreadEngine(), RunFiles()
    SwapFile(engine, path, slots_of([MIB]), run).make_permanent()
    engine.close()
    os.truncate(swap_in(path), 3 * PAGE_BYTES)
    engine = ThreadEngine()
    with pytest.raises(BudgetError):
        SwapFile(engine, path, slots_of([MIB]), RunFiles(run.run_id, 0, [0], Half()))
    engine.close()
    assert os.stat(swap_in(path)).st_size == 3 * PAGE_BYTES


def test_a_disk_without_a_free_page_is_a_budget_error_and_nothing_is_left(path: Path) -> None:
    engine = FaultyEngine()
    engine.fail("write", errno.ENOSPC)
    with pytest.raises(BudgetError):
        SwapFile(engine, path, slots_of([MIB]), RunFiles(files=FreeFiles(0)))
    assert not path.exists()
    engine.fail("write", errno.EIO)
    with pytest.raises(TierIOError):
        SwapFile(engine, path, slots_of([MIB]), RunFiles(files=FreeFiles(0)))
    assert not path.exists()
    engine.close()


def test_space_that_the_file_system_denies_is_a_budget_error(path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        opens(path, FreeFiles(3 * PAGE_BYTES))
    # What is left, and the page that the superblock has.
    assert caught.value.available == 3 * PAGE_BYTES + PAGE_BYTES
    assert not path.exists()


def test_a_superblock_that_cannot_be_written_leaves_nothing(engine: FaultyEngine, path: Path) -> None:
    engine.fail("write", errno.EIO)
    with pytest.raises(TierIOError):
        SwapFile(engine, path, slots_of(NUMELS), RunFiles())
    assert not path.exists()
    assert not [name for name in open_files() if name.startswith(f"{path}/")]
