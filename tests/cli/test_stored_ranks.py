"""`offload inspect`, `verify`, `export` and `remove` on several ranks and directories, and on snapshots."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offload.checkpoint.commit import MAX_COMMIT_BYTES, read_commit
from offload.checkpoint.manifest import committed_slots
from offload.checkpoint.reader import in_shape
from offload.sizes import PAGE_BYTES
from offload.storage.directories import COMMIT_NAME, OLDER_SUFFIX, file_name, older_swap_name, swap_name
from tests.cli.test_stored import call, trained
from tests.support.command import printed
from tests.support.committed import FLATS, PARAMETERS, RUN, STEP, value_of, write_run
from tests.support.damage import flip
from tests.support.run_files import contents

RUNS = [(1, 1, False), (3, 1, False), (1, 2, False), (3, 2, False), (2, 3, True)]
"""Ranks, directories, split masters."""


def folders(base: Path, paths: int) -> list[Path]:
    return [base / f"dir{number}" for number in range(paths)]


def run_json(*args: object) -> dict[str, Any]:
    return printed(call(*args, "--json"))


def expected(name: str, kind: str) -> Tensor:
    """The state of a parameter that `write_run` has written."""
    number = next(number for number, facts in enumerate(PARAMETERS) if facts.name == name)
    for flat, (params, offsets, numel) in enumerate(FLATS):
        if number in params:
            start = offsets[params.index(number)]
            line = value_of(kind, flat, numel)[start : start + PARAMETERS[number].numel]
            return in_shape(line, PARAMETERS[number])
    raise AssertionError(name)


def own_directories(base: Path, world: int) -> list[Path]:
    """A run whose ranks have a directory each, made of one that they share."""
    (shared,) = folders(base, 1)
    write_run([shared], world)
    own = [base / f"rank{rank}" for rank in range(world)]
    for rank, place in enumerate(own):
        place.mkdir()
        for file in [*shared.glob(f"*rank{rank}.*"), *shared.glob(f"*-{rank}")]:
            file.rename(place / file.name)
    (shared / COMMIT_NAME).rename(own[0] / COMMIT_NAME)
    shared.rmdir()
    return own


@pytest.mark.parametrize(("world", "paths", "split"), RUNS)
def test_inspect_counts_over_ranks_and_directories(tmp_path: Path, world: int, paths: int, split: bool) -> None:
    places = folders(tmp_path, paths)
    manifests = write_run(places, world, split_master=split)
    for named in (places, places[::-1]):
        found = run_json("inspect", *named)
        assert (found["run_id"], found["step"], found["snapshot"]) == (RUN, STEP, False)
        assert (found["ranks"], found["paths"]) == (world, paths)
        assert found["chunks"] == sum(len(manifest.chunks) for manifest in manifests)
        assert [row["name"] for row in found["parameters"]] == [facts.name for facts in PARAMETERS]
        for row, facts in zip(found["parameters"], PARAMETERS, strict=True):
            assert (row["shape"], row["steps"]) == (list(facts.shape), facts.age)
            # 12 bytes an element, and as many with a split master: 10 in its slot, 2 in that of the parameters.
            # One that is fp32 whole has its parameter there, too.
            assert row["bytes"] == facts.numel * (16 if split and facts.dtype == "float32" else 12)
        assert found["bytes"] == sum(row["bytes"] for row in found["parameters"])
    assert f"on {paths} paths of {world} ranks" in call("inspect", *places).stdout


@pytest.mark.parametrize(("world", "paths", "split"), RUNS)
def test_verify_names_rank_file_and_chunk_of_all_damage(tmp_path: Path, world: int, paths: int, split: bool) -> None:
    places = folders(tmp_path, paths)
    manifests = write_run(places, world, split_master=split)
    whole = run_json("verify", *places[::-1])
    slots = sum(len(manifest.slots) for manifest in manifests)
    assert (whole["step"], whole["slots"], whole["damaged"]) == (STEP, slots, [])
    assert whole["bytes"] == sum(slot.size for manifest in manifests for slot in committed_slots(manifest))
    damaged = []
    for rank, manifest in enumerate(manifests):
        slot = committed_slots(manifest)[-1]
        flip(places[slot.path] / swap_name(RUN, rank), slot.offset + PAGE_BYTES)
        damaged.append((rank, slot.chunk, f"{places[slot.path] / swap_name(RUN, rank)}, offset {slot.offset}"))
    result = call("verify", *places, "--json", "--threads", "2")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [(one["rank"], one["chunk"]) for one in found["damaged"]] == [(rank, chunk) for rank, chunk, _ in damaged]
    assert all(place in one["error"] for one, (_, _, place) in zip(found["damaged"], damaged, strict=True))
    assert found["slots"] == slots
    shown = call("verify", *places)
    assert shown.exit_code == 1
    assert f"{slots} slots, " in shown.stdout
    assert f", {world} damaged" in shown.stdout


@pytest.mark.parametrize(("world", "paths", "split"), RUNS)
def test_export_puts_the_parts_of_all_ranks_together(tmp_path: Path, world: int, paths: int, split: bool) -> None:
    places = folders(tmp_path, paths)
    write_run(places, world, split_master=split)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        out = tmp_path / kind
        found = run_json("export", *places[::-1], out, "--kind", kind, "--fp32")
        assert found["step"] == STEP
        tensors = load_file(found["files"][0])
        assert tensors.keys() == {facts.name for facts in PARAMETERS}
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected(name, kind)), name
    found = run_json("export", *places, tmp_path / "weights")
    for name, tensor in load_file(found["files"][0]).items():
        assert torch.equal(tensor, expected(name, "master").to(tensor.dtype)), name


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_directories_of_single_ranks_are_all_needed(tmp_path: Path, command: str) -> None:
    own = own_directories(tmp_path, 3)
    out = [tmp_path / "out"] if command == "export" else []
    assert call(command, *own, *out).exit_code == 0
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for named, says in ((own[:2], "name all directories of the run"), (own[1:], "whose COMMIT record is not in")):
        result = call(command, *named, *out)
        assert result.exit_code == 2
        assert says in " ".join(result.stderr.split())
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["verify", "export"])
def test_a_directory_of_a_stripe_is_missed_by_name(tmp_path: Path, command: str) -> None:
    places = folders(tmp_path, 3)
    write_run(places, 2)
    result = call(command, *places[:2], *([tmp_path / "out"] if command == "export" else []))
    assert result.exit_code == 2
    assert "directory 2 of the 3" in result.stderr
    assert not (tmp_path / "out").exists()


def test_remove_takes_the_files_of_all_ranks_and_directories(tmp_path: Path) -> None:
    places = folders(tmp_path, 2)
    write_run(places, 3, extra={"x": torch.ones(3)})
    (places[0] / "notes.txt").write_text("mine")
    (places[0] / (older_swap_name(1) + OLDER_SUFFIX)).write_bytes(bytes(PAGE_BYTES))
    (places[1] / f"manifest-{RUN}-{STEP - 1}-rank2.json.new").write_text("{}")
    ours = [file for place in places for file in place.iterdir() if file.name != "notes.txt"]
    sizes = sum(file.stat().st_size for file in ours)
    found = run_json("remove", *places, "--yes")
    assert {Path(file) for file in found["files"]} == set(ours)
    assert len(ours) == 6 + 6 + 3 + 3 + 1 + 2
    assert found["bytes"] == sizes
    assert [file.name for file in places[0].iterdir()] == ["notes.txt"]
    assert not places[1].exists()


def test_remove_takes_the_record_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cuts it off, nobody takes what is left for a commit."""
    places = folders(tmp_path, 2)
    write_run(places, 2)
    removed: list[Path] = []
    monkeypatch.setattr("offload.io.files.Files.remove", lambda files, path: removed.append(path))
    assert call("remove", *places[::-1], "--yes").exit_code == 0
    assert removed[0] == places[0] / COMMIT_NAME
    kinds = [file.kind for file in (file_name(path.name) for path in removed) if file is not None]
    assert kinds[-4:] == ["tag"] * 4
    assert len(kinds) == 2 * 4 + 2


@pytest.mark.parametrize("held", [(0, 0), (2, 1)])
def test_a_rank_that_lives_keeps_the_files_of_all(tmp_path: Path, held: tuple[int, int]) -> None:
    places = folders(tmp_path, 2)
    write_run(places, 3)
    before = contents(tmp_path)
    rank, path = held
    with open(places[path] / swap_name(RUN, rank), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for command in (("remove", *places, "--yes"), ("verify", *places), ("export", *places, tmp_path / "out")):
            result = call(*command)
            assert result.exit_code == 2
            assert "PathInUseError" in result.stderr
            assert swap_name(RUN, rank) in result.stderr
    assert contents(tmp_path) == before
    assert call("remove", *places, "--yes").exit_code == 0
    assert not any(place.exists() for place in places)


def test_a_snapshot_is_shown_checked_exported_and_removed(tmp_path: Path) -> None:
    values, optimizer = trained(tmp_path / "run")
    (snapshot,) = optimizer.snapshot()
    found = run_json("inspect", snapshot)  # the run lives
    assert (found["step"], found["snapshot"]) == (2, True)
    assert f"snapshot of run {found['run_id']}, step 2" in call("inspect", snapshot).stdout
    assert run_json("verify", snapshot)["damaged"] == []
    weights = load_file(run_json("export", snapshot, tmp_path / "out")["files"][0])
    assert all(torch.equal(weights[name], value) for name, value in values.items())
    (snapshot / "notes").write_text("mine")
    assert len(run_json("remove", snapshot, "--yes")["files"]) == 4
    assert os.listdir(snapshot) == ["notes"]
    optimizer.close()
    assert run_json("verify", tmp_path / "run")["damaged"] == []
    record = read_commit(tmp_path / "run")
    assert record is not None
    assert len((tmp_path / "run" / COMMIT_NAME).read_bytes()) < MAX_COMMIT_BYTES
