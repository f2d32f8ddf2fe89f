"""Tensor parallelism beside ZeRO: parameters that torch's `parallelize_module` shards over one dimension of a mesh.

[Note: tensor parallelism]
A model may hold DTensors, each a `Shard` or a `Replicate` over one mesh of one dimension: the tensor-parallel ranks.
ZeRO partitions over other ranks, the data-parallel ones, which `process_group` gives. All of them together are as many
data-parallel groups as there are tensor-parallel ranks; each of these groups is a *slice*, and trains its own part of
the model: the *local* tensors of its DTensors, and whatever is no DTensor, which every slice has.

    mesh ("dp", "tp") of 2 x 3       tp 0   tp 1   tp 2
                            dp 0       0      1      2      one row: the parts of one model
                            dp 1       3      4      5
                                       one column: a slice, which shares states and gradients

So flat parameters, chunks and gradients hold local elements only, and no tensor-parallel rank needs another one's for a
step. Three things are of the whole model: norms and the check for NaN and Inf (each element counts once, so what every
slice has is counted by the first), what ranks have to agree on, and commits.

Gradients are brought to the placement of their parameter as torch's optimizers do it: a `Partial` one is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.ranks.communicator import Communicator


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor, or the tensor behind a guarded one, is a DTensor."""
    kind = torch_private.dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which is the very tensor in it; any other tensor itself."""
    local: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def shard_dim_of(param: Tensor) -> int | None:
    """The dimension along which ranks share a DTensor; None if each rank has all of it, or if it is another tensor."""
    if not is_dtensor(param) or param.device_mesh.size() == 1:  # type: ignore[attr-defined]
        return None
    placement: Any = param.placements[0]  # type: ignore[attr-defined]
    return int(placement.dim) if placement.is_shard() else None


def mesh_of(named: Iterable[tuple[str, nn.Parameter]]) -> Any:
    """The mesh over which a model's parameters are sharded; None if none of them is a DTensor.

    Args:
        named: the parameters, with their names.

    Raises:
        ConfigError: if a parameter, which it names, is sharded in a way that cannot be trained here.
    """
    common: Any = None
    first = ""
    for name, param in named:
        if not is_dtensor(param):
            continue
        mesh: Any = param.device_mesh  # type: ignore[attr-defined]
        placements: Any = param.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1:
            raise ConfigError(
                f"{name} is sharded over a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}: shard parameters "
                'over the tensor-parallel one alone, parallelize_module(model, mesh["tp"], ...), and leave the '
                "data-parallel ones to OffloadZero"
            )
        if common is not None and mesh != common:
            raise ConfigError(f"{name} is sharded over {mesh}, and {first} over {common}: shard all over one mesh")
        kinds = {"Shard", "Replicate"}
        if type(placements[0]).__name__ not in kinds:
            raise ConfigError(f"{name} has the placement {placements[0]}: only Shard and Replicate can be trained here")
        if param.is_meta:
            raise ConfigError(
                f"{name} is a DTensor on the meta device: give the model its values before, "
                "model.to_empty(device=...) and its own initialisation"
            )
        common, first = mesh, first or name
    return common


def repoint(param: Any, value: Tensor) -> None:
    """Points a tensor, or this rank's part of a DTensor, to the memory of `value`, and takes its dtype.

    Autograd does not see it.
    """
    if not is_dtensor(param):
        param.data = value
        return
    local = param._local_tensor
    local.data = value
    if param.dtype is not value.dtype:
        kind = torch_private.dtensor_class()
        made = _dtensor(param, local)
        torch_private.past_subclasses(kind.data.__set__, param, made)  # the dtype that torch's dispatcher sees
        param._spec = made._spec


@torch.no_grad()
def whole_like(param: Tensor, local: Tensor) -> Tensor:
    """Makes this rank's part into what `param` is: a DTensor; or the same tensor, if `param` is none."""
    return _dtensor(param, local) if is_dtensor(param) else local


def _dtensor(param: Any, local: Tensor) -> Any:
    return like_of(param)(local)


def like_of(tensor: Any) -> Callable[[Tensor], Any]:
    """A function that makes this rank's part into a DTensor like `tensor`, which may be gone when it is called."""
    with torch_private.PastSubclasses():
        shape, stride = tensor.shape, tensor.stride()
    mesh, placements, made = tensor.device_mesh, tensor.placements, torch_private.dtensor_class().from_local
    return partial(made, device_mesh=mesh, placements=placements, run_check=False, shape=shape, stride=stride)


@torch.no_grad()
def local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, with the shape and the placement of the parameter's own part."""
    if is_dtensor(grad):
        grad = grad.redistribute(placements=param.placements).to_local()  # type: ignore[attr-defined]
        wait = getattr(grad, "wait", None)  # it may be on its way
        return grad if wait is None else wait()
    return grad


def part_sizes(size: int, parts: int) -> list[int]:
    """How many elements of a dimension of `size` each of `parts` ranks has, cut as by torch.chunk."""
    step = -(-size // parts)
    return [min(max(size - step * part, 0), step) for part in range(parts)]


@torch.no_grad()
def whole_of(comm: Communicator, param: Tensor, local: Tensor) -> Tensor:
    """Gathers the whole of a parameter's values from all tensor-parallel ranks. Each of them has to call it.

    Args:
        comm: the data-parallel ranks; its `tensor_parallel` are asked.
        param: the parameter.
        local: this rank's part, on the CPU, in its shape.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    ranks, dim = comm.tensor_parallel, shard_dim_of(param)
    if dim is None or ranks.size == 1:
        return local
    with torch_private.PastSubclasses():
        shape = list(param.shape)
    sizes = part_sizes(shape[dim], ranks.size)
    row = local.numel() // sizes[ranks.rank] if sizes[ranks.rank] else 0
    line = torch.zeros(max(sizes) * _product(shape, dim), dtype=local.dtype, device="cpu")
    line[: row * sizes[ranks.rank]] = local.reshape(-1)
    rows = ranks.all_gather(line)
    parts = []
    for size, values in zip(sizes, rows, strict=True):
        shape[dim] = size
        parts.append(values[: size * _product(shape, dim)].view(shape))
    return torch.cat(parts, dim)


def _product(shape: list[int], without: int) -> int:
    """The number of elements in all dimensions but one."""
    product = 1
    for dimension, size in enumerate(shape):
        product *= 1 if dimension == without else size
    return product
