"""Which sums are formed in which order, and that no worker's share of the summands changes it."""

from __future__ import annotations

import pytest

from lockstep.comm.shard_sum import ReduceMethod, choose_method
from lockstep.comm.tree_order import (
    Subtree,
    TreeAccumulator,
    additions,
    is_tree_over_workers,
    one_by_one,
    subtrees,
    tree_pairs,
)
from lockstep.data.sample_order import shards_of_rank


def in_words(size: int) -> str:
    """The whole sum, with its brackets."""
    words = [str(n) for n in range(size)]
    for dst, src in tree_pairs(size):
        words[dst] = f"({words[dst]}+{words[src]})"
    return words[0]


@pytest.mark.parametrize("size", range(1, 41))
def test_workers_form_the_sums_of_the_tree_whatever_their_shares(size: int) -> None:
    for workers in range(1, size + 1):
        nodes, words = [], []
        for rank in range(workers):
            accumulator = TreeAccumulator[str](size, one_by_one(lambda left, right: f"({left}+{right})"))
            for n in shards_of_rank(size, workers, rank):
                accumulator.push(Subtree(n, 1), str(n))
            nodes += [node for node, _ in accumulator.pending]
            words += [word for _, word in accumulator.pending]
        for dst, src in additions(nodes, size):
            words[dst] = f"({words[dst]}+{words[src]})"
        assert words[0] == in_words(size)


def test_the_brackets_of_seven() -> None:
    assert in_words(7) == "(((0+1)+(2+3))+((4+5)+6))"


def test_a_worker_hands_on_what_it_cannot_add() -> None:
    assert subtrees(3, 6, 8) == (Subtree(3, 1), Subtree(4, 2))
    assert subtrees(0, 8, 8) == (Subtree(0, 8),)
    assert subtrees(4, 6, 6) == (Subtree(4, 4),)  # nothing comes after it, so it counts as the whole right half


def test_few_subtrees_are_left() -> None:
    for size in (*range(1, 18), 24, 31, 32, 33, 64):
        for first in range(size):
            for stop in range(first + 1, size + 1):
                assert len(subtrees(first, stop, size)) <= 2 * size.bit_length()


def test_awaiting_tells_what_push_will_add() -> None:
    for size in range(1, 33):
        accumulator = TreeAccumulator[int](size, lambda sums, value: value + sum(sums))
        for n in range(size):
            before, meets = len(accumulator.pending), accumulator.count_merges(Subtree(n, 1))
            accumulator.push(Subtree(n, 1), 1)
            assert len(accumulator.pending) == before - meets + 1
        assert [value for _, value in accumulator.pending] == [size]


@pytest.mark.parametrize(
    ("shards", "workers", "gloo", "shm"),
    [
        (8, 1, ReduceMethod.SINGLE_WORKER, ReduceMethod.SINGLE_WORKER),
        (8, 2, ReduceMethod.ALL_REDUCE, ReduceMethod.ALL_REDUCE),  # two summands have one order
        (8, 3, ReduceMethod.TREE, ReduceMethod.TREE),
        (8, 4, ReduceMethod.TREE, ReduceMethod.ALL_REDUCE),
        (8, 8, ReduceMethod.TREE, ReduceMethod.ALL_REDUCE),
        (6, 2, ReduceMethod.TREE, ReduceMethod.TREE),  # 0+1, 2 | 3, 4+5
        (6, 3, ReduceMethod.TREE, ReduceMethod.ALL_REDUCE),
        (3, 3, ReduceMethod.TREE, ReduceMethod.ALL_REDUCE),
    ],
)
def test_one_all_reduce_where_that_gives_the_same_sums(
    shards: int, workers: int, gloo: ReduceMethod, shm: ReduceMethod
) -> None:
    shares = [shards_of_rank(shards, workers, rank) for rank in range(workers)]
    trees = [subtrees(s.start, s.stop, shards) for s in shares]
    assert choose_method(trees, shards, exact=True, adds_by_tree=False) is gloo
    assert choose_method(trees, shards, exact=True, adds_by_tree=True) is shm
    assert choose_method(trees, shards, exact=False, adds_by_tree=False) is (
        ReduceMethod.SINGLE_WORKER if workers == 1 else ReduceMethod.ALL_REDUCE
    )


def test_the_tree_over_workers_is_recognised_by_its_sums() -> None:
    """Not by the sizes of shares: 8 shards on 7 workers are one each and two for the last, and that fits."""
    trees = [subtrees(s.start, s.stop, 8) for s in (shards_of_rank(8, 7, rank) for rank in range(7))]
    assert is_tree_over_workers(trees, 8)
    assert not is_tree_over_workers([subtrees(0, 1, 4), subtrees(1, 4, 4)], 4)
