from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

# Before torch is imported, here and in processes that tests start. Models are tiny: threads of torch's wait for each
# other longer than they work, the more so beside the kernels' own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from hypothesis import settings

from tests import simulated_device
from tests.support.device import DEVICE
from tests.support.ranks import Worlds

if simulated_device.is_wanted():
    simulated_device.load()  # before the first backward

if DEVICE.startswith("cuda"):
    # The same bits are promised "with torch's own determinism settings fixed": a convolution may add with atomics else.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False

settings.register_profile("offload", deadline=None)  # machines are shared: how long an example takes says nothing
settings.load_profile("offload")

OF_RANKS = ("tests/distributed/", "tests/checkpoint/test_stored_runs_of_ranks.py")
"""What uses `worlds`."""
THINNED = (
    "tests/cli/",
    "tests/distributed/",
    "tests/faults/",
    "tests/model/",
    "tests/native/",
    "tests/oracle/",
    "tests/parity/",
)
"""Where only every second of the cases that `one_in` leaves runs in make test: they take most of its time."""
GOLDEN = 0.6180339887498949

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore it, and so would all processes that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several workers run tests, one runs all of ranks: they share processes, which are started once."""
    from xdist.scheduler import LoadScopeScheduling

    class Ranks(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(OF_RANKS) else nodeid

    return Ranks(config, log)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n)`: n ranks, started once for all tests."""
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what is remembered of this machine's disks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    """A test that fails for what another one left on in this process would name the wrong one."""
    yield
    assert torch._C._is_torch_function_enabled(), "torch functions of subclasses are off for this thread"
    assert not torch._C._len_torch_function_stack(), "a torch function mode is still on"
    assert not torch._C._len_torch_dispatch_stack(), "a dispatch mode is still on"
    assert torch.is_grad_enabled(), "gradients are off for this thread"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        # Before torch 2.13 a checkpoint whose function raised leaves its hooks on until its generator is collected.
        gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "hooks for saved tensors are still on"


@pytest.fixture(autouse=True)
def _orders_its_streams() -> Iterator[None]:
    """On the simulated accelerator: each two uses of memory by different streams have an order."""
    yield
    if simulated_device.is_wanted():
        found = simulated_device.races()
        assert not found, "\n".join(found[:10])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that `one_in` leaves to make test-slow, before `-m` chooses."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        marker = item.get_closest_marker("one_in")
        count, left_out = divmod(seen[name], 1 if marker is None else marker.args[0])
        # The golden ratio picks every second one, and not always the same value of the last parameter.
        if left_out or (name.startswith(THINNED) and count * GOLDEN % 1 >= 0.5):
            item.add_marker("slow")
        seen[name] += 1
