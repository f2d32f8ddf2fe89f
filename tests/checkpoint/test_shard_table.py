"""Who takes which shard, and who sends what to whom."""

from __future__ import annotations

import random
from itertools import combinations, permutations, product

import pytest

from offload.checkpoint.shard_table import order_of, table_of
from offload.checkpoint.transfer import Wish, schedule


def most_own(seen: list[set[int]]) -> int:
    """How many ranks can have a shard that they see, by trying all tables."""
    ranks = range(len(seen))
    return max(sum(shard in seen[rank] for rank, shard in enumerate(table)) for table in permutations(ranks))


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_as_many_ranks_as_can_take_a_shard_that_they_see(ranks: int) -> None:
    each = [{*those} for size in range(ranks + 1) for those in combinations(range(ranks), size)]
    for seen in map(list, product(each, repeat=ranks)):
        table = table_of(seen)
        assert sorted(table) == [*range(ranks)]
        assert sum(shard in seen[rank] for rank, shard in enumerate(table)) == most_own(seen)
        assert [order_of(table)[shard] for shard in table] == [*range(ranks)]
        if all(rank in those for rank, those in enumerate(seen)):
            assert table == [*range(ranks)]


def test_ranks_of_a_machine_keep_their_order() -> None:
    """So whole rows of a mesh change places."""
    assert table_of([{4, 5}, {4, 5}, {0, 1}, {0, 1}, {2, 3}, {2, 3}]) == [4, 5, 0, 1, 2, 3]


def test_in_a_round_each_rank_sends_and_receives_at_most_once_and_all_arrives_in_order() -> None:
    chance = random.Random(1)
    for _ in range(200):
        ranks, shards = chance.randint(2, 6), chance.randint(1, 6)
        seen = [{shard for shard in range(shards) if chance.random() < 0.3} for _ in range(ranks)]
        for shard in range(shards):
            seen[chance.randrange(ranks)].add(shard)
        wishes = [
            [Wish(shard, chunk, 1) for shard in range(shards) if shard not in those for chunk in range(3)]
            for those in seen
        ]
        rounds = schedule(wishes, seen)
        for pieces in rounds:
            assert pieces
            for end in range(2):
                assert len({piece[end] for piece in pieces}) == len(pieces)
            assert all(piece.wish.shard in seen[piece.source] for piece in pieces)
        for rank, those in enumerate(wishes):
            assert [piece.wish for pieces in rounds for piece in pieces if piece.target == rank] == those
        assert len(rounds) <= 2 * max([1, *map(len, wishes)]) * ranks
