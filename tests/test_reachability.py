"""Hosts that cannot see each other: who is left out, and knocking at real doors."""

import selectors
import socket
import time

import pytest

from lockstep.elastic.other_hosts import Moved
from lockstep.elastic.reachability import KNOCK_S, Doors, left_out, partners


@pytest.mark.parametrize(
    ("complaints", "out"),
    [
        ({}, set()),
        ({"a": [], "b": []}, set()),
        ({"a": ["b"], "b": []}, {"b"}),  # one direction is enough, and of two the last by name goes
        ({"a": [], "b": ["a"]}, {"b"}),
        ({"a": ["c"], "b": ["c"], "c": []}, {"c"}),
        ({"a": ["b", "c"], "b": ["a"], "c": ["a"]}, {"a"}),  # it alone is in all pairs
        ({"a": ["b"], "c": ["d"]}, {"b", "d"}),
        ({"a": ["a"]}, set()),
    ],
)
def test_as_few_as_possible_are_left_out(complaints, out):
    assert left_out(complaints) == out


def test_everybody_concludes_the_same_whatever_the_order():
    complaints = {"a": ["c"], "b": ["d", "c"], "c": ["a"], "d": []}
    assert left_out(complaints) == left_out(dict(reversed(complaints.items()))) == {"c", "d"}


def test_partners_are_named_from_either_side():
    assert partners("b", {"a": ["b"], "b": ["c"], "c": []}) == ["a", "c"]


def test_progress_counts_from_the_beginning_of_a_generation():
    moved = Moved()
    assert moved.still_s(10.0, 1, 0) == 0.0
    assert moved.still_s(14.0, 1, 0) == 4.0
    assert not moved.ever
    assert moved.still_s(15.0, 1, 1) == 0.0
    assert moved.ever
    assert moved.still_s(18.0, 1, 1) == 3.0
    assert moved.still_s(19.0, 2, 1) == 0.0
    assert not moved.ever


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def two(selector):
    doors = [Doors("127.0.0.1", selector) for _ in range(2)]
    yield doors
    for one in doors:
        one.close()
    assert not selector.get_map()


def turn(selector, for_s: float) -> None:
    end_s = time.monotonic() + for_s
    while (left_s := end_s - time.monotonic()) > 0:
        for key, mask in selector.select(left_s):
            key.data.ready(mask)


def test_a_door_that_is_there_is_reached(selector, two):
    mine, other = two
    mine.look(100.0, {"other": other.own}, all_of_them=False)
    turn(selector, 0.2)
    assert mine.unreached(200.0, 0.0, also_new=True) == set()


def test_a_door_that_is_gone_is_missed_after_a_while_and_found_again(selector, two):
    mine, other = two
    mine.look(100.0, {"other": other.own}, all_of_them=True)
    turn(selector, 0.2)
    door = other.own
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        moved = {"other": closed.getsockname()}
        mine._others["other"].door = moved["other"]
        mine.look(102.0, moved, all_of_them=True)
        turn(selector, 0.2)
    assert mine.unreached(103.0, 5.0, also_new=False) == set()
    assert mine.unreached(107.5, 5.0, also_new=False) == {"other"}
    mine._others["other"].door = door
    mine.look(108.0, {"other": door}, all_of_them=False)  # one that was missed is looked for in any case
    turn(selector, 0.2)
    assert mine.unreached(200.0, 0.0, also_new=True) == set()


@pytest.fixture
def silent():
    """An address where nobody answers, not even to refuse: its queue is full."""
    with socket.socket() as listener, socket.socket() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting.connect(listener.getsockname())
        yield listener.getsockname()


def test_a_door_that_never_answered_counts_only_if_nothing_ever_went_on(selector, two, silent):
    mine, _ = two
    mine.look(100.0, {"far": silent}, all_of_them=True)
    turn(selector, 0.2)
    assert mine.unreached(110.0, 5.0, also_new=True) == set()  # we are still waiting for an answer
    mine.look(100.0 + KNOCK_S + 0.1, {"far": silent}, all_of_them=True)
    assert mine.unreached(110.0, 5.0, also_new=True) == {"far"}
    assert mine.unreached(110.0, 5.0, also_new=False) == set()


def test_a_host_that_is_gone_is_forgotten(selector, two, silent):
    mine, _ = two
    mine.look(100.0, {"far": silent}, all_of_them=True)
    mine.look(101.0, {}, all_of_them=True)
    assert mine.unreached(200.0, 0.0, also_new=True) == set()
