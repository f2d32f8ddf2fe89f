"""A model whose last step is not applied yet."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.planner import least_cpu_memory
from tests.support.toy import Net, batch, squares, take_step

UNIT = "blocks.1"


class Held(NamedTuple):
    """A model after a step of which nothing is applied, and a plain one with the values that the step gives."""

    model: Net
    optimizer: OffloadZero
    plain: Net

    @property
    def param(self) -> nn.Parameter:
        return self.model.blocks[1].after

    @property
    def plain_param(self) -> nn.Parameter:
        return self.plain.blocks[1].after

    @property
    def is_streamed(self) -> bool:
        return self.optimizer._parts.parameters.streams_any

    @property
    def is_current(self) -> bool:
        """Whether the parameter's unit has its new values in the model. Asks no parameter."""
        units, pending = self.optimizer._held.units, self.optimizer._held.pending
        unit = units.named(UNIT)
        is_here = not self.is_streamed or unit.is_here or unit.is_coming
        return is_here and not pending.is_pending(unit)

    def leave(self) -> None:
        """Other units are used meanwhile."""
        with torch.no_grad():
            self.model(batch(7))

    def same(self) -> None:
        self.leave()
        for (name, param), plain in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(param, plain), name
            assert torch.equal(self.optimizer.state_of(param)["master"].bfloat16(), plain), name

    def step(self) -> None:
        take_step(self.optimizer, squares(self.model))


@contextmanager
def held_after_a_step(where: str, path: Path) -> Iterator[Held]:
    """Args: where: the parameters are: "resident", "streamed from cpu" or "streamed from nvme"."""
    plain, model, tuning = Net(), Net(), Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1)
    with OffloadZero(plain, tier="cpu", tuning=tuning) as finished:
        take_step(finished, squares(plain))
    options: dict[str, Any] = {"tier": "nvme", "path": path, "tuning": tuning}
    if where == "resident":
        options["cpu_memory"] = least_cpu_memory(model, tuning=tuning)
    else:
        options["param_tier"] = "cpu" if where.endswith("cpu") else "nvme"
    with OffloadZero(model, **options) as optimizer:
        found = Held(model, optimizer, plain)
        found.step()
        assert not found.is_current
        yield found


def saved(value: Any) -> Any:
    """`value` as torch loads what torch has saved."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)
