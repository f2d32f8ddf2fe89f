"""Between a model's layout and a manifest: what to write of a layout, and whether a commit fits a model."""

from __future__ import annotations

from collections.abc import Sequence

from offload.checkpoint.manifest import FlatFacts, Manifest, ParameterFacts
from offload.layout import Layout


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor from the outermost in memory to the innermost; None if that is their own order.

    Dimensions of one element, whose strides mean nothing, come first.
    """
    single = [dimension for dimension, size in enumerate(shape) if size == 1]
    several = [dimension for dimension, size in enumerate(shape) if size != 1]
    ordered = sorted(several, key=lambda dimension: -stride[dimension])
    return None if ordered == several else (*single, *ordered)


def parameters_of(
    layout: Layout, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], ages: Sequence[int]
) -> tuple[ParameterFacts, ...]:
    """The parameters of `layout` as a manifest has them. Args: shapes, strides, ages (steps taken): by parameter."""
    return tuple(
        ParameterFacts(
            name=spec.name,
            shape=tuple(shape),
            order=memory_order(shape, stride),
            unit=spec.unit,
            dtype=str(spec.dtype).removeprefix("torch."),
            group=spec.group,
            age=age,
        )
        for spec, shape, stride, age in zip(layout.specs, shapes, strides, ages, strict=True)
    )


def flats_of(layout: Layout, owned: Sequence[tuple[int, int]] | None = None) -> tuple[FlatFacts, ...]:
    """The flats of `layout`. Args: owned: the rank's stretch of each, in elements; None: all of it, on one rank."""
    stretches = [(0, flat.numel) for flat in layout.flats] if owned is None else owned
    return tuple(
        FlatFacts(flat.params, flat.offsets, flat.numel, stretch)
        for flat, stretch in zip(layout.flats, stretches, strict=True)
    )


def differences(committed: Manifest, wanted: Manifest) -> list[str]:
    """What keeps `committed` from being resumed as `wanted`, in words; empty if nothing does.

    Units, chunks, paths, ranks and hyper-parameters may differ: elements are found by their parameter's name.
    """
    found = []
    if committed.compute_dtype != wanted.compute_dtype:
        found.append(f"compute_dtype is {wanted.compute_dtype}, and {committed.compute_dtype} was committed")
    if len(committed.groups) != len(wanted.groups):
        found.append(f"there are {len(wanted.groups)} param groups, and {len(committed.groups)} were committed")
    for number, (group, before) in enumerate(zip(wanted.groups, committed.groups, strict=False)):
        is_adamw, was_adamw = (bool(of.get("decoupled_weight_decay")) for of in (group, before))
        if is_adamw != was_adamw:
            kinds = ("Adam", "AdamW")
            found.append(f"param group {number} is of {kinds[is_adamw]}, and one of {kinds[was_adamw]} was committed")
    old = {param.name: param for param in committed.parameters}
    new = {param.name: param for param in wanted.parameters}
    found += [f"{name} is in the model, and was not committed" for name in new if name not in old]
    found += [f"{name} was committed, and is not in the model" for name in old if name not in new]
    for name in new:
        if name in old:
            found += _param_differences(old[name], new[name])
    return found


def _param_differences(old: ParameterFacts, new: ParameterFacts) -> list[str]:
    pairs = [
        ("has the shape", new.shape, old.shape),
        ("is", new.dtype, old.dtype),
        ("has its dimensions in memory in the order", new.order, old.order),
        ("is in param group", new.group, old.group),
    ]
    return [f"{new.name} {what} {one}, and {other} was committed" for what, one, other in pairs if one != other]
