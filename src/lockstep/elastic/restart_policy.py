"""When a lost worker is replaced, and when that is of no use any more. Pure."""

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
ROUNDS: Final = 4  # as many losses are a reason to give up although steps are made: never more than before


@dataclass(frozen=True)
class Failure:
    """A worker that was lost."""

    worker: int
    at_s: float
    newest: int  # the step that the run had come to by then
    here: int  # the step that it was at: an earlier one, if it had gone back to a checkpoint
    error: str = ""  # the last line of its traceback; "": it did not fail by itself, but was killed


def why_give_up(failures: Sequence[Failure], workers: int) -> str | None:
    """None: go on. A run that makes progress may lose any number of workers, unless one after the other fails alike."""
    alike = _alike(failures)
    if len(alike) >= FEWEST:
        return f"{len(alike)} workers failed with the same error within {WITHIN_S:.0f} s"
    stuck = _without_progress(failures)
    errors = [one.error for one in stuck if one.error]
    for error in errors:
        if errors.count(error) >= SAME_ERRORS:
            return f"{errors.count(error)} workers failed with the same error, and no step was made in between"
    most = max(FEWEST, PER_WORKER * workers)
    if len(stuck) >= most:
        return f"{len(stuck)} workers were lost, and no step was made in between"
    in_vain = [one for one in failures if one.newest == failures[-1].newest]
    if len(in_vain) >= ROUNDS * most:
        return f"{len(in_vain)} workers were lost, and the run came no further than step {failures[-1].newest}"
    return None


def start_at_s(failures: Sequence[Failure]) -> float:
    """When the next worker may be started: at once after the first failure, later and later as long as it is stuck, or
    fails alike."""
    stuck, alike = _without_progress(failures), _alike(failures)
    if max(len(stuck), len(alike)) < 2:
        return 0.0
    own = max(sum(1 for one in stuck if one.error), len(alike))  # being killed is no reason to wait
    return failures[-1].at_s + (min(FIRST_PAUSE_S * 2 ** (own - 1), LONGEST_PAUSE_S) if own else 0.0)


def _alike(failures: Sequence[Failure]) -> list[Failure]:
    """Those with the error of the last one, and not long before it."""
    last = failures[-1] if failures else None
    if last is None or not last.error:
        return []
    return [one for one in failures if one.error == last.error and one.at_s >= last.at_s - WITHIN_S]


def _without_progress(failures: Sequence[Failure]) -> list[Failure]:
    """Those at the step of the last one. A run that always fails there comes back to it from its checkpoint."""
    return [one for one in failures if (one.newest, one.here) == (failures[-1].newest, failures[-1].here)]
