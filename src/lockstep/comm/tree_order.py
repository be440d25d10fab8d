"""The order of additions. Pure functions of the number of summands alone.

Note [Tree order]
A floating-point sum depends on its order. Here adjacent summands are added first, then neighbouring pairs, and so on:
((0+1)+(2+3))+((4+5)+6). The bits are the same on whichever worker the summands are, and whenever they arrive.

Note [Subtrees]
A worker that has several neighbouring summands may add those that form subtrees, and must pass on the others as they
are: of the summands 3, 4, 5 out of eight, 4+5 is a sum of the tree, and 3 must be added to 2, which another worker has.
What remains are subtrees, at most two of each height. They are added by the same rule as the summands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Generic, TypeVar

T = TypeVar("T")


@cache
def tree_rounds(size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return (dst, src) pairs for each round: each dst becomes dst + src. The total ends up at index 0."""
    if size < 1:
        raise ValueError(f"size={size}: a sum needs at least one summand")
    rounds, reach = [], 1
    while reach < size:
        rounds.append(tuple((dst, dst + reach) for dst in range(0, size - reach, 2 * reach)))
        reach *= 2
    return tuple(rounds)


@cache
def tree_pairs(size: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of all rounds, one after the other."""
    return tuple(pair for pairs in tree_rounds(size) for pair in pairs)


@dataclass(frozen=True)
class Subtree:
    """The sum of the summands `start` to `start + reach - 1`; those beyond the last summand are left out."""

    start: int
    reach: int  # a power of two

    def expand(self, size: int) -> Subtree:
        """Return the largest subtree that has the same sum: a node without a right sibling is its parent's sum."""
        node = self
        while node.is_left and node.start + node.reach >= size > node.reach:
            node = Subtree(node.start, 2 * node.reach)
        return node

    @property
    def is_left(self) -> bool:
        return self.start % (2 * self.reach) == 0

    def is_left_sibling_of(self, right: Subtree) -> bool:
        """Whether the tree adds `right` to this subtree."""
        return self.reach == right.reach and self.is_left and right.start == self.start + self.reach


def one_by_one(add: Callable[[T, T], T]) -> Callable[[Sequence[T], T], T]:
    """Return the function that a TreeAccumulator needs, from one that adds a right summand to a left one."""
    return lambda sums, value: reduce(lambda right, left: add(left, right), sums, value)


class TreeAccumulator(Generic[T]):
    """Adds subtrees that are pushed from left to right, as soon as the tree allows."""

    def __init__(self, size: int, add_all: Callable[[Sequence[T], T], T]) -> None:
        """`add_all(sums, value)` returns `value` added to the first of `sums`, the result to the second, and so on."""
        self._size, self._add_all = size, add_all
        self.pending: list[tuple[Subtree, T]] = []  # subtrees that could not be added yet

    def push(self, node: Subtree, value: T) -> None:
        """Add a subtree. It must begin where the one before it ends."""
        node, sums = node.expand(self._size), list[T]()  # as many sums as `count_merges` says
        while self.pending and self.pending[-1][0].is_left_sibling_of(node):
            left, sum_so_far = self.pending.pop()
            node = Subtree(left.start, 2 * left.reach).expand(self._size)
            sums.append(sum_so_far)
        self.pending.append((node, self._add_all(sums, value)))

    def count_merges(self, node: Subtree) -> int:
        """Return to how many of the last pending sums `node` would be added, one after the other."""
        node, count = node.expand(self._size), 0
        for left, _ in reversed(self.pending):
            if not left.is_left_sibling_of(node):
                break
            node, count = Subtree(left.start, 2 * left.reach).expand(self._size), count + 1
        return count


def additions(nodes: Iterable[Subtree], size: int) -> list[tuple[int, int]]:
    """Return how neighbouring subtrees are added: (dst, src) pairs of positions, in order; dst becomes dst + src."""
    pairs: list[tuple[int, int]] = []

    def add(dst: int, src: int) -> int:
        pairs.append((dst, src))
        return dst

    accumulator = TreeAccumulator(size, one_by_one(add))
    for position, node in enumerate(nodes):
        accumulator.push(node, position)
    return pairs


@cache
def subtrees(first: int, stop: int, size: int) -> tuple[Subtree, ...]:
    """Return the subtrees that remain of the summands `first` to `stop - 1` after all possible additions."""
    accumulator: TreeAccumulator[None] = TreeAccumulator(size, lambda sums, value: None)
    for n in range(first, stop):
        accumulator.push(Subtree(n, 1), None)
    return tuple(node for node, _ in accumulator.pending)


def is_tree_over_workers(shares: Sequence[tuple[Subtree, ...]], size: int) -> bool:
    """Whether each worker has one subtree, and the tree over workers adds these as the tree over summands does."""
    if any(len(share) != 1 for share in shares):
        return False
    wanted = set(additions((share[0] for share in shares), size))
    return wanted == set(tree_pairs(len(shares)))
