"""The options of `offload train` and `offload plan`, checked before anything is read. It does not import torch."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import ConfigError
from offload.sizes import KIB, parse_bytes

if TYPE_CHECKING:
    import torch

    from offload.planner.machine_file import Machine

TIERS = ("nvme", "cpu", "device")
PARAM_TIERS = ("device", "cpu", "nvme", "auto")
GRAD_TIERS = ("cpu", "nvme", "auto")
STATES = ("fp32", "bf16", "8bit")
ITEMSIZES = {"bf16": 2, "fp32": 4}
"""Bytes of an element, by what --dtype takes."""
LEAST = "least"
"""As --cpu-memory: the least that works."""
MOST = 1 << 24
"""Of whole numbers that make a model, a batch or ranks: products of two of them are sizes that torch can count."""
MOST_BLOCKS = 1 << 14
"""Of a model that is planned."""
SAMPLE, STREAMED_SAMPLE = 200, 20
"""Bytes that the model writes at the end: each is a pass through all parameters."""


Tier = Annotated[str, typer.Option(help="Where the optimizer states live: nvme, cpu or device.")]
ParamTier = Annotated[
    str, typer.Option(help="Where the parameters live outside their use: device, cpu, nvme, or auto: what fits.")
]
GradTier = Annotated[str, typer.Option(help="Where gradients wait for the step: cpu, nvme or auto.")]
DeviceMemory = Annotated[
    str | None,
    typer.Option(help="Memory on the device for parameters, such as 2GiB.", show_default="half of what is free"),
]
CpuMemory = Annotated[
    str | None,
    typer.Option(
        help="RAM for the states and gradients, such as 2GiB.",
        show_default="with nvme the least that works, so that all goes through the disk",
    ),
]
Chunk = Annotated[str | None, typer.Option(help="Bytes of fp32 master a chunk.", show_default="64MiB")]
States = Annotated[
    str, typer.Option(help="How Adam keeps its moments: fp32, or bf16 or 8bit, which are another training.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that `offload train` and `offload plan` share; `--help` describes them.

    Sizes are as the user gave them ("64MiB"), and None where the library chooses.

    Raises:
        ConfigError: a value is not allowed. The message names the option, its value and what is allowed.
    """

    preset: str
    batch: int
    seq: int
    accumulation: int | str
    tier: str
    cpu_memory: str | None
    chunk: str | None
    dtype: str = "bf16"
    param_tier: str = "device"
    grad_tier: str = "cpu"
    commit_every: int | None = None
    device_memory: str | None = None
    activation_tier: str | None = None
    states: str = "fp32"

    def __post_init__(self) -> None:
        self._require_least(1, "commit_every")
        self._require_least(1, "batch", "seq", most=MOST)
        if self.accumulation != "auto":
            self._require_least(1, "accumulation", most=MOST)
        allowed = {"tier": TIERS, "param_tier": PARAM_TIERS, "grad_tier": GRAD_TIERS, "dtype": tuple(ITEMSIZES)}
        allowed |= {"states": STATES}
        for option, values in allowed.items():
            if getattr(self, option) not in values:
                raise ConfigError(f"--{_name(option)} {getattr(self, option)}: choose one of {', '.join(values)}")
        if self.activation_tier not in (None, *TIERS):
            raise ConfigError(f"--activation-tier {self.activation_tier}: choose one of {', '.join(TIERS)}")
        self._require_sizes("device_memory", "chunk")

    def _require_least(self, least: int, *options: str, most: int | None = None) -> None:
        for option in options:
            value = getattr(self, option)
            if value is not None and not least <= value <= (value if most is None else most):
                at_most = "" if most is None else f", at most {most}"
                raise ConfigError(f"--{_name(option)} {value}: give a whole number, at least {least}{at_most}")

    def _require_sizes(self, *options: str) -> None:
        for option in options:
            value = getattr(self, option)
            if value is None:
                continue
            size = parse_bytes(_number(value), f"--{_name(option)}")
            if 0 < size < KIB and "B" not in str(value):  # nobody means so few bytes
                raise ConfigError(f"--{_name(option)} {value}: {size} bytes; did you mean {value}GiB?")

    @property
    def compute_dtype(self) -> torch.dtype:
        import torch

        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    @property
    def given_param_tier(self) -> str | None:
        """The `param_tier` for OffloadZero; None: it chooses."""
        return None if self.param_tier == "auto" else self.param_tier

    @property
    def given_grad_tier(self) -> str | None:
        """The `grad_tier` for OffloadZero; None: it chooses.

        It is also None for the default if the states are on the device, where gradients have to be then.
        """
        is_default = self.tier == "device" and self.grad_tier == "cpu"
        return None if is_default or self.grad_tier == "auto" else self.grad_tier

    def entering_bytes(self, width: int) -> int:
        """The bytes of what enters a block of the model: (batch, seq, width), in `dtype`.

        Args:
            width: the width of the model.
        """
        return ITEMSIZES[self.dtype] * self.batch * self.seq * width


_RATE, _DELAY = r"(?P<rate>\d+(?:\.\d+)? ?(?:[KMGT]i?)?B)/s", r"(?P<delay>\d+(?:\.\d+)?) ?(?P<unit>us|ms|s)"
_NETWORK = re.compile(f"{_RATE}(?:, ?{_DELAY})?", re.ASCII)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LEAST_RATE, MOST_RATE = 1e-12, 1e21
"""Of what is given as a rate: with all others no seconds are endless, and none are nothing."""
LARGEST = "largest"
GOALS = ("fastest", "least-wear", LARGEST)
"""What `offload plan --search` is for; the first one if nothing is said."""
_MOST_DIGITS = 20
"""Of a bare number: more than any memory has."""
SWEPT = "device_memory"
"""What `offload plan --sweep` can go through."""
QUANTISED = ("nf4", "int8", "fp8")
"""Formats of frozen weights that `offload plan` counts."""


def network_of(given: str) -> tuple[float, float]:
    """Bytes a second, and a delay in seconds, in words such as "25GB/s" or "25GB/s,20us".

    Raises:
        ConfigError: it is something else.
    """
    match = _NETWORK.fullmatch(given)
    nbytes = 0 if match is None else parse_bytes(match["rate"], "--network")
    if match is None or not nbytes:
        raise ConfigError(f'--network {given}: give a rate such as 25GB/s, or with a delay "25GB/s,20us"')
    return nbytes, float(match["delay"] or 0) * _SECONDS[match["unit"] or "s"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """The options that only `offload plan` has."""

    layers: int | None
    width: int | None
    config: Path | None
    frozen: int
    lora_rank: int | None
    quantise: str | None = None
    optimizer: str = "adamw"
    no_commits: bool
    split_master: bool
    speculate: bool
    ranks: int
    stage: int | None
    tensor_parallel: int
    partition_activations: bool
    gpu: bool
    gpu_memory: str | None
    ram: str | None
    flops: float | None
    disk_gb_per_s: float | None
    network: str | None = None
    model: str | None = None
    machine: Machine | None = None
    paths: tuple[Path, ...] = ()
    sweep: str | None = None
    search: bool = False
    goal: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.machine is not None and self.paths:
            raise ConfigError(
                f"--path {self.paths[0]} is of this machine, and --machine of another one: give one of the two"
            )
        if self.network is not None:
            network_of(self.network)
        self._require_least(1, "layers", most=MOST_BLOCKS)
        self._require_least(1, "ranks", "tensor_parallel", "width", "lora_rank", most=MOST)
        self._require_sizes("gpu_memory", "ram", *(() if self.cpu_memory == LEAST else ("cpu_memory",)))
        if self.quantise is not None and self.quantise not in QUANTISED:
            raise ConfigError(f"--quantise {self.quantise}: choose one of {', '.join(QUANTISED)}")
        if self.quantise is not None and self.lora_rank is None and not self.frozen:
            raise ConfigError(
                f"--quantise {self.quantise} is for frozen weights, and all are trained: give --lora-rank, or --frozen"
            )
        if self.sweep not in (None, SWEPT):
            raise ConfigError(f"--sweep {self.sweep} is not known: `offload plan --help` says what is")
        if self.sweep is not None and self.device_memory is not None:
            raise ConfigError(
                f"--device-memory {self.device_memory} and --sweep, which tries each: give one of the two"
            )
        if self.goal not in (None, *GOALS):
            raise ConfigError(f"--goal {self.goal}: choose one of {', '.join(GOALS)}")
        if self.goal is not None and not self.search:
            raise ConfigError(f"--goal {self.goal} says what --search is for: give --search, too")
        if self.search and self.sweep is not None:
            raise ConfigError(f"--search and --sweep {self.sweep}: give one of the two")
        if self.no_commits and self.commit_every is not None:
            raise ConfigError(f"--no-commits and --commit-every {self.commit_every}: give one of the two")
        if self.partition_activations and self.tensor_parallel == 1:
            raise ConfigError("--partition-activations needs --tensor-parallel 2 or more: one rank keeps all there is")
        for option in ("flops", "disk_gb_per_s"):
            value = getattr(self, option)
            if value is not None and not LEAST_RATE <= value < MOST_RATE:
                raise ConfigError(f"--{_name(option)} {value:g}: give a number above 0, below {MOST_RATE:g}")
        for path in self.paths:
            if path.exists() and not path.is_dir():
                raise ConfigError(f"--path {path} is no directory: give one on each drive")
        has_layers = self.layers is not None and self.goal != LARGEST
        if self.config is not None and (has_layers or self.width is not None):
            raise ConfigError("--config says how many layers and how wide: leave --layers and --width out")
        if self.model is not None and self.config is not None:
            raise ConfigError(f"--model {self.model} and --config {self.config}: give one of the two")
        if self.model is not None and (self.layers is not None or self.width is not None):
            raise ConfigError("--model says how many layers and how wide: leave --layers and --width out")
        if self.model is not None and self.goal == LARGEST:
            raise ConfigError("--goal largest has to say how many blocks the model has, and --model makes one as it is")

    @property
    def splits_masters(self) -> bool:
        """Whether masters are split: only a bf16 parameter is the upper half of its master, as OffloadZero has it."""
        return self.split_master and self.dtype == "bf16"

    @property
    def network_speed(self) -> tuple[float, float] | None:
        """Bytes a second between ranks, and the delay in seconds, as they were given; None: they were not."""
        return None if self.network is None else network_of(self.network)

    @property
    def has_path(self) -> bool:
        """Whether the run has files: for commits, or because something is on NVMe."""
        return not self.no_commits or "nvme" in (self.tier, self.param_tier, self.activation_tier)

    @property
    def given_cpu_memory(self) -> str | None:
        """The `cpu_memory` for OffloadZero; None: it chooses, or the least that works is to be found."""
        return None if self.cpu_memory == LEAST else self.cpu_memory

    @property
    def gpu_bytes(self) -> int | None:
        """The GPU's memory in bytes, as it was given, or as the machine has it; None: it is unknown."""
        if self.gpu_memory is not None:
            return parse_bytes(_number(self.gpu_memory), "--gpu-memory")
        device = None if self.machine is None else self.machine.device
        return None if device is None else device.memory.number

    @property
    def free_cpu_bytes(self) -> int | None:
        """The RAM that is free on the machine that will run it, in bytes; None: what is free here."""
        if self.ram is not None:
            return parse_bytes(self.ram, "--ram")
        return None if self.machine is None else self.machine.ram.number

    @property
    def is_elsewhere(self) -> bool:
        """Whether another machine than this one will run it."""
        return self.gpu or self.ram is not None or self.machine is not None


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """The options that only `offload train` has."""

    accumulation: int
    steps: int
    lr: float | None
    path: Path
    keep: bool
    threads: int | None
    seed: int
    data: Path | None
    out: Path
    timeline: bool
    validation: int = 32
    sample: int | None = None
    resume: bool = False
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_least(1, "steps", "validation", "threads")
        self._require_sizes("cpu_memory")
        if self.commit_every is not None and self.tier != "nvme":
            raise ConfigError("--commit-every needs --tier nvme: what is committed lies there")
        if self.activation_tier == "nvme" and self.tier != "nvme":
            raise ConfigError("--activation-tier nvme needs --tier nvme: activations wait in the same directory")
        for option in ("param_tier", "grad_tier"):
            if getattr(self, option) == "nvme" and self.tier != "nvme":
                raise ConfigError(f"--{_name(option)} nvme needs --tier nvme: only then a run has files")
        self._require_least(0, "sample")
        if self.resume and self.commit_every is None:
            raise ConfigError("--resume needs --commit-every: give the steps between commits")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"--lr {self.lr}: give a learning rate above 0, such as 1e-3")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to 2**63 - 1")

    @property
    def sample_bytes(self) -> int:
        if self.sample is not None:
            return self.sample
        return SAMPLE if self.param_tier == "device" else STREAMED_SAMPLE

    @property
    def timeline_file(self) -> Path:
        """The file that --timeline writes. Its picture is put beside it."""
        return self.out / "timeline.json"

    def prepare_out(self) -> None:
        """Makes --out, where the pictures go.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.out} cannot be made: {error.strerror}") from error
        if not os.access(self.out, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {self.out} is not writable: choose another folder for the picture")


def _name(option: str) -> str:
    """The name of an option on the command line."""
    return option.replace("_", "-")


def _number(value: str) -> int | str:
    """A bare number as an int, which is bytes, and anything else as it is.

    A negative number is an int, too, so that the error says what is wrong with it.
    """
    return int(value) if value.removeprefix("-").isdecimal() and len(value) <= _MOST_DIGITS else value
