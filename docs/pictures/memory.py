"""Draws memory.svg, the README's picture of memory by tier: `python docs/pictures/memory.py`.

Every figure is one of `offload plan --json`: nothing is trained, allocated or measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_suffix(".svg")
PRESET = "1b"
GIB = 2**30

CONFIGURATIONS = {
    'tier="device"': ["--tier", "device"],
    'tier="cpu"': ["--tier", "cpu", "--cpu-memory", "14GiB"],
    'tier="nvme"': ["--tier", "nvme", "--cpu-memory", "least"],
    'tier="nvme", param_tier="nvme", grad_tier="nvme", cpu_memory="2GiB"': [
        *("--tier", "nvme", "--param-tier", "nvme", "--grad-tier", "nvme", "--cpu-memory", "2GiB")
    ],
}
"""What a user gives, by what the picture says: options of `OffloadZero`, and those of `offload plan`."""

TIERS = {"device": "device", "cpu": "RAM", "nvme": "NVMe"}
KINDS = {
    "parameters": ("#4878a8", {"param"}),
    "gradients": ("#e0a040", {"grad"}),
    "fp32 masters": ("#3a8f5c", {"master"}),
    "moments": ("#86c29a", {"exp_avg", "exp_avg_sq"}),
    "buffers and reserve": ("#9a9a9a", {"buffers", "slots", "rest"}),
}
"""What the picture tells apart: its colour, and the state kinds of `offload plan` in it."""

WIDTH, LEFT, RIGHT, BAR, GAP, TITLE, GROUP = 860, 70, 96, 18, 5, 24, 12
TEXT = 'font-family="sans-serif" font-size="{size}" fill="#222" text-anchor="{anchor}"'


def planned(options: list[str]) -> dict[str, Any]:
    """The object that `offload plan --json` prints with these options."""
    run = "from offload.cli.main import run; run()"
    machine = ["--no-commits", "--gpu", "--ram", "64GiB"]
    command = [sys.executable, "-c", run, "plan", "--preset", PRESET, "--json", *machine, *options]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def by_tier(plan: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes by tier and kind, as the picture tells them apart."""
    return {
        tier: {
            kind: sum(row["nbytes"] for row in plan["rows"] if row["tier"] == tier and row["kind"] in members)
            for kind, (_, members) in KINDS.items()
        }
        for tier in TIERS
    }


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    style = TEXT.format(size=size, anchor=anchor)
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} font-weight="{weight}">{escape(words)}</text>'


def bar(y: float, tier: str, kinds: dict[str, int], scale: float) -> list[str]:
    """One tier: its name, what lies there, and how much that is in all."""
    drawn = [text(LEFT - 8, y + BAR - 5, TIERS[tier], anchor="end")]
    x = float(LEFT)
    for kind, nbytes in kinds.items():
        width = nbytes * scale
        if width:
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{KINDS[kind][0]}"/>')
        x += width
    total = sum(kinds.values()) / GIB
    drawn.append(text(x + 6, y + BAR - 5, f"{total:.2f} GiB" if total else "0", size=12))
    return drawn


def picture(plans: dict[str, dict[str, Any]]) -> str:
    """The SVG."""
    tiers = {name: by_tier(plan) for name, plan in plans.items()}
    most = max(sum(kinds.values()) for one in tiers.values() for kinds in one.values())
    scale = (WIDTH - LEFT - RIGHT) / most
    parameters = next(iter(plans.values()))["parameters"]
    drawn = [
        text(12, 24, f"Memory by tier: a GPT of {parameters / 1e9:.2f} billion parameters in bf16 on a GPU", size=16)
    ]
    x = float(LEFT)
    for kind, (colour, _) in KINDS.items():
        drawn += [f'<rect x="{x:.1f}" y="38" width="12" height="12" fill="{colour}"/>', text(x + 17, 49, kind)]
        x += 40 + 7.2 * len(kind)
    y = 66
    for name, one in tiers.items():
        drawn.append(text(LEFT, y + 14, name, weight="bold"))
        y += TITLE
        for tier, kinds in one.items():
            drawn += bar(y, tier, kinds, scale)
            y += BAR + GAP
        y += GROUP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>', *drawn, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture({name: planned(options) for name, options in CONFIGURATIONS.items()}))
