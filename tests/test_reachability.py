"""Hosts that cannot reach each other: who is left out, and probing real ports."""

import selectors
import socket
import time

import pytest

from lockstep.elastic.other_hosts import PROBE_TIMEOUT_S, ProgressClock, Reachability, left_out, unreachable_from


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


def test_all_conclude_the_same_whatever_the_order():
    complaints = {"a": ["c"], "b": ["d", "c"], "c": ["a"], "d": []}
    assert left_out(complaints) == left_out(dict(reversed(complaints.items()))) == {"c", "d"}


def test_unreachable_hosts_are_named_from_either_side():
    assert unreachable_from("b", {"a": ["b"], "b": ["c"], "c": []}) == ["a", "c"]


def test_progress_counts_from_the_beginning_of_a_generation():
    progress = ProgressClock()
    assert progress.stalled_s(10.0, 1, 0) == 0.0
    assert progress.stalled_s(14.0, 1, 0) == 4.0
    assert not progress.has_progressed
    assert progress.stalled_s(15.0, 1, 1) == 0.0
    assert progress.has_progressed
    assert progress.stalled_s(18.0, 1, 1) == 3.0
    assert progress.stalled_s(19.0, 2, 1) == 0.0
    assert not progress.has_progressed


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def two(selector):
    hosts = [Reachability("127.0.0.1", selector) for _ in range(2)]
    yield hosts
    for one in hosts:
        one.close()
    assert not selector.get_map()


def turn(selector, for_s: float) -> None:
    end_s = time.monotonic() + for_s
    while (left_s := end_s - time.monotonic()) > 0:
        for key, mask in selector.select(left_s):
            key.data.ready(mask)


def test_a_port_that_is_there_is_reached(selector, two):
    mine, other = two
    mine.probe(100.0, {"other": other.address}, probe_all=False)
    turn(selector, 0.2)
    assert mine.unreached(200.0, 0.0, include_never_reached=True) == set()


def test_a_port_that_is_gone_is_missed_after_a_while_and_found_again(selector, two):
    mine, other = two
    mine.probe(100.0, {"other": other.address}, probe_all=True)
    turn(selector, 0.2)
    address = other.address
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # no process listens there
        moved = {"other": closed.getsockname()}
        mine._peers["other"].address = moved["other"]
        mine.probe(102.0, moved, probe_all=True)
        turn(selector, 0.2)
    assert mine.unreached(103.0, 5.0, include_never_reached=False) == set()
    assert mine.unreached(107.5, 5.0, include_never_reached=False) == {"other"}
    mine._peers["other"].address = address
    mine.probe(108.0, {"other": address}, probe_all=False)  # one that was missed is looked for in any case
    turn(selector, 0.2)
    assert mine.unreached(200.0, 0.0, include_never_reached=True) == set()


@pytest.fixture
def silent():
    """An address that does not answer, not even to refuse: its queue is full."""
    with socket.socket() as listener, socket.socket() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting.connect(listener.getsockname())
        yield listener.getsockname()


def test_a_port_that_never_answered_counts_only_if_nothing_ever_went_on(selector, two, silent):
    mine, _ = two
    mine.probe(100.0, {"far": silent}, probe_all=True)
    turn(selector, 0.2)
    assert mine.unreached(110.0, 5.0, include_never_reached=True) == set()  # we are still waiting for an answer
    mine.probe(100.0 + PROBE_TIMEOUT_S + 0.1, {"far": silent}, probe_all=True)
    assert mine.unreached(110.0, 5.0, include_never_reached=True) == {"far"}
    assert mine.unreached(110.0, 5.0, include_never_reached=False) == set()


def test_a_host_that_is_gone_is_forgotten(selector, two, silent):
    mine, _ = two
    mine.probe(100.0, {"far": silent}, probe_all=True)
    mine.probe(101.0, {}, probe_all=True)
    assert mine.unreached(200.0, 0.0, include_never_reached=True) == set()
