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
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.layout import StateKind
from offload.optim.rule import NEVER, Progress, Scalar, scalars_of
from offload.optim.rules.torch_rule import (
    BLOCK,
    LARGE_BLOCK,
    Blank,
    TorchRule,
    cpu_by_default,
    progress_of,
    step_piece,
    structure_of,
    without_warnings,
)

STEPS = 4
SCALAR_DTYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool}
"""Of numbers of a state that are tensors; manifest.py has the same."""
ODD, ROUND = 12_771, 16_384
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
        dims = sorted({param.dim() for param in group["params"]}) or [1]

        def probe(options: Mapping[str, Any]) -> Sequence[StateKind]:
            return _probe(blank, options, start, dims)

        states = probe(group)
        has_large_blocks = _same_bits_in_large_blocks(blank, group, start, states)
    except ConfigError as error:
        raise ConfigError(
            f"optimizer is {name}, which cannot be offloaded: {error}; the model was not changed. Optimizers run whose "
            "step treats each element by itself, as torch.optim.AdamW, SGD, RMSprop, Adagrad, NAdam"
        ) from None
    return TorchRule(blank, states, start.progress, structure_of(group), probe, has_large_blocks=has_large_blocks)


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


def _probe(blank: Blank, group: Mapping[str, Any], start: _Start, dims: Sequence[int]) -> tuple[StateKind, ...]:
    """Steps whole stand-ins and pieces.

    Returns:
        The arrays that the optimizer keeps.

    Raises:
        RefusedError: the results differ, or are none that can be kept.
    """
    options = _that_moves(group)
    shapes = [shape for dim in (dims if any(dims) else (0, 1)) for shape in _shapes(dim)]
    before = _random_states()
    with without_warnings(), cpu_by_default(), torch.no_grad():
        whole = _Whole(blank, options, start, shapes)
        history = [whole.step() for _ in range(STEPS)]
        if _random_states() != before:
            raise RefusedError("it draws random numbers, so no two runs on other tiers would agree")
        states = _kinds_of(whole, start)
        in_pieces = [_Pieces(blank, options, start, states, shape, number) for number, shape in enumerate(shapes)]
        why = next((why for one in in_pieces if (why := one.differs_from(history))), None)
        if why is None:
            return states
        alone = [_Pieces(blank, options, start, states, shape, n, cuts=()) for n, shape in enumerate(shapes)]
        if all(one.differs_from(history) is None for one in alone):
            raise RefusedError("its update of an element depends on others of the same parameter, such as their norm")
        raise RefusedError(why)


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


class _Whole:
    """Whole parameters, stepped together by one optimizer. The last one gets no gradient."""

    def __init__(
        self, blank: Blank, group: Mapping[str, Any], start: _Start, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self._kind = blank
        self.params = [nn.Parameter(_values(number, shape)) for number, shape in enumerate((*shapes, shapes[-1]))]
        begun = start.constants or start.progress != NEVER
        state: dict[Tensor, dict[str, Any]] = {param: _starting(start, param) for param in self.params} if begun else {}
        self.optimizer = blank.fresh(_copied(group), state, self.params)
        self._idle = self.params[-1].detach().clone()
        self._count = 0

    def step(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Makes one more step.

        Returns:
            Masters and states, but for those of the idle one.
        """
        for number, param in enumerate(self.params[:-1]):
            param.grad = _gradient(self._count, number, param.shape)
        self._count += 1
        try:
            self._kind.run(self.optimizer)
        except Exception as error:  # whatever the class raises
            raise RefusedError(f"its step() raises {type(error).__name__}: {error}") from error
        if not torch.equal(self.params[-1], self._idle):
            raise RefusedError("it moves parameters that have no gradient")
        return [(param.detach().clone(), _kept(self.optimizer.state[param])) for param in self.params[:-1]]


def _kept(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}


def _starting(start: _Start, like: Tensor) -> dict[str, Any]:
    arrays = {name: torch.full_like(like, value) for name, value in start.constants.items()}
    return arrays | scalars_of(start.progress)


def _kinds_of(whole: _Whole, start: _Start) -> tuple[StateKind, ...]:
    """The arrays in the states of stand-ins.

    Raises:
        RefusedError: something in them is neither such an array nor a number.
    """
    kinds: dict[str, StateKind] = {}
    for param in whole.params[:-1]:
        for name, value in whole.optimizer.state[param].items():
            if isinstance(value, Tensor) and type(value) is not Tensor:
                raise RefusedError(f"its state {name} is a {type(value).__name__}, which only it can read")
            if _is_array(param, value):
                if value.dtype is not torch.float32:
                    raise RefusedError(f"its state {name} is {value.dtype}, and only float32 is kept")
                kinds[name] = StateKind(name, starts=start.constants.get(name, 0.0))
            elif isinstance(value, Tensor) and value.dim():
                raise RefusedError(
                    f"its state {name} has shape {tuple(value.shape)} for a parameter of {tuple(param.shape)}"
                )
            elif isinstance(value, Tensor) and value.dtype not in SCALAR_DTYPES:
                raise RefusedError(f"its state {name} is a number of {value.dtype}, which no commit can keep")
            elif not (value is None or isinstance(value, Tensor | int | float | bool)):
                raise RefusedError(f"its state {name} is a {type(value).__name__}, which no commit can keep")
    return tuple(kinds.values())


class _Pieces:
    """One parameter, stepped piece by piece, each in a fresh copy of the optimizer."""

    def __init__(
        self,
        blank: Blank,
        group: Mapping[str, Any],
        start: _Start,
        states: Sequence[StateKind],
        shape: tuple[int, ...],
        number: int,
        cuts: Sequence[int] = CUT_AT,
    ) -> None:
        self._blank, self._group, self._states, self._shape, self._number = blank, dict(group), states, shape, number
        self._progress = start.progress
        self._master = _values(number, shape).reshape(-1)
        self._arrays = [torch.full_like(self._master, start.constants.get(kind.name, 0.0)) for kind in states]
        inner = [cut for cut in cuts if cut < len(self._master)]
        self._edges = [0, *inner, len(self._master)]
        self._is_whole = not cuts

    def differs_from(self, history: Sequence[Sequence[tuple[Tensor, Mapping[str, Any]]]]) -> str | None:
        """Steps as often as `history` is long.

        Args:
            history: for each step, masters and states of whole parameters.

        Returns:
            What is not the same; None: all bits are.
        """
        rule = TorchRule(
            self._blank, self._states, NEVER, structure_of(self._group), lambda _: (), has_large_blocks=False
        )
        for step, expected in enumerate(history):
            master, state = expected[self._number]
            grad = _gradient(step, self._number, self._shape).reshape(-1)
            try:
                after, options = (NEVER, {}) if self._is_whole else rule.advance(self._group, self._progress)
                for low, high in zip(self._edges, self._edges[1:], strict=False):
                    made = self._step_piece(grad, low, high)
            except ConfigError as error:  # of a stand-in of one element
                return str(error)
            except Exception as error:  # whatever the class raises
                return f"on a piece of a parameter its step() raises {type(error).__name__}: {error}"
            if self._is_whole:  # no stand-in of one element tells
                after = progress_of(made, self._states, step + 1)
            self._progress = after
            self._group |= options
            if not _equal(self._master, master.reshape(-1)):
                return (
                    "a piece of a parameter gets other values than the same elements of the whole parameter: its step "
                    "looks at more than one element, or keeps something on the optimizer that changes from step to step"
                )
            for kind, array in zip(self._states, self._arrays, strict=True):
                whole = state.get(kind.name)
                if isinstance(whole, Tensor) and not _equal(array, whole.reshape(-1)):
                    return f"its state {kind.name} of a piece of a parameter differs from that of the whole parameter"
            for shown in (progress_of(state, self._states, after.step), progress_of(made, self._states, after.step)):
                if not _same_numbers(shown, after):
                    return "the numbers of its state depend on the values of a parameter"
        return None

    def _step_piece(self, grad: Tensor, low: int, high: int) -> Mapping[str, Any]:
        shape = self._shape if self._is_whole else (-1,)
        param = nn.Parameter(self._master[low:high].view(shape))
        param.grad = grad[low:high].clone().view(shape)
        arrays = [array[low:high].view(shape) for array in self._arrays]
        return step_piece(self._blank, self._states, self._group, self._progress, param, arrays)


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
        rule = TorchRule(blank, states, NEVER, None, lambda _: (), has_large_blocks=False)
        progress = start.progress
        with without_warnings(), cpu_by_default(), torch.no_grad():
            for step in range(2):
                grad = _gradient(step, 7, (numel,))
                for low in range(0, numel, block):
                    param = nn.Parameter(master[low : low + block])
                    param.grad = grad[low : low + block].clone()
                    step_piece(blank, states, options, progress, param, [one[low : low + block] for one in arrays])
                progress, changed = rule.advance(options, progress)
                options = options | changed
        results.append((master, *arrays))
        options = _that_moves(group)
    return all(map(_equal, *results))


def _random_states() -> tuple[bytes, ...]:
    numbers: Any = np.random.get_state()  # the one that others draw from
    return (
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        numbers[1].tobytes() + repr(numbers[2:]).encode(),
    )
