"""Iterable datasets: one sequence of samples per epoch, the same on all workers unless it splits itself (Note [Parts]).

Note [Every worker reads the whole stream]
Sample i of an epoch belongs to batch i // global_batch_size. Which samples a batch has is known only by reading the
stream, so every worker, and every loader process of a worker, reads the whole stream and keeps its own samples. A
dataset must therefore not split itself, neither by rank nor by `get_worker_info()` (which returns None here). Expensive
work per sample belongs into the collate function, which runs only for samples that are kept.

A stream that splits itself nevertheless yields different samples on each worker, and those that a worker drops are
lost. So whole global batches are hashed in the first steps after a start, and in some later ones; the hash is sent with
the batch, and the step refuses batches whose hashes differ (step/step_check.py). Replaced workers may have started to
load at different batches, so not all workers hash the same ones: 0 means "not computed".

Note [Where a stream is resumed]
Reading a stream from the beginning and dropping the samples that were used may take as long as training on it. If the
dataset, or else its iterator, has `state_dict()` and `load_state_dict()`, its state is read after each batch and before
the next one. The state is sent with the batch, because batches are prefetched, and is saved in the checkpoint. Not
every such state is exact (a shuffle buffer may be left out of it). So the hash of the next samples is saved with it: if
other samples follow after a resume, the stream is read from the beginning.

A loader process holds the samples of up to two global batches: how an incomplete batch is split, and whether a batch
ends its epoch, is known only after reading beyond it.

Note [Parts]
With `split="worker"` each worker contributes its own samples to a global batch: in a full one a fixed number, those of
its shards. A worker whose stream has ended contributes fewer, and then none, until all streams have ended: that is the
end of the epoch, and no sample is lost (with drop_last the epoch ends before the first batch that is not full). No
worker knows how much the others contribute, so before a batch is returned the workers exchange how many samples they
have, whether more follow, and a hash of each.

The samples of a batch then depend on the number of workers, and so do the bits of the result. What can be proved is
that no sample was used twice: the ledger keeps the hashes (data/ledger.py).
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, TypeAlias

from torch import Tensor

from lockstep.data.ledger import WORD, signed
from lockstep.data.reader import (
    Batch,
    DataError,
    LoadContext,
    LoadFailure,
    Shard,
    StreamState,
    hash_of_sample,
    hash_of_samples,
)
from lockstep.data.sample_order import Division, Position, shard_ranges, shards_of_rank
from lockstep.errors import UnevenDataError

_log = logging.getLogger(__name__)

Exchange: TypeAlias = Callable[[list[int]], list[list[int]]]  # all-gather: this worker's row -> all rows, by rank

COMPARED_AT_START: Final = 4  # global batches
COMPARE_EVERY: Final = 64  # hashing 256 images of 150 kB takes 40 ms, in the process that loads


@dataclass(frozen=True)
class Source:
    """A stream, and how it is split into batches.

    `set_epoch(epoch)` of the dataset, if it exists, is called before each epoch. `skip(n)` of the dataset or else of
    its iterator, if it exists, is called to resume inside an epoch: the next sample is then sample n of the epoch. It
    may return an iterable to continue with, or change its object for the next iteration. Without it, n samples are
    read and dropped. If a state is known, `state_dict()` and `load_state_dict()` of the dataset or else of its iterator
    are preferred to both: `iter(dataset)` or the iterator then continues after that state.
    """

    dataset: Any
    global_batch_size: int  # or this worker's part of it
    drop_last: bool
    epochs: int | None
    is_part: bool = False  # this worker has different samples than the others: see Note [Parts]


@dataclass(frozen=True)
class _Chunk:
    """The samples of one global batch."""

    position: Position
    ends_epoch: bool
    samples: list[Any]
    first: int  # number in the epoch of the first sample
    after: StreamState | None  # state of the stream after these samples


class StreamReader:
    """Reads batches of a stream. Batch 0 is the one at `start`.

    Batches are requested in ascending order; a loader process skips those that other loader processes load.
    """

    def __init__(
        self, source: Source, context: LoadContext, division: Division, start: Position, state: StreamState | None
    ) -> None:
        """`state`: the state of the stream at `start`, if it is known."""
        self._source, self._context, self._division = source, context, division
        self._start, self._state = start, state
        self._dataset: Any = None  # the dataset that is iterated over
        self._notes: list[str] = []  # warnings that have not been printed yet
        self._chunks: Iterator[_Chunk] | None = None  # created at first use: an iterator cannot be pickled
        self._read = 0  # number of chunks read

    def __getitem__(self, number: int) -> Batch | LoadFailure | None:
        """Return None if the stream has ended."""
        context = self._context
        try:
            with context.keeping_random_state():
                chunk = self._advance(number)
                if chunk is None:
                    return None
                self._print_notes(number)
                here, count = chunk.position, len(chunk.samples)
                content, seen = self._hash(chunk)
                shards = []
                divide = self._division.of_part if self._source.is_part else self._division.of
                for shard, places in divide(count):
                    items = chunk.samples[places.start : places.stop]
                    names = range(chunk.first + places.start, chunk.first + places.stop)
                    data = context.collate(items, names, here, shard) if items else None
                    shards.append(Shard(shard, len(items), data, sum(seen[places.start : places.stop]) % WORD))
        except (DataError, ValueError) as error:
            return LoadFailure(error, error.__cause__)
        place, of_shards = (here.epoch, here.step, here.number), self._division.shards
        return Batch(*place, count, chunk.ends_epoch, tuple(shards), of_shards, content, chunk.after, seen)

    def _hash(self, chunk: _Chunk) -> tuple[int, tuple[int, ...]]:
        """Return the hash of the global batch, or 0 if it is not compared; and with `is_part` a hash of each sample."""
        if self._source.is_part:
            return 0, tuple(map(hash_of_sample, chunk.samples))
        number = chunk.position.number
        is_compared = number - self._start.number < COMPARED_AT_START or number % COMPARE_EVERY == 0
        return hash_of_samples(chunk.samples) if is_compared else 0, ()

    def _print_notes(self, number: int) -> None:
        """Print the notes on one process only: every worker and every loader process has the same ones."""
        if number == 0 and self._context.rank == 0:
            for note in self._notes:
                _log.warning(note)
        self._notes.clear()

    def _advance(self, number: int) -> _Chunk | None:
        assert number >= self._read, f"batch {number} was asked for after batch {self._read - 1}"
        if self._chunks is None:
            self._chunks = self._read_epochs()
        chunk = next(islice(self._chunks, number - self._read, None), None)
        self._read = number + 1
        return chunk

    def _read_epochs(self) -> Iterator[_Chunk]:
        here, source, saved = self._start, self._source, self._state
        while source.epochs is None or here.epoch < source.epochs:
            samples, coming = self._begin_epoch(here, saved)
            if not coming and source.is_part and here.step > 0:  # this worker's part of the epoch is a shorter one
                here = here.after(ends_epoch=True)
                continue
            if not coming:
                raise ValueError(self._why_nothing_came(here))
            while coming:
                # Read before the next batch is: the state is the one between the two.
                state = samples.state() if not source.is_part else None  # other workers cannot use that of a part
                number = here.step * source.global_batch_size
                self._notes += samples.notes
                samples.notes.clear()
                chunk, coming = coming, self._read_batch(samples)
                after = StreamState(state, _hash_of_ends(coming)) if state is not None and coming else None
                yield _Chunk(here, not coming, chunk, number, after)
                here = here.after(ends_epoch=not coming)
            saved = None

    def _begin_epoch(self, here: Position, saved: StreamState | None) -> tuple[_Samples, list[Any]]:
        """Return the samples from `here` on, and those of the first batch. See Note [Where a stream is resumed]."""
        first = here.step * self._source.global_batch_size
        for state in (None,) if saved is None else (saved.state, None):
            if self._dataset is None or saved is not None:
                self._dataset = _copied(self._source.dataset)
            samples = _Samples(self._dataset, self._context, here.epoch, first, state, is_part=self._source.is_part)
            coming = self._read_batch(samples)
            if is_right := saved is None or _hash_of_ends(coming) == saved.coming:
                break
        if saved is not None and state is None:
            self._notes.append(
                f"load_state_dict() of the stream did not lead to sample {first} of epoch {here.epoch}; the samples "
                "before that were read again"
            )
        if not is_right:
            self._notes.append(
                f"the stream has other samples at sample {first} of epoch {here.epoch} than when this was saved; is it "
                "another dataset, or random by itself?"
            )
        return samples, coming

    def _read_batch(self, samples: _Samples) -> list[Any]:
        batch = list(islice(samples, self._source.global_batch_size))
        return [] if self._source.drop_last and len(batch) < self._source.global_batch_size else batch

    def _why_nothing_came(self, here: Position) -> str:
        kind, size = type(self._source.dataset).__name__, self._source.global_batch_size
        who = f"rank {self._context.rank}: the stream ({kind})"
        if here.step > 0:
            return (
                f"{who} ended before sample {here.step * size} of epoch {here.epoch}, where it should continue; "
                "it is shorter than it was when this position was saved"
            )
        what = f"fewer samples than one batch of {size} (drop_last=True)" if self._source.drop_last else "no samples"
        return f"{who} gave {what} in epoch {here.epoch}; its __iter__ must start anew every time it is called"


class _Samples:
    """The samples of one epoch from number `first` on, which can be read once, with the state of the stream.

    Before each sample is read, the generators are seeded with (seed, epoch, number).
    """

    def __init__(
        self, dataset: Any, context: LoadContext, epoch: int, first: int, state: bytes | None, *, is_part: bool
    ) -> None:
        """
        state    the state of the dataset at sample `first`, if it is known
        is_part  other workers have different samples with the same numbers, and draw different random numbers
        """
        self._key = ("stream", "of rank", context.rank, epoch) if is_part else ("stream", epoch)
        self._dataset, self._context, self._epoch, self._first = dataset, context, epoch, first
        self._number = 0  # number of the next sample
        self._stateful: Any = None  # the dataset or its iterator, whichever has a state dict
        self.notes: list[str] = []  # warnings for the user
        self._reading = self._read(state)

    def __iter__(self) -> Iterator[Any]:
        return self._reading

    def state(self) -> bytes | None:
        """Return the pickled state dict of the stream. None: it has none, or a checkpoint cannot hold it."""
        if self._stateful is None:
            return None
        try:
            state = self._stateful.state_dict()
        except Exception as error:
            raise self._failed("state_dict() of ", error) from error
        try:
            return pickle.dumps(storable(state))
        except Exception as error:
            self._stateful = None
            self.notes.append(f"{error}; it is not saved, and a resume reads the stream from the beginning")
            return None

    def _read(self, state: bytes | None) -> Iterator[Any]:
        try:
            self._context.seed_rng(*self._key)
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(self._epoch)
            samples = self._begin() if state is None else self._resume(state)
            while True:
                self._context.seed_rng(*self._key, self._number)
                try:
                    sample = next(samples)
                except StopIteration:
                    return
                self._number += 1
                if self._number > self._first:
                    yield sample
        except Exception as error:
            raise self._failed("", error) from error

    def _failed(self, what: str, error: Exception) -> DataError:
        who = f"rank {self._context.rank}: {what}the stream ({type(self._dataset).__name__})"
        where = f"sample {self._number} of epoch {self._epoch}"
        return DataError(f"{who} failed at {where}: {type(error).__name__}: {error}")

    def _resume(self, state: bytes) -> Iterator[Any]:
        """Continue from a saved state."""
        dataset = self._dataset
        try:
            if has_state(dataset):
                dataset.load_state_dict(pickle.loads(state))
                self._stateful = dataset
                samples: Iterator[Any] = iter(dataset)
            else:
                samples = self._stateful = iter(dataset)
                self._stateful.load_state_dict(pickle.loads(state))
        except Exception:
            return iter(())  # no samples, so the comparison with the saved hash fails
        self._number = self._first
        return samples

    def _begin(self) -> Iterator[Any]:
        """Start at the beginning of the epoch, or at the sample to which `skip` leads."""
        dataset, first = self._dataset, self._first
        self._stateful = None
        if first > 0 and hasattr(dataset, "skip"):
            rest = dataset.skip(first)
            self._number = first
            if rest is not None:
                return iter(rest)  # the state of `rest` could not be loaded into the dataset
        samples: Iterator[Any] = iter(dataset)
        if first > 0 and self._number == 0 and hasattr(samples, "skip"):
            rest = samples.skip(first)
            self._number = first
            if rest is not None:
                return iter(rest)
        # The dataset is preferred to its iterator, as in `_resume`.
        self._stateful = next((one for one in (dataset, samples) if has_state(one)), None)
        return samples


def has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def storable(value: Any, name: str = "") -> Any:
    """Return the value with numpy scalars as Python numbers. Raises TypeError for what a checkpoint cannot hold."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    if isinstance(value, Mapping):
        return {key: storable(inside, f"{name}[{key!r}]") for key, inside in value.items()}
    if isinstance(value, list | tuple):
        items = [storable(inside, f"{name}[{n}]") for n, inside in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(
        f"state_dict(){name} of the stream is a {type(value).__name__}, and a checkpoint holds tensors, numbers, "
        "strings, None, lists, tuples and dicts"
    )


def _copied(dataset: Any) -> Any:
    """Return a shallow copy of a dataset that has a state, so that the dataset itself stays at its beginning.

    A loader process has its own copy anyway.
    """
    try:
        return copy.copy(dataset) if has_state(dataset) else dataset
    except Exception:
        return dataset


def _hash_of_ends(samples: Sequence[Any]) -> int:
    """Return the hash of the first and the last sample; 0 if there are none."""
    return hash_of_samples([samples[0], samples[-1]]) if samples else 0


# ---- streams that split themselves: see Note [Parts] -----------------------------------------------------------------


def count_parts(global_batch_size: int, shards: int, workers: int) -> list[int]:
    """Return how many samples of a full global batch each worker contributes."""
    sizes = [len(places) for places in shard_ranges(global_batch_size, shards)]
    return [sum(sizes[number] for number in shards_of_rank(shards, workers, rank)) for rank in range(workers)]


class Assembler:
    """Assembles global batches from the stream of this worker, together with all other workers."""

    def __init__(self, division: Division, parts: Sequence[int], drop_last: bool, exchange: Exchange) -> None:
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
        rows = self._exchange([count, int(has_more), *map(signed, hashes), *padding])
        counts = [row[0] for row in rows]
        seen = [tuple(word % WORD for word in row[2 : 2 + row[0]]) for row in rows]
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
