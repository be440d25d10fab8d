"""Iterable datasets: one sequence of samples per epoch, the same one for everybody.

Note [Everybody reads everything]
Sample i of an epoch belongs to batch i // global_batch_size. Nobody can tell where a stream is cut without reading it,
so every worker, and every loader process of a worker, goes through the whole stream and keeps what belongs to it. A
dataset must therefore not split itself, neither by rank nor by `get_worker_info()` (which answers None here). What is
expensive per sample is best left to the collate function: that runs only for samples that are kept.

A stream that splits itself all the same gives each worker other samples, and what a worker drops is lost. So the
content of whole global batches is hashed in the first steps after a start, and in some later ones; the hash travels
with the batch, and the step refuses batches that differ (train/step_check.py). Where a worker started to load may
differ between workers that were replaced, so not all of them hash the same batches: 0 means "not computed".

Note [Where a stream is resumed]
Reading a stream from the beginning, to drop what was used already, may take as long as training on it. A dataset, or
else its iterator, that has `state_dict()` and `load_state_dict()` is asked for its state after each batch was read and
before the next one is; the state travels with the batch, because loading runs ahead of training, and goes into the
checkpoint. Not every such state is exact (a shuffle buffer may be left out of it). So the hash of what came next is
saved with it, and compared: where other samples come, the stream is read from the beginning.

A loader process holds the samples of up to two global batches: how an incomplete batch is cut, and whether one ends its
epoch, is known only after looking beyond it.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from torch import Tensor

from lockstep.data.reader import Batch, DataError, Failure, Mark, Recipe, Shard
from lockstep.data.sample_digest import hash_of_sample, hash_of_samples
from lockstep.data.sample_order import Division, Position

_READ_INSTEAD: Final = (
    "load_state_dict() of the stream did not lead to sample {first} of epoch {epoch}; the samples before that were "
    "read again"
)
_OTHER_SAMPLES: Final = (
    "the stream has other samples at sample {first} of epoch {epoch} than when this was saved; is it another dataset, "
    "or random by itself?"
)
COMPARED_AT_START: Final = 4  # global batches
COMPARE_EVERY: Final = 64  # hashing 256 images of 150 kB takes 40 ms, in the process that loads


@dataclass(frozen=True)
class Source:
    """A stream, and how it is cut into batches.

    `set_epoch(epoch)` of the dataset, if it has one, is called before each epoch. `skip(n)` of the dataset or else of
    its iterator, if there is one, is called to resume inside an epoch: what comes then starts with sample n of the
    epoch. It may return what to go on with, or change its object for the next time it is gone through. Without it n
    samples are read and dropped. `state_dict()` and `load_state_dict()` of the dataset or else of its iterator are
    preferred to both where a state is known: `iter(dataset)` or the iterator goes on behind it.
    """

    dataset: Any
    global_batch_size: int  # or this worker's part of it
    drop_last: bool
    epochs: int | None
    is_part: bool = False  # this worker has samples of its own: see data/split_streams.py


@dataclass(frozen=True)
class _Chunk:
    """The samples of one global batch."""

    position: Position
    ends_epoch: bool
    samples: list[Any]
    first: int  # the number in the epoch of the first of them
    after: Mark | None  # where the stream is behind them


class StreamReader:
    """Batch 0, 1, 2, ... from `start` on. Asked in rising order; batches left out are other loader processes'."""

    def __init__(
        self, source: Source, recipe: Recipe, division: Division, start: Position, mark: Mark | None = None
    ) -> None:
        """`mark`: where the stream is at `start`, if that is known."""
        self._source, self._recipe, self._division, self._start = source, recipe, division, start
        self._mark = mark
        self._dataset: Any = None  # what is gone through
        self._notes: list[str] = []  # to be told
        self._chunks: Iterator[_Chunk] | None = None  # begun where it is used: an iterator cannot be sent
        self._read = 0  # chunks

    def __getitem__(self, number: int) -> Batch | Failure | None:
        """None: the stream is over."""
        recipe = self._recipe
        try:
            with recipe.keeping_random_state():
                chunk = self._advance(number)
                if chunk is None:
                    return None
                self._say_notes(number)
                here, count = chunk.position, len(chunk.samples)
                content, seen = self._look_at(chunk)
                shards = []
                is_part = self._source.is_part
                for shard, places in self._division.of_part(count) if is_part else self._division.of(count):
                    items = chunk.samples[places.start : places.stop]
                    names = range(chunk.first + places.start, chunk.first + places.stop)
                    data = recipe.put_together(items, names, here, shard) if items else None
                    shards.append(Shard(shard, len(items), data, sum(seen[places.start : places.stop]) % 2**64))
        except (DataError, ValueError) as error:
            return Failure(error, error.__cause__)
        return Batch(
            here.epoch,
            here.step,
            here.number,
            count,
            chunk.ends_epoch,
            tuple(shards),
            self._division.shards,
            content,
            chunk.after,
            seen,
        )

    def _look_at(self, chunk: _Chunk) -> tuple[int, tuple[int, ...]]:
        """A hash of the whole global batch, if it is to be compared; or of each sample of our part of it."""
        if self._source.is_part:
            return 0, tuple(map(hash_of_sample, chunk.samples))
        number = chunk.position.number
        is_compared = number - self._start.number < COMPARED_AT_START or number % COMPARE_EVERY == 0
        return hash_of_samples(chunk.samples) if is_compared else 0, ()

    def _say_notes(self, number: int) -> None:
        """Once, though every worker and every loader process has them."""
        if number == 0 and self._recipe.rank == 0:
            for note in self._notes:
                print(f"lockstep: {note}", file=sys.stderr, flush=True)
        self._notes.clear()

    def _advance(self, number: int) -> _Chunk | None:
        assert number >= self._read, f"batch {number} was asked for after batch {self._read - 1}"
        if self._chunks is None:
            self._chunks = self._read_epochs()
        chunk = next(islice(self._chunks, number - self._read, None), None)
        self._read = number + 1
        return chunk

    def _read_epochs(self) -> Iterator[_Chunk]:
        here, source, mark = self._start, self._source, self._mark
        while source.epochs is None or here.epoch < source.epochs:
            samples, coming = self._begin_epoch(here, mark)
            if not coming and source.is_part and here.step > 0:  # our part of this epoch was shorter than others'
                here = here.after(ends_epoch=True)
                continue
            if not coming:
                raise ValueError(self._why_nothing_came(here))
            while coming:
                # Before the next batch is read: the state belongs to the place between the two.
                state = samples.state() if not source.is_part else None  # that of one worker is of no use to others
                number = here.step * source.global_batch_size
                self._notes += samples.take_notes()
                chunk, coming = coming, self._take(samples)
                after = Mark(state, _hash_of_ends(coming)) if state is not None and coming else None
                yield _Chunk(here, not coming, chunk, number, after)
                here = here.after(ends_epoch=not coming)
            mark = None

    def _begin_epoch(self, here: Position, mark: Mark | None) -> tuple[_Samples, list[Any]]:
        """The samples from `here` on, and those of the first batch. See Note [Where a stream is resumed]."""
        first = here.step * self._source.global_batch_size
        for state in (None,) if mark is None else (mark.state, None):
            if self._dataset is None or mark is not None:
                self._dataset = _copied(self._source.dataset)
            samples = _Samples(self._dataset, self._recipe, here.epoch, first, state, is_part=self._source.is_part)
            coming = self._take(samples)
            is_right = mark is None or _hash_of_ends(coming) == mark.coming
            if is_right:
                break
        if mark is not None and state is None:
            self._notes.append(_READ_INSTEAD.format(first=first, epoch=here.epoch))
        if not is_right:
            self._notes.append(_OTHER_SAMPLES.format(first=first, epoch=here.epoch))
        return samples, coming

    def _take(self, samples: Iterator[Any]) -> list[Any]:
        taken = list(islice(samples, self._source.global_batch_size))
        return [] if self._source.drop_last and len(taken) < self._source.global_batch_size else taken

    def _why_nothing_came(self, here: Position) -> str:
        kind, size = type(self._source.dataset).__name__, self._source.global_batch_size
        who = f"rank {self._recipe.rank}: the stream ({kind})"
        if here.step > 0:
            return (
                f"{who} ended before sample {here.step * size} of epoch {here.epoch}, where it should go on; "
                "it is shorter than it was when this position was saved"
            )
        what = f"fewer samples than one batch of {size} (drop_last=True)" if self._source.drop_last else "no samples"
        return f"{who} gave {what} in epoch {here.epoch}; its __iter__ must start anew every time it is called"


class _Samples:
    """An iterator over the samples of one epoch from number `first` on, and where it is.

    Each sample is read with random numbers of its own, keyed by (seed, epoch, number).
    """

    def __init__(
        self, dataset: Any, recipe: Recipe, epoch: int, first: int, state: bytes | None, *, is_part: bool
    ) -> None:
        """
        state    of the dataset at sample `first`, if it is known
        is_part  other workers have other samples under the same numbers, and draw other random numbers
        """
        self._key = ("stream", "of rank", recipe.rank, epoch) if is_part else ("stream", epoch)
        self._dataset, self._recipe, self._epoch, self._first = dataset, recipe, epoch, first
        self._number = 0  # of the sample that is read next
        self._holder: Any = None  # what has a state: the dataset or its iterator
        self._notes: list[str] = []
        self._reading = self._read(state)

    def __iter__(self) -> _Samples:
        return self

    def __next__(self) -> Any:
        return next(self._reading)

    def state(self) -> bytes | None:
        """Where the dataset is now, by its own account. None: it cannot tell, or a checkpoint cannot hold that."""
        if self._holder is None:
            return None
        try:
            state = self._holder.state_dict()
        except Exception as error:
            raise self._failed("state_dict()", error) from error
        try:
            return pickle.dumps(storable(state))
        except Exception as error:
            self._holder = None
            self._notes.append(f"{error}; it is not saved, and a resume reads the stream from the beginning")
            return None

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def _read(self, state: bytes | None) -> Iterator[Any]:
        try:
            self._recipe.sow(*self._key)
            samples = self._begin() if state is None else self._resume(state)
            while True:
                self._recipe.sow(*self._key, self._number)
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
        who = f"rank {self._recipe.rank}: {what + ' of ' if what else ''}the stream ({type(self._dataset).__name__})"
        return DataError(
            f"{who} failed at sample {self._number} of epoch {self._epoch}: {type(error).__name__}: {error}"
        )

    def _resume(self, state: bytes) -> Iterator[Any]:
        """From the state that was saved."""
        dataset = self._dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._epoch)
        try:
            if has_state(dataset):
                dataset.load_state_dict(pickle.loads(state))
                self._holder = dataset
                samples: Iterator[Any] = iter(dataset)
            else:
                samples = self._holder = iter(dataset)
                self._holder.load_state_dict(pickle.loads(state))
        except Exception:
            return iter(())  # nothing comes, so this is not where it was
        self._number = self._first
        return samples

    def _begin(self) -> Iterator[Any]:
        """From the beginning of the epoch, or from where `skip` leads."""
        dataset, first = self._dataset, self._first
        self._holder = None
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._epoch)
        if first > 0 and hasattr(dataset, "skip"):
            rest = dataset.skip(first)
            self._number = first
            if rest is not None:
                return iter(rest)  # its state would not fit the dataset
        samples: Any = iter(dataset)
        if first > 0 and self._number == 0 and hasattr(samples, "skip"):
            rest = samples.skip(first)
            self._number = first
            if rest is not None:
                return iter(rest)
        # The dataset before its iterator, as in `_resume`.
        self._holder = next((one for one in (dataset, samples) if has_state(one)), None)
        begun: Iterator[Any] = samples
        return begun


def has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def storable(value: Any, name: str = "") -> Any:
    """The same value, if a checkpoint can hold it; numbers of numpy as Python's. Raises TypeError for anything else."""
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
    """A shallow copy of a dataset that has a state, so that the dataset itself stays at its beginning.

    A loader process has such a copy anyway.
    """
    try:
        return copy.copy(dataset) if has_state(dataset) else dataset
    except Exception:
        return dataset


def _hash_of_ends(samples: Sequence[Any]) -> int:
    """Of the first and the last of them; 0: there are none."""
    return hash_of_samples([samples[0], samples[-1]]) if samples else 0
