"""Buffers that a forward pass changes, such as the running averages of batch norm, made independent of the workers.

Every shard sees the buffers as they were before the step. What its forward pass makes of them is put aside. When all
shards are through, the running averages of batch norm become the mean of what the shards made of them, weighted by
their samples: one update per step, with the statistics of all shards. Any other buffer becomes what the first shard
that changed it made of it.

Note [Silent kernels]
Torch counts the changes of a tensor, and we look at the count. But the kernels of batch norm write running averages
without counting. The module itself counts its batches, in the ordinary way: so for those we look there too.

Note [Healed buffers]
A buffer that differs on one worker before a step is equal everywhere after it, because all get what the shards made of
it: wrong everywhere, and nobody could tell. So what every buffer was before it was overwritten goes into a digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lockstep.comm.exact import ShardSum
from lockstep.replicate.digest import sum_of_bits


@dataclass
class _Place:
    """Where a buffer is kept, so that another tensor put in its place is found too."""

    module: nn.Module
    key: str
    name: str
    averages: bool
    start: Tensor | None = None  # its value before the step
    seen: tuple[int, ...] = ()  # which tensor it was when we last looked, and how often that had been changed
    past: Tensor | None = None  # digest of what was overwritten: Note [Healed buffers]

    def now(self) -> Tensor:
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor

    def state(self) -> tuple[int, ...]:
        """See Note [Silent kernels]."""
        tensor = self.now()
        counter = self.module._buffers.get("num_batches_tracked") if self.averages else None
        return id(tensor), tensor._version, 0 if counter is None else counter._version

    def has_changed(self) -> bool:
        # Instance norm does not even count.
        return self.state() != self.seen or (self.averages and self.module.training and not _counts(self.module))


class RunningState:
    """The buffers of one model, from shard to shard."""

    def __init__(self, module: nn.Module, shards: int) -> None:
        self._places = list(_find(module))
        self._shards = shards
        self._made: dict[tuple[int, int], Tensor] = {}  # (shard, buffer) -> what the shard made of it
        self._in_step = False

    def __len__(self) -> int:
        return len(self._places)

    @torch.no_grad()
    def begin(self) -> None:
        """A new step starts from the buffers as they are."""
        self._made, self._in_step = {}, True
        for place in self._places:
            if place.start is None or place.has_changed():
                place.start, place.seen = place.now().clone(), place.state()

    @torch.no_grad()
    def take(self, shard: int) -> list[bool]:
        """After the forward pass of a shard: put aside what it made of the buffers. Returns which it changed."""
        changed = [place.has_changed() for place in self._places]
        for n, place in enumerate(self._places):
            if changed[n]:
                self._made[shard, n] = place.now().clone()
        return changed

    @torch.no_grad()
    def rewind(self) -> None:
        """After the backward pass, which may still need them: the buffers are as they were before the step."""
        changed = [place for place in self._places if place.has_changed()]
        for place in changed:
            assert place.start is not None
            place.now().copy_(place.start)
        for place in changed:  # when all are back: the counter of a batch norm is a buffer too
            place.seen = place.state()

    def abandon(self) -> None:
        """If we are in the middle of a step: it has not been."""
        if self._in_step:
            self.rewind()

    @torch.no_grad()
    def gather(self, changed: Tensor, counts: Sequence[int], sum_: ShardSum) -> list[tuple[int, Tensor]]:
        """All workers: which buffers get which values. Nothing is changed yet.

        `changed[shard, buffer]` of all shards, on the host; `counts`: samples of each shard.
        """
        moving = [n for n in range(len(self._places)) if bool(changed[:, n].any())]
        if not moving:
            return []
        sizes = [self._places[n].now().numel() for n in moving]
        # float64 holds float32 and counters up to 2^53 as they are.
        table = torch.zeros(self._shards, sum(sizes), dtype=torch.float64, device=sum_.device)
        for (shard, n), value in self._made.items():
            at = sum(sizes[: moving.index(n)])
            table[shard, at : at + value.numel()] += value.reshape(-1)
        sum_.wait(sum_.add_up(table), "the exchange of buffers")
        new = []
        for n, values in zip(moving, torch.split(table, sizes, dim=1), strict=True):
            place, shards = self._places[n], [s for s in range(self._shards) if changed[s, n]]
            if place.averages:
                weight = sum(counts[s] for s in shards)
                total = sum((values[s] * (counts[s] / weight) for s in shards), torch.zeros_like(values[0]))
            else:
                total = values[shards[0]]
            new.append((n, total))
        return new

    @torch.no_grad()
    def finish(self, new: Sequence[tuple[int, Tensor]]) -> None:
        """The step is over: take over what `gather` gave."""
        self._in_step = False
        for n, total in new:
            place, buffer = self._places[n], self._places[n].now()
            place.past = sum_of_bits(buffer) if place.past is None else place.past * 3 + sum_of_bits(buffer)
            buffer.copy_(total.view(buffer.shape))

    def past(self) -> dict[str, Tensor]:
        """For comparing the replicas. See Note [Healed buffers]."""
        return {f"{place.name} before a step": place.past for place in self._places if place.past is not None}


def _find(module: nn.Module) -> list[_Place]:
    """Every buffer once, also if modules share it."""
    places: dict[int, _Place] = {}
    for prefix, child in module.named_modules():
        for key, buffer in child._buffers.items():
            if buffer is not None:
                averages = isinstance(child, _NormBase) and key in ("running_mean", "running_var")
                name = f"{prefix}.{key}" if prefix else key
                places.setdefault(id(buffer), _Place(child, key, name, averages))
    return list(places.values())


def _counts(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
