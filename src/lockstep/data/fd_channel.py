"""Sends the file descriptors of shared memory from a loader process to the training process, through a socket pair.

Note [Descriptor channels]
multiprocessing sends a descriptor with a thread in the sending process, a socket in the file system and a handshake:
0.35 ms each, and a process that is killed meanwhile leaves a folder in /tmp. Here a loader process sends its
descriptors, numbered, through a channel before it sends the batch; the process that receives the batch reads them from
the channel. Descriptors of a batch that was never sent (it could not be pickled) are closed when the next one is read.
"""

from __future__ import annotations

import os
import socket
import struct
from itertools import count
from typing import Final, final

_RECEIVE_TIMEOUT_S: Final = 60.0  # never reached normally: a descriptor is sent before the batch that needs it
_LABEL: Final = struct.Struct("<Q")
_numbers = count()
_receivers: dict[int, socket.socket] = {}  # receiving ends of the channels that this process created, by number
_own: FdChannel | None = None  # in a loader process: the channel through which it sends


@final
class FdChannel:
    """A channel from a loader process to the process that creates it, which does so before it starts the loader."""

    def __init__(self) -> None:
        self.number, self._sent = next(_numbers), 0
        receiver, self._sender = socket.socketpair()
        receiver.settimeout(_RECEIVE_TIMEOUT_S)
        _receivers[self.number] = receiver

    def send(self, handle: int) -> int:
        """Send a descriptor and return its label, for `receive`. The caller may close `handle` afterwards."""
        self._sent += 1
        socket.send_fds(self._sender, [_LABEL.pack(self._sent)], [handle])
        return self._sent

    def close(self) -> None:
        """Called by the process that created the channel. Descriptors that were not received are closed."""
        _receivers.pop(self.number).close()
        self._sender.close()


def set_own_channel(channel: FdChannel) -> None:
    """Make this loader process send its descriptors through `channel`."""
    global _own
    _own = channel


def own_channel() -> FdChannel | None:
    return _own


def receive(number: int, label: int) -> int:
    """Return the descriptor with this label from channel `number`. The caller closes it.

    Raises ConnectionError if it is missing.
    """
    while True:
        data, handles, _, _ = socket.recv_fds(_receivers[number], _LABEL.size, 1)
        found = _LABEL.unpack(data)[0] if len(data) == _LABEL.size else None
        if found == label and handles:
            return handles[0]
        for handle in handles:
            os.close(handle)
        if found is None or found >= label:
            raise ConnectionError(f"memory {label} of a loader process is missing, and {found} came")
