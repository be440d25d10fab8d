"""Every sample of a dataset exactly once, in pieces of a fixed size that are dealt out to the workers.

The pieces do not depend on the number of workers, so neither does what the model makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lockstep.data.ahead import put_on
from lockstep.train.metrics import Pairs, as_pairs
from lockstep.world import World


@dataclass
class Figures:
    """Of this worker's pieces, by number; and how many samples the dataset has."""

    pieces: dict[int, Pairs]
    samples: int = 0


def run(
    figures: Callable[[Any, Any], Any],
    model: nn.Module,
    dataset: Any,
    *,
    batch: int,
    world: World,
    loaders: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Figures:
    """The model is in eval mode meanwhile."""
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch={batch!r} must be a whole number, 1 or more")
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    found = Figures({})
    try:
        with torch.no_grad():
            for number, data in _pieces(dataset, batch, world, loaders, collate or default_collate, found):
                returned = figures(model, put_on(world.device, data))
                found.pieces[number] = as_pairs(returned, "the function given to evaluate")
    finally:
        for module in was_training:
            module.training = True
    return found


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def _pieces(
    dataset: Any, batch: int, world: World, loaders: int, collate: Callable[[list[Any]], Any], seen: Figures
) -> Iterator[tuple[int, Any]]:
    if is_stream(dataset):
        samples, number = iter(dataset), 0
        while piece := list(islice(samples, batch)):
            seen.samples += len(piece)
            if number % world.size == world.rank:
                yield number, collate(piece)
            number += 1
        return
    seen.samples = len(dataset)
    count = -(-len(dataset) // batch)
    mine = range(world.rank * count // world.size, (world.rank + 1) * count // world.size)
    spans = [range(n * batch, min((n + 1) * batch, len(dataset))) for n in mine]
    loader = DataLoader(dataset, batch_sampler=[list(s) for s in spans], num_workers=loaders, collate_fn=collate)
    yield from zip(mine, loader, strict=True)
