"""Memory of the device for a whole matrix, without an engine."""

from __future__ import annotations

import pytest
import torch

from offload.devices.copies import COPIER_FOR
from offload.layout import ParamSpec, StateKind, build
from offload.optim.on_device import MATRIX, MatrixMemory, regions
from offload.tiers import DEVICE as ON_DEVICE
from tests.support.device import DEVICE


def spec(name: str, shape: tuple[int, ...], states: int, *, is_whole: bool = True) -> ParamSpec:
    kinds = tuple(StateKind(f"state{n}") for n in range(states))
    numel = torch.Size(shape).numel()
    return ParamSpec(name, numel, name, torch.bfloat16, 0, states=kinds, whole=shape if is_whole else None)


def test_the_largest_matrix_with_its_states_and_gradient_has_room() -> None:
    specs = [
        spec("long", (9999,), 3),
        spec("matrix", (83, 37), 1),
        spec("more states", (80, 35), 2),
        spec("in pieces", (500, 500), 2, is_whole=False),
    ]
    (region,) = regions(build(specs, 1024))
    assert (region.tier, region.what) == (ON_DEVICE, MATRIX)
    assert region.nbytes == 4 * 4 * (80 * 35 + -80 * 35 % 64)
    assert regions(build([spec("long", (9999,), 3)], 1024)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_becomes_of_the_copies_is_written_back(dtype: torch.dtype) -> None:
    shape = (83, 37)
    (region,) = regions(build([spec("matrix", shape, 1)], 1024))
    device = torch.device(DEVICE)
    memory = torch.empty(region.nbytes, dtype=torch.uint8, device=device)
    matrices = MatrixMemory(memory, COPIER_FOR.get()(device))
    made = torch.Generator().manual_seed(3)
    arrays = [torch.randn(shape, generator=made) for _ in range(2)]
    grad = torch.randn(shape, generator=made).to(dtype)
    for _ in range(3):
        before = [array.clone() for array in arrays]
        with matrices.copies(arrays, grad) as ([master, state], gradient):
            assert {one.device.type for one in (master, state, gradient)} == {device.type}
            state.add_(gradient)
            master.sub_(state)
        assert torch.equal(arrays[1], before[1] + grad)
        assert torch.equal(arrays[0], before[0] - arrays[1])
