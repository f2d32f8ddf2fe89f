"""Train models that do not fit: optimizer states in RAM or NVMe swap files, the step on the CPU.

See OffloadZero; docs/ explains how it works, and what it promises.
"""

from offload.config import Tuning
from offload.errors import (
    AccumulationError,
    BudgetError,
    ClosedError,
    ConfigError,
    CorruptionError,
    GradientMovedError,
    InterruptedStepError,
    NonFiniteGradientError,
    OffloadError,
    PathError,
    PathInUseError,
    ResumeError,
    StateError,
    TierIOError,
)
from offload.zero import OffloadZero

__version__ = "0.1.0"

__all__ = [
    "AccumulationError",
    "BudgetError",
    "ClosedError",
    "ConfigError",
    "CorruptionError",
    "GradientMovedError",
    "InterruptedStepError",
    "NonFiniteGradientError",
    "OffloadError",
    "OffloadZero",
    "PathError",
    "PathInUseError",
    "ResumeError",
    "StateError",
    "TierIOError",
    "Tuning",
]
