"""States of one or two bytes: NumPy's contract is what a whole training does, on every tier, and after every resume."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload import BudgetError, NonFiniteGradientError, OffloadZero, ResumeError, Tuning
from offload.checkpoint.manifest import VERSION, VERSION_OF_FORMS, committed_slots
from offload.checkpoint.reader import Reader
from offload.layout import ADAM_FORMS
from offload.native import available_variants
from offload.optim import reference
from offload.planner import least_cpu_memory
from offload.sizes import PAGE_BYTES
from tests.faults.conftest import assert_same, bits
from tests.parity.test_resharded import CHANGES, ORDER, Named, committed, in_chunks, part_of, resumed, some_step
from tests.parity.test_resumed import HALF, PLACES, STEPS, assert_goes_on, commit_at, resume
from tests.support import models
from tests.support.cases import often
from tests.support.device import DEVICE
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.training import NumpyAdam, Run, train

FORMS = ("bf16", "8bit")
every_form = pytest.mark.parametrize("form", FORMS)
FOUR_KIB = Tuning(chunk="4KiB", threads=1)


@cache
def in_ram(kind: str, form: str, accumulation: int = 1, steps: int = 12) -> Run:
    return train(kind, steps=steps, accumulation=accumulation, tier="cpu", states=form)


# ---- the same bits everywhere


@every_form
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_equals_numpys_contract(kind: str, accumulation: int, form: str) -> None:
    contract = NumpyAdam(accumulation, form=form)
    run = train(kind, accumulation=accumulation, prepare=contract.watch, each_step=contract.step, states=form)
    contract.assert_same_bits(run)
    run.assert_same_bits(in_ram(kind, form, accumulation))


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_adam_equals_it_too(form: str, dtype: torch.dtype) -> None:
    contract = NumpyAdam(1, decoupled=False, form=form)
    options: dict[str, Any] = {"adam": torch.optim.Adam, "states": form, "compute_dtype": dtype}
    run = train("mlp", prepare=contract.watch, each_step=contract.step, **options)
    contract.assert_same_bits(run)


@every_form
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("chunk", ["4KiB", "8KiB"])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_from_disk_equals_training_in_ram(
    kind: str, chunk: str, split: bool, form: str, tmp_path: Path
) -> None:
    tuning = Tuning(chunk=chunk, split_master=split)
    path = tmp_path / "swap"
    run = train(kind, tier="nvme", path=path, cpu_memory="least", tuning=tuning, states=form)
    run.assert_same_bits(in_ram(kind, form))
    assert run.stats["streamed_chunks"] == run.stats["chunks"]
    assert run.stats["peak_cpu_bytes"] <= run.stats["cpu_budget_bytes"]


@every_form
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("variant", available_variants())
def test_instruction_set_and_threads_change_no_bit(
    variant: str, threads: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_KERNELS", variant)
    monkeypatch.setattr("offload.native._MIN_SHARE", 256)
    train("mlp", tuning=Tuning(threads=threads), states=form).assert_same_bits(in_ram("mlp", form))


@every_form
@pytest.mark.parametrize("is_apart", [False, True], ids=["on the CPU", "on a device of its own"])
@pytest.mark.parametrize("kind", models.KINDS)
def test_states_on_the_device_change_no_bit(kind: str, is_apart: bool, form: str, copied_by: CopiedBy) -> None:
    if is_apart:
        copied_by(lambda: LateCopier(0))
    run = train(kind, tier="device", tuning=Tuning(chunk="4KiB"), states=form)
    run.assert_same_bits(in_ram(kind, form))
    assert run.stats["kernel"].startswith("device") is (is_apart or DEVICE != "cpu")


@every_form
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_late_copies_in_any_order_change_no_bit(form: str, split: bool, tmp_path: Path, copied_by: CopiedBy) -> None:
    copied_by(lambda: LateCopier(3))
    tuning = Tuning(chunk="4KiB", split_master=split)
    run = train("gpt", tier="nvme", path=tmp_path / "swap", cpu_memory="1MiB", tuning=tuning, states=form)
    run.assert_same_bits(in_ram("gpt", form))


# ---- what they take


def test_a_slot_has_a_byte_for_each_moment_and_one_for_each_64_of_them(tmp_path: Path) -> None:
    model = nn.Linear(1000, 13, bias=False)
    tuning = in_chunks("64MiB", split_master=True)
    with OffloadZero(model, path=tmp_path / "a", commit_every=0, tuning=tuning, states="8bit") as optimizer:
        model(torch.ones(2, 1000).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.commit()
        stats = optimizer.stats()
    assert stats["held_exp_avg_bytes"] == stats["held_exp_avg_sq_bytes"] == 13_000 + 204
    with Reader([tmp_path / "a"]) as reader:
        (states, _) = committed_slots(reader.manifests[0])
        assert states.size == PAGE_BYTES * (1 + 7 + 2 * (4 + 1))
        # By hand: the low halves, and of each moment codes and scales, each from a page's start.
        ranges = [(start // PAGE_BYTES, end - start) for _, start, end in states.arrays.ranges()]
        assert ranges == [(1, 26_000), (8, 13_000), (12, 204), (13, 13_000), (17, 204)]
        (row,) = reader.tensors()
        assert row.nbytes == 2 * 13_000 + 26_000 + 2 * (13_000 + 204)


def test_manifests_of_fp32_are_what_they_were_and_others_have_a_newer_version(tmp_path: Path) -> None:
    for form in ADAM_FORMS:
        (tmp_path / form).mkdir()
        committed(tmp_path / form, states=form)
        (manifest,) = (tmp_path / form / "a").glob("manifest*")
        text = manifest.read_text()
        assert (f'"version":{VERSION}' if form == "fp32" else f'"version":{VERSION_OF_FORMS}') in text.replace(" ", "")
        assert ("forms" in text) is (form != "fp32")


@every_form
def test_the_least_memory_is_that_of_the_form(form: str, tmp_path: Path) -> None:
    model, options = nn.Linear(300, 70), {"tuning": in_chunks("8KiB"), "states": form, "commit_every": None}
    least = least_cpu_memory(model, torch.optim.AdamW(model.parameters()), **options)
    assert least == least_cpu_memory(model, **options)
    for memory in (least, least - 1):
        fresh = nn.Linear(300, 70)
        if memory < least:
            with pytest.raises(BudgetError):
                OffloadZero(fresh, path=tmp_path / "a", cpu_memory=memory, **options)
        else:
            OffloadZero(fresh, path=tmp_path / "a", cpu_memory=memory, **options).close()


# ---- commits


@every_form
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", often(PLACES, "all through the disk", "split, parameters on disk"))
def test_resumed_training_has_the_bits_of_training_that_never_stopped(
    place: str, accumulation: int, form: str, tmp_path: Path, copied_by: CopiedBy
) -> None:
    if place == "a device of its own":
        copied_by(lambda: LateCopier(1))
    options = {"path": tmp_path / "run", "commit_every": 0, "tuning": FOUR_KIB, **PLACES[place], "states": form}
    train("gpt", steps=HALF + 2, accumulation=accumulation, each_step=partial(commit_at, HALF), **options)
    if options.get("cpu_memory") == "least":
        options["cpu_memory"] = None
    assert_goes_on(resume("gpt", accumulation, **options), in_ram("gpt", form, accumulation, STEPS), accumulation)


@every_form
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "change",
    often(CHANGES, "smaller chunks", "states in RAM", "split masters, parameters on disk", "gradients on disk"),
)
def test_a_run_resumed_in_another_layout_has_the_bits_of_one_that_never_stopped(
    change: str, split: bool, form: str, tmp_path: Path
) -> None:
    expected = committed(tmp_path, tuning=in_chunks("8KiB", split_master=split), states=form)
    whole, other = Named(ORDER), Named(ORDER)
    options: dict[str, Any] = {"path": ["a"], "commit_every": 0, "tuning": in_chunks("8KiB")} | CHANGES[change]
    for name in ("path", "resume"):
        if isinstance(options.get(name), list):
            options[name] = [tmp_path / directory for directory in options[name]]
    options["states"] = form
    if options.get("cpu_memory") == "least":
        given = {name: options.get(name) for name in ("tuning", "param_tier", "commit_every", "states")}
        with Reader([tmp_path / "a"]) as reader:
            options["cpu_memory"] = least_cpu_memory(other, **given) + reader.slots_bytes()
    with OffloadZero(whole, states=form) as alone, resumed(other, **options) as optimizer:
        assert_same(expected, part_of(expected, bits(other, optimizer)))
        for step in range(3):
            some_step(whole, alone, step)
        for step in range(3, 6):
            some_step(whole, alone, step)
            some_step(other, optimizer, step)
        assert_same(bits(whole, alone), bits(other, optimizer))


def test_what_is_committed_is_shown_and_exported_in_fp32(tmp_path: Path) -> None:
    for split in (False, True):
        folder = tmp_path / str(split)
        folder.mkdir()
        expected = committed(folder, states="8bit", tuning=in_chunks("4KiB", split_master=split))
        with Reader([folder / "a"]) as reader:
            assert [row.error for row in reader.verify()] == [None] * len([*reader.verify()])
            for name in ("wide.weight", "one.bias", "conv.weight"):
                assert reader.kinds(name) == ("master", "exp_avg", "exp_avg_sq")
                for kind in ("exp_avg", "master", "exp_avg_sq", "exp_avg"):  # in another order than they lie
                    assert torch.equal(reader.read(name, kind), expected[f"{name}.{kind}"].contiguous())


# ---- from one form to another


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("fp32", "8bit"), ("8bit", "fp32"), ("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "8bit"), ("8bit", "8bit")],
)
def test_states_become_those_of_another_form(before: str, after: str, split: bool, tmp_path: Path) -> None:
    """Masters stay but for settled ties; moments are rounded by NumPy's contract, or widened."""
    old = committed(tmp_path, states=before)
    options: dict[str, Any] = {
        "path": tmp_path / "a",
        "tuning": in_chunks("12KiB", split_master=split),
        "states": after,
    }
    if before != after:
        with pytest.raises(ResumeError, match=r'were committed as .*\n?.*resume_states="convert"'):
            resumed(Named(ORDER), **options)
    model = Named(ORDER)
    with resumed(model, **options, resume_states="convert") as optimizer:
        new = bits(model, optimizer)
        some_step(model, optimizer, 3)
    for name, values in old.items():
        kind = name.split(".")[-1]
        x = values.contiguous().view(-1)
        if values.dim() == 4:
            x = values.permute(0, 2, 3, 1).contiguous().view(-1)  # channels last, as it lies in memory
        wanted = x
        if kind == "master" and after != "fp32":
            wanted = torch.from_numpy(reference.settle(x.numpy()))
        elif kind in ("exp_avg", "exp_avg_sq") and before != after:
            wanted = torch.from_numpy(_kept(after, x.numpy(), step=3, signed=kind == "exp_avg"))
        got = new[name]
        got = got.permute(0, 2, 3, 1).contiguous().view(-1) if got.dim() == 4 else got.contiguous().view(-1)
        assert torch.equal(got, wanted), name


def _kept(form: str, x: np.ndarray[Any, Any], step: int, *, signed: bool) -> np.ndarray[Any, Any]:
    random = reference.dither(len(x), step)
    if form == "fp32":
        return x
    if form == "bf16":
        return reference.from_bf16(reference.to_dithered_bf16(x, random))
    return reference.from_codes(*reference.to_codes(x, random, signed=signed), signed=signed)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_states_that_begin_anew_are_zeros_of_their_form(split: bool, tmp_path: Path) -> None:
    old = committed(tmp_path)
    model = Named(ORDER)
    options: dict[str, Any] = {"path": tmp_path / "a", "tuning": in_chunks("12KiB", split_master=split)}
    with OffloadZero(model, **options, resume=True, resume_states="anew", states="8bit") as optimizer:
        for name, param in model.named_parameters():
            state = optimizer.state_of(param)
            wanted = torch.from_numpy(reference.settle(old[f"{name}.master"].contiguous().numpy()))
            assert torch.equal(state["master"], wanted), name
            assert not state["exp_avg"].any()
            assert not state["exp_avg_sq"].any()
        some_step(model, optimizer, 3)


def test_moments_that_are_not_finite_are_not_rounded_and_the_commit_stays(tmp_path: Path) -> None:
    model = nn.Linear(70, 3)
    options: dict[str, Any] = {"path": tmp_path / "a", "commit_every": 0, "tuning": in_chunks("4KiB")}
    with OffloadZero(model, **options) as optimizer:
        model(torch.full((1, 70), 3e38).bfloat16())[0, 0].backward()  # a square that fp32 cannot hold
        optimizer.step()
        optimizer.commit()
        expected = bits(model, optimizer)
    assert expected["weight.exp_avg_sq"].isinf().any()
    with pytest.raises(ResumeError, match="exp_avg_sq of weight has NaN or Inf"):
        OffloadZero(nn.Linear(70, 3), **options, resume=True, states="8bit", resume_states="convert")
    again = nn.Linear(70, 3)
    with OffloadZero(again, **options, resume=True) as optimizer:
        assert_same(expected, bits(again, optimizer))


@pytest.mark.parametrize(("before", "after"), [("fp32", "8bit"), ("8bit", "fp32")])
def test_a_state_dict_leads_to_a_commit_in_another_form(before: str, after: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path / "a", "commit_every": 0}
    model = Named(ORDER)
    with OffloadZero(model, **options, states=before, tuning=in_chunks("4KiB")) as optimizer:
        some_step(model, optimizer, 0)
        optimizer.commit()
        optimizer.snapshot(keep=None)
        named, old = optimizer.state_dict(), bits(model, optimizer)
        some_step(model, optimizer, 1)
        optimizer.commit()
    again = Named(ORDER)
    options |= {"states": after, "tuning": in_chunks("12KiB"), "resume": True}
    with OffloadZero(again, **options, resume_states="convert") as optimizer:
        some_step(again, optimizer, 2)
        optimizer.load_state_dict(named)
        for name, param in again.named_parameters():
            state = optimizer.state_of(param)
            for kind in ("exp_avg", "exp_avg_sq"):
                x = old[f"{name}.{kind}"]
                flat = (x.permute(0, 2, 3, 1) if x.dim() == 4 else x).contiguous().view(-1).numpy()
                wanted = torch.from_numpy(_kept(after, flat, step=1, signed=kind == "exp_avg"))
                got = state[kind].permute(0, 2, 3, 1) if x.dim() == 4 else state[kind]
                assert torch.equal(got.contiguous().view(-1), wanted), name
            assert state["step"] == 1
        some_step(again, optimizer, 1)
        optimizer.commit()
    with OffloadZero(Named(ORDER), **options) as optimizer, pytest.raises(ResumeError, match="cannot be gone back to"):
        optimizer.load_state_dict(named)  # nobody asked for a conversion


def test_a_state_dict_of_moments_that_cannot_be_rounded_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = nn.Linear(70, 3)
    options: dict[str, Any] = {"path": tmp_path / "a", "commit_every": 0, "tuning": in_chunks("4KiB")}

    def step(model: nn.Module, optimizer: OffloadZero, size: float) -> None:
        model(torch.full((1, 70), size).bfloat16())[0, 0].backward()
        optimizer.step()
        optimizer.zero_grad()

    with OffloadZero(model, **options) as optimizer:
        optimizer.commit()
        start = optimizer.state_dict()
        optimizer.snapshot(keep=None)
        step(model, optimizer, 3e38)
        optimizer.commit()
        optimizer.snapshot(keep=None)
        spoilt = optimizer.state_dict()
        optimizer.load_state_dict(start)
    again = nn.Linear(70, 3)
    with OffloadZero(again, **options, states="8bit", resume=True, resume_states="convert") as optimizer:
        step(again, optimizer, 1.0)
        step(again, optimizer, 1.0)
        before = bits(again, optimizer)
        with pytest.raises(ResumeError, match="exp_avg_sq of weight has NaN or Inf"):
            optimizer.load_state_dict(spoilt)
        assert_same(before, bits(again, optimizer))
        step(again, optimizer, 1.0)


# ---- gradients without room


@every_form
def test_a_gradient_whose_square_has_no_room_is_refused_and_nothing_changes(form: str) -> None:
    model = nn.Linear(70, 3, bias=False)
    with OffloadZero(model, tier="cpu", states=form) as optimizer:

        def backward(size: float) -> None:
            model(torch.full((1, 70), size).bfloat16())[0, 0].backward()

        backward(1.0)
        optimizer.step()
        optimizer.zero_grad()
        before = bits(model, optimizer)
        for size in (2e18, 2e19, 1e38):
            backward(size)
            with pytest.raises(
                NonFiniteGradientError, match=r"the gradient of weight has a norm of 9\.22e\+18 or more"
            ):
                optimizer.step()
            optimizer.zero_grad()
            assert_same(before, bits(model, optimizer))
        backward(1e38)
        optimizer.clip_grad_norm_(1.0)  # what is scaled counts
        optimizer.step()
        optimizer.zero_grad()
        backward(1e18)
        optimizer.step()
        assert optimizer.state_of(model.weight)["exp_avg_sq"].isfinite().all()


def test_each_gradient_has_its_own_factor() -> None:
    model = nn.Linear(70, 3)
    with OffloadZero(model, tier="cpu", states="8bit") as optimizer:
        model(torch.full((1, 70), 1e30).bfloat16())[0, 0].backward()
        model.weight.grad.mul_(1e-20)  # type: ignore[union-attr]
        optimizer.step()
        assert optimizer.state_of(model.weight)["step"] == 1
        model(torch.ones(1, 70).bfloat16())[0, 0].backward()
        model.bias.grad.mul_(1e30)  # type: ignore[union-attr]
        with pytest.raises(NonFiniteGradientError, match="the gradient of bias"):
            optimizer.step()


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streamed"])
def test_weight_decay_that_adam_adds_to_a_gradient_counts(streams: bool, tmp_path: Path) -> None:
    """So does a weight that is NaN, though its gradient is finite."""
    model = nn.Embedding(70, 3)
    plain = torch.optim.Adam(model.parameters(), weight_decay=0.5)
    where: dict[str, Any] = {"tier": "nvme", "path": tmp_path / "a"} if streams else {"tier": "cpu"}
    with OffloadZero(model, plain, **where, param_tier="nvme" if streams else None, states="8bit") as optimizer:

        def backward() -> None:
            model(torch.zeros(1, dtype=torch.int64)).float().sum().backward()

        backward()
        optimizer.step()
        optimizer.zero_grad()
        for value, is_refused in ((1.7e19, False), (1.9e19, True), (-1e30, True), (math.nan, True), (1.0, False)):
            with torch.no_grad():
                model.weight[5, 1] = value  # a row that the batch does not have
            before = bits(model, optimizer)
            backward()
            if is_refused:
                with pytest.raises(NonFiniteGradientError, match=r"the gradient of weight, with its weight decay of"):
                    optimizer.step()
                optimizer.zero_grad()
                after = bits(model, optimizer)
                assert_same(*({name: one.nan_to_num(7.0) for name, one in both.items()} for both in (before, after)))
            else:
                optimizer.step()
                optimizer.zero_grad()
                assert optimizer.state_of(model.weight)["exp_avg_sq"].isfinite().all()
        plain.param_groups[0]["weight_decay"] = 0.0
        with torch.no_grad():
            model.weight[5, 1] = 1e30
        backward()
        optimizer.step()


def test_a_gradient_whose_square_has_no_room_is_skipped_where_that_was_asked_for() -> None:
    model = nn.Linear(70, 3, bias=False)
    with OffloadZero(model, tier="cpu", states="8bit", nonfinite="skip") as optimizer:
        before = bits(model, optimizer)
        model(torch.full((1, 70), 1e30).bfloat16())[0, 0].backward()
        optimizer.step()
        assert_same(before, bits(model, optimizer))
        assert optimizer.stats()["skipped_steps"] == 1


# ---- beside others


def test_param_groups_of_other_optimizers_keep_fp32_and_the_first_line_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = Named(ORDER)
        rest = [param for name, param in model.named_parameters() if name != "wide.weight"]
        return model, [torch.optim.SGD([model.wide.weight], lr=0.1, momentum=0.9), torch.optim.AdamW(rest)]

    model, optimizers = build()
    options: dict[str, Any] = {"path": tmp_path / "a", "commit_every": 0, "states": "8bit"}
    with OffloadZero(model, optimizers, **options, tuning=in_chunks("4KiB")) as optimizer:
        assert "in 8bit, those of 1 of 9 parameters in fp32" in capsys.readouterr().err
        for step in range(3):
            some_step(model, optimizer, step)
        optimizer.commit()
        expected = bits(model, optimizer)
    plain, others = build()
    with OffloadZero(plain, others, tier="cpu") as optimizer:
        for step in range(3):
            some_step(plain, optimizer, step)
        momentum = optimizer.state_of(plain.wide.weight)["momentum_buffer"]
        assert momentum.shape == expected["wide.weight.momentum_buffer"].shape
    again, optimizers = build()
    with OffloadZero(again, optimizers, **options, resume=True, tuning=in_chunks("12KiB")) as optimizer:
        assert_same(expected, bits(again, optimizer))


def test_values_written_from_outside_become_masters_of_their_own(tmp_path: Path) -> None:
    """Whole masters and split ones alike, ties too."""
    found: list[dict[str, Tensor]] = []
    for number, split in enumerate((False, True)):
        model = nn.Linear(70, 3)
        tuning = in_chunks("4KiB", split_master=split)
        path = tmp_path / str(number)
        with torch.no_grad():
            for param in model.parameters():  # every other one a tie of an even upper half
                bits_ = torch.arange(param.numel(), dtype=torch.int32) * 0x10000 + 0x3F808000
                param.copy_(bits_.view(torch.float32).view_as(param))
        with OffloadZero(model, path=path, commit_every=0, states="8bit", tuning=tuning) as optimizer:
            found.append(bits(model, optimizer))
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            model(torch.ones(2, 70).bfloat16()).sum().backward()
            optimizer.step()
            found.append(bits(model, optimizer))
    assert_same(found[0], found[2])
    assert_same(found[1], found[3])
