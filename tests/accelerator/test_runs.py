"""A run on a device when streams are late, memory ends and drivers refuse. The oracle: the same run without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from offload import BudgetError, ConfigError, OffloadError, OffloadZero, ReleasedParameterError, Tuning
from offload.devices.copies import copier_for, stream_handle
from offload.model.unit_memory import UnitMemory
from offload.native import ADAM, SUM_SQUARES, AdamScalars, Kernels, device_program, load_on, sum_blocks
from offload.native.torch_kernels import scratch_bytes
from offload.planner import least_cpu_memory
from offload.storage.device_store import DeviceArena
from tests import simulated_device
from tests.support import models, tried
from tests.support.cases import products
from tests.support.device import refuse_launches
from tests.support.interrupted import interrupted_at
from tests.support.processes import run_killed
from tests.support.scripts import run_code
from tests.support.training import train

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = torch.device("simulated:0") if simulated_device.is_wanted() else torch.device("cpu")
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu"},
    "streamed": {"tier": "cpu", "param_tier": "cpu"},
    "device": {"tier": "device"},
}
Step = Callable[[nn.Module, OffloadZero, Callable[[], torch.Tensor]], float]


def plain_step(model: nn.Module, optimizer: OffloadZero, draw: Callable[[], torch.Tensor]) -> float:
    loss = draw()
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def losses(
    kind: str,
    options: dict[str, Any],
    *,
    under: Any = None,
    step: Step = plain_step,
    steps: int = 5,
    device: Any = DEVICE,
) -> list[float]:
    """Of a short training. Args: under: entered for the construction."""
    model = models.build(kind).to(device)
    with under or contextlib.nullcontext():
        optimizer = OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    with optimizer:
        batches = models.losses(kind, model, str(device))
        return [step(model, optimizer, next(batches)) for _ in range(steps)]


@pytest.mark.parametrize("tier", ["cpu", "streamed"])
def test_split_masters_have_the_bits_of_whole_ones(tier: str) -> None:
    """Their other half is read from the device, which may be late."""
    simulated_device.set_delays(1)
    assert losses("mlp", TIERS[tier] | {"tuning": Tuning(split_master=True)}) == losses("mlp", TIERS[tier])


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
@pytest.mark.parametrize("split", [False, True])
def test_steps_that_are_tried_in_backward_have_the_bits_of_those_after_it(
    param_tier: str, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of split masters the other half is read from the device while a backward runs there."""

    def step(model: nn.Module, optimizer: OffloadZero, draw: Callable[[], torch.Tensor]) -> float:
        loss = draw()
        loss.backward()  # and nothing clips
        optimizer.step()
        optimizer.zero_grad()
        kept.append(optimizer.stats()["kept_bytes"])
        return loss.item()

    kept: list[int] = []
    expected = losses("mlp", {"tier": "cpu"}, step=step)
    for patch in (tried.at_once, tried.always):
        patch(monkeypatch)
    simulated_device.set_delays(1)
    tuning = Tuning(chunk="4KiB", speculate=True, split_master=split)
    options = {"param_tier": param_tier, "tuning": tuning}
    memory = least_cpu_memory(models.build("mlp").to(DEVICE), **options)
    assert losses("mlp", {"path": tmp_path, "cpu_memory": memory} | options, step=step) == expected
    assert kept[-1] > 0


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("tier", TIERS)
def test_a_construction_under_a_side_stream_has_the_same_bits(tier: str) -> None:
    expected = losses("mlp", TIERS[tier])
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    assert losses("mlp", TIERS[tier], under=side) == expected


@pytest.mark.parametrize("tier", TIERS)
def test_a_training_on_a_side_stream_has_the_same_bits(tier: str) -> None:
    expected = losses("mlp", TIERS[tier])
    torch.accelerator.synchronize()
    with torch.Stream(DEVICE):
        found = losses("mlp", TIERS[tier])
    assert found == expected


def test_deterministic_algorithms_cost_no_launches() -> None:
    n = 3 * 65536 + 77
    kernels = load_on(torch.zeros(scratch_bytes(n), dtype=torch.uint8, device=DEVICE))
    x, out = torch.ones(n, device=DEVICE), torch.zeros(4, dtype=torch.float64, device=DEVICE)
    launched = []
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        with simulated_device.counted() as counts:
            kernels.call(SUM_SQUARES, x, out)
        assert torch.are_deterministic_algorithms_enabled() is is_deterministic
        launched.append(counts["kernels"] + counts["on_device"])
    torch.use_deterministic_algorithms(False)
    assert 20 < launched[0] == launched[1] < 100


def compiled_kernels(n: int) -> Kernels:
    scratch = torch.zeros(scratch_bytes(n), dtype=torch.uint8, device=DEVICE)
    found = load_on(scratch, partial(stream_handle, DEVICE))
    assert found.variant == "device"
    return found


def operands(n: int) -> list[torch.Tensor]:
    """Master, both moments and a bf16 gradient."""
    states = [torch.rand(n, device=DEVICE) for _ in range(3)]
    return [*states, torch.rand(n, device=DEVICE).bfloat16()]


SCALARS = AdamScalars.at(step=2, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_kernels_take_less_than_four_launches_a_parameter_and_step(dtype: torch.dtype) -> None:
    n, first = 3 * 65536 + 77, 12345
    kernels, (p, m, v, grad), out = compiled_kernels(1), operands(n), torch.zeros(n, dtype=dtype, device=DEVICE)
    sums = torch.zeros(sum_blocks(first, n), dtype=torch.float64, device=DEVICE)
    with simulated_device.counted() as counts:
        kernels.call(SUM_SQUARES, grad, sums, first=first)
        kernels.call(ADAM, p, m, v, grad, out, scalars=SCALARS)
    assert 2 <= counts["kernels"] + counts["on_device"] < 4


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kernel", ["adam", "sum_squares"])
def test_a_compiled_kernel_that_does_not_wait_for_another_stream_is_a_race(kernel: str, waits: bool) -> None:
    kernels, tensors = compiled_kernels(1), operands(70_000)
    sums = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    made = torch.accelerator.current_stream().record_event()
    side = torch.Stream(DEVICE)
    if waits:
        side.wait_event(made)
    with side:
        if kernel == "adam":
            kernels.call(ADAM, tensors[0], tensors[1], tensors[2], tensors[3], None, scalars=SCALARS)
        else:
            kernels.call(SUM_SQUARES, tensors[3], sums)
    races = simulated_device.races()
    assert (not races) is waits, races
    assert all(race.startswith(f"{kernel} on stream") for race in races)
    torch.accelerator.synchronize()  # before its memory is freed


def test_what_uses_a_compiled_kernels_results_on_another_stream_has_to_wait() -> None:
    kernels, tensors = compiled_kernels(1), operands(70_000)
    torch.accelerator.synchronize()
    kernels.call(ADAM, tensors[0], tensors[1], tensors[2], tensors[3], None, scalars=SCALARS)
    with torch.Stream(DEVICE):
        for tensor in tensors[:3]:
            tensor.add_(1)
            assert "what adam on stream 0 writes" in simulated_device.races()[0]
        tensors[3].add_(1)
        assert "what adam on stream 0 reads" in simulated_device.races()[0]
    torch.accelerator.synchronize()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_with_compiled_kernels_has_the_bits_of_torchs_operations(
    kind: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_device.set_delays(accumulation)
    options: dict[str, Any] = {"accumulation": accumulation, "device": str(DEVICE), "tier": "device"}
    with simulated_device.counted() as compiled_counts:
        run = train(kind, **options)
    assert run.stats["kernel"] == "device"
    assert not simulated_device.races()
    monkeypatch.delitem(device_program.LIBRARIES, simulated_device.NAME)
    with simulated_device.counted() as counts:
        other = train(kind, **options)
    assert other.stats["kernel"] == "device, by torch"
    run.assert_same_bits(other)
    assert compiled_counts["kernels"] < counts["kernels"] / 2


@pytest.mark.parametrize("refused_after", [0, 1, 4])
def test_a_refused_launch_changes_no_bit_of_a_training(refused_after: int) -> None:
    expected = losses("mlp", TIERS["device"])
    done = 0

    def step(model: nn.Module, optimizer: OffloadZero, draw: Callable[[], torch.Tensor]) -> float:
        nonlocal done
        if done == refused_after:
            refuse_launches(1)
        done += 1
        return plain_step(model, optimizer, draw)

    assert losses("mlp", TIERS["device"], step=step) == expected
    assert not simulated_device.races()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_OPTIONS": ()}, "products would be contracted with sums"),
        ({"SOURCE": Path(__file__)}, "only device_kernels.h can be compiled"),
    ],
)
def test_what_does_not_compile_is_logged_and_trains_with_the_same_bits(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses("mlp", TIERS["device"])
    monkeypatch.setattr("offload.native.compiled_kernels._programs", {})
    monkeypatch.setattr("offload.native.compiled_kernels._logged", set())
    for name, value in change.items():
        monkeypatch.setattr(device_program, name, value)
    assert losses("mlp", TIERS["device"]) == expected
    (line,) = [line for line in caplog.messages if "kernels on simulated:0" in line]
    assert line.endswith(reason)


def test_memory_that_cannot_be_page_locked_is_a_budget_error() -> None:
    model = models.build("mlp").to(DEVICE)
    before = [param.detach().cpu() for param in model.parameters()]
    simulated_device.refuse_pinning(1)
    with pytest.raises(BudgetError, match=r"refuses to page-lock .* of RAM .*: lower cpu_memory") as raised:
        OffloadZero(model, tier="cpu")
    assert raised.value.option == "cpu_memory"
    assert all(torch.equal(param.cpu(), value) for param, value in zip(model.parameters(), before, strict=True))
    OffloadZero(model, tier="cpu").close()


def test_memory_is_unlocked_at_the_end() -> None:
    before = simulated_device.counters()["pinned_bytes"]
    model = models.build("mlp").to(DEVICE)
    with OffloadZero(model, tier="cpu"):
        assert simulated_device.counters()["pinned_bytes"] > before
    assert simulated_device.counters()["pinned_bytes"] == before


def trained(tier: str, steps: int) -> tuple[nn.Module, OffloadZero]:
    """Whose last step is not in the model yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(DEVICE)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = OffloadZero(model, plain, tuning=Tuning(chunk="4KiB", threads=1), **TIERS[tier])
    for _ in range(steps):
        model(torch.ones(2, 64, device=DEVICE)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tier", ["cpu", "streamed"])
@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_closing_after_an_interrupted_use_ends_copies_before_their_memory_is_unlocked(tier: str) -> None:
    known = []
    for steps in (1, 2):
        model, optimizer = trained(tier, steps)
        optimizer.close()
        known.append([param.detach().cpu() for param in model.parameters()])
    before = simulated_device.counters()["pinned_bytes"]
    simulated_device.set_delays(1, 2000)
    simulated_device.races()
    instruction, is_over, read = 1, False, 0
    while not is_over:
        model, optimizer = trained(tier, 2)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
            model(torch.ones(2, 64, device=DEVICE))
        with contextlib.suppress(OffloadError):
            optimizer.close()
        assert simulated_device.counters()["pinned_bytes"] == before
        for param, old, new in zip(model.parameters(), *known, strict=True):
            with contextlib.suppress(ReleasedParameterError):
                found = param.detach().cpu()
                assert (found.eq(old) | found.eq(new)).all()
                read += 1
        assert not simulated_device.races()
        is_over = left[0] > 0
        instruction += 97
    assert read > 8
    print(instruction, "instructions")


def test_an_error_of_the_device_that_is_not_out_of_memory_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="there is no device"):
        DeviceArena(4096, torch.device("simulated:7"))
    torch.accelerator.empty_cache()
    with simulated_device.memory_limit(torch.accelerator.memory_reserved() + (8 << 20)), pytest.raises(BudgetError):
        DeviceArena(64 << 20, DEVICE)


def test_free_memory_is_what_can_be_allocated() -> None:
    torch.accelerator.empty_cache()
    copier = copier_for(DEVICE)
    with simulated_device.memory_limit(torch.accelerator.memory_reserved() + (64 << 20)):
        pieces = [torch.empty(512 << 10, dtype=torch.uint8, device=DEVICE) for _ in range(40)]
        del pieces[1::2], pieces[0]  # half of the memory is in holes
        free = copier.free_bytes()
        assert free is not None
        assert free >= 20 << 20
        torch.empty(free // (2 << 20) * (2 << 20), dtype=torch.uint8, device=DEVICE)


FORKED = """
import gc, os, sys, warnings
import torch
warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on Python warns of any fork beside threads
from tests.support import models
from tests.support.device import load_simulated
load_simulated()
from offload import ClosedError, OffloadZero
model = models.build("mlp").to("simulated")
optimizer = OffloadZero(model, tier="cpu", param_tier=sys.argv[1])
batches = models.losses("mlp", model, "simulated")
for _ in range(2):
    next(batches)().backward()
    optimizer.step()
    optimizer.zero_grad()
pid = os.fork()
if pid == 0:
    try:
        optimizer.step()
    except ClosedError:
        pass
    else:
        os._exit(9)
    optimizer.close()
    del optimizer, model, batches
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
next(batches)().backward()
optimizer.step()
optimizer.close()
print("went on")
"""


@pytest.mark.parametrize("param_tier", ["cpu", "device"])
def test_the_child_of_a_fork_touches_no_device(param_tier: str) -> None:
    done = run_code(FORKED, param_tier)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("offload: ")]
    assert (done.stdout, errors) == ("went on\n", [])


@pytest.mark.parametrize("tier", TIERS)
def test_out_of_memory_in_a_step_and_going_on_has_the_same_bits(tier: str) -> None:
    """Somewhere in a forward, a backward or a step; then the step is done again."""
    with simulated_device.counted() as counts:
        expected = losses("gpt", TIERS[tier])
    step_allocations = counts["allocations"] // 6  # one for the construction
    fails = iter([1 + step_allocations * tenth // 10 for tenth in (0, 2, 4, 7, 9)])
    raised = []

    def step(model: nn.Module, optimizer: OffloadZero, draw: Callable[[], torch.Tensor]) -> float:
        simulated_device.fail_allocation(next(fails))
        try:
            return plain_step(model, optimizer, draw)
        except torch.OutOfMemoryError as error:
            raised.append(error)
        finally:
            simulated_device.fail_allocation(0)
        optimizer.zero_grad()
        return plain_step(model, optimizer, draw)

    assert losses("gpt", TIERS[tier], step=step) == expected
    assert len(raised) >= 3


@pytest.mark.parametrize("number", [0, 2, 5])
def test_out_of_memory_for_a_units_parameters_and_going_on_has_the_same_bits(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Args: number: how many units get memory in the step before it ends."""
    options = TIERS["streamed"]
    expected = losses("gpt", options, steps=3)
    give = UnitMemory.give
    calls, raised = 0, []

    def give_or_fail(self: UnitMemory, *args: Any, **options: Any) -> Any:
        nonlocal calls
        simulated_device.fail_allocation(int(calls == number))
        calls += 1
        return give(self, *args, **options)

    def step(model: nn.Module, optimizer: OffloadZero, draw: Callable[[], torch.Tensor]) -> float:
        nonlocal calls
        with monkeypatch.context() as patch:
            calls = 0
            patch.setattr(UnitMemory, "give", give_or_fail)
            try:
                plain_step(model, optimizer, draw)
            except torch.OutOfMemoryError as error:
                raised.append(error)
        optimizer.zero_grad()
        return plain_step(model, optimizer, draw)

    assert losses("gpt", options, step=step, steps=3) == expected
    assert len(raised) == 3


def test_where_memory_cannot_be_registered_training_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on XPU: copies are from and to memory that is not page-locked."""
    expected = losses("mlp", TIERS["streamed"])
    monkeypatch.delattr(torch.get_device_module(DEVICE), "cudart")
    with simulated_device.counted() as counts:
        assert losses("mlp", TIERS["streamed"]) == expected
    assert counts["pageable_non_blocking"] > 0


def test_a_step_waits_for_no_device_and_copies_from_page_locked_memory_only() -> None:
    counted: list[dict[str, int]] = []

    def step(model: nn.Module, optimizer: OffloadZero, draw: Callable[[], torch.Tensor]) -> float:
        with simulated_device.counted() as counts:
            loss = plain_step(model, optimizer, draw)
        counted.append(counts)
        return loss

    losses("gpt", TIERS["streamed"], step=step)
    last = counted[-1]
    assert (last["device_waits"], last["pageable_non_blocking"], last["segment_frees"]) == (0, 0, 0)


class Sees(TorchDispatchMode):
    """Passes everything on, as a sanitizer or a counter of operations does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tier", TIERS)
def test_a_run_inside_a_dispatch_mode_has_the_same_bits(tier: str) -> None:
    expected = losses("gpt", TIERS[tier])
    with Sees() as mode:
        assert losses("gpt", TIERS[tier]) == expected
    assert mode.seen > 100


class Reports(nn.Module):
    """A block that returns a tensor on the CPU, too, whose gradient is made by another thread than the block's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.layer(pair[0]))
        return x, pair[1] + (x.float().cpu() ** 2).mean()


@pytest.mark.parametrize("units", [3, 8])
def test_units_whose_backward_runs_in_two_threads_have_the_same_bits(units: int) -> None:
    def train(**options: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Reports() for _ in range(units))).to(DEVICE)
        x, found = torch.linspace(-1, 1, 64).view(4, 16).to(DEVICE), []
        with OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options) as optimizer:
            for _ in range(6):
                last, total = model((x, torch.zeros(())))
                loss = last.float().mean().cpu() + total
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    simulated_device.set_delays(3, 2000)
    expected = train(tier="cpu")
    for _ in range(3):
        assert train(tier="cpu", param_tier="cpu") == expected


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_blocks_have_the_same_bits(use_reentrant: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24)) for _ in range(4)))
        return blocks.to(DEVICE)

    def run(options: dict[str, Any], *, checkpoints: bool) -> list[float]:
        model = make()
        found = []
        with OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options) as optimizer:
            for number in range(4):
                x = torch.linspace(-1, 1, 72, dtype=torch.bfloat16, device=DEVICE).view(3, 24).mul(number + 1)
                x.requires_grad_()
                for block in model:
                    x = checkpoint(block, x, use_reentrant=use_reentrant) if checkpoints else block(x)
                loss = x.float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    expected = run(TIERS["cpu"], checkpoints=False)
    for options in TIERS.values():
        assert run(options, checkpoints=True) == expected


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_tiles_have_the_bits_of_tiles_on_the_cpu(param_tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tier": "nvme", "commit_every": None, "param_tier": param_tier}
    options["tuning"] = Tuning(chunk="4KiB", tile="2KiB")
    expected = losses("mlp", options | {"path": tmp_path / "cpu"}, device="cpu")
    assert losses("mlp", options | {"path": tmp_path / "device"}) == expected


@pytest.mark.parametrize("tier", TIERS)
def test_written_gradients_and_parameters_count_as_in_plain_torch(tier: str) -> None:
    found = []
    for options in (None, TIERS[tier]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = plain if options is None else OffloadZero(model, plain, compute_dtype=torch.float32, **options)
        for number in range(3):
            (model(torch.full((2, 8), number + 1.0, device=DEVICE)) ** 2).mean().backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad.clamp_(-0.01, 0.01)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
        found.append([param.detach().cpu().clone() for param in model.parameters()])
        if isinstance(optimizer, OffloadZero):
            optimizer.close()
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saved", [False, True], ids=["recomputed", "all saved"])
@pytest.mark.parametrize("has_path", [False, True], ids=["RAM", "RAM and files"])
def test_activations_beyond_the_devices_memory_go_on_to_slower_tiers(
    has_path: bool, saved: bool, tmp_path: Path
) -> None:
    """And change no bit; where no tier is left, a forward says so, and the run goes on after it."""
    region = 4096 * ((13 if has_path else 24) if saved else (1 if has_path else 2))
    expected = losses("gpt", {"tier": "cpu"})
    options: dict[str, Any] = {"tier": "cpu", "activation_tier": "device", "activation_memory": region}
    options["tuning"] = Tuning(chunk="4KiB", recompute=not saved)
    if has_path:
        options |= {"path": tmp_path / "run", "commit_every": 0}
    found: dict[str, Any] = {}

    def step(model: nn.Module, optimizer: OffloadZero, draw: Callable[[], torch.Tensor]) -> float:
        if not found and not has_path:
            tokens = torch.zeros(2, 16, dtype=torch.long, device=DEVICE)
            kept = [model(tokens, tokens)[1]]  # and no backward
            with pytest.raises(BudgetError, match="activation_memory"):
                kept.append(model(tokens, tokens)[1])
            kept.clear()
        loss = plain_step(model, optimizer, draw)
        found.update(optimizer.stats())
        return loss

    simulated_device.set_delays(1)
    assert losses("gpt", options, step=step) == expected
    assert simulated_device.races() == []
    assert found["activation_bytes"] == 2 * region
    assert found["peak_activation_bytes"] > region * (2 if has_path else 1)
    assert (found["activation_read_bytes"] > 0) is has_path


@pytest.mark.parametrize(
    ("place", "recompute"),
    products(["device", "cpu", "nvme"], [True, False], often=[("device", False), ("nvme", True)]),
)
def test_activations_of_changing_lengths_leave_no_holes_on_the_device(
    place: str, recompute: bool, tmp_path: Path
) -> None:
    """What the allocator has and nobody uses does not grow with the steps, nor does what is used."""
    width, blocks, segment = 32, 4, 2 << 20
    before = torch.accelerator.memory_allocated(DEVICE)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks))).to(DEVICE)
    options: dict[str, Any] = {"activation_tier": place, "activation_memory": "8MiB"}
    if place == "nvme":
        options |= {"path": tmp_path / "run", "activation_memory": "1MiB", "commit_every": None}
    unused, used = [], []
    with OffloadZero(model, compute_dtype=torch.float32, tuning=Tuning(recompute=recompute), **options) as optimizer:
        for step in range(200):
            x = torch.ones(256 * (1 + step * 7 % 16), width, device=DEVICE)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del x
            torch.accelerator.synchronize()
            used.append(torch.accelerator.memory_allocated(DEVICE))
            unused.append(torch.accelerator.memory_reserved(DEVICE) - used[-1])
        stats = optimizer.stats()
        model.cpu()
        assert torch.accelerator.memory_allocated(DEVICE) <= before + 4096  # it parks
    assert stats["peak_activation_bytes"] >= blocks * 4096 * width * 4
    assert (stats["activation_read_bytes"] > 0) is (place == "nvme")
    for found in (used, unused):
        assert max(found[100:]) <= max(found[:100]) + segment  # how many copies are under way depends on their time


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_run_that_tries_its_steps_and_is_killed_goes_on_with_the_same_bits(states: str, tmp_path: Path) -> None:
    """Some of its commits are between a backward and its step."""
    run_killed("killed", 8, 20, tmp_path, 1, states, "trials")


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_of_training_is_recorded_into_a_graph(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA says so of a stream while torch.cuda.graph records it. What it records, replays without Python."""
    recorded = False

    def is_capturing() -> bool:
        return recorded

    monkeypatch.setattr(torch.get_device_module(DEVICE), "is_current_stream_capturing", is_capturing, raising=False)
    model = models.build("mlp").to(DEVICE)
    with OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **TIERS[tier]) as optimizer:
        batches = models.losses("mlp", model, str(DEVICE))
        found = []
        for _ in range(3):
            recorded = True
            with pytest.raises(ConfigError, match=r"a forward .* is being recorded into a graph of simulated:0"):
                next(models.losses("mlp", model, str(DEVICE)))()
            recorded = False
            loss = next(batches)()
            loss.backward()
            recorded = True
            with pytest.raises(ConfigError, match=r"step\(\) is being recorded into a graph of simulated:0"):
                optimizer.step()
            recorded = False
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found == losses("mlp", TIERS[tier], steps=3)
