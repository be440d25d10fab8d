"""`lockstep.launch`: runs a function on forked workers of this machine, and shows their output.

launcher/exit_policy.py decides what to do next, as for `lockstep run`.

A worker is a fork of the calling process that runs the function and returns its result. It first resets what it
inherits and must not use: signal handlers, the kernel's atexit functions, and streams that write through threads of the
notebook's kernel, which a fork does not have.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.errors import LockstepError, WorkerFailedError, WorldError
from lockstep.launcher import exit_policy
from lockstep.launcher.exit_policy import Action, Exit, LaunchState
from lockstep.launcher.job import Job, count_cores, count_gpus, reserve_port, worker_env
from lockstep.launcher.output import OutputStream
from lockstep.launcher.parent_watch import ParentWatch, name_semaphores
from lockstep.settings import Settings
from lockstep.world.environment import detect

T = TypeVar("T")

GRACE_S: Final = 5.0  # between asking a worker to stop and killing it
POLL_S: Final = 0.05
TAIL_LINES: Final = 20
_RESET_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def launch(fn: Callable[..., T], *args: Any, workers: int | None = None) -> T:
    """Runs `fn(*args)` on several workers of this machine, and returns what it returns on rank 0.

    workers  how many; by default as `lockstep run` chooses: one per GPU, without a GPU one per core, at most four

    For notebooks and scripts: the workers are forks of this process, so `fn` may be defined in a cell, and may use all
    objects of this process. Its changes stay in the workers; only its result is returned. The result is pickled:
    numbers, text, tensors (moved to the CPU), a state dict, lists and dicts of these, objects of classes known here.

    The output of the workers is shown while they run. If one fails, the others are stopped, and WorkerFailedError has
    the traceback of the first. Ctrl-C, or the notebook's stop button, ends them all. They never outlive this process.
    """
    number = _check(fn, workers)
    import lockstep.train.run  # noqa: F401  (before the fork, so that the workers need not import it)

    _refuse_state_that_cannot_be_forked()
    job, cores = Job((), number, Path(os.devnull)), count_cores()
    with ExitStack() as stack:
        parent_watch = stack.enter_context(ParentWatch())
        port = stack.enter_context(reserve_port())
        group = stack.enter_context(NotebookWorkers(parent_watch))

        environments = [worker_env(os.environ, rank=rank, job=job, port=port, cores=cores) for rank in range(number)]
        for env in environments:
            del env["LOCKSTEP_RUN_DIR"]  # there is no folder of logs
        group.start(partial(fn, *args), environments)
        group.watch()
        result: T = group.result()
        return result


def _check(fn: object, workers: object) -> int:
    if sys.platform != "linux":
        raise LockstepError(
            f"lockstep.launch forks this process, which works on Linux only, and this is {sys.platform}; put the "
            "function into a script, and start that with `lockstep run`"
        )
    if not callable(fn):
        raise TypeError(f"lockstep.launch takes a function and its arguments, and {fn!r} is not a function")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool)):
        raise TypeError(f"workers={workers!r} must be a whole number, or None")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be 1 or more")
    if (where := _already_a_worker()) is not None:
        raise LockstepError(
            f"lockstep.launch was called inside a worker ({where}): the workers would multiply; call the function "
            "itself here, or start this program with plain `python`"
        )
    return workers or exit_policy.count_workers(os.environ, gpus=count_gpus(), cores=count_cores())


def _already_a_worker() -> str | None:
    """Returns what says that this process is a worker, or None. A world of one (a notebook under srun) is none."""
    if Settings.from_env(os.environ).run_dir is not None:
        return "`lockstep run` has started it"
    try:
        place = detect(os.environ)
    except WorldError:
        return None  # inconsistent variables of another program; the workers get their own
    if place is None or (place.size == 1 and place.source != "RANK/WORLD_SIZE"):
        return None
    return f"{place.source} says rank {place.rank} of {place.size}"


def _refuse_state_that_cannot_be_forked() -> None:
    cuda: Any = torch.cuda  # is_initialized has no types
    if cuda.is_initialized():
        raise LockstepError(
            "CUDA is in use in this process already, and does not work in a fork of it; restart the kernel, and "
            "make models and tensors on the GPU inside of the function only"
        )
    if dist.is_available() and dist.is_initialized():
        raise LockstepError(
            "this process is in a process group already (lockstep.init() or a lockstep.Run was called here), which "
            "its forks cannot share; call torch.distributed.destroy_process_group() first, or restart the kernel"
        )


# ---- the workers, as the caller sees them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerResult:
    """How the function ended on one worker. At most one field is not None."""

    result: bytes | None = None  # pickled; on rank 0 only
    failure: str | None = None  # a traceback


@dataclass(frozen=True)
class Task:
    call: Callable[[], Any]
    rank: int
    env: Mapping[str, str]
    streams: tuple[int, int]  # writing ends of the pipes for standard output and error
    answer: int  # a file without a name


class _Worker:
    def __init__(self, call: Callable[[], Any], env: Mapping[str, str], rank: int, watch: ParentWatch) -> None:
        self.rank, self.stop_sent, self.is_over, self.answer = rank, False, False, WorkerResult()
        pipes = os.pipe(), os.pipe()
        self.out, self.err = (
            OutputStream(os.fdopen(pipe[0], "rb", 0), show=partial(self._show, number))
            for number, pipe in enumerate(pipes, 1)
        )
        try:
            answer = os.memfd_create("lockstep-answer")
        except OSError:  # some sandboxes have no memfds
            with tempfile.TemporaryFile() as file:
                answer = os.dup(file.fileno())
        self._task = Task(call, rank, env, (pipes[0][1], pipes[1][1]), answer)
        # A multiprocessing.Process, so that the function may use multiprocessing, too.
        args = (self._task, watch.child_setup(), watch.pipe)
        self.process = multiprocessing.get_context("fork").Process(target=work, args=args)

    def start(self) -> None:
        try:
            self.process.start()
        finally:
            for writing in self._task.streams:
                os.close(writing)

    def close(self) -> None:
        for pipe in (self.out.pipe, self.err.pipe):
            pipe.close()
        os.close(self._task.answer)

    def _show(self, number: int, lines: list[bytes]) -> None:
        # Looked up each time: every cell of a notebook has its own stream.
        screen: TextIO = sys.stderr if number == 2 else sys.stdout
        screen.write("".join(f"[rank {self.rank}] {line.decode(errors='replace')}" for line in lines))
        screen.flush()

    def collect_last_output(self) -> None:
        """Reads the rest of its output, and its answer, after it has ended."""
        self.out.drain()
        self.err.drain()
        with open(self._task.answer, "rb", closefd=False) as file, suppress(EOFError, pickle.UnpicklingError):
            file.seek(0)
            # Trusted: written by a fork of this process, into a file that no other process has. Incomplete if it died.
            self.answer = WorkerResult(*pickle.load(file))

    def last_lines(self) -> list[str]:
        return (self.err.tail or self.out.tail).decode(errors="replace").rstrip().splitlines()[-TAIL_LINES:]

    def signal_group(self, number: int) -> None:
        """Signals the worker's process group; the worker alone, if it does not lead a group yet."""
        pid = self.process.pid
        assert pid is not None
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            if not self.is_over:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


class NotebookWorkers:
    def __init__(self, parent_watch: ParentWatch) -> None:
        self._parent_watch = parent_watch
        self._workers: list[_Worker] = []
        self._exits: list[Exit] = []
        self._stop_sent_at_s: float | None = None
        self._killed = False

    def __enter__(self) -> NotebookWorkers:
        self._selector = selectors.DefaultSelector()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves no process behind."""
        for worker in self._workers:
            if worker.process.pid is not None:  # None after an error during its start; ParentWatch kills it then
                worker.signal_group(signal.SIGKILL)  # also children of workers that have ended
                worker.process.join(GRACE_S)
                self._parent_watch.release(worker.process.pid)
            worker.close()
        self._selector.close()

    def start(self, call: Callable[[], Any], environments: Sequence[Mapping[str, str]]) -> None:
        """Starts one worker per environment."""
        for rank, env in enumerate(environments):
            worker = _Worker(call, env, rank, self._parent_watch)
            self._workers.append(worker)
            worker.start()
            for stream in (worker.out, worker.err):
                self._selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def watch(self) -> None:
        """Returns when all workers have ended. KeyboardInterrupt interrupts them, too; a second one kills them."""
        try:
            self._watch()
        except KeyboardInterrupt:
            self._send_stop(signal.SIGINT)
            try:
                self._watch()
            except KeyboardInterrupt:
                self._kill()
                self._watch()
            raise

    def _watch(self) -> None:
        while True:
            self._collect_exits()
            now_s, alive = time.monotonic(), sum(not worker.is_over for worker in self._workers)
            state = LaunchState(now_s, alive, GRACE_S, self._exits, self._stop_sent_at_s, killed=self._killed)
            act = exit_policy.decide(state).act
            if act is Action.DONE:
                return
            if act is Action.STOP:
                self._send_stop(signal.SIGTERM)
            elif act is Action.KILL:
                self._kill()
            else:
                for key, _ in self._selector.select(POLL_S):
                    if key.data.on_readable() == b"":
                        self._selector.unregister(key.fileobj)

    def _collect_exits(self) -> None:
        for worker in self._workers:
            if worker.is_over or worker.process.exitcode is None:
                continue
            worker.is_over = True
            worker.collect_last_output()
            lines = (worker.answer.failure or worker.err.tail.decode(errors="replace")).splitlines()
            code = worker.process.exitcode
            lost_peer = exit_policy.is_lost_peer(lines)
            self._exits.append(Exit(worker.rank, code, time.monotonic(), lost_peer, worker.stop_sent))

    def _send_stop(self, number: int) -> None:
        if self._stop_sent_at_s is None:
            self._stop_sent_at_s = time.monotonic()
        self._signal_running(number)

    def _kill(self) -> None:
        self._killed = True
        self._signal_running(signal.SIGKILL)

    def _signal_running(self, number: int) -> None:
        for worker in self._workers:
            if not worker.is_over:
                worker.stop_sent = True
                worker.signal_group(number)

    def result(self) -> Any:
        """Returns what the function returned on rank 0. Raises WorkerFailedError if a worker failed."""
        failed = exit_policy.first_failure(self._exits)
        if failed is None:
            packed = self._workers[0].answer.result
            return None if packed is None else pickle.loads(packed)  # trusted: see collect_last_output
        worker, who = self._workers[failed.rank], f"rank {failed.rank} of {len(self._workers)}"
        failure = worker.answer.failure
        if failure is not None:
            text = f"{who} failed first: {failure.rstrip().splitlines()[-1]}\n\n{failure.rstrip()}"
        elif failed.code == exit_policy.PREEMPTED:
            text = (
                f"{who} was asked to end, and has saved (status {failed.code}); call lockstep.launch again to continue"
            )
        else:
            lines = "\n".join(worker.last_lines()) or "(none)"
            text = f"{who} failed first: {exit_policy.describe(failed.code)}; its last output:\n{lines}"
        raise WorkerFailedError(text, rank=failed.rank, status=failed.code)


# ---- inside of a worker ----------------------------------------------------------------------------------------------


def work(task: Task, register: Callable[[], None], watch_pipe: int) -> None:
    """Main function of a worker. `register` writes to the pipe of ParentWatch, which is closed after that."""
    os.setsid()  # Ctrl-C in a terminal or notebook reaches the caller only, which passes it on
    register()
    os.close(watch_pipe)
    _set_up(task)
    try:
        try:
            _refuse_broken_cuda()
            answer = _pack_result(task.call(), task.rank)
        except Exception as error:
            sys.last_value = error  # process groups that are left at exit then do not wait for peers
            _send(task.answer, WorkerResult(failure=_describe(error)))
            raise SystemExit(1) from None
        _send(task.answer, answer)
    finally:
        atexit._run_exitfuncs()


def _set_up(task: Task) -> None:
    signal.set_wakeup_fd(-1)  # an event loop of the kernel may have set it, and would get this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for one in _RESET_SIGNALS:
        signal.signal(one, signal.SIG_DFL)
    atexit._clear()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (task.streams[0], 1), (task.streams[1], 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(one, "w", closefd=False), encoding="utf-8", errors="replace", write_through=True)
        for one in (1, 2)
    )
    os.environ.clear()
    os.environ.update(task.env)
    name_semaphores("")
    # A fork does not have torch's intra-op threads: an operation that waits for them would hang.
    torch.set_num_threads(1)


def _refuse_broken_cuda() -> None:
    if _torch.is_in_bad_fork():
        raise LockstepError(
            "this process has asked CUDA something before lockstep.launch (torch.cuda.is_available() is enough), and "
            "the driver does not work in a fork of it; restart the kernel and leave the GPU to the workers, or set "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 before it starts"
        )


def _pack_result(result: Any, rank: int) -> WorkerResult:
    if rank != 0:
        return WorkerResult()
    packed = io.BytesIO()
    try:
        _Packer(packed, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    except Exception as error:
        raise TypeError(
            f"what the function returned, a {type(result).__name__}, cannot be handed back ({error}); return numbers, "
            "text, tensors, a state dict, or lists and dicts of these"
        ) from None
    return WorkerResult(result=packed.getvalue())


class _Packer(pickle.Pickler):
    """Moves tensors to the CPU, so that the caller need not initialise CUDA."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
            here: Any = thing.detach().cpu().requires_grad_(thing.requires_grad)
            return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _describe(error: BaseException) -> str:
    """Returns its traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _send(file: int, answer: WorkerResult) -> None:
    with os.fdopen(file, "wb") as out:
        pickle.dump((answer.result, answer.failure), out)
