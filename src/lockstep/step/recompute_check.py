"""Checks that computations repeat bit for bit: every so often, one shard is computed again on another worker.

The owner of the shard records digests of the output of every module and of the gradient of every parameter. Another
worker, with the same weights, computes the same shard with the same random numbers. Their digests must be equal. If
not, the first module that differs is named: an operation that does not repeat, or a machine that computes wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm import agreement
from lockstep.comm.shard_sum import ShardSum
from lockstep.data.batches import Batch, Shard
from lockstep.ddp.autograd_graph import find_tensors
from lockstep.ddp.replica import Leaf, cheap_digests
from lockstep.errors import DivergenceError

Digests = list[tuple[str, int]]  # (description, 64-bit digest) of each output and gradient, in order


class RecomputeCheck:
    """Checks one shard every `every` steps; 0: never. `fetch` loads a shard of another worker."""

    def __init__(
        self, model: nn.Module, leaves: list[Leaf], *, every: int, fetch: Callable[[Batch, int], Shard]
    ) -> None:
        self._model, self._leaves, self._every, self._fetch = model, leaves, every, fetch
        self._digests: Digests = []
        self._handles: list[Any] = []

    def shard_of(self, batch: Batch) -> int | None:
        """The shard that is checked in this step, each in turn; None: no shard."""
        if self._every == 0 or (batch.number + 1) % self._every:
            return None
        return (batch.number + 1) // self._every % batch.of_shards

    @contextmanager
    def recording(self, batch: Batch, shard: int) -> Iterator[None]:
        """Record the forward pass in this context, and its backward pass until the next forward pass or `compare`."""
        self.stop_recording()
        if self.shard_of(batch) != shard:
            yield
            return
        self._digests = []
        hooks = [m.register_forward_hook(self._output_hook(name, m)) for name, m in self._model.named_modules()]
        parameters: list[Any] = [leaf.parameter for leaf in self._leaves]
        names = [leaf.name for leaf in self._leaves]
        self._handles = [p.register_hook(self._gradient_hook(n)) for n, p in zip(names, parameters, strict=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _output_hook(self, name: str, module: nn.Module) -> Callable[..., None]:
        what = f"the output of {name or 'the model'} ({type(module).__name__})"

        def on_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            with torch.no_grad():
                self._digests.append((what, sum(cheap_digests(list(find_tensors(output)))) % 2**62))

        return on_output

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def on_gradient(gradient: Tensor) -> None:
            with torch.no_grad():
                self._digests.append((f"the gradient of {name}", cheap_digests([gradient])[0] % 2**62))

        return on_gradient

    def compare(self, batch: Batch, sum_: ShardSum, recompute: Callable[[Shard], None]) -> None:
        """Compare the digests. Called by all workers; raises DivergenceError on all if they differ.

        `recompute` runs a shard forward and backward; it must change nothing but `.grad`.
        """
        number = self.shard_of(batch)
        if number is None:
            return
        self.stop_recording()
        rank, owner = sum_.group.rank(), next(r for r, share in enumerate(sum_.shares) if number in share)
        checker = (owner + 1) % sum_.size
        mine = self._digests if rank == owner else []
        self._digests = []  # a shard without samples records nothing, so the next one must not find these
        second: Digests = []
        shard = self._fetch(batch, number) if rank == checker else None
        if shard is not None and shard.count:
            second = self._recompute(batch, shard, recompute)
        gathered = agreement.gather_values(sum_.group, [mine, second], device=sum_.device)
        first, second = gathered[owner][0], gathered[checker][1]
        end = ["nothing more", 0]
        for a, b in zip_longest(first, second, fillvalue=end):
            if a != b:
                what = a[0] if a[0] == b[0] else f"{a[0]} (in its place came {b[0]})"
                raise DivergenceError(
                    f"step {batch.number}, shard {number}: rank {owner} computed it, rank {checker} computed it again "
                    f"from the same weights, samples and random numbers, and {what} is the first that differs. It "
                    "does not repeat: an operation without a fixed order, random numbers from a source of its own, "
                    "state outside the model, or a faulty machine"
                )

    def _recompute(self, batch: Batch, shard: Shard, recompute: Callable[[Shard], None]) -> Digests:
        kept = [leaf.parameter.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.parameter.grad = None
        recorded, self._digests = self._digests, []
        try:
            recompute(shard)
            return self._digests
        finally:
            self.stop_recording()
            self._digests = recorded
            for leaf, gradient in zip(self._leaves, kept, strict=True):
                leaf.parameter.grad = gradient

    def stop_recording(self) -> None:
        """Remove the hooks on parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
