"""The swap files that a commit lies in, all of them open and locked, and its slots, checked as they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import xxhash
from torch import Tensor

from offload.checkpoint.commit import manifest_name
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.places import listed, names_in, swaps
from offload.checkpoint.swapfile import SwapFile
from offload.errors import CorruptionError, OffloadError, ResumeError
from offload.sizes import PAGE_BYTES
from offload.storage.directories import swap_name
from offload.storage.files import Files
from offload.storage.swap_format import Slot, header_problem, padding_problem, parse_header, superblock_problem


class SwapFiles:
    """Those of a run in `paths`, which `manifests`, by rank, describe. Nothing is opened before `lock`.

    Raises: ResumeError (a directory is missing), CorruptionError, PathError, PathInUseError (a live run), TierIOError.
    """

    def __init__(self, paths: Sequence[Path], manifests: Sequence[Manifest], files: Files) -> None:
        self._paths = tuple(paths)
        self._disk = files
        self._manifests = tuple(manifests)
        self._files: dict[tuple[int, int], SwapFile] = {}
        self._without: Collection[int] = ()
        self._undo = ExitStack()

    def close(self) -> None:
        """Closes the files, which frees their locks. May be called again."""
        self._files.clear()
        self._undo.close()

    def lock(
        self,
        *,
        exclusive: bool = False,
        without: Collection[int] | None = None,
        damage: list[tuple[int, OffloadError]] | None = None,
    ) -> None:
        """Opens and locks the swap files, if they are not.

        Args: exclusive: against other readers, too; without: ranks of which some may be missing, from now on: they are
        not read; damage: gets rank and error of what is wrong with the files themselves, instead of raising it.
        """
        self._without = self._without if without is None else without
        if self._files:
            return
        with ExitStack() as undo:
            files: dict[tuple[int, int], SwapFile] = {}
            for rank, manifest in enumerate(self._manifests):
                is_damaged = False
                for path in self._names_of(rank, manifest.run_id):
                    try:
                        file = SwapFile(path, self._disk, exclusive=exclusive)
                        undo.callback(file.close)
                        if file.block.run_id != manifest.run_id:
                            file.close()  # and is free for others
                            continue
                        files[rank, file.block.stripe[0]] = file
                        if problem := superblock_problem(file.block, manifest) or padding_problem(file.page):
                            raise CorruptionError(problem, file=file.path)
                    except CorruptionError as error:
                        if damage is None:
                            raise
                        damage.append((rank, error))
                        is_damaged = True
                for number in sorted({slot.path for slot in manifest.slots}):
                    if (rank, number) not in files and not is_damaged and rank not in self._without:
                        raise ResumeError(self._missing(rank, number))
            self._files = files
            self._undo.push(undo.pop_all())

    def _missing(self, rank: int, number: int) -> str:
        manifest, name = self._manifests[rank], swap_name(rank)
        own = manifest_name(manifest, rank)
        homes = [path for path in self._paths if own in names_in(path, self._disk)]
        if len(homes) == manifest.paths:
            return (
                f"{name}, the swap file of rank {rank} of this run, is not in all of {listed(homes)}, where its "
                "manifest is, or is another run's: put it back; nothing was changed"
            )
        return (
            f"directory {number} of the {manifest.paths} that rank {rank} of this run lies in is not among "
            f"{listed(self._paths)}: name all of them"
        )

    def hold(self, paths: Iterable[Path], *, exclusive: bool) -> None:
        """Locks swap files beside those that are read, until `close`. Raises: as `lock`."""
        for path in paths:
            self._undo.callback(SwapFile(path, self._disk, exclusive=exclusive).close)

    def _names_of(self, rank: int, run_id: str) -> Iterator[Path]:
        """Where the swap files of `rank` may be: what is there under its name is looked at closely."""
        for path in self._paths:
            if swap_name(rank) in names_in(path, self._disk):
                yield path / swap_name(rank)
            for swap in swaps(path, self._disk):
                if swap.is_aside and (swap.rank, swap.run_id) == (rank, run_id):
                    yield swap.path

    def require_whole(self, rank: int, slot: Slot) -> None:
        """Before memory is taken for a slot: a manifest may say anything."""
        file = self._files[rank, slot.path]
        if file.size < slot.offset + slot.size:
            _refuse(file, slot, f"the file ends before this slot of {slot.size} bytes does")

    def check(self, rank: int, slot: Slot, buffer: Tensor) -> None:
        """Reads a slot through `buffer`, whatever its size; what fits into it stays in it. Raises: as `SwapFiles`."""
        manifest = self._manifests[rank]
        if (file := self._files.get((rank, slot.path))) is None:
            raise CorruptionError("lies in a swap file that is damaged", chunk=slot.chunk, file=swap_name(rank))
        hasher = xxhash.xxh3_64()
        for start in range(0, slot.size, len(buffer)):
            data = memoryview(buffer[: min(len(buffer), slot.size - start)].numpy().data)
            if file.read(data, slot.offset + start) < len(data):
                _refuse(file, slot, f"the file ends before this slot of {slot.size} bytes does")
            if start == 0:
                header = parse_header(bytes(data[:PAGE_BYTES]), file.path, slot.offset, slot.chunk)
                if problem := header_problem(header, manifest, slot.chunk):
                    _refuse(file, slot, problem)
                data = data[PAGE_BYTES:]
            hasher.update(data)
        if hasher.intdigest() != manifest.slots[slot.chunk].checksum:
            _refuse(file, slot, "the slot's data does not match its checksum")


def _refuse(file: SwapFile, slot: Slot, problem: str) -> NoReturn:
    raise CorruptionError(problem, chunk=slot.chunk, file=file.path, offset=slot.offset)
