"""`lockstep bench comm` runs with real workers, and what it makes of their times is exact. Speed is not tested."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.bench import collectives, comm as bench_comm, command as bench
from lockstep.bench.collectives import (
    COPY,
    GLOO,
    NCCL,
    SHM_GROUP,
    SHM_OWN,
    Case,
    CaseTimes,
    CommBench,
    CommBuffers,
    CommJob,
    Op,
    calls_in_row,
    check,
    fill,
    parse_size,
    prepare_arms,
    size_text,
    time_row,
)
from lockstep.bench.comm import (
    CommResult,
    CommSettings,
    MeasurableBackends,
    Panel,
    Point,
    SkippedArm,
    choose,
    skipped_lines,
    summarize,
)
from lockstep.bench.rounds import Estimate
from lockstep.bench.workers import BenchWorker, Workers
from lockstep.errors import LockstepError
from lockstep.report.table import render
from on_workers import on_workers, try_on_workers

CPU = torch.device("cpu")

# --------------------------------------------------------------------------------------------------- through the door


def run_comm(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep.bench.command", "comm", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.slow
def test_every_collective_is_measured_on_two_workers(tmp_path):
    found = tmp_path / "found.json"
    process = run_comm("--workers", "2", "--sizes", "4,12KiB", "--rounds", "2", "--json", str(found))
    table, progress = process.communicate(timeout=300)
    assert process.returncode == 0, progress
    assert "2 workers, broadcast, 12 KiB" in progress
    record = json.loads(found.read_text(), parse_constant=refuse_constant)
    assert record["complete"]
    assert [(c["op"], c["size_bytes"]) for c in record["cases"]] == [(op, size) for op in Op for size in (4, 12288)]
    arms = [COPY, GLOO, *((SHM_GROUP, SHM_OWN) if dist.is_backend_available("shm") else ())]
    assert ("shm is left out" in table) == (SHM_OWN not in arms)
    for case in record["cases"]:
        assert list(case["arms"]) == arms
        assert case["op"] in table
        for figure in case["arms"].values():
            assert len(figure["rounds_ms"]) == 2
            assert min(figure["rounds_ms"]) > 0
            assert figure["calls"] >= 1
        assert case["arms"][COPY]["copy_share"] is None
        assert case["arms"][GLOO]["copy_share"]["median"] > 0


@pytest.mark.slow
def test_no_process_outlives_a_killed_parent():
    process = run_comm("--workers", "2", "--sizes", "4", "--rounds", "100000")
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == "2 workers, all-reduce, 4 B":
            break
    assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    end = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end, "not gone within 30 s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ops", "all-reduce,gossip"], "'gossip' is not one of all-reduce, reduce-scatter, all-gather, broadcast"),
        (["--ops", "broadcast,broadcast"], "'broadcast' is named twice"),
        (["--workers", "1"], "1 is too few: a collective takes 2 workers or more"),
        (["--workers", "2,two"], "'two' is not a positive number"),
        (["--sizes", "4KB"], "'4KB' is not a size; write it like 4, 4KiB, 25MiB or 1GiB"),
        (["--sizes", "4,"], "'' is not a size"),
        (["--sizes", "6"], "'6' is not a positive multiple of 4 bytes"),
        (["--sizes", "1024,1KiB"], "'1024,1KiB' names a size twice"),
        (["--rounds", "0"], "'0' is not a positive number"),
        (["--plot", "found.pdf"], "--plot found.pdf: the name must end in .svg or .png"),
        (["--plot", "no/such/folder/found.svg"], "no/such/folder does not exist"),
        (["--json", "no/such/folder/found.json"], "no/such/folder does not exist"),
    ],
)
def test_wrong_arguments(arguments, says, capsys):
    with pytest.raises(SystemExit) as ending:
        bench.main(["comm", *arguments])
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4", 4), ("4B", 4), ("4 KiB", 4096), ("4kib", 4096), ("25MiB", 26214400), (" 1GiB ", 2**30), ("004", 4)],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "KiB", "-4", "4.5KiB", "4K", "4KiBB", "four", "4 4", "٤", "0", "0MiB", "2", "7B"])
def test_no_other_sizes(text):
    with pytest.raises(ValueError, match="is not a"):
        parse_size(text)


def test_sizes_are_written():
    assert [size_text(size) for size in (4, 1020, 1024, 4096, 1536, 25 * 2**20, 2**30)] == [
        "4 B", "1020 B", "1 KiB", "4 KiB", "1.5 KiB", "25 MiB", "1 GiB",
    ]  # fmt: skip
    assert all(parse_size(size_text(size)) == size for size in bench_comm.SIZES)


def test_the_sizes_that_are_measured():
    assert bench_comm.SIZES[:3] == (4, 16, 64)
    assert bench_comm.SIZES[-3:] == (25 * 2**20, 64 * 2**20, 256 * 2**20)
    assert {4096, 25 * 2**20} <= set(bench_comm.SIZES) & set(bench_comm.QUICK_SIZES)
    assert set(bench_comm.QUICK_SIZES) <= set(bench_comm.SIZES)


# --------------------------------------------------------------------------------------------------------- collectives


def test_shapes_of_a_case():
    def shape(op: Op, workers: int, size_bytes: int) -> tuple[int, int, int]:
        case = Case(op, workers, size_bytes)
        return case.whole, case.sent, case.received

    assert shape(Op.ALL_REDUCE, 3, 40) == (10, 10, 10)
    assert shape(Op.BROADCAST, 3, 40) == (10, 10, 10)
    assert shape(Op.REDUCE_SCATTER, 2, 40) == (10, 10, 5)
    assert shape(Op.ALL_GATHER, 2, 40) == (10, 5, 10)
    assert shape(Op.REDUCE_SCATTER, 4, 40) == (12, 12, 3)  # rounded up: all have as many
    assert shape(Op.ALL_GATHER, 4, 4) == (4, 1, 4)


def received(case: Case, rank: int) -> torch.Tensor:
    pieces = collectives.pieces(torch.empty(case.received), share=case.share)
    return torch.cat([collectives.expected(case, rank, first, piece) for first, piece in pieces])


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_what_must_come_out(op, workers):
    case = Case(op, workers, 4 * 1000)
    inputs = [torch.arange(case.sent) % 251 + rank for rank in range(workers)]
    for rank in range(workers):
        if op is Op.ALL_GATHER:
            right = torch.cat(inputs)
        elif op is Op.BROADCAST:
            right = inputs[0]
        else:
            right = torch.stack(inputs).sum(0)
        if op is Op.REDUCE_SCATTER:
            right = right.view(workers, -1)[rank]
        assert torch.equal(received(case, rank), right.float())


@pytest.mark.parametrize("op", Op)
def test_a_wrong_element_is_found(op, monkeypatch):
    monkeypatch.setattr(collectives, "PIECE", 64)  # several pieces, and a short one
    case = Case(op, 2, 4 * 400)
    right = received(case, 1)
    check(case, CommBuffers(right, right), 1, arm="gloo")
    right[150] += 1
    value = int(right[150])
    with pytest.raises(
        LockstepError, match=f"wrong result on gloo: worker 1 has {value} at position 150, and {value - 1}"
    ):
        check(case, CommBuffers(right, right), 1, arm="gloo")


def test_buffers_are_filled_anew():
    case = Case(Op.ALL_GATHER, 2, 4 * 600)
    buffers = collectives.make_buffers(case, torch.zeros)
    fill(buffers, 1)
    assert torch.equal(buffers.sent, (torch.arange(300) % 251 + 1).float())
    assert set(buffers.received.tolist()) == {-1.0}
    together = collectives.make_buffers(replace(case, op=Op.BROADCAST), torch.zeros)
    fill(together, 0)
    assert together.received is together.sent
    assert together.sent[250:253].tolist() == [250, 0, 1]


# -------------------------------------------------------------------------------------------------------------- timing


def test_calls_in_a_row():
    assert calls_in_row(1.0) == 1
    assert calls_in_row(0.02) == 2
    assert calls_in_row(0.0001) == 300
    assert calls_in_row(1e-6) == 2000
    assert calls_in_row(0.0) == 2000


def test_the_first_call_of_a_row_is_not_timed():
    calls = []
    took_ms = time_row(lambda: (calls.append(1), time.sleep(0.2 if len(calls) == 1 else 0.0)), 4, lambda: None)
    assert len(calls) == 5
    assert took_ms < 40


def bench_of(rank: int, size: int, groups: dict[str, object]) -> CommBench:
    return CommBench(BenchWorker(rank, size, 0, 30, SimpleNamespace(send=lambda message: None)), CPU, groups)


def arms_of_a_poor_backend(rank: int, size: int) -> tuple[set[str], dict[str, str], bool]:
    """Gloo in the place of shm: it makes no tensors."""
    arm_calls = prepare_arms(
        Case(Op.ALL_REDUCE, size, 400), bench_of(rank, size, {"gloo": dist.new_group(), "shm": dist.new_group()})
    )
    return set(arm_calls.calls), arm_calls.left_out, COPY in arm_calls.calls


@pytest.mark.slow
def test_an_arm_that_cannot_be_measured_is_left_out():
    outcomes = on_workers(arms_of_a_poor_backend, 2)
    why = {SHM_GROUP: "worker 0: the group makes no tensors on cpu"}
    assert outcomes == [({COPY, GLOO, SHM_OWN}, why, True), ({GLOO, SHM_OWN}, why, False)]


def attempt_that_fails_on_one(rank: int, size: int) -> tuple[object, str]:
    def action() -> str:
        if rank == 1:
            raise NotImplementedError("not on this worker\nand a stack trace")
        return "fine"

    bench = bench_of(rank, size, {})
    assert bench.attempt(lambda: "fine") == ("fine", "")
    return bench.attempt(action)


@pytest.mark.slow
def test_workers_agree_on_what_failed():
    assert on_workers(attempt_that_fails_on_one, 2) == [(None, "worker 1: not on this worker")] * 2


def arms_with_a_wrong_result(rank: int, size: int) -> None:
    collectives.dist.all_reduce = lambda tensor, group: tensor.add_(3)
    prepare_arms(Case(Op.ALL_REDUCE, size, 400), bench_of(rank, size, {"gloo": dist.new_group()}))


def test_a_wrong_result_ends_the_benchmark():
    for rank, outcome in enumerate(try_on_workers(arms_with_a_wrong_result, 2)):
        assert (
            f"2 workers, all-reduce, 400 B: wrong result on gloo: worker {rank} has {rank + 3} at position 0, and 1"
            in outcome
        )


# ------------------------------------------------------------------------------------------------------------- workers


def work_that_fails(worker: BenchWorker, job: str) -> None:
    worker.send("the hard part")
    worker.join()
    if worker.rank == 1 and job == "raise":
        raise ArithmeticError("one and one is three")
    if worker.rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("raise", "the hard part: worker 1 of 2 failed(.|\n)*ArithmeticError: one and one is three"),
        ("exit", "the hard part: worker 1 of 2 failed\nit ended with status 3 without an error message"),
    ],
    ids=["raise", "exit"],
)
def test_the_worker_that_failed_is_named(job, says, capsys):
    with Workers(2, work_that_fails, job, wait_s=30) as workers, pytest.raises(LockstepError, match=says):
        list(workers.results())
    assert capsys.readouterr().err == "the hard part\n"


def work_and_fall_silent(worker: BenchWorker, job: str) -> None:
    if worker.rank == 0:
        worker.send(job)
        worker.send(1)
    time.sleep(1000)


@pytest.mark.slow
def test_silence_has_a_deadline():
    with Workers(2, work_and_fall_silent, "thinking", wait_s=30) as workers:
        results = workers.results()
        assert next(results) == (0, 1)
        workers.wait_s = 0.5
        with pytest.raises(LockstepError, match=r"thinking: no worker sent a message for 0\.5 s"):
            next(results)


# ---------------------------------------------------------------------------------------------------- figures and rows

CASE = Case(Op.ALL_REDUCE, 2, 4096)


def case_times(rank: int, case: Case = CASE) -> CaseTimes:
    """Worker 1 is slower; the third round is ten times slower for all."""
    slow = 1.0 + rank
    times = {
        arm: [ms * slow, ms * slow, 10 * ms * slow] for arm, ms in {GLOO: 4.0, SHM_GROUP: 0.5, SHM_OWN: 1.0}.items()
    }
    return CaseTimes(
        case, {COPY: 9, GLOO: 1, SHM_GROUP: 4, SHM_OWN: 2}, times | ({COPY: [0.5, 0.25, 5.0]} if rank == 0 else {}), {}
    )


def test_figures_are_those_of_the_slowest_worker():
    found = summarize([case_times(0), case_times(1)])
    assert list(found) == [COPY, GLOO, SHM_GROUP, SHM_OWN]
    assert found[COPY] == CommResult(Estimate(0.5, 0.25, 5.0), None, None, 9, [0.5, 0.25, 5.0])
    assert found[GLOO].call_ms == Estimate(8.0, 8.0, 80.0)
    assert found[GLOO].gloo_over is None
    shm = found[SHM_GROUP]
    assert shm.rounds_ms == [1.0, 1.0, 10.0]
    assert shm.gloo_over == Estimate(8.0, 8.0, 8.0)  # within each round
    assert shm.copy_share == Estimate(0.5, 0.25, 0.5)
    assert shm.calls == 4
    assert found[SHM_OWN].gloo_over == Estimate(4.0, 4.0, 4.0)


def test_the_table():
    found = {CASE: summarize([case_times(0), case_times(1)])}
    other = replace(CASE, size_bytes=2**20)
    found[other] = {arm: figure for arm, figure in found[CASE].items() if arm != SHM_GROUP}
    table = render(bench_comm.columns_of(bench_comm.arms_in(found)), list(bench_comm.rows_of(found)))
    assert table.splitlines() == [
        "op          workers   size  copy ms  gloo ms  shm ms  shm own ms  gloo / shm         gloo / shm own     "
        "copy / shm  copy / shm own",
        "all-reduce        2  4 KiB   0.5000    8.000   1.000       2.000  8.00 [8.00, 8.00]  4.00 [4.00, 4.00]  "
        "      50 %            25 %",
        "all-reduce        2  1 MiB   0.5000    8.000               2.000                     4.00 [4.00, 4.00]  "
        "                      25 %",
    ]


def test_the_table_without_shm():
    found = {CASE: {arm: f for arm, f in summarize([case_times(0), case_times(1)]).items() if arm in (COPY, GLOO)}}
    assert [column.title for column in bench_comm.columns_of(bench_comm.arms_in(found))] == [
        "op", "workers", "size", "copy ms", "gloo ms",
    ]  # fmt: skip
    assert list(bench_comm.rows_of(found)) == [("all-reduce", "2", "4 KiB", "0.5000", "8.000")]


def test_milliseconds():
    values = [0.00123, 0.99, 1.0, 99.9, 100.0, 1234.56]
    assert [bench_comm.milliseconds(v) for v in values] == ["0.0012", "0.9900", "1.000", "99.900", "100.0", "1234.6"]


def test_which_backends_are_measured():
    every = ("gloo", "shm", "nccl")
    assert choose(every, device="cpu", workers=2, gpus=0) == MeasurableBackends(("gloo", "shm"), ())
    assert choose(every, device="cuda", workers=2, gpus=2) == MeasurableBackends(("gloo", "nccl", "shm"), ())
    assert choose(every, device="cuda", workers=4, gpus=2) == MeasurableBackends(
        ("gloo", "shm"), ("nccl is left out with 4 workers: it wants a GPU for each, and sees 2",)
    )
    assert choose(("gloo",), device="cpu", workers=2, gpus=0) == MeasurableBackends(
        ("gloo",), ("shm is left out: torch.distributed does not have it here",)
    )


def test_the_arms_of_a_job():
    assert CommJob((CASE,), ("gloo", "shm"), 1, "cpu").arms == [COPY, GLOO, SHM_GROUP, SHM_OWN]
    assert CommJob((CASE,), ("gloo", "nccl"), 1, "cuda").arms == [COPY, GLOO, NCCL]


def test_a_busy_machine_is_told():
    assert list(bench_comm.disturbance(0.4, 2)) == []
    assert list(bench_comm.disturbance(6.06, 2)) == [
        "load average at the start 6.1: other programs took part; measure again when the machine is quiet"
    ]


def test_one_line_for_all_cases_with_the_same_reason():
    left_out = [SkippedArm(SHM_GROUP, replace(CASE, size_bytes=size), "no room") for size in (4, 4096)]
    left_out.insert(1, SkippedArm(GLOO, replace(CASE, op=Op.BROADCAST), "cannot"))
    assert list(skipped_lines(left_out)) == [
        "shm, group memory is left out of [2 workers, all-reduce, 4 B] and 1 more: no room",
        "gloo is left out of [2 workers, broadcast, 4 KiB]: cannot",
    ]


def test_the_record_says_whether_it_is_complete():
    settings = CommSettings((Op.ALL_REDUCE,), (2,), (4096, 8192), 3, "cpu", 30)
    found = {CASE: summarize([case_times(0), case_times(1)])}
    record = bench_comm.record_of(settings, found, ["a note"])
    assert record["complete"] is False
    assert record["notes"] == ["a note"]
    found[replace(CASE, size_bytes=8192)] = found[CASE]
    assert bench_comm.record_of(settings, found, [])["complete"] is True


def test_vector_bytes_are_those_that_were_moved():
    case = Case(Op.ALL_GATHER, 4, 4)
    settings = CommSettings((case.op,), (4,), (4,), 3, "cpu", 30)
    record = bench_comm.record_of(settings, {case: {}}, [])
    assert (record["cases"][0]["size_bytes"], record["cases"][0]["vector_bytes"]) == (4, 16)


# ---------------------------------------------------------------------------------------------------------------- plot


def test_a_panel_for_each_operation_and_number_of_workers():
    of_case = summarize([case_times(0), case_times(1)])
    found = {Case(op, n, size): of_case for n in (2, 4) for op in (Op.ALL_REDUCE, Op.BROADCAST) for size in (4, 16)}
    panels = bench_comm.panels_of(found)
    assert [panel.title for panel in panels] == [
        "all-reduce, 2 workers", "broadcast, 2 workers", "all-reduce, 4 workers", "broadcast, 4 workers",
    ]  # fmt: skip
    assert list(panels[0].lines) == [COPY, GLOO, SHM_GROUP, SHM_OWN]
    assert panels[0].lines[GLOO] == [Point(4, Estimate(8.0, 8.0, 80.0)), Point(16, Estimate(8.0, 8.0, 80.0))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", bench_comm.PLOT_KINDS)
def test_a_plot_is_drawn(kind, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"found{kind}"
    assert bench_comm.problem_with_plot(path) == ""
    line = [Point(size, Estimate(size, size / 2, size * 2)) for size in (4, 64)]
    bench_comm.draw_plot([Panel(f"panel {n}", {COPY: line, GLOO: line}) for n in range(3)], path, columns=2)
    assert path.read_bytes().startswith(b"<?xml" if kind == ".svg" else b"\x89PNG")


def test_a_missing_matplotlib_is_said_before_measuring(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_comm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ending:
        bench.main(["comm", "--plot", str(tmp_path / "found.svg")])
    assert ending.value.code == 2
    assert "matplotlib is not installed; `pip install 'lockstep-ddp[plot]'` brings it" in capsys.readouterr().err
