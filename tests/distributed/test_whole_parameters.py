"""Stages 1 and 2 with streamed parameters: every rank keeps all of them in its own tier, and gathers them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from offload import ConfigError, OffloadZero, Tuning
from tests.support import models, sharded
from tests.support.cases import some
from tests.support.ranks import Worlds
from tests.support.toy import take_step

TUNING = Tuning(chunk=4096, threads=1, bucket=4096)
PLACES = {
    "resident": {"stage": 2},
    "partitioned": {"stage": 3, "param_tier": "cpu"},
    "whole in RAM": {"stage": 1, "param_tier": "cpu"},
    "whole in slots": {"stage": 2, "param_tier": "nvme", "tier": "nvme"},
}


def _used(path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Everything that a user can do with parameters, between steps; returns what it leaves, and after the end."""
    model = models.build("gpt")
    batches = sharded.batches_of("gpt", model, dist.get_rank(), 2)
    found: dict[str, Tensor] = {}
    streams = "param_tier" in options

    def note(name: str) -> None:
        found.update({f"{name}.{key}": value.clone() for key, value in model.state_dict().items()})

    options = {"path": path, "commit_every": 0, "tier": "cpu", "tuning": TUNING} | options
    with OffloadZero(model, **options) as optimizer:

        def step() -> None:
            next(batches)().backward()
            optimizer.clip_grad_norm_(0.5)
            take_step(optimizer)

        step()
        note("saved")
        found.update({f"saved.handed.{name}": value for name, value in optimizer.weights()})
        assert {name for name, _ in optimizer.weights(since=0)} == {name for name, _ in model.named_parameters()}
        assert list(optimizer.weights(since=1)) == []
        with pytest.raises(ConfigError, match="the ranks would hand over different parameters"):
            optimizer.weights(since=dist.get_rank())
        with optimizer.gathered(model.blocks[1], writable=True), torch.no_grad():
            for param in model.blocks[1].parameters():
                param.mul_(0.5)
        step()
        model.load_state_dict({key: value * 1.5 for key, value in model.state_dict().items()})
        optimizer.commit()
        step()
        note("stepped")
        optimizer.rollback()
        note("rolled back")
        with torch.no_grad():
            found["logits"] = model(torch.arange(8).view(1, 8))[0].clone()
        step()
        for name, param in model.named_parameters():
            states = optimizer.state_of(param)
            found |= {f"{name}.{kind}": torch.as_tensor(value).clone() for kind, value in states.items()}
        files = optimizer.export(f"{path}/exported{dist.get_rank()}")
        assert all(file.stat().st_size > 0 for file in files)
        assert bool(files) == (dist.get_rank() == 0 or options["stage"] < 3)
        note("last")
    if options["stage"] < 3 or not streams:
        closed = {f"last.{key}": value for key, value in model.state_dict().items()}
        assert all(torch.equal(value, found[key]) for key, value in closed.items())
    return found


def test_all_uses_have_the_bits_of_resident_parameters(worlds: Worlds, tmp_path: Path) -> None:
    runs = {
        name: worlds(2).run(_used, str(tmp_path / name.replace(" ", "-")), options, timeout_s=100)
        for name, options in PLACES.items()
    }
    wanted = runs["resident"][0]
    handed = {key: value for key, value in wanted.items() if ".handed." in key}
    assert handed
    assert all(torch.equal(value, wanted[key.replace("handed.", "")]) for key, value in handed.items())
    for name, ranks in runs.items():
        for found in ranks:
            assert found.keys() == wanted.keys()
            assert [key for key, value in found.items() if not torch.equal(value, wanted[key])] == [], name


def _moved(path: str, stage: int, accumulation: int, mesh: tuple[int, int]) -> Any:
    """Bytes read and written in three steps, and those planned."""
    model = models.build("gpt")
    batches = models.losses("gpt", model)
    options: dict[str, Any] = {"stage": stage, "process_group": init_device_mesh("cpu", mesh), "commit_every": None}
    options |= {"accumulation": accumulation, "tuning": Tuning(chunk=4096, threads=1)}
    with OffloadZero(model, path=path, param_tier="nvme", **options) as optimizer:

        def step() -> dict[str, Any]:
            for _ in range(accumulation):
                (next(batches)() / accumulation).backward()
            take_step(optimizer)
            return optimizer.stats()

        step()
        before, *_, after = step(), step(), step(), step()
        moved = [after[f"nvme_{what}_bytes"] - before[f"nvme_{what}_bytes"] for what in ("read", "written")]
        planned = optimizer._placement
        return *moved, 3 * planned.read_bytes, 3 * planned.written_bytes


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("stage", "mesh"), some([(2, (1, 4)), (3, (2, 2)), (3, (1, 4))], [(3, (2, 2))]))
def test_new_values_are_not_read_again(
    worlds: Worlds, tmp_path: Path, stage: int, accumulation: int, mesh: tuple[int, int]
) -> None:
    """In the forward they are on the device before they leave RAM; each later pass reads all, but for what stayed."""
    args = (str(tmp_path / "run"), stage, accumulation, mesh)
    for read, written, may_be_read, may_be_written in worlds(4).run(_moved, *args, timeout_s=60):
        # What is under way between two steps counts for one of them.
        assert written <= 1.3 * may_be_written
        assert 0 < read <= 1.1 * may_be_read


class InTurn(nn.Module):
    """One unit of which parts are not in every step: the first two of rank 0's chunks, the last two of rank 1's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.some = nn.Parameter(torch.randn(2, 1024))
        self.always = nn.Parameter(torch.randn(4, 1024))
        self.never = nn.Parameter(torch.randn(2048))

    def forward(self, whole: bool) -> Tensor:
        used = [self.some, self.always] if whole else [self.always]
        return torch.cat(used).square().sum()


def _in_turn(options: dict[str, Any]) -> list[Tensor]:
    model = InTurn()
    with OffloadZero(model, tuning=TUNING, **options) as optimizer:
        for whole in (False, True, False):
            take_step(optimizer, model(whole))
    return list(model.state_dict().values())


def test_ranks_whose_chunks_do_not_all_change_send_as_many(worlds: Worlds) -> None:
    resident, *streamed = (
        worlds(2).run(_in_turn, options, timeout_s=30)
        for options in ({"stage": 2}, {"stage": 1, "param_tier": "cpu"}, {"stage": 2, "param_tier": "cpu"})
    )
    for found in (params for ranks in streamed for params in ranks):
        assert all(torch.equal(one, other) for one, other in zip(found, resident[0], strict=True))
