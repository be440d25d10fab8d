"""Streams that split themselves (`split="worker"`): each worker brings its own samples to a global batch.

Note [Parts]
A full global batch has a fixed number of samples of each worker: those of its shards. A worker whose stream has ended
brings fewer, and then none, until all have ended: that is the end of the epoch, and no sample is lost (with drop_last
the epoch ends before the first batch that is not full). Nobody knows alone how much the others bring, so before a batch
is handed out the workers tell each other how many samples they have, whether more come, and a hash of each sample.

Which samples a batch has depends on the number of workers then, and so do the bits. What can be proved is that no
sample came twice: the ledger keeps the hashes (data/ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from lockstep.data.reader import Batch, Shard
from lockstep.data.sample_order import Division, Position, cut, share
from lockstep.errors import UnevenDataError

Exchange: TypeAlias = Callable[[list[int]], list[list[int]]]  # what a worker tells -> what all have told, by rank
_WORD: Final = 2**64


def count_parts(global_batch_size: int, shards: int, workers: int) -> list[int]:
    """How many samples of a full global batch each worker brings."""
    sizes = [len(places) for places in cut(global_batch_size, shards)]
    return [sum(sizes[number] for number in share(shards, workers, rank)) for rank in range(workers)]


class Assembler:
    """Makes global batches of what this worker's stream gives, together with all other workers."""

    def __init__(self, division: Division, parts: Sequence[int], *, drop_last: bool, exchange: Exchange) -> None:
        """`parts`: of all workers, as `count_parts` has it."""
        self._division, self._parts, self._drop_last, self._exchange = division, parts, drop_last, exchange
        self._waiting: Batch | None = None  # of an epoch that has not begun: the stream of this worker has ended

    def forget(self) -> None:
        """The stream is read from another place."""
        self._waiting = None

    def assemble(self, here: Position, receive: Callable[[], Batch | None]) -> Batch:
        """The global batch at `here`. `receive` gives what comes next of this worker's stream; None: nothing."""
        own = self._next_part(here, receive)
        count, goes_on, hashes = (0, False, ()) if own is None else (own.count, not own.ends_epoch, own.seen)
        padding = [0] * (max(self._parts) - count)
        rows = self._exchange([count, int(goes_on), *map(_signed, hashes), *padding])
        counts = [row[0] for row in rows]
        seen = [tuple(word % _WORD for word in row[2 : 2 + row[0]]) for row in rows]
        if not any(counts):
            raise ValueError(
                f"the streams of all workers ended before step {here.step} of epoch {here.epoch}, where they should go "
                "on; they are shorter than they were when this position was saved"
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
        """This worker's samples; None: its stream has ended in this epoch."""
        own = self._waiting if self._waiting is not None else receive()
        while own is not None and own.epoch < here.epoch:  # what drop_last leaves out
            own = receive()
        if own is not None and own.epoch > here.epoch:
            self._waiting = own
            return None
        self._waiting = None
        return own

    def _count_shards(self, counts: Sequence[int]) -> tuple[int, ...]:
        shards, workers = self._division.shards, len(self._parts)
        return tuple(
            len(places) for rank, count in enumerate(counts) for places in cut(count, len(share(shards, workers, rank)))
        )


def refuse_equal_parts(seen: Sequence[tuple[int, ...]], here: Position) -> None:
    """Raise if two workers have the same samples. Samples that are all alike tell nothing."""
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
