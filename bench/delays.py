"""What a slow network costs over ranks: `python bench/delays.py [--delays-ms 0,1,5,25] [--ranks 2] [--json] [--save]`.

Each rank is on a machine of its own, a network namespace behind a switch in user space that delays each frame
(tests/support/switch.py; needs root, iproute2 and TAP). A model of 8 small blocks takes steps with DDP, FSDP2 and this
library, in turns in the same processes, at each delay. The one-way delays of a step are the seconds that it takes
longer at the largest delay than at none, in units of that delay: the least of the rounds at each, since what else the
machine does only adds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench import delays_rank
from bench.report import Json, Report, Rounds, Save, Table, run
from tests.support import nodes

Found = dict[str, dict[str, list[float]]]
"""Seconds by what was done, delay in seconds, and round."""
ABOUT = """\
A GPT of 8 blocks of width 64 over gloo, one thread a rank, clipped; medians. **delays**: how many one-way delays of \
the network a step takes, from the least of its seconds at the largest delay and at none. **a commit**, **a start**: \
of stage 2 with a path, beside what the disk takes."""


def measure(ranks: int, delays: list[float], rounds: int, steps: int) -> Found:
    """Args: delays: in seconds. Raises: RuntimeError: a rank failed."""
    with TemporaryDirectory(prefix="delays-") as folder, nodes.network(ranks, Path(folder)) as network:
        found = Path(folder, "found.json")
        options = {"delays": delays, "rounds": rounds, "steps": steps, "found": str(found), "path": f"{folder}/run"}
        outputs = [Path(folder, f"rank{host.number}.txt") for host in network.hosts]
        ends = [
            host.start(
                sys.executable,
                delays_rank.__file__,
                *(str(host.number), str(ranks), network.hosts[0].address, str(network.control), json.dumps(options)),
                output=output,
            )
            for host, output in zip(network.hosts, outputs, strict=True)
        ]
        if sum(end.wait(600) for end in ends):
            raise RuntimeError("\n".join(output.read_text()[-3000:] for output in outputs))
        seconds: Found = json.loads(found.read_text())
        return seconds


def delays_of(seconds: dict[str, list[float]], largest: float) -> float:
    """One-way delays: what the fastest round took longer at the largest delay than at none."""
    return (min(seconds[str(largest)]) - min(seconds["0.0"])) / largest


def main(
    delays_ms: Annotated[str, typer.Option(help="One-way delays, with commas; the first is 0.")] = "0,1,5,25",
    ranks: Annotated[int, typer.Option(help="Machines, with a rank each.")] = 2,
    rounds: Rounds = 9,
    steps: Annotated[int, typer.Option(help="Of each contestant in a round, at each delay.")] = 5,
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Measure, print the table."""
    if why := nodes.no_network():
        raise typer.BadParameter(f"no network can be made here: {why}")
    delays = [float(one) / 1000 for one in delays_ms.split(",")]
    found = measure(ranks, delays, rounds, steps)
    rows: list[dict[str, Any]] = []
    cells = []
    for name, by_delay in found.items():
        seconds = {f"{1000 * delay:g} ms": statistics.median(by_delay[str(delay)]) for delay in delays}
        rows.append({"what": name, **seconds, "delays": delays_of(by_delay, delays[-1])})
        cells.append([name, *(f"{1000 * one:.1f}" for one in seconds.values()), f"{rows[-1]['delays']:.1f}"])
    headings = ["", *(f"ms at {1000 * delay:g} ms" for delay in delays), "delays"]
    table = Table(headings, cells, f"A step over {ranks} ranks by the network's delay")
    Report("delays", table.title, ABOUT, [table], {"rows": rows}).publish(as_json=as_json, save=save)


if __name__ == "__main__":
    run(main)
