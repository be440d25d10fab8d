"""A worker of `lockstep bench comm`: prepares every arm, checks its result, and times the arms in turn.

NOTE [rows of calls]. All backends are open in the same workers and take turns in every round (rounds.py, NOTE [paired
rounds]). A turn is a row of calls, as many as fill ROW_S on the slowest worker; a first call that is not timed aligns
the workers more closely than a barrier does, and brings the vector into the caches that will need it. The result is the
time of one call in the row, Python included, on the worker for which the row took longest: a step cannot continue
before the last worker has its result. Where calls need not wait for each other (the root of a broadcast may run ahead)
it is the throughput of the calls, not the latency of one.

The copy is the limit that memory sets: `b.copy_(a)` of the whole vector, by worker 0 alone on its one thread, while the
other workers sleep in the barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.bench.collectives import Case, CommBuffers, check, fill, make_buffers, make_call
from lockstep.bench.rounds import rotated_order
from lockstep.bench.workers import BenchWorker
from lockstep.errors import PeerLostError

COPY, GLOO, NCCL = "copy", "gloo", "nccl"
SHM_GROUP = "shm, group memory"  # on tensors that the group made, as a reducer's buckets are
SHM_OWN = "shm, own memory"  # on any other tensor
ARMS = {"gloo": (GLOO,), "nccl": (NCCL,), "shm": (SHM_GROUP, SHM_OWN)}  # backend -> its arms

ROW_S = 0.03
MAX_CALLS = 2000
WARMUP_CALLS = 3

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class CommJob:
    """The job; equal on all workers."""

    cases: tuple[Case, ...]
    backends: tuple[str, ...]
    rounds: int
    device: str

    @property
    def arms(self) -> list[str]:
        return [COPY, *(arm for backend in self.backends for arm in ARMS[backend])]


@dataclass(frozen=True)
class CaseTimes:
    """Times that one worker measured in one case. Only worker 0 has times of the copy."""

    case: Case
    calls: dict[str, int]  # arm -> calls in a row
    times_ms: dict[str, list[float]]  # arm -> time of one call in each round
    left_out: dict[str, str]  # arm -> why


@final
@dataclass(frozen=True)
class CommBench:
    """A worker with its device and its open process groups."""

    worker: BenchWorker
    device: torch.device
    groups: dict[str, Any]  # backend -> group

    def finish(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """(result of `action`, ""); if it failed on any worker, (None, message of the first that failed) on all."""
        result, mine = None, ""
        try:
            result = action()
            self.finish()
        except PeerLostError:
            raise
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            mine = (str(error).splitlines() or [""])[0] or type(error).__name__
        messages: list[Any] = [""] * self.worker.size
        dist.all_gather_object(messages, mine)
        problem = next((f"worker {rank}: {text}" for rank, text in enumerate(messages) if text), "")
        return (None if problem else result), problem

    def largest(self, mine: float) -> float:
        """The largest value of all workers."""
        value = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


@dataclass
class ArmCalls:
    """The calls of the arms that work in a case, and why the rest do not. The calls own their tensors."""

    calls: dict[str, Call] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def prepare_arms(case: Case, bench: CommBench) -> ArmCalls:
    """Check the result of every arm once. Then zero the vectors, so that no row of sums overflows."""
    arm_calls, rank = ArmCalls(), bench.worker.rank
    own = make_buffers(case, partial(torch.empty, device=bench.device))
    for backend, group in bench.groups.items():
        for arm in ARMS[backend]:
            allocate = partial(allocate_group_buffers, case, group, bench.device) if arm == SHM_GROUP else lambda: own
            buffers, problem = bench.attempt(allocate)
            if buffers:
                fill(buffers, rank)
                call = make_call(case, buffers, group)
                _, problem = bench.attempt(call)
            if problem:
                arm_calls.left_out[arm] = problem
                continue
            assert buffers is not None
            check(case, buffers, rank, arm=arm)
            buffers.sent.zero_()
            arm_calls.calls[arm] = call
    if rank == 0:
        # Both are written first: memory that never was is one page of zeros, which stays in the nearest cache.
        source, target = torch.ones(case.whole, device=bench.device), torch.ones(case.whole, device=bench.device)
        arm_calls.calls[COPY] = partial(target.copy_, source)
    return arm_calls


def allocate_group_buffers(case: Case, group: Any, device: torch.device) -> CommBuffers:
    """Tensors in the group's own memory. Raises NotImplementedError if it has none for this device."""
    owner = group if hasattr(group, "allocate_tensor") else group._get_backend(device)
    if not owner.supports_tensor_alloc(device):
        raise NotImplementedError(f"the group makes no tensors on {device.type}")

    def allocate(elements: int) -> Tensor:
        tensor: Tensor = owner.allocate_tensor(elements, dtype=torch.float32, device=device)
        return tensor

    return make_buffers(case, allocate)


def calls_in_row(call_s: float) -> int:
    """Number of calls that fill ROW_S, at most MAX_CALLS."""
    return min(ceil(ROW_S / max(call_s, 1e-9)), MAX_CALLS)


def time_row(call: Call, calls: int, finish: Callable[[], None]) -> float:
    """Milliseconds per call; see NOTE [rows of calls]."""
    call()
    finish()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    finish()
    return 1e3 * (time.perf_counter() - started) / calls


def warm_up(call: Call | None, bench: CommBench) -> int:
    """Run warm-up calls. Returns the number of calls in a row; equal on all workers."""
    dist.barrier()
    call_s = 0.0
    if call:
        for _ in range(WARMUP_CALLS):
            call()
        call_s = 1e-3 * time_row(call, WARMUP_CALLS, bench.finish)
    return calls_in_row(bench.largest(call_s))


def measure(case: Case, job: CommJob, bench: CommBench) -> CaseTimes:
    arm_calls = prepare_arms(case, bench)
    arms = [arm for arm in job.arms if arm not in arm_calls.left_out]
    calls = {arm: warm_up(arm_calls.calls.get(arm), bench) for arm in arms}
    times: dict[str, list[float]] = {arm: [] for arm in arms if arm in arm_calls.calls}
    for round_number in range(job.rounds):
        bench.worker.send("")  # shows that this worker is alive
        for arm in rotated_order(arms, round_number):
            dist.barrier()  # a worker without this arm sleeps in the next barrier
            if arm in arm_calls.calls:
                times[arm].append(time_row(arm_calls.calls[arm], calls[arm], bench.finish))
    dist.barrier()  # no worker frees memory that a peer still reads
    return CaseTimes(case, calls, times, arm_calls.left_out)


def work(worker: BenchWorker, job: CommJob) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", worker.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    worker.join()
    groups = {backend: dist.new_group(backend=backend, timeout=worker.timeout) for backend in job.backends}
    bench = CommBench(worker, device, groups)
    for case in job.cases:
        worker.send(str(case))
        worker.send(measure(case, job, bench))
    worker.leave()
