"""What an optimizer computes, as a rule: which arrays it keeps of each element, and what one step makes of them.

[Note: rules]
A rule is one param group's optimizer. It never sees the model: it steps *segments* of chunks, wherever those lie, in
any order and number. So nothing that pieces would share may change while it runs. What changes once a step, such as a
step count, is a parameter's `Progress`: a value that `advance` makes before anything else changes. A commit keeps it.

    advance    once a step for each (group, progress): the next progress; raises for a bad option
    scalars    once a step for each (group, progress, factor): what all segments of that key take
    bind       once for the arrays of a segment: gives what makes its task from the scalars

"Never stepped" is a progress of its own, `NEVER`, and not a count of zero with arrays of zeros: the first momentum of
SGD is its first gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.layout import Chunk, Layout, ParamSpec, StateKind, Whole, blocks_of, part_of
from offload.native import Kernels, Task
from offload.optim.on_device import MatrixMemory


class Scalar(NamedTuple):
    """One number of a parameter's state.

    Attributes:
        name: as the optimizer's `state[p]` names it.
        value: the number.
        dtype: that of the 0-dim tensor that holds it; None: it is a plain number.
    """

    name: str
    value: float | int | bool
    dtype: torch.dtype | None = None


class Progress(NamedTuple):
    """What is known of a parameter beside its arrays.

    Attributes:
        step: how many steps it has taken.
        scalars: the numbers of its state.
        arrays: the names of the arrays that its state has; the others come with a later step.
    """

    step: int = 0
    scalars: tuple[Scalar, ...] = ()
    arrays: tuple[str, ...] = ()


NEVER = Progress()


def scalars_of(progress: Progress) -> dict[str, Any]:
    """The numbers of a state, as the class has them. Tensors are new ones."""
    return {
        one.name: one.value if one.dtype is None else torch.tensor(one.value, dtype=one.dtype, device="cpu")
        for one in progress.scalars
    }


class Span(NamedTuple):
    """Elements of one parameter in the arrays of a segment.

    Attributes:
        start: where they begin in the arrays.
        numel: how many there are.
        whole: the parameter, or its slice that these elements are, if the rule is of whole ones.
        offset: where they begin in the parameter.
    """

    start: int
    numel: int
    whole: Whole | None = None
    offset: int = 0

    def seen(self, array: Tensor) -> Tensor:
        """A view of what an array of the segment, shape (n,), has of a whole parameter, in its shape."""
        assert self.whole is not None
        line, (shape, strides) = array[self.start : self.start + self.numel], (self.whole.shape, self.whole.strides)
        return line.as_strided(shape, strides) if strides else line.view(shape)

    def states(self, kinds: Sequence[StateKind], arrays: Sequence[Tensor]) -> list[Tensor]:
        """Views of the states of a whole parameter, each in its shape.

        Args:
            kinds: the states.
            arrays: theirs, without the master's.
        """
        assert self.whole is not None
        small, views = dict(self.whole.small), []
        for kind, block, array in zip(kinds, blocks_of(kinds)[1:], arrays, strict=True):
            if kind.name in small:
                line = part_of(array, block, self.start, self.start + self.numel)
                shape = small[kind.name]
                views.append(line[: math.prod(shape)].view(shape))
            else:
                views.append(self.seen(array))
        return views


class SegmentMemory(NamedTuple):
    """What a rule steps a segment in.

    Attributes:
        arrays: the master and those of the rule's `states`, in their order, each of shape (n,), or (blocks,).
        grad: shape (n,), fp32, bf16 or fp16.
        out: shape (n,): the parameters for compute, which get the rounded master.
        spans: where the segment's parameters lie. What is between them is a gap.
        current: shape (n,): the bf16 parameters before the step, if the master is split and has the low halves only;
            None: it is whole.
        matrices: where a rule of whole parameters steps matrices; None: where the arrays are. Tasks run in the context
            of its `steps`.
    """

    arrays: Sequence[Tensor]
    grad: Tensor
    out: Tensor
    spans: Sequence[Span]
    current: Tensor | None = None
    matrices: MatrixMemory | None = None


def spans_of(layout: Layout, chunk: Chunk, start: int, stop: int) -> list[Span]:
    """Where the parameters of a run of a chunk's elements lie in the arrays of that run.

    Args:
        layout: of all parameters.
        chunk: the chunk.
        start: the first element of the run, where a parameter begins.
        stop: the one after its last.
    """
    spans = []
    for piece in chunk.pieces:
        if start <= piece.chunk_offset < stop:
            whole = layout.specs[piece.param].whole
            step = piece.numel if whole is None else whole.part_numel
            spans += [
                Span(piece.chunk_offset - start + at, step, whole and whole.part, piece.param_offset + at)
                for at in range(0, piece.numel, step)
            ]
    return spans


ONE = (1,)
"""The shape of one element."""


class Kept(NamedTuple):
    """What a rule keeps of a parameter.

    Attributes:
        states: the arrays, in the order of their memory.
        small: by name, the shapes of those that have not the parameter's.
        like: the shape of a parameter that goes on from step to step as this one does.
        has_slices: whether slices of its first dimension may be stepped each by itself.
    """

    states: tuple[StateKind, ...]
    small: tuple[tuple[str, tuple[int, ...]], ...] = ()
    like: tuple[int, ...] = ONE
    has_slices: bool = False


class StepKind(NamedTuple):
    """What decides how a parameter goes on from step to step.

    Attributes:
        group: the number of its param group.
        before: its progress before the step.
        like: see `Kept`.
    """

    group: int
    before: Progress
    like: tuple[int, ...] = ONE


def like_of(rules: Sequence[Rule], spec: ParamSpec) -> tuple[int, ...]:
    """`Kept.like` of a trained parameter.

    Args:
        rules: that of each param group.
        spec: the parameter.
    """
    assert spec.group is not None
    return ONE if spec.whole is None else rules[spec.group].kept(spec.whole.shape).like


class Method(ABC):
    """A method of an optimizer's class beside its step, which goes through parameters and states.

    It runs on pieces, or on whole parameters, as the step does, and in the same way: `advance` says what becomes of
    what pieces would share.
    """

    @abstractmethod
    def try_out(self, group: Mapping[str, Any], befores: Collection[Progress]) -> None:
        """Tries the method out.

        Args:
            group: the param group.
            befores: the progress of its parameters.

        Raises:
            ConfigError: it cannot run on what the step runs on; it says why. Nothing was changed.
        """

    @abstractmethod
    def advance(
        self, group: Mapping[str, Any], before: Progress, like: tuple[int, ...] = ONE
    ) -> tuple[Progress, dict[str, Any]]:
        """The progress after the method, and the options of the group that it changes; see `Rule.advance`.

        Raises:
            ConfigError: the method raises. Nothing was changed.
        """

    @abstractmethod
    def task(self, group: Mapping[str, Any], before: Progress, arrays: Sequence[Tensor], spans: Sequence[Span]) -> Task:
        """What runs the method over one segment, for `Kernels.run`.

        Args:
            group: the param group, before the call.
            before: the progress before the call.
            arrays: as `SegmentMemory` has them.
            spans: where the segment's parameters lie.
        """


class Rule(ABC):
    """What one param group's optimizer computes; see [Note: rules].

    Attributes:
        name: that of the optimizer's class.
        states: the arrays that it keeps beside the master. A rule of whole parameters may keep others of each:
            see `kept`.
        initial: the progress of a parameter that was never stepped.
        splits_masters: whether it can step masters of which it has the low halves only.
        is_whole: whether it steps whole parameters only, all of whose elements are in one segment.
        can_try: whether what its task computes depends on nothing but the arrays and `scalars`, of which
            `scalar_bytes` can tell whether they are the same.
        can_be_late: whether a step with a gradient of zeros can be made later, from the options that `options_of` keeps
            of it: its kernel gives the same bits for each sign of a zero and each factor.
        has_same_bits: whether its kernels give the same bits on a device and on the CPU. Only then some parameters may
            be stepped there, and others here.
        methods: what else its class does with parameters and states, by the name of the method.
    """

    name: str
    states: tuple[StateKind, ...]
    initial: Progress = NEVER
    splits_masters: bool = False
    is_whole: bool = False
    can_try: bool = False
    can_be_late: bool = False
    has_same_bits: bool = False
    methods: Mapping[str, Method] = MappingProxyType({})

    @abstractmethod
    def require_sound(self, number: int, group: Mapping[str, Any]) -> None:
        """Checks the options of param group `number`.

        Raises:
            ConfigError: one is missing, out of range, or asks for other arrays than the rule has. Nothing was changed.
        """

    def kept(self, shape: tuple[int, ...]) -> Kept:
        """What it keeps of a parameter of a shape.

        Raises:
            ConfigError: it keeps something of it that cannot be kept here.
        """
        return Kept(self.states)

    @abstractmethod
    def advance(
        self, group: Mapping[str, Any], before: Progress, like: tuple[int, ...] = ONE
    ) -> tuple[Progress, dict[str, Any]]:
        """The progress after one more step, and the options of the group that the step changes.

        Args:
            group: the param group, before the step.
            before: the progress before the step.
            like: `Kept.like` of the parameter's shape.

        Raises:
            ConfigError: the optimizer refuses an option. Nothing was changed.
        """

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], before: Progress, scale: float) -> Any:
        """What all segments with these three take in a step.

        Args:
            group: the param group, before the step.
            before: the progress before the step.
            scale: the factor of the gradients.
        """

    def options_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What `scalars` needs of a param group, as plain values that stay. Called only if `can_be_late`."""
        raise NotImplementedError

    def flops(self, shape: tuple[int, ...]) -> float:
        """The floating-point operations of a step of a whole parameter, where they are known and many; else 0."""
        return 0.0

    def scalar_bytes(self, scalars: Any) -> bytes:
        """What `scalars` gave, so that equal bytes make equal steps. Called only if `can_try`."""
        raise NotImplementedError

    def decay_in_gradient(self, group: Mapping[str, Any]) -> float:
        """By what a step multiplies a parameter before it adds that to its gradient."""
        return 0.0

    def shown(self, progress: Progress) -> dict[str, Any]:
        """The state of a parameter as the class names it: numbers, tensors of shape (), and None for each array."""
        return scalars_of(progress) | dict.fromkeys(progress.arrays)

    def temporary_bytes(self, numel: int, threads: int) -> int:
        """The most bytes that its tasks take at once beside the arrays of their segments.

        Args:
            numel: the most elements of a segment; of a parameter, if the rule steps whole ones.
            threads: how many threads run tasks.
        """
        return 0

    @abstractmethod
    def agreed(self, group: Mapping[str, Any]) -> Hashable:
        """What of a group has to be the same on all ranks. Its `repr` is compared."""

    @abstractmethod
    def bind(self, kernels: Kernels, memory: SegmentMemory) -> Callable[[Any], Task]:
        """Makes what steps one segment.

        Args:
            kernels: whose threads run it.
            memory: of the segment.

        Returns:
            A function of what `scalars` gave, for `Kernels.run`.
        """
