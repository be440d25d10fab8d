"""Saving goes wrong at every place where it can: a call of the system fails, or the process is killed there.

Afterwards the newest complete checkpoint is there or the one before, with the right state; and the next save clears up.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import on_workers
from lockstep import CheckpointError, faults
from lockstep.checkpoint.manifest import looks_valid, verify
from lockstep.checkpoint.store import CheckpointStore
from test_checkpoint import fast_path, same  # noqa: F401  (fast_path is a fixture)
from test_checkpoint_damage import small_state

DEADLINE_S = 300.0
LATER = ("nothing", "the same call", "all calls")
# All calls of the system that a save makes and that can fail, but for reading.
CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


@dataclass
class Trap:
    """Counts the calls, and at the one with number `at` does something else first."""

    at: int
    act: Callable[[str, tuple[Any, ...]], None]
    later: str = "nothing"  # that it is done at too: "nothing", "the same call", or "all calls"
    seen: list[tuple[str, Any]] = field(default_factory=list)

    @contextmanager
    def set(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in CALLS}

        def trapped(name: str) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.seen.append((name, args[0]))
                kind = self.seen[self.at - 1][0] if 0 < self.at <= len(self.seen) else None
                wanted = {"nothing": len(self.seen) == self.at, "the same call": kind == name, "all calls": True}
                if kind is not None and wanted[self.later]:
                    self.act(name, args)
                return real[name](*args, **options)

            return call

        for name in CALLS:
            setattr(os, name, trapped(name))
        try:
            yield
        finally:
            for name in CALLS:
                setattr(os, name, real[name])


@dataclass(frozen=True)
class Scene:
    """What is there before, and what is saved then. The state of step n is `small_state(n)`, and of a new one n + 1."""

    before: tuple[int, ...]
    step: int

    @property
    def new(self) -> tuple[int, int]:
        return self.step, self.step + 1

    @property
    def accepted(self) -> list[tuple[int, int] | None]:
        """(step, state) of the newest, whatever happens."""
        return [self.new, (self.before[-1], self.before[-1]) if self.before else None]

    def prepare(self, folder: Path) -> None:
        folder.mkdir()
        for step in self.before:
            CheckpointStore(folder).save(step, small_state(step))

    def play(self, folder: Path) -> None:
        CheckpointStore(folder).save(self.step, small_state(self.step + 1))


SCENES = {"the first": Scene((), 1), "the third": Scene((10, 20), 30), "the same step again": Scene((10, 20), 20)}


def check(folder: Path, scene: Scene, *, done: bool) -> tuple[int, int] | None:
    """What is there now is right, and the next save leaves nothing else behind. Returns (step, state) of the newest."""
    found = CheckpointStore(folder).newest()
    newest = None
    if found is not None:
        states = [n for n in (found.step, found.step + 1) if same(found.state, small_state(n))]
        assert states, "it is none of the states that were saved"
        newest = found.step, states[0]
        assert not found.skipped, "something incomplete has a name"
    assert newest in scene.accepted
    if done:
        assert newest == scene.new
    named = sorted((folder / "checkpoints").glob("step-*"))
    assert all(map(looks_valid, named))
    assert len(named) + (found is not None and found.path not in named) >= len(scene.before), "one is lost"
    CheckpointStore(folder).save(99, small_state(99))
    there = sorted(os.listdir(folder / "checkpoints"))
    assert there[-1] == "step-000000099"
    assert all(name.startswith("step-") for name in there), there
    assert len(there) == min(2, 1 + len({*scene.before, scene.step} if newest == scene.new else scene.before))
    for name in there:
        verify(folder / "checkpoints" / name)
    return newest


def count_calls(folder: Path, scene: Scene) -> list[tuple[str, Any]]:
    scene.prepare(folder)
    trap = Trap(0, lambda name, args: None)
    with trap.set():
        scene.play(folder)
    assert check(folder, scene, done=True) == scene.new
    return trap.seen


# ---- errors ----------------------------------------------------------------------------------------------------------


def fail_everywhere(folder: Path, scene: Scene, code: int, *, later: str) -> list[Any]:
    """One save for each call that can fail, alone or with later ones. Returns what was the newest after each."""

    def fail(name: str, args: tuple[Any, ...]) -> None:
        raise OSError(code, os.strerror(code), str(args[0]))

    scene.prepare(folder / "before")
    found = []
    for at in range(1, len(count_calls(folder / "count", scene)) + 1):
        here = shutil.copytree(folder / "before", folder / str(at))
        trap, error = Trap(at, fail, later), None
        with trap.set():
            try:
                scene.play(here)
            except (OSError, CheckpointError) as caught:
                error = caught
        assert len(trap.seen) >= at
        found.append(check(here, scene, done=error is None))
        shutil.rmtree(here)
    return found


@pytest.mark.few(6)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("name", SCENES)
def test_every_call_fails(fast_path: Path, name: str, later: str, code: int) -> None:  # noqa: F811
    scene = SCENES[name]
    found = fail_everywhere(fast_path, scene, code, later=later)
    assert len(found) > 20
    assert all(outcome in found for outcome in scene.accepted)


# ---- kills -----------------------------------------------------------------------------------------------------------


def die(name: str, args: tuple[Any, ...]) -> None:
    if name == "write":  # half of it is on the disk
        os.pwrite(args[0], args[1][: len(args[1]) // 2], os.lseek(args[0], 0, os.SEEK_CUR))
    os.kill(os.getpid(), signal.SIGKILL)


def kill_everywhere(folder: Path, scene: Scene, pipe: Connection) -> None:
    """In a process of its own, with one thread, so that it can fork: a child is killed at every call, one by one."""
    try:
        scene.prepare(folder / "before")
        found = []
        for at in range(1, 1000):
            here = shutil.copytree(folder / "before", folder / str(at))
            child = os.fork()
            if child == 0:
                with Trap(at, die).set():
                    scene.play(here)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            done = status == 0
            assert done or os.WTERMSIG(status) == signal.SIGKILL
            found.append(check(here, scene, done=done))
            shutil.rmtree(here)
            if done:
                break
        pipe.send(found)
    except BaseException:
        pipe.send(traceback.format_exc())


def in_a_clean_process(target: Callable[..., None], *args: Any, deadline_s: float = DEADLINE_S) -> Any:
    ours, theirs = on_workers.fork_server().Pipe(duplex=False)
    process = on_workers.fork_server().Process(target=target, args=(*args, theirs))
    process.start()
    try:
        assert ours.poll(deadline_s), "no answer"
        answer = ours.recv()
    finally:
        process.kill()
        process.join()
    assert not isinstance(answer, str), answer
    return answer


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCENES)
def test_killed_at_every_call(fast_path: Path, name: str) -> None:  # noqa: F811
    scene = SCENES[name]
    found = in_a_clean_process(kill_everywhere, fast_path, scene)
    assert len(found) == len(count_calls(fast_path / "count", scene)) + 1
    assert found[0] == scene.accepted[1]
    # Once the new one is there, it stays.
    first = found.index(scene.new)
    assert set(found[first:]) == {scene.new}


# ---- the order -------------------------------------------------------------------------------------------------------


def test_everything_is_on_the_disk_before_it_has_a_name(tmp_path: Path) -> None:
    """A power failure cannot be had here. But what is synced before what can be seen."""
    scene, folder = SCENES["the third"], tmp_path / "run"
    scene.prepare(folder)
    paths: dict[int, str] = {}
    real_open, fsync, write, rename = os.open, os.fsync, os.write, os.rename
    events: list[tuple[str, str]] = []

    def noted_open(path: Any, *args: Any, **options: Any) -> int:
        handle = real_open(path, *args, **options)
        paths[handle] = Path(path).name
        return handle

    def noted_rename(a: Any, b: Any) -> None:
        rename(a, b)
        events.append(("rename", Path(b).name))

    def note(place: str) -> None:
        if place in ("verify", "prune"):
            events.append((place, ""))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noted_open)
        patch.setattr(os, "fsync", lambda h: events.append(("fsync", paths[h])) or fsync(h))
        patch.setattr(os, "write", lambda h, data: events.append(("write", paths[h])) or write(h, data))
        patch.setattr(os, "rename", noted_rename)
        patch.setattr(faults, "hook", note)
        scene.play(folder)
    last = {event: n for n, event in enumerate(events)}
    named = last["rename", "step-000000030"]
    for name in ("tensors.safetensors", "state.json", "manifest.json"):
        assert last["write", name] < last["fsync", name] < named
    partial = next(name for kind, name in last if kind == "fsync" and name.endswith(".partial"))
    assert last["fsync", "manifest.json"] < last["fsync", partial] < events.index(("verify", "")) < named
    removed = next(n for (kind, name), n in last.items() if kind == "rename" and name.endswith(".removed"))
    assert named < last["fsync", "checkpoints"] < last["prune", ""] < removed
