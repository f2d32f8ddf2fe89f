"""What a held parameter answers while its unit does not run: what a plain one with its current values does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero, ReleasedParameterError
from tests.model.held import Held, saved
from tests.support.scripts import run_code
from tests.support.toy import WIDTH, Net, batch


def alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype is expected.dtype and found.stride() == expected.stride() and torch.equal(found, expected)
    if isinstance(expected, numpy.ndarray):
        return bool(numpy.array_equal(found, expected))
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return bool(found == expected)


QUESTIONS: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.stride(), p.ndim, p.dim(), p.numel(), p.nelement(), len(p)),
    "kind": lambda p: (p.dtype, p.device, p.layout, p.is_cuda, p.is_sparse, p.is_meta, p.is_quantized),
    "bytes": lambda p: (p.itemsize, p.element_size(), p.nbytes, p.is_contiguous()),
    "autograd": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p.grad, p.retains_grad, p.output_nr),
    "questions of torch": lambda p: (torch.is_floating_point(p), p.is_complex(), torch.numel(p), torch.is_tensor(p)),
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor), p in {p}, p is p.requires_grad_()),
    "one like it": lambda p: (torch.zeros_like(p), torch.ones_like(p), p.new_zeros(3), torch.empty_like(p).shape),
    "moves that are none": lambda p: [p.to("cpu") is p, p.cpu() is p, p.to(p.dtype) is p, p.bfloat16() is p],
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=list(QUESTIONS))
def test_what_needs_no_values_is_answered_and_fetches_nothing(held: Held, ask: Callable[[nn.Parameter], Any]) -> None:
    assert alike(ask(held.param), ask(held.plain_param))
    assert not held.is_current


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "arithmetic": lambda p: [p + 1, 1 - p, p @ p, -p, p**2, abs(p)],
    "reductions": lambda p: [p.sum(), p.norm(), p.max(), torch.linalg.vector_norm(p.float())],
    "comparisons": lambda p: [bool((p == p).all()), torch.equal(p, p), p.gt(0)],
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "views": lambda p: [p.view(-1), p.T, p.mT, p[0], p[1:3, ::2], p.unsqueeze(0), p.expand(2, -1, -1), list(p)],
    "casts": lambda p: [p.float(), p.to(torch.float64), p.half(), p.to("cpu", copy=True), p.clone()],
    "python": lambda p: [p.tolist(), p[0, 0].item(), float(p[1, 1]), repr(p), str(p.data), f"{p[0, 0]:.3f}"],
    "lists": lambda p: [
        torch.stack([p, p]),
        torch.cat((p, p)),
        torch.einsum("ij,jk->ik", p, p),
        torch._foreach_norm([p]),
    ],
    "functions": lambda p: nn.functional.linear(torch.ones(2, WIDTH, dtype=p.dtype), p),
    "keywords": lambda p: torch.add(torch.ones_like(p), other=p),
    "vectors": lambda p: nn.utils.parameters_to_vector([p, p]),
    "numpy": lambda p: [p.detach().float().numpy(), numpy.asarray(p.detach().float())],
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "copies": lambda p: [copy.deepcopy(p), copy.copy(p.detach())],
    "pickles": lambda p: [pickle.loads(pickle.dumps(p)), saved(p), saved({"a": [p]})["a"][0]],
    "parameters": lambda p: [nn.Parameter(p), nn.Parameter(p.detach(), requires_grad=False), type(p)(torch.ones(2))],
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_use_gets_what_it_gets_of_a_plain_parameter(held: Held, use: Callable[[nn.Parameter], Any]) -> None:
    with torch.no_grad():
        assert alike(use(held.param), use(held.plain_param))
        held.leave()
        assert alike(use(held.param), use(held.plain_param))
    held.same()
    held.step()


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_tensor_that_is_made_of_its_values_gets_the_current_ones(held: Held) -> None:
    assert torch.equal(held.param.new_tensor(held.param), held.plain_param)
    held.leave()
    assert torch.equal(held.param.new_tensor(held.param), held.plain_param)


@pytest.mark.parametrize(
    "make",
    [copy.deepcopy, nn.Parameter, saved, lambda p: type(p)(torch.ones(2)), lambda p: nn.Parameter(p.detach())],
    ids=["deepcopy", "nn.Parameter", "saved", "its type", "nn.Parameter of an alias"],
)
def test_what_is_made_of_it_is_a_plain_parameter(held: Held, make: Callable[[nn.Parameter], Any]) -> None:
    made = make(held.param)
    assert type(made) is nn.Parameter
    assert made.requires_grad
    assert made.grad is None
    before = made.detach().clone()
    held.step()
    held.leave()
    if held.is_streamed:
        assert torch.equal(made, before)  # of a resident one it may share memory, as in torch
    made.sum().backward()
    assert type(made.grad) is Tensor
    with torch.no_grad():
        made.zero_()


def test_a_use_applies_or_fetches_its_own_unit_only(held: Held) -> None:
    held.param.sum()
    assert held.is_current
    pending = {held.optimizer._layout.flats[flat].unit for flat in held.optimizer._parts.step.pending}
    if not held.is_streamed:
        assert pending == {"", "blocks.0", "blocks.2", "blocks.3"}
    else:
        assert {"blocks.0", "blocks.2", "blocks.3"}.isdisjoint(
            unit.name for unit in held.optimizer._held.units.transfers.with_memory
        )


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "transposed": lambda p: p.detach().t(),
    "a row": lambda p: p.detach()[3],
    "a view of data": lambda p: p.data.view(-1)[5:],
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=list(ALIASES))
def test_an_alias_has_the_current_values_also_when_its_unit_was_elsewhere(
    held: Held, alias: Callable[[Tensor], Tensor]
) -> None:
    found, expected = alias(held.param), alias(held.plain_param)
    held.leave()
    assert torch.equal(found, expected)
    assert torch.equal(found + 1, expected + 1)
    held.leave()
    assert torch.equal(copy.deepcopy(found), expected)
    assert type(copy.deepcopy(found)) is Tensor
    found.mul_(2)
    expected.mul_(2)
    held.same()


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "+=": lambda p: p.__iadd__(1),
    "an index": lambda p: p.__setitem__((0, slice(1, 3)), 7.0),
    "a view": lambda p: p.view(-1)[3:5].fill_(4.0),
    "data": lambda p: p.data.mul_(2),
    "an index of data": lambda p: p.data.__setitem__(0, 3.0),
    "a view of data": lambda p: p.data.view(-1)[0].zero_(),
    "detach": lambda p: p.detach().add_(1),
    "a transposed view": lambda p: p.t()[0].fill_(2.0),
    "init": lambda p: nn.init.constant_(p, 0.25),
    "foreach": lambda p: torch._foreach_mul_([p, p.data], 0.5),
    "out": lambda p: torch.mul(p.detach(), 2.0, out=p.data),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "data of another": lambda p: p.data.copy_(p.data.t().clone()),
    "vectors": lambda p: nn.utils.vector_to_parameters(torch.ones(p.numel(), dtype=p.dtype), [p]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_write_counts(held: Held, write: Callable[[nn.Parameter], Any]) -> None:
    if held.is_streamed and write is WRITES["vectors"]:
        with pytest.raises(ReleasedParameterError, match=r"blocks\.1\.after is streamed"):
            write(held.param)
        return
    with torch.no_grad():
        write(held.param)
        write(held.plain_param)
    held.same()
    with torch.no_grad():
        write(held.param)
        write(held.plain_param)
    held.same()


def test_a_write_counts_that_torch_does_not_count(held: Held) -> None:
    for param in (held.param, held.plain_param):
        param.requires_grad_(False)  # torch refuses it otherwise
        param.apply_(lambda one: one + 1)
        param.requires_grad_()
    held.same()


def test_a_write_is_seen_by_graphs_as_in_torch(held: Held) -> None:
    product = held.param.square().sum()
    with torch.no_grad():
        held.param.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_result_is_differentiated_though_the_parameter_left_meanwhile(held: Held) -> None:
    found = torch.stack([p.float().pow(3).sum() * p.float().norm() for p in held.model.parameters()]).sum()
    expected = torch.stack([p.float().pow(3).sum() * p.float().norm() for p in held.plain.parameters()]).sum()
    assert torch.equal(found, expected)
    held.leave()
    found.backward()
    expected.backward()
    for param, plain in zip(held.model.parameters(), held.plain.parameters(), strict=True):
        assert torch.equal(held.optimizer.grad(param), plain.grad.float())


def test_a_version_grows_with_each_change_and_asking_fetches_nothing(held: Held) -> None:
    before = held.param._version
    assert not held.is_current
    with torch.no_grad():
        held.param.add_(1)
    held.leave()
    assert held.param._version > before


def test_moving_a_model_to_where_it_is_does_nothing(held: Held) -> None:
    params = list(held.model.parameters())
    for move in ("cpu", torch.device("cpu"), torch.bfloat16):
        assert held.model.to(move) is held.model
    held.model.cpu().bfloat16().to("cpu", torch.bfloat16, non_blocking=True)
    assert not held.is_current
    assert all(one is other for one, other in zip(held.model.parameters(), params, strict=True))
    held.same()
    held.step()


@pytest.mark.parametrize("options", [{}, {"param_tier": "cpu"}], ids=str)
def test_a_memory_format_for_a_model_changes_nothing(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3))
    plain = copy.deepcopy(model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    with OffloadZero(
        model, torch.optim.SGD(model.parameters(), lr=0.1), compute_dtype=torch.float32, **options
    ) as optimizer:
        strides = [param.stride() for param in model.parameters()]
        for _ in range(3):
            for one, steps in ((model, optimizer), (plain, other)):
                one(torch.ones(2, 4, 6, 6)).square().mean().backward()
                steps.step()
                one.to(memory_format=torch.channels_last)  # gradients that were used, too
                steps.zero_grad()
        assert [param.stride() for param in model.parameters()] == strides
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), expected.detach())
        apart = model[0].weight.to(memory_format=torch.channels_last)
        assert apart.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(apart, model[0].weight)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.half(),
        lambda model: model.float(),
        lambda model: model.blocks[1].double(),
    ],
    ids=["to", "half", "float", "of a block"],
)
def test_moving_a_model_elsewhere_is_refused_and_changes_nothing(held: Held, move: Callable[[Net], Any]) -> None:
    with pytest.raises(ConfigError, match=r"would become .*Leave out the call that moves or casts it"):
        move(held.model)
    held.same()
    held.step()


@pytest.mark.parametrize("param_tier", ["device", "cpu", "nvme"])
def test_numpy_says_that_a_write_to_a_copy_would_be_lost(param_tier: str, tmp_path: Path) -> None:
    model = Net()
    options = {"path": tmp_path, "param_tier": param_tier, "compute_dtype": torch.float32}
    with OffloadZero(model, **options) as optimizer:
        param, before = model.blocks[1].after, model.blocks[1].after.detach().clone()
        torch.set_warn_always(True)  # not once a process
        for array in (param.detach().numpy(), param.data.cpu().numpy(), numpy.asarray(param.detach())):
            assert numpy.array_equal(array, before.numpy())
            assert array.flags.writeable is (param_tier == "device")
            if param_tier != "device":
                with pytest.raises(ValueError, match="read-only"):
                    array[0, 0] = 7.0
                with pytest.warns(UserWarning, match="not writable"):  # torch's, as of any such array
                    assert torch.equal(torch.from_numpy(array), before)
        for own in (
            param.detach().clone().numpy(),
            model.state_dict()["head.bias"].numpy(),
        ):
            assert own.flags.writeable
        assert torch.equal(torch.tensor(param.detach().numpy()), before)
        with optimizer.gathered(param, writable=True):
            param.detach().numpy()[0, 0] = 7.0
        before[0, 0] = 7.0
        assert torch.equal(param, before)


def test_what_takes_streamed_memory_away_is_refused(held: Held) -> None:
    if not held.is_streamed:
        pytest.skip("resident parameters have memory of their own")
    for take in (
        lambda: held.model.share_memory(),
        lambda: held.param.data.resize_(3),
        lambda: held.param.resize_(3),
    ):
        with pytest.raises(ReleasedParameterError, match=r"p\.detach"):
            take()
    held.same()


def test_a_resident_model_is_shared_with_other_processes_until_the_next_step(held: Held) -> None:
    if held.is_streamed:
        pytest.skip("a streamed one has nothing to share")
    held.model.share_memory()
    assert held.param.is_shared()
    held.same()
    held.step()
    assert not held.param.is_shared()
    assert torch.equal(held.param, held.optimizer.state_of(held.param)["master"].bfloat16())
    assert not torch.equal(held.param, held.plain_param)


def by_data(param: Tensor, value: Tensor) -> None:
    param.data = value


def by_set(param: Tensor, value: Tensor) -> None:
    """As torch does where a parametrized weight is assigned: `set_` does not pass `__torch_function__`."""
    with torch.no_grad():
        param.set_(value)  # type: ignore[call-overload]


@pytest.mark.parametrize("point", [by_data, by_set])
def test_pointing_a_resident_one_elsewhere_counts_and_the_next_step_takes_it_over(
    held: Held, point: Callable[[Tensor, Tensor], None]
) -> None:
    if held.is_streamed:
        with pytest.raises(ReleasedParameterError, match=r"blocks\.1\.after is streamed.*p\.copy_"):
            point(held.param, torch.zeros_like(held.param))
        held.same()
        held.step()
        return
    mine, kept = torch.full_like(held.plain_param.data, 0.5), held.param.data
    point(held.param, mine)
    assert held.param.data_ptr() == held.param.data.data_ptr() == mine.data_ptr()
    assert held.param.eq(0.5).all()
    point(held.param, kept)
    assert torch.equal(held.param, held.plain_param)
    point(held.param, mine)
    held.plain_param.data = mine.clone()
    held.same()
    held.step()
    held.param.sum()
    assert held.param.data_ptr() == kept.data_ptr()
    assert mine.eq(0.5).all()


def test_numpy_and_dlpack_get_copies_of_a_streamed_parameter(held: Held) -> None:
    expected = held.plain_param.detach()
    arrays = [torch.from_dlpack(held.param.detach()), torch.from_dlpack(held.param.data)]
    held.leave()
    held.step()
    held.leave()
    if held.is_streamed:
        assert all(torch.equal(one, expected) for one in arrays)
    else:
        assert all(torch.equal(one, held.param) for one in arrays)  # memory of the parameter, as in torch


def test_a_deep_copy_of_the_model_is_a_plain_model(held: Held) -> None:
    for twin in (copy.deepcopy(held.model), saved(held.model)):
        assert {type(param) for param in twin.parameters()} == {nn.Parameter}
        assert all(torch.equal(*pair) for pair in zip(twin.parameters(), held.plain.parameters(), strict=True))
        expected = held.plain(batch(0).bfloat16())
        assert torch.equal(twin(batch(0).bfloat16()), expected)


def test_swapping_tensors_is_refused_by_the_next_step(held: Held) -> None:
    torch.utils.swap_tensors(held.param, nn.Parameter(torch.full_like(held.plain_param, 0.5)))
    held.leave()
    with pytest.raises(ConfigError, match=r"swapped.*p\.copy_\(\)"):
        held.step()


@pytest.mark.parametrize("has_room", [True, False])
def test_after_closing(held: Held, has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alias = held.param.data
    if not has_room:
        monkeypatch.setattr("offload.build.Plan.room_at_end", lambda *unused: 0)
    held.optimizer.close()
    if has_room or not held.is_streamed:
        assert {type(param) for param in held.model.parameters()} == {nn.Parameter}
        assert torch.equal(held.param, held.plain_param)
        held.model.float()
        assert held.param.dtype is torch.float32
        assert len({p.untyped_storage()._cdata for p in held.model.parameters()}) == len(list(held.model.parameters()))
        return
    for use in (
        lambda: held.param.sum(),
        lambda: alias + 1,
        lambda: copy.deepcopy(held.model),
        lambda: held.param.data,
    ):
        with pytest.raises(ReleasedParameterError, match=r"before optimizer\.close\(\)"):
            use()
    assert held.param.shape == held.plain_param.shape
    assert "released" in repr(held.param)
    assert "Linear" in repr(held.model)


# What gets past Python: in a process of its own, which may crash.

PRELUDE = """
import sys, numpy, torch
from offload import OffloadZero
from offload.errors import OffloadError
from tests.support.toy import Net, batch
torch.set_num_threads(1)
model = Net()
optimizer = OffloadZero(model, param_tier="cpu", cpu_memory="64MiB")
p = model.blocks[1].after
right = p.detach().clone()
with torch.no_grad():
    model(batch(0))
for use in sys.argv[1:]:
    print(use, file=sys.stderr, flush=True)  # before it crashes
    try:
        found = eval(use)
    except (OffloadError, RuntimeError, TypeError, ValueError) as error:
        print("  ", type(error).__name__, error, file=sys.stderr)
    else:
        if found is None:
            continue
        try:
            found = found.float() if isinstance(found, torch.Tensor) else torch.tensor(found)
        except RuntimeError as error:  # builds for CUDA
            assert "not on the device now" in str(error)
            continue
        with torch._C.DisableTorchFunctionSubclass():
            wanted = eval(use.replace("(p)", "(right)").replace("p,", "right,")).float()
            wrong = ~(found.isnan() | torch.isclose(found, wanted, rtol=1e-2))
            assert not wrong.any(), (use, found)
    with torch.no_grad():
        model(batch(0))
model(batch(0)).sum().backward()
optimizer.step()
assert not any(param.isnan().any() for param in model.parameters())
"""

PAST_PYTHON = """
torch.tensor(p)
torch.Tensor(p)
torch.as_tensor(p)
torch.func.grad(lambda x: x.float().square().sum())(p)
torch.func.vmap(lambda x: x * 2)(p)
torch.func.jacrev(lambda x: x.float().sum())(p)
torch._C._nn.linear(p, p)
torch._C._VariableFunctions.sum(p)
torch._C.TensorBase.add(p, p)
torch.ops.aten.add.Tensor(p, p)
torch.ops.aten.mul_.Scalar(p, 2)
torch.compile(lambda x: x * 2, backend="eager")(p)
"""


def test_what_gets_past_python_reads_nan_or_the_right_values_and_never_crashes() -> None:
    done = run_code(PRELUDE, *PAST_PYTHON.strip().splitlines())
    assert done.returncode == 0, done.stderr[-2500:]
