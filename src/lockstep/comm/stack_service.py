"""Where this worker is in its program, told to whoever asks on this host.

A worker that waits too long asks those who are missing. The one asked may be stuck in anything, so a thread of its own
answers: it sleeps in `accept` until then, and costs nothing. No signal is used, since all that one could use are the
program's. Not answered is answered too: the interpreter is held by native code, or the process is stopped.
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

from lockstep.world.process_identity import read_stat

ANSWER_WITHIN_S: Final = 1.0
FRAMES: Final = 12
LARGEST: Final = 1 << 18

_lock = threading.Lock()
_of_process: tuple[int, str] = (0, "")  # (pid, address): a forked child has no such thread
_waits: dict[int, str] = {}  # what each thread of ours waits for, once that takes long


@dataclass(frozen=True)
class Answer:
    waits: str  # the collective in which it waits for others; "" if it is elsewhere
    stack: str  # of its main thread; "" if it did not answer
    silence: str = ""  # why it did not


def serve() -> str:
    """The address at which we answer; "" if we cannot."""
    global _of_process
    with _lock:
        if _of_process[0] != os.getpid():
            _of_process = (os.getpid(), _open())
        return _of_process[1]


def note_wait(where: str) -> None:
    """This thread waits in `where`; "": no longer."""
    if where:
        _waits[threading.get_ident()] = where
    else:
        _waits.pop(threading.get_ident(), None)


def ask(address: str, pid: int) -> Answer:
    """What the process `pid` of this host is doing."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(ANSWER_WITHIN_S)
            line.connect("\0" + address)
            parts = []
            while part := line.recv(1 << 16):
                parts.append(part)
            told = json.loads(b"".join(parts))
            return Answer(str(told["waits"]), str(told["stack"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Answer("", "", _explain_silence(pid))


def _explain_silence(pid: int) -> str:
    try:
        state = read_stat(pid).state
    except OSError:
        return "it cannot be asked"
    if state in "Tt":
        return "its process is stopped (SIGSTOP, or a debugger); `kill -CONT` lets it go on"
    return "it does not answer: native code holds the interpreter" + (", waiting for a disk" if state == "D" else "")


def _open() -> str:
    address = f"lockstep-stack-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.bind("\0" + address)  # in no folder: nothing stays behind
        door.listen(8)
    except OSError:
        return ""
    threading.Thread(target=_keep_answering, args=(door,), name="lockstep-stack", daemon=True).start()
    return address


def _keep_answering(door: socket.socket) -> None:
    while True:
        try:
            line, _ = door.accept()
        except OSError:
            return
        with line, suppress(OSError):
            line.settimeout(ANSWER_WITHIN_S)
            _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user in (0, os.getuid()):
                line.sendall(json.dumps({"waits": _main_waits(), "stack": main_stack()}).encode()[:LARGEST])


def _main_waits() -> str:
    return _waits.get(threading.main_thread().ident or 0, "")


def main_stack() -> str:
    """Innermost last, as Python prints it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-FRAMES:])
