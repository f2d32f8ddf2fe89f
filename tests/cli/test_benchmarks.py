"""The scripts of bench/ at a tiny size: they measure what they say, print and save it, and leave nothing behind."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from bench import (
    adam,
    adam_prefetch,
    chunks,
    experts,
    gpu_cases,
    guards,
    hiding,
    limits,
    losses,
    peers,
    predict,
    predict_ranks,
    report,
    rules,
    step,
)
from bench.contest import ContestError, Entry, parameters, started
from bench.limits import Disk
from offload import Tuning
from offload.cli import host_costs
from offload.demo.gpt import GPT, GPTConfig
from offload.optim import reference
from offload.sizes import GIB, KIB
from tests.support.processes import ROOT
from tests.support.ranks import Worlds

TINY = GPTConfig(layers=2, width=64, heads=2, context=32)
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
BUILD = """
from deepspeed.ops import op_builder
try:
    for builder in (op_builder.AsyncIOBuilder, op_builder.CPUAdamBuilder):
        builder().load(verbose=False)
except Exception as error:
    print(flush=True)
    print(error)
    raise SystemExit(3)
"""
"""Compiles DeepSpeed's extensions, if they are not there yet; ends with 3 where that cannot be done."""
NVME = Entry(peers.OURS, "offload", {"tier": "nvme", "chunk": 64 * KIB, "buffers": 1})


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where --save writes instead of bench/results."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(report, "RESULTS", folder)
    monkeypatch.setattr(sys, "argv", ["bench/it.py", "--save", "--path", "/some/where"])
    return folder


def is_picture(file: Path) -> bool:
    return file.read_bytes().startswith(b"\x89PNG")


def test_report_is_a_page_with_machine_command_tables_and_remarks(results: Path) -> None:
    table = report.Table(("what", "seconds"), [("it", "1.0")], "Times")
    one = report.Report("it", "It", "What it is.", [table], {}, ["a remark"], "a disk", {"it.png": Path.touch})
    one.publish(save=True)
    text = (results / "it.md").read_text()
    assert text.startswith("# It\n\n")
    assert "; a disk.\n\n`python bench/it.py --save --path DIR`\n\nWhat it is.\n\n## Times\n" in text
    assert text.endswith("| it | 1.0 |\n\n- a remark\n\n![it.png](it.png)\n")
    assert (results / "it.png").exists()


def test_ratio_is_the_median_of_the_rounds_own() -> None:
    assert report.ratio([2.0, 2.0, 9.0], [1.0, 2.0, 1.0]) == 2.0
    assert report.judged("x", 1.2, 1.0) == "x: 1.200, wanted at most 1: NOT met"
    assert report.judged("x", 1.2, 1.0, is_least=True) == "x: 1.200, wanted at least 1: met"


def test_chunks_gives_the_time_of_each_chunk_resident_and_streamed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, results: Path
) -> None:
    monkeypatch.setattr(chunks, "LEAST_CHUNKS", 40)
    chunks.main(counts="20", rounds=1, path=tmp_path, as_json=True, save=True)
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["name"], run["chunks"], len(run["rounds"])) for run in runs] == [
        ("resident", 20, 1),
        ("streamed", 20, 1),
    ]
    assert all(wall > 0 for run in runs for _, _, wall in run["rounds"])
    assert "| streamed, 20 chunks |" in (results / "chunks.md").read_text()


def test_prefetch_tries_each_distance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    monkeypatch.setattr(adam_prefetch, "PARAMETERS", 65_536)
    monkeypatch.setattr(adam_prefetch, "CALL", 8192)
    adam_prefetch.main(rounds=2, distances="0,96", as_json=True, save=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row[0].rstrip(" *") for row in rows] == ["0", "96"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_adam_compares_every_kernel_with_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    monkeypatch.setattr(adam, "SAMPLE", 2000)
    adam.main(n="1000", threads="1", rounds=2, as_json=True, save=True)
    rows = json.loads(capsys.readouterr().out)["results"]
    for job, nbytes in adam.JOBS.items():
        found = [row for row in rows if row["job"] == job]
        names = {row["contestant"] for row in found}
        others = {"torch fused"} if job in ("fp32", "mixed") else set()
        assert names >= {f"offload {variant}" for variant in adam.native.available_variants()} | others
        assert all(row["gb_per_s"] == pytest.approx(nbytes / row["ns_per_param"]) for row in found)
    assert "| fp32, n = 1e+03, 1 threads | limit |" in (results / "adam.md").read_text()
    assert is_picture(results / "adam.png")


def test_rules_compares_each_optimizer_with_torch_and_its_bytes(
    capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    rules.main(n="5000", threads="1", rounds=2, matrices="8x16", as_json=True, save=True)
    rows = {row["optimizer"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert list(rows) == [*rules.MAKES, "Muon, 8 x 16", "Adafactor, 8 x 16"]
    assert {name for name, row in rows.items() if row["piece"] == "C kernel"} == {"AdamW"}
    assert {name for name, row in rows.items() if row["piece"] == rules.WHOLE} == {"Muon, 8 x 16", "Adafactor, 8 x 16"}
    assert [name for name, row in rows.items() if row["planned_s"] is not None] == ["Muon, 8 x 16"]
    # Of the gradient 4; of masters and arrays 8 each.
    wanted = {"SGD": 12, "SGD momentum": 20, "RMSprop": 20, "AdamW": 28, "AdamW amsgrad": 36}
    assert {name: rows[name]["bytes_per_element"] for name in wanted} == wanted
    assert all(row[what] > 0 for row in rows.values() for what in ("ns_pieces", "ns_torch", "ns_limit", "x_torch"))
    assert "| AdamW, 1 threads | C kernel |" in (results / "rules.md").read_text()


def test_experts_in_tiles_move_fewer_bytes_than_whole_layers_where_few_have_tokens(
    capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    experts.main(tokens="1", width=16, experts=8, rounds=1, as_json=True, save=True)
    whole, *tiles = json.loads(capsys.readouterr().out)["rows"]
    assert (whole["x_whole"], whole["x_bytes"]) == (1, 1)
    *in_ram, stepped, late = tiles
    assert len(in_ram) == 2
    assert (stepped["what"], late["what"]) == ("NVMe, all stepped", "NVMe, idle ones late")
    assert 0 < late["disk_mib"] < 0.7 * stepped["disk_mib"]
    for one in in_ram:
        assert one["x_bytes"] < 0.5
        assert one["peak_mib"] < whole["peak_mib"]
    assert "whole layers" in (results / "experts.md").read_text()


def test_step_moves_the_bytes_of_its_budget_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    step.main(n="1.5e6", rounds=1, path=tmp_path, budgets="0,1", split_master=False, as_json=True, save=True)
    streamed, resident = json.loads(capsys.readouterr().out)["runs"]
    assert streamed["bytes_per_param"] == pytest.approx(24, rel=0.02)
    assert resident["bytes_per_param"] == 0
    assert streamed["x_limit"] == pytest.approx(
        streamed["step_s"] / max(streamed["rounds"][part][0] for part in ("disk alone", "Adam alone"))
    )
    assert is_picture(results / "step.png")
    assert list(tmp_path.iterdir()) == [results]


def test_step_with_small_states_is_compared_with_their_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: list[str] = []
    monkeypatch.setattr(step, "Adam", lambda n, chunk, form: forms.append(form) or limits.Adam(n, chunk, form))
    options: dict[str, Any] = {"split_master": False, "as_json": True, "out": tmp_path / "out"}
    step.main(n="1.5e6", rounds=1, path=tmp_path, budgets="0", states="8bit", **options)
    (streamed,) = json.loads(capsys.readouterr().out)["runs"]
    # Chunks of 256 KiB have a good part of headers and padding.
    assert 12.06 < streamed["bytes_per_param"] < 13
    assert forms == ["8bit"]


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_the_kernel_alone_is_that_of_the_form(form: str) -> None:
    adam = limits.Adam(300, 128, form)
    with closing(adam):
        states, (m, v, *scales) = adam._states, adam._small or []
        assert m is not None
        assert v is not None
        hyper = {"lr": limits.LR, "betas": limits.BETAS, "eps": limits.EPS, "weight_decay": limits.WEIGHT_DECAY}
        start = np.full(300, 0.5, dtype=np.float32), *(np.zeros(300, dtype=np.float32) for _ in range(2))
        grad = states.grad.float().numpy()
        wanted = reference.adam(*start, grad, step=limits.STEP, decoupled=True, **hyper)
        assert np.array_equal(states.master.numpy(), reference.settle(wanted[0]))
        random = reference.dither(300, limits.STEP)
        for array, scale, moment, signed in ((m, scales[0], wanted[1], True), (v, scales[1], wanted[2], False)):
            if form == "bf16":
                assert np.array_equal(array.view(torch.uint16).numpy(), reference.to_dithered_bf16(moment, random))
                continue
            assert scale is not None
            codes, of_blocks = reference.to_codes(moment, random, signed=signed)
            assert np.array_equal(array.numpy(), codes)
            assert np.array_equal(scale.numpy(), of_blocks)


@pytest.mark.slow
def test_losses_trains_each_form_once_and_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "find_spec", lambda name: None)
    text = np.frombuffer(Path(losses.__file__).read_bytes(), dtype=np.uint8).astype(np.int32)
    monkeypatch.setattr(losses, "byte_tokens", lambda: text)
    folder = tmp_path / "out"
    size = [
        "--model",
        "tiny",
        "--seeds",
        "1",
        "--steps",
        "20",
        "--batch",
        "4",
        "--seq",
        "32",
        "--device",
        "cpu",
        "--jobs",
        "2",
    ]
    command = ["run", "--out", str(folder), *size, "--states", "fp32,8bit,torch,bitsandbytes"]
    losses.main(command)
    shown = capsys.readouterr().out
    assert "bitsandbytes is not installed, and is left out" in shown
    assert shown.endswith("all runs have ended\n")
    losses.main(command)
    assert "3 of 3 runs have ended before" in capsys.readouterr().out
    runs = {run["spec"]["states"]: run for run in losses.Results(folder / losses.RESULTS).data["runs"]}
    plain, small, peer = (runs[states] for states in ("fp32", "8bit", "torch"))
    assert [update["step"] for update in plain["updates"]] == [1, 5, 10, 20]
    # From the same start on the same batches; a step of fp32 states is torch's but for its last bits.
    assert plain["losses"] == pytest.approx(peer["losses"], abs=1e-3)
    assert plain["losses"][:2] == pytest.approx(small["losses"][:2], abs=1e-4)
    assert plain["losses"] != small["losses"]
    assert plain["held_out"][-1][1] < plain["held_out"][0][1] - 0.5
    for one in (plain, small, peer):
        first = one["updates"][0]
        assert sum(first["counts"]) + first["zeros"] == losses.parameters("tiny")
        assert 0.99 < first["max"] < 1.01
    losses.main(["report", str(folder)])
    assert '| "8bit" |' in capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == [
        "report.md",
        "results.json",
        "tiny-updates.png",
        "tiny.png",
    ]
    assert is_picture(folder / "tiny.png")


def test_losses_recorded_updates_are_those_of_the_masters() -> None:
    before = [torch.tensor([1.0, -2.0, 0.0, 4.0]), torch.tensor([0.5])]
    lr, decay = 0.01, losses.WEIGHT_DECAY
    steps = [torch.tensor([1.0, -3.0, 0.0, math.nan]), torch.tensor([0.002])]
    after = [old * (1 - lr * decay) - lr * step for old, step in zip(before, steps, strict=True)]
    found = losses.distribution(before, after, lr)
    assert (found["zeros"], found["not_finite"], sum(found["counts"])) == (1, 1, 3)
    assert found["max"] == pytest.approx(3.0, rel=1e-4)
    assert found["rms"] == pytest.approx(math.sqrt((1 + 9 + 0.002**2) / 4), rel=1e-4)
    bins = [losses.EDGES[place] for place, count in enumerate(found["counts"]) if count]
    assert [low <= size < 1.34 * low for low, size in zip(bins, (0.002, 1.0, 3.0), strict=True)] == [True] * 3


def test_losses_of_one_model_on_two_devices_have_pictures_of_their_own() -> None:
    specs = [{"model": model, "states": "fp32", "seed": 0, "device": device}
             for model, device in (("mini", "cpu"), ("small", "cuda"), ("small", "cpu"), ("46m", "cuda"))]  # fmt: skip
    found = losses.groups({"runs": [{"spec": spec} for spec in specs]})
    assert [(one.file, one.spec["device"]) for one in found] == [
        ("small", "cuda"), ("small-2", "cpu"), ("mini", "cpu"), ("46m", "cuda"),
    ]  # fmt: skip


def test_losses_are_judged_by_the_spread_of_fp32() -> None:
    def run(states: str, seed: int, loss: float | None) -> dict[str, Any]:
        spec = {"model": "tiny", "states": states, "seed": seed, "steps": 1}
        return {"spec": spec, "held_out": [[0, 5.0], [1, loss]]}

    finals: dict[str, list[float | None]] = {
        "fp32": [2.0, 2.1, 2.04],
        "8bit": [2.05, 2.05, 2.04],
        "bf16": [2.3, 2.4, 2.35],
        "torchao": [2.0, None, 2.0],
    }
    runs = [run(states, seed, loss) for states, of_seeds in finals.items() for seed, loss in enumerate(of_seeds)]
    (group,) = losses.groups({"runs": runs})
    assert group.file == "tiny"
    assert group.spread == pytest.approx(0.1)
    assert group.differences("8bit") == pytest.approx([0.05, -0.05, 0.0])
    verdicts = [group.verdict(states) for states in finals]
    assert verdicts == ["", "within", "3.0 times as much", "diverged"]
    (alone,) = losses.groups({"runs": [run("fp32", 0, 2.0), run("8bit", 0, 2.1)]})
    assert alone.verdict("8bit") == "no spread with one seed"


def test_step_with_commits_is_compared_with_the_same_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step.main(n="1.5e6", rounds=1, path=tmp_path, budgets="1", split_master=False, commit_every=2, out=tmp_path / "out")
    shown = " ".join(capsys.readouterr().out.split())
    assert "flushed a parameter" in shown
    assert "x limit, 100% in RAM" in shown
    assert is_picture(tmp_path / "out" / "commits.png")


def test_resuming_is_compared_with_reading_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step.main(n="1.5e6", rounds=1, path=tmp_path, budgets="0,1", resuming=True, as_json=True, out=tmp_path / "out")
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["budget"] for run in runs] == [0, 1]
    assert all(run["bytes_per_param"] == pytest.approx(12, rel=0.02) for run in runs)


def test_disk_alone_reads_and_writes_or_does_one_of_both(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4, 5000)
    try:
        assert disk.length == 8192
        assert disk.run() > 0
        assert disk.run(2, ways=("write",)) > 0
        assert disk.seconds_for(8 * 8192, 3.0) == 3.0
    finally:
        disk.close()


def test_guards_are_measured_for_both_placements(capsys: pytest.CaptureFixture[str]) -> None:
    guards.main(params="20", rounds=1, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["placement"], row["what"]) for row in rows} == {
        (placement, what) for placement in guards.PLACEMENTS for what in guards.WHAT
    }


@pytest.mark.slow
def test_contestant_trains_and_its_io_is_counted(tmp_path: Path) -> None:
    with started([NVME], TINY, (2, 16), tmp_path / "results") as ((ours,), left_out):
        phases = ours.run(2, 2, 16, phases=True, fresh_peak=True)
        whole = ours.run(2, 2, 16, timeline=str(tmp_path / "t.json"))
    assert left_out == []
    moved = phases.stats["nvme_written_bytes"]
    assert moved == phases.stats["nvme_read_bytes"] > 2 * 11 * parameters(TINY)
    assert 0 < phases.compute_s + sum(phases.optimizer_s) / 2 <= phases.step_s
    # A block begins where the step before it returns: one step more is trained.
    assert (whole.steps, whole.trained, len(whole.losses)) == (2, 3, 3)
    assert whole.step_s == whole.seconds / 2
    assert 0 < whole.forward_bytes <= whole.stats["nvme_written_bytes"] + whole.stats["nvme_read_bytes"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_heats_fit_the_memory_and_all_have_ours() -> None:
    found = list(peers.entries(peers.JOBS["46m"], "python"))
    assert [len(heat) for heat in peers.heats(found, 10**6, 1000 * GIB)] == [len(found)]
    parted = peers.heats(found, 10**6, 0)
    assert [heat[0].name for heat in parted] == [peers.OURS] * (len(found) - 1)
    assert [heat[1] for heat in parted] == found[1:]


@pytest.mark.parametrize("name", list(peers.JOBS))
def test_peers_buffers_hold_every_parameter(name: str) -> None:
    job = peers.JOBS[name]
    ours, *others = peers.entries_with_params(job, "python")
    theirs = [entry for entry in others if entry.kind == "deepspeed"]
    assert (ours.options["param_tier"], ours.options["grad_tier"]) == ("nvme", "nvme")
    for entry in theirs:
        place = entry.options["zero"]["offload_param"]
        assert place["buffer_size"] == max(param.numel() for param in GPT(job.model, device="meta").parameters())


def test_targets_are_judged_against_the_best_peer() -> None:
    ours: dict[str, Any] = {"contestant": peers.OURS, "peak_rss_bytes": 100, "losses": [3.0]}
    theirs = [
        {"contestant": f"DeepSpeed 3, NVMe, {n}", "step_x_ours": x, "optimizer_x_ours": 3.0, "peak_rss_bytes": rss}
        | {"losses": [loss]}
        for n, x, rss, loss in ((1, 1.4, 300, 3.01), (2, 1.6, 200, 3.2))
    ]
    other, whole, optimizer, rss = peers.Result(peers.JOBS["tiny"], 1, [ours, *theirs], "", []).remarks()
    assert other == "DeepSpeed 3, NVMe, 2 does not train as ours does: its last loss is 3.200"
    assert "whole step" in whole
    assert whole.endswith("1.400, wanted at least 1.5: NOT met")
    assert optimizer.endswith("3.000, wanted at least 2: met")
    assert rss.endswith("2.000, wanted at least 1: met")


def test_limit_of_an_iteration_is_the_larger_of_compute_and_disk_in_each_phase() -> None:
    def limit(disk_s: float, in_forward: float) -> float:
        return hiding.Parts(2.0, 4.0, 0.5, disk_s).hidden_s(in_forward)

    assert limit(1.0, 1.0) == 6.5
    assert limit(3.0, 1.0) == 7.0
    assert limit(12.0, 0.5) == 12.0


def test_floor_of_an_iteration_is_of_what_its_parts_take_beside_each_other() -> None:
    alone, beside = hiding.Parts(2.0, 4.0, 0.5, 6.0), hiding.Parts(3.0, 5.0, 0.5, 8.0)
    one = hiding.Round(alone, beside, moved_bytes=100.0, forward_bytes=75.0, step_s=9.0, torch_s=7.0)
    assert one.seconds["limit_s"] == 4.5 + 4.0
    assert one.seconds["floor_s"] == 6.0 + 5.0
    result = hiding.Result(16, 10, [one])
    assert (result.x("limit_s"), result.x("floor_s")) == (9 / 8.5, 9 / 11)
    assert result.speculate is None
    tried = hiding.Result(16, 10, [replace(one, tried_s=6.0, kept=0.5)])
    assert tried.speculate is not None
    assert (tried.speculate["x_step"], tried.speculate["x_all"]) == (6 / 9, 6 / 6.5)
    assert len(result.row()) == len(tried.row()) == len(hiding.HEADINGS)


def test_disk_is_measured_while_something_else_runs(tmp_path: Path) -> None:
    with closing(Disk(tmp_path, 3, 64 * KIB)) as disk:
        seconds: list[float] = []
        ended, run = threading.Event(), disk.run

        def counted() -> float:
            seconds.append(run())
            if len(seconds) == 3:
                ended.set()
            return seconds[-1]

        disk.run = counted  # type: ignore[method-assign]
        found, median_s = disk.beside(lambda: ended.wait(10))
        assert found
        assert median_s == statistics.median(seconds[:-1])


@pytest.mark.slow
def test_peers_without_deepspeed_save_a_table_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: Path
) -> None:
    monkeypatch.setattr(peers, "CHUNK_BYTES", 256 * KIB)
    peers.main(models="tiny", rounds=1, path=tmp_path, save=True)
    text = (results / "peers-tiny.md").read_text()
    assert all(f"| {name} |" in text for name in (peers.OURS, "torch, fp32 masters in RAM", "offload, RAM"))
    assert "no DeepSpeed" in text
    assert is_picture(results / "peers-tiny.png")
    assert list(tmp_path.iterdir()) == [results]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_hiding_measures_and_saves(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    grads = "nvme" if tier == "nvme" else "cpu"
    hiding.main("1m", "32", tier, grads, 1, 1, "1MiB", 1, tmp_path, True, tmp_path, True)
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["bytes_per_param"] > (24 if tier == "device" else 27)
    assert run["speculate"]["step_s"] > 0
    assert is_picture(results / ("hiding-32.png" if tier == "device" else "iterations-32.png"))


@pytest.mark.slow
def test_peer_that_cannot_run_is_left_out_with_its_words_and_one_of_ours_ends_the_contest(tmp_path: Path) -> None:
    absent = Entry("DeepSpeed", "deepspeed", {"zero": {}, "aio": {}})
    (tmp_path / "one").mkdir()
    with started([absent, Entry("torch", "torch")], TINY, (1, 8), tmp_path / "one") as (contestants, left_out):
        assert [one.name for one in contestants] == ["torch"]
    assert "No module named 'deepspeed'" in left_out[0]
    wrong = Entry("offload", "offload", {"tier": "tape", "chunk": 64 * KIB, "buffers": 1})
    with pytest.raises(ContestError, match="tape"), started([wrong], TINY, (1, 8), tmp_path / "results"):
        pass


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that has DeepSpeed with its extensions, which it compiles at their first use."""
    if not PEERS_PYTHON.exists():
        pytest.skip("needs .venv-peers (make .venv-peers/installed)")
    monkeypatch.delenv("XDG_CACHE_HOME")  # where the compiled extensions are
    search = f"{PEERS_PYTHON.parent}{os.pathsep}{os.environ['PATH']}"  # for its build tools
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PATH": search}
    built = subprocess.run([str(PEERS_PYTHON), "-c", BUILD], capture_output=True, text=True, env=env, check=False)
    if built.returncode == 3:
        words = built.stdout.strip().splitlines()
        said = next((line for line in words if "error: " in line), words[-1])
        pytest.skip(f"DeepSpeed's extensions cannot be built (they need a C++ compiler and libaio-dev): {said}")
    assert built.returncode == 0, built.stderr
    return str(PEERS_PYTHON)


@pytest.mark.peers
@pytest.mark.timeout(1200)  # for the compiler
@pytest.mark.parametrize("params", list(peers.ENTRIES))
def test_deepspeed_trains_alike_on_all_tiers(
    params: str, deepspeed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CHUNK_BYTES", 256 * KIB)
    # DeepSpeed leaves parameters below a MiB in RAM, and crashes where it reads ahead in fewer layers.
    wide = GPTConfig(layers=6, width=512, heads=8, context=64)
    monkeypatch.setitem(peers.JOBS, "tiny", replace(peers.JOBS["tiny"], model=wide))
    peers.main(models="tiny", rounds=1, path=tmp_path, deepspeed=deepspeed, params=params, as_json=True, out=tmp_path)
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert len(found["rows"]) == len(list(peers.ENTRIES[params](peers.JOBS["tiny"], deepspeed)))
    for row in found["rows"]:
        assert row["losses"][-1] == pytest.approx(found["rows"][0]["losses"][-1], abs=0.05)
        least = (14 if params == "nvme" else 11) - (5 if "8bit" in row["contestant"] else 0)
        assert (row["written_bytes_per_param"] > least) == ("NVMe" in row["contestant"])


def test_the_share_of_copies_under_compute_is_of_their_time() -> None:
    def event(kind: str, start: float, length: float, name: str = "") -> dict[str, object]:
        return {"cat": kind, "name": name, "ts": start, "dur": length}

    kernels = [event("kernel", 0, 10), event("kernel", 5, 10), event("kernel", 20, 5)]  # 0-15 and 20-25
    copies = [event("gpu_memcpy", 10, 10, "Memcpy HtoD"), event("gpu_memcpy", 22, 6, "Memcpy DtoH")]
    others = [event("gpu_memcpy", 0, 100, "Memcpy DtoD"), event("cpu_op", 0, 100)]
    assert gpu_cases.share_under_compute([*kernels, *copies, *others]) == (5 + 3) / 16
    assert gpu_cases.share_under_compute(kernels) is None


def test_predict_compares_a_simulation_with_a_run(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "SIZES", {"tiny": TINY})
    monkeypatch.setattr(predict, "DISK_BYTES", 256 * KIB)
    monkeypatch.setattr(host_costs, "CHUNKS", 32)
    options = {"tier": "nvme", "commit_every": None, "tuning": Tuning(chunk="64KiB")}
    tiny = predict.Configuration("tiny", (2, 16), 0.0, options=options)
    slow = replace(tiny, options=options | {"accumulation": 10_000})
    monkeypatch.setattr(predict, "CONFIGURATIONS", {"tiny": tiny, "slow": slow})
    predict.main("tiny;slow", steps=4, path=tmp_path, as_json=False, out=tmp_path, save=True)
    page = (results / "predict.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| tiny |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    predicted, measured = (float(cells[number].split()[0]) for number in (2, 3))
    assert predicted > 0
    assert measured > 0
    assert float(cells[-1].split()[0]) == pytest.approx(float(cells[-2].split()[0]), rel=0.5)
    assert "slow: not predicted: 10,000 micro-batches a step take minutes to simulate" in page
    assert is_picture(results / "predict.png")


def test_predict_computes_with_the_experts_that_have_tokens() -> None:
    """4 tokens need 16 (1 - (15/16)^4) = 3.6 of 16 experts, 1,024 tokens all. The gradients of plain torch are of all
    that a layer has."""
    few = predict.CONFIGURATIONS["experts in tiles, idle ones stepped later"]
    assert (few.tokens, few.used_experts) == ((1, 4), 4)
    assert predict.CONFIGURATIONS["experts in tiles"].used_experts == 16
    model = few.model("cpu", few.used_experts)
    few.loss(model, 0).backward()
    assert {len(param.grad) for param in model.parameters() if param.grad is not None} == {4}


def test_predict_compares_a_simulated_rank_with_two(tmp_path: Path, worlds: Worlds) -> None:
    for found in worlds(2).run(_predict_two, tmp_path):
        assert found.predicted_s > 0
        assert found.step_s > 0
        assert found.bytes_predicted == pytest.approx(found.bytes_counted, rel=0.5)
        assert found.bytes_counted > 0


def _predict_two(folder: Path) -> predict.Result:
    options = {"tier": "nvme", "stage": 3, "commit_every": None, "tuning": Tuning(chunk="64KiB")}
    one = predict.Configuration("tiny", (2, 16), 0.0, options=options)
    with (
        patch.dict(predict.SIZES, {"tiny": TINY}),
        patch.object(predict, "DISK_BYTES", 256 * KIB),
        patch.object(predict_ranks, "LARGE_BYTES", 256 * KIB),
    ):
        return predict_ranks.of_rank("tiny", one, folder, torch.float32, 4)
