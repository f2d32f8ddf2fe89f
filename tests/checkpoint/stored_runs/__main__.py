"""Makes the runs: `python -m tests.checkpoint.stored_runs NAME [PACKAGE [CASE ...]]`.

NAME: of the directory, the commit that makes them; PACKAGE: a folder with another version's `offload`, such as what
`git archive` gives; CASE: which ones, all by default. The packages of before need no compiler: without kernels they
compute in torch operations, with the same bits. Where an installed library of kernels is not theirs, set
OFFLOAD_KERNEL_LIBRARY to a file that is not there.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.checkpoint import stored_runs
from tests.checkpoint.stored_runs import CASES, FOLDER, PLAIN, RANKS, STEPS, plain_run


def make(case: str, archive: Path, package: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), RANKS.get(case, 1)
        if ranks > 1:
            # A new process finds no function of a module that is run with `-m`, but those of one that is imported.
            from tests.checkpoint.stored_runs.__main__ import run_rank

            spawn(run_rank, (ranks, case, folder, package), nprocs=ranks)
        else:
            run(case, folder)
        directories = sorted(path.name for path in folder.iterdir() if path.is_dir())
        with tarfile.open(archive, "w:xz") as stored:
            for part in ["snapshot"] if "snapshot" in directories else directories:
                stored.add(folder / part, part)
            stored.add(folder / PLAIN, PLAIN)


def run_rank(rank: int, ranks: int, case: str, folder: Path, package: str | None) -> None:
    """`run` in a process of its own."""
    use(package)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    run(case, folder, rank)
    dist.destroy_process_group()


def run(case: str, folder: Path, rank: int = 0) -> None:
    """Trains in the least RAM, commits, and goes on for a step. Fails where `plain_run` computes other bits."""
    plain, given, done = plain_run(case), stored_runs.options(case, folder, rank), 0
    if case == "moved":  # ranks that have their own shards first, and then one another's
        model, optimizer = stored_runs.begun(case, stored_runs.options(case, folder, rank, path=["rank{rank}"]))
        with optimizer:
            stored_runs.train(model, optimizer, 0, rank)
            optimizer.commit()
        given, done = {**given, "resume": True}, 1
    model, optimizer = stored_runs.begun(case, given)
    with optimizer:
        for step in range(STEPS):
            plain.step(step, RANKS.get(case, 1))
            if step >= done:
                stored_runs.train(model, optimizer, step, rank)
        optimizer.commit(stored_runs.extra_of(rank))
        stored_runs.assert_same(stored_runs.states_of(model, optimizer), plain.states())
        kept = optimizer.snapshot() if case == "snapshot" else ()
        stored_runs.train(model, optimizer, STEPS, rank)
    if rank == 0:
        plain.save(folder)
    if kept:
        kept[0].rename(folder / "snapshot")


def use(package: str | None) -> None:
    """Imports `offload` from this folder, not from where it is installed."""
    if package is not None:
        # An editable install of this folder comes before any path.
        sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
        sys.path.insert(0, package)


def main(name: str, package: str | None = None, *cases: str) -> None:
    use(package)
    chosen: Sequence[str] = cases or tuple(CASES)
    (FOLDER / name).mkdir(exist_ok=True)
    for case in chosen:
        make(case, FOLDER / name / f"{case}.tar.xz", package)


if __name__ == "__main__":
    main(*sys.argv[1:])
