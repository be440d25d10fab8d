"""Which workers are on which host, and the subgroups of a hierarchy: the workers of one host, or one worker of each.

`HostLayout` and the division of messages are pure. `HostRendezvous`, at the end, creates the subgroups. All their
collectives are in place. `rows` is contiguous and has one row for each worker of the subgroup, by rank. A method starts
a collective, and returns a function that waits for its end.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import _torch
from lockstep.comm.abortable_group import AbortableGroup, Gloo, Nccl
from lockstep.comm.scratch_buffers import ScratchBuffers
from lockstep.comm.shm.reduce_ops import Reduction
from lockstep.errors import WorldError
from lockstep.process_identity import identify_host
from lockstep.world.rendezvous import poll_key

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.005
SHARED_MEMORY_TIMEOUT = timedelta(seconds=30)  # all workers have joined already

Network = type[Gloo] | type[Nccl]
LocalGroup = Callable[..., Any]
"""Makes the group of one host from (store, rank, size, timeout, global_ranks=...), as ShmGroup does."""

Finish = Callable[[], None]
# SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR: AVG is a SUM, divided at the very end
OpType: Any = _torch.ReduceOp.RedOpType

# A message is sent in about CHUNKS chunks, so that shared memory and the network work at the same time. A piece that
# one worker sends to one host should not be so small that its overhead exceeds its transfer time, nor a chunk so large
# that its copies fill the memory.
CHUNKS = 12
MIN_PIECE_BYTES = 256 << 10
MAX_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class HostLayout:
    """The hosts as seen from one worker. Hosts are ordered by their lowest rank, the workers of a host by rank.

    cores_per_worker  on the host that has the fewest
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    cores_per_worker: float = 1.0

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        """The index of this worker's host."""
        return self.host_of(self.rank)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this worker's host, its own included."""
        return self.hosts[self.host]

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def num_columns(self) -> int:
        """The number of columns: as many as the smallest host has workers.

        Column i consists of the i-th worker of every host; each column sends one slice of a message between hosts.
        Workers beyond the last column contribute inside their host, and receive the result there.
        """
        return min(map(len, self.hosts))

    @property
    def has_column(self) -> bool:
        """Whether this worker belongs to a column."""
        return self.local_rank < self.num_columns

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks of this worker's column, one of each host."""
        assert self.has_column
        return tuple(ranks[self.local_rank] for ranks in self.hosts)

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of workers."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    def host_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)


def group_by_host(identities: Sequence[str], rank: int, cores: Sequence[int] = ()) -> HostLayout:
    """Return the layout. `identities` has the host's identity for each rank; workers with equal ones share a host.

    cores  on how many each rank may run; none: not known
    """
    hosts: dict[str, list[int]] = {}
    for other, text in enumerate(identities):
        hosts.setdefault(text, []).append(other)
    per_worker = min((min(cores[r] for r in ranks) / len(ranks) for ranks in hosts.values() if cores), default=1.0)
    return HostLayout(rank, tuple(map(tuple, hosts.values())), per_worker)


def chunk_bytes(message_bytes: int, pieces: int) -> int:
    """Return the size of a chunk, if each chunk is divided into so many pieces."""
    least = MIN_PIECE_BYTES * pieces
    return min(max(-(-message_bytes // CHUNKS), least), max(MAX_CHUNK_BYTES, least))


def split_range(numel: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of length `step` that cover `numel` elements; the last one may be shorter."""
    for first in range(0, numel, step):
        yield slice(first, min(first + step, numel))


class ConnectionBroken(RuntimeError):
    """A connection of `subgroup` failed, or nothing was received in time."""

    def __init__(self, message: str, subgroup: TreeSubgroup) -> None:
        super().__init__(message)
        self.subgroup = subgroup


class RowSubgroup(Protocol):
    """Workers that exchange rows of bytes."""

    rank: int
    size: int

    def all_reduce_small(self, tensor: Tensor, op: OpType) -> Finish:
        """Reduce with the fewest hops."""

    def all_gather(self, rows: Tensor) -> Finish:
        """Fill every other row with the values that its owner has there."""

    def exchange_rows(self, rows: Tensor) -> tuple[Tensor, Finish]:
        """Send row i to worker i. Returns the rows that this worker gets, by rank, once they have arrived."""


class Subgroup(RowSubgroup, Protocol):
    """The workers of one host, or one worker of each."""

    def all_reduce(self, tensor: Tensor, op: OpType) -> Finish:
        """Reduce in the order that is fastest."""

    def reduce_scatter(self, rows: Tensor, op: OpType) -> Finish:
        """Reduce row `rank` over all workers into it. The other rows are undefined afterwards."""

    def reduce(self, tensor: Tensor, op: OpType, root: int) -> Finish:
        """Reduce into the tensor of the root. The tensors of other workers are undefined afterwards."""

    def broadcast(self, tensor: Tensor, root: int) -> Finish: ...

    def abort(self) -> None:
        """Make every wait in this subgroup, here and on its other workers, fail at once."""

    def shutdown(self) -> None: ...


def no_op() -> None:
    pass


class SingleWorker:
    """A subgroup of one worker: there is nothing to do."""

    rank, size = 0, 1

    def _start(self, *args: Any) -> Finish:
        return no_op

    all_reduce = all_reduce_small = reduce_scatter = all_gather = reduce = broadcast = _start

    def exchange_rows(self, rows: Tensor) -> tuple[Tensor, Finish]:
        return rows, no_op

    def abort(self) -> None:
        pass

    shutdown = abort


def _set_options(options: Any, *, op: OpType = None, root: int | None = None) -> Any:
    """Set the options of a collective of torch, and return them."""
    if op is not None:
        options.reduceOp = _torch.ReduceOp(op)
    if root is not None:
        options.rootRank, options.rootTensor = root, 0
    return options


class NativeSubgroup:
    """Uses the collectives of the group itself: shared memory, NCCL."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def _start(self, method: str, *arguments: Any) -> Finish:
        arguments[-1].asyncOp = False
        work = getattr(self.group, method)(*arguments)
        return no_op if work is None else work.wait

    def all_reduce(self, tensor: Tensor, op: OpType) -> Finish:
        return self._start("allreduce", [tensor], _set_options(_torch.AllreduceOptions(), op=op))

    all_reduce_small = all_reduce

    def reduce_scatter(self, rows: Tensor, op: OpType) -> Finish:
        options = _set_options(_torch.ReduceScatterOptions(), op=op)
        return self._start("_reduce_scatter_base", rows[self.rank], rows.view(-1), options)

    def all_gather(self, rows: Tensor) -> Finish:
        return self._start("_allgather_base", rows.view(-1), rows[self.rank], _torch.AllgatherOptions())

    def exchange_rows(self, rows: Tensor) -> tuple[Tensor, Finish]:
        inbox = torch.empty_like(rows)
        return inbox, self._start("alltoall_base", inbox.view(-1), rows.view(-1), [], [], dist.AllToAllOptions())

    def reduce(self, tensor: Tensor, op: OpType, root: int) -> Finish:
        return self._start("reduce", [tensor], _set_options(_torch.ReduceOptions(), op=op, root=root))

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        return self._start("broadcast", [tensor], _set_options(_torch.BroadcastOptions(), root=root))

    def abort(self) -> None:
        self.group.abort()

    def shutdown(self) -> None:
        self.group.shutdown()


class TreeSubgroup:
    """Uses the group only to move bytes: operands are gathered, and reduced locally along the tree.

    So every dtype works, the order is that of comm/tree_order.py, and no more is sent than in a ring: each worker sends
    all of the `size` rows but its own once, and receives them once.
    """

    def __init__(self, transport: AbortableGroup, rank: int, size: int) -> None:
        self.transport, self.rank, self.size = transport, rank, size
        self._scratch = ScratchBuffers()

    def all_reduce(self, tensor: Tensor, op: OpType) -> Finish:
        """Reduce with the group's own all-reduce, not along the tree. Only for dtypes that `ring_can_reduce` allows."""
        return self._start("allreduce", [tensor], _set_options(_torch.AllreduceOptions(), op=op))

    def all_reduce_small(self, tensor: Tensor, op: OpType) -> Finish:
        """Gather all operands on every worker, and reduce them there."""
        rows = self._scratch.acquire(tensor.numel() * self.size, tensor).view(self.size, -1)
        rows[self.rank].copy_(tensor)
        wait = self.all_gather(rows)

        def finish() -> None:
            wait()
            Reduction(op, self.size).run(rows.unbind(), tensor, free=[True] * self.size)
            self._scratch.release(rows)

        return finish

    def exchange_rows(self, rows: Tensor) -> tuple[Tensor, Finish]:
        inbox = torch.empty_like(rows)
        return inbox, self._start("alltoall_base", _bytes(inbox), _bytes(rows), [], [])

    def reduce_scatter(self, rows: Tensor, op: OpType) -> Finish:
        inbox = self._scratch.acquire(rows.numel(), rows).view(rows.shape)
        wait = self._start("alltoall_base", _bytes(inbox), _bytes(rows), [], [])

        def finish() -> None:
            wait()
            Reduction(op, self.size).run(inbox.unbind(), rows[self.rank], free=[True] * self.size)
            self._scratch.release(inbox)

        return finish

    def all_gather(self, rows: Tensor) -> Finish:
        return self._start("_allgather_base", _bytes(rows), _bytes(rows[self.rank]))

    def reduce(self, tensor: Tensor, op: OpType, root: int) -> Finish:
        return self.all_reduce_small(tensor, op)

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        return self._start("broadcast", [_bytes(tensor)], _set_options(_torch.BroadcastOptions(), root=root))

    def barrier(self, options: Any) -> Finish:
        return self._start("barrier", options)

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        self.transport.group.shutdown()

    def disconnected_ranks(self) -> list[int]:
        """Return the ranks of this subgroup that are known to have disconnected."""
        return self.transport.disconnected_ranks(self.size)

    def _start(self, method: str, *args: Any) -> Finish:
        with self._connection_errors():
            work = getattr(self.transport.group, method)(*args)

        def finish() -> None:
            with self._connection_errors():
                self.transport.wait(work)

        return finish

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ConnectionBroken(str(error), self) from error


def ring_can_reduce(dtype: torch.dtype, op: OpType) -> bool:
    """Whether Gloo's ring may reduce it. Gloo has more dtypes, but rounds half-precision floats at every step."""
    dtypes = (torch.float32, torch.float64, torch.int32, torch.int64)
    return dtype in dtypes and op in (OpType.SUM, OpType.PRODUCT, OpType.MIN, OpType.MAX)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class MemberInfo:
    """What a worker publishes about itself."""

    rank: int  # global rank, used in errors; differs from the rank in a subgroup
    pid: int
    host: str  # identity of the host; equal on all its workers
    host_name: str  # for messages
    exact: bool
    nccl: bool
    cores: int  # on which it may run

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host_name})"


class HostRendezvous:
    """Exchanges information through the store; all waits share one deadline."""

    def __init__(self, store: _torch.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def exchange_members(self, global_rank: int, *, exact: bool) -> tuple[MemberInfo, ...]:
        host = socket.gethostname()
        cores = len(os.sched_getaffinity(0))
        mine = MemberInfo(global_rank, os.getpid(), identify_host(), host, exact, Nccl.is_available(), cores)
        self._store.set(f"member/{self._rank}", json.dumps(asdict(mine)))
        members = tuple(MemberInfo(**json.loads(self._read(f"member/{rank}", rank))) for rank in range(self._size))
        for member in members:
            if member.exact != mine.exact:
                raise WorldError(
                    f"{mine} asks for exact={mine.exact} and {member} for exact={member.exact}; "
                    "set LOCKSTEP_EXACT to the same on all workers"
                )
        return members

    def create_flat(self, network: Network) -> AbortableGroup:
        """Create a group of all workers."""
        store = _torch.PrefixStore(f"{network.__name__}/flat", self._store)
        return network(store, self._rank, self._size, self._timeout)

    def create_local(self, layout: HostLayout, make: LocalGroup, global_ranks: Sequence[int]) -> Subgroup:
        """Create the subgroup of this host: the group that `make` returns, or Gloo if that fails for a worker."""
        rank, size = layout.local_rank, len(layout.local_ranks)
        if size == 1:
            return SingleWorker()
        group, failure = None, ""
        store = _torch.PrefixStore(f"local/{layout.host}", self._store)
        try:
            group = make(store, rank, size, min(self._timeout, SHARED_MEMORY_TIMEOUT), global_ranks=global_ranks)
            group.set_timeout(self._timeout)
        except RuntimeError as error:
            failure = str(error) or type(error).__name__
        # Shared memory is of use only if it works for all workers of the host, so they compare.
        self._store.set(f"shared/{self._rank}", failure or "yes")
        answers = [self._read(f"shared/{other}", other) for other in layout.local_ranks]
        if group is not None and set(answers) == {"yes"}:
            return NativeSubgroup(group, rank, size)
        if group is not None:
            group.shutdown()
        if rank == 0:
            why = next(answer for answer in answers if answer != "yes")
            logger.warning("the workers on %s use Gloo and no shared memory: %s", socket.gethostname(), why)
        store = _torch.PrefixStore(f"gloo/{layout.host}", self._store)
        return TreeSubgroup(Gloo(store, rank, size, self._timeout), rank, size)

    def all_share_memory(self, layout: HostLayout) -> bool:
        """Whether on every host the workers share memory. A host with one worker counts."""
        not_alone = [rank for ranks in layout.hosts if len(ranks) > 1 for rank in ranks]
        return all(self._read(f"shared/{rank}", rank) == "yes" for rank in not_alone)

    def create_column(self, layout: HostLayout, network: Network) -> Subgroup:
        """Create the subgroup of this worker's column."""
        rank, size = layout.host, len(layout.hosts)
        if size == 1 or not layout.has_column:
            return SingleWorker()
        store = _torch.PrefixStore(f"{network.__name__}/column/{layout.local_rank}", self._store)
        return TreeSubgroup(network(store, rank, size, self._timeout), rank, size)

    def _read(self, key: str, rank: int) -> str:
        def check() -> None:
            if time.monotonic() > self._deadline:
                raise WorldError(
                    f"rank {self._rank} waited {self._timeout.total_seconds():g} s for rank {rank} of {self._size} to "
                    "join the group, in vain; look at its output, and check that it calls init_process_group or "
                    "new_group too"
                )

        return poll_key(self._store, key, check, itertools.repeat(POLL_INTERVAL_S))
