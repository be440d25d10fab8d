"""Hatches: memory comes out in the order in which it was put in, or not at all."""

import os

import pytest

from lockstep.data import fd_channel
from lockstep.data.fd_channel import Hatch


@pytest.fixture
def way():
    made = Hatch()
    yield made
    made.close()


def memory(text: bytes) -> int:
    handle = os.memfd_create("test")
    os.write(handle, text)
    return handle


def put(way: Hatch, text: bytes) -> int:
    handle = memory(text)
    label = way.put(handle)
    os.close(handle)
    return label


def read(handle: int) -> bytes:
    found = os.pread(handle, 100, 0)
    os.close(handle)
    return found


def test_what_was_put_in_comes_out_in_order(way):
    labels = [put(way, text) for text in (b"one", b"two", b"three")]
    assert [read(fd_channel.take(way.number, label)) for label in labels] == [b"one", b"two", b"three"]


def test_it_comes_from_another_process(way):
    child = os.fork()
    if child == 0:
        put(way, b"from a child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read(fd_channel.take(way.number, 1)) == b"from a child"


def test_memory_of_a_batch_that_never_came_is_thrown_away(way):
    before = len(os.listdir("/proc/self/fd"))
    put(way, b"of a batch that could not be pickled")
    label = put(way, b"of the next one")
    assert read(fd_channel.take(way.number, label)) == b"of the next one"
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_missing_is_an_error(way):
    label = put(way, b"one")
    put(way, b"two")
    assert read(fd_channel.take(way.number, label)) == b"one"
    with pytest.raises(ConnectionError, match="memory 1 of a loader process is missing, and 2 came"):
        fd_channel.take(way.number, label)


def test_closing_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    way = Hatch()
    put(way, b"never taken")
    way.close()
    assert len(os.listdir("/proc/self/fd")) == before
