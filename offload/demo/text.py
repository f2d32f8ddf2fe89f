"""Bytes to train on: the standard library's own sources, or a file or folder of the user's.

The last 5 % of the bytes are held out for validation: one contiguous piece that training never sees.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload import ConfigError

HELD_OUT = 0.05
FOLDER_LIMIT_BYTES = 4 << 30
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders of the standard library's directory that are not its own sources, or only test them."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Text:
    """Bytes to train on and to validate with.

    Attributes:
        train: the bytes to train on, (n,) uint8.
        validation: the bytes to validate with, (m,) uint8.
        source: where they come from, in words.
    """

    train: Bytes
    validation: Bytes
    source: str


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def load_text(data: Path | None, seq: int) -> Text:
    """Reads a text and holds out its end.

    Args:
        data: a file or a folder; None: the sources of Python's standard library.
        seq: how many tokens a sequence has. Each part must hold at least one sequence and the byte after it.

    Raises:
        ConfigError: there is nothing to read, it cannot be read, or it is too little, or too much for RAM.
    """
    if data is None:
        source = f"Python's standard library, {standard_library()}"
        content = np.frombuffer(b"".join(_library_files(standard_library())), dtype=np.uint8)
    elif data.is_dir():
        source = str(data)
        content = np.frombuffer(b"".join(_folder_files(data)), dtype=np.uint8)
    elif data.is_file():
        source = str(data)
        content = _map_file(data)
    else:
        raise ConfigError(f"--data {data} is neither a file nor a folder: give text to train on")
    train, validation = split(content)
    if len(validation) < seq + 1:
        least = int((seq + 1) / HELD_OUT) + 1
        hint = "give more with --data" if data is None else "give more text, or a smaller --seq"
        raise ConfigError(
            f"{source} holds {len(content)} bytes of text; with --seq {seq} at least {least} are needed, "
            f"because the last {HELD_OUT:.0%} are held out: {hint}"
        )
    return Text(train, validation, source)


def split(content: Bytes) -> tuple[Bytes, Bytes]:
    """Splits bytes into the first 95 %, to train on, and the contiguous rest, to validate with."""
    cut = len(content) - int(len(content) * HELD_OUT)
    return content[:cut], content[cut:]


def _map_file(file: Path) -> Bytes:
    """Maps a file's bytes into memory: the text may be larger than RAM.

    Raises:
        ConfigError: the file is empty, or cannot be read.
    """
    try:
        if file.stat().st_size == 0:
            raise ConfigError(f"--data {file} is empty: give text to train on")
        return np.memmap(file, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ConfigError(f"--data {file} cannot be read: {error.strerror}") from error


def _library_files(library: Path) -> Iterator[bytes]:
    """The sources below `library`, in the order of relative paths, without those that cannot be read."""
    for file in _walk(library, skip=NOT_LIBRARY):
        if file.suffix == ".py":
            with contextlib.suppress(OSError):
                yield file.read_bytes()


def _folder_files(folder: Path) -> Iterator[bytes]:
    """The text files of a user's folder, in the order of relative paths.

    Raises:
        ConfigError: a file cannot be read, or they hold more than FOLDER_LIMIT_BYTES together.
    """
    total = 0
    for file in _walk(folder, skip=frozenset()):
        try:
            total += file.stat().st_size
            if total > FOLDER_LIMIT_BYTES:
                raise ConfigError(
                    f"--data {folder} holds more than {FOLDER_LIMIT_BYTES >> 30} GiB, which would lie "
                    f"in RAM: join it into one file, which is mapped instead"
                )
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"--data: {file} cannot be read: {error.strerror}") from error
        if b"\0" not in content:  # text has no NUL bytes
            yield content


def _walk(folder: Path, skip: frozenset[str]) -> list[Path]:
    """Regular files below `folder`, sorted by relative path, without hidden ones and those in folders named in `skip`.

    What lies in hidden folders is left out, too.
    """
    found = []
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths = (Path(directory, name) for name in files if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


class Batches:
    """Random windows of the text, the same ones for the same seed on every machine.

    Calling it gives tokens and targets: two (batch, seq) int64 tensors on `device`. The targets are one byte further
    on.

    Args:
        text: the bytes to draw from, (n,) uint8.
        batch: how many sequences a batch has.
        seq: how many bytes a sequence has.
        seed: the seed of the windows.
        device: where the tensors are made.
    """

    def __init__(self, text: Bytes, batch: int, seq: int, seed: int, device: torch.device) -> None:
        self._text = text
        self._shape = (batch, seq)
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def state(self) -> Tensor:
        """The position in the sequence of batches, for `restore`."""
        return self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        """Goes back to a position that `state` returned."""
        self._generator.set_state(state)

    def __call__(self) -> tuple[Tensor, Tensor]:
        batch, seq = self._shape
        starts = torch.randint(len(self._text) - seq, (batch,), generator=self._generator)
        return cut_windows(self._text, starts.tolist(), seq, self._device)


def cut_windows(text: Bytes, starts: list[int], seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cuts `seq` bytes and the one after them from each start.

    Args:
        text: the bytes, (n,) uint8.
        starts: where each window begins.
        seq: how many tokens a window has.
        device: where the tensors are made.

    Returns:
        Tokens and targets, (len(starts), seq) int64 each.
    """
    windows = np.stack([text[start : start + seq + 1] for start in starts]).astype(np.int64)
    both = torch.from_numpy(windows).to(device)
    return both[:, :-1], both[:, 1:]


def even_starts(text: Bytes, windows: int, seq: int) -> list[int]:
    """Up to `windows` starts, evenly spread over all of the text, of windows that do not overlap."""
    count = max(1, min(windows, (len(text) - 1) // seq))
    step = (len(text) - 1 - seq) / max(1, count - 1)
    return [int(i * step) for i in range(count)]
