"""Who is blamed: decided from reports alone, then tried with real workers that leave, raise and are killed."""

from __future__ import annotations

import signal
import textwrap
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.comm import abortable_wait, peer_watch
from lockstep.comm.peer_watch import WorkerReport, diagnose
from lockstep.errors import DesyncError, PeerLostError
from on_workers import run_program

US = WorkerReport(0, pid=10, host="a", passes=5, inside=True, calls=9)


def peer(**changes: object) -> WorkerReport:
    return WorkerReport(**({"rank": 1, "pid": 11, "host": "a", "passes": 5, "inside": True, "calls": 9} | changes))  # type: ignore[arg-type]


def test_no_worker_is_blamed_for_being_slow() -> None:
    assert diagnose(US, [peer(inside=False, calls=8, passes=4)], dead=[], where="there") is None
    assert diagnose(US, [peer()], dead=[], where="there") is None
    assert diagnose(US, [WorkerReport(1)], dead=[], where="there") is None, "nothing heard yet"


def test_one_that_left_is_named_with_its_reason() -> None:
    error = diagnose(US, [peer(rank=2), peer(exit_reason="ValueError: x", inside=False)], dead=[], where="bucket 3")
    assert isinstance(error, PeerLostError)
    for word in ("rank 1", "pid 11", "ValueError: x", "bucket 3", "5 backward passes"):
        assert word in str(error)


def test_one_that_died_is_named() -> None:
    error = diagnose(US, [peer(), peer(rank=2, pid=12)], dead=[2], where="there")
    assert isinstance(error, PeerLostError)
    assert "rank 2 (pid 12" in str(error)


def test_one_that_called_something_else_is_named() -> None:
    error = diagnose(US, [peer(rank=2), peer(inside=False, calls=9)], dead=[], where="there")
    assert isinstance(error, DesyncError)
    assert "rank 1" in str(error)


def test_calls_of_a_run_are_compared_where_their_positions_are_equal() -> None:
    us = replace(US, position=(2, 1), doing="run.log")
    assert diagnose(us, [peer(position=(2, 0), doing="run.step", calls=8)], dead=[], where="there") is None
    assert diagnose(us, [peer(position=(2, 1), doing="run.log", calls=8)], dead=[], where="there") is None
    assert diagnose(us, [peer(position=(2, 1), doing="", calls=8)], dead=[], where="there") is None, "between two calls"
    error = diagnose(us, [peer(position=(2, 1), doing="run.save", calls=8)], dead=[], where="there")
    assert isinstance(error, DesyncError)
    assert str(error).startswith("rank 0 called run.log, but rank 1 called run.save; look for control flow")


SCRIPT = """
    import os, signal, sys
    import torch, torch.distributed as dist
    import lockstep

    world = lockstep.init()
    ddp = lockstep.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(6):
        if world.rank == 1 and step == 3:
            what = sys.argv[1]
            if what == "raise":
                raise ValueError("bad sample 17")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "finish":
                break
        ddp(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kill", ["PeerLostError: rank 1", "died without an error message", "backward pass 4"]),
        *(
            pytest.param(what, ["PeerLostError: rank 1", *words], marks=pytest.mark.slow)
            for what, *words in (
                ("raise", "ValueError: bad sample 17", "backward pass 4"),
                ("finish", "its program ended", "join()"),
            )
        ),
    ],
)
def test_the_worker_that_is_left_alone_says_by_whom(tmp_path: Path, what: str, words: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    status, text = run_program(script, what, workers=2)  # not under the launcher, which would stop rank 0 too soon
    assert status == {"raise": 1, "kill": 128 + signal.SIGKILL, "finish": 1}[what], text
    said = (tmp_path / "output of rank 0").read_text()
    for word in words:
        assert word in said


def test_a_worker_that_waits_in_a_group_that_is_aborted_goes_on() -> None:
    """Also if its collective never ends."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    watch, never = peer_watch.PeerWatch(group, polls=True), threading.Event()
    threading.Timer(0.2, abortable_wait.mark_aborted, [group]).start()
    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match="its group was aborted while this worker waited in a dream"):
        watch.wait_for(never.wait, "a dream")
    assert time.monotonic() - began_s < 5
