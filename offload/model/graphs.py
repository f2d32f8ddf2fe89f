"""What graphs of autograd are asked, and what they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from offload.model.hiding import unseen


def in_backward() -> bool:
    """Whether autograd is running on this thread: a forward inside is recomputation."""
    return torch._C._current_graph_task_id() != -1


def call_alive(method: weakref.WeakMethod[Callable[[Any], None]], argument: Any, *_: Any) -> None:
    if (alive := method()) is not None:
        unseen(alive, argument)
