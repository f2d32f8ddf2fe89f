"""Memory that parameters come into and leave, again and again.

Memory of the CPU that was given back to the system comes back as pages that it has to clear first, which takes several
times as long as to copy a unit into it. So what one unit leaves is kept for the next one of its size, by exchanging
what two storages point to: identity and views of a storage stay, as they do when it is resized. A GPU's allocator in
torch keeps memory by itself. What a storage points to meanwhile cannot be mistaken for values.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from offload.native.memory import advise_huge_pages, poison

CAN_EXCHANGE = hasattr(UntypedStorage, "_swap_data_ptr_")
"""Whether this version of torch can."""

_REFUSED = "this parameter is not on the device now: use it inside `with optimizer.gathered(module_or_params):`"
_refuse = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
"""What makes a storage raise when it is read: in torch built for CUDA."""


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
        if not (tensor.is_cpu and CAN_EXCHANGE):
            if _allow is not None and storage.device.type == "cuda":
                _allow(storage._cdata)
            storage.resize_(nbytes)
            return
        fitting = next((number for number, spare in enumerate(self._left) if spare.nbytes() == nbytes), None)
        found = None if fitting is None else self._left.pop(fitting)
        self.keep(most)
        memory = UntypedStorage(nbytes) if found is None else found
        storage._swap_data_ptr_(memory)  # type: ignore[attr-defined]  # as torch does where it replays CUDA graphs
        if found is None:
            advise_huge_pages(tensor)

    def take(self, tensor: Tensor) -> None:
        """Takes the memory of a tensor away, and keeps it if it is the CPU's."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        if tensor.is_cpu and CAN_EXCHANGE:
            memory = poison(storage.nbytes())
            storage._swap_data_ptr_(memory)  # type: ignore[attr-defined]
            if memory.nbytes():
                self._left.append(memory)
            return
        storage.resize_(0)
        if _refuse is not None and storage.device.type == "cuda":
            _refuse(storage._cdata, _REFUSED)

    def keep(self, most: int) -> None:
        """Gives back to the system what is more than that, the oldest first."""
        while self.nbytes > most:
            self._left.pop(0)
