"""Tensor parallelism beside ZeRO, against torch's own with AdamW on fp32 masters."""

from __future__ import annotations

import copy
import os
import signal
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import offload.optimizer
from offload import OffloadZero, Tuning
from offload.checkpoint.export import entries, export
from offload.checkpoint.reader import Reader
from offload.errors import BudgetError, ConfigError, OtherRankError, StaleActivationError
from offload.grads.reduce_scatter import ReducedGradients
from offload.planner import least_cpu_memory
from offload.planner.placement import Most, Placement
from tests.support import sharded, tried
from tests.support import tensor_parallel as tp
from tests.support.cases import products
from tests.support.ranks import RanksFailedError, Worlds

STEPS = 3
CLOSE = 2e-3
"""Of losses and norms, relative: ours are rounded to bf16 after they were averaged, and torch sums in another order."""

PLACES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "streaming from cpu": {"stage": 2, "param_tier": "cpu"},
    "device": {"tier": "device"},
    "nvme": {"tier": "nvme", "stage": 2},
    "all on nvme, stage 3": {"tier": "nvme", "param_tier": "nvme", "stage": 3},
}
TRIED = Tuning(chunk=4096, threads=1, bucket=4096, speculate=True)


def options_of(place: str, path: Path) -> dict[str, Any]:
    options = PLACES[place]
    return options | {"path": str(path), "commit_every": None} if options.get("tier") == "nvme" else options


@cache
def plain(worlds: Worlds, ranks: int, plan: str, batch: int = tp.BATCH) -> list[tp.Trained]:
    """What the ranks train to with no option: what others are compared with, trained once for all tests."""
    return worlds(ranks).run(tp.train, STEPS, plan, 2, batch)


def same(ones: list[tp.Trained], others: list[tp.Trained]) -> bool:
    pairs = [*zip(ones, others, strict=True)]
    return all(
        one.losses == other.losses
        and one.norms == other.norms
        and all(torch.equal(one.masters[name], values) for name, values in other.masters.items())
        for one, other in pairs
    )


@pytest.mark.parametrize(("ranks", "plan"), products([2, 4], tp.PLANS, often=[(2, "plain"), (4, "sequence")]))
def test_losses_are_those_of_torchs_own(worlds: Worlds, ranks: int, plan: str) -> None:
    wanted = worlds(ranks).run(tp.train_by_torch, STEPS, plan)
    found = plain(worlds, ranks, plan)
    for one, other in zip(found, wanted, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=CLOSE)
        assert one.norms == pytest.approx(other.norms, rel=CLOSE)
        for name, values in other.masters.items():
            assert one.masters[name].shape == values.shape
            assert torch.allclose(one.masters[name], values, atol=tp.LR), name
    if ranks == 2:  # nothing is averaged
        assert found[0].losses[:2] == wanted[0].losses[:2]
    # Whole tensors, and the same on all ranks.
    assert same(found[1:2], [tp.Trained(found[1].losses, found[1].norms, found[0].masters)])
    stats = found[1].stats
    assert (stats["tensor_parallel_rank"], stats["tensor_parallel_ranks"], stats["ranks"]) == (1, 2, ranks // 2)


@pytest.mark.parametrize(
    ("place", "ranks", "plan"),
    products(PLACES, [2, 4], tp.PLANS, often=[("device", 2, "plain"), ("all on nvme, stage 3", 4, "sequence")]),
)
def test_tiers_and_stages_change_no_bit(worlds: Worlds, tmp_path: Path, place: str, ranks: int, plan: str) -> None:
    found = worlds(ranks).run(tp.train_with, STEPS, plan, options_of(place, tmp_path / "run"))
    assert same(found, plain(worlds, ranks, plan))


def _train_trying(path: str | None, plan: str, options: dict[str, Any]) -> tp.Trained:
    """Of steps whose norms are clipped to more, with trials of all that stream; path: None: without, states in RAM."""
    model, _, _, ranks = tp.made(plan)
    memory = least_cpu_memory(model, tuning=TRIED, ranks=ranks, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp, "CLIP", 1e6)
        if path is None:
            return tp.train(STEPS, plan, stage=options.get("stage"))
        tried.at_once(patch)
        tried.always(patch)
        patch.setattr(ReducedGradients, "_is_done", lambda self, reduction: True)  # who asks waits
        return tp.train(STEPS, plan, path=path, tuning=TRIED, cpu_memory=memory, **options)


@pytest.mark.parametrize(
    ("ranks", "plan", "options"),
    [
        (2, "plain", {}),
        pytest.param(2, "sequence", {"param_tier": "nvme"}, marks=pytest.mark.slow),
        pytest.param(4, "sequence", {"param_tier": "nvme", "stage": 3}, marks=pytest.mark.slow),
        pytest.param(4, "plain", {"stage": 2}, marks=pytest.mark.slow),
    ],
)
def test_parts_of_dtensors_that_are_stepped_in_backward_have_the_same_bits(
    worlds: Worlds, tmp_path: Path, ranks: int, plan: str, options: dict[str, Any]
) -> None:
    """A rank tries the steps of its own parts. What clips is the norm of whole tensors."""
    found, expected = (worlds(ranks).run(_train_trying, path, plan, options) for path in (tmp_path / "run", None))
    assert same(found, expected)
    assert all(one.stats["kept_bytes"] > 0 for one in found)


def _read(param_tier: str, outside: bool) -> list[str]:
    """What is wrong with parameters and gradients as DTensors, beside a plain model."""
    model, _, _, _ = tp.made("sequence")
    weight = model.blocks[1].attention.q.weight
    before = {name: tp._whole(param).bfloat16() for name, param in model.named_parameters()}
    with OffloadZero(model, param_tier=param_tier) as optimizer:
        wrong = []
        for name, param in model.named_parameters():
            if not isinstance(param, nn.Parameter):
                wrong.append(f"{name} is no parameter")
            whole = param.full_tensor() if isinstance(param, DTensor) else param.detach().clone()
            if not torch.equal(whole, before[name]):
                wrong.append(f"{name} reads otherwise")
        state = model.state_dict()
        if not isinstance(state["blocks.1.attention.q.weight"], DTensor):
            wrong.append("state_dict")
        tp.loss_of(model, next(tp.batches(0, 1))).backward()
        grad = optimizer.grad(weight)
        assert grad is not None
        if not isinstance(weight.grad.detach().clone(), DTensor):
            wrong.append("the gradient is no DTensor")
        if not torch.equal(weight.grad.clone().full_tensor().float(), grad):
            wrong.append("the gradient reads otherwise")
        norm = torch.nn.utils.get_total_norm([weight.grad])
        if abs(norm.item() / grad.norm().item() - 1) > 1e-5:
            wrong.append(f"the norm is {norm.item()}, and not {grad.norm().item()}")
        optimizer.zero_grad()
        with torch.no_grad():
            weight.mul_(2)
            local = weight.to_local()
            local.add_(1)
        master = optimizer.state_of(weight)["master"]
        if not torch.equal(master.bfloat16(), before["blocks.1.attention.q.weight"] * 2 + 1):
            wrong.append("a write does not count")
        return wrong


def _handed_over(options: dict[str, Any]) -> list[str]:
    """What is wrong with the weights that are handed over, beside the state dict of a model that was let go of."""
    found: dict[str, Tensor] = {}
    wrong: list[str] = []
    for hands_over in (True, False):
        model, data, rank, ranks = tp.made("sequence")
        adamw = torch.optim.AdamW(model.parameters(), lr=tp.LR)
        given = options if hands_over else {}
        with OffloadZero(model, adamw, process_group=data, **given) as optimizer:
            drawn = tp.batches(rank, ranks)
            for _ in range(2):
                tp.run_step(model, optimizer, next(drawn), tp.Trained())
            if hands_over:
                found = dict(optimizer.weights())
                wrong += [f"{name} since the last step" for name, _ in optimizer.weights(since=2)]
                wrong += [f"not {name} since 1" for name in found.keys() - dict(optimizer.weights(since=1)).keys()]
    expected = model.state_dict()
    if found.keys() != expected.keys():
        wrong.append(f"{found.keys() ^ expected.keys()}")
    for name, value in expected.items():
        one = found[name]
        if isinstance(one, DTensor) is not isinstance(value, DTensor):
            wrong.append(f"{name} is {type(one)}")
        elif not torch.equal(tp._whole(one), tp._whole(value)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("place", ["streaming from cpu", "all on nvme, stage 3"])
def test_weights_are_handed_over_as_dtensors(worlds: Worlds, tmp_path: Path, place: str) -> None:
    assert worlds(4).run(_handed_over, options_of(place, tmp_path / "run")) == [[]] * 4


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_a_held_dtensor_answers_as_one(worlds: Worlds, param_tier: str) -> None:
    assert worlds(2).run(_read, param_tier, False) == [[], []]


def _versions(param_tier: str) -> list[tuple[int, int]]:
    """Of all parameters, while their units run and from outside, after a write to the local parts alone."""
    model, _, _, _ = tp.made("sequence")
    with torch.no_grad():
        for param in model.parameters():
            if isinstance(param, DTensor):
                param.to_local().add_(1)
    running: dict[str, int] = {}
    for name, module in model.named_modules():
        own = {f"{name}.{key}".strip("."): param for key, param in module.named_parameters(recurse=False)}
        module.register_forward_hook(lambda *_, own=own: running.update((key, p._version) for key, p in own.items()))
    with OffloadZero(model, param_tier=param_tier, activation_tier="cpu") as optimizer:
        for _ in range(2):
            loss = tp.loss_of(model, next(tp.batches(0, 1)))
            versions = [(running[name], param._version) for name, param in model.named_parameters()]
            loss.backward()  # what it has saved is at the versions at which it was saved
            optimizer.step()
            optimizer.zero_grad()
    return versions


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_a_held_dtensor_has_one_version(worlds: Worlds, param_tier: str) -> None:
    """Its own, as in torch, whether its unit runs or not, and whatever the version of its local part is."""
    for versions in worlds(2).run(_versions, param_tier):
        assert [running for running, _ in versions] == [outside for _, outside in versions]


class Uneven(nn.Module):
    """A dimension of 3 over 2 ranks, and one of 1, of which the second rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.three = nn.Parameter(torch.randn(3, 5))
        self.one = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        both = self.three.sum(0) + self.one.sum(0)  # type: ignore[attr-defined]
        both = both.full_tensor() if isinstance(both, DTensor) else both
        return (x * both).sum()


def _uneven(sharded: bool, stage: int) -> tuple[Tensor, ...]:
    mesh = init_device_mesh("cpu", (2,))
    model = Uneven()
    if sharded:
        model.three = nn.Parameter(distribute_tensor(model.three.detach(), mesh, [Shard(0)]))
        model.one = nn.Parameter(distribute_tensor(model.one.detach(), mesh, [Shard(0)]))
    with OffloadZero(model, compute_dtype=torch.float32, stage=stage if sharded else None,
                     process_group=None if sharded else init_device_mesh("cpu", (2, 1))) as optimizer:  # fmt: skip
        for step in range(3):
            model(torch.arange(5.0) + step).backward()
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return norm, *(optimizer.state_of(param)["master"] for param in (model.three, model.one))


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_different_sizes(worlds: Worlds, stage: int) -> None:
    wanted = worlds(2).run(_uneven, False, stage)[0]
    for found in worlds(2).run(_uneven, True, stage):
        assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(found, wanted, strict=True))


def _exported(path: str) -> dict[str, Any]:
    model, _, _, _ = tp.made()
    with OffloadZero(model) as optimizer:
        whole = {name: tp._whole(param) for name, param in model.state_dict().items()}
        files = optimizer.export(path)
    torch.distributed.barrier()
    read = load_file(f"{path}/model.safetensors")
    return {"files": len(files), "same": all(torch.equal(read[name], values) for name, values in whole.items())}


def test_an_export_has_whole_tensors(worlds: Worlds, tmp_path: Path) -> None:
    found = worlds(2).run(_exported, str(tmp_path / "trained"))
    assert found == [{"files": 1, "same": True}, {"files": 0, "same": True}]


def _replicas_differ() -> list[Tensor]:
    """Norms that every rank has begin with other values on each."""
    model, data, _, _ = tp.made()
    with torch.no_grad():
        model.norm.weight.add_(torch.distributed.get_rank())
        head = model.head.weight.to_local()
        head.add_(torch.distributed.get_rank())
    with OffloadZero(model, process_group=data):
        return [model.norm.weight.detach().clone(), model.head.weight.full_tensor()]


def test_what_every_slice_has_comes_from_the_first_rank(worlds: Worlds) -> None:
    norms, heads = zip(*worlds(4).run(_replicas_differ), strict=True)
    assert all(torch.equal(one, torch.ones_like(one)) for one in norms)
    parts = [head.float() for head in heads]
    assert all(torch.equal(part, parts[0]) for part in parts)
    half = len(parts[0]) // 2
    assert (parts[0][half:].mean() - parts[0][:half].mean()).item() == pytest.approx(1, abs=0.2)


def _one_after_the_other() -> list[Tensor]:
    """Three models over one mesh: the groups that are made for one must not meet at the addresses of another's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
        model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh["tp"], [Shard(0)]))
        if mesh.get_rank() == 1:
            time.sleep(0.5)  # until the others have looked up its address
        with OffloadZero(model, process_group=mesh["dp"]) as optimizer:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            found.append(model.weight.to_local().clone())
    return found


def test_one_mesh_serves_several_models_one_after_the_other(worlds: Worlds) -> None:
    for first, second, third in worlds(4).run(_one_after_the_other):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def _refused(kind: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tp.GPT()
    group: Any = mesh["dp"]
    if kind == "two dimensions":
        weight = model.head.weight.detach()
        model.head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate(), Replicate()]))
    else:
        tp.parallelize(model, mesh["tp"])
    if kind == "two meshes":
        model.norm.weight = nn.Parameter(distribute_tensor(model.norm.weight.detach(), mesh["dp"], [Replicate()]))
    group = {"no group": None, "that of tensor parallelism": mesh["tp"], "both": mesh}.get(kind, group)
    given: list[torch.optim.Optimizer] = []
    if kind == "whole parameters":
        matrices = [param for name, param in model.named_parameters() if "blocks." in name and param.dim() == 2]
        rest = [param for param in model.parameters() if all(param is not one for one in matrices)]
        given = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    before = {name: (id(param), param.dtype) for name, param in model.named_parameters()}
    try:
        OffloadZero(model, *([given] if given else []), process_group=group)
    except ConfigError as error:
        assert {name: (id(param), param.dtype) for name, param in model.named_parameters()} == before
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no group", 'process_group=mesh["dp"]'),
        ("that of tensor parallelism", 'process_group=mesh["dp"]'),
        ("both", 'process_group=mesh["dp"]'),
        ("two dimensions", "shard parameters over the tensor-parallel one alone"),
        ("two meshes", "shard all over one mesh"),
        (
            "whole parameters",
            "is cut by tensor parallelism, and Muon steps whole parameters: give it another optimizer",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(worlds: Worlds, kind: str, says: str) -> None:
    for message in worlds(4).run(_refused, kind):
        assert says in message


def _has_no_room_later() -> str:
    """In the first slice one data-parallel rank has room for a unit more, and the other, asked again, for nothing."""
    rank, place = torch.distributed.get_rank(), offload.optimizer.place
    model, data, *_ = tp.made()

    def placed(*args: Any, most: Most | None = None, **options: Any) -> Placement:
        if most is not None and rank == 0:
            raise BudgetError("nothing is free any more", needed=2, available=1, option="cpu_memory")
        found = place(*args, most=most, **options)
        return replace(found, staying=frozenset({"blocks.0"})) if rank == 2 else found

    began = time.monotonic()
    with patch("offload.optimizer.place", placed), pytest.raises((BudgetError, OtherRankError)) as caught:
        OffloadZero(model, process_group=data, param_tier="cpu")
    assert time.monotonic() - began < 60  # and not after the timeout of a collective
    return str(caught.value)


def test_a_slice_without_room_is_heard_of_in_all(worlds: Worlds) -> None:
    first, *others = worlds(4).run(_has_no_room_later)
    assert first == "nothing is free any more"
    assert all(other.startswith(f"rank 0: BudgetError: {first}") for other in others)


def _not_finite() -> str:
    """Only the second tensor-parallel rank has it."""
    model, _, _, _ = tp.made()
    with OffloadZero(model, nonfinite="skip") as optimizer:
        tp.loss_of(model, next(tp.batches(0, 1))).backward()
        weight = model.blocks[0].up.weight
        if torch.distributed.get_rank() == 1:
            bad = weight.grad.detach().clone()
            bad.to_local()[0] = torch.inf
            weight.grad = bad
        optimizer.step()
        return f"{optimizer.stats()['skipped_steps']} skipped"


def test_what_is_not_finite_in_one_part_skips_the_step_on_all(worlds: Worlds) -> None:
    assert worlds(2).run(_not_finite) == ["1 skipped"] * 2


COMMITS: dict[str, dict[str, Any]] = {
    "resident": {},
    "stage 3, nvme": {"stage": 3, "param_tier": "nvme"},
    "split masters": {"stage": 2, "tuning": Tuning(chunk=4096, threads=1, bucket=4096, split_master=True)},
}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    products([4, 2], [4, 2], COMMITS, often=[(4, 2, "split masters"), (2, 4, "stage 3, nvme")]),
)
def test_a_commit_resumes_on_any_number_of_data_parallel_ranks(
    worlds: Worlds, tmp_path: Path, before: int, after: int, kind: str
) -> None:
    """At the same number with the bits of a run that was not interrupted."""
    options = COMMITS[kind] | {"path": str(tmp_path / "run"), "commit_every": 2}
    cut = worlds(before).run(tp.train_with, 2, "sequence", options)
    resumed = worlds(after).run(tp.train_with, 2, "sequence", options | {"resume": True})
    for one in resumed:
        assert one.losses == []
        assert all(torch.equal(one.masters[name], values) for name, values in cut[0].masters.items())
    if before == after:
        found = worlds(after).run(tp.train_with, 4, "sequence", options | {"resume": True})
        other = str(tmp_path / "straight")
        wanted = worlds(after).run(tp.train_with, 4, "sequence", options | {"path": other})
        assert found[0].losses == wanted[0].losses[2:]
        assert same(
            [replace(one, losses=[], norms=[]) for one in found], [replace(one, losses=[], norms=[]) for one in wanted]
        )


def test_another_number_of_tensor_parallel_ranks_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "run"), "commit_every": 1}
    worlds(2).run(tp.train_with, 2, "plain", options)
    for parts in (4, 1):
        with pytest.raises(RanksFailedError, match=f"tensor parallelism is over {parts} ranks, and over 2 when it was"):
            worlds(4 if parts == 4 else 2).run(_train_in, parts, options | {"resume": True})


def _train_in(parts: int, options: dict[str, Any]) -> Any:
    return tp.train(2, parts=parts, **options)


def test_what_is_committed_is_read_as_whole_tensors(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "run"
    options = {"path": str(path), "commit_every": 2, "stage": 2}
    found = worlds(4).run(tp.train_with, 2, "sequence", options)
    with Reader([path]) as reader:
        assert not [one.error for one in reader.verify() if one.error is not None]
        sizes = {row.facts.name: row.facts.shape for row in reader.tensors()}
        for name, values in found[0].masters.items():
            assert torch.equal(reader.read(name, "master"), values), name
            assert sizes[name] == values.shape
        export(tmp_path / "whole", entries(reader, dtype=torch.float32))
    read = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(read[name], values) for name, values in found[0].masters.items())


def _goes_back(path: str) -> bool:
    model, data, rank, ranks = tp.made()
    drawn = tp.batches(rank, ranks)
    with OffloadZero(model, process_group=data, path=path, commit_every=0) as optimizer:
        found = tp.Trained()
        tp.run_step(model, optimizer, next(drawn), found)
        optimizer.commit({"at": 1})
        before = tp.masters_of(model, optimizer)
        first, *_ = optimizer.snapshot()
        tp.run_step(model, optimizer, next(drawn), found)
        optimizer.rollback()
        after = tp.masters_of(model, optimizer)
        return all(torch.equal(after[name], values) for name, values in before.items()) and first.is_dir()


def test_a_rollback_goes_back_on_all(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(4).run(_goes_back, str(tmp_path / "run")) == [True] * 4


def _dies(path: str) -> None:
    model, data, rank, ranks = tp.made()
    drawn = tp.batches(rank, ranks)
    with OffloadZero(
        model, torch.optim.AdamW(model.parameters(), lr=tp.LR), process_group=data, path=path, commit_every=2,
        tuning=Tuning(chunk=4096, threads=1, bucket=4096), param_tier="nvme",
    ) as optimizer:  # fmt: skip
        for step in range(4):
            tp.run_step(model, optimizer, next(drawn), tp.Trained())
            if step == 2:
                torch.distributed.barrier()
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_killed_resumes(worlds: Worlds, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": str(tmp_path / "run"), "commit_every": 2, "param_tier": "nvme"}
    with pytest.raises(RanksFailedError, match="died"):
        worlds(2).run(_dies, options["path"])
    found = worlds(2).run(tp.train_with, 4, "plain", options | {"resume": True})
    wanted = worlds(2).run(tp.train_with, 4, "plain", options | {"path": str(tmp_path / "straight")})
    assert found[0].losses == wanted[0].losses[2:]
    assert all(torch.equal(found[1].masters[name], values) for name, values in wanted[1].masters.items())


KEPT: dict[str, dict[str, Any]] = {
    "device": {"activation_tier": "device"},
    "cpu": {"activation_tier": "cpu", "activation_memory": "1MiB"},
    "nvme": {"activation_tier": "nvme", "activation_memory": "32KiB", "commit_every": None, "tier": "nvme"},
    "stage 3": {"activation_tier": "cpu", "activation_memory": "1MiB", "stage": 3},
}
LARGE = 64
"""Sequences of a batch with which parts are many pages."""


@pytest.mark.parametrize(("ranks", "kind"), products([2, 4], KEPT, often=[(2, "device"), (2, "nvme")]))
def test_partitioned_checkpoints_change_no_bit_and_take_a_part(
    worlds: Worlds, tmp_path: Path, ranks: int, kind: str
) -> None:
    """What enters a block: batch x sequence x width in 16 bits, of which each of N ranks keeps 1/N."""
    options = KEPT[kind] | {"batch": LARGE}
    if kind == "nvme":
        options["path"] = str(tmp_path / "run")
    wanted = worlds(ranks).run(tp.train_with, STEPS, "plain", options)
    found = worlds(ranks).run(tp.train_with, STEPS, "plain", options | {"partition_activations": True})
    assert same(found, wanted)
    assert same(found, plain(worlds, ranks, "plain", LARGE))
    entering = LARGE * tp.SEQ * tp.WIDTH * 2
    for whole, part in zip(wanted, found, strict=True):
        assert part.stats["peak_activation_bytes"] == tp.BLOCKS * entering // 2
        assert whole.stats["peak_activation_bytes"] == (0 if kind == "device" else tp.BLOCKS * entering)
        assert part.stats["activation_written_bytes"] == whole.stats["activation_written_bytes"] // 2


@pytest.mark.parametrize("kind", [pytest.param("device", marks=pytest.mark.slow), "nvme"])
def test_what_is_cut_along_the_sequence_stays_as_it_is(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    options = KEPT[kind] | {"batch": LARGE}
    if kind == "nvme":
        options["path"] = str(tmp_path / "run")
    found = worlds(2).run(tp.train_with, STEPS, "sequence", options | {"partition_activations": True})
    assert same(found, plain(worlds, 2, "sequence", LARGE))
    part = tp.BLOCKS * LARGE * tp.SEQ * tp.WIDTH * 2 // 2
    assert [one.stats["peak_activation_bytes"] for one in found] == [0 if kind == "device" else part] * 2


def _other_batches(*, differ: tuple[bool, bool]) -> str:
    """Of the tensor-parallel ranks, in two steps."""
    model, _, _, _ = tp.made()
    drawn = tp.batches(0, 1)
    with OffloadZero(model, activation_tier="device", partition_activations=True) as optimizer:
        for is_other in differ:
            tokens, following = next(drawn)
            if is_other:
                tokens = (tokens + torch.distributed.get_rank()) % tp.WORDS
            tp.loss_of(model, (tokens, following)).backward()
            try:
                optimizer.step()
            except StaleActivationError as error:
                assert optimizer.stats()["step"] == 1
                optimizer.zero_grad()
                return str(error)
            optimizer.zero_grad()
    return ""


def _differing_later() -> str:
    return _other_batches(differ=(False, True))


def _differing_from_the_first() -> str:
    return _other_batches(differ=(True, True))


def test_checkpoints_that_are_alike_no_more_are_an_error(worlds: Worlds) -> None:
    for message in worlds(2).run(_differing_later):
        assert "the same on all tensor-parallel ranks before, and was not in this step" in message


def test_checkpoints_that_are_not_alike_stay_whole(worlds: Worlds) -> None:
    assert worlds(2).run(_differing_from_the_first) == ["", ""]


def _partition_alone(plan: str) -> str:
    try:
        OffloadZero(tp.GPT(), activation_tier="cpu", partition_activations=True, process_group=None)
    except ConfigError as error:
        return str(error)
    return ""


def test_partitioned_checkpoints_need_tensor_parallel_ranks(worlds: Worlds) -> None:
    for message in worlds(2).run(_partition_alone, "plain"):
        assert "no parameter is a DTensor that several ranks share" in message


def _idioms(param_tier: str) -> list[str]:
    """What goes wrong with calls that people make. Each of them is followed by a step."""
    model, _, _, _ = tp.made("sequence")
    batch, wrong = next(tp.batches(0, 1)), []
    weight = model.head.weight

    def check(name: str, is_so: bool) -> None:
        tp.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not is_so:
            wrong.append(name)

    with OffloadZero(model, param_tier=param_tier) as optimizer:
        check("a move to where it is", model.to("cpu") is model)
        for dtype in (torch.float32, torch.float16):
            with pytest.raises(ConfigError, match="would become"):
                model.to(dtype)
            check("a cast is refused", weight.dtype is torch.bfloat16)
        with pytest.raises(ConfigError, match="would become"):
            model.to("meta")
        with pytest.raises(RuntimeError, match="swap"):
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().float()))
        with pytest.raises(ConfigError, match="would move no value"):
            weight.data = weight.detach().clone()
        check("what is refused changes nothing", weight.device.type == "cpu")
        copied = copy.deepcopy(model).head.weight
        check("a copy", type(copied) is DTensor and isinstance(copied, nn.Parameter))
        state = {name: values * 2 for name, values in model.state_dict().items()}
        model.load_state_dict(state)
        check("a load", torch.equal(optimizer.state_of(weight)["master"].bfloat16(), tp._whole(state["head.weight"])))
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        check("a whole state_dict", torch.equal(whole["head.weight"], weight.full_tensor()))
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
        check("a load of whole tensors", isinstance(weight, DTensor))
        weight.data.mul_(2)
        before = weight.full_tensor()
        check("a write to p.data", torch.equal(optimizer.state_of(weight)["master"].bfloat16(), before))
        tp.loss_of(model, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipped = optimizer.clip_grad_norm_(1e9)
        optimizer.zero_grad()
        check("torch's clipping", norm > 1 and clipped.item() == pytest.approx(1, rel=1e-5))
        tp.loss_of(model, batch).backward()
        weight.grad.view(-1).zero_()
        grad = optimizer.grad(weight)
        assert grad is not None
        optimizer.zero_grad()
        check("a write through a view of a gradient", not grad.any())
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        check("an averaged model", torch.isfinite(tp.loss_of(averaged, batch)).item())
    tp.loss_of(model, batch).backward()
    if not isinstance(weight.grad, DTensor):
        wrong.append("the model after close()")
    return wrong


@pytest.mark.parametrize("param_tier", [pytest.param("device", marks=pytest.mark.slow), "cpu"])
def test_idioms_of_other_peoples_code(worlds: Worlds, param_tier: str) -> None:
    assert worlds(2).run(_idioms, param_tier) == [[], []]


def _apart(plan: str, wire: str, options: dict[str, Any]) -> tp.Trained:
    with sharded.communicators(wire), sharded.devices_apart(True):
        return tp.train(STEPS, plan, **options)


@pytest.mark.parametrize(("stage", "plan"), products([1, 3], tp.PLANS, often=[(1, "sequence"), (3, "plain")]))
def test_devices_with_memory_of_their_own(worlds: Worlds, stage: int, plan: str) -> None:
    """Every copy at the last moment that is allowed, and every collective of the data-parallel ranks."""
    options = {"stage": stage, "activation_tier": "cpu", "activation_memory": "1MiB"}
    found = worlds(4).run(_apart, plan, "late", options | {"partition_activations": True})
    assert same(found, plain(worlds, 4, plan))


def _adapted(param_tier: str, path: str | None) -> tuple[list[float], list[Tensor]]:
    """Blocks that are frozen, but for their norms; and a frozen one that is written to after two steps."""
    model, data, rank, ranks = tp.made("sequence")
    for name, param in model.blocks.named_parameters():
        param.requires_grad_("norm" in name)
    drawn, found = tp.batches(rank, ranks), tp.Trained()
    options: dict[str, Any] = {} if path is None else {"path": path, "tier": "cpu", "commit_every": 0, "resume": "auto"}
    adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=tp.LR)
    with OffloadZero(model, adamw, process_group=data, param_tier=param_tier, **options) as optimizer:
        start = 0 if optimizer.resumed is None else optimizer.resumed.step
        for step in range(4):
            pair = next(drawn)
            if step < start:
                continue
            tp.run_step(model, optimizer, pair, found)
            if step == 1 and path is not None:
                with torch.no_grad(), optimizer.gathered(model.blocks[1]):
                    model.blocks[1].up.weight.mul_(0.5)
                optimizer.commit()
                break
        with optimizer.gathered(model):
            values = [tp._whole(param) for param in model.parameters()]
    return found.losses, values


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_frozen_parts_stream_and_what_is_written_to_them_is_committed(
    worlds: Worlds, tmp_path: Path, ranks: int
) -> None:
    wanted = worlds(ranks).run(_adapted, "device", None)
    found = worlds(ranks).run(_adapted, "cpu", None)
    for one, other in zip(found, wanted, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[1], other[1], strict=True))
    path = str(tmp_path / "run")
    cut = worlds(ranks).run(_adapted, "cpu", path)
    # Over another number of data-parallel ranks each slice gets its own part of what was written.
    for others in {2, ranks}:
        resumed = worlds(others).run(_resumed_values, path)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed[1], cut[1][1], strict=True))


def _resumed_values(path: str) -> list[Tensor]:
    model, data, _, _ = tp.made("sequence")
    for name, param in model.blocks.named_parameters():
        param.requires_grad_("norm" in name)
    adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=tp.LR)
    with (
        OffloadZero(
            model, adamw, process_group=data, param_tier="cpu", path=path, tier="cpu", commit_every=0, resume=True
        ) as optimizer,
        optimizer.gathered(model),
    ):
        return [tp._whole(param) for param in model.parameters()]


def _over_replicas(stage: int) -> tp.Trained:
    """Replicas by shards by parts of the model: 2 x 1 x 2."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model, found = tp.GPT(), tp.Trained()
    tp.parallelize(model, mesh["tp"])
    drawn = tp.batches(mesh.get_local_rank("replicate"), 2)
    with OffloadZero(
        model, torch.optim.AdamW(model.parameters(), lr=tp.LR), stage=stage, process_group=mesh["replicate", "shard"]
    ) as optimizer:
        for _ in range(STEPS):
            tp.run_step(model, optimizer, next(drawn), found)
        found.masters = tp.masters_of(model, optimizer)
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_replicas_of_shards_beside_tensor_parallel_ranks(worlds: Worlds, stage: int) -> None:
    assert same(worlds(4).run(_over_replicas, stage), plain(worlds, 4, "plain"))
