"""Each idiom in each placement against plain torch on the same data, with fp32 and with bf16 parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import idioms  # noqa: F401  # registers them
from tests.oracle.harness import IDIOMS, PLACEMENTS, TIERED, check, run
from tests.oracle.table import DOCUMENT, document, table

RESIDENT, STREAMED = ("cpu", "nvme", "device"), ("streamed from cpu", "streamed from nvme")
MOST_REFUSED = 0.04
BF16_TOLERANCE = 2**-5

ROUNDED_BY_TORCH = frozenset(
    {
        *("clip_by_norm", "clip_by_infinity_norm", "clip_by_one_norm", "clip_raises_on_nonfinite", "clip_in_two_calls"),
        *("norm_with_infinite_limit", "clip_each_group", "norm_of_each_parameter", "total_norm_of_items"),
        *("total_norm_of_stack", "norm_per_element", "norms_after_the_step", "clip_each_parameter"),
        *("averages_over_tasks", "divides_with_assignment", "multiplies_by_token_count", "adaptive_clipping"),
        *("copies_back_from_flat", "drops_some_gradients", "hook_that_scales", "hook_after_accumulation"),
        *("closure_clears_between_forward_and_backward", "leaves_out_layers", "accumulates"),
        *("accumulates_with_short_last_group", "accumulates_by_tokens", "forwards_first_then_backwards"),
        *("caches_gradients_of_embeddings", "keeps_the_graph", "truncated_backpropagation", "sharpness_aware"),
        *(
            "generative_adversarial",
            "policy_epochs",
            "disabled_scaler",
            "climbs_and_subtracts",
            "climbs_and_points_back",
        ),
    }
)
"""Idioms in which torch rounds to bf16 what this library keeps in fp32: norms, factors, sums over micro-batches."""


GROUPS = (RESIDENT, STREAMED, tuple(TIERED))
"""One placement of an idiom runs with all other tests: the idioms take the groups in turn, and the placements of a
group."""


def _cases(*groups: Sequence[str]) -> list[Any]:
    """Each idiom in each placement of some groups."""
    cases = []
    for number, name in enumerate(IDIOMS):
        group = GROUPS[number % len(GROUPS)]
        often = group[number // len(GROUPS) % len(group)]
        for placement in chain(*groups):
            marks = () if placement == often else (pytest.mark.oracle,)
            cases.append(pytest.param(name, placement, marks=marks, id=f"{name}-{placement}"))
    return cases


@pytest.mark.parametrize(("name", "placement"), _cases(RESIDENT, STREAMED))
def test_idiom_is_as_in_plain_torch(name: str, placement: str, tmp_path: Path) -> None:
    check(IDIOMS[name], placement, tmp_path)


@pytest.mark.parametrize(("name", "placement"), _cases(tuple(TIERED)))
def test_idiom_with_activation_tiers_tiles_and_own_units_is_as_in_plain_torch(
    name: str, placement: str, tmp_path: Path
) -> None:
    check(IDIOMS[name], placement, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "placement",
    ["cpu", "streamed from nvme", "streamed, activations on cpu", "own units, activations on nvme", "tiles"],
)
@pytest.mark.parametrize("name", [name for name, idiom in IDIOMS.items() if idiom.bf16])
def test_idiom_in_bf16_is_as_with_masters_in_plain_torch(name: str, placement: str, tmp_path: Path) -> None:
    idiom = IDIOMS[name]
    if placement in idiom.refused:
        pytest.skip("refused, as with fp32")
    if placement == "tiles" and name == "rewound_and_masked":
        pytest.skip("which weights it masks may turn with a last bit")
    plain = run(idiom, None, tmp_path, compute_dtype=torch.bfloat16)
    held = run(idiom, PLACEMENTS[placement], tmp_path, compute_dtype=torch.bfloat16)
    if placement == "tiles":  # each rounds the gradient of the input once more
        held.assert_like(plain, tolerance=2 * BF16_TOLERANCE)
    elif name in ROUNDED_BY_TORCH:
        held.assert_like(plain, tolerance=BF16_TOLERANCE)
    else:
        assert list(held.differences(plain)) == []


def test_few_idioms_are_refused() -> None:
    assert len(IDIOMS) >= 80
    refused = sum(len(idiom.refused) for idiom in IDIOMS.values())
    assert not any(idiom.refused.keys() - PLACEMENTS for idiom in IDIOMS.values())
    assert refused <= MOST_REFUSED * len(IDIOMS) * len(PLACEMENTS)
    assert all(idiom.source and idiom.summary for idiom in IDIOMS.values())


def test_the_document_has_the_table_of_today() -> None:
    """`python -m tests.oracle.table` writes it."""
    assert document(DOCUMENT.read_text(), table()) == DOCUMENT.read_text()
