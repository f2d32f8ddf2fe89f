"""What `offload bench step --param-tier` found: for people, for machines and for bench/results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from offload.cli.bench_step_sheet import Sheet, spread
from offload.cli.bench_step_streaming import BUFFERS, Report, Result
from offload.sizes import format_bytes

TARGET = 1.15
HEADINGS = (
    "tokens", "iteration", "fastest-slowest", "resident", "drive alone", "x limit", "x phases", "x CPU",
    "bytes a parameter",
    "in forward", "peak RAM",
    "forward", "backward", "step", "waiting",
)  # fmt: skip


def as_json(report: Report) -> dict[str, Any]:
    job = report.results[0].job
    return {
        "parameters": job.n,
        "layers": job.layers,
        "width": job.width,
        "param_tier": job.param_tier,
        "grad_tier": job.grad_tier,
        "chunk_bytes": job.tuning.chunk,
        "cpu_memory": job.cpu_memory,
        "hardware": report.hardware,
        "runs": [_run_json(result) for result in report.results],
    }


def _run_json(result: Result) -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "iteration_s": result.streamed_s,
        "resident_s": result.resident_s,
        "disk_s": result.disk_s,
        "x_limit": result.x_limit,
        "x_phases": result.x_phases,
        "x_cpu": result.x_cpu,
        "forward_share": result.forward_share,
        "bytes_per_param": result.bytes_per_param,
        "peak_cpu_bytes": result.peak_cpu_bytes,
        **{f"{name}_s": result.part_s(name) for name in ("forward", "backward", "step")},
        "wait_share": result.wait_share,
        "rounds": [
            {"iteration_s": one.streamed.seconds, "resident_s": one.resident.seconds, "disk_s": one.disk_s}
            for one in result.rounds
        ],
    }


def _title(report: Report) -> str:
    job = report.results[0].job
    return (
        f"Iterations of a GPT of {job.n:,} parameters ({job.layers} x {job.width}), states on nvme, parameters on "
        f"{job.param_tier}, gradients on {job.grad_tier}"
    )


def table(report: Report) -> Table:
    """For people."""
    return _sheet(report).table()


def _sheet(report: Report) -> Sheet:
    return Sheet(_title(report), report.hardware, HEADINGS, [_row(result) for result in report.results])


def _row(result: Result) -> tuple[str, ...]:
    return (
        str(result.tokens),
        f"{result.streamed_s:.2f} s",
        spread([one.streamed.seconds for one in result.rounds], 2),
        f"{result.resident_s:.2f} s",
        f"{result.disk_s:.2f} s",
        f"{result.x_limit:.3f}",
        f"{result.x_phases:.3f}",
        f"{result.x_cpu:.2f}",
        f"{result.bytes_per_param:.2f} of {result.job.allowed_bytes}",
        f"{result.forward_share:.0%}",
        format_bytes(result.peak_cpu_bytes),
        *(f"{result.part_s(name):.2f} s" for name in ("forward", "backward", "step")),
        f"{result.wait_share:.0%}",
    )


def shortfalls(report: Report) -> Iterator[str]:
    """Where an iteration takes longer, or moves more, than we want."""
    for result in report.results:
        what = f"an iteration of {result.tokens} tokens"
        # Headers and padding are not the parameters'.
        if result.bytes_per_param > 1.01 * result.job.allowed_bytes:
            yield f"off target: {what} moves {result.bytes_per_param:.2f} bytes, wanted {result.job.allowed_bytes}"
        if result.x_limit > TARGET:
            yield f"off target: {what} takes {result.x_limit:.3f} of its limit, wanted {TARGET}"


def markdown(report: Report, command: str) -> str:
    """For bench/results."""
    about = (
        f"{_title(report)}, with the least `cpu_memory` that works and {BUFFERS} chunks more. An iteration: forward, "
        "backward and step, from where one step() returns to where the next does. `resident`: the same model with all "
        "of it in RAM, its Adam included; `drive alone`: the bytes that the streamed iteration moved, through the same "
        "engine, reading and writing at once, before and after it; `x limit`: of the larger of both, median over the "
        "rounds; `x phases`: of the larger of both in forward plus the larger of both after it; `x CPU`: the CPU time "
        "it takes, of the resident model's: here layers, Adam and I/O share the CPUs. `forward`, `backward`, `step`: "
        "until these return; the states of a layer are stepped when the next forward enters it, where the share `in "
        "forward` of the bytes moves. `waiting`: for the disk. Times are medians."
    )
    return _sheet(report).page("Iterations with streamed parameters", command, about, shortfalls(report))
