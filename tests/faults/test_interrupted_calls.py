"""Ctrl-C at any instruction of a fetch, of `close()`, and of the swap files under a commit."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from offload import NonFiniteGradientError, OffloadError, OffloadZero, ReleasedParameterError, torch_private
from offload.checkpoint.atomic_file import write_temporary
from offload.checkpoint.reader import Reader
from offload.interrupts import give_back, hold
from offload.io.files import Files
from offload.model import fetch, flat_param, torch_helpers, transfer
from offload.model.torch_helpers import call_hidden
from offload.storage import chunk_cache, swap_file
from tests.faults.test_interrupted_steps import CLOSE, FAR_APART, PLACEMENTS, X, build, train
from tests.support import interrupted
from tests.support.interrupted import interrupted_at
from tests.support.run_files import swap_in

pytestmark = pytest.mark.filterwarnings("ignore:module forward hook with")

OF_A_FETCH = tuple(str(module.__file__) for module in (fetch, transfer, flat_param, chunk_cache, swap_file))
Values = dict[str, Tensor]
Case = Callable[[Path, int, Counter[str]], bool]
"""Interrupts at an instruction, in a directory; counts what came of it; returns whether that came too late."""


def values(model: nn.Module, optimizer: OffloadZero) -> Values:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        states = optimizer.state_of(param)
        found |= {f"{name}.{kind}": torch.as_tensor(value).clone() for kind, value in states.items()}
    return found


def uninterrupted(path: Path, steps: int) -> Values:
    model, optimizer = build(path, PLACEMENTS["streamed"])
    with optimizer:
        for _ in range(steps):
            train(model, optimizer)
        return values(model, optimizer)


def descriptors() -> Counter[str]:
    """What this process has open."""
    found = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            name = os.readlink(f"/proc/self/fd/{fd}")
            found[name] += not name.startswith(("pipe:", "socket:", "anon_inode:"))
    return found


def require_same(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def expected(tmp_path: Path) -> list[Values]:
    """By step."""
    return [uninterrupted(tmp_path / f"alone{steps}", steps) for steps in range(4)]


def sweep(case: Case, folder: Path, first: int, apart: int) -> Counter[str]:
    """Interrupts at every so-manieth instruction, until it comes too late."""
    outcomes, instruction, number = Counter[str](), first, 0
    while not case(folder / "run", instruction, outcomes):
        shutil.rmtree(folder / "run", ignore_errors=True)
        number += 1
        instruction += apart
    print(number, "places:", dict(outcomes))
    assert NonFiniteGradientError.__name__ not in outcomes, "a unit was used without its values"
    return outcomes


def fetching(expected: list[Values]) -> Case:
    def case(path: Path, instruction: int, outcomes: Counter[str]) -> bool:
        model, optimizer = build(path, PLACEMENTS["streamed"])
        with suppress(OffloadError), optimizer:
            train(model, optimizer)
            optimizer.commit()
            with suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
                model(X).float().square().sum().backward()
            try:
                if instruction % 2:
                    optimizer.rollback()
                else:
                    optimizer.zero_grad()
                train(model, optimizer)
                found = values(model, optimizer)
            except OffloadError as error:
                outcomes[type(error).__name__] += 1
                return False
            require_same(found, expected[2])
            outcomes["went on"] += 1
            return left[0] > 0
        return False

    return case


def closing(expected: list[Values]) -> Case:
    def case(path: Path, instruction: int, outcomes: Counter[str]) -> bool:
        before = descriptors()
        model, optimizer = build(path, PLACEMENTS["streamed"] | {"commit_every": 2})
        train(model, optimizer)
        optimizer.commit()
        train(model, optimizer)
        with suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
            optimizer.close()
        with suppress(OffloadError):
            optimizer.close()
        for name, param in model.named_parameters():
            try:
                is_here = torch.equal(param, expected[2][name])
            except ReleasedParameterError:
                outcomes["released"] += 1
                continue
            assert is_here, name
        again, resumed = build(path, PLACEMENTS["streamed"] | {"resume": True})
        assert resumed.resumed is not None
        with resumed:
            require_same(values(again, resumed), expected[resumed.resumed.step])
        outcomes[f"step {resumed.resumed.step}"] += 1
        assert not descriptors() - before
        return left[0] > 0

    return case


def committing(expected: list[Values]) -> Case:
    def case(path: Path, instruction: int, outcomes: Counter[str]) -> bool:
        model, optimizer = build(path, PLACEMENTS["streamed"])
        with suppress(OffloadError), optimizer:
            train(model, optimizer)
            optimizer.commit()
            train(model, optimizer)
            with suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
                optimizer.commit()
            try:
                if instruction % 2:
                    optimizer.rollback()
                train(model, optimizer)
                found, step = values(model, optimizer), optimizer.stats()["step"]
                require_same(found, expected[step])
                outcomes["went on"] += 1
            except OffloadError as error:
                outcomes[type(error).__name__] += 1
        with Reader([path]) as reader:
            for row in reader.tensors():
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    wanted = expected[reader.commit.step][f"{row.facts.name}.{kind}"]
                    assert torch.equal(reader.read(row.facts.name, kind), wanted)
        return left[0] > 0

    return case


SWEEPS: dict[str, tuple[Any, tuple[str, ...], int]] = {
    "a fetch": (fetching, OF_A_FETCH, FAR_APART),
    "close": (closing, interrupted.FILES, FAR_APART),
    "the swap files of a commit": (committing, (str(swap_file.__file__),), CLOSE),
}
"""What is interrupted, in which files, and how many places are between interrupts in the short form."""


@pytest.mark.parametrize("what", SWEEPS)
def test_an_interrupted_call_leaves_what_was_or_says_so(
    what: str, tmp_path: Path, expected: list[Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, files, apart = SWEEPS[what]
    monkeypatch.setattr(interrupted, "FILES", files)
    assert sweep(case(expected), tmp_path, 1, apart).total() > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", SWEEPS)
@pytest.mark.parametrize("share", range(4))
def test_an_interrupted_call_leaves_what_was_or_says_so_at_any_instruction(
    what: str, share: int, tmp_path: Path, expected: list[Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, files, apart = SWEEPS[what]
    monkeypatch.setattr(interrupted, "FILES", files)
    sweep(case(expected), tmp_path, 1 + share, 4 if apart == CLOSE else 4 * CLOSE)


def at_every_place(
    work: Callable[[], object],
    by: Callable[[], None] = interrupted.interrupt,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Interrupts `work` at each place, and checks each time while the interrupt is handled.

    Returns:
        How many places there are.
    """
    place, is_over = 0, False
    while not is_over:
        place += 1
        try:
            with interrupted_at(place, by) as left:
                work()
                is_over = True
        except KeyboardInterrupt:  # its traceback keeps the frames, and what the generators in them have entered
            check()
    check()
    assert left[0] > 0
    return place - 1


def test_an_interrupt_leaves_no_file_open_that_nobody_knows(tmp_path: Path) -> None:
    """Nor a lock, which would last as long as the process."""
    model, optimizer = build(tmp_path / "run", PLACEMENTS["nvme"])
    with optimizer:
        train(model, optimizer)
        optimizer.commit()
    swap, files = swap_in(tmp_path / "run"), Files()

    def hold() -> None:
        held = Files()
        held.hold(tmp_path)
        held.let_go()

    def write() -> None:
        write_temporary(files, tmp_path / "new", [b"1"])

    def copy() -> None:
        files.remove(tmp_path / "copy")
        made = files.create(tmp_path / "copy")
        try:
            files.copy(swap, made, 0, 4096)
        finally:
            files.close(made)

    works: list[Callable[[], object]] = [
        lambda: files.read(swap, 10),
        lambda: files.names(tmp_path),
        lambda: files.space(tmp_path),
        lambda: files.sync_directory(tmp_path),
        lambda: swap_file.CommittedFile(swap).close(),
        lambda: swap_file.open_locked(swap, files).close(),
        hold,
        write,
        copy,
    ]
    before = descriptors()
    for work in works:
        assert at_every_place(work) > 3
        assert not descriptors() - before
    swap_file.CommittedFile(swap, exclusive=True).close()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Noticing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def what_is_on() -> tuple[object, ...]:
    """All that `call_hidden` turns off or takes away."""
    return (
        torch._C._is_torch_function_enabled(),
        torch._C._is_torch_function_all_disabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch_private.functorch_level() is None,
        torch_private.tracing_state(),
    )


def in_a_context(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[[], None]], None]:
    def call(work: Callable[[], None]) -> None:
        with context():
            work()

    return call


def in_a_transform(work: Callable[[], None]) -> None:
    def inside(x: Tensor) -> Tensor:
        work()
        return x.sum()

    torch.func.grad(inside)(torch.ones(3))


def in_a_trace(work: Callable[[], None]) -> None:
    def inside(x: Tensor) -> Tensor:
        work()
        return x + 1

    torch.jit.trace(inside, (torch.ones(3),), check_trace=False)


IN_C = {
    "a function mode": in_a_context(Noticing),
    "inference": in_a_context(torch.inference_mode),
    "a trace": in_a_trace,
}
IN_PYTHON = {"a dispatch mode": in_a_context(Watching), "a transform": in_a_transform}
"""Torch takes these away in Python: what another thread throws in there cannot be helped."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("within", "by"),
    [
        *((one, interrupted.interrupt) for one in (IN_C | IN_PYTHON).values()),
        *((one, interrupted.thrown_in) for one in IN_C.values()),
    ],
    ids=[*IN_C, *IN_PYTHON, *(f"{name}, thrown in" for name in IN_C)],
)
def test_an_interrupt_leaves_nothing_off_that_was_hidden_from(
    within: Callable[[Callable[[], None]], None], by: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes, transforms and torch functions are as they were when the interrupt arrives in the user's code."""
    monkeypatch.setattr(interrupted, "FILES", (str(torch_helpers.__file__), str(contextlib.__file__)))
    places = []

    def work() -> None:
        before = what_is_on()

        def check() -> None:
            assert what_is_on() == before

        places.append(at_every_place(lambda: call_hidden(torch.zeros, 3), by, check))

    hold()
    try:
        within(work)
    finally:
        give_back()
    assert places[0] > 3


def test_another_close_ends_what_an_interrupted_one_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(tmp_path / "run", PLACEMENTS["nvme"])
    train(model, optimizer)
    optimizer.commit()

    def interrupt() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer._undo, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    optimizer.close()
    build(tmp_path / "run", PLACEMENTS["nvme"] | {"resume": True})[1].close()
