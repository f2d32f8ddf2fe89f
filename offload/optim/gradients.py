"""The gradient sink: where gradients go as backward makes them.

[Note: the way of a gradient]
A hook hands over each parameter's gradient as soon as autograd has accumulated it. The sink copies it into RAM: in
the dtype it was made in, or, with accumulation over N > 1 micro-batches, summed in fp32 in the order of the
micro-batches. With the last declared micro-batch it takes the sum of squares, in blocks fixed by an element's
position in its flat: so the norm costs no pass of its own, and has the same bits whatever the chunks and threads
are. Non-finite gradients show in the same sums.

On a device with memory of its own the copies run on streams, and one worker thread does what follows them, in
order; on the CPU everything happens inside the hook.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from itertools import chain
from queue import SimpleQueue

import torch
from torch import Tensor

from offload.copies import Copier
from offload.errors import AccumulationError
from offload.layout import Layout
from offload.native import Kernels, sum_blocks
from offload.store.arena import Arena, carved_bytes
from offload.timeline import GRADIENTS, SUMS, TO_HOST, Timeline

BOUNCES = 2


def _dtype(layout: Layout, flat: int, accumulation: int) -> torch.dtype:
    return torch.float32 if accumulation > 1 else layout.flats[flat].dtype


def _sums_numel(layout: Layout) -> int:
    return sum(sum_blocks(offset, layout.specs[param].numel) for param, (_, offset) in layout.places.items())


def _bounce_bytes(layout: Layout) -> int:
    return max((layout.flats[c.flat].dtype.itemsize * c.numel for c in layout.chunks), default=0)


def arena_bytes(layout: Layout, accumulation: int, *, direct: bool) -> int:
    """What a sink takes from the arena: the gradients, their sums of squares and, if copies need them, bounces."""
    flats = sum(carved_bytes(f.numel * _dtype(layout, f.index, accumulation).itemsize) for f in layout.flats)
    bounces = 0 if direct or accumulation == 1 else BOUNCES * carved_bytes(_bounce_bytes(layout))
    return flats + bounces + carved_bytes(8 * _sums_numel(layout))


class Gradients(ABC):
    """Where gradients go. Parameters are named by their index in `layout.specs`.

    Attributes: accumulation, micro-batches a step; scale, by which the step multiplies what is held (clipping).
    """

    accumulation: int
    scale: float

    @abstractmethod
    def line(self, param: int) -> Tensor:
        """The buffer of what this rank holds of `param`'s gradient: 1-D, on the CPU, in the order of its memory."""

    @abstractmethod
    def chunk(self, index: int) -> Tensor:
        """The gradients of a chunk's elements: shape (chunk.numel,), on the CPU."""

    @abstractmethod
    def has(self, param: int) -> bool:
        """Whether a gradient of `param` arrived since it was last forgotten."""

    @abstractmethod
    def arrive(self, param: int, grad: Tensor) -> None:
        """Takes the gradient of one micro-batch: shape (numel,), on the model's device, as the parameter's dtype.

        It may still be under way when this returns. Raises: AccumulationError if one more than declared came.
        """

    @abstractmethod
    def forget(self, param: int) -> None:
        """The next gradient of `param` begins anew."""

    @abstractmethod
    def forget_all(self) -> None:
        """The next gradients begin anew."""

    @abstractmethod
    def collect(self, params: Collection[int]) -> list[int]:
        """Waits until the gradients of `params`, all of which must have arrived, are in RAM, summed and checked.

        Returns: those of which there are gradients: `params`, and what other ranks have.
        """

    @abstractmethod
    def drain(self) -> None:
        """Waits for what is under way."""

    @abstractmethod
    def norm(self, params: Collection[int]) -> float:
        """The 2-norm over `params`, in fp64; inf or nan if one of them is not finite. After `collect`.

        The sum over blocks is exactly rounded (fsum), so it does not depend on their order.
        """

    @abstractmethod
    def not_finite(self, params: Collection[int]) -> list[int]:
        """Which of `params` hold NaN or Inf. After `collect`."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what is under way, as far as it writes into the arena."""


def too_often(name: str, accumulation: int) -> AccumulationError:
    """A gradient came once more than was declared."""
    return AccumulationError(
        f"{name} got its gradient a {_ordinal(accumulation + 1)} time before step(): "
        f"declare it with OffloadZero(..., accumulation={accumulation + 1}), "
        "or call step() or zero_grad() after each backward (with reentrant checkpointing, a module used twice "
        "counts twice: set use_reentrant=False)"
    )


class GradientSink(Gradients):
    """Of a rank that is alone: all gradients. See [Note: the way of a gradient]."""

    def __init__(
        self,
        layout: Layout,
        accumulation: int,
        arena: Arena,
        kernels: Kernels,
        copier: Copier,
        timeline: Timeline,
    ) -> None:
        self._layout = layout
        self.accumulation = accumulation
        self._kernels = kernels
        self._copier = copier
        self._timeline = timeline
        self._flats = []
        for flat in layout.flats:
            dtype = _dtype(layout, flat.index, accumulation)
            self._flats.append(arena.carve(flat.numel * dtype.itemsize).view(dtype))
        self._sums = self._split_sums(arena.carve(8 * _sums_numel(layout)).view(torch.float64))
        self.scale = 1.0
        self._arrived = [0] * len(layout.specs)
        # Counts what arrived for each parameter; its sums are of the count noted with them.
        self._generation = [0] * len(layout.specs)
        self._summed = [0] * len(layout.specs)
        self._pending: list[tuple[int, Future[None]]] = []
        self._first_chunk = [next(iter(layout.chunks_of[param]), None) for param in range(len(layout.specs))]
        self._worker: ThreadPoolExecutor | None = None
        self._bounces: SimpleQueue[Tensor] = SimpleQueue()
        if not copier.direct:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload-gradients")
            if accumulation > 1:
                for _ in range(BOUNCES):
                    self._bounces.put(arena.carve(_bounce_bytes(layout)))

    def _split_sums(self, sums: Tensor) -> list[Tensor]:
        sizes = [0] * len(self._layout.specs)
        for param, (_, offset) in self._layout.places.items():
            sizes[param] = sum_blocks(offset, self._layout.specs[param].numel)
        return list(sums.split(sizes)) if sizes else []

    def line(self, param: int) -> Tensor:
        flat, offset = self._layout.places[param]
        return self._flats[flat][offset : offset + self._layout.specs[param].numel]

    def chunk(self, index: int) -> Tensor:
        chunk = self._layout.chunks[index]
        return self._flats[chunk.flat][chunk.start : chunk.start + chunk.numel]

    def has(self, param: int) -> bool:
        return self._arrived[param] > 0

    def arrive(self, param: int, grad: Tensor) -> None:
        if self._arrived[param] == self.accumulation:
            raise too_often(self._layout.specs[param].name, self.accumulation)
        first = self._arrived[param] == 0
        self._arrived[param] += 1
        self._generation[param] += 1
        generation = self._generation[param]
        size = grad.numel() * grad.element_size()
        with self._timeline.span("gradient_s"), self._event(GRADIENTS, "gradient", param, size):
            if self.accumulation == 1:
                self._then(param, self._copy(param, grad, self.line(param)))
            else:
                for part, into in self._parts(param, grad):
                    self._accumulate(param, part, into, first=first)
            if self._arrived[param] == self.accumulation:
                self._then(param, lambda: self._sum(param, generation))
        if not self._copier.direct:
            self._timeline.count("device_to_host_bytes", size)

    def forget(self, param: int) -> None:
        self._arrived[param] = 0

    def forget_all(self) -> None:
        self._arrived = [0] * len(self._arrived)

    def collect(self, params: Collection[int]) -> list[int]:
        with self._timeline.span("gradient_s"):
            self.drain()
            for param in params:
                if self._summed[param] != self._generation[param]:
                    self._sum(param, self._generation[param])
        return list(params)

    def drain(self) -> None:
        while self._pending:
            # Forgotten only when it is done: whoever is interrupted here has to wait again.
            param, work = self._pending[0]
            if not work.done():
                with self._waiting("wait for gradient", param):
                    wait([work])
            work.result()
            del self._pending[0]

    def norm(self, params: Collection[int]) -> float:
        return math.sqrt(math.fsum(chain.from_iterable(self._sums[param].numpy() for param in params)))

    def not_finite(self, params: Collection[int]) -> list[int]:
        if math.isfinite(self.norm(params)):
            return []
        return [param for param in params if not math.isfinite(self.norm([param]))]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)

    def _event(self, lane: str, name: str, param: int, size: int | None = None) -> AbstractContextManager[None]:
        """For the timeline: something about `param`, under the first chunk that holds a piece of it."""
        chunk, parameter = self._first_chunk[param], self._layout.specs[param].name
        return self._timeline.event(lane, name, chunk=chunk, parameter=parameter, size=size)

    def _waiting(self, what: str, param: int) -> AbstractContextManager[None]:
        name = self._layout.specs[param].name
        return self._timeline.waiting(what, chunk=self._first_chunk[param], parameter=name, tier="device")

    def _copy(self, param: int, src: Tensor, dst: Tensor) -> Callable[[], None]:
        """Starts a copy into RAM; returns what waits for it."""
        if self._copier.direct:
            return self._copier.to_host(src, dst).wait
        moving = self._timeline.begin(
            TO_HOST,
            "copy",
            chunk=self._first_chunk[param],
            parameter=self._layout.specs[param].name,
            size=src.numel() * src.element_size(),
            tier="device",
        )
        copy = self._copier.to_host(src, dst)

        def arrived() -> None:
            copy.wait()
            self._timeline.end(moving)

        return arrived

    def _then(self, param: int, work: Callable[[], None]) -> None:
        """Runs `work` now, or after what was handed to the worker before."""
        if self._worker is None:
            work()
        else:
            while self._pending and self._pending[0][1].done() and not self._pending[0][1].exception():
                del self._pending[0]
            self._pending.append((param, self._worker.submit(work)))

    def _parts(self, param: int, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient and its buffer, in parts that fit a bounce."""
        line = self.line(param)
        size = grad.numel() if self._copier.direct else max(_bounce_bytes(self._layout) // grad.element_size(), 1)
        yield from zip(grad.split(size or 1), line.split(size or 1), strict=True)

    def _accumulate(self, param: int, part: Tensor, into: Tensor, *, first: bool) -> None:
        def add(x: Tensor) -> None:
            with self._event(SUMS, "cast" if first else "accumulate", param):
                if first:
                    self._kernels.cast(x, into)
                else:
                    self._kernels.accumulate(into, x)

        if self._copier.direct:
            add(part)
            return
        # Blocks while both bounces are under way: the memory is bounded, so the device has to wait.
        with self._waiting("wait for bounce", param):
            bounce = self._bounces.get()
        landed = bounce[: part.numel() * part.element_size()].view(part.dtype)
        arrived = self._copy(param, part, landed)

        def finish() -> None:
            try:
                arrived()
                add(landed)
            finally:
                self._bounces.put(bounce)

        self._then(param, finish)

    def _sum(self, param: int, generation: int) -> None:
        _, offset = self._layout.places[param]
        with self._event(SUMS, "sum of squares", param):
            self._kernels.sum_squares(self.line(param), offset, self._sums[param])
        # Of an older generation it says nothing about the gradient that came meanwhile.
        self._summed[param] = generation


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
