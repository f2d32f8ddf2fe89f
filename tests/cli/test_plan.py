"""`offload plan`: the figures are those of a run with the same options, and nothing is allocated for them."""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner, Result

from offload import BudgetError, OffloadZero, Tuning, tiers
from offload.cli import plan_models, plan_updates
from offload.cli.main import app
from offload.cli.plan import SHARES
from offload.demo.gpt import GPT, PRESETS, Block, GPTConfig
from offload.devices.copies import accelerator
from offload.io.select import Settings
from offload.optim.flops import newton_schulz_flops
from offload.planner import least_cpu_memory
from offload.planner.explain import Planned, bytes_per_param, explain, plan_of
from offload.planner.placement import IN_FLIGHT
from offload.sizes import GIB, KIB, MIB, format_bytes, option_bytes
from tests.support.command import printed
from tests.support.processes import ROOT
from tests.support.run_files import reserved_in

DEVICE = accelerator() or torch.device("cpu")


NAMED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop-centered": partial(torch.optim.RMSprop, centered=True),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "adafactor": torch.optim.Adafactor,
}


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--preset", "1m", *options])


def run_json(*options: str) -> dict[str, Any]:
    return printed(run("--json", *options))


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    for module in ("machine", "placement"):
        monkeypatch.setattr(f"offload.planner.{module}.free_memory", lambda: free)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk": "256KiB"},
        {"chunk": "256KiB", "cpu_memory": "8MiB"},
        {"chunk": "256KiB", "accumulation": 2},
        {"tier": "cpu"},
        {"tier": "cpu", "accumulation": 3},
        {"chunk": "256KiB", "accumulation": "auto"},
        {"tier": "device", "accumulation": 2},
        {"chunk": "256KiB", "split_master": True},
        {"chunk": "256KiB", "split_master": True, "accumulation": 2, "cpu_memory": "9MiB"},
        {"chunk": "256KiB", "commit_every": 50},
        {"chunk": "256KiB", "commit_every": 50, "split_master": True},
        {"chunk": "256KiB", "dtype": "fp32"},
        {"chunk": "256KiB", "states": "bf16", "cpu_memory": "8MiB"},
        {"chunk": "256KiB", "states": "8bit", "split_master": True, "commit_every": 50},
        {"tier": "cpu", "states": "8bit"},
        {"chunk": "256KiB", "speculate": True},
        {"chunk": "256KiB", "speculate": True, "commit_every": 50, "cpu_memory": "9MiB"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()) or "defaults",
)
def test_peak_and_disk_are_those_of_a_run_with_the_same_options(options: dict[str, Any], tmp_path: Path) -> None:
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    words += [] if "commit_every" in options else ["--no-commits"]
    if options.get("tier", "nvme") == "nvme" and "cpu_memory" not in options:
        words += ["--cpu-memory", "least"]
    planned = run_json(*words)
    model = GPT(PRESETS["1m"]).to(DEVICE)
    tier, accumulation = options.get("tier", "nvme"), options.get("accumulation", 1)
    tuning = Tuning(
        chunk=options.get("chunk", "64MiB"),
        split_master=options.get("split_master"),
        speculate=options.get("speculate", False),
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.get("dtype", "bf16")]
    given = {
        "accumulation": accumulation, "commit_every": options.get("commit_every"), "compute_dtype": dtype,
        "tuning": tuning, "states": options.get("states", "fp32"),
    }  # fmt: skip
    memory = options.get("cpu_memory")
    if tier == "nvme" and memory is None:
        memory = least_cpu_memory(model, **given)
    path = tmp_path / "swap" if tier == "nvme" else None
    with OffloadZero(model, tier=tier, path=path, cpu_memory=memory, **given) as optimizer:
        stats = optimizer.stats()
        files = 0 if path is None else reserved_in(path)
    assert planned["peak_cpu_bytes"] == stats["peak_cpu_bytes"]
    assert tier != "device" or planned["device_bytes"] == stats["peak_device_bytes"] > 16 * stats["parameters"]
    assert planned["disk_bytes"] == files
    assert planned["chunks"] - planned["kept_chunks"] == stats["streamed_chunks"]
    assert planned["parameters"] == stats["parameters"]
    if tier == "nvme":
        assert planned["cpu_budget_bytes"] == stats["cpu_budget_bytes"]


@pytest.mark.parametrize("tier", ["cpu", "nvme", "device"])
@pytest.mark.parametrize("name", NAMED)
def test_totals_of_an_optimizer_are_those_of_a_run_with_it(name: str, tier: str, tmp_path: Path) -> None:
    least = ["--cpu-memory", "least"] if tier == "nvme" else []
    planned = run_json("--optimizer", name, "--tier", tier, "--no-commits", "--chunk", "256KiB", *least)
    model = GPT(PRESETS["1m"]).to(DEVICE)
    optimizer, tuning = NAMED[name](model.parameters()), Tuning(chunk="256KiB")
    given: dict[str, Any] = {"tuning": tuning, "commit_every": None}
    memory = least_cpu_memory(model, optimizer, **given) if tier == "nvme" else None
    path = tmp_path / "swap" if tier == "nvme" else None
    with OffloadZero(model, optimizer, tier=tier, path=path, cpu_memory=memory, **given) as held:
        stats = held.stats()
        files = 0 if path is None else reserved_in(path)
    assert planned["peak_cpu_bytes"] == stats["peak_cpu_bytes"]
    assert tier != "device" or planned["device_bytes"] == stats["peak_device_bytes"]
    assert planned["disk_bytes"] == files
    assert planned["chunks"] - planned["kept_chunks"] == stats["streamed_chunks"]


def test_bytes_of_sgd_are_those_counted_by_hand() -> None:
    """Of preset 1m, 985,344 parameters: masters alone, and a momentum of as many bytes; each is read and written."""
    for name, arrays in (("sgd", ["master"]), ("sgd-momentum", ["master", "momentum_buffer"])):
        given = ("--optimizer", name, "--no-commits")
        in_ram = run_json(*given, "--tier", "cpu")
        rows = {row["kind"]: row["nbytes"] for row in in_ram["rows"] if row["tier"] == "cpu"}
        assert {kind: rows[kind] for kind in rows if kind not in ("grad", "rest")} == dict.fromkeys(arrays, 4 * 985_344)
        streamed = run_json(*given, "--cpu-memory", "least", "--chunk", "64KiB")
        assert streamed["bytes_per_param"] == pytest.approx(8 * len(arrays), rel=0.15)  # the last chunks stay in RAM
        assert streamed["bytes_per_param"] < 8 * len(arrays) * 1.15
        assert "momentum_buffer: states of sgd-momentum" in run("--optimizer", "sgd-momentum").stdout


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_muon_is_planned_for_the_matrices_of_blocks_and_adamw_for_all_else(tier: str, tmp_path: Path) -> None:
    least = ["--cpu-memory", "least"] if tier == "nvme" else []
    planned = run_json("--optimizer", "muon", "--tier", tier, "--no-commits", "--chunk", "256KiB", *least)
    model = GPT(PRESETS["1m"]).to(DEVICE)
    matrices = [param for name, param in model.named_parameters() if name.startswith("blocks.") and param.dim() == 2]
    others = [param for param in model.parameters() if all(param is not one for one in matrices)]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    given: dict[str, Any] = {"tuning": Tuning(chunk="256KiB"), "commit_every": None}
    memory = least_cpu_memory(model, optimizers, **given) if tier == "nvme" else None
    path = tmp_path / "swap" if tier == "nvme" else None
    with OffloadZero(model, optimizers, tier=tier, path=path, cpu_memory=memory, **given) as held:
        stats = held.stats()
    assert planned["peak_cpu_bytes"] == stats["peak_cpu_bytes"]
    assert planned["chunks"] - planned["kept_chunks"] == stats["streamed_chunks"]
    if tier == "cpu":
        rows = {row["kind"]: row["nbytes"] for row in planned["rows"] if row["tier"] == "cpu"}
        assert rows["momentum_buffer"] == 4 * sum(one.numel() for one in matrices)
        assert rows["exp_avg"] == rows["exp_avg_sq"] == 4 * sum(one.numel() for one in others)


@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (64, 64)])
def test_operations_of_muon_are_those_that_torch_counts(shape: tuple[int, int]) -> None:
    param = torch.nn.Parameter(torch.randn(shape))
    param.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([param]).step()
    assert newton_schulz_flops(shape) == counter.get_total_flops()


def test_time_of_muon_is_that_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(PRESETS["1m"])
    matrices = [param for name, param in model.named_parameters() if name.startswith("blocks.") and param.dim() == 2]
    flops = sum(newton_schulz_flops(param.shape) for param in matrices)
    numel = sum(param.numel() for param in matrices)
    if DEVICE.type == "cpu":
        shapes = Counter(tuple(param.shape) for param in matrices)
        taken = {shape: newton_schulz_flops(shape) / (2.0 * flops) for shape in shapes}
        monkeypatch.setattr(plan_updates, "_seconds_of", lambda rule, group, shape: taken[shape])
        here = run_json("--optimizer", "muon", "--tier", "cpu")
        assert (here["update_flops"], here["update_seconds"], here["update_link_bytes"]) == (flops, 0.5, 0)
        assert "muon steps matrices on the CPU, in about 0.5 s of a step" in " ".join(
            run("--optimizer", "muon").stdout.split()
        )
    there = run_json("--optimizer", "muon", "--gpu", "--flops", str(flops / 3))
    # Master and momentum both ways, and a gradient of bf16.
    assert (there["update_seconds"], there["update_link_bytes"]) == (pytest.approx(3), 18 * numel)
    slow = run_json("--optimizer", "muon", "--gpu", "--flops", "9e20")
    assert slow["update_seconds"] == 10 * numel / 25e9
    assert "update_flops" not in run_json("--optimizer", "sgd")


def test_a_small_matrix_is_measured_and_a_large_one_has_the_rate_of_the_largest_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped: list[tuple[int, ...]] = []
    original = torch.optim.Muon.step

    def noted(self: torch.optim.Optimizer, closure: Any = None) -> None:
        stepped.extend(tuple(param.shape) for param in self.param_groups[0]["params"])
        original(self, closure)

    monkeypatch.setattr(torch.optim.Muon, "step", noted)
    monkeypatch.setattr(plan_updates, "MEASURED", (64, 64))
    monkeypatch.setattr(plan_updates, "MEASURED_S", 0.0)
    clock = itertools.count()
    monkeypatch.setattr(plan_updates.time, "perf_counter", lambda: float(next(clock)))  # each step takes a second
    found = plan_updates.measured_seconds("muon", {(64, 32): 5, (64, 64): 1, (160, 64): 3, (200, 200): 2})
    ratios = [newton_schulz_flops(shape) / newton_schulz_flops((64, 64)) for shape in ((160, 64), (200, 200))]
    assert found == pytest.approx(5 + 1 + 3 * ratios[0] + 2 * ratios[1])
    assert {(64, 32), (64, 64)} <= set(stepped)
    assert not {(160, 64), (200, 200)} & set(stepped)


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_masters_of_fp32_are_not_split(optimizer: str, tmp_path: Path) -> None:
    """A run takes the option, and does nothing with it: so no figure of the plan has it, a machine's rates included."""
    options = ("--dtype", "fp32", "--optimizer", optimizer)
    machine = """
name = "one that steps split masters faster"
ram = { value = "64GiB", source = "made up" }
memory = { value = 1e10, source = "made up" }
products = { fp32 = { value = 1e12, source = "made up" } }
steps = { "adamw, fp32, split" = { value = 1e12, source = "made up" } }
drives = [{ name = "a", read = { value = 1e9, source = "made up" }, write = { value = 1e9, source = "made up" } }]
"""
    (tmp_path / "machine.toml").write_text(machine)
    options += ("--machine", str(tmp_path / "machine.toml"))
    assert run_json(*options, "--split-master") == run_json(*options)
    model, split = GPT(GPTConfig(layers=1, heads=1, width=16, context=16)), Tuning(split_master=True)
    given = NAMED.get(optimizer, torch.optim.RMSprop)(model.parameters())
    OffloadZero(model, given, tier="cpu", compute_dtype=torch.float32, tuning=split, device="cpu").close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("split_master", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("param_tier", [None, "cpu", "nvme"])
@pytest.mark.parametrize("commit_every", [None, 0])
def test_rows_of_a_tier_add_up_to_what_is_placed_there(
    direct: bool,
    accumulation: int,
    split_master: bool,
    share: float,
    param_tier: str | None,
    commit_every: int | None,
) -> None:
    options: dict[str, Any] = {"param_tier": param_tier, "commit_every": commit_every, "path": "."}
    planned = planned_of(direct, accumulation=accumulation, split_master=split_master, **options)
    planned = planned.with_memory(planned.cpu_memory_for(share))
    placed = planned.place()
    rows = explain(placed)
    totals = {"device": placed.device_bytes, "cpu": placed.arena_bytes, "nvme": placed.disk_bytes}
    assert {tier: sum(row.nbytes for row in rows if row.tier.name == tier) for tier in totals} == totals
    assert all(row.nbytes > 0 for row in rows)
    assert sum(row.nbytes for row in rows if row.kind == "rest") < 512 * KIB
    n = planned.layout.numel
    masters = sum(row.nbytes for row in rows if row.kind == "master")
    moments = [sum(row.nbytes for row in rows if row.kind == kind) for kind in ("exp_avg", "exp_avg_sq")]
    assert {row.tier.name for row in rows if row.kind == "param"} == {"device", param_tier or "device"}
    assert masters == pytest.approx((2 if split_master else 4) * n, rel=0.01)
    assert moments == pytest.approx([4 * n, 4 * n], rel=0.01)
    assert {row.tier.name for row in rows if row.kind == "master"} == {0.0: {"nvme"}, 1.0: {"cpu"}}.get(
        share, {"cpu", "nvme"}
    )


@pytest.mark.parametrize("split_master", [False, True])
@pytest.mark.parametrize(("states", "moment"), [("bf16", 2), ("8bit", 1 + 1 / 64)])
def test_rows_of_small_states_are_as_small(states: str, moment: float, split_master: bool) -> None:
    """Scales are counted with the moment that they are of."""
    planned = planned_of(True, split_master=split_master, path=".", commit_every=None, states=states)
    placed = planned.with_memory(planned.cpu_memory_for(0.0)).place()
    rows, n = explain(placed), planned.layout.numel
    assert sum(row.nbytes for row in rows if row.tier.name == "nvme") == placed.disk_bytes
    for kind in ("exp_avg", "exp_avg_sq"):
        (row,) = [row for row in rows if row.kind == kind]
        assert row.nbytes == pytest.approx(moment * n, rel=0.01)
        assert placed.held_bytes[kind] == row.nbytes
    # Headers and padding are a good part of chunks of 256 KiB.
    whole = 2 * ((2 if split_master else 4) + 2 * moment)
    assert whole < bytes_per_param(placed, planned.layout) < whole + 2 * 6 * 4096 / 65_536


@pytest.mark.slow
def test_the_page_on_small_states_says_what_the_plan_counts() -> None:
    page = (ROOT / "docs" / "small-states.md").read_text()
    command = re.search(r"^offload plan (.*?)```", page, re.DOTALL | re.MULTILINE)
    assert command is not None
    words = command[1].replace("\\\n", " ").split()
    for form, is_split in (("fp32", False), ("bf16", True), ("8bit", True)):
        words[words.index("--states") + 1] = form
        plan = run_json(*[word for word in words if word != "--json" and (is_split or word != "--split-master")])
        row = re.search(rf'^\| `"{form}"` \| (.*GB) \|$', page, re.MULTILINE)
        assert row is not None
        cells = row[1].split(" | ")  # bytes a parameter, RAM, the file; of each whole masters and split ones
        counted = [f"{plan[what] / 1e9:.1f} GB" for what in ("peak_cpu_bytes", "disk_bytes")]
        assert cells[3 if is_split else 2 :: 2] == counted
        if form != "bf16":
            assert f'{plan["least_cpu_bytes"] / 1e9:.1f} GB for `"{form}"`' in page


@pytest.mark.parametrize(("chunk", "moved"), [("64MiB", 8.0625), ("256KiB", 8.375)])
def test_what_8bit_states_move_by_chunk(chunk: str, moved: float) -> None:
    """2 bytes of a master, 1 of each moment and 2/64 of scales, each way. A slot has a header of a page, and its arrays
    begin on pages."""
    tuning = Tuning(chunk=chunk, split_master=True)
    model = GPT(PRESETS["125m"], device="meta")
    planned = plan_of(model, direct=True, tier="nvme", path=".", commit_every=None, states="8bit", tuning=tuning)
    placed = planned.with_memory(planned.cpu_memory_for(0.0)).place()
    assert bytes_per_param(placed, planned.layout) == pytest.approx(moved, abs=0.006)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("commit_every", [None, 0])
def test_rows_of_states_on_the_device_add_up(direct: bool, commit_every: int | None) -> None:
    path = None if commit_every is None else "."
    planned = planned_of(direct, tier="device", commit_every=commit_every, path=path)
    placed = planned.place()
    rows = explain(placed)
    totals = {"device": placed.device_bytes, "cpu": placed.arena_bytes, "nvme": placed.disk_bytes}
    assert {tier: sum(row.nbytes for row in rows if row.tier.name == tier) for tier in totals} == totals
    by_kind = {row.kind: row.nbytes for row in rows if row.tier.name == "device"}
    n = planned.layout.numel
    assert [by_kind[kind] for kind in ("master", "exp_avg", "exp_avg_sq")] == [4 * n] * 3
    assert [row.kind for row in rows if row.tier.name == "cpu"] == ([] if path is None else ["buffers"])
    # The kernels of a device that is not the CPU have their temporaries there.
    assert (by_kind["rest"] > MIB) is not direct
    small = planned_of(direct, tier="device", commit_every=commit_every, path=path, states="8bit").place()
    # Those of moments in codes are the allocator's: up to 28 bytes an element, of 65,536 at once.
    assert [one.temporary_bytes(tiers.DEVICE) for one in (placed, small)] == [0, 0 if direct else 2 * MIB]
    assert planned.largest_share(placed.device_bytes) == 1.0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_rank_holds_exactly_what_the_papers_say(ranks: int, accumulation: int) -> None:
    """Of a model without padding: 4 psi + 12 psi / N at stage 1, 2 psi + 14 psi / N at 2, 16 psi / N at 3, and with
    gradients in fp32 2 more for each of theirs. Stage 1 without accumulation holds gradients as stage 2."""
    model = GPT(GPTConfig(layers=2, heads=2, width=256, context=64), device="meta")
    psi = sum(param.numel() for param in model.parameters())
    wide = 2 if accumulation > 1 else 0
    for stage, param_tier in ((1, None), (2, None), (1, "cpu"), (2, "cpu"), (3, None)):
        planned = plan_of(
            model, direct=True, ranks=ranks, stage=stage, accumulation=accumulation, param_tier=param_tier
        )
        held = planned.place().held_bytes
        part = psi // ranks
        assert part * ranks == psi
        wanted = {
            "param": 2 * (psi if stage < 3 else part),
            "grad": (2 + wide) * (psi if stage == 1 and accumulation > 1 else part),
            "master": 4 * part,
            "exp_avg": 4 * part,
            "exp_avg_sq": 4 * part,
        }
        assert held == wanted
        if stage == 1 and accumulation > 1:
            assert sum(held.values()) == (4 + wide) * psi + 12 * psi // ranks


def test_what_a_rank_holds_and_sends_is_shown() -> None:
    with_json = run_json("--ranks", "4", "--stage", "3")
    assert (with_json["ranks"], with_json["stage"]) == (4, 3)
    assert with_json["sent_elements"]["gradients"] == pytest.approx(0.75 * with_json["parameters"], rel=0.01)
    shown = run("--ranks", "4", "--stage", "2").stdout
    assert "One of 4 ranks at stage 2" in shown
    assert "exp_avg_sq" in shown
    assert "1.50 a parameter" in shown
    assert "One of" not in run().stdout
    assert run("--ranks", "0").exit_code == 2


def test_what_zero_r_does_is_shown() -> None:
    """Of preset 1m: 4 blocks, 128 wide, in bf16."""
    given = ("--tensor-parallel", "4", "--ranks", "2", "--batch", "8", "--seq", "64", "--activation-tier", "cpu")
    whole, part = run_json(*given), run_json(*given, "--partition-activations")
    entering = 8 * 64 * 128
    for found in (whole, part):
        assert found["zero_r"]["checkpoint_bytes"] == 4 * 2 * entering
        assert found["zero_r"]["part_bytes"] == 4 * 2 * entering // 4
        assert found["zero_r"]["device_bytes"] == 2 * 2 * entering
        assert found["zero_r"]["gathered_elements"] == 4 * entering * 3 // 4
        assert found["zero_r"]["buffer_bytes"] > 0
    regions = [found["zero_r"]["region_bytes"] for found in (whole, part)]
    assert regions == [4 * 2 * entering, 4 * 2 * entering // 4]
    shown = run(*given, "--partition-activations").stdout
    assert "P_a+cpu, P_a+nvme" in shown
    assert "4 tensor-parallel ranks" in shown
    assert "ZeRO-R" not in run().stdout
    assert run("--tensor-parallel", "0").exit_code == 2
    assert run("--partition-activations", "--activation-tier", "cpu").exit_code == 2


def test_tensor_parallel_ranks_share_the_matrices_of_blocks() -> None:
    alone, shared = run_json()["parameters"], run_json("--tensor-parallel", "2")["parameters"]
    model = GPT(PRESETS["1m"], device="meta")
    matrices = sum(param.numel() for param in model.blocks.parameters() if param.dim() > 1)
    assert alone - shared == matrices // 2


def test_rows_of_a_rank_add_up_too() -> None:
    for stage, param_tier in ((1, None), (2, None), (1, "cpu"), (2, "nvme"), (3, "cpu"), (3, "nvme")):
        planned = planned_of(True, ranks=3, stage=stage, param_tier=param_tier, path=".")
        placed = planned.with_memory(planned.least()).place()
        rows = explain(placed)
        totals = {"device": placed.device_bytes, "cpu": placed.arena_bytes, "nvme": placed.disk_bytes}
        assert {tier: sum(row.nbytes for row in rows if row.tier.name == tier) for tier in totals} == totals
        assert all(row.nbytes > 0 for row in rows)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("prefetch", [None, 5])
def test_budget_for_a_share_keeps_that_share(share: float, prefetch: int | None) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(40)))
    tuning = Tuning(chunk=4 * 64 * 64, prefetch_chunks=prefetch, prefetch_units=prefetch)
    planned = plan_of(model, direct=True, path=".", tuning=tuning)
    memory = planned.cpu_memory_for(share)
    placed = planned.with_memory(memory).place()
    assert len(placed.states.resident) == share * 40
    assert placed.arena_bytes == memory
    buffers = IN_FLIGHT if prefetch is None else prefetch + 2
    assert placed.states.in_flight == (0 if share == 1 else buffers)
    assert planned.largest_share(memory) == pytest.approx(share)


def test_largest_share_is_none_below_the_least_and_all_above() -> None:
    planned = planned_of(True, path=".")
    assert planned.largest_share(planned.least() - 1) is None
    assert planned.largest_share(planned.least()) == 0.0
    assert planned.largest_share(1 << 50) == 1.0
    with pytest.raises(BudgetError):
        planned.with_memory(planned.least() - 1).place()
    planned.with_memory(planned.least()).place()


def test_people_get_tiers_peak_wear_and_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 10 * MIB)
    given = ("--chunk", "64KiB", "--batch", "1", "--seq", "8", "--cpu-memory", "least")
    shown = run(*given).stdout
    for words in ("param:", "grad:", "buffers:", "exp_avg_sq:", "Peak RAM", "in fp32", "bytes a parameter", "600 TB"):
        assert words in shown
    assert "chunks stream through 3 buffers" in shown
    budgets = run_json(*given)
    assert [row["fits"] for row in budgets["budgets"]] == [True, True, True, False, False]
    assert all(row["cpu_bytes"] > 0 for row in budgets["budgets"])
    moved = [row["moved_bytes"] for row in budgets["budgets"]]
    assert moved == sorted(moved, reverse=True)
    assert 0.5 < budgets["largest_share"] < 0.75
    assert f"In 10 MiB of free RAM, {budgets['largest_share']:.0%} of the states fit." in shown
    with_free(monkeypatch, 1 * GIB)
    assert "All 5 chunks stay in RAM" in run("--tier", "cpu").stdout


def test_the_verdict_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 * GIB)
    first, *others = run().stdout.splitlines()
    assert first.startswith("Fits: yes. It takes ")
    assert "A drive warranted for 600 TB written lasts over a billion steps." in others  # it has commits only
    assert "A drive warranted for" not in run("--no-commits", "--tier", "cpu").stdout
    with_free(monkeypatch, 50 * MIB)  # the plan's, but not the activations
    first, second = run("--batch", "64").stdout.splitlines()[:2]
    assert first.startswith("Fits: no. It takes ")
    assert "--activation-tier cpu or nvme" in second
    found = run_json("--batch", "64")
    assert found["fits"] is False
    assert found["cpu_total_bytes"] == found["peak_cpu_bytes"] + found["device_total_bytes"] > 50 * MIB


@pytest.mark.parametrize("option", ["--gpu-memory", "--ram", "--cpu-memory", "--device-memory"])
def test_a_size_without_its_unit_is_named(option: str) -> None:
    refused = run("--gpu", option, "24")
    assert refused.exit_code == 2
    assert f"{option} 24: 24 bytes; did you mean 24GiB?" in " ".join(refused.stderr.split())


def test_a_gpu_has_room_for_gradients_on_their_way_and_communicators() -> None:
    model = GPT(PRESETS["1m"], device="meta")
    block, every = (sum(p.numel() for p in one.parameters()) for one in (model.blocks[0], model))
    root = every - len(model.blocks) * block
    found = run_json("--gpu")
    assert found["leaving_bytes"] == 2 * sum(sorted([root, block, block, block])[-3:])
    assert run_json()["leaving_bytes"] == 0
    assert run_json("--gpu", "--tier", "device")["leaving_bytes"] == 2 * max(root, block)
    several = run_json("--gpu", "--ranks", "2")
    assert several["leaving_bytes"] == 2 * max(root, block)
    assert several["communication_bytes"] == 512 * MIB
    frozen = run_json("--gpu", "--frozen", str(len(model.blocks)))
    assert 0 < frozen["leaving_bytes"] < 2 * root


def test_a_gpu_has_room_for_what_activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--ram", "64GiB", "--batch", "2", "--seq", "512")
    found = run_json("--gpu-memory", "2GiB", *given)
    computed = found["activation_bytes"] + found["output_bytes"] + found["backward_bytes"]
    assert found["computed_bytes"] == computed
    beside = computed + found["context_bytes"] + found["leaving_bytes"]
    assert found["communication_bytes"] == 0
    assert found["device_budget_bytes"] == 2 * GIB - beside
    assert found["device_total_bytes"] == found["device_bytes"] + beside <= 2 * GIB
    assert found["output_bytes"] == 12 * 2 * 512 * 256  # logits
    in_cells = 256 * 256 * (2 + 4 * 4)  # of 256 tokens by all words: in bf16, and what is made of them in fp32
    assert found["output_bytes_in_chunks"] == in_cells + 4 * PRESETS["1m"].width * (2 * 512 + 256)
    assert found["fits"] is True
    assert run_json("--gpu-memory", "2GiB", "--activation-tier", "cpu", *given)["activation_bytes"] == -(
        -found["saved_bytes"] // 4
    )
    refused = run("--gpu-memory", "610MiB", *given)
    assert refused.exit_code == 2
    assert refused.stdout == ""  # no table after which an error comes
    assert "--activation-tier cpu" in refused.stderr
    shown = run("--gpu", "--device-memory", "1GiB", *given).stdout
    assert shown.startswith("Fits: yes, on a GPU of ")


@pytest.mark.parametrize("device", [(), ("--gpu-memory", "64GiB")], ids=["cpu", "gpu"])
def test_attention_keeps_no_scores(device: tuple[str, ...]) -> None:
    """What it keeps grows with the tokens, and what the meta device would keep with their square."""
    given = ("--ram", "640GiB", "--batch", "1", "--activation-tier", "cpu", *device)
    short, long = (run_json("--seq", seq, *given)["saved_bytes"] for seq in ("512", "1024"))
    assert long == pytest.approx(2 * short, rel=0.01)


@pytest.mark.parametrize("activations", [None, "cpu"])
def test_seconds_are_those_of_the_slower_of_compute_and_disk(activations: str | None) -> None:
    given = [
        "--gpu",
        "--ram",
        "64GiB",
        "--cpu-memory",
        "least",
        "--flops",
        "1e12",
        "--disk-gb-per-s",
        "2",
        "--chunk",
        "64KiB",
    ]
    given += ["--activation-tier", activations] if activations else []
    few, many = run_json(*given, "--seq", "1"), run_json(*given, "--batch", "200", "--seq", "1024")
    per_token = (8 if activations else 6) * few["parameters"]
    states = (few["read_bytes"] + few["written_bytes"]) / 2e9
    for found, tokens in ((few, 4), (many, 200 * 1024)):
        compute = per_token * tokens / 1e12
        forward = 2 * found["parameters"] * tokens / 1e12
        assert found["step_seconds"] == pytest.approx(max(compute, compute - forward + states), rel=0.01)
        assert found["tokens_per_s"] == pytest.approx(tokens / found["step_seconds"])
        assert found["hiding_tokens"] == pytest.approx(states * 1e12 / 2 / few["parameters"], rel=0.01)
    assert (few["waits_for"], many["waits_for"]) == ("disk", "compute")
    assert "it waits for the disk; from" in run(*given, "--seq", "1").stdout


def test_a_step_that_is_tried_in_backward_hides_more_of_the_disk() -> None:
    """An ideal schedule by hand: in backward the disk moves three of four chunks at most, in forward the rest."""
    given = ["--preset", "1m", "--cpu-memory", "least", "--no-commits", "--flops", "1e12", "--chunk", "64KiB"]
    for tokens in (4, 5000):
        size = ["--disk-gb-per-s", "2", "--batch", "1", "--seq", str(tokens)]
        plain, tried = run_json(*given, *size), run_json(*given, *size, "--speculate")
        states = (tried["read_bytes"] + tried["written_bytes"]) / 2e9
        forward = 2 * tried["parameters"] * tokens / 1e12
        backward = 2 * forward
        moved = min(0.75 * states, backward)
        wanted = max(backward, moved) + max(forward, states - moved)
        assert tried["step_seconds"] == pytest.approx(wanted, rel=0.01)
        assert tried["step_seconds"] <= plain["step_seconds"] * 1.001
        assert plain["speculate_gain"] == pytest.approx(plain["step_seconds"] / tried["step_seconds"])
        assert tried["speculate_gain"] == pytest.approx(plain["speculate_gain"])
        assert plain["speculate_pays"] is tried["speculate_pays"] is True
        times = f"it is {plain['speculate_gain']:.2f} times as fast as a step after it"
        assert f'{times}, by the same rates; "auto" would have' in run(*given, *size).stdout
    assert tried["hiding_tokens"] == pytest.approx(plain["hiding_tokens"] / 3, rel=0.05)
    muon = run_json(*given, *size, "--optimizer", "muon")
    assert muon["speculate_gain"] is muon["speculate_pays"] is None
    assert run_json(*given, *size, "--tier", "cpu")["speculate_gain"] is None


def test_rates_say_where_they_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.io.select.recall", lambda path: Settings("auto", mixed_bytes_per_s=7e9))
    here = run_json("--cpu-memory", "least")
    assert (here["disk_gb_per_s"], here["disk_from"], here["flops_from"]) == (7, "measured", "unknown")
    assert "step_seconds" not in here
    assert "A step takes at least" in run("--cpu-memory", "least").stdout
    elsewhere = run_json("--gpu", "--ram", "64GiB")
    assert (elsewhere["disk_gb_per_s"], elsewhere["disk_from"]) == (3, "assumed")
    assert (elsewhere["flops"], elsewhere["flops_from"]) == (100e12, "assumed")


def test_adapters_train_beside_a_frozen_model() -> None:
    """Those that peft adds with target_modules="all-linear"."""
    model = GPT(PRESETS["1m"], device="meta")
    layers = [module for block in model.blocks for module in block.modules() if isinstance(module, nn.Linear)]
    found = run_json("--lora-rank", "8")
    assert found["parameters"] == sum(8 * (one.in_features + one.out_features) for one in layers)
    assert run("--lora-rank", "0").exit_code == 2


@pytest.mark.parametrize(("form", "bits"), [("nf4", 4 + 8 / 64 + 32 / 64 / 256), ("int8", 8), ("fp8", 8)])
def test_a_quantised_base_takes_so_many_bits_a_weight(form: str, bits: float) -> None:
    model = GPT(PRESETS["1m"], device="meta")
    layers = [module for block in model.blocks for module in block.modules() if isinstance(module, nn.Linear)]
    rows = 0 if form == "nf4" else sum(32 * one.out_features for one in layers)
    saved = sum(16 * one.weight.numel() for one in layers) - sum(bits * one.weight.numel() for one in layers) - rows
    plain, found = run_json("--lora-rank", "8"), run_json("--lora-rank", "8", "--quantise", form)
    of_frozen = [
        {row["kind"]: row["nbytes"] for row in one["rows"] if row["tier"] == "device"} for one in (plain, found)
    ]
    assert of_frozen[0]["frozen"] - of_frozen[1]["frozen"] == saved / 8
    assert found["parameters"] == plain["parameters"]
    left = {f"{name}.weight": getattr(model, name).weight.numel() for name in ("positions", "embed", "head")}
    assert found["unquantised"] == sorted(left, key=lambda name: -left[name])
    assert found["unquantised_bytes"] == 2 * sum(left.values())
    shown = " ".join(run("--lora-rank", "8", "--quantise", form).stdout.split())
    first, second, _ = found["unquantised"]
    assert f"of frozen ones not quantised ({first}, {second} and 1 other)." in shown


def test_what_is_trained_is_not_quantised() -> None:
    assert "give --lora-rank, or --frozen" in run("--quantise", "nf4").stderr
    assert "choose one of nf4, int8, fp8" in run("--lora-rank", "8", "--quantise", "int4").stderr
    half = run_json("--frozen", "2", "--quantise", "int8")
    assert half["parameters"] == run_json("--frozen", "2")["parameters"]


def test_each_layer_gets_one_adapter_also_in_nested_blocks_and_where_it_is_a_block() -> None:
    with torch.device("meta"):
        experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        layers = nn.ModuleList(
            nn.ModuleDict({"experts": copy.deepcopy(experts), "up": nn.Linear(4, 4)}) for _ in range(2)
        )
        model = nn.ModuleDict({"layers": layers, "head": nn.Linear(4, 4)})
    plan_models._adapt(plan_models.Sized(model, 2, 4, ()), rank=1)
    adapters = [one for one in model.modules() if isinstance(one, plan_models._Adapted)]
    assert len(adapters) == 2 * 4  # and none of the head
    assert all(type(one.layer) is nn.Linear for one in adapters)
    assert sum(param.numel() for param in model.parameters() if param.requires_grad) == 8 * (4 + 4)


@pytest.mark.parametrize("share", SHARES)
def test_no_budget_is_below_zero_where_the_device_lacks_memory(share: float) -> None:
    """Its BudgetError is about another memory, whose bytes were taken for RAM."""
    planned = planned_of(False, path=".", param_tier="device", device_memory="1MiB")
    with pytest.raises(BudgetError) as refused:
        planned.cpu_memory_for(share)
    assert refused.value.option == "device_memory"
    result = run("--gpu", "--device-memory", "1MiB", "--param-tier", "device")
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_folder_without_a_configuration_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for config in (tmp_path, tmp_path / "none"):
        result = run("--config", str(config))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"ConfigError: --config {config}: there is no ")


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("direct", [True, False])
def test_activations_are_a_row_of_their_own(direct: bool, tier: str) -> None:
    planned = planned_of(direct, path=".", activation_tier=tier, activation_memory="3MiB")
    placed = planned.place()
    rows = explain(placed)
    totals = {"device": placed.device_bytes, "cpu": placed.arena_bytes, "nvme": placed.disk_bytes}
    assert {tier: sum(row.nbytes for row in rows if row.tier.name == tier) for tier in totals} == totals
    is_apart = tier == "device" and not direct
    expected = [("activation", "device", 3 * MIB)] if is_apart else []
    expected.append(("activation", "cpu", 3 * MIB))  # what the device lacks room for, as much again
    assert [(row.kind, row.tier.name, row.nbytes) for row in rows if row.kind == "activation"] == expected
    if is_apart:
        least = planned.with_memory(planned.least()).place()
        assert [(row.tier.name, row.nbytes) for row in explain(least) if row.kind == "activation"] == [
            ("device", 3 * MIB)
        ]


def test_activations_of_a_batch_are_what_the_papers_say() -> None:
    found = run_json("--batch", "3", "--seq", "100", "--activation-tier", "nvme")
    assert found["entering_bytes"] == 4 * 77824  # 2 bytes, batch, seq and width, in whole pages, and blocks
    regions = [row["nbytes"] for row in found["rows"] if row["kind"] == "activation"]
    assert regions == [4 * 77824]  # in whole pages


@pytest.mark.parametrize("recompute", [True, False])
def test_activations_of_a_batch_are_those_of_a_run(recompute: bool, tmp_path: Path) -> None:
    found = run_json("--batch", "3", "--seq", "50", "--dtype", "fp32", "--frozen", "1", "--activation-tier", "nvme")
    model = GPT(PRESETS["1m"])
    for module in (model.embed, model.positions, model.blocks[0]):
        module.requires_grad_(False)
    tokens = torch.zeros(3, 50, dtype=torch.long)
    with OffloadZero(
        model,
        path=tmp_path / "run",
        compute_dtype=torch.float32,
        activation_tier="nvme",
        tuning=Tuning(recompute=recompute),
    ) as optimizer:
        model(tokens)
        peak = optimizer.stats()["peak_activation_bytes"]
    assert peak == found["entering_bytes" if recompute else "saved_bytes"]


def test_a_sequence_longer_than_a_presets_context_has_positions_and_activations() -> None:
    """All that a token has grows with the sequence; scores of attention are kept by no fused kernel."""
    short, long = (run_json("--gpu", "--batch", "1", "--seq", str(seq)) for seq in (1024, 2048))
    width = PRESETS["1m"].width
    assert long["parameters"] - short["parameters"] == 1024 * width
    assert long["activation_bytes"] == pytest.approx(2 * short["activation_bytes"], rel=0.01)
    assert long["output_bytes"] == 2 * short["output_bytes"] > 0


def test_activations_of_a_model_that_looks_at_values_are_counted_by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "forward", lambda self, tokens: tokens.sum().item())
    found = run_json("--batch", "3", "--seq", "100", "--activation-tier", "nvme")
    assert (found["entering_bytes"], found["saved_bytes"]) == (2 * 3 * 100 * 128 * 4, None)
    assert "saved" not in run("--batch", "3", "--seq", "100").stdout


def test_a_forward_that_does_not_run_on_the_meta_device_says_why_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: nn.Module, x: object) -> None:
        raise ValueError("no [bold]word[/bold] of this.\nMore words.")

    monkeypatch.setattr(Block, "forward", refuses)
    assert run_json()["not_measured"] == "ValueError in blocks.0: no [bold]word[/bold] of this"
    assert "meta device (ValueError in blocks.0: no [bold]word[/bold] of this)." in run().stdout


def test_what_does_not_fit_is_refused_as_by_a_run_and_what_would_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--cpu-memory", "1MiB")
    assert result.exit_code == 2
    assert result.stderr.startswith("BudgetError: ")
    with pytest.raises(BudgetError) as refused:
        OffloadZero(GPT(PRESETS["1m"]), path="never-made", cpu_memory="1MiB")
    needed = option_bytes(refused.value.needed)
    assert result.stderr.splitlines() == [
        f"BudgetError: {format_bytes(refused.value.needed)} of RAM are needed and --cpu-memory allows 1 MiB: give "
        f"--cpu-memory {needed} or more, or a smaller --chunk"
    ]
    assert run("--cpu-memory", needed).exit_code == 0
    assert result.stdout.startswith(f"Fits: no. {format_bytes(refused.value.needed)} of RAM are needed.")
    assert "What --cpu-memory would do" in result.stdout
    with_free(monkeypatch, 4 * KIB)
    assert "not even the least fits" in run("--cpu-memory", "1MiB").stdout
    assert run("--json", "--cpu-memory", "1MiB").stdout == ""


def test_sizes_of_its_own_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1000 * GIB)
    devices: list[str] = []

    def noted(config: GPTConfig, seed: int = 0, device: str = "cpu") -> GPT:
        devices.append(device)
        return GPT(config, seed, "meta")  # whatever was asked for: 50 GB are not for a test

    monkeypatch.setattr("offload.cli.plan_models.GPT", noted)
    tiers = ("--cpu-memory", "least", "--param-tier", "device", "--grad-tier", "cpu")
    given = ("--layers", "10", "--width", "10240", *tiers)  # few layers: each is measured
    found = run_json(*given)
    assert devices == ["meta"]
    assert found["parameters"] == pytest.approx(12 * 10 * 10240**2, rel=0.01)
    assert found["build_bytes"] == 4 * found["parameters"]
    assert found["bytes_per_param"] == pytest.approx(24, rel=0.001)
    assert found["drive_life_steps"] == pytest.approx(600e12 / (12 * found["parameters"]), rel=0.001)
    split = run_json(*given, "--split-master")
    assert split["bytes_per_param"] == pytest.approx(20, rel=0.001)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "3m"], "--preset 3m: choose one of 1m"),
        (["--layers", "0"], "--layers 0: give a whole number"),
        (["--width", "-1"], "--width -1: give a whole number"),
        (["--accumulation", "0"], "--accumulation 0"),
        (["--activation-tier", "ram"], "--activation-tier ram: choose one of nvme, cpu"),
        (["--commit-every", "3", "--no-commits"], "--no-commits and --commit-every 3: give one of the two"),
        (["--gpu-memory", "much"], "--gpu-memory='much'"),
        (
            ["--optimizer", "sgd-momentun"],
            "--optimizer sgd-momentun: did you mean sgd-momentum? Choose one",
        ),
        (["--optimizer", "lbfgs"], "optimizer is LBFGS, which cannot be offloaded: its step() calls a closure"),
        (["--optimizer", "sgd", "--split-master"], "--split-master with --optimizer sgd: only Adam's"),
        (["--tier", "ram"], "--tier ram: choose one of nvme, cpu"),
        (["--cpu-memory", "lots"], "--cpu-memory='lots'"),
        (["--chunk", "1KiB"], "--chunk 1KiB is too small"),
        (["--chunk=--5"], "--chunk='--5' is not a size"),
        (["--chunk", "9" * 5000], "--chunk='9"),
        (["--seq", "99999999999999999999"], "--seq 99999999999999999999: give a whole number, at least 1, at most"),
        (["--width", "100000000000"], "--width 100000000000: give a whole number"),
        (["--width", "1000000"], "48,001,554,000,000 parameters are 2,861,115 chunks of 64 MiB on a rank"),
        (["--tensor-parallel", "129"], "--tensor-parallel 129: matrices of a width of 128"),
        (["--path", __file__], f"--path {__file__} is no directory"),
        (["--network", "1.2.3GB/s"], "--network 1.2.3GB/s: give a rate such as 25GB/s"),
        (["--flops", "1e-300"], "--flops 1e-300: give a number above 0, below 1e+21"),
        (["--accumulation", "9" * 5000], "--accumulation 9"),
        (["--picture", "missing/plan.png"], "--picture missing/plan.png: there is no directory"),
        (["--picture", "plan.doc"], "--picture plan.doc: give a name that ends in .png"),
        (["--picture", "."], "--picture .: give a name that ends in .png"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"ConfigError: {message}")
    assert len(result.stderr.splitlines()) == 1


def planned_of(direct: bool, *, split_master: bool = False, **options: Any) -> Planned:
    tuning = Tuning(chunk="256KiB", split_master=split_master)
    return plan_of(GPT(PRESETS["1m"], device="meta"), direct=direct, tuning=tuning, **options)


def test_a_machine_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, MIB)
    options = ("--tier", "cpu", "--gpu", "--device-memory", "1.5MiB", "--param-tier", "auto")
    here = run(*options)
    assert here.exit_code == 2
    assert "BudgetError" in here.stderr
    summary = run_json(*options, "--ram", "64GiB")
    assert summary["device"] in ("gpu", DEVICE.type)
    assert summary["free_cpu_bytes"] == 64 * GIB
    assert summary["param_tier"] == "cpu"
    assert summary["device_bytes"] <= 1.5 * MIB
    # Bounce buffers, which only a device with memory of its own needs.
    assert {row["kind"] for row in summary["rows"] if row["tier"] == "cpu"} >= {"param", "grad", "master", "rest"}


def test_nothing_has_to_be_hidden_where_all_is_in_ram() -> None:
    found = run_json("--tier", "cpu", "--flops", "1e12")
    assert (found["hiding_tokens"], found["waits_for"]) == (0, "compute")
    assert "costs nothing" not in run("--tier", "cpu", "--flops", "1e12").stdout


@pytest.mark.parametrize("option", ["--flops", "--disk-gb-per-s"])
def test_speeds_are_above_zero(option: str) -> None:
    result = run(option, "-1")
    assert result.exit_code == 2
    assert option in result.stderr


def test_a_configuration_needs_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("--config", str(tmp_path))
    assert result.exit_code == 2
    assert "pip install transformers" in result.stderr


def test_frozen_blocks_stream_and_are_counted() -> None:
    options = ("--param-tier", "nvme", "--tier", "cpu", "--layers", "3", "--chunk", "64KiB", "--cpu-memory", "least")
    whole = GPT(GPTConfig(**{**vars(PRESETS["1m"]), "layers": 3}), device="meta")
    frozen = sum(p.numel() for m in (whole.embed, whole.positions, *whole.blocks[:2]) for p in m.parameters())
    summary = run_json(*options, "--frozen", "2")
    assert (summary["frozen_tier"], summary["param_tier"]) == ("nvme", "cpu")
    assert summary["parameters"] + frozen == sum(p.numel() for p in whole.parameters())
    (row,) = [row for row in summary["rows"] if (row["kind"], row["tier"]) == ("frozen", "nvme")]
    assert row["nbytes"] == 2 * frozen
    assert summary["read_bytes"] >= 2 * row["nbytes"]
    assert "frozen parameters are read in a step" in run(*options, "--frozen", "2").stdout
    assert "from 0 to the model's 3 blocks" in run(*options, "--frozen", "4").output


OWN = """
import torch
from torch import nn

import offload

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.mlp(x)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 500)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def images():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.empty(2, 3, 34, 34)

def number():
    return 3

def prints():
    print("it builds")
    made = Words()
    made.blocks[0].register_forward_hook(lambda *_: print("it runs"))
    return made

def exits():
    raise SystemExit(2)

def rates():
    made = Words()
    made.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    return made

class Nested(Words):
    def forward(self, batch):
        return super().forward(batch["tokens"][0])

def nested():
    return Nested(), {"tokens": [torch.zeros(2, 64, dtype=torch.long, device="cpu")]}

class Loss(Words):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return offload.linear_cross_entropy(x, self.head, tokens)

def fails():
    return Words()(torch.zeros(1, 4, dtype=torch.long)).sum().item()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current directory."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def of_own(*options: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["plan", "--json", "--ram", "8GiB", *options])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def test_a_plan_for_a_model_of_ones_own(own: str) -> None:
    found = of_own("--model", f"{own}:Words", "--batch", "2", "--seq", "3072", "--dtype", "fp32")
    block = 16 * 64 + 64 + 64 * 16 + 16
    assert found["parameters"] == 500 * 16 + 3 * block + 500 * 16 + 500
    assert found["output_bytes"] == 12 * 2 * 3072 * 500
    assert found["entering_bytes"] == 3 * 4 * 2 * 3072 * 16
    assert found["model"] == f"{own}:Words"
    assert found["computed_bytes_in_both"] < min(found["computed_bytes_in_chunks"], found["computed_bytes_in_tiles"])
    assert found["computed_bytes"] > max(found["computed_bytes_in_chunks"], found["computed_bytes_in_tiles"])
    shown = " ".join(CliRunner().invoke(app, ["plan", "--model", f"{own}:Words", "--seq", "3000"]).stdout.split())
    assert "with offload.linear_cross_entropy in place of logits" in shown


def test_a_model_may_come_with_what_it_is_given(own: str) -> None:
    """In bf16: the second convolution keeps what the ReLU returns, and so does that; the images were there before."""
    found = of_own("--model", f"{own}:images")
    assert found["parameters"] == 8 * 3 * 9 + 8 + 8 * 8 * 9 + 8
    assert found["output_bytes"] == 12 * 2 * 8 * 30 * 30
    assert found["computed_bytes"] >= found["output_bytes"] + 2 * 2 * 8 * 32 * 32
    assert found["computed_bytes_in_tiles"] is None


def test_what_a_model_prints_is_not_of_the_plan(own: str) -> None:
    found = CliRunner().invoke(app, ["plan", "--json", "--ram", "8GiB", "--model", f"{own}:prints"])
    assert json.loads(found.stdout)["parameters"] == of_own("--model", f"{own}:Words")["parameters"]
    assert "it builds" in found.stderr
    assert "it runs" in found.stderr


def test_a_model_may_look_at_numbers_while_it_is_built(own: str) -> None:
    """As models with stochastic depth do: the rates of their blocks."""
    size = "--batch", "2", "--seq", "64"
    whole, found = (of_own("--model", f"{own}:{name}", *size) for name in ("Words", "rates"))
    assert [found[name] for name in ("parameters", "saved_bytes")] == [whole["parameters"], whole["saved_bytes"]]


def test_tensors_in_what_a_model_is_given_may_be_in_lists_and_dicts(own: str) -> None:
    plain = of_own("--model", f"{own}:Words", "--batch", "2", "--seq", "64")
    nested = of_own("--model", f"{own}:nested", "--batch", "2", "--seq", "64")
    assert nested["saved_bytes"] == plain["saved_bytes"] is not None


def test_a_model_with_a_loss_without_logits_runs_on_the_meta_device(own: str) -> None:
    plain, found = (of_own("--model", f"{own}:{name}", "--batch", "2", "--seq", "64") for name in ("Words", "Loss"))
    assert found["entering_bytes"] == plain["entering_bytes"]
    assert found["saved_bytes"] == plain["saved_bytes"] is not None
    assert found["output_bytes"] < plain["output_bytes"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model", "{}"], "give module:function"),
        (["--model", "{}:absent"], "has no attribute 'absent'"),
        (["--model", "absent_module:build"], "No module named 'absent_module'"),
        (["--model", "{}:number"], "made a int"),
        (["--model", "{}:fails"], "does not load values"),
        (["--model", "{}:exits"], "(SystemExit: 2)"),
        (["--model", "{}:Words", "--layers", "2"], "leave --layers and --width out"),
        (["--model", "{}:Words", "--config", "somewhere"], "give one of the two"),
        (["--model", "{}:Words", "--search", "--goal", "largest"], "--model makes one as it is"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(given: list[str], said: str, own: str) -> None:
    found = CliRunner().invoke(app, ["plan", *(one.format(own) for one in given)])
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())
    assert found.stdout == ""
