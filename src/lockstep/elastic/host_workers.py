"""The workers of one host in an elastic run: what they say, and what they are told.

It carries out `membership`: keeps this host's record, proposes the next generation, and passes the orders on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol, final

from lockstep.control.json_pipe import Line, Message
from lockstep.elastic.call_log import Journal
from lockstep.elastic.generation_store import Values
from lockstep.elastic.membership import (
    START,
    Do,
    Generation,
    Position,
    Standing,
    Want,
    Worker,
    as_json,
    next_generation,
    orders,
)
from lockstep.elastic.records import Records
from lockstep.elastic.worker_state import Person

LEASE_EVERY_S: Final = 0.5  # how often workers are told how long our lease holds

# How long after a worker that has quit the others may still quit too: while they are in a call, and on other hosts.
QUIT_WITHIN_S: Final = 5.0
QUIT_ELSEWHERE_WITHIN_S: Final = 10.0


class Diary(Protocol):
    """What happened, for people and for programs."""

    def say(self, text: str) -> None: ...

    def note(self, event: str, **facts: Any) -> None: ...


@final
class Roster:
    """See membership.py, Note [What supervisors keep to]."""

    def __init__(self, records: Records, diary: Diary) -> None:
        self._records, self._diary = records, diary
        self._journal, self._values = Journal(records), Values(records.arbiter, records.keys.values)
        self.people: dict[str, Person] = {}
        self.is_elastic = False  # the program has a Run, so it can do without one of its workers
        self.newest: Position = START  # how far the run has ever come, as far as we know
        self.here: Position = START  # and where it is: further back after everybody was lost
        self.limit: int | None = None  # how many workers the run can use at most, as soon as it says so
        self.moves = 0  # how often one of our workers was found at another position than before
        self._serial = 0
        self._lease_told_s = 0.0
        self._seen = Generation(0)

    # -- what the host sees ------------------------------------------------------------------------------------------

    def add(self, line: Line, slot: int) -> Person:
        """A process has been started."""
        worker = Worker(f"{self._records.name}.{self._serial}", Standing.STARTING)
        self._serial += 1
        self.people[worker.id] = person = Person(worker, line, slot)
        return person

    def lost(self, id_: str, *, done: bool) -> bool:
        """Its process has ended and was collected; `done`: by itself, with status 0.

        Returns whether it is missed although its status was 0: it was a member, and its Run was not over. One that has
        left its Run by an exception, or by sys.exit, is judged later: see `judge_quits`.
        """
        person = self.people.get(id_)
        if person is None:
            return False  # disowned before
        person.line.ended = True
        if person.worker.standing is Standing.DONE:
            return False
        is_early = done and not person.released and id_ in self._records.generation.members
        if is_early and person.left_run:
            person.ended_s, person.told_leave_s = time.monotonic(), None
            person.worker = replace(person.worker, standing=Standing.QUIT)
            return False
        del self.people[id_]
        return is_early

    @property
    def has_quits(self) -> bool:
        """Whether there are workers of which it is not known yet whether they are missed."""
        return any(person.worker.standing is Standing.QUIT for person in self.people.values())

    def judge_quits(self, now_s: float) -> list[Person]:
        """Decide about workers that have left their Run by an exception and ended with status 0.

        If all members do that the program has ended. If another member goes on, they are lost: returns these.
        """
        quits = [person for person in self.people.values() if person.worker.standing is Standing.QUIT]
        if not quits:
            return []
        known = {worker.id: worker.standing for worker in self._workers()}
        members = {member: known.get(member) for member in self._records.generation.members}
        if all(standing in (Standing.QUIT, Standing.DONE) for standing in members.values()):
            for person in quits:
                self._note_done(person)
            self._records.say_over(0)
            return []
        missed = [person for person in quits if self._is_missed(person, members, now_s)]
        for person in missed:
            del self.people[person.id]
        return missed

    def _is_missed(self, person: Person, members: Mapping[str, Standing | None], now_s: float) -> bool:
        """Whether a member goes on without this one, which has quit. One that does not wait for it may yet quit too."""
        if person.id not in members or None in members.values():  # another one was lost, and the others go on
            return True
        staying = [id_ for id_, standing in members.items() if standing not in (Standing.QUIT, Standing.DONE)]
        here = [self.people[id_] for id_ in staying if id_ in self.people]
        since_s, quit_at = now_s - person.ended_s, _position(person.at)
        for one in (one for one in here if one.is_calling and not one.left_run):
            at = _position(one.at)
            # In the same call, in the loss function say, the others may be a little slower.
            if at > quit_at or (at == quit_at and not person.is_calling) or since_s > QUIT_WITHIN_S:
                return True
        return len(here) < len(staying) and since_s > QUIT_ELSEWHERE_WITHIN_S

    def _note_done(self, person: Person) -> None:
        """Its Run is over. What it does from now on, or how it ends, is no business of the others."""
        person.told_leave_s = None
        person.worker = replace(person.worker, standing=Standing.DONE)

    def disown(self) -> None:
        """Our lease has ended, so the others may have gone on without us: none of our workers counts any more."""
        self.people.clear()
        self._records.unlist()
        self._seen = Generation(0)

    def release(self, person: Person, why: str) -> None:
        """It is one too many. Should others have made it a member meanwhile, they will find it gone."""
        person.released = True
        person.told.add((Do.RELEASE, self._records.generation.number))
        self._pass_on(person, Do.RELEASE, why)

    @property
    def is_over(self) -> bool:
        """The program has ended for a member: nobody is started any more."""
        done = any(one.standing is Standing.DONE for one in self._workers())
        return self._records.is_clean and (done or self._records.over is not None)

    @property
    def is_finished(self) -> bool:
        """No member, here or elsewhere, has anything left to do."""
        rest = [one.id for one in self._workers() if one.standing is not Standing.DONE]
        return self.is_over and not any(member in rest for member in self._records.generation.members)

    def _workers(self) -> list[Worker]:
        """As the store has them; of ours, as we do."""
        elsewhere = [one for host in self._records.hosts if host.name != self._records.name for one in host.workers]
        return [*(person.worker for person in self.people.values()), *elsewhere]

    @property
    def want(self) -> Want:
        """How many workers there are to be, and not more than the run can use."""
        want, limit = self._records.want, self.limit
        if limit is None or want.workers <= limit:
            return want
        return Want(limit, min(want.least, limit), min(want.most, limit))

    # -- what workers say --------------------------------------------------------------------------------------------

    def hear(self, person: Person, message: Message) -> None:
        person.heard_s = time.monotonic()
        match message["say"]:
            case "hello":
                person.spoke, self.is_elastic, person.pid = True, True, int(message["pid"])
                self._journal.welcome(person)
            case "beat":
                self._note_progress(message["position"])
                if message["position"] != person.at:
                    person.at, self.moves = message["position"], self.moves + 1
                person.is_calling = bool(message.get("calling", False))
            case "leaves":
                person.left_run, person.at, person.is_calling = True, message["position"], bool(message["calling"])
            case "ready":
                position = _position(message["position"])
                person.worker = replace(
                    person.worker, standing=Standing.READY, generation=int(message["told"]), position=position
                )
            case "inside":
                person.told_leave_s = None
                person.worker = replace(person.worker, standing=Standing.INSIDE, generation=int(message["generation"]))
            case "left":
                person.told_leave_s = None
                person.worker = Worker(
                    person.id, Standing.LEFT, int(message["generation"]), _position(message["position"])
                )
                self._note_progress(message["position"])
            case "journal":
                self._journal.publish(person.worker, int(message["first"]), message["entries"])
            case "limit":
                self.limit = max(1, int(message["workers"]))
            case "loop":
                self._journal.enter_loop()
            case "done":
                self._note_done(person)
            case "recovered":
                facts = {"generation": person.worker.generation, "took_s": float(message["took_s"])}
                self._diary.note("recovered", worker=person.id, **facts)
            case "kv":
                self._values.ask(person, message)

    def _note_progress(self, position: Any) -> None:
        self.here = max(self.here, _position(position))
        self.newest = max(self.newest, self.here)

    # -- what is to be done ------------------------------------------------------------------------------------------

    def act(self, now_s: float) -> list[tuple[Person, str]]:
        """Do what is due. Returns those who must be killed, and why."""
        records, arbiter = self._records, self._records.arbiter
        arbiter.tick(now_s)
        self._tell_lease(now_s)
        for _ in range(8):  # each change may ask for another
            before = arbiter.revision
            records.clean_up()
            if records.is_clean:
                records.fulfil()  # what a worker told before it left must be there before the others read that it has
                records.list_workers(person.worker for person in self.people.values())
            self._values.answer_all(self.people, records.generation.number)
            if records.is_listed:
                self._propose()
            arbiter.tick(now_s)
            if arbiter.revision == before:
                break
        kills = self._journal.push(self.people.values())
        return kills if records.found is None else kills + self._give_orders(records.found)

    def _tell_lease(self, now_s: float) -> None:
        if now_s - self._lease_told_s >= LEASE_EVERY_S:
            self._lease_told_s = now_s
            for person in self.people.values():
                if person.spoke:
                    person.line.send({"do": "lease", "until_s": self._records.arbiter.held_until_s})

    def _propose(self) -> None:
        now, hosts, want = self._records.generation, self._records.hosts, self.want
        if now.number != self._seen.number:
            self._turn_to(now)
        over = self._records.over is not None  # newcomers come too late, also if those who are done have gone since
        late = set() if over else {worker.id for worker in self._journal.left_behind(now, hosts)}
        hosts = [
            replace(host, workers=tuple(w for w in host.workers if w.id in now.members or not (over or w.id in late)))
            for host in hosts
        ]
        want = replace(want, least=1) if over else want
        following = next_generation(now, hosts, want)
        if following is not None:
            self._records.propose(following)

    def _turn_to(self, now: Generation) -> None:
        before, self._seen = self._seen, now
        self.here = now.position or START
        if now.anew != before.anew:
            self._journal.carry_over(before, now, self.people.values())
        self._records.drop_older(self._records.keys.values, now.number)
        self._diary.note("generation", number=now.number, members=now.members, position=now.position, why=now.why)
        if now.number > max(1, self._records.found or 0):
            where = "" if now.position is None or now.position[0] < 0 else f" at step {now.position[0]}"
            size = len(now.members)
            go_on = f"{size} workers go" if size > 1 else "1 worker goes"
            self._diary.say(f"{now.why}; {go_on} on{where} (generation {now.number})")

    def _give_orders(self, found: int) -> list[tuple[Person, str]]:
        now, hosts, people = self._records.generation, self._records.hosts, self.people
        late = [people[worker.id] for worker in self._journal.left_behind(now, hosts) if worker.id in people]
        kills = [(person, "it waits before the loop, and the others are in it") for person in late]
        for order in orders(now, hosts, self._records.name, found):
            person = people.get(order.worker)
            if person is None:
                continue
            if order.do is Do.KILL:
                kills.append((person, order.why))
            elif order.do is Do.LEAVE and (Do.JOIN, order.generation) not in person.told:
                # It broke before we had told it of it: it was never inside, and waits for the next one.
                person.worker = replace(person.worker, standing=Standing.LEFT, generation=order.generation)
            elif (order.do, order.generation) not in person.told:
                person.told.add((order.do, order.generation))
                self._pass_on(person, order.do, order.why)
        return kills

    def _pass_on(self, person: Person, do: Do, why: str) -> None:
        now = self._records.generation
        message: Message = {"do": do.value, "generation": now.number, "why": why}
        if do is Do.JOIN:
            person.line.send({"do": "lease", "until_s": self._records.arbiter.held_until_s})
            message |= {"generation": as_json(now), "worker": person.id}
        if do is Do.LEAVE:
            person.told_leave_s = time.monotonic()
        person.line.send(message)


def _position(value: Any) -> Position:
    top, calls = value
    return int(top), int(calls)
