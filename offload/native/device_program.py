"""`device_kernels.h`, compiled for a GPU at run time by NVRTC, and what launches it through the CUDA driver.

Both are C libraries that torch's CUDA builds bring along; no CUDA toolkit and no header is needed.
Torch's private `_compile_kernel` would do the same, but asks for a toolkit (CUDA_HOME), whose headers it offers to the
compiler; it takes an int for 32 bits, and launches in whatever context the calling thread has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from offload.interrupts import uninterrupted

SOURCE = Path(__file__).with_name("device_kernels.h")

_OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""The numeric contract: nothing is contracted, denormals are kept, division and square root are exact."""

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class ProgramError(Exception):
    """Kernels could not be compiled for a device, or a launch was refused."""


class Program(Protocol):
    """Kernels that were compiled for a device."""

    def launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Queues a kernel on the device's current stream.

        Args:
            kernel: its name in `device_kernels.h`.
            blocks: how many blocks.
            threads: how many threads in each block.
            arguments: objects of ctypes, of the types of the kernel's parameters.

        Raises:
            ProgramError: if it was not launched.
        """


def _cuda_libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Opens NVRTC and the driver.

    Raises:
        ProgramError: if this torch has no CUDA, or one of them cannot be opened.
    """
    if torch.version.cuda is None:
        raise ProgramError("this torch is not built for CUDA")
    # torch's own stub is linked to the NVRTC that torch was built with, wherever that is installed.
    stub = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    errors = []
    for name in (str(stub), f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"):
        try:
            compiler = ctypes.CDLL(name)
            if hasattr(compiler, "nvrtcCreateProgram"):
                return compiler, ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            errors.append(str(error))
    raise ProgramError("; ".join(errors) or "there is no NVRTC")


LIBRARIES: dict[str, Callable[[], tuple[ctypes.CDLL, ctypes.CDLL]]] = {"cuda": _cuda_libraries}
"""By type of device: what opens its run-time compiler and its driver, with the functions of CUDA's."""


def compile_source(compiler: ctypes.CDLL, source: str, architecture: str) -> bytes:
    """Compiles `source` to machine code.

    Args:
        compiler: NVRTC.
        source: C++ for CUDA.
        architecture: such as "sm_90".

    Raises:
        ProgramError: with the compiler's log.
    """

    def call(name: str, *arguments: Any) -> None:
        error = getattr(compiler, name)(*arguments)
        if error:
            compiler.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise ProgramError(f"{name}: {compiler.nvrtcGetErrorString(error).decode()}{log()}")

    def log() -> str:
        size = ctypes.c_size_t()
        if not program or compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or size.value <= 1:
            return ""
        text = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, text)
        return f": {text.value.decode(errors='replace')}"

    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in _OPTIONS)]
    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"device_kernels.cu", 0, None, None)
    try:
        call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, code)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


class CudaProgram:
    """The kernels in a device's memory, from construction to the end of the process.

    Args:
        device: of a type in LIBRARIES, with an index; torch has used its driver before.
        stream: gives the handle of its current stream.

    Raises:
        ProgramError: if the compiler or the driver cannot be opened, or refuses.
        OSError: if the kernels' source cannot be read.
    """

    def __init__(self, device: torch.device, stream: Callable[[], int]) -> None:
        compiler, self._driver = LIBRARIES[device.type]()
        self._stream = stream
        self._functions: dict[str, ctypes.c_void_p] = {}
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device.index)
        capability = [ctypes.c_int(), ctypes.c_int()]
        for value, attribute in zip(capability, _CAPABILITY, strict=True):
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        self.architecture = f"sm_{capability[0].value}{capability[1].value}"
        code = compile_source(compiler, SOURCE.read_text(), self.architecture)
        # The context that torch has for the device; a thread that has not called CUDA yet has none.
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._module = ctypes.c_void_p()
        self._inside("cuModuleLoadData", ctypes.byref(self._module), code)

    def launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        function = self._functions.get(kernel)
        if function is None:
            function = ctypes.c_void_p()
            self._inside("cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode())
            self._functions[kernel] = function
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(self._stream())
        self._inside("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, addresses, None)

    @uninterrupted
    def _inside(self, name: str, *arguments: Any) -> None:
        """Calls the driver inside the device's context."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            raise ProgramError(f"{name}: {(text.value or b'unknown').decode()} (error {error})")
