"""A quantised weight as others make them: a wrapper subclass of codes, scales and a table, which computes in Python.

It stands in for torchao's, quanto's and others, which the default tests do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.toy import Block, Net

BLOCK = 4
"""How many values share a scale."""
TABLE = torch.linspace(-1, 1, 16)
"""What each code stands for. All weights share it."""


class Codes(Tensor):
    """A matrix in codes of 4 bits, one a byte, with a scale for each BLOCK values.

    As NF4Tensor does it, `.to(dtype)` is dequantise. `F.linear` is one function of autograd that keeps the wrapper in
    its context, where no version is checked.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Any:
        shape = (codes.shape[0], codes.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.table = codes, scales, table

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype | None = None) -> Codes:
        """Quantises a matrix, whose second dimension is a multiple of BLOCK."""
        blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        nearest = (blocks / scales[..., None])[..., None] - TABLE
        return cls(nearest.abs().argmin(-1).to(torch.uint8).flatten(1), scales, TABLE, dtype or weight.dtype)

    def dequantise(self) -> Tensor:
        values = self.table[self.codes.int()].unflatten(1, (-1, BLOCK)) * self.scales[..., None]
        return values.flatten(1).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scales", "table"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scales"], inner["table"], dtype)

    def _each(self, use: Callable[[Tensor], Tensor]) -> Codes:
        return type(self)(use(self.codes), use(self.scales), self.table, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return _Linear.apply(*args)  # type: ignore[no-untyped-call]
        if func is Tensor.to:
            return args[0].dequantise().to(*args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if cls is not Codes:  # torchao's tables know the class itself only
            raise NotImplementedError(f"{func} of {cls}")
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return args[0]._each(func)
        if func is aten.copy_.default:
            for name in ("codes", "scales"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        raise NotImplementedError(f"{func} of quantised weights")

    def __repr__(self, **_: Any) -> str:
        return f"Codes({self.dequantise()})"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Codes, bias: Tensor | None = None) -> Tensor:
        ctx.weight = weight
        made = x @ weight.dequantise().t()
        return made if bias is None else made + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # As in torchao: of the dtype that the wrapper has already.
        return grad @ ctx.weight.to(ctx.weight.dtype), None, None


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(1, base.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(base.out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def quantised(blocks: int = 4, dtype: torch.dtype = torch.float32) -> Net:
    """A frozen model whose blocks have quantised weights, with low-rank weights beside them."""
    model = Net(blocks).to(dtype).requires_grad_(False)
    torch.manual_seed(4)
    for block in model.blocks:
        assert isinstance(block, Block)
        for layer in (block.up, block.down):
            layer.weight = nn.Parameter(Codes.of(layer.weight), requires_grad=False)
        block.up = Adapted(block.up)  # type: ignore[assignment]
    for own in model.parameters():
        if own.requires_grad:
            own.data = own.data.to(dtype)
    return model


def weights_of(model: nn.Module) -> list[Any]:
    """The quantised weights of a model."""
    return [param for param in model.parameters() if isinstance(param, Codes)]


def real_bytes(model: nn.Module) -> int:
    """What frozen parameters and buffers take: each piece of memory once."""
    tensors: list[Tensor] = [param for param in model.parameters() if not isinstance(param, Codes)]
    for weight in weights_of(model):
        tensors += [weight.codes, weight.scales, weight.table]
    storages = {one.untyped_storage()._cdata: one.nbytes for one in tensors if not one.requires_grad}
    return sum(storages.values()) + sum(buffer.nbytes for buffer in model.buffers())


def quantise(model: nn.Module) -> None:
    """Quantises the linear layers of blocks in place, with values or on the meta device: a quantiser as torchao's."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith("blocks."):
            layer.weight = nn.Parameter(_planned(layer) if layer.weight.is_meta else Codes.of(layer.weight), False)


def _planned(layer: nn.Linear) -> Codes:
    rows, columns = layer.weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
    return Codes(codes, torch.empty(rows, columns // BLOCK, device="meta"), TABLE, layer.weight.dtype)


def adapt(model: Net) -> Net:
    """Freezes a model, and puts low-rank weights beside some of its layers, as `quantised` does."""
    model.requires_grad_(False)
    torch.manual_seed(4)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = Adapted(block.up)  # type: ignore[assignment]
    return model


GROUP = 32
"""How many rows share a scale, where rows are packed."""


def _codes(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)


def _scales(*shape: int) -> Tensor:
    return (torch.rand(shape) / 64).to(torch.float16)


class GPTQLayout(nn.Module):
    """GPTQ's buffers, as AutoGPTQ documents them: 8 codes of 4 bits an int32, along the rows; zeros less 1 along the
    columns; and the group of each row, which need not be in order."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        rows, columns = layer.in_features, layer.out_features
        self.register_buffer("qweight", _codes(rows // 8, columns))
        self.register_buffer("qzeros", _codes(rows // GROUP, columns // 8))
        self.register_buffer("scales", _scales(rows // GROUP, columns))
        self.register_buffer("g_idx", torch.randperm(rows).to(torch.int32) // GROUP)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = (self.qweight[:, None, :] >> self.shifts[:, None] & 15).flatten(0, 1)
        zeros = (self.qzeros[:, :, None] >> self.shifts & 15).flatten(1) + 1
        groups = self.g_idx.long()
        return x @ ((codes - zeros[groups]) * self.scales[groups].to(x.dtype))


class AWQLayout(nn.Module):
    """AWQ's buffers, as AutoAWQ has them: 8 codes of 4 bits an int32, along the columns, in an order of its own."""

    ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        rows, columns = layer.in_features, layer.out_features
        self.register_buffer("qweight", _codes(rows, columns // 8))
        self.register_buffer("qzeros", _codes(rows // GROUP, columns // 8))
        self.register_buffer("scales", _scales(rows // GROUP, columns))

    def forward(self, x: Tensor) -> Tensor:
        codes, zeros = (
            (packed[:, :, None] >> 4 * torch.tensor(self.ORDER) & 15).flatten(1)
            for packed in (self.qweight, self.qzeros)
        )
        zeros, scales = (one.repeat_interleave(GROUP, 0) for one in (zeros, self.scales))
        return x @ ((codes - zeros) * scales.to(x.dtype))
