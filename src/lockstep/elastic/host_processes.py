"""The worker processes of an elastic run on this host: forked from a fork server, killed one by one, and reaped.

`HostAgent` decides when. Each worker has one end of a JSON pipe; the other end is read in the selector loop here.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from lockstep.elastic.agent_client import VARIABLE, JsonPipe
from lockstep.elastic.host_workers import HostWorkers
from lockstep.elastic.membership import Standing
from lockstep.elastic.records import Records
from lockstep.elastic.worker_state import LocalWorker
from lockstep.launcher.exit_policy import PREEMPTED
from lockstep.launcher.fork_server import ForkRequest, ForkServer
from lockstep.launcher.hosts import Events
from lockstep.launcher.job import Job, count_cores, worker_env
from lockstep.launcher.output import print_message
from lockstep.launcher.parent_watch import ParentWatch
from lockstep.launcher.worker_group import WorkerGroup, WorkerProcess

RESTART_WITHIN_S: Final = 3.0  # after the first worker that goes back to the last checkpoint


class _PipeReader:
    """Reads the pipe of one worker when the selector says that it is readable."""

    def __init__(self, host_workers: HostWorkers, local: LocalWorker) -> None:
        self._host_workers, self._local = host_workers, local

    def on_readable(self) -> bytes | None:
        for message in self._local.pipe.receive():
            self._host_workers.handle(self._local, message)
        return b"" if self._local.pipe.ended else None


class HostProcesses(WorkerGroup):
    _port: int
    _records: Records
    _host_workers: HostWorkers

    def __init__(self, job: Job, parent_watch: ParentWatch) -> None:
        super().__init__(job, parent_watch)
        self._hosts = job.hosts
        self._events = Events(job.log_dir / "events.jsonl")
        self._fork_server: ForkServer | None = None
        self._local_workers: dict[int, LocalWorker] = {}  # by worker number
        self._faulty_slots: set[int] = set()  # in which a worker computed wrongly; none is started there any more
        self._slots = job.workers  # the largest number of workers that this host has had to have
        # The numbers of workers that go back to the last checkpoint, and when they have to have ended.
        self._restarting: set[int] = set()
        self._restart_end_s: float | None = None
        self._abandoned: set[int] = set()  # numbers of workers that were stopped, because the lease ended for example
        self._ended_groups: list[WorkerProcess] = []  # ended workers with processes of their group still to be reaped

    def _start_worker(self) -> None:
        number, fork_server = len(self._workers), self._fork_server or self._open_fork_server()
        # A replacement gets the GPU of the worker that leaves, which may still be there.
        staying = {n: one for n, one in self._local_workers.items() if not one.record.is_leaving}
        taken = {local.slot for n, local in staying.items() if not self._workers[n].is_reaped} | self._faulty_slots
        slot = next(n for n in range(len(taken) + 1) if n not in taken)
        ours, theirs = socket.socketpair()
        env = worker_env(os.environ, rank=slot, job=self._job, port=self._port, cores=count_cores())
        request = ForkRequest(self._job.command, env, os.getpid(), VARIABLE)
        process = fork_server.fork(request, theirs.fileno(), self._parent_watch.pipe)
        theirs.close()
        where = "" if self._hosts is None else f" on {self._hosts.title}"
        self._add_worker(number, f"worker {number}{where}", process)
        local = self._host_workers.add(JsonPipe(ours), slot)
        self._local_workers[number] = local
        self._selector.register(ours, selectors.EVENT_READ, _PipeReader(self._host_workers, local))
        process.on_started = lambda pid: self._events.record("started", worker=local.id, pid=pid, slot=slot)

    def _open_fork_server(self) -> ForkServer:
        env = worker_env(os.environ, rank=0, job=self._job, port=self._port, cores=count_cores())
        self._fork_server = ForkServer(env, self._parent_watch)
        self._selector.register(self._fork_server.socket, selectors.EVENT_READ, self._fork_server)
        self._host_workers.on_compile = self._fork_server.prepare_compiler
        return self._fork_server

    def _close_fork_server(self) -> None:
        assert self._fork_server is not None
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._fork_server.socket)
        self._fork_server.close()
        self._fork_server = None

    def _needed(self) -> list[int]:
        """The numbers of the running workers, without those that were released or that are to leave."""
        local = {worker.rank: self._local_workers[worker.rank] for worker in self._running()}
        return [number for number, one in local.items() if not one.released and not one.record.is_leaving]

    def _number_of(self, local: LocalWorker) -> int:
        return next(n for n, one in self._local_workers.items() if one is local)

    def _trace_name(self, worker: WorkerProcess) -> str:
        return self._local_workers[worker.rank].id

    # -- workers that leave ------------------------------------------------------------------------------------------

    def _let_leave(self, number: int, why: str) -> None:
        local, worker = self._local_workers[number], self._workers[number]
        print_message(f"{worker.name} (pid {worker.process.pid}) leaves after its step: {why}")
        self._events.record("leaving", worker=local.id, why=why)
        self._host_workers.let_leave(local)

    def _drop_slow(self) -> None:
        """Let a worker leave that is slower than --drop-slower-than allows, one at a time; the others go on."""
        for number in self._needed():
            local, want = self._local_workers[number], self._records.want
            slowness, local.slowness = local.slowness, 0.0
            if slowness and want.workers > want.least:
                self._records.set_want(replace(want, workers=want.workers - 1))
                self._let_leave(number, f"it takes {slowness:.1f} times as long for a sample as the others")
                return  # the number of wanted workers is written with a delay
            if slowness and not local.is_slow_told:
                local.is_slow_told = True
                print_message(
                    f"{self._workers[number].name} takes {slowness:.1f} times as long for a sample as the others, and "
                    f"stays: there must be {want.least} workers (--min)"
                )

    def _exclude_slot(self, worker: WorkerProcess) -> None:
        """Start no worker any more where one computed wrongly, unless there would be too few."""
        local, want = self._local_workers[worker.rank], self._host_workers.want
        self._events.record("faulty", worker=local.id, slot=local.slot)
        where = f"{worker.name} (slot {local.slot}) computed wrongly"
        if min(self._slots, want.workers) - len(self._faulty_slots) > want.least:
            self._faulty_slots.add(local.slot)
            print_message(f"{where}; no worker is started in its place")
        else:
            print_message(f"{where}; another is started in its place: there must be {want.least} workers (--min)")

    def _begin_restart(self, first: WorkerProcess, at_s: float) -> None:
        """Wait for the end of all workers that have a state. New ones have none, and continue."""
        with_state = (Standing.INSIDE, Standing.LEFT)
        members = (number for number, one in self._local_workers.items() if one.record.standing in with_state)
        self._restarting, self._restart_end_s = {first.rank, *members}, at_s + RESTART_WITHIN_S

    def _end_restart(self, now_s: float) -> None:
        """Kill the workers that have not asked for the restart as the others did: they were in another call, and would
        continue from a state that is not verified. No worker is started before all of them have ended."""
        if self._restart_end_s is None:
            return
        alive = [number for number in self._restarting if self._workers[number].alive]
        for number in alive if now_s > self._restart_end_s else ():
            if self._local_workers[number].restart is None:
                self._kill_worker(self._local_workers[number], "all workers go back to the last checkpoint")
        if not alive:
            self._restart_end_s = None

    def _drain(self, numbers: Sequence[int]) -> None:
        """Let these workers leave, as `lockstep drain` asks."""
        needed = self._needed()
        for number in numbers:
            if number not in needed:
                running = ", ".join(map(str, needed)) or "none"
                print_message(f"worker {number} is asked to leave, but does not run here; there are: {running}")
            else:
                self._let_leave(number, "lockstep drain")

    # -- the end of workers -------------------------------------------------------------------------------------------

    def _kill_worker(self, local: LocalWorker, why: str) -> None:
        worker = self._workers[self._number_of(local)]
        if worker.alive and not worker.stop_sent:
            print_message(f"{worker.name} (pid {worker.process.pid}) is killed: {why}")
            worker.stop_sent = True
            self._signal_group(worker, signal.SIGKILL)

    def _kill_latecomers(self) -> None:
        """Kill the workers that have not joined yet: the program is over."""
        members = self._records.generation.members
        for number, local in self._local_workers.items():
            worker, standing = self._workers[number], local.record.standing
            late = standing is Standing.STARTING or (standing is Standing.READY and local.id not in members)
            if worker.alive and not worker.stop_sent and late:
                worker.stop_sent = True
                self._signal_group(worker, signal.SIGKILL)

    def _stop_workers(self, why: str, until: str) -> None:
        mine = [worker for worker in self._running() if worker.rank not in self._abandoned]
        stopped = f"{len(mine)} worker{'s' if len(mine) > 1 else ''} of this host"
        print_message(f"{why}; {stopped} must stop, and others are started when {until}" if mine else why)
        for worker in mine:
            self._abandoned.add(worker.rank)
            worker.stop_sent = True
            self._signal_group(worker, signal.SIGKILL)
        self._host_workers.remove_all()

    def _kill(self) -> None:
        super()._kill()
        if self._fork_server is not None:  # it may hang in an import, and with it the workers that are not forked yet
            self._close_fork_server()

    def _reap(self, worker: WorkerProcess) -> bool:
        """Release everything that belongs to an ended worker, since any number of workers may follow it.

        Returns whether it ended with status 0 too early: it was a member, and its Run was not over.
        """
        local = self._local_workers[worker.rank]
        for message in local.pipe.receive():
            self._host_workers.handle(local, message)
        for pipe in (worker.out.pipe, worker.err.pipe, local.pipe):
            with suppress(KeyError, ValueError):
                self._selector.unregister(pipe)
        local.pipe.close()
        early = self._host_workers.remove(local.id, done=worker.process.returncode in (0, PREEMPTED))
        worker.is_reaped = True
        self._signal_group(worker, signal.SIGKILL)
        self._ended_groups.append(worker)
        self._parent_watch.release(worker.process.pid)
        for stream in (worker.out, worker.err):
            stream.drain()
            stream.pipe.close()
        worker.log.close()
        return early
