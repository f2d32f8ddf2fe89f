"""A run with 64 descriptors at most, on two paths, on every engine: close() gives back all that it took.

And one in a process without standard streams, as a daemon may be.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from tests.support.scripts import run_code

SCRIPT = """
import os, resource, sys, threading
import torch
from torch import nn
from offload import OffloadZero, Tuning

engine, *paths = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # imports more modules
files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
for _ in range(12):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    tuning = Tuning(chunk="4KiB", io_engine=engine)
    with OffloadZero(model, path=paths, cpu_memory="200KiB", tuning=tuning) as optimizer:
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        assert optimizer.stats()["streamed_chunks"] > 3
        assert optimizer.stats()["io_engine"] == engine
assert len(os.listdir("/proc/self/fd")) == files, os.listdir("/proc/self/fd")
assert threading.active_count() == threads, threading.enumerate()
print("nothing left")
"""


@pytest.mark.parametrize(
    "engine",
    ["uring", pytest.param("threads", marks=pytest.mark.slow), pytest.param("portable", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_run_with_few_descriptors_leaves_none_and_no_thread(engine: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, engine, str(tmp_path / "one"), str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "cannot run here" in done.stderr:
        pytest.skip("no io_uring here")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nothing left\n"


WITHOUT_STREAMS = """
import contextlib, os, sys
import torch
from torch import nn
from offload import OffloadZero, Tuning

def print_all():
    for number in range(3):
        with contextlib.suppress(OSError):
            os.write(number, b"what a library prints")

for number in range(3):
    os.close(number)
torch.manual_seed(0)
model = nn.Linear(64, 64)
optimizer = OffloadZero(model, path=sys.argv[1], cpu_memory="1MiB", commit_every=1,
                        tuning=Tuning(chunk="4KiB", io_engine=sys.argv[2]))
for step in range(2):
    print_all()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
print_all()
optimizer.close()
torch.save(model.state_dict(), sys.argv[1] + ".pt")
os._exit(0)
"""


@pytest.mark.parametrize("engine", ["auto", "threads", "portable"])
def test_what_is_printed_where_no_standard_streams_are_is_written_to_no_file(engine: str, tmp_path: Path) -> None:
    assert run_code(WITHOUT_STREAMS, str(tmp_path / "run"), engine, limit_s=100).returncode == 0
    model = nn.Linear(64, 64)
    options = {"cpu_memory": "1MiB", "tuning": Tuning(chunk="4KiB")}
    with OffloadZero(model, path=tmp_path / "run", resume=True, **options) as optimizer:  # type: ignore[arg-type]
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == 2
        whole = torch.load(tmp_path / "run.pt")
        assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())
