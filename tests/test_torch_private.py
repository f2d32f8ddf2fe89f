"""What a torch gets that lacks a private function of those we use."""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from typing import Any

import pytest
import torch

from offload import torch_private
from offload.errors import OffloadError, TorchVersionError
from tests.support.scripts import run_code

NAMES = [".".join(one) for one in torch_private.NAMES]
FORBID = "torch._C._set_storage_data_ptr_access_error_msg"
ALLOW = "torch._C._clear_storage_data_ptr_access_error_msg"
COUNT = "torch._dynamo.eval_frame.set_fullgraph_compiled_frame_count"
SWAP = "torch.UntypedStorage._swap_data_ptr_"
CAN_DO_WITHOUT = {FORBID, ALLOW, COUNT} | ({SWAP} if torch.__version__.startswith("2.11.") else set())

STREAMED = """
import hashlib, sys, tempfile
from importlib import import_module
from pathlib import Path
import torch

def refuse(*args):
    raise AssertionError("one of the two functions was called, without the other")

pair = ["_set_storage_data_ptr_access_error_msg", "_clear_storage_data_ptr_access_error_msg"]
for name in pair if any(name.endswith(tuple(pair)) for name in sys.argv[1:]) else []:
    if not hasattr(torch._C, name):
        setattr(torch._C, name, refuse)  # this build has neither
for name in sys.argv[1:]:
    module, _, name = name.rpartition(".")
    if hasattr(import_module(module), name):
        delattr(import_module(module), name)

from tests.support.streamed import Streams, train
from tests.support.toy import Net, squares

with tempfile.TemporaryDirectory() as folder:
    losses, values = Streams(Path(folder), {"tier": "cpu", "param_tier": "cpu"}).run(train(squares), Net)
digest = hashlib.sha256()
for name, value in values.items():
    assert not value.isnan().any(), name
    digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print(len(values), losses, digest.hexdigest())
"""


class Hiding:
    """A module, or an object in one, without what is at `path`."""

    def __init__(self, shown: Any, path: str) -> None:
        self._shown = shown
        self._first, _, self._rest = path.partition(".")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shown, name)
        if name != self._first:
            return found
        if not self._rest:
            raise AttributeError(name)
        return Hiding(found, self._rest)


def looked_up(monkeypatch: pytest.MonkeyPatch, hidden: str) -> dict[str, Any]:
    """What torch_private finds in a torch that lacks a name."""
    module, path = torch_private.NAMES[NAMES.index(hidden)]
    real = importlib.import_module

    def import_module(name: str) -> Any:
        return Hiding(real(name), path) if name == module else real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    return runpy.run_path(str(torch_private.__file__))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CAN_DO_WITHOUT])
def test_a_torch_that_lacks_a_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TorchVersionError, match=name.replace(".", r"\.")):
        looked_up(monkeypatch, name)


@pytest.mark.parametrize("name", sorted(CAN_DO_WITHOUT))
def test_names_that_it_can_do_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked_up(monkeypatch, name)
    assert found["swap_memory"] is not None
    assert (found["forbid_data_access"] is None) == (found["allow_data_access"] is None)
    found["count_compiled_frame"]()


@pytest.mark.parametrize("name", torch_private.OPTIMIZER_HOOKS)
def test_a_torch_whose_optimizers_lack_hooks_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(torch.optim.Optimizer.__annotations__, name)
    with pytest.raises(TorchVersionError, match=name):
        runpy.run_path(str(torch_private.__file__))


def streamed_without(*names: str) -> str:
    """What a process prints that trains with streamed parameters and a torch which lacks some names."""
    done = run_code(STREAMED, *names, imports_itself=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_without_them_has_the_same_bits() -> None:
    """A build for CPUs has no functions of access at all; then one that must not be called stands in for the other."""
    whole = streamed_without()
    assert int(whole.split()[0]) > 20
    for hidden in ((ALLOW,), (FORBID,), (ALLOW, FORBID), (COUNT,)):
        if hidden != (COUNT,) or torch_private._set_compiled_frames is not None:
            assert streamed_without(*hidden) == whole, hidden


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
