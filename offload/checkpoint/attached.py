"""Objects whose state every commit carries: schedulers, data loaders, random number generators.

[Note: when a state is captured]
The automatic commit of a step is made at the start of the next one. By then the loop has drawn the next batch, and with
it random numbers; a resumed run would draw the batch after that. So states are captured earlier, for the steps that are
due to be committed:

- What is drawn from (it can be iterated, or is a random number generator): when `step()` returns.
- Everything else: when the next forward with gradients begins. Schedulers and scalers have been called by then.

`commit()` itself captures everything when it is called.
"""

from __future__ import annotations

import copy
import reprlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.checkpoint.extra import Carried, collect_rng, encode, restore_rng
from offload.errors import ConfigError
from offload.model.written_frozen import WrittenFrozen

RNG = "rng"
"""The name of the global random number generators."""


class _Accessor(NamedTuple):
    """How to get and set the state of one object.

    Attributes:
        get: returns the state.
        set: takes the state.
        is_drawn: whether something is drawn from the object; see [Note: when a state is captured].
        is_rng: whether it is a random number generator, or all of them.
        is_copied: whether `get` returns a copy that nobody changes. Another copy would double the RAM.
    """

    get: Callable[[], object]
    set: Callable[[Any], object]
    is_drawn: bool
    is_rng: bool = False
    is_copied: bool = False

    def copy(self) -> object:
        """The present state, as a copy that nobody changes."""
        return self.get() if self.is_copied else copy.deepcopy(self.get())


class Committed(NamedTuple):
    """What the commit that a run resumes from carries.

    Attributes:
        carried: the states of attached objects, and the user's extra.
        groups: the hyper-parameters of each param group.
    """

    carried: Carried
    groups: tuple[Mapping[str, Any], ...] = ()


class Attached:
    """The objects attached to one optimizer.

    Committed states are in RAM only until training begins, and while a commit is made. Whatever goes back to a commit
    later reads it again.

    Args:
        committed: what the commit carries that the run resumes from.
    """

    def __init__(self, committed: Committed) -> None:
        self._accessors: dict[str, _Accessor] = {}
        self._committed = committed
        self._is_training = False
        self._captured: dict[str, object] = {}
        self._step: int | None = None  # which the captured states are of

    @property
    def committed_names(self) -> Collection[str]:
        """The names of the states in the commit that the run resumes from."""
        return self._committed.carried.attached.keys()

    @property
    def has_loader(self) -> bool:
        """Whether something is attached that batches are drawn from."""
        return any(accessor.is_drawn and not accessor.is_rng for accessor in self._accessors.values())

    def __bool__(self) -> bool:
        return bool(self._accessors)

    def attach(self, objects: Mapping[str, object]) -> None:
        """Adds objects. Before the first step of a resumed run, each gets the state that was committed under its name.

        Args:
            objects: the objects, by name.

        Raises:
            ConfigError: an object has no state, or one that a commit cannot store. Nothing is attached then.
        """
        accessors = {name: _accessor_of(name, value) for name, value in objects.items()}
        encode(Carried(attached={name: accessor.get() for name, accessor in accessors.items()}))
        self._accessors |= accessors
        if not self._is_training:
            self._give_back(accessors, self._committed.carried)

    def groups_for(self, objects: Mapping[str, object]) -> tuple[Mapping[str, Any], ...]:
        """The committed hyper-parameters of each param group, if one of `objects` is a scheduler; else none.

        The constructor of a scheduler has set others.
        """
        is_scheduled = not self._is_training and any(hasattr(value, "get_last_lr") for value in objects.values())
        return self._committed.groups if is_scheduled else ()

    def step_begins(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Warns at the first step if a state that was committed has not been given back.

        Args:
            groups: the param groups as they are now.
        """
        if not self._is_training:
            self._is_training = True
            if missing := sorted(name for name in self._committed.carried.attached if name not in self._accessors):
                warnings.warn(
                    f"the commit that this run resumes carries the state of {', '.join(missing)}, which was not given "
                    "back: call optimizer.attach() with the same names before the first step",
                    stacklevel=4,
                )
            elif self._committed.carried.extra is None:
                self._warn_of_a_new_schedule(groups)
            self._committed = Committed(Carried())  # nothing is given back from now on

    def _warn_of_a_new_schedule(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Warns if a scheduler that nobody attached has begun anew: its constructor sets the first learning rate."""
        for number, (now, then) in enumerate(zip(groups, self._committed.groups, strict=False)):
            # Schedulers leave this key in the groups.
            if "initial_lr" in now and "initial_lr" in then and now["lr"] != then["lr"]:
                warnings.warn(
                    f"the learning rate of param_groups[{number}] is {now['lr']}, and was {then['lr']} in the commit "
                    "that this run resumes: its scheduler begins anew, because no commit carries it. Call "
                    "optimizer.attach(scheduler=scheduler) in every run",
                    stacklevel=5,
                )
                return

    def step_ends(self, step: int) -> None:
        """Captures the state of objects that are drawn from, after a step that is due to be committed."""
        captured = {name: accessor.copy() for name, accessor in self._accessors.items() if accessor.is_drawn}
        self._captured, self._step = captured, step

    def capture_rest(self) -> None:
        """Captures the state of all other objects, once a step. Called when a forward begins, or the commit is due."""
        if self._step is not None and torch.is_grad_enabled():
            for name, accessor in self._accessors.items():
                if name not in self._captured:
                    self._captured[name] = accessor.copy()

    def is_captured(self, step: int) -> bool:
        """Whether the state after `step` is known. It is not after an interrupt in `step_ends`."""
        return not self._accessors or self._step == step

    def carry_captured(self) -> object:
        """What an automatic commit carries."""
        self.capture_rest()
        return self._carried(None, dict(self._captured)) if self._accessors else None

    def carry(self, extra: object) -> object:
        """What a commit of the present state carries.

        Args:
            extra: what the user gives along.
        """
        if not self._accessors:
            return extra
        return self._carried(extra, {name: accessor.copy() for name, accessor in self._accessors.items()})

    def commit_ends(self) -> None:
        """Drops what was captured, which is committed now, or will not be."""
        self._captured, self._step = {}, None

    def go_back(self, carried: Carried) -> None:
        """Gives all objects the states that the last commit carries.

        Args:
            carried: what that commit carries.
        """
        self.commit_ends()
        if not self._is_training:  # what is attached from now on
            self._committed = Committed(carried)
        self._give_back(self._accessors, carried)

    def _carried(self, extra: object, states: dict[str, object]) -> Carried:
        return Carried(extra, states, tuple(name for name, accessor in self._accessors.items() if accessor.is_drawn))

    def _give_back(self, accessors: Mapping[str, _Accessor], carried: Carried) -> None:
        """Gives objects the states that are carried under their names, and then all attached generators theirs.

        Args:
            accessors: the objects that get their states.
            carried: what the commit carries.
        """
        states, drawn = carried.attached, carried.drawn
        for name in accessors:
            if name in drawn and name not in states:
                warnings.warn(
                    f"the state of {name} was committed on another number of ranks, so this rank has none: it begins "
                    "anew",
                    stacklevel=4,
                )
        others = [name for name, accessor in accessors.items() if not accessor.is_rng and name in states]
        generators = [name for name, accessor in self._accessors.items() if accessor.is_rng and name in states]
        for name in others:
            self._set(name, states[name])
            if accessors[name].is_drawn:
                # A loader makes its next iterator from the state that it was given, and draws seeds for workers. When
                # the state was committed there was an iterator, so the generators get theirs after this: a loader that
                # is asked for its state makes the iterator now (StatefulDataLoader), and `iter()` takes that.
                accessors[name].get()
        for name in generators:
            self._set(name, states[name])

    def _set(self, name: str, state: object) -> None:
        accessor = self._accessors[name]
        try:
            accessor.set(state if accessor.is_copied else copy.deepcopy(state))
        except Exception as error:
            error.add_note(f"while {name} was given the state that is committed")
            raise


def _accessor_of(name: str, value: Any) -> _Accessor:
    if name == RNG:
        return _Accessor(collect_rng, restore_rng, is_drawn=True, is_rng=True)
    if isinstance(value, torch.Generator):
        return _Accessor(value.get_state, value.set_state, is_drawn=True, is_rng=True)
    get, give = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    if callable(get) and callable(give):
        is_drawn = hasattr(value, "__iter__") or hasattr(value, "__next__")
        return _Accessor(get, give, is_drawn, is_copied=isinstance(value, WrittenFrozen))
    hint = ""
    if isinstance(value, torch.utils.data.DataLoader):
        hint = "; torch's DataLoader keeps no position, torchdata's StatefulDataLoader does"
    elif isinstance(value, Mapping):
        hint = "; give the object itself, not a state that it had"
    raise ConfigError(
        f"attach({name}={reprlib.repr(value)}): nothing to commit, it has no state_dict() and load_state_dict(){hint}"
    )
