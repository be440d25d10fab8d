"""The gradient noise scale: how large a batch is worth its samples (McCandlish et al. 2018).

The mean gradient over B samples is the true gradient plus noise whose variance falls with B: E|G_B|^2 = |G|^2 + S/B.
The gradients of single shards give the left side for a small B, their sum over the batch gives it for a large one, and
two equations have two unknowns. G is the gradient over the dataset that the run has. S/|G|^2 is the batch size at which
noise and gradient are equally large. Far below it, twice the batch saves almost half of the steps; far above, hardly
any.

Both unknowns are noisy, and their quotient is biased, so they are averaged first, each by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from lockstep import _torch

AVERAGED_STEPS: Final = 1000  # steps over which means are taken, with exponential decay
SHARE_OF_TIME: Final = 0.001  # that sampling the norms of shards may take
DECAY: Final = 1 - 1 / AVERAGED_STEPS  # of older values, per step
RECENT_STEPS: Final = 8  # the norms of the shards of a step arrive at most this many steps later
EXCHANGE_S: Final = 0.0001  # cost of sending the norms of one step to the others and of processing theirs
MAX_STEPS_APART: Final = 1000  # at most, between two sampled steps


class FadingMean:
    """An exponentially decaying mean of values of some steps."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self._step: int | None = None

    def add(self, step: int, value: float) -> None:
        steps = max(0, step - self._step) if self._step is not None else 0
        faded = DECAY if steps == 1 else DECAY**steps
        self._sum, self._weight, self._step = faded * self._sum + value, faded * self._weight + 1.0, step

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class NoiseScale:
    """Estimates the noise scale from squared norms of mean gradients: of batches, in all steps, and of shards, in some.

    The noise is estimated from steps that have both norms, whose random errors go the same way; then the signal from
    all steps.
    """

    def __init__(self) -> None:
        self._noise, self._big_sq, self._big = FadingMean(), FadingMean(), FadingMean()
        self._recent: dict[int, tuple[float, int]] = {}  # step -> squared norm, samples
        self.population: int | None = None  # samples of the dataset; None: a stream

    def add_batch(self, step: int, norm: float, samples: int) -> None:
        if math.isfinite(norm):
            self._big_sq.add(step, norm**2)
            self._big.add(step, samples)
            self._recent[step] = (norm**2, samples)
        while self._recent and (oldest := next(iter(self._recent))) < step - RECENT_STEPS:
            del self._recent[oldest]

    def add_shards(self, norms: ShardNorms) -> None:
        if norms.step not in self._recent or not math.isfinite(norms.mean_sq):
            return
        (big_sq, big), small = self._recent[norms.step], norms.samples / norms.shards
        if small < big:
            self._noise.add(norms.step, (norms.mean_sq - big_sq) / (1 / small - 1 / big))

    def facts(self) -> dict[str, float | None] | None:
        """`noise` is S, `signal` |G|^2, of which an estimate may be negative; then `scale` is None."""
        noise, big_sq, big = self._noise.value, self._big_sq.value, self._big.value
        if noise is None or big_sq is None or big is None:
            return None
        # Batches are drawn without replacement: if the batch is the whole dataset there is no noise.
        signal = big_sq - noise * (1 / big - (1 / self.population if self.population else 0.0))
        scale = noise / signal if noise > 0 and signal > 0 else None
        return {"batch": big, "noise": noise, "signal": signal, "scale": scale}


@dataclass(frozen=True)
class ShardNorms:
    """The norms of the gradients of this worker's shards in one step."""

    step: int
    mean_sq: float  # mean over the shards of the squared norm of the mean gradient of a shard
    shards: int
    samples: int  # of all these shards
    next: int = 0  # the step in which this worker would sample again


@dataclass(frozen=True)
class PendingShardNorms:
    """Shard norms that a GPU may still be computing."""

    step: int
    norms: list[tuple[list[Tensor], float | Tensor, int]]  # for each shard: norms of the parameters, weight, samples
    loss_scale: float

    def read(self) -> ShardNorms:
        found = []
        whole = torch.stack([value for values, _, _ in self.norms for value in values]).tolist() if self.norms else []
        for values, weight, samples in self.norms:
            mine, whole = whole[: len(values)], whole[len(values) :]
            divisor = float(weight) * self.loss_scale
            if samples and divisor > 0:
                found.append((math.fsum((value / divisor) ** 2 for value in mine), samples))
        mean_sq = sum(value for value, _ in found) / max(1, len(found))
        return ShardNorms(self.step, mean_sq, len(found), sum(samples for _, samples in found))


class ShardNormSampler:
    """Computes the norms of the gradients of single shards, in steps that are so far apart that it costs little.

    All workers sample in the same steps; otherwise each would wait for the others in turn.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.next = 1  # the next step to sample; not 0, which is not typical
        self._cost_s = self._step_s = 0.0
        self._norms: list[tuple[list[Tensor], float | Tensor, int]] = []
        self._values: list[Tensor] = []
        self.is_sampling = False

    def is_due(self, step: int) -> bool:
        return self._enabled and step >= self.next

    def begin(self, step: int) -> None:
        self.is_sampling = self.is_due(step)
        if self.is_sampling:
            self._norms, self._values, self._cost_s = [], [], 0.0

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add more gradients of the current shard."""
        began_s = time.monotonic()
        there = [gradient for gradient in gradients if gradient is not None and gradient.is_floating_point()]
        if there:
            self._values += _torch.foreach_norm(there)
        self._cost_s += time.monotonic() - began_s

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        if self._values:
            self._norms.append((self._values, weight, samples))
        self._values = []

    def end(self, step: int, loss_scale: float, *, took_s: float) -> PendingShardNorms:
        """End a sampled step. Unless the workers agree on an earlier one, the next follows MAX_STEPS_APART later."""
        self._step_s, self.next = took_s, step + MAX_STEPS_APART
        return PendingShardNorms(step, self._norms, loss_scale)

    def read(self, pending: PendingShardNorms) -> ShardNorms:
        """Read the norms, one step later, so as not to wait for a GPU. `next` is set so that the cost is affordable."""
        began_s = time.monotonic()
        found = pending.read()
        cost_s = EXCHANGE_S + self._cost_s + time.monotonic() - began_s
        steps = math.ceil(cost_s / (SHARE_OF_TIME * self._step_s)) if self._step_s > 0 else MAX_STEPS_APART
        return replace(found, next=pending.step + min(MAX_STEPS_APART, steps))
