"""The only file that knows streams: copies between host and device memory, with completion.

A copier may perform a copy at any moment between its start and the end of `Copy.wait()`. Until `wait()` has returned,
`dst` must not be read or reused, nor `src` changed or freed. The tests have a copier that copies at the last moment.
Where an interrupt comes before anybody has noted the `Copy`, that is dropped, and waits as it goes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from offload.errors import BudgetError
from offload.interrupts import uninterrupted, uninterrupted_entry
from offload.sizes import format_bytes


def accelerator() -> torch.device | None:
    """The kind of device on which models can be trained beside the CPU; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    # An MPS device has neither memory of its own nor streams.
    return None if found is None or found.type == "mps" else found


def finish_queue(device: torch.device) -> None:
    """Waits for all that is queued on the current stream of a device: another stream may use, and free, its tensors."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


class Copy(ABC):
    """A copy under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has completed; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until `dst` holds `src`. May be called again, and from any thread."""


class Copier(ABC):
    """Copies between a device and host memory.

    Guarantees: `to_host` sees the results of work queued on the device before the call. Work queued on the device after
    a `to_device` copy was waited for sees its result. Copies of different calls may complete in any order.
    """

    direct: bool
    """Whether device memory is host memory that kernels may write in place, without a copy."""

    @abstractmethod
    def to_host(self, src: Tensor, dst: Tensor) -> Copy:
        """Starts copying device tensor `src` into host tensor `dst` (same shape; dtypes may differ)."""

    @abstractmethod
    def to_device(self, src: Tensor, dst: Tensor) -> Copy:
        """Starts copying host tensor `src` into device tensor `dst` (same shape and dtype)."""

    def free_bytes(self) -> int | None:
        """Memory free on the device; None: it is the host's."""
        return None

    @abstractmethod
    def pin(self, memory: Tensor) -> None:
        """Page-locks host memory, where that makes copies faster. Raises: BudgetError if the driver refuses."""

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undoes `pin`."""


class _Done(Copy):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_DONE = _Done()


class HostCopier(Copier):
    """For models on the CPU: copies at once, and kernels write parameters in place."""

    direct = True

    def to_host(self, src: Tensor, dst: Tensor) -> Copy:
        dst.copy_(src)
        return _DONE

    def to_device(self, src: Tensor, dst: Tensor) -> Copy:
        dst.copy_(src)
        return _DONE

    def pin(self, memory: Tensor) -> None:
        return None

    def unpin(self, memory: Tensor) -> None:
        return None


class _StreamCopy(Copy):
    def __init__(self, event: torch.Event | torch.cuda.Event, src: Tensor) -> None:
        self._event = event
        # Keeps the source from the caching allocator until the copy has read it.
        self._src: Tensor | None = src
        self._process = os.getpid()

    @uninterrupted_entry
    def __del__(self) -> None:
        if self._src is not None and os.getpid() == self._process:
            self.wait()

    def done(self) -> bool:
        if self._src is not None and self._event.query():
            self._src = None
        return self._src is None

    @uninterrupted
    def wait(self) -> None:
        self._event.synchronize()
        self._src = None


class DeviceCopier(Copier):
    """One stream a direction, so that both directions of the link work at once beside the compute stream."""

    direct = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)
        # CUDA's and ROCm's. Others cannot lock memory that is there already.
        cudart = getattr(torch.get_device_module(device), "cudart", None)
        self._runtime: Any = None if cudart is None else cudart()
        self._process = os.getpid()

    def to_host(self, src: Tensor, dst: Tensor) -> Copy:
        return self._copy(self._down, src, dst)

    def to_device(self, src: Tensor, dst: Tensor) -> Copy:
        # The device may still read the old value of `dst` in work queued before.
        return self._copy(self._up, src, dst)

    def free_bytes(self) -> int:
        # What the caching allocator holds in pieces, and for other streams, cannot be given to anyone.
        torch.accelerator.empty_cache()
        return torch.accelerator.get_memory_info(self._device)[0]

    @uninterrupted
    def _copy(self, stream: torch.Stream, src: Tensor, dst: Tensor) -> Copy:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            dst.copy_(src, non_blocking=True)
            event = self._event()
            event.record(stream)
        return _StreamCopy(event, src)

    def _event(self) -> torch.Event | torch.cuda.Event:
        if self._device.type == "cuda":
            # A thread that waits sleeps, and leaves its core to the kernels; torch.Event cannot be told to.
            return torch.cuda.Event(blocking=True)
        return torch.Event(self._device)

    def pin(self, memory: Tensor) -> None:
        if self._runtime is None:
            return
        with torch.accelerator.device_index(self._device.index):
            error = int(self._runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if error:
            raise BudgetError(
                f"{self._device} refuses to page-lock {format_bytes(memory.numel())} of RAM (error {error}): lower "
                "cpu_memory",
                needed=memory.numel(),
                available=0,
                option="cpu_memory",
            )

    def unpin(self, memory: Tensor) -> None:
        # The child of a fork has not locked it, and must not call the driver.
        if self._runtime is not None and os.getpid() == self._process:
            with torch.accelerator.device_index(self._device.index):
                self._runtime.cudaHostUnregister(memory.data_ptr())


def copier_for(device: torch.device) -> Copier:
    """The copier for a model on `device`."""
    return HostCopier() if device.type == "cpu" else DeviceCopier(device)
