"""Optimisers of a run whose state is distributed over the workers (ZeRO, stage 1).

Every worker has all weights, and the gradients and the optimiser's state of its own part of them at least; with
redundancy 1 it also has a copy of the part of one other worker, which it updates from the same gradients. After the
step the new weights are exchanged. When workers are lost, those that remain have the whole state, unless a worker and
the one with its copy are lost together.

Note [Incomplete weights]
Between its own step and the end of the exchange a worker has new weights in its own part and old ones elsewhere. If
workers are lost then, the others complete their weights in `assign`, from those that have each part. This must not
overwrite what a program does to the weights after the step, in its loop. So in an elastic run no worker returns from an
exchange before all have received everything: if one has incomplete weights, no program has continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep.comm import abortable_wait, agreement
from lockstep.ddp.deferred_weights import DeferredWeights
from lockstep.ddp.optimizer_cells import (
    STRIPE_NUMEL,
    PartGradients,
    Piece,
    assign_group,
    choose_buddies,
    is_whole,
)
from lockstep.ddp.optimizer_state import (
    WholeState,
    WorkerFacts,
    choose_known,
    options_of,
    refuse_other_parameters,
)
from lockstep.ddp.owned_parts import OwnedParts
from lockstep.ddp.replica import cheap_digests
from lockstep.ddp.state_holders import Interval, StateHolders, StateOutline, States
from lockstep.ddp.weight_exchange import WeightExchange
from lockstep.errors import DivergenceError
from lockstep.process_identity import identify_host

BUCKET_BYTES: Final = 25 * 1024 * 1024
# For each of these a layer of the next forward pass may wait, the first layers for the smallest.
DEFERRED_BUCKET_BYTES: Final = 4 * 1024 * 1024
FIRST_DEFERRED_BYTES: Final = 256 * 1024


@final
class ShardedState:
    """The parts of optimisers that this worker has. Collective calls are marked."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        whole_tensors: Sequence[bool],
        redundancy: int,
        scatters: bool = False,
        queues: bool = False,
        master_weights: bool = False,
    ) -> None:
        """
        optimizers     with all parameters; from now on they keep no state of their own
        whole_tensors  of each optimiser: whether it looks at whole tensors (optimizer_cells.py)
        redundancy     1: every part is kept by two workers; 0: by one
        scatters       between hosts, workers get the gradients of their parts only (step/scattered_gradients.py)
        queues         see WeightExchange.run: for workers that end if one of them is lost
        master_weights  the optimisers update float32 copies of weights with 16 bits (optimizer_cells.py)
        """
        self._may_scatter, self._queues = scatters, queues
        self._optimizers, self._whole_tensors, self.redundancy = tuple(optimizers), tuple(whole_tensors), redundancy
        self._rank, self._size, self._hosts = 0, 1, 1
        self.pieces: dict[Tensor, list[Piece]] = {}  # of every parameter, in order
        self._buddies: list[int] = [0]
        self._exchanges: dict[int, WeightExchange] = {}
        self._copy: States | None = None  # what this worker has beside its parts: see `copy_to_all` and `assign`
        self._is_complete = True  # the weights: see Note [Incomplete weights]
        # What the program has given the optimisers before the first step; None after it.
        self._initial: dict[Tensor, dict[str, Any]] | None = {
            parameter: state for one in optimizers for parameter, state in one.state.items()
        }
        self._is_forgotten = False  # see `forget`
        self._strides: list[tuple[int, ...]] = []
        self.parts = OwnedParts(optimizers, whole_tensors, master_weights=master_weights)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def has_parts(self) -> bool:
        """Whether this worker has a part of the state: a new worker has none before `assign`."""
        return bool(self.pieces)

    def whole_state_bytes(self) -> int:
        """Return how many bytes the state of all workers has, without copies; an estimate from the own part."""
        return self.parts.nbytes * sum(parameter.numel() for parameter in self.pieces) // max(self.parts.numel, 1)

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, number: int, gradients: PartGradients | None = None) -> None:
        """Take the step of an optimiser with this worker's part. Waits for no other worker.

        gradients  of this worker's part; None: those of the parameters
        """
        self._is_complete, self._copy, self._initial = self._has_all, None, None
        if (exchange := self._exchanges.get(number)) is not None:
            exchange.copy_old_weights()
        self.parts.step(number, gradients)

    @property
    def _has_all(self) -> bool:
        """Whether every worker has all parts."""
        return self._size == 1 or (self._size == 2 and bool(self.redundancy))

    @property
    def scatters(self) -> bool:
        """Whether gradients are to be reduce-scattered with the current workers."""
        return self._may_scatter and self.sends_between_hosts

    @property
    def sends_between_hosts(self) -> bool:
        """Whether weights are sent from one host to another after a step."""
        return self._hosts > 1 and not self._has_all

    def exchange_weights(
        self,
        number: int,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        confirms: bool,
        deferred: DeferredWeights | None = None,
    ) -> None:
        """Send the weights that an optimiser has updated to all workers; a collective call.

        confirms  wait until all workers have received everything: see Note [Incomplete weights]
        deferred  only start the exchange, which these wait for (deferred_weights.py); None: return when it is complete
        """
        if self._has_all:
            return
        # Not after a recovery that has completed the weights, nor after a step that was skipped: alike on all workers.
        if not self._is_complete:
            own = [parameter for one in self._optimizers[number].param_groups for parameter in one["params"]]
            changed = {parameter: self.pieces[parameter] for parameter in own if parameter.requires_grad}
            if (exchange := self._exchanges.get(number)) is None or exchange.has_moved(changed):
                sent = changed if deferred is None else deferred.in_order(changed)
                exchange = self._exchanges[number] = WeightExchange(
                    group,
                    sent,
                    BUCKET_BYTES if deferred is None else DEFERRED_BUCKET_BYTES,
                    spans_hosts=self._hosts > 1,
                    first_bytes=None if deferred is None else FIRST_DEFERRED_BYTES,
                    sends=deferred is not None and self._hosts == self._size,
                    has_own=lambda _, piece: self._updates(piece),
                )
            if deferred is None:
                exchange.run(queues=self._queues)
            else:
                deferred.start(exchange, [part.weights for part, _ in self.parts if not part.is_whole])
            self._is_complete = True
        if confirms:
            abortable_wait.wait(group, group.barrier(dist.BarrierOptions()), device, "the exchange of weights")

    def _updates(self, piece: Piece) -> bool:
        """Whether this worker updates a piece, as its owner or with a copy."""
        return self._rank == piece.owner or (bool(self.redundancy) and self._rank == self._buddies[piece.owner])

    @property
    def buddies(self) -> list[int] | None:
        """By rank, the worker that has a copy of that worker's parts; None if there are no copies."""
        return self._buddies if self.redundancy else None

    def compare_copies(self, number: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raise DivergenceError, on all workers, if a part and its copy differ after step `number`; a collective call.

        Nothing is compared without copies.
        """
        if self._size == 1 or not self.redundancy:
            return
        totals = [0, 0]  # of the own part and of the copy of another one
        parts = list(self.parts)
        tensors = [[part.weights, *(v for v in state.values() if isinstance(v, Tensor))] for part, state in parts]
        digests = iter(cheap_digests(tensor for of_part in tensors for tensor in of_part))
        for (part, _), of_part in zip(parts, tensors, strict=True):
            totals[part.piece.owner != self._rank] += sum(next(digests) for _ in of_part)
        signed = [(total + 2**63) % 2**64 - 2**63 for total in totals]  # the lowest 64 bits, which a tensor can hold
        rows = agreement.gather_rows(group, signed, device=device)
        for rank, buddy in enumerate(self._buddies):
            if rows[rank][0] != rows[buddy][1]:
                raise DivergenceError(
                    f"after step {number} rank {rank} and rank {buddy} have different weights or optimiser "
                    "states, which both computed from the same gradients. A faulty machine, or a write to "
                    "optimizer.state on one worker only. Go back to the last checkpoint",
                    [],
                )

    # -- which worker has which part -----------------------------------------------------------------------------------

    def assign(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Divide the state between the current workers, and move what has changed its worker; a collective call.

        Workers may be new, and other ones may be lost; all have taken the same steps. Weights are completed where they
        are not complete. If it fails, this worker still has the parts that it had.

        Raises LostStateError, on all workers, if no worker has some part of the state any more; ReplicaMismatchError
        if the program has given the optimisers other states on other workers; ValueError if it has changed the order
        or the memory format of parameters since the last time.
        """
        refuse_other_parameters(list(self.pieces), self._strides, self.parameters)
        mine, size = self._held(), group.size()
        trained = [number for number, parameter in enumerate(self.parameters) if parameter.requires_grad]
        initial = None if self._initial is None else self._digest_initial()
        own = WorkerFacts(identify_host(), len(self.pieces), trained, self._is_complete, initial, self._is_forgotten)
        holders = StateHolders(group, mine, device=device, facts=own)
        facts = [WorkerFacts(*one) for one in holders.facts]
        self._hosts = len({one.host for one in facts})
        known, trained = choose_known(facts)
        all_known = known or len(self.parameters)  # if no step was taken, all divide by what one of them trains
        pieces = self._divide(size, trained, all_known)
        buddies = choose_buddies([one.host for one in facts]) if size > 1 else [0]
        wanted: list[list[Interval]] = [[] for _ in range(size)]
        for number, parameter in enumerate(self.parameters[:known]):
            for piece in pieces[parameter]:
                for rank in {piece.owner, buddies[piece.owner]} if self.redundancy else {piece.owner}:
                    wanted[rank].append(Interval(number, piece.start, piece.stop))
        states = holders.move(wanted, [parameter.device for parameter in self.parameters[:known]])
        if known and not all(one.is_complete for one in facts):
            self._is_complete = False
            self._send_weights(group, holders, self.parameters[:known], mine)
        if size > 1 and known:  # until all have theirs, parts are not dropped
            self._copy, self._is_complete = mine | states, True
            abortable_wait.wait(group, group.barrier(dist.BarrierOptions()), device, "moving the optimiser's state")
        self._rank, self._size, self.pieces, self._buddies = group.rank(), size, pieces, buddies
        self._exchanges, self._is_complete, self._copy, self._is_forgotten = {}, True, None, False
        self._strides = [parameter.stride() for parameter in pieces]
        self._set_parts(states)
        if not known:
            initial_state = self._initial or {}
            self.load_state_dict(WholeState(self.param_groups, initial_state).state_dict())
            # Until the first step: if this fails on another worker, it is done again.
            self._initial = {
                parameter: {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
                for parameter, state in initial_state.items()
            }
        else:
            self._initial = None

    def _digest_initial(self) -> int:
        states = [self._initial.get(parameter, {}) for parameter in self.parameters] if self._initial else []
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return agreement.fingerprint(cheap_digests(tensors))

    def copy_to_all(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Give every worker the whole state, in the memory of the CPU, until the next `assign` or step: some of them
        leave, and it is not known which. A collective call."""
        whole = [Interval(number, 0, parameter.numel()) for number, parameter in enumerate(self.pieces)]
        holders = StateHolders(group, self._held(), device=device)
        self._copy = holders.move([whole] * group.size(), [parameter.device for parameter in self.pieces], on_cpu=True)

    def forget(self) -> None:
        """Drop this worker's part: it gets another one from other workers, by `assign`."""
        self.pieces, self._is_complete, self._copy, self._is_forgotten = {}, True, None, True
        self.parts.clear()

    def _divide(self, size: int, numbers: Sequence[int], known: int) -> dict[Tensor, list[Piece]]:
        """Return the pieces of all parameters, in the order of `parameters`, for so many workers.

        numbers  of those that are trained, among the first `known` parameters; of the others it is looked up
        """
        loads, found = [0] * size, dict[Tensor, list[Piece]]()
        trained = {self.parameters[number] for number in numbers if number < known}
        trained |= {parameter for parameter in self.parameters[known:] if parameter.requires_grad}
        stripe = STRIPE_NUMEL if self._may_scatter and self._hosts > 1 else None
        for optimizer, whole in zip(self._optimizers, self._whole_tensors, strict=True):
            for group in optimizer.param_groups:
                found |= assign_group(group["params"], loads, trained=trained, whole_tensors=whole, stripe=stripe)
        return {parameter: found[parameter] for parameter in self.parameters}

    def _send_weights(
        self, group: dist.ProcessGroup, holders: StateHolders, known: Sequence[Tensor], mine: States
    ) -> None:
        """Send all weights from workers that have their state. See Note [Incomplete weights]."""
        numbers = {parameter: number for number, parameter in enumerate(known)}
        own: dict[int, list[Interval]] = {}
        for interval in mine:
            own.setdefault(interval.parameter, []).append(interval)

        def has_own(parameter: Tensor, piece: Piece) -> bool:
            intervals = own.get(numbers[parameter], ())
            return any(one.start <= piece.start and piece.stop <= one.stop for one in intervals)

        sent = {
            parameter: [piece for piece, _ in holders.pieces(Interval(number, 0, parameter.numel()))]
            for parameter, number in numbers.items()
        }
        WeightExchange(group, sent, BUCKET_BYTES, spans_hosts=self._hosts > 1, has_own=has_own).run()

    def _set_parts(self, states: States) -> None:
        needed = {one: [piece for piece in pieces if self._updates(piece)] for one, pieces in self.pieces.items()}
        self.parts.assign(needed, states)

    def _held(self) -> States:
        """The states of the parts that this worker has; empty for a new worker."""
        return self.parts.states() if self._copy is None else self._copy

    # -- the whole state -----------------------------------------------------------------------------------------------

    def collect_alone(self) -> WholeState | None:
        """Return the whole state if this worker has all parts, else None."""
        found = self.outline(None, torch.device("cpu")).collect() if self._has_all else None
        return None if found is None else WholeState(self.param_groups, found)

    def outline(self, group: dist.ProcessGroup | None, device: torch.device) -> StateOutline:
        """Return the states of all parameters, without their large tensors; a collective call.

        group  None: this worker has all parts
        """
        whole = {
            parameter
            for optimizer, whole_tensors in zip(self._optimizers, self._whole_tensors, strict=True)
            for options in optimizer.param_groups
            for parameter in options["params"]
            if is_whole(parameter, whole_tensors=whole_tensors)
        }
        holders = StateHolders(group, self._held(), device=device)
        return StateOutline.of_parameters(holders, list(self.pieces), whole)

    def state_dict(self) -> dict[str, Any]:
        """Return the options of all groups, in the format of torch, without the state of parameters."""
        return WholeState(self.param_groups, {}).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this worker's part of a whole state, in the format of torch; with or without sharding it is the same."""
        if not self.pieces:  # a new worker, which gets its part from other workers
            for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
                ours.update(options_of(theirs))
            return
        self._initial, self._copy, self._exchanges = None, None, {}
        if len(self.pieces) != len(self.parameters):  # groups were added since
            self.pieces = self._divide(self._size, [], 0)
            self._strides = [parameter.stride() for parameter in self.pieces]
        self._set_parts(States())
        self.parts.load(state_dict)
