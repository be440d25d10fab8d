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

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import faults
from lockstep.comm.codec_kernels import kernels_for
from lockstep.comm.host_groups import OpType, RowSubgroup, SingleWorker, split_range
from lockstep.comm.integer_codec import BLOCK, IntegerCodec, Rows
from lockstep.comm.pipelined_collectives import run_interleaved
from lockstep.comm.scratch_buffers import ScratchBuffers, ScratchScope, SharedBuffers, shared_buffers

# Chunks of a bucket, on a CPU. Each needs three exchanges inside the host and three between hosts, so there are fewer
# where these would have to wait for a core: where a host has fewer than MANY_CORES for each of its workers.
CHUNKS: Final = 8
CHUNKS_ON_FEW_CORES: Final = 3
MANY_CORES: Final = 2
MIN_CHUNK_BLOCKS: Final = 4096  # 1 MiB of float32

LARGEST_RATIO: Final = 1e6  # of an error to a norm, which may be 0; JSON has no infinity

Scale = Callable[[], float | Tensor]  # called after everything that was started before has completed


def run_on_current_stream(tensors: Sequence[Tensor], job: Callable[[], None]) -> None:
    """Run a job that writes to these tensors, on a stream that may not be the one on which they were allocated.

    If a worker is lost, they are freed while kernels that write to them are still queued: the memory must not be reused
    before these are done.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    job()


@dataclass(frozen=True)
class Route:
    """The way that sums take: inside the host, then between hosts.

    device  on which the subgroups exchange tensors
    cores_per_worker  on the host that has the fewest
    run     runs a job that uses these tensors on the thread that owns the subgroups, and waits for it
    """

    local: RowSubgroup
    across: RowSubgroup
    own_shards: int  # the most of a worker
    shards: int  # the most of a host
    device: torch.device
    cores_per_worker: float = 1.0
    run: Callable[[Sequence[Tensor], Callable[[], None]], None] = run_on_current_stream

    @staticmethod
    def of_single_worker(shards: int, device: torch.device) -> Route:
        return Route(SingleWorker(), SingleWorker(), shards, shards, device)


@dataclass
class RoundingErrors:
    """About how large the squared errors by rounding of some sums are, and the squared norms of these sums."""

    noise: float | Tensor = 0.0
    energy: float | Tensor = 0.0
    is_open: bool = False  # more is to be added

    def begin(self, *, is_open: bool) -> None:
        """Forget what was added so far."""
        self.noise, self.energy, self.is_open = 0.0, 0.0, is_open

    def add(self, noise: Tensor, energy: Tensor) -> None:
        self.noise, self.energy = self.noise + noise, self.energy + energy

    def close(self) -> float:
        """Return the error relative to the norm, at most LARGEST_RATIO. Nothing is added from now on.

        It has few digits, so that it is the same on any number of workers, which add it up in different pieces.
        """
        self.is_open, noise, energy = False, float(self.noise), float(self.energy)
        if not noise > 0:  # also if it is NaN
            return 0.0
        ratio = math.sqrt(noise / energy) if energy > 0 else math.inf
        return float(f"{min(LARGEST_RATIO, ratio):.6g}")


@dataclass
class CompressedBuffers:
    """Memory of one sum: a row of blocks for each shard of this worker. The result replaces the last row.

    numbers  of the blocks in the model: equal on all workers, whatever the buckets are
    flags    bytes that are combined over all workers by their maximum, along with the sum
    sent, started_s        the pending sum, and when it was started
    shard_keys, sum_key    of the random numbers, for each shard and for the sum
    scale    returns by what the sum is multiplied
    errors   to which the errors by rounding are added; None: they are not computed
    """

    rows: Tensor  # [shards, numel]
    numbers: Tensor
    flags: Tensor
    sent: Any = None
    started_s: float = 0.0
    shard_keys: Sequence[int] = field(default_factory=list)
    sum_key: int = 0
    scale: Scale = field(default=lambda: 1.0)
    errors: RoundingErrors | None = None


class CompressedSum:
    """Sums over all shards of a global batch, as integers. See Note [Compressed all-reduce].

    shards  of all workers; own: of this one
    """

    def __init__(self, codec: IntegerCodec, route: Route, *, shards: int, own: int, device: torch.device) -> None:
        self.codec, self._route, self._shards, self._own, self._device = codec, route, shards, own, device
        self._sections = route.local.size * route.across.size
        self._scratch, self._shared = ScratchBuffers(), _shared_buffers_of(route, device)
        self._total_dtype = torch.int16 if codec.sum_bits(shards) < 16 else torch.int32
        self._kernels, self._there = kernels_for(codec, device), kernels_for(codec, route.device)

    def allocate(self, numbers: Tensor, flags: int) -> CompressedBuffers:
        """Allocate the buffers of a sum of blocks with these numbers, and of so many flags."""
        count = -(-len(numbers) // self._sections) * self._sections
        padded = torch.zeros(count, dtype=torch.int64, device=self._device)
        padded[: len(numbers)] = numbers
        rows = torch.zeros(max(self._own, 1), count * BLOCK, dtype=torch.float32, device=self._device)
        return CompressedBuffers(rows, padded, torch.zeros(flags, dtype=torch.uint8, device=self._device))

    def wire_bytes(self, buffers: CompressedBuffers) -> int:
        """Return about how many bytes of a sum a worker sends, if it is one of two hosts."""
        bits = self.codec.sum_bits(self._route.shards) + self.codec.result_bits
        return buffers.rows[-1].numel() * bits // 16 + len(buffers.numbers)

    def run(self, buffers: CompressedBuffers) -> Tensor:
        """Compute the sum; all workers call it together. Returns it, in the last row."""
        count = len(buffers.numbers)
        spans = list(split_range(count, self._chunk_blocks(count)))
        written = [buffers.rows, buffers.flags]
        self._route.run(written, lambda: run_interleaved(self._reduce_chunk(buffers, at) for at in spans))
        return buffers.rows[-1]

    def _chunk_blocks(self, count: int) -> int:
        """Return the number of blocks of a chunk, a multiple of the sections."""
        if self._device.type != "cpu" or self._sections == 1:
            return max(count, 1)
        chunks = CHUNKS if self._route.cores_per_worker >= MANY_CORES else CHUNKS_ON_FEW_CORES
        most = max(-(-count // chunks), MIN_CHUNK_BLOCKS)
        return -(-most // self._sections) * self._sections

    def _reduce_chunk(self, buffers: CompressedBuffers, at: slice) -> Iterator[None]:
        """Sum some of the blocks. Yields while data is on the network."""
        codec, route = self.codec, self._route
        shards = buffers.rows.view(len(buffers.rows), -1, BLOCK)[: self._own, at]
        codes = yield from self._agree_on_codes(buffers, shards, at)
        with ScratchScope(self._scratch, route.device) as scratch:
            dtype, width = codec.sum_dtype(route.own_shards), codec.sum_bits(route.own_shards)
            if self._shared is not None and dtype == torch.uint8 and width == 8:  # sent as they are
                sums = self._shared.acquire(shards[0].numel()).view(shards.shape[1:])
            else:
                sums = scratch.empty(dtype, shards.shape[1:], device=self._device)
            if not self._own:
                sums.zero_()
            self._kernels.encode(shards, codes, buffers.numbers[at], buffers.shard_keys, sums)
            mine = sums.to(route.device).view(-1)
            of_host = self._sum_in_host(mine, width, scratch)
            finish = self._exchange(route.across, of_host, codec.sum_bits(route.shards), scratch)
            yield
            yield  # twice, so that the network has another chunk to send while this worker waits for this one
            mine = finish()
            faults.at("exchange")
            total = mine.to(self._total_dtype).view(-1, BLOCK)
            packed, shifts, row = yield from self._round_and_gather(buffers, total, at, scratch)
            out = buffers.rows[-1].view(-1, BLOCK)[at]
            scale = buffers.scale()
            self._kernels.decode(packed, codes, shifts, scale, out)
            if self._shared is not None:
                self._shared.release(row.view(-1))
            if buffers.errors is not None:
                noise = self.codec.noise_energy(codes, shifts, self._shards) * scale**2
                energy = torch.linalg.vector_norm(out, dim=1).double().square().sum()
                buffers.errors.add(noise, energy)

    def _agree_on_codes(self, buffers: CompressedBuffers, shards: Tensor, at: slice) -> Generator[None, None, Tensor]:
        """Return the codes of blocks that fit the shards of all workers; in the first chunk agree on the flags, too."""
        count, is_first = shards.shape[1], at.start == 0
        codes = torch.zeros(count, dtype=torch.uint8, device=self._device)
        if self._own:
            codes = self._kernels.block_codes(shards)
        agreed = yield from self._find_largest(torch.cat([codes, buffers.flags]) if is_first else codes)
        if is_first:
            buffers.flags.copy_(agreed[count:])
        return agreed[:count].to(self._device)

    def _find_largest(self, values: Tensor) -> Generator[None, None, Tensor]:
        """Return the largest of each byte over all workers.

        Two hosts send each other all of them, which takes one message. Otherwise each worker of a host sends one part.
        """
        local, across = self._route.local, self._route.across
        found = F.pad(values.to(self._route.device), (0, -len(values) % self._sections))
        local.all_reduce_small(found, OpType.MAX)()
        if across.size <= 2:
            finish = across.all_reduce_small(found, OpType.MAX)
            yield
            finish()
            return found[: len(values)]
        parts = found.view(local.size, across.size, -1)
        mine = parts[local.rank]
        inbox, finish = across.exchange_rows(mine)
        yield
        finish()
        mine[across.rank] = inbox.amax(dim=0)
        finish = across.all_gather(mine)
        yield
        finish()
        local.all_gather(parts.flatten(1))()
        return found[: len(values)]

    def _sum_in_host(self, sums: Tensor, width: int, scratch: ScratchScope) -> Tensor:
        """Return the sum over the host's workers of this worker's part of the sums, of `width` bits."""
        local, shared = self._route.local, self._shared
        if shared is None:
            return self._exchange(local, sums, width, scratch)()
        parts = sums.view(local.size, -1)
        numel, packed = parts.shape[1], sums
        if parts.dtype != torch.uint8 or width != 8:
            packed = shared.acquire(sums.numel() * width // 8)
            self._there.pack(parts, width, packed.view(local.size, -1))
        rows: Rows = [row.view(local.size, -1)[local.rank] for row in shared.share(packed)]
        if not len(rows):
            rows, wait = local.exchange_rows(packed.view(local.size, -1))
            wait()
        total = scratch.empty(self._total_dtype, (numel,))
        self._there.unpack_sum(rows, width, total)
        shared.release(packed)
        return total

    def _exchange(self, subgroup: RowSubgroup, sums: Tensor, width: int, scratch: ScratchScope) -> Callable[[], Tensor]:
        """Send each worker of the subgroup its part of the sums, of `width` bits. Returns a function that waits, and
        returns the sum of what has arrived."""
        if subgroup.size == 1:
            return lambda: sums
        parts = sums.view(subgroup.size, -1)
        numel, packed = parts.shape[1], parts
        if parts.dtype != torch.uint8 or width != 8:
            packed = scratch.empty(torch.uint8, (subgroup.size, numel * width // 8))
            self._there.pack(parts, width, packed)
        inbox, wait = subgroup.exchange_rows(packed)

        def finish() -> Tensor:
            wait()
            total = scratch.empty(self._total_dtype, (numel,))
            self._there.unpack_sum(inbox, width, total)
            return total

        return finish

    def _round_and_gather(
        self, buffers: CompressedBuffers, total: Tensor, at: slice, scratch: ScratchScope
    ) -> Generator[None, None, tuple[Rows, Tensor, Tensor]]:
        """Round the sums of this worker's section. Returns those of all sections, packed, their shifts, and the memory
        of those that this worker has from other hosts."""
        codec, local, across, where = self.codec, self._route.local, self._route.across, self._route.device
        numbers = buffers.numbers[at].view(local.size, across.size, -1)[local.rank, across.rank].to(where)
        offset, size = codec.largest * self._shards, total.numel() * codec.result_bits // 8
        shape, values = (across.size, size + len(total)), scratch.empty(torch.uint8, (1, total.numel()))
        gathered = scratch.empty(torch.uint8, (local.size, *shape)) if self._shared is None else None
        if self._shared is not None:
            row = self._shared.acquire(math.prod(shape)).view(shape)
        elif gathered is not None:
            row = gathered[local.rank]
        section = row[across.rank]
        self._there.round_sums(total, offset, numbers, buffers.sum_key, values, section[size:])
        self._there.pack(values, codec.result_bits, section[:size].unsqueeze(0))
        finish = across.all_gather(row)
        yield
        yield
        finish()
        rows = [] if self._shared is None else self._shared.share(row.view(-1))
        if rows:
            sections = [section for one in rows for section in one.view(shape)]
            return [one[:size] for one in sections], torch.cat([one[size:] for one in sections]), row
        if gathered is None:
            gathered = scratch.empty(torch.uint8, (local.size, *shape))
            gathered[local.rank] = row
        local.all_gather(gathered.flatten(1))()
        arrived = gathered.flatten(0, 1).to(self._device)
        # With one block, `flatten` does not copy.
        return arrived[:, :size], arrived[:, size:].flatten().contiguous(), row


def _shared_buffers_of(route: Route, device: torch.device) -> SharedBuffers | None:
    """Return buffers that all workers of a host can read; None if they have no such memory, or need none."""
    group = getattr(route.local, "group", None)
    is_possible = route.local.size > 1 and {device.type, route.device.type} == {"cpu"} and hasattr(group, "share")
    return shared_buffers(group) if is_possible else None
