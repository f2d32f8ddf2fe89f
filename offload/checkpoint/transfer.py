"""What of a commit lies on disks of other machines, sent to the ranks that need it.

[Note: transfers]
All ranks know what each of them needs and which shards each sees, and so make the same schedule: in a round each rank
sends at most one chunk's slots and receives at most one. What is received is compared with the manifest's checksum and
goes where a rank's own slots go, into new files that no commit names. So a transfer that is cut off leaves the commit
as it was, on the disks where it was, and the next start begins anew. The record of the run's first commit in its new
layout decides, and only after that anything is removed ([Note: names never change] in live.py).

A rank that fails tells the others before the next round, so that none waits for what does not come.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.checkpoint.commit import read_tensors, tensors_name, tensors_told
from offload.checkpoint.live import hidden_ranks, listed, machines_named, names_in, ranks_named, where_they_were
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.reader import Reader, page_buffer
from offload.errors import ResumeError
from offload.io.files import Files
from offload.ranks.agreement import all_gather_object, found_by_all, together
from offload.ranks.communicator import Communicator
from offload.sizes import MIB, format_bytes

SAY_S = 15.0
"""How often is said how far a transfer is."""
_TRIED_BYTES = 4 * MIB
"""Sent once to find out how long a transfer takes."""


class Wish(NamedTuple):
    """What a rank needs of what others see.

    Attributes:
        shard: whose file it is in.
        chunk: the number of the chunk.
        nbytes: its bytes.
    """

    shard: int
    chunk: int
    nbytes: int


class Piece(NamedTuple):
    """What is sent in a round, from the rank `source` to the rank `target`."""

    source: int
    target: int
    wish: Wish


class _Told(NamedTuple):
    """What a rank tells the others.

    Attributes:
        host: the name of its machine.
        seen: the shards that it sees.
        wishes: what it needs of the others.
    """

    host: str
    seen: list[int]
    wishes: list[Wish]


def schedule(wishes: Sequence[Sequence[Wish]], seen: Sequence[Collection[int]]) -> list[list[Piece]]:
    """The rounds in which ranks send each other what they need. In each a rank sends and receives at most once.

    Args:
        wishes: what each rank needs, in the order in which it gets them.
        seen: the shards that each rank sees. Each shard that is wished for is seen by one.
    """
    # Who sees a shard takes turns at sending it.
    senders = {
        shard: [rank for rank, those in enumerate(seen) if shard in those]
        for shard in {wish.shard for those in wishes for wish in those}
    }
    left = deque((target, deque(those)) for target, those in enumerate(wishes) if those)
    rounds = []
    while left:
        busy: set[int] = set()
        pieces = []
        for target, those in left:
            able = senders[those[0].shard]
            first = target % len(able)
            source = next((rank for rank in able[first:] + able[:first] if rank not in busy), None)
            if source is not None:
                busy.add(source)
                pieces.append(Piece(source, target, those.popleft()))
        left.rotate(-1)  # who waited for a sender is first next time
        left = deque(one for one in left if one[1])
        rounds.append(pieces)
    return rounds


@dataclass(frozen=True)
class Transfer:
    """The slots of a commit that ranks send each other.

    Attributes:
        comm: the ranks.
        reader: of the commit. It has the files open of which this rank sends slots.
        rounds: what is sent when.
        seen: the shards that this rank sees.
    """

    comm: Communicator
    reader: Reader
    rounds: Sequence[Sequence[Piece]]
    seen: set[int]

    @property
    def nbytes(self) -> int:
        """The bytes that all ranks send together."""
        return sum(piece.wish.nbytes for pieces in self.rounds for piece in pieces)

    @property
    def sent_shards(self) -> set[int]:
        """The shards of which this rank sends slots."""
        return {one.wish.shard for pieces in self.rounds for one in pieces if one.source == self.comm.rank}

    def seconds(self) -> float:
        """How long it will take, as far as one small round tells. All ranks have to call it.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        first = self.rounds[0]
        nbytes = min(_TRIED_BYTES, max(piece.wish.nbytes for piece in first))
        begun = time.monotonic()
        for _ in range(2):  # the first call connects
            begun = time.monotonic()
            exchange(self.comm, first, torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), _empty(nbytes), of=nbytes)
        took = self.comm.all_gather(torch.tensor([time.monotonic() - begun], dtype=torch.float64, device="cpu"))
        most = sum(max(piece.wish.nbytes for piece in pieces) for pieces in self.rounds)
        return float(took.max()) * most / nbytes

    def receive(self, check: Callable[[], None]) -> Iterator[tuple[tuple[int, int], dict[str, Tensor]]]:
        """Sends what others need, and yields what this rank gets. All ranks have to go through all of it.

        Args:
            check: a collective, called before each round; raises if another rank has failed.

        Yields:
            (shard, chunk), and the states of that chunk as `Reader.slots` yields them.

        Raises:
            CorruptionError: what was read or received is damaged.
            TierIOError: a disk or its file system failed.
            OtherRankError: another rank failed.
            RankError: another rank failed, or cannot be reached.
        """
        largest = [0, 0]
        for pieces in self.rounds:
            largest = [max(nbytes, self._in(pieces, end)) for end, nbytes in enumerate(largest)]
        sent, received = map(page_buffer, largest)
        progress = _Progress(self)
        for pieces in self.rounds:
            for piece in pieces:
                if piece.source == self.comm.rank:
                    self.reader.read_whole(piece.wish.shard, piece.wish.chunk, sent[: piece.wish.nbytes])
            check()
            exchange(self.comm, pieces, sent, received)
            progress.advance(pieces)
            for piece in pieces:
                if piece.target == self.comm.rank:
                    at = piece.wish.shard, piece.wish.chunk
                    yield at, self.reader.states_in(*at, received[: piece.wish.nbytes])

    def _in(self, pieces: Sequence[Piece], end: int) -> int:
        """The bytes that this rank sends (`end` is 0) or receives (1) in a round."""
        return sum(piece.wish.nbytes for piece in pieces if piece[end] == self.comm.rank)


def exchange(
    comm: Communicator, pieces: Sequence[Piece], sent: Tensor, received: Tensor, *, of: int | None = None
) -> None:
    """Does one round.

    Args:
        comm: the ranks.
        pieces: the round.
        sent: begins with what this rank sends in it.
        received: gets what this rank receives, at its beginning.
        of: how many bytes of each piece are sent; None: all.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    target = source = comm.rank
    ends = [0, 0]
    for piece in pieces:
        nbytes = piece.wish.nbytes if of is None else of
        if piece.source == comm.rank:
            target, ends[0] = piece.target, nbytes
        if piece.target == comm.rank:
            source, ends[1] = piece.source, nbytes
    comm.exchange(sent[: ends[0]], target, received[: ends[1]], source)


def _empty(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class _Progress:
    """Says on the first rank how far a transfer is."""

    def __init__(self, transfer: Transfer) -> None:
        self._whole = transfer.nbytes
        self._tells = transfer.comm.user_rank == 0
        self._done = 0
        self._begun = self._said = time.monotonic()

    def advance(self, pieces: Sequence[Piece]) -> None:
        self._done += sum(piece.wish.nbytes for piece in pieces)
        now = time.monotonic()
        if self._tells and now > self._said + SAY_S:
            self._said = now
            left_s = (now - self._begun) * (self._whole - self._done) / self._done
            say(f"sent {format_bytes(self._done)} of {format_bytes(self._whole)}, about {left_s:.0f} s left")


def say(line: str) -> None:
    """Says something on stderr."""
    with suppress(OSError, ValueError):  # a closed stderr is no reason to fail
        print(f"offload: {line}", file=sys.stderr, flush=True)


def plan_together(
    reader: Reader,
    wanted: Sequence[tuple[int, int]],
    comm: Communicator,
    files: Files,
    *,
    sends: bool,
) -> Transfer | None:
    """How the ranks get the slots of a commit that they do not see. Changes no file.

    Args:
        reader: of the commit, with the manifests of all ranks.
        wanted: the chunks that this rank needs, as (shard, chunk).
        comm: the ranks.
        files: the file system.
        sends: whether slots may be sent, as `resume_transfer` says.

    Returns:
        None if each rank sees what it needs.

    Raises:
        ResumeError: no rank sees the files of a shard, or slots may not be sent.
        PathError: a file or directory cannot be read.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    if comm.size == 1:
        return None  # the files that are missing are named where they are to be opened
    with together(comm):
        hidden = hidden_ranks(reader.paths, reader.manifests, files, {shard for shard, _ in wanted})
    far = [Wish(shard, chunk, reader.nbytes_of(shard, chunk)) for shard, chunk in wanted if shard in hidden]
    if not comm.all_reduce_any(bool(far)):
        return None

    def look() -> _Told:
        every = range(len(reader.manifests))
        seen = {*every} - hidden_ranks(reader.paths, reader.manifests, files, every)
        return _Told(files.host().name, sorted(seen), far)

    told = found_by_all(comm, look, _Told)
    seen, commit = {*told[comm.rank].seen}, reader.commit
    found = {shard for one in told for shard in one.seen}
    lost = sorted({wish.shard for one in told for wish in one.wishes} - found)
    if lost:
        raise ResumeError(
            f"no rank sees the swap files of {ranks_named(lost)} of the {len(commit.manifests)} that committed step "
            f"{commit.step}{where_they_were(commit, lost)}; they were looked for in {listed(reader.paths)}"
            f"{machines_named([one.host for one in told])}: start on the machines that have them, or resume from a "
            "snapshot"
        )
    transfer = Transfer(comm, reader, schedule([one.wishes for one in told], [{*one.seen} for one in told]), seen)
    seconds, size = transfer.seconds(), format_bytes(transfer.nbytes)
    if not sends:
        rank, needs = next((rank, one) for rank, one in zip(comm.user_ranks, told, strict=True) if one.wishes)
        those = sorted({wish.shard for wish in needs.wishes})
        what = f"{ranks_named(those)} of the {len(commit.manifests)} that committed{where_they_were(commit, those)}"
        raise ResumeError(
            f"{size} of slots of step {commit.step} lie where the ranks that need them do not see them: rank {rank} on "
            f"{needs.host} needs slots of {what}. Give "
            f"resume_transfer=True to have them sent, which takes about {max(seconds, 1):.0f} s; or start as many "
            "ranks as committed, on the machines where they ran, in the same layout (stage, chunks, directories); or "
            "copy all directories to a file system that every rank sees"
        )
    if comm.user_rank == 0:
        say(f"{size} of slots are sent to the ranks that need them, which takes about {max(seconds, 1):.0f} s")
    return transfer


def tensors_together(
    manifest: Manifest, directories: Sequence[Path], comm: Communicator, files: Files
) -> dict[str, Tensor]:
    """The tensors of what a commit carries for each rank. Those that only other ranks see are sent.

    Args:
        manifest: that of whose extra this rank gets.
        directories: where this rank looks.
        comm: the ranks.
        files: the file system.

    Raises:
        ResumeError: no rank sees them.
        CorruptionError: what was read is damaged.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    name, digest = tensors_name(manifest, manifest.rank), manifest.tensors
    with together(comm):
        at = {place / one for place in directories for one in names_in(place, files)}
        here = next((path.parent for path in at if path.name == name), None)
    far = [] if digest is None or here is not None else [Wish(manifest.rank, 0, digest.size)]
    data = None
    if comm.all_reduce_any(bool(far)):
        names = {tensors_name(manifest, rank): rank for rank in range(manifest.world)}
        lying = {names[path.name]: path for path in at if path.name in names}
        told = all_gather_object(comm, _Told(files.host().name, sorted(lying), far), _Told)
        wishes, seen = [one.wishes for one in told], [{*one.seen} for one in told]
        if lost := sorted({wish.shard for one in wishes for wish in one} - {shard for one in seen for shard in one}):
            raise ResumeError(
                f"no rank sees {tensors_name(manifest, lost[0])}, the tensors that the commit of step {manifest.step} "
                "carries for a rank: start on the machine that has it, or resume from a snapshot"
            )
        for pieces in schedule(wishes, seen):
            sent, received = _empty(0), _empty(far[0].nbytes if far else 0)
            with together(comm):
                for piece in pieces:
                    if piece.source == comm.rank:
                        sent = torch.frombuffer(
                            bytearray(files.read(lying[piece.wish.shard], piece.wish.nbytes)[: piece.wish.nbytes]),
                            dtype=torch.uint8,
                        )
            exchange(comm, pieces, sent, received)
            if any(piece.target == comm.rank for piece in pieces):
                data = received.numpy().tobytes()
    with together(comm):
        if digest is None:
            return {}
        if data is not None:
            return tensors_told(data, manifest)
        assert here is not None
        return read_tensors(here, manifest, files)
