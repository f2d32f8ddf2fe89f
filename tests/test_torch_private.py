"""What a torch gets that lacks a private function of those we use."""

from __future__ import annotations

import runpy

import pytest
import torch

from offload import torch_private
from offload.errors import OffloadError, TorchVersionError


def test_torch_that_lacks_functions_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(TorchVersionError) as caught:
        runpy.run_path(str(torch_private.__file__))
    message = str(caught.value)
    assert "torch._C._current_graph_task_id" in message
    assert "torch._foreach_norm" in message
    assert torch.__version__ in message
    assert torch_private.TESTED[0] in message
    assert isinstance(caught.value, OffloadError)
    assert isinstance(caught.value, ImportError)


def test_this_torch_is_one_that_is_tested() -> None:
    assert torch.__version__.startswith(torch_private.TESTED)
