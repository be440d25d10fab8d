"""What a worker sees of its own steps, and hears of those of the others: times, and how noisy the gradient is.

Nothing of it changes a bit of what is computed. Everybody's figures travel with the table of a later step (tally.py).
Most short steps are not looked at (see Note [Steps that are timed]). In those an observer sleeps, once all have told
each other what they saw in the last one that was; so all of them are awake in the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep.train.gradient_noise import NoiseScale, ShardLook, ShardNorms, Unread
from lockstep.train.step_timer import GPU_EVERY, Stopwatch
from lockstep.train.trace_writer import Chronicle

FIELDS: Final = 8  # a timed step, how long it waited and took; a step that was looked at, the norms of its shards
TALK, GPU_TALK = 2, 6  # steps, until all have heard what was seen in one; a GPU may be some behind
Facts = dict[str, Any]
NOTHING: Final = (-1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0)


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
        self._shards = ShardLook(wanted=True)
        self._noise = NoiseScale()
        self._norm: tuple[int, float | Tensor, int] | None = None  # of the last step's gradient: step, norm, samples
        self._on_gpu = device.type == "cuda"
        self._talk = GPU_TALK if self._on_gpu else TALK
        self._talks_until = 0  # a step
        self._unread: Unread | None = None
        self._mine: ShardNorms | None = None
        self._number, self._began_s = -1, 0.0
        self._writes = self._has_begun = False
        self.of_step: Observer = self  # who is to look at this step: nobody, while we sleep

    def share_out(self, describe: Callable[[], dict[str, Any]], *, sees: Sight, **world: Any) -> None:
        """Other workers. `describe()`: buckets and memory, asked for when the first step is done."""
        self._describe, self._writes = describe, sees.writes
        self._noise.population = sees.population
        self._norm = self._unread = self._mine = None
        self._shards, self.of_step = ShardLook(wanted=sees.shards), self
        known = self._watch.know()  # of the steps that were taken
        self._watch.drop()
        self.chronicle.share_out(known, **world)

    # -- times -------------------------------------------------------------------------------------------------------

    @property
    def looks_closely(self) -> bool:
        return self._watch.looks

    def top(self, number: int) -> None:
        """Of the loop: a step ends, another begins."""
        times = self._watch.cut(number)
        if times is not None:
            self.chronicle.note(times, describe=self._describe)
        if not self._has_begun:
            self.chronicle.begin(self._watch.know())
            self._has_begun = True
        if self._watch.is_timed or self._shards.is_due(number):
            self._talks_until = number + self._talk
        self.of_step = self if number <= self._talks_until else _ASLEEP

    def end_loop(self) -> None:
        if (times := self._watch.finish()) is not None:
            self.chronicle.note(times, describe=self._describe)

    def data_came(self) -> None:
        self._watch.data_came()

    def lap(self, name: str, shard: int = -1) -> None:
        if self._watch.is_timed:
            self._watch.lap(name, shard)

    def travelled(self, travels: Callable[[], Sequence[tuple[float, float]]]) -> None:
        """All buckets have come."""
        if self._watch.looks_at_buckets:
            for bucket, (left_s, came_s) in enumerate(travels()):
                self._watch.travelled(bucket, left_s, came_s)

    def stepped(self, number: int, loss: float, *, samples: int, epoch: int, facts: Callable[[], Facts]) -> None:
        """A step was taken. `facts`: its learning rate, the norm of its gradient."""
        if self.chronicle.step(number, loss, samples, self._watch.stop()):
            self.chronicle.catch_up(self._watch.know(), epoch=epoch, facts=facts())

    def close(self, *, in_peace: bool) -> None:
        self.chronicle.close(self._watch.know(), in_peace=in_peace)

    # -- noise -------------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> Callable[[Sequence[Tensor | None]], None] | None:
        """A step. Returns who wants to see the gradients of its shards, if anybody does."""
        self._number, self._began_s = number, time.monotonic()
        self._shards.begin(number)
        if self._shards.looks:
            self._talks_until = number + self._talk  # also where the step is begun anew, with other workers
        return self._shards.see if self._shards.looks else None

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        if self._shards.looks:
            self._shards.end_shard(weight, samples)

    def reduced(self, norm: float | Tensor | None, samples: int, loss_scale: float) -> None:
        """The gradient of the global batch, before clipping."""
        # To ask a GPU takes a while, so that is done where shards were looked at, and now and then.
        asks = norm is not None and (not self._on_gpu or self._shards.looks or self._number % GPU_EVERY == 0)
        self._norm = (self._number, norm, samples) if asks and norm is not None else None
        if self._shards.looks:
            self._unread = self._shards.end(self._number, loss_scale, took_s=time.monotonic() - self._began_s)

    # -- others ------------------------------------------------------------------------------------------------------

    def tell(self) -> Sequence[float]:
        mine, self._mine = self._mine, None
        shards = NOTHING[3:] if mine is None else (mine.step, mine.mean_sq, mine.shards, mine.samples, mine.next)
        return [*self.chronicle.tell(), *map(float, shards)]

    def hear(self, told: Sequence[Sequence[float]]) -> None:
        """By rank. On a GPU: at a moment when it has gone on."""
        if self._norm is not None:
            step, norm, samples = self._norm
            self._noise.see_batch(step, float(norm), samples)
            self._norm = None
        if self._unread is not None:
            self._mine, self._unread = self._shards.read(self._unread), None
        if any(row[0] >= 0 for row in told):
            self.chronicle.hear([(row[0], row[1], row[2]) for row in told])
            self._watch.set_pace({rank: row[2] for rank, row in enumerate(told) if row[0] >= 0})
        seen = [ShardNorms(int(row[3]), row[4], int(row[5]), int(row[6]), int(row[7])) for row in told if row[3] >= 0]
        if seen:
            self._shards.next = max(one.next for one in seen)
            self._see_shards([one for one in seen if one.shards])

    def _see_shards(self, told: Sequence[ShardNorms]) -> None:
        for norms in told:
            self._noise.see_shards(norms)
        if told and self._writes and (facts := self._noise.facts()) is not None:
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

    def end_loop(self) -> None:
        pass

    def data_came(self) -> None:
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


_ASLEEP: Final = Blind(torch.device("cpu"))
