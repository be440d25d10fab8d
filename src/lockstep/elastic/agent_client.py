"""A worker's connection to the agent of its host (`host_agent`) in an elastic run.

A thread reads the agent's messages, so that an order to leave arrives in the middle of a collective, and sends
heartbeats. Everything else is done by the training thread.
"""

from __future__ import annotations

import base64
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

from lockstep.control.json_pipe import READ_BYTES, Message, MessageParser, encode
from lockstep.elastic.membership import Generation, Position, from_json
from lockstep.errors import LockstepError

VARIABLE: Final = "LOCKSTEP_AGENT"  # the file descriptor of this worker's end of the pipe
BEAT_EVERY_S: Final = 0.25
ORDER_WITHIN_S: Final = 20.0


class GenerationEnded(LockstepError):
    """This worker has left its generation: what it was doing is done again in the next one."""


class Released(SystemExit):
    """This worker is not needed any more. Ends its program with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


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
        self._joined: JoinedGeneration | None = None
        self._leave: dict[int, str] = {}  # why this worker has to leave, by generation
        self._last_left = 0  # the number of the generation that this worker last left
        self._closing = -1
        self._released = False
        self._told_generation = 0  # the generation in which the call log was last received
        self._answers: dict[int, Message] = {}
        self._requests = 0
        self.call_log: list[tuple[str, Any]] = []  # the settled calls before the loop: (name, result)
        self.loop_began = False
        self.generation = 0  # the one that this worker is in, or was in last
        self.position: Position = (-1, 0)
        self.on_leave: Callable[[], None] = lambda: None  # called by the reading thread
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
                if self.generation in self._leave and self.generation > self._last_left:
                    self.on_leave()  # again: Gloo has tried another time to connect to a host that does not answer

    def _handle(self, message: Message) -> None:
        with self._changed:
            match message["do"]:
                case "welcome":
                    self._identity = WorkerIdentity(message["id"], message["slot"], message["wanted"])
                    self.call_log = [(what, result) for what, result in message["journal"]]
                    self.loop_began, self._told_generation = message["loop"], message["generation"]
                case "journal":
                    self.call_log += [(what, result) for what, result in message["entries"]]
                    self.loop_began, self._told_generation = message["loop"], message["generation"]
                case "lease":
                    self._lease_until_s = message["until_s"]
                case "join":
                    generation = from_json(Generation, message["generation"])
                    self._joined = JoinedGeneration(generation, generation.members.index(message["worker"]))
                case "leave":
                    self._leave.setdefault(message["generation"], message["why"])
                case "close":
                    self._closing = message["generation"]
                case "release":
                    self._released = True
                case "kv":
                    self._answers[message["id"]] = message
            self._changed.notify_all()
        if message["do"] == "leave" and message["generation"] == self.generation:
            self.on_leave()

    # -- the training thread -----------------------------------------------------------------------------------------

    def send(self, what: str, **more: Any) -> None:
        with self._send_lock, suppress(OSError):  # the reading thread notices
            self._socket.sendall(encode({"say": what, **more}))

    def wait_for_generation(self) -> JoinedGeneration:
        """Wait for the next generation that has this worker as a member. Raises Released if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._released or self._is_next_known())
            if self._released:
                raise Released
            assert self._joined is not None
            joined = self._joined
            self.generation = joined.generation.number
        self.send("inside", generation=self.generation)
        return joined

    def _is_next_known(self) -> bool:
        joined = self._joined
        return joined is not None and joined.generation.number > self.generation

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
