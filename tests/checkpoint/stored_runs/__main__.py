"""Makes the runs: `python -m tests.checkpoint.stored_runs NAME [PACKAGE [CASE ...]]`.

NAME: of the directory, the commit that makes them; PACKAGE: a folder with another version's `offload`, such as what
`git archive` gives; CASE: which ones, all by default. The packages of before need no compiler: without kernels they
compute in torch operations, with the same bits.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.checkpoint import stored_runs
from tests.checkpoint.stored_runs import CASES, EXTRA, FOLDER, PLAIN, STEPS, Model, PlainRun


def make(case: str, archive: Path) -> None:
    """A run in the least RAM, committed, and gone on for a step. Fails where `PlainRun` computes other bits."""
    plain, model = PlainRun(case), Model(is_frozen=case == "frozen")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = stored_runs.options(case, folder)
        with stored_runs.in_least_memory(model, given) as optimizer:
            for step in range(STEPS):
                plain.step(step)
                stored_runs.train(model, optimizer, step)
            optimizer.commit(EXTRA)
            stored_runs.assert_same(stored_runs.states_of(model, optimizer), plain.states())
            kept = optimizer.snapshot() if case == "snapshot" else ()
            stored_runs.train(model, optimizer, STEPS)
        plain.save(folder)
        if kept:
            kept[0].rename(folder / "snapshot")
        with tarfile.open(archive, "w:xz") as stored:
            for part in ["snapshot"] if kept else CASES[case].get("path", ["a"]):
                stored.add(folder / part, part)
            stored.add(folder / PLAIN, PLAIN)


def main(name: str, package: str | None = None, *cases: str) -> None:
    if package is not None:
        # An editable install of this folder comes before any path.
        sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
        sys.path.insert(0, package)
    chosen: Sequence[str] = cases or tuple(CASES)
    (FOLDER / name).mkdir(exist_ok=True)
    for case in chosen:
        make(case, FOLDER / name / f"{case}.tar.xz")


if __name__ == "__main__":
    main(*sys.argv[1:])
