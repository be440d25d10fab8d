"""`lockstep bench step`: what a training step costs with no communication, with torch's DDP and with ours.

Every arm has worker processes of its own, which rest while another arm has its turn: in one process the arms would
change each other's memory (what one has freed, the next finds ready), and a user runs only one of them.
Communication alone (the same buckets, one all-reduce after the other, nothing else running) is one more arm: what a
wrapper does not hide of it shows up in the step.
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

from lockstep.bench.models import WORKLOADS, Workload, count_parameters
from lockstep.bench.rounds import (
    Conduct,
    Estimate,
    Plan,
    estimate,
    paired_difference,
    paired_ratio,
    slowest,
    time_rounds,
)
from lockstep.bench.workers import Seat, Workers
from lockstep.bench.wrappers import NONE, TORCH, backend_of, make_arm
from lockstep.report.table import Column, megabytes, percent, render


@dataclass(frozen=True)
class Settings:
    models: tuple[str, ...]
    arms: tuple[str, ...]
    workers: int
    threads: int  # of each worker
    device: str
    plan: Plan
    wait_s: float  # the longest wait for a sign of life

    @property
    def processes(self) -> int:
        return self.workers * len(self.arms)


@dataclass(frozen=True)
class WorkerTimes:
    """What one worker of one arm found out about one model."""

    model: str
    arm: str
    parameters: int
    times_ms: dict[str, list[float]]  # of its arm and of the communication alone, per round
    bucket_bytes: tuple[int, ...]
    digest: str  # of the final weights


@dataclass(frozen=True)
class ArmFigures:
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
    """All-reduces of these sizes, one after the other; in the group's own memory, where it has such."""
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
    """Everything that is timed in a round."""
    return [*arms, *(communication_name(arm) for arm in arms if arm != NONE)]


def measure_model(name: str, arm_name: str, settings: Settings, device: torch.device, tell: Teller) -> WorkerTimes:
    workload: Workload = WORKLOADS[name]
    batch = workload.batch(torch.Generator().manual_seed(dist.get_rank(tell.group))).to(device)
    tell(f"{name}: warming up")
    arm = make_arm(arm_name, workload, device, group=tell.group)
    for turn in settings.arms:  # one after the other, as later
        dist.barrier()
        for _ in range(settings.plan.warmup if turn == arm_name else 0):  # then the buckets are what they will be
            arm.step(batch)
    ours: dict[str, Callable[[], None]] = {arm_name: partial(arm.step, batch)}
    if arm_name != NONE:
        ours[communication_name(arm_name)] = communication(arm.bucket_bytes(), device, tell.group)
    conduct = Conduct(
        line_up=dist.barrier,
        finish=torch.cuda.synchronize if device.type == "cuda" else lambda: None,
        report=lambda text: tell(f"{name}: {text}"),
    )
    times = time_rounds(turns_of(settings.arms), ours, settings.plan, conduct)
    return WorkerTimes(name, arm_name, count_parameters(arm.model), times, arm.bucket_bytes(), arm.digest())


@dataclass(frozen=True)
class Teller:
    """Of the workers of one arm: their group, and a way to say where they are."""

    group: Any
    seat: Seat

    def __call__(self, text: str) -> None:
        self.seat.tell(text)


def work(seat: Seat, settings: Settings) -> None:
    """Tells a WorkerTimes per model."""
    torch.set_num_threads(settings.threads)
    device = torch.device("cpu")
    arm_number, rank_in_arm = divmod(seat.rank, settings.workers)
    if settings.device == "cuda":
        device = torch.device("cuda", rank_in_arm % torch.cuda.device_count())
        torch.cuda.set_device(device)
    seat.join()
    groups = [
        dist.new_group(
            list(range(i * settings.workers, (i + 1) * settings.workers)),
            timeout=seat.patience,
            backend=backend_of(arm),
        )
        for i, arm in enumerate(settings.arms)
    ]
    tell = Teller(groups[arm_number], seat)
    for model in settings.models:
        seat.tell(measure_model(model, settings.arms[arm_number], settings, device, tell))
    seat.leave()


# -------------------------------------------------------------------------------------------------- outside of workers


def found_by(workers: Workers, settings: Settings) -> Iterator[list[WorkerTimes]]:
    """What all workers say about a model, model after model."""
    said: dict[str, dict[int, WorkerTimes]] = {model: {} for model in settings.models}
    for rank, times in workers.results():
        said[times.model][rank] = times
        if len(said[times.model]) == settings.processes:
            yield [said[times.model][rank] for rank in range(settings.processes)]


def name_of(rank: int, settings: Settings) -> str:
    arm, rank_in_arm = divmod(rank, settings.workers)
    return f"worker {rank_in_arm} of {settings.arms[arm]}"


def times_of(workers: list[WorkerTimes]) -> dict[str, list[float]]:
    """Of every turn, round by round."""
    return slowest([worker.times_ms for worker in workers])


def figures(workers: list[WorkerTimes]) -> dict[str, ArmFigures]:
    times = times_of(workers)
    of_arm: dict[str, list[WorkerTimes]] = {}
    for worker in workers:
        of_arm.setdefault(worker.arm, []).append(worker)
    result = {}
    for arm, members in of_arm.items():
        talks = arm != NONE
        alone = estimate(times[communication_name(arm)]) if talks else None
        exposed = paired_difference(times[arm], times[NONE]) if talks and NONE in times else None
        result[arm] = ArmFigures(
            step_ms=estimate(times[arm]),
            over_torch=paired_ratio(times[arm], times[TORCH]) if TORCH in times else None,
            exposed_ms=exposed,
            alone_ms=alone,
            hidden=1 - exposed.median / alone.median if exposed and alone else None,
            weights_equal_torch=members[0].digest == of_arm[TORCH][0].digest if talks and TORCH in times else None,
            replicas_equal=len({member.digest for member in members}) == 1 if talks else None,
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


def rows_of(model: str, parameters: int, found: dict[str, ArmFigures]) -> Iterator[tuple[str, ...]]:
    for number, (arm, figure) in enumerate(found.items()):
        ratio, exposed, alone = figure.over_torch, figure.exposed_ms, figure.alone_ms
        yield (
            "" if number else model,
            "" if number else f"{parameters / 1e6:.2f} M",
            arm,
            f"{figure.step_ms.median:.2f}",
            str(ratio) if ratio and arm != TORCH else "",
            f"{exposed.median:.2f}" if exposed else "",
            f"{alone.median:.2f}" if alone else "",
            percent(figure.hidden) if figure.hidden is not None else "",
        )


def notes_of(model: str, found: dict[str, ArmFigures]) -> Iterator[str]:
    workload = WORKLOADS[model]
    yield f"{model}: {workload.about}; {workload.optimizer}"
    for arm, figure in found.items():
        if arm == NONE:
            continue
        note = f"  {arm}: buckets {' + '.join(megabytes(size) for size in figure.bucket_bytes)} MiB"
        note += "; replicas equal" if figure.replicas_equal else "; REPLICAS DIFFER"
        if arm != TORCH and figure.weights_equal_torch is not None:
            equal = "equal" if figure.weights_equal_torch else "DIFFER from"
            note += f"; final weights {equal} torch's bit for bit"
        yield note


def run(settings: Settings, json_path: Path | None) -> int:
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    name = partial(name_of, settings=settings)
    with Workers(settings.processes, work, settings, wait_s=settings.wait_s, name=name) as workers:
        for found in found_by(workers, settings):
            model, parameters, arms = found[0].model, found[0].parameters, figures(found)
            rows += rows_of(model, parameters, arms)
            notes += notes_of(model, arms)
            record["models"][model] = {
                "parameters": parameters,
                "optimizer": WORKLOADS[model].optimizer,
                "arms": {arm: asdict(figure) for arm, figure in arms.items()},
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
