"""`offload plan` says what a simulated step takes, or why that is not predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from offload.cli.main import app
from offload.cli.options import network_of
from offload.cli.plan import beside_of, default_options, planned_of, waiting_of, work_of
from offload.cli.plan_models import Sized, sized
from offload.cli.plan_time import bar
from offload.errors import ConfigError
from offload.planner.explain import plan_of
from offload.planner.machine_file import find
from offload.planner.placement import TYPICAL_TBW
from offload.planner.routing import Routing
from tests.support.command import printed
from tests.support.machine_files import MACHINE


@pytest.fixture
def machine(tmp_path: Path) -> str:
    file = tmp_path / "machine.toml"
    file.write_text(MACHINE)
    return str(file)


def run(machine: str, *options: str) -> Result:
    given = ("--machine", machine, "--preset", "1m", "--dtype", "fp32", "--chunk", "512KiB", *options)
    return CliRunner().invoke(app, ["plan", *given])


def figures(machine: str, *options: str) -> dict[str, Any]:
    return printed(run(machine, "--json", *options))


def test_a_step_on_nvme_moves_what_the_plan_counts_and_takes_no_less_than_its_parts(machine: str) -> None:
    found = figures(machine, "--cpu-memory", "least", "--no-commits", "--batch", "1", "--seq", "16")
    predicted = found["predicted"]
    assert (predicted["read_bytes"], predicted["written_bytes"]) == (found["read_bytes"], found["written_bytes"])
    moved = found["read_bytes"] + found["written_bytes"]
    assert predicted["seconds"] >= moved / 2e9
    assert predicted["waits_for"] == "disk"
    assert sum(predicted["parts_s"].values()) == pytest.approx(predicted["seconds"])
    assert found["drive_life_steps"] == pytest.approx(TYPICAL_TBW / predicted["written_bytes"])
    # So many tokens compute for as long as the disk works; beside a forward, a third of that does.
    assert predicted["hiding_tokens"] > 16
    hidden = figures(
        machine, "--cpu-memory", "least", "--no-commits", "--batch", "1", "--seq", str(2 * predicted["hiding_tokens"])
    )["predicted"]
    assert hidden["parts_s"].get("disk", 0.0) < 0.02 * hidden["seconds"]


def test_states_in_ram_are_written_for_commits_alone(machine: str) -> None:
    found = figures(machine, "--commit-every", "10")["predicted"]
    assert found["read_bytes"] == 0
    assert found["written_bytes"] == found["commit_bytes"] / 10 > 0
    assert found["commit_s"] > 0


HOST = """
[host]
tile = { value = 3.0, source = "made up" }
chunk = { value = 5.0, source = "made up" }
"""


def test_chunks_and_tiles_take_what_python_takes(machine: str) -> None:
    """A chunk that streams 5 s, a tile 3 s forward and 3 s backward, beside which all else is next to nothing."""
    streamed = ("--cpu-memory", "least", "--no-commits", "--batch", "1", "--seq", "16")
    in_tiles = ("--tier", "cpu", "--param-tier", "cpu", "--device-memory", "700KiB", "--batch", "1", "--seq", "16")
    before = [figures(machine, *options) for options in (streamed, in_tiles)]
    assert not any("Python" in found["predicted"]["parts_s"] for found in before)
    Path(machine).write_text(MACHINE + HOST)
    chunks, tiles = (figures(machine, *options) for options in (streamed, in_tiles))
    assert chunks["predicted"]["seconds"] == pytest.approx(5.0 * chunks["chunks"], rel=0.01)
    assert chunks["predicted"]["parts_s"]["Python"] == pytest.approx(5.0 * chunks["chunks"])
    options = default_options(
        preset="1m", dtype="fp32", chunk="512KiB", tier="cpu", param_tier="cpu", device_memory="700KiB", batch=1,
        seq=16, machine=find(machine),
    )  # fmt: skip
    layout = planned_of(options, sized(options), None).layout
    count = sum(one.is_tile for one in layout.slices)
    assert count > 2
    more = tiles["predicted"]["seconds"] - before[1]["predicted"]["seconds"]
    assert more == pytest.approx(2 * 3.0 * count, rel=1e-6)


def test_tiles_on_a_cpu_take_what_they_read_and_write_beside(machine: str) -> None:
    """2 T N b bytes forward and T K (b + 4 + (n - 1) (b + 8)) backward, of T vectors of K elements, of which N elements
    are made, in n tiles, 4 bytes an element; on a device nothing."""
    options = default_options(
        preset="1m", dtype="fp32", chunk="512KiB", tier="cpu", param_tier="cpu", device_memory="700KiB", batch=3,
        seq=16, machine=find(machine),
    )  # fmt: skip
    model = sized(options)
    planned = planned_of(options, model, None)
    found = beside_of(planned, options, model, waiting_of(options, model)).tiled_bytes
    linears = {name: one for name, one in model.module.named_modules() if isinstance(one, nn.Linear)}
    in_tiles = {spec.unit: spec for spec in planned.layout.specs if spec.tile and spec.name[:-7] in linears}
    assert set(found) == set(in_tiles)
    for unit, spec in in_tiles.items():
        out, width = linears[spec.name[:-7]].weight.shape
        count = -(-spec.numel // spec.tile)
        assert found[unit] == (2 * 48 * out * 4, 48 * width * (8 + (count - 1) * 12))
    there = replace(planned, direct=False)
    assert beside_of(there, options, model, waiting_of(options, model)).tiled_bytes == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--ranks", "2"], "how fast the link between ranks is, is not known: --network 25GB/s gives it"),
        (["--optimizer", "adagrad"], "the optimizer steps is not known"),
        (["--dtype", "bf16"], "how fast this device computes is not known"),
        (["--accumulation", "1000"], "1,000 micro-batches a step take minutes to simulate"),
    ],
)
def test_what_is_not_predicted_is_said(machine: str, options: list[str], reason: str) -> None:
    found = figures(machine, *options)
    assert found["predicted"] is None
    assert reason in found["not_predicted"]


def test_matrices_take_their_operations(machine: str) -> None:
    """What is no matrix is stepped beside them, by Adam, at 1e9 elements a second."""
    found = figures(machine, "--optimizer", "muon")
    predicted = found["predicted"]
    assert found["update_seconds"] == pytest.approx(found["update_flops"] / 1e12)
    beside = found["parameters"] / 1e9
    assert found["update_seconds"] < predicted["parts_s"]["optimizer's kernels"] < found["update_seconds"] + beside


def test_ranks_wait_for_the_link_between_them(machine: str) -> None:
    options = ("--ranks", "2", "--stage", "2", "--tier", "cpu", "--no-commits")
    found = figures(machine, *options, "--network", "2MB/s")
    predicted, sent = found["predicted"], sum(found["sent_elements"].values())
    assert sum(predicted["sent"][f"{name}_bytes"] for name in ("reduce_scatter", "all_gather")) == 4 * sent
    assert predicted["waits_for"] == "other ranks"
    assert predicted["seconds"] >= 4 * sent / 2e6
    delayed = figures(machine, *options, "--network", "2MB/s,500ms")["predicted"]["seconds"]
    assert delayed >= predicted["seconds"] + 3 * 0.5  # of three questions at least
    described = Path(machine)
    figure = '{{ value = {}, source = "made up" }}\n'
    described.write_text("network = " + figure.format(2e6) + "network_delay = " + figure.format(0.5) + MACHINE)
    assert figures(machine, *options)["predicted"]["seconds"] == pytest.approx(delayed)


@pytest.mark.parametrize("given", ["25", "25GB", "0B/s", "25GB/s,5", "fast/s"])
def test_a_network_is_a_rate_and_a_delay(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"--network {given}: give a rate such as 25GB/s"):
        network_of(given)
    assert network_of("25GB/s, 20us") == (25e9, pytest.approx(20e-6))


def test_people_see_a_bar_and_a_picture(machine: str, tmp_path: Path) -> None:
    file = tmp_path / "step.png"
    result = run(machine, "--cpu-memory", "least", "--picture", str(file))
    assert result.exit_code == 0, result.output
    assert "Predicted by simulation" in result.output
    assert "\u2588" in result.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_bar_is_as_long_as_its_share() -> None:
    assert [(name, len(blocks)) for name, _, blocks in bar({"disk": 1.0, "compute": 3.0, "link": 0.0}, width=8)] == [
        ("compute", 6),
        ("disk", 2),
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_a_token_of_a_mixture_computes_with_the_experts_that_it_uses(trains: bool) -> None:
    module = nn.Module()
    module.dense = nn.Linear(8, 8, bias=False)
    module.experts = nn.Parameter(torch.zeros(4, 8, 8), requires_grad=trains)
    work = work_of(
        plan_of(module, direct=True, tier="cpu"),
        default_options(batch=2, seq=5),
        Sized(module, 0, 8, [], Routing(experts=4, per_token=2)),
    )
    assert (work.trained, work.frozen) == ((64 + 128, 0) if trains else (64, 128))
    assert work.forward_flops == 2 * 10 * (64 + 128)
