"""The operations of comm/integer_codec.py on a GPU, in one kernel each. They need Triton, which comes with torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.comm.integer_codec import (
    BLOCK,
    CODE_OFFSET,
    CODE_SHIFT,
    ROWS,
    TorchKernels,
    dither_table,
    planes_of,
)

PER_PROGRAM = 32  # blocks
ELEMENTS = 2048  # of a program that packs or unpacks
UNFUSED = {"enable_fp_fusion": False}  # Note [Exactness] in integer_codec.py
SHIFT, OFFSET = tl.constexpr(CODE_SHIFT), tl.constexpr(CODE_OFFSET)


@triton.jit
def _dither_row(number, key, ROWS: tl.constexpr):
    mixed = number.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 16)) * 0xC2B2AE35
    return ((mixed ^ (mixed >> 13)) & (ROWS - 1)).to(tl.int32)


@triton.jit
def _scale_of(code):
    return ((code + OFFSET) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _block_codes(gradients, codes, blocks, shards, stride, inverse, BLOCK: tl.constexpr, PER: tl.constexpr):
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    inside = block < blocks
    at = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = tl.zeros([PER], dtype=tl.int32)
    stride = stride.to(tl.int64)
    for shard in range(shards):
        bits = tl.load(gradients + shard * stride + at, mask=inside[:, None], other=0.0).to(tl.int32, bitcast=True)
        bits = bits & 0x7FFFFFFF
        found = tl.maximum(found, tl.max(bits, axis=1))  # the order of these bits is that of the values, NaN last
    smallest = (found.to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True)
    code = ((smallest + ((1 << SHIFT) - 1)) >> SHIFT) - OFFSET
    code = tl.minimum(tl.maximum(code, 1), 255)
    code = tl.where(found == 0, 0, tl.where(found >= 0x7F800000, 255, code))
    tl.store(codes + block, code.to(tl.uint8), mask=inside)


@triton.jit
def _rounded_sums(
    gradients, codes, numbers, key, keys, table, block, inside, shards, stride,
    AT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over shards of rounded values of these blocks."""
    lane = tl.arange(0, BLOCK)[None, :]
    at = block.to(tl.int64)[:, None] * BLOCK + lane
    code = tl.load(codes + block, mask=inside, other=0).to(tl.int32)
    number = tl.load(numbers + block, mask=inside, other=0)
    good = (code != 255)[:, None]
    inverse = tl.where((code == 0) | (code == 255), 0.0, tl.div_rn(1.0, _scale_of(code)))[:, None]
    total = tl.zeros([block.shape[0], BLOCK], dtype=tl.int32)
    for shard in range(shards):
        value = tl.load(gradients + shard * stride.to(tl.int64) + at, mask=inside[:, None], other=0.0)
        if AT:
            key = tl.load(keys + shard)
        row = _dither_row(number, key, ROWS)
        dither = tl.load(table + row[:, None] * BLOCK + lane)
        total += (dither + tl.where(good, value, 0.0) * inverse).to(tl.int32)
    return tl.where(good, total, 0)


@triton.jit(do_not_specialize=["key"])
def _encode(
    gradients, codes, numbers, key, keys, table, out, blocks, shards, stride, out_stride,
    HALVES: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Program (part, row): some blocks of a row of `blocks`. The key is a number, or with AT there is one for each
    shard in `keys`. With HALVES the second half of a row is packed into the upper four bits of the first; the sums,
    of one shard then, have four bits."""
    row, half = tl.program_id(1), blocks // (1 + HALVES)
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    inside = block < half
    first = row * blocks + block
    total = _rounded_sums(
        gradients, codes, numbers, key, keys, table, first, inside, shards, stride, AT, ROWS, BLOCK
    )  # fmt: skip
    if HALVES:
        total |= _rounded_sums(
            gradients, codes, numbers, key, keys, table, first + half, inside, shards, stride, AT, ROWS, BLOCK
        ) << 4  # fmt: skip
    at = row * out_stride.to(tl.int64) + block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["offset", "key"])
def _round_sums(
    sums, offset, numbers, key, table, values, shifts, blocks, carry,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    inside = block < blocks
    lane = tl.arange(0, BLOCK)[None, :]
    at = block.to(tl.int64)[:, None] * BLOCK + lane
    total = tl.load(sums + at, mask=inside[:, None], other=0).to(tl.int32) - offset
    found = tl.max(tl.abs(total), axis=1)
    largest = found.to(tl.float32).to(tl.int32, bitcast=True)
    power = tl.maximum(((largest + carry) >> 23) - (126 + BITS - 1), 0)
    eighths = tl.minimum(((8 * ((1 << (BITS - 1)) - 1)) << power) // tl.maximum(found, 1), 15)
    eighths = tl.where(power == 0, 8, eighths)
    inverse = (eighths.to(tl.float32) * ((124 - power) << 23).to(tl.float32, bitcast=True))[:, None]
    row = _dither_row(tl.load(numbers + block, mask=inside, other=0), key, ROWS)
    dither = tl.load(table + row[:, None] * BLOCK + lane)
    rounded = (dither + total.to(tl.float32) * inverse).to(tl.int32)
    tl.store(values + at, rounded.to(tl.uint8), mask=inside[:, None])
    tl.store(shifts + block, ((power << 3) + eighths - 8).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["per_section"])
def _decode(
    packed, codes, shifts, factor, factor_at, out, per_section, stride,
    BITS: tl.constexpr, AT: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Program (part, section): some blocks of one section. The factor is a number, or with AT where it is stored."""
    section = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    inside = block < per_section
    first = section * per_section
    code = tl.load(codes + first + block, mask=inside, other=0).to(tl.int32)
    shift = tl.load(shifts + first + block, mask=inside, other=0).to(tl.int32)
    power = (((shift >> 3) + 127) << 23).to(tl.float32, bitcast=True)
    scale = _scale_of(code) * (tl.div_rn(8.0, ((shift & 7) + 8).to(tl.float32)) * power)
    scale = tl.where(code == 0, 0.0, tl.where(code == 255, float("nan"), scale))
    if AT:
        factor = tl.load(factor_at)
    scale = (scale * factor)[:, None]
    index = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = packed + section * stride
    if BITS == 8:
        value = tl.load(rows + index, mask=inside[:, None], other=0).to(tl.int32)
    else:  # 5: four bits of half of the values, and then one of an eighth
        eighth = per_section.to(tl.int64) * (BLOCK // 8)
        low = tl.load(rows + index % (4 * eighth), mask=inside[:, None], other=0).to(tl.int32)
        high = tl.load(rows + 4 * eighth + index % eighth, mask=inside[:, None], other=0).to(tl.int32)
        low = (low >> (4 * (index // (4 * eighth))).to(tl.int32)) & 15
        value = low | (((high >> (index // eighth).to(tl.int32)) & 1) << 4)
    value = (value - ((1 << (BITS - 1)) - 1)).to(tl.float32) * scale
    tl.store(out + first * BLOCK + index, value, mask=inside[:, None])


@triton.jit
def _pack(values, packed, numel, stride, size, shift, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr):
    """One plane of one row: bits `shift` to `shift` + WIDTH of 8 / WIDTH values make a byte."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < size
    byte = tl.zeros([ELEMENTS], dtype=tl.int32)
    for slot in tl.static_range(8 // WIDTH):
        value = tl.load(values + row * numel + slot * size + at, mask=inside, other=0).to(tl.int32)
        byte |= ((value >> shift) & ((1 << WIDTH) - 1)) << (slot * WIDTH)
    tl.store(packed + row * stride + at, byte.to(tl.uint8), mask=inside)


@triton.jit
def _unpack_sum(
    packed, total, rows, stride, size, shift, FIRST: tl.constexpr, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr
):
    """One plane: added to `total`, or with FIRST written there."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < size
    for slot in tl.static_range(8 // WIDTH):
        found = tl.zeros([ELEMENTS], dtype=tl.int32)
        for row in range(rows):
            byte = tl.load(packed + row * stride + at, mask=inside, other=0).to(tl.int32)
            found += (byte >> (slot * WIDTH)) & ((1 << WIDTH) - 1)
        found = found << shift
        to = total + slot * size + at
        if not FIRST:
            found += tl.load(to, mask=inside, other=0).to(tl.int32)
        tl.store(to, found.to(total.dtype.element_ty), mask=inside)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one, which takes a third as long as launching a kernel, only if it is not."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


class TritonKernels(TorchKernels):
    """See `Kernels`."""

    @property
    def _carry(self) -> int:
        """What turns a mantissa that needs the next power of two into an overflow: see `exponents`."""
        bits, largest = self.codec.result_bits, self.codec.largest_result
        return 2**23 - 1 - ((largest << (25 - bits)) - 2**23)

    def block_codes(self, shards: Tensor, out: Tensor) -> None:
        blocks, inverse = shards.shape[1], 1 / self.codec.largest
        with _on(shards.device):
            _block_codes[(triton.cdiv(blocks, PER_PROGRAM),)](
                shards, out, blocks, len(shards), shards.stride(0), inverse, BLOCK, PER_PROGRAM
            )

    def encode(
        self, shards: Tensor, codes: Tensor, numbers: Tensor, keys: Sequence[int], bits: int, out: Tensor
    ) -> None:
        if not len(shards):
            out.zero_()
            return
        rows, blocks, halves = len(out), len(codes) // len(out), bits == 4
        sums = out if bits in (4, 8) else self._integers(bits, rows, codes)
        table, several = dither_table(shards.device, self.codec.largest), len(keys) > 1
        all_keys = torch.tensor(keys, device="cpu").to(shards.device, non_blocking=True) if several else codes
        arguments = shards, codes, numbers, keys[0] & 0xFFFFFFFF | 2**32, all_keys, table, sums
        sizes = blocks, len(shards), shards.stride(0), sums.stride(0), halves, several, ROWS, BLOCK, PER_PROGRAM
        with _on(shards.device):
            _encode[(triton.cdiv(blocks // (1 + halves), PER_PROGRAM), rows)](*arguments, *sizes, **UNFUSED)
        if sums is not out:
            self._pack(sums, bits, out)

    def add(self, packed: Sequence[Tensor], bits: int, out: Tensor, out_bits: int) -> None:
        sums = self._integers(out_bits, len(out), out, numel=out.shape[1] * 8 // out_bits)
        for n, section in enumerate(sums):
            self._unpack_sum([one[n] for one in packed], bits, section)
        self._pack(sums, out_bits, out)

    def round(self, packed: Sequence[Tensor], bits: int, offset: int, numbers: Tensor, key: int, out: Tensor) -> None:
        blocks, table = len(numbers), dither_table(numbers.device, self.codec.largest_result)
        sums = self._integers((2 * offset).bit_length(), 1, numbers)
        self._unpack_sum(packed, bits, sums[0])
        values, shifts = torch.empty_like(sums, dtype=torch.uint8), out[-blocks:]
        key, sizes = (key & 0xFFFFFFFF) | 2**32, (self.codec.result_bits, ROWS, BLOCK, PER_PROGRAM)
        with _on(numbers.device):
            _round_sums[(triton.cdiv(blocks, PER_PROGRAM),)](
                sums, offset, numbers, key, table, values, shifts, blocks, self._carry, *sizes, **UNFUSED
            )
        self._pack(values, self.codec.result_bits, out[:-blocks].unsqueeze(0))

    def decode(self, rounded: Sequence[Tensor], codes: Tensor, scale: float | Tensor, out: Tensor) -> None:
        rows, blocks = as_rows(rounded), len(codes) // len(rounded)
        shifts = rows[:, -blocks:].flatten().contiguous()  # with one block, `flatten` does not copy
        sizes = (self.codec.result_bits, isinstance(scale, Tensor), BLOCK, PER_PROGRAM)
        number, where = (1.0, scale) if isinstance(scale, Tensor) else (scale, codes)
        with _on(out.device):
            _decode[(triton.cdiv(blocks, PER_PROGRAM), len(rows))](
                rows, codes, shifts, number, where, out, blocks, rows.stride(0), *sizes
            )

    @staticmethod
    def _integers(bits: int, rows: int, like: Tensor, *, numel: int = 0) -> Tensor:
        """Return memory for rows of integers of so many bits; by default for a block for each element of `like`."""
        dtype = torch.uint8 if bits <= 8 else torch.int16 if bits < 16 else torch.int32
        return torch.empty(rows, numel or len(like) * BLOCK // rows, dtype=dtype, device=like.device)

    @staticmethod
    def _pack(values: Tensor, bits: int, out: Tensor) -> None:
        rows, numel = values.shape
        at, shift = 0, 0
        with _on(values.device):
            for width in planes_of(bits):
                size = numel * width // 8
                _pack[(triton.cdiv(size, ELEMENTS), rows)](
                    values, out[:, at:] if at else out, numel, out.stride(0), size, shift, width, ELEMENTS
                )
                at, shift = at + size, shift + width

    @staticmethod
    def _unpack_sum(packed: Sequence[Tensor], bits: int, out: Tensor) -> None:
        at, shift, rows = 0, 0, as_rows(packed)
        with _on(rows.device):
            for width in planes_of(bits):
                size = len(out) * width // 8
                _unpack_sum[(triton.cdiv(size, ELEMENTS),)](
                    rows[:, at:] if at else rows,
                    out,
                    len(rows),
                    rows.stride(0),
                    size,
                    shift,
                    at == 0,
                    width,
                    ELEMENTS,
                )
                at, shift = at + size, shift + width


def as_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of bytes as rows of one: a view if they lie at equal distances in the same memory."""
    first = tensors[0]
    step = tensors[1].data_ptr() - first.data_ptr() if len(tensors) > 1 else len(first)
    starts = [first.data_ptr() + n * step for n in range(len(tensors))]
    same = all(one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for one in tensors)
    if same and step > 0 and starts == [one.data_ptr() for one in tensors]:
        return first.as_strided((len(tensors), len(first)), (step, 1))
    return torch.stack(list(tensors))
