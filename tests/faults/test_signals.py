"""Handlers of any signal that raise, installed before the optimizer was made or after: the user's exception comes once,
and training goes on with the bits of a run that was never interrupted."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import InterruptedStepError, OffloadZero, Tuning
from offload.checkpoint.reader import Reader
from tests.faults.test_interrupted_calls import Values, require_same, values
from tests.faults.test_interrupted_steps import train
from tests.support.cases import each_value_often
from tests.support.interrupted import by_signal, interrupted_at, timeout_thrown_in

pytestmark = pytest.mark.filterwarnings("ignore:module forward hook with")

NUMBERS = (signal.SIGALRM, signal.SIGUSR1, signal.SIGHUP)
WHENS = ("before", "after", "in the forward")
"""When the handler is installed. Until then the signal is ignored."""
STEPS = 5
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu"},
    "nvme": {"tier": "nvme", "cpu_memory": "76KiB"},
    "streamed": {"tier": "nvme", "param_tier": "nvme", "cpu_memory": "100KiB"},
}
"""With so little memory all chunks move between RAM and disk in each step."""


class OutOfTimeError(TimeoutError):
    """The user's own. Like every TimeoutError it is an OSError."""


class Installing(nn.Linear):
    """Its forward installs a handler, as a timeout around a part of a model does."""

    install: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        self.install()
        return super().forward(x)


def build(path: Path, placement: str) -> tuple[nn.Sequential, OffloadZero]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), Installing(4, 4), nn.Linear(4, 2))
    options = PLACEMENTS[placement]
    if options["tier"] == "nvme":
        options = {"path": path, "commit_every": 0} | options
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, OffloadZero(model, plain, tuning=Tuning(chunk="4KiB", threads=1), **options)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def uninterrupted(path: Path, placement: str) -> list[Values]:
    """By step."""
    model, optimizer = build(path, placement)
    with optimizer:
        found = [values(model, optimizer)]
        for _ in range(STEPS):
            train(model, optimizer)
            found.append(values(model, optimizer))
    return found


class Run:
    """A training of which one call is interrupted. Args: when: the handler is installed: before the construction, after
    it when the call begins, or in the model's forward."""

    def __init__(self, path: Path, placement: str, number: signal.Signals, when: str) -> None:
        self._path, self._placement, self._number, self._when = path, placement, number, when
        self._commits = PLACEMENTS[placement]["tier"] == "nvme"
        self.called = self.raised = 0

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self.called += 1
        raise OutOfTimeError("out of time")

    def _install(self) -> None:
        signal.signal(self._number, self._handler)

    def interrupted(self, what: str, place: int, expected: list[Values], by: Callable[[], None] | None = None) -> str:
        """Returns: what came of it; "" if the place is behind the end. Args: by: None: the signal."""
        number, self._is_thrown = self._number, by is not None
        signal.signal(number, signal.SIG_IGN)
        if self._when == "before":
            self._install()
        model, optimizer = build(self._path, self._placement)
        with optimizer:
            train(model, optimizer)
            if self._commits:
                optimizer.commit()
            if what == "commit":
                train(model, optimizer)
            if self._when == "after":
                self._install()
            if self._when == "in the forward":
                model[2].install = self._install
            with interrupted_at(place, by or by_signal(number)) as left:
                self._call(optimizer.commit if what == "commit" else lambda: train(model, optimizer))
            if left[0] > 0:
                assert not self.called
                return ""
            outcome = self._goes_on(model, optimizer, expected)
            if self._is_thrown:
                assert self.raised <= 1
                return outcome
            assert self.raised == self.called <= 1, "the exception of the handler comes once"
            if not self.called:
                assert self._when == "in the forward"
                outcome = "was ignored"
        if self._commits:
            self._require_committed(expected)
        return outcome

    def _call(self, work: Callable[[], object]) -> None:
        try:
            work()
        except TimeoutError:
            self.raised += 1
        except InterruptedStepError:
            assert self._is_thrown

    def _goes_on(self, model: nn.Module, optimizer: OffloadZero, expected: list[Values]) -> str:
        outcome = "went on"
        # What came at the end of an `__enter__` is raised by the next marked call.
        self._call(optimizer.zero_grad)
        try:
            train(model, optimizer)
            found = values(model, optimizer)
        except InterruptedStepError as error:
            said = str(error)
            if "new OffloadZero" in said and not self._commits:
                return "a new one"
            if "rollback()" not in said or not self._commits:
                raise
            optimizer.rollback()
            train(model, optimizer)
            found, outcome = values(model, optimizer), "rolled back"
        require_same(found, expected[optimizer.stats()["step"]])
        return outcome

    def _require_committed(self, expected: list[Values]) -> None:
        with Reader([self._path]) as reader:
            for row in reader.tensors():
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    wanted = expected[reader.commit.step][f"{row.facts.name}.{kind}"]
                    assert torch.equal(reader.read(row.facts.name, kind), wanted)


def sweep(
    folder: Path,
    placement: str,
    what: str,
    when: str,
    first: int,
    apart: int,
    number: signal.Signals = signal.SIGALRM,
    by: Callable[[], None] | None = None,
) -> Counter[str]:
    """Signals at every so-manieth place, until it is behind the end. Args: by: comes instead; None: the signal."""
    expected = uninterrupted(folder / "alone", placement)
    outcomes, place = Counter[str](), first
    try:
        while outcome := Run(folder / "run", placement, number, when).interrupted(what, place, expected, by):
            outcomes[outcome] += 1
            shutil.rmtree(folder / "run", ignore_errors=True)
            place += apart
    except BaseException as error:
        error.add_note(f"at place {place} of {what}, {placement}, {number.name} installed {when}")
        raise
    print(f"{what}, {placement}, {number.name} installed {when}: {place} places,", dict(outcomes))
    return outcomes


STEPPED = [(placement, "step", when) for placement in PLACEMENTS for when in WHENS]
COMMITTED = [(placement, "commit", when) for placement in ("nvme", "streamed") for when in WHENS[:2]]


@pytest.mark.parametrize(("placement", "what", "when"), each_value_often(STEPPED + COMMITTED))
def test_a_handler_that_raises_is_heard_once_and_changes_nothing(
    placement: str, what: str, when: str, tmp_path: Path
) -> None:
    assert sweep(tmp_path, placement, what, when, 7, 997).total() > 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize(("placement", "what", "when"), STEPPED + COMMITTED)
def test_a_handler_that_raises_at_any_place(placement: str, what: str, when: str, share: int, tmp_path: Path) -> None:
    sweep(tmp_path, placement, what, when, 1 + share, 4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", NUMBERS[1:])
@pytest.mark.parametrize(("placement", "what", "when"), STEPPED + COMMITTED)
def test_signals_of_job_schedulers_at_every_eleventh_place(
    placement: str, what: str, when: str, number: signal.Signals, tmp_path: Path
) -> None:
    sweep(tmp_path, placement, what, when, 1, 11, number)


THROWN = [(placement, "step") for placement in PLACEMENTS] + [("nvme", "commit"), ("streamed", "commit")]


@pytest.mark.parametrize(("placement", "what"), each_value_often(THROWN))
def test_what_another_thread_throws_in_is_no_error_of_the_disk_and_rollback_goes_on(
    placement: str, what: str, tmp_path: Path
) -> None:
    assert sweep(tmp_path, placement, what, "before", 7, 997, by=timeout_thrown_in).total() > 1


@pytest.mark.parametrize("change", ["_make_changes", "_consume"])
def test_what_is_thrown_in_between_two_changes_of_a_step_ends_the_run(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few instructions lie there that places far apart seldom meet them."""
    model, optimizer = build(tmp_path, "cpu")
    with optimizer:
        train(model, optimizer)
        with monkeypatch.context() as patched:
            patched.setattr(optimizer, change, lambda *_: timeout_thrown_in())
            with pytest.raises(TimeoutError, match="thrown in"):
                train(model, optimizer)
        with pytest.raises(InterruptedStepError):
            optimizer.step()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("placement", "what"), THROWN)
def test_what_another_thread_throws_in_at_every_eleventh_place(placement: str, what: str, tmp_path: Path) -> None:
    sweep(tmp_path, placement, what, "before", 1, 11, by=timeout_thrown_in)
