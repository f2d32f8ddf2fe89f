"""Runs scripts as Python does, each in a process of its own that has imported torch and this library already.

One Python imports torch, with what its optimizers import at their first use, and `offload`, and forks for each script.
The child runs the script as its main program, and ends as any Python does. Importing them for each would take longer
than the scripts.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_code(
    code: str, *arguments: str, limit_s: int = 120, imports_itself: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs code as `python -c code` does, from the repository's root. Args: imports_itself: `offload`, and only then
    does that look what this torch has."""
    at_root = f"import os, sys\nos.chdir({str(ROOT)!r})\nsys.path[0] = os.getcwd()\n"
    with tempfile.TemporaryDirectory() as folder:
        return run_script(
            at_root + code, Path(folder), *arguments, limit_s=limit_s, strict=False, imports_itself=imports_itself
        )


def run_script(
    code: str,
    folder: Path,
    *arguments: str,
    limit_s: int = 120,
    strict: bool = True,
    imports_itself: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a script in `folder`, where nothing is but what it makes.

    Args: limit_s: SIGALRM ends it after so many seconds; strict: warnings are errors; imports_itself: as in `run_code`.
    """
    (folder / "script.py").write_text(code)
    server = _server(imports_itself)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([limit_s, strict, str(folder), *arguments]) + "\n")
    server.stdin.flush()
    returncode = int(server.stdout.readline())
    said = [folder / name for name in ("stdout.txt", "stderr.txt")]
    out, err = (file.read_text() for file in said)
    for file in said:
        file.unlink()
    return subprocess.CompletedProcess(["script.py"], returncode, out, err)


@functools.cache
def _server(has_torch_alone: bool) -> subprocess.Popen[str]:
    """It ends with this process, whose pipe ends then."""
    command = [sys.executable, str(Path(__file__)), *(["torch alone"] if has_torch_alone else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _serve() -> str | None:
    """Forks for each folder that comes. Returns: in a child, the script to run; None when no more will come."""
    import torch._dynamo  # noqa: F401  # before the forks

    if not sys.argv[1:]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # or no strict script would be told of a warning of this import
            from offload import OffloadZero  # noqa: F401
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in each child"
    # No collection of garbage looks through what was imported. The last one, as a Python ends, would take longer than
    # most scripts: it writes to each object, so that all memory which the child shares is copied.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        limit_s, strict, folder, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(limit_s)
            if strict:
                warnings.simplefilter("error")
            os.chdir(folder)
            for number, name in ((0, os.devnull), (1, "stdout.txt"), (2, "stderr.txt")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
            sys.path[0] = folder
            sys.argv = ["script.py", *arguments]
            return "script.py"
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _run(script: str) -> None:
    """Runs a script as the main program, whose names live until Python ends; none of this file's is among them."""
    names = vars(sys.modules["__main__"])
    code = compile(Path(script).read_text(), script, "exec", dont_inherit=True)
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names["__file__"] = script
    exec(code, names)


if __name__ == "__main__" and (asked := _serve()) is not None:
    _run(asked)
