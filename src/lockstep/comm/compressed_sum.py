"""The sum over all shards, sent as small integers (comm/integer_codec.py).

Note [Compressed all-reduce]
The workers agree on the scale of every block: the largest that a shard needs. Each worker rounds its shards and adds
the integers. Inside a host these are added through shared memory, so that each worker has the sum of one slice. Between
hosts a slice is divided into as many sections as there are hosts; each section is packed and sent to its owner, which
adds, rounds the sum, and sends it to the other hosts, packed again. At the end every worker decodes the whole sum.
Without a hierarchy all workers are hosts of their own; on one host with shared memory nothing is packed for a network.

A bucket is processed in chunks, so that one is on the network while the next is rounded (Note [Interleaving] in
pipelined_collectives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lockstep import faults
from lockstep.comm.codec_kernels import kernels_for
from lockstep.comm.host_groups import Finish, HostLayout, OpType, SingleWorker, Subgroup, split_range
from lockstep.comm.integer_codec import BLOCK, IntegerCodec
from lockstep.comm.pipelined_collectives import run_interleaved

CHUNKS: Final = 3  # of a bucket, on a CPU; each needs three exchanges inside the host and three between hosts
MIN_CHUNK_BLOCKS: Final = 2048  # 1 MiB of float32

Scale = Callable[[], float | Tensor]


class RowSubgroup(Protocol):
    """What the sum needs of the workers between which rows are packed: see comm/host_groups.py."""

    rank: int
    size: int

    def all_reduce_small(self, tensor: Tensor, op: OpType) -> Finish: ...

    def exchange_rows(self, rows: Tensor) -> tuple[Tensor, Finish]: ...

    def all_gather(self, rows: Tensor) -> Finish: ...


@dataclass(frozen=True)
class Route:
    """The way that sums take: inside the host, then between hosts.

    device  on which the subgroups exchange tensors
    run     runs a job on the thread that owns the subgroups, and waits for it
    """

    local: Subgroup
    across: RowSubgroup
    shards: int  # the most of a host, whose sum is packed
    device: torch.device
    run: Callable[[Callable[[], None]], None] = lambda job: job()

    @staticmethod
    def of_single_worker(shards: int, device: torch.device) -> Route:
        return Route(SingleWorker(), SingleWorker(), shards, device)

    @staticmethod
    def over_hosts(
        local: Subgroup, across: RowSubgroup, layout: HostLayout, shares: Sequence[int], device: torch.device, run: Any
    ) -> Route:
        """`shares`: the number of shards of each worker, by rank."""
        return Route(local, across, max(sum(shares[rank] for rank in host) for host in layout.hosts), device, run)


@dataclass
class CompressedBuffers:
    """Memory of one sum: a row of blocks for each shard of this worker. The result replaces the last row.

    numbers  of the blocks in the model: equal on all workers, whatever the buckets are
    flags    bytes that are combined over all workers by their maximum, along with the sum
    """

    rows: Tensor  # [shards, numel]
    numbers: Tensor
    flags: Tensor
    sent: Any = None
    started_s: float = 0.0
    shard_keys: Sequence[int] = field(default_factory=list)
    sum_key: int = 0
    scale: Scale = field(default=lambda: 1.0)


class CompressedSum:
    """Sums over all shards of a global batch, as integers. See Note [Compressed all-reduce].

    shards  of all workers; own: of this one
    """

    def __init__(self, codec: IntegerCodec, route: Route, *, shards: int, own: int, device: torch.device) -> None:
        self.codec, self._route, self._shards, self._own, self._device = codec, route, shards, own, device
        self._sections = route.local.size * route.across.size
        self._kernels, self._there = kernels_for(codec, device), kernels_for(codec, route.device)

    def allocate(self, numbers: Tensor, flags: int) -> CompressedBuffers:
        """Allocate the buffers of a sum of blocks with these numbers, and of so many flags."""
        count = -(-len(numbers) // self._sections) * self._sections
        padded = torch.zeros(count, dtype=torch.int64, device=self._device)
        padded[: len(numbers)] = numbers
        rows = torch.zeros(max(self._own, 1), count * BLOCK, device=self._device)
        return CompressedBuffers(rows, padded, torch.zeros(flags, dtype=torch.uint8, device=self._device))

    def wire_bytes(self, buffers: CompressedBuffers) -> int:
        """Return about how many bytes of a sum a worker sends, if it is one of two hosts."""
        bits = self.codec.sum_bits(self._route.shards) + self.codec.bits
        return buffers.rows[-1].numel() * bits // 16 + len(buffers.numbers)

    def run(self, buffers: CompressedBuffers) -> Tensor:
        """Compute the sum; all workers call it together. Returns it, in the last row."""
        count = len(buffers.numbers)
        spans = list(split_range(count, self._chunk_blocks(count)))
        self._route.run(lambda: run_interleaved(self._reduce_chunk(buffers, at) for at in spans))
        return buffers.rows[-1]

    def _chunk_blocks(self, count: int) -> int:
        """Return the number of blocks of a chunk, a multiple of the sections."""
        if self._device.type != "cpu" or self._sections == 1:
            return max(count, 1)
        most = max(-(-count // CHUNKS), MIN_CHUNK_BLOCKS)
        return -(-most // self._sections) * self._sections

    def _reduce_chunk(self, buffers: CompressedBuffers, at: slice) -> Iterator[None]:
        codec, route, local, across = self.codec, self._route, self._route.local, self._route.across
        shards = buffers.rows.view(len(buffers.rows), -1, BLOCK)[: self._own, at]
        count, is_first = at.stop - at.start, at.start == 0
        codes = torch.zeros(count, dtype=torch.uint8, device=self._device)
        if self._own:
            codes = self._kernels.block_codes(shards)
        agreed = (torch.cat([codes, buffers.flags]) if is_first else codes).to(route.device)
        local.all_reduce_small(agreed, OpType.MAX)()
        finish = across.all_reduce_small(agreed, OpType.MAX)
        yield
        finish()
        codes = agreed[:count].to(self._device)
        if is_first:
            buffers.flags.copy_(agreed[count:])

        sums = torch.empty(count, BLOCK, dtype=codec.sum_dtype(route.shards), device=self._device)
        if not self._own:
            sums.zero_()
        self._kernels.encode(shards, codes, buffers.numbers[at], buffers.shard_keys, sums)
        slices = sums.to(route.device).view(local.size, -1)
        local.reduce_scatter(slices, OpType.SUM)()
        mine = slices[local.rank]
        if across.size > 1:
            width = codec.sum_bits(route.shards)
            inbox, finish = across.exchange_rows(self._there.pack(mine.view(across.size, -1), width))
            yield
            yield
            finish()
            mine = self._there.unpack_sum(inbox, width)
        faults.at("exchange")

        numbers = buffers.numbers[at].view(local.size, across.size, -1)[local.rank, across.rank].to(route.device)
        offset, total = codec.largest * self._shards, mine.int().view(-1, BLOCK)
        values, shifts = self._there.round_sums(total, offset, numbers, buffers.sum_key)
        section = torch.cat([self._there.pack(values, codec.bits)[0], shifts])
        gathered = section.new_empty(local.size, across.size, len(section))
        gathered[local.rank, across.rank] = section
        if across.size > 1:
            finish = across.all_gather(gathered[local.rank])
            yield
            yield
            finish()
        local.all_gather(gathered.flatten(1))()

        gathered = gathered.flatten(0, 1).to(self._device)
        packed, shifts = gathered[:, : -len(shifts)], gathered[:, -len(shifts) :]
        out = buffers.rows[-1].view(-1, BLOCK)[at]
        self._kernels.decode(packed, codes, shifts.reshape(count), buffers.scale(), out)
