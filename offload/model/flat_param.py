"""Flat parameters: all parameters of a unit of one dtype, end to end in one tensor on the model's device.

A parameter keeps its identity, name, shape and strides; its elements are a view of the flat parameter. So the new
values of a chunk go to the device in one copy, or the kernel writes them in place. The *flattened* view of a parameter
has shape (numel,) and the order of its memory, whatever its strides are.

[Note: storages]
A resident parameter has a storage of its own, over its range of the flat parameter's memory: a `state_dict` aliases it,
and whoever writes checkpoints takes a shared storage for tied parameters. Streamed parameters share the storage of the
flat parameter, whose memory is taken away and given back as units are released and fetched (unit_memory.py). So views
that autograd saved are valid again when the memory is back.

[Note: sharded parameters]
Of a DTensor the flat parameter holds this rank's part, which is a plain tensor inside of it, its *local* tensor. That
one is pointed into the flat parameter, and autograd, guards and the module go on with the DTensor. Each of the two has
a version of its own, and writes bump the one, the other, or both: their sum tells whether anybody wrote.

A storage without memory points to NaNs on the CPU, which nobody can take for values; on a device it has no bytes.

[Note: a parked model]
`model.cpu()` of a model that trains on a device of its own moves the flat parameters to the CPU, and `model.to(device)`
moves them back. Streamed ones have no memory then, so they only change places with others of their size, and take
their first storages again when they are back: views that autograd saved stay valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.devices.copies import Copier, DeviceEvent, finish_queue
from offload.errors import ConfigError, ReleasedParameterError
from offload.interrupts import uninterrupted
from offload.layout import Layout
from offload.model.unit import Unit, Units
from offload.model.unit_memory import UnitMemory, strip
from offload.native.memory import discard
from offload.ranks.tensor_parallel import is_dtensor, local_of, repoint

NO_VERSION = 1 << 31
"""The version of a parameter whose memory is elsewhere. No graph has saved it. So autograd, which knows nothing of
guards, raises before it reads a saved parameter that is not there."""

CPU = torch.device("cpu")

_DATA: Any = Tensor.data  # as torch has it, without the guards


def flattened(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a view of shape (numel,), in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flattened_like(param: Tensor, tensor: Tensor) -> Tensor:
    """The elements of `tensor` in the order of `param`'s memory: a view if the strides agree.

    Both have the same shape.
    """
    return flattened(_with_strides(tensor, param.stride()))


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


_MOVED_AT_ONCE = 1 << 21  # elements


def move_values(target: Tensor, source: Tensor) -> None:
    """Copies the values of a dense tensor to another one of its shape and strides, and may cast them.

    Both are on the CPU. The pages of `source` are freed as those of `target` are written, so there is never room for
    both. The memory of `source` has to be malloc's, and must belong to it alone.
    """
    pairs = zip(flattened(target).split(_MOVED_AT_ONCE), flattened(source).split(_MOVED_AT_ONCE), strict=True)
    for into, values in pairs:
        into.copy_(values)
        discard(values)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a range of memory without gap or overlap, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class FlatParameters:
    """The held parameters of a model, in the order of `layout.specs`: trained ones, and frozen ones that stream.

    Args:
        layout: of all of them.
        params: the model's parameters, in that order.
        device: the device to train on.
        copier: copies between that device and RAM.
        streamed: the flat parameters whose memory comes and goes.
        limit: how many bytes these may take on that device.

    Attributes:
        layout: of all of them.
        trained: how many of them are trained; these are the first ones.
        params: the model's parameters.
        locals: the tensors whose memory the flat parameters are, see [Note: sharded parameters].
        index: the number of each parameter.
        flats: one tensor for each flat parameter of the layout, on the model's device, filled by `attach`.
        units: the units, by name.
        tiles: the tiles, leaves of autograd, by the index of the layout's slice.
        home: the device to train on.
        device: where the parameters are now, which is the CPU if the model is parked.
        peak_bytes: the most bytes that all took at home, with what is kept for units to come.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[nn.Parameter],
        device: torch.device,
        copier: Copier,
        *,
        streamed: Container[int] = (),
        limit: int = 0,
    ) -> None:
        self.layout = layout
        self.trained = len(layout.trained.specs)
        self._streamed = streamed
        self.params = tuple(params)
        self.locals: tuple[Tensor, ...] = tuple(map(local_of, params))
        self._sharded = frozenset(number for number, param in enumerate(params) if is_dtensor(param))
        # Weak references make `torch.utils.swap_tensors` refuse these: it would take the local tensor away.
        self._pins = [weakref.ref(params[number]) for number in self._sharded]
        self.index = {param: number for number, param in enumerate(self.params)}
        self.units = Units(layout, streamed)
        self._unit_of_flat = [self.units[flat.unit] for flat in layout.flats]
        self.home = self.device = device
        self.flats = [torch.empty(0, device="cpu")] * len(layout.flats)
        self._versions: list[int] = [0] * len(self.params)
        self._strides: list[tuple[int, ...]] = [()] * len(self.params)
        self._tensors: list[int] = [0] * len(self.params)
        self._kinds = [type(param) for param in self.params]
        self._guards: list[type[Tensor]] = list(self._kinds)
        self._watched: list[type[Tensor]] = list(self._kinds)
        self._data: dict[int, tuple[Tensor, int]] = {}
        self._flat_of_storage: dict[int, int] = {}
        self._known: set[nn.Parameter] = set()
        self._bytes = 0
        self.peak_bytes = 0
        self._unit_memory = UnitMemory(device, copier, limit)
        self.tiles: dict[int, nn.Parameter] = {
            one.index: nn.Parameter(torch.empty(0, dtype=layout.flats[one.flat].dtype, device=device))
            for one in layout.slices
            if one.is_tile
        }
        self._memory: dict[int, Tensor] = {}
        # Of streamed slices: their memory on the other device, without bytes now, and what points into it.
        self._elsewhere: dict[int, tuple[Tensor, list[Tensor]]] = {}

    @property
    def is_parked(self) -> bool:
        """Whether the model was moved to the CPU; see [Note: a parked model]."""
        return self.device != self.home

    @torch.no_grad()
    def make_dense(self, flat: int) -> list[int]:
        """Gives parameters with holes (slices) memory of their own.

        Returns:
            The numbers of the parameters that had no holes.
        """
        dense = []
        for number in self.layout.flats[flat].params:
            param = self.locals[number]
            if is_dense(param):
                dense.append(number)
            else:
                repoint(param, param.data.contiguous())
        return dense

    @torch.no_grad()
    def attach(self, flat: int, *, with_values: bool = True, owned: Container[Tensor] = ()) -> None:
        """Moves the parameters of a flat parameter, whose masters have been made, into one tensor of its dtype.

        Args:
            flat: the index of the flat parameter.
            with_values: False leaves the values of the parameters undefined.
            owned: the parameters whose memory is malloc's and belongs to them alone, see `move_values`.
        """
        info = self.layout.flats[flat]
        is_tiled = self.layout.tile_of(flat) > 0  # too large for the device
        device = CPU if is_tiled else self.device
        self._count(flat, self.layout.padded_numel(flat) * info.dtype.itemsize)
        memory = torch.empty(self.layout.padded_numel(flat), dtype=info.dtype, device=device)
        if is_tiled:
            self._attach_tiles(flat)
        end = 0
        views = []
        for number, offset in zip(info.params, info.offsets, strict=True):
            param = self.locals[number]
            memory[end:offset] = 0  # kernels compute the gaps too
            end = offset + param.numel()
            self._strides[number] = param.stride()
            self._tensors[number] = self.params[number]._cdata
            views.append(self._view_for(number, memory[offset:end]))
            if with_values and device == CPU and self.params[number] in owned:
                move_values(views[-1], param)
            elif with_values:
                views[-1].copy_(param)
        memory[end:] = 0
        finish_queue(device)  # the parameters' old memory is freed now, and another stream may still use it
        for number, view in zip(info.params, views, strict=True):
            repoint(self.params[number], view)
            self._versions[number] = self._version_now(number)
        self.flats[flat] = memory
        if flat in self._streamed:
            self._flat_of_storage[memory.untyped_storage()._cdata] = flat

    def flattened(self, number: int, tensor: Tensor) -> Tensor:
        """The elements of a tensor with a parameter's shape, in the order of its flat parameter: a view if they are.

        That order stays while the parameter is pointed at memory of other strides (`p.data = x`).
        """
        return flattened(_with_strides(tensor, self._strides[number]))

    def shaped(self, number: int, values: Tensor) -> Tensor:
        """The inverse of `flattened`: a view of `values`, shape (numel,), with the shape of a parameter."""
        return values.as_strided(self.locals[number].shape, self._strides[number], values.storage_offset())

    def _view_for(self, number: int, values: Tensor) -> Tensor:
        """`values`, a range of a flat parameter, in the shape of a parameter; see [Note: storages]."""
        if not self.streams(number):  # a storage of its own over the same memory
            own = torch_private.from_dlpack(torch_private.to_dlpack(values)) if values.numel() else None
            values = torch.empty_like(values) if own is None else own
        return self.shaped(number, values)

    def _attach_tiles(self, flat: int) -> None:
        columns = self.params[self.layout.flats[flat].params[0]].shape[1]
        for one in self.layout.slices:
            if one.is_tile and one.flat == flat:
                memory = torch.empty(one.numel, dtype=self.layout.flats[flat].dtype, device=self.device)
                self._memory[one.index] = memory
                self.tiles[one.index].data = memory.view(-1, columns)
                memory.untyped_storage().resize_(0)

    def tiles_of(self, number: int) -> list[tuple[int, nn.Parameter]]:
        """The first element and the leaf of each tile of a parameter; empty if it is not tiled."""
        flat, slices = self.layout.locations[number][0], self.layout.slices
        return [(slices[index].start, leaf) for index, leaf in self.tiles.items() if slices[index].flat == flat]

    def memory_of(self, index: int) -> Tensor:
        """The memory of a slice of the layout, shape (numel,)."""
        return self.flats[index] if index < len(self.flats) else self._memory[index]

    # Guards; see [Note: guarded parameters] in guard.py.

    def guard_with(self, class_for: Callable[..., type[Tensor]]) -> None:
        """Guards parameters from now on.

        Args:
            class_for: makes their classes; see `Guards.class_for`.
        """
        kinds = [(kind, self.streams(number)) for number, kind in enumerate(self._kinds)]
        self._guards = [class_for(kind, streams=streams) for kind, streams in kinds]
        self._watched = [class_for(kind, streams=streams, runs=True) for kind, streams in kinds]
        self.guard(range(len(self.params)))

    def guard(self, numbers: Iterable[int]) -> None:
        """Makes each use of these parameters be seen, because their unit does not run any more."""
        for number in numbers:
            self.params[number].__class__ = self._guards[number]  # type: ignore[assignment]

    def watch(self, numbers: Iterable[int]) -> None:
        """Makes only `p.data` of these parameters be seen, because their unit runs."""
        for number in numbers:
            self.params[number].__class__ = self._watched[number]  # type: ignore[assignment]

    def stop_guarding(self) -> None:
        """Gives all parameters their own classes back, for good."""
        self.guard_with(lambda kind, **_: kind)

    def number_of(self, tensor: Any) -> int | None:
        """The number of a held parameter; None of any other tensor."""
        return self.index.get(tensor)

    def streams(self, number: int) -> bool:
        """Whether the memory of a parameter comes and goes."""
        return self.layout.locations[number][0] in self._streamed

    def flat_at(self, tensor: Tensor) -> int | None:
        """The flat parameter in whose storage a tensor lies, if it is streamed; else None.

        Raises:
            ReleasedParameterError: if the tensor is a view from before the model was moved.
        """
        tensor = local_of(tensor)
        with torch_private.DisableTorchFunctionSubclass():
            if not self._flat_of_storage or tensor.layout is not torch.strided or tensor.device.type == "meta":
                return None
            try:
                found = self._flat_of_storage.get(tensor.untyped_storage()._cdata)
            except (RuntimeError, NotImplementedError):  # a tensor without storage
                return None
        if found is not None and tensor.device != self.flats[found].device:
            raise ReleasedParameterError(
                f"a view of a streamed parameter was taken on {tensor.device}, and the model was moved to "
                f"{self.device}: take it anew"
            )
        return found

    def data_of(self, number: int) -> Tensor:
        """What `p.data` gives: the same memory with another version counter, as in torch. Writes to it are noticed."""
        with torch_private.DisableTorchFunctionSubclass():
            if number not in self._data:
                alias = _DATA.__get__(self.params[number])
                self._data[number] = (alias, alias._version)
            return self._data[number][0].detach()

    @torch.no_grad()
    def repoint(self, number: int, value: Tensor) -> None:
        """Does `p.data = value`: the parameter lies there until the next step, which copies the values back."""
        with torch_private.DisableTorchFunctionSubclass():
            _DATA.__set__(self.params[number], value)
        self._data.pop(number, None)

    def version_of(self, number: int) -> int:
        """The version of a parameter, which grows with each write. It is known without memory, too."""
        with torch_private.DisableTorchFunctionSubclass():
            return self._version_now(number) if self._is_here(number) else self._versions[number]

    def _version_now(self, number: int) -> int:
        """The version of a parameter that has memory now. Called with guards off, because it uses the tensor."""
        version = self.params[number]._version
        return version + self.locals[number]._version if number in self._sharded else version

    def _is_here(self, number: int) -> bool:
        """Whether a parameter has memory with its values."""
        flat = self.layout.locations[number][0]
        return flat not in self._streamed or self._unit_of_flat[flat].is_here

    def allocate(self, unit: Unit) -> DeviceEvent:
        """Gives a unit, which was freed, memory again. Its values are undefined.

        Returns:
            The event after which the memory may be written.
        """
        # A tiled weight as a whole is never on the device, and a parked model gets memory only for a moment.
        shares = not self.is_parked and all(self._counts(one.index) for one in unit.slices)
        ready = self._unit_memory.give(unit, self._memory_of_unit(unit), shares=shares)
        self._note_peak()
        return ready

    def arrange(self) -> None:
        """Makes units that never have memory at the same time share a buffer from now on. Called between two steps."""
        if not self.is_parked:
            self._unit_memory.arrange()
            self._note_peak()

    def free_spares(self) -> None:
        """Gives spare memory back to the system."""
        self._unit_memory.free_spare()

    def restore_versions(self, unit: Unit) -> None:
        """Gives the parameters of a unit, whose memory has its values again, the versions that they had."""
        self._set_versions(unit.streamed, [self._versions[number] for number in unit.streamed])

    def free(self, unit: Unit) -> DeviceEvent:
        """Takes the memory of a unit away. Its values are kept in a store.

        Returns:
            The event of its last use.
        """
        self._hide_versions(unit.streamed)
        return self._unit_memory.take(unit, self._memory_of_unit(unit))

    def free_attached(self, flat: int) -> None:
        """Takes the memory away that a flat parameter got from `attach`."""
        self._hide_versions(self.layout.flats[flat].params)
        memory = self.flats[flat]
        self._count(flat, -memory.nbytes)
        strip(memory)

    def _memory_of_unit(self, unit: Unit) -> list[Tensor]:
        return [self.memory_of(one.index) for one in unit.slices]

    def _hide_versions(self, numbers: Sequence[int]) -> None:
        self._set_versions(numbers, [NO_VERSION] * len(numbers))

    def _set_versions(self, numbers: Sequence[int], versions: Sequence[int]) -> None:
        params = tuple(self.params[n] for n in numbers)
        own = [
            self.locals[n]._version if n in self._sharded and version != NO_VERSION else 0
            for n, version in zip(numbers, versions, strict=True)
        ]
        torch_private.set_version_counters(params, tuple(v - of for v, of in zip(versions, own, strict=True)))

    @torch.no_grad()
    def become_resident(self) -> None:
        """Gives streamed parameters, all of which are on the device for good, storages of their own there."""
        streamed, self._streamed = self._streamed, ()
        self._flat_of_storage.clear()
        for flat, memory in zip(self.layout.flats, self.flats, strict=True):
            for number, offset in zip(flat.params, flat.offsets, strict=True) if flat.index in streamed else ():
                local = self.locals[number]
                repoint(self.params[number], self._view_for(number, memory[offset : offset + local.numel()]))
        for param in self.params:
            if param.device != self.device:  # it was tiled
                param.data = param.data.to(self.device)

    # A parked model.

    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        """Moves all parameters to the CPU, or home. Streamed ones have to be released. If it raises, nothing has moved.

        Raises:
            ConfigError: if some are DTensors.
        """
        for number in sorted(self._sharded):
            raise ConfigError(
                f"{self.layout.specs[number].name} is a DTensor, whose mesh is on {self.home}: a model with tensor "
                f"parallelism stays there, so leave out the call that moves it to {device}"
            )
        with torch_private.DisableTorchFunctionSubclass():
            slices = [one.index for one in self.layout.slices if one.is_tile or not self.layout.tile_of(one.flat)]
            self._take_memory({index: self._memory_at(index, device) for index in slices}, device)
        self._unit_memory.free_spare()

    def _memory_at(self, index: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Memory for a slice on another device, and the tensors that will point into it.

        It has the slice's values if the slice has memory now.
        """
        if index in self._elsewhere:
            return self._elsewhere[index]
        here = self.memory_of(index)
        memory = torch.empty_like(here, device=device)
        if index in self._memory:
            views = [memory.view(self.tiles[index].shape)]
        else:
            flat = self.layout.flats[index]
            ranges = zip(flat.params, flat.offsets, strict=True)
            views = [self._view_for(n, memory[start : start + self.locals[n].numel()]) for n, start in ranges]
        if self.layout.slices[index].flat in self._streamed:
            strip(memory)
        else:
            memory.copy_(here)
        return memory, views

    @uninterrupted
    def _take_memory(self, moved: Mapping[int, tuple[Tensor, list[Tensor]]], device: torch.device) -> None:
        for index, (memory, views) in moved.items():
            is_tile = index in self._memory
            leaves = [self.tiles[index]] if is_tile else [self.params[n] for n in self.layout.flats[index].params]
            streams = self.layout.slices[index].flat in self._streamed
            if streams:
                self._elsewhere[index] = (self.memory_of(index), [_DATA.__get__(leaf) for leaf in leaves])
            for leaf, view in zip(leaves, views, strict=True):
                _DATA.__set__(leaf, view)
            if is_tile:
                self._memory[index] = memory
            else:
                self.flats[index] = memory
                if streams:
                    self._flat_of_storage[memory.untyped_storage()._cdata] = index
        self.device = device
        self._data.clear()
        resident = [flat for index, flat in enumerate(self.flats) if index not in self._streamed]
        self._bytes = 0 if self.is_parked else sum(flat.numel() * flat.element_size() for flat in resident)

    def _count(self, index: int, change: int) -> None:
        if not self.is_parked and self._counts(index):
            self._bytes += change
            self._note_peak()

    def _counts(self, index: int) -> bool:
        """Whether a slice takes memory of the device. A tiled weight as a whole never does, since it is in RAM."""
        return index >= len(self.flats) or not self.layout.tile_of(index)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._bytes + self._unit_memory.nbytes)

    @torch.no_grad()
    def return_repointed(self, numbers: Iterable[int] | None = None) -> None:
        """Moves parameters that were pointed elsewhere (`p.data = x`) back into their flat parameter.

        The values of `x` are copied there, and count as written by the user.

        Args:
            numbers: the parameters to look at; None: all.

        Raises:
            ConfigError: if one has another shape, dtype or device now, since it was moved or cast.
        """
        with torch_private.DisableTorchFunctionSubclass():
            for number in range(len(self.params)) if numbers is None else numbers:
                param = self.locals[number]
                flat, offset = self.layout.locations[number]
                if self._is_swapped(number) or not self._is_here(number) or not param.numel():
                    continue
                memory = self.flats[flat]
                is_there = param.data_ptr() == memory.data_ptr() + offset * memory.element_size()
                spec = self.layout.specs[number]
                is_whole = param.dtype is memory.dtype and param.numel() == spec.numel
                if is_there and is_whole and param.stride() == self._strides[number]:
                    continue
                if (param.numel(), param.dtype, param.device) != (spec.numel, memory.dtype, memory.device):
                    raise ConfigError(
                        f"{spec.name} was moved, cast or replaced by another shape after OffloadZero took the model "
                        "(model.to(), .float(), p.data = ...): do that before, or write into it with p.copy_() under "
                        "torch.no_grad()"
                    )
                values = _DATA.__get__(param)
                values = values.clone() if is_there else values  # p.data = p.data.t()
                _DATA.__set__(param, self._view_for(number, memory[offset : offset + spec.numel]))
                param.copy_(values)
                self._data.pop(number, None)

    def remember(self, model: nn.Module) -> None:
        """Records which parameters `model` has now, for `require_unchanged`."""
        self._known = set(model.parameters())

    def _is_swapped(self, number: int) -> bool:
        """Whether `torch.utils.swap_tensors` replaced the tensor of a parameter.

        Graphs from before refer to the old tensor.
        """
        with torch_private.DisableTorchFunctionSubclass():
            return self.params[number]._cdata != self._tensors[number]

    def require_unchanged(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        """Requires that the model has the parameters that it had when it was taken.

        Args:
            model: the model.
            groups: the optimizer's param_groups.

        Raises:
            ConfigError: if a parameter was replaced, added or unfrozen since then, so that a gradient would never be
                used.
        """
        for number, spec in enumerate(self.layout.specs):
            if self._is_swapped(number):
                raise ConfigError(
                    f"{spec.name} was swapped with another tensor after OffloadZero took the model: write into it with "
                    "p.copy_() under torch.no_grad() instead of swap_tensors"
                )
        present = set(model.parameters())
        for param, spec in zip(self.params, self.layout.specs, strict=True):
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
        for param in (param for group in groups for param in group["params"]):
            if self.index.get(param, self.trained) >= self.trained and param.grad is not None:
                name = next((name for name, other in model.named_parameters() if other is param), "a parameter")
                raise ConfigError(
                    f"{name} was frozen when OffloadZero took the model, and has no states: unfreeze it before, "
                    "and freeze it again afterwards if it is to be trained only later; or commit, and resume with it "
                    "unfrozen"
                )

    def bump_versions(self, numbers: Iterable[int]) -> None:
        """Increases the versions of parameters to which this library wrote new values, so that autograd knows."""
        for number in numbers:
            if self._is_here(number):
                torch.autograd.graph.increment_version(self.params[number])
            else:
                self._versions[number] += 1  # the parameter gets it when its memory is back
        self.forget_writes(numbers)

    def forget_writes(self, numbers: Iterable[int]) -> None:
        """Forgets what others wrote to these parameters until now: `find_outside_writes` finds later writes only."""
        for number in numbers:
            for _, leaf in self.tiles_of(number):
                torch.autograd.graph.increment_version(leaf)
            if number in self._data:
                alias = self._data[number][0]
                self._data[number] = (alias, alias._version)
            if self._is_here(number):
                with torch_private.DisableTorchFunctionSubclass():
                    self._versions[number] = self._version_now(number)

    def find_outside_writes(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Finds the parameters to which others wrote (`load_state_dict`, `p.copy_`), among those that have memory now.

        Args:
            numbers: the parameters to look at; None: all.
        """
        numbers = range(len(self.params)) if numbers is None else numbers
        with torch_private.DisableTorchFunctionSubclass():
            here = [number for number in numbers if self._is_here(number)]
            return [n for n in here if self._version_now(n) != self._versions[n] or self._data_is_written(n)]

    def _data_is_written(self, number: int) -> bool:
        if number not in self._data:
            return False
        alias, version = self._data[number]
        return alias._version != version

    def flat_of(self, number: int) -> int:
        """The index of the flat parameter that a parameter lies in."""
        return self.layout.locations[number][0]

    def unit_of(self, number: int) -> Unit:
        """The unit of a parameter."""
        return self._unit_of_flat[self.flat_of(number)]
