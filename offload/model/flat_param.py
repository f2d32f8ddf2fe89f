"""Flat parameters: all parameters of a unit of one dtype, end to end in one tensor on the model's device.

A parameter keeps its identity, name, shape and strides; its elements are a view of the flat parameter. So the new
values of a chunk go to the device in one copy, or the kernel writes them in place. The *flattened* view of a parameter
has shape (numel,) and the order of its memory, whatever its strides are.

[Note: storages]
A resident parameter has a storage of its own, over its range of the flat parameter's memory: a `state_dict` aliases it,
and whoever writes checkpoints takes a shared storage for tied parameters. Streamed parameters share the storage of the
flat parameter, whose memory is taken away and given back as units are released and fetched (unit_memory.py). So views
that autograd saved are valid again when the memory is back.

A storage without memory points to NaNs on the CPU, which nobody can take for values; on a device it has no bytes.

[Note: a parked model]
`model.cpu()` of a model that trains on a device of its own moves the flat parameters to the CPU, and `model.to(device)`
moves them back. Streamed ones have no memory then, so they only change places with others of their size, and take
their first storages again when they are back: views that autograd saved stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.devices.copies import Copier, DeviceEvent, finish_queue
from offload.errors import ConfigError, ReleasedParameterError
from offload.interrupts import uninterrupted
from offload.layout import Layout
from offload.model.dense import is_dense, move_values
from offload.model.held_param import DATA, NO_VERSION, HeldBeside, HeldParam, HeldWrapper, set_versions
from offload.model.inner import Inner, bring_along, inner_tensors, kind_of, leaves_of
from offload.model.unit import Unit, Units
from offload.model.unit_memory import UnitMemory, strip
from offload.optim.rule import Progress
from offload.ranks.tensor_parallel import local_of, repoint

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Streaming:
    """What of a model streams, and the device's memory that was planned for it.

    Attributes:
        flats: the flat parameters whose memory comes and goes.
        limit: how many bytes these may take on the device at once, but for uses that need more.
        staying: names of the units that stay there.
        in_ram: names of the tiled weights that are in RAM as a whole.
    """

    flats: Collection[int] = ()
    limit: int = 0
    staying: Container[str] = ()
    in_ram: Container[str] = ()


class FlatParameters:
    """The held parameters of a model, in the order of `layout.specs`: trained ones, and frozen ones that stream.

    Args:
        layout: of all of them.
        inners: their inner tensors, in that order.
        device: the device to train on.
        copier: copies between that device and RAM.
        streaming: which of them stream.

    Attributes:
        layout: of all of them.
        trained: how many of them are trained; these are the first ones.
        held: what is known of each of them.
        wrappers: what is known of each wrapper around some of them, by the wrapper.
        params: the tensors that others use: the model's parameters, or inner tensors of them.
        locals: the tensors whose memory the flat parameters are, see [Note: sharded parameters] in held_param.py.
        index: the number of each of `params`; of a wrapper the number of its first inner tensor.
        flats: one tensor for each flat parameter of the layout, on the model's device, filled by `flatten`.
        units: the units, by name.
        tiles: the tiles of each inner tensor, leaves of autograd, by the index of the layout's slice.
        home: the device to train on.
        device: where the parameters are now, which is the CPU if the model is parked.
        peak_bytes: the most bytes that all took at home, with what is kept for units to come.
        moves: how often they were moved to the CPU, or home.
    """

    def __init__(
        self,
        layout: Layout,
        inners: Sequence[Inner],
        device: torch.device,
        copier: Copier,
        streaming: Streaming = Streaming(),
    ) -> None:
        self.layout = layout
        self.trained = len(layout.trained.specs)
        self._streamed = streaming.flats
        self.units = Units(layout, streaming.flats, streaming.staying, streaming.in_ram)
        self.held = tuple(self._held(number, inner) for number, inner in enumerate(inners))
        self.params: tuple[Any, ...] = tuple(one.tensor for one in self.held)
        self.locals = tuple(one.local for one in self.held)
        self.index: dict[Tensor, int] = {param: number for number, param in enumerate(self.params)}
        self._numbers: dict[Tensor, list[int]] = {}  # of each parameter of the model
        for one in self.held:
            self._numbers.setdefault(one.param, []).append(one.number)
        self.wrappers: dict[Tensor, HeldWrapper] = {}
        self._wrapper_of: dict[int, HeldWrapper] = {}  # by the number of its first inner tensor
        self._beside: dict[Unit, list[HeldBeside]] = {}
        for param in self._numbers.keys() - self.index.keys():
            self._add_wrapper(param)
        self.home = self.device = device
        self.flats = [torch.empty(0, device="cpu")] * len(layout.flats)
        self._slice_of_storage: dict[int, int] = {}
        self._known: set[nn.Parameter] = set()
        self._bytes = 0
        self.peak_bytes = 0
        self.moves = 0
        self._unit_memory = UnitMemory(device, copier, streaming.limit)
        self.tiles: dict[int, Tensor] = {
            one.index: _leaf(inners[layout.flats[one.flat].params[0]], layout.flats[one.flat].dtype, device)
            for one in layout.slices
            if one.is_tile
        }
        self._memory: dict[int, Tensor] = {}
        # Of streamed slices: their memory on the other device, without bytes now, and what points into it.
        self._elsewhere: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def _held(self, number: int, inner: Inner) -> HeldParam:
        flat, offset = self.layout.locations[number]
        unit = self.units[self.layout.flats[flat].unit]
        return HeldParam(number, self.layout.specs[number], inner, unit, flat, offset, streams=flat in self._streamed)

    def _add_wrapper(self, param: Any) -> None:
        numbers = self._numbers[param]
        first = self.held[numbers[0]]
        self.index[param] = first.number
        inners = [self.locals[number] for number in numbers]
        self.wrappers[param] = wrapper = HeldWrapper(param, inners, streams=first.streams)
        self._wrapper_of[first.number] = wrapper
        self.guard_beside(first.unit, wrapper)

    def guard_beside(self, unit: Unit, one: HeldBeside) -> None:
        """Makes the class of a tensor change with a unit, as those of its parameters do."""
        self._beside.setdefault(unit, []).append(one)

    def wrapper_of(self, tensor: Any) -> HeldWrapper | None:
        """What is known of a wrapper around held inner tensors; None of any other tensor."""
        return self.wrappers.get(tensor) if self.wrappers else None

    def _wrappers_in(self, unit: Unit) -> Iterator[HeldWrapper]:
        return (one for one in self._beside.get(unit, ()) if isinstance(one, HeldWrapper))

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
    def flatten(self, flat: int, *, with_values: bool = True, owned: Container[Tensor] = ()) -> None:
        """Moves the parameters of a flat parameter, whose masters have been made, into one tensor of its dtype.

        Args:
            flat: the index of the flat parameter.
            with_values: False leaves the values of the parameters undefined.
            owned: the parameters whose memory is malloc's and belongs to them alone, see `move_values`.
        """
        info = self.layout.flats[flat]
        device = CPU if self._is_in_ram(flat) else self.device
        self._count(flat, self.layout.padded_numel(flat) * info.dtype.itemsize)
        memory = torch.empty(self.layout.padded_numel(flat), dtype=info.dtype, device=device)
        if self.layout.tile_of(flat):
            self._flatten_tiles(flat)
        end = 0
        views = []
        for number, offset in zip(info.params, info.offsets, strict=True):
            param = self.locals[number]
            memory[end:offset] = 0  # kernels compute the gaps too
            end = offset + param.numel()
            self.held[number].remember()
            views.append(self.held[number].view_for(memory[offset:end]))
            if with_values and device == CPU and self.params[number] in owned:
                move_values(views[-1], param)
            elif with_values:
                views[-1].copy_(param)
        memory[end:] = 0
        finish_queue(device)  # the parameters' old memory is freed now, and another stream may still use it
        for number, view in zip(info.params, views, strict=True):
            repoint(self.params[number], view)
            self.held[number].version = self.held[number].version_now
        self.flats[flat] = memory
        if flat in self._streamed:
            self._slice_of_storage[memory.untyped_storage()._cdata] = flat

    def _flatten_tiles(self, flat: int) -> None:
        row_shape = self.params[self.layout.flats[flat].params[0]].shape[1:]
        for one in self.layout.slices:
            if one.is_tile and one.flat == flat:
                memory = torch.empty(one.numel, dtype=self.layout.flats[flat].dtype, device=self.device)
                self._memory[one.index] = memory
                self.tiles[one.index].data = memory.view(-1, *row_shape)
                self._slice_of_storage[memory.untyped_storage()._cdata] = one.index
                memory.untyped_storage().resize_(0)

    def tiles_of(self, number: int) -> list[tuple[int, Any]]:
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
        for one in self.held:
            one.guard_with(class_for)
        for beside in self._beside.values():
            for other in beside:
                other.guard_with(class_for)

    def guard(self, unit: Unit) -> None:
        """Makes each use of the parameters of a unit be seen, because the unit does not run any more."""
        for number in unit.watched:
            self.held[number].guard()
        if unit in self._beside:
            for one in self._beside[unit]:
                one.guard()

    def watch(self, unit: Unit) -> None:
        """Makes only `p.data` of the parameters of a unit be seen, because the unit runs. Wrappers are plain then."""
        for number in unit.watched:
            self.held[number].watch()
        if unit in self._beside:
            for one in self._beside[unit]:
                one.watch()

    def stop_guarding(self) -> None:
        """Gives all parameters their own classes back, for good."""
        self.guard_with(lambda kind, **_: kind)

    def number_of(self, tensor: Any) -> int | None:
        """The number of a held parameter, or inner tensor; None of any other tensor."""
        return self.index.get(tensor)

    def numbers_of(self, param: Tensor) -> Sequence[int]:
        """The numbers of all inner tensors of a parameter of the model that are held."""
        return self._numbers.get(param, ())

    @property
    def streams_any(self) -> bool:
        """Whether any parameter streams."""
        return len(self._streamed) > 0

    @property
    def progress(self) -> list[Progress]:
        """What the optimizer knows of each trained parameter beside its arrays."""
        return [one.progress for one in self.held[: self.trained]]

    def flat_streams(self, flat: int) -> bool:
        """Whether the parameters of a flat parameter stream."""
        return flat in self._streamed

    def streams(self, number: int) -> bool:
        """Whether the memory of a parameter comes and goes."""
        return self.held[number].streams

    def slice_at(self, tensor: Tensor) -> int | None:
        """The slice of the layout, a streamed flat parameter or a tile, in whose storage a tensor lies; else None.

        Raises:
            ReleasedParameterError: if the tensor is a view from before the model was moved.
        """
        tensor = local_of(tensor)
        with torch_private.PastSubclasses():
            if not self._slice_of_storage or tensor.layout is not torch.strided or tensor.device.type == "meta":
                return None
            try:
                found = self._slice_of_storage.get(tensor.untyped_storage()._cdata)
            except (RuntimeError, NotImplementedError):  # a tensor without storage
                return None
        if found is not None and tensor.device != self.memory_of(found).device:
            raise ReleasedParameterError(
                f"a view of a streamed parameter was taken on {tensor.device}, and the model was moved to "
                f"{self.device}: take it anew"
            )
        return found

    def lies_in_streamed(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one that it is made of, lies in a streamed flat parameter."""
        return any(self.slice_at(leaf) is not None for leaf in leaves_of(tensor))

    def data_of(self, number: int) -> Tensor:
        """What `p.data` gives: the same memory with another version counter, as in torch. Writes to it are noticed."""
        return torch_private.past_subclasses(self.held[number].data)

    @torch.no_grad()
    def repoint(self, number: int, value: Tensor) -> None:
        """Does `p.data = value`: the parameter lies there until the next step, which copies the values back."""
        one = self.held[number]
        one.pointed += 1
        torch_private.past_subclasses(DATA.__set__, self.params[number], value)
        one.forget_data()

    @torch_private.goes_past_subclasses
    def version_of(self, number: int) -> int:
        """What `p._version` gives, which grows with each write. It is known without memory, too."""
        return self.held[number].own_version

    def allocate(self, unit: Unit) -> DeviceEvent:
        """Gives a unit, which was freed, memory again. Its values are undefined.

        Returns:
            The event after which the memory may be written.
        """
        # What another thread threw in may have cut `free` off before it took them.
        self._hide_versions(unit)
        # A tiled weight may be in RAM as a whole, and a parked model gets memory only for a moment.
        shares = not self.is_parked and all(self._counts(one.index) for one in unit.slices)
        ready = self._unit_memory.give(unit, self._memory_of_unit(unit), shares=shares)
        self._note_peak()
        return ready

    def arrange(self, staying: Container[Unit] = ()) -> None:
        """Makes units that never have memory at the same time share a buffer from now on. Called between two steps.

        Args:
            staying: units that keep the memory that they have.
        """
        if not self.is_parked:
            self._unit_memory.arrange(staying)
            self._note_peak()

    def free_spares(self) -> None:
        """Gives spare memory back to the system."""
        self._unit_memory.free_spare()

    def widen(self, limit: int | None) -> None:
        """Lets streamed units take more bytes of the device than was planned; None: as many as that again."""
        self._unit_memory.widen(limit)

    def return_versions(self, unit: Unit) -> None:
        """Gives the parameters of a unit, whose memory has its values again, the versions that they had."""
        set_versions((self.held[number] for number in unit.streamed), None)
        for wrapper in self._wrappers_in(unit):
            wrapper.return_version()

    def free(self, unit: Unit) -> DeviceEvent:
        """Takes the memory of a unit away. Its values are kept in a store.

        Returns:
            The event of its last use.
        """
        self._hide_versions(unit)
        return self._unit_memory.take(unit, self._memory_of_unit(unit))

    def _hide_versions(self, unit: Unit) -> None:
        set_versions((self.held[number] for number in unit.streamed), NO_VERSION)
        for wrapper in self._wrappers_in(unit):
            wrapper.hide_version()

    def free_flat(self, flat: int) -> None:
        """Takes the memory away that a flat parameter got from `flatten`."""
        info = self.layout.flats[flat]
        set_versions((self.held[number] for number in info.params), NO_VERSION)
        for wrapper in self._wrappers_in(self.units[info.unit]):
            wrapper.hide_version()
        memory = self.flats[flat]
        self._count(flat, -memory.nbytes)
        strip(memory)

    def _memory_of_unit(self, unit: Unit) -> list[Tensor]:
        return [self.memory_of(one.index) for one in unit.slices]

    @torch.no_grad()
    def become_resident(self) -> None:
        """Gives streamed parameters, all of which are on the device for good, storages of their own there."""
        streamed, self._streamed = self._streamed, ()
        self._slice_of_storage.clear()
        for one in (held for held in self.held if held.flat in streamed):
            one.streams = False
            memory = self.flats[one.flat][one.offset : one.offset + one.local.numel()]
            repoint(one.tensor, one.view_for(memory))
        for param in self.params:
            if param.device != self.device:  # it was tiled
                param.data = param.data.to(self.device)
        bring_along(inner_tensors(dict.fromkeys(one.param for one in self.held if one.is_inside)))
        for wrapper in self.wrappers.values():
            wrapper.return_version()

    # A parked model.

    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        """Moves all parameters to the CPU, or home. Streamed ones have to be released. If it raises, nothing has moved.

        Raises:
            ConfigError: if some are DTensors, or are made of several tensors.
        """
        for one in (held for held in self.held if len(self._numbers[held.param]) > 1):
            raise ConfigError(
                f"{one.spec.name} is a part of a {kind_of(one.param).__name__}, which stays on {self.home}: leave out "
                f"the call that moves the model to {device}, or move a copy of it"
            )
        for one in (held for held in self.held if held.is_sharded):
            raise ConfigError(
                f"{one.spec.name} is a DTensor, whose mesh is on {self.home}: a model with tensor "
                f"parallelism stays there, so leave out the call that moves it to {device}"
            )
        with torch_private.PastSubclasses():
            slices = [one.index for one in self.layout.slices if one.is_tile or not self._is_in_ram(one.flat)]
            self._take_memory({index: self._memory_at(index, device) for index in slices}, device)
        self.moves += 1
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
            views = [self.held[n].view_for(memory[start : start + self.locals[n].numel()]) for n, start in ranges]
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
                self._elsewhere[index] = (self.memory_of(index), [DATA.__get__(leaf) for leaf in leaves])
            for leaf, view in zip(leaves, views, strict=True):
                DATA.__set__(leaf, view)
            if is_tile:
                self._memory[index] = memory
            else:
                self.flats[index] = memory
            if streams:
                self._slice_of_storage[memory.untyped_storage()._cdata] = index
        self.device = device
        for one in self.held:
            one.forget_data()
        self._bytes = 0 if self.is_parked else self.resident_bytes

    def _count(self, index: int, change: int) -> None:
        if not self.is_parked and self._counts(index):
            self._bytes += change
            self._note_peak()

    def _counts(self, index: int) -> bool:
        """Whether a slice takes memory of the device."""
        return index >= len(self.flats) or not self._is_in_ram(index)

    def _is_in_ram(self, flat: int) -> bool:
        return self.units[self.layout.flats[flat].unit].is_in_ram

    @property
    def resident_bytes(self) -> int:
        """The bytes of those that do not stream."""
        resident = (flat for index, flat in enumerate(self.flats) if index not in self._streamed)
        return sum(flat.numel() * flat.element_size() for flat in resident)

    @property
    def nbytes(self) -> int:
        """The bytes that all take on the device now, with what is kept for units to come."""
        return self._bytes + self._unit_memory.nbytes

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    @torch.no_grad()
    def return_repointed(self, numbers: Iterable[int] | None = None) -> None:
        """Moves parameters that were pointed elsewhere (`p.data = x`) back into their flat parameter.

        The values of `x` are copied there, and count as written by the user.

        Args:
            numbers: the parameters to look at; None: all.

        Raises:
            ConfigError: if one has another shape, dtype or device now, since it was moved or cast.
        """
        with torch_private.PastSubclasses():
            moved = [one for one in self._held_of(numbers) if self._is_repointed(one)]
            if not moved:
                return
            # Others may lie in the memory that is written here (`a.data, b.data = b.data, a.data`).
            flats = [self.flats[index] for index in {one.flat for one in self.held if one.is_here}]
            lies = {one for one in self.held if self._is_repointed(one) and _lies_in(one.local, flats)}
            both = [*moved, *(one for one in lies if one not in moved)]
            values = [DATA.__get__(one.local) for one in both]
            values = [found.clone() if one in lies else found for one, found in zip(both, values, strict=True)]
            for one, found in zip(both, values, strict=True):
                memory = self.flats[one.flat]
                DATA.__set__(one.local, one.view_for(memory[one.offset : one.offset + one.spec.numel]))
                one.forget_data()
                # A graph may have saved the parameter since `p.data = x`, which moves no version in torch either.
                (one.local if one.is_sharded else one.data()).copy_(found)

    def _is_repointed(self, one: HeldParam) -> bool:
        """Whether a parameter that is here lies elsewhere than in its flat parameter.

        Raises:
            ConfigError: as from `return_repointed`.
        """
        param, spec = one.local, one.spec
        if one.is_swapped or not one.is_here or not param.numel():
            return False
        memory = self.flats[one.flat]
        is_there = param.data_ptr() == memory.data_ptr() + one.offset * memory.element_size()
        is_whole = param.dtype is memory.dtype and param.numel() == spec.numel
        if is_there and is_whole and param.stride() == one.strides:
            return False
        if (param.numel(), param.dtype, param.device) != (spec.numel, memory.dtype, memory.device):
            raise ConfigError(
                f"{spec.name} was moved, cast or replaced by another shape after OffloadZero took the model "
                "(model.to(), .float(), p.data = ...): do that before, or write into it with p.copy_() under "
                "torch.no_grad()"
            )
        return True

    def _held_of(self, numbers: Iterable[int] | None) -> Iterable[HeldParam]:
        return self.held if numbers is None else (self.held[number] for number in numbers)

    def remember(self, model: nn.Module) -> None:
        """Records which parameters `model` has now, for `require_unchanged`."""
        self._known = set(model.parameters())

    def require_unchanged(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        """Requires that the model has the parameters that it had when it was taken.

        Args:
            model: the model.
            groups: the optimizer's param_groups.

        Raises:
            ConfigError: if a parameter was replaced, added or unfrozen since then, so that a gradient would never be
                used; or if one was taken out of its param group, which would be trained as before.
        """
        with torch_private.PastSubclasses():
            swapped = [one.spec.name for one in self.held if one.is_swapped]
        if swapped:
            raise ConfigError(
                f"{swapped[0]} was swapped with another tensor after OffloadZero took the model: write into it with "
                "p.copy_() under torch.no_grad() instead of swap_tensors"
            )
        present = set(model.parameters())
        for one in self.held:
            if one.param not in present:
                raise ConfigError(
                    f"{one.spec.name} is no longer in the model: load with load_state_dict(..., assign=False), and "
                    "replace modules or parameters before OffloadZero takes the model"
                )
        for added in present - self._known:
            if added.grad is not None:
                name = next(name for name, param in model.named_parameters() if param is added)
                raise ConfigError(
                    f"{name} was added to the model after OffloadZero took it, and has no states: add modules and "
                    "parameters before, or drop its gradient (p.grad = None) before step() if something else trains it"
                )
        group_of: list[int | None] = [None] * self.trained
        for group_number, group in enumerate(groups):
            for param in group["params"]:
                number = self.index.get(param, self.trained)
                if number < self.trained:
                    group_of[number] = group_number
                elif param.grad is not None:
                    raise _untrained(param, group_number, model)
        for one, now, before in zip(self.held, group_of, self.layout.groups, strict=False):
            if now != before:
                where = "in none" if now is None else f"in param group {now}"
                raise ConfigError(
                    f"{one.spec.name} is {where}, and was in param group {before} when OffloadZero took the model: "
                    'leave each group\'s "params" as they were; to leave a parameter out of a step, set p.grad = None, '
                    "or call p.requires_grad_(False) before the forward; nothing was changed"
                )

    def bump_versions(self, numbers: Iterable[int]) -> None:
        """Increases the versions of parameters to which this library wrote new values, so that autograd knows."""
        for number in numbers:
            one = self.held[number]
            if one.is_here:
                torch.autograd.graph.increment_version(one.tensor)
            else:
                one.version += 1  # the parameter gets it when its memory is back
        self.forget_writes(numbers)

    def forget_writes(self, numbers: Iterable[int]) -> None:
        """Forgets what others wrote to these parameters until now: `find_outside_writes` finds later writes only."""
        for number in numbers:
            for _, leaf in self.tiles_of(number):
                torch.autograd.graph.increment_version(leaf)
        with torch_private.PastSubclasses():
            for number in numbers:
                self.held[number].forget_writes()

    @torch_private.goes_past_subclasses
    def find_outside_writes(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Finds the parameters to which others wrote (`load_state_dict`, `p.copy_`), among those that have memory now.

        Args:
            numbers: the parameters to look at; None: all.
        """
        if self.wrappers:
            numbers = range(len(self.held)) if numbers is None else tuple(numbers)
            for number in numbers:
                if number in self._wrapper_of:
                    self._wrapper_of[number].spread_writes()
        return [one.number for one in self._held_of(numbers) if one.is_here and one.is_written]

    def flat_of(self, number: int) -> int:
        """The index of the flat parameter that a parameter lies in."""
        return self.held[number].flat

    def unit_of(self, number: int) -> Unit:
        """The unit of a parameter."""
        return self.held[number].unit


def _untrained(param: Tensor, group: int, model: nn.Module) -> ConfigError:
    """The error for a parameter of a param group that has a gradient, and no states."""
    name = next((name for name, other in model.named_parameters() if other is param), None)
    if name is None:
        return ConfigError(
            f"param group {group} holds a parameter of shape {tuple(param.shape)} that is not in the model, and has no "
            "states: put it into the model before OffloadZero takes it, or give it to an optimizer of its own"
        )
    return ConfigError(
        f"{name} was frozen when OffloadZero took the model, and has no states: unfreeze it before, and freeze it "
        "again afterwards if it is to be trained only later; or commit, and resume with it unfrozen"
    )


def _leaf(inner: Inner, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tile of an inner tensor without memory. Integers, as codes are, cannot need a gradient."""
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty if inner.key else nn.Parameter(empty, requires_grad=dtype.is_floating_point)


def _lies_in(tensor: Tensor, flats: Iterable[Tensor]) -> bool:
    """Whether a tensor begins in the memory of one of these, which have memory."""
    there = (flat for flat in flats if flat.device == tensor.device)
    return any(0 <= tensor.data_ptr() - flat.data_ptr() < flat.numel() * flat.element_size() for flat in there)
