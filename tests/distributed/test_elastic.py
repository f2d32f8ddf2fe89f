"""Two machines under an elastic torchrun, with a slow link and a shared directory: one is killed and comes back.

The machines are network namespaces. The oracle is plain torch: one process that averages, in each step, the gradients
of the ranks that were there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cli.test_stored import call
from tests.support import elastic, nodes
from tests.support.nodes import Node
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOLERANCE = 1e-6
BACK_S = 60
"""Until processes have been started anew and have met."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """The first one has the rendezvous."""
    if reason := nodes.missing():
        pytest.skip(reason)
    with nodes.two_nodes(tmp_path) as made:
        try:
            yield made
        finally:
            for node in made:
                print(node.output.read_text()[-6000:] if node.output.exists() else "nothing was started")


def wait_for(file: Path, text: str = "", timeout_s: float = BACK_S) -> None:
    end = time.monotonic() + timeout_s
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < end, f"there is no {text} {file.name} after {timeout_s} s"
        time.sleep(0.02)


def ranks_by_step(log: Path) -> list[int]:
    """How many ranks took each step, of those steps that the final weights come from."""
    ranks: list[int] = []
    for line in map(json.loads, log.read_text().splitlines()):
        if "resumed" in line:
            assert line["resumed"] <= len(ranks)
            del ranks[line["resumed"] :]
        else:
            ranks.append(line["ranks"])
            assert len(ranks) == line["step"]
    return ranks


def trained(ranks: list[int]) -> dict[str, Tensor]:
    """By plain torch. Args: ranks: in each step."""
    model = elastic.model()
    optimizer = elastic.adamw(model)
    schedule = elastic.schedule_of(optimizer)
    for step, count in enumerate(ranks):
        for rank in range(count):
            elastic.loss_of(model, step, rank).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= count  # once, as the contract says: each of three parts rounded would be too far off
        nn.utils.clip_grad_norm_(model.parameters(), elastic.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((value - second[name]).abs().max().item() for name, value in first.items())


PLACES: dict[str, dict[str, Any]] = {
    "RAM": {"tier": "cpu"},
    "NVMe": {"tier": "nvme"},
    "sharded": {"param_tier": "nvme", "stage": 3},
}
LOST = {"": (7, 6), "-backward": (7, 6), "-commit": (6, 3)}
"""By what the killed machine was doing: after how many steps it stopped, and the commit that the other goes on from."""
ALONE, BACK = 10, 9
"""Steps after which the machine comes back, and those of them that are committed."""


@pytest.mark.parametrize(
    ("place", "where", "loses_power"),
    [("RAM", "-backward", True), ("NVMe", "-commit", False), ("sharded", "", False), ("sharded", "-commit", True)],
)
def test_a_killed_machine_is_done_without_and_comes_back(
    machines: tuple[Node, Node], tmp_path: Path, place: str, where: str, loses_power: bool
) -> None:
    """Args: loses_power: its connections stay open on the other machine."""
    stopped, committed = LOST[where]
    shared = tmp_path / "shared"
    shared.mkdir()
    lose = f"2-{stopped}{where}"
    (shared / f"hold-{lose}").touch()
    (shared / f"hold-1-{ALONE}").touch()

    def start(node: Node) -> None:
        script = ROOT / "tests" / "support" / "elastic.py"
        node.torchrun(script, str(shared), json.dumps(PLACES[place]), host=machines[0].address, nodes="1:2")

    for node in machines:
        start(node)
    wait_for(shared / f"held-{lose}")
    (shared / f"hold-{lose}").unlink()
    (machines[1].cut_off if loses_power else machines[1].kill)()
    wait_for(shared / f"held-1-{ALONE}")
    assert "RankError" in machines[0].output.read_text()
    machines[1].connect()
    start(machines[1])
    assert [node.wait(BACK_S) for node in machines] == [0, 0]

    ranks = ranks_by_step(shared / "log")
    assert ranks == [2] * committed + [1] * (BACK - committed) + [2] * (elastic.STEPS - BACK)
    found = torch.load(shared / "weights")
    assert difference(found, trained(ranks)) < TOLERANCE
    assert difference(found, trained([2] * elastic.STEPS)) > 100 * TOLERANCE
    assert call("verify", shared / "run").exit_code == 0


def test_the_example_goes_on_without_a_machine(machines: tuple[Node, Node], tmp_path: Path) -> None:
    """Its steps are as slow as the link."""
    first, second = machines
    for node in machines:
        node.limit("2mbit")
        node.torchrun(ROOT / "docs" / "examples" / "torchrun.py", str(tmp_path), host=first.address, nodes="1:2")
    wait_for(first.output, "step  6")
    second.kill()
    assert first.wait(BACK_S) == 0
    steps = re.findall(r"step +(\d+)  loss .*  ranks (\d)", first.output.read_text())
    alone = [int(step) for step, ranks in steps if ranks == "1"]
    assert alone[0] in (5, 9)  # after a commit, which is made in the step after it
    assert alone == list(range(alone[0], 25))
    losses = re.findall(r"loss (\S+)", first.output.read_text())
    assert float(losses[-1]) < float(losses[0]) / 2
