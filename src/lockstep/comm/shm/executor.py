"""Executes the collectives of a group one by one, in order: in the caller's thread if it waits, else in a thread.

Note [Inline]
A collective that is waited for at once, with an empty queue before it, runs in the caller's own thread: handing it to
another thread and back would take longer than a small collective takes. Likewise, a thread that waits for a collective
that has not started takes it out of the queue and executes it itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

NO_TIMEOUT = timedelta(0)

Run = Callable[["ShmWork", bool], None]


class ShmWork(Work):
    """One collective, queued, running or done."""

    def __init__(self, executor: CollectiveExecutor, run: Run, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._executor, self._run, self._tensors = executor, run, tensors
        self._error: BaseException | None = None
        self._done = False
        self.ended_s: float | None = None
        self.sync_stream: Callable[[], None] = _sync_nothing  # makes the caller's stream wait for the result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._done:
            self._executor.wait_for(self, timeout.total_seconds())
        if self._error is not None:
            self._executor.told.add(threading.get_ident())
            raise self._error
        self.sync_stream()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() is for a receive from any source")

    def get_future(self) -> torch.futures.Future[Any]:
        with self._executor.lock:
            if self._future is None:
                # A future for GPU tensors also makes the stream of a thread that waits for it wait.
                devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
                self._future = torch.futures.Future(devices=list(devices))
                if self._done:
                    self._complete_future()
            return self._future

    def execute(self, spin: bool) -> None:
        """Run the collective. Called once, by the executor."""
        try:
            # Tensors made in inference mode can be written only in it. Other tensors are not worth the time it takes.
            if any(tensor.is_inference() for tensor in self._tensors):
                with torch.inference_mode():
                    self._run(self, spin)
            else:
                self._run(self, spin)
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):  # Ctrl-C in the caller's thread
                raise
        finally:
            self.ended_s = time.monotonic()
            self._run = _run_nothing  # drops the tensors it held

    def _complete_future(self) -> None:
        assert self._future is not None
        if self._error is None:
            self.sync_stream()
            self._future.set_result(list(self._tensors))
        else:
            error = self._error if isinstance(self._error, Exception) else RuntimeError("interrupted")
            self._future.set_exception(error)


def _run_nothing(work: ShmWork, spin: bool) -> None:
    pass


def _sync_nothing() -> None:
    pass


class CombinedWork(Work):
    """Several works as one work."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class CollectiveExecutor:
    """A queue of works, of which at most one runs at a time."""

    def __init__(self, name: str, told: set[int] | None = None) -> None:
        """`told`: to which the threads are added to which the error of a work is raised."""
        self._name, self.told = name, set[int]() if told is None else told
        self.lock = threading.RLock()
        self._work_available = threading.Condition(self.lock)  # notifies the executor's thread
        self._work_finished = threading.Condition(self.lock)  # notifies callers that wait
        self._waiting = 0
        self._queue: deque[ShmWork] = deque()
        self._busy = False
        self._current: ShmWork | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._serving = 0  # threads that serve the queue, or will; not those inside a callback of a future
        self._idle = 0

    def submit(self, run: Run, tensors: Sequence[torch.Tensor], *, wait: bool) -> ShmWork:
        """Queue `run` and return its work. If `wait` and nothing is queued before it, run it now, in this thread."""
        work = ShmWork(self, run, tensors)
        with self.lock:
            if self._closed:
                raise RuntimeError("this process group was destroyed")
            inline = wait and not self._busy and not self._queue
            if inline:
                self._busy = True
            else:
                self._queue.append(work)
                self._wake_thread()
        if inline:
            self._execute(work, spin=True)
        elif wait:
            self.wait_for(work, 0)
        return work

    def wait_for(self, work: ShmWork, wait_s: float) -> None:
        """Wait for `work`, and execute queued works up to it in this thread if no other thread does.

        With a limit (`wait_s` > 0) that is left to the executor's thread, because a collective that has begun cannot be
        interrupted. Raises RuntimeError when the limit has passed.
        """
        end = time.monotonic() + wait_s if wait_s > 0 else float("inf")
        while True:
            with self.lock:
                self._waiting += 1
                try:
                    while not work._done and (wait_s > 0 or self._busy or not self._queue):
                        left = end - time.monotonic()
                        if left <= 0:
                            raise RuntimeError(f"Operation timed out: waited {wait_s:g} s; the collective continues")
                        self._work_finished.wait(min(left, 1.0))
                finally:
                    self._waiting -= 1
                if work._done:
                    return
                self._busy = True
                first = self._queue.popleft()
            self._execute(first, spin=first is work)

    def drain(self) -> None:
        """Wait until no work is queued or running."""
        with self.lock:
            last = self._queue[-1] if self._queue else self._current
        if last is not None:
            self.wait_for(last, 0)

    def close(self, deadline_s: float) -> None:
        """Refuse new works; wait until the queued ones (which fail at once in a failed group) and the thread end."""
        with self.lock:
            self._closed = True
            self._work_available.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        end = time.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _execute(self, work: ShmWork, *, spin: bool) -> None:
        self._current = work
        try:
            work.execute(spin)
        finally:
            with self.lock:
                self._busy, self._current = False, None
                work._done = True
                future = work._future
                self._wake_thread()
                if self._waiting:
                    self._work_finished.notify_all()
            if future is not None:
                self._complete_future(work)

    def _complete_future(self, work: ShmWork) -> None:
        """Complete its future. Callbacks may wait for later collectives; another thread executes those meanwhile."""
        is_own_thread = threading.current_thread() in self._threads
        with self.lock:
            self._serving -= is_own_thread
            self._wake_thread()
        work._complete_future()
        with self.lock:
            self._serving += is_own_thread

    def _wake_thread(self) -> None:
        if self._busy or not self._queue:
            return
        if self._idle:
            self._work_available.notify()
        elif not self._serving:
            thread = threading.Thread(target=self._run_queue, name=self._name, daemon=True)
            self._threads.append(thread)
            self._serving += 1
            thread.start()

    def _run_queue(self) -> None:
        while True:
            with self.lock:
                while self._busy or not self._queue:
                    if self._closed and not self._queue:
                        return
                    self._idle += 1
                    self._work_available.wait()
                    self._idle -= 1
                self._busy = True
                work = self._queue.popleft()
            self._execute(work, spin=False)
            del work  # else its tensors would be kept until the next work
