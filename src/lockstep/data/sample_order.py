"""Which samples make up which batch, and who runs them. Pure: nothing here knows a dataset, a process or a device.

(seed, epoch, step, shard, i) -> sample number. An `Order` says which samples a global batch has; `cut` gives each shard
its positions in the batch; `share` gives each worker its shards. The number of workers enters in `share` alone, so it
decides who loads a sample and never which batch or shard the sample is in.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

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

from lockstep.seed import kept_random_state, mix, sow


@runtime_checkable
class Order(Protocol):
    """What a custom order has to offer. Both are functions of their arguments alone: workers ask each for itself."""

    def steps(self, epoch: int) -> int:
        """How many global batches this epoch has."""

    def batch(self, epoch: int, step: int) -> Sequence[int]:
        """The sample numbers of one global batch. Batches may differ in size, and none is empty."""


@dataclass(frozen=True)
class Position:
    """The place of a batch: its epoch, its step in there, and how many batches come before it in all."""

    epoch: int = 0
    step: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        for name in ("epoch", "step", "number"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                raise ValueError(f"Position({name}={value!r}): batches are counted 0, 1, 2, ...")

    def after(self, *, ends_epoch: bool) -> Position:
        if ends_epoch:
            return Position(self.epoch + 1, 0, self.number + 1)
        return Position(self.epoch, self.step + 1, self.number + 1)


def cut(count: int, shards: int) -> list[range]:
    """The positions of each shard in a batch of `count` samples.

    Sizes differ by one at most. The larger shards, or with few samples the ones that are not empty, are spread evenly
    over the numbers: so is then the work over the workers.
    """
    return [range(shard * count // shards, (shard + 1) * count // shards) for shard in range(shards)]


def share(shards: int, workers: int, rank: int) -> range:
    """The shards that a worker runs, one after the other."""
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
    """Who gets what of a batch: the shards that are wanted here, each on its own or joined into one."""

    shards: int
    mine: Sequence[int]
    joined: bool = False

    def of(self, count: int) -> list[tuple[int, range]]:
        """(shard number, its positions in a batch of `count`). Joined shards go by the number of the first."""
        cuts = cut(count, self.shards)
        if self.joined:
            return [(self.mine[0], range(cuts[self.mine[0]].start, cuts[self.mine[-1]].stop))]
        return [(number, cuts[number]) for number in self.mine]

    def of_part(self, count: int) -> list[tuple[int, range]]:
        """The same for `count` samples that are all for the shards wanted here."""
        if self.joined:
            return [(self.mine[0], range(count))]
        return list(zip(self.mine, cut(count, len(self.mine)), strict=True))


def walk(order: Order, start: Position, epochs: int | None) -> Iterator[tuple[Position, bool]]:
    """Every place from `start` on, and whether it is the last of its epoch. Endless if `epochs` is None."""
    here = start
    while epochs is None or here.epoch < epochs:
        last = count_steps(order, here.epoch) - 1
        yield here, here.step >= last
        here = here.after(ends_epoch=here.step >= last)


def count_steps(order: Order, epoch: int) -> int:
    steps = order.steps(epoch)
    if not _is_int(steps) or steps < 1:
        raise ValueError(f"{_name(order)}.steps({epoch}) is {steps!r}; an epoch has at least one batch")
    return steps


def count_all_steps(order: Order, epochs: int) -> int | None:
    """Of that many epochs. All are alike in the orders of the house; in another one each is asked for.

    None for a sampler whose epochs may differ: going through all of them beforehand would take long.
    """
    if isinstance(order, SamplerOrder):
        return epochs * count_steps(order, 0) if order.has_equal_epochs else None
    if isinstance(order, Shuffled | Sequential | ByLength):
        return epochs * count_steps(order, 0)
    return sum(count_steps(order, epoch) for epoch in range(epochs))


def name_order(order: Order, *, samples: int, seed: int) -> str:
    """The class of an order, and of its settings those that are not what a run of `samples` and `seed` has anyway.

    Two orders of the house with the same name give the same samples at the same place, but for a dropped last batch.
    """
    if isinstance(order, SamplerOrder):
        return order.name
    usual = {"size": samples, "seed": seed, "pool": ByLength.pool}
    known = ("size", "seed", "pool") if isinstance(order, Shuffled | Sequential | ByLength) else ()
    said = [(name, getattr(order, name)) for name in known if getattr(order, name, usual[name]) != usual[name]]
    if isinstance(order, ByLength):
        said.append(("lengths", f"{order.fingerprint:x}"))
    return _name(order) + (f"({', '.join(f'{name}={value}' for name, value in said)})" if said else "")


def fingerprint_of(order: Order, epoch: int, step: int) -> int | None:
    """63 bits of the samples of an epoch in their order, before and at `step`; None: the name of the order tells.

    A sampler is gone through anyway. Of another order four batches are looked at: the first and the last of the epoch,
    and the two around `step`.
    """
    if isinstance(order, SamplerOrder):
        return order.fingerprint(epoch)
    if isinstance(order, Shuffled | Sequential | ByLength):
        return None
    steps = count_steps(order, epoch)
    looked_at = sorted({n for n in (0, step - 1, step, steps - 1) if 0 <= n < steps})
    return mix(repr([[int(sample) for sample in order.batch(epoch, n)] for n in looked_at]))


# ---- the orders that come with the house -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shuffled:
    """Every sample once per epoch, in an order that is another one in each epoch. `run.batches` uses it by itself."""

    size: int
    global_batch_size: int
    seed: int
    drop_last: bool = False
    _kept: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)  # the last epoch

    def __post_init__(self) -> None:
        _check(self, size=self.size, global_batch_size=self.global_batch_size, drop_last=self.drop_last)
        check_seed(self.seed)

    def steps(self, epoch: int) -> int:
        return _count(self.size, self.global_batch_size, self.drop_last)

    def batch(self, epoch: int, step: int) -> list[int]:
        _check_step(self, epoch, step)
        if epoch not in self._kept:
            self._kept.clear()
            self._kept[epoch] = _permutation(self.size, mix(self.seed, "order", epoch))
        return _as_list(self._kept[epoch][step * self.global_batch_size : (step + 1) * self.global_batch_size])


@dataclass(frozen=True)
class Sequential:
    """Sample 0, 1, 2, ... in every epoch."""

    size: int
    global_batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        _check(self, size=self.size, global_batch_size=self.global_batch_size, drop_last=self.drop_last)

    def steps(self, epoch: int) -> int:
        return _count(self.size, self.global_batch_size, self.drop_last)

    def batch(self, epoch: int, step: int) -> list[int]:
        _check_step(self, epoch, step)
        return list(range(step * self.global_batch_size, min((step + 1) * self.global_batch_size, self.size)))


@dataclass(frozen=True, eq=False)
class ByLength:
    """Batches of samples of similar length, so that little is padded; every sample once per epoch.

    Samples are shuffled, sorted by length inside pools of `pool` batches, cut, and the batches shuffled. The incomplete
    batch, if there is one, is a random pick of all lengths and comes last: what is dropped or comes late has nothing to
    do with length. A larger pool pads less and mixes less.
    """

    lengths: Sequence[int] | Sequence[float] | Tensor
    global_batch_size: int
    seed: int
    drop_last: bool = False
    pool: int = 50
    _kept: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)  # the last epoch

    def __post_init__(self) -> None:
        lengths = torch.as_tensor(self.lengths)
        if lengths.dim() != 1:
            raise ValueError(f"ByLength: lengths has shape {tuple(lengths.shape)}; give one number for each sample")
        object.__setattr__(self, "lengths", lengths)
        _check(self, size=self.size, global_batch_size=self.global_batch_size, drop_last=self.drop_last)
        check_seed(self.seed)
        if not _is_int(self.pool) or self.pool < 1:
            raise ValueError(f"ByLength(pool={self.pool!r}): say how many batches are sorted together, 1 or more")

    @property
    def size(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def fingerprint(self) -> int:
        """32 bits of all lengths."""
        return mix(repr(torch.as_tensor(self.lengths).tolist())) % 2**32

    def steps(self, epoch: int) -> int:
        return _count(self.size, self.global_batch_size, self.drop_last)

    def batch(self, epoch: int, step: int) -> list[int]:
        _check_step(self, epoch, step)
        if epoch not in self._kept:
            self._kept.clear()
            self._kept[epoch] = self._arrange(epoch)
        return _as_list(self._kept[epoch][step * self.global_batch_size : (step + 1) * self.global_batch_size])

    def _arrange(self, epoch: int) -> Tensor:
        """The samples of an epoch, batch after batch."""
        assert isinstance(self.lengths, Tensor)
        shuffled = _permutation(self.size, mix(self.seed, "length", epoch))
        batches = self.size // self.global_batch_size
        full, rest = shuffled[: batches * self.global_batch_size], shuffled[batches * self.global_batch_size :]
        # Two stable sorts: by length, and then back into pools with the lengths in order inside.
        by_length = torch.argsort(self.lengths[full.long()], stable=True)
        pools = torch.div(by_length, self.pool * self.global_batch_size, rounding_mode="floor")
        arranged = full[by_length[torch.argsort(pools, stable=True)]].view(batches, self.global_batch_size)
        mixed = arranged[_permutation(batches, mix(self.seed, "length batches", epoch)).long()]
        return torch.cat([mixed.flatten(), rest])


@dataclass(frozen=True, eq=False)
class SamplerOrder:
    """The order of a torch `Sampler` (of samples, cut into global batches) or `BatchSampler` (of global batches).

    The sampler is gone through once per epoch, on every worker, after `set_epoch(epoch)` if it has that. Its random
    numbers follow from (seed, epoch): those that it draws from torch, random and numpy.random, and from a
    `torch.Generator` that it holds. So all workers get the same samples, and a run can be resumed inside an epoch.
    """

    sampler: Sampler[Any]
    global_batch_size: int
    seed: int
    drop_last: bool = False
    _kept: dict[int, list[list[int]]] = field(default_factory=dict, init=False, repr=False)  # the last epoch
    _prints: dict[int, int] = field(default_factory=dict, init=False, repr=False)

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
                f"{self.name} has batches of {its_own}, but global_batch_size={self.global_batch_size}; say the same: "
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
        """Whether an epoch is certain to have each of `size` samples exactly once, but for a dropped last batch."""
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
        """63 bits of the samples of an epoch in their order."""
        batches = self._batches(epoch)
        if epoch not in self._prints:
            self._prints.clear()
            self._prints[epoch] = mix(repr(batches))
        return self._prints[epoch]

    def _batches(self, epoch: int) -> list[list[int]]:
        if epoch not in self._kept:
            self._kept.clear()
            self._kept[epoch] = self._draw(epoch)
        return self._kept[epoch]

    def _draw(self, epoch: int) -> list[list[int]]:
        key = mix(self.seed, "sampler", epoch)
        samplers = _samplers_in(self.sampler)
        own = [value for one in samplers for value in vars(one).values() if isinstance(value, torch.Generator)]
        states = [generator.get_state() for generator in own]
        with kept_random_state():
            sow(key)
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
    """The sampler, and those that it draws from."""
    inner = [value for value in vars(sampler).values() if isinstance(value, Sampler) and value is not sampler]
    return [sampler, *(one for each in inner for one in _samplers_in(each))]


def check_seed(seed: int) -> None:
    # A key is made of what is printed: 7, 7.0 and numpy's 7 would be three seeds.
    if not _is_int(seed):
        raise ValueError(f"seed={seed!r} is a {type(seed).__name__}; give a plain int")


def _permutation(size: int, key: int) -> Tensor:
    generator = torch.Generator().manual_seed(key)
    # The same numbers in both types; a large dataset has this tensor on every worker.
    return torch.randperm(size, generator=generator, dtype=torch.int32 if size < 2**31 else torch.int64)


def _as_list(samples: Tensor) -> list[int]:
    numbers: list[int] = samples.tolist()
    return numbers


def _count(size: int, global_batch_size: int, drop_last: bool) -> int:
    return size // global_batch_size if drop_last else -(-size // global_batch_size)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name(order: Order) -> str:
    return type(order).__name__


def _check(order: Order, *, size: int, global_batch_size: int, drop_last: bool) -> None:
    for name, value in (("size", size), ("global_batch_size", global_batch_size)):
        if not _is_int(value) or value < 1:
            raise ValueError(f"{_name(order)}: {name}={value!r}, which must be a whole number of 1 or more")
    if drop_last and size < global_batch_size:
        raise ValueError(
            f"{_name(order)}: {size} samples make no batch of {global_batch_size} with drop_last=True; "
            "use a smaller global_batch_size, or keep the incomplete batch"
        )


def _check_step(order: Order, epoch: int, step: int) -> None:
    steps = order.steps(epoch)
    if not 0 <= step < steps:
        raise ValueError(f"{_name(order)}: epoch {epoch} has steps 0 to {steps - 1}, and no step {step}")
