"""The checkpoints of one run: `checkpoints/step-000000123`, newest last.

A checkpoint is written under a temporary name, synced, read back from the disk, and only then renamed: what has its
final name was valid. After that older checkpoints are removed, but never the last two valid ones.

Note [Temporary folders]
    .step-000000123.<owner>-<n>.partial     being written
    .step-000000123.<owner>-<n>.aside       the previous one of that step, while the new one replaces it
    .step-000000123.<owner>-<n>.removed     being removed

A process that is killed leaves its temporary folders behind. They must be removed, but not those of another writer of
the same run that is still alive. So `owner` identifies the process: boot ID of the machine, PID namespace, PID, and
start time. On the same machine these tell whether the process is alive. On another machine or in another container that
cannot be known, and a folder is abandoned if nothing in it has changed for an hour. A lock would need a file that stays
behind, and does not work on every network file system.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep import faults
from lockstep.checkpoint import file_io, format as layout
from lockstep.checkpoint.format import FlatState
from lockstep.checkpoint.manifest import directory_name, looks_valid, names_in, step_of, steps_in, verify
from lockstep.errors import CheckpointError
from lockstep.process_identity import read_stat

SUSPECT = "suspect"  # folder for checkpoints that a worker may have computed wrongly
SUSPECT_AFTER = "suspect-after"  # file with a step, while the checkpoints of later steps are moved there
KEPT = 2  # least number of valid checkpoints that are kept
READ_TRIES = 10
OLD_S = 3600.0  # age of an abandoned temporary folder of another machine

_TEMPORARY = re.compile(r"\.(step-\d{9,18})\.([0-9a-z-]+)-(\d+)\.(partial|aside|removed)")
_UNKNOWN = "unknown"
_count = itertools.count()
_in_use: set[str] = set()  # temporary names that this process uses


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


def choose_outdated(
    steps: Iterable[int], is_valid: Callable[[int], bool], *, written: int, kept: int, kept_step: int | None = None
) -> list[int]:
    """Return the steps to remove after `written` was saved: those older than the newest `kept` valid ones.

    Steps after `written` stay: they belong to a run that returned to an older checkpoint, and may be damaged. The
    newest valid one up to `kept_step` stays, too.
    """
    earlier = sorted((step for step in steps if step < written), reverse=True)
    count, is_kept, outdated = 1, kept_step is None or written <= kept_step, list[int]()
    for step in earlier:
        if count < kept:
            count += (valid := is_valid(step))
            is_kept = is_kept or (valid and step <= (kept_step or 0))
        elif not is_kept and step <= (kept_step or 0) and is_valid(step):
            is_kept = True
        else:
            outdated.append(step)
    return sorted(outdated)


class CheckpointStore:
    """The checkpoint directory of a run. One worker writes, all workers read."""

    def __init__(self, run_directory: Path, *, kept: int = KEPT, mounted: Path | None = None) -> None:
        """`mounted`: what is not made again if it is missing after the first checkpoint; None: `run_directory`."""
        if not isinstance(kept, int) or kept < KEPT:
            raise ValueError(f"kept={kept!r} checkpoints: {KEPT} is the least, since the newest may get damaged")
        self.directory = run_directory / "checkpoints"
        self._kept = kept
        self._known_valid: set[int] = set()  # steps whose checkpoint this process has read completely
        self._mounted, self._was_created = mounted or run_directory, False
        self.kept_step: int | None = None  # the newest checkpoint up to this step is not removed

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
        partial, aside = (new_temporary_folder(self.directory, step, use) for use in (Use.PARTIAL, Use.ASIDE))
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
            release_name(partial)
            release_name(aside)

    def prune(self, written: int) -> None:
        """Remove outdated checkpoints, after `written` was saved, and temporary folders of killed writers."""
        try:
            now = self.path_of(written).stat().st_ctime  # by the clock of the file system
        except FileNotFoundError:
            return  # another thread has set it aside (`set_aside_after`)
        self._clean_up(now=now)
        for step in choose_outdated(
            steps_in(self.directory), self._is_valid, written=written, kept=self._kept, kept_step=self.kept_step
        ):
            faults.at("prune")
            removed = new_temporary_folder(self.directory, step, Use.REMOVED)
            try:
                # Renamed first, so that no incomplete checkpoint has a final name.
                with suppress(FileNotFoundError):  # it was set aside
                    self.path_of(step).rename(removed)
                    file_io.remove(removed)
            finally:
                release_name(removed)

    def set_aside_after(self, step: int) -> list[int]:
        """Move the checkpoints of later steps to the folder `suspect` beside this one. Returns their steps.

        If this process is killed meanwhile, `finish_setting_aside` does the rest.
        """
        if not self.directory.is_dir():
            return []
        note = self.directory / SUSPECT_AFTER
        note.write_text(str(step))
        file_io.sync_directory(self.directory)
        moved, suspect = list[int](), self.directory.parent / SUSPECT
        for one in [one for one in steps_in(self.directory) if one > step]:
            suspect.mkdir(exist_ok=True)
            target = suspect / directory_name(one)
            if os.path.lexists(target):
                file_io.remove(target)
            with suppress(FileNotFoundError):  # it was outdated, and removed
                self.path_of(one).rename(target)
                moved.append(one)
        note.unlink()
        file_io.sync_directory(self.directory)
        return moved

    def finish_setting_aside(self) -> None:
        """Do what is left of a `set_aside_after` that was interrupted."""
        with suppress(FileNotFoundError):
            text = (self.directory / SUSPECT_AFTER).read_text()
            self.set_aside_after(int(text) if text.isdecimal() else 0)

    def _clean_up(self, *, now: float) -> None:
        """Remove abandoned temporary folders; one set aside whose step has no checkpoint gets its name back."""
        for folder in temporary_folders(self.directory):
            if not is_abandoned(folder, now=now):
                continue
            if folder.use is Use.ASIDE and not os.path.lexists(self.path_of(folder.step)):
                folder.path.rename(self.path_of(folder.step))
            else:
                file_io.remove(folder.path)

    def _is_saved(self, path: Path, flat: FlatState) -> bool:
        """Whether exactly this state is saved there already, as far as that is known before all of it is here."""
        try:
            return path.is_dir() and flat.is_complete and verify(path).manifest.state_sha256 == layout.digest_of(flat)
        except CheckpointError:
            return False

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
        """Create the directory, with its parents.

        If that of the run is missing after the first time, it was unmounted or removed: raises FileNotFoundError.
        """
        if not self._was_created or self._mounted.is_dir():
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

    def newest(self, *, is_mapped: Callable[[str], bool] = lambda _: False) -> LoadedCheckpoint | None:
        """Read the newest valid checkpoint. None: there are no checkpoints. CheckpointError: none of them is valid.

        is_mapped  see `checkpoint.format.read`
        """
        for _ in range(READ_TRIES):
            skipped: list[Skipped] = []
            for step, path in self._candidates():
                try:
                    state = layout.read(path, step=step, is_mapped=is_mapped)
                except CheckpointError as error:
                    if not os.path.lexists(path):
                        break  # another worker removed it during the read: there are newer ones
                    skipped.append(Skipped(path, str(error)))
                else:
                    self._known_valid.add(step)
                    return LoadedCheckpoint(step, path, state, tuple(skipped))
            else:
                if not skipped:
                    return None
                reasons = "; ".join(bad.reason for bad in skipped)
                raise CheckpointError(
                    f"none of the {len(skipped)} checkpoints in {self.directory} can be used: {reasons}. Bring back a "
                    "copy, or begin anew in another directory"
                )
        raise CheckpointError(f"{self.directory}: checkpoints are removed faster than they can be read; keep more")

    def latest(self) -> dict[Any, Any] | None:
        found = self.newest()
        return found.state if found is not None else None

    def path_of(self, step: int) -> Path:
        return self.directory / directory_name(step)

    def last(self) -> Path | None:
        """Return the path of the newest checkpoint; None if there is none or the directory cannot be read."""
        try:
            steps = steps_in(self.directory)
        except OSError:
            return None
        return self.path_of(steps[-1]) if steps else None

    def _candidates(self) -> list[tuple[int, Path]]:
        try:
            steps = steps_in(self.directory)
            folders = temporary_folders(self.directory)
        except OSError as error:
            raise file_io.unreadable(self.directory, error) from error
        found = [(step, self.path_of(step)) for step in steps]
        found += [(one.step, one.path) for one in folders if one.use is Use.ASIDE and one.step not in steps]
        return sorted(found, reverse=True)


# ---- temporary folders: see Note [Temporary folders] -----------------------------------------------------------------


class Use(Enum):
    PARTIAL = "partial"
    ASIDE = "aside"
    REMOVED = "removed"


@dataclass(frozen=True)
class TemporaryFolder:
    """A directory that exists briefly, unless the process that created it was killed."""

    path: Path
    step: int
    use: Use
    owner: str


def temporary_folders(folder: Path) -> list[TemporaryFolder]:
    found = []
    for name in sorted(names_in(folder)):
        match = _TEMPORARY.fullmatch(name)
        step = step_of(match[1]) if match else None
        if match and step is not None:
            found.append(TemporaryFolder(folder / name, step, Use(match[4]), match[2]))
    return found


def new_temporary_folder(folder: Path, step: int, use: Use) -> Path:
    """Return a unique path. The caller must call `release_name` when it no longer uses it."""
    name = f".{directory_name(step)}.{_identity(os.getpid())}-{next(_count)}.{use.value}"
    _in_use.add(name)
    return folder / name


def release_name(path: Path) -> None:
    _in_use.discard(path.name)


def is_abandoned(folder: TemporaryFolder, *, now: float) -> bool:
    """Whether the owner has ended. `now` is by the clock of the file system, which may differ from this machine's."""
    boot, _, rest = folder.owner.partition("-")
    space, _, rest = rest.partition("-")
    pid = rest.partition("-")[0]
    here = _identity(os.getpid())
    if folder.owner == here:
        return folder.path.name not in _in_use
    if pid.isdecimal() and here.startswith(f"{boot}-{space}-") and boot != _UNKNOWN:
        return _identity(int(pid)) != folder.owner
    return now - _last_modified(folder.path) > OLD_S


def _identity(pid: int) -> str:
    """Identity of a process of this machine. It ends in 0 if there is none; without /proc: "unknown-0-<pid>-0"."""
    boot, space, started = _UNKNOWN, 0, "0"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12] or _UNKNOWN
    with suppress(OSError):
        space = os.stat("/proc/self/ns/pid").st_ino
    with suppress(OSError):
        stat = read_stat(pid)
        if stat.state not in "ZX":  # a killed process stays as a zombie (Z) until its parent waits for it
            started = stat.started
    return f"{boot}-{space}-{pid}-{started}"


def _last_modified(path: Path) -> float:
    """Return the latest modification time of the folder and its files; 0 if it no longer exists."""
    modified = 0.0
    for place in (path, *(path / name for name in names_in(path))):
        with suppress(OSError):
            modified = max(modified, os.lstat(place).st_mtime)
    return modified
