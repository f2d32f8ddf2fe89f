"""The weights of a held model, handed over tensor by tensor to what generates with them, or writes them.

The units come in the order in which the store has them. Each is gathered while its tensors are handed over, each of
which is a copy that is made when it is asked for: what is in a unit's own memory becomes another unit's.

[Note: changed after]
`changed_after` of a parameter is the number of a step after whose end its value may have changed: a step that makes
number 5 changes it after 4, and so does a write between these two. So a reader who has the values of the end of step
`since` lacks those of the parameters with `changed_after >= since`. A write between the end of a step and the hand-over
is handed over twice. What goes back to a commit counts as changed after the newest step that there was, since a reader
may have the values of that one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload import torch_private
from offload.errors import ConfigError
from offload.model.flat_param import FlatParameters
from offload.model.inner import is_wrapper, kind_of, leaves_of, rebuilt
from offload.model.merged import Merger
from offload.model.state_dict import Access
from offload.model.unit import Unit
from offload.model.units import encloses
from offload.ranks.tensor_parallel import is_dtensor
from offload.run import Owner


class Changes:
    """When the parameters of a model changed last; see [Note: changed after].

    Args:
        parameters: those that are held.
        params: all of the model.
        step: at which the run begins. What changed before it is not known.

    Attributes:
        newest: the last step that there was, also if the run has gone back since then.
    """

    def __init__(self, parameters: FlatParameters, params: Iterable[Tensor], step: int) -> None:
        self._parameters = parameters
        self.newest = step
        for one in parameters.held:
            one.changed_after = step - 1
        others = (param for param in params if not parameters.numbers_of(param))
        self._others = {param: _Seen(_version_of(param), _memory_of(param), step - 1) for param in others}
        self._moves = parameters.moves

    def step_ends(self, numbers: Iterable[int], step: int) -> None:
        """Called when a step was made of trained parameters.

        Args:
            numbers: the parameters.
            step: the number of the step.
        """
        for number in numbers:
            one = self._parameters.held[number]
            one.changed_after = max(one.changed_after, step - 1)
        self.newest = max(self.newest, step)

    def all_changed(self) -> None:
        """Called when all trained parameters, and others that a commit has, got other values."""
        for one in self._parameters.held:
            one.changed_after = self.newest

    def of(self, param: Tensor, step: int) -> int:
        """After which step a parameter of the model changed last.

        Args:
            param: the parameter.
            step: the step now.
        """
        if numbers := self._parameters.numbers_of(param):
            return max(self._parameters.held[number].changed_after for number in numbers)
        if self._moves != self._parameters.moves:  # which gives others new memory, with the same values
            self._moves = self._parameters.moves
            self._others = {other: seen._replace(memory=_memory_of(other)) for other, seen in self._others.items()}
        seen, version, memory = self._others[param], _version_of(param), _memory_of(param)
        if seen.version != version or [one.cdata for one in seen.memory] != [one.cdata for one in memory]:
            seen = self._others[param] = _Seen(version, memory, max(seen.after, step))
        return seen.after


class _Seen(NamedTuple):
    """What is known of a parameter that is not held.

    Attributes:
        version: when it was looked at last.
        memory: where its values were then, which `p.data = x` changes without a new version. While a storage is known
            here, no other one has its address.
        after: see [Note: changed after].
    """

    version: int
    memory: Sequence[StorageWeakRef]
    after: int


def _memory_of(param: Tensor) -> list[StorageWeakRef]:
    with torch_private.PastSubclasses():
        plain = (leaf for leaf in leaves_of(param) if leaf.layout is torch.strided)
        return [StorageWeakRef(leaf.untyped_storage()) for leaf in plain]


def _version_of(param: Tensor) -> int:
    with torch_private.PastSubclasses():
        return param._version + sum(leaf._version for leaf in leaves_of(param) if leaf is not param)


@dataclass(frozen=True)
class Part:
    """What is handed over together.

    Attributes:
        unit: at whose place in the order it comes.
        params: what has to be there meanwhile.
        names: of its tensors, as far as they are known before it is there.
        tensors: makes copies of the tensors, with their names, one at a time.
    """

    unit: Unit
    params: Sequence[Tensor]
    names: Sequence[str]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


class Weights:
    """Hands the weights of a held model over.

    Args:
        model: the model.
        parameters: those that are held.
        unit_of: the unit of each parameter of the model.
        access: gathers parameters.
        owner: the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: FlatParameters,
        unit_of: Mapping[Tensor, Unit],
        access: Access,
        owner: Owner,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._unit_of = unit_of
        self._access = access
        self._owner = owner

    def parts(self, is_wanted: Callable[[Tensor], bool], *, merged: bool) -> list[Part]:
        """What is to be handed over, in order. Nothing is read.

        Args:
            is_wanted: whether a parameter is. Buffers are in any case.
            merged: whether adapters of peft are merged.

        Raises:
            ConfigError: adapters are to be merged, and the model has none, or peft refuses; or the model has a
                parameter that it did not have when it was taken.
        """
        self._require_known()
        parts = []
        merger = Merger(self._model) if merged else None
        modules = self._model.named_modules(remove_duplicate=False) if merger is None else merger.others
        for prefix, module in modules:
            own = {name: param for name, param in module._parameters.items() if param is not None}
            wanted = [name for name, param in own.items() if is_wanted(param)]
            buffers = _buffers(module)
            if wanted or buffers:
                params = list(own.values()) if wanted else []
                names = [_join(prefix, name) for name in (*wanted, *buffers)]
                unit = self._unit_of[params[0]] if params else self._unit_at(prefix)
                parts.append(Part(unit, params, names, partial(_copies, prefix, module, own.keys() - wanted)))
        parts += (
            Part(self._unit_of[group.params[0]], group.params, group.paths, group.merged)
            for group in (merger.groups if merger is not None else ())
            if any(map(is_wanted, group.params))
        )
        order = {name: number for number, name in enumerate(self._parameters.units)}
        return sorted(parts, key=lambda part: order[part.unit.name])

    def _require_known(self) -> None:
        """Requires that the model has no parameters beside those that it had when it was taken."""
        added = next((name for name, param in self._model.named_parameters() if param not in self._unit_of), None)
        if added is not None:
            raise ConfigError(
                f"weights() hands over the parameters that OffloadZero took, and {added} was added to the model after "
                "that, or replaced: add modules and parameters before, or make a state_dict() of the model"
            )

    def _unit_at(self, path: str) -> Unit:
        """The innermost unit around a module."""
        names = [name for name in self._parameters.units if encloses(name, path)]
        return self._parameters.units[max(names, key=len, default="")]

    def hand_over(self, parts: Sequence[Part], step: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and tensors of parts.

        Args:
            parts: in order.
            step: the step whose values they are.

        Raises:
            ConfigError: another step was made meanwhile.
        """
        for unit, group in groupby(parts, key=lambda part: part.unit):
            those = list(group)
            own = [param for part in those for param in part.params if self._unit_of[param] is unit]
            with self._access.gathered(own, writable=False):
                for part in those:
                    with self._access.gathered(part.params, writable=False):
                        for name, tensor in part.tensors():
                            self._require_step(step)
                            yield name, tensor
                            del tensor

    def _require_step(self, step: int) -> None:
        if (now := self._owner.step()) != step:
            raise ConfigError(
                f"weights() hands over the values of step {step}, and step {now} was made before it had ended: take "
                "all of its tensors before the next step()"
            )


def _buffers(module: nn.Module) -> list[str]:
    """The names of the buffers that a state_dict has."""
    kept = (name for name, buffer in module._buffers.items() if buffer is not None)
    return [name for name in kept if name not in module._non_persistent_buffers_set]


def _copies(prefix: str, module: nn.Module, left_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Makes copies of what a module itself saves, but for these parameters of it.

    A quantised layer saves more than its parameters: "weight.absmax", "SCB".
    """
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, "", False)
    for name in list(found):
        value = found.pop(name)
        if isinstance(value, Tensor) and not any(encloses(one, name) for one in left_out):
            yield _join(prefix, name), copied(value)


def copied(value: Any) -> Tensor:
    """A copy of a tensor on its device, which nobody watches."""
    with torch.no_grad():
        if is_wrapper(kind_of(value)) and not is_dtensor(value):
            made: Tensor = rebuilt(value, lambda leaf: leaf.detach().clone())
            return made
        copy: Tensor = value.detach().clone()
        return copy


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
