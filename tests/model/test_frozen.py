"""Frozen parameters that stream: laid out as trained ones are, without states. The oracle is plain torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from offload import OffloadZero, Tuning
from offload.errors import ConfigError
from offload.planner import decide
from offload.planner.explain import explain, plan_of
from offload.planner.placement import Placement
from offload.storage.slot_map import ChunkKind
from tests.support.run_files import reserved_in
from tests.support.streamed import in_little_memory
from tests.support.toy import WIDTH, Net, batch, squares, take_step

STEPS = 4
WHERE: list[tuple[str, str]] = [(tier, param) for tier in ("device", "cpu", "nvme") for param in ("cpu", "nvme")]


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(1, base.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(base.out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def adapted() -> Net:
    """A frozen model with low-rank weights in its blocks."""
    model = Net().requires_grad_(False)
    torch.manual_seed(4)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


def halves() -> Net:
    """A model of which the first blocks and the head's bias are frozen."""
    model = Net()
    model.blocks[:2].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


class Preferring(nn.Module):
    """A policy and its frozen reference in one module: the loss of direct preference optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Net(2), Net(2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        mine, theirs = self.policy(x).log_softmax(-1), self.reference(x).log_softmax(-1)
        gained = (mine - theirs)[:, 0] - (mine - theirs)[:, 1]
        return -nn.functional.logsigmoid(0.5 * gained)


class Tied(nn.Module):
    """An embedding, frozen, that the head is tied to, with a trained projection before it and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(17))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x[:, 0].abs() * 100).long() % 17)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h) * self.scale


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def options(tier: str, param_tier: str, path: Path, **more: Any) -> dict[str, Any]:
    """Of OffloadZero, with as many chunks as so small a model can have, all of which stream where some do."""
    tuning = Tuning(chunk=4096, **more.pop("tuning", {}))
    on_disk = {"path": path / "run"} if "nvme" in (tier, param_tier) else {}
    return {
        "tier": tier,
        "param_tier": param_tier,
        "compute_dtype": torch.float32,
        "commit_every": None,
        "tuning": tuning,
        **on_disk,
        **more,
    }


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Iterator[float]:
    for step in range(steps):
        loss = squares(model, batch(step))
        take_step(optimizer, loss)
        yield loss.item()


def assert_close(model: nn.Module, plain: nn.Module) -> None:
    values = model.state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(values[name], wanted, rtol=1e-5, atol=1e-6, msg=name)


def preferring() -> Preferring:
    return Preferring()


def tied() -> Tied:
    torch.manual_seed(5)
    return Tied()


@pytest.mark.parametrize("make", [adapted, halves, preferring, tied])
@pytest.mark.parametrize(("tier", "param_tier"), WHERE)
def test_trains_as_plain_torch_and_leaves_frozen_bits_alone(
    make: Any, tier: str, param_tier: str, tmp_path: Path
) -> None:
    model, plain = make(), make()
    frozen = {name: param.clone() for name, param in model.named_parameters() if not param.requires_grad}
    optimizer = in_little_memory(model, torch.optim.AdamW(trained(model)), **options(tier, param_tier, tmp_path))
    other = torch.optim.AdamW(trained(plain))
    torch.testing.assert_close(list(losses(model, optimizer)), list(losses(plain, other)), rtol=1e-5, atol=1e-6)
    assert_close(model, plain)
    for name, param in model.named_parameters():
        if name in frozen:
            assert torch.equal(param, frozen[name])
            assert param.grad is None
    stats = optimizer.stats()
    assert stats["peak_device_bytes"] <= optimizer._placement.device_bytes
    optimizer.close()
    assert_close(model, plain)


@pytest.mark.parametrize(("tier", "param_tier"), WHERE)
def test_what_is_written_to_a_frozen_parameter_counts(tier: str, param_tier: str, tmp_path: Path) -> None:
    model, plain = halves(), halves()
    optimizer = in_little_memory(model, torch.optim.AdamW(trained(model)), **options(tier, param_tier, tmp_path))
    other = torch.optim.AdamW(trained(plain))
    for both in ((model, optimizer), (plain, other)):
        for _ in losses(*both, steps=2):
            first, second = both[0].blocks[:2]
            with torch.no_grad():
                first.up.weight.mul_(0.9).add_(0.1 * both[0].blocks[2].up.weight)
            first.norm.bias.data += 0.25
            second.down.weight.data.copy_(torch.ones(WIDTH, 2 * WIDTH) / WIDTH)
        state = {name: value + 0.125 for name, value in first.down.state_dict().items()}
        first.down.load_state_dict(state)
    assert_close(model, plain)
    torch.testing.assert_close(list(losses(model, optimizer)), list(losses(plain, other)), rtol=1e-5, atol=1e-6)
    assert_close(model, plain)
    optimizer.close()


def test_few_trained_parameters_stay_while_others_stream(tmp_path: Path) -> None:
    model = Net().requires_grad_(False)
    model.head.bias.requires_grad_(True)
    optimizer = OffloadZero(model, **options("cpu", "cpu", tmp_path))
    address = model.head.bias.data_ptr()
    assert optimizer.stats()["param_tier"] == "device"
    take_step(optimizer, squares(model))
    assert model.head.bias.data_ptr() == address
    optimizer.close()


def test_trained_parameters_that_stay_are_written_pointed_and_saved_as_in_plain_torch(tmp_path: Path) -> None:
    model, plain = adapted(), adapted()
    with patch.object(decide, "SMALL", 1.0):
        optimizer = in_little_memory(model, torch.optim.AdamW(trained(model)), **options("cpu", "nvme", tmp_path))
    assert optimizer.stats()["param_tier"] == "device"
    for one, other in ((model, optimizer), (plain, torch.optim.AdamW(trained(plain)))):
        adapter = one.blocks[1].up
        for _ in losses(one, other, steps=1):
            adapter.down.data = torch.full((1, WIDTH), 0.25)
        state = adapter.state_dict()
        with torch.no_grad():
            adapter.up.add_(0.5)
        assert torch.equal(state["up"], adapter.up)  # they are one memory
        for _ in losses(one, other, steps=2):
            adapter.up.data.mul_(0.75)
    with optimizer.gathered(model.blocks[1], writable=True):
        model.blocks[1].up.base.bias.detach().numpy()
    assert_close(model, plain)
    optimizer.close()
    assert_close(model, plain)


def test_the_first_line_and_the_plan_count_what_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted()
    frozen_bytes = sum(4 * param.numel() for param in model.parameters() if not param.requires_grad)
    given = options("cpu", "nvme", tmp_path)
    planned = plan_of(model, direct=True, **given)
    placement = planned.place()
    rows = {(row.kind, row.tier.name): row.nbytes for row in explain(placement)}
    gaps = 4 * 64 * len(list(model.parameters()))  # at most, by which parameters are aligned
    assert frozen_bytes <= rows["frozen", "nvme"] <= frozen_bytes + gaps
    with OffloadZero(model, **given):
        reserved = reserved_in(tmp_path / "run")
    line = capsys.readouterr().err
    assert "of frozen ones streamed from NVMe" in line
    assert placement.disk_bytes == reserved


def test_from_the_second_step_on_as_much_is_read_as_planned(tmp_path: Path) -> None:
    """The order of the first step is known then, without the order in which the model was taken."""
    model = adapted()
    with in_little_memory(model, torch.optim.AdamW(trained(model)), **options("cpu", "nvme", tmp_path)) as optimizer:
        read = [0]
        for _ in losses(model, optimizer, 5):
            optimizer.synchronize()
            read.append(optimizer.stats()["nvme_read_bytes"])
    first, *later = (after - before for before, after in pairwise(read))
    assert len(set(later)) == 1
    assert later[0] <= first


@pytest.mark.parametrize("tier", ["cpu", "nvme", "device"])
def test_ram_that_is_left_keeps_frozen_chunks_which_are_not_read(tier: str, tmp_path: Path) -> None:
    def run(hold: Callable[..., OffloadZero], **memory: int) -> tuple[Placement, int]:
        """Also returns the bytes that the last step has read."""
        model = adapted()
        with hold(model, torch.optim.AdamW(trained(model)), **options(tier, "nvme", tmp_path), **memory) as optimizer:
            read = []
            for _ in losses(model, optimizer):
                optimizer.synchronize()
                read.append(optimizer.stats()["nvme_read_bytes"])
            found.append({name: value.clone() for name, value in model.state_dict().items()})
            return optimizer._placement, read[-1] - read[-2]

    found: list[dict[str, Tensor]] = []
    least, _ = run(in_little_memory)
    most, read = run(OffloadZero)
    assert not least.pools[ChunkKind.FROZEN].resident
    assert read == most.read_bytes == 0
    # All of the states stay in RAM, and some of the frozen parameters.
    whole = most.pools[ChunkKind.FROZEN].resident_bytes
    less = most.arena_bytes - whole // 4
    some, read = run(OffloadZero, cpu_memory=less)
    assert some.pools[ChunkKind.FROZEN].resident
    assert some.arena_bytes <= less
    # By each forward and each backward; chunks are also retained in the buffers of others.
    assert 0 < read <= some.read_bytes == 2 * (whole - some.pools[ChunkKind.FROZEN].resident_bytes) < least.read_bytes
    for values in found:
        for name, value in values.items():
            assert torch.equal(value, found[0][name]), name


def test_unfreezing_in_a_run_is_refused_and_names_the_parameter(tmp_path: Path) -> None:
    model = halves()
    optimizer = OffloadZero(model, torch.optim.AdamW(model.parameters()), **options("cpu", "cpu", tmp_path))
    model.blocks[0].up.requires_grad_(True)
    squares(model).backward()
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight was frozen when OffloadZero took the model"):
        optimizer.step()
    optimizer.close()


def test_another_optimizer_may_train_what_was_frozen(tmp_path: Path) -> None:
    """Its gradients are its own, and what it writes counts."""
    model, plain = halves(), halves()
    optimizer = OffloadZero(model, torch.optim.AdamW(trained(model)), **options("cpu", "cpu", tmp_path))
    for one, first in ((model, optimizer), (plain, torch.optim.AdamW(trained(plain)))):
        one.blocks[0].up.requires_grad_(True)
        second = torch.optim.SGD(one.blocks[0].up.parameters(), lr=0.1)
        for step in range(3):
            squares(one, batch(step)).backward()
            for other in (first, second):
                other.step()
                other.zero_grad()
    assert_close(model, plain)
    optimizer.close()


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_integer_and_quantised_parameters_stream_as_they_are(param_tier: str, tmp_path: Path) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8), requires_grad=False)
            self.eighth = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
            self.place = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
            self.wave = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            weight = (self.codes.to(x.dtype) - 128) / 128 + self.eighth.to(x.dtype)
            return (x @ weight)[:, self.place] * self.gain * self.wave.abs().to(x.dtype)

    torch.manual_seed(0)
    model: Any = nn.Sequential(Quantised(), Quantised(), Quantised())
    before = copy.deepcopy(model.state_dict())
    given = options("cpu", param_tier, tmp_path, compute_dtype=torch.bfloat16)
    optimizer = in_little_memory(model, torch.optim.AdamW(trained(model)), **given)
    x = torch.randn(4, WIDTH)
    for _ in range(2):
        take_step(optimizer, squares(model, x))
    for name, value in model.state_dict().items():
        if not name.endswith("gain"):
            assert value.dtype is before[name].dtype, name
            assert torch.equal(value.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)), name
    optimizer.close()


@pytest.mark.parametrize("param_tier", ["device", "cpu", "nvme"])
def test_scales_beside_quantised_weights_keep_their_dtype(param_tier: str, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
            self.adapter = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.adapter(x) + x @ (self.codes.float() * self.scale).to(x.dtype)

    torch.manual_seed(0)
    model: Any = nn.Sequential(Scaled(), Scaled(), Scaled())
    plain = copy.deepcopy(model)
    for module in plain:
        module.adapter.bfloat16()
    x = torch.randn(4, WIDTH)
    given = options("cpu", param_tier, tmp_path, compute_dtype=torch.bfloat16)
    with OffloadZero(model, torch.optim.AdamW(trained(model)), **given), torch.no_grad():
        assert torch.equal(model(x), plain(x.bfloat16()))
        assert all(module.scale.dtype is torch.float32 for module in model)


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_trained_parameters_that_stay_beside_a_streamed_base_are_not_tiled(param_tier: str, tmp_path: Path) -> None:
    """As a prompt encoder's. The base's layers are."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Linear(5, 40)
            self.blocks = nn.ModuleList(nn.Linear(40, 40).requires_grad_(False) for _ in range(40))

        def forward(self, x: Tensor) -> Tensor:
            x = self.prompt(x)
            for block in self.blocks:
                x = x + torch.tanh(block(x)) / 8
            return x

    torch.manual_seed(0)
    model: Any = Prompted()
    plain = copy.deepcopy(model)
    given = options("cpu", param_tier, tmp_path)
    given["tuning"] = dataclasses.replace(given["tuning"], tile=640)
    optimizer = OffloadZero(model, torch.optim.AdamW(trained(model)), **given)
    theirs = torch.optim.AdamW(trained(plain))
    for count in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(count))
        for one, other in ((model, optimizer), (plain, theirs)):
            take_step(other, squares(one, x))
    assert_close(model, plain)
    optimizer.close()


def test_a_wrapper_around_quantised_tensors_is_planned_by_what_it_takes(tmp_path: Path) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for layer in layers[:2]:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), torch.zeros_like(layer.weight)), False)
    model: Any = nn.Sequential(*layers)
    whole = 2 * 2 * WIDTH * WIDTH * 4  # two wrappers, two fp32 tensors each
    given = options("cpu", "device", tmp_path)
    with OffloadZero(model, torch.optim.AdamW(trained(model)), **given) as optimizer:
        planned = optimizer.stats()["peak_device_bytes"]
    trained_bytes = sum(param.nbytes for param in trained(model))
    assert whole + trained_bytes <= planned < whole + trained_bytes + 4096


def test_a_trained_parameter_over_the_memory_of_a_frozen_one_is_refused(tmp_path: Path) -> None:
    model = halves()
    model.blocks[2].up.weight = nn.Parameter(model.blocks[0].up.weight.data)
    with pytest.raises(ConfigError, match="share memory"):
        OffloadZero(model, **options("cpu", "device", tmp_path))


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_only_frozen_parameters_can_stream_from_a_slower_tier_than_states(tier: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="states take six times"):
        OffloadZero(Net(), **options(tier, "nvme", tmp_path))


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_frozen_layers_run_in_tiles(param_tier: str, tmp_path: Path) -> None:
    model, plain = adapted(), adapted()
    given = options("cpu", param_tier, tmp_path, tuning={"tile": 800})
    optimizer = in_little_memory(model, torch.optim.AdamW(trained(model)), **given)
    assert sum(spec.tile > 0 and spec.is_frozen for spec in optimizer._plan.held.specs) == 8
    other = torch.optim.AdamW(trained(plain))
    torch.testing.assert_close(list(losses(model, optimizer)), list(losses(plain, other)), rtol=1e-5, atol=1e-6)
    assert_close(model, plain)
    optimizer.close()


def test_a_wide_frozen_model_takes_a_unit_of_the_device_and_not_more(tmp_path: Path) -> None:
    model: Any = nn.Sequential(*(Adapted(nn.Linear(96, 96).requires_grad_(False)) for _ in range(12)))
    whole = sum(param.numel() * 2 for param in model.parameters())
    given = options("cpu", "cpu", tmp_path, compute_dtype=torch.bfloat16)
    planned = plan_of(model, direct=True, **given).place()
    optimizer = OffloadZero(model, torch.optim.AdamW(trained(model)), **given)
    for step in range(2):
        take_step(optimizer, squares(model, torch.randn(4, 96, generator=torch.Generator().manual_seed(step))))
    stats = optimizer.stats()
    assert stats["peak_device_bytes"] <= planned.device_bytes < whole / 2
    optimizer.close()
