"""`lockstep bench step`: time of a training step without communication, with torch's DDP and with ours.

Every arm has worker processes of its own, which sleep in the turns of other arms: in one process the arms would affect
each other's memory (an arm would reuse what another has freed), and a user runs only one of them. Communication alone
(the same buckets, one all-reduce after the other, nothing else running) is another arm: the part of it that a wrapper
does not hide lengthens the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.bench.compared_wrappers import NONE, TORCH, backend_of, make_arm
from lockstep.bench.models import WORKLOADS, Workload, count_parameters
from lockstep.bench.rounds import (
    Estimate,
    RoundPlan,
    RoundSync,
    estimate,
    paired_difference,
    paired_ratio,
    slowest,
    time_rounds,
)
from lockstep.bench.workers import BenchWorker, Workers
from lockstep.report.table import Column, megabytes, percent, render


@dataclass(frozen=True)
class StepSettings:
    models: tuple[str, ...]
    arms: tuple[str, ...]
    workers: int
    threads: int  # threads of each worker
    device: str
    plan: RoundPlan
    wait_s: float  # the longest wait for a message of a worker

    @property
    def processes(self) -> int:
        return self.workers * len(self.arms)


@dataclass(frozen=True)
class WorkerTimes:
    """Results of one worker of one arm for one model."""

    model: str
    arm: str
    parameters: int
    times_ms: dict[str, list[float]]  # of its arm, and of its communication alone, in each round
    bucket_bytes: tuple[int, ...]
    digest: str  # SHA-256 of the final weights


@dataclass(frozen=True)
class StepResult:
    step_ms: Estimate
    over_torch: Estimate | None
    exposed_ms: Estimate | None
    alone_ms: Estimate | None
    hidden: float | None
    weights_equal_torch: bool | None
    replicas_equal: bool | None
    bucket_bytes: tuple[int, ...]
    rounds_ms: list[float]


# ---------------------------------------------------------------------------------------------------- inside a worker


def communication(bucket_bytes: tuple[int, ...], device: torch.device, group: Any) -> Callable[[], None]:
    """Return a step of all-reduces of these sizes, one after the other; in the group's own memory, if it has any."""
    buckets = [torch.zeros(size // 4, device=device) for size in bucket_bytes]
    if dist.get_backend(group) == "shm" and group.supports_tensor_alloc(device):
        buckets = [group.allocate_tensor(len(bucket), dtype=bucket.dtype, device=device) for bucket in buckets]

    def step() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket, group=group)

    return step


def communication_name(arm: str) -> str:
    return f"communication of {arm}"


def turns_of(arms: tuple[str, ...]) -> list[str]:
    """Names of all turns of a round."""
    return [*arms, *(communication_name(arm) for arm in arms if arm != NONE)]


def measure_model(
    name: str, arm_name: str, settings: StepSettings, device: torch.device, report: ProgressReporter
) -> WorkerTimes:
    workload: Workload = WORKLOADS[name]
    batch = workload.batch(torch.Generator().manual_seed(dist.get_rank(report.group))).to(device)
    report(f"{name}: warming up")
    arm = make_arm(arm_name, workload, device, group=report.group)
    for turn in settings.arms:  # one after the other, as in the rounds
        dist.barrier()
        for _ in range(settings.plan.warmup if turn == arm_name else 0):  # afterwards the buckets are final
            arm.step(batch)
    own_turns: dict[str, Callable[[], None]] = {arm_name: partial(arm.step, batch)}
    if arm_name != NONE:
        own_turns[communication_name(arm_name)] = communication(arm.bucket_bytes(), device, report.group)
    sync = RoundSync(
        barrier=dist.barrier,
        finish=torch.cuda.synchronize if device.type == "cuda" else lambda: None,
        report=lambda text: report(f"{name}: {text}"),
    )
    times = time_rounds(turns_of(settings.arms), own_turns, settings.plan, sync)
    return WorkerTimes(name, arm_name, count_parameters(arm.model), times, arm.bucket_bytes(), arm.digest())


@dataclass(frozen=True)
class ProgressReporter:
    """Reports the progress of a worker to the parent. Also holds the process group of its arm."""

    group: Any
    worker: BenchWorker

    def __call__(self, text: str) -> None:
        self.worker.send(text)


def work(worker: BenchWorker, settings: StepSettings) -> None:
    """Measure all models, and send a WorkerTimes for each."""
    torch.set_num_threads(settings.threads)
    device = torch.device("cpu")
    arm_number, rank_in_arm = divmod(worker.rank, settings.workers)
    if settings.device == "cuda":
        device = torch.device("cuda", rank_in_arm % torch.cuda.device_count())
        torch.cuda.set_device(device)
    worker.join()
    groups = [
        dist.new_group(
            list(range(i * settings.workers, (i + 1) * settings.workers)),
            timeout=worker.timeout,
            backend=backend_of(arm),
        )
        for i, arm in enumerate(settings.arms)
    ]
    report = ProgressReporter(groups[arm_number], worker)
    for model in settings.models:
        worker.send(measure_model(model, settings.arms[arm_number], settings, device, report))
    worker.leave()


# -------------------------------------------------------------------------------------------------- outside of workers


def results_by_model(workers: Workers, settings: StepSettings) -> Iterator[list[WorkerTimes]]:
    """Yield the results of all workers for each model, model by model."""
    by_model: dict[str, dict[int, WorkerTimes]] = {model: {} for model in settings.models}
    for rank, times in workers.results():
        by_model[times.model][rank] = times
        if len(by_model[times.model]) == settings.processes:
            yield [by_model[times.model][rank] for rank in range(settings.processes)]


def worker_name(rank: int, settings: StepSettings) -> str:
    arm, rank_in_arm = divmod(rank, settings.workers)
    return f"worker {rank_in_arm} of {settings.arms[arm]}"


def round_times(workers: list[WorkerTimes]) -> dict[str, list[float]]:
    """Times of each turn in each round, on its slowest worker."""
    return slowest([worker.times_ms for worker in workers])


def summarize(workers: list[WorkerTimes]) -> dict[str, StepResult]:
    times = round_times(workers)
    by_arm: dict[str, list[WorkerTimes]] = {}
    for worker in workers:
        by_arm.setdefault(worker.arm, []).append(worker)
    result = {}
    for arm, members in by_arm.items():
        communicates = arm != NONE
        alone = estimate(times[communication_name(arm)]) if communicates else None
        exposed = paired_difference(times[arm], times[NONE]) if communicates and NONE in times else None
        equals_torch = members[0].digest == by_arm[TORCH][0].digest if communicates and TORCH in times else None
        result[arm] = StepResult(
            step_ms=estimate(times[arm]),
            over_torch=paired_ratio(times[arm], times[TORCH]) if TORCH in times else None,
            exposed_ms=exposed,
            alone_ms=alone,
            hidden=1 - exposed.median / alone.median if exposed and alone else None,
            weights_equal_torch=equals_torch,
            replicas_equal=len({member.digest for member in members}) == 1 if communicates else None,
            bucket_bytes=members[0].bucket_bytes,
            rounds_ms=times[arm],
        )
    return result


COLUMNS = (
    Column("model"),
    Column("parameters", right=True),
    Column("arm"),
    Column("step ms", right=True),
    Column("over torch"),
    Column("exposed ms", right=True),
    Column("alone ms", right=True),
    Column("hidden", right=True),
)


def rows_of(model: str, parameters: int, results: dict[str, StepResult]) -> Iterator[tuple[str, ...]]:
    for number, (arm, arm_result) in enumerate(results.items()):
        ratio, exposed, alone = arm_result.over_torch, arm_result.exposed_ms, arm_result.alone_ms
        yield (
            "" if number else model,
            "" if number else f"{parameters / 1e6:.2f} M",
            arm,
            f"{arm_result.step_ms.median:.2f}",
            str(ratio) if ratio and arm != TORCH else "",
            f"{exposed.median:.2f}" if exposed else "",
            f"{alone.median:.2f}" if alone else "",
            percent(arm_result.hidden) if arm_result.hidden is not None else "",
        )


def notes_of(model: str, results: dict[str, StepResult]) -> Iterator[str]:
    workload = WORKLOADS[model]
    yield f"{model}: {workload.about}; {workload.optimizer}"
    for arm, arm_result in results.items():
        if arm == NONE:
            continue
        note = f"  {arm}: buckets {' + '.join(megabytes(size) for size in arm_result.bucket_bytes)} MiB"
        note += "; replicas equal" if arm_result.replicas_equal else "; REPLICAS DIFFER"
        if arm != TORCH and arm_result.weights_equal_torch is not None:
            equal = "equal" if arm_result.weights_equal_torch else "DIFFER from"
            note += f"; final weights {equal} torch's bit for bit"
        yield note


def run(settings: StepSettings, json_path: Path | None) -> int:
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    name = partial(worker_name, settings=settings)
    with Workers(settings.processes, work, settings, wait_s=settings.wait_s, name=name) as workers:
        for results in results_by_model(workers, settings):
            model, parameters, arms = results[0].model, results[0].parameters, summarize(results)
            rows += rows_of(model, parameters, arms)
            notes += notes_of(model, arms)
            record["models"][model] = {
                "parameters": parameters,
                "optimizer": WORKLOADS[model].optimizer,
                "arms": {arm: asdict(arm_result) for arm, arm_result in arms.items()},
            }
    plan = settings.plan
    print(
        f"step time on {settings.device}, torch {torch.__version__}, Gloo or what @ names: {settings.workers} workers, "
        f"{settings.threads} thread(s) each;\n{plan.rounds} interleaved rounds of {plan.steps} steps, "
        "each round as long as its slowest worker\n"
    )
    print(render(COLUMNS, rows))
    print(
        "\nover torch  median of the ratios within each round, and its 95 % interval"
        "\nexposed     step - step of the arm that does not communicate"
        "\nalone       the all-reduces of the same buckets, one after the other, with nothing else running"
        "\nhidden      1 - exposed / alone; below 0 where communication and computation fight for the same cores\n"
    )
    print("\n".join(notes))
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    return 0
