"""Every option, checked before anything is allocated; units and defaults are stated here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from offload.errors import ConfigError, PathError
from offload.sizes import PAGE_BYTES, option_bytes, parse_bytes
from offload.tiers import CPU, DEVICE, NVME, TIERS, Tier

PathLike = str | os.PathLike[str]

MASTER_ITEM_BYTES = 4
SUM_BLOCK = 65536
"""Elements whose squares are summed together (kernels.h: OFFLOAD_SUM_BLOCK)."""
COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMMIT_EVERY = 100
"""Steps between commits where a path is given and nothing is said about them."""
LEAST_IN_FLIGHT = 3
"""Chunks in flight in a step: one is read while one is in Adam and one is written."""


@dataclass(frozen=True)
class Tuning:
    """What only changes speed, and never a bit of the result, but for `tile`. Sizes are bytes, or such as "64MiB".

    Attributes:
        chunk: bytes of fp32 master in a chunk, which is the unit of transfer, of the Adam kernel and of I/O.
        prefetch_chunks: chunks read from NVMe ahead of the one in use; None: two, or one where only
            that fits the budget.
        prefetch_units: units of streamed parameters fetched ahead of the one in use; None: one, or none where only that
            fits the budgets.
        threads: of the CPU kernels; None: the CPUs this process may use, but for two where the model is on a device:
            these launch its kernels.
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
        recompute: with an activation tier, whether a unit keeps only what enters it, and its forward runs again in its
            backward. False: all that autograd saves in a unit waits in the tier, from 1 KiB a tensor on.
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
    recompute: bool = True

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if "prefetch" in options:
            value = options["prefetch"]
            raise ConfigError(
                f"Tuning(prefetch={value!r}) has become two options: give prefetch_chunks={value!r} for chunks read "
                f"ahead from NVMe, and prefetch_units={value!r} for units of streamed parameters fetched ahead"
            )
        for name in options.keys() - cls.__dataclass_fields__.keys():
            raise ConfigError(f"Tuning({name}={options[name]!r}): {_no_such(name, cls.__dataclass_fields__)}")
        return super().__new__(cls)


@dataclass(frozen=True)
class Config:
    """The options after checking. Sizes in bytes; `chunk_numel` in elements.

    Attributes that `OffloadZero` and `Tuning` do not have by these names:
        in_flight: buffers for streamed chunks; None: 4, or 3 where the budget has no room for more.
        param_tier: of trained parameters; frozen_tier: of frozen ones.
        has_frozen: whether the model has any; keeps_trained: whether trained parameters stay on the device where frozen
            ones stream.
        origins: directories of the run to resume that are not among `paths`.
        chooses_params, chooses_grads, chooses_prefetch: whether the plan may change `param_tier`, `grad_tier` and
            `prefetch_units` to what fits (planner/choice.py).
        tile_bytes: weights larger than this are tiled; None: the plan chooses.
        activation_memory: bytes; None: as the plan has it (planner/placement.py).
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
    param_tier: Tier = DEVICE
    frozen_tier: Tier = DEVICE
    has_frozen: bool = False
    keeps_trained: bool = False
    prefetch_units: int = 1
    stage: int | None = None
    bucket_bytes: int = 32 << 20
    ranks_on_node: int = 1
    grad_tier: Tier = CPU
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
    activation_tier: Tier | None = None
    activation_memory: int | None = None
    partition_activations: bool = False
    recompute: bool = True
    takes_any: bool = False

    @property
    def slots_per_chunk(self) -> int:
        """Slots a chunk of states."""
        return 1 if self.commit_every is None else 2

    def is_due(self, step: int) -> bool:
        """Whether `commit_every` wants a commit of `step`."""
        every = self.commit_every or 0
        return every > 0 and step > 0 and step % every == 0

    @property
    def streams(self) -> bool:
        """Whether parameters stream, trained or frozen."""
        return max(self.param_tier, self.frozen_tier) > DEVICE

    @property
    def stores_gradients_of_device(self) -> bool:
        """Whether gradients of parameters that stay on the device are on NVMe. A device with memory of its own cannot:
        new parameters are kept in the memory of their gradients until they are applied."""
        return self.grad_tier.is_durable and self.param_tier == DEVICE

    def with_params_on(self, tier: Tier) -> Config:
        """Parameters stream from `tier`: the frozen ones, and the trained ones unless they are so few that they stay,
        or from a faster tier if their states are on one."""
        trained = DEVICE if self.keeps_trained else min(tier, self.tier)
        return replace(self, param_tier=trained, frozen_tier=tier if self.has_frozen else DEVICE)

    @property
    def declared(self) -> int | str:
        """`accumulation` as it was given."""
        return "auto" if self.takes_any else self.accumulation

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
    accumulation: int | str = 1,
    nonfinite: str = "raise",
    param_tier: str | None = None,
    stage: int | None = None,
    grad_tier: str | None = None,
    commit_every: int | str | None = "auto",
    resume: bool | str | PathLike | Sequence[PathLike] = False,
    cast_forward_inputs: bool = True,
    keep: int = 2,
    activation_tier: str | None = None,
    activation_memory: int | str | None = None,
    partition_activations: bool = False,
    tuning: Tuning | None = None,
    **unknown: Any,
) -> Config:
    """The options of `OffloadZero`, checked.

    Raises: ConfigError naming the option, its value and what is allowed.
    """
    tuning = Tuning() if tuning is None else tuning
    _refuse((not isinstance(tuning, Tuning), f"tuning={tuning!r} is not a Tuning: give offload.Tuning(chunk=...)"))
    _refuse_unknown(unknown)
    paths = _paths("path", path)
    commits = (COMMIT_EVERY if paths else None) if commit_every == "auto" else commit_every
    states = (NVME.name if paths else CPU.name) if tier is None else tier
    params = DEVICE.name if param_tier is None else param_tier
    grads = (DEVICE.name if states == DEVICE.name else CPU.name) if grad_tier is None else grad_tier
    chunk_bytes = parse_bytes(tuning.chunk, "Tuning.chunk")
    # With gradients in slots a block whose squares are summed has to lie in one chunk.
    least_chunk, where = PAGE_BYTES, ""
    if grads == NVME.name:
        least_chunk, where = MASTER_ITEM_BYTES * SUM_BLOCK, ' with grad_tier="nvme"'
    is_elsewhere = isinstance(resume, os.PathLike | list | tuple)
    _refuse(
        _none_of("tier", states, *TIERS),
        _none_of("param_tier", params, *TIERS),
        _none_of("grad_tier", grads, *(TIERS if states == DEVICE.name else (CPU.name, NVME.name))),
        _none_of("activation_tier", activation_tier, None, *TIERS),
        _none_of("partition_activations", partition_activations, True, False),
        _none_of("Tuning.recompute", tuning.recompute, True, False),
        _none_of("compute_dtype", compute_dtype, *COMPUTE_DTYPES),
        _none_of("nonfinite", nonfinite, "raise", "skip"),
        _none_of("stage", stage, None, 1, 2, 3),
        _none_of("cast_forward_inputs", cast_forward_inputs, True, False),
        _none_of("Tuning.io_engine", tuning.io_engine, "auto", "uring", "threads", "portable"),
        _none_of("Tuning.split_master", tuning.split_master, None, False, True),
        (
            isinstance(commits, str) or not _is_whole(commits, 0),
            f'commit_every={commits!r}: give a whole number of steps, at least 0, None or "auto"',
        ),
        (
            not is_elsewhere and _none_of("resume", resume, True, False, "auto")[0],
            f'resume={resume!r}: choose True, False, "auto", or the directories of a run, as a list',
        ),
        (
            accumulation is None or (accumulation != "auto" and not _is_whole(accumulation, 1)),
            f'accumulation={accumulation!r}: give a whole number, at least 1, or "auto"',
        ),
        (keep is None, "keep=None: give a whole number, at least 1"),
        _not_whole("keep", keep, 1),
        _not_whole("Tuning.prefetch_chunks", tuning.prefetch_chunks, 0),
        _not_whole("Tuning.prefetch_units", tuning.prefetch_units, 0),
        _not_whole("Tuning.threads", tuning.threads, 1),
        (
            chunk_bytes < least_chunk,
            f"Tuning.chunk={tuning.chunk!r} is too small{where}: give at least {option_bytes(least_chunk)}",
        ),
    )
    units, kinds = tuning.units, "a module's name nor a module class"
    units = None if units is None else _modules("Tuning.units", units, str, kinds)
    origins = _paths("resume", resume) if is_elsewhere else ()
    here = {os.path.realpath(one) for one in paths}
    ahead = tuning.prefetch_chunks
    config = Config(
        tier=TIERS[states],
        paths=paths,
        cpu_memory=None if cpu_memory is None else parse_bytes(cpu_memory, "cpu_memory"),
        device_memory=None if device_memory is None else parse_bytes(device_memory, "device_memory"),
        compute_dtype=compute_dtype,
        keep_fp32=_modules("keep_fp32", keep_fp32, nn.Module, "a module nor a module type"),
        accumulation=2 if accumulation == "auto" else accumulation,  # type: ignore[arg-type]  # others were refused
        skip_nonfinite=nonfinite == "skip",
        chunk_numel=chunk_bytes // PAGE_BYTES * PAGE_BYTES // MASTER_ITEM_BYTES,
        in_flight=None if ahead is None else max(ahead + 2, LEAST_IN_FLIGHT),
        threads=tuning.threads,
        io_engine=tuning.io_engine,
        # Only a bf16 copy is the upper half of its master.
        split_master=bool(tuning.split_master) and compute_dtype is torch.bfloat16,
        param_tier=min(TIERS[params], TIERS[states]),
        frozen_tier=TIERS[params],
        prefetch_units=1 if tuning.prefetch_units is None else tuning.prefetch_units,
        chooses_prefetch=tuning.prefetch_units is None,
        stage=stage,
        bucket_bytes=parse_bytes(tuning.bucket, "Tuning.bucket"),
        grad_tier=TIERS[grads],
        commit_every=commits,  # type: ignore[arg-type]  # it was refused if it is a str
        resume="auto" if resume == "auto" else bool(resume) or is_elsewhere,
        origins=tuple(one for one in origins if os.path.realpath(one) not in here),
        units=units,
        tile_bytes=None if tuning.tile is None else parse_bytes(tuning.tile, "Tuning.tile"),
        cast_forward_inputs=cast_forward_inputs,
        keep=keep,
        activation_tier=None if activation_tier is None else TIERS[activation_tier],
        activation_memory=None if activation_memory is None else parse_bytes(activation_memory, "activation_memory"),
        partition_activations=partition_activations,
        recompute=tuning.recompute,
        takes_any=accumulation == "auto",
        chooses_params=param_tier is None and states != DEVICE.name,
        chooses_grads=grad_tier is None and states != DEVICE.name,
    )
    _refuse_together(config, tuning)
    return config


def _refuse_together(config: Config, tuning: Tuning) -> None:
    """Refuses options of which each is allowed, and that have no meaning together. Args: config: made of them."""
    has_path, has_activations = bool(config.paths), config.activation_tier is not None
    _refuse(
        (
            config.commit_every is not None and not has_path,
            f'commit_every={config.commit_every} needs path="...", the directory in which what is committed lies',
        ),
        (
            bool(config.resume) and not has_path and not config.origins,
            f"resume={config.resume!r} needs path, where the run lies, or its directories: resume=[...]",
        ),
        (config.tier.is_durable and not has_path, 'tier="nvme" needs path="...", the directory for its swap files'),
        (
            has_path
            and config.commit_every is None
            and NVME not in (config.tier, config.frozen_tier, config.activation_tier),
            f'path={[*map(str, config.paths)]} has no use with tier="{config.tier}" and no commits: drop it, drop '
            'commit_every=None, or choose tier="nvme"',
        ),
        (
            config.activation_tier == NVME and not has_path,
            'activation_tier="nvme" needs path="...", the directory for what waits there',
        ),
        (
            config.activation_memory is not None and not has_activations,
            f"activation_memory={config.activation_memory} needs activation_tier, which says what it is for: choose "
            '"device", "cpu" or "nvme"',
        ),
        (
            config.partition_activations and not has_activations,
            "partition_activations=True needs activation_tier, which says where the parts wait: choose "
            '"device", "cpu" or "nvme"',
        ),
        (
            config.grad_tier > DEVICE and config.tier == DEVICE,
            f'grad_tier="{config.grad_tier}" with tier="device": gradients wait beside the states that they change; '
            "leave grad_tier out",
        ),
        (
            config.grad_tier.is_durable and config.tier == CPU,
            'grad_tier="nvme" needs tier="nvme" and path="...", the directory for the swap files',
        ),
        (
            config.frozen_tier.is_durable and not has_path,
            'param_tier="nvme" needs path="...", the directory for its swap files',
        ),
        (
            bool(tuning.split_master) and config.compute_dtype is torch.float16,
            "Tuning.split_master=True with compute_dtype=torch.float16: only a bf16 parameter is the upper half of its "
            "master; leave split_master out, or choose torch.bfloat16",
        ),
        (
            bool(tuning.split_master) and config.tier == DEVICE,
            'Tuning.split_master=True with tier="device": it saves bytes of a step over the disk, and there are none; '
            "leave it out",
        ),
    )


SMALL = 1 / 16
"""Of the frozen parameters' bytes: trained parameters that take less stay on the device while the others stream."""


def for_model(config: Config, *, trained_bytes: int, frozen_bytes: int) -> Config:
    """What `config` means for a model. Args: trained_bytes, frozen_bytes: what its parameters take on the device.

    Raises: ConfigError for a `param_tier` that only frozen parameters can have.
    """
    if config.frozen_tier > DEVICE and not frozen_bytes:
        _refuse(
            (
                config.tier == DEVICE,
                f'param_tier="{config.frozen_tier}" with tier="device", and no parameter is frozen: states take six '
                "times what parameters take, and would stay there; leave param_tier out, or choose "
                'tier="cpu" or "nvme"',
            ),
            (
                config.frozen_tier != config.param_tier,
                f'param_tier="{config.frozen_tier}" with tier="{config.tier}", and no parameter is frozen: states take '
                'six times what parameters take, and would stay in RAM; choose tier="nvme", or param_tier="cpu"',
            ),
        )
    wanted = config.frozen_tier
    config = replace(config, has_frozen=frozen_bytes > 0, keeps_trained=trained_bytes < frozen_bytes * SMALL)
    return config.with_params_on(wanted)


def over_ranks(config: Config, *, ranks: int, ranks_on_node: int, slices: int = 1) -> Config:
    """What `config` means for one of several ranks; with one rank it is what it is.

    Args: ranks: that hold a shard each; ranks_on_node: that share this machine; slices: tensor-parallel ranks.
    Raises: ConfigError for what several ranks cannot do.
    """
    config = replace(config, ranks_on_node=ranks_on_node)
    if ranks * slices == 1:
        return config
    # All ranks have the same tiers, whatever each of them has free.
    if config.tile_bytes:
        raise ConfigError(
            f"Tuning.tile={option_bytes(config.tile_bytes)} with {ranks * slices} ranks: over several ranks every "
            "layer is gathered as a whole; leave it out"
        )
    config = replace(config, chooses_params=False, chooses_grads=False, tile_bytes=0)
    if ranks == 1:
        return config
    streams = config.streams
    stage = config.stage or (3 if streams else 2)
    if config.grad_tier.is_durable and stage == 1 and config.accumulation > 1:
        raise ConfigError(
            f'grad_tier="nvme" with stage=1 and accumulation={config.declared!r}: at stage 1 each rank sums whole '
            "gradients in RAM; choose stage=2, or leave grad_tier out"
        )
    # A rank's shards of the parameters rest where its gradients wait, and come to the device around their use.
    if stage == 3:
        trained = max(CPU, config.param_tier)
        frozen = CPU if config.has_frozen and not streams else config.frozen_tier
        config = replace(config, param_tier=trained, frozen_tier=frozen)
    return replace(config, stage=stage)


def replicas_of(config: Config, *, ranks: int, rows: int) -> int:
    """Groups of ranks of which each keeps all parameters in its tier.

    Args: config: as `over_ranks` returns it; rows: of the mesh given as process_group. At stage 3 each of these is one;
    before it each rank that streams parameters keeps all of them.
    """
    if config.stage == 3:
        return rows
    return 1 if config.param_tier == DEVICE else ranks


HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused", "capturable")
"""What users give to Adam or AdamW, and not to OffloadZero."""


Fault = tuple[bool, str]
"""Whether it is there, and what to say then."""


def _refuse(*faults: Fault) -> None:
    """Raises: ConfigError that says the first fault that is there."""
    for is_there, message in faults:
        if is_there:
            raise ConfigError(message)


def _none_of(option: str, value: object, *allowed: object) -> Fault:
    *most, last = (f'"{one}"' if isinstance(one, str) else str(one) for one in allowed if one is not None)
    is_allowed = any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in allowed)
    return not is_allowed, f"{option}={value!r}: choose {', '.join(most)} or {last}"


def _not_whole(option: str, value: object, least: int) -> Fault:
    return not _is_whole(value, least), f"{option}={value!r}: give a whole number, at least {least}"


def _is_whole(value: object, least: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)


def _refuse_unknown(options: Mapping[str, object]) -> None:
    known = {*(check.__kwdefaults__ or ()), "device", "init", "init_missing", "process_group"}
    for name, value in options.items():
        if name in HYPER_PARAMETERS:
            raise ConfigError(
                f"{name}={value!r} is an option of the optimizer that OffloadZero takes over: give "
                f"OffloadZero(model, torch.optim.AdamW(model.parameters(), {name}={value!r}))"
            )
        if name in Tuning.__dataclass_fields__:
            raise ConfigError(
                f"{name}={value!r} is an option of Tuning: give OffloadZero(..., tuning=Tuning({name}={value!r}))"
            )
        raise ConfigError(f"{name}={value!r}: {_no_such(name, known)}")


def _no_such(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(sorted(known))}"
    return f"there is no such option; {hint}"


def absolute(path: PathLike) -> Path:
    """Raises: PathError for a relative path where there is no working directory any more."""
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        raise PathError(
            error.errno,
            "is relative, and the working directory was removed: give an absolute path, or change to another directory",
            str(path),
        ) from error


def _paths(option: str, given: Any) -> tuple[Path, ...]:
    several = given if isinstance(given, list | tuple) else () if given is None else (given,)
    names = [os.fspath(one) if isinstance(one, str | os.PathLike) else one for one in several]
    fix = "give the directory for the swap files, or a list of them"
    is_name = [isinstance(name, str) and name != "" and "\0" not in name for name in names]
    _refuse(
        (given is not None and not names, f"{option}={given!r} names no directory: {fix}"),
        (not all(is_name), f"{option}={given!r} names no directory: {fix}"),
    )
    # Absolute now: where a relative one leads changes with the working directory.
    paths = tuple(map(absolute, names))
    real = [os.path.realpath(path) for path in paths]
    _refuse(
        *(
            (real.count(name) > 1, f"{option} names {str(path)!r} more than once: give each directory once")
            for path, name in zip(paths, real, strict=True)
        )
    )
    return paths


def _modules(option: str, given: Any, instances: type, kinds: str) -> tuple[Any, ...]:
    """Args: instances: what it may hold beside subclasses of nn.Module; kinds: both in words, with "nor" between."""
    if isinstance(given, str | nn.Module | type) or not isinstance(given, Iterable):
        raise ConfigError(f"{option}={given!r}: give a sequence, such as ({given!r},)")
    modules = tuple(given)
    for one in modules:
        if not (isinstance(one, instances) or (isinstance(one, type) and issubclass(one, nn.Module))):
            raise ConfigError(f"{option} holds {one!r}, which is neither {kinds}")
    return modules
