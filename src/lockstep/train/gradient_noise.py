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

MEMORY: Final = 1000  # steps: older ones fade
SHARE_OF_TIME: Final = 0.001  # what looking at shards may cost
KEPT: Final = 1 - 1 / MEMORY  # of what was, from one step to the next
RECENT: Final = 8  # steps, until nobody tells of their shards any more
TALK_S: Final = 0.0001  # what it takes to tell the others of a look, and to make something of it
MOST: Final = 1000  # steps from one look to the next


class FadingMean:
    """Of values of some steps."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self._step: int | None = None

    def add(self, step: int, value: float) -> None:
        steps = max(0, step - self._step) if self._step is not None else 0
        faded = KEPT if steps == 1 else KEPT**steps
        self._sum, self._weight, self._step = faded * self._sum + value, faded * self._weight + 1.0, step

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class NoiseScale:
    """From squared norms of mean gradients: over a whole batch, which every step has, and over shards, which some have.

    The noise comes from steps that have both, where chance moves both the same way; then the signal from all steps.
    """

    def __init__(self) -> None:
        self._noise, self._big_sq, self._big = FadingMean(), FadingMean(), FadingMean()
        self._recent: dict[int, tuple[float, int]] = {}  # step -> squared norm, samples
        self.population: int | None = None  # samples of the dataset; None: a stream

    def see_batch(self, step: int, norm: float, samples: int) -> None:
        if math.isfinite(norm):
            self._big_sq.add(step, norm**2)
            self._big.add(step, samples)
            self._recent[step] = (norm**2, samples)
        while self._recent and (oldest := next(iter(self._recent))) < step - RECENT:
            del self._recent[oldest]

    def see_shards(self, norms: ShardNorms) -> None:
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
        # A batch is drawn without putting back: when it is the whole dataset there is no noise left.
        signal = big_sq - noise * (1 / big - (1 / self.population if self.population else 0.0))
        scale = noise / signal if noise > 0 and signal > 0 else None
        return {"batch": big, "noise": noise, "signal": signal, "scale": scale}


@dataclass(frozen=True)
class ShardNorms:
    """Of this worker's shards in one step."""

    step: int
    mean_sq: float  # of the shards' mean gradients
    shards: int
    samples: int  # of all of them
    next: int = 0  # the step in which it would look again


@dataclass(frozen=True)
class Unread:
    """The same, where a GPU may still compute it."""

    step: int
    norms: list[tuple[list[Tensor], float | Tensor, int]]  # of each shard: of all parameters; weight; samples
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


class ShardLook:
    """Takes the norms of single shards' gradients in steps that are so far apart that it costs little.

    In the same ones on all workers, or else everybody would wait for everybody's looks.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self.next = 1  # step in which we look; not 0, which is like no other
        self._cost_s = self._took_s = 0.0
        self._norms: list[tuple[list[Tensor], float | Tensor, int]] = []
        self._values: list[Tensor] = []
        self.looks = False

    def is_due(self, step: int) -> bool:
        return self._wanted and step >= self.next

    def begin(self, step: int) -> None:
        self.looks = self.is_due(step)
        if self.looks:
            self._norms, self._values, self._cost_s = [], [], 0.0

    def see(self, gradients: Sequence[Tensor | None]) -> None:
        """Some more of the shard that is under way."""
        began_s = time.monotonic()
        there = [gradient for gradient in gradients if gradient is not None and gradient.is_floating_point()]
        if there:
            self._values += torch._foreach_norm(there)
        self._cost_s += time.monotonic() - began_s

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        if self._values:
            self._norms.append((self._values, weight, samples))
        self._values = []

    def end(self, step: int, loss_scale: float, *, took_s: float) -> Unread:
        """The step in which we looked is over. Whoever has not heard anything by then looks again after MOST steps."""
        self._took_s, self.next = took_s, step + MOST
        return Unread(step, self._norms, loss_scale)

    def read(self, unread: Unread) -> ShardNorms:
        """A step later, which lets a GPU go on. The next look is to come when it is affordable."""
        began_s = time.monotonic()
        found = unread.read()
        cost_s = TALK_S + self._cost_s + time.monotonic() - began_s
        steps = math.ceil(cost_s / (SHARE_OF_TIME * self._took_s)) if self._took_s > 0 else MOST
        return replace(found, next=unread.step + min(MOST, steps))
