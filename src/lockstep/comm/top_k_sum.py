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
from lockstep.comm.error_feedback import FeedbackBuffers, sum_over_shards
from lockstep.comm.shard_sum import ShardSum, SumBuffers

# On a CPU the elements that may be among the largest are found first, by a threshold from a sample of them.
SAMPLE_STRIDE: Final = 64
MIN_SAMPLED_NUMEL: Final = 8 * 1024
SAMPLE_MARGIN: Final = 1.25
MAX_RATIO: Final = 0.25  # with each element its position is sent
MAX_NUMEL: Final = 2**31 - 1  # positions are 32-bit integers


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
        return self.count(parameter.numel()) <= MAX_RATIO * parameter.numel()

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
        if total.numel() > MAX_NUMEL:
            raise ValueError(
                'grad_comm="topk" sends positions as 32-bit integers, and one bucket of gradients has '
                f'{total.numel():,} elements; use grad_comm="int8"'
            )
        counts = [self._method.count(part.numel()) for part in parts[0]]
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
                found = top_k_positions(flat, self._method.count(len(flat)))
                positions[at : at + len(found)] = found + start
                bits[at : at + len(found)] = flat[found].view(torch.int32)
                at += len(found)
        buffers.total.zero_()
        faults.at("exchange")
        gathered = gather_shards(self._sum, buffers.entries) if buffers.starts else ()
        for positions, bits in gathered:
            buffers.total.index_add_(0, positions, bits.view(torch.float32))

        def write_rest(row: Tensor, n: int) -> None:
            row[: buffers.rest[n].numel()].copy_(buffers.rest[n])

        rest = sum_over_shards(self._sum, buffers.rest_sums, buffers.shards, write_rest)
        buffers.total_rest.copy_(rest[: len(buffers.total_rest)])


def gather_shards(sum_: ShardSum, own: Tensor) -> Tensor:
    """Return the rows of all shards, of which this worker has `own`. Part of a job of `ShardSum.submit`."""
    if sum_.size == 1:
        return own
    most, rank = max(map(len, sum_.shares)), sum_.flat_subgroup.rank
    rows = own.new_zeros(sum_.size, most, *own.shape[1:], device="cpu" if sum_.stages_on_cpu else own.device)
    rows[rank, : len(own)].copy_(own)
    sum_.flat_subgroup.all_gather(rows.view(sum_.size, -1))()
    arrived = rows.to(own.device)
    return torch.cat([row[: len(share)] for row, share in zip(arrived, sum_.shares, strict=True)])


def top_k_positions(values: Tensor, count: int) -> Tensor:
    """Return the positions, in ascending order, of the `count` elements with the largest absolute values.

    Of equal ones those come first that are first in `values`. NaN counts as larger than any number.
    """
    sizes = values.abs()
    if values.is_cuda or len(values) < MIN_SAMPLED_NUMEL:
        return torch.sort(sizes, descending=True, stable=True).indices[:count].sort().values
    sample = sizes[::SAMPLE_STRIDE]
    most = min(len(sample), int(SAMPLE_MARGIN * count / SAMPLE_STRIDE) + SAMPLE_STRIDE)
    threshold = torch.topk(sample, most).values[-1]
    within = (sizes.nonzero() if threshold == 0 else (sizes < threshold).logical_not_().nonzero()).view(-1)
    if len(within) < count and threshold == 0:  # a gradient of which few elements are not 0
        is_taken = torch.zeros(len(values), dtype=torch.bool, device="cpu").index_fill_(0, within, value=True)
        others = is_taken[: count + len(within)].logical_not_().nonzero().view(-1)
        return torch.cat([within, others[: count - len(within)]]).sort().values
    if len(within) < count:  # the sample was not like the rest
        within = torch.arange(len(values), device="cpu")
    order = torch.sort(sizes[within], descending=True, stable=True).indices[:count]
    return within[order].sort().values
