"""What `optimizer.state` answers, on every tier. The oracle is plain torch with the same model and data."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, MutableMapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_checkpoint

from offload import ClosedError, ConfigError, OffloadZero
from tests.support.toy import Net, batch, squares, take_step

PLACEMENTS: dict[str, dict[str, Any]] = {
    "in RAM": {"tier": "cpu"},
    "on the disk": {"tier": "nvme", "cpu_memory": "2MiB"},
    "streamed": {"tier": "nvme", "param_tier": "nvme", "cpu_memory": "2MiB"},
}


def hold(model: nn.Module, path: Path, placement: str = "in RAM", **options: Any) -> OffloadZero:
    options = PLACEMENTS[placement] | {"compute_dtype": torch.float32} | options
    return OffloadZero(model, path=path if "nvme" in options.values() else None, **options)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """In the first step the head takes part alone, so that all others have no state after it."""
    assert isinstance(model, Net)
    return squares(model.head, model.norm(torch.ones(2, 12))) if step == 0 else squares(model, batch(step))


def names_of(model: nn.Module, states: Any) -> list[str]:
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for param in states]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_states_are_those_of_torch(placement: str, tmp_path: Path) -> None:
    model, plain = Net(), Net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with hold(model, tmp_path, placement, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)) as optimizer:
        assert not optimizer.state
        assert list(optimizer.state) == [] == list(optimizer.state.items())
        assert model.head.weight not in optimizer.state
        assert len(optimizer.state[model.head.weight]) == 0
        assert optimizer.state.get(model.head.weight) is None
        for step in range(3):
            take_step(optimizer, loss_of(model, step))
            take_step(theirs, loss_of(plain, step))
            assert optimizer.state
            assert len(optimizer.state) == len(theirs.state)
            assert set(names_of(model, optimizer.state)) == set(names_of(plain, theirs.state))
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert (param in optimizer.state) == (other in theirs.state)
                assert (optimizer.state.get(param) is None) == (theirs.state.get(other) is None)
        keys = dict(zip(model.parameters(), plain.parameters(), strict=True))
        for param, states in optimizer.state.items():
            for (kind, state), (their_kind, their) in zip(
                states.items(), theirs.state[keys[param]].items(), strict=True
            ):
                assert kind == their_kind
                assert (state.shape, state.dtype, state.device) == (their.shape, their.dtype, their.device)
                torch.testing.assert_close(state, their, rtol=1e-4, atol=1e-9)
                torch.testing.assert_close(state.norm(), their.norm(), rtol=1e-4, atol=1e-9)
        assert optimizer.state[model.embed.weight]["step"].item() == 2


def to_device(optimizer: torch.optim.Optimizer, device: str) -> None:
    """As Lightning's `_optimizer_to_device`, which runs when a `fit` begins and when it ends."""
    for param, states in optimizer.state.items():
        assert isinstance(states, MutableMapping)
        for key, value in states.items():
            if key != "step":
                states[key] = value.to(device)
        optimizer.state[param] = states


def test_a_framework_may_write_back_what_it_has_read(tmp_path: Path) -> None:
    model = Net()
    optimizer = hold(model, tmp_path, "on the disk")
    take_step(optimizer, squares(model))
    optimizer.synchronize()
    before = optimizer.stats()["nvme_read_bytes"]
    to_device(optimizer, "cpu")
    assert optimizer.stats()["nvme_read_bytes"] == before  # they are there
    for param, states in optimizer.state.items():
        optimizer.state[param] = {kind: state.clone() for kind, state in states.items()}
    optimizer.close()
    to_device(optimizer, "cpu")


WRITES: dict[str, Callable[[Any, nn.Parameter], object]] = {
    "zeros a moment": lambda state, p: state[p]["exp_avg"].zero_(),
    "sets elements": lambda state, p: state[p]["exp_avg"].__setitem__((0, slice(None)), 0.0),
    "sets elements of a view": lambda state, p: state[p]["exp_avg_sq"].view(-1)[2:].zero_(),
    "writes through .data": lambda state, p: state[p]["exp_avg"].data.mul_(0.5),
    "writes through what is on the CPU": lambda state, p: state[p]["exp_avg"].float().cpu().contiguous().zero_(),
    "writes element by element": lambda state, p: state[p]["exp_avg"].apply_(lambda one: one + 1),
    "scales several": lambda state, p: torch._foreach_mul_([state[p]["exp_avg"], torch.ones(2)], 0.5),
    "writes an output": lambda state, p: torch.add(torch.ones(3, 12), 1.0, out=state[p]["exp_avg"]),
    "replaces the memory": lambda state, p: state[p]["exp_avg"].set_(torch.zeros(3, 12)),
    "replaces the data": lambda state, p: setattr(state[p]["exp_avg"], "data", torch.zeros(3, 12)),
    "counts a step": lambda state, p: state[p]["step"].add_(1),
    "replaces a moment": lambda state, p: state[p].update(exp_avg=torch.zeros(3, 12)),
    "adds a state": lambda state, p: state[p].setdefault("momentum", torch.zeros(3, 12)),
    "replaces all of a parameter": lambda state, p: state.update({p: {"step": torch.tensor(0.0)}}),
    "drops a moment": lambda state, p: state[p].pop("exp_avg"),
    "drops all of a parameter": lambda state, p: state.pop(p),
    "drops everything": lambda state, p: state.clear(),
    "begins those of another parameter": lambda state, p: state[nn.Parameter(torch.ones(2))].update(step=1),
    "copies everything": lambda state, p: deepcopy(state),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_states_are_refused_and_change_nothing(write: str, tmp_path: Path) -> None:
    model = Net()
    with hold(model, tmp_path) as optimizer:
        take_step(optimizer, squares(model))
        before = optimizer.state_of(model.head.weight)
        with pytest.raises(ConfigError, match=r"optimizer\.state"):
            WRITES[write](optimizer.state, model.head.weight)
        after = optimizer.state_of(model.head.weight)
        assert all(torch.equal(torch.as_tensor(after[kind]), torch.as_tensor(before[kind])) for kind in before)


def test_what_names_itself_a_write_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model = Net()
    with hold(model, tmp_path, "on the disk") as optimizer:
        take_step(optimizer, squares(model))
        optimizer.synchronize()
        before = optimizer.stats()["nvme_read_bytes"]
        state = optimizer.state[model.head.weight]["exp_avg"]
        assert torch.equal(torch.zeros_like(state), torch.zeros(3, 12))
        for write in (state.zero_, lambda: torch.add(state.new_ones(3, 12), 1, out=state)):
            with pytest.raises(ConfigError, match=r"optimizer\.state"):
                write()
        assert optimizer.stats()["nvme_read_bytes"] == before


def test_the_mapping_cannot_be_replaced(tmp_path: Path) -> None:
    with hold(Net(), tmp_path) as optimizer, pytest.raises(ConfigError, match="cannot be replaced"):
        optimizer.state = {}  # type: ignore[assignment]


def test_what_is_not_there_may_be_dropped(tmp_path: Path) -> None:
    model = Net()
    with hold(model, tmp_path) as optimizer:
        optimizer.state.clear()
        assert optimizer.state.pop(model.head.weight, None) is None
        with pytest.raises(KeyError):
            del optimizer.state[model.head.weight]


def test_copies_of_states_are_plain_tensors(tmp_path: Path) -> None:
    model = Net()
    with hold(model, tmp_path) as optimizer:
        take_step(optimizer, squares(model))
        states = optimizer.state[model.head.weight]
        here = optimizer.state_of(model.head.weight)
        torch.save(states, tmp_path / "states")
        for copied in (deepcopy(states), pickle.loads(pickle.dumps(states)), torch.load(tmp_path / "states")):
            assert {type(state) for state in copied.values()} == {Tensor}
            assert torch.equal(copied["exp_avg"], here["exp_avg"])
        assert type(states["exp_avg"] * 1) is Tensor
        copied["exp_avg"].view(-1)[0] = 5.0
        states["exp_avg"].clone().zero_()
        average = states["exp_avg"].mean()
        average += 1
        with pytest.raises(ValueError, match="read-only"):
            states["exp_avg"].numpy()[0] = 1.0
        assert torch.equal(optimizer.state_of(model.head.weight)["exp_avg"], here["exp_avg"])


def test_a_resumed_run_has_the_states_of_the_commit(tmp_path: Path) -> None:
    with hold(Net(), tmp_path, "on the disk") as optimizer:
        model = optimizer._model
        take_step(optimizer, loss_of(model, 0))
        optimizer.commit()
        before = [deepcopy(states) for states in optimizer.state.values()]
    with hold(Net(), tmp_path, "on the disk", resume=True) as optimizer:
        after = list(optimizer.state.values())
        assert len(after) == len(before) == 4
        for here, there in zip(after, before, strict=True):
            assert all(torch.equal(here[kind], there[kind]) for kind in there)


CHECKPOINTS: dict[str, Callable[[nn.Module, OffloadZero], object]] = {
    "get_state_dict": torch_checkpoint.get_state_dict,
    "get_optimizer_state_dict": torch_checkpoint.get_optimizer_state_dict,
    "set_state_dict": lambda model, optimizer: torch_checkpoint.set_state_dict(
        model, optimizer, model_state_dict=model.state_dict(), optim_state_dict={"state": {}, "param_groups": []}
    ),
    "set_optimizer_state_dict": lambda model, optimizer: torch_checkpoint.set_optimizer_state_dict(
        model, optimizer, {"state": {}, "param_groups": []}
    ),
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("call", CHECKPOINTS)
def test_torchs_checkpoints_of_optimizers_say_what_to_call_and_change_nothing(
    call: str, steps: int, tmp_path: Path
) -> None:
    model = Net()
    with hold(model, tmp_path) as optimizer:
        for step in range(steps):
            take_step(optimizer, squares(model, batch(step)))
        with pytest.raises(ConfigError, match=r"optimizer\.commit\(\)"):
            CHECKPOINTS[call](model, optimizer)
        assert optimizer.stats()["step"] == steps
        assert len(optimizer.state) == (steps and 38)
        assert all(param.grad is None for param in model.parameters())
        ours = torch_checkpoint.get_model_state_dict(model)
        assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())


def test_a_state_that_somebody_keeps_does_not_keep_the_optimizer(tmp_path: Path) -> None:
    model = Net()
    optimizer = hold(model, tmp_path)
    take_step(optimizer, squares(model))
    kept = optimizer.state[model.head.weight]["exp_avg"]
    alive = weakref.ref(optimizer)
    optimizer.close()
    with pytest.raises(ClosedError):
        kept.norm()
    del optimizer
    gc.collect()
    assert alive() is None
    with pytest.raises(ClosedError, match="went with their optimizer"):
        kept.norm()
