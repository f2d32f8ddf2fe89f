"""What goes wrong in training: a typed error or the same bits, never a wrong number."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import (
    AccumulationError,
    ClosedError,
    ConfigError,
    CorruptionError,
    GradientMovedError,
    InterruptedStepError,
    NonFiniteGradientError,
    OffloadZero,
    ResumeError,
    TierIOError,
    Tuning,
)
from offload.sizes import MIB, PAGE_BYTES
from tests.faults.conftest import SMALL, Make, Tiny, assert_same, backward, batch, bits, one_step
from tests.support.faulty_engine import FaultyEngine
from tests.support.processes import holds_in_child, proportional_bytes, region_of
from tests.support.run_files import swap_in

# Gradients that are not finite.


def poison(model: nn.Module, value: float) -> None:
    (model(batch(1)).sum() + model.middle.weight[3, 5].float() * value).backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_that_is_not_finite_raises_and_changes_no_bit(
    value: float, accumulation: int, clip: bool, make: Make
) -> None:
    model = Tiny()
    optimizer = make(model, accumulation=accumulation)
    one_step(model, optimizer)
    before = bits(model, optimizer)
    poison(model, value)
    with pytest.raises(NonFiniteGradientError, match=r"middle\.weight") as caught:
        optimizer.clip_grad_norm_(1.0) if clip else optimizer.step()
    assert caught.value.parameter == "middle.weight"
    optimizer.zero_grad()
    assert_same(bits(model, optimizer), before)
    assert optimizer.stats()["step"] == 1
    one_step(model, optimizer, seed=2)
    # As if the bad batch had never been.
    other = Tiny()
    optimizer.close()
    control = make(other, accumulation=accumulation)
    one_step(other, control)
    one_step(other, control, seed=2)
    assert_same(bits(model), bits(other))


def test_skipping_counts_and_changes_no_bit(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, nonfinite="skip")
    one_step(model, optimizer)
    before = bits(model, optimizer)
    for _ in range(2):
        poison(model, float("nan"))
        assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(bits(model, optimizer), before)
    assert optimizer.stats()["skipped_steps"] == 2
    assert optimizer.stats()["step"] == 1
    one_step(model, optimizer)
    assert optimizer.stats()["step"] == 2


# Gradients used as if they were there.

USES: dict[str, Callable[[nn.Module, list[nn.Parameter]], object]] = {
    "clip_grad_norm_": lambda m, p: torch.nn.utils.clip_grad_norm_(p, 1.0),
    "clip_grad_norm_ foreach": lambda m, p: torch.nn.utils.clip_grad_norm_(p, 1.0, foreach=True),
    "clip_grad_value_": lambda m, p: torch.nn.utils.clip_grad_value_(p, 1.0),
    "get_total_norm": lambda m, p: torch.nn.utils.get_total_norm([x.grad for x in p if x.grad is not None]),
    "norm": lambda m, p: p[0].grad.norm(),
    "mul_": lambda m, p: p[0].grad.mul_(0.5),
    "data": lambda m, p: p[0].grad.data.mul_(0.5),
    "item": lambda m, p: p[0].grad[0, 0].item(),
    "abs sum": lambda m, p: sum(x.grad.abs().sum() for x in p),
    "clone": lambda m, p: p[0].grad.clone(),
    "detach": lambda m, p: p[0].grad.detach(),
    "zero_": lambda m, p: p[0].grad.zero_(),
    "cpu": lambda m, p: p[0].grad.cpu(),
    "numpy": lambda m, p: p[0].grad.float().numpy().sum(),
    "isnan": lambda m, p: torch.isnan(p[0].grad).any(),
    "cat": lambda m, p: torch.cat([x.grad.flatten() for x in p]),
    "add": lambda m, p: p[0] + p[0].grad,
    "foreach": lambda m, p: torch._foreach_norm([x.grad for x in p]),
    "compare": lambda m, p: torch.equal(p[0].grad, p[0]),
    "bool": lambda m, p: bool((p[0].grad == 0).all()),
    "save": lambda m, p: torch.save(p[0].grad, io.BytesIO()),
    "deepcopy": lambda m, p: copy.deepcopy(p[0].grad),
    "SGD": lambda m, p: torch.optim.SGD(p, lr=0.1).step(),
    "Adam fused": lambda m, p: torch.optim.Adam(p, fused=True).step(),
    "Adam foreach": lambda m, p: torch.optim.Adam(p, foreach=True).step(),
}


@pytest.mark.parametrize("use", USES)
def test_using_a_gradient_does_what_it_does_to_a_plain_one(use: str, make: Make) -> None:
    model, plain = Tiny(), Tiny().bfloat16()
    optimizer = make(model)
    for one in (model, plain):
        one(batch(0).bfloat16()).float().square().mean().backward()
    found, expected = (USES[use](one, list(one.parameters())) for one in (model, plain))
    if isinstance(expected, Tensor):
        torch.testing.assert_close(torch.as_tensor(found).float(), expected.float(), rtol=1e-2, atol=0)
    elif isinstance(expected, float | bool):
        assert found == expected
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.clone(), other.grad, rtol=1e-2, atol=0)
        torch.testing.assert_close(param.detach().clone(), other.detach(), rtol=1e-2, atol=1e-6)
    optimizer.step()
    model.first.weight.grad.add(0)
    grad = model.first.weight.grad
    optimizer.zero_grad()
    with pytest.raises(
        GradientMovedError, match=r"first\.weight was used by step\(\).*between backward\(\) and step\(\)"
    ):
        grad.clone()


def test_a_gradient_can_be_shown_and_told_from_none(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    backward(model)
    assert repr(model.first.weight.grad) == repr(model.first.weight.grad.clone())
    optimizer.step()
    grad = model.first.weight.grad
    assert grad is not None
    optimizer.zero_grad()
    assert "the gradient of first.weight" in f"{grad!r}"
    assert model.first.weight.grad is None


def test_the_old_optimizers_step_after_backward_raises_and_changes_nothing(make: Make) -> None:
    model = Tiny()
    old = torch.optim.AdamW(model.parameters())
    optimizer = make(model, old)
    before = bits(model)
    backward(model)
    with pytest.raises(GradientMovedError):
        old.step()
    assert_same(bits(model), before)
    optimizer.step()
    assert not torch.equal(model.state_dict()["first.weight"], before["first.weight"])


# Backward passes.


def test_an_undeclared_second_backward_raises_and_can_be_dropped(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    backward(model)
    with pytest.raises(AccumulationError, match=r"2nd time.*accumulation=1.*accumulation=N"):
        backward(model)
    optimizer.zero_grad()
    one_step(model, optimizer)
    other = Tiny()
    optimizer.close()
    one_step(other, make(other))
    assert_same(bits(model), bits(other))


def test_one_backward_more_than_declared_raises(make: Make) -> None:
    model = Tiny()
    make(model, accumulation=3)
    for seed in range(3):
        backward(model, seed)
    with pytest.raises(AccumulationError, match=r"4th time.*accumulation=3.*accumulation=N"):
        backward(model)


def test_declared_accumulation_sums_in_fp32(make: Make) -> None:
    model, control = Tiny(), Tiny()
    optimizer = make(model, accumulation=3)
    control.load_state_dict(model.state_dict())
    control.bfloat16()
    total = torch.zeros(96, 16)
    for seed in range(3):
        backward(model, seed)
        control.zero_grad()
        control(batch(seed).bfloat16()).square().mean().backward()
        total += control.first.weight.grad.float()
    assert torch.equal(optimizer.grad(model.first.weight), total)


@pytest.mark.parametrize("drop", ["optimizer", "model", "none"])
def test_dropped_gradients_leave_nothing_behind(drop: str, make: Make) -> None:
    def run(spoil: bool) -> dict[str, Tensor]:
        model = Tiny()
        optimizer = make(model, accumulation=2)
        if spoil:
            backward(model, 5)
            # The factor belongs to these gradients and has to go with them.
            optimizer.clip_grad_norm_(1e-3)
            if drop == "optimizer":
                optimizer.zero_grad()
            elif drop == "model":
                model.zero_grad()
            else:
                for param in model.parameters():
                    param.grad = None
        backward(model, 1)
        backward(model, 2)
        norm = optimizer.clip_grad_norm_(1e-2)
        assert norm > 1e-2
        optimizer.step()
        found = bits(model, optimizer)
        optimizer.close()
        return found

    assert_same(run(True), run(False))


def test_a_gradient_after_clipping_raises(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, accumulation=2)
    backward(model)
    optimizer.clip_grad_norm_(1e-3)
    with pytest.raises(AccumulationError, match="unscale, clip and divide once"):
        backward(model)


@pytest.mark.parametrize("norm", [-1.0, float("nan")])
def test_a_clip_norm_that_makes_no_sense_is_refused(norm: float, make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    backward(model)
    with pytest.raises(ConfigError, match="max_norm"):
        optimizer.clip_grad_norm_(norm)


def test_a_gradient_set_by_hand_is_used_in_place_of_the_one_that_left(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    backward(model)
    model.first.bias.grad = torch.full_like(model.first.bias, 2.0)
    assert optimizer.grad(model.first.bias).eq(2).all()
    optimizer.step()
    assert optimizer.state_of(model.first.bias)["exp_avg"].sub(0.2).abs().max() < 1e-6


def test_a_step_without_gradients_changes_nothing(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    before = bits(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm_(1.0) == 0
    assert_same(bits(model, optimizer), before)


# The model changed behind the optimizer's back.


@pytest.mark.parametrize("move", [lambda m: m.float(), lambda m: m.half(), lambda m: m.to(dtype=torch.float64)])
def test_moving_the_model_afterwards_is_refused_by_name_and_changes_nothing(
    move: Callable[[nn.Module], object], make: Make
) -> None:
    model = Tiny()
    optimizer = make(model)
    before = bits(model, optimizer)
    with pytest.raises(
        ConfigError, match=r"first\.weight is .* would become .*Leave out the call that moves or casts it"
    ):
        move(model)
    assert_same(bits(model, optimizer), before)
    one_step(model, optimizer)


def test_a_parameter_that_is_pointed_elsewhere_is_stepped_from_there(make: Make) -> None:
    found = []
    for point in (
        lambda param, value: setattr(param, "data", value),
        lambda param, value: param.data.copy_(value),
    ):
        model = Tiny()
        optimizer = make(model)
        one_step(model, optimizer)
        point(model.first.weight, model.last.weight.data.repeat(24, 1)[:, :16].clone())
        one_step(model, optimizer, seed=2)
        found.append(bits(model, optimizer))
        optimizer.close()
    assert_same(*found)


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def replace(model: nn.Module) -> None:
    model.first = nn.Linear(16, 96, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [assign, replace])
def test_putting_other_parameters_into_the_model_is_refused_by_name(
    change: Callable[[nn.Module], None], make: Make
) -> None:
    model = Tiny()
    optimizer = make(model)
    change(model)
    model(batch(0)).sum().backward()
    with pytest.raises(ConfigError, match=r"first\.weight is no longer in the model"):
        optimizer.step()


def test_what_is_loaded_into_the_model_goes_into_the_masters(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    one_step(model, optimizer)
    moments = optimizer.state_of(model.first.weight)["exp_avg"]
    untouched = optimizer.state_of(model.last.weight)["master"]
    loaded = {"first.weight": torch.randn(96, 16)}
    model.load_state_dict(loaded, strict=False)
    state = optimizer.state_of(model.first.weight)
    assert torch.equal(state["master"].bfloat16(), loaded["first.weight"].bfloat16())
    assert torch.equal(state["exp_avg"], moments)
    # A master keeps the bits that its copy does not show.
    model.load_state_dict(model.state_dict())
    assert torch.equal(optimizer.state_of(model.last.weight)["master"], untouched)
    assert not torch.equal(untouched.bfloat16().float(), untouched)
    with torch.no_grad():
        model.first.weight.mul_(0)
    one_step(model, optimizer)
    assert optimizer.state_of(model.first.weight)["master"].abs().max() < 0.01


def test_copies_of_the_model_work_without_its_optimizer(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, keep_fp32=[model.last], cpu_memory="1MiB")
    one_step(model, optimizer)
    backward(model)
    expected = model(batch(3))
    saved = io.BytesIO()
    torch.save(model, saved)
    copies = [copy.deepcopy(model), torch.load(io.BytesIO(saved.getvalue()), weights_only=False)]
    for twin in copies:
        assert torch.equal(twin(batch(3)), expected)
        assert all(param.grad is None for param in twin.parameters())
        twin(batch(3)).sum().backward()
        assert twin.first.weight.grad.abs().sum() > 0
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    model.float()
    for twin in copies:
        assert torch.equal(twin(batch(3)), expected)


def test_the_models_state_dict_is_an_ordinary_one(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    one_step(model, optimizer)
    backward(model)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    assert list(loaded) == list(Tiny().state_dict())
    plain = Tiny().bfloat16()
    plain.load_state_dict(loaded)
    assert torch.equal(plain(batch(1).bfloat16()), model(batch(1)))


def test_a_state_dict_of_another_step_is_refused(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    one_step(model, optimizer)
    with pytest.raises(ResumeError, match=r"step 0, this optimizer is at step 1|step 0 .* was never made, or is gone"):
        optimizer.load_state_dict(saved)


# Forks.


class Noise(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return batch(index)[0]


def train_from_loader(make: Make, workers: int) -> dict[str, Tensor]:
    model = Tiny()
    optimizer = make(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = torch.utils.data.DataLoader(Noise(), batch_size=8, num_workers=workers)
        for count, inputs in enumerate(loader):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if count == 15:
                break
    found = bits(model, optimizer)
    optimizer.close()
    return found


def test_forked_data_loaders_change_no_bit(make: Make) -> None:
    if sys.platform != "linux":
        pytest.skip("loaders fork on Linux")
    assert_same(train_from_loader(make, 0), train_from_loader(make, 2))


def test_forked_workers_do_not_double_the_memory(tmp_path: Path) -> None:
    model = nn.Linear(2048, 4096)
    optimizer = OffloadZero(model, tier="cpu", tuning=Tuning(threads=1))
    state = optimizer._parts.run.memory.ram.used
    assert state > 100 * MIB

    def step() -> None:
        model(torch.ones(1, 2048)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    address = optimizer._parts.run.memory.ram._slab.data_ptr()
    assert region_of(address)
    assert holds_in_child(lambda: region_of(address) == "")
    before = proportional_bytes(os.getpid())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        for _ in range(3):
            step()
        after = proportional_bytes(os.getpid()) + proportional_bytes(child)
        # The 16-bit parameters (16 MiB) and Python's own objects are copied on write; states and gradients are not.
        assert after - before < state * 3 / 4
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    optimizer.close()


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ClosedError as error:
        return "forked child" in str(error)
    return False


def test_a_forked_child_that_uses_the_optimizer_gets_an_error_and_does_not_hang(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    one_step(model, optimizer)
    loss = model(batch(0)).sum()
    calls: list[Callable[[], object]] = [
        optimizer.step,
        optimizer.synchronize,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.grad(model.first.weight),
        lambda: optimizer.state_of(model.first.weight),
        loss.backward,
    ]
    assert holds_in_child(lambda: all(refuses(call) for call in calls))

    def look_and_leave() -> bool:
        # One thread: torch's own OpenMP pool hangs in forked children, with or without this library.
        torch.set_num_threads(1)
        optimizer.close()
        return bool(torch.isfinite(model(batch(0))).all())

    assert holds_in_child(look_and_leave)
    one_step(model, optimizer)
    optimizer.synchronize()


# The disk.


def test_a_late_and_reordering_disk_changes_no_bit(make: Make, disk: FaultyEngine) -> None:
    model = Tiny()
    optimizer = make(model)
    assert optimizer.stats()["streamed_chunks"] == optimizer.stats()["chunks"] >= 5
    control = Tiny()
    plain = OffloadZero(control, tier="cpu", tuning=SMALL)
    for seed in range(5):
        one_step(model, optimizer, seed)
        one_step(control, plain, seed)
    assert_same(bits(model, optimizer), bits(control, plain))
    plain.close()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("nth", [0, 4])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_io_error_in_a_step_is_raised_at_this_and_every_later_call(
    operation: str, nth: int, code: int, make: Make, disk: FaultyEngine, path: Path
) -> None:
    model = Tiny()
    optimizer = make(model)
    one_step(model, optimizer)
    optimizer.synchronize()
    disk.fail(operation, code, nth)

    def go_on() -> None:
        one_step(model, optimizer)
        optimizer.synchronize()

    with pytest.raises(TierIOError) as first:
        go_on()
    error = first.value
    assert (error.errno, error.filename, error.operation) == (code, str(swap_in(path)), operation)
    assert error.offset % PAGE_BYTES == 0
    assert error.length > 0
    for call in (
        # First those that would need no disk.
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.grad(model.first.weight),
        optimizer.step,
        optimizer.synchronize,
        lambda: optimizer.state_of(model.first.weight),
    ):
        with pytest.raises(TierIOError) as later:
            call()
        assert later.value is error
    optimizer.close()
    with pytest.raises(ClosedError):
        optimizer.step()


@pytest.mark.parametrize("fault", ["read", "write", "lose", "tear"])
def test_damage_in_training_is_found_before_it_is_used(fault: str, make: Make, disk: FaultyEngine, path: Path) -> None:
    model = Tiny()
    optimizer = make(model)
    one_step(model, optimizer)
    optimizer.synchronize()
    if fault == "lose":
        disk.lose(nth=2)
    elif fault == "tear":
        disk.tear(PAGE_BYTES, nth=2)
    else:
        disk.flip(fault, PAGE_BYTES + 100, nth=2)

    def go_on() -> None:
        for seed in range(1, 4):
            one_step(model, optimizer, seed)

    with pytest.raises(CorruptionError) as caught:
        go_on()
    assert caught.value.file == str(swap_in(path))
    assert caught.value.chunk >= 0
    assert caught.value.offset > 0
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(CorruptionError):
            call()
    optimizer.close()


def test_a_bit_that_flips_on_the_disk_is_found(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=None)
    one_step(model, optimizer)
    optimizer.synchronize()
    with open(swap_in(path), "r+b") as file:
        file.seek(-PAGE_BYTES + 77, os.SEEK_END)  # of the last chunk, which is not read ahead
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    one_step(model, optimizer)
    with pytest.raises(CorruptionError) as caught:
        optimizer.synchronize()
    assert caught.value.chunk == 4


def test_a_file_cut_short_under_a_run_is_found(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model)
    one_step(model, optimizer)
    optimizer.synchronize()
    os.truncate(swap_in(path), 6 * PAGE_BYTES)
    one_step(model, optimizer)
    with pytest.raises(TierIOError, match="the file ends") as caught:
        optimizer.synchronize()
    assert caught.value.offset >= 6 * PAGE_BYTES


def test_a_memory_file_system_without_o_direct_trains_to_the_same_bits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(path: Path | None) -> dict[str, Tensor]:
        model = Tiny()
        optimizer = make(model, **({} if path is None else {"path": path}))
        for seed in range(3):
            one_step(model, optimizer, seed)
        found = bits(model, optimizer)
        optimizer.close()
        return found

    expected = run(None)
    place = Path(f"/dev/shm/offload-test-{os.getpid()}")
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **more: int | None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    try:
        assert_same(run(place), expected)
    finally:
        shutil.rmtree(place)


# Interrupts and endings.


def test_an_interrupt_inside_a_step_is_remembered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny()
    optimizer = make(model)
    one_step(model, optimizer)
    optimizer.synchronize()
    real, calls = optimizer._parts.step._tasks, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(optimizer._parts.step, "_tasks", interrupted)
    backward(model)
    optimizer.step()
    with pytest.raises(KeyboardInterrupt):
        model(batch(1))
    for call in (optimizer.step, optimizer.synchronize, lambda: optimizer.state_of(model.first.weight)):
        with pytest.raises(InterruptedStepError, match=r"nothing was committed.*new OffloadZero"):
            call()
    optimizer.close()
    with pytest.raises(ClosedError):
        optimizer.step()


def test_after_close_every_call_says_so(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    backward(model)
    optimizer.close()
    for call in (
        optimizer.step,
        optimizer.synchronize,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.grad(model.first.weight),
        lambda: optimizer.state_of(model.first.weight),
    ):
        with pytest.raises(ClosedError):
            call()
    assert all(param.grad is None for param in model.parameters())


def test_an_optimizer_that_was_forgotten_frees_its_path(make: Make, path: Path) -> None:
    optimizer = OffloadZero(Tiny(), path=path, tuning=SMALL)
    optimizer.synchronize()
    del optimizer
    gc.collect()
    one_step(model := Tiny(), make(model))


def test_a_tensor_that_is_not_trained_is_refused(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    with pytest.raises(ConfigError, match=r"shape \(3,\)"):
        optimizer.state_of(torch.zeros(3))
