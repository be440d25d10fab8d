"""The calls of a worker in an elastic run, in which workers come and go.

A call in which a worker was lost is made again by those that are left, and a worker that comes later goes through the
program as the others did.

Note [Positions]
Calls are numbered: (steps begun, calls since then), and -1 before the loop. A call is a function of what all workers
have in common, so all workers get the same result. When the members of a generation part, some may have finished a
call and others not, never more than one step apart. The newest wins: it sends its results, and those that are behind
take them instead of calling. If a step is among them, it sends what the step changes as well (`Update` in step.py),
and not its state: between its steps a program does things of its own, with the model, the optimiser or what it has
registered, and each worker does them exactly once, to its own state. A call that no survivor has finished is made
again.

Note [Newcomers]
A process that is started in the middle of a run begins at the top of the program. What the others called before their
loop it finds in a journal, so it builds its model and its data without collective calls, and waits at the loop. It is
taken in at the top of a step, before the batch is handed out to the program: there it needs nothing but the state.
Handing out the batch counts as a call, so that a survivor which has its batch is not at the top any more. The journal
holds results that are settled: all members have them. A worker that has finished call n knows that call n - 1
is settled.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist

from lockstep import faults
from lockstep.comm import agreement, deferred_destroy
from lockstep.comm.peer_watch import tells_of_a_lost_peer
from lockstep.elastic.agent_client import Joining, Left, Seat, Welcome
from lockstep.elastic.recovery import Company
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
from lockstep.train.collective_calls import Calls, say, unchanged
from lockstep.world.world import World

T = TypeVar("T")

# Errors of the program itself, and never of a worker that was lost.
OWN: Final = (
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

# How long an error may be older than the order to leave, which tells that the error was not the program's own. That a
# connection broke, we know before the lease of the host ends that was lost (launcher/hosts.py, LONGEST_LEASE_S).
ORDER_COMES_WITHIN_S: Final = 0.3
ORDER_MUST_COME_WITHIN_S: Final = 20.0

FORM_TRIES: Final = 3  # generations that cannot be formed, one after the other, although no worker is lost

COLLECT_WITHIN_S: Final = 0.02  # the collector takes 2 ms, unless the program has a great many objects:
COLLECT_EVERY: Final = 8  # then it is not called after every recovery

LARGEST_RESULT_BYTES: Final = 500_000  # as JSON; as text in the store it may be twice as much, which takes 1 MiB


class GenerationListener(Protocol):
    """What a run does when its generation changes."""

    def part(self) -> None:
        """The generation has ended in the middle of a call: take back what the call has half done."""

    def gather(self, world: World) -> dist.ProcessGroup:
        """A new one: form the private group."""

    def settle(self) -> None:
        """All workers have the newest results and state: distribute the shards."""

    @property
    def applied(self) -> int:
        """Steps in our state; -1 without one."""

    def send_step(self, source: int, then: Callable[[], None]) -> None:
        """All workers: those that have missed the newest step get it from rank `source`, apply it, and call `then`."""

    def send_state(self, source: int, then: Callable[[], None]) -> None:
        """All workers: those without a state take over that of rank `source`, and call `then` in the same moment.

        Raises DivergenceError if a worker has not got what was sent.
        """


@dataclass
class _Made:
    """A call that was made: what it was, and its result, which `plain` encodes as JSON."""

    what: str
    result: Any
    encode: Callable[[Any], Any]

    def plain(self) -> list[Any]:
        return [self.what, self.encode(self.result)]


class ElasticCalls(Calls):
    """See Note [Positions] and Note [Newcomers]."""

    is_elastic = True

    def __init__(
        self, seat: Seat, welcome: Welcome, crew: GenerationListener, *, backend: str | None, device: Any
    ) -> None:
        super().__init__()
        self._seat, self._crew = seat, crew
        seat.is_calling = lambda: bool(self.doing)
        self._company = Company(seat, slot=welcome.slot, backend=backend, device=device)
        self._position = (-1, 0)
        self._made: dict[int, list[_Made]] = {-1: []}  # by step begun: before the loop, this one and the last
        self._known: dict[int, list[list[Any]]] = {}  # what others have told us
        self._journal_ends: int | None = None  # the number of the call that begins the loop
        self._published = 0
        self._said_loop = False
        self._is_member = False
        self._moves = 0
        self._recoveries, self._collecting_s = 0, 0.0

    @property
    def position(self) -> tuple[int, int]:
        return self._position

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
    ) -> T:
        self._refuse_to_go_on(what)
        if begins_loop:
            self._journal_ends = self._position[1]
        self.doing = what
        while True:
            told = self._find(what)
            if told is not None:
                result = decode(told[1])
                break
            if not self._is_member:
                self._come_in()
                if begins_loop and self._crew.applied >= 0:
                    self.doing = ""
                    return decode(None)  # the others are in the loop, and so are we, with their state
                continue
            try:
                result = self._carry_out(call)
                break
            except Exception as error:
                self._check_lost(error)
            self._recover()  # outside of `except`, which holds the frames of the old generation
        self._note(_Made(what, result, encode))
        self.doing = ""
        return result

    def _find(self, what: str) -> list[Any] | None:
        """The result that another worker sent for this call; None if there is none."""
        top, calls = self._position
        if top == -1 and not self._is_member and calls != self._journal_ends and self._seat.await_journal(calls + 1):
            self._known[-1] = [[name, result] for name, result in self._seat.journal]
        known = self._known.get(top, [])
        if calls >= len(known):
            return None
        if known[calls][0] != what:
            raise DesyncError(
                f"this worker calls {what} where the others called {known[calls][0]} "
                f"({f'call {calls} of step {top}' if top >= 0 else f'call {calls + 1} after the start'}); look for "
                "control flow that depends on the worker"
            )
        return known[calls]

    def _note(self, made: _Made) -> None:
        top, calls = self._position
        self._made[top].append(made)
        self._go_to((top, calls + 1))
        before = self._made[-1]
        settled = len(before) - (1 if top == -1 else 0)
        if self._journal_ends is not None:
            settled = min(settled, self._journal_ends)
        if self._published < settled:
            entries = [one.plain() for one in before[self._published : settled]]
            for what, result in entries:
                if (size := len(json.dumps(result))) > LARGEST_RESULT_BYTES:
                    raise ValueError(
                        f"{what} gave {size} bytes. Of a call before the loop an elastic run keeps the result, for "
                        f"workers that come later: at most {LARGEST_RESULT_BYTES} bytes. Return less, or a path"
                    )
            self._seat.say("journal", first=self._published, entries=entries)
            self._published = settled
        if top >= 0 and not self._said_loop:
            self._said_loop = True
            self._seat.say("loop")

    @property
    def generation(self) -> int:
        return self._seat.generation

    def begin_step(self, number: int) -> None:
        self._made = {top: made for top, made in self._made.items() if top in (-1, self._position[0])} | {number: []}
        self._known = {top: known for top, known in self._known.items() if top >= number}
        self._go_to((number, 0))
        faults.here["step"] = number
        faults.at("top")
        if self._moves == self._seat.generation:
            self._move()

    def hand_out(self) -> None:
        self.make("the next batch", lambda: None)

    def _go_to(self, position: tuple[int, int]) -> None:
        self._position = self._seat.position = position

    @property
    def wants_to_move(self) -> int:
        return self._seat.generation if self._seat.is_closing else 0

    def move_at_next_step(self, generation: int) -> None:
        self._moves = generation

    def check_commit(self) -> None:
        self._seat.check_commit()

    def may_commit(self) -> bool:
        return self._seat.may_commit()

    def check_left(self) -> None:
        if (why := self._seat.why_left()) is not None:
            raise Left(why)

    def limit(self, workers: int) -> None:
        self._seat.say("limit", workers=workers)

    def end(self) -> None:
        self._seat.say("done")

    def leave(self) -> None:
        self._seat.say("leaves", position=self._position, calling=bool(self.doing))

    # -- generations -------------------------------------------------------------------------------------------------

    def _come_in(self) -> None:
        self._seat.ready(self._position)
        self._join()

    def _move(self) -> None:
        self._company.leave()
        self._seat.left(self._standing())
        self._join()

    def _check_lost(self, error: Exception) -> None:
        """Raises the error again if it is the program's own, and not about a generation that has ended."""
        if self._seat.why_left() is not None:
            return  # whatever it is: groups that end under our hands may give us anything
        if isinstance(error, OWN):
            raise error
        lost = isinstance(error, Left) or tells_of_a_lost_peer(error)
        if self._seat.why_left(within_s=ORDER_MUST_COME_WITHIN_S if lost else ORDER_COMES_WITHIN_S) is None:
            raise error

    def _recover(self) -> None:
        """Out of a generation that has ended, and into the next one."""
        began = time.monotonic()
        self._crew.part()
        self._company.leave()
        self._seat.left(self._standing())
        self._join()
        self._seat.say("recovered", took_s=time.monotonic() - began)
        self._recoveries += 1
        self._collect()

    def _collect(self) -> None:
        """What is left of earlier generations is in cycles, and holds memory and descriptors."""
        if self._collecting_s < COLLECT_WITHIN_S or self._recoveries % COLLECT_EVERY == 0:
            began_s = time.monotonic()
            gc.collect()
            self._collecting_s = time.monotonic() - began_s
        deferred_destroy.bury()

    def _join(self) -> None:
        tries = 0
        while True:
            joining = self._seat.await_join()
            try:
                self._enter(joining)
                self._is_member = True
                return
            except Exception as error:
                if self._seat.why_left(within_s=0.0 if isinstance(error, OWN) else ORDER_MUST_COME_WITHIN_S) is None:
                    # No worker is lost. A route between two hosts may be broken for a while: leave, and all form anew.
                    tries += 1
                    is_network = isinstance(error, WorldError) or tells_of_a_lost_peer(error)
                    if not is_network or tries == FORM_TRIES:
                        raise
                    say(f"generation {joining.generation.number} could not be formed, and is left: {error}")
            self._company.leave()
            self._seat.left(self._standing())

    def _enter(self, joining: Joining) -> None:
        faults.here["rank"] = joining.rank
        faults.at("joining")
        world = self._company.join(joining)
        faults.at("forming")
        self._company.meet(world)
        group = self._crew.gather(world)
        self._company.own(group)
        self._company.formed()
        faults.at("catching-up")
        self._catch_up(joining, group, world.device)
        self._crew.settle()

    def _catch_up(self, joining: Joining, group: dist.ProcessGroup, device: torch.device) -> None:
        """Newest wins: the source tells its results, and sends its last step or its state to those that need it."""
        generation = joining.generation
        if generation.source is None:
            return
        source = generation.members.index(generation.source)
        mine: dict[str, Any] = {"applied": self._crew.applied}
        if joining.rank == source:
            mine["made"] = sorted(self._results().items())
        told = agreement.tell_all(group, mine, device=device)

        def take_over() -> None:
            if joining.rank != source:  # not before we have its state: to have resumed means nothing without
                self._known = dict(told[source]["made"])

        newest, steps = told[source]["applied"], [one["applied"] for one in told]
        if steps[joining.rank] == newest or newest < 0:
            take_over()
        if any(0 <= applied < newest for applied in steps):
            self._crew.send_step(source, take_over)
            # A worker that has been given the state could not send the step: first all others have it.
            agreement.tell_all(group, None, device=device)
        if newest >= 0 and min(steps) < 0:
            self._crew.send_state(source, take_over)

    def _results(self) -> dict[int, list[list[Any]]]:
        """Of all calls that belong to our state, by step begun: those that we made, and those that we were told of."""
        results = {top: [one.plain() for one in made] for top, made in self._made.items()}
        for top, known in self._known.items():
            mine = results.setdefault(top, [])
            mine += known[len(mine) :]
        return results

    def _standing(self) -> tuple[int, int]:
        """The position that this worker can reach with the results, and perhaps the state, of a worker that was lost.

        Not beyond the step that the program is in, for what it does itself in between has yet to be done. Only a
        newcomer that was given a state is where that is.
        """
        if self._crew.applied < 0 or not self._known:
            return self._position
        top = self._position[0] if self._position[0] >= 0 else max(self._known)
        return max(self._position, (top, len(self._known.get(top, []))))
