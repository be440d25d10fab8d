"""Who trains together, and from where on: the records that supervisors share, and what follows from them. Pure.

Anybody may propose what `next_generation` says, and everybody carries out what `orders` says for its own workers.
Nobody is the leader: the store takes one proposal per `run` record, and the others look again.

Note [What supervisors keep to]
Nothing below is safe unless all of these hold.
1. `hosts` were read together with `now`, or later; never before. `run` is replaced only if it is still the record read.
2. LEFT is written after the worker has left, DONE after its Run is over, QUIT after it was reaped, and a worker that
   was lost is taken off the list after it was reaped. A worker that does not obey in time is killed. LEFT is for good:
   no JOIN of that generation follows.
3. A host whose lease ended makes its workers leave, and comes back with those that have LEFT and with newcomers, never
   with one that is INSIDE. From then on it goes by what it reads after that, and joins no generation that it `found`
   there: somebody who saw the host missing may be about to replace that one.
4. A worker applies a step only while the lease of its host holds by the host's own clock.
5. READY is final: the worker replays no more until it is taken in. It replays only what is *settled*: calls that all
   members have finished. Whoever finished call n knows that n - 1 is settled. Anything newer may yet be lost with those
   who finished it, and be done again with another result. Nor is it told what was called before `anew`, nor which
   checkpoint was chosen: after a loss for all, that choice is made again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

Position = tuple[int, int]  # (top, calls): steps applied when the loop last began one, collective calls finished since
START: Position = (-1, 0)


class Phase(Enum):
    RUNNING = "running"
    CLOSING = "closing"  # members are asked to leave together at the next top of the loop


@dataclass(frozen=True)
class Generation:
    number: int  # 0: nobody has met yet
    members: tuple[str, ...] = ()  # in the order of ranks
    phase: Phase = Phase.RUNNING
    position: Position | None = None  # where it begins; None: at the last checkpoint, or at the very start
    source: str | None = None  # the member that has results and state of that position
    why: str = ""  # in words, for people
    anew: int = 0  # the last generation that makes calls again which were settled: results told before it are void


class Standing(Enum):
    STARTING = "starting"  # the process was started and cannot be taken in yet
    READY = "ready"  # a newcomer without state; it replayed results up to `position` (top is -1), told in `generation`
    INSIDE = "inside"  # in `generation`
    LEFT = "left"  # has left `generation` and keeps state and results of `position`
    DONE = "done"  # its Run is over, or its program has ended together with that of all members
    QUIT = "quit"  # its process ended with status 0 after an exception had left its Run: DONE if all do that, else lost


@dataclass(frozen=True)
class Worker:
    id: str  # "<host>.<serial>", never used again
    standing: Standing
    generation: int = 0
    position: Position = START


@dataclass(frozen=True)
class Host:
    name: str
    workers: tuple[Worker, ...] = ()


@dataclass(frozen=True)
class Want:
    workers: int
    least: int
    most: int


# ------------------------------------------------------------------------------------------------- the next generation


def next_generation(now: Generation, hosts: Sequence[Host], want: Want) -> Generation | None:
    """The record to put in place of `now`; None: nothing to change yet."""
    workers = _by_id(hosts)
    present = [workers[member] for member in now.members if member in workers]
    if present and not _why_broken(now, workers):
        return _closed(now, workers, want)
    if not all(_is_out(worker, now) for worker in present):
        return None
    survivors = [worker for worker in present if worker.standing is Standing.LEFT]
    if survivors:
        return _from_survivors(now, survivors, workers, want)
    if present:  # all DONE, or about to be
        return None
    return _from_newcomers(now, workers, want)


def _closed(now: Generation, workers: Mapping[str, Worker], want: Want) -> Generation | None:
    """`now` with the wish that its members leave; it is not taken back, should its reason go away meanwhile."""
    if now.phase is Phase.CLOSING or _is_ending(now, workers):
        return None
    newcomers, size = _newcomers(now, workers), len(now.members)
    if size > want.workers:
        why = f"{_count(want.workers)} wanted"
    elif newcomers and size < want.workers:
        why = _words(newcomers[: want.workers - size], "joins", "join")
    elif size < want.least:  # it was formed only to finish a step
        why = f"at least {_count(want.least)} wanted"
    else:
        return None
    return replace(now, phase=Phase.CLOSING, why=why)


def _from_survivors(
    now: Generation, survivors: Sequence[Worker], workers: Mapping[str, Worker], want: Want
) -> Generation | None:
    newest = max(survivors, key=lambda worker: worker.position)
    top, calls = newest.position
    in_step = top >= 0 and calls > 0
    if in_step:  # one whose source died before it got any state is no better than a newcomer
        survivors = [worker for worker in survivors if worker.position[0] >= 0]
    # Newcomers cannot go on in the midst of a step. At the end of the program they come too late.
    is_open = not in_step and not _is_ending(now, workers)
    newcomers = _newcomers(now, workers) if is_open else []
    kept = _evenly(survivors, want.workers)
    if newest not in kept:
        kept = [*kept[:-1], newest]
    chosen = [*kept, *newcomers[: want.workers - len(kept)]]
    # Fewer than `least` would wait for ever where nobody can be let in: they finish the step, and are closed then.
    if len(chosen) < want.least and is_open:
        return None
    if top == -1:
        newest = max(chosen, key=lambda worker: worker.position)
    # The position from which `now` began can be out of reach: its source died before anybody had caught up.
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
    """Nobody has any state: from the last checkpoint, or the very first time.

    Newcomers that replayed the beginning of the same program run are welcome, however far each of them came: the
    results are the same for all, so the one that has most of them is the source. Calls that only those knew who are
    not taken in will be done again. So whoever replayed anything and is not a member is of no use any more (`anew`).
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
    """At most so many of them, with the same number on each host or, on the first ones by name, one more."""
    turns: list[tuple[int, str, str]] = []
    for worker in workers:
        host = worker.id.rpartition(".")[0]
        turns.append((sum(other == host for _, other, _ in turns), host, worker.id))
    chosen = {id_ for _, _, id_ in sorted(turns)[:many]}
    return [worker for worker in workers if worker.id in chosen]


def _by_id(hosts: Iterable[Host]) -> dict[str, Worker]:
    return {worker.id: worker for host in hosts for worker in host.workers}


def _newcomers(now: Generation, workers: Mapping[str, Worker]) -> list[Worker]:
    """Who can be taken in. A member that has not joined yet is none: it may be joining while we look."""
    ready = [w for w in workers.values() if w.standing is Standing.READY and w.id not in now.members]
    return sorted((w for w in ready if not _is_void(w, now)), key=_by_name)


def _is_void(worker: Worker, now: Generation) -> bool:
    """A newcomer that replayed results which have been done again since."""
    return worker.position > START and worker.generation < now.anew


def _has_left(worker: Worker, now: Generation) -> bool:
    return worker.standing is Standing.LEFT and worker.generation == now.number


def _is_out(worker: Worker, now: Generation) -> bool:
    return worker.standing in (Standing.DONE, Standing.QUIT) or _has_left(worker, now)


def _is_ending(now: Generation, workers: Mapping[str, Worker]) -> bool:
    return any(member in workers and workers[member].standing is Standing.DONE for member in now.members)


def _why_broken(now: Generation, workers: Mapping[str, Worker]) -> str:
    """Empty: `now` is whole."""
    gone = [member for member in now.members if member not in workers]
    if gone:
        return _listed(gone, "was lost", "were lost")
    left = [member for member in now.members if _has_left(workers[member], now)]
    return _listed(left, "left", "left") if left else ""


def _why_next(now: Generation, workers: Mapping[str, Worker], chosen: Sequence[Worker], want: Want) -> str:
    gone = [member for member in now.members if member not in workers]
    if gone:
        return _listed(gone, "was lost", "were lost")
    newcomers = [worker for worker in chosen if worker.id not in now.members]
    if newcomers:
        return _words(newcomers, "joins", "join")
    if len(now.members) > want.workers:
        return f"{_count(want.workers)} wanted"
    return _why_broken(now, workers)


def _words(workers: Sequence[Worker], one: str, many: str) -> str:
    return _listed([worker.id for worker in workers], one, many)


def _listed(names: Sequence[str], one: str, many: str) -> str:
    """As in "h0.1 joins", "h0.1, h0.2 and h0.3 join"."""
    if len(names) == 1:
        return f"{names[0]} {one}"
    return f"{', '.join(names[:-1])} and {names[-1]} {many}"


def _count(workers: int) -> str:
    return "1 worker is" if workers == 1 else f"{workers} workers are"


def _by_name(worker: Worker) -> list[tuple[int, str]]:
    """h0.10 after h0.9. A longer number is larger; `int` would refuse the longest."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", worker.id)]


# ------------------------------------------------------------------------------------------------------------- orders


class Do(Enum):
    JOIN = "join"
    LEAVE = "leave"  # at once, without waiting for anybody. One that has not joined yet will not: it has LEFT too
    CLOSE = "close"  # at the next top of the loop
    RELEASE = "release"  # end in peace: not needed any more
    KILL = "kill"


@dataclass(frozen=True)
class Order:
    worker: str
    do: Do
    generation: int
    why: str = ""


def orders(now: Generation, hosts: Sequence[Host], mine: str, found: int = 0) -> list[Order]:
    """What the workers of host `mine` have to do; said again until their standing shows that they obeyed.

    `found`: the number that `run` had when the host first read it after it had listed its workers under its lease.
    """
    workers = _by_id(hosts)
    broken = _why_broken(now, workers) or (f"{mine} was away" if now.number <= found else "")
    over = {workers[member].standing for member in now.members if member in workers} == {Standing.DONE}
    given = []
    for worker in (worker for host in hosts if host.name == mine for worker in host.workers):
        member = worker.id in now.members
        order = _for_member(worker, now, broken) if member else _for_stranger(worker, now, over=over)
        if order is not None:
            do, why = order
            given.append(Order(worker.id, do, now.number, why))
    return given


def _for_member(worker: Worker, now: Generation, broken: str) -> tuple[Do, str] | None:
    if worker.standing is Standing.STARTING or _is_out(worker, now) or worker.generation > now.number:
        return None
    if worker.standing is Standing.INSIDE and worker.generation < now.number:
        # Cannot be: it became a member when it was READY or had LEFT, and goes inside by a JOIN of `now` only.
        return Do.KILL, f"it is inside generation {worker.generation}, which has ended"
    if broken:
        return Do.LEAVE, broken
    if worker.standing is not Standing.INSIDE:
        return Do.JOIN, now.why
    return (Do.CLOSE, now.why) if now.phase is Phase.CLOSING else None


def _for_stranger(worker: Worker, now: Generation, *, over: bool) -> tuple[Do, str] | None:
    if worker.standing is Standing.INSIDE and worker.generation <= now.number:
        return Do.KILL, f"generation {now.number} was formed without it"
    if worker.standing is Standing.LEFT and worker.generation < now.number:
        return Do.RELEASE, f"generation {now.number} was formed without it"
    if worker.standing is Standing.READY and over:
        return Do.RELEASE, "the program has ended"
    if worker.standing is Standing.READY and _is_void(worker, now):
        return Do.KILL, f"what it replayed was done again in generation {now.anew}"
    return None


# --------------------------------------------------------------------------------------------------------------- JSON

Json = dict[str, object]
Record = TypeVar("Record", bound=Generation | Host | Want | Worker)


def as_json(record: Generation | Host | Want | Worker) -> Json:
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def from_json(kind: type[Record], value: object) -> Record:
    """The record in `value`. ValueError names what is wrong with it: a broken or hostile peer may have written it."""
    name, readers = kind.__name__, _READERS[kind]
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {_shown(value)} is not an object")
    if value.keys() != readers.keys():
        raise ValueError(f"{name}: has the fields {_shown(list(value))}, must have {list(readers)}")
    read: dict[str, Any] = {}
    for field, reader in readers.items():
        try:
            read[field] = reader(value[field])
        except ValueError as error:
            raise ValueError(f"{name}.{field}: {error}") from None
    record = kind(**read)
    wrong = _find_wrong(record)
    if wrong:
        raise ValueError(f"{name}: {wrong}")
    return record


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _find_wrong(record: object) -> str:
    """What no single field shows."""
    match record:
        case Generation() if len(set(record.members)) < len(record.members):
            return f"somebody is a member twice: {_shown(record.members)}"
        case Generation() if record.source is not None and record.source not in record.members:
            return f"the source {_shown(record.source)} is no member"
        case Generation() if record.source is not None and record.position is None:
            return f"the source {_shown(record.source)} has no position"
        case Generation() if record.anew > record.number:
            return f"anew is {record.anew}, after its number, {record.number}"
        case Worker() if record.standing is Standing.READY and record.position[0] != -1:
            return f"{_shown(record.id)} is ready, so its top is -1, not {record.position[0]}"
        case Host():
            ids = [worker.id for worker in record.workers]
            strange = [one for one in ids if not re.fullmatch(rf"{re.escape(record.name)}\.[0-9]+", one)]
            if strange:
                return f"{_shown(strange[0])} is not <host>.<serial> with the host {_shown(record.name)}"
            if len(set(ids)) < len(ids):
                return f"somebody is on the list twice: {_shown(ids)}"
        case Want() if not 1 <= record.least <= record.workers <= record.most:
            return f"1 <= least <= workers <= most does not hold: {record.least}, {record.workers}, {record.most}"
    return ""


def _shown(value: object) -> str:
    return f"{value!r:.80}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not a string")
    return value


def _whole(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{_shown(value)} is not a whole number of at least {least}")
    return value


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{_shown(value)} is not a list")
    return value


def _position(value: object) -> Position:
    pair = _items(value)
    if len(pair) != 2:
        raise ValueError(f"{_shown(value)} is not a pair (top, calls)")
    return _whole(pair[0], -1), _whole(pair[1])


def _one_of(kind: type[Enum]) -> Callable[[object], object]:
    known = {one.value: one for one in kind}

    def read(value: object) -> object:
        if _text(value) not in known:
            raise ValueError(f"{_shown(value)} is none of {list(known)}")
        return known[value]

    return read


def _or_none(reader: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None else reader(value)


def _all(reader: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: tuple(reader(one) for one in _items(value))


_READERS: dict[type, dict[str, Callable[[object], object]]] = {
    Generation: {
        "number": _whole,
        "members": _all(_text),
        "phase": _one_of(Phase),
        "position": _or_none(_position),
        "source": _or_none(_text),
        "why": _text,
        "anew": _whole,
    },
    Worker: {"id": _text, "standing": _one_of(Standing), "generation": _whole, "position": _position},
    Host: {"name": _text, "workers": _all(lambda value: from_json(Worker, value))},
    Want: {"workers": _whole, "least": _whole, "most": _whole},
}
