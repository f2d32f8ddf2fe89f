"""What the files of this folder need to know about torch.

That is which code only asks for a `__torch_function__`, how to hide from modes, and hooks that a copy of the model does
not take along. What torch's functions do with a tensor is in torch_functions.py.

[Note: out of sight]
A dispatch mode (FLOP counters, fake tensors), a torch function mode (a default device), a transform of torch.func, a
trace or inference mode applies to the user's operations. It must not see the copies and kernels of this library, which
run inside of the user's forward.
"""

from __future__ import annotations

import dis
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.hooks import RemovableHandle

from offload import torch_private
from offload.errors import ConfigError
from offload.interrupts import uninterrupted, uninterrupted_entry
from offload.model.compiled import UNIT_OUTSIDE, USE_OUTSIDE, call_uncompiled, runs_as_it_is
from offload.model.plain_copy import LeftBehind, refuse_script

Kind = TypeVar("Kind")

CHECKPOINT = inspect.unwrap(torch_checkpoint.checkpoint).__code__


def module_on_the_move() -> nn.Module | None:
    """The outermost module whose `to()`, `cpu()` or the like calls this function; None if there is none."""
    outermost: nn.Module | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch_private.apply_to_module.__code__:
            outermost = frame.f_locals["self"]
        frame = frame.f_back
    return outermost


def calls_that_save(tensors: Sequence[Tensor]) -> Iterator[tuple[FrameType, list[Any]]]:
    """The calls around this function that may save one of `tensors` for a backward, the innermost one first.

    These are forwards of an `autograd.Function` and calls of `torch.utils.checkpoint` that were given one of them.

    Yields:
        The call's frame, and the arguments that it was given.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if id(code) not in _saves_nothing and _may_save(code):
            given = _given(frame)
            if any(one is tensor for one in given for tensor in tensors):
                yield frame, given
        frame = frame.f_back


def _given(frame: FrameType) -> list[Any]:
    """The arguments of a function that runs, except those whose names it has given to other values."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    given = [values[name] for name in code.co_varnames[:count] if name in values]
    if code.co_flags & inspect.CO_VARARGS:
        given += values.get(code.co_varnames[count], ())
    return given


_saves_nothing: dict[int, CodeType] = {}
_saves: dict[int, CodeType] = {id(CHECKPOINT): CHECKPOINT}
"""By its id: code that was looked at, because a code is slow to hash."""


def _may_save(code: CodeType) -> bool:
    """Whether code is that of `torch.utils.checkpoint`, or of the forward of an `autograd.Function`."""
    if id(code) not in _saves:
        left: list[Any] = [torch.autograd.Function]
        forwards: set[int] = set()
        while left:
            kind = left.pop()
            left += kind.__subclasses__()
            forwards.add(id(getattr(inspect.unwrap(kind.forward), "__code__", None)))  # it may be decorated
        (_saves if id(code) in forwards else _saves_nothing)[id(code)] = code
    return id(code) in _saves


def require_no_graph(what: str, way_out: str) -> None:
    """Requires that a backward that runs now makes no graph of its own, as `create_graph=True` does.

    Gradients that it made outside of autograd would count as constants there, and nothing would say so.

    Args:
        what: what computes the gradients.
        way_out: what to do instead.

    Raises:
        ConfigError: if it makes one.
    """
    if torch.is_grad_enabled():
        raise ConfigError(f"create_graph=True, and {what} gives no gradients of gradients: {way_out}")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested containers and plain objects (dataclasses, a library's output classes), each once."""
    seen: set[int] = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, Tensor):
            if id(node) not in seen:
                yield node
        elif id(node) not in seen:
            left.extend(_inside(node))
        seen.add(id(node))


def instances_in(tree: Any, kind: type[Kind]) -> Iterator[Kind]:
    """The instances of a class in nested lists, tuples and dicts, such as the arguments of a torch function."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, kind):
            yield node
        elif isinstance(node, list | tuple):
            left.extend(node)
        elif isinstance(node, dict):
            left.extend(node.values())


def bits_of(values: Tensor) -> Tensor:
    """The bits of fp32 or 16-bit values, as integers."""
    return values.view(torch.int32 if values.dtype is torch.float32 else torch.int16)


def _inside(node: Any) -> Iterable[Any]:
    if node is None or isinstance(node, str | bytes | int | float | type | nn.Module):
        return
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list | tuple | set | frozenset | deque):
        yield from node
    for kind in type(node).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(node, name, None)
    yield from getattr(node, "__dict__", {}).values()


# Code that asks whether tensors are plain.


def _lines_with(name: str, function: Callable[..., Any]) -> frozenset[int]:
    """The lines in which a function uses the global or attribute `name`."""
    uses = (one.positions for one in dis.get_instructions(function) if one.argval == name)
    return frozenset(at.lineno for at in uses if at is not None and at.lineno is not None)


_ASKING = tuple(
    (kind.forward.__code__, _lines_with("has_torch_function", kind.forward))
    for kind in (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
)
"""The forwards that take another path, with other numbers, if one of their tensors has a `__torch_function__`, and the
lines in which they ask that."""


def only_asks(frame: FrameType) -> bool:
    """Whether the code of a frame asks for a `__torch_function__`, and does not call an operation."""
    code = frame.f_code
    for asking, lines in _ASKING:  # a code is slow to hash
        if code is asking:
            return frame.f_lineno in lines
    return False


# Out of sight.


def is_watched() -> bool:
    """Whether a mode, transform or trace is active that would see this library's operations.

    This takes less than a microsecond.
    """
    return bool(
        torch_private.torch_function_modes()
        or torch_private.dispatch_modes()
        or torch.is_inference_mode_enabled()
        or torch_private.functorch_level() is not None
        or torch_private.tracing_state() is not None
    )


class _NoModes:
    """A context without dispatch modes and transforms of torch.func.

    Torch takes them away, and puts them back, one by one and in Python: a signal waits until all are.
    """

    @uninterrupted_entry
    def __enter__(self) -> None:
        with ExitStack() as undo:
            if torch_private.dispatch_modes():
                undo.enter_context(torch_private.without_dispatch_modes())
            if torch_private.functorch_level() is not None:
                undo.enter_context(torch_private.without_functorch())
            self._undo = undo.pop_all()

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        self._undo.close()


def call_hidden(call: Callable[..., Any], *args: Any) -> Any:
    """Calls `call(*args)` out of sight of modes, transforms and traces outside; see [Note: out of sight].

    This is no context manager: an interrupt between its entry and its `with` would leave all of it off.
    """
    if not is_watched():
        return call(*args)
    makes_graph, trace = torch.is_grad_enabled(), torch_private.tracing_state()
    with torch_private.DisableTorchFunction(), torch_private.inference_mode(False), _NoModes():
        # Whether gradients are wanted tells training from evaluation, and a backward with create_graph. Leaving
        # inference mode turned them on, and its end makes them what they were.
        torch.set_grad_enabled(makes_graph)
        try:
            if trace is not None:
                torch_private.set_tracing_state(None)
            return call(*args)
        finally:
            if trace is not None:
                torch_private.set_tracing_state(trace)


def call_eagerly(call: Callable[..., Any], *args: Any) -> Any:
    """Calls `call(*args)` outside of compiled code: torch.compile breaks its graph here."""
    return _outside_graphs(call, *args) if torch.compiler.is_compiling() else call(*args)


@torch.compiler.disable(reason=USE_OUTSIDE)  # type: ignore[untyped-decorator]
def _outside_graphs(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


# Graphs of autograd, and hooks.


def in_backward() -> bool:
    """Whether autograd runs on this thread. A forward inside is a recomputation."""
    return bool(torch_private.graph_task_id() != -1)


def graphs_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with nodes of their own at which gradients of a tensor, or of its derivatives, arrive."""
    left: list[Tensor | None] = [tensor]
    while left:
        one = left.pop()
        if one is None:
            continue
        if one.grad_fn is not None:
            yield one
        # A view that is changed in place gets another history, in which only its base has a position.
        left += (one._base, unpack_dual(one).tangent)
        if torch_private.is_transformed(one):
            left.append(torch_private.untransformed(one))


def call_alive(method: weakref.WeakMethod[Callable[[Any], None]], argument: Any, *_: Any) -> None:
    """Calls a method by `call_hidden`, if its object is alive.

    A graph may outlive the optimizer, and must not keep it alive: Python's garbage collector cannot look into graphs.
    """
    if (alive := method()) is not None:
        call_uncompiled(call_hidden, alive, argument)


runs_as_it_is(call_alive)


class Hook(LeftBehind):
    """A hook of a module. If the module itself says how it is copied, its copy takes along one that does nothing.

    Args:
        call: what it does.
        is_inside: whether its module lies in the module of a unit, so that compiled code leaves it out.
    """

    def __init__(self, call: Callable[..., None] | None = None, is_inside: bool = False) -> None:
        self._call = call
        self._is_inside = is_inside

    @property
    def is_active(self) -> bool:
        """Whether it does anything; False in a copy of the model."""
        return self._call is not None

    def __call__(self, *args: Any) -> None:
        if not (self._is_inside and torch.compiler.is_compiling()):
            self._call_outside(*args)

    runs_as_it_is(__call__)

    @torch.compiler.disable(reason=UNIT_OUTSIDE)  # type: ignore[untyped-decorator]  # a compiled model is cut in two here
    def _call_outside(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    @property
    def __name__(self) -> str:
        return refuse_script()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return type(self), ()


HOOK_TABLES = tuple(
    f"_forward_{name}"
    for name in ("hooks", "hooks_with_kwargs", "hooks_always_called", "pre_hooks", "pre_hooks_with_kwargs")
)
"""Attributes of a module: dicts that say by number which hooks its forward has, and how they are called."""


def numbered_alike(module: nn.Module, handle: RemovableHandle) -> RemovableHandle:
    """Gives a hook of a module's forward another number: the first below 0 that is free there.

    Torch numbers the hooks of all modules through. Compiled code asks for the number of a hook, and would be compiled
    again for each of several modules that are alike.
    """
    tables: list[dict[int, Any]] = [getattr(module, name) for name in HOOK_TABLES]
    number = next(number for number in count(-1, -1) if not any(number in table for table in tables))
    for table in tables:
        if handle.id in table:  # and keeps its place there
            entries = [(number if key == handle.id else key, value) for key, value in table.items()]
            table.clear()
            table.update(entries)
    handle.id = number
    return handle


def hook_forward(
    module: nn.Module,
    before: Callable[[], None],
    after: Callable[[Any], None],
    kind: type[Hook] = Hook,
    *,
    is_inside: bool = False,
) -> tuple[RemovableHandle, RemovableHandle]:
    """Calls `before` ahead of a module's forward and of its other hooks, and `after` with its output.

    Args:
        module: the module.
        before: takes no arguments.
        after: takes the output; None if the forward raised.
        kind: the class of the first hook.
        is_inside: see `Hook`.
    """
    begins = kind(lambda *_: before(), is_inside)
    ends = Hook(lambda module, args, output: after(output), is_inside)
    return (
        numbered_alike(module, module.register_forward_pre_hook(begins, prepend=True)),
        numbered_alike(module, module.register_forward_hook(ends, always_call=True)),
    )
