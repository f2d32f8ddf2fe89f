"""Forked children and other processes, as tests need them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.support.scripts import run_code

ROOT = Path(__file__).parents[2]


def holds_in_child(claim: Callable[[], bool], timeout_s: float = 30) -> bool:
    """Whether `claim()` is true in a forked child; False too if it raises, crashes or hangs there."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn of forks beside threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if claim() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def start_python(code: str, *args: str) -> subprocess.Popen[str]:
    """Runs `code` in a Python of its own, from the repository's root."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


class Forked:
    """A forked child that runs some code: no Python starts and imports torch for it. Others than it are killed.

    Attributes: pid: its own; stdin, stdout: the other ends of its.
    """

    def __init__(self, code: str, *args: str) -> None:
        theirs, ours = zip(os.pipe(), reversed(os.pipe()), strict=True)  # what it reads and writes, and we
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as in `holds_in_child`
            self.pid = os.fork()
        if self.pid == 0:
            try:
                for number, fd in enumerate(theirs):
                    os.dup2(fd, number)
                for fd in (*theirs, *ours):
                    os.close(fd)  # its input ends where the parent closes it
                sys.argv, sys.stdin, sys.stdout = ["-c", *args], os.fdopen(0), os.fdopen(1, "w")
                exec(code, {"__name__": "__main__"})
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for fd in theirs:
            os.close(fd)
        self.stdin, self.stdout = os.fdopen(ours[0], "w"), os.fdopen(ours[1])
        self._has_ended = False

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if not self._has_ended:
            os.waitpid(self.pid, 0)
            self._has_ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """As that of subprocess.Popen: it is waited for, and its input has ended."""
        self.stdin.close()
        self.stdout.close()
        self.wait()


def run_killed(module: str, seed: int, kills: int, folder: Path, *more: object) -> None:
    """Runs `tests.support.<module>`, which kills trainings so many times, and fails if that finds something wrong."""
    code = f"import runpy\nrunpy.run_module('tests.support.{module}', run_name='__main__', alter_sys=True)"
    done = run_code(code, *map(str, (seed, kills, folder, *more)), limit_s=60 + 20 * kills)
    assert done.returncode == 0, done.stdout + done.stderr


def open_files() -> list[str]:
    """What this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(found)


def region_of(address: int) -> str:
    """What /proc/self/smaps says about the mapping that holds `address`; "" if nothing is mapped there."""
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", block)
        if span and int(span[1], 16) <= address < int(span[2], 16):
            return block
    return ""


def resident_bytes(address: int) -> int:
    """How much of the mapping that holds `address` is in RAM."""
    rss = re.search(r"(?m)^Rss:\s+(\d+) kB", region_of(address))
    return int(rss[1]) * 1024 if rss else 0


def arena_bytes() -> int:
    """RAM in mappings that forks do not inherit: this library's arenas."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(r"(?ms)^Rss:\s+(\d+) kB(?:(?!^Rss:).)*?^VmFlags:[^\n]* dc\b", text)
    return sum(int(rss) for rss in found) * 1024


def proportional_bytes(pid: int) -> int:
    """RAM of a process, what it shares divided among those that share it."""
    found = re.search(r"(?m)^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(found[1]) * 1024 if found else 0


def own_threads() -> set[str]:
    """Names of this library's threads that run."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("offload")}
