"""Everything that is hooked into the model, in place: its class, names and state_dict keys stay.

- Forwards say when they begin and end: in between the parameters of their unit are plain and of current values. These
  hooks run before the hooks of others.
- The root casts floating inputs to the compute dtype. Modules kept in fp32 cast theirs up, and their outputs back.
- Each trained parameter hands its gradient over as soon as autograd has it, and leaves a stand-in in `p.grad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offload import torch_private
from offload.choices import ModelChoice
from offload.errors import ConfigError
from offload.interrupts import uninterrupted
from offload.model.compiled import Forward, run_uncompiled
from offload.model.fetch import HeldUnits
from offload.model.flat_param import FlatParameters
from offload.model.gradient import Answers
from offload.model.guard import is_held, is_released
from offload.model.inner import needs_check, require_kept
from offload.model.plain_copy import LeftBehind, PlainState, refuse_script
from offload.model.state_dict import Access
from offload.model.torch_helpers import Hook, hook_forward, numbered_alike
from offload.model.unit import Unit
from offload.model.units import ROOT, NotToWrap, blocks_of, encloses, fp32_modules, is_called, require_unwrapped


class _Casts:
    """A hook that casts what enters a module, or leaves it. A copy of the module takes it along.

    Attributes:
        has_cast: whether anything had another dtype. It is not known in code that torch has compiled.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.has_cast = False

    def _cast(self, tree: Any) -> Any:
        """`tree` (nested lists, tuples, dicts) with every floating tensor in the hook's dtype."""
        return torch_private.tree_map_only(Tensor, self._cast_one, tree)

    def _cast_one(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.dtype is self._dtype:
            return x
        if not torch.compiler.is_compiling():
            self.has_cast = True
        return x.to(self._dtype)

    @property
    def __name__(self) -> str:
        return refuse_script("a copy of a model that trains in 16 bits casts what enters it, which no script can do")


class _CastsInputs(_Casts):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cast(args), self._cast(kwargs)


class _CastsOwnInputs(_CastsInputs, LeftBehind):
    """The hook of a model in fp32. A copy does without it, since it takes what the model took before it was held."""


class _CastsOutputs(_Casts):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._cast(output)


class _Mark(Hook):
    """The hook that marks a held model."""


def is_hooked(model: nn.Module) -> bool:
    """Whether an optimizer of this library holds `model` now."""
    return any(isinstance(hook, _Mark) and hook.is_active for hook in model._forward_pre_hooks.values())


def require_free(model: nn.Module) -> None:
    """Requires that a model can be taken.

    Raises:
        ConfigError: if there is nothing to train in it, if another optimizer holds it or a part of it, or if a part of
            it cannot be hooked.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the first argument is of type {type(model).__name__} and is not an nn.Module: give "
            "OffloadZero(model, optimizer)"
        )
    if is_hooked(model):
        raise ConfigError("the model is held by another OffloadZero: close() that one first")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is a TorchScript module, in which nobody sees parameters being used: give the "
                "module that it was made of, and script or trace a copy of it after training"
            )
        if is_hooked(module):
            raise ConfigError(f"{name}, in the model, is held by another OffloadZero: close() that one first")
    params = list(model.named_parameters())
    if not params:
        raise ConfigError("the model has no parameters to train")
    for name, param in params:
        if is_held(param):
            raise ConfigError(
                f"{name} is in a model that another OffloadZero holds: close() that one first, or give it a param "
                "group there"
            )
        if is_released(param):
            raise ConfigError(
                f"{name} has no values here since its optimizer was closed: build the model again, or leave room for "
                "all parameters on the device when it is closed"
            )
        if not param.is_leaf:
            raise ConfigError(
                f"{name} is the result of an operation and no leaf of autograd: make it an nn.Parameter, or compute it "
                "in the forward"
            )


def _require_kept(param: nn.Parameter, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    require_kept(param, name, module, args[0] if args else None)


def _put_first(leaf: nn.Parameter, handle: RemovableHandle) -> None:
    """Puts a hook before the others that are called when a gradient is accumulated.

    Otherwise those from before would see the gradient of one micro-batch, and not the sum of all so far. Over several
    ranks they see it, because no rank has all of a sum.
    """
    hooks: dict[int, Any] = leaf._post_accumulate_grad_hooks
    others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
    for key, _ in others:  # torch goes by the order of a dict, which `OrderedDict.move_to_end` leaves as it is
        del hooks[key]
    hooks.update(others)


class Hooks:
    """The hooks of one optimizer on its model; `remove` takes all of them away.

    Args:
        model: the model.
        choice: how it computes.
        parameters: those that are held.
        unit_of: the unit of every parameter of the model.
        units: is told of forwards and backwards.
        access: is told of saving and loading.
        answers: takes gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        choice: ModelChoice,
        parameters: FlatParameters,
        unit_of: Mapping[Tensor, Unit],
        units: HeldUnits,
        access: Access,
        answers: Answers,
    ) -> None:
        self._handles: list[RemovableHandle] = []
        self._forwards: list[Forward] = []
        self._states: list[PlainState] = []
        self._nodes: list[tuple[torch.autograd.graph.Node, RemovableHandle]] = []
        self._leaves: list[tuple[int, nn.Parameter]] = []
        self._model = model
        self._units = units
        self._answers = answers
        self._is_alone = parameters.layout.ranks == 1
        self._inputs: _CastsInputs | None = None  # of the model
        self._ignored_by_ddp = getattr(model, NotToWrap.NAME, None)
        try:
            self._hook(model, choice, parameters, unit_of, access)
        except BaseException:
            self.remove()
            raise

    @uninterrupted
    def _hook(
        self,
        model: nn.Module,
        choice: ModelChoice,
        parameters: FlatParameters,
        unit_of: Mapping[Tensor, Unit],
        access: Access,
    ) -> None:
        units = self._units
        setattr(model, NotToWrap.NAME, NotToWrap(self._ignored_by_ddp))
        self._states += [PlainState(module) for module in model.modules() if PlainState.serves(module)]
        self._hook_units(model, choice, parameters, unit_of, access)
        self._hook_formats(model, parameters)

        def model_begins() -> None:
            require_unwrapped(model)
            units.model_begins()

        self._handles += hook_forward(model, model_begins, units.model_ends, _Mark)
        in_fp32 = fp32_modules(model, choice.keep_fp32)
        is_fp32 = choice.compute_dtype is torch.float32
        if choice.cast_forward_inputs:
            dtype = torch.float32 if model in in_fp32 else choice.compute_dtype
            self._inputs = _CastsOwnInputs(dtype) if is_fp32 else _CastsInputs(dtype)
            self._cast_inputs(model, self._inputs)
        for module in () if is_fp32 else in_fp32:
            self._cast_inputs(module, _CastsInputs(torch.float32))
            casts = module.register_forward_hook(_CastsOutputs(choice.compute_dtype))
            self._handles.append(numbered_alike(module, casts))
        for number, param in enumerate(parameters.params[: parameters.trained]):
            self._hook_gradient(number, param)
            for start, leaf in parameters.tiles_of(number):
                self._hook_gradient(number, leaf, start)
        self.hook_nodes()

    @property
    def has_cast_inputs(self) -> bool:
        """Whether the model was called with inputs of another dtype than it computes with."""
        return self._inputs is not None and self._inputs.has_cast

    def remove(self) -> None:
        """Takes all hooks away, and the stand-ins of gradients."""
        for handle in (*self._handles, *(handle for _, handle in self._nodes)):
            handle.remove()
        for forward in self._forwards:
            forward.remove()
        for state in self._states:
            state.remove()
        self._handles.clear()
        self._nodes.clear()
        if self._ignored_by_ddp is None:
            vars(self._model).pop(NotToWrap.NAME, None)
        else:
            setattr(self._model, NotToWrap.NAME, self._ignored_by_ddp)
        self._answers.remove()

    def _hook_units(
        self,
        model: nn.Module,
        choice: ModelChoice,
        parameters: FlatParameters,
        unit_of: Mapping[Tensor, Unit],
        access: Access,
    ) -> None:
        """Makes the modules of a unit run with the unit's current values."""
        units = self._units
        # `F.linear` fetches a tiled weight, tile by tile.
        tiled = {spec.unit for spec in parameters.layout.specs if spec.tile}
        blocks = dict(blocks_of(model, choice.units))
        for name, module in model.named_modules() if tiled else ():
            has_tiles = any(encloses(name, unit) for unit in tiled)
            if has_tiles and is_called(module) and any(encloses(block, name) for block in blocks):
                self._forwards.append(Forward(module, run_uncompiled))
        for module in model.modules():
            params = list(module.parameters(recurse=False))
            own = {unit_of[param].name for param in params} - tiled
            own |= {name for name, block in blocks.items() if block is module}
            for name in own if module is not model else ():
                # Where all parameters are resident, guards do what is left.
                is_block = blocks.get(name) is module
                if is_block or parameters.streams_any or (name != ROOT and not is_called(blocks[name])):
                    unit = units.named(name)
                    before, after = partial(units.forward_begins, unit), partial(units.forward_ends, unit)
                    self._handles += hook_forward(module, before, after, is_inside=not is_block)
            if params:
                loads = Hook(partial(units.before_loading, params))
                self._handles.append(module.register_load_state_dict_pre_hook(loads))
            for register, hook in access.hooks_of(module, ends=module is model or module in blocks.values()):
                self._handles.append(register(hook))

    def _hook_formats(self, model: nn.Module, parameters: FlatParameters) -> None:
        """Refuses forwards that would give streamed parameters other inner tensors."""
        for prefix, module in model.named_modules():
            for name, param in module.named_parameters(recurse=False):
                if param in parameters.index and needs_check(param):
                    full = f"{prefix}.{name}" if prefix else name
                    check = partial(_require_kept, param, full)
                    self._handles.append(module.register_forward_pre_hook(Hook(check, is_inside=True), prepend=True))

    def _cast_inputs(self, module: nn.Module, hook: _CastsInputs) -> None:
        casts = module.register_forward_pre_hook(hook, with_kwargs=True)
        self._handles.append(numbered_alike(module, casts))

    def _hook_gradient(self, number: int, leaf: nn.Parameter, start: int = 0) -> None:
        """Makes the gradient of a leaf go to the gradient buffer when autograd has accumulated it.

        Args:
            number: the parameter's number.
            leaf: the parameter, or a tile of it.
            start: the element of the parameter at which the leaf begins.
        """
        self._leaves.append((number, leaf))
        handle = leaf.register_post_accumulate_grad_hook(self._answers.after_accumulation(number, start))
        self._handles.append(handle)
        if self._is_alone:
            _put_first(leaf, handle)

    def hook_nodes(self) -> None:
        """Hooks the nodes that accumulate gradients. A parameter that moves to another device gets a new node.

        It hooks nodes, not tensors. `torch.autograd.grad` calls hooks of a tensor as well, which would take the
        stand-in away without a gradient to come. A node lives as long as somebody refers to it.
        """
        for _, handle in self._nodes:
            handle.remove()
        self._nodes.clear()
        with torch_private.PastSubclasses():
            for number, leaf in self._leaves:
                needs_grad = leaf.requires_grad  # the user may have changed that since the model was taken
                node = torch.autograd.graph.get_gradient_edge(leaf.requires_grad_()).node
                leaf.requires_grad_(needs_grad)
                self._nodes.append((node, node.register_prehook(self._answers.before_accumulation(number))))
