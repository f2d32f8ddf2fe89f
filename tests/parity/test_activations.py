"""Where activations wait changes no bit of a training: the oracle is the training whose activations stay."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from offload import Tuning
from tests.support import models
from tests.support.training import Run, train

STEPS = 6
PLACES: dict[str, dict[str, Any]] = {
    "where they are made": {"activation_tier": "device"},
    "in a region of the device": {"activation_tier": "device", "activation_memory": "1MiB"},
    "in RAM": {"activation_tier": "cpu", "activation_memory": "1MiB"},
    "in files": {"activation_tier": "nvme", "activation_memory": "16KiB"},
    "in files, streamed": {"activation_tier": "nvme", "activation_memory": "64KiB", "param_tier": "nvme"},
}


@cache
def where_they_are(kind: str, accumulation: int) -> Run:
    return train(kind, accumulation=accumulation, steps=STEPS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "all saved"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", models.KINDS)
def test_activations_in_a_tier_change_no_bit(
    kind: str, accumulation: int, recompute: bool, place: str, tmp_path: Path
) -> None:
    options = PLACES[place]
    path = tmp_path / "run" if options["activation_tier"] == "nvme" else None
    tuning = Tuning(recompute=recompute)
    run = train(kind, accumulation=accumulation, steps=STEPS, path=path, tuning=tuning, **options)
    run.assert_same_bits(where_they_are(kind, accumulation))
    assert run.stats["activation_tier"] == options["activation_tier"]
    if kind == "gpt" and recompute and "activation_memory" in options:
        # One input a block: 2 sequences of 16 tokens, 32 wide, of 2 bytes; in whole pages.
        assert run.stats["peak_activation_bytes"] == 3 * 4096
