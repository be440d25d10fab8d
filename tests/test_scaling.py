"""`lockstep scale` reaches the launcher that it means, and no other. That the run changes: test_recovery.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.launcher import scale_request
from lockstep.launcher.scale_request import LAUNCHER_FILE, REQUEST_FILE
from lockstep.process_identity import read_stat
from test_launch import wait_for

LAUNCHER = """
import signal, sys
from pathlib import Path
from lockstep.launcher import scale_request
folder = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [scale_request.REQUEST_SIGNAL])
scale_request.publish_launcher(folder, least=2, most=3)
print("ready", flush=True)
signal.sigwait([scale_request.REQUEST_SIGNAL])
asked = scale_request.read_request(folder)
print(asked.workers, *asked.leaving, flush=True)
"""
WIDE = json.dumps({"pid": 2**70, "started": "1", "host": socket.gethostname(), "least": 1, "most": 3})
Process = subprocess.Popen[str]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Process]:
    """One that can have 2 or 3 workers, and says how many it was asked for."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture
def stranger() -> Iterator[Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True) as process:
        yield process
        process.kill()


def change(folder: Path, **facts: object) -> None:
    note = json.loads((folder / LAUNCHER_FILE).read_text())
    (folder / LAUNCHER_FILE).write_text(json.dumps(note | facts))


def test_the_launcher_is_asked(launcher: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "launch.json").write_text(json.dumps({"logs": str(tmp_path)}))
    assert main(["scale", str(run), "2"]) == 0
    assert launcher.communicate(timeout=120)[0] == "2\n"
    assert "asked for 2 workers" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["1", "4"])
def test_too_few_and_too_many_are_refused(
    workers: str, launcher: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(tmp_path), workers]) == 2
    assert "this run can have 2 to 3" in capsys.readouterr().err
    assert not (tmp_path / REQUEST_FILE).exists()
    assert launcher.poll() is None


def test_a_process_with_the_pid_of_a_launcher_that_was_killed_is_left_alone(
    launcher: Process, stranger: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.kill()
    launcher.wait(timeout=120)
    change(tmp_path, pid=stranger.pid)
    assert main(["scale", str(tmp_path), "2"]) == 2
    error = capsys.readouterr().err
    assert f"process {stranger.pid}, has ended" in error
    assert "give the folder of its logs" in error
    assert not (tmp_path / REQUEST_FILE).exists()
    with pytest.raises(subprocess.TimeoutExpired):
        stranger.wait(timeout=0.5)


def test_without_handles_of_processes_it_is_asked_all_the_same(
    launcher: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some builds of Python have none, and some containers forbid them."""
    monkeypatch.delattr(os, "pidfd_open")
    assert main(["scale", str(tmp_path), "3"]) == 0
    assert launcher.communicate(timeout=120)[0] == "3\n"


def test_a_launcher_that_was_not_collected_yet(
    launcher: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.kill()
    wait_for(lambda: read_stat(launcher.pid).state == "Z", "the launcher to die")
    assert main(["scale", str(tmp_path), "2"]) == 2
    assert "has ended" in capsys.readouterr().err


def test_a_launcher_that_is_gone(launcher: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(timeout=120)
    assert main(["scale", str(tmp_path), "2"]) == 2
    assert "is not a run that goes on" in capsys.readouterr().err


def test_a_launcher_elsewhere(launcher: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(tmp_path, host="elsewhere")
    assert main(["scale", str(tmp_path), "2"]) == 2
    assert "its host agent is on elsewhere; ask there" in capsys.readouterr().err
    assert launcher.poll() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}', "null", WIDE])
def test_a_note_that_is_none(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LAUNCHER_FILE).write_text(text)
    assert main(["scale", str(tmp_path), "2"]) == 2
    assert "is not a run that goes on" in capsys.readouterr().err


def test_no_note(tmp_path: Path) -> None:
    with pytest.raises(scale_request.NotRunning, match=LAUNCHER_FILE):
        scale_request.send_request(tmp_path, scale_request.Request(workers=2))
