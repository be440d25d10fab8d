"""SIGTERM and SIGUSR1: a scheduler wants the machine back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


@contextmanager
def told_to_end(ask: Callable[[], None]) -> Iterator[None]:
    """Inside it, these signals call `ask`. Python lets only the main thread have it so; in another, nothing changes."""
    with ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            pid = os.getpid()

            def on_signal(number: int, _frame: FrameType | None) -> None:
                if os.getpid() == pid:
                    ask()
                else:  # a child of the program: nobody there would end it
                    signal.signal(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)

            for one in (signal.SIGTERM, signal.SIGUSR1):
                before = signal.signal(one, on_signal)
                undo.callback(signal.signal, one, signal.SIG_DFL if before is None else before)
        yield
