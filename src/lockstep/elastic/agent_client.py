"""A worker's seat in an elastic run: what its supervisor tells it, and what it tells its supervisor.

A thread listens, so that an order to leave is heard in the middle of a collective, and gives signs of life. Everything
else is done by the thread that trains.
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

from lockstep.control.json_pipe import READ_BYTES, Lines, Message, encode
from lockstep.elastic.membership import Generation, Position, from_json
from lockstep.errors import LockstepError

VARIABLE: Final = "LOCKSTEP_SEAT"  # descriptor of our end of the line
BEAT_EVERY_S: Final = 0.25
ORDER_WITHIN_S: Final = 20.0


class Left(LockstepError):
    """This worker has left its generation: what it was doing is done again in the next one."""


class Released(SystemExit):
    """This worker is not needed any more. Ends its program, with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Welcome:
    """Who we are, for the whole life of this process."""

    id: str
    slot: int  # among the workers of this host, for choosing a GPU
    wanted: int  # workers in all


@dataclass(frozen=True)
class Joining:
    """The generation that we are taken into."""

    generation: Generation
    rank: int

    @property
    def size(self) -> int:
        return len(self.generation.members)

    @property
    def local_size(self) -> int:
        """Members on our host: an id is "<host>.<serial>"."""
        hosts = [member.rpartition(".")[0] for member in self.generation.members]
        return hosts.count(hosts[self.rank])


class Seat:
    """Made once per process, by `take`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._lines = end, Lines()
        self._speaking = threading.Lock()
        self._news = threading.Condition()
        self._welcome: Welcome | None = None
        self._lease_until_s = 0.0
        self._joining: Joining | None = None
        self._leave: dict[int, str] = {}  # by generation
        self._last_left = 0  # generation
        self._closing = -1
        self._released = False
        self._told = 0  # the generation that was current when we heard the journal
        self._answers: dict[int, Message] = {}
        self._asked = 0
        self.journal: list[tuple[str, Any]] = []  # calls before the loop that are settled: what, result
        self.loop_began = False
        self.generation = 0  # that we are inside, or were last
        self.position: Position = (-1, 0)
        self.on_leave: Callable[[], None] = lambda: None  # called by the listening thread
        self.is_calling: Callable[[], bool] = lambda: False  # whether the program is in a call of its Run
        self._thread = threading.Thread(target=self._listen, name="lockstep-seat", daemon=True)

    def start(self) -> Welcome:
        if self._welcome is not None:
            raise LockstepError(
                "a program has one Run if it is started with --min or --max: what comes later could not be told to a "
                "worker that joins"
            )
        self._thread.start()
        self.say("hello", pid=os.getpid())
        with self._news:
            if not self._news.wait_for(lambda: self._welcome is not None, ORDER_WITHIN_S):
                raise LockstepError(f"the supervisor said nothing for {ORDER_WITHIN_S:g} s")
        assert self._welcome is not None
        return self._welcome

    # -- listening ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        beat_s = 0.0
        while True:
            ready, _, _ = select.select([self._socket], [], [], BEAT_EVERY_S)
            try:
                data = self._socket.recv(READ_BYTES) if ready else None
            except OSError:
                data = b""
            if data == b"":  # the supervisor is gone; nothing that we do from here on would count
                os.kill(os.getpid(), signal.SIGKILL)
            for message in self._lines.feed(data) if data else ():
                self._hear(message)
            if time.monotonic() - beat_s > BEAT_EVERY_S:
                beat_s = time.monotonic()
                self.say("beat", position=self.position, calling=self.is_calling())
                if self.generation in self._leave and self.generation > self._last_left:
                    self.on_leave()  # again: Gloo has tried another time to connect to a host that does not answer

    def _hear(self, message: Message) -> None:
        with self._news:
            match message["do"]:
                case "welcome":
                    self._welcome = Welcome(message["id"], message["slot"], message["wanted"])
                    self.journal = [(what, result) for what, result in message["journal"]]
                    self.loop_began, self._told = message["loop"], message["generation"]
                case "journal":
                    self.journal += [(what, result) for what, result in message["entries"]]
                    self.loop_began, self._told = message["loop"], message["generation"]
                case "lease":
                    self._lease_until_s = message["until_s"]
                case "join":
                    generation = from_json(Generation, message["generation"])
                    self._joining = Joining(generation, generation.members.index(message["worker"]))
                case "leave":
                    self._leave.setdefault(message["generation"], message["why"])
                case "close":
                    self._closing = message["generation"]
                case "release":
                    self._released = True
                case "kv":
                    self._answers[message["id"]] = message
            self._news.notify_all()
        if message["do"] == "leave" and message["generation"] == self.generation:
            self.on_leave()

    # -- what the training thread asks -------------------------------------------------------------------------------

    def say(self, what: str, **more: Any) -> None:
        with self._speaking, suppress(OSError):  # the listener notices
            self._socket.sendall(encode({"say": what, **more}))

    def await_join(self) -> Joining:
        """The next generation that has us as a member."""
        with self._news:
            self._news.wait_for(lambda: self._released or self._is_called())
            if self._released:
                raise Released
            assert self._joining is not None
            joining = self._joining
            self.generation = joining.generation.number
        self.say("inside", generation=self.generation)
        return joining

    def _is_called(self) -> bool:
        joining = self._joining
        return joining is not None and joining.generation.number > self.generation

    def await_journal(self, count: int) -> bool:
        """Whether entry `count - 1` is there: waits for it while the others are past it."""
        with self._news:
            self._news.wait_for(lambda: len(self.journal) >= count or not self.loop_began, ORDER_WITHIN_S)
            return len(self.journal) >= count

    def ready(self, position: Position) -> None:
        self.position = position
        self.say("ready", position=position, told=self._told)

    def left(self, position: Position) -> None:
        self.position, self._last_left = position, self.generation
        with self._news:  # whatever was asked of a generation before is answered by this
            self._answers.clear()
        self.say("left", generation=self.generation, position=position)

    def why_left(self, *, within_s: float = 0.0) -> str | None:
        """Why we were told to leave the generation we are in; None if we were not, and are not soon."""
        with self._news:
            self._news.wait_for(lambda: self.generation in self._leave, within_s)
            return self._leave.get(self.generation)

    @property
    def is_closing(self) -> bool:
        return self._closing == self.generation

    def check_commit(self) -> None:
        """Before anything that cannot be taken back. Waits while our host has lost its lease."""
        while (why := self.why_left()) is None and time.monotonic() >= self._lease_until_s:
            self.why_left(within_s=0.05)
        if why is not None:
            raise Left(f"generation {self.generation} has ended: {why}")

    def may_commit(self) -> bool:
        return self.why_left() is None and time.monotonic() < self._lease_until_s

    def ask(self, op: str, key: str, value: bytes | None = None, **more: Any) -> Any:
        """Something of the records of this generation. Raises Left if it ends meanwhile."""
        with self._news:
            self._asked += 1
            number = self._asked
        coded = None if value is None else base64.b64encode(value).decode()
        self.say("kv", id=number, generation=self.generation, op=op, key=key, value=coded, **more)
        with self._news:
            self._news.wait_for(lambda: number in self._answers or self.generation in self._leave or self._released)
            if self._released and number not in self._answers:  # the supervisor may have ended with the run
                raise Left("this worker was released: it is in no generation any more")
            # Also if there is an answer: whoever asks again and again for what will never be there must hear it too.
            if self.generation in self._leave:
                raise Left(f"generation {self.generation} has ended: {self._leave[self.generation]}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]


_seat: Seat | None = None


def take() -> Seat | None:
    """Our seat, if a supervisor has kept one for us. The same one for the whole life of this process."""
    global _seat
    text = os.environ.pop(VARIABLE, "")  # not for our children
    if text:
        _seat = Seat(socket.socket(fileno=int(text)))
    return _seat
