"""Every exception this library raises on purpose.

OffloadError
├── ConfigError            an option, a model, a call or a combination that cannot work (also a ValueError)
├── BudgetError            it cannot fit: says needed, available, and the option that would fix it
├── PathError              a directory or a file that cannot be used (also an OSError)
│   └── PathInUseError     ... because a live run has it
├── ResumeError            the run at the path cannot be resumed, or must not be overwritten
├── CorruptionError        bytes read are not the bytes written: names chunk, file and offset
├── TierIOError            a read or write failed: errno, file, offset, length (also an OSError)
├── GradientMovedError     the values of a gradient are gone: a step used them, or ranks share them
├── AccumulationError      more backward passes than accumulation=N declares
├── NonFiniteGradientError NaN or Inf in a gradient: names the parameter (also an ArithmeticError)
├── StaleParameterError    a gradient of values before the last step, or a write that the step would undo
├── StaleActivationError   what a backward needs was changed in place, or its unit was, since the forward
├── ReleasedParameterError a streamed parameter was used where it cannot be fetched: says how to use it
├── InterruptedStepError   an exception that is none of these came inside a step: some parameters are a step further
├── DeviceError            the device failed: its error, and how to go on (also a RuntimeError)
├── RankError              another rank is slow, stuck or dead: names the collective and the time waited
├── OtherRankError         what ranks do together failed on another one; has its number and its error
├── TorchVersionError      the installed torch lacks what this library needs of it (also an ImportError)
├── StateError             an internal mistake: a bug of this library, never yours
└── ClosedError            used after close(), or in a forked child

A message says what is wrong, what to do about it, and which parameter, option or file is the culprit.
"""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path


def _again(kind: type[OffloadError], args: tuple[object, ...], state: dict[str, object]) -> OffloadError:
    error = kind.__new__(kind, *args)
    (OSError if isinstance(error, OSError) else Exception).__init__(error, *args)
    error.__dict__.update(state)
    return error


FILE_TOO_LARGE = ": raise the limit of file sizes (ulimit -f), or choose a file system that takes larger files"
"""What to do about EFBIG."""


DISK_FULL = ": free some space there, and go on"
"""What to do about ENOSPC and EDQUOT in training. The last commit stays."""


FEW_FILES = ": raise the limit of open files (ulimit -n)"
"""What to do about EMFILE."""


_WAYS_OUT = {
    errno.EFBIG: FILE_TOO_LARGE,
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: DISK_FULL,
    errno.EMFILE: f"{FEW_FILES}, or close some, and go on",
}


def explained(error: OSError) -> str:
    """What an error of the system says, and what to do about it if its words do not tell."""
    return f"{error.strerror}{FILE_TOO_LARGE if error.errno == errno.EFBIG else ''}"


def missing_parent(path: Path) -> str:
    """Says which of the directories above `path` is the first that is missing, and how to make all of them."""
    missing = next((above for above in reversed(path.parents) if not above.exists()), path.parent)
    if missing.name.startswith("~"):
        return f"{missing} does not exist: ~ stands for a home directory in a shell only, give os.path.expanduser(...)"
    command = f"mkdir -p {shlex.quote(str(path.parent))}"
    return f"{missing} does not exist: make it first ({command}), or give another path"


class OffloadError(Exception):
    """Base of every error this library raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between processes. Exception's own way would call __init__ with the message alone.
        return _again, (type(self), super().__reduce__()[1], self.__dict__)


class ConfigError(OffloadError, ValueError):
    """An option, a model, a call or a combination of them that cannot work.

    A constructor that raises it has left the model as it was. Of any other call the message says what to do next.
    """


class BudgetError(OffloadError):
    """What was asked for does not fit, or the system refuses it.

    Attributes:
        needed: how many bytes; where the system refuses threads, how many threads.
        available: how many of these there are.
        option: the argument that would fix it.
    """

    def __init__(self, message: str, *, needed: int, available: int, option: str) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.option = option


class PathError(OffloadError, OSError):
    """A directory or a file that cannot be used: missing, moved, not writable, or something else than it has to be."""


class PathInUseError(PathError):
    """Another live run has this directory: it holds its lock, or has taken it where locks do not reach."""


class ResumeError(OffloadError):
    """What lies at the path cannot be resumed from, or must not be overwritten."""


class CorruptionError(OffloadError):
    """Bytes read are not the bytes written.

    Attributes:
        chunk: its index; None: the damage is in no chunk's slot.
        file: the file's path.
        offset: where in the file, in bytes.
    """

    def __init__(self, message: str, *, chunk: int | None = None, file: str, offset: int = 0) -> None:
        where = f"{file}, offset {offset}" if chunk is None else f"chunk {chunk}, {file}, offset {offset}"
        super().__init__(f"{message} ({where})")
        self.chunk = chunk
        self.file = file
        self.offset = offset


class TierIOError(OffloadError, OSError):
    """A read or write on the NVMe tier, or of what is committed or exported, failed.

    Attributes:
        errno: the system's number for the error.
        filename: the file's path.
        offset: where in the file, in bytes.
        length: how many bytes were to be moved.
        operation: "read", "write", "sync", "rename" or "remove".
    """

    def __init__(self, operation: str, code: int, file: str, offset: int, length: int, detail: str = "") -> None:
        text = detail or os.strerror(code)
        text += _WAYS_OUT.get(code, "")
        where = f" of {length} bytes at offset {offset}" if length else ""
        OSError.__init__(self, code, f"{operation}{where} failed: {text}", file)
        self.operation = operation
        self.offset = offset
        self.length = length


class GradientMovedError(OffloadError, RuntimeError):
    """The values of `p.grad` cannot be read: a step has used them, or no rank has all of them."""


class AccumulationError(OffloadError, RuntimeError):
    """More backward passes reached a parameter before `step()` than `accumulation` declares.

    It is also raised if some ranks drop gradients that others use.
    """


class NonFiniteGradientError(OffloadError, ArithmeticError):
    """NaN or Inf in a gradient; the optimizer's state is untouched.

    Attributes:
        parameter: its name in the model.
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class StaleParameterError(OffloadError, RuntimeError):
    """A gradient was computed from a parameter's value before the last step.

    It is also raised if a parameter was written to, through a view from before a step, while its new value was pending.
    """


class StaleActivationError(OffloadError, RuntimeError):
    """A tensor that autograd saved was changed in place, as torch's own error says it.

    It is also raised if a unit was changed between its forward and its backward, which had to recompute it.
    """


class ReleasedParameterError(OffloadError, RuntimeError):
    """A streamed parameter was used where it cannot be fetched.

    That is after close(), on one rank alone at stage 3, or if it was pointed to other memory.
    """


class InterruptedStepError(OffloadError, RuntimeError):
    """An exception that is none of this library's came inside a step, or while chunks moved.

    `__cause__` is that exception. Some parameters may be a step further than others, so none of them can be used.
    """

    @classmethod
    def saying_how(cls, what: str, *, can_go_back: bool) -> InterruptedStepError:
        """The error with its way out.

        Args:
            what: what happened.
            can_go_back: whether anything was committed.
        """
        how = "call rollback()" if can_go_back else "nothing was committed, so make a new OffloadZero, of a new model"
        return cls(f"{what}: {how}")


class DeviceError(OffloadError, RuntimeError):
    """A call of the device's driver failed. `__cause__` is torch's error."""

    @classmethod
    def of(cls, error: RuntimeError) -> DeviceError:
        """The error that explains torch's `error`."""
        return cls(
            f"the device failed: {str(error).strip().splitlines()[0]}. It may be of anything that was queued before; "
            "CUDA_LAUNCH_BLOCKING=1 shows of what. Start the program again; a run with a path goes on from its last "
            "commit with resume=True"
        )


class RankError(OffloadError, RuntimeError):
    """A collective did not complete: another rank is slow, stuck or dead. No further collective is possible.

    Attributes:
        collective: its name.
        waited_s: seconds since this rank launched it.
    """

    def __init__(self, message: str, *, collective: str, waited_s: float) -> None:
        super().__init__(message)
        self.collective = collective
        self.waited_s = waited_s


class OtherRankError(OffloadError, RuntimeError):
    """What all ranks do together failed on another rank, and so on all.

    That is a construction, a commit, a rollback or an export. The message is that rank's number and its error. The last
    commit stays what it was.

    Attributes:
        is_final: whether that rank cannot go on; then none can.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class TorchVersionError(OffloadError, ImportError):
    """The installed version of torch lacks private functions that this library needs; raised by `import offload`."""


class StateError(OffloadError, RuntimeError):
    """An internal mistake, such as a move of a chunk that its residency does not allow."""


CLOSED = "the optimizer was closed, by close() or at the end of its `with` block: make a new one"


class ClosedError(OffloadError, RuntimeError):
    """The optimizer was closed, or this process is a forked child of the one that owns it."""
