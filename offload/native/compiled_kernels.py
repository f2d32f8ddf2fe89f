"""A device's kernels, compiled: one launch where `torch_kernels.DeviceKernels` takes dozens, with the same bits."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.interrupts import uninterrupted
from offload.native.device_program import LIBRARIES, CudaProgram, Program, ProgramError
from offload.native.library import Work
from offload.native.table import (
    ADAM,
    ADAM_DITHERED,
    FLOATS,
    MOST_ARGUMENTS,
    SUM_SQUARES,
    AdamScalars,
    DitheredScalars,
    Kernel,
    touched,
)
from offload.native.torch_kernels import DeviceKernels
from offload.sizes import DITHER_BLOCK, SUM_BLOCK


class _Grid(NamedTuple):
    """How a kernel is launched, as `device_kernels.h` has it.

    Attributes:
        threads: of a block.
        positions: how many a block works on.
    """

    threads: int
    positions: int


_GRIDS = {ADAM: _Grid(256, 256), ADAM_DITHERED: _Grid(256, 256), SUM_SQUARES: _Grid(1024, SUM_BLOCK)}
"""The kernels that are compiled; the others are operations of torch."""


class DeviceCall(ctypes.Structure):
    """The arguments of a launch: device_kernels.h, struct device_call."""

    _fields_ = (
        ("tensors", ctypes.c_void_p * MOST_ARGUMENTS),
        ("types", ctypes.c_int32 * MOST_ARGUMENTS),
        ("first", ctypes.c_int64),
        ("n", ctypes.c_int64),
    )


_logger = logging.getLogger("offload")


class CompiledKernels(DeviceKernels):
    """The kernels of `_GRIDS` in one launch each.

    If a launch is refused, it is done by torch's operations, and so are all after it.

    Args:
        scratch: as for `DeviceKernels`.
        program: the compiled kernels.
        room: as for `DeviceKernels`.

    Attributes:
        program: None once a launch was refused.
    """

    def __init__(self, scratch: Tensor, program: Program, room: int = SUM_BLOCK) -> None:
        super().__init__(scratch, room)
        self._device = scratch.device
        self.program: Program | None = program
        self.variant = "device"

    def bind(self, kernel: Kernel, tensors: Sequence[Tensor | None], first: int) -> Callable[[Any], Work]:
        operations = super().bind(kernel, tensors, first)
        grid = _GRIDS.get(kernel)
        is_split = kernel is ADAM_DITHERED and tensors[1] is not None
        if grid is None or is_split:
            return operations
        pointers, types = kernel.addresses(tensors, first)

        def bound(scalars: ctypes.Structure | None) -> Work:
            def work(low: int, high: int) -> None:
                call = DeviceCall(tuple(pointers), tuple(types), low, high - low)
                blocks = touched(low, high - low, grid.positions)
                arguments = [call] if scalars is None else [call, scalars]
                if not self._launch(f"offload_device_{kernel.name}", blocks, grid.threads, arguments):
                    operations(scalars)(low, high)

            return work

        return bound

    def _launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Any]) -> bool:
        """Launches a kernel, if there is anything for it to do; returns False if that was refused, now or before."""
        program = self.program
        if program is None:
            return False
        try:
            if blocks:
                program.launch(kernel, blocks, threads, arguments)
        except ProgramError as error:
            self.program, self.variant = None, DeviceKernels.variant
            _log_operations(self._device, str(error))
            return False
        return True


def device_kernels(scratch: Tensor, stream: Callable[[], int] | None, room: int = SUM_BLOCK) -> DeviceKernels:
    """The kernels for a device: compiled ones if they can be had and have the same bits, else torch's operations.

    Args:
        scratch: as for `DeviceKernels`.
        stream: gives the handle of the current stream of scratch's device; None: nothing is compiled.
        room: as for `DeviceKernels`.
    """
    program = None
    if stream is not None and scratch.device.type in LIBRARIES:
        program = _program(scratch, stream)
    return DeviceKernels(scratch, room) if program is None else CompiledKernels(scratch, program, room)


_programs: dict[torch.device, Program | None] = {}
"""None: there is none, as the log says."""


@uninterrupted  # what a signal's handler raises is no failure of a compiler
def _program(scratch: Tensor, stream: Callable[[], int]) -> Program | None:
    """The program for a device, compiled and tested at the first call; None if there is none."""
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
    """Logs that a device's kernels are torch's operations, once a process and device."""
    if device in _logged:
        return
    _logged.add(device)
    _logger.warning("the kernels on %s run as torch's operations, slower and with the same bits: %s", device, reason)


# --- The test at first use ---

_HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "scale": 0.37}
_STEPS = [AdamScalars.at(step=3, decoupled=decoupled, **_HYPER) for decoupled in (False, True)]
_LENGTH = 4099


@torch.no_grad()
def require_same_bits(scratch: Tensor, program: Program) -> None:
    """Runs the kernels with all dtypes, and compares their bits with those of torch's operations.

    Raises:
        ProgramError: if a launch was refused, or the bits differ.
    """
    compiled, operations, device = CompiledKernels(scratch, program), DeviceKernels(scratch), scratch.device
    both: tuple[DeviceKernels, DeviceKernels] = compiled, operations
    for dtype in FLOATS:
        x = _numbers(SUM_BLOCK + _LENGTH, dtype).to(device)
        finite = x.nan_to_num(1).clamp(-9, 9)  # a sum with NaN, Inf or 1e76 tells nothing of the others
        for values, first in itertools.product((x, finite), (0, 777)):
            results, wanted = (torch.zeros(2, dtype=torch.float64, device=device) for _ in range(2))
            for kernels, sums in zip(both, (results, wanted), strict=True):
                kernels.bind(SUM_SQUARES, (values, sums), first)(None)(first, first + len(values))
            _require_same(results, wanted, f"sums of squares of {dtype}")
        for scalars in _STEPS:
            for out in (None, *FLOATS):
                runs = []
                for kernels in both:
                    p, m, v = (_numbers(_LENGTH, torch.float32, seed).to(device) for seed in range(3))
                    to = None if out is None else torch.zeros(_LENGTH, dtype=out, device=device)
                    kernels.bind(ADAM, (p, m, v, x[:_LENGTH], to), 0)(scalars)(0, _LENGTH)
                    runs.append((p, m, v) if to is None else (p, m, v, to))
                for results, wanted in zip(*runs, strict=True):
                    _require_same(results, wanted, f"steps with gradients of {dtype}")
        for decoupled, out, moment in itertools.product((False, True), FLOATS, (torch.bfloat16, torch.uint8)):
            found: list[tuple[Tensor, ...]] = []
            for kernels in both:
                p = _numbers(_LENGTH, torch.float32).to(device)
                m, v = (torch.zeros(_LENGTH, dtype=moment, device=device) for _ in range(2))
                blocks = touched(0, _LENGTH, DITHER_BLOCK) if moment is torch.uint8 else 0
                scales = [torch.zeros(blocks, dtype=torch.uint8, device=device) for _ in range(2 if blocks else 0)]
                to = torch.zeros(_LENGTH, dtype=out, device=device)
                tensors = (p, None, m, v, *(scales or (None, None)), x[:_LENGTH], to)
                for step in (1, 2):  # the second one decodes
                    scalars = DitheredScalars.at(step=step, decoupled=decoupled, **_HYPER)
                    kernels.bind(ADAM_DITHERED, tensors, 0)(scalars)(0, _LENGTH)
                found.append((p, m, v, *scales, to))
            for results, wanted in zip(*found, strict=True):
                _require_same(results, wanted, f"steps with moments of {moment} and gradients of {dtype}")
    if compiled.program is None:
        raise ProgramError("the driver refused a launch")


def _numbers(n: int, dtype: torch.dtype, seed: int = 3) -> Tensor:
    """Usual numbers, of which every eighth has random bits: NaN, Inf, denormals. They are on the CPU."""
    rng = np.random.default_rng(seed)
    usual = torch.from_numpy(np.abs(rng.standard_normal(n)).astype(np.float32)).to(dtype)
    bits = torch.from_numpy(rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8)).view(dtype)
    usual[::8] = bits[::8]
    return usual


def _require_same(result: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(_bits(result), _bits(wanted)):
        raise ProgramError(f"{what} have other bits than torch's")


def _bits(x: Tensor) -> Tensor:
    """The numbers as integers on the CPU, with the same bits for every NaN."""
    values = x.cpu()
    if not values.is_floating_point():
        return values
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()]
    return values.masked_fill(values.isnan(), torch.nan).view(integers)
