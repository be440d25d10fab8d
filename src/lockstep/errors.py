"""What can go wrong, one class each. Every message says who, what, with which values, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


class LockstepError(RuntimeError):
    """Everything this library raises on purpose, except wrong arguments (ValueError, TypeError)."""


class WorldError(LockstepError):
    """The environment does not say clearly who we are, or the world could not be joined."""


class ReplicaMismatchError(LockstepError):
    """The replicas are not copies of one model: other parameters, shapes, dtypes or values."""


class DesyncError(LockstepError):
    """The workers did not make the same calls in the same order."""


class SharedMemoryFullError(LockstepError):
    """No room for what the workers of a host have to share."""


class PeerLostError(LockstepError):
    """A worker went away while the others waited for it. `rank` and `pid` tell which, where that is known."""

    def __init__(self, message: str, *, rank: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.pid = rank, pid


class WorkerFailedError(LockstepError):
    """A worker of `lockstep.launch` failed: the first one. The text has its traceback.

    `status` as subprocess has it: below zero for a signal.
    """

    def __init__(self, message: str, *, rank: int, status: int) -> None:
        super().__init__(message)
        self.rank, self.status = rank, status


class NonFiniteError(LockstepError):
    """A loss or a gradient is infinite or not a number."""


class DivergenceError(LockstepError):
    """Replicas that must be equal are not, or the same computation gave two results."""


class UnevenDataError(LockstepError):
    """Some workers have run out of data, and others have not."""


class CheckpointError(LockstepError):
    """What was saved cannot be read, or belongs to another run."""


class DirectoryInUseError(LockstepError):
    """Another run that lives has the run directory."""


def refuse_unknown_options(
    who: str, given: Iterable[str], known: Sequence[str], renamed: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for the first name of `given` that is not in `known`, with the name that was probably meant.

    who      what was called, such as "run.batches"
    renamed  from a name that people bring along to the one in `known`, or to a sentence that says what to do instead
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{who} has no option {name!r}{suggest(name, known, renamed or {})}")


def suggest(name: str, known: Sequence[str], renamed: Mapping[str, str]) -> str:
    """The end of a sentence about an unknown option: what it is called here, what is similar, or all that there are."""
    instead = renamed.get(name)
    if instead is not None:
        return f": it is called {instead}= here" if instead in known else f": {instead}"
    similar = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if similar:
        return f"; did you mean {similar[0]}=?"
    return f"; it has {', '.join(known)}"
