from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.errors import GradientMovedError
from offload.module.marker import MovedGradient, is_moved


@pytest.fixture
def param() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))


def test_a_marker_fits_where_a_gradient_was_and_holds_no_memory(param: nn.Parameter) -> None:
    marker = MovedGradient.of(param, "head.weight")
    param.grad = marker
    assert param.grad is marker
    assert is_moved(param.grad)
    assert repr(param.grad) == "MovedGradient(head.weight)"


def test_a_marker_fits_a_parameter_of_any_strides_and_shape() -> None:
    for tensor in (torch.ones(()), torch.ones(0), torch.ones(2, 3).t(), torch.ones(1, 2, 3, 4).contiguous(
        memory_format=torch.channels_last
    )):  # fmt: skip
        param = nn.Parameter(tensor)
        param.grad = MovedGradient.of(param, "p")
        assert is_moved(param.grad)


def test_what_is_no_marker_is_told_apart(param: nn.Parameter) -> None:
    assert not is_moved(None)
    assert not is_moved(torch.ones(3, 4))
    assert not is_moved(param)


@pytest.mark.parametrize("use", ["shape", "dtype", "device", "is_sparse", "data", "T", "requires_grad", "layout"])
def test_even_looking_at_it_raises(param: nn.Parameter, use: str) -> None:
    marker = MovedGradient.of(param, "head.weight")
    with pytest.raises(GradientMovedError, match=r"head\.weight"):
        getattr(marker, use)


def test_the_error_names_operation_parameter_and_remedy(param: nn.Parameter) -> None:
    marker = MovedGradient.of(param, "head.weight")
    with pytest.raises(GradientMovedError) as caught:
        torch.add(torch.ones(3, 4), other=marker)
    for part in ("add", "head.weight", "optimizer.clip_grad_norm_(max_norm)", "optimizer.grad(p)"):
        assert part in str(caught.value)
    with pytest.raises(GradientMovedError, match=r"head\.weight"):
        torch.stack([torch.ones(3, 4), marker])
