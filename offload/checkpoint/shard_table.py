"""Which rank takes which shard of a commit: those whose files its machine has.

[Note: ranks that move]
The number in a file's name is that of a shard. With disks of its own a machine keeps its shards, also where the
launcher gives it other ranks at the next start. So ranks look which shards lie in their directories before anything is
planned. Where a rank does not see the shard of its own number, all of them agree on a table:

1. A rank that sees the shard of its own number takes it.
2. The others take one that they see, in ascending order. If one finds none left, those before it change theirs where
   that helps.
3. What nobody sees any more goes to the ranks that are left; then recovery.py refuses the resume, or
   transfer.py brings it.

From then on the communicator counts ranks by their shards ([Note: the numbers of ranks] in ranks/communicator.py). So
files are used where they lie, and nothing is sent. What is attached goes by rank: a manifest says in `user_ranks` whose
states it carries, if that is not the rank of its own number.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from offload.checkpoint.live import manifests_in, names_in, ranks_in
from offload.checkpoint.recovery import look_together, meet, target_of
from offload.choices import CommitChoice
from offload.errors import OffloadError, RankError
from offload.io.files import Files
from offload.ranks.agreement import found_by_all, together
from offload.ranks.communicator import Communicator, is_in_order
from offload.storage.directories import file_name


def in_order_of_shards(comm: Communicator, choice: CommitChoice, files: Files) -> Communicator:
    """The communicator of a run that resumes what its directories hold; see [Note: ranks that move].

    Changes no file. If the directories cannot be resumed it returns `comm`, and recovery.py says why.

    Args:
        comm: the ranks, as they were connected.
        choice: the directories and what to resume; the rest is not used.
        files: the file system.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    if comm.everyone is not comm or comm.size == 1 or not comm.all_reduce_any(_lacks_own(comm, choice, files)):
        return comm
    seen: list[list[int]] = []
    try:
        seen = _seen_together(comm, choice, files)
    except OffloadError as error:
        if isinstance(error, RankError):
            raise
    user_ranks = order_of(table_of(seen)) if seen else range(comm.size)
    if is_in_order(user_ranks):
        return comm
    return comm.in_order(user_ranks) or comm


def table_of(seen: Sequence[Collection[int]]) -> list[int]:
    """The shard of each rank, each shard once; see [Note: ranks that move].

    Args:
        seen: the shards that each rank sees.
    """
    ranks = range(len(seen))
    holders = {rank: rank for rank in ranks if rank in seen[rank]}  # by shard
    left = [rank for rank in ranks if rank not in seen[rank]]
    for rank in left:
        free = next((shard for shard in sorted(seen[rank]) if shard not in holders), None)
        if free is not None:
            holders[free] = rank
        else:
            _exchange(rank, seen, holders, set())
    taken = {rank: shard for shard, rank in holders.items()}
    free_shards = iter([shard for shard in ranks if shard not in holders])
    return [taken[rank] if rank in taken else next(free_shards) for rank in ranks]


def _exchange(rank: int, seen: Sequence[Collection[int]], holders: dict[int, int], tried: set[int]) -> bool:
    """Finds a shard for a rank, for which others may take another one of those that they see."""
    for shard in sorted(seen[rank]):
        if shard not in tried:
            tried.add(shard)
            if shard not in holders or _exchange(holders[shard], seen, holders, tried):
                holders[shard] = rank
                return True
    return False


def order_of(table: Sequence[int]) -> list[int]:
    """For each shard the rank that has it, of a table of the shard of each rank."""
    return sorted(range(len(table)), key=table.__getitem__)


def _lacks_own(comm: Communicator, choice: CommitChoice, files: Files) -> bool:
    """Whether this rank's directories have shards of a run, and not that of its own number."""
    shards: dict[str, set[int]] = {}
    with suppress(OffloadError):
        for path in choice.paths + choice.origins:
            for file in map(file_name, names_in(path, files)):
                if file is not None and file.kind == "swap":
                    shards.setdefault(file.run_id, set()).add(file.rank)
    return bool(choice.resume) and any(comm.rank not in those for those in shards.values())


def _seen_together(comm: Communicator, choice: CommitChoice, files: Files) -> list[list[int]]:
    """The shards of the commit to resume that each rank sees; none if another number of ranks committed.

    Raises:
        OffloadError: the directories cannot be resumed.
    """
    directories, _ = meet(choice, comm, files)
    seen = look_together(directories, comm, files)
    with together(comm):
        target = target_of(seen, directories, choice)
    if target is None or len(target.last[1].manifests) != comm.size:
        return []
    commit = target.last[1]

    def look() -> list[int]:
        own = choice.origins if target.is_elsewhere else choice.paths + choice.origins
        lying = manifests_in(own, commit, files)
        return sorted(ranks_in(own, commit, files, lying.keys()))

    return found_by_all(comm, look, list[int])
