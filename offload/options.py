"""Every option, checked before anything is allocated.

`OffloadZero`'s signature, docs/options.md and the command line are tested against this list (tests/test_options.py)."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from offload.errors import ConfigError, PathError
from offload.sizes import MASTER_ITEM_BYTES, PAGE_BYTES, SUM_BLOCK, option_bytes, parse_bytes
from offload.tiers import CPU, DEVICE, NVME, TIERS, Tier

PathLike = str | os.PathLike[str]

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_FORMS = ("fp32", "bf16", "8bit")
"""How Adam's moments may be kept; layout.ADAM_FORMS has them."""
RESUME_STATES = ("committed", "convert", "anew")
"""What becomes of committed states: they go on as they are; they may be in another form; they are left there."""
COMMIT_EVERY = 100
"""Steps between commits where a path is given and nothing is said about them."""


@dataclass(frozen=True)
class Tuning:
    """Options that only change speed. None of them changes a bit of the result, but for `tile`.

    Sizes are ints of bytes, or strings such as "64MiB".

    Attributes:
        chunk: bytes of fp32 master in a chunk, which is the unit of transfer, of the Adam kernel and of I/O.
        prefetch_chunks: how many chunks are read from NVMe ahead of the one in use; None: two, or one where only that
            fits the budget.
        prefetch_units: how many units of streamed parameters are fetched ahead of the one in use; None: one, or none
            where only that fits the budgets, or one rank computes on the CPU, where nothing copies beside the compute.
        threads: how many threads the CPU kernels have; None: one for each CPU that this process may use. Where the
            model is on a device, two CPUs are left for the threads that launch its kernels.
        io_engine: "uring", "threads", "portable", or "auto": the fastest that works here, as measured by `offload bench
            io`.
        split_master: True: only the low half of a bf16 parameter's master is written to NVMe, 10 bytes a parameter
            instead of 12; the upper half is the parameter itself. Then `load_state_dict` is the only way to write to
            parameters from outside. None: False.
        bucket: bytes of a buffer in which gradients travel between ranks, and in which small units do together.
        units: the modules whose parameters are fetched and released together. They are given as a sequence of names in
            the model, such as "layers.3.mlp", and of module classes, which stand for all their instances. A parameter
            belongs to its innermost unit, and to the root unit if no unit contains it. None: each element of a
            ModuleList or Sequential of blocks is a unit.
        recompute: with an activation tier, whether a unit keeps only what enters it, and its forward runs again in its
            backward. False: all that autograd saves in a unit waits in the tier, from 1 KiB a tensor on.
        speculate: whether chunks of states that stream from NVMe are stepped in backward already, with the scalars that
            are expected, while the disk would wait. `step()` keeps what has the right ones, and makes the others anew:
            the bits are those of False. It takes one more slot a chunk on the disk, 12 bytes a parameter, and 2 bytes
            of RAM for most parameters, and writes more where some steps are clipped and others are not. It is for
            optimizers that look at single elements. "auto": where `offload probe` has measured this machine, the disk
            has the room, and by these rates steps can be 5 % faster (docs/options.md); what is resumed has as many
            slots as it had.
        tile: bytes. Where parameters stream, a linear layer with a larger weight runs in tiles of about this size, one
            after the other; its results are the same within rounding (docs/exactness.md). 0: no layer does. None: as
            few tiles as `device_memory` allows.
        late: whether experts that did nothing in a step are not moved: with states on NVMe, a tile of a parameter with
            three dimensions whose gradient is zeros owes that step, and owed steps of Adam and AdamW are made, one
            after the other, when somebody reads the tile or tokens come. False: each step moves all tiles.
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
    speculate: bool | str = False
    late: bool = True

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


_PARSED = (
    "units", "origins", "cpu_bytes", "device_bytes", "fp32_modules", "bucket_bytes", "tile_bytes", "activation_bytes",
)  # fmt: skip
"""Properties of `Options` that say what is wrong with what they are made of."""
Fault = tuple[bool, str]
"""Whether it is there, and what to say then."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user said: the arguments of `OffloadZero` by the same names, checked together when this is made.

    The attributes are as they were given. The properties say what they mean by themselves. What they mean for a model,
    a machine and ranks is decided by the planner (planner/decide.py).

    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """

    tier: str | None = None
    path: PathLike | Sequence[PathLike] | None = None
    param_tier: str | None = None
    grad_tier: str | None = None
    cpu_memory: int | str | None = None
    device_memory: int | str | None = None
    compute_dtype: torch.dtype = torch.bfloat16
    keep_fp32: Iterable[nn.Module | type[nn.Module]] = ()
    accumulation: int | str = 1
    nonfinite: str = "raise"
    commit_every: int | str | None = "auto"
    resume: bool | str | PathLike | Sequence[PathLike] = False
    resume_states: str = "committed"
    resume_transfer: bool = False
    device: torch.device | str | None = None
    init: Any = None  # a type of the room that makes models
    init_missing: bool = False
    stage: int | None = None
    process_group: object | None = None
    cast_forward_inputs: bool = True
    keep: int = 2
    lock_timeout: float = 120.0
    activation_tier: str | None = None
    activation_memory: int | str | None = None
    partition_activations: bool = False
    states: str = "fp32"
    tuning: Tuning | None = None

    def __new__(cls, **options: Any) -> Self:
        _refuse_unknown({name: value for name, value in options.items() if name not in cls.__dataclass_fields__})
        return super().__new__(cls)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Makes the options from the arguments of a call.

        Args:
            arguments: by name. Those that are no options are left out. Those in `unknown` are refused if they are none.
        """
        known = {name: value for name, value in arguments.items() if name in cls.__dataclass_fields__}
        return cls(**arguments["unknown"], **known)

    def __post_init__(self) -> None:
        _refuse(
            (
                not isinstance(self.tuned, Tuning),
                f"tuning={self.tuning!r} is not a Tuning: give offload.Tuning(chunk=...)",
            )
        )
        _ = self.paths
        chunk_bytes = parse_bytes(self.tuned.chunk, "Tuning.chunk")
        _refuse(*self._wrong(chunk_bytes))
        # Now, although some are asked for later: each says what is wrong with its option.
        for name in _PARSED:
            getattr(self, name)
        _refuse(*self._wrong_together())

    def _wrong(self, chunk_bytes: int) -> Iterator[Fault]:
        """What is wrong with each option by itself."""
        tuning, states = self.tuned, self._state_tier
        # With gradients in slots a block whose squares are summed has to lie in one chunk.
        least_chunk, where = PAGE_BYTES, ""
        if self._grads == NVME.name:
            least_chunk, where = MASTER_ITEM_BYTES * SUM_BLOCK, ' with grad_tier="nvme"'
        every, accumulation = self._every, self.accumulation
        yield _none_of("tier", states, *TIERS)
        yield _none_of("param_tier", DEVICE.name if self.param_tier is None else self.param_tier, *TIERS)
        yield _none_of("grad_tier", self._grads, *(TIERS if states == DEVICE.name else (CPU.name, NVME.name)))
        yield _none_of("activation_tier", self.activation_tier, None, *TIERS)
        yield _none_of("partition_activations", self.partition_activations, True, False)
        yield _none_of("Tuning.recompute", tuning.recompute, True, False)
        yield _none_of("Tuning.speculate", tuning.speculate, "auto", True, False)
        yield _none_of("Tuning.late", tuning.late, True, False)
        yield _none_of("compute_dtype", self.compute_dtype, *COMPUTE_DTYPES)
        yield _none_of("nonfinite", self.nonfinite, "raise", "skip")
        yield _none_of("stage", self.stage, None, 1, 2, 3)
        yield _none_of("states", self.states, *STATE_FORMS)
        yield _none_of("resume_states", self.resume_states, *RESUME_STATES)
        yield _none_of("resume_transfer", self.resume_transfer, True, False)
        yield _none_of("cast_forward_inputs", self.cast_forward_inputs, True, False)
        yield _none_of("Tuning.io_engine", tuning.io_engine, "auto", "uring", "threads", "portable")
        yield _none_of("Tuning.split_master", tuning.split_master, None, False, True)
        yield (
            isinstance(every, str) or not _is_whole(every, 0),
            f'commit_every={every!r}: give a whole number of steps, at least 0, None or "auto"',
        )
        yield (
            not self._is_elsewhere and _none_of("resume", self.resume, True, False, "auto")[0],
            f'resume={self.resume!r}: choose True, False, "auto", or the directories of a run, as a list',
        )
        yield (
            accumulation is None or (accumulation != "auto" and not _is_whole(accumulation, 1)),
            f'accumulation={accumulation!r}: give a whole number, at least 1, or "auto"',
        )
        yield self.keep is None, "keep=None: give a whole number, at least 1"
        yield _not_whole("keep", self.keep, 1)
        yield (
            not isinstance(self.lock_timeout, int | float) or not 0 <= self.lock_timeout < math.inf,
            f"lock_timeout={self.lock_timeout!r}: give seconds, at least 0",
        )
        yield _not_whole("Tuning.prefetch_chunks", tuning.prefetch_chunks, 0)
        yield _not_whole("Tuning.prefetch_units", tuning.prefetch_units, 0)
        yield _not_whole("Tuning.threads", tuning.threads, 1)
        yield (
            chunk_bytes < least_chunk,
            f"Tuning.chunk={tuning.chunk!r} is too small{where}: give at least {option_bytes(least_chunk)}",
        )

    def _wrong_together(self) -> Iterator[Fault]:
        """What is wrong with options that are allowed, each by itself, but mean nothing together."""
        has_path, has_activations = bool(self.paths), self.activation_tier is not None
        yield (
            self.every is not None and not has_path,
            f'commit_every={self.every} needs path="...", the directory in which what is committed lies',
        )
        yield (
            bool(self.resumes) and not has_path and not self.origins,
            f"resume={self.resumes!r} needs path, where the run lies, or its directories: resume=[...]",
        )
        yield (
            self.resume_states != RESUME_STATES[0] and not self.resumes,
            f'resume_states="{self.resume_states}" needs resume, which says what to continue: give resume=True, or '
            "leave it out",
        )
        yield (
            self.resume_transfer and not self.resumes,
            "resume_transfer=True needs resume, which says what to continue: give resume=True, or leave it out",
        )
        yield (
            self.state_tier.is_durable and not has_path,
            'tier="nvme" needs path="...", the directory for its swap files',
        )
        yield (
            has_path and self.every is None and NVME not in (self.state_tier, self.params, self.activations),
            f'path={[*map(str, self.paths)]} has no use with tier="{self.state_tier}" and no commits: drop it, drop '
            'commit_every=None, or choose tier="nvme"',
        )
        yield (
            self.activations == NVME and not has_path,
            'activation_tier="nvme" needs path="...", the directory for what waits there',
        )
        yield (
            self.activation_memory is not None and not has_activations,
            f"activation_memory={self.activation_bytes} needs activation_tier, which says what it is for: choose "
            '"device", "cpu" or "nvme"',
        )
        yield (
            self.partition_activations and not has_activations,
            "partition_activations=True needs activation_tier, which says where the parts wait: choose "
            '"device", "cpu" or "nvme"',
        )
        yield (
            self.grads > DEVICE and self.state_tier == DEVICE,
            f'grad_tier="{self.grads}" with tier="device": gradients wait beside the states that they change; '
            "leave grad_tier out",
        )
        yield (
            self.grads.is_durable and self.state_tier == CPU,
            'grad_tier="nvme" needs tier="nvme" and path="...", the directory for the swap files',
        )
        yield (
            self.params.is_durable and not has_path,
            'param_tier="nvme" needs path="...", the directory for its swap files',
        )
        yield (
            bool(self.tuned.split_master) and self.compute_dtype is torch.float16,
            "Tuning.split_master=True with compute_dtype=torch.float16: only a bf16 parameter is the upper half of its "
            "master; leave split_master out, or choose torch.bfloat16",
        )
        yield (
            bool(self.tuned.split_master) and self.state_tier == DEVICE,
            'Tuning.split_master=True with tier="device": it saves bytes of a step over the disk, and there are none; '
            "leave it out",
        )

        yield (
            self.tuned.speculate is True and not self.state_tier.is_durable,
            f'Tuning.speculate=True with tier="{self.state_tier}": it hides the disk, and no states are there; '
            'leave it out, or choose tier="nvme"',
        )

    # Tiers.

    @property
    def _state_tier(self) -> str:
        return (NVME.name if self.paths else CPU.name) if self.tier is None else self.tier

    @property
    def _grads(self) -> str:
        return (
            (DEVICE.name if self._state_tier == DEVICE.name else CPU.name) if self.grad_tier is None else self.grad_tier
        )

    @property
    def state_tier(self) -> Tier:
        return TIERS[self._state_tier]

    @property
    def params(self) -> Tier:
        """The tier where parameters are wanted; frozen ones always go there."""
        return DEVICE if self.param_tier is None else TIERS[self.param_tier]

    @property
    def grads(self) -> Tier:
        return TIERS[self._grads]

    @property
    def activations(self) -> Tier | None:
        return None if self.activation_tier is None else TIERS[self.activation_tier]

    # Directories, commits and budgets.

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        return _paths("path", self.path)

    @property
    def _is_elsewhere(self) -> bool:
        return isinstance(self.resume, os.PathLike | list | tuple)

    @cached_property
    def origins(self) -> tuple[Path, ...]:
        """Directories of the run to resume that are not among `paths`."""
        here = {os.path.realpath(one) for one in self.paths}
        named = _paths("resume", self.resume) if self._is_elsewhere else ()
        return tuple(one for one in named if os.path.realpath(one) not in here)

    @property
    def resumes(self) -> bool | Literal["auto"]:
        return "auto" if self.resume == "auto" else bool(self.resume) or self._is_elsewhere

    @property
    def begins_states(self) -> bool:
        """Whether a resume takes the masters only, and the optimizer begins."""
        return self.resume_states == "anew"

    @property
    def converts_states(self) -> bool:
        """Whether a resume takes states in another form than it keeps them in."""
        return self.resume_states == "convert"

    @property
    def _every(self) -> int | str | None:
        return (COMMIT_EVERY if self.paths else None) if self.commit_every == "auto" else self.commit_every

    @property
    def every(self) -> int | None:
        """How many steps there are between commits."""
        return self._every  # type: ignore[return-value]  # others were refused

    @cached_property
    def cpu_bytes(self) -> int | None:
        return _size("cpu_memory", self.cpu_memory)

    @cached_property
    def device_bytes(self) -> int | None:
        return _size("device_memory", self.device_memory)

    @cached_property
    def activation_bytes(self) -> int | None:
        return _size("activation_memory", self.activation_memory)

    # The model and its step.

    @cached_property
    def fp32_modules(self) -> tuple[nn.Module | type[nn.Module], ...]:
        return _modules("keep_fp32", self.keep_fp32, nn.Module, "a module nor a module type")

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has at most; where any number is taken, two are counted."""
        return 2 if self.accumulation == "auto" else self.accumulation  # type: ignore[return-value]

    @property
    def takes_any(self) -> bool:
        """Whether a step takes as many micro-batches as come."""
        return self.accumulation == "auto"

    # Tuning.

    @property
    def tuned(self) -> Tuning:
        return Tuning() if self.tuning is None else self.tuning

    @cached_property
    def units(self) -> tuple[str | type[nn.Module], ...] | None:
        units, kinds = self.tuned.units, "a module's name nor a module class"
        return None if units is None else _modules("Tuning.units", units, str, kinds)

    @property
    def chunk_numel(self) -> int:
        """How many elements a chunk has; it is whole pages."""
        return parse_bytes(self.tuned.chunk, "Tuning.chunk") // PAGE_BYTES * PAGE_BYTES // MASTER_ITEM_BYTES

    @cached_property
    def bucket_bytes(self) -> int:
        return parse_bytes(self.tuned.bucket, "Tuning.bucket")

    @cached_property
    def tile_bytes(self) -> int | None:
        return _size("Tuning.tile", self.tuned.tile)

    @property
    def splits_masters(self) -> bool:
        """Whether only low halves of masters are kept: only a bf16 parameter is the upper half of its master."""
        return bool(self.tuned.split_master) and self.compute_dtype is torch.bfloat16


HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused", "capturable")
"""What users give to Adam or AdamW, and not to OffloadZero."""

_STATES, _PARAMS = 'tier="cpu", or "nvme" with a path', 'param_tier="cpu" or "nvme"'
_DTYPE, _CLIPPING = "compute_dtype=torch.bfloat16 or torch.float16", "optimizer.clip_grad_norm_(...) before step()"
OF_OTHERS = {
    **dict.fromkeys(("cpu_offload", "offload", "offload_optimizer", "offload_optimizer_device"), _STATES),
    "offload_policy": f"{_STATES}, and {_PARAMS}",
    **dict.fromkeys(("offload_param", "offload_params", "offload_param_device"), _PARAMS),
    **dict.fromkeys(("offload_activations", "activation_checkpointing", "gradient_checkpointing"), "activation_tier"),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype", "mixed_precision", "mp_policy"), _DTYPE),
    **dict.fromkeys(("gradient_clipping", "max_grad_norm", "clip_grad", "max_norm"), _CLIPPING),
    **dict.fromkeys(("nvme_path", "offload_dir", "offload_folder"), "path"),
    **dict.fromkeys(("zero_stage", "sharding_strategy"), "stage=1, 2 or 3"),
}
"""Options that other libraries have, and what says the same here."""


def _size(option: str, value: int | str | None) -> int | None:
    return None if value is None else parse_bytes(value, option)


def _refuse(*faults: Fault) -> None:
    """Refuses options that have a fault.

    Args:
        *faults: each whether it is there, and its message.

    Raises:
        ConfigError: with the message of the first fault that is there.
    """
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
    known = Options.__dataclass_fields__
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
        if name in OF_OTHERS:
            raise ConfigError(f"{name}={value!r}: there is no such option here; give {OF_OTHERS[name]}")
        raise ConfigError(f"{name}={value!r}: {_no_such(name, known)}")


def _no_such(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(sorted(known))}"
    return f"there is no such option; {hint}"


def absolute(path: PathLike) -> Path:
    """The absolute path of `path`.

    Raises:
        PathError: if it is relative and there is no working directory any more.
    """
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        raise PathError(
            error.errno,
            "is relative, and the working directory was removed: give an absolute path, or change to another directory",
            str(path),
        ) from error


def _is_too_long(name: Any) -> bool:
    """Whether a name has more than 255 bytes in one part, or 4,095 in all, as no file on Linux has."""
    return isinstance(name, str) and (
        len(os.fsencode(name)) >= 4096 or any(len(os.fsencode(part)) > 255 for part in name.split(os.sep))
    )


def _paths(option: str, given: Any) -> tuple[Path, ...]:
    several = given if isinstance(given, list | tuple) else () if given is None else (given,)
    names = [os.fspath(one) if isinstance(one, str | os.PathLike) else one for one in several]
    fix = "give the directory for the swap files, or a list of them"
    is_name = [isinstance(name, str) and name != "" and "\0" not in name for name in names]
    _refuse(
        (given is not None and not names, f"{option}={given!r} names no directory: {fix}"),
        (not all(is_name), f"{option}={given!r} names no directory: {fix}"),
        *(
            (_is_too_long(name), f"{option} has a name that is too long for a directory: {str(name)[:80]!r}...")
            for name in names
        ),
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
    """The elements of an option that holds modules.

    Args:
        option: its name.
        given: its value.
        instances: what it may hold beside subclasses of nn.Module.
        kinds: both in words, with "nor" between.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(given, str | nn.Module | type) or not isinstance(given, Iterable):
        raise ConfigError(f"{option}={given!r}: give a sequence, such as ({given!r},)")
    modules = tuple(given)
    for one in modules:
        if not (isinstance(one, instances) or (isinstance(one, type) and issubclass(one, nn.Module))):
            raise ConfigError(f"{option} holds {one!r}, which is neither {kinds}")
    return modules
