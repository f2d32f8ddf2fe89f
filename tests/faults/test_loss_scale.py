"""A GradScaler that is used in every wrong way: a typed error each, and never a number that was not meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero
from offload.errors import AccumulationError, ConfigError, NonFiniteGradientError
from tests.faults.conftest import Make, Tiny, assert_same, batch, bits

FP16 = {"compute_dtype": torch.float16}


def scaler_of(scale: float = 256.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def loss_of(model: nn.Module, seed: int = 0, by: float = 1.0) -> Tensor:
    found: Tensor = model(batch(seed)).float().square().mean() * by
    return found


def backward(model: nn.Module, scaler: torch.amp.GradScaler, seed: int = 0, by: float = 1.0) -> None:
    scaler.scale(loss_of(model, seed, by)).backward()


def step(model: nn.Module, optimizer: OffloadZero, scaler: torch.amp.GradScaler, seed: int = 0) -> None:
    backward(model, scaler, seed)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_overflow_skips_the_step_and_halves_the_scale(
    dtype: torch.dtype, nonfinite: str, unscales: bool, make: Make
) -> None:
    model = Tiny()
    optimizer = make(model, nonfinite=nonfinite, compute_dtype=dtype)
    scaler = scaler_of()
    step(model, optimizer, scaler)
    before = bits(model, optimizer)
    backward(model, scaler, 1, by=math.inf)
    if unscales:
        scaler.unscale_(optimizer)
        assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
        assert optimizer.grad(model.middle.weight).isnan().any()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert optimizer.grad(model.middle.weight) is None
    optimizer.zero_grad()
    assert_same(bits(model, optimizer), before)
    stats = optimizer.stats()
    assert (stats["step"], stats["skipped_steps"]) == (1, 1)
    # As if the bad batch had never been, but for the scale.
    step(model, optimizer, scaler, 2)
    optimizer.close()
    other = Tiny()
    control, scaler = make(other, compute_dtype=dtype), scaler_of()
    step(other, control, scaler)
    scaler.update(128.0)
    step(other, control, scaler, 2)
    assert_same(bits(model), bits(other))


def test_gradients_and_norm_are_unscaled_from_unscale_on(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, **FP16)
    scaler = scaler_of(64.0)
    backward(model, scaler)
    held = optimizer.grad(model.middle.weight)
    scaler.unscale_(optimizer)
    unscaled = optimizer.grad(model.middle.weight)
    assert torch.equal(unscaled * 64, held)
    lines = [optimizer.grad(param).double().flatten() for param in model.parameters()]
    norm = optimizer.clip_grad_norm_(1e-3)
    assert norm.item() == pytest.approx(torch.cat(lines).norm().item(), rel=1e-6)
    assert optimizer.grad(model.middle.weight).norm() < 1.1e-3 < unscaled.norm()
    scaler.step(optimizer)
    scaler.update()


def test_fp16_without_a_loss_scale_is_refused_by_name(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, **FP16)
    before = bits(model, optimizer)
    loss_of(model).backward()
    with pytest.raises(ConfigError, match=r"torch\.amp\.GradScaler.*init_scale=1\.0"):
        optimizer.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(ConfigError, match=r"torch\.amp\.GradScaler"):
        off.step(optimizer)
    optimizer.zero_grad()
    assert_same(bits(model, optimizer), before)
    optimizer.step()  # of nothing
    # A scale of 1 can be said, and is one.
    scaler = scaler_of(1.0, growth_interval=2**31 - 1)
    loss_of(model).backward()
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(0.1)
    scaler.step(optimizer)
    assert optimizer.stats()["step"] == 2


def test_a_disabled_scaler_is_not_there(make: Make) -> None:
    model, other = Tiny(), Tiny()
    off = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = make(model)
    backward(model, off)
    off.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(1e-2)
    off.step(optimizer)
    off.update()
    found = bits(model, optimizer)
    optimizer.close()
    control = make(other)
    loss_of(other).backward()
    assert torch.equal(control.clip_grad_norm_(1e-2), norm)
    control.step()
    assert_same(bits(other, control), found)


def test_clipping_the_gradients_of_a_scaled_loss_is_refused(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, **FP16)
    scaler = scaler_of()
    backward(model, scaler)
    with pytest.raises(ConfigError, match=r"scaler\.unscale_\(optimizer\)"):
        optimizer.clip_grad_norm_(1.0)
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    assert optimizer.stats()["step"] == 1


@pytest.mark.parametrize("late", [False, True])
def test_so_it_is_where_a_scale_could_not_be_known_of(late: bool, make: Make) -> None:
    """In bf16 a GradScaler need not be there; when one comes after clipping, that is known."""
    model = Tiny()
    optimizer = make(model)
    before = bits(model, optimizer)
    scaler = scaler_of()
    backward(model, scaler)
    optimizer.clip_grad_norm_(1e9)
    with pytest.raises(ConfigError, match="came before the loss scale was divided out"):
        scaler.unscale_(optimizer) if late else scaler.step(optimizer)
    optimizer.zero_grad()
    assert_same(bits(model, optimizer), before)


def _assigned_beside(model: Tiny, optimizer: OffloadZero, scaler: torch.amp.GradScaler) -> None:
    backward(model, scaler)
    model.middle.weight.grad = torch.ones_like(model.middle.weight, dtype=torch.bfloat16)
    scaler.step(optimizer)


def _some_only(model: Tiny, optimizer: OffloadZero, scaler: torch.amp.GradScaler) -> None:
    backward(model, scaler)
    scaler.unscale_(torch.optim.SGD(model.last.parameters(), lr=0.1))


def _old(model: Tiny, optimizer: OffloadZero, scaler: torch.amp.GradScaler) -> None:
    backward(model, scaler)
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.step(optimizer)


def _of_other_gradients(model: Tiny, optimizer: OffloadZero, scaler: torch.amp.GradScaler) -> None:
    backward(model, scaler)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    backward(model, scaler)
    scaler.step(optimizer)


def _halved_to_nothing(model: Tiny, optimizer: OffloadZero, scaler: torch.amp.GradScaler) -> None:
    backward(model, scaler)
    scaler.update(2.0**-130)  # whose inverse is not of fp32
    scaler.step(optimizer)


def _grown_for_ever(model: Tiny, optimizer: OffloadZero, scaler: torch.amp.GradScaler) -> None:
    backward(model, scaler)
    scaler.update(math.inf)
    scaler.unscale_(optimizer)


WRONG: list[tuple[Callable[[Tiny, OffloadZero, torch.amp.GradScaler], None], str]] = [
    (_assigned_beside, r"middle\.weight, which was assigned to p\.grad by hand"),
    (_some_only, r"but not that of first\.weight"),
    (_old, "divided out twice"),
    (_of_other_gradients, "are not those that"),
    (_halved_to_nothing, "the inverse of inf"),
    (_grown_for_ever, "the inverse of 0"),
]


@pytest.mark.parametrize(("use", "message"), WRONG, ids=[use.__name__ for use, _ in WRONG])
def test_a_scaler_used_wrongly_changes_nothing(
    use: Callable[[Tiny, OffloadZero, torch.amp.GradScaler], None], message: str, make: Make
) -> None:
    model = Tiny()
    optimizer = make(model)
    before = bits(model, optimizer)
    with pytest.raises(ConfigError, match=message):
        use(model, optimizer, scaler_of())
    optimizer.zero_grad()
    assert_same(bits(model, optimizer), before)
    step(model, optimizer, scaler_of())
    other = Tiny()
    optimizer.close()
    step(other, make(other), scaler_of())
    assert_same(bits(model), bits(other))


def test_a_step_that_raised_can_be_made_again_with_the_same_scale(make: Make) -> None:
    """torch leaves on the optimizer what it handed over, and would multiply the next scale with it."""
    found = []
    for fails in (False, True):
        model = Tiny()
        optimizer = make(model, **FP16)
        scaler = scaler_of()
        backward(model, scaler)
        if fails:
            optimizer.param_groups[0]["maximize"] = True
            with pytest.raises(ConfigError, match="maximize"):
                scaler.step(optimizer)
            optimizer.param_groups[0]["maximize"] = False
            with pytest.raises(ConfigError, match=r"torch\.amp\.GradScaler"):
                optimizer.step()  # the scaler has met these gradients, and divided nothing out
        scaler.step(optimizer)
        scaler.update()
        found.append(bits(model, optimizer))
        optimizer.close()
    assert_same(*found)


def test_a_gradient_after_unscaling_is_refused(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, accumulation=2, **FP16)
    scaler = scaler_of(1.0)  # for which it is no other factor, but its overflow would go unseen
    backward(model, scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(AccumulationError, match="unscale_"):
        backward(model, scaler, 1)


def test_gradients_assigned_by_hand_are_unscaled_once(make: Make) -> None:
    found = []
    for by_hand in (False, True):
        model = Tiny()
        optimizer = make(model)
        scaler = scaler_of()
        backward(model, scaler)
        if by_hand:
            grads = [optimizer.grad(param).bfloat16() for param in model.parameters()]
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
        scaler.step(optimizer)
        scaler.update()
        found.append(bits(model, optimizer))
        optimizer.close()
    assert_same(*found)


def test_another_scaler_that_found_an_inf_skips_the_step(make: Make) -> None:
    """Such as one that asks other models, too: found_inf is its word."""
    model = Tiny()
    optimizer = make(model, **FP16)
    before = bits(model, optimizer)
    scaler = scaler_of()
    backward(model, scaler)
    scaler.unscale_(optimizer)
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert_same(bits(model, optimizer), before)
    assert (optimizer.stats()["skipped_steps"], scaler.get_scale()) == (1, 128.0)


def test_without_the_scalers_step_an_overflow_is_an_error(make: Make) -> None:
    model = Tiny()
    optimizer = make(model, **FP16)
    scaler = scaler_of()
    backward(model, scaler, by=math.inf)
    scaler.unscale_(optimizer)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:another optimizer, SGD, trains the held model")
def test_a_scaler_and_an_optimizer_that_is_not_this_one(make: Make) -> None:
    model = Tiny()
    optimizer = make(model)
    scaler = scaler_of()
    backward(model, scaler)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, grad = model.first.weight, optimizer.grad(model.first.weight) / scaler.get_scale()
    expected = weight.detach().float() - 0.1 * grad
    scaler.step(other)  # as with a plain model
    torch.testing.assert_close(weight.detach().float(), expected, rtol=2**-7, atol=2**-12)
    scaler.update()
    optimizer.zero_grad()
    step(model, optimizer, scaler)
    assert optimizer.stats()["step"] == 1


def test_a_step_divides_the_scale_out_as_unscale_does(make: Make) -> None:
    """One that is no power of two, whose inverse is rounded."""
    found = []
    for unscales in (False, True):
        model = Tiny()
        optimizer = make(model, **FP16)
        scaler = scaler_of(300.1)
        backward(model, scaler)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append(bits(model, optimizer))
        optimizer.close()
    assert_same(*found)
