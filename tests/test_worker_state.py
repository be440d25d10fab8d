"""When a process that still exists is taken for dead: real processes, stopped, asleep, and busy without an end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.elastic import worker_state
from lockstep.elastic.agent_client import JsonPipe
from lockstep.elastic.membership import Standing, Worker
from lockstep.elastic.worker_state import BUSY_STALLS, LocalWorker, why_dead
from lockstep.process_identity import ProcessStat

STALL_S = 0.8
ASLEEP, BUSY = "import time; time.sleep(60)", "while True: pass"


@contextmanager
def silent(program: str) -> Iterator[LocalWorker]:
    """A worker that was heard a moment ago, and never again."""
    process = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    ours, theirs = socket.socketpair()
    with ours, theirs, process.stdout:
        process.stdout.readline()
        try:
            worker = Worker("h0.0", Standing.INSIDE)
            yield LocalWorker(
                worker, JsonPipe(ours), slot=0, pid=process.pid, has_run=True, last_heard_s=time.monotonic()
            )
        finally:
            process.kill()
            process.wait()


def taken_for_dead_after_s(local: LocalWorker, *, within_s: float) -> float | None:
    """As a host agent looks, ten times in a second."""
    while (now_s := time.monotonic()) < local.last_heard_s + within_s:
        if why_dead(local, now_s, STALL_S) is not None:
            return now_s - local.last_heard_s
        time.sleep(0.1)
    return None


@pytest.mark.parametrize("program", [ASLEEP, BUSY])
def test_a_stopped_worker_is_dead_as_soon_as_its_time_is_over(program: str) -> None:
    with silent(program) as local:
        os.kill(local.pid, signal.SIGSTOP)
        took_s = taken_for_dead_after_s(local, within_s=5 * STALL_S)
    assert took_s is not None
    assert STALL_S < took_s < STALL_S + 0.5


def test_a_worker_that_computes_has_time() -> None:
    with silent(BUSY) as local:
        assert taken_for_dead_after_s(local, within_s=3 * STALL_S) is None
        now_s = time.monotonic()
        local.last_heard_s = now_s - BUSY_STALLS * STALL_S - 0.1
        assert why_dead(local, now_s, STALL_S) is not None


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_worker_that_waits_for_a_core_has_time(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded machine it may get none for long: so it uses no CPU, like one that is stuck."""
    monkeypatch.setattr(worker_state, "read_stat", lambda _: ProcessStat(state, started="1", cpu_s=7.0))
    with silent(ASLEEP) as local:
        took_s = taken_for_dead_after_s(local, within_s=2 * STALL_S)
    assert (took_s is None) == (state == "R")


def test_a_worker_that_was_heard_in_between_is_looked_at_anew() -> None:
    """What it computed before its last sign of life tells nothing about the time since."""
    with silent(ASLEEP) as local:
        assert taken_for_dead_after_s(local, within_s=0.8 * STALL_S) is None
        local.last_heard_s = time.monotonic()
        took_s = taken_for_dead_after_s(local, within_s=5 * STALL_S)
    assert took_s is not None
    assert took_s > STALL_S


@pytest.mark.few(1)
@pytest.mark.parametrize("program", [ASLEEP, BUSY])
def test_a_worker_that_does_not_leave_is_dead_unless_it_computes(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard all the time: only its training thread does not come."""
    monkeypatch.setattr(worker_state, "LEAVE_WITHIN_S", 2.0)
    with silent(program) as local:
        local.leave_sent_s = began_s = time.monotonic()
        dead_after_s = None
        while (now_s := time.monotonic()) < began_s + 4.0 and dead_after_s is None:
            local.last_heard_s = now_s
            if why_dead(local, now_s, STALL_S) is not None:
                dead_after_s = now_s - began_s
            time.sleep(0.1)
        if program is BUSY:
            assert dead_after_s is None
        else:
            assert dead_after_s is not None
            assert 2.0 < dead_after_s < 3.0


@pytest.mark.parametrize("change", ["has no Run", "is done"])
def test_a_worker_that_is_not_training_is_not_asked(change: str) -> None:
    with silent(ASLEEP) as local:
        if change == "has no Run":
            local.has_run = False
        else:
            local.record = Worker("h0.0", Standing.DONE)
        assert why_dead(local, local.last_heard_s + 100 * STALL_S, STALL_S) is None
