"""What a worker of `lockstep bench comm` does: opens a lane for every arm, checks it, and times them in turn.

NOTE [rows of calls]. All backends are open in the same workers and take turns in every round (rounds.py, NOTE [paired
rounds]). A turn is a row of calls, as many as fill ROW_S on the slowest worker; a first call that is not timed brings
the workers together, more closely than a barrier does, and the vector into the caches of those who will need it. The
figure is the time of one call in the row, Python and all, on the worker for which the row took longest: a step cannot
go on before the last worker has its result. Where calls need not wait for each other (the root of a broadcast may run
ahead) it says how fast they follow one another, not how long one of them takes to arrive.

The copy is the limit that memory sets: `b.copy_(a)` of the whole vector, by worker 0 alone on its one thread, while the
others sleep in the barrier.
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

from lockstep.bench.collectives import Buffers, Case, call_of, check, fill, make_buffers
from lockstep.bench.rounds import order_of
from lockstep.bench.workers import Seat
from lockstep.errors import PeerLostError

COPY, GLOO, NCCL = "copy", "gloo", "nccl"
SHM_GROUP = "shm, group memory"  # on tensors that the group made, as a reducer's buckets are
SHM_OWN = "shm, own memory"  # on any other tensor
ARMS = {"gloo": (GLOO,), "nccl": (NCCL,), "shm": (SHM_GROUP, SHM_OWN)}  # of each backend

ROW_S = 0.03
MOST_CALLS = 2000
WARMUP_CALLS = 3

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What all workers are told."""

    cases: tuple[Case, ...]
    backends: tuple[str, ...]
    rounds: int
    device: str

    @property
    def arms(self) -> list[str]:
        return [COPY, *(arm for backend in self.backends for arm in ARMS[backend])]


@dataclass(frozen=True)
class CaseTimes:
    """What one worker found out about one case. Worker 0 alone has times of the copy."""

    case: Case
    calls: dict[str, int]  # in a row, per arm
    times_ms: dict[str, list[float]]  # of one call, per arm and round
    left_out: dict[str, str]  # arm -> why


@final
@dataclass(frozen=True)
class Bench:
    """A worker's device, and the groups it has open."""

    seat: Seat
    device: torch.device
    groups: dict[str, Any]  # by backend

    def finish(self) -> None:
        """Wait until the device has done what it was asked to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """What it returns; or, on every worker if it failed on one, nothing and the words of the first that failed."""
        result, mine = None, ""
        try:
            result = action()
            self.finish()
        except PeerLostError:
            raise
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            mine = (str(error).splitlines() or [""])[0] or type(error).__name__
        said: list[Any] = [""] * self.seat.size
        dist.all_gather_object(said, mine)
        problem = next((f"worker {rank}: {text}" for rank, text in enumerate(said) if text), "")
        return (None if problem else result), problem

    def largest(self, mine: float) -> float:
        """Of what the workers name."""
        value = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


@dataclass
class Lanes:
    """The arms of a case that can be called here, and why others cannot. They own the tensors they are called on."""

    calls: dict[str, Call] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def open_lanes(case: Case, bench: Bench) -> Lanes:
    """Every result is checked once. After that the vectors are zero, so that no row of sums overflows."""
    lanes, rank = Lanes(), bench.seat.rank
    own = make_buffers(case, partial(torch.empty, device=bench.device))
    for backend, group in bench.groups.items():
        for arm in ARMS[backend]:
            take = partial(take_buffers, case, group, bench.device) if arm == SHM_GROUP else lambda: own
            buffers, problem = bench.attempt(take)
            if buffers:
                fill(buffers, rank)
                call = call_of(case, buffers, group)
                _, problem = bench.attempt(call)
            if problem:
                lanes.left_out[arm] = problem
                continue
            assert buffers is not None
            check(case, buffers, rank, arm=arm)
            buffers.sent.zero_()
            lanes.calls[arm] = call
    if rank == 0:
        # Written to, both: memory that never was is one page of zeros, read again and again from the nearest cache.
        source, target = torch.ones(case.whole, device=bench.device), torch.ones(case.whole, device=bench.device)
        lanes.calls[COPY] = partial(target.copy_, source)
    return lanes


def take_buffers(case: Case, group: Any, device: torch.device) -> Buffers:
    """Tensors from the group's own memory."""
    owner = group if hasattr(group, "allocate_tensor") else group._get_backend(device)
    if not owner.supports_tensor_alloc(device):
        raise NotImplementedError(f"the group makes no tensors on {device.type}")

    def allocate(elements: int) -> Tensor:
        tensor: Tensor = owner.allocate_tensor(elements, dtype=torch.float32, device=device)
        return tensor

    return make_buffers(case, allocate)


def calls_in_row(call_s: float) -> int:
    """Enough to fill ROW_S; of what is very short fewer will do."""
    return min(ceil(ROW_S / max(call_s, 1e-9)), MOST_CALLS)


def time_row(call: Call, calls: int, finish: Callable[[], None]) -> float:
    """Milliseconds per call; see NOTE [rows of calls]."""
    call()
    finish()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    finish()
    return 1e3 * (time.perf_counter() - started) / calls


def warm_up(call: Call | None, bench: Bench) -> int:
    """How many calls make a row, the same on every worker."""
    dist.barrier()
    call_s = 0.0
    if call:
        for _ in range(WARMUP_CALLS):
            call()
        call_s = 1e-3 * time_row(call, WARMUP_CALLS, bench.finish)
    return calls_in_row(bench.largest(call_s))


def measure(case: Case, job: Job, bench: Bench) -> CaseTimes:
    lanes = open_lanes(case, bench)
    arms = [arm for arm in job.arms if arm not in lanes.left_out]
    calls = {arm: warm_up(lanes.calls.get(arm), bench) for arm in arms}
    times: dict[str, list[float]] = {arm: [] for arm in arms if arm in lanes.calls}
    for round_number in range(job.rounds):
        bench.seat.tell("")  # a sign of life
        for arm in order_of(arms, round_number):
            dist.barrier()  # who has no part in this turn sleeps in the next one
            if arm in lanes.calls:
                times[arm].append(time_row(lanes.calls[arm], calls[arm], bench.finish))
    dist.barrier()  # nobody takes away memory that a peer still reads
    return CaseTimes(case, calls, times, lanes.left_out)


def work(seat: Seat, job: Job) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", seat.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    seat.join()
    groups = {backend: dist.new_group(backend=backend, timeout=seat.patience) for backend in job.backends}
    bench = Bench(seat, device, groups)
    for case in job.cases:
        seat.tell(str(case))
        seat.tell(measure(case, job, bench))
    seat.leave()
