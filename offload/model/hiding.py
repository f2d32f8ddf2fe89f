"""What this library does inside somebody's forward is hidden from whatever watches that forward.

A dispatch mode (FLOP counters, fake tensors), a torch function mode (a default device), a level of functorch, a trace
or inference mode applies to the user's operations. Copies and kernels of ours are none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_trace_with: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]


def is_watched() -> bool:
    """Whether anything is active that would see our operations. Costs less than a microsecond."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_inference_mode_enabled()
        or peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


@contextmanager
def hidden() -> Iterator[None]:
    """Nothing that is active outside sees what runs inside."""
    if not is_watched():
        yield
        return
    makes_graph = torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if (trace := torch._C._get_tracing_state()) is not None:
            _trace_with(None)
            stack.callback(_trace_with, trace)
        # It tells training from evaluation, and a backward that makes a graph; to leave inference mode turns it on.
        stack.enter_context(torch.set_grad_enabled(makes_graph))
        yield


def unseen(call: Callable[..., Any], *args: Any) -> Any:
    """Calls something that nothing outside sees."""
    if not is_watched():
        return call(*args)
    with hidden():
        return call(*args)


def eagerly(call: Callable[..., Any], *args: Any) -> Any:
    """Calls what a compiler cannot trace, nor leave out: a compiled model is cut in two here."""
    return _outside_graphs(call, *args) if torch.compiler.is_compiling() else call(*args)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_graphs(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)
