"""Models built on the meta device: their values are made module by module, and go straight to their tiers.

The whole model is never in memory. Values come from safetensors files, from a function of name and tensor, or from the
modules' own `reset_parameters()`, called in the order of `model.modules()`. The latter gives the values of a model that
was built as usual, if its constructors draw random numbers in that order and nowhere else.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from offload.errors import ConfigError

Init = Callable[[str, Tensor], None] | str | os.PathLike[str] | None


class Source(ABC):
    """Where the values of a module's own parameters and buffers come from."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raises: ConfigError if a value is missing. Called before anything is allocated."""

    @abstractmethod
    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        """Writes values into `fresh`, the module's own tensors by name. Args: prefix: of their names in the model."""


class ResetParameters(Source):
    def check(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if _meta_tensors(module) and not callable(getattr(module, "reset_parameters", None)):
                raise ConfigError(
                    f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters(): give OffloadZero(init=...) a function of name and tensor, or safetensors"
                )

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        module.reset_parameters()  # type: ignore[operator]


class FromFunction(Source):
    """`function(name, tensor)` fills the tensor in place; called once for each name, in the model's order."""

    def __init__(self, function: Callable[[str, Tensor], None]) -> None:
        self._function = function

    def check(self, model: nn.Module) -> None:
        return None

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        for name, tensor in fresh.items():
            self._function(prefix + name, tensor)


class FromSafetensors(Source):
    """One file, or the index of several. Reads one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Path] = {}
        self._names: dict[str, str] = {}
        try:
            if path.suffix == ".json":
                weights = json.loads(path.read_text())["weight_map"]
                # A file cannot name a path outside of its folder.
                self._files = {str(name): path.parent / Path(str(file)).name for name, file in weights.items()}
            else:
                with safe_open(path, "pt") as file:
                    self._files = dict.fromkeys(file.keys(), path)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise ConfigError(f"init={str(path)!r} is no safetensors file, nor the index of some: {error}") from error

    def check(self, model: nn.Module) -> None:
        names: dict[Tensor, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        for prefix, module in model.named_modules():
            for name, tensor in _meta_tensors(module).items():
                full = _join(prefix) + name
                if name in module._non_persistent_buffers_set:
                    raise ConfigError(
                        f"{full} is a buffer on the meta device that no file holds: "
                        'build it under torch.device("cpu"), or give init a function'
                    )
                # A tied parameter is in the files only once.
                found = next((other for other in [full, *names.get(tensor, ())] if other in self._files), None)
                if found is None:
                    raise ConfigError(f"init holds no values for {full}: give the files of this model")
                self._names[full] = found

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        for name, tensor in fresh.items():
            found = self._names[prefix + name]
            with safe_open(self._files[found], "pt") as file:
                values = file.get_tensor(found)
            if values.shape != tensor.shape:
                raise ConfigError(
                    f"{prefix}{name} has shape {tuple(tensor.shape)}, in {self._files[found]} {tuple(values.shape)}"
                )
            tensor.copy_(values)


def source_of(init: Any) -> Source:
    """Raises: ConfigError."""
    if init is None:
        return ResetParameters()
    if isinstance(init, str | os.PathLike):
        return FromSafetensors(Path(init))
    if callable(init):
        return FromFunction(init)
    raise ConfigError(f"init={init!r}: give a function of name and tensor, a safetensors file or the index of some")


def is_meta(model: nn.Module) -> bool:
    """Whether any of the model is on the meta device."""
    return any(_meta_tensors(module) for module in model.modules())


@torch.no_grad()
def materialise(model: nn.Module, source: Source) -> Iterator[None]:
    """Gives one module after the other memory on the CPU and values; parameters keep their identity."""
    for prefix, module in model.named_modules():
        fresh: dict[str, Tensor] = {}
        for name, tensor in _meta_tensors(module).items():
            memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, nn.Parameter(memory, tensor.requires_grad))
                fresh[name] = tensor
            else:
                module._buffers[name] = fresh[name] = memory
        if fresh:
            source.fill(_join(prefix), module, fresh)
            yield


def _meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own tensors on the meta device, by name."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: tensor for name, tensor in own if tensor.is_meta}


def _join(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
