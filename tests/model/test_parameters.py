from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import OffloadZero
from offload.devices.copies import HostCopier
from offload.errors import ConfigError
from offload.layout import ParamSpec, build
from offload.model.dense import flattened, flattened_like, is_dense
from offload.model.flat_param import FlatParameters, Streaming
from offload.model.inner import inner_tensors

shapes = st.lists(st.integers(1, 4), max_size=4)


@given(shapes, st.randoms())
def test_a_line_is_the_memory_order_and_comes_back_to_the_shape(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    param = torch.randn(shape).permute(order)
    assert is_dense(param)
    line = flattened(param)
    assert line.shape == (param.numel(),)
    assert line.data_ptr() == param.data_ptr()
    # A gradient with other strides comes into the parameter's order.
    gradient = torch.randn(param.shape)
    assert torch.equal(flattened_like(param, gradient).as_strided(param.shape, param.stride()), gradient)
    # So it does where the parameter has been pointed at memory of other strides.
    parameters = taken(param, dtype=torch.float32)
    parameters.repoint(0, gradient.contiguous())
    line = parameters.held[0].flattened(gradient)
    assert torch.equal(parameters.held[0].shaped(line), gradient)
    parameters.return_repointed()
    assert torch.equal(parameters.flats[0][: line.numel()], line)


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


def taken(*tensors: Tensor, dtype: torch.dtype = torch.bfloat16, streams: bool = False) -> FlatParameters:
    params = [nn.Parameter(tensor) for tensor in tensors]
    layout = build([ParamSpec(f"p{n}", p.numel(), "", dtype, 0) for n, p in enumerate(params)], 1024)
    streaming = Streaming(range(streams))
    parameters = FlatParameters(layout, inner_tensors(params), torch.device("cpu"), HostCopier(), streaming)
    parameters.make_dense(0)
    parameters.flatten(0)
    return parameters


def test_parameters_come_into_one_tensor_with_values_shapes_and_strides_kept() -> None:
    tensors = [torch.randn(3, 5), torch.randn(4, 2).t(), torch.randn(()), torch.randn(8, 6)[:, ::2]]
    parameters = taken(*[tensor.clone() if is_dense(tensor) else tensor for tensor in tensors])
    for param, tensor in zip(parameters.params, tensors, strict=True):
        assert param.shape == tensor.shape
        assert torch.equal(param, tensor.bfloat16())
        assert param.stride() == (tensor if is_dense(tensor) else tensor.contiguous()).stride()
        assert param.is_leaf
        assert param.requires_grad
    addresses = [param.data_ptr() for param in parameters.params]
    parameters.return_repointed()
    assert [param.data_ptr() for param in parameters.params] == addresses
    assert parameters.find_outside_writes() == []
    parameters.flats[0].fill_(7)
    assert all(param.eq(7).all() for param in parameters.params)


def test_each_has_a_storage_of_its_own_of_just_its_bytes() -> None:
    parameters = taken(torch.zeros(300), torch.zeros(7, 2), torch.zeros(()), torch.zeros(0))
    storages = [param.untyped_storage() for param in parameters.params]
    assert [storage.nbytes() for storage in storages] == [600, 28, 2, 0]
    assert len({storage._cdata for storage in storages}) == 4
    file = io.BytesIO()
    torch.save(parameters.params[1], file)
    assert len(file.getvalue()) < 2000
    memory = parameters.flats[0]
    assert {param.untyped_storage()._cdata for param in parameters.params}.isdisjoint({memory.untyped_storage()._cdata})


def test_streamed_ones_lie_in_the_storage_of_their_flat_and_get_their_own_in_the_end() -> None:
    parameters = taken(torch.ones(3), torch.ones(4, 2).t(), streams=True)
    assert {p.untyped_storage()._cdata for p in parameters.params} == {parameters.flats[0].untyped_storage()._cdata}
    kept = [param.stride() for param in parameters.params]
    parameters.become_resident()
    assert [param.untyped_storage().nbytes() for param in parameters.params] == [6, 16]
    assert [param.stride() for param in parameters.params] == kept
    assert all(param.eq(1).all() for param in parameters.params)


def test_writes_from_outside_are_seen_once() -> None:
    parameters = taken(torch.zeros(3), torch.zeros(4), torch.zeros(5))
    with torch.no_grad():
        parameters.params[1].add_(1)
        parameters.params[2][0] = 5
    assert parameters.find_outside_writes() == [1, 2]
    parameters.bump_versions([1, 2])
    assert parameters.find_outside_writes() == []


def test_writes_through_data_are_seen_once() -> None:
    parameters = taken(torch.zeros(3), torch.zeros(4))
    data = parameters.data_of(1)
    assert data.data_ptr() == parameters.params[1].data_ptr()
    version = parameters.params[1]._version
    data.add_(1)
    assert parameters.params[1]._version == version  # as in torch: a graph does not see it
    assert parameters.find_outside_writes() == [1]
    parameters.bump_versions([1])
    assert parameters.find_outside_writes() == []
    data.view(-1)[0] = 3
    assert parameters.find_outside_writes() == [1]
    parameters.forget_writes([1])
    assert parameters.find_outside_writes() == []


def test_what_is_written_past_autograd_is_announced_to_it() -> None:
    parameters = taken(torch.ones(3))
    (param,) = parameters.params
    product = (param * param).sum()
    parameters.flats[0].zero_()
    parameters.bump_versions([0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_what_was_pointed_elsewhere_is_taken_back_with_its_new_values() -> None:
    parameters = taken(torch.zeros(3), torch.zeros(4, 2).t())
    address = parameters.params[1].data_ptr()
    parameters.params[1].data = torch.arange(8.0).bfloat16().view(2, 4)
    parameters.return_repointed([0])
    assert parameters.params[1].data_ptr() != address
    parameters.return_repointed()
    assert parameters.params[1].data_ptr() == address
    assert parameters.params[1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parameters.params[1].stride() == (1, 2)
    assert parameters.find_outside_writes() == [1]


@pytest.mark.parametrize("numbers", [None, [0], [1]])
def test_parameters_that_exchanged_their_memory_keep_their_values(numbers: list[int] | None) -> None:
    parameters = taken(torch.zeros(3), torch.ones(3), torch.full((3,), 2.0))
    zeros, ones, twos = parameters.params
    addresses = [param.data_ptr() for param in parameters.params]
    zeros.data, ones.data, twos.data = ones.data, twos.data, zeros.data
    parameters.return_repointed(numbers)
    assert [param.data_ptr() for param in parameters.params] == addresses
    assert [param[0].item() for param in parameters.params] == [1, 2, 0]
    assert parameters.find_outside_writes() == [0, 1, 2]


def test_what_was_pointed_elsewhere_comes_back_without_a_new_version() -> None:
    """A graph may have saved the parameter since, and torch moves no version there."""
    parameters = taken(torch.zeros(3))
    (param,) = parameters.params
    param.data = torch.ones(3).bfloat16()
    product = (param * param).sum()
    parameters.return_repointed()
    assert parameters.find_outside_writes() == [0]
    product.backward()
    assert param.grad is not None
    assert param.grad.tolist() == [2, 2, 2]


def channels_last(model: nn.Sequential) -> None:
    model.to(memory_format=torch.channels_last)


def transposed(model: nn.Sequential) -> None:
    """In its own memory."""
    model[3].weight.data = model[3].weight.data.t()


def exchanged(model: nn.Sequential) -> None:
    """Each in the memory of the other."""
    one, other = model[0].bias, model[3].bias
    one.data, other.data = other.data, one.data


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("change", [channels_last, transposed, exchanged])
def test_a_model_whose_memory_is_in_another_order_trains_as_in_torch(
    change: Callable[[nn.Sequential], None], tier: str, tmp_path: Path
) -> None:
    """The order changes before a backward, and between a backward and its step. Losses, gradients and values count."""

    def train(hold: Callable[[nn.Module], torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
        optimizer, seen = hold(model), []
        for step in range(6):
            if step == 1:
                change(model)
            loss = (model(torch.randn(2, 3, 5, 5)) - 1).square().mean()
            loss.backward()
            if step == 4:
                change(model)
            seen += [loss, *(param.grad.clone() for param in model.parameters())]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return [value.detach() for value in (*seen, *model.state_dict().values())]

    options = {"path": tmp_path / "run"} if tier == "nvme" else {}
    found = train(lambda model: OffloadZero(model, adamw(model), tier=tier, compute_dtype=torch.float32, **options))
    for mine, theirs in zip(found, train(adamw), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_parameter_that_moved_or_left_is_named() -> None:
    parameters = taken(torch.zeros(3), torch.zeros(4))
    model = nn.ParameterList(parameters.params)
    groups = [{"params": parameters.params}]
    parameters.require_unchanged(model, groups)
    with pytest.raises(ConfigError, match="p1 is no longer in the model"):
        parameters.require_unchanged(nn.ParameterList(parameters.params[:1]), groups)
    for value in (torch.zeros(4), torch.zeros(5, dtype=torch.bfloat16)):
        parameters.params[1].data = value
        parameters.return_repointed([0])
        with pytest.raises(ConfigError, match="p1 was moved, cast or replaced by another shape"):
            parameters.return_repointed()
