"""`lockstep bench step`: time of a training step without communication, with torch's DDP and with ours.

Every arm has worker processes of its own, which sleep in the turns of other arms: in one process the arms would affect
each other's memory (an arm would reuse what another has freed), and a user runs only one of them. Communication alone
(the same buckets, one all-reduce after the other, nothing else running) is another arm: the part of it that a wrapper
does not hide lengthens the step.

An arm is named by its class and, after an @, the backend of its process group: `lockstep@shm`. The default is Gloo.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lockstep.bench.models import OPTIMIZERS, WORKLOADS, LabeledBatch, Workload, count_parameters, digest_of, loss_of
from lockstep.bench.network_namespaces import NamespaceHost
from lockstep.bench.rounds import (
    Estimate,
    RoundPlan,
    RoundSync,
    estimate,
    paired_difference,
    paired_ratio,
    show,
    slowest,
    time_rounds,
)
from lockstep.bench.run_step import KINDS, RunArm
from lockstep.bench.workers import BenchWorker, Workers, finish_of, peak_bytes, use_device
from lockstep.comm.abortable_group import share_gpu_over_nccl
from lockstep.ddp.sharded_optimizer import ShardedOptimizer
from lockstep.report.table import columns, megabytes, percent, render

NONE, TORCH, OURS = "none", "torch", "lockstep"
TORCH_SHARDED, OURS_SHARDED = "torch-sharded", "lockstep-sharded"  # with an optimiser whose state is distributed
# Eight micro-batches over all workers: without communication, and with torch's class, whose last one communicates.
NONE_8, TORCH_8 = "none8", "torch8"
PLAIN = (NONE, NONE_8)  # arms without a wrapper
DEFAULT_ARMS = (NONE, TORCH, OURS)
STEP_ARMS = (*DEFAULT_ARMS, f"{OURS}@shm")
TORCH_CLASS = "torch.nn.parallel.DistributedDataParallel"
CLASSES = {TORCH: TORCH_CLASS, TORCH_8: TORCH_CLASS, OURS: "lockstep.DistributedDataParallel"}
SEED = 7

Wrapper = Callable[..., nn.Module]


@dataclass(frozen=True)
class StepSettings:
    models: tuple[str, ...]
    arms: tuple[str, ...]
    workers: int
    threads: int  # threads of each worker
    device: str
    plan: RoundPlan
    wait_s: float  # the longest wait for a message of a worker
    hosts: tuple[NamespaceHost, ...] = ()  # virtual ones, with as many workers of each arm on each; none: this machine

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
    peak_bytes: int  # of the process, or on a GPU of tensors


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


# ---------------------------------------------------------------------------------------------------------------- arms


def backend_of(arm: str) -> str:
    return arm.partition("@")[2] or "gloo"


def check_arm(arm: str) -> None:
    """Raises ValueError if this arm cannot be measured."""
    if arm != NONE:
        load_wrapper(arm)
    if backend_of(arm) not in dist.Backend.backend_list:
        known = ", ".join(dist.Backend.backend_list)
        raise ValueError(f"arm {arm!r}: {backend_of(arm)!r} is not a backend; name one of {known}")


def load_wrapper(arm: str) -> Wrapper:
    """The class of an arm: `torch`, `lockstep` or a dotted name. Raises ValueError if it cannot be loaded."""
    name = arm.partition("@")[0].removesuffix("-sharded")
    dotted = CLASSES.get(name, name)
    module, _, name = dotted.rpartition(".")
    try:
        return cast(Wrapper, getattr(import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join((NONE, *CLASSES))
        raise ValueError(f"arm {arm!r}: cannot load {dotted} ({error}); name one of {known} or a class") from error


@final
class WrapperArm:
    """A wrapped model and its optimizer. All arms initialise their models from the same seed."""

    def __init__(
        self,
        name: str,
        workload: Workload,
        device: torch.device,
        *,
        autocast: bool = False,
        group: Any = None,
        **options: Any,
    ) -> None:
        """`options`: further arguments of the wrapper."""
        torch.manual_seed(SEED)
        model = workload.build().to(device)
        is_cut = name.partition("@")[0] in (NONE_8, TORCH_8)
        self._micro_batches = max(1, workload.shards(group.size()) // group.size()) if is_cut else 1
        if name not in PLAIN:
            ids = None if device.type == "cpu" else [device.index]
            model = load_wrapper(name)(model, device_ids=ids, process_group=group, **options)
        self.name, self.model = name, model
        self.optimizer = OPTIMIZERS[workload.optimizer](model)
        if name.partition("@")[0] in (TORCH_SHARDED, OURS_SHARDED):
            self.optimizer = _shard(self.optimizer, name.partition("@")[0], group)
        self._precision = torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext()

    def step(self, batch: LabeledBatch) -> None:
        self.optimizer.zero_grad()
        parts = self._micro_batches
        pairs = zip(batch.inputs.chunk(parts), batch.targets.chunk(parts), strict=True)
        for number, (inputs, targets) in enumerate(pairs, 1):
            with nullcontext() if number == parts or self.name in PLAIN else cast(Any, self.model).no_sync():
                with self._precision:
                    loss = loss_of(self.model(inputs), targets)
                torch.autograd.backward(loss if parts == 1 else loss / parts)
        self.optimizer.step()

    def bucket_bytes(self) -> tuple[int, ...]:
        """Sizes of the gradient buckets, in the order in which they are reduced; empty without a wrapper."""
        if self.name in PLAIN:
            return ()
        log = cast(Any, self.model)._get_ddp_logging_data()
        sizes = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
        return tuple(int(size) for size in str(sizes).split(","))

    def digest(self) -> str:
        return digest_of(self.model)


def _shard(optimizer: torch.optim.Optimizer, kind: str, group: Any) -> torch.optim.Optimizer:
    """Return a sharded optimiser of the same class, with the same options: torch's, or ours."""
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    parameters = optimizer.param_groups[0]["params"]
    if kind == TORCH_SHARDED:
        return ZeroRedundancyOptimizer(parameters, type(optimizer), process_group=group, **options)
    return ShardedOptimizer(type(optimizer), parameters, process_group=group, **options)


def make_arm(name: str, workload: Workload, device: torch.device, *, group: Any) -> WrapperArm | RunArm:
    if name.partition("@")[0] in KINDS:
        return RunArm(name, workload, device, group=group)
    return WrapperArm(name, workload, device, autocast=workload.precision == "bf16", group=group)


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


@dataclass(frozen=True)
class ArmWorker:
    """A worker of one arm: its device, and the process group of its arm."""

    worker: BenchWorker
    arm: str
    device: torch.device
    group: Any

    def measure(self, model: str, settings: StepSettings) -> WorkerTimes:
        workload, device = WORKLOADS[model], self.device
        batch = workload.batch(torch.Generator().manual_seed(dist.get_rank(self.group))).to(device)
        self.worker.send(f"{model}: warming up")
        arm = make_arm(self.arm, workload, device, group=self.group)
        for turn in settings.arms:  # one after the other, as in the rounds
            dist.barrier()
            for _ in range(settings.plan.warmup if turn == self.arm else 0):  # then the buckets are final
                arm.step(batch)
        own_turns: dict[str, Callable[[], None]] = {self.arm: partial(arm.step, batch)}
        if self.arm not in PLAIN:
            own_turns[communication_name(self.arm)] = communication(arm.bucket_bytes(), device, self.group)
        is_deferred = isinstance(arm, RunArm) and arm.is_deferred
        finish = arm.finish if isinstance(arm, RunArm) else finish_of(device)
        sync = RoundSync(dist.barrier, finish, lambda text: self.worker.send(f"{model}: {text}"))
        turns = [*settings.arms, *(communication_name(arm) for arm in settings.arms if arm != NONE)]
        times = time_rounds(turns, own_turns, settings.plan, sync, are_chained=is_deferred)
        peak, parameters = peak_bytes(device), count_parameters(arm.model)
        result = WorkerTimes(model, self.arm, parameters, times, arm.bucket_bytes(), arm.digest(), peak)
        if isinstance(arm, RunArm):
            arm.close()
        return result


def work(worker: BenchWorker, settings: StepSettings) -> None:
    """Measure all models, and send a WorkerTimes for each."""
    torch.set_num_threads(settings.threads)
    number, rank_in_arm = divmod(worker.rank, settings.workers)
    device = use_device(settings.device, rank_in_arm)
    if "nccl" in map(backend_of, settings.arms) and settings.workers > torch.cuda.device_count():
        share_gpu_over_nccl(rank_in_arm)
    if settings.hosts:
        worker.join_on_host(settings.hosts, rank_in_arm * len(settings.hosts) // settings.workers)
    else:
        worker.join()
    for arm in settings.arms:
        if arm.partition("@")[0] not in (*PLAIN, *KINDS):
            load_wrapper(arm)  # its module may register the backend
    groups = [
        dist.new_group(list(range(first, first + settings.workers)), timeout=worker.timeout, backend=backend_of(arm))
        for first, arm in zip(range(0, worker.size, settings.workers), settings.arms, strict=True)
    ]
    arm_worker = ArmWorker(worker, settings.arms[number], device, groups[number])
    for model in settings.models:
        worker.send(arm_worker.measure(model, settings))
    worker.leave()


# -------------------------------------------------------------------------------------------------- outside of workers


def results_by_model(workers: Workers, settings: StepSettings) -> Iterator[list[WorkerTimes]]:
    """Yield the results of all workers for each model, model by model."""
    return workers.results_by(lambda times: times.model)


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


COLUMNS = columns("model", ">parameters", "arm", ">step ms", "over torch", ">exposed ms", ">alone ms", ">hidden")


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
    legend = [
        "over torch  median of the ratios within each round, and its 95 % interval",
        "exposed     step - step of the arm that does not communicate",
        "alone       the all-reduces of the same buckets, one after the other, with nothing else running",
        "hidden      1 - exposed / alone; below 0 where communication and computation fight for the same cores\n",
    ]
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    name = partial(worker_name, settings=settings)
    with Workers(settings.processes, work, settings, wait_s=settings.wait_s, name=name) as workers:
        for results in results_by_model(workers, settings):
            model, parameters, arms = results[0].model, results[0].parameters, summarize(results)
            rows += rows_of(model, parameters, arms)
            legend += notes_of(model, arms)
            record["models"][model] = {
                "parameters": parameters,
                "optimizer": WORKLOADS[model].optimizer,
                "arms": {arm: asdict(arm_result) for arm, arm_result in arms.items()},
            }
    plan = settings.plan
    head = (
        f"step time on {settings.device}, torch {torch.__version__}, Gloo or what @ names: {settings.workers} workers, "
        f"{settings.threads} thread(s) each;\n{plan.rounds} interleaved rounds of {plan.steps} steps, "
        "each round as long as its slowest worker"
    )
    show(head, render(COLUMNS, rows), legend, record, json_path)
    return 0
