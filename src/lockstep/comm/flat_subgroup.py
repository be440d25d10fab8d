"""Rows of bytes that all workers of a group exchange: all-to-all and all-gather, on any backend.

Over Gloo both are point-to-point messages: its own all-to-all and all-gather copy everything once more (docs/log.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.host_groups import Finish, OpType
from lockstep.comm.peer_watch import PeerWatch

TAGS = 1024  # several exchanges may be pending; all workers start them in the same order


class FlatSubgroup:
    """All workers of a group. A method starts a collective and returns how to wait for it: see comm/host_groups.py."""

    def __init__(self, group: dist.ProcessGroup, watch: PeerWatch, backend: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._watch, self._backend, self._tag = group, watch, backend, 0

    def all_reduce_small(self, tensor: Tensor, op: OpType) -> Finish:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return self._finish(self._group.allreduce([tensor], options), "the scales of gradients")

    def exchange_rows(self, rows: Tensor) -> tuple[Tensor, Finish]:
        """Send row i to worker i. Returns the rows that this worker gets, by rank, once they have arrived."""
        inbox = torch.empty_like(rows)
        sizes = [rows[0].numel()] * self.size
        return inbox, self.exchange(inbox.view(-1), rows.view(-1), sizes, sizes)

    def exchange(
        self, received: Tensor, sent: Tensor, receive_sizes: Sequence[int], send_sizes: Sequence[int]
    ) -> Finish:
        """Send so many elements of `sent` to each worker, and receive so many from it, one after the other by rank."""
        if self._backend == "gloo":
            return self._send_all(torch.split(received, list(receive_sizes)), torch.split(sent, list(send_sizes)))
        if sent.is_complex():  # which not every backend sends
            received, sent = torch.view_as_real(received).view(-1), torch.view_as_real(sent).view(-1)
            receive_sizes, send_sizes = [2 * n for n in receive_sizes], [2 * n for n in send_sizes]
        work = self._group.alltoall_base(received, sent, list(receive_sizes), list(send_sizes))
        return self._finish(work, "the all_to_all of gradients")

    def all_gather(self, rows: Tensor) -> Finish:
        """Fill every other row with the values that its owner has there."""
        if self._backend == "gloo":
            return self._send_all(rows.unbind(), [rows[self.rank]] * self.size)
        rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
        return self._finish(self._group._allgather_base(rows.view(-1), rows[self.rank]), "the all_gather of gradients")

    def reduce_scatter(self, received: Tensor, rows: Tensor) -> Finish:
        """Let the group add up the rows of all workers; this worker gets the sum of the row of its rank."""
        group: Any = self._group
        return self._finish(group._reduce_scatter_base(received, rows), "the reduce_scatter of gradients")

    def exchange_chunks(
        self, outputs: Sequence[Sequence[Sequence[Tensor]]], inputs: Sequence[Iterable[Sequence[Tensor]]]
    ) -> tuple[list[Finish], Finish]:
        """Send the chunks `inputs[rank]` to every other worker, and receive `outputs[rank]` from it; over Gloo only.

        A chunk is a list of tensors. Chunks are sent as they are yielded, the first ones of all workers first.

        Returns how to wait for each chunk from all workers, and for everything.
        """
        group, me, self._tag = self._group, self.rank, (self._tag + 1) % TAGS
        others = [(me + n) % self.size for n in range(1, self.size)]
        arriving = [
            [group.recv([one], rank, self._tag) for rank, chunk in zip(others, chunks, strict=True) for one in chunk]
            for chunks in zip(*(outputs[rank] for rank in others), strict=True)
        ]
        sent = list[Any]()
        for chunks in itertools.zip_longest(*(inputs[rank] for rank in others), fillvalue=()):
            sent += [
                group.send([one], rank, self._tag) for rank, chunk in zip(others, chunks, strict=True) for one in chunk
            ]
        return [partial(self._wait_all, works) for works in arriving], partial(self._wait_all, sent)

    def _wait_all(self, works: Iterable[Any]) -> None:
        with self._watch.explain_errors("the exchange of gradients"):
            for work in works:
                work.wait()  # no time limit: if one expires, Gloo closes all connections

    def _send_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Send `inputs[rank]` to every worker, and receive `outputs[rank]` from it."""
        group, me, self._tag = self._group, self.rank, (self._tag + 1) % TAGS
        if outputs[me].data_ptr() != inputs[me].data_ptr():
            outputs[me].copy_(inputs[me])
        others = [(me + n) % self.size for n in range(1, self.size)]
        works = [group.recv([outputs[rank]], rank, self._tag) for rank in reversed(others) if outputs[rank].numel()]
        works += [group.send([inputs[rank]], rank, self._tag) for rank in others if inputs[rank].numel()]

        return partial(self._wait_all, works)

    def _finish(self, work: Any, where: str) -> Finish:
        return lambda: self._watch.wait(work, where)
