"""Which sums are formed in which order. Pure, and a function of the number of summands alone.

Note [One order]
A floating-point sum depends on its order. Here neighbours are added first, then neighbouring pairs, and so on:
((0+1)+(2+3))+((4+5)+6). Whoever adds, wherever the summands lie and whenever they come, the bits are the same.

Note [Subtrees]
A worker that holds several neighbouring summands may add those that meet in the tree anyway, and has to hand on the
rest as they are: of the summands 3, 4, 5 out of eight, 4+5 is a sum of the tree, and 3 waits for 2, which another
worker has. What is left are subtrees, at most two of each height. They are added up by the same rule as the summands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")


@cache
def tree_rounds(size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(dst, src) pairs per round: in every round each dst becomes dst + src. The total ends up at 0."""
    if size < 1:
        raise ValueError(f"size={size}: a sum needs at least one summand")
    rounds, reach = [], 1
    while reach < size:
        rounds.append(tuple((dst, dst + reach) for dst in range(0, size - reach, 2 * reach)))
        reach *= 2
    return tuple(rounds)


@cache
def tree_pairs(size: int) -> tuple[tuple[int, int], ...]:
    """The pairs of all rounds, one after the other."""
    return tuple(pair for pairs in tree_rounds(size) for pair in pairs)


@dataclass(frozen=True)
class Subtree:
    """The sum of the summands `start` to `start + reach - 1`, as far as there are so many."""

    start: int
    reach: int  # a power of two

    def grown(self, size: int) -> Subtree:
        """The largest subtree that has the same sum: to a node without a right neighbour nothing is added."""
        node = self
        while node.is_left and node.start + node.reach >= size > node.reach:
            node = Subtree(node.start, 2 * node.reach)
        return node

    @property
    def is_left(self) -> bool:
        return self.start % (2 * self.reach) == 0

    def meets(self, right: Subtree) -> bool:
        """Whether the tree adds these two to each other."""
        return self.reach == right.reach and self.is_left and right.start == self.start + self.reach


class Gathering(Generic[T]):
    """Adds up what comes in, from left to right, as soon as the tree allows."""

    def __init__(self, size: int, add: Callable[[T, T], T]) -> None:
        self._size, self._add = size, add
        self.left: list[tuple[Subtree, T]] = []  # what could not be added yet

    def push(self, node: Subtree, value: T) -> None:
        """Each node must follow the one before."""
        node = node.grown(self._size)
        for _ in range(self.awaiting(node)):
            left, sum_so_far = self.left.pop()
            node = Subtree(left.start, 2 * left.reach).grown(self._size)
            value = self._add(sum_so_far, value)
        self.left.append((node, value))

    def awaiting(self, node: Subtree) -> int:
        """How many of the last sums `node` would be added to, one after the other."""
        node, count = node.grown(self._size), 0
        for left, _ in reversed(self.left):
            if not left.meets(node):
                break
            node, count = Subtree(left.start, 2 * left.reach).grown(self._size), count + 1
        return count


def additions(nodes: Iterable[Subtree], size: int) -> list[tuple[int, int]]:
    """How neighbouring subtrees are added up: pairs of positions, in order; each dst becomes dst + src."""
    pairs: list[tuple[int, int]] = []

    def add(dst: int, src: int) -> int:
        pairs.append((dst, src))
        return dst

    gathering = Gathering(size, add)
    for position, node in enumerate(nodes):
        gathering.push(node, position)
    return pairs


@cache
def subtrees(first: int, stop: int, size: int) -> tuple[Subtree, ...]:
    """What is left of the summands from `first` to before `stop` when all that can be added has been."""
    gathering: Gathering[None] = Gathering(size, lambda left, right: None)
    for n in range(first, stop):
        gathering.push(Subtree(n, 1), None)
    return tuple(node for node, _ in gathering.left)


def is_tree_over_workers(shares: Sequence[tuple[Subtree, ...]], size: int) -> bool:
    """Whether each worker has one subtree, and the tree over workers adds these as the tree over summands does."""
    if any(len(share) != 1 for share in shares):
        return False
    wanted = set(additions((share[0] for share in shares), size))
    return wanted == set(tree_pairs(len(shares)))
