"""The parameters that a step makes new, by chunk, wherever they are: in the model for good, or in a store.

The step, the masters and the exchange between ranks lease the values of a chunk here, and need not know where they are.
Units are fetched from the store itself (model/transfer.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from offload.layout import Chunk, Layout
from offload.storage.chunk_cache import Store, Use


def _nobody(chunk: Chunk, values: Tensor) -> None:
    """Nobody has other copies of a chunk's values."""


class ParamStore(ABC):
    """The trained parameters that this rank makes new, by chunk.

    Attributes:
        in_model: whether the model itself has them, so that what others write to a parameter is here at once.
        chunk_updated: called with a chunk and its new values, shape (chunk.numel,), while these are leased and about to
            stay here. Of chunks of other ranks it is called, too. A held model makes it `UnitTransfers.chunk_updated`.
    """

    in_model: bool

    def __init__(self) -> None:
        self.chunk_updated: Callable[[Chunk, Tensor], None] = _nobody

    @abstractmethod
    def lease(self, chunk: int, use: Use, *, step: int) -> AbstractContextManager[Tensor]:
        """A context with the values of a chunk of `Layout.param_chunks`, shape (chunk.numel,), in the compute dtype.

        Args:
            chunk: its number.
            use: what it is leased for; see `Store.lease`.
            step: the step that makes its values, if they are new.
        """

    @abstractmethod
    def writes(self, chunk: int) -> int:
        """A number that changes whenever leases have changed a chunk's values.

        Where the model has them, it stays: those who write there tell nobody, and masters follow.
        """

    @abstractmethod
    def is_resident(self, chunk: int) -> bool:
        """Whether the values of a chunk stay in memory, so that a lease needs no buffer that another one may have."""

    def to_commit(self, steps: Mapping[int, int]) -> None:  # noqa: B027
        """Brings values to where commits are made from.

        Args:
            steps: the chunks that are newer than the last commit, each with the step that made its values.
        """

    def from_commit(self, step: int) -> None:  # noqa: B027
        """Brings the values of a commit, of that step, from there."""

    def move(self) -> None:  # noqa: B027
        """Takes note that the model's parameters have other memory now."""

    def let_go(self) -> None:
        """No values come any more: the held model is let go of, which would be in a cycle with this."""
        self.chunk_updated = _nobody


class ResidentParams(ParamStore):
    """Parameters that never leave the model. The buffer of a chunk is its part of a flat parameter.

    Args:
        layout: of the parameters.
        flats: the model's flat parameters, on its device.
        beneath: the store from which commits are made; None: commits hold no parameters.
    """

    in_model = True

    def __init__(self, layout: Layout, flats: Sequence[Tensor], beneath: Store | None = None) -> None:
        super().__init__()
        self._layout = layout
        self._flats = flats
        self._beneath = beneath
        self._leases: dict[int, tuple[Tensor, AbstractContextManager[Tensor]]] = {}  # each with its flat parameter

    def values(self, chunk: int) -> Tensor:
        """The values of a chunk, as a lease of it gives them."""
        one = self._layout.chunks[chunk]
        return self._flats[one.flat][one.start : one.start + one.numel]

    def lease(self, chunk: int, use: Use, *, step: int) -> AbstractContextManager[Tensor]:
        flat = self._flats[self._layout.chunks[chunk].flat]
        known = self._leases.get(chunk)
        if known is None or known[0] is not flat:
            known = self._leases[chunk] = flat, nullcontext(self.values(chunk))
        return known[1]

    def writes(self, chunk: int) -> int:
        return 0

    def is_resident(self, chunk: int) -> bool:
        return True

    def to_commit(self, steps: Mapping[int, int]) -> None:
        if self._beneath is not None:
            for chunk, step in steps.items():
                with self._beneath.lease(chunk, Use.OVERWRITE, step=step) as lease:
                    values = self.values(chunk)
                    lease.arrays[0].view(values.dtype).copy_(values)

    def from_commit(self, step: int) -> None:
        if self._beneath is not None:
            self._beneath.expect(chunk.index for chunk in self._layout.chunks)
            for chunk in self._layout.chunks:
                with self._beneath.lease(chunk.index, Use.READ, step=step) as lease:
                    values = self.values(chunk.index)
                    values.copy_(lease.arrays[0].view(values.dtype))
            self._beneath.expect(())

    def move(self) -> None:
        self._leases.clear()


class StreamedParams(ParamStore):
    """Parameters that are in a store, and on the model's device only around their use.

    Args:
        layout: of the parameters.
        store: has them. Commits are made from it.
    """

    in_model = False

    def __init__(self, layout: Layout, store: Store) -> None:
        super().__init__()
        self._layout = layout
        self._store = store

    @contextmanager
    def lease(self, chunk: int, use: Use, *, step: int) -> Iterator[Tensor]:
        dtype = self._layout.flats[self._layout.param_chunks[chunk].flat].dtype
        with self._store.lease(chunk, use, step=step) as lease:
            yield lease.arrays[0].view(dtype)

    def writes(self, chunk: int) -> int:
        return self._store.writes(chunk)

    def is_resident(self, chunk: int) -> bool:
        return self._store.is_resident(chunk)
