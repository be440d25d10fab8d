"""Weights as differences from those that the receiver has, without loss.

A step of an optimizer changes a weight by little, so the bits of the old and of the new one, as integers, differ by a
number of 10 to 20 bits. In every group of GROUP values these differences, with the sign in the lowest bit, are sent
with as many bits as the largest one needs. The receiver adds them to its own values, and has the bits of the sender.

A message begins with one byte for each group, its width; then come the bit planes of all groups, 16 bits each. The
kernels are in codec_kernels.c. Where they cannot be compiled nothing is sent this way, but what others send is read.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Final

import torch
from torch import Tensor

from lockstep.comm.codec_kernels import load_library

logger = logging.getLogger(__name__)

GROUP: Final = 16
PLANE_BYTES: Final = 2


@cache
def can_encode() -> bool:
    """Return whether the kernels could be compiled, and what they encode is decoded rightly by torch in a trial."""
    if load_library() is None:
        return False
    dice = torch.Generator("cpu").manual_seed(0)
    old, new = torch.randint(-(2**31), 2**31, (2, 5 * GROUP + 3), generator=dice, device="cpu").to(torch.int32)
    for group in range(4):  # and one with all widths of 32, and a part of one
        at = slice(group * GROUP, (group + 1) * GROUP)
        new[at] = old[at] + torch.arange(GROUP, device="cpu", dtype=torch.int32) * (group << 4 * group)
    message = torch.zeros(most_bytes(len(new)), dtype=torch.uint8, device="cpu")
    size = encode(old.view(torch.float32), new.view(torch.float32), message)
    found = [old.view(torch.float32).clone() for _ in range(2)]
    decode(message[:size], found[0])
    _decode_by_torch(*_parts_of(message[:size], len(new)), found[1])
    if all(torch.equal(one.view(torch.int32), new) for one in found):
        return True
    logger.warning("weights are sent whole between hosts: the kernels for their differences compute other bits")
    return False


def can_be_encoded(values: Tensor) -> bool:
    """Whether differences of such values can be sent: whether they are float32 on a CPU."""
    return values.dtype == torch.float32 and values.device.type == "cpu" and values.is_contiguous()


def most_bytes(numel: int) -> int:
    """Return how long a message with so many values is at most."""
    groups = -(-numel // GROUP)
    return _header_bytes(groups) + groups * 32 * PLANE_BYTES


def _header_bytes(groups: int) -> int:
    return groups + groups % PLANE_BYTES  # planes begin at a multiple of their size


def encode(old: Tensor, new: Tensor, message: Tensor) -> int:
    """Write the differences of values to a message. Returns how many bytes of it were written."""
    library, groups = load_library(), -(-new.numel() // GROUP)
    first = _header_bytes(groups)
    message[groups:first].zero_()
    library.encode_delta.restype = ctypes.c_int64
    planes = library.encode_delta(_at(old), _at(new), _at(message), _at(message[first:]), ctypes.c_int64(new.numel()))
    return first + PLANE_BYTES * int(planes)


def decode(message: Tensor, values: Tensor) -> int:
    """Turn the values that the sender had before into those that it has now. Returns how many bytes were read.

    Raises ValueError if the message is damaged.
    """
    widths, planes = _parts_of(message, values.numel())
    if (library := load_library()) is None:
        _decode_by_torch(widths, planes, values)
    else:
        library.decode_delta(_at(values), _at(widths), _at(planes), ctypes.c_int64(values.numel()))
    return _header_bytes(len(widths)) + planes.nbytes


def _parts_of(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the widths of all groups, and the bit planes."""
    groups = -(-numel // GROUP)
    first, widths = _header_bytes(groups), message[:groups]
    end = first + PLANE_BYTES * int(widths.sum(dtype=torch.int64))
    if len(widths) < groups or end > len(message) or (groups and int(widths.max()) > 32):
        raise ValueError("a message with new weights is damaged")
    return widths, message[first:end].view(torch.int16)


def _decode_by_torch(widths: Tensor, planes: Tensor, values: Tensor) -> None:
    starts = widths.cumsum(0, dtype=torch.int64) - widths
    found = torch.zeros(len(widths), GROUP, dtype=torch.int64, device="cpu")
    for bit in range(int(widths.max()) if len(widths) else 0):
        has = (widths > bit).nonzero().view(-1)
        plane = planes[starts[has] + bit].to(torch.int64).unsqueeze(1)
        found[has] |= ((plane >> torch.arange(GROUP, device="cpu")) & 1) << bit
    deltas = (found >> 1) ^ -(found & 1)
    bits = values.view(-1).view(torch.int32)
    bits.add_(deltas.view(-1)[: values.numel()].to(torch.int32))  # modulo 2**32, as the sum of the kernels


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
