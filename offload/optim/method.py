"""A method of the optimizers that were taken, beside their step: what it makes of every parameter and its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from offload.errors import ConfigError
from offload.layout import Chunk, Layout, Segment, part_of, segments
from offload.native import Task
from offload.optim.rule import Progress, Rule, StepKind, like_of, spans_of


class MethodCall:
    """One call of a method, for the param groups whose optimizer has it. Making it changes nothing.

    Args:
        name: the method's.
        rules: that of each param group.
        groups: the param groups.
        layout: of the trained parameters.
        progress: of each parameter, before the call.

    Attributes:
        name: see above.
        keys: for each parameter that it goes through, by number: what decides how it goes on.
        changes: by key: the progress after the call, and the options of the group that change.

    Raises:
        ConfigError: no optimizer has the method, it cannot run on pieces of parameters, or it raises.
    """

    def __init__(
        self,
        name: str,
        rules: Sequence[Rule],
        groups: Sequence[Mapping[str, Any]],
        layout: Layout,
        progress: Sequence[Progress],
    ) -> None:
        if not any(name in rule.methods for rule in rules):
            known = sorted({one for rule in rules for one in rule.methods})
            has = f"it has {', '.join(known)}" if known else "it has none beside step()"
            raise ConfigError(
                f"apply({name!r}): the class of the optimizer that was taken has no such method of its own; {has}"
            )
        self.name = name
        self._rules, self._groups, self._layout = rules, groups, layout
        numbers = [number for number, group in enumerate(layout.groups) if name in rules[group].methods]
        self.keys: dict[int, StepKind] = {
            number: StepKind(layout.groups[number], progress[number], like_of(rules, layout.specs[number]))
            for number in numbers
        }
        for group, befores in self._befores.items():
            rules[group].methods[name].try_out(groups[group], befores)
        # Each kind once, in the order of the parameters: alike on all ranks.
        self.changes: dict[StepKind, tuple[Progress, dict[str, Any]]] = {
            kind: rules[kind.group].methods[name].advance(groups[kind.group], kind.before, kind.like)
            for kind in dict.fromkeys(self.keys.values())
        }

    @cached_property
    def _befores(self) -> dict[int, list[Progress]]:
        """Each progress in each group once."""
        found: dict[int, list[Progress]] = {}
        for group, before in dict.fromkeys((kind.group, kind.before) for kind in self.keys.values()):
            found.setdefault(group, []).append(before)
        return found

    @property
    def flats(self) -> list[int]:
        """The flat parameters that it changes, on all ranks."""
        specs, locations = self._layout.specs, self._layout.locations
        return sorted({locations[number][0] for number in self.keys if specs[number].numel})

    def runs(self, chunk: Chunk) -> list[Segment[StepKind]]:
        """The elements of a chunk that it goes through, with what they have in common."""
        return segments(chunk, self.keys.get)

    def task(self, chunk: Chunk, run: Segment[StepKind], arrays: Sequence[Tensor]) -> Task:
        """What goes through one of `runs`, for `Kernels.run`.

        Args:
            chunk: the chunk.
            run: the run.
            arrays: of the chunk: the master and its states, each of shape (chunk.numel,), or (blocks,).
        """
        group, before, _ = run.key
        blocks = self._layout.flats[chunk.flat].blocks
        views = [part_of(array, block, run.start, run.stop) for array, block in zip(arrays, blocks, strict=True)]
        method = self._rules[group].methods[self.name]
        return method.task(self._groups[group], before, views, spans_of(self._layout, chunk, run.start, run.stop))
