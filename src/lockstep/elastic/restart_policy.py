"""When a lost worker is replaced, and when the run is given up instead. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 15.0
SAME_ERRORS: Final = 2
FEWEST: Final = 6
PER_WORKER: Final = 4
WITHIN_S: Final = 120.0
ROUNDS: Final = 4  # give up after this many times the usual losses if steps are made, but the run gets no further


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that was lost."""

    worker: int
    at_s: float
    newest: int  # the furthest step that the run had reached by then
    current: int  # the step that it was at: an earlier one if it had returned to a checkpoint
    error: str = ""  # the last line of its traceback; "" if it was killed


def why_give_up(failures: Sequence[WorkerFailure], workers: int) -> str | None:
    """Why the run is given up; None if it continues.

    A run that makes progress may lose any number of workers, unless one after the other fails with the same error.
    """
    same_error = _with_same_error(failures)
    if len(same_error) >= FEWEST:
        return f"{len(same_error)} workers failed with the same error within {WITHIN_S:.0f} s"
    stuck = _without_progress(failures)
    errors = [one.error for one in stuck if one.error]
    for error in errors:
        if errors.count(error) >= SAME_ERRORS:
            return f"{errors.count(error)} workers failed with the same error, and no step was made in between"
    most = max(FEWEST, PER_WORKER * workers)
    if len(stuck) >= most:
        return f"{len(stuck)} workers were lost, and no step was made in between"
    no_new_step = [one for one in failures if one.newest == failures[-1].newest]
    if len(no_new_step) >= ROUNDS * most:
        return f"{len(no_new_step)} workers were lost, and the run came no further than step {failures[-1].newest}"
    return None


def start_at_s(failures: Sequence[WorkerFailure]) -> float:
    """When the next worker may be started.

    At once after the first failure; with growing pauses while no step is made, or workers fail with the same error.
    """
    stuck, same_error = _without_progress(failures), _with_same_error(failures)
    if max(len(stuck), len(same_error)) < 2:
        return 0.0
    own_errors = max(sum(1 for one in stuck if one.error), len(same_error))  # being killed is no reason to wait
    return failures[-1].at_s + (min(FIRST_PAUSE_S * 2 ** (own_errors - 1), LONGEST_PAUSE_S) if own_errors else 0.0)


def _with_same_error(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """The failures with the error of the last one, within WITHIN_S before it."""
    last = failures[-1] if failures else None
    if last is None or not last.error:
        return []
    return [one for one in failures if one.error == last.error and one.at_s >= last.at_s - WITHIN_S]


def _without_progress(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """The failures at the step of the last one. A run that always fails there returns to it from its checkpoint."""
    return [one for one in failures if (one.newest, one.current) == (failures[-1].newest, failures[-1].current)]
