"""Memory of storages is exchanged as by torch's own function: where there is one, it passes the same tests."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, UntypedStorage

from offload import torch_2_11, torch_private

Exchange = Callable[[UntypedStorage, UntypedStorage], None]


def has_known_fields() -> bool:
    return torch_2_11.has_known_fields(getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None))


EXCHANGES: dict[str, Exchange] = {"fields": torch_2_11.exchange_memory}
if not torch.__version__.startswith("2.11."):
    EXCHANGES["torch"] = UntypedStorage._swap_data_ptr_  # the oracle


@pytest.fixture(params=EXCHANGES)
def exchange(request: pytest.FixtureRequest) -> Exchange:
    if request.param == "fields" and not has_known_fields():
        assert not torch.__version__.startswith("2.11.")
        pytest.skip(f"torch {torch.__version__} keeps the fields of a storage elsewhere, and has a function for it")
    return EXCHANGES[request.param]


def test_the_fields_are_known() -> None:
    assert has_known_fields() or not torch.__version__.startswith("2.11.")


@pytest.mark.parametrize("ranks", [[0, 2, 1, 3], [3, 2, 1, 0], [5]])
def test_ranks_stay_in_order_and_are_numbers(ranks: list[int]) -> None:
    found = torch_2_11.in_this_order(ranks)
    assert sorted(found) == ranks
    assert sorted(found, reverse=True) == ranks[::-1]
    assert {rank: place for place, rank in enumerate(found)} == {rank: place for place, rank in enumerate(ranks)}
    assert f"{found}" == f"{ranks}"
    assert sorted([*found, 100]) == [*ranks, 100]
    copied = pickle.loads(pickle.dumps(found))
    assert sorted(copied) == ranks


def state_of(storage: UntypedStorage) -> tuple[int, int, bool, torch.device]:
    return storage.data_ptr(), storage.nbytes(), storage.resizable(), storage.device


def test_views_and_other_tensors_follow(exchange: Exchange) -> None:
    ours, others = torch.arange(6.0), torch.arange(10, 34, dtype=torch.uint8)
    view, detached, part = ours[2:4], ours.detach(), others[1:3]
    one, other = ours.untyped_storage(), others.untyped_storage()
    before = state_of(one), state_of(other)
    kept = ours.clone(), others.clone()
    exchange(one, other)
    assert (state_of(other), state_of(one)) == before
    assert [tensor.data_ptr() for tensor in (ours, view, detached)] == [one.data_ptr() + offset for offset in (0, 8, 0)]
    exchange(one, other)
    assert torch.equal(ours, kept[0])
    assert torch.equal(others, kept[1])
    assert view.tolist() == detached[2:4].tolist() == [2, 3]
    assert part.tolist() == [11, 12]


def test_memory_is_freed_with_the_storage_that_has_it_last(exchange: Exchange) -> None:
    class Memory(bytearray):
        pass

    memory = Memory(12)
    gone = weakref.ref(memory)
    lent = torch.frombuffer(memory, dtype=torch.uint8)
    kept = torch.empty(3)
    del memory
    exchange(kept.untyped_storage(), lent.untyped_storage())
    assert not kept.untyped_storage().resizable()
    assert lent.untyped_storage().resizable()
    del lent
    gc.collect()
    assert gone() is not None
    kept.fill_(1)
    del kept
    gc.collect()
    assert gone() is None


def test_an_empty_storage_gets_memory_and_gives_it_back(exchange: Exchange) -> None:
    tensor, memory = torch.arange(5.0), torch.full((5,), 7.0)
    empty = UntypedStorage(0)
    exchange(tensor.untyped_storage(), empty)
    assert tensor.untyped_storage().nbytes() == 0
    exchange(tensor.untyped_storage(), memory.untyped_storage())
    assert tensor.tolist() == [7] * 5
    assert empty.nbytes() == 20
    assert memory.untyped_storage().nbytes() == 0


def test_memory_that_may_not_be_written_takes_that_along(exchange: Exchange) -> None:
    closed, free = torch.zeros(4), torch.zeros(4)
    torch_private.throw_on_mutable_data_ptr(closed)
    exchange(closed.untyped_storage(), free.untyped_storage())
    closed.fill_(1)
    with pytest.raises(RuntimeError):
        free.fill_(1)
    exchange(closed.untyped_storage(), free.untyped_storage())
    free.fill_(1)
    with pytest.raises(RuntimeError):
        closed.fill_(1)


@pytest.mark.skipif(
    not hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"), reason="only in builds of torch for CUDA"
)
@pytest.mark.parametrize("is_closed", [False, True])
def test_access_that_was_forbidden_is_allowed_again(is_closed: bool) -> None:
    def forbid(tensor: Tensor) -> None:
        torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, "not here")  # type: ignore[attr-defined]

    if not has_known_fields():
        pytest.skip(f"torch {torch.__version__} keeps the fields of a storage elsewhere, and has a function for it")
    tensor = torch.arange(3)
    if is_closed:
        torch_private.throw_on_mutable_data_ptr(tensor)
    for _ in range(2):
        forbid(tensor)
        with pytest.raises(RuntimeError, match="not here"):
            tensor.tolist()
        torch_2_11.allow_data_access(tensor.untyped_storage()._cdata)
        if is_closed:
            with pytest.raises(RuntimeError):
                tensor.fill_(1)
        else:
            tensor.fill_(1)
            assert tensor.tolist() == [1, 1, 1]
