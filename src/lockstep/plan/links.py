"""Links between workers: a latency and a rate, from a table of usual networks or as the user writes them.

The rate of a link is what a large message of a collective gets in one direction, not what is printed on the card. For
NVLink and PCIe it is the rate of one GPU, for a network the rate of one network card. A host with several cards has
that many times the rate.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Final

GBIT: Final = 1e9 / 8  # bytes
GB: Final = 1e9


@dataclass(frozen=True)
class Link:
    """A link in the alpha-beta model: a message of n bytes takes `latency_s + n / bytes_per_s`.

    latency_s     time of a step of a collective that does not depend on the size of its message
    bytes_per_s   rate in one direction
    source        where the values are from: "preset", "given" by the user, or a measurement
    """

    name: str
    latency_s: float
    bytes_per_s: float
    source: str = "preset"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ValueError(f"link {self.name!r}: bytes_per_s={self.bytes_per_s} has to be positive and finite")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"link {self.name!r}: latency_s={self.latency_s} has to be 0 or more, and finite")


def _preset(name: str, line_bytes_per_s: float, share: float, latency_s: float) -> Link:
    return Link(name, latency_s=latency_s, bytes_per_s=line_bytes_per_s * share)


# Rates are the line rate times the share of it that all-reduce of large messages reaches (its bus bandwidth).
# NVLink 3: 8 A100 reach 235 of 300 GB/s with nccl-tests. NVLink 4: 8 H200 reach 368 of 450 GB/s where the switch does
# not add (both: S. Bekman, Machine Learning Engineering, chapter on networks). NVLink 2 and 5 have the lower of these
# two shares. PCIe: 128b/130b encoding and packet headers leave about 85 %; GPUs below one root complex share it.
# InfiniBand: 46 to 48 GB/s of a card with 400 Gbit/s is what the developers of NCCL expect (nccl-tests, issue 290).
# Ethernet is with TCP: at most 94 % of the line (1448 of 1538 bytes of a frame are payload), and less above 10 Gbit/s,
# where the processor limits it. With RDMA over Ethernet (RoCE) take the InfiniBand link of the same speed.
# Latencies are those of one step of a collective, with the launch of its kernel: 14 steps of 8 A100 take 44 us in the
# table that the NVLink rates are from; NCCL's cost model has 5.7 us for PCIe, and 5 us for a network with RDMA. TCP
# adds system calls, the interrupt of the card and the wake-up of a thread.
_TABLE: Final = (
    _preset("nvlink2", 150 * GB, 0.78, 3e-6),  # V100
    _preset("nvlink3", 300 * GB, 0.78, 3e-6),  # A100
    _preset("nvlink4", 450 * GB, 0.82, 3e-6),  # H100, H200
    _preset("nvlink5", 900 * GB, 0.78, 3e-6),  # B200
    _preset("pcie3", 16 * GB, 0.85, 6e-6),  # 16 lanes
    _preset("pcie4", 32 * GB, 0.85, 6e-6),
    _preset("pcie5", 64 * GB, 0.85, 6e-6),
    _preset("ib-edr", 100 * GBIT, 0.94, 5e-6),
    _preset("ib-hdr", 200 * GBIT, 0.94, 5e-6),
    _preset("ib-ndr", 400 * GBIT, 0.94, 5e-6),
    _preset("1gbe", 1 * GBIT, 0.94, 50e-6),
    _preset("10gbe", 10 * GBIT, 0.94, 30e-6),
    _preset("25gbe", 25 * GBIT, 0.90, 25e-6),
    _preset("40gbe", 40 * GBIT, 0.85, 25e-6),
    _preset("50gbe", 50 * GBIT, 0.80, 25e-6),
    _preset("100gbe", 100 * GBIT, 0.60, 25e-6),
)
PRESETS: Final[dict[str, Link]] = {link.name: link for link in _TABLE}

# Latency of a link that is given by its speed alone: that of the presets of this speed.
_LATENCIES: Final = ((100 * GB, 3e-6), (100 * GBIT, 5e-6), (25 * GBIT, 25e-6), (10 * GBIT, 30e-6), (0.0, 50e-6))

_PREFIXES: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTE_PREFIXES: Final = _PREFIXES | {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf))\s*(.*)", re.IGNORECASE)
_ALLOWED: Final = (
    f"a name ({', '.join(PRESETS)}) or a speed such as 100Gbit/s or 12.5GB/s; "
    "either may end with a latency, as in 100Gbit/s:5us"
)


def parse_link(text: str) -> Link:
    """Returns the link that `text` names: a preset, or a speed with its unit, and maybe a latency after a colon.

    A speed is taken as it is: 100Gbit/s is 12.5 GB/s, without a share taken off. Raises ValueError for an unknown name
    or unit, a missing unit, and a speed or latency that is not a usable number.
    """
    speed, colon, latency = (part.strip() for part in text.strip().partition(":"))
    latency_s = _parse_latency(latency, text) if colon else None
    preset = PRESETS.get(speed.lower())
    if preset is not None:
        return preset if latency_s is None else replace(preset, latency_s=latency_s, source="given")
    bytes_per_s = _parse_speed(speed, text)
    if latency_s is None:
        latency_s = next(at for least, at in _LATENCIES if bytes_per_s >= least)
    return Link(speed, latency_s=latency_s, bytes_per_s=bytes_per_s, source="given")


def _parse_speed(speed: str, text: str) -> float:
    match = _QUANTITY.fullmatch(speed)
    if match is None:
        raise ValueError(f"link {text!r} is not known; write {_ALLOWED}")
    number, unit = float(match[1]), match[2].strip()
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"link {text!r}: a speed of {match[1]} is not possible; it has to be positive and finite")
    if not unit:
        raise ValueError(f"link {text!r}: which unit? Write {match[1]}Gbit/s or {match[1]}GB/s")
    bytes_per_s = number * _bytes_of_unit(unit, text)
    if not math.isfinite(bytes_per_s):
        raise ValueError(f"link {text!r}: a speed of {match[1]} {unit} is not possible; it has to be finite")
    return bytes_per_s


def _bytes_of_unit(unit: str, text: str) -> float:
    """Returns the bytes per second of a unit. `b` is a bit and `B` is a byte, so their case matters."""
    in_bits = re.fullmatch(r"([kKMGTmgt]?)bit(?:/s|ps)", unit) or re.fullmatch(r"([kKMGT]?)b(?:/s|ps)", unit)
    if in_bits is not None:
        return _PREFIXES[in_bits[1].upper()] / 8
    in_bytes = re.fullmatch(r"(\w*)B(?:/s|ps)", unit)
    if in_bytes is not None and in_bytes[1] in _BYTE_PREFIXES:
        return _BYTE_PREFIXES[in_bytes[1]]
    raise ValueError(f"link {text!r}: unit {unit!r} is not known; write bits as Gbit/s or Gbps, bytes as GB/s or GiB/s")


def _parse_latency(latency: str, text: str) -> float:
    match = _QUANTITY.fullmatch(latency)
    if match is None or match[2].strip() not in _SECONDS:
        raise ValueError(
            f"link {text!r}: latency {latency!r} is not known; write a number with ns, us, ms or s, as in 5us"
        )
    latency_s = float(match[1]) * _SECONDS[match[2].strip()]
    if not (math.isfinite(latency_s) and latency_s >= 0):
        raise ValueError(f"link {text!r}: a latency of {latency} is not possible; it has to be 0 or more, and finite")
    return latency_s
