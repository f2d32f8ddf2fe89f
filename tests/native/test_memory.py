"""Large blocks go back to the system when they are freed, whatever lives between them; others are used again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

CODE = """
import re, resource, sys, torch
from pathlib import Path
from offload.native.memory import return_large_blocks

def rss_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

if sys.argv[1] == "returned":
    return_large_blocks()
torch.empty(24 << 20, dtype=torch.uint8).zero_()  # from here on glibc would cut smaller ones from its heap
before = rss_mib()
large, small = [], []
for _ in range(20):
    large.append(torch.empty(5 << 20, dtype=torch.uint8).fill_(1))
    small.append(torch.ones(64 << 10, dtype=torch.uint8))
large.clear()
left = rss_mib() - before - 20 / 16
torch.empty(2 << 20, dtype=torch.uint8).fill_(1)
faults = -resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.empty(2 << 20, dtype=torch.uint8).fill_(1)
print(left, faults + resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def measured(how: str, **environment: str) -> tuple[float, int]:
    """MiB that are left of 100 MiB of large blocks, and page faults of 20 smaller ones that come and go."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, how], cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=True
    )
    left, faults = done.stdout.split()
    return float(left), int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
@pytest.mark.slow
def test_freed_blocks_leave_no_holes() -> None:
    left_mib, faults = measured("returned")
    assert left_mib < 8
    # Each has 512 pages; only what lies at the end of the heap could be given back with it.
    assert faults < 1024
    # What it is for: otherwise the small blocks between them keep the heap as long as it was.
    assert measured("held")[0] > 50
    # Who has set the threshold is left alone.
    assert measured("returned", MALLOC_MMAP_THRESHOLD_=str(1 << 28))[0] > 50
