"""What Python takes for a tile and for a chunk: what is put into the way of each of them is in what is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload import build
from offload.cli import host_costs
from offload.io.engine import QueuedEngine
from offload.layout import Chunk
from offload.model.fetch import StreamedUnits
from offload.native.pool import LibraryPool
from offload.optim.new_params import InPlace
from offload.optim.step import Step
from tests.support.processes import open_files, own_threads

DELAY_S = 1e-2


def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY_S)
        return call(*args, **kwargs)

    return late


def costs(measure: host_costs.Seconds, least: float, most: float) -> bool:
    """Whether a median of three rounds is between so many DELAY_S, at the third try at the latest: where many tests run
    at once, two rounds of three may have something else beside them."""
    medians = (statistics.median(measure() for _ in range(3)) for _ in range(3))
    return any(least * DELAY_S < median < most * DELAY_S for median in medians)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs, "TILES", 16)
    monkeypatch.setattr(host_costs, "CHUNKS", 32)
    monkeypatch.setattr(host_costs, "LARGE_CHUNKS", 16)
    monkeypatch.setattr(host_costs, "PAGES", 8)


def test_what_a_tile_takes_is_that_of_a_forward_or_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward of a tile waits, no backward does: half of the wait counts."""
    monkeypatch.setattr(StreamedUnits, "forward_begins", delayed(StreamedUnits.forward_begins))
    with host_costs.tiles() as measure:
        measure()
        assert costs(measure, 0.45, 0.95)


def test_what_a_chunk_takes_is_that_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files(), own_threads()
    monkeypatch.setattr(Step, "_run", delayed(Step._run))
    with host_costs.chunks(tmp_path) as measure:
        measure()
        assert costs(measure, 0.9, 1.8)
    assert (list(tmp_path.iterdir()), open_files(), own_threads()) == ([], *before)


def test_what_a_chunk_in_ram_takes_is_that_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "_run", delayed(Step._run))
    with host_costs.resident_chunks() as measure:
        measure()
        assert costs(measure, 0.9, 1.8)


def test_what_a_chunk_takes_has_the_wait_for_the_kernels_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread steps a page, so that nobody waits for others; yet a step of such a chunk is not of one page."""
    monkeypatch.setattr(build, "kernel_threads", lambda *args, **kwargs: 2)
    run = LibraryPool._run

    def late(self: LibraryPool, group: Any, address: int | None, *others: object) -> None:
        time.sleep(DELAY_S if address is None else 0.0)
        run(self, group, address, *others)

    monkeypatch.setattr(LibraryPool, "_run", late)
    with host_costs.resident_chunks() as alone, host_costs.chunks(tmp_path) as measure:
        for one in (alone, measure):
            one()
            assert costs(one, 0.9, 1.8)


def test_the_delay_of_a_transfer_is_that_of_a_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files(), own_threads()
    monkeypatch.setattr(QueuedEngine, "submit", delayed(QueuedEngine.submit))
    with host_costs.delays(tmp_path, "threads") as measure:
        assert costs(measure, 0.9, 1.8)
    assert (list(tmp_path.iterdir()), open_files(), own_threads()) == ([], *before)


def test_what_a_chunk_of_parameters_takes_is_that_of_each_way_that_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once and written once in an iteration, and only what writes it waits: half of the wait counts."""
    before = open_files(), own_threads()
    lend = InPlace.target

    def target(self: InPlace, chunk: Chunk, **options: Any) -> Any:
        time.sleep(0.0 if self.lends_several(chunk) else DELAY_S)
        return lend(self, chunk, **options)

    monkeypatch.setattr(InPlace, "target", target)
    with host_costs.moved_chunks(tmp_path) as measure:
        measure()
        assert costs(measure, 0.45, 0.95)
    assert (list(tmp_path.iterdir()), open_files(), own_threads()) == ([], *before)


def test_a_difference_that_is_none_is_a_cost_that_can_be_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs._Held, "passes_s", lambda self: 1.0)
    with host_costs.tiles() as measure:
        assert measure() == pytest.approx(host_costs.LEAST_S)
