"""Who trains together and from where on: by table, for all small cases, and on random schedules of faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lockstep.elastic.membership import (
    START,
    Generation,
    GenerationPhase,
    HostRecord,
    OrderAction,
    Position,
    Standing,
    Want,
    Worker,
    WorkerOrder,
    next_generation,
    orders,
)
from lockstep.elastic.record_json import as_json, from_json

CAMPAIGN = Path(__file__).resolve().parent.parent / "campaigns" / "membership.py"
sys.path.append(str(CAMPAIGN.parent))
from membership import Protection, Strike, draw, find_violation, main, search, shrink, tell_story  # noqa: E402

# The generation of most tests: number 3, which began at step 4.
A, B, C = "h0.1", "h0.2", "h1.1"
NOW = Generation(3, (A, B, C), position=(4, 0), source=A, anew=1)
WANT = Want(workers=3, least=1, most=6)


def starting(id_: str) -> Worker:
    return Worker(id_, Standing.STARTING)


def ready(id_: str, calls: int = 0, told: int = 0) -> Worker:
    return Worker(id_, Standing.READY, told, (-1, calls))


def inside(id_: str, generation: int = 3) -> Worker:
    return Worker(id_, Standing.INSIDE, generation, (4, 0))


def left(id_: str, position: Position = (5, 0), generation: int = 3) -> Worker:
    return Worker(id_, Standing.LEFT, generation, position)


def quit_(id_: str) -> Worker:
    return Worker(id_, Standing.QUIT, 3, (5, 2))


def done(id_: str) -> Worker:
    return Worker(id_, Standing.DONE, 3, (5, 2))


def hosts(*workers: Worker) -> list[HostRecord]:
    names = sorted({worker.id.partition(".")[0] for worker in workers})
    return [HostRecord(name, tuple(worker for worker in workers if worker.id.startswith(f"{name}."))) for name in names]


# ------------------------------------------------------------------------------------------------- the next generation


@pytest.mark.parametrize(
    ("workers", "want", "members", "position", "source", "why"),
    [
        pytest.param(
            [left(A), left(B)], WANT, (A, B), (5, 0), A, "h1.1 was lost", id="the others go on"
        ),
        pytest.param(
            [left(A, (5, 0)), left(B, (5, 1)), left(C, (5, 1))], WANT, (A, B, C), (5, 1), B, "h0.1, h0.2 and h1.1 left",
            id="the newest wins, the first of them is the source",
        ),
        pytest.param(
            [left(A, (4, 1)), left(B, (5, 0))], WANT, (A, B), (5, 0), B, "h1.1 was lost", id="a top beats many calls"
        ),
        pytest.param(
            [left(A), left(B), left(C), ready("h0.10"), ready("h0.9")], Want(5, 1, 6), (A, B, C, "h0.9", "h0.10"),
            (5, 0), A, "h0.9 and h0.10 join", id="newcomers come last, by number",
        ),
        pytest.param(
            [left(A), left(B), ready("h1.2"), ready("h1.3")], WANT, (A, B, "h1.2"), (5, 0), A, "h1.1 was lost",
            id="no more newcomers than wanted",
        ),
        pytest.param(
            [left(A, (5, 1)), left(B, (5, 1)), ready("h1.2")], WANT, (A, B), (5, 1), A, "h1.1 was lost",
            id="no newcomers in the midst of a step",
        ),
        pytest.param(
            [left(A, (5, 1)), ready("h1.2")], Want(3, 2, 3), (A,), (5, 1), A, "h0.2 and h1.1 were lost",
            id="too few finish their step",
        ),
        pytest.param(
            [left(A, (5, 1)), left(C, (-1, 2))], WANT, (A,), (5, 1), A, "h0.2 was lost",
            id="one that never got any state is a newcomer in the midst of a step",
        ),
        pytest.param(
            [left(A, (5, 0)), left(C, (-1, 2))], WANT, (A, C), (5, 0), A, "h0.2 was lost",
            id="and may go on at the top of the loop",
        ),
        pytest.param(
            [left(A), left(B), left(C)], Want(2, 1, 6), (A, C), (5, 0), A, "2 workers are wanted",
            id="one is released, on the host that has more",
        ),
        pytest.param(
            [left(A), left(B), left(C, (5, 1))], Want(1, 1, 6), (C,), (5, 1), C, "1 worker is wanted",
            id="but never the source",
        ),
        pytest.param(
            [done(A), left(B, (5, 0))], Want(3, 2, 3), (B,), (5, 0), B, "h1.1 was lost",
            id="at the end no worker waits for newcomers",
        ),
        pytest.param(
            [done(A), left(B, (5, 0)), ready("h0.3")], WANT, (B,), (5, 0), B, "h1.1 was lost",
            id="nor takes them in",
        ),
        pytest.param(
            [ready("h1.2", 2, 3), ready("h0.3"), ready("h0.4", 2, 2)], WANT, ("h0.3", "h0.4", "h1.2"), (-1, 2), "h0.4",
            "h0.1, h0.2 and h1.1 were lost", id="none survived: the newcomer that replayed most is the source",
        ),
        pytest.param(
            [ready("h0.3"), ready("h0.4")], WANT, ("h0.3", "h0.4"), None, None, "h0.1, h0.2 and h1.1 were lost",
            id="none survived and none is on the way",
        ),
        pytest.param(
            [ready("h0.3"), ready("h0.4"), starting("h0.5")], Want(2, 1, 3), ("h0.3", "h0.4"), None, None,
            "h0.1, h0.2 and h1.1 were lost", id="none survived and there are enough",
        ),
    ],
)  # fmt: skip
def test_forming(
    workers: list[Worker],
    want: Want,
    members: tuple[str, ...],
    position: Position | None,
    source: str | None,
    why: str,
) -> None:
    formed = next_generation(NOW, hosts(*workers), want)
    assert formed is not None
    assert replace(formed, anew=0) == Generation(4, members, GenerationPhase.RUNNING, position, source, why)


@pytest.mark.parametrize(
    ("workers", "want"),
    [
        pytest.param([inside(A), inside(B), inside(C)], WANT, id="all is well"),
        pytest.param([left(A), inside(B)], WANT, id="a worker has yet to leave"),
        pytest.param([left(A), left(B), left(C, generation=2)], WANT, id="or to join"),
        pytest.param([left(A), left(B), ready(C)], WANT, id="a member is no newcomer, it may be joining"),
        pytest.param([left(A), starting("h1.2")], Want(3, 2, 3), id="too few"),
        pytest.param([left(A, (-1, 3))], Want(3, 2, 3), id="too few before the loop"),
        pytest.param([left(A), ready("h1.2", 2, told=0)], Want(3, 2, 3), id="what the newcomer replayed is void"),
        pytest.param([ready("h0.3"), starting("h0.4")], WANT, id="none survived, more are on their way"),
        pytest.param([ready("h0.3")], Want(3, 2, 3), id="none survived and too few are there"),
        pytest.param([], WANT, id="none at all"),
        pytest.param([done(A), done(B), done(C)], WANT, id="the end"),
        pytest.param([done(A), ready("h1.2"), ready("h1.3"), ready("h1.4")], WANT, id="the end, though a worker died"),
        pytest.param([done(A), inside(B), inside(C), ready("h0.3")], Want(4, 4, 4), id="the end is near"),
    ],
)
def test_nothing_to_change(workers: list[Worker], want: Want) -> None:
    assert next_generation(NOW, hosts(*workers), want) is None


@pytest.mark.parametrize(
    ("workers", "want", "why"),
    [
        ([ready("h0.3")], Want(4, 1, 6), "h0.3 joins"),
        ([ready("h0.3"), ready("h0.4"), ready("h0.5")], Want(5, 1, 6), "h0.3 and h0.4 join"),
        ([], Want(2, 1, 6), "2 workers are wanted"),
        ([], Want(4, 4, 4), "at least 4 workers are wanted"),
    ],
)
def test_closing(workers: list[Worker], want: Want, why: str) -> None:
    whole = [inside(A), inside(B), left(C, generation=2)]
    closing = replace(NOW, phase=GenerationPhase.CLOSING, why=why, shrinks=want.workers < len(NOW.members))
    assert next_generation(NOW, hosts(*whole, *workers), want) == closing
    assert next_generation(closing, hosts(*whole, *workers), want) is None
    assert next_generation(closing, hosts(*whole), WANT) is None  # it is not taken back
    of_all = hosts(left(A), left(B), left(C))
    assert next_generation(closing, of_all, WANT) == next_generation(NOW, of_all, WANT)


def test_newcomers_that_are_not_wanted_or_void_close_nothing() -> None:
    whole = [inside(A), inside(B), inside(C)]
    assert next_generation(NOW, hosts(*whole, ready("h0.3")), WANT) is None
    assert next_generation(NOW, hosts(*whole, ready("h0.3", 1, told=0), starting("h0.4")), Want(4, 1, 4)) is None
    assert next_generation(NOW, hosts(inside(A), inside(B), ready(C)), Want(4, 1, 4)) is None


def test_the_first_generation() -> None:
    formed = next_generation(Generation(0), hosts(ready(A), ready(C)), Want(2, 1, 2))
    assert formed == Generation(1, (A, C), why="h0.1 and h1.1 join", anew=1)
    assert next_generation(Generation(0), [], WANT) is None


def test_newcomers_are_in_natural_order() -> None:
    names = ["h0.9", "h0.10", "h0." + "1" * 5000, "h2.1", "h10.1", "k0.1"]
    formed = next_generation(Generation(0), hosts(*map(ready, reversed(names))), Want(6, 6, 6))
    assert formed is not None
    assert formed.members == tuple(names)


@pytest.mark.parametrize(
    ("now", "workers", "anew"),
    [
        pytest.param(NOW, [left(A)], 1, id="nothing is lost"),
        pytest.param(NOW, [left(B, (3, 1))], 1, id="a step is lost, which no newcomer replays"),
        pytest.param(NOW, [left(C, (-1, 2))], 4, id="all state is lost with the source"),
        pytest.param(NOW, [ready("h0.3")], 4, id="all are lost"),
        pytest.param(replace(NOW, position=(-1, 2)), [left(C, (-1, 2))], 1, id="no call is lost"),
        pytest.param(replace(NOW, position=(-1, 2)), [left(C, (-1, 1))], 4, id="a call is lost"),
        pytest.param(
            replace(NOW, position=(-1, 2)), [left(C, START), ready("h0.3", 2, told=2)], 1, id="a newcomer has it"
        ),
    ],
)
def test_when_what_newcomers_replayed_is_void(now: Generation, workers: list[Worker], anew: int) -> None:
    formed = next_generation(now, hosts(*workers), WANT)
    assert formed is not None
    assert formed.anew == anew


ENDED = (Standing.DONE, Standing.QUIT)


def small_cases() -> Iterator[tuple[Generation, list[Worker], Want]]:
    """Two members and one that is none, in every standing that can be."""
    member = [None, ready, inside, done, quit_, lambda id_: left(id_, (3, 1), 2)]
    member += [lambda id_, at=at: left(id_, at) for at in ((-1, 1), (4, 0), (4, 1), (5, 0))]  # type: ignore[misc]
    newcomer = [None, starting, ready, lambda id_: ready(id_, 2, 2), lambda id_: ready(id_, 2, 0)]
    for phase, position in product(GenerationPhase, (None, (-1, 1), (4, 0))):
        now = Generation(3, (A, C), phase, position, None if position is None else A, anew=1)
        for one, other, third, many in product(member, member, newcomer, (1, 2, 3)):
            workers = [make(id_) for make, id_ in ((one, A), (other, C), (third, B)) if make is not None]
            for least in range(1, many + 1):
                yield now, workers, Want(many, least, 3)


def test_all_small_cases() -> None:
    cases = 0
    for now, workers, want in small_cases():
        cases += 1
        by_id = {worker.id: worker for worker in workers}
        present = [by_id[member] for member in now.members if member in by_id]
        survivors = [worker for worker in present if worker.standing is Standing.LEFT and worker.generation == 3]
        following = next_generation(now, hosts(*workers), want)
        given = [order for name in ("h0", "h1") for order in orders(now, hosts(*workers), name)]
        told = {order.worker: order.do for order in given}
        broken = len(present) < 2 or survivors != []

        if following is not None and following.number == 3:
            assert not broken
            shrinks = len(now.members) > want.workers or any(by_id[member].is_leaving for member in now.members)
            assert following == replace(now, phase=GenerationPhase.CLOSING, why=following.why, shrinks=shrinks)
        elif following is not None:
            assert following.number == 4
            assert following.phase is GenerationPhase.RUNNING
            assert all(worker in survivors or worker.standing in ENDED for worker in present)
            assert set(following.members) <= set(by_id)
            assert 1 <= len(following.members) <= want.workers
            entering = [by_id[member] for member in following.members]
            assert all(worker in survivors or worker.standing is Standing.READY for worker in entering)
            newest = max(worker.position for worker in entering)
            assert all(worker.position <= newest for worker in survivors)
            if following.source is None:
                assert following.position is None
                assert newest == START
                assert not survivors
            else:
                assert by_id[following.source].position == following.position == newest
                inside_a_step = newest[0] >= 0 and newest[1] > 0
                assert not inside_a_step or all(worker.position[0] >= 0 for worker in entering)
            # No worker is left without an order, and those that go on are told nothing but to join.
            after = [order for name in ("h0", "h1") for order in orders(following, hosts(*workers), name)]
            assert {o.worker for o in after if o.do is OrderAction.JOIN} == set(following.members)
            assert {o.worker for o in after if o.do is OrderAction.RELEASE} == {
                w.id for w in survivors if w not in entering
            }
        elif broken:
            # Those that it waits for have been told.
            for worker in present:
                out = worker in survivors or worker.standing in ENDED
                assert out == (worker.id not in told)
                assert out or told[worker.id] is OrderAction.LEAVE

        assert all(order.generation == 3 for order in given)
        assert len(told) == len(given)
        assert orders(now, hosts(*workers), "h2") == []
    assert cases > 10_000


# -------------------------------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize(
    ("now", "workers", "expected"),
    [
        pytest.param(NOW, [inside(A), inside(B), inside(C)], {}, id="all is well"),
        pytest.param(
            NOW, [ready(A), left(B, generation=2), inside(C)], {A: OrderAction.JOIN, B: OrderAction.JOIN}, id="join"
        ),
        pytest.param(
            NOW, [ready(A, 2, told=3), inside(B), inside(C)], {A: OrderAction.JOIN}, id="join, whatever it was told"
        ),
        pytest.param(NOW, [inside(A), left(B), inside(C)], {A: OrderAction.LEAVE}, id="a worker left"),
        pytest.param(
            NOW,
            [ready(A), left(B, generation=2)],
            {A: OrderAction.LEAVE, B: OrderAction.LEAVE},
            id="before they joined",
        ),
        pytest.param(NOW, [done(A), inside(B), inside(C)], {}, id="a worker is done"),
        pytest.param(NOW, [done(A), inside(B)], {B: OrderAction.LEAVE}, id="a worker is done and another is lost"),
        pytest.param(
            replace(NOW, phase=GenerationPhase.CLOSING),
            [inside(A), ready(B), inside(C)],
            {A: OrderAction.CLOSE, B: OrderAction.JOIN},
            id="closing",
        ),
        pytest.param(
            replace(NOW, phase=GenerationPhase.CLOSING),
            [inside(A), left(C)],
            {A: OrderAction.LEAVE},
            id="closing and broken",
        ),
        pytest.param(
            NOW,
            [inside(A), inside(B), inside(C), inside("h0.3", 2), left("h0.4", generation=2), ready("h0.5")],
            {"h0.3": OrderAction.KILL, "h0.4": OrderAction.RELEASE},
            id="strangers",
        ),
        pytest.param(
            NOW, [inside(A, 2), inside(B), inside(C)], {A: OrderAction.KILL}, id="a member inside an older one"
        ),
        pytest.param(
            NOW,
            [inside(A), inside(B), inside(C), ready("h0.3", 1, told=0), ready("h0.4", 1, told=1), starting("h0.5")],
            {"h0.3": OrderAction.KILL},
            id="a newcomer that replayed what is void",
        ),
        pytest.param(NOW, [done(A), done(B), ready("h0.3")], {"h0.3": OrderAction.RELEASE}, id="the end"),
        pytest.param(
            NOW,
            [inside(A, 4), left(B, generation=4), left("h0.3", generation=4), inside(C)],
            {},
            id="hosts were read later than the generation",
        ),
        pytest.param(Generation(0), [ready(A), starting(B)], {}, id="there was no generation yet"),
    ],
)
def test_orders(now: Generation, workers: list[Worker], expected: dict[str, OrderAction]) -> None:
    given = orders(now, hosts(*workers), "h0")
    assert {order.worker: order.do for order in given} == expected


def test_orders_say_why() -> None:
    assert orders(NOW, hosts(inside(A), inside(C)), "h1") == [WorkerOrder(C, OrderAction.LEAVE, 3, "h0.2 was lost")]
    closing = replace(NOW, phase=GenerationPhase.CLOSING, why="h0.3 joins")
    assert orders(closing, hosts(inside(A), inside(B), inside(C)), "h1") == [
        WorkerOrder(C, OrderAction.CLOSE, 3, "h0.3 joins")
    ]


def test_a_host_that_was_away_does_not_join_what_it_finds() -> None:
    there = hosts(inside(A), left(B, generation=2), ready(C))
    assert orders(NOW, there, "h1", found=3) == [WorkerOrder(C, OrderAction.LEAVE, 3, "h1 was away")]
    assert orders(NOW, there, "h1", found=2) == [WorkerOrder(C, OrderAction.JOIN, 3)]


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "record",
    [
        Generation(0),
        replace(NOW, phase=GenerationPhase.CLOSING, why="h0.3 joins"),
        HostRecord("h0"),
        HostRecord("node.example", (Worker("node.example.12", Standing.LEFT, 3, (5, 1)),)),
        HostRecord("h0", (ready(A, 2, 1), starting(B), done("h0.3"), inside("h0.4"))),
        Want(2, 1, 8),
    ],
)
def test_records_survive_json(record: Generation | HostRecord | Want) -> None:
    assert from_json(type(record), json.loads(json.dumps(as_json(record)))) == record


GENERATION, HOST, WISH = as_json(NOW), as_json(HostRecord("h0", (left(A), left(B)))), as_json(WANT)
WORKER = as_json(left(A))


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Generation, None, "Generation: None is not an object"),
        (Generation, [1], "Generation: .* is not an object"),
        (Generation, {}, "Generation: has the fields"),
        (Generation, GENERATION | {"more": 1}, "Generation: has the fields"),
        (Generation, GENERATION | {"number": "3"}, "Generation.number: '3' is not a whole number"),
        (Generation, GENERATION | {"number": True}, "Generation.number: True is not a whole number"),
        (Generation, GENERATION | {"number": 3.0}, "Generation.number: 3.0 is not a whole number"),
        (Generation, GENERATION | {"number": -1}, "Generation.number: -1 is not a whole number"),
        (Generation, GENERATION | {"members": "h0.1"}, "Generation.members: 'h0.1' is not a list"),
        (Generation, GENERATION | {"members": [1]}, "Generation.members: 1 is not a string"),
        (Generation, GENERATION | {"members": [A, A]}, "a worker is a member twice"),
        (Generation, GENERATION | {"phase": "ended"}, "Generation.phase: 'ended' is none of"),
        (Generation, GENERATION | {"phase": ["running"]}, r"Generation.phase: \['running'\] is not a string"),
        (Generation, GENERATION | {"position": [1]}, "Generation.position: .* is not a pair"),
        (Generation, GENERATION | {"position": [-2, 0]}, "Generation.position: -2 is not a whole number"),
        (Generation, GENERATION | {"position": [0, -1]}, "Generation.position: -1 is not a whole number"),
        (Generation, GENERATION | {"source": "h9.9"}, "the source 'h9.9' is no member"),
        (Generation, GENERATION | {"position": None}, "the source 'h0.1' has no position"),
        (Generation, GENERATION | {"why": None}, "Generation.why: None is not a string"),
        (Generation, GENERATION | {"anew": 4}, "anew is 4, after its number, 3"),
        (HostRecord, HOST | {"name": 0}, "HostRecord.name: 0 is not a string"),
        (HostRecord, HOST | {"workers": {}}, "HostRecord.workers: {} is not a list"),
        (HostRecord, HOST | {"workers": [None]}, "HostRecord.workers: Worker: None is not an object"),
        (
            HostRecord,
            HOST | {"workers": [WORKER | {"standing": "gone"}]},
            "HostRecord.workers: Worker.standing: 'gone' is none of",
        ),
        (HostRecord, HOST | {"workers": [WORKER | {"id": "h1.1"}]}, "'h1.1' is not <host>.<serial> with the host 'h0'"),
        (HostRecord, HOST | {"workers": [WORKER | {"id": "h0.1.1"}]}, "'h0.1.1' is not <host>.<serial>"),
        (HostRecord, HOST | {"workers": [WORKER, WORKER]}, "a worker is on the list twice"),
        (HostRecord, HOST | {"workers": [WORKER | {"standing": "ready"}]}, "'h0.1' is ready, so its top is -1, not 5"),
        (Want, WISH | {"least": 0}, "1 <= least <= workers <= most does not hold: 0, 3, 6"),
        (Want, WISH | {"workers": 7}, "does not hold: 1, 7, 6"),
        (Want, WISH | {"most": None}, "Want.most: None is not a whole number"),
        (Want, "x" * 10_000, "^.{1,200}$"),
    ],
)
def test_wrong_json_is_refused_and_named(
    kind: type[Generation] | type[HostRecord] | type[Want], value: object, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(kind, value)


# ----------------------------------------------------------------------------------------------------------- schedules


def test_schedules_hold() -> None:
    assert search(0, 1500, None) is None


@pytest.mark.parametrize("strike", Strike)
def test_schedules_hold_with_one_kind_of_fault(strike: Strike) -> None:
    assert search(10_000, 150, None, [strike]) is None


# Some take a rare turn of events, so the faults that lead to it are given.
@pytest.mark.parametrize(
    ("protection", "strikes", "words"),
    [
        (Protection.FENCING, list(Strike), "takes a contribution of generation"),
        (Protection.LEASES, [Strike.CUT_STORE], "has begun"),
        (Protection.AGREEMENT, list(Strike), "has .*, h|differ"),
        (Protection.SWAPPING, list(Strike), "two generations have the number"),
        (Protection.LEAVING, [Strike.STOP_HOST], "has begun|joins generation"),
        (Protection.PASSING, [Strike.CUT_NEXT], "has begun"),
        (Protection.SETTLING, [Strike.KILL_WORKER], "replayed|differ"),
    ],
)
def test_no_protection_can_be_spared(protection: Protection, strikes: list[Strike], words: str) -> None:
    found = search(0, 3000, protection, strikes)
    assert found is not None
    assert find_violation(found, None) is None
    assert re.search(words, find_violation(found, protection) or "")


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != replace(draw(8), seed=7)
    assert tell_story(draw(7), None) == tell_story(draw(7), None)


def test_a_failing_schedule_is_made_shorter() -> None:
    found = search(0, 3000, Protection.AGREEMENT)
    assert found is not None
    short = shrink(found, Protection.AGREEMENT, tries=50)
    assert find_violation(short, Protection.AGREEMENT) is not None
    assert len(short.faults) <= 1
    assert short.steps <= found.steps


@pytest.mark.slow
def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "50", "--workers", "1", "--seed", "3"]) == 0
    shown = capfd.readouterr()
    assert shown.out == "50 schedules hold\n"
    assert "50 of 50 schedules" in shown.err
    command = [sys.executable, str(CAMPAIGN), "--schedules", "60", "--workers", "1", "--without"]
    red = subprocess.run([*command, "agreement"], capture_output=True, text=True, timeout=300)
    assert red.returncode == 1, red.stderr
    assert red.stdout.splitlines()[-1].startswith("VIOLATION: ")
    assert subprocess.run([*command, "sense"], capture_output=True, timeout=300).returncode == 2
