from __future__ import annotations

import pytest

from offload.errors import ConfigError, OtherRankError, TierIOError
from offload.ranks.agreement import together
from offload.ranks.communicator import Communicator, SingleProcess
from tests.support.threads import Threads


def done_by(failing: dict[int, Exception], result: str = "", final: int | None = None) -> list[BaseException | None]:
    """What three ranks do together raises on each of them."""

    def work(comm: Communicator) -> BaseException | None:
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


def test_a_process_alone_raises_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^own$"), together(SingleProcess()):
        raise ConfigError("own")
    with together(SingleProcess()):
        pass
