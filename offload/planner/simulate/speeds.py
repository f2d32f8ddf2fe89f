"""How fast a machine is, as a simulation needs it: one number for each resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class DriveSpeed:
    """Of a drive, in bytes a second.

    Attributes:
        read: reads alone.
        write: writes alone.
        both: reads and writes at once, added.
    """

    read: float
    write: float
    both: float

    def scaled(self, factor: float) -> DriveSpeed:
        """A drive so many times as fast."""
        return DriveSpeed(factor * self.read, factor * self.write, factor * self.both)


@dataclass(frozen=True)
class LinkSpeed:
    """Of the link between RAM and a device that has memory of its own, in bytes a second.

    Attributes:
        up: to the device alone.
        down: to RAM alone.
        both: at once, added.
    """

    up: float
    down: float
    both: float


@dataclass(frozen=True)
class NetworkSpeed:
    """Of the link between ranks.

    Attributes:
        bytes_per_s: that a rank sends, and as many that it receives at the same time.
        delay_s: seconds that a collective of two ranks takes that carries next to nothing.
    """

    bytes_per_s: float
    delay_s: float = 0.0


@dataclass(frozen=True)
class HostCosts:
    """Of what the host does beside all that rates tell, most of it in Python, in seconds.

    Attributes:
        tile_s: for a tile that runs forward or backward: its part of the call, its hooks, what brings it and lets it
            go.
        chunk_s: for a chunk of states that is read, stepped and written.
        resident_s: for a chunk of states in RAM that is stepped alone, as each is where its parameters are elsewhere.
        moved_s: for a chunk of parameters or gradients that is read from a drive, or written to it.
        delay_s: from where a transfer of a drive is asked for to where somebody goes on who waited for it, less what
            its bytes take. Transfers wait side by side.
    """

    tile_s: float = 0.0
    chunk_s: float = 0.0
    resident_s: float = 0.0
    moved_s: float = 0.0
    delay_s: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """Of a rank's machine.

    Attributes:
        elements_per_s: that the optimizer's kernels step in RAM; inf: they take no time.
        memory: bytes of RAM that a copy reads and writes, together; inf: it takes no time.
        drives: those of the run's directories, in their order.
        link: None: the device has no memory of its own.
        network: None: there is one rank, or it is not known.
        matrix_flops: FLOP/s of the steps of optimizers that multiply matrices, where these are stepped; None: that is
            not known, or there are none.
        host: what Python takes.
    """

    elements_per_s: float
    memory: float = float("inf")
    drives: Sequence[DriveSpeed] = ()
    link: LinkSpeed | None = None
    network: NetworkSpeed | None = None
    matrix_flops: float | None = None
    host: HostCosts = HostCosts()

    def shared_by(self, ranks: int) -> Speeds:
        """What each of several ranks has of a machine, which all do the same on it at the same time."""
        drives = [one.scaled(1 / ranks) for one in self.drives]
        link, network = self.link, self.network
        return Speeds(
            self.elements_per_s / ranks,
            self.memory / ranks,
            drives,
            None if link is None else LinkSpeed(link.up / ranks, link.down / ranks, link.both / ranks),
            None if network is None else replace(network, bytes_per_s=network.bytes_per_s / ranks),
            None if self.matrix_flops is None else self.matrix_flops / ranks,
            self.host,
        )


@dataclass(frozen=True)
class Passes:
    """What the device computes in a micro-batch, if nothing else took time, and what waits for its backward.

    Attributes:
        forward_s: seconds of the forward of each unit, by name; "" is the root unit.
        backward_s: of its backward, without those of a forward that runs again in it.
        waiting: the bytes of each tensor that a unit puts into the activation tier.
        tiles: the numbers of the tiles that a micro-batch uses of a weight, by the weight's unit: of one micro-batch
            after the other, and then again. Of other weights all are used.
        tiled_bytes: what the tiles of a weight, all of them together, read and write in RAM beside what the weight as a
            whole would, by the weight's unit: in its forward, and in its backward. Where the device is the CPU.
    """

    forward_s: Mapping[str, float] = field(default_factory=dict)
    backward_s: Mapping[str, float] = field(default_factory=dict)
    waiting: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tiles: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    tiled_bytes: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def times(self, factor: float) -> Passes:
        """The same of so many times as many tokens."""
        forward_s, backward_s = (
            {unit: factor * seconds for unit, seconds in one.items()} for one in (self.forward_s, self.backward_s)
        )
        waiting = {unit: [round(factor * nbytes) for nbytes in sizes] for unit, sizes in self.waiting.items()}
        tiled = {unit: (factor * one, factor * other) for unit, (one, other) in self.tiled_bytes.items()}
        return Passes(forward_s, backward_s, waiting, self.tiles, tiled)
