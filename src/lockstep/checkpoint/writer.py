"""Writes checkpoints in the background: training waits for a copy in host memory, not for the disk, unless tensors
arrive from other workers meanwhile (tensor_stream.py).

There are buffers for two copies of a state: one that is being written, and one that waits. A third replaces the one
that waits. The second copy is allocated when it is first needed, and both are kept until `close`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lockstep import faults, run_files
from lockstep.checkpoint.format import FlatState, flatten
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.tensor_stream import StreamEndedError
from lockstep.errors import CheckpointError

_log = logging.getLogger(__name__)

REPORT_EVERY_S = 30.0  # while `drain` waits


@dataclass(frozen=True)
class _WriteRequest:
    step: int
    flat: FlatState  # in the buffers of `copies`
    copies: HostCopies


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written."""

    step: int
    took_s: float  # time to write it in the background
    size_bytes: int  # of its tensors


class CheckpointWriter:
    """Writes checkpoints in a background thread, which also reads them back and removes outdated ones.

    `submit` must be called from one thread only.
    """

    def __init__(
        self,
        store: CheckpointStore,
        on_problem: Callable[[str], None],
        *,
        fence: Callable[[], bool] | None = None,
        on_written: Callable[[SavedCheckpoint], None] = lambda _: None,
    ) -> None:
        """
        on_problem  called from either thread with a message that says what was not written and why; training continues
        fence       called right before a checkpoint becomes visible; if it returns False, the checkpoint is dropped
                    without a message
        on_written  called from the background thread for each checkpoint that was written
        """
        self._store, self._on_problem, self._fence, self._on_written = store, on_problem, fence, on_written
        self._changed = threading.Condition()
        self._free = [HostCopies(), HostCopies()]
        self._pending: _WriteRequest | None = None
        self._writing: _WriteRequest | None = None
        self._started_s = 0.0  # when writing `_writing` started
        self._closed = False
        self.written: int | None = None  # step of the last checkpoint that was written
        self._thread = threading.Thread(target=self._write_loop, name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def submit(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state and write it in the background. When this returns, `state` may be changed.

        Raises CheckpointError for a state that a checkpoint cannot hold, and after `close`.
        """
        flat = flatten(state)
        if self.written == step:  # in the middle of a batch, with the step of another optimiser
            self.written = None
        with self._changed:
            if self._closed:
                raise CheckpointError(f"the checkpoint of step {step} was submitted after the writer was closed")
            replaced, self._pending = self._pending, None
            copies = replaced.copies if replaced is not None else self._free.pop()
            writing, for_s = self._writing, time.monotonic() - self._started_s
        if replaced is not None:
            assert writing is not None
            replaced.flat.abandon()
            self._report(
                f"the checkpoint of step {replaced.step} was still waiting when that of step {step} came, which takes "
                f"its place: step {writing.step} is being written for {for_s:.1f} s; save less often, or to a faster "
                "disk"
            )
        request = None
        try:
            faults.at("copy")
            copied = copies.copy({name: one for name, one in flat.tensors.items() if isinstance(one, Tensor)})
            tensors = {name: copied.get(name, one) for name, one in flat.tensors.items()}
            request = _WriteRequest(step, FlatState(flat.structure, tensors), copies)
        except MemoryError as error:
            self._report(describe_failure(step, self._store.path_of(step), error, self._store.last()))
        finally:
            with self._changed:
                if request is None:
                    flat.abandon()
                    copies.free()
                    self._free.append(copies)
                elif self._writing is None:
                    self._start(request)
                else:
                    self._pending = request

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted is written or has failed. Returns False if that takes longer."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            left = REPORT_EVERY_S if timeout_s is None else min(REPORT_EVERY_S, timeout_s - waited)
            with self._changed:
                if self._changed.wait_for(lambda: self._writing is None, max(left, 0.0)):
                    return True
                writing, for_s = self._writing, time.monotonic() - self._started_s
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                return False
            if writing is not None:
                path = self._store.path_of(writing.step)
                self._report(f"waiting for the checkpoint of step {writing.step}, written to {path} for {for_s:.0f} s")

    def close(self, timeout_s: float | None = None) -> bool:
        """Like `drain`; after it `submit` raises. What is not written after `timeout_s` is dropped."""
        drained = self.drain(timeout_s)
        with self._changed:
            if self._pending is not None:
                self._pending.flat.abandon()
            self._closed, self._pending = True, None
            self._changed.notify_all()
        if drained:
            self._thread.join()
        return drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, request: _WriteRequest | None) -> None:
        """Make `request` the one that is written; None: there is none. The caller holds the lock."""
        self._writing, self._started_s = request, time.monotonic()
        self._changed.notify_all()

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writing is not None or self._closed)
                request = self._writing
            if request is None:
                return
            self._write(request)
            with self._changed:
                self._free.append(request.copies)
                self._start(self._pending)
                self._pending = None

    def _write(self, request: _WriteRequest) -> None:
        """Write a checkpoint and remove outdated ones. Errors are reported, not raised: the next save tries again."""
        step, path = request.step, self._store.path_of(request.step)
        try:
            if self._store.write(step, request.flat, fence=self._fence) is None:
                return
            self.written = step
            size_bytes = sum(tensor.nbytes for tensor in request.flat.tensors.values())
            self._on_written(SavedCheckpoint(step, time.monotonic() - self._started_s, size_bytes))
        except StreamEndedError:  # the workers that are left save again, or go back to an earlier checkpoint
            return
        except Exception as error:
            self._report(describe_failure(step, path, error, self._store.last()))
            return
        finally:
            request.flat.abandon()
        try:
            self._store.prune(step)
        except Exception as error:
            problem = f"older ones could not be removed: {error}; remove them"
            self._report(f"the checkpoint of step {step} is in {path}, but {problem}")

    def _report(self, text: str) -> None:
        try:
            self._on_problem(text)
        except Exception as error:
            _log.error("%s (and on_problem failed: %r)", text, error)


class HostCopies:
    """Buffers in host memory for one state, reused from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors into the buffers and return these. They are overwritten by the next call.

        When this returns, the tensors may be changed. With GPU tensors it waits for the copies, but not for work that
        is queued later. Raises MemoryError if there is not enough memory.
        """
        # Buffers that no longer fit are freed before new ones are allocated.
        kept = {name: buffer for name, buffer in self._buffers.items() if _fits(buffer, tensors.get(name))}
        self._buffers = kept
        for name, tensor in tensors.items():
            if name not in kept:
                kept[name] = _host_memory(tensor)
        with torch.no_grad():
            for name, tensor in tensors.items():
                kept[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(device))
            copied.synchronize()
        return {name: kept[name] for name in tensors}

    def free(self) -> None:
        self._buffers = {}


def _fits(buffer: Tensor, tensor: Tensor | None) -> bool:
    return tensor is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _host_memory(tensor: Tensor) -> Tensor:
    """Allocate a contiguous buffer; page-locked for a GPU tensor, if the system has such memory left."""
    for pin_memory in (True, False) if tensor.is_cuda else (False,):
        try:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    raise MemoryError(reason)


def describe_failure(step: int, path: Path, error: BaseException, last: Path | None) -> str:
    """Say which checkpoint was not written and why, which is the last one, and what to do. One line."""
    what, advice = f"{type(error).__name__}: {error}", "please report it"
    if isinstance(error, OSError):
        what, advice = run_files.describe(error)
    elif isinstance(error, CheckpointError):
        what, advice = f"read back, it was not what was written: {error}", "the disk or the memory here may be failing"
    elif isinstance(error, MemoryError):
        what, advice = f"no memory for a copy of the state: {error}", "leave it room for two copies"
    kept = f"the last one is {last}, and it stays" if last is not None else "there is none before it"
    return (
        f"the checkpoint of step {step} was not written to {path}: {what}; {kept}; training goes on, and the next save "
        f"tries again; {advice}"
    )
