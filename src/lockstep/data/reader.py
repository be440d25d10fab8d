"""Samples become a batch: what happens in a loader process, or in this one where there are none.

Note [Random numbers of a sample]
Before `dataset[i]` the generators of torch, Python and numpy are sown with a key made of (seed, epoch, i); before a
collate function of the user's with (seed, epoch, step, shard). So an augmentation draws the same numbers whoever loads
the sample, whatever was loaded before it, and whether a run was resumed. Around a batch the random state is kept: a
training process that loads for itself does not notice. A generator that the dataset seeds from the system
(`numpy.random.default_rng()`) is out of reach.

Note [The same dataset on all workers]
Each worker makes its own dataset. One that is made of random numbers before the run seeds them (noise, or a random
split into training and test samples), or from files in the order in which a file system lists them, is another one on
each worker, and the ledger, which knows numbers of samples, would not notice. So some samples of the first batch after
each start are read by all workers, in the process that loads; their hash travels with the batch, and the step refuses
batches that differ. They are read twice: samples that are different each time say nothing about the dataset.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import worker

from lockstep.data.ledger import fingerprint
from lockstep.data.sample_digest import hash_of_samples
from lockstep.data.sample_order import Position, cut
from lockstep.errors import LockstepError
from lockstep.seed import kept_random_state, mix, sow

Collate: TypeAlias = Callable[[list[Any]], Any]

_HOW_TO_USE_A_BATCH: Final = """a batch is handed to run.step; the data is inside your loss function:
    for batch in run.train(batches, optimizer):
        run.step(loss, batch)  # calls loss(model, data); in there: x, y = data"""


class DataError(LockstepError):
    """The dataset, its collate function or a loader process failed. The cause is chained."""


@dataclass(frozen=True)
class Shard:
    """A part of a batch: its number, how many samples it has, and those (None if it has none)."""

    number: int
    count: int
    data: Any
    samples: int = 0  # their fingerprint (data/ledger.py); 0 for a stream that all workers read


@dataclass(frozen=True)
class Mark:
    """Where a stream is between two batches."""

    state: bytes  # of the dataset or its iterator, pickled: a copy that shares nothing with them
    coming: int  # hash of samples of the next batch


@dataclass(frozen=True)
class Batch:
    """What one worker gets of a global batch."""

    epoch: int
    step: int  # in the epoch
    number: int  # of all batches
    count: int  # samples of the global batch, over all workers
    ends_epoch: bool
    shards: tuple[Shard, ...]  # this worker's
    of_shards: int  # of all workers together
    content: int = 0  # 64 bits of the samples of all workers, which must be equal on all of them; 0: not computed
    mark: Mark | None = None  # where a stream is behind this batch, if it can tell
    seen: tuple[int, ...] = ()  # with split="worker": 64 bits of each sample, of all workers
    shard_counts: tuple[int, ...] = ()  # with split="worker": samples of every shard, of all workers

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of every shard, of all workers."""
        if self.shard_counts:
            return self.shard_counts
        return tuple(len(places) for places in cut(self.count, self.of_shards))

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.step, self.number)

    # A batch has the data of several shards, so it cannot be unpacked or indexed as a DataLoader's can.

    def __iter__(self) -> NoReturn:
        raise TypeError(_HOW_TO_USE_A_BATCH)

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(_HOW_TO_USE_A_BATCH)

    def __len__(self) -> NoReturn:
        raise TypeError(f"{_HOW_TO_USE_A_BATCH}; batch.count is the number of samples of all workers")

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a batch has no {name!r}: {_HOW_TO_USE_A_BATCH}", name=name, obj=self)


@dataclass(frozen=True)
class Job:
    """A batch to be: which samples go into each of this worker's shards."""

    position: Position
    ends_epoch: bool
    count: int
    of_shards: int
    shards: tuple[tuple[int, Sequence[int]], ...]  # (shard number, sample numbers)
    content: int = 0  # as in Batch
    looked_at: tuple[int, ...] = ()  # samples whose content all workers compare: see the Note


@dataclass(frozen=True)
class Failure:
    """Comes in the place of a batch, and is raised when it is that batch's turn: not when it was loaded ahead."""

    error: Exception
    cause: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (self.error, None if self.cause is None else _portable(self.cause))


def _collate_here(items: list[Any]) -> Any:
    """Torch's default. In a loader process that would put every tensor into shared memory of its own, by a name in
    /dev/shm for a moment; ours travel in one piece (parcel.py)."""
    known, worker._worker_info = worker._worker_info, None
    try:
        return default_collate(items)
    finally:
        worker._worker_info = known


@dataclass(frozen=True)
class Recipe:
    """How the samples of a shard are put together, and whose random numbers they use."""

    seed: int
    rank: int
    collate_fn: Collate | None  # None: torch's default, which draws no random numbers
    is_random: bool  # whether loading a sample may draw some
    device: torch.device | None = None  # its generator counts too; None in loader processes, which know no GPU

    def keeping_random_state(self) -> AbstractContextManager[None]:
        if not self.is_random and self.collate_fn is None:
            return nullcontext()
        return kept_random_state(self.device)

    def sow(self, *words: int | str) -> None:
        if self.is_random:
            sow(mix(self.seed, *words), self.device)

    def put_together(self, items: list[Any], names: Sequence[int], position: Position, shard: int) -> Any:
        """What the collate function makes of these samples. `names`: their numbers, for the error if it cannot."""
        if self.collate_fn is None:
            collate: Collate = _collate_here
        else:
            collate = self.collate_fn
            sow(mix(self.seed, "collate", position.epoch, position.step, shard), self.device)
        try:
            return collate(items)
        except Exception as error:
            if self.collate_fn is None:
                why = f"{find_difference(items, names) or _words(error)}; if samples differ in shape, give collate_fn="
            else:
                why = f"{_words(error)}, from collate_fn= with samples {_some(names)}"
            raise DataError(
                f"rank {self.rank}: {len(items)} samples could not be put together (epoch {position.epoch}, "
                f"step {position.step}, shard {shard}): {why}"
            ) from error


@dataclass(frozen=True)
class Reader:
    """A map-style dataset, asked for whole batches."""

    dataset: Any
    recipe: Recipe

    def __getitem__(self, job: Job | Failure) -> Batch | Failure:
        if isinstance(job, Failure):
            return job
        try:
            with self.recipe.keeping_random_state():
                shards = [
                    Shard(
                        number,
                        len(samples),
                        self._load(samples, job.position, number) if samples else None,
                        fingerprint(samples),
                    )
                    for number, samples in job.shards
                ]
                content = job.content or self._hash_of(job.looked_at, job.position)
        except DataError as error:
            return Failure(error, error.__cause__)
        here = job.position
        return Batch(
            here.epoch, here.step, here.number, job.count, job.ends_epoch, tuple(shards), job.of_shards, content
        )

    def _hash_of(self, samples: Sequence[int], position: Position) -> int:
        """64 bits of the content of samples; 0 if there are none, one cannot be read, or they differ each time."""
        if not samples:
            return 0
        try:
            first, second = (
                hash_of_samples([self._load_one(sample, position) for sample in samples]) for _ in range(2)
            )
        except DataError:  # which is told by the worker that trains on it
            return 0
        return first if first == second else 0

    def _load(self, samples: Sequence[int], position: Position, shard: int) -> Any:
        if self.recipe.collate_fn is None and (columns := gather(self.dataset, samples)) is not None:
            return columns
        if not self.recipe.is_random and hasattr(self.dataset, "__getitems__"):
            items = self._guarded(lambda: list(self.dataset.__getitems__(list(samples))), position, samples)
        else:
            items = [self._load_one(sample, position) for sample in samples]
        return self.recipe.put_together(items, samples, position, shard)

    def _load_one(self, sample: int, position: Position) -> Any:
        self.recipe.sow("sample", position.epoch, sample)
        return self._guarded(lambda: self.dataset[sample], position, sample)

    def _guarded(self, load: Callable[[], Any], position: Position, which: object) -> Any:
        try:
            return load()
        except Exception as error:
            raise DataError(
                f"rank {self.recipe.rank}: dataset[{which}] failed in epoch {position.epoch}, step {position.step}: "
                f"{_words(error)}; the dataset is a {type(self.dataset).__name__}"
            ) from error


def draws_random_numbers(dataset: Any) -> bool:
    """Whether loading a sample may. A dataset can say no itself: `is_random = False` saves 10 us of sowing a sample."""
    said = getattr(dataset, "is_random", None)
    if said is not None:
        return bool(said)
    # Exact types: a subclass may do anything.
    if type(dataset) in (TensorDataset, torch.Tensor, list, tuple, range):
        return False
    if type(dataset) is Subset:
        return draws_random_numbers(dataset.dataset)
    if type(dataset) in (ConcatDataset, StackDataset):
        parts = dataset.datasets
        return any(draws_random_numbers(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return True


def gather(dataset: Any, samples: Sequence[int]) -> list[torch.Tensor] | None:
    """What torch's collate makes of samples that are rows of tensors, all rows at once. None for other datasets."""
    if type(dataset) is TensorDataset:
        rows = torch.tensor(samples)
        return [column[rows] for column in dataset.tensors]
    if type(dataset) is Subset:
        indices = dataset.indices
        return gather(dataset.dataset, [int(indices[sample]) for sample in samples])
    return None


def find_difference(items: Sequence[Any], names: Sequence[int], field: str = "") -> str | None:
    """In words, what torch's collate cannot put together: the first two samples that differ in shape, length or type.

    `field` is the way to the part of a sample that is looked at, such as "['image'][0]".
    """
    first, at = items[0], f" in field {field}" if field else ""
    for item, name in zip(items, names, strict=True):
        one, other = _outline(first), _outline(item)
        if one != other:
            return f"sample {names[0]} {one} and sample {name} {other}{at}"
    if isinstance(first, Mapping):
        keys: Sequence[Any] = list(first)
    elif isinstance(first, list | tuple):
        keys = range(len(first))
    else:
        return None
    return next(
        (
            found
            for key in keys
            if (found := find_difference([item[key] for item in items], names, f"{field}[{key!r}]")) is not None
        ),
        None,
    )


def _outline(value: Any) -> str:
    """What must be equal in all samples of a shard."""
    if hasattr(value, "shape"):
        return f"has shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"has the keys {', '.join(sorted(map(repr, value)))}"
    if isinstance(value, list | tuple):
        return f"has {len(value)} elements"
    # Numbers of several types can be put together.
    return "is a number" if isinstance(value, int | float) else f"is a {type(value).__name__}"


def _some(names: Sequence[int]) -> str:
    shown = ", ".join(map(str, names[:8]))
    return shown if len(names) <= 8 else f"{shown}, ..."


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _portable(cause: BaseException) -> BaseException:
    """An exception that survives the way to another process; its traceback does not, so it goes along as a note."""
    try:
        twin: BaseException = pickle.loads(pickle.dumps(cause))
        assert isinstance(twin, BaseException)
    except Exception:
        twin = RuntimeError(_words(cause))
    twin.add_note("in the loader process:\n" + "".join(traceback.format_exception(cause)))
    return twin
