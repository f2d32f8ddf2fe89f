"""Steps that are tried in backward: the bits of a run whose states are in RAM, whatever comes before `step()`.

Each event is one that a program may bring about between a backward and its step. What it may keep of the trials is
asserted, too: so a key that were too strict would show, as well as one that were not there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import ConfigError, NonFiniteGradientError
from offload.interrupts import wait_for_all
from offload.io.threads import Workers
from offload.layout import Chunk
from offload.model.transfer import UnitTransfers
from offload.native import Task
from offload.optim.chunk_work import ChunkWork
from offload.optim.rule import Progress
from offload.optim.rules.adam import AdamRule
from offload.optim.trials import _Trial, tried_chunks
from offload.planner import least_cpu_memory
from offload.profiling import Timeline
from offload.storage.cached_chunk import CachedChunk
from offload.storage.chunk_cache import Store
from offload.storage.slot_map import ChunkKind
from tests.optim.test_methods import Averaged
from tests.support import tried
from tests.support.cases import often, products
from tests.support.device import DEVICE
from tests.support.late_copier import CopiedBy, HeldCopier, LateCopier
from tests.support.runs import layout_of
from tests.support.training import LossScale, train

STEPS = 4
AT = 2
"""The step before which the event comes."""
WIDTH = 64
STREAMED_ONLY = ("param_tier", "grad_tier", "cpu_memory")
"""Options of loops whose states are on NVMe."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried.at_once(monkeypatch)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    tried.always(monkeypatch)


Rule = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Loop:
    """A training loop, and what it has seen.

    Args: where: "nvme", with trials, "nvme without", or "cpu"; rule: an optimizer, from its groups; None: AdamW;
    is_late: whether what comes after a backward may come before its last gradients and trials do; split: whether
    masters are split on NVMe; chunk, width, tile: of a chunk in bytes, of each layer, and of a layer's tiles in bytes.
    """

    def __init__(
        self,
        where: str,
        path: Path,
        *,
        rule: Rule | None = None,
        is_late: bool = False,
        split: bool = False,
        chunk: str = "4KiB",
        width: int = WIDTH,
        tile: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self._is_late, self._width = is_late, width
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(5))).to(DEVICE)
        biases = [p for p in self.model.parameters() if p.dim() == 1]
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        groups = [{"params": matrices}, {"params": biases, "lr": 1e-3, "weight_decay": 0.0}]
        plain = torch.optim.AdamW(groups, lr=1e-2) if rule is None else rule(groups)
        where, _, without = where.partition(" ")
        tries, splits = where == "nvme" and not without, split and where == "nvme"
        tuning = Tuning(chunk=chunk, speculate=tries, split_master=splits, tile=tile)
        if where == "nvme":
            options.setdefault("cpu_memory", least_cpu_memory(self.model, plain, tuning=tuning, **_planned(options)))
        else:
            options = {name: options[name] for name in options if name not in STREAMED_ONLY}
        self.optimizer = OffloadZero(self.model, plain, tier=where, path=path, tuning=tuning, **options)
        self.seen: list[Any] = []
        self.kept: list[float] = []
        self._batch = 0

    @property
    def first(self) -> nn.Parameter:
        """A parameter in the middle, of several chunks."""
        return [p for p in self.model.parameters() if p.dim() == 2][2]

    def batch(self) -> Tensor:
        self._batch += 1
        return torch.randn(8, self._width, generator=torch.Generator().manual_seed(self._batch)).bfloat16().to(DEVICE)

    def backward(self, by: float = 1.0) -> None:
        loss = self.model(self.batch()).float().pow(2).mean() * by
        loss.backward()
        self.seen.append(loss.detach().clone())
        parts = self.optimizer._parts
        if parts.step.trials is not None and not self._is_late:
            parts.gradients.drain()
            wait_for_all(parts.step.trials._queue)

    def step(self) -> None:
        before = self.optimizer.stats()
        self.optimizer.step()
        after = self.optimizer.stats()
        self.kept.append(after["kept_bytes"] - before["kept_bytes"])
        self.optimizer.zero_grad()

    def disk_bytes(self) -> float:
        """What has been read and written, when the last step has been made."""
        self.optimizer.synchronize()
        for store in self.optimizer._parts.stores.all:
            store.drain()
        stats = self.optimizer.stats()
        return float(stats["nvme_read_bytes"] + stats["nvme_written_bytes"])

    def end(self) -> Loop:
        for param in self.model.parameters():
            self.seen.append(self.optimizer.state_of(param))
            with self.optimizer.gathered(param):
                self.seen.append(param.detach().clone())
        self.optimizer.close()
        return self


def _planned(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in options if name in ("param_tier", "grad_tier", "accumulation", "states")}


def require_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor)
        assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
        assert torch.equal(one.isnan(), other.isnan())
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)  # type: ignore[arg-type]
        for left, right in zip(one, other, strict=True):  # type: ignore[call-overload]
            require_same(left, right)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()  # type: ignore[attr-defined]
        for key, value in one.items():
            require_same(value, other[key])  # type: ignore[index]
    else:
        assert one == other


def halved(loop: Loop) -> None:
    """The learning rate of one group, as schedulers do it: in place, where it is a tensor."""
    lr = loop.optimizer.param_groups[0]["lr"]
    if isinstance(lr, Tensor):
        lr.mul_(0.5)
    else:
        loop.optimizer.param_groups[0]["lr"] = lr / 2


ALL, SOME, NONE = "all", "some", "none"


class Event(NamedTuple):
    """What a program does between backward and step. Attribute: keeps, how much of the trials that may leave."""

    happens: Callable[[Loop], None]
    keeps: str


def changed(change: Callable[[Tensor], object]) -> Event:
    """A gradient is changed in place."""
    return Event(lambda loop: (change(loop.first.grad), None)[1], SOME)  # type: ignore[arg-type]


def assigned(loop: Loop) -> None:
    loop.first.grad = torch.full_like(loop.first, 0.01)


def dropped(loop: Loop) -> None:
    loop.first.grad = None


def read(loop: Loop) -> None:
    loop.seen += [p.grad.clone() for p in loop.model.parameters()]  # type: ignore[union-attr]
    loop.seen += [p.detach().clone() for p in loop.model.parameters()]


def handed_over(loop: Loop) -> None:
    loop.seen.append(dict(loop.optimizer.weights()))
    loop.seen.append(sorted(name for name, _ in loop.optimizer.weights(since=loop.optimizer.stats()["step"])))


def written(loop: Loop) -> None:
    with torch.no_grad():
        loop.first.mul_(0.5)


def evaluated(loop: Loop) -> None:
    with torch.no_grad():
        loop.seen.append(loop.model(loop.batch()).clone())


def looked_at(loop: Loop) -> None:
    loop.seen.append(loop.optimizer.state_of(loop.first))


def penalised(loop: Loop) -> None:
    x = loop.batch().requires_grad_()
    loop.seen.append(torch.autograd.grad(loop.model(x).float().sum(), x)[0].clone())


def begun_anew(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.backward()


def begun_anew_with_another_lr(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    halved(loop)
    loop.backward()


def zeroed(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


def given_back(loop: Loop) -> None:
    loop.optimizer.commit()
    loop.optimizer.rollback()
    loop.backward()


def loaded(loop: Loop) -> None:
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def weights_loaded(loop: Loop) -> None:
    loop.model.load_state_dict({"2.weight": loop.model.state_dict()["2.weight"] * 0.5}, strict=False)


def exported(loop: Loop) -> None:
    path = loop.optimizer._parts.run.paths[0]
    loop.optimizer.export(path.with_name(f"{path.name}-{len(loop.seen)}"))


def option(group: int, name: str, value: object) -> Event:
    def happens(loop: Loop) -> None:
        loop.optimizer.param_groups[group][name] = value

    return Event(happens, SOME)


def torch_clips(by: float) -> Callable[[Loop], None]:
    return lambda loop: loop.seen.append(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), by).clone())


def clips(by: float) -> Callable[[Loop], None]:
    return lambda loop: loop.seen.append(loop.optimizer.clip_grad_norm_(by))


EVENTS = {
    "nothing": Event(lambda loop: None, ALL),
    "clipped": Event(clips(1e-4), NONE),
    "clipped to more": Event(clips(1e4), ALL),
    "clipped by torch": Event(torch_clips(1e-4), NONE),
    "clipped by torch to more": Event(torch_clips(1e4), ALL),
    "read": Event(read, ALL),
    "weights handed over": Event(handed_over, ALL),
    "clamped": changed(lambda grad: grad.clamp_(-1e-6, 1e-6)),
    "noise added": changed(lambda grad: grad.add_(torch.ones_like(grad) * 1e-3)),
    "multiplied": changed(lambda grad: grad.mul_(0.25)),
    "zeroed in place": changed(lambda grad: grad.zero_()),
    "assigned": Event(assigned, SOME),
    "dropped": Event(dropped, SOME),
    "all become zeros": Event(zeroed, NONE),
    "begun anew": Event(begun_anew, ALL),
    "begun anew with another lr": Event(begun_anew_with_another_lr, ALL),
    "parameter written": Event(written, SOME),
    "forward without gradients": Event(evaluated, ALL),
    "states looked at": Event(looked_at, ALL),
    "gradient penalty": Event(penalised, ALL),
    "committed": Event(lambda loop: loop.optimizer.commit(), ALL),
    "snapshot": Event(lambda loop: (loop.optimizer.commit(), loop.optimizer.snapshot())[0], ALL),
    "committed and rolled back": Event(given_back, ALL),
    "state dict loaded": Event(loaded, ALL),
    "weights loaded": Event(weights_loaded, SOME),
    "exported": Event(exported, ALL),
    "lr of one group": option(1, "lr", 5e-4),
    "betas of one group": option(1, "betas", (0.8, 0.95)),
    "weight decay of one group": option(0, "weight_decay", 0.3),
    "eps of one group": option(0, "eps", 1e-6),
    "lr halved": Event(halved, SOME),
}


def trained(where: str, path: Path, events: Mapping[int, str], *, steps: int = STEPS, **options: Any) -> Loop:
    loop = Loop(where, path / where, **options)
    for step in range(steps):
        loop.backward()
        EVENTS[events.get(step, "nothing")].happens(loop)
        loop.step()
    return loop.end()


@cache
def expected_bytes() -> float:
    """What a step keeps where nothing happens."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return trained("nvme", Path(folder), {}, commit_every=0).kept[AT]


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_comes_between_backward_and_step_changes_no_bit(event: str, tmp_path: Path) -> None:
    kept = trained("nvme", tmp_path, {AT: event}, commit_every=0)
    require_same(kept.seen, trained("cpu", tmp_path, {AT: event}, commit_every=0).seen)
    every = expected_bytes()
    assert every > 0
    share = kept.kept[AT] / every
    assert {ALL: share == 1, SOME: 0 < share < 1, NONE: share == 0}[EVENTS[event].keeps]
    assert kept.kept[AT - 1] == every


@pytest.mark.parametrize(
    "event", often(EVENTS, "nothing", "clipped by torch", "clamped", "assigned", "begun anew", "committed", "read")
)
def test_no_bit_changes_where_gradients_come_late_from_a_device(
    event: str, tmp_path: Path, copied_by: CopiedBy
) -> None:
    expected = trained("cpu", tmp_path, {AT: event}, commit_every=0)
    copied_by(lambda: LateCopier(3))
    kept = trained("nvme", tmp_path, {AT: event}, commit_every=0, param_tier="device", is_late=True)
    require_same(kept.seen, expected.seen)
    assert kept.kept[AT - 1] > 0  # not always of all: the last gradients come after backward
    assert EVENTS[event].keeps != NONE or kept.kept[AT] == 0


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_parameters_that_stream_to_a_device_get_what_was_kept(
    param_tier: str, tmp_path: Path, copied_by: CopiedBy
) -> None:
    expected = trained("cpu", tmp_path, {1: "clipped", 3: "clamped"}, commit_every=0)
    copied_by(lambda: LateCopier(4))
    kept = trained("nvme", tmp_path, {1: "clipped", 3: "clamped"}, commit_every=2, param_tier=param_tier, is_late=True)
    require_same(kept.seen, expected.seen)
    assert [bool(one) for one in kept.kept] == [False, False, False, True]


PLACES: dict[str, dict[str, Any]] = {
    "split": {"split": True},
    "split, params on nvme": {"split": True, "param_tier": "nvme"},
    "split, params in ram, 8bit": {"split": True, "param_tier": "cpu", "states": "8bit"},
    "grads on nvme": {"grad_tier": "nvme", "chunk": "256KiB", "width": 288},
    "grads and params on nvme": {"grad_tier": "nvme", "param_tier": "nvme", "chunk": "256KiB", "width": 288},
    "all on nvme, split": {"grad_tier": "nvme", "param_tier": "nvme", "split": True, "chunk": "256KiB", "width": 288},
    "grads on nvme, summed": {"grad_tier": "nvme", "accumulation": "auto", "chunk": "256KiB", "width": 288},
}
"""Where half of a master is in the model, and where gradients are in slots."""


@pytest.mark.parametrize(
    ("place", "event"),
    products(
        PLACES,
        ("nothing", "clipped", "clamped", "assigned", "begun anew", "weights loaded", "committed and rolled back"),
        often=[
            ("split", "weights loaded"),
            ("split, params on nvme", "clipped"),
            ("split, params in ram, 8bit", "committed and rolled back"),
            ("grads on nvme", "clamped"),
            ("grads and params on nvme", "begun anew"),
            ("all on nvme, split", "weights loaded"),
            ("grads on nvme, summed", "nothing"),
        ],
    ),
)
def test_split_masters_and_gradients_in_slots_are_tried_alike(place: str, event: str, tmp_path: Path) -> None:
    options = PLACES[place] | {"commit_every": 0}
    kept = trained("nvme", tmp_path, {AT: event}, **options)
    require_same(kept.seen, trained("cpu", tmp_path, {AT: event}, **options).seen)
    share = kept.kept[AT] / kept.kept[AT - 1]
    assert {ALL: share == 1, SOME: 0 < share < 1, NONE: share == 0}[EVENTS[event].keeps]


@pytest.mark.parametrize("place", ["split", "split, params on nvme", "all on nvme, split"])
def test_halves_and_slots_change_no_bit_where_all_comes_late_from_a_device(
    place: str, tmp_path: Path, copied_by: CopiedBy
) -> None:
    options = PLACES[place] | {"commit_every": 2}
    if options.get("grad_tier"):
        options["cpu_memory"] = "4MiB"  # with what brings gradients from a device
    expected = trained("cpu", tmp_path, {1: "clipped", 3: "clamped"}, steps=5, **options)
    copied_by(lambda: LateCopier(5))
    kept = trained("nvme", tmp_path, {1: "clipped", 3: "clamped"}, steps=5, is_late=True, **options)
    require_same(kept.seen, expected.seen)
    assert any(kept.kept)


def test_a_gradient_in_a_slot_is_stepped_from_ram_and_read_again_only_for_a_miss(tmp_path: Path) -> None:
    """Of what moves to the slot and back, the way back is saved."""
    options = PLACES["grads on nvme"] | {"commit_every": None}
    moved = {}
    for where in ("nvme", "nvme without"):
        loop = Loop(where, tmp_path / where, **options)
        before = 0.0
        for step in range(6):
            before = loop.disk_bytes() if step == 3 else before
            loop.backward()
            loop.step()
        moved[where] = (loop.disk_bytes() - before) / 3
        if (trials := loop.optimizer._parts.step.trials) is not None:
            store = loop.optimizer._parts.stores[ChunkKind.GRADS]
            saved = sum(store.nbytes(chunk) for chunk in trials._new)
        loop.end()
    assert moved["nvme without"] - moved["nvme"] == saved > 0


def test_gradients_in_slots_leave_their_buffers_where_nothing_is_tried_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained, retain = 0, Store.retain

    def counts(self: Store, chunk: int) -> None:
        nonlocal retained
        retained += 1
        retain(self, chunk)

    monkeypatch.setattr(Store, "retain", counts)
    loop = Loop("nvme", tmp_path, **PLACES["grads on nvme"], commit_every=None)
    trials = loop.optimizer._parts.step.trials
    assert trials is not None
    for step in range(16):
        before, are_tried = retained, trials.is_on
        loop.backward()
        assert (retained > before) is are_tried is (0 < step < 13)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e4 if step < 3 else 1e-4)
        loop.step()
    loop.optimizer.close()


def test_a_gradient_that_comes_beside_a_commit_is_not_tried(
    tmp_path: Path, copied_by: CopiedBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit writes what is there, with nothing leased: no trial may begin before it has ended."""
    copier = HeldCopier(holds=False)
    loops = [Loop("cpu", tmp_path / "cpu", commit_every=0)]
    copied_by(lambda: copier)
    loops.append(Loop("nvme", tmp_path / "nvme", commit_every=0, param_tier="device", is_late=True))
    for loop in loops:
        commits = loop.optimizer._commits
        commit = commits.commit

        def begins(*args: Any, loop: Loop = loop, commit: Callable[..., None] = commit) -> None:
            tried = loop.optimizer.stats()["tried_bytes"]
            copier.let_go()
            loop.optimizer._parts.gradients.drain()
            assert loop.optimizer.stats()["tried_bytes"] == tried
            commit(*args)

        monkeypatch.setattr(commits, "commit", begins)
        for step in range(STEPS):
            copier.holds = step == AT
            loop.backward()
            if step == AT:
                loop.optimizer.commit()
            loop.step()
        loop.end()
    require_same(loops[1].seen, loops[0].seen)
    assert [bool(kept) for kept in loops[1].kept] == [False, True, False, True]


def test_a_gradient_that_changes_after_a_trial_has_read_it_is_not_the_one_that_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial is still under way: its kernel has ended, and nobody knows of its result yet. The new one is whole."""
    loops = [Loop(where, tmp_path / where, commit_every=0) for where in ("nvme", "cpu")]
    count, names = Timeline.count, [spec.name for spec in loops[0].optimizer._layout.specs]
    number, is_time = names.index("2.weight"), False

    def changes(loop: Loop) -> None:
        gradients = loop.optimizer._parts.gradients
        gradients.write(number, gradients.values(number) * 0.25)
        gradients._shards.sum_squares([number])

    def counts(self: Timeline, name: str, amount: int) -> None:
        nonlocal is_time
        if name == "tried_bytes" and is_time and loops[0].optimizer._parts.gradients.generation(number) is not None:
            is_time = False
            changes(loops[0])
        count(self, name, amount)

    monkeypatch.setattr(Timeline, "count", counts)
    for loop in loops:
        for step in range(STEPS):
            is_time = step == AT and loop is loops[0]
            loop.backward()
            assert not is_time
            if step == AT and loop is loops[1]:
                changes(loop)
            loop.step()
        loop.end()
    require_same(loops[0].seen, loops[1].seen)
    assert 0 < loops[0].kept[AT] < loops[0].kept[AT - 1]


def loaded_and_looked_at(loop: Loop, meanwhile: Callable[[], None]) -> None:
    """Masters follow at once, while the upper halves that a trial has copied are those before."""
    weights_loaded(loop)
    looked_at(loop)
    meanwhile()


def written_in_gathered(loop: Loop, meanwhile: Callable[[], None]) -> None:
    """Masters follow at the end of the block, and then the store of the parameters, which still has the values before
    while the trial is made."""
    stores = UnitTransfers.store_flat

    def follows(self: UnitTransfers, flat: int) -> None:
        meanwhile()
        stores(self, flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitTransfers, "store_flat", follows)
        with torch.no_grad(), loop.optimizer.gathered(loop.first):
            loop.first.mul_(0.5)


@pytest.mark.parametrize(
    ("param_tier", "writes", "held_up"),
    [
        ("device", loaded_and_looked_at, "copy_current"),
        ("nvme", written_in_gathered, "copy_current"),
        ("nvme", written_in_gathered, "generations"),
    ],
)
def test_a_parameter_that_is_written_while_its_chunk_is_tried_is_not_the_half_that_was_tried(
    param_tier: str,
    writes: Callable[[Loop, Callable[[], None]], None],
    held_up: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial begins before the write, or between the one to the masters and that to the parameters."""
    monkeypatch.undo()  # trials wait
    options: dict[str, Any] = {"commit_every": 0, "split": True, "param_tier": param_tier}
    loops = [Loop(where, tmp_path / where, **options) for where in ("nvme", "cpu")]
    trials = loops[0].optimizer._parts.step.trials
    assert trials is not None
    assert trials._halves is not None
    trials._chunks.most_waiting = 100  # however slow the disk is
    names = [spec.name for spec in loops[0].optimizer._layout.specs]
    chunks = loops[0].optimizer._layout.chunks_of[names.index("2.weight")]
    is_time, is_held, may_go, under_way = False, threading.Event(), threading.Event(), threading.local()
    tries, copy, generations = trials._try, trials._halves.copy_current, trials._chunks.generations

    def attempts(*about: Any) -> None:
        under_way.is_trial = True
        tries(*about)
        under_way.is_trial = False

    def waits(index: int) -> None:
        if is_time and index in chunks and getattr(under_way, "is_trial", False):
            is_held.set()
            assert may_go.wait(60)

    def copies(chunk: Chunk, into: Tensor) -> None:
        copy(chunk, into)
        waits(chunk.index)

    def numbers(chunk: int, of: Callable[[int], int | None]) -> tuple[int, ...] | None:
        waits(chunk)
        return generations(chunk, of)

    def meanwhile() -> None:
        may_go.set()
        wait_for_all(tuple(trials._queue))

    monkeypatch.setattr(trials, "_try", attempts)
    if held_up == "copy_current":
        monkeypatch.setattr(trials._halves, "copy_current", copies)
    else:
        monkeypatch.setattr(trials._chunks, "generations", numbers)
    for loop in loops:
        for step in range(STEPS):
            is_time = loop._is_late = step == AT and loop is loops[0]
            loop.backward()
            assert not is_time or is_held.wait(60)
            if step == AT:
                writes(loop, meanwhile if is_time else lambda: None)
                wait_for_all(tuple(trials._queue))
            loop.step()
        loop.end()
    require_same(loops[0].seen, loops[1].seen)
    assert 0 < loops[0].kept[AT] < loops[0].kept[AT - 1]


ENDS: dict[str, Callable[[Loop], object]] = {
    "step": lambda loop: loop.step(),
    "apply": lambda loop: loop.optimizer.apply("damp"),
    "commit": lambda loop: loop.optimizer.commit(),
    "rollback": lambda loop: loop.optimizer.rollback(),
    "close": lambda loop: loop.optimizer.close(),
}


@pytest.mark.parametrize("ends", ENDS)
def test_what_no_trial_may_run_beside_waits_for_the_one_that_has_begun_and_drops_the_others(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # trials wait
    loop = Loop("nvme", tmp_path, commit_every=0, rule=Averaged if ends == "apply" else None)
    loop.backward()
    loop.optimizer.commit()
    loop.step()
    parts, trials = loop.optimizer._parts, loop.optimizer._parts.step.trials
    assert trials is not None
    tasks, has_begun, may_end = trials._tasks, threading.Event(), threading.Event()
    chunks: list[int] = []

    def wait(work: ChunkWork, *about: Any) -> Sequence[Task]:
        chunks.append(work.chunk.index)
        has_begun.set()
        assert may_end.wait(60)
        return tasks(work, *about)

    monkeypatch.setattr(trials, "_tasks", wait)
    loop.model(loop.batch()).float().pow(2).mean().backward()
    parts.gradients.drain()
    assert has_begun.wait(60)
    assert len(trials._queue) > 1
    threading.Timer(0.1, may_end.set).start()
    ENDS[ends](loop)
    assert may_end.is_set()
    tried = parts.run.timeline.counted("tried_bytes")
    assert tried == parts.stores[ChunkKind.STATES].nbytes(chunks[0])
    assert len(chunks) == 1
    loop.optimizer.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="there hooks of gradients run in threads that no signal interrupts")
def test_a_trial_that_an_interrupt_meets_on_its_way_to_the_worker_is_waited_for_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes between two lines of a gradient's hook, on the CPU, when the worker has the trial already."""
    monkeypatch.undo()  # trials wait
    loop = Loop("nvme", tmp_path, commit_every=0)
    loop.backward()
    loop.optimizer.commit()
    loop.step()
    trials, put = loop.optimizer._parts.step.trials, Workers.put
    assert trials is not None
    tasks, has_begun, may_end = trials._tasks, threading.Event(), threading.Event()

    def interrupted(self: Workers, *call: Any, **options: Any) -> None:
        put(self, *call, **options)
        if self is trials._worker:
            raise KeyboardInterrupt

    def waits(*about: Any) -> Sequence[Task]:
        has_begun.set()
        assert may_end.wait(60)
        return tasks(*about)

    monkeypatch.setattr(trials, "_tasks", waits)
    loss = loop.model(loop.batch()).float().pow(2).mean()
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    assert has_begun.wait(60)
    threading.Timer(0.1, may_end.set).start()
    loop.optimizer.rollback()
    assert may_end.is_set()
    loop.optimizer.close()


def test_a_commit_that_is_interrupted_keeps_nothing_from_being_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while the commit waits for the trials that it pauses."""

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    loops = [Loop(where, tmp_path / where, commit_every=0) for where in ("nvme", "cpu")]
    for loop in loops:
        for step in range(STEPS):
            if step == AT and loop is loops[0]:
                with monkeypatch.context() as patch:
                    patch.setattr("offload.optim.trials.wait_for_all", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        loop.optimizer.commit()
            loop.backward()
            loop.step()
        loop.end()
    require_same(loops[0].seen, loops[1].seen)
    assert loops[0].kept[AT] == loops[0].kept[AT - 1] > 0


def test_every_fourth_chunk_that_streams_is_left_to_the_forward_of_whatever_unit() -> None:
    """Seven chunks of each of three units, of which the first ones of two stay in RAM."""
    layout = layout_of((7 * 64,) * 3, chunk_numel=64, units=("0", "1", "2"))
    streamed = [index for index in range(21) if index not in (0, 7)]
    tried = tried_chunks(layout, streamed)
    assert [*sorted({*streamed} - {*tried})] == [4, 9, 13, 17]
    assert tried == sorted(tried)


def test_no_more_trials_wait_than_a_unit_has_and_nothing_is_read_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # trials wait
    loop = Loop("nvme", tmp_path, commit_every=None)
    for _ in range(2):
        loop.backward()
        loop.step()
    trials, store = loop.optimizer._parts.step.trials, loop.optimizer._parts.stores.states
    assert trials is not None
    is_free, read, reads = threading.Event(), [], store._read
    busy = trials._worker.submit(is_free.wait, 60)
    loss = loop.model(loop.batch()).float().pow(2).mean()

    def notes(chunk: CachedChunk) -> None:
        read.append(chunk.index)
        reads(chunk)

    monkeypatch.setattr(store, "_read", notes)
    loss.backward()
    loop.optimizer._parts.gradients.drain()
    first = trials._chunks.order[: trials._chunks.most_waiting]
    assert len(trials._queue) == trials._chunks.most_waiting == 4  # of five chunks, but for every fourth
    is_free.set()
    wait_for_all([busy, *trials._queue])
    store.drain()
    assert sorted(trials._made) == sorted(first)
    assert {*read} <= {*first}
    loop.step()
    assert loop.kept[-1] == sum(map(store.nbytes, first))
    loop.optimizer.close()


@pytest.mark.parametrize("rule", ["radam", "adamw"])
def test_what_takes_memory_beside_its_arrays_is_not_tried_beside_a_step_that_is_still_to_be_made(
    rule: str, tmp_path: Path
) -> None:
    """That of the last layer, which the third forward leaves out. The memory is there once."""
    options = {"commit_every": 0, "rule": RULES.get(rule)}
    loops = [Loop(where, tmp_path / where, **options) for where in ("nvme", "cpu")]
    for loop in loops:
        for step in range(STEPS):
            before = loop.optimizer.stats()["tried_bytes"]
            if step == AT:
                x = loop.batch()
                for layer in loop.model[:-1]:
                    x = layer(x)
                x.float().pow(2).mean().backward()
                loop.optimizer._parts.gradients.drain()
            else:
                loop.backward()
            if loop is loops[0]:
                tries = loop.optimizer.stats()["tried_bytes"] > before
                assert tries is (step > 0 and (step != AT or rule == "adamw"))
            loop.step()
        loop.end()
    require_same(loops[0].seen, loops[1].seen)


OTHERS: dict[str, Callable[[_Trial], _Trial]] = {
    "gradients": lambda one: one._replace(generations=tuple(number - 1 for number in one.generations)),
    "elements": lambda one: one._replace(runs=[replace(run, stop=run.stop - 1) for run in one.runs]),
    "scalars": lambda one: one._replace(runs=[replace(run, key=bytes(len(run.key))) for run in one.runs]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_chunk_that_was_tried_with_one_other_input_is_not_kept(other: str, tmp_path: Path) -> None:
    """Each input alone: where a program changes one of them, others mostly change, too."""
    loop = Loop("nvme", tmp_path, commit_every=0)
    for step in range(AT + 1):
        loop.backward()
        trials = loop.optimizer._parts.step.trials
        assert trials is not None
        if step == AT:
            index, trial = next(iter(trials._made.items()))
            trials._made[index] = OTHERS[other](trial)
        loop.step()
    nbytes = loop.optimizer._parts.stores[ChunkKind.STATES].nbytes(index)
    loop.end()
    assert loop.kept[AT] == loop.kept[AT - 1] - nbytes


def test_commits_after_steps_keep_nothing_from_being_tried(tmp_path: Path) -> None:
    """A commit pauses trials until it has ended, and not until the next step."""
    loops = [Loop(where, tmp_path / where, commit_every=0) for where in ("nvme", "cpu")]
    for loop in loops:
        for _ in range(STEPS):
            loop.backward()
            loop.step()
            loop.optimizer.commit()
        loop.end()
    require_same(loops[0].seen, loops[1].seen)
    assert loops[0].kept == [0, *[expected_bytes()] * (STEPS - 1)]


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2. Its first step makes what it keeps."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - lr * group["weight_decay"]).sub_(m.lerp(p.grad, 1 - beta1).sign_(), alpha=lr)
                    m.lerp_(p.grad, 1 - beta2)


RULES: dict[str, Rule] = {
    "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adagrad with a tensor as lr": lambda groups: torch.optim.Adagrad(groups, lr=torch.tensor(0.05)),
    "lion of a user": Lion,
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "amsgrad run by torch": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
}


EVENTS_OF_RULES = {1: "committed", 2: "lr halved", 3: "clamped", 4: "clipped"}


@pytest.mark.parametrize("rule", often(RULES, "lion of a user", "adagrad with a tensor as lr"))
def test_steps_of_any_rule_of_single_elements_are_tried(rule: str, tmp_path: Path) -> None:
    kept, plain = (
        trained(where, tmp_path, EVENTS_OF_RULES, steps=5, commit_every=0, rule=RULES[rule])
        for where in ("nvme", "cpu")
    )
    require_same(kept.seen, plain.seen)
    first, every, of_biases, but_for_one, clipped = kept.kept
    assert first == clipped == 0 < of_biases < but_for_one < every


@pytest.mark.parametrize("states", ["8bit", "bf16"])
def test_small_states_are_tried_with_the_random_bits_of_the_step(states: str, tmp_path: Path) -> None:
    events = {2: "lr halved", 3: "clipped"}
    kept, plain = (trained(where, tmp_path, events, commit_every=0, states=states) for where in ("nvme", "cpu"))
    require_same(kept.seen, plain.seen)
    assert kept.kept[1] > kept.kept[2] > kept.kept[3] == 0


@pytest.mark.parametrize("form", ["8bit", "bf16"])
def test_steps_that_differ_in_their_random_bits_alone_are_told_apart(form: str) -> None:
    """After so many steps both corrections are 1 in fp32, and all else that a step of fp32 states takes is the same."""
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
    for rule, are_equal in ((AdamRule(), True), (AdamRule(form), False)):
        one, other = (rule.scalar_bytes(rule.scalars(group, Progress(step), 1.0)) for step in (10**6, 10**6 + 1))
        assert (one == other) is are_equal


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_events_in_any_order_change_no_bit(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    steps = 12
    events = {step: chance.choice([*EVENTS]) for step in range(1, steps)}
    options: dict[str, Any] = {
        "commit_every": chance.choice([0, 1, 3]),
        "param_tier": chance.choice(["device", "cpu", "nvme"]),
        "accumulation": chance.choice([1, 1, "auto"]),
        "states": chance.choice(["fp32", "fp32", "8bit", "bf16"]),
        "split": chance.random() < 0.3 and "parameter written" not in events.values(),
    }
    if chance.random() < 0.3:
        options |= {"grad_tier": "nvme", "chunk": "256KiB", "width": 288}
    if options["states"] != "fp32":
        options["param_tier"] = "device"
    both = [trained(where, tmp_path, events, steps=steps, **options) for where in ("nvme", "cpu")]
    require_same(both[0].seen, both[1].seen)
    assert any(both[0].kept)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("kind", "accumulation", "interval", "options"),
    [
        ("mlp", 1, None, {"commit_every": 1}),
        ("mlp", 2, None, {"commit_every": None, "param_tier": "cpu"}),
        ("conv", 1, 2, {"commit_every": 3, "compute_dtype": torch.float16}),
        ("gpt", 1, 2, {"commit_every": 1, "compute_dtype": torch.float16, "param_tier": "nvme"}),
        ("gpt", 2, 3, {"commit_every": 100, "compute_dtype": torch.float16}),
    ],
)
def test_clipping_loss_scales_and_skipped_steps_change_no_bit(
    kind: str, accumulation: int, interval: int | None, options: dict[str, Any], tmp_path: Path
) -> None:
    """Some of the steps clip (tests/support/training.py), and of those with a loss scale some overflow."""
    common: dict[str, Any] = {"accumulation": accumulation, "nonfinite": "skip"}
    common["compute_dtype"] = options.get("compute_dtype", torch.bfloat16)
    if interval:
        common |= {"spoilt": (1, 4), "steps": 9}
    scale = [None if interval is None else LossScale(2.0**10, interval) for _ in range(2)]
    tuning = Tuning(chunk="4KiB", speculate=True)
    run = train(kind, path=tmp_path / "run", cpu_memory="least", tuning=tuning, scale=scale[0], **common | options)
    run.assert_same_bits(train(kind, tier="cpu", scale=scale[1], **common))
    assert run.stats["tried_bytes"] > 0


def test_a_step_that_raises_keeps_nothing_and_the_loop_goes_on(tmp_path: Path) -> None:
    loops = [Loop(where, tmp_path / where, commit_every=0) for where in ("nvme", "cpu")]
    for loop in loops:
        for step in range(STEPS):
            loop.backward(by=float("nan") if step == AT else 1.0)
            if step == AT:
                before = loop.optimizer.state_of(loop.first)
                with pytest.raises(NonFiniteGradientError):
                    loop.optimizer.step()
                require_same(loop.optimizer.state_of(loop.first), before)
                loop.optimizer.zero_grad()
            else:
                loop.step()
        loop.end()
    require_same(loops[0].seen, loops[1].seen)
    assert [bool(kept) for kept in loops[0].kept] == [False, True, True]


def test_where_every_step_clips_nothing_is_ever_tried_and_then_it_is(tmp_path: Path) -> None:
    loop = Loop("nvme", tmp_path, commit_every=None)
    tried = []
    for step in range(40):
        loop.backward()
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-4 if step < 20 else 1e4)  # nobody knows before
        loop.step()
        tried.append(loop.optimizer.stats()["tried_bytes"])
    loop.end()
    per_step = [after - before for before, after in zip([0.0, *tried], tried, strict=False)]
    assert not any(per_step[:20])
    assert all(per_step[24:])
    assert all(loop.kept[24:])


@pytest.mark.parametrize("by", [1e4, 1e-4], ids=["no step clips", "every step clips"])
def test_as_many_bytes_move_as_without_trials(by: float, tmp_path: Path) -> None:
    moved = []
    for where in ("nvme", "nvme without"):
        loop = Loop(where, tmp_path / where, commit_every=None)
        bytes_before = 0.0
        for step in range(8):
            if step == 2:
                bytes_before = loop.disk_bytes()
            loop.backward()
            loop.optimizer.clip_grad_norm_(by)
            loop.step()
        moved.append((loop.disk_bytes() - bytes_before) / 6)
        assert loop.optimizer.stats()["streamed_chunks"] == 25
        assert (loop.optimizer.stats()["tried_bytes"] > 0) is (where == "nvme" and by > 1)
        loop.end()
    assert moved[0] == moved[1]


def test_a_step_moves_24_bytes_a_parameter_where_none_clips_and_ten_steps_after_all_do(tmp_path: Path) -> None:
    """12 are read, 12 written: fp32 masters and two moments. New parameters wait in RAM."""
    loop = Loop("nvme", tmp_path, commit_every=None, chunk="256KiB", width=512)
    count = sum(p.numel() for p in loop.model.parameters())
    per_param, since = [], 0.0
    for first, stop, by in ((0, 2, 1e4), (2, 6, 1e4), (6, 16, 1e-4), (16, 20, 1e-4)):
        for _ in range(first, stop):
            loop.backward()
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), by)  # nobody knows before
            loop.step()
        per_param.append((loop.disk_bytes() - since) / count / (stop - first))
        since = loop.disk_bytes()
    loop.end()
    _, none_clips, first_clip, all_clip = per_param
    assert none_clips == pytest.approx(24, rel=0.02)
    assert first_clip > 24.5  # what was tried in vain is written twice
    assert all_clip == pytest.approx(24, rel=0.02)


def test_where_most_steps_come_to_clip_nothing_is_tried_until_most_do_not(tmp_path: Path) -> None:
    loop = Loop("nvme", tmp_path, commit_every=None)
    trials = loop.optimizer._parts.step.trials
    assert trials is not None
    tried = [0.0]
    for step in range(34):
        loop.backward()
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-4 if 8 <= step < 24 else 1e4)
        loop.step()
        tried.append(loop.optimizer.stats()["tried_bytes"])
        assert step >= 8 or trials._kept_share == 1
    loop.end()
    assert loop.kept[0] == 0  # before a first step nobody knows whether it clips
    assert all(loop.kept[1:8])
    assert not any(loop.kept[8:24])
    assert tried[9] > tried[8]
    assert tried[24] == tried[20]
    assert all(loop.kept[30:])


def test_where_every_gradient_gets_a_factor_nothing_is_ever_tried(tmp_path: Path) -> None:
    loop = Loop("nvme", tmp_path, commit_every=None)
    for _ in range(6):
        loop.backward()
        for param in loop.model.parameters():
            param.grad.mul_(0.5)  # type: ignore[union-attr]
        loop.step()
    assert loop.optimizer.stats()["tried_bytes"] == 0
    loop.end()


def test_nothing_more_is_tried_once_gradients_exceed_what_they_were_clipped_to(tmp_path: Path) -> None:
    loop = Loop("nvme", tmp_path, commit_every=None)
    tried = [0.0]
    for step in range(4):
        loop.backward()
        tried.append(loop.optimizer.stats()["tried_bytes"])
        loop.optimizer.clip_grad_norm_(1e4 if step == 0 else 1e-4)
        loop.step()
    loop.end()
    assert tried[2] > 0
    assert tried[2] == tried[3] == tried[4]  # the first gradient of a step exceeds it


def test_nothing_more_is_tried_once_a_gradient_is_infinite(tmp_path: Path) -> None:
    """Nothing is clipped, so the squares may be as large as they like."""
    loop = Loop("nvme", tmp_path, commit_every=None)
    for _ in range(2):
        loop.backward()
        loop.step()
    tried = loop.optimizer.stats()["tried_bytes"]
    for param in loop.model[-1].parameters():
        param.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    loop.backward()
    assert loop.optimizer.stats()["tried_bytes"] == tried > 0
    loop.optimizer.close()


def test_the_squares_of_a_gradient_that_comes_in_tiles_count_once(tmp_path: Path) -> None:
    """Where all are clipped to little more than their norm, they are tried to the last one. It stays what it is."""
    kept = []
    for name, by in (("little", 0.0), ("much", 1e4)):
        loop = Loop("nvme", tmp_path / name, commit_every=None, param_tier="cpu", tile=2048)
        assert max(map(len, loop.optimizer._parts.gradients._tiles)) == 4  # type: ignore[attr-defined]
        for group in loop.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(STEPS):
            loop._batch = 0
            loop.backward()
            by = by or 1.01 * float(loop.optimizer.clip_grad_norm_(1e4))
            assert float(loop.optimizer.clip_grad_norm_(by)) < by
            loop.step()
        kept.append(loop.kept)
        loop.optimizer.close()
    assert kept[0] == kept[1]
    assert kept[0][-1] > 0


def test_probes_without_a_step_switch_trials_off(tmp_path: Path) -> None:
    loop = Loop("nvme", tmp_path, commit_every=None)
    tried = []
    loop.backward()
    loop.step()
    for _ in range(16):
        loop.backward()
        loop.optimizer.zero_grad()
        tried.append(loop.optimizer.stats()["tried_bytes"])
    loop.end()
    assert tried[0] > 0
    assert tried[-1] == tried[11]


def test_a_trial_that_fails_in_its_own_way_is_a_step_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is refused in the worker, say: the lease ends, and the step makes the chunk as always."""
    loop = Loop("nvme", tmp_path / "nvme", commit_every=0)
    for _ in range(2):
        loop.backward()
        loop.step()
    trials = loop.optimizer._parts.step.trials
    assert trials is not None

    def refused(*_: object) -> list[Any]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(trials, "_tasks", refused)
        loop.backward()
        loop.step()
    loop.backward()
    loop.step()
    loop.end()
    require_same(loop.seen, trained("cpu", tmp_path, {}, commit_every=0).seen)
    assert [bool(kept) for kept in loop.kept] == [False, True, False, True]


@pytest.mark.parametrize(("first", "then"), [("nvme", "nvme without"), ("nvme without", "nvme"), ("nvme", "nvme")])
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_is_resumed_with_trials_or_without_between_a_backward_and_its_step(
    first: str, then: str, every: int, tmp_path: Path
) -> None:
    """What is committed is the last step, whatever has been tried of the next one."""
    loop = Loop(first, tmp_path / "run", commit_every=0, cpu_memory="300KiB")
    for step in range(5):
        loop.backward()
        if step and step % every == 0:
            loop.optimizer.commit()
        loop.step()
    loop.optimizer.close()
    again = Loop(then, tmp_path / "run", commit_every=0, resume=True, cpu_memory="300KiB")
    assert again.optimizer.resumed is not None
    again._batch = begun = again.optimizer.resumed.step
    assert begun == 4
    for _ in range(begun, STEPS + 3):
        again.backward()
        again.step()
    again.end()
    whole = trained("cpu", tmp_path, {}, steps=STEPS + 3, commit_every=0)
    require_same(again.seen, whole.seen[begun:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "cpu"}, 'speculate=True with tier="cpu"'),
        ({"tier": "nvme", "optimizer": torch.optim.Muon}, "speculate=True with Muon"),
        ({"tier": "nvme", "speculate": "always"}, "speculate='always': choose \"auto\", True or False"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_made(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = nn.Linear(8, 8, bias=False)
    plain = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.1)
    tuning = Tuning(speculate=options.pop("speculate", True))
    with pytest.raises(ConfigError, match=message):
        OffloadZero(model, plain, path=tmp_path / "run", tuning=tuning, **options)
    assert not (tmp_path / "run").exists()
