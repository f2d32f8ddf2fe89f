"""Whether a torch optimizer can run on pieces: tried out, before anything is allocated.

A group's optimizer steps a few stand-ins, as whole parameters and as pieces, and every bit of masters and states must
agree after each of STEPS steps. What else an optimizer may depend on is brought in by how they are stepped:

| what may go wrong | what shows it |
|---|---|
| another rule by the number of dimensions, as "decay matrices only" | stand-ins of each number of the group |
| states in blocks, only of round or of large sizes | an odd and a round size, both above 4,096 elements |
| a norm over all parameters | whole parameters step together, pieces each alone |
| a counter on the optimizer | pieces get a fresh copy in each step, whole parameters keep theirs |
| no gradient is taken for one of zeros | a stand-in without a gradient, which must not move |
| noise | the states of random generators, which must not change |
| a learning rate of 0, with which nothing moves | 0.01 in its place |

If pieces differ, whole parameters are tried, each stepped by itself. What is kept of one may depend on its shape, and
some of it may have a shape of its own, as Adafactor's numbers of rows and columns. So each shape that the group has is
tried out with a stand-in of few elements, whose sizes are in the same order: the sizes of a state tell by which of the
parameter's they go. A number whose value differs from one parameter to another is such an array, too, of no dimension.
Of parameters of three or more dimensions slices of the first one are tried, too: those of experts may lie apart then.

Another method of the class is tried out in the same way before it is applied, twice in turn, with states of made-up
values: it may be called where the class does not step, as after schedule-free's `eval()`.
"""

from __future__ import annotations

import inspect
import math
import random
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload import torch_private
from offload.errors import ConfigError
from offload.layout import StateKind, form_for
from offload.optim.rule import NEVER, Kept, Progress, Scalar, scalars_of
from offload.optim.rules.torch_rule import (
    BLOCK,
    LARGE_BLOCK,
    Blank,
    Found,
    KeptWhole,
    RaisedError,
    StandIn,
    StepRaisesError,
    TorchRule,
    advanced,
    changed_options,
    cpu_by_default,
    progress_of,
    run_piece,
    structure_of,
    without_warnings,
)

STEPS = 4
STEPS_OF_SHAPE = 2
"""Steps of the stand-ins that tell what is kept of a shape."""
OF_VALUES = "of the values of a parameter, and pieces of it would make another one each"
SCALAR_DTYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool}
"""Of numbers of a state that are tensors; manifest.py has the same."""
ODD, ROUND = 12_771, 16_384
MOST_OF_SIZES = (0, 5_000, 136, 31, 13, 8)
"""Sizes of a stand-in for a shape of 0, 1, 2 ... dimensions that are smaller are those of the parameter."""
CUT_AT = (4_160, 8_192)
"""Elements at which stand-ins are cut: multiples of 64, after the first 4,096."""


class RefusedError(ConfigError):
    """Why an optimizer cannot run on pieces."""


class _Start(NamedTuple):
    """What the constructor put into the state of each parameter.

    Attributes:
        constants: of arrays, the value of all elements.
        progress: the rest.
    """

    constants: Mapping[str, float]
    progress: Progress


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> TorchRule:
    """The rule of one param group of a torch optimizer.

    Args:
        optimizer: it has not stepped yet.
        group: one of its param groups.

    Raises:
        ConfigError: the optimizer cannot run on pieces; it says why.
    """
    name = type(optimizer).__name__
    try:
        if _needs_closure(optimizer):
            raise RefusedError("its step() calls a closure, several times where it likes")
        blank = Blank(optimizer)
        start = _start(optimizer, group)
        probe = Probe(blank, start, sorted({param.dim() for param in group["params"]}) or [1])
        found = probe.found(group)
        has_large_blocks = not found.is_whole and _same_bits_in_large_blocks(blank, group, start, found.states)
        temporary_numel = probe.temporary_numel(group, found)
        rule = TorchRule(
            blank,
            found,
            group,
            start.progress,
            probe,
            has_large_blocks=has_large_blocks,
            temporary_numel=temporary_numel,
        )
        for param in group["params"]:
            rule.kept(tuple(param.shape))
    except ConfigError as error:
        raise ConfigError(
            f"optimizer is {name}, which cannot be offloaded: {error}; the model was not changed. Optimizers run whose "
            "step looks at one parameter at a time, as torch.optim.AdamW, SGD, RMSprop, Adagrad, Muon, Adafactor"
        ) from None
    return rule


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    # Of the class: a scheduler puts a function of other arguments in place of the optimizer's own.
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    needed = [one for one in arguments if one.default is one.empty]
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in needed)


def _start(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> _Start:
    """What the constructor put into the state.

    Raises:
        RefusedError: parameters do not all begin alike, so the optimizer has stepped, or its states are no constants.
    """
    begun = [(param, state) for param, state in optimizer.state.items() if state]
    # Of no dimension an array looks as a number does: other groups of the optimizer tell.
    named = {name for param, state in begun for name, value in state.items() if _is_array(param, value)}
    params = set(group["params"])
    found = [(param, state) for param, state in begun if param in params and param.numel()]
    if not found:
        return _Start({}, NEVER)
    starts = set()
    for param, state in found:
        constants, kinds = {}, []
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                raise RefusedError(f"its state {name} has values already, in a shape of its own: they would be lost")
            if _is_array(param, value) or (name in named and not param.dim()):
                constants[name] = _constant(name, value, group)
                kinds.append(StateKind(name, starts=constants[name]))
        starts.add((tuple(constants.items()), progress_of(state, kinds, 0)))
    if len(starts) > 1:
        raise RefusedError("its parameters begin with different states: give one that has not stepped")
    first = next(iter(starts))
    return _Start(dict(first[0]), first[1])


def _is_array(param: Tensor, value: object) -> bool:
    """Whether a state has an element for each one of its parameter. Of a parameter of no dimension that is not seen."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape


def _constant(name: str, value: Tensor, group: Mapping[str, Any]) -> float:
    if value.is_meta:
        given = group.get("initial_accumulator_value")  # Adagrad's, the only one of torch's that fills its state
        if given is None:
            raise RefusedError(f"its state {name} has no values on the meta device: build the model with values")
        return float(given)
    first = value.reshape(-1)[:1]
    if not len(first) or not bool((value == first).all()):
        raise RefusedError(f"its state {name} has values already: give an optimizer that has not stepped")
    return float(first)


class Probe:
    """Tries an optimizer out on stand-ins; see the top of this file.

    Args:
        blank: makes copies of the optimizer.
        start: what its constructor put into the states.
        dims: the numbers of dimensions that its parameters have.
    """

    def __init__(self, blank: Blank, start: _Start, dims: Sequence[int]) -> None:
        self._blank, self._start = blank, start
        self._seen: dict[object, _Seen] = {}
        self._shapes = [shape for dim in (dims if any(dims) else (0, 1)) for shape in _shapes(dim)]

    def found(self, group: Mapping[str, Any]) -> Found:
        """Steps whole stand-ins and pieces or, if these differ, whole stand-ins each by itself.

        Args:
            group: the options.

        Raises:
            StepRaisesError: its step raises with these options.
            RefusedError: the results differ, or are none that can be kept.
        """
        blank, start, options = self._blank, self._start, _that_moves(group)
        with _on_stand_ins():
            whole = _Whole(blank, options, start, self._shapes)
            with _without_noise():
                history = [whole.step() for _ in range(STEPS)]
            try:
                states = _kinds_of(whole.states, start)
                pieces = KeptWhole(Kept(states), StandIn())
                if self._reason(options, [pieces] * len(self._shapes), history, _By.PIECES) is None:
                    return Found(states)
            except _ShapeError:
                pass
            kept = [self.kept(group, shape) for shape in self._shapes]
            reason = self._reason(options, kept, history, _By.WHOLES)
            if reason is not None:
                raise RefusedError(reason)
            each = {kind.name: kind for one in kept for kind in one.kept.states}
            found = Found(tuple(each.values()), is_whole=True)
        return found._replace(has_slices=self._has_slices(group))

    def _has_slices(self, group: Mapping[str, Any]) -> bool:
        """Whether slices of the first dimension of all parameters that have three or more may be stepped one by one.

        The last stand-in is large enough for torch to give it to several threads.
        """
        shapes = [shape for shape in self._shapes if len(shape) > 2]
        shapes += [(3, *(1,) * (len(shape) - 3), 200, 264) for shape in shapes[-1:]]
        return bool(shapes) and all(self._is_stepped_by_slices(group, shape) for shape in shapes)

    def _is_stepped_by_slices(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        found = self.kept(group, shape)
        if found.kept.small:
            return False
        with _on_stand_ins():
            whole = _Whole(self._blank, _that_moves(group), self._start, [shape])
            history = [whole.step() for _ in range(STEPS_OF_SHAPE)]
            options = _that_moves(group)
            sliced = _Pieces(self._blank, options, self._start, found, shape, 0, _By.SLICES)
            return sliced.differs_from(history) is None

    def _reason(
        self, options: Mapping[str, Any], kept: Sequence[KeptWhole], history: Sequence[_Stepped], by: _By
    ) -> str | None:
        """Why stand-ins that are stepped in parts, or each by itself, differ from `history`; None: they do not."""
        both = enumerate(zip(self._shapes, kept, strict=True))
        stepped = (_Pieces(self._blank, options, self._start, one, shape, number, by) for number, (shape, one) in both)
        return next((why for one in stepped if (why := one.differs_from(history))), None)

    def kept(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> KeptWhole:
        """Steps stand-ins for a whole parameter of a shape.

        Args:
            group: the options.
            shape: the shape.

        Raises:
            StepRaisesError: its step raises with these options.
            RefusedError: something that it keeps cannot be kept here.
        """
        alike = _few_elements(shape)
        seen, ones = self._look(group, alike), (1,) * len(shape)
        numel, sizes = math.prod(shape), dict(zip(alike, shape, strict=True))
        states, small = [], {}
        for name, found in seen.arrays.items():
            if found == alike:
                states.append(StateKind(name, starts=self._start.constants.get(name, 0.0)))
                continue
            if not all(size in sizes or size == 1 for size in found):
                raise RefusedError(f"its state {name} has shape {found} for a parameter of {alike}: sizes of its own")
            small[name] = tuple(sizes.get(size, 1) for size in found)
            if math.prod(small[name]) > numel:
                raise RefusedError(
                    f"its state {name} has shape {small[name]} for a parameter of {shape}: more elements than that"
                )
            states.append(StateKind(name, form_for(math.prod(small[name]), numel)))
        stand_in = StandIn(alike, seen.arrays)
        if ones != alike:
            with suppress(ConfigError):
                of_one = self._look(group, ones)
                if of_one.progress == seen.progress:
                    stand_in = StandIn(ones, of_one.arrays)
        is_shrunk = alike != shape and stand_in.shape == alike
        if is_shrunk and self._look(group, _few_elements(shape, 4)).progress != seen.progress:
            raise RefusedError("the numbers of its state depend on the values, or sizes, of a parameter")
        return KeptWhole(Kept(tuple(states), tuple(small.items()), stand_in.shape), stand_in)

    def _look(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> _Seen:
        """What an optimizer keeps of a parameter, found with two of the same shape and other values."""
        key = structure_of(group), shape
        if key not in self._seen:
            history = self._states_of(group, shape, 0)
            other = self._states_of(group, shape, 1) if any(map(_has_numbers, history)) else history
            self._seen[key] = _Seen.of(history, other, self._start)
        return self._seen[key]

    def _states_of(self, group: Mapping[str, Any], shape: tuple[int, ...], seed: int) -> list[Mapping[str, Any]]:
        """The states of a stand-in after each step."""
        with _on_stand_ins():
            whole = _Whole(self._blank, _that_moves(group), self._start, [shape], first=seed)
            return [whole.step().params[0][1] for _ in range(STEPS_OF_SHAPE)]

    def method(self, name: str, group: Mapping[str, Any], befores: Sequence[Progress], rule: TorchRule) -> None:
        """Runs a method over stand-ins together, and over pieces of them or each by itself, twice in turn.

        Args:
            name: the method's.
            group: the options.
            befores: of the parameters; there are stand-ins of each.
            rule: what the optimizer keeps of them.

        Raises:
            RefusedError: the results differ, or are none that can be kept.
        """
        with _on_stand_ins():
            trial = _MethodTrial(self._blank, name, group, befores, rule, self._shapes)
            for _ in range(2):
                trial.call()

    def temporary_numel(self, group: Mapping[str, Any], found: Found) -> int:
        """How many fp32 elements a step takes at once for each element of a piece, the gradient's copy among them.

        The first steps are counted too: arrays that they make are copied.
        """
        pieces = KeptWhole(Kept(found.states), StandIn())
        shapes = self._shapes if found.is_whole else self._shapes[-1:]
        kept = [self.kept(group, shape) if found.is_whole else pieces for shape in shapes]
        both_of = zip(shapes, kept, strict=True)
        with _on_stand_ins():
            each = [_peak_numel(self._blank, _that_moves(group), self._start, *both) for both in both_of]
        return 1 + max(each)


def _that_moves(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params"}
    rate = options.get("lr")
    if isinstance(rate, int | float | Tensor) and not isinstance(rate, bool) and float(rate) == 0:
        options["lr"] = torch.full_like(rate, 0.01) if isinstance(rate, Tensor) else 0.01
    return options


def _shapes(dim: int) -> list[tuple[int, ...]]:
    if dim == 0:
        return [()]
    if dim == 1:
        return [(ODD,), (ROUND,)]
    odd = [(99, 129), (9, 11, 129), (3, 3, 11, 129)][min(dim, 4) - 2]  # 12,771 elements
    even = [(128, 128), (16, 8, 128), (4, 4, 8, 128)][min(dim, 4) - 2]
    return [(1,) * (dim - len(odd)) + odd, (1,) * (dim - len(even)) + even]


def _values(seed: int, shape: Sequence[int]) -> Tensor:
    """Normally distributed, with magnitudes from 1e-4 to 1e2, and zeros."""
    made = torch.Generator("cpu").manual_seed(seed)
    values, scale, zeros = torch.empty((3, *shape), dtype=torch.float32, device="cpu")
    scale.random_(-4, 3, generator=made)
    values.normal_(generator=made).mul_(10.0**scale)
    return torch.where(zeros.uniform_(generator=made) < 0.05, 0.0, values)


def _gradient(step: int, number: int, shape: Sequence[int]) -> Tensor:
    return _values(1000 + 100 * step + number, shape)


def _few_elements(shape: Sequence[int], beyond: int = 0) -> tuple[int, ...]:
    """A shape with the small sizes of this one. In place of large ones there are others, in the same order.

    Args:
        shape: the shape.
        beyond: by how much these are larger than they have to be.
    """
    most = MOST_OF_SIZES[min(len(shape), len(MOST_OF_SIZES) - 1)]
    large = sorted({size for size in shape if size > most})
    return tuple(most + 1 + beyond + large.index(size) if size > most else size for size in shape)


class _Seen(NamedTuple):
    """What an optimizer keeps of a parameter.

    Attributes:
        arrays: by name, the shapes of what it keeps of this parameter alone.
        progress: the rest, after each step.
    """

    arrays: Mapping[str, tuple[int, ...]]
    progress: Sequence[Progress]

    @classmethod
    def of(cls, history: Sequence[Mapping[str, Any]], of_other: Sequence[Mapping[str, Any]], start: _Start) -> _Seen:
        """Looks at the states of two parameters, after each step, which differ in their values only.

        Raises:
            RefusedError: something in them is neither an array of fp32 nor a number.
        """
        arrays: dict[str, tuple[int, ...]] = {}
        for state, other_state in zip(history, of_other, strict=True):
            for name, one in state.items():
                other = other_state.get(name)
                _require_known(name, one)
                if isinstance(one, Tensor) and one.dtype is torch.float32:
                    is_same = isinstance(other, Tensor) and one.shape == other.shape and _equal(one, other)
                    is_number = not one.dim() and is_same and name not in start.constants
                    if not is_number and arrays.setdefault(name, tuple(one.shape)) != one.shape:
                        raise RefusedError(f"its state {name} changes its shape from step to step")
                elif isinstance(one, Tensor) and one.dim():
                    raise RefusedError(f"its state {name} is {one.dtype}, and only float32 is kept")
        kinds = [StateKind(name) for name in arrays]
        return cls(arrays, [progress_of(state, kinds, step) for step, state in enumerate(history, 1)])


def _has_numbers(state: Mapping[str, Any]) -> bool:
    """Whether a state has a number that may be an array of no dimension."""
    return any(isinstance(one, Tensor) and not one.dim() and one.dtype is torch.float32 for one in state.values())


class _Stepped(NamedTuple):
    """What whole parameters are after a step.

    Attributes:
        params: for each parameter: the master, and the state.
        group: the options.
    """

    params: Sequence[tuple[Tensor, Mapping[str, Any]]]
    group: Mapping[str, Any]


class _Whole:
    """Whole parameters, stepped together by one optimizer. The last one gets no gradient.

    `first` is the number of the first one, which decides its values.
    """

    def __init__(
        self, blank: Blank, group: Mapping[str, Any], start: _Start, shapes: Sequence[tuple[int, ...]], first: int = 0
    ) -> None:
        self._kind, self._first = blank, first
        self.params = [nn.Parameter(_values(first + n, shape)) for n, shape in enumerate((*shapes, shapes[-1]))]
        begun = start.constants or start.progress != NEVER
        state: dict[Tensor, dict[str, Any]] = {param: _starting(start, param) for param in self.params} if begun else {}
        self.optimizer = blank.fresh(_copied(group), state, self.params)
        self._idle = self.params[-1].detach().clone()
        self._count = 0

    @property
    def states(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Parameters and their states, but for the idle one."""
        return [(param, self.optimizer.state[param]) for param in self.params[:-1]]

    def step(self) -> _Stepped:
        """Makes one more step."""
        for number, param in enumerate(self.params[:-1], self._first):
            param.grad = _gradient(self._count, number, param.shape)
        self._count += 1
        try:
            self._kind.run(self.optimizer)
        except Exception as error:  # whatever the class raises
            raise StepRaisesError(f"its step() raises {type(error).__name__}: {error}") from error
        if not torch.equal(self.params[-1], self._idle):
            raise RefusedError("it moves parameters that have no gradient")
        params = [(param.detach().clone(), _kept(state)) for param, state in self.states]
        return _Stepped(params, _copied(self.optimizer.param_groups[0]))


def _kept(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}


def _starting(start: _Start, like: Tensor) -> dict[str, Any]:
    arrays = {name: torch.full_like(like, value) for name, value in start.constants.items()}
    return arrays | scalars_of(start.progress)


def _kinds_of(states: Iterable[tuple[Tensor, Mapping[str, Any]]], start: _Start) -> tuple[StateKind, ...]:
    """The arrays in the states of stand-ins.

    Args:
        states: parameters and their states.
        start: what the constructor put into them.

    Raises:
        RefusedError: something in them is neither such an array nor a number.
    """
    kinds: dict[str, StateKind] = {}
    for param, state in states:
        for name, value in state.items():
            _require_known(name, value)
            if _is_array(param, value):
                if value.dtype is not torch.float32:
                    raise RefusedError(f"its state {name} is {value.dtype}, and only float32 is kept")
                kinds[name] = StateKind(name, starts=start.constants.get(name, 0.0))
            elif isinstance(value, Tensor) and value.dim():
                raise _ShapeError(
                    f"its state {name} has shape {tuple(value.shape)} for a parameter of {tuple(param.shape)}"
                )
    return tuple(kinds.values())


class _ShapeError(RefusedError):
    """A state has another shape than its parameter."""


def _require_known(name: str, value: object) -> None:
    """Requires that a state is a plain tensor or a number.

    Raises:
        RefusedError: it is not, or is a number of a dtype that no commit has.
    """
    if isinstance(value, Tensor):
        if type(value) is not Tensor:
            raise RefusedError(f"its state {name} is a {type(value).__name__}, which only it can read")
        if not value.dim() and value.dtype not in SCALAR_DTYPES:
            raise RefusedError(f"its state {name} is a number of {value.dtype}, which no commit can keep")
    elif not (value is None or isinstance(value, int | float | bool)):
        raise RefusedError(f"its state {name} is a {type(value).__name__}, which no commit can keep")


class _By(Enum):
    """In what a parameter is stepped, each in a fresh copy of the optimizer."""

    PIECES = "pieces of its elements"
    SLICES = "slices of its first dimension"
    WHOLES = "as a whole"


class _Pieces:
    """One parameter, stepped by pieces of it."""

    def __init__(
        self,
        blank: Blank,
        group: Mapping[str, Any],
        start: _Start,
        found: KeptWhole,
        shape: tuple[int, ...],
        number: int,
        by: _By,
    ) -> None:
        self._blank, self._group, self._shape, self._number = blank, dict(group), shape, number
        self._found, self._by = found, by
        self._what = "piece of a parameter" if by is _By.PIECES else "parameter by itself"
        self._progress = start.progress
        self._master = _values(number, shape).reshape(-1) if by is _By.PIECES else _values(number, shape)
        self._arrays = _arrays_of(found.kept, start, self._master)
        self._cuts = [cut for cut in CUT_AT if cut < self._master.numel()]

    def differs_from(self, history: Sequence[_Stepped]) -> str | None:
        """Steps as often as `history` is long.

        Args:
            history: what whole parameters are after each step.

        Returns:
            What is not the same; None: all bits are.
        """
        states, stand_in = self._found.kept.states, self._found.stand_in
        for step, expected in enumerate(history):
            master, state = expected.params[self._number]
            grad = _gradient(step, self._number, self._shape)
            try:
                after, changed = advanced(self._blank, states, self._group, self._progress, stand_in=stand_in)
                made = self._step(grad)
            except RaisedError as error:
                return f"on a parameter of one element its step() raises {error}"
            except Exception as error:  # whatever the class raises
                return f"on a {self._what} its step() raises {type(error).__name__}: {error}"
            self._progress = after
            self._group |= changed
            if other := changed_options(self._group, expected.group):
                return f"its step makes an option of the group, {next(iter(other))}, {OF_VALUES}"
            if not _equal(self._master.reshape(-1), master.reshape(-1)):
                return (
                    f"a {self._what} gets other values than when all are stepped together: its step looks at several "
                    "parameters, or keeps something on the optimizer that changes from step to step"
                )
            for kind, array in zip(states, self._arrays, strict=True):
                whole = state.get(kind.name)
                if isinstance(whole, Tensor) and not _equal(array.reshape(-1), whole.reshape(-1)):
                    return f"its state {kind.name} of a {self._what} differs from that when all are stepped together"
            for shown in (progress_of(state, states, after.step), progress_of(made, states, after.step)):
                if not _same_numbers(shown, after):
                    return "the numbers of its state depend on the values of a parameter"
        return None

    def _step(self, grad: Tensor) -> Mapping[str, Any]:
        """Steps the parameter, and gives its state: that of the last piece if there are several."""
        if self._by is _By.SLICES:
            for n in range(len(grad)):
                arrays = [array[n : n + 1] for array in self._arrays]
                made = self._step_piece(self._master[n : n + 1], grad[n : n + 1].clone(), arrays)
            return made
        if self._by is _By.WHOLES:
            return self._step_piece(self._master, grad.clone(), self._arrays)
        grad = grad.reshape(-1)
        for low, high in pairwise([0, *self._cuts, len(grad)]):
            arrays = [array[low:high] for array in self._arrays]
            made = self._step_piece(self._master[low:high], grad[low:high].clone(), arrays)
        return made

    def _step_piece(self, master: Tensor, grad: Tensor, arrays: Sequence[Tensor]) -> Mapping[str, Any]:
        param = nn.Parameter(master)
        param.grad = grad
        return run_piece(self._blank, self._found.kept.states, self._group, self._progress, param, arrays)[0]


def _arrays_of(kept: Kept, start: _Start, master: Tensor) -> list[Tensor]:
    """The arrays of a parameter that was not stepped yet."""
    small = dict(kept.small)
    return [
        torch.zeros(small[kind.name], dtype=torch.float32, device="cpu")
        if kind.name in small
        else torch.full_like(master, start.constants.get(kind.name, 0.0))
        for kind in kept.states
    ]


class _Part(NamedTuple):
    """A stand-in of a trial of a method, and the same values for pieces of it, or for one that is called by itself.

    Attributes:
        param: the stand-in.
        master: its values; flat, if there are to be pieces.
        arrays: those of its states.
        kept: what is kept of it.
        stand_in: one that goes on as it does.
    """

    param: nn.Parameter
    master: Tensor
    arrays: Sequence[Tensor]
    kept: Kept
    stand_in: StandIn


class _MethodTrial:
    """Calls a method with whole parameters, all together in one copy of the optimizer, and with pieces of the same, or
    with each by itself.

    Only the former have gradients: in a run nothing but the step sees any.

    Args:
        blank: makes copies of the optimizer.
        name: the method's.
        group: the options.
        befores: of the parameters.
        rule: what the optimizer keeps of them.
        shapes: of the parameters of each progress, if they can have it.
    """

    def __init__(
        self,
        blank: Blank,
        name: str,
        group: Mapping[str, Any],
        befores: Sequence[Progress],
        rule: TorchRule,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._blank, self._name, self._is_whole = blank, name, rule.is_whole
        self._options = {key: value for key, value in group.items() if key != "params"}
        self._parts: list[_Part] = []
        self._progress: list[Progress] = []
        state: dict[Tensor, dict[str, Any]] = {}
        each = ((before, shape, rule.kept(shape)) for before in befores for shape in shapes)
        possible = [one for one in each if set(one[0].arrays) <= {kind.name for kind in one[2].states}]
        if {before for before, _, _ in possible} != set(befores):
            raise RefusedError(
                "what it keeps of a parameter depends on its sizes, and no stand-in of this trial has them"
            )
        for number, (before, shape, found) in enumerate(possible):
            zeros = _arrays_of(found, _Start({}, NEVER), torch.empty(shape, dtype=torch.float32, device="cpu"))
            arrays = [_values(100 * (1 + at) + number, one.shape).abs() for at, one in enumerate(zeros)]  # variances
            param = nn.Parameter(_values(number, shape))
            param.grad = _gradient(0, number, shape)
            both = zip(found.states, arrays, strict=True)
            kept = {kind.name: array for kind, array in both if kind.name in before.arrays}
            if before != NEVER:
                state[param] = kept | scalars_of(before)
            own = [one.clone() if self._is_whole else one.reshape(-1).clone() for one in (param.detach(), *arrays)]
            self._parts.append(_Part(param, own[0], own[1:], found, rule.stand_in(found.like)[1]))
            self._progress.append(before)
        self._made = blank.fresh(_copied(self._options), state, [part.param for part in self._parts])

    def call(self) -> None:
        """Calls it once more.

        Raises:
            RefusedError: pieces are not what the whole parameters are.
        """
        made = self._made
        try:
            with _without_noise():
                self._blank.run(made, self._name)
        except Exception as error:
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(f"it raises {type(error).__name__}: {error}") from error
        if name := self._blank.changed(made):
            raise RefusedError(f"it changes {name} of the optimizer itself, which no commit would find")
        states = [made.state.get(part.param, {}) for part in self._parts]
        for part, state in zip(self._parts, states, strict=True):
            for name, value in state.items():
                _require_known(name, value)
                if isinstance(value, Tensor) and value.dim() and name not in {kind.name for kind in part.kept.states}:
                    raise RefusedError(f"it keeps {name}, for which nothing was reserved")
        options = dict(self._options)
        for number, (part, state) in enumerate(zip(self._parts, states, strict=True)):
            param, kinds = part.param, part.kept.states
            before = self._progress[number]
            after, changed = self._advanced(part, before)
            self._call_pieces(part, before, after)
            self._progress[number] = after
            options |= changed
            if not _same_numbers(progress_of(state, kinds, before.step), after):
                raise RefusedError("the numbers of a state that it makes depend on the values of a parameter")
            wholes = [(part.master, param), *zip(part.arrays, (state.get(kind.name) for kind in kinds), strict=True)]
            for own, whole in wholes:
                if isinstance(whole, Tensor) and not _equal(own.reshape(-1), whole.detach().reshape(-1)):
                    raise RefusedError(
                        "a piece of a parameter gets other values than the same elements of the whole parameter: it "
                        "looks at more than one element, or at gradients, which only the step sees"
                    )
        self._options = options
        if other := changed_options(options, made.param_groups[0]):
            raise RefusedError(f"it makes an option of the group, {next(iter(other))}, {OF_VALUES}")

    def _advanced(self, part: _Part, before: Progress) -> tuple[Progress, dict[str, Any]]:
        kinds, stand_in = part.kept.states, part.stand_in
        try:
            return advanced(self._blank, kinds, self._options, before, self._name, stand_in=stand_in)
        except RaisedError as error:
            raise RefusedError(f"with a parameter of one element it raises {error}") from error

    def _call_pieces(self, part: _Part, before: Progress, after: Progress) -> None:
        kinds, all_of_it = part.kept.states, [part.master, *part.arrays]
        edges = [0, *(cut for cut in CUT_AT if cut < part.master.numel()), part.master.numel()]
        cut = [[one[low:high] for one in all_of_it] for low, high in pairwise(edges)] if not self._is_whole else []
        for master, *arrays in cut or [all_of_it]:
            param = nn.Parameter(master)
            try:
                state, _ = run_piece(self._blank, kinds, self._options, before, param, arrays, self._name)
            except Exception as error:  # whatever the class raises
                raise RefusedError(f"on a piece of a parameter it raises {type(error).__name__}: {error}") from error
            if not _same_numbers(progress_of(state, kinds, before.step), after):
                raise RefusedError("the numbers of a state that it makes depend on the values of a parameter")


def _same_numbers(one: Progress, other: Progress) -> bool:
    def is_same(a: Scalar, b: Scalar) -> bool:
        return a.name == b.name and a.dtype == b.dtype and (a.value == b.value or (a.value != a.value != b.value))

    return (
        one.arrays == other.arrays
        and len(one.scalars) == len(other.scalars)
        and all(map(is_same, one.scalars, other.scalars))
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


def _same_bits_in_large_blocks(
    blank: Blank, group: Mapping[str, Any], start: _Start, states: Sequence[StateKind]
) -> bool:
    """Whether torch's threads may share a piece: that of one thread and of several have the same bits."""
    options, numel = _that_moves(group), LARGE_BLOCK
    results = []
    for block in (BLOCK, LARGE_BLOCK):
        master = _values(7, (numel,))
        arrays = [torch.full_like(master, start.constants.get(kind.name, 0.0)) for kind in states]
        progress = start.progress
        with _on_stand_ins():
            for step in range(2):
                grad = _gradient(step, 7, (numel,))
                for low in range(0, numel, block):
                    param = nn.Parameter(master[low : low + block])
                    param.grad = grad[low : low + block].clone()
                    run_piece(blank, states, options, progress, param, [one[low : low + block] for one in arrays])
                progress, changed = advanced(blank, states, options, progress)
                options = options | changed
        results.append((master, *arrays))
        options = _that_moves(group)
    return all(map(_equal, *results))


@contextmanager
def _on_stand_ins() -> Iterator[None]:
    """What a class does with stand-ins: nobody hears of it, and random generators are what they were afterwards."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with without_warnings(), cpu_by_default(), torch.no_grad():
            yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


@contextmanager
def _without_noise() -> Iterator[None]:
    """Requires that what runs in the body draws no random numbers.

    Raises:
        RefusedError: it does.
    """
    before = _random_states()
    yield
    if _random_states() != before:
        raise RefusedError("it draws random numbers, so no two runs on other tiers would agree")


class _Peak(TorchFunctionMode):
    """Counts the memory that torch's functions take, as long as somebody has it.

    Args:
        known: what there is already.

    Attributes:
        peak_bytes: the most that there was at once beside `known`.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._tensors: Counter[int] = Counter()  # by their memory
        self._nbytes = 0
        self.peak_bytes = 0
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch_private.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel():
                self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self._nbytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        at, nbytes = storage.data_ptr(), storage.nbytes()
        if at not in self._known:
            self._nbytes += 0 if self._tensors[at] else nbytes
            self._tensors[at] += 1
            weakref.finalize(tensor, self._forget, at, nbytes)

    def _forget(self, at: int, nbytes: int) -> None:
        self._tensors[at] -= 1
        if not self._tensors[at]:
            self._nbytes -= nbytes


def _peak_numel(blank: Blank, options: dict[str, Any], start: _Start, shape: tuple[int, ...], found: KeptWhole) -> int:
    """How many fp32 elements the first steps of a stand-in take at once for each of its own, beside the gradient."""
    (states, *_), progress, peak = found.kept, start.progress, 0
    master = _values(7, shape)
    arrays = _arrays_of(found.kept, start, master)
    for step in range(2):
        param = nn.Parameter(master)
        param.grad = _gradient(step, 7, shape)
        with _Peak([master, *arrays, param.grad]) as counted:
            run_piece(blank, states, options, progress, param, arrays)
        peak = max(peak, counted.peak_bytes)
        progress, changed = advanced(blank, states, options, progress, stand_in=found.stand_in)
        options = options | changed
    return -(-peak // max(master.nbytes, 1))


def _random_states() -> tuple[bytes, ...]:
    numbers: Any = np.random.get_state()  # the one that others draw from
    return (
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        numbers[1].tobytes() + repr(numbers[2:]).encode(),
    )
