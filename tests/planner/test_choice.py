"""What fits on the device and in RAM is chosen before training, and what is then there at once is what was computed."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import BudgetError, ConfigError, OffloadZero, Tuning
from offload.options import Options
from offload.planner.choice import ModelShape, choose, least_cpu_memory
from offload.planner.explain import plan_of
from offload.sizes import option_bytes, parse_bytes
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.streamed import finish
from tests.support.toy import Block, Checkpointed, Net, batch, squares

SMALL = Tuning(chunk="4KiB", threads=1)


def train(model: nn.Module, optimizer: OffloadZero, steps: int = 3) -> dict[str, Any]:
    for count in range(steps):
        squares(model, batch(count)).backward()
        finish(optimizer)
        with torch.no_grad():
            model(batch(count))
    return optimizer.stats()


UNITS = {"blocks": None, "nested": (Block, nn.Linear), "all": ()}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "saved", "reentrant"])
def test_the_device_holds_what_the_plan_said(
    reentrant: bool | None, prefetch: int, units: str, copied_by: CopiedBy, tmp_path: Path
) -> None:
    copied_by(lambda: LateCopier(1))
    model = Net(8) if reentrant is None else Checkpointed((2,) * 4, reentrant)
    model.blocks[0].up.requires_grad_(False)
    tuning = Tuning(chunk="4KiB", threads=1, prefetch_chunks=prefetch, prefetch_units=prefetch, units=UNITS[units])
    options: dict[str, Any] = {"path": tmp_path / "run", "param_tier": "nvme", "tuning": tuning}
    planned = plan_of(model, direct=False, **options).place().device_bytes
    with OffloadZero(model, **options) as optimizer:
        stats = train(model, optimizer)
    assert stats["peak_device_bytes"] <= planned <= stats["device_budget_bytes"]
    if units == "blocks" and reentrant is not None and prefetch == 0:
        # The root, the block whose backward runs and the one that is recomputed.
        assert stats["peak_device_bytes"] == planned
    assert stats["peak_device_bytes"] >= planned * 0.4


def test_resident_parameters_are_what_the_plan_said() -> None:
    model = Net(3)
    model.register_buffer("table", torch.zeros(100))
    model.embed.requires_grad_(False)
    planned = plan_of(model, direct=True, tuning=SMALL).place()
    with OffloadZero(model, tuning=SMALL) as optimizer:
        stats = train(model, optimizer, 1)
        assert stats["peak_device_bytes"] == planned.device_bytes
        frozen = 2 * sum(p.numel() for p in model.embed.parameters()) + 400
        flats = sum(flat.numel() * flat.element_size() for flat in optimizer._parts.parameters.flats)
        assert stats["peak_device_bytes"] == flats + frozen


@pytest.mark.parametrize("param_tier", ["device", "cpu", "nvme"])
def test_too_little_device_memory_is_refused_and_the_advice_works(param_tier: str, tmp_path: Path) -> None:
    model = Net(8)

    def take(memory: int) -> OffloadZero:
        options = {
            "path": tmp_path / "run",
            "param_tier": param_tier,
            "tuning": Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1),
        }
        return OffloadZero(model, device_memory=memory, **options)

    with pytest.raises(BudgetError, match=r"are needed on the device and device_memory allows 100") as caught:
        take(100)
    error = caught.value
    assert (error.available, error.option) == (100, "device_memory")
    assert f'give device_memory="{option_bytes(error.needed)}" or more' in str(error)
    assert ("param_tier" if param_tier == "device" else "smaller units are not enough") in str(error)
    with pytest.raises(BudgetError):
        take(error.needed - 1)
    assert model.embed.weight.dtype is torch.float32
    assert not (tmp_path / "run").exists()
    with take(error.needed) as optimizer:
        assert train(model, optimizer)["peak_device_bytes"] <= error.needed


def test_a_unit_that_cannot_fit_is_named_and_smaller_units_help() -> None:
    def take(**tuning: Any) -> None:
        model = Net(3)
        model.blocks[1].extra = nn.Linear(60, 50)
        OffloadZero(model, device_memory="10KiB", tuning=Tuning(chunk="4KiB", tile=0, **tuning)).close()

    with pytest.raises(BudgetError, match=r"Tuning\(units=...\): the largest, blocks.1, takes 7") as caught:
        take()
    assert caught.value.option == "device_memory"
    take(units=[nn.Linear])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 24 * 24))
        self.route = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.einsum("bi,eio,be->bo", x, self.up.view(8, 24, 24), self.route(x).softmax(-1))
        return out


def test_smaller_units_are_no_advice_where_one_parameter_is_too_large() -> None:
    model = nn.Sequential(*(Experts() for _ in range(3)))
    experts = 2 * 8 * 24 * 24
    with pytest.raises(BudgetError, match=r"smaller units are not enough: 0 takes 9 KiB at once") as caught:
        OffloadZero(model, param_tier="cpu", device_memory=experts // 2, tuning=SMALL)
    assert "units=" not in str(caught.value)
    assert "only weights of nn.Linear, nn.Embedding and with 3 dimensions run in tiles" in str(caught.value)
    with OffloadZero(model, param_tier="cpu", device_memory=caught.value.needed, tuning=SMALL) as optimizer:
        assert optimizer.stats()["param_tier"] == "cpu"


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("param_tier", [None, "cpu", "nvme"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", [Experts, lambda: nn.Linear(64, 48)], ids=["experts", "linear"])
@pytest.mark.parametrize("direct", [True, False], ids=["on the CPU", "on a device"])
def test_what_a_refusal_says_is_enough_when_it_is_followed_once(
    tier: str, param_tier: str | None, frozen: bool, kind: Any, direct: bool
) -> None:
    tiers = ["device", "cpu", "nvme"]
    if not frozen and param_tier is not None and tiers.index(param_tier) > tiers.index(tier):
        pytest.skip("parameters on a slower tier than their states")
    model = nn.Sequential(nn.Embedding(64, 24), nn.Sequential(*(kind() for _ in range(3))), nn.Linear(24, 256))
    if frozen:
        model[:2].requires_grad_(False)
    path = {"path": "."} if "nvme" in (tier, param_tier) else {}

    def refusal(**options: Any) -> BudgetError | None:
        tuning = Tuning(chunk="256KiB")
        given = Options(tier=tier, param_tier=param_tier, commit_every=None, tuning=tuning, **path, **options)
        groups = [{"params": [param for param in model.parameters() if param.requires_grad]}]
        shape = ModelShape.of(model, groups, given)
        try:
            choose(given, shape.situation(), shape.layout, direct=direct, room=shape.room(given))
        except BudgetError as error:
            return error
        return None

    for device_memory, cpu_memory in product((1, 20_000, "1GiB"), (1, 200_000, "1GiB")):
        given = {"device_memory": device_memory, "cpu_memory": cpu_memory}
        error = refusal(**given)
        if error is not None:
            advised = dict(re.findall(r'give (\w+)="([\w.]+)" or more', str(error)))
            assert error.needed <= parse_bytes(advised[error.option], error.option) <= 1.001 * error.needed
            assert refusal(**{**given, **advised}) is None, error


def test_more_than_the_machine_has_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planner.placement.free_memory", lambda: 1000)
    for options in ({}, {"cpu_memory": 1}, {"cpu_memory": "1GiB"}):
        with pytest.raises(BudgetError, match=r'are needed and 1000 B are free: .*tier="nvme"') as caught:
            OffloadZero(Net(3), tuning=SMALL, **options)
        assert caught.value.option == "cpu_memory"
        assert "give cpu_memory" not in str(caught.value)


def test_a_unit_is_fetched_ahead_where_copies_run_beside_the_compute() -> None:
    """On a device, if there is room for it; a CPU would wait for it at once."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    tuning, unit = Tuning(chunk="256KiB", threads=1, tile=0), 2 * 256 * 256

    def ahead(*, direct: bool, given: Tuning = tuning, **options: Any) -> int:
        found = plan_of(model, direct=direct, path=".", param_tier="cpu", tuning=given, **options)
        return found.choice.params.prefetch_units

    enough = plan_of(model, direct=False, path=".", param_tier="cpu", tuning=tuning).place().device_bytes
    assert ahead(direct=False, device_memory=enough) == 1
    assert ahead(direct=False, device_memory=enough - unit) == 0
    assert ahead(direct=True) == 0
    assert ahead(direct=True, given=replace(tuning, prefetch_units=1)) == 1
    assert ahead(direct=True, stage=3, ranks=2) == 1  # what other ranks have comes beside it


def test_the_fastest_tiers_that_fit_are_chosen(tmp_path: Path) -> None:
    numbers = iter(range(100))

    def chosen(**options: Any) -> tuple[str, str, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        options = {"path": tmp_path / str(next(numbers)), "tuning": Tuning(chunk="256KiB", threads=1, tile=0)} | options
        with OffloadZero(model, **options) as optimizer:
            stats = optimizer.stats()
            assert stats["peak_cpu_bytes"] <= stats["cpu_budget_bytes"]
            return stats["param_tier"], stats["grad_tier"], optimizer._choice.params.prefetch_units

    unit = 2 * 256 * 256
    assert chosen() == chosen(device_memory=16 * unit) == ("device", "cpu", 1)
    assert chosen(device_memory=16 * unit - 1) == ("cpu", "cpu", 0)
    assert chosen(device_memory=2 * unit) == ("cpu", "cpu", 0)
    assert chosen(device_memory=2 * unit, param_tier="nvme") == ("nvme", "cpu", 0)
    small: dict[str, Any] = {"cpu_memory": (16 + 3 * 6 + 6) * unit}
    assert chosen(**small) == ("device", "cpu", 1)  # gradients and buffers, and no room for parameters
    assert chosen(**small, device_memory=3 * unit)[:2] == ("cpu", "nvme")
    assert chosen(cpu_memory=(3 * 6 + 6) * unit)[:2] == ("device", "nvme")
    assert (
        chosen(
            **small,
            device_memory=3 * unit,
            grad_tier="cpu",
            tuning=Tuning(chunk="256KiB", prefetch_chunks=0, prefetch_units=0),
        )[0]
        == "nvme"
    )
    with pytest.raises(BudgetError) as caught:
        chosen(device_memory=2 * unit - 1)
    assert (caught.value.needed, caught.value.option) == (2 * unit, "device_memory")
    with pytest.raises(BudgetError) as caught:
        chosen(cpu_memory=unit)
    assert caught.value.option == "cpu_memory"
    with pytest.raises(BudgetError):
        chosen(device_memory=16 * unit - 1, param_tier="device")


@pytest.mark.parametrize("param_tier", [None, "cpu"])
def test_gradients_of_few_trained_parameters_cannot_go_to_nvme_from_a_device(param_tier: str | None) -> None:
    """No other tier is possible for these parameters, whether one is given or not."""
    model = nn.Sequential(nn.Linear(256, 256).requires_grad_(False), nn.Linear(256, 4))
    given = Options(tier="nvme", path=".", param_tier=param_tier, grad_tier="nvme")
    shape = ModelShape.of(model, [{"params": list(model[1].parameters())}], given)
    about = {"room": shape.room(given)}
    assert choose(given, shape.situation(), shape.layout, direct=True, **about)
    with pytest.raises(ConfigError, match=r"few beside the frozen ones: leave grad_tier out"):
        choose(given, shape.situation(), shape.layout, direct=False, **about)


def test_what_was_chosen_is_printed_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Net(8)
    options: dict[str, Any] = {"path": tmp_path / "run", "device_memory": 6000, "tuning": SMALL}
    peak = plan_of(model, direct=True, **options).place().device_bytes
    with OffloadZero(model, **options) as optimizer:
        train(model, optimizer)
        printed = capsys.readouterr().err
    assert printed.count("offload:") == 1
    assert "parameters in bf16 (given in fp32), streamed from RAM; peak on the device" in printed
    there = f"{peak / 1024:.4g} KiB of 5.859 KiB allowed (on a CPU what stays there saves nothing)"
    assert f"; peak on the device {there}; peak RAM" in printed


@pytest.mark.parametrize(
    ("options", "states", "moved"),
    [
        ({}, "optimizer states stay in RAM", "nothing moves in a step"),
        ({"tier": "cpu"}, "optimizer states stay in RAM", "nothing moves in a step"),
        ({"tier": "device"}, "optimizer states stay on the device", "nothing moves in a step"),
        ({"cpu_memory": "least", "tuning": SMALL}, "chunks of optimizer states stream from NVMe", "read and"),
        ({"param_tier": "nvme"}, "optimizer states stay in RAM", "read and"),
    ],
    ids=["enough RAM", "cpu", "device", "little RAM", "parameters stream"],
)
@pytest.mark.parametrize("every", [None, 7])
def test_the_line_says_where_states_are_and_what_moves(
    options: dict[str, Any],
    states: str,
    moved: str,
    every: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Net(8)
    has_files = every is not None or options.get("tier", "nvme") == "nvme"
    given = {"commit_every": every, "path": tmp_path / "run" if has_files else None, **options}
    if given.get("cpu_memory") == "least":
        given["cpu_memory"] = least_cpu_memory(model, commit_every=every, tuning=SMALL)
    with OffloadZero(model, **given) as optimizer:
        train(model, optimizer)
        train(model, optimizer)
        optimizer.synchronize()
        stats = optimizer.stats()
    line = capsys.readouterr().err
    assert f"parameters in bf16 (given in fp32){', streamed from NVMe' if 'param_tier' in options else ''}; " in line
    assert states in line
    assert (moved in line) is has_files
    assert (stats["nvme_read_bytes"] > 0) is (has_files and moved == "read and")
    assert ("a commit every 7 steps" in line) is (every is not None)
    assert ("nothing is committed" in line) is (has_files and every is None)


@pytest.mark.parametrize("tuning", [SMALL, replace(SMALL, split_master=True)], ids=["whole", "split"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tier": "cpu", "param_tier": "cpu"},
        {"tier": "device"},
        {"cpu_memory": "least", "param_tier": "device", "grad_tier": "cpu"},
        {"cpu_memory": "some", "param_tier": "device", "grad_tier": "cpu"},
        {"cpu_memory": "some", "param_tier": "nvme"},
    ],
    ids=["RAM", "parameters in RAM", "device", "NVMe", "partly", "parameters on NVMe"],
)
def test_the_wear_that_is_said_is_what_steps_and_their_commits_write(
    options: dict[str, Any], tuning: Tuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if tuning.split_master and options.get("tier") == "device":
        pytest.skip("refused")
    model = Net(8)
    given: dict[str, Any] = {"commit_every": 1, "path": tmp_path / "run", "tuning": tuning, **options}
    if memory := given.pop("cpu_memory", None):
        free = {name: value for name, value in given.items() if name != "path"}
        given["cpu_memory"] = least_cpu_memory(model, **free) + (40_000 if memory == "some" else 0)
    placement = plan_of(model, direct=True, **given).place()
    stay = len(placement.states.resident), len(placement.states.on_device)
    assert (sum(stay) == 0) is (memory == "least")
    assert (placement.commit_bytes == 0) is (memory == "least" and not tuning.split_master)
    assert bool(placement.states.streamed) is (memory is not None)
    with OffloadZero(model, **given) as optimizer:
        line = capsys.readouterr().err
        train(model, optimizer, 1)
        optimizer.synchronize()
        before = optimizer.stats()["nvme_written_bytes"]
        train(model, optimizer, 4)
        optimizer.synchronize()
        written = optimizer.stats()["nvme_written_bytes"] - before
    assert written == 4 * placement.worn_bytes
    assert "a commit after each step, so a drive warranted for 600 TB lasts over a billion steps" in line


def test_the_life_of_drives_is_in_the_line_where_something_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.planner.placement.TYPICAL_TBW", 3e12)

    def line(**options: Any) -> str:
        given = {"path": tmp_path / "run", "tuning": SMALL, **options}
        OffloadZero(Net(8), **given).close()
        return capsys.readouterr().err

    def worn(every: int) -> float:
        return plan_of(Net(8), direct=True, path=tmp_path / "run", tuning=SMALL, commit_every=every).place().worn_bytes

    assert worn(100) == worn(1) / 100
    one, two = tmp_path / "one", tmp_path / "two"
    assert f"so a drive warranted for 3 TB lasts {3e12 / worn(1):,.0f} steps" in line(commit_every=1)
    assert f"so drives warranted for 3 TB together last {3e12 / worn(1):,.0f} steps" in line(
        commit_every=1, path=[one, two]
    )
    assert line(commit_every=1, activation_tier="nvme").count(" steps (activations not counted)") == 1
    for nothing in ({"commit_every": 0}, {"tier": "cpu", "path": None}, {"commit_every": None}):
        assert "warranted" not in line(**nothing)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.bfloat16, "parameters in bf16;"),
        (torch.float32, "parameters in bf16 (given in fp32);"),
        (torch.float16, "parameters in bf16 (given in fp16, whose values fp32 masters begin with);"),
    ],
)
def test_the_line_says_what_the_model_was_given_in(
    dtype: torch.dtype, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    OffloadZero(Net(8).to(dtype)).close()
    assert words in capsys.readouterr().err


def test_the_line_of_a_resumed_run_says_from_when_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"path": tmp_path / "run", "commit_every": 1}
    with OffloadZero(model := Net(8), **given) as optimizer:
        train(model, optimizer)
    steps, record = optimizer._step, tmp_path / "run" / "COMMIT"
    OffloadZero(Net(8), resume=True, **given).close()
    today = datetime.fromtimestamp(record.stat().st_mtime)
    assert f"offload: resumed at step {steps}, committed {today:%H:%M}\n" in capsys.readouterr().err
    os.utime(record, (0, 86_400))
    OffloadZero(Net(8), resume="auto", **given).close()
    assert f"committed {datetime.fromtimestamp(86_400):%Y-%m-%d %H:%M}\n" in capsys.readouterr().err


def _calls_of_a_refusal(tile: str) -> int:
    """How many functions are called to say that a device of one byte is too small for tiles of so many bytes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    model = nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(2)))
    sys.setprofile(count)
    try:
        found = plan_of(model, direct=False, param_tier="cpu", device_memory=1, tuning=Tuning(tile=tile))
    finally:
        sys.setprofile(None)
    assert found.refusal is not None
    return calls


def test_four_times_as_many_tiles_are_about_four_times_the_work() -> None:
    few, many = (_calls_of_a_refusal(tile) for tile in ("64KiB", "16KiB"))
    assert many > 2 * few  # else tiles are not what is counted
    assert many < 5 * few


@pytest.mark.parametrize("tile", [pytest.param(0, marks=pytest.mark.slow), None])
def test_whatever_the_device_has_it_is_enough_or_refused(tile: int | None) -> None:
    """Units that are single modules cannot be made smaller, and have gaps between their parameters."""
    refused: list[tuple[int, BudgetError]] = []
    for memory in range(32, 700, 4):
        model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(6)))
        try:
            OffloadZero(model, param_tier="cpu", device_memory=memory, tuning=Tuning(tile=tile)).close()
        except BudgetError as error:
            refused.append((memory, error))
    assert 0 < len(refused) < 167
    assert all(error.available == memory < error.needed for memory, error in refused)


def test_a_wrong_size_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="device_memory='lots'"):
        OffloadZero(Net(), device_memory="lots")


def test_the_least_memory_takes_the_options_of_the_run_and_is_just_enough_for_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"param_tier": "nvme", "grad_tier": "nvme", "accumulation": 2, "keep_fp32": [nn.Linear]}
    options |= {"tuning": Tuning(chunk="256KiB", threads=1), "commit_every": None}
    least = least_cpu_memory(Net(), **options)
    OffloadZero(Net(), tier="nvme", path=tmp_path / "run", cpu_memory=least, **options).close()
    with pytest.raises(BudgetError):
        OffloadZero(Net(), tier="nvme", path=tmp_path / "run", cpu_memory=least - 1, **options)


@pytest.mark.parametrize(
    ("option", "value"), [("tier", "cpu"), ("path", "run"), ("acumulation", 2), ("stage", 4), ("lr", 0.1)]
)
def test_the_least_memory_refuses_what_it_does_not_mean(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{option}="):
        least_cpu_memory(Net(), **{option: value})  # type: ignore[arg-type]
