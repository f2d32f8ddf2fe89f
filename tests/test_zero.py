"""OffloadZero as a torch optimizer: what users of PyTorch expect of one."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import AccumulationError, ClosedError, ConfigError, OffloadZero, ResumeError, Tuning
from offload.planner import least_cpu_memory
from offload.planner.explain import plan_of
from tests.support import models
from tests.support.toy import take_step


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(13, 67), nn.ReLU(), nn.Linear(67, 5))


def backward(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    loss: Tensor = model(torch.randn(8, 13, generator=generator)).float().square().mean()
    loss.backward()
    return loss


def first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def test_it_is_a_torch_optimizer_that_adopts_the_given_groups() -> None:
    model = mlp()
    adamw = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(adamw, 1, gamma=0.5)
    with OffloadZero(model, adamw) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups, adamw.param_groups, strict=True))
        assert optimizer.defaults["lr"] == 1e-2
        # A scheduler made before goes on to steer the same groups.
        for group in adamw.param_groups:
            group["lr"] = 5e-3
        assert {group["lr"] for group in optimizer.param_groups} == {5e-3}
        assert scheduler.optimizer is adamw
        assert "OffloadZero" in repr(optimizer)


def test_without_an_optimizer_it_is_adamw_with_torchs_defaults() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        assert optimizer.defaults == torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_the_model_keeps_class_names_identity_and_strides() -> None:
    model = models.build("conv")
    params, keys, strides = list(model.parameters()), list(model.state_dict()), [p.stride() for p in model.parameters()]
    with OffloadZero(model):
        assert [id(p) for p in model.parameters()] == [id(p) for p in params]
        assert list(model.state_dict()) == keys
        assert [p.stride() for p in model.parameters()] == strides
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert type(model) is models.ConvNet


def test_masters_come_from_the_uncast_values() -> None:
    model = mlp()
    before = first(model).detach().clone()
    with OffloadZero(model) as optimizer:
        state = optimizer.state_of(first(model))
        assert torch.equal(state["master"], before)
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()
        assert state["step"] == 0
        assert torch.equal(first(model), before.bfloat16())


def test_keep_fp32_keeps_parameters_inputs_and_outputs() -> None:
    model = models.build("conv")
    seen: list[torch.dtype] = []
    norm = next(m for m in model.modules() if isinstance(m, nn.GroupNorm))
    with OffloadZero(model, keep_fp32=[nn.GroupNorm]):
        norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model(torch.randn(2, 3, 5, 5))
        assert norm.weight.dtype is torch.float32
        assert model.head.weight.dtype is torch.bfloat16
        # The hook registered here runs after the library's own: fp32 going in, and the compute dtype coming out.
        assert seen == [torch.float32, torch.bfloat16]


def test_frozen_parameters_are_cast_and_left_alone() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    with OffloadZero(model) as optimizer:
        before = first(model).clone()
        backward(model)
        optimizer.step()
        assert first(model).dtype is torch.bfloat16
        assert torch.equal(first(model), before)
        assert optimizer.stats()["parameters"] == 67 * 5 + 5
        with pytest.raises(ConfigError, match="no parameter"):
            optimizer.state_of(first(model))


def test_tied_parameters_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(13, 13, bias=False) for _ in range(3))
            self.blocks[2].weight = self.blocks[0].weight

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Tied()
    with OffloadZero(model) as optimizer:
        backward(model)
        optimizer.step()
        assert optimizer.stats()["parameters"] == 2 * 169
        assert model.blocks[2].weight is model.blocks[0].weight
        assert optimizer.state_of(model.blocks[0].weight)["step"] == 1


def test_step_without_gradients_and_for_some_parameters_only() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        model[2](torch.randn(2, 67, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert [optimizer.state_of(p)["step"] for p in model.parameters()] == [0, 0, 1, 1]
        assert torch.equal(first(model), before[0])


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        with torch.no_grad():
            loss = optimizer.step(lambda: backward(model).item())
        assert loss > 0
        assert optimizer.state_of(first(model))["step"] == 1


def test_autograd_notices_that_a_step_changed_what_a_graph_saved() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        backward(model)
        stale = model(torch.randn(8, 13)).sum()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()


def test_step_hooks_and_profiling_are_torchs_own() -> None:
    model, seen = mlp(), []
    with OffloadZero(model) as optimizer:
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        backward(model)
        optimizer.step()
    assert seen == ["before", "after"]


def test_zero_grad_drops_what_came_since_the_last_step() -> None:
    model, twin = mlp(), mlp()
    with OffloadZero(model) as optimizer, OffloadZero(twin) as other:
        backward(model, seed=1)
        optimizer.zero_grad()
        assert first(model).grad is None
        backward(model, seed=2)
        backward(twin, seed=2)
        optimizer.step()
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_models_own_zero_grad_drops_too() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        backward(model)
        model.zero_grad()
        assert optimizer.grad(first(model)) is None
        optimizer.step()
        assert optimizer.state_of(first(model))["step"] == 0
        backward(model)
        optimizer.step()
        assert optimizer.state_of(first(model))["step"] == 1


def test_a_step_consumes_the_gradients_even_without_zero_grad() -> None:
    model, twin = mlp(), mlp()
    with OffloadZero(model) as optimizer, OffloadZero(twin) as other:
        for seed in (1, 2, 3):
            backward(model, seed)
            optimizer.step()
            backward(twin, seed)
            other.step()
            other.zero_grad()
        assert optimizer.grad(first(model)) is None
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_grad_is_what_the_step_will_use() -> None:
    model = mlp()
    seen: list[Tensor] = []
    first(model).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with OffloadZero(model) as optimizer:
        backward(model)
        grad = optimizer.grad(first(model))
        assert grad is not None
        assert (grad.dtype, grad.shape) == (torch.float32, first(model).shape)
        assert torch.equal(grad, seen[0].float())
        norm = optimizer.clip_grad_norm_(0.001)
        clipped = optimizer.grad(first(model))
        assert clipped is not None
        assert torch.equal(clipped, grad * (0.001 / (norm.item() + 1e-6)))


def test_clipping_is_torchs_on_the_same_gradients() -> None:
    model = mlp()
    copies: list[nn.Parameter] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: copies.append(_with_grad(p)))
    with OffloadZero(model) as optimizer:
        backward(model)
        norm = optimizer.clip_grad_norm_(0.01)
        theirs = torch.nn.utils.clip_grad_norm_(copies, 0.01)
        torch.testing.assert_close(norm, theirs)
        torch.testing.assert_close(optimizer.grad(first(model)), copies[-1].grad)
        # A second clipping sees the clipped gradients, as torch's would.
        torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), torch.tensor(0.01), rtol=1e-3, atol=0)


def _with_grad(param: Tensor) -> nn.Parameter:
    copy = nn.Parameter(param.detach().float().clone())
    assert param.grad is not None
    copy.grad = param.grad.float().clone()
    return copy


def test_a_gradient_assigned_by_hand_is_taken() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        first(model).grad = torch.full_like(first(model), 0.5)
        grad = optimizer.grad(first(model))
        assert grad is not None
        assert torch.equal(grad, torch.full(grad.shape, 0.5))
        optimizer.step()
        assert [optimizer.state_of(p)["step"] for p in model.parameters()] == [1, 0, 0, 0]


def test_declared_accumulation_sums_and_an_undeclared_backward_raises() -> None:
    model = mlp()
    with OffloadZero(model, accumulation=2) as optimizer:
        seen: list[Tensor] = []
        backward(model, 1)
        one = optimizer.grad(first(model))
        backward(model, 2)
        seen.append(optimizer.grad(first(model)))  # type: ignore[arg-type]
        optimizer.zero_grad()
        backward(model, 2)
        two = optimizer.grad(first(model))
        assert one is not None
        assert two is not None
        assert torch.equal(seen[0], one + two)
        backward(model, 1)
        with pytest.raises(AccumulationError, match=r"3rd time.*accumulation=2.*accumulation=N.*zero_grad"):
            backward(model, 3)


def test_lr_of_each_step_is_the_groups_and_may_be_a_tensor() -> None:
    model, twin = mlp(), mlp()
    adamw = torch.optim.AdamW(twin.parameters(), lr=torch.tensor(0.25), foreach=False)
    with OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1.0)) as a, OffloadZero(twin, adamw) as b:
        a.param_groups[0]["lr"] = 0.25
        backward(model)
        backward(twin)
        a.step()
        b.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_state_dict_holds_groups_step_and_path_and_no_tensors(tmp_path: Path) -> None:
    model = mlp()
    with OffloadZero(model, tier="nvme", path=tmp_path / "run") as optimizer:
        backward(model)
        optimizer.step()
        state = optimizer.state_dict()
        assert (state["step"], state["path"]) == (1, str(tmp_path / "run"))
        assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
        assert not any(isinstance(value, Tensor) for group in state["param_groups"] for value in group.values())
        state["param_groups"][0]["lr"] = 0.125
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.125
        with pytest.raises(ResumeError, match="step 0"):
            optimizer.load_state_dict({**state, "step": 0})


def test_state_dict_numbers_parameters_across_groups_as_torch_does() -> None:
    model = mlp()
    adamw = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    expected = [group["params"] for group in adamw.state_dict()["param_groups"]]
    with OffloadZero(model, adamw) as optimizer:
        assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == expected


def test_what_is_written_into_the_model_reaches_the_masters() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        backward(model)
        take_step(optimizer)
        kept = optimizer.state_of(first(model))["master"]
        with torch.no_grad():
            first(model)[0] = 2.0
        master = optimizer.state_of(first(model))["master"]
        assert torch.equal(master[0], torch.full((13,), 2.0))
        assert torch.equal(master[1:], kept[1:])
        model.load_state_dict({key: torch.zeros_like(value) for key, value in model.state_dict().items()})
        assert not optimizer.state_of(first(model))["master"].any()


def _disk_bytes() -> tuple[int, int]:
    """(read, written) by this process at the block layer."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def test_every_step_really_moves_24_bytes_a_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    options: dict[str, Any] = {"tier": "nvme", "path": tmp_path / "run", "tuning": Tuning(chunk="256KiB")}
    least = least_cpu_memory(model, tuning=options["tuning"])
    with OffloadZero(model, cpu_memory=least, **options) as optimizer:
        assert optimizer.stats()["streamed_chunks"] == optimizer.stats()["chunks"] == 24
        steps, parameters = 4, optimizer.stats()["parameters"]
        optimizer.synchronize()
        before = optimizer.stats()
        read, written = _disk_bytes()
        for _ in range(steps):
            take_step(optimizer, model(torch.randn(4, 512)).sum())
        optimizer.synchronize()
        stats = {name: optimizer.stats()[name] - before[name] for name in ("nvme_read_bytes", "nvme_written_bytes")}
        assert stats["nvme_read_bytes"] == pytest.approx(12 * parameters * steps, rel=0.02)
        assert stats["nvme_written_bytes"] == pytest.approx(12 * parameters * steps, rel=0.02)
        now_read, now_written = _disk_bytes()
        # Some file systems (tmpfs) count nothing; where bytes are counted, they are these.
        if now_written > written:
            assert now_read - read >= stats["nvme_read_bytes"]
            assert now_written - written >= stats["nvme_written_bytes"]


def test_memory_held_is_what_the_plan_said(tmp_path: Path) -> None:
    model = mlp()
    options: dict[str, Any] = {"tier": "nvme", "path": tmp_path / "run", "tuning": Tuning(chunk="4KiB")}
    planned = plan_of(model, direct=True, **options).place()
    with OffloadZero(model, **options) as optimizer:
        assert optimizer.stats()["peak_cpu_bytes"] == planned.arena_bytes


def test_close_unhooks_the_model_and_may_be_called_twice() -> None:
    model = mlp()
    optimizer = OffloadZero(model)
    backward(model)
    optimizer.close()
    optimizer.close()
    assert first(model).grad is None
    first(model).float()
    model(torch.randn(2, 13, dtype=torch.bfloat16)).sum().backward()
    assert isinstance(first(model).grad, Tensor)
    # The model may be taken again.
    model.zero_grad()
    with OffloadZero(model) as again:
        backward(model)
        again.step()


def test_closing_says_that_inputs_are_not_cast_any_more_if_any_were(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(2, 13)
    line = "offload: closed: the model stays in torch.bfloat16, and its inputs are not cast any more"
    optimizer = OffloadZero(model := mlp())
    expected = model(x)
    optimizer.close()
    optimizer.close()
    told = capfd.readouterr().err
    assert told.count(line) == 1
    assert told.endswith("give it torch.bfloat16, or call model.float()\n")
    with pytest.raises(RuntimeError, match="dtype"):  # torch's, a line below ours
        model(x)
    assert torch.equal(model(x.bfloat16()), expected)  # what the line says
    assert model.float()(x).dtype is torch.float32
    with OffloadZero(model := mlp()):
        model(x.bfloat16())
    with OffloadZero(model := mlp(), cast_forward_inputs=False), suppress(RuntimeError):
        model(x)
    with pytest.raises(KeyError), OffloadZero(model := mlp()):
        raise KeyError(model(x))  # which says what ended the run
    assert "closed" not in capfd.readouterr().err


def test_a_state_dict_of_something_else_is_refused_with_what_to_give() -> None:
    other = nn.Linear(3, 3)
    with OffloadZero(model := mlp()) as optimizer:
        sizes = [len(list(model.parameters()))]
        with pytest.raises(ResumeError, match=re.escape(f"groups have [2] parameters, and the optimizer's {sizes}")):
            optimizer.load_state_dict(torch.optim.AdamW(other.parameters()).state_dict())
        for wrong in (model.state_dict(), {}, {"param_groups": 3}, {"param_groups": [3]}, {"param_groups": [{}]}):
            with pytest.raises(ResumeError, match=r"of no optimizer.*give what state_dict\(\) of an OffloadZero"):
                optimizer.load_state_dict(wrong)


CLOSED: dict[str, Callable[[OffloadZero, nn.Parameter], object]] = {
    "step": lambda optimizer, _: optimizer.step(),
    "clip_grad_norm_": lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
    "accumulation": lambda optimizer, _: setattr(optimizer, "accumulation", 2),
    "state": lambda optimizer, param: optimizer.state[param]["exp_avg"].sum(),
    "grad": lambda optimizer, param: optimizer.grad(param),
    "gathered": lambda optimizer, param: optimizer.gathered([param]).__enter__(),
    "generating": lambda optimizer, _: optimizer.generating().__enter__(),
    "state_of": lambda optimizer, param: optimizer.state_of(param),
    "timeline": lambda optimizer, _: optimizer.timeline("t.json").__enter__(),
    "apply": lambda optimizer, _: optimizer.apply("eval"),
    "attach": lambda optimizer, _: optimizer.attach(other=nn.Linear(1, 1)),
    "commit": lambda optimizer, _: optimizer.commit(),
    "snapshot": lambda optimizer, _: optimizer.snapshot(),
    "rollback": lambda optimizer, _: optimizer.rollback(),
    "export": lambda optimizer, _: optimizer.export("out"),
    "add_param_group": lambda optimizer, param: optimizer.add_param_group({"params": [param]}),
    "consolidate_state_dict": lambda optimizer, _: optimizer.consolidate_state_dict(),
    "load_state_dict": lambda optimizer, _: optimizer.load_state_dict(optimizer.state_dict()),
    "synchronize": lambda optimizer, _: optimizer.synchronize(),
    "weights": lambda optimizer, _: next(iter(optimizer.weights())),
    "with": lambda optimizer, _: optimizer.__enter__(),
}
GO_ON = {"zero_grad", "stats", "state_dict", "close"}
"""Methods that loops call at their end, and that say or do what is true of a closed optimizer, too."""


@pytest.mark.filterwarnings("ignore:this state dict has hyper-parameters only")
@pytest.mark.parametrize("name", CLOSED)
def test_whatever_a_closed_optimizer_is_asked_for_the_error_names_close(name: str) -> None:
    optimizer = OffloadZero(model := mlp())
    backward(model)
    optimizer.step()
    optimizer.close()
    with pytest.raises(ClosedError, match=r"was closed, by close\(\).*make a new one"):
        CLOSED[name](optimizer, first(model))
    for method in GO_ON:
        getattr(optimizer, method)()


def test_no_method_was_forgotten_there() -> None:
    methods = {name for name, value in vars(OffloadZero).items() if name[0] != "_" and inspect.isfunction(value)}
    assert methods <= CLOSED.keys() | GO_ON


@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "its own"])
@pytest.mark.parametrize("options", [{"tier": "cpu"}, {"param_tier": "cpu"}, {"tier": "nvme"}], ids=str)
def test_a_model_is_freed_with_its_last_name_once_the_optimizer_is_closed(
    options: dict[str, Any], adopted: bool, tmp_path: Path
) -> None:
    """As a plain model is: without Python's collector, which no allocator of a device calls when it is full."""
    if options.get("tier") == "nvme":
        options = {**options, "path": tmp_path / "run"}

    def left(*, held: bool) -> list[bool]:
        """Which of model, parameter, optimizer and adopted optimizer are still alive."""
        model = mlp()
        given = torch.optim.AdamW(model.parameters()) if adopted else None
        optimizer: Any = (
            OffloadZero(model, given, **options) if held else given or torch.optim.AdamW(model.parameters())
        )
        for seed in range(2):
            loss = backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        del loss
        if held:
            optimizer.close()
        names = [weakref.ref(one) for one in (model, first(model), optimizer, given) if one is not None]
        del model, given, optimizer
        return [name() is not None for name in names]

    gc.collect()
    gc.disable()
    try:
        assert not any(left(held=False))
        assert not any(left(held=True))
    finally:
        gc.enable()


def steps_equal(model: nn.Module, twin: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_autograd_grad_beside_a_backward_takes_nothing_away(accumulation: int) -> None:
    model, twin = mlp(), mlp()
    with (
        OffloadZero(model, accumulation=accumulation) as optimizer,
        OffloadZero(twin, accumulation=accumulation) as other,
    ):
        for seed in range(accumulation):
            backward(model, seed)
            backward(twin, seed)
            torch.autograd.grad(model(torch.ones(2, 13)).float().sum(), list(model.parameters()))
        optimizer.clip_grad_norm_(0.01)
        other.clip_grad_norm_(0.01)
        torch.autograd.grad(model(torch.ones(2, 13)).float().sum(), list(model.parameters()))
        optimizer.step()
        other.step()
        optimizer.synchronize()
        other.synchronize()
        assert optimizer.state_of(first(model))["step"] == 1
        assert steps_equal(model, twin)


def test_a_parameter_unfrozen_too_late_is_named() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    with OffloadZero(model, torch.optim.AdamW(model.parameters())) as optimizer:
        model[0].requires_grad_(True)
        backward(model)
        with pytest.raises(ConfigError, match=r"0\.weight was frozen"):
            optimizer.step()


def test_a_parameter_frozen_for_a_while_is_left_alone_meanwhile() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        model[0].requires_grad_(False)
        backward(model)
        optimizer.step()
        model[0].requires_grad_(True)
        backward(model)
        optimizer.step()
        assert [optimizer.state_of(p)["step"] for p in model.parameters()] == [1, 1, 2, 2]


def test_parameters_that_share_memory_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight share memory"):
        OffloadZero(model)


def test_a_model_has_one_optimizer_at_a_time() -> None:
    model = mlp()
    with (
        OffloadZero(model, torch.optim.AdamW(model[0].parameters())),
        pytest.raises(ConfigError, match="held by another OffloadZero"),
    ):
        OffloadZero(model, torch.optim.AdamW(model[2].parameters()))


def test_a_scheduler_can_be_made_from_the_old_optimizer_afterwards() -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.5)
    with OffloadZero(model, adamw) as optimizer:
        torch.optim.lr_scheduler.LambdaLR(adamw, lambda _: 0.5)
        assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_variant_of_adam_asked_for_later_is_refused() -> None:
    model = mlp()
    with OffloadZero(model) as optimizer:
        optimizer.param_groups[0]["amsgrad"] = True
        backward(model)
        with pytest.raises(ConfigError, match="amsgrad"):
            optimizer.step()


def test_a_root_kept_in_fp32_gets_its_inputs_unrounded() -> None:
    seen: list[Tensor] = []

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x * self.weight

    model = Root()
    with OffloadZero(model, keep_fp32=[Root]):
        model(torch.tensor([1 + 2**-12]))
    assert seen[0].item() == 1 + 2**-12


def test_frozen_parameters_of_other_dtypes_are_left_as_they_are() -> None:
    model = mlp()
    model.register_parameter("table", nn.Parameter(torch.arange(4), requires_grad=False))
    with OffloadZero(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])):
        assert model.table.dtype is torch.int64


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_device_that_a_model_is_on_changes_nothing(device: Any) -> None:
    model, twin = mlp(), mlp()
    for one, options in ((model, {"device": device}), (twin, {})):
        with OffloadZero(one, **options) as optimizer:
            backward(one)
            optimizer.step()
            assert one.cpu() is one
            assert all(param.device == torch.device("cpu") for param in one.parameters())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_an_unknown_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="device='gpu'"):
        OffloadZero(mlp(), device="gpu")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_device_that_torch_was_not_built_for_is_told_in_torchs_words() -> None:
    with pytest.raises(ConfigError, match=r"no device of this machine \(Torch not compiled with CUDA enabled\)"):
        OffloadZero(mlp(), device="cuda")


@pytest.mark.parametrize("variant", ["torch", None])
def test_default_dtype_and_device_change_nothing(variant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant is not None:
        monkeypatch.setenv("OFFLOAD_KERNELS", variant)
    model, twin = mlp(), mlp()
    batch = torch.ones(2, 13)
    with OffloadZero(twin) as other:
        twin(batch).sum().backward()
        other.step()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with OffloadZero(model) as optimizer:
            model(batch).sum().backward()
            norm = optimizer.clip_grad_norm_(1e9)
            optimizer.step()
            state = optimizer.state_of(first(model))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert norm.device.type == state["master"].device.type == "cpu"
    assert steps_equal(model, twin)


def test_the_docstring_of_stats_explains_each_key() -> None:
    with OffloadZero(mlp()) as optimizer:
        keys = optimizer.stats().keys()
    explained = set(re.findall(r"\w+", inspect.getdoc(OffloadZero.stats) or ""))
    assert keys - explained == set()
    assert {word for word in explained if word.endswith(("_bytes", "_s"))} - keys <= {"_bytes", "_s"}
