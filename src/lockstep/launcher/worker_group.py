"""The launcher of one machine: starts the workers, watches them, and returns when all have ended.

Workers of elastic runs are started by elastic/host_processes.py, which extends this.

One thread runs one loop over pipes and signals. exit_policy.py decides what to do next; parent_watch.py ensures that no
worker outlives the launcher. The launcher imports no torch, so that it starts at once and cannot hang in torch.

Each worker leads a process group (and session) of its own. Ctrl-C therefore reaches only the launcher, which passes it
on to whole groups, as a terminal does. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are sent to the workers alone, as `kill`
does, so that a worker that writes a checkpoint still has its DataLoader workers. When a worker has ended, the rest of
its group gets SIGTERM, and SIGKILL when the run is over. Standard input is empty for all workers.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final, cast

from lockstep.failures import crash_record
from lockstep.failures.crash_record import CrashRecord, RunMark
from lockstep.failures.postmortem import FailedWorker, describe_failure, show
from lockstep.launcher import exit_policy
from lockstep.launcher.exit_policy import Action, Exit, LaunchState
from lockstep.launcher.fork_server import ForkedProcess
from lockstep.launcher.job import Job, count_cores, worker_env
from lockstep.launcher.output import TAIL_BYTES, OutputStream, print_message, write_all
from lockstep.launcher.parent_watch import ParentWatch

PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
FINISH_S = 600.0  # time to stop for workers that finish their step and save (exit_policy.finishing_file)
CHILDREN_S = 2.0  # time to stop for children of workers that have ended already
_CGROUPS: Final = Path("/sys/fs/cgroup")


def start_process(
    command: Sequence[str], env: Mapping[str, str], child_setup: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Start a worker that runs `command` through launcher/worker_main.py. `child_setup` runs in it before that."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep.launcher.worker_main", *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        preexec_fn=child_setup,  # safe: the launcher has one thread
    )


def log_file_name(name: str) -> str:
    """The name of a worker's log file: "rank 1" -> rank1.log. Each host has its own folder."""
    return name.partition(" on ")[0].replace(" ", "") + ".log"


class WorkerProcess:
    """Copies its pipes to its log unchanged, and to the terminal line by line with its name."""

    def __init__(self, rank: int, name: str, process: subprocess.Popen[bytes] | ForkedProcess, log: BinaryIO) -> None:
        self.rank, self.name, self.process, self.log = rank, name, process, log
        self.tail, self.stop_sent = b"", False
        self.crash: CrashRecord | None = None  # what it wrote when it failed
        self.mark: RunMark | None = None  # it ended inside a Run, or after an exception had left the Run
        self.is_reaped = False  # all its resources are released; its pid may belong to another process by now
        self.is_screen_broken = False  # the launcher's output is a pipe that was closed (`| head`)
        self._screens = {1: 1, 2: 2}  # descriptors; -1 after an error
        self.out, self.err = (
            OutputStream(cast(BinaryIO, pipe), show=partial(self._show, number), keep=self._keep)
            for number, pipe in ((1, process.stdout), (2, process.stderr))
        )

    def _keep(self, chunk: bytes) -> None:
        self.write_log(chunk)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]

    def _show(self, number: int, lines: list[bytes]) -> None:
        prefix, torch_prefix = f"[{self.name}] ".encode(), b"[rank%d]: " % self.rank
        try:
            write_all(self._screens[number], b"".join(prefix + line.removeprefix(torch_prefix) for line in lines))
        except BrokenPipeError:
            self.is_screen_broken, self._screens[number] = True, -1
        except OSError:
            self._screens[number] = -1  # the terminal is closed (nohup); the logs are still written

    def write_log(self, chunk: bytes) -> None:
        """Never raises: a full disk must not end the training."""
        if self.log.closed:
            return
        try:
            self.log.write(chunk)
        except OSError as error:
            print_message(f"the log of {self.name} ends here: {error}")
            self.log.close()

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def collect_last_output(self, log_dir: Path) -> None:
        """Reads the rest of its pipes and its crash record, after it has ended."""
        self.out.drain()
        self.err.drain()
        self.crash = crash_record.read(log_dir, self.process.pid, log_file_name(self.name).removesuffix(".log"))
        self.mark = crash_record.take_mark(log_dir, self.process.pid)
        if self.crash is None and self.mark is not None and self.process.returncode == 0:
            self.crash = self.mark.facts
        if self.crash is not None and not self.crash.is_printed:
            text = self.crash.trace.encode(errors="replace")
            self._keep(text)
            self.err.tail = (self.err.tail + text)[-TAIL_BYTES:]

    def last_lines(self) -> list[str]:
        return exit_policy.last_output(self.err.tail.decode(errors="replace"), self.tail.decode(errors="replace"))


class WorkerGroup:
    """The workers of one run. Starts, watches and stops them, and collects what they leave behind."""

    def __init__(self, job: Job, parent_watch: ParentWatch) -> None:
        self._job, self._parent_watch = job, parent_watch
        self._workers: list[WorkerProcess] = []
        self._exits: list[Exit] = []
        self._pending_signals: list[int] = []
        self._stop_signal: int | None = None
        self._stop_sent_at_s: float | None = None
        self._interrupts, self._killed = 0, False
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
            process = start_process(self._job.command, env, self._parent_watch.child_setup())
            self._add_worker(rank, f"rank {rank}", process)

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
            decision = self._decide(now_s)
            if decision.act is Action.DONE:
                return
            if decision.act is Action.STOP:
                self._send_stop(signal.SIGTERM)
            elif decision.act is Action.KILL:
                self._kill()
            else:
                self._wait_for_events(None if decision.until_s is None else decision.until_s - now_s)

    def _decide(self, now_s: float) -> exit_policy.Decision:
        ended = (self._exits, self._stop_sent_at_s, self._interrupts, self._killed)
        return exit_policy.decide(LaunchState(now_s, len(self._running()), self._grace_s(), *ended))

    def _grace_s(self) -> float:
        """Time between asking workers to stop and killing them; longer while all of them finish a step and save."""
        grace_s = self._job.grace_s
        if self._stop_sent_at_s is None:
            return grace_s
        files = (exit_policy.finishing_file(self._job.log_dir, one.process.pid) for one in self._running())
        return max(grace_s, FINISH_S) if all(file.exists() for file in files) else grace_s

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
        if self._stop_signal is None and any(worker.is_screen_broken for worker in self._workers):
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
            worker.collect_last_output(self._job.log_dir)  # exit_policy.is_lost_peer needs it
            code = worker.process.returncode
            assert code is not None
            exited = Exit(worker.rank, code, at_s, exit_policy.is_lost_peer(worker.last_lines()), worker.stop_sent)
            if code == 0 and worker.mark is not None and not worker.stop_sent:
                exited = replace(exited, early=not worker.mark.is_left, quit=worker.mark.is_left)
            self._exits.append(exited)
            self._signal_group(worker, signal.SIGTERM)

    def report(self) -> int:
        """Prints the worker that failed first, the end of its output, and the card last. Returns the exit status."""
        status = exit_policy.exit_status(self._exits, self._stop_signal)
        failed = exit_policy.first_failure(self._exits)
        if failed is not None and failed.code == exit_policy.PREEMPTED:  # the worker has printed what it saved
            return exit_policy.INTERRUPTED if self._stop_signal == signal.SIGINT else status
        if failed is None or (failed.stop_sent and self._stop_signal is not None):
            return status
        worker = self._workers[failed.rank]
        who, lines, crash = worker.name, worker.last_lines(), worker.crash
        how = exit_policy.describe(failed.code, early=failed.early)
        print_message(f"{who} of {self._job.workers} failed first: {how}")
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
            out_of_memory=describe_oom_kills(self._oom_kills_before, OomKills.count()),
            trace_name=self._trace_name(worker),
            pids={one.name: one.process.pid for one in self._workers},
        )

    def _trace_name(self, worker: WorkerProcess) -> str:
        return f"rank{worker.rank}"


# ---- processes that the kernel has killed because memory ran out -----------------------------------------------------


@dataclass(frozen=True)
class OomKills:
    """The kernel's counters, in this container and on the machine, which only grow. None: not readable here."""

    group: int | None = None
    machine: int | None = None
    limit: str = ""  # memory limit of the group in bytes, as the kernel prints it

    @staticmethod
    def count() -> OomKills:
        group = _our_group()
        in_group, on_machine = (_oom_kill_count(path) for path in (group / "memory.events", Path("/proc/vmstat")))
        return OomKills(in_group, on_machine, _text(group / "memory.max"))


def describe_oom_kills(before: OomKills, after: OomKills) -> str:
    """Describes the kills between two counts; "" if there were none."""
    if before.group is not None and after.group is not None and after.group > before.group:
        limit = f", whose limit is {int(after.limit) / 2**30:.2f} GiB" if after.limit.isdigit() else ""
        return f"it has killed {after.group - before.group} in this container{limit}"
    if before.machine is not None and after.machine is not None and after.machine > before.machine:
        return f"it has killed {after.machine - before.machine} on this machine since the run began"
    return ""


def _our_group() -> Path:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::") and (_CGROUPS / line[4:] / "memory.events").exists():
                return _CGROUPS / line[4:]
    return _CGROUPS


def _oom_kill_count(path: Path) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _text(path), re.MULTILINE)
    return int(match[1]) if match is not None else None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
