"""Copies of weights in a narrow dtype, which all captured passes of a step read instead of casting the weights.

Note [Casts of weights]
Under autocast every forward pass casts the weights that it uses, and every backward pass casts their gradients back: a
quarter of the kernels of a small shard. The weights are the same in all shards of a step. So the casts of an eager pass
are noted, copies in these dtypes are written once per step, and while a forward pass is captured, a cast of a weight
gives its copy. If a weight is used in one such cast and nowhere else, its gradient is left in the narrow dtype, and is
widened when it is read. All values are those that the pass itself would have cast, so no bit changes.

A cast whose result the pass writes to is not replaced. Compiled code has its own casts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.comm.shard_sum import HALF_DTYPES


@dataclass(frozen=True)
class Cast:
    """A cast of a weight in one forward pass; `result` is part of its autograd graph."""

    weight: Tensor
    result: Tensor
    version: int  # of the result, as it was made

    @property
    def is_written(self) -> bool:
        """Whether the pass has written to the result."""
        return self.result._version != self.version


@final
class WeightCasts:
    """The copies of the weights of a model."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {id(weight): weight for weight in weights}
        self._copies: dict[tuple[int, torch.dtype], Tensor] = {}

    @contextmanager
    def noting(self) -> Iterator[list[Cast]]:
        """Note the casts of weights in a forward pass, in the list that it yields."""
        with self._casting(lambda weight, dtype: None) as made:
            yield made

    def copy(self, casts: Sequence[Cast]) -> None:
        """Make copies for these casts of an eager pass, unless the pass has written to their results."""
        for cast in casts:
            key = id(cast.weight), cast.result.dtype
            if cast.is_written:
                self._copies.pop(key, None)
            elif key not in self._copies:
                self._copies[key] = cast.weight.detach().to(cast.result.dtype)

    def drop(self) -> None:
        self._weights, self._copies = {}, {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def refresh(self) -> None:
        """Write the copies again, from the weights as they are now."""
        if self._copies:
            weights = [self._weights[key].detach() for key, _ in self._copies]
            _torch.foreach_copy_(list(self._copies.values()), weights)

    @contextmanager
    def replacing(self) -> Iterator[list[Cast]]:
        """Let casts of weights in a forward pass give their copies, and note them, unless there are no copies."""

        def copy_of(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
            copy = self._copies.get((id(weight), dtype))
            return None if copy is None else copy.detach()

        if not self._copies:
            yield []
            return
        with self._casting(copy_of) as made:
            yield made

    @contextmanager
    def _casting(self, copy_of: Callable[[Tensor, torch.dtype], Tensor | None]) -> Iterator[list[Cast]]:
        made = list[Cast]()

        def note(weight: Tensor, result: Tensor) -> None:
            if id(weight) in self._weights:
                made.append(Cast(weight, result, result._version))

        with _torch.replace_casts(HALF_DTYPES, copy_of, note):
            yield made


def only_uses(loss: Tensor, casts: Sequence[Cast]) -> list[Cast]:
    """Return those of the casts that are the only use of their weight in the autograd graph of a loss.

    Weights with hooks of the program are left out: these must get the gradient of the weight itself.
    """
    uses, times = _count_uses(loss), Counter(id(cast.weight) for cast in casts)
    return [
        cast
        for cast in casts
        if cast.result.grad_fn is not None and uses[id(cast.weight)] == times[id(cast.weight)] == 1
        if not cast.is_written
        if not cast.weight._backward_hooks and not getattr(cast.weight, "_post_accumulate_grad_hooks", None)
    ]


def _count_uses(loss: Tensor) -> Counter[int]:
    """Return how often each leaf is used in the autograd graph of a loss, by id."""
    found, seen, waiting = Counter[int](), set[object](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is None:
                waiting.append(following)
            else:
                found[id(leaf)] += 1
    return found
