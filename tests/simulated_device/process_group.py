"""A backend of torch.distributed for the simulated accelerator, "staged": bytes travel through the host, over gloo.

As NCCL's, a collective runs on a stream of its own, after what the current stream has queued; `wait` makes the current
stream wait for it, not the host. Tensors on the CPU are gloo's. In virtual time a collective takes its two copies, of
ranks that do the same at the same time, and its caller the launch of one operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import NAME, host_launches, host_s, host_until, use_clock

CLOCKS = itertools.cycle(range(3, 8))
"""Of the host's, in virtual time: a thread of the backend, of each group, has its own."""
BACKEND = "staged"
Exchange = Callable[[dist.ProcessGroupGloo, Tensor, Tensor], dist.Work]


class StagedWork(dist.Work):
    """Args: done: when the result is on its way to the device: the event that says when it is there."""

    def __init__(self, done: Future[torch.Event], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._done = done
        self._tensors: Sequence[Tensor] = tensors  # not freed before

    def is_completed(self) -> bool:
        return self._done.done() and (self._done.exception() is not None or self._done.result().query())

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._done.result())
        self._tensors = ()
        return True

    def synchronize(self) -> None:
        """The host waits, also in virtual time."""
        self._done.result().synchronize()


class StagedGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._of_host, self._of_device = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout) for name in ("host", "device")
        )
        self._stream: torch.Stream | None = None
        self._clock = next(CLOCKS)
        self._worker = ThreadPoolExecutor(1, "staged-group")

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    # Torch keeps the name with the groups of each device, of which there are none here.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _run(self, received: Tensor, sent: Tensor, exchange: Exchange) -> dist.Work:
        """Args: exchange: called with one of gloo's groups, and with what is received and sent, on the host."""
        if received.is_cpu:
            return exchange(self._of_host, received, sent)
        device = received.device
        self._stream = stream = self._stream or torch.Stream(device)
        queued = torch.accelerator.current_stream(device).record_event()
        host_launches()
        began = host_s()

        def run() -> torch.Event:
            use_clock(self._clock, is_host=False)
            host_until(began)
            torch.accelerator.set_device_index(device)
            stream.wait_event(queued)
            with stream:
                here = sent.cpu()
                there = here if received is sent else torch.empty_like(received, device="cpu")
                exchange(self._of_device, there, here).wait()
                received.copy_(there.pin_memory(), non_blocking=True)
                return stream.record_event()

        return StagedWork(self._worker.submit(run), (sent, received))

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, outputs: list[int], inputs: list[int], opts: Any = None
    ) -> dist.Work:
        return self._run(received, sent, lambda group, out, own: group.alltoall_base(out, own, outputs, inputs))

    def all_gather_single(self, received: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        return self._run(received, sent, lambda group, out, own: group._allgather_base(out, own))

    # Their names before torch 2.13.
    alltoall_base, _allgather_base = all_to_all_single, all_gather_single

    def allgather(self, received: list[list[Tensor]], sent: list[Tensor], opts: Any = None) -> dist.Work:
        if sent[0].is_cpu:
            return self._of_host.allgather(received, sent)  # of objects
        rows = torch.stack(received[0])
        work = self._run(rows, sent[0], lambda group, out, own: group.allgather([list(out)], [own]))
        work.wait()  # what follows on this stream has all of them
        for one, row in zip(received[0], rows, strict=True):
            one.copy_(row)
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._run(tensors[0], tensors[0], lambda group, out, _: group.allreduce([out], opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._run(tensors[0], tensors[0], lambda group, out, _: group.broadcast([out], opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._of_host.barrier()


def register() -> None:
    """Makes the backend known, for new groups."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", NAME])
