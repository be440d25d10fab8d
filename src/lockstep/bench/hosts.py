"""`lockstep bench hosts`: a collective over several hosts, on `hierarchy` and on Gloo, and the bytes that leave a host.

The hosts are made on this machine (rig.py). Every arm has its turn in every round; a turn is a row of calls, and takes
as long as on its slowest worker. The bytes are those the kernel counts on the link of each host while its workers call,
headers of the network included; the table shows the host that sends most.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import lockstep
from lockstep.bench.collectives import Case, Op, call_of, check, fill, make_buffers, size_text
from lockstep.bench.network_namespaces import INTERFACE, Host, Rig, sent_bytes
from lockstep.bench.rounds import Estimate, estimate, order_of, paired_ratio, slowest
from lockstep.bench.workers import Seat, Workers
from lockstep.report.table import Column, render

GLOO, HIERARCHY, EXACT = "gloo", "hierarchy", "hierarchy, exact"
ARMS = (GLOO, HIERARCHY, EXACT)
SIZES = (4 * 2**10, 2**20, 25 * 2**20)
QUICK_OPS, QUICK_SIZES = (Op.ALL_REDUCE,), (25 * 2**20,)
STORE_PORT = 29500  # nobody else is on these hosts
ROW_S = 0.6
MOST_CALLS = 100


@dataclass(frozen=True)
class Settings:
    hosts: int
    workers: int  # on each host
    mbit: int
    ops: tuple[Op, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int
    wait_s: float = 120.0  # the longest wait for a sign of life

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(Case(op, self.hosts * self.workers, size) for op in self.ops for size in self.sizes_bytes)


@dataclass(frozen=True)
class Job:
    """What all workers are told."""

    settings: Settings
    hosts: tuple[Host, ...]

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank // self.settings.workers]


@dataclass(frozen=True)
class CaseFound:
    """What one worker found out about one case: of each arm and round, the time and the bytes of one call."""

    case: Case
    times_ms: dict[str, list[float]]
    sent_bytes: dict[str, list[float]]


@dataclass(frozen=True)
class ArmFigures:
    call_ms: Estimate
    gloo_over: Estimate  # Gloo's time over this arm's: how many times faster it is
    sent_bytes: float  # by the host that sends most
    link_bytes: float | None  # what it should be
    rounds_ms: list[float]


def bytes_by_plan(case: Case, arm: str, hosts: int) -> float | None:
    """What the busiest host has to send, without headers; None where it has not been worked out."""
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


def work(seat: Seat, job: Job) -> None:
    torch.set_num_threads(1)
    job.host_of(seat.rank).enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = TCPStore(job.hosts[0].address, STORE_PORT, is_master=seat.rank == 0, timeout=seat.patience)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=seat.patience)
    groups = {GLOO: dist.group.WORLD}
    for arm, exact in ((HIERARCHY, "0"), (EXACT, "1")):
        os.environ["LOCKSTEP_EXACT"] = exact
        groups[arm] = dist.new_group(backend="hierarchy", timeout=seat.patience)
    for case in job.settings.cases:
        seat.tell(str(case))
        seat.tell(measure(case, seat, groups, job.settings.rounds))
    seat.leave()


def measure(case: Case, seat: Seat, groups: dict[str, Any], rounds: int) -> CaseFound:
    buffers = make_buffers(case, torch.empty)
    calls = {arm: call_of(case, buffers, group) for arm, group in groups.items()}
    row = {}
    for arm, call in calls.items():
        fill(buffers, seat.rank)
        call()
        check(case, buffers, seat.rank, arm=arm)
        buffers.sent.zero_()  # so that no row of sums overflows
        row[arm] = calls_in_row(call)
    found = CaseFound(case, {arm: [] for arm in calls}, {arm: [] for arm in calls})
    for number in range(rounds):
        seat.tell("")  # a sign of life
        for arm in order_of(list(calls), number):
            dist.barrier()
            before, started = sent_bytes(), time.perf_counter()
            for _ in range(row[arm]):
                calls[arm]()
            found.times_ms[arm].append(1e3 * (time.perf_counter() - started) / row[arm])
            dist.barrier()  # all workers of this host have sent what they had to send
            found.sent_bytes[arm].append((sent_bytes() - before) / row[arm])
    return found


def calls_in_row(call: Callable[[], object]) -> int:
    """Enough to fill ROW_S, the same on every worker."""
    dist.barrier()
    started = time.perf_counter()
    call()
    call_s = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(call_s, op=dist.ReduceOp.MAX)
    return min(ceil(ROW_S / call_s.item()), MOST_CALLS)


# -------------------------------------------------------------------------------------------------- outside of workers


def figures(found: Sequence[CaseFound], hosts: int) -> dict[str, ArmFigures]:
    times = slowest([worker.times_ms for worker in found])
    return {
        arm: ArmFigures(
            call_ms=estimate(times[arm]),
            gloo_over=paired_ratio(times[GLOO], times[arm]),
            sent_bytes=max(estimate(worker.sent_bytes[arm]).median for worker in found),
            link_bytes=bytes_by_plan(found[0].case, arm, hosts),
            rounds_ms=times[arm],
        )
        for arm in ARMS
    }


COLUMNS = (
    Column("op"),
    Column("size", right=True),
    Column("arm"),
    Column("ms", right=True),
    Column("gloo / this"),
    Column("sent MiB", right=True),
    Column("by plan", right=True),
    Column("link ms", right=True),
)


def rows_of(case: Case, found: dict[str, ArmFigures], mbit: int) -> Iterator[tuple[str, ...]]:
    for arm, figure in found.items():
        faster, plan = figure.gloo_over, figure.link_bytes
        yield (
            case.op if arm == GLOO else "",
            size_text(case.size_bytes) if arm == GLOO else "",
            arm,
            f"{figure.call_ms.median:.2f}",
            "" if arm == GLOO else f"{faster.median:.2f} [{faster.low:.2f}, {faster.high:.2f}]",
            f"{figure.sent_bytes / 2**20:.3f}",
            "" if plan is None else f"{plan / 2**20:.3f}",
            "" if plan is None else f"{8e-3 * plan / mbit:.2f}",
        )


def run(settings: Settings, json_path: Path | None) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it says that the hosts have no names
    found: dict[Case, list[CaseFound]] = {case: [] for case in settings.cases}
    size = settings.hosts * settings.workers
    with Rig(hosts=settings.hosts, mbit=settings.mbit) as rig:
        with Workers(size, work, Job(settings, rig.hosts), wait_s=settings.wait_s) as workers:
            for _, message in workers.results():
                found[message.case].append(message)
    of_case = {case: figures(answers, settings.hosts) for case, answers in found.items()}
    print(
        f"{settings.hosts} hosts on this machine, {settings.workers} workers each, links of {settings.mbit} Mbit/s; "
        f"torch {torch.__version__}, {settings.rounds} rounds\n"
    )
    print(render(COLUMNS, [row for case, arms in of_case.items() for row in rows_of(case, arms, settings.mbit)]))
    print(
        "\ngloo / this  median of the ratios within each round, and its 95 % interval"
        "\nsent MiB     by the host that sends most, for one call, headers included"
        "\nby plan      of an all-reduce over H hosts 2(H-1)/H of the message, whatever the number of workers;"
        "\n             of Gloo's ring over N workers 2(N-1)/N"
        "\nlink ms      that many bytes at the full speed of the link"
    )
    if json_path:
        record = {
            "lockstep": lockstep.__version__,
            "torch": torch.__version__,
            "settings": asdict(settings),
            "cases": [
                {"op": case.op, "size_bytes": case.size_bytes, "arms": {a: asdict(f) for a, f in arms.items()}}
                for case, arms in of_case.items()
            ],
        }
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    return 0
