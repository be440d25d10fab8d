"""The sum over shards where every worker gets the sums of some elements only: its section.

The order of additions is that of comm/shard_sum.py, so the bits are those of the sum that every worker gets. It sends
half of the bytes. A worker that keeps a copy of the state of another one gets the sums from that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final, final

import torch
from torch import Tensor

from lockstep import faults
from lockstep.comm.flat_subgroup import FlatSubgroup

CHUNK_NUMEL: Final = 256 * 1024


class ScatterMethod(Enum):
    CHUNKS = auto()  # over Gloo: sections are sent in chunks; one is added while others arrive
    WHOLE = auto()  # one all-to-all, then local sums
    NATIVE = auto()  # the group's own reduce-scatter, which adds along the same tree


@final
class ReduceScatter:
    """Computes the sums of one bucket, again and again, in memory that is kept: page faults cost as much as copying."""

    def __init__(
        self,
        rows: Tensor,
        sections: Sequence[Sequence[range]],
        *,
        buddies: Sequence[int] | None = None,
        dtype: torch.dtype,
        method: ScatterMethod,
        workers: FlatSubgroup,
        counts: Sequence[int],
        add: Callable[[list[Tensor]], Tensor],
    ) -> None:
        """
        rows      [row][element]: what this worker adds to the sum; written before each `run`
        sections  the elements that each worker gets, by rank
        buddies   by rank, the worker that gets this section, too; None: no other
        dtype     of the result
        counts    how many rows each worker has
        add       adds the rows of all workers along the tree, and returns the sum; it may overwrite them
        """
        self._rows, self._sections, self._method, self._workers = rows, sections, method, workers
        self._counts, self._add = list(counts), add
        sizes, mine = [sum(map(len, ranges)) for ranges in sections], counts[workers.rank]
        own = sizes[workers.rank]
        source = workers.rank if buddies is None else buddies.index(workers.rank)
        copied = 0 if source == workers.rank else sizes[source]
        self._result = torch.empty(own + copied, dtype=dtype, device=rows.device)
        self._own, self._copy = self._result[:own], self._result[own:]
        self._copy_sizes: list[list[int]] | None = None  # how much is received from each worker, and sent to it
        if buddies is not None:
            to = buddies[workers.rank]
            self._copy_sizes = [
                [copied * (rank == source) for rank in range(workers.size)],
                [own * (rank == to != workers.rank) for rank in range(workers.size)],
            ]
        self._widths: list[int] = []  # of what is packed for each worker
        match method:
            case ScatterMethod.CHUNKS:
                arriving = (sum(counts) - mine) * own
            case ScatterMethod.WHOLE:
                self._widths, arriving = [mine * size for size in sizes], sum(counts) * own
            case ScatterMethod.NATIVE:
                self._widths, arriving = [max(sizes)] * len(sizes), max(sizes)
        self._packed, self._received = rows.new_zeros(sum(self._widths)), rows.new_empty(arriving)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._received.nbytes + self._result.nbytes

    def split(self, result: Tensor) -> list[Tensor]:
        """Return the parts of what `run` has returned: the own section, and with buddies that of another worker."""
        own = len(self._own)
        return [result[:own]] if self._copy_sizes is None else [result[:own], result[own:]]

    def run(self, scale: float | Tensor) -> Tensor:
        """Return the sums of this worker's section times the scale, one range after the other, and behind them those of
        the worker whose buddy it is; valid until the next call."""
        if self._method is ScatterMethod.CHUNKS:
            self._run_in_chunks(scale)
        else:
            self._run_at_once(scale)
        if self._copy_sizes is not None:
            self._workers.exchange(self._copy, self._own, *self._copy_sizes)()
        return self._result

    def _run_at_once(self, scale: float | Tensor) -> None:
        for part, ranges in zip(torch.split(self._packed, self._widths), self._sections, strict=True):
            pieces = [row[one.start : one.stop] for row in self._rows for one in ranges]
            if pieces:
                torch.cat(pieces, out=part[: sum(map(len, pieces))])
        own = len(self._own)
        if self._method is ScatterMethod.NATIVE:
            self._workers.reduce_scatter(self._received, self._packed)()
            total = self._received[:own]
        else:
            receive_sizes = [count * own for count in self._counts]
            self._workers.exchange(self._received, self._packed, receive_sizes, self._widths)()
            total = self._add(list(self._received.view(-1, own)))
        faults.at("exchange")
        self._own.copy_(total.mul_(scale))

    def _run_in_chunks(self, scale: float | Tensor) -> None:
        rows, me = self._rows, self._workers.rank
        chunks = [in_chunks(ranges, CHUNK_NUMEL) for ranges in self._sections]
        sizes = [sum(map(len, chunk)) for chunk in chunks[me]]
        arriving = sum(self._counts) - self._counts[me]
        places = iter(torch.split(self._received, [size for size in sizes for _ in range(arriving)]))
        found: list[list[list[Tensor]]] = [[] for _ in self._counts]  # [rank][chunk][row]: what this worker adds
        for chunk in chunks[me]:
            for rank, count in enumerate(self._counts):
                # Copies: elements that all workers get are also on their way to others.
                own = [join(row, chunk).clone() for row in rows] if rank == me else [next(places) for _ in range(count)]
                found[rank].append(own)
        sent = [([join(row, chunk) for row in rows] for chunk in of_rank) for of_rank in chunks]
        waits, finish = self._workers.exchange_chunks(found, sent)
        for number, (wait_for_chunk, result) in enumerate(zip(waits, torch.split(self._own, sizes), strict=True)):
            wait_for_chunk()
            total = self._add([row for of_rank in found for row in of_rank[number]])
            result.copy_(total.mul_(scale))
        finish()
        faults.at("exchange")


def in_chunks(ranges: Sequence[range], most: int) -> list[list[range]]:
    """Return lists of ranges with `most` elements each, in order. Adjacent ranges are joined, long ones cut."""
    found: list[list[range]] = []
    room = 0
    for one in ranges:
        start = one.start
        while start < one.stop:
            if room == 0:
                found.append([])
                room = most
            chunk, stop = found[-1], min(one.stop, start + room)
            if chunk and chunk[-1].stop == start:
                chunk[-1] = range(chunk[-1].start, stop)
            else:
                chunk.append(range(start, stop))
            start, room = stop, room - (stop - start)
    return found


def join(row: Tensor, ranges: Sequence[range]) -> Tensor:
    """Return these elements of a row: a view of one range, or a copy of several."""
    pieces = [row[one.start : one.stop] for one in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
