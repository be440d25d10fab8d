"""The calls that all workers of a run make together, in the same order: one step after the other, and what is between.

In a world of fixed workers they are simply made. In an elastic run see elastic_calls.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.errors import DesyncError, LockstepError

T = TypeVar("T")


def unchanged(value: Any) -> Any:
    return value


class Calls:
    """Made one after the other."""

    is_elastic = False  # workers may come and go

    def __init__(self) -> None:
        self.doing = ""  # the call that we are in, or that failed
        # Of an error about collectives: one about the calls that made them, where those differ (train/call_check.py).
        self.explain_desync: Callable[[Calls, DesyncError], DesyncError] = lambda calls, error: error
        self._begun = 0
        self.failed: Exception | None = None  # in a step that the other workers cannot take without this one

    @property
    def position(self) -> tuple[int, int]:
        """Of the call that we are in: workers at the same one make the same call."""
        return 0, self._begun

    @property
    def is_member(self) -> bool:
        """We make calls, and do not only go through those that others have made."""
        return True

    def make(
        self,
        what: str,
        call: Callable[[], T],
        *,
        encode: Callable[[T], Any] = unchanged,
        decode: Callable[[Any], T] = unchanged,
        begins_loop: bool = False,
        may_repeat: bool = False,
    ) -> T:
        """The result of `call`, or that of somebody who has made it before us.

        encode, decode  its result as JSON, and back
        begins_loop     the last call before the loop: what it finds depends on when it is made
        may_repeat      one worker may fail alone, before anything is exchanged, and make the call again
        """
        self._refuse_to_go_on(what)
        self._begun += 1
        self.doing = what
        try:
            result = self._carry_out(call)
        except BaseException:
            if may_repeat:
                self._begun -= 1
            raise
        self.doing = ""
        return result

    def _refuse_to_go_on(self, what: str) -> None:
        """Raise LockstepError if the program has caught an exception after which calls do not fit together."""
        if self.failed is not None:
            raise LockstepError(
                f"{what}: run.step failed on this worker before, in the middle of the exchange of gradients, and the "
                f"program has caught the exception ({type(self.failed).__name__}: {self.failed}). The other workers "
                "cannot take the step without this one, so it must end the program: let it through"
            ) from self.failed

    def _carry_out(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except DesyncError as error:
            explained = self.explain_desync(self, error)
            if explained is error:
                raise
            raise explained from error

    @property
    def generation(self) -> int:
        """Generation number; equal on all workers."""
        return 1

    def begin_step(self, number: int) -> None:
        """The top of the loop."""

    def hand_out(self) -> None:
        """The program gets its batch: from here on it may change the state."""

    @property
    def wants_to_move(self) -> int:
        """The generation that is to end at the next top of the loop; 0: none is."""
        return 0

    def move_at_next_step(self, generation: int) -> None:
        """All workers have agreed to."""

    def check_commit(self) -> None:
        """Before a step is applied. Raises if we must not."""

    def may_commit(self) -> bool:
        return True

    def check_left(self) -> None:
        """In the middle of something long. Raises if it is of no use any more, because a worker was lost."""

    def limit(self, workers: int) -> None:
        """More cannot be used."""

    def end(self) -> None:
        """All were made, by everybody."""

    def leave(self) -> None:
        """The program leaves its Run without its end, by an exception; the other workers may not."""


def say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
