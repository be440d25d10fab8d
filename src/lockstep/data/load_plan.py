"""Makes the sequence of load requests from a dataset and a sample order, after checking that the two fit."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.data.ledger import fingerprint
from lockstep.data.reader import DataError, LoadFailure, LoadRequest
from lockstep.data.sample_order import Division, Order, Position, SamplerOrder, Shuffled, count_steps, positions_from

COMPARED_SAMPLES: Final = 4  # samples whose content all workers compare, in one batch after each start


def plan_requests(
    order: Order, start: Position, epochs: int | None, division: Division, *, size: int, is_compared: bool = False
) -> Iterator[LoadRequest | LoadFailure]:
    """Yield every request from `start` on. An error of the order ends them, as a LoadFailure after earlier batches.

    is_compared  the step compares the order between workers; for orders that are not Lockstep's own
    """
    is_alone = len(division.mine) == division.shards
    try:
        for position, ends_epoch in positions_from(order, start, epochs):
            samples = batch_samples(order, position, size)
            request = make_request(samples, position, division, ends_epoch=ends_epoch)
            # One batch compares the content of samples; if the order is compared, that is the second batch.
            if position.number == start.number + is_compared and not is_alone:
                yield replace(request, compared=_some(samples))
            else:
                yield replace(request, content=fingerprint(samples) or 1) if is_compared else request
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else DataError
        # A new exception, because it is sent to a loader process and back, and not every exception can be pickled.
        yield LoadFailure(kind(f"{type(order).__name__}, as order of the samples: {error}"), error)


def _some(samples: Sequence[int]) -> tuple[int, ...]:
    """Return a few samples, evenly spaced."""
    count = min(COMPARED_SAMPLES, len(samples))
    return tuple(samples[n * len(samples) // count] for n in range(count))


def make_request(samples: Sequence[int], position: Position, division: Division, *, ends_epoch: bool) -> LoadRequest:
    shards = tuple((number, samples[places.start : places.stop]) for number, places in division.of(len(samples)))
    return LoadRequest(position, ends_epoch, len(samples), division.shards, shards)


def batch_samples(order: Order, position: Position, size: int) -> list[int]:
    """Return the sample numbers of a batch. Raises ValueError if the order returns anything that the dataset lacks."""
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
    """Return the sample order for this dataset; None for a stream, which has its own.

    Raises ValueError if `dataset` is not a dataset, or if `order` does not fit it.
    """
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
    """Raise ValueError for a DataLoader: it is iterable, and would be taken for a stream of whole batches."""
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
    # These attributes of an order are optional.
    if (its_batch := getattr(order, "global_batch_size", global_batch_size)) != global_batch_size:
        raise ValueError(
            f"{kind} has batches of {its_batch}, but global_batch_size={global_batch_size}; make them equal"
        )
    if (its_size := getattr(order, "size", size)) > size:
        raise ValueError(f"{kind} is an order of {its_size} samples, but the dataset has {size}; make them equal")
    if drop_last and not getattr(order, "drop_last", False):
        raise ValueError(
            f"drop_last=True with {kind}, which makes the batches and keeps them all; give it to the order"
        )
    count_steps(order, 0)
    batch_samples(order, Position(), size)


def _check_stream(dataset: Any, order: Order | Sampler[Any] | None) -> None:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__iter__"):
        raise ValueError(
            f"a {kind} is no dataset: it needs __getitem__ and __len__ (map-style), or __iter__ (iterable)"
        )
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"a {kind} can be iterated over only once, and not be resumed; "
            "give an object whose __iter__ starts from the beginning each time"
        )
    if order is not None:
        raise ValueError(f"order={order!r} for a {kind}: an iterable dataset has the order it comes in; leave it out")
