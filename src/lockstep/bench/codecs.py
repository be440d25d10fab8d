"""`lockstep bench codecs`: gradients that are sent compressed, beside torch's own hooks, over links of a given speed.

Three tables. Kernels: how long it takes to encode and decode 25 MiB, beside a plain copy; with `--device cuda` only
this one. All-reduce: one bucket of that size over several hosts: time, bytes that leave a host, and the error of the
result. Steps: of models that are trained by torch's DDP, with and without its hooks, and by Run; the JSON file has the
loss over time and over bytes.

The hosts are network namespaces of this machine (network_namespaces.py). Every arm runs in every round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lockstep import hooks
from lockstep.bench.models import WORKLOADS, LabeledBatch, loss_of
from lockstep.bench.network_namespaces import NamespaceHost, VirtualHosts, sent_bytes
from lockstep.bench.rounds import Estimate, RoundSync, estimate, interleave, paired_ratio, show, slowest, time_calls
from lockstep.bench.run_step import EXACT, EXACT_INT4, EXACT_INT8, EXACT_POWERSGD, EXACT_TOPK, RunArm
from lockstep.bench.step import TORCH, WrapperArm
from lockstep.bench.workers import BenchWorker, Workers, finish_of, use_device
from lockstep.comm.codec_kernels import kernels_for
from lockstep.comm.integer_codec import BLOCK, IntegerCodec, Kernels, TorchKernels
from lockstep.comm.shard_sum import ShardSum
from lockstep.ddp.bucket_reduce import GradBucket
from lockstep.report.table import columns, render
from lockstep.seed import derive_seed

SIDE = 2560  # of the matrix whose gradient is reduced: 25 MiB
RANK = 4  # of PowerSGD's matrices
PLAIN, HIERARCHY, FP16, POWER_SGD, INT8, INT4 = "Gloo", "hierarchy", "fp16 hook", "PowerSGD hook", "int8", "int4"
REDUCTIONS = (PLAIN, FP16, POWER_SGD, HIERARCHY, INT8, INT4)
TORCH_DDP, TORCH_FP16, TORCH_POWER = "torch DDP", "torch DDP, fp16 hook", "torch DDP, PowerSGD hook"
TORCH_INT8 = "torch DDP, lockstep.hooks.int8"
RUN, RUN_INT8, RUN_INT4, RUN_POWER, RUN_TOPK = "Run", "Run, int8", "Run, int4", "Run, powersgd", "Run, topk"
RUN_ARMS = {
    RUN: EXACT,
    RUN_INT8: EXACT_INT8,
    RUN_INT4: EXACT_INT4,
    RUN_POWER: EXACT_POWERSGD,
    RUN_TOPK: EXACT_TOPK,
}
TRAININGS = (TORCH_DDP, TORCH_FP16, TORCH_POWER, TORCH_INT8, *RUN_ARMS)
SEED = 7


@dataclass(frozen=True)
class CodecSettings:
    hosts: int
    workers: int  # on each host
    mbit: int
    models: tuple[str, ...]
    rounds: int
    steps: int  # of each arm in a round
    wait_s: float = 300.0  # the longest wait for a message of a worker


@dataclass(frozen=True)
class CodecJob:
    """The job; equal on all workers."""

    settings: CodecSettings
    hosts: tuple[NamespaceHost, ...]


@dataclass(frozen=True)
class ArmRounds:
    """What one worker measured: for each arm, one value per round."""

    what: str  # "all-reduce", or the name of a model
    times_ms: dict[str, list[float]]  # of a call, or of a step
    sent_bytes: dict[str, list[float]]
    errors: dict[str, float]  # of the result, relative to its norm
    losses: dict[str, list[float]]  # after each round


# ------------------------------------------------------------------------------------------------------------- kernels


def kernel_times(device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds in which each arm encodes or decodes 25 MiB, in each round."""
    blocks = SIDE * SIDE // BLOCK
    gradient = torch.randn(1, blocks, BLOCK, generator=torch.Generator().manual_seed(SEED)).to(device)
    target, half = torch.empty_like(gradient), torch.empty_like(gradient, dtype=torch.float16)
    calls: dict[str, Callable[[], object]] = {
        "copy": partial(target.copy_, gradient),
        "to float16": partial(half.copy_, gradient),
    }
    for bits in (8, 4):
        codec = IntegerCodec(bits)
        for kernels in (kernels_for(codec, device), TorchKernels(codec)):
            kind = "" if type(kernels) is not TorchKernels else ", operations of torch"
            encode, decode = kernel_calls(kernels, codec, gradient)
            calls[f"int{bits}: encode{kind}"], calls[f"int{bits}: decode{kind}"] = encode, decode
    finish = finish_of(device)
    for call in calls.values():
        call()
    if device.type == "cuda":
        calls |= {f"{name}, without launching": as_graph(call) for name, call in calls.items() if "torch" not in name}
    count = 200 if device.type == "cuda" else 5
    turns = {name: partial(time_calls, call, count, finish) for name, call in calls.items()}
    return interleave(list(calls), turns, rounds, RoundSync())


def as_graph(call: Callable[[], object]) -> Callable[[], object]:
    """Return the same as a CUDA graph, whose replay takes as long as the kernels on the GPU."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def kernel_calls(
    kernels: Kernels, codec: IntegerCodec, gradient: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return how to encode the gradient of one shard to packed integers, and how to decode such integers."""
    blocks, device = gradient.shape[1], gradient.device
    numbers, codes = torch.arange(blocks, device=device), torch.empty(blocks, dtype=torch.uint8, device=device)
    packed, rounded = (
        torch.empty(1, blocks * BLOCK * bits // 8 + more, dtype=torch.uint8, device=device)
        for bits, more in ((codec.bits, 0), (codec.result_bits, blocks))
    )
    out = torch.empty_like(gradient[0])

    def encode() -> None:
        kernels.block_codes(gradient, codes)
        kernels.encode(gradient, codes, numbers, [3], codec.bits, packed)

    encode()
    kernels.round([packed[0]], codec.bits, codec.largest, numbers, 5, rounded[0])
    return encode, lambda: kernels.decode(list(rounded), codes, 0.5, out)


# ---------------------------------------------------------------------------------------------------- inside a worker


def work(worker: BenchWorker, job: CodecJob) -> None:
    torch.set_num_threads(1)
    settings = job.settings
    worker.join_on_host(job.hosts, worker.rank // settings.workers)
    over_hosts = dist.new_group(backend="hierarchy", timeout=worker.timeout)
    worker.send("all-reduce")
    worker.send(measure_all_reduce(worker, settings, over_hosts))
    for model in settings.models:
        worker.send(f"{model}: warming up")
        worker.send(measure_steps(worker, settings, model, over_hosts))
    worker.leave()


def measure_all_reduce(worker: BenchWorker, settings: CodecSettings, over_hosts: Any) -> ArmRounds:
    whole: Any = dist.group.WORLD
    gradients = [gradient_of(rank) for rank in range(worker.size)]
    exact, mine = torch.stack(gradients).mean(dim=0), gradients[worker.rank]
    parameter = torch.empty(SIDE, SIDE)
    power = powerSGD_hook.PowerSGDState(whole, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    integers = {INT8: IntegerSum(over_hosts, 8), INT4: IntegerSum(over_hosts, 4)}

    def prepare(arm: str) -> Callable[[], Any]:
        """Return the reduction of this worker's gradient, which is copied to where the arm needs it."""
        if arm in integers:
            return integers[arm].prepare(mine)
        flat = mine.clone()
        bucket: Any = GradBucket(0, flat, [parameter], is_last=True)
        if arm == HIERARCHY:
            return lambda: dist.all_reduce(flat, group=over_hosts) or flat.div_(worker.size)
        hook: Any
        hook, state = {
            PLAIN: (default_hooks.allreduce_hook, whole),
            FP16: (default_hooks.fp16_compress_hook, whole),
            POWER_SGD: (powerSGD_hook.powerSGD_hook, power),
        }[arm]
        return lambda: hook(state, bucket).wait()

    errors = dict[str, float]()
    for arm in REDUCTIONS:
        for _ in range(3 if arm == POWER_SGD else 1):  # it begins to compress in the third step
            found = prepare(arm)()
        result = found[0] if isinstance(found, list) else found
        errors[arm] = float((result - exact).norm() / exact.norm())

    def call(arm: str) -> tuple[float, float]:
        reduce = prepare(arm)
        dist.barrier()
        before = sent_bytes()
        took_ms = time_calls(reduce, 1)
        dist.barrier()  # all workers of this host have sent their data
        return took_ms, float(sent_bytes() - before)

    sync = RoundSync(barrier=dist.barrier, report=lambda text: worker.send(""))
    values = interleave(REDUCTIONS, {arm: partial(call, arm) for arm in REDUCTIONS}, 2 * settings.rounds, sync)
    times, sent = ({arm: [one[i] for one in rounds] for arm, rounds in values.items()} for i in (0, 1))
    return ArmRounds("all-reduce", times, sent, errors, {})


@final
class IntegerSum:
    """The mean of one gradient of each worker, as `Run` computes it with grad_comm="int8" or "int4"."""

    def __init__(self, group: Any, bits: int) -> None:
        self._sum = ShardSum(
            group, [range(r, r + 1) for r in range(group.size())], device=torch.device("cpu"), compresses=True
        )
        self._compressed, self._rank, self._calls = self._sum.compressed(IntegerCodec(bits)), group.rank(), 0
        self._buffers = self._compressed.allocate(torch.arange(SIDE * SIDE // BLOCK), 0)
        self._buffers.scale = lambda: 1.0 / group.size()

    def prepare(self, gradient: Tensor) -> Callable[[], Tensor]:
        buffers, self._calls = self._buffers, self._calls + 1
        buffers.rows[0][: gradient.numel()].copy_(gradient)
        buffers.shard_keys = [derive_seed(SEED, self._calls, self._rank)]
        buffers.sum_key = derive_seed(SEED, self._calls, "sum")
        return lambda: self._sum.submit(lambda: self._compressed.run(buffers)).wait()[: gradient.numel()]


def gradient_of(rank: int) -> Tensor:
    """A gradient like that of a layer: the directions that all workers share, columns of different sizes, and noise."""
    shared, own = torch.Generator().manual_seed(SEED), torch.Generator().manual_seed(SEED + 1 + rank)
    low = torch.randn(SIDE, 8, generator=shared) @ torch.randn(8, SIDE, generator=shared)
    sizes = torch.logspace(-2, 0, SIDE)
    return ((low + 2.0 * torch.randn(SIDE, SIDE, generator=own)) * sizes * 1e-3).view(-1)


def make_training(arm: str, model: str, over_hosts: Any) -> WrapperArm | RunArm:
    workload, device, whole = WORKLOADS[model], torch.device("cpu"), dist.group.WORLD
    if arm in RUN_ARMS:
        return RunArm(RUN_ARMS[arm], workload, device, group=over_hosts)
    # With several buckets the order of PowerSGD's collectives over Gloo differs between workers, and it hangs.
    options: dict[str, Any] = {"bucket_cap_mb": 4096} if arm == TORCH_POWER else {}
    made = WrapperArm(TORCH, workload, device, group=whole, **options)
    wrapped: Any = made.model
    if arm == TORCH_FP16:
        wrapped.register_comm_hook(whole, default_hooks.fp16_compress_hook)
    elif arm == TORCH_POWER:
        state = powerSGD_hook.PowerSGDState(whole, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif arm == TORCH_INT8:
        wrapped.register_comm_hook(None, hooks.int8(over_hosts, seed=SEED))
    return made


def measure_steps(worker: BenchWorker, settings: CodecSettings, model: str, over_hosts: Any) -> ArmRounds:
    batches = [WORKLOADS[model].batch(torch.Generator().manual_seed(rank)) for rank in range(worker.size)]
    arms = {arm: make_training(arm, model, over_hosts) for arm in TRAININGS}
    for arm in arms.values():
        for _ in range(3):
            arm.step(batches[worker.rank])
            dist.barrier()
    losses: dict[str, list[float]] = {arm: [mean_loss(made, batches)] for arm, made in arms.items()}

    def turn(name: str) -> tuple[float, float]:
        before = sent_bytes()
        took_ms = time_calls(partial(arms[name].step, batches[worker.rank]), settings.steps)
        dist.barrier()
        sent = (sent_bytes() - before) / settings.steps
        losses[name].append(mean_loss(arms[name], batches))
        return took_ms, sent

    sync = RoundSync(barrier=dist.barrier, report=lambda text: worker.send(f"{model}: {text}"))
    found = interleave(TRAININGS, {arm: partial(turn, arm) for arm in TRAININGS}, settings.rounds, sync)
    times, sent = ({arm: [one[i] for one in values] for arm, values in found.items()} for i in (0, 1))
    return ArmRounds(model, times, sent, {}, losses)


@torch.no_grad()
def mean_loss(arm: WrapperArm | RunArm, batches: Sequence[LabeledBatch]) -> float:
    model = getattr(arm.model, "module", arm.model)
    return sum(float(loss_of(model(batch.inputs), batch.targets)) for batch in batches) / len(batches)


# -------------------------------------------------------------------------------------------------- outside of workers


@dataclass(frozen=True)
class ArmResult:
    time_ms: Estimate
    over_first: Estimate  # time of the first arm over this one's: how many times faster this one is
    sent_bytes: float  # of the host that sends most
    error: float | None
    loss: float | None  # after the last round
    rounds_ms: list[float]


def summarize(workers: Sequence[ArmRounds]) -> dict[str, ArmResult]:
    times, one = slowest([worker.times_ms for worker in workers]), workers[0]
    first = next(iter(times.values()))
    return {
        arm: ArmResult(
            time_ms=estimate(values),
            over_first=paired_ratio(first, values),
            sent_bytes=max(estimate(worker.sent_bytes[arm]).median for worker in workers),
            error=one.errors.get(arm),
            loss=one.losses[arm][-1] if arm in one.losses else None,
            rounds_ms=values,
        )
        for arm, values in times.items()
    }


def rows_of(what: str, results: dict[str, ArmResult]) -> Iterator[tuple[str, ...]]:
    for number, (arm, result) in enumerate(results.items()):
        yield (
            "" if number else what,
            arm,
            f"{result.time_ms.median:.1f}",
            result.over_first.text(digits=2) if number else "",
            f"{result.sent_bytes / 2**20:.2f}",
            "" if result.error is None else f"{result.error:.4f}",
            "" if result.loss is None else f"{result.loss:.4f}",
        )


COLUMNS = columns("what", "arm", ">ms", "first arm / this", ">sent MiB", ">error", ">loss")
LEGEND = [
    "first arm / this  median of the ratios within each round, and its 95 % interval",
    "sent MiB          by the host that sends most, for one call or step, headers included",
    "error             of the mean over workers, relative to its norm; PowerSGD keeps it for the next step",
    "loss              on the training batches after the last round",
]


def run_kernels(device: torch.device, rounds: int) -> tuple[str, dict[str, list[float]]]:
    times = kernel_times(device, rounds)
    rows = [(name, f"{estimate(values).median:.3f}") for name, values in times.items()]
    return render(columns("25 MiB", ">ms"), rows), times


def run(settings: CodecSettings, device: str, json_path: Path | None) -> int:
    where = use_device(device, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table, kernels = run_kernels(where, max(settings.rounds, 5))
    torch.set_num_threads(threads)
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "kernels_ms": kernels}
    head = f"torch {torch.__version__}, {device}, one thread"
    if where.type == "cuda":
        show(head, table, [], record, json_path)
        return 0
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns that the hosts have no names
    size = settings.hosts * settings.workers
    with VirtualHosts(hosts=settings.hosts, mbit=settings.mbit) as virtual:
        with Workers(size, work, CodecJob(settings, virtual.hosts), wait_s=settings.wait_s) as workers:
            measured = list(workers.results_by(lambda rounds: rounds.what))
    rows = list[tuple[str, ...]]()
    for of_workers in measured:
        results = summarize(of_workers)
        rows += rows_of(of_workers[0].what, results)
        arms = {arm: asdict(one) | {"losses": of_workers[0].losses.get(arm)} for arm, one in results.items()}
        record[of_workers[0].what] = arms
    link = f"{settings.hosts} hosts on this machine, {settings.workers} worker(s) each, links of {settings.mbit} Mbit/s"
    models = [f"{model}: {WORKLOADS[model].about}; {WORKLOADS[model].optimizer}" for model in settings.models]
    show(
        f"{head}\n\n{table}\n\n{link}, {settings.rounds} rounds",
        render(COLUMNS, rows),
        LEGEND + models,
        record,
        json_path,
    )
    return 0
