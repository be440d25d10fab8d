"""Workers that are asked to leave: they finish their step and go, the others continue, and others take their place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.elastic.membership import (
    Generation,
    GenerationPhase,
    HostRecord,
    Standing,
    Want,
    Worker,
    next_generation,
)
from on_workers import run_program

PROGRAM = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep
from lockstep import faults

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))

def loss(model, batch):
    x, y = batch
    if os.environ.get("SLOW") and "h0.1" in str(faults.context.get("worker")):
        time.sleep(0.04)
    elif os.environ.get("SLOW"):
        time.sleep(0.004)
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

with lockstep.Run("run", seed=1, device="cpu", save_every=1000) as run:
    model = run.replicate(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)))
    batches = run.batches(data, global_batch_size=12, shards=6, epochs=None)
    for batch in run.train(batches, torch.optim.AdamW(model.parameters(), lr=0.01), steps=int(os.environ["STEPS"])):
        run.step(loss, batch)
        with open(f"steps {os.getpid()}", "a") as file:
            file.write(f"{batch.number}\\n")
        if Path("slowly").exists():  # until the test has done what it does to the workers
            time.sleep(0.1)
    print("digest", run.digest(), flush=True)
"""


@contextmanager
def launched(
    folder: Path, *options: str, steps: int = 200, slowly: bool = False, **more: str
) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    if slowly:
        (folder / "slowly").touch()
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "lockstep", "run", *options, "--log-dir", "logs", "program.py"]
    env = dict(os.environ) | {"STEPS": str(steps), "CUDA_VISIBLE_DEVICES": ""} | more
    with (folder / "output").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(what: Callable[[], Any], folder: Path) -> Any:
    end_s = time.monotonic() + 120
    while not (found := what()):
        assert time.monotonic() < end_s, (folder / "output").read_text()
        time.sleep(0.02)
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "logs" / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == kind]


def steps_of(folder: Path) -> dict[int, list[int]]:
    """The steps that each process has applied, by pid."""
    return {int(path.name.split()[1]): [int(n) for n in path.read_text().split()] for path in folder.glob("steps *")}


def digest_of(folder: Path) -> str:
    said = (folder / "output").read_text()
    found = {line.split("digest ")[1] for line in said.splitlines() if "digest " in line}
    assert len(found) == 1, said
    return found.pop()


def await_members(folder: Path, *names: str) -> None:
    wait_for(lambda: (events(folder, "generation") or [{"members": []}])[-1]["members"] == list(names), folder)


def test_two_workers_leave_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    status, alone = run_program(tmp_path / "program.py", STEPS="200")
    assert status == 0, alone
    folder = tmp_path / "drained"
    with launched(folder, "-n", "2", "--min", "1", "--max", "3", slowly=True) as process:
        wait_for(lambda: len([1 for steps in steps_of(folder).values() if len(steps) > 5]) == 2, folder)
        pids = {event["worker"]: event["pid"] for event in events(folder, "started")}
        os.kill(pids["h0.0"], signal.SIGTERM)  # rank 0
        await_members(folder, "h0.1", "h0.2")
        assert main(["drain", str(folder / "logs"), "1", "78"]) == 0
        assert main(["drain", str(folder / "logs"), "77"]) == 0  # at once: neither request is lost
        assert "asked worker 1, worker 78 to leave" in capsys.readouterr().out
        await_members(folder, "h0.2", "h0.3")
        (folder / "slowly").unlink()
        assert process.wait(300) == 0
    said = (folder / "output").read_text()
    assert f"worker 0 (pid {pids['h0.0']}) leaves after its step: it was sent a signal" in said
    assert f"worker 1 (pid {pids['h0.1']}) leaves after its step: lockstep drain" in said
    assert "worker 77 is asked to leave, but does not run here" in said
    assert re.search(r"worker 0 leaves(, worker 2 joins; 2 workers continue|; 1 worker continues) at step", said)
    assert events(folder, "lost") == []
    assert [event["worker"] for event in events(folder, "leaving")] == ["h0.0", "h0.1"]
    assert f"digest {digest_of(folder)}" in alone
    for steps in steps_of(folder).values():
        assert steps == list(range(steps[0], steps[-1] + 1))  # none is missing, and none was taken again
    assert max(len(steps) for steps in steps_of(folder).values()) < 200


@pytest.mark.slow
def test_a_signal_to_all_workers_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "-n", "2", "--min", "1", steps=4000, slowly=True) as process:
        folder = tmp_path / "run"
        wait_for(lambda: len([1 for steps in steps_of(folder).values() if len(steps) > 5]) == 2, folder)
        assert main(["drain", str(folder / "logs")]) == 0
        wait_for(lambda: "this is the only host" in (folder / "output").read_text(), folder)
        for event in events(folder, "started"):
            os.kill(event["pid"], signal.SIGTERM)
        assert process.wait(300) == 75, (folder / "output").read_text()
    assert "saved at step" in (folder / "output").read_text()


@pytest.mark.slow
def test_a_worker_that_is_too_slow_leaves_and_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launched(folder, "-n", "3", "--min", "2", "--drop-slower-than", "3x", steps=60, SLOW="1") as process:
        assert process.wait(300) == 0, (folder / "output").read_text()
    said = (folder / "output").read_text()
    assert " leaves after its step: it takes " in said
    assert events(folder, "generation")[-1]["members"] == ["h0.0", "h0.2"], said
    assert len(events(folder, "started")) == 3
    assert events(folder, "lost") == []
    digest_of(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-n", "2", "--drop-slower-than", "3x"), "needs --min or --max"),
        (("-n", "2", "--min", "1", "--drop-slower-than", "fast"), "'fast' is not a number above 1"),
        (("-n", "2", "--min", "1", "--drop-slower-than", "0.5"), "'0.5' is not a number above 1"),
    ],
)
def test_wrong_limits(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    with launched(tmp_path / "run", *options) as process:
        assert process.wait(60) == 2
    assert words in (tmp_path / "run" / "output").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "-1"], "-1"),
        (["x", "one"], "is not the number of a worker"),
        (["x"], "not a run"),
        (["x", "1"], "not a run"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["drain", *arguments])
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    assert status == 2
    assert words in capsys.readouterr().err


# -- which workers train together --------------------------------------------------------------------------------------

NOW = Generation(3, ("h0.0", "h0.1", "h0.2"), position=(4, 0), source="h0.0", anew=1)


def inside(number: int, *, leaving: bool = False) -> Worker:
    return Worker(f"h0.{number}", Standing.INSIDE, 3, (4, 0), is_leaving=leaving)


def left(number: int, position: tuple[int, int] = (5, 0), *, leaving: bool = False) -> Worker:
    return Worker(f"h0.{number}", Standing.LEFT, 3, position, is_leaving=leaving)


def ready(number: int) -> Worker:
    return Worker(f"h0.{number}", Standing.READY, 3, (-1, 1))


def following(*workers: Worker, want: Want, now: Generation = NOW) -> Generation | None:
    return next_generation(now, [HostRecord("h0", workers)], want)


def test_a_generation_is_closed_for_a_worker_that_leaves() -> None:
    closed = following(inside(0), inside(1, leaving=True), inside(2), want=Want(3, 1, 3))
    assert closed is not None
    assert (closed.phase, closed.why) == (GenerationPhase.CLOSING, "h0.1 leaves")


def test_the_next_generation_is_without_it_and_with_its_replacement() -> None:
    found = following(left(0), left(1, leaving=True), left(2), want=Want(3, 1, 3))
    assert found is not None
    assert found.members == ("h0.0", "h0.2")
    found = following(left(0, leaving=True), left(1), left(2), ready(3), want=Want(3, 1, 3))
    assert found is not None
    assert (found.members, found.source) == (("h0.1", "h0.2", "h0.3"), "h0.1")
    assert found.why == "h0.0 leaves, h0.3 joins"


def test_it_stays_until_there_are_enough_without_it() -> None:
    want = Want(3, 3, 3)
    assert following(inside(0), inside(1, leaving=True), inside(2), want=want) is None
    closed = following(inside(0), inside(1, leaving=True), inside(2), ready(3), want=want)
    assert closed is not None
    assert closed.phase is GenerationPhase.CLOSING


def test_it_stays_while_it_alone_has_the_newest_step() -> None:
    """Another worker was lost in the middle of a step that only the one which leaves has applied."""
    found = following(left(0, (4, 1)), left(1, (4, 2), leaving=True), want=Want(3, 1, 3))
    assert found is not None
    assert found.source == "h0.1"
    assert set(found.members) == {"h0.0", "h0.1"}
