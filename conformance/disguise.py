"""Lets PyTorch's tests take the backend under test for one that they know.

The tests decide at import, by the name in BACKEND, who is skipped, and some compare it again when they run. So they are
imported under a name that they know, and afterwards BACKEND reads as the backend under test, and compares equal to
"gloo" as well. Groups are formed by what it reads: they are of the backend under test.
"""

from __future__ import annotations

import functools
import importlib
import os
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed

from swap import add_byte

TESTS = "torch.testing._internal.distributed.distributed_test"
HOMES = {"shm": "lockstep"}  # importing this registers the backend; torch's own are there already


def name_of(given: str) -> str:
    return given.rpartition(".")[2]


def load(given: str) -> None:
    """`given`: the name of a backend, or `module.name` of one that importing `module` registers."""
    home, name = given.rpartition(".")[0] or HOMES.get(given, ""), name_of(given)
    try:
        if home:
            importlib.import_module(home)
    except ImportError as error:
        raise ValueError(f"--backend {given}: cannot import {home}: {error}") from error
    if name not in dist.Backend.backend_list:
        raise ValueError(f"--backend {given}: torch.distributed knows {', '.join(dist.Backend.backend_list)}")


def import_tests(given: str, *, known_as: str) -> ModuleType:
    load(given)
    os.environ["BACKEND"] = known_as
    # The decorators ask whether the backend that they know is there.
    with mock.patch.object(dist, f"is_{known_as}_available", return_value=True):
        tests = importlib.import_module(TESTS)
    if known_as != given:
        tests.BACKEND = LikeGloo(name_of(given))  # type: ignore[attr-defined]
    os.environ["BACKEND"] = name_of(given)
    return tests


class LikeGloo(str):
    """Reads as the name that it is, and is equal to "gloo" as well."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # found in the sets of what each known backend can do


def let_subgroups_through(world_size: int) -> None:
    """Tests of subgroups ask for eight ranks and then use the group [1, 2]: three are enough."""
    needs_three: Any = (lambda test: test) if world_size > 2 else unittest.skip("needs a world size of 3")
    common_distributed.skip_if_small_worldsize = needs_three


def count_groups(name: str, built: Path) -> None:
    """Every group of the backend `name` that is formed appends a byte to the file `built`, from whichever process."""
    form: Any = distributed_c10d._new_process_group_helper

    @functools.wraps(form)
    def _new_process_group_helper(*args: Any, **named: Any) -> Any:
        group, store = form(*args, **named)
        if distributed_c10d._world.pg_map.get(group, ("",))[0] == name:  # a rank outside the group gets no group
            add_byte(built)
        return group, store

    distributed_c10d._new_process_group_helper = _new_process_group_helper
