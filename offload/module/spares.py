"""Memory that parameters on the CPU come into and leave, again and again.

Memory that was given back to the system comes back as pages that it has to clear first, which takes several times as
long as to copy a unit into it. So what one unit leaves is kept for the next one of its size, by exchanging what two
storages point to: identity and views of a storage stay, as they do when it is resized. A GPU's allocator in torch keeps
memory by itself.
"""

from __future__ import annotations

from torch import Tensor, UntypedStorage

from offload.native.library import advise_huge_pages

CAN_EXCHANGE = hasattr(UntypedStorage, "_swap_data_ptr_")
"""Whether this version of torch can."""


class Spares:
    """Gives memory to tensors, and takes it away."""

    def __init__(self) -> None:
        self._left: list[UntypedStorage] = []  # the oldest first

    @property
    def nbytes(self) -> int:
        """Bytes that no tensor has now."""
        return sum(spare.nbytes() for spare in self._left)

    def give(self, tensor: Tensor, most: int) -> None:
        """Gives a tensor that has no memory as much as it needs; its values are undefined.

        Args: most: bytes that may be left over.
        """
        storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        fitting = next((number for number, spare in enumerate(self._left) if spare.nbytes() == nbytes), None)
        if fitting is not None:
            _exchange(storage, self._left.pop(fitting))
        self.keep(most)
        if fitting is None:
            storage.resize_(nbytes)
            if tensor.is_cpu:
                advise_huge_pages(tensor)

    def take(self, tensor: Tensor) -> None:
        """Takes the memory of a tensor away, and keeps it if it is the CPU's."""
        storage = tensor.untyped_storage()
        if tensor.is_cpu and storage.nbytes() and CAN_EXCHANGE:
            self._left.append(UntypedStorage(0))
            _exchange(storage, self._left[-1])
        else:
            storage.resize_(0)

    def keep(self, most: int) -> None:
        """Gives back to the system what is more than that, the oldest first."""
        while self.nbytes > most:
            self._left.pop(0)


def _exchange(one: UntypedStorage, other: UntypedStorage) -> None:
    """Of two storages, one of which is empty: what they point to, and its size."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # as torch does where it replays CUDA graphs
