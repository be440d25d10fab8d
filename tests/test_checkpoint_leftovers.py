"""What killed writers leave behind: cleared away by the next save, and never taken from a writer that lives."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import on_workers
from lockstep.checkpoint import store as folders
from lockstep.checkpoint.manifest import TENSORS
from lockstep.checkpoint.store import CheckpointStore, Use
from test_checkpoint_store import there

DEADLINE_S = 300.0


def leave(folder: Path, pipe: Connection) -> None:
    """Be a writer that has begun, of all kinds."""
    for use in Use:
        path = folders.new_temporary_folder(folder / "checkpoints", 7, use)
        path.mkdir()
        (path / TENSORS).touch()
    pipe.send("here")
    time.sleep(2 * DEADLINE_S)


def test_only_the_dead_are_cleared_away(tmp_path: Path) -> None:
    store, folder = CheckpointStore(tmp_path), tmp_path / "checkpoints"
    store.save(7, {"step": 7})
    ours, theirs = on_workers.fork_server().Pipe(duplex=False)
    other = on_workers.fork_server().Process(target=leave, args=(tmp_path, theirs), daemon=True)
    other.start()
    try:
        assert ours.poll(DEADLINE_S)
        for use in Use:  # of this process, which forgot them
            path = folders.new_temporary_folder(folder, 6, use)
            path.mkdir()
            folders.release_name(path)
        busy = folders.new_temporary_folder(folder, 8, Use.PARTIAL)  # another thread of this process
        busy.mkdir()
        unknown = "0123456789ab-1-1-1-0", "x-4026531836-1-1-0"  # other machines
        elsewhere = [folder / f".step-000000009.{who}.partial" for who in unknown]
        for path in elsewhere:
            path.mkdir()
            (path / TENSORS).touch()
        store.save(10, {"step": 10})
        left = {path for path in folder.iterdir() if path.name.startswith(".")}
        alive = {path for path in left if f"-{other.pid}-" in path.name}
        assert len(alive) == 3
        assert left == alive | {busy, *elsewhere}
    finally:
        other.kill()
        other.join(DEADLINE_S)
    folders.release_name(busy)
    old = time.time() - 2 * folders.OLD_S
    for path in (elsewhere[0] / TENSORS, elsewhere[0], elsewhere[1]):  # in the second, a file is still new
        os.utime(path, (old, old))
    store.save(11, {"step": 11})
    assert {path for path in folder.iterdir() if path.name.startswith(".")} == {elsewhere[1]}
    assert there(tmp_path)[1:] == ["10", "11"]


def test_a_killed_process_is_dead_before_its_parent_looks(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        left = folders.TemporaryFolder(tmp_path, 1, Use.PARTIAL, folders._identity(child.pid))
        assert not folders.is_abandoned(left, now=time.time())
        before = replace(left, owner=left.owner.rpartition("-")[0] + "-1")  # one that had this number earlier
        assert folders.is_abandoned(before, now=time.time())
        child.kill()
        deadline = time.monotonic() + DEADLINE_S
        while ") Z " not in Path(f"/proc/{child.pid}/stat").read_text() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert folders.is_abandoned(left, now=time.time())


def test_one_that_was_put_aside_by_a_killed_writer_is_used_and_gets_its_name_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"step": 1})
    aside = folders.new_temporary_folder(tmp_path / "checkpoints", 1, Use.ASIDE)
    folders.release_name(aside)
    store.path_of(1).rename(aside)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert (found.step, found.state, found.path) == (1, {"step": 1}, aside)
    store.save(2, {"step": 2})
    assert there(tmp_path) == ["1", "2"]
