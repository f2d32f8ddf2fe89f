from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.errors import ConfigError
from offload.model.units import compute_dtypes, kept_modules, specs_of, units_of


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
    assert kept_modules(model, [nn.Linear, model.blocks[0]]) == [
        model.blocks[0],
        model.blocks[1][0],
        model.blocks[1][2],
        model.head,
    ]
    for missing in (nn.Conv2d, nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match="not in the model"):
            kept_modules(model, [missing])


def test_parameters_of_kept_modules_stay_fp32() -> None:
    model = Gpt()
    dtypes = compute_dtypes(model, [nn.Embedding], torch.bfloat16)
    assert dtypes[model.embed.weight] is torch.float32
    assert {dtypes[p] for p in model.parameters() if p is not model.embed.weight} == {torch.bfloat16}


def test_a_parameter_shared_with_a_kept_module_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"head\.weight is shared"):
        compute_dtypes(Gpt(tied=True), [nn.Embedding], torch.bfloat16)


def test_specs_follow_the_model_and_leave_out_what_nobody_trains() -> None:
    model = Gpt()
    model.blocks[0].requires_grad_(False)
    groups = [
        {"params": [model.head.weight]},
        {"params": [*model.blocks[1].parameters(), *model.blocks[0].parameters()]},
    ]
    specs, params = specs_of(model, groups, (), torch.bfloat16)
    assert [(spec.name, spec.group) for spec in specs] == [
        ("blocks.1.0.weight", 1),
        ("blocks.1.0.bias", 1),
        ("blocks.1.2.weight", 1),
        ("blocks.1.2.bias", 1),
        ("head.weight", 0),
    ]
    assert [param.numel() for param in params] == [spec.numel for spec in specs]
