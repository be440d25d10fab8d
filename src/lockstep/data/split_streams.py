"""Streams that split themselves (`split="worker"`): each worker contributes its own samples to a global batch.

Note [Parts]
In a full global batch each worker has a fixed number of samples: those of its shards. A worker whose stream has ended
contributes fewer, and then none, until all streams have ended: that is the end of the epoch, and no sample is lost
(with drop_last the epoch ends before the first batch that is not full). No worker knows how much the others contribute,
so before a batch is returned the workers exchange how many samples they have, whether more follow, and a hash of each.

The samples of a batch then depend on the number of workers, and so do the bits of the result. What can be proved is
that no sample was used twice: the ledger keeps the hashes (data/ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from lockstep.data.reader import Batch, Shard
from lockstep.data.sample_order import Division, Position, shard_ranges, shards_of_rank
from lockstep.errors import UnevenDataError

Exchange: TypeAlias = Callable[[list[int]], list[list[int]]]  # all-gather: this worker's row -> all rows, by rank
_WORD: Final = 2**64


def count_parts(global_batch_size: int, shards: int, workers: int) -> list[int]:
    """Return how many samples of a full global batch each worker contributes."""
    sizes = [len(places) for places in shard_ranges(global_batch_size, shards)]
    return [sum(sizes[number] for number in shards_of_rank(shards, workers, rank)) for rank in range(workers)]


class Assembler:
    """Assembles global batches from the stream of this worker, together with all other workers."""

    def __init__(self, division: Division, parts: Sequence[int], *, drop_last: bool, exchange: Exchange) -> None:
        """`parts`: the parts of all workers, from `count_parts`."""
        self._division, self._parts, self._drop_last, self._exchange = division, parts, drop_last, exchange
        self._next_epoch: Batch | None = None  # first part of the next epoch, read when this worker's stream has ended

    def reset(self) -> None:
        """Drop what was read: the stream continues at another position."""
        self._next_epoch = None

    def assemble(self, here: Position, receive: Callable[[], Batch | None]) -> Batch:
        """Return the global batch at `here`; called by all workers together.

        `receive` returns the next part of this worker's stream, or None at its end. Raises ValueError if all streams
        have ended, and UnevenDataError if two workers have the same samples.
        """
        own = self._next_part(here, receive)
        count, has_more, hashes = (0, False, ()) if own is None else (own.count, not own.ends_epoch, own.seen)
        padding = [0] * (max(self._parts) - count)
        rows = self._exchange([count, int(has_more), *map(_signed, hashes), *padding])
        counts = [row[0] for row in rows]
        seen = [tuple(word % _WORD for word in row[2 : 2 + row[0]]) for row in rows]
        if not any(counts):
            raise ValueError(
                f"the streams of all workers ended before step {here.step} of epoch {here.epoch}, where they should "
                "continue; they are shorter than they were when this position was saved"
            )
        refuse_equal_parts(seen, here)
        more = [bool(row[1]) for row in rows]
        if own is None:
            shards = tuple(Shard(number, 0, None) for number, _ in self._division.of_part(0))
            own = Batch(0, 0, 0, 0, False, shards, self._division.shards)
        return replace(
            own,
            epoch=here.epoch,
            step=here.step,
            number=here.number,
            count=sum(counts),
            ends_epoch=not (all(more) if self._drop_last else any(more)),
            shard_counts=self._count_shards(counts),
            seen=tuple(word for words in seen for word in words),
        )

    def _next_part(self, here: Position, receive: Callable[[], Batch | None]) -> Batch | None:
        """Return this worker's samples; None if its stream has ended in this epoch."""
        own = self._next_epoch if self._next_epoch is not None else receive()
        while own is not None and own.epoch < here.epoch:  # left out by drop_last
            own = receive()
        if own is not None and own.epoch > here.epoch:
            self._next_epoch = own
            return None
        self._next_epoch = None
        return own

    def _count_shards(self, counts: Sequence[int]) -> tuple[int, ...]:
        shards, workers = self._division.shards, len(self._parts)
        return tuple(
            len(places)
            for rank, count in enumerate(counts)
            for places in shard_ranges(count, len(shards_of_rank(shards, workers, rank)))
        )


def refuse_equal_parts(seen: Sequence[tuple[int, ...]], here: Position) -> None:
    """Raise UnevenDataError if two workers have the same samples, unless all samples of a worker are equal."""
    first: dict[tuple[int, ...], int] = {}
    for rank, words in enumerate(seen):
        if len(set(words)) > 1 and (other := first.setdefault(words, rank)) != rank:
            raise UnevenDataError(
                f'step {here.number}: rank {rank} has the same samples as rank {other}; split="worker" is for streams '
                "that give each worker its own. Let the stream split itself (rank and number of workers are "
                "run.world.rank and run.world.size), or leave split= out: then Lockstep deals the samples out"
            )


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
