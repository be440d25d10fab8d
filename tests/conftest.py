"""What holds for all tests: quick ones start processes that import torch faster, slow ones may take longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STARTUP = Path(__file__).resolve().parent / "startup"  # read the file there
SLOW_TIMEOUT_S = 600


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == "not slow":
        os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
