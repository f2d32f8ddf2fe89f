"""The model's parameters as this library lays them out on their device.

The parameters of a flat lie in one tensor (identity, names and shapes stay), so that a chunk's new values go to the
device as one copy, or are written in place by the kernel. A *line* is a parameter's elements as a 1-D tensor in the
order of its memory, whatever its strides.

[Note: storages]
A resident parameter has a storage of its own over its part of the flat's memory: a `state_dict` aliases it, and who
writes checkpoints takes storages that are shared for tied parameters. Streamed parameters are views of the flat, whose
storage is exchanged as they come and go, so that views which autograd saved are right again once it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.layout import Layout
from offload.model.spares import Spares

NO_VERSION = 1 << 31
"""Of a parameter whose memory is elsewhere: no graph has saved it, so autograd, which knows nothing of guards, raises
before it looks at a saved parameter that is not there."""

_DATA: Any = Tensor.data  # as torch has it, past the guards
_to_dlpack: Any = torch._C._to_dlpack
_from_dlpack: Any = torch._C._from_dlpack


def line_of(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a view of shape (numel,), in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def line_like(param: Tensor, tensor: Tensor) -> Tensor:
    """The elements of `tensor` in the order of `param`'s memory (same shape): a view if the strides agree."""
    if tensor.stride() != param.stride():
        tensor = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return line_of(tensor)


def shaped_like(param: Tensor, line: Tensor) -> Tensor:
    """The inverse of `line_like`: a view of `line` with the shape and strides of `param`."""
    return line.as_strided(param.shape, param.stride(), line.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a range of memory without gap or overlap, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Parameters:
    """The trained parameters of a model, in the order of `layout.specs`.

    Args: streams: whether their memory comes and goes.
    Attributes: flats: one tensor a flat of the layout, on the model's device, in which the parameters lie; filled by
    `attach`; tiles: leaves of autograd, by part of the layout; peak_bytes: the most all had on the device.
    """

    def __init__(
        self, layout: Layout, params: Sequence[nn.Parameter], device: torch.device, *, streams: bool = False
    ) -> None:
        self._layout = layout
        self._streams = streams
        self.params = tuple(params)
        self.index = {param: number for number, param in enumerate(self.params)}
        self._device = device
        self.flats = [torch.empty(0, device="cpu")] * len(layout.flats)
        self._versions: list[int] = [0] * len(self.params)
        self._strides: list[tuple[int, ...]] = [()] * len(self.params)
        self._tensors: list[int] = [0] * len(self.params)
        self._kinds = [type(param) for param in self.params]
        self._guards: list[type[Tensor]] = list(self._kinds)
        self._watched: list[type[Tensor]] = list(self._kinds)
        self._data: dict[int, tuple[Tensor, int]] = {}
        self._flat_of_storage: dict[int, int] = {}
        self._freed: set[int] = set()
        self._known: set[nn.Parameter] = set()
        self._bytes = 0
        self.peak_bytes = 0
        self._spares = Spares()
        self.tiles: dict[int, nn.Parameter] = {
            part.index: nn.Parameter(torch.empty(0, dtype=layout.flats[part.flat].dtype, device=device))
            for part in layout.parts
            if part.is_tile
        }
        self._memory: dict[int, Tensor] = {}

    @torch.no_grad()
    def make_dense(self, flat: int) -> None:
        """Gives parameters with holes or overlaps (expanded ones) memory of their own."""
        for number in self._layout.flats[flat].params:
            param = self.params[number]
            if not is_dense(param):
                param.data = param.data.contiguous()

    @torch.no_grad()
    def attach(self, flat: int, *, with_values: bool = True) -> None:
        """Moves the parameters of a flat, whose masters have been taken, into one tensor of its dtype.

        Args: with_values: False leaves the values behind; those of the parameters are undefined then.
        """
        info = self._layout.flats[flat]
        is_tiled = self._layout.tile_of(flat) > 0  # the device has no room for all of it
        device = torch.device("cpu") if is_tiled else self._device
        self._count(flat, self._layout.padded_numel(flat) * info.dtype.itemsize)
        self._spares.keep(self.peak_bytes - self._bytes)
        memory = torch.empty(self._layout.padded_numel(flat), dtype=info.dtype, device=device)
        if is_tiled:
            self._attach_tiles(flat)
        end = 0
        for number, offset in zip(info.params, info.offsets, strict=True):
            param = self.params[number]
            memory[end:offset] = 0  # gaps are computed along
            end = offset + param.numel()
            self._strides[number] = param.stride()
            self._tensors[number] = param._cdata
            view = self._place_of(number, memory[offset:end])
            if with_values:
                view.copy_(param)
            param.data = view
            self._versions[number] = param._version
        memory[end:] = 0
        self.flats[flat] = memory
        if self._streams:
            self._flat_of_storage[memory.untyped_storage()._cdata] = flat

    def _place_of(self, number: int, line: Tensor) -> Tensor:
        """The part of a flat where a parameter is to lie, in its shape; see [Note: storages]."""
        if not self._streams:
            line = _from_dlpack(_to_dlpack(line)) if line.numel() else torch.empty_like(line)
        return line.as_strided(self.params[number].shape, self._strides[number], line.storage_offset())

    def _attach_tiles(self, flat: int) -> None:
        columns = self.params[self._layout.flats[flat].params[0]].shape[1]
        for part in self._layout.parts:
            if part.is_tile and part.flat == flat:
                memory = torch.empty(part.numel, dtype=self._layout.flats[flat].dtype, device=self._device)
                self._memory[part.index] = memory
                self.tiles[part.index].data = memory.view(-1, columns)
                memory.untyped_storage().resize_(0)

    def tiles_of(self, number: int) -> list[tuple[int, nn.Parameter]]:
        """The first element and the leaf of each tile of a parameter; none of one that is not tiled."""
        flat, parts = self._layout.locations[number][0], self._layout.parts
        return [(parts[index].start, leaf) for index, leaf in self.tiles.items() if parts[index].flat == flat]

    def memory_of(self, part: int) -> Tensor:
        """Of a part of the layout, shape (numel,)."""
        return self.flats[part] if part < len(self.flats) else self._memory[part]

    # Guards; see [Note: guarded parameters] in guard.py.

    def guard_with(self, class_for: Callable[..., type[Tensor]]) -> None:
        """From now on parameters are guarded. Args: class_for: of the guards; see `Guards.class_for`."""
        self._guards = [class_for(kind) for kind in self._kinds]
        self._watched = [class_for(kind, runs=True) for kind in self._kinds]
        self.guard(range(len(self.params)))

    def guard(self, numbers: Iterable[int]) -> None:
        """Their unit does not run any more."""
        for number in numbers:
            self.params[number].__class__ = self._guards[number]  # type: ignore[assignment]

    def watch(self, numbers: Iterable[int]) -> None:
        """Their unit runs."""
        for number in numbers:
            self.params[number].__class__ = self._watched[number]  # type: ignore[assignment]

    def stop_guarding(self) -> None:
        """Parameters are of their own classes for good."""
        self._guards, self._watched = list(self._kinds), list(self._kinds)
        self.guard(range(len(self.params)))

    def is_held(self, tensor: Any) -> bool:
        return isinstance(tensor, nn.Parameter) and tensor in self.index

    def number_of(self, tensor: Any) -> int | None:
        """None if it is no trained parameter, but an alias of one."""
        return self.index.get(tensor)

    def flat_at(self, tensor: Tensor) -> int | None:
        """The flat in whose storage a tensor lies, if that comes and goes."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self._flat_of_storage or tensor.layout is not torch.strided or tensor.device.type == "meta":
                return None
            try:
                return self._flat_of_storage.get(tensor.untyped_storage()._cdata)
            except (RuntimeError, NotImplementedError):  # one that has none
                return None

    def data_of(self, number: int) -> Tensor:
        """What `p.data` gives: the same memory with another version counter, as in torch, which is watched here."""
        with torch._C.DisableTorchFunctionSubclass():
            if number not in self._data:
                alias = _DATA.__get__(self.params[number])
                self._data[number] = (alias, alias._version)
            return self._data[number][0].detach()

    @torch.no_grad()
    def repoint(self, number: int, value: Tensor) -> None:
        """`p.data = value`: until the next step, which takes it over, the parameter lies there."""
        with torch._C.DisableTorchFunctionSubclass():
            _DATA.__set__(self.params[number], value)
        self._data.pop(number, None)

    def version_of(self, number: int) -> int:
        """A parameter's version, also while its memory is elsewhere."""
        with torch._C.DisableTorchFunctionSubclass():
            is_freed = self._layout.locations[number][0] in self._freed
            return self._versions[number] if is_freed else self.params[number]._version

    def allocate(self, part: int) -> None:
        """Gives a part that was freed memory again, its values undefined."""
        memory = self.memory_of(part)
        self._count(part, memory.numel() * memory.element_size())
        self._spares.give(memory, self.peak_bytes - self._bytes)

    def return_spares(self) -> None:
        """Gives memory that parts have left, and nobody has now, back to the system."""
        self._spares.keep(0)

    def unite(self) -> None:
        """Moves tiled parameters, which are here as a whole, to the device; they are not attached any more."""
        for param in self.params:
            if param.device != self._device:
                param.data = param.data.to(self._device)

    def restore(self, flat: int) -> None:
        """The values of a part are there again: its parameters can be used."""
        if flat >= len(self.flats):
            return
        numbers = self._layout.flats[flat].params
        self._set_versions(numbers, [self._versions[n] for n in numbers])
        self._freed.discard(flat)

    def free(self, flat: int) -> None:
        """Frees the memory of a part, whose values are kept elsewhere until it is allocated again."""
        if flat < len(self.flats):
            numbers = self._layout.flats[flat].params
            self._set_versions(numbers, [NO_VERSION] * len(numbers))
            self._freed.add(flat)
        memory = self.memory_of(flat)
        self._count(flat, -memory.untyped_storage().nbytes())
        self._spares.take(memory)

    def _set_versions(self, numbers: Sequence[int], versions: Sequence[int]) -> None:
        params = tuple(self.params[n] for n in numbers)
        torch._C._autograd._unsafe_set_version_counter(params, tuple(versions))

    @torch.no_grad()
    def own_storages(self) -> None:
        """Gives parameters that were streamed, and are all here for good, storages of their own."""
        self._streams = False
        self._flat_of_storage.clear()
        for flat, memory in zip(self._layout.flats, self.flats, strict=True):
            for number, offset in zip(flat.params, flat.offsets, strict=True):
                param = self.params[number]
                param.data = self._place_of(number, memory[offset : offset + param.numel()])

    def _count(self, part: int, change: int) -> None:
        if part >= len(self.flats) or not self._layout.tile_of(part):  # else it is not on the device
            self._bytes += change
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    @torch.no_grad()
    def take_back(self, numbers: Iterable[int] | None = None) -> None:
        """Parameters (None: all) that were pointed elsewhere (`p.data = x`) lie in their flat again, with the values
        of `x`, as if written there.

        Raises: ConfigError if one has another shape, dtype or device now: it was moved or cast.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for number in range(len(self.params)) if numbers is None else numbers:
                param = self.params[number]
                flat, offset = self._layout.locations[number]
                if self._is_swapped(number) or flat in self._freed or not param.numel():
                    continue
                memory = self.flats[flat]
                is_there = param.data_ptr() == memory.data_ptr() + offset * memory.element_size()
                spec = self._layout.specs[number]
                if is_there and param.dtype is memory.dtype and param.numel() == spec.numel:
                    continue
                if (param.numel(), param.dtype, param.device) != (spec.numel, memory.dtype, memory.device):
                    raise ConfigError(
                        f"{spec.name} was moved, cast or replaced by another shape after OffloadZero took the model "
                        "(model.to(), .float(), p.data = ...): do that before, or write into it with p.copy_() under "
                        "torch.no_grad()"
                    )
                values = _DATA.__get__(param)
                _DATA.__set__(param, self._place_of(number, memory[offset : offset + spec.numel]))
                param.copy_(values)
                self._data.pop(number, None)

    def require_all_of(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises: ConfigError if a parameter of the groups that is none of these has a gradient: it was frozen."""
        for param in (param for group in groups for param in group["params"]):
            if param not in self.index and param.grad is not None:
                name = next((name for name, other in model.named_parameters() if other is param), "a parameter")
                raise ConfigError(
                    f"{name} was frozen when OffloadZero took the model, and has no states: unfreeze it before, "
                    "and freeze it again afterwards if it is to be trained only later"
                )

    def note_all_of(self, model: nn.Module) -> None:
        """Those that `model` has now are known to `require_in`."""
        self._known = set(model.parameters())

    def _is_swapped(self, number: int) -> bool:
        """Whether `torch.utils.swap_tensors` put another tensor into a parameter: graphs know the one it had."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.params[number]._cdata != self._tensors[number]

    def require_in(self, model: nn.Module) -> None:
        """Raises: ConfigError if `model` has another parameter in the place of one of these, or a new one with a
        gradient, which would never be used."""
        for number, spec in enumerate(self._layout.specs):
            if self._is_swapped(number):
                raise ConfigError(
                    f"{spec.name} was swapped with another tensor after OffloadZero took the model: write into it with "
                    "p.copy_() under torch.no_grad() instead of swap_tensors"
                )
        present = set(model.parameters())
        for param, spec in zip(self.params, self._layout.specs, strict=True):
            if param not in present:
                raise ConfigError(
                    f"{spec.name} is no longer in the model: load with load_state_dict(..., assign=False), and replace "
                    "modules or parameters before OffloadZero takes the model"
                )
        for added in present - self._known:
            if added.grad is not None:
                name = next(name for name, param in model.named_parameters() if param is added)
                raise ConfigError(
                    f"{name} was added to the model after OffloadZero took it, and has no states: add modules and "
                    "parameters before, or drop its gradient (p.grad = None) before step() if something else trains it"
                )

    def written_here(self, numbers: Iterable[int]) -> None:
        """Tells autograd that these parameters have new values, which went past it, and remembers the versions."""
        for number in numbers:
            for _, leaf in self.tiles_of(number):
                torch.autograd.graph.increment_version(leaf)
            if number in self._data:
                alias = self._data[number][0]
                self._data[number] = (alias, alias._version)
            if self._layout.locations[number][0] in self._freed:
                self._versions[number] += 1  # shown when it is there again
            else:
                torch.autograd.graph.increment_version(self.params[number])
                with torch._C.DisableTorchFunctionSubclass():
                    self._versions[number] = self.params[number]._version

    def note_writes(self, numbers: Iterable[int]) -> None:
        """What somebody else wrote to these parameters, which are here, is taken over: it is what they are."""
        for number in numbers:
            for _, leaf in self.tiles_of(number):
                torch.autograd.graph.increment_version(leaf)
            if number in self._data:
                alias = self._data[number][0]
                self._data[number] = (alias, alias._version)
            with torch._C.DisableTorchFunctionSubclass():
                self._versions[number] = self.params[number]._version

    def written_outside(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Which of `numbers` (None: all) somebody else wrote to (`load_state_dict`, `p.copy_`) since `written_here`."""
        numbers = range(len(self.params)) if numbers is None else numbers
        places, freed = self._layout.locations, self._freed
        with torch._C.DisableTorchFunctionSubclass():
            here = [number for number in numbers if places[number][0] not in freed]
            return [n for n in here if self.params[n]._version != self._versions[n] or self._data_is_written(n)]

    def _data_is_written(self, number: int) -> bool:
        if number not in self._data:
            return False
        alias, version = self._data[number]
        return alias._version != version

    def flat_of(self, number: int) -> int:
        return self._layout.locations[number][0]


def cast_untrained(model: nn.Module, trained: Parameters, dtypes: dict[Tensor, torch.dtype]) -> None:
    """Casts the floating parameters that nobody trains to their compute dtype: they have no other copy."""
    for param in model.parameters():
        if param not in trained.index and param.is_floating_point() and param.dtype is not dtypes[param]:
            param.data = param.data.to(dtypes[param])


def untrained_bytes(model: nn.Module, trained: Iterable[nn.Parameter], dtypes: Mapping[Tensor, torch.dtype]) -> int:
    """What parameters that nobody trains, and buffers, take on the device."""
    left = set(model.parameters()) - set(trained)
    frozen = sum(p.numel() * (dtypes[p] if p.is_floating_point() else p.dtype).itemsize for p in left)
    return frozen + sum(buffer.numel() * buffer.element_size() for buffer in set(model.buffers()))


def device_for(given: torch.device | str | None, own: torch.device) -> torch.device:
    """The device to train on: the model's own; one on the meta device goes where the user asks, or to the CPU.

    Raises: ConfigError if the user asks for another device than the model's.
    """
    try:
        wanted = own if given is None else torch.empty(0, device=given).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ConfigError(f"device={given!r} is no device of this machine: leave it out, or give {own}") from error
    if own.type == "meta":
        return wanted if wanted.type != "meta" else torch.device("cpu")
    if wanted != own:
        raise ConfigError(f"device={given} but the model is on {own}: move the model there first")
    return own
