"""The kernels that are compiled for a device: their bits, on the CPU, and what happens where there are none."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import native
from offload.native import compiled_kernels, device_program
from offload.native.compiled_kernels import CompiledKernels, require_same_bits
from offload.native.device_program import ProgramError
from offload.native.table import NO_TENSOR, AdamScalars
from offload.native.torch_kernels import scratch_bytes
from offload.optim import reference

from .bits import DTYPES, HostProgram, assert_same_bits, halves, narrowed, numbers, widened

needs_library = pytest.mark.skipif(native.fallback_reason() is not None, reason="no C library")
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
LONG = (1, 1023, 1025, 4095, 65535, 65536, 65537, 131071, 196613)
"""Around the edges of groups and blocks, and primes."""


def compiled(program: Any) -> native.Kernels:
    return native.Kernels(1, CompiledKernels(scratch(), program))


def scratch() -> torch.Tensor:
    return torch.zeros(scratch_bytes(1), dtype=torch.uint8)


@needs_library
@every_dtype
@given(
    n=st.sampled_from(LONG),
    first=st.one_of(st.sampled_from([0, 1, 65535, 65536, 65537]), st.integers(0, 1 << 40)),
    wild=st.booleans(),
    is_backwards=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_sums_of_squares_are_those_of_the_cpus_kernels_and_of_numpy(
    dtype: torch.dtype, n: int, first: int, wild: bool, is_backwards: bool
) -> None:
    """In any order of the threads of a block, so none reads what another one writes."""
    x = halves(np.random.default_rng(n), n, dtype, wild)
    found, others = (torch.full((native.sum_blocks(first, n),), -1.0, dtype=torch.float64) for _ in range(2))
    compiled(HostProgram(is_backwards)).call(native.SUM_SQUARES, x, found, first=first)
    native.load(1).call(native.SUM_SQUARES, x, others, first=first)
    assert_same_bits(found, others)
    assert_same_bits(found, torch.from_numpy(reference.sum_squares(widened(x), first)))


@needs_library
@every_dtype
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", LONG)
def test_steps_are_those_of_the_cpus_kernels(dtype: torch.dtype, out_dtype: torch.dtype | None, n: int) -> None:
    rng = np.random.default_rng(n)
    inputs = [numbers(rng, n, True), numbers(rng, n, False, 1e-2), numbers(rng, n, False, 1e-4).abs()]
    grad = halves(rng, n, dtype, wild=False)
    hyper: dict[str, Any] = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for decoupled in (False, True):
        scalars = native.AdamScalars.at(**hyper, decoupled=decoupled, scale=0.37)
        runs = []
        for one in (compiled(HostProgram()), native.load(1)):
            states = [x.clone() for x in inputs]
            out = None if out_dtype is None else torch.zeros(n, dtype=out_dtype)
            one.call(native.ADAM, states[0], states[1], states[2], grad, out, scalars=scalars)
            runs.append(states if out is None else [*states, out])
        for found, wanted in zip(*runs, strict=True):
            assert_same_bits(found, wanted)


@needs_library
def test_every_16_bit_number_is_widened_and_narrowed_as_numpy_does() -> None:
    """By a step that only copies the gradient into the first moment, and a master as it is to 16 bits."""
    scalars = native.AdamScalars.at(step=1, lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0, decoupled=True)
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)
        wide = torch.from_numpy(widened(every))
        # Between each two neighbours: the tie, and what is next to it.
        tie = 1 << (15 if dtype == torch.bfloat16 else 12)
        near = [(wide.view(torch.int32) + step).view(torch.float32) for step in (0, tie - 1, tie, tie + 1)]
        for master in (*near, numbers(np.random.default_rng(5), 1 << 16, wild=True)):
            p, m, v = master.clone(), torch.zeros(1 << 16), torch.zeros(1 << 16)
            out = torch.zeros(1 << 16, dtype=dtype)
            compiled(HostProgram()).call(native.ADAM, p, m, v, every, out, scalars=scalars)
            wanted = reference.adam(
                master.numpy(), np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.float32), wide.numpy(),
                step=1, lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0, decoupled=True,
            )  # fmt: skip
            assert_same_bits(m, torch.from_numpy(wanted[1]), "exp_avg")
            assert_same_bits(out, narrowed(wanted[0], dtype), "out")


class Refusing:
    """A driver that refuses from some launch on."""

    def __init__(self, launches: int) -> None:
        self._left, self._host = launches, HostProgram()

    def launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        self._left -= 1
        if self._left < 0:
            raise ProgramError("out of resources")
        self._host.launch(kernel, blocks, threads, arguments)


@pytest.fixture
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_kernels, "_programs", {})
    monkeypatch.setattr(compiled_kernels, "_logged", set())


@needs_library
@pytest.mark.usefixtures("_nothing_known")
@pytest.mark.parametrize("launches", [0, 1])
def test_after_a_refused_launch_torchs_operations_go_on_with_the_same_bits(
    launches: int, caplog: pytest.LogCaptureFixture
) -> None:
    x = numbers(np.random.default_rng(1), 70_000, wild=False)
    ours = compiled(Refusing(launches))
    hyper: dict[str, Any] = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    master, wanted = x.numpy().copy(), x.numpy().copy()
    moments = [torch.zeros(70_000), torch.zeros(70_000)]
    theirs = (wanted, np.zeros(70_000, np.float32), np.zeros(70_000, np.float32))
    with caplog.at_level(logging.WARNING, "offload"):
        for _ in range(3):
            ours.call(
                native.ADAM,
                torch.from_numpy(master),
                *moments,
                x,
                None,
                scalars=native.AdamScalars.at(**hyper, decoupled=True),
            )
            theirs = reference.adam(*theirs, x.numpy(), **hyper, decoupled=True)
    assert_same_bits(torch.from_numpy(master), torch.from_numpy(theirs[0]))
    (line,) = caplog.messages
    assert "torch's operations" in line
    assert ours.variant == "device, by torch"
    assert "out of resources" in line


class Wrong:
    """Compiled by somebody else."""

    def __init__(self, change: Callable[[str, list[Any]], None]) -> None:
        self._change, self._host = change, HostProgram()

    def launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        arguments = list(arguments)
        self._change(kernel, arguments)
        self._host.launch(kernel, blocks, threads, arguments)


def _decay_an_ulp_off(kernel: str, arguments: list[Any]) -> None:
    if kernel == "offload_device_adam":
        scalars = AdamScalars.from_buffer_copy(arguments[1])
        scalars.decay = np.nextafter(np.float32(scalars.decay), np.float32(2))
        arguments[1] = scalars


def _some_left_out(kernel: str, arguments: list[Any]) -> None:
    if kernel == "offload_device_sum_squares":
        arguments[0].first += 9  # the first one alone may be too small to count
        arguments[0].n -= 9


def _no_output(kernel: str, arguments: list[Any]) -> None:
    if kernel == "offload_device_adam":
        arguments[0].types[4] = NO_TENSOR


@needs_library
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_decay_an_ulp_off, "steps with gradients of torch.float32"),
        (_some_left_out, "sums of squares of torch.float32"),
        (_no_output, "steps with gradients of torch.float32"),
    ],
)
def test_the_test_at_first_use_finds_other_bits(change: Callable[[str, list[Any]], None], what: str) -> None:
    require_same_bits(scratch(), HostProgram())
    with pytest.raises(ProgramError, match=f"{what} have other bits"):
        require_same_bits(scratch(), Wrong(change))
    with pytest.raises(ProgramError, match="refused"):
        require_same_bits(scratch(), Refusing(5))


@needs_library
def test_the_test_at_first_use_draws_no_random_numbers() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    require_same_bits(scratch(), HostProgram())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[arg-type, index]


@pytest.mark.usefixtures("_nothing_known")
def test_where_nothing_can_be_compiled_the_log_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def open_libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setitem(device_program.LIBRARIES, "cpu", open_libraries)
    with caplog.at_level(logging.INFO, "offload"):
        found = [native.load_on(scratch(), lambda: 0) for _ in range(2)]
    assert [one.variant for one in found] == ["device, by torch"] * 2
    (line,) = caplog.messages
    assert line.startswith("the kernels on cpu run as torch's operations")
    assert "libnvrtc.so.13" in line
    out = torch.zeros(1, dtype=torch.float64)
    found[0].call(native.SUM_SQUARES, torch.ones(100), out)
    assert out.item() == 100


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_torch_without_cuda_has_no_compiler() -> None:
    with pytest.raises(ProgramError, match="not built for CUDA"):
        device_program.LIBRARIES["cuda"]()


def nvrtc() -> list[str]:
    """NVRTC of the packages nvidia-cuda-nvrtc, which needs no GPU to compile."""
    package = importlib.util.find_spec("nvidia")
    folders = [] if package is None else package.submodule_search_locations or []
    return sorted(str(path) for folder in folders for path in Path(folder).rglob("libnvrtc.so.*"))


@pytest.mark.skipif(not nvrtc(), reason="no NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_nvrtc_compiles_both_kernels(architecture: str) -> None:
    for path in nvrtc():
        compiler = ctypes.CDLL(path)
        code = device_program.compile_source(compiler, device_program.SOURCE.read_text(), architecture)
        assert code.startswith(b"\x7fELF")
        assert b"offload_device_adam" in code
        assert b"offload_device_sum_squares" in code
        with pytest.raises(ProgramError, match=r"device_kernels\.cu\(1\): error"):
            device_program.compile_source(compiler, "nonsense", architecture)
