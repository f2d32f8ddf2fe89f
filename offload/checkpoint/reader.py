"""Reads the last commit of a run without changing anything: to inspect, verify, export or reshard it.

Steps that a chunk owes (optim/late.py) are made in the copy that is read, so nobody above knows of them.

A value is returned only after the checksum of the whole slot has been compared with the manifest's; the COMMIT record
has the digest of the manifest. Memory: the slots of one chunk, and the masters that a split one is made into; up to
2 MiB where chunks owe steps; a few pieces of PIECE_BYTES when verifying; `slots_bytes` for `slots`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from offload.checkpoint.commit import Commit, agree, manifest_name, read_extra, read_manifest
from offload.checkpoint.live import (
    last_of,
    listed,
    live,
    manifests_in,
    names_in,
    other_steps,
    ranks_in,
    require_manifests,
    swaps,
)
from offload.checkpoint.manifest import Manifest, ParameterFacts, Slot, committed_slots
from offload.errors import ConfigError, CorruptionError, OffloadError, ResumeError
from offload.interrupts import wait_for_all
from offload.io.engine import IOEngine, IOFuture, aligned_memory
from offload.io.files import LOCAL, Files
from offload.io.threads import ThreadEngine, Workers
from offload.layout import ADAM_FORMS, MASTER, Form, StateKind, blocks_of, is_dithered, of_states
from offload.native import JOIN, Kernels, codes, load
from offload.optim.late import ZEROS_NUMEL, replay
from offload.optim.rules.adam import AdamRule
from offload.sizes import GIB, MASTER_ITEM_BYTES, MIB, format_bytes
from offload.storage.directories import older_swap_name, swap_name
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import CommittedFile, SlotFile, memory_of
from offload.storage.swap_format import HALF_BYTES, superblock_padding_is_clean


class CommittedSlots:
    """The committed slots of one rank, which are only read.

    Args:
        manifest: says which they are.
        files: the rank's swap files, by their number, without those that are damaged.
        engine: reads, and has the files open.
        hasher: compares checksums.
    """

    def __init__(
        self, manifest: Manifest, files: Mapping[int, CommittedFile], engine: IOEngine, hasher: Workers
    ) -> None:
        self._manifest = manifest
        self._slots = committed_slots(manifest)
        self._sizes = {path: file.size for path, file in files.items()}
        self._files = {
            path: SlotFile(engine, files[path].file, table, manifest.run_id, hasher)
            for path, table in manifest.slot_tables.items()
            if path in files
        }

    def read(self, number: int, data: Tensor) -> IOFuture:
        """Reads a slot, and compares it with its checksum.

        Args:
            number: the number of the slot.
            data: uint8, as long as the slot.

        Returns:
            A future. It raises what that of `SlotFile.read` raises.

        Raises:
            CorruptionError: the slot's file is damaged or too short.
        """
        facts = self._manifest.slots[number]
        file = self._whole(number)
        return file.read(number, memory_of(data), step=facts.step, place=facts.place, checksum=facts.checksum)

    def verify(self, number: int, buffer: Tensor) -> None:
        """Reads a slot piece by piece, and compares it with its checksum.

        Args:
            number: the number of the slot.
            buffer: the memory for a piece, uint8, whole pages.

        Raises:
            CorruptionError: the slot or its file is damaged.
            TierIOError: a disk or its file system failed.
        """
        facts = self._manifest.slots[number]
        file = self._whole(number)
        file.verify(number, memory_of(buffer), step=facts.step, place=facts.place, checksum=facts.checksum)

    def require_whole(self, numbers: Iterable[int]) -> None:
        """Checks that the files are long enough for these slots, before memory is taken: a manifest may say anything.

        Raises:
            CorruptionError: a file is damaged or too short.
        """
        for number in numbers:
            self._whole(number)

    def _whole(self, number: int) -> SlotFile:
        slot = self._slots[number]
        if (file := self._files.get(slot.path)) is None:
            name = swap_name(self._manifest.run_id, self._manifest.rank)
            raise CorruptionError("lies in a swap file that is damaged", chunk=number, file=name)
        if self._sizes[slot.path] < slot.offset + slot.size:
            problem = f"the file ends before this slot of {format_bytes(slot.size)} does"
            raise CorruptionError(problem, chunk=number, file=file.path, offset=slot.offset)
        return file


class CommittedFiles:
    """The swap files of a run. None is opened before `lock`.

    Args:
        paths: the directories of the run.
        manifests: the manifests that describe the files, by rank.
        files: the file system.
        open_engine: makes the I/O engine that reads slots.
        is_older: whether the files are named as versions before COMMIT format 2 did.

    Attributes:
        ranks: the ranks whose files are opened; all, unless this is set before `lock`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        manifests: Sequence[Manifest],
        files: Files,
        open_engine: Callable[[], IOEngine],
        *,
        is_older: bool = False,
    ) -> None:
        self._open_engine = open_engine
        self._is_older = is_older
        self._paths = tuple(paths)
        self._disk = files
        self._manifests = tuple(manifests)
        self.ranks: Collection[int] = range(len(manifests))
        self._slots: dict[int, CommittedSlots] | None = None
        self._undo = ExitStack()

    def close(self) -> None:
        """Closes the files, which frees their locks. May be called again."""
        self._slots = None
        self._undo.close()

    def of(self, rank: int) -> CommittedSlots:
        """The slots of a rank whose files are locked."""
        assert self._slots is not None
        return self._slots[rank]

    def lock(self, *, exclusive: bool = False, damage: list[tuple[int, OffloadError]] | None = None) -> None:
        """Opens and locks the swap files. Does nothing if they are locked already.

        Args:
            exclusive: whether to lock them against other readers, too.
            damage: gets (rank, error) of each file that is damaged; None: the error is raised.

        Raises:
            ResumeError: a directory is missing, or a newer version of this library wrote a file.
            CorruptionError: a file is damaged, or not the one that its manifest describes.
            PathError: a file or directory cannot be used.
            PathInUseError: a live run holds a file.
            TierIOError: a disk or its file system failed.
            BudgetError: the system refuses threads.
        """
        if self._slots is not None:
            return
        with ExitStack() as undo:
            found: dict[int, dict[int, CommittedFile]] = {}
            for rank in sorted(self.ranks):
                manifest, is_damaged = self._manifests[rank], False
                files = found[rank] = {}
                for path in self._names_of(rank, manifest.run_id):
                    try:
                        file = CommittedFile(path, self._disk, exclusive=exclusive)
                        undo.callback(file.close)
                        if file.block.run_id != manifest.run_id:
                            file.close()  # and is free for others
                            continue
                        files[file.block.stripe[0]] = file
                        _require_superblock(file, manifest)
                    except CorruptionError as error:
                        if damage is None:
                            raise
                        damage.append((rank, error))
                        is_damaged = True
                for number in sorted({slot.path for slot in manifest.slots}):
                    if number not in files and not is_damaged:
                        raise ResumeError(self._missing(rank, number))
            hasher = Workers(1, "offload-checksum")
            undo.callback(hasher.shutdown)
            engine = self._open_engine()
            undo.callback(engine.close)
            for files in found.values():
                for file in files.values():
                    engine.adopt(file.file)
            self._slots = {
                rank: CommittedSlots(self._manifests[rank], files, engine, hasher) for rank, files in found.items()
            }
            self._undo.push(undo.pop_all())

    def _missing(self, rank: int, number: int) -> str:
        manifest = self._manifests[rank]
        name = older_swap_name(rank) if self._is_older else swap_name(manifest.run_id, rank)
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
        """Locks swap files beside those that are read, until `close`.

        Args:
            paths: the files.
            exclusive: whether to lock them against other readers, too.

        Raises:
            OffloadError: what `CommittedFile` raises.
        """
        for path in paths:
            self._undo.callback(CommittedFile(path, self._disk, exclusive=exclusive).close)

    def _names_of(self, rank: int, run_id: str) -> Iterator[Path]:
        """Where swap files of `rank` may lie. One of an older version may be of another run: its superblock tells."""
        name = older_swap_name(rank) if self._is_older else swap_name(run_id, rank)
        for path in self._paths:
            if name in names_in(path, self._disk):
                yield path / name
            for swap in swaps(path, self._disk, {rank}, run_id) if self._is_older else ():
                if swap.name.suffix:
                    yield swap.path


def _require_superblock(file: CommittedFile, manifest: Manifest) -> None:
    """Checks that a swap file is the one that the manifest of its rank describes.

    Raises:
        CorruptionError: it is another one, or damaged.
    """
    block, path = file.block, file.block.stripe[0]
    problem = None
    if not block.commits:
        problem = "belongs to a run that commits nothing, and a commit lies beside it"
    elif (block.places, block.stripe[1]) != (manifest.places, manifest.paths):
        problem = "has more or fewer slots a chunk, or files a rank, than its manifest says"
    elif not block.describes(manifest.slot_map.describe(manifest.slots_in(path))):
        problem = "holds other chunks than its manifest says"
    elif not superblock_padding_is_clean(file.page):
        problem = "is damaged after the text of its superblock"
    if problem:
        raise CorruptionError(problem, file=file.path)


KINDS = (ChunkKind.STATES, ChunkKind.PARAMS)
"""The kinds of chunks that are committed."""
PIECE_BYTES = 4 * MIB
"""The size of a read while verifying, which is enough for any drive at full speed."""


def _threads() -> IOEngine:
    """The engine that reads commits. The kernel parts a slot into requests better than threads that have to wake up."""
    return ThreadEngine(request_bytes=GIB)


@dataclass(frozen=True)
class Tensors:
    """How one parameter is stored.

    Attributes:
        facts: what the manifest says of it, with the shape of the whole parameter.
        nbytes: what its states take in the slots.
        chunks: the chunks that hold a part of it, as (rank, chunk).
    """

    facts: ParameterFacts
    nbytes: int
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Verified:
    """The result for one slot, or an error in another file.

    Attributes:
        rank: whose slot or file it is.
        chunk: the number of the slot; None: it is another file.
        nbytes: the bytes of the slot; 0 for another file.
        error: what is wrong; None: nothing.
    """

    rank: int
    chunk: int | None
    nbytes: int
    error: OffloadError | None


@dataclass(frozen=True)
class Range:
    """`numel` elements of a parameter, in `chunk` of `rank` from `chunk_offset`."""

    rank: int
    chunk: int
    chunk_offset: int
    numel: int


class Reader:
    """The last commit of a run.

    COMMIT and manifests are read at once. The swap files are opened and locked when the first slot is asked for. The
    lock is shared: several readers may have it, but no run can write meanwhile. A reader is not for several threads at
    a time.

    Args:
        paths: all directories of the run, in any order.
        files: the file system.
        told: the directory of the record, the record, and the manifests by rank, where this rank may not see all of
            them; None: they are looked for.
        open_engine: makes the I/O engine that reads slots.

    Attributes:
        paths: see above.
        home: the directory of the record.
        commit: the record.
        manifests: the manifests, by rank.
        swap_files: the swap files.

    Raises:
        ResumeError: there is no commit, a directory is missing, or another version of this library wrote it.
        CorruptionError: what was read is damaged.
        PathError: a file or directory cannot be used.
        PathInUseError: a live run holds the files; from `verify` and `read` on.
        TierIOError: a disk or its file system failed.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        files: Files = LOCAL,
        told: tuple[Path, Commit, tuple[Manifest, ...]] | None = None,
        open_engine: Callable[[], IOEngine] = _threads,
    ) -> None:
        self.paths = tuple(paths)
        self._disk = files
        self._buffers = [_buffer(0)] * 3
        # The chunk that these hold, and its states.
        self._loaded: tuple[tuple[int, int], dict[str, Tensor]] | None = None
        self._kernels: Kernels | None = None
        self.home, self.commit, self.manifests = self._look() if told is None else told
        agree(self.manifests, str(self.home))
        is_older = self.commit.is_older
        self.swap_files = CommittedFiles(self.paths, self.manifests, files, open_engine, is_older=is_older)
        self._maps = [manifest.slot_map for manifest in self.manifests]
        self._slots = [committed_slots(manifest) for manifest in self.manifests]
        self._names = {param.name: number for number, param in enumerate(self.manifests[0].parameters)}
        self._of_flat: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for rank, manifest in enumerate(self.manifests):
            for chunk, facts in enumerate(manifest.chunks):
                self._of_flat[manifest.slice, facts.flat].append((rank, chunk))
        for chunks in self._of_flat.values():
            chunks.sort(key=lambda at: self.manifests[at[0]].chunks[at[1]].start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files, which frees their locks. May be called again."""
        self._loaded = None
        self.swap_files.close()
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None

    def extra(self, rank: int = 0) -> object:
        """What the user committed along on a rank."""
        # Where the manifest is; where it has gone meanwhile, the extra is reported missing beside the record.
        directory = manifests_in(self.paths, self.commit, self._disk).get(rank, self.home)
        return read_extra(directory, self.manifests[rank], self._disk)

    def tensors(self) -> list[Tensors]:
        """The parameters, in their order, for a table."""
        found = []
        for name in self._names:
            ranges = [one for number in self.slices_of(name) for one in self.ranges(name, number)]
            nbytes = sum(map(self._bytes_of, ranges))
            facts = replace(self.facts(name), shape=self.shape_of(name))
            found.append(Tensors(facts, nbytes, tuple((one.rank, one.chunk) for one in ranges)))
        return found

    def facts(self, name: str, slice_number: int = 0) -> ParameterFacts:
        """What the manifest says of a parameter, as one slice of the model has it.

        Args:
            name: the name of the parameter.
            slice_number: the number of the slice.
        """
        return self._first_of(slice_number).parameters[self._number(name)]

    def slices_of(self, name: str) -> range:
        """The slices that a parameter is put together from: all of them, or the first, if each has all of it."""
        return range(1 if self.facts(name).shard_dim is None else self.manifests[0].slices)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        facts = [self.facts(name, number) for number in self.slices_of(name)]
        shape, dim = list(facts[0].shape), facts[0].shard_dim
        if dim is not None:
            shape[dim] = sum(one.shape[dim] for one in facts)
        return tuple(shape)

    def _first_of(self, slice_number: int) -> Manifest:
        """The manifest of the first rank of a slice."""
        return self.manifests[self.manifests[0].ranks_of(slice_number).start]

    def ranges(self, name: str, slice_number: int = 0) -> list[Range]:
        """Where the elements of a parameter lie, in the order of its memory.

        Args:
            name: the name of the parameter.
            slice_number: the number of the slice of the model.
        """
        number, manifest = self._number(name), self._first_of(slice_number)
        flat, offset = manifest.homes[number]
        end = offset + manifest.parameters[number].numel
        found = []
        for rank, chunk in self._of_flat[slice_number, flat]:
            facts = self.manifests[rank].chunks[chunk]
            first, last = max(offset, facts.start), min(end, facts.start + facts.numel)
            if first < last:
                found.append(Range(rank, chunk, first - facts.start, last - first))
        return found

    def kinds(self, name: str) -> tuple[str, ...]:
        """The names of the states of a parameter, its master's first."""
        manifest = self.manifests[0]
        return manifest.flats[manifest.homes[self._number(name)][0]].kinds

    def state_shape_of(self, name: str, kind: str) -> tuple[int, ...]:
        """The shape of a state of the whole parameter: in most cases the parameter's."""
        small = dict(self.facts(name).shapes or ())
        return small[kind] if kind in small else self.shape_of(name)

    def pieces(self, name: str, kind: str, slice_number: int = 0) -> Iterator[Tensor]:
        """The elements of a state of a parameter, in the order of its memory, fp32, as 1-D tensors end to end.

        A state of another shape than its parameter's has zeros beside its elements: `read` knows where.

        A piece is valid until the next one is asked for. Whoever goes through the parameters in the order of the flats
        reads every slot once.

        Args:
            name: the name of the parameter.
            kind: one of `kinds(name)`.
            slice_number: the number of the slice of the model.
        """
        if kind not in (kinds := self.kinds(name)):
            raise ConfigError(f"kind={kind!r}: choose one of {', '.join(kinds)}")
        for one in self.ranges(name, slice_number):
            yield self._state(one.rank, one.chunk, kind)[one.chunk_offset : one.chunk_offset + one.numel]

    def _bytes_of(self, one: Range) -> int:
        """What elements of a parameter take in all slots of their chunk together."""
        slots = [self._slots[one.rank][number] for number in self._numbers(one.rank, one.chunk)]
        return sum(sum(slot.arrays._replace(numel=one.numel).sizes) for slot in slots)

    def _state_kinds(self, rank: int, chunk: int) -> tuple[StateKind, ...]:
        """What the slot of a chunk's states has beside the master."""
        manifest = self.manifests[rank]
        return manifest.flats[manifest.chunks[chunk].flat].state_kinds

    def _is_split(self, rank: int, chunk: int) -> bool:
        """Whether the slot of a chunk's states has the low halves of its masters only."""
        return self._slots[rank][self._numbers(rank, chunk)[0]].arrays.itemsizes[0] == HALF_BYTES

    def read(self, name: str, kind: str, slice_number: int | None = None) -> Tensor:
        """A state of a parameter: a copy, fp32, on the CPU, in its shape, row-major.

        Args:
            name: the name of the parameter.
            kind: one of `kinds(name)`.
            slice_number: the slice of the model that is read alone; None: all of the parameter.
        """
        if slice_number is None:
            each = [self.read(name, kind, number) for number in self.slices_of(name)]
            return each[0] if len(each) == 1 else torch.cat(each, self.facts(name).shard_dim or 0)
        facts = self.facts(name, slice_number)
        line = torch.empty(facts.numel, dtype=torch.float32, device="cpu")
        filled = 0
        for piece in self.pieces(name, kind, slice_number):
            line[filled : filled + len(piece)] = piece
            filled += len(piece)
        if kind in (small := dict(facts.shapes or ())):
            return codes.small(self._form(name, kind), line, small[kind]).contiguous()
        return in_shape(line, facts)

    def _form(self, name: str, kind: str) -> Form:
        manifest = self.manifests[0]
        states = manifest.flats[manifest.homes[self._number(name)][0]].state_kinds
        return next(state.form for state in states if state.name == kind)

    def slots(self, wanted: Iterable[tuple[int, int]]) -> Iterator[dict[str, Tensor]]:
        """The states of whole chunks, by kind: fp32, of shape (chunk.numel,), valid until the next ones are asked for.

        One chunk is read ahead. This takes `slots_bytes` of memory.

        Args:
            wanted: (rank, chunk) of each chunk.

        Raises:
            OffloadError: what `Reader` raises.
        """
        self.swap_files.lock()
        wanted = list(wanted)
        for rank, chunk in wanted:
            self.swap_files.of(rank).require_whole(self._needed(rank, chunk))
        made = _buffer(self._made_bytes())
        both = deque([*map(_buffer, self._largest()), made] for _ in range(2))
        coming: deque[tuple[int, int, list[Tensor], list[IOFuture]]] = deque()
        for rank, chunk in wanted:
            numbers = self._needed(rank, chunk)
            coming.append((rank, chunk, both[0], self._begin(rank, numbers, both[0])))
            both.rotate()
            if len(coming) == len(both):
                yield self._states(*coming.popleft())
        for each in coming:
            yield self._states(*each)

    def slots_bytes(self) -> int:
        """The RAM that `slots` takes, in bytes."""
        return 2 * sum(self._largest()) + self._made_bytes()

    def _largest(self) -> list[int]:
        """The bytes of the largest slot of states, and of the largest slot of 16-bit parameters."""
        both = [*zip(self._maps, self._slots, strict=True)]
        return [max((found[at].size for slots, found in both for at in slots.of(kind)), default=0) for kind in KINDS]

    def _made_bytes(self) -> int:
        """The most bytes of fp32 that are made of a chunk's slots; see `_made_of`."""
        chunks = ((rank, chunk) for rank, found in enumerate(self.manifests) for chunk in range(len(found.chunks)))
        return max((self._made_of(rank, chunk) for rank, chunk in chunks), default=0)

    def _made_of(self, rank: int, chunk: int) -> int:
        """The bytes of fp32 that are made of a chunk's slots: masters of two halves, and states that are decoded."""
        made = sum(not state.form.is_plain for state in self._state_kinds(rank, chunk)) + self._is_split(rank, chunk)
        return MASTER_ITEM_BYTES * made * self.manifests[rank].chunks[chunk].numel

    def _numbers(self, rank: int, chunk: int) -> list[int]:
        """The slots that belong to a chunk, for its states and, if these are committed too, for its parameters."""
        slots = self._maps[rank]
        return [slots.at(kind, chunk) for kind in KINDS if slots.of(kind)]

    def _needed(self, rank: int, chunk: int, kind: str = "master") -> list[int]:
        """The slots of a chunk that one of its states is made of."""
        numbers = self._numbers(rank, chunk)
        # A split fp32 form has tie bits in exp_avg_sq, which only a join clears.
        is_alone = kind not in (MASTER, *(() if is_dithered(self._state_kinds(rank, chunk)) else ("exp_avg_sq",)))
        is_alone = is_alone and chunk not in self.manifests[rank].owed
        return numbers[:1] if is_alone or not self._is_split(rank, chunk) else numbers

    def _state(self, rank: int, chunk: int, kind: str) -> Tensor:
        """A state of a chunk, in memory that the next chunk overwrites."""
        if self._loaded is None or self._loaded[0] != (rank, chunk) or kind not in self._loaded[1]:
            self.swap_files.lock()
            self._loaded = None
            numbers = self._needed(rank, chunk, kind)
            self.swap_files.of(rank).require_whole(numbers)
            # What is under way when this is interrupted keeps its memory.
            buffers, self._buffers = self._buffers, [_buffer(0)] * 3
            sizes = [self._slots[rank][number].size for number in numbers] + [0] * (2 - len(numbers))
            for role, size in enumerate([*sizes, self._made_of(rank, chunk)]):
                if len(buffers[role]) < size:
                    buffers[role] = _buffer(size)
            self._loaded = (rank, chunk), self._states(rank, chunk, buffers, self._begin(rank, numbers, buffers))
            self._buffers = buffers
        return self._loaded[1][kind]

    def _begin(self, rank: int, numbers: Sequence[int], buffers: Sequence[Tensor]) -> list[IOFuture]:
        """Begins to read the slots of a chunk, each into a buffer that is long enough."""
        slots, sizes = self.swap_files.of(rank), [self._slots[rank][number].size for number in numbers]
        into = zip(numbers, sizes, buffers, strict=False)
        return [slots.read(number, buffer[:size]) for number, size, buffer in into]

    def _states(
        self, rank: int, chunk: int, buffers: Sequence[Tensor], reading: Sequence[IOFuture]
    ) -> dict[str, Tensor]:
        """Waits for the slots of a chunk.

        Args:
            rank: whose slots.
            chunk: its number.
            buffers: the memory of the slots, and last that of what is made of them, of `_made_of` bytes.
            reading: the reads into `buffers`, of the states' slot and perhaps the parameters'.

        Returns:
            The states, by kind, fp32: all of them, or those that need no other slot.
        """
        wait_for_all(reading)
        for future in reading:
            future.result()
        numbers, kinds = self._numbers(rank, chunk), self._state_kinds(rank, chunk)
        numel = self.manifests[rank].chunks[chunk].numel
        if chunk in self.manifests[rank].owed:
            self._make_steps(rank, chunk, buffers)
        made = iter(buffers[2].view(torch.float32)[: self._made_of(rank, chunk) // MASTER_ITEM_BYTES].split(numel))
        master, *rest = self._slots[rank][numbers[0]].arrays.views(buffers[0])
        found = {}
        for state, arrays in zip(kinds, of_states(kinds, rest), strict=True):
            exact = arrays[0] if state.form.is_plain else next(made)
            found[state.name] = codes.decode_into(state.form, arrays, exact)
        if not self._is_split(rank, chunk):
            return {MASTER: master, **found}
        if len(reading) == 1:
            return {kind: found[kind] for kind in found if len(self._needed(rank, chunk, kind)) == 1}
        whole = next(made)
        (uppers,) = self._slots[rank][numbers[1]].arrays.views(buffers[1])
        uppers = uppers.view(torch.bfloat16)
        if is_dithered(kinds):
            codes.join_into(uppers, master, whole)
        else:
            self._kernels = self._kernels or load()
            self._kernels.call(JOIN, uppers, master, found["exp_avg_sq"], whole, found["exp_avg_sq"])
        return {MASTER: whole, **found}

    def _make_steps(self, rank: int, chunk: int, buffers: Sequence[Tensor]) -> None:
        """Makes the steps that a chunk owes, in the slots that were read.

        Args:
            rank: whose slots.
            chunk: its number.
            buffers: the memory of the states' slot and, if the masters are split, of the parameters'.
        """
        manifest, kinds = self.manifests[rank], self._state_kinds(rank, chunk)
        facts, numbers = manifest.chunks[chunk], self._numbers(rank, chunk)
        (param,), (begin, *_) = manifest.flats[facts.flat].params, manifest.flats[facts.flat].offsets
        rule = AdamRule(next(form for form, states in ADAM_FORMS.items() if states == kinds))
        dtype: torch.dtype = getattr(torch, manifest.parameters[param].dtype)
        is_split = self._is_split(rank, chunk)
        zeros = torch.zeros(min(ZEROS_NUMEL, facts.numel), dtype=torch.float32, device="cpu")
        out = torch.empty(len(zeros), dtype=dtype, device="cpu")
        if is_split:
            (uppers,) = self._slots[rank][numbers[1]].arrays.views(buffers[1])
            out = uppers.view(dtype)
        self._kernels = self._kernels or load()
        replay(
            self._kernels,
            rule,
            [rule.scalars(one.options, one.before, 1.0) for one in manifest.steps_owed_by(chunk)],
            self._slots[rank][numbers[0]].arrays.views(buffers[0]),
            blocks_of(kinds),
            facts.start - begin,
            zeros,
            out,
            is_split=is_split,
        )

    def verify(self, threads: int = 4) -> Iterator[Verified]:
        """Reads all that a resume reads, and compares it with its checksum. It goes on after an error.

        This takes `threads` x PIECE_BYTES of memory, and that of one rank's extra.

        Args:
            threads: how many slots are read at a time.

        Yields:
            First the errors of swap files outside of slots, and of `extra`. Then one result for each committed slot, in
            the order of the run.
        """
        damage: list[tuple[int, OffloadError]] = []
        self.swap_files.lock(damage=damage)
        for rank in range(len(self.manifests)):
            try:
                self.extra(rank)
            except OffloadError as error:
                damage.append((rank, error))
        yield from (Verified(rank, None, 0, error) for rank, error in damage)
        work = ((rank, slot) for rank, slots in enumerate(self._slots) for slot in slots)
        buffers = deque(_buffer(PIECE_BYTES) for _ in range(threads))
        with Workers(threads, "offload-verify") as pool:
            running: deque[Future[Verified]] = deque()
            while True:
                for rank, slot in islice(work, 2 * threads - len(running)):
                    running.append(pool.submit(self._verify_one, rank, slot, buffers))
                if not running:
                    return
                yield running.popleft().result()

    def _verify_one(self, rank: int, slot: Slot, buffers: deque[Tensor]) -> Verified:
        buffer = buffers.pop()
        try:
            self.swap_files.of(rank).verify(slot.chunk, buffer)
        except OffloadError as error:
            return Verified(rank, slot.chunk, slot.size, error)
        finally:
            buffers.append(buffer)
        return Verified(rank, slot.chunk, slot.size, None)

    def _find_commit(self) -> tuple[Path, Commit]:
        found = last_of(live(self.paths, self._disk), self.paths)
        if found is None:
            raise ResumeError(
                f"no commit in {listed(self.paths)}: name all directories of a run that has committed; "
                "`offload list DIR` shows the runs below a directory"
            )
        return found

    def _look(self) -> tuple[Path, Commit, tuple[Manifest, ...]]:
        home, commit = self._find_commit()
        try:
            return home, commit, self._read_manifests(home, commit)
        except (CorruptionError, ResumeError):
            # A live run may have committed since, and have cleared the manifests away that this was to read.
            again = self._find_commit()
            if again == (home, commit):
                raise
            return *again, self._read_manifests(*again)

    def _read_manifests(self, home: Path, commit: Commit) -> tuple[Manifest, ...]:
        lying = manifests_in(self.paths, commit, self._disk)
        missing = set(range(len(commit.manifests))) - lying.keys()
        swapping = ranks_in(self.paths, commit, self._disk, missing)
        require_manifests(commit, lying, swapping, other_steps(self.paths, commit, self._disk), self.paths, home)
        return tuple(read_manifest(lying[rank], commit, rank, self._disk) for rank in sorted(lying))

    def _number(self, name: str) -> int:
        if name not in self._names:
            raise ConfigError(f"{name!r} is no parameter of this run")
        return self._names[name]


def _buffer(nbytes: int) -> Tensor:
    """uint8 of shape (nbytes,), at the start of a page, as O_DIRECT wants it."""
    return torch.frombuffer(aligned_memory(nbytes), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)


def in_shape(line: Tensor, facts: ParameterFacts) -> Tensor:
    """A parameter in its shape, row-major.

    Args:
        line: its elements, 1-D, in the order of its memory.
        facts: what the manifest says of it.
    """
    if facts.order is None:
        return line.view(facts.shape)
    lying = line.view([facts.shape[dimension] for dimension in facts.order])
    back = sorted(range(len(facts.order)), key=facts.order.__getitem__)
    return lying.permute(back).contiguous()
