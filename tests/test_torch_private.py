"""What a torch gets that lacks a private function of those we use."""

from __future__ import annotations

import runpy
import sys
import types

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


def test_a_torch_whose_dtensors_are_others_is_refused_when_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        _local_tensor = None

    module = types.ModuleType("torch.distributed.tensor")
    module.DTensor = Other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", module)
    with pytest.raises(TorchVersionError, match=r"DTensor\._spec"):
        torch_private.dtensor_class()
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    assert torch_private.dtensor_class() is None
