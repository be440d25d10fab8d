"""The checkpoints of one run: `checkpoints/step-000000123`, newest last.

A checkpoint is written under a temporary name, synced, read back from the disk, and only then renamed: what has its
final name was valid. After that older checkpoints are removed, but never the last two valid ones.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep import faults
from lockstep.checkpoint import file_io, folder_names, format as layout
from lockstep.checkpoint.folder_names import Use
from lockstep.checkpoint.format import FlatState
from lockstep.checkpoint.verify import looks_valid, verify
from lockstep.errors import CheckpointError

KEPT = 2  # least number of valid checkpoints that are kept
READ_TRIES = 10


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class LoadedCheckpoint:
    step: int
    path: Path
    state: dict[Any, Any]
    skipped: tuple[Skipped, ...]  # newer checkpoints that are damaged


def choose_outdated(steps: Iterable[int], is_valid: Callable[[int], bool], *, written: int, kept: int) -> list[int]:
    """Return the steps to remove after `written` was saved: those older than the newest `kept` valid ones.

    Steps after `written` stay: they belong to a run that returned to an older checkpoint, and may be damaged.
    """
    earlier = sorted((step for step in steps if step < written), reverse=True)
    count = 1
    for n, step in enumerate(earlier):
        if count == kept:
            return sorted(earlier[n:])
        count += is_valid(step)
    return []


class CheckpointStore:
    """The checkpoint directory of a run. One worker writes, all workers read."""

    def __init__(self, run_directory: Path, *, kept: int = KEPT) -> None:
        if not isinstance(kept, int) or kept < KEPT:
            raise ValueError(f"kept={kept!r} checkpoints: {KEPT} is the least, since the newest may get damaged")
        self.directory = run_directory / "checkpoints"
        self._kept = kept
        self._known_valid: set[int] = set()  # steps whose checkpoint this process has read completely
        self._was_created = False

    # ---- writing -----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], *, fence: Callable[[], bool] | None = None) -> Path | None:
        """Write, read back, and remove outdated checkpoints. None: the fence returned False, and nothing changed."""
        path = self.write(step, layout.flatten(state), fence=fence)
        if path is not None:
            self.prune(step)
        return path

    def write(self, step: int, flat: FlatState, *, fence: Callable[[], bool] | None = None) -> Path | None:
        """Write a checkpoint and read it back; return its path. A failure leaves no incomplete checkpoint.

        fence  called right before the checkpoint becomes visible; if it returns False, the checkpoint is dropped and
               the result is None
        """
        if not isinstance(step, int) or not 0 <= step < 10**18:
            raise ValueError(f"step={step!r} must be a whole number, 0 or more")
        path = self.path_of(step)
        if self._is_saved(path, flat):
            return path if fence is None or fence() else None
        self._make_directory()
        partial, aside = (
            folder_names.new_temporary_folder(self.directory, step, use) for use in (Use.PARTIAL, Use.ASIDE)
        )
        try:
            written = layout.write(partial, step, flat)
            if verify(partial, step=step, fresh=True).manifest != written:
                raise CheckpointError(f"{partial}: another manifest was read back than was written")
            if fence is not None and not fence():
                return None
            self._put_in_place(partial, path, aside)
            self._known_valid.add(step)
            return path
        finally:
            # `aside` is not removed: after an error it may be the only copy. The next `prune` restores or removes it.
            shutil.rmtree(partial, ignore_errors=True)
            folder_names.release_name(partial)
            folder_names.release_name(aside)

    def prune(self, written: int) -> None:
        """Remove outdated checkpoints, after `written` was saved, and temporary folders of killed writers."""
        self._clean_up(now=self.path_of(written).stat().st_ctime)  # by the clock of the file system
        for step in choose_outdated(
            folder_names.steps_in(self.directory), self._is_valid, written=written, kept=self._kept
        ):
            faults.at("prune")
            removed = folder_names.new_temporary_folder(self.directory, step, Use.REMOVED)
            try:
                # Renamed first, so that no incomplete checkpoint has a final name.
                self.path_of(step).rename(removed)
                file_io.remove(removed)
            finally:
                folder_names.release_name(removed)

    def _clean_up(self, *, now: float) -> None:
        """Remove abandoned temporary folders; one set aside whose step has no checkpoint gets its name back."""
        for folder in folder_names.temporary_folders(self.directory):
            if not folder_names.is_abandoned(folder, now=now):
                continue
            if folder.use is Use.ASIDE and not os.path.lexists(self.path_of(folder.step)):
                folder.path.rename(self.path_of(folder.step))
            else:
                file_io.remove(folder.path)

    def _is_saved(self, path: Path, flat: FlatState) -> bool:
        """Whether exactly this state is saved there already."""
        try:
            if not path.is_dir() or verify(path).manifest.state_sha256 != layout.digest_of(flat):
                return False
        except CheckpointError:
            return False
        return True

    def _put_in_place(self, partial: Path, path: Path, aside: Path) -> None:
        faults.at("rename")
        if os.path.lexists(path):
            # Until the second rename the step has no checkpoint. If this process is killed now, `newest` finds `aside`.
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
        """Create the directory; the first time with its parents.

        If the run's directory is missing later, it was unmounted or removed, and FileNotFoundError is raised.
        """
        if not self._was_created:
            file_io.make_directory(self.directory)
            self._was_created = True
        self.directory.mkdir(exist_ok=True)

    def _is_valid(self, step: int) -> bool:
        path = self.path_of(step)
        if step in self._known_valid:
            return looks_valid(path)
        try:
            verify(path)
        except CheckpointError:
            return False
        self._known_valid.add(step)
        return True

    # ---- reading -----------------------------------------------------------------------------------------------------

    def newest(self) -> LoadedCheckpoint | None:
        """Read the newest valid checkpoint. None: there are no checkpoints. CheckpointError: none of them is valid."""
        for _ in range(READ_TRIES):
            skipped: list[Skipped] = []
            for step, path in self._candidates():
                try:
                    state = layout.read(path, step=step)
                except CheckpointError as error:
                    if not os.path.lexists(path):
                        break  # another worker removed it during the read: there are newer ones
                    skipped.append(Skipped(path, str(error)))
                else:
                    self._known_valid.add(step)
                    return LoadedCheckpoint(step, path, state, tuple(skipped))
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
        """Return the path of the newest checkpoint; None if there is none or the directory cannot be read."""
        try:
            steps = folder_names.steps_in(self.directory)
        except OSError:
            return None
        return self.path_of(steps[-1]) if steps else None

    def _candidates(self) -> list[tuple[int, Path]]:
        try:
            steps = folder_names.steps_in(self.directory)
            folders = folder_names.temporary_folders(self.directory)
        except OSError as error:
            raise file_io.unreadable(self.directory, error) from error
        found = [(step, self.path_of(step)) for step in steps]
        found += [(one.step, one.path) for one in folders if one.use is Use.ASIDE and one.step not in steps]
        return sorted(found, reverse=True)
