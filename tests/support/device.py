"""What tests of training run on: the CPU; in processes of their own, the simulated accelerator."""

from __future__ import annotations

import os

from tests import simulated_device

_WANTED = os.environ.get("OFFLOAD_TEST_DEVICE", "cpu")
DEVICE = "cpu" if _WANTED == simulated_device.NAME and not simulated_device.is_wanted() else _WANTED
"""The simulated one needs a C++ compiler; others, such as "cuda", are for bench/gpu.py."""
