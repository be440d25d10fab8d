"""The checkpoints of one run: `checkpoints/step-000000123`, newest last.

A checkpoint is written beside, synced, read back from the disk, and only then gets its name: what has a name was whole.
Older ones go after that, and never the last two that are whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep import faults
from lockstep.checkpoint import file_io, folder_names
from lockstep.checkpoint import format as layout
from lockstep.checkpoint.folder_names import Use
from lockstep.checkpoint.format import Flat
from lockstep.checkpoint.verify import looks_whole, verify
from lockstep.errors import CheckpointError

KEPT = 2
LOOKS = 10


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Found:
    step: int
    path: Path
    state: dict[Any, Any]
    skipped: tuple[Skipped, ...]  # newer ones


def choose_outdated(steps: Iterable[int], whole: Callable[[int], bool], *, written: int, kept: int) -> list[int]:
    """Which steps to remove, after `written` was. Whole or not, they are older than `kept` that are whole.

    Later steps than `written` stay: they are of a run that went back to an older checkpoint, and may be damaged.
    """
    earlier = sorted((step for step in steps if step < written), reverse=True)
    count = 1
    for n, step in enumerate(earlier):
        if count == kept:
            return sorted(earlier[n:])
        count += whole(step)
    return []


class Store:
    """Used by one worker for writing, and by all for reading."""

    def __init__(self, run_directory: Path, *, kept: int = KEPT) -> None:
        if not isinstance(kept, int) or kept < KEPT:
            raise ValueError(f"kept={kept!r} checkpoints: {KEPT} is the least, since the newest may get damaged")
        self.directory = run_directory / "checkpoints"
        self._kept = kept
        self._known_whole: set[int] = set()  # all of it was read, by this process
        self._was_there = False

    # ---- writing -----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], *, fence: Callable[[], bool] | None = None) -> Path | None:
        """Write, read back, and remove what is outdated. None: the fence said no, and nothing has changed."""
        path = self.write(step, layout.flatten(state), fence=fence)
        if path is not None:
            self.prune(step)
        return path

    def write(self, step: int, flat: Flat, *, fence: Callable[[], bool] | None = None) -> Path | None:
        """All of it or nothing. `fence` is asked right before it would be seen: False drops it."""
        if not isinstance(step, int) or not 0 <= step < 10**18:
            raise ValueError(f"step={step!r} must be a whole number, 0 or more")
        path = self.path_of(step)
        if self._holds(path, flat):
            return path if fence is None or fence() else None
        self._make_directory()
        partial, aside = (folder_names.new_passing(self.directory, step, use) for use in (Use.PARTIAL, Use.ASIDE))
        try:
            written = layout.write(partial, step, flat)
            if verify(partial, step=step, fresh=True).manifest != written:
                raise CheckpointError(f"{partial}: another manifest was read back than was written")
            if fence is not None and not fence():
                return None
            self._put_in_place(partial, path, aside)
            self._known_whole.add(step)
            return path
        finally:
            # Not `aside`: where something failed, it may be all there is. It is settled by the next `prune`.
            shutil.rmtree(partial, ignore_errors=True)
            folder_names.done_with(partial)
            folder_names.done_with(aside)

    def prune(self, written: int) -> None:
        """After `written` was. Removes what is outdated, and what killed writers left."""
        self._settle(now=self.path_of(written).stat().st_ctime)  # by the clock of the disk
        for step in choose_outdated(
            folder_names.steps_in(self.directory), self._is_whole, written=written, kept=self._kept
        ):
            faults.at("prune")
            removed = folder_names.new_passing(self.directory, step, Use.REMOVED)
            try:
                # Never half there under its own name.
                self.path_of(step).rename(removed)
                file_io.remove(removed)
            finally:
                folder_names.done_with(removed)

    def _settle(self, *, now: float) -> None:
        for passing in folder_names.passing_in(self.directory):
            if not folder_names.is_left_behind(passing, now=now):
                continue
            if passing.use is Use.ASIDE and not os.path.lexists(self.path_of(passing.step)):
                passing.path.rename(self.path_of(passing.step))
            else:
                file_io.remove(passing.path)

    def _holds(self, path: Path, flat: Flat) -> bool:
        """The very same state is there already."""
        try:
            if not path.is_dir() or verify(path).manifest.state_sha256 != layout.digest_of(flat):
                return False
        except CheckpointError:
            return False
        return True

    def _put_in_place(self, partial: Path, path: Path, aside: Path) -> None:
        faults.at("rename")
        if os.path.lexists(path):
            # For a moment the step has no name. Whoever is killed here leaves `aside`, and `newest` looks there too.
            path.rename(aside)
        try:
            partial.rename(path)
        except BaseException:
            if os.path.lexists(aside):
                aside.rename(path)
            raise
        file_io.sync_directory(self.directory)
        file_io.remove(aside)

    def _make_directory(self) -> None:
        """Once with all above it. If the run's directory is gone later, it was unmounted or removed: an error."""
        if not self._was_there:
            file_io.make_directory(self.directory)
            self._was_there = True
        self.directory.mkdir(exist_ok=True)

    def _is_whole(self, step: int) -> bool:
        path = self.path_of(step)
        if step in self._known_whole:
            return looks_whole(path)
        try:
            verify(path)
        except CheckpointError:
            return False
        self._known_whole.add(step)
        return True

    # ---- reading -----------------------------------------------------------------------------------------------------

    def newest(self) -> Found | None:
        """The newest that is whole; None if there is none at all. CheckpointError: there are some, all of them bad."""
        for _ in range(LOOKS):
            skipped: list[Skipped] = []
            for step, path in self._candidates():
                try:
                    state = layout.read(path, step=step)
                except CheckpointError as error:
                    if not os.path.lexists(path):
                        break  # another worker removed it while we read: there are newer ones
                    skipped.append(Skipped(path, str(error)))
                else:
                    self._known_whole.add(step)
                    return Found(step, path, state, tuple(skipped))
            else:
                return self._refuse(skipped) if skipped else None
        raise CheckpointError(f"{self.directory}: checkpoints are removed faster than they can be read; keep more")

    def _refuse(self, skipped: list[Skipped]) -> NoReturn:
        reasons = "; ".join(bad.reason for bad in skipped)
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {self.directory} can be used: {reasons}. Bring back a copy, or "
            "begin anew in another directory"
        )

    def latest(self) -> dict[Any, Any] | None:
        found = self.newest()
        return found.state if found is not None else None

    def path_of(self, step: int) -> Path:
        return self.directory / folder_names.directory_name(step)

    def last(self) -> Path | None:
        """The newest that has a name, or None if there is none or the disk does not answer."""
        try:
            steps = folder_names.steps_in(self.directory)
        except OSError:
            return None
        return self.path_of(steps[-1]) if steps else None

    def _candidates(self) -> list[tuple[int, Path]]:
        try:
            steps = folder_names.steps_in(self.directory)
            passing = folder_names.passing_in(self.directory)
        except OSError as error:
            raise file_io.unreadable(self.directory, error) from error
        found = [(step, self.path_of(step)) for step in steps]
        found += [(p.step, p.path) for p in passing if p.use is Use.ASIDE and p.step not in steps]
        return sorted(found, reverse=True)
