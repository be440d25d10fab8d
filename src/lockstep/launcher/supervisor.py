"""The launcher of one machine: starts the workers, watches them, and ends when they have.

One thread and one loop over pipes and signals; what to do next is decided in `verdict`, and that nobody outlives us
is the business of `guardian`. It imports no torch, so that it starts at once and cannot hang in anything.

Each worker leads a process group (and session) of its own. Ctrl-C therefore reaches only us: we pass it on to whole
groups, as a terminal does. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to the workers alone, as `kill` does, so that a
worker that wants to write a checkpoint still has its DataLoader workers. When a worker has ended, what is left of its
group is asked to end, too, and killed when the run is over. Standard input is empty for all workers.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Final

from lockstep.failures.postmortem import Dead, hold, show
from lockstep.launcher.exit_policy import (
    Act,
    Exit,
    Scene,
    blame,
    decide,
    describe,
    exit_status,
    finishing_file,
    is_lost_peer,
)
from lockstep.launcher.forked_workers import Forked
from lockstep.launcher.job import INTERRUPTED, PREEMPTED, Job, count_cores, worker_env
from lockstep.launcher.oom_kills import Killed, compare
from lockstep.launcher.output import say, write_all
from lockstep.launcher.parent_watch import Guardian
from lockstep.launcher.worker_process import WorkerProcess, log_of

PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
FINISH_S = 600.0  # of a worker that was asked to end, and says that it finishes its step and saves
# How long a stray child may take to obey when its worker has already ended.
STRAYS_S = 2.0


class Crew:
    """The workers of one run, from the first start to the last kill."""

    def __init__(self, job: Job, guardian: Guardian) -> None:
        self._job = job
        self._guardian = guardian
        self._workers: list[WorkerProcess] = []
        self._exits: list[Exit] = []
        self._inbox: list[int] = []
        self._asked: int | None = None
        self._interrupts = 0
        self._told_at_s: float | None = None
        self._killed = False
        self._before = Killed.count()

    def __enter__(self) -> Crew:
        self._selector = selectors.DefaultSelector()
        self._bell, bell = socket.socketpair()
        self._bell.setblocking(False)
        bell.setblocking(False)
        self._bell_rope = bell
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._handlers = {one: signal.getsignal(one) for one in (*PASSED_ON, signal.SIGCHLD)}
        self._wakeup = signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        for one, before in self._handlers.items():
            # Who ignores a signal for us (nohup, a shell that starts us in the background) means it. Not so SIGCHLD:
            # the system would throw the exit statuses away.
            if before is not signal.SIG_IGN or one == signal.SIGCHLD:
                signal.signal(one, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nobody stays: strays get a moment, workers that are still there (an error here) none."""
        for worker in self._living():
            self._signal_group(worker, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired, TimeoutError):  # stuck in the kernel: the guardian kills once more
                worker.process.wait(5)
        strays = [worker for worker in self._workers if not worker.buried and self._has_strays(worker)]
        patience = time.monotonic() + min(STRAYS_S, self._job.grace_s)
        while strays and time.monotonic() < patience and not self._killed:
            time.sleep(0.02)
            strays = [worker for worker in strays if self._has_strays(worker)]
        for worker in strays:
            self._signal_group(worker, signal.SIGKILL)
        for worker in (one for one in self._workers if not one.buried):
            if not worker.alive:
                self._guardian.release(worker.process.pid)
            for stream in (worker.out, worker.err):
                stream.drain()
                stream.pipe.close()
            worker.log.close()
        signal.set_wakeup_fd(self._wakeup)
        for one, before in self._handlers.items():
            signal.signal(one, before)
        self._selector.close()
        self._bell.close()
        self._bell_rope.close()

    def start(self, port: int) -> None:
        cores = count_cores()
        for rank in range(self._job.workers):
            env = worker_env(os.environ, rank=rank, job=self._job, port=port, cores=cores)
            self._launch(rank, f"rank {rank}", env)

    def _launch(self, rank: int, name: str, env: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.launcher.worker_main", *self._job.command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=self._guardian.enrol(),  # safe: we have one thread
        )
        self._take_on(rank, name, process)

    def _take_on(self, rank: int, name: str, process: subprocess.Popen[bytes] | Forked) -> None:
        try:
            log = (self._job.log_dir / log_of(name)).open("wb", buffering=0)
        except OSError as error:
            say(f"{name} has no log: {error}")
            log = open(os.devnull, "wb", buffering=0)  # noqa: SIM115  (it is closed with the worker)
        worker = WorkerProcess(rank, name, process, log)
        self._workers.append(worker)
        for stream in (worker.out, worker.err):
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def watch(self) -> None:
        while True:
            self._notice_exits()
            now_s = time.monotonic()
            decision = decide(
                Scene(
                    now_s=now_s,
                    alive=len(self._living()),
                    grace_s=self._grace_s(),
                    exits=self._exits,
                    told_at_s=self._told_at_s,
                    interrupts=self._interrupts,
                    killed=self._killed,
                )
            )
            if decision.act is Act.DONE:
                return
            if decision.act is Act.STOP:
                self._tell(signal.SIGTERM)
            elif decision.act is Act.KILL:
                self._kill()
            else:
                self._listen(None if decision.until_s is None else decision.until_s - now_s)

    def _grace_s(self) -> float:
        """How long workers that were asked to end may take: longer while they say that they finish a step and save."""
        logs, living = self._job.log_dir, self._living()
        if self._told_at_s is None or not all(finishing_file(logs, one.process.pid).exists() for one in living):
            return self._job.grace_s
        return max(self._job.grace_s, FINISH_S)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:  # that one only has to wake us
            self._inbox.append(number)

    def _listen(self, wait_s: float | None) -> None:
        for key, mask in self._selector.select(wait_s):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)
            elif hasattr(key.data, "ready"):  # of the control store
                key.data.ready(mask)
            elif key.data.take() == b"":
                self._selector.unregister(key.fileobj)
        if self._asked is None and any(worker.out.broken or worker.err.broken for worker in self._workers):
            self._inbox.append(signal.SIGPIPE)  # end like any other program
        while self._inbox:
            self._obey(self._inbox.pop(0))

    def _obey(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        if number not in ENDING:
            for worker in self._living():
                worker.process.send_signal(number)
            return
        if self._asked is None:
            self._asked = number
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            again = "; Ctrl-C again kills at once" if number == signal.SIGINT else ""
            say(
                f"{name}: passed on; a lockstep.Run finishes its step and saves, other workers that do not end within "
                f"{self._job.grace_s:g} s are killed{again}"
            )
        if not self._killed:
            self._tell(signal.SIGTERM if number == signal.SIGPIPE else number)

    def _tell(self, number: int) -> None:
        if self._told_at_s is None:
            self._told_at_s = time.monotonic()
        for worker in self._living():
            worker.told = True
            if number == signal.SIGINT:
                self._signal_group(worker, number)
            else:
                worker.process.send_signal(number)

    def _kill(self) -> None:
        self._killed = True
        for worker in self._living():
            worker.told = True
            self._signal_group(worker, signal.SIGKILL)

    def _living(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.alive]

    def _signal_group(self, worker: WorkerProcess, number: int) -> bool:
        """True if there was somebody. The group keeps its number as long as it has members."""
        if not worker.process.pid:  # it is about to be born
            worker.process.send_signal(number)
            return True
        try:
            os.killpg(worker.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _has_strays(self, worker: WorkerProcess) -> bool:
        """Whether somebody is left in the group of a worker that has ended. We may have adopted them: bury the dead."""
        if not worker.process.pid:
            return False
        with suppress(ChildProcessError):
            while os.waitpid(-worker.process.pid, os.WNOHANG)[0]:
                pass
        return self._signal_group(worker, 0)

    def _notice_exits(self) -> None:
        for worker in self._living():
            if worker.process.poll() is None:
                continue
            at_s = time.monotonic()
            worker.take_last(self._job.log_dir)  # before we judge
            code = worker.process.returncode
            assert code is not None
            exited = Exit(worker.rank, code, at_s, is_lost_peer(worker.words()), worker.told)
            if code == 0 and worker.mark is not None and not worker.told:
                exited = replace(exited, early=not worker.mark.is_left, quit=worker.mark.is_left)
            self._exits.append(exited)
            self._signal_group(worker, signal.SIGTERM)

    def report(self) -> int:
        """Who failed first, its last words, and a card as the very last thing on the screen."""
        status = exit_status(self._exits, self._asked)
        culprit = blame(self._exits)
        if culprit is not None and culprit.code == PREEMPTED:  # it has said itself what it saved
            return INTERRUPTED if self._asked == signal.SIGINT else status
        if culprit is None or (culprit.told and self._asked is not None):
            return status
        worker = self._workers[culprit.rank]
        who, words, facts = worker.name, worker.words(), worker.facts
        say(f"{who} of {self._job.workers} failed first: {describe(culprit.code, early=culprit.early)}")
        say(f"the logs of all workers are in {self._job.log_dir}")
        if facts is not None and facts.short:
            cut = f", without {facts.left_out} frames of lockstep and torch, which {log_of(who)} has"
            say(f"the traceback of {who}{cut if facts.left_out else ''}:")
            words = facts.short.splitlines()
        else:
            say(f"the last words of {who}:" if words else f"{who} said nothing")
        with suppress(OSError):
            write_all(2, "".join(f"[{who}] {line}\n" for line in words).encode(errors="replace"))
        show(hold(self._lay_out(culprit), facts))
        return status

    def _lay_out(self, exited: Exit) -> Dead:
        worker = self._workers[exited.rank]
        return Dead(
            name=worker.name,
            of=self._job.workers,
            pid=worker.process.pid,
            code=exited.code,
            words=worker.words(),
            log_dir=self._job.log_dir,
            log=log_of(worker.name),
            told=exited.told,
            early=exited.early,
            out_of_memory=compare(self._before, Killed.count()),
            trace_name=self._trace_name(worker),
            pids={one.name: one.process.pid for one in self._workers},
        )

    def _trace_name(self, worker: WorkerProcess) -> str:
        return f"rank{worker.rank}"
