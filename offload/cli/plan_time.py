"""How long a step takes, for `offload plan`: simulated with the rates of the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.plots import new_figure, write
from offload.planner.measured import PROBE
from offload.planner.simulate import NotPredicted, begin
from offload.planner.simulate.lines import COMMIT, COMPUTE, DISK, KERNELS, LINK, MEMORY, NETWORK, NOTHING, PYTHON
from offload.planner.simulate.speeds import Passes, Speeds
from offload.planner.simulate.what_if import hiding_tokens, passes_of

if TYPE_CHECKING:
    from offload.planner.explain import Planned
    from offload.planner.verdict import Work

COLOURS = {
    COMPUTE: "#4c78a8",
    KERNELS: "#f58518",
    DISK: "#54a24b",
    LINK: "#8f6bb3",
    NETWORK: "#e377c2",
    MEMORY: "#72b7b2",
    PYTHON: "#eeca3b",
    COMMIT: "#b8423f",
    NOTHING: "#bab0ac",
}
"""By part of a step."""
NETWORKS = "--network 25GB/s gives it, or `network` in the file of a machine"


def predicted(
    planned: Planned,
    work: Work,
    flops_per_s: float | None,
    speeds: Speeds | NotPredicted,
    beside: Passes,
    *,
    hides: bool = True,
    is_enough: Callable[[float], bool] = lambda seconds: False,
) -> dict[str, Any]:
    """What a simulated step takes, as --json prints it.

    Args:
        planned: the plan.
        work: what a micro-batch computes.
        flops_per_s: FLOP/s that the device achieves; None: that is not known.
        speeds: of the machine.
        beside: what of a micro-batch waits in the activation tier, and which tiles it uses.
        hides: whether to say which number of tokens hides all else.
        is_enough: asked with the seconds of a step without commits, whether nobody wants to know more.

    Returns:
        Under "predicted" the figures, or None and under "not_predicted" the reason; that is None if it was enough.
    """
    if flops_per_s is None:
        speeds = NotPredicted(f"how fast this device computes is not known: --flops gives it, or {PROBE}")
    elif not isinstance(speeds, NotPredicted) and planned.layout.ranks > 1 and speeds.network is None:
        speeds = NotPredicted(f"how fast the link between ranks is, is not known: {NETWORKS}")
    if isinstance(speeds, NotPredicted):
        return {"predicted": None, "not_predicted": speeds.reason}
    assert flops_per_s is not None
    layout, placement = planned.layout, planned.place()
    passes = passes_of(layout, work, flops_per_s, beside)
    begun = begin(layout, placement, passes, speeds)
    if isinstance(begun, NotPredicted):
        return {"predicted": None, "not_predicted": begun.reason}
    if is_enough(begun.seconds):
        return {"predicted": None, "not_predicted": None}
    found = begun.predict()
    every = planned.choice.commits.every or 0
    tokens = work.tokens * planned.choice.grads.micro_batches
    seconds = found.seconds + (found.commit_s / every if every else 0.0)
    figures: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "waits_for": found.waits_for,
        "parts_s": dict(found.parts),
        "busy_s": dict(found.busy_s),
        "read_bytes": found.read_bytes,
        "written_bytes": found.written_bytes + (found.commit_bytes / every if every else 0),
        "up_bytes": found.up_bytes,
        "down_bytes": found.down_bytes,
        "sent": dict(found.sent),
        "commit_s": found.commit_s,
        "commit_bytes": found.commit_bytes,
        "not_counted": list(found.not_counted),
    }
    if hides:
        figures["hiding_tokens"] = hiding_tokens(layout, placement, passes, speeds, work.tokens)
    return {"predicted": figures}


def bar(parts: Mapping[str, float], width: int = 40) -> list[tuple[str, float, str]]:
    """The parts of a step, the longest first: name, seconds, and a bar of characters."""
    total = sum(parts.values())
    found = sorted(((name, seconds) for name, seconds in parts.items() if seconds > 0), key=lambda one: -one[1])
    return [(name, seconds, "█" * max(round(width * seconds / total), 1)) for name, seconds in found]


def draw(file: Path, title: str, steps: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Writes a PNG: a stacked bar of each step.

    Args:
        file: the PNG.
        title: of the picture.
        steps: of each bar its label, and the seconds of its parts.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(1.5 + 1.3 * max(len(steps), 4), 4.5)
    axes = figure.add_subplot()
    bottoms = [0.0] * len(steps)
    for name, colour in COLOURS.items():
        heights = [parts.get(name, 0.0) for _, parts in steps]
        if any(heights):
            axes.bar(range(len(steps)), heights, bottom=bottoms, color=colour, label=name, width=0.6)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(steps)), [label for label, _ in steps])
    axes.set(title=title, ylabel="seconds of a step, predicted", xlabel="states in RAM")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    write(figure, file)
