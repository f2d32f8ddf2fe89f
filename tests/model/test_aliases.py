"""Memory that overlaps a parameter's: views that modules have follow it, and what cannot is refused by name."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import BudgetError, ConfigError, OffloadZero, Tuning
from tests.support.before import Before

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {"tier": "nvme"},
    "device": {"tier": "device"},
    "streamed from cpu": {"param_tier": "cpu"},
    "streamed from nvme": {"param_tier": "nvme"},
    "activations": {"param_tier": "cpu", "activation_tier": "cpu"},
}
SMALL = Tuning(chunk="4KiB", threads=1)


class Viewed(nn.Module):
    """Uses views of its parameters, which were taken when it was built."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(3))
        self.last = nn.Linear(32, 4)
        self.frozen = nn.Linear(32, 4, bias=False).requires_grad_(False)
        middle: Any = self.blocks[1]
        self.register_buffer("rows", middle[0].weight.data[2:4])
        self.column = self.first.weight.detach()[:, 3]
        self.views = {"last": [self.last.weight.detach().t()], "frozen": self.frozen.weight.detach()}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(x + block(x)) * (1 + self.column) + self.rows.sum()
        views: Any = self.views
        return self.last(x) + x @ views["last"][0] + x @ views["frozen"].t()


def batch(step: int) -> Tensor:
    return torch.randn(3, 32, generator=torch.Generator().manual_seed(step))


def options_of(placement: str, path: Path) -> dict[str, Any]:
    options = dict(PLACEMENTS[placement]) | {"compute_dtype": torch.float32, "tuning": SMALL}
    if "nvme" in options.values():
        options["path"] = path
        with pytest.raises(BudgetError) as caught:
            OffloadZero(Viewed(), cpu_memory=1, **options)
        options["cpu_memory"] = caught.value.needed  # so that states stream, and updates are pending after a step
    return options


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    loss: Tensor = model(batch(number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_view_that_a_module_keeps_shows_what_its_parameter_is(placement: str, tmp_path: Path) -> None:
    plain, model = Viewed(), Viewed()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with OffloadZero(model, given, **options_of(placement, tmp_path / "run")) as optimizer:
        for number in range(4):
            assert torch.allclose(step(model, optimizer, number), step(plain, other, number), rtol=1e-5)
            assert torch.allclose(model.rows + 0, plain.rows, rtol=1e-5)  # before anybody uses the parameter
            assert torch.allclose(model.column.sum(), plain.column.sum(), rtol=1e-4)
            if number == 1:
                with torch.no_grad():
                    for one in (model, plain):
                        one.rows.mul_(2)
                        one.views["last"][0][0].zero_()  # type: ignore[index]
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        for name, value in torch.load(file).items():
            assert torch.allclose(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6), name
        twin = copy.deepcopy(model)
        assert type(twin.rows) is Tensor
    assert torch.equal(model.rows, model.blocks[1][0].weight[2:4])  # type: ignore[index]
    assert type(model.rows) is Tensor
    assert model.rows.data_ptr() == model.blocks[1][0].weight[2:4].data_ptr()  # type: ignore[index]
    OffloadZero(model, **options_of("cpu", tmp_path)).close()


def test_a_view_becomes_one_of_the_cast_parameter_and_keeps_none_of_the_old_memory() -> None:
    model = Viewed()
    with OffloadZero(model, cpu_memory="64MiB") as optimizer:
        gc.collect()
        rows, views = model.rows, model.views
        assert rows.dtype is views["frozen"].dtype is torch.bfloat16  # type: ignore[union-attr]
        assert rows._base is None or rows._base.dtype is torch.bfloat16
        step(model, optimizer, 0)
        assert torch.equal(rows, model.blocks[1][0].weight[2:4])  # type: ignore[index]
        assert torch.equal(views["frozen"], model.frozen.weight)  # type: ignore[arg-type]


def with_graph(model: Viewed) -> None:
    model.turned = model.last.weight.t()


def with_bits(model: Viewed) -> None:
    model.register_buffer("bits", model.last.weight.data.view(torch.int32))


def with_more(model: Viewed) -> None:
    memory = torch.zeros(100)
    model.last.bias.data = memory[4:8]
    model.register_buffer("memory", memory)


def with_a_tuple(model: Viewed) -> None:
    model.pair = (model.last.weight.data, 1)


def with_another_parameter(model: Viewed) -> None:
    model.others = [nn.Parameter(model.last.weight.data)]


def with_holes(model: Viewed) -> None:
    memory = torch.zeros(4, 8)
    model.last.bias.data = memory[:, 0]
    model.register_buffer("memory", memory)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_graph, "turned shares memory with last.weight"),
        (with_bits, "bits shares memory with last.weight"),
        (with_more, "memory shares memory with last.bias"),
        (with_a_tuple, r"pair\[0\] shares memory with last.weight"),
        (with_another_parameter, r"others\[0\] shares memory with last.weight"),
        (with_holes, "memory shares memory with last.bias"),
    ],
)
@pytest.mark.parametrize("placement", ["cpu", "streamed from cpu"])
def test_a_tensor_that_cannot_follow_its_parameter_is_refused_by_name(
    change: Callable[[Viewed], None], named: str, placement: str, tmp_path: Path
) -> None:
    model = Viewed()
    change(model)
    before = Before(model)
    with pytest.raises(ConfigError, match=named):
        OffloadZero(model, **options_of(placement, tmp_path))
    before.require_same()


def test_a_view_on_the_meta_device_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("rows", model[0].weight.data[:2])
    with pytest.raises(ConfigError, match=r"rows shares memory with 0\.weight"):
        OffloadZero(model, init=lambda name, tensor: tensor.zero_(), cpu_memory="64MiB")


def test_tensors_beside_a_parameter_and_the_parameter_itself_are_no_views(tmp_path: Path) -> None:
    model = Viewed()
    memory = torch.arange(8.0).view(4, 2)
    model.last.bias.data = memory[:, 0]
    model.register_buffer("beside", memory[:, 1])
    model.lists = [[model.last.weight], {"bias": model.last.bias}]
    model.rnn = nn.RNN(4, 4)
    with OffloadZero(model, **options_of("cpu", tmp_path)) as optimizer:
        step(model, optimizer, 0)
        assert model.beside.tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(4),
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(10).as_strided((4, 3), (2, 1)),
        torch.zeros(20).as_strided((3, 3), (2, 4)),
    ],
)
@pytest.mark.parametrize("placement", ["cpu", "streamed from cpu"])
def test_a_parameter_whose_own_elements_overlap_is_refused_by_name(
    tensor: Tensor, placement: str, tmp_path: Path
) -> None:
    model = Viewed()
    model.odd = nn.Parameter(tensor)
    before = Before(model)
    with pytest.raises(ConfigError, match="odd has elements that share memory"):
        OffloadZero(model, **options_of(placement, tmp_path))
    before.require_same()


def test_strides_that_look_like_an_overlap_and_are_none_are_trained(tmp_path: Path) -> None:
    model = Viewed()
    model.odd = nn.Parameter(torch.arange(8.0).as_strided((3, 2), (2, 3)))
    model.single = nn.Parameter(torch.arange(4.0).as_strided((1, 4), (0, 1)))
    with OffloadZero(model, **options_of("cpu", tmp_path)):
        assert model.odd.tolist() == [[0, 3], [2, 5], [4, 7]]
        assert model.single.tolist() == [[0, 1, 2, 3]]
