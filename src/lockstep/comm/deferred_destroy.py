"""Groups of torch's that were given up, until nothing waits in them any more.

Gloo's destructor waits for its operations. One that has missed that its connection is closed (links.py, Note [Giving
Gloo up]) ends at the group's timeout, half an hour later. Whoever lets go of such a group last would wait as long: the
training thread in the middle of a step, if its collector finds the group in a cycle, or the interpreter at its end. So
a group that was given up is kept here, and let go by a thread of its own when nobody else knows it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Final

_OURS: Final = 3  # references while we look: the list's, the loop's, and that of getrefcount
_kept: list[Any] = []
_lock = threading.Lock()


def keep(group: Any) -> None:
    """Nobody may destroy it by accident, not even the end of the interpreter."""
    with _lock:
        if any(group is one for one in _kept):
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _kept.append(group)


def bury() -> None:
    """Let go of those that nobody else knows. Call it after the collector has run."""
    with _lock:
        alone = []
        for n in reversed(range(len(_kept))):
            group = _kept[n]
            if sys.getrefcount(group) == _OURS + 1:  # and that of `keep`
                alone.append(_kept.pop(n))
        group = None
    while alone:
        threading.Thread(target=_let_go, args=(alone.pop(),), name="lockstep-bury", daemon=True).start()


def _let_go(group: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def kept() -> int:
    return len(_kept)
