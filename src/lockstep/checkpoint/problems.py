"""What to say when a checkpoint could not be written. One line each."""

from __future__ import annotations

import errno
from pathlib import Path

from lockstep.errors import CheckpointError

_GONE = "the directory of the run is gone: make it again, or mount its disk"
_TAKEN = "something else is in the place of a directory: move it away"
_ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or have the quota raised",
    errno.EROFS: "the disk is mounted read-only: mount it for writing, and look for disk errors in the system's log",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _TAKEN,
    errno.EEXIST: _TAKEN,
    errno.EIO: "the disk fails: look at the system's log, and copy away what you need",
    errno.ESTALE: "the network disk lost it: mount it again",
}


def describe(step: int, path: Path, error: BaseException, last: Path | None) -> str:
    """Which step, where, what went wrong, what there still is, what to do."""
    what, advice = f"{type(error).__name__}: {error}", "please report it"
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        place = f" at {error.filename}" if error.filename is not None else ""
        what, advice = f"{error.strerror} ({name}){place}", _ADVICE.get(error.errno, "look at that disk")
    elif isinstance(error, CheckpointError):
        what, advice = f"read back, it was not what was written: {error}", "the disk or the memory here may be failing"
    elif isinstance(error, MemoryError):
        what, advice = f"no memory for a copy of the state: {error}", "leave it room for two copies"
    kept = f"the last one is {last}, and it stays" if last is not None else "there is none before it"
    return (
        f"the checkpoint of step {step} was not written to {path}: {what}; {kept}; training goes on, and the next save "
        f"tries again; {advice}"
    )


def describe_left(step: int, path: Path, error: BaseException) -> str:
    return f"the checkpoint of step {step} is in {path}, but older ones could not be removed: {error}; remove them"


def describe_replaced(step: int, newer: int, *, writing: int, for_s: float) -> str:
    return (
        f"the checkpoint of step {step} was still waiting when that of step {newer} came, which takes its place: step "
        f"{writing} is being written for {for_s:.1f} s; save less often, or to a faster disk"
    )
