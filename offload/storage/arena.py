"""The one slab of RAM from which everything this library holds on the CPU is taken.

Its size is fixed before the first step; nothing is allocated later. It is page-aligned (O_DIRECT), on huge pages
where the kernel grants them in time (half the CPU time of I/O), page-locked when there is a GPU, and not inherited by
forks: a data-loading child neither doubles it nor can touch it.

[Note: pages before they are locked]
What a driver locks has to be there. It gets pages that are not one after the other, in one thread, under a lock that
all of its calls wait for: 0.49 s a GiB on a machine where several threads get them, by huge pages, in 0.10 s
(https://github.com/rapidsai/cudf/issues/23457).

[Note: addresses that a child does not inherit]
In a forked child nothing lies at the slab's addresses, and the next thing that the child maps, such as a thread's stack
or the memory of a batch, may lie there. Python's `mmap` would unmap that when it is collected.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from offload.devices.copies import Copier
from offload.errors import BudgetError
from offload.interrupts import uninterrupted, wait_for_all
from offload.io.threads import Workers
from offload.native.memory import immortalise, populate
from offload.native.threads import start_threads, usable_cpus
from offload.regions import Region
from offload.sizes import MIB, PAGE_BYTES, format_bytes, round_up
from offload.tiers import Tier

_PIECE_BYTES = 16 * MIB
"""How many bytes are asked for at once. Page faults of other threads, and `close`, may have to wait for them."""
_THREADS = 8
"""How many threads get pages at once. More would wait for each other in the kernel."""
_SLOW_S = 0.5
"""If a piece takes longer, in seconds, the rest gets ordinary pages.

The kernel then had to move other memory, to make huge pages of what was free in parts. On a host that has been up for
long this may take minutes in all."""


class Lender:
    """Lends page-aligned pieces of one slab of memory, in order, for good.

    Args:
        slab: uint8, zeros.
    """

    def __init__(self, slab: Tensor) -> None:
        self._slab = slab
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes lent."""
        return self._used

    def carve(self, nbytes: int) -> Tensor:
        """The next `nbytes` as a uint8 tensor of shape (nbytes,), page-aligned and zero."""
        start = self._used
        end = start + round_up(nbytes, PAGE_BYTES)
        if end > len(self._slab):
            raise AssertionError(f"a slab of {len(self._slab)} bytes was asked for {end}")
        self._used = end
        return self._slab[start : start + nbytes]

    def park(self) -> int:
        """Frees memory of a device until `bring_back`; its content waits in RAM. For RAM this does nothing.

        Returns:
            How many bytes were copied.
        """
        return 0

    def bring_back(self) -> int:
        """Undoes `park`.

        Returns:
            How many bytes were copied.
        """
        return 0


class Reserved:
    """The pieces of all regions in memory, by name.

    Args:
        regions: the regions, in the order of their memory. Those on a tier without a lender are left out, and those
            that are not lent.
        lenders: what lends the memory of each tier.
    """

    def __init__(self, regions: Iterable[Region], lenders: Mapping[Tier, Lender]) -> None:
        self._pieces: dict[str, list[Tensor]] = {}
        for region in (one for one in regions if one.is_lent and one.tier in lenders):
            pieces = [lenders[region.tier].carve(region.nbytes) for _ in range(region.count)]
            self._pieces.setdefault(region.what, []).extend(pieces)

    def take(self, what: str) -> list[Tensor]:
        """The pieces of a name, in the order of its regions. They are given once: the next call finds none.

        Returns:
            uint8 tensors, each of its region's `nbytes`.
        """
        return self._pieces.pop(what, [])

    @property
    def left(self) -> list[str]:
        """Names of pieces that nobody took."""
        return [what for what, pieces in self._pieces.items() if pieces]


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_in_child() -> None:
    """See [Note: addresses that a child does not inherit]. What an arena has left to be collected is in here, too."""
    for one in _maps:
        immortalise(one)


os.register_at_fork(after_in_child=_keep_in_child)


class Arena(Lender):
    """The one slab of RAM; see the top of this file.

    Args:
        size: its bytes, rounded up to whole pages.
        copier: page-locks the slab where that helps.
        at_once: whether to get all pages now. If not, they come as they are used, or by `prefault`. Pages that are
            locked are there from the beginning.

    Raises:
        BudgetError: the machine refuses the memory.
    """

    def __init__(self, size: int, copier: Copier, *, at_once: bool = True) -> None:
        self.size = max(round_up(size, PAGE_BYTES), PAGE_BYTES)
        try:
            self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"the machine refuses {format_bytes(self.size)} of RAM ({error}): lower cpu_memory",
                needed=self.size,
                available=0,
                option="cpu_memory",
            ) from error
        _maps.add(self._map)
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            # A kernel built without huge pages refuses the second; both are absent off Linux.
            with contextlib.suppress(OSError, AttributeError):
                self._map.madvise(getattr(mmap, advice))
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8))
        self._is_closing = False
        if at_once:
            self._slab.zero_()
        if copier.pins:
            self._populate()
            copier.pin(self._slab)
        self._prefaulter: threading.Thread | None = None
        # Also for an arena that nobody closes: memory must not go while it is page-locked.
        self._unpin = weakref.finalize(self, copier.unpin, self._slab)

    @property
    def memory(self) -> memoryview:
        """The whole slab, for I/O engines that want to know it beforehand."""
        return memoryview(self._map)

    def _populate(self) -> None:
        """Gets all pages now, by several threads; see [Note: pages before they are locked]."""
        workers = Workers(min(_THREADS, usable_cpus()), "offload-arena")
        try:
            touched = [workers.submit(self._touch, piece) for piece in self._slab.split(_PIECE_BYTES)]
            wait_for_all(touched)
            for one in touched:
                one.result()
        finally:
            workers.shutdown(cancel_futures=True)

    def _touch(self, piece: Tensor) -> None:
        if not self._get(piece):
            piece[::PAGE_BYTES] = 0  # the kernel is older than the call for it

    def _get(self, piece: Tensor) -> bool:
        """Gets the pages of a piece of the slab.

        Returns:
            Whether the kernel could.
        """
        began = time.monotonic()
        could = populate(piece)
        if time.monotonic() - began > _SLOW_S:
            with contextlib.suppress(OSError, AttributeError):
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        return could

    @uninterrupted
    def prefault(self, then: Callable[[], None]) -> None:
        """Gets the pages that are not there yet, in the background, and then calls `then` in that thread.

        The system clears pages, and a virtual machine may have to get them from its host, at 1 to 3 GB/s. What is read
        from a disk into the first of them need not wait for the last. A machine that promised more than it has shows it
        now, and not in the first step.

        Args:
            then: called when the pages are there, or the kernel cannot get them; not if the arena is closed before.

        Raises:
            BudgetError: the system refuses a thread for it.
        """
        prefaulter = threading.Thread(target=self._prefault, args=(then,), name="offload-arena")
        start_threads([prefaulter])
        self._prefaulter = prefaulter

    def _prefault(self, then: Callable[[], None]) -> None:
        for piece in self._slab.split(_PIECE_BYTES):
            if self._is_closing:
                return
            if not self._get(piece):
                break
        then()

    def join(self) -> None:
        """Ends `prefault`. Waits for it, and for `then` if that is running."""
        self._is_closing = True
        if self._prefaulter is not None:
            self._prefaulter.join()

    def close(self) -> None:
        """Gives the memory back. Tensors that were lent read zeros from then on."""
        self.join()
        self._unpin()
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_DONTNEED)
