"""Sends the stack of this worker's main thread to other workers of the host on request.

A worker that waits too long queries the workers it waits for. These may be stuck anywhere, so a separate thread
replies: it sleeps in `accept` until then, and costs nothing. No signal is used, since all signals belong to the
program. A missing reply is informative too: native code holds the interpreter, or the process is stopped.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from lockstep.process_identity import read_stat

REPLY_TIMEOUT_S: Final = 1.0
MAX_FRAMES: Final = 12
MAX_REPLY_BYTES: Final = 1 << 18

_lock = threading.Lock()
_service: tuple[int, str] = (0, "")  # (pid, address): a forked child has no such thread
_waits: dict[int, str] = {}  # by thread: the collective in which it waits, once that takes long


@dataclass(frozen=True)
class StackReply:
    waits: str  # the collective in which it waits for others; "" if it is elsewhere
    stack: str  # of its main thread; "" if it did not reply
    failure: str = ""  # why it did not reply


def serve() -> str:
    """Start the service unless it runs already. Returns its address, "" if it cannot be started."""
    global _service
    with _lock:
        if _service[0] != os.getpid():
            _service = (os.getpid(), _open())
        return _service[1]


def record_wait(where: str) -> None:
    """Record that this thread waits in `where`; "" ends the wait."""
    if where:
        _waits[threading.get_ident()] = where
    else:
        _waits.pop(threading.get_ident(), None)


def request_stack(address: str, pid: int) -> StackReply:
    """Ask the process `pid` of this host for its stack. Does not raise: see `StackReply.failure`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(REPLY_TIMEOUT_S)
            connection.connect("\0" + address)
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
            reply = json.loads(b"".join(parts))
            return StackReply(str(reply["waits"]), str(reply["stack"]))
    except (OSError, ValueError, KeyError, TypeError):
        return StackReply("", "", _explain_missing_reply(pid))


def _explain_missing_reply(pid: int) -> str:
    try:
        state = read_stat(pid).state
    except OSError:
        return "it cannot be asked"
    if state in "Tt":
        return "its process is stopped (SIGSTOP, or a debugger); `kill -CONT` resumes it"
    return "it does not answer: native code holds the interpreter" + (", waiting for a disk" if state == "D" else "")


def _open() -> str:
    address = f"lockstep-stack-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + address)  # an abstract address: leaves no file behind
        listener.listen(8)
    except OSError:
        return ""
    threading.Thread(target=_serve_requests, args=(listener,), name="lockstep-stack", daemon=True).start()
    return address


def _serve_requests(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.settimeout(REPLY_TIMEOUT_S)
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user in (0, os.getuid()):
                waits = _waits.get(threading.main_thread().ident or 0, "")
                reply = json.dumps({"waits": waits, "stack": main_stack()})
                connection.sendall(reply.encode()[:MAX_REPLY_BYTES])


def main_stack() -> str:
    """Return the stack of the main thread, innermost frame last, as Python prints it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
