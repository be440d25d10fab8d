"""A thread that runs jobs of several collectives while the caller continues.

Note [Collective thread]
Every worker must make the same calls in the same order. A job of two collectives with a sum between them can neither be
started as a whole nor be waited for in the middle of a backward pass. So it runs in a thread of its own, on a process
group that no other thread uses.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

Job = Callable[[], Tensor]


class PendingResult:
    """The future result of a job."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self.ended_s: float | None = None
        self._event: Any = None  # CUDA event: the result is valid on streams that wait for it

    def run(self, job: Job, stream: Any = None) -> None:
        """Run the job and keep its result, or the exception that it raises."""
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._result = job()
                self._event = None if stream is None else stream.record_event()
        except BaseException as error:
            self._error = error
        finally:
            self.ended_s = time.monotonic()
            self._done.set()

    def done_within(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def wait(self) -> Tensor:
        """Return the result, on a GPU ordered after the job on the current stream, or raise the job's exception."""
        # No deadline here: every collective inside the job has one.
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            if self._result.is_cuda:
                self._result.record_stream(torch.cuda.current_stream())  # it may be freed before it was read
        return self._result


class CollectiveThread:
    """Runs jobs in a thread while the caller continues; on a GPU, on a stream of its own. See Note [Collective thread].

    NCCL needs no thread (`threaded=False`): its collectives and the sums between them are queued on the stream, and the
    host does not wait.
    """

    def __init__(self, device: torch.device, *, threaded: bool) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        if threaded:
            self._jobs = queue.SimpleQueue()
            # The thread holds the queue and not this object, which can so be garbage collected; it is a daemon, so that
            # a pending wait does not keep the process alive.
            threading.Thread(target=_run_jobs, args=(self._jobs,), name="lockstep-collectives", daemon=True).start()

    def submit(self, job: Job) -> PendingResult:
        pending, stream = PendingResult(), self._stream
        ready: Any = torch.cuda.current_stream(stream.device).record_event() if stream is not None else None

        def run() -> None:
            if stream is not None:
                stream.wait_event(ready)
            pending.run(job, stream)

        if self._jobs is None:
            run()
        else:
            self._jobs.put(run)
        return pending

    def close(self) -> None:
        """End the thread after the jobs that were submitted."""
        if self._jobs is not None:
            self._jobs.put(None)

    def __del__(self) -> None:
        self.close()


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # else its tensors would stay allocated until the next job
