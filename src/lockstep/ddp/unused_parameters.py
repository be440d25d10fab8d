"""Which parameters a backward pass has used, on this worker and on any worker."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.abortable_wait import wait_without_limit


class ParameterUsage:
    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._here = [False] * count  # by parameter: used since the last reduction, also under no_sync
        self._map: Tensor | None = None  # by parameter: the number of workers that used it
        self._work: Any = None
        self._counts: list[int] | None = None  # the same on the host
        self.unused: list[int] = []  # parameters that the running backward pass does not reach
        self._unused_before: list[int] | None = None
        self.never_changed = True

    def mark_used(self, index: int) -> None:
        self._here[index] = True

    def set_unused(self, unused: list[int]) -> None:
        self.unused = unused
        if self._unused_before is not None and self._unused_before != unused:
            self.never_changed = False
        self._unused_before = unused

    def start_all_reduce(self, group: dist.ProcessGroup) -> None:
        """Count over all workers. The result is read only for parameters that this worker has not used."""
        self._map = torch.tensor(self._here, dtype=torch.int32).to(self._device, non_blocking=True)
        self._counts = None
        self._work = group.allreduce([self._map], dist.AllreduceOptions())

    def is_unused_everywhere(self, index: int) -> bool:
        if self._here[index]:
            return False
        return self.counts()[index] == 0

    def counts(self) -> list[int]:
        """For each parameter the number of workers that have used it. Waits for the all-reduce."""
        if self._counts is None:
            self.wait()
            assert self._map is not None
            self._counts = self._map.tolist()
        return self._counts

    def wait(self) -> None:
        if self._work is not None:
            wait_without_limit(self._work)
            self._work = None

    def clear(self) -> None:
        self._here = [False] * len(self._here)

    def on_device(self) -> Tensor:
        if self._map is None:
            self._map = torch.tensor(self._here, dtype=torch.int32, device=self._device)
        return self._map
