"""The step by itself, against the reference in NumPy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from offload.grads.local import LocalGradients
from offload.native import Task
from offload.optim import reference
from offload.optim.chunk_work import StepKey
from offload.optim.late import LateSteps
from offload.optim.new_params import new_parameters
from offload.optim.rule import Progress
from offload.optim.rules.adam import AdamRule
from offload.optim.step import Step
from offload.storage.chunk_cache import Store, Use
from offload.storage.param_store import ResidentParams
from offload.storage.swap_format import state_slot_arrays
from tests.support.late_copier import LateCopier
from tests.support.runs import RunByHand, layout_of, run_of, store_in_ram

RULES = [AdamRule()] * 2
GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
NUMELS = (700, 64, 1000)


def step_of(run: RunByHand, store: Store, gradients: LocalGradients, flats: list[torch.Tensor]) -> Step:
    """The step of parameters that stay in the model."""
    params = ResidentParams(run.layout, flats)
    new_params, late = new_parameters(run, params, flats, gradients), LateSteps(run, RULES, store, params)
    return Step(run, run.choice.states, RULES, store, gradients, new_params, late)


@pytest.mark.parametrize("chunk_numel", [1024, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("copies", ["in place", "late"])
def test_a_step_is_the_reference_s_and_applied_when_asked(copies: str, dtype: torch.dtype, chunk_numel: int) -> None:
    layout = layout_of(NUMELS, chunk_numel=chunk_numel, dtype=dtype)
    run = run_of(layout, copier=LateCopier(1) if copies == "late" else None, tier="cpu")
    store = store_in_ram(run, state_slot_arrays(layout, split_master=False))
    flats = [torch.zeros(flat.numel, dtype=flat.dtype) for flat in layout.flats]
    gradients = LocalGradients(run, run.choice.grads)
    step = step_of(run, store, gradients, flats)
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(numel, generator=generator) for numel in NUMELS]
    for param, master in enumerate(masters):
        for chunk, piece in layout.pieces_of(param):
            with store.lease(chunk.index, Use.UPDATE, step=0) as lease:
                at = slice(piece.chunk_offset, piece.chunk_offset + piece.numel)
                lease.master[at] = master[piece.param_offset : piece.param_offset + piece.numel]
    states = [(master.numpy(), np.zeros_like(master.numpy()), np.zeros_like(master.numpy())) for master in masters]
    for number in (1, 2):
        grads = [torch.randn(numel, generator=generator).to(dtype) for numel in NUMELS]
        # The last parameter has a gradient in the first step only.
        active = range(len(NUMELS) if number == 1 else len(NUMELS) - 1)
        for param in active:
            gradients.accumulate(param, grads[param])
        gradients.finalize(active)
        before = flats[0].clone()
        step.begin(number, dict.fromkeys(active, StepKey(0, Progress(number - 1))), [GROUP], 0.5, [0])
        assert list(step.pending) == [0]
        assert torch.equal(flats[0], before)
        step.apply(0)
        assert not step.pending
        gradients.clear_all()
        for param in active:
            options = {key: value for key, value in GROUP.items() if key != "decoupled_weight_decay"}
            states[param] = reference.adam(
                *states[param], grads[param].float().numpy(), step=number, decoupled=True, scale=0.5, **options
            )
    for param, (master, exp_avg, _) in enumerate(states):
        _, offset = layout.locations[param]
        found = flats[0][offset : offset + NUMELS[param]].float().numpy()
        is_narrow = dtype is torch.bfloat16
        assert np.array_equal(found, reference.from_bf16(reference.to_bf16(master)) if is_narrow else master)
        for chunk, piece in layout.pieces_of(param):
            with store.lease(chunk.index, Use.READ, step=2) as lease:
                held = lease.arrays[1][piece.chunk_offset : piece.chunk_offset + piece.numel].numpy()
                assert np.array_equal(held, exp_avg[piece.param_offset : piece.param_offset + piece.numel])
    step.close()
    gradients.close()


@pytest.mark.parametrize(("absent", "copies"), [(None, 2), (0, 2), (2, 3), (4, 2), (5, 1)])
def test_what_is_contiguous_goes_to_the_device_at_once_whatever_its_param_group(
    absent: int | None, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a layer's weights and norms, of which the latter have no decay. After 100 elements there is a gap."""
    numels = (128, 64, 256, 64, 100, 64)
    layout = layout_of(numels, chunk_numel=1024, dtype=torch.float32)
    assert len(layout.chunks) == 1
    copier = LateCopier(1)
    run = run_of(layout, copier=copier, tier="cpu")
    store = store_in_ram(run, state_slot_arrays(layout, split_master=False))
    flats = [torch.ones(flat.numel) for flat in layout.flats]
    gradients = LocalGradients(run, run.choice.grads)
    step = step_of(run, store, gradients, flats)
    active = [param for param in range(len(numels)) if param != absent]
    for param in active:
        gradients.accumulate(param, torch.ones(numels[param]))
    gradients.finalize(active)
    groups = [GROUP, {**GROUP, "weight_decay": 0.0}]
    sent, to_device = [], copier.to_device
    monkeypatch.setattr(copier, "to_device", lambda src, *more: sent.append(len(src)) or to_device(src, *more))
    step.begin(1, {param: StepKey(param % 2, Progress()) for param in active}, groups, 1.0, [0])
    step.apply(0)
    assert len(sent) == copies
    step.close()
    for param, numel in enumerate(numels):
        # Adam's first step is lr downwards from masters of zero, whatever the gradient.
        at = layout.locations[param][1]
        wanted = torch.full((numel,), -1e-2) if param in active else torch.ones(numel)
        assert torch.allclose(flats[0][at : at + numel], wanted, rtol=1e-4)
    gradients.close()


def test_small_units_are_one_call_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.optim.step.MOST_TOGETHER", 1100)
    numels = (700, 300, 64, 2000, 5)
    layout = layout_of(numels, units=[f"layers.{number}" for number in range(len(numels))], dtype=torch.float32)
    run = run_of(layout, tier="cpu")
    store = store_in_ram(run, state_slot_arrays(layout, split_master=False))
    for chunk in layout.chunks:
        with store.lease(chunk.index, Use.UPDATE, step=0):
            pass
    flats = [torch.zeros(flat.numel) for flat in layout.flats]
    gradients = LocalGradients(run, run.choice.grads)
    step = step_of(run, store, gradients, flats)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(numel, generator=generator) for numel in numels]
    for param, grad in enumerate(grads):
        gradients.accumulate(param, grad)
    gradients.finalize(range(len(numels)))
    calls = []
    kernels_run = run.kernels.run
    monkeypatch.setattr(run.kernels, "run", lambda tasks: calls.append(1) or kernels_run(tasks))
    step.begin(1, dict.fromkeys(range(len(numels)), StepKey(0, Progress())), [GROUP], 1.0, range(len(numels)))
    groups = list(step.together(step.pending))
    assert groups == [[0, 1, 2], [3], [4]]
    for group in groups:
        step.start_apply(group)
        for flat in group:
            step.apply(flat)
    assert len(calls) == len(groups)
    assert not step.pending
    options = {key: value for key, value in GROUP.items() if key != "decoupled_weight_decay"}
    for flat, grad in zip(flats, grads, strict=True):
        zeros = np.zeros_like(grad.numpy())
        master, _, _ = reference.adam(
            zeros, zeros.copy(), zeros.copy(), grad.numpy(), step=1, decoupled=True, scale=1.0, **options
        )
        assert np.array_equal(flat[: grad.numel()].numpy(), master)
    step.close()
    gradients.close()


def test_a_step_that_is_abandoned_leaves_the_parameters_and_another_can_begin() -> None:
    layout = layout_of(NUMELS)
    run = run_of(layout, tier="cpu")
    store = store_in_ram(run, state_slot_arrays(layout, split_master=False))
    flats = [torch.ones(flat.numel, dtype=flat.dtype) for flat in layout.flats]
    gradients = LocalGradients(run, run.choice.grads)
    step = step_of(run, store, gradients, flats)
    for is_abandoned in (True, False):
        gradients.accumulate(0, torch.ones(NUMELS[0], dtype=torch.bfloat16))
        gradients.finalize([0])
        step.begin(1, {0: StepKey(0, Progress())}, [GROUP], 1.0, [0])
        if is_abandoned:
            step.abandon()
            gradients.reset()
        assert list(step.pending) == ([] if is_abandoned else [0])
        assert flats[0].eq(1).all()
    step.apply(0)
    # From zero masters: lr downwards, whatever the gradient.
    assert np.allclose(flats[0][: NUMELS[0]].float().numpy(), -1e-2, rtol=1e-2)
    assert flats[0][NUMELS[0] :].eq(1).all()


@pytest.mark.parametrize("copies", ["in place", "late"])
def test_what_a_chunk_meets_ends_the_step_and_another_can_begin(copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs no chunk after the one that failed, and whoever uses any of them is told. Kernels that write into
    the model leave it half a step further: the run says so at once."""
    numels = (700, 64, 1000)
    layout = layout_of(numels, units=["a", "b", "c"], chunk_numel=1024)
    run = run_of(layout, copier=LateCopier(1) if copies == "late" else None, tier="cpu")
    store = store_in_ram(run, state_slot_arrays(layout, split_master=False))
    flats = [torch.zeros(flat.numel, dtype=flat.dtype) for flat in layout.flats]
    gradients = LocalGradients(run, run.choice.grads)
    step = step_of(run, store, gradients, flats)
    came, calls = RecursionError("maximum recursion depth exceeded"), []
    kernels_run = run.kernels.run

    def get_gradients() -> None:
        for param, numel in enumerate(numels):
            gradients.accumulate(param, torch.ones(numel, dtype=torch.bfloat16))
        gradients.finalize(range(len(numels)))

    def begin() -> None:
        step.begin(1, dict.fromkeys(range(len(numels)), StepKey(0, Progress())), [GROUP], 1.0, range(len(numels)))

    def failing(tasks: Iterable[Task]) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise came
        kernels_run(tasks)

    get_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(run.kernels, "run", failing)
        begin()
        step.apply(0)
        for flat in (1, 2) if copies == "late" else (1,):
            with pytest.raises(RecursionError) as caught:
                step.apply(flat)
            assert caught.value is came
        assert len(calls) == 2
    assert run.health.is_stopped == (copies == "in place")
    step.abandon()
    gradients.reset()
    get_gradients()
    begin()
    for flat in (0, 1, 2):
        step.apply(flat)
    assert all(flat[:numel].lt(0).all() for flat, numel in zip(flats, numels, strict=True))
    step.close()
    gradients.close()
