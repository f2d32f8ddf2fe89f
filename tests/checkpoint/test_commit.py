from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from offload.checkpoint import commit as commits
from offload.checkpoint.commit import (
    Commit,
    RankFiles,
    agree,
    copy_manifest,
    manifest_name,
    manifest_told,
    names_of,
    parse_commit,
    read_commit,
    read_extra,
    read_manifest,
    serialise_commit,
    spelled,
    tensors_name,
    write_commit,
)
from offload.checkpoint.live import collect
from offload.checkpoint.manifest import MAX_BYTES, Digest, Manifest
from offload.errors import ConfigError, CorruptionError, OffloadError, PathError, ResumeError, TierIOError
from offload.io.files import Files
from offload.storage.directories import COMMIT_NAME
from tests.support.committed import RUN, STEP, manifest_of, write_manifest
from tests.support.damage import flipped
from tests.support.simulated_files import PowerCut, SimulatedFiles

HERE = Path("/run")
cuts = pytest.mark.parametrize("cuts", [400, pytest.param(4000, marks=pytest.mark.slow)])
"""How many times the power is cut, each time at another moment."""


def at(step: int, rank: int = 0, world: int = 1) -> Manifest:
    """Larger than a sector, and different for every step."""
    made = manifest_of(rank, world)
    parameters = tuple(dataclasses.replace(param, age=min(param.age, step)) for param in made.parameters)
    chunks = tuple(chunk._replace(step=step, xxh3=f"{step:016x}") for chunk in made.chunks)
    return dataclasses.replace(made, step=step, parameters=parameters, chunks=chunks)


def extra_at(step: int) -> object:
    return {"step": step, "state": torch.full((300,), float(step))}


def commit(files: Files, step: int, world: int = 1, directory: Path = HERE) -> None:
    digests = tuple(write_manifest(directory, at(step, rank, world), extra_at(step), files) for rank in range(world))
    record = record_of(step, digests, directory)
    write_commit(directory, record, files)
    for rank in range(world):
        collect(directory, record, (), files, rank=rank)


def record_of(step: int, digests: tuple[Digest, ...], directory: Path = HERE, replaces: str | None = None) -> Commit:
    names = (names_of(at(step), rank, has_tensors=True) for rank in range(len(digests)))
    return Commit(RUN, step, digests, replaces, tuple(RankFiles((spelled(directory),), those) for those in names))


def committed_step(files: Files, directory: Path = HERE) -> int | None:
    """The step that is found, after checking that it is there whole."""
    record = read_commit(directory, files)
    if record is None:
        return None
    for rank in range(len(record.manifests)):
        manifest = read_manifest(directory, record, rank, files)
        expected = at(record.step, rank, len(record.manifests))
        assert dataclasses.replace(manifest, extra=None, tensors=None) == expected
        extra = read_extra(directory, manifest, files)
        assert isinstance(extra, dict)
        assert extra["step"] == record.step
        assert extra["state"].tolist() == [float(record.step)] * 300
    return record.step


def test_a_directory_without_a_record_has_no_commit() -> None:
    assert read_commit(HERE, SimulatedFiles()) is None


@pytest.mark.parametrize("world", [1, 3])
def test_what_was_committed_is_found_and_the_older_manifests_are_gone(tmp_path: Path, world: int) -> None:
    for step in (7, 9):
        for files, directory in ((commits.LOCAL, tmp_path), (SimulatedFiles(), HERE)):
            commit(files, step, world, directory)
            assert committed_step(files, directory) == step
            ours = [manifest_name(at(step), rank) for rank in range(world)]
            ours += [commits.tensors_name(at(step), rank) for rank in range(world)]
            assert sorted(without_room(files.names(directory))) == sorted([COMMIT_NAME, *ours])


def without_room(names: Iterable[str]) -> list[str]:
    """All names but those of the files that the next commit is written into."""
    return [name for name in names if not name.startswith("room-")]


def operations_of_a_commit() -> int:
    files = SimulatedFiles()
    commit(files, 7)
    first = files.operations
    commit(files, 8)
    return files.operations - first


@cuts
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_commit_whole(cuts: int) -> None:
    last = operations_of_a_commit()
    seen = set()
    for seed in range(cuts):
        chance = random.Random(seed)
        files = SimulatedFiles()
        commit(files, 7)
        files.cut_at = files.operations + chance.randrange(last + 1)
        decided = False
        try:
            digest = write_manifest(HERE, at(8), extra_at(8), files)
            write_commit(HERE, record_of(8, (digest,)), files)
            decided = True
            collect(HERE, record_of(8, (digest,)), (), files, rank=0)
        except PowerCut:
            pass
        found = committed_step(files.after_cut(chance.randrange(1 << 30)))
        assert found == 8 if decided else found in (7, 8), f"seed {seed}"
        assert committed_step(files.killed()) in (7, 8)
        seen.add((decided, found))
    assert seen == {(False, 7), (False, 8), (True, 8)}


@cuts
@pytest.mark.parametrize("world", [1, 3])
def test_power_cuts_in_a_row_never_go_back_and_leftovers_do_not_stop_a_commit(world: int, cuts: int) -> None:
    """The record of three ranks is larger than a sector."""
    for seed in range(cuts // 20):
        chance = random.Random(seed)
        files = SimulatedFiles()
        commit(files, 1, world)
        sure = 1
        for step in range(2, 12):
            files.cut_at = chance.randrange(world * operations_of_a_commit() + 10)
            files.operations = 0
            try:
                commit(files, step, world)
                sure = step
            except PowerCut:
                pass
            files = files.after_cut(chance.randrange(1 << 30))
            found = committed_step(files)
            assert found is not None
            assert found >= sure
            sure = found


@cuts
def test_of_several_ranks_all_are_found_or_the_ones_before(cuts: int) -> None:
    for seed in range(cuts // 10):
        files = SimulatedFiles()
        commit(files, 7, world=3)
        files.cut_at = files.operations + random.Random(seed).randrange(3 * operations_of_a_commit())
        with contextlib.suppress(PowerCut):
            commit(files, 8, world=3)
        assert committed_step(files.after_cut(seed)) in (7, 8)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_any_failing_operation_is_a_typed_error_and_the_old_commit_stays_whole(code: int) -> None:
    for number in range(operations_of_a_commit()):
        files = SimulatedFiles(code=code)
        commit(files, 7)
        files.fail_at = failed = files.operations + number
        try:
            commit(files, 8)
        except TierIOError as error:
            caught = error
        else:  # then the next record needs a new file
            assert files.log[failed].startswith("link room-")
            continue
        assert caught.errno == code
        assert caught.filename
        assert caught.operation in str(caught)
        for seed in range(20):
            assert committed_step(files.after_cut(seed)) in (7, 8)


def test_a_failed_sync_is_not_tried_again() -> None:
    clean = SimulatedFiles()
    commit(clean, 7)
    syncs = [number for number, name in enumerate(clean.log) if name.startswith("sync")]
    assert len(syncs) == 5
    for number in syncs:
        files = SimulatedFiles(fail_at=number)
        with pytest.raises(TierIOError, match="sync"):
            commit(files, 7)
        assert not [name for name in files.log[number + 1 :] if not name.startswith("remove")]


def test_a_failed_sync_says_how_many_bytes_may_be_lost() -> None:
    record = Commit(RUN, 7, (write_manifest(HERE, at(7), extra_at(7), SimulatedFiles()),))
    for copies in (False, True):
        clean = SimulatedFiles()
        write_manifest(HERE, at(7), extra_at(7), clean)
        syncs = []
        for number in range(100):
            files = SimulatedFiles()
            write_manifest(HERE, at(7), extra_at(7), files)
            files.fail_at = files.operations + number
            try:
                if copies:
                    copy_manifest(HERE, Path("/there"), record, 0, files)
                else:
                    write_manifest(HERE, at(8), extra_at(8), files)
                break
            except TierIOError as error:
                if error.operation == "sync" and error.filename.endswith(".new"):
                    syncs.append(error.length)
        names = [manifest_name(record, 0), tensors_name(record, 0)]
        assert sorted(syncs) == sorted(len(clean.read(HERE / name, MAX_BYTES)) for name in names)


def test_after_a_full_disk_the_next_commit_works() -> None:
    files = SimulatedFiles(code=errno.ENOSPC)
    commit(files, 7)
    files.fail_at = files.operations + 2
    with pytest.raises(TierIOError, match="No space left"):
        commit(files, 8)
    assert not [name for name in files.names(HERE) if name.endswith(".new")]
    commit(files, 9)
    assert committed_step(files) == 9


def test_files_are_private_and_whole(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        commit(commits.LOCAL, 7, directory=tmp_path)
    finally:
        os.umask(old)
    assert {os.stat(file).st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_only_what_this_rank_committed_before_is_cleared_away(tmp_path: Path) -> None:
    others = [
        "notes.txt",
        f"manifest-{RUN}-6-rank1.json",
        f"manifest-{RUN}-06-rank0.json",
        f"manifest-{RUN}-6-rank0.json.bak",
        f"xmanifest-{RUN}-6-rank0.json",
        f"manifest-{RUN}-x-rank0.json",
        f"extra-{RUN}-6-rank1.safetensors",
        "manifest-6-rank0.json",
        "COMMIT.bak",
        "COMMIT.new",
        f"manifest-{'2' * 32}-7-rank0.json",
        f"manifest-{'1' * 32}-8-rank0.json.new.bak",
        f"extra-{'2' * 32}-7-rank0.safetensors",
    ]
    mine = [f"manifest-{RUN}-6-rank0.json", f"extra-{RUN}-6-rank0.safetensors", f"manifest-{RUN}-9-rank0.json"]
    mine += [f"extra-{RUN}-7-rank0.safetensors.offload.new"]
    for name in others + mine:
        (tmp_path / name).write_text("x")
    record = record_of(7, (write_manifest(tmp_path, at(7)),), tmp_path, "0" * 32)
    write_commit(tmp_path, record)
    collect(tmp_path, record, (), commits.LOCAL, rank=0)
    left = without_room(path.name for path in tmp_path.iterdir())
    assert {*left} == {*others, COMMIT_NAME, f"manifest-{RUN}-7-rank0.json"}


@pytest.mark.parametrize(
    "name",
    ["COMMIT.offload.new", f"manifest-{RUN}-7-rank0.json.offload.new", f"manifest-{RUN}-7-rank0.json", COMMIT_NAME],
)
def test_a_link_in_a_files_place_is_replaced_and_what_it_names_stays(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(mine)
    commit(commits.LOCAL, 7, directory=run)
    assert mine.read_text() == "mine"
    assert committed_step(commits.LOCAL, run) == 7


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_a_record_that_is_no_file_is_not_followed(tmp_path: Path, kind: str) -> None:
    commit(commits.LOCAL, 7, directory=tmp_path)
    place = tmp_path / COMMIT_NAME
    place.rename(tmp_path / "elsewhere")
    if kind == "symlink":
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.mkdir()
    with pytest.raises(PathError) as caught:
        read_commit(tmp_path)
    assert caught.value.filename == str(place)


@pytest.mark.parametrize("name", [COMMIT_NAME, f"manifest-{RUN}-7-rank0.json", f"extra-{RUN}-7-rank0.safetensors"])
def test_any_flipped_bit_and_any_cut_is_found(tmp_path: Path, name: str) -> None:
    commit(commits.LOCAL, 7, directory=tmp_path)
    data = (tmp_path / name).read_bytes()
    chance = random.Random(1)
    spoilt: list[bytes] = [flipped(data, chance.randrange(len(data))) for _ in range(100)]
    spoilt += [data[:length] for length in (0, 1, len(data) // 2, len(data) - 1)]
    spoilt += [data + b"\n", data + data]
    for bad in spoilt:
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(CorruptionError) as caught:
            committed_step(commits.LOCAL, tmp_path)
        assert caught.value.file == str(tmp_path / name)


@pytest.mark.parametrize("name", [f"manifest-{RUN}-7-rank0.json", f"extra-{RUN}-7-rank0.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    commit(commits.LOCAL, 7, directory=tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CorruptionError, match="is missing") as caught:
        committed_step(commits.LOCAL, tmp_path)
    assert caught.value.file == str(tmp_path / name)


def test_what_belongs_to_a_record_that_was_cut_off_goes_with_what_all_ranks_left(tmp_path: Path) -> None:
    record = record_of(7, (write_manifest(tmp_path, at(7)),), tmp_path)
    left = {"COMMIT.offload.new": b"x", "COMMIT.new": serialise_commit(record)[:50]}
    for name, data in left.items():
        aside = tmp_path / name
        aside.write_bytes(data)
        collect(tmp_path, record, (), commits.LOCAL, rank=0)
        assert aside.exists()
        collect(tmp_path, record, (), commits.LOCAL)
        assert not aside.exists()
    (tmp_path / "COMMIT.new").write_text("somebody else's")
    collect(tmp_path, record, (), commits.LOCAL)
    assert (tmp_path / "COMMIT.new").exists()


def test_what_was_copied_is_durable() -> None:
    files, there = SimulatedFiles(), Path("/there")
    record = Commit(RUN, 7, (write_manifest(HERE, at(7), extra_at(7), files),))
    copy_manifest(HERE, there, record, 0, files)
    for seed in range(20):
        found = files.after_cut(seed)
        assert str(read_extra(there, read_manifest(there, record, 0, found), found)) == str(extra_at(7))


def test_the_copy_of_a_manifest_is_what_was_checked(tmp_path: Path) -> None:
    class Rotting(Files):
        """What is read again is damaged."""

        def read(self, path: Path, most: int) -> bytes:
            data = super().read(path, most)
            path.write_bytes(flipped(data, len(data) // 2))
            return data

    there = tmp_path / "there"
    there.mkdir()
    record = Commit(RUN, 7, (write_manifest(tmp_path, at(7)),))
    copy_manifest(tmp_path, there, record, 0, Rotting())
    assert read_manifest(there, record, 0).step == 7


def test_tensors_are_copied_without_being_in_ram(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    large = torch.arange(1 << 20)
    record = Commit(RUN, 7, (write_manifest(tmp_path, at(7), large),))
    tracemalloc.start()
    try:
        copy_manifest(tmp_path, there, record, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < large.nbytes // 8
    assert torch.equal(read_extra(there, read_manifest(there, record, 0)), large)


def test_a_copy_of_tensors_that_were_cut_short_fails(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    record = Commit(RUN, 7, (write_manifest(tmp_path, at(7), torch.arange(100)),))
    os.truncate(tmp_path / tensors_name(record, 0), 200)
    with pytest.raises(TierIOError):
        copy_manifest(tmp_path, there, record, 0)
    assert [name for name in os.listdir(there) if name.startswith("extra")] == []


def test_a_manifest_of_another_run_or_world_is_refused(tmp_path: Path) -> None:
    digest = write_manifest(tmp_path, at(7))
    other = "f" * 32
    os.link(tmp_path / manifest_name(at(7), 0), tmp_path / f"manifest-{other}-7-rank0.json")
    for wrong in (Commit(other, 7, (digest,)), Commit(RUN, 7, (digest, digest))):
        with pytest.raises(CorruptionError, match="another run, step or rank"):
            read_manifest(tmp_path, wrong, 0)


def test_a_manifest_that_is_said_to_be_too_large_is_not_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, at(7))
    with pytest.raises(CorruptionError, match="is longer than the 128 MiB that are allowed"):
        read_manifest(tmp_path, Commit(RUN, 7, (Digest(MAX_BYTES + 1, "0" * 32),)), 0)


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    digest = write_manifest(tmp_path, at(7))
    (tmp_path / manifest_name(at(7), 0)).rename(tmp_path / manifest_name(at(8), 0))
    write_commit(tmp_path, Commit(RUN, 8, (digest,)))
    with pytest.raises(CorruptionError, match="another run, step or rank"):
        committed_step(commits.LOCAL, tmp_path)


def test_a_manifest_that_another_rank_tells_is_the_committed_one_or_refused() -> None:
    files = SimulatedFiles()
    commit(files, 1, world=2)
    record = read_commit(HERE, files)
    assert record is not None
    data = files.read(HERE / manifest_name(record, 1), 1 << 20)
    assert manifest_told(data, record, 1) == read_manifest(HERE, record, 1, files)
    for other in (data[:-1], data.replace(b"1", b"2", 1), files.read(HERE / manifest_name(record, 0), 1 << 20)):
        with pytest.raises(CorruptionError, match="is not the file that was committed"):
            manifest_told(other, record, 1)


@pytest.mark.parametrize(
    ("extra", "place"),
    [({"scheduler": {"f": print}}, r"extra\['scheduler'\]\['f'\]"), ([torch.zeros(2, device="meta")], r"extra\[0\]")],
)
def test_extra_that_cannot_be_stored_is_refused_before_anything_is_written(extra: object, place: str) -> None:
    files = SimulatedFiles()
    with pytest.raises(ConfigError, match=place):
        write_manifest(HERE, at(7), extra, files)
    assert files.operations == 0


def test_what_could_not_be_read_back_is_not_written() -> None:
    files = SimulatedFiles()
    group = {"lr": float("nan")}
    parameters = tuple(dataclasses.replace(param, group=0) for param in at(7).parameters)
    for bad in ({"step": -1}, {"run_id": "x"}, {"groups": (group,), "parameters": parameters}, {"chunks": ()}):
        with pytest.raises(ConfigError, match="cannot be committed"):
            write_manifest(HERE, dataclasses.replace(at(7), **bad), None, files)
    with pytest.raises(OffloadError):
        write_commit(HERE, Commit(RUN, 7, ()), files)
    assert files.operations == 0


def record(**changes: object) -> bytes:
    from offload.checkpoint.manifest import canonical, digest

    fields = {"schema": "offload commit", "version": 1, "run_id": RUN, "step": STEP}
    fields |= {"replaces": None, "manifests": [[5, "0" * 32]]}
    line = canonical({**fields, **changes})  # type: ignore[arg-type]
    return line + digest(line).encode() + b"\n"


def test_a_record_of_a_newer_version_says_so() -> None:
    assert parse_commit(record()) == Commit(RUN, STEP, (Digest(5, "0" * 32),))
    assert parse_commit(record(replaces="a" * 32)).replaces == "a" * 32
    with pytest.raises(ResumeError, match="version 3"):
        parse_commit(record(version=3, new="field"))


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "offload manifest"},
        {"version": 0},
        {"version": True},
        {"version": 1.0},
        {"run_id": RUN.upper()},
        {"step": -1},
        {"step": True},
        {"step": 1 << 63},
        {"manifests": []},
        {"replaces": "a" * 31},
        {"replaces": 0},
        {"manifests": {}},
        {"manifests": [[5]]},
        {"manifests": [[5, "0" * 31]]},
        {"manifests": [[-5, "0" * 32]]},
        {"manifests": [[5, "0" * 32]] * 65537},
        {"more": 1},
        {"schema": "offload snapshot", "replaces": "a" * 32},
    ],
    ids=str,
)
def test_a_record_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptionError):
        parse_commit(record(**changes))


def test_a_record_spelled_otherwise_is_refused() -> None:
    from offload.checkpoint.manifest import digest

    for old, new in ((b",", b", "), (b'"step":7', b'"step":7.0'), (b'"schema"', b'"\\u0073chema"')):
        line = record().split(b"\n")[0].replace(old, new, 1) + b"\n"
        with pytest.raises(CorruptionError):
            parse_commit(line + digest(line).encode() + b"\n")


CHANGES: list[tuple[str, Callable[[Manifest], dict[str, object]]]] = [
    ("different models", lambda made: {"compute_dtype": "float16"}),
    ("different models", lambda made: {"parameters": made.parameters[:-1]}),
    ("different models", lambda made: {"groups": made.groups[:-1]}),
    ("different models", lambda made: {"split_master": not made.split_master}),
    ("different models", lambda made: {"flats": (dataclasses.replace(made.flats[0], numel=1), *made.flats[1:])}),
    ("different models", lambda made: {"flats": (dataclasses.replace(made.flats[0], offsets=(1,)), *made.flats[1:])}),
    ("do not own each element once", lambda made: {"flats": manifest_of(0, 2).flats}),
    ("no rank owns", lambda made: {"flats": manifest_of(1, 3).flats}),
]


@pytest.mark.parametrize(("match", "change"), CHANGES)
def test_ranks_that_disagree_are_refused(match: str, change: Callable[[Manifest], dict[str, object]]) -> None:
    pair = [manifest_of(0, 2), manifest_of(1, 2)]
    agree(pair, "COMMIT")
    pair[1] = dataclasses.replace(pair[1], **change(pair[1]))  # type: ignore[arg-type]
    if match == "no rank owns":
        pair[0] = manifest_of(0, 3)
    with pytest.raises(CorruptionError, match=match):
        agree(pair, "COMMIT")
