"""Gradients as small integers, whose sums do not depend on the order. No communication here.

A gradient is divided into blocks of BLOCK elements. All shards use the same scale for a block, a power of two, which is
found from the largest element of any shard. Each element is divided by the scale and rounded to one of the two nearest
integers at random, so that the mean of the rounded values is the element itself. Integers are added exactly, so the sum
has the same bits on any number of workers, whichever of them adds first. At the end the sum is rounded once more, to
the same number of bits, again at random. Nothing is remembered from one step to the next.

Note [Dither]
Rounding at random is rounding down after a number in [0, 1) was added. These numbers come from a table of ROWS rows,
one row for each block of each shard in each step; a hash of (seed, step, shard, block) selects it. Every column of the
table contains each of ROWS evenly spaced numbers once, so over all rows the mean is exact to 1 / (2 ROWS). The table
stays in the cache; to compute as many hashes would cost several times as much.

Note [Exactness]
The product of a gradient and a power of two is exact, and the sum with a number of the table is rounded once. So a
kernel that fuses these operations returns the same bits as one operation after the other (comm/codec_kernels.py).

Note [Offset]
Rounded values are stored with `largest` added, which makes them non-negative. So conversion to an integer rounds down,
and sums of n values, in [0, 2 n largest], are packed into as few bits as they need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

import torch
from torch import Tensor

BLOCK: Final = 128  # elements
ROWS: Final = 1024  # Note [Dither]
NON_FINITE: Final = 255  # code of a block with an element that is not finite
_SMALLEST_CODE: Final = 8  # smaller gradients are rounded as if they were of this scale, 2**-120
_BIAS: Final = 128  # code of the scale 1


class Kernels(Protocol):
    """The operations of a codec on all elements.

    Gradients are float32 [..., blocks, BLOCK]. `numbers` are the numbers of the blocks, int64, from which and from a
    key the rows of the dither table follow. `codes` are the scales of the blocks: see `IntegerCodec`. Rows of shards
    and of packed integers may be apart in memory; all else is contiguous.
    """

    def block_codes(self, shards: Tensor) -> Tensor:
        """Return the code of each block: the largest that one of the shards needs."""

    def encode(self, shards: Tensor, codes: Tensor, numbers: Tensor, keys: Sequence[int], out: Tensor) -> None:
        """Round the shards, each with its own key, and write their sum to the integers `out`.

        In blocks whose code is NON_FINITE it is 0.
        """

    def pack(self, values: Tensor, bits: int, out: Tensor) -> None:
        """Pack rows of non-negative integers [rows, numel] of so many bits into uint8 [rows, numel * bits / 8]."""

    def unpack_sum(self, packed: Tensor, bits: int, out: Tensor) -> None:
        """Write the sum over the rows of what was packed to `out`, int16 or int32 [numel]."""

    def round_sums(self, sums: Tensor, offset: int, numbers: Tensor, key: int, values: Tensor, shifts: Tensor) -> None:
        """Subtract `offset` from the sums [blocks, BLOCK], int16 or int32, and round them to the bits of the codec.

        values, shifts  the result, and by how many bits each block was shifted, both uint8
        """

    def decode(self, packed: Tensor, codes: Tensor, shifts: Tensor, scale: float | Tensor, out: Tensor) -> None:
        """Unpack rounded values [sections, bytes], and write the gradients that they stand for, times `scale`."""


@dataclass(frozen=True)
class IntegerCodec:
    """Rounds gradients to integers of `bits` bits, 4 or 8.

    `codes` [blocks] are the scales of blocks as uint8: 0 for a block of zeros, NON_FINITE, or the exponent of the scale
    + 128.
    """

    bits: int

    @property
    def largest(self) -> int:
        """The largest rounded value; the smallest is its negative."""
        return largest_of(self.bits)

    def sum_bits(self, shards: int) -> int:
        """Return the number of bits of a sum of the rounded values of so many shards. See Note [Offset]."""
        return (2 * self.largest * shards).bit_length()

    def sum_dtype(self, shards: int) -> torch.dtype:
        """Return the narrowest dtype of such a sum."""
        bits = self.sum_bits(shards)
        return torch.uint8 if bits <= 8 else torch.int16 if bits < 16 else torch.int32

    def codes(self, largest: Tensor) -> Tensor:
        """Return the codes of blocks whose largest absolute values are given."""
        codes = (exponents(largest, self.bits) + _BIAS).clamp_(_SMALLEST_CODE, NON_FINITE - 1)
        codes = codes.masked_fill_(largest == 0, 0).masked_fill_(~largest.isfinite(), NON_FINITE)
        return codes.to(torch.uint8)

    def inverse_scales(self, codes: Tensor) -> Tensor:
        """Return 1 / scale of each block, 0 for blocks of zeros and for those that are not finite."""
        powers = 127 + _BIAS - codes.int()
        powers = powers.masked_fill_((codes == 0) | (codes == NON_FINITE), 0)
        return (powers << 23).view(torch.float32)

    def factors(self, codes: Tensor, shifts: Tensor, scale: float | Tensor) -> Tensor:
        """Return by what the rounded sums of each block are to be multiplied; NaN where a gradient is not finite."""
        powers = (codes.int() + shifts.int() + (127 - _BIAS)).clamp_(max=255)
        factors = (powers << 23).view(torch.float32).masked_fill_(codes == 0, 0.0)
        return factors.masked_fill_(codes == NON_FINITE, math.nan) * scale

    def noise_energy(self, codes: Tensor, shifts: Tensor, shards: int) -> Tensor:
        """Return about how large the squared error of a sum over so many shards is, from the scales of its blocks.

        Rounding a number at random to one of the two nearest integers has a variance of 1 / 6 on average. Every shard
        is rounded, and once more the sum, to multiples of 2**shift.
        """
        scales = self.factors(codes, torch.zeros_like(shifts), 1.0).double().square()
        return (BLOCK / 6) * (scales * (shards + torch.where(shifts > 0, 4.0 ** shifts.double(), 0.0))).sum()


def largest_of(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def exponents(largest: Tensor, bits: int) -> Tensor:
    """Return the smallest e with `largest` <= largest_of(bits) * 2**e, for each element."""
    threshold = int((largest_of(bits) / 2 ** (bits - 2) - 1) * 2**23)  # mantissas above it need one more
    return ((largest.float().view(torch.int32) + (2**23 - 1 - threshold)) >> 23) - (126 + bits - 1)


# -- dither ------------------------------------------------------------------------------------------------------------


@cache
def dither_table(device: torch.device, offset: int) -> Tensor:
    """Return the table of Note [Dither], with `offset` added: see Note [Offset]."""
    if device.type != "cpu":
        return dither_table(torch.device("cpu"), offset).to(device)
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.rand(ROWS, BLOCK, generator=generator, dtype=torch.float32, device=device)
    return (drawn.argsort(dim=0, stable=True).to(torch.float32) + 0.5) / ROWS + offset


def dither_rows(blocks: Tensor, key: int) -> Tensor:
    """Return the row of the table for each block: a hash of its number (int64) and the key."""
    mask = 0xFFFFFFFF
    mixed = (blocks * 0x9E3779B1 + (key & mask)) & mask
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & mask
    return (mixed ^ (mixed >> 13)) & (ROWS - 1)


# -- kernels of torch --------------------------------------------------------------------------------------------------


def planes_of(bits: int) -> list[int]:
    """Return the widths of the parts into which values of so many bits are cut, the lowest bits first."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits % 8 & width]


class TorchKernels:
    """See `Kernels`. For every device; others are faster (comm/codec_kernels.py), and return the same bits."""

    def __init__(self, codec: IntegerCodec) -> None:
        self.codec = codec

    def block_codes(self, shards: Tensor) -> Tensor:
        return self.codec.codes(torch.stack([one.abs().amax(dim=1) for one in shards]).amax(dim=0))

    def encode(self, shards: Tensor, codes: Tensor, numbers: Tensor, keys: Sequence[int], out: Tensor) -> None:
        table, inverse = dither_table(shards.device, self.codec.largest), self.codec.inverse_scales(codes).unsqueeze(1)
        bad = (codes == NON_FINITE).unsqueeze(1)
        for n, (one, key) in enumerate(zip(shards, keys, strict=True)):
            rounded = table[dither_rows(numbers, key)].addcmul_(one.masked_fill(bad, 0.0), inverse)
            out.copy_(rounded) if n == 0 else out.add_(rounded.to(out.dtype))
        out.masked_fill_(bad, 0)

    def pack(self, values: Tensor, bits: int, out: Tensor) -> None:
        planes, shift = list[Tensor](), 0
        for width in planes_of(bits):
            plane = (values >> shift).bitwise_and_(2**width - 1).to(torch.uint8)
            slots = plane.view(len(plane), 8 // width, -1)
            packed = slots[:, 0].clone()
            for n in range(1, 8 // width):
                packed |= slots[:, n] << (n * width)
            planes.append(packed)
            shift += width
        torch.cat(planes, dim=1, out=out)

    def unpack_sum(self, packed: Tensor, bits: int, out: Tensor) -> None:
        at, shift = 0, 0
        out.zero_()
        for width in planes_of(bits):
            size = len(out) * width // 8
            plane = packed[:, at : at + size]
            for n, slot in enumerate(out.view(8 // width, size)):
                part = (plane >> (n * width)).bitwise_and_(2**width - 1)
                slot.add_(part.sum(dim=0, dtype=out.dtype) << shift)
            at, shift = at + size, shift + width

    def round_sums(self, sums: Tensor, offset: int, numbers: Tensor, key: int, values: Tensor, shifts: Tensor) -> None:
        total, table = sums.int() - offset, dither_table(sums.device, self.codec.largest)
        needed = exponents(total.abs().amax(dim=1), self.codec.bits).clamp_(min=0)
        inverse = ((127 - needed) << 23).view(torch.float32).unsqueeze(1)
        values.copy_(table[dither_rows(numbers, key)].addcmul_(total.float(), inverse).view(values.shape))
        shifts.copy_(needed)

    def decode(self, packed: Tensor, codes: Tensor, shifts: Tensor, scale: float | Tensor, out: Tensor) -> None:
        if self.codec.bits == 4:
            packed = torch.stack([packed & 15, packed >> 4], dim=1)
        values = (packed.reshape(out.shape) - self.codec.largest).view(torch.int8)
        torch.mul(values, self.codec.factors(codes, shifts, scale).unsqueeze(1), out=out)
