"""Reads samples and collates them into batches, in a loader process or, without those, in the training process.

Note [Random numbers of a sample]
Before `dataset[i]` the generators of torch, Python and numpy are seeded with a key made of (seed, epoch, i); before a
collate function of the user with (seed, epoch, step, shard). So an augmentation draws the same numbers whichever
process loads the sample, whatever was loaded before it, and whether or not the run was resumed. The random state is
saved before a batch and restored after it, so loading in the training process does not affect the model's random
numbers. A generator that the dataset seeds from the system (`numpy.random.default_rng()`) cannot be controlled.

Note [The same dataset on all workers]
Each worker creates its own dataset. A dataset that draws random numbers before the run seeds them (noise, or a random
split into training and test samples), or that lists files in file-system order, differs between workers, and the
ledger, which records sample numbers, would not notice. So all workers read some samples of the first batch after each
start, in the process that loads; their hash is sent with the batch, and the step refuses batches whose hashes differ.
The samples are read twice: if the two hashes differ, the samples are random and say nothing about the dataset.

Note [Equal content]
The hash is used to find out whether two workers have read the same samples. A false alarm would stop a correct run, so
only what is certainly part of the data is hashed: tensors, arrays, images, numbers, strings, bytes, and containers and
objects of these. Of anything else only the name of its type is hashed. Sets are hashed independently of their order,
which differs between processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import struct
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from lockstep import _torch
from lockstep.data.ledger import WORD, fingerprint
from lockstep.data.sample_order import Position, shard_ranges
from lockstep.errors import LockstepError
from lockstep.seed import derive_seed, preserve_random_state, seed_all

Collate: TypeAlias = Callable[[list[Any]], Any]

_HASHED_LEVELS: Final = 20  # of nested containers in a sample; of deeper ones only the type is hashed

_HOW_TO_USE_A_BATCH: Final = """a batch is handed to run.step; the data is inside your loss function:
    for batch in run.train(batches, optimizer):
        run.step(loss, batch)  # calls loss(model, data); in there: x, y = data"""


class DataError(LockstepError):
    """The dataset, its collate function or a loader process failed. The cause is chained."""


@dataclass(frozen=True)
class Shard:
    """A part of a batch."""

    number: int  # in the global batch
    count: int  # samples
    data: Any  # what the collate function returned; None if there are no samples
    samples: int = 0  # fingerprint of the samples (data/ledger.py); 0 for a stream that all workers read


@dataclass(frozen=True)
class StreamState:
    """The state of a stream between two batches."""

    state: bytes  # pickled state dict of the dataset or its iterator; shares no memory with them
    coming: int  # hash of samples of the next batch


@dataclass(frozen=True)
class Batch:
    """One worker's part of a global batch."""

    epoch: int
    step: int  # in the epoch
    number: int  # counted over all epochs
    count: int  # samples of the global batch, over all workers
    ends_epoch: bool
    shards: tuple[Shard, ...]  # this worker's
    of_shards: int  # number of shards of all workers together
    content: int = 0  # 64-bit hash of the global batch, which must be equal on all workers; 0: not computed
    stream_state: StreamState | None = None  # after this batch; None if the stream has no state
    seen: tuple[int, ...] = ()  # with split="worker": a 64-bit hash of each sample of all workers
    shard_counts: tuple[int, ...] = ()  # with split="worker": number of samples in each shard of all workers

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of samples in each shard of all workers."""
        if self.shard_counts:
            return self.shard_counts
        return tuple(len(places) for places in shard_ranges(self.count, self.of_shards))

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.step, self.number)

    # A batch has the data of several shards, so unlike a DataLoader's it cannot be unpacked or indexed.

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
class LoadRequest:
    """A batch to load: which samples go into each of this worker's shards."""

    position: Position
    ends_epoch: bool
    count: int
    of_shards: int
    shards: tuple[tuple[int, Sequence[int]], ...]  # (shard number, sample numbers)
    content: int = 0  # as in Batch
    compared: tuple[int, ...] = ()  # samples that all workers compare: see Note [The same dataset on all workers]


@dataclass(frozen=True)
class LoadFailure:
    """Takes the place of a batch that could not be loaded. Its error is raised when training reaches that batch."""

    error: Exception
    cause: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadFailure, (self.error, None if self.cause is None else _portable(self.cause))


def _collate_here(items: list[Any]) -> Any:
    """Torch's default collate function, without its use of shared memory.

    In a loader process torch would put each tensor into shared memory of its own, with a temporary name in /dev/shm;
    here all tensors of a batch are sent in one buffer (packed_batch.py).
    """
    known, _torch.loader_worker._worker_info = _torch.loader_worker._worker_info, None
    try:
        return default_collate(items)
    finally:
        _torch.loader_worker._worker_info = known


@dataclass(frozen=True)
class LoadContext:
    """How the samples of a shard are collated, and how random numbers are seeded."""

    seed: int
    rank: int
    collate_fn: Collate | None  # None: torch's default, which draws no random numbers
    is_random: bool  # whether loading a sample may draw random numbers
    device: torch.device | None = None  # its generator is seeded too; None in loader processes, which do not use a GPU

    def keeping_random_state(self) -> AbstractContextManager[None]:
        if not self.is_random and self.collate_fn is None:
            return nullcontext()
        return preserve_random_state(self.device)

    def seed_rng(self, *words: int | str) -> None:
        """Seed all generators with the run's seed and `words`, if loading a sample may draw random numbers."""
        if self.is_random:
            seed_all(derive_seed(self.seed, *words), self.device)

    def collate(self, items: list[Any], names: Sequence[int], position: Position, shard: int) -> Any:
        """Return what the collate function makes of these samples. `names` are their numbers, for the error message.

        Raises DataError if the collate function fails.
        """
        if self.collate_fn is not None:
            seed_all(derive_seed(self.seed, "collate", position.epoch, position.step, shard), self.device)
        try:
            return _collate_here(items) if self.collate_fn is None else self.collate_fn(items)
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
    """Loads whole batches from a map-style dataset. Errors of the dataset are returned as LoadFailure."""

    dataset: Any
    context: LoadContext

    def __getitem__(self, request: LoadRequest | LoadFailure) -> Batch | LoadFailure:
        if isinstance(request, LoadFailure):
            return request
        here = request.position
        try:
            with self.context.keeping_random_state():
                shards = []
                for number, samples in request.shards:
                    data = self._load(samples, here, number) if samples else None
                    shards.append(Shard(number, len(samples), data, fingerprint(samples)))
                content = request.content or self._hash_of(request.compared, here)
        except DataError as error:
            return LoadFailure(error, error.__cause__)
        place, count = (here.epoch, here.step, here.number), request.count
        return Batch(*place, count, request.ends_epoch, tuple(shards), request.of_shards, content)

    def _hash_of(self, samples: Sequence[int], position: Position) -> int:
        """64-bit hash of these samples; 0 if there are none, one cannot be read, or reading them twice differs."""
        if not samples:
            return 0
        try:
            first, again = (hash_of_samples([self._load_one(n, position) for n in samples]) for _ in range(2))
        except DataError:  # reported by the worker that trains on the sample
            return 0
        return first if first == again else 0

    def _load(self, samples: Sequence[int], position: Position, shard: int) -> Any:
        if self.context.collate_fn is None and (columns := gather(self.dataset, samples)) is not None:
            return columns
        if not self.context.is_random and hasattr(self.dataset, "__getitems__"):
            items = self._guarded(lambda: list(self.dataset.__getitems__(list(samples))), position, samples)
        else:
            items = [self._load_one(sample, position) for sample in samples]
        return self.context.collate(items, samples, position, shard)

    def _load_one(self, sample: int, position: Position) -> Any:
        self.context.seed_rng("sample", position.epoch, sample)
        return self._guarded(lambda: self.dataset[sample], position, sample)

    def _guarded(self, load: Callable[[], Any], position: Position, which: object) -> Any:
        try:
            return load()
        except Exception as error:
            raise DataError(
                f"rank {self.context.rank}: dataset[{which}] failed in epoch {position.epoch}, step {position.step}: "
                f"{_words(error)}; the dataset is a {type(self.dataset).__name__}"
            ) from error


def draws_random_numbers(dataset: Any) -> bool:
    """Whether loading a sample may draw random numbers.

    A dataset with the attribute `is_random = False` declares that it does not; that saves 10 us of seeding per sample.
    """
    declared = getattr(dataset, "is_random", None)
    if declared is not None:
        return bool(declared)
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
    """Collated samples of a TensorDataset, or a Subset of one, by indexing whole columns. None for other datasets."""
    if type(dataset) is TensorDataset:
        rows = torch.tensor(samples)
        return [column[rows] for column in dataset.tensors]
    if type(dataset) is Subset:
        indices = dataset.indices
        return gather(dataset.dataset, [int(indices[sample]) for sample in samples])
    return None


def find_difference(items: Sequence[Any], names: Sequence[int], field: str = "") -> str | None:
    """Describe why torch's collate fails: the first two samples that differ in shape, length or type; None if none do.

    `field` is the path to the part of a sample that is compared, such as "['image'][0]".
    """
    first, at = items[0], f" in field {field}" if field else ""
    for item, name in zip(items, names, strict=True):
        one, other = _outline(first), _outline(item)
        if one != other:
            return f"sample {names[0]} {one} and sample {name} {other}{at}"
    is_list = isinstance(first, list | tuple)
    for key in range(len(first)) if is_list else first if isinstance(first, Mapping) else ():
        found = find_difference([item[key] for item in items], names, f"{field}[{key!r}]")
        if found is not None:
            return found
    return None


def _outline(value: Any) -> str:
    """What must be equal in all samples of a shard."""
    if hasattr(value, "shape"):
        return f"has shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"has the keys {', '.join(sorted(map(repr, value)))}"
    if isinstance(value, list | tuple):
        return f"has {len(value)} elements"
    # Numbers of different types can be collated.
    return "is a number" if isinstance(value, int | float) else f"is a {type(value).__name__}"


def _some(names: Sequence[int]) -> str:
    shown = ", ".join(map(str, names[:8]))
    return shown if len(names) <= 8 else f"{shown}, ..."


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _portable(cause: BaseException) -> BaseException:
    """A copy of the exception that can be pickled. Tracebacks cannot, so the traceback is attached as a note."""
    try:
        twin: BaseException = pickle.loads(pickle.dumps(cause))
        assert isinstance(twin, BaseException)
    except Exception:
        twin = RuntimeError(_words(cause))
    twin.add_note("in the loader process:\n" + "".join(traceback.format_exception(cause)))
    return twin


# ---- content of samples: see Note [Equal content] --------------------------------------------------------------------


def hash_of_sample(sample: Any) -> int:
    """Return a 64-bit hash that is never 0."""
    digest = hashlib.blake2b(digest_size=8)
    _hash(digest, sample, 0)
    return int.from_bytes(digest.digest(), "big") or 1


def hash_of_samples(samples: Iterable[Any]) -> int:
    """Return a 64-bit hash of all samples in their order. It is never 0."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        digest.update(hash_of_sample(sample).to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big") or 1


def _hash(digest: Any, value: Any, level: int) -> None:
    """Hash a value, preceded by its type, so that 1, True, 1.0 and "1" differ."""
    digest.update(f"<{type(value).__qualname__}>".encode())
    if level > _HASHED_LEVELS or value is None:
        return
    if isinstance(value, str | bytes | bytearray):
        raw = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    elif isinstance(value, float):
        digest.update(struct.pack(">d", value))
    elif isinstance(value, Number):
        digest.update(repr(value).encode())
    elif isinstance(value, torch.Tensor):
        _hash_tensor(digest, value)
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            _hash(digest, key, level + 1)
            _hash(digest, inside, level + 1)
    elif isinstance(value, Set):
        total = sum(hash_of_sample(inside) for inside in value) % WORD
        digest.update(total.to_bytes(8, "big"))
    elif callable(getattr(value, "tobytes", None)):  # numpy arrays and scalars, images, array.array, memoryview
        _hash_array(digest, value)
    elif isinstance(value, Sequence):
        digest.update(len(value).to_bytes(8, "big"))
        for inside in value:
            _hash(digest, inside, level + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for name, inside in sorted(vars(value).items()):
            _hash(digest, name, level + 1)
            _hash(digest, inside, level + 1)


def _hash_tensor(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    digest.update(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"")


def _hash_array(digest: Any, array: Any) -> None:
    if str(getattr(array, "dtype", "")) == "object":  # its bytes are memory addresses
        digest.update(repr(getattr(array, "shape", "")).encode())
        return
    for name in ("dtype", "shape", "size", "mode"):
        fact = getattr(array, name, None)
        digest.update(repr(fact).encode() if isinstance(fact, str | int | tuple) else str(fact).encode())
    digest.update(array.tobytes())
