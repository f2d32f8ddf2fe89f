"""A split master (bf16 copy, lower half, one bit in exp_avg_sq) gives back every bit and takes the same Adam steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload import native
from offload.optim import reference

from .bits import SPECIAL, assert_same_bits, at_offset, halves, kernels, narrowed, numbers, widened
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
# Twins: the same copy and the same lower half.
TIES = [0x3F7F8000, 0x3F808000, 0x00008000, 0x00018000, 0x007F8000, 0x00808000, 0x7F7F8000]

every_variant = pytest.mark.parametrize("variant", [*VARIANTS, QEMU])
every_grad = pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
every_place = pytest.mark.parametrize("place", ["own", "param", "grad"])
# An fp32 grad has no place for a bf16 param.
GRADS_AND_PLACES = [(torch.bfloat16, "own"), (torch.bfloat16, "param"), (torch.bfloat16, "grad")]
GRADS_AND_PLACES += [(torch.float32, "own"), (torch.float32, "param")]
every_grad_and_place = pytest.mark.parametrize(
    ("grad", "place"), GRADS_AND_PLACES, ids=[f"{str(grad)[6:]}-{place}" for grad, place in GRADS_AND_PLACES]
)
whole_inputs = settings(max_examples=100, deadline=None)


def words(x: Tensor) -> np.ndarray:
    """The bits of a tensor as unsigned numbers, NaNs as they are."""
    if x.element_size() == 2:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy().view(np.uint32)


def of_words(bits: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    signed = np.int16 if bits.dtype == np.uint16 else np.int32
    return torch.from_numpy(bits.view(signed)).view(dtype)


def assert_words(found: Tensor, wanted: np.ndarray, what: str) -> None:
    differs = np.flatnonzero(words(found) != wanted)
    assert len(differs) == 0, (
        f"{what}: {len(differs)} of {len(wanted)} differ, first at {differs[0]}: "
        f"{words(found)[differs[0]]:#x}, wanted {wanted[differs[0]]:#x}"
    )


def assert_nothing_written_around(*views: Tensor) -> None:
    for view in views:
        room, start = view._base, view.storage_offset()
        assert room is not None
        assert (room[:start] == 7).all(), "written before the start"
        assert (room[start + view.numel() :] == 7).all(), "written past the end"


def masters(rng: np.random.Generator, n: int, wild: bool) -> Tensor:
    """fp32 [n], a third of them exact ties."""
    bits = words(numbers(rng, n, wild)).copy()
    tied = rng.random(n) < 0.3
    bits[tied] = (bits[tied] & 0xFFFF0000) | 0x8000
    return of_words(bits)


def squares(rng: np.random.Generator, n: int, wild: bool) -> Tensor:
    """fp32 [n] without a sign."""
    return of_words(words(numbers(rng, n, wild, 1e-4)) & 0x7FFFFFFF)


# ---- split and join


def round_trip(variant: str, master: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits and joins, looks at what came back, and gives param, low and the marked exp_avg_sq."""
    n = master.numel()
    param, low = torch.full((n,), 7.0, dtype=torch.bfloat16), torch.full((n,), 7, dtype=torch.int16)
    marked, back, clean = exp_avg_sq.clone(), torch.full((n,), 7.0), torch.full((n,), 7.0)
    kernels(variant).call(native.SPLIT, master, low, marked, param)
    kernels(variant).call(native.JOIN, param, low, marked, back, clean)
    assert_same_bits(param, master.to(torch.bfloat16), "param")
    assert_same_bits(back, master, "master")
    assert_words(clean, words(exp_avg_sq), "exp_avg_sq")
    return param, low, marked


def every_low_half(upper: np.ndarray) -> Tensor:
    """fp32 [65536 * len(upper)]: each upper half with each lower half."""
    return of_words((upper.astype(np.uint32)[:, None] << 16 | np.arange(1 << 16, dtype=np.uint32)).ravel())


@every_variant
def test_every_lower_half_comes_back_at_the_ends_of_the_exponents(variant: str) -> None:
    # Mantissas at both ends are even and odd, and 0x7F is the one whose rounding carries into the exponent.
    exponents, mantissas = np.array([0, 1, 2, 126, 127, 128, 253, 254, 255]), np.array([0, 1, 0x7E, 0x7F])
    for sign in (0, 0x8000):
        master = every_low_half((sign | exponents[:, None] << 7 | mantissas).ravel())
        round_trip(variant, master, master.abs())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_fp32_comes_back(variant: str) -> None:
    mine, n = kernels(variant, 2), 1 << 24
    param, low = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int16)
    back, clean, zeros = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    first = torch.arange(n, dtype=torch.int32)
    for some in range(-128, 128):
        master = (first + some * n).view(torch.float32)
        marked = zeros.clone()
        mine.call(native.SPLIT, master, low, marked, param)
        mine.call(native.JOIN, param, low, marked, back, clean)
        same = back.view(torch.int32) == master.view(torch.int32)
        same &= param.view(torch.int16) == master.to(torch.bfloat16).view(torch.int16)
        assert (same | master.isnan() & back.isnan() & param.isnan()).all(), f"from {some * n:#x}"
        assert torch.equal(clean.view(torch.int32), zeros.view(torch.int32))


@every_variant
@pytest.mark.parametrize("sign", [0, 0x80000000], ids=["positive", "negative"])
def test_ties_with_the_same_copy_and_lower_half_come_back_apart(variant: str, sign: int) -> None:
    bits = np.array(TIES, dtype=np.uint32) | np.uint32(sign)
    for square in (0.0, 1e-45, 0.5, float("inf"), float("nan")):
        param, low, marked = round_trip(variant, of_words(bits), torch.full((len(bits),), square))
        assert words(param)[0] == words(param)[1], "0x3F7F8000 and 0x3F808000 are twins"
        assert words(low)[0] == words(low)[1] == 0x8000
        assert words(marked)[0] != words(marked)[1], "what tells them apart is in exp_avg_sq"


@every_variant
def test_special_masters_come_back(variant: str) -> None:
    round_trip(variant, of_words(SPECIAL), of_words(SPECIAL & 0x7FFFFFFF))
    for bits in (0x7F800001, 0xFFFFFFFF, 0x7F808000, 0xFF80FFFF):
        nan = of_words(np.array([bits], dtype=np.uint32))
        _, low, marked = round_trip(variant, nan, torch.zeros(1))
        assert low.item() == 0, "one NaN for all instruction sets"
        assert words(marked)[0] == 0


@every_variant
@given(
    n=st.integers(0, 300),
    seed=st.integers(0, 1 << 30),
    wild=st.booleans(),
    offsets=st.tuples(*[st.integers(0, 40)] * 6),
)
@whole_inputs
def test_split_and_join_equal_the_reference(
    variant: str, n: int, seed: int, wild: bool, offsets: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(seed)
    master, square = masters(rng, n, wild), squares(rng, n, wild)
    wanted = reference.split(master.numpy(), square.numpy())
    given_, low, marked, param, back, clean = (
        at_offset(x, offset)
        for x, offset in zip(
            (
                master,
                torch.full((n,), 7, dtype=torch.int16),
                square,
                torch.full((n,), 7.0, dtype=torch.bfloat16),
                torch.full((n,), 7.0),
                torch.full((n,), 7.0),
            ),
            offsets,
            strict=True,
        )
    )
    kernels(variant).call(native.SPLIT, given_, low, marked, param)
    for name, x, y in zip(("param", "low", "exp_avg_sq"), (param, low, marked), wanted, strict=True):
        assert_words(x, y.view(words(x).dtype), name)
    assert_words(given_, words(master), "master is only read")
    joined = reference.join(*wanted)
    assert_same_bits(torch.from_numpy(joined[0]), master, "reference.join")
    kernels(variant).call(native.JOIN, param, low, marked, back, clean)
    assert_words(back, joined[0].view(np.uint32), "master_out")
    assert_words(clean, joined[1].view(np.uint32), "exp_avg_sq_out")
    assert_words(marked, wanted[2].view(np.uint32), "exp_avg_sq is only read")
    kernels(variant).call(native.JOIN, param, low, marked, back, marked)
    assert_words(back, joined[0].view(np.uint32), "master_out, exp_avg_sq in place")
    assert_words(marked, joined[1].view(np.uint32), "exp_avg_sq in place")
    assert_nothing_written_around(given_, low, marked, param, back, clean)


@every_variant
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_split_and_join_are_the_same_on_any_number_of_threads(variant: str, threads: int) -> None:
    n, rng = 200_003, np.random.default_rng(4)
    master, square = masters(rng, n, True), squares(rng, n, True)
    wanted = reference.split(master.numpy(), square.numpy())
    param, low = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int16)
    marked, back = square.clone(), torch.zeros(n)
    kernels(variant, threads).call(native.SPLIT, master, low, marked, param)
    for x, y in zip((param, low, marked), wanted, strict=True):
        assert_words(x, y.view(words(x).dtype), "split")
    kernels(variant, threads).call(native.JOIN, param, low, marked, back, marked)
    assert_same_bits(back, master, "join")
    assert_words(marked, words(square), "exp_avg_sq")


# ---- Adam


@dataclass
class Whole:
    """An unsplit state, stepped by the reference."""

    master: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray

    def step(self, grad: Tensor, hyper: dict[str, Any]) -> None:
        new = reference.adam(self.master, self.exp_avg, self.exp_avg_sq, widened(grad), **hyper)
        self.master, self.exp_avg, self.exp_avg_sq = new


@dataclass
class Split:
    param: Tensor
    low: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def assert_is(self, whole: Whole, param: Tensor) -> None:
        """Joined it is `whole`, and every bit of it is what a split of `whole` gives."""
        _, low, marked = reference.split(whole.master, whole.exp_avg_sq)
        assert_same_bits(param, narrowed(whole.master, torch.bfloat16), "param")
        assert_words(self.low, low, "low")
        assert_same_bits(self.exp_avg, torch.from_numpy(whole.exp_avg), "exp_avg")
        assert_same_bits(self.exp_avg_sq.abs(), torch.from_numpy(marked).abs(), "exp_avg_sq")
        odd = words(torch.from_numpy(whole.master)) >> 16 & 1
        odd[np.isnan(whole.master)] = 0
        assert_words(of_words(words(self.exp_avg_sq) >> 31), odd, "sign of exp_avg_sq")


def start(rng: np.random.Generator, n: int, wild: bool, offsets: tuple[int, ...]) -> tuple[Whole, Split]:
    whole = Whole(masters(rng, n, wild).numpy(), numbers(rng, n, wild, 1e-2).numpy(), squares(rng, n, wild).numpy())
    param, low, marked = reference.split(whole.master, whole.exp_avg_sq)
    tensors = of_words(param, torch.bfloat16), of_words(low, torch.int16), torch.from_numpy(whole.exp_avg)
    return whole, Split(
        *(at_offset(x, at) for x, at in zip((*tensors, torch.from_numpy(marked)), offsets, strict=True))
    )


def check_adam_split(
    variant: str,
    n: int,
    grad: torch.dtype,
    place: str,
    *,
    seed: int = 0,
    wild: bool = False,
    offsets: tuple[int, ...] = (0, 0, 0, 0, 0, 0),
    threads: int = 1,
    steps: int = 1,
    **hyper: Any,
) -> None:
    """`place` is where the new param goes: memory of its own, over param, or over grad."""
    rng = np.random.default_rng(seed)
    whole, split = start(rng, n, wild, offsets[:4])
    for step in range(steps):
        now = USUAL | {"step": step + 1} | hyper
        g = at_offset(halves(rng, n, grad, wild), offsets[4])
        whole.step(g, now)
        wanted_grad, wanted_param = words(g).copy(), words(split.param).copy()
        own = at_offset(torch.full((n,), 7.0, dtype=torch.bfloat16), offsets[5])
        out = {"own": own, "param": split.param, "grad": g}[place]
        scalars = native.AdamScalars.at(**now)
        kernels(variant, threads).call(
            native.ADAM_SPLIT, split.param, split.low, split.exp_avg, split.exp_avg_sq, g, out, scalars=scalars
        )
        split.assert_is(whole, out)
        if place != "grad":
            assert_words(g, wanted_grad, "grad is only read")
        if place != "param":
            assert_words(split.param, wanted_param, "param is only read")
        assert_nothing_written_around(out, g, split.param, split.low, split.exp_avg, split.exp_avg_sq)
        split.param = out


@every_variant
@every_grad_and_place
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_adam_split_is_adam_of_the_joined_state(variant: str, grad: torch.dtype, place: str, decoupled: bool) -> None:
    for n in (0, 1, 31, 32, 33, 63, 64, 65, 997, 4095, 10007):
        for wild in (False, True):
            check_adam_split(variant, n, grad, place, seed=n, wild=wild, steps=3, decoupled=decoupled)


@every_variant
@given(
    n=st.integers(0, 300),
    seed=st.integers(0, 1 << 30),
    wild=st.booleans(),
    where=st.sampled_from(GRADS_AND_PLACES),
    offsets=st.tuples(*[st.integers(0, 40)] * 6),
    hyper=st.fixed_dictionaries(
        {
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
def test_adam_split_is_adam_of_the_joined_state_on_any_input(
    variant: str,
    n: int,
    seed: int,
    wild: bool,
    where: tuple[torch.dtype, str],
    offsets: tuple[int, ...],
    hyper: dict[str, Any],
) -> None:
    check_adam_split(variant, n, *where, seed=seed, wild=wild, offsets=offsets, steps=2, **hyper)


@every_variant
@every_place
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_adam_split_is_the_same_on_any_number_of_threads(variant: str, place: str, threads: int) -> None:
    for n in (10**5 + 3, 2 * 10**5 + 3, 3 * 65536):
        offsets = (1, 2, 3, 4, 5, 6)
        check_adam_split(variant, n, torch.bfloat16, place, seed=n, offsets=offsets, threads=threads, steps=2)


@every_variant
@pytest.mark.parametrize("sign", [0, 0x80000000], ids=["positive", "negative"])
def test_ties_stay_apart_in_steps_that_leave_the_master(variant: str, sign: int) -> None:
    bits = np.array(TIES * 20, dtype=np.uint32) | np.uint32(sign)
    n = len(bits)
    param, low, marked = round_trip(variant, of_words(bits), torch.zeros(n))
    exp_avg, back, clean = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for step in range(1, 4):
        scalars = native.AdamScalars.at(**USUAL | {"step": step, "lr": 0.0})
        grad = torch.linspace(-1, 1, n).to(torch.bfloat16)
        kernels(variant).call(native.ADAM_SPLIT, param, low, exp_avg, marked, grad, param, scalars=scalars)
        kernels(variant).call(native.JOIN, param, low, marked, back, clean)
        assert_words(back, bits, f"master after step {step}")


@every_variant
@every_grad
def test_adam_split_equals_the_adam_kernel_over_many_steps(variant: str, grad: torch.dtype) -> None:
    n, rng = 4099, np.random.default_rng(8)
    master, exp_avg, exp_avg_sq = masters(rng, n, False), torch.zeros(n), torch.zeros(n)
    out = torch.zeros(n, dtype=torch.bfloat16)
    param, low, marked = round_trip(variant, master, exp_avg_sq)
    split_avg, back, clean = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for step in range(1, 31):
        scalars = native.AdamScalars.at(**USUAL | {"step": step, "lr": 0.1 / step})
        g = halves(rng, n, grad, False)
        kernels(variant).call(native.ADAM, master, exp_avg, exp_avg_sq, g, out, scalars=scalars)
        kernels(variant).call(native.ADAM_SPLIT, param, low, split_avg, marked, g, param, scalars=scalars)
        assert_same_bits(param, out, f"param after step {step}")
    kernels(variant).call(native.JOIN, param, low, marked, back, clean)
    assert_words(back, words(master), "master")
    assert_words(split_avg, words(exp_avg), "exp_avg")
    assert_words(clean, words(exp_avg_sq), "exp_avg_sq")


@every_variant
def test_adam_split_keeps_denormals_when_the_caller_flushes_them(variant: str) -> None:
    n = 1001
    tiny = torch.full((n,), 1e-41)
    whole = Whole(tiny.numpy(), tiny.numpy(), tiny.numpy())
    hyper, grad = USUAL | {"lr": 1e-20}, tiny.to(torch.bfloat16)
    param, low, marked = round_trip(variant, tiny, tiny)
    split = Split(param, low, tiny.clone(), marked)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        kernels(variant).call(
            native.ADAM_SPLIT, param, low, split.exp_avg, marked, grad, param, scalars=native.AdamScalars.at(**hyper)
        )
    finally:
        torch.set_flush_denormal(False)
    whole.step(grad, hyper)
    split.assert_is(whole, param)


def test_reference_join_gives_back_what_split_took() -> None:
    for some in np.array([0, 1, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0xBF7F, 0xBF80, 0xFF80]):
        master = every_low_half(np.array([some]))
        square = of_words(words(master)[::-1] & 0x7FFFFFFF)
        param, low, marked = reference.split(master.numpy(), square.numpy())
        back, clean = reference.join(param, low, marked)
        assert_same_bits(of_words(param, torch.bfloat16), master.to(torch.bfloat16), "param")
        assert_same_bits(torch.from_numpy(back), master, "master")
        assert_words(torch.from_numpy(clean), words(square), "exp_avg_sq")
