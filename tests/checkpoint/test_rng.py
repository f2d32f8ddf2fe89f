from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch

from offload.checkpoint.commit import read_extra
from offload.checkpoint.extra import collect_rng, restore_rng
from offload.checkpoint.manifest import parse
from offload.devices.copies import accelerator
from offload.errors import ConfigError, ResumeError
from tests.support.committed import RUN, manifest_of, write_manifest


def draw() -> list[object]:
    return [random.random(), random.gauss(0, 1), numpy.random.random(3).tolist(), torch.randn(5).tolist()]


def test_the_same_numbers_are_drawn_after_a_commit_and_a_resume(tmp_path: Path) -> None:
    # Odd numbers of normal draws: generators keep the other one of the pair.
    random.gauss(0, 1), numpy.random.standard_normal(), torch.randn(1)
    write_manifest(tmp_path, manifest_of(), {"rng": collect_rng()})
    expected = [draw(), numpy.random.standard_normal()]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    found = read_extra(tmp_path, parse((tmp_path / f"manifest-{RUN}-7-rank0.json").read_bytes()))
    assert isinstance(found, dict)
    restore_rng(found["rng"])
    assert [draw(), numpy.random.standard_normal()] == expected


@pytest.mark.parametrize(
    "change",
    [
        {"python": 1},
        {"python": (3, (1, 2), None)},
        {"numpy": ("PCG64", 1)},
        {"torch": torch.zeros(3)},
        {"torch": None},
        {"torch": torch.zeros(5, dtype=torch.uint8)},
        {"more": 1},
    ],
    ids=str,
)
def test_something_else_is_refused_and_nothing_is_changed(change: dict[str, object]) -> None:
    state = {**collect_rng(), **change}
    random.random(), numpy.random.random(), torch.rand(1)
    before = collect_rng()
    with pytest.raises(ConfigError):
        restore_rng(state)
    expected = draw()
    restore_rng(before)
    assert draw() == expected
    with pytest.raises(ConfigError):
        restore_rng(None)


def test_a_state_of_more_gpus_than_there_are_is_refused() -> None:
    state = collect_rng()
    many = [torch.zeros(16, dtype=torch.uint8)] * (torch.accelerator.device_count() + 1)
    with pytest.raises(ResumeError, match="accelerators"):
        restore_rng({**state, "accelerator": many})


@pytest.mark.gpu
@pytest.mark.device
def test_the_same_numbers_are_drawn_on_an_accelerator() -> None:
    device = accelerator()
    torch.randn(1, device=device)
    state = collect_rng()
    expected = torch.randn(5, device=device).tolist()
    torch.manual_seed(1)
    restore_rng(state)
    assert torch.randn(5, device=device).tolist() == expected


def test_a_state_of_a_version_that_called_it_cuda_is_taken() -> None:
    state = collect_rng()
    expected = draw()
    state["cuda"] = state.pop("accelerator")
    restore_rng(state)
    assert draw() == expected
