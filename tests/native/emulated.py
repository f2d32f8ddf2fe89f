"""The NEON kernels where there is no ARM: compiled for it as the build does, and called in a process of qemu-user."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offload import native
from offload.native.library import Work
from offload.native.table import MOST_ARGUMENTS, NO_TENSOR, Kernel

KERNELS = Path(native.__file__).parents[2] / "kernels"
COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
CALL = struct.Struct(f"40s3q{MOST_ARGUMENTS}q{MOST_ARGUMENTS}i64s")
"""emulated.c: struct call."""
AROUND, GUARD = 192, 7
"""Bytes around each tensor's memory, and what they are."""

_missing = [name for name in ("cmake", COMPILER, EMULATOR) if shutil.which(name) is None]
QEMU = pytest.param(
    "qemu",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            bool(_missing), reason=f"{_missing} not found: apt install cmake gcc-aarch64-linux-gnu qemu-user"
        ),
        pytest.mark.skipif(not KERNELS.is_dir(), reason="the kernels' sources are not here"),
    ],
)
"""A variant for tests that call kernels by `bits.kernels`."""


class EmulatedKernels:
    """A backend of `native.Kernels`, as the kernel library is one. One call at a time."""

    variant = "qemu"

    def __init__(self, program: subprocess.Popen[bytes]) -> None:
        self._program = program
        self._lock = threading.Lock()

    def bind(self, kernel: Kernel, tensors: Sequence[Tensor | None], first: int) -> Callable[[object], Work]:
        addresses, types = kernel.addresses(tensors, first)

        def bound(scalars: ctypes.Structure | None) -> Work:
            given = b"" if scalars is None else bytes(scalars)
            return lambda low, high: self._call(kernel.name, tensors, addresses, types, given, low, high)

        return bound

    def _call(
        self,
        name: str,
        tensors: Sequence[Tensor | None],
        addresses: list[int],
        types: list[int],
        scalars: bytes,
        low: int,
        high: int,
    ) -> None:
        """Whole storages travel, each once and as far behind a line as here: so tensors share memory there, too."""
        storages: dict[int, tuple[slice, np.ndarray]] = {}
        size, at = AROUND, [0] * MOST_ARGUMENTS
        for number, x in enumerate(tensors):
            if x is None:
                continue
            storage = x.untyped_storage()
            here = storage.data_ptr()
            if here not in storages:
                place = size + (here - size) % 64
                bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                storages[here] = slice(place, place + len(bytes_)), bytes_
                size = place + len(bytes_) + AROUND
            at[number] = addresses[number] - here + storages[here][0].start
        types = types + [NO_TENSOR] * (MOST_ARGUMENTS - len(types))
        function = f"offload_{name}_neon".encode()
        with self._lock:
            memory = np.full(size, GUARD, dtype=np.uint8)
            for place_, bytes_ in storages.values():
                memory[place_] = bytes_
            to, back = self._program.stdin, self._program.stdout
            assert to is not None
            assert back is not None
            with suppress(BrokenPipeError):  # what it ended with says more
                to.write(CALL.pack(function, low, high - low, size, *at, *types, scalars))
                to.write(memory)
                to.flush()
            if back.readinto(memory) != size:  # type: ignore[attr-defined]
                raise RuntimeError(f"{name} ended {EMULATOR} with {self._program.wait()}: emulated.c says why")
            for place_, bytes_ in storages.values():
                bytes_[:] = memory[place_]
                memory[place_] = GUARD
            assert (memory == GUARD).all(), f"{name} wrote around its tensors"


@functools.cache
def emulated() -> EmulatedKernels:
    """Compiled once a process."""
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    folder = until_the_end.enter_context(tempfile.TemporaryDirectory())
    target = [f"-DCMAKE_C_COMPILER={COMPILER}", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    program = f"{folder}/emulated"
    for command in (
        ["cmake", "-S", str(KERNELS), "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *target],
        ["cmake", "--build", folder, "--parallel", "2"],
        [COMPILER, "-Wall", f"-I{KERNELS}", "-o", program, str(Path(__file__).with_suffix(".c")), "-ldl"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    command = [EMULATOR, "-L", SYSTEM, program, f"{folder}/liboffload_kernels.so"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return EmulatedKernels(until_the_end.enter_context(process))
