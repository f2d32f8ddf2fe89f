"""A device's kernels, compiled: one launch where `torch_kernels.DeviceKernels` takes dozens, with the same bits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.interrupts import uninterrupted
from offload.native.device_program import LIBRARIES, CudaProgram, Program, ProgramError
from offload.native.library import NO_OUTPUT, TYPES, AdamScalars, AdamStruct, Work, sum_blocks
from offload.native.torch_kernels import DeviceKernels
from offload.sizes import SUM_BLOCK

_ADAM_THREADS = 256  # device_kernels.h
_SUM_THREADS = 1024

_logger = logging.getLogger("offload")


class CompiledKernels(DeviceKernels):
    """Adam and the sum of squares in one launch each. A launch that is refused, and all after it, are operations of
    torch.

    Args: scratch: as for `DeviceKernels`, which needs it then.
    Attributes: program: None once a launch was refused.
    """

    def __init__(self, scratch: Tensor, program: Program) -> None:
        super().__init__(scratch)
        self._device = scratch.device
        self.program: Program | None = program

    def adam(
        self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None
    ) -> Callable[[AdamScalars], Work]:
        operations = super().adam(master, exp_avg, exp_avg_sq, grad, out)
        p, m, v, g = master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr()
        grad_type, grad_bytes = ctypes.c_int32(TYPES[grad.dtype]), grad.element_size()
        o, out_type = (0, NO_OUTPUT) if out is None else (out.data_ptr(), TYPES[out.dtype])

        def bound(s: AdamScalars) -> Work:
            struct: AdamStruct = s.packed

            def work(low: int, high: int) -> None:
                pointers = (p + 4 * low, m + 4 * low, v + 4 * low, g + grad_bytes * low)
                to = ctypes.c_void_p(o + 2 * low if o else None), ctypes.c_int32(out_type)
                arguments = [*map(ctypes.c_void_p, pointers), grad_type, *to, ctypes.c_int64(high - low), struct]
                blocks = -(-(high - low) // _ADAM_THREADS)
                if not self._launch("offload_device_adam", blocks, _ADAM_THREADS, arguments):
                    operations(s)(low, high)

            return work

        return bound

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Work:
        operations = super().sum_squares(x, first, out)
        p, o, x_bytes, x_type = x.data_ptr(), out.data_ptr(), x.element_size(), ctypes.c_int32(TYPES[x.dtype])

        def work(low: int, high: int) -> None:
            at = 8 * ((first + low) // SUM_BLOCK - first // SUM_BLOCK)
            values, sums = ctypes.c_void_p(p + x_bytes * low), ctypes.c_void_p(o + at)
            arguments = [values, x_type, ctypes.c_int64(first + low), ctypes.c_int64(high - low), sums]
            blocks = sum_blocks(first + low, high - low)
            if not self._launch("offload_device_sum_squares", blocks, _SUM_THREADS, arguments):
                operations(low, high)

        return work

    def _launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Any]) -> bool:
        """Whether the kernel was launched, or has nothing to do."""
        program = self.program
        if program is None:
            return False
        try:
            if blocks:
                program.launch(kernel, blocks, threads, arguments)
        except ProgramError as error:
            self.program = None
            _log_operations(self._device, str(error))
            return False
        return True


def device_kernels(scratch: Tensor, stream: Callable[[], int] | None) -> DeviceKernels:
    """Compiled ones, if they can be had and have the bits of torch's operations; else these.

    Args: stream: gives the handle of the current stream of scratch's device; None: nothing is compiled.
    """
    program = None
    if stream is not None and scratch.device.type in LIBRARIES:
        program = _program(scratch, stream)
    return DeviceKernels(scratch) if program is None else CompiledKernels(scratch, program)


_programs: dict[torch.device, Program | None] = {}
"""None: there is none, as the log says."""


@uninterrupted  # what a signal's handler raises is no failure of a compiler
def _program(scratch: Tensor, stream: Callable[[], int]) -> Program | None:
    """Compiled and tested at the first call for a device."""
    device = scratch.device
    if device not in _programs:
        try:
            program = CudaProgram(device, stream)
            require_same_bits(scratch, program)
            _programs[device] = program
            _logger.info("the kernels on %s are compiled for %s", device, program.architecture)
        except Exception as error:  # of a library, of the driver, of torch: the operations do without
            _programs[device] = None
            _log_operations(device, str(error))
    return _programs[device]


_logged: set[torch.device] = set()


def _log_operations(device: torch.device, reason: str) -> None:
    """Once a process and device."""
    if device in _logged:
        return
    _logged.add(device)
    _logger.warning("the kernels on %s run as torch's operations, slower and with the same bits: %s", device, reason)


# --- The test at first use ---

_STEPS = [
    AdamScalars.at(step=3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=decoupled, scale=0.37)
    for decoupled in (False, True)
]
_LENGTH = 4099


@torch.no_grad()
def require_same_bits(scratch: Tensor, program: Program) -> None:
    """Runs both kernels with all dtypes. Raises: ProgramError if one was refused, or gave other bits than torch's."""
    compiled, operations, device = CompiledKernels(scratch, program), DeviceKernels(scratch), scratch.device
    both: tuple[DeviceKernels, DeviceKernels] = compiled, operations
    for dtype in TYPES:
        x = _numbers(SUM_BLOCK + _LENGTH, dtype).to(device)
        for first in (0, 777):
            found, wanted = (torch.zeros(2, dtype=torch.float64, device=device) for _ in range(2))
            for kernels, sums in zip(both, (found, wanted), strict=True):
                kernels.sum_squares(x, first, sums)(0, len(x))
            _require_same(found, wanted, f"sums of squares of {dtype}")
        for scalars in _STEPS:
            for out in (None, torch.bfloat16, torch.float16):
                runs = []
                for kernels in both:
                    p, m, v = (_numbers(_LENGTH, torch.float32, seed).to(device) for seed in range(3))
                    to = None if out is None else torch.zeros(_LENGTH, dtype=out, device=device)
                    kernels.adam(p, m, v, x[:_LENGTH], to)(scalars)(0, _LENGTH)
                    runs.append((p, m, v) if to is None else (p, m, v, to))
                for found, wanted in zip(*runs, strict=True):
                    _require_same(found, wanted, f"steps with gradients of {dtype}")
    if compiled.program is None:
        raise ProgramError("the driver refused a launch")


def _numbers(n: int, dtype: torch.dtype, seed: int = 3) -> Tensor:
    """Usual ones, and every eighth of any bits: NaN, Inf, denormals. On the CPU."""
    rng = np.random.default_rng(seed)
    usual = torch.from_numpy(np.abs(rng.standard_normal(n)).astype(np.float32)).to(dtype)
    bits = torch.from_numpy(rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8)).view(dtype)
    usual[::8] = bits[::8]
    return usual


def _require_same(found: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(_bits(found), _bits(wanted)):
        raise ProgramError(f"{what} have other bits than torch's")


def _bits(x: Tensor) -> Tensor:
    """As integers on the CPU, every NaN made the same."""
    values = x.cpu()
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()]
    return values.masked_fill(values.isnan(), torch.nan).view(integers)
