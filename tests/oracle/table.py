"""Writes the table of idioms and placements into docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offload import Tuning
from tests.oracle import idioms
from tests.oracle.harness import IDIOMS, PLACEMENTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- begin of the table of idioms -->\n", "<!-- end of the table of idioms -->\n"


def _options(placement: str) -> str:
    """What a placement gives to `OffloadZero`, as a call has it."""
    options = dict(PLACEMENTS[placement])
    tuning = options.pop("tuning", Tuning())
    tuned = ["recompute=False"] if not tuning.recompute else []
    tuned += [f"tile={tuning.tile}"] if tuning.tile else []
    if options.pop("units", None):
        tuned.append('units=[..., "embedding", "head"]')
    options.pop("activation_memory", None)
    given = [f'{name}="{value}"' for name, value in options.items()] + (
        [f"Tuning({', '.join(tuned)})"] if tuned else []
    )
    return f"`{', '.join(given)}`"


def columns() -> Iterator[str]:
    """In Markdown: a row a placement, with its options and how many idioms are equal and refused."""
    yield "| column | options | equal | a typed error |"
    yield "|---|---|---|---|"
    for placement in PLACEMENTS:
        refused = sum(placement in idiom.refused for idiom in IDIOMS.values())
        yield f"| {placement} | {_options(placement)} | {len(IDIOMS) - refused} | {refused} |"


def table() -> str:
    """In Markdown: the columns, then a row an idiom, a column a placement, and why what is refused is."""
    assert idioms.__all__
    reasons: dict[str, int] = {}
    lines = ["| idiom | taken from | " + " | ".join(PLACEMENTS) + " |", "|---|---|" + "---|" * len(PLACEMENTS)]
    for idiom in IDIOMS.values():
        cells = []
        for placement in PLACEMENTS:
            reason = idiom.refused.get(placement)
            cells.append("=" if reason is None else f"error {reasons.setdefault(reason, len(reasons) + 1)}")
        lines.append(f"| {idiom.summary} | `{idiom.source}` | " + " | ".join(cells) + " |")
    cases = len(IDIOMS) * len(PLACEMENTS)
    refused = sum(len(idiom.refused) for idiom in IDIOMS.values())
    head = (
        f"{len(IDIOMS)} idioms in {len(PLACEMENTS)} placements: {cases - refused} equal (=), {refused} a typed error.\n"
    )
    errors = [f"- error {number}: {reason}" for reason, number in reasons.items()]
    folded = ['<details class="idioms" markdown>', "<summary>The table</summary>", "", *lines, "", "</details>"]
    return "\n".join([head, *columns(), "", *folded, "", *errors, ""])


def document(text: str, rows: str) -> str:
    """`text` with `rows` between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(), table()))
