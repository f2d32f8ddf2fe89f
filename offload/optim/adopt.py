"""Adopting an ordinary torch optimizer, and what its param groups may hold.

A scheduler or the user may write anything into a param group at any time. So the groups are checked when a run begins,
and again before each step or commit changes anything.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError, GradientMovedError, ResumeError
from offload.optim.rule import Rule
from offload.optim.rules.adam import UNSUPPORTED, AdamRule
from offload.optim.rules.probe import rule_of

ADAMS = (torch.optim.Adam, torch.optim.AdamW)
WRAPPERS = frozenset(
    {
        ("accelerate.optimizer", "AcceleratedOptimizer"),
        ("lightning.fabric.wrappers", "_FabricOptimizer"),
        ("lightning.pytorch.core.optimizer", "LightningOptimizer"),
        ("lightning_fabric.wrappers", "_FabricOptimizer"),
        ("pytorch_lightning.core.optimizer", "LightningOptimizer"),
    }
)
"""Classes that frameworks put around an optimizer, in its attribute `optimizer`, by module and name. They change when
it is called, and not what it computes."""


def optimizers_of(given: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers to take over.

    Args:
        given: as OffloadZero takes it: one, several in a list or tuple, or None for AdamW over all parameters.
        model: the model.

    Raises:
        ConfigError: `require_adoptable` refuses one of them, two train the same parameter, or one has it twice, or has
            something else in its place.
    """
    if given is None:
        return [torch.optim.AdamW(model.parameters())]
    are_several = isinstance(given, list | tuple) and given and all(map(_is_optimizer, map(unwrapped, given)))
    found = list(map(unwrapped, given)) if are_several else [unwrapped(given)]
    for one in found:
        require_adoptable(one)
    trained: dict[Any, str] = {}
    for one in found:
        own: set[Any] = set()
        for param in (param for group in one.param_groups for param in group["params"]):
            if not isinstance(param, Tensor):
                raise ConfigError(
                    f"a param group of {type(one).__name__} holds {param!r}, which is no tensor: leave it out"
                )
            if param in trained or param in own:
                name = next((name for name, other in model.named_parameters() if other is param), "a parameter")
                where = "is twice in the param groups of" if param in own else f"is in {trained[param]} and in"
                out = "take it out of one place" if param in own else "leave it out of one of the optimizers"
                raise ConfigError(f"{name} {where} {type(one).__name__}: {out}")
            own.add(param)
        trained |= dict.fromkeys(own, type(one).__name__)
    return found


def _is_optimizer(one: object) -> bool:
    return isinstance(one, torch.optim.Optimizer)


def groups_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The param groups of all optimizers, the same dicts."""
    return [group for one in optimizers for group in one.param_groups]


def defaults_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The options that torch gives a param group without them. Groups of several optimizers have all of theirs."""
    return dict(optimizers[0].defaults) if len(optimizers) == 1 else {}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside the wrapper of a framework; any other as it is."""
    while _is_wrapper(type(optimizer)):
        optimizer = optimizer.optimizer
    return optimizer


def _is_wrapper(kind: type) -> bool:
    """Whether `kind` is one of WRAPPERS, or a subclass of one that adds nothing.

    Lightning makes such a subclass for each optimizer, of the wrapper's class and the optimizer's. The frameworks are
    not imported to find out.
    """
    for one in kind.__mro__:
        if (one.__module__, one.__qualname__) in WRAPPERS:
            return True
        if any(not name.startswith("__") for name in vars(one)):
            return False
    return False


def require_adoptable(optimizer: torch.optim.Optimizer) -> None:
    """Checks that OffloadZero can take over an optimizer.

    Raises:
        ConfigError: it is no torch optimizer, or one around another one; it has stepped before, was taken over before,
            or has a step() of its own in place of its class's.
    """
    if why := _why_not(optimizer):
        raise ConfigError(why)
    if "step" in vars(optimizer) and getattr(optimizer.step, "taken_over", False):
        raise ConfigError("the optimizer was taken over by another OffloadZero: give a fresh one")
    if optimizer.state and type(optimizer) in ADAMS:
        raise ConfigError("the optimizer has already stepped: its moments would be lost; give a fresh one")
    if _own_step(optimizer) is not None:
        raise ConfigError(
            "the optimizer has a step() of its own in place of that of its class, which would not be called any more: "
            "register what it adds with optimizer.register_step_pre_hook or register_step_post_hook"
        )


def _why_not(optimizer: object) -> str | None:
    """Says why what was given is no optimizer that can be taken over; None: it may be one."""
    if type(optimizer) in ADAMS:
        return None
    if isinstance(optimizer, type):
        name = optimizer.__name__
        return f"optimizer={name} is a class: make one of it, {name}(model.parameters())"
    kind = type(optimizer).__name__
    inside = [
        (name, one)
        for name, one in getattr(optimizer, "__dict__", {}).items()
        if isinstance(one, torch.optim.Optimizer)
    ]
    for name, one in inside:
        return (
            f"optimizer is {kind}, around the {type(one).__name__} in its attribute {name}: what it adds would be left "
            f"out; give OffloadZero the inner optimizer, and do what {kind} adds in the training loop"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return None
    return f"optimizer is {kind}: give torch.optim.AdamW or another torch optimizer, or None for AdamW"


def _own_step(optimizer: torch.optim.Optimizer) -> object:
    """What somebody has put in place of an optimizer's step(); None: nothing.

    A learning-rate scheduler does not count: it only notes whether step() was called.
    """
    step = vars(optimizer).get("step")
    if hasattr(step, "_wrapped_by_lr_sched"):
        step = getattr(step, "__wrapped__", step)
    return None if getattr(step, "__func__", step) is type(optimizer).step else step


def move_hooks(given: Sequence[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> None:
    """Moves the hooks that were registered on `given` to `optimizer`.

    They stay in the same dicts, so the handles that their owners keep still remove them. Hooks of the step of several
    optimizers are called one optimizer after the other. Their other hooks stay where they are.
    """
    if len(given) == 1:
        for name in torch_private.OPTIMIZER_HOOKS:
            setattr(optimizer, name, getattr(given[0], name))
        return
    for one in given:
        optimizer.register_step_pre_hook(partial(_call_before, vars(one)["_optimizer_step_pre_hooks"]))
        optimizer.register_step_post_hook(partial(_call_after, vars(one)["_optimizer_step_post_hooks"]))


def _call_before(hooks: Mapping[int, Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
    for hook in list(hooks.values()):
        changed = hook(optimizer, args, kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
    return args, kwargs


def _call_after(hooks: Mapping[int, Any], optimizer: Any, args: Any, kwargs: Any) -> None:
    for hook in list(hooks.values()):
        hook(optimizer, args, kwargs)


def rules_of(optimizers: Sequence[torch.optim.Optimizer], form: str = "fp32") -> list[Rule]:
    """The rule of each param group of optimizers that `require_adoptable` accepts.

    Args:
        optimizers: the optimizers.
        form: how states are kept, of `layout.ADAM_FORMS`, by rules that can do it; others keep fp32.

    Raises:
        ConfigError: a class cannot run on pieces of parameters (rules/probe.py), or an option is out of range.
    """
    rules: list[Rule] = [
        AdamRule(form)
        if type(one) in ADAMS and not any(group.get(option) for option in UNSUPPORTED)
        else rule_of(one, group)
        for one in optimizers
        for group in one.param_groups
    ]
    require_sound(rules, groups_of(optimizers))
    return rules


def require_sound(rules: Sequence[Rule], groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks the options of param groups.

    Args:
        rules: that of each group.
        groups: an optimizer's param_groups.

    Raises:
        ConfigError: a rule refuses an option, or there are more groups, or fewer, than the optimizer began with.
            Nothing was changed.
    """
    if len(groups) != len(rules):
        raise ConfigError(
            f"the optimizer has {len(groups)} param groups, and had {len(rules)} when OffloadZero took it: leave its "
            "list param_groups as it was, and make a new OffloadZero for others; nothing was changed"
        )
    for number, (rule, group) in enumerate(zip(rules, groups, strict=True)):
        rule.require_sound(number, group)


class _TakenStates(defaultdict[Any, Any]):
    """The states of an optimizer that was taken over. It has none, and a method that asks for some is told so."""

    def __missing__(self, key: Any) -> NoReturn:
        raise GradientMovedError(
            "this optimizer was taken over by OffloadZero and has no states any more: read those of the OffloadZero, "
            "optimizer.state[p]; what its class does with them, such as eval(), runs by apply() of the OffloadZero, "
            'optimizer.apply("eval")'
        )


_INSTEAD = {
    "add_param_group": "nothing would train these parameters: give them to an optimizer of their own, or have them in "
    "it before OffloadZero takes it",
    "state_dict": "it has no states any more: save the state_dict() of the OffloadZero",
    "load_state_dict": "nothing would use what is loaded: call the load_state_dict() of the OffloadZero, with what its "
    "own state_dict() returned",
}
"""Of the methods of an optimizer that was taken over, beside its step: why they raise, and what to do."""


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise GradientMovedError(f"this optimizer was taken over by OffloadZero, and {what}")

    return refuse


def retire(optimizer: torch.optim.Optimizer) -> None:
    """Replaces the states of an optimizer that was taken over, and the methods that would do nothing without a word.

    Its step() and add_param_group() would change nothing that is trained, state_dict() would have no states,
    load_state_dict() would load into nothing, and methods of the class that go through states would find none. All
    raise GradientMovedError now, which says what to do instead.
    """

    def step(*args: Any, **kwargs: Any) -> NoReturn:
        raise GradientMovedError("this optimizer was taken over by OffloadZero: call the step() of the OffloadZero")

    for name, what in _INSTEAD.items():
        setattr(optimizer, name, _refusal(what))
    step.taken_over = True  # type: ignore[attr-defined]
    # A scheduler that was made from it before asks whether this was called, and would warn that it was not.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.state = _TakenStates(dict)
    # A method, as schedulers expect: those made from the old optimizer go on to steer the groups. Of a proxy: else the
    # old optimizer, and parameters with it, would be in a cycle.
    optimizer.step = MethodType(step, weakref.proxy(optimizer))  # type: ignore[method-assign]


@contextmanager
def retired(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Retires an optimizer as `retire` does. If the body raises, the optimizer is what it was."""
    names: tuple[str, ...] = ("step", "_opt_called", "state", *_INSTEAD)
    before = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
    alive = weakref.ref(optimizer)
    try:
        retire(optimizer)
        del optimizer
        yield
    except BaseException:
        if (given := alive()) is not None:
            for name in names:
                vars(given).pop(name, None)
            vars(given).update(before)
        raise


@torch.no_grad()
def take_options(groups: Sequence[dict[str, Any]], committed: Sequence[Mapping[str, Any]]) -> None:
    """Gives param groups the hyper-parameters that were committed. Those that are tensors are written in place.

    Args:
        groups: an optimizer's param_groups.
        committed: the options of each group, in the same order.
    """
    for group, options in zip(groups, committed, strict=True):
        for name, value in options.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def groups_state(
    groups: Sequence[Mapping[str, Any]], step: int, paths: Sequence[Path], commit: str | None
) -> dict[str, Any]:
    """What OffloadZero.state_dict returns.

    Args:
        groups: the optimizer's param_groups.
        step: the number of its last step.
        paths: the directories of the run.
        commit: the name of the commit of this step; None: there is none.
    """
    params = [param for group in groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    names = [str(path) for path in paths]
    return {
        "state": {},
        "param_groups": [{**group, "params": [numbers[param] for param in group["params"]]} for group in groups],
        "step": step,
        "path": names[0] if len(names) == 1 else names or None,
        "commit": commit,
    }


_GIVE = "give what state_dict() of an OffloadZero of this model returned"


def require_matching(
    rules: Sequence[Rule], groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]
) -> tuple[int, object]:
    """Checks that a state dict is of an OffloadZero with these param groups.

    Args:
        rules: that of each group.
        groups: the optimizer's param_groups.
        state_dict: what `groups_state` returned.

    Returns:
        Its step, and the commit that it names, if any.

    Raises:
        ResumeError: it is of no OffloadZero, its groups have other numbers of parameters, or one is of AdamW here and
            of Adam there.
        ConfigError: one of its groups is refused by `require_sound`.
    """
    theirs = state_dict.get("param_groups")
    if not isinstance(theirs, list | tuple) or not all(isinstance(one, Mapping) and "params" in one for one in theirs):
        raise ResumeError(
            f"the state dict is of no optimizer, for it has no param_groups: {_GIVE}; that of a model goes to "
            "model.load_state_dict()"
        )
    sizes, found = ([len(group["params"]) for group in those] for those in (groups, theirs))
    if found != sizes:
        raise ResumeError(
            f"the state dict's groups have {found} parameters, and the optimizer's {sizes}: give the state dict of an "
            "optimizer of this model"
        )
    step = state_dict.get("step")
    if not isinstance(step, int):
        raise ResumeError(f"the state dict is not of an OffloadZero, for it has no step: {_GIVE}")
    for number, (group, other) in enumerate(zip(groups, theirs, strict=True)):
        kind = "decoupled_weight_decay"
        if kind in group and other.get(kind, group[kind]) != group[kind]:
            raise ResumeError(f"param group {number} of the state dict is of {'AdamW' if other[kind] else 'Adam'}")
    require_sound(rules, [{**group, **other} for group, other in zip(groups, theirs, strict=True)])
    return step, state_dict.get("commit")


def load_groups(groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Gives param groups copies of the hyper-parameters of a state dict that `require_matching` has accepted.

    A scheduler writes to a learning rate that is a tensor: the state dict has to stay what it is.
    """
    for group, other in zip(groups, state_dict["param_groups"], strict=True):
        group.update({key: copy.deepcopy(value) for key, value in other.items() if key != "params"})
