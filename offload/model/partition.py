"""Activation checkpoints of which each tensor-parallel rank keeps a part (ZeRO-R's P_a).

[Note: partitioned checkpoints]
Tensor-parallel ranks run every unit on the same input. So each of them keeps 1/N of it until the backward asks, and an
all-gather puts it together before the unit is recomputed. While a unit is recomputed, what enters the one before it is
gathered already: each part knows the part that was put before it in the same forward. All ranks call `put` and `get` in
the same order, so they launch the same collectives in the same order, whatever Python's garbage collector does.

What is not the same on all ranks is not divided: inputs that are cut along the sequence already, for one. Whether it
is the same is found out when a unit keeps something for the first time, and is not asked again. In case it differs
later, a checksum of each rank's whole input travels with its part. The checksums are compared when the parts are
gathered, and a difference is raised before the next step uses the gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
import xxhash
from torch import Tensor

from offload.errors import StaleActivationError
from offload.ranks.communicator import Communicator, Work
from offload.sizes import round_up
from offload.storage.activation_store import ActivationStore, Stored

ALIGN_BYTES = 16
"""Parts are as long as that many bytes, or a multiple."""
CHECKSUM_BYTES = 8


def partition_bytes(nbytes: int, ranks: int) -> int:
    """How many bytes each of `ranks` keeps of `nbytes` that all of them have."""
    return round_up(-(-nbytes // ranks), ALIGN_BYTES)


class Partition:
    """This rank's part of `nbytes` bytes that all ranks have.

    Attributes:
        part: the part, uint8, or what the store returned for it.
        nbytes: of the whole.
        checksum: of the whole, 0-dim, int64.
        previous: the partition that was put before this one in the same forward.
        coming: the all-gather of all parts; None until it is launched.
    """

    __slots__ = ("__weakref__", "checksum", "coming", "nbytes", "part", "previous")

    def __init__(self, part: Tensor | Stored, nbytes: int, checksum: Tensor, previous: Partition | None) -> None:
        self.part = part
        self.nbytes = nbytes
        self.checksum = checksum
        self.previous = previous
        self.coming: tuple[Work, Tensor, Tensor] | None = None


class Partitions:
    """Divides what checkpoints keep among tensor-parallel ranks; see [Note: partitioned checkpoints].

    Every tensor-parallel rank calls `put` and `get` in the same order.

    Args:
        comm: the data-parallel ranks.
        store: where parts wait; None: on the device that they are made on.

    Attributes:
        peak_bytes: the most bytes that all parts took together.
    """

    def __init__(self, comm: Communicator, store: ActivationStore | None) -> None:
        self._everyone = comm.everyone
        self._ranks = comm.tensor_parallel.side_group
        self._store = store
        self._alike: dict[tuple[object, ...], bool] = {}
        self._unit: str | None = None
        self._count = 0
        self._newest: Partition | None = None
        self._partitions: weakref.WeakSet[Partition] = weakref.WeakSet()
        self._under_way: deque[Work] = deque()
        self._differ: list[Tensor] = []  # 0-dim, bool
        self._lock = threading.RLock()  # autograd asks in a thread of its own
        self.peak_bytes = 0

    def pass_begins(self) -> None:
        """Called when a forward of the whole model begins or ends."""
        self._newest = self._unit = None

    def put(self, data: Tensor, unit: str | None) -> Partition | None:
        """Keeps this rank's part of `data`.

        Args:
            data: uint8, shape (nbytes,), on its device.
            unit: the unit whose forward runs.

        Returns:
            The partition; None if the ranks have different values, so that each has to keep its own.

        Raises:
            OffloadError: as `ActivationStore.put` does.
            RankError: another rank failed, or cannot be reached.
        """
        with self._lock:
            self._count = self._count + 1 if unit == self._unit else 0
            self._unit = unit
            key = (unit, self._count)
            if key not in self._alike:
                self._alike[key] = self._is_alike(data)
            if not self._alike[key]:
                return None
            length = partition_bytes(len(data), self._ranks.size)
            part = data[self._ranks.rank * length :][:length]
            if len(part) < length:
                part = torch.nn.functional.pad(part, (0, length - len(part)))
            store = self._store
            kept = part.clone() if store is None or store.device != data.device else store.put(part)
            partition = Partition(kept, len(data), _checksum(data), self._newest)
            self._newest = partition
            self._partitions.add(partition)
            kept_bytes = sum(partition_bytes(one.nbytes, self._ranks.size) for one in self._partitions)
            self.peak_bytes = max(self.peak_bytes, kept_bytes)
            return partition

    def get(self, partition: Partition) -> Tensor:
        """Gathers what was put: uint8, shape (nbytes,), on the device. It can be asked for again.

        Raises:
            OffloadError: as `ActivationStore.get` does.
            RankError: another rank failed, or cannot be reached.
        """
        with self._lock:
            work, _, gathered = partition.coming or self._gather(partition)
            partition.coming = None
            if partition.previous is not None and partition.previous.coming is None:
                partition.previous.coming = self._gather(partition.previous)
            work.wait_on_device()
            self._under_way.append(work)
            while len(self._under_way) > 1:
                self._under_way.popleft().wait()  # raises what went wrong
            rows = gathered.view(self._ranks.size, -1)
            sums = rows[:, -CHECKSUM_BYTES:].contiguous().view(torch.int64)
            self._differ.append((sums != sums[0]).any())
            return rows[:, :-CHECKSUM_BYTES].reshape(-1)[: partition.nbytes]

    def step_begins(self) -> None:
        """Compares the checksums of what was gathered, before gradients are used.

        Raises:
            StaleActivationError: on all ranks, if some put other values than others.
            RankError: another rank failed, or cannot be reached.
        """
        with self._lock:
            while self._under_way:
                self._under_way.popleft().wait()
            differ, self._differ = self._differ, []
            is_wrong = bool(differ) and bool(torch.stack(differ).any())
        if self._everyone.all_reduce_any(is_wrong):
            raise StaleActivationError(
                "what enters a unit was the same on all tensor-parallel ranks before, and was not in this step, so the "
                "gradients are wrong: give these ranks the same batches and random numbers, or leave "
                "partition_activations out; the state is untouched, call zero_grad()"
            )

    def _gather(self, partition: Partition) -> tuple[Work, Tensor, Tensor]:
        part = partition.part if isinstance(partition.part, Tensor) else self._of_store(partition.part)
        sent = torch.cat((part, partition.checksum.view(1).view(torch.uint8)))
        gathered = torch.empty(self._ranks.size * len(sent), dtype=torch.uint8, device=sent.device)
        return self._ranks.all_gather_into_tensor(sent, gathered), sent, gathered

    def _of_store(self, stored: Stored) -> Tensor:
        assert self._store is not None
        return self._store.get(stored)

    def _is_alike(self, data: Tensor) -> bool:
        digest = xxhash.xxh3_64_intdigest(data.cpu().numpy().data) >> 1
        rows = self._ranks.all_gather(torch.tensor([len(data), digest], dtype=torch.int64, device="cpu"))
        return bool((rows == rows[0]).all())


def _checksum(data: Tensor) -> Tensor:
    """A checksum of bytes, 0-dim, int64, on their device. It finds ranks that differ, not forgery."""
    words = data.view(torch.int32) if len(data) % 4 == 0 and data.storage_offset() % 4 == 0 else data
    return words.sum(dtype=torch.int64)
