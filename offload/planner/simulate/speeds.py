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
class Speeds:
    """Of a rank's machine.

    Attributes:
        elements_per_s: that the optimizer's kernels step in RAM; inf: they take no time.
        memory: bytes of RAM that a copy reads and writes, together; inf: it takes no time.
        drives: those of the run's directories, in their order.
        link: None: the device has no memory of its own.
        network: None: there is one rank, or it is not known.
    """

    elements_per_s: float
    memory: float = float("inf")
    drives: Sequence[DriveSpeed] = ()
    link: LinkSpeed | None = None
    network: NetworkSpeed | None = None

    def shared_by(self, ranks: int) -> Speeds:
        """What each of several ranks has of a machine, which all do the same on it at the same time."""
        drives = [DriveSpeed(one.read / ranks, one.write / ranks, one.both / ranks) for one in self.drives]
        link, network = self.link, self.network
        return Speeds(
            self.elements_per_s / ranks,
            self.memory / ranks,
            drives,
            None if link is None else LinkSpeed(link.up / ranks, link.down / ranks, link.both / ranks),
            None if network is None else replace(network, bytes_per_s=network.bytes_per_s / ranks),
        )


@dataclass(frozen=True)
class Passes:
    """Seconds that the device computes in a micro-batch, if nothing else took time.

    Attributes:
        forward_s: in the forward of each unit, by name; "" is the root unit.
        backward_s: in the backward of each unit.
    """

    forward_s: Mapping[str, float] = field(default_factory=dict)
    backward_s: Mapping[str, float] = field(default_factory=dict)

    def times(self, factor: float) -> Passes:
        """The same of so many times as many tokens."""
        parts = ({unit: factor * seconds for unit, seconds in one.items()} for one in (self.forward_s, self.backward_s))
        return Passes(*parts)
