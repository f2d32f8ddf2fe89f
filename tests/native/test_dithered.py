"""Moments of one or two bytes: every kernel takes the steps of NumPy's contract, wherever a parameter is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from offload import native
from offload.layout import BF16, CODED, Form
from offload.native import codes
from offload.native.torch_kernels import DeviceKernels, dithered_bytes, dithered_room, scratch_bytes
from offload.optim import reference
from offload.sizes import SUM_BLOCK

from .bits import SPECIAL, assert_same_bits, at_offset, kernels, narrowed, numbers, widened
from .emulated import QEMU

VARIANTS = (*native.available_variants(), "device", *(() if native.fallback_reason() else ("compiled",)))
FORMS: dict[str, tuple[Form, Form]] = {"bf16": (BF16, BF16), "8bit": (CODED[0], CODED[1])}
every_variant_and_form = pytest.mark.parametrize(
    ("variant", "form"),
    [(variant, form) for variant in VARIANTS for form in FORMS]
    + [pytest.param(*QEMU.values, form, marks=QEMU.marks) for form in FORMS],
)
USUAL: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "scale": 0.37}


class States(NamedTuple):
    """The arrays of a parameter: its master (or the half beside `param`), each moment's, and its copy."""

    master: Tensor
    moments: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    param: Tensor

    def all(self) -> list[Tensor]:
        return [self.master, *self.moments[0], *self.moments[1], self.param]

    def part(self, start: int, stop: int) -> States:
        def of(arrays: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            codes_, *scales = arrays
            return codes_[start:stop], *(scale[start // 64 : -(-stop // 64)] for scale in scales)

        return States(self.master[start:stop], (of(self.moments[0]), of(self.moments[1])), self.param[start:stop])


def zeros(form: str, n: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    def one() -> tuple[Tensor, ...]:
        if form == "bf16":
            return (torch.zeros(n, dtype=torch.bfloat16),)
        return torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // 64), dtype=torch.uint8)

    return one(), one()


def started(form: str, master: np.ndarray, out: torch.dtype, *, is_split: bool) -> States:
    """A parameter that was never stepped. A bf16 copy and a half tell only settled masters."""
    if not is_split:
        return States(torch.from_numpy(master.copy()), zeros(form, len(master)), narrowed(master, out))
    param, low = reference.split_settled(reference.settle(master))
    return States(of_words(low, torch.int16), zeros(form, len(master)), of_words(param, torch.bfloat16))


def of_words(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


def step(variant: str, states: States, grad: Tensor, *, first: int = 0, threads: int = 1, **hyper: Any) -> None:
    """One step by a kernel, in place."""
    is_split = states.master.dtype is torch.int16
    (m, *m_scale), (v, *v_scale) = states.moments
    kernels(variant, threads).call(
        native.ADAM_DITHERED,
        *(states.master, states.param if is_split else None, m, v),
        *((m_scale[0], v_scale[0]) if m_scale else (None, None)),
        *(grad, states.param),
        first=first,
        scalars=native.DitheredScalars.at(**hyper),
    )


def decoded(form: str, arrays: Sequence[Tensor], *, signed: bool) -> np.ndarray:
    if form == "bf16":
        return widened(arrays[0])
    return reference.from_codes(arrays[0].numpy(), arrays[1].numpy(), signed=signed)


def encoded(form: str, x: np.ndarray, random: np.ndarray, *, signed: bool) -> tuple[Tensor, ...]:
    if form == "bf16":
        return (of_words(reference.to_dithered_bf16(x, random), torch.bfloat16),)
    found, scales = reference.to_codes(x, random, signed=signed)
    return torch.from_numpy(found), torch.from_numpy(scales)


def contract(form: str, states: States, grad: Tensor, *, first: int = 0, **hyper: Any) -> States:
    """The same step in NumPy."""
    is_split = states.master.dtype is torch.int16
    master = states.master.numpy()
    if is_split:
        param = states.param.view(torch.int16).numpy().view(np.uint16)
        master = reference.join_settled(param, master.view(np.uint16))
    m, v = (decoded(form, states.moments[which], signed=which == 0) for which in (0, 1))
    p, m, v = reference.adam(master, m, v, widened(grad), **hyper)
    random = reference.dither(len(master), hyper["step"], first)
    moments = encoded(form, m, random, signed=True), encoded(form, v, random, signed=False)
    out = states.param.dtype
    if out is torch.bfloat16:
        p = reference.settle(p)
    if is_split:
        return States(of_words(reference.split_settled(p)[1], torch.int16), moments, narrowed(p, out))
    return States(torch.from_numpy(p), moments, narrowed(p, out))


def assert_same(found: States, wanted: States, what: str) -> None:
    for name, one, other in zip(("master", "m", "m or v", "v", "v", "param"), found.all(), wanted.all(), strict=False):
        if one.dtype.is_floating_point:
            assert_same_bits(one, other, f"{what}: {name}")
        else:
            assert one.dtype is other.dtype
            differs = torch.nonzero(one != other).flatten().tolist()
            assert not differs, f"{what}: {name}: {len(differs)} differ, first at {differs[0]}"


def spread(rng: np.random.Generator, n: int) -> np.ndarray:
    """Magnitudes over 18 powers of ten within each block."""
    return rng.standard_normal(n) * 10.0 ** rng.uniform(-16, 2, n)


def sparse(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.9, 0, rng.standard_normal(n))


def outlier(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n) * np.where(rng.random(n) < 0.01, 1e12, 1)


def with_inf(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.01, np.inf, rng.standard_normal(n))


def with_nan(rng: np.random.Generator, n: int) -> np.ndarray:
    """NaN of any payload and sign, and other special numbers."""
    bits = rng.standard_normal(n).astype(np.float32).view(np.uint32)
    return np.where(rng.random(n) < 0.02, rng.choice(SPECIAL, n), bits).view(np.float32)


GRADIENTS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "spread": spread,
    "tiny": lambda rng, n: rng.standard_normal(n) * 1e-22,
    "zero": lambda rng, n: np.zeros(n),
    "sparse": sparse,
    "outlier": outlier,
    "huge": lambda rng, n: rng.standard_normal(n) * 1e18,
    "inf": with_inf,
    "nan": with_nan,
}


def gradient(kind: str, rng: np.random.Generator, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(GRADIENTS[kind](rng, n).astype(np.float32)).to(dtype)


@every_variant_and_form
def test_steps_are_those_of_numpy(variant: str, form: str) -> None:
    for kind, is_split in product(GRADIENTS, (False, True)):
        rng = np.random.default_rng(3)
        for n in (1, 63, 64, 65, 1000, 4113):
            before = started(form, numbers(rng, n, False).numpy(), torch.bfloat16, is_split=is_split)
            found, wanted = States(before.master.clone(), zeros(form, n), before.param.clone()), before
            for number in range(1, 6):
                grad = gradient(kind, rng, n, torch.bfloat16 if number % 2 else torch.float32)
                hyper = USUAL | {"step": number, "decoupled": number % 3 > 0}
                step(variant, found, grad, **hyper)
                wanted = contract(form, wanted, grad, **hyper)
                assert_same(found, wanted, f"{kind}, {'split' if is_split else 'whole'}, {n}, step {number}")


@every_variant_and_form
def test_gradients_and_copies_of_every_dtype(variant: str, form: str) -> None:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for out, dtype in product(floats, floats):
        rng, n = np.random.default_rng(5), 333
        found = started(form, numbers(rng, n, True).numpy(), out, is_split=False)
        wanted = States(found.master.clone(), found.moments, found.param.clone())
        found = States(found.master, zeros(form, n), found.param)
        for number in (1, 2, 1 << 40):
            grad = gradient("spread", rng, n, dtype)
            for decoupled in (False, True):
                step(variant, found, grad, step=number, decoupled=decoupled, **USUAL)
                wanted = contract(form, wanted, grad, step=number, decoupled=decoupled, **USUAL)
                assert_same(found, wanted, f"{out}, {dtype}, step {number}")


@every_variant_and_form
@given(
    n=st.integers(1, 400),
    cuts=st.sets(st.integers(1, 6)),
    block=st.one_of(st.integers(0, 3), st.integers(0, 1 << 40)),
    number=st.integers(1, 1 << 40),
    offset=st.integers(0, 7),
    is_split=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_parameter_may_be_cut_between_any_two_blocks(
    variant: str, form: str, n: int, cuts: set[int], block: int, number: int, offset: int, is_split: bool
) -> None:
    """And lie at any address; nothing is written around it."""
    rng = np.random.default_rng(n)
    first, grad = 64 * block, gradient("spread", rng, n)
    before = started(form, numbers(rng, n, False).numpy(), torch.bfloat16, is_split=is_split)
    hyper = USUAL | {"step": number, "decoupled": True}
    wanted = contract(form, contract(form, before, grad, first=first, **hyper), grad, first=first, **hyper)
    m, v = (tuple(at_offset(one, offset) for one in of_one) for of_one in zeros(form, n))
    found = States(at_offset(before.master, offset), (m, v), at_offset(before.param, offset))
    edges = [0, *(64 * cut for cut in sorted(cuts) if 64 * cut < n), n]
    for _ in range(2):
        for start, stop in pairwise(edges):
            step(variant, found.part(start, stop), grad[start:stop], first=first + start, **hyper)
    assert_same(found, wanted, f"{edges} from {first}")
    for view in found.all():
        room, at = view._base, view.storage_offset()
        assert room is not None
        assert (room[:at] == 7).all()
        assert (room[at + view.numel() :] == 7).all()


@every_variant_and_form
def test_threads_change_no_bit(variant: str, form: str) -> None:
    rng, n = np.random.default_rng(2), 3 * 65536 + 77
    master, grad = numbers(rng, n, False).numpy(), gradient("outlier", rng, n, torch.bfloat16)
    found = started(form, master, torch.bfloat16, is_split=True)
    hyper = USUAL | {"step": 9, "decoupled": True}
    wanted = contract(form, found, grad, **hyper)
    step(variant, found, grad, threads=1 if variant in ("device", "compiled") else 3, **hyper)
    assert_same(found, wanted, "three threads")


@every_variant_and_form
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_the_copy_may_take_the_place_of_its_gradient(variant: str, form: str, is_split: bool) -> None:
    rng, n = np.random.default_rng(2), 1000
    before = started(form, numbers(rng, n, False).numpy(), torch.bfloat16, is_split=is_split)
    grad, hyper = gradient("normal", rng, n, torch.bfloat16), USUAL | {"step": 4, "decoupled": True}
    wanted = contract(form, before, grad, **hyper)
    (m, *m_scale), (v, *v_scale) = moments = zeros(form, n)
    kernels(variant).call(
        native.ADAM_DITHERED,
        *(
            before.master,
            before.param if is_split else None,
            m,
            v,
            *((m_scale[0], v_scale[0]) if m_scale else (None, None)),
        ),
        *(grad, grad),
        scalars=native.DitheredScalars.at(**hyper),
    )
    assert_same(States(before.master, moments, grad), wanted, "in place of the gradient")


def test_whole_masters_and_split_ones_take_the_same_steps() -> None:
    rng, n = np.random.default_rng(8), 5000
    bits = numbers(rng, n, False).numpy().view(np.uint32)
    master = reference.settle(np.where(rng.random(n) < 0.5, bits & 0xFFFF0000 | 0x8000, bits).view(np.float32))
    whole, split = (started("8bit", master, torch.bfloat16, is_split=is_split) for is_split in (False, True))
    for number in range(1, 30):
        grad = gradient("normal", rng, n, torch.bfloat16)
        for states in (whole, split):
            # A step of 2^-9 of the number or so: ties come up.
            step("baseline" if "baseline" in VARIANTS else "torch", states, grad, step=number, decoupled=True, **USUAL)
        joined = reference.join_settled(
            split.param.view(torch.int16).numpy().view(np.uint16), split.master.numpy().view(np.uint16)
        )
        assert_same_bits(whole.master, torch.from_numpy(joined), f"step {number}")
        assert torch.equal(whole.param, split.param)
        assert torch.equal(whole.param, whole.master.bfloat16())


# ---- the codes


@pytest.mark.parametrize("signed", [True, False], ids=["e4m3", "e5m3"])
@pytest.mark.parametrize("scale", [0, 1, 100, 224])
def test_what_is_decoded_has_the_same_codes_again_whatever_is_random(signed: bool, scale: int) -> None:
    rng = np.random.default_rng(scale)
    top = 0x78 if signed else 0xF8  # of the largest octave: the block has no smaller scale
    for number in range(50):
        block = rng.integers(0, 256, 64, dtype=np.uint8)
        block[rng.integers(64)] = top if scale else 7
        values = reference.from_codes(block, np.array([scale], dtype=np.uint8), signed=signed)
        again, scales = reference.to_codes(values, reference.dither(64, number + 1, 64 * number), signed=signed)
        assert scales.tolist() == [scale]
        assert (again == block).all()


@pytest.mark.parametrize("form", [BF16, *CODED], ids=lambda form: form.name)
@given(n=st.integers(1, 300), seed=st.integers(0, 1 << 30), wild=st.booleans(), number=st.integers(1, 1 << 50))
@settings(max_examples=60, deadline=None)
def test_torchs_codes_are_numpys(form: Form, n: int, seed: int, wild: bool, number: int) -> None:
    x = numbers(np.random.default_rng(seed), n, wild)
    x = x if form.is_signed else x.abs()
    random = codes.dither(n, number, 128, torch.device("cpu"))
    wanted = reference.dither(n, number, 128)
    assert (random.numpy().view(np.uint32) == wanted).all()
    name = "8bit" if form.block else "bf16"
    arrays = [torch.zeros_like(one) for one in zeros(name, n)[0]]
    codes.encode(form, x, random, arrays)
    for one, other in zip(arrays, encoded(name, x.numpy(), wanted, signed=form.is_signed), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert_same_bits(codes.decode(form, arrays), torch.from_numpy(decoded(name, arrays, signed=form.is_signed)))


def test_rounding_is_right_on_average_and_zero_stays_zero() -> None:
    """What is between two codes becomes one or the other, by its distance; over many steps the mean is the number."""
    x = np.linspace(1, 2, 64, dtype=np.float32)
    for signed in (True, False):
        mean, steps = np.zeros(64), 4000
        for number in range(1, steps + 1):
            found = reference.to_codes(x, reference.dither(64, number), signed=signed)
            mean += reference.from_codes(*found, signed=signed) / steps
        assert np.abs(mean - x).max() < 0.006  # 5 deviations of the mean of 4000, each of an eighth or less
    for signed in (True, False):
        found = reference.to_codes(np.zeros(64, dtype=np.float32), reference.dither(64, 5), signed=signed)
        assert not found[0].any()
        assert not found[1].any()
    tiny = np.array([1.0, 0.0, 1e-30], dtype=np.float32)
    m, v = (
        reference.from_codes(*reference.to_codes(tiny, reference.dither(3, 1), signed=s), signed=s)
        for s in (True, False)
    )
    assert m[1] == m[2] == 0
    assert v[1] == v[2] == 2.0**-31  # not 0: the update of what is too small is damped, never blown up


def test_each_lower_half_but_ties_to_even_comes_back() -> None:
    lower = np.arange(1 << 16, dtype=np.uint32)
    for upper in (0x0000, 0x3F80, 0x3F81, 0x7F7F, 0xBF80, 0xBF81, 0x8000):
        bits = np.uint32(upper << 16) | lower
        master = reference.settle(bits.view(np.float32))
        param, low = reference.split_settled(master)
        assert (reference.join_settled(param, low).view(np.uint32) == master.view(np.uint32)).all()
        assert (reference.to_bf16(bits.view(np.float32)) == param).all()
        moved = np.flatnonzero(master.view(np.uint32) != bits)
        assert moved.tolist() == ([] if upper & 1 else [0x8000])


def test_calls_that_do_not_fit_are_refused() -> None:
    states, grad = started("8bit", np.ones(65, dtype=np.float32), torch.bfloat16, is_split=False), torch.ones(65)
    with pytest.raises(ValueError, match="first 1: positions are counted from 0, and begin at multiples of 64"):
        step("torch", states, grad, first=1, step=1, decoupled=True, **USUAL)
    scalars = native.DitheredScalars.at(step=1, decoupled=True, **USUAL)
    (m, m_scale), (v, v_scale) = states.moments
    every = [states.master, None, m, v, m_scale, v_scale, grad, states.param]

    def call(**changed: Any) -> None:
        names = ("master", "param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "grad", "out")
        tensors = [changed.get(name, one) for name, one in zip(names, every, strict=True)]
        kernels("torch").call(native.ADAM_DITHERED, *tensors, scalars=scalars)

    with pytest.raises(ValueError, match="param is for int16, and is needed for it"):
        call(param=states.param)
    with pytest.raises(ValueError, match="param is for int16, and is needed for it"):
        call(master=torch.zeros(65, dtype=torch.int16))
    with pytest.raises(ValueError, match="master is half of a bfloat16"):
        call(master=torch.zeros(65, dtype=torch.int16), param=states.param, out=torch.ones(65))
    with pytest.raises(ValueError, match=r"exp_avg is torch\.uint8, and exp_avg_sq torch.bfloat16"):
        call(exp_avg_sq=torch.zeros(65, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="scales are for uint8"):
        call(exp_avg_scale=None)
    with pytest.raises(ValueError, match="exp_avg_scale has to be a contiguous 1-D CPU tensor of 2 elements"):
        call(exp_avg_scale=torch.zeros(1, dtype=torch.uint8))


def bound_on_device(form: str, n: int, room: int, states: States, grad: Tensor) -> Callable[[int, int], None]:
    device = DeviceKernels(torch.empty(scratch_bytes(n), dtype=torch.uint8), room)
    (m, *m_scale), (v, *v_scale) = states.moments
    arrays = (m, v, *((*m_scale, *v_scale) or (None, None)))
    bound = device.bind(native.ADAM_DITHERED, (states.master, None, *arrays, grad, states.param), 0)
    return bound(native.DitheredScalars.at(step=3, **USUAL, decoupled=True))


@pytest.mark.parametrize(("n", "room"), [(70, SUM_BLOCK), (SUM_BLOCK, SUM_BLOCK), (200_000, 2 * SUM_BLOCK)])
@pytest.mark.parametrize("form", FORMS)
def test_steps_by_torch_on_a_device_take_no_more_memory_than_is_planned(form: str, n: int, room: int) -> None:
    states = States(torch.zeros(n), zeros(form, n), torch.zeros(n, dtype=torch.bfloat16))
    work = bound_on_device(form, n, room, states, torch.randn(n))
    work(0, n)  # what a first call makes stays
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work(0, n)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert 24 * min(n, room) < most <= dithered_bytes(n, room)


@pytest.mark.parametrize("form", FORMS)
def test_larger_pieces_on_a_device_have_the_same_bits_and_fewer_operations(form: str) -> None:
    n = 4 * SUM_BLOCK + 777
    rng = np.random.default_rng(8)
    master, grad = (torch.from_numpy(spread(rng, n).astype(np.float32)) for _ in range(2))
    before = States(master, zeros(form, n), torch.zeros(n, dtype=torch.bfloat16))
    wanted = contract(form, before, grad, step=3, **USUAL, decoupled=True)
    operations = {}
    for room in (SUM_BLOCK, 2 * SUM_BLOCK, 5 * SUM_BLOCK):
        found = States(master.clone(), zeros(form, n), torch.zeros(n, dtype=torch.bfloat16))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            bound_on_device(form, n, room, found, grad)(0, n)
        operations[room] = sum(event.name.startswith("aten::") for event in profiler.events())
        assert_same(found, wanted, f"{form}, {room}")
    assert operations[5 * SUM_BLOCK] < 0.7 * operations[2 * SUM_BLOCK] < 0.5 * operations[SUM_BLOCK]


def test_how_many_elements_are_stepped_at_a_time_follows_the_size_of_the_states() -> None:
    mib = 1 << 20
    assert dithered_room(70, 70) == SUM_BLOCK
    assert dithered_room(50 * mib, 50 * mib) == 6 * SUM_BLOCK
    assert dithered_room(50 * mib, 1 << 33) == scratch_bytes(50 * mib) // 8 == 64 * SUM_BLOCK
    assert dithered_room(3 * SUM_BLOCK, 1 << 33) == 3 * SUM_BLOCK
    for numel in (8 * mib, 100 * mib, 1 << 33):
        assert dithered_bytes(numel, dithered_room(numel, numel)) <= numel / 4
