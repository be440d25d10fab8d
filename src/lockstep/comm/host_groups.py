"""The subgroups of a hierarchy: the workers of one host, or one worker of each host.

All collectives are in place. `rows` is contiguous and has one row for each worker of the subgroup, by rank. A method
starts a collective, and returns a function that waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep._torch import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)
from lockstep.comm.abortable_group import AbortableGroup
from lockstep.comm.shm.reduce_ops import Reduction

Finish = Callable[[], None]
OpType: Any = ReduceOp.RedOpType  # SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR: AVG is a SUM, divided at the very end


class ConnectionBroken(RuntimeError):
    """A connection of `subgroup` failed, or nothing was received in time."""

    def __init__(self, message: str, subgroup: TreeSubgroup) -> None:
        super().__init__(message)
        self.subgroup = subgroup


class Subgroup(Protocol):
    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: OpType) -> Finish:
        """Reduce in the order that is fastest."""

    def all_reduce_small(self, tensor: Tensor, op: OpType) -> Finish:
        """Reduce with the fewest hops."""

    def reduce_scatter(self, rows: Tensor, op: OpType) -> Finish:
        """Reduce row `rank` over all workers into it. The other rows are undefined afterwards."""

    def all_gather(self, rows: Tensor) -> Finish:
        """Fill every other row with the values that its owner has there."""

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

    def all_reduce(self, tensor: Tensor, op: OpType) -> Finish:
        return no_op

    def all_reduce_small(self, tensor: Tensor, op: OpType) -> Finish:
        return no_op

    def reduce_scatter(self, rows: Tensor, op: OpType) -> Finish:
        return no_op

    def all_gather(self, rows: Tensor) -> Finish:
        return no_op

    def reduce(self, tensor: Tensor, op: OpType, root: int) -> Finish:
        return no_op

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        return no_op

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class NativeSubgroup:
    """Uses the collectives of the group itself: shared memory, NCCL."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def all_reduce(self, tensor: Tensor, op: OpType) -> Finish:
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = ReduceOp(op), False
        return _finish_of(self.group.allreduce([tensor], options))

    def all_reduce_small(self, tensor: Tensor, op: OpType) -> Finish:
        return self.all_reduce(tensor, op)

    def reduce_scatter(self, rows: Tensor, op: OpType) -> Finish:
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = ReduceOp(op), False
        return _finish_of(self.group._reduce_scatter_base(rows[self.rank], rows.view(-1), options))

    def all_gather(self, rows: Tensor) -> Finish:
        options = AllgatherOptions()
        options.asyncOp = False
        return _finish_of(self.group._allgather_base(rows.view(-1), rows[self.rank], options))

    def reduce(self, tensor: Tensor, op: OpType, root: int) -> Finish:
        options = ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor, options.asyncOp = ReduceOp(op), root, 0, False
        return _finish_of(self.group.reduce([tensor], options))

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, False
        return _finish_of(self.group.broadcast([tensor], options))

    def abort(self) -> None:
        self.group.abort()

    def shutdown(self) -> None:
        self.group.shutdown()


def _finish_of(work: Any) -> Finish:
    def finish() -> None:
        if work is not None:
            work.wait()

    return finish


class TreeSubgroup:
    """Uses the group only to move bytes: operands are gathered, and reduced locally along the tree.

    So every dtype works, the order is that of comm/tree_order.py, and no more is sent than in a ring: each worker sends
    all of the `size` rows but its own once, and receives them once.
    """

    def __init__(self, transport: AbortableGroup, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.transport = transport
        self._scratch = ScratchBuffers()

    def all_reduce(self, tensor: Tensor, op: OpType) -> Finish:
        """Reduce with the group's own all-reduce, not along the tree. Only for dtypes that `ring_can_reduce` allows."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(op)
        with self._connection_errors():
            work = self.transport.group.allreduce([tensor], options)
        return lambda: self._wait(work)

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

    def reduce_scatter(self, rows: Tensor, op: OpType) -> Finish:
        inbox = self._scratch.acquire(rows.numel(), rows).view(rows.shape)
        with self._connection_errors():
            work = self.transport.group.alltoall_base(_bytes(inbox), _bytes(rows), [], [])

        def finish() -> None:
            self._wait(work)
            Reduction(op, self.size).run(inbox.unbind(), rows[self.rank], free=[True] * self.size)
            self._scratch.release(inbox)

        return finish

    def all_gather(self, rows: Tensor) -> Finish:
        with self._connection_errors():
            work = self.transport.group._allgather_base(_bytes(rows), _bytes(rows[self.rank]))
        return lambda: self._wait(work)

    def reduce(self, tensor: Tensor, op: OpType, root: int) -> Finish:
        return self.all_reduce_small(tensor, op)

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        with self._connection_errors():
            work = self.transport.group.broadcast([_bytes(tensor)], options)
        return lambda: self._wait(work)

    def barrier(self, options: Any) -> Finish:
        with self._connection_errors():
            work = self.transport.group.barrier(options)
        return lambda: self._wait(work)

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        self.transport.group.shutdown()

    def disconnected_ranks(self) -> list[int]:
        """Return the ranks of this subgroup that are known to have disconnected."""
        return self.transport.disconnected_ranks(self.size)

    def _wait(self, work: Any) -> None:
        with self._connection_errors():
            self.transport.wait(work)

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


class ScratchBuffers:
    """Buffers for pending collectives, kept for reuse: page faults are expensive."""

    KEEP = 8  # buffers of each size

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def acquire(self, numel: int, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            return torch.empty(numel, dtype=like.dtype, device=like.device)  # torch caches this memory itself
        capacity = _capacity_bytes(numel * like.itemsize)
        with self._lock:
            free = self._free.setdefault(capacity, [])
            buffer = free.pop() if free else torch.empty(capacity, dtype=torch.uint8)
        return buffer[: numel * like.itemsize].view(like.dtype)

    def release(self, tensor: Tensor) -> None:
        """Return a buffer that is no longer used."""
        if tensor.device.type != "cpu":
            return
        capacity = _capacity_bytes(tensor.nbytes)
        with self._lock:
            if len(self._free[capacity]) < self.KEEP:
                self._free[capacity].append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))


def _capacity_bytes(size_bytes: int) -> int:
    """Round up to a power of two, so that few sizes occur."""
    return 1 << max(12, (size_bytes - 1).bit_length())
