"""`offload list` on runs that really trained, and on what is none."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from offload import OffloadZero
from offload.checkpoint import listing
from offload.cli.main import app
from offload.storage.directories import COMMIT_NAME, older_swap_name
from tests.support.run_files import swap_in
from tests.support.toy import take_step


def call(*args: object) -> Result:
    return CliRunner().invoke(app, ["list", *map(str, args)])


def rows(root: Path, *args: object) -> dict[str, dict[str, Any]]:
    result = call(root, *args, "--json")
    assert result.exit_code == 0, result.output
    return {str(Path(row["path"]).relative_to(root)): row for row in json.loads(result.stdout)["runs"]}


def begun(path: Path | list[Path], kind: Callable[..., Any] = torch.optim.AdamW) -> OffloadZero:
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = OffloadZero(model, kind(model.parameters()), path=path, commit_every=0)
    for _ in range(2):
        take_step(optimizer, model(torch.randn(4, 40).bfloat16()).square().mean())
    return optimizer


def trained(path: Path | list[Path], kind: Callable[..., Any] = torch.optim.AdamW) -> None:
    with begun(path, kind) as optimizer:
        optimizer.commit()


def on_disk(*directories: Path) -> int:
    """What the files in these directories take, as `find` says it."""
    command = ["find", *map(str, directories), "-maxdepth", "1", "-type", "f", "-printf", "%b\n"]
    return 512 * sum(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


def test_runs_and_snapshots_are_listed_with_what_their_commits_say(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    before = time.time()
    trained(tmp_path / "deep" / "er" / "adam", torch.optim.Adam)
    with begun([tmp_path / "one", tmp_path / "two"]) as optimizer:
        optimizer.commit()
        optimizer.snapshot(keep=None)
        take_step(optimizer, next(iter(optimizer.param_groups[0]["params"])).square().sum())
        optimizer.commit()
    found = rows(tmp_path)
    run_id = found["one"]["run_id"]
    snapshot = f"one/snapshot-2-{run_id[:8]}"
    assert found.keys() == {"deep/er/adam", "one", snapshot}
    assert {name: (row["step"], row["snapshot"], row["optimizers"], row["live"]) for name, row in found.items()} == {
        "deep/er/adam": (2, False, ["Adam"], False),
        "one": (3, False, ["AdamW"], False),
        snapshot: (2, True, ["AdamW"], False),
    }
    kept = [tmp_path / one / Path(snapshot).name for one in ("one", "two")]
    assert found["one"]["directories"] == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert found[snapshot]["directories"] == [str(path) for path in kept]
    assert found["one"]["bytes"] == on_disk(tmp_path / "one", tmp_path / "two") > 0
    assert found[snapshot]["bytes"] == on_disk(*kept) > 0
    assert all(before - 1 <= row["committed_s"] <= time.time() for row in found.values())
    assert all(row["error"] is None for row in found.values())
    shown = call(tmp_path).stdout
    assert "one and 1 more: step 3, " in shown
    assert "deep/er/adam: step 2" in shown


def test_a_run_is_live_while_a_process_holds_it_and_goes_on_meanwhile(tmp_path: Path) -> None:
    with begun(tmp_path / "run") as optimizer:
        found = rows(tmp_path)["run"]
        assert (found["live"], found["step"], found["error"]) == (True, None, None)
        assert "live, no commit yet" in call(tmp_path).stdout
        optimizer.commit()
        found = rows(tmp_path)["run"]
        assert (found["live"], found["step"]) == (True, 2)
    assert rows(tmp_path)["run"]["live"] is False
    trained(tmp_path / "other")  # who looked holds no lock
    with OffloadZero(nn.Linear(3, 3), path=tmp_path / "third", commit_every=0):
        assert [row["live"] for row in rows(tmp_path).values()] == [False, False, True]


def test_it_only_reads(tmp_path: Path) -> None:
    trained(tmp_path / "run")

    def state() -> dict[str, Any]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.is_file() and path.read_bytes())
            for path in (tmp_path, *tmp_path.rglob("*"))
        }

    before = state()
    assert call(tmp_path).exit_code == 0
    assert state() == before


def damaged(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def manifest_of(run: Path) -> Path:
    return next(run.glob("manifest-*.json"))


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a damaged record": (lambda run: damaged(run / COMMIT_NAME, 40), "is damaged"),
    "a record cut off": (lambda run: os.truncate(run / COMMIT_NAME, 30), "is damaged"),
    "an empty record": (lambda run: os.truncate(run / COMMIT_NAME, 0), "is damaged"),
    "a damaged manifest": (lambda run: damaged(manifest_of(run), 40), "is not the file that was committed"),
    "no manifest": (lambda run: manifest_of(run).unlink(), "missing"),
    "a link as record": (
        lambda run: (run / COMMIT_NAME).rename(run / "real") and (run / COMMIT_NAME).symlink_to("real"),
        "COMMIT",
    ),
    "a pipe as record": (lambda run: (run / COMMIT_NAME).unlink() or os.mkfifo(run / COMMIT_NAME), "no regular file"),
    "a directory as record": (lambda run: (run / COMMIT_NAME).unlink() or (run / COMMIT_NAME).mkdir(), ""),
    "a swap file without a head": (lambda run: damaged(swap_in(run), 0), ""),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_named_in_its_row_and_the_others_are_listed(name: str, tmp_path: Path) -> None:
    trained(tmp_path / "run")
    trained(tmp_path / "whole")
    breaks, said = BREAKS[name]
    breaks(tmp_path / "run")
    found = rows(tmp_path)
    assert found.keys() == {"run", "whole"}
    assert (found["whole"]["step"], found["whole"]["error"]) == (2, None)
    if said:
        assert said in found["run"]["error"]
        assert "run: " in (shown := call(tmp_path).stdout)
        assert "cannot be read: " in shown


def test_what_is_somebody_elses_is_no_run(tmp_path: Path) -> None:
    for name in ("git", "swap", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "git" / COMMIT_NAME).write_text("a message")
    (tmp_path / "swap" / older_swap_name(0)).write_bytes(b"somebody else's, of the same name" * 500)
    (tmp_path / "link").symlink_to(tmp_path)
    found = rows(tmp_path)
    assert found.keys() == {"swap"}
    assert "is not a file of this library, or is damaged" in found["swap"]["error"]
    assert f"no runs in {tmp_path / 'empty'}" in call(tmp_path / "empty").stdout


def test_a_name_that_would_write_to_the_terminal_is_escaped(tmp_path: Path) -> None:
    trained(tmp_path / "\x1b[31mred\n[bold]\udcff")
    shown = call(tmp_path).stdout
    assert shown.startswith("\\x1b[31mred\\n[bold]\\udcff: step 2")
    assert len(rows(tmp_path)) == 1


def test_what_lies_deeper_or_is_too_much_is_not_looked_at_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    trained(tmp_path / "a" / "b" / "run")
    assert rows(tmp_path, "--depth", 3).keys() == {"a/b/run"}
    shallow = call(tmp_path, "--depth", 2)
    assert "no runs in" in shallow.stdout
    assert "directories deeper than --depth 2 were not looked at: 1" in shallow.stderr
    monkeypatch.setattr(listing, "MOST_DIRECTORIES", 3)
    assert "too many directories" in call(tmp_path).stderr
    assert call(tmp_path, "--depth", -1).exit_code == 2


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    result = call(tmp_path / "missing")
    assert result.exit_code == 2
    assert f"{tmp_path / 'missing'} is not a directory" in result.stderr


def test_a_stripe_alone_says_that_its_record_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    trained([tmp_path / "first" / "run", tmp_path / "second" / "run"])
    found = rows(tmp_path / "second")["run"]
    assert (found["step"], found["error"]) == (None, None)
    assert "a part of a run: its COMMIT is elsewhere" in call(tmp_path / "second").stdout
