"""Iterable datasets: one sequence of samples per epoch, the same one for everybody.

Note [Everybody reads everything]
Sample i of an epoch belongs to batch i // global_batch_size. Nobody can tell where a stream is cut without reading it,
so every worker, and every loader process of a worker, goes through the whole stream and keeps what belongs to it. A
dataset must therefore not split itself, neither by rank nor by `get_worker_info()` (which answers None here). What is
expensive per sample is best left to the collate function: that runs only for samples that are kept.

A stream that splits itself all the same gives each worker other samples, and what a worker drops is lost. So the
content of whole global batches is hashed in the first steps after a start, and in some later ones; the hash travels
with the batch, and the step refuses batches that differ (train/verdict.py). Where a worker started to load may differ
between workers that were replaced, so not all of them hash the same batches: 0 means "not computed".

A loader process holds the samples of up to two global batches: how an incomplete batch is cut, and whether one ends its
epoch, is known only after looking beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from lockstep.data.content import hash_of_samples
from lockstep.data.order import Division, Position
from lockstep.data.reader import Batch, DataError, Failure, Recipe, Shard

COMPARED_AT_START: Final = 4  # global batches
COMPARE_EVERY: Final = 64  # hashing 256 images of 150 kB takes 40 ms, in the process that loads


@dataclass(frozen=True)
class Source:
    """A stream, and how it is cut into batches.

    `set_epoch(epoch)` of the dataset, if it has one, is called before each epoch. `skip(n)` of the dataset or else of
    its iterator, if there is one, is called to resume inside an epoch: what comes then starts with sample n of the
    epoch. It may return what to go on with, or change its object for the next time it is gone through. Without it n
    samples are read and dropped.
    """

    dataset: Any
    global_batch_size: int
    drop_last: bool
    epochs: int | None


@dataclass(frozen=True)
class _Chunk:
    """The samples of one global batch."""

    position: Position
    ends_epoch: bool
    samples: list[Any]
    first: int  # the number in the epoch of the first of them


class StreamReader:
    """Batch 0, 1, 2, ... from `start` on. Asked in rising order; batches left out are other loader processes'."""

    def __init__(self, source: Source, recipe: Recipe, division: Division, start: Position) -> None:
        self._source, self._recipe, self._division, self._start = source, recipe, division, start
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
                here, count = chunk.position, len(chunk.samples)
                is_compared = here.number - self._start.number < COMPARED_AT_START or here.number % COMPARE_EVERY == 0
                content = hash_of_samples(chunk.samples) if is_compared else 0
                shards = []
                for shard, places in self._division.of(count):
                    items = chunk.samples[places.start : places.stop]
                    names = range(chunk.first + places.start, chunk.first + places.stop)
                    data = recipe.put_together(items, names, here, shard) if items else None
                    shards.append(Shard(shard, len(items), data))
        except (DataError, ValueError) as error:
            return Failure(error, error.__cause__)
        of_shards = self._division.shards
        return Batch(here.epoch, here.step, here.number, count, chunk.ends_epoch, tuple(shards), of_shards, content)

    def _advance(self, number: int) -> _Chunk | None:
        assert number >= self._read, f"batch {number} was asked for after batch {self._read - 1}"
        if self._chunks is None:
            self._chunks = self._read_epochs()
        chunk = next(islice(self._chunks, number - self._read, None), None)
        self._read = number + 1
        return chunk

    def _read_epochs(self) -> Iterator[_Chunk]:
        here, source = self._start, self._source
        while source.epochs is None or here.epoch < source.epochs:
            samples = self._read_samples(here.epoch, here.step * source.global_batch_size)
            coming = self._take(samples)
            if not coming:
                raise ValueError(self._why_nothing_came(here))
            while coming:
                chunk, coming = coming, self._take(samples)
                yield _Chunk(here, not coming, chunk, here.step * source.global_batch_size)
                here = here.after(ends_epoch=not coming)

    def _take(self, samples: Iterator[Any]) -> list[Any]:
        taken = list(islice(samples, self._source.global_batch_size))
        return [] if self._source.drop_last and len(taken) < self._source.global_batch_size else taken

    def _read_samples(self, epoch: int, first: int) -> Iterator[Any]:
        """Samples from number `first` on. Each is read with random numbers of its own, keyed by (seed, epoch, i)."""
        number = 0
        try:
            self._recipe.sow("stream", epoch)
            iterator = self._begin(epoch, first)
            number = first if iterator.skipped else 0
            while True:
                self._recipe.sow("stream", epoch, number)
                try:
                    sample = next(iterator.samples)
                except StopIteration:
                    return
                if number >= first:
                    yield sample
                number += 1
        except Exception as error:
            raise DataError(
                f"rank {self._recipe.rank}: the stream ({type(self._source.dataset).__name__}) failed at sample "
                f"{number} of epoch {epoch}: {type(error).__name__}: {error}"
            ) from error

    def _begin(self, epoch: int, first: int) -> _Begun:
        dataset = self._source.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if first == 0:
            return _Begun(iter(dataset), skipped=False)
        if hasattr(dataset, "skip"):
            rest = dataset.skip(first)
            return _Begun(iter(dataset if rest is None else rest), skipped=True)
        samples = iter(dataset)
        if hasattr(samples, "skip"):
            rest = samples.skip(first)
            return _Begun(samples if rest is None else iter(rest), skipped=True)
        return _Begun(samples, skipped=False)

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


@dataclass(frozen=True)
class _Begun:
    samples: Iterator[Any]
    skipped: bool
