"""What is read of memory that a streamed parameter has no more."""

from __future__ import annotations

from torch import Tensor


def has_no_values(tensor: Tensor) -> bool:
    """Whether it reads as NaN, or torch refuses to read it, as builds for CUDA do."""
    try:
        return bool(tensor.isnan().all())
    except RuntimeError as error:
        if "not on the device now" not in str(error):
            raise
        return True
