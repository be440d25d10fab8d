"""Which workers are on which host, and how a message is divided among them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# A message is sent in about CHUNKS chunks, so that shared memory and the network work at the same time. A piece that
# one worker sends to one host should not be so small that its overhead exceeds its transfer time, nor a chunk so large
# that its copies fill the memory.
CHUNKS = 12
MIN_PIECE_BYTES = 256 << 10
MAX_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class HostLayout:
    """The hosts as seen from one worker. Hosts are ordered by their lowest rank, the workers of a host by rank."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        """The index of this worker's host."""
        return next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this worker's host, its own included."""
        return self.hosts[self.host]

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def num_columns(self) -> int:
        """The number of columns: as many as the smallest host has workers.

        Column i consists of the i-th worker of every host; each column sends one slice of a message between hosts.
        Workers beyond the last column contribute inside their host, and receive the result there.
        """
        return min(map(len, self.hosts))

    @property
    def has_column(self) -> bool:
        """Whether this worker belongs to a column."""
        return self.local_rank < self.num_columns

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks of this worker's column, one of each host."""
        assert self.has_column
        return tuple(ranks[self.local_rank] for ranks in self.hosts)

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of workers."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    def host_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)


def group_by_host(identities: Sequence[str], rank: int) -> HostLayout:
    """Return the layout. `identities` has the host's identity for each rank; workers with equal ones share a host."""
    hosts: dict[str, list[int]] = {}
    for other, text in enumerate(identities):
        hosts.setdefault(text, []).append(other)
    return HostLayout(rank, tuple(map(tuple, hosts.values())))


def chunk_bytes(message_bytes: int, pieces: int) -> int:
    """Return the size of a chunk, if each chunk is divided into so many pieces."""
    least = MIN_PIECE_BYTES * pieces
    return min(max(-(-message_bytes // CHUNKS), least), max(MAX_CHUNK_BYTES, least))


def split_range(numel: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of length `step` that cover `numel` elements; the last one may be shorter."""
    for first in range(0, numel, step):
        yield slice(first, min(first + step, numel))
