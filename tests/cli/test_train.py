import fcntl
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import offload
from offload.cli import train_run
from offload.cli.main import app
from offload.cli.options import TrainOptions
from offload.demo import gpt, loop, text
from offload.demo.gpt import PRESETS, GPTConfig
from offload.storage.directories import older_swap_name
from tests.support.command import printed
from tests.support.run_files import swap_in

FIELDS = {
    "loss_first", "loss_last", "val_loss_first", "val_loss_last", "tokens_per_s", "step_s", "wait_nvme_s",
    "nvme_read_bytes", "nvme_written_bytes", "peak_cpu_bytes", "peak_device_bytes", "peak_rss_bytes", "parameters",
    "adam_s", "backward_s", "chunks", "cpu_budget_bytes", "device", "device_to_host_bytes", "evaluate_s", "files",
    "forward_s", "host_to_device_bytes", "kernel", "losses", "nvme_init_bytes", "picture", "preset", "sample",
    "steps", "steps_before", "committed", "dtype", "text", "threads", "tier", "param_tier", "grad_tier",
    "timeline", "tokens", "validation",
}  # fmt: skip
TINY = ["train", "--preset", "1m", "--steps", "3", "--batch", "2", "--seq", "16", "--lr", "0.003", "--sample", "3"]
TINY += ["--validation", "4"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; losses are drawn in tests/cli/test_plots.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_run, "loss_curve", lambda file, *rest: file.write_bytes(b"\x89PNG"))
    return tmp_path


def run(*options: str) -> Result:
    return CliRunner().invoke(app, [*TINY, *options])


def run_json(*options: str) -> dict[str, Any]:
    return printed(run("--json", *options))


def test_nvme_run_moves_24_bytes_a_parameter_and_step_and_leaves_only_the_picture(folder: Path) -> None:
    summary = run_json("--seed", "1")
    assert set(summary) == FIELDS
    assert (summary["tier"], summary["parameters"], summary["tokens"]) == ("nvme", 985_344, 3 * 2 * 16)
    moved_bytes = summary["nvme_read_bytes"] + summary["nvme_written_bytes"]
    # What a fourth step would begin with has been read as well, at most all of it.
    assert 24 * 3 <= moved_bytes / summary["parameters"] <= 1.02 * (24 * 3 + 12)
    assert summary["nvme_init_bytes"] == pytest.approx(12 * summary["parameters"], rel=0.02)
    assert 0 < summary["peak_cpu_bytes"] <= summary["cpu_budget_bytes"] < 12 * summary["parameters"]
    assert summary["peak_rss_bytes"] > summary["peak_cpu_bytes"]
    assert summary["loss_first"] == summary["losses"][0] == pytest.approx(5.5, abs=0.2)
    assert summary["loss_last"] == summary["losses"][-1]
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.3
    assert [step for step, _ in summary["validation"]] == [0, 3]
    assert {summary[name] > 0 for name in FIELDS if name.endswith("_s")} == {True}
    assert [file.name for file in folder.iterdir()] == ["out"]
    assert Path(summary["picture"]).read_bytes().startswith(b"\x89PNG")


def test_tiers_give_the_same_losses() -> None:
    nvme = run_json("--chunk", "1MiB", "--threads", "1")
    cpu = run_json("--tier", "cpu")
    assert nvme["losses"] == cpu["losses"]
    assert nvme["validation"] == cpu["validation"]
    assert nvme["threads"] == 1
    assert nvme["sample"] == cpu["sample"]
    assert (cpu["nvme_read_bytes"], cpu["nvme_written_bytes"], cpu["files"]) == (0, 0, [])


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_checkpointed_activations_give_the_same_losses(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, real = Counter[bool](), gpt.checkpoint

    def counted(*arguments: Any, **options: Any) -> Any:
        runs.update([torch.is_grad_enabled()])
        return real(*arguments, **options)

    monkeypatch.setattr(gpt, "checkpoint", counted)
    kept = run_json("--param-tier", tier, "--accumulation", "2")
    assert not runs
    again = run_json("--param-tier", tier, "--accumulation", "2", "--checkpoint-activations")
    assert runs == {True: 3 * 2 * 4}  # steps, micro-batches, blocks
    for name in ("losses", "validation", "sample"):
        assert again[name] == kept[name]


def test_seed_changes_the_initial_values_and_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_json("--tier", "cpu", "--seed", seed) for seed in "01"]
    assert runs[0]["val_loss_first"] != runs[1]["val_loss_first"]
    made = gpt.GPT
    monkeypatch.setattr(train_run, "GPT", lambda config, seed=0, **options: made(config, 0, **options))
    other = run_json("--tier", "cpu", "--seed", "1")
    assert runs[0]["val_loss_first"] == other["val_loss_first"]
    assert runs[0]["loss_first"] != other["loss_first"]


def test_accumulation_counts_its_micro_batches() -> None:
    summary = run_json("--accumulation", "2")
    assert summary["tokens"] == 3 * 2 * 2 * 16
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.3


def test_more_cpu_memory_keeps_chunks_off_the_disk() -> None:
    summary = run_json("--cpu-memory", "100MB", "--chunk", "1MiB")
    assert summary["cpu_budget_bytes"] == 100_000_000
    assert summary["nvme_read_bytes"] == 0


def test_user_text_is_learnt(folder: Path) -> None:
    (folder / "words.txt").write_text("to be or not to be " * 200)
    summary = run_json("--data", "words.txt", "--out", "deep/er", "--steps", "12")
    assert summary["text"] == "words.txt"
    assert summary["val_loss_last"] < 3
    assert (folder / "deep" / "er" / "loss.png").exists()


def test_people_get_tables_a_sample_and_the_picture(folder: Path) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    shown = ("validation loss", "forward", "backward", "waiting", "a parameter and step", "budget", "writes")
    assert all(word in result.stdout for word in shown), result.stdout
    assert "Loss curve: out/loss.png" in result.stdout
    assert "step 1/3  loss 5." in result.stderr
    assert "step 3/3" in result.stderr
    assert "(disk)" in result.stderr


def test_timeline_writes_the_last_three_steps_and_draws_them(folder: Path) -> None:
    result = run("--timeline", "--steps", "4", "--chunk", "1MiB")
    assert result.exit_code == 0, result.output
    assert "Timeline: out/timeline.json (open it in ui.perfetto.dev), out/timeline.png" in result.stdout
    assert sorted(file.name for file in (folder / "out").iterdir()) == ["loss.png", "timeline.json", "timeline.png"]
    assert (folder / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "out" / "timeline.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert [name for name in names if name in ("forward", "inference", "backward", "step")] == [
        "forward",
        "backward",
        "step",
    ] * 3
    moved_bytes = sum(event["args"]["bytes"] for event in events if event["ph"] == "b")
    assert moved_bytes == pytest.approx(3 * 24 * 985_344, rel=0.02)
    assert not any("under_way_at_the_end" in event.get("args", {}) for event in events)


def test_run_shorter_than_the_timeline_and_json_name_its_files() -> None:
    summary = run_json("--timeline", "--steps", "1", "--tier", "cpu")
    assert summary["timeline"] == ["out/timeline.json", "out/timeline.png"]


def test_activations_in_a_tier_change_no_loss() -> None:
    expected = run_json("--steps", "3")
    found = run_json("--steps", "3", "--activation-tier", "nvme")
    assert found["losses"] == expected["losses"]


def test_keep_leaves_the_swap_file_and_says_so(folder: Path) -> None:
    result = run("--keep")
    assert result.exit_code == 0, result.output
    file = swap_in(folder / "scratch")
    assert file.stat().st_size > 12 * 985_344
    assert f"Kept: {file}" in result.stdout
    # Nothing is committed in it, so a later run gives its space back.
    assert run_json()["files"] == []
    assert not file.exists()


def test_files_of_others_at_the_path_stay(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("x")
    run_json("--path", "mine")
    assert [file.name for file in (folder / "mine").iterdir()] == ["thesis.txt"]
    assert sorted(file.name for file in folder.iterdir()) == ["mine", "out"]


def test_path_of_a_live_run_is_refused_and_untouched(folder: Path) -> None:
    (folder / "scratch").mkdir()
    file = folder / "scratch" / older_swap_name(0)
    with file.open("w") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        result = run()
        assert result.exit_code == 2
        assert result.stderr.startswith("PathInUseError: ")
    assert file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "-1"], "--steps -1: give a whole number, at least 1"),
        (["--batch", "0"], "--batch 0: "),
        (["--seq", "0"], "--seq 0: "),
        (["--seq", "1025"], "--seq 1025: this preset's context is 1024 bytes"),
        (["--accumulation", "0"], "--accumulation 0: "),
        (["--validation", "0"], "--validation 0: "),
        (["--threads", "0"], "--threads 0: "),
        (["--lr", "0"], "--lr 0.0: "),
        (["--lr", "nan"], "--lr nan: "),
        (["--seed", "-1"], "--seed -1: "),
        (["--preset", "7b"], "--preset 7b: choose one of 1m, 5m, 20m, 125m, 350m, 1b, 2b"),
        (["--tier", "tape"], "--tier tape: choose one of nvme, cpu"),
        # Another --path would not help.
        (["--tier", "cpu", "--param-tier", "nvme"], "--param-tier nvme needs --tier nvme: "),
        (["--tier", "cpu", "--grad-tier", "nvme"], "--grad-tier nvme needs --tier nvme: "),
        (["--tier", "device", "--grad-tier", "nvme"], "--grad-tier nvme needs --tier nvme: "),
        (["--chunk", "big"], "--chunk='big' is not a size"),
        (["--chunk", "-4096"], "--chunk=-4096 is negative"),
        (["--cpu-memory", "2 parsecs"], "--cpu-memory='2 parsecs' is not a size"),
        (["--data", "nowhere"], "--data nowhere is neither a file nor a folder"),
        (["--data", "small"], "small holds 100 bytes of text; with --seq 16 at least 341 are needed"),
        (["--out", "small"], "--out small cannot be made"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    (folder / "small").write_text("x" * 100)
    monkeypatch.setattr(train_run, "GPT", None)  # a model built now would fail otherwise
    result = run(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"ConfigError: {message}"), result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert [file.name for file in folder.iterdir()] == ["small"]


def test_unknown_option_is_a_usage_error() -> None:
    result = run("--speed", "11")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--path", "no/where"], "PathError: "),
        (["--path", "small"], "PathError: "),
        (["--cpu-memory", "1MiB"], "BudgetError: "),
        (["--chunk", "1KiB"], "ConfigError: "),
    ],
)
def test_what_the_library_refuses_is_one_message_and_leaves_nothing(
    folder: Path, options: list[str], message: str
) -> None:
    (folder / "small").write_text("x" * 100)
    result = run(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith(message), result.stderr
    assert "Traceback" not in result.output
    assert sorted(file.name for file in folder.iterdir()) == ["out", "small"]


def test_full_disk_leaves_no_file_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    result = run()
    assert result.exit_code == 2
    assert result.stderr.startswith("BudgetError: ")
    assert [file.name for file in folder.iterdir()] == ["out"]


def test_interrupt_while_the_masters_are_written_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        assert swap_in(folder / "scratch").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("offload.held_model.HeldModel._take_model", interrupted)
    assert run().exit_code == 130
    assert [file.name for file in folder.iterdir()] == ["out"]


def test_model_larger_than_free_ram_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_run, "free_memory", lambda: 1_000_000)
    result = run()
    assert result.exit_code == 2
    assert result.stderr.startswith("BudgetError: --preset 1m needs 3.759 MiB of RAM"), result.stderr


def test_files_go_when_training_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        assert swap_in(folder / "scratch").exists()
        raise RuntimeError("in the middle")

    monkeypatch.setattr(train_run, "train_loop", fail)
    result = run()
    assert isinstance(result.exception, RuntimeError)
    assert [file.name for file in folder.iterdir()] == ["out"]


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:  # ends with the process; the time limit is pytest's
        if line.startswith(start):
            return


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interrupted_run_leaves_no_file(folder: Path, number: signal.Signals, code: int) -> None:
    command = "from offload.cli.main import run; run()"
    source = str(Path(offload.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", command, *TINY, "--steps", "1000000", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},  # the current directory is another one
    )
    try:
        wait_for_line(process, "step 1/")
        assert swap_in(folder / "scratch").exists()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert [file.name for file in folder.iterdir()] == ["out"]


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    factors = [loop.lr_factor(step, 100) for step in range(101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)
    assert loop.lr_factor(0, 1) == 1


def options_of(tier: str = "cpu", **more: Any) -> TrainOptions:
    return TrainOptions(
        preset="1m", steps=1, batch=1, seq=16, lr=0.5, accumulation=1, tier=tier, path=Path("scratch"), keep=False,
        cpu_memory=None, chunk=None, threads=None, seed=0, data=None, out=Path("out"),
        timeline=False, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("capability", "dtype"), [("AVX512", "bf16"), ("AVX2", "fp32"), ("DEFAULT", "fp32")])
def test_computes_in_what_the_cpu_multiplies_fast(
    capability: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.chdir(tmp_path)
    found = []
    forward = gpt.GPT.forward

    def noted(self: gpt.GPT, *args: Any) -> Any:
        found.append({parameter.dtype for parameter in self.parameters()})
        return forward(self, *args)

    monkeypatch.setattr(gpt.GPT, "forward", noted)
    (tmp_path / "text").write_text("words of a text " * 400)
    short = ["--steps", "1", "--batch", "1", "--seq", "16", "--validation", "1", "--sample", "0", "--data", "text"]
    for given, expected in ([], dtype), (["--dtype", "bf16"], "bf16"), (["--dtype", "fp32"], "fp32"):
        found.clear()
        result = CliRunner().invoke(app, ["train", "--preset", "1m", "--json", *short, *given])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["dtype"] == expected
        assert found
        assert all(each == {{"bf16": torch.bfloat16, "fp32": torch.float32}[expected]} for each in found)
    refused = CliRunner().invoke(app, ["train", "--dtype", "fp16"])
    assert refused.exit_code == 2
    assert "--dtype fp16: choose one of bf16, fp32" in refused.stderr


def test_only_matrices_decay() -> None:
    model = gpt.GPT(GPTConfig(layers=1, width=16, heads=1))
    names = {parameter: name for name, parameter in model.named_parameters()}
    recipe = loop.Recipe(steps=1, batch=1, seq=16, lr=0.5, accumulation=1, seed=0, validation=1)
    with loop.build_optimizer(model, recipe, tier="cpu") as optimizer:
        for group in optimizer.param_groups:
            assert group["lr"] == 0.5
            for parameter in group["params"]:
                is_norm = "norm" in names.pop(parameter)
                assert group["weight_decay"] == (0.0 if is_norm else loop.WEIGHT_DECAY)
    assert not names


def test_validation_of_deep_models_takes_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "1m", GPTConfig(layers=20, width=32, heads=2))
    passes: list[int] = []
    forward = gpt.GPT.forward

    def counted(self: gpt.GPT, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if targets is not None and not torch.is_grad_enabled():
            passes.append(len(tokens))
        return forward(self, tokens, targets)

    monkeypatch.setattr(gpt.GPT, "forward", counted)
    run_json("--tier", "cpu", "--validation", "14")
    assert passes == [6, 6, 2] * 2


@pytest.mark.parametrize(("tier", "count"), [("device", 200), ("auto", 20), ("nvme", 20)])
def test_fewer_bytes_are_written_where_each_brings_all_parameters(tier: str, count: int) -> None:
    options = partial(options_of, "nvme" if tier == "nvme" else "cpu", param_tier=tier)
    assert options().sample_bytes == count
    assert options(sample=0).sample_bytes == 0


def test_validation_reads_only_held_out_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    real = loop.cut_windows

    def spy(content: text.Bytes, *rest: Any) -> Any:
        seen.append(content.tobytes())
        return real(content, *rest)

    monkeypatch.setattr(loop, "cut_windows", spy)
    run_json("--tier", "cpu")
    assert seen == [text.load_text(None, 16).validation.tobytes()]
