"""`lockstep bench tuner`: is `Run(grad_comm="auto")` as fast as the best fixed choice?

Every model is trained by real Runs over links of several speeds: with each kind that "auto" chooses from, before and
after a Run with "auto". The links are those of network namespaces (network_namespaces.py), one worker on each of two
hosts; "shm" is two workers on one host.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.bench.models import OPTIMIZERS, WORKLOADS, LabeledBatch
from lockstep.bench.network_namespaces import NamespaceHost, VirtualHosts
from lockstep.bench.rounds import show
from lockstep.bench.run_step import loss
from lockstep.bench.workers import BenchWorker, Workers
from lockstep.report.table import columns, render
from lockstep.step.grad_comm_tuner import KINDS

AUTO = "auto"
SHM = "shm"
SETTLING = 3  # steps with what was chosen that are not timed
TIMED = 10  # steps of a Run
TIMED_IF_SHORT = 60
SHORT = ("small", "tiny")  # models with steps of some milliseconds, which vary most
WORKERS = 2


@dataclass(frozen=True)
class TunerSettings:
    models: tuple[str, ...]
    links: tuple[str, ...]  # Mbit/s, or "shm"
    wait_s: float = 600.0


@dataclass(frozen=True)
class TunerJob:
    models: tuple[str, ...]
    hosts: tuple[NamespaceHost, ...]  # none: one host


@dataclass(frozen=True)
class TunerTimes:
    """What one Run took for a step."""

    model: str
    arm: str
    step_s: float  # the median
    choice: str  # at the end


def work(worker: BenchWorker, job: TunerJob) -> None:
    torch.set_num_threads(1)
    if job.hosts:
        worker.join_on_host(job.hosts, worker.rank, "hierarchy")
    else:
        worker.join(SHM)
    for model in job.models:
        arms = [kind.value for kind in KINDS]
        for arm in (*arms, AUTO, *reversed(arms)):
            worker.send(f"{model}: {arm}")
            worker.send(measure(model, arm))
    worker.leave()


def measure(model: str, arm: str) -> TunerTimes:
    """Train with a new Run, and return the median time of its last steps."""
    workload = WORKLOADS[model]
    batches = [workload.batch(torch.Generator().manual_seed(rank)) for rank in range(WORKERS)]
    data = TensorDataset(torch.cat([one.inputs for one in batches]), torch.cat([one.targets for one in batches]))
    timed, times, choice, settled = TIMED_IF_SHORT if model in SHORT else TIMED, list[float](), arm, 0
    with lockstep.Run(seed=7, progress=False, trace=False, grad_comm=arm) as run:
        wrapped = run.replicate(workload.build())
        shuffled = run.batches(data, global_batch_size=len(data), shards=WORKERS, epochs=None)
        for batch in run.train(shuffled, OPTIMIZERS[workload.optimizer](wrapped)):
            began_s = time.perf_counter()
            run.step(lambda m, b: loss(m, LabeledBatch(*b)), batch)
            assert run._loop.plan is not None
            tuner = run._loop.plan.tuner
            choice, settled = tuner.current.value, settled + (tuner.chosen is not None)
            if settled > SETTLING:
                times.append(time.perf_counter() - began_s)
            if len(times) == timed:
                break
    return TunerTimes(model, arm, statistics.median(times), choice)


# -------------------------------------------------------------------------------------------------- outside of workers


COLUMNS = columns("model", "link", *(f">{kind.value} ms" for kind in KINDS), ">auto ms", "chosen", ">auto / best")


def row_of(model: str, link: str, results: Sequence[TunerTimes]) -> tuple[str, ...]:
    """Each fixed kind was measured twice; what counts is the mean of both."""
    step_s = {arm: statistics.mean(r.step_s for r in results if r.arm == arm) for arm in {r.arm for r in results}}
    best = min(step_s[kind.value] for kind in KINDS)
    choice = next(result.choice for result in results if result.arm == AUTO)
    named = link if link == SHM else f"{link} Mbit/s"
    figures = [f"{1e3 * step_s[arm]:.1f}" for arm in (*(kind.value for kind in KINDS), AUTO)]
    return (model, named, *figures, choice, f"{step_s[choice] / best:.3f}")


def run(settings: TunerSettings, json_path: Path | None) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns that the hosts have no names
    rows, record = list[tuple[str, ...]](), list[dict[str, Any]]()
    for link in settings.links:
        with ExitStack() as resources:
            hosts: tuple[NamespaceHost, ...] = ()
            if link != SHM:
                hosts = resources.enter_context(VirtualHosts(hosts=WORKERS, mbit=int(link))).hosts
            job = TunerJob(settings.models, hosts)
            workers = resources.enter_context(Workers(WORKERS, work, job, wait_s=settings.wait_s))
            found = [result for rank, result in workers.results() if rank == 0]
        for model in settings.models:
            results = [result for result in found if result.model == model]
            rows.append(row_of(model, link, results))
            record += [asdict(result) | {"link": link} for result in results]
    timed = f"medians of {TIMED} steps, {TIMED_IF_SHORT} if they are short"
    head = f"Run(grad_comm=) on {WORKERS} workers, torch {torch.__version__}; {timed}"
    legend = ["auto / best  the fixed kind that auto has chosen, over the fastest fixed kind, in this run"]
    show(head, render(COLUMNS, rows), legend, {"results": record}, json_path)
    return 0
