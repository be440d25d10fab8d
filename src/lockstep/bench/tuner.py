"""`lockstep bench tuner`: is what `Run(grad_comm="auto")` chooses as fast as the best fixed choice?

Every model is trained by a real Run over links of several speeds. When it has chosen, the same Run goes on with each
kind in turns, for longer than its trial took: since the speed of a machine changes within seconds, kinds are compared
within rounds of such turns. The links are those of network namespaces (network_namespaces.py), one worker on each of
two hosts; "shm" is two workers on one host.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.bench.models import OPTIMIZERS, WORKLOADS, LabeledBatch
from lockstep.bench.network_namespaces import NamespaceHost, VirtualHosts
from lockstep.bench.rounds import paired_ratio, show
from lockstep.bench.run_step import loss
from lockstep.bench.workers import BenchWorker, Workers
from lockstep.report.table import columns, render
from lockstep.step.grad_comm_tuner import KINDS, step_times
from lockstep.step.run_options import GradComm

SHM = "shm"
ROUNDS = 25
MOST_S = 60.0  # of all rounds, if they all took as long as with the kind that was chosen; then there are fewer
LEAST_ROUNDS = 8
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
class TunerChoice:
    """What one Run has chosen, and its step times afterwards: in each round the median of each kind, in seconds."""

    model: str
    choice: str
    rounds: list[dict[str, float]]


def work(worker: BenchWorker, job: TunerJob) -> None:
    torch.set_num_threads(1)
    if job.hosts:
        worker.join_on_host(job.hosts, worker.rank, "hierarchy")
    else:
        worker.join(SHM)
    for model in job.models:
        worker.send(f"{model}: trial")
        worker.send(measure(worker, model))
    worker.leave()


def measure(worker: BenchWorker, model: str) -> TunerChoice:
    """Train until a kind is chosen, and then for `ROUNDS` rounds with each kind in turns."""
    workload = WORKLOADS[model]
    batches = [workload.batch(torch.Generator().manual_seed(rank)) for rank in range(WORKERS)]
    data = TensorDataset(torch.cat([one.inputs for one in batches]), torch.cat([one.targets for one in batches]))
    times: defaultdict[tuple[int, GradComm], list[float]] = defaultdict(list)  # by round and kind
    choice, rounds, taken, ended_s = "", 0, 0, 0.0
    with lockstep.Run(seed=7, progress=False, trace=False, grad_comm="auto", compare_loss=False) as run:
        wrapped = run.replicate(workload.build())
        shuffled = run.batches(data, global_batch_size=len(data), shards=WORKERS, epochs=None)
        for batch in run.train(shuffled, OPTIMIZERS[workload.optimizer](wrapped)):
            run.step(lambda m, b: loss(m, LabeledBatch(*b)), batch)
            began_s, ended_s = ended_s, time.perf_counter()
            assert run._loop.plan is not None
            tuner = run._loop.plan.tuner
            worker.send("")
            if tuner.chosen is None:
                continue
            if not choice:
                choice, round_s = tuner.chosen.value, len(KINDS) * tuner.turn_steps * tuner.expected_s
                rounds = min(ROUNDS, max(LEAST_ROUNDS, int(MOST_S / round_s)))
                tuner.expected_s = 0.0  # it is not compared with what follows
                worker.send(f"{model}: {choice} is chosen; each kind in turns")
            else:
                if taken % tuner.turn_steps:  # the first step of a turn is not timed
                    times[taken // tuner.turn_steps // len(KINDS), tuner.current].append(ended_s - began_s)
                taken += 1
            tuner.chosen = KINDS[taken // tuner.turn_steps % len(KINDS)]  # for the next step
            if taken == rounds * len(KINDS) * tuner.turn_steps:
                break
    found = [{kind.value: statistics.median(times[one, kind]) for kind in KINDS} for one in range(rounds)]
    return TunerChoice(model, choice, found)


# -------------------------------------------------------------------------------------------------- outside of workers


COLUMNS = columns("model", "link", *(f">{kind.value} ms" for kind in KINDS), "chosen", "chosen / best")


def row_of(link: str, found: TunerChoice) -> tuple[str, ...]:
    rounds = [{GradComm(kind): time_s for kind, time_s in times.items()} for times in found.rounds]
    step_s = step_times(rounds)
    best = min(KINDS, key=lambda kind: step_s[kind])
    ratio = paired_ratio([times[GradComm(found.choice)] for times in rounds], [times[best] for times in rounds])
    named = link if link == SHM else f"{link} Mbit/s"
    return (found.model, named, *(f"{1e3 * step_s[kind]:.1f}" for kind in KINDS), found.choice, str(ratio))


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
        for one in found:
            rows.append(row_of(link, one))
            record.append(asdict(one) | {"link": link})
    timed = f"up to {ROUNDS} rounds after the choice"
    head = f"Run(grad_comm=) on {WORKERS} workers, torch {torch.__version__}; {timed}"
    legend = [
        "ms             of a step, with each kind in turns",
        "chosen / best  median of the ratios within each round, and its 95 % interval. The best is found in the same "
        "rounds, so that near ties count as more than 1",
        "Losses are not compared: int4 may be chosen where Run(grad_comm=) would find that it harms",
    ]
    show(head, render(COLUMNS, rows), legend, {"results": record}, json_path)
    return 0
