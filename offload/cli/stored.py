"""`offload list`, `inspect`, `verify`, `export` and `remove`: what lies in the directories of runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import EXIT_ERROR, plain_console, print_json, printable, say, show_table
from offload.cli.options import Json
from offload.errors import ConfigError
from offload.sizes import format_bytes

if TYPE_CHECKING:
    from offload.checkpoint.listing import Listed

EXIT_CORRUPT = 1
DEPTH = 4
Paths = Annotated[list[Path], typer.Argument(help="The directory of a run, or all of them.")]


def list_runs(
    directory: Annotated[Path, typer.Argument(help="Where to look.")],
    depth: Annotated[int, typer.Option(help="Levels of directories below it.")] = DEPTH,
    json: Json = False,
) -> None:
    """List the runs and snapshots in a directory and below, what they hold, and which are in use now.

    Only reads, and only what the records say: `offload verify` reads the states.
    """
    from rich.table import Column, Table

    from offload.checkpoint.listing import find

    if depth < 0:
        raise ConfigError(f"--depth {depth}: give a whole number, at least 0")
    found = find(directory, depth=depth)
    left_out = _left_out(found.too_deep, depth, is_cut=found.is_cut)
    if json:
        print_json({"runs": [_facts(row) for row in found.rows], "left_out": left_out})
        return
    rows = [_cells(row, directory) for row in found.rows]
    console = plain_console()
    if rows and console.is_terminal:
        names = (Column("directory", overflow="fold"), "step", Column("on disk", no_wrap=True))
        table = Table(*names, "optimizer", "committed", "state")
        for cells in rows:
            table.add_row(*cells)
        show_table(console, table)
    else:
        for name, step, size, optimizer, committed, state in rows:
            facts = (step and f"step {step}", size, optimizer, committed and f"committed {committed}", state)
            print(f"{name}: {', '.join(filter(None, facts))}")
    if not rows:
        print(f"no runs in {printable(str(directory))} and below")
    if left_out:
        print(left_out, file=sys.stderr)


def _facts(row: Listed) -> dict[str, Any]:
    return {
        "path": str(row.path),
        "directories": [str(path) for path in (row.path, *row.also)],
        "run_id": row.run_id,
        "snapshot": row.is_snapshot,
        "step": row.step,
        "bytes": row.nbytes,
        "optimizers": row.optimizers,
        "committed_s": row.committed_s,
        "live": row.is_live,
        "error": row.problem,
    }


def _cells(row: Listed, root: Path) -> tuple[str, ...]:
    """The cells for a run: name, step, size, optimizer, time and state. A cell is empty where there is none."""
    name = printable(str(row.path.relative_to(root)))
    also = f" and {len(row.also)} more" if row.also else ""
    committed = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.committed_s)) if row.committed_s else ""
    states = [
        "snapshot" if row.is_snapshot else "",
        "live" if row.is_live else "",
        "a part of a run: its COMMIT is elsewhere" if row.is_part else "",
        "no commit yet" if row.step is None and not row.is_part and row.problem is None else "",
        f"cannot be read: {printable(row.problem)}" if row.problem else "",
    ]
    step = "" if row.step is None else str(row.step)
    optimizers = ", ".join(row.optimizers)
    return name + also, step, format_bytes(row.nbytes), optimizers, committed, ", ".join(filter(None, states))


def _left_out(too_deep: int, depth: int, *, is_cut: bool) -> str:
    """Says which directories were not looked at; empty if all were."""
    deeper = f"directories deeper than --depth {depth} were not looked at: {too_deep}" if too_deep else ""
    cut = "there are too many directories to look at all of them: give one that is nearer to the runs" if is_cut else ""
    return "; ".join(filter(None, (deeper, cut)))


def inspect(paths: Paths, json: Json = False) -> None:
    """Show what run is committed here: its step, sizes and parameters."""
    from rich.table import Column, Table

    from offload.checkpoint.reader import Reader

    with Reader(paths) as reader:
        first = reader.manifests[0]
        rows: list[dict[str, Any]] = [
            {
                "name": row.facts.name,
                "shape": list(row.facts.shape),
                "dtype": row.facts.dtype,
                "unit": row.facts.unit,
                "steps": row.facts.age,
                "states": list(first.arrays_of(number)[1:]),
                "bytes": row.nbytes,
                "chunks": len(row.chunks),
            }
            for number, row in enumerate(reader.tensors())
        ]
        known: dict[str, Any] = {
            "run_id": reader.commit.run_id,
            "step": reader.commit.step,
            "snapshot": reader.commit.is_snapshot,
            "ranks": first.world,
            "tensor_parallel_ranks": first.slices,
            "paths": first.paths,
            "chunks": sum(len(manifest.chunks) for manifest in reader.manifests),
            "compute_dtype": first.compute_dtype,
            "optimizers": first.optimizers,
            "groups": [dict(group) for group in first.groups],
            "bytes": sum(row.nbytes for row in reader.tensors()),
        }
    if json:
        print_json(known | {"parameters": rows})
        return
    console = plain_console()
    what = "snapshot of run" if known["snapshot"] else "run"
    say(
        console,
        f"{what} {known['run_id']}, step {known['step']}: {len(rows)} parameters of "
        f"{' and '.join(dict.fromkeys(known['optimizers']))}, {format_bytes(known['bytes'])} of "
        f"states in {known['chunks']} chunks on {known['paths']} paths of {known['ranks']} ranks",
    )
    # Names in full: they differ at their ends.
    table = Table(Column("parameter", overflow="fold"), "shape", "dtype", "steps", "states", "chunks")
    for row in rows:
        cells = (row["name"], row["shape"], row["dtype"], row["steps"])
        table.add_row(*(str(cell) for cell in cells), format_bytes(row["bytes"]), str(row["chunks"]))
    show_table(console, table)


def verify(
    paths: Paths,
    threads: Annotated[int, typer.Option(help="Slots checked at once.")] = 4,
    json: Json = False,
) -> None:
    """Read all that a resume would read and compare it with its checksum; exit status 1 if something is damaged."""
    from rich.progress import track

    from offload.checkpoint.commit import path_of
    from offload.checkpoint.reader import Reader
    from offload.storage.kept_base import verify as verify_base

    if threads < 1:
        raise ConfigError(f"--threads {threads}: give a whole number, at least 1")
    console = plain_console(stderr=True)
    nbytes, damaged = 0, []
    with Reader(paths) as reader:
        total = sum(len(manifest.slots) for manifest in reader.manifests)
        found = reader.verify(threads)
        for one in track(found, "verifying", total, console=console, disable=not console.is_terminal):
            nbytes += one.nbytes
            if one.error is not None:
                damaged.append({"rank": one.rank, "chunk": one.chunk, "error": str(one.error)})
        bases = {path_of(one.base[0]) / one.base[1] for one in reader.manifests if one.base is not None}
        for base in sorted(path for path in bases if path.exists()):  # what is missing is made again
            for problem in verify_base(base):
                total += 1
                if problem is not None:
                    damaged.append({"base": str(base), "error": str(problem)})
        step = reader.commit.step
    if json:
        print_json({"step": step, "slots": total, "bytes": nbytes, "damaged": damaged})
    else:
        for fault in damaged:
            print(fault["error"])
        print(f"step {step}: {total} slots, {format_bytes(nbytes)}, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(EXIT_CORRUPT)


def export(
    paths: Annotated[list[Path], typer.Argument(help="The directories of a run, and at the end the one to write to.")],
    kind: Annotated[
        str, typer.Option(help="What of each parameter that has it: master, or a state, as exp_avg or momentum_buffer.")
    ] = "master",
    fp32: Annotated[bool, typer.Option("--fp32", help="Masters in fp32 instead of the compute dtype.")] = False,
    json: Json = False,
) -> None:
    """Write the committed weights as safetensors, under the model's own names; in constant memory.

    Parameters that were frozen, and buffers, are not in a commit: `optimizer.export(dir)` has those too.
    """
    import torch

    from offload.checkpoint.export import entries
    from offload.checkpoint.export import export as write
    from offload.checkpoint.reader import Reader

    if len(paths) < 2:
        raise ConfigError("give the directory of a run and the one to export to")
    *run, out = paths
    stem = "model" if kind == "master" else kind
    with Reader(run) as reader:
        first = reader.manifests[0]
        kinds = dict.fromkeys(("master", *(one for n in range(len(first.parameters)) for one in first.arrays_of(n))))
        if kind not in kinds:
            raise ConfigError(f"--kind {kind}: choose one of {', '.join(kinds)}")
        files = write(out, entries(reader, kind, torch.float32 if fp32 else None), stem=stem)
        step = reader.commit.step
    if json:
        print_json({"step": step, "files": [str(file) for file in files]})
    else:
        for file in files:
            print(f"step {step}: {file}")


def remove(
    paths: Paths,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete a run's files: this library's own, if no live run holds them; asks first.

    Exit status 2 if a COMMIT stays that is somebody else's, or too damaged to be told from that.
    """
    from offload.checkpoint.remove import find, require_idle
    from offload.checkpoint.remove import remove as delete

    found = find(paths)
    files = found.own
    require_idle(files)  # before it asks
    size = sum(file.stat().st_size for file in files)
    if files and not yes:
        if json:
            raise ConfigError("--json cannot ask: give --yes")
        for file in files:
            print(file)
        if not typer.confirm(f"Delete these {len(files)} files, {format_bytes(size)}?"):
            raise typer.Exit(EXIT_ERROR)
    delete(files)
    if json:
        strange = [{"file": str(file), "reason": why} for file, why in found.strange]
        print_json({"files": [str(file) for file in files], "bytes": size, "left": strange})
    else:
        print(f"{len(files)} files deleted, {format_bytes(size)}")
        for file, why in found.strange:
            print(f"left: {file} {why}")
    for file, why in found.refused:
        print(
            f"{file} {why}: as long as it is there no run begins; move it away, or delete it yourself", file=sys.stderr
        )
    if found.refused:
        raise typer.Exit(EXIT_ERROR)
