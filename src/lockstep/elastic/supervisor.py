"""The launcher of one machine: starts the workers, watches them, and ends when they have.

One thread and one loop over pipes and signals; what to do next is decided in `verdict`, and that nobody outlives us
is the business of `guardian`. It imports no torch, so that it starts at once and cannot hang in anything.

Each worker leads a process group (and session) of its own. Ctrl-C therefore reaches only us: we pass it on to whole
groups, as a terminal does. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to the workers alone, as `kill` does, so that a
worker that wants to write a checkpoint still has its DataLoader workers. When a worker has ended, what is left of its
group is asked to end, too, and killed when the run is over. Standard input is empty for all workers.
"""

from __future__ import annotations

import hashlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, Final

from lockstep.elastic import failure
from lockstep.elastic.failure import Facts, RunMark
from lockstep.elastic.forked import Forked
from lockstep.elastic.guardian import Guardian, adopt_orphans
from lockstep.elastic.inquest import Dead, hold, show
from lockstep.elastic.oom import Killed, compare
from lockstep.elastic.screen import say, write_all
from lockstep.elastic.verdict import (
    Act,
    Exit,
    Scene,
    blame,
    decide,
    describe,
    exit_status,
    finishing_file,
    is_lost_peer,
    last_words,
)

if TYPE_CHECKING:
    from lockstep.elastic.hosts import Hosts

PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
PREEMPTED: Final = 75  # of a worker that was asked to end, and has saved (train/run.py)
INTERRUPTED: Final = 128 + signal.SIGINT  # of ours, when that was by Ctrl-C
READ_BYTES = 65536
TAIL_BYTES = 65536
LONGEST_LINE_BYTES = 65536
LARGEST_PIPE_BYTES = 1 << 20
FINISH_S = 600.0  # of a worker that was asked to end, and says that it finishes its step and saves
# How long a stray child may take to obey when its worker has already ended.
STRAYS_S = 2.0


@dataclass(frozen=True)
class Job:
    """What to run: `command` is for elastic/worker.py."""

    command: tuple[str, ...]
    workers: int  # on each host
    log_dir: Path
    grace_s: float = 10.0
    elastic: Elastic | None = None
    hosts: Hosts | None = None  # None: this one

    @property
    def id(self) -> str:
        """The same for all workers that this run will ever have, on every host."""
        if self.hosts is not None:
            return hashlib.sha256(self.hosts.secret + self.hosts.where.encode()).hexdigest()[:16]
        return f"{socket.gethostname()} {os.getpid()} {self.log_dir}"


@dataclass(frozen=True)
class Elastic:
    """How many workers there may be, and what counts as lost."""

    least: int
    most: int
    stall_s: float = 10.0  # without a sign of life


def count_cores() -> int:
    """Those we may use, not those the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """NVIDIA's driver lists them without CUDA being loaded."""
    with suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def worker_env(base: Mapping[str, str], *, rank: int, job: Job, port: int, cores: int) -> dict[str, str]:
    """The environment of one worker. What the user has set about threads and network stays."""
    # Left over from a torchrun around us, these would send the worker to a store that is not ours.
    env = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    env.pop("LOCKSTEP_JOB_SECRET", None)  # theirs is not the control store
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.workers)))
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in env):
        # Gradients and activations are freed and wanted again in every step. glibc would give their pages back to the
        # system and fault them in anew: a third of the step of a 25 M parameter MLP on a CPU.
        env.update(MALLOC_TRIM_THRESHOLD_=str(2**30), MALLOC_MMAP_THRESHOLD_=str(2**25))
    env.update(LOCAL_RANK=str(rank), PYTHONUNBUFFERED="1", LOCKSTEP_RUN_DIR=str(job.log_dir), LOCKSTEP_RUN_ID=job.id)
    env["LOCKSTEP_LAUNCHER"] = str(os.getpid())  # so that a worker knows itself from what it starts
    if job.hosts is not None:
        return _among_hosts(env, job.hosts)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All workers are here. Gloo would otherwise look the host's name up, and laptops and VPNs answer nonsense.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.workers),
        LOCAL_WORLD_SIZE=str(job.workers),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return env


def _among_hosts(env: dict[str, str], hosts: Hosts) -> dict[str, str]:
    """Workers of several hosts find each other through their supervisors: what else says who they are is wrong."""
    from lockstep.elastic.hosts import interface_to

    wrong = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in env.items() if name not in wrong} | {"LOCKSTEP_HOST": hosts.name}
    interface = env.get("GLOO_SOCKET_IFNAME") or interface_to(hosts.where)
    return env | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


@contextmanager
def reserve_port() -> Iterator[int]:
    """A port that the system has chosen and that stays ours until rank 0 listens on it.

    The socket is bound and never listens. With SO_REUSEADDR on both sides Linux then lets rank 0 bind the same port,
    on the loopback or on all addresses (torch's TCPStore and our own both set it), but hands it out to nobody else.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


def supervise(job: Job) -> int:
    """Run the job to its end and return the exit status for the launcher. The folder for the logs must exist.

    Must be called from the main thread, and with no other one running: signals arrive there, the workers are forked
    there, and the kernel takes the end of the forking thread for the launcher's death (PR_SET_PDEATHSIG).
    """
    adopt_orphans()
    with ExitStack() as stack:
        guardian = stack.enter_context(Guardian(job.id))
        port = stack.enter_context(reserve_port())
        crew = stack.enter_context(Crew(job, guardian) if job.elastic is None else _elastic_crew(job, guardian))
        crew.start(port)
        crew.watch()
    return crew.report()


def _elastic_crew(job: Job, guardian: Guardian) -> Crew:
    from lockstep.elastic.crew import ElasticCrew

    return ElasticCrew(job, guardian)


class _Stream:
    """One pipe from a worker: to the log as it is, to the terminal line by line behind the worker's name."""

    def __init__(self, worker: WorkerProcess, pipe: BinaryIO, screen: int) -> None:
        self.worker = worker
        self.pipe = pipe
        self.screen = screen
        self.broken = False  # whoever read our output has gone (`| head`)
        self.tail = b""
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def take(self) -> bytes | None:
        """Pass on what is there: b"" when the pipe has ended, None when there is nothing just now."""
        try:
            chunk = os.read(self.pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        self.worker.write_log(chunk)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        self.worker.tail = (self.worker.tail + chunk)[-TAIL_BYTES:]
        text = self._rest + chunk
        # A progress bar ends its lines with a carriage return; waiting for its newline would show nothing.
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:]
        self._show(text[:end])
        if not chunk or len(self._rest) > LONGEST_LINE_BYTES:
            self._end_line()
        return chunk

    def drain(self) -> None:
        """What a dead worker has left: at most what a pipe holds. A child of it may go on writing for ever."""
        for _ in range(LARGEST_PIPE_BYTES // READ_BYTES):
            if not self.take():
                break
        self._end_line()

    def _end_line(self) -> None:
        self._show(self._rest + b"\n" if self._rest else b"")
        self._rest = b""

    def _show(self, text: bytes) -> None:
        prefix, torchs = f"[{self.worker.name}] ".encode(), b"[rank%d]: " % self.worker.rank
        lines = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)", text)  # not splitlines: form feeds and the like are no ends
        try:
            write_all(self.screen, b"".join(prefix + line.removeprefix(torchs) for line in lines))
        except BrokenPipeError:
            self.broken, self.screen = True, -1
        except OSError:
            self.screen = -1  # the terminal is gone, and nobody minded (nohup): the logs go on


def log_of(name: str) -> str:
    """The file of a worker. Each host has its own folder."""
    return name.partition(" on ")[0].replace(" ", "") + ".log"


class WorkerProcess:
    def __init__(self, rank: int, name: str, process: subprocess.Popen[bytes] | Forked, log: BinaryIO) -> None:
        self.rank, self.name = rank, name
        self.process = process
        self.log = log
        self.tail = b""
        self.told = False
        self.facts: Facts | None = None  # that it wrote down when it failed
        self.mark: RunMark | None = None  # it ended in a Run, or had left it by an exception
        self.buried = False  # nothing of it is left, and its number may be somebody else's
        assert process.stdout is not None
        assert process.stderr is not None
        self.out = _Stream(self, process.stdout, 1)  # type: ignore[arg-type]
        self.err = _Stream(self, process.stderr, 2)  # type: ignore[arg-type]

    def write_log(self, chunk: bytes) -> None:
        """A full disk must not end the training."""
        if self.log.closed:
            return
        try:
            self.log.write(chunk)
        except OSError as error:
            say(f"the log of {self.name} ends here: {error}")
            self.log.close()

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def take_last(self, log_dir: Path) -> None:
        """It has ended: take what is left in its pipes, and the traceback that it left for its log."""
        self.out.drain()
        self.err.drain()
        self.facts = failure.read(log_dir, self.process.pid, log_of(self.name).removesuffix(".log"))
        self.mark = failure.take_mark(log_dir, self.process.pid)
        if self.facts is None and self.mark is not None and self.process.returncode == 0:
            self.facts = self.mark.facts
        if self.facts is not None and not self.facts.is_printed:
            text = self.facts.trace.encode(errors="replace")
            self.write_log(text)
            self.err.tail = (self.err.tail + text)[-TAIL_BYTES:]
            self.tail = (self.tail + text)[-TAIL_BYTES:]

    def words(self) -> list[str]:
        return last_words(self.err.tail.decode(errors="replace"), self.tail.decode(errors="replace"))


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
            [sys.executable, "-m", "lockstep.elastic.worker", *self._job.command],
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
