"""Which sums are formed in which order. Pure, and a function of the number of summands alone.

Note [One order]
A floating-point sum depends on its order. Here neighbours are added first, then neighbouring pairs, and so on:
((0+1)+(2+3))+((4+5)+6). Whoever adds, wherever the summands lie and whenever they come, the bits are the same.
"""

from __future__ import annotations

from functools import cache


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
