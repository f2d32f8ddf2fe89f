"""Modules that see a few tokens at a time, because what they compute in between does not fit for all of them.

What an MLP computes in between is several times as wide as what enters it, and no activation tier helps while it runs:
32,000 tokens of Llama-8B take 2.75 GB of bf16 in one MLP, and its gradients as much again. An MLP computes each token
by itself. So its forward runs on one *tile* of tokens after the other and keeps only what entered, and its backward
computes each tile again (TiledMLP of Arctic Long Sequence Training, arXiv 2506.13996, section 3.3).

The gradient of a weight is a sum over tiles, each rounded to the dtype of the weight, and added up in fp32, in the
order of tokens. Tiles are cut by the number of tokens alone, so no bit depends on any tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offload.errors import ConfigError, StaleActivationError
from offload.model.inner import inner_tensors
from offload.model.torch_helpers import require_no_graph

M = TypeVar("M", bound=nn.Module)

Layer = Callable[[Tensor], Any]
State = tuple[list[tuple[Tensor, int]], list[bool]]
"""What a backward depends on beside what entered: parameters with their versions, and the modes of modules."""


def tile_tokens(module: M, tokens: int) -> M:
    """Makes a module see at most `tokens` tokens at a time; call it before OffloadZero or after it.

        for block in model.blocks:
            offload.tile_tokens(block.mlp, 2048)

    The module takes one tensor `(..., H)` and returns one `(..., H')`, and computes each token by itself: an MLP, not
    attention, and no normalisation over tokens. It is given `(tokens, H)`, with dimensions of one before that if more
    than two came. Its forward keeps nothing but what entered, and its backward computes it again, with the same random
    numbers of torch and autocast. A backward takes what one tile takes, and an fp32 gradient of each trained parameter.
    It gives gradients to what entered and to the module's own parameters, and no gradients of gradients.

    It changes bits: gradients of weights are sums of those of tiles, added up in fp32, and a product of few rows may
    round otherwise. The bits are the same on every tier.

    Args:
        module: changed in place: its `forward` is an attribute of it from now on.
        tokens: of a tile, at least 1.

    Returns:
        The module.

    Raises:
        ConfigError: for a number of tokens below 1, or something that is no module. In the forward: for other arguments
            than one floating tensor, or a module that returns something else than a tensor with a row for each token,
            or that writes to what enters. In the backward: for one with a graph of its own, and for a module that uses
            another tensor that needs a gradient, or whose trained parameters are others than in the forward.
        StaleActivationError: in the backward, if a parameter was written to since the forward, or a mode changed.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"tile_tokens got tokens={tokens!r}: give a number of tokens, at least 1")
    if not isinstance(module, nn.Module):
        raise ConfigError(f"tile_tokens got a {type(module).__name__}: give a module, such as the MLP of a block")
    own = module.__dict__.get("forward")
    while isinstance(own, TiledForward):
        own = own.own
    module.forward = TiledForward(module, own, tokens)
    return module


class TiledForward:
    """The forward of a module that sees a few tokens at a time.

    Args:
        module: the module.
        own: its forward, if that is not its class's.
        tokens: of a tile.
    """

    def __init__(self, module: nn.Module, own: Layer | None, tokens: int) -> None:
        self.module = module
        self.own = own
        self.tokens = tokens

    @torch.compiler.disable(reason="tile_tokens loops over tiles of tokens")  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise ConfigError(
                f"{self._name} runs in tiles of tokens and was not called with one floating tensor: tile_tokens is for "
                "modules that take the hidden states alone, such as the MLP of a block"
            )
        inputs: Tensor = args[0]
        if inputs.dim() < 2:
            raise ConfigError(f"{self._name} runs in tiles of tokens and got {tuple(inputs.shape)}: give (..., H)")
        params = [one for one in self.module.parameters() if one.requires_grad]
        made: Tensor = _InTiles.apply(self, inputs, *params)  # type: ignore[no-untyped-call]
        return made

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def tiles(self, inputs: Tensor) -> Iterator[slice]:
        """The tokens of each tile of `inputs`; one without any if there are none."""
        count = inputs.shape[:-1].numel()
        for start in range(0, max(count, 1), self.tokens):
            yield slice(start, min(start + self.tokens, count))

    def run(self, rows: Tensor, dims: int) -> Tensor:
        """What the module makes of a tile.

        Args:
            rows: `(n, H)`.
            dims: how many dimensions the module is given.

        Returns:
            `(n, H')`.

        Raises:
            ConfigError: if it is not one row for each token.
        """
        given = rows.view((1,) * (dims - 2) + tuple(rows.shape))
        made = type(self.module).forward(self.module, given) if self.own is None else self.own(given)
        if not isinstance(made, Tensor) or made.shape[:-1] != given.shape[:-1]:
            what = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ConfigError(
                f"{self._name} runs in tiles of tokens and made {what} of {tuple(given.shape)}: tile_tokens is for "
                "modules that return one tensor, with a row for each token"
            )
        return made.reshape(len(rows), made.shape[-1])

    def require_unwritten(self, rows: Tensor, version: int) -> None:
        """Requires that what entered was not written to.

        Args:
            rows: all of it.
            version: its version before the forward.

        Raises:
            ConfigError: if it was.
        """
        if _version_of(rows) != version:
            raise ConfigError(
                f"{self._name} runs in tiles of tokens and writes to what enters, of which its backward computes the "
                "tiles again: leave inplace=True out of its first layers, or let it begin with a copy"
            )

    def state(self) -> State:
        """What a backward depends on beside what entered, as it is now."""
        return [(one, _version_of(one)) for one in self.module.parameters()], [
            one.training for one in self.module.modules()
        ]

    def require_same(self, state: State) -> None:
        """Requires that what a backward depends on is as it was at the end of the forward.

        Raises:
            ConfigError: there are other parameters.
            StaleActivationError: a parameter was written to, or a module is in another mode.
        """
        (params, modes), (params_now, modes_now) = state, self.state()
        if [id(one) for one, _ in params] != [id(one) for one, _ in params_now]:
            raise ConfigError(
                f"{self._name} runs in tiles of tokens, and its parameters are others than in the forward, as after "
                "torch.func.functional_call: its backward computes them again, with its parameters of now. Leave "
                "tile_tokens out there"
            )
        if modes != modes_now or [one for _, one in params] != [one for _, one in params_now]:
            raise StaleActivationError(
                f"parameters or the mode of {self._name} have changed since its forward, and it runs in tiles of "
                "tokens, which its backward computes again: call backward() before step(), eval() and the like"
            )

    def require_own(self, made: Tensor, own: Sequence[Tensor]) -> None:
        """Requires that all tensors that would get a gradient from a tile are known.

        Args:
            made: what the tile has made, with its graph.
            own: what entered, and the trained parameters.

        Raises:
            ConfigError: if there is another one.
        """
        known, foreign, seen, left = set(map(id, own)), list[Tensor](), set[Any](), [made.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            kind = type(node).__name__  # a Function may have given its node an attribute `name`
            if kind == "_AnchorBackward":  # a weight runs in tiles of its own, whose leaves are no parameters
                return
            leaf = getattr(node, "variable", None) if kind == "AccumulateGrad" else None
            if leaf is not None and id(leaf) not in known:
                foreign.append(leaf)
            left += [one for one, _ in node.next_functions]
        if foreign:  # asked at the end, as the leaves of tiles may come before the anchor
            raise ConfigError(
                f"{self._name} runs in tiles of tokens and uses a tensor {tuple(foreign[0].shape)} that needs a "
                "gradient and is no parameter of it, or what was computed of one: tile_tokens would give it none. Make "
                "it a parameter of the module, or detach() it"
            )


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def token_sum_bytes(model: nn.Module) -> int:
    """Bytes of the fp32 gradients that a backward adds up at a time for modules of a model that see tiles of tokens."""
    tiled = [one for one in model.modules() if isinstance(one.__dict__.get("forward"), TiledForward)]
    trained = [[param for param in one.parameters() if param.requires_grad] for one in tiled]
    numels = [sum(inner.tensor.numel() for inner in inner_tensors(params)) for params in trained]
    return torch.float32.itemsize * max(numels, default=0)


class _InTiles(torch.autograd.Function):
    """A module's forward, tile by tile, which keeps what enters it."""

    @staticmethod
    def forward(ctx: Any, forward: TiledForward, inputs: Tensor, *params: Tensor) -> Tensor:
        ctx.tiled = forward
        ctx.is_needed = inputs.requires_grad or bool(params)
        ctx.random = _RandomState(inputs.device) if ctx.is_needed else None
        ctx.autocast = _Autocast(inputs.device.type)
        ctx.save_for_backward(inputs)
        rows, result = inputs.reshape(-1, inputs.shape[-1]), None
        before = _version_of(rows)
        for tile in forward.tiles(inputs):
            made = forward.run(rows[tile], inputs.dim())
            if result is None:
                result = made.new_empty(len(rows), made.shape[-1])
            result[tile] = made
        assert result is not None
        forward.require_unwritten(rows, before)
        ctx.trained = params
        ctx.state = forward.state() if ctx.is_needed else None
        return result.view(*inputs.shape[:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        forward: TiledForward = ctx.tiled
        require_no_graph("a module in tiles of tokens", "leave tile_tokens out")
        forward.require_same(ctx.state)
        params = [one for one in forward.module.parameters() if one.requires_grad]
        if [*map(id, params)] != [*map(id, ctx.trained)]:
            raise ConfigError(
                f"parameters of {type(forward.module).__name__} were frozen or released between a forward and its "
                "backward: it runs in tiles of tokens, and computes them again with its parameters of now"
            )
        rows, of_rows = inputs.reshape(-1, inputs.shape[-1]), of_result.reshape(-1, of_result.shape[-1])
        of_inputs = torch.empty_like(rows) if ctx.needs_input_grad[1] else None
        sums: list[Tensor | None] = [None] * len(params)
        with ctx.random.again(), ctx.autocast.again():
            for tile in forward.tiles(inputs):
                with torch.enable_grad():
                    entering = rows[tile].detach().requires_grad_(of_inputs is not None)
                    made = forward.run(entering, inputs.dim())
                if not tile.start:
                    forward.require_own(made, [entering, *params])
                found = _gradients(made, [entering, *params], of_rows[tile])
                if of_inputs is not None:
                    of_inputs[tile] = 0 if found[0] is None else found[0]
                sums = [_added(total, grad) for total, grad in zip(sums, found[1:], strict=True)]
        of_params = [
            None if total is None else total.to(param.dtype) for total, param in zip(sums, params, strict=True)
        ]
        return (None, None if of_inputs is None else of_inputs.view(inputs.shape), *of_params)


def _gradients(made: Tensor, wanted: Sequence[Tensor], of_made: Tensor) -> list[Tensor | None]:
    """The gradients of tensors, of which some may have none."""
    asked = [one for one in wanted if one.requires_grad]
    found = iter(torch.autograd.grad(made, asked, of_made, allow_unused=True) if made.requires_grad else ())
    return [next(found, None) if one.requires_grad else None for one in wanted]


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum of gradients of tiles, in fp32 (fp64 for fp64)."""
    if grad is None:
        return total
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(wide, copy=True) if total is None else total.add_(grad)


class _RandomState:
    """The states of the generators that a forward draws from, as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._own = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)

    def again(self) -> ExitStack:
        """A context that draws the same numbers once more."""
        stack = ExitStack()
        is_host = self._own is None
        devices = [] if is_host else [self._device]
        stack.enter_context(torch.random.fork_rng(devices, device_type="cuda" if is_host else self._device.type))
        torch.set_rng_state(self._host)
        if self._own is not None:
            torch.get_device_module(self._device).set_rng_state(self._own, self._device)
        return stack


class _Autocast:
    """What autocast does on a kind of device, as it is now."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._is_there = torch.amp.is_autocast_available(kind)  # the meta device has none
        self._enabled = self._is_there and torch.is_autocast_enabled(kind)
        self._dtype = torch.get_autocast_dtype(kind) if self._enabled else None

    def again(self) -> ExitStack:
        """A context in which it does the same."""
        stack = ExitStack()
        if self._is_there:
            stack.enter_context(torch.autocast(self._kind, dtype=self._dtype, enabled=self._enabled))
        return stack
