"""The exceptions. Every message says which worker, what happened, with which values, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


class LockstepError(RuntimeError):
    """Base class of all errors that this library raises, except wrong arguments (ValueError, TypeError)."""


class WorldError(LockstepError):
    """The environment does not define rank and world size clearly, or the other workers could not be joined."""


class ReplicaMismatchError(LockstepError):
    """The replicas are not copies of one model: they differ in parameters, shapes, dtypes or values."""


class DesyncError(LockstepError):
    """The workers did not make the same calls in the same order."""


class SharedMemoryFullError(LockstepError):
    """There is not enough shared memory for the workers of a host."""


class PeerLostError(LockstepError):
    """A worker was lost while others waited for it. `rank` and `pid` name it where they are known, else None."""

    def __init__(self, message: str, *, rank: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.pid = rank, pid


class LostStateError(LockstepError):
    """All workers that kept a part of the optimiser's state are lost; the last checkpoint has an earlier one.

    `parameter` is the number of the parameter to which it belongs, in the order of the optimiser's groups.
    """

    def __init__(self, message: str, *, parameter: int = 0) -> None:
        super().__init__(message)
        self.parameter = parameter


class WorkerFailedError(LockstepError):
    """The first worker of `lockstep.launch` that failed. The message has its traceback.

    `status` is its exit status as in `subprocess`: negative for a signal.
    """

    def __init__(self, message: str, *, rank: int, status: int) -> None:
        super().__init__(message)
        self.rank, self.status = rank, status


class NonFiniteError(LockstepError):
    """A loss or a gradient is infinite or not a number."""


class DivergenceError(LockstepError):
    """Replicas that must be equal are not, or the same computation gave two results.

    `wrong_ranks` names the workers that are wrong; empty if it is not known which; None if a faulty machine is not the
    likely cause, but the program, so that it would happen again.
    """

    def __init__(self, message: str, wrong_ranks: Sequence[int] | None = None) -> None:
        super().__init__(message)
        self.wrong_ranks = None if wrong_ranks is None else tuple(wrong_ranks)


class UnevenDataError(LockstepError):
    """Some workers have run out of data while others have not."""


class CheckpointError(LockstepError):
    """A checkpoint cannot be read, or belongs to another run."""


class DirectoryInUseError(LockstepError):
    """The run directory is in use by another run."""


def refuse_unknown_options(who: str, given: Iterable[str], known: Sequence[str], renamed: Mapping[str, str]) -> None:
    """Raise TypeError for the first name of `given` that is not in `known`, with the name that was probably meant.

    who      the function that was called, such as "run.batches"
    renamed  maps names used by other libraries to the one in `known`, or to a sentence that says what to do instead
    """
    for name in given:
        if name in known:
            continue
        instead = renamed.get(name)
        if instead is not None:
            advice = f": it is called {instead}= here" if instead in known else f": {instead}"
        elif similar := difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6):
            advice = f"; did you mean {similar[0]}=?"
        else:
            advice = f"; it has {', '.join(known)}"
        raise TypeError(f"{who} has no option {name!r}{advice}")
