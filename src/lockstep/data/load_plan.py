"""From a dataset and an order to the list of what has to be loaded, and what is wrong with them if they do not fit."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.data.ledger import fingerprint
from lockstep.data.reader import DataError, Failure, Job
from lockstep.data.sample_order import Division, Order, Position, SamplerOrder, Shuffled, count_steps, walk

LOOKED_AT: Final = 4  # samples whose content is compared, of one batch after each start


def make_jobs(
    order: Order, start: Position, epochs: int | None, division: Division, *, size: int, is_compared: bool = False
) -> Iterator[Job | Failure]:
    """Every job from `start` on. An order that fails is a job too: the batches before it are not lost.

    is_compared  the step compares what the order gave to each worker: for an order that is not our own
    """
    is_alone = len(division.mine) == division.shards
    try:
        for position, ends_epoch in walk(order, start, epochs):
            samples = ask(order, position, size)
            job = make_job(samples, position, division, ends_epoch=ends_epoch)
            if position.number == start.number + is_compared and not is_alone:  # the order first, where it is compared
                yield replace(job, looked_at=_some(samples))
            else:
                yield replace(job, content=fingerprint(samples) or 1) if is_compared else job
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else DataError
        # A new one, because it has to go to a loader process and back, which not every exception survives.
        yield Failure(kind(f"{type(order).__name__}, as order of the samples: {error}"), error)


def _some(samples: Sequence[int]) -> tuple[int, ...]:
    """A few of them, spread evenly."""
    count = min(LOOKED_AT, len(samples))
    return tuple(samples[n * len(samples) // count] for n in range(count))


def make_job(samples: Sequence[int], position: Position, division: Division, *, ends_epoch: bool) -> Job:
    shards = tuple((number, samples[places.start : places.stop]) for number, places in division.of(len(samples)))
    return Job(position, ends_epoch, len(samples), division.shards, shards)


def ask(order: Order, position: Position, size: int) -> list[int]:
    """The samples of a batch, after making sure that the dataset has them."""
    who = f"{type(order).__name__}.batch(epoch={position.epoch}, step={position.step})"
    given = order.batch(position.epoch, position.step)
    try:
        samples = list(map(operator.index, given.tolist() if hasattr(given, "tolist") else given))
    except TypeError as error:
        raise ValueError(f"{who} must be a list of sample numbers, not {given!r}") from error
    if not samples:
        raise ValueError(f"{who} has no samples; every batch has one at least")
    if min(samples) < 0 or max(samples) >= size:
        wrong = next(sample for sample in samples if not 0 <= sample < size)
        raise ValueError(f"{who} contains sample {wrong}; the dataset has samples 0 to {size - 1}")
    return samples


def choose_order(
    dataset: Any, global_batch_size: int, drop_last: bool, *, seed: int, order: Order | Sampler[Any] | None
) -> Order | None:
    """The order of this dataset, after checking that the two fit. None: it is a stream, and comes as it comes."""
    kind = type(dataset).__name__
    refuse_loader(dataset)
    # torch gives every dataset, iterable ones too, a __getitem__ that fails.
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        _check_stream(dataset, order)
        return None
    if order is None:
        if len(dataset) < global_batch_size:
            raise ValueError(
                f"the dataset ({kind}) has {len(dataset)} samples, fewer than one global batch of {global_batch_size}; "
                "use a smaller global_batch_size"
            )
        order = Shuffled(len(dataset), global_batch_size, seed, drop_last)
    if isinstance(order, Sampler):
        order = SamplerOrder(order, global_batch_size, seed, drop_last)
    _check_order(order, dataset, global_batch_size, drop_last)
    return order


def refuse_loader(dataset: Any) -> None:
    """It can be iterated over, so it would pass for a stream whose samples are whole batches."""
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "a DataLoader where a dataset belongs: give `loader.dataset`; Lockstep makes the batches, shuffles and "
            "deals them out (the options of a loader are called num_workers=, collate_fn= and drop_last= here, and its "
            "sampler order=)"
        )


def _check_order(order: Order, dataset: Any, global_batch_size: int, drop_last: bool) -> None:
    if not isinstance(order, Order):
        raise ValueError(
            f"order={order!r} is no torch Sampler, and has no steps(epoch) and batch(epoch, step); see "
            "lockstep.data.sample_order.Order"
        )
    kind, size = type(order).__name__, len(dataset)
    # What an order says about itself is taken at its word; it need not say anything.
    if (its_batch := getattr(order, "global_batch_size", global_batch_size)) != global_batch_size:
        raise ValueError(f"{kind} has batches of {its_batch}, but global_batch_size={global_batch_size}; say the same")
    if (its_size := getattr(order, "size", size)) > size:
        raise ValueError(f"{kind} is an order of {its_size} samples, but the dataset has {size}; say the same")
    if drop_last and not getattr(order, "drop_last", False):
        raise ValueError(f"drop_last=True with {kind}, which makes the batches and keeps them all; say it to the order")
    count_steps(order, 0)
    ask(order, Position(), size)


def _check_stream(dataset: Any, order: Order | Sampler[Any] | None) -> None:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__iter__"):
        raise ValueError(
            f"a {kind} is no dataset: it needs __getitem__ and __len__ (map-style), or __iter__ (iterable)"
        )
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"a {kind} can be gone through only once, and not be resumed; "
            "give an object whose __iter__ starts from the beginning each time"
        )
    if order is not None:
        raise ValueError(f"order={order!r} for a {kind}: an iterable dataset has the order it comes in; leave it out")
