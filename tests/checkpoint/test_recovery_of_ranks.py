"""Ranks that tell each other what they see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint import recovery
from offload.checkpoint.commit import Commit, write_commit
from offload.checkpoint.manifest import Digest, Manifest
from offload.checkpoint.recovery import (
    RunDirectories,
    Views,
    look_together,
    read_together,
)
from offload.io.files import LOCAL
from offload.ranks.agreement import all_gather_object
from offload.ranks.communicator import Communicator
from tests.support.committed import RUN, STEP, manifest_of, write_manifest
from tests.support.threads import Threads


def test_a_manifest_that_some_rank_lacks_is_sent_once_by_the_first_that_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    manifests = [manifest_of(rank, world=3) for rank in range(3)]
    # Rank 0's lies in all of them, rank 1's in the last two, rank 2's in the middle.
    lying = [folders, folders[1:], folders[1:2]]
    digests = [{write_manifest(place, manifest) for place in lying[manifest.rank]} for manifest in manifests]
    commit = Commit(RUN, STEP, tuple(digest for (digest,) in digests))
    sent: dict[int, list[int]] = {}

    def noted(comm: Communicator, manifests: dict[int, bytes], kind: Any) -> list[dict[int, bytes]]:
        sent[comm.rank] = sorted(manifests)
        return all_gather_object(comm, manifests, kind)

    monkeypatch.setattr(recovery, "all_gather_object", noted)

    def work(places: list[Path], ranks: set[int]) -> list[dict[int, Manifest]]:
        def read(comm: Communicator) -> dict[int, Manifest]:
            seen = places or [folders[comm.rank]]
            return read_together(ranks or {0, comm.rank}, seen, folders[0], commit, comm, LOCAL)

        return Threads(3).run(read)

    everything = dict(enumerate(manifests))
    assert work([], {0, 1, 2}) == [everything] * 3
    assert sent == {0: [], 1: [1, 2], 2: []}
    sent.clear()
    assert work([], set()) == [{number: manifests[number] for number in (0, rank)} for rank in range(3)]
    assert sent == {0: [], 1: [2], 2: []}
    sent.clear()
    assert work(folders, {0, 1, 2}) == [everything] * 3
    assert not sent


def test_what_one_rank_resumes_from_and_another_goes_on_in_is_no_directory_beside_the_run(tmp_path: Path) -> None:
    """Only a record that lies in nobody's `path` is one that `resume` names."""
    run, kept = tmp_path / os.fsdecode(b"no UTF-8: \xff"), tmp_path / "kept"
    ours, theirs = (Commit(letter * 32, 7, (Digest(1, "0" * 32),)) for letter in "ab")
    for folder, commit in ((run, ours), (kept, theirs)):
        folder.mkdir()
        write_commit(folder, commit)
    places = [RunDirectories((tmp_path / "none",), (), (), (run, kept)), RunDirectories((run,), (), (), ())]
    for seen in Threads(2).run(lambda comm: look_together(places[comm.rank], comm, LOCAL)):
        assert isinstance(seen, Views)
        assert seen.runs.records == ((run, ours),)
        assert seen.named.records == ((kept, theirs),)
