"""The surface of the command line: a new option is a decision, made by changing this file."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import offload
from offload import OffloadZero
from offload.cli.console import Commands, in_options, print_json
from offload.cli.main import app, run
from offload.errors import BudgetError, OffloadError, TierIOError

SOURCE = Path(offload.__file__).parents[1]
OPTIONS = {
    "train": {
        "--preset", "--steps", "--batch", "--seq", "--lr", "--accumulation", "--tier", "--path", "--keep",
        "--cpu-memory", "--chunk", "--threads", "--seed", "--data", "--out", "--timeline", "--json",
        "--param-tier", "--grad-tier", "--sample", "--commit-every", "--resume", "--device-memory",
        "--checkpoint-activations", "--validation", "--activation-tier", "--dtype", "--states",
    },
    "plan": {
        "--preset", "--layers", "--width", "--accumulation", "--tier", "--cpu-memory", "--chunk", "--split-master",
        "--speculate",
        "--json", "--param-tier", "--grad-tier", "--ranks", "--stage", "--device-memory", "--commit-every",
        "--tensor-parallel", "--partition-activations",
        "--config", "--gpu", "--ram", "--flops", "--disk-gb-per-s", "--frozen", "--batch", "--seq", "--activation-tier",
        "--dtype", "--gpu-memory", "--lora-rank", "--no-commits", "--optimizer", "--quantise", "--states", "--sweep",
        "--picture", "--machine", "--path", "--network", "--search", "--goal", "--model",
    },
    "doctor": {"--path", "--json"},
    "probe": {"paths", "--save", "--json"},
    "list": {"directory", "--depth", "--json"},
    "inspect": {"paths", "--json"},
    "convert": {"file", "--json"},
    "verify": {"paths", "--threads", "--json"},
    "export": {"paths", "--kind", "--fp32", "--json"},
    "remove": {"paths", "--yes", "--json"},
    "bench io": {"paths", "--size", "--rounds", "--quick", "--json"},
}  # fmt: skip


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, command in group.commands.items():
        found |= commands(command, f"{name} ") if hasattr(command, "commands") else {prefix + name: command}
    return found


def test_commands_and_options_are_those_decided_on() -> None:
    found = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands(typer.main.get_command(app)).items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("name", ["", *OPTIONS])
def test_help_explains_every_option(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    for option in OPTIONS.get(name, ()):
        assert option in result.stdout


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OffloadError("wrong thing"), "OffloadError: wrong thing"),
        (BudgetError("too big", needed=2, available=1, option="x"), "BudgetError: too big"),
        (TierIOError("read", 5, "swap", 4096, 512), "TierIOError: [Errno 5] read of 512 bytes at offset 4096"),
    ],
)
def test_library_errors_are_one_message_and_exit_code_2(error: OffloadError, message: str) -> None:
    result = CliRunner().invoke(app_that_raises(error), ["fail"])
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("pass resume=True to go on", "pass --resume to go on"),
        (
            'cpu_memory allows 1 MiB: give cpu_memory="131.5GiB" or more',
            "--cpu-memory allows 1 MiB: give --cpu-memory 131.5GiB or more",
        ),
        ('or tier="nvme" with a path', "or --tier nvme with a path"),
        ("or a smaller Tuning(chunk=...)", "or a smaller --chunk"),
        ("give Tuning(units=...) or keep_fp32=()", "give Tuning(units=...) or keep_fp32=()"),  # no options of it
        ("grad_tier='nvme' and commit_every=20", "--grad-tier nvme and commit_every=20"),
    ],
)
def test_errors_name_options_of_the_command(message: str, shown: str) -> None:
    assert in_options(message, {"--resume", "--cpu-memory", "--tier", "--chunk", "--grad-tier"}) == shown
    assert in_options(message, ()) == message


@pytest.mark.parametrize(
    ("given", "hint"),
    [("inspct", "did you mean inspect?"), ("resume", "the commands are train, plan"), ("info", "the commands are")],
)
def test_an_unknown_command_is_answered_with_the_near_one_or_with_all(given: str, hint: str) -> None:
    result = CliRunner().invoke(app, [given], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"No such command '{given}'; {hint}" in result.output
    assert "remove?" not in result.output  # which deletes


@pytest.mark.parametrize(
    "arguments", [["remove", "", "--yes"], ["export", ".", ""], ["bench", "io", ""], ["doctor", "--path="]]
)
def test_an_empty_argument_is_not_the_working_directory(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    with OffloadZero(model, path=".", cpu_memory="1MiB", commit_every=0) as optimizer:
        optimizer.commit()
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is empty: is a variable of the shell not set?" in result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_the_version_is_that_of_the_package_and_of_torch() -> None:
    result = CliRunner().invoke(app, ["--version"])
    installed = torch.__version__, torch.__version__.partition("+")[0]  # wheels may leave out what they are built for
    assert result.exit_code == 0
    assert result.stdout in [f"offload {version('offload')}, torch {one}\n" for one in installed]


def test_interrupt_is_exit_code_130() -> None:
    assert CliRunner().invoke(app_that_raises(KeyboardInterrupt()), ["fail"]).exit_code == 130


def test_other_errors_keep_their_traceback() -> None:
    error = RuntimeError("a bug")
    assert CliRunner().invoke(app_that_raises(error), ["fail"]).exception is error


def app_that_raises(error: BaseException) -> typer.Typer:
    failing = typer.Typer(cls=Commands)

    @failing.command()
    def fail() -> None:
        raise error

    @failing.command()
    def other() -> None: ...

    return failing


def test_interrupt_outside_a_command_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offload.cli.main.app", interrupted)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # pytest keeps its own
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130


PRINTS = """
import sys
from offload.cli import main
main.app = lambda: (print("x" * int(sys.argv[1])), sys.exit(0))
main.run()
"""


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_full_disk_is_one_message(count: int) -> None:
    """However much of what is printed waits in Python's buffer at the end."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PRINTS, str(count)]
        done = subprocess.run(command, cwd=SOURCE, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "OSError: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_pipe_that_is_closed_ends_a_command_in_silence(count: int) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-c", PRINTS, str(count)]
    done = subprocess.run(command, cwd=SOURCE, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


def test_json_refuses_what_json_has_no_word_for() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": float("nan")})


def test_help_does_not_wait_for_what_only_commands_need() -> None:
    code = "import offload.cli.main, sys; print([one in sys.modules for one in ('torch', 'matplotlib', 'cpuinfo')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False, False]\n"
