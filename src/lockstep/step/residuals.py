"""What compressed gradients have lost so far, which is added to the gradients of the next step (error feedback).

Note [Residuals of shards]
A matrix of low rank (comm/low_rank_sum.py), or the largest elements (comm/top_k_sum.py), lack a part of the gradient in
every step. That part must be sent later, or the model would not learn from it. Each shard has a
residual of its own: its gradient, divided by the weight of the global batch, plus its residual, less what of it was
sent: its largest elements, or its share of the approximation of the sum. So the residuals do not depend on which worker
runs a shard. A worker keeps those of its own shards. They are part of a checkpoint, and move with the shards when the
workers change. If a worker is lost, so are its residuals: the others go back to the newest checkpoint, and compute the
same bits again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import abortable_wait
from lockstep.comm.low_rank_sum import SMALLEST_NORM, Factors, LowRank
from lockstep.comm.top_k_sum import TopK
from lockstep.ddp.state_holders import Interval, StateHolders, StateOutline, States
from lockstep.errors import LostStateError
from lockstep.seed import derive_seed


@final
class Residuals:
    """The residuals of this worker's shards, and the projections of low rank, which are equal on all workers."""

    def __init__(self, method: LowRank | TopK, shards: int, parameters: Mapping[str, Tensor], seed: int) -> None:
        """
        method      by which gradients are compressed
        shards      of a global batch
        parameters  of the model, by name
        seed        of the first projections
        """
        self.method, self._shards, self._seed = method, shards, seed
        self._names, self._parameters = list(parameters), dict(parameters)
        self._found: dict[tuple[int, str], Tensor] = {}  # by shard and name; flat, in the order of memory
        self._copies: States | None = None  # those of all workers: see `copy_to_all`
        self._projections: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}  # projections to begin with

    @property
    def size_bytes(self) -> int:
        """Memory of the residuals that this worker has."""
        return sum(residual.nbytes for residual in self._found.values())

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Use the parameters that the model has now. Called by all workers, between two steps."""
        self._found = {key: residual for key, residual in self._found.items() if key[1] in parameters}
        self._names, self._parameters = list(parameters), dict(parameters)

    def find(self, shard: int, name: str) -> Tensor | None:
        """Return the residual of a parameter in a shard, flat; None: there is none."""
        return self._found.get((shard, name))

    def keep_low_rank(self, name: str, matrices: Mapping[int, Tensor], factors: Factors) -> None:
        """Replace the residuals of a parameter, and its projection, after a step.

        matrices  what was compressed, by shard; the residual is what remains of it without a share of the approximation
        """
        self._projections[name] = factors.right
        for shard, matrix in matrices.items():
            out = self._replace(shard, name, matrix).view(matrix.shape)
            torch.addmm(matrix, factors.left, factors.right.t(), alpha=-1.0 / self._shards, out=out)

    def keep(self, name: str, residuals: Mapping[int, Tensor]) -> None:
        """Replace the residuals of a parameter, by shard, after a step."""
        for shard, residual in residuals.items():
            self._replace(shard, name, residual).copy_(residual.view(-1))

    def _replace(self, shard: int, name: str, like: Tensor) -> Tensor:
        """Return the memory of a residual, which is about to be written."""
        self._copies = None
        if (shard, name) not in self._found:
            self._found[shard, name] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return self._found[shard, name]

    def projection(self, name: str, rows: int, rank: int) -> Tensor:
        """Return the matrix [rows, rank] with which the next approximation of a parameter begins."""
        first, device = self._first.get(name), self._parameters[name].device
        if first is None:
            generator = torch.Generator("cpu").manual_seed(derive_seed(self._seed, "projection", name))
            drawn = torch.randn(rows, rank, generator=generator, dtype=torch.float32, device="cpu")
            first = self._first[name] = drawn.to(device)
        last = self._projections.get(name)
        if last is None or last.shape != first.shape:
            return first
        last = last.to(device)
        return torch.where(last.norm(dim=0) > SMALLEST_NORM, last, first)  # a column of zeros would stay one

    def make_undo(self) -> Callable[[], None]:
        """Return a function that makes all residuals and projections what they are now. Copies are on the CPU."""
        found = {key: (residual, residual.to("cpu", copy=True)) for key, residual in self._found.items()}
        projections, copies = dict(self._projections), self._copies

        def restore() -> None:
            for residual, copied in found.values():
                residual.copy_(copied)
            self._found = {key: residual for key, (residual, _) in found.items()}
            self._projections, self._copies = dict(projections), copies

        return restore

    # -- moving them ---------------------------------------------------------------------------------------------------

    def _number(self, shard: int, name: str) -> int:
        return shard * len(self._names) + self._names.index(name)

    @property
    def _devices(self) -> list[torch.device]:
        return [self._parameters[name].device for name in self._names] * self._shards

    def _held(self) -> States:
        if self._copies is not None:
            return self._copies
        return {
            Interval(self._number(shard, name), 0, residual.numel()): {"residual": residual}
            for (shard, name), residual in self._found.items()
        }

    def _wanted(self, holders: StateHolders, shards: Sequence[int]) -> list[Interval]:
        """All residuals of these shards: a parameter that has one in some shard has one in all of them."""
        indices = sorted({number % len(self._names) for number in holders.parameter_numbers})
        parameters = [self._parameters[name] for name in self._names]
        return [
            Interval(shard * len(self._names) + index, 0, parameters[index].numel())
            for shard in shards
            for index in indices
        ]

    def _take(self, states: States) -> None:
        count, self._copies = len(self._names), None
        self._found = {
            (interval.parameter // count, self._names[interval.parameter % count]): state["residual"]
            for interval, state in states.items()
        }

    def assign(self, group: dist.ProcessGroup, device: torch.device, shares: Sequence[Sequence[int]]) -> None:
        """Give every worker the residuals of its shards, which others may have; a collective call.

        Raises LostStateError, on all workers, if no worker has some of them any more.
        """
        mine = self._held()
        holders = StateHolders(group, mine, device=device)
        wanted = [self._wanted(holders, share) for share in shares]
        try:
            states = holders.move(wanted, self._devices)
        except LostStateError as error:
            shard, index = divmod(error.parameter, len(self._names))
            raise LostStateError(
                f"no worker has the residual of {self._names[index]} in shard {shard} any more: its worker is lost"
            ) from None
        self._take(mine | states)  # until all have theirs, none is dropped
        if group.size() > 1:
            abortable_wait.wait(group, group.barrier(dist.BarrierOptions()), device, "moving residuals")
        self._take(states)

    def copy_to_all(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Give every worker all residuals, until the next `assign` or step: some workers leave. A collective call."""
        holders = StateHolders(group, self._held(), device=device)
        wanted = self._wanted(holders, range(self._shards))
        self._copies = holders.move([wanted] * group.size(), self._devices, on_cpu=True)

    def keep_only(self, shards: Sequence[int]) -> None:
        """Drop the residuals of other shards than these, and bring these to the device of their parameters.

        Called before each step: a checkpoint has the residuals of all shards. Those of parameters that are frozen, or
        not compressed by this method, are dropped, too: they would be added at some later time.
        """
        own = {
            name
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and self.method.compresses(parameter)
        }
        if not isinstance(self.method, LowRank):
            self._projections = {}
        self._found = {
            (shard, name): residual.to(self._parameters[name].device)
            for (shard, name), residual in self._found.items()
            if shard in shards and name in own
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def collect_alone(self) -> dict[str, Any] | None:
        """Return the state if this worker has the residuals of all shards, else None."""
        shards = {shard for shard, _ in self._found}
        return self.outline(None, torch.device("cpu")).collect() if len(shards) in (0, self._shards) else None

    def outline(self, group: dist.ProcessGroup | None, device: torch.device) -> StateOutline:
        """Return the state of all workers, without the residuals themselves; a collective call.

        group  None: this worker has all residuals
        """
        holders = StateHolders(group, self._held(), device=device)
        shards: dict[str, dict[str, Tensor]] = {str(shard): {} for shard in range(self._shards)}
        sources: dict[Tensor, tuple[Interval, str]] = {}
        for interval, state in holders.outline(self._wanted(holders, range(self._shards))).items():
            shard, index = divmod(interval.parameter, len(self._names))
            shards[str(shard)][self._names[index]] = state["residual"]
            sources[state["residual"]] = interval, "residual"
        strides = {name: list(self._parameters[name].stride()) for name in shards["0"]}
        return StateOutline(holders, self.state() | {"shards": shards, "strides": strides}, sources)

    def state(self) -> dict[str, Any]:
        """Return what is equal on all workers."""
        return {"projections": dict(self._projections)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `outline` or `state` has returned, filled; None: that of a run without residuals."""
        found = state or {}
        self._projections, self._copies = dict(found.get("projections", {})), None
        self._found = {
            (int(shard), name): self._in_memory_order(name, residual, found["strides"][name])
            for shard, by_name in found.get("shards", {}).items()
            for name, residual in by_name.items()
            if name in self._parameters
        }

    def _in_memory_order(self, name: str, residual: Tensor, stride: Sequence[int]) -> Tensor:
        """Return a residual that was saved with these strides, in the order of the parameter's memory now."""
        parameter = self._parameters[name]
        if list(parameter.stride()) == list(stride):
            return residual
        self._projections.pop(name, None)  # its rows would belong to other columns
        now = torch.empty_strided(parameter.shape, parameter.stride(), dtype=residual.dtype)
        return now.copy_(residual.as_strided(parameter.shape, tuple(stride))).as_strided((residual.numel(),), (1,))
