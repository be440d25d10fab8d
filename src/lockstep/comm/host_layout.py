"""Who is on which host, and how a message is cut up between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# A message is sent in about CHUNKS pieces, so that shared memory and the network work at the same time. A piece that
# one worker sends to one host should not be so small that its handling takes longer than its journey, nor a chunk so
# large that the copies of it fill the memory.
CHUNKS = 12
LEAST_PIECE_BYTES = 256 << 10
MOST_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Layout:
    """Seen from one worker. Hosts are in the order of their lowest ranks, and the workers of a host in theirs."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        """The number of our own."""
        return next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The workers of our host, and we."""
        return self.hosts[self.host]

    @property
    def local_rank(self) -> int:
        return self.neighbours.index(self.rank)

    @property
    def carriers(self) -> int:
        """So many workers of every host carry a slice each to the other hosts: as many as the smallest host has.

        Column i is the i-th worker of every host; what goes from host to host goes inside columns. Workers beyond the
        last column add their part inside their host and get the result there.
        """
        return min(map(len, self.hosts))

    @property
    def carries(self) -> bool:
        return self.local_rank < self.carriers

    @property
    def column(self) -> tuple[int, ...]:
        """The carriers of the slice we carry, one of each host."""
        assert self.carries
        return tuple(ranks[self.local_rank] for ranks in self.hosts)

    @property
    def even(self) -> bool:
        return len({len(ranks) for ranks in self.hosts}) == 1

    def host_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)


def lay_out(identities: Sequence[str], rank: int) -> Layout:
    """`identities` has a text for each rank; equal texts are one host."""
    hosts: dict[str, list[int]] = {}
    for other, text in enumerate(identities):
        hosts.setdefault(text, []).append(other)
    return Layout(rank, tuple(map(tuple, hosts.values())))


def chunk_bytes(message_bytes: int, pieces: int) -> int:
    """How much of a message goes at a time, if each chunk is cut into so many pieces."""
    least = LEAST_PIECE_BYTES * pieces
    return min(max(-(-message_bytes // CHUNKS), least), max(MOST_CHUNK_BYTES, least))


def cut(numel: int, step: int) -> Iterator[slice]:
    for first in range(0, numel, step):
        yield slice(first, min(first + step, numel))
