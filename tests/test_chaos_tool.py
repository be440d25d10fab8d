"""The kill campaign itself: a campaign that cannot turn red proves nothing."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "chaos"
sys.path.append(str(TOOL))
from leftovers import differences, holdings, marked_processes, shm_files, shm_left  # noqa: E402
from plan import COLLECTIVES, Case, Event, cases, plan  # noqa: E402
from result_check import Fault, Result, judge, table  # noqa: E402
from run import read_arguments  # noqa: E402
from worker import Told  # noqa: E402

# ------------------------------------------------------------------------------------------------------------ the plan


def test_a_case_is_a_function_of_seed_and_number() -> None:
    assert plan(7, 118) == plan(7, 118)
    assert plan(7, 118) != replace(plan(8, 118), seed=7)


def test_a_campaign_has_its_kills_and_everything_in_them() -> None:
    campaign = cases(0, 500)
    kills = [case for case in campaign if case.event is not Event.STOP]
    assert len(kills) == 500
    assert len(campaign) - len(kills) == 20
    assert {case.event for case in campaign} == set(Event)
    assert {case.workers for case in kills} == {2, 3, 4}
    assert {case.collective for case in kills} >= set(COLLECTIVES)
    for case in campaign:
        assert sorted((*case.victims, *case.survivors)) == list(range(case.workers))
        assert bool(case.survivors) == (case.event is not Event.ALL)


# --------------------------------------------------------------------------------------------------------- the checks

KILLED_S = 100.0
PIDS = {0: 40, 1: 41, 2: 42}


def told(**changes: object) -> Told:
    """Rank 0 is told in time that rank 1 died."""
    text = "rank 1 (pid 41) died in all_reduce #7"
    said = {"error": "PeerLostError", "peer_lost": True, "ours": True, "text": text, "rank": 1, "pid": 41, "trace": ""}
    times = {"where": "all_reduce_small", "entered_s": KILLED_S - 0.001, "raised_s": KILLED_S + 0.02}
    return Told(**(said | times | changes))  # type: ignore[arg-type]


def faults(said: Told, *, signed: bool = False, **changes: object) -> list[Fault]:
    case = Case(
        seed=0,
        number=0,
        event=Event.KILL,
        workers=2,
        victims=(1,),
        collective="all_reduce_small",
        delay_s=0,
        gap_s=0,
        slow_rank=None,
        store="file",
        timeout_s=3.0,
        continued=False,
    )
    case = replace(case, **changes)  # type: ignore[arg-type]
    result = Result(case, signed=signed, strikes={1: KILLED_S}, pids=PIDS, told={0: said})
    return [finding.fault for finding in judge(result)]


def test_who_is_told_in_time_is_content() -> None:
    assert faults(told()) == []


def test_another_error_is_not_enough() -> None:
    assert faults(told(error="RuntimeError", peer_lost=False)) == [Fault.NOT_TOLD]


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"rank": None}, {"pid": 42}, {"pid": None}, {"text": "a worker died"}])
def test_the_wrong_name_is_seen(wrong: dict[str, object]) -> None:
    assert faults(told(**wrong)) == [Fault.WRONG_RANK]


def test_more_than_a_second_is_late() -> None:
    assert faults(told(raised_s=KILLED_S + 1.01)) == [Fault.LATE]
    assert faults(told(raised_s=KILLED_S + 0.99)) == []


def test_an_error_before_the_death_is_early() -> None:
    assert faults(told(raised_s=KILLED_S - 0.01)) == [Fault.EARLY]


def test_of_two_dead_either_may_be_named() -> None:
    both = {"event": Event.TWO, "workers": 3, "victims": (2, 1)}
    assert faults(told(), **both) == []
    assert faults(told(rank=2, pid=42, text="rank 2 (pid 42) died"), **both) == []


def test_a_stopped_worker_is_named_at_the_deadline() -> None:
    for raised_s, expected in ((2.5, [Fault.EARLY]), (3.01, []), (3.9, []), (4.1, [Fault.LATE])):
        assert faults(told(raised_s=KILLED_S + raised_s), event=Event.STOP) == expected


def test_one_that_died_before_it_signed_may_be_missed_at_the_deadline_by_any_error_that_names_it() -> None:
    missed = told(
        where="forming",
        peer_lost=False,
        error="WorldError",
        rank=None,
        pid=None,
        text="rank 1 has not come",
        raised_s=KILLED_S + 3.1,
    )
    assert faults(missed, event=Event.FORMING) == []
    assert faults(replace(missed, text="rank 0 has not come"), event=Event.FORMING) == [Fault.NOT_TOLD]
    assert faults(replace(missed, text="rank 1 has not answered"), event=Event.FORMING) == [Fault.NOT_TOLD]
    assert faults(replace(missed, raised_s=KILLED_S + 4.1), event=Event.FORMING) == [Fault.NOT_TOLD]
    assert faults(replace(missed, raised_s=KILLED_S + 1.5), event=Event.FORMING) == [Fault.NOT_TOLD]
    assert faults(missed, event=Event.KILL) == [Fault.NOT_TOLD]
    assert faults(missed, event=Event.NEW_GROUP) == [Fault.NOT_TOLD]
    assert faults(missed, event=Event.FORMING, signed=True) == [Fault.NOT_TOLD]


def test_the_table_counts() -> None:
    result = Result(plan(0, 0), place="all_reduce_small", inside=True, strikes={1: KILLED_S}, told={0: told()})
    header, row, total = table([result]).splitlines()
    assert header.split()[:4] == ["kills", "inside", "survivors", "told"]
    assert row.split()[:5] == ["all_reduce_small", "1", "1", str(len(plan(0, 0).survivors)), "1"]
    assert total.split()[-2:] == ["20.0", "20.0"]  # milliseconds


# ------------------------------------------------------------------------------------------------------- what is left


def test_a_descriptor_a_thread_and_shared_memory_are_seen() -> None:
    before = holdings()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    read, write = os.pipe()
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        words = [text.split()[0] for text in differences(before, holdings())]
        assert sorted(words) == ["descriptor", "descriptor", "shared", "thread"]
    finally:
        end.set()
        thread.join()
        os.close(read)
        os.close(write)
        page.close()
    deadline_s = time.monotonic() + 10  # the kernel's thread ends a little after Python's
    while differences(before, holdings()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert differences(before, holdings()) == []


def test_a_file_in_dev_shm_is_seen_if_no_process_uses_it() -> None:
    before = shm_files()
    path = Path("/dev/shm") / f"lockstep-test-{os.getpid()}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert str(path) not in shm_left(before)
        assert str(path) in shm_left(before)
    finally:
        path.unlink()


# ------------------------------------------------------------------------------------------------------------ the tool


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Its scratch is in `folder`: a tool that is killed cannot clear it away."""
    command = [sys.executable, str(TOOL / "run.py"), *arguments]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(condition, wait_s: float = 80) -> None:  # type: ignore[no-untyped-def]
    end_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end_s, f"not so within {wait_s} s"
        time.sleep(0.05)


@pytest.mark.slow
def test_gloo_names_no_rank_and_the_campaign_is_red(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    tool = start(tmp_path, "--backend", "gloo", "--kills", "2", "--json", str(found))
    output, _ = tool.communicate(timeout=300)
    assert tool.returncode == 1, output
    assert "case 0: kill" in output
    assert "not told" in output
    assert "again: --seed 0 --only-case 0" in output
    results = json.loads(found.read_text())["results"]
    assert [result["case"]["number"] for result in results] == [0, 1]
    assert results[0]["findings"][0]["fault"] == "not told"
    # Gloo leaves nothing, and the survivors form a new group.
    assert {finding["fault"] for result in results for finding in result["findings"]} == {"not told"}
    assert not marked_processes(f"LOCKSTEP_CHAOS={tool.pid}-")


@pytest.mark.slow
def test_workers_end_with_the_tool_though_it_is_killed(tmp_path: Path) -> None:
    tool = start(tmp_path, "--backend", "gloo", "--kills", "500")
    mark = f"LOCKSTEP_CHAOS={tool.pid}-"
    try:
        wait_until(lambda: len(marked_processes(mark)) >= 3)
        tool.send_signal(signal.SIGKILL)
        tool.communicate(timeout=120)
        wait_until(lambda: not marked_processes(mark))
    finally:
        tool.kill()
        tool.wait()


@pytest.mark.parametrize("wrong", ["--kills 0", "--only-case -1", "--backend mpi"])
def test_wrong_arguments_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_arguments(wrong.split())
