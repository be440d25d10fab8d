"""What a run directory holds for a later start, beside its checkpoints: that the program ended the training itself
(stopped.json), which job has started over there (fresh.json), and into how many shards a batch is cut (shards.json).

A start that resumes at exactly the step in stopped.json does not train. To train on, delete the file, or start over.

Note [Exceptions that the program catches]
An exception that leaves the `with` block may be the program's way to end the training, or a failure after which the
next start is to resume. It was a failure if the exception ends the process. So stopped.json is written when the process
exits in another way, or when the program begins another Run.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lockstep import run_files

STOPPED: Final = "stopped.json"
FRESH: Final = "fresh.json"
SHARDS: Final = "shards.json"


def is_restart(env: Mapping[str, str]) -> bool:
    """Whether torchrun has restarted workers that failed: then a run does not start over."""
    return env.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def start_over(directory: Path, job: str, *, lock: str) -> Path | None:
    """Move what an earlier run has left into `previous-N`, and return that folder; None if there was nothing to move.

    Done once in a job: what a replaced or requeued worker finds in the directory belongs to its own run.
    job   identifies the job; "" if that is not known
    lock  name of the lock file, which is not moved
    """
    if job and _read(directory / FRESH, "job") == job:
        return None
    moved = run_files.move_aside(directory, stay=(lock,))
    _write(directory / FRESH, {"job": job})
    return moved


def write_stop(directory: Path, step: int) -> None:
    """Note that the program ended the training before this step."""
    _write(directory / STOPPED, {"step": step})


def read_stop(directory: Path | None) -> int | None:
    """Return the step before which the program ended the training; None if it did not, or the file cannot be read."""
    step = _read(directory / STOPPED, "step") if directory is not None else None
    return step if isinstance(step, int) else None


def write_shards(directory: Path, shards: int) -> None:
    """Note the number of shards, for later starts of a program that does not set it."""
    if read_shards(directory) != shards:
        _write(directory / SHARDS, {"shards": shards})


def read_shards(directory: Path | None) -> int | None:
    """Return the number of shards of the run in this directory; None if there is none, or the file cannot be read."""
    shards = _read(directory / SHARDS, "shards") if directory is not None else None
    return shards if type(shards) is int and shards > 0 else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file atomically. Errors are ignored: a full disk must not end the training."""
    with suppress(OSError):
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(content))
        partial.replace(path)


def _read(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text())[name]
    except (OSError, ValueError, TypeError, KeyError):
        return None


class PendingStops:
    """Stops that are written once it is known whether the program caught the exception: see the Note."""

    def __init__(self) -> None:
        self._waiting: dict[Path, tuple[int, int]] = {}  # directory -> step, id of the exception
        self._is_registered = False

    def add(self, directory: Path, step: int, error: BaseException) -> None:
        if not self._is_registered:
            atexit.register(self.write)
            self._is_registered = True
        self._waiting[directory] = (step, id(error))  # not the exception itself, which would keep tensors alive

    def write(self) -> None:
        """Write stopped.json for exceptions that did not end the process."""
        fatal = _chain(getattr(sys, "last_value", None))
        for directory, (step, error) in self._waiting.items():
            if error not in fatal and directory.is_dir():
                write_stop(directory, step)
        self._waiting.clear()


def _chain(error: BaseException | None) -> set[int]:
    """Ids of an exception and of those that it was raised from."""
    found: set[int] = set()
    while error is not None and id(error) not in found:
        found.add(id(error))
        error = error.__cause__ or error.__context__
    return found


pending_stops: Final = PendingStops()
