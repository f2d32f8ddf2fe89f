"""What is attached comes back: a resumed loop draws, schedules and steps as the one that was never stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from offload import ConfigError, OffloadZero, Tuning, restore_rng
from offload.checkpoint.extra import Carried, decode, encode
from tests.support.lost import lose

STEPS = 11


class Loader:
    """A shuffled epoch of 32 examples in batches of 4, without end; it knows its position."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.order: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            if not self.order:
                self.order = torch.randperm(32, generator=self.generator).tolist()
            batch = self.order[:4]
            del self.order[:4]  # in place: what was captured must not change
            yield torch.tensor(batch, dtype=torch.float32).unsqueeze(1).expand(4, 6) / 32

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]
        self.generator.set_state(state["generator"])


class Seeding(Loader):
    """An iterator draws a seed when it is made, for the state or for the loop, as that of torchdata does."""

    made: Iterator[Tensor] | None = None
    is_waiting = False

    def __iter__(self) -> Iterator[Tensor]:
        if not self.is_waiting:
            torch.rand(())
            self.made = super().__iter__()
        self.is_waiting = False
        assert self.made is not None
        return self.made

    def state_dict(self) -> dict[str, Any]:
        if self.made is None:
            iter(self)
            self.is_waiting = True
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.made, self.is_waiting = None, False


class Wrapped(Loader):
    """It has whatever attribute it is asked for, as a proxy or a mock has."""

    def __getattr__(self, name: str) -> object:
        return name


class Average:
    """An exponential average of a parameter, as users write one."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value.copy_(state["value"])


def seed() -> None:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))


class Loop:
    """A loop with dropout, a shuffling loader, a warm-up, and random numbers of Python and NumPy.

    Args: kind: of the loader. Attribute: losses, by step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, kind: type[Loader] = Loader) -> None:
        seed()
        self.model, self.optimizer = model, optimizer
        self.loader, self.average = kind(), Average()
        warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 12)
        self.scheduler = SequentialLR(optimizer, [warm_up, cosine], milestones=[4])
        if isinstance(optimizer, OffloadZero):
            optimizer.attach(rng=True, scheduler=self.scheduler)
            optimizer.attach(loader=self.loader, average=self.average)
        self.batches = iter(self.loader)
        self.losses: list[float] = []

    def run(self, steps: int) -> list[float]:
        """The losses of `steps` more steps. After each of them the next batch is drawn at once."""
        batch = next(self.batches)
        for count in range(steps):
            loss = self.model(batch + random.random() + numpy.random.random()).square().mean() + self.average.value
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.value.mul_(0.9).add_(loss.item())
            if count + 1 < steps:
                batch = next(self.batches)
        return self.losses


def hold(model: nn.Module, path: Path | None, **options: Any) -> OffloadZero:
    options = {"compute_dtype": torch.float32, "tuning": Tuning(threads=1)} | options
    return OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=0.1), path=path, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("done", "param_tier", "kind"),
    [
        *((done, tier, Loader) for done in (4, 6, 10) for tier in (None, "cpu")),
        *((done, None, kind) for done in (6, 10) for kind in (Seeding, Wrapped)),
    ],
)
def test_a_run_that_stops_at_once_resumes_as_torch_goes_on(
    tmp_path: Path, done: int, param_tier: str | None, kind: type[Loader]
) -> None:
    plain = build()
    expected = Loop(torch.optim.AdamW(plain.parameters(), lr=0.1), plain, kind).run(STEPS)

    model = build()
    lost = hold(model, tmp_path / "run", commit_every=3, param_tier=param_tier)
    losses = Loop(lost, model, kind).run(done)
    assert losses == pytest.approx(expected[:done], rel=1e-5)
    lose(lost)

    model = build()
    with hold(model, tmp_path / "run", commit_every=3, param_tier=param_tier, resume=True) as optimizer:
        loop = Loop(optimizer, model, kind)
        assert optimizer.resumed is not None
        start = optimizer.resumed.step
        assert start == (done - 1) // 3 * 3
        assert loop.run(STEPS - start) == pytest.approx(expected[start:], rel=1e-5)
        assert losses[start:] == loop.losses[: done - start]
    for found, wanted in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_commit_of_ones_own_carries_what_is_attached_beside_the_extra(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        loop = Loop(optimizer, model)
        loop.run(2)
        optimizer.commit({"epoch": 3})
        average = loop.average.value.clone()
        loop.run(1)
    model = build()
    with hold(model, tmp_path / "run", commit_every=0, resume=True) as optimizer:
        loop = Loop(optimizer, model)
        assert optimizer.resumed == (2, {"epoch": 3})
        assert torch.equal(loop.average.value, average)
        assert loop.scheduler.last_epoch == 2


def test_the_learning_rate_is_the_committed_one_and_not_the_schedulers_first(tmp_path: Path) -> None:
    def scheduled(optimizer: OffloadZero) -> LRScheduler:
        return LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))

    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        scheduler = scheduled(optimizer)
        optimizer.attach(scheduler=scheduler)
        for _ in range(3):
            model(torch.ones(4, 6)).sum().backward()
            optimizer.step()
            scheduler.step()
        optimizer.commit()
    model = build()
    with hold(model, tmp_path / "run", resume=True) as optimizer:
        scheduler = scheduled(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.attach(scheduler=scheduler)
        assert optimizer.param_groups[0]["lr"] == 0.1 / 4 == scheduler.get_last_lr()[0]


def test_rollback_gives_the_committed_states_back(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        loop = Loop(optimizer, model)
        loop.run(3)
        optimizer.commit()
        order, rng = list(loop.loader.order), torch.get_rng_state()
        first = loop.run(3)[3:]
        optimizer.rollback()
        assert loop.loader.order == order
        assert torch.equal(torch.get_rng_state(), rng)
        assert loop.scheduler.last_epoch == 3
        loop.batches = iter(loop.loader)
        assert loop.run(3)[6:] == first


def test_states_that_nobody_asks_for_are_warned_of_once(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        Loop(optimizer, model).run(1)
        optimizer.commit()
    model = build()
    with hold(model, tmp_path / "run", resume=True) as optimizer:
        optimizer.attach(average=Average())
        model(torch.ones(4, 6)).sum().backward()
        with pytest.warns(UserWarning, match="the state of loader, rng, scheduler, which was not given back"):
            optimizer.step()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()  # any warning is an error


def test_a_scheduler_that_begins_anew_is_warned_of(tmp_path: Path) -> None:
    def run(steps: int, resume: bool) -> None:
        model = build()
        with hold(model, tmp_path / "run", commit_every=0, resume=resume) as optimizer:
            scheduler = LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
            for _ in range(steps):
                model(torch.ones(4, 6)).sum().backward()
                optimizer.step()
                scheduler.step()
            optimizer.commit()

    run(3, resume=False)
    with pytest.warns(UserWarning, match=r"param_groups\[0\] is 0.1, and was 0.025 in the commit"):
        run(2, resume=True)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"loader": torch.utils.data.DataLoader([1, 2])}, "StatefulDataLoader"),
        ({"position": 3}, "position=3"),
        ({"scheduler": {"last_epoch": 3, "_get_lr_called_within_step": False}}, r"\}\): .* give the object itself"),
        ({"rng": torch.Generator()}, "rng="),
    ],
)
def test_what_has_no_state_is_refused(objects: dict[str, Any], message: str) -> None:
    optimizer = hold(build(), None)
    with optimizer, pytest.raises(ConfigError, match=message):
        optimizer.attach(**objects)


class Ended(Loader):
    """Has nothing more to give."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize(("attached", "told"), [({}, 0), ({"average": 1}, 0), ({"loader": 1}, 1)], ids=str)
def test_closing_tells_that_a_resumed_run_with_a_loader_made_no_step(
    attached: dict[str, int], told: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    objects = {name: Ended() if name == "loader" else Average() for name in attached}
    line = "offload: closed: resumed at step 2, and no step was made since then: a loader that was committed at its end"

    def run(resume: bool, steps: int) -> int:
        with hold(model := build(), tmp_path / "run", commit_every=0, resume=resume) as optimizer:
            optimizer.attach(**objects)
            for _ in range(steps):
                model(torch.ones(4, 6)).sum().backward()
                optimizer.step()
            if not resume:
                optimizer.commit()
        return capfd.readouterr().err.count(line)

    assert run(resume=False, steps=2) == 0
    assert run(resume=True, steps=0) == told
    assert run(resume=True, steps=1) == 0


def test_a_state_that_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(Average):
        def state_dict(self) -> dict[str, Any]:
            return {"open": object()}

    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        average = Average()
        with pytest.raises(ConfigError, match=r"attached\['odd'\]\['open'\] is a builtins.object"):
            optimizer.attach(average=average, odd=Odd())
        optimizer.commit()  # nothing was attached
    with hold(build(), tmp_path / "run", resume=True) as optimizer:
        assert optimizer.resumed == (0, None)


def test_generators_of_ones_own(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        optimizer.attach(noise=generator)
        torch.rand(3, generator=generator)
        optimizer.commit()
        expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    with hold(build(), tmp_path / "run", resume=True) as optimizer:
        optimizer.attach(noise=other)
        assert torch.equal(torch.rand(3, generator=other), expected)


def test_on_another_number_of_ranks_only_what_all_ranks_share_is_left() -> None:
    carried = Carried({"epoch": 1}, {"loader": {"at": 3}, "scheduler": {"epoch": 2}}, ("loader",))
    structure, tensors = encode(carried)
    found = decode(structure, {str(number): tensor for number, tensor in enumerate(tensors)}, "manifest")
    assert found == carried
    assert carried.for_other_ranks() == ({"epoch": 1}, {"scheduler": {"epoch": 2}}, ("loader",), (), "")


@pytest.fixture(autouse=True)
def _rng_as_it_was() -> Iterator[None]:
    from offload import collect_rng

    state = collect_rng()
    yield
    restore_rng(state)
