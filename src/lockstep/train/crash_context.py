"""What a Run adds to the record of an exception that ends its worker (failures/crash_record.py)."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from lockstep.failures.crash_record import CrashHook, RunMark
from lockstep.settings import Settings
from lockstep.step import step


@final
class CrashContext:
    """From `begin` to `end`, an uncaught exception is recorded with what the Run knows. After an error `end` is not
    called: the exception has yet to reach the top of the program."""

    def __init__(self, settings: Settings, where: Callable[[], dict[str, Any]]) -> None:
        self._where = where
        self._hook = CrashHook(settings, self._describe)

    def begin(self) -> None:
        self._hook.install()
        self._hook.mark_run(RunMark())

    def leave(self, error: BaseException | None) -> None:
        """Record that the Run was left before its end: by this exception, or None at the exit of the interpreter."""
        facts = None
        if isinstance(error, SystemExit):
            facts = self._hook.describe_exit(error)
        self._hook.mark_run(RunMark(is_left=True, facts=facts))

    def end(self) -> None:
        self._hook.remove()
        self._hook.mark_run(None)

    def _describe(self, trace: TracebackType | None) -> dict[str, Any]:
        shard = _shard_of(trace)
        return self._where() | ({} if shard is None else {"shard": shard})


def _shard_of(trace: TracebackType | None) -> int | None:
    """Number of the shard that was being computed. Read from the local variables `shard` and `outcome` of the step, so
    that a step need not note it."""
    while trace is not None:
        if trace.tb_frame.f_code in (step.compute_gradients.__code__, step.finish_exchange.__code__):
            shard = trace.tb_frame.f_locals.get("shard")
            return shard.number if "outcome" not in trace.tb_frame.f_locals and shard is not None else None
        trace = trace.tb_next
    return None
