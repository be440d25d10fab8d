"""Host memory of the collectives: the staging slots and shared tensors in every worker's segment."""

from __future__ import annotations

from typing import Final

import torch

from lockstep.comm.shm.collectives import ALIGN, SLOTS
from lockstep.comm.shm.memory import PAGE
from lockstep.comm.shm.phases import GroupSync
from lockstep.errors import SharedMemoryFullError

# Each worker has a section of a slot. Smaller slots make staging no faster: data from another core is not in the cache
# anyway, and every round has a fixed cost.
SLOT_BYTES: Final = 4 << 20
LEAST_SECTION_BYTES: Final = 64 << 10  # a small reduction must fit into one slot, and smaller ones are all overhead


class HostMemory:
    """The segments of a group. Behind the control block of a segment are the slots, then the heap."""

    def __init__(self, sync: GroupSync, section_bytes: int) -> None:
        self.section_bytes = section_bytes
        self.arrive, self.await_phase = sync.arrive, sync.await_phase
        self._own = sync.segment
        self._segments = [sync.segment if rank == sync.rank else sync.peers[rank].segment for rank in range(sync.size)]
        start, slot_bytes = sync.layout.end, section_bytes * sync.size
        self._slots = [
            [segment.bytes[start + i * slot_bytes : start + (i + 1) * slot_bytes] for i in range(SLOTS)]
            for segment in self._segments
        ]

    def slot(self, rank: int, round_: int) -> torch.Tensor:
        return self._slots[rank][round_ % SLOTS]

    def shared(self, rank: int, offset: int, size: int) -> torch.Tensor:
        return self._segments[rank].bytes[offset : offset + size]

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        return self._own.offset_of(tensor)


def reserve_slots(sync: GroupSync) -> int:
    """Reserve this worker's slots, smaller ones where shared memory is scarce. Returns the bytes of a section."""
    section = SLOT_BYTES // sync.size
    available = sync.segment.available_bytes()
    if available is not None:  # half of it for the slots of all workers; the rest is for later allocations
        section = min(section, available // 2 // (SLOTS * sync.size**2))
    section = max(section // ALIGN * ALIGN, LEAST_SECTION_BYTES)
    while True:
        try:
            sync.segment.reserve(sync.layout.end, SLOTS * section * sync.size, "the staging slots of a group")
            return section
        except SharedMemoryFullError:
            if section // 2 < LEAST_SECTION_BYTES:
                raise
            section = section // 2 // ALIGN * ALIGN


def heap_start(sync: GroupSync, section_bytes: int) -> int:
    return -(-(sync.layout.end + SLOTS * section_bytes * sync.size) // PAGE) * PAGE
