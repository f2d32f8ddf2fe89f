"""Every option, checked before anything is allocated; units and defaults are stated here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from offload.errors import ConfigError
from offload.sizes import PAGE_BYTES, parse_bytes

Tier = Literal["device", "cpu", "nvme"]
PathLike = str | os.PathLike[str]

MASTER_ITEM_BYTES = 4
SUM_BLOCK = 65536
"""Elements whose squares are summed together (kernels.h: OFFLOAD_SUM_BLOCK)."""
COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STAGES = (1, 2, 3)
COMMIT_EVERY = 100
"""Steps between commits where a path is given and nothing is said about them."""
LEAST_IN_FLIGHT = 3
"""Chunks in flight in a step: one is read while one is in Adam and one is written."""


@dataclass(frozen=True)
class Tuning:
    """What only changes speed, and never a bit of the result, but for `tile`. Sizes are bytes, or such as "64MiB".

    Attributes:
        chunk: bytes of fp32 master in a chunk, which is the unit of transfer, of the Adam kernel and of I/O.
        prefetch_chunks: chunks read from NVMe ahead of the one in use; None: as many as the budget has buffers for.
        prefetch_units: units of streamed parameters fetched ahead of the one in use; None: one, or none where only that
            fits the budgets.
        threads: of the CPU kernels; None: the CPUs this process may use.
        io_engine: "uring", "threads", "portable", or "auto": the fastest that works here, as measured by
            `offload bench io`.
        split_master: True: only the low half of a bf16 parameter's master is written to NVMe, 10 bytes a parameter
            instead of 12; the upper half is the parameter itself. Then `load_state_dict` is the only way to write to
            parameters from outside. None: False.
        bucket: bytes of a buffer in which gradients travel between ranks.
        units: the modules whose parameters are fetched and released together: a sequence of names in the model, such as
            "layers.3.mlp", and of module classes, which stand for all their instances. A parameter belongs to its
            innermost unit, and to the root unit if no unit contains it. None: each element of a ModuleList or
            Sequential of blocks is a unit.
        tile: bytes. Where parameters stream, a linear layer with a larger weight runs in tiles of about this size, one
            after the other; its results are the same within rounding (docs/exactness.md). 0: no layer does. None: as
            few tiles as `device_memory` allows.
    """

    chunk: int | str = "64MiB"
    prefetch_chunks: int | None = None
    prefetch_units: int | None = None
    threads: int | None = None
    io_engine: str = "auto"
    split_master: bool | None = None
    bucket: int | str = "32MiB"
    units: Sequence[str | type[nn.Module]] | None = None
    tile: int | str | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if "prefetch" in options:
            value = options["prefetch"]
            raise ConfigError(
                f"Tuning(prefetch={value!r}) has become two options: give prefetch_chunks={value!r} for chunks read "
                f"ahead from NVMe, and prefetch_units={value!r} for units of streamed parameters fetched ahead"
            )
        return super().__new__(cls)


@dataclass(frozen=True)
class Config:
    """The options after checking. Sizes in bytes; `chunk_numel` in elements.

    Attributes that `OffloadZero` and `Tuning` do not have by these names:
        in_flight: buffers for streamed chunks, None: as the budget allows.
        origins: directories of the run to resume that are not among `paths`.
        chooses_params, chooses_grads, chooses_prefetch: whether the plan may change `param_tier`, `grad_tier` and
            `prefetch_units` to what fits (planner/choice.py).
        tile_bytes: weights larger than this are tiled; None: the plan chooses.
    """

    tier: Tier
    paths: tuple[Path, ...]
    cpu_memory: int | None
    compute_dtype: torch.dtype
    keep_fp32: tuple[nn.Module | type[nn.Module], ...]
    accumulation: int
    skip_nonfinite: bool
    chunk_numel: int
    in_flight: int | None
    threads: int | None
    io_engine: str
    split_master: bool
    param_tier: Tier = "device"
    prefetch_units: int = 1
    stage: int | None = None
    bucket_bytes: int = 32 << 20
    ranks_on_node: int = 1
    grad_tier: Tier = "cpu"
    commit_every: int | None = None
    resume: bool | Literal["auto"] = False
    units: tuple[str | type[nn.Module], ...] | None = None
    origins: tuple[Path, ...] = ()
    device_memory: int | None = None
    chooses_params: bool = False
    chooses_grads: bool = False
    chooses_prefetch: bool = False
    tile_bytes: int | None = None
    cast_forward_inputs: bool = True
    keep: int = 2

    @property
    def slots_per_chunk(self) -> int:
        """Slots a chunk of states."""
        return 1 if self.commit_every is None else 2

    def is_due(self, step: int) -> bool:
        """Whether `commit_every` wants a commit of `step`."""
        every = self.commit_every or 0
        return every > 0 and step > 0 and step % every == 0

    @property
    def commits_parameters(self) -> bool:
        """Whether a commit holds the 16-bit parameters, too: they are the upper halves of a split master."""
        return self.split_master and self.commit_every is not None


def check(
    *,
    tier: str | None = None,
    path: PathLike | Sequence[PathLike] | None = None,
    cpu_memory: int | str | None = None,
    device_memory: int | str | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
    keep_fp32: Iterable[nn.Module | type[nn.Module]] = (),
    accumulation: int = 1,
    nonfinite: str = "raise",
    param_tier: str | None = None,
    stage: int | None = None,
    grad_tier: str | None = None,
    commit_every: int | str | None = "auto",
    resume: bool | str | PathLike | Sequence[PathLike] = False,
    cast_forward_inputs: bool = True,
    keep: int = 2,
    tuning: Tuning | None = None,
    **reserved: Any,
) -> Config:
    """The options of `OffloadZero`, checked.

    Raises: ConfigError naming the option, its value and what is allowed.
    """
    tuning = Tuning() if tuning is None else tuning
    if not isinstance(tuning, Tuning):
        raise ConfigError(f"tuning={tuning!r} is not a Tuning: give offload.Tuning(chunk=...)")
    _refuse_reserved(reserved, tuning)
    directories = _paths(path)
    commits = _commit_every(commit_every, directories)
    chosen = _tier(tier, directories, commits=commits is not None)
    if compute_dtype not in COMPUTE_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in COMPUTE_DTYPES)
        raise ConfigError(f"compute_dtype={compute_dtype} is not available: choose one of {allowed}")
    if tuning.split_master and compute_dtype is torch.float16:
        raise ConfigError(
            "Tuning.split_master=True with compute_dtype=torch.float16: only a bf16 parameter is the upper half of its "
            "master; leave split_master out, or choose torch.bfloat16"
        )
    if nonfinite not in ("raise", "skip"):
        raise ConfigError(f'nonfinite={nonfinite!r}: choose "raise" or "skip"')
    if tuning.split_master and chosen == "device":
        raise ConfigError(
            'Tuning.split_master=True with tier="device": it saves bytes of a step over the disk, and there are none; '
            "leave it out"
        )
    if not isinstance(cast_forward_inputs, bool):
        raise ConfigError(f"cast_forward_inputs={cast_forward_inputs!r}: choose True or False")
    chunks_ahead = _whole("Tuning.prefetch_chunks", tuning.prefetch_chunks, least=0)
    units_ahead = _whole("Tuning.prefetch_units", tuning.prefetch_units, least=0)
    return Config(
        tier=chosen,
        paths=directories,
        cpu_memory=None if cpu_memory is None else parse_bytes(cpu_memory, "cpu_memory"),
        device_memory=None if device_memory is None else parse_bytes(device_memory, "device_memory"),
        compute_dtype=compute_dtype,
        keep_fp32=_modules(keep_fp32),
        accumulation=_accumulation(accumulation),
        skip_nonfinite=nonfinite == "skip",
        chunk_numel=_chunk_numel(tuning.chunk, stored_gradients=grad_tier == "nvme"),
        in_flight=None if chunks_ahead is None else max(chunks_ahead + 2, LEAST_IN_FLIGHT),
        threads=_whole("Tuning.threads", tuning.threads, least=1),
        io_engine=tuning.io_engine,
        # Only a bf16 copy is the upper half of its master.
        split_master=bool(tuning.split_master) and compute_dtype is torch.bfloat16,
        param_tier=_param_tier(param_tier, chosen),
        prefetch_units=1 if units_ahead is None else units_ahead,
        chooses_prefetch=units_ahead is None,
        stage=_stage(stage),
        bucket_bytes=parse_bytes(tuning.bucket, "Tuning.bucket"),
        grad_tier=_grad_tier(grad_tier, chosen),
        commit_every=commits,
        resume=_resume(resume, directories),
        origins=_origins(resume, directories),
        units=_units(tuning.units),
        tile_bytes=None if tuning.tile is None else parse_bytes(tuning.tile, "Tuning.tile"),
        cast_forward_inputs=cast_forward_inputs,
        keep=_whole("keep", keep, least=1) or 2,
        chooses_params=param_tier is None and chosen != "device",
        chooses_grads=grad_tier is None and chosen != "device",
    )


def over_ranks(config: Config, *, ranks: int, ranks_on_node: int) -> Config:
    """What `config` means for one of several ranks; with one rank it is what it is.

    Args: ranks: that hold a partition each; ranks_on_node: that share this machine.
    Raises: ConfigError for what several ranks cannot do.
    """
    config = replace(config, ranks_on_node=ranks_on_node)
    if ranks == 1:
        return config
    # All ranks have the same tiers, whatever each of them has free.
    if config.tile_bytes:
        raise ConfigError(
            f"Tuning.tile={config.tile_bytes} with {ranks} ranks: over several ranks every layer is gathered as a "
            "whole; leave it out"
        )
    config = replace(config, chooses_params=False, chooses_grads=False, tile_bytes=0)
    streams = config.param_tier != "device"
    stage = config.stage or (3 if streams else 2)
    if config.grad_tier == "nvme" and stage == 1 and config.accumulation > 1:
        raise ConfigError(
            f'grad_tier="nvme" with stage=1 and accumulation={config.accumulation}: at stage 1 each rank sums whole '
            "gradients in RAM; choose stage=2, or leave grad_tier out"
        )
    # A rank's partition of the parameters rests where its gradients wait, and comes to the device around its use.
    tier: Tier = "cpu" if stage == 3 and not streams else config.param_tier
    return replace(config, stage=stage, param_tier=tier)


def replicas_of(config: Config, *, ranks: int, rows: int) -> int:
    """Groups of ranks of which each keeps all parameters in its tier.

    Args: config: as `over_ranks` returns it; rows: of the mesh given as process_group. At stage 3 each of these is one;
    before it each rank that streams parameters keeps all of them.
    """
    if config.stage == 3:
        return rows
    return 1 if config.param_tier == "device" else ranks


HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused", "capturable")
"""What users give to Adam or AdamW, and not to OffloadZero."""


def _refuse_reserved(reserved: dict[str, Any], tuning: Tuning) -> None:
    """Raises ConfigError for an option that does not exist, or a value that is not available."""
    options = {*(check.__kwdefaults__ or ()), "device", "process_group"}
    taken: dict[str, tuple[object, ...]] = {
        "Tuning.io_engine": ("auto", "uring", "threads", "portable"),
        "Tuning.split_master": (None, False, True),
    }
    given = {name: getattr(tuning, name.removeprefix("Tuning.")) for name in taken}
    for name, value in reserved.items():
        if name in HYPER_PARAMETERS:
            raise ConfigError(
                f"{name}={value!r} is an option of the optimizer that OffloadZero takes over: give "
                f"OffloadZero(model, torch.optim.AdamW(model.parameters(), {name}={value!r}))"
            )
        if name not in options:
            near = get_close_matches(name, options, 1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(sorted(options))}"
            raise ConfigError(f"{name}={value!r}: there is no such option; {hint}")
    for name, value in given.items():
        if not any(value is one or (isinstance(one, str) and value == one) for one in taken[name]):
            allowed = " or ".join(repr(one) for one in taken[name])
            raise ConfigError(f"{name}={value!r} is not available in this version: leave it at {allowed}")


def _paths(path: PathLike | Sequence[PathLike] | None, option: str = "path") -> tuple[Path, ...]:
    if path is None:
        return ()
    paths = tuple(_one_path(one, option) for one in (path if isinstance(path, list | tuple) else (path,)))
    if not paths:
        raise ConfigError(f"{option}={path!r} names no directory: give the directory for the swap files, or several")
    real = [os.path.realpath(one) for one in paths]
    for one, place in zip(paths, real, strict=True):
        if real.count(place) > 1:
            raise ConfigError(f"{option} names {str(one)!r} more than once: give each directory once")
    return paths


def _one_path(path: object, option: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{option}={path!r} is not a path: give the directory for the swap files, or a list of them")
    name = os.fspath(path)
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"{option}={path!r} names no directory: give the directory for the swap files")
    # Absolute now: where a relative one leads changes with the working directory.
    return Path(name).absolute()


def _tier(tier: str | None, paths: tuple[Path, ...], *, commits: bool) -> Tier:
    if tier is None:
        return "nvme" if paths else "cpu"
    if tier == "nvme":
        if not paths:
            raise ConfigError('tier="nvme" needs path="...", the directory for its swap files')
        return "nvme"
    if tier not in ("device", "cpu"):
        raise ConfigError(f'tier={tier!r} is not a tier for the optimizer states: choose "device", "cpu" or "nvme"')
    if paths and not commits:
        raise ConfigError(
            f'path={str(paths[0])!r} has no use with tier="{tier}" and no commits: drop it, drop '
            'commit_every=None, or choose tier="nvme"'
        )
    return "device" if tier == "device" else "cpu"


def _param_tier(tier: str | None, states: Tier) -> Tier:
    if tier is None or tier == "device":
        return "device"
    if tier in ("cpu", "nvme") and states == "device":
        raise ConfigError(
            f'param_tier="{tier}" with tier="device": states take six times what parameters take, and would stay '
            'there; leave param_tier out, or choose tier="cpu" or "nvme"'
        )
    if tier == "nvme" and states == "cpu":
        raise ConfigError('param_tier="nvme" needs tier="nvme" and path="...", the directory for the swap files')
    if tier == "cpu":
        return "cpu"
    if tier == "nvme":
        return "nvme"
    raise ConfigError(f'param_tier={tier!r} is not a tier for parameters: choose "device", "cpu" or "nvme"')


def _stage(stage: int | None) -> int | None:
    if stage is not None and (isinstance(stage, bool) or stage not in STAGES):
        raise ConfigError(f"stage={stage!r}: choose 1, 2 or 3, or leave it out")
    return stage


def _grad_tier(tier: str | None, states: Tier) -> Tier:
    if states == "device":
        if tier not in (None, "device"):
            raise ConfigError(
                f'grad_tier={tier!r} with tier="device": gradients wait beside the states that they change; leave '
                "grad_tier out"
            )
        return "device"
    if tier is None or tier == "cpu":
        return "cpu"
    if tier == "nvme" and states == "cpu":
        raise ConfigError('grad_tier="nvme" needs tier="nvme" and path="...", the directory for the swap files')
    if tier == "nvme":
        return "nvme"
    raise ConfigError(
        f'grad_tier={tier!r} is not a tier for gradients with tier="{states}": choose "cpu" or "nvme", or leave it out'
    )


def _commit_every(value: int | str | None, paths: tuple[Path, ...]) -> int | None:
    if value == "auto":
        return COMMIT_EVERY if paths else None
    if isinstance(value, str):
        raise ConfigError(f'commit_every={value!r}: give a number of steps, 0, None or "auto"')
    checked = _whole("commit_every", value, least=0)
    if checked is not None and not paths:
        raise ConfigError(f'commit_every={value} needs path="...", the directory in which what is committed lies')
    return checked


def _resume(value: object, paths: tuple[Path, ...]) -> bool | Literal["auto"]:
    if isinstance(value, os.PathLike | list | tuple):
        return True
    if not isinstance(value, bool | str) or value not in (False, True, "auto"):
        raise ConfigError(f'resume={value!r}: choose True, False, "auto", or the directories of a run, as a list')
    if value and not paths:
        raise ConfigError(f"resume={value!r} needs path, where the run lies, or its directories: resume=[...]")
    return "auto" if isinstance(value, str) else value


def _origins(value: object, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    if not isinstance(value, os.PathLike | list | tuple):
        return ()
    real = {os.path.realpath(path) for path in paths}
    named = _paths(value, "resume")
    return tuple(path for path in named if os.path.realpath(path) not in real)


def _accumulation(value: int) -> int:
    checked = _whole("accumulation", value, least=1)
    if checked is None:
        raise ConfigError("accumulation=None: give a whole number, at least 1")
    return checked


def _whole(option: str, value: int | None, *, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{option}={value!r}: give a whole number, at least {least}")
    return value


def _chunk_numel(chunk: int | str, *, stored_gradients: bool) -> int:
    size = parse_bytes(chunk, "Tuning.chunk")
    # With gradients in slots a block whose squares are summed has to lie in one chunk.
    least = MASTER_ITEM_BYTES * SUM_BLOCK if stored_gradients else PAGE_BYTES
    if size < least:
        reason = ' with grad_tier="nvme"' if stored_gradients else ""
        raise ConfigError(f"Tuning.chunk={chunk!r} is too small{reason}: give at least {least} bytes")
    return size // PAGE_BYTES * PAGE_BYTES // MASTER_ITEM_BYTES


def _units(chosen: object) -> tuple[str | type[nn.Module], ...] | None:
    if chosen is None:
        return None
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        raise ConfigError(f"Tuning.units={chosen!r}: give a sequence of names and module classes, as ({chosen!r},)")
    units = tuple(chosen)
    for one in units:
        if not (isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module))):
            raise ConfigError(f"Tuning.units holds {one!r}, which is neither a module's name nor a module class")
    return units


def _modules(keep: Iterable[nn.Module | type[nn.Module]]) -> tuple[nn.Module | type[nn.Module], ...]:
    if isinstance(keep, nn.Module | type) or not isinstance(keep, Iterable):
        raise ConfigError(f"keep_fp32={keep!r}: give a sequence of modules or module types, such as ({keep!r},)")
    modules = tuple(keep)
    for module in modules:
        if not (isinstance(module, nn.Module) or (isinstance(module, type) and issubclass(module, nn.Module))):
            raise ConfigError(f"keep_fp32 holds {module!r}, which is neither a module nor a module type")
    return modules
