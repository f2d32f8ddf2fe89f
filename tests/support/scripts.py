"""Runs scripts as `python -W error script.py` does, each in a process of its own that has imported torch already.

One Python imports torch and forks for each script. The child runs the script as its main program, and ends as any
Python does. Importing torch for each would take longer than the scripts.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script in `folder`, where nothing is but what it makes, with warnings as errors."""
    (folder / "script.py").write_text(code)
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(str(folder)) + "\n")
    server.stdin.flush()
    returncode = int(server.stdout.readline())
    said = [folder / name for name in ("stdout.txt", "stderr.txt")]
    out, err = (file.read_text() for file in said)
    for file in said:
        file.unlink()
    return subprocess.CompletedProcess(["script.py"], returncode, out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose pipe ends then."""
    command = [sys.executable, "-W", "error", str(Path(__file__))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _serve() -> str | None:
    """Forks for each folder that comes. Returns: in a child, the script to run; None when no more will come."""
    import torch  # noqa: F401  # before the forks

    for line in sys.stdin:
        folder = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            for number, name in ((0, os.devnull), (1, "stdout.txt"), (2, "stderr.txt")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
            sys.path[0] = folder
            sys.argv = ["script.py"]
            return "script.py"
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


if __name__ == "__main__" and (script := _serve()) is not None:
    runpy.run_path(script, run_name="__main__")
