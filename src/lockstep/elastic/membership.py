"""Which workers train together, and from which position on: the records that the host agents share, and pure functions
that derive the next record and the orders for workers from them.

Any agent may propose what `next_generation` returns, and every agent carries out what `orders` returns for its own
workers. There is no leader: the store accepts one proposal per `run` record, and the other agents read it again.

Note [Rules for host agents]
The functions below are safe only if all of these rules hold.
1. `hosts` were read together with `now`, or later; never before. `run` is replaced only if it is still the record read.
2. LEFT is written after the worker has left, DONE after its Run is over, QUIT after it was reaped, and a worker that
   was lost is removed from the record after it was reaped. A worker that does not obey in time is killed. LEFT is
   final: no JOIN of that generation follows.
3. A host whose lease ended makes its workers leave, and returns with those that have LEFT and with newcomers, never
   with one that is INSIDE. It then uses only what it reads after its return, and joins no generation that it `found`
   there: another agent that saw the host missing may be about to replace that one.
4. A worker applies a step only while the lease of its host holds by the host's own clock.
5. READY is final: the worker replays no more calls until it becomes a member. It replays only *settled* calls: those
   that all members have finished. A worker that finished call n knows that call n - 1 is settled. Newer calls may yet
   be lost together with the workers that finished them, and be made again with another result. A newcomer is sent
   neither the calls before `anew` nor the checkpoint that was chosen: after all workers are lost, it is chosen again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

# (top, calls): steps applied when the loop last began a step (-1 before the loop), collective calls finished since.
Position = tuple[int, int]
START: Position = (-1, 0)


class GenerationPhase(Enum):
    RUNNING = "running"
    CLOSING = "closing"  # members are to leave together when the loop begins its next step


@dataclass(frozen=True)
class Generation:
    number: int  # 0: no generation has been formed yet
    members: tuple[str, ...] = ()  # in the order of ranks
    phase: GenerationPhase = GenerationPhase.RUNNING
    position: Position | None = None  # where it begins; None: at the last checkpoint, or at the start of the program
    source: str | None = None  # the member that has the results and the state of that position
    why: str = ""  # why it was formed, for messages
    shrinks: bool = False  # in phase CLOSING: some of its members will not be in the next one
    anew: int = 0  # the last generation that repeats settled calls: results sent before it are void


class Standing(Enum):
    """The state of a worker, as its host agent publishes it."""

    STARTING = "starting"  # the process was started and cannot become a member yet
    READY = "ready"  # a newcomer without state: it replayed the results up to `position` (top is -1) of `generation`
    INSIDE = "inside"  # in `generation`
    LEFT = "left"  # has left `generation` and keeps the state and results of `position`
    DONE = "done"  # its Run is over, or its program has ended together with that of all members
    QUIT = "quit"  # it left its Run by an exception and ended with status 0: DONE if all members do that, else lost


@dataclass(frozen=True)
class Worker:
    id: str  # "<host>.<serial>"; ids are not reused
    standing: Standing
    generation: int = 0
    position: Position = START
    is_leaving: bool = False  # it was asked to leave the run between two steps, while the others continue


@dataclass(frozen=True)
class HostRecord:
    name: str
    workers: tuple[Worker, ...] = ()
    is_leaving: bool = False  # it starts no workers any more: those of the other hosts take their place


@dataclass(frozen=True)
class Want:
    workers: int
    least: int
    most: int


# ------------------------------------------------------------------------------------------------- the next generation


def next_generation(now: Generation, hosts: Sequence[HostRecord], want: Want) -> Generation | None:
    """The record that should replace `now`; None if nothing has to change yet."""
    workers = _by_id(hosts)
    present = [workers[member] for member in now.members if member in workers]
    if present and not _why_broken(now, workers):
        return _close(now, workers, want)
    if not all(_is_out(worker, now) for worker in present):
        return None
    survivors = [worker for worker in present if worker.standing is Standing.LEFT]
    if survivors:
        return _from_survivors(now, survivors, workers, want)
    if present:  # all DONE, or about to be
        return None
    return _from_newcomers(now, workers, want)


def _close(now: Generation, workers: Mapping[str, Worker], want: Want) -> Generation | None:
    """`now` in phase CLOSING, or None. CLOSING is final, even if its reason no longer holds later."""
    if now.phase is GenerationPhase.CLOSING or _is_ending(now, workers):
        return None
    newcomers, size = _newcomers(now, workers), len(now.members)
    leaving = [member for member in now.members if workers[member].is_leaving]
    staying = size - len(leaving)
    if size > want.workers:
        why = f"{_count(want.workers)} wanted"
    elif leaving and staying + len(newcomers) >= want.least:
        why = _join_names(leaving, "leaves", "leave")
    elif newcomers and size < want.workers:
        why = _join_names([worker.id for worker in newcomers[: want.workers - size]], "joins", "join")
    elif size < want.least:  # it was formed only to finish a step
        why = f"at least {_count(want.least)} wanted"
    else:
        return None
    return replace(now, phase=GenerationPhase.CLOSING, why=why, shrinks=bool(leaving) or size > want.workers)


def _from_survivors(
    now: Generation, survivors: Sequence[Worker], workers: Mapping[str, Worker], want: Want
) -> Generation | None:
    newest = max(survivors, key=lambda worker: (worker.position, not worker.is_leaving))
    top, calls = newest.position
    in_step = top >= 0 and calls > 0
    if in_step:  # a survivor whose source died before it received any state is like a newcomer
        survivors = [worker for worker in survivors if worker.position[0] >= 0]
    # Newcomers cannot join in the middle of a step, and at the end of the program they are too late.
    is_open = not in_step and not _is_ending(now, workers)
    newcomers = _newcomers(now, workers) if is_open else []
    staying = [worker for worker in survivors if not worker.is_leaving]
    if is_open and staying and len(staying) + len(newcomers) >= want.least and not newest.is_leaving:
        survivors = staying
    kept = _evenly(survivors, want.workers)
    if newest not in kept:
        kept = [*kept[:-1], newest]
    chosen = [*kept, *newcomers[: want.workers - len(kept)]]
    # Where no newcomer can join, fewer than `least` would wait forever: they finish the step, and are closed then.
    if len(chosen) < want.least and is_open:
        return None
    if top == -1:
        newest = max(chosen, key=lambda worker: worker.position)
    # The position from which `now` began can be lost: its source died before any other worker had caught up.
    lost = now.position is not None and newest.position < now.position
    number = now.number + 1
    return Generation(
        number,
        tuple(worker.id for worker in chosen),
        position=newest.position,
        source=newest.id,
        why=_why_next(now, workers, chosen, want),
        anew=number if lost and newest.position[0] == -1 else now.anew,
    )


def _from_newcomers(now: Generation, workers: Mapping[str, Worker], want: Want) -> Generation | None:
    """The next generation when no worker has any state: it begins at the last checkpoint, or is the first one.

    Newcomers that replayed the beginning of the same program run can be members, however far each of them came: the
    results are the same for all, so the one that has most of them is the source. Calls whose results no member has are
    made again. So a worker that replayed anything and is not a member is of no use any more (`anew`).
    """
    newcomers = _newcomers(now, workers)
    starting = any(worker.standing is Standing.STARTING for worker in workers.values())
    if len(newcomers) < (want.workers if starting else want.least):
        return None
    chosen = newcomers[: want.workers]
    newest = max(chosen, key=lambda worker: worker.position)
    number = now.number + 1
    return Generation(
        number,
        tuple(worker.id for worker in chosen),
        position=newest.position if newest.position > START else None,
        source=newest.id if newest.position > START else None,
        why=_why_next(now, workers, chosen, want),
        anew=number,
    )


def _evenly(workers: Sequence[Worker], many: int) -> list[Worker]:
    """At most `many` of the workers, spread evenly: the first hosts by name may have one more than the others."""
    turns: list[tuple[int, str, str]] = []
    for worker in workers:
        host = worker.id.rpartition(".")[0]
        turns.append((sum(other == host for _, other, _ in turns), host, worker.id))
    chosen = {id_ for _, _, id_ in sorted(turns)[:many]}
    return [worker for worker in workers if worker.id in chosen]


def _by_id(hosts: Iterable[HostRecord]) -> dict[str, Worker]:
    return {worker.id: worker for host in hosts for worker in host.workers}


def _newcomers(now: Generation, workers: Mapping[str, Worker]) -> list[Worker]:
    """The workers that can become members. A member that is READY is not one: it may be joining at this moment."""
    ready = [
        w for w in workers.values() if w.standing is Standing.READY and w.id not in now.members and not w.is_leaving
    ]
    return sorted((w for w in ready if not _is_void(w, now)), key=_by_name)


def _is_void(worker: Worker, now: Generation) -> bool:
    """Whether a newcomer replayed results of calls that were made again since."""
    return worker.position > START and worker.generation < now.anew


def _has_left(worker: Worker, now: Generation) -> bool:
    return worker.standing is Standing.LEFT and worker.generation == now.number


def _is_out(worker: Worker, now: Generation) -> bool:
    return worker.standing in (Standing.DONE, Standing.QUIT) or _has_left(worker, now)


def _is_ending(now: Generation, workers: Mapping[str, Worker]) -> bool:
    return any(member in workers and workers[member].standing is Standing.DONE for member in now.members)


def _why_broken(now: Generation, workers: Mapping[str, Worker]) -> str:
    """Why the members cannot continue in `now`; "" if they can."""
    gone = [member for member in now.members if member not in workers]
    if gone:
        return _join_names(gone, "was lost", "were lost")
    left = [member for member in now.members if _has_left(workers[member], now)]
    return _join_names(left, "left", "left") if left else ""


def _why_next(now: Generation, workers: Mapping[str, Worker], chosen: Sequence[Worker], want: Want) -> str:
    gone = [member for member in now.members if member not in workers]
    if gone:
        return _join_names(gone, "was lost", "were lost")
    names = {worker.id for worker in chosen}
    leaving = [member for member in now.members if workers[member].is_leaving and member not in names]
    newcomers = [worker.id for worker in chosen if worker.id not in now.members]
    if leaving or newcomers:
        parts = [(leaving, "leaves", "leave"), (newcomers, "joins", "join")]
        return ", ".join(_join_names(*part) for part in parts if part[0])
    if len(now.members) > want.workers:
        return f"{_count(want.workers)} wanted"
    return _why_broken(now, workers)


def _join_names(names: Sequence[str], one: str, many: str) -> str:
    """For example "h0.1 joins", or "h0.1, h0.2 and h0.3 join"."""
    if len(names) == 1:
        return f"{names[0]} {one}"
    return f"{', '.join(names[:-1])} and {names[-1]} {many}"


def _count(workers: int) -> str:
    return "1 worker is" if workers == 1 else f"{workers} workers are"


def _by_name(worker: Worker) -> list[tuple[int, str]]:
    """Sort key that puts h0.10 after h0.9. A longer number is larger; `int` would refuse the longest ones."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", worker.id)]


# ------------------------------------------------------------------------------------------------------------- orders


class OrderAction(Enum):
    JOIN = "join"
    LEAVE = "leave"  # at once, without waiting for other workers. One that has not joined yet counts as LEFT, too
    CLOSE = "close"  # leave when the loop begins its next step
    RELEASE = "release"  # end with status 0: not needed any more
    KILL = "kill"


@dataclass(frozen=True)
class WorkerOrder:
    worker: str
    do: OrderAction
    generation: int
    why: str = ""


def orders(now: Generation, hosts: Sequence[HostRecord], mine: str, found: int = 0) -> list[WorkerOrder]:
    """The orders for the workers of host `mine`; returned again until their standing shows that they obeyed.

    `found` is the number that `run` had when the host first read it after it had listed its workers under its lease.
    """
    workers = _by_id(hosts)
    broken = _why_broken(now, workers) or (f"{mine} was away" if now.number <= found else "")
    over = {workers[member].standing for member in now.members if member in workers} == {Standing.DONE}
    given = []
    for worker in (worker for host in hosts if host.name == mine for worker in host.workers):
        member = worker.id in now.members
        order = _order_for_member(worker, now, broken) if member else _order_for_other(worker, now, over=over)
        if order is not None:
            do, why = order
            given.append(WorkerOrder(worker.id, do, now.number, why))
    return given


def _order_for_member(worker: Worker, now: Generation, broken: str) -> tuple[OrderAction, str] | None:
    if worker.standing is Standing.STARTING or _is_out(worker, now) or worker.generation > now.number:
        return None
    if worker.standing is Standing.INSIDE and worker.generation < now.number:
        # Cannot happen: it became a member when it was READY or had LEFT, and only a JOIN of `now` makes it INSIDE.
        return OrderAction.KILL, f"it is inside generation {worker.generation}, which has ended"
    if broken:
        return OrderAction.LEAVE, broken
    if worker.standing is not Standing.INSIDE:
        return OrderAction.JOIN, now.why
    return (OrderAction.CLOSE, now.why) if now.phase is GenerationPhase.CLOSING else None


def _order_for_other(worker: Worker, now: Generation, *, over: bool) -> tuple[OrderAction, str] | None:
    if worker.standing is Standing.INSIDE and worker.generation <= now.number:
        return OrderAction.KILL, f"generation {now.number} was formed without it"
    if worker.standing is Standing.LEFT and worker.generation < now.number:
        return OrderAction.RELEASE, f"generation {now.number} was formed without it"
    if worker.standing is Standing.READY and over:
        return OrderAction.RELEASE, "the program has ended"
    if worker.standing is Standing.READY and _is_void(worker, now):
        return OrderAction.KILL, f"what it replayed was done again in generation {now.anew}"
    return None
