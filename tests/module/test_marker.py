from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from offload.errors import GradientMovedError
from offload.module.marker import MovedGradient, Unscale, is_moved


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


@pytest.mark.parametrize("use", ["shape", "data", "T", "requires_grad", "layout", "is_cuda", "grad", "mT"])
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


def test_a_grad_scaler_finds_what_it_looks_for() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        marker = MovedGradient.of(nn.Parameter(torch.ones(3, dtype=dtype)), "head.weight")
        assert (marker.dtype, marker.device, marker.is_sparse) == (torch.float32, torch.device("cpu"), False)


def test_a_grad_scaler_is_answered_once_for_all_markers() -> None:
    asked: list[tuple[int, float, float]] = []

    def unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> bool:
        asked.append((len(grads), found_inf.item(), inverse.item()))
        found_inf.fill_(1.0)
        return True

    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float16, torch.float32, torch.bfloat16)]
    for param in params:
        param.grad = MovedGradient.of(param, "p", unscale)
    optimizer, scaler = torch.optim.SGD(params), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.update()
    assert asked == [(3, 0.0, 0.125)]
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("unscale", [None, lambda grads, found_inf, inverse: False], ids=["none", "gone"])
def test_a_marker_that_nobody_stands_behind_refuses_a_grad_scaler(param: nn.Parameter, unscale: Unscale | None) -> None:
    param.grad = MovedGradient.of(param, "head.weight", unscale)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(GradientMovedError, match=r"head\.weight"):
        scaler.unscale_(torch.optim.SGD([param]))
