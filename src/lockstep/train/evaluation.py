"""Every sample of a dataset exactly once, in pieces of a fixed size that are dealt out to the workers.

The pieces do not depend on the number of workers, so neither does what the model makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lockstep.data.ahead import put_on
from lockstep.seed import kept_random_state, mix, sow
from lockstep.train.metrics import Pairs, as_pairs
from lockstep.world import World


@dataclass(frozen=True)
class Pieces:
    """How a dataset is cut up, and loaded."""

    dataset: Any
    batch: int  # samples of a piece
    loaders: int = 0  # processes
    collate: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        if not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(f"batch={self.batch!r} must be a whole number, 1 or more")


@dataclass
class Figures:
    """Of this worker's pieces, by number; and how many samples the dataset has."""

    pieces: dict[int, Pairs]
    samples: int = 0


def run(
    figures: Callable[[Any, Any], Any],
    model: nn.Module,
    pieces: Pieces,
    *,
    world: World,
    seed: int,
    go_on: Callable[[], None],
) -> Figures:
    """The model is in eval mode meanwhile. Every piece has random numbers of its own, from loading it on.

    go_on   asked before each piece; raises if the figures are of no use any more
    """
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    found = Figures({})
    try:
        with torch.no_grad(), kept_random_state(world.device):
            for number, data in _load(pieces, world, seed, found):
                go_on()
                returned = figures(model, put_on(world.device, data))
                found.pieces[number] = as_pairs(returned, "the function given to evaluate")
    finally:
        for module in was_training:
            module.training = True
    return found


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def _load(pieces: Pieces, world: World, seed: int, seen: Figures) -> Iterator[tuple[int, Any]]:
    dataset, batch, rank, size = pieces.dataset, pieces.batch, world.rank, world.size
    if is_stream(dataset):
        samples = iter(dataset)
        for number in count():
            sow(mix(seed, "evaluate", number), world.device)
            piece = list(islice(samples, batch))
            if not piece:
                return
            seen.samples += len(piece)
            if number % size == rank:
                yield number, pieces.collate(piece)
    seen.samples = len(dataset)
    in_all = -(-len(dataset) // batch)
    mine = range(rank * in_all // size, (rank + 1) * in_all // size)
    spans = [list(range(n * batch, min((n + 1) * batch, len(dataset)))) for n in mine]
    loader = DataLoader(dataset, batch_sampler=spans, num_workers=pieces.loaders, collate_fn=pieces.collate)
    loaded = iter(loader)
    for number in mine:
        sow(mix(seed, "evaluate", number), world.device)
        yield number, next(loaded)
