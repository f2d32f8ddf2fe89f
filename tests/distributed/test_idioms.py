"""Other people's idioms on two ranks that get the same data: all that is logged is as in one process in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from offload.errors import OffloadError
from tests.oracle import idioms  # registers them
from tests.oracle.harness import IDIOMS, run
from tests.support.ranks import Worlds

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "stage 2": {"tier": "cpu", "stage": 2},
    "stage 1, nvme": {"tier": "nvme", "stage": 1},
    "stage 3": {"tier": "cpu", "stage": 3},
    "stage 2, streamed": {"tier": "cpu", "param_tier": "cpu", "stage": 2},
}
OFTEN = {
    "clip_by_norm": "stage 2",
    "average_of_weights": "stage 1, nvme",
    "clip_each_group": "stage 3",
    "mean_of_block_weights": "stage 2, streamed",
    "l2_penalty": "stage 2",
    "weight_decay_by_hand": "stage 1, nvme",
    "best_state_loaded": "stage 3",
    "evaluates_between": "stage 2, streamed",
    "tied_embedding": "stage 2",
    "values_after_the_step": "stage 1, nvme",
}
"""Those that run with all other tests, and over which ranks."""


def _train(name: str, option: str, path: str) -> str | None:
    """Returns the typed error with which it was refused."""
    assert idioms.__all__
    folder = Path(path) / "plain"
    folder.mkdir(exist_ok=True)
    plain = run(IDIOMS[name], None, folder)
    try:
        held = run(IDIOMS[name], OPTIONS[option], Path(path))
    except OffloadError as error:
        return f"{type(error).__name__}: {error}"
    held.assert_like(plain)
    return None


def _cases() -> list[Any]:
    return [
        pytest.param(
            name, option, marks=() if OFTEN.get(name) == option else (pytest.mark.oracle,), id=f"{name}-{option}"
        )
        for option in OPTIONS
        for name in IDIOMS
    ]


@pytest.mark.parametrize(("name", "option"), _cases())
def test_idiom_over_ranks_is_as_in_one_process(worlds: Worlds, name: str, option: str, tmp_path: Path) -> None:
    errors = worlds(2).run(_train, name, option, str(tmp_path))
    assert len({error is None for error in errors}) == 1, errors  # refused on both, or on none
    if errors[0] is not None:
        known = (
            "sharded over",
            "is gone",
            "are gone",
            "dropped or replaced by hand",
            "cannot be added",
            "is streamed",
            "come from all",
            "torch.jit.trace",
        )
        assert any(part in errors[0] for part in known), errors[0]
