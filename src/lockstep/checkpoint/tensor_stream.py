"""Tensors that arrive from other workers while a checkpoint is written, so that no worker has all of them at once.

One thread puts tensors into the stream, in the order in which they are in the checkpoint; another one takes and writes
them. At most LIMIT_BYTES wait between them, or one tensor: then `put` waits for the disk. It does so as long as this
process reads or writes checkpoints at all (`file_io.pieces_done`), and prints that it waits.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

import torch
from torch import Tensor

from lockstep.checkpoint import file_io
from lockstep.errors import CheckpointError

LIMIT_BYTES: Final = 256 * 1024 * 1024
STALLED_S: Final = 300.0  # without a piece that was read or written, after which the checkpoint is given up
CHECK_EVERY_S: Final = 0.5
REPORT_EVERY_S: Final = 30.0


class StreamEndedError(CheckpointError):
    """The tensors that a checkpoint lacks do not arrive any more: a worker was lost."""


class StalledDiskError(OSError):
    """Nothing could be read or written for STALLED_S."""


@final
class StreamedTensor:
    """The place of a tensor in a state; the tensor itself arrives later."""

    def __init__(self, stream: TensorStream, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.stream, self.dtype, self.shape = stream, dtype, shape

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def take(self) -> Tensor:
        """Wait for the tensor and return it, once; in the order in which the tensors were added to the stream.

        Raises StreamEndedError if it does not arrive.
        """
        return self.stream._take(self)


@final
class TensorStream:
    """What is between the thread that sends the tensors of a state and the one that writes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._places = deque[StreamedTensor]()  # of tensors that were not taken yet
        self._waiting = deque[Tensor]()  # to be taken
        self._waiting_bytes = 0
        self._taken = 0
        self._has_ended = False  # no more tensors are put
        self._is_abandoned = False  # no more tensors are taken
        self._has_stalled = False  # it is abandoned since nothing was written

    def add(self, dtype: torch.dtype, shape: tuple[int, ...]) -> StreamedTensor:
        """Return the place of one more tensor. Called before any tensor is put or taken."""
        place = StreamedTensor(self, dtype, shape)
        self._places.append(place)
        return place

    def put(
        self,
        tensor: Tensor,
        *,
        check: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Add the tensor of the next place. Waits while too much is waiting; what no one takes is dropped.

        check   called repeatedly while it waits; raises to end the wait
        report  prints that training waits for the disk
        """
        began_s = report_s = changed_s = time.monotonic()
        progress = (self._taken, file_io.pieces_done)
        with self._changed:
            while not self._has_room(tensor):
                self._changed.wait(CHECK_EVERY_S)
                check()
                now_s, before, progress = time.monotonic(), progress, (self._taken, file_io.pieces_done)
                changed_s = now_s if progress != before else changed_s
                if now_s - changed_s > STALLED_S:
                    self._is_abandoned = self._has_stalled = True
                if now_s - report_s > REPORT_EVERY_S:
                    report_s = now_s
                    report(f"training waits for a checkpoint to be written, for {now_s - began_s:.0f} s")
            if not self._is_abandoned:
                self._waiting.append(tensor)
                self._waiting_bytes += tensor.nbytes
                self._changed.notify_all()

    def _has_room(self, tensor: Tensor) -> bool:
        fits = not self._waiting or self._waiting_bytes + tensor.nbytes <= LIMIT_BYTES
        return fits or self._is_abandoned

    def end(self) -> None:
        """Nothing is put any more, whether all tensors were or not."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nothing is taken any more: what is put from now on is dropped."""
        with self._changed:
            self._is_abandoned = True
            self._waiting.clear()
            self._changed.notify_all()

    def _take(self, place: StreamedTensor) -> Tensor:
        with self._changed:
            if not self._places or self._places.popleft() is not place:
                raise CheckpointError("the tensors of this state are not taken in their order; report this")
            self._changed.wait_for(lambda: self._waiting or self._has_ended or self._is_abandoned)
            if not self._waiting:
                if self._has_stalled:
                    raise StalledDiskError(errno.ETIMEDOUT, f"nothing was read or written for {STALLED_S:.0f} s")
                raise StreamEndedError("a worker was lost while the state was collected from all of them")
            tensor = self._waiting.popleft()
            self._waiting_bytes -= tensor.nbytes
            self._taken += 1
            self._changed.notify_all()
            return tensor
