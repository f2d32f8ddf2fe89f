"""A warning for a resumed run that a framework drives and that was not told to resume.

The framework's step count, scheduler and data would silently begin anew, with the weights of the commit.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType

_RESUMES = {
    "transformers": "Trainer: give trainer.train(resume_from_checkpoint=True)",
    "lightning": 'Lightning: give trainer.fit(..., ckpt_path="last"), or the path of a checkpoint',
    "pytorch_lightning": 'Lightning: give trainer.fit(..., ckpt_path="last"), or the path of a checkpoint',
    "accelerate": "Accelerate: call accelerator.load_state() before the loop",
}
"""How each resumes, by the package that it is."""


def is_loading_a_checkpoint() -> bool:
    """Whether a call of `load_state_dict` loads a checkpoint.

    Accelerate's `prepare` calls it for any optimizer, with what `state_dict` has just returned. That is no checkpoint.
    """
    return not any(package == "accelerate" and name == "__init__" for package, name in _callers())


def warn_of_new_loop(step: int) -> None:
    """Warns that a resumed run begins anew, if a framework is among the callers.

    Args:
        step: the step that the run was resumed at.
    """
    found = [_RESUMES[package] for package, _ in _callers() if package in _RESUMES]
    if found:  # the outermost one: Trainer calls Accelerate
        warnings.warn(
            f"the weights and states go on from step {step}, which was committed, but the loop has loaded no "
            f"checkpoint and begins at step 0. {found[-1]}; or remove the run (`offload remove`) to begin anew",
            stacklevel=2,
        )


def _callers() -> Iterator[tuple[str, str]]:
    """The package and the name of each function that runs, the innermost one first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0], frame.f_code.co_name
        frame = frame.f_back
