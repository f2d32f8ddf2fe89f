import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.demo import text as text_module
from offload.demo.text import Batches, cut_windows, even_starts, load_text, split
from offload.errors import ConfigError

CPU = torch.device("cpu")


def test_hold_out_is_the_contiguous_end() -> None:
    content = np.arange(200, dtype=np.uint8)
    train, validation = split(content)
    assert (len(train), len(validation)) == (190, 10)
    assert np.array_equal(np.concatenate([train, validation]), content)


def test_standard_library_is_real_text_without_tests_and_packages() -> None:
    text = load_text(None, seq=256)
    content = text.train.tobytes() + text.validation.tobytes()
    assert len(content) > 5_000_000
    assert b"def namedtuple(" in content  # collections/__init__.py
    names = {file.relative_to(text_module.standard_library()).parts for file in library_files()}
    others = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert not any(others & set(parts) for parts in names)
    assert len(content) == sum(file.stat().st_size for file in library_files())


def library_files() -> list[Path]:
    files = text_module._walk(text_module.standard_library(), text_module.NOT_LIBRARY)
    return [file for file in files if file.suffix == ".py"]


def test_standard_library_gives_the_same_text_every_time() -> None:
    first, second = load_text(None, 256), load_text(None, 256)
    assert np.array_equal(first.train, second.train)


def test_folder_is_read_in_the_order_of_relative_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", "a/test/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name * 100)
    # Neither hidden nor binary files are text to learn.
    (tmp_path / ".hidden").write_text("hidden" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden" * 100)
    (tmp_path / "binary").write_bytes(b"\0" * 1000)
    text = load_text(tmp_path, seq=8)
    order = ("a.txt", "a/test/b.py", "a/z.md", "b.txt")
    assert text.train.tobytes() + text.validation.tobytes() == "".join(n * 100 for n in order).encode()


def test_file_is_mapped_whatever_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(range(256)) * 8)
    text = load_text(file, seq=16)
    assert isinstance(text.train, np.memmap)
    assert text.train.tobytes() + text.validation.tobytes() == bytes(range(256)) * 8


def test_too_little_text_is_refused_with_the_size_that_would_do(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(b"x" * 339)
    with pytest.raises(ConfigError, match=r"339 bytes.*--seq 16 at least 341"):
        load_text(file, seq=16)
    file.write_bytes(b"x" * 341)
    assert len(load_text(file, seq=16).validation) == 17


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "neither a file nor a folder"),
        (Path.touch, "is empty"),
        (Path.mkdir, "0 bytes of text"),
        (os.mkfifo, "neither a file nor a folder"),
    ],
)
def test_data_that_holds_no_text_is_refused(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path / "data")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path / "data", seq=16)


def test_unreadable_file_in_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x" * 1000)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # the tests may run as root, who reads everything
    with pytest.raises(ConfigError, match="secret cannot be read: Permission denied"):
        load_text(tmp_path, seq=16)


def test_folder_larger_than_ram_should_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "FOLDER_LIMIT_BYTES", 1000)
    for name in "ab":
        (tmp_path / name).write_text("x" * 501)
    with pytest.raises(ConfigError, match="join it into one file"):
        load_text(tmp_path, seq=16)


def test_missing_standard_library_asks_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="give more with --data"):
        load_text(None, seq=16)


def test_batches_repeat_under_a_seed_and_targets_are_one_byte_on() -> None:
    content = np.arange(250, dtype=np.uint8)
    first, second = (Batches(content, 4, 16, seed=5, device=CPU) for _ in range(2))
    for _ in range(3):
        tokens, targets = first()
        assert (tokens.shape, tokens.dtype) == ((4, 16), torch.int64)
        assert torch.equal(tokens + 1, targets)
        assert torch.equal(tokens, second()[0])
    assert not torch.equal(first()[0], Batches(content, 4, 16, seed=6, device=CPU)()[0])


def test_batches_reach_both_ends_of_the_text() -> None:
    draw = Batches(np.arange(10, dtype=np.uint8), 64, 8, seed=0, device=CPU)
    tokens, targets = draw()
    assert (int(tokens.min()), int(targets.max())) == (0, 9)


@pytest.mark.parametrize("size", [17, 18, 40, 1000])
def test_validation_windows_are_spread_evenly_without_overlap(size: int) -> None:
    content = np.zeros(size, dtype=np.uint8)
    starts = even_starts(content, 32, seq=16)
    assert 1 <= len(starts) <= 32
    assert all(later - start >= 16 for start, later in itertools.pairwise(starts))
    tokens, _ = cut_windows(content, starts, 16, CPU)
    assert tokens.shape == (len(starts), 16)
    assert len(starts) == 1 or starts[-1] == size - 17
