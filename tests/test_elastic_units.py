"""The parts of an elastic run, one by one: pipes, restarts, the workers of a host that are played, faults, intervals.

Nothing is started here. tests/test_recovery.py has the real processes.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep import faults
from lockstep.comm import abortable_wait
from lockstep.comm.abortable_group import ConnectionTracker
from lockstep.control.store import LARGEST_VALUE_BYTES, ClientOptions, ControlStore, LocalStoreClient
from lockstep.elastic import agent_client as lines
from lockstep.elastic.agent_client import JsonPipe, JsonPipeError, MessageParser, encode
from lockstep.elastic.generation_groups import GenerationGroups
from lockstep.elastic.host_workers import HostWorkers
from lockstep.elastic.membership import GenerationPhase, Standing, Want
from lockstep.elastic.records import PREFIX, Keys, Records
from lockstep.elastic.worker_state import (
    FEWEST,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PER_WORKER,
    ROUNDS,
    WITHIN_S,
    WorkerFailure,
    start_at_s,
    why_give_up,
)
from lockstep.errors import PeerLostError
from lockstep.recovery.checkpointing import CheckpointSaver
from lockstep.recovery.elastic_calls import LARGEST_RESULT_BYTES
from lockstep.settings import Settings
from lockstep.step.run_options import read_interval

CALL_LOG, KEYS = Keys(PREFIX).call_log, Keys(PREFIX).values

# ---- lines -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[JsonPipe, socket.socket]]:
    """The host agent's end, and the worker's, which blocks for a while at most."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    with ours, theirs:
        yield JsonPipe(ours), theirs


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_messages_may_come_in_any_pieces(size: int) -> None:
    sent = [{"say": "hello", "pid": 3}, {"say": "kv", "value": "ä\n\\"}, {}]
    data = b"".join(map(encode, sent))
    cutter, got = MessageParser(), []
    for at in range(0, len(data), size):
        got += cutter.feed(data[at : at + size])
    assert got == sent


@pytest.mark.parametrize("garbage", [b"no json\n", b"[1]\n", b"3\n", b"null\n", b"\n", b'{"a":1\n', b"\xff\n"])
def test_garbage_is_refused(garbage: bytes) -> None:
    cutter = MessageParser()
    assert cutter.feed(encode({"say": "beat"})) == [{"say": "beat"}]
    with pytest.raises(JsonPipeError, match="a line that is not"):
        cutter.feed(garbage)


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE_BYTES", 100)
    cutter = MessageParser()
    assert cutter.feed(b'"' + 98 * b"x") == []
    with pytest.raises(JsonPipeError, match="more than 100 bytes"):
        cutter.feed(b"xx")


def test_a_line_brings_messages_both_ways_and_ends_with_the_other_side(pair: tuple[JsonPipe, socket.socket]) -> None:
    pipe, worker = pair
    assert pipe.receive() == []
    worker.sendall(encode({"say": "hello"}) + encode({"say": "beat"}) + b'{"say":')
    assert pipe.receive() == [{"say": "hello"}, {"say": "beat"}]
    pipe.send({"do": "leave"})
    assert worker.recv(100) == b'{"do":"leave"}\n'
    worker.sendall(b'"end"}\n')
    worker.close()
    assert not pipe.ended
    assert pipe.receive() == [{"say": "end"}]
    assert pipe.ended
    assert pipe.receive() == []
    pipe.send({"do": "leave"})  # not read by anything: no error, and nothing waits
    assert not pipe.has_unsent


def test_garbage_ends_a_line(pair: tuple[JsonPipe, socket.socket]) -> None:
    pipe, worker = pair
    worker.sendall(b"what?\n")
    assert pipe.receive() == []
    assert pipe.ended


def test_a_worker_that_does_not_read_blocks_no_other(pair: tuple[JsonPipe, socket.socket]) -> None:
    pipe, worker = pair
    began_s = time.monotonic()
    sent = 0
    while not pipe.has_unsent:
        pipe.send({"number": sent, "text": "x" * 1000})
        sent += 1
        assert sent < 100_000
    for _ in range(100):
        pipe.send({"number": sent, "text": "x" * 1000})
        sent += 1
    assert time.monotonic() - began_s < 5
    assert not pipe.ended
    # It is continued, and hears all of it, in order.
    cutter, got = MessageParser(), []
    while len(got) < sent:
        pipe.flush()
        got += cutter.feed(worker.recv(1 << 16))
    assert [one["number"] for one in got] == list(range(sent))
    assert not pipe.has_unsent


def test_a_worker_that_never_reads_again_is_given_up(
    pair: tuple[JsonPipe, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_UNSENT_BYTES", 10_000)
    pipe, _ = pair
    for _ in range(100_000):
        pipe.send({"text": "x" * 1000})
        if pipe.ended:
            return
    raise AssertionError("it waits without end")


# ---- restarts --------------------------------------------------------------------------------------------------------


def killed(at_s: float, newest: int, here: int | None = None) -> WorkerFailure:
    return WorkerFailure(0, at_s, newest, newest if here is None else here)


def failed(at_s: float, newest: int, error: str = "ValueError: x") -> WorkerFailure:
    return WorkerFailure(0, at_s, newest, newest, error)


@pytest.mark.parametrize(
    ("failures", "workers", "why"),
    [
        ([], 2, None),
        ([failed(1, 5)], 2, None),
        ([failed(1, 5), failed(2, 5)], 2, "2 workers failed with the same error, and no step was made in between"),
        ([failed(1, 5), failed(2, 5, "KeyError: 1")], 2, None),
        ([failed(1, 5), failed(2, 5, "KeyError: 1"), failed(3, 5)], 2, "2 workers failed with the same error"),
        ([failed(1, 5), failed(2, 6)], 2, None),  # a step was made
        ([failed(1, 5), killed(2, 5), failed(3, 5)], 2, "2 workers failed with the same error"),
        ([killed(1, 5), killed(2, 5)], 2, None),
        ([killed(n, 5) for n in range(FEWEST - 1)], 1, None),
        ([killed(n, 5) for n in range(FEWEST)], 1, f"{FEWEST} workers were lost, and no step was made in between"),
        ([killed(n, 5) for n in range(8 * PER_WORKER - 1)], 8, None),
        ([killed(n, 5) for n in range(8 * PER_WORKER)], 8, f"{8 * PER_WORKER} workers were lost"),
        ([killed(n, n) for n in range(1000)], 1, None),  # a run that makes progress may lose any number
        # It goes back to a checkpoint, and makes steps again: always to the same one, or to others.
        ([killed(n, 24, (23, 24)[n % 2]) for n in range(2 * FEWEST - 1)], 1, f"{FEWEST} workers were lost"),
        ([killed(n, 24, 24 - n) for n in range(ROUNDS * FEWEST - 1)], 1, None),
        ([killed(n, 24, 24 - n) for n in range(ROUNDS * FEWEST)], 1, "the run came no further than step 24"),
        ([killed(n, 24 + n // 9, n % 9) for n in range(1000)], 1, None),
        ([failed(n, n) for n in range(FEWEST - 1)], 1, None),
        ([failed(n, n) for n in range(FEWEST)], 9, f"{FEWEST} workers failed with the same error within 120 s"),
        ([failed(n * WITHIN_S, n) for n in range(1000)], 1, None),
        ([failed(n, n, str(n)) for n in range(1000)], 1, None),
        ([failed(n, -1) for n in range(2)], 4, "2 workers failed with the same error"),  # before the first step
    ],
)
def test_when_a_run_is_given_up(failures: list[WorkerFailure], workers: int, why: str | None) -> None:
    said = why_give_up(failures, workers)
    assert (said is None) if why is None else (said is not None and why in said)


@pytest.mark.parametrize(
    ("failures", "at_s"),
    [
        ([], 0.0),
        ([killed(7, 5)], 0.0),
        ([failed(7, 5)], 0.0),
        ([killed(7, 5), killed(8, 5)], 8.0),  # being killed is no reason to wait
        ([failed(7, 4), failed(8, 5)], 8 + 2 * FIRST_PAUSE_S),  # a step was made, but it fails alike
        ([failed(7, 4), failed(8, 5, "KeyError: 1")], 0.0),
        ([failed(7, 4), failed(8 + WITHIN_S, 5)], 0.0),
        ([failed(7, 5), failed(8, 5, "KeyError: 1")], 8 + 2 * FIRST_PAUSE_S),
        ([failed(7, 5), killed(8, 5)], 8 + FIRST_PAUSE_S),
        ([failed(7, 5, str(n)) for n in range(4)], 7 + 8 * FIRST_PAUSE_S),
        ([failed(7, 5, str(n)) for n in range(40)], 7 + LONGEST_PAUSE_S),
    ],
)
def test_when_the_next_worker_is_started(failures: list[WorkerFailure], at_s: float) -> None:
    assert start_at_s(failures) == at_s


# ---- the workers of a host, played by the test -----------------------------------------------------------------------


class RecordedEvents:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def print(self, text: str) -> None:
        self.said.append(text)

    def record(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))


class Stage:
    """HostWorkers with a real store, and what it has done."""

    def __init__(self, want: Want, *, store: ControlStore | None = None, host: str = "h0") -> None:
        self.store, self.events = store or ControlStore(), RecordedEvents()
        client = LocalStoreClient(
            self.store, options=ClientOptions(prefix=PREFIX, ttl_s=5.0), on_lost=self.events.print
        )
        self.records = Records(host, client, want)
        self.host_workers = HostWorkers(self.records, self.events)
        self.actors: list[Actor] = []

    def act(self) -> list[str]:
        """Returns who is to be killed."""
        for actor in self.actors:
            while True:
                actor.pipe.flush()
                for message in actor.local.pipe.receive():
                    self.host_workers.handle(actor.local, message)
                if not actor.pipe.has_unsent:
                    break
        kills = self.host_workers.act(time.monotonic())
        for actor in self.actors:
            actor.listen()
            while actor.local.pipe.has_unsent:
                actor.local.pipe.flush()
                actor.listen()
        return [local.id for local, _ in kills]

    def enter(self, slot: int = 0) -> Actor:
        """A process is started, and comes to its Run."""
        actor = Actor(self, slot)
        self.actors.append(actor)
        actor.say("hello", pid=100 + len(self.actors))
        self.act()
        return actor

    def cast(self, count: int) -> list[Actor]:
        """Generation 1, inside, at the top of step 0."""
        actors = [self.enter(slot) for slot in range(count)]
        for actor in actors:
            actor.ready()
        self.act()
        for actor in actors:
            actor.inside()
        self.act()
        return actors

    @property
    def members(self) -> tuple[str, ...]:
        return self.records.generation.members

    def keys(self, prefix: str) -> list[str]:
        return sorted(self.store.list(prefix))

    def close(self) -> None:
        for actor in self.actors:
            actor.pipe.close()
            actor.local.pipe.close()


class Actor:
    """A worker that does what the test says, at its end of a real line."""

    def __init__(self, stage: Stage, slot: int) -> None:
        ours, theirs = socket.socketpair()
        self.stage, self.pipe = stage, JsonPipe(theirs)
        self.local = stage.host_workers.add(JsonPipe(ours), slot)
        self.heard: list[dict[str, Any]] = []
        self._asked = 0

    @property
    def id(self) -> str:
        return self.local.id

    def say(self, what: str, **more: Any) -> None:
        self.pipe.send({"say": what, **more})

    def listen(self) -> None:
        self.heard += self.pipe.receive()

    def told(self, do: str) -> list[dict[str, Any]]:
        """All it was ever told of this kind."""
        return [message for message in self.heard if message["do"] == do]

    def ready(self, calls: int = 0, told: int = 0) -> None:
        self.say("ready", position=[-1, calls], told=told)

    def inside(self) -> None:
        self.say("inside", generation=self.told("join")[-1]["generation"]["number"])

    def left(self, top: int, calls: int = 0) -> None:
        self.say("left", generation=self.told("join")[-1]["generation"]["number"], position=[top, calls])

    def end(self) -> None:
        """Its Run is over, and its process ends."""
        self.say("done")
        self.stage.act()
        assert not self.stage.host_workers.remove(self.id, done=True)

    def quit(self, top: int, calls: int = 0, *, calling: bool = False) -> None:
        """It leaves its Run by sys.exit(0), and its process ends."""
        self.say("leaves", position=[top, calls], calling=calling)
        self.stage.act()
        assert not self.stage.host_workers.remove(self.id, done=True)

    def ask(self, op: str, key: str, value: bytes | None = None, *, generation: int = 1, **more: Any) -> int:
        self._asked += 1
        coded = None if value is None else base64.b64encode(value).decode()
        self.say("kv", id=self._asked, generation=generation, op=op, key=key, value=coded, **more)
        self.stage.act()
        return self._asked

    def answer(self, number: int) -> Any:
        """[what was answered]; [] if nothing was."""
        return [message["value"] for message in self.told("kv") if message["id"] == number]


@pytest.fixture
def stages() -> Iterator[Any]:
    made: list[Stage] = []

    def make(workers: int = 2, least: int = 1, most: int = 4, **more: Any) -> Stage:
        made.append(Stage(Want(workers, least, most), **more))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def coded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def test_where_a_run_is_and_how_far_it_has_come(stages: Any) -> None:
    """After all were lost it is where it began, and makes steps that were made before."""
    stage = stages(1, 1, 1)
    (first,) = stage.cast(1)
    first.say("beat", position=[7, 0])
    stage.act()
    assert (stage.host_workers.current, stage.host_workers.newest) == ((7, 0), (7, 0))
    stage.host_workers.remove(first.id, done=False)
    second = stage.enter()
    second.ready()
    stage.act()
    assert second.id in stage.members
    assert stage.host_workers.current < (1, 0)
    second.say("beat", position=[3, 0])
    stage.act()
    assert (stage.host_workers.current, stage.host_workers.newest) == ((3, 0), (7, 0))


def test_a_run_gets_no_more_workers_than_it_can_use(stages: Any) -> None:
    stage = stages(workers=4)
    first, second, *others = stage.cast(4)
    assert len(stage.members) == 4
    first.say("training", workers=2, compiles=False)
    stage.act()
    assert stage.host_workers.want == Want(2, 1, 2)
    assert first.told("close")
    for actor in (first, second, *others):
        actor.left(3)
    stage.act()
    assert stage.members == (first.id, second.id)


def test_whom_an_earlier_run_blamed_is_nothing_to_us(stages: Any) -> None:
    """An etcd keeps it. It is taken away before the first host is listed, and does not count until then."""
    stage = stages(workers=1)
    stage.store.cas(stage.records.keys.failure, {"status": 1, "why": "long ago"}, 0, lease=None)
    assert stage.records.failure is None
    stage.enter().ready()
    stage.act()
    stage.act()
    assert stage.records.failure is None
    assert len(stage.members) == 1
    stage.records.publish_failure(status=3, why="now")
    stage.act()
    assert stage.records.failure == {"status": 3, "why": "now"}


def test_a_worker_that_hears_of_a_generation_when_it_is_over_is_not_waited_for(stages: Any) -> None:
    """Another host formed it with one of ours and broke it, before we had looked."""
    theirs = stages(workers=2)
    ours = stages(workers=2, store=theirs.store, host="h1")
    lost, mine = theirs.enter(), ours.enter()
    mine.ready()
    ours.act()
    lost.ready()
    theirs.act()
    assert theirs.members == (lost.id, mine.id)
    theirs.host_workers.remove(lost.id, done=False)
    theirs.act()
    for stage in (ours, theirs, ours, theirs, ours):
        stage.act()
    assert ours.records.generation.number == 2
    assert ours.members == (mine.id,)
    assert [join["generation"]["number"] for join in mine.told("join")] == [2]
    assert mine.told("leave") == []


def test_a_worker_that_says_hello_is_welcomed_and_none_joins_before_all_are_there(stages: Any) -> None:
    stage = stages(workers=2)
    first = stage.enter(slot=0)
    (welcome,) = first.told("welcome")
    assert welcome == {
        "do": "welcome", "id": "h0.0", "slot": 0, "wanted": 2, "call_log": [], "loop": False, "generation": 0,
    }  # fmt: skip
    assert first.local.pid == 101
    second = stage.enter(slot=1)
    first.ready()
    stage.act()
    assert first.told("join") == []
    assert stage.records.generation.number == 0
    second.ready()
    assert stage.act() == []
    for rank, actor in enumerate((first, second)):
        (join,) = actor.told("join")
        assert join["worker"] == actor.id == join["generation"]["members"][rank]
        assert (join["generation"]["number"], join["generation"]["position"]) == (1, None)
        (lease, *_) = actor.told("lease")
        assert time.monotonic() < lease["until_s"] <= time.monotonic() + 5
        assert actor.heard.index(lease) < actor.heard.index(join)  # or it could not take a step at once
    stage.act()
    assert len(first.told("join")) == 1  # said once
    assert [event for event, _ in stage.events.events] == ["generation"]


def test_fewer_than_wanted_begin_when_no_other_is_on_the_way(stages: Any) -> None:
    stage = stages(workers=3, least=2)
    first, second, third = (stage.enter(slot) for slot in range(3))
    first.ready()
    stage.act()
    stage.host_workers.remove(third.id, done=False)
    stage.act()
    assert first.told("join") == []  # the second is starting
    second.ready()
    stage.act()
    assert stage.members == (first.id, second.id)


def test_the_others_leave_when_one_is_lost_and_go_on_from_the_newest(stages: Any) -> None:
    stage = stages(workers=3)
    first, second, third = stage.cast(3)
    assert first.told("leave") == []
    stage.host_workers.remove(second.id, done=False)
    assert stage.act() == []
    for actor in (first, third):
        (leave,) = actor.told("leave")
        assert leave == {"do": "leave", "generation": 1, "why": "h0.1 was lost"}
        assert actor.local.leave_sent_s is not None
    first.left(4, 0)
    stage.act()
    assert stage.records.generation.number == 1  # the third is still inside
    third.left(4, 2)
    stage.act()
    now = stage.records.generation
    assert (now.number, now.members, now.position, now.source) == (2, (first.id, third.id), (4, 2), third.id)
    assert [actor.told("join")[-1]["generation"]["number"] for actor in (first, third)] == [2, 2]
    assert first.local.leave_sent_s is None
    assert stage.events.said == ["h0.1 was lost; 2 workers continue at step 4 (generation 2)"]
    assert stage.host_workers.newest == (4, 2)
    for actor in (first, third):
        actor.inside()
    stage.act()
    assert len(first.told("leave")) == 1


def test_one_that_is_told_to_join_and_lost_before_it_did_is_missed(stages: Any) -> None:
    stage = stages(workers=2)
    first, second = (stage.enter(slot) for slot in range(2))
    first.ready()
    second.ready()
    stage.act()
    first.inside()
    stage.act()
    stage.host_workers.remove(second.id, done=False)
    stage.act()
    assert [one["why"] for one in first.told("leave")] == ["h0.1 was lost"]
    first.left(-1, 0)
    stage.act()
    assert stage.members == (first.id,)


def test_a_worker_inside_a_generation_that_is_over_is_killed(stages: Any) -> None:
    stage = stages(workers=2)
    first, second = stage.cast(2)
    stage.host_workers.remove(second.id, done=False)
    stage.act()
    first.left(3)
    stage.act()
    first.say("inside", generation=1)  # which has ended
    assert stage.act() == [first.id]


def test_the_lease_is_told_again_and_again(stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.elastic.host_workers.LEASE_EVERY_S", 0.0)
    stage = stages(workers=1)
    (actor,) = stage.cast(1)
    before = len(actor.told("lease"))
    stage.act()
    stage.act()
    assert len(actor.told("lease")) == before + 2


# -- the call log, and who comes later


def test_a_newcomer_hears_the_call_log_and_is_taken_in_at_the_top_of_a_step(stages: Any) -> None:
    stage = stages(workers=2)
    first, second = stage.cast(2)
    first.say("call_log", first=0, entries=[["Run", None], ["run.replicate", None]])
    second.say("call_log", first=0, entries=[["Run", None]])
    stage.act()
    stage.host_workers.remove(second.id, done=False)
    stage.act()
    first.left(-1, 2)
    stage.act()
    first.inside()
    third = stage.enter(slot=1)
    assert third.told("welcome")[0]["call_log"] == [["Run", None], ["run.replicate", None]]
    assert third.told("welcome")[0]["loop"] is False
    assert third.told("welcome")[0]["generation"] == 2
    # More is settled while it is on its way.
    first.say("call_log", first=2, entries=[["run.batches", {"a": [1, 2.5]}]])
    stage.act()
    assert third.told("call_log") == [
        {"do": "call_log", "entries": [["run.batches", {"a": [1, 2.5]}]], "loop": False, "generation": 2}
    ]
    first.say("loop")
    stage.act()
    assert [one["loop"] for one in third.told("call_log")] == [False, True]
    assert third.told("call_log")[1]["entries"] == []
    third.ready(calls=3, told=2)
    stage.act()
    assert first.told("close")[-1]["generation"] == 2
    assert stage.records.generation.phase is GenerationPhase.CLOSING
    assert third.told("join") == first.told("leave")[1:] == []
    first.left(6)
    stage.act()
    now = stage.records.generation
    assert (now.number, now.members, now.position, now.source) == (3, (first.id, third.id), (6, 0), first.id)
    assert third.told("join")[-1]["generation"]["number"] == 3
    # Nothing is said to it any more once it is ready.
    first.say("call_log", first=3, entries=[["x", 1]])
    stage.act()
    assert len(third.told("call_log")) == 2


def test_what_is_in_the_call_log_stays(stages: Any) -> None:
    stage = stages(workers=1)
    (first,) = stage.cast(1)
    first.say("call_log", first=0, entries=[["a", 1]])
    first.say("call_log", first=0, entries=[["a", 2], ["b", 3]])
    stage.act()
    assert stage.enter(slot=1).told("welcome")[0]["call_log"] == [["a", 1], ["b", 3]]


@pytest.mark.parametrize("value", [math.nan, math.inf, '"' * (LARGEST_RESULT_BYTES // 2)], ids=["nan", "inf", "large"])
def test_whatever_a_call_may_give_is_told_to_newcomers(stages: Any, value: Any) -> None:
    stage = stages(workers=1)
    (first,) = stage.cast(1)
    first.say("call_log", first=0, entries=[["run.log", {"loss": value}]])
    stage.act()
    assert repr(stage.enter(slot=1).told("welcome")[0]["call_log"]) == repr([["run.log", {"loss": value}]])


def test_the_call_log_is_dropped_when_its_results_are_lost_for_all(stages: Any) -> None:
    stage = stages(workers=1)
    (first,) = stage.cast(1)
    first.say("call_log", first=0, entries=[["Run", None]])
    stage.act()
    second = stage.enter(slot=0)
    second.ready(calls=1, told=1)
    first.say("call_log", first=1, entries=[["once", 5]])
    stage.act()
    assert len(stage.keys(CALL_LOG)) == 2
    stage.host_workers.remove(first.id, done=False)
    stage.act()
    now = stage.records.generation
    assert (now.number, now.anew, now.position, now.source) == (2, 2, (-1, 1), second.id)
    assert len(stage.keys(CALL_LOG)) == 1  # what the source has
    third = stage.enter(slot=1)
    assert third.told("welcome")[0]["call_log"] == [["Run", None]]
    assert third.told("welcome")[0]["loop"] is False


def test_a_newcomer_that_came_before_the_others_were_in_the_loop_is_killed(stages: Any) -> None:
    stage = stages(workers=1)
    (first,) = stage.cast(1)
    first.say("call_log", first=0, entries=[["Run", None]])
    stage.act()
    second = stage.enter(slot=1)
    second.ready(calls=1, told=1)
    assert stage.act() == []
    first.say("call_log", first=1, entries=[["once", 5]])
    first.say("loop")
    assert stage.act() == [second.id]


def test_a_newcomer_that_heard_what_was_done_again_is_killed(stages: Any) -> None:
    stage = stages(workers=1)
    (first,) = stage.cast(1)
    first.say("call_log", first=0, entries=[["once", 5]])
    stage.act()
    second, third = stage.enter(slot=0), stage.enter(slot=1)
    stage.host_workers.remove(first.id, done=False)
    second.ready(calls=0, told=1)
    stage.act()
    assert stage.members == (second.id,)  # it begins anew
    third.ready(calls=1, told=1)
    assert stage.act() == [third.id]


# -- keys of a generation


def test_a_get_waits_for_a_set(stages: Any) -> None:
    stage = stages(workers=2)
    first, second = stage.cast(2)
    asked = first.ask("get", "a/b")
    assert first.answer(asked) == []
    assert second.answer(second.ask("check", "a/b")) == [False]
    assert second.answer(second.ask("set", "a/b", b"\x00\xff")) == [None]
    stage.act()
    assert first.answer(asked) == [coded(b"\x00\xff")]
    assert second.answer(second.ask("check", "a/b")) == [True]
    assert second.answer(second.ask("set", "a/b", b"2")) == [None]
    assert first.answer(first.ask("get", "a/b")) == [coded(b"2")]


def test_counting(stages: Any) -> None:
    stage = stages(workers=2)
    first, second = stage.cast(2)
    assert first.answer(first.ask("add", "n", amount=2)) == [2]
    assert second.answer(second.ask("add", "n", amount=3)) == [5]
    assert first.answer(first.ask("get", "n")) == [coded(b"5")]  # as torch's stores have it
    first.ask("set", "m", b"40")
    assert first.answer(first.ask("add", "m", amount=-2)) == [38]
    # Asked by both before anything is done: none is lost.
    for actor in (first, second):
        for _ in range(5):
            actor._asked += 1
            actor.say("kv", id=actor._asked, generation=1, op="add", key="c", value=None, amount=1)
    for _ in range(10):
        stage.act()
    given = [message["value"] for actor in (first, second) for message in actor.told("kv")[-5:]]
    assert sorted(given) == list(range(1, 11))


@pytest.mark.parametrize(
    ("there", "expected", "desired", "answer", "after"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"x", b"new", b"x", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"old", b"x", b"new", b"old", b"old"),
        (b"old", b"", b"new", b"old", b"old"),
    ],
)
def test_compare_set_is_that_of_torchs_stores(
    stages: Any, there: bytes | None, expected: bytes, desired: bytes, answer: bytes, after: bytes | None
) -> None:
    stage = stages(workers=1)
    (actor,) = stage.cast(1)
    if there is not None:
        actor.ask("set", "k", there)
    assert actor.answer(actor.ask("compare_set", "k", desired, expected=coded(expected))) == [coded(answer)]
    assert actor.answer(actor.ask("check", "k")) == [after is not None]
    if after is not None:
        assert actor.answer(actor.ask("get", "k")) == [coded(after)]


def test_delete_and_nonsense(stages: Any) -> None:
    stage = stages(workers=1)
    (actor,) = stage.cast(1)
    actor.ask("set", "k", b"1")
    assert actor.answer(actor.ask("delete", "k")) == [True]
    assert actor.answer(actor.ask("delete", "k")) == [False]
    assert actor.answer(actor.ask("check", "k")) == [False]
    assert actor.answer(actor.ask("frobnicate", "k")) == [None]


def test_a_value_that_the_store_does_not_take_does_not_end_the_host_agent(stages: Any) -> None:
    stage = stages(workers=1)
    (actor,) = stage.cast(1)
    actor.ask("set", "k", b"x" * LARGEST_VALUE_BYTES)
    actor.ask("set", "k" * 300, b"x")
    errors = [message.get("error") for message in actor.told("kv")]
    assert [re.search(r"at most \d+ are allowed", error) is not None for error in errors] == [True, True]
    assert actor.answer(actor.ask("set", "k", b"1")) == [None]


def test_keys_belong_to_one_generation(stages: Any) -> None:
    stage = stages(workers=2)
    first, second = stage.cast(2)
    first.ask("set", "k", b"1")
    waiting = first.ask("get", "never")
    gone = second.ask("get", "never")
    assert stage.keys(KEYS) == [f"{KEYS}1/k"]
    stage.host_workers.remove(second.id, done=False)
    stage.act()
    first.left(2)
    stage.act()
    assert stage.keys(KEYS) == []
    first.inside()
    late = first.ask("get", "k", generation=1)  # said before it knew
    assert first.answer(first.ask("check", "k", generation=2)) == [False]
    assert first.answer(first.ask("set", "never", b"2", generation=2)) == [None]
    assert (first.answer(waiting), first.answer(late), second.answer(gone)) == ([], [], [])


# -- more, fewer, and the end


def test_more_are_wanted_and_then_fewer(stages: Any) -> None:
    stage = stages(workers=1, most=3)
    (first,) = stage.cast(1)
    stage.records.set_want(Want(3, 1, 3))
    stage.act()
    assert stage.records.want.workers == 3
    assert first.told("close") == []  # none is there yet
    second, third = stage.enter(slot=1), stage.enter(slot=2)
    assert second.told("welcome")[0]["wanted"] == 3
    second.ready(told=1)
    third.ready(told=1)
    stage.act()
    assert len(first.told("close")) == 1
    first.left(2)
    stage.act()
    assert stage.members == (first.id, second.id, third.id)
    for actor in stage.actors:
        actor.inside()
    stage.act()
    stage.records.set_want(Want(2, 1, 3))
    stage.act()
    assert [len(actor.told("close")) for actor in stage.actors] == [2, 1, 1]
    for actor in stage.actors:
        actor.left(5)
    stage.act()
    assert stage.members == (first.id, second.id)
    assert [len(actor.told("release")) for actor in stage.actors] == [0, 0, 1]
    stage.host_workers.remove(third.id, done=True)  # it ends with status 0, and is no member
    for actor in (first, second):
        actor.inside()
    assert stage.act() == []
    assert not stage.host_workers.is_over
    assert stage.members == (first.id, second.id)


def test_the_end_is_the_end_of_all_and_newcomers_are_released(stages: Any) -> None:
    stage = stages(workers=3)
    first, second, third = stage.cast(3)
    stage.host_workers.remove(third.id, done=False)
    stage.act()
    for actor in (first, second):
        actor.left(7)
    stage.act()
    for actor in (first, second):
        actor.inside()
    newcomer = stage.enter(slot=2)
    stage.act()
    first.end()
    assert stage.host_workers.is_over
    newcomer.ready(told=2)
    assert stage.act() == []
    assert newcomer.told("release") == newcomer.told("join") == second.told("close") == second.told("leave")[1:] == []
    second.end()
    stage.act()
    assert len(newcomer.told("release")) == 1
    assert stage.host_workers.workers[first.id].record.standing is Standing.DONE
    assert stage.members == (first.id, second.id)


def test_one_that_is_lost_at_the_end_leaves_the_rest_to_those_who_are_left(stages: Any) -> None:
    """One has ended, another dies in its last call: the third finishes it alone."""
    stage = stages(workers=3)
    first, second, third = stage.cast(3)
    first.end()
    stage.act()
    stage.host_workers.remove(second.id, done=False)
    stage.act()
    assert [one["why"] for one in third.told("leave")] == ["h0.1 was lost"]
    third.left(9, 3)
    stage.act()
    assert stage.members == (third.id,)
    third.inside()
    stage.act()
    third.end()
    assert stage.act() == []
    assert stage.host_workers.is_over


def judge(stage: Any, after_s: float = 0.0) -> list[str]:
    """Which of those that have quit are lost."""
    stage.act()
    return [local.id for local in stage.host_workers.resolve_quits(time.monotonic() + after_s)]


def test_one_that_ends_with_status_0_in_its_run_is_missed(stages: Any) -> None:
    stage = stages(workers=3)
    first, second, third = stage.cast(3)
    assert stage.host_workers.remove(second.id, done=True)
    stage.act()
    assert not stage.host_workers.is_over
    assert [one["why"] for one in first.told("leave")] == ["h0.1 was lost"]
    stage.host_workers.release(third.local, "one too many")
    assert not stage.host_workers.remove(third.id, done=True)  # it was sent home


def test_one_that_quits_is_missed_if_another_makes_a_call_without_it(stages: Any) -> None:
    for calling, theirs, after_s, lost in (
        (False, [4, 1], 0.0, []),  # they finish the call before
        (False, [4, 2], 0.0, ["h0.0"]),  # they are in one that it has not made
        (True, [4, 2], 0.0, []),  # it has quit in that call, and so may they
        (True, [4, 2], 6.0, ["h0.0"]),
        (True, [4, 3], 0.0, ["h0.0"]),
        (False, [4, 1], 6.0, ["h0.0"]),  # they wait for it there
    ):
        stage = stages(workers=2)
        first, second = stage.cast(2)
        first.quit(4, 2, calling=calling)
        second.say("beat", position=theirs, calling=True)
        assert judge(stage, after_s) == lost
        assert not stage.host_workers.is_over
        assert stage.host_workers.has_quits is not bool(lost)
        second.say("beat", position=[4, 2], calling=False)  # it may quit, however long that takes
        assert judge(stage, 1000.0) == []


def test_those_who_quit_together_have_ended_the_program(stages: Any) -> None:
    """Also on two hosts, of which each sees its own workers, and of the others what they did."""
    ours = stages(workers=3)
    theirs = stages(workers=3, store=ours.store, host="h1")
    first, second, third = ours.enter(), ours.enter(1), theirs.enter()
    for actor in (first, second, third):
        actor.ready()
    for stage in (ours, theirs, ours, theirs):
        stage.act()
    assert set(ours.members) == {first.id, second.id, third.id}
    for actor in (first, second, third):
        actor.inside()
    for stage in (ours, theirs):
        stage.act()
    first.quit(4, 2)
    assert judge(ours, 9.0) == []
    second.quit(4, 2)
    assert judge(ours, 9.0) == []
    assert judge(theirs) == []
    third.quit(4, 2)
    for stage in (theirs, ours, theirs):
        assert judge(stage) == []
    assert ours.host_workers.is_over
    assert theirs.host_workers.is_over
    assert {local.record.standing for local in ours.host_workers.workers.values()} == {Standing.DONE}


def test_one_that_quits_on_a_host_without_others_is_missed_after_a_while(stages: Any) -> None:
    ours = stages(workers=2)
    theirs = stages(workers=2, store=ours.store, host="h1")
    lonely, other = ours.enter(), theirs.enter()
    for actor in (lonely, other):
        actor.ready()
    for stage in (ours, theirs, ours, theirs):
        stage.act()
    for actor in (lonely, other):
        actor.inside()
    theirs.act()
    lonely.quit(4, 2)
    assert judge(ours, 9.0) == []
    assert judge(ours, 11.0) == [lonely.id]
    for stage in (ours, theirs, ours):
        stage.act()
    assert [one["why"] for one in other.told("leave")] == ["h0.0 was lost"]


def test_how_long_recovery_took_is_noted(stages: Any) -> None:
    stage = stages(workers=1)
    (first,) = stage.cast(1)
    first.say("recovered", took_s=0.25)
    stage.act()
    assert stage.events.events[-1] == ("recovered", {"worker": "h0.0", "generation": 1, "took_s": 0.25})


# ---- how often to save ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None), (1, 1), (200, 200), ("200", 200), (" 7 ", 7),
        ("30s", 30.0), ("5m", 300.0), ("2h", 7200.0), ("0.5s", 0.5), ("1.5h", 5400.0),
    ],
)  # fmt: skip
def test_how_often_to_save(text: str | int | None, expected: float | None) -> None:
    found = read_interval(text)
    assert found == expected
    assert type(found) is type(expected)  # steps are an int, seconds a float


@pytest.mark.parametrize(
    "text", [0, -1, True, 2.5, "", "0", "0s", "-5", "5 m", "m", "1.5", "1e3", "5d", "5ms", "٣", [], b"5"]
)
def test_nonsense_is_not_how_often_to_save(text: Any) -> None:
    with pytest.raises(ValueError, match="is not how often to save: a number of steps such as 200, or a time such as"):
        read_interval(text)


def test_when_a_checkpoint_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def due(saving: CheckpointSaver) -> list[bool]:
        return [saving.is_due(number, ends_epoch=number == 4) for number in range(6)]

    epochs, steps, seconds = (CheckpointSaver(None, every, fence=lambda: True) for every in (None, 3, "30s"))
    assert due(epochs) == [False, False, False, False, True, False]
    assert due(steps) == [False, False, True, False, False, True]
    assert due(seconds) == [False] * 6
    now_s += 30
    assert due(seconds) == [True] * 6
    seconds.begin(3)
    assert due(seconds) == [False] * 6
    assert (seconds.is_saved(3), seconds.is_saved(4)) == (True, False)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(place, signal) of every death that would have been."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(faults, "hook", None)
    monkeypatch.setattr(faults, "context", {})
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((faults.context.get("place", ""), number)))
    return found


def pass_by(place: str, **here: Any) -> None:
    faults.context.update(here, place=place)
    faults.at(place)


@pytest.mark.parametrize("env", [{}, {"LOCKSTEP_FAULTS": ""}, {"LOCKSTEP_FAULTS": " "}])
def test_without_faults_nothing_happens(deaths: list[Any], env: dict[str, str]) -> None:
    faults.arm(Settings.from_env(env))
    assert faults.hook is None
    pass_by("reduced")
    assert deaths == []


def test_a_fault_strikes_where_all_that_it_says_fits(deaths: list[Any]) -> None:
    wanted = [{"at": "reduced", "step": 2, "worker": "h0.1"}, {"at": "applied", "rank": 0, "nth": 2, "signal": 19}]
    faults.arm(Settings(faults=json.dumps(wanted)))
    for step in range(4):
        pass_by("reduced", step=step, worker="h0.0", rank=1)
        pass_by("optimizer", step=step, worker="h0.1")
    pass_by("reduced", step=1, worker="h0.1")
    assert deaths == []
    pass_by("reduced", step=2, worker="h0.1")
    assert deaths == [("reduced", signal.SIGKILL)]
    pass_by("reduced", step=2)  # once, should a worker survive it
    pass_by("applied", rank=0)
    pass_by("applied", rank=1)
    assert len(deaths) == 1
    pass_by("applied", rank=0)
    assert deaths[1:] == [("applied", signal.SIGSTOP)]


@pytest.mark.parametrize(
    "wanted", [{}, {"at": "nowhere"}, {"at": "top", "when": 3}, {"step": 3}], ids=lambda wanted: json.dumps(wanted)
)
def test_a_fault_that_is_not_understood_is_refused(deaths: list[Any], wanted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not understood; places are start, joining"):
        faults.arm(Settings(faults=json.dumps([wanted])))
    assert faults.hook is None


# ---- aborting NCCL: the order of events, which needs no GPU ---------------------------------------------------------


class FakeNccl:
    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.was_marked = False
        self.group: Any = None

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        try:
            abortable_wait.check_aborted(self.group, "a test")
        except PeerLostError:
            self.was_marked = True
        self.aborted.set()


class FakeGroup:
    """What GenerationGroups uses of a torch group over NCCL."""

    def __init__(self) -> None:
        self.nccl = FakeNccl()
        self.nccl.group = self

    def _get_backend(self, device: torch.device) -> FakeNccl:
        return self.nccl


def groups_over_nccl(monkeypatch: pytest.MonkeyPatch) -> tuple[GenerationGroups, FakeGroup]:
    agent: Any = SimpleNamespace(on_leave=None, leave_reason=lambda: None, generation=1)
    groups, group = GenerationGroups(agent, slot=0, backend="nccl", device="cuda"), FakeGroup()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    groups._connections = ConnectionTracker(2)
    groups._connections.stop_tracking()
    groups._set_backend("NCCL")
    groups.add_group(cast(Any, group))
    return groups, group


def test_nccl_is_aborted_when_the_training_thread_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, group = groups_over_nccl(monkeypatch)
    groups.abort()
    assert not group.nccl.aborted.wait(0.1)  # it may be inside a call of NCCL
    groups.leave()
    assert group.nccl.aborted.wait(0.1)
    assert group.nccl.was_marked


def test_nccl_is_aborted_at_once_while_the_training_thread_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, group = groups_over_nccl(monkeypatch)
    abortable_wait._waits_on_device.add(cast(Any, group))
    groups.abort()
    assert group.nccl.aborted.wait(0.15)
    assert group.nccl.was_marked
    groups.leave()


def test_nccl_is_aborted_after_a_while_if_the_training_thread_stays_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, group = groups_over_nccl(monkeypatch)
    groups.abort()
    assert group.nccl.aborted.wait(2.0)
    groups.leave()


def test_the_environment_of_nccl_keeps_what_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_RETRY_CNT", "9")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # with which torch would end the process
    groups_over_nccl(monkeypatch)
    assert os.environ["NCCL_SOCKET_RETRY_CNT"] == "9"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["NCCL_RAS_ENABLE"] == "0"
