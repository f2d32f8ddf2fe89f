from __future__ import annotations

import os
from typing import Any

# Before torch is imported, here and in processes that tests start. Models are tiny: threads of torch's wait for each
# other longer than they work, the more so beside the kernels' own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("offload", deadline=None)  # machines are shared: how long an example takes says nothing
settings.load_profile("offload")

RANKS = "tests/distributed/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several workers run tests, one runs all of ranks: they share processes, which are started once."""
    from xdist.scheduler import LoadScopeScheduling

    class Ranks(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return RANKS if nodeid.startswith(RANKS) else nodeid

    return Ranks(config, log)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what is remembered of this machine's disks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
