"""Checks every so many steps that the replicas are equal, by a 64-bit digest of each tensor.

They take the same steps from the same weights, so a difference means that a machine computes wrongly, that memory is
corrupted, or that the program does something on one worker only.
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
from lockstep.ddp.replica import cheap_digests, differences
from lockstep.errors import DivergenceError

SHARE_OF_TIME = 0.004  # that comparing may take if `every` is not given; 0.005 is promised
FIRST_CHECKS = (1, 10)  # steps: early, because most mistakes of a program show at once
MIN_EVERY, MAX_EVERY = 10, 1000
MAX_NAMED = 4  # tensors in a message: a wrong gradient shows in the weight and in the optimiser state


class ReplicaCheck:
    """Compares the replicas every `every` steps; None: as often as it costs little. Used by all workers alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, every: int | None) -> None:
        self._group, self._device = group, device
        self.every, self._fixed_every = every, every
        self._steps = 0
        self._cost_s = 0.0
        self._first_check_s: float | None = None

    def after_step(self, number: int, state: Callable[[], Mapping[str, Tensor]], *, now: bool = False) -> None:
        """Call it after every step. `state` returns everything that must be equal, by name. `now`: compare in any case.

        Raises DivergenceError on all workers if something differs.
        """
        self._steps += 1
        if self._is_due() or (now and self._group.size() > 1):
            at = time.perf_counter()
            self.compare(number, state())
            self._cost_s = time.perf_counter() - at
        if self._fixed_every is None and self._steps == FIRST_CHECKS[0]:
            self._first_check_s = time.perf_counter()
        if self._fixed_every is None and self._steps == FIRST_CHECKS[1]:
            self.every = self._choose()

    def _is_due(self) -> bool:
        if self._group.size() == 1:
            return False
        if self.every is None:
            return self._steps in FIRST_CHECKS
        return self._steps % self.every == 0

    def _choose(self) -> int:
        """Choose how often to compare, so that it costs little: the largest interval that any worker needs."""
        assert self._first_check_s is not None
        took_s = time.perf_counter() - self._first_check_s - self._cost_s
        step_s = max(took_s / (FIRST_CHECKS[1] - FIRST_CHECKS[0]), 1e-6)
        wanted = math.ceil(self._cost_s / (SHARE_OF_TIME * step_s))
        choice = torch.tensor([min(max(wanted, MIN_EVERY), MAX_EVERY)], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        abortable_wait.wait(self._group, self._group.allreduce([choice], options), self._device, "run.step")
        return int(choice)

    def compare(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Raise DivergenceError on all workers if the replicas differ, and name the tensors and ranks."""
        digests = cheap_digests(state.values())
        if agreement.all_equal(self._group, agreement.fingerprint([list(state), digests]), device=self._device):
            return
        all_digests = agreement.gather_values(self._group, digests, device=self._device)
        names = agreement.gather_values(self._group, list(state), device=self._device)
        if any(other != names[0] for other in names):
            raise DivergenceError(f"after step {number} the workers do not have the same tensors: {_odd_names(names)}")
        where = differences(all_digests)
        named, more = ", ".join(names[0][n] for n in where[:MAX_NAMED]), len(where) - MAX_NAMED
        wrong = minority(all_digests)
        raise DivergenceError(
            f"after step {number} the replicas are not equal in {named}"
            f"{f' and {more} more tensors' if more > 0 else ''}. {describe_minority(wrong, self._group.size())} "
            "A computation that is not the same on every worker, a write to a tensor on one worker only, or a "
            "faulty machine. Go back to the last checkpoint; Run(audit_every=...) finds operations that do not repeat.",
            wrong,
        )


def minority(digests: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose digests differ from those of more than half of all ranks; [] if there is no majority."""
    all_of = [tuple(mine) for mine in digests]
    value, votes = Counter(all_of).most_common(1)[0]
    return [rank for rank, mine in enumerate(all_of) if mine != value] if 2 * votes > len(all_of) else []


def describe_minority(wrong: Sequence[int], size: int) -> str:
    """Describe which of `size` ranks differ from the majority, if there is one."""
    if not wrong:
        return f"Ranks {', '.join(map(str, range(size)))} do not agree, and no majority tells who is right."
    return f"Rank {', '.join(map(str, wrong))} is wrong: the other {size - len(wrong)} workers agree."


def _odd_names(names: Sequence[Sequence[str]]) -> str:
    for rank, theirs in enumerate(names):
        odd = sorted(set(theirs) ^ set(names[0]))
        if odd:
            return f"{', '.join(odd[:3])} is on one of rank 0 and rank {rank} only"
    return "the same ones, but in another order"
