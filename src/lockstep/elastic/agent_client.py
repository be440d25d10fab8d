"""A worker's connection to the agent of its host (`host_agent`) in an elastic run: AgentClient, and the pipe.

A message is one line of JSON, over a pair of connected sockets. The worker inherits its end, so no other process can
use it: it needs neither a port nor a secret. When either side dies, the other reads the end of the stream.

In the worker a thread reads the agent's messages, so that an order to leave arrives in the middle of a collective, and
sends heartbeats. Everything else is done by the training thread.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from lockstep.elastic.membership import Generation, Position
from lockstep.elastic.record_json import from_json
from lockstep.errors import LockstepError

VARIABLE: Final = "LOCKSTEP_AGENT"  # the file descriptor of this worker's end of the pipe
RESTART_STATUS: Final = 76  # exit status of a worker that another is to replace, because some worker computed wrongly
BEAT_EVERY_S: Final = 0.25
ORDER_WITHIN_S: Final = 20.0
LONGEST_LINE_BYTES: Final = 16 << 20
MAX_UNSENT_BYTES: Final = 64 << 20
READ_BYTES: Final = 1 << 16

Message = dict[str, Any]


class JsonPipeError(Exception):
    """The other side sent something that is not a message."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class MessageParser:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LONGEST_LINE_BYTES:
            raise JsonPipeError(f"a line of more than {LONGEST_LINE_BYTES} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as error:
                raise JsonPipeError(f"a line that is not JSON: {error}") from None
            if not isinstance(message, dict):
                raise JsonPipeError(f"a line that is not an object: {line[:80]!r}")
            messages.append(message)
        return messages


class JsonPipe:
    """The host agent's end. It never blocks, because a worker that was stopped does not read."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._parser = sock, MessageParser()
        self._unsent = b""
        self.ended = False
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        if not self.ended:
            self._unsent += encode(message)
            self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self.ended = True
        except OSError:
            self.ended = True

    def receive(self) -> list[Message]:
        """The messages that have arrived. Sets `ended` when no more will follow."""
        messages: list[Message] = []
        try:
            while not self.ended:
                data = self._socket.recv(READ_BYTES)
                self.ended = not data
                messages += self._parser.feed(data)
        except BlockingIOError:
            pass
        except (OSError, JsonPipeError):
            self.ended = True
        return messages

    def close(self) -> None:
        self.ended = True
        self._socket.close()


class GenerationEnded(LockstepError):
    """This worker has left its generation: what it was doing is done again in the next one."""


@dataclass(frozen=True)
class WorkerIdentity:
    """What stays the same for this worker as long as its process exists."""

    id: str
    slot: int  # among the workers of this host, for choosing a GPU
    wanted: int  # number of workers that the run wants in all


@dataclass(frozen=True)
class JoinedGeneration:
    """A generation that has this worker as a member, and its rank there."""

    generation: Generation
    rank: int

    @property
    def size(self) -> int:
        return len(self.generation.members)

    @property
    def local_size(self) -> int:
        """Number of members on this host: an id is "<host>.<serial>"."""
        hosts = [member.rpartition(".")[0] for member in self.generation.members]
        return hosts.count(hosts[self.rank])


class AgentClient:
    """The worker's end of the pipe. Created once per process, by `current`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._parser = sock, MessageParser()
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._identity: WorkerIdentity | None = None
        self._lease_until_s = 0.0
        self._joined = JoinedGeneration(Generation(0), rank=0)  # until the first order to join
        self._leave: dict[int, str] = {}  # why this worker has to leave, by generation
        self._last_left = 0  # the number of the generation that this worker last left
        self._closing = -1
        self.is_shrinking = False  # the generation that is closing: see `Generation.shrinks`
        self._released = False
        self._told_generation = 0  # the generation in which the call log was last received
        self._answers: dict[int, Message] = {}
        self._requests = 0
        self.call_log: list[tuple[str, Any]] = []  # the settled calls before the loop: (name, result)
        self.loop_began = False
        self.generation = 0  # the one that this worker is in, or was in last
        self.position: Position = (-1, 0)
        self.on_leave: Callable[[], None] = lambda: None  # called by the reading thread
        self._was_signalled = False  # set by a signal handler, which must not send: the thread may hold the lock
        self.on_stop: Callable[[], None] = lambda: None  # the whole run is to end; called by the reading thread
        self.is_calling: Callable[[], bool] = lambda: False  # whether the program is in a call of its Run
        self._thread = threading.Thread(target=self._read_messages, name="lockstep-agent", daemon=True)

    def start(self) -> WorkerIdentity:
        if self._identity is not None:
            raise LockstepError(
                "a program has one Run if it is started with --min or --max: the calls of a second one could not be "
                "sent to a worker that joins"
            )
        self._thread.start()
        self.send("hello", pid=os.getpid())
        with self._changed:
            if not self._changed.wait_for(lambda: self._identity is not None, ORDER_WITHIN_S):
                raise LockstepError(f"the launcher did not answer for {ORDER_WITHIN_S:g} s")
        assert self._identity is not None
        return self._identity

    # -- the reading thread ------------------------------------------------------------------------------------------

    def _read_messages(self) -> None:
        beat_s = 0.0
        while True:
            ready, _, _ = select.select([self._socket], [], [], BEAT_EVERY_S)
            try:
                data = self._socket.recv(READ_BYTES) if ready else None
            except OSError:
                data = b""
            if data == b"":  # the agent is gone; nothing that this worker does from here on would count
                os.kill(os.getpid(), signal.SIGKILL)
            for message in self._parser.feed(data) if data else ():
                self._handle(message)
            if time.monotonic() - beat_s > BEAT_EVERY_S:
                beat_s = time.monotonic()
                self.send("beat", position=self.position, calling=self.is_calling())
                if self._was_signalled:
                    self._was_signalled = False
                    self.send("signal")
                if self.generation in self._leave and self.generation > self._last_left:
                    self.on_leave()  # again: Gloo has tried another time to connect to a host that does not answer

    def _handle(self, message: Message) -> None:
        with self._changed:
            match message["do"]:
                case "welcome":
                    self._identity = WorkerIdentity(message["id"], message["slot"], message["wanted"])
                    self._read_call_log(message, message["call_log"])
                case "call_log":
                    self._read_call_log(message, message["entries"])
                case "lease":
                    self._lease_until_s = message["until_s"]
                case "join":
                    generation = from_json(Generation, message["generation"])
                    self._joined = JoinedGeneration(generation, generation.members.index(message["worker"]))
                case "leave":
                    self._leave.setdefault(message["generation"], message["why"])
                case "close":
                    self._closing, self.is_shrinking = message["generation"], message["shrinks"]
                case "release":
                    self._released = True
                case "stop":
                    self.on_stop()
                case "kv":
                    self._answers[message["id"]] = message
            self._changed.notify_all()
        if message["do"] == "leave" and message["generation"] == self.generation:
            self.on_leave()

    def _read_call_log(self, message: Message, entries: list[Any]) -> None:
        self.call_log += [(what, result) for what, result in entries]
        self.loop_began, self._told_generation = message["loop"], message["generation"]

    # -- the training thread -----------------------------------------------------------------------------------------

    def send(self, what: str, **more: Any) -> None:
        with self._send_lock, suppress(OSError):  # the reading thread notices
            self._socket.sendall(encode({"say": what, **more}))

    def note_signal(self) -> None:
        """Tell the agent that this worker was sent a signal to end; it decides what that means."""
        self._was_signalled = True

    def wait_for_generation(self) -> JoinedGeneration:
        """Wait for the next generation that has this worker as a member. Raises SystemExit(0) if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._released or self._joined.generation.number > self.generation)
            if self._released:
                raise SystemExit(0)  # this worker is not needed any more
            joined = self._joined
            self.generation = joined.generation.number
        self.send("inside", generation=self.generation)
        return joined

    def wait_for_call(self, count: int) -> bool:
        """Wait until the call log has `count` entries, unless the others are not in their loop yet.

        Returns whether it has them.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self.call_log) >= count or not self.loop_began, ORDER_WITHIN_S)
            return len(self.call_log) >= count

    def report_ready(self, position: Position) -> None:
        self.position = position
        self.send("ready", position=position, told=self._told_generation)

    def report_left(self, position: Position) -> None:
        self.position, self._last_left = position, self.generation
        with self._changed:  # answers that belong to an earlier generation are of no use any more
            self._answers.clear()
        self.send("left", generation=self.generation, position=position)

    def leave_reason(self, *, within_s: float = 0.0) -> str | None:
        """Why this worker was ordered to leave its generation; None if no order arrives within `within_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.generation in self._leave, within_s)
            return self._leave.get(self.generation)

    @property
    def is_closing(self) -> bool:
        return self._closing == self.generation

    def check_commit(self) -> None:
        """Call it before anything that cannot be undone. Waits while the lease of this host has expired.

        Raises GenerationEnded if the generation has ended.
        """
        while (why := self.leave_reason()) is None and time.monotonic() >= self._lease_until_s:
            self.leave_reason(within_s=0.05)
        if why is not None:
            raise GenerationEnded(f"generation {self.generation} has ended: {why}")

    def may_commit(self) -> bool:
        return self.leave_reason() is None and time.monotonic() < self._lease_until_s

    def request(self, op: str, key: str, value: bytes | None = None, **more: Any) -> Any:
        """Run an operation on the store of this generation and return its result.

        Raises GenerationEnded if the generation ends meanwhile, ValueError if the store refuses the key or the value.
        """
        with self._changed:
            self._requests += 1
            number = self._requests
        coded = None if value is None else base64.b64encode(value).decode()
        self.send("kv", id=number, generation=self.generation, op=op, key=key, value=coded, **more)
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self.generation in self._leave or self._released)
            if self._released and number not in self._answers:  # the agent may have ended with the run
                raise GenerationEnded("this worker was released: it is in no generation any more")
            # Even if there is an answer: a caller that polls for a key which will never exist must learn of the end.
            if self.generation in self._leave:
                raise GenerationEnded(f"generation {self.generation} has ended: {self._leave[self.generation]}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]


_client: AgentClient | None = None


def current() -> AgentClient | None:
    """The agent client of this process, always the same one; None if no agent started this process."""
    global _client
    text = os.environ.pop(VARIABLE, "")  # child processes must not inherit it
    if text:
        _client = AgentClient(socket.socket(fileno=int(text)))
    return _client
