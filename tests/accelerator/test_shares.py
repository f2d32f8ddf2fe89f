"""Shares of a device's memory: what is used of it, what is said when some is left over, and when it is not enough.

The oracle: what the allocator of the simulated accelerator counts, and plain runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import BudgetError, ConfigError, OffloadError, OffloadZero, OtherRankError, Tuning
from offload.devices.copies import copier_for
from offload.planner.explain import plan_of
from offload.sizes import parse_bytes
from tests import simulated_device
from tests.gpu.test_ranks import own_device
from tests.support import models
from tests.support.cases import products
from tests.support.ranks import Worlds
from tests.support.scripts import run_code

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = torch.device("simulated:0") if simulated_device.is_wanted() else torch.device("cpu")
MIB = 1 << 20
BLOCKS, WIDTH, ROWS = 8, 512, 256
SMALL = Tuning(chunk="256KiB")
FIGURE = re.compile(r'device_memory(?:=| to )"([^"]+)"')
"""Of what a line or note says to give."""


def blocks(count: int = BLOCKS) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


def return_all() -> None:
    """Gives back what nobody refers to any more."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


@contextmanager
def a_device_of(nbytes: int) -> Iterator[None]:
    """The device has so much memory beside what other tests have left there, and its peak begins anew."""
    return_all()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    with simulated_device.memory_limit(torch.accelerator.memory_reserved(DEVICE) + nbytes):
        yield


def trained(model: nn.Module, steps: int = 5, rows: int = ROWS, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of a short training, and its stats."""
    losses = []
    x = torch.linspace(-1, 1, rows * WIDTH, dtype=torch.bfloat16).view(rows, WIDTH).to(DEVICE)
    with OffloadZero(model, device=DEVICE, tuning=SMALL, **options) as optimizer:
        for _ in range(steps):
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, optimizer.stats()


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_the_figure_said_after_the_first_steps_uses_what_was_left_over(
    param_tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    return_all()
    before = torch.accelerator.memory_allocated(DEVICE)
    with a_device_of(40 * MIB):
        expected, stats = trained(blocks().to(DEVICE), param_tier=param_tier)
        lines = [line for line in capsys.readouterr().err.splitlines() if "unused" in line]
        assert len(lines) == 1
        figure = FIGURE.search(lines[0])
        assert figure is not None
        return_all()
        losses, more = trained(blocks().to(DEVICE), param_tier=param_tier, device_memory=figure[1])
        taken = torch.accelerator.memory_stats(DEVICE)["allocated_bytes.all.peak"] - before
    assert losses == expected
    assert "unused" not in capsys.readouterr().err
    assert stats["device_chunks"] == 0
    if param_tier == "device":
        assert 0 < more["device_chunks"] < more["chunks"]
        assert taken >= 0.85 * 40 * MIB, "it used what was left over"
    else:
        assert "8 streamed units would stay there (now 0)" in lines[0]
        assert more["gathered_bytes"] < stats["gathered_bytes"] / 1.5


def test_where_nothing_more_would_stay_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with a_device_of(128 * MIB):
        trained(blocks(), steps=4, tier="device")
        trained(blocks(), steps=4, device_memory="100MiB")
        trained(blocks(), steps=4, device_memory="100MiB", param_tier="cpu")
    assert "unused" not in capsys.readouterr().err


def test_an_allocator_that_counts_nothing_yet_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's does before the first allocation on a device."""
    copier = copier_for(DEVICE)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: OrderedDict())
    use = copier.use()
    assert use is not None
    assert (use.allocated_bytes, use.peak_bytes, copier.refusals()) == (0, 0, 0)
    assert use.within_bytes > 0


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_what_an_out_of_memory_error_says_to_lower_is_enough(param_tier: str) -> None:
    options: dict[str, Any] = {"steps": 2, "rows": 2 * ROWS, "param_tier": param_tier}
    expected, _ = trained(blocks(12), **options)
    memory, figures = 55 * MIB if param_tier == "device" else 8 * MIB, []
    with a_device_of(60 * MIB if param_tier == "device" else 18 * MIB):
        for _ in range(3):
            return_all()
            try:
                losses, stats = trained(blocks(12), device_memory=memory, **options)
                break
            except torch.OutOfMemoryError as error:
                (note,) = error.__notes__
                error.__traceback__ = None  # which keeps the run
                figure = FIGURE.search(note)
                assert figure is not None, note
                figures.append(figure[1])
                memory = parse_bytes(figure[1], "device_memory")
        else:
            pytest.fail(f"not enough: {figures}")
    assert losses == expected
    assert figures
    assert (0 < stats["device_chunks"] < 60) is (param_tier == "device")


def failed_backward(model: nn.Module) -> torch.OutOfMemoryError:
    """What a backward raises that gets no memory."""
    loss = model(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE)).float().square().mean()
    simulated_device.fail_allocation(1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        loss.backward()
    simulated_device.fail_allocation(0)
    assert not hasattr(raised.value, "__notes__")
    return raised.value


def test_what_a_backward_raised_is_explained_when_the_loop_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = blocks()
    with OffloadZero(model, device=DEVICE, tuning=SMALL, device_memory="20MiB") as optimizer:
        optimizer.zero_grad()
        assert "out of memory" not in capsys.readouterr().err
        failed_backward(model)
        optimizer.zero_grad()
        optimizer.zero_grad()
        said = capsys.readouterr().err
    assert said.count("offload: torch ran out of memory") == 1
    assert "chunks of optimizer states would stay there (now 15)" in said
    assert "out of memory" not in capsys.readouterr().err


@pytest.mark.parametrize("allocation", [1, 5])
def test_what_a_forward_raises_has_a_note(allocation: int) -> None:
    model, x = blocks(), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    with OffloadZero(model, device=DEVICE, tuning=SMALL, param_tier="cpu"):
        simulated_device.fail_allocation(allocation)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(x)
        assert len(raised.value.__notes__) == 1
        assert raised.value.__notes__[0].startswith("offload: torch ran out of memory")


def test_what_leaves_the_optimizers_block_gets_a_note() -> None:
    model = blocks()
    with pytest.raises(torch.OutOfMemoryError) as raised, OffloadZero(model, device=DEVICE, tuning=SMALL):
        raise failed_backward(model)
    (note,) = raised.value.__notes__
    assert note.endswith('give a smaller micro-batch with accumulation, or activation_tier="cpu", or param_tier="cpu"')
    with pytest.raises(ValueError, match="other") as other, OffloadZero(blocks(), device=DEVICE, tuning=SMALL):
        raise ValueError("another")
    assert not hasattr(other.value, "__notes__")


ENDS = """
import torch
from tests import simulated_device
from tests.support import models
from tests.support.device import load_simulated
load_simulated()
from offload import OffloadZero
model = models.build("mlp").to("simulated")
optimizer = OffloadZero(model, tier="device")
loss = next(models.losses("mlp", model, "simulated"))()
simulated_device.fail_allocation(1)
loss.backward()
"""


def test_a_process_that_ends_by_it_says_so_last() -> None:
    done = run_code(ENDS)
    assert "OutOfMemoryError: simulated accelerator out of memory" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("offload: torch ran out of memory: of ")
    assert last.endswith('tier="cpu"')


# What is there at once.

UNIT_BYTES = 2 * (WIDTH * WIDTH + WIDTH)
ROUNDED = 64 << 10
"""What the allocator rounds the sizes of small tensors up to, all together."""


class Recomputed(nn.Sequential):
    """Blocks whose forward is computed again in backward, beside the block before."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Peaks(NamedTuple):
    """Bytes on the device in a training.

    Attributes: planned; padded: planned, and what the allocator adds to what is reserved in one piece; own: in a step,
    when nothing else is there; counted: by this library; all: ever.
    """

    planned: int
    padded: int
    own: int
    counted: int
    all: int


def allocated(which: str, device: torch.device = DEVICE) -> int:
    return int(torch.accelerator.memory_stats(device)[f"allocated_bytes.all.{which}"])


KINDS: dict[str, dict[str, Any]] = {
    "states": {"param_tier": "device"},
    "units": {"param_tier": "cpu"},
    "states of streamed units": {"param_tier": "cpu", "tier": "nvme", "commit_every": None},
}


@functools.cache
def peaks(memory: int | None, accumulation: int, kind: str) -> Peaks:
    with tempfile.TemporaryDirectory() as path:
        options: dict[str, Any] = {"accumulation": accumulation, "device_memory": memory} | KINDS[kind]
        return peaks_of(accumulation, options | ({"path": path} if "tier" in options else {}))


def peaks_of(
    accumulation: int, options: dict[str, Any], device: torch.device = DEVICE, group: dist.ProcessGroup | None = None
) -> Peaks:
    """Args: group: of ranks, of which this is one, on this device; None: it is alone."""
    ranks = 1 if group is None else group.size()
    options = {"tuning": SMALL} | options
    planned = plan_of(blocks(), direct=False, ranks=ranks, **options).place()
    x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.bfloat16).view(2, WIDTH).to(device)
    model, own, most = Recomputed(*blocks()), 0, 0
    gc.collect()
    before = allocated("current", device)
    torch.accelerator.reset_peak_memory_stats(device)
    with OffloadZero(model, device=device, process_group=group, **options) as optimizer:
        for _ in range(4):
            for _ in range(accumulation):
                model(x).float().square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            most = max(most, allocated("peak", device))
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
            optimizer.step()
            optimizer.synchronize()
            optimizer.zero_grad()
            own = max(own, allocated("peak", device))
        counted = optimizer.stats()["peak_device_bytes"]
    rest = -planned.slab_bytes % (2 * MIB)  # segments are so large, and a MiB or less is not cut off
    padding = rest if planned.slab_bytes > 10 * MIB and rest <= MIB else 0
    bytes_ = planned.device_bytes
    return Peaks(bytes_, bytes_ + padding, own - before, counted, max(most, own) - before)


@pytest.mark.parametrize(
    ("kind", "accumulation", "share"),
    products(
        KINDS,
        [1, 2],
        [0, 1 / 7, 1 / 2, 1],
        often=[("states", 1, 1 / 2), ("states", 2, 1 / 7), ("units", 1, 1 / 2), ("states of streamed units", 1, 1 / 2)],
    ),
)
def test_the_device_has_what_the_plan_says_at_each_share(kind: str, accumulation: int, share: float) -> None:
    none = peaks(None, accumulation, kind)
    most = BLOCKS * UNIT_BYTES * (1 if kind == "units" else 9 if accumulation > 1 else 8) + 3 * MIB
    found = peaks(int(none.planned + share * (most - none.planned)), accumulation, kind)
    assert found.own <= found.padded + ROUNDED
    beside = 6 * UNIT_BYTES  # gradients of units that are leaving, and those that are made; activations
    assert found.all <= found.padded + beside + ROUNDED
    if kind == "states":
        assert min(found.own, found.counted) >= 0.95 * found.planned
    else:  # the plan has room for three units that stream; beside one that stays two are there at most
        assert found.counted >= found.planned - UNIT_BYTES
    if share >= 1 / 2:
        assert found.planned >= 1.5 * none.planned


ON_RANKS: dict[str, dict[str, Any]] = {
    "states": {"stage": 2, "param_tier": "device"},
    "states of streamed units": {"stage": 3, "tier": "nvme", "param_tier": "cpu", "commit_every": None},
}


BUCKETS = Tuning(chunk="256KiB", bucket="1MiB")
"""A unit's gradients are about one."""


def peaks_on_rank(accumulation: int, options: dict[str, Any]) -> Peaks:
    device, group = own_device()
    return peaks_of(accumulation, options, device, group)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "accumulation", "share"),
    products(
        ON_RANKS, [1, 2], [0, 1 / 7, 1 / 2, 1], often=[("states", 2, 1 / 2), ("states of streamed units", 1, 1 / 2)]
    ),
)
def test_so_does_each_of_two_ranks(worlds: Worlds, kind: str, accumulation: int, share: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulation": accumulation, "tuning": BUCKETS} | ON_RANKS[kind]
    options |= {"path": str(tmp_path / "run")} if "tier" in options else {}
    none, everything = (
        plan_of(blocks(), direct=False, ranks=2, device_memory=memory, **options).place().device_bytes
        for memory in (None, 1 << 40)
    )
    options["device_memory"] = int(none + share * (everything - none))
    for found in worlds(2).run(peaks_on_rank, accumulation, options, timeout_s=170):
        assert found.own <= found.padded + ROUNDED
        assert found.counted <= found.planned
        assert found.all <= found.padded + 6 * UNIT_BYTES + ROUNDED
        if kind == "states":
            assert min(found.own, found.counted) >= 0.95 * found.planned
        else:  # the plan has room for three units and what is gathered ahead, two here; two less are there at once
            assert found.counted >= found.planned - 2 * UNIT_BYTES
        if share >= 1 / 2:
            assert found.planned >= 1.2 * none


# When it is not enough.

MLP = Tuning(chunk="4KiB", prefetch_units=0, tile=0)
SHARES: dict[str, dict[str, Any]] = {
    "states": {"tier": "cpu", "param_tier": "device", "device_memory": 760_000},
    "units": {"tier": "cpu", "param_tier": "cpu", "device_memory": 60_000},
    "states on NVMe": {"tier": "nvme", "param_tier": "device", "device_memory": 760_000, "cpu_memory": "220KiB"},
    "of streamed units": {"tier": "nvme", "param_tier": "cpu", "device_memory": 760_000, "cpu_memory": "320KiB"},
}
LESS: dict[str, int | None] = {"states": None, "units": 44_000, "states on NVMe": 680_000, "of streamed units": 680_000}
"""The `device_memory` to go on with."""
STAGES: dict[str, dict[str, Any]] = {
    "states": {"stage": 2, "tuning": replace(MLP, bucket=4096)},
    "of streamed units": {"stage": 3, "tuning": replace(MLP, bucket=4096)},
}
"""How two ranks have them."""


class Mlp:
    """A training that may end at any allocation, and go on in another run with less.

    Args: group: of ranks, of which this is one, on this device; None: it is alone.
    """

    def __init__(
        self,
        share: str,
        path: Path,
        *,
        goes_on: bool = False,
        device: torch.device = DEVICE,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        options = SHARES[share] | ({"device_memory": LESS[share], "resume": True} if goes_on else {})
        options |= {"process_group": group} | (STAGES[share] if group else {})
        self.model, self.device = models.build("mlp").to(device), device
        plain = torch.optim.AdamW(models.groups(self.model), lr=1e-2)
        self.optimizer = OffloadZero(self.model, plain, path=path, commit_every=0, **{"tuning": MLP} | options)

    def steps(self, until: int) -> list[float]:
        """Losses of the steps that are left."""
        batches, found = models.losses("mlp", self.model, str(self.device)), []
        done = self.optimizer.stats()["step"]
        for number in range(until):
            draw = next(batches)
            if number < done:
                self.model.calls = number + 1
                continue
            loss = draw()
            loss.backward()
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found


@functools.cache
def undisturbed(share: str) -> tuple[list[float], int, int]:
    """Losses of 4 steps; how many allocations a construction makes, and two steps."""
    with tempfile.TemporaryDirectory() as path:
        with simulated_device.counted() as counts:
            run = Mlp(share, Path(path) / "run")
        with run.optimizer:
            losses = run.steps(2)
            with simulated_device.counted() as more:
                losses += run.steps(4)
    return losses, counts["allocations"], more["allocations"]


ERRORS = (torch.OutOfMemoryError, BudgetError, OtherRankError)


def ends_and_goes_on(share: str, allocation: int, path: Path) -> bool:
    """Whether an allocation after step 2 was there to fail. Then the run is committed, and another one goes on."""
    expected, _, _ = undisturbed(share)
    run, is_raised = Mlp(share, path), True
    assert (run.optimizer.stats()["device_chunks"] > 0) is (share != "units")
    assert run.steps(2) == expected[:2]
    run.optimizer.commit()
    simulated_device.fail_allocation(allocation)
    try:
        run.steps(4)
        is_raised = False
    except ERRORS:
        pass
    simulated_device.fail_allocation(0)
    try:
        run.optimizer.zero_grad()
        run.optimizer.commit()
    except OffloadError:
        assert run.optimizer.stats()["step"] > 2  # in the middle of a step: what there is is the commit before
    with contextlib.suppress(OffloadError):
        run.optimizer.close()
    other = Mlp(share, path, goes_on=True)
    with other.optimizer:
        done = other.optimizer.stats()["step"]
        assert done >= 2
        assert other.optimizer.stats()["peak_device_bytes"] <= (LESS[share] or SHARES[share]["device_memory"])
        assert other.steps(4) == expected[done:]
    return is_raised


def refused_construction(share: str, allocation: int, path: Path) -> bool:
    """Whether an allocation of the construction was there to fail. Then the next construction works."""
    simulated_device.fail_allocation(allocation)
    try:
        Mlp(share, path).optimizer.close()
        return False
    except ERRORS:
        return True
    finally:
        simulated_device.fail_allocation(0)


@pytest.mark.parametrize("share", SHARES)
def test_an_allocation_that_fails_is_a_typed_error_and_the_run_goes_on_with_less(share: str, tmp_path: Path) -> None:
    _, _, allocations = undisturbed(share)
    assert ends_and_goes_on(share, 1 + allocations // 3, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", SHARES)
def test_each_allocation_that_fails_does(share: str, tmp_path: Path) -> None:
    expected, constructing, allocations = undisturbed(share)
    for allocation in range(1, constructing + 1):
        refused_construction(share, allocation, tmp_path / f"new{allocation}")
    run = Mlp(share, tmp_path / "new")
    with run.optimizer:
        assert run.steps(4) == expected
    for allocation in range(1, allocations + 1):
        assert ends_and_goes_on(share, allocation, tmp_path / str(allocation))
        shutil.rmtree(tmp_path / str(allocation))


# When it is not enough on several ranks.

Disturbed = tuple[str, list[float], list[float]]
"""The class of what was raised, and the losses before it and of the run that went on."""


@functools.cache
def undisturbed_on_ranks(share: str, base: str) -> tuple[list[float], int, int]:
    """As `undisturbed`, on each of the ranks that call this."""
    device, group = own_device()
    with simulated_device.counted() as counts:
        run = Mlp(share, Path(base) / "undisturbed", device=device, group=group)
    with run.optimizer:
        assert (run.optimizer.stats()["device_chunks"] > 0) is (share != "units")
        losses = run.steps(2)
        with simulated_device.counted() as more:
            losses += run.steps(4)
    return losses, counts["allocations"], more["allocations"]


def disturbed(share: str, base: str, allocation: int) -> Disturbed:
    """An allocation after step 2 fails on each rank. Then the run is committed, and another one goes on."""
    device, group = own_device()
    run = Mlp(share, Path(base) / str(allocation), device=device, group=group)
    before, raised = run.steps(2), ""
    run.optimizer.commit()
    simulated_device.fail_allocation(allocation, device.index)
    try:
        run.steps(4)
    except ERRORS as error:
        raised = type(error).__name__
    simulated_device.fail_allocation(0, device.index)
    with contextlib.suppress(OffloadError):  # in the middle of a step: what there is is the commit before
        run.optimizer.zero_grad()
        run.optimizer.commit()
    with contextlib.suppress(OffloadError):
        run.optimizer.close()
    other = Mlp(share, Path(base) / str(allocation), goes_on=True, device=device, group=group)
    with other.optimizer:
        assert other.optimizer.stats()["step"] >= 2
        assert other.optimizer.stats()["peak_device_bytes"] <= (LESS[share] or SHARES[share]["device_memory"])
        return raised, before, other.steps(4)


def require_typed(worlds: Worlds, share: str, base: str, allocation: int) -> None:
    expected = worlds(2).run(undisturbed_on_ranks, share, base, timeout_s=170)[0][0]
    found = worlds(2).run(disturbed, share, base, allocation, timeout_s=170)
    assert {raised for raised, *_ in found} <= {"OutOfMemoryError", "BudgetError"}
    assert len({raised for raised, *_ in found}) == 1, "all ranks raise the same"
    for _, before, after in found:
        assert before == expected[:2]
        assert after == expected[len(expected) - len(after) :]


@pytest.mark.parametrize("share", STAGES)
def test_an_allocation_that_fails_on_two_ranks_is_the_same_error_on_both(
    worlds: Worlds, share: str, tmp_path: Path
) -> None:
    allocations = min(found[2] for found in worlds(2).run(undisturbed_on_ranks, share, str(tmp_path), timeout_s=170))
    require_typed(worlds, share, str(tmp_path), 1 + allocations // 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", STAGES)
def test_so_is_each_allocation_that_does(worlds: Worlds, share: str, tmp_path: Path) -> None:
    allocations = min(found[2] for found in worlds(2).run(undisturbed_on_ranks, share, str(tmp_path), timeout_s=170))
    for allocation in range(1, allocations + 1):
        require_typed(worlds, share, str(tmp_path), allocation)
        shutil.rmtree(tmp_path / str(allocation))


def refused_on_one(base: str) -> tuple[str, str]:
    """The class of what is raised where the first rank gets no memory for states, and what it says to lower."""
    device, group = own_device()
    with simulated_device.counted() as model:
        models.build("mlp").to(device)
    if device.index == 0:
        simulated_device.fail_allocation(model["allocations"] + 1, 0)
    try:
        Mlp("states", Path(base) / "new", device=device, group=group).optimizer.close()
        return "", ""
    except ERRORS as error:
        return type(error).__name__, str(error)
    finally:
        simulated_device.fail_allocation(0, device.index)


def test_memory_that_one_rank_is_refused_is_told_to_the_other(worlds: Worlds, tmp_path: Path) -> None:
    (here, says), (there, told) = worlds(2).run(refused_on_one, str(tmp_path), timeout_s=170)
    assert (here, there) == ("BudgetError", "OtherRankError")
    assert "lower device_memory" in says
    assert says in told
    assert worlds(2).run(undisturbed_on_ranks, "states", str(tmp_path), timeout_s=170)[0][0]


@pytest.mark.parametrize("delay", [0, 1])
def test_while_a_text_is_generated_what_is_free_is_used_and_given_back(delay: int) -> None:
    """The device has room for all units, though as little as possible is there in training."""
    simulated_device.set_delays(delay)
    model = blocks().to(DEVICE)
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.bfloat16).view(4, WIDTH).to(DEVICE)
    with a_device_of(64 * MIB), OffloadZero(model, device=DEVICE, tuning=SMALL, param_tier="cpu") as optimizer:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            expected = model(x).cpu()
            taken = torch.accelerator.memory_allocated(DEVICE)
            moved = []
            with optimizer.generating():
                for _ in range(3):
                    before = optimizer.stats()["gathered_bytes"]
                    assert torch.equal(model(x).cpu(), expected)
                    moved.append(optimizer.stats()["gathered_bytes"] - before)
                with pytest.raises(ConfigError, match=r"inside `with optimizer.generating\(\)`: leave that first"):
                    model.cpu()
            assert moved == [BLOCKS * 2 * (WIDTH * WIDTH + WIDTH), 0, 0]
            left = torch.accelerator.memory_allocated(DEVICE) - taken
            assert left <= optimizer._placement.streamed_bytes < optimizer.stats()["generating_bytes"]
            assert torch.equal(model(x).cpu(), expected)
        assert optimizer.stats()["generating_units"] == BLOCKS
