"""What is wrong in a param group is said before anything is changed; what is committed is what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import ConfigError, ResumeError

WRONG: list[tuple[str, Any]] = [
    ("lr", None),
    ("lr", -0.1),
    ("lr", float("nan")),
    ("lr", "0.1"),
    ("lr", torch.zeros(2)),
    ("betas", (0.9, 1.0)),
    ("betas", (-0.1, 0.9)),
    ("betas", (0.9,)),
    ("betas", 0.9),
    ("eps", "x"),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("weight_decay", float("inf")),
]
NOT_STORED: list[tuple[str, Any]] = [
    ("note", {"a": 1}),
    ("note", torch.zeros(2)),
    ("note", [[1]]),
    ("note", "a\0b"),
    ("note", float("nan")),
]


def made(path: Path | None = None, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    group: Any = {"params": list(model.parameters()), **options.pop("group", {})}
    tuning = Tuning(io_engine="threads")
    return model, OffloadZero(model, kind([group]), path=path, cpu_memory="8MiB", tuning=tuning, **options)


def step(model: nn.Module, optimizer: OffloadZero) -> None:
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.synchronize()


def state(model: nn.Module, optimizer: OffloadZero) -> list[Tensor]:
    weight = next(model.parameters())
    return [
        weight.detach().clone(),
        *(value for value in optimizer.state_of(weight).values() if torch.is_tensor(value)),
    ]


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_a_wrong_hyper_parameter_is_refused_at_once_and_the_next_step_goes_on(option: str, value: Any) -> None:
    model, optimizer = made()
    with optimizer:
        step(model, optimizer)
        before, group = state(model, optimizer), optimizer.param_groups[0]
        right, group[option] = group[option], value
        with pytest.raises(ConfigError, match=f"param group 0 has {option}="):
            step(model, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, state(model, optimizer), strict=True))
        group[option] = right
        optimizer.zero_grad()
        step(model, optimizer)
        assert optimizer.state_of(next(model.parameters()))["step"] == 2


@pytest.mark.parametrize(("option", "value"), [*WRONG[5:6], *NOT_STORED])
def test_what_is_wrong_is_never_committed(tmp_path: Path, option: str, value: Any) -> None:
    model, optimizer = made(tmp_path / "run", commit_every=1)
    with optimizer:
        step(model, optimizer)
        optimizer.commit()
        step(model, optimizer)
        optimizer.param_groups[0][option] = value
        with pytest.raises(ConfigError, match=f"param group 0 has {option}"):
            optimizer.commit()
        with pytest.raises(ConfigError, match=f"param group 0 has {option}"):
            step(model, optimizer)
        optimizer.rollback()
        optimizer.param_groups[0].pop("note", None)
        step(model, optimizer)


@pytest.mark.parametrize(("key", "value"), [*NOT_STORED, (3, 1)])
def test_what_cannot_be_stored_is_refused_in_the_first_step_and_at_construction(
    tmp_path: Path, key: Any, value: Any
) -> None:
    model, optimizer = made(tmp_path / "run", commit_every=100)
    with optimizer:
        optimizer.param_groups[0][key] = value
        with pytest.raises(ConfigError, match="param group 0 has"):
            step(model, optimizer)
        del optimizer.param_groups[0][key]
        optimizer.zero_grad()
        step(model, optimizer)
    with pytest.raises(ConfigError, match="param group 0 has"):
        made(tmp_path / "other", commit_every=100, group={key: value})
    assert not (tmp_path / "other").exists()


def test_where_nothing_is_committed_a_group_may_hold_anything() -> None:
    model, optimizer = made(group={"note": {"a": 1}})
    with optimizer:
        step(model, optimizer)


def test_a_state_dict_stays_what_it_is_when_it_was_loaded() -> None:
    def trained(model: nn.Linear, optimizer: torch.optim.Optimizer) -> list[object]:
        saved = optimizer.state_dict()
        group = {**saved["param_groups"][0], "betas": [0.5, 0.75], "lr": torch.tensor(0.5)}
        saved = {**saved, "param_groups": [group]}
        optimizer.load_state_dict(saved)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # which writes to the tensor
        optimizer.param_groups[0]["betas"][0] = 0.25
        model(torch.ones(2, 8, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
        scheduler.step()
        now = optimizer.param_groups[0]
        return [float(group["lr"]), group["betas"], float(now["lr"]), list(now["betas"])]

    model, optimizer = made()
    with optimizer:
        found = trained(model, optimizer)
    plain = nn.Linear(8, 8)
    assert found == trained(plain, torch.optim.AdamW(plain.parameters())) == [0.5, [0.5, 0.75], 0.25, [0.25, 0.75]]


def test_adam_does_not_go_on_as_adamw(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path / "run", commit_every=1)
    with optimizer:
        step(model, optimizer)
        saved = optimizer.state_dict()
    with pytest.raises(ResumeError, match="param group 0 is of Adam, and one of AdamW was committed"):
        made(tmp_path / "run", torch.optim.Adam, commit_every=1, resume=True)
    model, optimizer = made(kind=torch.optim.Adam)
    with optimizer:
        step(model, optimizer)
        with pytest.raises(ResumeError, match="AdamW"):
            optimizer.load_state_dict(saved)
