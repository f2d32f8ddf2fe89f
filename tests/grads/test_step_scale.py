"""The factors of a step by themselves: what torch's own GradScaler and clipping make of plain gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.optim.scale import StepScale
from offload.ranks.communicator import SingleProcess

NAN = math.nan


def plain_gradients() -> list[nn.Parameter]:
    """fp64: a factor that is rounded once more or less shows."""
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.zeros(numel, dtype=torch.float64)) for numel in (5, 1, 300)]
    for param in params:
        param.grad = torch.randn(param.numel(), generator=generator, dtype=torch.float64) * 40
    return params


def grads_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad.clone() for param in params if param.grad is not None]


def norm_under(scale: StepScale, grads: list[Tensor]) -> float:
    return math.sqrt(math.fsum(float((grad * scale.of(number)).square().sum()) for number, grad in enumerate(grads)))


def test_a_new_scale_takes_gradients_as_they_are() -> None:
    scale = StepScale()
    assert (scale.common, scale.of(7), scale.relative(7)) == (1.0, 1.0, 1.0)
    assert scale.is_common
    assert not scale.is_set
    assert not scale.is_fixed_for(0)


def test_unscaling_multiplying_and_clipping_is_what_torch_does_to_the_gradients() -> None:
    params = plain_gradients()
    made = grads_of(params)
    scale = StepScale()
    # As torch: unscale all, multiply one, clip all twice.
    scale.unscale(1 / 1024)
    scale.multiply(2, 3.0)
    for param in params:
        assert param.grad is not None
        param.grad /= 1024
    assert params[2].grad is not None
    params[2].grad *= 3.0
    for max_norm in (0.5, 0.125):
        scale.clip_to(max_norm, norm_under(scale, made))
        nn.utils.clip_grad_norm_(params, max_norm)
    for number, (grad, expected) in enumerate(zip(made, grads_of(params), strict=True)):
        torch.testing.assert_close(grad * scale.of(number), expected, rtol=1e-14, atol=0)
    assert scale.of(2) == scale.common * scale.relative(2)
    assert scale.of(0) == scale.common < 1 / 1024


def test_a_norm_below_the_limit_and_one_that_is_nan_clip_nothing() -> None:
    for norm in (0.5, NAN):
        scale = StepScale()
        scale.clip_to(1.0, norm)
        assert scale.common == 1.0
        assert scale.clip == 1.0, "it was clipped, by 1"
        assert scale.is_set
        assert not scale.is_fixed_for(0), "more may be added"


def test_an_infinite_norm_clips_to_zero_as_in_torch() -> None:
    scale = StepScale()
    scale.clip_to(1.0, math.inf)
    scale.multiply(0, 5.0)
    assert scale.common == scale.of(0) == 0.0


@pytest.mark.parametrize("inverse", [0.0, -1.0, math.inf, NAN])
def test_a_loss_scale_without_an_inverse_is_refused_and_changes_nothing(inverse: float) -> None:
    scale = StepScale()
    for refuses in (scale.unscale, scale.common_if_unscaled):
        with pytest.raises(ConfigError, match="make a new GradScaler"):
            refuses(inverse)
    assert not scale.is_set


def test_a_loss_scale_is_divided_out_once_and_before_clipping() -> None:
    scale = StepScale()
    scale.unscale(0.25)
    with pytest.raises(ConfigError, match="divided out twice"):
        scale.unscale(0.25)
    scale.unscale(1.0)  # scaler.step() only asks
    assert scale.common == 0.25

    clipped = StepScale()
    clipped.clip_to(1.0, 4.0)
    with pytest.raises(ConfigError, match=r"clip_grad_norm_\(\) came before"):
        clipped.unscale(0.5)
    assert clipped.unscaled is None


def test_asking_for_a_factor_changes_nothing_and_gives_what_unscaling_makes() -> None:
    scale = StepScale()
    assert scale.common_if_unscaled(1 / 3) == 1 / 3
    assert not scale.is_set
    scale.unscale(1 / 3)
    assert scale.common == 1 / 3


def test_a_factor_of_one_gradient_keeps_no_other_from_coming() -> None:
    scale = StepScale()
    scale.multiply(2, 0.5)
    assert scale.is_fixed_for(2)
    assert not scale.is_fixed_for(0)
    scale.forget(2)
    assert not scale.is_set


@pytest.mark.parametrize(("inverse", "stays"), [(1.0, False), (0.5, True)])
def test_a_question_of_the_scaler_is_taken_back_and_its_unscaling_stays(inverse: float, stays: bool) -> None:
    scale = StepScale()
    scale.unscale(inverse)
    assert scale.is_fixed_for(0)
    scale.take_back_unit()
    assert scale.is_fixed_for(0) is stays


def test_a_gradient_whose_values_were_written_is_used_as_it_is() -> None:
    scale = StepScale()
    scale.clip_to(1.0, 7.0)
    scale.multiply(1, 6.0)
    scale.use_as_is(1)
    assert scale.of(1) == pytest.approx(1.0, rel=1e-15)
    assert scale.of(0) < 0.2
    scale.reset()
    scale.multiply(1, 6.0)
    scale.use_as_is(1)
    assert not scale.is_set, "a factor of 1 is none"


def test_reset_drops_all_factors() -> None:
    scale = StepScale()
    scale.unscale(0.5)
    scale.clip_to(1.0, 8.0)
    scale.multiply(3, 2.0)
    scale.reset()
    assert not scale.is_set
    assert (scale.common, scale.of(3)) == (1.0, 1.0)


class Ranks(SingleProcess):
    """Rank 0 among others, which send `others`."""

    def __init__(self, *others: list[float]) -> None:
        super().__init__()
        self.others = others

    def all_gather(self, values: Tensor) -> Tensor:
        """What follows the factors is alike."""
        told = ((torch.tensor(row, dtype=values.dtype), values[len(row) :]) for row in self.others)
        return torch.stack([values, *map(torch.cat, told)])


def test_a_rank_without_a_gradient_gets_the_factor_of_the_others() -> None:
    scale = StepScale()
    scale.multiply(0, 2.0)
    # This rank has gradients of 0 and 2, the others of 0 and 1.
    assert scale.agree(Ranks([2.0, 0.5, NAN], [2.0, 0.5, NAN]), [0, 2], ["a", "b", "c"], "alike")
    assert [scale.relative(number) for number in range(3)] == [2.0, 0.5, 1.0]


@pytest.mark.parametrize(("mine", "other"), [(2.0, 1.0), (2.0, 3.0), (1.0, 3.0)])
def test_different_factors_of_one_gradient_are_refused_by_its_name(mine: float, other: float) -> None:
    scale = StepScale()
    scale.multiply(1, mine)
    low, high = sorted((mine, other))
    with pytest.raises(ConfigError, match=rf"the gradient of b was multiplied by {low:g} and by {high:g} on the ranks"):
        scale.agree(Ranks([1.0, other]), [0, 1], ["a", "b"], "alike")
