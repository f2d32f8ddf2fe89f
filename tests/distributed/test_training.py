"""Training over ranks has the bits of one process that adds the ranks' gradients in their order."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from offload import OffloadZero, Tuning
from offload.integrations.quantised import Quantised
from offload.layout import Layout, build
from offload.model.units import specs_of
from offload.storage.chunk_cache import Use
from tests.support import models, sharded
from tests.support.cases import products
from tests.support.quantised import adapt, quantise, quantised
from tests.support.ranks import RanksFailedError, Worlds
from tests.support.run_files import swaps_in
from tests.support.toy import Net, batch, squares, take_step
from tests.support.training import Run

TUNING = Tuning(chunk=4096, threads=1, bucket=4096)
_slow = partial(pytest.param, marks=pytest.mark.slow)
KINDS = ("gpt", "mlp", "conv", "sums")


def layout_of(kind: str, ranks: int) -> Layout:
    model = models.build(kind)
    specs, _ = specs_of(model, models.groups(model), models.keep_fp32(kind), torch.bfloat16)
    return build(specs, 1024, ranks=ranks).trained


@cache
def wanted(
    kind: str, ranks: int, steps: int, accumulation: int, stage: int, idle: bool, form: str = "fp32"
) -> sharded.Reference:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        made = sharded.Reference(kind, ranks, layout_of(kind, ranks), accumulation, stage == 1, idle, stage, form=form)
        made.train(steps)
    finally:
        torch.set_num_threads(before)
    return made


def trained(worlds: Worlds, kind: str, ranks: int, steps: int, idle: bool = False, **options: Any) -> list[Run]:
    """Runs it on all ranks, compares with one process, returns the runs."""
    options = {"tuning": TUNING, "accumulation": 1} | options
    runs: list[Run] = worlds(ranks).run(_train, kind, steps, idle, options, timeout_s=170)
    # Where stages have to agree there is one reference for all of them.
    stage = options["stage"] if idle or (options["stage"] == 1 and options["accumulation"] > 1) else 2
    form = options.get("states", "fp32")
    wanted(kind, ranks, steps, options["accumulation"], stage, idle, form).assert_same_bits(runs)
    return runs


def _train(kind: str, steps: int, idle: bool, options: dict[str, Any]) -> Run:
    """Options: a list has a value for each rank."""
    own = {name: value[dist.get_rank()] if isinstance(value, list) else value for name, value in options.items()}
    return sharded.train(kind, steps, idle=idle, **own)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_has_the_bits_of_one_process(worlds: Worlds, ranks: int, stage: int) -> None:
    trained(worlds, "mlp", ranks, 4, stage=stage)


@pytest.mark.parametrize("form", ["bf16", "8bit"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["gpt", "conv", "mlp"])
def test_small_states_have_the_bits_of_one_process(worlds: Worlds, kind: str, stage: int, form: str) -> None:
    """Blocks count from a parameter's start, whichever rank has them."""
    trained(worlds, kind, 3, 4, stage=stage, states=form)


@pytest.mark.parametrize(("form", "stage"), products(["bf16", "8bit"], [2, 3], often=[("bf16", 2), ("8bit", 3)]))
def test_small_states_of_split_masters_on_disks_have_them_too(
    worlds: Worlds, form: str, stage: int, tmp_path: Path
) -> None:
    tuning = Tuning(chunk=4096, threads=1, bucket=4096, split_master=True)
    options: dict[str, Any] = {"states": form, "path": str(tmp_path / "swap"), "cpu_memory": "least", "tuning": tuning}
    trained(worlds, "gpt", 2, 4, stage=stage, **options)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_every_kind_of_model(worlds: Worlds, kind: str, stage: int) -> None:
    """Tied weights, channels-last weights, modules kept in fp32: flats of two dtypes."""
    trained(worlds, kind, 2, 4, stage=stage)


@pytest.mark.parametrize(
    ("kind", "stage", "accumulation"),
    products(KINDS, [1, 2], [1, 2], often=[("gpt", 2, 1), ("mlp", 1, 2), ("conv", 1, 1), ("sums", 2, 2)]),
)
def test_every_kind_of_model_whose_ranks_stream_all_parameters(
    worlds: Worlds, kind: str, stage: int, accumulation: int
) -> None:
    """Of 4 ranks some have nothing of a small unit, and of a large one several chunks."""
    trained(worlds, kind, 4, 3, stage=stage, param_tier="cpu", accumulation=accumulation, wire="late")


@pytest.mark.parametrize("units", [None, ("head", nn.Linear)], ids=["head in the root", "head a unit"])
@pytest.mark.parametrize(("stage", "accumulation"), [(2, 2), (3, 1)])
def test_the_loss_without_logits(worlds: Worlds, stage: int, accumulation: int, units: Any) -> None:
    tuning = Tuning(chunk=4096, threads=1, bucket=4096, units=units)
    tier = "device" if stage == 2 else "cpu"
    trained(worlds, "words", 2, 3, stage=stage, param_tier=tier, accumulation=accumulation, tuning=tuning, wire="late")


@pytest.mark.parametrize(
    ("ranks", "stage", "accumulation"),
    products([3, 4], [1, 2, 3], [1, 2], often=[(3, 1, 2), (4, 2, 2), (3, 3, 1)]),
)
def test_sums_over_ranks_are_in_their_order(worlds: Worlds, ranks: int, stage: int, accumulation: int) -> None:
    trained(worlds, "sums", ranks, 2, accumulation=accumulation, stage=stage)


def _gaps(stage: int) -> int:
    """Elements of the states in gaps between parameters that are not 0, where buffers held other things before."""
    model = models.build("mlp")
    batches = models.losses("mlp", model)
    found = 0
    with OffloadZero(model, stage=stage, tuning=Tuning(chunk=4096, threads=1, bucket=4096)) as optimizer:
        for buffer in optimizer._parts.gradients._free:  # type: ignore[attr-defined]
            buffer.full.fill_(0x40)
        next(batches)().backward()
        optimizer.step()
        optimizer.synchronize()
        for chunk in optimizer._layout.chunks:
            inside = torch.zeros(chunk.numel, dtype=torch.bool)
            for piece in chunk.pieces:
                inside[piece.chunk_offset : piece.chunk_offset + piece.numel] = True
            with optimizer._parts.stores.states.lease(chunk.index, Use.READ, step=1) as lease:
                for state in lease.arrays:
                    found += int(state[~inside].count_nonzero())
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gaps_between_parameters_stay_zero(worlds: Worlds, stage: int) -> None:
    """They are committed with the rest."""
    assert worlds(3).run(_gaps, stage) == [0, 0, 0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("idle", [False, True])
def test_accumulation(worlds: Worlds, stage: int, idle: bool) -> None:
    """At stage 1 micro-batches are added before they travel, at 2 and 3 after."""
    trained(worlds, "mlp", 2, 4, accumulation=3, stage=stage, idle=idle)


@pytest.mark.parametrize("wire", ["late", "ordered"])
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_that_nobody_declared(worlds: Worlds, stage: int, idle: bool, wire: str) -> None:
    """A rank that is idle has no backward where the other one has three."""
    trained(worlds, "mlp", 2, 4, accumulation=3, declares=False, stage=stage, idle=idle, wire=wire)


def _with_any_number(path: str, accumulation: int | str, sets: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    """Args: sets: the number, before each step."""
    model, rank = Net(), torch.distributed.get_rank()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    with OffloadZero(model, adamw, path=path, accumulation=accumulation, **options) as optimizer:
        for step, micro_batches in enumerate((3, 3, 1, 4, 2)):
            if sets:
                optimizer.accumulation = micro_batches
            for number in range(micro_batches):
                (squares(model, batch(100 * step + 10 * number + rank)) / micro_batches).backward()
            found.append(optimizer.clip_grad_norm_(0.05))
            optimizer.step()
            optimizer.zero_grad()
        return found + [optimizer.state_of(param)["master"] for param in model.parameters()]


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        _slow({"tier": "cpu", "stage": 1}),
        _slow({"tier": "nvme", "stage": 2, "param_tier": "cpu"}),
        {"tier": "nvme", "grad_tier": "nvme", "stage": 2, "tuning": Tuning(chunk="256KiB", bucket=4096)},
        {"tier": "nvme", "stage": 3, "tuning": Tuning(chunk=4096, bucket=4096)},
    ],
)
def test_any_number_has_the_bits_of_the_largest(
    worlds: Worlds, tmp_path: Path, options: dict[str, Any], sets: bool
) -> None:
    fixed = worlds(2).run(_with_any_number, str(tmp_path / "fixed"), 4, False, options)
    found = worlds(2).run(_with_any_number, str(tmp_path / "any"), "auto", sets, options)
    for mine, wanted in zip(found, fixed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_without_gradients_counts_as_zeros(worlds: Worlds, stage: int) -> None:
    trained(worlds, "mlp", 2, 3, idle=True, stage=stage)


@pytest.mark.parametrize("wire", ["plain", "late"])
@pytest.mark.parametrize(("stage", "param_tier"), [(2, None), (2, "cpu"), (3, None)])
def test_ranks_may_use_other_parameters_of_a_block(
    worlds: Worlds, stage: int, param_tier: str | None, wire: str
) -> None:
    """Their buckets are full at other times, between other collectives: gathers of the next block, for one."""
    trained(worlds, "turns", 2, 4, idle=True, stage=stage, param_tier=param_tier, wire=wire)


def _committing(path: str, every: int | None) -> list[torch.Tensor]:
    """Without clipping, which would collect all gradients before the commit."""
    model = models.build("turns")
    rank = torch.distributed.get_rank()
    model.calls = rank  # type: ignore[assignment]
    batches = sharded.batches_of("turns", model, rank, 2)
    with OffloadZero(model, stage=2, path=path, commit_every=every, tuning=TUNING) as optimizer:
        for _ in range(4):
            take_step(optimizer, next(batches)())
        optimizer.synchronize()
        return [param.detach().clone() for param in model.parameters()]


def test_a_commit_may_come_when_not_all_ranks_have_sent_as_much(worlds: Worlds, tmp_path: Path) -> None:
    plain, *others = [
        params
        for every in (None, 1)
        for params in worlds(2).run(_committing, str(tmp_path / f"{every}"), every, timeout_s=40)
    ]
    for params in others:
        assert all(torch.equal(one, other) for one, other in zip(plain, params, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_collectives_at_the_last_moment_give_the_same_bits(worlds: Worlds, stage: int, accumulation: int) -> None:
    trained(worlds, "gpt", 2, 3, stage=stage, accumulation=accumulation, wire="late")


@pytest.mark.parametrize(
    ("bucket", "split_master", "place"),
    products(
        [4096, "32MiB"],
        [False, True],
        [(2, None), (2, "cpu"), (3, None)],
        often=[(4096, False, (2, None)), ("32MiB", True, (2, "cpu")), (4096, True, (3, None))],
    ),
)
def test_bucket_size_and_split_masters_change_no_bit(
    worlds: Worlds, bucket: int | str, split_master: bool, place: tuple[int, str | None]
) -> None:
    stage, param_tier = place
    tuning = Tuning(chunk=8192, threads=1, bucket=bucket, split_master=split_master)
    trained(worlds, "mlp", 3, 4, stage=stage, param_tier=param_tier, tuning=tuning)


TIERS: dict[str, dict[str, Any]] = {
    "device, resident": {"tier": "device"},
    "a device of its own, resident": {"tier": "device", "apart": True},
    "cpu, resident": {"tier": "cpu"},
    "nvme, resident": {"tier": "nvme"},
    "nvme, streaming from cpu": {"tier": "nvme", "param_tier": "cpu"},
    "nvme, streaming": {"tier": "nvme", "param_tier": "nvme"},
    "cpu, streaming": {"tier": "cpu", "param_tier": "cpu"},
}


APART: dict[str, dict[str, Any]] = {
    "cpu, resident": {"tier": "cpu"},
    "nvme, resident": {"tier": "nvme"},
    "nvme, streaming from cpu": {"tier": "nvme", "param_tier": "cpu"},
    "nvme, streaming, gradients too": {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme"},
}


def _on(tier: str, path: Path, stage: int, ranks: int) -> dict[str, Any]:
    options = TIERS[tier] | {"stage": stage, "tuning": TUNING}
    if options["tier"] == "nvme":
        options |= {"path": str(path), "cpu_memory": "least"}
    return options


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", TIERS)
def test_every_tier(worlds: Worlds, tmp_path: Path, stage: int, tier: str) -> None:
    path = tmp_path / "run"
    runs = trained(worlds, "mlp", 2, 3, **_on(tier, path, stage, 2))
    if "nvme" in tier:
        assert sorted(file.name[-2:] for file in swaps_in(path)) == ["-0", "-1"]
        for run in runs:
            assert run.stats["nvme_written_bytes"] > 0
            assert run.stats["streamed_chunks"] > 0


@pytest.mark.parametrize("wire", ["plain", "late"])
@pytest.mark.parametrize(
    ("stage", "tier"),
    [
        _slow(1, "cpu, resident"),
        (2, "cpu, resident"),
        (2, "nvme, streaming"),
        *((3, tier) for tier in TIERS if "stream" in tier),
    ],
)
def test_replicas_of_shards_have_the_bits_of_as_many_ranks(
    worlds: Worlds, tmp_path: Path, stage: int, tier: str, wire: str
) -> None:
    """Rank order goes along the rows of a mesh, from the first row to the last: what the mesh is changes no bit."""
    path = tmp_path / "run"
    trained(worlds, "sums", 4, 3, mesh=(2, 2), wire=wire, **_on(tier, path, stage, 4))


@pytest.mark.parametrize(
    ("kind", "mesh"),
    products(["gpt", "mlp"], [(4, 1), (1, 4), (2, 2)], often=[("gpt", (2, 2)), ("mlp", (4, 1)), ("mlp", (1, 4))]),
)
def test_meshes_of_every_shape(worlds: Worlds, kind: str, mesh: tuple[int, int]) -> None:
    """Tied weights; a parameter that gets a gradient in turn, frozen ones, partitions that are empty."""
    trained(worlds, kind, 4, 3, mesh=mesh, stage=3, accumulation=2)


@pytest.mark.parametrize(
    ("along", "stage"), products(["shard", "replicate"], [2, 3], often=[("shard", 3), ("replicate", 2)])
)
def test_a_data_parallel_group_inside_a_larger_mesh(worlds: Worlds, along: str, stage: int) -> None:
    options: dict[str, Any] = {"mesh": (2, 2), "along": along, "stage": stage, "tuning": TUNING}
    runs: list[Run] = worlds(4).run(_train, "mlp", 3, False, options, timeout_s=100)
    for row in ([0, 1], [2, 3]) if along == "shard" else ([0, 2], [1, 3]):
        wanted("mlp", 2, 3, 1, 2, False).assert_same_bits([runs[rank] for rank in row])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", APART)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_devices_with_memory_of_their_own(
    worlds: Worlds, tmp_path: Path, stage: int, tier: str, accumulation: int
) -> None:
    if "gradients" in tier and stage == 1 and accumulation == 2:
        pytest.skip("whole gradients do not go to slots")
    options = APART[tier] | {"stage": stage, "apart": True, "accumulation": accumulation, "tuning": TUNING}
    if options["tier"] == "nvme":
        options |= {"path": str(tmp_path / "run")}
    if "gradients" in tier:
        options["tuning"] = Tuning(chunk="256KiB", threads=1, bucket=4096)
    for run in trained(worlds, "mlp", 2, 3, wire="late", **options):
        assert run.stats["device_to_host_bytes"] > 0
        assert run.stats["peak_device_bytes"] > 2 * run.stats["parameters"]


@pytest.mark.parametrize(("stage", "param_tier"), [(1, None), _slow(2, "cpu"), _slow(3, None), (3, "nvme")])
def test_split_masters_on_devices_with_memory_of_their_own(
    worlds: Worlds, stage: int, param_tier: str | None, tmp_path: Path
) -> None:
    split = Tuning(chunk=8192, threads=1, bucket=4096, split_master=True)
    options: dict[str, Any] = {"stage": stage, "param_tier": param_tier, "apart": True, "wire": "late"}
    options |= {"path": str(tmp_path / "run"), "commit_every": 2, "tuning": split}
    trained(worlds, "mlp", 3, 4, **options)


@pytest.mark.parametrize("stage", [_slow(1), 2, 3])
def test_idle_ranks_on_devices_with_memory_of_their_own(worlds: Worlds, stage: int) -> None:
    trained(worlds, "turns", 2, 4, idle=True, stage=stage, apart=True, wire="late")


@pytest.mark.parametrize(
    ("kind", "stage"),
    products(["gpt", "conv", "sums"], [2, 3], often=[("gpt", 2), ("conv", 3), ("sums", 2)]),
)
def test_every_kind_of_model_on_devices_with_memory_of_their_own(worlds: Worlds, kind: str, stage: int) -> None:
    place: dict[str, Any] = {"param_tier": "cpu"} if stage == 2 else {"mesh": (2, 2)}
    trained(worlds, kind, 4, 3, stage=stage, apart=True, accumulation=2, **place)


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_stream_on_every_rank(worlds: Worlds, tmp_path: Path, stage: int, param_tier: str) -> None:
    """Stage 3 shards them, stages 1 and 2 keep all of them on each rank, and what is trained stays on the device."""
    options: dict[str, Any] = {"stage": stage, "param_tier": param_tier, "tier": "cpu", "wire": "late"}
    if param_tier == "nvme":
        options |= {"path": str(tmp_path / "run"), "commit_every": None, "cpu_memory": "80KiB"}
    for number, run in enumerate(trained(worlds, "adapted", 3, 4, **options)):
        assert run.stats["rank"] == number
        assert run.stats["param_tier"] == ("cpu" if stage == 3 else "device")
        assert run.stats["peak_device_bytes"] < 4 * 67 * 67 * 2


def _over_a_quantised_base(
    options: dict[str, Any], weights: Path | None = None, told: str | None = None
) -> tuple[list[tuple[float, float]], int]:
    """The loss of each step on this rank, and that of plain torch from the same values. Gradients are compared here.

    With `weights` the base is quantised while it is loaded, and kept; returns how often this rank did that, too. `told`
    is what the last rank says of the quantiser's settings.
    """
    model, plain, count = quantised(), quantised(), 0

    def quantiser(model: nn.Module) -> None:
        nonlocal count
        count += not next(model.parameters()).is_meta
        quantise(model)

    if weights is not None:
        with torch.device("meta"):
            model = Net(4)
        settings = told if told is not None and torch.distributed.get_rank() else "codes of 4 bits"
        options = options | {"init": Quantised(weights, quantiser, model, settings=settings), "device": "cpu"}
        adapt(model)
    mine, own = ([param for param in one.parameters() if param.requires_grad] for one in (model, plain))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    options = {"compute_dtype": torch.float32, "tier": "cpu", **options}
    losses = []
    with OffloadZero(model, torch.optim.AdamW(mine, lr=1e-2), tuning=TUNING, **options) as optimizer:
        for step in range(4):
            with optimizer.gathered(model), torch.no_grad():
                for one, other in zip(own, mine, strict=True):
                    one.copy_(other)
            grads = []
            for other_rank in range(ranks):
                plain.zero_grad()
                expected = squares(plain, batch(10 * step + other_rank))
                expected.backward()
                grads.append([one.grad for one in own])
                if other_rank == rank:
                    value = expected.item()
            loss = squares(model, batch(10 * step + rank))
            loss.backward()
            losses.append((loss.item(), value))
            for number, other in enumerate(mine):
                total = sum(of_rank[number] for of_rank in grads)  # type: ignore[misc]
                assert torch.equal(optimizer.grad(other), total / ranks)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    return losses, count


@pytest.mark.parametrize(("stage", "param_tier"), [(1, "cpu"), (3, "cpu"), (3, "nvme")])
def test_a_quantised_base_streams_on_every_rank(worlds: Worlds, tmp_path: Path, stage: int, param_tier: str) -> None:
    options: dict[str, Any] = {"stage": stage, "param_tier": param_tier}
    if param_tier == "nvme":
        options |= {"path": str(tmp_path / "run"), "commit_every": None, "cpu_memory": "172KiB"}
    for losses, _ in worlds(2).run(_over_a_quantised_base, options):
        assert all(found == expected for found, expected in losses)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 3)])
def test_ranks_share_a_kept_base(worlds: Worlds, tmp_path: Path, stage: int, ranks: int) -> None:
    """One of them makes it. Then other runs read it, whatever their stage is and however many ranks they have."""
    weights = tmp_path / "model.safetensors"
    save_file(Net(4).state_dict(), weights)
    options: dict[str, Any] = {"param_tier": "nvme", "commit_every": None, "path": str(tmp_path / "run")}
    for runs, made in (((stage, ranks), [8] + [0] * (ranks - 1)), ((3, 2), [0, 0])):
        found = worlds(runs[1]).run(_over_a_quantised_base, options | {"stage": runs[0]}, weights)
        assert [count for _, count in found] == made
        assert all(loss == expected for losses, _ in found for loss, expected in losses)
        (base,) = (tmp_path / "run").glob("base-*")
    assert base.stat().st_nlink == 1


def test_ranks_that_would_quantise_otherwise_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file(Net(4).state_dict(), weights)
    options: dict[str, Any] = {"param_tier": "nvme", "commit_every": None, "path": str(tmp_path / "run"), "stage": 3}
    with pytest.raises(RanksFailedError, match=r"ConfigError: the ranks differ in .* quantised base"):
        worlds(2).run(_over_a_quantised_base, options, weights, "codes of 3 bits")
    assert not [*tmp_path.glob("run/base-*")]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_twenty_steps(
    worlds: Worlds, tmp_path: Path, kind: str, stage: int, tier: str, ranks: int, accumulation: int
) -> None:
    options = _on(tier, tmp_path / "run", stage, ranks)
    trained(worlds, kind, ranks, 20, accumulation=accumulation, **options)


def _wander(stage: int, param_tier: str, wanders: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Forwards of its own on each rank, between steps, if it `wanders`."""
    model = models.build("gpt")
    rank = torch.distributed.get_rank()
    batches = sharded.batches_of("gpt", model, rank, 2)
    norms = []
    with OffloadZero(model, stage=stage, param_tier=param_tier, tuning=TUNING) as optimizer:
        for _ in range(3):
            if not wanders:
                next(batches)
            elif rank == 0:
                model.blocks[2](torch.ones(1, 4, 32, dtype=torch.bfloat16)).sum().backward()
                optimizer.zero_grad()
                with torch.no_grad():
                    next(batches)()
            else:
                model.blocks[0](torch.ones(1, 4, 32, dtype=torch.bfloat16)).sum().backward()
                optimizer.zero_grad()
                next(batches)
            next(batches)().backward()
            norms.append(optimizer.clip_grad_norm_(1.0).item())
            take_step(optimizer)
        optimizer.synchronize()
        with optimizer.gathered(model):
            return [param.detach().clone() for param in model.parameters()], norms


WHOLE = [_slow(1, "device"), (2, "device"), (2, "cpu")]
"""Stages and tiers of parameters of which every rank has all."""


@pytest.mark.parametrize(("stage", "param_tier"), WHOLE)
def test_ranks_may_run_other_forwards_before_whole_parameters(worlds: Worlds, stage: int, param_tier: str) -> None:
    """Landings are collectives: their order may not depend on what a rank enters first."""
    straight, straight_norms = worlds(2).run(_wander, stage, param_tier, False)[0]
    for wandered, norms in worlds(2).run(_wander, stage, param_tier, True, timeout_s=100):
        assert norms == straight_norms
        for one, other in zip(wandered, straight, strict=True):
            assert torch.equal(one, other)


def _read_in_between(stage: int) -> list[bool]:
    """Whether what rank 0 finds in a forward of its own, and rank 1 by reading, is the whole new value; and no old."""
    model = models.build("gpt")
    rank = torch.distributed.get_rank()
    batches = sharded.batches_of("gpt", model, rank, 2)
    seen: list[tuple[int, list[torch.Tensor]]] = []
    with sharded.communicators("late"), OffloadZero(model, stage=stage, tuning=TUNING) as optimizer:
        next(batches)().backward()
        before = [[param.detach().clone() for param in block.parameters()] for block in model.blocks]

        def look(*numbers: int) -> None:
            seen.extend((n, [param.detach().clone() for param in model.blocks[n].parameters()]) for n in numbers)

        for number in range(2):
            model.blocks[number].register_forward_hook(lambda *_, number=number: look(number, number + 1))
        take_step(optimizer)
        if rank == 0:
            with torch.no_grad():
                next(batches)()
        else:
            look(2, 0)
        optimizer.synchronize()
        after = [[param.detach().clone() for param in block.parameters()] for block in model.blocks]
    assert [number for number, _ in seen] == ([0, 1, 1, 2] if rank == 0 else [2, 0])

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    return [same(found, after[number]) and not same(found, before[number]) for number, found in seen]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_on_its_way_is_waited_for_by_whoever_uses_it_also_alone(worlds: Worlds, stage: int) -> None:
    assert worlds(2).run(_read_in_between, stage, timeout_s=100) == [[True] * 4, [True] * 2]


def _without_forward(stage: int, param_tier: str) -> list[torch.Tensor]:
    model = models.build("gpt")
    rank = torch.distributed.get_rank()
    batches = sharded.batches_of("gpt", model, rank, 2)
    with OffloadZero(model, stage=stage, param_tier=param_tier, tuning=TUNING) as optimizer:
        for step in range(3):
            if step != 1 or rank == 0:
                next(batches)().backward()
            optimizer.clip_grad_norm_(1.0)
            take_step(optimizer)
        optimizer.synchronize()
        with optimizer.gathered(model):
            return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("stage", "param_tier"), WHOLE)
def test_a_rank_may_have_a_step_without_forward(worlds: Worlds, stage: int, param_tier: str) -> None:
    first, second = worlds(2).run(_without_forward, stage, param_tier, timeout_s=50)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def _gathered_over_a_step(stage: int) -> bool:
    """Whether what is held over a step has its new value, of all ranks, as it is when it is gathered again."""
    model = models.build("gpt")
    batches = sharded.batches_of("gpt", model, torch.distributed.get_rank(), 2)
    with OffloadZero(model, stage=stage, param_tier="cpu", tuning=TUNING) as optimizer:
        next(batches)().backward()
        with optimizer.gathered(model):
            old = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            optimizer.synchronize()
            held = [param.detach().clone() for param in model.parameters()]
        with optimizer.gathered(model):
            now = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
    changed = any(not torch.equal(one, other) for one, other in zip(old, held, strict=True))
    return changed and all(torch.equal(one, other) for one, other in zip(held, now, strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_gathered_over_a_step_gets_the_other_ranks_new_values(worlds: Worlds, stage: int) -> None:
    assert worlds(2).run(_gathered_over_a_step, stage) == [True, True]


@pytest.mark.parametrize("stage", [2, 3])
def test_units_that_stay_have_the_bits_of_one_process(worlds: Worlds, stage: int) -> None:
    """What stays is gathered once a step, by all ranks or by none."""
    options: dict[str, Any] = {"stage": stage, "param_tier": "cpu", "accumulation": 2}
    less = trained(worlds, "gpt", 2, 4, **options)
    least = max(run.stats["peak_device_bytes"] for run in less)
    more = trained(worlds, "gpt", 2, 4, **options, device_memory=2 * least)
    for one, other in zip(less, more, strict=True):
        assert other.stats["gathered_bytes"] < one.stats["gathered_bytes"]
        assert other.stats["peak_device_bytes"] <= 2 * least
    trained(worlds, "gpt", 2, 4, **options, device_memory=[2 * least, least - 1])
