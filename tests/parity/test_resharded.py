"""Promise 1, in another layout: what is resumed in other chunks, directories, tiers or orders has the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.checkpoint.manifest import committed_slots
from offload.checkpoint.reader import Reader
from offload.io.engine import IOFuture
from offload.planner import least_cpu_memory
from offload.storage.swap_file import SlotFile
from tests.faults.conftest import assert_same, bits
from tests.parity.test_resumed import HALF, assert_goes_on, commit_at, resume, uninterrupted
from tests.support.run_files import contents, kinds_in, swaps_in
from tests.support.toy import take_step
from tests.support.training import train


def in_chunks(size: str, **more: Any) -> Tuning:
    return Tuning(chunk=size, threads=1, **more)


# On a model whose layout can be another one while its names are the same.


class Named(nn.Module):
    """Layers of several sizes, one of them channels last, in any order."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        made: dict[str, nn.Module] = {
            "wide": nn.Linear(33, 130),
            "norm": nn.LayerNorm(130),
            "conv": nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last),
            "tall": nn.Linear(130, 41, bias=False),
            "one": nn.Linear(41, 1),
        }
        for name in order:
            setattr(self, name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(self.tall(self.norm(self.wide(x)))) + self.conv(x.new_ones(1, 3, 9, 9)).mean()
        return out


ORDER = ["wide", "norm", "conv", "tall", "one"]


def some_step(model: nn.Module, optimizer: OffloadZero, seed: int) -> None:
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    if seed % 2:
        model.norm.weight.grad = model.norm.bias.grad = None  # ages of their own
    take_step(optimizer)


def committed(folder: Path, steps: int = 3, order: list[str] = ORDER, **options: Any) -> dict[str, Tensor]:
    """Trains, commits, goes on for a step; the bits at the commit."""
    model = Named(order)
    given = {"path": folder / "a", "commit_every": 0, "tuning": in_chunks("4KiB")} | options
    with OffloadZero(model, **given) as optimizer:
        for step in range(steps):
            some_step(model, optimizer, step)
        optimizer.commit({"seen": steps})
        found = bits(model, optimizer)
        some_step(model, optimizer, steps)
        optimizer.synchronize()
    return found


def part_of(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: found[name] for name in expected}


def resumed(model: nn.Module, **options: Any) -> OffloadZero:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    optimizer = OffloadZero(model, **({"resume": True, "commit_every": 0} | options))
    assert optimizer.resumed == (3, {"seen": 3})
    return optimizer


@pytest.mark.parametrize("order", [ORDER, ORDER[::-1], ["conv", "one", "wide", "tall", "norm"]], ids=str)
@pytest.mark.parametrize("chunk", ["4KiB", "12KiB"])
def test_parameters_may_be_in_another_order(tmp_path: Path, order: list[str], chunk: str) -> None:
    """With so little RAM that a chunk may have to go to the disk before all of it has come."""
    expected = committed(tmp_path)
    model = Named(order)
    least = least_cpu_memory(model, tuning=in_chunks(chunk))
    options = {"path": tmp_path / "a", "tuning": in_chunks(chunk), "cpu_memory": least + 2 * 4 * 4096}
    for number in range(2):  # then where it lies
        with resumed(model if not number else Named(order), **options) as optimizer:
            assert_same(expected, part_of(expected, bits(optimizer._model, optimizer)))


def test_units_may_be_cut_otherwise(tmp_path: Path) -> None:
    expected = committed(tmp_path)
    model = Named(ORDER)
    tuning = Tuning(chunk="4KiB", units=("wide", "tall"))
    with resumed(model, path=tmp_path / "a", tuning=tuning) as optimizer:
        assert {spec.unit for spec in optimizer._layout.specs} == {"", "wide", "tall"}
        assert_same(expected, part_of(expected, bits(model, optimizer)))


CHANGES: dict[str, dict[str, Any]] = {
    "smaller chunks": {"tuning": in_chunks("4KiB"), "cpu_memory": "least"},
    "larger chunks": {"tuning": in_chunks("28KiB")},
    "one chunk": {"tuning": in_chunks("64MiB"), "cpu_memory": "least"},
    "more directories": {"path": ["b", "a", "c"]},
    "another directory": {"path": ["b"], "resume": ["a"]},
    "states in RAM": {"path": None, "tier": "cpu", "resume": ["a"], "commit_every": None},
    "without commits": {"commit_every": None, "cpu_memory": "least"},
    "parameters on disk": {"tuning": in_chunks("12KiB"), "param_tier": "nvme", "cpu_memory": "least"},
    "parameters in RAM": {"tuning": in_chunks("12KiB"), "param_tier": "cpu"},
    "split masters": {"tuning": in_chunks("4KiB", split_master=True), "cpu_memory": "least"},
    "split masters, parameters on disk": {
        "tuning": in_chunks("12KiB", split_master=True),
        "param_tier": "nvme",
        "cpu_memory": "least",
    },
    "gradients on disk": {"tuning": in_chunks("256KiB"), "grad_tier": "nvme"},
}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_resumed_in_another_layout_has_the_bits_of_one_that_never_stopped(
    change: str, split: bool, tmp_path: Path
) -> None:
    expected = committed(tmp_path, tuning=in_chunks("8KiB", split_master=split))
    whole, other = Named(ORDER), Named(ORDER)
    options: dict[str, Any] = {"path": ["a"], "commit_every": 0, "tuning": in_chunks("8KiB")} | CHANGES[change]
    for name in ("path", "resume"):
        if isinstance(options.get(name), list):
            options[name] = [tmp_path / directory for directory in options[name]]
    if options.get("cpu_memory") == "least":
        given = {name: options.get(name) for name in ("tuning", "param_tier", "commit_every")}
        with Reader([tmp_path / "a"]) as reader:
            options["cpu_memory"] = least_cpu_memory(other, **given) + reader.slots_bytes()
    with OffloadZero(whole) as alone, resumed(other, **options) as optimizer:
        assert_same(expected, part_of(expected, bits(other, optimizer)))
        for step in range(3):
            some_step(whole, alone, step)
        for step in range(3, 6):
            some_step(whole, alone, step)
            some_step(other, optimizer, step)
        assert_same(bits(whole, alone), bits(other, optimizer))


def test_a_whole_training_goes_on_in_another_layout(tmp_path: Path) -> None:
    """With two param groups, a scheduler, clipping and accumulation."""
    options: dict[str, Any] = {"path": tmp_path / "run", "commit_every": 0, "tuning": in_chunks("8KiB")}
    train("gpt", steps=HALF + 1, accumulation=2, each_step=partial(commit_at, HALF), **options)
    second = resume("gpt", 2, **options | {"tuning": in_chunks("4KiB"), "cpu_memory": "1MiB"})
    assert_goes_on(second, uninterrupted("gpt", 2), 2)


def test_directories_named_in_another_order_are_used_where_they_lie(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    expected = committed(tmp_path, path=places)
    run_id = Reader(places).commit.run_id
    for order in ([places[2], places[0], places[1]], places[::-1]):
        model = Named(ORDER)
        with resumed(model, path=order, tuning=in_chunks("4KiB")) as optimizer:
            assert_same(expected, bits(model, optimizer))
        assert Reader(places).commit.run_id == run_id


def test_directories_that_are_used_no_more_are_left_empty_and_the_run_goes_on(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    expected = committed(tmp_path, path=places)
    for path in ([places[1], places[2]], [places[2]], places):
        model = Named(ORDER)
        with resumed(model, path=path, resume=places, tuning=in_chunks("8KiB")) as optimizer:
            assert_same(expected, bits(model, optimizer))
        used = {file.parent for place in places for file in place.iterdir()}
        assert used == set(path)
    assert [kinds_in(place) for place in places].count({"manifest", "swap", "tag"}) == 2
    assert [kinds_in(place) for place in places].count({"manifest", "swap", "tag", "COMMIT"}) == 1
    assert [len(swaps_in(place)) for place in places] == [1, 1, 1]


@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]], ids=["as it was", "reversed"])
def test_every_committed_byte_is_read_once(tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path)
    with Reader([tmp_path / "a"]) as reader:
        slots = sum(slot.size for slot in committed_slots(reader.manifests[0]))
    read: list[int] = []
    real = SlotFile.read

    def counted(file: SlotFile, chunk: int, data: memoryview, **version: Any) -> IOFuture:
        read.append(len(data))
        return real(file, chunk, data, **version)

    monkeypatch.setattr(SlotFile, "read", counted)
    with resumed(Named(order), path=tmp_path / "a", tuning=in_chunks("8KiB")) as optimizer:
        assert sum(read) == slots
        assert optimizer.stats()["nvme_read_bytes"] == 0


def test_without_commits_the_old_commit_stays_and_nothing_else(tmp_path: Path) -> None:
    expected = committed(tmp_path)
    before = contents(tmp_path / "a")
    for _ in range(2):
        model = Named(ORDER)
        with resumed(model, path=tmp_path / "a", commit_every=None, tuning=in_chunks("4KiB")) as optimizer:
            assert_same(expected, bits(model, optimizer))
            some_step(model, optimizer, 3)
            optimizer.synchronize()
            assert len(swaps_in(tmp_path / "a")) == 2
        assert contents(tmp_path / "a") == before
