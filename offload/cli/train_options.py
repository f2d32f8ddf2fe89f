"""The options of `offload train`, which `offload plan` shares, checked before anything is read. Knows no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import ConfigError
from offload.sizes import parse_bytes

if TYPE_CHECKING:
    import torch

TIERS = ("nvme", "cpu", "device")
PARAM_TIERS = ("device", "cpu", "nvme", "auto")
GRAD_TIERS = ("cpu", "nvme", "auto")
ITEMSIZES = {"bf16": 2, "fp32": 4}
"""Bytes of an element, by what --dtype takes."""
SAMPLE, STREAMED_SAMPLE = 200, 20
"""Bytes that the model writes at the end: each is a pass through all parameters."""


@dataclass(frozen=True)
class TrainOptions:
    """What `offload train --help` says; sizes as given ("64MiB"), None where the library chooses.

    Raises: ConfigError naming the option, its value and what is allowed.
    """

    preset: str
    steps: int
    batch: int
    seq: int
    lr: float
    accumulation: int
    tier: str
    path: Path
    keep: bool
    cpu_memory: str | None
    chunk: str | None
    threads: int | None
    seed: int
    data: Path | None
    out: Path
    timeline: bool
    dtype: str = "bf16"
    param_tier: str = "device"
    grad_tier: str = "cpu"
    validation: int = 32
    sample: int | None = None
    commit_every: int | None = None
    resume: bool = False
    device_memory: str | None = None
    checkpoint_activations: bool = False
    activation_tier: str | None = None

    def __post_init__(self) -> None:
        for option in ("steps", "batch", "seq", "accumulation", "validation", "threads", "commit_every", "sample"):
            value, least = getattr(self, option), 0 if option == "sample" else 1
            if value is not None and value < least:
                raise ConfigError(f"--{_name(option)} {value}: give a whole number, at least {least}")
        if self.commit_every is not None and self.tier != "nvme":
            raise ConfigError("--commit-every needs --tier nvme: what is committed lies there")
        if self.resume and self.commit_every is None:
            raise ConfigError("--resume needs --commit-every: give the steps between commits")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"--lr {self.lr}: give a learning rate above 0, such as 1e-3")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to 2**63 - 1")
        allowed = {"tier": TIERS, "param_tier": PARAM_TIERS, "grad_tier": GRAD_TIERS, "dtype": tuple(ITEMSIZES)}
        for option, values in allowed.items():
            if getattr(self, option) not in values:
                raise ConfigError(f"--{_name(option)} {getattr(self, option)}: choose one of {', '.join(values)}")
        if self.activation_tier not in (None, *TIERS):
            raise ConfigError(f"--activation-tier {self.activation_tier}: choose one of {', '.join(TIERS)}")
        if self.activation_tier == "nvme" and self.tier != "nvme":
            raise ConfigError("--activation-tier nvme needs --tier nvme: activations wait in the same directory")
        for option in ("cpu_memory", "device_memory", "chunk"):
            value = getattr(self, option)
            if value is not None:
                parse_bytes(_number(value), f"--{_name(option)}")

    @property
    def sample_bytes(self) -> int:
        if self.sample is not None:
            return self.sample
        return SAMPLE if self.param_tier == "device" else STREAMED_SAMPLE

    @property
    def compute_dtype(self) -> torch.dtype:
        import torch

        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    @property
    def given_param_tier(self) -> str | None:
        """As OffloadZero takes it, None where it chooses."""
        return None if self.param_tier == "auto" else self.param_tier

    @property
    def given_grad_tier(self) -> str | None:
        """As OffloadZero takes it: None where it chooses, and beside states on the device, where there is one place."""
        is_default = self.tier == "device" and self.grad_tier == "cpu"
        return None if is_default or self.grad_tier == "auto" else self.grad_tier

    def entering_bytes(self, width: int) -> int:
        """Of what enters a block of the model: (batch, seq, width), in `dtype`."""
        return ITEMSIZES[self.dtype] * self.batch * self.seq * width

    @property
    def timeline_file(self) -> Path:
        """Where --timeline writes; its picture lies beside it."""
        return self.out / "timeline.json"

    def prepare_out(self) -> None:
        """Make --out, where the pictures go. Raises: ConfigError where it cannot be made or written to."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.out} cannot be made: {error.strerror}") from error
        if not os.access(self.out, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {self.out} is not writable: choose another folder for the picture")


def _name(option: str) -> str:
    """As the command line has it."""
    return option.replace("_", "-")


def _number(value: str) -> int | str:
    """A bare number is bytes, also a negative one, so that the error names what is wrong with it."""
    return int(value) if value.lstrip("-").isdecimal() else value
