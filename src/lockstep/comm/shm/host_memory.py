"""Host memory as the collectives see it: staging slots and tensors of the group, in every worker's segment."""

from __future__ import annotations

from typing import Final

import torch

from lockstep.comm.shm.collectives import ALIGN, SLOTS
from lockstep.comm.shm.memory import PAGE
from lockstep.comm.shm.phases import Team
from lockstep.errors import SharedMemoryFullError

# Of a slot each worker has a section. Staging is no faster in smaller ones: what comes from another core is not in our
# cache anyway, and every round takes its time.
SLOT_BYTES: Final = 4 << 20
LEAST_SECTION_BYTES: Final = 64 << 10  # a small reduction goes into one slot; and shorter ones are all overhead


class HostMemory:
    """The segments of a team. What follows the control block: the slots, then the heap."""

    def __init__(self, team: Team, section_bytes: int) -> None:
        self.section_bytes = section_bytes
        self.arrive, self.await_phase = team.arrive, team.await_phase
        self._own = team.segment
        self._segments = [team.segment if rank == team.rank else team.peers[rank].segment for rank in range(team.size)]
        start, slot_bytes = team.layout.end, section_bytes * team.size
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


def reserve_slots(team: Team) -> int:
    """Make room for our slots; smaller ones where shared memory is scarce. Returns the size of a section."""
    section = SLOT_BYTES // team.size
    room = team.segment.room()
    if room is not None:  # half of it for the slots of all; whoever comes later must find some too
        section = min(section, room // 2 // (SLOTS * team.size**2))
    section = max(section // ALIGN * ALIGN, LEAST_SECTION_BYTES)
    while True:
        try:
            team.segment.reserve(team.layout.end, SLOTS * section * team.size, "the staging slots of a group")
            return section
        except SharedMemoryFullError:
            if section // 2 < LEAST_SECTION_BYTES:
                raise
            section = section // 2 // ALIGN * ALIGN


def heap_start(team: Team, section_bytes: int) -> int:
    return -(-(team.layout.end + SLOTS * section_bytes * team.size) // PAGE) * PAGE
