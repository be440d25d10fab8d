"""What holds for all tests: which cases `make test` leaves out, and that slow tests may take longer."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # files run side by side: more threads would wait for each other's cores

import pytest

SLOW_TIMEOUT_S = 1800

# Each of these files takes 20 seconds or more. They begin first: none is to run on when all others are done.
LONGEST = (
    "recovery", "newcomer", "recipes", "docs", "run", "early_exit", "ddp", "one_digest", "same_bits_as_torch", "drain",
    "loop_body", "replica_check", "tracebacks", "notebook", "shm_collectives", "optimizers", "run_errors", "audit",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, and marks as slow what `few(n)` leaves out: all cases of a test but n, which are
    spread evenly over its list."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(getattr(item, "function", item), []).append(item)
    for family in cases.values():
        marker = family[0].get_closest_marker("few")
        assert marker is not None
        (n,) = marker.args
        kept = {position * len(family) // n for position in range(n)}
        for position, item in enumerate(family):
            if position not in kept:
                item.add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_collection_finish() -> None:
    gc.freeze()  # torch and the tests have a million objects, which every collection would look at
