"""Every kernel, in every variant that runs here, gives the bits of the NumPy reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload import native
from offload.native.library import open_library
from offload.native.torch_kernels import _KeepDenormals
from offload.optim import reference

from .bits import DTYPES, SIZES, SPECIAL, assert_same_bits, at_offset, halves, kernels, narrowed, numbers, widened
from .emulated import QEMU

VARIANTS = native.available_variants()
USUAL: dict[str, Any] = {
    "step": 7,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled": True,
    "scale": 0.37,
}

COMPILED = [] if native.fallback_reason() else ["compiled"]
"""The kernels that are compiled for a device, on the CPU: tests/native/bits.py."""
every_variant = pytest.mark.parametrize("variant", [*VARIANTS, "device", *COMPILED, QEMU])
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
whole_inputs = settings(max_examples=100, deadline=None)


def adam_inputs(seed: int, n: int, grad: torch.dtype, wild: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    p, m, v = numbers(rng, n, wild), numbers(rng, n, wild, 1e-2), numbers(rng, n, wild, 1e-4)
    return p, m, v if wild else v.abs(), halves(rng, n, grad, wild)


def check_adam(
    variant: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    out_dtype: torch.dtype | None,
    offsets: tuple[int, ...] = (0, 0, 0, 0, 0),
    threads: int = 1,
    **hyper: Any,
) -> None:
    hyper = USUAL | hyper
    p, m, v, g = inputs
    wanted = reference.adam(p.numpy(), m.numpy(), v.numpy(), widened(g), **hyper)
    found = [at_offset(x, offset) for x, offset in zip((p, m, v), offsets, strict=False)]
    grad = at_offset(g, offsets[3])
    out = None if out_dtype is None else at_offset(torch.full((p.numel(),), 7.0, dtype=out_dtype), offsets[4])
    kernels(variant, threads).call(native.ADAM, *found, grad, out, scalars=native.AdamScalars.at(**hyper))
    for name, x, y in zip(("master", "exp_avg", "exp_avg_sq"), found, wanted, strict=True):
        assert_same_bits(x, torch.from_numpy(y), name)
    if out is not None and out_dtype is not None:
        assert_same_bits(out, narrowed(wanted[0], out_dtype), "out")
    assert_same_bits(grad, g, "grad")


@every_variant
@every_dtype
@pytest.mark.parametrize("out", [None, *DTYPES.values()], ids=["none", *DTYPES])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_adam_equals_the_reference(variant: str, dtype: torch.dtype, out: torch.dtype | None, decoupled: bool) -> None:
    for n in SIZES:
        for wild in (False, True):
            check_adam(variant, adam_inputs(n, n, dtype, wild), out, decoupled=decoupled)


@every_variant
@given(
    n=st.integers(0, 300),
    seed=st.integers(0, 1 << 30),
    wild=st.booleans(),
    grad=st.sampled_from(list(DTYPES.values())),
    out=st.sampled_from([None, *DTYPES.values()]),
    offsets=st.tuples(*[st.integers(0, 40)] * 5),
    hyper=st.fixed_dictionaries(
        {
            "step": st.sampled_from([1, 2, 1000, 10**6]),
            "lr": st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]),
            "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.0, 0.999), (0.9, 0.0), (0.999, 0.9999999)]),
            "eps": st.sampled_from([0.0, 1e-45, 1e-8, 1.0]),
            "weight_decay": st.sampled_from([0.0, 1e-2, 10.0]),
            "decoupled": st.booleans(),
            "scale": st.sampled_from([1.0, 0.37, 2.0**-16, 1e-40, 0.0]),
        }
    ),
)
@whole_inputs
def test_adam_equals_the_reference_on_any_input(
    variant: str,
    n: int,
    seed: int,
    wild: bool,
    grad: torch.dtype,
    out: torch.dtype | None,
    offsets: tuple[int, ...],
    hyper: dict[str, Any],
) -> None:
    check_adam(variant, adam_inputs(seed, n, grad, wild), out, offsets, **hyper)


@every_variant
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_adam_is_the_same_on_any_number_of_threads(variant: str, threads: int) -> None:
    for n in (10**5 + 3, 2 * 10**5 + 3, 3 * 65536):
        inputs = adam_inputs(n, n, torch.bfloat16, wild=False)
        check_adam(variant, inputs, torch.bfloat16, (1, 2, 3, 4, 5), threads=threads)


@every_variant
@every_half
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=["to_bf16", "to_fp16"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_adam_may_put_its_output_in_the_place_of_a_16_bit_gradient(
    variant: str, dtype: torch.dtype, out: torch.dtype, decoupled: bool
) -> None:
    # The larger are shared between threads; offsets give every thread a head, a body and a tail.
    for n, threads, offset in [*((n, 1, n % 7) for n in SIZES), (70_001, 1, 3), (200_003, 2, 0), (200_003, 3, 5)]:
        for wild in (False, True):
            hyper = USUAL | {"decoupled": decoupled}
            p, m, v, g = adam_inputs(n, n, dtype, wild)
            wanted = reference.adam(p.numpy(), m.numpy(), v.numpy(), widened(g), **hyper)
            grad = at_offset(g, offset)
            kernels(variant, threads).call(
                native.ADAM, p, m, v, grad, grad.view(out), scalars=native.AdamScalars.at(**hyper)
            )
            assert_same_bits(grad.view(out), narrowed(wanted[0], out), f"out of {n}")
            for name, x, y in zip(("master", "exp_avg", "exp_avg_sq"), (p, m, v), wanted, strict=True):
                assert_same_bits(x, torch.from_numpy(y), f"{name} of {n}")


@every_variant
def test_adam_on_parts_equals_adam_on_the_whole(variant: str) -> None:
    n, scalars = 5003, native.AdamScalars.at(**USUAL)
    inputs = adam_inputs(3, n, torch.float16, wild=True)
    whole, parts = [x.clone() for x in inputs[:3]], [x.clone() for x in inputs[:3]]
    out, out_parts = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    kernels(variant).call(native.ADAM, *whole, inputs[3], out, scalars=scalars)
    edges = [0, 1, 17, 1000, 1000, 1031, 4099, n]
    for low, high in itertools.pairwise(edges):
        one = [x[low:high] for x in (*parts, inputs[3], out_parts)]
        kernels(variant).call(native.ADAM, *one, scalars=scalars)
    for x, y in zip((*whole, out), (*parts, out_parts), strict=True):
        assert_same_bits(y, x)


@every_variant
def test_output_at_an_odd_address_is_written_whole(variant: str) -> None:
    p, m, v, g = adam_inputs(1, 1001, torch.bfloat16, wild=False)
    room = bytearray(4096)
    try:
        out = torch.frombuffer(room, dtype=torch.bfloat16, count=1001, offset=1)
    except (ValueError, RuntimeError):
        pytest.skip("torch makes no tensor at an odd address")
    kernels(variant).call(native.ADAM, p, m, v, g, out, scalars=native.AdamScalars.at(**USUAL))
    assert_same_bits(out.clone(), narrowed(p.numpy(), torch.bfloat16))
    assert not any(room[2003:]), "written past the end"


@every_variant
@every_dtype
@given(
    n=st.integers(0, 2000),
    first=st.integers(0, 3 * native.SUM_BLOCK),
    seed=st.integers(0, 99),
    offset=st.integers(0, 40),
)
@whole_inputs
def test_sum_squares_equals_the_reference(
    variant: str, dtype: torch.dtype, n: int, first: int, seed: int, offset: int
) -> None:
    x = at_offset(halves(np.random.default_rng(seed), n, dtype, seed % 2 == 0), offset)
    out = torch.full((native.sum_blocks(first, n),), -1.0, dtype=torch.float64)
    kernels(variant).call(native.SUM_SQUARES, x, out, first=first)
    assert_same_bits(out, torch.from_numpy(reference.sum_squares(widened(x), first)))


@every_variant
@every_dtype
def test_sum_squares_over_blocks_is_the_same_on_any_number_of_threads_and_split(
    variant: str, dtype: torch.dtype
) -> None:
    n, first = 300007, 12345
    x = halves(np.random.default_rng(5), n, dtype, wild=False, size=1e-3)
    wanted = torch.from_numpy(reference.sum_squares(widened(x), first))
    assert len(wanted) == native.sum_blocks(first, n) == 5
    for threads in (1, 2, 3):
        out = torch.zeros(5, dtype=torch.float64)
        kernels(variant, threads).call(native.SUM_SQUARES, x, out, first=first)
        assert_same_bits(out, wanted)
    # Cut where blocks are cut, parts give the blocks of the whole.
    cut = 2 * native.SUM_BLOCK - first
    out = torch.zeros(5, dtype=torch.float64)
    kernels(variant).call(native.SUM_SQUARES, x[:cut], out[:2], first=first)
    kernels(variant).call(native.SUM_SQUARES, x[cut:], out[2:], first=first + cut)
    assert_same_bits(out, wanted)


@every_dtype
def test_sum_squares_on_a_device_is_the_same_with_torchs_deterministic_algorithms(dtype: torch.dtype) -> None:
    x = halves(np.random.default_rng(5), 100_003, dtype, wild=False)
    wanted = torch.from_numpy(reference.sum_squares(widened(x), 77))
    out = torch.zeros(2, dtype=torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        kernels("device").call(native.SUM_SQUARES, x, out, first=77)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(out, wanted)


@every_variant
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_makes_its_block_and_no_other_not_finite(variant: str, dtype: torch.dtype, bad: float) -> None:
    x = torch.full((3 * native.SUM_BLOCK,), torch.finfo(dtype).max, dtype=dtype)
    out = torch.zeros(3, dtype=torch.float64)
    kernels(variant).call(native.SUM_SQUARES, x, out)
    assert torch.isfinite(out).all(), "the largest finite elements are finite"
    x[native.SUM_BLOCK] = bad
    kernels(variant).call(native.SUM_SQUARES, x, out)
    assert torch.isfinite(out).tolist() == [True, False, True]


@every_variant
@every_dtype
@given(n=st.integers(0, 300), seed=st.integers(0, 1 << 30), wild=st.booleans(), offset=st.integers(0, 40))
@whole_inputs
def test_accumulate_equals_the_reference(
    variant: str, dtype: torch.dtype, n: int, seed: int, wild: bool, offset: int
) -> None:
    rng = np.random.default_rng(seed)
    acc, x = at_offset(numbers(rng, n, wild), 1), at_offset(halves(rng, n, dtype, wild), offset)
    wanted = reference.accumulate(acc.numpy(), widened(x))
    kernels(variant).call(native.ACCUMULATE, acc, x)
    assert_same_bits(acc, torch.from_numpy(wanted))


@every_variant
@every_half
def test_cast_from_every_16_bit_number(variant: str, dtype: torch.dtype) -> None:
    every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)
    wide, back = torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=dtype)
    kernels(variant).call(native.CAST, every, wide)
    assert_same_bits(wide, torch.from_numpy(widened(every)))
    kernels(variant).call(native.CAST, wide, back)
    assert_same_bits(back, every)


@every_variant
@every_dtype
@given(n=st.integers(0, 500), seed=st.integers(0, 1 << 30), offset=st.integers(0, 40))
@whole_inputs
def test_cast_to_16_bits_equals_the_reference(variant: str, dtype: torch.dtype, n: int, seed: int, offset: int) -> None:
    x = numbers(np.random.default_rng(seed), n, wild=True)
    # Near powers of two that fp16 has, so that its denormals and its overflow are met often.
    x = torch.cat([x, numbers(np.random.default_rng(seed), n, False, 2.0 ** (seed % 48 - 30))])
    x = at_offset(x, 3)
    out = at_offset(torch.zeros(x.numel(), dtype=dtype), offset)
    kernels(variant).call(native.CAST, x, out)
    assert_same_bits(out, narrowed(x.numpy(), dtype))


@every_variant
@pytest.mark.parametrize("kernel", [native.ACCUMULATE, native.CAST], ids=["accumulate", "cast"])
def test_small_kernels_are_the_same_on_any_number_of_threads(variant: str, kernel: native.Kernel) -> None:
    rng = np.random.default_rng(9)
    x, y = numbers(rng, 200003, True), numbers(rng, 200003, True)
    found = []
    for threads in (1, 2, 3):
        out = x.clone()
        kernels(variant, threads).call(kernel, *((out, y) if kernel is native.ACCUMULATE else (y, out)))
        found.append(out)
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
    assert not torch.equal(found[0][-100:].nan_to_num(), x[-100:].nan_to_num()), "the tail was left out"


def test_reference_casts_round_as_torch_does() -> None:
    rng = np.random.default_rng(1)
    x = torch.cat([numbers(rng, 100_000, True), torch.from_numpy(SPECIAL.view(np.float32).copy())])
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(narrowed(x.numpy(), dtype), x.to(dtype))


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_reference_is_torchs_adam_but_for_the_last_bits(decoupled: bool) -> None:
    rng = np.random.default_rng(2)
    p = torch.nn.Parameter(numbers(rng, 1000, False))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind([p], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, foreach=False)
    ours = (p.detach().numpy().copy(), np.zeros(1000, np.float32), np.zeros(1000, np.float32))
    for step in range(1, 6):
        p.grad = numbers(rng, 1000, False)
        theirs.step()
        hyper: dict[str, Any] = {"step": step, "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        ours = reference.adam(*ours, p.grad.numpy(), decoupled=decoupled, **hyper)
    np.testing.assert_allclose(ours[0], p.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ahead", [0, 16, 192, 4096])
def test_the_prefetch_distance_changes_no_bit(variant: str, ahead: int) -> None:
    library, _ = open_library()
    n = 1000
    inputs = [torch.randn(n), torch.randn(n), torch.rand(n), torch.randn(n).bfloat16()]
    wanted = reference.adam(*(x.numpy() for x in inputs[:3]), widened(inputs[3]), **USUAL)
    found, out = [x.clone() for x in inputs[:3]], torch.zeros(n, dtype=torch.bfloat16)
    if library is not None:
        assert library.offload_prefetch(ahead) == ahead
    try:
        kernels(variant).call(native.ADAM, *found, inputs[3], out, scalars=native.AdamScalars.at(**USUAL))
    finally:
        if library is not None:
            assert library.offload_prefetch(-1) > 0
    for mine, one in zip(found, wanted, strict=True):
        assert np.array_equal(mine.numpy().view(np.uint32), one.view(np.uint32))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_denormals_are_kept_when_the_caller_flushes_them_and_its_choice_comes_back(variant: str, threads: int) -> None:
    n = 140_000
    tiny = torch.full((n,), 1e-41)
    inputs = (tiny.clone(), tiny.clone(), tiny.clone(), tiny.to(torch.bfloat16))
    hyper = USUAL | {"eps": 1e-8, "lr": 1e-20}
    wanted = reference.adam(*(x.numpy() for x in inputs[:3]), widened(inputs[3]), **hyper)
    narrow = narrowed(wanted[0], torch.bfloat16)
    half = narrowed(tiny.numpy() * 1e36, torch.float16)
    mine = native.load(threads, variant)
    library, _ = open_library()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        before = library and library.offload_fp_control()
        found = [x.clone() for x in inputs[:3]]
        out, acc, scaled = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n), torch.zeros(n)
        wide, sums = torch.zeros(n), torch.zeros(native.sum_blocks(0, n), dtype=torch.float64)
        mine.call(native.ADAM, *found, inputs[3], out, scalars=native.AdamScalars.at(**hyper))
        mine.call(native.ACCUMULATE, acc, inputs[3])
        mine.call(native.CAST, half, wide)
        mine.call(native.CAST, tiny, scaled)
        mine.call(native.SUM_SQUARES, tiny, sums)
        after = library and library.offload_fp_control()
        still_flushed = _KeepDenormals.smallest * 3 == 0.0
    finally:
        torch.set_flush_denormal(False)
        mine.close()
    assert before == after
    assert still_flushed
    for x, y in zip(found, wanted, strict=True):
        assert_same_bits(x, torch.from_numpy(y))
    assert_same_bits(out, narrow)
    assert_same_bits(acc, torch.from_numpy(widened(inputs[3]).copy()))
    assert_same_bits(scaled, tiny)
    assert_same_bits(wide, torch.from_numpy(widened(half)))
    assert_same_bits(sums, torch.from_numpy(reference.sum_squares(tiny.numpy())))
