"""What tests of training run on: the CPU; in processes of their own, the simulated accelerator.

The accelerator knows nothing of this library. Here it gets what this library asks of CUDA beside what torch does: a
compiler at run time and a driver, for `offload/native/device_kernels.h`, and memory that raises when it is read.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from offload import torch_private
from offload.native import device_program
from tests import simulated_device

_WANTED = os.environ.get("OFFLOAD_TEST_DEVICE", "cpu")
DEVICE = "cpu" if _WANTED == simulated_device.NAME and not simulated_device.is_wanted() else _WANTED
"""The simulated one needs a C++ compiler; others, such as "cuda", are for bench/gpu.py."""


def load_simulated() -> None:
    """Makes the simulated accelerator known to torch, and its driver to this library. Before the first backward."""
    simulated_device.load()
    device_program.LIBRARIES[simulated_device.NAME] = lambda: (_driver(), _driver())
    if torch_private.forbid_data_access is None and simulated_device.can_allow_access():
        torch_private.forbid_data_access = simulated_device.forbid_access
        torch_private.allow_data_access = simulated_device.allow_access


@functools.cache
def _driver() -> ctypes.CDLL:
    source = Path(__file__).with_name("simulated_driver.cpp")
    define = f'-DKERNELS_SOURCE="{device_program.SOURCE}"'
    return ctypes.CDLL(str(simulated_device.build_beside(source, [define], [device_program.SOURCE])))


def refuse_launches(times: int) -> None:
    """The driver refuses the next `times` kernels that it is given, torch's aside; 0: none."""
    _driver().simulated_refuse_launches(times)
