"""The parts of one run, once they are put together (build.py)."""

from __future__ import annotations

from dataclasses import dataclass

from offload.grads.base import GradientBuffer
from offload.model.flat_param import FlatParameters
from offload.model.master_weights import MasterWeights
from offload.optim.adam import NewParameters, Step
from offload.run import Run
from offload.storage.chunk_cache import Store
from offload.storage.stripes import Stripes


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        run: what all parts share.
        store: of the optimizer states.
        params: the store of the 16-bit parameters, if they are streamed or committed.
        streamed: the same, if they are on the device only around their use.
        stores: all there are, that of the gradients too.
        parameters: the model's, in flat parameters; masters: between them and the states.
        gradients: the gradient buffer; step: Adam; new_params: the way of its results into the model.
        slots: the swap files; io_engine: the name of what reads and writes them; None without files.
    """

    run: Run
    store: Store
    params: Store | None
    streamed: Store | None
    stores: tuple[Store, ...]
    parameters: FlatParameters
    masters: MasterWeights
    gradients: GradientBuffer
    new_params: NewParameters
    step: Step
    slots: Stripes | None
    io_engine: str | None

    @property
    def files(self) -> tuple[str, ...]:
        """The swap files of this rank."""
        return () if self.slots is None else self.slots.paths
