"""What peft's `merge_and_unload()` would make of a model, layer by layer, without changing the model.

A layer with adapters is copied, and peft merges the copy by its own code. So the names are peft's, and so are the bits,
of quantised bases too. A merge writes to the weight of the layer's base. Where others share that weight, as an output
layer that is tied to an embedding does, they are copied together, so that the copies share it, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from offload.errors import ConfigError


class Merger:
    """The parts of a model with adapters.

    Args:
        model: a PeftModel.

    Attributes:
        groups: layers with adapters, and what shares weights with them.
        others: all other modules, with their names in the model that a merge makes.

    Raises:
        ConfigError: it has no adapters of peft, or peft refuses to merge them.
    """

    def __init__(self, model: Any) -> None:
        tuner = _tuner_of(model)
        adapted: dict[str, nn.Module] = {}
        plain: dict[str, nn.Module] = {}
        for path, module, is_adapted in _modules_of(tuner.model):
            (adapted if is_adapted else plain)[path] = module
        written = {param for one in adapted.values() for param in _written_by(one)}
        users: dict[Tensor, list[str]] = {}
        for path, one in (*adapted.items(), *plain.items()):
            for param in one.parameters(recurse=path in adapted):
                if param in written:
                    users.setdefault(param, []).append(path)
        self.groups = [
            Group(
                tuner,
                {path: adapted[path] for path in paths if path in adapted},
                {path: plain[path] for path in paths if path in plain},
            )
            for paths in _connected(adapted, users.values())
        ]
        together = {path for group in self.groups for path in group.paths}
        self.others = [(path, one) for path, one in plain.items() if path not in together]


class Group:
    """Layers with adapters that are merged together.

    Args:
        tuner: peft's model around the base.
        adapted: the layers, by their paths in the base.
        sharing: modules whose own weights are those of the layers.

    Attributes:
        paths: of all of them.
        params: of all of them.
    """

    def __init__(self, tuner: Any, adapted: Mapping[str, nn.Module], sharing: Mapping[str, nn.Module]) -> None:
        self._tuner = tuner
        self._adapted = adapted
        self._sharing = sharing
        self.paths = (*adapted, *sharing)
        found = [param for one in adapted.values() for param in one.parameters()]
        self.params: tuple[Tensor, ...] = tuple(
            dict.fromkeys([*found, *(param for one in sharing.values() for param in one.parameters(recurse=False))])
        )

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Merges copies.

        Yields:
            Names in the merged model, and tensors.

        Raises:
            ConfigError: peft cannot merge them.
        """
        state = self._merge()
        for name in list(state):
            yield name, state.pop(name)

    def _merge(self) -> dict[str, Tensor]:
        base = nn.Module()
        memo: dict[int, Any] = {}
        for path, module in self._sharing.items():
            _take_own(_made_at(base, path), module, memo)
        for path, layer in self._adapted.items():
            parent, _, name = path.rpartition(".")
            _made_at(base, parent).add_module(name, copy.deepcopy(layer, memo))
        # peft's own loop over layers, of a model that has these layers only.
        tuner = copy.copy(self._tuner)
        vars(tuner)["_modules"] = {**self._tuner._modules, "model": base}
        try:
            state: dict[str, Tensor] = tuner.merge_and_unload().state_dict()
        except Exception as error:
            raise ConfigError(
                f"peft cannot merge {self.paths[0]} ({type(self._adapted[self.paths[0]]).__name__}): {error}; leave "
                "merged out, and let the engine apply the adapters"
            ) from error
        return state


def _tuner_of(model: Any) -> Any:
    """What peft has put around the base of a model.

    Raises:
        ConfigError: if that is nothing which can be merged.
    """
    tuner = getattr(model, "base_model", None) if "peft" in sys.modules else None
    if tuner is not None:
        from peft.tuners.tuners_utils import BaseTuner

        if isinstance(tuner, BaseTuner) and any(adapted for *_, adapted in _modules_of(tuner.model)):
            try:
                tuner._check_merge_allowed()
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(f"weights(merged=True): {error}") from error
            return tuner
    raise ConfigError(
        f"weights(merged=True) merges the adapters of a PeftModel, and the model that is held is a "
        f"{type(model).__name__} without any: give OffloadZero what get_peft_model returns, or leave merged out"
    )


def _modules_of(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules of a base with their paths, in order, and whether peft has put adapters there.

    What lies in one that has adapters is left out. Those are the layers that peft has changed, and modules of which it
    trains a copy.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    is_adapted = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    yield path, module, is_adapted
    for name, child in () if is_adapted else module._modules.items():
        if child is not None:
            yield from _modules_of(child, f"{path}.{name}" if path else name)


def _written_by(layer: Any) -> Iterable[Tensor]:
    """The weights to which a merge of a layer writes."""
    find = getattr(layer, "get_base_layer", None)
    return () if find is None else find().parameters()


def _connected(adapted: Iterable[str], users: Iterable[Sequence[str]]) -> list[list[str]]:
    """Layers in groups, with what uses the same weights.

    Args:
        adapted: the paths of the layers.
        users: of each weight that is written to, the paths of those that use it.
    """
    group_of = {path: [path] for path in adapted}
    for paths in users:
        together = list(dict.fromkeys(one for path in paths for one in group_of.get(path, [path])))
        for path in together:
            group_of[path] = together
    return list({tuple(group): group for group in group_of.values()}.values())


def _made_at(base: nn.Module, path: str) -> nn.Module:
    """The module at a path, which is made if there is none."""
    for name in filter(None, path.split(".")):
        if name not in base._modules:
            base.add_module(name, nn.Module())
        base = base.get_submodule(name)
    return base


def _take_own(made: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    """Gives a module copies of what another one has of its own."""
    made._parameters.update(copy.deepcopy(dict(module._parameters), memo))
    made._buffers.update(copy.deepcopy(dict(module._buffers), memo))
    made._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
