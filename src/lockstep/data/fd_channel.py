"""Memory from a loader process to the one that asked for it: descriptors, through a socket pair that both have.

Note [Hatches]
multiprocessing hands a descriptor over with a thread in the giving process, a socket in the file system and a handshake
of its own: 0.35 ms each, and whoever is killed meanwhile leaves a folder in /tmp. A loader process puts its descriptors
through a hatch instead, numbered, before it sends the batch; the one that receives the batch takes them out. What
belongs to a batch that never came (it could not be pickled) is thrown away with the next one.
"""

from __future__ import annotations

import os
import socket
import struct
from itertools import count
from typing import Final, final

_TAKE_WITHIN_S: Final = 60.0  # what is awaited was put in before we could know of it
_LABEL: Final = struct.Struct("<Q")
_numbers = count()
_inlets: dict[int, socket.socket] = {}  # of the hatches that lead to this process
_own: Hatch | None = None  # in a loader process: the one that leads away


@final
class Hatch:
    """Made before the loader process is. Leads to the process that made it."""

    def __init__(self) -> None:
        self.number, self._put = next(_numbers), 0
        inlet, self._outlet = socket.socketpair()
        inlet.settimeout(_TAKE_WITHIN_S)
        _inlets[self.number] = inlet

    def put(self, handle: int) -> int:
        """The label under which it is taken out. `handle` may be closed then."""
        self._put += 1
        socket.send_fds(self._outlet, [_LABEL.pack(self._put)], [handle])
        return self._put

    def close(self) -> None:
        """On the side that made it: everything that was not taken out is gone."""
        _inlets.pop(self.number).close()
        self._outlet.close()


def use(hatch: Hatch) -> None:
    """From now on, in this loader process."""
    global _own
    _own = hatch


def own() -> Hatch | None:
    return _own


def take(number: int, label: int) -> int:
    """The descriptor that was put in under this label. It is ours to close."""
    while True:
        data, handles, _, _ = socket.recv_fds(_inlets[number], _LABEL.size, 1)
        found = _LABEL.unpack(data)[0] if len(data) == _LABEL.size else None
        if found == label and handles:
            return handles[0]
        for handle in handles:
            os.close(handle)
        if found is None or found >= label:
            raise ConnectionError(f"memory {label} of a loader process is missing, and {found} came")
