"""Health: whether a run can go on, and why not. Nobody else keeps a failure.

[Note: failures]
There are two ways to fail. A call that is cut off raises its error to the user, and says it with `Health.fail`. What
fails behind the calls, such as a transfer that ends in a thread of the I/O engine, has nobody to raise it to. The part
of the run where that happens says it with `PartHealth.fail`. From then on that part alone refuses work, until a call of
the run looks (`check`): it raises the error, and so does every later one.

| state  | what holds                                     | check()          | rollback()  | close()         |
|--------|------------------------------------------------|------------------|-------------|-----------------|
| SOUND  | parameters and states are of one step          | returns          | begins      | commits if due  |
| HURT   | a part has failed, which no call has raised    | raises the first | begins      | commits if due  |
| FAILED | a call has raised an error; steps may be mixed | raises it        | begins      | commits nothing |
| FINAL  | the same, and no rollback helps                | raises it        | raises it   | commits nothing |
| CLOSED | memory and files are gone                      | ClosedError      | ClosedError | does nothing    |

In a child of a fork `check` raises ClosedError in each state. What is none of this library's errors is raised once, by
the call that it came in; `check` raises InterruptedStepError from it.

|   | from and to            | by                            | before               | after                    |
|---|------------------------|-------------------------------|----------------------|--------------------------|
| 1 | SOUND -> HURT          | PartHealth.fail               |                      | that part refuses work   |
| 2 | HURT -> SOUND          | PartHealth.reset, of the last | a rollback is made   | the part is as committed |
| 3 | HURT -> FAILED         | check                         |                      | it raises that error     |
| 4 | SOUND, HURT -> FAILED  | fail                          | the caller raises it |                          |
| 5 | up to FAILED -> FAILED | fail(replaces=True)           | a rollback failed    | earlier errors are gone  |
| 6 | FAILED -> SOUND        | reset                         | a rollback succeeded | all is of the commit     |
| 7 | up to FAILED -> FINAL  | fail(is_final=True)           | the caller raises it |                          |
| 8 | any -> CLOSED          | close                         |                      | earlier errors are gone  |

A failure in a state where there is one, or of a part that has failed, changes nothing but in 5: the first is the cause.
Where several ranks share the run, 3, 4 and 5 lead to FINAL: the others have gone on, and a rollback takes all of them.

| what fails                                | is said by                 | in a thread of   | stops beside calls    |
|-------------------------------------------|----------------------------|------------------|-----------------------|
| a step, an update, a rollback: 4, 5       | optimizer, adam, pending   | the caller       |                       |
| a transfer of a chunk; what comes while a | chunk_cache, its lock held | the engine, the  | leases of that store  |
| store changes its tables: 1               |                            | step, the caller |                       |
| a collective: 1                           | torch_distributed          | the caller       | collectives, rollback |
| sync or rename in a commit; over ranks an | committer                  | the caller       | rollback              |
| interrupt, and what is final elsewhere: 7 |                            |                  |                       |

`rollback()` mends the first two, but for frozen parameters: it resets the other stores. Nothing in this process mends
the last two.

Two things are no failures, and kept where they are. A commit that was cut off may have been decided: `Commits` keeps
the attempt, and finds out before anything else is done. What Adam's worker meets is in the futures of its queue, until
the next use of a parameter raises it.

No lock is needed. Each change is one operation of a dict, which no thread and no interrupt can cut in two. So no
handler of a signal, and no child of a fork, meets a lock that is held.
"""

from __future__ import annotations

import os
from enum import IntEnum

from offload.errors import CLOSED, ClosedError, InterruptedStepError, OffloadError


class State(IntEnum):
    """See [Note: failures]. What a state forbids, those after it forbid, too."""

    SOUND = 0
    HURT = 1
    FAILED = 2
    FINAL = 3
    CLOSED = 4


class Health:
    """The health of one run; see [Note: failures].

    Attributes:
        is_shared: whether several ranks share the run.
        can_go_back: whether anything is committed, so that an InterruptedStepError names `rollback()`.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self.can_go_back = False
        self._pid = os.getpid()
        self._failures: dict[State, BaseException] = {}  # the first of each state
        self._parts: list[PartHealth] = []
        self._hurt: dict[PartHealth, BaseException] = {}  # the first of each part

    def part(self, what: str = "failed") -> PartHealth:
        """The health of a part of the run.

        Args:
            what: what an error that is none of this library's did there, for its message.
        """
        part = PartHealth(self, self._hurt, what)
        self._parts.append(part)
        return part

    @property
    def state(self) -> State:
        return self._worst()[0]

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the run, and no child that was forked from it."""
        return os.getpid() == self._pid

    @property
    def is_stopped(self) -> bool:
        """Whether every call raises what an earlier one has raised."""
        return self.state > State.HURT

    @property
    def is_final(self) -> bool:
        """Whether no rollback helps."""
        return self.state >= State.FINAL

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def fail(self, error: BaseException, *, is_final: bool = False, replaces: bool = False) -> None:
        """Makes every call raise this error from now on. The caller raises it.

        Args:
            error: what cut it off.
            is_final: whether no rollback helps.
            replaces: whether it counts instead of an earlier one.
        """
        state = State.FINAL if is_final or self.is_shared else State.FAILED
        if replaces:
            self._failures[state] = error
        else:
            self._failures.setdefault(state, error)

    def reset(self) -> None:
        """Forgets failures that a rollback has mended."""
        self._failures.pop(State.FAILED, None)

    def close(self) -> None:
        """Makes every call raise ClosedError. Earlier failures are forgotten: they keep frames alive."""
        self._failures = {State.CLOSED: ClosedError(CLOSED)}

    def check(self) -> None:
        """Requires that the run can go on.

        Raises:
            OffloadError: if the run cannot go on.
        """
        self._require_here()
        if self._failures or self._hurt:
            if self.state is State.HURT:
                self._adopt_failure()
            self._raise_from(State.FAILED)

    def require_mendable(self) -> None:
        """Requires that it can go on, or that a rollback helps.

        Raises:
            OffloadError: if no rollback helps.
        """
        self._require_here()
        self._raise_from(State.FINAL)

    def require_open(self) -> None:
        """Requires that it is not closed.

        Raises:
            ClosedError: after `close`.
        """
        self._raise_from(State.CLOSED)

    def interrupted(self, what: str) -> InterruptedStepError:
        """An error that says what to do.

        Args:
            what: what happened.
        """
        return InterruptedStepError.saying_how(what, can_go_back=self.can_go_back)

    def _worst(self) -> tuple[State, BaseException | None]:
        failures = self._failures  # `close` puts another there
        for state in (State.CLOSED, State.FINAL, State.FAILED):
            if (error := failures.get(state)) is not None:
                return state, error
        return State.HURT if self._hurt else State.SOUND, None

    def _require_here(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this is a forked child: the optimizer works only in the process that made it")

    def _adopt_failure(self) -> None:
        """Makes the failure of a part the run's."""
        for part in self._parts:
            try:
                part.check()
            except OffloadError as error:
                self.fail(error)
                return

    def _raise_from(self, least: State) -> None:
        """Raises what failed, if that is the state at least."""
        state, error = self._worst()
        if error is None or state < least:
            return
        if isinstance(error, OffloadError):
            raise error
        what = f"{error!r} interrupted a step, and left some parameters a step further than others"
        if self.is_shared:
            raise InterruptedStepError(f"{what}: start again on all ranks") from error
        raise self.interrupted(what) from error


class PartHealth:
    """The health of a part of a run: a store, or the ranks. It does not know what else has failed.

    Args:
        health: of the run.
        failures: the first of each part of the run.
        what: see `Health.part`.
    """

    def __init__(self, health: Health, failures: dict[PartHealth, BaseException], what: str) -> None:
        self._health = health
        self._failures = failures
        self._what = what

    @property
    def is_sound(self) -> bool:
        return self not in self._failures

    def fail(self, error: BaseException) -> BaseException:
        """Makes the part, and with it the run, refuse work from now on.

        Args:
            error: what failed.

        Returns:
            The first failure, which counts.
        """
        return self._failures.setdefault(self, error)

    def check(self) -> None:
        """Requires that this part can go on.

        Raises:
            OffloadError: if this part cannot go on.
        """
        error = self._failures.get(self)
        if isinstance(error, OffloadError):
            raise error
        if error is not None:
            raise self.interrupted(f"{error!r} {self._what}") from error

    def reset(self) -> None:
        """Lets the part begin anew."""
        self._failures.pop(self, None)

    def interrupted(self, what: str) -> InterruptedStepError:
        """See `Health.interrupted`."""
        return self._health.interrupted(what)
