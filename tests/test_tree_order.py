"""Which sums are formed in which order, and that nobody's share of the summands changes it."""

from __future__ import annotations

import pytest

from lockstep.comm.exact_sum import Way, choose_way
from lockstep.comm.tree_order import Gathering, Subtree, additions, is_tree_over_workers, subtrees, tree_pairs
from lockstep.data.sample_order import share


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
            gathering = Gathering[str](size, lambda left, right: f"({left}+{right})")
            for n in share(size, workers, rank):
                gathering.push(Subtree(n, 1), str(n))
            nodes += [node for node, _ in gathering.left]
            words += [word for _, word in gathering.left]
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
        gathering = Gathering[int](size, lambda left, right: left + right)
        for n in range(size):
            before, meets = len(gathering.left), gathering.awaiting(Subtree(n, 1))
            gathering.push(Subtree(n, 1), 1)
            assert len(gathering.left) == before - meets + 1
        assert [value for _, value in gathering.left] == [size]


@pytest.mark.parametrize(
    ("shards", "workers", "gloo", "shm"),
    [
        (8, 1, Way.ALONE, Way.ALONE),
        (8, 2, Way.AT_ONCE, Way.AT_ONCE),  # two summands have one order
        (8, 3, Way.BY_TREE, Way.BY_TREE),
        (8, 4, Way.BY_TREE, Way.AT_ONCE),
        (8, 8, Way.BY_TREE, Way.AT_ONCE),
        (6, 2, Way.BY_TREE, Way.BY_TREE),  # 0+1, 2 | 3, 4+5
        (6, 3, Way.BY_TREE, Way.AT_ONCE),
        (3, 3, Way.BY_TREE, Way.AT_ONCE),
    ],
)
def test_one_all_reduce_where_that_gives_the_same_sums(shards: int, workers: int, gloo: Way, shm: Way) -> None:
    shares = [share(shards, workers, rank) for rank in range(workers)]
    trees = [subtrees(s.start, s.stop, shards) for s in shares]
    assert choose_way(trees, shards, exact=True, adds_by_tree=False) is gloo
    assert choose_way(trees, shards, exact=True, adds_by_tree=True) is shm
    assert choose_way(trees, shards, exact=False, adds_by_tree=False) is (Way.ALONE if workers == 1 else Way.AT_ONCE)


def test_the_tree_over_workers_is_recognised_by_its_sums() -> None:
    """Not by the sizes of shares: 8 shards on 7 workers are one each and two for the last, and that fits."""
    trees = [subtrees(s.start, s.stop, 8) for s in (share(8, 7, rank) for rank in range(7))]
    assert is_tree_over_workers(trees, 8)
    assert not is_tree_over_workers([subtrees(0, 1, 4), subtrees(1, 4, 4)], 4)
