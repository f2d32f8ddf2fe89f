from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.choices import Choice
from offload.cli import options as of_commands
from offload.cli import plan, train
from offload.cli.convert import ORDER
from offload.errors import ConfigError
from offload.layout import ADAM_FORMS
from offload.options import STATE_FORMS, Options
from offload.planner.decide import Situation, decide
from offload.sizes import GIB, MIB
from offload.storage.pool import LEAST_IN_FLIGHT
from offload.tiers import TIERS


def decided(**options: Any) -> Choice:
    """Of a model without frozen parameters, on one rank."""
    return decide(Options(**options), Situation(1, 0))


def test_the_defaults_are_those_of_the_design() -> None:
    choice, options = decided(), Options()
    assert (choice.states.tier.name, options.paths, options.cpu_bytes) == ("cpu", (), None)
    assert choice.model.compute_dtype is torch.bfloat16
    assert (choice.grads.micro_batches, options.nonfinite, choice.model.keep_fp32) == (1, "raise", ())
    assert (choice.states.chunk_numel, choice.states.in_flight, options.tuned.threads) == (16 * MIB, None, None)
    assert (choice.commits.every, choice.slots_per_chunk) == (None, 1)


def test_where_there_is_a_path_every_hundredth_step_is_committed(tmp_path: Path) -> None:
    for options in ({}, {"tier": "nvme"}, {"tier": "cpu"}, {"resume": "auto"}):
        choice = decided(path=tmp_path, **options)
        assert (choice.commits.every, choice.slots_per_chunk) == (100, 2)
    assert Options(tier="cpu", resume=[tmp_path]).every is None
    for given in (None, 0, 7):
        assert Options(path=tmp_path, commit_every=given).every == given
    assert inspect.signature(OffloadZero.__init__).parameters["commit_every"].default == "auto"


def test_a_path_means_the_nvme_tier(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), [tmp_path], (str(tmp_path),)):
        assert (Options(path=path).state_tier.name, Options(path=path).paths) == ("nvme", (tmp_path,))


def test_a_chunk_is_whole_pages() -> None:
    assert Options(tuning=Tuning(chunk="4KiB")).chunk_numel == 1024
    assert Options(tuning=Tuning(chunk=3 * 4096 + 4095)).chunk_numel == 3 * 1024


def test_prefetch_never_goes_below_three_chunks_in_flight() -> None:
    found = [decided(tuning=Tuning(prefetch_chunks=n)).states.in_flight for n in (0, 1, 2, 5)]
    assert found == [LEAST_IN_FLIGHT, 3, 4, 7]


def test_sizes_are_taken_as_words_or_bytes() -> None:
    assert Options(cpu_memory="2GiB").cpu_bytes == Options(cpu_memory=2 * GIB).cpu_bytes == 2 * GIB


WRONG: list[tuple[str, Any, str]] = [
    ("device_memory", "8 apples", '"48GiB"'),
    ("device_memory", -1, "negative"),
    ("commit_every", 100, 'needs path="..."'),
    ("commit_every", -1, "at least 0"),
    ("commit_every", 1.5, "whole number"),
    ("commit_every", "often", '0, None or "auto"'),
    ("resume", True, "needs path"),
    ("lock_timeout", -1, "seconds, at least 0"),
    ("lock_timeout", None, "seconds, at least 0"),
    ("lock_timeout", math.nan, "seconds, at least 0"),
    ("states", "int8", 'choose "fp32", "bf16" or "8bit"'),
    ("states", 8, 'choose "fp32", "bf16" or "8bit"'),
    ("resume_states", "convert", "needs resume"),
    ("resume", "auto", "needs path"),
    ("resume", 0, 'True, False, "auto"'),
    ("resume", [], "names no directory"),
    ("resume", "yes", 'True, False, "auto"'),
    ("resume_states", "new", '"committed", "convert" or "anew"'),
    ("resume_states", "anew", "needs resume"),
    ("tier", "nvme", 'needs path="..."'),
    ("tier", "disk", 'choose "device", "cpu" or "nvme"'),
    ("grad_tier", "disk", 'choose "cpu" or "nvme"'),
    ("grad_tier", "nvme", 'needs tier="nvme" and path="..."'),
    ("stage", 0, "choose 1, 2 or 3"),
    ("stage", True, "choose 1, 2 or 3"),
    ("param_tier", "disk", 'choose "device", "cpu" or "nvme"'),
    ("param_tier", "nvme", 'needs path="..."'),
    ("tier", 3, 'choose "device", "cpu" or "nvme"'),
    ("path", "", "the directory for the swap files"),
    ("path", "a\0b", "the directory for the swap files"),
    ("path", 5, "the directory for the swap files"),
    ("path", b"/scratch", "the directory for the swap files"),
    ("path", ["/a", "/b", "/a"], "once"),
    ("path", [], "directory"),
    ("cpu_memory", "48 gigs", '"48GiB"'),
    ("cpu_memory", -1, "negative"),
    ("cpu_memory", 1e9, '"48GiB"'),
    ("compute_dtype", torch.float64, "torch.bfloat16, torch.float16 or torch.float32"),
    ("compute_dtype", "bf16", "torch.bfloat16, torch.float16 or torch.float32"),
    ("accumulation", 0, "at least 1"),
    ("accumulation", -2, "at least 1"),
    ("accumulation", 1.0, "whole number"),
    ("accumulation", True, "whole number"),
    ("accumulation", None, "whole number"),
    ("accumulation", "many", 'whole number, at least 1, or "auto"'),
    ("nonfinite", "ignore", '"raise" or "skip"'),
    ("nonfinite", None, '"raise" or "skip"'),
    ("keep_fp32", nn.LayerNorm, "a sequence"),
    ("keep_fp32", 5, "a sequence"),
    ("keep_fp32", ["norm"], "neither a module nor a module type"),
    ("keep_fp32", [int], "neither a module nor a module type"),
    ("tuning", {"chunk": 4}, "offload.Tuning"),
    ("tunning", Tuning(), "did you mean tuning?"),
    ("devise", "cpu", "did you mean device?"),
    ("zzz", 1, "the options are accumulation"),
]
WRONG_TUNING: list[tuple[str, Any, str]] = [
    ("chunk", 4095, "at least 4KiB"),
    ("tile", -1, "negative"),
    ("tile", "large", '"48GiB"'),
    ("chunk", "64 MB/s", '"48GiB"'),
    ("chunk", -4096, "negative"),
    ("chunk", 1.5, '"48GiB"'),
    ("prefetch_chunks", -1, "at least 0"),
    ("prefetch_units", "all", "whole number"),
    ("threads", 0, "at least 1"),
    ("threads", 2.0, "whole number"),
    ("io_engine", "libaio", '"auto", "uring", "threads" or "portable"'),
    ("split_master", "yes", "choose False or True"),
]


@pytest.mark.parametrize(("option", "value", "allowed"), WRONG)
def test_a_wrong_option_is_refused_with_its_name_value_and_what_is_allowed(
    option: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadZero(nn.Linear(2, 2), **{option: value})
    assert option in str(caught.value)
    assert allowed in str(caught.value)
    item = value[0] if isinstance(value, list) and value else value
    assert str(item) in str(caught.value) or repr(item) in str(caught.value)


@pytest.mark.parametrize(("option", "value", "allowed"), WRONG_TUNING)
def test_wrong_tuning_is_refused_with_its_name_value_and_what_is_allowed(
    option: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(tuning=Tuning(**{option: value}))
    for part in (f"Tuning.{option}", str(value), allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"grad_tier": "cpu"}, "gradients wait beside"),
        ({"grad_tier": "nvme"}, "gradients wait beside"),
        ({"tuning": Tuning(split_master=True)}, "leave it out"),
        ({"path": ".", "commit_every": None}, "has no use"),
    ],
    ids=str,
)
def test_what_makes_no_sense_with_states_on_the_device_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Options(tier="device", **options)
    Options(tier="device", param_tier="device", grad_tier="device", path=".")


def test_a_path_has_no_use_with_the_cpu_tier_but_for_commits_and_activations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no use"):
        Options(tier="cpu", path=tmp_path, commit_every=None)
    assert Options(tier="cpu", path=tmp_path).paths == (tmp_path,)
    assert Options(tier="cpu", path=tmp_path, commit_every=None, activation_tier="nvme").paths == (tmp_path,)


def test_tuning_is_frozen_and_unknown_tuning_is_refused() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tuning().chunk = 5  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"Tuning\(chunks=5\): there is no such option; did you mean chunk\?"):
        Tuning(chunks=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("cpu_offload", 'tier="cpu"'),
        ("offload_param_device", 'param_tier="cpu"'),
        ("bf16", "compute_dtype=torch.bfloat16"),
        ("gradient_checkpointing", "activation_tier"),
        ("max_grad_norm", r"optimizer.clip_grad_norm_\("),
        ("nvme_path", "path"),
    ],
)
def test_an_option_of_other_libraries_is_answered_with_the_one_that_says_the_same(name: str, same: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=True: there is no such option here; give {same}"):
        OffloadZero(nn.Linear(2, 2), **{name: True})


def _over_ranks(ranks: int = 2, **options: Any) -> Choice:
    return decide(Options(**options), Situation(1, 0, ranks=ranks, ranks_on_node=2))


def test_the_stage_follows_from_where_parameters_live() -> None:
    assert _over_ranks().grads.stage == 2
    assert _over_ranks(param_tier="cpu").grads.stage == 3
    assert _over_ranks(stage=1).params.tier.name == "device"
    for stage in (1, 2, 3):
        assert _over_ranks(stage=stage, param_tier="cpu").params.tier.name == "cpu"
    # A partition of the parameters rests in RAM.
    assert _over_ranks(stage=3).params.tier.name == "cpu"
    assert _over_ranks(ranks=1, stage=3).params == decided().params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_tier": "nvme", "path": "/a", "stage": 1, "accumulation": 2}, "leave grad_tier out"),
        ({"grad_tier": "nvme", "path": "/a", "stage": 1, "accumulation": "auto"}, "accumulation='auto': at stage 1"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _over_ranks(**options)


def test_the_options_are_those_of_the_design_and_no_others() -> None:
    options = inspect.signature(OffloadZero.__init__).parameters
    assert list(options) == [
        "self", "model", "optimizer", "tier", "path", "param_tier", "grad_tier", "cpu_memory", "device_memory",
        "compute_dtype", "keep_fp32", "accumulation", "nonfinite", "commit_every", "resume", "resume_states", "device",
        "init", "init_missing", "stage", "process_group", "cast_forward_inputs", "keep", "lock_timeout",
        "activation_tier", "activation_memory", "partition_activations", "states", "tuning", "unknown",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(Tuning)] == [
        "chunk", "prefetch_chunks", "prefetch_units", "threads", "io_engine", "split_master", "bucket", "units", "tile",
        "recompute", "speculate", "late",
    ]  # fmt: skip


ROOT = Path(__file__).parents[1]


def _table(page: str, head: str) -> list[str]:
    """The options in the first column of the table under `head`."""
    rows = page.split(f"| {head} | meaning | default |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_what_users_see_lists_the_same_options() -> None:
    """The signature, its docstring and the page, which are written by hand so that they can be read."""
    signature, fields = inspect.signature(OffloadZero.__init__).parameters, dataclasses.fields(Options)
    written = {name: one for name, one in signature.items() if one.kind is one.KEYWORD_ONLY}
    assert {name: one.default for name, one in written.items()} == {one.name: one.default for one in fields}
    assert {name: one.annotation for name, one in written.items() if name != "init"} == {
        one.name: one.type for one in fields if one.name != "init"
    }
    arguments = (inspect.getdoc(OffloadZero) or "").split("Args:\n")[1].split("\n\nRaises:")[0]
    described = re.findall(r"(?m)^    (\w+): ", arguments)
    assert described == ["model", "optimizer", *written]
    page, tuning = (ROOT / "docs" / "options.md").read_text(), [one.name for one in dataclasses.fields(Tuning)]
    assert sorted(_table(page, "option")) == sorted(written)
    assert sorted(_table(page, "`Tuning`")) == sorted(tuning)
    assert sorted(re.findall(r"(?m)^    (\w+): ", (inspect.getdoc(Tuning) or "").split("Attributes:\n")[1])) == sorted(
        tuning
    )


IN_NO_COMMAND = {
    "keep_fp32", "nonfinite", "resume", "resume_states", "device", "init", "init_missing", "process_group",
    "cast_forward_inputs", "keep", "lock_timeout", "activation_memory", "prefetch_chunks", "prefetch_units",
    "io_engine", "bucket", "units", "tile", "recompute", "late",
}  # fmt: skip
"""Options that `offload plan` does not have: they change no figure of it, or name objects."""
CALLED_OTHERWISE = {"compute_dtype": "dtype", "path": "no_commits", "threads": None, "tuning": None}
"""What stands for an option there; None: each of its own, or only `offload train` has it."""


def test_the_command_line_has_the_options_and_their_tiers() -> None:
    known = {one.name for one in (*dataclasses.fields(Options), *dataclasses.fields(Tuning))}
    of_plan, of_train = (set(inspect.signature(command).parameters) for command in (plan.plan, train.train))
    named = {CALLED_OTHERWISE.get(name, name) for name in known - IN_NO_COMMAND} - {None}
    assert named <= of_plan
    assert not IN_NO_COMMAND & of_plan
    assert "threads" in of_train
    assert set(ORDER) <= known
    assert of_commands.STATES == STATE_FORMS == (*ADAM_FORMS,)
    for tiers in (of_commands.TIERS, of_commands.PARAM_TIERS, of_commands.GRAD_TIERS):
        assert {*tiers} - {"auto"} <= TIERS.keys()


def test_the_prefetch_of_before_names_the_two_options_that_replace_it() -> None:
    with pytest.raises(ConfigError, match=r"prefetch_chunks=2 .* prefetch_units=2"):
        Tuning(prefetch=2)  # type: ignore[call-arg]


def test_what_is_prefetched_is_chosen_apart() -> None:
    choice = decided(tuning=Tuning(prefetch_chunks=5, prefetch_units=0))
    assert (choice.states.in_flight, choice.params.prefetch_units) == (7, 0)
    choice = decided(tuning=Tuning(prefetch_chunks=5))
    assert (choice.states.in_flight, choice.params.prefetch_units) == (7, 1)


def test_only_bf16_parameters_split_their_masters() -> None:
    split = Tuning(split_master=True)
    assert decided(path=".", commit_every=5, tuning=split).commits.holds_params
    assert not decided(path=".", commit_every=None, tuning=split).commits.holds_params
    assert not decided(path=".", compute_dtype=torch.float32, tuning=split).states.split_master
    # Of half the width of its master, and not half of it.
    with pytest.raises(ConfigError, match=r"Tuning\.split_master=True with compute_dtype=torch\.float16"):
        Options(path=".", compute_dtype=torch.float16, tuning=split)
    assert not decided(path=".", compute_dtype=torch.float16).states.split_master


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition_activations": True}, "partition_activations=True needs activation_tier"),
        (
            {"partition_activations": "yes", "activation_tier": "cpu"},
            "partition_activations='yes': choose True or False",
        ),
    ],
)
def test_partitioned_activations_need_a_tier(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**options)


@pytest.mark.parametrize(("name", "value"), [("chunk", "1MiB"), ("units", ["blocks"]), ("threads", 2)])
def test_an_option_of_tuning_at_the_top_level_is_pointed_there(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"give OffloadZero\(\.\.\., tuning=Tuning\({name}=") as refused:
        Options(**{name: value})
    assert repr(value) in str(refused.value)
