"""Steps that are tried in backward whenever that is possible: neither a policy nor a slow machine leaves any out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload import Tuning
from offload.interrupts import wait_for_all
from offload.optim import trials
from offload.optim.trials import Trials
from offload.options import Options
from offload.tiers import NVME


def at_once(patch: pytest.MonkeyPatch) -> None:
    """Each trial is made before the next gradient comes."""
    tells = Trials._gradient_is_whole

    def tells_and_waits(self: Trials, param: int) -> None:
        tells(self, param)
        wait_for_all(tuple(self._queue))  # late gradients come in a thread, and the program may end trials meanwhile

    patch.setattr(Trials, "_gradient_is_whole", tells_and_waits)


def always(patch: pytest.MonkeyPatch) -> None:
    """Steps are tried whatever was kept of the last ones, and whatever the gradients so far would be clipped to."""
    patch.setattr(Trials, "is_on", True)
    patch.setattr(trials._Round, "may_be_made", True)


def everywhere(patch: pytest.MonkeyPatch) -> None:
    """Each run tries its steps whose options leave that open, though its program has not asked for it."""
    tuned = Options.tuned.fget
    assert tuned is not None

    def tries(self: Options) -> Tuning:
        tuning = tuned(self)
        if not isinstance(tuning, Tuning):
            return tuning
        return replace(tuning, speculate=tuning.speculate or self._state_tier == NVME.name)

    patch.setattr(Options, "tuned", property(tries))
    always(patch)
