from __future__ import annotations

import errno
import inspect
import pickle
import re

import pytest

import offload
from offload import errors
from offload.errors import CorruptionError, OffloadError, PathError, TierIOError

TREE = [
    error
    for error in vars(errors).values()
    if inspect.isclass(error) and issubclass(error, Exception) and error.__module__ == errors.__name__
]


def test_the_docstring_shows_the_whole_tree() -> None:
    named = set(re.findall(r"\b(\w+Error)\b", (errors.__doc__ or "").split("A message says")[0]))
    builtin = {"ValueError", "OSError", "ArithmeticError", "ImportError", "RuntimeError"}
    assert named - builtin == {error.__name__ for error in TREE}


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_every_error_is_public_and_caught_by_the_base(error: type[Exception]) -> None:
    assert issubclass(error, OffloadError)
    assert getattr(offload, error.__name__) is error
    assert error.__name__ in offload.__all__
    assert error.__doc__


@pytest.mark.parametrize(
    ("error", "also"),
    [
        ("ConfigError", ValueError),
        ("PathError", OSError),
        ("PathInUseError", PathError),
        ("TierIOError", OSError),
        ("NonFiniteGradientError", ArithmeticError),
        ("DeviceError", RuntimeError),
    ],
)
def test_who_catches_the_builtin_kind_catches_these(error: str, also: type[Exception]) -> None:
    assert issubclass(getattr(errors, error), also)


def test_an_io_error_says_what_failed_where() -> None:
    error = TierIOError("read", errno.EIO, "/scratch/swap", 8192, 4096)
    assert (error.errno, error.filename, error.offset, error.length, error.operation) == (
        errno.EIO,
        "/scratch/swap",
        8192,
        4096,
        "read",
    )
    for part in ("read", "4096 bytes", "offset 8192", "/scratch/swap", "Input/output error"):
        assert part in str(error)


def test_a_file_that_is_too_large_is_told_with_the_limit_that_may_be_it() -> None:
    assert "ulimit -f" in str(TierIOError("write", errno.EFBIG, "/scratch/swap", 8192, 4096))


def test_what_moves_no_bytes_is_told_without_any_and_too_many_files_with_their_limit() -> None:
    error = TierIOError("rename", errno.EMFILE, "/scratch/COMMIT", 0, 0)
    assert "rename failed: Too many open files: raise the limit of open files (ulimit -n)" in str(error)


def test_a_corruption_error_names_chunk_file_and_offset() -> None:
    error = CorruptionError("damaged", chunk=3, file="/scratch/swap", offset=8192)
    assert (error.chunk, error.file, error.offset) == (3, "/scratch/swap", 8192)
    assert str(error) == "damaged (chunk 3, /scratch/swap, offset 8192)"


def test_a_corruption_error_outside_every_chunk_names_the_file() -> None:
    error = CorruptionError("is no manifest", file="/scratch/COMMIT")
    assert error.chunk is None
    assert str(error) == "is no manifest (/scratch/COMMIT, offset 0)"


@pytest.mark.parametrize(
    "error",
    [
        TierIOError("read", errno.EIO, "/scratch/swap", 8192, 4096),
        CorruptionError("damaged", chunk=3, file="/scratch/swap", offset=8192),
        errors.BudgetError("too small", needed=2, available=1, option="path"),
        errors.NonFiniteGradientError("NaN", parameter="head.weight"),
        PathError(errno.ENOENT, "is missing", "/scratch"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: OffloadError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
