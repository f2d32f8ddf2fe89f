"""Which idioms see that a part of the mechanism is broken: `python -m tests.oracle.mutations [--all]`.

A mutation takes out one part of what makes a held model behave as the plain one. An idiom that passes with every
mutation would show nothing. Prints a row an idiom, with the mutations that it fails with; `--all` tries every mutation,
otherwise each idiom ends with the first one that it sees.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from offload import torch_private
from offload.errors import GradientMovedError
from offload.model import hooks, torch_helpers
from offload.model.fetch import StreamedUnits
from offload.model.flat_param import FlatParameters
from offload.model.gradient import Answers, StandIn
from offload.model.guard import Guards
from offload.model.held_param import HeldParam
from offload.model.pending import PendingUpdates
from offload.model.state_dict import Access
from offload.optim.scale import StepScale
from tests.oracle import idioms
from tests.oracle.harness import IDIOMS, Idiom, check

RESIDENT, STREAMED = "nvme", "streamed from cpu"
"""A placement whose updates are pending after `step()`, and one whose parameters come and go."""


def _nothing(*_: Any, **__: Any) -> None:
    return None


@classmethod
def _refuses(*_: Any) -> None:
    raise GradientMovedError("the gradient is not here")


def _without_earlier_gradients() -> contextlib.AbstractContextManager[Any]:
    begins = Answers.accumulation_begins

    def mutated(self: Answers, number: int) -> None:
        with torch_private.PastSubclasses():
            self._parameters.params[number].grad = None
        begins(self, number)

    return patch.object(Answers, "accumulation_begins", mutated)


def _hooks_last(hook_forward: Any) -> Any:
    def mutated(module: nn.Module, before: Any, after: Any, kind: Any = torch_helpers.Hook) -> Any:
        first, last = hook_forward(module, before, after, kind)
        module._forward_pre_hooks.move_to_end(first.id)
        return first, last

    return mutated


def _shared_storage(self: HeldParam, values: torch.Tensor) -> torch.Tensor:
    return self.shaped(values)


Mutation = tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]

MUTATIONS: dict[str, Mutation] = {
    "factors are dropped": (RESIDENT, lambda: patch.object(StepScale, "multiply", _nothing)),
    "zeros are dropped": (RESIDENT, lambda: patch.object(Answers, "zero", _nothing)),
    "gradients are not added": (RESIDENT, lambda: _without_earlier_gradients()),
    "gradients do not answer": (RESIDENT, lambda: patch.object(StandIn, "__torch_function__", _refuses)),
    "writes are not taken over": (RESIDENT, lambda: patch.object(FlatParameters, "find_outside_writes", lambda *_: [])),
    "hooks come last": (RESIDENT, lambda: patch.object(hooks, "hook_forward", _hooks_last(hooks.hook_forward))),
    "storages are shared": (RESIDENT, lambda: patch.object(HeldParam, "view_for", _shared_storage)),
    "modes see the library": (STREAMED, lambda: patch.object(torch_helpers, "is_watched", lambda: False)),
    "results fetch nothing in backward": (STREAMED, lambda: patch.object(StreamedUnits, "fetch_before", _nothing)),
    "state_dicts fetch nothing": (STREAMED, lambda: patch.object(Access, "hooks_of", lambda *_, **__: iter(()))),
    "uses are not seen": (RESIDENT, lambda: patch.object(Guards, "class_for", lambda self, kind, **_: kind)),
    "updates wait for the next step": (RESIDENT, lambda: patch.object(PendingUpdates, "apply", _nothing)),
}
"""What is taken out, in which placement: from the special to what every training needs."""


def sees(idiom: Idiom, mutation: str) -> bool:
    """Whether an idiom fails when a part of the mechanism is taken out."""
    placement, taken_out = MUTATIONS[mutation]
    with (
        tempfile.TemporaryDirectory() as folder,
        taken_out(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            check(idiom, placement, Path(folder))
        except Exception:
            return True
    return False


def seen_by(names: Sequence[str], *, every: bool) -> Iterator[tuple[str, list[str]]]:
    """The mutations that each idiom sees. Args: every: try all of them, and not only until the first is seen."""
    assert idioms.__all__
    for name in names:
        found = []
        for mutation in MUTATIONS:
            if sees(IDIOMS[name], mutation):
                found.append(mutation)
                if not every:
                    break
        yield name, found


def main() -> None:
    """Prints the rows, and how many idioms see each mutation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th idiom, from the i-th on")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    count: Counter[str] = Counter()
    for name, found in seen_by(list(IDIOMS)[first::step], every=options.all):
        print(f"{name}: {', '.join(found) or 'NONE'}", flush=True)
        count.update(found or ["NONE"])
    for mutation, number in count.most_common():
        print(f"{number:4} {mutation}")


if __name__ == "__main__":
    main()
