"""The sum over all shards of a global batch, with the same bits whoever holds which shards.

Note [Canonical all-reduce]
Every worker brings the subtrees that it could add up by itself (comm/tree_order.py, Note [Subtrees]): one row each.
The row is cut into as many sections as there are workers; everybody sends each section to its owner (all-to-all), the
owner adds up in the order of the tree, and sends the result to everybody (all-gather). With one row per worker these
are the bytes of a ring all-reduce. Over Gloo both are messages from one worker to another: its own all-to-all and
all-gather copy everything once more (docs/log.md). Where the backend's own all-reduce adds along the same tree (`shm`),
or there are only two summands, whose order does not matter, one all-reduce does it all.

Note [Narrow rows]
Gradients may travel in half precision. Then the gradient of every *shard* is rounded, sums are formed in float32, and
the result is rounded once: again nothing depends on who holds what. A row that is a sum of several shards stays
float32.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import faults
from lockstep.comm import tree_order
from lockstep.comm.collective_thread import Lane, Pending
from lockstep.comm.peer_watch import Watch
from lockstep.comm.register_backends import backend_name
from lockstep.comm.tree_order import Subtree
from lockstep.errors import PeerLostError

ALIGN = 64  # elements: sections begin at cache lines
NARROW = (torch.float16, torch.bfloat16)

Scale = Callable[[], float | Tensor]  # asked for when everything that was started before has come


class Way(Enum):
    """How the rows of all workers become one."""

    ALONE = auto()  # there is one worker
    AT_ONCE = auto()  # an all-reduce of the backend
    BY_TREE = auto()  # Note [Canonical all-reduce]


@dataclass
class Parcel:
    """Memory for one sum after the other of the same size: this worker's rows, and the result."""

    numel: int
    dtype: torch.dtype  # of a shard's summand, and of the result
    rows: Tensor  # [subtrees, numel, rounded up]
    received: Tensor | None = None  # everybody's rows of our section, by tree
    whole: Tensor | None = None  # the result, by tree
    sent: Any = None
    left_s: float = 0.0  # when it was sent
    came_s: float | None = None  # when the sum was there, if somebody was told
    scale: Scale = field(default=lambda: 1.0)


@dataclass(frozen=True)
class Receipt:
    """Tells a worker that all others have come to a place in the program, while it goes on itself."""

    _sum: ShardSum
    _token: Tensor
    _pending: Any
    _started: Any  # an event, on a GPU

    def wait(self) -> None:
        """Return when all workers have come there; a GPU is waited for only up to the same place.

        Raises PeerLostError if a worker was lost before.
        """
        where = "the receipt of the last step"
        self._sum.wait(self._pending, where)
        with self._sum.aside(self._started):
            if self._started is not None:
                self._sum.wait(self._pending, where)
            came = int(self._token)
        if came != self._sum.size:  # the collective was given up, which a GPU does not tell
            raise PeerLostError(f"a worker was lost before {where}")


class ShardSum:
    """All workers together. `shares[rank]` are the shards of each worker: neighbours, in order, all of them once."""

    def __init__(
        self, group: dist.ProcessGroup, shares: Sequence[range], *, device: torch.device, exact: bool = True
    ) -> None:
        self.group, self.device, self.shares = group, device, list(shares)
        self.shards = sum(map(len, shares))
        self._rank, self.size = group.rank(), group.size()
        # Without exactness a worker's shards are one summand, and the backend may add as it likes.
        self._trees = [
            tree_order.subtrees(share.start, share.stop, self.shards) if exact else (Subtree(r, 1),)
            for r, share in enumerate(shares)
        ]
        self.mine = self._trees[self._rank]
        self._summands = self.shards if exact else self.size
        self._single = all(len(share) == len(nodes) for share, nodes in zip(shares, self._trees, strict=True))
        self._exact = exact
        self.is_timed = False
        self._backend = backend = backend_name(group, device)
        self._way = choose_way(self._trees, self.shards, exact=exact, adds_by_tree=backend == "shm")
        self._watch = Watch(group, polls=device.type == "cpu")
        self._lane = Lane(device, threaded=backend != "nccl") if self._way is Way.BY_TREE else None
        self._stages = backend == "gloo" and device.type == "cuda"  # it cannot exchange tensors of a GPU
        # On the host shm gives memory, and scales.
        self._heap = group._get_backend(device) if backend == "shm" and device.type == "cpu" else None

    def as_run(self, counts: Sequence[int]) -> list[int]:
        """Samples of every shard, as they are run: a worker that runs its shards as one runs them as its first."""
        if self._exact:
            return list(counts)
        joined = [0] * self.shards
        for share in self.shares:
            joined[share.start] = sum(counts[n] for n in share)
        return joined

    def parcel(self, numel: int, dtype: torch.dtype) -> Parcel:
        rows = len(self.mine)
        per = -(-numel // self.size) if self._way is Way.BY_TREE else numel
        padded = -(-per // ALIGN) * ALIGN * self.size if self._way is Way.BY_TREE else numel
        kind = dtype if dtype not in NARROW or (self._single and self._way is not Way.ALONE) else torch.float32
        if dtype in NARROW and self._way is Way.AT_ONCE and self._exact and self._heap is None:
            kind = torch.float32  # only ours adds narrow rows in float32
        if self._heap is not None and self._way is Way.AT_ONCE:
            memory: Tensor = self._heap.allocate_tensor(padded, dtype=kind, device=self.device)
        else:
            memory = torch.empty(rows * padded, dtype=kind, device=self.device)
        memory.zero_()  # what lies between gradients is never written, and must be no number that slows sums down
        return Parcel(numel, dtype, memory.view(rows, padded))

    # -- there and back ----------------------------------------------------------------------------------------------

    def start(self, parcel: Parcel, scale: Scale) -> None:
        """All workers, the same parcels in the same order. The rows belong to us until `result`."""
        parcel.scale, parcel.left_s, parcel.came_s = scale, time.monotonic(), None
        if self._way is Way.ALONE:
            parcel.sent = None
        elif self._lane is not None:
            parcel.sent = self._lane.submit(lambda: self._by_tree(parcel))
        elif self._scales:
            group: Any = self.group
            parcel.sent = group.all_reduce_scaled(parcel.rows[0], scale)
        else:
            parcel.sent = self.group.allreduce([parcel.rows[0]], dist.AllreduceOptions())
            if self.is_timed and self.device.type == "cpu":
                parcel.sent.get_future().add_done_callback(partial(_came, parcel))

    def came_s(self, parcel: Parcel) -> float:
        """When the sum was there, which was asked for already. Exact only while `is_timed`."""
        ended_s = getattr(parcel.sent, "ended_s", None)
        return ended_s or parcel.came_s or time.monotonic()

    def result(self, parcel: Parcel, where: str) -> Tensor:
        """The sum times the scale, flat. Until the rows are written again."""
        if isinstance(parcel.sent, Pending):
            self._watch.wait_for(parcel.sent.done_within, where)
            return parcel.sent.wait()[: parcel.numel]
        if parcel.sent is not None:
            self._watch.wait(parcel.sent, where)
        total = parcel.rows[0]
        if parcel.sent is None or not self._scales:
            total.mul_(parcel.scale())
        return total.to(parcel.dtype)

    @property
    def _scales(self) -> bool:
        return self._heap is not None

    def add_up(self, table: Tensor) -> Pending | Any:
        """A small sum over workers, in the order of the others. Wait for what is returned before you look."""
        if self._way is Way.ALONE:
            return _Nothing()
        if self._lane is None:
            return self.group.allreduce([table], dist.AllreduceOptions())

        def job() -> Tensor:
            self._watch.wait(self.group.allreduce([table], dist.AllreduceOptions()), "a sum over all workers")
            return table

        return self._lane.submit(job)

    def start_receipt(self) -> Receipt:
        """All workers, when all sums before it have come. See `Receipt`."""
        # On the host where the backend can: that all hosts have come there is all that is asked.
        token = torch.ones(1, device="cpu" if self._backend in ("shm", "gloo") else self.device)
        event = torch.cuda.current_stream(self.device).record_event() if token.is_cuda else None
        # Not in the lane: the caller may go on to other collectives of the group, which must come after this one.
        return Receipt(self, token, self.group.allreduce([token], dist.AllreduceOptions()), event)

    def add_sparse(self, parts: Sequence[Tensor], scale: Scale) -> Tensor:
        """The sum of everybody's sparse tensors, `parts` being one for each of our subtrees. Waits for the others.

        All parts go to all workers: they are small, or they would not be sparse.
        """
        like = parts[0]
        nodes = [node for share in self._trees for node in share]
        first = nodes.index(self.mine[0])
        counts = torch.zeros(len(nodes), dtype=torch.int64, device=self.device)
        for n, part in enumerate(parts):
            counts[first + n] = part._nnz()
        self.wait(self.add_up(counts), "the sizes of sparse gradients")
        sizes = counts.tolist()
        indices = torch.zeros(len(nodes), like.sparse_dim(), max(sizes), dtype=torch.int64, device=self.device)
        width = like.shape[like.sparse_dim() :]
        values = torch.zeros(len(nodes), max(sizes), *width, dtype=like.dtype, device=self.device)
        for n, part in enumerate(parts, first):
            indices[n, :, : sizes[n]] = part.indices()
            values[n, : sizes[n]] += part.values()  # added to 0, as the others see it: there is no -0 left
        self.wait(self.add_up(indices), "the indices of sparse gradients")
        self.wait(self.add_up(values), "the sparse gradients")
        rows = [coalesced(indices[n, :, :size], values[n, :size], like.shape) for n, size in enumerate(sizes)]
        for dst, src in tree_order.additions(nodes, self._summands):
            rows[dst] = add_coalesced(rows[dst], rows[src])
        total = rows[0]
        return coalesced(total.indices(), total.values() * scale(), total.shape)

    def wait(self, pending: Any, where: str) -> None:
        if isinstance(pending, Pending):
            self._watch.wait_for(pending.done_within, where)
            pending.wait()
        elif isinstance(pending, _Nothing):
            pending.wait()
        else:
            self._watch.wait(pending, where)

    @functools.cached_property
    def _side_stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def aside(self, after: Any) -> AbstractContextManager[Any]:
        """For reading what a GPU had at the event `after`: on the stream of the program we would wait for all of it."""
        if after is None:
            return nullcontext()
        self._side_stream.wait_event(after)
        return torch.cuda.stream(self._side_stream)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Whoever waits for us is told that we are on our way."""
        self._watch.enter()
        try:
            yield
        finally:
            self._watch.leave()

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()

    # -- by tree -----------------------------------------------------------------------------------------------------

    def _by_tree(self, parcel: Parcel) -> Tensor:
        """In the lane. See Note [Canonical all-reduce]."""
        mine, rows = len(self.mine), parcel.rows
        per = rows.shape[1] // self.size
        # [worker][row][element]: what goes to one worker lies together. With one row it does already.
        packed = rows.view(mine, self.size, per).transpose(0, 1).contiguous().view(-1)
        counts = [len(nodes) for nodes in self._trees]
        packed = packed.cpu() if self._stages else packed
        if parcel.received is None or parcel.whole is None:  # kept: new pages cost as much as copying them
            where = "cpu" if self._stages else self.device
            parcel.received = torch.empty(sum(counts) * per, dtype=rows.dtype, device=where)
            parcel.whole = torch.empty(per * self.size, dtype=parcel.dtype, device=where)
        received, whole = parcel.received, parcel.whole
        taken, given = [n * per for n in counts], [mine * per] * self.size
        if self._backend == "gloo":
            self._swap(list(torch.split(received, taken)), list(torch.split(packed, given)))
        else:
            self._wait(self.group.alltoall_base(received, packed, taken, given), "all_to_all")
        faults.at("exchange")
        total = self._add(list(received.to(self.device).view(-1, per)))
        section = whole[self._rank * per : (self._rank + 1) * per]
        section.copy_(total.mul_(parcel.scale()))
        if self._backend == "gloo":
            self._swap(list(torch.split(whole, per)), [section] * self.size)
        else:
            self._wait(self.group._allgather_base(whole, section), "all_gather")
        return whole.to(self.device)

    def _swap(self, taken: list[Tensor], given: list[Tensor]) -> None:
        """`given[rank]` to every worker, `taken[rank]` from it."""
        group, me = self.group, self._rank
        if taken[me].data_ptr() != given[me].data_ptr():
            taken[me].copy_(given[me])
        others = [(me + n) % self.size for n in range(1, self.size)]
        works = [group.recv([taken[rank]], rank, 0) for rank in reversed(others) if taken[rank].numel()]
        works += [group.send([given[rank]], rank, 0) for rank in others if given[rank].numel()]
        with self._watch.explains("the exchange of gradients"):
            for work in works:
                work.wait()  # no time limit: with one, Gloo would close all connections when it is over

    def _add(self, rows: list[Tensor]) -> Tensor:
        if rows[0].dtype in NARROW:
            rows = [row.float() for row in rows]
        nodes = [node for share in self._trees for node in share]
        for dst, src in tree_order.additions(nodes, self._summands):
            rows[dst].add_(rows[src])
        return rows[0]

    def _wait(self, work: Any, what: str) -> None:
        self._watch.wait(work, f"the {what} of gradients")


def _came(parcel: Parcel, _done: Any) -> None:
    parcel.came_s = time.monotonic()


def choose_way(trees: Sequence[tuple[Subtree, ...]], shards: int, *, exact: bool, adds_by_tree: bool) -> Way:
    """Pure. `adds_by_tree`: the backend's own all-reduce adds along the tree over workers."""
    if len(trees) == 1:
        return Way.ALONE
    if not exact:
        return Way.AT_ONCE
    one_each = all(len(nodes) == 1 for nodes in trees)
    if one_each and len(trees) == 2:
        return Way.AT_ONCE
    return Way.AT_ONCE if adds_by_tree and tree_order.is_tree_over_workers(trees, shards) else Way.BY_TREE


def add_coalesced(left: Tensor, right: Tensor) -> Tensor:
    """Of sparse tensors that have every index once: then no sum has more than two summands, and one order."""
    indices = torch.cat([left.indices(), right.indices()], dim=1)
    values = torch.cat([left.values(), right.values()])
    return torch.sparse_coo_tensor(indices, values, left.shape, check_invariants=False).coalesce()


def coalesced(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """A sparse tensor from indices that are known to be sorted, each once."""
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)


class _Nothing:
    def wait(self) -> None:
        pass
