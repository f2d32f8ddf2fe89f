"""Any torch optimizer whose step looks at no other parameter: its own class runs on pieces of the masters, or on whole
ones, with its own bits.

[Note: an optimizer on pieces]
A *copy* of the optimizer gets one Parameter over a piece of the master, `state[p]` made of views of the piece's arrays
and of the parameter's scalars, and `.grad`. Its class's `step` does the rest. Each piece gets a fresh copy, so what a
step changes on the optimizer itself is not seen by the next piece, nor by the next step; `probe` refuses optimizers
for which that matters.

Operations of torch give an element the same bits wherever it lies, but for some (`pow`) that differ between the vector
and the scalar part of their loop. So pieces begin at multiples of 64 elements of their parameter. Pieces of at most
BLOCK elements are calculated by one thread of torch. Those of LARGE_BLOCK, which cost less of Python, are shared by
torch's own threads, where `probe` has found that this gives the same bits.

An optimizer that looks at more than one element of a parameter at once, as Muon does, steps *whole* parameters. Each
lies in one chunk then (layout.py), and is stepped as a piece is, in its shape.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.layout import StateKind
from offload.native import Kernels, Task
from offload.optim.rule import Progress, Rule, Scalar, Span, scalars_of

CUT = 64
"""Pieces begin at multiples of so many elements of their parameter."""
BLOCK = 32_768
"""The most elements for which torch starts no threads of its own."""
LARGE_BLOCK = 262_144

KERNELS_OF = ("Adam", "AdamW")
"""The optimizers that have kernels of their own: rules/adam.py. In a commit they have these names."""

_MADE_ANEW = frozenset({"state", "param_groups", "defaults", "step"})


class Blank:
    """Makes copies of an optimizer that have no parameters and no state.

    Args:
        optimizer: the one to copy. Attributes of its own are copied now.

    Raises:
        ConfigError: one of these has tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._kind = type(optimizer)
        own = {name: value for name, value in vars(optimizer).items() if name not in _MADE_ANEW}
        self._hooks = [name for name in own if name in torch_private.OPTIMIZER_HOOKS]
        for name, value in own.items():
            if any(isinstance(leaf, Tensor) for leaf in torch_private.tree_leaves(value)):
                raise ConfigError(f"it keeps tensors of its own, in its attribute {name}, which no commit would find")
        try:
            self._own = copy.deepcopy({name: value for name, value in own.items() if name not in self._hooks})
        except Exception as error:  # whatever an attribute raises that cannot be copied
            raise ConfigError(
                f"an attribute of it cannot be copied, as each piece needs: {type(error).__name__}: {error}"
            ) from error
        self._defaults = dict(optimizer.defaults)
        # Without torch's wrapper, which would call hooks and the profiler for each piece.
        step: Any = self._kind.step
        while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
            step = step.__wrapped__
        self._step: Callable[[torch.optim.Optimizer], object] = step

    @property
    def name(self) -> str:
        """The name of its class."""
        return self._kind.__name__

    def step(
        self, group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]], params: Sequence[nn.Parameter]
    ) -> tuple[dict[str, Any], Mapping[Tensor, dict[str, Any]]]:
        """Runs one step of the class in a fresh copy.

        Args:
            group: the options.
            state: of each parameter that has some.
            params: the parameters, with their gradients.

        Returns:
            The group and the state that the copy has afterwards.
        """
        made = self.fresh(group, state, params)
        self.run(made)
        return made.param_groups[0], made.state

    def run(self, made: torch.optim.Optimizer) -> None:
        """Runs the step of the class on a copy."""
        self._step(made)

    def fresh(
        self, group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]], params: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """A copy of the optimizer with one group; see `step`."""
        made: torch.optim.Optimizer = self._kind.__new__(self._kind)
        own = {name: value if _is_plain(value) else copy.deepcopy(value) for name, value in self._own.items()}
        vars(made).update(own)
        made.defaults = self._defaults
        for name in self._hooks:
            setattr(made, name, OrderedDict())
        made.state = defaultdict(dict)
        made.state.update(dict(state))
        made.param_groups = [{**group, "params": list(params)}]
        return made


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, int | float | str | bool | torch.dtype)


class Found(NamedTuple):
    """What a probe found about an optimizer.

    Attributes:
        states: the arrays that it keeps.
        is_whole: whether it looks at whole parameters.
        dims: how many dimensions a stand-in has that tells which numbers a step makes.
    """

    states: tuple[StateKind, ...]
    is_whole: bool = False
    dims: int = 1


class TorchRule(Rule):
    """Runs a torch optimizer's class on pieces; see [Note: an optimizer on pieces].

    Args:
        blank: makes copies of the optimizer.
        found: what was found about it.
        initial: the progress of a parameter that was never stepped: what the constructor put into its state.
        structure: of the options with which it was probed.
        probe: probes the optimizer with other options.
        has_large_blocks: whether torch's threads may share a piece.
    """

    def __init__(
        self,
        blank: Blank,
        found: Found,
        initial: Progress,
        structure: object,
        probe: Callable[[Mapping[str, Any]], Found],
        *,
        has_large_blocks: bool = False,
    ) -> None:
        # Adam's own kernels keep other progress, and a user's class may have its name.
        self.name = f"{blank.name} run by torch" if blank.name in KERNELS_OF else blank.name
        self.states, self.is_whole = found.states, found.is_whole
        self.initial = initial
        self._dims = found.dims
        self.block = LARGE_BLOCK if has_large_blocks else BLOCK
        self._blank = blank
        self._probe = probe
        self._probed = {structure}

    def require_sound(self, number: int, group: Mapping[str, Any]) -> None:
        """See Rule.require_sound. Options whose structure is new are probed."""
        structure = structure_of(group)
        if structure in self._probed:
            return
        try:
            found = self._probe(group)
        except ConfigError as error:
            raise ConfigError(f"param group {number}: {error}; nothing was changed") from error
        if found.is_whole and not self.is_whole:
            raise ConfigError(
                f"param group {number} has options now with which {self.name} looks at whole parameters, which lie in "
                "pieces: construct the run with options like these, and change them later; nothing was changed"
            )
        missing = [kind.name for kind in found.states if kind not in self.states]
        if missing:
            raise ConfigError(
                f"param group {number} has options now with which {self.name} keeps {', '.join(missing)} of each "
                "element, for which nothing was reserved: construct the run with options that keep it (a number that "
                "is not 0, or True), and change them later; nothing was changed"
            )
        self._probed.add(structure)

    def advance(self, group: Mapping[str, Any], before: Progress) -> tuple[Progress, dict[str, Any]]:
        """See Rule.advance. The class steps a stand-in of one element."""
        zero = torch.zeros((1,) * self._dims, dtype=torch.float32, device="cpu")
        param = nn.Parameter(zero.clone())
        param.grad = torch.ones_like(zero)
        state = {name: zero.clone() for name in before.arrays} | scalars_of(before)
        try:
            with without_warnings(), cpu_by_default():
                after, states = self._blank.step(_with_copies(group), {param: state} if state else {}, [param])
        except Exception as error:  # whatever the class raises
            raise ConfigError(
                f"{self.name} refuses its options: {type(error).__name__}: {error}; nothing was changed"
            ) from error
        progress = progress_of(states.get(param, {}), self.states, before.step + 1)
        for one in progress.scalars:
            if not math.isfinite(one.value):
                raise ConfigError(f"{one.name} of {self.name} becomes {one.value}, which no commit can keep")
        return progress, changed_options(group, after)

    def scalars(self, group: Mapping[str, Any], before: Progress, scale: float) -> Any:
        """See Rule.scalars."""
        return _with_copies(group), before, scale

    def agreed(self, group: Mapping[str, Any]) -> Hashable:
        """See Rule.agreed."""
        return tuple(
            (name, value.tolist() if isinstance(value, Tensor) else value)
            for name, value in sorted(group.items())
            if name != "params"
        )

    def bind(
        self,
        kernels: Kernels,
        arrays: Sequence[Tensor],
        grad: Tensor,
        out: Tensor,
        spans: Sequence[Span],
        current: Tensor | None = None,
    ) -> Callable[[Any], Task]:
        """See Rule.bind."""
        assert current is None, "no master is split"
        n = len(grad)
        if self.is_whole:
            return partial(self._whole_task, spans, arrays, grad, out)

        def task(scalars: Any) -> Task:
            def work(low: int, high: int) -> None:
                for span in spans:
                    for start, stop in self._blocks(span, low, high):
                        self._step([array[start:stop] for array in arrays], grad[start:stop], out[start:stop], *scalars)

            def whole(low: int, high: int) -> None:
                work(0, n)

            written = (*arrays, out)
            if self.block == LARGE_BLOCK:
                return Task(whole, 0, 1, written=written)  # the caller alone calls torch, whose threads share
            return Task(work, 0, n, CUT, written)

        return task

    def _whole_task(
        self, spans: Sequence[Span], arrays: Sequence[Tensor], grad: Tensor, out: Tensor, scalars: Any
    ) -> Task:
        def work(low: int, high: int) -> None:
            for span in spans:
                at = slice(span.start, span.start + span.numel)
                master, *states = (array[at].view(span.shape) for array in arrays)
                self._step([master, *states], grad[at].view(span.shape), out[at].view(span.shape), *scalars)

        return Task(work, 0, 1, written=(*arrays, out))  # the caller alone calls torch, whose threads share

    def _blocks(self, span: Span, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The pieces of a span within positions `low` to `high`, which are multiples of CUT or the ends."""
        start, end = max(span.start, low), min(span.start + span.numel, high)
        while start < end:
            stop = min(start + self.block, end)
            yield start, stop
            start = stop

    @torch.no_grad()
    def _step(
        self,
        arrays: Sequence[Tensor],
        grad: Tensor,
        out: Tensor,
        group: Mapping[str, Any],
        before: Progress,
        scale: float,
    ) -> None:
        """Steps one piece."""
        master, *states = arrays
        param = nn.Parameter(master)
        param.grad = grad.to(torch.float32, copy=True)
        if scale != 1.0:
            param.grad.mul_(scale)
        with cpu_by_default():
            step_piece(self._blank, self.states, group, before, param, states)
        if out.data_ptr() != master.data_ptr():
            out.copy_(master)


def step_piece(
    blank: Blank,
    kinds: Sequence[StateKind],
    group: Mapping[str, Any],
    before: Progress,
    param: nn.Parameter,
    arrays: Sequence[Tensor],
) -> Mapping[str, Any]:
    """Steps one parameter, whose state is in arrays of its shape.

    Args:
        blank: makes copies of the optimizer.
        kinds: the names of `arrays`.
        group: the options. They are not changed.
        before: the parameter's progress before the step.
        param: the parameter, with its gradient. It is changed.
        arrays: its state. They are changed.

    Returns:
        Its state after the step.
    """
    views = {kind.name: array for kind, array in zip(kinds, arrays, strict=True)}
    state = {name: views[name] for name in before.arrays} | scalars_of(before)
    _, states = blank.step(_with_copies(group), {param: state} if state else {}, [param])
    after = states.get(param, {})
    for name, view in views.items():
        made = after.get(name)
        if isinstance(made, Tensor) and made is not view:  # the class made it anew
            view.copy_(made)
    return after


def progress_of(state: Mapping[str, Any], kinds: Sequence[StateKind], step: int) -> Progress:
    """The progress that a state shows.

    Args:
        state: of one parameter, after a step.
        kinds: the arrays that it may have.
        step: how many steps the parameter has taken.
    """
    names = {kind.name for kind in kinds}
    scalars = []
    for name, value in state.items():
        if name in names or value is None:
            continue
        plain = value.item() if isinstance(value, Tensor) else value
        scalars.append(Scalar(name, plain, value.dtype if isinstance(value, Tensor) else None))
    arrays = tuple(kind.name for kind in kinds if isinstance(state.get(kind.name), Tensor))
    return Progress(step, tuple(scalars), arrays)


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a step has changed."""
    return {name: value for name, value in after.items() if name != "params" and not _is_same(before.get(name), value)}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _with_copies(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group whose tensors and lists a step may change."""
    return {
        name: value if _is_plain(value) else copy.deepcopy(value) for name, value in group.items() if name != "params"
    }


def structure_of(group: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """What of a group's options decides which arrays an optimizer keeps: whether numbers are 0, and all else."""
    return tuple((name, _structure(value)) for name, value in sorted(group.items()) if name != "params")


def _structure(value: Any) -> object:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_structure, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value).__name__, value == 0
    return repr(value)


def cpu_by_default() -> AbstractContextManager[object]:
    """The numbers of a state that a class makes are on the CPU, whatever torch.set_default_device says.

    That holds for the thread that called it, and pieces are stepped by several.
    """
    default = torch.get_default_device()
    return nullcontext() if default.type == "cpu" else torch.device("cpu")


@contextmanager
def without_warnings() -> Iterator[None]:
    """No warnings of a class that steps stand-ins."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
