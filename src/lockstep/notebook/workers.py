"""The workers of one call of `lockstep.launch`, as the caller sees them: starts and stops them, and shows their output.

launcher/exit_policy.py decides what to do next, as for `lockstep run`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TextIO

from lockstep.errors import WorkerFailedError
from lockstep.launcher.exit_policy import (
    PREEMPTED,
    Action,
    Exit,
    LaunchState,
    decide,
    describe,
    first_failure,
    is_lost_peer,
)
from lockstep.launcher.output import LineBuffer
from lockstep.launcher.parent_watch import ParentWatch
from lockstep.notebook.worker import Pipes, Task, WorkerResult, work

GRACE_S: Final = 5.0  # between asking a worker to stop and killing it
POLL_S: Final = 0.05
READ_BYTES: Final = 1 << 16
LARGEST_PIPE_BYTES: Final = 1 << 20
TAIL_LINES: Final = 20


class _OutputPipe:
    """Shows one pipe of a worker line by line, with the worker's rank."""

    def __init__(self, pipe: int, rank: int, *, to_stderr: bool) -> None:
        self.pipe, self.tail = pipe, ""
        self._prefix, self._to_stderr, self._lines = f"[rank {rank}] ", to_stderr, LineBuffer()

    def add(self, chunk: bytes) -> None:
        self._show(self._lines.add(chunk))

    def end(self) -> None:
        self._show(self._lines.flush())

    def _show(self, raw_lines: Sequence[bytes]) -> None:
        lines = [line.decode(errors="replace") for line in raw_lines]
        if lines:
            self.tail = "".join([self.tail, *lines])[-READ_BYTES:]
            # Looked up each time: every cell of a notebook has its own stream.
            screen: TextIO = sys.stderr if self._to_stderr else sys.stdout
            screen.write("".join(self._prefix + line for line in lines))
            screen.flush()


class _ResultPipe:
    """The pipe through which a worker sends its result."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._parts: list[bytes] = []

    def add(self, chunk: bytes) -> None:
        self._parts.append(chunk)

    def end(self) -> None:
        pass

    def read(self) -> WorkerResult:
        """Returns an empty result if the worker died before it was complete."""
        try:
            # Trusted: written by a fork of this process, into a pipe that no other process has.
            return WorkerResult(*pickle.loads(b"".join(self._parts)))
        except (EOFError, pickle.UnpicklingError):
            return WorkerResult()


class _Worker:
    def __init__(self, call: Callable[[], Any], env: Mapping[str, str], rank: int, watch: ParentWatch) -> None:
        ends = [os.pipe() for _ in range(3)]
        self.rank, self.stop_sent, self.is_over = rank, False, False
        self.out, self.err = (
            _OutputPipe(ends[0][0], rank, to_stderr=False),
            _OutputPipe(ends[1][0], rank, to_stderr=True),
        )
        self.answer = _ResultPipe(ends[2][0])
        self._theirs = Pipes(*(end[1] for end in ends))
        task = Task(call, rank, env, self._theirs)
        # A multiprocessing.Process, so that the function may use multiprocessing, too.
        args = (task, watch.child_setup(), watch.pipe)
        self.process = multiprocessing.get_context("fork").Process(target=work, args=args)

    def start(self) -> None:
        try:
            self.process.start()
        finally:
            for writing in (self._theirs.out, self._theirs.err, self._theirs.answer):
                os.close(writing)

    @property
    def channels(self) -> tuple[_OutputPipe | _ResultPipe, ...]:
        return (self.out, self.err, self.answer)

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
            for channel in worker.channels:
                os.close(channel.pipe)
        self._selector.close()

    def start(self, call: Callable[[], Any], environments: Sequence[Mapping[str, str]]) -> None:
        """Starts one worker per environment."""
        for rank, env in enumerate(environments):
            worker = _Worker(call, env, rank, self._parent_watch)
            self._workers.append(worker)
            worker.start()
            for channel in worker.channels:
                os.set_blocking(channel.pipe, False)
                self._selector.register(channel.pipe, selectors.EVENT_READ, channel)

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
            act = decide(state).act
            if act is Action.DONE:
                return
            if act is Action.STOP:
                self._send_stop(signal.SIGTERM)
            elif act is Action.KILL:
                self._kill()
            else:
                self._wait_for_output(POLL_S)

    def _wait_for_output(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            self._read(key.data)

    def _read(self, channel: _OutputPipe | _ResultPipe) -> bool:
        """Returns whether the pipe had data."""
        try:
            chunk = os.read(channel.pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            channel.add(chunk)
        elif channel.pipe in self._selector.get_map():
            self._selector.unregister(channel.pipe)
        return bool(chunk)

    def _collect_exits(self) -> None:
        for worker in self._workers:
            if worker.is_over or worker.process.exitcode is None:
                continue
            worker.is_over = True
            for channel in worker.channels:
                # All that it wrote is in the pipe; a child of it may still write.
                for _ in range(LARGEST_PIPE_BYTES // READ_BYTES):
                    if not self._read(channel):
                        break
                channel.end()
            lines = (worker.answer.read().failure or worker.err.tail).splitlines()
            code = worker.process.exitcode
            self._exits.append(Exit(worker.rank, code, time.monotonic(), is_lost_peer(lines), worker.stop_sent))

    def _send_stop(self, number: int) -> None:
        if self._stop_sent_at_s is None:
            self._stop_sent_at_s = time.monotonic()
        for worker in self._workers:
            if not worker.is_over:
                worker.stop_sent = True
                worker.signal_group(number)

    def _kill(self) -> None:
        self._killed = True
        for worker in self._workers:
            if not worker.is_over:
                worker.stop_sent = True
                worker.signal_group(signal.SIGKILL)

    def result(self) -> Any:
        """Returns what the function returned on rank 0. Raises WorkerFailedError if a worker failed."""
        failed = first_failure(self._exits)
        if failed is None:
            packed = self._workers[0].answer.read().result
            return None if packed is None else pickle.loads(packed)  # trusted, see _ResultPipe
        worker, who = self._workers[failed.rank], f"rank {failed.rank} of {len(self._workers)}"
        failure = worker.answer.read().failure
        if failure is not None:
            text = f"{who} failed first: {failure.rstrip().splitlines()[-1]}\n\n{failure.rstrip()}"
        elif failed.code == PREEMPTED:
            text = f"{who} was asked to end, and has saved (status {PREEMPTED}); call lockstep.launch again to continue"
        else:
            lines = "\n".join((worker.err.tail or worker.out.tail).rstrip().splitlines()[-TAIL_LINES:])
            text = f"{who} failed first: {describe(failed.code)}; its last output:\n{lines or '(none)'}"
        raise WorkerFailedError(text, rank=failed.rank, status=failed.code)
