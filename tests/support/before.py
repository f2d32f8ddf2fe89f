"""What a model is now, to be compared with what it is later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def tables(module: nn.Module) -> dict[str, Any]:
    return {
        key: list(value.items()) if isinstance(value, dict) and key.startswith("_") else value
        for key, value in vars(module).items()
    }


def _equal(tensor: Tensor, values: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return torch.equal(tensor.to_dense(), values.to_dense())
    return torch.equal(tensor, values)


class Before:
    """What a model is now, to be compared with what it is later."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = [(name, p, self._of(p), p.detach().clone()) for name, p in model.named_parameters()]
        self.buffers = [(name, b, self._of(b), b.clone()) for name, b in model.named_buffers()]
        self.tables = [tables(module) for module in model.modules()]

    @staticmethod
    def _of(tensor: Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad

    def require_same(self) -> None:
        """All of the model is what it was."""
        for now, before in (
            (self.model.named_parameters(), self.params),
            (self.model.named_buffers(), self.buffers),
        ):
            for (name, tensor), (old_name, old, kind, values) in zip(now, before, strict=True):
                assert name == old_name
                assert tensor is old
                assert self._of(tensor) == kind, name
                assert tensor.is_meta or _equal(tensor, values), name
                assert not tensor._backward_hooks
                assert not tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
                assert tensor.grad is None
        for module, before_it in zip(self.model.modules(), self.tables, strict=True):
            found = tables(module)
            assert found.keys() == before_it.keys()
            for key, value in before_it.items():
                assert found[key] is value or found[key] == value, key
