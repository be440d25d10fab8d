"""The gradient noise scale: how large a batch is worth its samples (McCandlish et al. 2018).

The mean gradient over B samples is the true gradient plus noise whose variance falls with B: E|G_B|^2 = |G|^2 + S/B.
The gradients of single shards give the left side for a small B, their sum over the batch gives it for a large one, and
two equations have two unknowns. S/|G|^2 is the batch size at which noise and gradient are equally large. Far below it,
twice the batch saves almost half of the steps; far above it, hardly any.

Both unknowns are noisy, and their quotient is biased, so they are averaged first, each by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MEMORY: Final = 200  # looks: older ones fade
SHARE_OF_TIME: Final = 0.003  # what looking may cost
MOST: Final = 1000  # steps from one look to the next


@dataclass(frozen=True)
class Look:
    """At one step: squared norms of the mean gradient over few samples (in the mean of several such), and over all."""

    step: int
    small: float  # samples
    big: float
    small_sq: float
    big_sq: float

    @property
    def noise(self) -> float:
        """S: the variance of a single sample's gradient, summed over its elements."""
        return (self.small_sq - self.big_sq) / (1 / self.small - 1 / self.big)

    @property
    def signal(self) -> float:
        """|G|^2. An estimate may be negative."""
        return (self.big * self.big_sq - self.small * self.small_sq) / (self.big - self.small)


class NoiseScale:
    """Averages what was looked at."""

    def __init__(self) -> None:
        self._noise = self._signal = 0.0
        self._looks = 0

    def add(self, look: Look) -> None:
        if not (look.small < look.big and math.isfinite(look.small_sq) and math.isfinite(look.big_sq)):
            return
        self._looks += 1
        share = 1 / min(self._looks, MEMORY)
        self._noise += share * (look.noise - self._noise)
        self._signal += share * (look.signal - self._signal)

    @property
    def samples(self) -> float | None:
        """None: nothing sensible is known yet."""
        return self._noise / self._signal if self._noise > 0 and self._signal > 0 else None


@dataclass(frozen=True)
class ShardNorms:
    """Of this worker's shards in one step."""

    step: int
    mean_sq: float  # of the shards' mean gradients
    shards: int
    samples: int  # of all of them


@dataclass(frozen=True)
class Unread:
    """The same, where a GPU may still compute it."""

    step: int
    norms: list[tuple[Tensor, float | Tensor, int]]  # of each shard: squared, over all parameters; weight; samples
    loss_scale: float

    def read(self) -> ShardNorms | None:
        found = []
        for squared, weight, samples in self.norms:
            divisor = float(weight) * self.loss_scale
            if samples and divisor > 0:
                found.append((float(squared) / divisor**2, samples))
        if not found:
            return None
        mean_sq = sum(value for value, _ in found) / len(found)
        return ShardNorms(self.step, mean_sq, len(found), sum(samples for _, samples in found))


class ShardLook:
    """Takes the norms of single shards' gradients in steps that are so far apart that it costs little."""

    def __init__(self) -> None:
        self._next = 1  # not in step 0, which is like no other
        self._cost_s = 0.0
        self._norms: list[tuple[Tensor, float | Tensor, int]] = []
        self._values: list[Tensor] = []
        self.looks = False

    def begin(self, step: int) -> None:
        self.looks = step >= self._next
        self._norms, self._values, self._cost_s = [], [], 0.0

    def see(self, gradient: Tensor | None) -> None:
        """One more of the shard that is under way."""
        if gradient is not None and gradient.is_floating_point():
            began_s = time.perf_counter()
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            wide = torch.promote_types(values.dtype, torch.float32)
            self._values.append(torch.linalg.vector_norm(values, dtype=wide).double())
            self._cost_s += time.perf_counter() - began_s

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        if self._values:
            self._norms.append((torch.stack(self._values).square().sum(), weight, samples))
        self._values = []

    def end(self, step: int, loss_scale: float, *, took_s: float) -> Unread:
        """The step in which we looked is over. The next look comes when it is affordable."""
        if took_s > 0:
            self._next = step + min(MOST, max(1, math.ceil(self._cost_s / (SHARE_OF_TIME * took_s))))
        return Unread(step, self._norms, loss_scale)


def look_of(told: Sequence[ShardNorms], *, big: float, big_sq: float) -> Look | None:
    """What all workers have seen of one step. None: too little."""
    shards, samples = sum(one.shards for one in told), sum(one.samples for one in told)
    if not shards or samples / shards >= big:
        return None
    small_sq = sum(one.mean_sq * one.shards for one in told) / shards
    return Look(told[0].step, samples / shards, big, small_sq, big_sq)
