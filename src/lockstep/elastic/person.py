"""A worker process of this host, as its supervisor knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lockstep.elastic.line import Line
from lockstep.elastic.membership import Do, Worker


@dataclass
class Person:
    worker: Worker
    line: Line
    slot: int
    pid: int = 0
    heard_s: float = field(default_factory=time.monotonic)
    spoke: bool = False  # it has a Run
    told: set[tuple[Do, int]] = field(default_factory=set)
    told_leave_s: float | None = None
    busy: tuple[float, float | None] = (0.0, None)  # when we saw it compute, and how much it had by then
    journal: int = 0  # entries it knows
    knows_loop: bool = False
    knows_anew: int = 0  # entries of that generation
    at: Any = None  # the position that it last told
    is_calling: bool = False  # it was in a call of the Run then
    left_run: bool = False  # by an exception, which its program may catch
    ended_s: float = 0.0  # when its process ended with status 0 after that
    released: bool = False  # one too many: it ends with status 0, which is not the end of the program

    @property
    def id(self) -> str:
        return self.worker.id
