from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.config import LEAST_IN_FLIGHT, Config, check, over_ranks
from offload.errors import ConfigError
from offload.sizes import GIB, MIB


def test_the_defaults_are_those_of_the_design() -> None:
    config = check()
    assert (config.tier.name, config.paths, config.cpu_memory) == ("cpu", (), None)
    assert config.compute_dtype is torch.bfloat16
    assert (config.accumulation, config.skip_nonfinite, config.keep_fp32) == (1, False, ())
    assert (config.chunk_numel, config.in_flight, config.threads) == (16 * MIB, None, None)
    assert (config.commit_every, config.slots_per_chunk) == (None, 1)


def test_where_there_is_a_path_every_hundredth_step_is_committed(tmp_path: Path) -> None:
    for options in ({}, {"tier": "nvme"}, {"tier": "cpu"}, {"resume": "auto"}):
        config = check(path=tmp_path, **options)
        assert (config.commit_every, config.slots_per_chunk) == (100, 2)
    assert check(tier="cpu", resume=[tmp_path]).commit_every is None
    for given in (None, 0, 7):
        assert check(path=tmp_path, commit_every=given).commit_every == given
    assert inspect.signature(OffloadZero.__init__).parameters["commit_every"].default == "auto"


def test_a_path_means_the_nvme_tier(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), [tmp_path], (str(tmp_path),)):
        assert (check(path=path).tier.name, check(path=path).paths) == ("nvme", (tmp_path,))


def test_a_chunk_is_whole_pages() -> None:
    assert check(tuning=Tuning(chunk="4KiB")).chunk_numel == 1024
    assert check(tuning=Tuning(chunk=3 * 4096 + 4095)).chunk_numel == 3 * 1024


def test_prefetch_never_goes_below_three_chunks_in_flight() -> None:
    assert [check(tuning=Tuning(prefetch_chunks=n)).in_flight for n in (0, 1, 2, 5)] == [LEAST_IN_FLIGHT, 3, 4, 7]


def test_sizes_are_taken_as_words_or_bytes() -> None:
    assert check(cpu_memory="2GiB").cpu_memory == check(cpu_memory=2 * GIB).cpu_memory == 2 * GIB


WRONG: list[tuple[str, Any, str]] = [
    ("device_memory", "8 apples", '"48GiB"'),
    ("device_memory", -1, "negative"),
    ("commit_every", 100, 'needs path="..."'),
    ("commit_every", -1, "at least 0"),
    ("commit_every", 1.5, "whole number"),
    ("commit_every", "often", '0, None or "auto"'),
    ("resume", True, "needs path"),
    ("resume", "auto", "needs path"),
    ("resume", 0, 'True, False, "auto"'),
    ("resume", [], "names no directory"),
    ("resume", "yes", 'True, False, "auto"'),
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
        check(tuning=Tuning(**{option: value}))
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
        check(tier="device", **options)
    check(tier="device", param_tier="device", grad_tier="device", path=".")


def test_a_path_has_no_use_with_the_cpu_tier_but_for_commits_and_activations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no use"):
        check(tier="cpu", path=tmp_path, commit_every=None)
    assert check(tier="cpu", path=tmp_path).paths == (tmp_path,)
    assert check(tier="cpu", path=tmp_path, commit_every=None, activation_tier="nvme").paths == (tmp_path,)


def test_tuning_is_frozen_and_unknown_tuning_is_refused() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tuning().chunk = 5  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"Tuning\(chunks=5\): there is no such option; did you mean chunk\?"):
        Tuning(chunks=5)  # type: ignore[call-arg]


def _over_ranks(ranks: int = 2, **options: Any) -> Config:
    return over_ranks(check(**options), ranks=ranks, ranks_on_node=2)


def test_the_stage_follows_from_where_parameters_live() -> None:
    assert _over_ranks().stage == 2
    assert _over_ranks(param_tier="cpu").stage == 3
    assert _over_ranks(stage=1).param_tier.name == "device"
    for stage in (1, 2, 3):
        assert _over_ranks(stage=stage, param_tier="cpu").param_tier.name == "cpu"
    # A partition of the parameters rests in RAM.
    assert _over_ranks(stage=3).param_tier.name == "cpu"
    alone = check(stage=3)
    assert dataclasses.replace(_over_ranks(ranks=1, stage=3), ranks_on_node=1) == alone


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
        "compute_dtype", "keep_fp32", "accumulation", "nonfinite", "commit_every", "resume", "device", "init",
        "init_missing", "stage", "process_group", "cast_forward_inputs", "keep", "activation_tier", "activation_memory",
        "partition_activations", "tuning", "unknown",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(Tuning)] == [
        "chunk", "prefetch_chunks", "prefetch_units", "threads", "io_engine", "split_master", "bucket", "units", "tile",
        "recompute",
    ]  # fmt: skip


def test_the_prefetch_of_before_names_the_two_options_that_replace_it() -> None:
    with pytest.raises(ConfigError, match=r"prefetch_chunks=2 .* prefetch_units=2"):
        Tuning(prefetch=2)  # type: ignore[call-arg]


def test_what_is_prefetched_is_chosen_apart() -> None:
    config = check(tuning=Tuning(prefetch_chunks=5, prefetch_units=0))
    assert (config.in_flight, config.prefetch_units, config.chooses_prefetch) == (7, 0, False)
    config = check(tuning=Tuning(prefetch_chunks=5))
    assert (config.in_flight, config.prefetch_units, config.chooses_prefetch) == (7, 1, True)


def test_only_bf16_parameters_split_their_masters() -> None:
    split = Tuning(split_master=True)
    assert check(path=".", commit_every=5, tuning=split).commits_parameters
    assert not check(path=".", commit_every=None, tuning=split).commits_parameters
    assert not check(path=".", compute_dtype=torch.float32, tuning=split).split_master
    # Of half the width of its master, and not half of it.
    with pytest.raises(ConfigError, match=r"Tuning\.split_master=True with compute_dtype=torch\.float16"):
        check(path=".", compute_dtype=torch.float16, tuning=split)
    assert not check(path=".", compute_dtype=torch.float16).split_master


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
        check(**options)


@pytest.mark.parametrize(("name", "value"), [("chunk", "1MiB"), ("units", ["blocks"]), ("threads", 2)])
def test_an_option_of_tuning_at_the_top_level_is_pointed_there(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"give OffloadZero\(\.\.\., tuning=Tuning\({name}=") as refused:
        check(**{name: value})
    assert repr(value) in str(refused.value)
