"""The logger `lockstep`, through which the library prints messages for the user; its children are named after modules.

The launcher prints its own messages (launcher/output.py): it must not wait for a terminal.
"""

from __future__ import annotations

import logging
import sys


class TerminalHandler(logging.Handler):
    """Prints "lockstep: MESSAGE" on the current standard error (every cell of a notebook has its own)."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"lockstep: {record.getMessage()}", file=sys.stderr, flush=True)


def install() -> None:
    """Called when the package is imported. Keeps a level that the program has set before."""
    logger = logging.getLogger("lockstep")
    if not any(isinstance(handler, TerminalHandler) for handler in logger.handlers):
        logger.addHandler(TerminalHandler())
        logger.propagate = False  # else a program with a handler of its own would print every message twice
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
