"""Which parameters were used: here, and by anybody."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.abortable_wait import wait_without_limit


class Usage:
    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._here = [False] * count  # since the last reduction, also under no_sync
        self._map: Tensor | None = None  # by how many workers, once shared
        self._work: Any = None
        self._counts: list[int] | None = None  # the same, on the host
        self.unused: list[int] = []  # parameters the running backward pass does not reach
        self._unused_before: list[int] | None = None
        self.never_changed = True

    def note(self, index: int) -> None:
        self._here[index] = True

    def set_unused(self, unused: list[int]) -> None:
        self.unused = unused
        if self._unused_before is not None and self._unused_before != unused:
            self.never_changed = False
        self._unused_before = unused

    def share(self, group: dist.ProcessGroup) -> None:
        """Tell the others. Their answer is looked at only where we did not use a parameter ourselves."""
        self._map = torch.tensor(self._here, dtype=torch.int32).to(self._device, non_blocking=True)
        self._counts = None
        self._work = group.allreduce([self._map], dist.AllreduceOptions())

    def by_nobody(self, index: int) -> bool:
        if self._here[index]:
            return False
        return self.counts()[index] == 0

    def counts(self) -> list[int]:
        if self._counts is None:
            self.wait()
            assert self._map is not None
            self._counts = self._map.tolist()
        return self._counts

    def wait(self) -> None:
        if self._work is not None:
            wait_without_limit(self._work)
            self._work = None

    def forget(self) -> None:
        self._here = [False] * len(self._here)

    def on_device(self) -> Tensor:
        if self._map is None:
            self._map = torch.tensor(self._here, dtype=torch.int32, device=self._device)
        return self._map
