"""The tables of `offload plan --tables`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table


def memory_table() -> Table:
    """Memory a rank for model states, by ranks, model and stage."""
    from rich.table import Table

    from offload.planner.tables import MODELS, format_gb, memory_rows

    shown = Table(title="Memory a rank for model states, GB", caption="stage 1 / 2 / 3 at each size; GB = 1e9 bytes")
    shown.add_column("ranks", justify="right")
    for name in MODELS:
        shown.add_column(name, justify="right")
    for row in memory_rows():
        cells = (" / ".join(map(format_gb, row.by_stage[name].values())) for name in MODELS)
        shown.add_row(str(row.ranks), *cells)
    return shown


def largest_table() -> Table:
    """The largest model, by degree of model parallelism and stage."""
    from rich.table import Table

    from offload.planner.tables import DATA_PARALLEL, GB, GPU_BYTES, format_parameters, largest_rows

    caption = f"{GPU_BYTES // GB} GB a GPU, {DATA_PARALLEL} data-parallel ranks; stage 0 is plain data parallelism"
    shown = Table(title="Largest model, parameters", caption=caption)
    for column in ("model parallel", "GPUs", "stage 0", "stage 1", "stage 2", "stage 3"):
        shown.add_column(column, justify="right")
    for row in largest_rows():
        shown.add_row(str(row.model_parallel), str(row.gpus), *map(format_parameters, row.by_stage.values()))
    return shown


def rank_table(summary: dict[str, Any]) -> Table:
    """What one of several ranks holds and sends. Args: summary: of `offload plan`."""
    from rich.table import Table

    sent = summary["sent_elements"]
    title = f"One of {summary['ranks']} ranks at stage {summary['stage']}"
    caption = (
        f"sent in a step: {sent['gradients']:,} elements of gradients, {sent['parameters']:,} of parameters, "
        f"{sum(sent.values()) / summary['parameters']:.2f} a parameter"
    )
    shown = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    shown.add_column("held of", justify="left")
    shown.add_column("bytes", justify="right")
    shown.add_column("a parameter of the model", justify="right")
    for kind, size in summary["held_bytes"].items():
        shown.add_row(kind, format_bytes(size), f"{size / summary['parameters']:.3f}")
    return shown


def tables_json() -> dict[str, Any]:
    """Both, exact: bytes a rank and parameters, by stage."""
    from offload.planner.tables import largest_rows, memory_rows

    return {
        "memory": [
            {"ranks": row.ranks, "models": {name: _named(sizes) for name, sizes in row.by_stage.items()}}
            for row in memory_rows()
        ],
        "largest": [
            {"model_parallel": row.model_parallel, "gpus": row.gpus, "parameters": _named(row.by_stage)}
            for row in largest_rows()
        ],
    }


def _named(by_stage: dict[int, int]) -> dict[str, int]:
    return {f"stage_{stage}": value for stage, value in by_stage.items()}
