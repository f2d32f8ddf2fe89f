"""The link between ranks in virtual time, as one rank has it.

[Note: other ranks]
One rank is simulated, and the link to the others. They do the same at the same time, since all of them have as much: so
a collective begins when this rank launches it, and what this rank sends takes as long as what it receives. Collectives
of one group come one after the other. Gradients and parameters have groups of their own, which share the link. A
collective takes a delay for each of its rounds, and then what its bytes take (Hockney, 1994): one round of an
all-to-all, in which each rank sends to all others at once, and log2(ranks) of a gather (Thakur et al., 2005). So the
delay is what a collective of two ranks takes that carries next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from offload.planner.simulate.clock import Changes, Channel, Clock, Moment, Process
from offload.planner.simulate.lines import NETWORK, Line, Worker
from offload.planner.simulate.speeds import NetworkSpeed
from offload.ranks.communicator import Work

AVERAGES, VALUES = "gradients", "parameters"
"""The groups, by what travels in them; small questions travel in them, too."""
After = tuple[Moment, str | Line]
"""What is waited for, and what that is a wait for."""


class Network:
    """What this rank sends to others; see [Note: other ranks].

    Args:
        clock: the virtual time.
        speed: of the link.

    Attributes:
        channel: the link.
        sent: for each collective, as Communicator.stats: `<name>_calls`, and what this rank sent, `<name>_bytes`. Of
            small questions, which are named gather, there are calls only.
        arrivals: changes when a collective has ended.
    """

    def __init__(self, clock: Clock, speed: NetworkSpeed) -> None:
        self._clock = clock
        self._delay_s = speed.delay_s
        rates = {AVERAGES: speed.bytes_per_s, VALUES: speed.bytes_per_s}
        self.channel = Channel(clock, "network", rates, speed.bytes_per_s, is_shared=False)
        self._workers = {group: Worker(clock, Line(clock), NETWORK) for group in rates}
        self.sent: Counter[str] = Counter()
        self.arrivals = Changes()

    def line(self, group: str) -> Line:
        """What the collectives of a group do, or wait for."""
        return self._workers[group].line

    def reduce_scatter(self, nbytes: int, calls: int, after: Sequence[After]) -> Moment:
        """Launches a reduction of gradients.

        Args:
            nbytes: what this rank sends to others.
            calls: in how many collectives, one after the other.
            after: what they wait for.

        Returns:
            When all ranks' versions have arrived.
        """
        return self._launch(AVERAGES, "reduce_scatter", nbytes, calls, 1, after)

    def all_gather(self, nbytes: int, ranks: int, after: Sequence[After]) -> Moment:
        """Launches a gather of parameters among so many ranks. Else as `reduce_scatter`."""
        return self._launch(VALUES, "all_gather", nbytes, 1, rounds_of(ranks), after)

    def ask(self, group: str, ranks: int) -> Moment:
        """Launches a gather of a few values: how they are agreed on, and norms."""
        return self._launch(group, "gather", 0, 1, rounds_of(ranks), ())

    def _launch(self, group: str, name: str, nbytes: int, calls: int, rounds: int, after: Sequence[After]) -> Moment:
        self.sent[f"{name}_calls"] += calls
        if nbytes:
            self.sent[f"{name}_bytes"] += nbytes
        line = self.line(group)

        def work() -> Process:
            for moment, reason in after:
                yield from line.wait(moment, reason)
            line.begins(NETWORK)
            delayed = Moment()
            self._clock.at(self._clock.now + calls * rounds * self._delay_s, delayed.happen)
            yield delayed
            if nbytes:
                yield self.channel.submit(group, nbytes, name)

        done = self._workers[group].submit(work())
        done.then(self.arrivals.notify)
        return done


def rounds_of(ranks: int) -> int:
    """How many delays a gather among ranks takes; see [Note: other ranks]."""
    return (ranks - 1).bit_length()


class TimedGroup:
    """Ranks that gather parameters, in virtual time, for `Gathers` (ranks/gathers.py). Nothing is copied.

    Args:
        network: the link.
        rank: this rank's number among them.
        size: how many they are.

    Attributes:
        rank: see above.
        size: see above.
        after: what collectives wait for that are launched now.
    """

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self._network = network
        self.rank = rank
        self.size = size
        self.after: Sequence[After] = ()

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        return Arrival(self._network.all_gather(out.nbytes - shard.nbytes, self.size, self.after))


class Arrival(Work):
    """A collective in virtual time. Whoever needs what it brings has waited for it before `wait`.

    Args:
        moment: when it arrives.
    """

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def done(self) -> bool:
        return self._moment.is_past

    def wait(self) -> None:
        assert self.done()

    def wait_on_device(self) -> None:
        return None  # what the device does next has been told of it
