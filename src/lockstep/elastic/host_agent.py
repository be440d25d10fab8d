"""The workers of an elastic run on this host: those that are lost are replaced, and the others go on meanwhile.

Who is in which generation is the business of `roster`; whether a replacement makes sense, that of `restarts`. There may
be other hosts, with a supervisor each (`neighbours`): what they have in common is in the store (`records`).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from lockstep.control.json_pipe import Line
from lockstep.elastic.agent_client import VARIABLE
from lockstep.elastic.host_workers import Roster
from lockstep.elastic.membership import Do, Standing, Want
from lockstep.elastic.other_hosts import End, Neighbours
from lockstep.elastic.records import Records
from lockstep.elastic.restart_policy import Failure, start_at_s, why_give_up
from lockstep.elastic.worker_state import Person, why_dead
from lockstep.failures.card import Card
from lockstep.failures.postmortem import show
from lockstep.launcher import scale_request
from lockstep.launcher.events import Events
from lockstep.launcher.exit_policy import EARLY, Act, Exit, Scene, decide, describe, exit_status, is_lost_peer
from lockstep.launcher.forked_workers import Request, Template
from lockstep.launcher.hosts import HOST, Station, prefix_of, share_of
from lockstep.launcher.job import INTERRUPTED, PREEMPTED, Job, count_cores, worker_env
from lockstep.launcher.output import lose_patience, regain_patience, say
from lockstep.launcher.parent_watch import Guardian
from lockstep.launcher.supervisor import Crew
from lockstep.launcher.worker_process import WorkerProcess

LOOK_EVERY_S: Final = 0.1
SCREEN_S: Final = 1.0  # a screen that takes nothing for so long is not waited for
START_AGAIN_S: Final = 5.0  # after a worker could not be started
RUN_WITHIN_S: Final = 20.0  # so long a program may take to its Run, after a worker was killed before
NO_RUN: Final = "the program has no Run, so the others cannot go on without it"


class _Ear:
    """One line in the selector."""

    def __init__(self, roster: Roster, person: Person) -> None:
        self._roster, self._person = roster, person

    def take(self) -> bytes | None:
        for message in self._person.line.receive():
            self._roster.hear(self._person, message)
        return b"" if self._person.line.ended else None


def _describe_early(person: Person) -> str:
    """Of a worker that ended with status 0 before its time. What it told last is a moment old, unless it left its Run
    by an exception, and so said where."""
    step = person.at[0] if person.at is not None else -1
    where = f"step {step}{'' if person.left_run else ' or a little later'}" if step >= 0 else ""
    return f"{EARLY}{f' ({where})' if where else ''}"


class ElasticCrew(Crew):
    def __init__(self, job: Job, guardian: Guardian) -> None:
        super().__init__(job, guardian)
        assert job.elastic is not None
        self._elastic, self._hosts = job.elastic, job.hosts
        self._events = Events(job.log_dir / "events.jsonl")
        self._template: Template | None = None
        self._persons: dict[int, Person] = {}  # by number of the worker
        self._failures: list[Failure] = []
        self._gave_up: Failure | None = None
        self._doubts: list[Failure] = []  # see `_decide`
        self._told_most = -1
        self._governed_s = time.monotonic()
        self._start_at_s = 0.0
        self._graves: list[WorkerProcess] = []  # with somebody in their process group who has yet to be collected
        self._has_ended = False  # the program, on some worker: also one that never came to a Run
        self._disowned: set[int] = set()  # workers by number: our lease ended
        self._end: End | None = None  # what others have done, or the store
        self._neighbours: Neighbours | None = None

    def __enter__(self) -> ElasticCrew:
        super().__enter__()
        job, hosts, bounds = self._job, self._hosts, self._elastic
        want = Want(job.workers * (hosts.count if hosts else 1), bounds.least, bounds.most)
        if hosts is None:
            self._station = Station.alone(self._lose_lease)
            self._records = Records(HOST, self._station.arbiter, want)
        else:
            self._station = Station.among(hosts, self._selector, self._lose_lease)
            self._records = Records(hosts.name, self._station.arbiter, want, prefix=prefix_of(hosts.secret))
            terms = {"--hosts": hosts.count, "-n": job.workers, "--min": bounds.least, "--max": bounds.most}
            self._neighbours = Neighbours(
                hosts, records=self._records, station=self._station, terms=terms, selector=self._selector
            )
        self._roster = Roster(self._records, self._events)
        return self

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self, port: int) -> None:
        self._port = port
        lose_patience(SCREEN_S)
        self._tell_bounds()
        if self._neighbours is not None:
            self._neighbours.greet()

    def _tell_bounds(self) -> None:
        """To `lockstep scale`."""
        most = self._most()
        if most != self._told_most:
            self._told_most = most
            with suppress(OSError):
                scale_request.introduce(self._job.log_dir, least=self._elastic.least, most=most)

    def _most(self) -> int:
        """Workers that may be asked for: the run may be cut into fewer shards than --max."""
        return min(self._elastic.most, self._roster.limit or self._elastic.most)

    def _begin(self) -> None:
        number, template = len(self._workers), self._template or self._open_template()
        taken = {person.slot for n, person in self._persons.items() if not self._workers[n].buried}
        slot = next(n for n in range(len(taken) + 1) if n not in taken)
        ours, theirs = socket.socketpair()
        env = worker_env(os.environ, rank=slot, job=self._job, port=self._port, cores=count_cores())
        request = Request(self._job.command, env, os.getpid(), VARIABLE)
        process = template.fork(request, theirs.fileno(), self._guardian.pipe)
        theirs.close()
        where = "" if self._hosts is None else f" on {self._hosts.title}"
        self._take_on(number, f"worker {number}{where}", process)
        person = self._roster.add(Line(ours), slot)
        self._persons[number] = person
        self._selector.register(ours, selectors.EVENT_READ, _Ear(self._roster, person))
        process.on_born = lambda pid: self._events.note("started", worker=person.id, pid=pid, slot=slot)

    def _open_template(self) -> Template:
        env = worker_env(os.environ, rank=0, job=self._job, port=self._port, cores=count_cores())
        self._template = Template(env, self._guardian)
        self._selector.register(self._template.line, selectors.EVENT_READ, self._template)
        return self._template

    # -- watch -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        while True:
            self._notice_exits()
            now_s = time.monotonic()
            wait_s = self._govern(now_s)
            if self._is_done():
                break
            if not self._is_ending:
                self._listen(wait_s)
                continue
            decision = decide(
                Scene(
                    now_s=now_s,
                    alive=len(self._living()),
                    grace_s=self._grace_s(),
                    told_at_s=self._told_at_s,
                    interrupts=self._interrupts,
                    killed=self._killed,
                )
            )
            if decision.act is Act.DONE:
                break
            if decision.act is Act.KILL:
                self._kill()
            self._listen(wait_s)
        if self._neighbours is not None:
            self._take_leave(self._neighbours)

    @property
    def _is_ending(self) -> bool:
        return self._told_at_s is not None or self._interrupts > 1 or self._killed

    def _is_done(self) -> bool:
        if self._living():
            return False
        if self._is_ending or self._gave_up is not None or self._end is not None:
            return True
        if self._roster.is_over:  # others may need to see that ours are done, as long as they are not
            return self._roster.is_finished or not self._station.arbiter.is_connected
        return self._has_ended

    def _govern(self, now_s: float) -> float:
        """Returns how long there is nothing to do, unless something happens."""
        if self._template is not None and self._template.ended:
            self._close_template()
        self._tell_bounds()
        if now_s - self._governed_s > self._elastic.stall_s / 2:  # we were stopped, and have not heard anybody
            for person in self._roster.people.values():
                person.heard_s = now_s
        self._governed_s = now_s
        self._judge_quits(now_s)
        self._decide(now_s)
        # Before a generation is proposed: if nobody is left, it is to wait for all who will be there in a moment.
        while self._is_start_due() and now_s >= max(start_at_s(self._failures), self._start_at_s):
            try:
                self._begin()
            except OSError as error:
                if not self._living():
                    raise
                say(f"a worker could not be started: {error}; the others go on, and it is tried again")
                self._start_at_s = now_s + START_AGAIN_S
        for person, why in self._roster.act(now_s):
            self._put_down(person, why)
        for person in list(self._roster.people.values()):
            if person.line.is_behind:
                person.line.flush()
            why_killed = why_dead(person, now_s, self._elastic.stall_s)
            if why_killed is not None:
                self._put_down(person, why_killed)
        if self._neighbours is not None:
            self._look_around(self._neighbours, now_s)
        self._release_surplus()
        if self._roster.is_over:
            self._send_home()
        return self._tick(now_s)

    def _tick(self, now_s: float) -> float:
        """Of the store. Returns how long to wait for the next one."""
        return min(LOOK_EVERY_S, max(0.0, self._station.tick(now_s) - now_s))

    def _put_down(self, person: Person, why: str) -> None:
        number = next(n for n, one in self._persons.items() if one is person)
        worker = self._workers[number]
        if worker.alive and not worker.told:
            say(f"{worker.name} (pid {worker.process.pid}) is killed: {why}")
            worker.told = True
            self._signal_group(worker, signal.SIGKILL)

    def _is_start_due(self) -> bool:
        over = self._has_ended or self._roster.is_over or self._roster.has_quits or self._doubts
        if self._is_ending or self._gave_up is not None or self._end is not None or over:
            return False
        left_out = self._neighbours is not None and self._neighbours.leave_us_out
        return self._records.is_listed and not left_out and len(self._needed()) < self._share()

    def _share(self) -> int:
        """How many of the workers that are wanted are to be on this host."""
        names = sorted({self._records.name} | {host.name for host in self._records.hosts})
        many = 1 if self._hosts is None else self._hosts.count
        return share_of(self._roster.want.workers, many, names.index(self._records.name))

    def _needed(self) -> list[int]:
        """The workers that live and are not on their way out because there are too many."""
        numbers = [worker.rank for worker in self._living()]
        return [number for number in numbers if not self._persons[number].released]

    def _release_surplus(self) -> None:
        """Newcomers that came too late: fewer are wanted by now. Of members, the next generation leaves some out."""
        surplus = len(self._needed()) - self._share()
        for number in reversed(self._needed()):
            person = self._persons[number]
            newcomer = person.worker.standing in (Standing.STARTING, Standing.READY) and person.spoke
            if surplus > 0 and newcomer and person.id not in self._records.generation.members:
                self._roster.release(person, "there are enough without it")
                surplus -= 1

    def _send_home(self) -> None:
        """The program is over: whoever is still on the way to it is not needed."""
        members = self._records.generation.members
        for number, person in self._persons.items():
            worker, standing = self._workers[number], person.worker.standing
            late = standing is Standing.STARTING or (standing is Standing.READY and person.id not in members)
            if worker.alive and not worker.told and late:
                worker.told = True
                self._signal_group(worker, signal.SIGKILL)

    def _obey(self, number: int) -> None:
        if number == scale_request.ASKS:
            self._rescale()
        else:
            super()._obey(number)

    def _rescale(self) -> None:
        """`lockstep scale` has written how many workers are wanted."""
        try:
            wanted = scale_request.read_wanted(self._job.log_dir)
        except (OSError, ValueError) as error:
            file = self._job.log_dir / scale_request.WANTED
            say(f"SIGUSR2: no number of workers in {file} ({error}); use `lockstep scale`")
            return
        least, most = self._elastic.least, self._most()
        if not least <= wanted <= most:
            shards = f", for the run has {most} shards" if most < self._elastic.most else ""
            say(f"{wanted} workers are wanted, but there can be {least} to {most}{shards}: nothing is changed")
            return
        say(f"{wanted} workers are wanted")
        self._records.set_want(Want(wanted, least, self._elastic.most))

    # -- other hosts -------------------------------------------------------------------------------------------------

    def _lose_lease(self, why: str) -> None:
        """Others may go on without our workers now (membership.py, rule 3). At the end nobody does."""
        if self._roster.is_over:
            return
        self._events.note("lease lost", why=why, workers=list(self._roster.people))
        self._stop_workers(why, "it can be reached again")
        if self._neighbours is not None:
            self._neighbours.forget()

    def _stop_workers(self, why: str, until: str) -> None:
        mine = [worker for worker in self._living() if worker.rank not in self._disowned]
        stopped = f"{len(mine)} worker{'s' if len(mine) > 1 else ''} of this host"
        say(f"{why}; {stopped} must stop, and others are started when {until}" if mine else why)
        for worker in mine:
            self._disowned.add(worker.rank)
            worker.told = True
            self._signal_group(worker, signal.SIGKILL)
        self._roster.disown()

    def _look_around(self, neighbours: Neighbours, now_s: float) -> None:
        roster = self._roster
        for line in neighbours.look_around(now_s):
            say(line)
        if self._end is None and self._gave_up is None and not roster.is_over:
            self._end = neighbours.why_end(now_s, ending=self._is_ending)
            if self._end is not None:
                say(self._end.why)
                self._tell(signal.SIGKILL)
        inside = any(person.worker.standing is Standing.INSIDE for person in roster.people.values())
        for news in neighbours.look_at_network(now_s, inside=inside, moves=roster.moves):
            if news.leaves_us_out:
                self._stop_workers(news.text, "they do")
            else:
                say(news.text)

    def _take_leave(self, neighbours: Neighbours) -> None:
        neighbours.take_leave(None if self._roster.is_over else self._asked)
        end_s = time.monotonic() + neighbours.stay_s
        while neighbours.must_stay and time.monotonic() < end_s and self._interrupts < 2:
            self._records.fulfil()
            self._listen(self._tick(time.monotonic()))

    # -- ends --------------------------------------------------------------------------------------------------------

    def _notice_exits(self) -> None:
        self._graves = [worker for worker in self._graves if self._has_strays(worker)]
        for worker in self._living():
            if worker.process.poll() is None:
                continue
            worker.take_last(self._job.log_dir)
            code, at_s = worker.process.returncode, time.monotonic()
            assert code is not None
            person = self._persons[worker.rank]
            early = self._bury(worker)
            is_lost = early or code not in (0, PREEMPTED)
            self._events.note("lost" if is_lost else "ended", worker=person.id, code=code)
            self._exits.append(Exit(worker.rank, code, at_s, is_lost_peer(worker.words()), worker.told, early))
            if worker.rank in self._disowned:
                continue
            released = any(do is Do.RELEASE for do, _ in person.told)
            self._has_ended |= not is_lost and not released and person.worker.standing is not Standing.QUIT
            if person.worker.standing is Standing.DONE:
                self._records.say_over(code if code == PREEMPTED else 0)
            if is_lost:
                self._mourn(worker, at_s, early=early)

    def _judge_quits(self, now_s: float) -> None:
        """Those who have left their Run without the others are lost."""
        for person in self._roster.judge_quits(now_s):
            number = next(n for n, one in self._persons.items() if one is person)
            self._exits = [replace(one, early=True) if one.rank == number else one for one in self._exits]
            self._events.note("lost", worker=person.id, code=self._workers[number].process.returncode)
            self._mourn(self._workers[number], now_s, early=True)

    def _bury(self, worker: WorkerProcess) -> bool:
        """Nothing of it stays, however many there will be. Returns whether it ended with status 0 before its time."""
        person = self._persons[worker.rank]
        for message in person.line.receive():
            self._roster.hear(person, message)
        for pipe in (worker.out.pipe, worker.err.pipe, person.line):
            with suppress(KeyError, ValueError):
                self._selector.unregister(pipe)
        person.line.close()
        early = self._roster.lost(person.id, done=worker.process.returncode in (0, PREEMPTED))
        worker.buried = True
        self._signal_group(worker, signal.SIGKILL)
        self._graves.append(worker)
        self._guardian.release(worker.process.pid)
        for stream in (worker.out, worker.err):
            stream.drain()
            stream.pipe.close()
        worker.log.close()
        return early

    def _mourn(self, worker: WorkerProcess, at_s: float, *, early: bool = False) -> None:
        words, code = worker.words(), worker.process.returncode
        assert code is not None
        error = words[-1] if code > 0 and words else ""
        if early:
            error = EARLY
        failure = Failure(worker.rank, at_s, self._roster.newest[0], self._roster.here[0], error)
        self._failures.append(failure)
        if self._is_ending or self._gave_up is not None or (self._roster.is_over and worker.told):
            return
        who = f"{worker.name} (pid {worker.process.pid})"
        if self._persons[worker.rank].worker.standing is Standing.DONE:
            say(f"{who} failed after its Run: {describe(code)}{f': {error}' if error else ''}")
            self._gave_up = failure
            return
        if not worker.told:
            how = _describe_early(self._persons[worker.rank]) if early else describe(code)
            say(f"{who} was lost: {how}{f': {error}' if error and not early else ''}")
        if self._roster.is_over and error:  # another one has ended the program in the middle of the run
            self._gave_up = failure
            return
        why = why_give_up(self._failures, self._job.workers)
        if why is None and self._can_do_without(failure):
            return
        self._give_up(self._doubts[0] if self._doubts else failure, why or NO_RUN)

    def _can_do_without(self, failure: Failure) -> bool:
        """Whoever is killed before anybody has come to a Run may be one of a program that has one."""
        if self._roster.is_elastic or not self._living():  # alone, it may be started again
            return True
        if failure.error or self._doubts:
            return False
        self._doubts.append(failure)
        return True

    def _decide(self, now_s: float) -> None:
        """Whether there is a Run, and so a replacement for who was lost before we knew."""
        if self._roster.is_elastic:
            self._doubts.clear()
        elif self._doubts and (now_s > self._doubts[0].at_s + RUN_WITHIN_S or not self._living()):
            self._give_up(self._doubts.pop(), NO_RUN)

    def _give_up(self, failure: Failure, why: str) -> None:
        first = next(one for one in self._failures if one.newest == failure.newest and one.error == failure.error)
        self._gave_up = first
        say(f"giving up: {why}")
        worker, exits = self._workers[failure.worker], [one for one in self._exits if one.rank == failure.worker]
        how = failure.error if exits[-1].early else describe(exits[-1].code)
        how += f": {failure.error}" if failure.error and not exits[-1].early else ""
        blame = f"{worker.name} failed, {how}; given up there: {why}"
        self._records.accuse(status=exit_status(exits[-1:], None), why=blame)
        self._tell(signal.SIGKILL if failure.error else signal.SIGTERM)

    def _kill(self) -> None:
        super()._kill()
        if self._template is not None:  # it may hang in an import, and those who are not born with it
            self._close_template()

    def _close_template(self) -> None:
        assert self._template is not None
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._template.line)
        self._template.close()
        self._template = None

    def __exit__(self, *error: object) -> None:
        if self._template is not None:
            self._close_template()
        if self._neighbours is not None:
            self._neighbours.close()
        self._station.close()
        super().__exit__(*error)

    def _trace_name(self, worker: WorkerProcess) -> str:
        return self._persons[worker.rank].id

    def report(self) -> int:
        regain_patience()
        if self._gave_up is None and self._doubts:  # the others did without, and ended before we knew
            self._gave_up = self._doubts[0]
        if self._gave_up is None:
            if self._end is not None:
                say(self._end.why)  # once more, at the end
                show(Card("lockstep: the run has ended", what=self._end.why, logs=str(self._job.log_dir)))
                return self._end.status
            if self._asked is not None and not self._exits:
                return 128 + self._asked
            codes = [one.code for one in self._exits if one.code in (0, PREEMPTED)]
            ended, over = self._roster.is_over or PREEMPTED in codes, self._records.over
            told_s = self._told_at_s
            too_late = told_s is not None and not any(one.at_s >= told_s for one in self._exits)  # nobody was there
            preempted = INTERRUPTED if self._asked == signal.SIGINT else PREEMPTED
            if ended and (self._asked is None or too_late):
                return preempted if PREEMPTED in codes else over["status"] if over is not None else 0
            if PREEMPTED in codes:
                return preempted
            if told_s is not None:  # whoever was lost before was replaced, and is not to blame for the end
                self._exits = [one for one in self._exits if one.at_s >= told_s]
                if not self._exits:
                    return 128 + (self._asked or signal.SIGTERM)
            return super().report()
        worker = self._workers[self._gave_up.worker]
        self._exits = [one for one in self._exits if one.rank == worker.rank]
        return super().report()
