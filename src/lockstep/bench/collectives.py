"""The collectives that `lockstep bench comm` times, with their expected results; and a worker that times them in turn.

The size of a collective is that of the whole vector: what every worker has before a reduce-scatter and after an
all-gather. Elements are fp32.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from math import ceil
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.bench.rounds import RoundSync, interleave, time_calls
from lockstep.bench.workers import BenchWorker, finish_of, largest, use_device
from lockstep.errors import LockstepError, PeerLostError

ELEMENT_BYTES = 4
PERIOD = 251  # period of the contents; a prime, so that a piece in the wrong place is detected
PIECE = 2**20  # elements that are filled or compared at a time
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}

COPY, GLOO, NCCL = "copy", "gloo", "nccl"
IN_GROUP_MEMORY = ", group memory"
SHM_GROUP = f"shm{IN_GROUP_MEMORY}"  # on tensors that the group made, as a reducer's buckets are
SHM_OWN = "shm, own memory"  # on any other tensor
ARMS = {"gloo": (GLOO,), "nccl": (NCCL,), "shm": (SHM_GROUP, SHM_OWN)}  # backend -> its arms

ROW_S = 0.03
MAX_CALLS = 2000
WARMUP_CALLS = 3

Call = Callable[[], object]
T = TypeVar("T")

# The names since torch 2.13; the old ones warn at every call, which takes time.
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Op(StrEnum):
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class Case:
    """One measurement: a collective, a number of workers and a size."""

    op: Op
    workers: int
    size_bytes: int  # as requested; see `whole`

    @property
    def share(self) -> int:
        """Elements of one worker where the vector is split; rounded up, so that all workers have as many."""
        return -(-self.size_bytes // (ELEMENT_BYTES * self.workers))

    @property
    def whole(self) -> int:
        """Elements of the whole vector."""
        if self.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
            return self.share * self.workers
        return self.size_bytes // ELEMENT_BYTES

    @property
    def sent(self) -> int:
        return self.share if self.op is Op.ALL_GATHER else self.whole

    @property
    def received(self) -> int:
        return self.share if self.op is Op.REDUCE_SCATTER else self.whole

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.op}, {size_text(self.size_bytes)}"


@dataclass(frozen=True)
class CommBuffers:
    """The tensors of one worker for one case."""

    sent: Tensor
    received: Tensor  # the same tensor as `sent` where the collective works in place


def make_buffers(case: Case, allocate: Callable[[int], Tensor]) -> CommBuffers:
    sent = allocate(case.sent)
    return CommBuffers(sent, sent if case.op in (Op.ALL_REDUCE, Op.BROADCAST) else allocate(case.received))


def make_call(case: Case, buffers: CommBuffers, group: Any) -> Callable[[], object]:
    """Return a function that runs one collective on these tensors, and waits for it as a user does."""
    sent, received = buffers.sent, buffers.received
    calls: dict[Op, Callable[[], object]] = {
        Op.ALL_REDUCE: lambda: dist.all_reduce(sent, group=group),
        Op.REDUCE_SCATTER: lambda: REDUCE_SCATTER(received, sent, group=group),
        Op.ALL_GATHER: lambda: ALL_GATHER(received, sent, group=group),
        Op.BROADCAST: lambda: dist.broadcast(sent, src=0, group=group),
    }
    return calls[case.op]


# ------------------------------------------------------------------------------------------------------ known contents


@cache
def counted(device: torch.device) -> Tensor:
    """0, 1, ... PERIOD - 1, 0, 1, ...; long enough for PIECE elements from any position in the period."""
    return torch.arange(PIECE + PERIOD, device=device).remainder(PERIOD).float()


def contents(rank: int, first: int, like: Tensor) -> Tensor:
    """The elements that a worker sends from position `first` on. Small integers, which fp32 adds without rounding."""
    start = first % PERIOD
    return counted(like.device)[start : start + like.numel()] + rank


def expected(case: Case, rank: int, first: int, like: Tensor) -> Tensor:
    """The elements that a worker must receive from position `first` on, up to the end of that share at most."""
    if case.op is Op.BROADCAST:
        return contents(0, first, like)
    if case.op is Op.ALL_GATHER:
        return contents(first // case.share, first % case.share, like)
    before = rank * case.share if case.op is Op.REDUCE_SCATTER else 0
    return case.workers * contents(0, before + first, like) + case.workers * (case.workers - 1) // 2


def pieces(tensor: Tensor, *, share: int) -> Iterator[tuple[int, Tensor]]:
    """(first position, piece) of all pieces; short, so that checks take little memory, and none across two shares."""
    for start in range(0, tensor.numel(), share):
        end = min(start + share, tensor.numel())
        for first in range(start, end, PIECE):
            yield first, tensor[first : min(first + PIECE, end)]


def fill(buffers: CommBuffers, rank: int) -> None:
    if buffers.received is not buffers.sent:
        buffers.received.fill_(-1)
    for first, piece in pieces(buffers.sent, share=buffers.sent.numel()):
        piece.copy_(contents(rank, first, piece))


def check(case: Case, buffers: CommBuffers, rank: int, *, arm: str) -> None:
    """Raise LockstepError if a result is wrong: the time of a wrong result does not matter."""
    for first, piece in pieces(buffers.received, share=case.share):
        right = expected(case, rank, first, piece)
        if not torch.equal(piece, right):
            wrong = int((piece != right).nonzero()[0, 0])
            raise LockstepError(
                f"{case}: wrong result on {arm}: worker {rank} has {piece[wrong].item():g} at position "
                f"{first + wrong}, and {right[wrong].item():g} is right; no time was taken"
            )


# --------------------------------------------------------------------------------------------------------------- sizes


def parse_size(text: str) -> int:
    """Parse `4`, `4B`, `4KiB`, `25MiB` or `1GiB` to bytes. Raises ValueError."""
    number = text.strip().rstrip("BbKkMmGgIi ")
    factor = UNITS.get(text.strip()[len(number) :].strip().lower())
    if not (number.isascii() and number.isdecimal()) or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 4, 4KiB, 25MiB or 1GiB")
    size_bytes = int(number) * factor
    if size_bytes == 0 or size_bytes % ELEMENT_BYTES:
        raise ValueError(f"{text!r} is not a positive multiple of {ELEMENT_BYTES} bytes, and elements are fp32")
    return size_bytes


def size_text(size_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


# ----------------------------------------------------------------------------------------------------------- a worker


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

    @property
    def finish(self) -> Callable[[], None]:
        return finish_of(self.device)

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
            allocate = (
                partial(allocate_group_buffers, case, group, bench.device)
                if arm.endswith(IN_GROUP_MEMORY)
                else lambda: own
            )
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


def calls_in_row(call_s: float, *, row_s: float = ROW_S, most: int = MAX_CALLS) -> int:
    """Number of calls that fill `row_s`, at most `most`."""
    return min(ceil(row_s / max(call_s, 1e-9)), most)


def time_row(call: Call, calls: int, finish: Callable[[], None]) -> float:
    """Milliseconds per call; see NOTE [rows of calls]."""
    call()
    return time_calls(call, calls, finish)


def warm_up(call: Call | None, bench: CommBench) -> int:
    """Run warm-up calls. Returns the number of calls in a row; equal on all workers."""
    dist.barrier()
    call_s = 0.0
    if call:
        for _ in range(WARMUP_CALLS):
            call()
        call_s = 1e-3 * time_row(call, WARMUP_CALLS, bench.finish)
    return calls_in_row(largest(call_s))


def measure(case: Case, job: CommJob, bench: CommBench) -> CaseTimes:
    arm_calls = prepare_arms(case, bench)
    arms = [arm for arm in job.arms if arm not in arm_calls.left_out]
    calls = {arm: warm_up(arm_calls.calls.get(arm), bench) for arm in arms}
    turns = {
        arm: partial(time_row, arm_calls.calls[arm], calls[arm], bench.finish) for arm in arms if arm in arm_calls.calls
    }
    sync = RoundSync(barrier=dist.barrier, report=lambda text: bench.worker.send(""))  # shows that it is alive
    times = interleave(arms, turns, job.rounds, sync)
    dist.barrier()  # no worker frees memory that a peer still reads
    return CaseTimes(case, calls, times, arm_calls.left_out)


def work(worker: BenchWorker, job: CommJob) -> None:
    torch.set_num_threads(1)
    device = use_device(job.device, worker.rank)
    worker.join()
    groups = {backend: dist.new_group(backend=backend, timeout=worker.timeout) for backend in job.backends}
    bench = CommBench(worker, device, groups)
    for case in job.cases:
        worker.send(str(case))
        worker.send(measure(case, job, bench))
    worker.leave()
