"""Rounding of gradients to small integers: without bias, the same bits from all kernels, and packed without loss."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.comm import codec_kernels, compressed_sum
from lockstep.comm.codec_kernels import CpuKernels, kernels_for, trial
from lockstep.comm.compressed_sum import CompressedSum, Route
from lockstep.comm.host_groups import SingleWorker
from lockstep.comm.integer_codec import BLOCK, ROWS, IntegerCodec, TorchKernels, dither_rows, dither_table, pack, unpack

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
CPU = torch.device("cpu")


def sum_of(shards: Tensor, bits: int, step: int, scale: float = 1.0) -> Tensor:
    """The sum of shards [shards, numel] on one worker."""
    route = Route.of_single_worker(len(shards), shards.device)
    one = CompressedSum(IntegerCodec(bits), route, shards=len(shards), own=len(shards), device=shards.device)
    buffers = one.allocate(torch.arange(shards.shape[1] // BLOCK), 1)
    buffers.rows[:, : shards.shape[1]].copy_(shards)
    buffers.shard_keys, buffers.sum_key = [1000 * step + n for n in range(len(shards))], 1000 * step + 999
    buffers.scale = lambda: scale
    return one.run(buffers)[: shards.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_mean_of_many_rounded_sums_is_the_sum(bits: int) -> None:
    shards = torch.randn(3, 8 * BLOCK, generator=torch.Generator().manual_seed(1))
    shards *= torch.logspace(-8, 7, 8).repeat_interleave(BLOCK)
    want, steps = shards.double().sum(dim=0), 2000
    found = [sum_of(shards, bits, step).double() for step in range(steps)]
    size = want.view(8, BLOCK).pow(2).mean(dim=1).sqrt().repeat_interleave(BLOCK)
    noise = torch.stack([((one - want) / size).pow(2).mean() for one in found]).mean().sqrt().item()
    bias = ((torch.stack(found).mean(dim=0) - want) / size).abs()
    assert noise < {4: 0.4, 8: 0.025}[bits]
    assert bias.max().item() < 6 * noise / steps**0.5  # six standard deviations of the mean
    assert bias.pow(2).mean().sqrt().item() < 1.3 * noise / steps**0.5


def test_integers_that_fit_are_not_changed() -> None:
    whole = torch.randint(-127, 128, (1, 4 * BLOCK), generator=torch.Generator().manual_seed(1)).float()
    whole[:, ::BLOCK] = 127.0  # the largest value of a block determines its scale
    whole *= 2.0**-9
    assert torch.equal(sum_of(whole, 8, 1), whole[0])
    assert torch.equal(sum_of(whole, 8, 1, scale=0.5), whole[0] / 2)
    assert torch.equal(sum_of(torch.zeros(2, BLOCK), 8, 1), torch.zeros(BLOCK))


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_gradients(bits: int) -> None:
    big, small, denormal = 5e8, 1e-9, 1e-44
    shards = torch.tensor([big, small, denormal]).repeat_interleave(BLOCK).view(1, -1)
    found = sum_of(shards, bits, 1).view(3, BLOCK)
    assert found[0].isfinite().all()
    assert found[0].double().mean().item() == pytest.approx(big, rel=0.2)
    assert found[1].mean().item() == pytest.approx(small, rel=0.5)
    assert found[2].abs().max().item() < small


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(value: float) -> None:
    shards = torch.ones(2, 3 * BLOCK)
    shards[1, BLOCK + 5] = value
    for bits in (4, 8):
        found = sum_of(shards, bits, 1).view(3, BLOCK)
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()


def test_every_column_of_the_table_has_every_number_once() -> None:
    table = dither_table(CPU, 7) - 7
    assert torch.equal(table.sort(dim=0).values, ((torch.arange(ROWS) + 0.5) / ROWS).unsqueeze(1).expand(ROWS, BLOCK))
    found = hashlib.sha256(table.numpy().tobytes()).hexdigest()
    assert found == "e8a7c1d539bdcfc6906402197181d03efa2499620db86a7889df500b9d4f90bd", (
        "the bits of all compressed runs would change"
    )
    rows = torch.cat([dither_rows(torch.arange(10_000), key) for key in range(20)])
    counts = rows.bincount(minlength=ROWS).float()
    assert counts.min() > 0.6 * counts.mean()
    assert counts.max() < 1.5 * counts.mean()


@pytest.mark.parametrize("width", range(1, 21))
def test_packing_loses_nothing(width: int) -> None:
    numel, wider = 24 * BLOCK, width + 2
    values = torch.randint(0, 2**width, (3, 2, numel), generator=torch.Generator().manual_seed(width)).int()
    packed = [
        torch.empty(2, numel * width // 8 + 1, dtype=torch.uint8)[:, :-1] for _ in values
    ]  # rows at odd addresses
    for one, out in zip(values, packed, strict=True):
        pack(one, width, out)
        assert torch.equal(unpack(out, width), one)
    for kernels in (TorchKernels(IntegerCodec(8)), kernels_for(IntegerCodec(8), CPU)):
        total = torch.empty(2, numel * wider // 8, dtype=torch.uint8)
        kernels.add(packed, width, total, wider)
        assert torch.equal(unpack(total, wider), values.sum(dim=0, dtype=torch.int32)), type(kernels)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("blocks", "sections"), [(8, 1), (24, 4), (2056, 2), (136, 3)])
def test_fused_kernels_return_the_bits_of_torch(device: str, bits: int, blocks: int, sections: int) -> None:
    where, codec = torch.device(device), IntegerCodec(bits)
    fused = kernels_for(codec, where)
    assert type(fused) is not TorchKernels, "no compiler was found, or its kernels failed"
    mine, want = (trial(one, codec, where, blocks=blocks, sections=sections) for one in (fused, TorchKernels(codec)))
    assert [torch.equal(a, b) for a, b in zip(mine, want, strict=True)] == [True] * len(want)


def test_a_kernel_that_computes_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def shifted(self: CpuKernels, *arguments: Any) -> None:
        TorchKernels(self.codec).encode(*arguments)
        arguments[-1].add_(1)

    monkeypatch.setattr(CpuKernels, "encode", shifted)
    kernels_for.cache_clear()
    try:
        assert type(kernels_for(IntegerCodec(8), CPU)) is TorchKernels
        assert "compute other bits" in caplog.text
    finally:
        kernels_for.cache_clear()


def test_without_a_compiler_the_kernels_of_torch_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiler in ("/no/such/compiler", "false", 'gcc "'):
        monkeypatch.setenv("CC", compiler)
        kernels_for.cache_clear()
        codec_kernels.load_library.cache_clear()
        try:
            assert type(kernels_for(IntegerCodec(8), CPU)) is TorchKernels
        finally:
            kernels_for.cache_clear()
            codec_kernels.load_library.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_program_does_not_matter(dtype: torch.dtype) -> None:
    shards = torch.randn(2, 4 * BLOCK, generator=torch.Generator().manual_seed(1))
    want = sum_of(shards, 8, 1)
    caches = (kernels_for, codec_kernels.load_library, dither_table)
    for is_new in (False, True):
        for cache in caches if is_new else ():
            cache.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(sum_of(shards, 8, 1), want)
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_library_is_compiled_once_and_never_taken_from_a_folder_that_others_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = codec_kernels.load_library.__wrapped__
    assert load() is not None
    (made,) = cache.iterdir()
    changed = made.stat().st_mtime_ns
    assert load() is not None
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [changed]
    cache.chmod(0o777)
    assert codec_kernels._cache_folder() is None
    assert load() is not None  # compiled for this process only
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [changed]


class Threads:
    """Workers in threads of this process, for `Route`: what they have passed lies in a list, by rank."""

    def __init__(self, size: int) -> None:
        self.barrier, self.passed = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def exchange(self, rank: int, mine: Tensor) -> list[Tensor]:
        self.passed[rank] = mine.clone()
        self.barrier.wait()
        found = list(self.passed)
        self.barrier.wait()
        return found


class ThreadSubgroup:
    """See comm/host_groups.py."""

    def __init__(self, threads: Threads, rank: int, size: int) -> None:
        self._threads, self.rank, self.size = threads, rank, size

    def all_reduce_small(self, tensor: Tensor, op: Any) -> Any:
        tensor.copy_(torch.stack(self._threads.exchange(self.rank, tensor)).amax(dim=0))
        return lambda: None

    def exchange_rows(self, rows: Tensor) -> tuple[Tensor, Any]:
        return torch.stack([rows_[self.rank] for rows_ in self._threads.exchange(self.rank, rows)]), lambda: None

    def all_gather(self, rows: Tensor) -> Any:
        rows.copy_(torch.stack([rows_[n] for n, rows_ in enumerate(self._threads.exchange(self.rank, rows))]))
        return lambda: None


class StrictKernels(TorchKernels):
    """Takes only what kernels on a GPU can read."""

    def add(self, packed: Sequence[Tensor], bits: int, out: Tensor, out_bits: int) -> None:
        assert all(one.stride(1) == 1 for one in (*packed, out))
        super().add(packed, bits, out, out_bits)

    def round(self, packed: Sequence[Tensor], bits: int, offset: int, numbers: Tensor, key: int, out: Tensor) -> None:
        assert all(one.is_contiguous() for one in (*packed, numbers, out))
        super().round(packed, bits, offset, numbers, key, out)

    def decode(self, rounded: Sequence[Tensor], codes: Tensor, scale: float | Tensor, out: Tensor) -> None:
        assert all(one.is_contiguous() for one in (*rounded, codes, out))
        super().decode(rounded, codes, scale, out)


GRID = [(1, 2, 1), (2, 1, 2), (1, 3, 3), (3, 1, 7), (2, 2, 9), (3, 2, 5)]


@pytest.mark.parametrize(("hosts", "workers", "blocks"), GRID)
@pytest.mark.parametrize("bits", [4, 8])
def test_workers_with_few_blocks_get_the_sum_of_one_worker(
    monkeypatch: pytest.MonkeyPatch, bits: int, hosts: int, workers: int, blocks: int
) -> None:
    """About as many blocks as workers: each rounds few, and their shifts lie between the blocks of others."""
    monkeypatch.setattr(compressed_sum, "kernels_for", lambda codec, device: StrictKernels(codec))
    size, codec = hosts * workers, IntegerCodec(bits)
    shards = torch.randn(size, blocks * BLOCK, generator=torch.Generator().manual_seed(1))
    inside, between = [Threads(workers) for _ in range(hosts)], [Threads(hosts) for _ in range(workers)]

    def run(rank: int) -> tuple[Tensor, Tensor]:
        host, column = divmod(rank, workers)
        local = ThreadSubgroup(inside[host], column, workers) if workers > 1 else SingleWorker()
        across = ThreadSubgroup(between[column], host, hosts) if hosts > 1 else SingleWorker()
        one = CompressedSum(codec, Route(local, across, 1, workers, CPU), shards=size, own=1, device=CPU)
        buffers = one.allocate(torch.arange(blocks), size)
        buffers.rows[0, : blocks * BLOCK] = shards[rank]
        buffers.flags[rank] = 1
        buffers.shard_keys, buffers.sum_key = [1000 + rank], 1999
        return one.run(buffers)[: blocks * BLOCK], buffers.flags

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    assert all(torch.equal(one, sum_of(shards, bits, 1)) for one, _ in found)
    assert all(flags.all() for _, flags in found)
