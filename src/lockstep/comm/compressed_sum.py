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
from lockstep.comm.integer_codec import BLOCK, SECTION_BLOCKS, IntegerCodec, shifts_of
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
        self._unit = self._sections * SECTION_BLOCKS  # the blocks of a bucket, and of a chunk, are a multiple of it
        self._scratch, self._shared = ScratchBuffers(), _shared_buffers_of(route, device)
        self._kernels, self._there = kernels_for(codec, device), kernels_for(codec, route.device)

    def allocate(self, numbers: Tensor, flags: int) -> CompressedBuffers:
        """Allocate the buffers of a sum of blocks with these numbers, and of so many flags."""
        count = -(-len(numbers) // self._unit) * self._unit
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
        """Return the number of blocks of a chunk."""
        if self._device.type != "cpu" or self._sections == 1:
            return max(count, 1)
        chunks = CHUNKS if self._route.cores_per_worker >= MANY_CORES else CHUNKS_ON_FEW_CORES
        most = max(-(-count // chunks), MIN_CHUNK_BLOCKS)
        return -(-most // self._unit) * self._unit

    def _reduce_chunk(self, buffers: CompressedBuffers, at: slice) -> Iterator[None]:
        """Sum some of the blocks. Yields while data is on the network."""
        codec, route, numbers = self.codec, self._route, buffers.numbers[at]
        shards = buffers.rows.view(len(buffers.rows), -1, BLOCK)[: self._own, at]
        codes = yield from self._agree_on_codes(buffers, shards, at)
        with ScratchScope(self._scratch, route.device) as scratch:
            width = codec.sum_bits(route.own_shards)
            mine = self._empty_rows(self._sections, len(codes) // self._sections * BLOCK * width // 8, scratch)
            self._kernels.encode(shards, codes, numbers, buffers.shard_keys, width, mine)
            parts, bits = yield from self._exchange_parts(mine.to(route.device), width, scratch)
            faults.at("exchange")
            rounded, row = yield from self._round_and_gather(buffers, parts, bits, at, scratch)
            out = buffers.rows[-1].view(-1, BLOCK)[at]
            scale = buffers.scale()
            self._kernels.decode(rounded, codes, scale, out)
            if buffers.errors is not None:
                shifts = shifts_of(rounded, len(codes) // self._sections)
                noise = self.codec.noise_energy(codes, shifts, self._shards) * scale**2
                energy = torch.linalg.vector_norm(out, dim=1).double().square().sum()
                buffers.errors.add(noise, energy)
            if self._shared is not None:
                self._shared.release(row.view(-1))

    def _empty_rows(self, count: int, size: int, scratch: ScratchScope) -> Tensor:
        """Return memory for rows of bytes, which the other workers of the host can read if that is possible."""
        if self._shared is not None:
            return self._shared.acquire(count * size).view(count, size)
        return scratch.empty(torch.uint8, (count, size), device=self._device)

    def _agree_on_codes(self, buffers: CompressedBuffers, shards: Tensor, at: slice) -> Generator[None, None, Tensor]:
        """Return the codes of blocks that fit the shards of all workers; in the first chunk agree on the flags, too."""
        count, is_first = shards.shape[1], at.start == 0
        codes = torch.zeros(count, dtype=torch.uint8, device=self._device)
        if self._own:
            self._kernels.block_codes(shards, codes)
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

    def _exchange_parts(
        self, mine: Tensor, width: int, scratch: ScratchScope
    ) -> Generator[None, None, tuple[Sequence[Tensor], int]]:
        """Send this worker's rounded values, of `width` bits, to where they are added.

        Returns what is to be added in this worker's section, one row for each host, or for each worker of the only
        host; and the bits of these values.
        """
        local, across = self._route.local, self._route.across
        of_host = [mine] if local.size == 1 else self._exchange_in_host(mine)
        if across.size == 1:
            return [one[0] for one in of_host], width
        bits = self.codec.sum_bits(self._route.shards)
        if local.size > 1:
            sums = scratch.empty(torch.uint8, (across.size, mine.shape[1] * bits // width))
            self._there.add(of_host, width, sums, bits)
        inbox, wait = across.exchange_rows(sums if local.size > 1 else mine)
        yield
        yield  # twice, so that the network has another chunk to send while this worker waits for this one
        wait()
        return inbox.unbind(), bits

    def _exchange_in_host(self, mine: Tensor) -> list[Tensor]:
        """Return what each worker of this host has for this one: a row for each host. Valid until the next `share`."""
        local, across, found = self._route.local, self._route.across, list[Tensor]()
        if self._shared is not None:
            found = [one.view(local.size, across.size, -1)[local.rank] for one in self._shared.share(mine.view(-1))]
            self._shared.release(mine.view(-1))
        if not found:
            inbox, wait = local.exchange_rows(mine.view(local.size, -1))
            wait()
            found = list(inbox.view(local.size, across.size, -1))
        return found

    def _round_and_gather(
        self, buffers: CompressedBuffers, parts: Sequence[Tensor], bits: int, at: slice, scratch: ScratchScope
    ) -> Generator[None, None, tuple[list[Tensor], Tensor]]:
        """Round the sums of this worker's section, of which each host has a part, in `bits` bits.

        Returns the rounded sums of all sections, and the memory of those that this worker has from other hosts.
        """
        codec, local, across, where = self.codec, self._route.local, self._route.across, self._route.device
        numbers = buffers.numbers[at].view(local.size, across.size, -1)[local.rank, across.rank].to(where)
        size = len(numbers) * BLOCK * codec.result_bits // 8 + len(numbers)
        gathered = scratch.empty(torch.uint8, (local.size, across.size, size)) if self._shared is None else None
        row = self._empty_rows(across.size, size, scratch) if gathered is None else gathered[local.rank]
        self._there.round(parts, bits, codec.largest * self._shards, numbers, buffers.sum_key, row[across.rank])
        finish = across.all_gather(row)
        yield
        yield
        finish()
        shared = [] if self._shared is None else self._shared.share(row.view(-1))
        if shared:
            return [section for one in shared for section in one.view(across.size, size)], row
        if gathered is None:
            gathered = scratch.empty(torch.uint8, (local.size, across.size, size))
            gathered[local.rank] = row
        local.all_gather(gathered.flatten(1))()
        return list(gathered.flatten(0, 1).to(self._device)), row


def _shared_buffers_of(route: Route, device: torch.device) -> SharedBuffers | None:
    """Return buffers that all workers of a host can read; None if they have no such memory, or need none."""
    group = getattr(route.local, "group", None)
    is_possible = route.local.size > 1 and {device.type, route.device.type} == {"cpu"} and hasattr(group, "share")
    return shared_buffers(group) if is_possible else None
