"""Everything that is hooked into the model, in place: its class, names and state_dict keys stay.

- Forwards say when they begin and end: a unit's parameters are current, and plain, in between. These hooks come first.
- The root casts floating inputs to the compute dtype; modules kept in fp32 cast theirs up, and their outputs back.
- Each trained parameter hands its gradient over as soon as autograd has it, and leaves a stand-in in `p.grad`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from offload.errors import ConfigError
from offload.layout import ParamSpec
from offload.model.fetch import Streaming
from offload.model.flat_param import Parameters
from offload.model.gradient import Answers
from offload.model.hiding import unseen
from offload.model.pending import Landing
from offload.model.running import Running
from offload.model.state_dict import Access
from offload.model.units import ROOT, Chosen, blocks_of, is_called, units_of


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` (nested lists, tuples, dicts) with every floating tensor in `dtype`."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


class _Enters:
    """A hook before a forward, or before loading. A copy or pickle of the model takes along one that does nothing."""

    def __init__(self, entered: Callable[[], None] | None = None) -> None:
        self._entered = entered

    @property
    def is_of_an_optimizer(self) -> bool:
        """Not so in a copy of the model."""
        return self._entered is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model is cut in two here
    def __call__(self, *args: Any) -> None:
        if self._entered is not None:
            self._entered()

    def __reduce__(self) -> tuple[type[_Enters], tuple[()]]:
        return _Enters, ()


class _Leaves:
    """A forward hook, called also if the forward raised. A copy or pickle of the model takes along one that does
    nothing."""

    def __init__(self, left: Callable[[Any], None] | None = None) -> None:
        self._left = left

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._left is not None:
            self._left(output)

    def __reduce__(self) -> tuple[type[_Leaves], tuple[()]]:
        return _Leaves, ()


class _CastInputs:
    """A forward pre-hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating(args, self._dtype), cast_floating(kwargs, self._dtype)


class _CastOutputs:
    """A forward hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, self._dtype)


def is_hooked(model: nn.Module) -> bool:
    """Whether an optimizer of this library has `model` now."""
    hooks = model._forward_pre_hooks.values()
    return any(isinstance(hook, _Enters) and hook.is_of_an_optimizer for hook in hooks)


def require_free(model: nn.Module) -> None:
    """Raises: ConfigError if there is nothing to train in `model`, or another optimizer has it."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r} is not an nn.Module")
    if is_hooked(model):
        raise ConfigError("the model is held by another OffloadZero: close() that one first")
    if next(model.parameters(), None) is None:
        raise ConfigError("the model has no parameters to train")


class Hooks:
    """Hooks of one optimizer on its model; `remove` takes all of them away.

    Args: kept: modules that stay fp32; casts: whether the root casts its inputs; chosen: the units; entered: called
    before each forward of the root; running, landing, streaming, access, answers: what hooks call; loads: called before
    a state_dict is loaded into a module, with the module's own parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        specs: Sequence[ParamSpec],
        compute_dtype: torch.dtype,
        kept: Sequence[nn.Module],
        chosen: Chosen,
        running: Running,
        landing: Landing,
        streaming: Streaming | None,
        access: Access,
        answers: Answers,
        entered: Callable[[], None],
        loads: Callable[[Sequence[nn.Parameter]], None],
        *,
        casts: bool,
    ) -> None:
        self._handles: list[RemovableHandle] = []
        self._parameters = parameters
        self._answers = answers
        root_dtype = torch.float32 if model in kept else compute_dtype
        self._nodes: list[torch.autograd.graph.Node] = []
        self._running = running
        self._landing = landing
        self._streaming = streaming
        self._access = access
        self._enter_units(model, chosen, specs, loads)
        self._handles.append(model.register_forward_pre_hook(_Enters(entered), prepend=True))
        leaves = _Leaves(partial(self._leave, ROOT) if streaming is None else streaming.model_ends)
        self._handles.append(model.register_forward_hook(leaves, always_call=True))
        if casts:
            self._handles.append(model.register_forward_pre_hook(_CastInputs(root_dtype), with_kwargs=True))
        if compute_dtype is not torch.float32:
            for module in kept:
                self._keep_fp32(module, compute_dtype)
        for number, param in enumerate(parameters.params):
            self._watch(number, param)
            for start, leaf in parameters.tiles_of(number):
                self._watch(number, leaf, start)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._answers.remove()

    def _enter_units(
        self,
        model: nn.Module,
        chosen: Chosen,
        specs: Sequence[ParamSpec],
        loads: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        """Whoever runs a module finds current values of its unit in it."""
        # A tiled weight is brought by `F.linear`, tile by tile.
        tiled = {s.unit for s in specs if s.tile}
        units = units_of(model, chosen) | {p: s.unit for p, s in zip(self._parameters.params, specs, strict=True)}
        blocks = dict(blocks_of(model, chosen))
        for module in model.modules():
            params = list(module.parameters(recurse=False))
            names = {units[param] for param in params} - tiled
            names |= {name for name, block in blocks.items() if block is module}
            for name in names if module is not model else ():
                # Where all parameters are resident the rest is done by guards.
                is_block = blocks.get(name) is module
                if is_block or self._streaming is not None or (name != ROOT and not is_called(blocks[name])):
                    enters, leaves = _Enters(partial(self._enter, name)), _Leaves(partial(self._leave, name))
                    self._handles.append(module.register_forward_pre_hook(enters, prepend=True))
                    self._handles.append(module.register_forward_hook(leaves, always_call=True))
            if params:
                self._handles.append(module.register_load_state_dict_pre_hook(_Enters(partial(loads, params))))
            if self._streaming is not None:
                for register, hook in self._access.hooks_of(module, ends=module is model or module in blocks.values()):
                    self._handles.append(register(hook))

    def _enter(self, unit: str) -> None:
        if self._streaming is None:
            self._landing.unit(unit)
            self._running.enter(unit)
            return
        unseen(self._enter_streamed, self._streaming, unit)

    def _enter_streamed(self, streaming: Streaming, unit: str) -> None:
        if self._landing.is_unit_pending(unit):
            streaming.open(unit)
            self._landing.unit(unit)
        streaming.forward_begins(unit)

    def _leave(self, unit: str, output: Any) -> None:
        if self._streaming is None:
            self._running.leave(unit)
        else:
            self._streaming.forward_ends(unit, output)

    def _keep_fp32(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        self._handles.append(module.register_forward_pre_hook(_CastInputs(torch.float32), with_kwargs=True))
        self._handles.append(module.register_forward_hook(_CastOutputs(compute_dtype)))

    def _watch(self, number: int, leaf: nn.Parameter, start: int = 0) -> None:
        """Args: leaf: the parameter, or its tile whose first element is `start`."""
        # Autograd holds these functions where no collector of garbage can look: held by them, an optimizer that was
        # forgotten would keep its memory and its files for good.
        answers = weakref.ref(self._answers)

        def before(grads: tuple[Tensor | None, ...]) -> None:
            if (alive := answers()) is not None:
                alive.before(number)

        def after(leaf: Tensor) -> None:
            if (alive := answers()) is not None:
                alive.hand_over(number, leaf, start)

        # On the node that accumulates, not on the tensor: `torch.autograd.grad` passes through the latter as well, and
        # would take the stand-in away without a gradient to come. The node lives as long as somebody holds it.
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        self._nodes.append(node)
        self._handles.append(node.register_prehook(before))
        self._handles.append(leaf.register_post_accumulate_grad_hook(after))
