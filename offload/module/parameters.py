"""The model's parameters as this library lays them out on their device.

The parameters of a flat become views of one tensor (identity, names and shapes stay), so that a chunk's new values
go to the device as one copy, or are written in place by the kernel. A *line* is a parameter's elements as a 1-D
tensor in the order of its memory, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.layout import Layout
from offload.module.released import ReleasedParameter, release, restore
from offload.module.spares import Spares


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

    Attributes: flats: one tensor a flat of the layout, on the model's device, of which the parameters are views;
    filled by `attach`; tiles: leaves of autograd, by part of the layout; peak_bytes: the most all had on the device.
    """

    def __init__(self, layout: Layout, params: Sequence[nn.Parameter], device: torch.device) -> None:
        self._layout = layout
        self.params = tuple(params)
        self.index = {param: number for number, param in enumerate(self.params)}
        self._device = device
        self.flats = [torch.empty(0, device="cpu")] * len(layout.flats)
        self._versions: list[int] = [0] * len(self.params)
        self._classes = [type(param) for param in self.params]
        self._freed: set[int] = set()
        self._known: set[nn.Parameter] = set()
        self._released: dict[int, type[ReleasedParameter]] = {}
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
            view = shaped_like(param, memory[offset:end])
            if with_values:
                view.copy_(param)
            param.data = view
            self._versions[number] = param._version
        memory[end:] = 0
        self.flats[flat] = memory

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
        flat, parts = self._layout.places[number][0], self._layout.parts
        return [(parts[index].start, leaf) for index, leaf in self.tiles.items() if parts[index].flat == flat]

    def memory_of(self, part: int) -> Tensor:
        """Of a part of the layout, shape (numel,)."""
        return self.flats[part] if part < len(self.flats) else self._memory[part]

    def release_as(self, number: int, kind: type[ReleasedParameter]) -> None:
        """What parameter `number`, which is released now, is from now on while it is."""
        self._released[number] = kind
        self.params[number].__class__ = kind

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
        restore(
            [self.params[n] for n in numbers],
            [self._versions[n] for n in numbers],
            [self._classes[n] for n in numbers],
        )
        self._freed.discard(flat)

    def free(self, flat: int) -> None:
        """Frees the memory of a part, whose values are kept elsewhere; using its parameters raises until `restore`."""
        if flat < len(self.flats):
            numbers = self._layout.flats[flat].params
            release([self.params[n] for n in numbers], [self._released.get(n, ReleasedParameter) for n in numbers])
            self._freed.add(flat)
        memory = self.memory_of(flat)
        self._count(flat, -memory.untyped_storage().nbytes())
        self._spares.take(memory)

    def _count(self, part: int, change: int) -> None:
        if part >= len(self.flats) or not self._layout.tile_of(part):  # else it is not on the device
            self._bytes += change
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def require_attached(self, numbers: Iterable[int] | None = None) -> None:
        """Raises: ConfigError if a parameter (None: any) no longer lies where it was put (`.to()`, `p.data = ...`)."""
        for number in range(len(self.params)) if numbers is None else numbers:
            param = self.params[number]
            flat, offset = self._layout.places[number]
            if flat in self._freed:
                continue
            memory = self.flats[flat]
            expected = memory.data_ptr() + offset * memory.element_size()
            if param.numel() and (param.data_ptr() != expected or param.dtype is not memory.dtype):
                name = self._layout.specs[number].name
                raise ConfigError(
                    f"{name} was moved or replaced (model.to(), .float(), p.data = ...) after OffloadZero took the "
                    "model: do that before, or write into it with p.copy_() under torch.no_grad()"
                )

    def require_all_of(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises: ConfigError if a parameter of the groups that is none of these has a gradient: it was frozen."""
        for group in groups:
            for param in group["params"]:
                if param.grad is not None and param not in self.index:
                    name = next((name for name, other in model.named_parameters() if other is param), "a parameter")
                    raise ConfigError(
                        f"{name} was frozen when OffloadZero took the model, and has no states: unfreeze it before, "
                        "and freeze it again afterwards if it is to be trained only later"
                    )

    def note_all_of(self, model: nn.Module) -> None:
        """Those that `model` has now are known to `require_in`."""
        self._known = set(model.parameters())

    def require_in(self, model: nn.Module) -> None:
        """Raises: ConfigError if `model` has another parameter in the place of one of these, or a new one with a
        gradient, which would never be used."""
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
            if self._layout.places[number][0] in self._freed:
                self._versions[number] += 1  # shown when it is there again
            else:
                torch.autograd.graph.increment_version(self.params[number])
                self._versions[number] = self.params[number]._version

    def written_outside(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Which of `numbers` (None: all) somebody else wrote to (`load_state_dict`, `p.copy_`) since `written_here`."""
        numbers = range(len(self.params)) if numbers is None else numbers
        here = (number for number in numbers if self._layout.places[number][0] not in self._freed)
        return [number for number in here if self.params[number]._version != self._versions[number]]

    def flat_of(self, number: int) -> int:
        return self._layout.places[number][0]

    def flats_written_outside(self) -> list[int]:
        """The flats of which somebody else wrote to a parameter."""
        return sorted({self.flat_of(number) for number in self.written_outside()})


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
