"""The state of the random number generators that training code uses, for `commit(extra)`."""

from __future__ import annotations

import random

import numpy
import torch

from offload.errors import ConfigError, ResumeError

_PARTS = ("python", "numpy", "torch", "cuda")


def collect_rng() -> dict[str, object]:
    """The global states of Python's random, NumPy's legacy generator, torch's CPU and (where used) CUDA generators.

    What it returns can be committed as, or in, `extra`. Generators of one's own have states of their own:
    `generator.get_state()`, or `generator.bit_generator.state`.
    """
    # Without CUDA in use there is no state of it; asking for one would start it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_rng(state: object) -> None:
    """Puts back what `collect_rng` gave: all of it, or nothing.

    Raises: ConfigError if it is something else, ResumeError if it is of more GPUs than there are.
    """
    if not isinstance(state, dict) or state.keys() != set(_PARTS):
        raise ConfigError("this is no state of random number generators: give what collect_rng() returned")
    here = torch.cuda.device_count() if state["cuda"] else 0
    if len(state["cuda"]) > here:
        raise ResumeError(f"the random number generators are of {len(state['cuda'])} GPUs, and here are {here}")
    before = collect_rng()
    try:
        _set(state)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        _set(before)
        raise ConfigError(f"this is no state of random number generators: {error}") from error


def _set(state: dict[str, object]) -> None:
    random.setstate(state["python"])  # type: ignore[arg-type]
    numpy.random.set_state(state["numpy"])  # type: ignore[arg-type]
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])  # type: ignore[arg-type]
