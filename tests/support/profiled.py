"""What torch's own profiler sees of the memory of a training on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile


def peak_by_profiler(model: nn.Module, run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator had lent at once, beyond what was there before.

    Args:
        model: its gradients of parameters go as soon as they are made.
        run: one forward and its backward; it is called twice, and the second call is measured.
    """
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events: Any = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = highest = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest
