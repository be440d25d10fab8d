"""The workers of one call of `lockstep.launch`, as the caller sees them: their output, how they end, that they do.

What to do next is decided where the launcher decides it, in `elastic.verdict`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TextIO

from lockstep.errors import WorkerFailedError
from lockstep.launcher.exit_policy import Act, Exit, Scene, blame, decide, describe, is_lost_peer
from lockstep.launcher.job import PREEMPTED
from lockstep.launcher.parent_watch import Guardian
from lockstep.notebook.worker import Answer, Pipes, Task, work

GRACE_S: Final = 5.0  # between asking a worker to end and killing it
POLL_S: Final = 0.05
READ_BYTES: Final = 1 << 16
LARGEST_PIPE_BYTES: Final = 1 << 20
TAIL_LINES: Final = 20


class _Stream:
    """One pipe of a worker: what comes out of it is shown line by line, behind the worker's rank."""

    def __init__(self, pipe: int, rank: int, *, to_stderr: bool) -> None:
        self.pipe, self.tail = pipe, ""
        self._prefix, self._to_stderr, self._rest = f"[rank {rank}] ", to_stderr, b""

    def take(self, chunk: bytes) -> None:
        text = self._rest + chunk
        # A progress bar ends its lines with a carriage return.
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:]
        self._show(text[:end])

    def end(self) -> None:
        self._show(self._rest + b"\n" if self._rest else b"")
        self._rest = b""

    def _show(self, text: bytes) -> None:
        lines = re.findall(r"[^\r\n]*(?:\r\n|\n|\r)", text.decode(errors="replace"))
        if lines:
            self.tail = "".join([self.tail, *lines])[-READ_BYTES:]
            # Looked up each time: a cell of a notebook has its own.
            screen: TextIO = sys.stderr if self._to_stderr else sys.stdout
            screen.write("".join(self._prefix + line for line in lines))
            screen.flush()


class _Told:
    """The pipe through which a worker hands its answer back."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._parts: list[bytes] = []

    def take(self, chunk: bytes) -> None:
        self._parts.append(chunk)

    def end(self) -> None:
        pass

    def read(self) -> Answer:
        """Nothing if the worker died before it was all there."""
        try:
            # Trusted: a fork of ourselves has written it, into a pipe that nobody else has.
            return Answer(*pickle.loads(b"".join(self._parts)))
        except (EOFError, pickle.UnpicklingError):
            return Answer()


class _Worker:
    def __init__(self, call: Callable[[], Any], env: Mapping[str, str], rank: int, guardian: Guardian) -> None:
        ends = [os.pipe() for _ in range(3)]
        self.rank, self.is_told, self.is_over = rank, False, False
        self.out, self.err = _Stream(ends[0][0], rank, to_stderr=False), _Stream(ends[1][0], rank, to_stderr=True)
        self.told = _Told(ends[2][0])
        self._theirs = Pipes(*(end[1] for end in ends))
        task = Task(call, rank, env, self._theirs)
        # It runs what multiprocessing wants to be run in a fork, so that the function may use it, too.
        args = (task, guardian.enrol(), guardian.pipe)
        self.process = multiprocessing.get_context("fork").Process(target=work, args=args)

    def start(self) -> None:
        try:
            self.process.start()
        finally:
            for writing in (self._theirs.out, self._theirs.err, self._theirs.answer):
                os.close(writing)

    @property
    def channels(self) -> tuple[_Stream | _Told, ...]:
        return (self.out, self.err, self.told)

    def signal_group(self, number: int) -> None:
        """A worker that has not yet become the leader of its group is reached all the same."""
        pid = self.process.pid
        assert pid is not None
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            if not self.is_over:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


class Crew:
    def __init__(self, guardian: Guardian) -> None:
        self._guardian = guardian
        self._workers: list[_Worker] = []
        self._exits: list[Exit] = []
        self._told_at_s: float | None = None
        self._killed = False

    def __enter__(self) -> Crew:
        self._selector = selectors.DefaultSelector()
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nobody stays."""
        for worker in self._workers:
            if worker.process.pid is not None:  # if not, an error came between; the guardian kills whoever has begun
                worker.signal_group(signal.SIGKILL)  # also what a worker that has ended has left behind
                worker.process.join(GRACE_S)
                self._guardian.release(worker.process.pid)
            for channel in worker.channels:
                os.close(channel.pipe)
        self._selector.close()

    def start(self, call: Callable[[], Any], environments: Sequence[Mapping[str, str]]) -> None:
        """A worker in each of the environments."""
        for rank, env in enumerate(environments):
            worker = _Worker(call, env, rank, self._guardian)
            self._workers.append(worker)
            worker.start()
            for channel in worker.channels:
                os.set_blocking(channel.pipe, False)
                self._selector.register(channel.pipe, selectors.EVENT_READ, channel)

    def watch(self) -> None:
        """Until all have ended. KeyboardInterrupt: they are interrupted, too, and at the second one killed."""
        try:
            self._watch()
        except KeyboardInterrupt:
            self._tell(signal.SIGINT)
            try:
                self._watch()
            except KeyboardInterrupt:
                self._kill()
                self._watch()
            raise

    def _watch(self) -> None:
        while True:
            self._notice_exits()
            now_s, alive = time.monotonic(), sum(not worker.is_over for worker in self._workers)
            scene = Scene(now_s, alive, GRACE_S, self._exits, self._told_at_s, killed=self._killed)
            act = decide(scene).act
            if act is Act.DONE:
                return
            if act is Act.STOP:
                self._tell(signal.SIGTERM)
            elif act is Act.KILL:
                self._kill()
            else:
                self._listen(POLL_S)

    def _listen(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            self._take(key.data)

    def _take(self, channel: _Stream | _Told) -> bool:
        """Whether there was something."""
        try:
            chunk = os.read(channel.pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            channel.take(chunk)
        elif channel.pipe in self._selector.get_map():
            self._selector.unregister(channel.pipe)
        return bool(chunk)

    def _notice_exits(self) -> None:
        for worker in self._workers:
            if worker.is_over or worker.process.exitcode is None:
                continue
            worker.is_over = True
            for channel in worker.channels:
                # All that it wrote is there. A child of it may go on writing for ever.
                for _ in range(LARGEST_PIPE_BYTES // READ_BYTES):
                    if not self._take(channel):
                        break
                channel.end()
            words = (worker.told.read().failure or worker.err.tail).splitlines()
            code = worker.process.exitcode
            self._exits.append(Exit(worker.rank, code, time.monotonic(), is_lost_peer(words), worker.is_told))

    def _tell(self, number: int) -> None:
        if self._told_at_s is None:
            self._told_at_s = time.monotonic()
        for worker in self._workers:
            if not worker.is_over:
                worker.is_told = True
                worker.signal_group(number)

    def _kill(self) -> None:
        self._killed = True
        for worker in self._workers:
            if not worker.is_over:
                worker.is_told = True
                worker.signal_group(signal.SIGKILL)

    def result(self) -> Any:
        """What rank 0 returned. WorkerFailedError if somebody failed."""
        culprit = blame(self._exits)
        if culprit is None:
            packed = self._workers[0].told.read().result
            return None if packed is None else pickle.loads(packed)  # trusted, see _Told
        worker, who = self._workers[culprit.rank], f"rank {culprit.rank} of {len(self._workers)}"
        failure = worker.told.read().failure
        if failure is not None:
            text = f"{who} failed first: {failure.rstrip().splitlines()[-1]}\n\n{failure.rstrip()}"
        elif culprit.code == PREEMPTED:
            text = f"{who} was asked to end, and has saved (status {PREEMPTED}); call lockstep.launch again to go on"
        else:
            words = "\n".join((worker.err.tail or worker.out.tail).rstrip().splitlines()[-TAIL_LINES:])
            text = f"{who} failed first: {describe(culprit.code)}; its last words:\n{words or '(none)'}"
        raise WorkerFailedError(text, rank=culprit.rank, status=culprit.code)
