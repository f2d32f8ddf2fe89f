"""What users meet first when a framework or a habit gets in the way: an error that names the way out, or no error."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offload import AccumulationError, ConfigError, OffloadZero, PathError, ResumeError, Tuning
from tests.support.toy import take_step


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.ones(2, 3)


def test_hyper_parameters_belong_to_the_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"torch\.optim\.AdamW\(model\.parameters\(\), lr=0\.001\)"):
        OffloadZero(net(), lr=0.001)  # type: ignore[call-overload]


def with_params(change: Callable[[list[nn.Parameter]], object]) -> OffloadZero:
    """Holds a model with an optimizer whose first param group was changed."""
    model = net()
    given = torch.optim.AdamW(model.parameters())
    change(given.param_groups[0]["params"])
    return OffloadZero(model, given)


class Given(NamedTuple):
    """What a mistake may be made with."""

    optimizer: OffloadZero
    folder: Path


MISTAKES: dict[str, tuple[Callable[[Given], object], type[Exception], str]] = {
    "the class of an optimizer": (
        lambda _: OffloadZero(net(), torch.optim.AdamW),  # type: ignore[call-overload]
        ConfigError,
        r"optimizer=AdamW is a class: make one of it, AdamW\(model\.parameters\(\)\)",
    ),
    "arguments in another order": (
        lambda _: OffloadZero(torch.optim.AdamW(net().parameters()), net()),  # type: ignore[call-overload]
        ConfigError,
        r"the first argument is of type AdamW .* give OffloadZero\(model, optimizer\)$",
    ),
    "a wrong spelling of Tuning's": (
        lambda _: Tuning(chunks="1MiB"),  # type: ignore[call-arg]
        ConfigError,
        r"Tuning\(chunks='1MiB'\): there is no such option; did you mean chunk\?",
    ),
    "a path in a file": (
        lambda given: OffloadZero(net(), path=given.folder / "file" / "run"),
        PathError,
        r"/file is a file and no directory: give another path",
    ),
    "a path of a shell": (
        lambda _: OffloadZero(net(), path="~/nowhere/run"),
        PathError,
        r"~ stands for a home directory in a shell only, give os\.path\.expanduser\(\.\.\.\)",
    ),
    "an object without a name": (
        lambda given: given.optimizer.attach(torch.optim.lr_scheduler.StepLR(given.optimizer, 1)),
        ConfigError,
        r"attach\(StepLR\): each object needs a name, as in attach\(scheduler=scheduler\)",
    ),
    "a file of a state dict": (
        lambda given: given.optimizer.load_state_dict("state.pt"),  # type: ignore[arg-type]
        ConfigError,
        r"load_state_dict\('state.pt'\): give what state_dict\(\) returned, not a file",
    ),
    "a state dict of plain torch": (
        lambda given: given.optimizer.load_state_dict(torch.optim.AdamW(net().parameters()).state_dict()),
        ResumeError,
        r"it has no step: give what state_dict\(\) of an OffloadZero of this model returned",
    ),
    "a name for a parameter": (
        lambda given: given.optimizer.grad("0.weight"),  # type: ignore[arg-type]
        ConfigError,
        r"'0\.weight' is no tensor: give the parameter itself, as model\.get_parameter\(name\) does",
    ),
    "a name to be gathered": (
        lambda given: given.optimizer.gathered("0.weight"),  # type: ignore[arg-type]
        ConfigError,
        r"gathered\('0\.weight'\): give a module, a parameter",
    ),
    "nothing to be gathered": (
        lambda given: given.optimizer.gathered(None),  # type: ignore[arg-type]
        ConfigError,
        r"gathered\(None\): give a module, a parameter",
    ),
    "a parameter that is there twice": (
        lambda _: with_params(lambda params: params.append(params[0])),
        ConfigError,
        r"0\.weight is twice in the param groups of AdamW: take it out of one place",
    ),
    "a number for a parameter": (
        lambda _: with_params(lambda params: params.append(3)),  # type: ignore[arg-type]
        ConfigError,
        "a param group of AdamW holds 3, which is no tensor",
    ),
    "a name that is too long": (
        lambda given: OffloadZero(net(), path=given.folder / ("a" * 256)),
        ConfigError,
        "path has a name that is too long for a directory",
    ),
    "a loss for a closure": (
        lambda given: given.optimizer.step(3.0),  # type: ignore[call-overload]
        ConfigError,
        r"step\(3\.0\): give a function that evaluates the model",
    ),
    "a norm that is none": (
        lambda given: given.optimizer.clip_grad_norm_(None),  # type: ignore[arg-type]
        ConfigError,
        "max_norm=None: give a number, at least 0",
    ),
    "an export to a number": (
        lambda given: given.optimizer.export(3),  # type: ignore[arg-type]
        ConfigError,
        r"export\(3\): give the name of a directory",
    ),
    "an export to the empty name": (
        lambda given: given.optimizer.export(""),
        ConfigError,
        r"export\(''\): give the name of a directory",
    ),
    "a snapshot in a number": (
        lambda given: given.optimizer.snapshot(path=3),  # type: ignore[arg-type]
        ConfigError,
        r"snapshot\(3\): give the name of a directory",
    ),
    "an optimizer in its own commits": (
        lambda given: given.optimizer.attach(optimizer=given.optimizer),
        ConfigError,
        r"attach\(optimizer=\.\.\.\) is the OffloadZero itself, whose state is what its commits are: leave it out",
    ),
    "a snapshot of nothing": (
        lambda given: given.optimizer.snapshot(),
        ResumeError,
        r"nothing has been committed yet: call commit\(\) before",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_natural_mistakes_are_told_with_the_culprit_and_the_way_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    call, kind, message = MISTAKES[name]
    with OffloadZero(net(), path=tmp_path / "run", commit_every=0) as optimizer, pytest.raises(kind, match=message):
        call(Given(optimizer, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_another_models_commit_says_what_to_give(tmp_path: Path) -> None:
    model = net()
    with OffloadZero(model, path=tmp_path / "run", commit_every=0) as optimizer:
        take_step(optimizer, model(X).sum())
        optimizer.commit()
    with pytest.raises(
        ResumeError, match=r"another model, optimizer or dtype: give those, or another path\. What"
    ) as refused:
        OffloadZero(nn.Linear(3, 3), path=tmp_path / "run", resume=True)
    assert "weight is in the model, and was not committed" in str(refused.value)


def test_an_undeclared_backward_says_how_to_declare_them_all() -> None:
    model = net()
    with OffloadZero(model) as optimizer:
        model(X).sum().backward()
        with pytest.raises(AccumulationError, match=r"accumulation=N"):
            model(X).sum().backward()
        optimizer.zero_grad()


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_moving_elsewhere_is_refused_before_anything_moves(tier: str) -> None:
    model = net()
    with OffloadZero(model, param_tier=tier) as optimizer:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for move in (model.half, model.double, lambda: model.to(torch.float16)):
            with pytest.raises(ConfigError, match=r"Leave out the call.*model\.to\(\)"):
                move()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        for move in (model.cpu, model.bfloat16, lambda: model.to("cpu"), lambda: model.to("cpu:0")):
            assert move() is model
        model(X).sum().backward()
        assert model.cpu() is model
        optimizer.step()
        assert model.cpu() is model  # with stand-ins of gradients that the step has used


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_wrapped_model_is_unwrapped_and_not_reduced_twice() -> None:
    model = net()
    wrapper = DistributedDataParallel(model)
    with OffloadZero(wrapper, torch.optim.AdamW(wrapper.parameters(), lr=1e-2)) as optimizer:
        before = model[0].weight.detach().clone()
        for _ in range(2):
            take_step(optimizer, wrapper(X).float().sum())
        assert not torch.equal(model[0].weight, before)


@pytest.mark.usefixtures("group")
def test_a_wrapper_reduces_again_after_closing() -> None:
    wrapper = DistributedDataParallel(net())
    reduced: list[int] = []

    def note(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares an annotation with the class, not its name
        reduced.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapper.register_comm_hook(None, note)
    with OffloadZero(wrapper, compute_dtype=torch.float32) as optimizer:
        wrapper(X).sum().backward()
        optimizer.step()
        assert not reduced
    wrapper(X).sum().backward()
    assert reduced
    assert all(param.grad is not None for param in wrapper.parameters())


@pytest.mark.usefixtures("group")
def test_wrapping_a_held_model_names_the_call_to_leave_out() -> None:
    model = net()
    with OffloadZero(model):
        with pytest.raises(ConfigError, match=r"leave out DistributedDataParallel\(model\)"):
            DistributedDataParallel(model)
        model(X).float().sum().backward()
        copied = pickle.loads(pickle.dumps(deepcopy(model)))
        DistributedDataParallel(copied)(X.bfloat16()).float().sum().backward()
    DistributedDataParallel(model)(X.bfloat16()).float().sum().backward()


@pytest.mark.usefixtures("group")
def test_wrapping_what_has_a_held_model_inside_names_the_call_to_leave_out() -> None:
    outer = torch.nn.Sequential(net())
    with OffloadZero(outer[0]):
        wrapper = DistributedDataParallel(outer)
        with pytest.raises(ConfigError, match=r"leave out DistributedDataParallel\(model\)"):
            wrapper(X)
        outer(X).float().sum().backward()
