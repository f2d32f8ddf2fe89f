"""What each of many ranks reads when a run goes on: as much as with few, unless the layout is another one."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.checkpoint import commit as records
from offload.checkpoint.commit import Commit, manifest_name, read_commit, spelled, write_commit
from offload.checkpoint.live import Tag, write_tag
from offload.checkpoint.manifest import ChunkFacts, Manifest, committed_slots
from offload.checkpoint.recovery import RecoveryPlan, describe, find_together
from offload.choices import Choice
from offload.errors import CorruptionError, OffloadError, OtherRankError, ResumeError
from offload.io.engine import IOFile
from offload.io.files import Files
from offload.layout import Layout, build
from offload.model.units import specs_of
from offload.options import Options
from offload.planner.decide import Situation, decide
from offload.ranks.communicator import Communicator
from offload.storage.directories import swap_name
from tests.support.committed import RUN, STEP, named, superblock, write_manifest
from tests.support.run_files import contents
from tests.support.threads import Threads


class Counted(Files):
    """Counts what is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    def open(self, path: Path, flags: int) -> IOFile:
        self.opened += 1
        return super().open(path, flags)


def plan(rank: int, ranks: int, folder: Path) -> tuple[Choice, Layout, Manifest]:
    """Of one rank of a run with one chunk a rank, and more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    groups = [{"params": list(model.parameters())}]
    layout = build(specs_of(model, groups, (), torch.bfloat16)[0], 4096, ranks=ranks, rank=rank)
    choice = decide(Options(path=folder, commit_every=0, resume=True), Situation(layout.numel, 0))
    return choice, layout, describe(choice, layout, list(model.parameters()), [{}])


def write_run(folder: Path, ranks: int) -> None:
    folder.mkdir()
    digests = []
    for rank in range(ranks):
        _, layout, wanted = plan(rank, ranks, folder)
        chunks = [ChunkFacts(at.flat, at.start, at.numel, 0, 0, STEP, f"{at.index:016x}") for at in layout.chunks]
        manifest = dataclasses.replace(wanted, run_id=RUN, step=STEP, chunks=tuple(chunks))
        end = max(slot.offset + slot.size for slot in committed_slots(manifest))
        (folder / swap_name(RUN, rank)).write_bytes(superblock(manifest, 0).ljust(end, b"\0"))
        digests.append(write_manifest(folder, manifest, {"rank": rank}))
    write_commit(folder, named(Commit(RUN, STEP, tuple(digests)), [folder]))


def find(comm: Communicator, folder: Path, files: Files | None = None) -> RecoveryPlan:
    choice, layout, wanted = plan(comm.rank, comm.size, folder)
    with ExitStack() as undo:
        found = find_together(undo, choice.commits, comm, layout, wanted, files or Files()).found
    assert found is not None
    return found


def costs(folder: Path, ranks: int, patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Files opened and manifests decoded, on each rank."""
    decoded = Counter[int]()
    real = records.parse

    def parse(data: bytes, file: str = "") -> Manifest:
        decoded[threading.get_ident()] += 1
        return real(data, file)

    def work(comm: Communicator) -> tuple[int, int]:
        files = Counted()
        found = find(comm, folder, files)
        assert found.reader is None
        assert found.manifest is not None
        assert (found.manifest.rank, found.extra.extra) == (comm.rank, {"rank": comm.rank})
        return files.opened, decoded[threading.get_ident()]

    with patch.context() as context:
        context.setattr(records, "parse", parse)
        return Threads(ranks).run(work)


def test_as_many_ranks_as_committed_read_their_own_manifest_and_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    write_run(few, 2)
    write_run(many, 8)
    of_two, of_eight = costs(few, 2, monkeypatch), costs(many, 8, monkeypatch)
    assert [decoded for _, decoded in of_eight] == [1] + [2] * 7
    assert {opened for opened, _ in of_eight} == {opened for opened, _ in of_two}
    assert max(of_eight)[0] < 20


def test_what_is_dead_is_removed_by_ranks_that_share_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 4)
    blocks = plan(0, 4, folder)[2]
    for rank in (6, 97):
        run_id = f"{rank:032x}"
        (folder / swap_name(run_id, rank)).write_bytes(superblock(dataclasses.replace(blocks, run_id=run_id), 0))
        for of in range(2):
            write_tag(folder, Tag(run_id, of, (0, 1), ((spelled(folder),),)))
    Threads(4).run(lambda comm: find(comm, folder))
    assert len([*folder.glob("swap-*")]) == len([*folder.glob("tag-*")]) == 4


def test_another_number_of_ranks_opens_only_the_swap_files_that_it_needs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 8)
    needed = Threads(4).run(lambda comm: _reader_ranks(find(comm, folder)))
    old, new = ([plan(rank, size, folder)[1].shard_range(0) for rank in range(size)] for size in (8, 4))
    for (start, stop), found in zip(new, needed, strict=True):
        assert found == {rank for rank, (first, last) in enumerate(old) if first < stop and start < last}
        assert 2 <= len(found) <= 3


def _reader_ranks(found: RecoveryPlan) -> set[int]:
    assert found.reader is not None
    assert [manifest.rank for manifest in found.reader.manifests] == [*range(8)]
    return {*found.reader.swap_files.ranks}


@pytest.mark.parametrize("what", ["damaged", "missing", "without its swap file", "of another model"])
def test_what_is_wrong_with_one_rank_is_an_error_on_all(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 4)
    commit = read_commit(folder)
    assert commit is not None
    place = folder / manifest_name(commit, 2)
    if what == "damaged":
        data = place.read_bytes()
        place.write_bytes(data[:-5] + b"0" + data[-4:])
    elif what == "of another model":
        text = json.loads(place.read_text())
        text["parameters"][0]["age"] = 1
        place.write_bytes(records.canonical(text))
        digests = [*commit.manifests]
        digests[2] = records.Digest(place.stat().st_size, records.digest(place.read_bytes()))
        write_commit(folder, dataclasses.replace(commit, manifests=tuple(digests)))
    else:
        place.unlink()
    if what == "without its swap file":
        (folder / swap_name(RUN, 2)).unlink()
    before = contents(folder)

    def work(comm: Communicator) -> OffloadError:
        with pytest.raises(OffloadError) as caught:
            find(comm, folder)
        return caught.value

    errors = Threads(4).run(work)
    expected: dict[str, list[Any]] = {
        "damaged": [OtherRankError, OtherRankError, CorruptionError, OtherRankError],
        "of another model": [OtherRankError, OtherRankError, CorruptionError, OtherRankError],
        "missing": [CorruptionError] * 4,
        "without its swap file": [ResumeError] * 4,
    }
    assert [type(error) for error in errors] == expected[what]
    says = {"missing": "is missing", "damaged": "is not the file", "of another model": "ranks 0 and 2 describe"}
    assert says.get(what, "nothing of rank 2 of the 4") in str(errors[2])
    assert contents(folder) == before
