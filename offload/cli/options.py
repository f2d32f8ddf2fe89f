"""The options of `offload train`, checked before anything is read or allocated. Knows no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError
from offload.sizes import parse_bytes

TIERS = ("nvme", "cpu", "device")
PARAM_TIERS = ("device", "cpu", "nvme", "auto")
GRAD_TIERS = ("cpu", "nvme", "auto")
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
    param_tier: str = "device"
    grad_tier: str = "cpu"
    validation: int = 32
    sample: int | None = None
    commit_every: int | None = None
    resume: bool = False
    device_memory: str | None = None
    checkpoint_activations: bool = False

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
        for option, tiers in (("tier", TIERS), ("param_tier", PARAM_TIERS), ("grad_tier", GRAD_TIERS)):
            if getattr(self, option) not in tiers:
                raise ConfigError(f"--{_name(option)} {getattr(self, option)}: choose one of {', '.join(tiers)}")
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
    def given_param_tier(self) -> str | None:
        """As OffloadZero takes it, None where it chooses."""
        return None if self.param_tier == "auto" else self.param_tier

    @property
    def given_grad_tier(self) -> str | None:
        """Beside states on the device there is one place for gradients, whatever the default here is."""
        is_default = self.tier == "device" and self.grad_tier == "cpu"
        return None if is_default or self.grad_tier == "auto" else self.grad_tier

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
    """A bare number is bytes, negative ones too, so that the error says what is wrong with them."""
    return int(value) if value.lstrip("-").isdecimal() else value
