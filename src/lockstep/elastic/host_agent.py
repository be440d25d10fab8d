"""The launcher of an elastic run on one host: it replaces workers that are lost, while the others continue.

`membership` decides which workers are in which generation, `host_workers` carries that out on this host, and
`worker_state` decides whether a replacement makes sense. Each of the other hosts has an agent like this one
(`other_hosts`); the state that they share is in the store (`records`).
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from lockstep.elastic.host_processes import HostProcesses
from lockstep.elastic.host_workers import HostWorkers
from lockstep.elastic.membership import OrderAction, Standing, Want
from lockstep.elastic.other_hosts import OtherHosts, RunEnd
from lockstep.elastic.records import Records
from lockstep.elastic.worker_state import (
    LocalWorker,
    LossBeforeRun,
    RestartRequest,
    WorkerFailure,
    start_at_s,
    why_dead,
    why_give_up,
)
from lockstep.failures.card import Card
from lockstep.failures.postmortem import show
from lockstep.launcher import scale_request
from lockstep.launcher.exit_policy import (
    EARLY,
    INTERRUPTED,
    PREEMPTED,
    Action,
    Exit,
    describe,
    exit_status,
    is_lost_peer,
)
from lockstep.launcher.hosts import HOST, StoreConnection, key_prefix, workers_on_host
from lockstep.launcher.job import Job
from lockstep.launcher.output import clear_write_timeout, print_message, set_write_timeout
from lockstep.launcher.parent_watch import ParentWatch
from lockstep.launcher.worker_group import WorkerProcess

LOOK_EVERY_S: Final = 0.1
SCREEN_S: Final = 1.0  # how long a write to the screen may block
START_AGAIN_S: Final = 5.0  # the pause after a worker could not be started
SIGNALS_WITHIN_S: Final = 0.5  # between signals that a scheduler sends to all processes of a job
NO_RUN: Final = "the program has no Run, so the others cannot continue without it"


def _describe_early(local: LocalWorker) -> str:
    """Describe the exit of a worker that ended with status 0 too early, and at which step.

    The last position that it sent is a moment old, unless it left its Run by an exception: then it sent the exact one.
    """
    step = local.position[0] if local.position is not None else -1
    where = f"step {step}{'' if local.left_run else ' or a little later'}" if step >= 0 else ""
    return f"{EARLY}{f' ({where})' if where else ''}"


def tick(connection: StoreConnection, now_s: float) -> float:
    """Tick the store connection. Returns how long to wait before the next tick."""
    return min(LOOK_EVERY_S, max(0.0, connection.tick(now_s) - now_s))


class HostAgent(HostProcesses):
    def __init__(self, job: Job, parent_watch: ParentWatch) -> None:
        super().__init__(job, parent_watch)
        assert job.elastic is not None
        self._elastic = job.elastic
        self._failures: list[WorkerFailure] = []
        self._gave_up: WorkerFailure | None = None
        self._early_loss = LossBeforeRun()
        self._published_most = -1
        self._last_pass_s = time.monotonic()
        self._start_at_s = 0.0
        self._has_ended = False  # the program has ended on some worker, perhaps without ever creating a Run
        self._run_end: RunEnd | None = None  # set if another host ended the run, or the store is lost
        self._other_hosts: OtherHosts | None = None

    def __enter__(self) -> HostAgent:
        super().__enter__()
        job, hosts, bounds = self._job, self._hosts, self._elastic
        want = Want(job.workers * (hosts.count if hosts else 1), bounds.least, bounds.most)
        if hosts is None:
            self._connection = StoreConnection.local(self._on_lease_lost)
            self._records = Records(HOST, self._connection.client, want)
        else:
            places = job.log_dir, self._parent_watch
            self._connection = StoreConnection.open(hosts, self._selector, self._on_lease_lost, *places)
            self._records = Records(hosts.name, self._connection.client, want, prefix=key_prefix(hosts.secret))
            self._other_hosts = OtherHosts(
                hosts,
                records=self._records,
                connection=self._connection,
                run_options={"--hosts": hosts.count, "-n": job.workers, "--min": bounds.least, "--max": bounds.most},
                selector=self._selector,
            )
        self._host_workers = HostWorkers(self._records, self._events)
        return self

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self, port: int) -> None:
        self._port = port
        set_write_timeout(SCREEN_S)
        self._publish_bounds()
        if self._other_hosts is not None:
            self._other_hosts.start()

    def _publish_bounds(self) -> None:
        """Write the bounds to the file that `lockstep scale` reads."""
        most = self._host_workers.most(self._elastic.most)
        if most != self._published_most:
            self._published_most = most
            with suppress(OSError):
                scale_request.publish_launcher(self._job.log_dir, least=self._elastic.least, most=most)

    # -- watch -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        while True:
            self._collect_exits()
            now_s = time.monotonic()
            wait_s = self._manage(now_s)
            if self._is_done():
                break
            act = self._decide(now_s).act if self._is_ending else Action.WAIT
            if act is Action.DONE:
                break
            if act is Action.KILL:
                self._kill()
            self._wait_for_events(wait_s)
        if self._other_hosts is not None:
            self._leave(self._other_hosts)

    @property
    def _is_ending(self) -> bool:
        return self._stop_sent_at_s is not None or self._interrupts > 1 or self._killed

    def _is_done(self) -> bool:
        if self._running():
            return False
        if self._is_ending or self._gave_up is not None or self._run_end is not None or self._records.is_leaving:
            return True
        if self._host_workers.is_over:  # until the other hosts are done, they may need to see that ours are
            return self._host_workers.is_finished or not self._connection.client.is_connected
        return self._has_ended

    def _manage(self, now_s: float) -> float:
        """One pass over everything that may be due. Returns how long to wait for events before the next one."""
        if self._fork_server is not None and self._fork_server.ended:
            self._close_fork_server()
        self._publish_bounds()
        if now_s - self._last_pass_s > self._elastic.stall_s / 2:  # this process was stopped, and read no messages
            for local in self._host_workers.workers.values():
                local.last_heard_s = now_s
        self._last_pass_s = now_s
        self._resolve_quits(now_s)
        has_run, is_running = self._host_workers.is_elastic, bool(self._running())
        if (lost := self._early_loss.resolve(now_s, has_run=has_run, is_running=is_running)) is not None:
            self._give_up(lost, NO_RUN)
        self._resolve_signals(now_s)
        self._end_restart(now_s)
        # Before a generation is proposed: if no worker is left, it has to wait for those that are being started.
        while self._is_start_due() and now_s >= max(start_at_s(self._failures), self._start_at_s):
            try:
                self._start_worker()
            except OSError as error:
                if not self._running():
                    raise
                print_message(f"a worker could not be started: {error}; the others continue, and it is tried again")
                self._start_at_s = now_s + START_AGAIN_S
        self._drop_slow()  # after that: no other worker is started in its place
        for local, why in self._host_workers.act(now_s):
            self._kill_worker(local, why)
        for local in list(self._host_workers.workers.values()):
            if local.pipe.has_unsent:
                local.pipe.flush()
            if (why_killed := why_dead(local, now_s, self._elastic.stall_s)) is not None:
                self._kill_worker(local, why_killed)
        if self._other_hosts is not None:
            self._check_other_hosts(self._other_hosts, now_s)
        self._release_surplus()
        if self._host_workers.is_over:
            self._kill_latecomers()
        return tick(self._connection, now_s)

    def _resolve_signals(self, now_s: float) -> None:
        """Decide what a signal to a worker means: it leaves, or the whole run ends.

        The run ends if the launcher got the signal too, which may be a little later, or if all workers did.
        """
        running = [self._local_workers[worker.rank] for worker in self._running()]
        signalled = [local for local in running if local.signalled_s is not None]
        staying = [local for local in running if local.signalled_s is None and not local.record.is_leaving]
        stops = self._is_ending or (self._hosts is None and not staying)
        for local in signalled:
            assert local.signalled_s is not None
            if stops:
                self._host_workers.stop(local)
            elif now_s > local.signalled_s + SIGNALS_WITHIN_S:
                local.signalled_s = None
                self._let_leave(self._number_of(local), "it was sent a signal")

    def _is_start_due(self) -> bool:
        over = self._has_ended or self._host_workers.is_over or self._host_workers.has_quits or self._early_loss.failure
        if self._is_ending or self._gave_up is not None or self._run_end is not None or over:
            return False
        if self._restart_end_s is not None:  # workers that go back are still ending
            return False
        left_out = self._other_hosts is not None and self._other_hosts.is_left_out
        return self._records.is_listed and not left_out and len(self._needed()) < self._share()

    def _share(self) -> int:
        """Returns how many of the wanted workers belong on this host."""
        records, many = self._records, 1 if self._hosts is None else self._hosts.count
        if records.is_leaving:
            return 0
        present = {records.name: False} | {host.name: host.is_leaving for host in records.hosts}
        leaving = {name for name, is_leaving in present.items() if is_leaving} | (records.hosts_left - present.keys())
        names = sorted(present.keys() - leaving)
        share = workers_on_host(self._host_workers.want.workers, max(1, many - len(leaving)), names.index(records.name))
        self._slots = max(self._slots, share)
        return min(share, self._slots - len(self._faulty_slots))

    def _release_surplus(self) -> None:
        """Release newcomers if fewer workers are wanted by now. Surplus members are left out of the next generation."""
        surplus = len(self._needed()) - self._share()
        for number in reversed(self._needed()):
            local = self._local_workers[number]
            newcomer = local.record.standing in (Standing.STARTING, Standing.READY) and local.has_run
            if surplus > 0 and newcomer and local.id not in self._records.generation.members:
                self._host_workers.release(local, "there are enough without it")
                surplus -= 1

    def _handle_signal(self, number: int) -> None:
        if number != scale_request.REQUEST_SIGNAL:
            super()._handle_signal(number)
            return
        try:
            asked = scale_request.read_request(self._job.log_dir)
        except (OSError, ValueError) as error:
            file = self._job.log_dir / scale_request.REQUEST_FILE
            print_message(f"SIGUSR2: no request in {file} ({error}); use `lockstep scale` or `lockstep drain`")
            return
        if asked.workers:
            self._scale(asked.workers)
        elif asked.leaving:
            self._drain(asked.leaving)
        else:
            self._drain_host()

    def _drain_host(self) -> None:
        """Let all workers of this host leave, and start no others here."""
        if self._hosts is None:
            print_message("all workers are asked to leave, but this is the only host; SIGTERM or Ctrl-C saves and ends")
        elif self._connection.keeps_store:
            print_message(
                "all workers are asked to leave, but this host keeps the control store, without which the others "
                "cannot continue; use --store etcd://, or end the run with SIGTERM, which saves"
            )
        else:
            self._records.is_leaving = True
            for number in self._needed():
                self._let_leave(number, "lockstep drain")

    def _scale(self, wanted: int) -> None:
        least, most = self._elastic.least, self._host_workers.most(self._elastic.most)
        if least <= wanted <= most:
            print_message(f"{wanted} workers are wanted")
            self._records.set_want(Want(wanted, least, self._elastic.most))
        else:
            can_be = f"{least} to {most}{f', for the run has {most} shards' if most < self._elastic.most else ''}"
            print_message(f"{wanted} workers are wanted, but there can be {can_be}: nothing is changed")

    # -- other hosts -------------------------------------------------------------------------------------------------

    def _on_lease_lost(self, why: str) -> None:
        """Stop the workers of this host: the others may continue without them (membership.py, rule 3)."""
        if self._host_workers.is_over:
            return
        self._events.record("lease lost", why=why, workers=list(self._host_workers.workers))
        self._stop_workers(why, "it can be reached again")
        if self._other_hosts is not None:
            self._other_hosts.reset()

    def _check_other_hosts(self, other_hosts: OtherHosts, now_s: float) -> None:
        host_workers = self._host_workers
        for line in other_hosts.check_store(now_s):
            print_message(line)
        if self._run_end is None and self._gave_up is None and not host_workers.is_over:
            self._run_end = other_hosts.why_end(now_s, ending=self._is_ending)
            if self._run_end is not None:
                print_message(self._run_end.why)
                self._send_stop(signal.SIGKILL)
        inside = any(local.record.standing is Standing.INSIDE for local in host_workers.workers.values())
        for news in other_hosts.check_network(now_s, inside=inside, progress_count=host_workers.progress_count):
            if news.stops_this_host:
                self._stop_workers(news.text, "they do")
            else:
                print_message(news.text)

    def _leave(self, other_hosts: OtherHosts) -> None:
        other_hosts.leave(None if self._host_workers.is_over else self._stop_signal)
        end_s = time.monotonic() + other_hosts.stay_s
        while other_hosts.must_stay and time.monotonic() < end_s and self._interrupts < 2:
            self._records.flush_pending()
            self._wait_for_events(tick(self._connection, time.monotonic()))

    # -- ends --------------------------------------------------------------------------------------------------------

    def _collect_exits(self) -> None:
        self._ended_groups = [worker for worker in self._ended_groups if self._has_leftover_children(worker)]
        for worker in self._running():
            if worker.process.poll() is None:
                continue
            worker.collect_last_output(self._job.log_dir)
            code, at_s = worker.process.returncode, time.monotonic()
            assert code is not None
            local = self._local_workers[worker.rank]
            early = self._reap(worker)
            is_lost = local.restart is None and (early or code not in (0, PREEMPTED))
            self._events.record("lost" if is_lost else "ended", worker=local.id, code=code)
            lost_peer = is_lost_peer(worker.last_lines())
            self._exits.append(Exit(worker.rank, code, at_s, lost_peer, worker.stop_sent, early))
            if worker.rank in self._abandoned:
                continue
            if local.restart is not None:
                self._handle_restart(worker, local.restart, at_s)
                continue
            released = any(do is OrderAction.RELEASE for do, _ in local.orders_sent)
            self._has_ended |= not is_lost and not released and local.record.standing is not Standing.QUIT
            if local.record.standing is Standing.DONE:
                self._records.publish_over(code if code == PREEMPTED else 0)
            if is_lost:
                self._handle_loss(worker, at_s, early=early)

    def _handle_restart(self, worker: WorkerProcess, request: RestartRequest, at_s: float) -> None:
        """Handle the end of a worker that goes back to the last checkpoint, as all others do."""
        if request.is_wrong:
            self._exclude_slot(worker)
        # All workers send the same request: it counts once.
        if worker.rank in self._restarting or self._is_ending or self._gave_up is not None:
            return
        steps = self._host_workers.newest[0], self._host_workers.current[0]
        self._failures.append(WorkerFailure(worker.rank, at_s, *steps, "" if request.is_wrong is None else request.why))
        self._begin_restart(worker, at_s)
        self._events.record("goes back", why=request.why)
        print_message(f"{request.why}. All workers start again, from the last checkpoint if there is one")
        if (why := why_give_up(self._failures, self._job.workers)) is not None:
            self._give_up(self._failures[-1], why)

    def _resolve_quits(self, now_s: float) -> None:
        """Handle the loss of workers that have left their Run while the others stay in it."""
        for local in self._host_workers.resolve_quits(now_s):
            number = self._number_of(local)
            self._exits = [replace(one, early=True) if one.rank == number else one for one in self._exits]
            self._events.record("lost", worker=local.id, code=self._workers[number].process.returncode)
            self._handle_loss(self._workers[number], now_s, early=True)

    def _handle_loss(self, worker: WorkerProcess, at_s: float, *, early: bool = False) -> None:
        words, code = worker.last_lines(), worker.process.returncode
        assert code is not None
        error = EARLY if early else words[-1] if code > 0 and words else ""
        failure = WorkerFailure(worker.rank, at_s, self._host_workers.newest[0], self._host_workers.current[0], error)
        self._failures.append(failure)
        if self._is_ending or self._gave_up is not None or (self._host_workers.is_over and worker.stop_sent):
            return
        who = f"{worker.name} (pid {worker.process.pid})"
        if self._local_workers[worker.rank].record.standing is Standing.DONE:
            print_message(f"{who} failed after its Run: {describe(code)}{f': {error}' if error else ''}")
            self._gave_up = failure
            return
        if not worker.stop_sent:
            how = _describe_early(self._local_workers[worker.rank]) if early else describe(code)
            print_message(f"{who} was lost: {how}{f': {error}' if error and not early else ''}")
        if self._host_workers.is_over and error:  # another one has ended the program in the middle of the run
            self._gave_up = failure
            return
        why = why_give_up(self._failures, self._job.workers)
        if why is None and (self._host_workers.is_elastic or not self._running()):  # a single one is started again
            return
        if why is None and self._early_loss.note(failure):
            return
        self._give_up(self._early_loss.failure or failure, why or NO_RUN)

    def _give_up(self, failure: WorkerFailure, why: str) -> None:
        same = (one for one in self._failures if one.newest == failure.newest and one.error == failure.error)
        self._gave_up = next(same)
        print_message(f"giving up: {why}")
        worker, exits = self._workers[failure.worker], [one for one in self._exits if one.rank == failure.worker]
        how = failure.error if exits[-1].early else describe(exits[-1].code)
        how += f": {failure.error}" if failure.error and not exits[-1].early else ""
        why_failed = f"{worker.name} failed, {how}; given up there: {why}"
        self._records.publish_failure(status=exit_status(exits[-1:], None), why=why_failed)
        self._send_stop(signal.SIGKILL if failure.error else signal.SIGTERM)

    def __exit__(self, *error: object) -> None:
        if self._fork_server is not None:
            self._close_fork_server()
        if self._other_hosts is not None:
            self._other_hosts.close()
        self._connection.close()
        super().__exit__(*error)

    def report(self) -> int:
        clear_write_timeout()
        if self._gave_up is None:
            self._gave_up = self._early_loss.failure  # if the others ended before a Run was created
        if self._gave_up is None:
            if self._run_end is not None:
                print_message(self._run_end.why)  # once more, at the end
                show(Card("lockstep: the run has ended", what=self._run_end.why, logs=str(self._job.log_dir)))
                return self._run_end.status
            if self._stop_signal is not None and not self._exits:
                return 128 + self._stop_signal
            codes = [one.code for one in self._exits if one.code in (0, PREEMPTED)]
            ended, over = self._host_workers.is_over or PREEMPTED in codes, self._records.over
            stopped_s = self._stop_sent_at_s
            too_late = stopped_s is not None and all(one.at_s < stopped_s for one in self._exits)
            preempted = INTERRUPTED if self._stop_signal == signal.SIGINT else PREEMPTED
            if ended and (self._stop_signal is None or too_late):
                return preempted if PREEMPTED in codes else over["status"] if over is not None else 0
            if PREEMPTED in codes:
                return preempted
            if stopped_s is not None:  # workers lost before that were replaced, and are not the reason for the end
                self._exits = [one for one in self._exits if one.at_s >= stopped_s]
                if not self._exits:
                    return 128 + (self._stop_signal or signal.SIGTERM)
            return super().report()
        worker = self._workers[self._gave_up.worker]
        self._exits = [one for one in self._exits if one.rank == worker.rank]
        return super().report()
