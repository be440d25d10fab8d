"""The calls that all workers of a run make together, in the same order: the steps, and what is called between them.

With a fixed number of workers they are simply executed. For elastic runs see elastic_calls.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep import faults
from lockstep.errors import DesyncError, LockstepError

T = TypeVar("T")


def unchanged(value: Any) -> Any:
    return value


class CollectiveCalls:
    """Executes the collective calls of a run with a fixed number of workers."""

    is_elastic = False  # whether workers may join and leave

    def __init__(self) -> None:
        self.current_call = ""  # the call that is running, or that failed
        # Turns an error about collectives into one about the calls that made them, if those differ (call_check.py).
        self.explain_desync: Callable[[CollectiveCalls, DesyncError], DesyncError] = lambda calls, error: error
        self._count = 0
        self.finish_weights: Callable[[], None] = lambda: None  # waits for weights that are still to arrive
        self.failed: Exception | None = None  # the error of a step that the other workers cannot take without this one

    @property
    def position(self) -> tuple[int, int]:
        """Position of the current call; workers at the same position make the same call."""
        return 0, self._count

    @property
    def is_member(self) -> bool:
        """Whether this worker executes calls. A new worker only reads the results of calls that others have made."""
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
        reads_weights: bool = True,
    ) -> T:
        """Execute `call` and return its result; or return the result that another worker got for the same call.

        encode, decode  convert the result to JSON and back
        begins_loop     this is the last call before the loop: its result depends on when it is made
        may_repeat      a worker may fail alone, before anything is exchanged, and make the call again
        reads_weights   wait for weights that are still to arrive (ddp/deferred_weights.py), and for their collectives
        """
        self._refuse_after_failure(what)
        if reads_weights:
            self.finish_weights()
        self._count += 1
        self.current_call = what
        try:
            result = self._execute(call)
        except BaseException:
            if may_repeat:
                self._count -= 1
            raise
        self.current_call = ""
        return result

    def _refuse_after_failure(self, what: str) -> None:
        """Raise LockstepError if the program caught an exception after which the calls of the workers do not match."""
        if self.failed is not None:
            raise LockstepError(
                f"{what}: run.step failed on this worker before, in the middle of the exchange of gradients, and the "
                f"program has caught the exception ({type(self.failed).__name__}: {self.failed}). The other workers "
                "cannot take the step without this one, so it must end the program: let it through"
            ) from self.failed

    def _execute(self, call: Callable[[], T]) -> T:
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
        """Called at the top of the loop, before the batch is fetched."""
        faults.context["step"] = number
        faults.at("top")

    def hand_out(self) -> None:
        """Called before the program gets its batch, from where on it may change the state."""

    @property
    def wants_to_move(self) -> int:
        """Number of the generation that is to end at the next top of the loop; 0 if none is."""
        return 0

    @property
    def is_moving(self) -> bool:
        """Whether all workers leave this generation when the next step begins."""
        return False

    @property
    def is_shrinking(self) -> bool:
        """Whether, as far as this worker knows, some workers will not be in the next generation."""
        return False

    def move_at_next_step(self, generation: int) -> None:
        """Called when all workers have agreed to end this generation at the next top of the loop."""

    def check_commit(self) -> None:
        """Called before a step is applied. Raises if it must not be applied."""

    def may_commit(self) -> bool:
        """Whether this worker may still write for the run."""
        return True

    def check_left(self) -> None:
        """Called during long operations. Raises if the operation has become useless, because a worker was lost."""

    def announce_training(self, workers: int, *, compiles: bool) -> None:
        """Announce that the run cannot use more workers than this, and whether torch.compile compiles its model."""

    def report_slowness(self, times: float) -> None:
        """Announce that this worker takes so many times as long for a sample as the others, which is too long."""

    def restart(self, why: str, prepare: Callable[[], None], *, is_wrong: bool | None) -> None:
        """Call `prepare`, and end this process, so that another starts in its place; all workers do that. Returns if
        there is no launcher that would start one.

        why       the error
        is_wrong  this worker computed wrongly, so that none is started on its machine; None: no worker did
        """
        prepare()

    def end(self) -> None:
        """Called when all workers have made all calls."""

    def leave(self) -> None:
        """Called when the program leaves its Run by an exception, before its end; other workers may continue."""


def print_message(text: str) -> None:
    """Print a line of Lockstep to stderr."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
