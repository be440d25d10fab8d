"""Checkpoints in the background: training waits for a copy in memory, and not for the disk.

There is room for two copies of a state: one that is being written, and one that waits. A third takes the place of the
one that waits. The second copy is allocated when it is needed first, and both are kept until `close`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lockstep import faults
from lockstep.checkpoint import write_errors
from lockstep.checkpoint.format import Flat, flatten
from lockstep.checkpoint.host_copies import Copies
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError

SAY_EVERY_S = 30.0


@dataclass(frozen=True)
class _Job:
    step: int
    flat: Flat
    copies: Copies


@dataclass(frozen=True)
class Written:
    """A checkpoint that is there. `took_s`: to write it, while training went on."""

    step: int
    took_s: float
    size_bytes: int


class Writer:
    """`submit` is called by one thread. Another one, of its own, writes, reads back and removes what is outdated."""

    def __init__(
        self,
        store: Store,
        on_problem: Callable[[str], None],
        *,
        fence: Callable[[], bool] | None = None,
        on_written: Callable[[Written], None] = lambda _: None,
    ) -> None:
        """
        on_problem  told in words, from either thread, what was not written and why; training goes on
        fence       asked right before a checkpoint would be seen; False: it is dropped, and nobody is told
        on_written  told, from the thread that writes, of each that has its name
        """
        self._store, self._on_problem, self._fence, self._on_written = store, on_problem, fence, on_written
        self._changed = threading.Condition()
        self._free = [Copies(), Copies()]
        self._pending: _Job | None = None
        self._writing: _Job | None = None
        self._began = 0.0  # to write it
        self._closed = False
        self.written: int | None = None  # the step of the last one that has its name
        self._thread = threading.Thread(target=self._work, name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def submit(self, step: int, state: Mapping[str, Any]) -> None:
        """When this returns, `state` may be changed. Raises CheckpointError for a state that no checkpoint can hold."""
        flat = flatten(state)
        with self._changed:
            if self._closed:
                raise CheckpointError(f"the checkpoint of step {step} came after the writer was closed")
            replaced, self._pending = self._pending, None
            copies = replaced.copies if replaced is not None else self._free.pop()
            writing, for_s = self._writing, time.monotonic() - self._began
        if replaced is not None:
            assert writing is not None
            self._say(write_errors.describe_replaced(replaced.step, step, writing=writing.step, for_s=for_s))
        job = None
        try:
            faults.at("copy")
            job = _Job(step, Flat(flat.structure, copies.take(flat.tensors)), copies)
        except MemoryError as error:
            self._say(write_errors.describe(step, self._store.path_of(step), error, self._store.last()))
        finally:
            with self._changed:
                if job is None:
                    copies.drop()
                    self._free.append(copies)
                elif self._writing is None:
                    self._begin(job)
                else:
                    self._pending = job

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was submitted is written, or given up. False: it took longer."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            left = SAY_EVERY_S if timeout_s is None else min(SAY_EVERY_S, timeout_s - waited)
            with self._changed:
                if self._changed.wait_for(self._is_idle, max(left, 0.0)):
                    return True
                writing, for_s = self._writing, time.monotonic() - self._began
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                return False
            if writing is not None:
                path = self._store.path_of(writing.step)
                self._say(f"waiting for the checkpoint of step {writing.step}, written to {path} for {for_s:.0f} s")

    def close(self, timeout_s: float | None = None) -> bool:
        """Like `drain`, and nothing is taken any more. What is not written after `timeout_s` is given up."""
        drained = self.drain(timeout_s)
        with self._changed:
            self._closed, self._pending = True, None
            self._changed.notify_all()
        if drained:
            self._thread.join()
        return drained

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_idle(self) -> bool:
        return self._writing is None

    def _begin(self, job: _Job | None) -> None:
        """What is written next; None: nothing waits."""
        self._writing, self._began = job, time.monotonic()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writing is not None or self._closed)
                job = self._writing
            if job is None:
                return
            self._write(job)
            with self._changed:
                self._free.append(job.copies)
                self._begin(self._pending)
                self._pending = None

    def _write(self, job: _Job) -> None:
        """Whatever goes wrong, there is a next one."""
        path = self._store.path_of(job.step)
        try:
            if self._store.write(job.step, job.flat, fence=self._fence) is None:
                return
            self.written = job.step
            size_bytes = sum(tensor.nbytes for tensor in job.flat.tensors.values())
            self._on_written(Written(job.step, time.monotonic() - self._began, size_bytes))
        except Exception as error:
            self._say(write_errors.describe(job.step, path, error, self._store.last()))
            return
        try:
            self._store.prune(job.step)
        except Exception as error:
            self._say(write_errors.describe_left(job.step, path, error))

    def _say(self, text: str) -> None:
        try:
            self._on_problem(text)
        except Exception as error:
            print(f"lockstep: {text} (and on_problem failed: {error!r})", file=sys.stderr, flush=True)
