"""bench/gpu.py with cases that need neither a device nor torch: they end, crash, hang, or kill their call.

`python tests/support/gpu_calls.py OUT`, with its options. Once the file that FLAG names is there, all cases are good. A
worker does not start while the file that BROKEN names is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from bench import gpu

CASES = [
    gpu.Case("good", "good", expects_s=0),
    gpu.Case("crashes", "crashes", expects_s=0),
    gpu.Case("hangs", "hangs", expects_s=0, limit_s=2),
    gpu.Case("loses the device", "loses_the_device", expects_s=0),
    gpu.Case("differs", "differs", expects_s=0),
    gpu.Case("kills its call", "kills_its_call", expects_s=0),
    gpu.Case("slow", "slow", expects_s=0),
]


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def is_good() -> bool:
    return Path(os.environ["FLAG"]).exists()


def run_case(function: str) -> Mapping[str, Any]:
    say(figures={"pid": os.getpid()})
    ended = {"answers": True, "figures": {"pid": os.getpid(), "end": 1}}
    if is_good() or function == "good":
        return {**ended, "status": "ok", "says": "as it should"}
    if function == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if function == "kills_its_call":
        os.kill(os.getppid(), signal.SIGKILL)
    if function in ("kills_its_call", "slow", "hangs"):
        time.sleep(60)
    is_lost = function == "loses_the_device"
    return {**ended, "status": "failed" if is_lost else "differs", "says": function, "answers": not is_lost}


def work() -> None:
    if Path(os.environ["BROKEN"]).exists():
        sys.exit("this device is broken")
    say(device="none")
    for line in sys.stdin:
        say(**run_case(json.loads(line)["function"]))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work()
    else:
        gpu.cases = lambda tiny: CASES
        gpu.main()
