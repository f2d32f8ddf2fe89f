"""DeepSpeed's async I/O for bench/io.py, run by a Python that has it: a JSON list a line in, seconds a line out.

[file, "read" | "write" | "mixed", bytes, block_size, queue_depth, threads]
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

MEMORY_BYTES = 64 << 20


class Mover:
    """Moves bytes with one handle of DeepSpeed's for each direction. Its memory is on huge pages if GLIBC_TUNABLES says
    so."""

    def __init__(self) -> None:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder
        self._aio = builder().load(verbose=False)
        torch = importlib.import_module("torch")
        # Page-locked by DeepSpeed itself: any other memory it copies from and to, at a fifth of the speed.
        self._memory = self._aio.aio_handle().new_cpu_locked_tensor(MEMORY_BYTES, torch.empty(0, dtype=torch.uint8))
        self._memory.random_()

    def run(self, file: str, operation: str, nbytes: int, block: int, depth: int, threads: int) -> float:
        sides = [(operation, 0, nbytes)]
        if operation == "mixed":
            sides = [("read", 0, nbytes // 2), ("write", nbytes // 2, nbytes // 2)]
        call = MEMORY_BYTES // len(sides)
        # single_submit and overlap_events: the faster of their settings.
        handles = [self._aio.aio_handle(block, depth, True, True, threads) for _ in sides]

        def move(index: int) -> None:
            side, start, length = sides[index]
            for at in range(start, start + length, call):
                part = self._memory[index * call :][: min(call, start + length - at)]
                done = (handles[index].sync_pread if side == "read" else handles[index].sync_pwrite)(part, file, at)
                if done != 1:
                    raise OSError(f"{side} at {at} returned {done}")

        with ThreadPoolExecutor(len(sides)) as pool:
            list(pool.map(time.sleep, [0.001] * len(sides)))
            start_s = time.perf_counter()
            list(pool.map(move, range(len(sides))))
            return time.perf_counter() - start_s


def main() -> None:
    # Its extension writes to stdout, which is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mover = Mover()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer: float | str = mover.run(*json.loads(line))
        except (OSError, RuntimeError) as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
