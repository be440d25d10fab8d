"""The worker processes of an elastic run on this host: forked from a fork server, killed one by one, and reaped.

`HostAgent` decides when. Each worker has one end of a JSON pipe; the other end is read in the selector loop here.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from contextlib import suppress

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
        self._abandoned: set[int] = set()  # numbers of workers that were stopped, because the lease ended for example
        self._ended_groups: list[WorkerProcess] = []  # ended workers with processes of their group still to be reaped

    def _start_worker(self) -> None:
        number, fork_server = len(self._workers), self._fork_server or self._open_fork_server()
        taken = {local.slot for n, local in self._local_workers.items() if not self._workers[n].is_reaped}
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
        return self._fork_server

    def _close_fork_server(self) -> None:
        assert self._fork_server is not None
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._fork_server.socket)
        self._fork_server.close()
        self._fork_server = None

    def _needed(self) -> list[int]:
        """The numbers of the running workers, without those that were released because there are too many."""
        numbers = [worker.rank for worker in self._running()]
        return [number for number in numbers if not self._local_workers[number].released]

    def _number_of(self, local: LocalWorker) -> int:
        return next(n for n, one in self._local_workers.items() if one is local)

    def _trace_name(self, worker: WorkerProcess) -> str:
        return self._local_workers[worker.rank].id

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
