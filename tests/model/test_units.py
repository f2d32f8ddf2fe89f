from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.model.torch_functions import moved_to
from offload.model.torch_helpers import module_on_the_move
from offload.model.units import compute_dtypes, device_for, fp32_modules, move_buffers, specs_of, units_of


def names_by_unit(model: nn.Module) -> dict[str, list[str]]:
    units = units_of(model)
    found: dict[str, list[str]] = {}
    for name, param in model.named_parameters():
        found.setdefault(units[param], []).append(name)
    return found


class Gpt(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_each_block_is_a_unit_and_the_rest_is_the_root() -> None:
    assert names_by_unit(Gpt()) == {
        "": ["embed.weight", "head.weight"],
        "blocks.0": ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.2.weight", "blocks.0.2.bias"],
        "blocks.1": ["blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.2.weight", "blocks.1.2.bias"],
    }


def test_a_tied_parameter_is_there_once() -> None:
    assert names_by_unit(Gpt(tied=True))[""] == ["embed.weight"]


def test_what_two_blocks_share_belongs_to_the_root() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert names_by_unit(model) == {"": ["0.weight"], "0": ["0.bias"], "1": ["1.bias"]}


def test_a_block_that_appears_twice_belongs_to_the_root() -> None:
    block = nn.Linear(4, 4)
    model = nn.Sequential(block, nn.Sequential(block, nn.Linear(4, 4)))
    assert names_by_unit(model)[""] == ["0.weight", "0.bias"]


def test_a_list_of_one_block_is_looked_into() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU())
    assert sorted(names_by_unit(model)) == ["0.0", "0.1"]


def test_a_plain_module_is_one_unit() -> None:
    assert list(names_by_unit(nn.Linear(2, 2))) == [""]


def test_modules_to_keep_are_found_by_instance_and_type_and_only_the_outermost() -> None:
    model = Gpt()
    assert fp32_modules(model, [nn.Linear, model.blocks[0]]) == [
        model.blocks[0],
        model.blocks[1][0],
        model.blocks[1][2],
        model.head,
    ]
    for missing in (nn.Conv2d, nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match="not in the model"):
            fp32_modules(model, [missing])


def test_parameters_of_kept_modules_stay_fp32() -> None:
    model = Gpt()
    dtypes = compute_dtypes(model, [nn.Embedding], torch.bfloat16)
    assert dtypes[model.embed.weight] is torch.float32
    assert {dtypes[p] for p in model.parameters() if p is not model.embed.weight} == {torch.bfloat16}


def test_a_parameter_shared_with_a_kept_module_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"head\.weight is shared"):
        compute_dtypes(Gpt(tied=True), [nn.Embedding], torch.bfloat16)


def test_specs_follow_the_model_trained_ones_first_and_leave_out_what_nobody_trains() -> None:
    model = Gpt()
    model.blocks[0].requires_grad_(False)
    groups = [
        {"params": [model.head.weight]},
        {"params": [*model.blocks[1].parameters(), *model.blocks[0].parameters()]},
    ]
    specs, inners = specs_of(model, groups, (), torch.bfloat16)
    assert [(spec.name, spec.group) for spec in specs] == [
        ("blocks.1.0.weight", 1),
        ("blocks.1.0.bias", 1),
        ("blocks.1.2.weight", 1),
        ("blocks.1.2.bias", 1),
        ("head.weight", 0),
        ("blocks.0.0.weight", None),
        ("blocks.0.0.bias", None),
        ("blocks.0.2.weight", None),
        ("blocks.0.2.bias", None),
    ]
    assert [one.tensor.numel() for one in inners] == [spec.numel for spec in specs]


CPU, FIRST, SECOND, META = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "meta"))


@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [
        (None, CPU, CPU),
        ("cpu", CPU, CPU),
        ("cpu:0", CPU, CPU),
        (None, FIRST, FIRST),
        (FIRST, FIRST, FIRST),
        (FIRST, CPU, FIRST),
        (FIRST, META, FIRST),
        (None, META, CPU),
        ("meta", META, CPU),
        ("cpu", FIRST, None),
        (SECOND, FIRST, None),
        ("meta", CPU, None),
        ("mps", CPU, None),
    ],
)
def test_a_model_on_the_cpu_goes_where_it_is_to_train_and_no_other_does(
    given: str | torch.device | None,
    own: torch.device,
    expected: torch.device | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offload.model.units.accelerator", lambda: torch.device("cuda"))
    empty = torch.empty
    known = {FIRST, SECOND, torch.device("mps")}

    def empty_there(*shape: int, device: str | torch.device) -> torch.Tensor:
        """On a machine with two CUDA devices."""
        return (
            SimpleNamespace(device=torch.device(device)) if torch.device(device) in known else empty(0, device=device)
        )

    monkeypatch.setattr(torch, "empty", empty_there)
    if expected is None:
        with pytest.raises(ConfigError, match=f"device={given} but the model is on {own}"):
            device_for(given, own)
    else:
        assert device_for(given, own) == expected


def test_buffers_that_modules_share_move_together() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    model[1].register_buffer("none", None)
    move_buffers(model, META)
    assert {buffer.device for buffer in model.buffers()} == {META}
    assert model[1].running_mean is model[0].running_mean
    assert model[1].none is None


@pytest.mark.parametrize(
    ("move", "device"),
    [
        (lambda t: (Tensor.to, (t, "meta")), META),
        (lambda t: (Tensor.to, (t, "cpu:0")), CPU),
        (lambda t: (Tensor.cpu, (t,)), CPU),
        (lambda t: (Tensor.to, (t, "meta", torch.float32, True)), META),
        (lambda t: (Tensor.to, (t, torch.float64)), None),
        (lambda t: (Tensor.to, (t, "meta", torch.float16)), None),
        (lambda t: (Tensor.half, (t,)), None),
        (lambda t: (Tensor.cuda, (t, "no device")), None),
    ],
)
def test_where_a_call_moves_a_tensor_and_what_is_no_move(move: Any, device: torch.device | None) -> None:
    func, args = move(torch.ones(2))
    assert moved_to(func, args, {}) == device


def test_the_outermost_module_on_the_move_is_found() -> None:
    inner = nn.LSTM(2, 2)
    outer = nn.ModuleDict({"inner": inner})
    found: list[nn.Module | None] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(module_on_the_move())
        return tensor

    outer._apply(note)
    inner._apply(note)
    assert all(one is outer for one in found[:4])
    assert all(one is inner for one in found[4:8])
    assert module_on_the_move() is None
