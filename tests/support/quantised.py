"""Quantised weights as others make them: wrapper subclasses of codes, scales and a table, which compute in Python.

They stand in for torchao's, quanto's and others, which the default tests do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

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
            layer.weight = nn.Parameter(codes_of(layer), False)


def codes_of(layer: nn.Linear) -> Codes:
    """A layer's weight in codes, or what they are going to be, on the meta device."""
    if not layer.weight.is_meta:
        return Codes.of(layer.weight)
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


class Matrices(Tensor):
    """Matrices of experts as others quantise them: codes, and scales that are multiplied with them.

    Rows, pieces and transposed views are made of views of its inner tensors. Products are one function of autograd,
    which saves the wrapper, and dequantises it again in the backward.
    """

    NAMES: ClassVar[Sequence[str]] = ("codes", "scales")
    codes: Tensor
    scales: Tensor
    table: Tensor

    @staticmethod
    def __new__(cls, inner: Sequence[Tensor], dtype: torch.dtype, **more: Any) -> Any:
        shape, strides = cls.outer(inner[0], **more)
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=strides, dtype=dtype, device=inner[0].device
        )

    def __init__(self, inner: Sequence[Tensor], dtype: torch.dtype, **more: Any) -> None:
        for name, one in zip(self.NAMES, inner, strict=True):
            setattr(self, name, one)
        self.more = more

    @staticmethod
    def outer(codes: Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Its shape and strides."""
        return codes.shape, codes.stride()

    def dequantise(self) -> Tensor:
        return (self.codes.float() * self.scales).to(self.dtype)

    def like(self, inner: Sequence[Tensor], **more: Any) -> Any:
        """A wrapper with the same notes, but for `more`, around other tensors."""
        return type(self)(inner, self.dtype, **{**self.more, **more})

    def rows(self, func: Any, args: Sequence[Any]) -> Any:
        """What a function that takes rows makes of it, with these arguments after the tensor."""
        return self.like([func(getattr(self, name), *args) for name in self.NAMES])

    def transposed(self) -> Any:
        return self.like([getattr(self, name).transpose(-1, -2) for name in self.NAMES])

    def __tensor_flatten__(self) -> tuple[Sequence[str], Any]:
        return self.NAMES, (self.dtype, self.more)

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls([inner[name] for name in cls.NAMES], context[0], **context[1])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            at, weight = next((at, one) for at, one in enumerate(args) if isinstance(one, Matrices))
            x = next(at for at, one in enumerate(args) if type(one) is Tensor and one.is_floating_point())

            def product(own: Tensor, values: Tensor) -> Any:
                given = list(args)
                given[at], given[x] = values, own
                return func(*given, **(kwargs or {}))

            return _Product.apply(args[x], weight, product)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        aten, one = torch.ops.aten, args[0]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return one.like([func(getattr(one, name)) for name in one.NAMES])
        if func is aten._to_copy.default:
            return one.like([getattr(one, name).to((kwargs or {}).get("device")) for name in one.NAMES])
        if func is aten._has_compatible_shallow_copy_type.default:  # what `module.to()` asks
            return False
        if func is aten.copy_.default:
            for name in one.NAMES:
                getattr(one, name).copy_(getattr(args[1], name))
            return one
        if func is aten.unbind.int:
            return tuple(one[row] for row in range(len(one)))
        if func in (aten.slice.Tensor, aten.select.int, aten.index.Tensor, aten.index_select.default):
            return one.rows(func, args[1:])
        if func in (aten.transpose.int, aten.t.default):
            return one.transposed()
        raise NotImplementedError(f"{func} of quantised weights")

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.dequantise()})"


class Blocks(Matrices):
    """As NF4 has it: two codes a byte, and a scale for each `block` values, each in one dimension over all matrices.

    A block may lie across two matrices. Then one of them cannot be taken alone.
    """

    NAMES = ("codes", "scales", "table")

    @staticmethod
    def outer(codes: Tensor, shape: Sequence[int], block: int, is_transposed: bool) -> tuple[Any, Any]:
        form = torch.empty(tuple(shape), device="meta")
        form = form.transpose(-1, -2) if is_transposed else form
        return form.shape, form.stride()

    def dequantise(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten()
        values = self.table[codes.int()].view(-1, self.more["block"]) * self.scales[:, None]
        values = values.view(tuple(self.more["shape"]))
        return (values.transpose(-1, -2) if self.more["is_transposed"] else values).to(self.dtype)

    def rows(self, func: Any, args: Sequence[Any]) -> Any:
        count, *others = self.more["shape"]
        rows = func(torch.empty(count, 0, device="meta"), *[_on_meta(arg) for arg in args])
        if func not in (torch.ops.aten.slice.Tensor, torch.ops.aten.select.int):
            shape = (len(rows), *others)
            inner = [func(one.view(count, -1), *args).flatten() for one in (self.codes, self.scales)]
            return self.like([*inner, self.table], shape=shape)
        first = args[1] if len(args) > 1 and args[1] is not None else 0
        length = 1 if func is torch.ops.aten.select.int else len(rows)
        inner = [self._run(one, first % count, length) for one in (self.codes, self.scales)]
        shape = tuple(others) if func is torch.ops.aten.select.int else (length, *others)
        return self.like([*inner, self.table], shape=shape)

    def _run(self, one: Tensor, first: int, length: int) -> Tensor:
        count = self.more["shape"][0]
        if first * len(one) % count or length * len(one) % count:
            raise ValueError("a block lies across the ends of these matrices")
        return one[first * len(one) // count : (first + length) * len(one) // count]

    def transposed(self) -> Any:
        inner = [self.codes.view(-1), self.scales.view(-1), self.table]
        return self.like(inner, is_transposed=not self.more["is_transposed"])


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return [_on_meta(one) for one in arg]
    return arg.to("meta") if isinstance(arg, Tensor) else arg


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Matrices, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        return product(x, weight.dequantise())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            made = ctx.product(own, weight.dequantise())
        return (*torch.autograd.grad(made, own, grad), None, None)


_PRODUCTS = (
    *(nn.functional.linear, nn.functional.grouped_mm, torch._grouped_mm, torch.einsum),  # type: ignore[attr-defined]
    *(torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__),
)


def in_fp8(weight: Tensor) -> Matrices:
    """In fp8, with a scale for each matrix."""
    scales = weight.abs().amax((1, 2), keepdim=True) / 448
    return Matrices([(weight / scales).to(torch.float8_e4m3fn), scales], weight.dtype)


def in_int8(weight: Tensor) -> Matrices:
    """In int8, with a scale in 16 bits for each row."""
    scales = (weight.abs().amax(2, keepdim=True) / 127).to(torch.bfloat16)
    return Matrices([(weight / scales).round().clamp(-127, 127).to(torch.int8), scales], weight.dtype)


class Affine(Matrices):
    """With a value that a code of 0 stands for."""

    NAMES = ("codes", "scales", "zeros")
    zeros: Tensor

    def dequantise(self) -> Tensor:
        return (self.codes.float() * self.scales + self.zeros).to(self.dtype)


def in_uint8(weight: Tensor) -> Affine:
    """In uint8, with a scale and a least value for each row."""
    least, most = weight.aminmax(dim=2, keepdim=True)
    scales = (most - least) / 255
    return Affine([((weight - least) / scales).round().to(torch.uint8), scales, least], weight.dtype)


def in_blocks(weight: Tensor, block: int = 16) -> Blocks:
    """In 4 bits, with a scale for each `block` values."""
    values = weight.reshape(-1, block)
    scales = values.abs().amax(1)
    codes = ((values / scales[:, None])[..., None] - TABLE).abs().argmin(-1).to(torch.uint8).view(-1, 2)
    more = {"shape": tuple(weight.shape), "block": block, "is_transposed": False}
    return Blocks([codes[:, 0] << 4 | codes[:, 1], scales, TABLE], weight.dtype, **more)
