"""What a worker sees of its own steps, and hears of those of the others: times, and how noisy the gradient is.

Nothing of it changes a bit of what is computed. Everybody's figures travel with the table of a later step (tally.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep.train.chronicle import Chronicle
from lockstep.train.noise import NoiseScale, ShardLook, ShardNorms, Unread
from lockstep.train.stopwatch import GPU_EVERY, Stopwatch

FIELDS: Final = 6  # a timed step, how long it waited; a step that was looked at, and the norms of its shards
Facts = dict[str, Any]
NOTHING: Final = (-1.0, 0.0, -1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Sight:
    """What a worker is to look at."""

    writes: bool = False  # of all workers this one writes what all know
    shards: bool = True  # False: their norms could not be compared with those of the batch
    population: int | None = None  # samples of the dataset; None: a stream


class Observer:
    def __init__(self, chronicle: Chronicle, device: torch.device) -> None:
        self.chronicle, self._watch = chronicle, Stopwatch(device)
        self._describe: Callable[[], dict[str, Any]] = dict
        self._shards = ShardLook()
        self._noise = NoiseScale()
        self._batch: tuple[int, float | Tensor, int] | None = None  # step, norm of its gradient, samples
        self._unread: Unread | None = None
        self._mine: ShardNorms | None = None
        self._number, self._began_s = -1, 0.0
        self._writes = self._has_begun = False
        self._looks_at_shards = True

    def share_out(self, describe: Callable[[], dict[str, Any]], *, sees: Sight, **world: Any) -> None:
        """Other workers. `describe()`: buckets and memory, asked for when the first step is done."""
        self._describe, self._writes, self._looks_at_shards = describe, sees.writes, sees.shards
        self._noise.population = sees.population
        self._batch = self._unread = self._mine = None
        self._watch.drop()
        self.chronicle.share_out(**world)

    # -- times -------------------------------------------------------------------------------------------------------

    @property
    def looks_closely(self) -> bool:
        return self._watch.looks

    def top(self, number: int) -> None:
        """Of the loop: a step ends, another begins."""
        if not self._has_begun:
            self.chronicle.begin()
            self._has_begun = True
        if (times := self._watch.cut(number)) is not None:
            self.chronicle.note(times, describe=self._describe)

    def lap(self, name: str, shard: int = -1) -> None:
        self._watch.lap(name, shard)

    def travelled(self, travels: Callable[[], Sequence[tuple[float, float]]]) -> None:
        """All buckets have come."""
        if self._watch.looks_at_buckets:
            for bucket, (left_s, came_s) in enumerate(travels()):
                self._watch.travelled(bucket, left_s, came_s)

    def stepped(self, number: int, loss: float, *, samples: int, epoch: int, facts: Callable[[], Facts]) -> None:
        """A step was taken. `facts`: its learning rate, the norm of its gradient."""
        self.chronicle.step(number, loss, samples=samples, epoch=epoch, facts=facts())
        self.lap("update")

    # -- noise -------------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> Callable[[Sequence[Tensor | None]], None] | None:
        """A step. Returns who wants to see the gradients of its shards, if anybody does."""
        self._number, self._began_s = number, time.monotonic()
        self._shards.begin(number, wanted=self._looks_at_shards)
        return self._shards.see if self._shards.looks else None

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        if self._shards.looks:
            self._shards.end_shard(weight, samples)

    def reduced(self, norm: float | Tensor | None, samples: int, loss_scale: float) -> None:
        """The gradient of the global batch, before clipping."""
        self._batch = None if norm is None else (self._number, norm, samples)
        if self._shards.looks:
            self._unread = self._shards.end(self._number, loss_scale, took_s=time.monotonic() - self._began_s)

    # -- others ------------------------------------------------------------------------------------------------------

    def tell(self) -> Sequence[float]:
        step, waited_s = self.chronicle.tell()
        mine, self._mine = self._mine, None
        if mine is None:
            return [step, waited_s, *NOTHING[2:]]
        return [step, waited_s, float(mine.step), mine.mean_sq, float(mine.shards), float(mine.samples)]

    def hear(self, told: Sequence[Sequence[float]]) -> None:
        """By rank. On a GPU: at a moment when it has gone on."""
        self.chronicle.hear([(row[0], row[1]) for row in told])
        if self._batch is not None:
            step, norm, samples = self._batch
            # To ask a GPU takes a while, so that is done where shards were looked at, and now and then.
            if not isinstance(norm, Tensor) or self._unread is not None or step % GPU_EVERY == 0:
                self._noise.see_batch(step, float(norm), samples)
        if self._unread is not None:
            self._mine, self._unread = self._unread.read(), None
        looked = False
        for row in told:
            if row[2] >= 0 and row[4] > 0:
                self._noise.see_shards(ShardNorms(int(row[2]), row[3], int(row[4]), int(row[5])))
                looked = True
        if looked and self._writes and (facts := self._noise.facts()) is not None:
            self.chronicle.noise(step=self._number, **facts)

    @property
    def noise_scale(self) -> float | None:
        """In samples: the batch size beyond which a larger one pays less and less. None: not known yet."""
        facts = self._noise.facts()
        return facts["scale"] if facts is not None else None


@final
class Blind(Observer):
    """Sees nothing, and costs nothing: for `Run(trace=False)`, and beside the other one in a benchmark."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(Chronicle(None, "", device), device)

    looks_closely = False

    def top(self, number: int) -> None:
        pass

    def lap(self, name: str, shard: int = -1) -> None:
        pass

    def travelled(self, travels: Callable[[], Sequence[tuple[float, float]]]) -> None:
        pass

    def begin(self, number: int) -> None:
        pass

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        pass

    def reduced(self, norm: float | Tensor | None, samples: int, loss_scale: float) -> None:
        pass

    def stepped(self, number: int, loss: float, *, samples: int, epoch: int, facts: Callable[[], Facts]) -> None:
        pass

    def tell(self) -> Sequence[float]:
        return NOTHING

    def hear(self, told: Sequence[Sequence[float]]) -> None:
        pass
