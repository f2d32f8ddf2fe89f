"""Memory of the device for a whole matrix, without an engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.devices.copies import COPIER_FOR
from offload.layout import ParamSpec, StateKind, Whole, build
from offload.optim.on_device import MATRIX, MatrixMemory, regions
from offload.tiers import DEVICE as ON_DEVICE
from tests import simulated_device
from tests.support.device import DEVICE


def spec(
    name: str,
    shape: tuple[int, ...],
    states: int,
    *,
    is_whole: bool = True,
    small: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> ParamSpec:
    kinds = tuple(StateKind(f"state{n}") for n in range(states))
    numel = torch.Size(shape).numel()
    return ParamSpec(
        name, numel, name, torch.bfloat16, 0, states=kinds, whole=Whole(shape, small=small) if is_whole else None
    )


def test_the_largest_matrix_with_its_states_and_gradient_has_room() -> None:
    specs = [
        spec("long", (9999,), 3),
        spec("matrix", (83, 37), 1),
        spec("more states", (80, 35), 2),
        spec("small states", (90, 35), 2, small=(("state0", (90, 1)), ("state1", (35,)))),
        spec("in pieces", (500, 500), 2, is_whole=False),
    ]
    (region,) = regions(build(specs, 1024))
    assert (region.tier, region.what) == (ON_DEVICE, MATRIX)
    assert region.nbytes == 2 * 4 * 4 * (80 * 35 + -80 * 35 % 64)
    assert regions(build([spec("long", (9999,), 3)], 1024)) == []


def matrices_of(shape: tuple[int, ...]) -> MatrixMemory:
    (region,) = regions(build([spec("matrix", shape, 1)], 1024))
    device = torch.device(DEVICE)
    memory = torch.empty(region.nbytes, dtype=torch.uint8, device=device)
    return MatrixMemory(memory, COPIER_FOR.get()(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_what_becomes_of_the_copies_is_written_back(number: int, dtype: torch.dtype) -> None:
    shape = (83, 37)
    matrices = matrices_of(shape)
    made = torch.Generator().manual_seed(3)
    arrays = [[torch.randn(shape, generator=made) for _ in range(2)] for _ in range(number)]
    grads = [torch.randn(shape, generator=made).to(dtype) for _ in range(number)]
    before = [[array.clone() for array in pair] for pair in arrays]
    seen: list[Tensor] = []

    def step(copies: list[Tensor], grad: Tensor) -> None:
        master, state = copies
        assert {one.device.type for one in (master, state, grad)} == {torch.device(DEVICE).type}
        state.add_(grad)
        master.sub_(state)

    with matrices.steps():
        for pair, grad in zip(arrays, grads, strict=True):
            matrices.begin(pair, grad, step, lambda pair=pair: seen.append(pair[0].clone()))
    for (master, state), (old, older), grad, then in zip(arrays, before, grads, seen, strict=True):
        assert torch.equal(state, older + grad)
        assert torch.equal(master, old - state)
        assert torch.equal(master, then)


def test_after_an_error_nothing_is_written_any_more() -> None:
    matrices = matrices_of((83, 37))
    if torch.device(DEVICE).type == simulated_device.NAME:
        simulated_device.set_delays(1, 2_000_000)
    # Copies of memory that is not page-locked are waited for.
    has_pins = torch.accelerator.is_available()
    master, state, other, another, grad = (torch.zeros(83, 37, pin_memory=has_pins) for _ in range(5))

    def step(copies: list[Tensor], grad: Tensor) -> None:
        copies[0].add_(1)

    def fail(copies: list[Tensor], grad: Tensor) -> None:
        raise ValueError("a step")

    def two() -> None:
        with matrices.steps():
            matrices.begin([master, state], grad, step, lambda: pytest.fail("it has not ended well"))
            matrices.begin([other, another], grad, fail, lambda: None)

    for _ in range(8):  # a copy may be early by chance
        with pytest.raises(ValueError, match="a step"):
            two()
        master.fill_(7)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        assert torch.equal(master, torch.full_like(master, 7))
