"""`offload plan --search`: rows that nothing else beats, each with the call that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from offload import OffloadZero, Tuning
from offload.cli import plan_search, plan_time
from offload.cli.main import app
from offload.demo.gpt import GPT, PRESETS
from offload.layout import build
from offload.planner import choice
from offload.planner.front import Costs
from offload.planner.simulate import Begun, NotPredicted, begin
from tests.support.command import printed
from tests.support.machine_files import MACHINE

SIZES = ("--batch", "1", "--seq", "64", "--dtype", "fp32", "--no-commits")
SMALL = ("--preset", "1m", *SIZES, "--states", "fp32", "--chunk", "16MiB")


@pytest.fixture
def machine(tmp_path: Path) -> str:
    file = tmp_path / "machine.toml"
    file.write_text(MACHINE)
    return str(file)


def run(machine: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--machine", machine, *options])


def searched(machine: str, *options: str) -> dict[str, Any]:
    return printed(run(machine, "--search", "--json", *options))


def test_the_first_row_is_as_good_as_every_plan_and_no_row_beats_another(machine: str) -> None:
    given = (*SMALL, "--accumulation", "1", "--grad-tier", "cpu")
    found = searched(machine, *given)
    rows = found["front"]
    for tier, param_tier in (("cpu", "device"), ("cpu", "cpu"), ("nvme", "device"), ("nvme", "nvme")):
        other = printed(
            run(machine, *given, "--tier", tier, "--param-tier", param_tier, "--cpu-memory", "least", "--json")
        )
        predicted = other["predicted"]
        assert rows[0]["tokens_per_s"] >= 0.97 * predicted["tokens_per_s"]
        costs = (
            1 / predicted["tokens_per_s"],
            other["cpu_total_bytes"],
            other["disk_bytes"],
            predicted["written_bytes"],
        )
        assert any(all(own <= 1.07 * cost for own, cost in zip(_costs(row), costs, strict=True)) for row in rows)
    costs_of_rows = [_costs(row) for row in rows]
    assert costs_of_rows == sorted(costs_of_rows)
    assert not any(
        one is not other and all(own <= cost for own, cost in zip(one, other, strict=True))
        for one in costs_of_rows
        for other in costs_of_rows
    )


def _costs(row: dict[str, Any]) -> tuple[float, ...]:
    return 1 / row["tokens_per_s"], row["cpu_bytes"], row["disk_bytes"], row["written_bytes"]


def test_the_call_of_a_row_makes_a_run_that_takes_and_moves_what_the_row_says(machine: str, tmp_path: Path) -> None:
    rows = searched(machine, *SMALL, "--tier", "nvme", "--param-tier", "device", "--accumulation", "2")["front"]
    row = next(row for row in rows if row["written_bytes"] and row["grad_tier"] == "cpu")
    model = GPT(PRESETS["1m"], 0)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tmp_path / "run"
    names = {
        "PATH": folder,
        "model": model,
        "optimizer": optimizer,
        "OffloadZero": OffloadZero,
        "Tuning": Tuning,
        "torch": torch,
    }
    made = eval(row["call"], names)
    with made:
        written = []
        for step in range(4):
            for number in range(2):
                tokens = torch.randint(0, 256, (1, 65), generator=torch.Generator().manual_seed(2 * step + number))
                model(tokens[:, :-1], tokens[:, 1:])[1].backward()
            made.step()
            made.zero_grad()
            made.synchronize()
            stats = made.stats()
            written.append(stats["nvme_written_bytes"] + stats["activation_written_bytes"])
        files = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
        assert made.stats()["cpu_budget_bytes"] == pytest.approx(row["cpu_memory"], rel=0.001)
    assert files == pytest.approx(row["disk_bytes"], rel=0.02)
    assert written[-1] - written[-2] == row["written_bytes"]


def test_the_front_is_that_of_all_candidates_simulated_to_the_end(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*SMALL, "--grad-tier", "cpu", "--activation-tier", "cpu")
    found = searched(machine, *given)
    ended: list[Begun] = []

    class Whole:
        """A simulation whose seconds say nothing before its end."""

        seconds = 0.0

        def __init__(self, *given: Any) -> None:
            begun = begin(*given)
            assert isinstance(begun, Begun)
            ended.append(begun)
            self.predict = begun.predict

    monkeypatch.setattr(plan_search.Search, "at_best", lambda self, one: Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0))
    monkeypatch.setattr(plan_time, "begin", Whole)
    whole = searched(machine, *given)
    assert found["front"] == whole["front"]
    fit = whole["candidates"] - sum(whole["not_fitting"].values())
    assert len(ended) == fit > len(found["front"]) + found["beaten"]


def test_a_search_looks_at_the_model_once_and_simulates_nothing_twice(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, list[Any]] = {"shapes": [], "layouts": [], "begun": [], "ended": []}

    def shaped(*given: Any, **options: Any) -> Any:
        made["shapes"].append(given)
        return of(*given, **options)

    def built(*given: Any, **options: Any) -> Any:
        made["layouts"].append(given[1])
        return build(*given, **options)

    def begun(held: Any, placement: Any, *given: Any) -> Any:
        made["begun"].append(placement)
        return begin(held, placement, *given)

    def ended(self: Begun) -> Any:
        made["ended"].append(self)
        return predict(self)

    of, predict = choice.ModelShape.of, Begun.predict
    monkeypatch.setattr(choice.ModelShape, "of", shaped)
    monkeypatch.setattr(choice, "build", built)
    monkeypatch.setattr(plan_time, "begin", begun)
    monkeypatch.setattr(Begun, "predict", ended)
    given = (
        "--preset",
        "1m",
        *SIZES,
        "--states",
        "fp32",
        "--grad-tier",
        "cpu",
        "--tier",
        "nvme",
        "--param-tier",
        "cpu",
    )
    found = searched(machine, *given, "--activation-tier", "cpu")
    assert len(made["shapes"]) == 1
    assert len(made["layouts"]) == len(set(made["layouts"]))  # one for each size of chunks
    fit = found["candidates"] - sum(found["not_fitting"].values())
    assert len({id(one) for one in made["begun"]}) == len(made["begun"])
    assert len(found["front"]) <= len(made["ended"]) <= len(made["begun"]) < fit


def test_what_is_not_predicted_is_counted_and_nothing_is_lost(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(held: Any, placement: Any, passes: Any, speeds: Any) -> Any:
        if placement.choice.params.tier.name == "cpu":
            return NotPredicted("made up")
        return begin(held, placement, passes, speeds)

    monkeypatch.setattr(plan_time, "begin", some)
    given = (*SMALL, "--accumulation", "1", "--tier", "cpu", "--grad-tier", "cpu", "--cpu-memory", "1GiB")
    found = searched(machine, *given, "--activation-tier", "device")
    assert sum(found["not_predicted"].values()) >= 1
    # Two tiers of parameters: nothing is open beside them.
    fits = len(found["front"]) + found["beaten"] + found["skipped"] + sum(found["not_predicted"].values())
    assert fits + sum(found["not_fitting"].values()) == found["candidates"] == 2
    shown = run(machine, "--search", *given, "--activation-tier", "device").stdout
    assert "that fit are not predicted: " in shown


def test_the_largest_model_fits_and_one_with_a_block_more_does_not(machine: str) -> None:
    given = ("--width", "256", *SIZES, "--states", "fp32", "--chunk", "4MiB", "--ram", "96MiB", "--accumulation", "1")
    tiers = ("--tier", "cpu", "--param-tier", "device", "--grad-tier", "cpu", "--activation-tier", "device")
    found = searched(machine, "--goal", "largest", *given, *tiers)
    fits = {
        blocks: printed_or_refused(
            run(machine, *given, *tiers, "--cpu-memory", "least", "--layers", str(blocks), "--json")
        )
        for blocks in (found["blocks"], found["blocks"] + 1)
    }
    assert list(fits.values()) == [True, False]


def printed_or_refused(result: Result) -> bool:
    """Whether a plan fits."""
    return result.exit_code == 0 and bool(printed(result)["fits"])


def test_tiers_that_are_given_as_auto_are_searched(machine: str) -> None:
    given = (*SMALL, "--tier", "cpu", "--accumulation", "1", "--activation-tier", "device")
    found = searched(machine, *given, "--param-tier", "auto", "--grad-tier", "auto")
    assert found["front"] == searched(machine, *given)["front"]


def test_the_least_ram_is_all_that_is_tried_where_it_is_asked_for(machine: str) -> None:
    tiers = ("--tier", "nvme", "--param-tier", "device", "--grad-tier", "cpu", "--activation-tier", "device")
    given = (*SMALL, *tiers, "--accumulation", "1")
    rows = searched(machine, *given, "--cpu-memory", "least")["front"]
    least = printed(run(machine, *given, "--cpu-memory", "least", "--json"))["peak_cpu_bytes"]
    assert {row["cpu_memory"] for row in rows if not row["split_master"]} == {least}


def test_a_frozen_base_may_wait_on_nvme_whose_adapters_are_in_ram(machine: str) -> None:
    given = (*SMALL, "--lora-rank", "1", "--tier", "cpu", "--grad-tier", "cpu", "--activation-tier", "device")
    found = searched(machine, *given, "--accumulation", "1", "--param-tier", "nvme")
    assert {row["frozen_tier"] for row in found["front"]} == {"nvme"}
    assert found["front"][0]["disk_bytes"] > 0


def test_the_largest_model_has_the_blocks_that_are_frozen(machine: str) -> None:
    given = ("--width", "64", *SIZES, "--states", "fp32", "--chunk", "4MiB", "--ram", "10MiB", "--accumulation", "1")
    tiers = ("--tier", "cpu", "--param-tier", "device", "--grad-tier", "cpu", "--activation-tier", "device")
    found = searched(machine, "--goal", "largest", *given, *tiers, "--frozen", "3")
    assert found["blocks"] >= 3


def test_least_wear_writes_least(machine: str) -> None:
    given = (*SMALL, "--param-tier", "device", "--grad-tier", "cpu", "--accumulation", "1")
    rows = searched(machine, "--goal", "least-wear", *given)["front"]
    written = [row["written_bytes_per_token"] for row in rows]
    assert written == sorted(written)


def test_people_see_a_table_the_calls_and_a_picture(machine: str, tmp_path: Path) -> None:
    file = tmp_path / "front.png"
    given = (*SMALL, "--tier", "cpu", "--grad-tier", "cpu", "--accumulation", "1")
    result = run(machine, "--search", *given, "--picture", str(file))
    assert result.exit_code == 0, result.output
    assert "the front, fastest first; predicted" in result.stdout
    assert '1: OffloadZero(model, optimizer, tier="cpu"' in result.stdout
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_search_of_which_nothing_is_predicted_says_why(tmp_path: Path) -> None:
    """A card whose link is not known."""
    file = tmp_path / "machine.toml"
    card = '[device]\nname = "a card"\nmemory = { value = "8GiB", source = "made up" }\n'
    file.write_text(MACHINE + card)
    tiers = ("--tier", "cpu", "--param-tier", "device", "--grad-tier", "cpu", "--activation-tier", "device")
    result = run(str(file), "--search", *SMALL, *tiers, "--accumulation", "1", "--picture", str(tmp_path / "x.png"))
    assert result.exit_code == 2
    assert "no time can be predicted: the speed of the link to the device is not known" in result.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--goal", "fastest"], "give --search, too"),
        (["--search", "--goal", "cheapest"], "choose one of fastest, least-wear, largest"),
        (["--search", "--sweep", "device_memory"], "give one of the two"),
        (["--search", "--goal", "largest", "--layers", "3"], "looks for the number of blocks"),
        (["--search", "--ranks", "2"], "--ranks 2 for several"),
        (["--search", "--tensor-parallel", "2"], "--tensor-parallel 2 for several"),
        (["--search", "--tier", "cpu", "--param-tier", "nvme"], "and no parameter is frozen"),
        (["--search", "--picture", "missing/front.png"], "there is no directory"),
        (["--search", "--dtype", "bf16"], "how fast this device computes is not known"),
        (["--search", "--optimizer", "adagrad"], "no time can be predicted"),
        (["--search", "--ram", "1MiB", "--chunk", "16MiB"], "of RAM are needed"),
    ],
)
def test_what_cannot_be_searched_is_said(machine: str, given: list[str], said: str) -> None:
    result = run(machine, "--preset", "1m", "--dtype", "fp32", *given)
    assert result.exit_code != 0
    assert said in " ".join(result.output.replace("│", " ").split())
