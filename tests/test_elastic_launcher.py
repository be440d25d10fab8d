"""The launcher of an elastic run, where its surroundings are odd: a screen that does not read, a huge environment, logs
that cannot be written."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.launcher import output
from lockstep.launcher.parent_watch import unlink_nccl_files

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import lockstep

with lockstep.Run(seed=1, progress=False) as run:
    print("size", run.world.size, len(os.environ.get("HUGE0", "")), flush=True)
    for _ in range(int(os.environ.get("LINES", 0))):
        print("x" * 1000, flush=True)
    if os.environ.get("DIES") and run.world.rank == 1 and not Path("died").exists():
        Path("died").touch()
        while not Path("die").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if run.world.rank == 0:
        while os.environ.get("DIES") and not Path("go").exists():
            time.sleep(0.01)
    run.on_main(lambda: None)
    Path(f"done {run.world.rank}").touch()
"""


def launch(folder: Path, *, env: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "program.py"]
    return subprocess.Popen(command, cwd=folder, env=dict(os.environ) | env, **more)


def wait_for(path: Path, *, within_s: float = 60.0) -> bool:
    end_s = time.monotonic() + within_s
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    return path.exists()


@pytest.mark.slow
def test_no_worker_waits_for_a_screen_that_does_not_read(tmp_path: Path) -> None:
    """A paused `less`, say. Workers write more than all pipes hold, and still come to the end."""
    with launch(tmp_path, env={"LINES": "2000"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        try:
            assert wait_for(tmp_path / "done 0")
            assert wait_for(tmp_path / "done 1")
            assert launcher.stdout is not None
            said = launcher.stdout.read().decode()
            assert launcher.wait(30) == 0
        finally:
            launcher.kill()
    assert "the screen took nothing for a while; what is missing here is in the logs" in said
    assert (tmp_path / "logs" / "worker0.log").stat().st_size > 2000 * 1000


@pytest.mark.slow
def test_an_environment_that_is_larger_than_a_message(tmp_path: Path) -> None:
    huge = {f"HUGE{n}": "x" * 100_000 for n in range(5)}
    with launch(tmp_path, env=huge, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        try:
            said = launcher.communicate(timeout=300)[0].decode()
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert said.count("size 2 100000") == 2


@pytest.mark.slow
def test_a_worker_is_replaced_although_its_log_cannot_be_written(tmp_path: Path) -> None:
    with launch(tmp_path, env={"DIES": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        try:
            assert wait_for(tmp_path / "died")
            shutil.rmtree(tmp_path / "logs")
            (tmp_path / "die").touch()
            time.sleep(1.0)
            (tmp_path / "go").touch()
            said = launcher.communicate(timeout=300)[0].decode()
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert "worker 2 has no log: " in said


def test_a_screen_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    try:
        output.set_write_timeout(0.3)
        began_s = time.monotonic()
        for _ in range(50):
            output.write_all(theirs, b"y" * 10_000)
        assert 0.25 < time.monotonic() - began_s < 2.0
        first = os.read(ours, 1 << 20)
        assert set(first) == {ord("y")}
        output.write_all(theirs, b"again\n")
        assert os.read(ours, 1 << 20).endswith(b"what is missing here is in the logs\nagain\n")
    finally:
        output.clear_write_timeout()
        os.close(ours)
        os.close(theirs)


# ---- semaphores -----------------------------------------------------------------------------------------------------

# The semaphores that a process makes, as files.
NAMES = """
from multiprocessing import synchronize
names, make_name = [], synchronize.SemLock._make_name

def note_name():
    names.append(make_name())
    return names[-1]

synchronize.SemLock._make_name = staticmethod(note_name)

def files():
    return " ".join(f"/dev/shm/sem.{name[1:]}" for name in names)
"""

NAMED = (
    """
import multiprocessing, os, signal, sys, time
from pathlib import Path
"""
    + NAMES
    + """
held = [multiprocessing.get_context("spawn").Semaphore() for _ in range(3)]
Path(f"{os.environ['LOCAL_RANK']}.new").write_text(files())
Path(f"{os.environ['LOCAL_RANK']}.new").rename(os.environ["LOCAL_RANK"] + ".names")
end_s = time.monotonic() + 60
while not Path("die").exists() and time.monotonic() < end_s:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_a_worker_that_is_killed_leaves_no_semaphores(tmp_path: Path, victim: str) -> None:
    """Python's resource tracker, which would unlink them, is a child of the worker, and is killed with its group."""
    (tmp_path / "program.py").write_text(NAMED)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as launcher:
        try:
            for rank in range(2):
                assert wait_for(tmp_path / f"{rank}.names")
            names = [name for rank in range(2) for name in (tmp_path / f"{rank}.names").read_text().split()]
            assert len(names) == 6
            assert all(Path(name).exists() for name in names)
            if victim == "worker":
                (tmp_path / "die").touch()
                launcher.communicate(timeout=300)
            else:
                launcher.kill()
                launcher.communicate(timeout=300)
        finally:
            launcher.kill()
    end_s = time.monotonic() + 20
    while any(Path(name).exists() for name in names) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [name for name in names if Path(name).exists()] == []


def test_shared_memory_of_nccl_that_no_process_uses_is_removed() -> None:
    names = ("left", "opened", "mapped", "new", "before the run")
    paths = [Path(f"/dev/shm/nccl-test-{name}-{os.getpid()}") for name in names]
    _, opened, mapped, new, before = paths
    began_s = time.time() - 300
    try:
        for path in paths:
            path.write_bytes(b"x")
        with opened.open(), mapped.open("r+b") as file, mmap.mmap(file.fileno(), 1):
            for path in paths:
                made_s = time.time() if path == new else began_s - 10 if path == before else began_s + 10
                os.utime(path, (made_s, made_s))
            unlink_nccl_files(began_s)
            assert [path.exists() for path in paths] == [False, True, True, True, True]
        unlink_nccl_files(began_s)
        assert [path for path in paths if path.exists()] == [new, before]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


LOADED = (
    """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
"""
    + NAMES
    + """
if __name__ == "__main__":
    import lockstep
    from runs import classify, data

    torch.multiprocessing.set_start_method("{method}")
    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model = run.replicate(torch.nn.Linear(16, 10))
        batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=4, num_workers=1)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            if batch.number == 3 and run.world.rank == 1 and not Path("names").exists():
                Path("names").write_text(files())
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(classify, batch)
        print("digest", run.digest(), flush=True)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_with_loaders_that_were_not_forked_leaves_no_semaphores(tmp_path: Path, method: str) -> None:
    text = LOADED.replace("{tests!r}", repr(str(Path(__file__).parent))).replace("{method}", method)
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = (tmp_path / "names").read_text().split()
    assert names
    assert [name for name in names if Path(name).exists()] == []
