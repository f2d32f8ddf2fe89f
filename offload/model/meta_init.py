"""Models built on the meta device: their values are made in parts, which go straight to their tiers.

The whole model is never in memory. A part is a tensor, or a module where that makes several at once. Values come from
safetensors files, from a function of name and tensor, or from the modules' own `reset_parameters()`, called in the
order of `model.modules()`. The latter gives the values of a model that was built as usual, if its constructors draw
random numbers in that order and nowhere else.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, UntypedStorage, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.io.files import LOCAL
from offload.io.regular import check_file, read_json
from offload.model.dense import flattened
from offload.model.inner import Inner, inner_tensors, is_composite, replace_table
from offload.sizes import MIB

Parts = Mapping[str, Tensor]
"""The inner tensors of a parameter, by key."""


class Kept(NamedTuple):
    """How a base that a source quantises is kept; see [Note: kept base] in storage/kept_base.py.

    Attributes:
        key: gives the digest of all that the values come from, 32 hex digits. It reads all of that, and calls its
            argument now and then.
        directory: where the base lies; None: in the run's first directory.
        names: the parameters that the source gives values, and their names in it.
        settings: how it quantises, which is a part of the key.
    """

    key: Callable[[Callable[[], None]], str]
    directory: Path | None
    names: Mapping[Tensor, str]
    settings: str


class Source(ABC):
    """Where the values of a module's own parameters and buffers come from."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Checks, before anything is allocated, that there is a value for each parameter and buffer.

        Raises:
            ConfigError: if one is missing.
        """

    @abstractmethod
    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        """Writes values into the tensors of a module.

        Args:
            prefix: what comes before the tensors' names in the model.
            module: the module.
            fresh: its own tensors that have no values yet, by name.
        """

    def parts(self, prefix: str, module: nn.Module, names: Collection[str]) -> Sequence[Collection[str]]:
        """Which of a module's tensors `fill` has to make together. Others need not be in memory meanwhile.

        Args:
            prefix: what comes before the tensors' names in the model.
            module: the module.
            names: the names of those that have no values yet, in the module.

        Returns:
            Each name once.
        """
        return [names]

    def make(self, prefix: str, module: nn.Module, names: Collection[str]) -> Mapping[str, Parts]:
        """Makes the inner tensors of quantised parameters of a module.

        Args:
            prefix: what comes before the parameters' names in the model.
            module: the module, whose parameters these are, on the meta device.
            names: their names in the module.

        Returns:
            For each name the inner tensors by key (inner.py), on the CPU. Tables may be shared, all others are nobody
            else's.

        Raises:
            ConfigError: if it cannot make them.
        """
        raise _not_made(prefix + min(names))

    def kept(self) -> Kept | None:
        """How the base that it quantises is kept on NVMe; None: it is not."""
        return None


class HasTensors(Protocol):
    """A kept base, as values are read from it; see storage/kept_base.py."""

    @property
    def names(self) -> Container[str]:
        """Of the tensors in it."""

    def tensor(self, name: str) -> Tensor: ...

    def digest_of(self, name: str, dtype: torch.dtype) -> str: ...


def _not_made(name: str) -> ConfigError:
    return ConfigError(
        f"{name} was quantised on the meta device, and init gives it no values: quantise it while loading, with "
        "offload.integrations.quantised.Quantised or from_pretrained(quantization_config=...)"
    )


DIGESTED_BYTES = 4 * MIB
"""Of a file, read at once for its digest."""
MOST_INDEX_BYTES = 64 * MIB

Init = Callable[[str, Tensor], None] | str | os.PathLike[str] | Source | None


class ResetParameters(Source):
    def check(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if meta_tensors(module) and not callable(getattr(module, "reset_parameters", None)):
                raise ConfigError(
                    f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters(): give OffloadZero(init=...) a function of name and tensor, or safetensors"
                )

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        module.reset_parameters()  # type: ignore[operator]


class FromFunction(Source):
    """Fills tensors by `function(name, tensor)`, called once for each name, in the model's order."""

    def __init__(self, function: Callable[[str, Tensor], None]) -> None:
        self._function = function

    def check(self, model: nn.Module) -> None:
        return None

    def parts(self, prefix: str, module: nn.Module, names: Collection[str]) -> Sequence[Collection[str]]:
        return [[name] for name in names]

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        for name, tensor in fresh.items():
            self._function(prefix + name, tensor)


class FromSafetensors(Source):
    """The values in a directory as transformers writes it, in one file, or in the files of an index.

    One tensor is read at a time. Buffers that are not saved, such as tables of angles, are made by the model's own
    initialisation: by `_init_weights(module)` of the innermost module around that has it, as transformers' models do,
    or by the module's `reset_parameters()`.

    Args:
        path: the directory, a file, or an index.
        init_missing: whether parameters and saved buffers that the files have no value for are made in that way, too.
    """

    def __init__(self, path: Path, *, init_missing: bool = False) -> None:
        self._path = path
        self._init_missing = init_missing
        self.files: dict[str, Path] = {}
        """The file of each tensor, by its name there."""
        self._names: dict[str, list[str]] = {}
        self._initialisers: dict[str, Callable[[], object]] = {}
        self._open: tuple[Path, Any] | None = None
        try:
            if path.is_dir():
                index = path / "model.safetensors.index.json"
                path = index if os.path.lexists(index) else path / "model.safetensors"
            if path.suffix == ".json":
                self.files = _weight_map(path)
            else:
                self.files = dict.fromkeys(self._file(path).keys(), path)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"init={str(path)!r} is no safetensors file, nor the index of some: {error}") from error
        self._require_files(path)

    def _require_files(self, index: Path) -> None:
        """Requires that each file is there and has the tensors that are said to be in it.

        Args:
            index: the file that says it.

        Raises:
            ConfigError: if a file cannot be read, or lacks a tensor.
        """
        names_in: dict[Path, list[str]] = {}
        for name, file in self.files.items():
            names_in.setdefault(file, []).append(name)
        for file, names in names_in.items():
            try:
                missing = set(names).difference(self._file(file).keys())
            except (OSError, ValueError, SafetensorError) as error:
                raise ConfigError(f"{file}, which {str(index)!r} names, cannot be read: {error}") from error
            if missing:
                raise ConfigError(f"{min(missing)} is not in {file}, where {str(index)!r} has it: make the index anew")

    def has(self, name: str) -> bool:
        """Whether the files have a value for a parameter or buffer."""
        return name in self.files

    def read(self, name: str) -> Tensor:
        """The value of a parameter or buffer of the model.

        Raises:
            ConfigError: if the files have none.
        """
        return self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor, by its name in the files.

        Raises:
            ConfigError: if it cannot be read.
        """
        try:
            values: Tensor = self._file(self.files[name]).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{name} cannot be read from {self.files[name]}: {error}") from error
        return values

    def digest(self, meanwhile: Callable[[], None]) -> str:
        """The XXH3-128 of all bytes of the files.

        Args:
            meanwhile: called now and then.

        Raises:
            ConfigError: if one cannot be read.
        """
        hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(DIGESTED_BYTES))
        for path in sorted(set(self.files.values())):
            try:
                with LOCAL.open_followed(path) as file, LOCAL.stream(file) as stream:
                    hasher.update(LOCAL.require_regular(file).to_bytes(8, "little"))
                    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
                        hasher.update(buffer[:count])
                        meanwhile()
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
        return str(hasher.hexdigest())

    def _file(self, path: Path) -> Any:
        """Opens a file, which stays open until another one is asked for."""
        if self._open is None or self._open[0] != path:
            check_file(path)
            self._open = path, safe_open(path, "pt")
        return self._open[1]

    def check(self, model: nn.Module) -> None:
        names: dict[Tensor, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        missing: dict[Tensor, str] = {}
        for prefix, module in model.named_modules():
            for name, tensor in meta_tensors(module).items():
                full = _join(prefix) + name
                # A tied parameter is in the files under one of its names, or several.
                known = list(filter(self.has, dict.fromkeys((full, *names.get(tensor, ())))))
                self._names[full] = known
                if not known:
                    self._initialisers[_join(prefix)] = self._initialiser(model, prefix, module, full)
                    if name not in module._non_persistent_buffers_set:
                        missing.setdefault(tensor, full)
        if missing and not self._init_missing:
            first = ", ".join(list(missing.values())[:8])
            raise ConfigError(
                f"init holds no values for {first}{f', and {len(missing) - 8} more' if len(missing) > 8 else ''}: give "
                "the files of this model (offload.integrations.transformers.from_pretrained converts other names), or "
                "init_missing=True, so that the model's own initialisation makes them"
            )

    def gives(self, name: str) -> bool:
        """Whether what a checked model has under a name comes from the files. Else its own initialisation makes it."""
        return self._names.get(name) != []

    def _initialiser(self, model: nn.Module, prefix: str, module: nn.Module, name: str) -> Callable[[], object]:
        parts = prefix.split(".") if prefix else []
        for end in range(len(parts), -1, -1):
            initialise = getattr(model.get_submodule(".".join(parts[:end])), "_init_weights", None)
            if callable(initialise):
                return partial(initialise, module)
        if callable(reset := getattr(module, "reset_parameters", None)):
            return partial(reset)
        if name.rpartition(".")[2] in module._non_persistent_buffers_set:
            raise ConfigError(
                f"{name} is a buffer on the meta device that no file holds, and {type(module).__name__} has no "
                'reset_parameters(): build it under torch.device("cpu"), or give init a function'
            )
        raise ConfigError(f"init holds no values for {name}, and {type(module).__name__} has no reset_parameters()")

    def parts(self, prefix: str, module: nn.Module, names: Collection[str]) -> Sequence[Collection[str]]:
        missing = [name for name in names if not self._names[prefix + name]]
        return [*filter(None, [missing]), *([name] for name in names if name not in missing)]

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        if missing := {prefix + name: tensor for name, tensor in fresh.items() if not self._names[prefix + name]}:
            self._initialise(prefix, module, missing)
        for name, tensor in fresh.items():
            for number, key in enumerate(self._names[prefix + name]):
                values = self.read(key)
                if values.shape != tensor.shape:
                    shapes = f"{tuple(tensor.shape)} in the model and {tuple(values.shape)} in {self._path}"
                    raise ConfigError(f"{key} has shape {shapes}")
                if number == 0:
                    tensor.copy_(values)
                elif not torch.equal(values.to(tensor.dtype), tensor):
                    raise ConfigError(
                        f"{prefix}{name} and {key} are one parameter of the model, and {self._path} has different "
                        "values for them: build a model that does not tie them"
                    )

    def _initialise(self, prefix: str, module: nn.Module, missing: Mapping[str, Tensor]) -> None:
        """Runs a module's initialisation.

        Args:
            prefix: what comes before the names of its tensors in the model.
            module: the module.
            missing: the tensors that it has to fill, by name.

        Raises:
            ConfigError: if it leaves some of these undefined.
        """
        results: list[dict[str, Tensor]] = []
        bits = {name: flattened(tensor.detach()).view(torch.uint8) for name, tensor in missing.items()}
        random = torch.get_rng_state()
        for byte in (0, 255):  # what is not written keeps them
            torch.set_rng_state(random)
            for memory in bits.values():
                memory.fill_(byte)
            self._initialisers[prefix]()
            results.append({name: memory.clone() for name, memory in bits.items()})
        for name in missing:
            if not torch.equal(results[0][name], results[1][name]):
                raise ConfigError(
                    f"{name} is in no file, and the initialisation of {type(module).__name__} leaves it undefined: "
                    'build that module under torch.device("cpu"), or give init a function'
                )


class PartOfModel(Source):
    """The values of a model that becomes a part of another one, in which its modules have other names.

    Args:
        source: of the values.
        model: the model before it becomes a part.

    Raises:
        OffloadError: as `source.check` does.
    """

    def __init__(self, source: Source, model: nn.Module) -> None:
        source.check(model)
        self._source = source
        self._know(model)

    def _know(self, model: nn.Module) -> None:
        """Notes the names that modules have now, and the tensors that have a value."""
        self._prefixes = {module: _join(name) for name, module in model.named_modules()}
        self._known = {module: frozenset(meta_tensors(module)) for module in self._prefixes}

    def check(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if added := meta_tensors(module).keys() - self._known.get(module, frozenset()):
                raise ConfigError(
                    f"{_join(name)}{min(added)} was added to the model without values: build it on the CPU, with values"
                )

    def parts(self, prefix: str, module: nn.Module, names: Collection[str]) -> Sequence[Collection[str]]:
        return self._source.parts(self._prefixes[module], module, names)

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        self._source.fill(self._prefixes[module], module, fresh)

    def make(self, prefix: str, module: nn.Module, names: Collection[str]) -> Mapping[str, Parts]:
        return self._source.make(self._prefixes[module], module, names)

    def kept(self) -> Kept | None:
        return self._source.kept()


def kept_tensors(model: nn.Module, kept: Kept) -> dict[str, Inner]:
    """The inner tensors of a model that are in its kept base, by their names in that, in the source's order."""
    there = set(model.parameters())
    params = [cast(nn.Parameter, param) for param in kept.names if param in there]
    return {one.name_in(kept.names[one.param]): one for one in inner_tensors(params) if one.tensor.is_meta}


@torch.no_grad()
def kept_values(model: nn.Module, source: Source, kept: Kept) -> Iterator[tuple[str, Tensor]]:
    """Makes the values of all `kept_tensors`, one module after the other. The model stays on the meta device.

    Yields:
        A name in the base, and a tensor of shape (numel,) on the CPU: its elements in the order of its memory.

    Raises:
        ConfigError: as `source.fill` and `source.make` do, or if these quantise otherwise than on the meta device.
    """
    left = set(kept_tensors(model, kept))
    for name, module in model.named_modules():
        prefix = _join(name)
        plain: dict[str, Tensor] = {}
        quantised: dict[str, Tensor] = {}
        for own, tensor in meta_tensors(module).items():
            inners = inner_tensors([cast(nn.Parameter, tensor)]) if tensor in kept.names else []
            if any(one.name_in(kept.names[one.param]) in left for one in inners):
                if is_composite(tensor):
                    quantised[own] = tensor
                else:
                    plain[own] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if plain:
            source.fill(prefix, module, plain)
        parts: dict[str, Parts] = {own: {"": values} for own, values in plain.items()}
        plain.clear()
        if quantised:
            parts |= source.make(prefix, module, quantised)
        for own in [*parts]:
            param, made = module._parameters[own], dict(parts.pop(own))
            _require_as_planned(param, made, prefix + own)
            for one in inner_tensors([cast(nn.Parameter, param)]):
                found, values = one.name_in(kept.names[one.param]), made.pop(one.key)
                if one.tensor.is_meta:
                    left.remove(found)
                    yield found, flattened(_with_strides(values.detach(), one.tensor))
            del values


def _with_strides(values: Tensor, like: Tensor) -> Tensor:
    if values.stride() == like.stride():
        return values
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu").copy_(values)


class KeptValues(Source):
    """The values of a model whose base is kept: what is in that is not made again.

    Args:
        source: of all other values.
        names: the parameters that the source gives values, and their names in the base.
        base: the base.
        streamed: the names of what is read from the base when it is used: it gets memory without values.
    """

    def __init__(self, source: Source, names: Mapping[Tensor, str], base: HasTensors, streamed: Container[str]) -> None:
        self._source = source
        self._names = names
        self._base = base
        self._streamed = streamed
        self._tables: dict[tuple[str, torch.Size], Tensor] = {}

    def check(self, model: nn.Module) -> None:
        self._source.check(model)

    def parts(self, prefix: str, module: nn.Module, names: Collection[str]) -> Sequence[Collection[str]]:
        return self._source.parts(prefix, module, names)

    def fill(self, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        others = {}
        for own, tensor in fresh.items():
            name = self._names.get(tensor)
            if name is None or name not in self._base.names:
                others[own] = tensor
            elif name not in self._streamed:
                flattened(tensor).copy_(self._base.tensor(name))
        if others:
            self._source.fill(prefix, module, others)

    def make(self, prefix: str, module: nn.Module, names: Collection[str]) -> Mapping[str, Parts]:
        inners = {own: inner_tensors([cast(nn.Parameter, module._parameters[own])]) for own in names}
        is_in = {own: self._are_in_base(those) for own, those in inners.items()}
        others = [own for own in names if not is_in[own]]
        made = dict(self._source.make(prefix, module, others)) if others else {}
        for own in is_in.keys() - made.keys():
            made[own] = {one.key: self._of(one) for one in inners[own]}
        return made

    def _are_in_base(self, inners: Iterable[Inner]) -> bool:
        return all(
            one.param in self._names and one.name_in(self._names[one.param]) in self._base.names
            for one in inners
            if one.tensor.is_meta
        )

    def _of(self, one: Inner) -> Tensor:
        if not one.tensor.is_meta:
            return one.tensor
        name = one.name_in(self._names[one.param])
        memory = torch.empty_strided(one.tensor.shape, one.tensor.stride(), dtype=one.tensor.dtype, device="cpu")
        if name in self._streamed:
            return memory
        flattened(memory).copy_(self._base.tensor(name))
        # Many parameters share a table, and go on to.
        return self._tables.setdefault((self._base.digest_of(name, memory.dtype), memory.shape), memory)


def _weight_map(index: Path) -> dict[str, Path]:
    """Reads the file of each tensor from an index.

    Raises:
        OSError: the operating system refused.
        ValueError: if the index is not what transformers writes.
    """
    weights = read_json(index, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError('its "weight_map" is no object of file names')
    # A file cannot name a path outside of its folder.
    return {name: index.parent / Path(file).name for name, file in weights.items()}


def source_of(init: Any, *, init_missing: bool = False) -> Source:
    """The source that the options `init` and `init_missing` name.

    Raises:
        ConfigError: if they name none.
    """
    if isinstance(init, str | os.PathLike):
        return FromSafetensors(Path(init), init_missing=init_missing)
    if init_missing:
        raise ConfigError(f"init_missing=True, and init={init!r} names no files in which values could be missing")
    if isinstance(init, Source):
        return init
    if init is None:
        return ResetParameters()
    if callable(init):
        return FromFunction(init)
    raise ConfigError(
        f"init={init!r}: give a function of name and tensor, a directory with model.safetensors, a safetensors file or "
        "the index of some"
    )


def check_source(source: Source, model: nn.Module) -> None:
    """Checks, before anything is allocated, that a source has values for a model.

    Raises:
        ConfigError: if it has none for some parameter or buffer.
    """
    if type(source).make is Source.make:
        for prefix, module in model.named_modules():
            for name, tensor in meta_tensors(module).items():
                if is_composite(tensor):
                    raise _not_made(_join(prefix) + name)
    source.check(model)


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of the model is on the meta device."""
    return any(meta_tensors(module) for module in model.modules())


@torch.no_grad()
def materialise(model: nn.Module, source: Source) -> Iterator[tuple[nn.Module, Collection[Tensor]]]:
    """Gives one part of the model after the other memory on the CPU and values. Parameters keep their identity.

    Yields:
        The module of a part, and those parameters of the part whose memory is malloc's and belongs to them alone.
    """
    for path, module in model.named_modules():
        prefix, plain, quantised = _join(path), {}, {}
        for name, tensor in meta_tensors(module).items():
            if not is_composite(tensor):
                plain[name] = tensor
            elif any(one.tensor.is_meta for one in inner_tensors([cast(nn.Parameter, tensor)])):
                quantised[name] = tensor  # else another module has it, too
        for part in source.parts(prefix, module, [*plain]) if plain else ():
            yield module, _fill(source, prefix, module, {name: plain.pop(name) for name in part})
        if quantised:
            for name, parts in source.make(prefix, module, quantised).items():
                _take(quantised.pop(name), parts, prefix + name)
            assert not quantised
            yield module, ()


def _fill(source: Source, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> set[nn.Parameter]:
    """Gives tensors of a module, which are on the meta device, memory and values.

    Returns:
        The parameters whose memory is malloc's and belongs to them alone.
    """
    made: dict[nn.Parameter, UntypedStorage] = {}
    for name, tensor in fresh.items():
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            become(tensor, memory, prefix + name)
            made[tensor] = memory.untyped_storage()
        else:
            module._buffers[name] = fresh[name] = memory
        del memory
    source.fill(prefix, module, fresh)
    fresh.clear()
    return {param for param, storage in made.items() if _is_owned(param, storage)}


def _take(param: Any, parts: Parts, name: str) -> None:
    """Gives a quantised parameter, which stays the object that it was, inner tensors with values.

    Args:
        param: the parameter, on the meta device.
        parts: its inner tensors with values.
        name: its name, for the error.

    Raises:
        ConfigError: if these are not what it was planned with.
    """
    _require_as_planned(param, parts, name)
    for one in inner_tensors([param]):
        if one.is_table and one.tensor.is_meta:
            replace_table(one, parts[one.key])
        elif one.tensor.is_meta:
            become(one.used, parts[one.key], one.name_in(name))


def _require_as_planned(param: Any, parts: Parts, name: str) -> None:
    """Requires that a parameter with values is made of the same inner tensors as on the meta device.

    Raises:
        ConfigError: naming what differs.
    """
    inners = {one.key: one for one in inner_tensors([param])}
    planned, found = (
        {key: (one.shape, one.dtype) for key, one in those.items()}
        for those in ({key: one.tensor for key, one in inners.items()}, parts)
    )
    if planned != found:
        key = next(key for key in (*planned, *found) if planned.get(key) != found.get(key))
        raise ConfigError(
            f"{name} was quantised on the meta device with {planned.get(key, 'no')} {key or 'codes'}, and with "
            f"values with {found.get(key, 'no')}: quantise both in the same way"
        )


def _is_owned(param: nn.Parameter, made: UntypedStorage) -> bool:
    """Whether a parameter still has the memory that was made for it, and nothing else has."""
    is_same = param.untyped_storage()._cdata == made._cdata
    uses: int = torch_private.storage_uses(made._cdata)
    return is_same and uses == 2  # by the parameter and by `made`


def become(param: Tensor, memory: Tensor, name: str) -> None:
    """Gives a parameter other memory, which may be on the meta device. It stays the object that it was.

    Its class and attributes stay, too.

    Args:
        param: the parameter, or an inner tensor of one.
        memory: a tensor with the memory.
        name: the parameter's name, for the error.

    Raises:
        ConfigError: if a graph or a view refers to the parameter, which would keep what it was.
    """
    if torch_private.uses(param) > 1:
        raise ConfigError(
            f"{name} is on the meta device, and a graph or a view of it is kept somewhere: drop the results of "
            "forwards that ran on the meta device, and views, before OffloadZero takes the model"
        )
    is_param = isinstance(param, nn.Parameter)
    torch_private.swap_implementations(param, nn.Parameter(memory, param.requires_grad) if is_param else memory)


def meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own tensors on the meta device, by name."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: tensor for name, tensor in tensors if tensor.is_meta}


def _join(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
