"""Reading, writing, saving and loading streamed parameters."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from offload import BudgetError, ConfigError, ReleasedParameterError
from offload.model.unit import Presence
from tests.model.test_streaming import squares
from tests.support.streamed import Streams, Watched, train
from tests.support.toy import Net, batch


def test_a_write_to_all_units_reaches_masters_and_store(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        train(squares, steps=2)(model, optimizer)
        with optimizer.gathered(model, writable=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        optimizer.state_of(model.head.weight)
        train(squares, steps=2)(model, optimizer)

    streams.assert_same_bits(body)


def test_a_write_through_data_is_kept(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        train(squares, steps=1)(model, optimizer)
        with optimizer.gathered(model.blocks, writable=True):
            model.blocks[2].up.weight.data.fill_(3.0)
        assert optimizer.state_of(model.blocks[2].up.weight)["master"].eq(3.0).all()
        with optimizer.gathered(model.blocks[2].up.weight):
            assert model.blocks[2].up.weight.eq(3.0).all()


@pytest.mark.parametrize("outer", [None, False, True], ids=["alone", "inside a reader", "inside a writer"])
def test_a_write_that_was_not_announced_counts(streams: Streams, outer: bool | None) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        weight = model.blocks[1].after
        around = nullcontext() if outer is None else optimizer.gathered(weight, writable=outer)
        with around, optimizer.gathered(model.blocks[1]), torch.no_grad():
            weight.fill_(2.0)
        with optimizer.gathered(weight):
            assert weight.eq(2.0).all()
        with suppress(ZeroDivisionError), optimizer.gathered(weight), torch.no_grad():
            weight.data.mul_(2.0)
            raise ZeroDivisionError
        weight.detach().add_(1.0)  # also where nothing gathers
        assert weight.eq(5.0).all()
        assert optimizer.state_of(weight)["master"].eq(5.0).all()


def test_a_write_outside_an_inner_reader_is_kept(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        with optimizer.gathered(model, writable=True), torch.no_grad():
            model.head.weight.fill_(2.0)
            with optimizer.gathered(model.head.weight):
                assert model.head.weight.eq(2.0).all()
        assert optimizer.state_of(model.head.weight)["master"].eq(2.0).all()


def test_gathered_across_a_step(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        with optimizer.gathered(model.blocks[1], writable=True), optimizer.gathered(model.head):
            train(squares, steps=2)(model, optimizer)
            optimizer.synchronize()
            optimizer.losses.append(model.blocks[1].after.float().sum().item())
            with torch.no_grad():
                model.blocks[1].after.mul_(0.5)
            train(squares, steps=2)(model, optimizer)

    streams.assert_same_bits(body)


def test_state_dicts(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        train(squares, steps=2)(model, optimizer)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.losses += [value.float().sum().item() for value in state.values()]
        assert list(state) == [name for name, _ in model.named_parameters()]
        block = {name: value.clone() for name, value in model.blocks[1].state_dict().items()}
        assert all(torch.equal(value, state[f"blocks.1.{name}"]) for name, value in block.items())
        train(squares, steps=1)(model, optimizer)
        model.load_state_dict(state)
        model.blocks[0].load_state_dict(block)
        train(squares, steps=2)(model, optimizer)

    streams.assert_same_bits(body)


def test_a_state_dict_has_one_tensor_for_tied_names(streams: Streams) -> None:
    model = Net()
    model.blocks[1].after = model.blocks[0].after
    with streams.optimizer(model):
        state = model.state_dict()
        assert state["blocks.1.after"] is state["blocks.0.after"]
        assert model.state_dict(keep_vars=True)["blocks.1.after"] is model.blocks[1].after


def test_a_state_dict_beyond_the_budget(tmp_path: Path) -> None:
    model = Net(40)
    with Streams(tmp_path, {"param_tier": "nvme"}).optimizer(model, tier="nvme") as optimizer:
        optimizer._held.access._budget_bytes = 20_000
        for module in (model, model.blocks):
            with pytest.raises(BudgetError) as caught:
                module.state_dict()
            assert caught.value.option == "cpu_memory"
        model.blocks[3].state_dict()


def test_a_parameter_that_is_pointed_elsewhere_where_it_may_be_written_is_taken_over(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        with optimizer.gathered(model.head, writable=True):
            model.head.weight.data = torch.full_like(model.head.weight, 2.0)
            assert model.head.weight.eq(2.0).all()
        assert model.head.weight.eq(2.0).all()
        assert optimizer.state_of(model.head.weight)["master"].eq(2.0).all()
        train(squares, steps=1)(model, optimizer)


def test_pointing_a_streamed_parameter_elsewhere_is_refused_and_changes_nothing(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        weight = model.blocks[1].after
        before, released = weight.detach().clone(), (ReleasedParameterError, r"blocks\.1\.after is streamed.*p\.copy_")
        for value, (error, match) in (
            (torch.zeros_like(before), released),
            (torch.zeros(3, dtype=before.dtype), (ConfigError, r"blocks\.1\.after is .* would become \(3,\)")),
            (before.float(), (ConfigError, r"would become .*torch\.float32")),
        ):
            with pytest.raises(error, match=match):
                weight.data = value
            assert torch.equal(weight, before)
        weight.data = weight.data
        train(squares, steps=1)(model, optimizer)


def test_outside_everything_is_readable_and_afterwards_training_goes_on(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        for _ in range(2):
            optimizer.losses += [param.float().sum().item() for param in model.parameters()]
            optimizer.losses.append(torch.stack([block.after.norm() for block in model.blocks]).sum().item())
            train(squares)(model, optimizer)
        assert [p.shape for p in model.parameters()] == [p.shape for p in Net().parameters()]
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Net().parameters())
        assert batch(0).shape == (4, 5)

    streams.assert_same_bits(body)


@pytest.mark.parametrize("failing", range(8))
def test_what_could_not_be_gathered_or_let_go_of_is_not_held_for_good(streams: Streams, failing: int) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        train(squares, steps=1)(model, optimizer)
        units = optimizer._held.units
        # For each of four units when it has come, and when it is let go of.
        cut = [KeyboardInterrupt if call == failing else None for call in range(8)]
        with patch.object(units, "store_outside_writes", side_effect=cut), pytest.raises(KeyboardInterrupt):  # noqa: SIM117
            with optimizer.gathered(model.blocks):
                pass
        train(squares, steps=1)(model, optimizer)
        assert all(units.named(f"blocks.{number}").presence is Presence.RELEASED for number in range(4))
