"""Which samples make up which batch, and which worker runs them. Pure functions, without datasets or processes.

(seed, epoch, step, shard, i) -> sample number. An `Order` returns the samples of a global batch; `shard_ranges` splits
the batch into shards; `shards_of_rank` assigns the shards to workers. The number of workers is an argument of
`shards_of_rank` alone, so it decides which worker loads a sample and never which batch or shard the sample is in.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lockstep.seed import derive_seed, preserve_random_state, seed_all

T = TypeVar("T")


@runtime_checkable
class Order(Protocol):
    """The methods of a custom sample order.

    The results may depend on the arguments only, because each worker calls the methods for itself.
    """

    def steps(self, epoch: int) -> int:
        """Return the number of global batches of this epoch."""

    def batch(self, epoch: int, step: int) -> Sequence[int]:
        """Return the sample numbers of one global batch. Batches may differ in size; none is empty."""


@dataclass(frozen=True)
class Position:
    """The position of a batch in the sequence of all batches."""

    epoch: int = 0
    step: int = 0  # in the epoch
    number: int = 0  # of batches before it, in all epochs

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_int(value) or value < 0:
                raise ValueError(f"Position({name}={value!r}): batches are counted 0, 1, 2, ...")

    def after(self, *, ends_epoch: bool) -> Position:
        """Return the next position. `ends_epoch`: whether the batch at this one is the last of its epoch."""
        epoch, step = (self.epoch + 1, 0) if ends_epoch else (self.epoch, self.step + 1)
        return Position(epoch, step, self.number + 1)


def shard_ranges(count: int, shards: int) -> list[range]:
    """Return, for each shard, the range of its samples in a batch of `count` samples.

    Sizes differ by one at most. The larger shards, or with few samples the ones that are not empty, are spread evenly
    over the shard numbers, so that the work is spread evenly over the workers.
    """
    return [range(shard * count // shards, (shard + 1) * count // shards) for shard in range(shards)]


def shards_of_rank(shards: int, workers: int, rank: int) -> range:
    """Return the shards that a worker runs, one after the other. Raises ValueError if a worker would have none."""
    if not 0 <= rank < workers:
        raise ValueError(f"rank={rank} is not one of {workers} workers")
    if workers > shards:
        raise ValueError(
            f"{workers} workers for {shards} shards: {workers - shards} would have nothing to do; "
            f"set shards={workers} or more (it is part of what a run computes), or start at most {shards} workers"
        )
    return range(rank * shards // workers, (rank + 1) * shards // workers)


@dataclass(frozen=True)
class Division:
    """Which shards of a batch are loaded here, and whether they are joined into one."""

    shards: int  # of the global batch
    mine: Sequence[int]  # numbers of the shards that are loaded here
    joined: bool = False

    def of(self, count: int) -> list[tuple[int, range]]:
        """Return (shard number, range of its samples in a batch of `count`). Joined shards have the first's number."""
        ranges = shard_ranges(count, self.shards)
        if self.joined:
            return [(self.mine[0], range(ranges[self.mine[0]].start, ranges[self.mine[-1]].stop))]
        return [(number, ranges[number]) for number in self.mine]

    def of_part(self, count: int) -> list[tuple[int, range]]:
        """Return the same for `count` samples that all belong to the shards loaded here."""
        if self.joined:
            return [(self.mine[0], range(count))]
        return list(zip(self.mine, shard_ranges(count, len(self.mine)), strict=True))


def positions_from(order: Order, start: Position, epochs: int | None) -> Iterator[tuple[Position, bool]]:
    """Yield every position from `start` on, and whether it is the last of its epoch. Endless if `epochs` is None."""
    here = start
    while epochs is None or here.epoch < epochs:
        last = count_steps(order, here.epoch) - 1
        yield here, here.step >= last
        here = here.after(ends_epoch=here.step >= last)


def count_steps(order: Order, epoch: int) -> int:
    steps = order.steps(epoch)
    if not is_int(steps) or steps < 1:
        raise ValueError(f"{type(order).__name__}.steps({epoch}) is {steps!r}; an epoch has at least one batch")
    return steps


def count_all_steps(order: Order, epochs: int) -> int | None:
    """Return the number of steps in `epochs` epochs.

    In Lockstep's own orders all epochs have the same number; a custom order is called for each epoch. None for a
    sampler whose epochs may differ: iterating over it for all epochs in advance would take long.
    """
    if isinstance(order, SamplerOrder):
        return epochs * count_steps(order, 0) if order.has_equal_epochs else None
    if isinstance(order, Shuffled | Sequential | ByLength):
        return epochs * count_steps(order, 0)
    return sum(count_steps(order, epoch) for epoch in range(epochs))


def name_order(order: Order, *, samples: int, seed: int) -> str:
    """Return the class name of an order, with the settings that differ from the defaults of a run.

    `samples` and `seed` are those defaults. Two of Lockstep's own orders with the same name have the same samples at
    the same position, except for a dropped last batch.
    """
    if isinstance(order, SamplerOrder):
        return order.name
    usual = {"size": samples, "seed": seed, "pool": ByLength.pool}
    known = ("size", "seed", "pool") if isinstance(order, Shuffled | Sequential | ByLength) else ()
    shown = [(name, getattr(order, name)) for name in known if getattr(order, name, usual[name]) != usual[name]]
    if isinstance(order, ByLength):
        shown.append(("lengths", f"{order.fingerprint:x}"))
    return type(order).__name__ + (f"({', '.join(f'{name}={value}' for name, value in shown)})" if shown else "")


def fingerprint_of(order: Order, epoch: int, step: int) -> int | None:
    """Return a 63-bit hash of an epoch's samples in their order; None for orders that `name_order` identifies.

    For a sampler the whole epoch is hashed, since it is drawn as a whole anyway. For a custom order four batches are
    hashed: the first and the last of the epoch, and the two around `step`.
    """
    if isinstance(order, SamplerOrder):
        return order.fingerprint(epoch)
    if isinstance(order, Shuffled | Sequential | ByLength):
        return None
    steps = count_steps(order, epoch)
    hashed = sorted({n for n in (0, step - 1, step, steps - 1) if 0 <= n < steps})
    return derive_seed(repr([[int(sample) for sample in order.batch(epoch, n)] for n in hashed]))


# ---- Lockstep's own orders -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shuffled:
    """Every sample once per epoch, shuffled differently in each epoch. The default of `run.batches`."""

    size: int
    global_batch_size: int
    seed: int
    drop_last: bool = False
    _cached: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)  # of the last epoch

    def __post_init__(self) -> None:
        _check(self)
        check_seed(self.seed)

    def steps(self, epoch: int) -> int:
        return _count(self.size, self.global_batch_size, self.drop_last)

    def batch(self, epoch: int, step: int) -> list[int]:
        _check_step(self, epoch, step)
        make = functools.partial(_permutation, self.size, derive_seed(self.seed, "order", epoch))
        return _slice(_of_epoch(self._cached, epoch, make), self.global_batch_size, step)


@dataclass(frozen=True)
class Sequential:
    """Sample 0, 1, 2, ... in every epoch."""

    size: int
    global_batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def steps(self, epoch: int) -> int:
        return _count(self.size, self.global_batch_size, self.drop_last)

    def batch(self, epoch: int, step: int) -> list[int]:
        _check_step(self, epoch, step)
        return list(range(step * self.global_batch_size, min((step + 1) * self.global_batch_size, self.size)))


@dataclass(frozen=True, eq=False)
class ByLength:
    """Batches of samples of similar length, so that little is padded; every sample once per epoch.

    Samples are shuffled, sorted by length inside pools of `pool` batches, split into batches, and the batches shuffled.
    The incomplete batch, if there is one, is last and a random choice of all lengths, so which samples are dropped or
    come late does not depend on length. A larger pool pads less and mixes less.
    """

    lengths: Sequence[int] | Sequence[float] | Tensor
    global_batch_size: int
    seed: int
    drop_last: bool = False
    pool: int = 50
    _cached: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)  # of the last epoch

    def __post_init__(self) -> None:
        lengths = torch.as_tensor(self.lengths)
        if lengths.dim() != 1:
            raise ValueError(f"ByLength: lengths has shape {tuple(lengths.shape)}; give one number for each sample")
        object.__setattr__(self, "lengths", lengths)
        _check(self)
        check_seed(self.seed)
        if not is_int(self.pool) or self.pool < 1:
            raise ValueError(f"ByLength(pool={self.pool!r}): say how many batches are sorted together, 1 or more")

    @property
    def size(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def fingerprint(self) -> int:
        """32-bit hash of all lengths."""
        return derive_seed(repr(torch.as_tensor(self.lengths).tolist())) % 2**32

    def steps(self, epoch: int) -> int:
        return _count(self.size, self.global_batch_size, self.drop_last)

    def batch(self, epoch: int, step: int) -> list[int]:
        _check_step(self, epoch, step)
        return _slice(_of_epoch(self._cached, epoch, lambda: self._arrange(epoch)), self.global_batch_size, step)

    def _arrange(self, epoch: int) -> Tensor:
        """Return the samples of an epoch, batch after batch."""
        assert isinstance(self.lengths, Tensor)
        shuffled = _permutation(self.size, derive_seed(self.seed, "length", epoch))
        batches = self.size // self.global_batch_size
        full, rest = shuffled[: batches * self.global_batch_size], shuffled[batches * self.global_batch_size :]
        # Two stable sorts: by length, and then by pool, which keeps the samples of a pool sorted by length.
        by_length = torch.argsort(self.lengths[full.long()], stable=True)
        pools = torch.div(by_length, self.pool * self.global_batch_size, rounding_mode="floor")
        arranged = full[by_length[torch.argsort(pools, stable=True)]].view(batches, self.global_batch_size)
        mixed = arranged[_permutation(batches, derive_seed(self.seed, "length batches", epoch)).long()]
        return torch.cat([mixed.flatten(), rest])


@dataclass(frozen=True, eq=False)
class SamplerOrder:
    """The order of a torch `Sampler` (whose samples are split into global batches) or `BatchSampler` (global batches).

    Every worker iterates over the sampler once per epoch, after calling its `set_epoch(epoch)` if it exists. Its random
    numbers follow from (seed, epoch): those that it draws from torch, random and numpy.random, and from a
    `torch.Generator` attribute. So all workers get the same samples, and a run can be resumed inside an epoch.
    """

    sampler: Sampler[Any]
    global_batch_size: int
    seed: int
    drop_last: bool = False
    _cached: dict[int, list[list[int]]] = field(default_factory=dict, init=False, repr=False)  # of the last epoch
    _fingerprints: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for one in _samplers_in(self.sampler):
            if isinstance(one, DistributedSampler):
                raise ValueError(
                    "order= is a DistributedSampler, which gives each worker its own part; Lockstep deals the samples "
                    "out itself: leave it out (samples are shuffled), or give the sampler of a program on one worker"
                )
        its_own = getattr(self.sampler, "batch_size", None)
        if isinstance(self.sampler, BatchSampler) and its_own is not None and its_own != self.global_batch_size:
            raise ValueError(
                f"{self.name} has batches of {its_own}, but global_batch_size={self.global_batch_size}; use one size: "
                "its batches are global ones, and Lockstep deals their samples out"
            )
        if isinstance(self.sampler, BatchSampler):
            object.__setattr__(self, "drop_last", bool(getattr(self.sampler, "drop_last", False)))

    @property
    def name(self) -> str:
        inner = getattr(self.sampler, "sampler", None)
        outer = type(self.sampler).__name__
        return f"{outer}({type(inner).__name__})" if isinstance(inner, Sampler) else outer

    @property
    def _inner(self) -> Any:
        return self.sampler.sampler if type(self.sampler) is BatchSampler else self.sampler

    @property
    def has_equal_epochs(self) -> bool:
        """Whether all epochs are certain to have the same number of steps."""
        known = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
        return type(self._inner) in known  # exact types: a subclass may do anything

    def uses_each_once(self, size: int) -> bool:
        """Whether an epoch is certain to have each of `size` samples exactly once, except for a dropped last batch."""
        one = self._inner
        if type(one) is RandomSampler and one.replacement:
            return False
        return type(one) in (SequentialSampler, RandomSampler) and len(one) == size

    def steps(self, epoch: int) -> int:
        return len(self._batches(epoch))

    def batch(self, epoch: int, step: int) -> list[int]:
        _check_step(self, epoch, step)
        return self._batches(epoch)[step]

    def fingerprint(self, epoch: int) -> int:
        """Return a 63-bit hash of the samples of an epoch in their order."""
        return _of_epoch(self._fingerprints, epoch, lambda: derive_seed(repr(self._batches(epoch))))

    def _batches(self, epoch: int) -> list[list[int]]:
        return _of_epoch(self._cached, epoch, lambda: self._draw(epoch))

    def _draw(self, epoch: int) -> list[list[int]]:
        key = derive_seed(self.seed, "sampler", epoch)
        samplers = _samplers_in(self.sampler)
        own = [value for one in samplers for value in vars(one).values() if isinstance(value, torch.Generator)]
        states = [generator.get_state() for generator in own]
        with preserve_random_state():
            seed_all(key)
            for generator in own:
                generator.manual_seed(key)
            for one in samplers:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
            drawn = list(self.sampler)
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
        if drawn and (isinstance(drawn[0], list | tuple) or getattr(drawn[0], "ndim", 0) == 1):
            return [[operator.index(sample) for sample in batch] for batch in drawn]
        numbers, size = [operator.index(sample) for sample in drawn], self.global_batch_size
        steps = _count(len(numbers), size, self.drop_last)
        return [numbers[step * size : (step + 1) * size] for step in range(steps)]


def _samplers_in(sampler: Any) -> list[Any]:
    """Return the sampler and the samplers that it draws from."""
    inner = [value for value in vars(sampler).values() if isinstance(value, Sampler) and value is not sampler]
    return [sampler, *(one for each in inner for one in _samplers_in(each))]


def check_seed(seed: int) -> None:
    # A key is derived from the printed form: 7, 7.0 and numpy's 7 would be three different seeds.
    if not is_int(seed):
        raise ValueError(f"seed={seed!r} is a {type(seed).__name__}; give a plain int")


def _permutation(size: int, key: int) -> Tensor:
    generator = torch.Generator().manual_seed(key)
    # Both dtypes give the same numbers; int32 saves memory, since every worker has this tensor.
    return torch.randperm(size, generator=generator, dtype=torch.int32 if size < 2**31 else torch.int64)


def _of_epoch(cached: dict[int, T], epoch: int, make: Callable[[], T]) -> T:
    """Return the value for an epoch, from `cached` if possible; only the last one is kept."""
    if epoch not in cached:
        cached.clear()
        cached[epoch] = make()
    return cached[epoch]


def _slice(samples: Tensor, size: int, step: int) -> list[int]:
    numbers: list[int] = samples[step * size : (step + 1) * size].tolist()
    return numbers


def _count(size: int, global_batch_size: int, drop_last: bool) -> int:
    return size // global_batch_size if drop_last else -(-size // global_batch_size)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(order: Shuffled | Sequential | ByLength) -> None:
    for name in ("size", "global_batch_size"):
        value = getattr(order, name)
        if not is_int(value) or value < 1:
            raise ValueError(f"{type(order).__name__}: {name}={value!r}, which must be a whole number of 1 or more")
    if order.drop_last and order.size < order.global_batch_size:
        raise ValueError(
            f"{type(order).__name__}: {order.size} samples make no batch of {order.global_batch_size} with "
            "drop_last=True; use a smaller global_batch_size, or keep the incomplete batch"
        )


def _check_step(order: Order, epoch: int, step: int) -> None:
    steps = order.steps(epoch)
    if not 0 <= step < steps:
        raise ValueError(f"{type(order).__name__}: epoch {epoch} has steps 0 to {steps - 1}, and no step {step}")
