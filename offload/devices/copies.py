"""The only file that knows streams: copies between host and device memory, and what waits for them.

[Note: who waits]
A device works through its streams; the host queues work and goes on. A `DeviceEvent` is a point in what is queued.
Copies run on streams of their own, and begin after the event of what they depend on. What needs their result waits on
the device (`wait_on_device`). The host waits (`wait`) only where it needs the memory: to read what was copied to it, or
to use the source of a copy for something else.

A copier may perform a copy at any moment after `after` and before the end of its `wait()` or `wait_on_device()`. Until
then `dst` must not be read or reused, nor `src` changed or freed. After `wait_on_device()` this holds for what the host
does only, until `done()` is true or `wait()` has returned. The tests have a copier that copies at the last moment.
Where an interrupt comes before anybody has noted the `Copy`, that is dropped, and waits as it goes.

[Note: gathered copies]
`gather_to_host` brings several tensors to the host in one copy, through device memory in which they lie as they will
lie there. Copies that go through the same memory do so one after the other. So nobody has to wait for it.

[Note: how long copies take]
The host does not see when a copy begins and ends. So about one copy in SAMPLED of each direction has an event before it
and one behind it, and the device says later how far apart the two are. Of all copies only the bytes are counted: they
take what those take that were looked at, by their bytes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.errors import BudgetError, ConfigError, DeviceError
from offload.interrupts import uninterrupted, uninterrupted_entry
from offload.native.memory import immortalise
from offload.sizes import format_bytes


def accelerator() -> torch.device | None:
    """The accelerator on which models can be trained; None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    # An MPS device has neither memory of its own nor streams.
    return None if device is None or device.type == "mps" else device


def device_name(device: torch.device | None) -> str:
    """The name of a device's kind; of None, "cpu"."""
    return "cpu" if device is None else str(torch.get_device_module(device).get_device_name(device))


def finish_queue(device: torch.device) -> None:
    """Waits for all that is queued on the current stream of a device, so that another stream may use its tensors."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def stream_handle(device: torch.device) -> int:
    """The driver's handle of the device's current stream; 0 for a device without streams."""
    if device.type in ("cpu", "meta"):
        return 0
    if device.type == "cuda":
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(torch.accelerator.current_stream(device).stream_id)


def require_not_recorded(device: torch.device, what: str) -> None:
    """Requires that the work of a device's current stream runs, and is not recorded into a graph (torch.cuda.graph).

    Args:
        device: the device.
        what: what is about to be done there, as the error says it.

    Raises:
        ConfigError: if it is recorded.
    """
    if device.type in ("cpu", "meta"):
        return
    is_recorded = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if is_recorded is not None and is_recorded():
        raise ConfigError(
            f"{what} is being recorded into a graph of {device}, whose replays run no Python: nothing would be fetched "
            "or stepped, and no gradient taken. Leave torch.cuda.graph out of training; to generate with one, record "
            "copy.deepcopy(model)"
        )


class DeviceEvent(ABC):
    """A point in what is queued on a device. See [Note: who waits]."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device is past this point. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until the device is past this point. May be called again, and from any thread."""

    @abstractmethod
    def wait_on_device(self) -> None:
        """Makes what is queued on the current stream from now on begin after this point. The host does not wait."""


class Copy(DeviceEvent):
    """A copy under way: the event after which `dst` holds `src`."""


UP, DOWN = "up", "down"
"""The directions of copies: to a device, and to RAM."""
SAMPLED = 16
"""See [Note: how long copies take]."""
ENDING_S = 30.0
"""The longest that freeing memory waits for copies. They may never end where another rank is gone."""
_KEPT = 0.9
"""What the copies before a sample count beside it: so the last ten or so are what counts."""

Part = tuple[int, Tensor]
"""A tensor, shape (n,), and the element at which it begins among others."""


def gather(parts: Sequence[Part], into: Tensor) -> None:
    """Writes tensors where each begins, and zeros between them. What lies side by side takes one kernel.

    Args:
        parts: the tensors, in the order of their places.
        into: shape (n,), of their dtype and on their device.
    """
    end = 0
    side_by_side: list[tuple[int, list[Tensor]]] = []
    with torch.no_grad():
        for start, part in parts:
            if start > end:
                into[end:start].zero_()
            if start > end or not side_by_side:
                side_by_side.append((start, []))
            side_by_side[-1][1].append(part)
            end = start + len(part)
        for start, tensors in side_by_side:
            torch.cat(tensors, out=into[start : start + sum(map(len, tensors))])


class DeviceUse(NamedTuple):
    """What torch's allocator has of a device, in bytes.

    Attributes:
        within_bytes: what tensors of this process may take there at most: what is free, and what the allocator has.
        allocated_bytes: what they take now.
        peak_bytes: the most that they took at once, since somebody reset that.
        reserved_peak_bytes: the most that the allocator had from the driver for them, since then.
    """

    within_bytes: int
    allocated_bytes: int
    peak_bytes: int
    reserved_peak_bytes: int


class Copier(ABC):
    """Copies between a device and host memory.

    Copies of different calls may complete in any order. A copy begins after the event `after`, which `mark` has made;
    None: after all that the current stream has queued.
    """

    direct: bool
    """Whether device memory is host memory that kernels may write in place, without a copy."""
    pins: bool = False
    """Whether `pin` locks memory."""

    @property
    def busy_s(self) -> Mapping[str, float]:
        """For about how many seconds copies were made, by UP and DOWN; empty where the host makes them."""
        return {}

    def current(self) -> object:
        """The current stream. What is queued on streams that are equal runs in the order in which it was queued."""
        return None

    @abstractmethod
    def mark(self, stream: object = None) -> DeviceEvent:
        """An event at the end of what a stream has queued.

        Args:
            stream: what `current` gave; None: the current stream.
        """

    @abstractmethod
    def to_host(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        """Starts copying device tensor `src` into host tensor `dst` (same shape; dtypes may differ)."""

    @abstractmethod
    def gather_to_host(
        self, parts: Sequence[Part], staging: Tensor, dst: Tensor, after: DeviceEvent | None = None
    ) -> Copy:
        """Starts copying device tensors, with zeros between them, into one host tensor; see [Note: gathered copies].

        Args:
            parts: the tensors, in the order of their places: the first begins at element 0, the last ends with `dst`.
            staging: device memory of the shape and dtype of `dst`, that of the tensors.
            dst: 1-D.
            after: as for all copies.
        """

    @abstractmethod
    def to_device(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        """Starts copying host tensor `src` into device tensor `dst` (same shape and dtype)."""

    def after_uploads(self) -> AbstractContextManager[None]:
        """A context for work that begins after the copies to the device that were started before.

        Work on other streams does not wait for these copies. What is queued inside must not allocate memory.
        """
        return nullcontext()

    def ahead_of_downloads(self) -> AbstractContextManager[None]:
        """A context for work that runs before the copies to the host that are started later.

        Work on other streams does not wait for it, and it does not wait for them.
        """
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """A context for work that begins after what the current stream has queued, and for which no other stream waits.

        What it reads may be freed or changed after an event from `mark` inside. What is queued inside must not allocate
        memory.
        """
        return nullcontext()

    def apart(self, place: int) -> AbstractContextManager[None]:
        """A context for work that waits for nothing but what was queued in such contexts of the same place before.

        Args:
            place: 0 or 1.

        What it allocates has to be freed inside. The host waits for an event from `mark` inside.
        """
        return nullcontext()

    def free_bytes(self) -> int | None:
        """How many bytes are free on the device; None: its memory is the host's."""
        return None

    def return_freed(self) -> None:
        """Gives memory that torch's allocator keeps of freed tensors back to the device. Waits for the device."""
        return

    def use(self) -> DeviceUse | None:
        """What torch's allocator has of the device; None: its memory is the host's."""
        return None

    def refusals(self) -> int:
        """How often torch's allocator has raised an out-of-memory error for the device."""
        return 0

    @abstractmethod
    def pin(self, memory: Tensor) -> None:
        """Page-locks host memory, where that makes copies faster.

        Raises:
            BudgetError: if the driver refuses.
        """

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undoes `pin`, for memory that is about to be freed. Waits for copies under way, also where `pins` is False.

        Memory of which copies do not end, since what the device does before them does not, is kept for good.
        """


class _Done(Copy):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def wait_on_device(self) -> None:
        return None


DONE = _Done()
"""A copy that has ended, and an event that is past."""


class HostCopier(Copier):
    """Copies where kernels can write to the model's memory, at once. Kernels write parameters in place."""

    direct = True

    def mark(self, stream: object = None) -> DeviceEvent:
        return DONE

    def to_host(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        dst.copy_(src)
        return DONE

    def gather_to_host(
        self, parts: Sequence[Part], staging: Tensor, dst: Tensor, after: DeviceEvent | None = None
    ) -> Copy:
        gather(parts, dst)
        return DONE

    def to_device(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        dst.copy_(src)
        return DONE

    def pin(self, memory: Tensor) -> None:
        return None

    def unpin(self, memory: Tensor) -> None:
        return None


@contextmanager
def _calling(device: torch.device) -> Iterator[None]:
    """A context in which the driver is called for `device`, by whatever thread.

    A call that names no device is for the thread's current one. If that has no context, CUDA gives it one, which takes
    half a GiB: the events of a model on the second GPU would take memory of the first.

    Raises:
        DeviceError: if a call fails.
    """
    try:
        with torch.accelerator.device_index(device.index):
            yield
    except torch.AcceleratorError as error:
        raise DeviceError.of(error) from error


class _StreamEvent(Copy):
    """An event that was recorded on a stream.

    Args:
        event: torch's.
        device: the device of its stream.
        current: returns the current stream.
        src: the sources of the copy that ends with the event, kept until then; None: it is no copy's.
    """

    def __init__(
        self, event: Any, device: torch.device, current: Callable[[], Any], src: Sequence[Tensor] | None
    ) -> None:
        self._event = event
        self._device = device
        self._current = current
        # Keeps the sources from the caching allocator until the copy has read them.
        self._src = src
        self._process = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the driver can be asked for it: not in the child of a fork."""
        return os.getpid() == self._process

    @uninterrupted_entry
    def __del__(self) -> None:
        if not self.is_of_this_process:
            immortalise(self._event)  # the driver does not work in the child of a fork, and torch's destructor calls it
        elif self._src is not None:
            self.wait()

    @uninterrupted
    def done(self) -> bool:
        with _calling(self._device):
            if not self._event.query():
                return False
        self._src = None
        return True

    @uninterrupted
    def wait(self) -> None:
        with _calling(self._device):
            self._event.synchronize()
        self._src = None

    def wait_on_device(self) -> None:
        with _calling(self._device):
            self._event.wait(self._current())
        # Whoever gets its memory next uses it on this stream, after the copy.
        self._src = None

    def seconds_after(self, other: _StreamEvent) -> float | None:
        """How long after another event of its stream the device came to this one; both have been passed.

        None: the device does not say, or has failed.
        """
        try:
            return float(other._event.elapsed_time(self._event)) / 1e3
        except RuntimeError:
            return None


class _CopyTimes:
    """How long the copies of one direction took; see [Note: how long copies take]. Any thread may call it.

    Args:
        event: records an event on the stream of the copies, which notes the time.
    """

    def __init__(self, event: Callable[[], _StreamEvent]) -> None:
        self._seconds = 0.0
        self._event = event
        self._lock = threading.Lock()
        self._random = random.Random(0)  # training repeats its copies: every 16th one may always be the same
        self._left = 0  # copies until one is looked at
        self._sample: tuple[_StreamEvent, _StreamEvent, int] | None = None
        self._sampled_s = self._sampled_bytes = 0.0
        self._unknown_bytes = 0  # copied before the first sample is known

    @property
    def seconds(self) -> float:
        """What the copies so far took. A device that has failed is not asked any more."""
        with self._lock, suppress(DeviceError):
            self._is_free()
        return self._seconds

    def begins(self, nbytes: int) -> _StreamEvent | None:
        """A copy is queued next. Returns the event for `ends`, if it is looked at."""
        with self._lock:
            self._left -= 1
            is_looked_at = self._left < 0 and self._is_free()
            if self._sampled_bytes:
                self._seconds += nbytes * self._sampled_s / self._sampled_bytes
            else:
                self._unknown_bytes += nbytes
            if not is_looked_at:
                return None
            self._left = self._random.randrange(2 * SAMPLED)
        return self._event()

    def ends(self, begun: _StreamEvent, nbytes: int) -> None:
        """A copy that is looked at was queued."""
        ended = self._event()
        with self._lock:
            self._sample = begun, ended, nbytes

    def _is_free(self) -> bool:
        """Whether no sample is under way. Takes in the last one if it has ended."""
        if self._sample is None:
            return True
        begun, ended, nbytes = self._sample
        if not ended.is_of_this_process or not ended.done():
            return False
        self._sample, seconds = None, ended.seconds_after(begun)
        if seconds is not None:
            self._sampled_s = _KEPT * self._sampled_s + seconds
            self._sampled_bytes = _KEPT * self._sampled_bytes + nbytes
            if self._unknown_bytes and self._sampled_bytes:
                self._seconds += self._unknown_bytes * self._sampled_s / self._sampled_bytes
                self._unknown_bytes = 0
        return True


class DeviceCopier(Copier):
    """Copies to and from a device with memory of its own.

    There is one stream for each direction, so that both directions of the link work at once beside the compute stream,
    and three for work that waits for neither.
    """

    direct = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # CUDA's own classes, whose events can be told to block: a thread that waits sleeps, and leaves its core to the
        # kernels. They must not be mixed with torch's general ones: neither checks what it is given, and each reads
        # the other's memory as its own.
        is_cuda = device.type == "cuda"
        # What goes to the host, and an average before it, gets ahead of what computes, as the streams of torch's FSDP2.
        first = {"priority": -1} if is_cuda else {}
        stream = torch.cuda.Stream if is_cuda else torch.Stream
        self._new_event: Callable[..., Any] = partial(torch.Event, device)
        self._current: Callable[[], Any] = partial(torch.accelerator.current_stream, device)
        if is_cuda:
            self._new_event = partial(torch.cuda.Event, blocking=True)
            self._current = partial(torch.cuda.current_stream, device)
        self._down = stream(device, **first)
        self._up = stream(device)
        self._times = {
            way: _CopyTimes(partial(self._record_time, of)) for way, of in ((UP, self._up), (DOWN, self._down))
        }
        self._beside = stream(device, **first)
        self._apart = stream(device), stream(device)
        # CUDA's and ROCm's. Others cannot lock memory that is there already.
        cudart = getattr(torch.get_device_module(device), "cudart", None)
        self._runtime: Any = None if cudart is None else cudart()
        self.pins = self._runtime is not None
        self._process = os.getpid()

    @property
    def busy_s(self) -> Mapping[str, float]:
        return {way: one.seconds for way, one in self._times.items()}

    def current(self) -> object:
        return self._current()

    def mark(self, stream: object = None) -> DeviceEvent:
        with _calling(self._device):
            return self._record(self._current() if stream is None else stream)

    def to_host(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        return self._copy(DOWN, src, dst, after)

    @uninterrupted
    def gather_to_host(
        self, parts: Sequence[Part], staging: Tensor, dst: Tensor, after: DeviceEvent | None = None
    ) -> Copy:
        begins = after or self.mark()
        with self._on(self._down):
            begins.wait_on_device()
            gather(parts, staging)
            return self._queue(DOWN, staging, dst, [src for _, src in parts])

    def to_device(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        return self._copy(UP, src, dst, after)

    @contextmanager
    def after_uploads(self) -> Iterator[None]:
        with self._on(self._up):
            yield

    @contextmanager
    def ahead_of_downloads(self) -> Iterator[None]:
        with self._on(self._down):
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        begins = self.mark()
        with self._on(self._beside):
            begins.wait_on_device()
            yield

    @contextmanager
    def apart(self, place: int) -> Iterator[None]:
        with self._on(self._apart[place]):
            yield

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Makes a stream this thread's current one.

        `with stream` keeps the stream before in `stream` itself. If two threads were inside, each would leave with the
        other's.
        """
        with _calling(self._device):
            before = self._current()
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def free_bytes(self) -> int:
        self.return_freed()  # what the allocator holds in pieces, and for other streams, cannot be given to anyone
        return torch.accelerator.get_memory_info(self._device)[0]

    def return_freed(self) -> None:
        torch.accelerator.empty_cache()

    def use(self) -> DeviceUse:
        stats, (free, _) = self._stats(), torch.accelerator.get_memory_info(self._device)
        return DeviceUse(
            free + stats.get("reserved_bytes.all.current", 0),
            stats.get("allocated_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
        )

    def refusals(self) -> int:
        return self._stats().get("num_ooms", 0)

    def _stats(self) -> dict[str, int]:
        return torch.accelerator.memory_stats(self._device)  # without any, before the first allocation

    @uninterrupted
    def _copy(self, way: str, src: Tensor, dst: Tensor, after: DeviceEvent | None) -> Copy:
        begins = after or self.mark()
        with self._on(self._up if way == UP else self._down):
            begins.wait_on_device()
            return self._queue(way, src, dst, [src])

    def _queue(self, way: str, src: Tensor, dst: Tensor, sources: Sequence[Tensor]) -> Copy:
        """Queues a copy on the current stream, that of its direction.

        Args:
            way: UP or DOWN.
            src: what is copied.
            dst: where to.
            sources: what must stay until then.
        """
        times, nbytes = self._times[way], dst.nbytes
        begun = times.begins(nbytes)
        dst.copy_(src, non_blocking=True)
        if begun is not None:
            times.ends(begun, nbytes)
        return self._record(self._current(), sources)

    def _record(self, stream: Any, src: Sequence[Tensor] | None = None) -> Copy:
        event = self._new_event()
        event.record(stream)
        return _StreamEvent(event, self._device, self._current, src)

    def _record_time(self, stream: Any) -> _StreamEvent:
        event = self._new_event(enable_timing=True)
        event.record(stream)
        return _StreamEvent(event, self._device, self._current, None)

    def pin(self, memory: Tensor) -> None:
        if self._runtime is None:
            return
        with _calling(self._device):
            error = int(self._runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if error:
            self._forget_error()
            raise BudgetError(
                f"{self._device} refuses to page-lock {format_bytes(memory.numel())} of RAM (error {error}): lower "
                "cpu_memory",
                needed=memory.numel(),
                available=0,
                option="cpu_memory",
            )

    @uninterrupted_entry  # where a garbage collector calls it, Python drops what is raised
    def unpin(self, memory: Tensor) -> None:
        # The child of a fork has not locked it, and must not call the driver.
        if os.getpid() != self._process:
            return
        # Who drops a run, and does not close it, has waited for nothing. Of copies that were waited for on the device
        # nobody keeps the source.
        if not self._have_ended():
            immortalise(memory)
        elif self._runtime is not None:
            with torch.accelerator.device_index(self._device.index):
                error = int(self._runtime.cudaHostUnregister(memory.data_ptr()))
            if error:
                self._forget_error()

    def _have_ended(self) -> bool:
        """Whether all copies have ended, for which it waits. A device that has failed makes no more."""
        ends = time.monotonic() + ENDING_S
        with suppress(RuntimeError):
            while not (self._up.query() and self._down.query()):
                if time.monotonic() > ends:
                    return False
                time.sleep(1e-3)
        return True

    def _forget_error(self) -> None:
        """Clears this thread's last error of the driver, which the next launch of a kernel would take for its own."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


def copier_for(device: torch.device) -> Copier:
    """The copier for a model on `device`."""
    return HostCopier() if device.type == "cpu" else DeviceCopier(device)


COPIER_FOR: ContextVar[Callable[[torch.device], Copier]] = ContextVar("offload.copier_for", default=copier_for)
"""What makes the copier of the runs that are made in this thread. OffloadZero asks once. Only the tests have another:
`tests.support.late_copier.copying_by`."""
