"""What `p.grad` answers after the gradient has left the device: a stand-in there behaves as the gradient.

[Note: a stand-in]
| asked of `p.grad`                     | before `step()`                                  | after it                |
|---------------------------------------|--------------------------------------------------|-------------------------|
| shape, dtype, device                  | the parameter's                                  | the same                |
| 2-norms                               | from sums of squares taken on the way, in fp32   | the same                |
| multiplied by a factor, in place      | the factor is recorded, and applied by the step  | GradientMovedError      |
| values, and all other operations      | computed on a copy of the values                 | the same, where the     |
|                                       |                                                  | memory is not used anew |
| any other change, also through a view | the copy is written back where the gradient is   | GradientMovedError      |
| `zero_()`                             | the gradient is zeros, and counts                | the same                |
| its graph, of a backward with         | values have a node, of which a backward raises   | the same                |
| `create_graph=True`                   | GradientMovedError                               |                         |

Where `p.grad` has a stand-in, the next gradient is added to the one that it stands for; where it is None, the next
gradient replaces it. Over several ranks norms are of the whole gradient, and reading values raises GradientMovedError,
because no rank has all of them.

Autograd makes a new tensor where `p.grad` is None. So a gradient that begins anew gets a new stand-in. One that
somebody has kept, `kept = [p.grad for p in params]`, stands for a gradient that is gone: it raises GradientMovedError,
and never answers for the new one.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import Tensor

from offload import torch_private
from offload.entries import entry
from offload.errors import AccumulationError, ClosedError, ConfigError, GradientMovedError
from offload.grads.base import GradientBuffer
from offload.layout import Layout
from offload.model.compiled import call_uncompiled, runs_as_it_is
from offload.model.dense import flattened_like
from offload.model.fetch import HeldUnits
from offload.model.flat_param import FlatParameters
from offload.model.held_param import HeldParam
from offload.model.pending import PendingUpdates
from offload.model.torch_functions import Kind, answer_without_values, changed, counting, kind_of, takes_lists
from offload.model.torch_helpers import bits_of, call_eagerly, in_backward, instances_in, tensors_in
from offload.optim.scale import StepScale
from offload.ranks.tensor_parallel import is_dtensor, local_gradient, local_of, whole_like
from offload.run import Owner

_DTYPE: Any = Tensor.dtype
_DATA: Any = Tensor.data
_VERSION: Any = Tensor._version
_OWN = frozenset({_VERSION.__get__, Tensor.untyped_storage, Tensor.is_coalesced})
"""Functions that a stand-in answers with its own version and storage, beside those that need no values of anything."""
_FACTORS = {
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__, torch_private.foreach_mul), False),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__, Tensor.__idiv__, torch_private.foreach_div), True),
}
"""In-place products with numbers; whether they divide."""
_ZEROS = (Tensor.zero_, torch.zero_, torch_private.foreach_zero)
_NORMS = {torch.linalg.vector_norm: 2, torch_private.foreach_norm: 2, Tensor.norm: "fro", torch.norm: "fro"}
"""Norms of a tensor as a vector, and their default order."""
_SCALER_FILE = torch.amp.grad_scaler.__file__


class StandIn(Tensor):
    """A tensor without storage in the place of a gradient; see [Note: a stand-in].

    Its `age` is the number of gradients that the parameter had before this one.

    A GradScaler refuses fp16 gradients, because unscaling them in place would lose the small ones. Ours are multiplied
    in fp32, by the step. So a GradScaler that asks for the dtype gets fp32.
    """

    number: int
    parameter: str
    answers: weakref.ref[Answers]
    age: int

    @staticmethod
    def of(like: Tensor, number: int, name: str, answers: Answers, age: int) -> StandIn:
        """A stand-in with the shape, dtype and device of `like`, the parameter or another stand-in of it."""
        made: StandIn = Tensor._make_wrapper_subclass(
            StandIn, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.number, made.parameter, made.answers, made.age = number, name, weakref.ref(answers), age
        return made

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        answers = self.answers()
        if answers is None or not answers.can_read(self):
            return f"<the gradient of {self.parameter}, which the optimizer has used>"
        return repr(answers.read(self))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kind_of(func) is Kind.META or func in _OWN:
            if func == _DTYPE.__get__ and sys._getframe(1).f_code.co_filename == _SCALER_FILE:
                return torch.float32
            if func is torch_private.has_compatible_type:
                return True  # `p.grad.data = x` is answered, whatever x is
            return torch_private.past_subclasses(func, *args, **(kwargs or {}))
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _answer(func, args, kwargs or {})


def _alive(one: StandIn) -> Answers:
    answers = one.answers()
    if answers is None:
        raise GradientMovedError(
            f"the gradient of {one.parameter} went with its optimizer: keep the optimizer as long as you use gradients"
        )
    return answers


def _answer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return call_eagerly(_answer_eagerly, func, args, kwargs)


def _answer_eagerly(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    owners = _owners_in((args, kwargs))
    if len(owners) == 1:
        return owners[0].answer(func, args, kwargs)
    lists = [one for one in (*args, *kwargs.values()) if isinstance(one, list | tuple)]
    if takes_lists(func) and lists and all(len(one) == len(lists[0]) for one in lists):
        of_each = [_owners_in([one[at] for one in lists]) for at in range(len(lists[0]))]
        if any(one != of_each[0] for one in of_each):  # as where the gradients of two models are clipped together
            return _answer_in_pieces(func, args, kwargs, of_each)
    written = _owners_in(changed(func, args, kwargs))
    if len(written) > 1:
        raise GradientMovedError(
            f"{getattr(func, '__name__', func)} would write to gradients that several OffloadZero have: call it for "
            "those of one model after the other"
        )
    owner = (written or owners)[0]

    def value_of(one: StandIn) -> Tensor:
        return one if (other := _alive(one)) is owner else other.read(one)

    return owner.answer(func, _replaced(args, value_of), _replaced(kwargs, value_of))


def _answer_in_pieces(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], of_each: Sequence[Sequence[Answers]]
) -> Any:
    """Answers a function of lists in which gradients of several optimizers are.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keywords.
        of_each: for each place in the lists, whose gradients are there.
    """
    results: list[Any] = []
    for _, group in groupby(range(len(of_each)), of_each.__getitem__):
        first, *others = group
        piece = slice(first, first + 1 + len(others))
        cut = {key: one[piece] if isinstance(one, list | tuple) else one for key, one in kwargs.items()}
        results.extend(func(*(one[piece] if isinstance(one, list | tuple) else one for one in args), **cut) or ())
    return results or None


def _owners_in(tree: Any) -> list[Answers]:
    """Whose the stand-ins in nested lists, tuples and dicts are."""
    return list(dict.fromkeys(map(_alive, instances_in(tree, StandIn))))


def _replaced(tree: Any, value_of: Callable[[StandIn], Tensor]) -> Any:
    """`tree` with each stand-in replaced by what `value_of` has for it."""
    if isinstance(tree, StandIn):
        return value_of(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(one, value_of) for one in tree)
    return {key: _replaced(one, value_of) for key, one in tree.items()} if type(tree) is dict else tree


def is_stand_in(grad: Tensor | None) -> bool:
    """Whether `grad` is a stand-in."""
    return type(grad) is StandIn


class _LostGraph(torch.autograd.Function):
    """Stands where plain torch has the graph of a gradient, and raises when a gradient is to go through it.

    Without it a loss that was computed from `p.grad` would train as if that were a constant, and nothing would say so.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, name: str) -> Tensor:
        ctx.parameter = name
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise GradientMovedError(
            f"a loss was computed from the gradient of {ctx.parameter}, whose graph was not kept when it left the "
            "device: get gradients to compute with from torch.autograd.grad(loss, params, create_graph=True) instead "
            "of loss.backward(create_graph=True); to compute without a graph, read p.grad.detach()"
        )


class Answers:
    """Passes gradients on to the gradient buffer as autograd makes them, and answers for them in `p.grad`."""

    def __init__(
        self,
        layout: Layout,
        parameters: FlatParameters,
        gradients: GradientBuffer,
        scale: StepScale,
        pending: PendingUpdates,
        units: HeldUnits,
        owner: Owner,
    ) -> None:
        self.entries = units.entries
        self._units = units
        self._ranks = layout.ranks
        self._parameters = parameters
        self._gradients = gradients
        self._scale = scale
        self._pending = pending
        self._owner = owner
        self._pid = os.getpid()
        self._is_removed = False
        self._held = parameters.held[: parameters.trained]
        for held in self._held:
            self._make_stand_in(held)
        self._knows_norms = False
        # The last tensor that gradients were multiplied by, its version, and its value.
        self._factor: tuple[Tensor, int, float] | None = None

    def _make_stand_in(self, held: HeldParam) -> None:
        age = held.gradient.stand_in.age if isinstance(held.gradient.stand_in, StandIn) else 0
        held.gradient.stand_in = StandIn.of(held.tensor, held.number, held.spec.name, self, age)

    def _show(self, held: HeldParam) -> None:
        """Puts the stand-in into `p.grad`."""
        held.gradient.is_shown = True  # first: an interrupt may come in between
        held.grad = held.gradient.stand_in

    def _renew(self, held: HeldParam) -> None:
        """Makes the stand-in of a gradient that begins anew, unless nobody has got the last one."""
        last = held.gradient.stand_in
        if held.gradient.is_shown and isinstance(last, StandIn):
            with torch_private.PastSubclasses():
                held.gradient.stand_in = StandIn.of(last, held.number, held.spec.name, self, last.age + 1)
            held.gradient.is_shown = False

    # What hooks call. Autograd holds these functions where the garbage collector cannot look: they must not keep an
    # optimizer alive that nobody refers to, with its memory and files.

    def before_accumulation(self, number: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        """What the node calls that is about to accumulate into a leaf of parameter `number`."""
        answers = weakref.ref(self)

        def begins(grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None and (alive := answers()) is not None:
                call_uncompiled(alive.accumulation_begins, number)

        runs_as_it_is(begins)
        return begins

    def after_accumulation(self, number: int, start: int = 0) -> Callable[[Tensor], None]:
        """What autograd calls with a leaf of a parameter when it has accumulated its gradient.

        Args:
            number: the parameter's number.
            start: the element of the parameter at which the leaf begins.
        """
        answers = weakref.ref(self)

        def ended(leaf: Tensor) -> None:
            if (alive := answers()) is not None:
                call_uncompiled(alive.accumulation_ended, number, leaf, start)

        runs_as_it_is(ended)
        return ended

    @entry
    def accumulation_begins(self, number: int) -> None:
        """Called when autograd is about to accumulate a gradient into a leaf of parameter `number`."""
        if self._is_frozen(number):
            return  # since the forward, and autograd accumulates nothing
        self._units.backward_runs()
        self._require_home()
        with torch_private.PastSubclasses():
            held = self._held[number]
            if is_stand_in(held.grad) and not held.is_marked:
                self._read_others()  # autograd adds to what the user assigned, another parameter's gradient
            if held.spec.tile and held.grad is not None and not held.is_marked:
                self.take_changes([number])  # autograd adds to what the user assigned, but not that of a tile
            self._require_no_factors(number)
            self._pending.require_applied(number)
            self._pending.before_gradients()
            self._forget_norms_of(number)
            # With a stand-in there the gradient is added; without, the user dropped what was there.
            held.gradient.has_graph = held.gradient.has_graph and held.is_marked and self.is_live(number)
            if held.is_marked:
                held.grad = None
                self._store_copy(number)
            else:
                self._gradients.clear(number)
                self._renew(held)
            held.gradient.forget()

    def accumulation_ended(self, number: int, leaf: Tensor, start: int = 0) -> None:
        """Called when autograd has accumulated a gradient of a leaf; see `pass_on`."""
        if not self._is_frozen(number):
            self.pass_on(number, leaf, start)
        elif leaf is not self._held[number].tensor:
            leaf.grad = None

    def _is_frozen(self, number: int) -> bool:
        return not self._held[number].requires_grad

    @entry
    def pass_on(self, number: int, leaf: Tensor, start: int = 0) -> None:
        """Takes the gradient of a leaf away, puts a stand-in there, and passes the gradient on to the gradient buffer.

        Args:
            number: the parameter's number.
            leaf: the parameter, or a tile of it.
            start: the element of the parameter at which the leaf begins.
        """
        with torch_private.PastSubclasses():
            held = self._held[number]
            param, grad = held.tensor, leaf.grad
            if held.spec.tile and leaf is param and (grad is None or held.is_marked):
                return  # the graph of its tiles gets here, too, without a gradient: see tiling.py
            self._forget_norms_of(number)
            if grad is None:  # a hook that was called before has dropped it
                self._gradients.clear(number)
                return
            # First the stand-in: if the buffer raises, the gradient must not be taken for one that the user assigned.
            leaf.grad = None
            self._show(held)
            held.gradient.has_graph = held.gradient.has_graph or grad.requires_grad
            local = local_gradient(param, grad.detach())
            is_tile = leaf is not param
            values = flattened_like(leaf, local) if is_tile else held.flattened(local)
            self._gradients.accumulate(number, values, start)

    # What the optimizer calls.

    @property
    def active(self) -> list[int]:
        """The parameters that have a gradient."""
        return list(filter(self.has, range(len(self._held))))

    def has(self, number: int) -> bool:
        """Whether a parameter has a gradient that the user did not drop, and no step has used."""
        return self.is_live(number) and self._held[number].is_marked

    def require_whole(self) -> None:
        """Requires that no gradient is there in part.

        In a backward that of a weight in tiles may be, and nobody knows whether more of it comes: of an embedding only
        tiles of words that are used do.

        Raises:
            ConfigError: naming the first parameter.
        """
        if not in_backward():
            return
        for held in self._held:
            if held.spec.tile and held.is_marked and not self.is_live(held.number):
                raise ConfigError(
                    f"the gradients were used inside of a backward, and {held.spec.name} runs in tiles, of which some "
                    "have no gradient so far: call step(), clipping and the like after backward(), or give "
                    "Tuning(tile=0)"
                )

    def take_changes(self, numbers: Collection[int] | None = None) -> None:
        """Takes over what the user did to `p.grad`: gradients assigned to it, zeros, and writes to views of its values.

        Args:
            numbers: the parameters to look at; None: all.

        Raises:
            ConfigError: if the model is parked, and cannot go on.
        """
        self._require_home()
        changed = self._held if numbers is None else [self._held[number] for number in sorted(numbers)]
        self._take_writes(changed)
        given = [held for held in changed if (grad := held.grad) is not None and grad is not held.gradient.stand_in]
        if any(is_stand_in(held.grad) for held in given):
            self._read_others()
        for held in given:
            if held.grad is not None and not held.is_marked:
                # The last step still needs the memory where this one goes. An assigned gradient may be of any age.
                self._pending.apply_all()
                self._require_no_factors(held.number, is_assigned=True)
                self._gradients.clear(held.number)
                self._renew(held)
                held.gradient.used_by = None
                held.gradient.is_zeroed = held.gradient.has_graph = False
                self.pass_on(held.number, held.tensor)
                self._scale.use_as_is(held.number)  # factors that there are were for the one before

    def _take_writes(self, changed: Sequence[HeldParam]) -> None:
        """Takes over zeros, and writes to views of values, of these parameters.

        What was assigned stays in `p.grad`: whoever has a list of all gradients, as torch's clipping has, goes on to
        write to it.
        """
        for held in changed:
            self._store_copy(held.number)
        for held in changed:
            if held.gradient.is_zeroed:
                held.gradient.is_zeroed = False
                if held.is_marked:
                    with torch_private.PastSubclasses():
                        like = held.local
                        zeros = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
                        self._gradients.accumulate(held.number, zeros)

    def _read_others(self) -> None:
        """Puts values wherever `p.grad` is the stand-in of another parameter, or of an earlier gradient.

        All of them at once, before any is taken: in `a.grad, b.grad = b.grad, a.grad` each one is needed for the other.
        """
        ones = [(held, held.grad) for held in self._held if not held.is_marked]
        values = [(held, grad, self._value_of_any(grad)) for held, grad in ones if isinstance(grad, StandIn)]
        for held, grad, value in values:
            if held.grad is grad:  # reading has not taken it
                held.grad = value

    def _value_of_any(self, one: StandIn) -> Tensor:
        """The values that a stand-in has, which may be one of another optimizer."""
        if (other := _alive(one)) is not self:
            return other.read(one)
        self._require_now(one)
        return self.values_of(one.number)

    def begin_anew(self, used: Sequence[int] = ()) -> None:
        """Makes the next gradients begin anew.

        Args:
            used: the parameters whose gradients a step has used.
        """
        for held in self._held:
            held.gradient.forget()
            held.gradient.has_graph = held.gradient.has_graph and held.is_marked
        for number in used:
            self._held[number].gradient.used_by = self._scale.of(number)
        self._knows_norms = False
        self._factor = None

    def become_zeros(self, params: Sequence[Tensor]) -> None:
        """Gives these parameters, which have no gradient, a gradient of zeros."""
        for param in params:
            number = self._parameters.number_of(param)
            if number is None or number >= len(self._held):  # it is frozen
                with torch_private.PastSubclasses():
                    param.grad = torch.zeros_like(param)
            else:
                self._show(self._held[number])
                self.zero(number)

    def drop(self) -> None:
        """Makes stand-ins that somebody has kept stand for nothing: `zero_grad()` has dropped the gradients."""
        for held in self._held:
            if not held.is_marked:
                self._renew(held)

    def move(self) -> None:
        """Makes new stand-ins, when the parameters are on another device."""
        for held in self._held:
            was_marked = held.is_marked
            held.gradient.copy = None
            self._make_stand_in(held)
            if was_marked:
                self._show(held)

    def remove(self) -> None:
        """Takes the stand-ins away. Those that somebody still has give no answers any more."""
        self._is_removed = True
        self.begin_anew()
        for held in self._held:
            if is_stand_in(held.grad):
                held.grad = None

    # What stand-ins call.

    def is_live(self, number: int) -> bool:
        """Whether a parameter has a gradient that no step has used."""
        return not self._is_removed and (self._held[number].gradient.is_zeroed or self._gradients.has(number))

    def is_of_now(self, one: StandIn) -> bool:
        """Whether a stand-in, which somebody may have kept, stands for the gradient that there is now."""
        now = self._held[one.number].gradient.stand_in
        return isinstance(now, StandIn) and one.age == now.age

    def can_read(self, one: StandIn) -> bool:
        """Whether what a stand-in stands for has values that can be read."""
        return self.is_of_now(one) and self.is_readable(one.number)

    def is_readable(self, number: int) -> bool:
        """Whether the values of a gradient can be read. A step may have used it, if it has left it in its memory."""
        was_used = self._held[number].gradient.used_by is not None
        return self.is_live(number) or (was_used and self._gradients.outlives_step(number))

    def is_live_of(self, param: Tensor) -> bool:
        """Whether a tensor is a trained parameter that has a gradient which no step has used."""
        number = self._parameters.number_of(param)
        return number is not None and number < len(self._held) and self.is_live(number)

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answers `func(*args, **kwargs)`, where some of the arguments are stand-ins."""
        with self.entries.lock:
            self.entries.wait_for_turn("a gradient was used")
            result = self._answer(func, args, kwargs)
        self.entries.pause()
        return result

    def read(self, one: StandIn) -> Tensor:
        """As `values_of` for what a stand-in stands for, for any thread."""
        with self.entries.lock:
            self.entries.wait_for_turn("a gradient was used")
            self._require_now(one)
            return self.values_of(one.number)

    def _require_now(self, tree: Any) -> None:
        """Requires that no stand-in in nested lists, tuples and dicts is that of an earlier gradient.

        Raises:
            GradientMovedError: naming the parameter of the first one.
        """
        for one in instances_in(tree, StandIn):
            if not self.is_of_now(one):
                raise self._used_up(one.number)

    def _answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if kind_of(func) is Kind.DETACH and isinstance(args[0], StandIn) and self._has_graph(args[0].number):
            return self._detached(func, args[0])
        # A tiled weight is in RAM, and counts as being on the model's device.
        answer = answer_without_values(func, args, kwargs, StandIn, self._parameters.device)
        if answer is not NotImplemented:
            return answer
        self._require_now((args, kwargs))
        if func == _DATA.__set__:
            if args[1] is args[0]:
                return None
            func, args = Tensor.copy_, args
        self._require_home()
        answer = _ANSWERS.get(func) or _ANSWERS.get(kind_of(func))
        result = NotImplemented if answer is None else answer(self, func, args, kwargs)
        return self._on_values(func, args, kwargs) if result is NotImplemented else result

    def _has_graph(self, number: int) -> bool:
        """Whether plain torch would have a graph for what is computed with this gradient now."""
        return self._held[number].gradient.has_graph and torch.is_grad_enabled()

    def _detached(self, func: Any, one: StandIn) -> Tensor:
        """Answers a call for a gradient without its graph."""
        if func in (Tensor.detach_, torch.detach_):
            self._held[one.number].gradient.has_graph = False
            return one
        self._require_now(one)
        with torch.no_grad():
            made: Tensor = self._on_values(Tensor.detach, (one,), {})  # writes to it count
        return made

    def _as_read(self, number: int, values: Tensor) -> Tensor:
        """What was computed from a gradient, with a node where plain torch has its graph."""
        if not self._has_graph(number):
            return values
        anchor = torch.zeros((), device=values.device, requires_grad=True)
        name = self._held[number].spec.name
        with_node: Tensor = _LostGraph.apply(anchor, values, name)  # type: ignore[no-untyped-call]
        return with_node

    def values_of(self, number: int) -> Tensor:
        """A copy of the gradient as it is now, in the parameter's shape, dtype and device."""
        self._require_home()
        self._require_values(number)
        self._store_copy(number)
        held = self._held[number]
        if held.gradient.copy is not None:
            return self._as_read(number, held.gradient.copy[0].clone())
        param, values = held.tensor, self._current(number)
        with torch_private.PastSubclasses():
            local = held.shaped(values.to(param.dtype)).to(param.device).clone()
            return self._as_read(number, whole_like(param, local))

    def _current(self, number: int) -> Tensor:
        """A copy of the gradient as the step would use it: 1-D, in the dtype in which it waits."""
        if self._held[number].gradient.is_zeroed:
            self._take_writes([self._held[number]])
        self._gradients.finalize([number])
        values, factor = self._gradients.values(number), self._factor_of(number)
        return values.clone() if factor == 1.0 else (values.float() * factor).to(values.dtype)

    def _factor_of(self, number: int) -> float:
        """The factor by which the step will multiply a gradient, or has multiplied it."""
        used_by = self._held[number].gradient.used_by
        return self._scale.of(number) if used_by is None or self.is_live(number) else used_by

    def _on_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls `func` with copies of the values.

        If it changes a copy, or somebody does so later through a view, the gradient changes, too.
        """
        numbers = list(dict.fromkeys(one.number for one in instances_in((args, kwargs), StandIn)))
        copies = {n: self._held[n].gradient.copy for n in numbers}
        reads = kind_of(func) is Kind.READ
        values = {
            n: self.values_of(n) if copy is None or (reads and self._has_graph(n)) else copy[0]
            for n, copy in copies.items()
        }
        versions = {n: one._version for n, one in values.items()}
        args, kwargs = (_replaced(tree, lambda one: values[one.number]) for tree in (args, kwargs))
        result = counting(func)(*args, **kwargs)
        for n, one in values.items():
            if one._version != versions[n] and not self.is_live(n):
                raise self._used_up(n)
        number_at = {_storage_of(one): n for n, one in values.items()}
        plain = (t for t in tensors_in(result) if type(t) is Tensor or is_dtensor(t))
        views = [t for t in plain if _storage_of(t) in number_at]
        viewed = {number_at[_storage_of(t)] for t in views if t is not values[number_at[_storage_of(t)]]}
        for number, one in values.items():
            gradient = self._held[number].gradient
            is_kept = gradient.copy is not None or number in viewed
            gradient.copy = gradient.copy or (one, versions[number])
            self._store_copy(number)
            if not is_kept:
                gradient.copy = None
        returned = [n for n, one in values.items() if one is result]
        return self._held[returned[0]].gradient.stand_in if returned else result

    def _store_copy(self, number: int) -> None:
        """Puts what was written to the copy of a gradient's values where the gradient is."""
        held = self._held[number]
        copy, version = held.gradient.copy or (None, 0)
        if copy is None or copy._version == version or not self.is_live(number):
            return
        held.gradient.copy = copy, copy._version
        with torch_private.PastSubclasses():
            stored = self._current(number)
            new = held.flattened(local_gradient(held.tensor, copy.detach())).to(stored.device)
            if stored.dtype is not new.dtype:  # unchanged elements keep the bits that rounding took from the copy
                rounded = stored.to(new.dtype)
                stored = torch.where(bits_of(rounded) == bits_of(new), stored, new.to(stored.dtype))
            else:
                stored = new
        self._gradients.write(number, stored)
        self._scale.use_as_is(number)
        self._forget_norms_of(number)

    def _require_values(self, number: int) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this is a forked child: the gradients are in the process that made the optimizer")
        if not self.is_readable(number):
            raise self._used_up(number)
        if self._ranks > 1:
            name = self._held[number].spec.name
            raise GradientMovedError(
                f"the gradient of {name} is sharded over {self._ranks} ranks, and this one has not all values: call "
                "optimizer.grad(p) on every rank to read it, optimizer.zero_grad() to drop it"
            )

    def _used_up(self, number: int) -> GradientMovedError:
        name = self._held[number].spec.name
        return GradientMovedError(
            f"the gradient of {name} was used by step(), or dropped, and its values are gone, or cannot "
            "be changed any more: read or change p.grad between backward() and step(), and copy there what is to be "
            "read later, {p: p.grad.clone() for p in params}"
        )

    # Norms and factors.

    def _norm(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answers a call for a norm or a list of norms."""
        given: dict[str, Any] = dict(zip(("input", "ord"), args, strict=False))
        options = {key: value for key, value in kwargs.items() if key not in ("ord", "p", "input", "self", "x")}
        ones = given.get("input", next((kwargs[key] for key in ("input", "x", "self") if key in kwargs), None))
        order = given.get("ord", kwargs.get("ord", kwargs.get("p", _NORMS[func])))
        if len(args) > 2 or any(value not in (None, False) for value in options.values()):
            return NotImplemented
        is_list = isinstance(ones, list | tuple)
        stand_ins: list[Any] = list(ones) if is_list else [ones]  # type: ignore[arg-type]
        if not all(isinstance(one, StandIn) for one in stand_ins):
            return NotImplemented
        numbers = [one.number for one in stand_ins]
        if any(self._held[n].gradient.copy is not None and not self.is_live(n) for n in numbers):
            return NotImplemented  # somebody has a view, and may have written to it
        order = 2.0 if order in (None, "fro") else order
        if isinstance(order, str) or (order != 2 and self._ranks == 1):
            return NotImplemented
        self._learn_norms(numbers, float(order))
        made = [
            self._as_read(number, self._norm_on(one.device, float(order), number))
            for number, one in zip(numbers, stand_ins, strict=True)
        ]
        return made if is_list else made[0]

    def _learn_norms(self, numbers: Sequence[int], order: float) -> None:
        """Makes sure that the norms of these gradients are known.

        Outside of a backward it gets the norms of all gradients, since whoever asks for one is likely to ask for the
        next, and each time the host would wait for the device.
        """
        for number in numbers:
            if not self.is_live(number) and self._held[number].gradient.used_by is None:
                self._require_values(number)
        if not self._unknown(order, numbers):
            return
        if self._ranks > 1:
            self.take_changes()
        every: Sequence[int] = numbers
        if self._ranks == 1:
            self._take_writes(self._held)
            every = self._unknown(order, numbers if in_backward() else self._with_live(numbers))
            self._gradients.finalize([n for n in every if self.is_live(n)])
        elif any(map(self.is_live, range(len(self._held)))):
            every = self._owner.collect()
        else:
            every = [held.number for held in self._held if held.gradient.used_by is not None]
        self._knows_norms = True
        for number, norm in zip(every, self._gradients.norms(every, order), strict=True):
            self._held[number].gradient.norms[order] = norm * abs(self._factor_of(number))

    def _unknown(self, order: float, numbers: Sequence[int]) -> list[int]:
        """The parameters among `numbers` whose norm is not known."""
        return [number for number in numbers if order not in self._held[number].gradient.norms]

    def _with_live(self, numbers: Sequence[int]) -> list[int]:
        """These parameters, and all others whose gradients are live."""
        return list(dict.fromkeys([*numbers, *filter(self.is_live, range(len(self._held)))]))

    def _norm_on(self, device: torch.device, order: float, number: int) -> Tensor:
        """A norm that is known, as a new fp32 tensor of shape ().

        All norms that are known go to a device in one copy. If each had a copy of its own, the host would wait as
        often.
        """
        gradient, key = self._held[number].gradient, (order, device)
        if device.type == "cpu":
            return torch.tensor(gradient.norms[order], dtype=torch.float32, device=device)
        if key not in gradient.norms_on:
            known = [held.gradient for held in self._held if order in held.gradient.norms]
            norms = torch.tensor([one.norms[order] for one in known], dtype=torch.float32, device="cpu")
            for one, norm in zip(known, norms.to(device).unbind(), strict=True):
                one.norms_on[key] = norm
        return gradient.norms_on[key].clone()

    def _forget_norms_of(self, number: int) -> None:
        """Forgets the norms of a gradient, which changes.

        Over several ranks all norms are forgotten. The gradient that changes may be another one on each rank, and all
        ranks have to ask for the same norms.
        """
        if self._ranks == 1:
            self._held[number].gradient.forget_norms()
        elif self._knows_norms:
            for held in self._held:
                held.gradient.forget_norms()
            self._knows_norms = False

    def _multiply(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Records an in-place product with numbers."""
        if kwargs or len(args) != 2:
            return NotImplemented
        ones = _listed(args[0])
        factors = list(args[1]) if isinstance(args[1], list | tuple) else [args[1]] * len(ones)
        if not all(isinstance(one, StandIn) for one in ones) or len(ones) != len(factors):
            return NotImplemented
        if not all(isinstance(by, int | float) or (type(by) is Tensor and by.numel() == 1) for by in factors):
            return NotImplemented
        for one in ones:
            if not self.is_live(one.number):
                raise self._used_up(one.number)
            self._store_copy(one.number)
            if self._held[one.number].gradient.copy is not None:
                return NotImplemented  # somebody has a view, which has to see the product
        for one, by in zip(ones, map(self._value_of, factors), strict=True):
            by = (1.0 / by if by else math.copysign(math.inf, by)) if _FACTORS[func] else by
            self._scale.multiply(one.number, by)
            self._forget_norms_of(one.number)
        return _itself(args[0])

    def _value_of(self, factor: Any) -> float:
        """The value of a factor, a number or a tensor that has one.

        A tensor is read once for all gradients that it multiplies, since the host waits for its device.
        """
        if not isinstance(factor, Tensor) or factor.is_inference():
            return float(factor)
        if self._factor is None or self._factor[0] is not factor or self._factor[1] != factor._version:
            self._factor = factor, factor._version, float(factor)
        return self._factor[2]

    def zero(self, number: int) -> None:
        """Makes a gradient zeros, to which the next ones are added. Unlike None, the step uses them."""
        if self._gradients.has(number):
            self._gradients.clear(number)
        self._scale.use_as_is(number)
        self._forget_norms_of(number)
        self._held[number].gradient.forget()
        self._held[number].gradient.is_zeroed = True

    def _make_zeros(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        ones = _listed(args[0]) if args else []
        if not ones or not all(isinstance(one, StandIn) for one in ones):
            return NotImplemented
        for one in ones:
            self.zero(one.number)
        return _itself(args[0])

    def _refuse_memory(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(args[0], StandIn):
            return NotImplemented
        raise GradientMovedError(
            f"{func.__name__} would give other memory to the gradient of {args[0].parameter}, which is elsewhere: "
            "assign another gradient, p.grad = x, or write into this one with p.grad.copy_(x)"
        )

    def _amp_unscale(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._unscale(*args) if len(args) == 3 else NotImplemented

    def _unscale(self, grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
        """Answers a GradScaler.

        There is one loss scale, so it has to unscale all gradients at once. It asks once for each device. Tiled weights
        are on the CPU beside a model on another device; the call for them changes nothing.

        Args:
            grads: the gradients that the GradScaler unscales.
            found_inf: 0-dim, fp32; written.
            inverse: 0-dim, fp32: 1 / loss scale.

        Raises:
            ConfigError: if the gradient of a trained parameter is not among them.
        """
        met, devices = {id(grad) for grad in grads}, {grad.device for grad in grads}
        is_beside = False
        for held in self._held:
            name, grad = held.spec.name, held.grad
            if grad is None:
                continue
            if grad.device in devices and id(grad) not in met:
                raise ConfigError(
                    f"a GradScaler met gradients that OffloadZero has, but not that of {name}, which was assigned to "
                    "p.grad by hand, or is not in the optimizer it was given: give it all, as backward makes them"
                )
            is_beside = is_beside or grad.device == self._parameters.home not in devices
        if not is_beside:
            self._owner.unscale(found_inf, inverse)

    def _require_home(self) -> None:
        home = self._parameters.home
        if self._parameters.is_parked:
            raise ConfigError(
                f"the model was moved to the CPU and trains on {home}: move it back with model.to({str(home)!r}) "
                "before it goes on; its gradients and states are kept"
            )

    def _require_no_factors(self, number: int, *, is_assigned: bool = False) -> None:
        """Requires that a gradient may come. Factors of gradients that the user has dropped are dropped, too.

        Args:
            number: the parameter that it is of.
            is_assigned: whether the user has assigned it, so that it is used as it is.

        Raises:
            ClosedError: in a forked child, which has no memory for gradients.
            AccumulationError: after unscaling or clipping, whose factor was computed from the gradients before, or
                where it would be added to one that was multiplied.
        """
        if os.getpid() != self._pid:
            raise ClosedError("this is a forked child: only the process that made the optimizer can run backward")
        if self._scale.is_set:
            if not any(map(self.has, range(len(self._held)))):
                self._scale.reset()  # the user dropped the gradients that it was for
            elif not self._held[number].is_marked:
                self._scale.forget(number)
            if self._scale.is_fixed_for(number) and not (is_assigned and self._scale.common):
                raise AccumulationError(
                    "a gradient came between clipping or multiplying the gradients, or a GradScaler's unscale_(), and "
                    "step(): unscale, clip and divide once, after the last backward of a step"
                )


_ANSWERS: dict[Any, Callable[[Answers, Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    torch_private.amp_unscale: Answers._amp_unscale,
    **dict.fromkeys(_NORMS, Answers._norm),
    **dict.fromkeys(_FACTORS, Answers._multiply),
    **dict.fromkeys(_ZEROS, Answers._make_zeros),
    Kind.REFUSE: Answers._refuse_memory,
}
"""By function, or by kind of function: what is answered otherwise than on a copy of the values.

An answer is NotImplemented where a call needs the copy after all.
"""


def _listed(tree: Any) -> list[Any]:
    """The tensors of the first argument of a function: one, or a list of them."""
    return list(tree) if isinstance(tree, list | tuple) else [tree]


def _itself(tree: Any) -> StandIn | None:
    """What a function returns that works in place: its tensor, or nothing where it got a list."""
    return tree if isinstance(tree, StandIn) else None


def _storage_of(tensor: Tensor) -> int:
    tensor = local_of(tensor)
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
