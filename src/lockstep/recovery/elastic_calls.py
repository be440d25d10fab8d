"""The collective calls of a worker in an elastic run, in which workers join and leave.

A call in which a worker was lost is made again by the remaining workers, and a worker that joins later runs the program
from its top, with the results of the calls that the others have made.

Note [Positions]
Calls are numbered: (steps begun, calls since then), with -1 before the loop. A call is a function of what all workers
have in common, so all workers get the same result. When a generation ends, some members may have finished a call and
others not; they are never more than one step apart. The newest worker sends its results, and workers that are behind
use them instead of calling. If a step is among them, it also sends what the step changes (`Update` in step_types.py),
and not its state: between its steps a program may change the model, the optimiser or what it has registered, and each
worker does so exactly once, to its own state. A call that no remaining worker has finished is made again.

Note [New workers]
A process that is started in the middle of a run begins at the top of the program. The results of the calls that the
others made before their loop are in a call log, so it builds its model and its data without collective calls, and waits
at the loop. It joins at the top of a step, before the batch is yielded to the program: there it needs only the state.
Yielding the batch counts as a call, so that a worker which has its batch is not at the top any more. The call log holds
results that are settled: all members have them. A worker that has finished call n knows that call n - 1 is settled.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist

from lockstep import faults
from lockstep.comm import agreement
from lockstep.comm.abortable_group import deferred_destroy
from lockstep.comm.peer_watch import is_peer_loss
from lockstep.elastic.agent_client import RESTART_STATUS, AgentClient, GenerationEnded, JoinedGeneration, WorkerIdentity
from lockstep.elastic.generation_groups import GenerationGroups
from lockstep.errors import (
    CheckpointError,
    DesyncError,
    DirectoryInUseError,
    DivergenceError,
    NonFiniteError,
    ReplicaMismatchError,
    UnevenDataError,
    WorldError,
)
from lockstep.recovery.collective_calls import CollectiveCalls, print_message, unchanged
from lockstep.world.world import World

T = TypeVar("T")

# Errors of the program itself, never caused by the loss of a worker.
PROGRAM_ERRORS: Final = (
    NonFiniteError,
    DivergenceError,
    UnevenDataError,
    ReplicaMismatchError,
    DesyncError,
    CheckpointError,
    DirectoryInUseError,
    ValueError,
    TypeError,
)

# How long the order to leave the generation may arrive after an error; it shows that the program did not cause the
# error. A broken connection is noticed before the lease of the lost host ends (launcher/hosts.py, LONGEST_LEASE_S).
ORDER_COMES_WITHIN_S: Final = 0.3
ORDER_MUST_COME_WITHIN_S: Final = 20.0

FORM_TRIES: Final = 3  # consecutive generations that could not be formed although no worker was lost

# The garbage collector takes 2 ms, unless the program has very many objects. If it takes longer than this, it is called
# only after every eighth recovery.
COLLECT_WITHIN_S: Final = 0.02
COLLECT_EVERY: Final = 8

LARGEST_RESULT_BYTES: Final = 500_000  # as JSON; as text it may be twice as long, and the store takes 1 MiB


class GenerationListener(Protocol):
    """What a run does when the generation of workers changes."""

    def end_generation(self) -> None:
        """The generation has ended in the middle of a call: undo what the call has done in part."""

    def form_group(self, world: World) -> dist.ProcessGroup:
        """Form the private process group of a new generation."""

    def begin_generation(self) -> None:
        """All workers have the newest results and state: assign the shards."""

    @property
    def applied_steps(self) -> int:
        """Number of steps applied to the state of this worker; -1 if it has none."""

    def send_step(self, source: int, then: Callable[[], None]) -> None:
        """Send the newest step from rank `source` to workers that have missed it; they apply it and call `then`.

        A collective call.
        """

    def send_state(self, source: int, then: Callable[[], None]) -> None:
        """Send the state of rank `source` to workers without a state; they restore it and call `then` at once.

        A collective call. Raises DivergenceError if a worker did not get what was sent.
        """


@dataclass
class _FinishedCall:
    """A finished call and its result; `to_json` encodes them as JSON."""

    what: str
    result: Any
    encode: Callable[[Any], Any]

    def to_json(self) -> list[Any]:
        return [self.what, self.encode(self.result)]


class CallHistory:
    """The position of a worker, and the results of its own calls and those that others sent. See Note [Positions]."""

    def __init__(self, agent: AgentClient) -> None:
        self._agent = agent
        self.position = (-1, 0)
        # By step begun: calls before the loop, of this step and of the last.
        self._made: dict[int, list[_FinishedCall]] = {-1: []}
        self.known: dict[int, list[list[Any]]] = {}  # results of other workers, by step begun
        self.call_log_end: int | None = None  # the number of the call that begins the loop
        self._published = 0  # number of calls that the call log has
        self._has_sent_loop = False

    def begin_step(self, number: int) -> None:
        """Go to the top of a step, and drop the results that are not needed any more."""
        self._made = {top: made for top, made in self._made.items() if top in (-1, self.position[0])} | {number: []}
        self.known = {top: known for top, known in self.known.items() if top >= number}
        self._set_position((number, 0))

    def _set_position(self, position: tuple[int, int]) -> None:
        self.position = self._agent.position = position

    def find(self, what: str, *, is_member: bool) -> list[Any] | None:
        """The result that another worker sent for this call; None if there is none."""
        top, calls = self.position
        if top == -1 and not is_member and calls != self.call_log_end and self._agent.wait_for_call(calls + 1):
            self.known[-1] = [[name, result] for name, result in self._agent.call_log]
        known = self.known.get(top, [])
        if calls >= len(known):
            return None
        if known[calls][0] != what:
            raise DesyncError(
                f"this worker calls {what} where the others called {known[calls][0]} "
                f"({f'call {calls} of step {top}' if top >= 0 else f'call {calls + 1} after the start'}); look for "
                "control flow that depends on the worker"
            )
        return known[calls]

    def record(self, made: _FinishedCall) -> None:
        """Count a finished call, and publish those before the loop that are settled."""
        top, calls = self.position
        self._made[top].append(made)
        self._set_position((top, calls + 1))
        before = self._made[-1]
        settled = len(before) - (1 if top == -1 else 0)
        if self.call_log_end is not None:
            settled = min(settled, self.call_log_end)
        if self._published < settled:
            entries = [one.to_json() for one in before[self._published : settled]]
            for what, result in entries:
                if (size := len(json.dumps(result))) > LARGEST_RESULT_BYTES:
                    raise ValueError(
                        f"{what} gave {size} bytes. Of a call before the loop an elastic run keeps the result, for "
                        f"workers that join later: at most {LARGEST_RESULT_BYTES} bytes. Return less, or a path"
                    )
            self._agent.send("call_log", first=self._published, entries=entries)
            self._published = settled
        if top >= 0 and not self._has_sent_loop:
            self._has_sent_loop = True
            self._agent.send("loop")

    def results(self) -> dict[int, list[list[Any]]]:
        """Results of all calls that belong to the state of this worker, its own and received ones, by step begun."""
        results = {top: [one.to_json() for one in made] for top, made in self._made.items()}
        for top, known in self.known.items():
            mine = results.setdefault(top, [])
            mine += known[len(mine) :]
        return results

    def reachable_position(self, applied_steps: int) -> tuple[int, int]:
        """The position that this worker can reach with the results, and perhaps the state, of a worker that was lost.

        Not beyond the step that the program is in, since what the program itself does in between has yet to be done.
        Only a new worker that was given a state is at the position of that state.
        """
        if applied_steps < 0 or not self.known:
            return self.position
        top = self.position[0] if self.position[0] >= 0 else max(self.known)
        return max(self.position, (top, len(self.known.get(top, []))))


class GenerationGarbage:
    """What is left of earlier generations: reference cycles that keep memory and descriptors."""

    def __init__(self) -> None:
        self._calls, self._took_s = 0, 0.0

    def collect(self) -> None:
        """Free it, after a recovery. A garbage collection that takes long is left out most times."""
        self._calls += 1
        if self._took_s < COLLECT_WITHIN_S or self._calls % COLLECT_EVERY == 0:
            began_s = time.monotonic()
            gc.collect()
            self._took_s = time.monotonic() - began_s
        deferred_destroy.destroy_unreferenced()


class ElasticCalls(CollectiveCalls):
    """Executes the collective calls of an elastic run: see Note [Positions] and Note [New workers]."""

    is_elastic = True

    def __init__(
        self,
        agent: AgentClient,
        identity: WorkerIdentity,
        listener: GenerationListener,
        *,
        backend: str | None,
        device: Any,
    ) -> None:
        super().__init__()
        self._agent, self._listener = agent, listener
        agent.is_calling = lambda: bool(self.current_call)
        self._groups = GenerationGroups(agent, slot=identity.slot, backend=backend, device=device)
        self._history = CallHistory(agent)
        self._is_member = False
        self._ending_generation = 0  # the generation that ends at the next top of the loop; 0: none
        self._garbage = GenerationGarbage()

    @property
    def position(self) -> tuple[int, int]:
        return self._history.position

    @property
    def is_member(self) -> bool:
        return self._is_member

    # -- calls -------------------------------------------------------------------------------------------------------

    def make(
        self,
        what: str,
        call: Callable[[], T],
        *,
        encode: Callable[[T], Any] = unchanged,
        decode: Callable[[Any], T] = unchanged,
        begins_loop: bool = False,
        may_repeat: bool = False,
        reads_weights: bool = True,
    ) -> T:
        # `may_repeat` is not needed: here a call is counted only when it has a result. Weights are always here.
        self._refuse_after_failure(what)
        if begins_loop:
            self._history.call_log_end = self._history.position[1]
        self.current_call = what
        while True:
            known = self._history.find(what, is_member=self._is_member)
            if known is not None:
                result = decode(known[1])
                break
            if not self._is_member:
                self._agent.report_ready(self._history.position)
                self._join()
                if begins_loop and self._listener.applied_steps >= 0:
                    self.current_call = ""
                    return decode(None)  # the others are in the loop, and this worker has their state
                continue
            try:
                result = self._execute(call)
                break
            except Exception as error:
                self._check_lost(error)
            self._recover()  # outside of `except`, which refers to the frames of the old generation
        self._history.record(_FinishedCall(what, result, encode))
        self.current_call = ""
        return result

    @property
    def generation(self) -> int:
        return self._agent.generation

    def begin_step(self, number: int) -> None:
        self._history.begin_step(number)
        super().begin_step(number)
        if self.is_moving:
            self._leave_generation()
            self._join()

    def hand_out(self) -> None:
        self.make("the next batch", lambda: None)

    @property
    def wants_to_move(self) -> int:
        return self._agent.generation if self._agent.is_closing else 0

    @property
    def is_moving(self) -> bool:
        return self._ending_generation == self._agent.generation

    @property
    def is_shrinking(self) -> bool:
        return self._agent.is_closing and self._agent.is_shrinking

    def move_at_next_step(self, generation: int) -> None:
        self._ending_generation = generation

    def check_commit(self) -> None:
        self._agent.check_commit()

    def may_commit(self) -> bool:
        return self._agent.may_commit()

    def check_left(self) -> None:
        if (why := self._agent.leave_reason()) is not None:
            raise GenerationEnded(why)

    def announce_training(self, workers: int, *, compiles: bool) -> None:
        self._agent.send("training", workers=workers, compiles=compiles)

    def report_slowness(self, times: float) -> None:
        self._agent.send("slow", times=times)

    def restart(self, why: str, prepare: Callable[[], None], *, is_wrong: bool | None) -> None:
        self._agent.send("restart", why=why, is_wrong=is_wrong)
        try:
            prepare()
        except Exception as error:
            print_message(f"before it starts again, a worker could not prepare that: {type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(RESTART_STATUS)  # not by an exception, which the program might catch

    def end(self) -> None:
        self._agent.send("done")

    def leave(self) -> None:
        self._agent.send("leaves", position=self._history.position, calling=bool(self.current_call))

    # -- generations -------------------------------------------------------------------------------------------------

    def _leave_generation(self) -> None:
        self._groups.leave()
        self._agent.report_left(self._history.reachable_position(self._listener.applied_steps))

    def _check_lost(self, error: Exception) -> None:
        """Raise the error again if the program caused it, and not the end of the generation."""
        if isinstance(error, DivergenceError) and error.wrong_ranks is not None:
            raise error  # all workers know it, and the first of them may have ended the generation already
        if self._agent.leave_reason() is not None:
            return  # whatever the error is: a group that is aborted may raise anything
        if isinstance(error, PROGRAM_ERRORS):
            raise error
        lost = isinstance(error, GenerationEnded) or is_peer_loss(error)
        if self._agent.leave_reason(within_s=ORDER_MUST_COME_WITHIN_S if lost else ORDER_COMES_WITHIN_S) is None:
            raise error

    def _recover(self) -> None:
        """Leave the generation that has ended, and join the next one."""
        began = time.monotonic()
        self._listener.end_generation()
        self._leave_generation()
        self._join()
        self._agent.send("recovered", took_s=time.monotonic() - began)
        self._garbage.collect()

    def _join(self) -> None:
        tries = 0
        while True:
            joined = self._agent.wait_for_generation()
            try:
                self._enter(joined)
                self._is_member = True
                return
            except Exception as error:
                if (
                    self._agent.leave_reason(
                        within_s=0.0 if isinstance(error, PROGRAM_ERRORS) else ORDER_MUST_COME_WITHIN_S
                    )
                    is None
                ):
                    # No worker is lost. A route between two hosts may be broken for a while: leave, and form it again.
                    tries += 1
                    is_network = isinstance(error, WorldError) or is_peer_loss(error)
                    if not is_network or tries == FORM_TRIES:
                        raise
                    print_message(f"generation {joined.generation.number} could not be formed, and is left: {error}")
            self._leave_generation()

    def _enter(self, joined: JoinedGeneration) -> None:
        faults.context["rank"] = joined.rank
        faults.at("joining")
        world = self._groups.join(joined)
        faults.at("forming")
        self._groups.wait_for_members(world)
        group = self._listener.form_group(world)
        self._groups.add_group(group)
        self._groups.finish_forming()
        faults.at("catching-up")
        self._catch_up(joined, group, world.device)
        self._listener.begin_generation()

    def _catch_up(self, joined: JoinedGeneration, group: dist.ProcessGroup, device: torch.device) -> None:
        """The newest worker sends its results, and its last step or its state to the workers that need them."""
        generation = joined.generation
        if generation.source is None:
            return
        source = generation.members.index(generation.source)
        mine: dict[str, Any] = {"applied": self._listener.applied_steps}
        if joined.rank == source:
            mine["made"] = sorted(self._history.results().items())
        told = agreement.gather_values(group, mine, device=device)

        def use_results() -> None:
            if joined.rank != source:  # not before its state is here: the results mean nothing without it
                self._history.known = dict(told[source]["made"])

        newest, steps = told[source]["applied"], [one["applied"] for one in told]
        if steps[joined.rank] == newest or newest < 0:
            use_results()
        if any(0 <= applied < newest for applied in steps):
            self._listener.send_step(source, use_results)
            # A worker that was just given the state cannot send the step: wait until all others have it.
            agreement.gather_values(group, None, device=device)
        if newest >= 0 and min(steps) < 0:
            self._listener.send_state(source, use_results)
