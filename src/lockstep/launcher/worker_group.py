"""The launcher of one machine: starts the workers, watches them, and returns when all have ended.

One thread runs one loop over pipes and signals. exit_policy.py decides what to do next; parent_watch.py ensures that no
worker outlives the launcher. The launcher imports no torch, so that it starts at once and cannot hang in torch.

Each worker leads a process group (and session) of its own. Ctrl-C therefore reaches only the launcher, which passes it
on to whole groups, as a terminal does. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are sent to the workers alone, as `kill`
does, so that a worker that writes a checkpoint still has its DataLoader workers. When a worker has ended, the rest of
its group gets SIGTERM, and SIGKILL when the run is over. Standard input is empty for all workers.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Final

from lockstep.failures.postmortem import FailedWorker, describe_failure, show
from lockstep.launcher.exit_policy import (
    INTERRUPTED,
    PREEMPTED,
    Action,
    Exit,
    LaunchState,
    decide,
    describe,
    exit_status,
    finishing_file,
    first_failure,
    is_lost_peer,
)
from lockstep.launcher.fork_server_client import ForkedProcess
from lockstep.launcher.job import Job, count_cores, worker_env
from lockstep.launcher.oom_kills import OomKills, compare
from lockstep.launcher.output import print_message, write_all
from lockstep.launcher.parent_watch import ParentWatch
from lockstep.launcher.worker_process import WorkerProcess, log_file_name, start_process

PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
FINISH_S = 600.0  # time to stop for workers that finish their step and save (finishing_file)
CHILDREN_S = 2.0  # time to stop for children of workers that have ended already


class WorkerGroup:
    """The workers of one run. Starts, watches and stops them, and collects what they leave behind."""

    def __init__(self, job: Job, parent_watch: ParentWatch) -> None:
        self._job = job
        self._parent_watch = parent_watch
        self._workers: list[WorkerProcess] = []
        self._exits: list[Exit] = []
        self._pending_signals: list[int] = []
        self._stop_signal: int | None = None
        self._interrupts = 0
        self._stop_sent_at_s: float | None = None
        self._killed = False
        self._oom_kills_before = OomKills.count()

    def __enter__(self) -> WorkerGroup:
        self._selector = selectors.DefaultSelector()
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._wakeup_read.setblocking(False)
        self._wakeup_write.setblocking(False)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ)
        self._handlers = {one: signal.getsignal(one) for one in (*PASSED_ON, signal.SIGCHLD)}
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        for one, before in self._handlers.items():
            # A signal that was ignored before (nohup, a shell that starts the launcher in the background) stays so,
            # except SIGCHLD: the kernel would discard the exit statuses.
            if before is not signal.SIG_IGN or one == signal.SIGCHLD:
                signal.signal(one, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves no process behind: children of ended workers get CHILDREN_S to stop, workers that still run none."""
        for worker in self._running():
            self._signal_group(worker, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired, TimeoutError):  # stuck in the kernel: ParentWatch kills it again
                worker.process.wait(5)
        left = [worker for worker in self._workers if not worker.is_reaped and self._has_leftover_children(worker)]
        end_s = time.monotonic() + min(CHILDREN_S, self._job.grace_s)
        while left and time.monotonic() < end_s and not self._killed:
            time.sleep(0.02)
            left = [worker for worker in left if self._has_leftover_children(worker)]
        for worker in left:
            self._signal_group(worker, signal.SIGKILL)
        for worker in (one for one in self._workers if not one.is_reaped):
            if not worker.alive:
                self._parent_watch.release(worker.process.pid)
            for stream in (worker.out, worker.err):
                stream.drain()
                stream.pipe.close()
            worker.log.close()
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        for one, before in self._handlers.items():
            signal.signal(one, before)
        self._selector.close()
        self._wakeup_read.close()
        self._wakeup_write.close()

    def start(self, port: int) -> None:
        cores = count_cores()
        for rank in range(self._job.workers):
            env = worker_env(os.environ, rank=rank, job=self._job, port=port, cores=cores)
            self._add_worker(
                rank, f"rank {rank}", start_process(self._job.command, env, self._parent_watch.child_setup())
            )

    def _add_worker(self, rank: int, name: str, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        try:
            log = (self._job.log_dir / log_file_name(name)).open("wb", buffering=0)
        except OSError as error:
            print_message(f"{name} has no log: {error}")
            log = open(os.devnull, "wb", buffering=0)  # noqa: SIM115  (it is closed with the worker)
        worker = WorkerProcess(rank, name, process, log)
        self._workers.append(worker)
        for stream in (worker.out, worker.err):
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def watch(self) -> None:
        while True:
            self._collect_exits()
            now_s = time.monotonic()
            decision = decide(
                LaunchState(
                    now_s=now_s,
                    alive=len(self._running()),
                    grace_s=self._grace_s(),
                    exits=self._exits,
                    stop_sent_at_s=self._stop_sent_at_s,
                    interrupts=self._interrupts,
                    killed=self._killed,
                )
            )
            if decision.act is Action.DONE:
                return
            if decision.act is Action.STOP:
                self._send_stop(signal.SIGTERM)
            elif decision.act is Action.KILL:
                self._kill()
            else:
                self._wait_for_events(None if decision.until_s is None else decision.until_s - now_s)

    def _grace_s(self) -> float:
        """Time between asking workers to stop and killing them; longer while all of them finish a step and save."""
        logs, running = self._job.log_dir, self._running()
        if self._stop_sent_at_s is None or not all(finishing_file(logs, one.process.pid).exists() for one in running):
            return self._job.grace_s
        return max(self._job.grace_s, FINISH_S)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:  # which only has to end the wait in the selector
            self._pending_signals.append(number)

    def _wait_for_events(self, wait_s: float | None) -> None:
        for key, mask in self._selector.select(wait_s):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._wakeup_read.recv(4096)
            elif hasattr(key.data, "ready"):  # a socket of the control store
                key.data.ready(mask)
            elif key.data.on_readable() == b"":
                self._selector.unregister(key.fileobj)
        if self._stop_signal is None and any(worker.out.broken or worker.err.broken for worker in self._workers):
            self._pending_signals.append(signal.SIGPIPE)  # ends the run, as it ends other programs
        while self._pending_signals:
            self._handle_signal(self._pending_signals.pop(0))

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        if number not in ENDING:
            for worker in self._running():
                worker.process.send_signal(number)
            return
        if self._stop_signal is None:
            self._stop_signal = number
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            again = "; Ctrl-C again kills at once" if number == signal.SIGINT else ""
            print_message(
                f"{name}: passed on; a lockstep.Run finishes its step and saves, other workers that do not end within "
                f"{self._job.grace_s:g} s are killed{again}"
            )
        if not self._killed:
            self._send_stop(signal.SIGTERM if number == signal.SIGPIPE else number)

    def _send_stop(self, number: int) -> None:
        if self._stop_sent_at_s is None:
            self._stop_sent_at_s = time.monotonic()
        for worker in self._running():
            worker.stop_sent = True
            if number == signal.SIGINT:
                self._signal_group(worker, number)
            else:
                worker.process.send_signal(number)

    def _kill(self) -> None:
        self._killed = True
        for worker in self._running():
            worker.stop_sent = True
            self._signal_group(worker, signal.SIGKILL)

    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.alive]

    def _signal_group(self, worker: WorkerProcess, number: int) -> bool:
        """Signals the worker's process group, which keeps its number while it has members. False if it is empty."""
        if not worker.process.pid:  # not forked yet
            worker.process.send_signal(number)
            return True
        try:
            os.killpg(worker.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _has_leftover_children(self, worker: WorkerProcess) -> bool:
        """Whether the process group of a worker that has ended still has members. Reaps those that have ended: the
        launcher may have adopted them."""
        if not worker.process.pid:
            return False
        with suppress(ChildProcessError):
            while os.waitpid(-worker.process.pid, os.WNOHANG)[0]:
                pass
        return self._signal_group(worker, 0)

    def _collect_exits(self) -> None:
        for worker in self._running():
            if worker.process.poll() is None:
                continue
            at_s = time.monotonic()
            worker.collect_last_output(self._job.log_dir)  # is_lost_peer needs it
            code = worker.process.returncode
            assert code is not None
            exited = Exit(worker.rank, code, at_s, is_lost_peer(worker.last_lines()), worker.stop_sent)
            if code == 0 and worker.mark is not None and not worker.stop_sent:
                exited = replace(exited, early=not worker.mark.is_left, quit=worker.mark.is_left)
            self._exits.append(exited)
            self._signal_group(worker, signal.SIGTERM)

    def report(self) -> int:
        """Prints the worker that failed first, the end of its output, and the card last. Returns the exit status."""
        status = exit_status(self._exits, self._stop_signal)
        failed = first_failure(self._exits)
        if failed is not None and failed.code == PREEMPTED:  # the worker has printed what it saved
            return INTERRUPTED if self._stop_signal == signal.SIGINT else status
        if failed is None or (failed.stop_sent and self._stop_signal is not None):
            return status
        worker = self._workers[failed.rank]
        who, lines, crash = worker.name, worker.last_lines(), worker.crash
        print_message(f"{who} of {self._job.workers} failed first: {describe(failed.code, early=failed.early)}")
        print_message(f"the logs of all workers are in {self._job.log_dir}")
        if crash is not None and crash.short:
            cut = f", without {crash.left_out} frames of lockstep and torch, which {log_file_name(who)} has"
            print_message(f"the traceback of {who}{cut if crash.left_out else ''}:")
            lines = crash.short.splitlines()
        else:
            print_message(f"the last output of {who}:" if lines else f"{who} printed nothing")
        with suppress(OSError):
            write_all(2, "".join(f"[{who}] {line}\n" for line in lines).encode(errors="replace"))
        show(describe_failure(self._describe_exit(failed), crash))
        return status

    def _describe_exit(self, exited: Exit) -> FailedWorker:
        worker = self._workers[exited.rank]
        return FailedWorker(
            name=worker.name,
            of=self._job.workers,
            pid=worker.process.pid,
            code=exited.code,
            last_lines=worker.last_lines(),
            log_dir=self._job.log_dir,
            log=log_file_name(worker.name),
            stop_sent=exited.stop_sent,
            early=exited.early,
            out_of_memory=compare(self._oom_kills_before, OomKills.count()),
            trace_name=self._trace_name(worker),
            pids={one.name: one.process.pid for one in self._workers},
        )

    def _trace_name(self, worker: WorkerProcess) -> str:
        return f"rank{worker.rank}"
