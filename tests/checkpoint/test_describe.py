from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from offload.checkpoint.manifest import Manifest, differences, flats_of, memory_order, parameters_of, parse, serialise
from offload.checkpoint.reader import in_shape
from offload.layout import ParamSpec, build
from tests.support.committed import manifest_of


@pytest.mark.parametrize("shape", [(), (5,), (1,), (2, 3), (2, 3, 4), (1, 3, 1, 4), (2, 1, 3, 2), (0, 3)])
def test_elements_in_the_order_of_memory_find_back_into_their_shape(shape: tuple[int, ...]) -> None:
    for dimensions in itertools.permutations(range(len(shape))):
        back = sorted(range(len(shape)), key=dimensions.__getitem__)
        tensor = torch.rand([shape[dimension] for dimension in dimensions]).permute(back)
        assert tensor.shape == shape
        order = memory_order(tensor.shape, tensor.stride())
        assert (order is None) == tensor.is_contiguous() or 0 in shape
        facts = dataclasses.replace(manifest_of().parameters[0], shape=shape, order=order)
        line = tensor.as_strided((tensor.numel(),), (1,))
        assert torch.equal(in_shape(line, facts), tensor)
        assert in_shape(line, facts).is_contiguous()


def test_a_layout_makes_a_manifest_that_can_be_read() -> None:
    tensors = [
        torch.rand(7, 300),
        torch.rand(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.rand(()),
        torch.rand(9),
    ]
    units, dtypes = ("", "a", "a", "a"), (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32)
    specs = [
        ParamSpec(f"p{number}", tensor.numel(), units[number], dtypes[number], 0)
        for number, tensor in enumerate(tensors)
    ]
    layout = build(specs, 1024)
    parameters = parameters_of(layout, [x.shape for x in tensors], [x.stride() for x in tensors], [1, 2, 3, 4])
    assert [param.age for param in parameters] == [1, 2, 3, 4]
    assert [param.order for param in parameters] == [None, (0, 2, 3, 1), None, None]
    chunks = tuple(
        manifest_of().chunks[0]._replace(flat=chunk.flat, start=chunk.start, numel=chunk.numel)
        for chunk in layout.chunks
    )
    manifest = manifest_of(parameters=parameters, flats=flats_of(layout), chunks=chunks)
    assert parse(serialise(manifest)) == manifest
    halves = flats_of(layout, [(0, flat.numel // 2) for flat in layout.flats])
    assert [flat.owned for flat in halves] == [(0, flat.numel // 2) for flat in layout.flats]


def test_what_does_not_matter_to_a_resume_is_no_difference() -> None:
    one, other = manifest_of(), manifest_of(1, 3, 2, step=9)
    parameters = tuple(dataclasses.replace(param, unit="all", age=0) for param in other.parameters)
    other = dataclasses.replace(other, parameters=parameters, groups=({}, {"lr": 1.0}), split_master=True)
    assert differences(one, other) == []


def replaced(number: int, **changes: object) -> Callable[[Manifest], dict[str, object]]:
    def change(made: Manifest) -> dict[str, object]:
        parameters = list(made.parameters)
        parameters[number] = dataclasses.replace(parameters[number], **changes)  # type: ignore[arg-type]
        return {"parameters": tuple(parameters)}

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: {"compute_dtype": "float32"}, "compute_dtype is float32, and bfloat16 was committed"),
        (lambda made: {"groups": made.groups[:1]}, "there are 1 param groups, and 2 were committed"),
        (lambda made: {"parameters": made.parameters[1:]}, "embed.weight was committed, and is not in the model"),
        (replaced(4, name="blocks.0.scale"), "blocks.0.scale is in the model, and was not committed"),
        (replaced(0, shape=(7, 301)), "embed.weight has the shape (7, 301), and (7, 300) was committed"),
        (replaced(4, dtype="bfloat16"), "blocks.0.norm is bfloat16, and float32 was committed"),
        (replaced(1, order=None), "has its dimensions in memory in the order None, and (0, 2, 3, 1) was committed"),
        (replaced(0, group=1), "embed.weight is in param group 1, and 0 was committed"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_keeps_from_resuming_is_said(change: Callable[[Manifest], dict[str, object]], said: str) -> None:
    wanted = dataclasses.replace(manifest_of(), **change(manifest_of()))  # type: ignore[arg-type]
    assert any(said in line for line in differences(manifest_of(), wanted))
