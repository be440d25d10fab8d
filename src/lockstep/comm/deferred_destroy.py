"""Destroys aborted process groups in a background thread.

Gloo's destructor waits for its operations. One that has missed that its connection is closed (abortable_group.py, Note
[Aborting Gloo]) ends at the group's timeout, half an hour later. The thread that drops the last reference to such a
group would block as long: the training thread in the middle of a step, if the garbage collector finds the group in a
cycle, or the interpreter at exit. So an aborted group is kept alive here, and destroyed by a thread of its own once no
other reference is left.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Final

_OWN_REFERENCES: Final = 3  # during the check: the list's, the loop variable's, and getrefcount's argument
_kept: list[Any] = []
_lock = threading.Lock()


def keep_alive(group: Any) -> None:
    """Take a reference to the group that also outlives the interpreter's shutdown. Calling again has no effect."""
    with _lock:
        if any(group is one for one in _kept):
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _kept.append(group)


def destroy_unreferenced() -> None:
    """Destroy the kept groups that have no other reference, in threads. Call it after a garbage collection."""
    with _lock:
        unreferenced = []
        for n in reversed(range(len(_kept))):
            group = _kept[n]
            if sys.getrefcount(group) == _OWN_REFERENCES + 1:  # and the one taken by `keep_alive`
                unreferenced.append(_kept.pop(n))
        group = None
    while unreferenced:
        threading.Thread(target=_release, args=(unreferenced.pop(),), name="lockstep-destroy", daemon=True).start()


def _release(group: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def count_kept() -> int:
    return len(_kept)
