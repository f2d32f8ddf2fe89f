"""How many bytes of activations and of their gradients are there at once in a forward and its backward.

What waits between the two is less than the peak: while the backward of a unit runs, there are also gradients of what
the unit computed, and those that it passes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from offload import torch_private
from offload.model.torch_helpers import tensors_in


class _Live(torch_private.DispatchMode):  # type: ignore[misc]
    """A context that notes when memory is made by an operation, and when it goes."""

    def __init__(self) -> None:
        super().__init__()
        # The number of each memory; 0: it does not count, because no operation of this context made it.
        self._numbers: weakref.WeakKeyDictionary[UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._changes: list[tuple[int, int]] = []  # the number of a memory, and the bytes that came or went
        self._made = 0

    def number_of(self, tensor: Tensor) -> int:
        """The number of the memory of a tensor; 0 if it was not made in this context."""
        return self._numbers.get(tensor.untyped_storage(), 0)

    def peak(self, without: Collection[int]) -> int:
        """The most bytes that were there at once.

        Args:
            without: the numbers of memory that does not count.
        """
        live = highest = 0
        for number, nbytes in self._changes:
            if number not in without:
                live += nbytes
                highest = max(highest, live)
        return highest

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._numbers.setdefault(tensor.untyped_storage(), 0)  # it was there before
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            memory = tensor.untyped_storage()
            if memory not in self._numbers:
                self._made += 1
                self._numbers[memory] = self._made
                self._changes.append((self._made, memory.nbytes()))
                weakref.finalize(memory, self._changes.append, (self._made, -memory.nbytes()))
        return result


def peak_of(model: nn.Module, run: Callable[[nn.Module], object]) -> int:
    """The most bytes of activations and of their gradients that a forward and its backward have at once.

    That is without what was there before, gradients of parameters, and the largest tensor of the result.

    Args:
        model: on the meta device, without gradients.
        run: runs one forward of it, with inputs on the meta device. Its backward begins at the largest tensor of the
            result that has one.
    """
    live = _Live()
    left_out: set[int] = set()

    def take(param: Tensor) -> None:
        assert param.grad is not None
        left_out.add(live.number_of(param.grad))
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(take) for param in model.parameters() if param.requires_grad]
    try:
        with torch.enable_grad(), live:
            result = run(model)
            output = max(tensors_in(result), key=lambda one: (one.requires_grad, one.numel()), default=None)
            del result
            if output is not None:
                left_out.add(live.number_of(output))
            if output is not None and output.requires_grad:
                torch.autograd.backward(output, output.new_empty(()).expand_as(output))
    finally:
        for hook in hooks:
            hook.remove()
    return live.peak(left_out)
