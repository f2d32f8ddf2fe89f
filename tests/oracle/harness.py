"""Idioms of other people's training loops, run as plain torch and on a held model: the oracle is plain torch.

An idiom is a function that trains a small model for a few steps as its source does. It asks its `Run` for one thing,
`run.hold(model, optimizer)`, where a user would construct `OffloadZero`, and logs what has to be the same. In the plain
run `hold` returns the optimizer it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import BudgetError, OffloadError
from offload.planner import least_cpu_memory
from tests.oracle.masters import MasterAdamW
from tests.support.device import DEVICE

STEPS = 6
TOLERANCE = 1e-5

PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"tier": "cpu"},
    # With gradients there, too, every update is pending after `step()`. Otherwise the states of a model of three chunks
    # would stay in RAM.
    "nvme": {"tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
    "device": {"tier": "device"},
    "streamed from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from nvme": {"tier": "nvme", "param_tier": "nvme"},
}
"""Options of `OffloadZero`: three with resident parameters, by where the states live, and two with streamed ones."""

FROZEN_STREAMS: Mapping[str, Mapping[str, Any]] = {
    "device, frozen from cpu": {"tier": "device", "param_tier": "cpu"},
    "device, frozen from nvme": {"tier": "device", "param_tier": "nvme"},
    "cpu, frozen from nvme": {"tier": "cpu", "param_tier": "nvme"},
}
"""The same for models with frozen parameters: those stream, and trained ones only if their states are in RAM."""

RESIDENT = ("cpu", "nvme", "device")
STREAMED = ("streamed from cpu", "streamed from nvme")


@dataclass(frozen=True)
class Idiom:
    """One way to use parameters or gradients.

    Attributes: source: the upstream place it was taken from, "owner/repository path:line"; refused: by placement, why
    it cannot be served, which a typed error says; bf16: whether it makes sense with bf16 parameters; moves: whether it
    moves model and data to where tests train, which is done for the others.
    """

    name: str
    summary: str
    source: str
    train: Callable[[Run], None]
    refused: Mapping[str, str] = field(default_factory=dict)
    bf16: bool = True
    moves: bool = False


IDIOMS: dict[str, Idiom] = {}
"""All of them, by name."""


def idiom(
    summary: str, *, source: str, refused: Mapping[str, str] | None = None, bf16: bool = True
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Registers the function it decorates. Args: see Idiom."""

    def register(train: Callable[[Run], None]) -> Callable[[Run], None]:
        name = train.__name__
        assert name not in IDIOMS, f"two idioms are called {name}"
        IDIOMS[name] = Idiom(name, summary, source, train, refused or {}, bf16)
        return train

    return register


class Run:
    """One run of an idiom. Args: options: of OffloadZero; None: plain torch; path: for swap files."""

    def __init__(
        self, options: Mapping[str, Any] | None, path: Path, *, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        self._options = options
        self._path = path
        self._dtype = compute_dtype
        self._logged: list[tuple[str, Tensor]] = []
        self._ending = ExitStack()
        self._held = 0

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
        """The optimizer to train `model` with, in place of `optimizer` (None: AdamW with torch's defaults)."""
        if self._options is None:
            plain = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
            return plain if self._dtype is torch.float32 else MasterAdamW(model, plain, self._dtype)
        chosen: dict[str, Any] = {"tuning": Tuning(chunk="4KiB"), **self._options, **options}
        if "nvme" in (chosen["tier"], chosen.get("param_tier")):
            self._held += 1
            chosen["path"] = self._path / str(self._held)
        # As little RAM as works: chunks come from the disk at every step. Of a model that is mostly frozen a state dict
        # takes more.
        whole = sum(param.numel() * self._dtype.itemsize for param in model.parameters())
        given = {"compute_dtype": self._dtype, "commit_every": None, **chosen}
        if chosen["tier"] == "nvme":
            known = ("param_tier", "grad_tier", "tuning", "accumulation", "keep_fp32", "stage", "device")
            least = least_cpu_memory(
                model,
                optimizer,
                compute_dtype=self._dtype,
                commit_every=None,
                ranks=dist.get_world_size() if dist.is_initialized() else 1,
                **{name: chosen[name] for name in known if name in chosen},
            )
            given["cpu_memory"] = max(least, whole)
        elif chosen.get("param_tier") == "nvme":
            with pytest.raises(BudgetError) as refused:
                OffloadZero(model, optimizer, **given, cpu_memory=1)
            given["cpu_memory"] = max(refused.value.needed, whole)
        held = OffloadZero(model, optimizer, **given)
        self._ending.callback(held.close)
        return held

    def log(self, *values: Any) -> None:
        """Notes losses, tensors, or all parameters and buffers of a module, as they are now."""
        for value in values:
            if isinstance(value, nn.Module):
                for name, tensor in value.state_dict().items():
                    self._note(name, tensor)
            elif isinstance(value, Mapping):
                for name, tensor in value.items():
                    self._note(str(name), tensor)
            else:
                self._note("value", value)

    def _note(self, name: str, value: Any) -> None:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        self._logged.append((name, tensor.detach().to("cpu", torch.float64, copy=True)))

    def close(self) -> None:
        self._ending.close()

    def assert_like(self, plain: Run, *, tolerance: float = TOLERANCE) -> None:
        """Raises: AssertionError naming the first value that differs from the plain run's. Args: tolerance: relative to
        the largest element of a value, or to 1."""
        assert [name for name, _ in self._logged] == [name for name, _ in plain._logged]
        assert plain._logged, "the idiom logs nothing"
        for number, ((name, mine), (_, theirs)) in enumerate(zip(self._logged, plain._logged, strict=True)):
            assert mine.shape == theirs.shape, (number, name, mine.shape, theirs.shape)
            scale = max(theirs.abs().max().item(), 1.0) if theirs.numel() else 1.0
            difference = (mine - theirs).abs().max().item() if theirs.numel() else 0.0
            assert math.isfinite(scale), (number, name)
            assert difference <= tolerance * scale, (number, name, difference)

    def differences(self, other: Run) -> Iterator[str]:
        """The names of what does not have the same bits."""
        for (name, mine), (_, theirs) in zip(self._logged, other._logged, strict=True):
            if not torch.equal(mine, theirs):
                yield name


@contextmanager
def _on_device() -> Iterator[None]:
    """What idioms make without naming a device is where tests train. Numbers drawn by a generator of the CPU, too."""
    if DEVICE == "cpu":
        yield
        return

    def moving(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(*args: Any, **options: Any) -> Tensor:
            generator = options.get("generator")
            if generator is None or generator.device.type != "cpu":
                return draw(*args, **options)
            return draw(*args, **options | {"device": "cpu"}).to(options.get("device", DEVICE))

        return drawn

    with ExitStack() as undo:
        for name in ("rand", "randn", "randint", "randperm"):
            undo.enter_context(patch.object(torch, name, moving(getattr(torch, name))))
        torch.set_default_device(DEVICE)
        undo.callback(torch.set_default_device, None)
        yield


def run(idiom: Idiom, options: Mapping[str, Any] | None, path: Path, **how: Any) -> Run:
    """Runs an idiom to its end."""
    torch.manual_seed(0)
    one = Run(options, path, **how)
    with nullcontext() if idiom.moves else _on_device():
        try:
            idiom.train(one)
        finally:
            one.close()
    return one


_NEEDS_COPIES_ON_DEVICE = frozenset({"average_in_deep_copy", "average_of_state_dict"})
"""A state_dict of streamed parameters has copies in RAM, wherever the model is."""


_NAMES_THE_CPU = frozenset({"moved_to_where_it_is", "counts_and_shapes"})


_READS_USED_GRADIENTS = frozenset({"values_after_the_step", "importance_after_the_step"})


def check(idiom: Idiom, placement: str, path: Path, **how: Any) -> None:
    """Raises: AssertionError unless an idiom is as in plain torch, or refused where that is documented."""
    if DEVICE != "cpu" and idiom.name in _NAMES_THE_CPU:
        pytest.skip("it moves the model to the CPU, or asks whether it is there")
    if DEVICE != "cpu" and placement in ("cpu", "nvme") and idiom.name in _READS_USED_GRADIENTS:
        pytest.skip("new parameters are on their way to the device in the memory of these gradients")
    try:
        plain = run(idiom, None, path, **how)
    except (RuntimeError, TypeError) as error:
        if DEVICE == "cpu" or idiom.moves:
            raise
        pytest.skip(f"plain torch, too, runs it on the CPU only: {error}")
    options = PLACEMENTS.get(placement) or FROZEN_STREAMS[placement]
    if DEVICE != "cpu" and placement == "nvme":
        placement = "streamed from nvme"  # gradients on disk take parameters along from a device of its own
    if DEVICE != "cpu" and placement in STREAMED and idiom.name in _NEEDS_COPIES_ON_DEVICE:
        pytest.skip("a state_dict of streamed parameters is in RAM")
    if placement in idiom.refused:
        try:
            run(idiom, options, path, **how)
        except OffloadError:
            return
        raise AssertionError(f"{idiom.name} is documented as refused when {placement}, and was not")
    run(idiom, options, path, **how).assert_like(plain)
