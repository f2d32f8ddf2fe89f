"""Idioms of models with frozen parameters, where these stream and what is trained does or does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from offload.planner import decide
from tests.oracle import idioms  # noqa: F401  # registers them
from tests.oracle.harness import FROZEN_STREAMS, IDIOMS, STREAMED, check

NAMES = (
    "momentum_contrast",
    "low_rank_weights_merged",
    "weight_norm_with_frozen_magnitude",
    "reference_without_adapters",
    "prompt_tuning",
    "teacher_averaged_in_lists",
    "adapters_with_an_optimizer_of_their_own",
)
OFTEN = ("streamed from cpu", "tiles", "tiles, activations on cpu")


def _cases() -> list[Any]:
    """Each idiom where parameters stream; in some of these placements always."""
    return [
        pytest.param(name, placement, marks=() if placement in OFTEN else (pytest.mark.oracle,))
        for name in NAMES
        for placement in STREAMED
    ]


@pytest.mark.parametrize("placement", FROZEN_STREAMS)
@pytest.mark.parametrize("name", NAMES)
def test_idiom_with_frozen_parameters_is_as_in_plain_torch(name: str, placement: str, tmp_path: Path) -> None:
    check(IDIOMS[name], placement, tmp_path)


@pytest.mark.parametrize(("name", "placement"), _cases())
def test_idiom_whose_trained_parameters_stay_is_as_in_plain_torch(name: str, placement: str, tmp_path: Path) -> None:
    with patch.object(decide, "SMALL", 10.0):
        check(IDIOMS[name], placement, tmp_path)
