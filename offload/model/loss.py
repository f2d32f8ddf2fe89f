"""The cross entropy of an output layer whose logits are never there as a whole.

A vocabulary of 150,000 and a context of 32,000 tokens have 20 GB of fp32 logits. Here they are computed in cells: a
*chunk* of tokens by a *block* of the vocabulary. Both are of fixed sizes, whatever the tier of the weight and whatever
its tiles, and what is summed over cells is summed in one order, in fp32. So no bit depends on where the weight is.

| sum                                 | over    | order                                                        |
|-------------------------------------|---------|--------------------------------------------------------------|
| exp(logit - maximum), of each token | blocks  | up; rescaled where the maximum grows                         |
| gradient of `hidden`                | blocks  | down: a backward meets the tiles of a weight in this order   |
| gradients of weight and bias        | chunks  | up                                                           |
| losses of tokens                    | tokens  | torch's sum                                                  |

Where one number is made of all tokens, each chunk's gradients are made in the forward, while its logits are there
(Liger-Kernel, arXiv 2410.10989, section 3.2). So the weight is needed once, and the backward only multiplies by
`grad_output`. Otherwise, and for a weight in tiles (tiling.py), the forward keeps the logarithm of each token's sum of
exponentials, and the backward computes the logits again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from offload.errors import AccumulationError, ConfigError
from offload.model.compiled import Forward
from offload.model.inner import is_wrapper, kind_of
from offload.model.torch_helpers import Hook, require_no_graph

CHUNK = 256
"""Tokens."""
BLOCK = 4096
"""Words of the vocabulary."""
CELL_TENSORS = 4
"""Tensors of the shape of a cell that are there at once in the dtype of sums."""

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Head: TypeAlias = nn.Module | Tensor | tuple[Tensor, Tensor | None]

_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@torch.compiler.disable(reason="linear_cross_entropy loops over chunks of tokens")  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    chunk: int | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """The cross entropy of an output layer, whose logits are never in memory as a whole.

    It is `F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)` up to rounding, and takes the memory of one
    chunk's logits instead of all of them. With "mean" and "sum" the gradients are made in the forward, and the weight's
    is an fp32 tensor of its shape until the backward. With "none", and for a weight that is on the device in tiles, the
    backward computes the logits once more. Labels are not shifted. A held model's weight is fetched as for any use of
    it, and gives the same bits on every tier and in tiles.

    The layer's own forward is not called, so hooks on it do not run.

    Args:
        hidden: what enters the output layer, `(..., H)`, floating; under autocast it is cast as for `F.linear`.
        head: an nn.Linear, its weight `(V, H)`, or a pair of a weight and a bias `(V,)`; of the dtype of `hidden`.
        labels: `(...)`, integers from 0 to V - 1, or `ignore_index`. On the CPU others are refused; on another device
            they make the loss NaN.
        chunk: tokens whose logits are there at a time. It changes the order of sums, and so bits; None: 256.
        ignore_index: the label of tokens that do not count.
        num_items: what "mean" divides the sum by, such as the tokens of all micro-batches of a step; None: the tokens
            that count here.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        logit_scale: logits are multiplied by it before that (Cohere; Granite divides).
        z_loss: times the square of the logarithm of a token's sum of exponentials, added to its loss (PaLM,
            arXiv 2204.02311, section 5).
        reduction: "mean", "sum", or "none": the loss of each token, 0 of those that do not count.

    Returns:
        fp32 (fp64 for fp64): one number, or the shape of `labels`.

    Raises:
        ConfigError: for shapes, dtypes or devices that do not go together, a label out of range, an option out of
            range, or a `head` that is more than a linear layer, or has no shape yet. In the backward, if that makes a
            graph of its own (`create_graph=True`).
        AccumulationError: in the backward, if it runs a second time through gradients that were made in the forward.
    """
    weight, bias = _weight_and_bias(head)
    if nn.parameter.is_lazy(weight):
        raise ConfigError(
            f"linear_cross_entropy got a head ({type(head).__name__}) whose weight has no shape before its first "
            "forward: call the module once before, or give nn.Linear(in_features, out_features)"
        )
    _check_options(chunk, ignore_index, num_items, softcap, logit_scale, z_loss, reduction)
    _check_tensors(hidden, weight, bias, labels)
    dtype = hidden.dtype
    kind = hidden.device.type
    has_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # the meta device has none
    if has_autocast and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    elif weight.dtype is not dtype:
        raise ConfigError(
            f"linear_cross_entropy got hidden of {dtype} and a weight of {weight.dtype}: give both in one dtype, or "
            "call it under torch.autocast"
        )
    # A backward reads both again, and the loop may have written its next batch to them by then.
    items = num_items.detach().clone() if isinstance(num_items, Tensor) else num_items
    own_labels = labels.reshape(-1).to(torch.int64, copy=True)
    options = LossOptions(
        CHUNK if chunk is None else chunk, ignore_index, items, softcap, logit_scale, z_loss, reduction
    )
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    loss = TokenLosses(options, own_labels, len(weight), dtype)
    if hidden.device.type == "cpu":
        loss.check_labels()
    result = cells_of_linear(flat, weight, bias, loss)
    return result.view(labels.shape) if reduction == "none" else result


@dataclass(frozen=True)
class LossOptions:
    """What a caller of `linear_cross_entropy` said; see there."""

    chunk: int
    ignore_index: int
    num_items: float | Tensor | None
    softcap: float | None
    logit_scale: float
    z_loss: float
    reduction: Reduction


def _weight_and_bias(head: Head) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of an output layer.

    Raises:
        ConfigError: if it is more than a linear layer.
    """
    if isinstance(head, nn.Module):
        forward: Any = head.forward
        while isinstance(forward, Forward):
            forward = forward.own
        if getattr(forward, "__func__", None) not in (nn.Linear.forward, LossLinear.forward):
            raise ConfigError(
                f"linear_cross_entropy computes what an nn.Linear does, and head is a {type(head).__name__}, whose "
                "forward it would leave out (adapters, quantised weights): give an nn.Linear or a weight, or compute "
                "the logits by calling the module"
            )
        made = next((name for name in ("weight", "bias") if isinstance(vars(head).get(name), Tensor)), None)
        if made is not None and not all(isinstance(hook, Hook) for hook in head._forward_pre_hooks.values()):
            raise ConfigError(
                f"the {made} of head is made by a hook of its forward (torch.nn.utils.weight_norm, spectral_norm, "
                "prune), which does not run here: use torch.nn.utils.parametrizations, or compute the logits by "
                "calling the module"
            )
        return head.weight, head.bias  # type: ignore[return-value]
    weight, bias = head if isinstance(head, tuple) and len(head) == 2 else (head, None)
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        raise ConfigError(
            f"head is {type(head).__name__}: give an nn.Linear, a weight (V, H), or a pair (weight, bias)"
        )
    return weight, bias


def _check_options(
    chunk: object,
    ignore_index: object,
    num_items: object,
    softcap: object,
    logit_scale: object,
    z_loss: object,
    reduction: object,
) -> None:
    def refuse(name: str, value: object, allowed: str) -> None:
        raise ConfigError(f"linear_cross_entropy got {name}={value!r}: give {allowed}")

    def is_number(value: object) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)  # NumPy's, too

    def is_whole(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    if chunk is not None and not (is_whole(chunk) and chunk > 0):  # type: ignore[operator]
        refuse("chunk", chunk, "a number of tokens, at least 1")
    if not is_whole(ignore_index):
        refuse("ignore_index", ignore_index, "the label of tokens that do not count, a whole number")
    if reduction not in ("mean", "sum", "none"):
        refuse("reduction", reduction, '"mean", "sum" or "none"')
    if num_items is not None and reduction != "mean":
        refuse("num_items", num_items, 'it with reduction="mean" only, which divides by it')
    is_one = isinstance(num_items, Tensor) and num_items.numel() == 1 and not num_items.requires_grad
    if num_items is not None and not is_one and not (is_number(num_items) and num_items > 0):  # type: ignore[operator]
        refuse("num_items", num_items, "a number above 0, or a tensor of one without a graph")
    if softcap is not None and not (is_number(softcap) and softcap > 0):  # type: ignore[operator]
        refuse("softcap", softcap, "a number above 0, or None")
    if not is_number(logit_scale) or logit_scale == 0:
        refuse("logit_scale", logit_scale, "a number that is not 0")
    if not is_number(z_loss) or z_loss < 0:  # type: ignore[operator]
        refuse("z_loss", z_loss, "a number, at least 0")


def _check_tensors(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    """Requires that tensors go together.

    Raises:
        ConfigError: if they do not.
    """
    required: tuple[tuple[str, object], ...] = (("hidden", hidden), ("labels", labels))
    for name, given in required:
        if not isinstance(given, Tensor):
            raise ConfigError(f"linear_cross_entropy got {name} of type {type(given).__name__}: give a tensor")
    for name, one in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if one is not None and is_wrapper(kind_of(one)):
            raise ConfigError(
                f"linear_cross_entropy got a {kind_of(one).__name__} as {name}, and computes with plain tensors only: "
                "leave the output layer plain, or compute the logits by calling it"
            )
        if one is not None and not one.is_floating_point():
            raise ConfigError(f"linear_cross_entropy got {name} of {one.dtype}: give it in a floating dtype")
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    if not hidden.dim() or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not len(weight):
        raise ConfigError(f"linear_cross_entropy got {shapes}: give hidden (..., H) and a weight (V, H)")
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(f"linear_cross_entropy got {shapes}: give a label for each token, hidden.shape[:-1]")
    if labels.dtype not in _LABELS:
        raise ConfigError(f"linear_cross_entropy got labels of {labels.dtype}: give indices, such as torch.int64")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"linear_cross_entropy got a bias of {tuple(bias.shape)} and {len(weight)} words")
    devices = {one.device for one in (hidden, weight, bias, labels) if one is not None}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"linear_cross_entropy got tensors on {names}: give all of them on one device")


class TokenLosses:
    """The losses of the tokens of one call, and their gradients, cell by cell.

    Args:
        options: what the caller said.
        labels: `(N,)`, int64.
        words: V.
        dtype: of products.

    Attributes:
        options: what the caller said.
        made_in_forward: whether gradients are made there, if the weight is there as a whole.
        words: V.
        dtype: of products.
        wide: the dtype of sums.
        lse: the logarithm of the sum of exponentials of each token, `(N,)`, after `end_forward`.
    """

    def __init__(self, options: LossOptions, labels: Tensor, words: int, dtype: torch.dtype) -> None:
        self.options = options
        self.words = words
        self.dtype = dtype
        self.wide = torch.float64 if dtype is torch.float64 else torch.float32
        self.made_in_forward = options.reduction != "none"
        self._labels = labels
        self._counted = labels != options.ignore_index
        self._top = torch.full(labels.shape, -torch.inf, dtype=self.wide, device=labels.device)
        self._sum = torch.zeros_like(self._top)
        self._of_label = torch.full_like(self._top, torch.nan)  # stays NaN where no word has this label
        self.lse = self._top  # known once all blocks were seen

    def check_labels(self) -> None:
        """Requires that each label is a word.

        Raises:
            ConfigError: if one is not.
        """
        is_wrong = self._counted & ((self._labels < 0) | (self._labels >= self.words))
        if is_wrong.any():
            label = int(self._labels[is_wrong][0])
            raise ConfigError(
                f"linear_cross_entropy got the label {label}, and the output layer has {self.words} words: give one "
                f"from 0 to {self.words - 1}, or {self.options.ignore_index} (ignore_index) for a token that does not "
                "count"
            )

    def chunks(self) -> Iterator[slice]:
        """The tokens of each chunk."""
        for start in range(0, len(self._labels), self.options.chunk):
            yield slice(start, min(start + self.options.chunk, len(self._labels)))

    def _logits(self, raw: Tensor) -> Tensor:
        """The logits `(n, b)` of a cell, of what the layer returned."""
        logits = raw.to(self.wide)
        if self.options.logit_scale != 1:
            logits = logits * self.options.logit_scale
        if self.options.softcap is not None:
            logits = (logits / self.options.softcap).tanh_().mul_(self.options.softcap)
        return logits

    def _places(self, tokens: slice, first: int, words: int) -> tuple[Tensor, Tensor]:
        """Where each label is in a block, `(n, 1)`, and whether it is there, `(n,)`."""
        at = self._labels[tokens] - first
        return at.clamp(0, words - 1)[:, None], (at >= 0) & (at < words)

    def see(self, tokens: slice, first: int, raw: Tensor) -> None:
        """Takes a cell into the losses. Blocks come in order.

        Args:
            tokens: of the chunk.
            first: the first word of the block.
            raw: what the layer returned, `(n, b)`.
        """
        logits = self._logits(raw)
        at, is_here = self._places(tokens, first, logits.shape[1])
        self._of_label[tokens] = torch.where(is_here, logits.gather(1, at)[:, 0], self._of_label[tokens])
        before, top = self._top[tokens], torch.maximum(self._top[tokens], logits.amax(1))
        finite = top.clamp(min=torch.finfo(self.wide).min)  # a token may have -inf for each word of a block
        here = (logits - finite[:, None]).exp_().sum(1)
        self._sum[tokens] = self._sum[tokens] * (before - finite).exp() + here
        self._top[tokens] = top

    def sums_are_complete(self, tokens: slice) -> Tensor:
        """The logarithm of the sum of exponentials of the tokens of a chunk, all of whose blocks were seen."""
        return self._top[tokens] + self._sum[tokens].log()

    def end_forward(self) -> Tensor:
        """The result of the call, after all cells were seen."""
        self.lse = self.sums_are_complete(slice(None))
        losses = self.lse - self._of_label
        if self.options.z_loss:
            losses = losses + self.options.z_loss * self.lse.square()
        losses = losses.masked_fill(~self._counted, 0)
        if self.options.reduction == "none":
            return losses
        return losses.sum() / self._divisor() if self.options.reduction == "mean" else losses.sum()

    def _divisor(self) -> Tensor:
        items = self.options.num_items
        if items is None:
            return self._counted.sum().to(self.wide)
        return torch.as_tensor(items, dtype=self.wide, device=self._labels.device).reshape(())

    def factors(self, of_result: Tensor) -> tuple[Tensor, Tensor | None]:
        """What gradients are multiplied with, of the gradient of the result.

        Returns:
            The factor of sums over chunks, and that of each token, `(N,)`; None: there is none.
        """
        scale = torch.full((), self.options.logit_scale, dtype=self.wide, device=self._labels.device)
        if self.options.reduction == "none":
            return scale, of_result.reshape(-1).to(self.wide)
        factor = of_result.to(self.wide) * scale
        if self.options.reduction == "mean":
            # Where no token counts, all gradients are 0.
            factor = factor / (self._divisor() if self.options.num_items is not None else self._divisor().clamp(min=1))
        return factor, None

    def gradient(self, tokens: slice, first: int, raw: Tensor, lse: Tensor, of_tokens: Tensor | None) -> Tensor:
        """The gradient of what the layer returned in a cell, but for the factor of sums, `(n, b)`.

        Args:
            tokens: of the chunk.
            first: the first word of the block.
            raw: what the layer returned, `(n, b)`.
            lse: the logarithm of the sum of exponentials of each token, `(n,)`.
            of_tokens: the factor of each token of the call; None: there is none.
        """
        logits = self._logits(raw)
        at, is_here = self._places(tokens, first, logits.shape[1])
        grad = (logits - lse[:, None]).exp_()
        if self.options.z_loss:
            grad.mul_((1 + 2 * self.options.z_loss * lse)[:, None])
        grad.scatter_add_(1, at, -is_here.to(self.wide)[:, None])
        if self.options.softcap is not None:
            grad.mul_(1 - (logits / self.options.softcap).square_())
        if of_tokens is not None:
            grad.mul_(of_tokens[tokens, None])
        return grad.masked_fill_(~self._counted[tokens, None], 0)


class Sums:
    """The sums of gradients over cells, in fp32.

    Args:
        loss: the losses.
        hidden: `(N, H)`.
        has_hidden: whether the gradient of `hidden` is wanted.
    """

    def __init__(self, loss: TokenLosses, hidden: Tensor, *, has_hidden: bool) -> None:
        self._loss = loss
        self._hidden = hidden
        self.of_hidden = torch.zeros_like(hidden, dtype=loss.wide) if has_hidden else None
        # The loss scale of fp16 is not known in the forward, and small probabilities would become 0.
        self._products = torch.float32 if loss.dtype is torch.float16 else loss.dtype

    def add(self, tokens: slice, grad: Tensor, rows: Tensor, of_rows: Tensor | None, of_bias: Tensor | None) -> None:
        """Adds what a cell brings.

        Args:
            tokens: of the chunk.
            grad: of what the layer returned in the cell, `(n, b)`.
            rows: of the block, `(b, H)`.
            of_rows: the sum to add the gradient of `rows` to; None: it is not wanted.
            of_bias: likewise of the bias, `(b,)`.
        """
        if of_bias is not None:
            of_bias += grad.sum(0)
        grad = grad.to(self._products)
        if self.of_hidden is not None:
            self.of_hidden[tokens] += grad @ rows.to(self._products)
        if of_rows is not None:
            of_rows += grad.t() @ self._hidden[tokens].to(self._products)


def blocks(words: int) -> list[slice]:
    """The words of each block."""
    return [slice(first, min(first + BLOCK, words)) for first in range(0, words, BLOCK)]


def bytes_in_chunks(tokens: int, words: int, width: int, dtype: torch.dtype, *, trains_head: bool) -> int:
    """What `linear_cross_entropy` takes on the device beside `hidden` and the weight, with its own `chunk`.

    Args:
        tokens: N.
        words: V.
        width: H.
        dtype: of products.
        trains_head: whether the weight gets a gradient.
    """
    chunk, block, wide = min(CHUNK, tokens), min(BLOCK, words), torch.float32.itemsize
    logits = chunk * words * dtype.itemsize + CELL_TENSORS * chunk * block * wide
    return logits + wide * width * (tokens + (words if trains_head else 0))


def require_first_order() -> None:
    """Requires that the backward that runs now makes no graph.

    Raises:
        ConfigError: if it makes one.
    """
    require_no_graph("linear_cross_entropy", "compute the logits, F.cross_entropy(head(hidden), labels)")


def exactly(device: torch.device) -> ExitStack:
    """A context without gradients, in which autocast changes no dtype."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    if torch.amp.is_autocast_available(device.type):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def scaled(total: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A sum of gradients times a factor, in a dtype; the sum is used up."""
    return None if total is None else total.mul_(factor).to(dtype)


def cells_of_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: TokenLosses) -> Tensor:
    """The loss of an output layer. It is a torch function: a guarded weight sees it (guard.py).

    Args:
        hidden: `(N, H)`.
        weight: `(V, H)`.
        bias: `(V,)`, or None.
        loss: what it is of.
    """
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(cells_of_linear, tensors, hidden, weight, bias, loss)
    needed = [one is not None and one.requires_grad and torch.is_grad_enabled() for one in (hidden, weight, bias)]
    kind = _InForward if loss.made_in_forward and any(needed) else _InBackward
    return kind.apply(hidden, weight, bias, loss, needed)  # type: ignore[no-any-return, no-untyped-call]


class _InForward(torch.autograd.Function):
    """The loss, whose gradients are made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: TokenLosses, needed: Sequence[bool]
    ) -> Tensor:
        with exactly(hidden.device):
            rows, own_bias = weight.to(loss.dtype), None if bias is None else bias.to(loss.dtype)
            sums = Sums(loss, hidden, has_hidden=needed[0])
            of_weight = torch.zeros_like(weight, dtype=loss.wide) if needed[1] else None
            of_bias = torch.zeros_like(weight[:, 0], dtype=loss.wide) if needed[2] else None
            for tokens in loss.chunks():
                raw: dict[int, Tensor] = {}
                for block in blocks(loss.words):
                    raw[block.start] = F.linear(hidden[tokens], rows[block], _part(own_bias, block))
                    loss.see(tokens, block.start, raw[block.start])
                lse = loss.sums_are_complete(tokens)
                for block in reversed(blocks(loss.words)):
                    grad = loss.gradient(tokens, block.start, raw.pop(block.start), lse, None)
                    sums.add(tokens, grad, rows[block], _part(of_weight, block), _part(of_bias, block))
            ctx.loss = loss
            ctx.sums = (sums.of_hidden, of_weight, of_bias)
            ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
            return loss.end_forward()

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
        require_first_order()
        if ctx.sums is None:
            raise AccumulationError(
                "a second backward came to linear_cross_entropy, whose gradients were made in the forward and given to "
                'the first one: call it once for each backward, or with reduction="none"'
            )
        totals, ctx.sums = ctx.sums, None
        with exactly(of_result.device):
            factor, _ = ctx.loss.factors(of_result)
            grads = [scaled(total, factor, dtype) for total, dtype in zip(totals, ctx.dtypes, strict=True)]
        return (*grads, None, None)


class _InBackward(torch.autograd.Function):
    """The loss, whose backward computes the logits once more."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: TokenLosses, needed: Sequence[bool]
    ) -> Tensor:
        with exactly(hidden.device):
            rows, own_bias = weight.to(loss.dtype), None if bias is None else bias.to(loss.dtype)
            for tokens in loss.chunks():
                for block in blocks(loss.words):
                    raw = F.linear(hidden[tokens], rows[block], _part(own_bias, block))
                    loss.see(tokens, block.start, raw)
            if any(needed):
                ctx.save_for_backward(hidden, weight, bias)
                ctx.loss, ctx.needed = loss, needed
            return loss.end_forward()

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        require_first_order()
        loss: TokenLosses = ctx.loss
        with exactly(hidden.device):
            rows, own_bias = weight.to(loss.dtype), None if bias is None else bias.to(loss.dtype)
            factor, of_tokens = loss.factors(of_result)
            sums = Sums(loss, hidden, has_hidden=ctx.needed[0])
            of_weight = torch.zeros_like(weight, dtype=loss.wide) if ctx.needed[1] else None
            of_bias = torch.zeros_like(weight[:, 0], dtype=loss.wide) if ctx.needed[2] else None
            for tokens in loss.chunks():
                for block in reversed(blocks(loss.words)):
                    raw = F.linear(hidden[tokens], rows[block], _part(own_bias, block))
                    grad = loss.gradient(tokens, block.start, raw, loss.lse[tokens], of_tokens)
                    sums.add(tokens, grad, rows[block], _part(of_weight, block), _part(of_bias, block))
            return (
                scaled(sums.of_hidden, factor, hidden.dtype),
                scaled(of_weight, factor, weight.dtype),
                scaled(of_bias, factor, weight.dtype if bias is None else bias.dtype),
                None,
                None,
            )


def _part(tensor: Tensor | None, block: slice) -> Tensor | None:
    return None if tensor is None else tensor[block]


class LossLinear(nn.Linear):
    """An output layer that leaves its logits to the loss: in training it returns `LateLogits`."""

    def forward(self, inputs: Tensor) -> Any:
        if self.training and torch.is_grad_enabled():
            return LateLogits(self, inputs)
        return super().forward(inputs)


class LateLogits:
    """The logits of an output layer, before they are computed.

    Multiplied, divided and put through tanh they are still late, and `loss` needs none of them. Any other use computes
    them, and goes on with a tensor.

    Args:
        head: the layer.
        hidden: what entered it, `(..., H)`.
        scale: what its output is multiplied with.
        softcap: what the tanh of that is multiplied with; None: there is no tanh.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor, scale: float = 1.0, softcap: float | None = None) -> None:
        self._head = head
        self._hidden = hidden
        self._scale = scale
        self._softcap = softcap

    def loss(self, labels: Tensor, **options: Any) -> Tensor:
        """Their cross entropy.

        Args:
            labels: `(...)`.
            **options: of `linear_cross_entropy`, but for the scale and the cap.

        Raises:
            OffloadError: as `linear_cross_entropy`.
        """
        scale = self._scale if self._softcap is None else self._scale * self._softcap
        pair = (self._head.weight, self._head.bias)
        labels = labels.to(self._hidden.device)
        made: Tensor = linear_cross_entropy(
            self._hidden, pair, labels, softcap=self._softcap, logit_scale=scale, **options
        )
        return made

    def computed(self) -> Tensor:
        """The logits, `(..., V)`."""
        logits = F.linear(self._hidden, self._head.weight, self._head.bias)
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._softcap is None else logits.tanh() * self._softcap

    def tanh(self) -> Any:
        """Their hyperbolic tangent."""
        if self._softcap is not None:
            return self.computed().tanh()
        return LateLogits(self._head, self._hidden, self._scale, 1.0)

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, int | float) or factor == 0:
            return self.computed() * factor
        if self._softcap is None:
            return LateLogits(self._head, self._hidden, self._scale * factor)
        if factor < 0:
            return self.computed() * factor
        return LateLogits(self._head, self._hidden, self._scale, self._softcap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self * (1 / divisor) if isinstance(divisor, int | float) and divisor else self.computed() / divisor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return func(*_computed(args), **_computed(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "float":  # as the loss is computed anyway
            return lambda: self
        return getattr(self.computed(), name)

    def __getitem__(self, at: Any) -> Tensor:
        return self.computed()[at]


def _computed(tree: Any) -> Any:
    """`tree` (nested lists, tuples, dicts) with tensors in place of late logits."""
    if isinstance(tree, LateLogits):
        return tree.computed()
    if isinstance(tree, dict):
        return {key: _computed(value) for key, value in tree.items()}
    return type(tree)(map(_computed, tree)) if type(tree) in (list, tuple) else tree
