"""The sum over all shards of the largest elements of their gradients (top-k), with the same bits on any workers.

Note [Largest elements]
Of the gradient of every shard the k elements with the largest absolute values are sent; of equal ones those that come
first in memory. All workers get those of all shards, and add them in the order of the shards. So nothing depends on
which worker runs a shard. What is not sent is added to the gradient of the same shard in the next step
(step/residuals.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lockstep import faults
from lockstep.comm.compressed_sum import run_on_current_stream
from lockstep.comm.error_feedback import FeedbackBuffers, add_over_shards
from lockstep.comm.shard_sum import ShardSum, SumBuffers

SAMPLED: Final = 64  # on a CPU, one of so many elements tells how large those may be that count
SAMPLED_FROM: Final = 64 * 1024  # elements
MARGIN: Final = 1.25
LARGEST_RATIO: Final = 0.25  # half of the numbers: with each element its position is sent


@dataclass(frozen=True)
class TopK:
    """Of every gradient this share of the elements is sent: those with the largest absolute values."""

    ratio: float

    def count(self, numel: int) -> int:
        """Return how many of so many elements are sent."""
        return max(1, round(self.ratio * numel))

    def compresses(self, parameter: Tensor) -> bool:
        """Whether the gradient of a parameter is compressed; if not, it is sent as it is."""
        if parameter.dim() < 2 or not parameter.numel() or not parameter.is_floating_point():
            return False
        return self.count(parameter.numel()) <= LARGEST_RATIO * parameter.numel()

    def describe(self) -> str:
        return f"the largest {100 * self.ratio:g} % of the elements"


@dataclass(kw_only=True)
class TopKBuffers(FeedbackBuffers):
    """Memory of one sum.

    starts   where the gradient of each compressed parameter begins in a row
    total    where the sum of the compressed part is written, flat
    entries  for each shard of this worker the positions in a row, and the bits of the elements, that are sent
    """

    starts: Sequence[int]
    total: Tensor
    entries: Tensor  # [shards, 2, entries]
    rest_sums: SumBuffers

    @property
    def sent_bytes(self) -> int:
        return self.entries.nbytes + self.rest_sums.rows.nbytes


class TopKSum:
    """Sums over all shards of the largest elements. See Note [Largest elements]."""

    def __init__(self, sum_: ShardSum, method: TopK) -> None:
        self._sum, self._method = sum_, method

    def allocate(
        self,
        rows: Tensor,
        parts: list[list[Tensor]],
        rest: list[Tensor],
        total_rest: Tensor,
        *,
        starts: Sequence[int],
        total: Tensor,
    ) -> TopKBuffers:
        """Allocate the buffers of a sum of these tensors. See `TopKBuffers`."""
        counts = [self._method.count(part.numel()) for part in parts[0]] if parts else []
        entries = torch.zeros(len(rows), 2, sum(counts), dtype=torch.int32, device=rows.device)
        rest_sums = self._sum.allocate(total_rest.numel(), torch.float32)
        return TopKBuffers(
            rows=rows,
            parts=parts,
            rest=rest,
            total_rest=total_rest,
            starts=starts,
            total=total,
            entries=entries,
            rest_sums=rest_sums,
        )

    def buffer_bytes(self, buffers: TopKBuffers) -> int:
        """Return the memory of what is sent."""
        return buffers.entries.nbytes + self._sum.buffer_bytes(buffers.rest_sums, without_result=False)

    def run(self, buffers: TopKBuffers) -> None:
        """Compute the sum in a job of `ShardSum.submit`; all workers call it together."""
        written = [buffers.rows, buffers.total, buffers.total_rest, buffers.entries, buffers.rest_sums.rows]
        run_on_current_stream(written, lambda: self._run(buffers))

    def _run(self, buffers: TopKBuffers) -> None:
        buffers.scale_and_add_residuals()
        for parts, (positions, bits) in zip(buffers.parts, buffers.entries, strict=True):
            at = 0
            for start, part in zip(buffers.starts, parts, strict=True):
                flat = part.view(-1)
                found = largest(flat, self._method.count(len(flat)))
                positions[at : at + len(found)] = found + start
                bits[at : at + len(found)] = flat[found].view(torch.int32)
                at += len(found)
        buffers.total.zero_()
        faults.at("exchange")
        gathered = gather_shards(self._sum, buffers.entries) if buffers.entries.numel() else ()
        for positions, bits in gathered:
            buffers.total.index_add_(0, positions, bits.view(torch.float32))

        def write_rest(row: Tensor, n: int) -> None:
            row[: buffers.rest[n].numel()].copy_(buffers.rest[n])

        rest = add_over_shards(self._sum, buffers.rest_sums, buffers.shards, write_rest)
        buffers.total_rest.copy_(rest[: len(buffers.total_rest)])


def gather_shards(sum_: ShardSum, own: Tensor) -> Tensor:
    """Return the rows of all shards, of which this worker has `own`. Part of a job of `ShardSum.submit`."""
    if sum_.size == 1:
        return own
    most, rank = max(map(len, sum_.shares)), sum_.workers.rank
    rows = own.new_zeros(sum_.size, most, *own.shape[1:], device="cpu" if sum_.via_host else own.device)
    rows[rank, : len(own)].copy_(own)
    sum_.workers.all_gather(rows.view(sum_.size, -1))()
    arrived = rows.to(own.device)
    return torch.cat([row[: len(share)] for row, share in zip(arrived, sum_.shares, strict=True)])


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions, in ascending order, of the `count` elements with the largest absolute values.

    Of equal ones those come first that are first in `values`. NaN counts as larger than any number.
    """
    sizes, within = values.abs(), None
    if not values.is_cuda and len(values) >= SAMPLED_FROM:  # where sorting all of them takes long
        sample = sizes[::SAMPLED]
        guess = torch.topk(sample, min(len(sample), int(MARGIN * count / SAMPLED) + SAMPLED)).values[-1]
        within = (sizes < guess).logical_not_().nonzero().view(-1)
        within = within if len(within) >= count else None
    candidates = sizes if within is None else sizes[within]
    order = torch.sort(candidates, descending=True, stable=True).indices[:count]
    return (order if within is None else within[order]).sort().values
