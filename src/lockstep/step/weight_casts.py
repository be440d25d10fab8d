"""Copies of weights in a narrow dtype, which all captured passes of a step read instead of casting the weights.

Note [Casts of weights]
Under autocast every forward pass casts the weights that it uses, and every backward pass casts their gradients back: a
quarter of the kernels of a small shard. The weights are the same in all shards of a step. So the casts of an eager pass
are noted, copies in these dtypes are written once per step, and while a forward pass is captured, a cast of a weight
gives its copy. All values are those that the pass itself would have cast, so no bit changes.

If a weight is used in one such cast and nowhere else, its gradient can also be left in the narrow dtype, and widened
when it is read. This is done where one worker has all shards: else buckets of gradients are sent while the pass runs.

A cast whose result a pass writes to is not replaced. Compiled code has its own casts. Without `exact` there are no
copies, since passes with and without them could not be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lockstep import _torch
from lockstep.comm.shard_sum import HALF_DTYPES

CastKey = tuple[int, torch.dtype]  # id of a weight, and the dtype it is cast to


@dataclass(frozen=True)
class Cast:
    """A cast of a weight in one forward pass; `result` is part of its autograd graph."""

    weight: Tensor
    result: Tensor
    version: int  # of the result, as it was made

    @property
    def key(self) -> CastKey:
        return id(self.weight), self.result.dtype

    @property
    def is_written(self) -> bool:
        """Whether the pass has written to the result."""
        return self.result._version != self.version


@final
class WeightCasts:
    """The copies of the weights of a model."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {id(weight): weight for weight in weights}
        self._copies: dict[CastKey, Tensor] = {}
        self._written: set[CastKey] = set()  # casts to whose results a pass writes

    @contextmanager
    def noting(self) -> Iterator[list[Cast]]:
        """Note the casts of weights in a forward pass, in the list that it yields."""
        with self._casting(lambda weight, dtype: None) as made:
            yield made

    def copy(self, casts: Sequence[Cast]) -> bool:
        """Make copies for these casts of an eager pass, unless a pass writes to their results.

        Returns False if this pass writes to one of which there is a copy, which captured passes may read.
        """
        self._written |= {cast.key for cast in casts if cast.is_written}
        for cast in casts:
            if cast.key not in self._written and cast.key not in self._copies:
                self._copies[cast.key] = cast.weight.detach().to(cast.result.dtype)
        return not self._written & self._copies.keys()

    def were_written(self, casts: Sequence[Cast]) -> bool:
        """Whether the pass that has made these casts has written to a copy."""
        return any(cast.is_written and cast.key in self._copies for cast in casts)

    def drop(self) -> None:
        """Drop all copies, and make none any more."""
        self._weights, self._copies = {}, {}

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def refresh(self) -> bool:
        """Write the copies again, from the weights as they are now. Returns False if a weight has another shape now."""
        weights = [self._weights[key].detach() for key, _ in self._copies]
        copies = list(self._copies.values())
        if any(a.shape != b.shape or a.device != b.device for a, b in zip(weights, copies, strict=True)):
            return False
        if copies:
            _torch.foreach_copy_(copies, weights)
        return True

    @contextmanager
    def replacing(self) -> Iterator[list[Cast]]:
        """Let casts of weights in a forward pass give their copies, and note the casts in the list that it yields.

        Nothing is noted without copies, nor if code is compiled, which would be compiled again here.
        """

        def copy_of(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
            copy = self._copies.get((id(weight), dtype))
            return None if copy is None else copy.detach()

        if not self._copies or _torch.has_compiled_code():
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

    Weights with hooks are left out, which must get the gradient of the weight itself.
    """
    users = _users_of_leaves(loss)
    return [
        cast
        for cast in casts
        if users.get(id(cast.weight)) == [cast.result.grad_fn]
        if not cast.is_written and not cast.weight._backward_hooks
    ]


def _users_of_leaves(loss: Tensor) -> dict[int, list[Node]]:
    """Return the nodes of the autograd graph of a loss that use each leaf directly, by the id of the leaf."""
    users, seen = defaultdict[int, list[Node]](list), set[Node]()
    waiting = [loss.grad_fn] if loss.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None and type(following).__name__ == "AccumulateGrad":
                leaf: Any = following
                users[id(leaf.variable)].append(node)
            elif following is not None:
                waiting.append(following)
    return users
