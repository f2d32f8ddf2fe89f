"""Idioms of other people's training loops, run as plain torch and on a held model: the oracle is plain torch.

An idiom is a function that trains a small model for a few steps as its source does. It asks its `Run` for one thing,
`run.hold(model, optimizer)`, where a user would construct `OffloadZero`, and logs what has to be the same. In the plain
run `hold` returns the optimizer it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import BudgetError, OffloadError
from offload.model import activations
from offload.model.units import blocks_of, encloses, is_called
from offload.planner import least_cpu_memory
from tests.oracle.masters import MasterAdamW
from tests.support.device import DEVICE

STEPS = 6
TOLERANCE = 1e-5

TIERS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"tier": "cpu"},
    # With gradients there, too, every update is pending after `step()`. Otherwise the states of a model of three chunks
    # would stay in RAM.
    "nvme": {"tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
    "device": {"tier": "device"},
    "streamed from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from nvme": {"tier": "nvme", "param_tier": "nvme"},
}
"""Options of `OffloadZero`: three with resident parameters, by where the states live, and two with streamed ones."""

_FROM_CPU, _FROM_NVME = TIERS["streamed from cpu"], TIERS["streamed from nvme"]
_ON_CPU = {"activation_tier": "cpu", "activation_memory": "4MiB"}  # a region, without which they stay where they are
_ON_NVME = {"activation_tier": "nvme", "activation_memory": "64KiB"}  # less than most idioms keep
_KEPT = Tuning(chunk="4KiB", recompute=False)
_TILES = Tuning(chunk="4KiB", tile=1)  # of as few rows as a tile can have


def own_units(model: nn.Module) -> list[str]:
    """The units that there are by themselves, and each outermost module beside them that has parameters: an embedding,
    a head."""
    blocks = [name for name, _ in blocks_of(model)]
    beside = [
        name
        for name, module in model.named_modules()
        if name and is_called(module) and any(True for _ in module.parameters()) and not _is_near(name, blocks)
    ]
    return blocks + [name for name in beside if not any(name.startswith(f"{other}.") for other in beside)]


def _is_near(name: str, blocks: Sequence[str]) -> bool:
    """Whether a module is a block, lies in one, or holds one."""
    return any(encloses(name, block) or encloses(block, name) for block in blocks)


TIERED: Mapping[str, Mapping[str, Any]] = {
    "activations on cpu": {"tier": "cpu", **_ON_CPU},
    "activations on nvme": {"tier": "cpu", **_ON_NVME},
    "activations kept on cpu": {"tier": "cpu", **_ON_CPU, "tuning": _KEPT},
    "activations kept on nvme": {"tier": "cpu", **_ON_NVME, "tuning": _KEPT},
    "tiles": {**_FROM_CPU, "tuning": _TILES},
    "own units": {**_FROM_CPU, "units": own_units},
    # Pairs of these.
    "streamed, activations on cpu": {**_FROM_CPU, **_ON_CPU},
    "streamed, activations kept on nvme": {**_FROM_NVME, **_ON_NVME, "tuning": _KEPT},
    "tiles, activations on cpu": {**_FROM_CPU, **_ON_CPU, "tuning": _TILES},
    "tiles, activations kept on nvme": {**_FROM_NVME, **_ON_NVME, "tuning": replace(_TILES, recompute=False)},
    "own units, activations on nvme": {"tier": "cpu", **_ON_NVME, "units": own_units},
    "own units, activations kept on cpu": {**_FROM_CPU, **_ON_CPU, "tuning": _KEPT, "units": own_units},
    "own units, tiles": {**_FROM_CPU, "tuning": _TILES, "units": own_units},
}
"""The same with activations in a tier (recomputed, or kept), with tiles, and with the head and the embedding as units
of their own. `units` says of a model what `Tuning.units` is to be."""

PLACEMENTS: Mapping[str, Mapping[str, Any]] = {**TIERS, **TIERED}
"""The columns of the table."""

FROZEN_STREAMS: Mapping[str, Mapping[str, Any]] = {
    "device, frozen from cpu": {"tier": "device", "param_tier": "cpu"},
    "device, frozen from nvme": {"tier": "device", "param_tier": "nvme"},
    "cpu, frozen from nvme": {"tier": "cpu", "param_tier": "nvme"},
    "device, frozen in tiles from cpu": {"tier": "device", "param_tier": "cpu", "tuning": _TILES},
    "cpu, frozen in tiles from nvme": {"tier": "cpu", "param_tier": "nvme", "tuning": _TILES, **_ON_CPU},
}
"""The same for models with frozen parameters: those stream, and trained ones only if their states are in RAM."""

STREAMED = tuple(name for name, options in PLACEMENTS.items() if "param_tier" in options)
RECOMPUTED = tuple(
    name
    for name, options in PLACEMENTS.items()
    if "activation_tier" in options and options.get("tuning", Tuning()).recompute
)

WRITTEN_AGAIN = "a unit whose forward writes its weight would write it again when it is recomputed"


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
    """One run of an idiom. Args: options: of OffloadZero; None: plain torch; path: for swap files.

    Attributes, once it is closed: tiles: of all layers; waiting_bytes: the most that activations took.
    """

    def __init__(
        self, options: Mapping[str, Any] | None, path: Path, *, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        self._options = options
        self._path = path
        self._dtype = compute_dtype
        self._logged: list[tuple[str, Tensor]] = []
        self._ending = ExitStack()
        self._held = 0
        self.tiles = self.waiting_bytes = 0

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
        """The optimizer to train `model` with, in place of `optimizer` (None: AdamW with torch's defaults)."""
        if self._options is None:
            plain = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
            return plain if self._dtype is torch.float32 else MasterAdamW(model, plain, self._dtype)
        chosen: dict[str, Any] = {"tuning": Tuning(chunk="4KiB"), **self._options, **options}
        if "units" in chosen:
            chosen["tuning"] = replace(chosen["tuning"], units=chosen.pop("units")(model))
        if "nvme" in (chosen["tier"], chosen.get("param_tier"), chosen.get("activation_tier")):
            self._held += 1
            chosen["path"] = self._path / str(self._held)
        # As little RAM as works: chunks come from the disk at every step. Of a model that is mostly frozen a state dict
        # takes more.
        whole = sum(param.numel() * self._dtype.itemsize for param in model.parameters())
        given = {"compute_dtype": self._dtype, "commit_every": None, **chosen}
        if chosen["tier"] == "nvme":
            known = ("param_tier", "grad_tier", "tuning", "accumulation", "keep_fp32", "stage", "device")
            known += ("activation_tier", "activation_memory")
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
        self._ending.callback(self._note_use, held)
        return held

    def _note_use(self, held: OffloadZero) -> None:
        self.tiles += len(held._parts.parameters.tiles)
        self.waiting_bytes += held.stats().get("peak_activation_bytes", 0)

    def gathered(self, optimizer: Any, model: nn.Module) -> AbstractContextManager[None]:
        """With all weights of `model`, as `optimizer.gathered` has them."""
        held: AbstractContextManager[None] = nullcontext() if self._options is None else optimizer.gathered(model)
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
    # All that a unit saves waits: an idiom's tensors are small.
    with nullcontext() if idiom.moves else _on_device(), patch.object(activations, "LEAST_BYTES", 1):
        try:
            idiom.train(one)
        finally:
            one.close()
    return one


NOTHING_TO_TILE = frozenset(
    {
        *("average_of_state_dict", "batch_normalization", "binary_weights", "bootstrap_your_own_latent"),
        *("cached_parametrization", "checkpointed_segments", "clamped_critic", "cosine_classifier"),
        *("dormant_neurons_reset", "exported_after_training", "functional_over_children", "fused_for_evaluation"),
        *("lstm_cells_over_time", "max_norm_in_forward", "modulated_weights"),
        *("momentum_contrast", "noisy_layers", "orthogonal_parametrized", "r1_penalty", "slices_of_weights"),
        *("spectral_norm_by_hook", "spectral_norm_parametrized", "stacked_members", "stochastic_weight_averaging"),
        *("target_network", "tied_autoencoder", "vector_quantizer", "weight_norm_by_hook"),
        *("weight_norm_parametrized", "weights_as_arrays"),
    }
)
"""Idioms that have no linear layer with a weight of more than one tile."""
WITHOUT_UNITS = frozenset(
    {
        *("dropped_recurrent_weight", "functional_over_children", "gradients_of_reptile", "gru_in_both_directions"),
        *("lstm_language_model", "slices_of_weights"),
    }
)
"""Idioms whose models have no blocks, or run them without gradients of activations: nothing waits."""

_NEEDS_COPIES_ON_DEVICE = frozenset({"average_in_deep_copy", "average_of_state_dict"})
"""A state_dict of streamed parameters has copies in RAM, wherever the model is."""


_NAMES_THE_CPU = frozenset({"moved_to_where_it_is", "counts_and_shapes"})


_READS_USED_GRADIENTS = frozenset({"values_after_the_step", "importance_after_the_step"})


def check(idiom: Idiom, placement: str, path: Path, **how: Any) -> None:
    """Raises: AssertionError unless an idiom is as in plain torch, or refused where that is documented."""
    if DEVICE != "cpu" and idiom.name in _NAMES_THE_CPU:
        pytest.skip("it moves the model to the CPU, or asks whether it is there")
    options = PLACEMENTS.get(placement) or FROZEN_STREAMS[placement]
    are_written_over = "param_tier" not in options and options["tier"] != "device"
    if DEVICE != "cpu" and are_written_over and idiom.name in _READS_USED_GRADIENTS:
        pytest.skip("new parameters are on their way to the device in the memory of these gradients")
    try:
        plain = run(idiom, None, path, **how)
    except (RuntimeError, TypeError) as error:
        if DEVICE == "cpu" or idiom.moves:
            raise
        pytest.skip(f"plain torch, too, runs it on the CPU only: {error}")
    if DEVICE != "cpu" and placement == "nvme":
        placement = "streamed from nvme"  # gradients on disk take parameters along from a device of its own
    if DEVICE != "cpu" and placement in STREAMED and idiom.name in _NEEDS_COPIES_ON_DEVICE:
        pytest.skip("a state_dict of streamed parameters is in RAM")
    try:
        held = run(idiom, options, path, **how)
    except OffloadError:
        if placement in idiom.refused:
            return
        raise
    assert placement not in idiom.refused, f"{idiom.name} is documented as refused when {placement}, and was not"
    held.assert_like(plain)
    if "tiles" in placement and placement in TIERED:
        assert held.tiles or idiom.name in NOTHING_TO_TILE, "no layer of it ran in tiles"
    if "activations" in placement and "units" not in placement and placement in TIERED:
        assert held.waiting_bytes or idiom.name in WITHOUT_UNITS, "no activation of it waited"
