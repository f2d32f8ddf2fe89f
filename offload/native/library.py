"""The C library: where it is, which variants of it run here, and their functions."""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from offload.errors import ConfigError
from offload.native.pool import LibraryWork, declare
from offload.native.table import KERNELS, Kernel

Work = Callable[[int, int], None]
"""A kernel bound to its tensors and scalars, to be run on a range [low, high) of positions."""


_LIBRARY_NAME = "liboffload_kernels.so"
ABI = 6
"""kernels.h: OFFLOAD_ABI."""


class Library:
    """The functions of one variant.

    Attributes:
        library: the C library.

    Raises:
        AttributeError: if one is missing.
    """

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.library, self.variant = library, variant
        self._functions: dict[str, tuple[Any, int]] = {}
        for kernel in KERNELS:
            function = getattr(library, f"offload_{kernel.name}_{variant}")
            function.argtypes = _PARAMETERS
            function.restype = None
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert address is not None
            self._functions[kernel.name] = function, address

    def bind(self, kernel: Kernel, tensors: Sequence[Tensor | None], first: int) -> Callable[[Any], Work]:
        """Binds a kernel to tensors that were checked before.

        Args:
            kernel: the kernel.
            tensors: as its row has them.
            first: the position of their first element.

        Returns:
            A function that takes the scalars, and gives a function that runs the kernel on a range of positions.
        """
        function, address = self._functions[kernel.name]
        addresses, numbers = kernel.addresses(tensors, first)
        pointers, types = kernel.pointers.pack(*addresses), kernel.types.pack(*numbers)

        def bound(scalars: ctypes.Structure | None) -> Work:
            struct = None if scalars is None else ctypes.byref(scalars)
            return LibraryWork(function, address, pointers, types, struct)

        return bound


_PARAMETERS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)  # kernels.h


def library_path() -> Path | None:
    """The C library's path, or None if it was not built.

    It is what OFFLOAD_KERNEL_LIBRARY says, for those who run from a folder and build the library elsewhere. Else it
    lies in the package (a wheel), or in the environment's `offload` folder (an editable install).
    """
    if given := os.environ.get("OFFLOAD_KERNEL_LIBRARY"):
        return Path(given)
    folders = (Path(__file__).parents[1], Path(sysconfig.get_path("platlib")) / "offload")
    paths = (folder / _LIBRARY_NAME for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@functools.cache
def open_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The C library, or why there is none.

    Raises:
        ConfigError: if it is that of another version of offload.
    """
    path = library_path()
    if path is None:
        return None, f"{_LIBRARY_NAME} was not built: there was no C compiler when offload was installed"
    try:
        library = ctypes.CDLL(str(path))
        number = library.offload_abi() if hasattr(library, "offload_abi") else 0
        if number != ABI:
            raise ConfigError(
                f"{path} was built from another version of offload (its interface has number {number}, this version "
                f"needs {ABI}): install offload again"
            )
        library.offload_prefetch.argtypes = (ctypes.c_int64,)
        library.offload_prefetch.restype = ctypes.c_int64
        library.offload_prefetch(-1)
        declare(library)
        library.offload_variant.argtypes = (ctypes.c_int,)
        library.offload_variant.restype = ctypes.c_char_p
        for variant in c_variants(library):
            Library(library, variant)
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be used, install offload again: {error}"
    return library, None


def c_variants(library: ctypes.CDLL) -> tuple[str, ...]:
    names: list[str] = []
    while (name := library.offload_variant(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)
