"""Who carries the collectives out: the caller, if it waits anyway, or a thread beside it. One by one, in order.

Note [Inline]
A collective that is waited for at once, with nothing before it in the queue, runs in the caller's own thread: handing
it to another and back would take longer than a small collective takes. The same when somebody waits for a collective
that has not begun: it is taken out of the queue and done on the spot.
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
    """One collective, from the call to its end."""

    def __init__(self, engine: Engine, run: Run, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._engine, self._run, self._tensors = engine, run, tensors
        self._error: BaseException | None = None
        self._done = False
        self.ended_s: float | None = None
        self.after: Callable[[], None] = _do_nothing  # makes the caller's stream wait for the result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._done:
            self._engine.finish(self, timeout.total_seconds())
        if self._error is not None:
            raise self._error
        self.after()
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
        with self._engine.lock:
            if self._future is None:
                # One for GPU tensors makes the stream of whoever waits for it wait, too.
                devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
                self._future = torch.futures.Future(devices=list(devices))
                if self._done:
                    self._settle()
            return self._future

    def carry_out(self, spin: bool) -> None:
        """Called by the engine, once."""
        try:
            # Tensors made in inference mode can be written only in it. For the others it is not worth its time.
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
            self._run = _nothing  # drops the tensors it held

    def _settle(self) -> None:
        assert self._future is not None
        if self._error is None:
            self.after()
            self._future.set_result(list(self._tensors))
        else:
            error = self._error if isinstance(self._error, Exception) else RuntimeError("interrupted")
            self._future.set_exception(error)


class AllOf(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _nothing(work: ShmWork, spin: bool) -> None:
    pass


def _do_nothing() -> None:
    pass


class Engine:
    """A queue of works, and at most one of them under way."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.RLock()
        self._to_do = threading.Condition(self.lock)  # for our thread
        self._ended = threading.Condition(self.lock)  # for those who wait
        self._waiting = 0
        self._queue: deque[ShmWork] = deque()
        self._busy = False
        self._current: ShmWork | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._serving = 0  # threads that look at the queue, or will; not those inside a callback of a future
        self._idle = 0

    def submit(self, run: Run, tensors: Sequence[torch.Tensor], *, wait: bool) -> ShmWork:
        """`run` in its turn; now, and in this thread, if the caller waits and nothing is before it."""
        work = ShmWork(self, run, tensors)
        with self.lock:
            if self._closed:
                raise RuntimeError("this process group was destroyed")
            inline = wait and not self._busy and not self._queue
            if inline:
                self._busy = True
            else:
                self._queue.append(work)
                self._call_thread()
        if inline:
            self._do(work, spin=True)
        elif wait:
            self.finish(work, 0)
        return work

    def finish(self, work: ShmWork, wait_s: float) -> None:
        """Wait for `work`, doing what comes before it ourselves if nobody else does.

        With a limit (`wait_s` > 0) it is left to the thread: who begins a collective cannot leave it.
        """
        end = time.monotonic() + wait_s if wait_s > 0 else float("inf")
        while True:
            with self.lock:
                self._waiting += 1
                try:
                    while not work._done and (wait_s > 0 or self._busy or not self._queue):
                        left = end - time.monotonic()
                        if left <= 0:
                            raise RuntimeError(f"Operation timed out: waited {wait_s:g} s; the collective goes on")
                        self._ended.wait(min(left, 1.0))
                finally:
                    self._waiting -= 1
                if work._done:
                    return
                self._busy = True
                first = self._queue.popleft()
            self._do(first, spin=first is work)

    def drain(self) -> None:
        """Wait until nothing is queued or under way."""
        with self.lock:
            last = self._queue[-1] if self._queue else self._current
        if last is not None:
            self.finish(last, 0)

    def close(self, deadline_s: float) -> None:
        """Let what is queued end (it fails at once if the group has failed), and the thread with it."""
        with self.lock:
            self._closed = True
            self._to_do.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        end = time.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _do(self, work: ShmWork, *, spin: bool) -> None:
        self._current = work
        try:
            work.carry_out(spin)
        finally:
            with self.lock:
                self._busy, self._current = False, None
                work._done = True
                future = work._future
                self._call_thread()
                if self._waiting:
                    self._ended.notify_all()
            if future is not None:
                self._settle(work)

    def _settle(self, work: ShmWork) -> None:
        """Complete its future. Callbacks may wait for collectives that come after; then another thread does those."""
        ours = threading.current_thread() in self._threads
        with self.lock:
            self._serving -= ours
            self._call_thread()
        work._settle()
        with self.lock:
            self._serving += ours

    def _call_thread(self) -> None:
        if self._busy or not self._queue:
            return
        if self._idle:
            self._to_do.notify()
        elif not self._serving:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.append(thread)
            self._serving += 1
            thread.start()

    def _serve(self) -> None:
        while True:
            with self.lock:
                while self._busy or not self._queue:
                    if self._closed and not self._queue:
                        return
                    self._idle += 1
                    self._to_do.wait()
                    self._idle -= 1
                self._busy = True
                work = self._queue.popleft()
            self._do(work, spin=False)
            del work  # or its tensors would live until the next one comes
