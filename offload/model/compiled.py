"""What torch.compile meets in a held model, and what it does not see.

[Note: compiled code]
torch.compile runs the hooks of the module that it compiles outside of the graph, and traces those of the modules inside
of it. No graph can fetch a unit. So the module of a unit is what compiles into one graph:

| code                                        | where `block.compile(fullgraph=True)` has it                  |
|---------------------------------------------|---------------------------------------------------------------|
| hooks of the unit's own module              | outside of the graph                                          |
| hooks of modules inside of a unit           | left out                                                      |
| the stand-in of its forward (`Forward`)     | outside of the graph                                          |
| its own forward, which the stand-in calls   | compiled, also when it is recomputed                          |
| the same, where its weights have tiles      | run as it is: tiles come and go between its operations        |

Where a unit does not run, its parameters are guarded, and the use of one ends the graph (guard.py). Torch runs that
part of the code as it is, hooks included. So compiled code never needs the hooks that it leaves out.

What compiles is a function that torch calls with each new frame of a thread. While a stand-in runs it is put aside, and
it is there again for the forward that the stand-in calls (`Compiler`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import update_wrapper
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from offload import torch_private
from offload.model.plain_copy import LeftBehind, left, refuse_script

UNIT_OUTSIDE = (
    "OffloadZero does what a unit of the model needs around its forward, outside of compiled code; compile the model "
    "unit by unit, `for block in blocks: block.compile(fullgraph=True)`, or give torch.compile(model) no fullgraph=True"
)
"""Why the whole model does not become one graph, and what to do: torch says it in its Unsupported."""
USE_OUTSIDE = (
    "OffloadZero holds this tensor, a parameter or gradient, and fetches it for a use that is not in the forward of "
    "its own unit; leave out fullgraph=True where such a use is compiled"
)


class Compiler(NamedTuple):
    """What compiles the frames that this thread runs.

    Attributes:
        callback: called by torch with each frame; None: nothing is compiled.
    """

    callback: Any

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `function(*args, **kwargs)`, whose frames this compiles. Called where nothing is compiled."""
        if self.callback is None:
            return function(*args, **kwargs)
        try:
            torch_private.set_frame_callback(self.callback)
            return function(*args, **kwargs)
        finally:
            torch_private.set_frame_callback(None)


def runs_as_it_is(function: Callable[..., Any]) -> None:
    """Keeps the frame of a function from being compiled by itself.

    What the function calls is compiled, and the function may be traced as a part of others.
    """
    torch_private.skip_frames(function.__code__)


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module has from its class, as it is now.

    Somebody may have given the module another class meanwhile, or the class another forward.
    """
    kind = type(module)
    found = next(vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one))
    bound: Callable[..., Any] = found.__get__(module, kind) if hasattr(found, "__get__") else found
    return bound


def call_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)`, and compiles none of its frames: for hooks of autograd, whose backward may be called in
    code that torch compiles.
    """
    callback = torch_private.set_frame_callback(None)
    try:
        return function(*args)
    finally:
        torch_private.set_frame_callback(callback)


runs_as_it_is(call_uncompiled)


class Forward(LeftBehind):
    """Stands in for a module's `forward`, outside of compiled code.

    Args:
        module: the module.
        run: called with a compiler, the module's own forward and the arguments, until `remove`. It has the compiler
            call the forward.
    """

    def __init__(self, module: nn.Module, run: Callable[[Compiler, Callable[..., Any], Any, Any], Any]) -> None:
        self._module = weakref.ref(module)
        self.instead = module.__dict__.get("forward")
        self._run: Callable[..., Any] | None = run
        update_wrapper(self, module.forward, updated=())  # which may be another of these, with a `_run` of its own
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        callback = torch_private.set_frame_callback(None)
        try:
            compiler, forward = Compiler(callback), self.own
            if self._run is None:
                return compiler.call(forward, args, kwargs)
            return self._run(compiler, forward, args, kwargs)
        finally:
            torch_private.set_frame_callback(callback)

    @property
    def own(self) -> Callable[..., Any]:
        """The module's own forward, in the place of which this is."""
        module = self._module()
        if self.instead is not None or module is None:
            return self.__wrapped__  # type: ignore[attr-defined, no-any-return]
        return forward_of_class(module)

    runs_as_it_is(__call__)
    # Where it would be traced the graph ends. `torch.compiler.disable` would do that too, and compile nothing inside.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
    __call__._torchdynamo_disable_msg = UNIT_OUTSIDE  # type: ignore[attr-defined]

    @property
    def __code__(self) -> CodeType:
        """The code of the module's own forward, from which torch.export reads its arguments."""
        return self.__wrapped__.__code__  # type: ignore[attr-defined, no-any-return]

    @property
    def __globals__(self) -> str:
        return refuse_script()

    def remove(self) -> None:
        """Gives the module its own forward back.

        If somebody has wrapped this one meanwhile, it stays inside that wrapper, and only calls the module's own.
        """
        self._run = None
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            if self.instead is None:
                del module.__dict__["forward"]
            else:
                module.forward = self.instead

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module(), left(self))


def _own_forward(module: nn.Module, forward: Any) -> Any:
    return forward_of_class(module) if forward is None else forward


def run_uncompiled(_: Compiler, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a forward for `Forward`, in a module that cannot be compiled into one graph."""
    torch_private.count_compiled_frame()
    return forward(*args, **kwargs)
