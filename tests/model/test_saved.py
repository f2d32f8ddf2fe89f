"""What functions of autograd and checkpoints save of streamed parameters outside of their unit's forward is there when
the backward asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offload import BudgetError, ReleasedParameterError, Tuning
from tests.model.held import held_after_a_step
from tests.support.streamed import Streams, Watched, train
from tests.support.toy import Net, batch, squares


class Product(torch.autograd.Function):
    """`x @ w.t()`, as kernels of other people are wrapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        of_w = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(w.dtype) if ctx.needs_input_grad[1] else None
        return grad @ w, of_w


class ProductOfLate(torch.autograd.Function):
    """The same in the newer style, in which the forward has no `ctx`."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Product.backward


def wide(out: Tensor) -> Tensor:
    """What a model returned, four times side by side: as wide as the inputs of its head."""
    return torch.cat([out] * 4, -1)


FUNCTIONS = pytest.mark.parametrize("function", [Product, ProductOfLate], ids=["ctx", "setup_context"])


@FUNCTIONS
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_of_a_function_that_the_model_calls_with_the_weight_of_a_block(
    streams: Streams, function: type[Product], is_frozen: bool
) -> None:
    class Calls(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].up.weight.requires_grad_(not is_frozen)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            h = h + function.apply(h, self.blocks[1].up.weight).mean(-1, keepdim=True)
            for block in self.blocks:
                h = block(h)
            return self.head(h)

    streams.assert_same_bits(train(squares), Calls)


@FUNCTIONS
def test_of_a_function_beside_the_model_with_a_reference_pass_before_the_backward(
    streams: Streams, function: type[Product]
) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        scores = function.apply(wide(model(x)), model.head.weight)
        with torch.no_grad():
            reference = model(x)
        return (scores.float() - reference.float()).square().mean()

    streams.assert_same_bits(train(loss))


def test_of_two_losses_that_share_a_function_and_go_back_one_after_the_other(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        for step in range(3):
            h = model.embed(batch(step).bfloat16())
            weight = model.blocks[2].up.weight
            scores = [Product.apply(h * factor, weight).float() for factor in (1, 2)]
            for score in scores:
                (score.square().mean() + squares(model, batch(step), 0)).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    streams.assert_same_bits(body, accumulation=2)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_of_a_checkpoint_beside_the_model_whose_argument_is_a_parameter(streams: Streams, reentrant: bool) -> None:
    def score(h: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(F.linear(h, weight)).float().square().mean()

    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        value: Tensor = checkpoint(score, wide(model(x)), model.head.weight, use_reentrant=reentrant)
        with torch.no_grad():
            model(x)
        return value

    streams.assert_same_bits(train(loss))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_of_a_checkpoint_whose_argument_was_released(streams: Streams, reentrant: bool) -> None:
    def score(h: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(F.linear(h, weight))

    def body(model: Net, optimizer: Watched) -> None:
        h = model.embed(batch(0).bfloat16())
        weight = model.blocks[1].up.weight
        model(batch(0))  # until another block runs
        checkpoint(score, h, weight, use_reentrant=reentrant).float().square().mean().backward()
        optimizer.step()

    if reentrant:  # which saves its arguments in the end, when they have been fetched
        streams.assert_same_bits(body)
        return
    with pytest.raises(ReleasedParameterError, match=r"was given blocks\.1\.up\.weight as an argument"):
        streams.run(body, Net)


def test_of_a_checkpoint_whose_argument_has_a_pending_update(tmp_path: Path) -> None:
    refused = pytest.raises(ReleasedParameterError, match=r"blocks\.1\.after as an argument")
    with held_after_a_step("resident", tmp_path) as held, refused:
        x = torch.ones(2, held.param.shape[1], dtype=held.param.dtype, requires_grad=True)
        checkpoint(F.linear, x, held.param, use_reentrant=False)


def test_what_is_saved_takes_memory_until_the_step_and_no_longer(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        h = model.embed(batch(0).bfloat16())
        with torch.no_grad():  # nobody goes back from here
            model(batch(0))
            Product.apply(h.detach(), model.blocks[1].up.weight)
            model(batch(0))
        assert not optimizer._held.units.named("blocks.1").is_here
        loss = Product.apply(h, model.blocks[1].up.weight).sum()
        squares(model).backward()
        assert optimizer._held.units.named("blocks.1").is_here
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model(batch(0))
        assert not optimizer._held.units.named("blocks.1").is_here

    streams.run(body, Net, accumulation=2)


def test_more_is_saved_than_the_device_has_memory_for(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        h = model.embed(batch(0).bfloat16())
        for block in model.blocks:
            Product.apply(h, block.up.weight)

    tuning = Tuning(chunk="4KiB", threads=1, tile="1MiB")  # no layer runs in tiles
    with pytest.raises(BudgetError) as refused:
        streams.optimizer(Net(), device_memory=1, tuning=tuning)
    with pytest.raises(BudgetError, match="have saved until the next step") as few:
        streams.run(
            body, Net, device_memory=refused.value.needed + 300, tuning=tuning
        )  # what it takes without functions
    assert few.value.option == "device_memory"


def test_of_a_function_that_gets_a_weight_whose_layer_runs_in_tiles(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        return Product.apply(model.embed(x.bfloat16()), model.blocks[1].up.weight).float().square().mean()

    with pytest.raises(BudgetError) as refused:
        streams.optimizer(Net(), device_memory=1)
    resident = streams.run(train(loss), Net, param_tier="device")
    in_tiles = streams.run(train(loss), Net, device_memory=refused.value.needed)
    assert resident[0] == in_tiles[0]
    assert all(torch.equal(value, in_tiles[1][name]) for name, value in resident[1].items())
