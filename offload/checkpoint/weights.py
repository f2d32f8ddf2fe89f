"""What a commit holds, as tensors to be exported."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from offload.checkpoint.extra import memory_of
from offload.checkpoint.manifest import ParameterFacts
from offload.checkpoint.reader import Reader
from offload.checkpoint.tensors import Entry


def entries(reader: Reader, kind: str = "master", dtype: torch.dtype | None = None) -> Iterator[Entry]:
    """The parameters of a commit under their own names, in the order in which their slots are read once each.

    Args: kind: one of STATE_KINDS; dtype: what they are rounded to (to nearest even); None: a master to its
    parameter's compute dtype, a moment stays fp32.
    Memory: a slot and its cast; for a parameter that does not lie row-major, all of it, twice.
    """
    parameters = reader.manifests[0].parameters
    for flat in reader.manifests[0].flats:
        for number in flat.params:
            facts = parameters[number]
            own: torch.dtype = getattr(torch, facts.dtype) if kind == "master" else torch.float32
            wanted = own if dtype is None else dtype
            yield Entry(facts.name, wanted, facts.shape, partial(_pieces, reader, facts, kind, wanted))


def _pieces(reader: Reader, facts: ParameterFacts, kind: str, dtype: torch.dtype) -> Iterator[memoryview]:
    if facts.order is not None:
        yield memory_of(reader.read(facts.name, kind).to(dtype))
        return
    for piece in reader.pieces(facts.name, kind):
        yield memory_of(piece.to(dtype))
