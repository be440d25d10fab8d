"""`lockstep bench hosts`: a collective over several hosts, on `hierarchy` and on Gloo, and the bytes that leave a host.

The hosts are network namespaces of this machine (network_namespaces.py). Every arm runs in every round; its turn is a
row of calls, and takes as long as on the slowest worker. The bytes are those that the kernel counts on the link of each
host during the calls, network headers included; the table shows the host that sends most.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep.bench.collectives import Case, Op, calls_in_row, check, fill, make_buffers, make_call, size_text
from lockstep.bench.network_namespaces import NamespaceHost, VirtualHosts, sent_bytes
from lockstep.bench.rounds import Estimate, RoundSync, estimate, interleave, paired_ratio, show, slowest, time_calls
from lockstep.bench.workers import BenchWorker, Workers, largest
from lockstep.report.table import columns, render

GLOO, HIERARCHY, EXACT = "gloo", "hierarchy", "hierarchy, exact"
ARMS = (GLOO, HIERARCHY, EXACT)
SIZES = (4 * 2**10, 2**20, 25 * 2**20)
QUICK_OPS, QUICK_SIZES = (Op.ALL_REDUCE,), (25 * 2**20,)
ROW_S = 0.6
MAX_CALLS = 100


@dataclass(frozen=True)
class HostsSettings:
    hosts: int
    workers: int  # on each host
    mbit: int
    ops: tuple[Op, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int
    wait_s: float = 120.0  # the longest wait for a message of a worker

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(Case(op, self.hosts * self.workers, size) for op in self.ops for size in self.sizes_bytes)


@dataclass(frozen=True)
class HostsJob:
    """The job; equal on all workers."""

    settings: HostsSettings
    hosts: tuple[NamespaceHost, ...]


@dataclass(frozen=True)
class HostsCaseTimes:
    """What one worker measured in one case: time and sent bytes of one call, for each arm and round."""

    case: Case
    times_ms: dict[str, list[float]]
    sent_bytes: dict[str, list[float]]


@dataclass(frozen=True)
class HostsResult:
    call_ms: Estimate
    gloo_over: Estimate  # Gloo's time over this arm's: how many times faster this arm is
    sent_bytes: float  # of the host that sends most
    link_bytes: float | None  # sent bytes that the algorithm needs
    rounds_ms: list[float]


def planned_bytes(case: Case, arm: str, hosts: int) -> float | None:
    """Bytes that the busiest host has to send, without headers; None where no formula is known here."""
    size, share = case.size_bytes, (hosts - 1) / hosts
    if arm != GLOO:
        return {
            Op.ALL_REDUCE: 2 * share * size,
            Op.REDUCE_SCATTER: share * size,
            Op.ALL_GATHER: share * size,
            Op.BROADCAST: size if hosts == 2 else None,
        }[case.op]
    # A ring over all workers passes through each host once.
    return 2 * (case.workers - 1) / case.workers * size if case.op is Op.ALL_REDUCE else None


# ---------------------------------------------------------------------------------------------------- inside a worker


def work(worker: BenchWorker, job: HostsJob) -> None:
    torch.set_num_threads(1)
    worker.join_on_host(job.hosts, worker.rank // job.settings.workers)
    groups = {GLOO: dist.group.WORLD}
    for arm, exact in ((HIERARCHY, "0"), (EXACT, "1")):
        os.environ["LOCKSTEP_EXACT"] = exact
        groups[arm] = dist.new_group(backend="hierarchy", timeout=worker.timeout)
    for case in job.settings.cases:
        worker.send(str(case))
        worker.send(measure(case, worker, groups, job.settings.rounds))
    worker.leave()


def measure(case: Case, worker: BenchWorker, groups: dict[str, Any], rounds: int) -> HostsCaseTimes:
    buffers = make_buffers(case, torch.empty)
    calls = {arm: make_call(case, buffers, group) for arm, group in groups.items()}
    row = {}
    for arm, call in calls.items():
        fill(buffers, worker.rank)
        call()
        check(case, buffers, worker.rank, arm=arm)
        buffers.sent.zero_()  # so that no row of sums overflows
        dist.barrier()
        row[arm] = calls_in_row(largest(1e-3 * time_calls(call, 1)), row_s=ROW_S, most=MAX_CALLS)
    turns = {arm: partial(time_row, call, row[arm]) for arm, call in calls.items()}
    sync = RoundSync(barrier=dist.barrier, report=lambda text: worker.send(""))  # shows that this worker is alive
    measured = interleave(list(calls), turns, rounds, sync)
    times, sent = ({arm: [one[i] for one in values] for arm, values in measured.items()} for i in (0, 1))
    return HostsCaseTimes(case, times, sent)


def time_row(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Milliseconds, and bytes that this host has sent, per call."""
    before = sent_bytes()
    took_ms = time_calls(call, calls)
    dist.barrier()  # all workers of this host have sent their data
    return took_ms, (sent_bytes() - before) / calls


# -------------------------------------------------------------------------------------------------- outside of workers


def summarize(workers: Sequence[HostsCaseTimes], hosts: int) -> dict[str, HostsResult]:
    times = slowest([worker.times_ms for worker in workers])
    return {
        arm: HostsResult(
            call_ms=estimate(times[arm]),
            gloo_over=paired_ratio(times[GLOO], times[arm]),
            sent_bytes=max(estimate(worker.sent_bytes[arm]).median for worker in workers),
            link_bytes=planned_bytes(workers[0].case, arm, hosts),
            rounds_ms=times[arm],
        )
        for arm in ARMS
    }


COLUMNS = columns("op", ">size", "arm", ">ms", "gloo / this", ">sent MiB", ">by plan", ">link ms")


def rows_of(case: Case, results: dict[str, HostsResult], mbit: int) -> Iterator[tuple[str, ...]]:
    for arm, result in results.items():
        plan = result.link_bytes
        yield (
            case.op if arm == GLOO else "",
            size_text(case.size_bytes) if arm == GLOO else "",
            arm,
            f"{result.call_ms.median:.2f}",
            "" if arm == GLOO else result.gloo_over.text(digits=2),
            f"{result.sent_bytes / 2**20:.3f}",
            "" if plan is None else f"{plan / 2**20:.3f}",
            "" if plan is None else f"{8e-3 * plan / mbit:.2f}",
        )


def run(settings: HostsSettings, json_path: Path | None) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns that the hosts have no names
    size = settings.hosts * settings.workers
    with VirtualHosts(hosts=settings.hosts, mbit=settings.mbit) as virtual:
        with Workers(size, work, HostsJob(settings, virtual.hosts), wait_s=settings.wait_s) as workers:
            times = list(workers.results_by(lambda times: times.case))
    results = {case_times[0].case: summarize(case_times, settings.hosts) for case_times in times}
    head = (
        f"{settings.hosts} hosts on this machine, {settings.workers} workers each, links of {settings.mbit} Mbit/s; "
        f"torch {torch.__version__}, {settings.rounds} rounds"
    )
    legend = [
        "gloo / this  median of the ratios within each round, and its 95 % interval",
        "sent MiB     by the host that sends most, for one call, headers included",
        "by plan      of an all-reduce over H hosts 2(H-1)/H of the message, whatever the number of workers;",
        "             of Gloo's ring over N workers 2(N-1)/N",
        "link ms      that many bytes at the full speed of the link",
    ]
    record = {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "settings": asdict(settings),
        "cases": [
            {"op": case.op, "size_bytes": case.size_bytes, "arms": {a: asdict(f) for a, f in arms.items()}}
            for case, arms in results.items()
        ],
    }
    rows = [row for case, arms in results.items() for row in rows_of(case, arms, settings.mbit)]
    show(head, render(COLUMNS, rows), legend, record, json_path)
    return 0
