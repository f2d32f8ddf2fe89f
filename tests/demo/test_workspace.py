from pathlib import Path

import pytest

from offload.demo.workspace import Workspace, removed_at_end


def test_files_and_directory_that_the_run_made_go(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    space = Workspace(path)
    path.mkdir()
    (path / "swap").write_text("x")
    with removed_at_end(space, [str(path / "swap")]):
        pass
    assert not path.exists()


def test_files_go_when_the_run_fails(tmp_path: Path) -> None:
    space = Workspace(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "swap").write_text("x")
    with pytest.raises(KeyboardInterrupt), removed_at_end(space, [tmp_path / "scratch" / "swap"]):
        raise KeyboardInterrupt
    assert not (tmp_path / "scratch").exists()


def test_what_was_there_before_stays(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    space = Workspace(tmp_path)
    (tmp_path / "new").write_text("x")
    space.remove_files([tmp_path / "old", tmp_path / "new"])
    space.remove_directory()
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_directory_with_a_stranger_in_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    space = Workspace(path)
    path.mkdir()
    (path / "stranger").write_text("x")
    space.remove_files([path / "gone"])
    space.remove_directory()
    assert (path / "stranger").exists()


def test_empty_directory_that_was_there_before_stays(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    space.remove_directory()
    assert tmp_path.exists()


def test_relative_and_absolute_names_are_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("x")
    space = Workspace(Path("."))
    space.remove_files(["old"])
    assert (tmp_path / "old").exists()


def test_what_another_run_made_under_the_same_names_stays(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    space = Workspace(path)
    path.mkdir()
    (path / "swap").write_text("mine")
    with removed_at_end(space, [path / "swap"]):
        path.rename(tmp_path / "moved")
        path.mkdir()
        (path / "swap").write_text("another's")
    assert (path / "swap").read_text() == "another's"
    path.rename(tmp_path / "other")
    path.mkdir()
    space.remove_directory()
    assert path.exists()
