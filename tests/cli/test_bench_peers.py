"""bench/peers.py and bench/hiding.py at a tiny size: that they measure what they say, and leave nothing behind."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import contest, hiding, peers
from bench.contest import Block, ContestError, Entry, started
from offload.models.gpt import GPT, GPTConfig
from offload.sizes import GIB, KIB
from tests.support.processes import ROOT

TINY = GPTConfig(layers=2, width=64, heads=2, context=32)
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
NVME = Entry(peers.OURS, "offload", {"tier": "nvme", "chunk": 64 * KIB, "buffers": 1})


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tiny model's states go through the disk."""
    monkeypatch.setattr(peers, "CHUNK_BYTES", 256 * KIB)


def block(**values: Any) -> Block:
    nothing: dict[str, Any] = {
        "steps": 2, "trained": 3, "seconds": 1.0, "losses": [1.0, 1.0], "stats": {}, "read_bytes": 0,
        "written_bytes": 0, "peak_rss_bytes": 0, "forward_s": [], "backward_s": [], "optimizer_s": [],
    }  # fmt: skip
    return Block(**nothing | values)


def test_contestants_train_alike_and_their_io_is_counted(tmp_path: Path) -> None:
    entries = [NVME, Entry("torch", "torch")]
    said: list[str] = []
    with started(entries, TINY, (2, 16), tmp_path, said.append) as (contestants, left_out):
        assert left_out == []
        blocks = [one.run(3, 2, 16, phases=True, fresh=True) for one in contestants]
        ours, plain = blocks
        assert ours.losses == pytest.approx(plain.losses, rel=1e-2)
        moved = ours.stats["nvme_written_bytes"]
        assert moved == ours.stats["nvme_read_bytes"] > 3 * 11 * contest.parameters(TINY)
        assert ours.written_bytes >= moved
        for one in blocks:
            assert (one.steps, one.trained) == (3, 3)
            assert 0 < one.compute_s + sum(one.optimizer_s) / 3 <= one.step_s
            assert one.peak_rss_bytes > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["text"]
    assert said == ["building offload, NVMe", "building torch"]


def test_block_starts_where_a_step_before_it_returns(tmp_path: Path) -> None:
    with started([NVME], TINY, (1, 8), tmp_path, print) as ((one,), _):
        moved = one.run(1, 1, 8, phases=True).stats["nvme_written_bytes"]
        whole = one.run(2, 1, 8)
    assert (whole.steps, whole.trained, len(whole.losses)) == (2, 3, 3)
    assert whole.stats["nvme_written_bytes"] == 3 * moved
    assert 0 < whole.step_s == whole.seconds / 2


def test_timeline_of_a_block_is_recorded(tmp_path: Path) -> None:
    with started([NVME], TINY, (1, 8), tmp_path, print) as ((one,), _):
        one.run(1, 1, 8, timeline=tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_peer_that_cannot_run_is_left_out_with_its_words(tmp_path: Path) -> None:
    absent = Entry("DeepSpeed", "deepspeed", {"zero": {}, "aio": {}})
    with started([absent, Entry("torch", "torch")], TINY, (1, 8), tmp_path, print) as (contestants, left_out):
        assert [one.name for one in contestants] == ["torch"]
    assert "No module named 'deepspeed'" in left_out[0]


def test_page_has_the_words_of_who_is_left_out() -> None:
    row: dict[str, Any] = dict.fromkeys(("step_x_ours", "optimizer_x_ours", "step_s", "compute_s", "optimizer_s"), 1.0)
    row |= dict.fromkeys(("read_bytes_per_param", "written_bytes_per_param", "loss_first", "loss_last"), 1.0)
    row |= {"contestant": peers.OURS, "step_spread_s": (1.0, 1.0), "peak_rss_bytes": 1, "most_rss_bytes": 1}
    kind = peers.KINDS["nvme"]
    text = peers.markdown([peers.Result(peers.JOBS["tiny"], 1, [row], {}, "", ["it ended;\nits words"], kind)], "")
    assert "    it ended;\n    its words\n" in text
    assert "no DeepSpeed with states and parameters on NVMe" in text


@pytest.mark.slow
def test_contestant_of_ours_that_cannot_run_ends_the_contest(tmp_path: Path) -> None:
    wrong = Entry("offload", "offload", {"tier": "tape", "chunk": 64 * KIB, "buffers": 1})
    with pytest.raises(ContestError, match="tape"), started([wrong], TINY, (1, 8), tmp_path, print):
        pass


def test_heats_fit_the_memory_and_all_have_ours() -> None:
    found = list(peers.entries(peers.JOBS["46m"], "python"))
    assert [len(heat) for heat in peers.heats(found, 10**6, 1000 * GIB)] == [len(found)]
    parted = peers.heats(found, 10**6, 0)
    assert [heat[0].name for heat in parted] == [peers.OURS] * (len(found) - 1)
    assert [heat[1] for heat in parted] == found[1:]


@pytest.mark.parametrize("name", list(peers.JOBS))
def test_peers_buffers_hold_every_parameter(name: str) -> None:
    job = peers.JOBS[name]
    ours, *theirs = peers.entries_with_params(job, "python")
    assert (ours.options["param_tier"], ours.options["grad_tier"]) == ("nvme", "nvme")
    for entry in theirs:
        place = entry.options["zero"]["offload_param"]
        assert (place["device"], place["max_in_cpu"]) == ("nvme", 0)
        assert place["buffer_size"] == max(param.numel() for param in GPT(job.model, device="meta").parameters())


def test_targets_are_judged_against_the_best_peer() -> None:
    ours: dict[str, Any] = {"contestant": peers.OURS, "peak_rss_bytes": 100, "loss_last": 3.0}
    theirs = [
        {"contestant": f"DeepSpeed 3, NVMe, {n}", "step_x_ours": step, "optimizer_x_ours": 3.0, "peak_rss_bytes": rss}
        | {"loss_last": loss}
        for n, step, rss, loss in ((1, 1.4, 300, 3.01), (2, 1.6, 200, 3.2))
    ]
    result = peers.Result(peers.JOBS["tiny"], 1, [ours, *theirs], {}, "", [])
    other, step, optimizer, rss = result.met()
    assert other == "DeepSpeed 3, NVMe, 2 trains otherwise: its last loss is 3.200"
    assert step.startswith("whole step: 1.40")
    assert step.endswith("NOT met")
    assert optimizer.endswith("2: met")
    assert rss.startswith("peak RSS: 2.00")


def test_ratio_is_the_median_of_the_rounds_own() -> None:
    assert contest.paired([1.0, 2.0, 1.0], [2.0, 2.0, 9.0]) == 2.0
    assert [one.step_s for one in (block(), block(seconds=4.0))] == [0.5, 2.0]


def test_peers_without_deepspeed_save_a_table_and_losses(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    peers.main(models="tiny", rounds=1, path=tmp_path, deepspeed=None, as_json=False, out=tmp_path, save=True)
    text = (tmp_path / "peers.md").read_text()
    assert all(f"| {name} |" in text for name in (peers.OURS, "torch, fp32 masters in RAM", "offload, RAM"))
    assert "no DeepSpeed" in text
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["peers.md", "peers.png"]


@pytest.mark.slow
def test_parameters_of_ours_are_on_nvme_if_peers_are_to_have_them_there(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    peers.main(models="tiny", rounds=1, path=tmp_path, params="nvme", as_json=True, out=tmp_path, save=True)
    ((ours,),) = (found["rows"] for found in json.loads(capsys.readouterr().out))
    # Of states 12 bytes each way, of parameters and gradients 2, parameters read twice; some buffers' worth stays.
    assert ours["read_bytes_per_param"] > 14
    assert ours["written_bytes_per_param"] > 14
    text = (tmp_path / "peers-params.md").read_text()
    assert text.startswith("# Beside peers, with parameters on NVMe\n")
    assert "![loss by step](peers-params.png)" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["peers-params.md", "peers-params.png"]


@pytest.mark.peers
@pytest.mark.timeout(1200)  # DeepSpeed compiles its extensions at their first use
@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="needs .venv-peers (make .venv-peers/installed)")
@pytest.mark.parametrize("params", list(peers.KINDS))
def test_deepspeed_trains_alike_on_all_tiers(
    params: str,
    tmp_path: Path,
    small_chunks: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # where the compiled extensions are
    # DeepSpeed leaves parameters below a MiB in RAM, and crashes where it reads ahead in fewer layers.
    wide = GPTConfig(layers=6, width=512, heads=8, context=64)
    monkeypatch.setitem(peers.JOBS, "tiny", replace(peers.JOBS["tiny"], model=wide))
    python = str(PEERS_PYTHON)
    peers.main(
        models="tiny", rounds=1, path=tmp_path, deepspeed=python, params=params, as_json=True, out=tmp_path, save=False
    )
    (found,) = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == len(list(peers.KINDS[params].entries(peers.JOBS["tiny"], python)))
    for row in found["rows"]:
        assert row["loss_last"] == pytest.approx(found["rows"][0]["loss_last"], abs=0.05)
        least = 14 if params == "nvme" else 11
        assert (row["written_bytes_per_param"] > least) == ("NVMe" in row["contestant"])


def test_predicted_step_is_compute_adam_and_what_forward_does_not_hide() -> None:
    short = hiding.Round(2.0, 4.0, 0.5, io_s=1.0, step_s=7.0, torch_s=7.0, ram_s=7.0, bytes_per_param=24.0)
    assert short.predicted_s == 6.5
    long = hiding.Round(2.0, 4.0, 0.5, io_s=3.0, step_s=10.0, torch_s=7.0, ram_s=7.0, bytes_per_param=24.0)
    assert long.predicted_s == 7.5
    row = hiding.row_of(hiding.Shape(1, 1, 30), [short, long, long])
    assert row.ratio == 0.75
    assert row.tokens_per_s == 3.0


@pytest.mark.parametrize("tokens", [1.4, 100, 256, 400, 1234.5])
def test_shapes_have_the_tokens_asked_for(tokens: float) -> None:
    shape = hiding.shape_of(1, tokens)
    assert abs(shape.tokens - tokens) <= max(1, shape.batch / 2)
    assert shape.seq <= 1.5 * hiding.SEQ


@pytest.mark.slow
def test_hiding_measures_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hiding, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(hiding.PRESETS, "tiny", GPTConfig(layers=2, width=128, heads=2))
    monkeypatch.setattr(sys, "argv", ["hiding.py", "--save"])
    (tmp_path / "results").mkdir()
    hiding.main("tiny", "2", 1, 1, "128KiB", 1, tmp_path, False, tmp_path / "out", True)
    text = (tmp_path / "results" / "hiding.md").read_text()
    assert "python bench/hiding.py --save" in text
    assert "2 T*: " in text
    assert (tmp_path / "results" / "hiding-2.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "hiding-2.json").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "results"]
