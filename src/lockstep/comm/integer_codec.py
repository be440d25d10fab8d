"""Gradients as small integers, whose sums do not depend on the order. No communication here.

A gradient is divided into blocks of BLOCK elements. All shards use the same scale for a block, which is found from the
largest element of any shard. Each element is divided by the scale and rounded to one of the two nearest integers at
random, so that the mean of the rounded values is the element itself. Integers are added exactly, so the sum has the
same bits on any number of workers, whichever of them adds first. At the end the sum is rounded once more, again at
random. Nothing is remembered from one step to the next.

Note [Scales]
Squared errors grow with the square of the scale, so it should be close to the smallest that is possible. That of a
block is m / 4 * 2**n, with 4 <= m < 8: a byte, its code, says which. The sum is multiplied by c / 8 / 2**k, with
8 <= c < 16, before it is rounded; another byte, its shift, has k and c. The sum of 4-bit integers is rounded to 5 bits,
since with 4 this last rounding would have the largest errors of all.

Note [Dither]
Rounding at random is rounding down after a number in [0, 1) was added. These numbers come from a table of ROWS rows,
one row for each block of each shard in each step; a hash of (seed, step, shard, block) selects it. Every column of the
table contains each of ROWS evenly spaced numbers once, so over all rows the mean is exact to 1 / (2 ROWS). The table
stays in the cache; to compute as many hashes would cost several times as much.

Note [Exactness]
Every product and every sum of floats is rounded by itself, so that fused kernels (comm/codec_kernels.py) return the
same bits as one operation of torch after the other: nothing may be contracted to a fused multiply-add, neither by a
compiler nor by `addcmul`.

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

BLOCK: Final = 64  # elements
ROWS: Final = 1024  # Note [Dither]
NON_FINITE: Final = 255  # code of a block with an element that is not finite, or too large for every scale
# The bits of a scale as a float, shifted by so many, are its code plus this number. Code 1 is the scale 2**-36, which
# smaller gradients get, too; the largest one is 1.25 * 2**27.
CODE_SHIFT: Final = 21
CODE_OFFSET: Final = 363


SECTION_BLOCKS: Final = 8  # a section of packed values has a multiple of so many blocks


class Kernels(Protocol):
    """The operations of a codec on all elements, on rounded values in packed form.

    Gradients are float32 [shards, blocks, BLOCK]. `numbers` are the numbers of the blocks, int64, from which and from a
    key the rows of the dither table follow. `codes` are the scales of the blocks: see `IntegerCodec`. Packed values are
    uint8 [sections, bytes]; each section is packed by itself, and has a multiple of SECTION_BLOCKS blocks. Rows of
    shards, and packed rows, may be apart in memory; all else is contiguous.
    """

    def block_codes(self, shards: Tensor, out: Tensor) -> None:
        """Write the code of each block, the largest that one of the shards needs; there is at least one."""

    def encode(
        self, shards: Tensor, codes: Tensor, numbers: Tensor, keys: Sequence[int], bits: int, out: Tensor
    ) -> None:
        """Round the shards, each with its own key, and pack their sums with so many bits; without shards 0.

        In blocks whose code is NON_FINITE a sum is 0.
        """

    def add(self, packed: Sequence[Tensor], bits: int, out: Tensor, out_bits: int) -> None:
        """Add packed values of so many bits, and pack the sums."""

    def round(self, packed: Sequence[Tensor], bits: int, offset: int, numbers: Tensor, key: int, out: Tensor) -> None:
        """Add packed values [bytes] of one section, subtract `offset`, and round the sums to `result_bits`.

        out  the rounded values, packed, and behind them the shift of each block (Note [Scales])
        """

    def decode(self, rounded: Sequence[Tensor], codes: Tensor, scale: float | Tensor, out: Tensor) -> None:
        """Write the gradients that sections as `round` writes them stand for, times `scale`."""


@dataclass(frozen=True)
class IntegerCodec:
    """Rounds gradients to integers of `bits` bits, 4 or 8.

    `codes` [blocks] are the scales of blocks as uint8, see Note [Scales]: 0 for a block of zeros, or NON_FINITE.
    """

    bits: int

    @property
    def largest(self) -> int:
        """The largest rounded value; the smallest is its negative."""
        return largest_of(self.bits)

    @property
    def result_bits(self) -> int:
        """The bits to which sums are rounded."""
        return 5 if self.bits == 4 else self.bits

    @property
    def largest_result(self) -> int:
        """The largest rounded sum; the smallest is its negative."""
        return largest_of(self.result_bits)

    def sum_bits(self, shards: int) -> int:
        """Return the number of bits of a sum of the rounded values of so many shards. See Note [Offset]."""
        return (2 * self.largest * shards).bit_length()

    def codes(self, largest: Tensor) -> Tensor:
        """Return the codes of blocks whose largest absolute values are given."""
        bits = (largest * (1 / self.largest)).view(torch.int32)
        codes = (((bits + (2**CODE_SHIFT - 1)) >> CODE_SHIFT) - CODE_OFFSET).clamp_(1, NON_FINITE)
        return codes.masked_fill_(largest == 0, 0).masked_fill_(~largest.isfinite(), NON_FINITE).to(torch.uint8)

    def inverse_scales(self, codes: Tensor) -> Tensor:
        """Return 1 / scale of each block, 0 for blocks of zeros and for those that are not finite."""
        return (1.0 / scales_of(codes)).masked_fill_((codes == 0) | (codes == NON_FINITE), 0.0)

    def factors(self, codes: Tensor, shifts: Tensor, scale: float | Tensor) -> Tensor:
        """Return by what the rounded sums of each block are to be multiplied; NaN where a gradient is not finite."""
        factors = (scales_of(codes) * multiples_of(shifts)).masked_fill_(codes == 0, 0.0)
        return factors.masked_fill_(codes == NON_FINITE, math.nan) * scale

    def noise_energy(self, codes: Tensor, shifts: Tensor, shards: int) -> Tensor:
        """Return about how large the squared error of a sum over so many shards is, from the scales of its blocks.

        Rounding a number at random to one of the two nearest integers has a variance of 1 / 6 on average. Every shard
        is rounded, and the sum once more if it has a shift.
        """
        scales = self.factors(codes, torch.zeros_like(shifts), 1.0).double().square()
        last = multiples_of(shifts).double().square().masked_fill_(shifts == 0, 0.0)
        return (BLOCK / 6) * (scales * (shards + last)).sum()


def largest_of(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def scales_of(codes: Tensor) -> Tensor:
    """Return the scale of each code, of a finite block that is not 0."""
    return ((codes.int() + CODE_OFFSET) << CODE_SHIFT).view(torch.float32)


def multiples_of(shifts: Tensor) -> Tensor:
    """Return of what the rounded sums of each block are multiples: 2**k * 8 / c."""
    powers = (((shifts >> 3).int() + 127) << 23).view(torch.float32)
    return 8.0 / ((shifts & 7) + 8).float() * powers


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


def pack(values: Tensor, bits: int, out: Tensor) -> None:
    """Pack rows of non-negative integers [rows, numel] of so many bits into uint8 [rows, numel * bits / 8]."""
    planes, shift = list[Tensor](), 0
    for width in planes_of(bits):
        plane = (values >> shift).bitwise_and_(2**width - 1).to(torch.uint8)
        slots = plane.view(len(plane), 8 // width, -1)
        packed = slots[:, 0].clone()
        for n in range(1, 8 // width):
            packed |= slots[:, n] << (n * width)
        planes.append(packed)
        shift += width
    out.copy_(torch.cat(planes, dim=1))


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return packed values [rows, numel] as int32."""
    rows, size = packed.shape
    numel, at, shift = size * 8 // bits, 0, 0
    values = torch.zeros(rows, numel, dtype=torch.int32, device=packed.device)
    for width in planes_of(bits):
        size = numel * width // 8
        plane = packed[:, at : at + size]
        for n, slot in enumerate(values.view(rows, 8 // width, size).unbind(1)):
            slot += ((plane >> (n * width)).bitwise_and_(2**width - 1)).int() << shift
        at, shift = at + size, shift + width
    return values


class TorchKernels:
    """See `Kernels`. For every device; others are faster (comm/codec_kernels.py), and return the same bits."""

    def __init__(self, codec: IntegerCodec) -> None:
        self.codec = codec

    def block_codes(self, shards: Tensor, out: Tensor) -> None:
        out.copy_(self.codec.codes(torch.stack([one.abs().amax(dim=1) for one in shards]).amax(dim=0)))

    def encode(
        self, shards: Tensor, codes: Tensor, numbers: Tensor, keys: Sequence[int], bits: int, out: Tensor
    ) -> None:
        table, inverse = dither_table(codes.device, self.codec.largest), self.codec.inverse_scales(codes).unsqueeze(1)
        sums = torch.zeros(len(codes), BLOCK, dtype=torch.int32, device=codes.device)
        bad = (codes == NON_FINITE).unsqueeze(1)
        for one, key in zip(shards, keys, strict=True):
            sums += one.masked_fill(bad, 0.0).mul_(inverse).add_(table[dither_rows(numbers, key)]).int()
        pack(sums.masked_fill_(bad, 0).view(len(out), -1), bits, out)

    def add(self, packed: Sequence[Tensor], bits: int, out: Tensor, out_bits: int) -> None:
        pack(_sum_of(packed, bits), out_bits, out)

    def round(self, packed: Sequence[Tensor], bits: int, offset: int, numbers: Tensor, key: int, out: Tensor) -> None:
        codec = self.codec
        total = _sum_of([one.unsqueeze(0) for one in packed], bits).view(-1, BLOCK) - offset
        found, table = total.abs().amax(dim=1), dither_table(total.device, codec.largest_result)
        powers = exponents(found, codec.result_bits).clamp_(min=0)
        eighths = torch.div(8 * codec.largest_result << powers, found.clamp(min=1), rounding_mode="floor")
        eighths = eighths.clamp_(8, 15).masked_fill_(powers == 0, 8)
        inverse = (eighths.float() * ((124 - powers) << 23).view(torch.float32)).unsqueeze(1)
        values = total.float().mul_(inverse).add_(table[dither_rows(numbers, key)]).int()
        pack(values.view(1, -1), codec.result_bits, out[: -len(numbers)].unsqueeze(0))
        out[-len(numbers) :] = (powers << 3) + eighths - 8

    def decode(self, rounded: Sequence[Tensor], codes: Tensor, scale: float | Tensor, out: Tensor) -> None:
        blocks = len(codes) // len(rounded)
        values = torch.cat([unpack(one[:-blocks].unsqueeze(0), self.codec.result_bits) for one in rounded])
        values -= self.codec.largest_result
        factors = self.codec.factors(codes, shifts_of(rounded, blocks), scale).unsqueeze(1)
        torch.mul(values.view(out.shape), factors, out=out)


def shifts_of(rounded: Sequence[Tensor], blocks: int) -> Tensor:
    """Return the shifts of the blocks of all sections, of so many blocks each."""
    return torch.cat([one[-blocks:] for one in rounded])


def _sum_of(packed: Sequence[Tensor], bits: int) -> Tensor:
    total = unpack(packed[0], bits)
    for one in packed[1:]:
        total += unpack(one, bits)
    return total
