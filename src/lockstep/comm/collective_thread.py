"""Where jobs made of several collectives are carried out, one after the other, beside the caller.

Every worker must make the same calls in the same order. A job of two collectives with a sum between them can neither be
started whole nor be waited for in the middle of a backward pass; so it has a lane of its own, and a process group that
nobody else calls.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Job = Callable[[], Tensor]


class Pending:
    """What a job will give."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self.ended_s: float | None = None
        self._event: Any = None  # of the GPU: the result is there for streams that wait for it

    def carry_out(self, job: Job, stream: Any = None) -> None:
        try:
            if stream is None:
                self._result = job()
            else:
                with torch.cuda.stream(stream):
                    self._result = job()
                    self._event = stream.record_event()
        except BaseException as error:
            self._error = error
        finally:
            self.ended_s = time.monotonic()
            self._done.set()

    def done_within(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def wait(self) -> Tensor:
        # No deadline of its own: every collective inside the job has one.
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        assert self._result is not None
        return self._result


class Lane:
    """A thread, which waits for collectives while the caller goes on; on a GPU, with a stream of its own.

    NCCL needs no thread: its collectives and the sums between them are put on the stream, and nobody waits.
    """

    def __init__(self, device: torch.device, *, threaded: bool) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        if threaded:
            self._jobs = queue.SimpleQueue()
            # It holds the queue and not us, so that we can be collected; and nothing that waits keeps a process alive.
            threading.Thread(target=_serve, args=(self._jobs,), name="lockstep-lane", daemon=True).start()

    def submit(self, job: Job) -> Pending:
        pending, stream = Pending(), self._stream
        ready: Any = torch.cuda.current_stream(stream.device).record_event() if stream is not None else None

        def carry_out() -> None:
            if stream is not None:
                stream.wait_event(ready)
            pending.carry_out(job, stream)

        if self._jobs is None:
            carry_out()
        else:
            self._jobs.put(carry_out)
        return pending

    def close(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)

    def __del__(self) -> None:
        self.close()


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or its tensors would live until the next one comes
