"""Requests to end a run: SIGTERM and SIGUSR1 from a scheduler, SIGINT (Ctrl-C) from a person, `run.stop()`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import final

from lockstep.launcher.exit_policy import INTERRUPTED, PREEMPTED, finishing_file
from lockstep.recovery.collective_calls import print_message
from lockstep.step.step_types import Stop


@final
class StopRequests:
    """What was asked of this worker, and what all workers have agreed on."""

    def __init__(self, logs: str | None) -> None:
        """`logs`: folder of the launcher's logs; None without a launcher."""
        self.asked = Stop.NO  # of this worker
        self.agreed = Stop.NO  # by all workers, after a step
        self.ending: SystemExit | None = None  # the exception that ends the program after a signal
        self._logs = logs
        self._signal: int | None = None
        self.tell_agent: Callable[[], None] | None = None  # in an elastic run, in which this worker may leave alone

    def order_stop(self) -> None:
        """Let all workers save and end after the current step."""
        self.asked = Stop.SIGNAL

    def exit(self) -> SystemExit:
        """Return the exception that ends the program after a signal, once everything is saved.

        Under a launcher, which knows the signal, the status is always PREEMPTED.
        """
        is_ctrl_c = self._signal == signal.SIGINT and not self._logs
        self.ending = SystemExit(INTERRUPTED if is_ctrl_c else PREEMPTED)
        return self.ending

    def _request(self, number: int, *, has_begun: bool) -> None:
        """Request that all workers save and end after the current step. `has_begun`: there is work to save.

        In an elastic run the agent of this host decides whether that is meant, or only this worker leaves.
        """
        self._signal = number
        if self.tell_agent is not None and number != signal.SIGINT:
            self.tell_agent()
        else:
            self.order_stop()
        if self._logs and has_begun:  # the launcher must not kill this worker before it has saved
            with suppress(OSError):
                finishing_file(Path(self._logs), os.getpid()).touch()
        elif not self._logs and number == signal.SIGINT:
            print_message("Ctrl-C: finishing this step; Ctrl-C again ends at once")

    @contextmanager
    def handle_signals(self, *, is_training: Callable[[], bool], has_begun: Callable[[], bool]) -> Iterator[None]:
        """Install handlers for the duration of the block. Only the main thread can; in another one nothing is changed.

        SIGTERM and SIGUSR1 ask for the end, and so does the first SIGINT while `is_training()`; a second one ends the
        process at once, without a traceback. Outside of training, SIGINT raises KeyboardInterrupt, as always in Python.
        A SIGINT that is ignored (nohup) or has a handler of the program's own is left alone. From `has_begun()` on the
        launcher waits until the work is saved; before, it kills the worker after its grace period.
        """
        with ExitStack() as undo:
            if threading.current_thread() is threading.main_thread():
                pid, seen = os.getpid(), set[int]()

                def on_signal(number: int, frame: FrameType | None) -> None:
                    if os.getpid() != pid or (number == signal.SIGINT and number in seen):
                        signal.signal(number, signal.SIG_DFL)  # a child process of the program has no run to end
                        os.kill(os.getpid(), number)
                    elif number == signal.SIGINT and not is_training():
                        signal.default_int_handler(number, frame)
                    else:
                        seen.add(number)
                        self._request(number, has_begun=has_begun())

                numbers = [signal.SIGTERM, signal.SIGUSR1]
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    numbers.append(signal.SIGINT)
                for one in numbers:
                    before = signal.signal(one, on_signal)
                    undo.callback(signal.signal, one, signal.SIG_DFL if before is None else before)
            yield
