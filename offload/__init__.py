"""Train models that do not fit: optimizer states in RAM or NVMe swap files, the step on the CPU.

See OffloadZero; docs/ explains how it works, and what it promises.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.errors import (
    AccumulationError,
    BudgetError,
    ClosedError,
    ConfigError,
    CorruptionError,
    DeviceError,
    GradientMovedError,
    InterruptedStepError,
    NonFiniteGradientError,
    OffloadError,
    OtherRankError,
    PathError,
    PathInUseError,
    RankError,
    ReleasedParameterError,
    ResumeError,
    StaleActivationError,
    StaleParameterError,
    StateError,
    TierIOError,
    TorchVersionError,
)

if TYPE_CHECKING:
    from offload.checkpoint.extra import collect_rng, restore_rng
    from offload.model.loss import linear_cross_entropy
    from offload.model.token_tiles import tile_tokens
    from offload.optimizer import OffloadZero
    from offload.options import Tuning

__version__ = "0.1.0"

_WITH_TORCH = {
    "OffloadZero": "offload.optimizer",
    "Tuning": "offload.options",
    "collect_rng": "offload.checkpoint.extra",
    "linear_cross_entropy": "offload.model.loss",
    "restore_rng": "offload.checkpoint.extra",
    "tile_tokens": "offload.model.token_tiles",
}

__all__ = [
    "AccumulationError",
    "BudgetError",
    "ClosedError",
    "ConfigError",
    "CorruptionError",
    "DeviceError",
    "GradientMovedError",
    "InterruptedStepError",
    "NonFiniteGradientError",
    "OffloadError",
    "OffloadZero",
    "OtherRankError",
    "PathError",
    "PathInUseError",
    "RankError",
    "ReleasedParameterError",
    "ResumeError",
    "StaleActivationError",
    "StaleParameterError",
    "StateError",
    "TierIOError",
    "TorchVersionError",
    "Tuning",
    "collect_rng",
    "linear_cross_entropy",
    "restore_rng",
    "tile_tokens",
]


def __getattr__(name: str) -> Any:
    """Imports torch when it is needed: `offload --help` should not wait a second for it."""
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
