"""The launcher of an elastic run, where its surroundings are odd: a screen that does not read, a huge environment, logs
that cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.elastic import screen

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


def test_nobody_waits_for_a_screen_that_does_not_read(tmp_path: Path) -> None:
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
            said = launcher.communicate(timeout=60)[0].decode()
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
            said = launcher.communicate(timeout=60)[0].decode()
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert "worker 2 has no log: " in said


def test_a_screen_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    try:
        screen.lose_patience(0.3)
        began_s = time.monotonic()
        for _ in range(50):
            screen.write_all(theirs, b"y" * 10_000)
        assert 0.25 < time.monotonic() - began_s < 2.0
        first = os.read(ours, 1 << 20)
        assert set(first) == {ord("y")}
        screen.write_all(theirs, b"again\n")
        assert os.read(ours, 1 << 20).endswith(b"what is missing here is in the logs\nagain\n")
    finally:
        screen.regain_patience()
        os.close(ours)
        os.close(theirs)
