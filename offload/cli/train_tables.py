"""What `offload train` prints at the end: one object of JSON, or a table and a sample."""

from __future__ import annotations

import resource
import sys
from typing import Any

from rich.table import Table

from offload.cli.console import plain_console, print_json, say, show_table
from offload.cli.options import TrainOptions
from offload.demo.loop import Measured
from offload.sizes import format_bytes

PLAIN_BYTES = 16
"""Bytes of a parameter with its gradient and states, in mixed precision as in fp32 (Rajbhandari et al., "ZeRO: memory
optimizations toward training trillion parameter models", 2020, section 3.1)."""


def peak_rss_bytes() -> int:
    """The most RAM this process held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def summarise(measured: Measured, stats: dict[str, Any], options: TrainOptions) -> dict[str, Any]:
    """The object that --json prints.

    Names that end in `_s` are seconds, in `_bytes` bytes. Losses are in nats a byte.
    """
    taken = (
        "parameters chunks kernel threads wait_nvme_s adam_s nvme_read_bytes nvme_written_bytes nvme_init_bytes "
        "host_to_device_bytes device_to_host_bytes peak_cpu_bytes cpu_budget_bytes peak_device_bytes"
    )
    return {
        "preset": options.preset,
        "dtype": options.dtype,
        "tier": options.tier,
        "param_tier": stats["param_tier"],
        "grad_tier": stats["grad_tier"],
        "steps": options.steps,
        "steps_before": measured.begun,
        "committed": options.commit_every is not None,
        "tokens": measured.tokens,
        "loss_first": measured.losses[0],
        "loss_last": measured.losses[-1],
        "val_loss_first": measured.validation[0][1],
        "val_loss_last": measured.validation[-1][1],
        "tokens_per_s": measured.tokens_per_s,
        **{f"{phase}_s": spent for phase, spent in measured.seconds.items()},
        **{name: stats[name] for name in taken.split()},
        "peak_rss_bytes": peak_rss_bytes(),
        "losses": measured.losses,
        "validation": measured.validation,
    }


def title(summary: dict[str, Any]) -> str:
    """The title of pictures and tables."""
    size = f"{summary['parameters']:,} parameters"
    return f"GPT {summary['preset']}, {size}, optimizer states on {summary['tier']}"


def show(summary: dict[str, Any], prompt: str, *, as_json: bool) -> None:
    """Prints a table, a sample and where the pictures are, or all of it as one object of JSON."""
    if as_json:
        print_json(summary)
        return
    console = plain_console()
    show_table(console, _table(summary))
    console.print("\nAfter (from the held-out text)", style="bold")
    console.print(_printable(prompt))
    console.print("the model writes", style="bold")
    console.print(_printable(summary["sample"]))
    if summary["picture"]:
        say(console, f"\nLoss curve: {summary['picture']}")
    if summary["timeline"]:
        say(console, "Timeline: {} (open it in ui.perfetto.dev), {}".format(*summary["timeline"]))
    for file in summary["files"]:
        fate = "committed: see offload inspect" if summary["committed"] else "not committed: it cannot be resumed from"
        say(console, f"Kept: {file} ({fate})")


def _table(summary: dict[str, Any]) -> Table:
    def size(key: str) -> str:
        return format_bytes(summary[key])

    table = Table(title=title(summary), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    each = summary["parameters"] * max(summary["steps"] - summary["steps_before"], 1)
    training_s = sum(summary[f"{phase}_s"] for phase in ("forward", "backward", "step"))
    waited_s, plain = summary["wait_nvme_s"], PLAIN_BYTES * summary["parameters"]
    moved = summary["nvme_read_bytes"] + summary["nvme_written_bytes"]
    rows = {
        "training loss": f"{summary['loss_first']:.3f} → {summary['loss_last']:.3f} nats a byte",
        "validation loss": f"{summary['val_loss_first']:.3f} → {summary['val_loss_last']:.3f} nats a byte",
        "speed": f"{summary['tokens_per_s']:,.0f} tokens/s",
        "forward": f"{summary['forward_s']:.2f} s",
        "backward": f"{summary['backward_s']:.2f} s",
        "step": f"{summary['step_s']:.2f} s",
        "waiting": f"{waited_s:.2f} s for the disk, {waited_s / training_s:.0%} of the time",
        "NVMe": f"{size('nvme_read_bytes')} read, {size('nvme_written_bytes')} written",
        "a parameter and step": f"{moved / each:.2f} bytes, in {summary['chunks']} chunks",
        "peak CPU memory": f"{size('peak_cpu_bytes')} of a budget of {size('cpu_budget_bytes')}",
        "peak of the process": size("peak_rss_bytes"),
        "plain torch would take": f"{format_bytes(plain)} on the device, beside activations",
        "Adam kernel": f"{summary['kernel']}, {summary['threads']} threads",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "·" for char in text)
