from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offload import torch_private
from offload.devices.copies import HostCopier
from offload.layout import ALIGN_BYTES, build
from offload.model import unit
from offload.model.unit_memory import UnitMemory, strip
from tests.support.released import has_no_values

CPU = torch.device("cpu")


UNITS = unit.Units(build([], 1024))


def emptied(numel: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    tensor = torch.zeros(numel, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


def memory_of(limit: int) -> UnitMemory:
    return UnitMemory(CPU, HostCopier(), limit)


def test_what_one_unit_leaves_the_next_one_of_its_size_gets() -> None:
    memory, one, other, larger = memory_of(22), emptied(5), emptied(5), emptied(6)
    memory.give(UNITS["one"], [one])
    view = one[1:3]
    one.fill_(3)
    address = one.data_ptr()
    memory.take(UNITS["one"], [one])
    assert has_no_values(one)
    assert has_no_values(view)
    with pytest.raises(RuntimeError):
        view.fill_(1)
    assert memory.nbytes == 10
    memory.give(UNITS["larger"], [larger])
    memory.give(UNITS["other"], [other])
    assert other.data_ptr() == address != larger.data_ptr()
    assert other.tolist() == [3] * 5
    memory.give(UNITS["one"], [one])  # more than the limit is in use
    assert memory.nbytes == 32
    one.copy_(torch.arange(5))
    assert view.tolist() == [1, 2]
    memory.take(UNITS["one"], [one])
    assert memory.nbytes == 22


def test_access_to_released_memory_is_forbidden_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for CUDA have the two functions, for tensors on the CPU, too."""
    forbidden: dict[int, str] = {}
    monkeypatch.setattr(torch_private, "forbid_data_access", forbidden.__setitem__)
    monkeypatch.setattr(torch_private, "allow_data_access", lambda storage: forbidden.pop(storage, None))
    memory, one = memory_of(22), emptied(5)
    for _ in range(2):
        memory.give(UNITS["one"], [one])
        assert not forbidden
        memory.take(UNITS["one"], [one])
        (words,) = forbidden.values()
        assert "optimizer.gathered" in words
        assert [*forbidden] == [one.untyped_storage()._cdata]


def test_tensors_of_one_unit_lie_in_one_buffer() -> None:
    memory, parts = memory_of(1000), [emptied(3), emptied(5, torch.float32), emptied(0), emptied(7)]
    memory.give(UNITS["unit"], parts)
    for number, part in enumerate(parts):
        part.fill_(number)
    starts = [part.data_ptr() - parts[0].data_ptr() for part in parts if part.numel()]
    assert starts == [0, ALIGN_BYTES, 2 * ALIGN_BYTES]
    assert memory.nbytes == 2 * ALIGN_BYTES + 14
    assert [part.tolist() for part in parts] == [[0] * 3, [1] * 5, [], [3] * 7]


def test_memory_of_its_own_goes_back_at_once() -> None:
    memory, tensor = memory_of(1000), emptied(5)
    memory.give(UNITS["unit"], [tensor], shares=False)
    assert memory.nbytes == 0
    tensor.fill_(1)
    memory.take(UNITS["unit"], [tensor])
    assert memory.nbytes == 0


def test_more_may_be_kept_for_a_while_and_says_nothing_of_a_step() -> None:
    memory, tensors = memory_of(20), {"one": emptied(7), "other": emptied(6), "third": emptied(5)}

    def use(*names: str) -> None:
        for name in names:
            memory.give(UNITS[name], [tensors[name]])
        for name in names:
            memory.take(UNITS[name], [tensors[name]])

    memory.widen(40)
    use(*tensors)
    assert memory.nbytes == 36, "what is spare is kept"
    memory.arrange()
    assert memory.nbytes == 36
    memory.widen(None)
    assert memory.nbytes == 0
    for name in tensors:  # of a step, in which they come one after the other
        use(name)
    memory.arrange()
    assert memory.nbytes == 14, "of the largest, for all"
    use(*tensors)
    assert memory.nbytes <= 20, "as was planned"


def test_what_has_no_memory_is_taken_as_often_as_one_likes() -> None:
    memory, tensor, nothing = memory_of(1000), emptied(5), torch.empty(0)
    memory.take(UNITS["unit"], [tensor])
    strip(tensor)
    memory.give(UNITS["nothing"], [nothing])
    memory.take(UNITS["nothing"], [nothing])
    assert memory.nbytes == 0


class Units:
    """Units of some sizes, each with its number as its values while it has memory.

    Attributes: allocated: bytes, in order; most: the most that all buffers took.
    """

    def __init__(self, memory: UnitMemory, sizes: list[int]) -> None:
        self.memory = memory
        self.tensors = [emptied(size, torch.uint8) for size in sizes]
        self.filled: set[int] = set()
        self.allocated: list[int] = []
        self.most = 0
        allocate = memory._allocate

        def noted(nbytes: int, device: torch.device, **options: bool) -> object:
            self.allocated.append(nbytes)
            return allocate(nbytes, device, **options)

        memory._allocate = noted  # type: ignore[assignment]

    def give(self, number: int) -> None:
        self.memory.give(UNITS[str(number)], [self.tensors[number]])
        self.tensors[number].fill_(number)
        self.filled.add(number)
        self.most = max(self.most, self.memory.nbytes)
        self.check()

    def take(self, number: int) -> None:
        self.memory.take(UNITS[str(number)], [self.tensors[number]])
        self.filled.discard(number)
        self.check()

    def check(self) -> None:
        for number in self.filled:
            assert self.tensors[number].tolist() == [number] * len(self.tensors[number])

    def go_through(self, together: int, order: list[int]) -> None:
        """Uses units in an order, so many of them together."""
        here: deque[int] = deque()
        for number in order:
            if number in here:
                here.remove(number)
            else:
                while len(here) >= together:
                    self.take(here.popleft())
                self.give(number)
            here.append(number)
        for number in here:
            self.take(number)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5))
def test_units_in_a_line_are_arranged_within_the_largest_that_are_together(sizes: list[int], together: int) -> None:
    """And nothing is allocated from then on, in forward and backward."""
    limit = sum(sorted(sizes, reverse=True)[:together])
    units = Units(memory_of(limit), sizes)
    line = list(range(len(sizes)))
    units.go_through(together, line + line[::-1])
    units.memory.arrange()
    assert units.memory.nbytes <= limit
    units.allocated.clear()
    for _ in range(2):
        units.go_through(together, line + line[::-1])
        units.memory.arrange()
    assert not units.allocated
    assert units.memory.nbytes <= limit


@given(
    st.lists(st.integers(1, 40), min_size=3, max_size=8),
    st.lists(st.one_of(st.integers(0, 7), st.just(-1)), max_size=60),
    st.integers(1, 120),
)
def test_no_memory_is_lent_twice_and_little_is_kept_whatever_the_order(
    sizes: list[int], what: list[int], limit: int
) -> None:
    """Args: what: units to give memory to, or take it from; -1: the end of a step."""
    units = Units(memory_of(limit), sizes)
    for number in what:
        if number < 0:
            for one in sorted(units.filled):
                units.take(one)
            units.memory.arrange()
            assert units.memory.nbytes <= limit
        elif number >= len(sizes):
            continue
        elif number in units.filled:
            units.take(number)
        else:
            units.give(number)
    for one in sorted(units.filled):
        units.take(one)
    assert units.memory.nbytes <= limit
    units.memory.free_spare()
    assert units.memory.nbytes == 0


@given(
    st.lists(st.sampled_from([1, 5, 10, 20, 40, 41]), min_size=3, max_size=9),
    st.integers(0, 3),
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 8), max_size=12)), max_size=8),
)
def test_the_plan_holds_in_every_order(sizes: list[int], ahead: int, passes: list[list[int] | None]) -> None:
    """Args: passes: each in an order of its own; None: in that of the model."""
    largest = sorted(sizes, reverse=True)
    limit = min(sum(largest[:2]) + sum(largest[:ahead]), sum(largest))
    units = Units(memory_of(limit), sizes)
    line = list(range(len(sizes)))
    for order in (line, *passes):
        units.go_through(2 + ahead, line if order is None else [one for one in order if one < len(sizes)])
        units.memory.arrange()
    assert units.most <= limit + (0 if ahead else largest[0] - largest[1])


def test_until_units_are_arranged_they_take_no_more_than_is_in_use_at_once() -> None:
    units = Units(memory_of(30), [20, 10, 9, 8])
    units.go_through(2, [1, 2, 3, 2, 1])
    units.go_through(2, [0, 1, 2])
    assert units.memory.nbytes <= 30
    assert max(units.allocated) == 20


def test_another_order_is_learned_and_the_first_one_not_forgotten() -> None:
    units = Units(memory_of(60), [20, 10, 20, 10, 20])
    units.go_through(2, [0, 1, 2, 3, 4])
    units.memory.arrange()
    units.go_through(2, [0, 2, 4])  # two of the larger ones together
    units.memory.arrange()
    units.allocated.clear()
    for order in ([0, 2, 4], [0, 1, 2, 3, 4]):
        units.go_through(2, order)
        units.memory.arrange()
    assert not units.allocated


def test_more_than_planned_is_allocated_given_back_and_not_learned() -> None:
    units = Units(memory_of(20), [10, 10, 10, 10])
    units.go_through(2, [0, 1, 2, 3])
    units.memory.arrange()
    units.go_through(4, [0, 1, 2, 3])  # as `gathered` does
    assert units.memory.nbytes <= 20
    units.memory.arrange()
    units.go_through(2, [0, 1, 2, 3])
    units.memory.arrange()
    units.allocated.clear()
    units.go_through(2, [0, 1, 2, 3])
    assert not units.allocated


def test_no_memory_for_an_arrangement_leaves_units_to_come_as_they_do() -> None:
    units = Units(memory_of(60), [20, 10, 20])
    units.go_through(1, [0, 1, 2])
    allocate, lacks = units.memory._allocate, [True]

    def refuse(*args: object, **options: object) -> object:
        if lacks:
            raise torch.OutOfMemoryError("none left")
        return allocate(*args, **options)  # type: ignore[arg-type]

    units.memory._allocate = refuse  # type: ignore[assignment]
    units.memory._spare.clear()
    units.memory.arrange()
    assert units.memory.nbytes == 0
    lacks.clear()
    units.go_through(1, [0, 1, 2])
    units.memory.arrange()
    units.allocated.clear()
    units.go_through(1, [0, 1, 2])
    assert not units.allocated
