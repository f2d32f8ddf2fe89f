"""Everything that is hooked into the model, in place: its class, names and state_dict keys stay.

- The root casts floating inputs to the compute dtype; modules kept in fp32 cast theirs up, and their outputs back.
- The modules of a unit, and whoever saves or loads its parameters, wait until the last step has landed in them.
- Each trained parameter hands its gradient to the sink as soon as autograd has it, and leaves a marker in `p.grad`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from offload.errors import AccumulationError, ClosedError, ConfigError
from offload.layout import ParamSpec
from offload.module.access import Access
from offload.module.landing import Landing
from offload.module.marker import MovedGradient, is_moved
from offload.module.parameters import Parameters, line_like
from offload.module.streaming import Streaming
from offload.module.units import ROOT, Chosen, blocks_of, is_called, units_of
from offload.optim.sink import AS_HELD, Gradients


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` (nested lists, tuples, dicts) with every floating tensor in `dtype`."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eagerly(call: Callable[[], None]) -> None:
    """Calls what a compiler cannot trace, nor leave out: a compiled model is cut in two here."""
    call()


class _Enters:
    """A hook before a forward, or before saving or loading. A copy or pickle of the model takes along one that does
    nothing."""

    def __init__(self, entered: Callable[[], None] | None = None) -> None:
        self._entered = entered

    def __call__(self, *args: Any) -> None:
        if self._entered is not None:
            _eagerly(self._entered)

    def __reduce__(self) -> tuple[type[_Enters], tuple[()]]:
        return _Enters, ()


class _Leaves:
    """A forward hook, called also if the forward raised. A copy or pickle of the model takes along one that does
    nothing."""

    def __init__(self, left: Callable[[Any], None] | None = None) -> None:
        self._left = left

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._left is not None:
            self._left(output)

    def __reduce__(self) -> tuple[type[_Leaves], tuple[()]]:
        return _Leaves, ()


class _CastInputs:
    """A forward pre-hook. A copy or pickle of the model takes along the cast, not the call of `entered`."""

    def __init__(self, dtype: torch.dtype, entered: Callable[[], None] | None = None) -> None:
        self._dtype = dtype
        self._entered = entered

    @property
    def is_of_an_optimizer(self) -> bool:
        """Not so in a copy of the model."""
        return self._entered is not None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._entered is not None:
            _eagerly(self._entered)
        return cast_floating(args, self._dtype), cast_floating(kwargs, self._dtype)

    def __reduce__(self) -> tuple[type[_CastInputs], tuple[torch.dtype]]:
        return _CastInputs, (self._dtype,)


class _CastOutputs:
    """A forward hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, self._dtype)


def is_hooked(model: nn.Module) -> bool:
    """Whether an optimizer of this library has `model` now."""
    hooks = model._forward_pre_hooks.values()
    return any(isinstance(hook, _CastInputs) and hook.is_of_an_optimizer for hook in hooks)


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

    Args: kept: modules that stay fp32; chosen: the units; entered: called before each forward of the root; landing,
    streaming, access: what hooks call; loads: called before a state_dict is loaded into a module, with the module's own
    parameters; unscales: called with a GradScaler's found_inf and inverse scale.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        specs: Sequence[ParamSpec],
        sink: Gradients,
        compute_dtype: torch.dtype,
        kept: Sequence[nn.Module],
        chosen: Chosen,
        landing: Landing,
        streaming: Streaming | None,
        access: Access,
        entered: Callable[[], None],
        loads: Callable[[Sequence[nn.Parameter]], None],
        unscales: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._handles: list[RemovableHandle] = []
        self._parameters = parameters
        self._sink = sink
        self._names = [spec.name for spec in specs]
        self._unscales = unscales
        self._markers = self._new_markers()
        self._pid = os.getpid()
        root_dtype = torch.float32 if model in kept else compute_dtype
        self._nodes: list[torch.autograd.graph.Node] = []
        self._landing = landing
        self._streaming = streaming
        self._access = access
        self._handles.append(model.register_forward_pre_hook(_CastInputs(root_dtype, entered), with_kwargs=True))
        self._enter_units(model, chosen, specs, loads)
        if compute_dtype is not torch.float32:
            for module in kept:
                self._keep_fp32(module, compute_dtype)
        for number, param in enumerate(parameters.params):
            self._watch(number, param)
            for start, leaf in parameters.tiles_of(number):
                self._watch(number, leaf, start)

    def is_marked(self, number: int) -> bool:
        """Whether parameter `number` has the marker of a gradient that the user did not drop."""
        return is_moved(self._parameters.params[number].grad)

    def take_assigned(self) -> None:
        """Hands over gradients that the user assigned to `p.grad` by hand."""
        for number, param in enumerate(self._parameters.params):
            if param.grad is not None and not is_moved(param.grad):
                # Made by hand, it may be of any value; but the last step still needs the memory it would go to.
                self._landing.everything()
                self._arriving()
                self._sink.forget(number)
                self._hand_over(number, param)

    def _new_markers(self) -> list[MovedGradient]:
        hooks = weakref.ref(self)

        def unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> bool:
            if (alive := hooks()) is None:
                return False
            alive._unscale(grads, found_inf, inverse)
            return True

        named = zip(self._parameters.params, self._names, strict=True)
        return [MovedGradient.of(param, name, unscale) for param, name in named]

    def _unscale(self, grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
        """What a GradScaler asks of the gradients it finds: of all of them, as there is one scale for all.

        Raises: ConfigError if one of a trained parameter is not among them.
        """
        met = {id(grad) for grad in grads}
        for name, param in zip(self._names, self._parameters.params, strict=True):
            if param.grad is not None and id(param.grad) not in met:
                raise ConfigError(
                    f"a GradScaler met gradients that OffloadZero has, but not that of {name}, which was assigned to "
                    "p.grad by hand, or is not in the optimizer it was given: give it all, as backward makes them"
                )
        self._unscales(found_inf, inverse)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for param in self._parameters.params:
            if is_moved(param.grad):
                param.grad = None

    def _enter_units(
        self,
        model: nn.Module,
        chosen: Chosen,
        specs: Sequence[ParamSpec],
        loads: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        """Whoever runs a module finds the new values of its unit in it, and so does whoever saves or loads it."""
        # A tiled weight is brought by `F.linear`, tile by tile.
        tiled = {s.unit for s in specs if s.tile}
        units = units_of(model, chosen) | {p: s.unit for p, s in zip(self._parameters.params, specs, strict=True)}
        blocks = dict(blocks_of(model, chosen))
        for name, block in blocks.items():
            self._handles.append(block.register_forward_pre_hook(_Enters(partial(self._enter, name))))
            self._leave(name, block)
        for module in model.modules():
            params = list(module.parameters(recurse=False))
            names = {units[param] for param in params}
            for name in names - tiled if module is not model else ():
                if name == ROOT or self._streaming is not None or not is_called(blocks[name]):
                    self._handles.append(module.register_forward_pre_hook(_Enters(partial(self._enter, name))))
                    self._leave(name, module)
            for name in names:
                landing = _Enters(partial(self._landing.unit, name))
                self._handles.append(module.register_state_dict_pre_hook(landing))
                self._handles.append(module.register_load_state_dict_pre_hook(landing))
            if params:
                self._handles.append(module.register_load_state_dict_pre_hook(_Enters(partial(loads, params))))
            if self._streaming is not None:
                for register, hook in self._access.hooks_of(module, ends=module is model or module in blocks.values()):
                    self._handles.append(register(hook))
        if self._streaming is not None:
            leaves = _Leaves(self._streaming.model_ends)
            self._handles.append(model.register_forward_hook(leaves, always_call=True))

    def _enter(self, unit: str) -> None:
        if self._streaming is not None and self._landing.is_unit_pending(unit):
            self._streaming.open(unit)
        self._landing.unit(unit)
        if self._streaming is not None:
            self._streaming.forward_begins(unit)
        if self._landing.ahead() and self._streaming is not None:
            self._streaming.bring_ahead()

    def _leave(self, unit: str, module: nn.Module) -> None:
        if self._streaming is not None:
            leaves = _Leaves(partial(self._streaming.forward_ends, unit))
            self._handles.append(module.register_forward_hook(leaves, always_call=True))

    def _keep_fp32(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        self._handles.append(module.register_forward_pre_hook(_CastInputs(torch.float32), with_kwargs=True))
        self._handles.append(module.register_forward_hook(_CastOutputs(compute_dtype)))

    def _watch(self, number: int, leaf: nn.Parameter, start: int = 0) -> None:
        """Args: leaf: the parameter, or its tile whose first element is `start`."""
        # Autograd holds these functions where no collector of garbage can look: held by them, an optimizer that was
        # forgotten would keep its memory and its files for good.
        hooks = weakref.ref(self)

        def before(grads: tuple[Tensor | None, ...]) -> None:
            if (alive := hooks()) is not None:
                alive._before(number)

        def after(leaf: Tensor) -> None:
            if (alive := hooks()) is not None:
                alive._hand_over(number, leaf, start)

        # On the node that accumulates, not on the tensor: `torch.autograd.grad` passes through the latter as well, and
        # would take the marker away without a gradient to come. The node lives as long as somebody holds it.
        with torch._C.DisableTorchFunctionSubclass():  # also of a parameter whose values are not here
            node = torch.autograd.graph.get_gradient_edge(leaf).node
        self._nodes.append(node)
        self._handles.append(node.register_prehook(before))
        self._handles.append(leaf.register_post_accumulate_grad_hook(after))

    def _before(self, number: int) -> None:
        param = self._parameters.params[number]
        self._arriving()
        self._landing.require_landed(number)
        self._landing.before_gradients()
        # The marker says: accumulate. No gradient says that the user dropped what was there: begin anew.
        if is_moved(param.grad):
            param.grad = None
        else:
            self._sink.forget(number)

    def _arriving(self) -> None:
        """Raises: ClosedError in a forked child, which has no memory for gradients; AccumulationError after unscaling
        or clipping: the factor is fixed, so a gradient that joins those it was calculated from would make it a wrong
        one."""
        if os.getpid() != self._pid:
            raise ClosedError("this is a forked child: only the process that made the optimizer can run backward")
        if self._sink.scale != AS_HELD:
            if not any(self._sink.has(n) and self.is_marked(n) for n in range(len(self._markers))):
                self._sink.scale = AS_HELD  # it was of gradients that the user dropped
            elif self._sink.scale.is_fixed:
                raise AccumulationError(
                    "a gradient came between clip_grad_norm_(), or a GradScaler's unscale_(), and step(): unscale and "
                    "clip once, after the last backward of a step"
                )

    def _hand_over(self, number: int, leaf: Tensor, start: int = 0) -> None:
        param = self._parameters.params[number]
        grad = leaf.grad
        if grad is None:
            raise AssertionError("a gradient hook ran without a gradient")
        # First the marker: a sink that raises must not leave the gradient to be taken for a new one.
        leaf.grad = None
        param.grad = self._markers[number]
        self._sink.arrive(number, line_like(leaf, grad.detach()), start)
