from __future__ import annotations

import os

# Before torch is imported, here and in processes that tests start. Models are tiny: threads of torch's wait for each
# other longer than they work, the more so beside the kernels' own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what is remembered of this machine's disks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
