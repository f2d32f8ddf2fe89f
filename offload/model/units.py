"""Which parameters a model has, in which units, and whether this library can train them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from offload import torch_private
from offload.devices.copies import accelerator, finish_queue
from offload.errors import ConfigError
from offload.layout import ParamSpec, Rows
from offload.model.aliases import extent_of, overlaps_itself
from offload.model.inner import (
    Inner,
    inner_tensors,
    is_composite,
    kind_of,
    rows_between_cuts,
    shape_of,
    table_bytes,
)
from offload.model.loss import LossLinear
from offload.model.plain_copy import LeftBehind
from offload.ranks.tensor_parallel import is_dtensor, local_of, repoint, shard_dim_of

ROOT = ""
"""The name of the root unit."""

_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

USE_ALL: dict[str, Callable[[Any], Tensor]] = {
    "peft.tuners.lora.layer.ParamWrapper": lambda module: module.get_param(),  # adds adapters to it in each forward
}
"""Modules that use a parameter of another module as a whole, by the full names of their classes, and which one."""

Chosen = Sequence[type[nn.Module] | str] | None
KeepFp32 = Sequence[nn.Module | type[nn.Module]]
Groups = Sequence[Mapping[str, Any]]


def units_of(model: nn.Module, chosen: Chosen = None) -> dict[Tensor, str]:
    """The name of the unit of each parameter: "blocks.3", or "" for the root unit.

    A parameter belongs to its innermost unit. One that several units share, such as a tied head's, belongs to the root.

    Args:
        model: the model.
        chosen: the units, by name or class; None: the elements of each topmost ModuleList or Sequential in which two or
            more elements have parameters.

    Raises:
        ConfigError: if something in `chosen`, which it names, is not in the model.
    """
    names = {name for name, _ in blocks_of(model, chosen)}
    units: dict[nn.Module, set[str]] = {}
    left = [(ROOT, model, ROOT)]
    while left:
        name, module, outer = left.pop()
        unit = name if name in names else outer
        if unit not in units.setdefault(module, set()):
            units[module].add(unit)
            left += ((_join(name, key), child, unit) for key, child in module.named_children())
    holders: dict[Tensor, set[str]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            holders.setdefault(param, set()).update(units[module])
    return {param: owners.pop() if len(owners) == 1 else ROOT for param, owners in holders.items()}


def blocks_of(model: nn.Module, chosen: Chosen = None) -> list[tuple[str, nn.Module]]:
    """The name and the module of each unit but the root; see `units_of`."""
    return list(_blocks(model, ROOT)) if chosen is None else _chosen(model, chosen)


def encloses(outer: str, unit: str) -> bool:
    """Whether the unit `unit` is `outer` or lies in it, by their names. All units lie in the root."""
    return outer in (ROOT, unit) or unit.startswith(f"{outer}.")


def _chosen(model: nn.Module, chosen: Sequence[type[nn.Module] | str]) -> list[tuple[str, nn.Module]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for one in chosen:
        if isinstance(one, str) and (one == ROOT or one not in modules):
            near = get_close_matches(one, modules, 1)
            hint = f"did you mean {near[0]!r}?" if near else "give names as model.named_modules() has them"
            raise ConfigError(f"Tuning.units names {one!r}, which is no module of the model; {hint}")
        if not isinstance(one, str) and not any(isinstance(module, one) for module in modules.values()):
            raise ConfigError(f"Tuning.units names {one.__name__}, and the model has no module of that class")
    names = {one for one in chosen if isinstance(one, str)}
    types = tuple(one for one in chosen if isinstance(one, type))
    return [
        (name, module)
        for name, module in modules.items()
        if module is not model and (name in names or isinstance(module, types))
    ]


def rows_of(
    model: nn.Module, specs: Sequence[ParamSpec], inners: Sequence[Inner]
) -> tuple[dict[int, Rows], dict[int, str]]:
    """Where weights can be cut into tiles.

    One can be tiled if it is the weight of nn.Linear and nn.Embedding, which may share it, or if it has three
    dimensions and is a parameter of one module that is none of torch's own: those use theirs as a whole. So do the
    classes in USE_ALL. All inner tensors of a weight are cut at the same places.

    Args:
        model: the model.
        specs: of its inner tensors that the layout has.
        inners: these, in the same order.

    Returns:
        The weights that can be tiled, by the number of the first inner tensor. Of each inner tensor of quantised
        weights of three dimensions that cannot be tiled, by its number, why.
    """
    always_whole = _used_as_whole(model)
    holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                holders.setdefault(param, []).append((module, name))
    parts: dict[nn.Parameter, list[int]] = {}
    for number, one in enumerate(inners):
        parts.setdefault(one.param, []).append(number)
    rows: dict[int, Rows] = {}
    whole: dict[int, str] = {}
    for param, numbers in parts.items():
        used_by, shape = holders[param], shape_of(param)
        if len(shape) == 3:
            is_of_rows = len(used_by) == 1 and not type(used_by[0][0]).__module__.startswith("torch.")
        else:
            is_of_rows = len(shape) == 2 and all(name == "weight" and _uses_rows(module) for module, name in used_by)
        if not is_of_rows or is_dtensor(param) or param in always_whole:
            continue
        own = [inners[number] for number in numbers]
        together, why = rows_between_cuts(param, own)
        name = specs[numbers[0]].name
        name = name.removesuffix(f".{own[0].key}") if own[0].key else name
        if together:
            numels = {number: together * inners[number].tensor.numel() // shape[0] for number in numbers}
            rows[numbers[0]] = Rows(name, numels)
        elif len(shape) == 3 and own[0].is_part:
            whole |= dict.fromkeys(numbers, f"{name} is a {kind_of(param).__name__}, and {why}")
    return rows, whole


def _used_as_whole(model: nn.Module) -> set[Tensor]:
    """The parameters that modules of classes in USE_ALL use."""
    found = set()
    for module in model.modules():
        for base in type(module).__mro__:
            if use := USE_ALL.get(f"{base.__module__}.{base.__qualname__}"):
                found.add(use(module))
    return found


def _uses_rows(module: nn.Module) -> bool:
    """Whether a module of torch's uses its weight row by row. With `max_norm` an nn.Embedding writes to all of it."""
    return type(module) in (nn.Linear, LossLinear) or (type(module) is nn.Embedding and module.max_norm is None)


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward. A list of modules has none, since its owner calls the elements."""
    return type(module).forward is not nn.Module.forward


def _blocks(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(_join(name, key), child) for key, child in module.named_children()]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        filled = [(path, child) for path, child in children if any(True for _ in child.parameters())]
        if len(filled) > 1:
            yield from filled
            return
    for path, child in children:
        yield from _blocks(child, path)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def fp32_modules(model: nn.Module, keep_fp32: KeepFp32) -> list[nn.Module]:
    """The outermost modules that stay in fp32.

    These are the modules that `keep_fp32` names, by instance or type, and those with running statistics.

    Raises:
        ConfigError: if `keep_fp32` names a module that is not in the model.
    """
    types = tuple(one for one in keep_fp32 if isinstance(one, type))
    chosen = {one for one in keep_fp32 if isinstance(one, nn.Module)}
    kept = [m for m in model.modules() if m in chosen or isinstance(m, types) or has_statistics(m)]
    for one in keep_fp32:
        if not any(module is one or (isinstance(one, type) and isinstance(module, one)) for module in kept):
            raise ConfigError(
                f"keep_fp32 names {one!r}, which is not in the model: give modules of this model, or classes of them"
            )
    below = {inner for module in kept for inner in module.modules() if inner is not module}
    return [module for module in kept if module not in below]


def has_statistics(module: nn.Module) -> bool:
    """Whether a module's forward writes to floating buffers that it also reads, as batch norm and spectral norm do."""
    if isinstance(module, torch_private.NormBase):
        return module.running_mean is not None
    if isinstance(module, ParametrizationList):
        return any(buffer.is_floating_point() for buffer in module.buffers())
    return any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())


def compute_dtypes(model: nn.Module, keep_fp32: KeepFp32, dtype: torch.dtype) -> dict[Tensor, torch.dtype]:
    """The dtype of each floating parameter's compute copy.

    A frozen parameter beside quantised weights keeps its own dtype, because it is a scale or a zero point of theirs.

    Raises:
        ConfigError: if a module that stays in fp32 shares a parameter with one that does not.
    """
    in_fp32 = {inner for module in fp32_modules(model, keep_fp32) for inner in module.modules()}
    dtypes: dict[Tensor, torch.dtype] = {param: param.dtype for param in _of_quantised(model)}
    kept = set(dtypes)
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            if param in kept:
                continue
            this = torch.float32 if module in in_fp32 else dtype
            if dtypes.setdefault(param, this) is not this:
                raise ConfigError(
                    f"{name}.{key} is shared by a module that stays in fp32 and one that does not: "
                    "name both in keep_fp32"
                )
    return dtypes


def specs_of(
    model: nn.Module,
    groups: Groups,
    keep_fp32: KeepFp32,
    dtype: torch.dtype,
    *,
    chosen: Chosen = None,
    planned: bool = False,
) -> tuple[list[ParamSpec], list[Inner]]:
    """The inner tensors of the parameters that the optimizer's `groups` train, then of those that need no gradient.

    Both are in the model's order. A parameter that needs a gradient and is in no group is left out, and so are tables.

    Args:
        model: the model.
        groups: the optimizer's param_groups.
        keep_fp32: the modules that stay in fp32.
        dtype: the compute dtype.
        chosen: the units, see `units_of`.
        planned: whether the model may be on the meta device, without memory.

    Raises:
        ConfigError: if a parameter, which it names, cannot be trained.
    """
    _refuse_wrapped(model)
    names = {param: name for name, param in model.named_parameters()}
    group_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param not in names:
                shape = tuple(param.shape)
                raise ConfigError(
                    f"param group {number} holds a parameter of shape {shape} that is not in the model: give "
                    "the optimizer only parameters of this model"
                )
    _refuse_untrainable(model, names, group_of, ("meta", *_device_types()) if planned else _device_types())
    units = units_of(model, chosen)
    dtypes = compute_dtypes(model, keep_fp32, dtype)
    trained = [param for param in names if param in group_of and param.requires_grad]
    inners = inner_tensors(names)
    moved = set(trained)
    _refuse_overlaps((one.tensor, one.name_in(names[one.param]), one.param in moved) for one in inners)
    if not trained:
        raise ConfigError("the optimizer trains no parameter of the model: give it model.parameters()")
    taken = [one for one in inners if not one.is_table and (one.param in group_of or not one.param.requires_grad)]
    taken.sort(key=lambda one: not one.param.requires_grad)
    specs = [
        ParamSpec(
            one.name_in(names[one.param]),
            one.tensor.numel(),
            units[one.param],
            dtypes[one.param] if one.param.requires_grad else dtype_of(one, dtypes[one.param]),
            group_of[one.param] if one.param.requires_grad else None,
            shard_dim=shard_dim_of(one.param),
        )
        for one in taken
    ]
    return specs, taken


def require_streamable(specs: Sequence[ParamSpec], inners: Sequence[Inner]) -> None:
    """Requires that inner tensors of frozen parameters can stream.

    Raises:
        ConfigError: naming the first one that is sparse, or an inference tensor.
    """
    for spec, one in zip(specs, inners, strict=True):
        if one.tensor.layout is not torch.strided:
            raise ConfigError(
                f"{spec.name} is a {type(one.tensor).__name__} ({one.tensor.layout}), of which more than its own bytes "
                'would have to stream: give param_tier="device", so that frozen parameters stay there'
            )
        if one.tensor.is_inference():
            raise ConfigError(
                f"{spec.name} is an inference tensor, which torch does not let change: build the model outside of "
                'inference_mode, or give param_tier="device", so that frozen parameters stay where they are'
            )
    _refuse_overlaps((one.tensor, spec.name, True) for spec, one in zip(specs, inners, strict=True))


def require_movable(moved: Mapping[Tensor, str]) -> None:
    """Requires that parameters can get other memory.

    Args:
        moved: the parameters, or inner tensors of them, and their names.

    Raises:
        ConfigError: naming the first one that cannot.
    """
    for param, name in moved.items():
        local = local_of(param)
        if local.is_quantized or local.is_mkldnn:
            raise ConfigError(
                f"{name} is a {'quantised' if local.is_quantized else 'mkldnn'} tensor, which cannot be cast, moved or "
                "streamed: give OffloadZero a model in plain floating point, or leave it where it is in its own dtype"
            )
        if local.layout is torch.strided and not local.is_meta and overlaps_itself(local):
            raise ConfigError(
                f"{name} has elements that share memory, as those of an expanded tensor do, and would be taken apart: "
                "make a Parameter of what is there once, and expand it in the forward"
            )


def require_on_mesh(device: torch.device, specs: Sequence[ParamSpec], inners: Sequence[Inner]) -> None:
    """Requires that DTensors stay on the device of their mesh.

    Raises:
        ConfigError: naming the first one that would leave it.
    """
    for spec, one in zip(specs, inners, strict=True):
        if is_dtensor(one.param) and one.param.device != device:
            raise ConfigError(
                f"{spec.name} is a DTensor on {one.param.device}, and device={device}: leave device out, and shard the "
                "model over a mesh of the devices to train on"
            )


class NotToWrap(LeftBehind):
    """An attribute of a held model that raises ConfigError when DistributedDataParallel reads it.

    DistributedDataParallel reads it first of all, for the names of parameters to ignore. A copy of the model may be
    wrapped, so a copy of this is an empty tuple.

    Args:
        instead: what the model had there; None: nothing.
    """

    NAME = "_ddp_params_and_buffers_to_ignore"

    def __init__(self, instead: Any) -> None:
        self.instead = instead

    def __iter__(self) -> NoReturn:
        raise _wrapped_by_ddp()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tuple, ()


def _wrapped_by_ddp() -> ConfigError:
    return ConfigError(
        "a held model was wrapped by DistributedDataParallel, and both would average its gradients: leave out "
        "DistributedDataParallel(model), OffloadZero averages over the process group itself. Where a framework wraps, "
        "give Trainer callbacks=[offload.integrations.transformers.Offload(optimizer)], call "
        "offload.integrations.accelerate.register(accelerator, model, optimizer) before accelerator.prepare, or give "
        "Lightning strategy=offload.integrations.lightning.OffloadStrategy()"
    )


def require_unwrapped(model: nn.Module) -> None:
    """Requires that a held model was not wrapped by a framework that shares out its gradients or parameters.

    Raises:
        ConfigError: if it runs inside DistributedDataParallel, or was given to FSDP.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and wrapper.require_backward_grad_sync and _holds(wrapper, model):
        raise _wrapped_by_ddp()
    if any(cls.__name__ == "FSDPModule" for cls in type(model).__mro__):
        raise ConfigError(
            "the model was given to fully_shard() after OffloadZero took it: leave that out, stage=3 shards parameters"
        )


def _holds(wrapper: nn.Module, model: nn.Module) -> bool:
    return any(module is model for module in wrapper.modules())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in a DistributedDataParallel; any other model itself."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def stop_reducing(model: nn.Module, undo: ExitStack) -> None:
    """Makes a DistributedDataParallel, whose model is held, reduce no gradients until `undo` is closed."""
    if isinstance(model, DistributedDataParallel):
        undo.callback(setattr, model, "require_backward_grad_sync", model.require_backward_grad_sync)
        model.require_backward_grad_sync = False


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        wrapper = _WRAPPERS.intersection(cls.__name__ for cls in type(module).__mro__)
        if wrapper:
            raise ConfigError(f"{name or 'the model'} is wrapped by {min(wrapper)}: give the model itself")
        if not isinstance(module._parameters, dict):  # compressed-tensors' dispatch
            raise ConfigError(
                f"{name or 'the model'} has its parameters in a {type(module._parameters).__name__} of another library "
                "that offloads: have that give them back, as compressed_tensors.offload.remove_dispatch(model) does"
            )
    devices = getattr(model, "hf_device_map", None)
    if devices and len(set(devices.values())) > 1:
        raise ConfigError(f"the model is spread by a device map over {set(devices.values())}: load it on one device")
    if hasattr(model, "ct_decompress_hook"):
        raise ConfigError(
            "compressed-tensors is going to unpack the model's weights at its first forward, into other parameters: "
            "unpack them before, with ModelCompressor.decompress_model or "
            "CompressedTensorsConfig(run_compressed=False)"
        )


def _refuse_overlaps(tensors: Iterable[tuple[Tensor, str, bool]]) -> None:
    """Refuses two Parameters over one memory (`b.weight.data = a.weight.data`): moving one would separate them.

    Args:
        tensors: each with its name, and whether it is moved.
    """
    with torch_private.PastSubclasses():
        strided = [one for one in tensors if one[0].numel() and not one[0].is_meta and one[0].layout is torch.strided]
        spans = sorted((p.data_ptr(), extent_of(p) * p.element_size(), name, moves) for p, name, moves in strided)
    for (start, size, name, moves), (following, _, other, also) in pairwise(spans):
        if following < start + size and (moves or also):
            raise ConfigError(f"{name} and {other} share memory: tie them as one Parameter, b.weight = a.weight")


def _device_types() -> tuple[str, ...]:
    """The types of device on which a model can be trained."""
    device = accelerator()
    return ("cpu",) if device is None else ("cpu", device.type)


def _refuse_untrainable(
    model: nn.Module, names: Mapping[nn.Parameter, str], trained: Container[nn.Parameter], allowed: Container[str]
) -> None:
    # Parameters on the meta device get their values on the CPU, where others may have theirs already.
    devices = {torch.device("cpu") if param.is_meta else param.device for param in names}
    for param, name in names.items():
        if param.device.type not in allowed:
            raise ConfigError(f"{name} is on {param.device}: models are trained on {' or '.join(_device_types())} here")
        if len(devices) > 1:
            raise ConfigError(f"{name} is on {param.device}, others are on {devices - {param.device}}: use one device")
        if nn.parameter.is_lazy(param):
            raise ConfigError(f"{name} has no shape yet: run one forward before OffloadZero takes the model")
        is_trained = param in trained and param.requires_grad
        kind = _unusual(param, is_trained=is_trained)
        if kind is not None:
            raise ConfigError(f"{name} is {kind}: only plain dense parameters can be trained here, so make it one")
        if is_trained and is_composite(param):
            keys = ", ".join(one.key for one in inner_tensors([param]) if one.key)
            raise ConfigError(
                f"{name} is a {type(param).__name__}, which is made of {keys}: such parameters are not trained here. "
                "Freeze it (requires_grad_(False)) and train an adapter beside it (LoRA), or give the model before it "
                "was quantised"
            )
        if is_trained and param.dtype not in _DTYPES:
            raise ConfigError(f"{name} has dtype {param.dtype}: only float32, bfloat16 and float16 have an fp32 master")
        if param.grad is not None:
            raise ConfigError(f"{name} already has a gradient: call model.zero_grad() before OffloadZero(model, ...)")
    for name, buffer in model.named_buffers():
        if nn.parameter.is_lazy(buffer):
            raise ConfigError(f"{name} has no shape yet: run one forward before OffloadZero takes the model")
    for name, module in model.named_modules():
        if type(module).__name__ == "Mxfp4GptOssExperts":  # its weights are in tensors of Triton, and no parameters
            raise ConfigError(
                f"{name} has weights in MXFP4, through which transformers does not train: load the model with "
                "quantization_config=Mxfp4Config(dequantize=True)"
            )
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ConfigError(f"{name} makes sparse gradients: set sparse=False")


def _unusual(param: nn.Parameter, *, is_trained: bool) -> str | None:
    """What a parameter is that cannot be in a model to train; None if it can."""
    if param.is_nested or param.layout is torch.jagged:
        return "a nested tensor"
    if is_trained and param.layout is not torch.strided:
        return f"a tensor of layout {param.layout}"
    if is_trained and param.is_inference():
        return "an inference tensor, which torch does not train"
    return None


def move_param(one: Inner, device: torch.device, dtype: torch.dtype) -> None:
    """Moves and casts an inner tensor of a parameter that is not held."""
    moved = one.tensor.data.to(device, dtype)
    finish_queue(device)
    repoint(one.used, moved)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves all buffers, as `model.to(device)` does. Those that modules share stay shared."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


def _of_quantised(model: nn.Module) -> Iterator[nn.Parameter]:
    """The frozen parameters of modules that own a quantised one."""
    for module in model.modules():
        frozen = [param for param in module.parameters(recurse=False) if not param.requires_grad]
        if any(map(_is_quantised, frozen)):
            yield from frozen


def _is_quantised(param: Tensor) -> bool:
    """Whether a parameter has integers, or floating-point values of 8 bits."""
    return not param.is_floating_point() or param.element_size() == 1


def dtype_of(one: Inner, dtype: torch.dtype) -> torch.dtype:
    """The dtype that an inner tensor has on the device.

    It is `dtype`, the compute dtype, but quantised weights, and what they are made of, keep their own.
    """
    return one.tensor.dtype if one.is_part or _is_quantised(one.tensor) else dtype


def untrained_bytes(model: nn.Module, counted: Iterable[Inner], dtypes: Mapping[Tensor, torch.dtype]) -> int:
    """How many bytes tables, buffers, and parameters none of which are `counted`, take on the device."""
    inners = inner_tensors(model.parameters())
    known = {one.param for one in counted}
    left = [one for one in inners if one.param not in known and not one.is_table]
    of_params = sum(one.tensor.numel() * dtype_of(one, dtypes[one.param]).itemsize for one in left)
    of_buffers = sum(buffer.numel() * buffer.element_size() for buffer in set(model.buffers()))
    return of_params + table_bytes(inners) + of_buffers


def unquantised(model: nn.Module, dtypes: Mapping[Tensor, torch.dtype]) -> tuple[int, list[str]]:
    """What was left out where a frozen base was quantised: its matrices, and larger tensors, in 16 or 32 bits.

    Args:
        model: the model.
        dtypes: what it computes with; see `compute_dtypes`.

    Returns:
        The bytes that they take, and their names, the largest first; nothing if no matrix is quantised.
    """
    names = {param: name for name, param in model.named_parameters() if not param.requires_grad}
    inners = inner_tensors(names)
    if not any(one.is_part or (_is_quantised(one.tensor) and one.tensor.dim() > 1) for one in inners):
        return 0, []
    left = [one for one in inners if not one.is_part and one.tensor.dim() > 1 and not _is_quantised(one.tensor)]
    beside = set(_of_quantised(model))  # scales
    left = sorted((one for one in left if one.param not in beside), key=lambda one: -one.tensor.numel())
    nbytes = sum(one.tensor.numel() * dtypes[one.param].itemsize for one in left)
    return nbytes, [names[one.param] for one in left]


def bytes_on(model: nn.Module, device: torch.device) -> int:
    """How many bytes of a model's parameters and buffers are on a device now."""
    inners = inner_tensors(model.parameters())
    tensors = [*(one.tensor for one in inners if not one.is_table), *model.buffers()]
    here = (tensor for tensor in tensors if tensor.device == device)
    return sum(tensor.numel() * tensor.element_size() for tensor in here) + table_bytes(inners)


def device_for(given: torch.device | str | None, model_device: torch.device) -> torch.device:
    """The device to train on.

    It is the model's own. A model on the CPU or the meta device goes where the user asks.

    Args:
        given: what the user asks for.
        model_device: the device that the model is on.

    Raises:
        ConfigError: if nothing is trained there, or the model is on another accelerator.
    """
    try:
        wanted = model_device if given is None else torch.empty(0, device=given).device
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"device={given!r} is no device of this machine ({reason}): leave it out, or give {model_device}"
        ) from error
    if wanted.type == model_device.type == "meta":
        return torch.device("cpu")
    if wanted.type == model_device.type == "cpu":  # "cpu:0" is "cpu"
        return model_device
    if wanted != model_device and (model_device.type not in ("cpu", "meta") or wanted.type not in _device_types()):
        raise ConfigError(
            f"device={given} but the model is on {model_device}: leave device out to train it there, or move it to the "
            f"CPU, from where it can go to {' or '.join(_device_types())}"
        )
    return wanted
