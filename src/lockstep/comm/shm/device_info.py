"""What the workers of a group publish in their segments about their GPUs and the tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lockstep.comm.shm.phases import DEVICE_INFO_BYTES, HEADERS, REGION_BYTES, GroupSync

EVENTS: Final = 4
UUID_BYTES: Final = 64
EVENT_BYTES: Final = 64


class DeviceInfoBlock:
    """The block of a worker's segment that describes its GPU and its tensors of the current collective."""

    def __init__(self, sync: GroupSync) -> None:
        self._sync, self._start = sync, sync.layout.device_info()
        assert UUID_BYTES + EVENTS * EVENT_BYTES <= DEVICE_INFO_BYTES

    def write_device(self, uuid: str, handles: Sequence[bytes], *, has_flags: bool) -> None:
        data = uuid.encode().ljust(UUID_BYTES - 1, b"\0") + bytes([has_flags])
        data += b"".join(h.ljust(EVENT_BYTES, b"\0") for h in handles)
        self._sync.segment.map[self._start : self._start + len(data)] = data

    def uuid(self, rank: int) -> str:
        return self._read(rank, 0, UUID_BYTES - 1).rstrip(b"\0").decode()

    def has_flags(self, rank: int) -> bool:
        """Whether a worker can use stream_flags.py."""
        return self._read(rank, UUID_BYTES - 1, 1) == b"\1"

    def event(self, rank: int, i: int) -> bytes:
        return self._read(rank, UUID_BYTES + i * EVENT_BYTES, EVENT_BYTES)

    def write(self, data: bytes) -> None:
        """Write the regions of the current collective: those that it reads, then those that it writes."""
        at = self._start + self._regions_offset()
        self._sync.segment.map[at : at + len(data)] = data

    def read(self, rank: int, i: int) -> bytes:
        return self._read(rank, self._regions_offset() + i * REGION_BYTES, REGION_BYTES)

    def read_table(self, rank: int, count: int) -> bytes:
        """The first `count` regions of a rank."""
        return self._read(rank, self._regions_offset(), count * REGION_BYTES)

    def _regions_offset(self) -> int:
        return self._sync.layout.region_table(self._sync.calls % HEADERS) - self._start

    def _read(self, rank: int, offset: int, size: int) -> bytes:
        at = self._start + offset
        return self._sync.segments[rank].map[at : at + size]
