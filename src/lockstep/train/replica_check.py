"""Are the replicas still equal? Compared every so many steps, by 64 bits each.

They take the same steps from the same weights, so a difference means that a machine computes wrongly, that memory has
changed by itself, or that a program does something on one worker only.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import abortable_wait, agreement
from lockstep.ddp.state_digest import cheap_digests, differences
from lockstep.errors import DivergenceError

SHARE_OF_TIME = 0.004  # what comparing may cost, if nobody says how often; 0.005 is promised
FIRST_CHECKS = (1, 10)  # steps: early, because most mistakes of a program show at once
LEAST, MOST = 10, 1000
NAMED = 4  # tensors in a message: a wrong gradient shows in the weight and in what the optimiser remembers of it


class ReplicaCheck:
    """Called after every step by all workers."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, every: int | None) -> None:
        self._group, self._device = group, device
        self.every, self._asked = every, every
        self._steps = 0
        self._cost_s = 0.0
        self._started: float | None = None

    def after_step(self, number: int, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """`state`: everything that must be equal, by name."""
        self._steps += 1
        if self._is_due():
            at = time.perf_counter()
            self.compare(number, state())
            self._cost_s = time.perf_counter() - at
        if self._asked is None and self._steps == FIRST_CHECKS[0]:
            self._started = time.perf_counter()
        if self._asked is None and self._steps == FIRST_CHECKS[1]:
            self.every = self._choose()

    def _is_due(self) -> bool:
        if self._group.size() == 1:
            return False
        if self.every is None:
            return self._steps in FIRST_CHECKS
        return self._steps % self.every == 0

    def _choose(self) -> int:
        """So that it costs little. All workers choose the largest that one of them wants."""
        assert self._started is not None
        took_s = time.perf_counter() - self._started - self._cost_s
        step_s = max(took_s / (FIRST_CHECKS[1] - FIRST_CHECKS[0]), 1e-6)
        wanted = math.ceil(self._cost_s / (SHARE_OF_TIME * step_s))
        choice = torch.tensor([min(max(wanted, LEAST), MOST)], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        abortable_wait.wait(self._group, self._group.allreduce([choice], options), self._device, "run.step")
        return int(choice)

    def compare(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Raise on all workers if not all are equal, and name what and who."""
        digests = cheap_digests(state.values())
        if agreement.is_same(self._group, agreement.fingerprint([list(state), digests]), device=self._device):
            return
        everybody = agreement.tell_all(self._group, digests, device=self._device)
        names = agreement.tell_all(self._group, list(state), device=self._device)
        if any(other != names[0] for other in names):
            raise DivergenceError(f"after step {number} the workers do not have the same tensors: {_odd_names(names)}")
        where = differences(everybody)
        named, more = ", ".join(names[0][n] for n in where[:NAMED]), len(where) - NAMED
        raise DivergenceError(
            f"after step {number} the replicas are not equal in {named}"
            f"{f' and {more} more tensors' if more > 0 else ''}. {blame([mine[where[0]] for mine in everybody])} "
            "A computation that is not the same on every worker, a write to a tensor on one worker only, or a "
            "faulty machine. Go back to the last checkpoint; Run(audit_every=...) finds operations that do not repeat."
        )


def blame(digests: Sequence[int]) -> str:
    """Who is wrong, if most agree. Pure."""
    value, votes = Counter(digests).most_common(1)[0]
    if 2 * votes <= len(digests):
        return f"Ranks {', '.join(map(str, range(len(digests))))} do not agree, and no majority tells who is right."
    wrong = [rank for rank, digest in enumerate(digests) if digest != value]
    return f"Rank {', '.join(map(str, wrong))} is wrong: the other {votes} workers agree."


def _odd_names(names: Sequence[Sequence[str]]) -> str:
    for rank, theirs in enumerate(names):
        odd = sorted(set(theirs) ^ set(names[0]))
        if odd:
            return f"{', '.join(odd[:3])} is on one of rank 0 and rank {rank} only"
    return "the same ones, but in another order"
