"""The same bits on any number of workers, on any backend, and after going on with another number of them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from on_workers import on_workers
from runs import PROGRAMS, train, use

WORLDS = [(1, "gloo"), *((n, backend) for backend in ("shm", "gloo") for n in (2, 3, 4, 8)), (4, "hierarchy")]
HALVES = tuple(PROGRAMS)[::2], tuple(PROGRAMS)[1::2]
# `make test` runs half of the programs on two workers, and the other half on three and on two hosts of two.
FAST = {(2, "shm"): (0,), (3, "gloo"): (1,), (4, "hierarchy"): (1,)}


def train_all(rank: int, size: int, backend: str, store: str, names: tuple[str, ...]) -> dict[str, Any]:
    use(backend, store, rank, size)
    return {name: train(PROGRAMS[name]) for name in names}


@functools.cache
def results(size: int, backend: str, half: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_workers(train_all, size, backend, f"{folder}/store", HALVES[half])
    assert all(found == by_rank[0] for found in by_rank), "the workers differ from each other"
    return by_rank[0]


def result(size: int, backend: str, name: str) -> Any:
    return results(size, backend, int(name in HALVES[1]))[name]


def worlds_and_programs() -> list[Any]:
    found = []
    for world in WORLDS[1:]:
        for half, names in enumerate(HALVES):
            marks = [] if half in FAST.get(world, ()) else [pytest.mark.slow]
            found += [pytest.param(world, name, marks=marks, id=f"{world[0]}-{world[1]}-{name}") for name in names]
    return found


@pytest.mark.parametrize(("world", "name"), worlds_and_programs())
def test_any_number_of_workers_gives_the_same_bits(world: tuple[int, str], name: str) -> None:
    assert result(*world, name) == result(1, "gloo", name)


def train_part(rank: int, size: int, backend: str, folder: str, steps: int | None) -> dict[str, Any]:
    use(backend, f"{folder}/store-{size}-{backend}", rank, size)
    names = dict(enumerate(PROGRAMS))
    return {name: train(PROGRAMS[name], steps=steps, directory=Path(folder) / str(n)) for n, name in names.items()}


@functools.cache
def results_of_parts() -> dict[str, Any]:
    """Two steps on two workers, one on three over another backend (each ends inside an epoch), the rest on eight."""
    with tempfile.TemporaryDirectory() as folder:
        for size, backend, steps in ((2, "shm", 2), (3, "gloo", 3), (8, "shm", None)):
            found = on_workers(train_part, size, backend, folder, steps)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_going_on_with_other_numbers_of_workers_gives_the_same_bits(name: str) -> None:
    assert results_of_parts()[name] == result(1, "gloo", name)


def plant(mistake: str, size: int) -> None:
    """Make this worker depend on how many there are."""
    from lockstep.comm import tree_order
    from lockstep.data import sample_order
    from lockstep.step import step

    match mistake:
        case "another order of sums":
            # from left to right, over all that one worker holds
            tree_order.Subtree.is_left_sibling_of = lambda self, right: True
            tree_order.subtrees.cache_clear()
        case "random numbers of workers":
            derive_seed = step.derive_seed
            step.derive_seed = lambda *words: derive_seed(*words, size)
        case "samples dealt out to workers":
            cut = sample_order.shard_ranges
            sample_order.shard_ranges = lambda count, shards: (
                cut(count, shards)[size - 1 :] + cut(count, shards)[: size - 1]
            )


def train_with_mistake(rank: int, size: int, mistake: str) -> list[str]:
    plant(mistake, size)
    names = ["mlp, momentum, uneven last batch", "gpt with dropout and tied weights, AdamW"]
    return [train(PROGRAMS[name], steps=2, check_every=1000)[0] for name in names]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mistake", "shows_in"),
    [
        ("nothing", []),
        ("another order of sums", [0, 1]),
        ("random numbers of workers", [1]),
        ("samples dealt out to workers", [0, 1]),
    ],
)
def test_a_mistake_would_show(mistake: str, shows_in: list[int]) -> None:
    one, two = (on_workers(train_with_mistake, size, mistake)[0] for size in (1, 2))
    assert [n for n in range(2) if one[n] != two[n]] == shows_in
