"""What a hierarchy is made of: workers that reduce together, those of a host or one of each host.

All collectives are in place. `rows` is contiguous, one row for each worker of the part; ours is the one with our rank.
They are begun here, and over when the function they return has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)

from lockstep.comm.abortable_group import Link
from lockstep.comm.shm.reduce_ops import Reduction

Finish = Callable[[], None]
Kind: Any = ReduceOp.RedOpType  # SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR: averages are taken at the very end


class LinkBroken(RuntimeError):
    """A connection of `part` failed, or nothing came over it in time."""

    def __init__(self, message: str, part: Tree) -> None:
        super().__init__(message)
        self.part = part


class Part(Protocol):
    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, kind: Kind) -> Finish:
        """In whatever order is fastest."""

    def all_reduce_small(self, tensor: Tensor, kind: Kind) -> Finish:
        """With the fewest hops."""

    def reduce_scatter(self, rows: Tensor, kind: Kind) -> Finish:
        """Our row becomes the reduction of everybody's row of that number. The others may become anything."""

    def all_gather(self, rows: Tensor) -> Finish:
        """Every other row becomes what its owner has there."""

    def reduce(self, tensor: Tensor, kind: Kind, root: int) -> Finish:
        """With the root; the others' may become anything."""

    def broadcast(self, tensor: Tensor, root: int) -> Finish: ...

    def abort(self) -> None:
        """Whoever waits in this part, here and at the other workers of it, gets an error at once."""

    def shutdown(self) -> None: ...


def nothing() -> None:
    pass


class Alone:
    """A part of one."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor, kind: Kind) -> Finish:
        return nothing

    def all_reduce_small(self, tensor: Tensor, kind: Kind) -> Finish:
        return nothing

    def reduce_scatter(self, rows: Tensor, kind: Kind) -> Finish:
        return nothing

    def all_gather(self, rows: Tensor) -> Finish:
        return nothing

    def reduce(self, tensor: Tensor, kind: Kind, root: int) -> Finish:
        return nothing

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        return nothing

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Native:
    """A group with collectives of its own that are good enough: shared memory, NCCL."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def all_reduce(self, tensor: Tensor, kind: Kind) -> Finish:
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = ReduceOp(kind), False
        return _end_of(self.group.allreduce([tensor], options))

    def all_reduce_small(self, tensor: Tensor, kind: Kind) -> Finish:
        return self.all_reduce(tensor, kind)

    def reduce_scatter(self, rows: Tensor, kind: Kind) -> Finish:
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = ReduceOp(kind), False
        return _end_of(self.group._reduce_scatter_base(rows[self.rank], rows.view(-1), options))

    def all_gather(self, rows: Tensor) -> Finish:
        options = AllgatherOptions()
        options.asyncOp = False
        return _end_of(self.group._allgather_base(rows.view(-1), rows[self.rank], options))

    def reduce(self, tensor: Tensor, kind: Kind, root: int) -> Finish:
        options = ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor, options.asyncOp = ReduceOp(kind), root, 0, False
        return _end_of(self.group.reduce([tensor], options))

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, False
        return _end_of(self.group.broadcast([tensor], options))

    def abort(self) -> None:
        self.group.abort()

    def shutdown(self) -> None:
        self.group.shutdown()


def _end_of(work: Any) -> Finish:
    def finish() -> None:
        if work is not None:
            work.wait()

    return finish


class Tree:
    """Over a group that only moves bytes here: what is to be reduced is brought together and added along the tree.

    So every dtype works, the order is that of comm/tree_order.py, and no more is sent than in a ring: of the `size`
    rows each worker sends all but its own once, and gets them back once.
    """

    def __init__(self, link: Link, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.link = link
        self._scratch = Scratch()

    def all_reduce(self, tensor: Tensor, kind: Kind) -> Finish:
        """Not along the tree: this is the group's own. For what `goes_round` says."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(kind)
        with self._blames_links():
            work = self.link.group.allreduce([tensor], options)
        return lambda: self._wait(work)

    def all_reduce_small(self, tensor: Tensor, kind: Kind) -> Finish:
        """Everybody gets everything."""
        rows = self._scratch.take(tensor.numel() * self.size, tensor).view(self.size, -1)
        rows[self.rank].copy_(tensor)
        wait = self.all_gather(rows)

        def finish() -> None:
            wait()
            Reduction(kind, self.size).run(rows.unbind(), tensor, free=[True] * self.size)
            self._scratch.give(rows)

        return finish

    def reduce_scatter(self, rows: Tensor, kind: Kind) -> Finish:
        inbox = self._scratch.take(rows.numel(), rows).view(rows.shape)
        with self._blames_links():
            work = self.link.group.alltoall_base(_bytes(inbox), _bytes(rows), [], [])

        def finish() -> None:
            self._wait(work)
            Reduction(kind, self.size).run(inbox.unbind(), rows[self.rank], free=[True] * self.size)
            self._scratch.give(inbox)

        return finish

    def all_gather(self, rows: Tensor) -> Finish:
        with self._blames_links():
            work = self.link.group._allgather_base(_bytes(rows), _bytes(rows[self.rank]))
        return lambda: self._wait(work)

    def reduce(self, tensor: Tensor, kind: Kind, root: int) -> Finish:
        return self.all_reduce_small(tensor, kind)

    def broadcast(self, tensor: Tensor, root: int) -> Finish:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        with self._blames_links():
            work = self.link.group.broadcast([_bytes(tensor)], options)
        return lambda: self._wait(work)

    def barrier(self, options: Any) -> Finish:
        with self._blames_links():
            work = self.link.group.barrier(options)
        return lambda: self._wait(work)

    def abort(self) -> None:
        self.link.abort()

    def shutdown(self) -> None:
        self.link.group.shutdown()

    def hung_up(self) -> list[int]:
        """The workers of this part that are known to have broken off."""
        return self.link.hung_up(self.size)

    def _wait(self, work: Any) -> None:
        with self._blames_links():
            self.link.wait(work)

    @contextmanager
    def _blames_links(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LinkBroken(str(error), self) from error


def goes_round(dtype: torch.dtype, kind: Kind) -> bool:
    """Whether Gloo's ring may reduce it. It knows more dtypes, but narrow floats it would round at every step."""
    dtypes = (torch.float32, torch.float64, torch.int32, torch.int64)
    return dtype in dtypes and kind in (Kind.SUM, Kind.PRODUCT, Kind.MIN, Kind.MAX)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class Scratch:
    """Buffers for what is under way, kept for the next time: pages that are new are dear."""

    KEEP = 8  # of a size

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, numel: int, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            return torch.empty(numel, dtype=like.dtype, device=like.device)  # torch keeps that memory itself
        room = _room(numel * like.itemsize)
        with self._lock:
            free = self._free.setdefault(room, [])
            buffer = free.pop() if free else torch.empty(room, dtype=torch.uint8)
        return buffer[: numel * like.itemsize].view(like.dtype)

    def give(self, tensor: Tensor) -> None:
        """Back, once nobody uses it any more."""
        if tensor.device.type != "cpu":
            return
        room = _room(tensor.nbytes)
        with self._lock:
            if len(self._free[room]) < self.KEEP:
                self._free[room].append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))


def _room(size_bytes: int) -> int:
    """A few sizes serve all."""
    return 1 << max(12, (size_bytes - 1).bit_length())
