"""The sum over all shards of a global batch, with the same bits however the shards are distributed over workers.

Note [Canonical all-reduce]
Every worker contributes the subtrees that it can add up locally (comm/tree_order.py, Note [Subtrees]), one row each.
A row is divided into as many sections as there are workers. Each section is sent to its owner (all-to-all), the owner
adds in the order of the tree, and sends the result to all workers (all-gather). With one row per worker this moves as
many bytes as a ring all-reduce. Where the backend's own all-reduce adds along the same tree, or there are only two
summands, whose order does not matter, a single all-reduce is used. `shm` does, and so does `hierarchy` where hosts have
equal powers of two of workers: then only the sum of a host leaves it.

If each worker needs the sums of some elements only, the last part is left out, and half of the bytes with it
(comm/reduce_scatter.py). The bits of these sums are the same.

Note [Half-precision rows]
Gradients may be sent in half precision. Then the gradient of every *shard* is rounded, sums are computed in float32,
and the result is rounded once, so that the distribution of shards does not matter here either. A row that is a sum of
several shards stays float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import faults
from lockstep.comm import abortable_wait, tree_order
from lockstep.comm.collective_thread import CollectiveThread, Job, PendingResult
from lockstep.comm.compressed_sum import CompressedSum, Route, Scale, run_on_current_stream
from lockstep.comm.flat_subgroup import FlatSubgroup
from lockstep.comm.host_groups import NativeSubgroup, SingleWorker
from lockstep.comm.integer_codec import IntegerCodec
from lockstep.comm.peer_watch import PeerWatch
from lockstep.comm.reduce_scatter import ReduceScatter, ScatterMethod
from lockstep.comm.register_backends import backend_name
from lockstep.comm.tree_order import Subtree
from lockstep.errors import PeerLostError

ALIGN = 64  # in elements: sections begin at cache lines
HALF_DTYPES = (torch.float16, torch.bfloat16)


class ReduceMethod(Enum):
    """How the rows of all workers are added."""

    SINGLE_WORKER = auto()  # no communication
    ALL_REDUCE = auto()  # one all-reduce of the backend
    TREE = auto()  # Note [Canonical all-reduce]


@dataclass
class SumBuffers:
    """Memory of one sum, reused in every step: this worker's rows, and the result."""

    numel: int
    dtype: torch.dtype  # of a shard's summand, and of the result
    rows: Tensor  # [subtrees, numel rounded up]
    received: Tensor | None = None  # all workers' rows of the section that this worker owns; for ReduceMethod.TREE
    whole: Tensor | None = None  # the result; for ReduceMethod.TREE
    sent: Any = None  # the pending work
    started_s: float = 0.0
    finished_s: float | None = None  # None if the time of completion was not recorded
    scale: Scale = field(default=lambda: 1.0)
    scatter: ReduceScatter | None = None  # if every worker gets the sums of some elements only

    def set_finished(self, _done: Any) -> None:
        self.finished_s = time.monotonic()


@dataclass(frozen=True)
class AsyncBarrier:
    """A barrier that does not block until `wait`: the worker continues while the others reach the same point."""

    _sum: ShardSum
    _token: Tensor
    _pending: Any
    _started: Any  # CUDA event, None on a CPU

    def wait(self) -> None:
        """Return when all workers have started the barrier; a GPU is synchronised only up to that point.

        Raises PeerLostError if a worker was lost before.
        """
        where = "the barrier after the last step"
        self._sum.wait(self._pending, where)
        with self._sum.on_side_stream(self._started):
            if self._started is not None:
                self._sum.wait_for_values(self._pending, where)
            arrived = int(self._token)
        if arrived != self._sum.size:  # the collective was aborted, which a GPU does not report
            raise PeerLostError(f"a worker was lost before {where}")


class ShardSum:
    """Sums over all shards. `shares[rank]` are that worker's shards: contiguous, in order, every shard exactly once.

    Collective: all workers make the same calls in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shares: Sequence[range],
        *,
        device: torch.device,
        exact: bool = True,
        compresses: bool = False,
        in_thread: bool = False,
    ) -> None:
        """
        compresses  the sums are computed by jobs of `submit`
        in_thread   every collective has to run in the collective thread: the caller will `submit` jobs, or sums of
                    sections. Implied by `compresses`
        """
        self.group, self.device, self.shares = group, device, list(shares)
        self.shards = sum(map(len, shares))
        self._rank, self.size = group.rank(), group.size()
        # Without `exact` a worker's shards are one summand, and the backend may add in any order.
        self._trees = [
            tree_order.subtrees(share.start, share.stop, self.shards) if exact else (Subtree(r, 1),)
            for r, share in enumerate(shares)
        ]
        self.subtrees = self._trees[self._rank]  # this worker's
        self._summands = self.shards if exact else self.size
        self._row_per_shard = all(len(share) == len(nodes) for share, nodes in zip(shares, self._trees, strict=True))
        self._exact, self.is_timed = exact, False
        self._backend = backend = backend_name(group, device)
        # With `compresses` the group may belong to the program (hooks.py), whose own sums must stay as they are.
        may_change = exact and not compresses and backend == "hierarchy"
        adds_by_tree = backend == "shm" or (may_change and cast(Any, group).add_by_tree())
        self._method = choose_method(self._trees, self.shards, exact=exact, adds_by_tree=adds_by_tree)
        self.watch = PeerWatch(group, polls=device.type == "cpu")
        self.flat_subgroup = FlatSubgroup(group, self.watch, backend)
        by_tree = self._method is ReduceMethod.TREE
        needs_thread = by_tree or ((compresses or in_thread) and self.size > 1)
        self._thread = CollectiveThread(device, threaded=backend != "nccl") if needs_thread else None
        self.stages_on_cpu = backend == "gloo" and device.type == "cuda"  # it cannot exchange CUDA tensors
        # On the CPU the shm backend allocates the buffers, and scales the sum itself.
        self._shm = group._get_backend(device) if backend == "shm" and device.type == "cpu" else None

    @property
    def own_shards(self) -> range:
        """The shards of this worker."""
        return self.shares[self._rank]

    def merge_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the number of samples per shard as they are run.

        Without `exact`, a worker runs all its shards as one: its first shard has their samples, the others have none.
        """
        if self._exact:
            return list(counts)
        joined = [0] * self.shards
        for share in self.shares:
            joined[share.start] = sum(counts[n] for n in share)
        return joined

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        sections: Sequence[Sequence[range]] | None = None,
        buddies: Sequence[int] | None = None,
    ) -> SumBuffers:
        """Allocate the buffers of a sum of `numel` elements. The caller fills `rows`, one row per subtree.

        sections  the elements whose sums each worker gets; the result is those of this worker. Needs `in_thread`. None:
                  every worker gets all
        buddies   by rank, the worker that gets this section, too
        """
        rows = len(self.subtrees)
        padded = -(-numel // (self.size * ALIGN)) * ALIGN * self.size if self._method is ReduceMethod.TREE else numel
        sends_half = self._row_per_shard and self._method is not ReduceMethod.SINGLE_WORKER
        row_dtype = dtype if dtype not in HALF_DTYPES or sends_half else torch.float32
        if dtype in HALF_DTYPES and self._method is ReduceMethod.ALL_REDUCE and self._exact and self._shm is None:
            row_dtype = torch.float32  # only the shm backend adds half-precision rows in float32
        if self._shm is not None and self._method is ReduceMethod.ALL_REDUCE:
            memory: Tensor = self._shm.allocate_tensor(padded, dtype=row_dtype, device=self.device)
        else:
            memory = torch.empty(rows * padded, dtype=row_dtype, device=self.device)
        memory.zero_()  # padding is never written, and must not hold subnormal numbers, which are slow to add
        buffers = SumBuffers(numel, dtype, memory.view(rows, padded))
        if sections is not None and self._method is not ReduceMethod.SINGLE_WORKER:
            group: Any = self.group
            adds_on_hosts = self._backend == "hierarchy" and len(group.layout.hosts) < self.size
            how = ScatterMethod.WHOLE if adds_on_hosts else ScatterMethod.CHUNKS
            if adds_on_hosts and self._method is ReduceMethod.ALL_REDUCE:
                how = ScatterMethod.NATIVE
            counts = [len(nodes) for nodes in self._trees]
            buffers.scatter = ReduceScatter(
                buffers.rows,
                sections,
                buddies=buddies,
                dtype=dtype,
                method=how,
                workers=self.flat_subgroup,
                counts=counts,
                add=self._add,
            )
        return buffers

    def buffer_bytes(self, buffers: SumBuffers, *, without_result: bool) -> int:
        """Return the memory of the buffers on the device; `without_result`: without that of the result."""
        result = buffers.whole if self._method is ReduceMethod.TREE else buffers.rows
        tensors = [t for t in (buffers.rows, buffers.received, buffers.whole) if t is not None]
        there = [t for t in tensors if t.device.type == self.device.type]
        used = sum(t.nbytes for t in there if not (without_result and t is result and t.dtype == buffers.dtype))
        return used + (buffers.scatter.nbytes if buffers.scatter is not None else 0)

    # -- sums --------------------------------------------------------------------------------------------------------

    def start(self, buffers: SumBuffers, scale: Scale) -> None:
        """Start a sum. The rows must not be touched until `result`."""
        buffers.scale, buffers.started_s, buffers.finished_s = scale, time.monotonic(), None
        if self._method is ReduceMethod.SINGLE_WORKER:
            buffers.sent = None
        elif self._thread is not None:
            buffers.sent = self.submit(lambda: self.compute(buffers))
        elif self._shm is not None:
            group: Any = self.group
            buffers.sent = group.all_reduce_scaled(buffers.rows[0], scale)
        else:
            buffers.sent = self.group.allreduce([buffers.rows[0]], dist.AllreduceOptions())
            if self.is_timed and self.device.type == "cpu":
                buffers.sent.get_future().add_done_callback(buffers.set_finished)

    def submit(self, job: Job) -> PendingResult:
        """Run a job of several collectives after all sums before it, while the caller continues. See `wait`."""
        if self._thread is not None:
            return self._thread.submit(job)
        pending = PendingResult()
        pending.run(job)
        return pending

    def compute(self, buffers: SumBuffers) -> Tensor:
        """Compute a sum inside a job of `submit`. Returns it, flat; valid until the rows are written again."""
        if self._method is ReduceMethod.SINGLE_WORKER:
            return buffers.rows[0]
        if buffers.scatter is not None:
            return buffers.scatter.run(buffers.scale())
        by_tree = self._method is ReduceMethod.TREE
        return (self._reduce_by_tree(buffers) if by_tree else self._all_reduce(buffers))[: buffers.numel]

    def compressed(self, codec: IntegerCodec) -> CompressedSum:
        """Return how sums over the same shards are computed from compressed gradients, by jobs of `submit`."""
        own = len(self.shares[self._rank]) if self._exact else 1
        return CompressedSum(codec, self._route, shards=self._summands, own=own, device=self.device)

    @cached_property
    def _route(self) -> Route:
        """The way that compressed sums take between these workers."""
        shards = [len(share) if self._exact else 1 for share in self.shares]
        if self.size == 1:
            return Route.of_single_worker(shards[0], self.device)
        if self._backend == "shm":
            local = NativeSubgroup(self.group, self._rank, self.size)
            return Route(local, SingleWorker(), max(shards), sum(shards), self.device)
        if self._backend == "hierarchy":
            group: Any = self.group
            local, across, where, hosts = group.subgroups(self.device)
            of_host = max(sum(shards[rank] for rank in host) for host in hosts)
            run, cores = partial(group.run_in_order, "a compressed sum"), group.layout.cores_per_worker
            return Route(local, across, max(shards), of_host, where, cores_per_worker=cores, run=run)
        where = torch.device("cpu") if self.stages_on_cpu else self.device
        return Route(SingleWorker(), self.flat_subgroup, max(shards), max(shards), where)

    def finished_s(self, buffers: SumBuffers) -> float:
        """Return the time at which a sum completed. Call it after `result`. Exact only while `is_timed`."""
        return getattr(buffers.sent, "ended_s", None) or buffers.finished_s or time.monotonic()

    def result(self, buffers: SumBuffers, where: str) -> Tensor:
        """Wait for the sum, and return it times the scale, flat. Valid until the rows are written again."""
        if isinstance(buffers.sent, PendingResult):
            self.watch.wait_for(buffers.sent.done_within, where)
            return buffers.sent.wait()
        if buffers.sent is not None:
            self.watch.wait(buffers.sent, where)
        total = buffers.rows[0]
        if buffers.sent is None or self._shm is None:
            total.mul_(buffers.scale())
        return total.to(buffers.dtype)

    def start_small_sum(self, table: Tensor) -> Any:
        """Start a small sum over workers, in place, after the sums before it. Call `wait` with the result."""
        if self._method is ReduceMethod.SINGLE_WORKER:
            return None
        if self._thread is None:
            return self.group.allreduce([table], dist.AllreduceOptions())

        def job() -> Tensor:
            self.watch.wait(self.group.allreduce([table], dist.AllreduceOptions()), "a sum over all workers")
            return table

        return self._thread.submit(job)

    def start_barrier(self) -> AsyncBarrier:
        """Start a barrier after all sums before it are complete. All workers call it. See `AsyncBarrier`."""
        # On the CPU where the backend can: that all processes have reached this point is all that matters.
        token = torch.ones(1, device="cpu" if self._backend in ("shm", "gloo") else self.device)
        event = torch.cuda.current_stream(self.device).record_event() if token.is_cuda else None
        # Not in the thread: the caller may continue with other collectives of the group, which must follow this one.
        return AsyncBarrier(self, token, self.group.allreduce([token], dist.AllreduceOptions()), event)

    def add_sparse(self, parts: Sequence[Tensor], scale: Scale) -> Tensor:
        """Return the sum of sparse tensors times the scale. Blocks. `parts` has one tensor for each own subtree.

        All parts are sent to all workers: they are small, or they would not be sparse.
        """
        like = parts[0]
        nodes = [node for share in self._trees for node in share]
        first = nodes.index(self.subtrees[0])
        counts = torch.zeros(len(nodes), dtype=torch.int64, device=self.device)
        for n, part in enumerate(parts):
            counts[first + n] = part._nnz()
        self.wait_for_values(self.start_small_sum(counts), "the sizes of sparse gradients")
        sizes = counts.tolist()
        indices, width = counts.new_zeros(len(nodes), like.sparse_dim(), max(sizes)), like.shape[like.sparse_dim() :]
        values = torch.zeros(len(nodes), max(sizes), *width, dtype=like.dtype, device=self.device)
        for n, part in enumerate(parts, first):
            indices[n, :, : sizes[n]] = part.indices()
            values[n, : sizes[n]] += part.values()  # added to 0, as on the other workers: this turns -0 into +0
        self.wait(self.start_small_sum(indices), "the indices of sparse gradients")
        self.wait(self.start_small_sum(values), "the sparse gradients")
        rows = [coalesced(indices[n, :, :size], values[n, :size], like.shape) for n, size in enumerate(sizes)]
        for dst, src in tree_order.additions(nodes, self._summands):
            rows[dst] = add_coalesced(rows[dst], rows[src])
        total = rows[0]
        return coalesced(total.indices(), total.values() * scale(), total.shape)

    def wait(self, pending: Any, where: str) -> None:
        if isinstance(pending, PendingResult):
            self.watch.wait_for(pending.done_within, where)
            pending.wait()
        elif pending is not None:
            self.watch.wait(pending, where)

    def wait_for_values(self, pending: Any, where: str) -> None:
        """Wait for a small sum whose values the host reads. Raises PeerLostError if a lost worker has cut it off."""
        self.wait(pending, where)
        self.wait_on_device(where)

    def wait_on_device(self, where: str) -> None:
        """Wait until the sums are complete on the GPU too, if a lost worker may have cut them off (abortable_wait.py).

        Raises PeerLostError if one has.
        """
        with abortable_wait.device_wait(self.group, self.device, where) as done_within:
            if done_within is not None:
                self.watch.wait_for(done_within, where)

    @cached_property
    def _side_stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on_side_stream(self, after: Any) -> AbstractContextManager[Any]:
        """Return a context for reading CUDA results as of the event `after` without waiting for later work.

        On the current stream the read would wait for everything that is queued there.
        """
        if after is None:
            return nullcontext()
        self._side_stream.wait_event(after)
        return torch.cuda.stream(self._side_stream)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark this worker as inside a step, for the reports of other workers that wait for it."""
        self.watch.enter()
        try:
            yield
        finally:
            self.watch.leave()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    # -- in the collective thread ------------------------------------------------------------------------------------

    def _all_reduce(self, buffers: SumBuffers) -> Tensor:
        total = buffers.rows[0]

        def add() -> None:
            self.watch.wait(self.group.allreduce([total], dist.AllreduceOptions()), "the all_reduce of gradients")
            total.mul_(buffers.scale())

        run_on_current_stream([total], add)
        return total.to(buffers.dtype)

    def _reduce_by_tree(self, buffers: SumBuffers) -> Tensor:
        """See Note [Canonical all-reduce]."""
        mine, rows, per = len(self.subtrees), buffers.rows, buffers.rows.shape[1] // self.size
        # [worker][row][element]: data for one worker is contiguous. With one row it is already.
        packed = rows.view(mine, self.size, per).transpose(0, 1).contiguous().view(-1)
        counts = [len(nodes) for nodes in self._trees]
        packed = packed.cpu() if self.stages_on_cpu else packed
        if buffers.received is None or buffers.whole is None:  # kept: page faults cost as much as copying
            where = "cpu" if self.stages_on_cpu else self.device
            buffers.received = torch.empty(sum(counts) * per, dtype=rows.dtype, device=where)
            buffers.whole = torch.empty(per * self.size, dtype=buffers.dtype, device=where)
        received, whole = buffers.received, buffers.whole
        receive_sizes, send_sizes = [n * per for n in counts], [mine * per] * self.size
        self.flat_subgroup.exchange(received, packed, receive_sizes, send_sizes)()
        faults.at("exchange")
        total = self._add(list(received.to(self.device).view(-1, per)))
        section = whole[self._rank * per : (self._rank + 1) * per]
        section.copy_(total.mul_(buffers.scale()))
        self.flat_subgroup.all_gather(whole.view(self.size, per))()
        return whole.to(self.device)

    def _add(self, rows: list[Tensor]) -> Tensor:
        if rows[0].dtype in HALF_DTYPES:
            rows = [row.float() for row in rows]
        nodes = [node for share in self._trees for node in share]
        for dst, src in tree_order.additions(nodes, self._summands):
            rows[dst].add_(rows[src])
        return rows[0]


def choose_method(
    trees: Sequence[tuple[Subtree, ...]], shards: int, *, exact: bool, adds_by_tree: bool
) -> ReduceMethod:
    """Choose the method. `adds_by_tree`: the backend's own all-reduce adds along the tree over workers."""
    if len(trees) == 1:
        return ReduceMethod.SINGLE_WORKER
    if not exact:
        return ReduceMethod.ALL_REDUCE
    two_summands = len(trees) == 2 and all(len(nodes) == 1 for nodes in trees)
    by_backend = two_summands or (adds_by_tree and tree_order.is_tree_over_workers(trees, shards))
    return ReduceMethod.ALL_REDUCE if by_backend else ReduceMethod.TREE


def add_coalesced(left: Tensor, right: Tensor) -> Tensor:
    """Add two coalesced sparse tensors: no element has more than two summands, so the order does not matter."""
    indices = torch.cat([left.indices(), right.indices()], dim=1)
    values = torch.cat([left.values(), right.values()])
    return torch.sparse_coo_tensor(indices, values, left.shape, check_invariants=False).coalesce()


def coalesced(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Make a sparse tensor from indices that are known to be sorted and unique."""
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)
