"""Can generations be made to disagree? Random schedules of faults against the rules of lockstep.elastic.membership.

    python campaigns/membership.py --schedules 1000000                  some minutes on a few cores
    python campaigns/membership.py --seed 7 --schedules 1               one schedule again
    python campaigns/membership.py --without fencing                    take a protection away: must turn red

A schedule is a small cluster in simulated time: a store, host agents that see it late, workers that train some steps.
Hosts are killed, stopped, cut off from the store or from each other; workers are killed and stopped; the number of
wanted workers changes. A step is a tuple entry that names the generation that did it, so that replicas which took
different ways show. Everything is a function of the seed.

Exit status: 0 when all of it holds; 1 when not, with the shortest schedule found that shows it; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random
from typing import Any

from lockstep.elastic.membership import (
    START,
    Generation,
    HostRecord,
    OrderAction,
    Position,
    Standing,
    Want,
    Worker,
    WorkerOrder,
    next_generation,
    orders,
)

# In units of about one message; a lease holds for its host a little shorter than for the store.
LEASE, LEASE_BY_OWN_CLOCK, RENEWED_EVERY = 10.0, 9.0, 3.0
HANGS_AFTER = 12.0
DEADLINE = 600.0  # after the last fault has ended; a run takes about 40
AT_ONCE = 2000  # schedules that a process is given
NEVER, ALWAYS = -math.inf, math.inf


class Protection(Enum):
    FENCING = "fencing"  # contributions carry the number of their generation
    LEASES = "leases"  # a step is applied only while the lease holds by the host's clock
    AGREEMENT = "agreement"  # a worker that is behind gets state and results from the newest
    SWAPPING = "swapping"  # `run` is replaced only if it is still the record that was read
    LEAVING = "leaving"  # a host comes back from a lost lease with workers that have left
    PASSING = "passing"  # and does not join the generation that it finds
    SETTLING = "settling"  # newcomers replay only what all members have finished


class Strike(Enum):
    KILL_WORKER = "a worker is killed"
    KILL_NEXT = "as soon as the next generation is formed, its source is killed"
    STOP_WORKER = "a worker stops"
    LEAVE = "a worker leaves by itself"
    DRAIN = "a worker is asked to leave between two steps"
    KILL_HOST = "the host is killed, and comes back"
    STOP_HOST = "the host stops with all its workers"
    STOP_AGENT = "the host agent stops"
    CUT_STORE = "the host cannot reach the store"
    CUT_NEXT = "as soon as the next generation is formed, the host of a member cannot reach the store"
    CUT_PEERS = "two hosts cannot reach each other"
    WANT = "another number of workers is wanted"


@dataclass(frozen=True)
class Fault:
    strike: Strike
    at: float
    lasts: float
    host: int
    pick: int  # which worker, which other host, or how many are wanted


@dataclass(frozen=True)
class Plan:
    """One schedule. The program: `preamble` calls, `steps` of `calls` each, `after` calls more."""

    seed: int
    hosts: tuple[int, ...]  # how many workers each has room for
    boots: tuple[float, ...]
    want: Want
    preamble: int
    steps: int
    calls: int
    after: int
    faults: tuple[Fault, ...]


_STRIKES = tuple(Strike)
_ROOMS = ((2,), (3,), (4,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 1, 1), (2, 2, 2))


def draw(seed: int, strikes: Sequence[Strike] = _STRIKES) -> Plan:
    random = Random(seed).random

    def below(many: int) -> int:
        return int(random() * many)

    room = _ROOMS[below(len(_ROOMS))]
    most = sum(room)
    # A few kinds at a time: what takes two of one kind to happen is rare among eleven.
    few = [strikes[below(len(strikes))] for _ in range(1 + below(4))]
    faults = []
    for _ in range(below(7)):
        at, lasts = (12, 30)[below(2)] * random(), (2, 8, 11, 20)[below(4)] * (0.7 + 0.6 * random())
        faults.append(Fault(few[below(len(few))], at, lasts, below(len(room)), below(60)))
    return Plan(
        seed,
        room,
        tuple(12 * random() * (n > 0) * below(2) for n in range(len(room))),
        _want(1 + below(most), below(4), most),
        preamble=1 + below(5),
        steps=2 + below(5),
        calls=1 + below(2),
        after=below(2),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def _want(workers: int, spare: int, most: int) -> Want:
    return Want(workers, max(1, workers - spare), most)


class Violation(Exception):
    """The rules were broken: what happened."""


# --------------------------------------------------------------------------------------------------------- the cluster

# What a worker remembers: results before the loop, (step, generation that did it) for all applied steps, how often the
# loop began, results since then. Before the loop, the results are still among the latter.
State = tuple[tuple[int, ...], tuple[tuple[int, int], ...], int, tuple[int, ...]]
NOTHING: State = ((), (), -1, ())
Checkpoint = tuple[int, tuple[tuple[int, int], ...]]


def position_of(state: State) -> Position:
    return state[2], len(state[3])


def replayed_in(state: State) -> tuple[int, ...]:
    return state[3] if state[2] == -1 else state[0]


class Process:
    """A worker."""

    def __init__(self, name: str, host: SimulatedAgent) -> None:
        self.id, self.host, self.alive = name, host, True
        self.standing, self.generation, self.state, self.tag = Standing.STARTING, 0, NOTHING, 0
        self.closing = False
        self.up = self.down = self.stopped_until = 0.0  # channels to and from the host agent keep their order
        self.told_journal = 0
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # what happens as soon as it runs again
        # call -> rank -> (arrives at, generation, state of the sender, its checkpoint)
        self.box: dict[tuple[int, ...], dict[int, tuple[float, int, State, Checkpoint]]] = {}


class SimulatedAgent:
    """And its host."""

    def __init__(self, index: int, room: int) -> None:
        self.index, self.name, self.room = index, f"h{index}", room
        self.serial, self.lapses, self.view = 0, 0, 0
        self.cut_until = self.stopped_until = NEVER
        self.alive = False
        self.start_over()

    def start_over(self) -> None:
        self.known: dict[str, Worker] = {}  # the record that it writes
        self.processes: dict[str, Process] = {}
        self.told: dict[str, tuple[OrderAction, int]] = {}
        self.journal: tuple[int, tuple[int, ...]] = (0, ())
        self.lease, self.lease_until, self.found = 0, NEVER, 0
        self.waking = self.writing = False
        self.acted = -1
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.blocked: list[tuple[Process, int, tuple[int, ...]]] = []


class Snapshot:
    """The store at one revision."""

    def __init__(self, run: Generation, swaps: int, records: dict[str, tuple[int, HostRecord]], want: Want) -> None:
        self.run, self.swaps, self.want = run, swaps, want
        self.hosts = [host for _, host in records.values()]
        self.leases = {name: lease for name, (lease, _) in records.items()}
        self.next: Generation | bool | None = False  # False: it is not decided yet


class Cluster:
    def __init__(self, plan: Plan, without: Protection | None, story: list[str] | None = None) -> None:
        self.plan, self.story = plan, story
        self.fencing, self.leases = without is not Protection.FENCING, without is not Protection.LEASES
        self.agreement, self.swapping = without is not Protection.AGREEMENT, without is not Protection.SWAPPING
        self.leaving, self.passing = without is not Protection.LEAVING, without is not Protection.PASSING
        self.settling = without is not Protection.SETTLING
        self.random = Random(~plan.seed).random
        self.now, self.queue, self.ticket = 0.0, [], count().__next__  # type: ignore[var-annotated]
        self.run, self.swaps, self.want = Generation(0), 0, plan.want
        self.records: dict[str, tuple[int, HostRecord]] = {}
        self.snapshots = [Snapshot(self.run, 0, {}, self.want)]
        self.hosts = [SimulatedAgent(index, room) for index, room in enumerate(plan.hosts)]
        self.processes: dict[str, Process] = {}
        self.generations: dict[int, Generation] = {}
        self.groups: dict[int, list[Process]] = {}
        self.starts: dict[int, State] = {}  # what the source of a generation has
        self.waiting: dict[int, list[Process]] = {}  # generation -> who waits for state until its source has joined
        self.cuts: dict[tuple[int, int], float] = {}
        self.checkpoint: Checkpoint = (0, ())
        self.newest_applied = self.live = self.last_lease = 0
        self.ended = False
        self.awaited: list[Fault] = []  # those that happen to the next generation

    # ------------------------------------------------------------------------------------------------- time and words

    def simulate(self) -> None:
        """Raises Violation."""
        for host, at in zip(self.hosts, self.plan.boots, strict=True):
            self.at(at, self.boot, host)
        quiet = 0.0
        for fault in self.plan.faults:
            self.at(fault.at, self.strike, fault)
            quiet = max(quiet, fault.at + fault.lasts)
        queue = self.queue
        while queue:
            self.now, _, act, arguments = heappop(queue)
            if self.now > quiet + DEADLINE:
                break
            act(*arguments)
            if self.ended and self.live == 0:
                return
        raise Violation(f"it hangs: {self.live} workers live, and the program has not ended long after the last fault")

    def at(self, then: float, act: Callable[..., None], *arguments: Any) -> None:
        heappush(self.queue, (then, self.ticket(), act, arguments))

    def later(self, act: Callable[..., None], *arguments: Any) -> None:
        heappush(self.queue, (self.now + self.delay(), self.ticket(), act, arguments))

    def delay(self) -> float:
        """Mostly up to 1; some take nearly as long as a lease, few much longer."""
        drawn = self.random()
        if drawn < 0.93:
            return drawn
        return 1 + 100 * (drawn - 0.93) if drawn < 0.995 else 5000 * (drawn - 0.995)

    def say(self, *words: object) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:7.2f}  {' '.join(map(str, words))}")

    # ------------------------------------------------------------------------------------------------------- the store

    def changed(self) -> None:
        self.snapshots.append(Snapshot(self.run, self.swaps, self.records, self.want))
        for host in self.hosts:
            self.wake_soon(host)

    def swap(self, host: SimulatedAgent, seen: Snapshot, proposed: Generation) -> None:
        if host.cut_until > self.now or (self.swapping and seen.swaps != self.swaps):
            return
        self.swaps += 1
        if proposed.number != seen.run.number:
            self.check_next(seen, proposed)
            self.generations[proposed.number] = proposed
            self.groups[proposed.number] = [self.processes[member] for member in proposed.members]
            if proposed.source is not None:
                self.starts[proposed.number] = self.processes[proposed.source].state
            if self.awaited:
                self.at(self.now + 3 * self.random(), self.strike_next, self.awaited.pop(), proposed)
        self.say(host.name, "swaps in", proposed)
        self.run = proposed
        self.changed()

    def expire(self, host: SimulatedAgent, lapses: int) -> None:
        if host.lapses == lapses:
            self.say("the lease of", host.name, "ends")
            del self.records[host.name]
            self.changed()

    # --------------------------------------------------------------------------------------------------- host agents

    def is_connected(self, host: SimulatedAgent) -> bool:
        return host.alive and host.cut_until <= self.now and host.stopped_until <= self.now

    def holds_lease(self, host: SimulatedAgent) -> bool:
        return host.name in self.records and self.records[host.name][0] == host.lease

    def boot(self, host: SimulatedAgent) -> None:
        host.start_over()
        host.alive = True
        self.say(host.name, "boots")
        self.reconnect(host)

    def reconnect(self, host: SimulatedAgent) -> None:
        """The host runs, and perhaps reaches the store: now, or again."""
        if not host.alive or host.stopped_until > self.now:
            return
        held, host.held = host.held, []
        for act, arguments in held:
            act(*arguments)
        if host.cut_until > self.now:
            return
        if self.holds_lease(host):
            host.lapses += 1
            host.lease_until, host.acted = ALWAYS, -1
            blocked, host.blocked = host.blocked, []
            for process, number, call in blocked:
                self.finish(process, number, call)
            self.write_soon(host)
            self.wake_soon(host)
            return
        host.lease, host.lease_until = 0, NEVER
        for name, number in self.told_to_join(host):
            self.tell(host, WorkerOrder(name, OrderAction.LEAVE, number))
        self.register(host)

    def told_to_join(self, host: SimulatedAgent) -> list[tuple[str, int]]:
        """Who may be inside a generation, for all that the host agent knows."""
        found = []
        for name, worker in host.known.items():
            number = host.told[name][1] if name in host.told else 0
            out = worker.standing is Standing.LEFT and worker.generation == number
            if number and not out and worker.standing is not Standing.DONE:
                found.append((name, number))
        return found

    def register(self, host: SimulatedAgent) -> None:
        if host.lease or not self.is_connected(host) or (self.leaving and self.told_to_join(host)):
            return
        if host.name in self.records:  # of the host agent before
            self.at(self.now + 1, self.register, host)
            return
        self.last_lease += 1
        host.lease, host.lease_until, host.blocked = self.last_lease, ALWAYS, []
        host.lapses += 1
        host.acted = -1
        self.say(host.name, "registers")
        self.put(host)
        host.view = len(self.snapshots) - 1  # what it saw before is from a time in which others thought it gone
        host.found = self.run.number if self.passing else 0
        self.wake_soon(host)

    def write_soon(self, host: SimulatedAgent) -> None:
        if not host.writing:
            host.writing = True
            self.later(self.write, host)

    def write(self, host: SimulatedAgent) -> None:
        host.writing = False
        if self.is_connected(host) and self.holds_lease(host):
            self.put(host)

    def put(self, host: SimulatedAgent) -> None:
        self.records[host.name] = (host.lease, HostRecord(host.name, tuple(host.known.values())))
        self.changed()

    def wake_soon(self, host: SimulatedAgent) -> None:
        if not host.waking:
            host.waking = True
            self.later(self.wake, host)

    def wake(self, host: SimulatedAgent) -> None:
        """Look at the store, as it is or as it was a while ago, and do what follows."""
        host.waking = False
        if not host.lease or not self.is_connected(host):
            return
        newest = len(self.snapshots) - 1
        drawn = self.random()
        if drawn < 0.3 and host.view < newest:
            host.view += int(drawn / 0.3 * (newest - host.view))
            self.wake_soon(host)
        else:
            host.view = newest
        if host.view == host.acted:
            return
        host.acted = host.view
        seen = self.snapshots[host.view]
        if seen.next is False:
            seen.next = next_generation(seen.run, seen.hosts, seen.want)
        if isinstance(seen.next, Generation):
            slowly = 4 if self.random() < 0.3 else 1
            self.at(self.now + slowly * self.delay(), self.swap, host, seen, seen.next)
        for order in orders(seen.run, seen.hosts, host.name, host.found):
            self.tell(host, order)
        self.start_newcomers(host, seen)

    def tell(self, host: SimulatedAgent, order: WorkerOrder) -> None:
        process = host.processes.get(order.worker)
        if process is None or (host.told.get(order.worker) == (order.do, order.generation) and self.random() < 0.9):
            return
        if order.do is OrderAction.KILL or order.do is OrderAction.RELEASE:
            self.say(order.worker, "gets", order.do.value, "because", order.why)
            self.kill(process)
            return
        host.told[order.worker] = (order.do, order.generation)
        process.down = max(process.down, self.now + self.delay())
        self.at(process.down, self.obey, process, order.do, order.generation)

    def start_newcomers(self, host: SimulatedAgent, seen: Snapshot) -> None:
        if len(host.known) >= host.room and not self.ended:
            return
        done = Standing.DONE
        own = sum(worker.standing is not done and not worker.is_leaving for worker in host.known.values())
        if own >= host.room:
            return
        missing = seen.want.workers - own
        for other in seen.hosts:
            for worker in other.workers:
                if worker.standing is done and worker.id in seen.run.members:
                    return
                missing -= other.name != host.name and worker.standing is not done and not worker.is_leaving
        for _ in range(min(missing, host.room - own)):
            host.serial += 1
            process = Process(f"{host.name}.{host.serial}", host)
            host.processes[process.id] = self.processes[process.id] = process
            host.known[process.id] = Worker(process.id, Standing.STARTING)
            self.live += 1
            self.at(self.now + 2 + 6 * self.random(), self.become_ready, process)
            self.write_soon(host)

    def hear(self, process: Process, standing: Standing, number: int, position: Position) -> None:
        host = process.host
        if host.stopped_until > self.now:
            host.held.append((self.hear, (process, standing, number, position)))
        elif process.id in host.known:
            known = host.known[process.id]
            host.known[process.id] = replace(known, standing=standing, generation=number, position=position)
            self.news(host)

    def reap(self, process: Process) -> None:
        host = process.host
        if host.stopped_until > self.now:
            host.held.append((self.reap, (process,)))
        elif process.id in host.processes:
            del host.processes[process.id], host.known[process.id]
            self.news(host)

    def news(self, host: SimulatedAgent) -> None:
        if host.lease:
            self.write_soon(host)
        else:
            self.register(host)

    # ------------------------------------------------------------------------------------------------------- workers

    def report(self, process: Process) -> None:
        number = process.tag if process.standing is Standing.READY else process.generation
        process.up = max(process.up, self.now + self.delay())
        self.at(process.up, self.hear, process, process.standing, number, position_of(process.state))

    def hold(self, process: Process, act: Callable[..., None], *arguments: Any) -> bool:
        """Whether the worker is stopped or dead; if stopped, `act` happens later."""
        if process.stopped_until > self.now:
            process.held.append((act, arguments))
            return True
        return not process.alive

    def become_ready(self, process: Process) -> None:
        if self.hold(process, self.become_ready, process):
            return
        drawn = self.random()
        host = process.host if drawn < 0.5 else self.hosts[int(drawn * 1000) % len(self.hosts)]
        number, results = host.journal
        if number < self.snapshots[process.host.view].run.anew:
            results = ()
        # Some host agents hear late of the last results.
        known = len(results) if self.random() < 0.7 else int(self.random() * (len(results) + 1))
        process.state, process.tag = ((), (), -1, results[:known]), number
        process.standing = Standing.READY
        self.report(process)

    def obey(self, process: Process, do: OrderAction, number: int) -> None:
        if self.hold(process, self.obey, process, do, number):
            return
        if do is OrderAction.JOIN:
            self.join(process, number)
        elif do is OrderAction.LEAVE:
            self.leave(process, number)
        elif process.standing is Standing.INSIDE and process.generation == number:
            process.closing = True

    def leave(self, process: Process, number: int) -> None:
        if self.hold(process, self.leave, process, number) or process.generation > number:
            return
        if process.generation < number or process.standing is Standing.INSIDE:
            process.standing, process.generation = Standing.LEFT, number
            self.say(process.id, "leaves", number, "at", position_of(process.state))
            self.report(process)

    def join(self, process: Process, number: int) -> None:
        if process.generation >= number:
            return
        process.standing, process.generation, process.closing = Standing.INSIDE, number, False
        if not self.fencing:  # what the old group had received is gone; what is under way will arrive
            for box in process.box.values():
                for rank in [rank for rank, (arrives, *_) in box.items() if arrives <= self.now]:
                    if box[rank][1] < number:
                        del box[rank]
        self.say(process.id, "joins", number, "at", position_of(process.state))
        self.report(process)
        generation = self.generations[number]
        where, own = generation.position, position_of(process.state)
        if where is None:
            where = START
        if own > where:
            raise Violation(f"{process.id} is at {own} and joins generation {number}, which begins at {where}")
        source = None if generation.source is None else self.processes[generation.source]
        if process.id == generation.source:
            for waiter in self.waiting.pop(number, ()):
                self.later(self.send_state, process, waiter, number)
        if own == where:
            if source is not None and process.state != self.starts[number]:
                raise Violation(f"{process.id} and {source.id} differ at {own}: {process.state}, {self.starts[number]}")
            self.go(process, number)
        elif source is None:
            raise Violation(f"{process.id} is behind generation {number} and no worker can help it")
        elif not self.agreement:
            before, history, _, _ = process.state
            process.state = (before, history, where[0], (0,) * where[1])
            self.go(process, number)
        elif source.generation == number and source.standing is Standing.INSIDE:
            self.later(self.send_state, source, process, number)
        else:
            self.waiting.setdefault(number, []).append(process)

    def send_state(self, source: Process, to: Process, number: int) -> None:
        if self.hold(source, self.send_state, source, to, number) or not self.is_inside(source, number):
            return
        self.at(self.arrival(source, to), self.catch_up, to, number, source.state)

    def catch_up(self, process: Process, number: int, state: State) -> None:
        if self.hold(process, self.catch_up, process, number, state) or not self.is_inside(process, number):
            return
        own, given = replayed_in(process.state), replayed_in(state)
        if own != given[: len(own)]:
            raise Violation(f"{process.id} replayed {own}, but generation {number} has {given}")
        if process.state[1] != state[1][: len(process.state[1])]:
            raise Violation(f"{process.id} applied {process.state[1]}, but generation {number} has {state[1]}")
        if process.state[2] == -1 and state[2] >= 0 and state[3]:
            raise Violation(f"{process.id} has no state and is to go on in the midst of a step, {position_of(state)}")
        process.state = state
        self.go(process, number)

    def is_inside(self, process: Process, number: int) -> bool:
        return process.generation == number and process.standing is Standing.INSIDE

    def go(self, process: Process, number: int) -> None:
        """Contribute to the next call, or leave at the top of the loop."""
        if self.hold(process, self.go, process, number) or not self.is_inside(process, number):
            return
        top, calls = position_of(process.state)
        if process.closing and calls == 0 and top >= 0:
            self.leave(process, number)
            return
        call = (number, top, calls) if self.fencing else (top, calls)
        members = self.groups[number]
        rank, size = members.index(process), len(members)
        for peer in members:
            arrives = self.now if peer is process else self.arrival(process, peer)
            box = peer.box.get(call)
            if box is None:
                box = peer.box[call] = {}
            if rank not in box or peer.generation < number:
                box[rank] = (arrives, number, process.state, self.checkpoint)
            full = len(box) == size if self.fencing else all(one in box for one in range(size))
            if full and peer.generation == number:
                self.at(max([self.now, *[entry[0] for entry in box.values()]]), self.finish, peer, number, call)

    def arrival(self, sender: Process, receiver: Process) -> float:
        if sender.host is receiver.host:
            return self.now + self.delay()
        healed = self.cuts.get((sender.host.index, receiver.host.index), 0.0)
        return max(self.now, healed) + self.delay()

    def finish(self, process: Process, number: int, call: tuple[int, ...]) -> None:
        if self.hold(process, self.finish, process, number, call) or not self.is_inside(process, number):
            return
        before, history, top, results = process.state
        if call[-2:] != (top, len(results)):
            return
        host = process.host
        if self.leases and host.lease_until < self.now:
            host.blocked.append((process, number, call))
            return
        box = process.box.pop(call)
        for rank, member in enumerate(self.groups[number]):
            _, generation, state, _ = box[rank]
            if generation != number:
                raise Violation(f"{process.id} takes a contribution of generation {generation} for one of {number}")
            if state != process.state:
                raise Violation(
                    f"call {call} of generation {number}: {process.id} has {process.state}, {member.id} has {state}"
                )
        settled, results = results, (*results, number)
        if not self.settling:
            settled = results
        if top == -1:
            # The last call before the loop chooses the checkpoint. Newcomers wait before it.
            self.tell_journal(process, settled[: self.plan.preamble - 1])
            if len(results) == self.plan.preamble:
                top, history = box[0][3]
                before, results = results, ()
        else:
            if process.told_journal < number:
                self.tell_journal(process, before[: self.plan.preamble - 1])
            if len(results) == self.plan.calls:
                history = self.apply(process, number, top, history)
                if top + 1 < self.plan.steps:
                    top, results = top + 1, ()
        process.state = (before, history, top, results)
        if top + 1 == self.plan.steps and len(results) == self.plan.calls + self.plan.after:
            self.end(process)
        elif self.random() < 0.5:
            self.go(process, number)
        else:
            self.later(self.go, process, number)

    def apply(
        self, process: Process, number: int, top: int, history: tuple[tuple[int, int], ...]
    ) -> tuple[tuple[int, int], ...]:
        self.say(process.id, "applies step", top, "in", number)
        if number < self.newest_applied:
            raise Violation(
                f"{process.id} applies step {top} in generation {number}; generation {self.newest_applied} has begun"
            )
        self.newest_applied = number
        history = (*history, (top, number))
        if [step for step, _ in history] != list(range(top + 1)):
            raise Violation(f"{process.id} has applied {history}")
        if top % 2 and top + 1 < self.plan.steps and self.groups[number][0] is process:
            self.checkpoint = (top + 1, history)
        return history

    def tell_journal(self, process: Process, results: tuple[int, ...]) -> None:
        number, host = process.generation, process.host
        process.told_journal = number
        if (number, len(results)) > (host.journal[0], len(host.journal[1])):
            host.journal = (number, results)

    def end(self, process: Process) -> None:
        self.say(process.id, "is done")
        process.standing, process.alive = Standing.DONE, False
        self.live -= 1
        self.ended = True
        self.report(process)

    def kill(self, process: Process) -> None:
        if not process.alive:
            return
        process.alive = False
        process.stopped_until = NEVER
        self.live -= 1
        self.later(self.reap, process)
        if process.standing is Standing.INSIDE:
            for peer in self.groups[process.generation]:
                if peer.alive and self.is_inside(peer, process.generation) and self.random() < 0.5:
                    self.later(self.leave, peer, process.generation)

    # -------------------------------------------------------------------------------------------------------- faults

    def strike(self, fault: Fault) -> None:
        self.say(f"{fault.strike.value}: h{fault.host}, {fault.pick}, until {self.now + fault.lasts:.2f}")
        host, until = self.hosts[fault.host], self.now + fault.lasts
        match fault.strike:
            case Strike.KILL_WORKER | Strike.STOP_WORKER | Strike.LEAVE | Strike.DRAIN:
                living = [process for process in host.processes.values() if process.alive]
                if living:
                    self.strike_worker(living[fault.pick % len(living)], fault.strike, until)
            case Strike.KILL_NEXT | Strike.CUT_NEXT:
                self.awaited.append(fault)
            case Strike.WANT:
                most = self.plan.want.most
                self.want = _want(fault.pick % most + 1, fault.pick // most % 4, most)
                self.changed()
            case Strike.CUT_PEERS:
                other = self.hosts[fault.pick % len(self.hosts)]
                for pair in ((host.index, other.index), (other.index, host.index)):
                    self.cuts[pair] = max(until, self.cuts.get(pair, 0.0))
                self.at(self.now + HANGS_AFTER, self.time_out, host, other)
            case _ if host.alive:
                self.strike_host(host, fault.strike, until)

    def strike_next(self, fault: Fault, generation: Generation) -> None:
        if fault.strike is Strike.KILL_NEXT:
            self.kill(self.processes[generation.source or generation.members[0]])
            return
        host = self.processes[generation.members[fault.pick % len(generation.members)]].host
        if host.alive:
            self.say(host.name, "cannot reach the store")
            self.strike_host(host, Strike.CUT_STORE, self.now + fault.lasts)

    def strike_worker(self, process: Process, strike: Strike, until: float) -> None:
        if strike is Strike.KILL_WORKER:
            self.kill(process)
        elif strike is Strike.STOP_WORKER:
            self.stop(process, until)
            self.at(self.now + HANGS_AFTER, self.kill_stopped, process)
        elif strike is Strike.DRAIN:
            self.drain(process)
        elif process.standing is Standing.INSIDE:
            self.leave(process, process.generation)

    def drain(self, process: Process) -> None:
        """As the host agent does it: a member leaves between two steps, and another worker is ended."""
        host = process.host
        if host.stopped_until > self.now:
            host.held.append((self.drain, (process,)))
        elif process.id in host.known:
            if process.standing in (Standing.STARTING, Standing.READY):
                self.kill(process)
            else:
                host.known[process.id] = replace(host.known[process.id], is_leaving=True)
                self.news(host)

    def strike_host(self, host: SimulatedAgent, strike: Strike, until: float) -> None:
        if host.lease and host.lease_until == ALWAYS:
            renewed = self.now - RENEWED_EVERY * self.random()
            host.lease_until = renewed + LEASE_BY_OWN_CLOCK
            self.at(renewed + LEASE, self.expire, host, host.lapses)
        if strike is Strike.CUT_STORE:
            host.cut_until = max(until, host.cut_until)
            self.at(until, self.reconnect, host)
        elif strike is Strike.KILL_HOST:
            host.alive = False
            for process in host.processes.values():
                self.kill(process)
            self.at(until, self.boot, host)
        else:
            host.stopped_until = max(until, host.stopped_until)
            if strike is Strike.STOP_HOST:
                for process in host.processes.values():
                    self.stop(process, until)
            self.at(until, self.reconnect, host)

    def stop(self, process: Process, until: float) -> None:
        if process.alive:
            process.stopped_until = max(until, process.stopped_until)
            self.at(until, self.go_on, process)

    def go_on(self, process: Process) -> None:
        if process.alive and process.stopped_until <= self.now:
            held, process.held = process.held, []
            for act, arguments in held:
                act(*arguments)

    def kill_stopped(self, process: Process) -> None:
        host = process.host
        if process.stopped_until > self.now and host.alive and host.stopped_until <= self.now:
            self.kill(process)

    def time_out(self, one: SimulatedAgent, other: SimulatedAgent) -> None:
        """Workers that cannot reach each other stop to wait, some of them."""
        if self.cuts[one.index, other.index] > self.now:
            for process in (*one.processes.values(), *other.processes.values()):
                if process.standing is Standing.INSIDE and self.random() < 0.5:
                    self.leave(process, process.generation)

    # -------------------------------------------------------------------------------------------------------- checks

    def check_next(self, seen: Snapshot, proposed: Generation) -> None:
        """At the moment at which the store takes it, and by what is true then, not by what a host has read."""
        if proposed.number in self.generations:
            raise Violation(f"two generations have the number {proposed.number}")
        for member in seen.run.members:
            process = self.processes[member]
            name = process.host.name
            present = name in self.records and self.records[name][0] == seen.leases.get(name)
            if not process.alive or not present:
                continue
            if process.standing is not Standing.LEFT or process.generation != seen.run.number:
                raise Violation(f"generation {proposed.number} is formed while {member} may go on in {seen.run.number}")
            own = position_of(process.state)
            if proposed.position is None or own > proposed.position:
                raise Violation(f"generation {proposed.number} begins at {proposed.position}, but {member} has {own}")


# -------------------------------------------------------------------------------------------------------- the campaign


def find_violation(plan: Plan, without: Protection | None, story: list[str] | None = None) -> str | None:
    try:
        Cluster(plan, without, story).simulate()
    except Violation as violation:
        return str(violation)
    return None


def search(first: int, many: int, without: Protection | None, strikes: Sequence[Strike] = _STRIKES) -> Plan | None:
    """The first schedule that breaks the rules."""
    for seed in range(first, first + many):
        plan = draw(seed, strikes)
        if find_violation(plan, without) is not None:
            return plan
    return None


def shrink(plan: Plan, without: Protection | None, tries: int = 300) -> Plan:
    """A plan with less in it that breaks the rules too, with another seed perhaps."""
    for smaller in _smaller(plan):
        for seed in range(tries):
            candidate = replace(smaller, seed=seed)
            if find_violation(candidate, without) is not None:
                return shrink(candidate, without, tries)
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    for n in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:n] + plan.faults[n + 1 :])
    if len(plan.hosts) > 1:
        hosts = plan.hosts[:-1]
        faults = tuple(fault for fault in plan.faults if fault.host < len(hosts))
        want = Want(min(plan.want.workers, sum(hosts)), 1, sum(hosts))
        yield replace(plan, hosts=hosts, boots=plan.boots[:-1], faults=faults, want=want)
    if any(plan.boots):
        yield replace(plan, boots=tuple(0.0 for _ in plan.boots))
    for name, least in (("preamble", 1), ("steps", 1), ("calls", 1), ("after", 0)):
        value = getattr(plan, name)
        if value > least:
            yield replace(plan, **{name: value - 1})
    if plan.want.workers > 1:
        yield replace(plan, want=Want(plan.want.workers - 1, 1, plan.want.most))


def tell_story(plan: Plan, without: Protection | None) -> str:
    story: list[str] = []
    violation = find_violation(plan, without, story)
    return "\n".join([str(plan), *story, f"VIOLATION: {violation}"])


def _search(job: tuple[int, int, Protection | None]) -> tuple[int, Plan | None]:
    return job[1], search(*job)


def campaign(schedules: int, seed: int, without: Protection | None, workers: int) -> Plan | None:
    began, done = time.monotonic(), 0
    ends = [*range(seed, seed + schedules, AT_ONCE), seed + schedules]
    jobs = [(first, stop - first, without) for first, stop in pairwise(ends)]
    # A schedule leaves its cycles behind all at once: looking for them all the time costs a tenth of it.
    with multiprocessing.Pool(workers, gc.set_threshold, (200_000,)) as pool:
        for many, found in pool.imap_unordered(_search, jobs):
            done += many
            rate = done / (time.monotonic() - began)
            print(f"\r{done} of {schedules} schedules, {rate:.0f} a second", end="", file=sys.stderr, flush=True)
            if found is not None:
                print(file=sys.stderr)
                return found
    print(file=sys.stderr)
    return None


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000, metavar="N", help="how many (default: 100000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first one (default: 0)")
    parser.add_argument("--without", type=Protection, metavar="|".join(one.value for one in Protection))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: cores)")
    arguments = parser.parse_args(argv)
    for name, least in (("schedules", 1), ("seed", 0), ("workers", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: must be {least} or more")
    return arguments


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    found = campaign(arguments.schedules, arguments.seed, arguments.without, arguments.workers)
    if found is None:
        print(f"{arguments.schedules} schedules hold")
        return 0
    print(f"seed {found.seed} does not hold; the shortest schedule found:")
    print(tell_story(shrink(found, arguments.without), arguments.without))
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
