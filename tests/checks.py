"""Many small checks in one group of workers: starting workers once is what makes them cheap.

A check is a function of (rank, size, group) that asserts. Each gets a group of its own on shm, and what fails on any
worker is told apart by the name of the check.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from on_workers import on_workers

Check = Callable[[int, int, Any], None]
TIMEOUT_S = 10


class Checks:
    """The checks of one file, by number of workers."""

    def __init__(self) -> None:
        self._checks: dict[int, list[Check]] = {}
        self._failed: dict[int, list[dict[str, str]]] = {}

    def workers(self, *sizes: int) -> Callable[[Check], Check]:
        """Decorates a check that is run with these numbers of workers."""

        def note(check: Check) -> Check:
            for size in sizes:
                self._checks.setdefault(size, []).append(check)
            return check

        return note

    def cases(self) -> list[tuple[str, int]]:
        return [(check.__name__, size) for size, checks in self._checks.items() for check in checks]

    def failures(self, name: str, size: int) -> str:
        """What each worker said against this check. The first question for a size runs all checks for it."""
        if size not in self._failed:
            self._failed[size] = on_workers(_run_all, size, self._checks[size])
        texts = [f"rank {rank}: {failed[name]}" for rank, failed in enumerate(self._failed[size]) if name in failed]
        return "\n".join(texts)


def _run_all(rank: int, size: int, checks: Sequence[Check]) -> dict[str, str]:
    failed = {}
    for check in checks:
        group = dist.new_group(backend="shm", timeout=timedelta(seconds=TIMEOUT_S))
        try:
            check(rank, size, group)
        except BaseException:  # pytest's own are not Exceptions
            failed[check.__name__] = traceback.format_exc()
        dist.barrier()  # of Gloo: where one failed, the others wait for it here
    return failed
