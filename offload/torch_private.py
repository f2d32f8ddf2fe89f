"""The private functions of torch that this library uses, all of them, under plain names.

They are looked up when `offload` is imported, so a torch that lacks one fails there with TorchVersionError and not in
the middle of a backward pass. Each one says which public function would replace it; where none is named, torch has no
public way to do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, reduce, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch

from offload import torch_2_11
from offload.errors import TorchVersionError

P = ParamSpec("P")
R = TypeVar("R")

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch that the test suite runs with."""

NAMES: list[tuple[str, str]] = []
"""All that is looked up: a module of torch, and the path to an object in it."""
_missing: list[str] = []


def _find(module: str, path: str, *, required: bool = True) -> Any:
    """The object at `path` in a module of torch; None if it is not there, which is noted if it is required."""
    NAMES.append((module, path))
    try:
        return reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError):
        if required:
            _missing.append(f"{module}.{path}")
        return None


# --- Calls that Python code outside must not see ---

PastSubclasses: Any = _find("torch._C", "DisableTorchFunctionSubclass")
"""Context manager: `__torch_function__` of tensor subclasses is not called. Torch documents it under that name.

Only for a plain `with`, which enters it and knows its exit in one instruction: between two an interrupt would leave it
entered for the rest of the thread. Where it is for a single call, or for a whole function, see `past_subclasses`.
"""
DisableTorchFunction: Any = _find("torch._C", "DisableTorchFunction")
"""Context manager: as above, and `TorchFunctionMode`s are off too."""
disabled_torch_function: Any = _find("torch._C", "_disabled_torch_function_impl")
"""The `__torch_function__` of a class that wants none: makes the call past all subclasses. Torch documents it under its
private name."""


def past_subclasses(call: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Calls `call(*args, **kwargs)` without calling any `__torch_function__` of tensor subclasses."""
    result: R = disabled_torch_function(call, (), args, kwargs)
    return result


def goes_past_subclasses(function: Callable[P, R]) -> Callable[P, R]:
    """Makes all calls of a function without calling any `__torch_function__` of tensor subclasses."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = disabled_torch_function(function, (), args, kwargs)
        return result

    return call


inference_mode: Any = _find("torch._C", "_InferenceMode")
"""Context manager: inference mode is on or off. What it was, and whether gradients are on, comes back at the end.
Public, but in Python, where an interrupt may come before its exit is known: `torch.inference_mode`."""
torch_function_modes: Any = _find("torch._C", "_len_torch_function_stack")
"""Number of active `TorchFunctionMode`s."""
dispatch_modes: Any = _find("torch._C", "_len_torch_dispatch_stack")
"""Number of active `TorchDispatchMode`s."""
DispatchMode: Any = _find("torch.utils._python_dispatch", "TorchDispatchMode")
"""Base class of contexts that see each operation of torch. Torch documents it under that name."""
without_dispatch_modes: Any = _find("torch.utils._python_dispatch", "_disable_current_modes")
"""Context manager: no `TorchDispatchMode` is active inside."""
functorch_level: Any = _find("torch._C._functorch", "peek_interpreter_stack")
"""The innermost running transform of torch.func (grad, vmap, ...), or None."""
without_functorch: Any = _find("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")
"""Context manager: no transform of torch.func is active inside."""
is_transformed: Any = _find("torch._C._functorch", "is_functorch_wrapped_tensor")
"""Whether a tensor is one that a transform of torch.func has made of another."""
untransformed: Any = _find("torch._C._functorch", "get_unwrapped")
"""That other tensor, which belongs to the next transform outside."""
tracing_state: Any = _find("torch._C", "_get_tracing_state")
"""The trace that torch.jit.trace is recording, or None. Public, for whether there is one: `torch.jit.is_tracing`."""
set_tracing_state: Any = _find("torch._C", "_set_tracing_state")
"""Makes another trace the one that is recorded; None: no trace."""

# --- torch.compile ---

set_frame_callback: Any = _find("torch._C._dynamo.eval_frame", "set_eval_frame")
"""Replaces what torch calls with each frame that this thread runs, to compile it, and returns the one before. None:
nothing is compiled. Public, for that: `torch.compiler.disable`."""
skip_frames: Any = _find("torch._dynamo.eval_frame", "skip_code")
"""Frames of a code object are not compiled; what they call is. Public, but refuses torch.export, and ends a graph where
it is traced: `torch.compiler.disable(recursive=False)`."""
_set_compiled_frames: Any = _find("torch._dynamo.eval_frame", "set_fullgraph_compiled_frame_count", required=False)
"""None in a torch that does not count them."""


def count_compiled_frame() -> None:
    """Counts the call that runs now as compiled. With `fullgraph=True` torch raises RuntimeError if none was."""
    if _set_compiled_frames is None:
        return
    count = _set_compiled_frames(-1)  # of the innermost call that is compiled so; -1: there is none
    _set_compiled_frames(count + 1 if count >= 0 else count)


# --- The autograd engine ---

graph_task_id: Any = _find("torch._C", "_current_graph_task_id")
"""Number of the backward pass that runs on this thread; -1: none."""
will_run_node: Any = _find("torch._C", "_will_engine_execute_node")
"""Whether the running backward pass gets to a node."""
queue_callback: Any = _find("torch.autograd", "Variable._execution_engine.queue_callback")
"""Calls a function when the running backward pass ends."""
saved_tensors_hooks: Any = _find("torch._C._autograd", "_top_saved_tensors_default_hooks")
"""The innermost pair of hooks for saved tensors on this thread, or None.

Its argument says whether to look while tracing, too.
"""
can_hook_saved_tensors: Any = _find("torch._C._autograd", "_saved_tensors_hooks_is_enabled")
"""False inside `torch.autograd.graph.disable_saved_tensors_hooks`."""
set_version_counters: Any = _find("torch._C._autograd", "_unsafe_set_version_counter")
"""Sets the versions of tensors, by which autograd notices that a saved tensor was changed.

It takes a tuple of tensors and a tuple of ints. Public, only upwards by one: `torch.autograd.graph.increment_version`.
"""

profiler_enabled: Any = _find("torch.autograd", "_profiler_enabled")
"""Whether a `torch.profiler.profile` records on this thread."""

# --- The memory of tensors ---

forbid_data_access: Any = _find("torch._C", "_set_storage_data_ptr_access_error_msg", required=False)
"""Makes reading a storage (given as `_cdata`) raise with a message; None where torch is built without CUDA."""
allow_data_access: Any = _find("torch._C", "_clear_storage_data_ptr_access_error_msg", required=False)
"""Undoes `forbid_data_access`; None where torch is built without CUDA."""
_has_fields = torch.__version__.startswith("2.11.") and torch_2_11.has_known_fields(forbid_data_access)
swap_memory: Any = _find("torch", "UntypedStorage._swap_data_ptr_", required=not _has_fields)
"""Exchanges the memory of two storages; the tensors on them stay. Public, but copies: `UntypedStorage.resize_`."""
if _has_fields:
    swap_memory = swap_memory or torch_2_11.exchange_memory
    allow_data_access = allow_data_access or torch_2_11.allow_data_access
if forbid_data_access is None or allow_data_access is None:
    # One without the other would forbid for good.
    forbid_data_access = allow_data_access = None
swap_implementations: Any = _find("torch._C", "_swap_tensor_impl")
"""Exchanges what two tensor objects are. Public, but exchanges their classes and attributes, too, and refuses weak
references: `torch.utils.swap_tensors`."""
uses: Any = _find("torch", "Tensor._use_count")
"""How many things below Python refer to a tensor: graphs, and views of it."""
storage_uses: Any = _find("torch._C", "_storage_Use_Count")
"""How many tensors and objects refer to a storage (given as `_cdata`)."""
throw_on_mutable_data_ptr: Any = _find("torch._C", "_set_throw_on_mutable_data_ptr")
"""Makes every write to a tensor's memory raise."""
to_dlpack: Any = _find("torch._C", "_to_dlpack")
"""A DLPack capsule of a tensor. Public: `torch.to_dlpack`, which goes through `__torch_function__`."""
from_dlpack: Any = _find("torch._C", "_from_dlpack")
"""A tensor from a DLPack capsule. Public: `torch.from_dlpack`, which goes through `__torch_function__`."""

# --- Functions that a stand-in of a gradient answers ---

OpOverload: Any = _find("torch._ops", "OpOverload")
"""Class of the functions that `__torch_dispatch__` gets. Their `_schema` says which arguments they write to."""
has_compatible_type: Any = _find("torch", "_has_compatible_shallow_copy_type")
"""Whether one tensor can become another by `p.data = x`."""
amp_unscale: Any = _find("torch", "_amp_foreach_non_finite_check_and_unscale_")
"""What `torch.amp.GradScaler.unscale_` calls with gradients."""
foreach_mul: Any = _find("torch", "_foreach_mul_")
"""What `torch.nn.utils.clip_grad_norm_` scales gradients with."""
foreach_div: Any = _find("torch", "_foreach_div_")
"""Its inverse."""
foreach_zero: Any = _find("torch", "_foreach_zero_")
"""What `Optimizer.zero_grad(set_to_none=False)` makes gradients zeros with."""
foreach_norm: Any = _find("torch", "_foreach_norm")
"""What `torch.nn.utils.get_total_norm` calls with gradients."""

# --- Functions that run in tiles ---

grouped_mm: Any = _find("torch", "_grouped_mm")
"""What `torch.nn.functional.grouped_mm` calls."""

# --- Optimizers ---

OPTIMIZER_HOOKS = tuple(
    f"_optimizer_{name}_hooks"
    for name in (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
)
"""Attributes of an optimizer: dicts of the hooks that its `register_..._hook` functions were given."""
_missing += [
    f"torch.optim.Optimizer.{name}" for name in OPTIMIZER_HOOKS if name not in torch.optim.Optimizer.__annotations__
]

# --- Trees and modules ---

tree_leaves: Any = _find("torch.utils._pytree", "tree_leaves")
"""The leaves of nested containers."""
tree_flatten: Any = _find("torch.utils._pytree", "tree_flatten")
"""The leaves of nested containers, and what they were in."""
tree_unflatten: Any = _find("torch.utils._pytree", "tree_unflatten")
"""Its inverse."""
tree_map_only: Any = _find("torch.utils._pytree", "tree_map_only")
"""Nested containers with the leaves of some types mapped."""
apply_to_module: Any = _find("torch.nn", "Module._apply")
"""What `to()`, `cpu()` and all others call that move or cast a module, with a function of a tensor."""
is_wrapper_subclass: Any = _find("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")
"""Whether a tensor is made of other tensors, as quantised weights are."""
NormBase: Any = _find("torch.nn.modules.batchnorm", "_NormBase")
"""Base class of the modules that keep running statistics. Public: its subclasses, one by one."""

parametrize: Any = import_module("torch.nn.utils.parametrize")
_find("torch.nn.utils.parametrize", "_cache_enabled")


def caches_parametrizations() -> bool:
    """Whether this runs inside `torch.nn.utils.parametrize.cached()`."""
    return bool(parametrize._cache_enabled)


for _attribute in ("Tensor._version", "Tensor._base", "Tensor._grad", "UntypedStorage._cdata"):
    _find("torch", _attribute)


def _require(missing: Sequence[str]) -> None:
    if missing:
        raise TorchVersionError(
            f"torch {torch.__version__} lacks {', '.join(missing)}: install a version that offload is tested with, "
            f"torch {TESTED[0]} to {TESTED[-1]}"
        )


_require(_missing)

# --- Process groups ---


def live_groups() -> int:
    """How many process groups this process has, by which new_group names a part of the world."""
    return len(import_module("torch.distributed.distributed_c10d")._world.pg_names)


def timeout_s(group: Any, device: torch.device) -> float | None:
    """The `timeout` that init_process_group or new_group got, in seconds, for collectives on `device`.

    It is None if the group's backend does not say. Nothing public does.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # it is written in Python, and torch does not know of it
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())


# --- Sharded tensors ---


def dtensor_class() -> Any:
    """torch.distributed.tensor.DTensor; None if nobody has imported it, since there is no DTensor then.

    It is not looked up at import, which would take every user half a second. `_local_tensor` is this rank's part, and
    `_spec` how all parts make the whole. Public, but `to_local` gives another tensor of the same memory each time, and
    nothing public changes the dtype of a DTensor in place.

    Raises:
        TorchVersionError: if it has no such attributes.
    """
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return None if dtensor is None else _checked(dtensor)


@cache
def _checked(dtensor: Any) -> Any:
    names = [name for name in ("_local_tensor", "_spec") if not hasattr(dtensor, name)]
    _require([f"torch.distributed.tensor.DTensor.{name}" for name in names])
    return dtensor
