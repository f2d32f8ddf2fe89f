"""The files of a run, by what they are: their names have the run's id."""

from __future__ import annotations

from pathlib import Path

from offload.storage.directories import LOCK_NAME, file_name, older_swap_name


def swaps_in(directory: Path) -> list[Path]:
    """All swap files of this version."""
    return sorted(directory.glob("swap-*"))


def swap_in(directory: Path, rank: int = 0) -> Path:
    """The swap file of a rank. There has to be one."""
    (found,) = directory.glob(f"swap-*-{rank}")
    return found


def reserved_in(directory: Path) -> int:
    """Bytes of the swap files, and of what is reserved beside them for commits, before the first one."""
    return sum(file.stat().st_size for kind in ("swap", "room") for file in directory.glob(f"{kind}-*"))


def kinds_in(directory: Path) -> set[str]:
    """What is there: kinds of files of this library, and other names as they are. Locks and spares are left out."""
    names = {file.name for file in directory.iterdir()} - {LOCK_NAME, *map(older_swap_name, range(64))}
    return {found.kind if (found := file_name(name)) else name for name in names} - {"room"}


def contents(folder: Path) -> dict[str, bytes]:
    """All files in a folder and below, but for locks."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != LOCK_NAME)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
