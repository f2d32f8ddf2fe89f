from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.layout import ParamSpec, build
from offload.module.parameters import Parameters, is_dense, line_like, line_of, shaped_like

shapes = st.lists(st.integers(1, 4), max_size=4)


@given(shapes, st.randoms())
def test_a_line_is_the_memory_order_and_comes_back_to_the_shape(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    param = torch.randn(shape).permute(order)
    assert is_dense(param)
    line = line_of(param)
    assert line.shape == (param.numel(),)
    assert line.data_ptr() == param.data_ptr()
    assert torch.equal(shaped_like(param, line), param)
    # A gradient with other strides comes into the parameter's order.
    gradient = torch.randn(param.shape)
    assert torch.equal(shaped_like(param, line_like(param, gradient)), gradient)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(4, 6)[:, ::2], False),
        (torch.ones(4, 6)[1:3], True),
        (torch.ones(4, 6)[:, 1:3], False),
        (torch.ones(1).expand(5), False),
        (torch.ones(()), True),
    ],
)
def test_holes_and_overlaps_are_seen(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


def taken(*tensors: Tensor, dtype: torch.dtype = torch.bfloat16) -> Parameters:
    params = [nn.Parameter(tensor) for tensor in tensors]
    layout = build([ParamSpec(f"p{n}", p.numel(), "", dtype, 0) for n, p in enumerate(params)], 1024)
    parameters = Parameters(layout, params, torch.device("cpu"))
    parameters.make_dense(0)
    parameters.attach(0)
    return parameters


def test_parameters_become_views_of_one_tensor_with_values_shapes_and_strides_kept() -> None:
    tensors = [torch.randn(3, 5), torch.randn(4, 2).t(), torch.randn(()), torch.randn(8, 6)[:, ::2]]
    parameters = taken(*[tensor.clone() if is_dense(tensor) else tensor for tensor in tensors])
    for param, tensor in zip(parameters.params, tensors, strict=True):
        assert param.shape == tensor.shape
        assert torch.equal(param, tensor.bfloat16())
        assert param.untyped_storage().data_ptr() == parameters.flats[0].untyped_storage().data_ptr()
        assert param.is_leaf
        assert param.requires_grad
    parameters.require_attached()
    assert parameters.written_outside() == []


def test_writes_from_outside_are_seen_once() -> None:
    parameters = taken(torch.zeros(3), torch.zeros(4), torch.zeros(5))
    with torch.no_grad():
        parameters.params[1].add_(1)
        parameters.params[2][0] = 5
    assert parameters.written_outside() == [1, 2]
    parameters.written_here([1, 2])
    assert parameters.written_outside() == []


def test_what_is_written_past_autograd_is_announced_to_it() -> None:
    parameters = taken(torch.ones(3))
    (param,) = parameters.params
    product = (param * param).sum()
    parameters.flats[0].zero_()
    parameters.written_here([0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_parameter_that_moved_or_left_is_named() -> None:
    parameters = taken(torch.zeros(3), torch.zeros(4))
    model = nn.ParameterList(parameters.params)
    parameters.require_in(model)
    with pytest.raises(ConfigError, match="p1 is no longer in the model"):
        parameters.require_in(nn.ParameterList(parameters.params[:1]))
    parameters.params[1].data = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="p1 was moved"):
        parameters.require_attached()
