"""A construction that fails late, or is interrupted: the model is what it was before, and can be trained and taken."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.held_model
import offload.optim.adopt
import offload.optimizer
from offload import ConfigError, OffloadZero, ResumeError, TierIOError, Tuning
from offload.model import flat_param, hooks
from offload.model.flat_param import FlatParameters
from offload.model.guard import Guards
from offload.model.hooks import Hooks
from offload.model.master_weights import MasterWeights
from offload.planner.placement import Placement
from offload.storage.chunk_cache import Store, Use
from tests.support.before import Before
from tests.support.cases import often
from tests.support.interrupted import interrupted_at
from tests.support.processes import arena_bytes, open_files

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "fp32": {"compute_dtype": torch.float32},
    "nvme": {"tier": "nvme"},
    "split": {"tier": "nvme", "split": True},
    "device": {"tier": "device"},
    "streamed from cpu": {"param_tier": "cpu"},
    "streamed from nvme": {"param_tier": "nvme"},
    "activations": {"activation_tier": "cpu"},
}
X = torch.linspace(-1, 1, 24).view(4, 6)


class Rich(nn.Module):
    """Parameters and buffers of many kinds, and what other people hang on a model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.short = nn.Parameter(torch.randn(8).bfloat16())
        self.transposed = nn.Parameter(torch.randn(8, 8).t())
        self.sliced = nn.Parameter(torch.randn(8, 16)[:, ::2])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.numbers = nn.Parameter(torch.arange(3), requires_grad=False)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("rows", self.first.weight.data[:2])
        self.views = {"bias": [self.first.bias.detach()[1:]], "base": self.base.weight.detach().t()}
        self.last = nn.Linear(8, 2)
        self.last.forward = self._last  # type: ignore[method-assign]
        self.calls = 0
        self.blocks[1].register_forward_hook(self._count)

    def _last(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.last.weight, self.last.bias)

    def _count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x) * self.short.to(x.dtype)
        x = torch.tanh(x @ self.transposed + x @ self.sliced) + self.base(x).to(x.dtype)
        return self._last(x.to(self.last.weight.dtype))


def options_of(placement: str, path: Path) -> dict[str, Any]:
    options = dict(PLACEMENTS[placement])
    tuning = Tuning(chunk="4KiB", threads=1, split_master=options.pop("split", None))
    if "nvme" in options.values():
        options["path"] = path
    return {"cpu_memory": "64MiB", "tuning": tuning, **options}


def trained(model: nn.Module) -> list[Tensor]:
    """Trains with plain torch."""
    plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(X).square().sum().backward()
        plain.step()
        plain.zero_grad()
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


class LateError(Exception):
    """No other exception."""


def failing(owner: Any, name: str, after: int = 0) -> Callable[[pytest.MonkeyPatch], None]:
    """Makes a function fail after so many calls. One of a class fails when it has done its work."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        plain, left = getattr(owner, name), [after]

        def mutated(*args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            if left[0] == 0:
                raise LateError
            left[0] -= 1
            return made

        monkeypatch.setattr(owner, name, mutated)

    return patch


LATE = {
    "a parameter is made dense": failing(FlatParameters, "make_dense", 1),
    "first masters": failing(MasterWeights, "make_flat"),
    "third masters": failing(MasterWeights, "make_flat", 2),
    "first flat parameter": failing(FlatParameters, "flatten"),
    "fourth flat parameter": failing(FlatParameters, "flatten", 3),
    "first repointed": failing(flat_param, "repoint"),
    "fifth repointed": failing(flat_param, "repoint", 4),
    "what it holds is noted": failing(FlatParameters, "remember"),
    "units": failing(offload.held_model, "units_of"),
    "answers": failing(offload.held_model, "Answers"),
    "access": failing(offload.held_model, "Access"),
    "hooks": failing(Hooks, "__init__"),
    "some hooks": failing(hooks, "hook_forward", 1),
    "hooks of gradients": failing(Hooks, "_hook_gradient", 2),
    "hooks of nodes": failing(Hooks, "hook_nodes"),
    "guards": failing(Guards, "__init__"),
    "classes": failing(Guards, "class_for", 1),
    "guarded": failing(FlatParameters, "guard_with"),
    "attached": failing(offload.optimizer, "Attached"),
    "reduction": failing(offload.optimizer, "stop_reducing"),
    "the optimizer's end": failing(offload.optim.adopt, "retire"),
    "the first line": failing(Placement, "describe"),
    "others to move": failing(offload.held_model, "compute_dtypes"),
}


def fresh_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.is_floating_point()], lr=1e-2)


def require_trainable(model: nn.Module, given: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    """It trains as a model that was never given to anybody, and can be taken, with the same optimizer."""
    assert all(map(torch.equal, trained(model), trained(Rich())))
    with OffloadZero(model, given, **options) as optimizer:
        model(X).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("phase", LATE)
def test_a_construction_that_fails_late_gives_the_model_back(
    phase: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Rich()
    before, given, options = Before(model), fresh_optimizer(model), options_of(placement, tmp_path / "run")
    gc.collect()
    resources = open_files(), arena_bytes()
    with monkeypatch.context() as patched:
        LATE[phase](patched)
        with pytest.raises(LateError) as caught:
            OffloadZero(model, given, **options)
        assert not hasattr(caught.value, "__notes__")
        del caught
    gc.collect()
    assert (open_files(), arena_bytes()) == resources
    before.require_same()
    require_trainable(model, given, options)


def frozen_half() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False))


@pytest.mark.parametrize("casts", [1, 2])
def test_a_frozen_parameter_that_was_cast_last_of_all_has_lost_its_values_and_the_error_says_so(
    casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frozen_half()
    before = Before(model)
    with monkeypatch.context() as patched:
        failing(offload.held_model, "move_param", casts - 1)(patched)
        with pytest.raises(LateError) as caught:
            OffloadZero(model, cpu_memory="64MiB")
    lost = ["1.weight"][: casts - 1]  # the larger one is cast first; the one that fails has its memory still
    assert [note.split()[0] for note in getattr(caught.value, "__notes__", [])] == lost
    for name, param, kind, values in before.params:
        assert before._of(param) == kind
        assert param.isnan().all() if name in lost else torch.equal(param, values)


@pytest.mark.parametrize("placement", ["cpu", "nvme", "streamed from nvme"])
@pytest.mark.parametrize("fails", [1, 4])
def test_a_model_on_the_meta_device_goes_back_there(
    fails: int, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.BatchNorm1d(6))
    weight: Any = model[0].weight
    weight.tag = "mine"
    before, given, left = Before(model), torch.optim.AdamW(model.parameters()), [fails]

    def fill(name: str, tensor: Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            raise LateError
        tensor.fill_(1)

    options = options_of(placement, tmp_path / "run")
    with pytest.raises(LateError) as caught:
        OffloadZero(model, given, init=fill, **options)
    assert not hasattr(caught.value, "__notes__")
    before.require_same()
    with monkeypatch.context() as patched:
        LATE["guarded"](patched)
        with pytest.raises(LateError):
            OffloadZero(model, given, init=fill, **options)
    before.require_same()
    with OffloadZero(model, given, init=fill, **options) as optimizer:
        model(X).square().sum().backward()
        optimizer.step()
        assert model[0].weight is weight
        assert weight.tag == "mine"


def test_a_meta_parameter_that_a_graph_keeps_is_refused_by_name_and_goes_back() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        kept = model[1].weight.view(36)
    before = Before(model)
    with pytest.raises(ConfigError, match=r"1\.weight is on the meta device, and a graph or a view"):
        OffloadZero(model, cpu_memory="64MiB")
    before.require_same()
    del kept
    OffloadZero(model, cpu_memory="64MiB").close()


def test_a_disk_that_fails_altogether_leaves_nan_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Rich()
    before, lease, works = Before(model), Store.lease, [True]

    def broken(self: Store, chunk: int, use: Use, **options: Any) -> Any:
        if works:
            return lease(self, chunk, use, **options)
        raise TierIOError("read", errno.EIO, "swap", 0, 4096)

    def fails(*_: object) -> None:
        works.clear()
        raise LateError

    with monkeypatch.context() as patched:
        patched.setattr(Store, "lease", broken)
        patched.setattr(FlatParameters, "guard_with", fails)
        with pytest.raises(LateError) as caught:
            OffloadZero(model, fresh_optimizer(model), **options_of("nvme", tmp_path / "run"))
    assert caught.value.__notes__[0].endswith("have lost the values and become NaN: build the model again")
    assert model.last.weight.isnan().all()
    assert torch.equal(model.base.bias, Rich().base.bias)  # frozen, and not moved yet
    for name, param, kind, values in before.params:
        assert before._of(param) == kind
        assert torch.equal(param, values) or param.isnan().all(), name


# A run that goes on.


def commit(model: nn.Module, path: Path, **options: Any) -> None:
    with OffloadZero(model, fresh_optimizer(model), path=path, cpu_memory="64MiB", **options) as optimizer:
        for _ in range(2):
            model(X).square().sum().backward()
            optimizer.step()
        if "param_tier" in options:
            with torch.no_grad():
                model[1].bias.fill_(2)  # frozen: commits carry it
        optimizer.commit()


def test_another_base_is_refused_before_anything_is_lost(tmp_path: Path) -> None:
    options = {"path": tmp_path, "tier": "device", "param_tier": "nvme", "cpu_memory": "64MiB"}
    del options["path"], options["cpu_memory"]
    commit(frozen_half(), tmp_path, **options)
    model = frozen_half()
    with torch.no_grad():
        model[1].weight[0, 0] = 3
    before = Before(model)
    with pytest.raises(ResumeError, match=r"1\.weight is frozen, and has other values") as caught:
        OffloadZero(model, path=tmp_path, resume=True, cpu_memory="64MiB", **options)
    assert not hasattr(caught.value, "__notes__")
    before.require_same()


@pytest.mark.parametrize("phase", ["guarded", "attached", "the first line"])
def test_a_resume_that_fails_gives_streamed_parameters_back(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(frozen_half(), tmp_path, param_tier="nvme")
    model = frozen_half()
    before = Before(model)
    with monkeypatch.context() as patched:
        LATE[phase](patched)
        with pytest.raises(LateError) as caught:
            OffloadZero(model, path=tmp_path, resume=True, cpu_memory="64MiB", param_tier="nvme")
    assert not hasattr(caught.value, "__notes__")
    before.require_same()
    with OffloadZero(model, path=tmp_path, resume=True, cpu_memory="64MiB", param_tier="nvme"):
        assert model[1].bias.eq(2).all()


def test_a_resume_that_fails_says_that_resident_parameters_have_lost_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(frozen_half(), tmp_path)
    model = frozen_half()
    before = Before(model)
    with monkeypatch.context() as patched:
        LATE["the first line"](patched)
        with pytest.raises(LateError) as caught:
            OffloadZero(model, path=tmp_path, resume=True, cpu_memory="64MiB")
    assert "0.weight and 1 others have lost the values" in caught.value.__notes__[0]
    for name, param, kind, values in before.params:
        assert before._of(param) == kind
        assert param.isnan().all() if name.startswith("0.") else torch.equal(param, values)


# Interrupts.

FAR_APART, CLOSE = 4999, 101


def interrupted_construction(placement: str, path: Path, instruction: int) -> bool:
    """Returns whether the interrupt came too late."""
    model = Rich()
    before, given, optimizer = Before(model), fresh_optimizer(model), None
    options = options_of(placement, path)
    try:
        with interrupted_at(instruction) as left:
            optimizer = OffloadZero(model, given, **options)
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", [])
        assert not notes or "base.bias" in notes[0]  # Ctrl-C while the last ones were cast
        if not notes:
            before.require_same()
            assert all(map(torch.equal, trained(model), trained(Rich())))
    if optimizer is not None:
        try:
            optimizer.close()
        except KeyboardInterrupt:  # it came in the last `__enter__` or `__del__`, after which no marked call ended
            optimizer.close()
    return left[0] > 0


def interrupted_at_places(placement: str, path: Path, apart: int) -> None:
    instruction = number = 1
    while not interrupted_construction(placement, path / str(number), instruction):
        number += 1
        instruction += apart


@pytest.mark.parametrize("placement", often(PLACEMENTS, "streamed from nvme"))
def test_ctrl_c_anywhere_in_a_construction_gives_the_model_back(placement: str, tmp_path: Path) -> None:
    interrupted_at_places(placement, tmp_path, FAR_APART)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ctrl_c_anywhere_in_a_construction_in_the_long_form(placement: str, tmp_path: Path) -> None:
    interrupted_at_places(placement, tmp_path, CLOSE)
