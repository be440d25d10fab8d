"""Signals that ask a run to end: SIGTERM and SIGUSR1 from a scheduler, SIGINT (Ctrl-C) from a person."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from lockstep.elastic.verdict import finishing_file


@contextmanager
def stop_signals(
    ask: Callable[[int], None], *, is_training: Callable[[], bool], env: Mapping[str, str]
) -> Iterator[None]:
    """Install handlers for the duration of the block. Only the main thread can; in another one nothing is changed.

    SIGTERM and SIGUSR1 call `ask(number)`. So does the first SIGINT while `is_training()` is true; a second one ends
    the process at once, without a traceback. Outside of training, SIGINT raises KeyboardInterrupt, as always in Python.
    A SIGINT that is ignored (nohup) or has a handler of the program's own is left alone.
    """
    with ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            pid, asked = os.getpid(), set[int]()

            def on_signal(number: int, frame: FrameType | None) -> None:
                if os.getpid() != pid or (number == signal.SIGINT and number in asked):
                    signal.signal(number, signal.SIG_DFL)  # a child of the program has no run that could end
                    os.kill(os.getpid(), number)
                elif number == signal.SIGINT and not is_training():
                    signal.default_int_handler(number, frame)
                else:
                    asked.add(number)
                    _announce(env, pid)
                    ask(number)

            numbers = [signal.SIGTERM, signal.SIGUSR1]
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                numbers.append(signal.SIGINT)
            for one in numbers:
                before = signal.signal(one, on_signal)
                undo.callback(signal.signal, one, signal.SIG_DFL if before is None else before)
        yield


def _announce(env: Mapping[str, str], pid: int) -> None:
    """Tell the launcher that this worker finishes its step and saves, so that it is not killed meanwhile."""
    logs = env.get("LOCKSTEP_RUN_DIR")
    if logs:
        with suppress(OSError):
            finishing_file(Path(logs), pid).touch()
