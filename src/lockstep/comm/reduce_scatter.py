"""The sum over shards where every worker gets the sums of some elements only: its section.

The order of additions is that of comm/shard_sum.py, so the bits are those of the sum that every worker gets. It sends
half of the bytes.
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
        dtype: torch.dtype,
        method: ScatterMethod,
        workers: FlatSubgroup,
        counts: Sequence[int],
        add: Callable[[list[Tensor]], Tensor],
    ) -> None:
        """
        rows      [row][element]: what this worker adds to the sum; written before each `run`
        sections  the elements that each worker gets, by rank
        dtype     of the result
        counts    how many rows each worker has
        add       adds the rows of all workers along the tree, and returns the sum; it may overwrite them
        """
        self._rows, self._sections, self._method, self._workers = rows, sections, method, workers
        self._counts, self._add = list(counts), add
        sizes, mine = [sum(map(len, ranges)) for ranges in sections], counts[workers.rank]
        own = sizes[workers.rank]
        self._result = torch.empty(own, dtype=dtype, device=rows.device)
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

    def run(self, scale: float | Tensor) -> Tensor:
        """Return the sums of this worker's section times the scale, one range after the other; valid until the next
        call."""
        if self._method is ScatterMethod.CHUNKS:
            self._run_in_chunks(scale)
            return self._result
        for part, ranges in zip(torch.split(self._packed, self._widths), self._sections, strict=True):
            pieces = [row[one.start : one.stop] for row in self._rows for one in ranges]
            if pieces:
                torch.cat(pieces, out=part[: sum(map(len, pieces))])
        own = len(self._result)
        if self._method is ScatterMethod.NATIVE:
            self._workers.reduce_scatter(self._received, self._packed)()
            total = self._received[:own]
        else:
            receive_sizes = [count * own for count in self._counts]
            self._workers.exchange(self._received, self._packed, receive_sizes, self._widths)()
            total = self._add(list(self._received.view(-1, own)))
        faults.at("exchange")
        self._result.copy_(total.mul_(scale))
        return self._result

    def _run_in_chunks(self, scale: float | Tensor) -> None:
        rows, me = self._rows, self._workers.rank
        chunks = [in_chunks(ranges, CHUNK_NUMEL) for ranges in self._sections]
        sizes = [sum(map(len, chunk)) for chunk in chunks[me]]
        arriving = sum(self._counts) - self._counts[me]
        places = iter(torch.split(self._received, [size for size in sizes for _ in range(arriving)]))
        found: list[list[list[Tensor]]] = [[] for _ in self._counts]  # [rank][chunk][row]: what this worker adds
        for chunk in chunks[me]:
            for rank, count in enumerate(self._counts):
                # Copies: the same elements may be on their way to a worker that keeps a copy of this one's part.
                own = [join(row, chunk).clone() for row in rows] if rank == me else [next(places) for _ in range(count)]
                found[rank].append(own)
        sent = [([join(row, chunk) for row in rows] for chunk in of_rank) for of_rank in chunks]
        waits, finish = self._workers.exchange_chunks(found, sent)
        for number, (wait_for_chunk, result) in enumerate(zip(waits, torch.split(self._result, sizes), strict=True)):
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
