from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from offload.checkpoint import live as lives
from offload.checkpoint import reader as reading
from offload.checkpoint.commit import Commit, read_commit, write_commit
from offload.checkpoint.export import entries, export
from offload.checkpoint.manifest import Manifest, committed_slots
from offload.checkpoint.reader import Reader
from offload.devices.copies import HostCopier
from offload.errors import ConfigError, CorruptionError, PathError, PathInUseError, ResumeError, TierIOError
from offload.io.engine import Transfer
from offload.io.files import Files
from offload.io.threads import ThreadEngine
from offload.sizes import PAGE_BYTES
from offload.storage.arena import Arena
from offload.storage.directories import swap_name
from offload.storage.swap_file import RunFiles, SwapFile, memory_of
from offload.storage.swap_format import parse_header, parse_superblock
from tests.support.committed import (
    FLATS,
    PARAMETERS,
    RUN,
    STEP,
    header,
    manifest_of,
    named,
    superblock,
    value_of,
    write_manifest,
    write_run,
)
from tests.support.damage import flip
from tests.support.faulty_engine import FaultyEngine
from tests.support.slot_maps import file_bytes, slots_of

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b", "c")]
    for place in found:
        place.mkdir()
    return found


def expected(number: int, kind: str) -> torch.Tensor:
    """A state of a parameter, in the parameter's shape."""
    facts = PARAMETERS[number]
    for flat, (params, offsets, numel) in enumerate(FLATS):
        if number in params:
            offset = offsets[params.index(number)]
            line = value_of(kind, flat, numel)[offset : offset + facts.numel]
            if facts.order is None:
                return line.reshape(facts.shape)
            # A channels-last one: in memory the channels come last.
            n, c, h, w = facts.shape
            return line.reshape(n, h, w, c).permute(0, 3, 1, 2)
    raise AssertionError


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize("split_master", [False, True])
def test_every_state_of_every_parameter_is_read(places: list[Path], world: int, paths: int, split_master: bool) -> None:
    write_run(places[:paths], world, extra={"epoch": 3, "x": torch.arange(4)}, split_master=split_master)
    with Reader([*reversed(places[:paths])]) as reader:
        for number, facts in enumerate(PARAMETERS):
            for kind in ("exp_avg", *STATE_KINDS):  # a split chunk has its first moments without the other slot
                found = reader.read(facts.name, kind)
                assert found.shape == facts.shape
                assert found.dtype == torch.float32
                assert torch.equal(found, expected(number, kind))
        assert all(found.error is None for found in reader.verify())
        assert str(reader.extra(world - 1)) == str({"epoch": 3, "x": torch.arange(4)})
        assert (reader.commit.step, reader.commit.run_id) == (STEP, RUN)


def test_ranks_may_own_their_stretches_in_any_order(places: list[Path]) -> None:
    write_run(places[:1], world=3, shares=(1, 2, 0))
    with Reader(places[:1]) as reader:
        for number, facts in enumerate(PARAMETERS):
            assert torch.equal(reader.read(facts.name, "master"), expected(number, "master"))


def test_slots_lie_where_the_store_puts_them(tmp_path: Path) -> None:
    """The format is said in store.slots; this is the same file, written by it."""
    numels, steps = (1000, 1, 1500), (3, 5, 4)
    engine = ThreadEngine()
    slots = slots_of(numels, 2, is_committed=True)
    slot_arrays = slots.all_arrays
    file = SwapFile(engine, tmp_path / "run", slots, RunFiles())
    for place in (0, 1):
        for chunk, numel in enumerate(numels):
            slot = slot_arrays[chunk]
            buffer = Arena(slot.nbytes, HostCopier()).carve(slot.nbytes)
            for number, state in enumerate(slot.views(buffer)):
                state.copy_(torch.arange(numel) + 10_000 * number + 100_000 * place)
            file.write(chunk, memory_of(buffer), step=steps[chunk], place=place).result(30)
    data = Path(file.path).read_bytes()
    file.close()
    engine.close()
    block = parse_superblock(data[:PAGE_BYTES], "swap")
    made = manifest_of()
    chunks = [
        chunk._replace(numel=numel, place=place, path=0)
        for chunk, numel, place in zip(made.chunks, numels, (1, 0, 1), strict=False)
    ]
    manifest = dataclasses.replace(made, chunks=tuple(chunks))
    assert block.chunks == manifest.slot_map.describe(manifest.slots_in(0))
    assert (block.places, block.stripe, block.commits) == (2, (0, 1), True)
    assert len(data) == file_bytes(slots)
    for slot in committed_slots(manifest):
        place = chunks[slot.chunk].place
        assert slot.size == slot_arrays[slot.chunk].nbytes
        found = parse_header(data[slot.offset : slot.offset + PAGE_BYTES], "swap", slot.offset, slot.chunk)
        assert (found.chunk, found.step, found.numel) == (slot.chunk, steps[slot.chunk], numels[slot.chunk])
        for number, (_, start, end) in enumerate(slot.arrays.ranges()):
            raw = data[slot.offset + start : slot.offset + end]
            values = torch.frombuffer(bytearray(raw), dtype=torch.float32)
            assert torch.equal(values, torch.arange(found.numel) + 10_000.0 * number + 100_000 * place)


@pytest.mark.parametrize("split_master", [False, True])
def test_the_table_has_every_parameter(places: list[Path], split_master: bool) -> None:
    write_run(places[:2], split_master=split_master)
    table = Reader(places).tensors()
    assert [row.facts for row in table] == [*PARAMETERS]
    itemsizes = [16 if split_master and facts.dtype == "float32" else 12 for facts in PARAMETERS]
    assert [row.nbytes for row in table] == [n * facts.numel for n, facts in zip(itemsizes, PARAMETERS, strict=True)]
    assert [row.chunks for row in table] == [((0, 0), (0, 1), (0, 2)), ((0, 3),), ((0, 3),), (), ((0, 4),)]


def test_slots_are_read_once_in_the_order_of_the_flats(places: list[Path]) -> None:
    read: list[int] = []

    class Counting(ThreadEngine):
        def submit(self, transfer: Transfer) -> Transfer:
            read.append(len(transfer.view))
            return super().submit(transfer)

    manifest = write_run(places[:1])[0]
    with Reader(places[:1], open_engine=Counting) as reader:
        export(places[1], entries(reader))
    assert read == [slot.size for slot in committed_slots(manifest)]


@pytest.mark.parametrize("split_master", [False, True])
def test_chunks_that_are_read_ahead_have_their_own_values(places: list[Path], split_master: bool) -> None:
    """Transfers begin and end late, in random order."""
    engines: list[FaultyEngine] = []

    def open_engine() -> FaultyEngine:
        engines.append(FaultyEngine())
        return engines[-1]

    manifests = write_run(places[:2], world=2, split_master=split_master)
    wanted = [(rank, chunk) for rank, made in enumerate(manifests) for chunk in range(len(made.chunks))]
    with Reader(places[:2], open_engine=open_engine) as reader:
        for order in (wanted, wanted[::-1], wanted[1:2], []):
            for (rank, chunk), states in zip(order, reader.slots(order), strict=True):
                facts = manifests[rank].chunks[chunk]
                for kind in STATE_KINDS:
                    whole = value_of(kind, facts.flat, FLATS[facts.flat][2])
                    assert torch.equal(states[kind], whole[facts.start : facts.start + facts.numel])
        # What is not waited for any more may still be under way.
        next(reader.slots(wanted))
    (engine,) = engines
    assert engine.most_at_once == (4 if split_master else 2)


@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize(("world", "split_master"), [(1, False), (3, False), (3, True)])
def test_an_export_has_the_names_shapes_and_rounded_values(
    places: list[Path], kind: str, world: int, split_master: bool
) -> None:
    write_run(places[:2], world, split_master=split_master)
    with Reader(places[:2]) as reader:
        export(places[2], entries(reader, kind), shard_bytes=3000)
        export(places[2], entries(reader, kind, torch.float16), stem="half")
    found = {}
    for path in sorted(places[2].glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert found.keys() == {facts.name for facts in PARAMETERS}
    with safe_open(places[2] / "half.safetensors", "pt") as file:
        for number, facts in enumerate(PARAMETERS):
            dtype = getattr(torch, facts.dtype) if kind == "master" else torch.float32
            assert torch.equal(found[facts.name], expected(number, kind).to(dtype))
            assert torch.equal(file.get_tensor(facts.name), expected(number, kind).half())


# Damage.


def test_a_flipped_bit_in_the_other_half_of_a_master_is_found(places: list[Path]) -> None:
    manifest = write_run(places[:1], split_master=True)[0]
    slot = committed_slots(manifest)[len(manifest.chunks)]
    flip(places[0] / swap_name(RUN, 0), slot.offset + PAGE_BYTES)
    with Reader(places[:1]) as reader:
        assert [found.chunk for found in reader.verify() if found.error] == [slot.chunk]
        assert torch.equal(reader.read("embed.weight", "exp_avg"), expected(0, "exp_avg"))
        with pytest.raises(CorruptionError):
            reader.read("embed.weight", "master")


@pytest.mark.parametrize("where", ["header", "first", "last", "padding"])
def test_one_flipped_bit_is_found_with_its_chunk_file_and_offset(places: list[Path], where: str) -> None:
    manifest = write_run(places[:2])[0]
    slot = committed_slots(manifest)[3]
    at = {"header": 20, "first": PAGE_BYTES, "last": PAGE_BYTES + 4 * 386 - 1, "padding": slot.size - 1}[where]
    flip(places[slot.path] / swap_name(RUN, 0), slot.offset + at)
    with Reader(places[:2]) as reader:
        bad = [found for found in reader.verify() if found.error]
        assert [(found.rank, found.chunk) for found in bad] == [(0, 3)]
        error = bad[0].error
        assert isinstance(error, CorruptionError)
        assert (error.chunk, error.file, error.offset) == (3, str(places[slot.path] / swap_name(RUN, 0)), slot.offset)
        # What lies elsewhere can still be read, before and after.
        for _ in range(2):
            assert torch.equal(reader.read("blocks.0.norm", "master"), expected(4, "master"))
            with pytest.raises(CorruptionError):
                reader.read("blocks.0.weight", "master")
        with pytest.raises(CorruptionError):
            export(places[2] / "out", entries(reader))
        assert not (places[2] / "out").exists()


def test_slots_of_another_step_run_or_chunk_are_found(places: list[Path]) -> None:
    manifest = write_run(places[:1])[0]
    path = places[0] / swap_name(RUN, 0)
    one, two = committed_slots(manifest)[:2]
    data = bytearray(path.read_bytes())
    data[two.offset : two.offset + two.size] = data[one.offset : one.offset + one.size]
    path.write_bytes(data)
    with Reader(places[:1]) as reader:
        errors = [str(found.error) for found in reader.verify() if found.error]
    assert len(errors) == 1
    assert "expected chunk 1 of step 6, found chunk 0 of step 7" in errors[0]


def test_a_slot_of_another_run_is_found(places: list[Path]) -> None:
    made = write_run(places[:1])[0]
    slot, facts = committed_slots(made)[0], made.chunks[0]
    with open(places[0] / swap_name(RUN, 0), "r+b") as file:
        file.seek(slot.offset)
        file.write(header("f" * 32, 0, facts.step, facts.numel, facts.checksum))
    with Reader(places[:1]) as reader, pytest.raises(CorruptionError, match="was written by run ffff"):
        reader.read("embed.weight", "master")


def test_a_slot_that_fits_itself_but_not_the_manifest_is_found(places: list[Path]) -> None:
    """As if the drive had given back the slot of an earlier attempt at the same step."""
    write_run(places[:1])
    stale = dataclasses.replace(
        Reader(places[:1]).manifests[0],
        chunks=tuple(
            chunk._replace(xxh3=f"{chunk.checksum ^ 1:016x}") for chunk in Reader(places[:1]).manifests[0].chunks
        ),
    )
    write_commit(places[0], named(Commit(RUN, STEP, (write_manifest(places[0], stale),)), places[:1]))
    with Reader(places[:1]) as reader:
        assert all("another version than was written or committed" in str(found.error) for found in reader.verify())


def test_a_truncated_file_is_found_wherever_it_ends(places: list[Path]) -> None:
    manifest = write_run(places[:1])[0]
    path = places[0] / swap_name(RUN, 0)
    whole = path.read_bytes()
    slots = committed_slots(manifest)
    for length in (len(whole) - 1, len(whole) - PAGE_BYTES, slots[1].offset + 5, slots[1].offset, PAGE_BYTES):
        path.write_bytes(whole[:length])
        lost = {slot.chunk for slot in slots if slot.offset + slot.size > length}
        with Reader(places[:1]) as reader:
            assert {found.chunk for found in reader.verify() if found.error} == lost
            if 0 in lost:
                with pytest.raises(CorruptionError, match="ends before this slot"):
                    reader.read("embed.weight", "master")
    path.write_bytes(whole[:100])
    with Reader(places[:1]) as reader:
        with pytest.raises(CorruptionError, match="in its superblock"):
            reader.read("embed.weight", "master")
        first, *others = reader.verify()
        assert (first.rank, first.chunk) == (0, None)
        assert "in its superblock" in str(first.error)
        assert [found.chunk for found in others if "swap file that is damaged" in str(found.error)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("offset", [-1, -2000])
def test_damage_after_the_text_of_a_superblock_is_found(places: list[Path], offset: int) -> None:
    """A resume compares the whole page."""
    write_run(places[:1])
    flip(places[0] / swap_name(RUN, 0), PAGE_BYTES + offset)
    with Reader(places[:1]) as reader:
        with pytest.raises(CorruptionError, match="after the text of its superblock"):
            reader.read("embed.weight", "master")
        errors = [(found.chunk, found.error) for found in reader.verify() if found.error]
    assert [chunk for chunk, _ in errors] == [None]
    assert "after the text of its superblock" in str(errors[0][1])


@pytest.mark.parametrize("damage", ["flipped", "cut short", "missing"])
def test_damage_of_the_tensors_of_extra_is_found(places: list[Path], damage: str) -> None:
    write_run(places[:1], world=2, extra={"seen": torch.ones(5)})
    (file,) = places[0].glob("extra-*-rank1.safetensors")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + (b"" if damage == "cut short" else b"\xff"))
    with Reader(places[:1]) as reader:
        errors = [(found.rank, found.chunk, found.error) for found in reader.verify() if found.error]
        with pytest.raises(CorruptionError):
            reader.extra(1)
    assert [at for *at, _ in errors] == [[1, None]]
    assert str(file) in str(errors[0][2])


def test_a_manifest_that_asks_for_a_huge_slot_takes_no_memory(places: list[Path]) -> None:
    made = write_run(places[:1])[0]
    huge = 1 << 44
    parameters = (dataclasses.replace(PARAMETERS[0], shape=(huge,)), *PARAMETERS[1:])
    flats = (dataclasses.replace(made.flats[0], numel=huge, owned=(0, huge)), *made.flats[1:])
    chunks = (made.chunks[0]._replace(numel=huge), *made.chunks[3:])
    hostile = dataclasses.replace(made, parameters=parameters, flats=flats, chunks=chunks)
    (places[0] / swap_name(RUN, 0)).write_bytes(superblock(hostile, 0) + bytes(PAGE_BYTES))
    write_commit(places[0], named(Commit(RUN, STEP, (write_manifest(places[0], hostile),)), places[:1]))
    with Reader(places[:1]) as reader:
        with pytest.raises(CorruptionError, match="ends before this slot"):
            next(reader.pieces("embed.weight", "master"))
        assert all(found.error for found in reader.verify())


CHANGES: list[tuple[str, Callable[[Manifest], bytes]]] = [
    ("commits nothing", lambda made: superblock(made, 0, commits=False)),
    ("slots a chunk, or files a rank", lambda made: superblock(made, 0, places=1)),
    ("other chunks", lambda made: superblock(made, 0, chunks={"held": [0], "numels": [1000]})),
    ("other chunks", lambda made: superblock(made, 0, chunks={"xxh3": "0" * 16})),
    ("or is another run's", lambda made: superblock(made, 0, run_id="0" * 32)),
]


@pytest.mark.parametrize(("match", "change"), CHANGES, ids=[match for match, _ in CHANGES])
def test_a_swap_file_of_another_run_or_layout_is_refused(
    places: list[Path], match: str, change: Callable[[Manifest], bytes]
) -> None:
    made = write_run(places[:1])[0]
    path = places[0] / swap_name(RUN, 0)
    path.write_bytes(change(made) + path.read_bytes()[PAGE_BYTES:])
    with pytest.raises((CorruptionError, ResumeError), match=match), Reader(places[:1]) as reader:
        reader.swap_files.lock()


def test_an_io_error_is_one_slots_error(places: list[Path]) -> None:
    manifest = write_run(places[:1])[0]
    slot, engine = committed_slots(manifest)[2], FaultyEngine()
    engine.fail("read", errno.EIO, nth=2)
    with Reader(places[:1], open_engine=lambda: engine) as reader:
        found = [(one.chunk, one.error) for one in reader.verify(threads=1)]
    assert [chunk for chunk, error in found if error] == [2]
    error = found[2][1]
    assert isinstance(error, TierIOError)
    path = str(places[0] / swap_name(RUN, 0))
    assert (error.operation, error.errno, error.filename, error.offset) == ("read", errno.EIO, path, slot.offset)


def test_what_a_disk_gives_wrong_or_not_at_all_is_found_and_can_be_read_again(places: list[Path]) -> None:
    write_run(places[:1])
    engine = FaultyEngine()
    with Reader(places[:1], open_engine=lambda: engine) as reader:
        for at in (20, PAGE_BYTES, PAGE_BYTES + 3999):
            engine.flip("read", at)
            with pytest.raises(CorruptionError):
                reader.read("embed.weight", "master")
        engine.fail("read", errno.EIO)
        with pytest.raises(TierIOError):
            list(reader.slots([(0, 0), (0, 1)]))
        engine.flip("read", PAGE_BYTES, nth=1)
        with pytest.raises(CorruptionError, match="does not match its checksum"):
            list(reader.slots([(0, 0), (0, 1), (0, 2)]))
        assert torch.equal(reader.read("embed.weight", "master"), expected(0, "master"))


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(places: list[Path]) -> None:
    slot = max(committed_slots(write_run(places[:1])[0]), key=lambda slot: slot.offset)
    with Reader(places[:1]) as reader:
        reader.swap_files.lock()
        os.truncate(places[0] / swap_name(RUN, 0), slot.offset + PAGE_BYTES)
        found = {one.chunk: one.error for one in reader.verify() if one.error}
    assert found.keys() == {slot.chunk}
    assert isinstance(found[slot.chunk], TierIOError)


@pytest.mark.parametrize("piece", [PAGE_BYTES, 3 * PAGE_BYTES, 1 << 22])
@pytest.mark.parametrize("threads", [1, 5])
def test_verifying_in_pieces_of_any_size_finds_the_same(
    places: list[Path], piece: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_run(places[:2], world=1)[0]
    slot = committed_slots(manifest)[2]
    flip(places[slot.path] / swap_name(RUN, 0), slot.offset + slot.size - 1)
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    with Reader(places[:2]) as reader:
        found = list(reader.verify(threads))
    assert [one.chunk for one in found] == [0, 1, 2, 3, 4]
    assert [one.chunk for one in found if one.error] == [2]
    assert sum(one.nbytes for one in found) == sum(slot.size for slot in committed_slots(manifest))


@pytest.mark.parametrize("threads", [1, 3])
def test_verifying_reads_one_piece_a_thread_at_a_time(
    places: list[Path], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the pieces are all the memory that it takes."""
    lengths: list[int] = []

    class Counting(FaultyEngine):
        def submit(self, transfer: Transfer) -> Transfer:
            lengths.append(len(transfer.view))
            return super().submit(transfer)

    manifest = write_run(places[:1])[0]
    engine = Counting()
    monkeypatch.setattr(reading, "PIECE_BYTES", 2 * PAGE_BYTES)
    with Reader(places[:1], open_engine=lambda: engine) as reader:
        assert all(one.error is None for one in reader.verify(threads))
    assert max(lengths) == 2 * PAGE_BYTES
    assert sum(lengths) == sum(slot.size for slot in committed_slots(manifest))
    assert engine.most_at_once <= threads


# Whose the path is.


def test_a_directory_without_a_commit_says_so(places: list[Path]) -> None:
    with pytest.raises(ResumeError, match="no commit"):
        Reader(places)
    with pytest.raises(ResumeError, match="no commit"):
        Reader([])


def test_a_missing_directory_of_the_run_is_named(places: list[Path]) -> None:
    write_run(places)
    with Reader(places[:2]) as reader, pytest.raises(ResumeError, match="directory 2 of the 3"):
        reader.read("embed.weight", "master")


def test_directories_of_two_runs_are_refused(places: list[Path]) -> None:
    write_run(places[:1])
    write_run(places[1:2])
    with pytest.raises(ResumeError, match="several runs"):
        Reader(places)


def test_a_live_run_can_be_inspected_but_not_verified(places: list[Path]) -> None:
    write_run(places[:1])
    with open(places[0] / swap_name(RUN, 0), "r+b") as run:
        fcntl.flock(run, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with Reader(places[:1]) as reader:
            assert len(reader.tensors()) == len(PARAMETERS)
            with pytest.raises(PathInUseError):
                list(reader.verify())
            with pytest.raises(PathInUseError):
                reader.read("embed.weight", "master")
    with Reader(places[:1]) as one, Reader(places[:1]) as two:
        assert torch.equal(one.read("embed.weight", "master"), two.read("embed.weight", "master"))
        with open(places[0] / swap_name(RUN, 0), "r+b") as run, pytest.raises(BlockingIOError):
            fcntl.flock(run, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(places[0] / swap_name(RUN, 0), "r+b") as run:
        fcntl.flock(run, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_commit_between_record_and_manifest_is_followed(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_run(places[:1])[0]
    later = dataclasses.replace(made, step=STEP + 1)

    def slow(directory: Path, files: Files) -> Commit | None:
        found = read_commit(directory, files)
        if found and found.step == STEP:
            write_commit(directory, Commit(RUN, STEP + 1, (write_manifest(directory, later),)))
            (directory / f"manifest-{RUN}-{STEP}-rank0.json").unlink()
        return found

    monkeypatch.setattr(lives, "read_commit", slow)
    assert Reader(places[:1]).commit.step == STEP + 1


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_what_is_no_swap_file_is_not_followed(places: list[Path], kind: str) -> None:
    write_run(places[:1])
    path = places[0] / swap_name(RUN, 0)
    shutil.move(path, places[1] / "real")
    if kind == "symlink":
        path.symlink_to(places[1] / "real")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with Reader(places[:1]) as reader, pytest.raises(PathError) as caught:
        reader.read("embed.weight", "master")
    assert caught.value.filename == str(path)


def test_nothing_on_the_disk_is_changed(places: list[Path]) -> None:
    write_run(places[:2])
    before = {path: (path.read_bytes(), os.stat(path).st_mtime_ns) for place in places for path in place.iterdir()}
    with Reader(places[:2]) as reader:
        list(reader.verify())
        reader.read("embed.weight", "master")
    after = {path: (path.read_bytes(), os.stat(path).st_mtime_ns) for place in places for path in place.iterdir()}
    assert before == after


@pytest.mark.parametrize(("name", "kind"), [("nobody", "master"), ("embed.weight", "grad")])
def test_what_is_not_there_is_refused_by_name(places: list[Path], name: str, kind: str) -> None:
    write_run(places[:1])
    with Reader(places[:1]) as reader, pytest.raises(ConfigError, match=name if name == "nobody" else kind):
        reader.read(name, kind)
