from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from offload.errors import ConfigError, OtherRankError, TierIOError
from offload.ranks import agreement
from offload.ranks.agreement import all_gather_shards, found_by_all, together, while_others_wait
from offload.ranks.communicator import Communicator, SingleProcess
from tests.support.runs import layout_of
from tests.support.threads import Threads


def done_by(
    failing: dict[int, Exception], result: str = "", final: int | None = None, ranks_on_node: int = 3
) -> list[BaseException | None]:
    """What three ranks do together raises on each of them."""

    def work(comm: Communicator) -> BaseException | None:
        comm.ranks_on_node = ranks_on_node
        try:
            with together(comm, result, lambda: comm.rank == final):
                if comm.rank in failing:
                    raise failing[comm.rank]
        except Exception as error:
            return error
        return None

    return Threads(3).run(work)


def test_what_succeeds_everywhere_raises_nothing() -> None:
    assert done_by({}) == [None, None, None]


def test_the_others_hear_what_the_one_that_failed_says() -> None:
    fault = ConfigError("layers.0.weight is sparse")
    first, second, third = done_by({1: fault}, "; nothing was changed")
    assert second is fault
    for other in (first, third):
        assert isinstance(other, OtherRankError)
        assert str(other) == "rank 1: ConfigError: layers.0.weight is sparse; nothing was changed"
        assert not other.is_final


def test_the_others_hear_on_which_machine_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "alpha")
    first, second, _ = done_by({0: ConfigError("a")}, ranks_on_node=1)
    assert str(first) == "a"
    assert str(second) == "rank 0 on alpha: ConfigError: a"


def test_what_an_error_says_may_hold_what_utf_8_cannot() -> None:
    fault = ConfigError("a\ud800b")
    first, second, _ = done_by({0: fault})
    assert first is fault
    assert str(second) == "rank 0: ConfigError: a\\ud800b"


def test_of_several_failures_the_others_hear_the_first_and_how_many_more() -> None:
    faults = {0: ConfigError("a"), 2: ConfigError("b")}
    first, second, third = done_by(faults)
    assert (first, third) == (faults[0], faults[2])
    assert str(second) == "rank 0: ConfigError: a (1 more failed)"


def test_what_is_final_on_one_is_final_on_all() -> None:
    fault = TierIOError("sync", 5, "/a", 0, 0, "failed")
    first, second, _ = done_by({0: fault}, final=0)
    assert first is fault
    assert isinstance(second, OtherRankError)
    assert second.is_final


def found_on_three(values: Mapping[int, object], failing: Mapping[int, Exception]) -> list[object]:
    """What three ranks find, or raise, when each looks for its own."""

    def work(comm: Communicator) -> object:
        def find() -> object:
            if comm.rank in failing:
                raise failing[comm.rank]
            return values[comm.rank]

        try:
            return found_by_all(comm, find)
        except Exception as error:
            return error

    return Threads(3).run(work)


@pytest.mark.parametrize("numel", [0, 1015, 1016, 1017, 5000])
def test_what_each_rank_finds_is_known_to_all(numel: int) -> None:
    """Also where one finds more than travels in one collective."""
    values = {0: None, 1: ["a" * numel, {"b": 1.5}], 2: False}
    assert found_on_three(values, {}) == [[*values.values()]] * 3


@pytest.mark.parametrize("numel", [1, 5000])
def test_if_one_rank_finds_nothing_the_others_hear_why(numel: int) -> None:
    faults = {0: ConfigError("x" * numel), 2: ConfigError("b")}
    first, second, third = found_on_three({1: "a" * numel}, faults)
    assert (first, third) == (faults[0], faults[2])
    assert isinstance(second, OtherRankError)
    assert str(second) == f"rank 0: ConfigError: {'x' * numel} (1 more failed)"


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_wait_long_say_why_and_hear_how_it_ends(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agreement, "TOLD_AFTER_S", -1.0)

    def work(comm: Communicator) -> BaseException | None:
        try:
            with while_others_wait(comm, "others count") as goes_on:
                for _ in range(0 if comm.rank == 1 else 4 + comm.rank):
                    goes_on()
                if fails and comm.rank == 2:
                    raise ConfigError("no number follows")
        except Exception as error:
            return error
        return None

    first, second, third = Threads(3).run(work)
    said = capsys.readouterr().err.splitlines()
    assert "offload: rank 1 waits: others count" in said
    assert len(set(said)) == len(said)
    if fails:
        assert type(third) is ConfigError
        assert [str(one) for one in (first, second)] == ["rank 2: ConfigError: no number follows"] * 2
    else:
        assert (first, second, third) == (None, None, None)


def test_a_process_alone_raises_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^own$"), together(SingleProcess()):
        raise ConfigError("own")
    with together(SingleProcess()):
        pass


@pytest.mark.parametrize("block", [4, 9, 1 << 20])
def test_several_values_of_each_element_are_gathered_at_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its shard, whose borders do not fall together with those of a block."""
    numel = 501
    monkeypatch.setattr(agreement, "BLOCK", block)

    def work(comm: Communicator) -> list[torch.Tensor]:
        layout = layout_of([3, numel], ranks=3, rank=comm.rank, chunk_numel=64)
        first, last = layout.param_shard_range(1)
        views = [torch.full((numel,), torch.nan) for _ in range(3)]
        for kind, view in enumerate(views):
            view[first:last] = torch.arange(first, last) + 1000.0 * kind
        all_gather_shards(comm, layout, 1, views)
        return views

    for views in Threads(3).run(work):
        for kind, view in enumerate(views):
            assert np.array_equal(view.numpy(), np.arange(numel, dtype=np.float32) + 1000 * kind)
