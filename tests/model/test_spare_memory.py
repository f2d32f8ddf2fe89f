from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offload.devices.copies import HostCopier
from offload.model.flat_param import SpareMemory


def emptied(numel: int) -> Tensor:
    tensor = torch.zeros(numel, dtype=torch.bfloat16)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_what_one_tensor_leaves_the_next_one_of_its_size_gets() -> None:
    spares, one, other, larger = SpareMemory(HostCopier()), torch.zeros(5, dtype=torch.bfloat16), emptied(5), emptied(6)
    view = one[1:3]
    one.fill_(3)
    address = one.data_ptr()
    spares.take(one)
    assert one.isnan().all()
    assert view.isnan().all()
    with pytest.raises(RuntimeError):
        view.fill_(1)
    assert spares.nbytes == 10
    spares.give(larger, limit=10)
    spares.give(other, limit=0)
    assert other.data_ptr() == address != larger.data_ptr()
    assert other.tolist() == [3] * 5
    assert spares.nbytes == 0
    spares.give(one, limit=0)
    one.copy_(torch.arange(5))
    assert view.tolist() == [1, 2]


def test_what_is_too_much_goes_back_the_oldest_first() -> None:
    spares, tensors = SpareMemory(HostCopier()), [emptied(numel) for numel in (1, 2, 3)]
    for tensor in tensors:
        spares.give(tensor, limit=100)
        spares.take(tensor)
    spares.trim(11)
    assert spares.nbytes == 10
    spares.give(tensors[0], limit=6)  # makes room for what it does not find
    assert spares.nbytes == 6


def test_a_tensor_of_nothing_needs_nothing() -> None:
    spares, tensor = SpareMemory(HostCopier()), torch.empty(0)
    spares.give(tensor, limit=0)
    spares.take(tensor)
    assert spares.nbytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40))
def test_there_is_never_more_than_allowed_and_no_memory_twice(what: list[tuple[int, int]]) -> None:
    spares, tensors = SpareMemory(HostCopier()), [emptied(numel) for numel in (1, 1, 2, 3, 5, 5)]
    filled: set[int] = set()
    for number, most in what:
        if number in filled:
            spares.take(tensors[number])
            spares.trim(most)
        else:
            spares.give(tensors[number], most)
            tensors[number].fill_(number)
        filled ^= {number}
        assert spares.nbytes <= most
        for other, tensor in enumerate(tensors):
            if other in filled:
                assert tensor.tolist() == [other] * len(tensor)
