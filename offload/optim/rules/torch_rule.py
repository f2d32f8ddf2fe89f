"""Any torch optimizer that looks at one parameter at a time: its own class runs on pieces of the masters, or on whole
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
lies in one chunk then (layout.py), and is stepped as a piece is, in its shape. What it keeps may depend on that shape:
Adafactor keeps a number for each row and each column of a matrix, and one for each element of a vector. If it works on
the last two dimensions of three or more, as Muon of experts does, each slice of the first one is stepped by itself.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.layout import StateKind
from offload.native import Kernels, Task
from offload.optim.flops import FLOPS
from offload.optim.on_device import is_stepped_there
from offload.optim.rule import ONE, Kept, Method, Progress, Rule, Scalar, SegmentMemory, Span, scalars_of

CUT = 64
"""Pieces begin at multiples of so many elements of their parameter."""
BLOCK = 32_768
"""The most elements for which torch starts no threads of its own."""
LARGE_BLOCK = 262_144

KERNELS_OF = ("Adam", "AdamW")
"""The optimizers that have kernels of their own: rules/adam.py. In a commit they have these names."""

STEP = "step"
"""The method of every optimizer's class."""
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
        self._calls: dict[str, Callable[[torch.optim.Optimizer], object]] = {STEP: step}
        names = (name for name in dir(self._kind) if not (name.startswith("_") or hasattr(torch.optim.Optimizer, name)))
        self._calls |= {name: call for name in names if inspect.isfunction(call := getattr(self._kind, name))}

    @property
    def name(self) -> str:
        """The name of its class."""
        return self._kind.__name__

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """Its class."""
        return self._kind

    @property
    def methods(self) -> list[str]:
        """The names of what its class does beside `step`, and torch's own base class does not know."""
        return [name for name in self._calls if name != STEP]

    def run(self, made: torch.optim.Optimizer, method: str = STEP) -> None:
        """Runs a method of the class on a copy."""
        self._calls[method](made)

    def changed(self, made: torch.optim.Optimizer) -> str | None:
        """The name of an attribute that a copy has changed of itself; None: there is none, as far as can be seen."""
        for name, value in vars(made).items():
            if name in _MADE_ANEW or name in self._hooks:
                continue
            if name not in self._own or _differs(self._own[name], value):
                return name
        return None

    def fresh(
        self, group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]], params: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """A copy of the optimizer with one group.

        Args:
            group: the options.
            state: of each parameter that has some.
            params: the parameters, with their gradients.
        """
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


def _differs(before: object, now: object) -> bool:
    """Whether an attribute has changed. Of what cannot be compared that is not known."""
    if type(before) is not type(now) or type(now).__eq__ is object.__eq__:
        return type(before) is not type(now)
    try:
        return not bool(before == now)
    except Exception:  # whatever a comparison of the user's raises
        return False


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, int | float | str | bool | torch.dtype)


class Found(NamedTuple):
    """What a probe found about an optimizer.

    Attributes:
        states: the arrays that it keeps; of whole parameters of some shapes perhaps others.
        is_whole: whether it looks at whole parameters.
        has_slices: whether those of three and more dimensions may be stepped slice by slice of the first one.
    """

    states: tuple[StateKind, ...]
    is_whole: bool = False
    has_slices: bool = False


class StandIn(NamedTuple):
    """A parameter that tells what a step makes of the numbers of others.

    Attributes:
        shape: its shape.
        small: by name, the shapes of those of its states that have another one.
    """

    shape: tuple[int, ...] = ONE
    small: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def arrays(self, kinds: Iterable[StateKind]) -> list[Tensor]:
        """Zeros for its states."""
        shapes = (self.small.get(kind.name, self.shape) for kind in kinds)
        return [torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes]


class KeptWhole(NamedTuple):
    """What an optimizer keeps of whole parameters of one shape.

    Attributes:
        kept: the same for those who know no stand-ins.
        stand_in: one that goes on as they do.
    """

    kept: Kept
    stand_in: StandIn


class TorchRule(Rule):
    """Runs a torch optimizer's class on pieces; see [Note: an optimizer on pieces].

    Args:
        blank: makes copies of the optimizer.
        found: what was found about it.
        group: the options with which it was probed.
        initial: the progress of a parameter that was never stepped: what the constructor put into its state.
        has_large_blocks: whether torch's threads may share a piece.
        temporary_numel: how many fp32 elements a step takes at once for each element of a piece.
        probe: tries the optimizer out.
    """

    def __init__(
        self,
        blank: Blank,
        found: Found,
        group: Mapping[str, Any],
        initial: Progress,
        probe: Prober,
        *,
        has_large_blocks: bool,
        temporary_numel: int,
    ) -> None:
        # Adam's own kernels keep other progress, and a user's class may have its name.
        self.name = f"{blank.name} run by torch" if blank.name in KERNELS_OF else blank.name
        self.states, self.is_whole, self._has_slices = found.states, found.is_whole, found.has_slices
        self.can_try = not self.is_whole
        self.initial = initial
        self.block = LARGE_BLOCK if has_large_blocks else BLOCK
        self._blank = blank
        self._probe = probe
        self._group = {name: value for name, value in group.items() if name != "params"}
        self._probed = {structure_of(group)}
        self._temporary_numel = temporary_numel
        self._of_shapes: dict[tuple[int, ...], KeptWhole] = {}
        self._stand_ins: dict[tuple[int, ...], tuple[tuple[StateKind, ...], StandIn]] = {ONE: (self.states, StandIn())}
        self.methods = {name: TorchMethod(self, blank, name, probe) for name in blank.methods}

    def kept(self, shape: tuple[int, ...]) -> Kept:
        """See Rule.kept. The class steps stand-ins of this shape, of few elements."""
        if not self.is_whole:
            return Kept(self.states)
        known = self._of_shapes.get(shape)
        if known is None:
            known = self._probe.kept(self._group, shape)
            if self._has_slices and len(shape) > 2 and not known.kept.small:
                known = known._replace(kept=known.kept._replace(has_slices=True))
            self._of_shapes[shape] = known
            self._stand_ins[known.kept.like] = known.kept.states, known.stand_in
            if known.kept.has_slices:
                self.kept((1, *shape[1:]))
        return known.kept

    def stand_in(self, like: tuple[int, ...]) -> tuple[tuple[StateKind, ...], StandIn]:
        """What has the shape `Kept.like`, and what is kept of it."""
        return self._stand_ins[like]

    def require_sound(self, number: int, group: Mapping[str, Any]) -> None:
        """See Rule.require_sound. Options whose structure is new are probed."""
        structure = structure_of(group)
        if structure in self._probed:
            return
        try:
            found = self._probe.found(group)
        except StepRaisesError as error:
            if self._refuses(group):
                return  # before a step anything changes, `advance` says so; a commit may keep such options
            raise _of_group(number, error) from error
        except ConfigError as error:
            raise _of_group(number, error) from error
        if found.is_whole and not self.is_whole:
            raise ConfigError(
                f"param group {number} has options now with which {self.name} looks at whole parameters, which lie in "
                "pieces: construct the run with options like these, and change them later; nothing was changed"
            )
        if self._has_slices and not found.has_slices:
            raise ConfigError(
                f"param group {number} has options now with which {self.name} looks at several slices of a parameter, "
                "which may lie apart: construct the run with options like these, and "
                "change them later; nothing was changed"
            )
        missing = self._missing(found, group)
        if missing:
            raise ConfigError(
                f"param group {number} has options now with which {self.name} keeps {', '.join(missing)} of each "
                "element, for which nothing was reserved: construct the run with options that keep it (a number that "
                "is not 0, or True), and change them later; nothing was changed"
            )
        self._probed.add(structure)

    def _missing(self, found: Found, group: Mapping[str, Any]) -> list[str]:
        """The names of arrays that the optimizer keeps with other options, and for which nothing was reserved."""
        if not found.is_whole:
            return [kind.name for kind in found.states if kind not in self.states]
        names = []
        for shape, (known, _) in self._of_shapes.items():
            now = self._probe.kept(group, shape).kept
            shapes, reserved = dict(now.small), dict(known.small)
            names += [
                kind.name
                for kind in now.states
                if kind not in known.states or shapes.get(kind.name) != reserved.get(kind.name)
            ]
        return list(dict.fromkeys(names))

    def _refuses(self, group: Mapping[str, Any]) -> bool:
        try:
            self.advance(group, self.initial, next(iter(self._of_shapes.values())).kept.like if self.is_whole else ONE)
        except ConfigError:
            return True
        return False

    def advance(
        self, group: Mapping[str, Any], before: Progress, like: tuple[int, ...] = ONE
    ) -> tuple[Progress, dict[str, Any]]:
        """See Rule.advance. The class steps a stand-in of few elements."""
        kinds, stand_in = self._stand_ins[like]
        try:
            progress, changed = advanced(self._blank, kinds, group, before, stand_in=stand_in)
        except RaisedError as error:
            raise ConfigError(f"{self.name} refuses its options: {error}; nothing was changed") from error
        _require_finite(progress, self.name)
        return progress, changed

    def scalars(self, group: Mapping[str, Any], before: Progress, scale: float) -> Any:
        """See Rule.scalars."""
        return _with_copies(group), before, scale

    def scalar_bytes(self, scalars: Any) -> bytes:
        """See Rule.scalar_bytes. Of an option that is no plain value nobody can say that it is the same again."""
        return repr(_told(scalars)).encode()

    def flops(self, shape: tuple[int, ...]) -> float:
        """See Rule.flops. A subclass may compute something else."""
        count = FLOPS.get(self._blank.kind)
        return 0.0 if count is None else count(shape, self._group)

    def temporary_bytes(self, numel: int, threads: int) -> int:
        """See Rule.temporary_bytes. A method takes copies of a piece, and is counted with as much again."""
        small, large = min(numel, threads * BLOCK), min(numel, LARGE_BLOCK)
        at_once = numel if self.is_whole else large if self.block == LARGE_BLOCK else small
        step = self._temporary_numel * at_once
        of_method = numel if self.is_whole else small
        method = 2 * (1 + len(self.states)) * of_method if self.methods else 0
        return torch.float32.itemsize * max(step, method)

    def agreed(self, group: Mapping[str, Any]) -> Hashable:
        """See Rule.agreed."""
        return tuple(
            (name, value.tolist() if isinstance(value, Tensor) else value)
            for name, value in sorted(group.items())
            if name != "params"
        )

    def bind(self, kernels: Kernels, memory: SegmentMemory) -> Callable[[Any], Task]:
        """See Rule.bind."""
        assert memory.current is None, "no master is split"
        if self.is_whole:
            return partial(self._whole_task, memory)
        arrays, grad, out, spans = memory.arrays, memory.grad, memory.out, memory.spans
        n = len(grad)

        def task(scalars: Any) -> Task:
            def work(low: int, high: int) -> None:
                for span in spans:
                    for start, stop in _blocks(span, low, high, self.block):
                        piece = [array[start:stop] for array in arrays]
                        self._step(self.states, piece, grad[start:stop], out[start:stop], *scalars)

            def whole(low: int, high: int) -> None:
                work(0, n)

            written = (*arrays, out)
            if self.block == LARGE_BLOCK:
                return Task(whole, 0, 1, written=written)  # the caller alone calls torch, whose threads share
            return Task(work, 0, n, CUT, written)

        return task

    def _whole_task(self, memory: SegmentMemory, scalars: Any) -> Task:
        def step_there(kinds: Sequence[StateKind], copies: list[Tensor], grad: Tensor) -> None:
            self._step(kinds, copies, grad, copies[0], *scalars)

        def work(low: int, high: int) -> None:
            master, *states = memory.arrays
            for span in memory.spans:
                assert span.whole is not None
                kinds = self.kept(span.whole.shape).states
                arrays = [span.seen(master), *span.states(kinds, states)]
                grad, out = span.seen(memory.grad), span.seen(memory.out)
                if memory.matrices is None or not is_stepped_there(span.whole.shape):
                    self._step(kinds, arrays, grad, out, *scalars)
                else:
                    then = partial(_write_rounded, arrays[0], out)
                    memory.matrices.begin(arrays, grad, partial(step_there, kinds), then)

        # The caller alone calls torch, whose threads share.
        return Task(work, 0, 1, written=(*memory.arrays, memory.out))

    @torch.no_grad()
    def _step(
        self,
        kinds: Sequence[StateKind],
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
            run_piece(self._blank, kinds, group, before, param, states)
        _write_rounded(master, out)


@torch.no_grad()
def _write_rounded(master: Tensor, out: Tensor) -> None:
    """Writes the parameters for compute, unless they are the master."""
    if out.data_ptr() != master.data_ptr():
        out.copy_(master)


class TorchMethod(Method):
    """A method of a torch optimizer's class; see [Note: an optimizer on pieces].

    It runs on copies of a piece, since it may do with them what a step does not, such as exchange their memory.

    Args:
        rule: the optimizer's.
        blank: makes copies of the optimizer.
        name: the method's.
        probe: tries the method out.
    """

    def __init__(self, rule: TorchRule, blank: Blank, name: str, probe: Prober) -> None:
        self._rule, self._blank, self._name, self._probe = rule, blank, name, probe
        self._known: set[object] = set()

    def try_out(self, group: Mapping[str, Any], befores: Collection[Progress]) -> None:
        """See Method.try_out. One progress of each structure is tried."""
        kinds = {_structure_of_progress(before): before for before in befores}
        key = structure_of(group), frozenset(kinds)
        if key not in self._known:
            try:
                self._probe.method(self._name, group, list(kinds.values()), self._rule)
            except ConfigError as error:
                raise ConfigError(f"{self._title} cannot be applied: {error}; nothing was changed") from error
            self._known.add(key)

    def advance(
        self, group: Mapping[str, Any], before: Progress, like: tuple[int, ...] = ONE
    ) -> tuple[Progress, dict[str, Any]]:
        """See Method.advance. The class is called with a stand-in of few elements."""
        kinds, stand_in = self._rule.stand_in(like)
        try:
            progress, changed = advanced(self._blank, kinds, group, before, self._name, stand_in=stand_in)
        except RaisedError as error:
            raise ConfigError(f"{self._title} raises {error}; nothing was changed") from error
        _require_finite(progress, self._blank.name)
        return progress, changed

    def task(self, group: Mapping[str, Any], before: Progress, arrays: Sequence[Tensor], spans: Sequence[Span]) -> Task:
        """See Method.task."""
        options = _with_copies(group)

        @torch.no_grad()
        def call(kinds: Sequence[StateKind], views: Sequence[Tensor]) -> None:
            master, *states = (view.clone() for view in views)
            with cpu_by_default():
                run_piece(self._blank, kinds, options, before, nn.Parameter(master), states, self._name)
            for view, values in zip(views, (master, *states), strict=True):
                view.copy_(values)

        def work(low: int, high: int) -> None:
            for span in spans:
                for start, stop in _blocks(span, low, high, BLOCK):
                    call(self._rule.states, [array[start:stop] for array in arrays])

        def whole(low: int, high: int) -> None:
            master, *states = arrays
            for span in spans:
                assert span.whole is not None
                kinds = self._rule.kept(span.whole.shape).states
                call(kinds, [span.seen(master), *span.states(kinds, states)])

        if self._rule.is_whole:
            return Task(whole, 0, 1, written=tuple(arrays))
        return Task(work, 0, len(arrays[0]), CUT, tuple(arrays))

    @property
    def _title(self) -> str:
        return f"{self._name}() of {self._blank.name}"


_ONE_ELEMENT = StandIn()


class RaisedError(Exception):
    """What a user's class raised, in words."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")


class StateChangedError(ConfigError):
    """A state has arrays for which nothing was reserved: what the class keeps depends on more than was tried out."""


class StepRaisesError(ConfigError):
    """The class's step raises with these options, whatever it steps."""


class Prober(Protocol):
    """Tries an optimizer out on stand-ins; rules/probe.py has one."""

    def found(self, group: Mapping[str, Any]) -> Found:
        """What the optimizer is with these options.

        Raises:
            StepRaisesError: its step raises with them.
            ConfigError: it can run neither on pieces nor on whole parameters with them; it says why.
        """

    def kept(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> KeptWhole:
        """What the optimizer keeps of a whole parameter of a shape.

        Raises:
            ConfigError: something that cannot be kept here; it says why.
        """

    def method(self, name: str, group: Mapping[str, Any], befores: Sequence[Progress], rule: TorchRule) -> None:
        """Tries out a method on parameters of each progress in `befores`, as `rule` has them.

        Raises:
            ConfigError: it cannot run on what the step runs on; it says why.
        """


def _of_group(number: int, error: ConfigError) -> ConfigError:
    return ConfigError(f"param group {number}: {error}; nothing was changed")


def _require_finite(progress: Progress, name: str) -> None:
    for one in progress.scalars:
        if not math.isfinite(one.value):
            raise ConfigError(f"{one.name} of {name} becomes {one.value}, which no commit can keep")


def _structure_of_progress(progress: Progress) -> object:
    return tuple((one.name, one.dtype) for one in progress.scalars), progress.arrays


def _blocks(span: Span, low: int, high: int, block: int) -> Iterator[tuple[int, int]]:
    """The pieces of a span within positions `low` to `high`, which are multiples of CUT or the ends."""
    start, end = max(span.start, low), min(span.start + span.numel, high)
    while start < end:
        stop = min(start + block, end)
        yield start, stop
        start = stop


def advanced(
    blank: Blank,
    kinds: Sequence[StateKind],
    group: Mapping[str, Any],
    before: Progress,
    method: str = STEP,
    *,
    stand_in: StandIn = _ONE_ELEMENT,
) -> tuple[Progress, dict[str, Any]]:
    """What a call of the class makes of a parameter's progress and of its group, found with a stand-in.

    Args:
        blank: makes copies of the optimizer.
        kinds: the arrays that it may have.
        group: the options. They are not changed.
        before: the progress before the call.
        method: what is called. A step has a gradient, of ones.
        stand_in: the stand-in.

    Returns:
        The progress after the call, and the options that it changes.

    Raises:
        RaisedError: the class raises.
    """
    param = nn.Parameter(torch.zeros(stand_in.shape, dtype=torch.float32, device="cpu"))
    param.grad = torch.ones_like(param) if method == STEP else None
    arrays = stand_in.arrays(kinds)
    try:
        with without_warnings(), cpu_by_default(), torch.no_grad():
            state, after = run_piece(blank, kinds, group, before, param, arrays, method)
    except Exception as error:  # whatever the class raises
        raise RaisedError(error) from error
    return progress_of(state, kinds, before.step + (method == STEP)), changed_options(group, after)


def run_piece(
    blank: Blank,
    kinds: Sequence[StateKind],
    group: Mapping[str, Any],
    before: Progress,
    param: nn.Parameter,
    arrays: Sequence[Tensor],
    method: str = STEP,
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Runs a method of the class, in a fresh copy, on one parameter whose state is in arrays.

    Args:
        blank: makes copies of the optimizer.
        kinds: the names of `arrays`.
        group: the options. They are not changed.
        before: the parameter's progress before the call.
        param: the parameter, with its gradient. Its memory is changed.
        arrays: its state. They are changed.
        method: what is called.

    Returns:
        Its state and its group after the call.

    Raises:
        StateChangedError: its state has another array, or one of another shape.
    """
    master = param.detach()
    views = {kind.name: array for kind, array in zip(kinds, arrays, strict=True)}
    state = {name: views[name] for name in before.arrays} | scalars_of(before)
    made = blank.fresh(_with_copies(group), {param: state} if state else {}, [param])
    blank.run(made, method)
    after = made.state.get(param, {})
    for name, value in after.items():
        if isinstance(value, Tensor) and name in views and value.shape != views[name].shape:
            raise StateChangedError(
                f"{name} of {blank.name} has shape {tuple(value.shape)}, and {tuple(views[name].shape)} was reserved"
            )
        if name not in views and isinstance(value, Tensor) and value.dim():
            raise StateChangedError(f"{blank.name} keeps {name}, for which nothing was reserved")
    results = [(master, param), *((view, after.get(name)) for name, view in views.items())]
    # What the class made anew, or exchanged: all of it is read before any of it is written.
    elsewhere = [
        (view, found.detach().clone())
        for view, found in results
        if isinstance(found, Tensor) and found.data_ptr() != view.data_ptr()
    ]
    for view, values in elsewhere:
        view.copy_(values)
    return after, made.param_groups[0]


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


_unlike = itertools.count()


def _told(value: Any) -> object:
    """A value whose `repr` has all of its bits. What has other parts than plain ones is unlike everything else."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, list | tuple):
        return type(value).__name__, [_told(one) for one in value]
    if isinstance(value, Mapping):
        return [(name, _told(one)) for name, one in sorted(value.items())]
    plain = (int, float, complex, str, bool, torch.dtype, NoneType)
    return value if type(value) in plain else ("unlike", next(_unlike))


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
