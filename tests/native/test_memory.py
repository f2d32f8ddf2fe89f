"""Large blocks go back to the system when they are freed, whatever lives between them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

CODE = """
import re, sys, torch
from pathlib import Path
from offload.native.library import return_large_blocks

def rss_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

if sys.argv[1] == "returned":
    return_large_blocks()
torch.empty(24 << 20, dtype=torch.uint8).zero_()  # from here on glibc would cut smaller ones from its heap
before = rss_mib()
large, small = [], []
for _ in range(50):
    large.append(torch.empty(2 << 20, dtype=torch.uint8).fill_(1))
    small.append(torch.ones(64 << 10, dtype=torch.uint8))
large.clear()
print(rss_mib() - before - 50 / 16)
"""


def left_mib(how: str, **environment: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", CODE, how], cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=True
    )
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_freed_blocks_leave_no_holes() -> None:
    assert left_mib("returned") < 8
    # What it is for: otherwise the small blocks between them keep the heap as long as it was.
    assert left_mib("held") > 50
    # Who has set the threshold is left alone.
    assert left_mib("returned", MALLOC_MMAP_THRESHOLD_=str(1 << 28)) > 50
