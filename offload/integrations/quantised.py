"""Bases that are quantised while they are loaded: the base is never whole in RAM, in 16 bits or quantised.

A quantiser is called twice. On the meta device it says which tensors there will be, so that all is planned before a
value exists. Then, module by module, it gets the module with its values, and what it makes of it goes to its tier.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.model.inner import inner_tensors
from offload.model.meta_init import FromSafetensors, Init, Kept, PartOfModel, Parts, meta_tensors, source_of


class Quantised(PartOfModel):
    """Quantises a model on the meta device, and gives it its values while OffloadZero takes it, module by module.

        with torch.device("meta"):
            model = Model()
        init = Quantised("DIR", partial(quantize_, config=Int8WeightOnlyConfig()), model)  # torchao's
        model = adapted(model)
        optimizer = OffloadZero(model, adamw, init=init, param_tier="nvme", path="./run")

    At most one module's values are there in the dtype of the files, beside what is made of them.

    Args:
        init: where the values come from before they are quantised, as OffloadZero's `init`.
        quantise: called with a model, in which it quantises modules in place, or replaces them. First with the whole
            model, on the meta device; then with a model that has one module with values, under the name that it has in
            the whole model.
        model: the model, on the meta device. It is quantised when this returns, and may then become a part of another
            one.
        settings: text that names the quantiser, its settings and the version of its library. With it, a base that
            streams from NVMe is kept in a file of its own, and used by every run of the same values and settings.
        base: the directory of that file; None: the run's first one.

    Raises:
        ConfigError: if `init` has no values for the model, or `quantise` added some that it cannot give values.
    """

    def __init__(
        self,
        init: Init,
        quantise: Callable[[nn.Module], object],
        model: nn.Module,
        *,
        settings: str | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        source = source_of(init)
        super().__init__(source, model)
        self._quantise = quantise
        shells = {name: _shell(module) for name, module in model.named_modules() if meta_tensors(module)}
        quantise(model)
        self._shells: dict[nn.Module, tuple[str, nn.Module]] = {}
        for name, module in model.named_modules():
            if any(tensor not in _own(shells.get(name)) for tensor in meta_tensors(module).values()):
                if name not in shells:
                    raise ConfigError(f"{name or 'the model'} was added by the quantiser, and nothing has its values")
                self._shells[module] = name, _with_memory(shells[name], "meta")
        self._know(model)
        self._kept = None
        if settings is not None and isinstance(source, FromSafetensors):
            self._kept = kept_as(source, settings, base, model)
        elif base is not None or settings is not None:
            raise ConfigError(
                f"base={base!r}, settings={settings!r}: a base is kept if its values come from files, init=DIR, and "
                "settings names its quantiser"
            )
        self._made: tuple[nn.Module, nn.Module] | None = None

    def parts(self, prefix: str, module: nn.Module, names: Collection[str]) -> Sequence[Collection[str]]:
        return [names] if module in self._shells else super().parts(prefix, module, names)

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        if module not in self._shells:
            super().fill(prefix, module, fresh)
            return
        made = self._quantised(module)
        for name, tensor in fresh.items():
            tensor.copy_(_tensor_of(made, name, prefix))

    def make(self, prefix: str, module: nn.Module, names: Collection[str]) -> Mapping[str, Parts]:
        made = self._quantised(module)
        self._made = None
        return {name: parts_of(_tensor_of(made, name, prefix)) for name in names}

    def _quantised(self, module: nn.Module) -> nn.Module:
        """What the quantiser makes of a module with values."""
        if self._made is None or self._made[0] is not module:
            self._made = None  # the last one goes before the next one is there
            name, shell = self._shells[module]
            plain = _with_memory(shell, "cpu")
            fresh = {own: _tensor_of(plain, own, name) for own in meta_tensors(shell)}
            self._source.fill(f"{name}." if name else "", plain, fresh)
            root = _at_name(name, plain)
            self._quantise(root)
            self._made = module, root.get_submodule(name)
        return self._made[1]

    def kept(self) -> Kept | None:
        return self._kept


def parameters_of_buffers(model: nn.Module) -> int:
    """Makes frozen parameters of the buffers in which layers of GPTQ and AWQ keep their weights, so that these stream.

    OffloadZero leaves buffers where they are. A layer that owns a matrix of integers as a buffer, and no weight, gets
    parameters of all of its saved buffers: packed codes, zeros, scales, the order of columns, the bias. They have the
    same memory, dtypes and names, so the layer computes as before, and `state_dict()` has the same keys. Call it before
    adapters are added.

    Args:
        model: the model, not held yet. It is changed in place.

    Returns:
        How many buffers became parameters.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        is_packed = any(buffer.dim() == 2 and _is_integer(buffer) for buffer in own.values())
        if not is_packed or module._parameters.get("weight") is not None:
            continue
        for name, buffer in own.items():
            if name not in module._non_persistent_buffers_set:
                if buffer not in made:
                    made[buffer] = nn.Parameter(buffer, requires_grad=False)
                del module._buffers[name]
                module._parameters[name] = made[buffer]
    return len(made)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def kept_as(source: FromSafetensors, settings: str, base: str | os.PathLike[str] | None, model: nn.Module) -> Kept:
    """How the base of a quantised model is kept.

    Args:
        source: of the values before they are quantised.
        settings: all else that the quantised values come from.
        base: see `Quantised`.
        model: the quantised model, on the meta device.
    """
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters() if source.gives(name)}
    told = f"{settings}; torch {torch.__version__}"

    def key(meanwhile: Callable[[], None]) -> str:
        return str(xxhash.xxh3_128_hexdigest(f"{source.digest(meanwhile)}; {told}".encode()))

    return Kept(key, None if base is None else Path(base).absolute(), names, told)


def parts_of(tensor: Any) -> Parts:
    """The inner tensors of a quantised tensor, by key, without those who use them."""
    return {one.key: one.tensor.detach() for one in inner_tensors([tensor])}


def skeleton(model: nn.Module) -> nn.Module:
    """A model of the same modules, by name, that has the same tensors as long as nobody gives either of them others."""
    made: dict[nn.Module, nn.Module] = {module: _shell(module) for module in model.modules()}
    for module, shell in made.items():
        shell._modules.update({name: child and made[child] for name, child in module._modules.items()})
    return made[model]


def _shell(module: nn.Module) -> nn.Module:
    """A module with the tensors of another one, and without its children."""
    made = copy.copy(module)
    vars(made).update(_parameters=dict(module._parameters), _buffers=dict(module._buffers), _modules={})
    return made


def _with_memory(module: nn.Module, device: str) -> nn.Module:
    """A module like another one without children, of whose tensors on the meta device it has its own on a device."""
    made = _shell(module)
    for name, tensor in meta_tensors(module).items():
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if name in made._parameters:
            made._parameters[name] = nn.Parameter(memory, tensor.requires_grad)
        else:
            made._buffers[name] = memory
    return made


def _own(module: nn.Module | None) -> set[Tensor]:
    return set() if module is None else set(meta_tensors(module).values())


def _at_name(name: str, module: nn.Module) -> nn.Module:
    """A model that has nothing but a module of that name."""
    for part in reversed(name.split(".") if name else ()):
        outer = nn.Module()
        outer._modules[part] = module
        module = outer
    return module


def _tensor_of(module: nn.Module, name: str, prefix: str) -> Any:
    found = module._parameters.get(name, module._buffers.get(name))
    if found is None:
        raise ConfigError(f"{prefix}{name} is there on the meta device, and the quantiser makes none with values")
    return found
