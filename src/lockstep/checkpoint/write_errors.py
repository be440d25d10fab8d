"""What to say when a checkpoint could not be written. One line each."""

from __future__ import annotations

from pathlib import Path

from lockstep import run_files
from lockstep.errors import CheckpointError


def describe(step: int, path: Path, error: BaseException, last: Path | None) -> str:
    """Which step, where, what went wrong, what there still is, what to do."""
    what, advice = f"{type(error).__name__}: {error}", "please report it"
    if isinstance(error, OSError):
        what, advice = run_files.describe(error)
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
