"""bench/gpu.py on the simulated accelerator: `python tests/support/gpu_bench.py OUT --tiny`, with its options."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from bench import gpu

INTERNAL = ("--worker", "--one")
"""Options of processes that use the device."""


def load_device() -> None:
    """The simulated one, with what bench/gpu.py asks of CUDA's beside what the library does."""
    import torch

    from tests import simulated_device
    from tests.support.device import load_simulated

    load_simulated()
    module: Any = torch.get_device_module(simulated_device.NAME)
    limit = ExitStack()

    def set_fraction(fraction: float, device: Any = None) -> None:
        limit.close()
        limit.enter_context(simulated_device.memory_limit(int(fraction * torch.accelerator.get_memory_info(0)[1])))

    module.set_per_process_memory_fraction = set_fraction


if __name__ == "__main__":
    os.environ["OFFLOAD_TEST_DEVICE"] = "simulated"
    if set(INTERNAL) & set(sys.argv):
        load_device()
    gpu.main()
